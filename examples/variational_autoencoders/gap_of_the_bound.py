r"""
Why is the bound of a VAE loose? Approximation gap, amortisation gap, and better posteriors
===========================================================================================

**What you will learn:** how to split the gap between evidence lower bound and log likelihood into the part of the
guide's family and the part of the encoder network, and which families and objectives close which part.

A variational autoencoder is trained by a bound, and the bound is loose for two reasons :cite:p:`cremer2018`: no normal
distribution with independent coordinates is the posterior, and one network has to name the best such distribution for
every image. Normalising flows :cite:p:`kingma2016iaf` and auxiliary variables :cite:p:`ranganath2016` widen the family.
The images are digits of 64 pixels :cite:p:`alpaydin1998`; the exact twin is linear, on the irises of
:cite:t:`anderson1935` and :cite:t:`fisher1936`.
"""

# sphinx_gallery_thumbnail_number = -1
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_iris

from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.held_out import importance_sampling
from bayeskit.inference.objectives import ELBO, STL, AuxiliaryELBO, DReG, Objective, Renyi
from bayeskit.inference.training import fit
from bayeskit.models.vae import VAE, LinearVAE, binarize, flow_vae, load_digits, mlp_vae, plot_images

# %%
# The model
# ---------
# With a family :math:`Q`, its best member :math:`q^*` for an image and the encoder's choice :math:`q_\phi`,
#
# .. math::
#
#    \log p(x) - \mathrm{ELBO}(q_\phi) = \underbrace{\mathrm{KL}(q^* \,\|\, p(z \mid x))}_{\text{family}}
#    + \underbrace{\mathrm{ELBO}(q^*) - \mathrm{ELBO}(q_\phi)}_{\text{amortisation}}.
#
# The code has five coordinates, and both networks have a layer of 64 units.

digits = load_digits()
train = binarize(digits.train, seed=0)
test = binarize(digits.test, seed=1)[: 50 if is_small() else 200]


def new(make=mlp_vae, **options):
    with global_stream(torch.Generator().manual_seed(0)):
        return make(64, (64,), 5, **options)


# %%
# Before the data
# ---------------
# Images of the untrained decoder, and digits.

vae = new()
before = Figure(figsize=(8, 1.8), layout="constrained")
axes = before.subplots()
plot_images(torch.stack([vae.generate(12, seed=0), train[:12]]), axes)
axes.set_yticks([3.5, 13.5], ["untrained", "digits"])

# %%
# An exact twin
# -------------
# A linear model of two codes at its maximum likelihood, with the codes rotated by 30 degrees so that the posterior
# :math:`N(m, \Lambda^{-1})` has a correlation. The best guide with independent coordinates has the mean :math:`m` and
# the variances :math:`1 / \Lambda_{ii}`, at a gap of :math:`\frac12 (\sum_i \log \Lambda_{ii} - \log |\Lambda|)`. Its
# mean is linear in :math:`x`, so that a linear encoder has no amortisation gap.

x = torch.as_tensor(load_iris().data)
linear, aligned = (LinearVAE.maximum_likelihood(x, latent_dim=2) for _ in range(2))
turn = torch.tensor([[np.cos(np.pi / 6), -np.sin(np.pi / 6)], [np.sin(np.pi / 6), np.cos(np.pi / 6)]])
with torch.no_grad():
    linear.decoder.weight.copy_(linear.decoder.weight @ turn)
    posterior = linear.posterior(x)
    linear.encoder.mean.weight.copy_(turn.T @ linear.encoder.mean.weight)
    linear.encoder.mean.bias.copy_(turn.T @ linear.encoder.mean.bias)
    precision = posterior.precision_matrix[0]
    linear.encoder.log_scale.copy_(-precision.diagonal().log() / 2)
    log_likelihood, bound = linear.log_likelihood(x), linear.lower_bound(x)
gap = float(precision.diagonal().log().sum() - precision.logdet()) / 2
print(f"gap of the family {gap:.9f}, of the bound {float((log_likelihood - bound).mean()):.9f}")
assert abs(float((log_likelihood - bound).mean()) - gap) < 1e-9

# %%
# An auxiliary variable closes it. Given :math:`a \sim N(0, 1)` the codes are independent, :math:`z_i \sim N(m_i +
# c_i a, d_i^2)`, and without :math:`a` they have the covariance of the posterior. If the reverse model is the
# conditional of :math:`a`, then the bound is the log likelihood, draw by draw; without, more auxiliary draws raise it.

covariance = posterior.covariance_matrix[0]
first = (covariance[0, 1].abs() * (covariance[0, 0] / covariance[1, 1]).sqrt()).sqrt()
c = torch.stack([first, covariance[0, 1] / first])
d = (covariance.diagonal() - c**2).sqrt()
mean = posterior.mean


def guide(x):
    with linear.data_plate(x, None):
        a = pyro.sample("a", dist.Normal(torch.zeros(len(x), dtype=x.dtype), 1.0), infer={"is_auxiliary": True})
        pyro.sample("z", dist.Normal(mean + a[..., None] * c, d).to_event(1))


def reverse(values, x):
    shrunk = 1 / (1 + (c / d).square().sum())
    with linear.data_plate(x, None):
        pyro.sample("a", dist.Normal(shrunk * ((values["z"] - mean) * c / d**2).sum(-1), shrunk.sqrt()))


with global_stream(torch.Generator().manual_seed(0)):
    tight = -AuxiliaryELBO(reverse).loss(linear.model, guide, x) / len(x)
    print(f"with the reverse model off by {abs(tight - float(log_likelihood.mean())):.0e}")
    assert abs(tight - float(log_likelihood.mean())) < 1e-9
    num_passes, below = 40 if is_small() else 200, {}
    for count in (1, 10, 100):
        objective = AuxiliaryELBO(None, num_auxiliary=count)
        passes = torch.tensor([objective.loss(linear.model, guide, x) for _ in range(num_passes)]) / len(x)
        below[count] = float((passes + log_likelihood.mean()).mean()), float(passes.std()) / num_passes**0.5
        print(f"without, {count:3d} auxiliary draws: gap {below[count][0]:.4f} +- {below[count][1]:.4f}")
assert below[1][0] - below[10][0] > 4.5 * below[1][1] and below[10][0] - below[100][0] > 4.5 * below[10][1]

# %%
# Objectives differ in their gradients. Where the guide is the posterior there is nothing left to learn: the path
# gradients of STL :cite:p:`roeder2017` and DReG :cite:p:`tucker2019` are zero on every draw, that of the plain bound
# only on average.

for objective in (ELBO(num_particles=8), STL(num_particles=8), DReG(8)):
    aligned.zero_grad()
    with global_stream(torch.Generator().manual_seed(0)):
        objective.differentiable_loss(aligned.model, aligned.guide, x).backward()
    name, size = type(objective).__name__, float(aligned.encoder.mean.bias.grad.norm())
    print(f"{name:4s} gradient at the exact posterior {size:.0e}")
    assert (size < 1e-9) == (name != "ELBO")

# %%
# The fit
# -------
# A model of digits, trained with its encoder by the evidence lower bound. Then its decoder stays as it is, and other
# guides are trained for it, all for as many steps: a normal distribution of its own for each test image, a new encoder
# of normal distributions, and a new one whose family is an inverse autoregressive flow. The two new encoders differ in
# the family only. Log likelihoods of the test images are by importance sampling.

num_steps = 150 if is_small() else 2000


def train_encoder(encoder: torch.nn.Module, objective: Objective, data: torch.Tensor) -> VAE:
    found = VAE(encoder, vae.decoder, 5, vae.likelihood, (64,))
    settings = {"num_steps": num_steps, "batch_size": 100 if data is train else None, "seed": 0, "progress": False}
    fit(found.model, found.guide, objective, data, **settings, optimizer=lambda _: adam(encoder.parameters()))
    return found


class OneEach(torch.nn.Module):
    """A normal distribution for each image."""

    def __init__(self, start: dist.Normal):
        super().__init__()
        self.loc, self.log_scale = torch.nn.Parameter(start.mean), torch.nn.Parameter(start.stddev.log())

    def forward(self, x: torch.Tensor) -> dist.Distribution:
        return dist.Normal(self.loc, self.log_scale.exp()).to_event(1)


adam = partial(torch.optim.Adam, lr=3e-3)
fit(vae.model, vae.guide, ELBO(), train, num_steps=num_steps, batch_size=100, optimizer=adam, seed=0, progress=False)
exact = importance_sampling(vae.model, vae.guide, test, num_samples=500 if is_small() else 5000, seed=0, progress=False)
guides = {
    "with the decoder": vae,
    "normal, one each": train_encoder(OneEach(vae.encoder(test).base_dist), STL(4), test),
    "normal, encoder": train_encoder(new().encoder, STL(), train),
    "flow, encoder": train_encoder(new(flow_vae, prior_transforms=0).encoder, STL(), train),
}
gaps = {}
num_passes, of_images = 20 if is_small() else 100, float(exact.pointwise_standard_error.norm()) / len(test)
for seed, (name, found) in enumerate(guides.items()):
    with global_stream(torch.Generator().manual_seed(seed)):
        passes = [-ELBO(num_particles=10).loss(found.model, found.guide, test) / len(test) for _ in range(num_passes)]
    gaps[name] = exact.mean - float(np.mean(passes)), float(np.hypot(np.std(passes) / num_passes**0.5, of_images))
    print(f"{name:18s} log likelihood {exact.mean:.3f}, bound below it by {gaps[name][0]:.3f} +- {gaps[name][1]:.3f}")
amortisation = gaps["normal, encoder"][0] - gaps["normal, one each"][0]
error = float(np.hypot(*(gaps[f"normal, {how}"][1] for how in ("encoder", "one each"))))
print(f"amortisation costs {amortisation:.3f} +- {error:.3f} nats, the family {gaps['normal, one each'][0]:.3f}")
assert min(gap for gap, _ in gaps.values()) > 0 and (is_small() or amortisation > 4.5 * error)

# %%
# A failure on purpose: an upper bound that is none
# -------------------------------------------------
# The variational Renyi bound :cite:p:`li2016` of negative order lies above the log likelihood, with infinitely many
# draws. With few it lies below: a sandwich of two such bounds is no proof. Here for the linear model.

for seed, count in enumerate((2, 8, 32)):
    objective = Renyi(-1.0, num_particles=count)
    with global_stream(torch.Generator().manual_seed(seed)):
        passes = torch.tensor([-objective.loss(linear.model, linear.guide, x) / len(x) for _ in range(100)])
    above, error = float(passes.mean() - log_likelihood.mean()), float(passes.std()) / 10
    print(f"order -1 with {count} draws: above the log likelihood by {above:.4f} +- {error:.4f}")
    assert count > 2 or above + 4.5 * error < 0

# %%
# What it says
# ------------
# Here the encoder costs more than the family: the best normal distribution for each image leaves less than half of the
# gap. A flow closes part of it although its encoder is amortised as well. Which part is larger depends on data and
# networks, so measure it before paying for a wider family, which is no better if the objective cannot use it: without a
# reverse model an auxiliary guide needs many draws for what one draw does with it.

figure = Figure(figsize=(9, 3.4), layout="constrained")
left, right = figure.subplots(1, 2)
values, errors = zip(*gaps.values(), strict=True)
left.barh(list(gaps), values, xerr=[2 * error for error in errors])
left.set(xlabel="log likelihood less bound (nats)", title="digits")
values, errors = zip(*below.values(), strict=True)
right.errorbar(list(below), values, [2 * error for error in errors], fmt="o-", label="auxiliary, no reverse model")
right.axhline(gap, color="C1", label="best independent normals")
right.set(xscale="log", xlabel="auxiliary draws", ylabel="gap (nats)", title="linear model of irises")
right.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Replace the images and ``vae`` by your data and a trained model. Look at the two bars of the normal family: if they
# differ, train the encoder longer or make it larger; if not, change the family. Check the importance sampling behind
# the log likelihood by its ``pareto_k``.
#
# .. code-block:: python
#
#    vae = flow_vae(data_dim=64, hidden=(64,), latent_dim=5, posterior_transforms=2, prior_transforms=0)
#    fit(vae.model, vae.guide, STL(), train, num_epochs=50, batch_size=100)
#    importance_sampling(vae.model, vae.guide, test).pareto_k.max()
#
# Where to go next: :doc:`elbo_iwae_sumo` closes the gap by many weights, :doc:`held_out_likelihood` has other estimates
# of the likelihood.
