"""Context managers that borrow a torch global and give it back unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from bayeskit._settings import whole_number

# Other random numbers from the same seeds, in this process and its workers: whether a test hangs on its seed.
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
    before = torch.get_rng_state()
    cpu = generator if generator.device.type == "cpu" else _host_generator(generator)
    with _cuda_stream(cpu):
        torch.set_rng_state(cpu.get_state())
        try:
            yield
        finally:
            cpu.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


def _host_generator(generator: torch.Generator) -> torch.Generator:
    seed = torch.randint(2**62, (), generator=generator, device=generator.device)
    return new_generator(int(seed))


@contextmanager
def _cuda_stream(generator: torch.Generator) -> Iterator[None]:
    if not torch.cuda.is_available():
        yield
        return
    before = torch.cuda.get_rng_state()
    seed = int(torch.randint(2**62, (), generator=generator))
    torch.cuda.set_rng_state(new_generator(seed, torch.device("cuda")).get_state())
    try:
        yield
    finally:
        torch.cuda.set_rng_state(before)


def new_generator(seed: int | torch.Generator, device: torch.device | str = "cpu", stream: str = "") -> torch.Generator:
    """Return a generator on ``device``; a generator is returned as it is.

    ``stream`` names what the numbers are for. Different streams of one seed are
    independent, so that a user may give the same seed to the sampler and to the
    estimator without correlating draws and proposals.

    Raises
    ------
    SettingsError
        If the seed is no whole number.
    """
    if isinstance(seed, torch.Generator):
        return seed
    digest = hashlib.sha256(f"{stream}:{whole_number('seed', seed)}{_SHIFT}".encode()).digest()
    generator = torch.Generator(device=device)
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator


def derived_seed(seed: int, stream: str) -> int:
    """Return a seed for one of several runs that have to be independent of each other."""
    return int(torch.randint(2**31, (), generator=new_generator(seed, stream=stream)))


@contextmanager
def validation_kept() -> Iterator[None]:
    """Restore torch's validation of distributions, which its compiler, too, switches off for good."""
    before = torch.distributions.Distribution._validate_args
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
