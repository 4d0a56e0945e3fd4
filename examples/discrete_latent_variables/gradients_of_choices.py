"""Gradients of an expectation over choices: estimators beside the exact answer, and one that is biased on purpose.

Five bits z, drawn with logits a, cost f(z) = (sum_i w_i z_i - 3)^2. Wanted: the gradient of E f(z) in a. With 32 points
everything can be enumerated, so that each estimator can be judged: its bias in standard errors, its variance, and what
a gradient costs. A set drawn without replacement never evaluates a point twice; the relaxation is smooth and wrong.
"""

import os

import pyro
import pyro.distributions as dist
import torch

from bayeskit.inference import gradients
from bayeskit.inference.objectives import ELBO

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 3.0, 1.5], dtype=torch.float64)
LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, -0.5], dtype=torch.float64)


def cost(z: torch.Tensor) -> torch.Tensor:
    """Return f at points, `(*points, 5)` to `(*points)`; points between corners are welcome."""
    return ((z * WEIGHTS).sum(-1) - 3.0).square()


def main() -> None:
    """Compare, look, and train a guide."""
    bits = dist.Bernoulli(logits=LOGITS.clone().requires_grad_(True)).to_event(1)

    # The exact twin: all 32 points, by hand.
    points = bits.base_dist.enumerate_support(expand=False)
    points = torch.cartesian_prod(*[points.flatten()] * 5)
    by_hand = (bits.log_prob(points).exp() * cost(points)).sum()
    (exact,) = torch.autograd.grad(by_hand, bits.base_dist.logits)
    assert torch.allclose(gradients.Enumeration().estimate(bits, cost), exact, rtol=1e-12)

    estimators = [
        gradients.ScoreFunction(4),
        gradients.LeaveOneOut(4),
        gradients.UnorderedSet(4),
        gradients.UnorderedSet(4, baseline=True),
        gradients.RaoBlackwell(3),
        gradients.DisARM(2),
        gradients.GumbelSoftmax(1.0, num_samples=4),
    ]
    table = gradients.compare(bits, cost, estimators, num_replicates=2_000 if SMALL else 20_000)
    print(table)
    for found in table.results.values():
        assert not found.unbiased or abs(found.largest_z) < 5.0
    # The failure on purpose: the relaxed function is not the function, and no number of draws mends that.
    assert abs(table["GumbelSoftmax(temperature=1.0, num_samples=4)"].largest_z) > 10.0
    assert table["UnorderedSet(k=4)"].variance < table["ScoreFunction(num_samples=4)"].variance
    left, _ = table.plot()
    if not SMALL:
        left.figure.savefig("gradients_of_choices.png", dpi=100)

    # The same estimator in a guide of Pyro: a posterior over the bits, whose bound enumeration knows exactly.
    def model() -> None:
        z = pyro.sample("z", dist.Bernoulli(0.5 * torch.ones(5, dtype=torch.float64)).to_event(1))
        pyro.sample("x", dist.Normal((z * WEIGHTS).sum(-1), 1.0), obs=torch.tensor(3.0, dtype=torch.float64))

    logits = torch.zeros(5, dtype=torch.float64, requires_grad=True)

    def guide() -> None:
        infer = {"gradient": gradients.UnorderedSet(4, baseline=True)}
        pyro.sample("z", dist.Bernoulli(logits=logits).to_event(1), infer=infer)

    optimizer, objective = torch.optim.Adam([logits], lr=0.05), ELBO()
    torch.manual_seed(0)
    for _ in range(400):
        optimizer.zero_grad()
        objective.differentiable_loss(model, guide).backward()
        optimizer.step()
    fitted = dist.Bernoulli(logits=logits.detach()).to_event(1)
    log_joint = -0.5 * cost(points) - 0.5 * torch.tensor(2 * torch.pi).log() - 5 * torch.tensor(2.0).log()
    bound = (fitted.log_prob(points).exp() * (log_joint - fitted.log_prob(points))).sum()
    print(f"\nbound of the fitted guide {float(bound):.3f}, log evidence {float(log_joint.logsumexp(0)):.3f}")
    assert float(log_joint.logsumexp(0) - bound) < 1.0


if __name__ == "__main__":
    main()
