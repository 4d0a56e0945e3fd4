r"""How fast finite networks approach their Gaussian process.

What you will learn: what is left of a kernel of infinite width in a network of finite width, which part of it averages
out over networks and which does not, and how to tell whether a given width is wide enough.

Given its hidden layers, a network with random weights is a Gaussian process with the random covariance :math:`\hat K`,
the product of its last features. With one hidden layer :math:`\hat K` is a mean over independent units and
:math:`E \hat K = K` at any width. The second layer bends what the first hands it,

.. math:: E\, g(\hat K) = g(K) + \tfrac12 g''(K) \operatorname{var} \hat K + \dots,

and the variance falls like one over the width; so does the bias, while a single network strays like the root of that.
On the diagonal ReLU bends nothing: half of any variance passes. Squares in place of ReLU have a bias that is known at
every width, against which the simulation is checked.
"""

import os
from collections.abc import Callable

import torch
from matplotlib.figure import Figure
from torch import nn

from bayeskit.models.wide_networks import Elementwise, infinite_width
from bayeskit.models.wide_networks.activations.polynomial import monomial
from bayeskit.models.wide_networks.empirical.finite_width import finite_width_bias
from bayeskit.models.wide_networks.empirical.regime import kernel_regime

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
NETWORKS = 8_000 if SMALL else 100_000
WIDTHS = (8, 16, 32) if SMALL else (8, 16, 32, 64)


def network(activation: Callable[[], nn.Module]) -> nn.Sequential:
    """Two hidden layers; widths are chosen later, and weights drawn."""
    first, second, last = nn.Linear(3, 8, bias=False), nn.Linear(8, 8, bias=False), nn.Linear(8, 1, bias=False)
    return nn.Sequential(first, activation(), second, activation(), last)


def main() -> None:
    x = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.7], [-0.5, 0.9, 1.2]])
    x = 3**0.5 * x / x.norm(dim=1, keepdim=True)

    # A known answer first: with squares the bias off the diagonal is c / width, and nothing else.
    squares = infinite_width(network(lambda: Elementwise(monomial(2))))
    check = finite_width_bias(squares, x, (8,), NETWORKS, seed=0)
    r = float(x[0] @ x[1] / 3)
    exact = (3 * (9 + 72 * r**2 + 24 * r**4) - 9 - 2 * (1 + 2 * r**2) ** 2) / 8
    bias, error = float(check.bias[0, 0, 1]), float(check.standard_error[0, 0, 1])
    print(f"squares, width 8: bias {bias:.3f} +- {error:.3f}, exactly {exact:.3f}")
    assert abs(bias - exact) < 5 * error

    kernel = infinite_width(network(nn.ReLU), weight_variance=2.0)
    results = {which: finite_width_bias(kernel, x, WIDTHS, NETWORKS, which, seed=0) for which in ("nngp", "ntk")}
    for result in results.values():
        print(result)
        table = result.to_pandas().query("first == 0 and second == 1").set_index("width")
        print((100 * table[["relative_bias", "relative_standard_error"]]).round(2).to_string(), "(per cent)")
        assert result.diagonal_p_value > 1e-5 and result.off_diagonal_p_value < 1e-5 and result.rate.covers(1.0)

    # The one number: by how much the covariance of two inputs is off, times the width.
    row = results["nngp"].to_pandas().query("first == 0 and second == 1 and width == 8").iloc[0]
    print(
        f"the covariance of inputs 0 and 1 is off by {8 * row.relative_bias:.3f} +- "
        f"{8 * row.relative_standard_error:.3f} of itself, over the width"
    )

    # Is a width wide enough? Each network must stay close to the mean, and where it is while it learns.
    y = torch.tensor([1.0, -1.0, 0.5])
    for width in (16, 256) if SMALL else (16, 256, 2048):
        print(kernel_regime(kernel, x, y, width=width, num_networks=100, num_trained=16, seed=0))

    axes = Figure(figsize=(10, 4), layout="constrained").subplots(1, 2)
    for ax, result in zip(axes, results.values(), strict=True):
        result.plot(ax)
    if not SMALL:
        axes[0].figure.savefig("width_against_limit.png", dpi=100)


if __name__ == "__main__":
    main()
