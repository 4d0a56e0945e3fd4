r"""
Energy-based models: normalising constants, noise contrast, exchange sampling
=============================================================================

**What you will learn:** how to estimate a normalising constant from below and from above, why noise-contrastive
estimation of it is bridge sampling, what density of inputs a classifier implies, and how to sample the posterior of
parameters whose likelihood has an unknown constant.

A model is often easier to write as an energy than as a density: :math:`p(x) = e^{-E(x)} / Z`. Its constant :math:`Z` is
an integral, and so is the evidence of a Pyro model. The estimators are therefore the same.
"""

# sphinx_gallery_thumbnail_number = 1
import math

import torch
from matplotlib.figure import Figure
from sklearn.datasets import make_moons
from torch import nn
from torch.distributions import Independent, Normal

from bayeskit.errors import BayeskitError
from bayeskit.gallery import is_small
from bayeskit.models.unnormalised import (
    EnergyModel,
    PersistentContrastiveDivergence,
    exchange_posterior,
    fit_energy,
    log_normaliser,
    noise_contrastive_constant,
)

DOUBLE = torch.float64

# %%
# An exact twin
# -------------
# Sixteen spins on a grid have 65,536 states, and a sum over them gives the constant. Annealing from independent spins
# to the model estimates it from below, annealing back from below its inverse, hence from above :cite:p:`grosse2015`.
# The bridge between both sets of paths has the smallest error.


class Grid(nn.Module):
    def __init__(self, side):
        super().__init__()
        self.coupling, self.side = nn.Parameter(torch.tensor(0.4, dtype=DOUBLE)), side

    def bonds(self, x):
        s = (2 * x - 1).unflatten(-1, (self.side, self.side))
        return (s[..., 1:, :] * s[..., :-1, :]).sum((-2, -1)) + (s[..., 1:] * s[..., :-1]).sum((-2, -1))

    def forward(self, x):
        return -self.coupling * self.bonds(x)


spins = EnergyModel.of_bits(Grid(4), 16)
exactly = float(spins.exact_log_normaliser().detach())
steps, found = (1, 3, 10, 30), []
for count in steps:
    found.append(log_normaliser(spins, num_temperatures=count, draws="enumerate", seed=1, progress=False))
    print(f"{count:2} temperatures: {found[-1]}, exactly {exactly:.4f}")
for side in (found[-1].forward, found[-1].reverse, found[-1].bridge):
    assert side.trusted and abs(side.log_evidence - exactly) < 4.5 * side.standard_error

figure = Figure(figsize=(7, 3.2), layout="constrained")
axes = figure.subplots()
for name, shift in (("forward", 0.93), ("reverse", 1.07), ("bridge", 1.0)):
    all_of = [getattr(z, name) for z in found]
    axes.errorbar(
        [shift * s for s in steps],
        [z.log_evidence for z in all_of],
        [2 * z.standard_error for z in all_of],
        fmt="o",
        capsize=3,
        label=name,
    )
axes.axhline(exactly, color="C2", label="all states")
axes.set(xscale="log", xlabel="temperatures", ylabel="log Z", ylim=(exactly - 1.5, exactly + 1.5))
axes.legend(ncols=2)

# %%
# One family
# ----------
# Noise-contrastive estimation tells draws of the model from noise by logistic regression, with the log constant as a
# free parameter :cite:p:`gutmann2012`. The slope of its likelihood is zero where bridge sampling :cite:p:`meng1996`, or
# Bennett's acceptance ratio, has its fixed point. The two numbers are one.

generator = torch.Generator().manual_seed(0)
x, noise = (s**0.5 * torch.randn(4000, generator=generator, dtype=DOUBLE) for s in (0.5, 1.5))


def over_noise(x):
    return -x.square() - Normal(torch.zeros((), dtype=DOUBLE), 1.5**0.5).log_prob(x)


z = noise_contrastive_constant(over_noise(x), over_noise(noise))
bridge = 0.0
for _ in range(200):  # the fixed point of the optimal bridge, by its definition
    numerator = 1 / ((bridge - over_noise(noise)).exp() + 1)
    denominator = 1 / ((over_noise(x) - bridge).exp() + 1)
    bridge += float(numerator.mean().log() - denominator.mean().log())
print(f"by classification {z.log_evidence:.8f}, by the bridge {bridge:.8f}, exactly {0.5 * math.log(math.pi):.8f}")
assert abs(z.log_evidence - bridge) < 1e-6

# %%
# A classifier's density
# ----------------------
# Logits :math:`f` of a classifier define a joint density proportional to :math:`e^{f_y(x)}`, and so a density of inputs
# :cite:p:`grathwohl2020`. A network's logits grow linearly, so that density has no integral; with a normal base as a
# factor it has one, and the product of the layers' norms proves it. Training the joint density by noise contrast learns
# the constant, too. In two dimensions a sum over a fine grid is the twin.

points, classes = (torch.tensor(a) for a in make_moons(200 if is_small() else 1000, noise=0.15, random_state=0))
points = points - points.mean(0)
base = Independent(Normal(torch.zeros(2, dtype=DOUBLE), points.std(0)), 1)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2)).double()
moons = EnergyModel.from_classifier(network, base)
fit_energy(moons, points, classes, num_steps=200 if is_small() else 2000, progress=False)
print(moons.check_normaliser().reason)

line = torch.linspace(-8, 8, 400, dtype=DOUBLE)
with torch.no_grad():
    cells = moons.log_density(torch.cartesian_prod(line, line))
    by_grid = float(cells.logsumexp(0) + 2 * (line[1] - line[0]).log())
    right = float((moons.logits(points).argmax(-1) == classes).double().mean())
z = log_normaliser(moons, num_temperatures=20 if is_small() else 100, seed=2, progress=False)
print(f"accuracy {right:.3f}; {z}, by a grid {by_grid:.4f}, learnt {float(moons.log_constant.detach()):.4f}")
assert z.is_finite and abs(z.value - by_grid) < 4.5 * z.standard_error

# %%
# Parameters of such a model
# --------------------------
# The constant depends on the parameters, so Metropolis's ratio is unknown. The exchange algorithm draws a data set at
# the proposed parameters, and the constants cancel :cite:p:`murray2006`. The twin is a grid of couplings.

small, prior = EnergyModel.of_bits(Grid(3), 9), Normal(torch.zeros((), dtype=DOUBLE), 1.0)
states = small.enumerate_states()
weights = small.log_density(states).detach().softmax(0)
data = states[torch.multinomial(weights, 20, replacement=True, generator=generator)]
posterior = exchange_posterior(
    small, data, {"energy.coupling": prior}, num_samples=500 if is_small() else 3000, progress=False
)
couplings = torch.linspace(-0.5, 1.5, 2001, dtype=DOUBLE)
bonds = small.energy.bonds(states)
log_posterior = couplings * small.energy.bonds(data).sum() - 20 * (couplings[:, None] * bonds).logsumexp(1)
on_grid = (log_posterior + prior.log_prob(couplings)).softmax(0)
mean = float(on_grid @ couplings)
deviation = float((on_grid @ (couplings - mean).square()).sqrt())
draws, effective = posterior.draws["energy.coupling"], float(posterior.effective["energy.coupling"])
print(f"coupling {float(draws.mean()):.4f} +- {float(draws.std()):.4f}, on a grid {mean:.4f} +- {deviation:.4f}")
assert abs(float(draws.mean()) - mean) < 4.5 * deviation / math.sqrt(effective)

# %%
# A failure on purpose
# --------------------
# Without a base the density of a classifier has no constant, and its chains of contrastive divergence run away. The
# exchange algorithm needs exact draws, which real vectors do not offer; a Markov chain in their place would leave an
# error that nothing shows. Each is refused with the reason.

growing = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)).double()
without_base = EnergyModel.from_classifier(growing, base, tilt=False)
unruly = PersistentContrastiveDivergence(32, num_moves=10)
for attempt in (
    lambda: log_normaliser(without_base, progress=False),
    lambda: fit_energy(without_base, points, objective=unruly, num_steps=300, learning_rate=1e-6, progress=False),
    lambda: exchange_posterior(
        moons, points, {name: prior for name, _ in network.named_parameters(prefix="energy.classifier")}
    ),
):
    try:
        attempt()
    except BayeskitError as error:
        print(f"{type(error).__name__}: {error}\n")
    else:
        raise AssertionError("not refused")

# %%
# Try it on yours
# ---------------
# Write the energy as a module of vectors ``(n, d)`` and choose a base that covers the data: ``EnergyModel(energy, base,
# tilt=True)``. Train it by ``fit_energy``, and look at ``gap`` and ``trusted`` of ``log_normaliser`` before you compare
# likelihoods. ``energy_target(model)`` is a target for every sampler and every estimator of the evidence.
#
# .. code-block:: python
#
#    fit_energy(moons, points, classes, num_steps=200)
#    z = log_normaliser(moons, num_temperatures=20)
#    print(z, z.gap, z.trusted)
#
# Where to go next: :doc:`/gallery/sampling/sampled_softmax` is about constants of many classes.
