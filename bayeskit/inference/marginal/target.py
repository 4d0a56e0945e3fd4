"""Targets in which some sites are integrated out by Laplace's approximation at their mode given all others."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import scipy.optimize
import torch
from torch import Tensor

from bayeskit.core.inputs import check_memory, unknown_name, whole_number
from bayeskit.core.process_state import process_state
from bayeskit.core.progress import progress_bar
from bayeskit.core.randomness import new_generator, one_thread
from bayeskit.core.torch_internals import gradient_and_rest, standard_gamma
from bayeskit.draws import Draws
from bayeskit.errors import AccuracyWarning, BayeskitError, DrawsError, InitializationError, ModelError, SettingsError
from bayeskit.inference.marginal.conjugate_families import ConjugateCoordinates, conjugate_coordinates
from bayeskit.inference.marginal.correction import LaplaceCorrection, LineRule, line_rule
from bayeskit.inference.marginal.hessian_structure import Band, BandStencil, DiagonalBlocks, Factor, Stencil, Structure
from bayeskit.inference.samplers.weighted_particles import systematic
from bayeskit.logdensity.compiling import (
    CHUNK_BYTES,
    Cost,
    Evaluation,
    Evaluator,
    recorded,
    tempered,
)
from bayeskit.logdensity.engine import Compile, Engine, Evaluators
from bayeskit.logdensity.pyro_density import PyroDensity, Site
from bayeskit.logdensity.target import Target, require_target
from bayeskit.logdensity.tracing import (
    UNTRACEABLE,
    FailingApart,
    first_line,
    is_traced,
    raise_if_forked,
)

__all__ = ["MarginalTarget", "marginalize"]

_MAX_STEPS = 100
#: Squared length of a Newton step, in standard deviations and roots of the unit of rounding, after which values rest.
_NEAR = 0.01
#: Damping of a Newton step, as a share of the largest diagonal entry of the Hessian. The search begins with the first
#: number, takes undamped steps below the second, and gives up beyond the third.
_FIRST_DAMPING, _LEAST_DAMPING, _MOST_DAMPING = 1e-2, 2e-2, 1e10
_PRIOR_DRAWS, _CANDIDATES, _PATTERN_POINTS = 64, 5, 3
#: Number of starts of the search for other modes; largest number of entries of their Hessians together; squared
#: distance in standard deviations, below which two modes count as one.
_STARTS, _SEARCHED, _SAME_MODE = 16, 2**17, 1e-2
#: Newton steps of one evaluation, evaluations before a guarded search, steps to the mode of the marginal.
_NUM_STEPS, _NUM_STEPS_OF_FIELD, _MAX_TRIES, _MAX_CLIMB = 4, 3, 8, 30
_TANGENT_STEP = 0.1
#: Least number of rows of a chain for a correction.
_LEAST_ROWS = 4
#: What is added to the range of prior draws in which a mode is looked for, and number of halvings.
_WIDER, _HALVINGS = 10.0, 30
#: Units of rounding of a slope in its derivative.
_ROUNDING = 1e2
#: Number of coordinates from which on a chain is looked for, and the bandwidths that are tried.
_LONG, _BANDWIDTHS = 100, (1, 2, 4, 8)
#: Relative error of summed slopes that is taken for a failure, unless the density has fallen by so many nats.
_ADDING_UP, _DEEP = 1e-6, 50.0
#: Evaluations of the log density in the memory of one gradient of the approximation.
_VALUES = 8
#: Numbers of pieces of each panel that are tried: 1, 2, 4, ...
_REFINEMENTS = 4


class MarginalTarget(Target):
    """A target over some sites of another, the other sites integrated out; made by :func:`marginalize`.

    Attributes
    ----------
    whole : Target
        The target over all sites.
    over : tuple of str
        The sites that are integrated out.
    correct : bool
        Whether :meth:`with_latents` and estimators of the evidence correct what the approximation misses.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("groups", len(y)):
    ...         effect = pyro.sample("effect", dist.Normal(mean, 1.0))
    ...         pyro.sample("y", dist.Poisson(effect.exp()), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor([1.0, 0.0, 3.0, 2.0], dtype=torch.float64))
    >>> bk.marginalize(target, ["effect"])
    MarginalTarget(dim=1, sites=[mean()], over=[effect(4,)], curvature='4 groups of 1')
    """

    density: _LaplaceDensity

    def __init__(self, whole: Target, over: Sequence[str], correct: bool = False) -> None:
        self.whole, self.over, self.correct = whole, tuple(over), correct
        with process_state(), one_thread():
            density = _LaplaceDensity(whole.density, self.over)  # type: ignore[arg-type]
        sample = density.sample_prior if whole.can_sample_prior else None
        super().__init__(density, compile=whole.compile, batched=True, sample_prior=sample)
        for problem in density.problems:
            warnings.warn(problem, AccuracyWarning, stacklevel=4)

    @property
    def curvature(self) -> str:
        """What the integral looks like: conjugate, independent groups, a Gaussian field, a chain, or dense."""
        return self.density.description

    @property
    def is_exact(self) -> bool:
        """Whether the sites are integrated out in closed form: by conjugacy, or because they are normal.

        It is found numerically, at draws from the prior of the other sites.
        """
        return self.density.is_exact

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the approximation cannot be trusted; estimates of the evidence repeat it."""
        return self.density.problems

    def log_prior(self, u: Tensor) -> Tensor:
        """Return the log prior density of the remaining sites, ``(*batch, p) -> (*batch)``, without an integral."""
        u = self._checked(u)
        with one_thread():
            return self.density.log_prior(u.reshape(-1, self.dim)).reshape(u.shape[:-1])

    @property
    def num_failures(self) -> int:
        """Number of evaluated vectors so far without a mode or a finite integral, which have density zero."""
        return self.density.num_failures

    def with_latents(
        self, draws: Draws, *, num_inner: int = 64, seed: int | torch.Generator = 0, progress: bool = True
    ) -> Draws:
        """Return draws of all sites: one of the sites that were integrated out for each draw of the others.

        It comes from their distribution given the others where that is of a conjugate family, else from the normal
        approximation at the mode, on the unconstrained scale, which is exact where they are normal. If the target is to
        be corrected, it comes from the density itself, by quadrature or importance sampling as in :meth:`correction`,
        and the draws of the other sites are resampled within each chain, in their order, with the ratio of the
        estimated likelihood and the approximation as weight: some draws are then there twice.

        Parameters
        ----------
        draws : Draws
            Of this target, ``(chains, draws, d)``.
        num_inner : int, default 64
            Number of points of importance sampling for each draw, where a target is corrected.
        seed : int or torch.Generator, default 0
        progress : bool, default True
            Show a progress bar while a target is corrected.

        Returns
        -------
        Draws
            Of :attr:`whole`, with its prior and likelihood.

        Raises
        ------
        DrawsError
            If the draws are of another target or tempered, or no mode, or no finite integral, exists at some of them.

        Warns
        -----
        AccuracyWarning
            If the correction cannot be trusted.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(y):
        ...     scale = pyro.sample("scale", dist.HalfNormal(2.0))
        ...     with pyro.plate("groups", len(y)):
        ...         effect = pyro.sample("effect", dist.Normal(0.0, scale))
        ...         pyro.sample("y", dist.Normal(effect, 1.0), obs=y)
        >>> target = bk.Target.from_pyro(model, torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64))
        >>> marginal = bk.marginalize(target, ["effect"])
        >>> draws = bk.sample(marginal, num_chains=2, num_samples=200, progress=False)
        >>> marginal.with_latents(draws)["effect"].shape
        torch.Size([2, 200, 4])
        """
        self._check_draws(draws)
        rows = draws.unconstrained.to(self.device, self.dtype).reshape(-1, self.dim)
        shape, generator = draws.unconstrained.shape[:2], new_generator(seed, stream="latent sites")
        if self.correct and not self.is_exact:
            found = self.density.corrected(
                rows, whole_number("num_inner", num_inner, 2), generator, progress=progress, with_draws=True
            )
            log_weights, u = found.log_ratio.reshape(shape), found.draws.reshape(*shape, -1)
            for problem in LaplaceCorrection(log_weights, found.left_over).warnings:
                warnings.warn(problem, AccuracyWarning, stacklevel=2)
            log_weights = log_weights.double().cpu()
            index = systematic(log_weights - log_weights.logsumexp(1, keepdim=True), generator).to(u.device)
            u = u.gather(1, index.unsqueeze(-1).expand_as(u))
            chain = torch.arange(len(index)).unsqueeze(1)
            statistics = {
                name: x[chain.to(x.device), index.to(x.device)] if x.shape[:2] == index.shape else x
                for name, x in draws.sample_stats.items()
            }
            draws = replace(draws, sample_stats=statistics)
        else:
            u = self.density.completed(rows, generator).reshape(*shape, self.whole.dim)
        log_prior, log_likelihood = self.whole.evaluate(u)
        return replace(
            draws,
            unconstrained=u,
            log_prior=log_prior,
            log_likelihood=log_likelihood,
            target=self.whole,
            posterior_predictive={},
            predictions={},
            discrete={},
        )

    def correction(
        self,
        draws: Draws,
        *,
        num_rows: int = 400,
        num_inner: int = 64,
        seed: int | torch.Generator = 0,
        progress: bool = True,
    ) -> LaplaceCorrection:
        r"""Return what Laplace's approximation misses of the log evidence, with its standard error.

        For draws :math:`r_i` of this target and unbiased estimates :math:`\hat p(y \mid r_i)` of the likelihood, the
        mean of :math:`\hat p(y \mid r_i) / p_L(y \mid r_i)`, with :math:`p_L` the approximation, is an unbiased
        estimate of the ratio of the evidence to that of this target. Where every coordinate is independent of the
        others given r, the likelihood is integrated by quadrature along each, from 12 standard deviations below the
        mode to 12 above; elsewhere by importance sampling from independent Student t distributions along the axes of
        the approximation.

        Parameters
        ----------
        draws : Draws
            Of this target, ``(chains, draws, d)``.
        num_rows : int, default 400
            Number of draws at which the likelihood is estimated, evenly spaced, at least four of each chain.
        num_inner : int, default 64
            Number of points of importance sampling for each of them.
        seed : int or torch.Generator, default 0
        progress : bool, default True
            Show a progress bar.

        Returns
        -------
        LaplaceCorrection
            Its ``applied(estimate)`` corrects an estimate of the evidence of this target.

        Raises
        ------
        DrawsError
            If the draws are of another dimension or tempered, or no mode exists at some of them.

        References
        ----------
        Tran, M.-N., Scharth, M., Pitt, M. K., Kohn, R. (2013). Importance sampling squared for Bayesian inference in
        latent variable models. arXiv:1309.3339.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> from bayeskit.inference import evidence
        >>> def model(y):
        ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("groups", len(y)):
        ...         effect = pyro.sample("effect", dist.Normal(mean, 1.0))
        ...         pyro.sample("y", dist.Poisson(effect.exp()), obs=y)
        >>> target = bk.Target.from_pyro(model, torch.tensor([1.0, 0.0, 3.0, 2.0], dtype=torch.float64))
        >>> marginal = bk.marginalize(target, ["effect"])
        >>> draws = bk.sample(marginal, num_samples=500, progress=False)
        >>> correction = marginal.correction(draws)
        >>> -0.03 < correction.log_ratio < 0
        True
        >>> corrected = correction.applied(evidence.bridge_sampling(marginal, draws))
        """
        self._check_draws(draws)
        num_chains, num_draws = draws.unconstrained.shape[:2]
        each = min(num_draws, max(_LEAST_ROWS, whole_number("num_rows", num_rows, 2) // num_chains))
        chosen = torch.linspace(0, num_draws - 1, each).round().long()
        rows = draws.unconstrained[:, chosen].to(self.device, self.dtype).reshape(-1, self.dim)
        generator = new_generator(seed, stream="Laplace correction")
        found = self.density.corrected(rows, whole_number("num_inner", num_inner, 2), generator, progress=progress)
        return LaplaceCorrection(found.log_ratio.reshape(num_chains, each), found.left_over)

    def _check_draws(self, draws: Draws) -> None:
        if not isinstance(draws, Draws):
            raise DrawsError(f"draws must be Draws, such as bk.sample(target) returns, not a {type(draws).__name__}")
        if draws.unconstrained.shape[-1] != self.dim:
            raise DrawsError(f"the draws have dimension {draws.unconstrained.shape[-1]}, and this target {self.dim}")
        if not bool((draws.beta == 1).all()):
            raise DrawsError("the draws are tempered (beta below 1); latent sites are drawn from the posterior only")
        if draws.target is None or draws.target is self:
            return
        recorded = draws.log_density[:, -1].to(self.device)
        found = self.log_density(draws.unconstrained[:, -1].to(self.device, self.dtype))
        close = 1e-3 if self.dtype == torch.float32 else 1e-6
        if bool(((found - recorded).abs() > close * (1 + recorded.abs())).any()):
            raise DrawsError(
                "the draws come from another target: their recorded densities differ from those of this one"
            )

    def __repr__(self) -> str:
        inside = {s.name: tuple(s.shape) for s in self.whole.sites}
        left = ", ".join(f"{s.name}{tuple(s.shape)}" for s in self.sites)
        gone = ", ".join(f"{name}{inside[name]}" for name in self.over)
        return f"MarginalTarget(dim={self.dim}, sites=[{left}], over=[{gone}], curvature={self.curvature!r})"


def marginalize(
    target: Target, sites: Sequence[str], *, method: Literal["laplace"] = "laplace", correct: bool = False
) -> MarginalTarget:
    r"""Return a target over the other sites, ``sites`` integrated out in closed form or by Laplace's approximation.

    With ``f(r, z)`` the log density of the other sites ``r`` and of the unconstrained coordinates ``z`` of ``sites``,
    the new log density is :math:`f(r, \hat z) + \frac{m}{2}\log 2\pi - \frac12 \log\det A`, where :math:`\hat z(r)` is
    the mode of ``f`` by ``z``, found by Newton's method for each vector, ``A`` the negative Hessian there, and ``m``
    the dimension of ``z``. Where there are several modes, it is the one that Newton's method reaches from the mode that
    is predicted for ``r``, along the tangent at the mode of the new density; it depends on ``r`` alone, not on what was
    evaluated before. It is exact where ``z`` is normal given ``r`` and data, and close where many data, or a normal
    prior with data that say little, make it nearly so; the errors of independent groups add up, and
    :meth:`~MarginalTarget.correction` estimates their sum.

    The gradient is that of the approximation itself, by the implicit function theorem, with the derivative of the log
    determinant. The log prior is that of the other sites alone, so tempering, estimators of the evidence and
    :func:`~bayeskit.sample` take the new target as any other. The structure of the Hessian is found and used:

    - independent coordinates of a conjugate family (normal, gamma, inverse gamma, beta, or Dirichlet, whatever the
      names of the distributions) are integrated in closed form, without a search;
    - independent groups of coordinates, as random effects, cost about ten evaluations of the log density;
    - one site with a multivariate normal prior and data that factorise over it, each log-concave, as a Gaussian process
      for counts: a Cholesky factor a Newton step, and one contraction with the derivative of the covariance, which is
      fastest where the model gives ``covariance_matrix=``;
    - from 100 coordinates on, a chain in which only near coordinates depend on each other, as a random walk: time and
      memory grow linearly with its length;
    - else the Hessian is dense.

    Parameters
    ----------
    target : Target
        Made from a Pyro model that can be batched.
    sites : sequence of str
        Continuous latent sites, on which no other site's prior depends. At least one site must be left.
    method : {"laplace"}, default "laplace"
    correct : bool, default False
        Correct what the approximation misses wherever that can be done after sampling: estimators of the evidence add
        :meth:`~MarginalTarget.correction`, and :meth:`~MarginalTarget.with_latents` weights and draws by the density
        itself. It costs nothing where the result is exact.

    Returns
    -------
    MarginalTarget
        With :meth:`~MarginalTarget.with_latents`, which draws the sites afterwards, and
        :meth:`~MarginalTarget.correction` of the evidence. Where no mode is found, the density is zero, and
        :attr:`~MarginalTarget.num_failures` counts.

    Raises
    ------
    UnknownNameError
        If a site does not exist.
    SettingsError
        If ``sites`` are none or all, an observed or a summed-out site, or a dense Hessian does not fit into memory.
    ModelError
        If the target was made from functions or cannot be batched, the prior of another site depends on ``sites`` or on
        a summed-out site, or the density has no third derivatives.
    InitializationError
        If no mode is found at any draw from the prior of the other sites, or the density has no maximum there.

    Warns
    -----
    AccuracyWarning
        If searches from draws of the prior end at several modes.

    References
    ----------
    Tierney, L., Kadane, J. B. (1986). Accurate approximations for posterior moments and marginal densities. Journal of
    the American Statistical Association 81, 82-86.
    Rasmussen, C. E., Williams, C. K. I. (2006). Gaussian Processes for Machine Learning, section 3.4. MIT Press.
    Rue, H., Martino, S., Chopin, N. (2009). Approximate Bayesian inference for latent Gaussian models by using
    integrated nested Laplace approximations. Journal of the Royal Statistical Society B 71, 319-392.
    Margossian, C. C., Vehtari, A., Simpson, D., Agrawal, R. (2020). Hamiltonian Monte Carlo using an adjoint-
    differentiated Laplace approximation. Advances in Neural Information Processing Systems 33.

    Examples
    --------
    Normal means with normal data, for which the approximation is exact:

    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     scale = pyro.sample("scale", dist.HalfNormal(2.0))
    ...     with pyro.plate("groups", len(y)):
    ...         effect = pyro.sample("effect", dist.Normal(0.0, scale))
    ...         pyro.sample("y", dist.Normal(effect, 1.0), obs=y)
    >>> y = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    >>> marginal = bk.marginalize(bk.Target.from_pyro(model, y), ["effect"])
    >>> u = marginal.unconstrain({"scale": torch.tensor(3.0)})
    >>> exact = dist.Normal(0.0, torch.tensor(10.0, dtype=torch.float64).sqrt()).log_prob(y).sum()
    >>> bool(torch.isclose(marginal.log_likelihood(u), exact))
    True
    """
    if method != "laplace":
        raise SettingsError(f"method must be 'laplace', not {method!r}")
    density = require_target(target).density
    if not isinstance(density, PyroDensity):
        raise ModelError(
            "only a target of a Pyro model has sites that can be integrated out one by one; use Target.from_pyro"
        )
    if target.loops:
        raise ModelError(
            "the model cannot be batched, and integrating sites out would take a loop inside a loop; see the warning "
            "of Target.from_pyro for what to change"
        )
    known = [site.name for site in target.sites]
    over = list(dict.fromkeys([sites] if isinstance(sites, str) else sites))
    for name in over:
        if name in density.summed_sites:
            raise SettingsError(f"site {name!r} is discrete and summed out already; leave it out of sites")
        if name in density.observed_sites:
            raise SettingsError(f"site {name!r} is observed, so it has no distribution to integrate over")
        if name not in known:
            raise unknown_name("latent site", name, known)
    if not over:
        raise SettingsError(f"sites is empty; name some of {known}")
    if len(over) == len(known):
        raise SettingsError(
            f"sites names all sites of the model, {known}, and no target is left; leave one out, or use "
            "evidence.laplace_approximation for the evidence"
        )
    return MarginalTarget(target, [name for name in known if name in over], correct)


AnyStencil = Stencil | BandStencil


class _Part(NamedTuple):
    """Terms of the log density whose Hessian is found together."""

    terms: tuple[int, ...]  # 0: log prior, 1: log likelihood
    is_quadratic: bool  # by z, so that the Hessian is the same at all z
    stencil: AnyStencil
    directions: Tensor  # (c, m)


class _Mode(NamedTuple):
    """Inner modes of ``n`` vectors."""

    z: Tensor  # (n, m)
    factor: Factor  # of minus the Hessian
    found: Tensor  # (n,), bool


class _Corrected(NamedTuple):
    """Estimates at ``n`` vectors that are free of the approximation."""

    log_ratio: Tensor  # (n,), of an unbiased estimate of the likelihood and the approximation
    draws: Tensor  # (n, m) of what is integrated out, or (n, d) of all sites, to be weighted by the ratio
    left_over: float  # largest share of an integral that may lie beyond the ends of the quadrature


class _LaplaceDensity(Evaluators):
    """Laplace's approximation of the integral of a Pyro model's density over some sites, with its gradient."""

    start: Tensor  # near the mode of the marginal, (p,)

    def __init__(self, density: PyroDensity, over: Sequence[str]) -> None:
        self._whole, self._over = density, frozenset(over)
        self.dtype, self.device, self.data = density.dtype, density.device, density.data
        self.improper_sites = density.improper_sites
        self._widths = [site.stop - site.start for site in density.sites]
        gone = [site.name in self._over for site in density.sites]
        columns = torch.repeat_interleave(torch.tensor(gone), torch.tensor(self._widths))
        self._gone, self._kept = columns.nonzero()[:, 0], (~columns).nonzero()[:, 0]
        self._is_gone = gone
        self.dim, self._num_inner = len(self._kept), len(self._gone)
        self.sites = self._left()
        self.num_failures, self._is_field = 0, False
        self.problems: tuple[str, ...] = ()
        self._conjugate: ConjugateCoordinates | None = None
        self.blocks: Structure
        self._begin()
        self.num_failures = 0
        data_bytes = sum(x.numel() * x.element_size() for x in self.data)
        self._engine = Engine(
            None, self.dim + self._num_inner, self.dtype, self.device, data_bytes, evaluate=self._evaluation
        )

    @property
    def description(self) -> str:
        """The structure of the Hessian in words."""
        if self._conjugate is not None:
            return f"conjugate: {self._conjugate.description}"
        if self._is_field:
            return f"Gaussian field of {self._num_inner}"
        num_products = sum(part.stencil.num_directions for part in self._parts)
        few = self.blocks.description.startswith("dense") and num_products < self._num_inner
        exact = "normal: " if self._is_quadratic else ""
        return exact + self.blocks.description + (f", from {num_products} products" if few else "")

    @property
    def is_exact(self) -> bool:
        """Whether nothing is approximated."""
        return self._conjugate is not None or self._is_quadratic

    def _left(self) -> tuple[Site, ...]:
        sites, start = [], 0
        for site in self._whole.sites:
            if site.name not in self._over:
                width = site.stop - site.start
                sites.append(replace(site, start=start, stop=start + width))
                start += width
        return tuple(sites)

    # -- beginning --------------------------------------------------------------------------

    def _begin(self) -> None:
        """Find the structure of the Hessian and the mode at one vector, at which all searches start."""
        names = ", ".join(repr(name) for name in self._over)
        m, generator = self._num_inner, new_generator(0, stream="marginalization")
        points = self._whole.prior_vectors(_PRIOR_DRAWS, generator, True)
        r, z = points[:, self._kept], points[:, self._gone]
        try:
            with torch.no_grad(), FailingApart():
                fine = torch.stack(self._terms(r, z)).sum(0).isfinite()
                r, z = r[fine], z[fine]
                if len(r) == 0:
                    raise InitializationError(
                        f"the density is zero or infinite at all {_PRIOR_DRAWS} draws from the prior; look at the data"
                    )
                self._start = z.median(0).values
                self._refuse_dependence(r[:_CANDIDATES], z[:_CANDIDATES])
                candidates = torch.cat([r.median(0).values.unsqueeze(0), torch.zeros_like(r[:1]), r])[:_CANDIDATES]
                self._reference = candidates[0]
                if self._find_conjugate(r, z):
                    self._fixed, self.start = self._steady(z), candidates[self._best_of(candidates)]
                    return
                self._find_structure(r, z)
        except UNTRACEABLE as error:
            if isinstance(error, BayeskitError):
                raise
            raise_if_forked(error)
            raise ModelError(
                f"the model's density has no second derivatives by {names}: {first_line(error)}"
            ) from error
        self._tangent = torch.zeros(self.dim, m, dtype=self.dtype, device=self.device)
        # Newton's method squares the error, so that a few steps serve a wide neighbourhood.
        self._num_steps = 1 if self._is_quadratic else _NUM_STEPS_OF_FIELD if self._is_field else _NUM_STEPS
        mode = self._mode(candidates)
        if not bool(mode.found.any()):
            raise InitializationError(
                f"Newton's method finds no mode of {names} at {len(candidates)} vectors of the other sites: the "
                "density may have no maximum, one at infinity, or no negative definite Hessian. Remedy: give these "
                "sites a proper prior, a likelihood that is log-concave in them, or sample them with the others"
            )
        first = int(mode.found.int().argmax())
        self._fixed = self._steady(z)
        try:
            self._reference, self._start = candidates[first], mode.z[first]
            best = self._best_of(candidates)
            self._approach(candidates[best], mode.z[best])
            self.start = self._reference
        except UNTRACEABLE as error:
            raise_if_forked(error)
            raise ModelError(f"the model's density has no third derivatives by {names}: {first_line(error)}") from error
        if not (self._is_field or self._is_quadratic):
            self.problems = self._several_modes(torch.cat([self._reference.unsqueeze(0), candidates[1:]]), z)

    def _several_modes(self, r: Tensor, starts: Tensor) -> tuple[str, ...]:
        """Return a warning if the search from ``r``, and that from prior draws ``(k, m)``, end at different modes."""
        size = self._num_inner * (self._num_inner if self.blocks.is_dense else 1)
        starts = starts[: max(1, min(_STARTS, _SEARCHED // (size * len(r))))]
        at = r.repeat_interleave(len(starts), 0)
        with torch.no_grad(), FailingApart():
            here = self._climbed(r)
            there = self._climbed(at, starts.repeat(len(r), 1))
            found = there.found & here.found.repeat_interleave(len(starts))
            top = here.z.repeat_interleave(len(starts), 0)
            apart = there.z - top
            minus, _, value = self._curve(at, top, self._constant(at, top))
            gain = torch.stack(self._terms(at, there.z)).sum(0) - value
            distance = (apart * self.blocks.times(minus, apart)).sum(-1)
        other = found & (distance > _SAME_MODE)
        if not bool(other.any()):
            return ()
        names = " and ".join(map(repr, sorted(self._over)))
        return (
            f"the density of {names} has several modes given the other sites: {int(other.sum())} of {int(found.sum())} "
            "searches from draws of the prior end at another one than that of the approximation, by "
            f"{float(gain[other].amax()):+.2f} nats; sample these sites with the others",
        )

    def _best_of(self, r: Tensor) -> int:
        """Return the row of highest density."""
        return int(self._searched(self._laplace_of_rows, r, torch.ones_like(r[:, 0])).log_density.argmax())

    def _approach(self, r: Tensor, z: Tensor) -> None:
        """Move the point near which modes are predicted from ``(p,), (m,)`` towards the mode of the marginal."""
        self._reference, self._start = r, z

        def climbed(x: Any) -> tuple[float, Any]:
            at = torch.as_tensor(x, dtype=self.dtype, device=self.device).unsqueeze(0)
            found = self._searched(self._laplace_of_rows, at, torch.ones_like(at[:, 0]))
            return -float(found.log_density), -found.gradient[0].double().cpu().numpy()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # minus infinity where there is no mode
            best = scipy.optimize.minimize(
                climbed, r.double().cpu().numpy(), jac=True, method="BFGS", options={"maxiter": _MAX_CLIMB, "gtol": 0.3}
            )
        at = torch.as_tensor(best.x, dtype=self.dtype, device=self.device)
        step = _TANGENT_STEP * torch.eye(self.dim, dtype=self.dtype, device=self.device)
        mode = self._mode(torch.cat([at.unsqueeze(0), at + step, at - step]))
        if not bool(mode.found.all()):
            return
        z, (up, down) = mode.z[0], mode.z[1:].split(self.dim)
        self._reference, self._start, self._tangent = at, z, (up - down) / (2 * _TANGENT_STEP)

    def _refuse_dependence(self, r: Tensor, z: Tensor) -> None:
        """Raise ``ModelError`` for a remaining site whose prior depends on a site that is integrated out."""
        for name in (site.name for site in self.sites):

            def term(z: Tensor, r: Tensor, name: str = name) -> tuple[Tensor, tuple[Tensor, ...]]:
                def one(r: Tensor, z: Tensor) -> Tensor:
                    terms = self._whole.prior_terms(self._merged(r, z))
                    if name not in terms:
                        raise ModelError(
                            f"the prior of site {name!r} depends on a summed-out site, so the prior of the sites that "
                            "are left has no density of its own; integrate that site out, too"
                        )
                    return terms[name]

                return torch.func.vmap(one)(r, z).sum(), ()

            if bool((gradient_and_rest(term, z, r)[0] != 0).any()):
                raise ModelError(
                    f"the prior of site {name!r} depends on the sites to be integrated out, {sorted(self._over)}; "
                    f"integrate {name!r} out, too, or write the model so that {name!r} comes first"
                )

    def _find_conjugate(self, r: Tensor, z: Tensor) -> bool:
        """Note whether all coordinates are independent given the others, each of a conjugate family."""
        m, num_sticks = self._num_inner, []
        alone = DiagonalBlocks(torch.arange(m, device=self.device))
        self.blocks = alone
        if not self._holds((0, 1), Stencil(None, alone), r, z):
            return False
        for site in self._whole.sites:
            if site.name in self._over:
                # A simplex of k + 1 numbers is broken off a stick, in k steps.
                k, width = (*site.unconstrained_shape, 1)[len(site.unconstrained_shape) - 1], site.stop - site.start
                is_simplex = site.shape == (*site.unconstrained_shape[:-1], k + 1)
                sticks = torch.arange(k, 0, -1).repeat(width // k)
                num_sticks.append(sticks if is_simplex else torch.zeros_like(sticks))
        start = self._level(r, z)
        self._conjugate = conjugate_coordinates(
            functools.partial(self._slope_at, r), start, len(r), torch.cat(num_sticks).to(self.device)
        )
        if self._conjugate is not None:
            self._start = start
        return self._conjugate is not None

    def _level(self, r: Tensor, z: Tensor) -> Tensor:
        """Return about where each of independent coordinates has its mode, by halving the range of prior draws."""
        low, high = z.amin(0) - _WIDER, z.amax(0) + _WIDER
        row = r.median(0).values.unsqueeze(0)
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            slope = self._slope((0, 1), row, middle.unsqueeze(0))[0].squeeze(0)
            low, high = torch.where(slope > 0, middle, low), torch.where(slope > 0, high, middle)
        return 0.5 * (low + high)

    def _find_structure(self, r: Tensor, z: Tensor) -> None:
        """Set the structure of the Hessian, and the parts in which it is found."""
        m = self._num_inner
        if m >= _LONG and self._find_band(r, z):
            return
        names = ", ".join(repr(name) for name in self._over)
        check_memory(f"the Hessian of {names} has {m} x {m} entries: their number", m * m, 2 * self.dtype.itemsize)
        some = slice(0, _PATTERN_POINTS)
        patterns = [self._pattern((term,), r[some], z[some]) for term in (0, 1)]
        full = torch.ones(m, m, dtype=torch.bool, device=self.device)
        for known in (patterns, [full, full]):
            self.blocks = DiagonalBlocks.joined(known[0] | known[1])
            stencils = [Stencil(pattern, self.blocks) for pattern in (*known, known[0] | known[1])]
            if all(self._holds((term,), stencils[term], r, z) for term in (0, 1)):
                break
        self._set_parts(stencils[0], stencils[1], stencils[2], r, z)
        self._find_field(r, z)

    def _find_band(self, r: Tensor, z: Tensor) -> bool:
        """Set the structure of a long field in which only near coordinates depend on each other; False for others."""
        for width in _BANDWIDTHS:
            self.blocks = band = Band(self._num_inner, width, self.device)
            tried = {reach: BandStencil(band, reach, self.device) for reach in (0, width)}
            fit = [[reach for reach in tried if self._holds((term,), tried[reach], r, z)] for term in (0, 1)]
            if fit[0] and fit[1]:
                reaches = [min(each) for each in fit]
                if max(reaches) == 0:
                    self.blocks = DiagonalBlocks(torch.arange(self._num_inner, device=self.device))
                    alone = Stencil(None, self.blocks)
                    self._set_parts(alone, alone, alone, r, z)
                else:
                    self._set_parts(tried[reaches[0]], tried[reaches[1]], tried[max(reaches)], r, z)
                return True
        return False

    def _set_parts(self, prior: AnyStencil, likelihood: AnyStencil, both: AnyStencil, r: Tensor, z: Tensor) -> None:
        parts = tuple(self._part((term,), stencil, r, z) for term, stencil in enumerate((prior, likelihood)))
        apart = parts[0].is_quadratic and not parts[1].is_quadratic
        self._parts = parts if apart else (self._part((0, 1), both, r, z),)

    def _direction(self) -> Tensor:
        """Return a direction in which no entry of a Hessian cancels another, ``(m,)``."""
        return 1.5 + torch.arange(self._num_inner, dtype=torch.float64).mul(2.4).sin().mul(0.5).to(self._start)

    def _holds(self, terms: tuple[int, ...], stencil: AnyStencil, r: Tensor, z: Tensor) -> bool:
        """Tell whether the products give the whole Hessian of terms at all points: its product with any direction."""
        m = self._num_inner
        if stencil.num_directions == m:
            return True
        v = self._direction()
        product, slope, _ = self._product(terms, r, z, v)
        there, rounding = -product, self._rounding(slope).norm(dim=1)
        part = _Part(terms, False, stencil, stencil.directions.to(self.dtype))
        here = self.blocks.times(stencil.blocks(self._products(part, r, z)), v.expand_as(z))
        gap, size = (here - there).norm(dim=1), there.norm(dim=1)
        return not bool((gap > math.sqrt(torch.finfo(self.dtype).eps) * size + rounding).any())

    def _rounding(self, slope: Tensor) -> Tensor:
        """Return the size of second derivatives that are no more than the rounding of the first."""
        return _ROUNDING * torch.finfo(self.dtype).eps * slope.abs()

    def _find_field(self, r: Tensor, z: Tensor) -> None:
        """Note whether the prior is one multivariate normal and the likelihood factorises and is log-concave."""
        if len(self._over) > 1 or len(self._parts) == 1 or self._parts[1].stencil.num_directions > 1:
            return
        try:
            mean, covariance = self._field(r)
        except ModelError:
            return
        slope, _ = self._slope((0,), r, z)
        gap = (covariance @ slope.unsqueeze(-1)).squeeze(-1) + z - mean
        near = math.sqrt(torch.finfo(self.dtype).eps) * (1 + (z - mean).abs().amax())
        curvature, slope, _ = self._product((1,), r, z, torch.ones_like(z))
        is_concave = (curvature <= self._rounding(slope)).all()
        self._is_field = bool((gap.abs().amax() <= near) & is_concave)

    def _part(self, terms: tuple[int, ...], stencil: AnyStencil, r: Tensor, z: Tensor) -> _Part:
        part = _Part(terms, False, stencil, stencil.directions.to(self.dtype))
        v = self._direction()
        one, other = (self._product(terms, r, at, v)[0] for at in (z, z.roll(1, 0) + 0.5 * z + 0.1))
        gap, size = (one - other).norm(dim=1), one.norm(dim=1)
        return part._replace(is_quadratic=bool((gap <= 1e3 * torch.finfo(self.dtype).eps * size).all()))

    @property
    def _is_quadratic(self) -> bool:
        return all(part.is_quadratic for part in self._parts)

    def _pattern(self, terms: tuple[int, ...], r: Tensor, z: Tensor) -> Tensor:
        """Return which entries of the Hessian of ``terms`` by ``z`` are not zero at some of the points, ``(m, m)``."""
        m = self._num_inner
        eye = torch.eye(m, dtype=self.dtype, device=self.device)
        num_bytes = recorded(lambda v: [self._product(terms, r[:1], z[:1], v)[0]], eye[0])[1]
        size = max(1, CHUNK_BYTES // max(len(r) * num_bytes, 1))
        product = torch.func.vmap(lambda v: self._product(terms, r, z, v)[0])
        pattern = torch.cat([(product(some) != 0).any(1) for some in eye.split(size)])
        return pattern | pattern.T | torch.eye(m, dtype=torch.bool, device=self.device)

    def _steady(self, z: Tensor) -> frozenset[str]:
        """Return the sites, deterministic ones included, whose values do not depend on what is integrated out."""
        first, *others = (self._whole.values(self._merged(self._reference, one), True) for one in z[:_CANDIDATES])
        same = {n for n, value in first.items() if all(torch.equal(value, other[n]) for other in others)}
        return frozenset(same - self._over) | {site.name for site in self.sites}

    # -- functions of one batch, which are traced -------------------------------------------

    def _coordinates(self, r: Tensor, z: Tensor) -> list[Tensor]:
        """Return the coordinates of each site of the whole model, ``(p,), (m,)``."""
        pairs = list(zip(self._widths, self._is_gone, strict=True))
        inner = iter(z.split([width for width, gone in pairs if gone]))
        outer = iter(r.split([width for width, gone in pairs if not gone]))
        return [next(inner if gone else outer) for gone in self._is_gone]

    def _merged(self, r: Tensor, z: Tensor) -> Tensor:
        """Return the vector of all sites, ``(p,), (m,) -> (d,)``."""
        return torch.cat(self._coordinates(r, z))

    def _terms(self, r: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood, ``(n, p), (n, m) -> (n,), (n,)``."""
        both: tuple[Tensor, Tensor] = torch.func.vmap(lambda r, z: self._whole.joint_of_parts(self._coordinates(r, z)))(
            r, z
        )
        return both

    def _field(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and covariance of the multivariate normal prior, ``(n, p) -> (n, m), (n, m, m)``."""
        (name,) = self._over
        both: tuple[Tensor, Tensor] = torch.func.vmap(
            lambda r: self._whole.normal_prior(name, self._coordinates(r, self._start))
        )(r)
        return both

    def _slope(self, terms: tuple[int, ...], r: Tensor, z: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient by ``z`` and the value of the sum of terms."""

        def total(z: Tensor, r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            both = self._terms(r, z)
            value = both[terms[0]] if len(terms) == 1 else both[0] + both[1]
            return value.sum(), (value,)

        return gradient_and_rest(total, z, r)

    def _slope_at(self, r: Tensor, z: Tensor) -> Tensor:
        """Return the gradient by ``z`` of the log density, ``(n, m)``."""
        return self._slope((0, 1), r, z)[0]

    def _product(self, terms: tuple[int, ...], r: Tensor, z: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Return the Hessian by ``z`` times ``v``, the gradient and the value of the sum of terms."""

        def along(z: Tensor, r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            gradient, value = self._slope(terms, r, z)
            return (gradient * v).sum(), (gradient, value)

        return gradient_and_rest(along, z, r)

    def _products(self, part: _Part, r: Tensor, z: Tensor) -> Tensor:
        """Return the Hessian's products with all directions of a part, ``(c, n, m)``."""
        products: Tensor = torch.func.vmap(lambda v: self._product(part.terms, r, z, v)[0])(part.directions)
        return products

    def _constant(self, r: Tensor, z: Tensor) -> Tensor:
        """Return minus the Hessian of what is quadratic by ``z``, ``(n, G, b, b)``, or zero."""
        found = z.new_zeros(())
        for part in self._parts:
            if part.is_quadratic:
                found = found + part.stencil.blocks(self._products(part, r, z))
        return found

    def _curve(self, r: Tensor, z: Tensor, constant: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return minus the Hessian ``(n, G, b, b)``, the gradient ``(n, m)`` and the log density ``(n,)``."""
        minus, slope, value = constant, z.new_zeros(()), z.new_zeros(())
        for terms, is_quadratic, stencil, directions in self._parts:
            if is_quadratic:
                gradient, density = self._slope(terms, r, z)
            else:
                product = torch.func.vmap(
                    lambda v, terms=terms: self._product(terms, r, z, v),
                    out_dims=(0, None, None),  # type: ignore[arg-type]
                )
                products, gradient, density = product(directions)
                minus = minus + stencil.blocks(products)
            slope, value = slope + gradient, value + density
        return self.blocks.completed(minus), slope, value

    def _bend(self, r: Tensor, z: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradient of half the trace of inverse times minus Hessian, with the inverse fixed, by r and z."""
        return self._bend_of(self._parts, r, z, [part.stencil.weights(inverse) for part in self._parts])

    def _bend_of(
        self, parts: Sequence[_Part], r: Tensor, z: Tensor, weights: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return half the gradient by r and z of minus the sum of weights times products, ``(c, n, m)`` a part."""

        def trace(u: Tensor, *weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            r, z = u.split([self.dim, self._num_inner], -1)
            total = u.new_zeros(())
            for part, weight in zip(parts, weights, strict=True):
                total = total - 0.5 * (self._products(part, r, z) * weight).sum()
            return total, ()

        (gradient,) = gradient_and_rest(trace, torch.cat([r, z], -1), *weights)
        return gradient[:, : self.dim], gradient[:, self.dim :]

    def _pull(self, r: Tensor, z: Tensor, shift: Tensor, terms: tuple[int, ...] = (0, 1)) -> Tensor:
        """Return the gradient by ``r`` of the sum of terms minus ``shift`` times its slope by ``z``."""

        def total(r: Tensor, z: Tensor, shift: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            gradient, value = self._slope(terms, r, z)
            return (value - (gradient * shift).sum(-1)).sum(), ()

        return gradient_and_rest(total, r, z, shift)[0]

    def log_prior(self, r: Tensor) -> Tensor:
        """Return the log prior of the remaining sites at ``(n, p)``."""

        def one(r: Tensor) -> Tensor:
            terms = self._whole.prior_terms(self._merged(r, self._start))
            return torch.stack([terms[site.name] for site in self.sites]).sum()

        value: Tensor = torch.func.vmap(one)(r)
        return value

    def _prior(self, r: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient and the value of the log prior of the remaining sites."""

        def total(r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            value = self.log_prior(r)
            return value.sum(), (value,)

        return gradient_and_rest(total, r)

    def _laplace(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Evaluate ``r`` and starts ``z`` side by side, ``(n, p + m)``, by a few Newton steps that nothing guards.

        The log likelihood is NaN where the steps do not end at a mode. The density does not depend on the starts; the
        last ``m`` columns of the gradient, which would be zero, hold the starts of the next evaluation.
        """
        r, z = u.split([self.dim, self._num_inner], -1)
        blocks, eps = self.blocks, torch.finfo(u.dtype).eps
        outside, prior = self._prior(r)
        constant = self._constant(r, z)
        for _ in range(self._num_steps):
            minus, slope, _ = self._curve(r, z, constant)
            z = z + blocks.solved(blocks.factorised(minus)[0], slope)
        minus, slope, value = self._curve(r, z, constant)
        factor, definite = blocks.factorised(minus)
        step = blocks.solved(factor, slope)
        decrement = (slope * step).sum(-1)
        outer, inner = self._bend(r, z, blocks.inverted(minus, factor))
        gradient = self._pull(r, z, blocks.solved(factor, inner)) - outer
        # To first order the mode is a step away, so the error of the value is of second order.
        value = value + 0.5 * decrement - (inner * step).sum(-1) - blocks.half_log_det(factor)
        value = value + 0.5 * self._num_inner * math.log(2 * math.pi)
        found = definite & (decrement <= eps * max(1.0, 0.01 * self._num_inner)) & gradient.sum(-1).isfinite()
        likelihood = torch.where(found, value - prior, torch.nan)
        gradient = outside + beta.unsqueeze(-1) * torch.where(found.unsqueeze(-1), gradient - outside, 0.0)
        return Evaluation(prior, likelihood, tempered(prior, likelihood, beta), torch.cat([gradient, z + step], -1))

    def _normal_integral(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Integrate a density that is normal by ``z``: one step from anywhere ends at the mode."""
        r, z = u.split([self.dim, self._num_inner], -1)
        blocks = self.blocks
        outside, prior = self._prior(r)
        minus, slope, _ = self._curve(r, z, self._constant(r, z))
        factor, definite = blocks.factorised(minus)
        z = (z + blocks.solved(factor, slope)).detach()

        def height(r: Tensor, z: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            value = torch.stack(self._terms(r, z)).sum(0)
            return value.sum(), (value,)

        gradient, value = gradient_and_rest(height, r, z)
        gradient = gradient - self._bend(r, z, blocks.inverted(minus, factor))[0]
        value = value - blocks.half_log_det(factor) + 0.5 * self._num_inner * math.log(2 * math.pi)
        found = definite & value.isfinite() & gradient.sum(-1).isfinite()
        likelihood = torch.where(found, value - prior, torch.nan)
        gradient = outside + beta.unsqueeze(-1) * torch.where(found.unsqueeze(-1), gradient - outside, 0.0)
        return Evaluation(prior, likelihood, tempered(prior, likelihood, beta), torch.cat([gradient, z], -1))

    def _root(self, curvature: Tensor, slope: Tensor) -> Tensor:
        """Return the root of minus a curvature, NaN where the likelihood is not concave."""
        return torch.where(curvature <= self._rounding(slope), -curvature, torch.nan).clamp(min=0).sqrt()

    def _laplace_of_field(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Do the same for a multivariate normal prior and a log-concave likelihood that factorises over ``z``.

        With ``K`` the covariance and ``W`` the diagonal minus Hessian of the log likelihood, all is found from Cholesky
        factors of ``1 + sqrt(W) K sqrt(W)``, so that ``K`` is neither inverted nor factorised (Rasmussen and Williams
        2006, section 3.4), and the gradient by all parameters of ``K`` is one contraction with ``dK``.
        """
        r, z = u.split([self.dim, self._num_inner], -1)
        part, eps = self._parts[1], torch.finfo(u.dtype).eps
        outside, prior = self._prior(r)
        mean, covariance = self._field(r)
        one = torch.eye(self._num_inner, dtype=u.dtype, device=u.device)
        weights = torch.zeros_like(z)  # of the covariance's columns: z = mean + K weights after a step

        def curve(z: Tensor) -> tuple[Tensor, ...]:
            minus, slope, value = self._product(part.terms, r, z, torch.ones_like(z))
            root = self._root(minus, slope)
            inside = one + root.unsqueeze(-1) * covariance * root.unsqueeze(-2)
            factor, info = torch.linalg.cholesky_ex(inside)
            return root, slope, value, factor, info

        def solved(root: Tensor, factor: Tensor, right: Tensor) -> Tensor:
            """Return ``right`` divided by ``K + 1 / W``."""
            lower = torch.linalg.solve_triangular(factor, (root * right).unsqueeze(-1), upper=False)
            return root * torch.linalg.solve_triangular(factor.mT, lower, upper=True).squeeze(-1)

        def times(right: Tensor) -> Tensor:
            return (covariance @ right.unsqueeze(-1)).squeeze(-1)

        for _ in range(self._num_steps):
            root, slope, _, factor, _ = curve(z)
            right = root.square() * (z - mean) + slope
            weights = right - solved(root, factor, times(right))
            z = mean + times(weights)
        root, slope, value, factor, info = curve(z)
        lower = torch.linalg.solve_triangular(factor, torch.diag_embed(root), upper=False)
        within, beside = lower.mT @ lower, lower @ covariance  # (K + 1/W)^-1, and what K loses by the data
        variance = covariance.diagonal(dim1=-2, dim2=-1) - beside.square().sum(-2)
        rest = slope - weights
        step = times(rest - solved(root, factor, times(rest)))
        decrement = (rest * step).sum(-1)
        outer, inner = self._bend_of((part,), r, z, [variance.unsqueeze(0)])
        pulled = times(inner)
        back = inner - solved(root, factor, pulled)  # K^-1 A^-1 inner
        gradient = self._pull(r, z, times(back), part.terms) - outer
        half = 0.5 * weights - back
        adjoint = weights.unsqueeze(-1) * half.unsqueeze(-2) - 0.5 * within
        value = value - 0.5 * (weights * times(weights)).sum(-1)
        value = value + 0.5 * decrement - (inner * step).sum(-1)
        value = value - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)

        def along(r: Tensor, adjoint: Tensor, weights: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            mean, covariance = self._field(r)
            return (adjoint * covariance).sum() + (weights * mean).sum(), ()

        (field,) = gradient_and_rest(along, r, adjoint, weights - back)
        gradient = gradient + field
        found = (info == 0) & (decrement <= eps * max(1.0, 0.01 * self._num_inner)) & gradient.sum(-1).isfinite()
        likelihood = torch.where(found, value, torch.nan)
        gradient = outside + beta.unsqueeze(-1) * torch.where(found.unsqueeze(-1), gradient, 0.0)
        return Evaluation(prior, likelihood, tempered(prior, likelihood, beta), torch.cat([gradient, z + step], -1))

    def _integral_of(self, conjugate: ConjugateCoordinates, u: Tensor, beta: Tensor) -> Evaluation:
        """Integrate in closed form; the starts are not needed, and stand as the gradient by them."""
        r, z = u.split([self.dim, self._num_inner], -1)
        outside, prior = self._prior(r)

        # The points are constants: the result is the same at any.
        points = conjugate.points(functools.partial(self._slope_at, r), len(r)).detach()

        def integral(r: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
            slopes, values = torch.func.vmap(lambda z: self._slope((0, 1), r, z))(points)
            found = conjugate.log_integral(values[1], points, slopes)
            return found.sum(), (found,)

        gradient, value = gradient_and_rest(integral, r)
        likelihood = value - prior
        found = likelihood.isfinite() & gradient.sum(-1).isfinite()
        likelihood = torch.where(found, likelihood, torch.nan)
        gradient = outside + beta.unsqueeze(-1) * torch.where(found.unsqueeze(-1), gradient - outside, 0.0)
        return Evaluation(prior, likelihood, tempered(prior, likelihood, beta), torch.cat([gradient, z], -1))

    def _evaluation(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Evaluate rows and starts by the way that the structure allows."""
        if self._conjugate is not None:
            return self._integral_of(self._conjugate, u, beta)
        if self._is_quadratic:
            return self._normal_integral(u, beta)
        return self._laplace_of_field(u, beta) if self._is_field else self._laplace(u, beta)

    def _laplace_of_rows(self, u: Tensor, beta: Tensor) -> Evaluation:
        with torch.no_grad(), FailingApart():
            return self._evaluation(u, beta)

    def _searched(self, evaluate: Evaluator, r: Tensor, beta: Tensor, chunk: int | None = None) -> Evaluation:
        """Evaluate rows ``(n, p)``; what a few steps from the predicted mode do not solve is searched for.

        ``chunk`` rows are evaluated at a time, by default all.
        """
        p, chunk = self.dim, chunk or len(r)
        z = self._start.expand(len(r), -1)
        if self._conjugate is None:
            z = z + (r - self._reference) @ self._tangent
        found = evaluate(torch.cat([r, z], -1), beta)
        lost = found.log_likelihood.isnan()
        if self._conjugate is not None:
            self.num_failures += int(lost.sum())
        elif bool(lost.any()):
            for _ in range(_MAX_TRIES):  # the graph goes on where it ended
                z = torch.where(lost.unsqueeze(-1), found.gradient[:, p:], z)
                some = (lost & z.isfinite().all(-1)).nonzero()[:, 0]
                if not len(some):
                    break
                if len(some) > len(r) - chunk:  # as many calls as for all
                    some = torch.arange(len(r), device=r.device)
                again = evaluate(torch.cat([r[some], z[some]], -1), beta[some])
                found = _with_rows(found, some, again, lost[some])
                lost = found.log_likelihood.isnan()
                if not bool(lost.any()):
                    break
            for some in lost.nonzero()[:, 0].split(chunk) if bool(lost.any()) else ():
                start = torch.cat([r[some], self._mode(r[some]).z], -1)
                with torch.no_grad(), FailingApart():  # without what is assumed of a field
                    few = self._laplace(start, beta[some])
                found = _with_rows(found, some, few, lost[some])
            lost = found.log_likelihood.isnan()
            self.num_failures += int(lost.sum())
        prior, likelihood, _, gradient = found
        likelihood = torch.where(lost, -torch.inf, likelihood)
        return Evaluation(prior, likelihood, tempered(prior, likelihood, beta), gradient[:, :p])

    # -- the mode ---------------------------------------------------------------------------

    def _mode(self, r: Tensor) -> _Mode:
        """Maximise by ``z`` for each row of ``r`` ``(n, p)``, by damped Newton steps from one start."""
        with torch.no_grad(), FailingApart():
            return self._climbed(r)

    def _climbed(self, r: Tensor, start: Tensor | None = None) -> _Mode:
        blocks, eps = self.blocks, torch.finfo(r.dtype).eps
        z = self._start.expand(len(r), -1) if start is None else start
        constant = self._constant(r, z)
        minus, slope, value = self._curve(r, z, constant)
        alive = _finite(minus, slope, value)
        done, last, damping = torch.zeros_like(alive), torch.zeros_like(alive), torch.zeros_like(value)
        before = torch.full_like(value, torch.inf)
        for _ in range(_MAX_STEPS):
            scale, one = blocks.scale(minus), blocks.identity(minus)
            factor, definite = blocks.factorised(minus + _like(damping, minus) * one)
            step = torch.where(definite[:, None], blocks.solved(factor, slope), 0.0)
            gain = (slope * step).sum(-1)
            squared = torch.where(damping == 0, gain, torch.inf)  # length of the step in standard deviations
            done |= alive & definite & (last | (squared <= eps**1.8))
            # Where nothing rises and damping is still needed, there is a saddle or a minimum.
            level = definite & (damping > 0) & (gain <= eps**1.8)
            alive &= (damping <= _MOST_DAMPING * scale) & ~(last & ~definite) & ~level
            moving = alive & ~done
            if not bool(moving.any()):
                break
            # Newton's method squares the error: the step after a short one is the last, and so is one that rounding
            # keeps from being shorter than the one before.
            near = definite & (squared <= _NEAR * math.sqrt(eps))
            last = near & ((squared <= eps) | (squared > 0.1 * before))
            before = squared
            tried = torch.where(moving[:, None], z + step, z)
            new = self._curve(r, tried, constant)
            better = definite & _finite(*new) & (near | (new[2] >= value - 16 * eps * (1 + value.abs())))
            better &= moving
            last &= better
            z = torch.where(better[:, None], tried, z)
            minus = torch.where(_like(better, minus), new[0], minus)
            slope = torch.where(better[:, None], new[1], slope)
            value = torch.where(better, new[2], value)
            less = torch.where(damping <= _LEAST_DAMPING * scale, 0.0, 0.1 * damping)
            more = torch.maximum(10 * damping, _FIRST_DAMPING * scale)
            damping = torch.where(moving, torch.where(better, less, more), damping)
        # A row without a mode gets a harmless factor.
        return _Mode(z, blocks.factorised(torch.where(_like(done, minus), minus, blocks.identity(minus)))[0], done)

    # -- the interface of a density and of its evaluators -----------------------------------

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood, ``(*batch, p) -> (*batch)``, differentiable once."""
        if is_traced():
            raise RuntimeError("a search for modes cannot be traced")
        prior, likelihood = _Once.apply(u, self)
        return prior, likelihood

    def eagerly(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return log prior, log likelihood, and the gradients of both, ``(n, p) -> (n,), (n,), (n, p), (n, p)``."""
        parts = []
        with one_thread():
            for r in rows.split(self.cost.chunk_size(len(rows))):
                found = self._searched(self._laplace_of_rows, r, torch.ones_like(r[:, 0]))
                outside = self._prior(r)[0]
                parts.append((found.log_prior, found.log_likelihood, outside, found.gradient - outside))
        return tuple(torch.cat(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        """Return the evaluator for ``num_vectors`` rows."""
        return self._guarded(self._engine.evaluator(num_vectors, num_calls, compile))

    def compiled(self, num_vectors: int) -> Evaluator | None:
        """Return an evaluator compiled already that serves ``num_vectors`` rows, or None."""
        found = self._engine.compiled(num_vectors)
        return None if found is None else self._guarded(found)

    def _guarded(self, evaluate: Evaluator) -> Evaluator:
        def searched(u: Tensor, beta: Tensor) -> Evaluation:
            with one_thread():
                return self._searched(evaluate, u.detach(), beta, self.cost.chunk_size(len(u)))

        return searched

    @property
    def cost(self) -> Cost:
        """Nodes and bytes of the graph of one vector."""
        return self._engine.cost

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the sites at ``(n, p)``, and of deterministic ones that need no other site."""
        found: dict[str, Tensor] = torch.func.vmap(
            lambda r: {
                name: value
                for name, value in self._whole.values(self._merged(r, self._start), deterministic).items()
                if name in self._fixed
            }
        )(u)
        return found

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector of one set of values."""
        return self._whole.vector(values, self._merged(self._reference, self._start))[self._kept]

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained| of the remaining sites, ``(n, p) -> (n,)``."""
        raise ModelError("the Jacobian of the sites that are left is not known apart from that of the others")

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Raise ``ModelError``: data that share a latent site are dependent without it."""
        raise ModelError(
            "data are dependent once a site that they share is integrated out; draw it again by with_latents(draws)"
        )

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw from the prior of the remaining sites, ``(num_draws, p)``."""
        return self._whole.prior_draws(num_draws, generator, True)[:, self._kept]

    def completed(self, rows: Tensor, generator: torch.Generator) -> Tensor:
        """Return vectors of all sites, those that were integrated out drawn at random, ``(n, p) -> (n, d)``."""
        parts: list[Tensor] = []
        if (conjugate := self._conjugate) is not None:
            with one_thread(), torch.no_grad(), FailingApart():
                for r in rows.split(self.cost.chunk_size(len(rows))):
                    slope = functools.partial(self._slope_at, r)
                    points = conjugate.points(slope, len(r))
                    slopes = torch.func.vmap(slope)(points)
                    found = conjugate.log_integral(torch.zeros_like(r[:, 0]), points, slopes)
                    if lost := int((~found.isfinite()).sum()):
                        raise DrawsError(
                            f"the density has no finite integral by {sorted(self._over)} at {lost} of {len(r)} draws"
                        )
                    z = conjugate.drawn(points, slopes, generator)
                    parts.append(torch.func.vmap(self._merged)(r, z))
            return torch.cat(parts)
        noise = torch.randn(len(rows), self._num_inner, generator=generator, dtype=self.dtype).to(self.device)
        with one_thread():
            for r in rows.split(self.cost.chunk_size(len(rows))):
                mode = self._mode(r)
                self._check_found(mode, r)
                e = noise[sum(map(len, parts)) :][: len(r)]
                parts.append(torch.func.vmap(self._merged)(r, mode.z + self.blocks.spread(mode.factor, e)))
        return torch.cat(parts)

    def corrected(
        self,
        rows: Tensor,
        num_inner: int,
        generator: torch.Generator,
        *,
        progress: bool,
        with_draws: bool = False,
    ) -> _Corrected:
        """Estimate the likelihood at rows ``(n, p)`` without bias, and draw what is integrated out, if wanted."""
        if self.is_exact:
            u = self.completed(rows, generator) if with_draws else rows
            return _Corrected(torch.zeros_like(rows[:, 0]), u, 0.0)
        found = []
        with (
            one_thread(),
            torch.no_grad(),
            FailingApart(),
            progress_bar("correcting Laplace's approximation", len(rows), progress) as bar,
        ):
            for r in rows.split(self.cost.chunk_size(len(rows))):
                mode = self._climbed_field(r) if self._is_field else self._climbed(r)
                self._check_found(mode, r)
                if isinstance(self.blocks, DiagonalBlocks) and self.blocks.is_separate:
                    chance = torch.rand(mode.z.shape, generator=generator, dtype=torch.float64) if with_draws else None
                    part = self._by_quadrature(r, mode.z, self.blocks.scattered(1 / mode.factor), chance)
                else:
                    size = max(1, _VALUES * self.cost.chunk_size(len(r) * num_inner) // num_inner)
                    pairs = zip(r.split(size), mode.z.split(size), strict=True)
                    part = _joined([self._by_importance(*pair, num_inner, generator) for pair in pairs])
                u = torch.func.vmap(self._merged)(r, part.draws) if with_draws else r
                found.append(part._replace(draws=u))
                bar.update(sum(len(part.log_ratio) for part in found))
        return _joined(found)

    def _check_found(self, mode: _Mode, r: Tensor) -> None:
        if lost := int((~mode.found).sum()):
            raise DrawsError(f"no mode of {sorted(self._over)} is found at {lost} of {len(r)} draws")

    def _climbed_field(self, r: Tensor) -> _Mode:
        """Return modes of a Gaussian field and Cholesky factors of its precision."""
        start = self._start + (r - self._reference) @ self._tangent
        one = torch.ones_like(r[:, 0])
        for _ in range(_MAX_TRIES):
            evaluation = self._laplace_of_field(torch.cat([r, start], -1), one)
            start = evaluation.gradient[:, self.dim :]
        factor = self._field_factor(r, start)
        found = evaluation.log_likelihood.isfinite() & factor.isfinite().flatten(1).all(-1)
        return _Mode(start, factor, found)

    def _field_factor(self, r: Tensor, z: Tensor) -> Tensor:
        """Return the Cholesky factor of the precision at modes, from the covariance, ``(n, 1, m, m)``."""
        minus, slope, _ = self._product((1,), r, z, torch.ones_like(z))
        root, covariance = self._root(minus, slope), self._field(r)[1]
        eye = torch.eye(self._num_inner, dtype=r.dtype, device=r.device)
        inside = torch.linalg.cholesky(eye + root.unsqueeze(-1) * covariance * root.unsqueeze(-2))
        beside = torch.linalg.solve_triangular(inside, root.unsqueeze(-1) * covariance, upper=False)
        # A factor of the covariance, from the last coordinate on, is the inverse of one of the precision.
        upper = torch.linalg.cholesky((covariance - beside.mT @ beside).flip(-1, -2)).flip(-1, -2)
        return torch.linalg.solve_triangular(upper, eye.expand_as(upper), upper=True).mT.unsqueeze(1)

    def _factor(self, r: Tensor, z: Tensor) -> Factor:
        """Return the factor of minus the Hessian at modes."""
        return self.blocks.factorised(self._curve(r, z, self._constant(r, z))[0])[0]

    def _by_quadrature(self, r: Tensor, z: Tensor, scale: Tensor, chance: Tensor | None) -> _Corrected:
        """Integrate along each coordinate, from its slope at points that all coordinates share; finer where needed.

        Draws are quantiles of ``chance`` ``(n, m)``. What may be left out is one where the quadrature failed.
        """
        log_ratio, rest, x = z.new_zeros(len(z)), z.new_ones(len(z)), z.clone()
        for number in range(_REFINEMENTS):
            bad = (rest == 1).nonzero()[:, 0]
            if len(bad) == 0:
                break
            rule = LineRule(*(x.to(z) for x in line_rule(2**number)))
            size = max(1, self.cost.chunk_size(len(bad) * len(rule.nodes)) // len(rule.nodes))
            for some in bad.split(size):
                height, log_ratio[some], rest[some] = self._along(rule, r[some], z[some], scale[some])
                if chance is not None:
                    x[some] = z[some] + scale[some] * rule.quantiles(height, chance[some].to(z))
        return _Corrected(log_ratio, x, float(rest.amax()))

    def _along(self, rule: LineRule, r: Tensor, z: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log densities at the nodes ``(J, n, m)``, the log ratio ``(n,)`` and what is left out, ``(n,)``."""
        slope, value = torch.func.vmap(lambda x: self._slope((0, 1), r, z + scale * x))(rule.nodes)
        # The log density along a coordinate is what the slopes from the mode outwards add up to.
        height = torch.einsum("jk,knm->jnm", rule.integrals, slope * scale)
        logs = height + rule.log_weights[:, None, None]
        total = logs.logsumexp(0)
        rest = (logs - total)[[0, -1]].logsumexp(0).exp().amax(-1)
        # The sum over coordinates is known, and where it counts the slopes must add up to it.
        known, found = value - value[len(value) // 2], height.sum(-1)
        gap = ((found - known).abs() > _ADDING_UP * (1 + known.abs())) & ((found > -_DEEP) | (known > -_DEEP))
        failed = gap.any(0) | (height > 1).any(-1).any(0) & (found > -_DEEP).any(0) | ~rest.isfinite()
        return height, (total - 0.5 * math.log(2 * math.pi)).sum(-1), torch.where(failed, 1.0, rest)

    def _by_importance(self, r: Tensor, mode: Tensor, num_inner: int, generator: torch.Generator) -> _Corrected:
        """Draw from independent Student t distributions along the axes; one draw of each row is kept by its weight."""
        m = self._num_inner
        factor = self._field_factor(r, mode) if self._is_field else self._factor(r, mode)
        # So many degrees of freedom that the log ratio to normal draws varies little over all axes.
        freedom = torch.tensor(max(5.0, math.sqrt(5 * m)), dtype=torch.float64)
        shape = (num_inner, len(r), m)
        normal = torch.randn(shape, generator=generator, dtype=torch.float64)
        gamma = standard_gamma((freedom / 2).expand(shape).contiguous(), generator)
        x = normal / (2 * gamma / freedom).sqrt()
        log_q = torch.distributions.StudentT(freedom).log_prob(x).sum(-1).to(r)
        z = torch.func.vmap(lambda x: mode + self.blocks.spread(factor, x))(x.to(r))
        logs = torch.func.vmap(lambda z: torch.stack(self._terms(r, z)).sum(0))(z) - log_q
        top = torch.stack(self._terms(r, mode)).sum(0) + 0.5 * m * math.log(2 * math.pi)
        uniform = torch.rand(logs.shape, generator=generator, dtype=torch.float64)
        chosen = (logs - (-uniform.log()).log().to(r)).argmax(0)  # Gumbel's trick
        log_ratio = logs.logsumexp(0) - math.log(num_inner) - top
        return _Corrected(log_ratio, z[chosen, torch.arange(len(r), device=z.device)], 0.0)


def _joined(parts: Sequence[_Corrected]) -> _Corrected:
    """Return estimates at all rows of several parts."""
    log_ratio, draws, left_over = zip(*parts, strict=True)
    return _Corrected(torch.cat(log_ratio), torch.cat(draws), max(left_over))


class _Once(torch.autograd.Function):
    """Log prior and log likelihood whose derivatives are known, for automatic differentiation."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, density: _LaplaceDensity) -> tuple[Tensor, Tensor]:
        prior, likelihood, *ctx.gradients = density.eagerly(u.detach().reshape(-1, u.shape[-1]))
        return prior.reshape(u.shape[:-1]), likelihood.reshape(u.shape[:-1])

    @staticmethod
    def backward(ctx: Any, along_prior: Tensor, along_likelihood: Tensor) -> tuple[Tensor, None]:
        sides = (along_prior.unsqueeze(-1), along_likelihood.unsqueeze(-1))
        return sum(a * g.reshape(*a.shape[:-1], -1) for a, g in zip(sides, ctx.gradients, strict=True)), None


def _with_rows(old: Evaluation, rows: Tensor, new: Evaluation, where: Tensor) -> Evaluation:
    """Return an evaluation with those of ``rows`` ``(k,)`` from another where ``where`` ``(k,)``."""
    return Evaluation(*(a.index_put((rows[where],), b[where]) for a, b in zip(old, new, strict=True)))


def _finite(minus: Tensor, slope: Tensor, value: Tensor) -> Tensor:
    """Tell for which rows a curve is finite, ``(n,)``."""
    return minus.isfinite().flatten(1).all(-1) & slope.isfinite().all(-1) & value.isfinite()


def _like(rows: Tensor, blocks: Tensor) -> Tensor:
    """Return what belongs to rows ``(n,)`` with further dimensions of size one."""
    return rows.reshape(-1, *[1] * (blocks.dim() - 1))
