"""The pages of the reference: one a room, with a table of every public name."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

#: Rooms in the order in which a reader meets them; those of one part share a heading in the table of contents.
PARTS = {
    "Targets and draws": (
        "bayeskit",
        "bayeskit.ode",
        "bayeskit.parallel",
        "bayeskit.distributed",
    ),
    "Inference": ("bayeskit.inference",),
    "Models": ("bayeskit.models",),
    "Workflows, problems, pages": (
        "bayeskit.workflows",
        "bayeskit.exact",
        "bayeskit.gallery",
        "bayeskit.report",
        "bayeskit.testing",
        "bayeskit.errors",
    ),
}


def public_names(module: ModuleType) -> list[str]:
    """Return what a room offers: its ``__all__``, of a module without the functions that serve other modules.

    Those have no example. A module that a package offers as a whole is there for its classes.
    """
    if hasattr(module, "__all__"):
        names = sorted(module.__all__)
        return names if hasattr(module, "__path__") else [n for n in names if serves_users(module, n)]
    return sorted(
        name
        for name, thing in list(vars(module).items())  # asking a package for its names may import more of them
        if not name.startswith("_")
        and (inspect.isclass(thing) or (inspect.isfunction(thing) and not is_offered_whole(module)))
        and thing.__module__ == module.__name__
    )


def serves_users(module: ModuleType, name: str) -> bool:
    """Tell whether a name of a module is for users: a class, a function with an example, or from elsewhere."""
    thing = getattr(module, name)
    shown = inspect.isfunction(thing) and ("Examples\n---" in (inspect.getdoc(thing) or ""))
    is_class = inspect.isclass(thing) and not hasattr(thing, "__origin__")  # list[int] counts as one
    home = getattr(thing, "__module__", None) or ""
    return is_class or shown or (home.startswith("bayeskit.") and home != module.__name__)


def packages_above(module: ModuleType) -> list[ModuleType]:
    """Return the packages that a module is in, the outermost first."""
    above = module.__name__.split(".")[:-1]
    return [importlib.import_module(".".join(above[:depth])) for depth in range(1, len(above) + 1)]


def is_offered_whole(module: ModuleType) -> bool:
    """Tell whether a package above has the module itself among its names, as in ``likelihoods.Bernoulli``."""
    return any(
        getattr(package, name) is module
        for package in packages_above(module)
        for name in getattr(package, "__all__", ())
    )


def rooms_below(name: str) -> list[str]:
    """Return the room and every one below it that offers names, in alphabetical order."""
    module = importlib.import_module(name)
    found = [name] if public_names(module) else []
    if name != "bayeskit" and hasattr(module, "__path__"):
        for child in pkgutil.walk_packages(module.__path__, f"{name}."):
            if any(part.startswith("_") for part in child.name.split(".")):
                continue
            room = importlib.import_module(child.name)
            if (child.ispkg and public_names(room)) or is_offered_whole(room):
                found.append(child.name)
    return sorted(found)


def room_above(room: str, rooms: list[str]) -> str | None:
    """Return the innermost of these rooms that a room is in, None if it is in none of them."""
    above = [other for other in rooms if room.startswith(f"{other}.")]
    return max(above, key=len, default=None)


def returned_classes(thing: Any) -> Iterator[type]:
    """Yield the classes of ours that a function, or a public method of a class, says it returns."""
    if not inspect.isclass(thing):
        functions = [thing]
    else:
        functions = [getattr(member, "__func__", member) for name, member in vars(thing).items() if name[0] != "_"]
        functions = [member.fget if isinstance(member, property) else member for member in functions]
    for function in functions:
        known = getattr(sys.modules.get(getattr(function, "__module__", None)), "__dict__", {})
        for word in re.findall(r"\w+", str(getattr(function, "__annotations__", {}).get("return", ""))):
            found = known.get(word)
            where = f"{getattr(found, '__module__', '')}.{word}"
            if inspect.isclass(found) and where.startswith("bayeskit.") and not word.startswith("_"):
                yield found


def write_pages(folder: Path) -> None:
    """Write the pages of the reference into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = ["# Reference", "", "Every public name, module by module.", ""]
    homes: dict[int, str] = {}
    rooms = [importlib.import_module(room) for roots in PARTS.values() for root in roots for room in rooms_below(root)]
    offered = {id(getattr(room, name)) for room in rooms for name in public_names(room)}
    for part, roots in PARTS.items():
        contents += ["```{toctree}", f":caption: {part}", ":maxdepth: 1", ""]
        for root in roots:
            below = rooms_below(root)
            contents += [room for room in below if room_above(room, below) is None]
            for room in below:
                inside = [other for other in below if room_above(other, below) == room]
                _write_if_changed(folder / f"{room}.rst", _page(room, inside, homes, offered))
        contents += ["```", ""]
    _write_if_changed(folder / "index.md", "\n".join(contents))


def _page(room: str, inside: list[str], homes: dict[int, str], offered: set[int]) -> str:
    """Return a room's page; ``homes`` knows where things were met first, so that each is described once.

    What functions return and no room offers by name is described where it is returned first. Pages of the rooms
    ``inside`` this one follow it.
    """
    module, title = importlib.import_module(room), room.rpartition(".")[2]
    lines = [title, "=" * len(title), "", f"``{room}``", "", f".. currentmodule:: {room}", ""]
    lines.append(inspect.getdoc(module) or "")
    headings = ("Functions", "Classes", "What they return", "Also here", "Values")
    kinds: dict[str, list[str]] = {heading: [] for heading in headings}
    for name in public_names(module):
        thing = getattr(module, name)
        if inspect.ismodule(thing):
            continue
        if not callable(thing):
            kinds["Values"].append(name)
        elif id(thing) in homes:
            kinds["Also here"].append(homes[id(thing)])
        else:
            homes[id(thing)] = f"{room}.{name}"
            kinds["Classes" if inspect.isclass(thing) else "Functions"].append(name)
            returning = [thing]
            for one in returning:  # what is returned has methods of its own, whose results are added as they are met
                for result in returned_classes(one):
                    where = f"{result.__module__}.{result.__name__}"
                    if id(result) not in offered and id(result) not in homes and where.startswith(f"{room}."):
                        homes[id(result)] = where
                        kinds["What they return"].append(homes[id(result)])
                        returning.append(result)
    for kind, names in kinds.items():
        if not names:
            continue
        lines += ["", kind, "-" * len(kind), ""]
        if kind == "Also here":
            lines.append(", ".join(f":obj:`~{name}`" for name in names))
        elif kind == "Values":
            lines += [f".. autodata:: {name}\n   :no-value:\n" for name in names]
        else:
            lines += [".. autosummary::", "   :toctree: generated", "   :nosignatures:", ""]
            seen = [name.removeprefix(f"{room}.") for name in names]  # Sphinx wants them as seen from here
            lines += [f"   ~{name}" if "." in name else f"   {name}" for name in seen]
    if inside:
        lines += ["", "Modules", "-------", "", ".. toctree::", "   :maxdepth: 1", "", *(f"   {one}" for one in inside)]
    return "\n".join(lines) + "\n"


def _write_if_changed(path: Path, text: str) -> None:
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")
