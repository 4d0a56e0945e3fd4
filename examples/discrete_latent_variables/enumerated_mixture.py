r"""
Gaussian mixture in Pyro with its labels summed out: two species of iris
========================================================================

**What you will learn:** how a Pyro model with a discrete site for each observation becomes a density over continuous
variables alone, how its evidence says whether there are two components, and how the labels come back afterwards.

:cite:t:`anderson1935` measured irises, and :cite:t:`fisher1936` made them famous. Take the petals of a hundred flowers,
fifty *versicolor* and fifty *virginica*, and forget who is who. Do their widths alone say that there are two species?
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp
from scipy.stats import beta, gamma, norm
from sklearn.datasets import load_iris

import bayeskit as bk
from bayeskit.errors import UnsupportedSiteError
from bayeskit.gallery import is_small
from bayeskit.inference import evidence
from bayeskit.inference.samplers import NUTS

# %%
# The model
# ---------
# A flower belongs to the second component with probability :math:`w`, and its petal has a normal width:
#
# .. math::
#
#    k_i \sim \mathrm{Bernoulli}(w), \qquad y_i \sim N(m + k_i d, s^2), \qquad w \sim \mathrm{Beta}(2, 2),
#
#    m \sim N(1.5, 0.5^2), \qquad d \sim \mathrm{Gamma}(2, 3), \qquad s \sim \mathrm{Gamma}(4, 12).
#
# The second parameter of a gamma density is its rate. The gap :math:`d` is positive, so that components cannot swap
# their names. Marked with ``infer={"enumerate": "parallel"}``, the site of the labels is summed out exactly,
#
# .. math:: p(y_i \mid w, m, d, s) = (1 - w) N(y_i; m, s^2) + w N(y_i; m + d, s^2),
#
# and Hamiltonian Monte Carlo sees four continuous variables. The rival has one component, and two variables.


def one_species(y: torch.Tensor) -> None:
    mean = pyro.sample("mean", dist.Normal(1.5, 0.5))
    sd = pyro.sample("sd", dist.Gamma(4.0, 12.0))
    with pyro.plate("flowers", len(y)):
        pyro.sample("y", dist.Normal(mean, sd), obs=y)


def two_species(y: torch.Tensor) -> None:
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    mean = pyro.sample("mean", dist.Normal(1.5, 0.5))
    gap = pyro.sample("gap", dist.Gamma(2.0, 3.0))
    sd = pyro.sample("sd", dist.Gamma(4.0, 12.0))
    with pyro.plate("flowers", len(y)):
        label = pyro.sample("label", dist.Bernoulli(share), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(mean + label * gap, sd), obs=y)


iris = load_iris()
chosen = iris.target > 0
y = torch.as_tensor(iris.data[chosen, 3])
is_virginica = torch.as_tensor(iris.target[chosen] == 2)
target = bk.Target.from_pyro(two_species, y)
print(target)

# %%
# Before the data
# ---------------
# Densities of petal widths that the prior takes for ordinary: one hump or two, of petals a few centimetres wide.

widths = torch.linspace(0.0, 4.0, 300, dtype=torch.float64)


def mixture_density(values: dict[str, torch.Tensor], x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    share, mean, gap, sd = (values[name].unsqueeze(-1) for name in ("share", "mean", "gap", "sd"))
    first = (1 - share) * dist.Normal(mean, sd).log_prob(x).exp()
    return first, share * dist.Normal(mean + gap, sd).log_prob(x).exp()


prior_predictive = Figure(figsize=(8, 3), layout="constrained")
axes = prior_predictive.subplots()
axes.plot(widths, sum(mixture_density(target.constrain(target.sample_prior(12, seed=3)), widths)).T, linewidth=1)
axes.set(xlabel="petal width (cm)", ylabel="density (1/cm)", title="twelve densities from the prior", ylim=(0, 2.2))

# %%
# An exact twin
# -------------
# Eight flowers have 256 labellings. Adding up their joint densities one by one, by SciPy, must give what enumeration
# gives, at any point.

few = y[::13]
tiny = bk.Target.from_pyro(two_species, few)
point = {"share": 0.3, "mean": 1.4, "gap": 0.6, "sd": 0.25}
u = tiny.unconstrain({name: torch.tensor(value, dtype=torch.float64) for name, value in point.items()})
labellings = []
for labels in itertools.product((0, 1), repeat=len(few)):
    k = np.array(labels)
    log_joint = norm(point["mean"] + k * point["gap"], point["sd"]).logpdf(few).sum()
    labellings.append(log_joint + k.sum() * math.log(0.3) + (1 - k).sum() * math.log(0.7))
log_prior = beta(2, 2).logpdf(point["share"]) + norm(1.5, 0.5).logpdf(point["mean"])
log_prior += gamma(2, scale=1 / 3).logpdf(point["gap"]) + gamma(4, scale=1 / 12).logpdf(point["sd"])
by_hand = logsumexp(labellings) + log_prior
enumerated = float(tiny.log_density(u) - tiny.log_jacobian(u))
print(f"{len(labellings)} labellings: log density {by_hand:.10f}, enumerated {enumerated:.10f}")
assert abs(by_hand - enumerated) < 1e-9

# %%
# The fit
# -------
# Both models by the same sampler, and the evidence of each by bridge sampling, which looks at its draws itself. Where
# the gap is small, share and gap are hardly known, and elsewhere they are: no one length of trajectories suits both, so
# the No-U-Turn sampler chooses it at each step.

num_chains, num_warmup, num_samples = (32, 100, 600) if is_small() else (64, 300, 1000)
draws, found = {}, {}
for model in (one_species, two_species):
    own = bk.Target.from_pyro(model, y)
    drawn = bk.sample(own, num_chains, num_warmup, num_samples, seed=0, kernel=NUTS(), progress=False)
    name = model.__name__
    draws[name], found[name] = drawn.values(), evidence.bridge_sampling(own, drawn, seed=0)
    checks = found[name].diagnostics
    print(f"{found[name]}, R-hat {checks['r_hat']:.3f}, {checks['effective_draws']:.0f} effective draws ({name})")
    assert found[name].trusted and checks["r_hat"] < 1.05 and checks["effective_draws"] > 400
    assert not drawn.sample_stats["diverging"].any()

# %%
# What it says
# ------------
# The Bayes factor counts the width of the priors, too. Labels come back flower by flower: in each draw,
# their probabilities given everything else are shares of the two terms of the sum, and are then averaged over draws.

one, two = found["one_species"], found["two_species"]
factor, error = two.log_evidence - one.log_evidence, math.hypot(one.standard_error, two.standard_error)
print(f"log Bayes factor for two species: {factor:.3f} +- {error:.3f}")
gap = draws["two_species"]["gap"]
error = float(gap.mean(1).std() / len(gap) ** 0.5)
print(f"their petals differ by {float(gap.mean()):.3f} +- {error:.3f} cm (posterior sd {float(gap.std()):.2f})")

values = {name: value.flatten() for name, value in draws["two_species"].items()}
first, second = mixture_density(values, y)
probability = (second / (first + second)).mean(0)
right = int(((probability > 0.5) == is_virginica).sum())
print(f"{right} of {len(y)} flowers have their species as the more probable label; who is who was never said")

figure = Figure(figsize=(8, 4), layout="constrained")
axes = figure.subplots()
bins = np.arange(0.95, 2.6, 0.1)
data = [y[~is_virginica].numpy(), y[is_virginica].numpy()]
axes.hist(data, bins, stacked=True, label=["versicolor", "virginica"], color=["0.55", "0.8"])
widths = torch.linspace(0.7, 2.9, 200, dtype=torch.float64)
scale = 0.1 * len(y)
for part, name, style in zip(mixture_density(values, widths), ("first", "second"), ("--", "-."), strict=True):
    axes.plot(widths, scale * part.mean(0), style, label=f"{name} component")
axes.plot(widths, scale * sum(mixture_density(values, widths)).mean(0), label="both")
axes.set(xlabel="petal width (cm)", ylabel="flowers")
axes.legend(frameon=False)

# %%
# A failure on purpose
# --------------------
# A discrete site that nobody said to sum out has no gradient, and Hamiltonian Monte Carlo could not move it. The model
# is refused, with what to write.


def unmarked(y: torch.Tensor) -> None:
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    with pyro.plate("flowers", len(y)):
        label = pyro.sample("label", dist.Bernoulli(share))
        pyro.sample("y", dist.Normal(1.5 + 0.5 * label, 0.2), obs=y)


try:
    bk.Target.from_pyro(unmarked, y)
except UnsupportedSiteError as refusal:
    print(f"refused: {refusal}")
else:
    raise AssertionError("a discrete site was taken for a continuous one")

# %%
# Try it on yours
# ---------------
# Mark the discrete sites of your model with ``infer={"enumerate": "parallel"}``, and order the components by a positive
# difference, as here, so that they cannot swap their names.
#
# .. code-block:: python
#
#    target = bk.Target.from_pyro(two_species, y)
#    draws = bk.sample(target, num_chains=8, kernel=NUTS(), seed=0)
#    print(evidence.bridge_sampling(target, draws), draws.summary()["r_hat"].max())
#
# Look at R-hat and at the labels of single rows, which are shares of the terms of the sum. A site in a plate costs its
# number of values; several in one row cost the product. Where that is too many, train a guide with a gradient
# estimator.
#
# Where to go next: :doc:`/gallery/evidence/galaxy_mixture` asks for any number of components,
# :doc:`hidden_states_of_growth` for labels that depend on each other, :doc:`gradients_of_choices` for choices too many
# to sum out.
