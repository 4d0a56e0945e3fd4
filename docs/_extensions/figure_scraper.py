"""The pictures of the gallery: figures that a page leaves in variables."""

from __future__ import annotations

from typing import Any

from sphinx_gallery.scrapers import figure_rst

from bayeskit.gallery._run_script import figures_in, set_style

SEEN = "__figures_shown__"


def scrape(block: tuple[Any, ...], block_vars: dict[str, Any], gallery_conf: dict[str, Any]) -> str:
    """Save the figures that the last block of a page made; return what shows them."""
    variables = block_vars["example_globals"]
    seen = variables.setdefault(SEEN, [])
    paths = []
    for figure in figures_in(variables):
        if not any(figure is old for old in seen):
            seen.append(figure)
            path = next(block_vars["image_path_iterator"])
            figure.savefig(path, dpi=150)
            paths.append(path)
    return figure_rst(paths, gallery_conf["src_dir"])


def reset(gallery_conf: dict[str, Any], name: str) -> None:
    """Begin each page with the same colours and one thread."""
    import torch

    set_style()
    torch.set_num_threads(1)
