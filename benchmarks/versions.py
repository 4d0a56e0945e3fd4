"""Run the core of the tests on several versions of Python, torch and ArviZ, and print a table.

    python benchmarks/versions.py [--rows oldest newest] [--tests tests/core] [--folder DIR] [--kept]

Each row has an environment of its own, which is kept in DIR and used again while it is asked for the same packages:

* ``oldest``: the lowest version of each dependency that pyproject.toml allows, on the oldest Python;
* ``pinned``: the versions of constraints.txt, on the oldest Python;
* ``arviz-0``: the newest versions, but ArviZ before 1.0;
* ``newest``: the newest versions, on Python 3.13;
* ``next``: the newest versions, on Python 3.14;
* ``wheel`` and ``source``: the wheel and the source distribution, which ``twine`` checks, each in a bare environment
  with the pinned versions, where no compiler can be found: the command computes the evidence of a gallery model.

A row whose packages cannot be had says why; with ``--kept`` so does one whose environment is not there yet. The exit
code is 1 if a test failed or a distribution could not be built, and 0 otherwise.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

from portability import path_without_compilers

ROOT = Path(__file__).resolve().parent.parent
ROWS = {
    "oldest": ("3.11", "lowest"),
    "pinned": ("3.11", "pinned"),
    "arviz-0": ("3.12", "newest"),
    "newest": ("3.13", "newest"),
    "next": ("3.14", "newest"),
    "wheel": ("3.11", "pinned"),
    "source": ("3.11", "pinned"),
}
DISTRIBUTIONS = {"wheel": "*.whl", "source": "*.tar.gz"}
#: Extras that the tests of the core use, and packages that run them and install this one.
EXTRAS, RUNNERS = (
    ("dask", "gaussian_processes", "images", "numpyro", "pymc", "stan", "tables"),
    ("pytest>=8", "pytest-xdist>=3.5", "nbclient", "ipykernel", "hatchling>=1.27", "editables"),
)
CORE = (
    "tests/core",
    "tests/logdensity",
    "tests/exact",
    "tests/test_draws.py",
    "tests/test_report.py",
    "tests/test_parallel.py",
)
SHOWN = ("torch", "arviz", "numpy", "scipy", "pyro-ppl")
RESULT = re.compile(r"(\d+) (passed|failed|skipped|errors?)")


class NotToBeHadError(Exception):
    """The environment of a row cannot be made; the text says why."""


class DistributionError(Exception):
    """A distribution cannot be built, or is refused; the text says why."""


def interpreter(version: str) -> str:
    """Return a Python of this version from PATH or pyenv."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in [*sorted(pyenv.glob(f"{version}.*/bin/python")), shutil.which(f"python{version}")]:
        if path and subprocess.run([path, "--version"], capture_output=True).returncode == 0:
            return str(path)
    raise NotToBeHadError(f"no Python {version} on PATH or in pyenv")


def requirements(name: str, kind: str) -> list[str]:
    """Return what pip is asked for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    if kind == "lowest":
        wanted = [re.sub(r">=([\d.]+)$", r"==\1", line) for line in wanted]
    if name == "arviz-0":
        wanted = [f"{line},<1" if line.startswith("arviz") else line for line in wanted]
    return [*wanted, *RUNNERS]


def called(command: list[str], log: Path, limit: float | None = None, error: type[Exception] = NotToBeHadError) -> None:
    """Run a command for at most `limit` seconds, and write what it prints into `log`."""
    with log.open("a+") as file:
        begin = file.seek(0, os.SEEK_END)
        print("$", *command, file=file, flush=True)
        failed = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
        file.seek(begin)
        lines = [line.strip() for line in file if line.strip()]
    if failed:
        errors = [line for line in lines if line.startswith("ERROR")]
        raise error("; ".join((errors or lines)[-2:])[:300])


def environment(name: str, folder: Path, log: Path, kept: bool) -> Path:
    """Make the environment of a row, unless it is there, and return its folder of programs."""
    version, kind = ROWS[name]
    made = folder / name
    marker, wanted = made / "complete", requirements(name, kind)
    pip = [str(made / "bin" / "python"), "-m", "pip"]
    install = [*pip, "install", "--quiet", *(("-c", str(ROOT / "constraints.txt")) if kind == "pinned" else ())]
    if not marker.exists() or marker.read_text() != "\n".join(wanted):
        if kept:
            raise NotToBeHadError("no environment with these packages is kept; without --kept it is made")
        shutil.rmtree(made, ignore_errors=True)
        called([interpreter(version), "-m", "venv", str(made)], log)
        if name not in DISTRIBUTIONS:
            called([*install, *wanted], log)
        marker.write_text("\n".join(wanted))
    if name not in DISTRIBUTIONS:
        called([*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)], log)
    else:
        called([*pip, "uninstall", "--yes", "bayeskit"], log)
        called([*install, str(next(built(folder, log).glob(DISTRIBUTIONS[name])))], log)
    return made / "bin"


def built(folder: Path, log: Path) -> Path:
    """Build wheel and source distribution, let twine check them, and return their folder."""
    tools, distributions = folder / "tools", folder / "distributions"
    if not (tools / "bin" / "twine").exists():
        called([sys.executable, "-m", "venv", str(tools)], log)
        called([str(tools / "bin" / "python"), "-m", "pip", "install", "--quiet", "build", "twine", "hatchling"], log)
    shutil.rmtree(distributions, ignore_errors=True)
    build = [str(tools / "bin" / "python"), "-m", "build", "--no-isolation", "--outdir", str(distributions), str(ROOT)]
    called(build, log, error=DistributionError)
    check = [str(tools / "bin" / "twine"), "check", "--strict", *map(str, sorted(distributions.iterdir()))]
    called(check, log, error=DistributionError)
    return distributions


def tested(name: str, tests: list[str], processes: int, programs: Path, log: Path) -> dict[str, int]:
    """Run the tests of a row in its environment and return the numbers of their outcomes."""
    settings = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    if name in DISTRIBUTIONS:
        with tempfile.TemporaryDirectory() as empty:
            (Path(empty) / "bin").mkdir()
            path = path_without_compilers(Path(empty) / "bin")
            command = [str(programs / "bayeskit"), "evidence", "beta_binomial", "--out", f"{empty}/out"]
            bare = {"PATH": path, "HOME": empty, "TMPDIR": empty, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=empty, env=bare, capture_output=True, text=True)
            computed = done.returncode == 0 and (Path(empty) / "out" / "evidence.csv").exists()
        with log.open("a") as file:
            file.write(done.stdout + done.stderr)
        return {"passed" if computed else "failed": 1}
    command = [str(programs / "python"), "-m", "pytest", "-n", str(processes), "-p", "no:cacheprovider", *tests]
    if ROWS[name][1] == "lowest":  # whose packages call deprecated parts of newer ones
        command += ["-W", "ignore::DeprecationWarning"]
    with log.open("a") as file:
        subprocess.run(command, cwd=ROOT, env=settings, stdout=file, stderr=subprocess.STDOUT)
    counts = {word: int(number) for number, word in RESULT.findall(log.read_text().splitlines()[-1])}
    return counts or {"errors": 1}


def versions(programs: Path) -> str:
    """Return the versions of Python and of some packages in an environment."""
    code = (
        f"import importlib.metadata as m, sys; print('Python', '.'.join(map(str, sys.version_info[:3])), "
        f"*(f'{{name}} {{m.version(name)}}' for name in {SHOWN!r}))"
    )
    return subprocess.run(
        [str(programs / "python"), "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def main() -> int:
    """Run the rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    parser.add_argument("--tests", nargs="+", default=list(CORE))
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--kept", action="store_true", help="make no environment")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "bayeskit-versions")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    failed = False
    print("| row | versions | tests | log |\n|---|---|---|---|", flush=True)
    for name in arguments.rows:
        log, begin = arguments.folder / f"{name}.log", time.monotonic()
        log.unlink(missing_ok=True)
        try:
            programs = environment(name, arguments.folder, log, arguments.kept)
            made = time.monotonic()
            counts = tested(name, arguments.tests, arguments.processes, programs, log)
            failed |= bool(counts.get("failed", 0) or counts.get("errors", 0) or counts.get("error", 0))
            outcome = ", ".join(f"{number} {word}" for word, number in counts.items())
            outcome += f" ({made - begin:.0f} s to install, {time.monotonic() - made:.0f} s)"
            outcome = f"{versions(programs)} | {outcome}"
        except (NotToBeHadError, DistributionError) as error:
            failed |= isinstance(error, DistributionError)
            outcome = f"Python {ROWS[name][0]} | not run: {error}"
        print(f"| {name} | {outcome} | {log} |", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
