"""Importance-weighted and Renyi bounds, and the doubly reparameterized gradient."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from pyro.distributions import Delta
from torch import Tensor

from bayeskit.errors import GuideError, SettingsError
from bayeskit.inference.gradients._score_function import importance_weighted_estimate, leave_one_out_bound
from bayeskit.inference.objectives._drawing import Gate, Site, require_reparameterized, unwrapped
from bayeskit.inference.objectives._objective import Draw, Objective, with_gradient_of
from bayeskit.inference.objectives._objective import log_mean_weight as log_mean_exp

# The importance-weighted bound of Burda, Grosse and Salakhutdinov, for continuous and discrete guides.


class _ManyParticles(Objective):
    """Objectives without other settings than the base class, by default with 16 particles."""

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


class IWAE(_ManyParticles):
    """Importance-weighted bound: the expected log mean of ``num_particles`` weights per observation.

    Reparameterized sites of the guide use pathwise gradients. Other sites, such as discrete sites, use the score
    function with a leave-one-out baseline for each particle (VIMCO).

    Parameters
    ----------
    num_particles : int, default 16
        1 gives the ELBO.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    References
    ----------
    Burda, Y., Grosse, R., Salakhutdinov, R. (2016). Importance weighted autoencoders. ICLR. Mnih, A., Rezende, D.
    (2016). Variational inference for Monte Carlo objectives. ICML.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import IWAE
    >>> def model(x):
    ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))  # the exact posterior
    >>> x = torch.tensor(1.0)
    >>> loss = IWAE(num_particles=4).loss(model, guide, x)
    >>> abs(loss + dist.Normal(0.0, 2**0.5).log_prob(x).item()) < 1e-5
    True
    """

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound for each observation, ``(*batch)``."""
        particles = draw(self.num_particles)
        return importance_weighted_estimate(particles.log_weight, particles.log_score)


# The importance-weighted bound with the doubly reparameterized gradient of the guide.


class DReG(_ManyParticles):
    """Importance-weighted bound with the doubly reparameterized gradient of the guide.

    With normalized weights ``v``, the guide gradient is the sum over particles of ``v**2`` times the pathwise
    gradient of the log weight. Its expectation equals the IWAE gradient, and its signal-to-noise ratio does not fall
    as particles are added. The model gradient is the gradient of IWAE.

    Parameters
    ----------
    num_particles : int, default 16
        1 gives :class:`STL`.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Raises
    ------
    GuideError
        On running a guide with a site without reparameterized draws, such as a discrete site, or, with several
        particles, a site that is masked, scaled, or subsampled differently from the data.

    References
    ----------
    Tucker, G., Lawson, D., Gu, S., Maddison, C. J. (2019). Doubly reparameterized gradient estimators for Monte Carlo
    objectives. ICLR.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import DReG
    >>> def model(x):
    ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> slope = torch.tensor(0.5, requires_grad=True)
    >>> def guide(x):
    ...     pyro.sample("z", dist.Normal(slope * x, 0.5**0.5))  # the exact posterior
    >>> DReG(num_particles=4)(model, guide)(torch.tensor(1.0)).backward()
    >>> abs(slope.grad.item()) < 1e-5
    True
    """

    def check(self, model: Mapping[str, Site], guide: Mapping[str, Site]) -> None:
        """Check that model and guide match and that all guide sites are reparameterized."""
        super().check(model, guide)
        require_reparameterized(guide, "DReG", "the objective IWAE, which has score terms")
        if self.num_particles > 1:
            _refuse_other_weights(model, guide)
            _refuse_parameters_as_draws(guide)

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound for each observation, ``(*batch)``."""
        gate = Gate()
        log_weight = draw(self.num_particles, path_only=True, gate=gate).log_weight
        # The bound multiplies by each weight once; the gate multiplies by it again, for the guide only.
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


# Bounds from Renyi divergences; special cases are the ELBO, IWAE and the largest weight.

# Threshold of the power below which the log power mean is expanded about the mean log weight.
_SMALL_POWER = 1e-3


def renyi_bound(log_weight: Tensor, alpha: float) -> Tensor:
    """Return the log of the power mean of the weights, with power ``1 - alpha``, ``(K, *batch) -> (*batch)``."""
    # alpha = -inf gives the largest log weight, alpha = inf the smallest, alpha = 1 the mean.
    power = 1.0 - alpha
    if math.isinf(power):
        return log_weight.amax(0) if power > 0 else log_weight.amin(0)
    if abs(power) >= _SMALL_POWER:
        return log_mean_exp(power * log_weight) / power
    centre = log_weight.mean(0)
    if power == 0:
        return centre
    return centre + torch.log1p(torch.expm1(power * (log_weight - centre)).mean(0)) / power


def leave_one_out_renyi(log_weight: Tensor, alpha: float) -> Tensor:
    """Return, for each particle, a guess at the bound from the other particles alone, ``(K, *batch)``."""
    power = 1.0 - alpha
    count = len(log_weight)
    if math.isinf(power):
        signed = log_weight if power > 0 else -log_weight
        best = signed.topk(2, 0)
        top = torch.arange(count, device=signed.device).reshape(-1, *(1,) * (signed.dim() - 1)) == best.indices[0]
        others = torch.where(top, best.values[1], best.values[0])
        return others if power > 0 else -others
    if abs(power) >= _SMALL_POWER:
        return leave_one_out_bound(power * log_weight) / power
    return (log_weight.sum(0) - log_weight) / (count - 1)


def renyi_estimate(log_weight: Tensor, alpha: float, log_score: Tensor | None = None) -> Tensor:
    """Return the Renyi bound, ``(K, *batch) -> (*batch)``, with a gradient that is right whatever the guide draws."""
    # log_score: (K, *batch), log guide density of the draws without a gradient.
    bound = renyi_bound(log_weight, alpha)
    if log_score is None:
        return bound
    detached = log_weight.detach()
    signal = bound.detach() - (leave_one_out_renyi(detached, alpha) if len(detached) > 1 else 0.0)
    return with_gradient_of(bound, bound + (signal * log_score).sum(0))


class Renyi(Objective):
    """Variational Renyi bound: the expected log power mean of ``num_particles`` weights per observation.

    Reparameterized sites of the guide use pathwise gradients. Other sites, such as discrete sites, use the score
    function with a leave-one-out baseline for each particle.

    Parameters
    ----------
    alpha : float
        Order of the divergence: 1 is the ELBO, 0 is IWAE, ``-inf`` uses only the largest weight ("VR-max"), ``inf``
        only the smallest. Values above 1 are mode-seeking; values below 0 are mass-covering.
    num_particles : int, default 16
        1 gives the ELBO for every ``alpha``.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If ``alpha`` is not a number; infinities are allowed.

    Notes
    -----
    With infinitely many particles the bound is below the log marginal likelihood for positive ``alpha`` and above it
    for negative ``alpha``. A finite number of particles biases the estimate downward for ``alpha < 1`` and upward for
    ``alpha > 1``, so for negative ``alpha`` the estimate may be on either side. The gradient is unbiased for the
    expected estimate at the given number of particles.

    References
    ----------
    Li, Y., Turner, R. E. (2016). Renyi divergence variational inference. NeurIPS.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import Renyi
    >>> def model(x):
    ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))  # the exact posterior: every bound is tight
    >>> x = torch.tensor(1.0)
    >>> loss = Renyi(alpha=0.5, num_particles=4).loss(model, guide, x)
    >>> abs(loss + dist.Normal(0.0, 2**0.5).log_prob(x).item()) < 1e-5
    True
    """

    def __init__(
        self,
        alpha: float,
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
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or math.isnan(alpha):
            raise SettingsError(f"alpha must be a number (plus or minus infinity included), not {alpha!r}")
        self.alpha = float(alpha)

    def estimate(self, draw: Draw) -> Tensor:
        """Return the bound for each observation, ``(*batch)``."""
        particles = draw(self.num_particles)
        return renyi_estimate(particles.log_weight, self.alpha, particles.log_score)
