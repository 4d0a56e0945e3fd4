"""Held-out log likelihood by annealed importance sampling with Hamiltonian Monte Carlo."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from bayeskit._progress import progress_bar
from bayeskit._statistics import pareto_shape
from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import SettingsError
from bayeskit.inference.held_out.annealing_path import AnnealingPath, sigmoid_schedule
from bayeskit.inference.held_out.minibatches import Minibatches, already_validated, positive, require_acceptance
from bayeskit.inference.held_out.result import MAX_SHARE, HeldOut, tail_problems
from bayeskit.inference.objectives.latent_density import LatentDensity
from bayeskit.inference.samplers import HMC

MIN_FOR_TAIL = 100  # chains from which the tail of their weights can be seen
MAX_ERROR = 0.5  # of a log likelihood, beyond which the delta method means nothing


def annealed_importance_sampling(
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
) -> HeldOut:
    r"""Estimate the log likelihood of each datum by annealing from guide or prior to the joint density.

    Chains start from independent draws of :math:`p_0`, the guide or the prior, and move through
    :math:`p_0^{1-\beta} p(x, z)^\beta` as :math:`\beta` goes from 0 to 1. The mean of their weights is unbiased; its
    log is too low by half its squared standard error, up to terms of higher order. Each datum has a step size of its
    own at each temperature, found by a pilot run with other draws and frozen then, so that it brings no bias.

    Parameters
    ----------
    model, guide : callable
        As for an objective. The latent variables of each datum and its observation stand in one plate; all are
        continuous.
    *args
        What both are called with: the data.
    num_temperatures : int, default 200
        Steps from 0 to 1, spaced by :func:`sigmoid_schedule`, with one transition of the kernel after each.
    num_chains : int, default 16
        Independent chains for each datum, at least two.
    initial : {"guide", "prior"}, default "guide"
        Where chains start. A guide that is narrower than the posterior anneals badly; the prior never is.
    kernel : HMC, optional
        Its step size is where the pilot starts; by default ``HMC(step_size=0.1, num_steps=5)``.
    target_acceptance : float, default 0.8
    batch_size : int, optional
        As in :func:`importance_sampling`.
    data_plate : str, optional
        Name of the plate whose items are the data; by default the only one that holds all sites.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    HeldOut
        With Pareto k from 100 chains on. Not trusted if for more than 5 % of the data k is above 0.7 or the standard
        error above 0.5.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    GuideError
        If guide and model do not fit together, or a latent site is discrete.
    ModelError
        If there is no plate of data.

    References
    ----------
    Neal, R. M. (2001). Annealed importance sampling. Statistics and Computing 11, 125-139.

    Wu, Y., Burda, Y., Salakhutdinov, R., Grosse, R. (2017). On the quantitative analysis of decoder-based generative
    models. ICLR.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.held_out import annealed_importance_sampling
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.4 * x, 0.5))
    >>> x = torch.tensor([1.0, -0.5])
    >>> result = annealed_importance_sampling(model, guide, x, num_temperatures=20)
    >>> error = result.log_likelihood - dist.Normal(0.0, 2**0.5).log_prob(x)
    >>> result.trusted, bool((error.abs() < 4 * result.pointwise_standard_error).all())
    (True, True)
    """
    positive(num_temperatures=num_temperatures, num_chains=num_chains, batch_size=batch_size)
    if num_chains < 2:
        raise SettingsError("num_chains must be at least 2: the standard error comes from chains that differ")
    require_acceptance(target_acceptance)
    begin = time.monotonic()
    host = new_generator(seed, stream="held-out annealed importance sampling")
    with global_stream(host):
        data = Minibatches.of(model, guide, args, batch_size, data_plate)
    device = data.particles.log_likelihood.device
    generator = host if device.type == "cpu" else new_generator(seed, device, stream="annealed importance sampling")
    betas = sigmoid_schedule(num_temperatures)
    parts: list[Tensor] = []
    total = num_temperatures * -(-data.num_items // data.batch_size)
    with torch.no_grad(), already_validated(), progress_bar("annealing", total, progress) as bar:
        for _, batch in data:
            with global_stream(host):
                density = LatentDensity.from_pyro(
                    model,
                    guide,
                    batch,
                    num_particles=num_chains,
                    nesting=data.nesting,
                    data_plate=data_plate,
                    initial=initial,
                )
            path = AnnealingPath(density, kernel or HMC(step_size=0.1, num_steps=5), generator)
            step_sizes = path.pilot(betas, target_acceptance)
            parts.append(path.anneal(betas, step_sizes, bar, len(parts) * num_temperatures))
    log_weight = torch.cat(parts, 1).to(torch.float64)
    return _summarised(log_weight, data.particles.log_likelihood.dtype, time.monotonic() - begin)


def _summarised(log_weight: Tensor, dtype: torch.dtype, seconds: float) -> HeldOut:
    """Gather log weights ``(K, items)``."""
    count = len(log_weight)
    lost = int(log_weight.isnan().sum())
    log_weight = torch.where(log_weight.isnan(), -torch.inf, log_weight)
    log_likelihood = log_weight.logsumexp(0) - math.log(count)
    error = (log_weight - log_likelihood).exp().std(0) / math.sqrt(count)
    pareto_k, problems = None, []
    if count >= MIN_FOR_TAIL:
        shapes = [pareto_shape(column) for column in log_weight.T]
        pareto_k = torch.tensor(shapes, dtype=torch.float64, device=log_weight.device)
        problems += tail_problems(pareto_k, "use more temperatures, or start at the prior")
    vague = float((~(error <= MAX_ERROR)).to(torch.float64).mean())
    if vague > MAX_SHARE:
        problems.append(
            f"the chains of {100 * vague:.1f} % of the data disagree (standard error above {MAX_ERROR}): use more "
            "temperatures, or start at the prior"
        )
    if lost:
        problems.append(f"{lost} weights are NaN and were counted as zero: mend the model or the guide")
    error = torch.hypot(error, torch.finfo(dtype).eps * log_likelihood.abs())
    return HeldOut("annealed_importance_sampling", log_likelihood, error, count, pareto_k, tuple(problems), seconds)
