"""``python -m bayeskit`` is the command ``bayeskit``."""

from bayeskit.cli import main

__all__: list[str] = []

if __name__ == "__main__":
    main()
