"""Ctrl-C while the command line starts; imports nothing of the package, to be in force as early as possible."""

import os
import signal


def end_at_once(*_: object) -> None:
    """Handle Ctrl-C while nothing has begun: an import that is cut short would leave half-made modules."""
    os.write(2, b"interrupted\n")
    os._exit(130)


def give_back() -> None:
    """Let Ctrl-C raise ``KeyboardInterrupt`` again, which runs turn into a checkpoint."""
    if signal.getsignal(signal.SIGINT) is end_at_once:
        signal.signal(signal.SIGINT, signal.default_int_handler)
