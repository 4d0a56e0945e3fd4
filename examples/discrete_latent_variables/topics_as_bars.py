"""Topics that one can see: rows and columns of a grid of words, found again in documents that mix them.

What you will learn: simulate documents of latent Dirichlet allocation, sample topics and proportions with every word's
topic summed out, put the topics of all draws in one order, and see that predictions need no such order. The exact twin:
the evidence of a corpus of six words, by a sum over all topics of all words, beside naive Monte Carlo.

Words are the cells of a grid, and each topic is one row or one column (the bars of Griffiths and Steyvers 2004).
"""

import os

import torch

import bayeskit as bk
from bayeskit.inference import evidence
from bayeskit.models.discrete.topic_model import LatentDirichletAllocation, align_topics

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
EDGE, NUM_DOCUMENTS, NUM_TOKENS = (2, 8, 20) if SMALL else (3, 60, 100)


def bars(edge: int) -> torch.Tensor:
    """Return a topic for each row and each column of a grid, ``(2 edge, edge^2)``."""
    cells = torch.zeros(2 * edge, edge, edge, dtype=torch.float64)
    for i in range(edge):
        cells[i, i, :] = 1 / edge
        cells[edge + i, :, i] = 1 / edge
    return cells.flatten(1)


def documents(topics: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return counts of words, ``(documents, words)``, and of as many others of the same documents."""
    concentration = torch.full((NUM_DOCUMENTS, len(topics)), 0.3, dtype=torch.float64)
    share = torch._standard_gamma(concentration, generator=generator)
    chance = (share / share.sum(-1, keepdim=True)) @ topics
    words = torch.multinomial(chance, 2 * NUM_TOKENS, replacement=True, generator=generator)
    seen, other = torch.nn.functional.one_hot(words, topics.shape[1]).double().split(NUM_TOKENS, 1)
    return seen.sum(1), other.sum(1)


def exact_twin() -> None:
    """Two documents of three words."""
    tiny = LatentDirichletAllocation(num_topics=2, num_words=3)
    counts = torch.tensor([[2.0, 0.0, 1.0], [0.0, 2.0, 1.0]], dtype=torch.float64)
    target = bk.Target.from_pyro(tiny.model, counts)
    found = evidence.naive_monte_carlo(target, num_draws=20_000, seed=0)
    exact = tiny.log_evidence(counts)
    print(f"six words: log evidence {exact:.4f}, by Monte Carlo {found.log_evidence:.4f} +- {found.standard_error:.4f}")
    assert abs(found.log_evidence - exact) < 4 * found.standard_error


def main() -> None:
    exact_twin()
    true = bars(EDGE)
    counts, others = documents(true, torch.Generator().manual_seed(1))
    model = LatentDirichletAllocation(len(true), true.shape[1], concentration=0.3, word_concentration=0.3)
    target = bk.Target.from_pyro(model.model, counts)
    # One chain: of several each would find an order of its own, which looks like disagreement.
    draws = bk.sample(target, 1, *((40, 40) if SMALL else (300, 600)), seed=0)

    aligned = align_topics(draws.values(), reference=true)
    topics = aligned["topics"].mean((0, 1))
    distance = 0.5 * (topics - true).abs().sum(-1)
    print(f"total variation of the mean topics from the true ones: {distance.mean():.3f}, at most {distance.max():.3f}")

    # What comes next in a document does not depend on the order of topics: all draws may be averaged as they are.
    values = draws.values()
    predicted = (values["proportions"] @ values["topics"]).mean((0, 1))
    smoothed = (counts + 0.5) / (counts + 0.5).sum(-1, keepdim=True)
    by_topics, by_counts = (float((others * chance.log()).sum() / others.sum()) for chance in (predicted, smoothed))
    print(
        f"log probability of another word of a document: {by_topics:.4f} by topics, {by_counts:.4f} by its counts alone"
    )
    assert by_topics > by_counts
    assert SMALL or float(distance.max()) < 0.2
    if not SMALL:
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(2, len(true), figsize=(8, 3))
        for row, found in zip(axes, (true, topics), strict=True):
            for ax, topic in zip(row, found, strict=True):
                ax.imshow(topic.reshape(EDGE, EDGE), cmap="gray_r", vmin=0, vmax=1 / EDGE)
                ax.set(xticks=[], yticks=[])
        axes[0, 0].set_ylabel("true")
        axes[1, 0].set_ylabel("posterior mean")
        figure.savefig("topics_as_bars.png", dpi=100)


if __name__ == "__main__":
    main()
