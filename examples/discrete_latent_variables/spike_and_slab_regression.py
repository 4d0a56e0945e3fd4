"""Which measurements predict how diabetes progresses? The exact posterior over all subsets of predictors.

What you will learn: how probable it is that each of ten predictors belongs into a linear regression, how predictions
that are averaged over subsets do beside those of least squares, and how close a guide of independent bits, trained by
a gradient estimator for discrete sites, comes to the exact posterior.

Of 442 patients ten measurements and the progression a year later are known (Efron et al. 2004). The model:

    in or out of each predictor ~ all numbers of predictors equally probable,
    sigma^2 ~ InverseGamma(1, 1),   intercept ~ N(0, 100 sigma^2),
    coefficient = 0 where out, ~ N(0, sigma^2 / 4) where in,   y ~ N(intercept + x coefficients, sigma^2).

Everything but the subset integrates out, and there are only 1,024 subsets.
"""

import os

import pyro
import pyro.distributions as dist
import torch
from sklearn.datasets import load_diabetes

from bayeskit.distributed import global_stream
from bayeskit.inference.gradients import UnorderedSet
from bayeskit.inference.objectives import ELBO
from bayeskit.models.discrete.spike_and_slab import SpikeAndSlabRegression

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
TRAIN = 300


class IndependentBits(torch.nn.Module):
    """A guide: each predictor is in or out whatever the others are."""

    def __init__(self, p: int) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(torch.zeros(p, dtype=torch.float64))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Draw the subset."""
        site = dist.Bernoulli(logits=self.logits).to_event(1)
        pyro.sample("inclusion", site, infer={"gradient": UnorderedSet(k=4, baseline=True)})


def train(regression: SpikeAndSlabRegression, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the guide's probabilities of predictors being in."""
    guide, steps, objective = IndependentBits(x.shape[1]), 200 if SMALL else 600, ELBO()
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.05)
    with global_stream(torch.Generator().manual_seed(0)):
        for _ in range(steps):
            optimizer.zero_grad()
            objective.differentiable_loss(regression.model, guide, x, y).backward()
            optimizer.step()
    return guide.logits.detach().sigmoid()


def main() -> None:
    data = load_diabetes()
    x, y = torch.as_tensor(data.data), torch.as_tensor(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    mean, sd = x[:TRAIN].mean(0), x[:TRAIN].std(0)
    x, y = (x - mean) / sd, (y - y[:TRAIN].mean()) / y[:TRAIN].std()

    regression = SpikeAndSlabRegression(slab_scale=0.5)
    posterior = regression.posterior(x[:TRAIN], y[:TRAIN])
    found = train(regression, x[:TRAIN], y[:TRAIN])
    print(f"log evidence {posterior.log_evidence:.3f}, over {len(posterior.subsets)} subsets")
    table = posterior.to_pandas(data.feature_names)
    table.insert(1, "guide", [1.0, *found.tolist()])
    print(table.round(3))
    inclusion = dict(zip(data.feature_names, posterior.inclusion_probabilities.tolist(), strict=True))
    assert min(inclusion["bmi"], inclusion["bp"], inclusion["s5"]) > 0.9
    assert inclusion["age"] < 0.5

    subsets, probabilities = posterior.most_probable(3)
    for subset, probability in zip(subsets, probabilities, strict=True):
        names = [name for name, bit in zip(data.feature_names, subset, strict=True) if bit]
        print(f"probability {probability:.3f}: {', '.join(names)}")

    # Bits that are independent cannot say that one of two correlated predictors is needed: a bound tells the price.
    bits = dist.Bernoulli(found).to_event(1).log_prob(posterior.subsets)
    log_joint = posterior.probabilities.log() + posterior.log_evidence
    bound = float((bits.exp() * (log_joint - bits)).sum())
    print(f"the guide's exact bound is {bound:.3f}, {posterior.log_evidence - bound:.3f} nats below the log evidence")
    assert bound < posterior.log_evidence

    design = torch.cat([torch.ones(len(x), 1, dtype=x.dtype), x], 1)
    squares = torch.linalg.lstsq(design[:TRAIN], y[:TRAIN].unsqueeze(-1)).solution
    averaged = (posterior.predict(x[TRAIN:]) - y[TRAIN:]).square().mean()
    plain = ((design[TRAIN:] @ squares).squeeze(-1) - y[TRAIN:]).square().mean()
    print(f"mean squared error of {len(y) - TRAIN} others: {averaged:.4f} averaged, {plain:.4f} by least squares")
    assert averaged < 0.7


if __name__ == "__main__":
    main()
