import sys
from collections.abc import Iterator
from pathlib import Path

import pyro
import pytest
import torch

# The helper modules of this folder; pytest's importlib mode puts no test folder on the path.
sys.path.insert(0, str(Path(__file__).parent))


def torch_globals() -> dict[str, object]:
    return {
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "random": torch.get_rng_state().tolist(),
        "grad": torch.is_grad_enabled(),
        "torch validation": torch.distributions.Distribution._validate_args,
        "pyro validation": (
            pyro.distributions.is_validation_enabled(),
            pyro.infer.is_validation_enabled(),
            pyro.poutine.is_validation_enabled(),
        ),
        "parameters": sorted(pyro.get_param_store().keys()),
        "handlers": len(pyro.poutine.runtime._PYRO_STACK),
    }


@pytest.fixture(autouse=True)
def globals_unchanged() -> Iterator[None]:
    """Fail every test in this folder that leaves a global of torch or Pyro changed."""
    before = torch_globals()
    yield
    assert torch_globals() == before
