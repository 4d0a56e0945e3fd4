"""Held-out log likelihood of each observation by any estimator of the evidence."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._logdensity.target import Target
from bayeskit.inference.evidence import Budget, Evidence, compare
from bayeskit.inference.held_out._importance import HeldOut, Minibatches
from bayeskit.inference.objectives._drawing import Particles, run_particles


def by_evidence(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    *args: Any,
    method: str = "bridge_sampling",
    budget: Budget | None = None,
    data_plate: str | None = None,
    seed: int = 0,
    progress: bool = True,
) -> HeldOut:
    """Estimate the log likelihood of each observation as the evidence of the model for that observation alone.

    The parameters of the model are fixed, and the latent variables of one observation form a :class:`~bayeskit.Target`
    for :func:`bayeskit.inference.evidence.compare`. This takes seconds per observation and serves to check faster
    estimates on a few observations.

    Parameters
    ----------
    model, guide : callable
        As for an objective. The guide only determines the latent variables of an observation; the estimate does not
        depend on it.
    *args
        Arguments of model and guide: the data. Tensors with the data as leading dimension are sliced by row.
    method : str, default "bridge_sampling"
        Name of an estimator in :mod:`bayeskit.inference.evidence`.
    budget : Budget, optional
        Sizes of the runs for each observation.
    data_plate : str, optional
        Name of the plate of observations; by default the only plate that contains all sites.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    HeldOut
        Not trusted if any estimate is untrusted; ``num_draws`` is the largest number of evaluations.

    Raises
    ------
    UnknownNameError
        If the method is unknown.
    ModelError
        If there is no plate of observations, or a discrete latent site is not marked for enumeration.
    DataError
        If no argument holds the data.
    GuideError
        If guide and model do not match.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.evidence import Budget
    >>> from bayeskit.inference.held_out import by_evidence
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(0.4 * x, 0.8))
    >>> x = torch.tensor([1.0, -0.5])
    >>> result = by_evidence(model, guide, x, budget=Budget(num_chains=8, num_warmup=100, num_samples=200))
    >>> error = result.log_likelihood - dist.Normal(0.0, 2**0.5).log_prob(x)
    >>> result.trusted, bool((error.abs() < 4 * result.pointwise_standard_error).all())
    (True, True)
    """
    begin = time.monotonic()
    generator = new_generator(seed, stream="held-out evidence")
    with global_stream(generator):
        data = Minibatches.of(model, guide, args, 1, data_plate)
        used = _parameters(model, guide, args, data)
    found: list[Evidence] = []
    with _fixed(used), progress_bar(method.replace("_", " "), data.num_data, progress) as bar:
        for _, datum in data:
            # Separate seeds, because errors of different observations have to be independent.
            own = int(torch.randint(2**31, (), generator=generator))
            target = Target.from_pyro(model, *datum, compile=False, seed=own)
            found.append(compare(target, [method], seed=own, budget=budget, progress=False)[method])
            bar.update(len(found))
    problems = tuple(f"datum {i}: {problem}" for i, z in enumerate(found) for problem in z.warnings)
    return HeldOut(
        method,
        torch.tensor([z.log_evidence for z in found], dtype=torch.float64, device=target.device),
        torch.tensor([z.standard_error for z in found], dtype=torch.float64, device=target.device),
        max(z.num_evaluations for z in found),
        None,
        problems,
        time.monotonic() - begin,
    )


def _parameters(
    model: Callable[..., Any], guide: Callable[..., Any], args: tuple[Any, ...], data: Minibatches
) -> list[Tensor]:
    """Return every parameter on which the densities depend, from their autograd graph."""
    with torch.enable_grad():
        particles: Particles = run_particles(
            model, guide, args, {}, num_particles=1, nesting=data.nesting, data_plate=data.data_plate
        )
    waiting, seen, leaves = [t.grad_fn for t in particles.tensors()], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.append(node.variable)
        waiting += [before for before, _ in node.next_functions]
    return leaves


@contextmanager
def _fixed(parameters: list[Tensor]) -> Iterator[None]:
    """Treat parameters as constants inside the context."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        with warnings.catch_warnings():
            # This Pyro warning does not apply: fixing the parameters is intended.
            warnings.filterwarnings("ignore", ".*was not registered in the param store", UserWarning)
            yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
