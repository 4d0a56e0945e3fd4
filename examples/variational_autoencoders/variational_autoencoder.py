r"""A variational autoencoder of handwritten digits.

What you will learn: how to make a VAE, train it by two objectives, compare them on images that neither has seen, and
look at what it has learnt.

A network maps a code :math:`z \sim N(0, I)` to the probabilities of the pixels; another one, the guide, maps an image
to a normal distribution of its code. The evidence lower bound (ELBO) weighs one code for each image; the
importance-weighted bound (IWAE) the mean weight of several, so that it is closer to the log likelihood and asks less
of the guide. Both trained models are compared by a bound of the log likelihood of the test images that is the same
for both: with many codes for each image it is nearly the log likelihood itself. Grey intensities were drawn once as
black or white.
"""

import math
import os

import torch
from matplotlib.figure import Figure

from bayeskit.distributed import global_stream
from bayeskit.inference.objectives import ELBO, IWAE, Objective
from bayeskit.inference.training import fit
from bayeskit.models.vae import VAE, binarize, load_digits, mlp_vae, plot_reconstructions, plot_traversal

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
NUM_EPOCHS, NUM_CODES = (8, 50) if SMALL else (80, 500)


def make_vae(seed: int) -> VAE:
    """Start from weights that depend on the seed alone."""
    with global_stream(torch.Generator().manual_seed(seed)):
        return mlp_vae(data_dim=64, hidden=(100, 100), latent_dim=10)


def held_out_bound(vae: VAE, images: torch.Tensor) -> torch.Tensor:
    """Return the importance-weighted bound of each image, in nats."""
    with torch.no_grad(), global_stream(torch.Generator().manual_seed(1)):
        posterior = vae.encoder(images).expand((NUM_CODES, len(images)))
        z = posterior.rsample()
        log_weight = vae.likelihood(vae.decoder(z), 1).log_prob(images)
        log_weight += vae.prior().log_prob(z) - posterior.log_prob(z)
        return log_weight.logsumexp(0) - math.log(NUM_CODES)


def show(name: str, bound: torch.Tensor) -> None:
    """Print the mean over images and its standard error."""
    print(f"{name:>30}: {float(bound.mean()):7.2f} +- {float(bound.std() / len(bound) ** 0.5):.2f} nats an image")


def main() -> None:
    digits = load_digits()
    train, test = binarize(digits.train, seed=0), binarize(digits.test, seed=1)
    share = train.mean(0).clamp(0.5 / len(train), 1 - 0.5 / len(train))
    independent = torch.distributions.Bernoulli(share).log_prob(test).sum(1)
    print(f"{len(train)} images to train, {len(test)} to test, {train.shape[1]} pixels")
    show("independent pixels", independent)

    objectives: dict[str, Objective] = {"ELBO": ELBO(), "IWAE, 10 codes": IWAE(10)}
    bounds = []
    for name, objective in objectives.items():
        vae = make_vae(seed=0)
        result = fit(
            vae.model,
            vae.guide,
            objective,
            train,
            num_epochs=NUM_EPOCHS,
            batch_size=100,
            optimizer=lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
            seed=0,
            progress=False,
        )
        bounds.append(held_out_bound(vae, test))
        show(f"{name} ({result.seconds:.0f} s)", bounds[-1])
        assert bounds[-1].mean() > independent.mean()
    # On the same images, so that the difference is more certain than either.
    show("IWAE above ELBO", bounds[1] - bounds[0])

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, height_ratios=(1, 3))
    plot_reconstructions(vae, test[:12], above)
    plot_traversal(vae, below, steps=12)
    if path := os.environ.get("BAYESKIT_FIGURE"):
        figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main()
