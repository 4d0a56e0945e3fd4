"""Digits as codes of bits: gradient estimators that train a network with a discrete bottleneck, side by side.

What you will learn: train an autoencoder whose code is discrete by several estimators at the same number of decoder
evaluations, compare them by a bound on other images, and see why one must not compare the losses of training where a
relaxation is among them. The exact twin: with four bits all codes can be listed, which gives the evidence, and a bound
on it without any draws.
"""

import copy
import functools
import os

import torch
from sklearn.datasets import load_digits

import bayeskit as bk
from bayeskit.inference.gradients import DisARM, GumbelSoftmax, LeaveOneOut, ScoreFunction
from bayeskit.inference.objectives import ELBO
from bayeskit.models.discrete.autoencoders import binary_vae

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
EPOCHS, NUM_BITS = (4, 4) if SMALL else (60, 4)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return 1,500 images of eight by eight pixels to train by, and 297 to test, black or white, in random order."""
    images = torch.as_tensor(load_digits().data, dtype=torch.float32)
    images = (images > 7).float()[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
    return (images[:300], images[1500:]) if SMALL else (images[:1500], images[1500:])


def main() -> None:
    train, test = digits()
    start = binary_vae(data_dim=64, hidden=(64,), num_bits=NUM_BITS)

    # The exact twin: log evidence is the bound plus the divergence of the guide from the posterior, so never below it.
    with torch.no_grad():
        gap = start.log_evidence(test) - start.evidence_lower_bound(test)
    assert bool((gap > -1e-4).all())

    estimators = [ScoreFunction(4), LeaveOneOut(4), DisARM(2), GumbelSoftmax(0.5, num_samples=4)]
    rows = {}
    for estimator in estimators:
        vae = copy.deepcopy(start)
        vae.gradient = estimator
        result = bk.fit(
            vae.model,
            vae.guide,
            ELBO(),
            train,
            num_epochs=EPOCHS,
            batch_size=50,
            optimizer=functools.partial(torch.optim.Adam, lr=3e-3),
            progress=False,
        )
        with torch.no_grad():
            bound, evidence = vae.evidence_lower_bound(test).mean(), vae.log_evidence(test).mean()
        name = type(estimator).__name__
        rows[name] = float(result.epoch_losses[-1]), -float(bound), -float(evidence), vae
        print(f"{name:15s} training loss {rows[name][0]:7.3f}, of test images: bound {rows[name][1]:7.3f}", end="")
        print(f", minus log evidence {rows[name][2]:7.3f}")
        assert rows[name][1] > rows[name][2] - 1e-4

    # The failure on purpose: the relaxed loss is no bound; here it promises more than the very codes keep.
    promised, kept = rows["GumbelSoftmax"][:2]
    print(f"Gumbel-softmax lost {promised:.3f} in training, and its codes {kept:.3f}")
    assert rows["LeaveOneOut"][1] < rows["ScoreFunction"][1]

    vae = rows["LeaveOneOut"][3]
    with torch.no_grad():
        pictures = vae.decode(vae.codes())
    if not SMALL:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(2, 8, figsize=(8, 2.2))
        for picture, ax in zip(pictures, axes.flat, strict=True):
            ax.imshow(picture.reshape(8, 8), cmap="gray_r", vmin=0, vmax=1)
            ax.axis("off")
        figure.suptitle("what each of the sixteen codes means")
        figure.savefig("discrete_codes_of_digits.png", dpi=100)


if __name__ == "__main__":
    main()
