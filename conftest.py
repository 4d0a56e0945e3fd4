"""What tests and the examples of docstrings share: where there is no compiler, what would be compiled runs as it is."""

import pytest

from bayeskit._core.libraries import compiler


def pytest_configure(config: pytest.Config) -> None:
    """Let what would be compiled run as it is where there is no compiler: the warning is tested by itself."""
    if compiler() is None:
        config.addinivalue_line("filterwarnings", "ignore:.*no C\\+\\+ compiler was found")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of compiled code where nothing can be compiled."""
    if compiler() is None:
        for item in items:
            if item.get_closest_marker("compiler"):
                item.add_marker(pytest.mark.skip(reason="needs a C++ compiler"))
