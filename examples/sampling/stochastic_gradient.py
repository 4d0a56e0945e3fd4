r"""A posterior from minibatches.

What you will learn: how to sample a Pyro model from a few hundred rows at a time, what that costs in accuracy, and
how a run measures this cost itself.

Langevin dynamics needs one gradient a step; estimated from :math:`B` of :math:`N` rows it is cheaper by
:math:`N / B`, but noisy, and nothing is accepted or rejected. The noise makes the posterior too wide, by the
factor that ``temperature`` measures. Minibatches that go through the data in epochs cancel part of each other's
noise, so there the truth is better than the measurement. Hamiltonian dynamics with friction takes out what is known
of the noise. The model is a logistic regression; the draws of :func:`bayeskit.sample`, which sees all
rows in every gradient, are the reference.
"""

import os

import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.inference.samplers import (
    SGHMC,
    SGLD,
    IndependentRows,
    Metric,
    MinibatchTarget,
    sample_stochastic_gradient,
)

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
NUM_DATA, DIM = (2_000, 5) if SMALL else (20_000, 10)
BATCH_SIZE = NUM_DATA // 20


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Draw inputs and binary outputs from a model with known weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_DATA, DIM, generator=generator, dtype=torch.float64)
    weights = torch.linspace(-1, 1, DIM, dtype=torch.float64)
    return x, torch.bernoulli(torch.sigmoid(x @ weights), generator=generator)


def logistic(x: torch.Tensor, y: torch.Tensor, batch_size: int | None = None) -> None:
    """Put a normal prior on the weights; without a batch size, all rows are taken."""
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(DIM), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size):
        inputs, outputs = pyro.subsample(x, event_dim=1), pyro.subsample(y, event_dim=0)
        pyro.sample("y", dist.Bernoulli(logits=inputs @ weights), obs=outputs)


def main() -> None:
    x, y = make_data()
    exact = bk.sample(bk.Target.from_pyro(logistic, x, y), 4, 200, 250, seed=0, progress=False)
    mean, sd = (f(exact.unconstrained.flatten(0, 1), dim=0) for f in (torch.mean, torch.std))

    epochs = MinibatchTarget.from_pyro(logistic, x, y, BATCH_SIZE)
    independent = MinibatchTarget.from_pyro(logistic, x, y, BATCH_SIZE, row_order=IndependentRows())
    # Steps are relative to a rough scale: the curvature of a row's log likelihood is at most 1/4, often about 1/8.
    metric = Metric.diagonal(1 / (1 + x.square().sum(0) / 8))
    noise = independent.gradient_variance(mean.expand(4, -1)).mean(0) * metric.factor.square()
    runs = {
        "SGLD, independent": (independent, SGLD(0.1, metric=metric)),
        "SGLD, epochs": (epochs, SGLD(0.1, metric=metric)),
        "SGHMC, independent": (independent, SGHMC(0.1, friction=2.0, gradient_noise=noise, metric=metric)),
    }
    size = (150, 100, 10) if SMALL else (500, 500, 20)
    print(f"{NUM_DATA} rows, {BATCH_SIZE} at a time; relative variance of the gradient {float(noise.mean()):.1f}")
    print(f"{'':>18}   mean is off by   variance is too large by   according to temperature   seconds")
    for name, (target, kernel) in runs.items():
        draws = sample_stochastic_gradient(target, kernel, 16, *size, seed=1, progress=False)
        samples = draws.unconstrained.flatten(0, 1)
        off = float(((samples.mean(0) - mean) / sd).abs().max())
        excess = float((samples.var(0) / sd.square()).mean())
        temperature = float(draws.sample_stats["temperature"].mean())
        print(f"{name:>18} {off:13.2f} sd {excess:24.2f} x {temperature:24.2f} x {draws.seconds:9.1f}")
        assert off < 0.5
        assert abs(excess / temperature - 1) < (0.2 if target is independent else 0.5)


if __name__ == "__main__":
    main()
