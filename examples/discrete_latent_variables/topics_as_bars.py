r"""
Latent Dirichlet allocation with topics summed out: bars, and label switching
=============================================================================

**What you will learn:** how to sample a topic model with the topic of every word summed out, what of its
chains must agree although topics have no order, and how to put them in one.

:cite:t:`griffiths2004` tried their sampler on documents whose topics can be looked at: words are the cells of a grid,
and each topic is one of its rows or one of its columns. We simulate such documents, hide the topics, and ask for them
back.
"""

# sphinx_gallery_thumbnail_number = -1
import itertools
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.special import gammaln, logsumexp

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.errors import SamplingWarning
from bayeskit.gallery import is_small
from bayeskit.inference import evidence
from bayeskit.models.discrete.permutations import nearest_permutation

# %%
# The model
# ---------
# Latent Dirichlet allocation :cite:p:`blei2003`. Topics are distributions of words, documents mix them, and the topic
# of a single word is summed out:
#
# .. math::
#
#    \phi_k \sim \mathrm{Dirichlet}(0.5), \qquad \theta_d \sim \mathrm{Dirichlet}(0.2), \qquad
#    p(\mathrm{word} = w \mid \theta_d, \phi) = \sum_k \theta_{dk} \phi_{kw}.
#
# The documents follow it but for their topics, which are the bars of a grid. Of each we see one half of the
# words and keep the other to test what we have learnt.


def allocation(words: torch.Tensor, num_topics: int, num_words: int, concentration: float) -> None:
    """Latent Dirichlet allocation of words ``(documents, length)``, the topic of each of them summed out."""
    ones = torch.ones(num_topics, num_words, dtype=torch.float64)
    topics = pyro.sample("topics", dist.Dirichlet(0.5 * ones).to_event(1))
    of_topics = concentration * torch.ones(len(words), num_topics, dtype=torch.float64)
    proportions = pyro.sample("proportions", dist.Dirichlet(of_topics).to_event(1))
    with pyro.plate("documents", len(words), dim=-2), pyro.plate("length", words.shape[1], dim=-1):
        pyro.sample("words", dist.Categorical((proportions @ topics).unsqueeze(-2)), obs=words)


edge, num_documents, num_words = (3, 30, 60) if is_small() else (3, 60, 60)
bars = torch.zeros(2 * edge, edge, edge, dtype=torch.float64)
for i in range(edge):
    bars[i, i, :], bars[edge + i, :, i] = 1 / edge, 1 / edge
bars = bars.flatten(1)

with global_stream(torch.Generator().manual_seed(1)):
    shares = torch.distributions.Dirichlet(torch.full((len(bars),), 0.2, dtype=torch.float64)).sample((num_documents,))
    words = torch.multinomial(shares @ bars, 2 * num_words, replacement=True)
seen, other = torch.nn.functional.one_hot(words, edge**2).double().split(num_words, 1)
seen, other = seen.sum(1), other.sum(1)
target = bk.Target.from_pyro(allocation, words[:, :num_words], len(bars), edge**2, 0.2)

# %%
# Before the data
# ---------------
# Topics that the prior expects, above, and the first documents, below. The prior knows that a topic has few words, and
# nothing of rows or columns.

expected = target.constrain(target.sample_prior(1, seed=0))["topics"][0]
prior_predictive = Figure(figsize=(8, 3), layout="constrained")
for row, images in enumerate((expected, seen)):
    for column in range(len(bars)):
        axes = prior_predictive.add_subplot(2, len(bars), row * len(bars) + column + 1)
        axes.imshow(images[column].reshape(edge, edge).numpy(), cmap="gray_r", vmin=0)
        axes.set(xticks=[], yticks=[], ylabel=("" if column else ("topics\nof the prior", "documents")[row]))

# %%
# An exact twin
# -------------
# Two documents of three words: 64 ways to give their words two topics. Given these, everything else integrates
# out in closed form. An average over draws from the prior must agree within its
# error.

tokens = [(0, 0), (0, 0), (0, 2), (1, 1), (1, 1), (1, 2)]  # document and word


def log_polya(counts: np.ndarray) -> float:
    """Return the log probability of counts in a known order, of rows that are Dirichlet(0.5)."""
    total = 0.5 * counts.shape[1]
    each = gammaln(0.5 + counts).sum() - counts.size * gammaln(0.5)
    return float(each + (gammaln(total) - gammaln(total + counts.sum(1))).sum())


ways = []
for topics in itertools.product((0, 1), repeat=6):
    in_documents, in_topics = np.zeros((2, 2)), np.zeros((2, 3))
    for (document, word), topic in zip(tokens, topics, strict=True):
        in_documents[document, topic] += 1
        in_topics[topic, word] += 1
    ways.append(log_polya(in_documents) + log_polya(in_topics))
by_hand = float(logsumexp(ways))
tiny = bk.Target.from_pyro(allocation, torch.tensor([[0, 0, 2], [1, 1, 2]]), 2, 3, 0.5)
drawn = evidence.naive_monte_carlo(tiny, num_draws=20_000, seed=0)
print(f"six words: log evidence {by_hand:.6f}, {drawn}")
assert drawn.trusted and abs(drawn.log_evidence - by_hand) < 4.5 * drawn.standard_error

# %%
# The fit
# -------
# The order of topics means nothing, so that chains may find different ones or change theirs on the way, and R-hat of
# the topics as drawn says little. What does not depend on the order has to converge: the log likelihood, and the
# probability of every word in every document. So have the topics, once all draws have them in one order.

num_warmup, num_samples = 150, 400
with warnings.catch_warnings():
    warnings.simplefilter("ignore", SamplingWarning)  # which is right: the chains have the topics in several orders
    draws = bk.sample(target, 4, num_warmup, num_samples, seed=0, progress=False)


def r_hat(x: torch.Tensor) -> float:
    """Return the largest potential scale reduction, of draws ``(chains, draws, ...)``."""
    within, between = x.var(1).mean(0), x.mean(1).var(0)
    return float((1 + between / within).sqrt().max())


def in_one_order(topics: torch.Tensor, reference: torch.Tensor | None = None) -> torch.Tensor:
    """Return topics ``(*batch, K, words)`` in the order nearest to their mean, which starts as a reference."""
    flat = topics.reshape(-1, *topics.shape[-2:])
    centre = flat[-1] if reference is None else reference
    for _ in range(10):
        order = nearest_permutation(torch.einsum("kw,sjw->skj", centre.sqrt(), flat.sqrt()))
        moved = flat.gather(1, order.unsqueeze(-1).expand_as(flat))
        centre = moved.mean(0)
    return moved.view_as(topics)


values = draws.values()
predicted = values["proportions"] @ values["topics"]
aligned = in_one_order(values["topics"])
print(f"R-hat of topics as drawn {r_hat(values['topics']):.2f}, in one order {r_hat(aligned):.3f}")
print(f"R-hat of words {r_hat(predicted):.3f}, of the log likelihood {r_hat(draws.log_likelihood):.3f}")
assert r_hat(predicted) < 1.1 and r_hat(draws.log_likelihood) < 1.1 and r_hat(aligned) < 1.1

# %%
# What it says
# ------------
# In one order, topics may be averaged over draws and looked at. The means are put in the order of the bars for the
# comparison only: every bar is found again, without a word of rows or columns in the model, and hidden words are
# predicted better than by each document's own counts.

topics = in_one_order(aligned.mean((0, 1)), bars)
distance = 0.5 * (topics - bars).abs().sum(-1)
print(f"total variation of the mean topics from the bars: {distance.mean():.3f}, at most {distance.max():.3f}")

# Every chain predicts the hidden halves of the documents; their spread is the Monte Carlo error.
score = (other * predicted.mean(1).log()).sum((-1, -2)) / other.sum()
error = float(score.std() / len(score) ** 0.5)
smoothed = (seen + 0.5) / (seen + 0.5).sum(-1, keepdim=True)
by_counts = float((other * smoothed.log()).sum() / other.sum())
print(f"log probability of a hidden word: {score.mean():.4f} +- {error:.4f} by topics, {by_counts:.4f} by counts alone")
assert float(score.mean()) > by_counts + 4.5 * error

figure = Figure(figsize=(8, 3), layout="constrained")
for row, images in enumerate((bars, topics)):
    for column, image in enumerate(images):
        axes = figure.add_subplot(2, len(bars), row * len(bars) + column + 1)
        axes.imshow(image.reshape(edge, edge).numpy(), cmap="gray_r", vmin=0, vmax=1 / edge)
        axes.set(xticks=[], yticks=[], ylabel=("" if column else ("true", "posterior mean")[row]))

# %%
# A failure on purpose
# --------------------
# Means of the topics as they were drawn, over chains that have them in several orders, are mixtures of topics. Even put
# in the order that suits the bars best, they are farther from them.

blurred = in_one_order(values["topics"].mean((0, 1)), bars)
plain = 0.5 * (blurred - bars).abs().sum(-1)
print(f"total variation from the bars: {plain.mean():.3f} as drawn, {distance.mean():.3f} in one order")
assert plain.mean() > distance.mean()

# %%
# Try it on yours
# ---------------
# Replace the words: numbers from zero, a row for each document, here of one length.
#
# .. code-block:: python
#
#    draws = bk.sample(allocation, words, 6, 9, 0.2, num_chains=4, num_warmup=100, num_samples=100)
#    topics = in_one_order(draws.values()["topics"])
#
# Look at R-hat of the words' probabilities and of the log likelihood, not at that of the topics as drawn, and at the
# probability of words held out. Thousands of documents are too many for chains: train a guide on minibatches.
#
# Where to go next: :doc:`/gallery/evidence/galaxy_mixture` counts components, :doc:`karate_club` finds blocks of a
# graph.
