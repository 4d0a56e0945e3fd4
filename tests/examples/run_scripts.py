"""Run scripts, each in a process of its own that need not import torch, Pyro and ArviZ anew.

Reads lines ``script<TAB>folder<TAB>output<TAB>errors`` and answers with the exit status, while the folder takes
its figures and files take what is printed.
"""

import gc
import os
import sys

import arviz  # noqa: F401
import matplotlib.pyplot  # noqa: F401
import pandas  # noqa: F401
import pyro  # noqa: F401
import torch._dynamo  # with the next, what a first gradient and a first compilation import, for over two seconds
import torch._inductor.compile_fx  # noqa: F401

from bayeskit.gallery import _run_script as run_script


def start(script: str, folder: str, output: str, errors: str) -> None:
    """Go on as the script, in a process that has just been forked."""
    for path, number in ((os.devnull, 0), (output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.path[0] = os.path.dirname(script)
    run_script.run_and_save(script, folder)
    sys.exit(0)  # as any script ends: what was registered for the end runs, and an exception has its traceback


if __name__ == "__main__":
    gc.freeze()  # what is imported stays, so that no script's collector has to look at it
    while line := sys.stdin.readline():
        child = os.fork()
        if child == 0:
            start(*line.rstrip("\n").split("\t"))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
