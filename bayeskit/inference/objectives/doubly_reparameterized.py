"""The importance-weighted bound with the doubly reparameterised gradient of the guide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions import Delta
from torch import Tensor

from bayeskit.errors import GuideError
from bayeskit.inference.objectives.gate import Gate
from bayeskit.inference.objectives.objective import Draw, Objective, log_mean_exp
from bayeskit.inference.objectives.sites import Site, require_reparameterized, unwrapped


class DReG(Objective):
    """Importance-weighted bound whose guide gradient does not drown in noise as particles are added.

    With normalised weights ``v``, the guide follows the sum over particles of ``v**2`` times the gradient of the log
    weight along the draw; this has the expectation of the gradient of IWAE. The model follows IWAE.

    Parameters
    ----------
    num_particles : int, default 16
        One gives :class:`STL`.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Raises
    ------
    GuideError
        When run with a guide that has a site whose draws carry no gradient, such as a discrete one, or, with several
        particles, a site that is masked, scaled, or subsampled otherwise than the data.

    References
    ----------
    Tucker, G., Lawson, D., Gu, S., Maddison, C. J. (2019). Doubly reparameterized gradient estimators for Monte
    Carlo objectives. ICLR.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import DReG
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> slope = torch.tensor(0.5, requires_grad=True)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(slope * x, 0.5**0.5))  # the exact posterior
    >>> DReG(num_particles=4)(model, guide)(torch.tensor([1.0, -0.5])).backward()
    >>> abs(slope.grad.item()) < 1e-5
    True
    """

    def __init__(
        self,
        num_particles: int = 16,
        *,
        max_plate_nesting: int | None = None,
        vectorize_particles: bool = True,
        chunk_size: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(
            num_particles,
            max_plate_nesting=max_plate_nesting,
            vectorize_particles=vectorize_particles,
            chunk_size=chunk_size,
            data_plate=data_plate,
        )

    def check(self, model: Mapping[str, Site], guide: Mapping[str, Site]) -> None:
        """Compare the sites of model and guide, and refuse sites without reparameterised draws."""
        super().check(model, guide)
        require_reparameterized(guide, "DReG", "the objective IWAE, which has score terms")
        if self.num_particles > 1:
            _refuse_other_weights(model, guide)
            _refuse_parameters_as_draws(guide)

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound of each datum, ``(*batch)``."""
        gate = Gate()
        log_weight = draw(self.num_particles, path_only=True, gate=gate).log_weight
        # The bound brings each weight once; the gate brings it a second time, for the guide alone.
        gate.factor = log_weight.detach().softmax(0)
        return log_mean_exp(log_weight)


def _refuse_other_weights(model: Mapping[str, Site], guide: Mapping[str, Site]) -> None:
    """Refuse guide sites that count for more or less than their log density: one gate cannot serve them all."""
    data = {_of_plates(site) for site in model.values() if site["is_observed"]}
    for name, site in guide.items():
        scaled = bool(((torch.as_tensor(site["scale"]) / _of_plates(site) - 1).abs() > 1e-6).any())
        masked = site["mask"] is not None and site["mask"] is not True
        if not site["is_observed"] and (scaled or masked or data - {_of_plates(site)}):
            raise GuideError(
                f"the guide's site {name!r} is masked, scaled, or subsampled otherwise than the data, for which DReG's "
                "gradient is not that of its bound; use STL or IWAE"
            )


def _refuse_parameters_as_draws(guide: Mapping[str, Site]) -> None:
    """Refuse Delta sites of learned values: gradients of parameters are to be weighed once, those of draws twice."""
    latent = [(name, site) for name, site in guide.items() if not site["is_observed"]]
    draws = [site["value"].grad_fn for _, site in latent if not isinstance(unwrapped(site["fn"])[0], Delta)]
    for name, site in latent:
        if isinstance(unwrapped(site["fn"])[0], Delta) and _reaches_leaf(site["value"], draws):
            raise GuideError(
                f"the guide's site {name!r} is a Delta of learned values, for which DReG's gradient is not that of its "
                "bound; use STL or IWAE"
            )


def _reaches_leaf(value: Tensor, ends: list[Any]) -> bool:
    """Whether a gradient of the value reaches a parameter on a way on which none of the nodes given stands."""
    if value.grad_fn is None:
        return value.requires_grad
    waiting, seen = [value.grad_fn], {*ends}
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        if not node.next_functions:
            return True
        seen.add(node)
        waiting += [following for following, _ in node.next_functions if following is not None]
    return False


def _of_plates(site: Site) -> float:
    """Return the scale that the site's plates give it, by the rows that they leave out."""
    frames = site["cond_indep_stack"]
    return math.prod(f.full_size / f.size for f in frames if f.full_size is not None and f.size)
