r"""
Probabilistic PCA as a linear variational autoencoder with a known optimum
==========================================================================

**What you will learn:** how to train a linear variational autoencoder, and how to see, by eigenvalues alone, that the
bound has reached the maximum of the likelihood and that the codes are principal components.

Chemists measured thirteen constituents of 178 wines from three cultivars of one region of Italy :cite:p:`forina1986`;
the data come with scikit-learn. How much of the thirteen do two numbers for each wine tell? Principal component
analysis is the answer of a model with a likelihood :cite:p:`tipping1999`, and that model is a variational autoencoder
without hidden layers :cite:p:`lucas2019`.
"""

# sphinx_gallery_thumbnail_number = -1
import functools
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_normal
from sklearn.datasets import load_iris, load_wine

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.held_out import importance_sampling
from bayeskit.inference.objectives import ELBO
from bayeskit.models.vae import LinearVAE

# %%
# The model
# ---------
# A code :math:`z` of two numbers makes each wine, and the guide makes a code of each wine. Both are linear,
#
# .. math::
#
#    z \sim N(0, I), \qquad x \mid z \sim N(W z + \mu, \sigma^2 I), \qquad
#    q(z \mid x) = N(A x + b, \mathrm{diag}(s^2)),
#
# and everything but :math:`z` is learnt. The code integrates out, :math:`x \sim N(\mu, W W^\top + \sigma^2 I)`. With
# the eigenvalues :math:`\lambda_1 \ge \dots \ge \lambda_d` of the data's covariance (divided by :math:`n`), the
# greatest log likelihood that any :math:`W, \mu, \sigma` with codes of :math:`q` numbers can reach is
#
# .. math::
#
#    -\frac{n}{2} \Big( d \log 2 \pi + \sum_{i \le q} \log \lambda_i + (d - q) \log \sigma^2 + d \Big), \qquad
#    \sigma^2 = \frac{1}{d - q} \sum_{i > q} \lambda_i .


def greatest_log_likelihood(x: np.ndarray, q: int) -> float:
    n, d = x.shape
    eigenvalues = np.linalg.eigvalsh(np.cov(x.T, bias=True))[::-1]
    rest = eigenvalues[q:].mean()
    return -0.5 * n * (d * math.log(2 * math.pi) + np.log(eigenvalues[:q]).sum() + (d - q) * math.log(rest) + d)


wine = load_wine()
x = torch.as_tensor((wine.data - wine.data.mean(0)) / wine.data.std(0))
n, d = x.shape
with global_stream(torch.Generator().manual_seed(0)):
    vae = LinearVAE(data_dim=d, latent_dim=2).double()

# %%
# Before the data
# ---------------
# Weights start at random, and it shows in the wines that the untrained model makes: phenols and flavanoids, which rise
# and fall together in real wines, have little to do with each other.

phenols, flavanoids = (wine.feature_names.index(name) for name in ("total_phenols", "flavanoids"))
before = Figure(figsize=(7, 3.4), layout="constrained")
panels = before.subplots(1, 2, sharex=True, sharey=True)
for axes, wines, title in zip(panels, (x, vae.generate(n, seed=0)), ("178 wines", "178 from the start"), strict=True):
    correlation = float(torch.corrcoef(wines[:, [phenols, flavanoids]].T)[0, 1])
    axes.plot(wines[:, phenols], wines[:, flavanoids], "o", markersize=3)
    axes.set(xlabel="total phenols (standardised)", title=f"{title}, correlation {correlation:.2f}")
panels[0].set_ylabel("flavanoids (standardised)")

# %%
# An exact twin
# -------------
# On the four measurements of 150 irises: the density of a model with arbitrary parameters against scipy's, and the
# model of greatest likelihood against the eigenvalues. There the guide is the posterior, so that the bound touches the
# likelihood; and the gradient of the likelihood is zero.

iris = torch.as_tensor(load_iris().data)
with global_stream(torch.Generator().manual_seed(1)):
    twin = LinearVAE(data_dim=4, latent_dim=2).double()
weight, noise = twin.decoder.weight.detach(), twin.likelihood.log_scale.detach().exp()
covariance = weight @ weight.T + noise**2 * torch.eye(4)
by_scipy = multivariate_normal(twin.decoder.bias.detach(), covariance).logpdf(iris)
assert np.abs(twin.log_likelihood(iris).detach().numpy() - by_scipy).max() < 1e-9
assert bool((twin.lower_bound(iris) < twin.log_likelihood(iris)).all())

best = LinearVAE.maximum_likelihood(iris, latent_dim=2)
likelihood, bound = best.log_likelihood(iris).sum(), best.lower_bound(iris).sum()
formula = greatest_log_likelihood(iris.numpy(), 2)
print(f"irises: by eigenvalues {formula:.9f}, model {likelihood.item():.9f}, bound {bound.item():.9f}")
assert abs(likelihood.item() - formula) < 1e-9 and abs(bound.item() - formula) < 1e-9
slopes = torch.autograd.grad(likelihood, [best.decoder.weight, best.decoder.bias, best.likelihood.log_scale])
assert max(float(slope.abs().max()) for slope in slopes) < 1e-9

# %%
# The fit
# -------
# The wines, by stochastic gradients of the evidence lower bound: the divergence of guide from prior in closed form,
# the rest by eight codes a wine. The learning rate falls to nothing, and the noise of the gradients with it.

steps = 2000 if is_small() else 3000
result = bk.fit(
    vae.model,
    vae.guide,
    ELBO(num_particles=8),
    x,
    num_steps=steps,
    optimizer=functools.partial(torch.optim.Adam, lr=0.03),
    schedule=functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
    seed=0,
    progress=False,
)
bound, likelihood = vae.lower_bound(x).sum().item(), vae.log_likelihood(x).sum().item()
maximum = greatest_log_likelihood(x.numpy(), 2)
print(f"evidence lower bound of all wines {bound:.4f}\nlog likelihood                    {likelihood:.4f}")
print(f"its maximum, by eigenvalues       {maximum:.4f}")

# %%
# The order is a theorem. How near is near enough? Half a nat of log likelihood, for all data together, is where a
# likelihood ratio test puts one standard error of a single parameter; a model that is closer than this to the best
# cannot be told from it by these wines.

assert bound <= likelihood <= maximum
assert maximum - bound < 0.5

# %%
# What it says
# ------------
# The likelihood does not care in which directions of their plane the two codes point: any rotation of :math:`z` makes
# the same wines. The bound does, for the guide's codes are independent, and posterior ones are so only along principal
# axes. Hence the trained columns of :math:`W` point along eigenvectors of the covariance :cite:p:`lucas2019`, and codes
# are principal components, standardised and shrunk towards zero by :math:`\sqrt{1 - \sigma^2 / \lambda_i}`.

eigenvalues, vectors = np.linalg.eigh(np.cov(x.numpy().T, bias=True))
columns = vae.decoder.weight.detach().numpy()
largest_first = np.argsort(-np.linalg.norm(columns, axis=0))
columns = (columns / np.linalg.norm(columns, axis=0))[:, largest_first]
cosines = (columns * vectors[:, [-1, -2]]).sum(0)
print(f"cosines of columns and eigenvectors: {abs(cosines[0]):.5f} and {abs(cosines[1]):.5f}")
print(f"two components hold {100 * eigenvalues[-2:].sum() / d:.1f} % of the variance")

# %%
# Importance sampling from the guide estimates the log likelihood without knowing the formula. Its error is tiny,
# because weights are constant where the guide is the posterior.

estimate = importance_sampling(vae.model, vae.guide, x, num_samples=1000, seed=0, progress=False)
print(f"log likelihood a wine {estimate.mean:.6f} +- {estimate.standard_error:.6f}, exactly {likelihood / n:.6f}")
assert estimate.trusted and abs(estimate.mean - likelihood / n) < 4.5 * estimate.standard_error

# %%
# On the left every step's noisy bound, on the right the code of each wine. The three cultivars, which the model has
# never heard of, fall apart.

codes = vae.encode(x).numpy()[:, largest_first] * np.sign(cosines)
figure = Figure(figsize=(9, 3.8), layout="constrained")
left, right = figure.subplots(1, 2)
left.semilogx(range(1, steps + 1), -result.losses, linewidth=0.5, label="bound of a step")
left.axhline(maximum / n, color="C1", linestyle="--", label="maximum by eigenvalues")
left.set(xlabel="step", ylabel="log likelihood a wine (nats)", ylim=(maximum / n - 1.5, maximum / n + 0.5))
left.legend()
for cultivar, marker in enumerate("os^"):
    chosen = wine.target == cultivar
    right.plot(*codes[chosen].T, marker, color=f"C{cultivar}", markersize=4, label=f"cultivar {cultivar + 1}")
right.set(xlabel="first code", ylabel="second code", xlim=(-2.3, 2.3))
right.legend()

# %%
# A failure on purpose
# --------------------
# Factors cannot be read off the likelihood. Turn the codes of the best model by 45 degrees: each column is now a
# mixture of two components, and the likelihood is the same to rounding. The bound tells the two apart, only because its
# guide has independent codes.

turned = LinearVAE.maximum_likelihood(x, latent_dim=2)
before_turn = turned.log_likelihood(x).sum().item()
turn = torch.tensor([[1.0, -1.0], [1.0, 1.0]], dtype=torch.float64) / math.sqrt(2)
with torch.no_grad():
    turned.decoder.weight.copy_(turned.decoder.weight @ turn)
    turned.encoder.mean.weight.copy_(turn.T @ turned.encoder.mean.weight)
    turned.encoder.mean.bias.copy_(turn.T @ turned.encoder.mean.bias)
    after_turn, its_bound = turned.log_likelihood(x).sum().item(), turned.lower_bound(x).sum().item()
print(f"log likelihood {before_turn:.6f}, after the turn {after_turn:.6f}, bound {its_bound:.2f}")
assert abs(after_turn - before_turn) < 1e-6 and its_bound < after_turn - 1

# %%
# Try it on yours
# ---------------
# Replace ``x`` by your standardised table, and choose the number of codes.
#
# .. code-block:: python
#
#    vae = LinearVAE(data_dim=d, latent_dim=2).double()
#    bk.fit(vae.model, vae.guide, ELBO(num_particles=8), x, num_steps=500)
#    print(greatest_log_likelihood(x.numpy(), 2) - vae.lower_bound(x).sum().item())
#
# Look at this gap: below half a nat, training has arrived. Do it before you add hidden layers; an optimiser that misses
# this optimum will miss others. Give meaning to a component only if its eigenvalue stands apart from the next.
#
# Where to go next: :doc:`variational_autoencoder` puts hidden layers into both networks, :doc:`elbo_iwae_sumo` shows
# what a guide costs that is not the posterior, :doc:`held_out_likelihood` estimates likelihoods where no formula is
# known.
