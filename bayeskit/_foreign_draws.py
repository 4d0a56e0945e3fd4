"""Draws of other programs, read from ArviZ's groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bayeskit._arviz_data import DataForArviz, pointwise_log_likelihood
from bayeskit._core.inputs import unknown_name, warn_user
from bayeskit._logdensity.target import Target
from bayeskit.errors import DataError, DataWarning, DrawsError, SettingsError, ShapeError

if TYPE_CHECKING:
    import xarray as xr

_STATS = ("acceptance_rate", "diverging", "energy", "n_steps", "step_size", "tree_depth")
_SAMPLE = ("chain", "draw")
_SHOWN = 5
#: Relative difference of stored log likelihoods beyond rounding of values in text files, and the fewest digits there.
_OTHER = 1e-3


class ForeignDraws(NamedTuple):
    """What another program's draws become, under the names of :class:`bayeskit.Draws`."""

    unconstrained: Tensor  # (chains, draws, d)
    log_prior: Tensor  # (chains, draws)
    log_likelihood: Tensor  # (chains, draws)
    sample_stats: dict[str, Tensor]
    settings: dict[str, Any]
    seconds: float
    target: Target


def foreign_draws(data: Any, target: Target) -> ForeignDraws:
    """Return the draws of a target that another program made; see :meth:`bayeskit.Draws.from_arviz`."""
    groups = _groups(data, [site.name for site in target.sites])
    posterior = groups["posterior"]
    if missing := [dim for dim in _SAMPLE if dim not in posterior.dims]:
        raise ShapeError(
            f"the posterior has no dimension {missing[0]!r}; its variables need the dimensions chain, draw"
        )
    found = {str(x.attrs.get("site", n)): _sampled(x) for n, x in posterior.data_vars.items() if _is_sampled(x)}
    for site in target.sites:
        if site.name not in found:
            raise unknown_name("site", site.name, list(found))
    target = _labelled(target, posterior, found)
    u = target.unconstrain({site.name: _numbers(found[site.name], site.name) for site in target.sites})
    log_prior, log_likelihood = target.evaluate(u)
    outside = int((~(log_prior + log_likelihood).isfinite()).sum())
    if outside:
        raise DrawsError(
            f"the log density of the target is not finite at {outside} of {log_prior.numel()} draws, so they belong to "
            "another target: compare the priors and the units of the sites"
        )
    if float(posterior.attrs.get("beta", 1.0)) != 1:
        raise DrawsError("the draws are tempered (beta below 1), and are not draws of the posterior")
    known = {*target.constrain(u[:1, :1], deterministic=True), *target.whole_numbers()}
    if more := [name for name in found if name not in known]:
        warn_user(
            f"the target has no {', '.join(map(repr, more[:_SHOWN]))}, so these variables are left out; if one is a "
            "parameter of the model, the target is another model",
            DataWarning,
        )
    _check_data(target, groups)
    _check_log_likelihood(target, u, groups)
    facts = posterior.attrs
    return ForeignDraws(
        u,
        log_prior,
        log_likelihood,
        _statistics(groups.get("sample_stats"), u),
        {"sampler": str(facts.get("sampler", facts.get("inference_library", "unknown")))},
        float(facts.get("sampling_time", 0.0)),
        target,
    )


def _groups(data: Any, sites: Sequence[str]) -> dict[str, xr.Dataset]:
    """Return the groups of ``InferenceData``, of a ``DataTree``, or of a posterior alone, of arrays the sites only."""
    import xarray as xr

    if isinstance(data, xr.Dataset):
        return {"posterior": data}
    if isinstance(data, Mapping) and not isinstance(data, xr.DataTree) and not hasattr(data, "groups"):
        return {"posterior": _of_arrays({name: data[name] for name in sites if name in data} or data)}
    if isinstance(data, xr.DataTree):
        found = {str(name): group.to_dataset() for name, group in data.children.items()}
    elif hasattr(data, "groups"):
        found = {name: data[name] for name in data.groups()}
    else:
        raise SettingsError(
            "data must be InferenceData, a DataTree, a Dataset of the posterior, or arrays by site, not a "
            f"{type(data).__name__}; arviz.from_pyro, from_numpyro, from_cmdstanpy and their like read what these "
            "programs return"
        )
    if "posterior" not in found:
        raise DrawsError(f"there is no posterior among the groups {', '.join(found) or 'of the data'}")
    return found


def _of_arrays(values: Mapping[str, Any]) -> xr.Dataset:
    import xarray as xr

    found = {}
    for name, x in values.items():
        try:
            array = x.detach().cpu().numpy() if isinstance(x, Tensor) else np.asarray(x)
        except ValueError as error:
            raise ShapeError(f"the values of {name!r} are no array: {error}") from error
        if array.ndim < 2:
            raise ShapeError(
                f"the values of {name!r} need the dimensions chain and draw first, as in Pyro's and NumPyro's "
                "mcmc.get_samples(group_by_chain=True)"
            )
        found[name] = ([*_SAMPLE, *(f"{name}_dim_{i}" for i in range(array.ndim - 2))], array)
    if len(shapes := {array.shape[:2] for _, array in found.values()}) > 1:
        raise ShapeError(f"sites have different numbers of chains and draws, {', '.join(map(str, sorted(shapes)))}")
    return xr.Dataset(found)


def _is_sampled(x: xr.DataArray) -> bool:
    return set(_SAMPLE) <= set(x.dims)


def _sampled(x: xr.DataArray) -> xr.DataArray:
    return x.transpose(*_SAMPLE, ...)


def _numbers(x: xr.DataArray, name: str, dtype: Any = np.float64) -> Tensor:
    """Return values, by default in double precision; DataError for what is no number."""
    try:
        return torch.from_numpy(np.array(x.values, dtype=dtype))
    except (TypeError, ValueError) as error:
        raise DataError(f"the values of {name!r} are no real numbers, but of type {x.dtype}") from error


def _labelled(target: Target, posterior: xr.Dataset, found: Mapping[str, xr.DataArray]) -> Target:
    """Return the target with the dimensions and labels of the data where it has none of its own."""
    own, known = target.dimensions(), target.labels.coords
    plates = {plate for along in own.values() for plate in along}
    dims: dict[str, list[str]] = {}
    coords: dict[str, list[Any]] = {}
    for site in target.sites:
        along = [str(dim) for dim in found[site.name].dims[2:]]
        mine = own.get(site.name, ())
        if len(mine) != len(along):
            continue
        if not any(mine) and not any(dim.startswith(f"{site.name}_dim_") or dim in plates for dim in along):
            dims[site.name], mine = along, tuple(along)
        for dim, plate in zip(along, mine, strict=True):
            labels = [_as_label(x) for x in posterior.indexes[dim]] if dim in posterior.indexes else []
            if plate is not None and plate not in known and len({*labels}) == len(labels) != 0:
                if labels != list(range(len(labels))):
                    coords[plate] = labels
    if dims:
        target = target.labelled(dims=dims)
    return target.labelled(coords) if coords else target


def _as_label(x: Any) -> Any:
    """Return a label as numbers and texts have it, others such as dates and tuples as text."""
    return x if isinstance(x, str | int | float | bool) else str(x)


def _statistics(stats: xr.Dataset | None, u: Tensor) -> dict[str, Tensor]:
    if stats is None:
        return {}
    _check_sizes("sample_stats", stats, u)
    known = {name: _sampled(stats[name]) for name in _STATS if name in stats and set(stats[name].dims) == {*_SAMPLE}}
    whole = {"diverging": bool, "n_steps": np.int64, "tree_depth": np.int64}
    return {name: _numbers(x, name, whole.get(name, np.float64)) for name, x in known.items()}


def _check_sizes(group: str, found: xr.Dataset | xr.DataArray, u: Tensor) -> None:
    """Raise ShapeError for another number of chains or draws than those of the posterior ``(chains, draws, d)``."""
    sizes = tuple(found.sizes.get(dim, size) for dim, size in zip(_SAMPLE, u.shape, strict=False))
    if sizes != tuple(u.shape[:2]):
        raise ShapeError(
            f"{group} has {sizes[0]} chains of {sizes[1]} draws, and the posterior {u.shape[0]} of {u.shape[1]}; "
            "select chains and draws of all groups, as data.sel(draw=...) does"
        )


def _check_data(target: Target, groups: Mapping[str, xr.Dataset]) -> None:
    """Raise DataError where observed data have other values than those of the target."""
    stored = groups.get("observed_data")
    if stored is None:
        return
    observed = DataForArviz(target).counted(target.named_data()[0], 0)
    for name, x in observed.items():
        if name not in stored:
            continue
        other = _numbers(stored[name], name)
        spread = float(other.std(correction=0))
        same = other.numel() == x.numel() and torch.allclose(
            other.flatten(), x.detach().cpu().double().flatten(), rtol=1e-5, atol=1e-6 * spread, equal_nan=True
        )
        if not same:
            raise DataError(
                f"the observed data of {name!r} differ from those of the target; make it from the same data"
            )


def _check_log_likelihood(target: Target, u: Tensor, groups: Mapping[str, xr.Dataset]) -> None:
    """Raise DrawsError where stored pointwise log likelihoods differ from those of the target."""
    stored = groups.get("log_likelihood")
    if stored is None or not any(name in stored for name in target.named_data()[0]):
        return
    for name, x in DataForArviz(target).counted(pointwise_log_likelihood(target, u)).items():
        if name not in stored or not _is_sampled(stored[name]):
            continue
        _check_sizes("log_likelihood", stored[name], u)
        other = _numbers(_sampled(stored[name]), name).reshape(*u.shape[:2], -1)
        mine = x.detach().cpu().double().reshape(*u.shape[:2], -1)
        if other.shape != mine.shape:
            raise DrawsError(
                f"the log likelihood of {name!r} has {other.shape[-1]} data in the draws and {mine.shape[-1]} in the "
                "target; make the target from these data"
            )
        away = ((other - mine).abs() / (1 + mine.abs())).nan_to_num(nan=torch.inf).flatten(0, 1).median(0).values
        if float(away.max()) > _OTHER:
            place = int(away.argmax())
            raise DrawsError(
                f"the log likelihood of datum {place} of {name!r} is {float(other[0, 0, place]):.6g} in the draws and "
                f"{float(mine[0, 0, place]):.6g} in the target, so these are draws of another model; compare the "
                "parameters of its distributions, such as variances and precisions. If log likelihoods of the draws "
                "leave out constants, drop the group log_likelihood"
            )
