"""Samplers of other libraries, run on a Target: Pyro's No-U-Turn sampler, chain after chain."""

from __future__ import annotations

import math
import time
from typing import Any

import torch
from pyro.infer.mcmc import NUTS as PyroNUTS
from torch import Tensor

from bayeskit._evaluation import Evaluation
from bayeskit._progress import Bar, progress_bar
from bayeskit._torch import global_stream, new_generator, one_thread, validation_kept
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.initial import starting_points
from bayeskit.target import Target


def sample_with_pyro(
    target: Target,
    num_chains: int = 4,
    num_warmup: int = 500,
    num_samples: int = 1000,
    seed: int = 0,
    *,
    target_acceptance: float = 0.8,
    max_depth: int = 10,
    initial: Tensor | None = None,
    progress: bool = True,
) -> Draws:
    """Draw from the posterior with Pyro's own NUTS, one chain after the other.

    For models that cannot be batched, where :func:`bayeskit.sample` has nothing to gain: here no
    chain waits for another. Each chain learns its own step size and diagonal metric.

    Parameters
    ----------
    target : Target
        For example of a model with control flow on sampled values.
    num_chains : int, default 4
    num_warmup, num_samples : int, default 500 and 1000
        Adapting iterations, thrown away, and iterations kept, of each chain.
    seed : int, default 0
    target_acceptance : float in (0, 1), default 0.8
    max_depth : int, default 10
        At most ``2 ** max_depth - 1`` leapfrog steps an iteration.
    initial : Tensor, optional
        Unconstrained starting points, ``(d,)`` or ``(num_chains, d)``; by default each
        chain takes the best of ten prior draws.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    Draws
        ``sample_stats`` has ``acceptance_rate``, ``diverging``, ``n_steps``, ``tree_depth`` and ``step_size``.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    InitializationError
        If no chain has a finite density at its start.

    References
    ----------
    Bingham, E. et al. (2019). Pyro: deep universal probabilistic programming. JMLR 20, 1-6.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import sample_with_pyro
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u.sum(-1), dim=2)
    >>> draws = sample_with_pyro(target, num_chains=2, num_warmup=30, num_samples=20)
    >>> draws.unconstrained.shape
    torch.Size([2, 20, 2])
    """
    for name, value, least in (("num_chains", num_chains, 1), ("num_warmup", num_warmup, 0),
                               ("num_samples", num_samples, 1), ("max_depth", max_depth, 1)):  # fmt: skip
        if value < least:
            raise SettingsError(f"{name} must be at least {least}, not {value}")
    if not 0 < target_acceptance < 1:
        raise SettingsError(f"target_acceptance must lie in (0, 1), not {target_acceptance}")
    begin = time.monotonic()
    generator = new_generator(seed, target.device, "pyro")
    beta = torch.ones(num_chains, dtype=target.dtype, device=target.device)
    starts = starting_points(target, num_chains, beta, generator, initial)
    total = num_warmup + num_samples
    chains = []
    with one_thread(), validation_kept(), progress_bar("Pyro's NUTS", num_chains * total, progress) as bar:
        for chain, start in enumerate(starts):
            potential = _Potential(target, planned_calls=8 * total * num_chains)
            kernel = PyroNUTS(
                potential_fn=potential,
                step_size=0.1,
                target_accept_prob=target_acceptance,
                max_tree_depth=max_depth,
            )
            with global_stream(new_generator(_next_seed(generator))), torch.enable_grad():
                chains.append(_run(kernel, potential, start, num_warmup, num_samples, bar, chain * total))
    rows = {name: torch.stack([chain[name] for chain in chains]) for name in chains[0]}
    position = rows.pop("position")
    num_gradients = int(rows.pop("num_gradients").sum())
    log_prior, log_likelihood = target.evaluate(position)
    facts = {"sampler": "Pyro NUTS", "num_warmup": num_warmup, "seed": seed, "target_acceptance": target_acceptance}
    seconds = time.monotonic() - begin
    return Draws(position, log_prior, log_likelihood, beta, rows, num_gradients, seconds, facts, target)


def _next_seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**62, (), generator=generator, device=generator.device))


def _run(
    kernel: Any, potential: _Potential, start: Tensor, num_warmup: int, num_samples: int, bar: Bar, done: int
) -> dict[str, Tensor]:
    """Run one chain; return its draws and what Pyro tells of each."""
    kernel.initial_params = {"u": start}
    kernel.setup(num_warmup)
    params = kernel.initial_params
    positions: list[Tensor] = []
    stats: list[tuple[float, int, float]] = []
    mean_before = 0.0
    for iteration in range(num_warmup + num_samples):
        calls_before = potential.num_calls
        params = kernel.sample(params)
        if bar.due(done + iteration + 1):
            bar.update(done + iteration + 1, f"step {kernel.step_size:.2g}")
        if iteration < num_warmup:
            continue
        kept = len(positions) + 1
        positions.append(params["u"].detach().clone())
        # Pyro keeps the running mean of the acceptance probability, so that the last one is a difference.
        mean = float(kernel._mean_accept_prob)
        num_steps = potential.num_calls - calls_before
        stats.append((kept * mean - (kept - 1) * mean_before, num_steps, float(kernel.step_size)))
        mean_before = mean
    rates, steps, step_sizes = zip(*stats, strict=True)
    diverging = torch.zeros(num_samples, dtype=torch.bool)
    diverging[kernel.diagnostics()["divergences"]] = True
    like = {"dtype": start.dtype, "device": start.device}
    return {
        "position": torch.stack(positions),
        "acceptance_rate": torch.tensor(rates, **like).clamp(0, 1),  # type: ignore[arg-type]
        "diverging": diverging.to(start.device),
        "n_steps": torch.tensor(steps, device=start.device),
        "tree_depth": torch.tensor([math.ceil(math.log2(n + 1)) for n in steps], device=start.device),
        "step_size": torch.tensor(step_sizes, **like),  # type: ignore[arg-type]
        "num_gradients": torch.tensor(potential.num_calls),
    }


class _Potential:
    """What Pyro calls: minus the log density of ``{"u": (d,)}``, with the gradient of the traced or compiled graph."""

    def __init__(self, target: Target, planned_calls: int) -> None:
        self._evaluate = target.evaluator(1, planned_calls)
        self._beta = torch.ones(1, dtype=target.dtype, device=target.device)
        self.num_calls = 0

    def __call__(self, params: dict[str, Tensor]) -> Tensor:
        return _MinusLogDensity.apply(params["u"], self)

    def evaluate(self, u: Tensor) -> Evaluation:
        self.num_calls += 1
        return self._evaluate(u.detach().unsqueeze(0), self._beta)


class _MinusLogDensity(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, u: Tensor, potential: _Potential) -> Tensor:  # type: ignore[override]
        evaluation = potential.evaluate(u)
        context.save_for_backward(evaluation.gradient[0])
        return -evaluation.log_density[0]

    @staticmethod
    def backward(context: Any, weight: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (gradient,) = context.saved_tensors
        return -weight * gradient, None
