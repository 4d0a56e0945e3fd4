"""Sites of the guide that are drawn as weighted points, as their gradient estimators want it."""

from __future__ import annotations

from typing import Any

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.messenger import Messenger
from torch import Tensor

from bayeskit.errors import GuideError
from bayeskit.inference.gradients import GradientEstimator, space_of

GRADIENT = "gradient"
WEIGHTS = "_weights"


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

    Stands right inside of the messenger that enumerates, which gives the points a dimension of their own.
    """

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
        values, weights = estimator.points(space_of(fn))
        if len(weights) == 1:
            # A dimension of size one would not show which terms depend on the site: the point comes twice, at half.
            values, weights = torch.cat([values, values]), torch.cat([weights, weights]) / 2
        message["infer"] = {**message["infer"], "enumerate": "parallel", WEIGHTS: weights}
        message["fn"] = _Drawn(fn, values)

    def _pyro_post_sample(self, message: Any) -> None:
        fn = message["fn"]
        if isinstance(fn, _Drawn):
            message["fn"] = fn.fn
            weights, dim = message["infer"][WEIGHTS], message["infer"]["_enumerate_dim"]
            gap = -dim - weights.dim()
            message["infer"][WEIGHTS] = weights.reshape(weights.shape[0], *[1] * gap, *weights.shape[1:])


def weight(site: Any) -> Tensor | None:
    """Return the weights of a site's points, in the shape of its log density; None where all are enumerated."""
    found = site["infer"].get(WEIGHTS)
    return found if isinstance(found, torch.Tensor) else None
