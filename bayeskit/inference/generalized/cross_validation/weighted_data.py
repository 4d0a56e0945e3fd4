"""A target whose data count as often as their weights say: all, none, or some of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bayeskit._density import Constrained, Density
from bayeskit._evaluation import Evaluation, Evaluator
from bayeskit._pyro import Site
from bayeskit._torch import new_generator
from bayeskit.errors import ModelError, ShapeError
from bayeskit.inference.evidence.predictive.observations import REMEDY, check_sum
from bayeskit.target import Target

PROBES = 8


class WeightedDensity:
    """The density of a parameter and of the weights of its data, side by side in one vector ``(d + n,)``.

    The log likelihood is linear in the weights, so its gradient by them is the log likelihood of each datum: one
    evaluation gives both what moves a particle and what predicts each datum.
    """

    def __init__(self, density: Density, assignment: Tensor | None, num_data: int) -> None:
        self._density, self._assignment, self._num_data = density, assignment, num_data
        self.num_unknowns = density.dim
        self.dim = density.dim + num_data
        self.sites: tuple[Site, ...] = density.sites
        self.dtype, self.device, self.data = density.dtype, density.device, density.data

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log prior and the weighted log likelihood."""
        unknowns, weights = u[: self.num_unknowns], u[self.num_unknowns :]
        each = self.each(self._density.pointwise(unknowns))
        # A datum without weight must not count even where its likelihood is zero.
        lowest = torch.finfo(u.dtype).min / 1e6
        return self._density.joint(unknowns)[0], (weights * each.clamp(min=lowest)).sum()

    def each(self, pointwise: Mapping[str, Tensor]) -> Tensor:
        """Return the log likelihood of each datum, ``(n,)``."""
        entries = torch.cat([x.reshape(-1) for x in pointwise.values()])
        if self._assignment is None:
            return entries
        return entries.new_zeros(self._num_data).index_add(0, self._assignment, entries)

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the sites' values."""
        return self._density.values(u[: self.num_unknowns], deterministic)

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector of values whose data all count once."""
        unknowns = self._density.vector(values)
        return torch.cat([unknowns, unknowns.new_ones(self._num_data)])

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return that of the unknowns alone, for weights are what they are."""
        if not isinstance(self._density, Constrained):
            raise ModelError(f"the Jacobian of {type(self._density).__name__} is not known")
        return self._density.log_jacobian(u[: self.num_unknowns])

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation."""
        return self._density.pointwise(u[: self.num_unknowns])


class WeightedData:
    """The data of a target, each of which can be left out.

    Parameters
    ----------
    target : Target
        With a pointwise log likelihood that adds up to its log likelihood.
    groups : Tensor, optional
        Integers, one for each observation, in the order of the target's pointwise log likelihood: observations of
        equal number are one datum. By default each observation is one.

    Attributes
    ----------
    target : Target
    num_data : int

    Raises
    ------
    ModelError
        If there is no pointwise log likelihood, or it does not add up to the whole.
    ShapeError
        If there are not as many ``groups`` as observations.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    >>> data = WeightedData(GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), x))
    >>> data.pointwise(torch.zeros(1, 1, dtype=torch.float64))
    tensor([[-0.5000, -2.0000, -8.0000]], dtype=torch.float64)
    """

    def __init__(self, target: Target, groups: Tensor | None = None) -> None:
        if not isinstance(target, Target):
            raise ModelError(f"cross-validation needs a Target, not {type(target).__name__}")
        self.target = target
        generator = new_generator(0, stream="probes of the likelihood")
        probe = torch.randn(PROBES, target.dim, generator=generator, dtype=torch.float64).to(target.dtype)
        probe = probe.to(target.device)
        entries = {name: x.reshape(len(x), -1) for name, x in target.pointwise_log_likelihood(probe).items()}
        together = torch.cat(list(entries.values()), 1)
        check_sum(together.sum(1), target.log_likelihood(probe), REMEDY, entries)
        assignment = None if groups is None else _assignment(groups, together.shape[1]).to(target.device)
        self.num_data = together.shape[1] if assignment is None else int(assignment.max()) + 1
        self._density = WeightedDensity(target._density, assignment, self.num_data)
        self._joint = Target(self._density, batched=False, sample_prior=None, compile=target.compile)
        self._joint._loops = target._loops

    def pointwise(self, u: Tensor) -> Tensor:
        """Return the log likelihood of each datum, ``(*batch, d) -> (*batch, n)``."""
        pointwise = self.target.pointwise_log_likelihood(u)
        flat = {name: x.reshape(-1, x.shape[u.dim() - 1 :].numel()) for name, x in pointwise.items()}
        each = torch.func.vmap(self._density.each)(flat)
        return each.reshape(*u.shape[:-1], self.num_data)

    def counting(self, weights: Tensor) -> PartTarget:
        """Return the target whose data count as often as ``weights (r, n)`` say; rows of vectors fall into ``r``."""
        return PartTarget(self._joint, self.target, weights)


class PartTarget(Target):
    """The posterior of part of the data, for kernels: neighbouring rows of vectors share one row of weights.

    Parameters
    ----------
    joint : Target
        Over parameters and weights.
    whole : Target
    weights : Tensor
        Shape ``(r, n)``.
    """

    def __init__(self, joint: Target, whole: Target, weights: Tensor) -> None:
        super().__init__(whole._density, batched=whole._batched, sample_prior=None, compile=whole.compile)
        self._both, self._weights = joint, weights.to(whole.dtype)

    def evaluator(self, num_vectors: int, num_calls: int = 1) -> Evaluator:
        """Return the evaluation of ``num_vectors`` rows, a multiple of ``r``."""
        weights = self._weights.repeat_interleave(num_vectors // len(self._weights), 0)
        evaluate = self._both.evaluator(num_vectors, num_calls)

        def of_part(u: Tensor, beta: Tensor) -> Evaluation:
            both = evaluate(torch.cat([u, weights], 1), beta)
            return both._replace(gradient=both.gradient[:, : self.dim])

        return of_part


def _assignment(groups: Any, num_entries: int) -> Tensor:
    labels = torch.as_tensor(groups)
    if tuple(labels.shape) != (num_entries,) or labels.is_floating_point():
        raise ShapeError(
            f"groups must be {num_entries} integers, one for each observation, not {labels.dtype} of shape "
            f"{tuple(labels.shape)}"
        )
    return labels.unique(return_inverse=True)[1]
