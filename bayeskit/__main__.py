"""``python -m bayeskit`` is the command ``bayeskit``."""

import signal

from bayeskit._ctrl_c import end_at_once


def start() -> None:
    """Run the command line; Ctrl-C ends it quietly at any moment, imports included."""
    signal.signal(signal.SIGINT, end_at_once)
    from bayeskit.cli import main

    try:
        main()
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process is about to end


if __name__ == "__main__":
    start()
