r"""Fisher against empirical Fisher: what gradients of single data do not know.

What you will learn: what the Fisher information and the empirical Fisher are, and why only one of them is a curvature.

A line :math:`a x + b` with normal noise of unit variance is fitted by steps along :math:`M^{-1} \nabla \log p`. With
the Fisher information :math:`M = \sum_i J_i^\top J_i`, the same everywhere, each step points to the least-squares fit,
and the first one reaches it. The empirical Fisher :math:`M = \sum_i r_i^2 J_i^\top J_i` has squared residuals for
weights. Far from the fit these are large, and steps small; close to it, steps are wrong wherever the noise is not that
of the model. Here its true variance grows with :math:`x`, and bayeskit says so. Laplace's approximation, built on the
right matrix, is exact for this model.
"""

import math
import os

import torch
from matplotlib.figure import Figure
from torch import nn

from bayeskit.models.wide_networks.curvature import (
    Gaussian,
    empirical_fisher,
    find_mode,
    fisher,
    gradient_fields,
    laplace_posterior,
)

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
PRIOR_PRECISION = 1e-3


def make_data(num_data: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a line with noise that the model does not expect."""
    generator = torch.Generator().manual_seed(1)
    x = torch.linspace(0.0, 4.0, num_data, dtype=torch.float64).unsqueeze(1)
    noise = torch.randn(num_data, generator=generator, dtype=torch.float64)
    return x, 2.0 * x.squeeze(1) - 1.0 + (0.2 + 0.8 * x.squeeze(1)) * noise


def angles(directions: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Return angles between arrows, in degrees."""
    return torch.cosine_similarity(directions, wanted, dim=-1).clamp(-1, 1).acos() * 180 / math.pi


def main() -> None:
    x, y = make_data(100 if SMALL else 500)
    likelihood = Gaussian(1.0)
    line = find_mode(nn.Linear(1, 1, dtype=torch.float64), likelihood, x, y, PRIOR_PRECISION)
    fit = torch.cat([line.weight.detach().flatten(), line.bias.detach()])
    print(f"fit of {len(x)} data: slope {fit[0]:.3f}, intercept {fit[1]:.3f}")

    right = fisher(line, likelihood, x, mean=True)
    wrong = empirical_fisher(line, likelihood, x, y, mean=True)
    print(f"Fisher information at the fit, by data:\n{right.matrix().numpy().round(3)}")
    print(f"empirical Fisher:\n{wrong.matrix().numpy().round(3)}\n{wrong}")
    assert not wrong.trusted

    # The gradient, and both matrices' directions, over the plane of the two parameters.
    size = 9 if SMALL else 25
    slopes, intercepts = fit[0] + torch.linspace(-3, 3, size).double(), fit[1] + torch.linspace(-6, 6, size).double()
    fields = gradient_fields(line, likelihood, x, y, slopes, intercepts)
    off_centre = (fields.points - fit).norm(dim=-1) > 1e-6
    wanted = fit - fields.points
    found = {name: angles(getattr(fields, name), wanted)[off_centre].mean() for name in fields._fields[1:]}
    for name, angle in found.items():
        print(f"{name:10s} mean angle to the fit {angle:5.1f} degrees")
    assert found["natural"] < 0.1 < found["empirical"]
    share = (fields.empirical.norm(dim=-1) / fields.natural.norm(dim=-1))[0, 0]
    print(f"from the corner, the natural gradient's step goes all the way, the empirical Fisher's {100 * share:.2g} %")

    posterior = laplace_posterior(line, likelihood, x, y, PRIOR_PRECISION)
    sd = posterior.predict(torch.tensor([[2.0], [8.0]], dtype=torch.float64)).covariance.flatten().sqrt()
    print(f"Laplace: log evidence {posterior.log_evidence:.3f}, sd of the line at 2 {sd[0]:.4f}, at 8 {sd[1]:.4f}")
    design = torch.cat([x, torch.ones_like(x)], 1)
    covariance = design @ design.mT / PRIOR_PRECISION + torch.eye(len(x), dtype=torch.float64)
    exact = torch.distributions.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)
    print(f"exact:   log evidence {float(exact):.3f}")
    assert abs(float(exact) - posterior.log_evidence) < 1e-6

    if not SMALL:
        figure = Figure(figsize=(12, 4), layout="constrained")
        axes = figure.subplots(1, 3, sharex=True, sharey=True)
        fields.plot(list(axes))
        for ax in axes:
            ax.plot(*fit, "k*", markersize=10)
            ax.set(xlabel="slope", ylabel="intercept")
        figure.savefig("fisher_against_empirical_fisher.png", dpi=100)


if __name__ == "__main__":
    main()
