r"""
Radon in Minnesota: a hierarchical model from a data frame to a decision
========================================================================

**What you will learn:** how to get from a data frame to a multilevel regression, compare models by evidence and by
leave-one-out cross-validation, and choose the action of least expected cost for every county, with its error.

Radon, a radioactive gas, seeps from the soil into houses and causes lung cancer. A survey measured it in 919 houses of
85 counties of Minnesota :cite:p:`gelman2007`; some counties have a hundred houses, others one. A house can be left
alone, be sealed and ventilated, or be measured first :cite:p:`lin1999`. What should be done where?
"""

# sphinx_gallery_thumbnail_number = -1
import math
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.gallery import data_file, is_small
from bayeskit.inference import evidence
from bayeskit.report import posterior_summary, write_page

FILE = data_file("minnesota_radon.csv")  # or the path of a file of yours
PAGE = Path(tempfile.mkdtemp()) / "radon.html"

# %%
# The model
# ---------
# The log radon :math:`y_i` of a house in county :math:`c` depends on the floor of the measurement and on the uranium in
# the county's soil, and counties differ otherwise by a normal effect:
#
# .. math:: y_i \sim N(x_i^\top \beta + \alpha_{c_i}, \sigma^2), \quad \alpha_c \sim N(0, \tau^2), \quad
#           \beta_k \sim N(0, 2^2), \quad \sigma \sim N^+(0, 1), \quad \tau \sim \text{Gamma}(2, 4).
#
# Two models leave out the effects of counties, one of them the uranium too. A fourth has :math:`\tau = 10`: it judges
# each county by its own houses.

table = pd.read_csv(FILE, comment="#")
table = table[table["county"].isin(table["county"].unique()[: 14 if is_small() else None])]
assert not table.isna().any(axis=None) and (table[["radon", "uranium"]] > 0).all(axis=None)
places, names = pd.factorize(table["county"])
county, y = torch.tensor(places), torch.tensor(np.log(table["radon"].to_numpy(float)))
x = torch.tensor(np.column_stack([np.ones(len(table)), table["floor"], np.log(table["uranium"])]))


def radon(x, y, county=None, tau=None, sigma=None):
    coefficients = pyro.sample("coefficients", dist.Normal(x.new_zeros(x.shape[1]), 2.0).to_event(1))
    sigma = pyro.sample("sigma", dist.HalfNormal(x.new_ones(()))) if sigma is None else sigma
    mean = x @ coefficients
    if county is not None:
        tau = pyro.sample("tau", dist.Gamma(x.new_tensor(2.0), 4.0)) if tau is None else tau
        with pyro.plate("counties", int(county.max()) + 1):
            mean = mean + pyro.sample("effect", dist.Normal(x.new_zeros(()), tau))[county]
    with pyro.plate("houses", len(x)):
        return pyro.sample("y", dist.Normal(mean, sigma), obs=y)


# %%
# Before the data
# ---------------
# A hundred surveys that the model holds possible: their lowest house, median and highest house, in picocuries per
# litre. The prior allows far more than radon does, also levels that would kill, and excludes nothing that was seen.

with torch.random.fork_rng():
    torch.manual_seed(0)
    imagined = torch.stack([radon(x, None, county) for _ in range(100)]) / math.log(10)
prior_predictive = Figure(figsize=(7, 3), layout="constrained")
axes = prior_predictive.subplots()
shown = imagined.quantile(x.new_tensor([0.0, 0.5, 1.0]), -1).T
axes.hist(shown, bins=20, range=(-8, 8), label=["lowest", "median", "highest"])
axes.vlines(np.log10(table["radon"].quantile([0, 0.5, 1])), 0, 10, color="black", label="seen")
axes.set(xlabel="log10 of radon (pCi/L)", ylabel="surveys from the prior")
axes.legend(frameon=False)

# %%
# An exact twin
# -------------
# With both standard deviations known everything is normal: the evidence is the density of one normal distribution of
# all houses, and the mean of a county's effect a linear regression. The same function with ``tau`` and ``sigma`` given
# must have both.

few, tau, sigma = county < 10, 0.3, 0.7
indicator = torch.nn.functional.one_hot(county[few]).to(y)
covariance = 4 * x[few] @ x[few].T + tau**2 * indicator @ indicator.T + sigma**2 * torch.eye(len(indicator)).to(y)
exact = float(dist.MultivariateNormal(torch.zeros_like(y[few]), covariance).log_prob(y[few]))
effects = (tau**2 * indicator.T @ torch.linalg.solve(covariance, y[few])).numpy()
whole = bk.Target.from_pyro(radon, x[few], y[few], county[few], y.new_tensor(tau), y.new_tensor(sigma))
twin, LENGTHS = bk.marginalize(whole, ["effect"]), (4, 60, 100) if is_small() else (4, 200, 500)
draws = bk.sample(twin, *LENGTHS, seed=0, progress=False)
found = evidence.bridge_sampling(twin, draws)
print(f"log evidence {exact:.4f} in closed form, {found}")
assert abs(found.log_evidence - exact) < 4.5 * found.standard_error
summary = posterior_summary(twin.with_latents(draws, seed=0))[-len(effects) :]
assert (abs(summary["mean"] - effects) < 4.5 * summary["mcse"]).all()

# %%
# The fit
# -------
# The effects of counties are integrated out in closed form, which leaves five parameters, and are drawn afterwards.
# Evidence weighs the models by all data together; leave-one-out cross-validation :cite:p:`vehtari2017` by the
# prediction of one more house in a county that has houses already.

models = {
    "floor": bk.Target.from_pyro(radon, x[:, :2], y),
    "floor, uranium": bk.Target.from_pyro(radon, x, y),
    "floor, uranium, counties": bk.marginalize(bk.Target.from_pyro(radon, x, y, county), ["effect"]),
    "separate counties": bk.marginalize(bk.Target.from_pyro(radon, x, y, county, y.new_tensor(10.0)), ["effect"]),
}
fits, loos, evidences = {}, {}, {}
for name, target in models.items():
    draws = bk.sample(target, *LENGTHS, seed=1, progress=False)
    assert posterior_summary(draws)["r_hat"].max() < (1.1 if is_small() else 1.02)
    evidences[name] = z = evidence.bridge_sampling(target, draws)
    fits[name] = target.with_latents(draws, seed=1) if name.endswith("counties") else draws
    loos[name] = loo = fits[name].loo(moment_matching=False)
    print(f"{name}: {z}, elpd {loo.elpd:.2f} +- {loo.monte_carlo_error:.2f}")
best = fits["floor, uranium, counties"].values()

# %%
# A failure on purpose
# --------------------
# Separate counties need no assumption on how much counties differ, and fail: the evidence pays for effects of any size,
# and a house is predicted worse from a few others of its county than from these and what all counties have in common.

worse = loos["floor, uranium, counties"].pointwise - loos["separate counties"].pointwise
print(f"separate counties: elpd lower by {worse.sum():.1f} +- {worse.std() * len(worse) ** 0.5:.1f}")
assert evidences["floor, uranium, counties"].log_evidence > evidences["separate counties"].log_evidence + 10

# %%
# What it says
# ------------
# Every county and floor gets the action of least expected cost. A house costs $1000 for each picocurie per litre, by
# which people are harmed; ventilation costs $2000 and leaves 2 pCi/L, so that it pays from 4 pCi/L on, the level of the
# authorities; a measurement costs $50 :cite:p:`lin1999`. Its error, a factor of 1.5, is assumed, and part of
# :math:`\sigma`. Who measures first decides by the reading, :math:`r`, without knowing the county any better than the
# draws do: the cost is :math:`\int \min_a \mathrm E [p(r \mid \theta)\, c_a(r, \theta)]\, dr`, a sum over a grid.

PRICE, REPAIR, AFTER, TEST, NOISE = 1000.0, 2000.0, 2.0, 50.0, math.log(1.5)
ACTIONS = ("wait", "repair", "test first")


def wait(m: torch.Tensor, sd: torch.Tensor) -> torch.Tensor:
    return PRICE * (m + sd**2 / 2).exp()


def repair(m: torch.Tensor, sd: torch.Tensor) -> torch.Tensor:
    """Return the mean cost of a log-normal level that is no more than what repair leaves."""
    z = (math.log(AFTER) - m) / sd
    return REPAIR + wait(m, sd) * torch.special.ndtr(z - sd) + PRICE * AFTER * torch.special.ndtr(-z)


def expected_costs(m: torch.Tensor, within: torch.Tensor) -> torch.Tensor:
    """Return the costs of the actions in twenty batches of draws, (3, 20), for log levels N(m, within^2)."""
    sd = (within**2 + NOISE**2).sqrt()
    reading = torch.linspace(float((m - 8 * sd).min()), float((m + 8 * sd).max()), 300, dtype=m.dtype)
    mass = dist.Normal(m, sd).log_prob(reading).exp() * (reading[1] - reading[0])
    known = m + (within / sd) ** 2 * (reading - m), within * NOISE / sd  # the level of a house after its reading
    costs = torch.stack([cost(*known) * mass for cost in (wait, repair)]).reshape(2, 20, -1, 300).mean(2)
    test = TEST + torch.where(costs[0].mean(0) < costs[1].mean(0), *costs).sum(-1)
    return torch.stack([*costs.sum(-1), test])


soil = x[np.unique(places, return_index=True)[1], 2]
b, effect = best["coefficients"].flatten(0, 1)[..., None], best["effect"].flatten(0, 1)
within = (best["sigma"].flatten() ** 2 - NOISE**2).sqrt()[:, None]  # spread of levels in a county
decisions = []
for floor, words in enumerate(("basement", "first floor")):
    m = b[:, 0] + b[:, 1] * floor + b[:, 2] * soil + effect
    costs = torch.stack([expected_costs(m[:, [c]], within) for c in range(len(names))], 1)
    mean, error = costs.mean(-1), costs.std(-1) / 20**0.5
    # Costs of actions that no reading decides are closed forms.
    assert torch.allclose(mean[:2], torch.stack([wait(m, within), repair(m, within)]).mean(1), rtol=1e-6)
    median, houses_of = m.mean(0).exp().numpy(), np.bincount(places[x[:, 1].numpy() == floor], minlength=len(names))
    decision = {"county": names, "floor": words, "houses": houses_of, "median level": median}
    for action, c, e in zip(ACTIONS, mean, error, strict=True):
        decision[action] = [f"{a:.0f} +- {b:.0f}" for a, b in zip(c, e, strict=True)]
    decision |= {"action": np.array(ACTIONS)[mean.argmin(0)], "test saves": mean[:2].min(0).values - mean[2]}
    decisions.append(pd.DataFrame(decision))
result = pd.concat(decisions, ignore_index=True).sort_values("test saves", ascending=False, ignore_index=True)
print(result.iloc[[0, 1, -2, -1]].to_string(index=False, float_format="%.2f"))

figure = Figure(figsize=(7, 4), layout="constrained")
axes = figure.subplots()
in_basement = pd.Series((y - b[:, 1].mean() * x[:, 1]).numpy())  # as if all had been measured there
counted, own_mean = np.bincount(places), np.exp(in_basement.groupby(places).mean())
axes.plot(counted, own_mean, "o", color="0.6", markerfacecolor="none", label="median of a county by its own houses")
axes.plot(counted, decisions[0]["median level"], "o", color="C0", markersize=4, label="by the hierarchical model")
axes.set(xscale="log", yscale="log", xlabel="houses measured in the county", ylabel="radon in basements (pCi/L)")
axes.legend(frameon=False)

# %%
# The page
# --------
# What one would send: which houses to test first, and on what grounds.

answer = f"A test saves most in {result['county'].iloc[0]}: ${result['test saves'].iloc[0]:,.0f} for each house."
counts = result.groupby(["floor", "action"]).size().rename("counties").reset_index()
sections = {"Answer": [answer, counts, (figure, "Small counties are drawn to those with soil like theirs.")]}
sections |= {"Counties": result, "Models": [f"{name}: {z}." for name, z in evidences.items()]}
write_page(PAGE, title=f"Radon in {len(table)} houses: test, repair or wait", sections=sections)
print(f"the page is {PAGE}")

# %%
# Try it on yours
# ---------------
# Groups, a covariate of each row and one of each group make the same analysis: schools, hospitals, plots. Look at the
# table of models first, then whether the cheapest action changes with the prices:
#
# .. code-block:: python
#
#    FILE, PAGE = "mine.csv", Path("decision.html")  # columns county, floor (0 or 1), radon, uranium
#    PRICE, REPAIR, AFTER, TEST, NOISE = 500.0, 2000.0, 2.0, 150.0, math.log(1.8)
#
# Where to go next: :doc:`/gallery/evidence/eight_schools_by_every_estimator` has the classical hierarchy,
# :doc:`/gallery/sampling/latent_fields_integrated_out` effects of neighbours, :doc:`/gallery/sampling/which_experiment`
# the value of data not yet seen.
