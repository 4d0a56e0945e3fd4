"""Draws: what every sampler returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from bayeskit._arviz import as_inference_data, to_datasets
from bayeskit._files import load_tensors, save_tensors
from bayeskit.errors import DrawsError, ModelError
from bayeskit.target import Target

_SAVED = ("unconstrained", "log_prior", "log_likelihood", "beta")


@dataclass(frozen=True)
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
        How the draws were made: sampler, warm-up, seed.
    target : Target, optional
        Where they come from; needed to constrain them.

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
            raise DrawsError(f"draws have shape (chains, draws, d), not {tuple(self.unconstrained.shape)}")
        shape = self.unconstrained.shape[:2]
        for name in ("log_prior", "log_likelihood"):
            if getattr(self, name).shape != shape:
                raise DrawsError(f"{name} has shape {tuple(getattr(self, name).shape)}, not {tuple(shape)}")

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
        """Return what :meth:`to_arviz` holds as one ``xarray.Dataset`` a group."""
        stats = {"lp": self.log_density, "log_prior": self.log_prior, "log_likelihood": self.log_likelihood}
        groups = {
            "posterior": {"u": self.unconstrained} if self.target is None else self.values(),
            "sample_stats": stats | self.sample_stats,
            "log_likelihood": self._pointwise(),
        }
        facts = {"sampling_time": float(self.seconds), "num_gradients": int(self.num_gradients)}
        return to_datasets(groups, facts | self.settings)

    def _pointwise(self) -> dict[str, Tensor]:
        if self.target is None:
            return {}
        try:
            return self.target.pointwise_log_likelihood(self.unconstrained)
        except ModelError:
            return {}  # observations coupled by a summed-out site, or a target made from functions

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
        """Read draws; reading runs no code.

        Parameters
        ----------
        path : path
        target : Target, optional
            The target they were drawn from.

        Raises
        ------
        CheckpointError
            If the file is truncated or of another kind.
        DrawsError
            If ``target`` is another model than the one they were drawn from.
        """
        tensors, facts = load_tensors(path)
        if facts.get("kind") != "draws":
            raise DrawsError(f"{path} holds no draws")
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
        return f"Draws(chains={self.num_chains}, draws={self.num_draws}, dim={self.unconstrained.shape[-1]})"


def as_numpy(x: Tensor) -> np.ndarray:
    """Return a tensor as a NumPy array on the host."""
    return x.detach().cpu().numpy()
