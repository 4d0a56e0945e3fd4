"""Where the pages of the documentation are."""

from functools import cache
from pathlib import Path


@cache
def place_of_page(page: str) -> str:
    """Return the path of a documentation page: in the repository, or in the package of a wheel."""
    shipped = Path(__file__).parents[1] / "docs" / f"{page}.md"
    return str(shipped) if shipped.exists() else f"docs/{page}.md"
