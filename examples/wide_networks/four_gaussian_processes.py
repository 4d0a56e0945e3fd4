r"""Four Gaussian processes of one wide network, and which of them trained networks follow.

What you will learn: that "the Gaussian process of a wide network" can mean four things, and how to tell them apart.

With kernel :math:`K` of outputs at initialisation (NNGP) and tangent kernel :math:`\Theta` (NTK), and data
:math:`x, y`: the NNGP posterior is Bayes' rule with the prior :math:`f \sim N(0, K)`; the NTK ensemble is the law of
:math:`f_0(\cdot) + \Theta_{\cdot x} \Theta^{-1} (1 - e^{-\eta \Theta t}) (y - f_0(x))` for :math:`f_0 \sim N(0, K)`,
which is a network after training for time :math:`t`; NTK regression is that law's mean at the end, a function without
a variance; and the NTK posterior is Bayes' rule with the prior :math:`f \sim N(0, \Theta)`, the law of no wide network.

Here 200 networks of width 256 are trained by gradient descent, and held against all four.
"""

import math
import os

import torch
from matplotlib.figure import Figure
from torch import nn
from torch.func import functional_call, grad, vmap

from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.regression import compare_gaussian_processes, ntk_ensemble

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
NUM_NETWORKS, WIDTH, NUM_STEPS = (60, 128, 60) if SMALL else (200, 256, 100)
DOUBLE = torch.float64


def train(network: nn.Module, x: torch.Tensor, y: torch.Tensor, learning_rate: float) -> dict[str, torch.Tensor]:
    """Return the weights of all networks, drawn at random and trained on half the sum of squared errors."""
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(NUM_NETWORKS, *p.shape, generator=generator, dtype=DOUBLE)
        for name, p in network.named_parameters()
    }

    def loss(one: dict[str, torch.Tensor]) -> torch.Tensor:
        return 0.5 * (functional_call(network, one, (x,))[:, 0] - y).square().sum()

    gradient = vmap(grad(loss))
    for _ in range(NUM_STEPS):
        steps = gradient(weights)
        weights = {name: w - learning_rate * steps[name] for name, w in weights.items()}
    return weights


def main() -> None:
    x = torch.tensor([[-1.2], [0.1], [1.0]], dtype=DOUBLE)
    y = torch.tensor([0.6, -0.4, 0.9], dtype=DOUBLE)
    x_new = torch.linspace(-2.0, 2.0, 101, dtype=DOUBLE)[:, None]
    module = nn.Sequential(nn.Linear(1, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 1)).double()
    kernel = infinite_width(module, weight_variance=2.0, bias_variance=0.5)

    rate = 0.5 * ntk_ensemble(kernel, x, y).largest_learning_rate
    table = compare_gaussian_processes(kernel, x, y, x_new, learning_rate=rate, time=NUM_STEPS)
    print(table)

    network = kernel.network(WIDTH, seed=0)
    weights = train(network, x, y, rate)
    with torch.no_grad():
        functions = vmap(lambda one: functional_call(network, one, (x_new,))[:, 0])(weights)

    # Neighbouring inputs share their error, so that all of them know the spread no better than one would.
    error = 1 / math.sqrt(2 * NUM_NETWORKS)
    trained, distances = functions.var(0).mean().sqrt(), {}
    print(f"{NUM_NETWORKS} networks of width {WIDTH}: standard deviation {trained:.3f} +- {trained * error:.3f}")
    for one in table:
        distances[one.name] = float((one.mean - functions.mean(0)).square().mean().sqrt())
        ratio = 0.0 if one.variance is None else float(one.variance.mean().sqrt() / trained)
        print(f"    {one.name:16}mean {distances[one.name]:.3f} away, standard deviation {ratio:.2f} times theirs")
        # The limit is off by a few over the width.
        assert one.name != "NTK ensemble" or abs(ratio - 1) < 4 * error + 8 / WIDTH
    assert distances["NTK ensemble"] < distances["NNGP posterior"] / 2

    figure = Figure(figsize=(12.4, 3.2), layout="constrained")
    axes = list(figure.subplots(1, 4, sharey=True))
    table.plot(axes=axes)
    mean, spread = functions.mean(0), 2 * functions.std(0)
    for ax in axes:  # what trained networks do, dashed in each panel
        ax.plot(x_new[:, 0].numpy(), (mean + spread).numpy(), "k--", linewidth=0.8)
        ax.plot(x_new[:, 0].numpy(), (mean - spread).numpy(), "k--", linewidth=0.8)
    if not SMALL:
        figure.savefig("four_gaussian_processes.png", dpi=150)


if __name__ == "__main__":
    main()
