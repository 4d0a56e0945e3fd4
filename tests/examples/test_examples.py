import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EXAMPLES = sorted((HERE.parents[1] / "examples").glob("*.py"))
ENVIRONMENT = os.environ | {"BAYESKIT_SMALL_EXAMPLES": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
WITH_PROCESSES = ("num_jobs", "process_group")  # threads of a process group do not survive a fork


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a script as its reader would, but for the seconds of importing; return status, output and errors."""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": ENVIRONMENT}
    with subprocess.Popen([sys.executable, HERE / "run_scripts.py"], **pipe) as runner:

        def one(path):
            folder = tmp_path_factory.mktemp("example")
            output, errors = folder / "output", folder / "errors"
            runner.stdin.write(f"{path}\t{output}\t{errors}\n")
            runner.stdin.flush()
            status = int(runner.stdout.readline())
            return status, output.read_text(encoding="utf-8"), errors.read_text(encoding="utf-8")

        yield one
        runner.stdin.close()


def run_alone(path):
    done = subprocess.run([sys.executable, path], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def test_there_are_examples():
    assert len(EXAMPLES) >= 4


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs_and_stays_short(path, run):
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) < 120
    status, output, errors = (run_alone if any(name in text for name in WITH_PROCESSES) else run)(path)
    assert status == 0, errors
    assert output.strip()
    # A warning in an example would teach that warnings are normal.
    assert "Warning" not in errors


@pytest.mark.parametrize(
    ("text", "status", "said"),
    [
        ("assert 1 + 1 == 3, 'no sum'", 1, "AssertionError: no sum"),
        ("import warnings\nwarnings.warn('careful')", 0, "UserWarning: careful"),
        ("import os\nos.kill(os.getpid(), 9)", -9, ""),
        ("import atexit\natexit.register(lambda: 1 / 0)", 0, "ZeroDivisionError"),
    ],
)
def test_mutation_a_script_that_fails_or_warns_is_noticed(run, tmp_path, text, status, said):
    path = tmp_path / "script.py"
    path.write_text(text)
    found, _, errors = run(path)
    assert found == status and said in errors


def test_scripts_do_not_see_each_other(run, tmp_path):
    path = tmp_path / "script.py"
    path.write_text("import torch\nprint(torch.get_default_dtype())\ntorch.set_default_dtype(torch.float64)")
    assert run(path) == run(path) == (0, "torch.float32\n", "")
