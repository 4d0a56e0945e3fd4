"""Out-of-distribution scores on images: a likelihood, what repairs it, and what it makes worse.

Run ``python benchmarks/detection.py --data mnist`` (or ``digits``) for the area under the ROC curve of five random
splits; two minutes on one core. The model of the images is probabilistic PCA with 60 components (20 for the digits of
scikit-learn), in closed form, so that no training can be blamed. Strange images are made of the test images, or are
noise. Scores, high for strange: ``-log p``; ``S``, which is ``-log2 p`` minus the bits that the shorter of PNG and zlib
needs (input complexity); typicality, the distance of ``-log p`` from its mean; ``named``, the log ratio to the same
model of that kind of strange images, made of training images; ``others``, the largest ratio to the models of all
*other* kinds. ``notes`` are figures of one earlier run on MNIST, for the first three scores. Below: the share of the
class in the likelihood, the correlation with complexity, and what the mean of two images gains.
"""

from __future__ import annotations

import argparse
import io
import math
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.special import logsumexp
from scipy.stats import rankdata

from bayeskit.models.vae import load_digits, load_mnist5000

NOTES = {
    "black": (0.000, 0.977, 0.963),
    "blurred": (0.003, 0.000, 0.950),
    "half contrast": (0.007, 0.222, 0.926),
    "mean of two": (0.091, 0.014, 0.769),
    "rotated": (0.932, 0.864, 0.894),
    "noise": (1.0, 1.0, 1.0),
    "shuffled": (1.0, 1.0, 1.0),
    "inverted": (1.0, 1.0, 1.0),
}
Make = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class ComponentAnalysis:
    """Probabilistic PCA at the maximum of its likelihood, of images ``(n, side, side)`` with intensities in [0, 1]."""

    def __init__(self, images: np.ndarray, num_components: int) -> None:
        x = images.reshape(len(images), -1)
        self.mean, d = x.mean(0), x.shape[1]
        values, vectors = np.linalg.eigh(np.cov(x.T, bias=True))
        # A floor of one grey level: a constant image has no spread at all.
        floor = (1 / 256) ** 2
        self.noise = max(float(values[: d - num_components].mean()), floor)
        self.values = np.maximum(values[d - num_components :], self.noise)
        self.vectors = vectors[:, d - num_components :]
        self.log_volume = 0.5 * (np.log(self.values).sum() + (d - num_components) * math.log(self.noise))
        self.log_volume += 0.5 * d * math.log(2 * math.pi)

    def log_density(self, images: np.ndarray) -> np.ndarray:
        """Return log densities in nats, ``(n,)``."""
        x = images.reshape(len(images), -1) - self.mean
        codes = x @ self.vectors
        rest = (x**2).sum(1) - (codes**2).sum(1)
        return -0.5 * ((codes**2 / self.values).sum(1) + rest / self.noise) - self.log_volume


def code_length(images: np.ndarray) -> np.ndarray:
    """Return the bits of the shorter of PNG and zlib, ``(n,)``."""
    lengths = []
    for image in np.round(images * 255).astype(np.uint8):
        file = io.BytesIO()
        Image.fromarray(image).save(file, "png", optimize=True)
        lengths.append(8 * min(len(file.getvalue()), len(zlib.compress(image.tobytes(), 9))))
    return np.array(lengths, dtype=float)


def area(strange: np.ndarray, usual: np.ndarray) -> float:
    """Return the probability that a strange image scores higher than a usual one, ties counting one half."""
    ranks = rankdata(np.concatenate([strange, usual]))[: len(strange)]
    return float((ranks.sum() - len(strange) * (len(strange) + 1) / 2) / (len(strange) * len(usual)))


def kinds(side: int) -> dict[str, Make]:
    """Return the makers of strange images."""
    return {
        "black": lambda x, rng: np.zeros_like(x),
        "blurred": lambda x, rng: gaussian_filter(x, (0, side / 14, side / 14)),
        "half contrast": lambda x, rng: x / 2,
        "mean of two": lambda x, rng: (x + x[rng.permutation(len(x))]) / 2,
        "rotated": lambda x, rng: np.rot90(x, axes=(1, 2)),
        "noise": lambda x, rng: rng.random(x.shape),
        "shuffled": lambda x, rng: x.reshape(len(x), -1)[:, rng.permutation(side**2)].reshape(x.shape),
        "inverted": lambda x, rng: 1 - x,
    }


def one_split(x: np.ndarray, y: np.ndarray, num_components: int, seed: int) -> tuple[np.ndarray, dict[str, float]]:
    """Return areas ``(kinds, scores)`` and other figures of one split."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(x))
    train, test = order[: 7 * len(x) // 10], order[7 * len(x) // 10 :]
    model = ComponentAnalysis(x[train], num_components)
    makers = kinds(x.shape[-1])
    models = {name: ComponentAnalysis(make(x[train], rng), num_components) for name, make in makers.items()}
    centre = -model.log_density(x[train]).mean()

    def scores(images: np.ndarray, kind: str) -> list[np.ndarray]:
        log_p = model.log_density(images)
        against = {name: alternative.log_density(images) - log_p for name, alternative in models.items()}
        others = np.max([ratio for name, ratio in against.items() if name != kind], axis=0)
        return [-log_p, -log_p / math.log(2) - code_length(images), np.abs(-log_p - centre), against[kind], others]

    table = []
    for name, make in makers.items():
        pairs = zip(scores(make(x[test], rng), name), scores(x[test], name), strict=True)
        table.append([area(strange, usual) for strange, usual in pairs])
    log_p, bits = model.log_density(x[test]), code_length(x[test])
    classes = [ComponentAnalysis(x[train][y[train] == c], num_components // 2) for c in range(10)]
    by_class = np.stack([c.log_density(x[test]) for c in classes])
    pairs = (x[test] + x[test][rng.permutation(len(test))]) / 2
    own, mixed = by_class[y[test], np.arange(len(test))], logsumexp(by_class, axis=0) - math.log(10)
    return np.array(table), {
        "mean log density (nats)": float(log_p.mean()),
        "correlation of bits and code length": float(np.corrcoef(-log_p, bits)[0, 1]),
        "gain of the mean of two (nats)": float(model.log_density(pairs).mean() - log_p.mean()),
        "log density by ten classes (nats)": float(mixed.mean()),
        "worth of the class, median, log 10 at most (nats)": float(np.median(own - mixed)),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=("mnist", "digits"), default="mnist")
    parser.add_argument("--splits", type=int, default=5)
    settings = parser.parse_args()
    images = load_mnist5000() if settings.data == "mnist" else load_digits()
    pixels = np.concatenate([images.train.numpy(), images.test.numpy()]).astype(float)
    labels = np.concatenate([images.train_labels.numpy(), images.test_labels.numpy()])
    side = math.isqrt(pixels.shape[1])
    pixels = pixels.reshape(-1, side, side)
    found = [one_split(pixels, labels, 60 if side == 28 else 20, seed) for seed in range(settings.splits)]
    tables = np.stack([table for table, _ in found])
    print(f"{settings.data}: area under the ROC curve, mean and range over {settings.splits} splits")
    print(
        f"{'':14s}" + "".join(f"{name:>22s}" for name in ("-log p", "S", "typicality", "named", "others")) + "   notes"
    )
    for row, name in enumerate(kinds(side)):
        cells = [f"{v.mean():8.3f} ({v.min():.3f}-{v.max():.3f})" for v in tables[:, row].T]
        notes = " ".join(f"{value:.3f}" for value in NOTES[name]) if side == 28 else ""
        print(f"{name:14s}" + "".join(f"{cell:>22s}" for cell in cells) + f"   {notes}")
    for name in found[0][1]:
        values = np.array([figures[name] for _, figures in found])
        print(f"{name}: {values.mean():.3f} ({values.min():.3f} to {values.max():.3f})")


if __name__ == "__main__":
    main()
