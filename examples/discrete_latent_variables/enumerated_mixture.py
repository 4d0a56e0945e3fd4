"""A mixture with its assignments summed out.

What you will learn: how a model with discrete latent variables becomes a density over continuous ones, and
how its evidence chooses the number of components.

Mark a discrete site with ``infer={"enumerate": "parallel"}`` and it is summed out exactly; what remains is
continuous and can be sampled with Hamiltonian Monte Carlo. The means are ordered by construction, as a first
mean and a positive gap, because otherwise the components could swap names and the chains would disagree.
"""

import os

import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.inference import evidence

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def one_normal(y: torch.Tensor) -> None:
    """Draw from one normal distribution with unknown mean, standard deviation one."""
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 3.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def two_normals(y: torch.Tensor) -> None:
    """Mix two normal distributions with ordered means."""
    weight = pyro.sample("weight", dist.Beta(y.new_tensor(2.0), 2.0))
    first = pyro.sample("first", dist.Normal(y.new_zeros(()), 3.0))
    gap = pyro.sample("gap", dist.Gamma(y.new_tensor(2.0), 0.5))
    means = torch.stack([first, first + gap])
    with pyro.plate("data", len(y)):
        component = pyro.sample(
            "component",
            dist.Categorical(torch.stack([1 - weight, weight])),
            infer={"enumerate": "parallel"},
        )
        pyro.sample("y", dist.Normal(means[component], 1.0), obs=y)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(60, generator=generator, dtype=torch.float64)
    y = noise + torch.where(torch.arange(60) < 20, -1.5, 2.0)

    size = {"num_warmup": 150, "num_samples": 200} if SMALL else {"num_warmup": 500, "num_samples": 2000}
    results = {}
    for model in (one_normal, two_normals):
        target = bk.Target.from_pyro(model, y)
        draws = bk.sample(target, num_chains=8, seed=0, **size)
        results[model.__name__] = evidence.bridge_sampling(target, draws, seed=0)
        print(f"{model.__name__:>12}: {results[model.__name__]}")
        for name, values in draws.values().items():
            print(f"{'':>14}{name} = {float(values.mean()):.2f}, sd {float(values.std()):.2f}")
    factor = results["two_normals"].log_evidence - results["one_normal"].log_evidence
    print(f"log Bayes factor for two components: {factor:.2f}")
    assert all(estimate.trusted for estimate in results.values())
    assert factor > 3


if __name__ == "__main__":
    main()
