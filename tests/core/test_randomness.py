"""Random streams are the same on every machine, and a model on the CPU does not start CUDA."""

import subprocess
import sys

import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import global_stream, new_generator

FORKS_AFTER_A_MODEL = """
import multiprocessing, pyro, pyro.distributions as dist, torch
import bayeskit as bk
def model():
    pyro.sample("y", dist.Normal(pyro.sample("x", dist.Normal(0.0, 1.0)), 1.0), obs=torch.tensor(0.3))
def work(_):
    return float(target.log_prior(torch.zeros(1)))
if __name__ == "__main__":
    target = bk.Target.from_pyro(model, seed=1)
    here = work(0)
    # Values only: where there is a CUDA device, torch takes no gradient in a process forked after one.
    assert not torch.cuda.is_initialized()
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.map(work, [0]) == [here]
"""


def draws(num_before):
    generator, noise = new_generator(3), torch.empty(5)
    for _ in range(num_before):
        with global_stream(generator):
            noise = dist.Normal(torch.zeros(5), 1.0).sample()
    return noise, torch.rand(5, generator=generator)


def test_a_stream_goes_on_where_a_generator_stood():
    generator, before = new_generator(3), torch.get_rng_state()
    noise, after = draws(2)
    expected = [torch.normal(torch.zeros(5), torch.ones(5), generator=generator) for _ in range(2)][-1]
    torch.testing.assert_close(noise, expected, rtol=0, atol=0)
    torch.testing.assert_close(after, torch.rand(5, generator=generator), rtol=0, atol=0)
    torch.testing.assert_close(torch.get_rng_state(), before, rtol=0, atol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_cuda_device_has_a_stream_of_its_own_and_leaves_the_other_alone():
    torch.zeros(1, device="cuda")
    test_a_stream_goes_on_where_a_generator_stood()

    def drawn(seed):
        with global_stream(new_generator(seed)):
            return dist.Normal(torch.zeros(5, device="cuda"), 1.0).sample()

    before = torch.cuda.get_rng_state()
    assert torch.equal(drawn(1), drawn(1)) and not torch.equal(drawn(1), drawn(2))
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.calibration
def test_a_model_on_the_processor_starts_no_device_and_runs_in_a_forked_process():
    result = subprocess.run([sys.executable, "-c", FORKS_AFTER_A_MODEL], capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
