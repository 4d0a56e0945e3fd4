"""A device that behaves like an accelerator where there is none: torch's private-use back end over the host's memory.

Its tensors do not mix with those of the host, and each look at their values is counted. Both devices compute the same
bits from the same seed, since the host computes for it.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch

from bayeskit._core.libraries import load_library

NAME = "simulated"
_ROOT = Path(torch.__file__).parent
_FLAGS = (
    *(f'-DTORCH="{torch.__version__}"', "-O1", "-std=c++20", "-shared", "-fPIC", "-w"),
    f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
    *(f"-I{_ROOT / 'include' / part}" for part in ("", "torch/csrc/api/include")),
    *(f"-L{_ROOT / 'lib'}", "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10"),
)


@dataclass
class Transfers:
    """How often values were read back, tensors moved to the device, and operators called."""

    reads: int = 0
    writes: int = 0
    operations: int = 0


class _Module(ModuleType):
    """What torch calls ``torch.simulated``."""

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: the stream is the host's, which torch has just seeded."""

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


@lru_cache
def simulated_device() -> torch.device:
    """Return the device, and compile it on first use."""
    source = (Path(__file__).parent / "simulated_device.cpp").read_text(encoding="utf-8")
    global _library
    _library = load_library("simulated_device", {"device.cpp": source}, _FLAGS)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _Module(NAME))
    _library.simulated_next_generator_is_global()
    torch.get_device_module(NAME).default_generators = (torch.Generator(NAME),)
    torch.utils.generate_methods_for_privateuse1_backend(
        unsupported_dtype=[torch.quint8, torch.quint4x2, torch.quint2x4, torch.qint32, torch.qint8]
    )
    return torch.device(NAME, 0)


_library: ctypes.CDLL


@contextmanager
def transfers() -> Iterator[Transfers]:
    """Count what happens in the body."""
    simulated_device()

    def now() -> list[int]:
        return [_library.simulated_reads(), _library.simulated_writes(), _library.simulated_operations()]

    found, before = Transfers(), now()
    yield found
    found.reads, found.writes, found.operations = (b - a for a, b in zip(before, now(), strict=True))
