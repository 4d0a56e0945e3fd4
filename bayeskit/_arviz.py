"""The border to ArviZ, 0.x and 1.x; xarray inside."""

from __future__ import annotations

import warnings
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import xarray as xr
from torch import Tensor

from bayeskit.errors import ModelError

if TYPE_CHECKING:
    from bayeskit.draws import Draws


def to_arviz(draws: Draws) -> Any:
    """Convert draws; see :meth:`bayeskit.Draws.to_arviz`."""
    return as_inference_data(to_datasets(draws))


def to_datasets(draws: Draws) -> dict[str, xr.Dataset]:
    """Return one dataset a group, with ArviZ's dimension and variable names."""
    attributes = _attributes(draws)
    values = draws.values() if draws.target is not None else {"u": draws.unconstrained}
    stats = {"lp": draws.log_density, "log_prior": draws.log_prior, "log_likelihood": draws.log_likelihood}
    stats |= draws.sample_stats
    groups = {"posterior": _dataset(values, attributes), "sample_stats": _dataset(stats, attributes)}
    pointwise = _pointwise(draws)
    if pointwise:
        groups["log_likelihood"] = _dataset(pointwise, attributes)
    return groups


def _pointwise(draws: Draws) -> dict[str, Tensor]:
    if draws.target is None:
        return {}
    try:
        return draws.target.pointwise_log_likelihood(draws.unconstrained)
    except ModelError:
        return {}  # observations coupled by a summed-out site, or a target made from functions


def as_inference_data(groups: dict[str, xr.Dataset]) -> Any:
    """Return ``InferenceData`` where the installed ArviZ is 0.x, else the ``DataTree`` itself."""
    tree = xr.DataTree.from_dict(groups)
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


def _attributes(draws: Draws) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "inference_library": "bayeskit",
        "inference_library_version": version("bayeskit"),
        "sampling_time": float(draws.seconds),
        "num_gradients": int(draws.num_gradients),
    }
    return facts | {k: v for k, v in draws.settings.items() if isinstance(v, (str, int, float))}
