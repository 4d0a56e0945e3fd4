"""Errors of densities: what says nothing against a run, and a lack of memory, which a judgement must not pass over."""

import pytest
import torch

import bayeskit as bk
from bayeskit._core.functions_of_users import density_may_fail, is_for_want_of_memory
from bayeskit.errors import SamplingWarning
from bayeskit.inference import evidence
from bayeskit.inference.evidence._methods import METHODS
from bayeskit.inference.samplers import _sampling as sampling


def fail(*_, **__):
    raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory")


def test_a_density_may_fail_but_not_for_want_of_memory():
    with density_may_fail():
        raise ValueError("outside of the support")
    with pytest.raises(MemoryError, match="can't allocate memory"), density_may_fail():
        fail()


def test_torch_and_python_say_that_memory_is_short():
    for size in (2**62, 2**50):
        with pytest.raises((RuntimeError, MemoryError)) as caught:
            torch.empty(size, dtype=torch.uint8).fill_(0)
        assert is_for_want_of_memory(caught.value)
    with pytest.raises(MemoryError) as caught:
        bytes(2**60)
    assert is_for_want_of_memory(caught.value) and not is_for_want_of_memory(ValueError("a number"))


def test_draws_outlive_a_judgement_without_memory(monkeypatch):
    def short(*_):
        raise MemoryError("can't allocate memory")

    monkeypatch.setattr(sampling, "hidden_modes", short)
    target = bk.exact.get("linreg10").target()
    with pytest.warns(SamplingWarning, match="too little memory to judge the draws"):
        draws = bk.sample(target, num_warmup=200, num_samples=300, progress=False)
    assert draws.num_draws == 300


def test_a_method_without_memory_is_no_row_of_a_table(monkeypatch):
    method = METHODS["laplace"]
    monkeypatch.setitem(METHODS, "laplace", type(method)(**{**vars(method), "estimate": fail}))
    with pytest.raises(MemoryError, match="laplace had too little memory .*checkpoint="):
        evidence.compare(bk.exact.get("linreg10").target(), ["laplace"], progress=False)
