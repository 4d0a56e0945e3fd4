r"""
Sparse variational networks: pruning weights by their posterior
===============================================================

**What you will learn:** how a prior that favours zero makes a network smaller, which weights it keeps though they are
zero in truth, and what an exact answer says of the same data.

Of a trained network most weights can be removed :cite:p:`molchanov2017`. Under a sparse prior the posterior says which,
without a threshold for their size. The ten measurements of 442 patients with diabetes :cite:p:`efron2004` are few
enough to know the exact posterior beside it.
"""

import itertools

import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.stats import norm
from sklearn.datasets import load_diabetes
from torch import nn

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.generalized import GibbsPosterior, losses, propriety_check
from bayeskit.inference.objectives import ELBO, Linear
from bayeskit.models.sparse_networks import ImproperLogUniform, SpikeAndSlabPrior, log_uniform_divergence, sparsify
from bayeskit.models.vae import load_digits

# %%
# The model
# ---------
# Each weight has the log-uniform prior :math:`p(w) \propto 1 / |w|`, and the guide :math:`N(\mu, \alpha \mu^2)`. Its
# divergence from the prior depends on :math:`\alpha` alone,
#
# .. math:: \mathrm{KL}(\alpha) = \tfrac12 \mathrm E\,\psi(\tfrac12 + J) - \tfrac12 \psi(\tfrac12), \qquad
#    J \sim \mathrm{Poisson}(1 / (2 \alpha)),
#
# and is zero at infinity: a weight that is all noise costs nothing. The other prior here is the mixture of a point at
# zero and a normal distribution, :math:`w = 0` with probability :math:`1 - p`, else :math:`w \sim N(0, s^2)`.

table = load_diabetes()
x, y = torch.as_tensor(table.data), torch.as_tensor(table.target)
x, y = (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std()
noise = float((y - x @ torch.linalg.lstsq(x, y).solution).square().sum() / (len(y) - 11)) ** 0.5
spike = SpikeAndSlabPrior(probability=0.3, scale=0.35)

# %%
# Before the data
# ---------------
# The log-uniform prior has no draws: it has infinite mass at zero, and however well the data determine the weights,
# the mass at zero stays. The posterior is improper :cite:p:`hron2018`, so that there is neither evidence nor a
# probability that a weight is zero.

loss = losses.FunctionLoss(lambda w, data: 0.5 * ((data[1] - data[0] @ w) / noise).square())
report = propriety_check(GibbsPosterior(ImproperLogUniform((10,)), loss, (x, y)))
print(f"{report!r:.160}...")
assert not report.proper

# %%
# An exact twin
# -------------
# With orthonormal predictors and noise of scale one, weights do not know of each other. Let :math:`z` be the estimate
# of one. Near zero the best :math:`\sigma^2` is :math:`|\mu|`, the divergence :math:`1 / (2 \alpha)`, and the bound
# loses :math:`(1 - |z|) |\mu|`: this is a soft threshold at exactly :math:`|z| = 1`. The search over a grid finds it.

z = torch.tensor([0.5, 0.9, 0.98, 1.02, 1.1, 1.5, 2.0, 3.0, 4.0], dtype=torch.float64)
share = torch.cat([torch.logspace(-6, -2, 40), torch.linspace(0.02, 1, 99)]).double()
mean, log_scale = z[:, None, None] * share[:, None], torch.linspace(-9, 1, 300).double()
cost = 0.5 * ((z[:, None, None] - mean).square() + (2 * log_scale).exp())
cost = (cost + log_uniform_divergence(2 * log_scale - mean.square().log())).amin(-1)
shrunk = z * share[cost.argmin(1)]
print("z       " + " ".join(f"{v:6.2f}" for v in z.tolist()))
print("best    " + " ".join(f"{v:6.2f}" for v in shrunk.tolist()))
assert bool(((shrunk > 1e-4) == (z > 1)).all())
print(f"of weights that are zero {2 * norm.sf(1):.1%} have |z| > 1, and {2 * norm.sf(1.0411):.1%} log alpha below 3")

# %%
# The fit
# -------
# The measurements of serum are correlated, and the guide is not. With the spike and the slab, all 1,024 subsets can be
# summed, so that the bound has to be below the log evidence, and is. (Pages on
# :doc:`regression </gallery/discrete_latent_variables/spike_and_slab_regression>` learn the noise, too.)


def fitted(module, likelihood, data, prior, steps, **options):
    """Train the posterior of a module by minibatches or all data."""
    network = sparsify(module, likelihood, num_data=len(data[0]), prior=prior, initial_scale=0.03)
    bk.fit(
        *(network.model, network.guide, ELBO(kl_weight=Linear(steps // 2)), data),
        num_steps=steps,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps),
        progress=False,
        **options,
    )
    return network


def line(columns):
    """Return a linear layer that starts at small weights."""
    layer = nn.Linear(columns, 1, bias=False).double()
    nn.init.constant_(layer.weight, 0.1)
    return layer


steps = 400 if is_small() else 2000
fits = {
    prior if isinstance(prior, str) else "spike_and_slab": fitted(
        line(10), lambda f: dist.Normal(f[:, 0], noise), (x, y), prior, steps
    )
    for prior in ("log_uniform", "horseshoe", spike)
}
subsets = torch.tensor(list(itertools.product([0.0, 1.0], repeat=10)), dtype=torch.float64)
slab = spike.scale / noise * subsets
precision = torch.eye(10) + slab[:, :, None] * (x.T @ x) * slab[:, None]
score = slab * (x.T @ y) / noise
gain = (score * torch.linalg.solve(precision, score)).sum(-1) - torch.logdet(precision)
log_joint = 0.5 * gain + dist.Bernoulli(spike.probability).log_prob(subsets).sum(-1)
log_joint += dist.Normal(0.0, noise).log_prob(y).sum()
evidence, inclusion = float(log_joint.logsumexp(0)), log_joint.softmax(0) @ subsets
network = fits["spike_and_slab"]
with torch.no_grad(), global_stream(torch.Generator().manual_seed(0)):
    bounds = -torch.tensor([ELBO().loss(network.model, network.guide, x, y) for _ in range(200)])
bound, error = float(bounds.mean()), float(bounds.std()) / 200**0.5
print(f"log evidence {evidence:.2f}, bound {bound:.2f} +- {error:.2f}")
assert bound < evidence + 4.5 * error

weights = {name: fit.layers[0].weights.moments()[0][0].tolist() for name, fit in fits.items()}
kept = {name: fit.kept()["layer"][0].tolist() for name, fit in fits.items()}
print("        in, exactly " + "".join(f"{name:>16s}" for name in fits))
for j, feature in enumerate(table.feature_names):
    cells = "".join(f"{weights[name][j]:10.3f} {'in ' if kept[name][j] else 'out'}  " for name in fits)
    print(f"{feature:8s}{float(inclusion[j]):10.3f}  {cells}")

# %%
# A failure on purpose
# --------------------
# Fifty predictors without any effect. The log-uniform prior keeps three of ten of their weights, since it has no
# probability that a weight is zero, which a spike and a slab have.

generator = torch.Generator().manual_seed(1)
nothing = torch.linalg.qr(torch.randn(60, 50, generator=generator, dtype=torch.float64)).Q
silence = torch.randn(60, generator=generator, dtype=torch.float64)
larger = float(((nothing.T @ silence).abs() > 1.0411).double().mean())
for name, prior in (("log_uniform", "log_uniform"), ("spike_and_slab", SpikeAndSlabPrior(0.1, 3.0))):
    null = fitted(line(50), lambda f: dist.Normal(f[:, 0], 1.0), (nothing, silence), prior, 2 * steps)
    wrong = float(null.kept()["layer"].double().mean())
    print(f"{name:14s} keeps {wrong:.0%} of weights that are zero; {larger:.0%} have |z| > 1.0411")
    assert (wrong > 0.15) == (name == "log_uniform")

# %%
# What it says
# ------------
# In a network, weights that are not needed are many, and what the prior keeps in error does not matter. A perceptron
# reads digits with a few per cent of its weights; units that nothing reads are left out, and the spread of the
# posterior says how many bits a weight is worth :cite:p:`louizos2017`. Outputs are drawn in place of weights
# :cite:p:`kingma2015`.

digits, sizes = load_digits(), (64, 100, 50, 10)
with global_stream(torch.Generator().manual_seed(0)):
    module = nn.Sequential(*(part for a, b in itertools.pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())))[:-1]
data, size = (digits.train, digits.train_labels), 100
network = fitted(module, lambda f: dist.Categorical(logits=f), data, "log_uniform", 5 * steps // 4, batch_size=size)


def accuracy(module):
    """Return the share of test images that are read right."""
    with torch.no_grad():
        return float((module(digits.test).argmax(-1) == digits.test_labels).double().mean())


small = network.compressed(rounding=0.1)
numbers = [sum(p.numel() for p in part.parameters()) for part in (module, small)]
print(f"accuracy {accuracy(network):.3f}, pruned and rounded {accuracy(small):.3f}")
print(f"{numbers[1]} numbers of {numbers[0]} are left")
print(small, network.precision())
with torch.no_grad():
    assert torch.allclose(network.compressed()(digits.test), network.pruned()(digits.test), atol=1e-4)

figure = Figure(figsize=(8, 3.2), layout="constrained")
left, right = figure.subplots(1, 2)
left.plot(z, shrunk, "o-", label="log-uniform prior")
left.plot([0, 4], [0, 4], ":", color="grey", label="estimate")
left.set(xlabel="estimate in standard errors", ylabel="posterior mean")
left.legend()
fractions = [0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1.0]
right.semilogx(fractions, [accuracy(network.pruned(f)) for f in fractions], "o-")
right.axvline(sum(int(k.sum()) for k in network.kept().values()) / 11900, color="grey", linestyle=":")
right.set(xlabel="weights kept (dotted: the rule)", ylabel="accuracy on test images")

# %%
# Try it on yours
# ---------------
# Give :func:`~bayeskit.models.sparse_networks.sparsify` your module, a likelihood and the number of rows; a layer that
# cannot be made stochastic is named, with what to take instead. With ``groups=True`` whole neurons and channels go.
# Train with the divergence annealed, look at accuracy against the fraction kept, and compare with pruning by magnitude
# and training again, which is cheaper: ``benchmarks/sparse_networks.py`` does it.
#
# .. code-block:: python
#
#    module = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
#    network = sparsify(module, lambda f: dist.Categorical(logits=f), num_data=len(digits.train))
#    bk.fit(network.model, network.guide, ELBO(), (digits.train, digits.train_labels), num_epochs=5, batch_size=100)
#    print(network.compressed(), network.precision())
#
# Where to go next: :doc:`/gallery/discrete_latent_variables/spike_and_slab_regression` has exact inclusion
# probabilities, :doc:`laplace_with_the_right_fisher` the posterior of a network that keeps its weights.
