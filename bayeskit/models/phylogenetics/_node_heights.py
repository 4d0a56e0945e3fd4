"""Ratio coordinates of the node heights of a rooted topology.

With `h` the heights and `b` the height of the oldest tip below a node, the coordinates are `log(h - b)` at the root and
`logit((h - b) / (h_parent - b))` elsewhere (X. Ji et al. 2023, Systematic Biology 72). The map is triangular from the
root to the tips, so that its Jacobian is the product of its diagonal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributions import Transform, biject_to, constraints, transform_to
from torch.nn.functional import logsigmoid

from bayeskit.extend import BoundedExponential
from bayeskit.models.phylogenetics._dated_topologies import DatedTopology


class NodeHeights(constraints.Constraint):
    """Heights of internal nodes, shape `(*batch, n-1)`: above both children, and finite.

    Examples
    --------
    >>> support = NodeHeights(DatedTopology.of("((A,B),C);"))
    >>> support.check(torch.tensor([[1.0, 2.0], [2.0, 1.0], [-1.0, 1.0]]))
    tensor([ True, False, False])
    """

    event_dim = 1

    def __init__(self, dated: DatedTopology) -> None:
        super().__init__()
        self.dated = dated

    def check(self, value: Tensor) -> Tensor:
        """Tell which vectors are heights of the topology, shape `(*batch)`."""
        # Rounding may make an edge zero; lower bounds of time are kept.
        return (self.dated.edge_times(value) >= 0).all(-1) & value.isfinite().all(-1)


class RatioTransform(Transform):
    """The map of unconstrained vectors `(*batch, n-1)` to node heights of a rooted topology, in ratio coordinates.

    References
    ----------
    X. Ji, A. A. Fisher, S. Su, J. L. Thorne, B. Potter, P. Lemey, G. Baele and M. A. Suchard (2023), Scalable Bayesian
    divergence time estimation with ratio transformations, Systematic Biology 72, 1136-1153.

    Examples
    --------
    >>> transform = RatioTransform(DatedTopology.of("((A,B),C);", dates={"A": 1.0, "B": 2.0, "C": 2.0}))
    >>> transform(torch.zeros(2)), transform.inv(torch.tensor([1.5, 2.0]))
    (tensor([1.5000, 2.0000]), tensor([0., 0.]))
    """

    bijective = True
    domain = constraints.real_vector

    def __init__(self, dated: DatedTopology) -> None:
        super().__init__()
        self.dated = dated
        self.codomain = NodeHeights(dated)
        self._parents = dated.parents[dated.num_taxa :].clone()  # of the internal nodes but the root
        self._bounds = dated.lower_bounds[:-1].clone()
        self._steps = dated.lower_bounds[self._parents] - self._bounds
        # The ancestor of each internal node one, two, four, ... generations above it; that of the root is itself.
        above = torch.cat([self._parents, self._parents.new_tensor([len(self._parents)])])
        self._above = [above]
        while bool((above < len(self._parents)).any()):
            above = above[above]
            self._above.append(above)
        self._root = BoundedExponential()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RatioTransform) and self.dated is other.dated

    __hash__ = None  # type: ignore[assignment]

    def _call(self, x: Tensor) -> Tensor:
        # With H the height above the bound, H = r (H_parent + step), r being the ratio: a linear map of the parent's,
        # and by joining maps of the parent's parent's, and so on to that of the root, which is known.
        ratios = x[..., :-1].sigmoid()
        root = self._root(x[..., -1:])
        offset, factor = (
            torch.cat([ratios * self._steps.to(x), root], -1),
            torch.cat([ratios, torch.zeros_like(root)], -1),
        )
        for above in self._above[:-1]:
            offset, factor = offset + factor * offset[..., above], factor * factor[..., above]
        return self.dated.lower_bounds.to(x) + offset + factor * offset[..., self._above[-1]]

    def _inverse(self, y: Tensor) -> Tensor:
        tiny = torch.finfo(y.dtype).tiny  # of heights that are rounded to an end of their range
        above_bound = (y - self.dated.lower_bounds.to(y)).clamp(min=tiny).log()
        below_parent = (y[..., self._parents] - y[..., :-1]).clamp(min=tiny).log()
        return torch.cat([above_bound[..., :-1] - below_parent, above_bound[..., -1:]], -1)

    def log_abs_det_jacobian(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the log determinant, shape `(*batch)`."""
        ranges = y[..., self._parents] - self._bounds.to(y)
        inner = ranges.log() + logsigmoid(x[..., :-1]) + logsigmoid(-x[..., :-1])
        return inner.sum(-1) + self._root.log_abs_det_jacobian(x[..., -1], y[..., -1])


@biject_to.register(NodeHeights)
@transform_to.register(NodeHeights)
def _ratios(support: Any) -> RatioTransform:
    return RatioTransform(support.dated)
