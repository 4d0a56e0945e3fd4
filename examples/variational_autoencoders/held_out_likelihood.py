r"""
Held-out likelihood of a latent-variable model, and the known optimum of a linear one
=====================================================================================

**What you will learn:** how to see by eigenvalues that a linear variational autoencoder has reached its optimum, how
good a trained model is on new data, which of three estimates to take, and how each of them says that it has failed.

Training reports a bound; of new data one wants the log likelihood itself. Importance sampling draws codes from the
guide, annealed importance sampling moves such draws to the posterior :cite:p:`neal2001,wu2017`, and bridge sampling
runs chains on the posterior of each datum. The data are thirty measurements of cell nuclei from each of 569 breast
tumours :cite:p:`street1993`, from scikit-learn. The model is probabilistic PCA :cite:p:`tipping1999`, a variational
autoencoder without hidden layers :cite:p:`lucas2019`, of which everything is known.
"""

# sphinx_gallery_thumbnail_number = -1
import copy
import functools

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_normal
from sklearn.datasets import load_breast_cancer

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.evidence import Budget
from bayeskit.inference.held_out import annealed_importance_sampling, by_evidence, importance_sampling
from bayeskit.inference.objectives import ELBO
from bayeskit.models.vae import LinearVAE

# %%
# The model
# ---------
# A code of five numbers makes the thirty measurements. The networks are linear, and the code integrates out:
#
# .. math::
#
#    z \sim N(0, I), \qquad x \mid z \sim N(W z + \mu, \sigma^2 I), \qquad x \sim N(\mu, W W^\top + \sigma^2 I).
#
# With the eigenvalues :math:`\lambda_1 \ge \dots \ge \lambda_d` of the data's covariance (divided by :math:`n`), the
# greatest log likelihood that any :math:`W, \mu, \sigma` with codes of :math:`q` numbers can reach is
#
# .. math::
#
#    -\frac{n}{2} \Big( d \log 2 \pi + \sum_{i \le q} \log \lambda_i + (d - q) \log \sigma^2 + d \Big), \qquad
#    \sigma^2 = \frac{1}{d - q} \sum_{i > q} \lambda_i .
#
# What importance sampling and its kin estimate is :math:`p(x) = \int p(x, z) \, dz` for one :math:`x` at a time, given
# what was trained. Four hundred tumours are for training, and the rest are held out.

raw = load_breast_cancer()
order = np.random.default_rng(0).permutation(len(raw.data))
x = torch.as_tensor(((raw.data - raw.data.mean(0)) / raw.data.std(0))[order])
train, test = x[:400], x[400:]


def greatest_log_likelihood(x: np.ndarray, q: int) -> float:
    n, d = x.shape
    eigenvalues = np.linalg.eigvalsh(np.cov(x.T, bias=True))[::-1]
    rest = eigenvalues[q:].mean()
    return -0.5 * n * (d * np.log(2 * np.pi) + np.log(eigenvalues[:q]).sum() + (d - q) * np.log(rest) + d)


def new_vae(data_dim: int, latent_dim: int) -> LinearVAE:
    with global_stream(torch.Generator().manual_seed(0)):
        return LinearVAE(data_dim, latent_dim).double()


# %%
# Before the data
# ---------------
# Tumours that the untrained model makes: radius and area, which determine each other in real ones, go their own ways.

vae = new_vae(30, 5)
radius, area = (list(raw.feature_names).index(name) for name in ("mean radius", "mean area"))
before = Figure(figsize=(5, 3.4), layout="constrained")
axes = before.subplots()
for tumours, marker, label in ((train, "o", "400 tumours"), (vae.generate(400, seed=0), "^", "400 from the start")):
    axes.plot(tumours[:, radius], tumours[:, area], marker, markersize=3, alpha=0.6, label=label)
axes.set(xlabel="mean radius (standardised)", ylabel="mean area (standardised)")
axes.legend()

# %%
# An exact twin
# -------------
# Three measurements and a code of one number, parameters as they come: three data by all three ways, against scipy's
# multivariate normal density.


def z_scores(found, exact: torch.Tensor) -> torch.Tensor:
    """Return by how many of its standard errors each estimate is off, after the diagnostics have been heard."""
    assert found.trusted, found.warnings
    return (found.log_likelihood - exact) / found.pointwise_standard_error


tiny = new_vae(3, 1)
weight, variance = tiny.decoder.weight.detach(), float(tiny.likelihood.log_scale.detach().exp()) ** 2
density = multivariate_normal(tiny.decoder.bias.detach(), weight @ weight.T + variance * torch.eye(3))
few = torch.tensor([[0.0, 0.0, 0.0], [1.0, -2.0, 0.5], [-1.5, 0.5, 1.0]], dtype=torch.float64)
exact = torch.as_tensor(density.logpdf(few))
assert float((tiny.log_likelihood(few).detach() - exact).abs().max()) < 1e-9

with torch.no_grad():
    tiny.encoder.log_scale += np.log(2.0)  # untrained guides miss: this one is wide enough to be sampled from
budget = Budget(num_chains=16, num_warmup=60 if is_small() else 150, num_samples=60 if is_small() else 100)
roles = tiny.model, tiny.guide, few
ways = {
    "importance sampling": importance_sampling(*roles, num_draws=2000, seed=0, progress=False),
    "annealed": annealed_importance_sampling(*roles, num_temperatures=30, seed=0, progress=False),
    "bridge sampling": by_evidence(*roles, method="bridge_sampling", budget=budget, seed=0, progress=False),
}
for name, found in ways.items():
    z = z_scores(found, exact)
    print(f"{name:20s} off by {float(z[0]):+.2f}, {float(z[1]):+.2f} and {float(z[2]):+.2f} standard errors")
    assert float(z.abs().max()) < 4.5

# %%
# The model of greatest likelihood against the eigenvalues, on the first four measurements. There the guide is the
# posterior, so that the bound touches the likelihood; and the gradient of the likelihood is zero.

best = LinearVAE.maximum_likelihood(train[:, :4], latent_dim=2)
likelihood, bound = best.log_likelihood(train[:, :4]).sum(), best.lower_bound(train[:, :4]).sum()
formula = greatest_log_likelihood(train[:, :4].numpy(), 2)
print(f"by eigenvalues {formula:.9f}, model {likelihood.item():.9f}, bound {bound.item():.9f}")
assert abs(likelihood.item() - formula) < 1e-8 and abs(bound.item() - formula) < 1e-8
slopes = torch.autograd.grad(likelihood, [best.decoder.weight, best.decoder.bias, best.likelihood.log_scale])
assert max(float(slope.abs().max()) for slope in slopes) < 1e-8 * abs(formula)

# %%
# The fit
# -------
# The evidence lower bound trains model and guide. That bound, likelihood and maximum are in this order is a theorem;
# how far training has come is the gap. The bound wants codes that are independent in the posterior, so that the columns
# of :math:`W` point along eigenvectors of the covariance. Then the held-out tumours: all of them by two of the ways,
# and a few by bridge sampling, which takes seconds for each.

epochs = 40 if is_small() else 200
adam = functools.partial(torch.optim.Adam, lr=0.01)
bk.fit(vae.model, vae.guide, ELBO(), train, num_epochs=epochs, batch_size=50, optimizer=adam, seed=0, progress=False)
with torch.no_grad():
    exact, bound = vae.log_likelihood(test), vae.lower_bound(test)
    of_train = vae.lower_bound(train).sum().item(), vae.log_likelihood(train).sum().item()
maximum = greatest_log_likelihood(train.numpy(), 5)
print(f"training: bound {of_train[0]:.1f}, log likelihood {of_train[1]:.1f}, maximum by eigenvalues {maximum:.1f}")
assert of_train[0] <= of_train[1] <= maximum
columns = torch.nn.functional.normalize(vae.decoder.weight.detach(), dim=0)
axes_of_data = torch.linalg.eigh(torch.cov(train.T)).eigenvectors[:, -5:]
print(f"cosines of columns and eigenvectors: {(columns.T @ axes_of_data).abs().max(1).values.numpy().round(3)}")
print(f"evidence lower bound of {len(test)} held-out tumours {float(bound.mean()):.4f} nats each")
num_annealed, num_bridged = (20, 1) if is_small() else (len(test), 4)
roles = vae.model, vae.guide
ways = {
    "importance sampling": importance_sampling(*roles, test, num_draws=2000, seed=0, progress=False),
    "annealed": annealed_importance_sampling(*roles, test[:num_annealed], num_temperatures=30, seed=0, progress=False),
    "bridge sampling": by_evidence(*roles, test[:num_bridged], budget=budget, seed=0, progress=False),
}
for name, found in ways.items():
    z, mean = z_scores(found, exact[: len(found.log_likelihood)]), float(exact[: len(found.log_likelihood)].mean())
    print(f"{name:20s} of {len(z):3d}: {found.mean:.4f} +- {found.standard_error:.4f}, exactly {mean:.4f}, ", end="")
    print(f"{found.seconds:.1f} s")
    assert abs(found.mean - mean) < 4.5 * found.standard_error

# %%
# A failure on purpose
# --------------------
# Importance sampling rests on the guide having its draws wherever the posterior is. Make the guide three times too
# narrow: the estimate is off by far more than its error, and says that it is not to be trusted. Twice too wide costs
# precision and no more.

guides = {}
for name, factor in (("too narrow", 1 / 3), ("too wide", 2.0)):
    spoilt = copy.deepcopy(vae)
    with torch.no_grad():
        spoilt.encoder.log_scale += np.log(factor)
    guides[name] = importance_sampling(spoilt.model, spoilt.guide, test, num_draws=2000, seed=0, progress=False)
    z = (guides[name].mean - float(exact.mean())) / guides[name].standard_error
    print(f"{name}, {z:+.1f} standard errors off: {guides[name]}")
assert not guides["too narrow"].trusted and guides["too wide"].trusted
assert abs(z) < 4.5  # of the last one, too wide

# %%
# What it says
# ------------
# Take importance sampling first, and look at its diagnostics before its error bar: the error is computed from the same
# draws that missed the posterior. The log of a mean that is too noisy is mostly too low, so that a bad guide makes a
# model look worse than it is. For one tumour, the first in the figure, the narrow guide's estimate is far too high
# instead, and its error bar does not tell.

quick = ways["importance sampling"]
print(f"the model has {quick.mean:.4f} +- {quick.standard_error:.4f} nats a tumour, bound {float(bound.mean()):.4f}")
figure = Figure(figsize=(7, 3.6), layout="constrained")
axes = figure.subplots()
for (name, found), marker in zip(guides.items(), "^o", strict=True):
    bars = 2 * found.pointwise_standard_error
    options = {"fmt": marker, "markersize": 4, "linewidth": 0.8, "label": f"guide {name}"}
    axes.errorbar(exact.argsort().argsort(), found.log_likelihood - exact, bars, **options)
axes.axhline(0, color="C6", linestyle="--", linewidth=1)
axes.set(xlabel="held-out tumours, by their exact log likelihood", ylabel="estimate less exact value (nats)")
axes.legend()

# %%
# Try it on yours
# ---------------
# Replace model, guide and ``test``; the model needs one plate of data.
#
# .. code-block:: python
#
#    quick = importance_sampling(vae.model, vae.guide, test, num_draws=2000)
#    print(quick, quick.trusted, float((quick.pareto_k > 0.7).double().mean()))
#
# Look at ``trusted`` and at the share of data with a Pareto shape above 0.7. If it is large, take
# ``annealed_importance_sampling``, and check some data by ``by_evidence``. Compare two models by the differences of
# single data, not by the two means. A linear model first: an optimiser that misses its optimum will miss others.
#
# Where to go next: :doc:`elbo_iwae_sumo` measures the bias of bounds, :doc:`variational_autoencoder` has no closed
# form to compare with.
