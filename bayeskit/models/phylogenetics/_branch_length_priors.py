"""Joint priors of all branch lengths of a tree."""

from __future__ import annotations

import copy
from typing import Any, Self, cast

import torch
import torch.distributions
from pyro.distributions import Dirichlet, Gamma, TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.phylogenetics._trees import Tree


class GammaDirichlet(TorchDistribution):  # type: ignore[misc]
    """Gamma-distributed tree length, divided among the branches by a Dirichlet distribution.

    Independent priors of many branch lengths imply a very narrow prior of the tree length; here that prior is explicit.

    Parameters
    ----------
    concentration : Tensor
        Dirichlet concentration of each branch, shape `(*batch, edges)`, above 0. `for_tree` sets one value for
        external and one for internal branches.
    length_shape, length_rate : float or Tensor, default 1.0 and 0.1
        Gamma distribution of the sum of all branch lengths in expected substitutions per site, shape `(*batch)`,
        above 0. The defaults are those of MrBayes: an exponential distribution with mean 10.
    validate_args : bool, optional
        Whether to check parameters and values, as in all torch distributions.

    Raises
    ------
    ValueError
        If a parameter is not above 0 and arguments are validated.

    References
    ----------
    B. Rannala, T. Zhu and Z. Yang (2012), Tail paradox, partial identifiability, and influential priors in Bayesian
    branch length inference, Molecular Biology and Evolution 29, 325-335.

    Examples
    --------
    >>> prior = GammaDirichlet(torch.ones(3), length_shape=2.0, length_rate=1.0)
    >>> prior.log_prob(torch.tensor([0.1, 0.2, 0.3])).exp()
    tensor(1.8294)
    """

    arg_constraints = {  # noqa: RUF012  as in all distributions of torch
        "concentration": constraints.independent(constraints.positive, 1),
        "length_shape": constraints.positive,
        "length_rate": constraints.positive,
    }
    support = constraints.independent(constraints.positive, 1)
    has_rsample = True

    def __init__(
        self,
        concentration: Tensor,
        length_shape: float | Tensor = 1.0,
        length_rate: float | Tensor = 0.1,
        validate_args: bool | None = None,
    ) -> None:
        if not concentration.dim():
            raise ShapeError("concentration is a single number; give one for each branch, (*batch, branches)")
        # Whole numbers would cut shape and rate off.
        concentration = concentration.to(torch.result_type(concentration, 1.0))
        shape, rate = (torch.as_tensor(number).to(concentration) for number in (length_shape, length_rate))
        batch = torch.broadcast_shapes(concentration.shape[:-1], shape.shape, rate.shape)
        self.concentration = concentration.expand(*batch, concentration.shape[-1])
        self.length_shape, self.length_rate = shape.expand(batch), rate.expand(batch)
        super().__init__(batch, concentration.shape[-1:], validate_args=validate_args)

    @classmethod
    def for_tree(
        cls,
        tree: Tree,
        length_shape: float = 1.0,
        length_rate: float = 0.1,
        external: float = 1.0,
        internal: float = 1.0,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
    ) -> GammaDirichlet:
        """Make the prior of a tree's branch lengths.

        Parameters
        ----------
        tree : Tree
        length_shape, length_rate : float, default 1.0 and 0.1
            Parameters of the Gamma distribution of the tree length.
        external, internal : float, default 1.0
            Dirichlet concentrations of external and internal branches. The expected length of an internal branch is
            `internal / external` times that of an external one.
        dtype : torch.dtype, default torch.float64
        device : torch.device or str, default "cpu"

        Returns
        -------
        GammaDirichlet
            Over vectors `(edges,)` in the order of `tree.edge_names`.

        Raises
        ------
        SettingsError
            If a number is not finite and above 0.

        Examples
        --------
        >>> GammaDirichlet.for_tree(Tree.from_newick("((A,B),C,D);"), internal=0.5).mean
        tensor([2.2222, 2.2222, 2.2222, 2.2222, 1.1111], dtype=torch.float64)
        """
        numbers = {"length_shape": length_shape, "length_rate": length_rate, "external": external, "internal": internal}
        for name, number in numbers.items():
            if not 0.0 < number < float("inf"):
                raise SettingsError(f"{name}={number!r} is invalid. Remedy: give a positive, finite number.")
        concentration = torch.full((tree.num_edges,), float(internal), dtype=dtype, device=device)
        concentration[: tree.num_taxa] = external
        return cls(concentration, length_shape, length_rate)

    @property
    def mean(self) -> Tensor:
        """Expected branch lengths, shape `(*batch, edges)`."""
        return (self.length_shape / self.length_rate)[..., None] * self._shares.mean

    @property
    def variance(self) -> Tensor:
        """Variances of the branch lengths, shape `(*batch, edges)`."""
        second = (self.length_shape * (self.length_shape + 1.0) / self.length_rate.square())[..., None]
        return second * (self._shares.variance + self._shares.mean.square()) - self.mean.square()

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of branch lengths.

        Parameters
        ----------
        value : Tensor
            Shape `(*batch, edges)`, above 0.

        Returns
        -------
        Tensor
            Shape `(*batch)`.
        """
        if self._validate_args:
            self._validate_sample(value)
        length = value.sum(-1)
        # An infinite tree length has no shares.
        infinite = length == torch.inf
        value, length = torch.where(infinite[..., None], 1.0, value), torch.where(infinite, value.shape[-1], length)
        shares = value / length[..., None]
        # Lengths are `length * shares`; all shares but the last are free, so the Jacobian is length^(edges - 1).
        jacobian = (value.shape[-1] - 1) * length.log()
        log_prob = self._length.log_prob(length) + self._shares.log_prob(shares) - jacobian
        return torch.where(infinite, -torch.inf, log_prob)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        """Draw branch lengths, shape `(*sample_shape, *batch, edges)`, differentiable in the parameters."""
        shape = torch.Size(sample_shape)
        return self._length.rsample(shape)[..., None] * self._shares.rsample(shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Self:
        """Return the distribution expanded to a larger batch shape."""
        batch = torch.Size(batch_shape)
        concentration = self.concentration.expand(*batch, self.concentration.shape[-1])
        shape, rate = self.length_shape.expand(batch), self.length_rate.expand(batch)
        made = type(self)(concentration, shape, rate, validate_args=False)
        made._validate_args = self._validate_args
        return made

    @property
    def _length(self) -> Gamma:
        return Gamma(self.length_shape, self.length_rate, validate_args=False)

    @property
    def _shares(self) -> Dirichlet:
        return Dirichlet(self.concentration, validate_args=False)


def check_branch_length_prior(prior: object, num_edges: int, device: torch.device | str = "cpu") -> None:
    """Raise SettingsError unless the prior is over one positive number or a vector of `num_edges` such numbers."""
    remedy = (
        "Remedy: give a distribution of one length, such as Exponential(torch.tensor(10.0)), which is used for every "
        f"edge, or a distribution of vectors ({num_edges},), such as GammaDirichlet.for_tree(tree)."
    )
    if not isinstance(prior, torch.distributions.Distribution):
        raise SettingsError(f"branch_length_prior: {prior!r:.80} is not a distribution. {remedy}")
    shapes = tuple(prior.batch_shape), tuple(prior.event_shape)
    if shapes not in (((), ()), ((), (num_edges,))):
        raise SettingsError(
            "branch_length_prior must be a distribution of one number or of the vector of all branch lengths, but its "
            f"batch_shape and event_shape are {shapes}. {remedy}"
        )
    kind = type(prior).__name__
    below_zero = -torch.logspace(-9, 3, 49, dtype=torch.float64, device=device)
    if prior.event_shape:
        below_zero = below_zero[:, None].expand(-1, num_edges)
    prior = cast(TorchDistribution, prior)
    if _support(prior).is_discrete or bool(_support(prior).check(below_zero).any()):
        raise SettingsError(f"branch_length_prior: {kind} is discrete or allows negative numbers. {remedy}")
    # If lengths must add up to a given number, no single length can change.
    near = torch.stack([allowed_lengths(prior, num_edges) * factor for factor in (0.999, 1.001)]).to(device)
    if not bool(log_prior_of_lengths(prior, near).isfinite().any()):
        raise SettingsError(f"branch_length_prior: {kind} has no density over positive branch lengths. {remedy}")


def in_double_precision(prior: TorchDistribution) -> TorchDistribution:
    """Return a copy of a prior with parameters in double precision."""
    # Some distributions round their arguments to the precision of their own parameters.
    made = copy.copy(prior)
    for name, value in vars(prior).items():
        if isinstance(value, Tensor) and value.is_floating_point():
            made.__dict__[name] = value.double()
        elif isinstance(value, torch.distributions.Distribution):
            made.__dict__[name] = in_double_precision(cast(TorchDistribution, value))
    return made


def log_prior_of_lengths(prior: TorchDistribution, lengths: Tensor) -> Tensor:
    """Return the log prior density of branch lengths, `(*batch, edges) -> (*batch)`, -inf outside the support."""
    allowed = _support(prior).check(lengths)
    if bool(allowed.all()):
        log_prob = prior.log_prob(lengths)
    else:
        # The gradient must not pass through an undefined density.
        inside = allowed[..., None] if prior.event_shape else allowed
        safe = torch.where(inside, lengths, allowed_lengths(prior, lengths.shape[-1]).to(lengths))
        log_prob = torch.where(allowed, prior.log_prob(safe), -torch.inf)
    return log_prob if prior.event_shape else log_prob.sum(-1)


def allowed_lengths(prior: TorchDistribution, num_edges: int) -> Tensor:
    """Return branch lengths in the support of a prior, 0.05 each where it allows them: `(edges,)`, float64."""
    factor = torch.logspace(0, 9, 181, dtype=torch.float64)
    tried = 0.05 * torch.stack([factor, 1 / factor], -1).flatten()
    points = tried[:, None].expand(-1, num_edges)
    if prior.event_shape and not bool(_support(prior).check(points).any()):
        points = prior.mean.to(points).expand(1, num_edges)  # edges of different ranges
    allowed = _support(prior).check(points).reshape(len(points), -1).all(-1)
    return points[int(allowed.int().argmax())]


def _support(prior: TorchDistribution) -> constraints.Constraint:
    return cast(constraints.Constraint, prior.support)
