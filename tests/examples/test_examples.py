import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_stays_short(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) < 120
    environment = os.environ | {"BAYESKIT_SMALL_EXAMPLES": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    # A warning in an example would teach that warnings are normal.
    assert "Warning" not in done.stderr
