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
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributions import Bernoulli, Independent, Normal

from bayeskit.inference.curvature import Categorical, find_parameter_mode, laplace_posterior
from bayeskit.models.unnormalised import (
    NoiseContrastive,
    PersistentContrastiveDivergence,
    fit_energy,
    log_normaliser,
)
from bayeskit.models.unnormalised._models import EnergyModel

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


# Efficiency of noise contrast: a normal precision, with its constant unknown.


class Precision(nn.Module):
    """Half the precision, one parameter, times the square."""

    def __init__(self) -> None:
        super().__init__()
        self.precision = nn.Parameter(torch.tensor(2.0, dtype=DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        """Return the energy."""
        return 0.5 * self.precision * x.square().sum(-1)


def asymptotic_ratio(ratio: float) -> float:
    """Return the variance of noise contrast over that of maximum likelihood, by quadrature."""
    x = torch.linspace(-12, 12, 200_001, dtype=DOUBLE)
    model, noise = Normal(0.0, math.sqrt(0.5)), Normal(0.0, math.sqrt(1.5))
    p, q = model.log_prob(x).exp(), noise.log_prob(x).exp()
    h = ratio * q / (p + ratio * q)
    features = torch.stack([-0.5 * x.square(), -torch.ones_like(x)])

    def mean(values: Tensor) -> Tensor:
        return torch.trapezoid(p * values, x)

    information = torch.stack([torch.stack([mean(h * a * b) for b in features]) for a in features])
    inverse = torch.linalg.inv(information)
    pull = inverse @ torch.stack([mean(h * a) for a in features])
    covariance = inverse - (1 + 1 / ratio) * pull.outer(pull)
    return float(covariance[0, 0] * (mean(features[0].square()) - mean(features[0]).square()))


def efficiency(replicates: int, count: int = 2000) -> None:
    """Print variances of estimates of a precision from many data sets, over those of maximum likelihood."""
    print(f"{'noise a datum':>13} {'by quadrature':>13} {'by estimates':>12} {'s.e.':>6}")
    for ratio in (1, 5, 20, 100):
        best, found = [], []
        for seed in range(replicates):
            torch.manual_seed(1000 * ratio + seed)
            x = Normal(torch.zeros(count, 1, dtype=DOUBLE), math.sqrt(0.5)).sample()
            noise = Independent(Normal(torch.zeros(1, dtype=DOUBLE), math.sqrt(1.5)), 1)
            model, objective = EnergyModel(Precision(), noise), NoiseContrastive(ratio, redraw=False)
            optimizer = torch.optim.LBFGS(model.parameters(), max_iter=30, line_search_fn="strong_wolfe")

            def closure(x=x, model=model, objective=objective, optimizer=optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = objective.differentiable_loss(model, None, x) / len(x)
                loss.backward()
                return loss

            optimizer.step(closure)
            best.append(float(1 / x.square().mean()))
            found.append(float(model.energy.precision.detach()))
        z, m = torch.tensor(found, dtype=DOUBLE), torch.tensor(best, dtype=DOUBLE)
        value = float(z.var() / m.var())
        halves = [float(z[i::20].var() / m[i::20].var()) for i in range(20)]
        error = float(torch.tensor(halves).std()) / math.sqrt(20)
        print(f"{ratio:13d} {asymptotic_ratio(ratio):13.3f} {value:12.3f} {error:6.3f}", flush=True)


# A classifier of digits.


def calibration_error(probabilities: Tensor, y: Tensor, num_bins: int = 15) -> float:
    """Return the expected calibration error of the most probable class, by bins of equal width."""
    confidence, chosen = probabilities.max(-1)
    right = (chosen == y).to(DOUBLE)
    bins = (confidence * num_bins).long().clamp(max=num_bins - 1)
    gaps = [(bins == b).sum() * (right[bins == b].mean() - confidence[bins == b].mean()).abs() for b in bins.unique()]
    return float(sum(gaps)) / len(y)


def fitted_temperature(logits: Tensor, y: Tensor) -> float:
    """Return the temperature with the smallest cross entropy."""
    grid = torch.linspace(-2, 2, 401, dtype=DOUBLE).exp()
    losses = torch.stack([nn.functional.cross_entropy(logits / t, y) for t in grid])
    return float(grid[losses.argmin()])


def digits(splits: int) -> None:
    """Print accuracy, calibration error and negative log likelihood of classes, and the constant."""
    images, classes = load_digits(return_X_y=True)
    images, classes = torch.tensor(images, dtype=DOUBLE), torch.tensor(classes)
    rows: dict[str, list[list[float]]] = {}
    for split in range(splits):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(split))
        train, held, test = order[:800], order[800:1200], order[1200:]
        centre = images[train].mean(0)
        basis = torch.linalg.svd(images[train] - centre, full_matrices=False)[2][:20]
        scores = (images - centre) @ basis.T
        scores = scores / scores[train].std()
        x, y = scores[train], classes[train]
        base = Independent(Normal(torch.zeros(20, dtype=DOUBLE), x.std(0)), 1)

        def network(split: int = split) -> nn.Sequential:
            torch.manual_seed(split)
            return nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 10)).double()

        def record(name: str, probabilities: Tensor, seconds: float, split: int = split, test: Tensor = test) -> None:
            right = float((probabilities.argmax(-1) == classes[test]).to(DOUBLE).mean())
            error = calibration_error(probabilities, classes[test])
            loss = float(nn.functional.nll_loss(probabilities.log(), classes[test]))
            rows.setdefault(name, []).append([100 * right, 100 * error, loss, seconds])
            print(
                f"split {split}, {name:26}: {right:.4f}, ECE {error:.4f}, {loss:.4f} nats, {seconds:.1f} s", flush=True
            )

        begin = time.monotonic()
        plain = network()
        optimizer = torch.optim.Adam(plain.parameters(), 0.01)
        for _ in range(1000):
            optimizer.zero_grad()
            nn.functional.cross_entropy(plain(x), y).backward()
            optimizer.step()
        spent = time.monotonic() - begin
        with torch.no_grad():
            record("softmax", plain(scores[test]).softmax(-1), spent)
            temperature = fitted_temperature(plain(scores[held]), classes[held])
            record("softmax, temperature", (plain(scores[test]) / temperature).softmax(-1), spent)

        begin = time.monotonic()
        fits = []
        for precision in (0.3, 1.0, 3.0, 10.0):
            mode = find_parameter_mode(network(), Categorical(), x, y, prior_precision=precision)
            fits.append((laplace_posterior(mode, Categorical(), x, y, prior_precision=precision), mode, precision))
        posterior, mode, precision = max(fits, key=lambda fitted: fitted[0].log_evidence)
        spent = time.monotonic() - begin
        print(f"split {split}, prior precision {precision} by evidence {posterior.log_evidence:.1f}")
        with torch.no_grad():
            record("mode of Laplace", mode(scores[test]).softmax(-1), spent)
        record("Laplace", posterior.predict_probabilities(scores[test], num_draws=1000), spent)

        for name, objective in (
            ("JEM, noise contrast", NoiseContrastive(5)),
            ("JEM, contrastive divergence", PersistentContrastiveDivergence(128)),
        ):
            begin = time.monotonic()
            model = EnergyModel.from_classifier(network(), base)
            fit_energy(model, x, y, objective=objective, num_steps=1000, seed=split, progress=False)
            with torch.no_grad():
                record(name, model.logits(scores[test]).softmax(-1), time.monotonic() - begin)
                begin = time.monotonic()
            z = log_normaliser(model, num_temperatures=100, num_chains=256, seed=split, progress=False)
            with torch.no_grad():
                gain = float((model.log_density(scores[test]) - base.log_prob(scores[test])).mean()) - z.value
            learnt = f", learnt constant {float(model.log_constant.detach()):.3f}" if "noise" in name else ""
            print(f"    log Z {z}, finite {z.is_finite}{learnt}, {time.monotonic() - begin:.0f} s")
            print(f"    held-out log likelihood of inputs over the normal base: {gain:.3f} nats an image", flush=True)
    print(f"{'':28} accuracy %      ECE %          nats of a class    s")
    for name, values in rows.items():
        table = torch.tensor(values, dtype=DOUBLE)
        mean = table.mean(0).tolist()
        error = (table.std(0) / math.sqrt(len(table))).tolist() if len(table) > 1 else [math.nan] * 4
        shown = "  ".join(f"{m:7.3f} +- {e:5.3f}" for m, e in zip(mean[:3], error[:3], strict=True))
        print(f"{name:28} {shown}  {mean[3]:.1f}")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["constants", "efficiency", "digits"])
    parser.add_argument("--replicates", type=int, default=200)
    parser.add_argument("--splits", type=int, default=5)
    given = parser.parse_args()
    if given.part == "digits":
        digits(given.splits)
    else:
        {"constants": constants, "efficiency": efficiency}[given.part](given.replicates)


if __name__ == "__main__":
    main()
