"""Particles: runs of guide and model on its draws, and the log weight of every datum."""

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
    Distribution,
    Independent,
    MixtureSameFamily,
    Normal,
    OneHotCategorical,
    constraints,
    kl_divergence,
)
from torch.nn.functional import softplus

from bayeskit.errors import DataError, GuideError, ModelError, SettingsError, ShapeError
from bayeskit.inference.gradients import VIMCO, GradientEstimator, ScoreFunction, space_of
from bayeskit.logdensity.enumeration import EnumeratedDimensions, Factor, align, pack, sum_product
from bayeskit.logdensity.pyro_distributions import MendedDraws
from bayeskit.logdensity.transforms import support_of

__all__ = [
    "Compatibility",
    "Enumerated",
    "GRADIENT",
    "Gate",
    "Layout",
    "PARTICLES",
    "PATH",
    "Particles",
    "Plate",
    "Site",
    "SubsampleIndices",
    "draw_log_density",
    "masked",
    "offset",
    "plate_nesting",
    "reduced",
    "relaxed_log_density",
    "require_reparameterized",
    "rows_of_minibatch",
    "run_particles",
    "site_log_density",
    "stacked",
    "supplied_sites",
    "unwrapped",
    "weight",
]

# Log density of a site of a trace, and checks that guide and model fit together.

Site = dict[str, Any]

#: Marks sites whose values may lie between the points of their support.
_RELAXED = "_relaxed"
#: Marks sites whose values carry a gradient though their distribution has none.
PATH = "_path"


def unwrapped(fn: Distribution) -> tuple[Distribution, int]:
    """Return the distribution inside ``.to_event``, and how many event dimensions that added."""
    events = 0
    while isinstance(fn, Independent):
        events += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, events


def site_log_density(fn: Any, value: Tensor) -> Tensor:
    """Return ``fn.log_prob(value)``, for Bernoulli pixels with half the passes over memory."""
    base, events = unwrapped(fn)
    if isinstance(base, Bernoulli) and events and "logits" in base.__dict__ and not value.requires_grad:
        if torch.broadcast_shapes(base.logits.shape, value.shape) == base.logits.shape:
            if fn._validate_args or base._validate_args:
                fn._validate_sample(value)
            dims = tuple(range(-events, 0))
            return _BernoulliLogDensity.apply(base.logits, value.to(base.logits.dtype), dims)
    return fn.log_prob(value)


def relaxed_log_density(name: str, fn: Any, value: Tensor) -> Tensor:
    """Return the log density of bits or one-hot vectors, continued linearly between these; else GuideError."""
    base, events = unwrapped(fn)
    if isinstance(base, Bernoulli):
        terms = value * base.logits - softplus(base.logits)
    elif isinstance(base, OneHotCategorical):
        terms = (value * base.logits.log_softmax(-1)).sum(-1)
    else:
        raise GuideError(
            f"site {name!r}: the guide draws points between corners, at which {type(base).__name__} has no density; "
            "use Bernoulli or OneHotCategorical in guide and model, or an estimator that is not relaxed, such as "
            "UnorderedSet"
        )
    return terms.sum(tuple(range(-events, 0))) if events else terms


class _BernoulliLogDensity(torch.autograd.Function):
    """``sum(value * logits - softplus(logits))``, and its gradient ``value - sigmoid(logits)`` in one buffer."""

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
        if torch.is_grad_enabled():  # a gradient of this gradient is wanted
            return (value - logits.sigmoid()) * weight, None, None
        return logits.sigmoid().neg_().add_(value).mul_(weight), None, None


class Compatibility:
    """Whether guide and model fit together; each new combination is looked at once."""

    def __init__(self) -> None:
        self._seen: set[Any] = set()

    def __call__(self, model: Mapping[str, Site], guide: Mapping[str, Site]) -> None:
        """Check that the guide names every latent site of the model, and no other; else GuideError."""
        if self._is_new(tuple((n, s["is_observed"]) for sites in (model, guide) for n, s in sites.items())):
            _check_names(model, guide)

    def site(self, name: str, prior: Any, posterior: Any, value: Tensor | None) -> None:
        """Check that the model can have drawn what the guide drew for one site; a relaxed value is no draw."""
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
    # What a chain of transforms can reach, torch knows only roughly: there the values decide.
    vague = type(drawn).__name__ in ("TransformedDistribution", "Delta")
    if wanted.is_discrete != given.is_discrete or not vague and not _contains(wanted, given):
        raise GuideError(
            f"site {name!r}: the guide's {type(unwrapped(posterior)[0]).__name__} has support {given}, the model's "
            f"{type(unwrapped(prior)[0]).__name__} {wanted}; choose a distribution in the guide whose draws the "
            "model can have produced, for example a TransformedDistribution"
        )
    shapes = prior.event_shape, posterior.event_shape
    if shapes[0] != shapes[1]:
        raise GuideError(
            f"site {name!r}: a draw of the guide has shape {tuple(shapes[1])}, one of the model {tuple(shapes[0])}; "
            "let .to_event agree"
        )
    if value is not None and not bool(value.isnan().any()) and not bool(wanted.check(value).all()):
        raise GuideError(f"site {name!r}: the guide drew a value outside the support {wanted} of the model")


def _component(fn: Any) -> Any:
    """Return a distribution without its wrappers, and of a mixture the components."""
    fn = unwrapped(fn)[0]
    while isinstance(fn, MixtureSameFamily):
        fn = unwrapped(fn.component_distribution)[0]
    return fn


def _reach(fn: Any) -> Any:
    """Return the support of single numbers as torch has it, which of a mixture holds all components."""
    mixed = isinstance(unwrapped(fn)[0], MixtureSameFamily)
    try:
        support = support_of(fn) if mixed else fn.support
    except NotImplementedError:
        support = _component(fn).support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _contains(wanted: Any, given: Any) -> bool:
    """Tell whether a guide with support ``given`` stays in ``wanted``, as far as types can tell."""
    if wanted is constraints.real or wanted is constraints.real_vector:
        return not given.is_discrete
    if wanted.is_discrete:
        return True  # values decide
    lower, upper = _bounds(wanted)
    least, most = _bounds(given)
    if lower is None and upper is None:
        return True  # a structured support: the values decide
    below = lower is None or (least is not None and bool((torch.as_tensor(least) >= torch.as_tensor(lower)).all()))
    above = upper is None or (most is not None and bool((torch.as_tensor(most) <= torch.as_tensor(upper)).all()))
    return below and above


def _bounds(support: Any) -> tuple[Any, Any]:
    return getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)


def require_reparameterized(guide: Mapping[str, Site], objective: str, otherwise: str) -> None:
    """Raise GuideError for draws without a gradient, which ``objective`` needs; suggest ``otherwise``."""
    for name, site in guide.items():
        if not site["is_observed"] and not site["fn"].has_rsample:
            raise GuideError(
                f"site {name!r}: draws of the guide's {type(site['fn']).__name__} are not reparameterised, which "
                f"{objective} needs; choose a distribution with rsample, or {otherwise}"
            )


# Dimensions of particles and data in a trace.

PARTICLES = "_particles"


class Plate(NamedTuple):
    """A plate of independent data: its dimension counted from the right, items in the batch, items in all."""

    dim: int
    size: int
    full_size: int


@dataclass(frozen=True)
class Layout:
    """Dimensions of particles and data in a trace."""

    num_particles: int
    nesting: int  # number of plate dimensions; particles stand left of them
    plates: Mapping[str, Plate]  # by name, those plates that hold every latent site: their items are the data

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """Shape of the data, leftmost plate first."""
        return tuple(p.size for p in sorted(self.plates.values()))

    @property
    def shape(self) -> tuple[int, ...]:
        """``(particles, *batch)``."""
        return (self.num_particles, *self.batch_shape)

    @property
    def scale(self) -> float:
        """How many items of the whole data each item of the batch stands for."""
        return math.prod(p.full_size / p.size for p in self.plates.values())

    def reduce(self, term: Tensor) -> Tensor:
        """Sum a term with plate dimensions over all but particles and data: ``(particles, *batch)``."""
        dims = sorted(p.dim for p in self.plates.values())
        shape = (1,) * (self.nesting + 1 - term.dim()) + tuple(term.shape)
        inner = [d for d in range(-self.nesting, 0) if d not in dims]
        term = term.reshape(shape)
        if inner:
            term = term.sum(inner)
        return term.expand(self.shape)

    def spread(self, events: int) -> tuple[int, ...]:
        """Return the shape in which a ``(particles, *batch)`` tensor meets a site's value."""
        sizes = {p.dim: p.size for p in self.plates.values()}
        plates = tuple(sizes.get(d, 1) for d in range(-self.nesting, 0))
        return (self.num_particles, *plates, *(1,) * events)

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the plates that results keep: particles, where there are several, and data."""
        data = sorted(self.plates, key=lambda name: self.plates[name])
        return (PARTICLES, *data) if self.num_particles > 1 else tuple(data)

    def shaped(self, term: Tensor) -> Tensor:
        """Expand a term that has the dimensions of :attr:`labels` to ``(particles, *batch)``."""
        if self.num_particles == 1:
            term = term.unsqueeze(0)
        return term.expand(self.shape)


def reduced(site: Site, term: Tensor, layout: Layout) -> Tensor:
    """Apply a site's mask and scale to a term of it and sum it up to ``(K, *batch)``."""
    term, scale = masked(site, term), site["scale"]
    if not isinstance(scale, Tensor):
        scale = scale / layout.scale
        return layout.reduce(term if scale == 1 else term * scale)
    return layout.reduce(term * (scale / layout.scale))


def masked(site: Site, term: Tensor) -> Tensor:
    """Apply a site's mask to a term of it."""
    mask = site["mask"]
    if mask is None or mask is True:
        return term
    return torch.zeros_like(term) if mask is False else torch.where(mask, term, term.new_zeros(()))


# Sites of the guide that gradient estimators draw as weighted points.

GRADIENT = "gradient"
_WEIGHTS = "_weights"
_OFFSET = "_offset"
#: Points of all sites together, beyond which they are refused.
_MAX_POINTS = 1 << 16


class _Drawn(TorchDistribution):  # type: ignore[misc]
    """A distribution whose support has been narrowed to points that were drawn."""

    def __init__(self, fn: Any, values: Tensor) -> None:
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)
        self.fn, self.values = fn, values

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return the points."""
        return self.values


class _Weighting(Messenger):
    """Messenger that lets sites marked ``infer={"gradient": estimator}`` run through points of the estimator."""

    # It stands right inside the enumerating messenger, which gives the points a dimension of their own, so that the
    # points of several sites multiply. Relaxed points lie between the corners of the support, where densities are
    # continued linearly; a single relaxed point, which carries all of its gradient, is a draw like others.

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
                f"site {name!r}: infer['gradient'] is {estimator!r:.60}, no gradient estimator; give such as "
                "gradients.UnorderedSet(k=4)"
            )
        if "_markov_scope" in message["infer"]:
            raise GuideError(
                f"site {name!r}: gradient estimators know no pyro.markov; take it out, or give the chain as one site"
            )
        if not isinstance(fn, TorchDistributionMixin) or not fn.support.is_discrete:
            raise GuideError(
                f"site {name!r} is a {type(fn).__name__}, which has no discrete support for the gradient estimator; "
                "leave infer['gradient'] out"
            )
        _check_estimator(name, estimator)
        if estimator.relaxed and isinstance(unwrapped(fn)[0], Categorical):
            raise GuideError(
                f"site {name!r} is a Categorical, whose values are whole numbers; {type(estimator).__name__} draws "
                "points between corners: use OneHotCategorical in guide and model"
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
            # A dimension of size one would not show which terms depend on the site: the point comes twice, at half.
            values, weights = torch.cat([values, values]), torch.cat([weights, weights]) / 2
        self._num_points *= len(weights)
        if self._num_points > _MAX_POINTS:
            raise GuideError(
                f"site {name!r}: with its {len(weights)} points those of all sites together are {self._num_points}, "
                f"more than {_MAX_POINTS}, since a term may depend on each; make many sites one by a plate or .to_event"
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
    """Refuse estimators of something else than an expectation, and those that do more than the points they draw."""
    if isinstance(estimator, VIMCO):
        raise GuideError(
            f"site {name!r}: VIMCO is about the multi-sample bound of the whole model, not about one site; take "
            f"infer['gradient'] out and train by IWAE(num_particles={estimator.num_samples}), whose draws have "
            "this very gradient"
        )
    if type(estimator).surrogate is not GradientEstimator.surrogate and not isinstance(estimator, ScoreFunction):
        raise GuideError(
            f"site {name!r}: {type(estimator).__name__} has a surrogate of its own, of which a guide knows nothing; "
            "put what it adds into the weights or the offset of its points"
        )


def _baseline_terms(
    sites: Mapping[str, Site],
    log_model: Mapping[str, Tensor],
    log_guide: Mapping[str, Tensor],
    kl: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the baselines' terms of the bound, by site: zero in value, and in expectation of the gradient."""
    # Each has the shape of its site's density without the dimension of the points. GuideError if this is computed again
    # in the backward pass, where a baseline would learn once more.
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
            # The bound is linear in the weights of each site, so this derivative is the worth of each point.
            (worth,) = torch.autograd.grad(bound, weights, retain_graph=True, allow_unused=True)
            if worth is not None:
                found[name] = torch.as_tensor(estimator.correction(weights, worth))
    return found


def offset(site: Site) -> Tensor | None:
    """Return what a control variate adds to the bound at a site, zero in expectation, of the shape of its draws."""
    found = site["infer"].get(_OFFSET)
    return found if isinstance(found, Tensor) else None


def _check_once(name: str) -> None:
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("computed again"):
            return
    except RuntimeError:
        raise GuideError(
            f"site {name!r}: its baseline learns from draw to draw, and would learn twice from particles that are "
            "computed again in the backward pass; leave chunk_size out, or use LeaveOneOut, whose baseline is its own "
            "draws"
        ) from None


def weight(site: Any) -> Tensor | None:
    """Return the weights of a site's points, in the shape of its log density; None where all are enumerated."""
    found = site["infer"].get(_WEIGHTS)
    return found if isinstance(found, torch.Tensor) else None


# Terms of a site of a trace: its log density, its score, and its divergence in closed form.


def _term_of(site: Site, layout: Layout) -> Tensor:
    """Return the log density of a site, ``(K, *batch)``, without the scale that belongs to the data's plates."""
    return reduced(site, _density_of(site), layout)


def _density_of(site: Site) -> Tensor:
    """Return the log density of a site at its value; the site keeps a copy, in case it is to be named in an error."""
    if site["infer"].get(_RELAXED):
        term = relaxed_log_density(site["name"], site["fn"], site["value"])
    else:
        term = site_log_density(site["fn"], site["value"])
    site["term"] = masked(site, term.detach())  # what a mask takes out is nobody's fault
    return term


def _is_path(site: Site) -> bool:
    """Whether the draw carries a gradient."""
    return bool(site["fn"].has_rsample) or PATH in site["infer"]


def draw_log_density(site: Site) -> Tensor:
    """Return the log density of a draw by its distribution, without scales and masks."""
    # A mask may take out padding whose density is not finite: zero there.
    term = site_log_density(site["fn"], site["value"])
    return torch.where(masked(site, torch.ones_like(term)) > 0, term, torch.where(term.isfinite(), term, 0.0))


def _weight_of_point(site: Site) -> Tensor:
    """Return what each point of an enumerated site of the guide counts for."""
    drawn = weight(site)
    return _density_of(site).exp() if drawn is None else drawn


def _closed_forms(model: Mapping[str, Site], guide: Mapping[str, Site]) -> list[tuple[str, Tensor]]:
    """Return the closed-form divergences of guide from model, by site."""
    # Given the earlier draws, a site's divergence may stand for the difference of its log densities where the model
    # conditions the site on nothing that the guide draws later.
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
            continue  # Pyro's closed form of a Delta leaves out its log_density, the Jacobian of automatic guides
        if _is_masked(prior["fn"]) or _is_masked(posterior["fn"]):
            continue  # each by its own mask, of which torch's closed form knows one
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
    """Give both one batch shape: some of torch's closed forms index one by a mask of the other's shape."""
    if posterior.batch_shape == prior.batch_shape or isinstance(unwrapped(prior)[0], Normal):
        return posterior, prior
    shape = torch.broadcast_shapes(posterior.batch_shape, prior.batch_shape)
    return posterior.expand(shape), prior.expand(shape)


# Sites that are summed out: of the model by log-sum-exp, of the guide by expectation.


@dataclass(frozen=True)
class Enumerated:
    """The enumerated sites of one run."""

    variables: dict[int, str]  # site names by the number Pyro gave them
    dims: dict[int, int]  # that number by its dimension, where no Markov chain says otherwise
    in_guide: bool  # whether these are sites of the guide

    @classmethod
    def of(cls, model: Mapping[str, Site], guide: Mapping[str, Site]) -> Enumerated | None:
        """Return the enumerated sites, if any; GuideError if both the guide and the model alone have some."""
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
        """Label the dimensions of a term of a site, masked and without the scale of the data's plates."""
        scale = 1.0 if bare else site["scale"] / layout.scale
        if isinstance(scale, Tensor) or abs(scale - 1) > 1e-12:
            if term.dim() > layout.nesting + 1 and not self.in_guide:
                raise GuideError(
                    f"site {site['name']!r} depends on enumerated sites and is scaled or subsampled; only the plates "
                    "that hold all sites may be subsampled then"
                )
            term = term * scale
        plates = {f.dim: (f.name, f.size) for f in site["cond_indep_stack"] if f.vectorized}
        dims = {**self.dims, **site["infer"].get("_dim_to_id", {})}
        # A mask around a site summed out of the model is padding, whose prior integrates to one.
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
        """Sum the model's sites out of the product of ``factors``: ``(K, *batch)``."""
        keep = layout.labels
        total = sum_product(list(factors.values()), self.home(sites), self.variables, keep)
        return layout.shaped(total)

    def expected(self, cost: Factor, own: Mapping[int, Factor], layout: Layout) -> Tensor:
        """Return a term's expectation over the guide's enumerated sites that it depends on, ``(K, *batch)``."""
        # own: the weight of each point of an enumerated site of the guide, such as its probability.
        needed: set[int] = set()
        reached = set(cost.variables)
        while reached - needed:
            number = (reached - needed).pop()
            needed.add(number)
            reached |= own[number].variables
        for number in needed:
            if not own[number].plates <= cost.plates:
                raise GuideError(
                    f"the enumerated site {self.variables[number]!r} stands in a plate that a site depending on it "
                    "does not; draw it instead, or move that site into the plate"
                )
        labels = tuple(dict.fromkeys((*cost.labels, *(x for n in needed for x in own[n].labels))))
        value = align(cost, labels)
        if needed:
            weight = math.prod((align(own[n], labels) for n in needed), start=torch.ones(()))
            # Masked before the product: its derivative by a weight of zero would be infinite, and NaN further back.
            value = weight * torch.where((weight != 0) | value.isfinite(), value, value.new_zeros(()))
        return self.added_up(Factor(value, labels, cost.plates), layout)

    def added_up(self, term: Factor, layout: Layout) -> Tensor:
        """Sum a term over everything but particles and data: ``(K, *batch)``."""
        kept = layout.labels
        drop = [i for i, label in enumerate(term.labels) if label not in kept]
        value = term.tensor.sum(drop) if drop else term.tensor
        left = tuple(label for label in term.labels if label in kept)
        return layout.shaped(align(Factor(value, left, frozenset(kept)), kept))


# Replays of a model or guide on the same items and on given values.


class _Rows(NamedTuple):
    rows: Tensor
    num_items: int


_ROWS: ContextVar[_Rows | None] = ContextVar("rows of the minibatch", default=None)


@contextmanager
def rows_of_minibatch(rows: Tensor | None, num_items: int) -> Iterator[None]:
    """Set the rows ``(batch,)``, of ``num_items`` data, of the minibatch of calls inside; None where unknown."""
    # A model whose plate has the size of the minibatch cannot know them; training loops do.
    token = _ROWS.set(None if rows is None else _Rows(rows, num_items))
    try:
        yield
    finally:
        _ROWS.reset(token)


class SubsampleIndices(Messenger):
    """Messenger that records the items that every plate takes, by the plate's name."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, Tensor] = {}  # indices
        # The same, but for plates over a whole minibatch: its rows, where rows_of_minibatch tells them.
        self.items: dict[str, Tensor] = {}
        self.sizes: dict[str, int] = {}  # items in all

    def _pyro_post_sample(self, message: Any) -> None:
        if not site_is_subsample(message):
            return
        name, value, size = message["name"], message["value"], int(message["fn"].size)
        self.values[name], known = value, _ROWS.get()
        whole = known is not None and len(value) == size == len(known.rows)
        self.items[name], self.sizes[name] = (known.rows, known.num_items) if known and whole else (value, size)


class _Supply(Messenger):
    """Fix the plates' items, and give latent sites the values that ``value_of`` names."""

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
    """Run a model or guide on the same ``indices`` and given values; return its sites but for subsampling."""
    # ``value_of(name, distribution)`` returns the value of a latent site; None has it drawn.
    function = _Supply(indices, value_of)(function)
    if layout.num_particles > 1:
        function = pyro.plate(PARTICLES, layout.num_particles, dim=-layout.nesting - 1)(function)
    with poutine.block(expose_types=["param"]), MendedDraws():  # the optimiser has to hear of parameters met here first
        trace = poutine.trace(function).get_trace(*args, **kwargs)
    nodes: Mapping[str, Any] = prune_subsample_sites(trace).nodes
    return {name: site for name, site in nodes.items() if site["type"] == "sample"}


# Particles: log weights of a guide's draws under a model, for every datum.
# Every multi-sample objective is a pure function of these.


@dataclass
class Particles:
    """Terms from one run of guide and model, for each of ``K`` particles of each datum."""

    log_likelihood: Tensor  # (K, *batch), of observed sites and factors
    log_prior: dict[str, Tensor]  # (K, *batch), by latent site; of sites in kl only where a score needs it
    log_guide: dict[str, Tensor]  # (K, *batch), as log_prior
    log_score: Tensor | None  # (K, *batch), under the guide, of the sites whose draws carry no gradient
    kl: dict[str, Tensor]  # (K, *batch), closed-form divergences of guide from model, if requested, by latent site
    scale: float  # how many items of the whole data each datum stands for
    layout: Layout
    model_sites: dict[str, Site] = field(repr=False)
    guide_sites: dict[str, Site] = field(repr=False)
    # A site that the guide enumerates: all terms are expectations over such sites, which add up but make no weights.
    in_expectation: str | None = None
    finite: dict[str, Tensor] = field(default_factory=dict, repr=False)  # by site, where the sites are not kept
    in_sum: str | None = None  # a latent site whose prior is part of a sum over the model's enumerated sites

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
        """Log joint density less log density of the guide, ``(K, *batch)``; GuideError if the guide enumerates."""
        if self.kl:
            raise RuntimeError("log weights need particles drawn without analytic_kl")
        if self.in_expectation is not None:
            raise GuideError(
                f"site {self.in_expectation!r} is enumerated in the guide, or drawn as weighted points, but this "
                "objective weighs draws; take the mark out of the guide (infer['enumerate'] or infer['gradient']), or "
                "use ELBO"
            )
        return self.log_model - self.log_guide_total

    def require_divergences(self, objective: str) -> None:
        """Refuse guide sites whose prior is part of a sum over enumerated sites of the model: they have none."""
        if self.in_sum is not None:
            raise GuideError(
                f"{objective} weighs the divergence of each latent site, but the prior of {self.in_sum!r} depends on a "
                "site that the model sums out, so that it has no term of its own; enumerate that site in the guide, or "
                "use ELBO without weights, or IWAE"
            )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return everything that carries a gradient, in a fixed order."""
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
        """Return the same particles without the graph that made them."""
        bare = self.with_tensors(tuple(t.detach() for t in self.tensors()))
        return replace(bare, model_sites={}, guide_sites={}, finite=self.finite_by_site())

    def finite_by_site(self) -> dict[str, Tensor]:
        """Return, for each site with a term, whether that is finite: scalars, so that nothing waits for a device."""
        found = dict(self.finite)
        for name, site in (*self.guide_sites.items(), *self.model_sites.items()):
            term = site.get("term", self.kl.get(name))
            if term is not None:
                good = term.detach().isfinite().all()
                found[name] = found[name] & good if name in found else good
        return found

    def culprit(self) -> str | None:
        """Return the name of the first site whose log density is not finite, if there is one."""
        terms = [*self.guide_sites.items(), *self.model_sites.items()]
        for name, site in terms:
            if not bool(_finite(site)):
                return name
        return next((name for name, good in self.finite.items() if not bool(good)), None)


def _finite(site: Site) -> Tensor:
    term = site["term"] if "term" in site else site["fn"].log_prob(site["value"])
    return term.isfinite().all()


def _all_finite(runs: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: torch.stack([run[name] for run in runs if name in run]).all() for name in names}


def stacked(runs: list[Particles]) -> Particles:
    """Join runs of one model and guide along their particles."""
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


# Weights of the gradient that reaches the guide, so that a forward pass serves two objectives.


class Gate:
    """A factor that multiplies gradients on their way to the guide's parameters, not to the model's."""

    # The loss is built first and the factor set before its backward pass, so that the factor may depend on everything
    # that the forward pass found.

    def __init__(self) -> None:
        self._factor: Tensor | None = None
        self.parts: list[tuple[Gate, int]] = []

    @property
    def factor(self) -> Tensor | None:
        """The factor, ``(K, *batch)``; setting it also sets those of the ``parts`` that chunks of particles passed."""
        return self._factor

    @factor.setter
    def factor(self, value: Tensor) -> None:
        self._factor = value
        start = 0
        for part, size in self.parts:
            part.factor = value[start : start + size]
            start += size

    def __call__(self, value: Tensor, shape: Callable[[], tuple[int, ...]] | None = None) -> Tensor:
        """Return ``value``; its gradient will be multiplied by the factor, viewed in ``shape()``."""
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


# Draw particles: one run of the guide, and one of the model on its draws.

_SUMMED_OUT = "_summed_out"
_BASELINES = "_baselines"


class _WithinNesting(Messenger):
    """Refuse plates that reach into the dimension of the particles, before shapes clash there."""

    def __init__(self, nesting: int) -> None:
        super().__init__()
        self._nesting = nesting

    def _pyro_sample(self, message: Any) -> None:
        for frame in message["cond_indep_stack"]:
            if frame.vectorized and -frame.dim > self._nesting:
                raise SettingsError(
                    f"plate {frame.name!r} takes dimension {frame.dim}, beyond the max_plate_nesting of "
                    f"{self._nesting} that this objective was given or found in its first run; use a new objective for "
                    "another model, or give max_plate_nesting"
                )


class _Values(Messenger):
    """Give the model the guide's draws."""

    def __init__(
        self, sites: Mapping[str, Site], values: Mapping[str, Tensor], compatibility: Compatibility | None = None
    ) -> None:
        super().__init__()
        self._sites, self._values, self._compatibility = sites, values, compatibility

    def _pyro_sample(self, message: Any) -> None:
        name = message["name"]
        if name in self._values and not message["is_observed"]:
            # Plates draw their subsamples as sites, too, which have no support to compare.
            if self._compatibility is not None and isinstance(message["fn"], TorchDistributionMixin):
                site = self._sites[name]
                value = None if site["infer"].get(_RELAXED) else self._values[name]
                self._compatibility.site(name, message["fn"], site["fn"], value)
            message["value"], message["done"] = self._values[name], True
            message["infer"] = self._sites[name]["infer"]


class _Detached(Messenger):
    """Let draws carry no gradient, also where later sites of the guide depend on them."""

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
    """Return how many dimensions the plates of model and guide take, by running both once."""
    with poutine.block(), torch.random.fork_rng(devices=[]), torch.no_grad(), MendedDraws():
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        sites: Mapping[str, Any] = guide_trace.nodes
        drawn = {name: site["value"] for name, site in sites.items() if site["type"] == "sample"}
        replayed = _Values(sites, drawn, compatibility)(model)
        model_trace = poutine.trace(replayed).get_trace(*args, **kwargs)
    for trace in (guide_trace, model_trace):
        for name, site in _samples(trace).items():
            _check_batch(name, site)
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
    """Refuse plates named like the one that the particles stand in, unless in a dimension of its own."""
    if any(frame.name == PARTICLES and frame.dim not in own for frame in frames):
        raise ModelError(f"the name of plate {PARTICLES!r} is taken by the plate of the particles; give it another")


def _check_batch(name: str, site: Site) -> None:
    """Refuse dimensions that no plate declares: beside several particles they would be taken for these."""
    declared = {frame.dim for frame in site["cond_indep_stack"] if frame.vectorized}
    shapes = {"batch": tuple(site["fn"].batch_shape)}
    shapes |= {what: tuple(site[what].shape) for what in ("mask", "scale") if isinstance(site[what], Tensor)}
    for what, shape in shapes.items():
        if loose := [dim for dim in range(-len(shape), 0) if shape[dim] > 1 and dim not in declared]:
            of = "a batch dimension" if what == "batch" else f"a {what} with a dimension"
            raise ModelError(
                f"site {name!r} has {of} ({loose[-1]}, of size {shape[loose[-1]]}) outside every plate; "
                "declare it with pyro.plate" + (" or .to_event" if what == "batch" else "")
            )


def run_particles(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    num_particles: int,  # all in one run, in a plate left of the model's own
    nesting: int,  # plate dimensions of model and guide
    detached: bool = False,  # cut the gradient through the guide's draws: scores are left
    path_only: bool = False,  # let gradients reach the guide's parameters through its draws alone
    analytic_kl: bool = False,  # compute divergences in closed form where there are any
    gate: Gate | None = None,  # passed by all gradients to the guide; its factor is (K, *batch)
    data_plate: str | None = None,  # the plate whose items are the data
    compatibility: Compatibility | None = None,  # checks guide and model before anything is computed
) -> Particles:
    """Run the guide and, on its draws, the model; GuideError if a site stands outside ``data_plate``."""
    run = _Run(num_particles, nesting, args, kwargs, data_plate)
    with _Detached() if detached else nullcontext():  # outermost, so that the trace, too, sees what it did
        guide_trace = run.trace(guide, first=True)
    values = {name: site["value"] for name, site in guide_trace.nodes.items() if site["type"] == "sample"}
    guide_sites = _samples(guide_trace)
    layouts: list[Layout] = []  # known once the model has run, needed in the backward pass
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
    # A closed form stands for both log densities, unless the draw's own is needed as its score.
    spared = {name for name in kl if not detached and guide_sites[name]["fn"].has_rsample}
    log_guide = {
        name: _term_of(site, layout)
        for name, site in guide_sites.items()
        if name not in spared  # factors, too
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
    """Gather the terms of all sites."""
    observed = [t for n, t in terms.items() if n not in model_sites or model_sites[n]["is_observed"]]
    log_prior = {n: t for n, t in terms.items() if n in model_sites and not model_sites[n]["is_observed"]}
    any_term = next(iter([*terms.values(), *log_guide.values(), *kl.values()]))
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
    """Gather the terms where sites are enumerated."""
    factors = {name: enumerated.factor(site, _density_of(site), layout) for name, site in model_sites.items()}
    own = {name: enumerated.factor(site, _density_of(site), layout) for name, site in guide_sites.items()}
    drawn = [name for name, site in guide_sites.items() if "_enumerate_dim" not in site["infer"]]
    scored = [name for name in drawn if not _is_path(guide_sites[name])]
    for name in scored:
        if own[name].variables:
            raise GuideError(
                f"site {name!r} of the guide draws without a gradient and depends on an enumerated site; enumerate "
                "it too, give it an infer['gradient'] as well, or mark none"
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
    # Draws whose prior depends on a summed-out site have no prior of their own: it is part of the sum.
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
        """Trace a run; the ``first`` one opens the dimensions left of the particles to enumerated sites."""
        function = _WithinNesting(self.nesting)(function)
        if self.num_particles > 1:
            function = pyro.plate(PARTICLES, self.num_particles, dim=-self.nesting - 1)(function)
        enumeration = EnumeratedDimensions(first_available_dim=-self.nesting - 2 if first else None)
        weighting = _Weighting() if first else nullcontext()  # the model has no weights: its sites are given
        with enumeration, MendedDraws(), weighting:
            return poutine.trace(function).get_trace(*self.args, **self.kwargs)

    def layout(self, *traces: Mapping[str, Site]) -> Layout:
        """Find the plates that hold every site of the traces, or just the one that was asked for."""
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
                    f"site {name!r} stands outside the plate {self.data_plate!r}, so there are no weights for each "
                    "datum; put it into the plate, or leave data_plate out to weigh the whole data at once"
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
    """Take the gradient that is not along the draws out of the guide's log densities."""
    for name, term in direct.items():
        log_guide[name] = log_guide[name] - term + term.detach()


def _scores(
    run: _Run, guide: Callable[..., Any], trace: Any, sites: Mapping[str, Site], layout: Layout
) -> dict[str, Tensor]:
    """Return the log density of each draw, held fixed, as a function of the guide's parameters alone."""
    # Subtracted from the full log density it leaves the gradient along the path. A guide of a single site needs no
    # second run: its distribution cannot depend on draws.
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
