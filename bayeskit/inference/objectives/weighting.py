"""Sites of the guide that are drawn as weighted points, as their gradient estimators want it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions import Categorical, TorchDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.messenger import Messenger
from torch import Tensor

from bayeskit.errors import DataError, GuideError, SettingsError, ShapeError
from bayeskit.inference.gradients import VIMCO, GradientEstimator, ScoreFunction, space_of
from bayeskit.inference.objectives.sites import PATH, RELAXED, Site, unwrapped

GRADIENT = "gradient"
WEIGHTS = "_weights"
OFFSET = "_offset"
#: Points of all sites together, beyond which they are refused.
MAX_POINTS = 1 << 16


class _Drawn(TorchDistribution):  # type: ignore[misc]
    """A distribution whose support has been narrowed to points that were drawn."""

    def __init__(self, fn: Any, values: Tensor) -> None:
        super().__init__(fn.batch_shape, fn.event_shape, validate_args=False)
        self.fn, self.values = fn, values

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return the points."""
        return self.values


class Weighting(Messenger):
    """Let sites marked ``infer={"gradient": estimator}`` run through points that the estimator draws.

    Stands right inside of the messenger that enumerates, which gives the points a dimension of their own, so that the
    points of several sites multiply. Relaxed points lie between the corners of the support, where densities are
    continued linearly; one alone, which carries all of its gradient itself, is a draw like others.
    """

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
            message["infer"] = {**message["infer"], RELAXED: True, PATH: True}
            return
        if len(weights) == 1:
            # A dimension of size one would not show which terms depend on the site: the point comes twice, at half.
            values, weights = torch.cat([values, values]), torch.cat([weights, weights]) / 2
        self._num_points *= len(weights)
        if self._num_points > MAX_POINTS:
            raise GuideError(
                f"site {name!r}: with its {len(weights)} points those of all sites together are {self._num_points}, "
                f"more than {MAX_POINTS}, since a term may depend on each; make many sites one by a plate or .to_event"
            )
        message["infer"] = {**message["infer"], "enumerate": "parallel", WEIGHTS: weights, OFFSET: offset}
        message["infer"][RELAXED] = estimator.relaxed
        message["fn"] = _Drawn(fn, values)

    def _pyro_post_sample(self, message: Any) -> None:
        fn = message["fn"]
        if isinstance(fn, _Drawn):
            message["fn"] = fn.fn
            weights, dim = message["infer"][WEIGHTS], message["infer"]["_enumerate_dim"]
            gap = -dim - weights.dim()
            message["infer"][WEIGHTS] = weights.reshape(weights.shape[0], *[1] * gap, *weights.shape[1:])


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


def baseline_terms(
    sites: Mapping[str, Site],
    log_model: Mapping[str, Tensor],
    log_guide: Mapping[str, Tensor],
    kl: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return what the baselines of sites add to the bound: zero in value, and in expectation of the gradient.

    Parameters
    ----------
    sites : mapping of Site
        Those of the guide.
    log_model, log_guide, kl : mapping of Tensor
        What the bound is made of, by site. It is linear in the weights of each, so that its derivative by these is
        what each point is worth.

    Returns
    -------
    dict of Tensor
        By site, the shape of its density without the dimension of its points.

    Raises
    ------
    GuideError
        If this is computed again in the backward pass, where a baseline would learn once more.
    """
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
            (worth,) = torch.autograd.grad(bound, weights, retain_graph=True, allow_unused=True)
            if worth is not None:
                found[name] = torch.as_tensor(estimator.correction(weights, worth))
    return found


def offset(site: Site) -> Tensor | None:
    """Return what a control variate adds to the bound at a site, zero in expectation, of the shape of its draws."""
    found = site["infer"].get(OFFSET)
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
    found = site["infer"].get(WEIGHTS)
    return found if isinstance(found, torch.Tensor) else None
