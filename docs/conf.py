"""How the documentation is built: offline, with warnings as errors (`make docs`)."""

import importlib.util
import os
import shutil
import sys
import warnings
from importlib.metadata import version as installed_version
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

import claims  # noqa: E402
import left_out  # noqa: E402
import project_links  # noqa: E402
import questions  # noqa: E402
import round_citations  # noqa: E402
from reference import write_pages  # noqa: E402

from bayeskit import gallery  # noqa: E402
from bayeskit._core.page import template_source  # noqa: E402

project = "bayeskit"
author = "The bayeskit developers"
copyright = "The bayeskit developers"
version = release = installed_version("bayeskit")

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.mathjax",
    "numpydoc",
    "myst_nb",
    "sphinx_gallery.gen_gallery",
    "sphinxcontrib.bibtex",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "_extensions", "gallery/**/*.ipynb", "gallery/*.ipynb"]
root_doc = "index"
nitpicky = False

# -- pages ----------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = f"bayeskit {release}"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}
html_css_files = ["bayeskit.css"]
html_js_files = ["sort_tables.js"]
html_theme_options = {
    "navbar_persistent": ["search-button"],  # the field takes the width of two entries
    "navbar_end": ["theme-switcher", "navbar-icon-links"],
    "icon_links": project_links.icon_links(os.environ),
    "show_prev_next": True,
    # On the gallery's pages code needs the width.
    "secondary_sidebar_items": {
        pages: ["page-toc"] for pages in ("*", "choosing/*", "concepts/*", "how_to/*", "tables/*", "api/**")
    },
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "collapse_navigation": True,  # hundreds of entries of the reference would be written into each page
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": []}
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# -- mathematics, without a network ---------------------------------------------------------

MATHJAX = Path(importlib.util.find_spec("mathjax").origin).parent / "static" / "mathjax" / "es5"
mathjax_path = "mathjax/tex-chtml-full.js"
mathjax3_config = {"options": {"enableMenu": False}}

# -- text -----------------------------------------------------------------------------------

# ArviZ 0.23 announces 1.x whenever it is imported, and tqdm looks for widgets in every notebook.
os.environ["PYTHONWARNINGS"] = "ignore::FutureWarning,ignore:IProgress not found"
os.environ["OMP_NUM_THREADS"] = "1"
# Kernels warn that they talk over TCP, which here never leaves the machine.
ipython = HERE / "_build" / "ipython"
(ipython / "profile_default").mkdir(parents=True, exist_ok=True)
(ipython / "profile_default" / "ipython_kernel_config.py").write_text('c.IPKernelApp.log_level = "ERROR"\n')
os.environ["IPYTHONDIR"] = str(ipython)
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_output_stderr = "remove-warn"
bibtex_bibfiles = ["references.bib"]
bibtex_default_style = "plain"
bibtex_reference_style = round_citations.NAME

# -- reference ------------------------------------------------------------------------------

templates_path = ["_templates"]
autosummary_generate = True
autosummary_imported_members = True
autodoc_typehints = "none"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False

# -- gallery --------------------------------------------------------------------------------

# A process that has grown is replaced by a new one, which joblib takes for a fault.
warnings.filterwarnings("ignore", "A worker stopped while some jobs were given", UserWarning)

pages_left_out = [page for page in gallery.pages() if page.missing_packages]
for page in pages_left_out:
    print(f"left out: the page {page.name!r} needs {', '.join(page.missing_packages)}")

sphinx_gallery_conf = {
    "examples_dirs": "../examples",
    "gallery_dirs": "gallery",
    "filename_pattern": r"\.py$",
    "ignore_pattern": left_out.ignore_pattern(page.name for page in pages_left_out),
    "subsection_order": [f"../examples/{group}" for group in gallery.GROUPS],
    "within_subsection_order": "FileNameSortKey",
    "image_scrapers": ("figure_scraper.scrape",),
    "reset_modules": ("figure_scraper.reset",),
    "capture_repr": (),
    "parallel": 2,
    "show_memory": False,
    "min_reported_time": 0,
    "download_all_examples": False,
    "remove_config_comments": True,
    "backreferences_dir": "api/backreferences",
    "doc_module": ("bayeskit",),
    "nested_sections": True,
    "copyfile_regex": "",
    "write_computation_times": False,
}

# -- what is made before reading ------------------------------------------------------------


def vendor(app):
    """Bring MathJax from the environment, and the script that sorts tables from the package's own reports."""
    static = Path(app.outdir) / "_static"
    fonts = Path("output") / "chtml" / "fonts" / "woff-v2"
    (static / "mathjax" / fonts).mkdir(parents=True, exist_ok=True)
    shutil.copy(MATHJAX / "tex-chtml-full.js", static / "mathjax")
    for font in sorted((MATHJAX / fonts).glob("*.woff")):
        shutil.copy(font, static / "mathjax" / fonts)
    mark = (
        'for (const table of document.querySelectorAll("table")) { if (table.tHead) table.classList.add("sortable"); }'
    )
    script = f'document.addEventListener("DOMContentLoaded", () => {{\n{mark}\n{template_source("page.js")}\n}});\n'
    (static / "sort_tables.js").write_text(script, encoding="utf-8")


def setup(app):
    """Write the pages of the reference and bring what pages load."""
    write_pages(HERE / "api")
    claims.connect(app, HERE / "claims")  # before links are taken out
    questions.connect(app, HERE / "tables" / "gallery.csv")
    left_out.connect(app, {f"gallery/{page.group}/{page.name}": page.title for page in pages_left_out})
    app.connect("builder-inited", vendor)
