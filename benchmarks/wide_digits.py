"""Handwritten digits by Gaussian processes of infinitely wide networks, and by trained networks of growing width.

Scikit-learn's 1,797 images of 8 x 8 pixels. Gaussian processes regress on one-hot labels; the scale of outputs and the
noise variance (the ridge of the ensemble) are those with the largest evidence. So are depth and variances of weights
and biases, by the first of the training images; it prints the evidence of each choice (without biases all variances of
weights have the same: outputs of ReLU scale with them). The probability of a class is that of its output being the
largest, with the process's variance and the noise in each output. Networks have the layers and variances that were
chosen for the fully connected one, draw their initial weights from the same law, and minimise cross-entropy (class
probabilities by softmax) or squares of the same one-hot labels (probabilities as for the processes, with the variance
of residuals on a tenth of the training data that is set aside). It prints accuracy, log score (mean log probability of
the true class), and expected calibration error (mean gap between confidence and accuracy, in fifteen bins of
confidence), with standard errors over seeds for networks; and for the ensemble of the seeds, whose probabilities are
averaged.

    python benchmarks/wide_digits.py --quick
    python benchmarks/wide_digits.py --out DIR
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import pandas as pd
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from bayeskit._core.randomness import new_generator, one_thread
from bayeskit.models.wide_networks import InfiniteWidth, infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    Posterior,
    PrecomputedKernel,
    nngp_posterior,
    ntk_ensemble,
    ntk_posterior,
)

CLASSES, BINS, CHANNELS = 10, 15, 16
DEPTHS, WEIGHT_VARIANCES, BIAS_VARIANCES = (1, 2, 3, 5), (1.0, 2.0, 4.0), (0.0, 0.1, 1.0)
NOISE_SHARES = [10.0**power for power in torch.arange(-6, 0.25, 0.5).tolist()]  # of the kernel's mean diagonal
COARSE_SHARES = NOISE_SHARES[::3]  # for the choice of depth and variances


@dataclass(frozen=True)
class Digits:
    """Images ``(n, 1, 8, 8)``, labels ``(n,)``, and how many of the first are for training."""

    images: Tensor
    labels: Tensor
    num_train: int

    @property
    def targets(self) -> Tensor:
        """One-hot labels of mean zero, ``(n, 10)``."""
        return nn.functional.one_hot(self.labels, CLASSES).to(self.images) - 1 / CLASSES


@dataclass(frozen=True)
class Budget:
    """How much is computed."""

    num_train: int
    num_test: int
    num_evidence: int
    widths: tuple[int, ...]
    num_seeds: int
    num_epochs: int


QUICK = Budget(400, 400, 200, (16, 64, 256), 2, 90)
FULL = Budget(1297, 500, 600, (16, 32, 64, 128, 256, 512, 1024, 2048), 5, 60)


def read_digits(budget: Budget) -> Digits:
    raw = load_digits()
    order = torch.randperm(len(raw.target), generator=new_generator(0, stream="split of the digits"))
    order = order[: budget.num_train + budget.num_test]
    images = torch.tensor(raw.images, dtype=torch.float64)[order][:, None]
    train = images[: budget.num_train]
    return Digits((images - train.mean()) / train.std(), torch.tensor(raw.target)[order], budget.num_train)


def fully_connected(depth: int, width: int = 8) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(64, width)]
    for _ in range(depth - 1):
        layers += [nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, CLASSES))


def convolutional(depth: int, pooled: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, CHANNELS, 3, padding=1)]
    for _ in range(depth - 1):
        layers += [nn.ReLU(), nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if pooled else [nn.Flatten()]
    return nn.Sequential(*layers, nn.ReLU(), *end, nn.Linear(CHANNELS * (1 if pooled else 64), CLASSES))


def class_probabilities(mean: Tensor, variance: Tensor) -> Tensor:
    """Return how likely each output is the largest of independent normal ones, ``(n, 10)``.

    The trapezoidal rule on the scale of one output's standard deviation has all digits.
    """
    nodes = torch.linspace(-8, 8, 161, dtype=mean.dtype)
    gaps = (mean[:, :, None] - mean[:, None, :]) / variance.sqrt()[:, None, None]
    below = torch.special.log_ndtr(gaps[..., None] + nodes)  # (n, class, other, node)
    own = torch.eye(CLASSES, dtype=torch.bool)[:, :, None]
    integrand = below.masked_fill(own, 0.0).sum(2) - nodes.square() / 2
    result = integrand.logsumexp(-1)
    return (result - result.logsumexp(-1, keepdim=True)).exp()


def scores(probabilities: Tensor, labels: Tensor) -> dict[str, float]:
    confidence, guess = probabilities.max(-1)
    right = (guess == labels).to(probabilities)
    places = (confidence * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=confidence.dtype).index_add(0, places, right - confidence)
    true = probabilities.gather(1, labels[:, None]).clamp_min(1e-300)
    return {
        "accuracy": float(right.mean()),
        "log_score": float(true.log().mean()),
        "calibration_error": float(gaps.abs().sum()) / len(labels),
    }


@dataclass(frozen=True)
class Fitted:
    """A posterior of ``y / scale``, with the scale and noise variance of the largest evidence."""

    posterior: Posterior
    scale: float
    log_evidence: float


def fit(
    posterior: Callable[[PrecomputedKernel, Tensor, Tensor, float], Posterior],
    kernel: PrecomputedKernel,
    rows: Tensor,
    y: Tensor,
    diagonal: Tensor,
    shares: list[float],
) -> Fitted:
    """Try some noise variances, each with its best scale, at which white targets have variance one."""
    tried = []
    for share in shares:
        found = posterior(kernel, rows, y, share * float(diagonal.mean()))
        scale = float(found.cholesky.whitened(y).square().mean().sqrt())
        one = replace(found, y=y / scale)
        tried.append(Fitted(one, scale, float(one.log_evidence) - y.numel() * math.log(scale)))
    return max(tried, key=lambda one: one.log_evidence)


@dataclass(frozen=True)
class Choice:
    """A depth and variances, with their log evidence, all outputs together."""

    depth: int
    weight_variance: float
    bias_variance: float
    log_evidence: float

    @property
    def variances(self) -> dict[str, float]:
        """As infinite_width takes them."""
        return {"weight_variance": self.weight_variance, "bias_variance": self.bias_variance}

    def kernel(self, network: Callable[[int], nn.Module]) -> InfiniteWidth:
        """Return the kernels of this network of infinite width."""
        return infinite_width(network(self.depth), **self.variances)


def choose(digits: Digits, network: Callable[[int], nn.Module], num_evidence: int) -> list[Choice]:
    """Return all choices by the evidence of the NNGP on the first training images, the best one first."""
    x, y, rows = digits.images[:num_evidence], digits.targets[:num_evidence], torch.arange(num_evidence)
    found = []
    for depth, weight, bias in product(DEPTHS, WEIGHT_VARIANCES, BIAS_VARIANCES):
        with torch.no_grad():
            matrix = infinite_width(network(depth), weight_variance=weight, bias_variance=bias).nngp(x)
        fitted = fit(nngp_posterior, PrecomputedKernel(matrix), rows, y, matrix.diagonal(), COARSE_SHARES)
        found.append(Choice(depth, weight, bias, fitted.log_evidence))
    return sorted(found, key=lambda choice: -choice.log_evidence)


def evidence_table(choices: list[Choice]) -> pd.DataFrame:
    """Return log evidences, a row a depth and a column a pair of variances."""
    frame = pd.DataFrame([asdict(choice) for choice in choices])
    variances = ["weight_variance", "bias_variance"]
    return frame.pivot(index="depth", columns=variances, values="log_evidence").sort_index(axis=1)


def gaussian_processes(digits: Digits, kernels: dict[str, InfiniteWidth]) -> Iterator[dict[str, object]]:
    count = digits.num_train
    rows = torch.arange(len(digits.images))
    old, new, y, labels = rows[:count], rows[count:], digits.targets[:count], digits.labels[count:]
    for name, kernel in kernels.items():
        begin = time.perf_counter()
        with torch.no_grad():
            shared = PrecomputedKernel.of(kernel, digits.images)
        seconds = time.perf_counter() - begin
        nngp = fit(nngp_posterior, shared, old, y, shared.nngp(old).diagonal(), NOISE_SHARES)
        ntk = fit(ntk_posterior, shared, old, y, shared.ntk(old).diagonal(), NOISE_SHARES)
        # Evidence of the first tells the scale of initial outputs and the noise, that of the second the ridge.
        ensemble = ntk_ensemble(shared, old, nngp.posterior.y, ridge=ntk.posterior.noise_variance)
        for title, process, fitted in (
            ("NNGP posterior", nngp.posterior, nngp),
            ("NTK ensemble", ensemble, nngp),
            ("NTK posterior", ntk.posterior, ntk),
        ):
            # Which output is the largest does not depend on the scale.
            noise = fitted.posterior.noise_variance
            found = scores(class_probabilities(process.mean(new), process.variance(new) + noise), labels)
            if title != "NTK ensemble":
                found |= {"scale": fitted.scale, "noise_variance": noise, "log_evidence": fitted.log_evidence}
            yield {"model": f"{name} {title}"} | found | {"seconds": seconds}


def train(digits: Digits, choice: Choice, width: int, squares: bool, num_epochs: int, seed: int) -> Tensor:
    """Return the class probabilities of test images by one network, ``(n_test, 10)``."""
    kernel = infinite_width(fully_connected(choice.depth), "standard", **choice.variances)
    network = kernel.network(width, seed=seed).float()
    images, targets = digits.images.float(), digits.targets.float()
    kept = digits.num_train * 9 // 10 if squares else digits.num_train
    # Small enough for the widest, whose outputs move as fast as all its weights together.
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-2 / math.sqrt(width))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_epochs)
    generator = new_generator(seed, stream="batches")
    for _ in range(num_epochs):
        for batch in torch.randperm(kept, generator=generator).split(64):
            outputs = network(images[batch])
            if squares:
                loss = (outputs - targets[batch]).square().mean()
            else:
                loss = nn.functional.cross_entropy(outputs, digits.labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    with torch.no_grad():
        outputs = network(images).double()
    test = outputs[digits.num_train :]
    if not squares:
        return test.softmax(-1)
    residual = (outputs - digits.targets)[kept : digits.num_train].square().mean()
    return class_probabilities(test, residual.expand(len(test)))


def networks(digits: Digits, choice: Choice, budget: Budget) -> Iterator[dict[str, object]]:
    labels = digits.labels[digits.num_train :]
    for squares in (False, True):
        for width in budget.widths:
            begin = time.perf_counter()
            found = [train(digits, choice, width, squares, budget.num_epochs, seed) for seed in range(budget.num_seeds)]
            seconds = (time.perf_counter() - begin) / budget.num_seeds
            each = pd.DataFrame([scores(one, labels) for one in found])
            errors = (each.std() / math.sqrt(budget.num_seeds)).add_suffix("_error").to_dict()
            name = f"networks of width {width}, {'squares' if squares else 'cross-entropy'}"
            yield {"model": name} | each.mean().to_dict() | errors | {"seconds": seconds}
            yield {"model": f"    averaged over {budget.num_seeds}"} | scores(torch.stack(found).mean(0), labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer images, widths and seeds")
    parser.add_argument("--pooled", action="store_true", help="also a network with global average pooling (slow)")
    parser.add_argument("--out", type=Path, help="folder of wide_digits.csv and wide_digits_evidence.csv")
    options = parser.parse_args()
    budget = QUICK if options.quick else FULL
    digits = read_digits(budget)
    print(f"{budget.num_train} training images, {budget.num_test} test images")
    rows, kernels, best, tables = [], {}, {}, []
    with one_thread():
        for name, network in (("fully connected", fully_connected), ("convolutional", convolutional)):
            choices = choose(digits, network, budget.num_evidence)
            best[name] = choices[0]
            kernels[name] = best[name].kernel(network)
            tables.append(pd.DataFrame([{"network": name} | asdict(choice) for choice in choices]))
            print(f"log evidence of {name} networks, {budget.num_evidence} images; best: {best[name]}")
            print(evidence_table(choices).round(0).to_string(), flush=True)
        if options.pooled:
            kernels["pooled"] = best["convolutional"].kernel(partial(convolutional, pooled=True))
        for source in (gaussian_processes(digits, kernels), networks(digits, best["fully connected"], budget)):
            for row in source:
                rows.append(row)
                numbers = "  ".join(f"{k} {v:.4g}" for k, v in row.items() if k != "model")
                print(f"{row['model']:40s} {numbers}", flush=True)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(options.out / "wide_digits.csv", index=False)
        pd.concat(tables).to_csv(options.out / "wide_digits_evidence.csv", index=False)


if __name__ == "__main__":
    main()
