from pathlib import Path

import pytest

SITE = Path(__file__).parents[1] / "_build" / "html"


@pytest.fixture(scope="session")
def site():
    """The folder of the built pages."""
    if not (SITE / "index.html").is_file():
        pytest.fail("there are no pages to look at; build them first: make docs")
    return SITE
