"""Random streams, quasi-random draws, and temporary changes of torch's globals."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import numpy as np
import scipy
import torch
from torch import Tensor

from bayeskit._core.inputs import whole_number
from bayeskit._core.process_state import process_state

# Context managers that change a torch global and restore it. All but the number of threads, which torch keeps for each
# thread, belong to the process and are changed by one thread at a time.

# Changes the random numbers of all seeds, in this process and its workers, to test whether results depend on a seed.
_SHIFT = os.environ.get("BAYESKIT_SEED_SHIFT", "")


@contextmanager
def one_thread() -> Iterator[None]:
    """Run the body with one intra-op thread; on small tensors a second one only spins."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def defaults(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    """Let constants that a model creates take the dtype and device of its data."""
    with process_state():
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with nullcontext() if device.type == "cpu" else device:
                yield
        finally:
            torch.set_default_dtype(before)


@contextmanager
def global_stream(generator: torch.Generator) -> Iterator[None]:
    """Let torch's global random stream continue ``generator``'s, and restore it afterwards.

    Distributions of torch and Pyro can only draw from the global stream. A CUDA
    device gets its own stream, started from a number drawn from ``generator``.
    """
    cpu = generator if generator.device.type == "cpu" else _host_generator(generator)
    with process_state(), _cuda_stream(cpu):
        before = torch.get_rng_state()
        torch.set_rng_state(cpu.get_state())
        try:
            yield
        finally:
            cpu.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


@contextmanager
def other_streams(seed: int) -> Iterator[None]:
    """Seed the global random streams of NumPy and Python, and restore them afterwards."""
    with process_state():
        before = np.random.get_state(), random.getstate()  # noqa: NPY002  programs of users draw from it
        np.random.seed(seed % 2**32)  # noqa: NPY002
        random.seed(seed)
        try:
            yield
        finally:
            np.random.set_state(before[0])  # noqa: NPY002
            random.setstate(before[1])


def _host_generator(generator: torch.Generator) -> torch.Generator:
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return new_generator(int(seed))


@contextmanager
def _cuda_stream(generator: torch.Generator) -> Iterator[None]:
    """Start CUDA's stream from ``generator``, which is not moved on, and restore it afterwards."""
    # Initialising CUDA takes seconds and is impossible in a forked process.
    if not torch.cuda.is_initialized():
        yield
        return
    before = torch.cuda.get_rng_state()
    seed = int(torch.randint(2**62, (), generator=_copy_of(generator)))
    torch.cuda.set_rng_state(new_generator(seed, torch.device("cuda")).get_state())
    try:
        yield
    finally:
        torch.cuda.set_rng_state(before)


def _copy_of(generator: torch.Generator) -> torch.Generator:
    copy = torch.Generator()
    copy.set_state(generator.get_state())
    return copy


def new_generator(seed: int | torch.Generator, device: torch.device | str = "cpu", stream: str = "") -> torch.Generator:
    """Return a generator on ``device``, independent for each ``stream`` of a seed; a generator is returned as it is."""
    if isinstance(seed, torch.Generator):
        return seed
    # A user may give one seed to sampler and estimator without correlating draws and proposals.
    digest = hashlib.sha256(f"{stream}:{whole_number('seed', seed)}{_SHIFT}".encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator


def derived_seed(seed: int, stream: str) -> int:
    """Return a seed for one of several runs that have to be independent of each other."""
    return int(torch.randint(2**31, (), generator=new_generator(seed, stream=stream)))


@contextmanager
def validation_kept() -> Iterator[None]:
    """Restore torch's validation of distributions, which torch's compiler also switches off permanently."""
    with process_state():
        before = torch.distributions.Distribution._validate_args
        try:
            yield
        finally:
            torch.distributions.Distribution.set_default_validate_args(before)


# Randomised quasi-random draws: each follows the distribution, and together they cover it more evenly than chance.

_MAX_DIM = torch.quasirandom.SobolEngine.MAXDIM
#: The sequence has 30 bits; half a step away from its ends quantiles are finite.
_END = 2.0**-31


def uniform_points(num_points: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return scrambled Sobol points (Owen 1995) inside the unit cube, ``(num_points, dim)``, float64 on the CPU."""
    if dim > _MAX_DIM:  # the Sobol sequence has no more dimensions
        points = torch.rand(num_points, dim, generator=generator, dtype=torch.float64)
    else:
        seed = int(torch.randint(2**31, (), generator=generator))
        engine = torch.quasirandom.SobolEngine(dim, scramble=True, seed=seed)
        points = engine.draw(num_points, dtype=torch.float64)
    return points.clamp(_END, 1 - _END)


def normal_points(num_points: int, dim: int, generator: torch.Generator) -> Tensor:
    """Return standard normal points, as of :func:`uniform_points`, ``(num_points, dim)``."""
    return torch.special.ndtri(uniform_points(num_points, dim, generator))


def student_points(num_points: int, dim: int, degrees_of_freedom: float, generator: torch.Generator) -> Tensor:
    """Return standard multivariate Student-t points, as of :func:`uniform_points`, ``(num_points, dim)``."""
    uniform = uniform_points(num_points, dim + 1, generator)
    half = 0.5 * degrees_of_freedom
    # Quantile of a chi-squared variable, divided by its degrees of freedom.
    mixing = torch.as_tensor(scipy.special.gammaincinv(half, uniform[:, :1].numpy())) / half
    return torch.special.ndtri(uniform[:, 1:]) * mixing.rsqrt()
