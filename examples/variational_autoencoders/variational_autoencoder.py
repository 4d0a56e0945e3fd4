r"""
Variational autoencoder in Pyro: held-out likelihood, and why its bound is loose
================================================================================

**What you will learn:** how to make a variational autoencoder, train it by two objectives, compare them by the
likelihood of images that neither has seen, and split the gap between bound and log likelihood into the part of the
guide's family and the part of the encoder network.

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
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.special import expit
from scipy.stats import norm
from sklearn.datasets import load_iris

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.held_out import annealed_importance_sampling, importance_sampling
from bayeskit.inference.objectives import ELBO, IWAE, STL
from bayeskit.models.vae import (
    VAE,
    LinearVAE,
    binarize,
    flow_vae,
    load_digits,
    mlp_vae,
    plot_images,
    plot_reconstructions,
)

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
# With a family :math:`Q`, its best member :math:`q^*` for an image and the encoder's choice :math:`q`, the bound is
# loose for two reasons :cite:p:`cremer2018`,
#
# .. math::
#
#    \log p(x) - \mathrm{ELBO}(q) = \underbrace{\mathrm{KL}(q^* \,\|\, p(z \mid x))}_{\text{family}}
#    + \underbrace{\mathrm{ELBO}(q^*) - \mathrm{ELBO}(q)}_{\text{amortisation}}.

digits = load_digits()
train, test = binarize(digits.train, seed=0), binarize(digits.test, seed=1)


def new_vae(data_dim=64, hidden=(100, 100), latent_dim=10, make=mlp_vae, **options):
    with global_stream(torch.Generator().manual_seed(0)):
        return make(data_dim, hidden, latent_dim, **options)


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
found = importance_sampling(tiny.model, tiny.guide, images, num_draws=2000, seed=0, progress=False)
z = (found.log_likelihood.numpy() - exact) / found.pointwise_standard_error.numpy()
print(f"importance sampling is off by at most {abs(z).max():.2f} of its standard errors")
assert abs(np.exp(exact).sum() - 1) < 1e-9
assert found.trusted and abs(z).max() < 4.5

# %%
# A linear model of two codes at its maximum likelihood has a normal posterior :math:`N(m, \Lambda^{-1})`. With the
# codes rotated by 30 degrees it has a correlation. The best guide with independent coordinates has the variances
# :math:`1 / \Lambda_{ii}`, at a gap of :math:`\frac12 (\sum_i \log \Lambda_{ii} - \log |\Lambda|)`. Where the guide is
# the posterior, the path gradients of STL :cite:p:`roeder2017` are zero on every draw.

flowers = torch.as_tensor(load_iris().data)
linear, aligned = (LinearVAE.maximum_likelihood(flowers, latent_dim=2) for _ in range(2))
turn = torch.tensor([[np.cos(np.pi / 6), -np.sin(np.pi / 6)], [np.sin(np.pi / 6), np.cos(np.pi / 6)]])
with torch.no_grad():
    linear.decoder.weight.copy_(linear.decoder.weight @ turn)
    precision = linear.posterior(flowers).precision_matrix[0]
    linear.encoder.mean.weight.copy_(turn.T @ linear.encoder.mean.weight)
    linear.encoder.mean.bias.copy_(turn.T @ linear.encoder.mean.bias)
    linear.encoder.log_scale.copy_(-precision.diagonal().log() / 2)
    loose = float((linear.log_likelihood(flowers) - linear.lower_bound(flowers)).mean())
gap = float(precision.diagonal().log().sum() - precision.logdet()) / 2
print(f"linear model: gap of the family {gap:.9f}, of the bound {loose:.9f}")
STL(num_particles=8).differentiable_loss(aligned.model, aligned.guide, flowers).backward()
assert abs(loose - gap) < 1e-9 and float(aligned.encoder.mean.bias.grad.norm()) < 1e-9

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
    quick = importance_sampling(vae.model, vae.guide, test, num_draws=500, seed=1, progress=False)
    share = float((quick.pareto_k > 0.7).double().mean())
    print(f"{name}: importance sampling {quick.mean:.3f} +- {quick.standard_error:.3f} nats an image, ", end="")
    print(f"{'trusted' if quick.trusted else 'not trusted'}, Pareto k above 0.7 for {100 * share:.1f} %")
    annealed[name] = annealed_importance_sampling(
        vae.model, vae.guide, test[:num_images], num_temperatures=num_temperatures, seed=1, progress=False
    )
    print(f"      annealed, {num_images} images: {annealed[name].mean:.2f} +- {annealed[name].standard_error:.2f}")
    assert annealed[name].trusted

# %%
# Then the decoder trained by ELBO stays as it is, and other guides are trained for it: a normal distribution of its own
# for each test image, a new encoder of normal distributions, and one whose family is an inverse autoregressive flow
# :cite:p:`kingma2016iaf`.


class OneEach(torch.nn.Module):
    """A normal distribution for each image."""

    def __init__(self, start):
        super().__init__()
        self.loc, self.log_scale = torch.nn.Parameter(start.mean), torch.nn.Parameter(start.stddev.log())

    def forward(self, x):
        return dist.Normal(self.loc, self.log_scale.exp()).to_event(1)


vae, shown = vaes["ELBO"], test[:num_images]
exact_mean, of_images = annealed["ELBO"].mean, annealed["ELBO"].standard_error
guides = {
    "normal, one each": (OneEach(vae.encoder(shown).base_dist), shown),
    "normal, encoder": (new_vae().encoder, train),
    "flow, encoder": (new_vae(make=flow_vae, prior_transforms=0).encoder, train),
}
gaps, num_steps = {}, 150 if is_small() else 1500
for name, (encoder, data) in guides.items():
    guide = VAE(encoder, vae.decoder, 10, vae.likelihood, (64,))
    settings = {"num_steps": num_steps, "batch_size": 100 if data is train else None, "seed": 0, "progress": False}
    adam = functools.partial(torch.optim.Adam, encoder.parameters(), lr=3e-3)
    bk.fit(guide.model, guide.guide, STL(4), data, optimizer=lambda _, adam=adam: adam(), **settings)
    with global_stream(torch.Generator().manual_seed(1)):
        passes = [-ELBO(num_particles=10).loss(guide.model, guide.guide, shown) / num_images for _ in range(20)]
    gaps[name], error = exact_mean - float(np.mean(passes)), np.hypot(np.std(passes) / 20**0.5, of_images)
    print(f"{name:16s} bound below the log likelihood by {gaps[name]:.2f} +- {error:.2f}")
assert is_small() or gaps["normal, one each"] < gaps["normal, encoder"]

# %%
# What it says
# ------------
# Errors are about these images; as both models were given the same, their differences count. What the tighter bound
# adds is less than what is lost between bound and likelihood, and most of that is the encoder's: the best normal
# distribution for each image leaves less. Which part is larger depends on data and networks, so measure it before
# paying for a wider family. Below, twelve digits and what the model makes of their codes.

gain = annealed["IWAE"].log_likelihood - annealed["ELBO"].log_likelihood
print(f"IWAE above ELBO: {float(gain.mean()):.2f} +- {float(gain.std() / len(gain) ** 0.5):.2f} nats an image")
figure = Figure(figsize=(8, 4.5), layout="constrained")
above, below = figure.subplots(2)
plot_reconstructions(vaes["IWAE"], test[:12], above)
below.barh(list(gaps), list(gaps.values()))
below.set(xlabel="log likelihood less bound (nats)")

# %%
# A failure on purpose
# --------------------
# A guide that is too narrow has its draws where the posterior is high, and none in its tails. Importance sampling from
# the guide of the twin, made narrower, misses likelihood, and its Pareto shapes say so.

with torch.no_grad():
    tiny.encoder[-1].linear.bias[1] -= 3.0
poor = importance_sampling(tiny.model, tiny.guide, images, num_draws=2000, seed=0, progress=False)
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
#    print(importance_sampling(vae.model, vae.guide, test, num_draws=500))
#
# Look at ``trusted`` before the number, and compare two models by the differences of the same test images. If
# importance sampling is not trusted, anneal. If a distribution for each image is much better than the encoder, train
# the encoder longer or make it larger; if not, change the family.
#
# Where to go next: :doc:`elbo_iwae_sumo` measures how far such bounds are off, :doc:`geco` trains to a quality that is
# wanted, :doc:`held_out_likelihood` compares estimates of the likelihood, :doc:`discrete_codes_of_digits` has codes of
# bits.
