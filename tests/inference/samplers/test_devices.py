"""Samplers follow the device of the data, and their inner loops read nothing back from it."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import bayeskit as bk
from bayeskit import exact
from bayeskit.inference import evidence
from bayeskit.inference.samplers import HMC, Metric, sample_ladder

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]


@pytest.mark.parametrize("device", DEVICES)
def test_draws_stay_on_their_device(device, limit):
    case = exact.get("linreg10")
    draws = bk.sample(case.target(device=device), 32, 200, 300, seed=1, progress=False)
    assert draws.unconstrained.device.type == device
    z = evidence.bridge_sampling(draws.target, draws, seed=1)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("exchange", [False, True])
def test_ladders_stay_on_their_device(device, exchange, limit):
    case = exact.get("beta_binomial")
    ladder = sample_ladder(case.target(device=device), 12, 8, 100, 300, seed=1, exchange=exchange, progress=False)
    assert ladder.log_likelihood.device.type == device
    z = evidence.stepping_stone(ladder.draws.target, ladder)
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error


class _HostReads(TorchDispatchMode):
    """Count how often a tensor of the device's (here: any floating-point tensor) becomes a Python number."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        reads = function in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        # The iteration counter, an integer, lives on the host.
        if reads and args[0].dtype != torch.int64:
            self.count += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("metric", [Metric.diagonal, Metric.dense])
def test_a_step_reads_nothing_back_however_many_leapfrogs(metric):
    target = exact.get("linreg10").target()
    u = target.sample_prior(16)
    size = torch.full((16,), 0.1, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    covariance = torch.eye(10, dtype=torch.float64)
    inverse = metric(covariance if metric == Metric.dense else covariance.diagonal())
    for num_steps in (2, 40):
        kernel = HMC(size, inverse, num_steps=num_steps, beta=torch.ones(16, dtype=torch.float64))
        state = kernel.init(target, u)
        kernel.step(target, state, generator=generator)
        with _HostReads() as reads:
            kernel.step(target, state, generator=generator)
        assert reads.count == 0


def test_a_read_would_be_counted():
    with _HostReads() as reads:
        float(torch.ones((), dtype=torch.float64))
    assert reads.count == 1
