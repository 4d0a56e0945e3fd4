r"""
Variational autoencoder in Pyro: ELBO against IWAE by held-out likelihood, on digits
====================================================================================

**What you will learn:** how to make a variational autoencoder, train it by two objectives, compare them by the
likelihood of images that neither has seen, and look at what it has learnt.

A network turns a few random numbers, the code, into an image of a digit; another one, the guide, guesses the code of an
image :cite:p:`kingma2014`. The evidence lower bound (ELBO) weighs one code for each image, the importance-weighted
bound of :cite:t:`burda2016` (IWAE) the mean weight of several, so that it is closer to the log likelihood and asks less
of the guide. Does that give a better model? The digits are 1,797 images of eight by eight pixels :cite:p:`alpaydin1998`
from scikit-learn, each pixel drawn once as black or white with its grey as probability.
"""

# sphinx_gallery_thumbnail_number = -1
import functools
import itertools

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.held_out import annealed_importance_sampling, importance_sampling
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.models.vae import binarize, load_digits, mlp_vae, plot_images, plot_reconstructions, plot_traversal

# %%
# The model
# ---------
# The code has ten coordinates, both networks two layers of a hundred units.
#
# .. math::
#
#    z \sim N(0, I), \qquad x_p \mid z \sim \mathrm{Bernoulli}\big(f_p(z)\big), \qquad
#    q(z \mid x) = N\big(m(x), \mathrm{diag}\, s(x)^2\big).
#
# ``mlp_vae`` holds the Pyro model and its guide. On a minibatch, either objective adds up one bound for each image.

digits = load_digits()
train, test = binarize(digits.train, seed=0), binarize(digits.test, seed=1)


def new_vae(data_dim=64, hidden=(100, 100), latent_dim=10):
    with global_stream(torch.Generator().manual_seed(0)):
        return mlp_vae(data_dim, hidden, latent_dim)


# %%
# Before the data
# ---------------
# Images that an untrained network makes of codes from the prior: noise, whose pixels are black with a probability near
# one half. Below them the digits.

prior_predictive = Figure(figsize=(8, 1.8), layout="constrained")
axes = prior_predictive.subplots()
plot_images(torch.stack([new_vae().generate(12, seed=0), train[:12]]), axes)
axes.set_yticks([3.5, 13.5], ["untrained", "digits"])
axes.tick_params(length=0)

# %%
# An exact twin
# -------------
# Four pixels have sixteen images, and a code of one number integrates out by quadrature, here scipy's. So the
# likelihood of every image is known; the sixteen have to sum to one, and importance sampling from the guide has to
# find each.

tiny = new_vae(data_dim=4, hidden=(8,), latent_dim=1).double()
images = torch.tensor(list(itertools.product([0.0, 1.0], repeat=4)), dtype=torch.float64)


def likelihood_by_quadrature(image: np.ndarray) -> float:
    def integrand(z: float) -> float:
        with torch.no_grad():
            probability = expit(tiny.decoder(torch.tensor([z], dtype=torch.float64)).numpy())
        return norm.pdf(z) * np.where(image == 1, probability, 1 - probability).prod()

    return quad(integrand, -9, 9, epsabs=1e-12)[0]


exact = np.log([likelihood_by_quadrature(image) for image in images.numpy()])
print(f"sum of the sixteen likelihoods: {np.exp(exact).sum():.12f}")
with torch.no_grad():
    tiny.encoder[-1].linear.bias[1] += 1.0  # the log scale: an untrained guide is too narrow to sample from
found = importance_sampling(tiny.model, tiny.guide, images, num_samples=2000, seed=0, progress=False)
z = (found.log_likelihood.numpy() - exact) / found.pointwise_standard_error.numpy()
print(f"importance sampling is off by at most {abs(z).max():.2f} of its standard errors")
assert abs(np.exp(exact).sum() - 1) < 1e-9
assert found.trusted and abs(z).max() < 4.5

# %%
# The fit
# -------
# The same start, the same minibatches, two objectives. Afterwards the log likelihood of test images, twice. Importance
# sampling draws codes from the guide and is quick; the shape of the largest weights, Pareto k, tells where the guide
# misses codes that matter. Guides tend to be too narrow, and then the estimate itself says not to trust it. Annealed
# importance sampling, which moves codes from the guide to the posterior, is slower and depends less on the guide.

epochs, num_images, num_temperatures = (8, 20, 20) if is_small() else (80, 100, 100)
vaes, annealed = {}, {}
for name, objective in (("ELBO", ELBO()), ("IWAE", IWAE(num_particles=10))):
    vae = vaes[name] = new_vae()
    adam = functools.partial(torch.optim.Adam, lr=3e-3)
    options = {"num_epochs": epochs, "batch_size": 100, "optimizer": adam, "seed": 0, "progress": False}
    bk.fit(vae.model, vae.guide, objective, train, **options)
    quick = importance_sampling(vae.model, vae.guide, test, num_samples=500, seed=1, progress=False)
    share = float((quick.pareto_k > 0.7).double().mean())
    print(f"{name}: importance sampling {quick.mean:.3f} +- {quick.standard_error:.3f} nats an image, ", end="")
    print(f"{'trusted' if quick.trusted else 'not trusted'}, Pareto k above 0.7 for {100 * share:.1f} %")
    annealed[name] = annealed_importance_sampling(
        vae.model, vae.guide, test[:num_images], num_temperatures=num_temperatures, seed=1, progress=False
    )
    print(f"      annealed, {num_images} images: {annealed[name].mean:.2f} +- {annealed[name].standard_error:.2f}")
    assert annealed[name].trusted

# %%
# What it says
# ------------
# Monte Carlo errors are about these images. Whether one model is better than the other on all digits is another
# question: the images are a sample, and as both models were given the same, their differences count. For scale, pixels
# that are independent of each other.

share = train.mean(0).clamp(0.5 / len(train), 1 - 0.5 / len(train))
independent = torch.distributions.Bernoulli(share).log_prob(test[:num_images]).sum(1).double()
by_elbo, by_iwae = (annealed[name].log_likelihood for name in ("ELBO", "IWAE"))
for name, gain in {
    "ELBO above independent pixels": by_elbo - independent,
    "IWAE above ELBO": by_iwae - by_elbo,
}.items():
    print(f"{name}: {float(gain.mean()):.2f} +- {float(gain.std() / len(gain) ** 0.5):.2f} nats an image")

# %%
# What the bound adds is less than what either model gains on independent pixels. Below, twelve digits and what the
# model trained by IWAE makes of their codes; then what it makes of codes that differ from zero in one coordinate at a
# time, the first eight of the ten. Coordinates along which nothing changes are not used.

figure = Figure(figsize=(8, 6), layout="constrained")
above, below = figure.subplots(2, height_ratios=(1, 3))
plot_reconstructions(vaes["IWAE"], test[:12], above)
plot_traversal(vaes["IWAE"], below, steps=12)
below.set_yticks([10 * row + 3.5 for row in range(8)], range(1, 9))
below.tick_params(length=0)

# %%
# A failure on purpose
# --------------------
# A guide that is too narrow has its draws where the posterior is high, and none in its tails. Importance sampling from
# the guide of the twin, made narrower, misses likelihood, and its Pareto shapes say so.

with torch.no_grad():
    tiny.encoder[-1].linear.bias[1] -= 3.0
poor = importance_sampling(tiny.model, tiny.guide, images, num_samples=2000, seed=0, progress=False)
print(f"narrow guide: {float(poor.log_likelihood.mean()) - exact.mean():+.3f} nats off on average; {poor}")
assert not poor.trusted

# %%
# Try it on yours
# ---------------
# Replace the images and the sizes of the networks; a model and a guide of your own need one plate of data.
#
# .. code-block:: python
#
#    vae = mlp_vae(64, (100, 100), 10)
#    bk.fit(vae.model, vae.guide, IWAE(num_particles=10), train, num_epochs=8, batch_size=100)
#    print(importance_sampling(vae.model, vae.guide, test, num_samples=500))
#
# Look at ``trusted`` before the number, and compare two models by the differences of the same test images. If
# importance sampling is not trusted, anneal. Codes that change nothing are unused: fewer would do.
#
# Where to go next: :doc:`elbo_iwae_sumo` measures how far such bounds are off, :doc:`geco` trains to a quality that is
# wanted, :doc:`held_out_likelihood` compares estimates of the likelihood, :doc:`discrete_codes_of_digits` has codes of
# bits.
