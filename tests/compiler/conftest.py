import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# The helper modules of this folder and of targets; pytest's importlib mode puts no test folder on the path.
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "logdensity")]

from target_globals import torch_globals  # noqa: E402


@pytest.fixture(autouse=True)
def globals_unchanged() -> Iterator[None]:
    """Fail every test in this folder that leaves a global of torch or Pyro changed."""
    before = torch_globals()
    yield
    assert torch_globals() == before
