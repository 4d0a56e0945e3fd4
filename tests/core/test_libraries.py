"""Compiled C++ that a later process finds again; damaged and unwritable folders are tests of the phylogenetic code."""

import ctypes
import subprocess
import sys

import pytest

from bayeskit._core import libraries as libraries
from bayeskit._core import progress as progress
from bayeskit._core.libraries import FLAGS, compiler, load_library

SOURCE = {"one.cpp": '#include "two.h"\nextern "C" long long answer() { return TWO; }', "two.h": "#define TWO 2\n"}
FLAT = ("-O0", *FLAGS[1:])
AGAIN = f"""
from bayeskit._core import libraries
libraries._made = None
print(libraries.load_library("test", {SOURCE!r}, {FLAT!r}).answer())
"""


@pytest.mark.compiler
def test_a_later_process_finds_it_and_other_sources_are_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_library("test", SOURCE, FLAT).answer() == 2
    done = subprocess.run([sys.executable, "-c", AGAIN], capture_output=True, text=True, check=False)
    assert done.stdout == "2\n", done.stderr
    assert load_library("test", SOURCE | {"two.h": "#define TWO 3\n"}, FLAT).answer() == 3
    assert load_library("test", SOURCE, (*FLAT, "-DOTHER")).answer() == 2
    assert len(list((tmp_path / "bayeskit").iterdir())) == 3
    with pytest.raises(subprocess.CalledProcessError) as caught:
        load_library("test", SOURCE | {"two.h": "#error nothing\n"}, FLAT)
    assert "#error nothing" in caught.value.stderr


@pytest.mark.compiler
def test_the_oldest_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(libraries, "_MOST", 2)
    kept = [load_library("test", {"a.cpp": f'extern "C" int f() {{ return {k}; }}'}, FLAT) for k in range(3)]
    assert [library.f() for library in kept] == [0, 1, 2]  # also after its file is deleted
    assert len(list((tmp_path / "bayeskit").iterdir())) == 2
    assert isinstance(kept[0], ctypes.CDLL)


def stub(folder, monkeypatch, text):
    """Have a shell script for the compiler."""
    path = folder / "stub"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    monkeypatch.setenv("CXX", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setattr(libraries, "_POLL_SECONDS", 0.01)


def test_a_compiler_that_hangs_is_ended_and_a_slow_one_is_seen(tmp_path, monkeypatch):
    stub(tmp_path, monkeypatch, "exec sleep 600")
    seen = []
    monkeypatch.setattr(progress.Bar, "update", lambda bar, seconds: seen.append((bar._description, seconds)))
    monkeypatch.setattr(libraries, "_COMPILE_SECONDS", 0.1)
    with pytest.raises(subprocess.TimeoutExpired, match="0.1 seconds"):
        load_library("test", SOURCE, FLAT)
    assert seen[0] == ("compiling C++, once on this machine", 0)


def test_no_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr(libraries, "_found", lambda *_: None)
    assert compiler() is None
    with pytest.raises(OSError, match="install g"):
        load_library("test", SOURCE, FLAT)
