"""Bounds from both sides on the log likelihood of data simulated from the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pyro import poutine
from pyro.distributions import Unit
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit._pyro.draws import MendedDraws
from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import ModelError
from bayeskit.inference.held_out.annealing_path import AnnealingPath, sigmoid_schedule
from bayeskit.inference.held_out.minibatches import Minibatches, already_validated, positive, require_acceptance
from bayeskit.inference.objectives.latent_density import LatentDensity
from bayeskit.inference.samplers import HMC


@dataclass(frozen=True)
class Sandwich:
    """Stochastic lower and upper bounds on the log likelihood of simulated data.

    Attributes
    ----------
    lower, upper : Tensor
        Of each datum, ``(items,)``, in nats. Each holds in expectation, up to Monte Carlo noise that falls on either
        side.
    """

    lower: Tensor
    upper: Tensor

    @property
    def gap(self) -> float:
        """Mean distance of the bounds: in expectation, no less than the mean error of either."""
        return float((self.upper - self.lower).mean())

    @property
    def gap_standard_error(self) -> float:
        """Standard error of :attr:`gap`, from how it varies over the data."""
        return float((self.upper - self.lower).std()) / math.sqrt(len(self.lower))


def bidirectional_annealing(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    num_temperatures: int = 200,
    num_chains: int = 16,
    initial: Literal["prior", "guide"] = "guide",
    kernel: HMC | None = None,
    target_acceptance: float = 0.8,
    batch_size: int | None = None,
    data_plate: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Sandwich:
    """Check annealed importance sampling on data of the model's own, of which exact posterior draws are known.

    Codes and data are drawn from the model. Annealing from guide or prior to the joint density bounds the log
    likelihood from below; annealing back from the codes, which are a draw from the posterior, bounds it from above.
    Where the bounds meet, the same settings can be relied on for data like these.

    Parameters
    ----------
    model, guide : callable
        As for :func:`annealed_importance_sampling`.
    *args
        What both are called with. Observed tensors only give the shape of the data to simulate.
    num_temperatures, num_chains, initial, kernel, target_acceptance, batch_size, data_plate, seed, progress
        As for :func:`annealed_importance_sampling`.

    Returns
    -------
    Sandwich

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    ModelError
        If data cannot be simulated, because the model has a factor or does not observe its arguments as they are.
    GuideError
        If guide and model do not fit together, or a latent site is discrete.

    References
    ----------
    Grosse, R. B., Ghahramani, Z., Adams, R. P. (2015). Sandwiching the marginal likelihood using bidirectional Monte
    Carlo. arXiv:1511.02543.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import bidirectional_annealing
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.4 * x, 0.8))
    >>> bounds = bidirectional_annealing(model, guide, torch.zeros(100), num_temperatures=20)
    >>> abs(bounds.gap) < 0.05
    True
    """
    positive(num_temperatures=num_temperatures, num_chains=num_chains, batch_size=batch_size)
    require_acceptance(target_acceptance)
    host = new_generator(seed, stream="bidirectional annealing")
    with global_stream(host):
        data = Minibatches.of(model, guide, args, batch_size, data_plate)
    device = data.particles.log_likelihood.device
    generator = host if device.type == "cpu" else new_generator(seed, device, stream="bidirectional annealing")
    betas, forward, backward = sigmoid_schedule(num_temperatures), [], []
    total, done = 2 * num_temperatures * -(-data.num_items // data.batch_size), 0
    with torch.no_grad(), already_validated(), progress_bar("annealing both ways", total, progress) as bar:
        for _, batch in data:

            def density_of(arguments: tuple[Any, ...], num_particles: int) -> LatentDensity:
                return LatentDensity.from_pyro(
                    model,
                    guide,
                    arguments,
                    num_particles=num_particles,
                    nesting=data.nesting,
                    data_plate=data_plate,
                    initial=initial,
                )

            with global_stream(host):
                simulated, codes = _simulated(model, batch)
                position = density_of(simulated, 1).flatten(codes).repeat(num_chains, 1)
                density = density_of(simulated, num_chains)
            path = AnnealingPath(density, kernel or HMC(step_size=0.1, num_steps=5), generator)
            step_sizes = path.pilot(betas, target_acceptance)
            forward.append(path.anneal(betas, step_sizes, bar, done))
            backward.append(path.anneal_back(betas, step_sizes, position, bar, done + num_temperatures))
            done += 2 * num_temperatures
    log_count = math.log(num_chains)
    lower = torch.cat(forward, 1).logsumexp(0) - log_count
    upper = log_count - (-torch.cat(backward, 1)).logsumexp(0)
    return Sandwich(lower, upper)


def _simulated(model: Callable[..., Any], args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Tensor]]:
    """Draw codes and data; return the arguments with the data in place of those observed, and the codes."""
    with MendedDraws():
        given: Mapping[str, Any] = poutine.trace(model).get_trace(*args).nodes
        drawn: Mapping[str, Any] = poutine.trace(poutine.uncondition(model)).get_trace(*args).nodes
    data: dict[int, Tensor] = {}
    codes: dict[str, Tensor] = {}
    for name, site in given.items():
        if site["type"] != "sample" or name not in drawn or site["infer"].get("_deterministic"):
            continue
        if not site["is_observed"]:
            codes[name] = drawn[name]["value"]
            continue
        found = [i for i, x in enumerate(args) if x is site["value"]]
        if isinstance(site["fn"], Unit) or not found:
            raise ModelError(
                f"data of site {name!r} cannot be simulated, because "
                + ("it is a factor" if isinstance(site["fn"], Unit) else "what it observes is no argument of the model")
                + "; write the model with pyro.sample(..., obs=x) of an argument x"
            )
        data[found[0]] = drawn[name]["value"]
    return tuple(data.get(i, x) for i, x in enumerate(args)), codes
