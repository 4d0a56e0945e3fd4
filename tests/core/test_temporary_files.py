"""Files that processes which were killed have left half-written."""

import os
import subprocess
import sys

import pytest

from bayeskit._core import folders as folders
from bayeskit._core.folders import clear_temporary_files, temporary_name, write_atomically

DIES = """
import os, signal, sys
from bayeskit._core import folders
folders.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
folders.write_atomically(sys.argv[1], b"half")
"""


def planted(path, process, host=None):
    """Leave a temporary file of a process, of this host by default."""
    own = temporary_name(path).name
    name = own.replace(f".{os.getpid()}.", f".{process}.")
    if host is not None:
        start = name.rindex(".", 0, -4) + 1
        name = name[:start] + host + name[start + 8 :]
    stale = path.with_name(name)
    stale.write_bytes(b"half")
    return stale


@pytest.fixture
def dead():
    """Return the number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_the_next_save_clears_what_a_killed_process_left(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    assert subprocess.run([sys.executable, "-c", DIES, str(path)], check=False).returncode != 0
    assert [p.suffix for p in tmp_path.iterdir()] == [".tmp"]
    write_atomically(path, b"whole")
    assert list(tmp_path.iterdir()) == [path]


def test_files_of_living_processes_and_of_other_hosts_stay(tmp_path, dead):
    path = tmp_path / "draws"
    ours = planted(path, dead)
    others = [planted(path, os.getpid()), planted(path, dead, host="0123abcd")]
    strange = [tmp_path / ".draws.tmp", tmp_path / f".draws.{dead}.0123abcd.tmp", tmp_path / "draws.12.tmp"]
    for file in strange:
        file.touch()
    clear_temporary_files(tmp_path)
    assert not ours.exists()
    assert set(tmp_path.iterdir()) == {*others, *strange}


def test_a_folder_is_searched_once_a_minute(tmp_path, dead, monkeypatch):
    now = 100.0
    monkeypatch.setattr(folders.time, "monotonic", lambda: now)
    clear_temporary_files(tmp_path)
    stale = planted(tmp_path / "draws", dead)
    now = 159.0
    clear_temporary_files(tmp_path)
    assert stale.exists()
    now = 161.0
    clear_temporary_files(tmp_path)
    assert not stale.exists()
