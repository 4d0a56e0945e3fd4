"""Interface to ArviZ 0.x and 1.x, by xarray."""

from __future__ import annotations

import errno
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from bayeskit._core.folders import clear_temporary_files, temporary_name
from bayeskit._core.inputs import warn_user
from bayeskit.errors import ConversionWarning, OutputError, ShapeError

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


def to_datasets(
    groups: dict[str, dict[str, Tensor]],
    attributes: dict[str, Any],
    dims: Mapping[str, Sequence[str | None]] | None = None,
    coords: Mapping[str, Sequence[Any]] | None = None,
    *,
    sampled: bool = True,
) -> dict[str, xr.Dataset]:
    """Return a dataset for each group of tensors ``(chains, draws, *shape)``, with ArviZ's dimension names.

    ``dims`` names the dimensions of variables, None where they have no name, and ``coords`` labels along them;
    ShapeError if these do not fit. A term of data of more dimensions, such as rows of vectors, has the first ones.
    Without ``sampled``, tensors have neither chains nor draws.
    """
    plain, dims, coords = plain_attributes(attributes), dims or {}, coords or {}
    renamed: dict[str, str] = {}
    made = {name: _dataset(x, plain, dims, coords, sampled, renamed) for name, x in groups.items() if x}
    if renamed:
        pairs = ", ".join(f"{old!r} as {new!r}" for old, new in renamed.items())
        warn_user(
            f"ArviZ cannot hold some names and gets {pairs}; the attribute 'site' of a variable keeps its name. Name "
            "sites and plates without slashes, unlike one another, and not 'chain' or 'draw'",
            ConversionWarning,
        )
    return made


def plain_attributes(facts: dict[str, Any]) -> dict[str, str | int | float]:
    """Return the facts that netCDF can store, strings and numbers, with the library's name and version added."""
    facts = {"inference_library": "bayeskit", "inference_library_version": version("bayeskit")} | facts
    numbers = {k: int(v) if isinstance(v, bool) else v for k, v in facts.items()}
    return {k: v for k, v in numbers.items() if isinstance(v, (str, int, float))}


def as_inference_data(datasets: dict[str, xr.Dataset]) -> Any:
    """Return ``InferenceData`` where the installed ArviZ is 0.x, else the ``DataTree`` itself."""
    import xarray as xr

    tree = xr.DataTree.from_dict(datasets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces 1.x at import
        import arviz

        container = vars(arviz).get("InferenceData")
        return tree if container is None else container.from_datatree(tree)


def summary(
    posterior: dict[str, Tensor],
    dims: Mapping[str, Sequence[str | None]],
    coords: Mapping[str, Sequence[Any]],
    **settings: Any,
) -> pd.DataFrame:
    """Return ArviZ's summary of sites ``(chains, draws, *shape)``."""
    data = as_inference_data(to_datasets({"posterior": posterior}, {}, dims, coords))
    import arviz
    import numpy as np

    with np.errstate(invalid="ignore", divide="ignore"):  # of what is the same at all draws
        return arviz.summary(data, **settings)


def elpd_data(
    elpd: float,
    standard_error: float,
    p_loo: float,
    pointwise: Tensor,
    pareto_k: Tensor,
    num_draws: int,
    threshold: float,
    warning: bool,
) -> Any:
    """Return ArviZ's result of leave-one-out cross-validation, of the class that its version has."""
    import xarray as xr

    each, shape = (xr.DataArray(x.detach().cpu().numpy(), dims="datum") for x in (pointwise, pareto_k))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        import arviz
    facts = {
        "elpd_loo": elpd,
        "se": standard_error,
        "p_loo": p_loo,
        "n_samples": num_draws,
        "n_data_points": len(pointwise),
        "warning": warning,
        "loo_i": each,
        "pareto_k": shape,
        "scale": "log",
        "good_k": threshold,
    }
    if "InferenceData" in vars(arviz):
        from arviz.stats.stats_utils import ELPDData

        return ELPDData(list(facts.values()), list(facts))
    from arviz_stats import utils

    names = {"elpd_loo": "elpd", "p_loo": "p", "loo_i": "elpd_i"}
    renamed = {names.get(name, name): value for name, value in facts.items()}
    # Earlier versions have one class for all kinds.
    return utils.ELPDDataLOO(**renamed) if "ELPDDataLOO" in vars(utils) else utils.ELPDData(kind="loo", **renamed)


def write_netcdf(datasets: dict[str, xr.Dataset], path: str | Path) -> None:
    """Write each dataset as a group, whole or not at all; raise ``OutputError`` if the file cannot be written."""
    import xarray as xr

    path = Path(path)
    clear_temporary_files(path.parent)
    temporary = temporary_name(path)
    # A checksum that every reader of HDF5 checks; scalars and texts cannot have one.
    encoding = {
        f"/{group}": {
            name: {"fletcher32": True, "chunksizes": values.shape}
            for name, values in data.variables.items()
            if values.size > 1 and values.dtype.kind in "biufc"
        }
        for group, data in datasets.items()
    }
    try:
        _require_space(temporary, sum(data.nbytes for data in datasets.values()))
        xr.DataTree.from_dict(datasets).to_netcdf(temporary, engine="h5netcdf", encoding=encoding)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; choose a folder that exists, is writable and has space"
        ) from error


def _require_space(path: Path, num_bytes: int) -> None:
    """Raise OSError if a file of tensors cannot be written; HDF5 ends the process where a disk is full."""
    with open(path, "wb") as file:
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(file.fileno(), 0, num_bytes + num_bytes // 4 + _OVERHEAD)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # some file systems cannot reserve space
                    raise


_OVERHEAD = 2**21  # bytes of names, attributes and chunks in a file of HDF5


def _dataset(
    variables: dict[str, Tensor],
    attributes: dict[str, Any],
    dims: Mapping[str, Sequence[str | None]],
    coords: Mapping[str, Sequence[Any]],
    sampled: bool,
    renamed: dict[str, str],  # is filled with names that change
) -> xr.Dataset:
    import xarray as xr

    first = ["chain", "draw"] if sampled else []
    data: dict[str, Any] = {}
    # A slash becomes a dot; ``chain`` and ``draw`` take an underscore, as does a dimension with the name of a variable.
    # The attribute ``site`` keeps the name.
    names, stored = dict[str, str](), dict[str, str]()
    for site in variables:
        names[site] = _allowed(site, variables.keys() - {site} | {*names.values()})
    for named in dict.fromkeys(named for site in variables for named in dims.get(site, ()) if named):
        stored[named] = _allowed(named, {*names.values(), *stored.values()})
    renamed.update({old: new for old, new in (*stored.items(), *names.items()) if old != new})
    sizes: dict[str, int] = {}
    for site, tensor in variables.items():
        name = names[site]
        array = tensor.detach().cpu().numpy()
        shape = array.shape[len(first) :]
        given = dims.get(site, ())
        own = [
            stored[named]
            if named and len(given) >= len(shape) and sizes.setdefault(named, size) == size
            else f"{name}_dim_{i}"
            for i, (named, size) in enumerate(zip([*given, *[None] * len(shape)], shape, strict=False))
        ]
        data[name] = (first + own, array, {} if name == site else {"site": site})
    labels: dict[str, Any] = {
        dim: list(coords.get(dim, range(size)))
        for along, array, _ in data.values()
        for dim, size in zip(along, array.shape, strict=True)
    }
    labels |= {stored[name]: list(coords.get(name, range(size))) for name, size in sizes.items()}
    for name, size in sizes.items():
        if len(found := labels[stored[name]]) != size:
            raise ShapeError(f"coords has {len(found)} labels for dimension {name!r}, whose size is {size}")
    if sampled:
        chains, count = next(iter(variables.values())).shape[:2]
        labels |= {"chain": range(chains), "draw": range(count)}
    return xr.Dataset(data, coords=labels, attrs=attributes)


def _allowed(site: str, taken: Collection[str]) -> str:
    """Return a name that a tree of datasets may have: without a slash, not taken, and not "chain" or "draw"."""
    name = site.replace("/", ".").strip() or "unnamed"
    while name in taken or name in ("chain", "draw"):
        name += "_"
    return name
