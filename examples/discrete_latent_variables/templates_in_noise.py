"""A convolution, a ReLU and a max-pool are the exact inference of a model: one of three templates, somewhere, in noise.

What you will learn: write down the generative model behind one layer of a convolutional network, see that its feature
maps are maxima of the log joint density to the last bits, classify by the posterior of the template instead, with all
positions summed out, and look how much the maximum gives away. The exact twin: a small image, all causes listed.
"""

import itertools
import math
import os

import torch

from bayeskit.models.discrete.rendering_mixture import RenderingMixture

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
NUM_IMAGES = 200 if SMALL else 5000
CROSS = [[0, 1, 0], [1, 1, 1], [0, 1, 0]]
RING = [[1, 1, 1], [1, 0, 1], [1, 1, 1]]
STROKE = [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def exact_twin(mixture: RenderingMixture, image: torch.Tensor) -> None:
    """List all templates, positions and switches of one image."""
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), mixture.noise_scale)
    count, (rows, columns) = len(mixture.templates), mixture.positions
    log_joint = torch.zeros(count, rows, columns, 2, dtype=torch.float64)
    for k, i, j, on in itertools.product(range(count), range(rows), range(columns), (0, 1)):
        mean = torch.zeros_like(image)
        mean[i : i + 3, j : j + 3] = on * mixture.templates[k]
        switch = math.log(mixture.on_probability if on else 1 - mixture.on_probability)
        log_joint[k, i, j, on] = normal.log_prob(image - mean).sum() + switch - math.log(count * rows * columns)
    largest = log_joint.amax(-1).unfold(1, 2, 2).unfold(2, 2, 2).amax((-1, -2))  # windows of two by two positions
    by_layer = mixture.feature_maps(image[None], window=2)[0] + mixture.log_background(image[None])
    print(f"feature maps and listed maxima differ by {float((by_layer - largest).abs().max()):.1e}")
    assert torch.allclose(by_layer, largest, atol=1e-10, rtol=0)
    evidence = log_joint.logsumexp((0, 1, 2, 3))
    print(
        f"log evidence of the image {float(evidence):.6f}, by softplus {float(mixture.log_evidence(image[None])):.6f}"
    )
    assert abs(float(evidence - mixture.log_evidence(image[None]))) < 1e-10


def main() -> None:
    templates = torch.tensor([CROSS, RING, STROKE], dtype=torch.float64)
    mixture = RenderingMixture(templates, (10, 10), noise_scale=0.45, on_probability=0.8)
    images, causes = mixture.sample(NUM_IMAGES, seed=0)
    exact_twin(RenderingMixture(templates, (6, 6), noise_scale=0.45, on_probability=0.8), images[0, :6, :6])

    # By the largest feature, as a network would; and by the posterior, where all places have their say.
    shown = causes.on
    by_maximum = mixture.most_probable(images).template
    scores = mixture.scores(images)
    posterior = torch.logaddexp(scores, torch.zeros_like(scores)).flatten(2).logsumexp(-1).softmax(-1)
    by_posterior = posterior.argmax(-1)
    for name, found in (("largest feature", by_maximum), ("posterior", by_posterior)):
        right = (found == causes.template)[shown].double()
        error = float(right.std()) / math.sqrt(len(right))
        print(f"{name:16s} names the template of {float(right.mean()):.4f} +- {error:.4f} of the images that show one")
        assert float(right.mean()) > 0.8

    # Probabilities that are right: of all images whose template is said to have probability p, p have it.
    confidence, hit = posterior.amax(-1), (by_posterior == causes.template).double()
    gap = float((confidence - hit).mean())
    error = float((confidence - hit).std()) / math.sqrt(NUM_IMAGES)
    print(f"mean probability less frequency of being right: {gap:+.4f} +- {error:.4f}")
    assert abs(gap) < 4 * error
    if not SMALL:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(1, 4, figsize=(8, 2.2))
        axes[0].imshow(images[0], cmap="gray_r")
        axes[0].set_title("image")
        for k, (ax, name) in enumerate(zip(axes[1:], ("cross", "ring", "stroke"), strict=True)):
            ax.imshow(scores[0, k].relu(), cmap="viridis", vmin=0, vmax=float(scores[0].max()))
            ax.set_title(f"ReLU: {name}")
        figure.savefig("templates_in_noise.png", dpi=100)


if __name__ == "__main__":
    main()
