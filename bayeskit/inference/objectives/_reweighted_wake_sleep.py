"""Reweighted wake-sleep: separate objectives for model and guide."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from bayeskit._logdensity.pyro_distributions import MendedDraws
from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.inference.objectives._objective import Draw, Objective, with_gradient_of
from bayeskit.inference.objectives._objective import log_mean_weight as log_mean_exp


def reweighted_estimate(log_weight: Tensor, log_guide: Tensor, wake_phi: float = 1.0) -> Tensor:
    """Return the importance-weighted bound, ``(*batch)``, whose gradient trains model and guide."""
    # log_weight, log_guide: (K, *batch), at draws without a gradient. The guide maximizes the weighted likelihood times
    # ``wake_phi``.
    bound = log_mean_exp(log_weight + (log_guide - log_guide.detach()))
    weights = log_weight.detach().softmax(0)
    return with_gradient_of(bound, bound + wake_phi * (weights * log_guide).sum(0))


class ReweightedWakeSleep(Objective):
    """Reweighted wake-sleep, for guides with discrete or continuous sites.

    The model maximizes the importance-weighted bound. The guide minimizes the KL divergence from posterior to guide.
    The expectation uses self-normalized weights on guide draws (wake), joint draws of latent variables and data from
    the model (sleep), or both.

    Parameters
    ----------
    num_particles : int, default 16
        With 1, the normalized weight is constant and the guide's wake update is noise.
    wake_phi, sleep_phi : float, default 1.0 and 0.0
        Weights of the guide's two updates.
    observed : mapping, optional
        Position or name of the argument of model and guide that holds the data of each observed site. Required with
        ``sleep_phi``, which calls the guide with data drawn from the model.
    max_plate_nesting, vectorize_particles, chunk_size, data_plate
        As in :class:`Objective`.

    Raises
    ------
    SettingsError
        If a weight is negative, or ``sleep_phi`` is positive without ``observed``.
    ModelError
        When run, if the model has a factor or an observed site missing from ``observed``, so data cannot be drawn.
    ShapeError
        When run, if drawn data do not have the shape of the argument.

    Notes
    -----
    Self-normalized weights bias the guide's wake update by order one over the number of particles. The sleep update is
    unbiased, but for data simulated from the model instead of the observations.

    References
    ----------
    Bornschein, J., Bengio, Y. (2015). Reweighted wake-sleep. ICLR. Le, T. A., Kosiorek, A. R., Siddharth, N., Teh, Y.
    W., Wood, F. (2019). Revisiting reweighted wake-sleep for models with stochastic control flow. UAI.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import ReweightedWakeSleep
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Bernoulli(0.3))
    ...         pyro.sample("x", dist.Normal(2.5 * z - 1.0, 1.0), obs=x)
    >>> logit = torch.tensor(0.4, requires_grad=True)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Bernoulli(logits=logit))
    >>> objective = ReweightedWakeSleep(8, sleep_phi=0.5, observed={"x": 0})
    >>> objective(model, guide)(torch.full((5,), 0.7)).backward()
    >>> logit.grad is not None
    True
    """

    def __init__(
        self,
        num_particles: int = 16,
        *,
        wake_phi: float = 1.0,
        sleep_phi: float = 0.0,
        observed: Mapping[str, str | int] | None = None,
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
        for name, weight in (("wake_phi", wake_phi), ("sleep_phi", sleep_phi)):
            if not weight >= 0:
                raise SettingsError(f"{name} must not be negative, not {weight}")
        if sleep_phi and not observed:
            raise SettingsError(
                'sleep_phi needs observed, such as {"x": 0}: which argument carries the data of each observed site'
            )
        self.wake_phi, self.sleep_phi, self.observed = float(wake_phi), float(sleep_phi), dict(observed or {})

    def estimate(self, draw: Draw) -> Tensor:
        """Return the importance-weighted bound for each observation, ``(*batch)``."""
        particles = draw(self.num_particles, detached=True)
        value = reweighted_estimate(particles.log_weight, particles.log_guide_total, self.wake_phi)
        if self.sleep_phi and torch.is_grad_enabled():
            value = with_gradient_of(value, value + self.sleep_phi * self._sleep(draw))
        return value

    def _sleep(self, draw: Draw) -> Tensor:
        """Return the guide's log density of the model's own latent variables, given the model's own data."""
        with torch.no_grad(), poutine.block(), MendedDraws():
            dream = poutine.trace(poutine.uncondition(draw.model)).get_trace(*draw.args, **draw.kwargs)
        args, kwargs = list(draw.args), dict(draw.kwargs)
        sites: Mapping[str, Any] = dream.nodes
        for name, site in sites.items():
            if site["type"] != "sample" or not site["infer"].get("was_observed") or site["infer"].get("_deterministic"):
                continue
            if name not in self.observed:
                raise ModelError(
                    f"site {name!r} is observed, but observed does not tell which argument carries its data; add it, "
                    "or, if it is a factor, leave sleep_phi at 0: no data can be drawn from a factor"
                )
            _put(args, kwargs, name, self.observed[name], site["value"])
        with poutine.block():
            particles = Draw(
                self, _without_gradient(draw.model), poutine.replay(draw.guide, trace=dream), tuple(args), kwargs
            )(1)
        return particles.log_guide_total[0]


def _put(args: list[Any], kwargs: dict[str, Any], site: str, place: str | int, value: Tensor) -> None:
    """Replace the argument that carries a site's data by what the model has drawn."""
    arguments: Any = args if isinstance(place, int) else kwargs
    try:
        given = arguments[place]
    except (IndexError, KeyError):
        raise SettingsError(
            f"observed says that argument {place!r} carries the data of site {site!r}, but the step was called with "
            f"{len(args)} positional arguments and the names {sorted(kwargs)}"
        ) from None
    if not isinstance(given, Tensor) or given.shape != value.shape:
        shape = tuple(given.shape) if isinstance(given, Tensor) else f"none ({type(given).__name__})"
        raise ShapeError(
            f"site {site!r}: the model has drawn data of shape {tuple(value.shape)}, argument {place!r} has shape "
            f"{shape}; pass minibatches to the step instead of subsampling within the model"
        )
    arguments[place] = value.to(given.dtype)


def _without_gradient(model: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    return run
