"""Every public algorithm gives the numbers of the host on a device: `on_a_device.py`, in a process of its own.

Torch starts the threads of gradients with the devices that it knows; no process that has a further one can be forked.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.compiler  # the device is compiled


@pytest.mark.calibration
def test_public_algorithms_give_the_numbers_of_the_host_on_a_device():
    cases = Path(__file__).parent / "on_a_device.py"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(cases)]
    done = subprocess.run(command, cwd=cases.parent.parent, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-8000:] + done.stderr[-2000:]
