"""The evidence of a Pyro model.

What you will learn: how to get the marginal likelihood of a Pyro model, and from two of them a Bayes factor
with an error bar.

Two logistic regressions compete for the same 200 answers, one with three covariates and one with only the
first of them. The data come from the small model, so that the evidence should prefer it: the two
superfluous coefficients cost prior mass and explain nothing.
"""

import os

import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.inference import evidence

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))


def logistic_regression(covariates: torch.Tensor, answers: torch.Tensor) -> None:
    """``b ~ N(0, 2^2)`` for an intercept and each covariate, ``y ~ Bernoulli(logit = b0 + x b)``."""
    width = covariates.shape[1]
    intercept = pyro.sample("intercept", dist.Normal(covariates.new_zeros(()), 2.0))
    slopes = pyro.sample("slopes", dist.Normal(covariates.new_zeros(width), 2.0).to_event(1))
    with pyro.plate("people", len(answers)):
        pyro.sample("answer", dist.Bernoulli(logits=intercept + covariates @ slopes), obs=answers)


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Return covariates ``(200, 3)`` and answers that depend on the first column only."""
    generator = torch.Generator().manual_seed(1)
    covariates = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    chance = torch.sigmoid(-0.5 + 1.2 * covariates[:, 0])
    answers = torch.bernoulli(chance, generator=generator)
    return covariates, answers


def main() -> None:
    covariates, answers = make_data()
    size = {"num_warmup": 150, "num_samples": 200} if SMALL else {"num_warmup": 500, "num_samples": 2000}
    results = {}
    for name, columns in (("one covariate", covariates[:, :1]), ("three covariates", covariates)):
        target = bk.Target.from_pyro(logistic_regression, columns, answers)
        draws = bk.sample(target, num_chains=8, seed=0, **size)
        results[name] = evidence.bridge_sampling(target, draws, seed=0)
        print(f"{name:>16}: {results[name]}")

    small, large = results["one covariate"], results["three covariates"]
    log_factor = small.log_evidence - large.log_evidence
    # The two runs are independent, so their variances add up.
    error = (small.standard_error**2 + large.standard_error**2) ** 0.5
    print(f"log Bayes factor for the smaller model: {log_factor:.3f} +- {error:.3f}")

    assert small.trusted and large.trusted
    assert log_factor > 5 * error, "the evidence should prefer the model that the data came from"


if __name__ == "__main__":
    main()
