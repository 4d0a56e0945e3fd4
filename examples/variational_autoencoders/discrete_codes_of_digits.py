r"""
Discrete variational autoencoder: gradient estimators for binary codes of digits
================================================================================

**What you will learn:** how to train an autoencoder whose code is discrete by several gradient estimators, how to
compare them by a bound that is summed over all codes, and why not to compare losses of training where one is relaxed.

Bits cannot be reparameterised, so that the guide's gradient needs an estimator: the score function, with or without a
baseline from the other draws :cite:p:`kool2019`, pairs of opposite draws :cite:p:`dong2020`, or a relaxation of bits to
numbers between zero and one :cite:p:`jang2017`. The digits are 1,797 images of eight by eight pixels
:cite:p:`alpaydin1998` from scikit-learn, black where the grey is at least one half.
"""

# sphinx_gallery_thumbnail_number = -1
import copy
import functools
import itertools

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import expit, logsumexp
from scipy.stats import bernoulli

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.gradients import DisARM, GumbelSoftmax, LeaveOneOut, ScoreFunction
from bayeskit.inference.objectives import ELBO
from bayeskit.models.vae import binary_vae, load_digits, plot_images

# %%
# The model
# ---------
# A code of four fair bits makes an image of 64 pixels, by a network with a layer of 64 units; another one guesses the
# bits.
#
# .. math::
#
#    z_b \sim \mathrm{Bernoulli}(1/2), \qquad x_p \mid z \sim \mathrm{Bernoulli}\big(f_p(z)\big), \qquad
#    q(z \mid x) = \prod_b \mathrm{Bernoulli}\big(z_b; g_b(x)\big).
#
# Sixteen codes can be listed, which gives the evidence of every image exactly, and the evidence lower bound without
# any draws. So all estimators are judged by the same exact numbers, on images that were not trained on.

digits = load_digits()
train, test = ((images >= 0.5).float() for images in (digits.train, digits.test))


def new_vae(data_dim: int = 64, hidden: tuple[int, ...] = (64,), num_bits: int = 4):
    with global_stream(torch.Generator().manual_seed(0)):
        return binary_vae(data_dim, hidden, num_bits)


start = new_vae()

# %%
# Before the data
# ---------------
# An untrained network makes nothing but noise, whatever the code.

prior_predictive = Figure(figsize=(8, 1.8), layout="constrained")
axes = prior_predictive.subplots()
plot_images(torch.stack([start.generate(12, seed=0), test[:12]]), axes)
axes.set_title("above: drawn from the untrained model; below: digits", fontsize="small")

# %%
# An exact twin
# -------------
# Two bits and three pixels: eight images, four codes, and sums that fit on a page. They have to agree with the model's
# own to rounding, the evidence of all images has to be one, and a bound from draws has to agree within its error.

tiny = new_vae(data_dim=3, hidden=(5,), num_bits=2).double()
images = torch.tensor(list(itertools.product([0.0, 1.0], repeat=3)), dtype=torch.float64)
codes = torch.tensor(list(itertools.product([0.0, 1.0], repeat=2)), dtype=torch.float64)
with torch.no_grad():
    black, one = expit(tiny.decoder(codes).numpy()), expit(tiny.encoder(images).numpy())
    by_model = [tiny.log_evidence(images).numpy(), tiny.evidence_lower_bound(images).numpy()]
log_joint = bernoulli.logpmf(images.numpy(), black[:, None]).sum(-1) - np.log(4)  # codes, images
log_guide = bernoulli.logpmf(codes.numpy()[:, None], one).sum(-1)
by_hand = [logsumexp(log_joint, axis=0), (np.exp(log_guide) * (log_joint - log_guide)).sum(0)]
print(f"evidence of all eight images: {np.exp(by_model[0]).sum():.12f}")
assert np.abs(np.subtract(by_model, by_hand)).max() < 1e-9 and abs(np.exp(by_model[0]).sum() - 1) < 1e-9

with global_stream(torch.Generator().manual_seed(0)):
    draws = np.array([-ELBO(num_particles=10).loss(tiny.model, tiny.guide, images) for _ in range(200)])
error = draws.std(ddof=1) / len(draws) ** 0.5
print(f"bound of all eight by draws {draws.mean():.4f} +- {error:.4f}, by sums {by_hand[1].sum():.4f}")
assert abs(draws.mean() - by_hand[1].sum()) < 4.5 * error

# %%
# The fit
# -------
# The same start and the same number of decoder evaluations, four an image, for each estimator.

estimators = {
    "score function": ScoreFunction(4),
    "leave one out": LeaveOneOut(4),
    "DisARM": DisARM(2),
    "Gumbel-softmax": GumbelSoftmax(0.5, num_samples=4),
}
vaes, bounds = {}, {}
print(f"{'':16s}loss of training   minus bound   minus log evidence (of test images)")
for name, estimator in estimators.items():
    vae = vaes[name] = copy.deepcopy(start)
    vae.gradient = estimator
    result = bk.fit(
        vae.model,
        vae.guide,
        ELBO(),
        train,
        num_epochs=4 if is_small() else 40,
        batch_size=50,
        optimizer=functools.partial(torch.optim.Adam, lr=3e-3),
        seed=0,
        progress=False,
    )
    with torch.no_grad():
        bounds[name], evidence = vae.evidence_lower_bound(test).double(), vae.log_evidence(test).double()
    loss = float(result.epoch_losses[-1])
    print(f"{name:16s}{loss:16.3f} {-float(bounds[name].mean()):13.3f} {-float(evidence.mean()):16.3f}")
    assert bool((bounds[name] <= evidence + 1e-4).all())

# %%
# A failure on purpose
# --------------------
# A relaxed code is no code: numbers between zero and one carry more than a bit does. So the relaxed loss is no bound,
# and it promises more than the bits of the same network keep, even on the images that it was trained on.

relaxed = vaes["Gumbel-softmax"]
with torch.no_grad():
    kept = -float(relaxed.evidence_lower_bound(train).mean())
with global_stream(torch.Generator().manual_seed(1)):
    losses = np.array([ELBO().loss(relaxed.model, relaxed.guide, train) / len(train) for _ in range(20)])
error = losses.std(ddof=1) / len(losses) ** 0.5
print(f"Gumbel-softmax: relaxed loss {losses.mean():.3f} +- {error:.3f}, minus bound of the same images {kept:.3f}")
assert losses.mean() < kept - 4.5 * error

# %%
# What it says
# ------------
# A baseline costs nothing and gains much. On the same test images,

for name in ("leave one out", "DisARM", "Gumbel-softmax"):
    gain = bounds[name] - bounds["score function"]
    error = float(gain.std() / len(gain) ** 0.5)
    print(f"{name} above score function: {float(gain.mean()):.3f} +- {error:.3f} nats an image")
gain = bounds["leave one out"] - bounds["score function"]
assert gain.mean() > 4.5 * gain.std() / len(gain) ** 0.5

# %%
# and what each of the sixteen codes means, in the order of their binary numbers, the first bit being the lowest.

best = vaes["leave one out"]
figure = Figure(figsize=(8, 2.3), layout="constrained")
axes = figure.subplots()
plot_images(best.decode(best.codes()).reshape(2, 8, 64), axes)
for number, code in enumerate(best.codes().int().tolist()):
    row, column = divmod(number, 8)
    axes.text(10 * column + 3.5, 10 * row + 7.6, "".join(map(str, code)), ha="center", va="top", fontsize=7)
axes.set_title("the image that each of the sixteen codes makes", fontsize="small")

# %%
# Try it on yours
# ---------------
# Replace ``train`` by your binary images, and choose the number of bits; up to about sixteen can be summed over.
#
# .. code-block:: python
#
#    vae = binary_vae(64, (64,), num_bits=4, gradient=LeaveOneOut(4))
#    bk.fit(vae.model, vae.guide, ELBO(), train, num_epochs=4, batch_size=50)
#    print(vae.evidence_lower_bound(test).mean(), vae.log_evidence(test).mean())
#
# Look at the bound of images that were not trained on, and never at a relaxed loss. With more bits than can be listed,
# compare estimators by importance sampling. Continuous codes are easier to train, unless bits are what is wanted.
#
# Where to go next: :doc:`/gallery/discrete_latent_variables/gradients_of_choices` compares estimators on one gradient,
# :doc:`variational_autoencoder` has continuous codes.
