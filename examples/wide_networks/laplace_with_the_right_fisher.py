r"""
Laplace approximation of a count regression: Fisher or empirical Fisher information
===================================================================================

**What you will learn:** what the Fisher information and the empirical Fisher are, how one identity shows that squared
gradients of the data cannot tell how curved a likelihood is, and what happens to steps and to a posterior where they
are taken for it.

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
from scipy.stats import multivariate_normal, poisson
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
    gradient_fields,
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
# has the squares of what was observed, :math:`E = \sum_i g_i g_i^\top = \sum_i (y_i - e^{f_i})^2 J_i^\top J_i` of the
# gradients :math:`g_i` of each datum.

table = randhie.load_pandas().data[:: 40 if is_small() else 10]
y = torch.tensor(table.pop("mdvis").to_numpy(dtype=float))
x = torch.tensor(table.to_numpy(dtype=float))
x = (x - x.mean(0)) / x.std(0)
names, design = [*table.columns, "constant"], torch.cat([x, torch.ones_like(x[:, :1])], 1)
line = nn.Linear(9, 1, dtype=x.dtype)


def at(module: nn.Module, parameters: Tensor) -> nn.Module:
    nn.utils.vector_to_parameters(parameters, module.parameters())
    return module


def model(x: Tensor, y: Tensor) -> None:
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(10), PRECISION**-0.5).to_event(1))
    with pyro.plate("people", len(x)):
        pyro.sample("y", dist.Poisson((x @ weights[:9] + weights[9]).exp()), obs=y)


# %%
# Before the data
# ---------------
# If the data come from the model, and the parameters are right, the two matrices agree in the mean over data. Here is
# the trace of :math:`F^{-1} E` over the number of parameters, for data drawn from the model.

generator, somewhere = torch.Generator().manual_seed(0), torch.tensor([0.1] * 9 + [1.0], dtype=x.dtype)
inverse, rates = torch.linalg.inv(fisher(at(line, somewhere), Poisson(), x).matrix()), (design @ somewhere).exp()
ratios = []
for _ in range(50 if is_small() else 500):
    simulated = empirical_fisher(line, Poisson(), x, torch.poisson(rates, generator=generator))
    ratios.append(float((inverse @ simulated.matrix()).trace()) / 10)
ratio, error = torch.tensor(ratios).mean(), torch.tensor(ratios).std() / len(ratios) ** 0.5
print(f"data of the model: trace over dimension {ratio:.4f} +- {error:.4f}, expected 1")
assert abs(ratio - 1) < 4.5 * error

# %%
# An exact twin
# -------------
# The definition can be summed: over all counts, with the probabilities of the model, here for three people.

counts = torch.arange(200)
by_sum = sum(
    float(poisson(float(rate)).pmf(counts) @ (counts - rate).square().numpy()) * torch.outer(row, row)
    for rate, row in zip(rates[:3], design[:3], strict=True)
)
gap = float((fisher(line, Poisson(), x[:3]).matrix() - by_sum).abs().max())
assert gap < 1e-9

# %%
# Squared gradients obey an identity: :math:`\sum_i g_i^\top E^{-1} g_i = \mathrm{tr}(E^{-1} E) = D`, the number of
# parameters, for any data, at any parameters. A single datum's step has the same mean square near the fit and far off,
# and so tells nothing of the distance.

for vector in (somewhere, somewhere - 1):
    gradients = (y - (design @ vector).exp())[:, None] * design
    by_data = empirical_fisher(at(line, vector), Poisson(), x, y).matrix()
    steps = float(((gradients @ torch.linalg.inv(by_data)) * gradients).sum())
    assert abs(steps - 10) < 1e-8 and torch.allclose(by_data, gradients.mT @ gradients, rtol=1e-10)

# %%
# With normal data the posterior of a linear network is normal, and Laplace's approximation is no approximation: its
# evidence is the density of four data under the model, which needs no curvature.

values = y[:4].log1p()
mode = find_parameter_mode(line, GaussianOutputs(0.5), x[:4], values, PRECISION)
small = laplace_posterior(mode, GaussianOutputs(0.5), x[:4], values, PRECISION)
covariance = (design[:4] @ design[:4].mT / PRECISION + 0.5 * torch.eye(4)).numpy()
exact = float(multivariate_normal([0] * 4, covariance).logpdf(values))
assert abs(small.log_evidence - exact) < 1e-9

# %%
# The fit
# -------
# Hamiltonian Monte Carlo draws from the posterior, and bridge sampling has its evidence. Laplace's approximation needs
# the mode and the Fisher information only, and agrees.

draws = bk.sample(bk.Target.from_pyro(model, x, y), 8, 200, 200 if is_small() else 1000, seed=0, progress=False)
bridge = bridge_sampling(draws, seed=0)
effective = bridge.diagnostics["effective_draws"]
print(f"{bridge}; R-hat {bridge.diagnostics['r_hat']:.3f}, {effective:.0f} effective draws")
assert bridge.trusted and bridge.diagnostics["r_hat"] < 1.01 and effective > 400

mode = find_parameter_mode(line, Poisson(), x, y, PRECISION)
posterior = laplace_posterior(mode, Poisson(), x, y, PRECISION)
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
for name, values in deviations.items():
    print(f"{name:10s} standard deviation of chronic diseases {float(values[names.index('disea')]):.4f}")
difference = 0.5 * float(torch.logdet(right.matrix() + prior) - torch.logdet(wrong.matrix() + prior))
print(f"the empirical Fisher puts the log evidence {-difference:.2f} too low")
z = (deviations["Fisher"] / deviations["sampled"] - 1) * math.sqrt(2 * effective)
assert z.abs().max() < 4.5 and -difference > 4.5 * bridge.standard_error

# %%
# It fails in steps, too. With normal data and two parameters the log likelihood is quadratic, so that every natural
# gradient is an arrow that ends at the fit, whatever noise the model claims. With :math:`E`, unit steps arrive only
# where residuals are as large as the model says; where it claims more noise than there is, as every network does that
# fits its data nearly exactly, they overshoot.

u, v, pair = x[:, :1], y.log1p()[:, None], nn.Linear(1, 1, dtype=x.dtype)
two = torch.cat([u, torch.ones_like(u)], 1)
fit = torch.linalg.lstsq(two, v).solution.flatten()
spread = float((v.flatten() - two @ fit).square().mean())
grid = torch.linspace(-2.5, 2.5, 9 if is_small() else 25, dtype=x.dtype)
fields = gradient_fields(pair, GaussianOutputs(spread), u, v, grid, grid)
assert float((fields.points + fields.natural - fit).abs().max()) < 1e-6
starts, lengths = fields.points.reshape(-1, 2), {}
gradient = two.mT @ (v.flatten() - two @ starts[0]) / spread
arrival = starts[0] + fisher(at(pair, starts[0]), GaussianOutputs(spread), u).solve_exactly(gradient, damping=1e-8)
assert float((arrival - fit).abs().max()) < 1e-6
for name, variance in {"right": spread, "too large": 9 * spread}.items():
    here, lengths[name] = starts.clone(), torch.zeros(len(starts))
    for _ in range(100):
        gradients = (v.flatten() - here @ two.mT)[..., None] / variance * two  # (starts, data, 2)
        away = (here - fit).norm(dim=1) > 0.05
        lengths[name] += away
        moves = torch.linalg.solve(gradients.mT @ gradients, gradients.sum(1))
        here = torch.where(away[:, None], here + moves, here)
    print(f"noise {name}: half of all starts arrive by E in {lengths[name].median():.0f} steps or more")
assert float(lengths["too large"].median()) == 100 and bool((lengths["right"] < 100).all())
assert not empirical_fisher(at(pair, fit), GaussianOutputs(9 * spread), u, v).trusted

# %%
# What it says
# ------------
# Who takes squared gradients for curvature is most certain where the model is worst. Below are steps from a grid of
# slopes and constants: by the gradient, by the natural one, and by the one preconditioned with :math:`E`.

disease = draws.unconstrained[..., names.index("disea")].flatten()
error = float(disease.std()) / effective**0.5
print(f"a standard deviation more of chronic diseases: log rate of visits {float(disease.mean()):.5f} +- {error:.5f}")
figure = Figure(figsize=(9, 3.4), layout="constrained")
axes = figure.subplots(1, 3, sharey=True)
fields.plot(list(axes))

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
# Where to go next: :doc:`four_gaussian_processes` has the posterior of a network of infinite width,
# :doc:`/gallery/evidence/eight_schools_by_every_estimator` other ways to an evidence.
