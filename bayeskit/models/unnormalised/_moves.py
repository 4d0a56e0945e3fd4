"""What an unnormalised model is to the samplers: a description, a target, and moves at an inverse temperature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributions import Distribution

from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.extend import HMC, Evaluation, Metric, Target, global_stream, new_generator, validation_kept


@runtime_checkable
class Unnormalised(Protocol):
    """A distribution of vectors known up to its constant, such as :class:`~bayeskit.models.unnormalised.EnergyModel`.

    Attributes
    ----------
    dim : int
    is_binary : bool
        Whether vectors have entries 0 and 1; otherwise they are real.
    base : Distribution
        Normalised, of the same support, with event shape ``(dim,)``.

    Examples
    --------
    >>> from bayeskit.models.unnormalised import Unnormalised
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> isinstance(EnergyModel.of_bits(lambda x: x.sum(-1), 2), Unnormalised)
    True
    """

    dim: int
    is_binary: bool
    base: Distribution

    def log_density(self, x: Tensor) -> Tensor:
        """Return the log density without its constant, ``(*batch, d) -> (*batch)``."""
        ...

    def log_ratio(self, x: Tensor) -> Tensor:
        """Return the log of the density without its constant over the base's, ``(*batch, d) -> (*batch)``."""
        ...

    def enumerate_states(self) -> Tensor:
        """Return all binary vectors, ``(2**d, d)``, or raise ``SettingsError``."""
        ...

    def check_normaliser(self) -> tuple[bool | None, str]:
        """Return whether the constant is finite, None if unknown, and the reason."""
        ...


def require_fixed_energy(model: Unnormalised) -> None:
    """Raise ModelError if the energy is random, as with dropout in training."""
    generator = new_generator(0, stream="repeated energies")
    x = base_draws(model, 8, generator)
    with global_stream(generator), torch.no_grad():
        first, second = model.log_ratio(x), model.log_ratio(x)
    if not torch.allclose(first, second, rtol=1e-4, atol=1e-4, equal_nan=True):
        raise ModelError(
            "the energy is random: two calls at the same vectors differ, as with dropout. Remedy: call .eval() of the "
            "model"
        )


def require_normaliser(model: Unnormalised) -> tuple[bool | None, str]:
    """Return the check of a model's constant; ModelError if the constant is infinite, or the energy random."""
    require_fixed_energy(model)
    is_finite, reason = model.check_normaliser()
    if is_finite is False:
        raise ModelError(
            f"the model has no finite normalising constant: {reason}. Remedy: take the base as a factor with "
            "tilt=True, or an energy that rises faster"
        )
    return is_finite, reason


def require_vectors(name: str, x: Tensor, model: Unnormalised) -> None:
    """Raise ShapeError unless ``x`` has the shape ``(n, d)`` of a model's vectors."""
    if x.dim() != 2 or x.shape[1] != model.dim or not len(x):
        raise ShapeError(f"{name} has shape {tuple(x.shape)}; give vectors of the model, of shape (n, {model.dim})")


def base_draws(model: Unnormalised, count: int, generator: torch.Generator) -> Tensor:
    """Draw ``(count, d)`` from a model's base."""
    with global_stream(generator), torch.no_grad():
        return model.base.sample((count,))


def energy_target(model: Unnormalised) -> Target:
    """Return a target whose prior is the base and whose evidence is the normalising constant, for real vectors.

    All samplers and all estimators of the evidence take it. It keeps the parameters that the model has now.

    Parameters
    ----------
    model : EnergyModel
        Of real vectors.

    Returns
    -------
    Target

    Raises
    ------
    SettingsError
        For binary vectors.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from torch.distributions import Independent, Normal
    >>> from bayeskit.inference.evidence import smc
    >>> from bayeskit.models.unnormalised import energy_target
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> base = Independent(Normal(torch.zeros(2, dtype=torch.float64), 2.0), 1)
    >>> model = EnergyModel(lambda x: 0.5 * x.square().sum(-1), base)
    >>> z = smc(energy_target(model), seed=1, progress=False)
    >>> abs(z.log_evidence - 1.8378770664) < 5 * z.standard_error
    True
    """
    if model.is_binary:
        raise SettingsError("a target has real vectors; take log_normaliser for a model of binary vectors")

    def log_base(u: Tensor) -> Tensor:
        return model.base.log_prob(u)

    def log_ratio(u: Tensor) -> Tensor:
        return model.log_ratio(u)

    def sample_base(count: int, generator: torch.Generator) -> Tensor:
        return base_draws(model, count, generator)

    like = base_draws(model, 1, torch.Generator().manual_seed(0))
    return Target.from_functions(
        log_base, log_ratio, model.dim, sample_base, dtype=like.dtype, device=like.device, compile=False
    )


# Moves that leave base ** (1 - beta) * model ** beta invariant.


class MovedChains(NamedTuple):
    """Chains after a move: positions ``(n, d)``, log density over the base ``(n,)``, and the mean acceptance rate."""

    position: Tensor
    log_ratio: Tensor
    acceptance_rate: float


class _Path:
    """The tempered density of a model with its present parameters, as the kernels of samplers ask for it."""

    def __init__(self, model: Unnormalised) -> None:
        self._model = model

    def evaluator(self, num_vectors: int, num_calls: int = 1) -> Callable[[Tensor, Tensor], Evaluation]:
        return self._evaluate

    def _evaluate(self, u: Tensor, beta: Tensor) -> Evaluation:
        with torch.enable_grad(), validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)
            u = u.detach().requires_grad_()
            log_base, log_ratio = self._model.base.log_prob(u), self._model.log_ratio(u)
            tempered = log_base + beta * log_ratio
            (gradient,) = torch.autograd.grad(tempered.sum(), u)
        return Evaluation(log_base.detach(), log_ratio.detach(), tempered.detach(), gradient)


def base_metric(model: Unnormalised) -> Metric | None:
    """Return the metric of a normal base, or None."""
    base = getattr(model.base, "base_dist", model.base)
    if isinstance(base, torch.distributions.MultivariateNormal):
        return Metric(base.scale_tril, is_dense=True)
    if isinstance(base, torch.distributions.Normal):
        return Metric(base.stddev, is_dense=False)
    return None


@torch.no_grad()
def move(
    model: Unnormalised,
    x: Tensor,
    beta: float,
    kernel: HMC,
    step_size: float,
    generator: torch.Generator,
    *,
    is_backward: bool = False,
) -> MovedChains:
    """Move chains ``(n, d)`` once: by Hamiltonian Monte Carlo, or by a Gibbs sweep over bits, backwards on request."""
    if model.is_binary:
        return _gibbs_sweep(model, x, beta, generator, is_backward)
    path: Any = _Path(model)
    at = kernel.with_settings(beta=beta, step_size=step_size)
    state, info = at.step(path, at.evaluate(path, x), generator=generator)
    return MovedChains(state.position, state.log_likelihood, float(info.acceptance_rate.mean()))


def _gibbs_sweep(
    model: Unnormalised, x: Tensor, beta: float, generator: torch.Generator, is_backward: bool
) -> MovedChains:
    def evaluated(rows: Tensor) -> tuple[Tensor, Tensor]:
        log_ratio = model.log_ratio(rows)
        return log_ratio, model.base.log_prob(rows) + beta * log_ratio

    x = x.clone()
    ratio, here = evaluated(x)
    uniform = torch.rand(model.dim, len(x), generator=generator, dtype=x.dtype, device=x.device)
    changed = 0.0
    for i in reversed(range(model.dim)) if is_backward else range(model.dim):
        other = x.clone()
        other[:, i] = 1 - other[:, i]
        other_ratio, there = evaluated(other)
        flips = uniform[i] < torch.sigmoid(there - here)
        x[:, i] = torch.where(flips, other[:, i], x[:, i])
        ratio, here = torch.where(flips, other_ratio, ratio), torch.where(flips, there, here)
        changed += float(flips.to(x.dtype).mean())
    return MovedChains(x, ratio, changed / model.dim)
