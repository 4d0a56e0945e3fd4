"""Where nothing can be compiled the traced graph serves, after one warning."""

import subprocess
import warnings

import pytest
import torch

from bayeskit import exact
from bayeskit._compiler import native_library as native_library
from bayeskit.errors import CompilationWarning


def broken(*_, **__):
    raise RuntimeError("the compiler gave up")


def failing(*_, **__):
    raise subprocess.CalledProcessError(1, "g++", stderr="density.cpp:1: error")


@pytest.mark.parametrize("cause", ["none installed", "it fails", "inductor fails"])
def test_the_traced_graph_serves_after_one_warning(cause, monkeypatch, request):
    case = exact.get("linreg10")
    expected = case.target()
    u = torch.linspace(-1, 1, 30, dtype=torch.float64).reshape(3, 10)
    if cause == "none installed":
        monkeypatch.setattr(native_library, "compiler", lambda: None)
    elif cause == "it fails":
        monkeypatch.setattr(native_library, "load_library", failing)
        monkeypatch.setattr(torch._inductor, "compile", broken)
        monkeypatch.setattr(native_library, "compiler", lambda: "g++")
        native_library.library_of.cache_clear()  # which remembers failures, too
        request.addfinalizer(native_library.library_of.cache_clear)
    else:
        monkeypatch.setattr("bayeskit._compiler.engine.row_source", lambda *_: None)  # have it compiled by inductor
        monkeypatch.setattr(torch._inductor, "compile", broken)
        monkeypatch.setattr(native_library, "compiler", lambda: "g++")
    target = case.target()
    target.compile = True
    with pytest.warns(CompilationWarning) as caught:
        value, gradient = target.value_and_grad(u)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.value_and_grad(u)
    expected.compile = False
    right_value, right_gradient = expected.value_and_grad(u)
    assert torch.equal(value, right_value) and torch.equal(gradient, right_gradient)
