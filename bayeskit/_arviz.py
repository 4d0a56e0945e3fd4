"""The border to ArviZ, 0.x and 1.x; xarray inside."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import Any

import xarray as xr
from torch import Tensor


def to_datasets(groups: dict[str, dict[str, Tensor]], attributes: dict[str, Any]) -> dict[str, xr.Dataset]:
    """Return one dataset a group, with ArviZ's dimension names.

    Parameters
    ----------
    groups : dict
        By ArviZ group and variable, tensors of shape ``(chains, draws, *shape)``.
    attributes : dict
        Strings and numbers to keep with every group.
    """
    facts = {"inference_library": "bayeskit", "inference_library_version": version("bayeskit")} | attributes
    # netCDF attributes hold strings and numbers only, no booleans.
    numbers = {k: int(v) if isinstance(v, bool) else v for k, v in facts.items()}
    plain = {k: v for k, v in numbers.items() if isinstance(v, (str, int, float))}
    return {name: _dataset(variables, plain) for name, variables in groups.items() if variables}


def as_inference_data(datasets: dict[str, xr.Dataset]) -> Any:
    """Return ``InferenceData`` where the installed ArviZ is 0.x, else the ``DataTree`` itself."""
    tree = xr.DataTree.from_dict(datasets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces 1.x at import
        import arviz

        container = vars(arviz).get("InferenceData")
        return tree if container is None else container.from_datatree(tree)


def _dataset(variables: dict[str, Tensor], attributes: dict[str, Any]) -> xr.Dataset:
    data = {}
    for name, tensor in variables.items():
        array = tensor.detach().cpu().numpy()
        dims = ["chain", "draw"] + [f"{name}_dim_{i}" for i in range(array.ndim - 2)]
        data[name] = (dims, array)
    chains, count = next(iter(variables.values())).shape[:2]
    return xr.Dataset(data, coords={"chain": range(chains), "draw": range(count)}, attrs=attributes)
