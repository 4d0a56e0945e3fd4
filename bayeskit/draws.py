"""Draws, the result of every sampler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayeskit.core.compatibility import as_inference_data, summary, to_datasets
from bayeskit.core.inputs import unknown_name, whole_number
from bayeskit.core.storage import load_tensors, save_tensors
from bayeskit.errors import DrawsError, ModelError
from bayeskit.logdensity.target import Target

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["Draws", "as_numpy"]

_SAVED = ("unconstrained", "log_prior", "log_likelihood", "beta")
_ENDINGS = ("interrupted", "time budget", "finished", "converged")  # the worst first


@dataclass(frozen=True, eq=False)
class Draws:
    """Draws of one or more chains, in unconstrained space.

    Attributes
    ----------
    unconstrained : Tensor
        Shape ``(chains, draws, d)``.
    log_prior, log_likelihood : Tensor
        Shape ``(chains, draws)``.
    beta : Tensor
        Inverse temperature of each chain, shape ``(chains,)``.
    sample_stats : dict of Tensor
        ``acceptance_rate``, ``diverging``, ``energy``, ``n_steps``, ``step_size``, each
        ``(chains, draws)``, under ArviZ's names.
    num_gradients : int
        Gradient evaluations spent, warm-up included.
    seconds : float
        Wall-clock time spent.
    settings : dict
        Settings of the run: sampler, warm-up, seed.
    target : Target, optional
        Target of the draws; needed to constrain them.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1) - 0.919 * 2, lambda u: 0 * u.sum(-1), dim=2,
    ...     sample_prior=lambda n, g: torch.randn(n, 2, generator=g, dtype=torch.float64))
    >>> draws = bk.sample(target, num_chains=2, num_warmup=50, num_samples=10, seed=0)
    >>> draws.unconstrained.shape
    torch.Size([2, 10, 2])
    """

    unconstrained: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    beta: Tensor
    sample_stats: dict[str, Tensor] = field(default_factory=dict)
    num_gradients: int = 0
    seconds: float = 0.0
    settings: dict[str, Any] = field(default_factory=dict)
    target: Target | None = None

    def __post_init__(self) -> None:
        if self.unconstrained.dim() != 3:
            raise DrawsError(f"draws must have shape (chains, draws, d), not {tuple(self.unconstrained.shape)}")
        shape = self.unconstrained.shape[:2]
        for name in ("log_prior", "log_likelihood"):
            if getattr(self, name).shape != shape:
                raise DrawsError(f"{name} must have shape {tuple(shape)}, not {tuple(getattr(self, name).shape)}")

    @property
    def num_chains(self) -> int:
        """Number of chains."""
        return self.unconstrained.shape[0]

    @property
    def num_draws(self) -> int:
        """Number of draws of each chain."""
        return self.unconstrained.shape[1]

    @property
    def log_density(self) -> Tensor:
        """Log density that the chains sample, ``(chains, draws)``."""
        beta = self.beta.unsqueeze(-1)
        return torch.where(beta == 0, self.log_prior, self.log_prior + beta * self.log_likelihood)

    def __getitem__(self, name: str) -> Tensor:
        """Return the values of a site, ``(chains, draws, *shape)``; UnknownNameError for a name that is no site."""
        values = self.values()
        if name not in values:
            raise unknown_name("site", name, list(values))
        return values[name]

    def summary(self, **settings: Any) -> pd.DataFrame:
        """Return ArviZ's summary: mean, standard deviation, interval, Monte Carlo errors, effective sizes and R-hat.

        Parameters
        ----------
        **settings
            Of ``arviz.summary``, such as ``var_names=["mean"]``, ``round_to=3`` or ``kind="stats"``.

        Returns
        -------
        DataFrame
            A row for each number among the sites.

        Examples
        --------
        >>> import bayeskit as bk
        >>> draws = bk.sample(bk.exact.get("beta_binomial").target(), num_samples=500, progress=False)
        >>> draws.summary().index.tolist()
        ['p']
        """
        return summary(self._posterior(), **settings)

    def thin(self, step: int) -> Draws:
        """Return every ``step``-th draw of each chain, from the last back.

        Raises
        ------
        SettingsError
            If ``step`` is not a positive whole number.

        Examples
        --------
        >>> import bayeskit as bk
        >>> draws = bk.sample(bk.exact.get("beta_binomial").target(), num_samples=500, progress=False)
        >>> draws.thin(10)
        Draws(4 chains x 50 draws, dim 1, sites: p)
        """
        step = whole_number("step", step, 1)
        kept = torch.arange(self.num_draws - 1, -1, -step).flip(0).to(self.unconstrained.device)
        return replace(
            self,
            **{name: getattr(self, name)[:, kept] for name in _SAVED if name != "beta"},
            sample_stats={name: value[:, kept] for name, value in self.sample_stats.items()},
            settings=self.settings | {"thinning": step * self.settings.get("thinning", 1)},
        )

    def values(self, deterministic: bool = True) -> dict[str, Tensor]:
        """Return the sites' values, ``{site: (chains, draws, *shape)}``.

        Raises
        ------
        DrawsError
            If the draws were loaded without their target.
        """
        if self.target is None:
            raise DrawsError("these draws have no target; load them with Draws.load(path, target=target)")
        return self.target.constrain(self.unconstrained, deterministic=deterministic)

    def to_arviz(self) -> Any:
        """Return the draws for ArviZ: ``InferenceData`` on ArviZ 0.x, ``xarray.DataTree`` on 1.x.

        Groups are ``posterior`` (constrained sites and deterministic sites),
        ``sample_stats`` (``lp``, ``diverging``, ``acceptance_rate``, ``energy``, ``n_steps``,
        ``step_size``, ``log_prior``, ``log_likelihood``) and, where the likelihood of
        single observations is known, ``log_likelihood``.
        """
        return as_inference_data(self.to_datasets())

    def to_datasets(self) -> dict[str, xr.Dataset]:
        """Return the groups of :meth:`to_arviz`, each as an ``xarray.Dataset``."""
        stats = {"lp": self.log_density, "log_prior": self.log_prior, "log_likelihood": self.log_likelihood}
        groups = {
            "posterior": self._posterior(),
            "sample_stats": stats | self.sample_stats,
            "log_likelihood": self._pointwise(),
        }
        facts = {"sampling_time": float(self.seconds), "num_gradients": int(self.num_gradients)}
        return to_datasets(groups, facts | self.settings)

    def _posterior(self) -> dict[str, Tensor]:
        return {"u": self.unconstrained} if self.target is None else self.values()

    def _pointwise(self) -> dict[str, Tensor]:
        if self.target is None:
            return {}
        try:
            return self.target.pointwise_log_likelihood(self.unconstrained)
        except ModelError:
            return {}  # observations coupled by a summed-out site, or a target made from functions

    def select(self, chains: Tensor | Sequence[int]) -> Draws:
        """Return the draws of some chains; cost and settings stay those of the whole run.

        Parameters
        ----------
        chains : Tensor or sequence of int
            Indices, or a boolean for each chain.
        """
        index = torch.as_tensor(chains, device=self.unconstrained.device)
        return replace(
            self,
            **{name: getattr(self, name)[index] for name in _SAVED},
            sample_stats={name: value[index] for name, value in self.sample_stats.items()},
        )

    @classmethod
    def join(cls, parts: Sequence[Draws]) -> Draws:
        """Concatenate the chains of several runs on one target.

        Parameters
        ----------
        parts : sequence of Draws
            If their lengths differ, the last draws of each part are kept, as many as the shortest part has.

        Returns
        -------
        Draws
            ``num_gradients`` and ``seconds`` are sums. A setting that differs between the parts becomes a list;
            ``ending`` is the worst ending, and ``endings`` lists all of them. ``sample_stats`` has the statistics
            common to all parts.

        Raises
        ------
        DrawsError
            If there is no part, or parts come from different targets.

        Examples
        --------
        >>> import bayeskit as bk
        >>> target = bk.exact.get("beta_binomial").target()
        >>> runs = [bk.sample(target, 2, 50, 10, seed=seed, progress=False) for seed in (0, 1)]
        >>> joined = bk.Draws.join(runs)
        >>> joined, joined.settings["seed"]
        (Draws(4 chains x 10 draws, dim 1, sites: p), [0, 1])
        """
        if not parts:
            raise DrawsError("there is nothing to join; pass at least one Draws")
        target = _common_target(parts)
        count = min(part.num_draws for part in parts)
        names = [name for name in parts[0].sample_stats if all(name in part.sample_stats for part in parts)]
        return cls(
            torch.cat([part.unconstrained[:, part.num_draws - count :] for part in parts]),
            torch.cat([part.log_prior[:, part.num_draws - count :] for part in parts]),
            torch.cat([part.log_likelihood[:, part.num_draws - count :] for part in parts]),
            torch.cat([part.beta for part in parts]),
            {n: torch.cat([part.sample_stats[n][:, part.num_draws - count :] for part in parts]) for n in names},
            sum(part.num_gradients for part in parts),
            sum(part.seconds for part in parts),
            _joint_settings([part.settings for part in parts]),
            target,
        )

    def save(self, path: str | Path) -> None:
        """Write the draws as one safetensors file, whole or not at all.

        Raises
        ------
        OutputError
            If the file cannot be written.
        """
        tensors = {name: getattr(self, name) for name in _SAVED}
        tensors |= {f"sample_stats.{k}": v for k, v in self.sample_stats.items()}
        facts = {
            "kind": "draws",
            "num_gradients": self.num_gradients,
            "seconds": self.seconds,
            "settings": self.settings,
            "model": None if self.target is None else self.target.fingerprint(),
        }
        save_tensors(path, tensors, facts)

    @classmethod
    def load(cls, path: str | Path, target: Target | None = None) -> Draws:
        """Read draws from a file, without running code from it.

        Parameters
        ----------
        path : path
        target : Target, optional
            Target of the draws.

        Raises
        ------
        CheckpointError
            If the file is truncated or was not written by bayeskit.
        DrawsError
            If the file contains no draws, or draws of another target.
        """
        tensors, facts = load_tensors(path)
        if facts.get("kind") != "draws":
            raise DrawsError(f"{path} contains no draws; pass a file written by Draws.save")
        if target is not None and facts["model"] is not None and facts["model"] != target.fingerprint():
            raise DrawsError(f"the draws in {path} come from another model or other data")
        stats = {k.removeprefix("sample_stats."): v for k, v in tensors.items() if k.startswith("sample_stats.")}
        return cls(
            **{name: tensors[name] for name in _SAVED},
            sample_stats=stats,
            num_gradients=facts["num_gradients"],
            seconds=facts["seconds"],
            settings=facts["settings"],
            target=target,
        )

    def __repr__(self) -> str:
        return f"Draws({self.num_chains} chains x {self.num_draws} draws, {self.space()})"

    def space(self) -> str:
        """Return a short text with the dimension and the sites of the draws."""
        sites = [] if self.target is None else [site.name for site in self.target.sites]
        shown = sites if len(sites) <= 6 else [*sites[:5], f"{len(sites) - 5} more"]
        return f"dim {self.unconstrained.shape[-1]}" + (f", sites: {', '.join(shown)}" if shown else "")


def _joint_settings(settings: list[dict[str, Any]]) -> dict[str, Any]:
    joint: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in settings for name in one):
        values = [one.get(name) for one in settings]
        joint[name] = values[0] if all(value == values[0] for value in values) else values
    endings = [one.get("ending") for one in settings]
    if any(endings):
        joint |= {"ending": next(e for e in (*_ENDINGS, *endings) if e in endings), "endings": endings}
    return joint


def _common_target(parts: Sequence[Draws]) -> Target | None:
    """Return the target of all parts; parts loaded without a target are not checked."""
    dims = sorted({part.unconstrained.shape[-1] for part in parts})
    if len(dims) > 1:
        raise DrawsError(f"draws of dimensions {', '.join(map(str, dims))} come from different targets")
    targets = list({id(part.target): part.target for part in parts if part.target is not None}.values())
    if len(targets) > 1 and len({target.fingerprint() for target in targets}) > 1:
        raise DrawsError("the draws come from different models or other data, so their chains cannot be joined")
    return targets[0] if targets else None


def as_numpy(x: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array on the host."""
    return x.detach().cpu().numpy()
