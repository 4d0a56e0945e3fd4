"""The structure of the package: what a module exports, who imports whom, and no circle at any depth."""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bayeskit
from bayeskit import extend

ROOT = Path(bayeskit.__file__).parent
Modules = dict[str, ast.Module]
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.cache
def modules(root: Path) -> Modules:
    """Parse every module below a folder, by its dotted name."""
    found = {}
    for path in root.rglob("*.py"):
        name = ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(encoding="utf-8"))
        if path.with_suffix(".pyi").exists():  # the names of the module, which it imports when they are first used
            found[name].body += ast.parse(path.with_suffix(".pyi").read_text(encoding="utf-8")).body
    return found


def exported(tree: ast.Module) -> set[str]:
    """Return the names in ``__all__``."""
    for node in tree.body:
        names = [getattr(t, "id", "") for t in getattr(node, "targets", [getattr(node, "target", None)])]
        if "__all__" in names:
            return set(ast.literal_eval(node.value))
    return set()


def unmarked(trees: Modules) -> list[str]:
    """Return functions and classes of public modules that are neither listed nor private."""
    return [
        f"{name}.{node.name}"
        for name, tree in trees.items()
        for node in tree.body
        if not is_private(name)
        and isinstance(node, DEFINITIONS)
        and not node.name.startswith("_")
        and node.name not in exported(tree)
    ]


def defined_twice(trees: Modules) -> dict[str, set[str]]:
    """Return public functions and classes that several modules define, with these modules."""
    places: dict[str, set[str]] = {}
    for module, tree in trees.items():
        for node in tree.body:
            if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(module)
    return {name: where for name, where in places.items() if len(where) > 1}


def imports(trees: Modules, name: str) -> Iterator[str]:
    """Yield the modules of the package that one imports, anywhere in it."""
    for node in ast.walk(trees[name]):
        if isinstance(node, ast.ImportFrom) and node.module:
            places = [(f"{node.module}.{alias.name}", node.module) for alias in node.names]
        elif isinstance(node, ast.Import):
            places = [(alias.name,) for alias in node.names]
        else:
            continue
        for place in places:
            yield from [p for p in place if p in trees and p != name][:1]


def circles(trees: Modules) -> list[list[str]]:
    """Return chains of imports that end where they begin, the first that is met on each way."""
    edges = {name: sorted(set(imports(trees, name))) for name in trees}
    found: list[list[str]] = []
    done: set[str] = set()

    def follow(name: str, way: list[str]) -> None:
        if name in way:
            found.append([*way[way.index(name) :], name])
        elif name not in done:
            for other in edges[name]:
                follow(other, [*way, name])
            done.add(name)

    for name in trees:
        follow(name, [])
    return found


def is_private(name: str) -> bool:
    """Tell whether a module, or a package around it, begins with an underscore."""
    return any(part.startswith("_") for part in name.split("."))


def lists_of_private_modules(trees: Modules) -> list[str]:
    """Return private modules that list names of their own in ``__all__``; those that pass names on may list them."""
    return [
        name
        for name, tree in trees.items()
        if is_private(name)
        and not name.endswith("torch_internals")
        and not (ROOT.parent / name.replace(".", "/")).is_dir()
        and exported(tree) & {node.name for node in tree.body if isinstance(node, DEFINITIONS)}
    ]


@pytest.mark.long
def test_what_users_import_is_listed_where_they_import_it():
    """In a package or a public module, and nowhere else; what such a module does not list is private."""
    assert unmarked(modules(ROOT)) == []
    assert lists_of_private_modules(modules(ROOT)) == []


def test_no_module_stands_beside_the_names_of_a_room():
    """A room's modules are private, but for three that are offered as a whole, and what is a room itself."""
    beside = [
        name
        for name in modules(ROOT)
        if name.count(".") > 1 and not is_private(name) and not (ROOT.parent / name.replace(".", "/")).is_dir()
    ]
    offered = [
        "bayeskit.exact.generated",
        "bayeskit.inference.generalized.calibrate",
        "bayeskit.models.vae.likelihoods",
    ]
    assert sorted(beside) == offered


def test_nobody_imports_a_private_name_of_another_module():
    taken = [
        (name, node.module, alias.name)
        for name, tree in modules(ROOT).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bayeskit")
        for alias in node.names
        if alias.name.startswith("_") and f"{node.module}.{alias.name}" not in modules(ROOT)
    ]
    assert taken == []


FAMILIES = ("bayeskit.models.", "bayeskit.inference.generalized.")
#: The last has names of models of phylogenetics, which the command line reads without torch.
DOORS = {"bayeskit.extend", "bayeskit.errors", "bayeskit._lazy", "bayeskit.models._substitution_names"}


def family_of(name: str) -> str:
    """Return the room of a family that a module is in, or ""."""
    return next((".".join(name.split(".")[:3]) for family in FAMILIES if f"{name}.".startswith(family)), "")


def around_the_door(trees: Modules) -> list[tuple[str, str]]:
    """Return modules of families with what they import of the core or of other families by another way."""
    return [
        (name, other)
        for name in trees
        if family_of(name)
        for other in imports(trees, name)
        if family_of(other) != family_of(name) and other not in DOORS
    ]


@pytest.mark.calibration
def test_families_know_the_core_through_one_door():
    trees = modules(ROOT)
    assert around_the_door(trees) == []
    core = [name for name in trees if not f"{name}.".startswith((*FAMILIES, "bayeskit.cli.", "bayeskit.gallery."))]
    met = {(name, other) for name in core for other in imports(trees, name) if f"{other}.".startswith(FAMILIES)}
    assert {name for name, _ in met} <= {"bayeskit.testing"}  # whose contracts are those of families as well


def test_families_that_know_each_other_are_seen():
    trees = {
        "bayeskit.extend": ast.parse(""),
        "bayeskit.models.one._inside": ast.parse("from bayeskit.extend import newton"),
        "bayeskit.models.two": ast.parse("from bayeskit.models.one import _inside"),
        "bayeskit.inference.generalized.losses": ast.parse("import bayeskit.models.two"),
        "bayeskit.inference.generalized.calibrate": ast.parse("import bayeskit.inference.generalized.losses"),
    }
    found = [("bayeskit.models.two", "bayeskit.models.one._inside")]
    assert around_the_door(trees) == [*found, ("bayeskit.inference.generalized.losses", "bayeskit.models.two")]


def test_the_interface_for_families_has_what_they_use_and_no_more():
    trees = modules(ROOT)
    used = {
        alias.name
        for name, tree in trees.items()
        if f"{name}.".startswith(FAMILIES)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "bayeskit.extend"
        for alias in node.names
    }
    assert used == set(extend.__all__) and all(hasattr(extend, name) for name in extend.__all__)


def test_no_name_stands_for_two_things():
    assert defined_twice(modules(ROOT)) == {}
    twice = {"a": ast.parse("def run(): pass"), "b": ast.parse("class run: pass"), "c": ast.parse("def _run(): pass")}
    assert defined_twice(twice) == {"run": {"a", "b"}}


@pytest.mark.calibration
def test_no_circle_of_imports_at_any_depth():
    assert circles(modules(ROOT)) == []


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("room", "stranger"),
    [
        ("bayeskit.inference", "bayeskit.models"),
        ("bayeskit._core", "bayeskit.inference"),
        ("bayeskit._core", "bayeskit.models"),
        ("bayeskit._core", "bayeskit._logdensity"),
        ("bayeskit._core", "bayeskit._compiler"),
        ("bayeskit._compiler", "bayeskit._logdensity"),
        ("bayeskit._compiler", "bayeskit.inference"),
        ("bayeskit._compiler", "bayeskit.models"),
        ("bayeskit._compiler", "bayeskit.ode"),
        ("bayeskit._logdensity", "bayeskit.inference"),
        ("bayeskit._logdensity", "bayeskit.models"),
        ("bayeskit", "bayeskit.cli"),
    ],
)
def test_rooms_that_do_not_know_each_other(room, stranger):
    trees = modules(ROOT)
    inside = [name for name in trees if name.startswith(room) and not name.startswith((stranger, "bayeskit.__main__"))]
    assert len(inside) > 1
    assert [(name, other) for name in inside for other in imports(trees, name) if other.startswith(stranger)] == []


def through_a_wall(trees: Modules, room: str) -> list[tuple[str, str]]:
    """Return modules outside a room, with the modules and unlisted names of it that they import by another way."""
    found = []
    door = exported(trees[room])
    for name, tree in trees.items():
        if name == room or name.startswith(f"{room}."):
            continue
        found += [(name, other) for other in imports(trees, name) if other.startswith(f"{room}.")]
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == room:
                found += [(name, alias.name) for alias in node.names if alias.name not in door]
    return found


@pytest.mark.calibration
def test_the_compiler_is_reached_through_its_door():
    assert through_a_wall(modules(ROOT), "bayeskit._compiler") == []


@pytest.mark.calibration
def test_code_is_generated_for_differential_equations_alone():
    """The rest of the package compiles densities and functions, and knows nothing of texts and libraries."""
    everybodys = {
        "Compile",
        "Cost",
        "Engine",
        "Evaluators",
        "FailingApart",
        "compile_evaluation",
        "compile_function",
        "is_traced",
        "scan",
    }
    trees = modules(ROOT)
    assert everybodys < exported(trees["bayeskit._compiler"])
    taken = {
        (name, alias.name)
        for name, tree in trees.items()
        if not name.startswith("bayeskit.ode.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "bayeskit._compiler"
        for alias in node.names
    }
    assert {one for one in taken if one[1] not in everybodys} == set()


def test_a_way_through_a_wall_is_seen():
    trees = {
        "house.room": ast.parse("__all__ = ['door']"),
        "house.room.inside": ast.parse("from house.room import door"),
        "house.street": ast.parse("from house.room import door, inside\nimport house.room.inside"),
    }
    seen = {("house.street", "house.room.inside"), ("house.street", "inside")}
    assert set(through_a_wall(trees, "house.room")) == seen


def test_defects_of_structure_are_seen(tmp_path):
    house = tmp_path / "house"
    house.mkdir()
    (house / "__init__.py").write_text("")
    (house / "cellar.py").write_text("def stairs():\n    from house.attic import roof\n    return roof\n")
    (house / "attic.py").write_text("from house import cellar\n\n__all__ = ['roof']\n\n\ndef roof(): ...\n")
    assert unmarked(modules(house)) == ["house.cellar.stairs"]
    assert len(circles(modules(house))) == 1


def public_calls(trees: Modules) -> Iterator[tuple[str, Callable[..., object]]]:
    """Yield the functions, classes and methods that rooms export, with their names; the command line has its own."""
    for name in trees:
        is_room = (ROOT.parent / name.replace(".", "/") / "__init__.py").exists()
        if (is_room or name.count(".") == 1) and name != "bayeskit.cli":
            room = importlib.import_module(name)
            for word in sorted(getattr(room, "__all__", ())):
                thing = getattr(room, word)
                if callable(thing):
                    yield f"{name}.{word}", thing
                if inspect.isclass(thing) and thing.__module__.startswith("bayeskit"):
                    methods = inspect.getmembers(thing, inspect.isroutine)
                    yield from ((f"{name}.{word}.{n}", method) for n, method in methods if not n.startswith("_"))


def misplaced(calls: Iterator[tuple[str, Callable[..., object]]]) -> list[str]:
    """Return calls whose seed can be given by position after other arguments, or whose bar is off by default."""
    found = []
    for name, call in calls:
        try:
            parameters = inspect.signature(call).parameters
        except (TypeError, ValueError):
            continue
        places = [word for word in parameters if word not in ("self", "cls")]
        seed, progress = parameters.get("seed"), parameters.get("progress")
        if seed is not None and places[0] != "seed" and seed.kind is not seed.KEYWORD_ONLY:
            found.append(f"{name}: seed")
        if progress is not None and progress.default is not True:
            found.append(f"{name}: progress")
    return sorted(set(found))


def test_seeds_are_keywords_and_progress_is_shown():
    assert misplaced(public_calls(modules(ROOT))) == []


def test_a_seed_by_position_is_seen():
    def draw(size, seed=0, *, progress=False): ...

    assert misplaced(iter([("draw", draw)])) == ["draw: progress", "draw: seed"]


def test_tests_mirror_the_rooms():
    """A folder of tests has the name of a room, and a file does not repeat it; `examples` are the gallery's pages."""
    tests = Path(__file__).parent
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")} - {Path("examples")}
    rooms = {path.parent.relative_to(ROOT) for path in ROOT.rglob("__init__.py")}
    rooms = {Path(*(part.removeprefix("_") for part in room.parts)) for room in rooms}
    assert folders - rooms == set()
    repeated = [path for path in tests.rglob("test_*.py") if path.stem.startswith(f"test_{path.parent.name}_")]
    assert repeated == []
