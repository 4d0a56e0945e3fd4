"""Whether the errors of cross-validated and prequential evidence are right, on data whose evidence is known exactly.

Ten normal data of known variance with a vague prior of their mean, and six flips of a coin. Many runs of each method;
printed are the mean and the standard deviation of z = (estimate - exact) / standard error (ideally 0 and 1), the
coverage of the 95 % interval, and the mean standard error.

    python benchmarks/cross_validation_calibration.py --replicates 100
"""

from __future__ import annotations

import argparse
import math

import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

import bayeskit as bk
from bayeskit.inference.evidence import prequential
from bayeskit.inference.held_out import cross_validation_evidence, enumerated_cross_validation

PRIOR_SD = 3.0
PREPARED = 3  # held-out data of the cumulative scores from posterior draws


def normal(y: Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(0.0, PRIOR_SD))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def coin(y: Tensor) -> None:
    share = pyro.sample("share", dist.Beta(1.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Bernoulli(share), obs=y)


def normal_evidence(y: Tensor, part: Tensor) -> Tensor:
    k, total, squares = part.sum(1), (part * y).sum(1), (part * y.square()).sum(1)
    shrunk = PRIOR_SD**2 / (1 + PRIOR_SD**2 * k)
    constant = 0.5 * k * math.log(2 * math.pi) + 0.5 * torch.log1p(PRIOR_SD**2 * k)
    return -constant - 0.5 * (squares - shrunk * total.square())


def coin_evidence(y: Tensor, part: Tensor) -> Tensor:
    heads, flips = (part * y).sum(1), part.sum(1)
    return torch.lgamma(1 + heads) + torch.lgamma(1 + flips - heads) - torch.lgamma(2 + flips)


def problems() -> dict[str, tuple[object, object, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    y = 2 + torch.randn(10, generator=generator, dtype=torch.float64)
    flips = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 1.0], dtype=torch.float64)
    return {"normal": (normal, normal_evidence, y), "coin": (coin, coin_evidence, flips)}


def runs(name: str, model: object, evidence: object, y: Tensor, replicates: int) -> list[dict[str, object]]:
    target = bk.Target.from_pyro(model, y)
    exact = enumerated_cross_validation(lambda part: evidence(y, part), len(y))
    whole, few = exact.log_evidence, float(exact.cumulative[PREPARED - 1])
    rows: list[dict[str, object]] = []

    def add(method: str, estimate: float, error: float, truth: float, trusted: bool) -> None:
        z = (estimate - truth) / error
        rows.append({"problem": name, "method": method, "z": z, "standard_error": error, "trusted": trusted})

    for seed in range(replicates):
        curve = prequential(target, order=4, num_particles=256, num_replicates=4, seed=seed, progress=False)
        add("prequential", curve.log_evidence, curve.standard_error, whole, curve.trusted)
        orders = cross_validation_evidence(target, seed=seed)
        add("orders", orders.log_evidence, orders.log_evidence_standard_error, whole, orders.trusted)
        for p in (1, len(y) // 2):
            error = float(orders.standard_error[p - 1])
            add(f"orders, p={p}", float(orders.score[p - 1]), error, float(exact.score[p - 1]), orders.trusted)
        draws = bk.sample(target, num_chains=4, num_warmup=200, num_samples=500, seed=seed, progress=False)
        weighted = cross_validation_evidence(target, draws, p=range(1, PREPARED + 1), seed=seed)
        error = float(weighted.cumulative_standard_error[-1])
        add("draws, p=1..3", float(weighted.cumulative[-1]), error, few, weighted.trusted)
        tempered = cross_validation_evidence(target, p=range(1, PREPARED + 1), held_out="all", seed=seed)
        error = float(tempered.cumulative_standard_error[-1])
        add("all sets, p=1..3", float(tempered.cumulative[-1]), error, few, tempered.trusted)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicates", type=int, default=100)
    replicates = parser.parse_args().replicates
    torch.set_num_threads(1)
    rows = [row for name, problem in problems().items() for row in runs(name, *problem, replicates)]
    table = pd.DataFrame(rows).groupby(["problem", "method"], sort=False)
    summary = table.agg(mean_z=("z", "mean"), sd_z=("z", "std"), error=("standard_error", "mean"))
    summary["coverage"] = table["z"].apply(lambda z: float((z.abs() < 1.96).mean()))
    summary["trusted"] = table["trusted"].mean()
    print(summary.round(4).to_string())


if __name__ == "__main__":
    main()
