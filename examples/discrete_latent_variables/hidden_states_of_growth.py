r"""
Hidden Markov model with its states summed out: regimes of economic growth
==========================================================================

**What you will learn:** how to sample a hidden Markov model without sampling its states, how the evidence says whether
there are any, and how to look at them afterwards.

Growth of the real gross domestic product of the United States, in per cent a quarter from 1959 to 2009, comes with
statsmodels. :cite:t:`hamilton1989` let a hidden chain of states move the mean growth; :cite:t:`mcconnell2000` noticed
that in the 1980s something else changed: growth became steadier. Here both mean and scale may change.
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.special import logsumexp
from scipy.stats import norm
from statsmodels.datasets import macrodata

import bayeskit as bk
from bayeskit.gallery import is_small
from bayeskit.inference import evidence
from bayeskit.models.discrete.sequences import GaussianEmission, HiddenMarkovModel, plot_states
from bayeskit.report import posterior_summary

# %%
# The model
# ---------
# Growth is normal given a hidden state that tends to stay,
#
# .. math::
#
#    A_k \sim \mathrm{Dirichlet}(1 + 8 \cdot \mathbf{1}_k), \qquad
#    z_t \mid z_{t-1} \sim A_{z_{t-1}}, \qquad y_t \mid z_t \sim N(\mu_{z_t}, \sigma_{z_t}^2),
#
# .. math:: \mu_k \sim N(0.8, 1), \qquad \log \sigma_k \sim N(\log 0.8, 0.5^2), \qquad \sigma_0 < \sigma_1.
#
# The probabilities of the first state are uniform. The states are summed out, so that what is left is continuous, and
# sorted by their scales, for otherwise they could swap names. The rival has one state, with the same priors:
# independent quarters.

table = macrodata.load_pandas().data
y = 100 * torch.tensor(table["realgdp"].to_numpy()).log().diff()
years = (table["year"] + (table["quarter"] - 1) / 4).to_numpy()[1:]
emission = GaussianEmission(mean=0.8, mean_scale=1.0, scale=0.8, scale_spread=0.5, order="scale")
two_states = HiddenMarkovModel(2, emission, stay=8.0)
target = bk.Target.from_pyro(two_states, y)

# %%
# Before the data
# ---------------
# Three histories from the prior. States last for years in one and for quarters in another, and may differ a lot or not
# at all; growth may be wilder than it ever was.

values = target.constrain(target.sample_prior(3, seed=0))
with torch.random.fork_rng():
    torch.manual_seed(0)
    _, histories = two_states.distribution(values, y).sample_with_states()
prior_predictive = Figure(figsize=(8, 4), layout="constrained")
for axes, history in zip(prior_predictive.subplots(3, 1, sharex=True, sharey=True), histories, strict=True):
    axes.plot(years, history, linewidth=0.8)
    axes.set_ylabel("per cent")
axes.set_xlabel("year")

# %%
# An exact twin
# -------------
# Eight quarters have 256 sequences of states. Listed one by one, they give the likelihood and the probability of a
# state in each quarter.

start, stay = np.array([0.5, 0.5]), np.array([[0.9, 0.1], [0.2, 0.8]])
means, scales = np.array([0.8, 0.6]), np.array([0.5, 1.2])
few, terms, stormy = y[:8].numpy(), [], 0.0
for path in itertools.product([0, 1], repeat=8):
    z = np.array(path)
    terms.append(np.log(start[z[0]]) + np.log(stay[z[:-1], z[1:]]).sum() + norm.logpdf(few, means[z], scales[z]).sum())
    stormy += np.exp(terms[-1]) * z
parameters = {"initial": start, "transition": stay, "mean": means, "log_scale": np.log(scales)}
hmm = two_states.distribution({name: torch.tensor(value) for name, value in parameters.items()}, y[:8])
print(f"eight quarters: log likelihood {float(hmm.log_prob(y[:8])):.12f}, one by one {logsumexp(terms):.12f}")
assert abs(float(hmm.log_prob(y[:8])) - logsumexp(terms)) < 1e-9
assert np.abs(hmm.state_probabilities(y[:8])[:, 1].numpy() - stormy / np.exp(terms).sum()).max() < 1e-9

# %%
# The fit
# -------
# The draws have to agree between chains, and the estimate of the evidence has to trust itself. With one state there is
# no sum: the evidence is an integral over a mean and a scale, which a fine grid does to many digits.
#
# Chains begin at the likeliest four of a thousand draws from the prior. One that begins where the states differ by
# their means, growth and recession, may stay there for hundreds of draws, though it is ten nats less likely.

size = {"num_warmup": 150, "num_samples": 250} if is_small() else {"num_warmup": 500, "num_samples": 1000}
guesses = target.sample_prior(1000, seed=1)
start = guesses[target.log_likelihood(guesses).topk(4).indices]
draws = bk.sample(target, num_chains=4, seed=0, initial=start, progress=False, **size)
summary = posterior_summary(draws)
print(summary.round(3).to_string())
assert summary["r_hat"].max() < 1.05 and summary["ess"].min() > 100
assert not bool(draws.sample_stats["diverging"].any())
two = evidence.bridge_sampling(target, draws, seed=0)
assert two.trusted

mean, log_scale = np.meshgrid(np.linspace(0.1, 1.5, 801), np.linspace(-0.8, 0.4, 801), indexing="ij")
squares = float((y - y.mean()).square().sum()) + len(y) * (float(y.mean()) - mean) ** 2
log_joint = -0.5 * squares / np.exp(2 * log_scale) - len(y) * (log_scale + 0.5 * math.log(2 * math.pi))
log_joint += norm.logpdf(mean, 0.8, 1.0) + norm.logpdf(log_scale, math.log(0.8), 0.5)
one = logsumexp(log_joint) + math.log(1.4 / 800 * 1.2 / 800)
coarse = logsumexp(log_joint[::2, ::2]) + math.log(1.4 / 400 * 1.2 / 400)
assert abs(one - coarse) < 1e-9
print(f"one state: log evidence {one:.4f}; two states: {two.log_evidence:.4f} +- {two.standard_error:.4f}")

# %%
# What it says
# ------------
# Two states are far more probable than one, and they differ in scale rather than in mean: calm and stormy quarters.
# Each draw of the parameters gives exact probabilities of the states, which are then averaged.

factor = two.log_evidence - one
print(f"log Bayes factor for two states: {factor:.2f} +- {two.standard_error:.2f}")
assert factor > 4.5 * two.standard_error
ratio = summary.loc["log_scale[1]", "mean"] - summary.loc["log_scale[0]", "mean"]
print(f"stormy quarters vary about {math.exp(ratio):.1f} times as much as calm ones")
probabilities = two_states.state_probabilities(draws, y)
for year in (1970, 1982, 1990, 2000, 2009):
    print(f"probability of calm in the first quarter of {year}: {float(probabilities[years == year, 0]):.2f}")
figure = plot_states(probabilities, y, years, name="growth (% a quarter)")
figure.axes[1].set_xlabel("year (state 0: calm, state 1: stormy)")

# %%
# A failure on purpose
# --------------------
# Without an order, states have no names. Swap them in all parameters, and the density is the same: every posterior mean
# of such a model is an average over both names, and says nothing of either state.

nameless = HiddenMarkovModel(2, GaussianEmission(mean=0.8, scale=0.8, order="none"), stay=8.0)
values = {name: torch.tensor(value) for name, value in parameters.items()}
swapped = {name: value.flip(0) for name, value in values.items()} | {"transition": values["transition"].flip(0, 1)}
one_way, other_way = (float(nameless.distribution(each, y).log_prob(y)) for each in (values, swapped))
print(f"log likelihood {one_way:.9f}, with swapped names {other_way:.9f}")
assert abs(one_way - other_way) < 1e-9

# %%
# Try it on yours
# ---------------
# Replace ``y``, and choose what orders the states: their means or their scales, whichever you expect to differ.
#
# .. code-block:: python
#
#    model = HiddenMarkovModel(2, GaussianEmission(mean=0.8, scale=0.8, order="scale"), stay=8.0)
#    draws = bk.sample(bk.Target.from_pyro(model, y), num_chains=4, initial=start, seed=0)
#    print(draws.summary()["r_hat"].max(), model.state_probabilities(draws, y)[:3])
#
# Look at R-hat first: chains that start in another mode stay there, so start them at likely draws of the prior. Compare
# numbers of states by the evidence. If states do not come back, a change-point model is simpler, and exact.
#
# Where to go next: :doc:`nile_change_point` has segments that do not come back, :doc:`/gallery/evidence/galaxy_mixture`
# states without a chain.
