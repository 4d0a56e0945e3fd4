"""The structure of the package: what a module exports, who imports whom, and no circle at any depth."""

import ast
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import bayeskit

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
    return found


def exported(tree: ast.Module) -> set[str]:
    """Return the names in ``__all__``."""
    for node in tree.body:
        names = [getattr(t, "id", "") for t in getattr(node, "targets", [getattr(node, "target", None)])]
        if "__all__" in names:
            return set(ast.literal_eval(node.value))
    return set()


def unmarked(trees: Modules) -> list[str]:
    """Return functions and classes of public modules that are neither exported nor private."""
    return [
        f"{name}.{node.name}"
        for name, tree in trees.items()
        for node in tree.body
        if not any(part.startswith("_") for part in name.split("."))
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


def test_what_is_not_exported_is_private():
    assert unmarked(modules(ROOT)) == []


def test_no_name_stands_for_two_things():
    assert defined_twice(modules(ROOT)) == {}
    twice = {"a": ast.parse("def run(): pass"), "b": ast.parse("class run: pass"), "c": ast.parse("def _run(): pass")}
    assert defined_twice(twice) == {"run": {"a", "b"}}


def test_no_circle_of_imports_at_any_depth():
    assert circles(modules(ROOT)) == []


@pytest.mark.parametrize(
    ("room", "stranger"),
    [
        ("bayeskit.models", "bayeskit.inference"),
        ("bayeskit.inference", "bayeskit.models"),
        ("bayeskit.core", "bayeskit.inference"),
        ("bayeskit.core", "bayeskit.models"),
        ("bayeskit.core", "bayeskit.logdensity"),
        ("bayeskit.core", "bayeskit.compiler"),
        ("bayeskit.compiler", "bayeskit.logdensity"),
        ("bayeskit.compiler", "bayeskit.inference"),
        ("bayeskit.compiler", "bayeskit.models"),
        ("bayeskit.compiler", "bayeskit.ode"),
        ("bayeskit.logdensity", "bayeskit.inference"),
        ("bayeskit.logdensity", "bayeskit.models"),
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


def test_the_compiler_is_reached_through_its_door():
    assert through_a_wall(modules(ROOT), "bayeskit.compiler") == []


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
    assert everybodys < exported(trees["bayeskit.compiler"])
    taken = {
        (name, alias.name)
        for name, tree in trees.items()
        if not name.startswith("bayeskit.ode.")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "bayeskit.compiler"
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
    assert [str(folder) for folder in sorted(folders) if not (ROOT / folder).is_dir()] == []
    repeated = [path for path in tests.rglob("test_*.py") if path.stem.startswith(f"test_{path.parent.name}_")]
    assert repeated == []
