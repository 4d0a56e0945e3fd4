"""Where chains start."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from bayeskit._evaluation import tempered
from bayeskit._pyro import PyroDensity
from bayeskit.errors import DataError, InitializationError, InitializationWarning, ShapeError
from bayeskit.target import Target

CANDIDATES = 10


def starting_points(
    target: Target, num_chains: int, beta: Tensor, generator: torch.Generator, initial: Tensor | None = None
) -> Tensor:
    """Return a starting point for each chain, shape ``(num_chains, d)``.

    Each chain takes the one of ten draws from the prior that fits the data best, which is
    plausible and still different from chain to chain. Where no prior can be drawn from, it takes the one of
    ten uniform draws on [-2, 2]^d of the highest density.

    Parameters
    ----------
    target : Target
    num_chains : int
    beta : Tensor
        Inverse temperatures, shape ``(num_chains,)``.
    generator : torch.Generator
    initial : Tensor, optional
        Points to start from instead, shape ``(d,)`` or ``(num_chains, d)``, unconstrained.

    Raises
    ------
    InitializationError
        If no chain has a finite density, or a single given point has none.
    ShapeError
        If ``initial`` has another shape.
    """
    if initial is not None:
        return _given(target, num_chains, beta, torch.as_tensor(initial))
    count = CANDIDATES * num_chains
    points = from_prior(target, count, generator)
    if points is None:
        shape = (count, target.dim)
        points = 4 * torch.rand(shape, dtype=target.dtype, device=generator.device, generator=generator) - 2
    points = points.to(target.device)
    log_prior, log_likelihood = target.evaluate(points, compiled=False)
    density = tempered(log_prior, log_likelihood, beta.repeat_interleave(CANDIDATES))
    density = density.nan_to_num(nan=-torch.inf, posinf=-torch.inf, neginf=-torch.inf).reshape(num_chains, CANDIDATES)
    # By what the data say of a draw: the density of the prior is infinitely high in the neck of a funnel.
    merit = beta.repeat_interleave(CANDIDATES) * log_likelihood if target.can_sample_prior else density.flatten()
    least = torch.finfo(merit.dtype).min  # above that of a draw without density
    merit = merit.nan_to_num(nan=least, posinf=least, neginf=least).reshape(density.shape)
    best = torch.where(density.isfinite(), merit, -torch.inf).argmax(1)
    chosen = points.reshape(num_chains, CANDIDATES, -1)[torch.arange(num_chains), best]
    finite = density.max(1).values.isfinite()
    if not bool(finite.any()):
        if bool(log_likelihood.isnan().all()):
            raise DataError(
                "the log likelihood is NaN at every starting candidate; look for NaN or infinite values in the data"
            )
        raise InitializationError(
            f"the density is zero at all {count} starting candidates "
            f"(log prior {_range(log_prior)}, log likelihood {_range(log_likelihood)}); "
            "pass initial=target.unconstrain({...}) with plausible values, or check that data and likelihood fit"
        )
    # A chain without a finite candidate borrows one from its neighbours.
    donors = finite.nonzero().flatten()
    lost = (~finite).nonzero().flatten()
    chosen[lost] = chosen[donors[torch.arange(len(lost), device=donors.device) % len(donors)]]
    return chosen


def from_prior(target: Target, num_vectors: int, generator: torch.Generator) -> Tensor | None:
    """Return vectors ``(n, d)`` of a plausible size from where the sites draw; None if nothing knows any.

    They follow the prior if that is proper. A site that is flat, or whose prior a mask leaves out, draws all the same.
    """
    if target.can_sample_prior:
        return target.sample_prior(num_vectors, generator)
    if isinstance(target._density, PyroDensity):
        return target._density.prior_vectors(num_vectors, generator, not target._loops)
    return None


def _given(target: Target, num_chains: int, beta: Tensor, initial: Tensor) -> Tensor:
    initial = initial.to(target.dtype).to(target.device)
    if initial.shape not in ((target.dim,), (num_chains, target.dim)):
        raise ShapeError(
            f"initial has shape {tuple(initial.shape)}; needed is {(target.dim,)} or {(num_chains, target.dim)}"
        )
    points = initial.expand(num_chains, target.dim).clone()
    wild = (~points.isfinite()).any(-1)
    if bool(wild.any()):
        chains = wild.nonzero().flatten().tolist()
        raise InitializationError(
            f"the initial points of chains {chains} hold NaN or infinite numbers; give finite ones"
        )
    log_prior, log_likelihood = target.evaluate(points, compiled=False)
    density = tempered(log_prior, log_likelihood, beta)
    bad = ~density.isfinite()
    if bool(bad.all()):
        prior_bad = bool((~log_prior.isfinite()).all())
        where = "outside the prior" if prior_bad else "at zero likelihood"
        raise InitializationError(
            f"every initial point is {where} (log prior {_range(log_prior)}, log likelihood "
            f"{_range(log_likelihood)}; first point: {_describe(target, points[0])}); "
            "move it inside, or leave initial=None to start from prior draws"
        )
    if bool(bad.any()):
        chains = bad.nonzero().flatten().tolist()
        warnings.warn(
            f"chains {chains} start at a point without finite density and will stay there; give them other points",
            InitializationWarning,
            stacklevel=4,
        )
    return points


def _describe(target: Target, point: Tensor) -> str:
    values = target.constrain(point)
    return ", ".join(f"{k}={v.flatten()[:3].tolist()}" for k, v in values.items())


def _range(x: Tensor) -> str:
    return f"from {float(x.min()):.4g} to {float(x.max()):.4g}"
