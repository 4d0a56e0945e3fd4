r"""
Laplace approximation of a count regression: Fisher or empirical Fisher information
===================================================================================

**What you will learn:** what the Fisher information and the empirical Fisher are, why only one of them is a curvature,
and what happens to a posterior and to training where the other is taken for it.

Squared gradients of single data are cheap, and often stand for the Fisher information. They are not, as
:cite:t:`kunstner2019` show. The data are numbers of visits to a doctor of people in the RAND health insurance
experiment :cite:p:`cameron2005`, in statsmodels, every tenth row, with nine facts about their insurance and their
health.
"""

import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.stats import multivariate_normal, norm, poisson
from statsmodels.datasets import randhie
from torch import Tensor, nn

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference.curvature import (
    GaussianOutputs,
    Poisson,
    empirical_fisher,
    find_parameter_mode,
    fisher,
    laplace_posterior,
)
from bayeskit.inference.evidence import bridge_sampling

PRECISION = 4.0

# %%
# The model
# ---------
# Counts are Poisson, with a logarithm of the rate that a network gives; here it is a network without hidden layers, so
# that its posterior can be sampled and nobody has to believe an approximation,
#
# .. math:: y_i \sim \mathrm{Poisson}(e^{f_i}), \qquad f_i = w^\top x_i + b, \qquad w, b \sim N(0, I / 4).
#
# With derivatives :math:`J_i` of output :math:`i` in the parameters, the *Fisher information* is
#
# .. math:: F = \sum_i J_i^\top\, \mathrm E_{y \sim p(y \mid f_i)}\Big[\Big(\frac{d \log p(y \mid f_i)}{d f_i}\Big)^2
#    \Big] J_i = \sum_i e^{f_i} J_i^\top J_i,
#
# an expectation over data of the model. Here it is the curvature of minus the log likelihood. The *empirical Fisher*
# has the squares of what was observed, :math:`E = \sum_i (y_i - e^{f_i})^2 J_i^\top J_i`.

table = randhie.load_pandas().data[:: 40 if is_small() else 10]
y = torch.tensor(table.pop("mdvis").to_numpy(dtype=float))
x = torch.tensor(table.to_numpy(dtype=float))
x = (x - x.mean(0)) / x.std(0)
names = [*table.columns, "constant"]


def model(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(10), PRECISION**-0.5).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Poisson((x @ weights[:9] + weights[9]).exp()), obs=y)


target = bk.Target.from_pyro(model, x, y)

# %%
# Before the data
# ---------------
# What the prior expects covers what was observed, and goes beyond it on both sides.

generator = torch.Generator().manual_seed(0)
drawn = target.sample_prior(2000, seed=generator)
visits = torch.poisson((x[:50] @ drawn[:, :9].mT + drawn[:, 9]).exp(), generator=generator)
levels = torch.tensor([0.25, 0.5, 0.75, 0.95], dtype=x.dtype)
print(f"visits        {'  '.join(f'{100 * float(q):5.0f} %' for q in levels)}")
for name, values in (("prior", visits.flatten()), ("observed", y)):
    print(f"{name:12s}  {'  '.join(f'{float(q):7.0f}' for q in values.quantile(levels))}")

# %%
# An exact twin
# -------------
# The definition can be summed: over all counts, with the probabilities of the model, here for three people.

line = nn.Linear(9, 1, dtype=x.dtype)
with torch.no_grad():
    line.weight.fill_(0.1)
    line.bias.fill_(1.0)
    rates = line(x[:3]).exp().flatten()
counts = torch.arange(200)
design = torch.cat([x, torch.ones_like(x[:, :1])], 1)
by_sum = sum(
    float(poisson(float(rate)).pmf(counts) @ (counts - rate).square().numpy()) * torch.outer(row, row)
    for rate, row in zip(rates, design[:3], strict=True)
)
gap = float((fisher(line, Poisson(), x[:3]).matrix() - by_sum).abs().max())
print(f"Fisher information against the sum over counts: largest difference {gap:.1e}")
assert gap < 1e-9

# %%
# With normal data the posterior of a linear network is normal, and Laplace's approximation is no approximation: its
# evidence is the density of four data under the model, which needs no curvature.

values = y[:4].log1p()
mode = find_parameter_mode(line, GaussianOutputs(0.5), x[:4], values, PRECISION)
small = laplace_posterior(mode, GaussianOutputs(0.5), x[:4], values, PRECISION)
covariance = (design[:4] @ design[:4].mT / PRECISION + 0.5 * torch.eye(4)).numpy()
exact = float(multivariate_normal([0] * 4, covariance).logpdf(values))
print(f"four normal data: log evidence {small.log_evidence:.10f}, exactly {exact:.10f}")
assert abs(small.log_evidence - exact) < 1e-9

# %%
# The fit
# -------
# Hamiltonian Monte Carlo draws from the posterior, and bridge sampling has its evidence. Laplace's approximation needs
# the mode and the Fisher information only, and agrees.

draws = bk.sample(target, 8, 200, 200 if is_small() else 1000, seed=0, progress=False)
bridge = bridge_sampling(target, draws, seed=0)
effective = bridge.diagnostics["effective_draws"]
print(f"{bridge}; R-hat {bridge.diagnostics['r_hat']:.3f}, {effective:.0f} effective draws")
assert bridge.trusted and bridge.diagnostics["r_hat"] < 1.01 and effective > 400

mode = find_parameter_mode(line, Poisson(), x, y, PRECISION)
posterior = laplace_posterior(mode, Poisson(), x, y, PRECISION)
print(f"{posterior}, {posterior.distance:.1e} standard deviations from the mode")
assert posterior.distance < 1e-6
assert abs(posterior.log_evidence - bridge.log_evidence) < 4.5 * bridge.standard_error

# %%
# A failure on purpose
# --------------------
# Visits vary much more than a Poisson law has it, so that squared residuals are large and the empirical Fisher with
# them. The package notices. Taken for the curvature it makes the posterior *narrower*, just because the model fits
# badly. What a badly fitting model should do is shown by the sandwich :math:`F^{-1} E F^{-1}` :cite:p:`huber1967`
# (below, :math:`F` includes the precision of the prior), in which :math:`E` has its place: there errors grow.

right, wrong = fisher(mode, Poisson(), x), empirical_fisher(mode, Poisson(), x, y)
print(wrong)
assert not wrong.trusted
with torch.no_grad():
    simulated = torch.poisson(mode(x).exp().flatten(), generator=generator)
assert empirical_fisher(mode, Poisson(), x, simulated).trusted

prior = PRECISION * torch.eye(10, dtype=x.dtype)
inverse = posterior.covariance()
deviations = {
    "sampled": draws.unconstrained.flatten(0, 1).std(0),
    "Fisher": inverse.diagonal().sqrt(),
    "empirical": torch.linalg.inv(wrong.matrix() + prior).diagonal().sqrt(),
    "sandwich": (inverse @ wrong.matrix() @ inverse).diagonal().sqrt(),
}
print("standard deviation " + "".join(f"{name:>10s}" for name in deviations))
for i, name in enumerate(names):
    print(f"{name:19s}" + "".join(f"{float(values[i]):10.4f}" for values in deviations.values()))
difference = 0.5 * float(torch.logdet(right.matrix() + prior) - torch.logdet(wrong.matrix() + prior))
print(f"the empirical Fisher puts the log evidence {-difference:.2f} too low")
z = (deviations["Fisher"] / deviations["sampled"] - 1) * math.sqrt(2 * effective)
assert z.abs().max() < 4.5 and -difference > 4.5 * bridge.standard_error

# %%
# It fails in training, too. Preconditioned with the Fisher information, steps arrive in a few iterations; with the
# empirical Fisher they are too short by as much as squared residuals are too large.


def log_posterior(vector: Tensor) -> float:
    """Return the log posterior density of all ten parameters, up to a constant."""
    return float(y @ (design @ vector) - (design @ vector).exp().sum() - 0.5 * PRECISION * vector.square().sum())


gaps = {"Fisher information": [], "empirical Fisher": []}
for name, values in gaps.items():
    vector = torch.zeros(10, dtype=x.dtype)
    vector[9] = y.mean().log()
    for _ in range(20):
        values.append(log_posterior(posterior.mean) - log_posterior(vector))
        nn.utils.vector_to_parameters(vector, line.parameters())
        gradient = design.mT @ (y - (design @ vector).exp()) - PRECISION * vector
        curvature = empirical_fisher(line, Poisson(), x, y) if name[0] == "e" else fisher(line, Poisson(), x)
        vector = vector + curvature.solve_exactly(gradient, damping=PRECISION)
    print(f"{name:19s} after 19 steps {max(values[-1], 0.0):.1e} below the mode")

# %%
# What it says
# ------------
# Who takes squared gradients for curvature is most certain where the model is worst. (On the right of the figure, what
# is below :math:`10^{-10}` is drawn there.)

place = names.index("disea")
disease = draws.unconstrained[..., place].flatten()
error = float(disease.std()) / effective**0.5
print(f"a standard deviation more of chronic diseases: log rate of visits {float(disease.mean()):.5f} +- {error:.5f}")

figure = Figure(figsize=(8.5, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
left.hist(disease, 40, density=True, color="lightgrey", label="draws")
where = posterior.mean[place] + deviations["sandwich"][place] * torch.linspace(-3.5, 3.5, 200)
for name, style in (("Fisher", "C0-"), ("empirical", "C3--"), ("sandwich", "C2:")):
    left.plot(where, norm(float(posterior.mean[place]), float(deviations[name][place])).pdf(where), style, label=name)
left.set(xlabel="coefficient of chronic diseases", ylabel="density")
for (name, values), style in zip(gaps.items(), ("C0o-", "C3s--"), strict=True):
    right.semilogy([max(value, 1e-10) for value in values], style, markersize=4, label=name)
right.set(xlabel="steps", ylabel="log posterior below its maximum\n($10^{-10}$: that or less)")
for ax in (left, right):
    ax.legend(fontsize="small")

# %%
# Try it on yours
# ---------------
# Train any module with a penalty on its weights, then
#
# .. code-block:: python
#
#    mode = find_parameter_mode(module, likelihood, x, y, prior_precision)
#    posterior = laplace_posterior(mode, likelihood, x, y, prior_precision)
#    print(posterior, posterior.distance)  # how far from a mode, in posterior standard deviations
#    print(empirical_fisher(mode, likelihood, x, y).warnings)
#
# The last line says whether squared residuals are those of the model. If they are not, change the likelihood (here a
# negative binomial) before the approximation.
#
# Where to go next: :doc:`empirical_fisher_fields` draws both matrices' steps in two parameters,
# :doc:`four_gaussian_processes` has the posterior of a network of infinite
# width, :doc:`/gallery/evidence/eight_schools_by_every_estimator` other ways to an evidence.
