r"""
VAE with missing data: zero, mean, normalised and marginalised inputs
=====================================================================

**What you will learn:** how to train a variational autoencoder on data with missing entries, what to feed its encoder
in their place, and what each choice costs in nats beside the exact answer of probabilistic PCA.

A missing entry is easy for the decoder: its likelihood is left out, which integrates it out exactly
:cite:p:`mattei2019`. The encoder needs an input. Zeros in place of missing entries make the input smaller the more is
missing; sparsity normalisation divides by the share of observed entries :cite:p:`yi2020`; means, or the conditional
expectations of a simpler model, can be filled in. The digits :cite:p:`alpaydin1998` of scikit-learn have eight by
eight pixels. With a linear decoder the likelihood of any set of observed pixels is known, and so is all that an encoder
loses.
"""

# sphinx_gallery_thumbnail_number = -1
import functools

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_normal
from torch.distributions import MultivariateNormal, kl_divergence

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.objectives import ELBO
from bayeskit.models.vae import VAE, DiagonalNormal, LinearVAE, MissingDataVAE, load_digits, mlp, plot_images

# %%
# The model
# ---------
# The decoder is linear, and only pixels in the set :math:`o` are observed,
#
# .. math::
#
#    z \sim N(0, I), \quad x \mid z \sim N(W z + \mu, \sigma^2 I), \qquad
#    x_o \sim N\big(\mu_o, \; W_o W_o^\top + \sigma^2 I\big).
#
# Half of the pixels of each image are missing at random. ``MissingDataVAE`` holds model and guide of any autoencoder;
# ``inputs`` is what it feeds the encoder. The images are not centred, so that a missing pixel that is replaced by zero
# looks like a white one.

digits, generator = load_digits(), torch.Generator().manual_seed(0)
train, test = digits.train.double(), digits.test.double()
d, num_codes = train.shape[1], 10
seen, seen_of_test = (torch.rand(x.shape, generator=generator) < 0.5 for x in (train, test))
mean = torch.where(seen, train, 0.0).sum(0) / seen.sum(0)

# %%
# Before the data
# ---------------
# Digits, what is seen of them, and what goes into the encoder: zeros, means, and zeros with the rest doubled.

before = Figure(figsize=(7, 2.8), layout="constrained")
axes = before.subplots()
images, mask = test[:10], seen_of_test[:10]
rows = [images, torch.where(mask, images, 0.0), torch.where(mask, images, mean), torch.where(mask, images * 2, 0.0)]
plot_images(torch.stack(rows).clamp(0, 1), axes)
axes.set_yticks([10 * row + 3.5 for row in range(4)], ["digits", "zero", "mean", "normalised"])

# %%
# An exact twin
# -------------
# Probabilistic PCA with missing entries, fitted by its exact likelihood. The likelihood of the observed pixels agrees
# with scipy's density of a marginal normal distribution. One fact makes conditional expectations the right input: if
# :math:`A x + b` is the posterior mean of the code of a complete image, then that of an incomplete one is the same
# function of :math:`\mathrm{E}(x \mid x_o)`. Taking expectations of the encoder's input marginalises over what is
# missing, exactly for a linear encoder.

exact = LinearVAE.maximum_likelihood(torch.where(seen, train, mean), num_codes)
optimiser, steps = torch.optim.Adam(exact.parameters(), 0.01), 10 if is_small() else 400
for step in range(steps):
    optimiser.param_groups[0]["lr"] = 0.01 * (1 - step / steps)
    chosen = torch.randint(len(train), (200,), generator=generator)
    optimiser.zero_grad()
    (-exact.log_likelihood(train[chosen], seen[chosen]).mean()).backward()
    optimiser.step()
exact.requires_grad_(False)
weight, noise = exact.decoder.weight, exact.likelihood.log_scale.exp()
covariance = (weight @ weight.T + noise**2 * torch.eye(d, dtype=torch.float64)).numpy()
for image, known in zip(test[:20], seen_of_test[:20], strict=True):
    of_seen = multivariate_normal(exact.decoder.bias[known].numpy(), covariance[np.ix_(known, known)])
    assert abs(of_seen.logpdf(image[known]) - exact.log_likelihood(image, known).item()) < 1e-9


def expected(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the conditional expectation of images given their observed pixels."""
    return torch.where(mask, x, exact.decoder(exact.posterior(x, mask).mean))


through_expectation = exact.posterior(expected(test, seen_of_test), torch.ones_like(seen_of_test)).mean
difference = float((through_expectation - exact.posterior(test, seen_of_test).mean).abs().max())
print(f"posterior means, directly and through the conditional expectation, differ by {difference:.0e} at most")
assert difference < 1e-9

# %%
# The fit
# -------
# Decoder and encoder are trained together from incomplete images, once for each input. The encoder has a hidden layer.
# As the decoder is linear, the log likelihood of the observed pixels of test images is exact, and so is the divergence
# of the guide from the posterior, both normal. The bound, whose draws are the package's, has to be their difference.


def normalised(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x / mask.to(x).mean(-1, keepdim=True).clamp_min(1 / d)


inputs = {
    "zero": None,
    "mean": lambda x, mask: torch.where(mask, x, mean),
    "normalised": normalised,
    "zero and mask": lambda x, mask: torch.cat([x, mask.to(x)], -1),
    "marginalised": expected,
}


def new_model(name: str) -> MissingDataVAE:
    with global_stream(torch.Generator().manual_seed(1)):
        width = 2 * d if name == "zero and mask" else d
        encoder = torch.nn.Sequential(mlp([width, 100]), torch.nn.Tanh(), DiagonalNormal(100, num_codes))
        start = LinearVAE.maximum_likelihood(torch.where(seen, train, mean), num_codes)
        vae = VAE(encoder, start.decoder, num_codes, start.likelihood, (d,)).double()
    return MissingDataVAE(vae, inputs[name])


def exact_likelihood_and_gap(model: MissingDataVAE, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log likelihood of each test image, and the divergence of its guide from its posterior."""
    linear = LinearVAE(d, num_codes).double()
    linear.decoder, linear.likelihood = model.vae.decoder, model.vae.likelihood
    with torch.no_grad():
        q = model.posterior(test, mask)
        normal = MultivariateNormal(q.mean, scale_tril=q.stddev.diag_embed())
        return linear.log_likelihood(test, mask), kl_divergence(normal, linear.posterior(test, mask))


def less(one: torch.Tensor, other: torch.Tensor | float) -> bool:
    """Whether one loss is less than another by 4.5 standard errors over images, which short training need not show."""
    saved = other - one
    return is_small() or bool(saved.mean() > 4.5 * saved.std() / len(saved) ** 0.5)


best = exact.log_likelihood(test, seen_of_test)
print(f"probabilistic PCA by exact likelihood: {best.mean():.2f} nats an image")
print("inputs          log likelihood below that of PCA   guide from posterior (nats)    error of missing pixels")
models, lost, gaps, steps = {}, {}, {}, 30 if is_small() else 600
for name in inputs:
    model = models[name] = new_model(name)
    adam = functools.partial(torch.optim.Adam, lr=3e-3)
    cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
    options = {"num_steps": steps, "batch_size": 200, "optimizer": adam, "schedule": cosine, "progress": False}
    bk.fit(model.model, model.guide, ELBO(), (train, seen), seed=3, **options)
    likelihood, gaps[name] = exact_likelihood_and_gap(model, seen_of_test)
    lost[name] = best - likelihood
    filled = model.vae.decoder(model.posterior(test, seen_of_test).mean).detach()
    error = float((filled - test)[~seen_of_test].square().mean().sqrt())
    sd = [float(v.std() / len(v) ** 0.5) for v in (lost[name], gaps[name])]
    print(f"{name:14s} {lost[name].mean():14.3f} +- {sd[0]:.3f} {gaps[name].mean():18.3f} +- {sd[1]:.3f} {error:18.4f}")
    with global_stream(torch.Generator().manual_seed(2)):
        losses = [ELBO().loss(model.model, model.guide, test, seen_of_test) / len(test) for _ in range(100)]
    assert abs((likelihood - gaps[name]).mean() + np.mean(losses)) < 4.5 * np.std(losses) / 10
ideal = float((expected(test, seen_of_test) - test)[~seen_of_test].square().mean().sqrt())
print(f"exact conditional expectation: error of missing pixels {ideal:.4f}")
pairs = ("mean", "zero"), ("mean", "normalised"), ("marginalised", "mean"), ("marginalised", "zero and mask")
assert all(less(each[better], each[worse]) for each in (lost, gaps) for better, worse in pairs)
assert less(lost["marginalised"], 1.0)

# %%
# A failure on purpose
# --------------------
# Now images of which more is seen, or less, than in training. Filled with means, the complete image departs from the
# mean twice as much as inputs of training, and its posterior is narrower: the guide misses it by more than three times
# as many nats. Sparsity normalisation, made for varying shares, gives inputs the right size and hides how many pixels
# there are, which sets the width of the posterior. Zeros tell the share by their size, and miss the complete image by
# less. With the mask it is missed by less than with any of these three.

shares = (0.3, 0.5, 0.7, 0.9, 1.0)
by_share = {}
print("share seen    " + "".join(f"{share:9.1f}" for share in shares) + "   complete less half")
for name, model in models.items():
    for share in shares:
        mask = torch.rand(test.shape, generator=torch.Generator().manual_seed(5)) < share
        by_share[name, share] = exact_likelihood_and_gap(model, mask)[1]
    change = by_share[name, 1.0] - by_share[name, 0.5]
    changed = f"{change.mean():12.2f} +- {change.std() / len(change) ** 0.5:.2f}"
    print(f"{name:14s}" + "".join(f"{by_share[name, share].mean():9.2f}" for share in shares) + changed)
assert less(3 * by_share["mean", 0.5], by_share["mean", 1.0])
pairs = ("zero", "normalised"), ("zero and mask", "zero"), ("zero and mask", "mean"), ("zero and mask", "normalised")
assert all(less(by_share[better, 1.0], by_share[worse, 1.0]) for better, worse in pairs)

# %%
# What it says
# ------------
# The likelihood of incomplete data is exact with any input; a poor input costs in the bound, and through the bound in
# the decoder that is learnt. Means in place of missing entries beat zeros with or without normalisation in both, and
# conditional expectations of a simple model beat means and mask: their decoder is within a nat of the one that is
# trained by exact likelihood. Where the share of missing entries varies, give the encoder the mask as well.

figure = Figure(figsize=(9, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
for k, name in enumerate(models):
    style = {"color": f"C{k}", "marker": "osD^v"[k], "label": name}
    left.plot(shares, [by_share[name, share].mean() for share in shares], **style)
left.set(xlabel="share of pixels seen", ylabel="guide from posterior (nats)", ylim=(0, 12))
left.axvline(0.5, color="0.6", linestyle=":", linewidth=1)
left.legend(ncols=2, loc="upper center")
x, mask = test[:8], seen_of_test[:8]
fills = torch.stack([models[name].impute(x, mask, 100, seed=6).mean(0) for name in ("zero", "marginalised")])
rows = torch.cat([torch.stack([x, torch.where(mask, x, 0.5)]), fills, expected(x, mask)[None]])
plot_images(rows.clamp(0, 1), right)
right.set_yticks([10 * row + 3.5 for row in range(5)], ["digits", "seen", "zero", "marginalised", "exact"])

# %%
# Try it on yours
# ---------------
# Replace ``x`` by your matrix of real numbers; missing entries are NaN. Zeros and ones take
# ``likelihoods.Bernoulli()``. Compare inputs by the likelihood of entries that you hide. If the chance to be missing
# depends on the missing value itself, none of this holds.
#
# .. code-block:: python
#
#    from bayeskit.inference.objectives import IWAE
#    from bayeskit.models.vae import likelihoods, mlp_vae
#
#    mask = ~x.isnan()
#    mean = x.nanmean(0)
#    vae = mlp_vae(x.shape[1], (100,), 10, likelihood=likelihoods.Gaussian())
#    model = MissingDataVAE(vae, lambda x, mask: torch.where(mask, x, mean))
#    bk.fit(model.model, model.guide, IWAE(10), (x, mask), num_epochs=100, batch_size=100)
#    draws = model.impute(x, mask, 20, seed=0)
#
# Where to go next: :doc:`held_out_likelihood` has the exact answer for complete data, and estimates where no formula is
# known, :doc:`variational_autoencoder` a decoder with a hidden layer.
