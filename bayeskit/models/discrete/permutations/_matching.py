"""Noisy matching: observations of known centres in unknown order."""

from __future__ import annotations

import math

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.errors import ShapeError
from bayeskit.extend import new_generator, real_number, whole_number
from bayeskit.models.discrete._inputs import as_real, finite_values
from bayeskit.models.discrete.permutations._distributions import GibbsPermutation
from bayeskit.models.discrete.permutations._relaxations import Relaxation


class NoisyMatching:
    r"""Observations :math:`y_i = c_{\pi_i} + \sigma \epsilon_i` of ``n`` known centres, with uniform :math:`\pi`.

    The posterior is a :class:`GibbsPermutation` whose log weights are the log densities of the pairs. It is exact up to
    20 centres; its mode is available for any number. With more centres, fit :meth:`relaxed_model` with a relaxation as
    its guide:

    >>> import pyro, torch
    >>> from bayeskit.models.discrete.permutations import GumbelSinkhornRelaxation, NoisyMatching
    >>> matching, permutation = NoisyMatching.simulate(4, scale=0.1, seed=0)
    >>> relaxation = GumbelSinkhornRelaxation((4,), temperature=0.5)
    >>> svi = pyro.infer.SVI(matching.relaxed_model, relaxation, pyro.optim.Adam({"lr": 0.1}), pyro.infer.Trace_ELBO())
    >>> bool(svi.step(relaxation) > 0)
    True
    >>> pyro.clear_param_store()

    Source: Linderman et al. (2018), as for :class:`GibbsPermutation`.

    Parameters
    ----------
    centres : Tensor or array
        :math:`c`, shape ``(*batch, n, d)``, for a batch of problems.
    observations : Tensor or array
        :math:`y`, same shape.
    scale : float
        :math:`\sigma`, positive.

    Raises
    ------
    ShapeError
        If the shapes differ or have fewer than two dimensions.
    DataError
        If values are not finite.
    SettingsError
        If the scale is not positive.

    Examples
    --------
    >>> matching, permutation = NoisyMatching.simulate(6, scale=0.1, seed=0)
    >>> bool((matching.posterior().mode == permutation).all())
    True
    """

    def __init__(self, centres: Tensor, observations: Tensor, scale: float) -> None:
        centres, observations = as_real("centres", centres), as_real("observations", observations)
        if centres.dim() < 2 or centres.shape != observations.shape:
            raise ShapeError(
                f"centres have shape {tuple(centres.shape)} and observations {tuple(observations.shape)}; both must be "
                "(*batch, n, d), with one observation per centre"
            )
        finite_values("centres", centres)
        finite_values("observations", observations)
        dtype = torch.promote_types(centres.dtype, observations.dtype)
        self.centres, self.observations = centres.to(dtype), observations.to(dtype)
        self.scale = real_number("scale", scale, "(0, inf)")
        self.size = centres.shape[-2]

    @classmethod
    def simulate(
        cls, size: int, scale: float, *, seed: int | torch.Generator, dim: int = 2, batch_shape: tuple[int, ...] = ()
    ) -> tuple[NoisyMatching, Tensor]:
        """Simulate standard normal centres, a uniform permutation, and observations, in float64.

        ``size``: number of centres. ``scale``: standard deviation of the noise. ``batch_shape``: batch shape of
        independent problems.

        Returns
        -------
        matching : NoisyMatching
        permutation : Tensor of int64
            True permutation, ``(*batch, n)``: observation ``i`` has centre ``permutation[i]``.
        """
        size, dim = whole_number("size", size, least=1), whole_number("dim", dim, least=1)
        generator = new_generator(seed, stream="noisy matching")
        shape = (*batch_shape, size, dim)
        centres, noise = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        permutation = torch.rand(shape[:-1], generator=generator).argsort(-1)
        observations = centres.gather(-2, permutation.unsqueeze(-1).expand(shape)) + scale * noise
        return cls(centres, observations, scale), permutation

    @property
    def log_weights(self) -> Tensor:
        """Log density of observation ``i`` given centre ``j``, ``(*batch, n, n)``."""
        squares = (self.observations.unsqueeze(-2) - self.centres.unsqueeze(-3)).square().sum(-1)
        constant = self.centres.shape[-1] * (math.log(self.scale) + 0.5 * math.log(2 * math.pi))
        return -0.5 * squares / self.scale**2 - constant

    def posterior(self) -> GibbsPermutation:
        """Return the exact posterior of the permutation."""
        return GibbsPermutation(self.log_weights)

    def log_evidence(self) -> Tensor:
        """Return the exact log evidence, ``(*batch)``: the log permanent of the densities minus ``log(n!)``.

        Raises ``SettingsError`` if there are more than 20 centres.
        """
        return self.posterior().log_partition - math.lgamma(self.size + 1)

    def model(self) -> None:
        """Pyro model of a single problem, with a permutation that can be enumerated.

        Raises ``ShapeError`` if there is more than one problem.
        """
        if self.centres.dim() != 2:
            raise ShapeError(
                f"centres have shape {tuple(self.centres.shape)}; model is of one problem, (n, d). Use one "
                "NoisyMatching per problem, or log_evidence and posterior, which support batches."
            )
        log_weights = self.centres.new_zeros(self.size, self.size)
        permutation = pyro.sample("permutation", GibbsPermutation(log_weights), infer={"enumerate": "parallel"})
        pyro.sample(
            "observations", dist.Normal(self.centres[permutation], self.scale).to_event(2), obs=self.observations
        )

    def relaxed_model(self, relaxation: Relaxation, linear: bool = True) -> None:
        r"""Pyro model with a relaxed permutation; the relaxation is its guide.

        Both likelihoods equal that of :meth:`model` if the matrix :math:`X` is a permutation. ``relaxation``: with the
        batch shape and number of rows of the problem. ``linear``: use :math:`\sum_{ij} X_{ij} \log N(y_i; c_j,
        \sigma^2)`, the expected log likelihood of permutations with marginal probabilities :math:`X`. Otherwise use
        :math:`\log N(y; X c, \sigma^2)`, which is at least as large for doubly stochastic :math:`X` (matrices of
        :class:`RoundingRelaxation` may not be doubly stochastic). Raises ``ShapeError`` if the relaxation has a
        different batch shape or number of rows.
        """
        expected, given = tuple(self.centres.shape[:-1]), (*relaxation.batch_shape, relaxation.size)
        if given != expected:
            raise ShapeError(f"the relaxation is of shape {given}, the centres of {expected}; use shape {expected}")
        matrix = relaxation.matrix(pyro.sample(relaxation.site, relaxation.prior()))
        if linear:
            log_likelihood = (matrix * self.log_weights).flatten(-self.centres.dim()).sum(-1)
            pyro.factor("observations", log_likelihood)
        else:
            likelihood = dist.Normal(matrix @ self.centres, self.scale).to_event(self.centres.dim())
            pyro.sample("observations", likelihood, obs=self.observations)
