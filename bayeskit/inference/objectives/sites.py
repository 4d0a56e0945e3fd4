"""What a site of a trace contributes: its log density, and whether guide and model fit together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Distribution, Independent, MixtureSameFamily, OneHotCategorical, constraints
from torch.nn.functional import softplus

from bayeskit._transforms import support_of
from bayeskit.errors import GuideError

Site = dict[str, Any]

#: Marks sites whose values may lie between the points of their support.
RELAXED = "_relaxed"
#: Marks sites whose values carry a gradient though their distribution has none.
PATH = "_path"


def unwrapped(fn: Distribution) -> tuple[Distribution, int]:
    """Return the distribution inside ``.to_event``, and how many event dimensions that added."""
    events = 0
    while isinstance(fn, Independent):
        events += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, events


def log_density(fn: Any, value: Tensor) -> Tensor:
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
    """Return the log density of bits or one-hot vectors, continued linearly to points between these.

    Raises
    ------
    GuideError
        If the site has another distribution.
    """
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
        """Check that the guide names every latent site of the model, and no other.

        Parameters
        ----------
        model, guide : mapping
            Sample sites by name, those of subsampling left out.

        Raises
        ------
        GuideError
            Naming the site and the remedy.
        """
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
    """Refuse a guide with draws that carry no gradient.

    Parameters
    ----------
    guide : mapping of Site
    objective : str
        What needs the gradient.
    otherwise : str
        What to use for such a guide.

    Raises
    ------
    GuideError
    """
    for name, site in guide.items():
        if not site["is_observed"] and not site["fn"].has_rsample:
            raise GuideError(
                f"site {name!r}: draws of the guide's {type(site['fn']).__name__} are not reparameterised, which "
                f"{objective} needs; choose a distribution with rsample, or {otherwise}"
            )
