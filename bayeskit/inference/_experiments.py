"""Experiments: how much their data tell about the unknowns of a model, and the design that tells most."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from bayeskit._core.inputs import as_numbers, real_number, unknown_name, whole_number
from bayeskit._core.randomness import new_generator, one_thread
from bayeskit._core.texts import short_repr
from bayeskit._logdensity.outcomes import Data, Outcomes
from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.inference._optimize import adam_path
from bayeskit.inference._proposals import StudentT
from bayeskit.inference.held_out._information import Information

# Marginal densities by importance sampling, from below and from above.

#: Numbers of a batch of the model, and degrees of freedom of proposals: even, so that their scale has a simple form.
_AT_ONCE, _DEGREES_OF_FREEDOM = 2_000_000, 8
#: Rounds in which proposals adapt to each data set, and weight of the regression in their covariance, by dimension.
_ROUNDS, _WEIGHT_OF_REGRESSION = 2, 4
#: Robust scales beyond which a number is clipped in regressions, and number of unknowns with products as controls.
_FARTHEST, _FEW = 10.0, 10
#: Draws from the prior that give the means of controls, and experiments, for each control that is used.
_PRIOR_DRAWS, _EXPERIMENTS_PER_CONTROL = 50_000, 20
_FEW_DRAWS = 20  # that show whether the prior depends on the design
_NEAR_LIMIT, _LARGE_GAP = 0.9, 0.02
_STANDARD_ERRORS = 4  # that are no chance
_PROPOSALS = ("fitted", "prior")

Joint = Callable[[Tensor], tuple[Tensor, Tensor]]  # log prior and log likelihood, (n, m, d) -> (n, m)


class _Sandwich(NamedTuple):
    """Estimates of log marginal densities ``(n,)``, too low and too high in expectation."""

    below: Tensor  # of independent draws
    above: Tensor  # with the draw that the data came from among the others
    own: Tensor  # log weight of that draw
    draws: Tensor  # (n, count + 1, d), that draw the last
    weights: Tensor  # (n, count + 1), which add up to one
    log_likelihood: Tensor  # of the draws, (n, count + 1)


def _adapted_to(proposal: StudentT, x: Tensor, log_weights: Tensor) -> StudentT:
    """Return the distributions with the moments of weighted draws ``(n, m, d)``, as far as these determine them."""
    weights = log_weights.nan_to_num(nan=-torch.inf).softmax(-1).nan_to_num().unsqueeze(-1)
    effective = 1 / weights.square().sum((-2, -1)).clamp(min=1e-300).reshape(-1, 1)
    prior = _WEIGHT_OF_REGRESSION * x.shape[-1]
    trust = effective / (effective + prior)
    location = proposal.location + trust * ((weights * x).sum(-2) - proposal.location)
    centred = x - location.unsqueeze(-2)
    covariance = (weights * centred).mT @ centred
    before = proposal.factor @ proposal.factor.mT
    mixed = before + trust.unsqueeze(-1) * (covariance - before)
    factor, failed = torch.linalg.cholesky_ex(mixed)
    failed = failed.bool() | ~factor.isfinite().all(-1).all(-1) | ~location.isfinite().all(-1)
    return StudentT(
        torch.where(failed.unsqueeze(-1), proposal.location, location),
        torch.where(failed.reshape(-1, 1, 1), proposal.factor, factor),
        proposal.df,
    )


def _robust(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return median and half the range of the middle two thirds of columns ``(n, d)``, or a scale that is not zero."""
    low, centre, high = x.quantile(torch.tensor([0.16, 0.5, 0.84], dtype=x.dtype, device=x.device), 0)
    half, deviation = (high - low) / 2, x.std(0)
    return centre, torch.where(half > 0, half, torch.where(deviation > 0, deviation, 1.0))


class _Regression:
    """A linear regression of unknowns on numbers that are known, by simulations: proposals given these numbers."""

    def __init__(self, known: Tensor, unknown: Tensor) -> None:
        self._centre, self._scale = _robust(known)
        x = self._features(known)
        gram = x.mT @ x + 1e-6 * len(x) * torch.eye(x.shape[1], dtype=x.dtype)
        self._weights = torch.linalg.solve(gram, x.mT @ unknown)
        rest = unknown - x @ self._weights
        covariance = rest.mT @ rest / max(1, len(x) - x.shape[1])
        floor = 1e-12 * unknown.var(0).clamp(min=1e-20)
        self._cholesky = torch.linalg.cholesky(covariance + floor.diag())

    def _features(self, known: Tensor) -> Tensor:
        x = ((known - self._centre) / self._scale).clamp(-_FARTHEST, _FARTHEST)
        return torch.cat([torch.ones_like(x[:, :1]), x], 1) if x.shape[1] else x.new_ones(len(x), 1)

    def given(self, known: Tensor) -> StudentT:
        factors = self._cholesky.expand(len(known), -1, -1)
        return StudentT(self._features(known) @ self._weights, factors, _DEGREES_OF_FREEDOM)


def _adapted(joint: Joint, proposal: StudentT, truth: Tensor, count: int, generator: torch.Generator) -> _Sandwich:
    """Bound log integrals over unknowns, of which ``truth`` ``(n, d)`` has the normalised density."""
    with torch.no_grad():
        # Proposals may depend on the data, and not on the draw that the data came from.
        for _ in range(_ROUNDS):
            x = proposal.sample(count, generator)
            proposal = _adapted_to(proposal, x, torch.add(*joint(x)) - proposal.log_prob(x))
        x = proposal.sample(count, generator)
        x = torch.cat([x, truth.unsqueeze(1)], 1)
        log_q = proposal.log_prob(x)
    log_prior, log_likelihood = joint(x)
    return _sandwich(x, log_prior + log_likelihood - log_q, log_likelihood)


def _sandwich(draws: Tensor, log_weights: Tensor, log_likelihood: Tensor) -> _Sandwich:
    """Return the bounds from weights of independent draws and, last, of the draw that the data came from."""
    log_weights = torch.where(log_weights.isnan(), -torch.inf, log_weights)
    count = log_weights.shape[1] - 1
    below = log_weights[:, :-1].logsumexp(1) - math.log(count)
    above = log_weights.logsumexp(1) - math.log(count + 1)
    return _Sandwich(below, above, log_weights[:, -1], draws, log_weights.detach().softmax(1), log_likelihood)


# Information of data on some of the unknowns.


class _Terms(NamedTuple):
    """Of each simulated experiment ``(n,)``."""

    lower: Tensor
    upper: Tensor
    limit: Tensor  # that ``lower`` cannot exceed
    log_density: Tensor  # of unknowns and data
    moments: Tensor  # of the unknowns given the data, (n, p)


class _Question:
    """What data tell about some of a model's unknowns, the other unknowns integrated out."""

    def __init__(
        self,
        outcomes: Outcomes,
        of: Sequence[str],
        num_inner: int,
        proposal: str,
        num_pilot: int,
        generator: torch.Generator,
    ) -> None:
        self.outcomes, self.num_inner, self.proposal, self.generator = outcomes, num_inner, proposal, generator
        sites = {site.name: site for site in outcomes.target.sites}
        for name in of:
            if name not in sites:
                raise unknown_name("continuous latent site", name, list(sites))
        wanted = [i for name in of for i in range(sites[name].start, sites[name].stop)]
        self.of = tuple(dict.fromkeys(of))
        self.wanted = torch.tensor(sorted(set(wanted)))
        self.nuisance = torch.tensor([i for i in range(outcomes.target.dim) if i not in set(wanted)], dtype=torch.long)
        u, data = outcomes.draw(num_pilot, generator)
        _refuse_not_finite(data)
        self.is_independent = self._is_independent(u)
        if proposal == "prior" and len(self.nuisance) and not self.is_independent:
            raise SettingsError(
                f"the prior of {list(self.of)} depends on other sites, so it has no known density; leave "
                'proposal="fitted"'
            )
        self.fit(u, data)

    def fit(self, u: Tensor, data: Data) -> None:
        """Fit proposals to simulated experiments."""
        u, numbers = u.to(torch.float64), _numbers(data)
        self._centre, self._spread = _robust(u)
        wanted, nuisance = u[:, self.wanted], u[:, self.nuisance]
        self._all = _Regression(numbers, u)
        if len(self.nuisance):
            self._given_data = _Regression(torch.cat([wanted, numbers], 1), nuisance)
            self._given_wanted = _Regression(wanted, nuisance)

    def _prior_of(self, u: Tensor) -> Tensor:
        terms = self.outcomes.prior_terms(u)
        return torch.stack([terms[name] for name in self.of]).sum(0).to(torch.float64)

    def _is_independent(self, u: Tensor) -> bool:
        """Tell whether the density of the sites of interest is known, because no other site determines it."""
        if not len(self.nuisance):
            return True
        other = u.clone()
        other[:, self.nuisance] = u[:, self.nuisance].roll(1, 0)
        known = set(self.of) <= self.outcomes.prior_terms(u[:1]).keys()
        return known and torch.equal(self._prior_of(u), self._prior_of(other))

    def terms(self, u: Tensor, data: Data, argument: Tensor | None = None) -> _Terms:
        """Return bounds for each of ``n`` experiments, in chunks."""
        size = sum(x[0].numel() for x in data.values()) + u.shape[1]
        chunk = max(1, _AT_ONCE // ((self.num_inner + 1) * size))
        parts = []
        for start in range(0, len(u), chunk):
            rows = slice(start, start + chunk)
            given = {name: x[rows] for name, x in data.items()}
            parts.append(self._chunk(u[rows], given, None if argument is None else argument[rows]))
        return _Terms(*map(torch.cat, zip(*parts, strict=True)))

    def _chunk(self, u: Tensor, data: Data, argument: Tensor | None) -> _Terms:
        detached = {name: x.detach() for name, x in data.items()}
        numbers = _numbers(detached)
        dtype, u = u.dtype, u.to(torch.float64)
        wanted, nuisance = u[:, self.wanted], u[:, self.nuisance]

        def joint(x: Tensor) -> tuple[Tensor, Tensor]:
            # Proposals adapt without gradients.
            given = data if torch.is_grad_enabled() else detached
            log_prior, log_likelihood = self.outcomes.joint(x.to(dtype), given, argument)
            return log_prior.to(torch.float64), log_likelihood.to(torch.float64)

        def whole(x: Tensor) -> Tensor:
            both = x.new_empty(*x.shape[:2], u.shape[1])
            both[..., self.wanted], both[..., self.nuisance] = wanted.unsqueeze(1), x
            return both

        def prior(x: Tensor) -> tuple[Tensor, Tensor]:
            log_prior = joint(whole(x))[0]
            return log_prior, torch.zeros_like(log_prior)

        log_prior, log_likelihood = (x.squeeze(1) for x in joint(u.unsqueeze(1)))
        log_density = log_prior + log_likelihood
        if self.proposal == "prior":
            x = torch.cat([self._prior_draws(len(u)), u.unsqueeze(1)], 1)
            likelihoods = joint(x)[1]
            evidence = _sandwich(x, likelihoods, likelihoods)
        else:
            evidence = self._adapted(joint, self._all.given(numbers), u)
        if not len(self.nuisance):
            known = log_likelihood
            if not torch.is_grad_enabled():
                # Given the data and all draws, each may be the one that the data came from, by its weight.
                terms = evidence.weights * evidence.log_likelihood
                known = torch.where(evidence.weights > 0, terms, 0.0).sum(1)
            low = high = known
            own = log_likelihood
        else:
            if self.proposal == "prior":
                x = whole(torch.cat([self._prior_draws(len(u))[..., self.nuisance], nuisance.unsqueeze(1)], 1))
                log_weights = joint(x)[1]
                with_data = _sandwich(x, log_weights, log_weights)
            else:
                proposals = self._given_data.given(torch.cat([wanted, numbers], 1))
                with_data = self._adapted(lambda x: joint(whole(x)), proposals, nuisance)
            low, high = with_data.below, with_data.above
            if self.is_independent:
                known = self._prior_of(u.to(dtype)) if self.proposal == "fitted" else torch.zeros_like(low)
                low, high = low - known, high - known
            else:
                without_data = self._adapted(prior, self._given_wanted.given(wanted), nuisance)
                low, high = low - without_data.above, high - without_data.below
            own = low
        # The mean weight with the draw of the experiment among the others is at least the share of that draw.
        limit = own - evidence.own + math.log(self.num_inner + 1)
        moments = (evidence.weights.unsqueeze(-1) * self.controls(evidence.draws)).sum(1)
        return _Terms(low - evidence.above, high - evidence.below, limit, log_density, moments)

    def controls(self, u: Tensor) -> Tensor:
        """Return coordinates ``(*batch, d)`` in robust scales, and their products, ``(*batch, p)``."""
        v = ((u - self._centre) / self._spread).clamp(-_FARTHEST, _FARTHEST)
        rows, columns = torch.triu_indices(v.shape[-1], v.shape[-1])
        return torch.cat([v, v[..., rows] * v[..., columns] if v.shape[-1] <= _FEW else v.square()], -1)

    def _adapted(self, joint: Joint, proposal: StudentT, truth: Tensor) -> _Sandwich:
        return _adapted(joint, proposal, truth, self.num_inner, self.generator)

    def _prior_draws(self, n: int) -> Tensor:
        draws = self.outcomes.target.sample_prior(n * self.num_inner, seed=self.generator)
        return draws.reshape(n, self.num_inner, -1).to(torch.float64)


def _numbers(data: Data) -> Tensor:
    """Return the data of each experiment as a row, ``(n, m)``."""
    return torch.cat([x.reshape(len(x), -1).to(torch.float64) for x in data.values()], 1)


def _refuse_not_finite(data: Data) -> None:
    bad = ~_numbers(data).isfinite().all(1)
    if bool(bad.any()):
        raise DataError(
            f"the model draws NaN or infinite data in {int(bad.sum())} of {len(bad)} experiments, of which nothing can "
            "be learned; correct the model, or leave unknowns that give such data out of the prior"
        )


class _Average:
    """Means over experiments, with the moments of unknowns given the data, whose means the prior knows, as controls."""

    def __init__(self, question: _Question, moments: Tensor) -> None:
        n, p = moments.shape
        self._controls = moments.new_zeros(n, 0)
        if p * _EXPERIMENTS_PER_CONTROL <= n:
            draws = question.outcomes.target.sample_prior(_PRIOR_DRAWS, seed=question.generator).to(torch.float64)
            controls = question.controls(draws).cpu()
            self._controls = moments - controls.mean(0)
            self._covariance = controls.T.cov().reshape(p, p) / _PRIOR_DRAWS  # of the means by the prior

    def __call__(self, x: Tensor) -> tuple[float, float]:
        """Return the mean of ``(n,)`` and its standard error."""
        n, p = self._controls.shape
        if not p or not self._controls.isfinite().all() or not x.isfinite().all():
            return float(x.mean()), float(x.std()) / math.sqrt(n)
        design = torch.cat([torch.ones_like(x).unsqueeze(1), self._controls], 1)
        weights = torch.linalg.lstsq(design, x.unsqueeze(1), driver="gelsd").solution.squeeze(1)
        rest = (x - design @ weights).square().sum() / (n - p - 1)
        # The mean of the controls themselves differs from zero, which the intercept takes into account.
        shift = self._controls.mean(0)
        inverse = torch.linalg.pinv(self._controls.T.cov().reshape(p, p))
        at_zero = rest / n * (1 + shift @ inverse @ shift)
        return float(weights[0]), float((at_zero + weights[1:] @ self._covariance @ weights[1:]).sqrt())


def _checked(
    num_outer: int, num_inner: int, of: str | Sequence[str], about: str | Sequence[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of sites as tuples."""
    whole_number("num_outer", num_outer, least=2)
    whole_number("num_inner", num_inner, least=1)
    names = {name: (x,) if isinstance(x, str) else tuple(x) for name, x in (("of", of), ("about", about))}
    for name, sites in names.items():
        if not sites:
            raise SettingsError(f"{name} is empty; name at least one site of the model")
    if both := sorted(set(names["of"]) & set(names["about"])):
        raise SettingsError(f"site {both[0]!r} is in of and about; its information about itself is infinite")
    return names["of"], names["about"]


def information(
    model: Callable[..., Any],
    *args: Any,
    of: str | Sequence[str],
    about: str | Sequence[str],
    num_outer: int = 5000,
    num_inner: int = 100,
    proposal: Literal["fitted", "prior"] = "fitted",
    seed: int = 0,
) -> Information:
    r"""Estimate the mutual information of unknowns and data of a Pyro model: what an experiment is expected to tell.

    For unknowns :math:`\theta` and data :math:`y` it is the expected divergence of the posterior from the prior,

    .. math::
       I(\theta; y) = \operatorname{E} \log \frac{p(\theta, y)}{p(\theta)\, p(y)},

    over unknowns from the prior and data from the model, with all other sites integrated out. Each marginal density is
    a mean of ``num_inner`` importance weights. Without the draw that the data came from, the logarithm of this mean is
    too low in expectation, and with that draw among the others it is too high. Put together, they bound the information
    from below (contrastive) and from above (nested Monte Carlo), whatever the proposals; without other sites only
    :math:`p(y)` is estimated, and the lower bound rises with ``num_inner`` as the upper one falls.

    Proposals are Student-t distributions: a regression of the unknowns on the data, by separate simulations, adapts to
    each data set by its importance weights. With ``proposal="prior"``, unknowns are drawn from the prior. The lower
    bound then cannot exceed :math:`\log(L + 1)` for :math:`L` inner draws, and the upper bound is far too high where
    the data tell more than that.

    Parameters
    ----------
    model : callable
        A Pyro model.
    *args
        Arguments of the model. Data among them give the shape of what is to be observed; they may be None where the
        model then draws the site.
    of : str or sequence of str
        Continuous latent sites, of which the information is.
    about : str or sequence of str
        All observed sites, or sites that the model draws: discrete, continuous or both. No latent site depends on them.
    num_outer : int, default 5000
        Number of simulated experiments; standard errors fall with its square root.
    num_inner : int, default 100
        Number of draws for each marginal density; bounds get closer with it.
    proposal : {"fitted", "prior"}, default "fitted"
    seed : int, default 0

    Returns
    -------
    Information
        In nats: ``lower`` and ``upper`` with their errors, in ``value`` their mean, and the ``limit`` of ``lower``. Not
        trusted if ``lower`` is near its limit, the bounds are far apart, or the value is clearly negative.

    Raises
    ------
    UnknownNameError
        If a site or proposal does not exist, or a site in ``of`` is discrete or summed out.
    DataError
        If the model draws data that are not finite.
    SettingsError
        If a site is in both lists, another site is observed, the prior is improper, or ``proposal="prior"`` does not
        apply because the prior of ``of`` depends on other sites.
    ModelError
        If the model cannot be run, or a latent site depends on the data.

    References
    ----------
    Rainforth, T., Cornish, R., Yang, H., Warrington, A., Wood, F. (2018). On nesting Monte Carlo estimators. ICML.

    Foster, A., Jankowiak, M., O'Meara, M., Teh, Y. W., Rainforth, T. (2020). A unified stochastic gradient approach to
    designing Bayesian-optimal experiments. AISTATS.

    van den Oord, A., Li, Y., Vinyals, O. (2018). Representation learning with contrastive predictive coding.
    arXiv 1807.03748.

    Examples
    --------
    >>> import math, torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference._experiments import information
    >>> def model(x):
    ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("y", dist.Normal(slope * x, 1.0))
    >>> x = torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64)
    >>> found = information(model, x, of=["slope"], about=["y"])
    >>> abs(found.value - 0.5 * math.log(4.0)) < 4 * found.standard_error, found.gap < 0.01
    (True, True)
    """
    of, about = _checked(num_outer, num_inner, of, about)
    if proposal not in _PROPOSALS:
        raise unknown_name("proposal", proposal, _PROPOSALS)
    generator = new_generator(seed, stream="information")
    with torch.no_grad(), one_thread():
        outcomes = Outcomes(model, args, about, seed)
        question = _Question(outcomes, of, num_inner, proposal, num_outer, generator)
        u, data = outcomes.draw(num_outer, generator)
        _refuse_not_finite(data)
        return _result(question.terms(u, data), question)


def _result(terms: _Terms, question: _Question) -> Information:
    terms = _Terms(*(x.detach().cpu() for x in terms))
    average, num_inner = _Average(question, terms.moments), question.num_inner
    lower, lower_error = average(terms.lower)
    upper, upper_error = average(terms.upper)
    value, error = (lower + upper) / 2, average((terms.lower + terms.upper) / 2)[1]
    limit, most, problems = float(terms.limit.mean()), math.log(num_inner + 1), []
    if lower > limit - (1 - _NEAR_LIMIT) * most:
        problems.append(
            f"the lower bound {lower:.4g} is near its limit {limit:.4g}, so there may be more: raise num_inner"
        )
    gap, gap_error = average(terms.upper - terms.lower)
    if not gap <= max(_LARGE_GAP, 2 * error):
        problems.append(f"the bounds are {gap:.3g} nats apart: raise num_inner")
    if gap < -_STANDARD_ERRORS * gap_error:
        problems.append("the bounds cross, so rare experiments are missing from both: raise num_outer")
    if value < -_STANDARD_ERRORS * error:
        problems.append(f"the information cannot be negative and is found to be {value:.3g}: raise num_inner")
    return Information(value, error, limit, tuple(problems), lower, lower_error, upper, upper_error)


# The design of an experiment.


#: Size of a step, relative to the design or in nats, at which a gradient is compared with differences; share of them
#: and multiple of their change from a step to half of it that are no contradiction.
_STEP, _NATS, _SHARE, _CHANGES = 0.1, 0.1, 0.1, 1.5
_QUICK = 20  # inner draws of this comparison


class InformationGradient(NamedTuple):
    """The gradient of an expected information by the design.

    Attributes
    ----------
    gradient, standard_error : Tensor
        Of the shape of the design.
    information : Information
    warnings : tuple of str
        Reasons not to rely on the gradient.
    """

    gradient: Tensor
    standard_error: Tensor
    information: Information
    warnings: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem with gradient or information."""
        return not self.warnings and self.information.trusted and bool(self.gradient.isfinite().all())


def information_gradient(
    model: Callable[..., Any],
    design: Tensor,
    *args: Any,
    of: str | Sequence[str],
    about: str | Sequence[str],
    num_outer: int = 5000,
    num_inner: int = 100,
    seed: int = 0,
) -> InformationGradient:
    r"""Estimate the gradient of the information of :func:`information` by the design of the experiment.

    The design is the first argument of the model, on which the prior does not depend. Each simulated experiment gives a
    gradient of the mean of both bounds, with proposals held fixed: through data drawn by reparameterisation where all
    distributions of ``about`` permit this. Where one does not, as for discrete data, the gradient of the log density of
    the data, times the information of that experiment less the mean of the others, takes its place.

    Such gradients are wrong, with small errors, where the support of the data depends on the design or the model jumps
    with it. So along a random direction the gradient is compared with differences of the information between designs
    on both sides, with the same random numbers.

    Parameters
    ----------
    model : callable
        A Pyro model of ``(design, *args)``.
    design : Tensor
        Of any shape, of real numbers.
    *args
        Other arguments of the model.
    of, about : str or sequence of str
        As for :func:`information`.
    num_outer, num_inner : int, default 5000 and 100
    seed : int, default 0

    Returns
    -------
    InformationGradient
        ``gradient`` and ``standard_error`` of the shape of the design, and the ``information`` there. Not trusted if
        differences of the information contradict the gradient.

    Raises
    ------
    ShapeError
        If the design is not of real numbers.
    ModelError
        If the prior depends on the design, and as :func:`information`.
    UnknownNameError, SettingsError, DataError
        As :func:`information`.

    References
    ----------
    Foster, A., Jankowiak, M., O'Meara, M., Teh, Y. W., Rainforth, T. (2020). A unified stochastic gradient approach to
    designing Bayesian-optimal experiments. AISTATS.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference._experiments import information_gradient
    >>> def model(x):
    ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(slope * x, 1.0))
    >>> x = torch.tensor(2.0, dtype=torch.float64)
    >>> found = information_gradient(model, x, of=["slope"], about=["y"])
    >>> bool((found.gradient - x / (1 + x * x)).abs() < 4 * found.standard_error)
    True
    """
    of, about = _checked(num_outer, num_inner, of, about)
    designs = _Designs(model, args, of, about, num_inner, _design(design), seed)
    return designs.gradient(designs.start, num_outer, new_generator(seed, stream="design"), checked=True)


def _design(design: Any) -> Tensor:
    design = as_numbers("the design", design)
    if not design.is_floating_point() or not design.numel():
        raise ShapeError(f"the design must be a tensor of at least one real number, not {design}")
    if not bool(design.isfinite().all()):
        raise DataError(f"the design holds NaN or infinite values: {design.tolist()}")
    return design.detach()


class _Designs:
    """Gradients of the information of a model at designs within bounds."""

    def __init__(
        self,
        model: Callable[..., Any],
        args: tuple[Any, ...],
        of: Sequence[str],
        about: Sequence[str],
        num_inner: int,
        start: Tensor,
        seed: int,
        within: tuple[Any, Any] = (-math.inf, math.inf),
    ) -> None:
        self._model, self._args, self._of, self._about = model, args, of, about
        self._num_inner, self._seed = num_inner, seed
        self.low, self.high = (torch.as_tensor(end, dtype=start.dtype, device=start.device) for end in within)
        self.start = self.inside(start)

    def inside(self, designs: Tensor) -> Tensor:
        return designs.clamp(self.low, self.high)

    def gradient(
        self, design: Tensor, num_outer: int, generator: torch.Generator, checked: bool
    ) -> InformationGradient:
        outcomes = Outcomes(self._model, (design, *self._args), self._about, self._seed)
        with torch.no_grad():
            question = _Question(outcomes, self._of, self._num_inner, "fitted", num_outer, generator)
            u = outcomes.target.sample_prior(num_outer, seed=generator)
        if outcomes.prior_depends(u[:_FEW_DRAWS], design):
            raise ModelError(
                "the prior depends on the first argument of the model, the design, whose gradient is that of the data "
                "alone; write the unknowns by variables whose prior is fixed, such as design * z for z of Normal(0, 1)"
            )
        gradients, terms = _Experiments(question, u, design, generator).gradients()
        with torch.no_grad():
            found = _result(terms, question)
        result = InformationGradient(gradients.mean(0), gradients.std(0) / math.sqrt(num_outer), found)
        if not checked:
            return result
        quick = copy.copy(question)
        quick.num_inner = min(_QUICK, self._num_inner)
        return result._replace(warnings=self._contradiction(_Experiments(quick, u, design, generator)))

    def _contradiction(self, experiments: _Experiments) -> tuple[str, ...]:
        """Compare gradients of experiments with differences, which also see supports and steps that move."""
        design, (gradients, _) = experiments.design, experiments.gradients()
        sign = torch.randint(2, design.shape, generator=new_generator(self._seed, stream="direction")) * 2 - 1
        along = sign.to(design) * torch.where(design == 0, 1.0, design.abs())
        step = min(_STEP, _NATS / max(abs(float((gradients.mean(0) * along).sum())), 1e-300))

        def compared(step: float) -> tuple[Tensor, Tensor]:
            ahead, behind = (self.inside(design + side * step * along) for side in (1, -1))
            change = experiments.value(ahead) - experiments.value(behind)
            by_gradient = (gradients * (ahead - behind)).reshape(len(gradients), -1).sum(1).to(torch.float64)
            return change / (2 * step), by_gradient / (2 * step)

        (coarse, _), (fine, by_gradient) = compared(step), compared(step / 2)
        root = math.sqrt(len(fine))
        if not bool(fine.isfinite().all() and coarse.isfinite().all()):
            return (
                f"the gradient could not be checked, because the information is not finite at designs {step:.2g} of "
                "their size away: keep designs inside of their domain",
            )
        off, error = float((fine - by_gradient).mean()), float((fine - by_gradient).std()) / root
        allowed = max(float(by_gradient.std()) / root, _SHARE * abs(float(fine.mean())))
        allowed += _CHANGES * abs(float((coarse - fine).mean())) + _STANDARD_ERRORS * error
        if abs(off) <= allowed:
            return ()
        return (
            f"along a random direction the information changes by {float(fine.mean()):.3g} and by the gradient "
            f"{float(by_gradient.mean()):.3g}: the support of the data depends on the design, or the model jumps with "
            "it; compare the information at several designs instead",
        )


class _Experiments:
    """Simulated experiments at a design, and the same ones, by their random numbers, at others."""

    def __init__(self, question: _Question, u: Tensor, design: Tensor, generator: torch.Generator) -> None:
        self.question, self._u, self.design, self._generator = question, u, design, generator
        self._before = generator.get_state()

    def _each(self, design: Tensor) -> Tensor:
        return design.expand(len(self._u), *design.shape).clone()

    def gradients(self) -> tuple[Tensor, _Terms]:
        """Return gradients by a design of its own for each experiment, ``(n, *shape)``."""
        designs = self._each(self.design).requires_grad_()
        with torch.enable_grad(), one_thread():
            data, self._moves = self.question.outcomes.respond(self._u, designs, self._generator)
            _refuse_not_finite({name: x.detach() for name, x in data.items()})
            self._after = self._generator.get_state()
            terms = self.question.terms(self._u, data, designs)
            middle = (terms.lower + terms.upper) / 2
            surrogate = middle.sum()
            if not self._moves:
                others = (middle.sum() - middle) / (len(middle) - 1)
                surrogate = surrogate + ((middle - others).detach() * terms.log_density).sum()
                self._data, self._others, self._log_density = data, others.detach(), terms.log_density.detach()
        if not surrogate.requires_grad:
            raise SettingsError(
                "the data do not depend on the first argument of the model, so there is no gradient by it"
            )
        return torch.autograd.grad(surrogate, designs)[0], terms

    def value(self, design: Tensor) -> Tensor:
        """Return the information at another design from each experiment, less a constant, ``(n,)``."""
        designs = self._each(design)
        # The estimates are those that the gradient is of.
        with torch.enable_grad(), one_thread():
            if self._moves:
                self._generator.set_state(self._before)
                data, _ = self.question.outcomes.respond(self._u, designs, self._generator)
            else:
                data = self._data
            self._generator.set_state(self._after)
            terms = self.question.terms(self._u, data, designs)
        middle = (terms.lower + terms.upper).detach() / 2
        if self._moves:
            return middle
        return (middle - self._others) * (terms.log_density.detach() - self._log_density).exp()


@dataclass(frozen=True, eq=False)
class BestDesign:
    """The design that tells most of those that were tried; made by :func:`best_design`.

    Attributes
    ----------
    design : Tensor
        The mean of the designs in the last half of the steps.
    information : Information
        Of this design, by new simulations.
    start : Information
        Of the design at the start.
    path : Tensor
        Designs of all steps, ``(steps, *shape)``.
    warnings : tuple of str
        Reasons not to rely on the design, each with its remedy.
    """

    design: Tensor
    information: Information
    start: Information
    path: Tensor
    warnings: tuple[str, ...] = ()

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem."""
        return not self.warnings

    __repr__ = short_repr


def best_design(
    model: Callable[..., Any],
    design: Tensor,
    *args: Any,
    of: str | Sequence[str],
    about: str | Sequence[str],
    within: tuple[float | Tensor, float | Tensor] | None = None,
    num_steps: int = 100,
    learning_rate: float = 0.1,
    num_outer: int = 200,
    num_inner: int = 50,
    seed: int = 0,
) -> BestDesign:
    """Find the design with the largest expected information, by stochastic gradients (Adam).

    Parameters
    ----------
    model : callable
        A Pyro model of ``(design, *args)``.
    design : Tensor
        Start of the search, of any shape. There may be several maxima: try several starts.
    *args
        Other arguments of the model.
    of, about : str or sequence of str
        As for :func:`information`.
    within : pair of float or Tensor, optional
        Least and largest design, of any shape that expands to that of the design; by default unbounded.
    num_steps : int, default 100
    learning_rate : float, default 0.1
        Step, in units of the design; it falls to zero along the way.
    num_outer, num_inner : int, default 200 and 50
        Of each step; at the start and the end, ten times as many experiments are simulated.
    seed : int, default 0

    Returns
    -------
    BestDesign
        Not trusted if the information was still rising, fell, or is not trusted, or if differences of the information
        contradict its gradient, as in :func:`information_gradient`.

    Raises
    ------
    SettingsError
        If ``within`` is not a pair of increasing numbers, or a gradient is not finite.
    ShapeError, UnknownNameError, ModelError
        As :func:`information_gradient`.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference._experiments import best_design
    >>> def model(x):
    ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(slope * x, 1.0))
    >>> found = best_design(model, torch.tensor(0.5), of=["slope"], about=["y"], within=(0.0, 2.0), num_steps=40)
    >>> found.design
    tensor(2.)
    """
    of, about = _checked(num_outer, num_inner, of, about)
    whole_number("num_steps", num_steps, least=2)
    learning_rate = real_number("learning_rate", learning_rate, "(0, inf)")
    start_at = _design(design)
    bounds = (-math.inf, math.inf) if within is None else _bounds(within, start_at)
    designs = _Designs(model, args, of, about, num_inner, start_at, seed, bounds)
    generator = new_generator(seed, stream="best design")
    start = information(model, designs.start, *args, of=of, about=about, num_outer=10 * num_outer, seed=seed)

    def gradient(now: Tensor) -> Tensor:
        found = designs.gradient(now, num_outer, generator, checked=False).gradient
        if not found.isfinite().all():
            raise SettingsError(f"the gradient is not finite at the design {now.tolist()}; keep designs within bounds")
        return found

    path = list(adam_path(gradient, designs.start, num_steps, learning_rate, final_share=0.05, inside=designs.inside))
    best = torch.stack(path[num_steps // 2 :]).mean(0)
    end = information(model, best, *args, of=of, about=about, num_outer=10 * num_outer, seed=seed)
    last = designs.gradient(best, 10 * num_outer, generator, checked=True)
    problems = [*end.warnings, *last.warnings]
    moved = path[-1] - path[num_steps // 2]
    rise, error = float((last.gradient * moved).sum()), float((last.standard_error * moved).square().sum().sqrt())
    if rise > max(_LARGE_GAP, _STANDARD_ERRORS * error):
        problems.append(
            f"the information was still rising, by about {rise:.2g} nats in the last half of the steps: raise "
            "num_steps or learning_rate, or start from this design"
        )
    if end.value - start.value < -_STANDARD_ERRORS * math.hypot(start.standard_error, end.standard_error):
        problems.append("the information fell from the start to the end: lower learning_rate, or raise num_outer")
    return BestDesign(best, end, start, torch.stack(path), tuple(problems))


def _bounds(within: Any, design: Tensor) -> tuple[Tensor, Tensor]:
    try:
        low, high = (as_numbers("within", end).to(design) for end in within)
        increasing = bool((low < high).all()) and torch.broadcast_shapes(low.shape, design.shape) == design.shape
        increasing &= torch.broadcast_shapes(high.shape, design.shape) == design.shape
    except (DataError, RuntimeError, TypeError, ValueError):
        increasing = False
    if not increasing:
        raise SettingsError(f"within must be a least and a larger largest design, not {within}")
    return low, high
