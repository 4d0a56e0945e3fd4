r"""One wrong datum: which discrepancies let it decide, and which do not.

What you will learn: how an outlier moves posteriors of a location, and where a robust one hides a trap.

Four data near zero and one at :math:`y`, for a normal location of unit variance. Minus the log likelihood and the
kernel Stein discrepancy follow ``y`` without bound. A weight in the Stein kernel stops that, and so does the
beta-divergence. Its loss is bounded, however: under a flat prior there is no posterior at all, and the library refuses
to make one up; under a wide one the posterior mean still depends on how wide it is.
"""

import pyro.distributions as dist
import torch

from bayeskit.errors import ImproperPosteriorError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses, minimize

OUTLIERS = (2.0, 10.0, 100.0, 1000.0)


def unit_normal(mean: torch.Tensor) -> dist.Normal:
    return dist.Normal(mean, 1.0)


def score(mean: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return mean - x


def falling(x: torch.Tensor) -> torch.Tensor:
    return (1 + x.square()).rsqrt()


def main() -> None:
    prior = dist.Normal(torch.tensor(0.0, dtype=torch.float64), 10.0)
    chosen = {
        "minus log likelihood": losses.NegativeLogLikelihood(unit_normal),
        "Stein discrepancy": losses.KernelSteinDiscrepancy(score),
        "Stein, weighted": losses.KernelSteinDiscrepancy(score, weight=falling),
        "beta-divergence .5": losses.BetaDivergence(0.5, unit_normal),
    }
    print(f"{'minimiser with an outlier at':28s}" + "".join(f"{y:10.0f}" for y in OUTLIERS))
    start = torch.zeros(1, dtype=torch.float64)
    for name, loss in chosen.items():
        places = []
        for y in OUTLIERS:
            x = torch.tensor([-1.0, 0.0, 0.5, 1.0, y], dtype=torch.float64)
            places.append(float(minimize(GibbsPosterior(prior, loss, x), start=start).position))
        print(f"{name:28s}" + "".join(f"{place:10.4f}" for place in places))

    x = torch.tensor([-1.0, 0.0, 0.5, 1.0, 10.0], dtype=torch.float64)
    grid = torch.linspace(-60.0, 60.0, 120_001, dtype=torch.float64)
    for beta in (1e-4, 0.1, 0.5):
        posterior = GibbsPosterior(prior, losses.BetaDivergence(beta, unit_normal), x)
        weight = posterior.log_density(grid[:, None]).softmax(0)
        mean = (weight * grid).sum()
        sd = (weight * (grid - mean).square()).sum().sqrt()
        print(f"beta-divergence {beta:g}: posterior mean {mean:.4f}, sd {sd:.4f}")
    try:
        GibbsPosterior(Flat(), losses.BetaDivergence(0.5, unit_normal), x)
    except ImproperPosteriorError as error:
        print("with a flat prior:", error)


if __name__ == "__main__":
    main()
