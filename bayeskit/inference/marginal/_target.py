"""Targets in which some sites are integrated out, in closed form or by Laplace's approximation."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from bayeskit._core.inputs import unknown_name, whole_number
from bayeskit._core.process_state import process_state
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._draws import Draws
from bayeskit._logdensity.foreign_density import origin_of
from bayeskit._logdensity.pyro_density import PyroDensity
from bayeskit._logdensity.target import Target, takes_draws
from bayeskit.errors import AccuracyWarning, DrawsError, ModelError, SettingsError
from bayeskit.inference.marginal._correction import LaplaceCorrection
from bayeskit.inference.marginal._density import MarginalDensity
from bayeskit.inference.marginal._unbiased import estimate_without_bias
from bayeskit.inference.samplers._weighted_particles import systematic

#: Least number of rows of a chain for a correction.
_LEAST_ROWS = 4


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

    density: MarginalDensity

    def __init__(self, whole: Target, over: Sequence[str], correct: bool = False) -> None:
        self.whole, self.over, self.correct = whole, tuple(over), correct
        with process_state(), one_thread():
            density = MarginalDensity(whole.density, self.over)  # type: ignore[arg-type]
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
        return self.density.approximation is None

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the approximation cannot be trusted; estimates of the evidence repeat it."""
        return self.density.problems

    @property
    def needs_correction(self) -> bool:
        """Whether estimates of the evidence are corrected by :meth:`correction`."""
        return self.correct and not self.is_exact

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
        if self.correct and (approximation := self.density.approximation) is not None:
            num_inner, cost = whole_number("num_inner", num_inner, 2), self.density.cost
            found = estimate_without_bias(
                approximation, rows, num_inner, generator, cost, progress=progress, with_draws=True
            )
            log_weights = found.log_ratio.reshape(shape)
            u = self.density.inner.merged_rows(rows, found.z).reshape(*shape, -1)
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
        num_inner, cost = whole_number("num_inner", num_inner, 2), self.density.cost
        if (approximation := self.density.approximation) is None:
            return LaplaceCorrection(rows.new_zeros(num_chains, each))
        found = estimate_without_bias(
            approximation, rows, num_inner, generator, cost, progress=progress, with_draws=False
        )
        return LaplaceCorrection(found.log_ratio.reshape(num_chains, each), found.left_over)

    def _check_draws(self, draws: Draws) -> None:
        if not isinstance(draws, Draws):
            raise DrawsError(f"draws must be Draws, such as bk.sample(target) returns, not a {type(draws).__name__}")
        if draws.unconstrained.shape[-1] != self.dim:
            raise DrawsError(f"the draws have dimension {draws.unconstrained.shape[-1]}, and this target {self.dim}")
        if not bool((draws.beta == 1).all()):
            raise DrawsError("the draws are tempered (beta below 1); latent sites are drawn from the posterior only")
        if draws.target is self or not draws.target.has_density:
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


@takes_draws
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
    density = target.density
    if not isinstance(density, PyroDensity):
        raise ModelError(
            "only a target of a Pyro model has sites that can be integrated out one by one, because that takes second "
            f"derivatives, and this one was made from {origin_of(density)}; write the model for Pyro, and use "
            "Target.from_pyro, or sample all of its sites"
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
