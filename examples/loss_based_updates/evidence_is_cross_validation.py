r"""The evidence is cross-validation.

What you will learn: that the log evidence is the sum of leave-p-out cross-validation scores over all p, what the prior
has to do with it, and how to compare models by either.

Let :math:`S(p)` be the mean log density with which held-out data are predicted, each by the :math:`n - p` that are not
held out, over all sets of :math:`p` data. Then (Fong and Holmes, 2020), with no approximation,

.. math:: \log p(y_1, \dots, y_n) = \sum_{p=1}^n S(p).

Leave-one-out is the first of these scores. The last is what the prior alone predicts, and it counts as much. Leaving
out the last few, so that the first data prepare the prior, makes the sum robust against vague priors.

First four flips of a coin, where everything can be enumerated; then the strength of 42 planks of radiata pine,
explained by their density or by their density adjusted for resin, where particles see the data one by one.
"""

import math
import os

import torch
from matplotlib.figure import Figure
from torch import Tensor

import bayeskit as bk
from bayeskit.exact import radiata_pine
from bayeskit.inference.generalized.cross_validation.evidence import (
    cross_validation_evidence,
    enumerated_cross_validation,
)
from bayeskit.inference.generalized.cross_validation.prequential import prequential

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
FLIPS = torch.tensor([1.0, 1.0, 0.0, 1.0], dtype=torch.float64)
HELD_OUT = 10  # of 42 planks, in the cumulative score


def coin_evidence(part: Tensor, pseudo_flips: float = 1.0) -> Tensor:
    """Log evidence of parts of the flips, ``(m, 4) -> (m,)``, the chance of heads being Beta(a, a)."""
    a = torch.as_tensor(pseudo_flips, dtype=torch.float64)
    heads, tails = a + (part * FLIPS).sum(1), a + (part * (1 - FLIPS)).sum(1)
    return torch.lgamma(heads) + torch.lgamma(tails) - torch.lgamma(heads + tails) - 2 * a.lgamma() + (2 * a).lgamma()


def main() -> None:
    coin = enumerated_cross_validation(coin_evidence, 4)
    print(coin.to_pandas()[["score", "cumulative", "num_sets"]])
    print(f"the sum is log(1/20) = {math.log(1 / 20):.6f}")
    assert abs(coin.log_evidence - math.log(1 / 20)) < 1e-12

    # A prior that expects all heads or all tails predicts the first flip as well, and the others worse.
    extreme = enumerated_cross_validation(lambda part: coin_evidence(part, 0.01), 4)
    gap = extreme.score - coin.score
    print("a Beta(0.01, 0.01) prior changes the scores of p = 1..4 by", [round(x, 2) for x in gap.tolist()])

    size = {"num_particles": 128, "num_replicates": 2} if SMALL else {"num_particles": 512, "num_replicates": 4}
    generator = torch.Generator().manual_seed(0)
    orders = torch.stack([torch.randperm(42, generator=generator) for _ in range(4)])  # the same for both models
    scores, curves = {}, {}
    for name, covariate in (("density", "x"), ("adjusted density", "z")):
        case = radiata_pine(covariate)
        target = case.target()
        curves[name] = curve = prequential(target, orders, seed=1, **size)
        z = (curve.log_evidence - case.log_evidence) / curve.log_evidence_standard_error
        print(f"{name}: {curve}; exactly {case.log_evidence:.4f}, {z:+.2f} standard errors off")
        assert curve.trusted and abs(z) < 5

        chains = {"num_chains": 4, "num_warmup": 300, "num_samples": 250 if SMALL else 1000}
        draws = bk.sample(target, seed=2, progress=False, **chains)
        sizes = range(1, 3) if SMALL else range(1, HELD_OUT + 1)
        scores[name] = cross_validation_evidence(target, draws, p=sizes, held_out=16 if SMALL else 42, seed=3)
        print(scores[name].to_pandas().round(3).to_string())

    gain = curves["adjusted density"].log_evidence - curves["density"].log_evidence
    early = scores["adjusted density"].cumulative - scores["density"].cumulative
    print(f"log Bayes factor for the adjusted density: {gain:.2f} nats")
    print(f"of these, {float(early[-1]):.2f} when the last {len(early)} planks are predicted by the others")
    assert gain > 5 and float(early[-1]) > 0

    left, right = Figure(figsize=(10, 4), layout="constrained").subplots(1, 2)
    for name, result in scores.items():
        result.plot(left, label=name)
    curves["adjusted density"].plot(right, against=curves["density"], label="adjusted against plain density")
    if not SMALL:
        left.figure.savefig("evidence_is_cross_validation.png", dpi=100)


if __name__ == "__main__":
    main()
