"""Particles: runs of guide and model, and the log importance weight of each observation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pyro
import torch
from pyro import poutine
from pyro.distributions import Categorical, Delta, TorchDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.messenger import Messenger
from pyro.poutine.runtime import _ENUM_ALLOCATOR
from pyro.poutine.util import prune_subsample_sites, site_is_subsample
from torch import Tensor
from torch.distributions import (
    Bernoulli,
    MixtureSameFamily,
    Normal,
    OneHotCategorical,
    constraints,
    kl_divergence,
)
from torch.nn.functional import softplus

from bayeskit._core.process_state import process_state
from bayeskit._logdensity.enumeration import EnumeratedDimensions, Factor, align, pack, sum_product
from bayeskit._logdensity.pyro_distributions import MendedDraws
from bayeskit._logdensity.pyro_runs import check_plates
from bayeskit._logdensity.transforms import support_of
from bayeskit.errors import DataError, GuideError, ModelError, SettingsError, ShapeError
from bayeskit.inference.gradients import VIMCO, GradientEstimator, ScoreFunction
from bayeskit.inference.gradients._space import space_of, unwrapped

# Log density of a site of a trace, and checks that guide and model match.

Site = dict[str, Any]

#: Marks sites whose values may be relaxed, outside their discrete support.
_RELAXED = "_relaxed"
#: Marks sites whose values carry a gradient although their distribution has no rsample.
PATH = "_path"


def site_log_density(fn: Any, value: Tensor) -> Tensor:
    """Return ``fn.log_prob(value)``; Bernoulli events need half the memory traffic of torch's."""
    base, events = unwrapped(fn)
    if isinstance(base, Bernoulli) and events and "logits" in base.__dict__ and not value.requires_grad:
        if torch.broadcast_shapes(base.logits.shape, value.shape) == base.logits.shape:
            if fn._validate_args or base._validate_args:
                fn._validate_sample(value)
            dims = tuple(range(-events, 0))
            return _BernoulliLogDensity.apply(base.logits, value.to(base.logits.dtype), dims)
    return fn.log_prob(value)


def relaxed_log_density(name: str, fn: Any, value: Tensor) -> Tensor:
    """Return the log density of relaxed bits or one-hot vectors by linear extension; GuideError for other types."""
    base, events = unwrapped(fn)
    if isinstance(base, Bernoulli):
        terms = value * base.logits - softplus(base.logits)
    elif isinstance(base, OneHotCategorical):
        terms = (value * base.logits.log_softmax(-1)).sum(-1)
    else:
        raise GuideError(
            f"site {name!r}: the guide draws relaxed points, at which {type(base).__name__} has no density; use "
            "Bernoulli or OneHotCategorical in guide and model, or an estimator that is not relaxed, such as "
            "UnorderedSet"
        )
    return terms.sum(tuple(range(-events, 0))) if events else terms


class _BernoulliLogDensity(torch.autograd.Function):
    """``sum(value * logits - softplus(logits))`` with gradient ``value - sigmoid(logits)``, each in one buffer."""

    @staticmethod
    def forward(context: Any, logits: Tensor, value: Tensor, dims: tuple[int, ...]) -> Tensor:  # type: ignore[override]
        context.save_for_backward(logits, value)
        context.events = len(dims)
        terms = softplus(logits).neg_()
        return terms.addcmul_(value, logits).sum(dims)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, value = context.saved_tensors
        weight = gradient[(...,) + (None,) * context.events]
        if torch.is_grad_enabled():  # second derivatives
            return (value - logits.sigmoid()) * weight, None, None
        return logits.sigmoid().neg_().add_(value).mul_(weight), None, None


class Compatibility:
    """Check that guide and model match; each combination of sites is checked once."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def __call__(self, model: Mapping[str, Site], guide: Mapping[str, Site]) -> None:
        """Raise GuideError unless the guide has all latent sites of the model and no others."""
        if self._is_new(tuple((n, s["is_observed"]) for sites in (model, guide) for n, s in sites.items())):
            _check_names(model, guide)

    def site(self, name: str, prior: Any, posterior: Any, value: Tensor | None) -> None:
        """Raise GuideError if a guide draw is outside the model's support; ``value`` is None for relaxed points."""
        shapes = prior.event_shape, posterior.event_shape
        if self._is_new((name, type(unwrapped(prior)[0]), type(unwrapped(posterior)[0]), *shapes)):
            _check_support(name, prior, posterior, value)

    def _is_new(self, key: Any) -> bool:
        new = key not in self._seen
        self._seen.add(key)
        return new


def _check_names(model: Mapping[str, Site], guide: Mapping[str, Site]) -> None:
    latent = {name: site for name, site in model.items() if not site["is_observed"]}
    enumerated = {name for name, site in latent.items() if site["infer"].get("enumerate") == "parallel"}
    if missing := sorted(set(latent) - set(guide) - enumerated):
        raise GuideError(
            f"the guide has no site for the latent {_names(missing)} of the model; add pyro.sample for it, observe "
            'it, or, if it is discrete, mark it infer={"enumerate": "parallel"} so that it is summed out'
        )
    for name, site in guide.items():
        if site["is_observed"] or site["infer"].get("is_auxiliary"):
            continue
        if name in model and model[name]["is_observed"]:
            raise GuideError(f"the guide samples {name!r}, which the model observes; take it out of the guide")
        if name not in latent:
            raise GuideError(
                f"the guide has a site {name!r} that the model lacks; rename it, or mark it "
                'infer={"is_auxiliary": True} and give an auxiliary bound'
            )


def _names(names: list[str]) -> str:
    return ("site " if len(names) == 1 else "sites ") + ", ".join(repr(name) for name in names)


def _check_support(name: str, prior: Any, posterior: Any, value: Tensor | None) -> None:
    wanted, given = _reach(prior), _reach(posterior)
    drawn = _component(posterior)
    # torch's support of a transformed distribution is approximate; check the values instead.
    vague = type(drawn).__name__ in ("TransformedDistribution", "Delta")
    if wanted.is_discrete != given.is_discrete or not vague and not _contains(wanted, given):
        raise GuideError(
            f"site {name!r}: the guide's {type(unwrapped(posterior)[0]).__name__} has support {given}, the model's "
            f"{type(unwrapped(prior)[0]).__name__} {wanted}; choose a distribution in the guide with support inside "
            "the model's, for example a TransformedDistribution"
        )
    shapes = prior.event_shape, posterior.event_shape
    if shapes[0] != shapes[1]:
        raise GuideError(
            f"site {name!r}: a draw of the guide has shape {tuple(shapes[1])}, a draw of the model "
            f"{tuple(shapes[0])}; use the same .to_event in both"
        )
    if value is not None and not bool(value.isnan().any()) and not bool(wanted.check(value).all()):
        raise GuideError(f"site {name!r}: the guide drew a value outside the support {wanted} of the model")


def _component(fn: Any) -> Any:
    """Return a distribution without wrappers; for a mixture, its component distribution."""
    fn = unwrapped(fn)[0]
    while isinstance(fn, MixtureSameFamily):
        fn = unwrapped(fn.component_distribution)[0]
    return fn


def _reach(fn: Any) -> Any:
    """Return torch's support of a single element; for a mixture, a support that contains all components."""
    mixed = isinstance(unwrapped(fn)[0], MixtureSameFamily)
    try:
        support = support_of(fn) if mixed else fn.support
    except NotImplementedError:
        support = _component(fn).support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _contains(wanted: Any, given: Any) -> bool:
    """Return False if a guide's support ``given`` is known from its type to exceed the model's, ``wanted``."""
    if wanted is constraints.real or wanted is constraints.real_vector:
        return not given.is_discrete
    if wanted.is_discrete:
        return True  # checked by value
    lower, upper = _bounds(wanted)
    least, most = _bounds(given)
    if lower is None and upper is None:
        return True  # structured support: checked by value
    below = lower is None or (least is not None and bool((torch.as_tensor(least) >= torch.as_tensor(lower)).all()))
    above = upper is None or (most is not None and bool((torch.as_tensor(most) <= torch.as_tensor(upper)).all()))
    return below and above


def _bounds(support: Any) -> tuple[Any, Any]:
    return getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)


def require_reparameterized(guide: Mapping[str, Site], objective: str, otherwise: str) -> None:
    """Raise GuideError, suggesting ``otherwise``, for guide sites that are not reparameterized."""
    for name, site in guide.items():
        if not site["is_observed"] and not site["fn"].has_rsample:
            raise GuideError(
                f"site {name!r}: draws of the guide's {type(site['fn']).__name__} are not reparameterised, which "
                f"{objective} needs; choose a distribution with rsample, or {otherwise}"
            )


# Dimensions of particles and observations in a trace.

PARTICLES = "_particles"


class Plate(NamedTuple):
    """A plate over observations: negative dimension, minibatch size and full size."""

    dim: int
    size: int
    full_size: int


@dataclass(frozen=True)
class Layout:
    """Dimensions of particles and observations in a trace."""

    num_particles: int
    nesting: int  # number of plate dimensions; the particle dimension is to their left
    plates: Mapping[str, Plate]  # by name, the plates over observations: those that contain every site

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the plates over observations, leftmost plate first."""
        return tuple(p.size for p in sorted(self.plates.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """``(particles, *batch)``."""
        return (self.num_particles, *self.batch_shape)

    @property
    def scale(self) -> float:
        """Ratio of full data size to minibatch size."""
        return math.prod(p.full_size / p.size for p in self.plates.values())

    def reduce(self, term: Tensor) -> Tensor:
        """Sum a term with plate dimensions over the inner plates: ``(particles, *batch)``."""
        dims = sorted(p.dim for p in self.plates.values())
        shape = (1,) * (self.nesting + 1 - term.dim()) + tuple(term.shape)
        inner = [d for d in range(-self.nesting, 0) if d not in dims]
        term = term.reshape(shape)
        if inner:
            term = term.sum(inner)
        return term.expand(self.shape)

    def spread(self, events: int) -> tuple[int, ...]:
        """Return the shape that makes a ``(particles, *batch)`` tensor broadcast to a site's value."""
        sizes = {p.dim: p.size for p in self.plates.values()}
        plates = tuple(sizes.get(d, 1) for d in range(-self.nesting, 0))
        return (self.num_particles, *plates, *(1,) * events)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the plates kept in results: particles, if more than one, and observations."""
        data = sorted(self.plates, key=lambda name: self.plates[name])
        return (PARTICLES, *data) if self.num_particles > 1 else tuple(data)

    def shaped(self, term: Tensor) -> Tensor:
        """Expand a term with the dimensions of :attr:`labels` to ``(particles, *batch)``."""
        if self.num_particles == 1:
            term = term.unsqueeze(0)
        return term.expand(self.shape)


def reduced(site: Site, term: Tensor, layout: Layout) -> Tensor:
    """Apply a site's mask and scale to a term and sum it to ``(K, *batch)``."""
    term, scale = masked(site, term), site["scale"]
    if not isinstance(scale, Tensor):
        scale = scale / layout.scale
        return layout.reduce(term if scale == 1 else term * scale)
    return layout.reduce(term * (scale / layout.scale))


def masked(site: Site, term: Tensor) -> Tensor:
    """Apply a site's mask to a term."""
    mask = site["mask"]
    if mask is None or mask is True:
        return term
    return torch.zeros_like(term) if mask is False else torch.where(mask, term, term.new_zeros(()))


# Guide sites drawn as weighted points by gradient estimators.

GRADIENT = "gradient"
_WEIGHTS = "_weights"
_OFFSET = "_offset"
#: Maximum number of joint points of all sites.
_MAX_POINTS = 1 << 16


class _Drawn(TorchDistribution):  # type: ignore[misc]
    """A distribution with its support restricted to the points drawn by an estimator."""

    def __init__(self, fn: Any, values: Tensor) -> None:
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)
        self.fn, self.values = fn, values

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return the points."""
        return self.values


class _Weighting(Messenger):
    """Messenger that enumerates the estimator's points at sites marked ``infer={"gradient": estimator}``."""

    # It is the innermost messenger after enumeration, which assigns a separate dimension to the points of each site, so
    # the numbers of points of several sites multiply. Log densities are extended linearly to relaxed points. A single
    # relaxed point with a constant weight carries the whole gradient and is treated as an ordinary draw.

    def __init__(self) -> None:
        super().__init__()
        self._num_points = 1

    def _pyro_sample(self, message: Any) -> None:
        estimator = message["infer"].get(GRADIENT)
        if estimator is None or message["is_observed"] or message["done"]:
            return
        name, fn = message["name"], message["fn"]
        if not isinstance(estimator, GradientEstimator):
            raise GuideError(
                f"site {name!r}: infer['gradient'] is {estimator!r:.60}, not a gradient estimator; use for example "
                "gradients.UnorderedSet(k=4)"
            )
        if "_markov_scope" in message["infer"]:
            raise GuideError(
                f"site {name!r}: gradient estimators do not support pyro.markov; remove it, or write the chain as one "
                "site"
            )
        if not isinstance(fn, TorchDistributionMixin) or not fn.support.is_discrete:
            raise GuideError(
                f"site {name!r} is a {type(fn).__name__}, which has no discrete support for the gradient estimator; "
                "remove infer['gradient']"
            )
        _check_estimator(name, estimator)
        if estimator.relaxed and isinstance(unwrapped(fn)[0], Categorical):
            raise GuideError(
                f"site {name!r} is a Categorical, whose values are whole numbers, but {type(estimator).__name__} draws "
                "relaxed points; use OneHotCategorical in guide and model"
            )
        try:
            values, weights, offset = estimator.points(space_of(fn))
        except (SettingsError, DataError, ShapeError) as error:
            raise type(error)(f"site {name!r}: {error}") from error
        if len(weights) == 1 and estimator.relaxed and not weights.requires_grad:
            message["value"], message["done"] = values[0], True
            message["infer"] = {**message["infer"], _RELAXED: True, PATH: True}
            return
        if len(weights) == 1:
            # A dimension of size one would hide which terms depend on the site: repeat the point with half the weight.
            values, weights = torch.cat([values, values]), torch.cat([weights, weights]) / 2
        self._num_points *= len(weights)
        if self._num_points > _MAX_POINTS:
            raise GuideError(
                f"site {name!r}: its {len(weights)} points bring the number of joint points of all sites to "
                f"{self._num_points}, more than {_MAX_POINTS}; combine sites by a plate or .to_event"
            )
        message["infer"] = {**message["infer"], "enumerate": "parallel", _WEIGHTS: weights, _OFFSET: offset}
        message["infer"][_RELAXED] = estimator.relaxed
        message["fn"] = _Drawn(fn, values)

    def _pyro_post_sample(self, message: Any) -> None:
        fn = message["fn"]
        if isinstance(fn, _Drawn):
            message["fn"] = fn.fn
            weights, dim = message["infer"][_WEIGHTS], message["infer"]["_enumerate_dim"]
            gap = -dim - weights.dim()
            message["infer"][_WEIGHTS] = weights.reshape(weights.shape[0], *[1] * gap, *weights.shape[1:])


def _check_estimator(name: str, estimator: GradientEstimator) -> None:
    """Raise GuideError for VIMCO and for estimators whose surrogate is more than the weighted sum over points."""
    if isinstance(estimator, VIMCO):
        raise GuideError(
            f"site {name!r}: VIMCO estimates the gradient of the multi-sample bound of the whole model, not of one "
            f"site; remove infer['gradient'] and train with IWAE(num_particles={estimator.num_samples}), which uses "
            "this gradient for sites that are not reparameterised"
        )
    if type(estimator).surrogate is not GradientEstimator.surrogate and not isinstance(estimator, ScoreFunction):
        raise GuideError(
            f"site {name!r}: {type(estimator).__name__} overrides surrogate, which is not used for sites of a guide; "
            "put its extra terms into the weights or the offset of its points"
        )


def _baseline_terms(
    sites: Mapping[str, Site],
    log_model: Mapping[str, Tensor],
    log_guide: Mapping[str, Tensor],
    kl: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the baseline terms of the bound by site; their values and expected gradients are zero."""
    # Each has the shape of its site's log density without the dimension of the points. Recomputation in the backward
    # pass raises GuideError, because it would update a baseline twice.
    found: dict[str, Tensor] = {}
    with_baseline: dict[str, tuple[ScoreFunction, Tensor]] = {}
    for name, site in sites.items():
        estimator, weights = site["infer"].get(GRADIENT), weight(site)
        if weights is not None and isinstance(estimator, ScoreFunction) and estimator.baseline is not None:
            with_baseline[name] = estimator, weights
    if not with_baseline or not torch.is_grad_enabled():
        return found
    plus = [term.sum() for name, term in log_model.items() if name not in kl]
    minus = [term.sum() for name, term in log_guide.items() if name not in kl] + [term.sum() for term in kl.values()]
    bound = torch.stack(plus).sum() - torch.stack(minus).sum()
    for name, (estimator, weights) in with_baseline.items():
        if weights.requires_grad:
            _check_once(name)
            # The bound is linear in the weights of each site, so this derivative is the value of each point.
            (worth,) = torch.autograd.grad(bound, weights, retain_graph=True, allow_unused=True)
            if worth is not None:
                found[name] = torch.as_tensor(estimator.correction(weights, worth))
    return found


def offset(site: Site) -> Tensor | None:
    """Return the control variate of a site, with expectation zero and the shape of its draws; None without one."""
    found = site["infer"].get(_OFFSET)
    return found if isinstance(found, Tensor) else None


def _check_once(name: str) -> None:
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("computed again"):
            return
    except RuntimeError:
        raise GuideError(
            f"site {name!r}: its baseline is updated at each draw, and would be updated twice for particles that are "
            "recomputed in the backward pass; omit chunk_size, or use LeaveOneOut, whose baseline is computed from its "
            "own draws"
        ) from None


def weight(site: Any) -> Tensor | None:
    """Return the weights of a site's points, in the shape of its log density; None under full enumeration."""
    found = site["infer"].get(_WEIGHTS)
    return found if isinstance(found, torch.Tensor) else None


# Terms of a site of a trace: log density, score and closed-form divergence.


def _term_of(site: Site, layout: Layout) -> Tensor:
    """Return the log density of a site, ``(K, *batch)``, without the scale of the plates over observations."""
    return reduced(site, _density_of(site), layout)


def _density_of(site: Site) -> Tensor:
    """Return the log density of a site at its value; store a copy in the site for error messages."""
    if site["infer"].get(_RELAXED):
        term = relaxed_log_density(site["name"], site["fn"], site["value"])
    else:
        term = site_log_density(site["fn"], site["value"])
    site["term"] = masked(site, term.detach())  # masked elements cause no error
    return term


def _is_path(site: Site) -> bool:
    """Return True if the draw carries a gradient."""
    return bool(site["fn"].has_rsample) or PATH in site["infer"]


def draw_log_density(site: Site) -> Tensor:
    """Return the log density of a draw without scale and mask."""
    # A mask may exclude padding with a non-finite density, which is set to zero.
    term = site_log_density(site["fn"], site["value"])
    return torch.where(masked(site, torch.ones_like(term)) > 0, term, torch.where(term.isfinite(), term, 0.0))


def _weight_of_point(site: Site) -> Tensor:
    """Return the weight of each point of an enumerated guide site."""
    drawn = weight(site)
    return _density_of(site).exp() if drawn is None else drawn


def _closed_forms(model: Mapping[str, Site], guide: Mapping[str, Site]) -> list[tuple[str, Tensor]]:
    """Return the closed-form divergences of guide from model, by site."""
    # Given the earlier draws, a site's divergence may replace the difference of its log densities if the model does
    # not condition the site on later draws of the guide.
    found, order = [], {name: i for i, name in enumerate(guide)}
    latent = [name for name, site in model.items() if not site["is_observed"]]
    for position, name in enumerate(latent):
        if name not in guide or any(order.get(before, len(order)) > order[name] for before in latent[:position]):
            continue
        prior, posterior = model[name], guide[name]
        same_mask = prior["mask"] is posterior["mask"]
        if not same_mask or isinstance(prior["scale"], Tensor) or prior["scale"] != posterior["scale"]:
            continue
        if {"_enumerate_dim", _RELAXED} & posterior["infer"].keys() or isinstance(unwrapped(posterior["fn"])[0], Delta):
            continue  # Pyro's closed form of a Delta omits its log_density, the Jacobian of automatic guides
        if _is_masked(prior["fn"]) or _is_masked(posterior["fn"]):
            continue  # torch's closed form applies only one of the two masks
        with suppress(NotImplementedError):
            found.append((name, kl_divergence(*_alike(posterior["fn"], prior["fn"]))))
    return found


def _is_masked(fn: Any) -> bool:
    while fn is not None:
        if getattr(fn, "_mask", None) is not None:
            return True
        fn = vars(fn).get("base_dist")
    return False


def _alike(posterior: Any, prior: Any) -> tuple[Any, Any]:
    """Expand both to one batch shape, because some of torch's closed forms index across the two."""
    if posterior.batch_shape == prior.batch_shape or isinstance(unwrapped(prior)[0], Normal):
        return posterior, prior
    shape = torch.broadcast_shapes(posterior.batch_shape, prior.batch_shape)
    return posterior.expand(shape), prior.expand(shape)


# Enumerated sites: log-sum-exp over model sites, expectation over guide sites.


@dataclass(frozen=True)
class Enumerated:
    """The enumerated sites of one run."""

    variables: dict[int, str]  # site names by Pyro's enumeration id
    dims: dict[int, int]  # Pyro's enumeration id by dimension; sites in a Markov chain have their own mapping
    in_guide: bool  # True for sites of the guide

    @classmethod
    def of(cls, model: Mapping[str, Site], guide: Mapping[str, Site]) -> Enumerated | None:
        """Return the enumerated sites, if any; GuideError for a mix of guide sites and model-only sites."""
        found: dict[bool, dict[int, str]] = {True: {}, False: {}}
        for name, site in {**model, **guide}.items():
            dim = site["infer"].get("_enumerate_dim")
            if dim is not None and not site["is_observed"]:
                found[name in guide][site["infer"]["_dim_to_id"][dim]] = name
        if found[True] and found[False]:
            ours, theirs = next(iter(found[True].values())), next(iter(found[False].values()))
            raise GuideError(
                f"site {ours!r} is enumerated in the guide and {theirs!r} in the model alone; either give both to the "
                "guide or neither"
            )
        in_guide = bool(found[True])
        variables = found[in_guide]
        return cls(variables, dict(_ENUM_ALLOCATOR.dim_to_id), in_guide) if variables else None

    def factor(self, site: Site, term: Tensor, layout: Layout, *, bare: bool = False) -> Factor:
        """Label the dimensions of a site's term, masked and without the scale of the plates over observations."""
        scale = 1.0 if bare else site["scale"] / layout.scale
        if isinstance(scale, Tensor) or abs(scale - 1) > 1e-12:
            if term.dim() > layout.nesting + 1 and not self.in_guide:
                raise GuideError(
                    f"site {site['name']!r} depends on enumerated sites and is scaled or subsampled; with enumeration, "
                    "subsample only plates that contain all sites"
                )
            term = term * scale
        plates = {f.dim: (f.name, f.size) for f in site["cond_indep_stack"] if f.vectorized}
        dims = {**self.dims, **site["infer"].get("_dim_to_id", {})}
        # The mask of a site summed out of the model marks padding, whose prior sums to one.
        summed_out = not self.in_guide and "_enumerate_dim" in site["infer"] and not site["is_observed"]
        term = term if bare or summed_out else masked(site, term)
        return pack(site["name"], term, plates, dims, -layout.nesting - 2)

    def home(self, sites: Mapping[str, Site]) -> dict[int, frozenset[str]]:
        """Return the plates of each variable."""
        return {
            number: frozenset(f.name for f in sites[name]["cond_indep_stack"] if f.vectorized)
            for number, name in self.variables.items()
        }

    def summed(self, factors: dict[str, Factor], sites: Mapping[str, Site], layout: Layout) -> Tensor:
        """Return the log sum of the product of ``factors`` over the enumerated sites, ``(K, *batch)``."""
        keep = layout.labels
        total = sum_product(list(factors.values()), self.home(sites), self.variables, keep)
        return layout.shaped(total)

    def expected(self, cost: Factor, own: Mapping[int, Factor], layout: Layout) -> Tensor:
        """Return the expectation of a term over the enumerated guide sites, ``(K, *batch)``."""
        # own: weight of each point of the enumerated guide sites, such as its probability, by enumeration id.
        needed: set[int] = set()
        reached = set(cost.variables)
        while reached - needed:
            number = (reached - needed).pop()
            needed.add(number)
            reached |= own[number].variables
        for number in needed:
            if not own[number].plates <= cost.plates:
                raise GuideError(
                    f"the enumerated site {self.variables[number]!r} is in a plate, but a site that depends on it is "
                    "not; draw it instead, or move that site into the plate"
                )
        labels = tuple(dict.fromkeys((*cost.labels, *(x for n in needed for x in own[n].labels))))
        value = align(cost, labels)
        if needed:
            weight = math.prod((align(own[n], labels) for n in needed), start=torch.ones(()))
            # Mask before the product; otherwise the derivative for a zero weight is infinite and later NaN.
            value = weight * torch.where((weight != 0) | value.isfinite(), value, value.new_zeros(()))
        return self.added_up(Factor(value, labels, cost.plates), layout)

    def added_up(self, term: Factor, layout: Layout) -> Tensor:
        """Sum a term over all dimensions except particles and observations: ``(K, *batch)``."""
        kept = layout.labels
        drop = [i for i, label in enumerate(term.labels) if label not in kept]
        value = term.tensor.sum(drop) if drop else term.tensor
        left = tuple(label for label in term.labels if label in kept)
        return layout.shaped(align(Factor(value, left, frozenset(kept)), kept))


# Replays of a model or guide with given subsample indices and values.


class _Rows(NamedTuple):
    rows: Tensor
    num_data: int


_ROWS: ContextVar[_Rows | None] = ContextVar("rows of the minibatch", default=None)


@contextmanager
def rows_of_minibatch(rows: Tensor | None, num_data: int) -> Iterator[None]:
    """Set the minibatch's row indices ``(batch,)`` into the ``num_data`` observations; None if unknown."""
    # Training loops know these rows; a model with a plate of the minibatch's size does not.
    token = _ROWS.set(None if rows is None else _Rows(rows, num_data))
    try:
        yield
    finally:
        _ROWS.reset(token)


class SubsampleIndices(Messenger):
    """Messenger that records the subsample indices of every plate by name."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Tensor] = {}  # indices
        # Row indices into the full data: as values, but from rows_of_minibatch for a plate over a whole minibatch.
        self.items: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}  # full sizes

    def _pyro_post_sample(self, message: Any) -> None:
        if not site_is_subsample(message):
            return
        name, value, size = message["name"], message["value"], int(message["fn"].size)
        self.values[name], known = value, _ROWS.get()
        whole = known is not None and len(value) == size == len(known.rows)
        self.items[name], self.sizes[name] = (known.rows, known.num_data) if known and whole else (value, size)


class _Supply(Messenger):
    """Fix the subsample indices of plates and set latent sites to the values returned by ``value_of``."""

    def __init__(self, indices: Mapping[str, Tensor], value_of: Callable[[str, Any], Tensor | None]) -> None:
        super().__init__()
        self._indices, self._value_of = indices, value_of

    def _pyro_sample(self, message: Any) -> None:
        name = message["name"]
        if site_is_subsample(message):
            if message["value"] is None and name in self._indices:
                message["value"] = self._indices[name]
        elif not message["is_observed"]:
            value = self._value_of(name, message["fn"])
            if value is not None:
                message["value"], message["done"] = value, True


def supplied_sites(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    layout: Layout,
    indices: Mapping[str, Tensor],
    value_of: Callable[[str, Any], Tensor | None],
) -> dict[str, Site]:
    """Run a model or guide with given subsample ``indices`` and values; return its sites except subsampling."""
    # ``value_of(name, distribution)`` returns the value of a latent site, or None to draw it.
    function = _Supply(indices, value_of)(function)
    if layout.num_particles > 1:
        function = pyro.plate(PARTICLES, layout.num_particles, dim=-layout.nesting - 1)(function)
    with poutine.block(expose_types=["param"]), MendedDraws():  # expose new parameters to the optimizer
        trace = poutine.trace(function).get_trace(*args, **kwargs)
    nodes: Mapping[str, Any] = prune_subsample_sites(trace).nodes
    return {name: site for name, site in nodes.items() if site["type"] == "sample"}


# Particles: log importance weights of guide draws per observation.
# Every multi-sample objective is a pure function of these.


@dataclass
class Particles:
    """Log density terms from one run of guide and model, for ``K`` particles per observation."""

    log_likelihood: Tensor  # (K, *batch), sum over observed sites and factors
    log_prior: dict[str, Tensor]  # (K, *batch), by latent site; for sites in kl only if a score needs it
    log_guide: dict[str, Tensor]  # (K, *batch), as log_prior
    log_score: Tensor | None  # (K, *batch), log guide density of the draws without a gradient
    kl: dict[str, Tensor]  # (K, *batch), closed-form divergences of guide from model, if requested, by latent site
    scale: float  # ratio of full data size to minibatch size
    layout: Layout
    model_sites: dict[str, Site] = field(repr=False)
    guide_sites: dict[str, Site] = field(repr=False)
    # Name of an enumerated guide site, if any. Terms are then expectations over enumerated sites: they can be summed
    # but give no importance weights.
    in_expectation: str | None = None
    finite: dict[str, Tensor] = field(default_factory=dict, repr=False)  # by site, if the sites are not kept
    in_sum: str | None = None  # name of a latent site whose prior is part of the sum over enumerated model sites

    @property
    def log_model(self) -> Tensor:
        """Log joint density, ``(K, *batch)``."""
        return sum(self.log_prior.values(), self.log_likelihood)

    @property
    def log_guide_total(self) -> Tensor:
        """Log density of the guide, ``(K, *batch)``."""
        return sum(self.log_guide.values(), torch.zeros_like(self.log_likelihood))

    @property
    def log_weight(self) -> Tensor:
        """Log joint density minus log guide density, ``(K, *batch)``; GuideError for enumerated guide sites."""
        if self.kl:
            raise RuntimeError("log weights need particles drawn without analytic_kl")
        if self.in_expectation is not None:
            raise GuideError(
                f"site {self.in_expectation!r} is enumerated in the guide, or drawn as weighted points, but this "
                "objective needs importance weights of draws; take the mark out of the guide (infer['enumerate'] or "
                "infer['gradient']), or use ELBO"
            )
        return self.log_model - self.log_guide_total

    def require_divergences(self, objective: str) -> None:
        """Raise GuideError for a guide site without a separate divergence: its prior depends on a summed-out site."""
        if self.in_sum is not None:
            raise GuideError(
                f"{objective} weights the divergence of each latent site, but the prior of {self.in_sum!r} depends on "
                "a site that is summed out of the model and has no separate term; enumerate that site in the guide, or "
                "use ELBO without weights, or IWAE"
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all tensors that can carry a gradient, in a fixed order."""
        score = () if self.log_score is None else (self.log_score,)
        return (self.log_likelihood, *score, *self.log_prior.values(), *self.log_guide.values(), *self.kl.values())

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> Particles:
        """Return the same particles with :meth:`tensors` replaced."""
        rest = iter(tensors)

        def next_of(terms: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: next(rest) for name in terms}

        likelihood = next(rest)
        score = None if self.log_score is None else next(rest)
        prior, guide, kl = next_of(self.log_prior), next_of(self.log_guide), next_of(self.kl)
        return replace(self, log_likelihood=likelihood, log_score=score, log_prior=prior, log_guide=guide, kl=kl)

    def without_sites(self) -> Particles:
        """Return the same particles without the autograd graph and the sites."""
        bare = self.with_tensors(tuple(t.detach() for t in self.tensors()))
        return replace(bare, model_sites={}, guide_sites={}, finite=self.finite_by_site())

    def finite_by_site(self) -> dict[str, Tensor]:
        """Return scalar tensors by site, True if the site's term is finite; does not synchronize with the device."""
        found = dict(self.finite)
        for name, site in (*self.guide_sites.items(), *self.model_sites.items()):
            term = site.get("term", self.kl.get(name))
            if term is not None:
                good = term.detach().isfinite().all()
                found[name] = found[name] & good if name in found else good
        return found

    def culprit(self) -> str | None:
        """Return the name of the first site with a non-finite log density, or None."""
        for name, site in (*self.guide_sites.items(), *self.model_sites.items()):
            term = site["term"] if "term" in site else site["fn"].log_prob(site["value"])
            if not bool(term.isfinite().all()):
                return name
        return next((name for name, good in self.finite.items() if not bool(good)), None)


def _all_finite(runs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: torch.stack([run[name] for run in runs if name in run]).all() for name in names}


def stacked(runs: list[Particles]) -> Particles:
    """Concatenate runs of one model and guide along the particles."""
    first = runs[0]
    count = sum(r.layout.num_particles for r in runs)

    def join(name: str) -> dict[str, Tensor]:
        return {site: torch.cat([getattr(r, name)[site] for r in runs]) for site in getattr(first, name)}

    scores = [r.log_score for r in runs if r.log_score is not None]
    return Particles(
        torch.cat([r.log_likelihood for r in runs]),
        join("log_prior"),
        join("log_guide"),
        torch.cat(scores) if scores else None,
        join("kl"),
        first.scale,
        replace(first.layout, num_particles=count),
        first.model_sites,
        first.guide_sites,
        first.in_expectation,
        _all_finite([run.finite_by_site() for run in runs]),
        first.in_sum,
    )


# Factors of the guide's gradient, so that one forward pass serves two objectives.


class Gate:
    """A factor that multiplies gradients of the guide's parameters and not of the model's."""

    # The factor is set after the forward pass and before the backward pass, so it may depend on all results of the
    # forward pass.

    def __init__(self) -> None:
        self._factor: Tensor | None = None
        self.parts: list[tuple[Gate, int]] = []

    @property
    def factor(self) -> Tensor | None:
        """The factor, ``(K, *batch)``; setting it also sets the factors of the ``parts``, one gate per chunk."""
        return self._factor

    @factor.setter
    def factor(self, value: Tensor) -> None:
        self._factor = value
        start = 0
        for part, size in self.parts:
            part.factor = value[start : start + size]
            start += size

    def __call__(self, value: Tensor, shape: Callable[[], tuple[int, ...]] | None = None) -> Tensor:
        """Return ``value``; the backward pass multiplies its gradient by the factor, reshaped to ``shape()``."""
        return _Gated.apply(value, self, shape)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, value: Tensor, gate: Gate, shape: Callable[[], tuple[int, ...]] | None) -> Tensor:  # type: ignore[override]
        context.gate, context.shape = gate, shape
        return value.view_as(value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        factor = context.gate.factor
        if factor is None:
            raise RuntimeError("the factor of a gate must be set before the backward pass")
        return gradient * (factor if context.shape is None else factor.reshape(context.shape())), None, None


# Drawing particles: one run of the guide, and one run of the model on the draws.

_SUMMED_OUT = "_summed_out"
_BASELINES = "_baselines"


class _WithinNesting(Messenger):
    """Raise SettingsError for plates that overlap the particle dimension, before shapes clash."""

    def __init__(self, nesting: int) -> None:
        super().__init__()
        self._nesting = nesting

    def _pyro_sample(self, message: Any) -> None:
        for frame in message["cond_indep_stack"]:
            if frame.vectorized and -frame.dim > self._nesting:
                raise SettingsError(
                    f"plate {frame.name!r} uses dimension {frame.dim}, beyond the max_plate_nesting of "
                    f"{self._nesting}, which was given or found in the first run of this objective; use a new "
                    "objective for another model, or set max_plate_nesting"
                )


class _Values(Messenger):
    """Set the model's latent sites to the guide's draws."""

    def __init__(
        self, sites: Mapping[str, Site], values: Mapping[str, Tensor], compatibility: Compatibility | None = None
    ) -> None:
        super().__init__()
        self._sites, self._values, self._compatibility = sites, values, compatibility

    def _pyro_sample(self, message: Any) -> None:
        name = message["name"]
        if name in self._values and not message["is_observed"]:
            # Subsampling sites of plates have no support to compare.
            if self._compatibility is not None and isinstance(message["fn"], TorchDistributionMixin):
                site = self._sites[name]
                value = None if site["infer"].get(_RELAXED) else self._values[name]
                self._compatibility.site(name, message["fn"], site["fn"], value)
            message["value"], message["done"] = self._values[name], True
            message["infer"] = self._sites[name]["infer"]


class _Detached(Messenger):
    """Detach draws, also for later guide sites that depend on them."""

    def _pyro_post_sample(self, message: Any) -> None:
        if not message["is_observed"] and isinstance(message["value"], Tensor):
            message["value"] = message["value"].detach()


def plate_nesting(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: Any,
    kwargs: Any,
    compatibility: Compatibility | None = None,
) -> int:
    """Return the number of plate dimensions of model and guide by running both once."""
    with process_state(), poutine.block(), torch.random.fork_rng(devices=[]), torch.no_grad(), MendedDraws():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        sites: Mapping[str, Any] = guide_trace.nodes
        drawn = {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}
        replayed = _Values(sites, drawn, compatibility)(model)
        model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
    for trace in (guide_trace, model_trace):
        for site in _samples(trace).values():
            check_plates(site)
    frames = [
        frame
        for trace in (guide_trace, model_trace)
        for site in trace.nodes.values()
        if site["type"] == "sample"
        for frame in site["cond_indep_stack"]
    ]
    _check_plate_names(frames, [])
    return max((-frame.dim for frame in frames if frame.dim is not None), default=0)


def _check_plate_names(frames: Iterable[Any], own: Iterable[int]) -> None:
    """Raise ModelError for a plate with the reserved particle name outside the dimensions ``own``."""
    if any(frame.name == PARTICLES and frame.dim not in own for frame in frames):
        raise ModelError(f"the name of plate {PARTICLES!r} is taken by the plate of the particles; rename the plate")


def run_particles(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_particles: int,  # all in one run, in a plate to the left of the model's plates
    nesting: int,  # plate dimensions of model and guide
    detached: bool = False,  # detach the guide's draws, so only scores have gradients
    path_only: bool = False,  # pass gradients to the guide's parameters only through its draws
    analytic_kl: bool = False,  # use closed-form divergences if available
    gate: Gate | None = None,  # multiplies all gradients of the guide; its factor is (K, *batch)
    data_plate: str | None = None,  # name of the plate over observations
    compatibility: Compatibility | None = None,  # checks that guide and model match
) -> Particles:
    """Run the guide, then the model on its draws; GuideError if a site is outside ``data_plate``."""
    run = _Run(num_particles, nesting, args, kwargs, data_plate)
    with _Detached() if detached else nullcontext():  # outermost, so that the trace records detached values
        guide_trace = run.trace(guide, first=True)
    values = {name: site["value"] for name, site in guide_trace.nodes.items() if site["type"] == "sample"}
    guide_sites = _samples(guide_trace)
    layouts: list[Layout] = []  # filled after the model has run, used in the backward pass
    if gate is not None:
        for name, site in guide_sites.items():
            if site["value"].requires_grad:
                values[name] = gate(site["value"], _later(layouts, site["fn"].event_dim))
    model_sites = _samples(run.trace(_Values(guide_trace.nodes, values, compatibility)(model)))
    if compatibility is not None:
        compatibility(model_sites, guide_sites)
    layouts.append(layout := run.layout(guide_sites, model_sites))
    enumerated = Enumerated.of(model_sites, guide_sites)
    if enumerated is not None:
        particles = _summed_out(enumerated, model_sites, guide_sites, layout, analytic_kl)
        if path_only and not enumerated.in_guide:
            _leave_path(particles.log_guide, _scores(run, guide, guide_trace, guide_sites, layout))
        if gate is not None:
            particles.log_guide = {name: gate(term) for name, term in particles.log_guide.items()}
            particles.kl = {name: gate(term) for name, term in particles.kl.items()}
        return particles
    closed = _closed_forms(model_sites, guide_sites) if analytic_kl else []
    kl = {name: reduced(model_sites[name], term, layout) for name, term in closed}
    # A closed form replaces both log densities, unless the guide density is needed as a score.
    spared = {name for name in kl if not detached and guide_sites[name]["fn"].has_rsample}
    log_guide = {
        name: _term_of(site, layout)
        for name, site in guide_sites.items()
        if name not in spared  # includes factors
    }
    scores = [
        layout.reduce(draw_log_density(guide_sites[name]))
        for name in log_guide
        if detached or not _is_path(guide_sites[name])
    ]
    if path_only:
        _leave_path(log_guide, _scores(run, guide, guide_trace, guide_sites, layout))
    if gate is not None:
        log_guide = {name: gate(term) for name, term in log_guide.items()}
        kl = {name: gate(term) for name, term in kl.items()}
    terms = {name: _term_of(site, layout) for name, site in model_sites.items() if name not in spared}
    return _particles(terms, log_guide, scores, kl, layout, model_sites, guide_sites)


def _particles(
    terms: Mapping[str, Tensor],
    log_guide: dict[str, Tensor],
    scores: list[Tensor],
    kl: dict[str, Tensor],
    layout: Layout,
    model_sites: dict[str, Site],
    guide_sites: dict[str, Site],
    in_expectation: str | None = None,
) -> Particles:
    """Collect the terms of all sites."""
    observed = [t for n, t in terms.items() if n not in model_sites or model_sites[n]["is_observed"]]
    log_prior = {n: t for n, t in terms.items() if n in model_sites and not model_sites[n]["is_observed"]}
    any_term = next(iter([*terms.values(), *log_guide.values(), *kl.values()]), None)
    if any_term is None:
        raise ModelError("neither the model nor the guide has a site; check what they are called with")
    in_expectation = in_expectation or next((n for n, s in guide_sites.items() if PATH in s["infer"]), None)
    return Particles(
        sum(observed[1:], observed[0]) if observed else torch.zeros_like(any_term),
        log_prior,
        log_guide,
        sum(scores[1:], scores[0]) if scores else None,
        kl,
        layout.scale,
        layout,
        model_sites,
        guide_sites,
        in_expectation,
    )


def _summed_out(
    enumerated: Enumerated,
    model_sites: dict[str, Site],
    guide_sites: dict[str, Site],
    layout: Layout,
    analytic_kl: bool,
) -> Particles:
    """Collect the terms of a run with enumerated sites."""
    factors = {name: enumerated.factor(site, _density_of(site), layout) for name, site in model_sites.items()}
    own = {name: enumerated.factor(site, _density_of(site), layout) for name, site in guide_sites.items()}
    drawn = [name for name, site in guide_sites.items() if "_enumerate_dim" not in site["infer"]]
    scored = [name for name in drawn if not _is_path(guide_sites[name])]
    for name in scored:
        if own[name].variables:
            raise GuideError(
                f"site {name!r} of the guide is drawn without a gradient and depends on an enumerated site; enumerate "
                "it too, set its infer['gradient'] as well, or remove both marks from all sites"
            )
    if enumerated.in_guide:
        weights = {
            number: enumerated.factor(guide_sites[name], _weight_of_point(guide_sites[name]), layout, bare=True)
            for number, name in enumerated.variables.items()
        }
        closed = _closed_forms(model_sites, guide_sites) if analytic_kl else []
        costs = {name: enumerated.factor(model_sites[name], term, layout) for name, term in closed}
        terms, log_guide, kl = (
            {name: enumerated.expected(factor, weights, layout) for name, factor in part.items()}
            for part in (factors, own, costs)
        )
        baselines = [
            enumerated.added_up(enumerated.factor(guide_sites[name], term, layout, bare=True), layout)
            for name, term in _baseline_terms(guide_sites, terms, log_guide, kl).items()
        ]
        baselines += [
            enumerated.expected(enumerated.factor(site, term, layout), weights, layout)
            for site in guide_sites.values()
            if (term := offset(site)) is not None
        ]
        if baselines:
            terms[_BASELINES] = sum(baselines[1:], baselines[0])
        scores = [
            enumerated.added_up(enumerated.factor(site, draw_log_density(site), layout, bare=True), layout)
            for site in (guide_sites[name] for name in scored)
        ]
        first = next(iter(enumerated.variables.values()))
        return _particles(terms, log_guide, scores, kl, layout, model_sites, guide_sites, first)
    summed = {name: factor for name, factor in factors.items() if factor.variables}
    any_term = next(iter(summed.values())).tensor
    terms = {n: enumerated.expected(f, {}, layout) for n, f in factors.items() if n not in summed}
    # Draws whose prior depends on a summed-out site have no separate prior term: it is part of the sum.
    terms |= {name: any_term.new_zeros(()).expand(layout.shape) for name in summed if name in guide_sites}
    terms[_SUMMED_OUT] = enumerated.summed(summed, model_sites, layout)
    log_guide = {name: enumerated.expected(factor, {}, layout) for name, factor in own.items()}
    free = [(n, t) for n, t in _closed_forms(model_sites, guide_sites) if n not in summed] if analytic_kl else []
    kl = {name: reduced(model_sites[name], term, layout) for name, term in free}
    scores = [layout.reduce(draw_log_density(guide_sites[name])) for name in scored]
    found = _particles(terms, log_guide, scores, kl, layout, model_sites, guide_sites)
    return replace(found, in_sum=next((name for name in summed if name in guide_sites), None))


@dataclass(frozen=True)
class _Run:
    num_particles: int
    nesting: int
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    data_plate: str | None

    def trace(self, function: Callable[..., Any], *, first: bool = False) -> Any:
        """Trace a run; the ``first`` run reserves the dimensions left of the particles for enumerated sites."""
        function = _WithinNesting(self.nesting)(function)
        if self.num_particles > 1:
            function = pyro.plate(PARTICLES, self.num_particles, dim=-self.nesting - 1)(function)
        enumeration = EnumeratedDimensions(first_available_dim=-self.nesting - 2 if first else None)
        weighting = _Weighting() if first else nullcontext()  # not for the model, whose sites are given
        with enumeration, MendedDraws(), weighting:
            return poutine.trace(function).get_trace(*self.args, **self.kwargs)

    def layout(self, *traces: Mapping[str, Site]) -> Layout:
        """Find the plates that contain every site of the traces; with ``data_plate``, keep only that plate."""
        common: dict[str, Plate] | None = None
        for name, site in ((n, s) for trace in traces for n, s in trace.items()):
            _check_plate_names(site["cond_indep_stack"], [-self.nesting - 1])
            frames = {
                f.name: Plate(f.dim, f.size, f.full_size or f.size)
                for f in site["cond_indep_stack"]
                if f.vectorized and f.name != PARTICLES
            }
            if self.data_plate is not None and self.data_plate not in frames:
                raise GuideError(
                    f"site {name!r} stands outside the plate {self.data_plate!r}, so observations have no separate "
                    "importance weights; move it into the plate, or omit data_plate to use one weight for the whole "
                    "data set"
                )
            common = frames if common is None else {n: p for n, p in common.items() if n in frames}
        plates = common or {}
        if self.data_plate is not None:
            plates = {self.data_plate: plates[self.data_plate]}
        return Layout(self.num_particles, self.nesting, plates)


def _later(layouts: list[Layout], events: int) -> Callable[[], tuple[int, ...]]:
    return lambda: layouts[0].spread(events)


def _samples(trace: Any) -> dict[str, Site]:
    nodes: Mapping[str, Any] = prune_subsample_sites(trace).nodes
    return {n: s for n, s in nodes.items() if s["type"] == "sample" and not s["infer"].get("_deterministic")}


def _leave_path(log_guide: dict[str, Tensor], direct: Mapping[str, Tensor]) -> None:
    """Remove the gradient that is not through the draws from the guide's log densities."""
    for name, term in direct.items():
        log_guide[name] = log_guide[name] - term + term.detach()


def _scores(
    run: _Run, guide: Callable[..., Any], trace: Any, sites: Mapping[str, Site], layout: Layout
) -> dict[str, Tensor]:
    """Return the guide log density of each draw with the draw held fixed, differentiable in the guide's parameters."""
    # Subtracting it from the full log density leaves the pathwise gradient. A guide with a single site needs no second
    # run, because its distribution cannot depend on draws.
    free = {name: site for name, site in sites.items() if not site["is_observed"]}
    if len(sites) > 1:
        fixed = {
            n: (s["value"].detach() if isinstance(s["value"], Tensor) else s["value"])
            for n, s in trace.nodes.items()
            if s["type"] == "sample"
        }
        with poutine.block():
            again = _samples(run.trace(_Values(trace.nodes, fixed)(guide)))
        return {name: _term_of(again[name], layout) for name in free}
    return {
        name: reduced(site, site_log_density(site["fn"], site["value"].detach()), layout) for name, site in free.items()
    }
