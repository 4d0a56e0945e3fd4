r"""
Bayesian inference for an ODE in Pyro: Lotka-Volterra with hares and lynxes
===========================================================================

**What you will learn:** how to put a differential equation into a Pyro model with ``bk.ode.solve``, how to know that
its solver does not change the evidence, and how a careless one does.

From 1900 to 1920 the Hudson's Bay Company bought the pelts of hares and of the lynx that hunt them
:cite:p:`hewitt1921`. Both rise and fall with a period of about ten years.
"""

# sphinx_gallery_thumbnail_number = -1
import math
import time

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference import evidence

hares = [30, 47.2, 70.2, 77.4, 36.3, 20.6, 18.1, 21.4, 22, 25.4, 27.1, 40.3, 57, 76.6, 52.3, 19.5, 11.2, 7.6, 14.6]
lynxes = [4, 6.1, 9.8, 35.2, 59.4, 41.7, 19, 13, 8.3, 9.1, 7.4, 8, 12.3, 19.5, 45.7, 51.1, 29.7, 15.8, 9.7]
pelts = torch.tensor([[*hares, 16.2, 24.7], [*lynxes, 10.1, 8.6]], dtype=torch.float64).mT  # thousands
years = torch.arange(len(pelts), dtype=torch.float64)

# %%
# The model
# ---------
# Hares multiply and are eaten, lynxes multiply where there are hares and die,
#
# .. math::
#
#    \dot u = (\alpha - \beta v) u, \qquad \dot v = (\delta u - \gamma) v,
#
# and pelts are log-normal around both :cite:p:`carpenter2018`. ``solve`` takes the right-hand side of one chain; steps
# adapt to each chain, so that no density depends on the neighbours of a chain.


def slope(t: torch.Tensor, z: torch.Tensor, rates: torch.Tensor) -> torch.Tensor:
    alpha, beta, gamma, delta = rates
    return torch.stack([(alpha - beta * z[1]) * z[0], (delta * z[0] - gamma) * z[1]])


def model(pelts: torch.Tensor, solve) -> None:
    scale = torch.tensor([0.5, 0.5, 0.5, 0.5], dtype=pelts.dtype)
    middle = torch.tensor([1.0, 0.05, 1.0, 0.05], dtype=pelts.dtype)
    rates = pyro.sample("rates", dist.LogNormal(middle.log(), scale).to_event(1))
    start = pyro.sample("start", dist.LogNormal(torch.full_like(pelts[0], 10.0).log(), 1.0).to_event(1))
    sigma = pyro.sample("sigma", dist.LogNormal(torch.full_like(pelts[0], -1.0), 1.0).to_event(1))
    with pyro.plate("years", len(pelts)):
        pyro.sample("pelts", dist.LogNormal(solve(start, rates).log(), sigma).to_event(1), obs=pelts)


def target_at(rtol: float) -> bk.Target:
    return bk.Target.from_pyro(model, pelts, lambda start, rates: bk.ode.solve(slope, start, years, rates, rtol=rtol))


# %%
# Before the data
# ---------------
# Animals of the prior rise and fall, too, with periods from a few years to decades.

target = target_at(1e-6)
prior = target.constrain(target.sample_prior(30, seed=0))
paths = bk.ode.solve(slope, prior["start"], years, prior["rates"])
figure = Figure(figsize=(7, 3), layout="constrained")
axes = figure.subplots()
axes.semilogy(1900 + years, paths[..., 0].mT, color="C0", alpha=0.4, linewidth=1)
axes.set(xlabel="year", ylabel="hares (thousands), prior", ylim=(1e-2, 1e4))

# %%
# An exact twin
# -------------
# No formula gives the path, but :math:`\delta u - \gamma \log u + \beta v - \alpha \log v` is the same at all times;
# how far it moves is the error of the solver. And where all is linear, :math:`\dot z = -z` from a normal start with
# normal errors, the evidence is that of a linear regression, 1.632426.

alpha, beta, gamma, delta = prior["rates"].mT.unsqueeze(-1)
u, v = paths.unbind(-1)
terms = torch.stack([delta * u, -gamma * u.log(), beta * v, -alpha * v.log()])
moved = ((terms.sum(0) - terms.sum(0)[:, :1]) / terms.abs().sum(0)).abs().amax(1)
print(f"what stays the same moves by a share of {moved.median():.1e} in half of the paths, {moved.max():.1e} at most")
assert float(moved.median()) < 1e-4

times = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=torch.float64)
y = torch.tensor([0.62, 0.35, 0.15], dtype=torch.float64)


def decay(y: torch.Tensor) -> None:
    start = pyro.sample("start", dist.Normal(torch.zeros_like(y[:1]), 1.0).to_event(1))
    path = bk.ode.solve(lambda t, z, _: -z, start, times)
    pyro.sample("y", dist.Normal(path[1:, 0], 0.1).to_event(1), obs=y)


twin = bk.Target.from_pyro(decay, y)
z = evidence.bridge_sampling(twin, bk.sample(twin, seed=0, progress=False), seed=0)
print(f"decay: {z}")
assert z.trusted and abs(z.log_evidence - 1.6324255707) < 4.5 * z.standard_error

# %%
# The fit
# -------

size = {"num_warmup": 300, "num_samples": 300} if is_small() else {"num_warmup": 1000, "num_samples": 1000}
begin = time.perf_counter()
draws = bk.sample(target, seed=1, progress=False, **size)
table = draws.summary(round_to="none")
print(table[["mean", "sd", "ess_bulk", "r_hat"]].round(3), f"{time.perf_counter() - begin:.1f} s", sep="\n")
assert table["r_hat"].max() < 1.05 and table["ess_bulk"].min() > 200

check = evidence.tolerance_check(target_at, 1e-6, draws=draws, seed=1, progress=False)
print(check)
assert check.trusted and abs(check.difference) < 0.01

# %%
# A failure on purpose
# --------------------
# An error of one in a hundred is far below the noise of the pelts, so a tolerance of 0.01 should do. The chains
# converge, no diagnostic complains, and the evidence has a small error bar; but it is that of another model, in which
# errors of the solver add up over twenty years. The same draws at a hundredth of the tolerance tell.

loose = target_at(1e-2)
careless = bk.sample(loose, seed=1, progress=False, **size)
z = evidence.bridge_sampling(loose, careless, seed=1)
print(f"rtol 0.01, on its own: {z}")
wrong = evidence.tolerance_check(target_at, 1e-2, draws=careless, seed=1, progress=False)
print(wrong)
bias = z.log_evidence - check.evidence.log_evidence
error = math.hypot(z.standard_error, check.evidence.standard_error)
print(f"its log evidence is {bias:+.3f} +- {error:.3f} from the right one")
assert z.trusted and not wrong.trusted and abs(wrong.difference) > 0.05 > 5 * abs(check.difference)

# %%
# What it says
# ------------
# Pelts scatter around the animals of the model by a factor near :math:`e^{0.25} = 1.28`, for both kinds.

found = draws.values()
path = bk.ode.solve(slope, found["start"].flatten(0, 1), years, found["rates"].flatten(0, 1))
figure = Figure(figsize=(7, 3.4), layout="constrained")
axes = figure.subplots()
for n, name in enumerate(("hares", "lynxes")):
    low, high = path[..., n].quantile(torch.tensor([0.05, 0.95], dtype=path.dtype), dim=0)
    axes.fill_between(1900 + years, low, high, color=f"C{n}", alpha=0.4, label=f"{name}, 90 % of the posterior")
    axes.plot(1900 + years, pelts[:, n], "o", color=f"C{n}", markersize=4)
axes.set(xlabel="year", ylabel="pelts (thousands)")
axes.legend(frameon=False)

# %%
# Try it on yours
# ---------------
# Write the right-hand side for one chain, sample what it needs, and pass it as ``params``. Where rates differ by many
# powers of ten, so that ``solve`` warns or chains are slow, take ``method="rodas5"``. Then let
# :func:`~bayeskit.inference.evidence.tolerance_check` look at the tolerance before you believe a Bayes factor.
#
# .. code-block:: python
#
#    target = target_at(1e-6)
#    draws = bk.sample(target, seed=1)
#    print(evidence.tolerance_check(target_at, 1e-6, draws=draws, seed=1))
#
# Where to go next: :doc:`/gallery/variational_autoencoders/latent_differential_equation` learns the equation of many
# series at once, :doc:`simulator_in_a_hierarchy` is for dynamics with noise, which have no likelihood.
