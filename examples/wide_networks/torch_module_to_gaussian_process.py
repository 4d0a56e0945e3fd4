r"""From a torch module to its Gaussian process: ReLU networks on the progress of diabetes.

What you will learn: how a module that you already have becomes a model whose evidence is known, and how the evidence
chooses its depth and the variances of its weights and biases.

As hidden layers grow, a network with random weights becomes a Gaussian process: :math:`f \sim GP(0, k_{v})`, whose
covariance follows from the module's layers and the variances :math:`v` of weights and biases. With normal noise,

.. math:: y \sim N(0, K_v(x, x) + \sigma^2 I),

the function is integrated out in closed form, so that depth and variances can be compared by their likelihood.
The data are ten measurements of patients and the progress of their diabetes a year later (Efron et al. 2004).
"""

import os

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_diabetes
from torch import nn

import bayeskit as bk
from bayeskit.inference import evidence
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import RegressionModel, fit_depths

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
TRAIN, DEPTHS = (60, (1, 2)) if SMALL else (250, (1, 2, 3, 5, 8))


def make_network(depth: int) -> nn.Module:
    """Return the module that a user already has; its widths do not matter to the limit."""
    hidden = [layer for _ in range(depth - 1) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(nn.Linear(10, 64), nn.ReLU(), *hidden, nn.Linear(64, 1))


def load() -> tuple[torch.Tensor, ...]:
    """Return standardised training and test data."""
    x, y = (torch.tensor(v, dtype=torch.float64) for v in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    x = x / x[train].std(0)
    y = (y - y[train].mean()) / y[train].std()
    return x[train], y[train], x[test], y[test]


def main() -> None:
    x, y, x_test, y_test = load()
    compared = fit_depths(make_network, DEPTHS, x, y, num_starts=1 if SMALL else 3, seed=0)
    print(f"{len(x)} patients:\n{compared}")
    best = compared.fits[compared.best]
    assert best.posterior.jitter == 0.0

    mean = best.posterior.mean(x_test)
    spread = (best.posterior.variance(x_test) + best.noise_variance).sqrt()
    error = (mean - y_test).square()
    inside = ((mean - y_test).abs() < 1.96 * spread).double().mean()
    print(f"test error {float(error.mean()):.3f} +- {float(error.std()) / len(error) ** 0.5:.3f} of the variance,")
    print(f"{float(inside):.1%} of test data in their 95 % intervals")
    assert float(error.mean()) < 0.9 and 0.85 < float(inside) <= 1.0

    # The same model with priors on its three variances, of fewer patients: their evidence by sampling, with its error.
    few = slice(0, 25 if SMALL else 100)
    vague = infinite_width(make_network(compared.best), weight_variance=2.0, bias_variance=0.1)
    target = bk.Target.from_pyro(RegressionModel(vague), x[few], y[few])
    chains, length = (8, 40) if SMALL else (8, 300)
    draws = bk.sample(target, num_chains=chains, num_warmup=100, num_samples=length, seed=0, progress=False)
    estimate = evidence.bridge_sampling(target, draws, seed=0)
    print(f"the first {len(x[few])} of these patients, with priors on the variances:")
    print(f"log evidence {estimate.log_evidence:.3f} +- {estimate.standard_error:.3f}")

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    compared.plot(axes[0]).set(xlabel="hidden layers")
    axes[1].errorbar(mean[:40], y_test[:40], xerr=1.96 * spread[:40], fmt="o", alpha=0.6)
    axes[1].axline((0, 0), slope=1, color="grey")
    axes[1].set(xlabel="prediction with 95 % interval", ylabel="progress")
    if not SMALL:
        figure.savefig("torch_module_to_gaussian_process.png", dpi=100)


if __name__ == "__main__":
    main()
