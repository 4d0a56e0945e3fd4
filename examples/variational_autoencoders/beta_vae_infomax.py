r"""
Beta-VAE is InfoMax: active codes against the weight of the KL divergence
=========================================================================

**What you will learn:** what the weight :math:`\beta` of the KL divergence does, which coordinates of a code it
switches off, how to predict that by eigenvalues, and why the noise of the decoder must not be learnt at the same time.

The beta-VAE :cite:p:`higgins2017` multiplies the KL divergence of the evidence lower bound by :math:`\beta > 1`, to get
codes of few and separate coordinates. InfoMax objectives :cite:p:`rezaabad2020` add :math:`\lambda` times the mutual
information of image and code, to get codes that are used. With a Gaussian decoder both are the same family, and both
are an ordinary variational autoencoder with another noise. The images are 1,797 handwritten digits of eight by eight
pixels :cite:p:`alpaydin1998` from scikit-learn.
"""

# sphinx_gallery_thumbnail_number = -1
import functools
import math

import numpy as np
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.held_out import active_units
from bayeskit.inference.objectives import ELBO, infomax_weight
from bayeskit.models.vae import LinearVAE, likelihoods, load_digits, mlp_vae, plot_images

# %%
# The model
# ---------
# A decoder :math:`f` makes the mean of an image of :math:`d` pixels from a code :math:`z \sim N(0, I)` of ten numbers,
# with noise of variance :math:`\sigma^2`. The weighted bound is
#
# .. math::
#
#    L_\beta(\sigma^2) = -\frac{d}{2} \log 2 \pi \sigma^2
#    - \frac{\mathrm{E}_q \|x - f(z)\|^2}{2 \sigma^2} - \beta \, \mathrm{KL}\big(q(z \mid x) \,\|\, p(z)\big)
#    = \beta \, L_1(\beta \sigma^2) + \mathrm{const}.
#
# So the weight :math:`\beta` is the ordinary bound with noise :math:`\beta \sigma^2`. InfoMax adds :math:`\lambda`
# times :math:`\mathrm{E}_q \log p(x \mid z)`, which bounds the mutual information from below up to the entropy of the
# data. That is :math:`(1 + \lambda) L_\beta(\sigma^2)` with :math:`\beta = 1 / (1 + \lambda) < 1`, the ordinary bound
# with less noise. The weight :math:`\beta > 1` is InfoMax with a negative :math:`\lambda`.

digits = load_digits()
mean = digits.train.double().mean(0)
train, test = digits.train.double() - mean, digits.test.double() - mean
d, num_codes = train.shape[1], 10
noise = LinearVAE.maximum_likelihood(train, num_codes).likelihood.log_scale.exp().item() ** 2
print(f"noise of the linear model of greatest likelihood with ten codes: {noise:.5f}")

# %%
# Before the data
# ---------------
# What a weight says on an image before any network is trained: that each pixel has noise of standard deviation
# :math:`\sqrt{\beta} \sigma`. Digits with such noise are hard to read at :math:`\beta = 16`.

betas = (0.25, 1.0, 4.0, 8.0, 16.0)
generator = torch.Generator().manual_seed(0)
noises = torch.randn(len(betas), 10, d, generator=generator, dtype=torch.float64)
before = Figure(figsize=(7, 3.2), layout="constrained")
axes = before.subplots()
scales = (torch.tensor(betas) * noise).sqrt()[:, None, None]
plot_images((digits.test[:10] + scales * noises).clamp(0, 1), axes)
axes.set_yticks([10 * row + 3.5 for row in range(len(betas))], [f"$\\beta$ = {beta:g}" for beta in betas])
axes.tick_params(length=0)

# %%
# An exact twin
# -------------
# First the identity, for networks with a hidden layer and with the same draws of codes: values and gradients agree to
# rounding.


def network(variance: float):
    with global_stream(torch.Generator().manual_seed(0)):
        return mlp_vae(d, (100,), num_codes, likelihoods.Gaussian(variance**0.5, learn=False)).double()


def loss_and_gradients(objective, variance: float):
    vae = network(variance)
    vae.likelihood.log_scale = torch.tensor(0.5 * math.log(variance), dtype=torch.float64)  # not rounded to 32 bits
    with global_stream(torch.Generator().manual_seed(1)):
        loss = objective.differentiable_loss(vae.model, vae.guide, test)
    return loss, torch.autograd.grad(loss, list(vae.parameters()))


for weight in (infomax_weight(3.0), 4.0, 16.0):
    loss, gradients = loss_and_gradients(ELBO(kl_weight=weight), noise)
    ordinary, others = loss_and_gradients(ELBO(), weight * noise)
    constant = 0.5 * d * len(test) * (math.log(2 * math.pi * noise) - weight * math.log(2 * math.pi * weight * noise))
    value = abs(loss.item() / (weight * ordinary.item() + constant) - 1)
    gradient = max(float((a - weight * b).norm() / a.norm()) for a, b in zip(gradients, others, strict=True))
    print(f"weight {weight:5.2f}: the value differs by {value:.0e}, gradients by {gradient:.0e}")
    assert value < 1e-10 and gradient < 1e-10

# %%
# Then the optimum of the linear autoencoder, probabilistic principal component analysis with known noise
# :cite:p:`tipping1999`. A code is active if and only if its eigenvalue :math:`\lambda_i` of the covariance exceeds
# :math:`v = \beta \sigma^2`; its column of weights has the square :math:`\lambda_i - v`, and the divergence of an image
# is :math:`\frac{1}{2} \sum_i \log(\lambda_i / v)` on average, over active codes.

eigenvalues, vectors = torch.linalg.eigh(torch.cov(train.T, correction=0))
eigenvalues, vectors = eigenvalues.flip(0), vectors.flip(1)


def optimum(v: float) -> tuple[LinearVAE, int, float]:
    best = LinearVAE.maximum_likelihood(train, num_codes)
    largest = eigenvalues[:num_codes].clamp_min(v)
    with torch.no_grad():
        best.likelihood.log_scale.fill_(0.5 * math.log(v))
        best.decoder.weight.copy_(vectors[:, :num_codes] * (largest - v).sqrt())
        best.encoder.mean.weight.copy_(best.decoder.weight.T / largest[:, None])
        best.encoder.log_scale.copy_(0.5 * (v / largest).log())
    return best, int((largest > v).sum()), 0.5 * float((largest / v).log().sum())


def divergence(vae, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        q = vae.encoder(images).base_dist
        return 0.5 * (q.mean**2 + q.variance - 1 - q.variance.log()).sum(-1)


for beta in betas:
    best, count, exact = optimum(beta * noise)
    slopes = torch.autograd.grad(best.lower_bound(train).mean(), [best.decoder.weight, best.encoder.mean.weight])
    found = float(divergence(best, train).mean())
    print(f"beta {beta:5.2f}: {count:2d} codes active, divergence {found:.9f}, by eigenvalues {exact:.9f}")
    assert abs(found - exact) < 1e-9 and max(float(slope.abs().max()) for slope in slopes) < 1e-9

# %%
# The fit
# -------
# Linear autoencoders and such with a hidden layer, trained by the weighted bound with the noise fixed. ``active_units``
# counts the coordinates whose posterior mean varies with the image. The counts of the linear ones are predicted above.


def trained(vae, beta: float):
    steps = 50 if is_small() else 700
    adam = functools.partial(torch.optim.Adam, lr=0.03 if isinstance(vae, LinearVAE) else 0.003)
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
    options = {"num_steps": steps, "batch_size": 200, "optimizer": adam, "schedule": cosine, "progress": False}
    bk.fit(vae.model, vae.guide, ELBO(kl_weight=beta), train, seed=0, **options)
    return vae, active_units(vae.guide, train, threshold=0.05).count


def linear(learn_noise: bool = False) -> LinearVAE:
    with global_stream(torch.Generator().manual_seed(0)):
        vae = LinearVAE(d, num_codes)
        vae.likelihood = likelihoods.Gaussian(noise**0.5, learn=learn_noise)
    return vae.double()


runs = {"linear": {}, "hidden layer": {}}
for beta in (20.0,) if is_small() else (0.25, 1.0, 4.0, 20.0):
    for name, start in (("linear", linear), ("hidden layer", functools.partial(network, noise))):
        if name == "linear" and beta < 1:  # too slow to train: the noise is small against the largest eigenvalue
            continue
        vae, count = trained(start(), beta)
        rate = divergence(vae, test)
        runs[name][beta] = count, float(rate.mean())
        print(f"beta {beta:5.2f}, {name:12s}: {count:2d} codes active, ", end="")
        print(f"divergence of test images {rate.mean():6.3f} +- {rate.std() / len(rate) ** 0.5:.3f}")
        if name == "linear":
            best, expected, _ = optimum(beta * noise)
            vae.likelihood.log_scale.fill_(0.5 * math.log(beta * noise))
            gap = float((best.lower_bound(train) - vae.lower_bound(train)).mean().detach())
            print(f"            its bound is {gap:.4f} nats an image below the greatest")
            assert gap > 0 and (is_small() or (count == expected and gap < 1.0))

# %%
# A failure on purpose
# --------------------
# If the noise is learnt as well, :math:`\sigma^2` is no longer known. The learnt variance is the mean squared error of
# a pixel, a larger weight raises that error, and so the threshold :math:`\beta \sigma^2` rises by both factors. With a
# weight of 5.5, ten codes are worth their divergence under fixed noise and four under learnt noise.

beta, grid, values = 5.5, np.geomspace(1e-3, 1, 4000), eigenvalues[:num_codes].numpy()
kept = values > beta * grid[:, None]
error = np.where(kept, beta * grid[:, None], values).sum(1) + eigenvalues[num_codes:].sum().item()
rate = np.where(kept, 0.5 * np.log(values / (beta * grid[:, None])), 0).sum(1)
best = np.argmax(-error / (2 * grid) - 0.5 * d * np.log(grid) - beta * rate)
vae, count = trained(linear(learn_noise=True), beta)
learnt, fixed, expected = vae.likelihood.log_scale.exp().item() ** 2, (values > beta * noise).sum(), kept[best].sum()
print(f"beta {beta:g}: {fixed} codes with fixed noise; with learnt noise {count}, predicted {expected}; ", end="")
print(f"variance {learnt:.4f}, predicted {grid[best]:.4f}")
assert expected < fixed and (is_small() or (count == expected and abs(learnt / grid[best] - 1) < 0.05))

# %%
# What it says
# ------------
# There is one dial, the product :math:`\beta \sigma^2`. To choose :math:`\beta` is to choose by how much pixels may be
# off, and a code that explains less variance than that is switched off. It does not matter whether the result is called
# beta-VAE, InfoMax or another noise. The eigenvalues also tell, roughly, how many codes a network with a hidden layer
# keeps, and at which divergence.

figure = Figure(figsize=(9, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
fine = np.geomspace(0.2, 40, 300)
left.step(fine, (values > fine[:, None] * noise).sum(1), where="post", color="C0", label="by eigenvalues")
right.plot(fine, [optimum(beta * noise)[2] for beta in fine], color="C0", label="by eigenvalues")
for color, marker, (name, found) in zip(("C0", "C1"), "os", runs.items(), strict=True):
    counts, rates = zip(*found.values(), strict=True)
    left.plot(list(found), counts, marker, color=color, label=f"trained, {name}")
    right.plot(list(found), rates, marker, color=color, label=f"trained, {name}")
left.set(ylabel="active codes", ylim=(-0.5, 10.8))
right.set(ylabel="divergence of an image (nats)")
for axes in (left, right):
    axes.set(xscale="log", xlabel=r"weight $\beta$ of the KL divergence")
    axes.set_xticks([0.25, 1, 4, 16], ["0.25", "1", "4", "16"])
    axes.minorticks_off()
    axes.legend()

# %%
# Try it on yours
# ---------------
# Replace ``train`` by your matrix, one row an observation. Before you train, compare the eigenvalues of its covariance
# with :math:`\beta \sigma^2`; then look whether ``active_units`` agrees. Fix the noise, or set :math:`\beta` to one and
# learn it.
#
# .. code-block:: python
#
#    vae = mlp_vae(x.shape[1], (100,), 10, likelihoods.Gaussian(0.15, learn=False))
#    bk.fit(vae.model, vae.guide, ELBO(kl_weight=4.0), x, num_epochs=100, batch_size=100)
#    print((torch.linalg.eigvalsh(torch.cov(x.T)) > 4.0 * 0.15**2).sum(), active_units(vae.guide, x).count)
#
# Where to go next: :doc:`geco` finds the weight from a tolerance of the error, :doc:`held_out_likelihood` learns the
# noise, :doc:`elbo_iwae_sumo` shows what a guide costs that is not the posterior.
