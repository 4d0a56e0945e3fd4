"""Accuracy against the fraction of weights kept: sparse variational networks beside magnitude pruning.

Perceptrons on the digits of scikit-learn (64-100-50-10) or 5,000 images of MNIST (784-300-100-10), both shipped with
Python packages. Each seed draws initial weights and minibatches. Magnitude pruning keeps the largest weights of a
network trained without priors: as they are, after training what is kept again for a quarter of the epochs, and so from
each fraction to the next. The column "own rule" has what the threshold of the prior keeps, "rounded" the same in the
fixed-point format of its layer. Errors are standard errors over seeds; nothing is tuned on the test images::

    python benchmarks/sparse_networks.py --images digits --seeds 5
    python benchmarks/sparse_networks.py --images mnist5000 --seeds 5 --methods log_uniform
"""

from __future__ import annotations

import argparse
import copy
import time

import pyro.distributions as dist
import torch
from torch import Tensor, nn

import bayeskit as bk
from bayeskit.inference.objectives import ELBO, Linear
from bayeskit.models.sparse_networks import SparseNetwork, sparsify
from bayeskit.models.vae import Images, load_digits, load_mnist5000

FRACTIONS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
SIZES = {"digits": (64, 100, 50, 10), "mnist5000": (784, 300, 100, 10)}
METHODS = ("log_uniform", "spike_and_slab", "horseshoe", "log_uniform/groups", "horseshoe/groups")
BATCH = 100


def perceptron(sizes: tuple[int, ...], seed: int) -> nn.Sequential:
    """Return a network with initial weights of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def accuracy(network: nn.Module, images: Images) -> float:
    """Return the share of test images that a network gets right."""
    with torch.no_grad():
        return float((network(images.test).argmax(-1) == images.test_labels).float().mean())


def train_dense(network: nn.Module, images: Images, epochs: int, seed: int, masks: list[Tensor] | None = None) -> None:
    """Train by the cross entropy; with masks, only what is kept."""
    generator = torch.Generator().manual_seed(seed)
    weights = [p for p in network.parameters() if p.dim() > 1]
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images.train), generator=generator).split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images.train[rows]), images.train_labels[rows]).backward()
            optimizer.step()
            if masks is not None:
                with torch.no_grad():
                    for weight, mask in zip(weights, masks, strict=True):
                        weight.mul_(mask)


def by_magnitude(network: nn.Module, fraction: float) -> tuple[nn.Module, list[Tensor]]:
    """Return a copy with the largest weights of all layers, and which they are."""
    result = copy.deepcopy(network)
    weights = [p for p in result.parameters() if p.dim() > 1]
    sizes = torch.cat([w.detach().abs().flatten() for w in weights])
    least = sizes.sort(descending=True).values[round(fraction * len(sizes)) - 1]
    masks = [w.detach().abs() >= least for w in weights]
    with torch.no_grad():
        for weight, mask in zip(weights, masks, strict=True):
            weight.mul_(mask)
    return result, masks


def train_sparse(network: nn.Module, images: Images, method: str, epochs: int, seed: int, rate: float) -> SparseNetwork:
    """Train the posterior, with the divergence annealed over two thirds of the steps."""
    prior, _, groups = method.partition("/")
    sparse = sparsify(
        network, lambda f: dist.Categorical(logits=f), num_data=len(images.train), prior=prior, groups=bool(groups)
    )
    steps = epochs * (len(images.train) // BATCH)
    bk.fit(
        sparse.model,
        sparse.guide,
        ELBO(kl_weight=Linear(2 * steps // 3)),
        (images.train, images.train_labels),
        num_epochs=epochs,
        batch_size=BATCH,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=rate),
        seed=seed,
        progress=False,
    )
    return sparse


def share_kept(sparse: SparseNetwork) -> float:
    """Return the fraction of weights that the threshold of the prior keeps."""
    kept = sparse.kept()
    return sum(int(k.sum()) for k in kept.values()) / sum(k.numel() for k in kept.values())


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", choices=tuple(SIZES), default="digits")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=METHODS)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=0, help="default 200 for digits, 80 for MNIST")
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of the posterior")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    images = load_digits() if arguments.images == "digits" else load_mnist5000()
    epochs = arguments.epochs or (200 if arguments.images == "digits" else 80)
    found: dict[tuple[str, float | str], list[float]] = {}

    def note(method: str, fraction: float | str, value: float) -> None:
        found.setdefault((method, fraction), []).append(value)

    for seed in range(arguments.seeds):
        start = time.perf_counter()
        network = perceptron(SIZES[arguments.images], seed)
        dense = copy.deepcopy(network)
        train_dense(dense, images, epochs, seed)
        note("magnitude", 1.0, accuracy(dense, images))
        stepwise: nn.Module = dense
        for fraction in FRACTIONS:
            stepwise, masks = by_magnitude(stepwise, fraction)
            train_dense(stepwise, images, epochs // 4, seed, masks)
            note("magnitude, step by step", fraction, accuracy(stepwise, images))
            pruned, masks = by_magnitude(dense, fraction)
            note("magnitude", fraction, accuracy(pruned, images))
            train_dense(pruned, images, epochs // 4, seed, masks)
            note("magnitude, trained again", fraction, accuracy(pruned, images))
        print(f"seed {seed}: dense {time.perf_counter() - start:.0f} s", flush=True)
        for method in arguments.methods:
            start = time.perf_counter()
            sparse = train_sparse(network, images, method, epochs, seed, arguments.rate)
            for fraction in (1.0, *FRACTIONS):
                note(method, fraction, accuracy(sparse.pruned(fraction), images))
            note(method, "own rule", accuracy(sparse.pruned(), images))
            note(method, "kept", share_kept(sparse))
            note(method, "rounded", accuracy(sparse.compressed(rounding=0.1), images))
            small = sum(p.numel() for p in sparse.compressed().parameters())
            note(method, "size", small / sum(p.numel() for p in network.parameters()))
            note(method, "bits", float(sum(p.bits for p in sparse.precision().values()) / len(sparse.layers)))
            seconds = time.perf_counter() - start
            kept, right = found[method, "kept"][-1], found[method, "own rule"][-1]
            print(f"seed {seed}: {method} keeps {kept:.4f}, accuracy {right:.4f}, {seconds:.0f} s", flush=True)

    print(f"{arguments.images}, {arguments.seeds} seeds, {epochs} epochs; accuracy in per cent of test images")
    columns: tuple[float | str, ...] = (1.0, *FRACTIONS, "own rule", "rounded", "kept", "size", "bits")
    print(f"{'kept':26s}" + "".join(f"{c:>12}" for c in columns))
    for method in dict.fromkeys(name for name, _ in found):
        cells = []
        for column in columns:
            values = torch.tensor(found.get((method, column), []), dtype=torch.float64)
            scale = 1 if column == "bits" else 100
            error = float(values.std()) / len(values) ** 0.5 if len(values) > 1 else float("nan")
            cells.append(f"{scale * float(values.mean()):6.2f}+-{scale * error:.2f}" if len(values) else "")
        print(f"{method:26s}" + "".join(f"{cell:>12}" for cell in cells))


if __name__ == "__main__":
    main()
