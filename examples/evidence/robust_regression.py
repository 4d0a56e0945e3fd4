r"""Stack loss: regression that a few odd days cannot move.

What you will learn: how posteriors of robust losses differ from that of the normal model, on data with known outliers.

Brownlee's 21 days of a plant that oxidises ammonia: stack loss against air flow, water temperature and acid
concentration. Days 1, 3, 4 and 21 are transitional. Half the squared error follows them; the absolute error, Huber's
loss and the beta-divergence follow the other days. All four become posteriors in the same way, and each gets the weight
that matches its width to the information in the data.
"""

import os

import pyro.distributions as dist
import torch
from statsmodels.datasets import stackloss

import bayeskit as bk
from bayeskit.inference.generalized import GibbsPosterior, calibrate, losses, minimize

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
LENGTHS = (120, 120) if SMALL else (500, 1000)  # of warm-up and of what is kept
TRANSITIONAL = (0, 2, 3, 20)


def normal(coefficients: torch.Tensor, covariates: torch.Tensor) -> dist.Normal:
    return dist.Normal(covariates @ coefficients, 2.0)


def main() -> None:
    table = stackloss.load_pandas().data
    raw = torch.tensor(table[["AIRFLOW", "WATERTEMP", "ACIDCONC"]].to_numpy(), dtype=torch.float64)
    outcome = torch.tensor(table["STACKLOSS"].to_numpy(), dtype=torch.float64)
    unit = raw.std(0)  # coefficients of standardised covariates have one scale, which samplers like
    covariates = torch.cat([torch.ones(len(raw), 1, dtype=torch.float64), (raw - raw.mean(0)) / unit], -1)
    usual = torch.ones(len(raw), dtype=torch.bool)
    usual[list(TRANSITIONAL)] = False
    reference = torch.linalg.lstsq(covariates[usual], outcome[usual]).solution
    print("least squares without the odd days:", [round(float(c), 3) for c in reference])

    prior = dist.Normal(torch.tensor([17.0, 0.0, 0.0, 0.0], dtype=torch.float64), 10.0)
    chosen = {
        "half squared": losses.HalfSquared(predict=losses.linear),
        "absolute": losses.Absolute(predict=losses.linear),
        "Huber": losses.Huber(1.345 * 2.0, predict=losses.linear),
        "beta-divergence": losses.BetaDivergence(0.5, normal),
    }
    best = torch.zeros(4, dtype=torch.float64)
    for name, loss in chosen.items():
        posterior = GibbsPosterior(prior, loss, (covariates, outcome), compile=False)
        # A bounded loss is flat far away: the search starts where the one before it ended.
        best = minimize(posterior, start=best).position
        weight = calibrate.information_matching(posterior, at=best).weight
        draws = bk.sample(posterior.with_weight(weight), 4, *LENGTHS, seed=0, progress=False)
        theta = draws.to_arviz().posterior["theta"]
        mean, sd = theta.mean(("chain", "draw")).values, theta.std(("chain", "draw")).values
        text = ", ".join(f"{m:.3f} ({s:.3f})" for m, s in zip(mean, sd, strict=True))
        print(f"{name:16s} weight {weight:7.3f}: {text}")


if __name__ == "__main__":
    main()
