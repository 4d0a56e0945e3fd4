"""A tool that is measured in a process of its own: one line of JSON in, one line out.

`PeerProcess` is the side of the benchmark, `serve` the side of a driver written in Python. Nothing but the standard
library, so that a driver can use it in any environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, cast

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


class PeerProcess:
    """A driver that has been started and answers tasks.

    Its caches of compiled code are new and empty, so that its first answer costs what it costs a new user; or those of
    a process `before`, as they are for a user who comes back.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        before: PeerProcess | None = None,
    ) -> None:
        self.command = list(command)
        self._errors = tempfile.TemporaryFile("w+")
        self._folder = tempfile.TemporaryDirectory()
        self.caches: str = before.caches if before else self._folder.name
        flags = (os.environ.get("PYTENSOR_FLAGS"), f"base_compiledir={self.caches}/pytensor")
        caches = {
            "TORCHINDUCTOR_CACHE_DIR": f"{self.caches}/inductor",
            "XDG_CACHE_HOME": f"{self.caches}/compiled",
            "PYTENSOR_FLAGS": ",".join(flag for flag in flags if flag),
        }
        begin = time.perf_counter()
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **ONE_THREAD, **caches, **(environment or {})},
        )
        self._tasks, self._answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        self.about: dict[str, Any] = self._answer()
        self.start_up = time.perf_counter() - begin

    def ask(self, task: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer, with the seconds that it took by the clock of this side."""
        begin = time.perf_counter()
        self._tasks.write(json.dumps(task) + "\n")
        self._tasks.flush()
        answer = self._answer()
        answer["seconds"] = time.perf_counter() - begin
        return answer

    def _answer(self) -> dict[str, Any]:
        line = self._answers.readline()
        if not line:
            self._process.wait()
            self._errors.seek(0)
            raise SystemExit(f"{' '.join(self.command)} ended:\n{self._errors.read()[-3000:]}")
        return json.loads(line)

    def close(self) -> None:
        """Let the driver end."""
        self._tasks.close()
        self._process.wait()
        self._answers.close()
        self._errors.close()
        self._folder.cleanup()


def serve(version: str, answer: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answer tasks from standard input until it ends; what a tool prints itself goes to standard error.

    Parameters
    ----------
    version : str
        Name and version of the tool.
    answer : callable
        From a task to a dictionary. The processor's seconds, those of ended child processes included, are added.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps({"version": version}), file=answers, flush=True)
    for line in sys.stdin:
        task = json.loads(line)
        begin = processor_seconds()
        found = answer(task)
        found["processor_seconds"] = processor_seconds() - begin
        print(json.dumps(found), file=answers, flush=True)


def processor_seconds() -> float:
    """Return what this process and its ended children have used so far."""
    return sum(os.times()[:4])
