"""Unnormalised models: normalising constants against enumeration, efficiency of noise contrast, and a classifier's.

Run from the repository root, on one thread::

    OMP_NUM_THREADS=1 python benchmarks/energy_models.py constants --replicates 200
    OMP_NUM_THREADS=1 python benchmarks/energy_models.py efficiency --replicates 400
    OMP_NUM_THREADS=1 python benchmarks/energy_models.py digits --splits 5

``constants`` estimates log Z of enumerable energies from both sides with many seeds: mean error, mean standard error,
and the standard deviation of z, which should be one. ``efficiency`` compares the variance of noise-contrastive
estimates of a precision with that of maximum likelihood. ``digits`` trains the classifier of scikit-learn's digits as
an energy-based model and compares accuracy and calibration error with a fitted temperature and Laplace's approximation.
"""

from __future__ import annotations

import argparse
import math
import time

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent, Normal

from bayeskit.inference.unnormalised import log_normaliser
from bayeskit.models.unnormalised import EnergyModel

DOUBLE = torch.float64

# Constants against enumeration.


def jem_on_bits() -> EnergyModel:
    """Return the energy of linear logits on three bits."""
    w = torch.tensor([[1.0, -0.5, 0.3], [-0.2, 0.8, -1.0]], dtype=DOUBLE)
    b = torch.tensor([0.1, -0.4], dtype=DOUBLE)
    half = Independent(Bernoulli(torch.full((3,), 0.5, dtype=DOUBLE)), 1)
    return EnergyModel.from_classifier(lambda x: x @ w.T + b, half, tilt=False)


def ising(coupling: float = 0.4) -> EnergyModel:
    """Return a free Ising grid of 4 by 4."""

    def energy(x: Tensor) -> Tensor:
        spins = (2 * x - 1).unflatten(-1, (4, 4))
        bonds = (spins[..., 1:, :] * spins[..., :-1, :]).sum((-2, -1)) + (spins[..., 1:] * spins[..., :-1]).sum(
            (-2, -1)
        )
        return -coupling * bonds

    return EnergyModel.of_bits(energy, 16)


def boltzmann_machine() -> EnergyModel:
    """Return a restricted Boltzmann machine of 10 visible and 8 hidden units, the hidden ones summed out."""
    generator = torch.Generator().manual_seed(1)
    w = torch.randn(10, 8, generator=generator, dtype=DOUBLE)
    b, c = torch.randn(10, generator=generator, dtype=DOUBLE), torch.randn(8, generator=generator, dtype=DOUBLE)
    return EnergyModel.of_bits(lambda x: -x @ b - nn.functional.softplus(x @ w + c).sum(-1), 10)


def normal_in_five() -> EnergyModel:
    """Return a correlated normal density in five dimensions without its constant, on a wider normal base."""
    precision = 0.7 * torch.eye(5, dtype=DOUBLE) + 0.3
    base = Independent(Normal(torch.zeros(5, dtype=DOUBLE), 2.0), 1)
    return EnergyModel(lambda x: 0.5 * ((x - 1) @ precision * (x - 1)).sum(-1), base)


def constants(replicates: int) -> None:
    """Print errors and standard deviations of z of the three estimates."""
    precision = 0.7 * torch.eye(5, dtype=DOUBLE) + 0.3
    truth = 2.5 * math.log(2 * math.pi) - 0.5 * float(torch.logdet(precision))
    problems = (
        ("JEM on 3 bits", jem_on_bits(), None, {"num_temperatures": 4}),
        ("Ising 4 x 4", ising(), None, {"num_temperatures": 30}),
        ("RBM 10 x 8", boltzmann_machine(), None, {"num_temperatures": 30}),
        ("normal in 5", normal_in_five(), truth, {"num_temperatures": 100}),
    )
    print(f"{'model':14} {'draws':10} {'estimate':9} {'error':>9} {'s.e.':>8} {'sd of z':>8} {'mean z':>7} trusted")
    for name, model, known, settings in problems:
        exactly = float(model.exact_log_normaliser()) if known is None else known
        for draws in ("chains", "enumerate") if model.is_binary else ("chains",):
            begin = time.monotonic()
            runs = [log_normaliser(model, draws=draws, seed=s, progress=False, **settings) for s in range(replicates)]
            for side in ("forward", "reverse", "bridge"):
                found = [getattr(run, side) for run in runs]
                error = torch.tensor([z.log_evidence - exactly for z in found], dtype=DOUBLE)
                spread = torch.tensor([z.standard_error for z in found], dtype=DOUBLE)
                z = error / spread
                print(
                    f"{name:14} {draws:10} {side:9} {float(error.mean()):9.5f} {float(spread.mean()):8.5f} "
                    f"{float(z.std()):8.3f} {float(z.mean()):7.3f} {sum(x.trusted for x in found)}/{replicates}",
                    flush=True,
                )
            print(f"  log Z {exactly:.15g}, {(time.monotonic() - begin) / replicates:.2f} s a run", flush=True)


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["constants"])
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--splits", type=int, default=5)
    given = parser.parse_args()
    constants(given.replicates)


if __name__ == "__main__":
    main()
