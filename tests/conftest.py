"""What every test shares: one thread, and torch's globals as they were."""

import math
import os
import signal
from collections.abc import Iterator

import pyro
import pytest
import torch
from scipy.stats import chi2
from scipy.stats import t as student
from torch._inductor.runtime.cache_dir_utils import cache_dir

from bayeskit import parallel
from bayeskit.models.vae import _flows as flows  # noqa: F401  before any test imports zuko, which switches validation off

FAILURE_RATE = 1e-5

# Torch finds code again that it has compiled for other vector instructions than it may use now.
capability = os.environ.get("ATEN_CPU_CAPABILITY", "")
if not cache_dir().endswith(capability):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{cache_dir()}_{capability}"

# On small tensors a second thread only spins, and the suite runs in two processes anyway.
torch.set_num_threads(1)
# A worker needs seconds to import torch, so one that waits is kept for the next test with processes.
parallel._IDLE_SECONDS = 600


def _globals() -> dict[str, object]:
    return {
        "default dtype": torch.get_default_dtype(),
        "number of threads": torch.get_num_threads(),
        "gradient mode": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "validation of distributions": torch.distributions.Distribution._validate_args,
        "validation in Pyro": pyro.settings.get("validate_distributions_pyro"),
    }


@pytest.fixture(autouse=True)
def torch_globals_stay_unchanged() -> Iterator[None]:
    """Fail any test that leaves a global of torch or Pyro changed, and put it right for the next."""
    before = _globals()
    yield
    after = _globals()
    torch.set_default_dtype(before["default dtype"])
    torch.set_num_threads(before["number of threads"])
    torch.set_grad_enabled(before["gradient mode"])
    pyro.clear_param_store()
    if before != after:
        changed = {name: after[name] for name in before if before[name] != after[name]}
        pytest.fail(f"the test changed globals: {changed}")


@pytest.fixture(autouse=True)
def ctrl_c_is_heard() -> Iterator[None]:
    """Undo what a shell does to the processes that it starts in the background: they ignore Ctrl-C."""
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def limit():
    """Return the largest acceptable |z| among ``comparisons`` at the suite's failure rate.

    An error that is itself a standard deviation of ``n`` replicates has ``dof=n - 1`` degrees of freedom.
    """
    return lambda comparisons=1, dof=math.inf: float(student.isf(FAILURE_RATE / (2 * comparisons), dof))


@pytest.fixture(scope="session")
def calibrated(limit):
    """Say whether scores ``(estimate - truth) / error`` have the mean and the variance of a standard normal variable.

    Errors may be too large or too small by the share ``off``, and estimates have a bias of at most ``bias`` errors.
    """

    def agree(scores, off=0.0, bias=0.0):
        z = torch.tensor([float(score) for score in scores], dtype=torch.float64)
        low, high = chi2.ppf([FAILURE_RATE / 4, 1 - FAILURE_RATE / 4], len(z) - 1) / (len(z) - 1)
        scatters = (1 - off) ** 2 * low < float(z.var()) < (1 + off) ** 2 * high
        return scatters and abs(float(z.mean())) < (1 + off) * (bias + limit(2) / math.sqrt(len(z)))

    return agree
