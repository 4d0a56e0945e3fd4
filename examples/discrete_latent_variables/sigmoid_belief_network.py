r"""
Sigmoid belief networks: reweighted wake-sleep, VIMCO and TVO against the exact likelihood
==========================================================================================

**What you will learn:** which objectives train a network of binary latent variables, which divergence from the
posterior each of them leaves to the guide, and how many particles a wake update needs.

A sigmoid belief network :cite:p:`neal1992` has layers of bits, each given the layer above. Bits have no pathwise
gradient. Wake-sleep :cite:p:`hinton1995`, reweighted wake-sleep :cite:p:`bornschein2015`, the multi-sample bound with
leave-one-out baselines (VIMCO, :cite:p:`mnih2016`) and the thermodynamic variational objective (TVO,
:cite:p:`masrani2019`) do without. With twelve hidden bits every one of them can be compared with the exact log
likelihood. The data are images of digits :cite:p:`alpaydin1998` with 64 pixels, black or white.
"""

# sphinx_gallery_thumbnail_number = -1
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits

from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.gradients import LeaveOneOut
from bayeskit.inference.objectives import ELBO, IWAE, TVO, ReweightedWakeSleep
from bayeskit.inference.training import fit
from bayeskit.models.discrete import SigmoidBeliefNetwork

# %%
# The model
# ---------
# Four bits :math:`h_0`, eight bits :math:`h_1` and the image :math:`x`,
#
# .. math::
#
#    h_0 \sim \mathrm{Bernoulli}(\sigma(b_0)), \quad h_1 \mid h_0 \sim \mathrm{Bernoulli}(\sigma(b_1 + W_1 h_0)), \quad
#    x \mid h_1 \sim \mathrm{Bernoulli}(\sigma(b_2 + W_2 h_1)).
#
# The guide :math:`q(h \mid x)` has independent bits with logits linear in the image. With :math:`K` draws of the guide
# and their weights :math:`w_k = p(x, h_k) / q(h_k \mid x)`, normalised to :math:`\bar w_k`, reweighted wake-sleep
# follows
#
# .. math::
#
#    \nabla_\theta \log \frac{1}{K} \sum_k w_k \quad \text{(model)}, \qquad
#    \sum_k \bar w_k \nabla_\phi \log q(h_k \mid x) \quad \text{(guide: wake)}, \qquad
#    \nabla_\phi \log q(h \mid x), \; (h, x) \sim p \quad \text{(guide: sleep)}.
#
# The wake update minimises :math:`\mathrm{KL}(p \,\|\, q)`, posterior first; the evidence lower bound (ELBO) minimises
# :math:`\mathrm{KL}(q \,\|\, p)`, guide first.

images = torch.as_tensor(load_digits().data > 7.5, dtype=torch.float64)
images = images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]
train, test = images[:1200], images[1200:1500]
layers, num_particles = [4, 8, 64], 10

# %%
# Before the data
# ---------------
# Images from a network with its initial weights are noise of independent pixels; there is no prior over weights.

untrained = SigmoidBeliefNetwork(layers, seed=0).double()


def rows_of_images(*rows: torch.Tensor) -> torch.Tensor:
    framed = [torch.nn.functional.pad(row.reshape(-1, 8, 8), (1, 1, 1, 1), value=0.4) for row in rows]
    return torch.cat([row.movedim(0, 1).flatten(1) for row in framed])


before = Figure(figsize=(7, 2.2), layout="constrained")
axes = before.subplots()
axes.imshow(rows_of_images(untrained.generate(12, seed=0), train[:12]), cmap="gray_r")
axes.set(xticks=[], yticks=[4.5, 14.5], yticklabels=["network", "data"])

# %%
# An exact twin
# -------------
# The 4,096 states of the hidden bits, listed. Their joint densities give the log likelihood of an image, which has to
# be that of the network's sum layer by layer. They also give the integral that TVO cuts into pieces: the expected log
# weight under :math:`q^{1 - \beta} p^\beta`, over :math:`\beta` from 0 to 1, is the log likelihood.

states = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 12)


def log_bits(logits: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    return bits @ logits.T - torch.nn.functional.softplus(logits).sum(-1)  # (states, rows)


def enumerated(network: SigmoidBeliefNetwork, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log density of each hidden state jointly with each image, and given the image by the guide."""
    with torch.no_grad():
        first, second = network.downwards
        top, below = states[:, :4], states[:, 4:]
        log_h = log_bits(network.top[None], top)[:, 0] + (below * first(top) - first(top).exp().log1p()).sum(-1)
        log_x = log_bits(second(below), x).T
        return log_h[:, None] + log_x, log_bits(torch.cat(network.guide_logits(x), -1), states)


log_p, log_q = enumerated(untrained, test)
log_w = log_p - log_q
nodes, weights = (torch.as_tensor(each) for each in np.polynomial.legendre.leggauss(40))
betas = (nodes + 1) / 2
means = torch.stack([((log_q + beta * log_w).softmax(0) * log_w).sum(0) for beta in betas])
by_network = untrained.log_evidence(test).detach()
by_states, by_temperatures = log_p.logsumexp(0), (weights / 2) @ means
print(f"log likelihood of the first image: network {by_network[0]:.9f}, states {by_states[0]:.9f}", end=", ")
print(f"temperatures {by_temperatures[0]:.9f}")
assert torch.allclose(by_network, by_states, rtol=0, atol=1e-9)
assert torch.allclose(by_network, by_temperatures, rtol=0, atol=1e-7)

# %%
# A failure on purpose: one particle
# ----------------------------------
# Normalised by itself a weight is one, and the mean of :math:`\nabla_\phi \log q` is zero: with one particle the wake
# update is noise. Below, many wake updates of one guide at one image; the exact one is :math:`\mathrm{E}_p h -
# \mathrm{E}_q h`. The mean along it comes from zero to one as particles are added, at a bias of order :math:`1 / K`.

num_rows = 1000 if is_small() else 4000
one = test[:1].expand(num_rows, -1)
repeated = SigmoidBeliefNetwork(layers, num_data=num_rows, seed=0).double()  # the same model; logits for each row
torch.nn.init.constant_(repeated.upwards.weight, 1.0)
log_p, log_q = (each[:, 0] for each in enumerated(repeated, one))
exact = (log_p.softmax(0) - log_q.exp()) @ states
along = {}
for count in (1, 10, 100):
    with global_stream(torch.Generator().manual_seed(count)):
        ReweightedWakeSleep(count).differentiable_loss(repeated.model, repeated.guide, one).backward()
    updates = -repeated.upwards.weight.grad @ exact / exact.square().sum()
    along[count] = float(updates.mean()), float(updates.std()) / num_rows**0.5
    print(f"{count:3d} particle(s): wake update along the exact one {along[count][0]:.3f} +- {along[count][1]:.3f}")
    repeated.zero_grad()
assert abs(along[1][0]) < 4.5 * along[1][1]
assert along[10][0] > 4.5 * along[10][1] and along[100][0] - along[10][0] > 4.5 * along[10][1] + 4.5 * along[100][1]

# %%
# The fit
# -------
# The same network trained by each objective, and by the exact likelihood. Held-out images are judged exactly: by their
# log likelihood, and by how far the guide is from the posterior in either direction. Errors are those of the mean over
# images, for these trained networks.

num_steps = 60 if is_small() else 600
optimizer = partial(torch.optim.Adam, lr=0.01)
methods = {
    "ELBO": ELBO(),
    "TVO": TVO(num_particles),
    "VIMCO": IWAE(num_particles),
    "wake": ReweightedWakeSleep(num_particles),
    "sleep": ReweightedWakeSleep(1, wake_phi=0.0, sleep_phi=1.0, observed={"x": "x"}),
}
best = SigmoidBeliefNetwork(layers, seed=0).double()
adam, generator = optimizer(best.parameters()), torch.Generator().manual_seed(0)
for _ in range(num_steps):
    adam.zero_grad()
    (-best.log_evidence(train[torch.randint(len(train), (100,), generator=generator)]).mean()).backward()
    adam.step()
exactly = best.log_evidence(test).detach()
print(f"trained exactly: log likelihood {exactly.mean():.3f} nats an image")
networks, found = {}, {}
for name, objective in methods.items():
    network = SigmoidBeliefNetwork(layers, gradient=LeaveOneOut(num_particles) if name == "ELBO" else None, seed=0)
    settings = {"num_steps": num_steps, "batch_size": 100, "optimizer": optimizer, "seed": 0, "progress": False}
    fit(network.model, network.guide, objective, {"x": train.float()}, **settings)
    networks[name] = network.double()
    log_p, log_q = enumerated(network, test)
    log_posterior = log_p.log_softmax(0)
    gain, change = log_p.logsumexp(0) - by_network, log_p.logsumexp(0) - exactly
    guide_first = float((log_q.exp() * (log_q - log_posterior)).sum(0).mean())
    posterior_first = float((log_posterior.exp() * (log_posterior - log_q)).sum(0).mean())
    found[name] = float(change.mean()), float(change.std()) / len(test) ** 0.5, guide_first, posterior_first
    print(f"{name:5s} against exact training {found[name][0]:.3f} +- {found[name][1]:.3f} nats", end="")
    print(f"   KL(q || p) {guide_first:.3f}   KL(p || q) {posterior_first:.3f}")
    assert gain.mean() > 4.5 * gain.std() / len(test) ** 0.5 and min(guide_first, posterior_first) > 0
assert is_small() or found["ELBO"][2] < found["VIMCO"][2]

# %%
# What it says
# ------------
# An objective shapes the model, not only the guide. The ELBO pays for :math:`\mathrm{KL}(q \,\|\, p)`, so its model has
# posteriors of nearly independent bits; that of VIMCO has posteriors from which its guide is several times as far. A
# guide's divergence is therefore no measure of a model, and a bound says less than the likelihood that it bounds. The
# order of methods here is that of one run; repeat it before you prefer one.

figure = Figure(figsize=(9, 4), layout="constrained")
left, right = figure.subplots(1, 2, width_ratios=[1, 1.1])
for name, (value, error, guide_first, _) in found.items():
    left.errorbar(guide_first, value, 2 * error, fmt="o", label=name)
left.axhline(0.0, color="0.6", linestyle="--", linewidth=1)
left.set(xlabel="KL(q || p) (nats)", ylabel="log likelihood against exact training (nats)")
left.legend(frameon=False)
drawn = {"data": test[:8], "exact": best.generate(8, seed=1)}
drawn |= {name: network.generate(8, seed=1) for name, network in networks.items()}
right.imshow(rows_of_images(*drawn.values()), cmap="gray_r")
right.set(xticks=[], yticks=4.5 + 10 * np.arange(len(drawn)), yticklabels=drawn)

# %%
# Try it on yours
# ---------------
# Replace the images by a table of zeros and ones, one row a case, and ``layers`` by the sizes you want; the last is the
# number of columns. Look at ``network.log_evidence`` of rows that were held out. It is refused if two adjacent hidden
# layers have more than twenty bits together; then estimate it by importance sampling from the guide.
#
# .. code-block:: python
#
#    from bayeskit.inference import held_out
#
#    network = SigmoidBeliefNetwork([10, 30, table.shape[1]])
#    fit(network.model, network.guide, ReweightedWakeSleep(20), table, num_epochs=100, batch_size=100)
#    held_out.importance_sampling(network.model, network.guide, new_rows, num_draws=5000)
#
# Where to go next: :doc:`gradients_of_choices` compares the gradient estimators,
# :doc:`/gallery/variational_autoencoders/discrete_codes_of_digits` has discrete codes in a network.
