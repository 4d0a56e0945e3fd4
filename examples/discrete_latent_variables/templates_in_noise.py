r"""
Convolution, ReLU and max-pooling as exact inference in a generative image model
================================================================================

**What you will learn:** which generative model a layer of a convolutional network is the exact inference of, what
its maxima cost in place of sums, and that probabilities are right only as far as the model is.

One of three digits stands somewhere in a noisy picture, or none. The digits are averages of handwritten ones
:cite:p:`alpaydin1998`, the pictures are simulated, and the model is one layer of the deep rendering mixture of
:cite:t:`patel2016`. Which digit is it?
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp
from scipy.stats import norm

from bayeskit.gallery import is_small
from bayeskit.models.discrete import RenderingMixture
from bayeskit.models.vae import load_digits

# %%
# The model
# ---------
# A template :math:`\mu_k` at position :math:`g`, all equally probable, is switched on with probability 0.8:
#
# .. math:: x \mid k, g, a \sim N(a\, T_g \mu_k, \sigma^2 I), \qquad a \sim \mathrm{Bernoulli}(0.8).
#
# Up to what does not depend on the causes, its log joint density is
#
# .. math:: a \left( \langle T_g \mu_k, x \rangle / \sigma^2 + b_k \right), \qquad
#           b_k = \log \frac{0.8}{0.2} - \frac{|\mu_k|^2}{2 \sigma^2}.
#
# For all positions together this is a **convolution** of the image with the template, and a bias. Its maximum over the
# switch is the **ReLU**, that over neighbouring positions the **max-pool**.

digits, names = load_digits(), (3, 8, 9)
handwritten = [digits.train[digits.train_labels == name].double().reshape(-1, 8, 8) for name in names]
templates = torch.stack([images.mean(0) for images in handwritten])
mixture = RenderingMixture(templates, (13, 13), noise_scale=0.5, on_probability=0.8)

# %%
# Before the data
# ---------------
# Five pictures from the model. The eye finds a digit in few of them.

pictures, causes = mixture.sample(5, seed=2)
prior_predictive = Figure(figsize=(9, 2.4), layout="constrained")
for place, picture in enumerate(pictures):
    axes = prior_predictive.add_subplot(1, 5, place + 1)
    axes.imshow(picture.numpy(), cmap="gray_r")
    shown = f"shows a {names[causes.template[place]]}" if causes.on[place] else "shows nothing"
    axes.set(xticks=[], yticks=[], title=shown)

# %%
# An exact twin
# -------------
# In a picture of nine by nine a template has four positions, so that there are 24 causes. Listed one by one, by SciPy,
# their maxima for each template must be the outputs of a layer of a network, made of the weights of the model, and
# their sum its evidence.

small = RenderingMixture(templates, (9, 9), noise_scale=0.5, on_probability=0.8)
picture = small.sample(1, seed=0)[0]
log_joint = torch.zeros(3, 2, 2, 2, dtype=torch.float64)
for k, row, column, on in itertools.product(range(3), range(2), range(2), range(2)):
    mean = torch.zeros(9, 9, dtype=torch.float64)
    mean[row : row + 8, column : column + 8] = on * templates[k]
    log_joint[k, row, column, on] = norm(mean, 0.5).logpdf(picture[0]).sum() + math.log((0.2, 0.8)[on] / 12)

filters, biases = small.weights()
layer = torch.nn.Sequential(torch.nn.Conv2d(1, 3, 8, dtype=torch.float64), torch.nn.ReLU(), torch.nn.MaxPool2d(2))
layer[0].weight.data, layer[0].bias.data = filters, biases
with torch.no_grad():
    outputs = layer(picture.unsqueeze(1)).flatten() + small.log_background(picture)
largest = log_joint.amax((1, 2, 3))
print(f"outputs of the layer and maxima of the density differ by {float((outputs - largest).abs().max()):.0e}")
by_hand = float(logsumexp(log_joint.numpy()))
print(f"log evidence, listed {by_hand:.9f}, by the model {float(small.log_evidence(picture)):.9f}")
assert torch.allclose(outputs, largest, rtol=0, atol=1e-9)
assert abs(by_hand - float(small.log_evidence(picture))) < 1e-9

# %%
# The fit
# -------
# Nothing is trained: the weights follow from the model. The posterior of the template sums over positions and the
# switch, where the network takes maxima. If it is right, then pictures whose template is said to have probability
# :math:`p` have it with frequency :math:`p`.

num_pictures = 4_000 if is_small() else 20_000


def posterior(pictures: torch.Tensor) -> torch.Tensor:
    scores = mixture.scores(pictures)
    return torch.logaddexp(scores, torch.zeros_like(scores)).flatten(2).logsumexp(-1).softmax(-1)


def overconfidence(pictures: torch.Tensor, template: torch.Tensor) -> tuple[float, float]:
    """Return by how much probabilities of the named template exceed the frequency of being right, and its error."""
    probability, named = posterior(pictures).max(-1)
    gap = probability - (named == template).double()
    return float(gap.mean()), float(gap.std() / len(gap) ** 0.5)


pictures, causes = mixture.sample(num_pictures, seed=0)
gap, error = overconfidence(pictures, causes.template)
print(f"probability less frequency of being right: {gap:+.4f} +- {error:.4f}")
assert abs(gap) < 4.5 * error

# %%
# A failure on purpose
# --------------------
# Now the pictures show real handwriting instead of its average. No two eights are alike, which the model does not
# know, and its probabilities are too bold.

generator = torch.Generator().manual_seed(3)
forged = pictures.clone()
for i in causes.on.nonzero().flatten().tolist():
    images = handwritten[causes.template[i]]
    row, column = causes.position[i].tolist()
    drawn = images[int(torch.randint(len(images), (), generator=generator))]
    forged[i, row : row + 8, column : column + 8] += drawn - templates[causes.template[i]]
gap, error = overconfidence(forged, causes.template)
print(f"probability less frequency of being right: {gap:+.4f} +- {error:.4f}, of real handwriting")
assert gap > 4.5 * error

# %%
# What it says
# ------------
# The largest output of the network and the posterior name the same digit in nearly every picture: a single position has
# most of the probability, and a maximum does for a sum. What the maximum lacks is the probability.

shown = causes.on
network, exact = mixture.most_probable(pictures).template, posterior(pictures).argmax(-1)
by_network, by_posterior = ((named == causes.template)[shown].double() for named in (network, exact))
print("share of pictures that show a digit")
for name, share in (
    ("largest output is right", by_network),
    ("posterior is right", by_posterior),
    ("gain", by_posterior - by_network),
    ("both name the same digit", (network == exact)[shown].double()),
):
    print(f"    {name:25s} {share.mean():.4f} +- {share.std() / len(share) ** 0.5:.4f}")

place = int(shown.nonzero()[0])
figure = Figure(figsize=(9, 2.6), layout="constrained")
features = mixture.scores(pictures[place : place + 1])[0].relu()
titles = ["picture", *(f"ReLU of the {name}" for name in names)]
for number, (title, image) in enumerate(zip(titles, (pictures[place], *features), strict=True)):
    axes = figure.add_subplot(1, 4, number + 1)
    shading = axes.imshow(
        image.numpy(), cmap="cividis" if number else "gray_r", vmax=float(features.max()) if number else None
    )
    axes.set(xticks=[], yticks=[], title=title)
figure.colorbar(shading, ax=figure.axes[1:], label="output")
print(f"the picture shows a {names[causes.template[place]]}, at {causes.position[place].tolist()}")

# %%
# Try it on yours
# ---------------
# Replace the templates, and measure the noise of your pictures where nothing is shown.
#
# .. code-block:: python
#
#    mixture = RenderingMixture(templates, (13, 13), noise_scale=0.5, on_probability=0.8)
#    filters, biases = mixture.weights()  # of a convolution
#    print(mixture.log_evidence(pictures[:3]), mixture.most_probable(pictures[:3]).template)
#
# Look at calibration on labelled pictures: are those with probability 0.9 right in nine of ten cases? If shapes vary,
# add templates before you believe probabilities. Where many labelled pictures exist, a trained network is better.
#
# Where to go next: :doc:`/gallery/wide_networks/torch_module_to_gaussian_process` finds another model in a network,
# :doc:`matching_permutations` names digits that occur once each, :doc:`ising_coupling` sums over all pictures of a
# grid.
