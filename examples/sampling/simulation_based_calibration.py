"""Simulation-based calibration: find out whether a sampler can be trusted on a model.

What you will learn: how to check a sampler, and a mistake in it, by simulation alone. Parameters are drawn from the
prior, data from the model; if the sampler is right, the parameters rank anywhere among its draws with equal chance.

The model is a logistic dose response. It is checked twice: with the sampler as it is, and with draws that are
pulled towards their mean, as an approximation that claims too much certainty would do. Ranks then crowd at both
ends: the truth lies outside the draws too often.
"""

import os

import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.workflows.simulation_based_calibration import sbc

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
SIZE = {"num_replicates": 20, "num_draws": 15} if SMALL else {"num_replicates": 200, "num_draws": 63}
LENGTH = 60 if SMALL else 100  # of warm-up and of what is kept


def dose_response(dose: torch.Tensor, deaths: torch.Tensor) -> None:
    """Count the deaths among ten animals at each dose."""
    intercept = pyro.sample("intercept", dist.Normal(dose.new_zeros(()), 1.5))
    slope = pyro.sample("slope", dist.Normal(dose.new_zeros(()), 1.5))
    with pyro.plate("groups", len(dose)):
        pyro.sample("deaths", dist.Binomial(10, logits=intercept + slope * dose), obs=deaths)


def sampler(target: bk.Target, seed: int) -> bk.Draws:
    """Sample with four short chains."""
    return bk.sample(target, num_chains=4, num_warmup=LENGTH, num_samples=LENGTH, seed=seed, progress=False)


def overconfident(target: bk.Target, seed: int) -> bk.Draws:
    """Pull all draws towards their mean."""
    draws = sampler(target, seed)
    mean = draws.unconstrained.mean((0, 1))
    narrow = mean + 0.4 * (draws.unconstrained - mean)
    return bk.Draws(narrow, *target.evaluate(narrow), draws.beta, target=target)


def main() -> None:
    dose = torch.tensor([-0.9, -0.3, 0.0, 0.7], dtype=torch.float64)
    deaths = torch.zeros(4, dtype=torch.float64)  # only its shape matters: the data are simulated
    right = sbc(dose_response, sampler, args=(dose, deaths), seed=1, **SIZE)
    wrong = sbc(dose_response, overconfident, args=(dose, deaths), seed=1, **SIZE)
    for name, result in (("as it is", right), ("overconfident", wrong)):
        print(f"{name}: {result}")
        print(result.to_pandas().to_string(index=False, float_format=lambda x: f"{x:.3g}"))
        if not SMALL:
            result.plot().savefig(f"calibration_{name.replace(' ', '_')}.png")
    assert right.passed
    assert not wrong.passed


if __name__ == "__main__":
    main()
