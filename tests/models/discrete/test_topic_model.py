"""Latent Dirichlet allocation: exact evidence against one-topic closed forms, quadrature and prior averages."""

import itertools
import math

import pyro
import pytest
import torch

import bayeskit as bk
from bayeskit.core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete import topic_model
from bayeskit.models.discrete.topic_model import LatentDirichletAllocation, align_topics, count_words, plot_topics

COUNTS = torch.tensor([[2, 0, 1], [0, 2, 0], [1, 1, 1]])


def test_one_topic_draws_from_an_urn():
    """Words of one topic are draws from Polya's urn, one after the other."""
    model = LatentDirichletAllocation(1, 3, word_concentration=0.7)
    seen, expected = [0, 0, 0], 0.0
    for row in COUNTS.tolist():
        for word, count in enumerate(row):
            for _ in range(count):
                expected += math.log((0.7 + seen[word]) / (2.1 + sum(seen)))
                seen[word] += 1
    assert abs(model.log_evidence(COUNTS) - expected) < 1e-12


def urns(model, counts):
    """Add up, over all topics of all words, the chances of an urn of topics a document and one of words a topic."""
    tokens = [(d, w) for d, row in enumerate(counts.tolist()) for w, c in enumerate(row) for _ in range(c)]
    total = 0.0
    for topics in itertools.product(range(model.num_topics), repeat=len(tokens)):
        probability, before = 1.0, []
        for (d, w), k in zip(tokens, topics, strict=True):
            document = [z for e, _, z in before if e == d]
            topic = [v for _, v, z in before if z == k]
            a, e = model.concentration, model.word_concentration
            probability *= (a + document.count(k)) / (a * model.num_topics + len(document))
            probability *= (e + topic.count(w)) / (e * model.num_words + len(topic))
            before.append((d, w, k))
        total += probability
    return math.log(total)


@pytest.mark.parametrize(("topics", "rows"), [(2, 3), (3, 2)])
def test_evidence_is_a_sum_over_urns(topics, rows):
    model = LatentDirichletAllocation(topics, 3, 0.4, 0.9)
    assert abs(model.log_evidence(COUNTS[:rows]) - urns(model, COUNTS[:rows])) < 1e-10


def test_swapped_concentrations_are_seen():
    model = LatentDirichletAllocation(2, 3, 0.4, 0.9)
    swapped = LatentDirichletAllocation(2, 3, 0.9, 0.4)
    assert abs(swapped.log_evidence(COUNTS) - urns(model, COUNTS)) > 1e-2


@pytest.mark.parametrize("broken", [False, True])
def test_evidence_is_the_mean_likelihood_under_the_prior(limit, monkeypatch, broken):
    if broken:
        monkeypatch.setattr(topic_model, "_polya", lambda n, a: 1.02 * urn(n, a))
    model, draws = LatentDirichletAllocation(2, 3, 0.8, 1.2), 200_000
    with global_stream(new_generator(0, stream="prior")):
        topics = torch.distributions.Dirichlet(torch.full((2, 3), 1.2).double()).sample((draws,))
        proportions = torch.distributions.Dirichlet(torch.full((3, 2), 0.8).double()).sample((draws,))
    likelihood = model.log_likelihood(topics, proportions, COUNTS).exp()
    z = (likelihood.mean() - math.exp(model.log_evidence(COUNTS))) / (likelihood.std() / draws**0.5)
    assert (abs(float(z)) > limit()) == broken


urn = topic_model._polya


def test_model_is_a_target():
    """Its density is that of prior and likelihood, at any point."""
    model, counts = LatentDirichletAllocation(2, 3, 0.8, 1.2), COUNTS.double()
    with global_stream(new_generator(1)):
        trace = pyro.poutine.trace(model.model).get_trace(counts)
    topics, proportions = (trace.nodes[name]["value"] for name in ("topics", "proportions"))
    expected = sum(
        torch.distributions.Dirichlet(torch.full_like(value, a)).log_prob(value).sum()
        for value, a in ((topics, 1.2), (proportions, 0.8))
    )
    for document, row in zip(proportions, counts, strict=True):
        for word, count in enumerate(row):
            expected = expected + count * (document * topics[:, word]).sum().log()
    assert abs(float(trace.log_prob_sum() - expected)) < 1e-10
    target = bk.Target.from_pyro(model.model, counts)
    assert target.dim == 2 * 2 + 3 * 1


def test_words_that_are_absent_need_no_probability():
    model = LatentDirichletAllocation(1, 2)
    topics, proportions = torch.tensor([[1.0, 0.0]]), torch.ones(1, 1)
    assert float(model.log_likelihood(topics, proportions, torch.tensor([[3, 0]]))) == 0.0


def test_bad_input():
    with pytest.raises(SettingsError, match="num_topics"):
        LatentDirichletAllocation(0, 3)
    with pytest.raises(SettingsError, match="num_words"):
        LatentDirichletAllocation(2, 1)
    with pytest.raises(SettingsError, match="word_concentration"):
        LatentDirichletAllocation(2, 3, 1.0, 0.0)
    model = LatentDirichletAllocation(2, 3)
    with pytest.raises(ShapeError, match="documents, 3"):
        model.log_evidence(COUNTS[:, :2])
    for wrong in (-1.0, 0.5, math.inf, math.nan):
        with pytest.raises(DataError, match="whole numbers"):
            model.log_evidence(torch.full((1, 3), wrong))
    with pytest.raises(SettingsError, match=str(2**30)):
        model.log_evidence(torch.full((1, 3), 10))


# --- Counts, topics and their names


def test_impossible_words_that_are_absent_leave_gradients_finite():
    model = LatentDirichletAllocation(2, 3)
    topics = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.75, 0.0]]).double().requires_grad_(True)
    proportions = torch.tensor([[0.4, 0.6]]).double().requires_grad_(True)
    counts = torch.tensor([[2.0, 1.0, 0.0]])
    value = model.log_likelihood(topics, proportions, counts)
    found = torch.autograd.grad(value, [topics, proportions])
    p = (proportions @ topics).detach()[0, :2]
    each = torch.cat([counts[0, :2].double() / p, torch.zeros(1).double()])
    torch.testing.assert_close(found[0], proportions.detach().mT * each, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], (topics.detach() @ each).unsqueeze(0), rtol=0, atol=1e-12)
    assert bool(torch.xlogy(counts, proportions @ topics).sum().isfinite())
    broken = torch.autograd.grad(torch.xlogy(counts, proportions @ topics).sum(), topics)[0]
    assert not bool(broken.isfinite().all())


def test_counts_come_from_any_library():
    model = LatentDirichletAllocation(2, 3)
    expected = model.log_evidence(COUNTS[:2])
    for counts in (COUNTS[:2].numpy(), COUNTS[:2].tolist(), COUNTS[:2].float(), COUNTS[:2].to(torch.uint8)):
        assert model.log_evidence(counts) == expected
    once = torch.tensor([[True, False, True]])
    assert model.log_evidence(once) == model.log_evidence(once.long())
    for counts in (once, once.numpy(), once.tolist()):
        trace = pyro.poutine.trace(model.model).get_trace(counts)
        assert bool(trace.log_prob_sum().isfinite())


def shuffled(num_draws, documents=3):
    """Draws around four topics, each draw's in its own order."""
    generator = new_generator(4, stream="shuffled")
    topics = torch.softmax(4 * torch.eye(4, 6).double(), -1)
    topics = topics * torch.exp(0.3 * torch.randn(num_draws, 4, 6, generator=generator).double())
    topics = topics / topics.sum(-1, keepdim=True)
    proportions = torch.rand(num_draws, documents, 4, generator=generator).double()
    order = torch.rand(num_draws, 4, generator=generator).argsort(-1)
    mixed = {
        "topics": topics.gather(1, order.unsqueeze(-1).expand_as(topics)).reshape(2, -1, 4, 6),
        "proportions": proportions.gather(-1, order.unsqueeze(1).expand_as(proportions)).reshape(2, -1, documents, 4),
    }
    return topics, proportions, mixed


def test_topics_of_all_draws_are_put_in_one_order():
    topics, proportions, mixed = shuffled(40)
    aligned = align_topics(mixed, reference=topics[0])
    assert torch.equal(aligned["topics"].reshape(topics.shape), topics)
    assert torch.equal(aligned["proportions"].reshape(proportions.shape), proportions)
    # Without a reference the order is some draw's, the same for all.
    own = align_topics(mixed)
    order = own["topics"][-1, -1].argmax(-1)
    assert torch.equal(own["topics"].reshape(topics.shape), topics[:, order])
    assert torch.equal(own["topics"][-1, -1], mixed["topics"][-1, -1])
    assert not torch.equal(mixed["topics"].reshape(topics.shape), topics)
    # Predictions do not change.
    before, after = (v["proportions"] @ v["topics"] for v in (mixed, aligned))
    torch.testing.assert_close(before, after, rtol=0, atol=1e-14)


def test_topics_that_do_not_fit_are_refused():
    topics, proportions, mixed = shuffled(4)
    with pytest.raises(DataError, match="no 'topics', only proportions"):
        align_topics({"proportions": proportions})
    with pytest.raises(ShapeError, match="proportions have shape"):
        align_topics({"topics": topics, "proportions": proportions[:2]})
    with pytest.raises(ShapeError, match="reference has shape"):
        align_topics(mixed, reference=topics)
    with pytest.raises(ShapeError, match="topics have shape"):
        align_topics({"topics": topics[0, 0]})


def test_words_are_counted():
    texts = ["It's a well-known fact: a FACT.", "Facts, 3 facts; \u00dcber_42!", ""]
    counts, vocabulary = count_words(texts)
    assert vocabulary == ("3", "42", "a", "fact", "facts", "it's", "well-known", "\u00fcber")
    assert counts.tolist() == [[0, 0, 2, 2, 0, 1, 1, 0], [1, 1, 0, 0, 2, 0, 0, 1], [0] * 8]
    counts, vocabulary = count_words(texts, min_count=2, stop_words={"A"})
    assert vocabulary == ("fact", "facts") and counts.tolist() == [[2, 0], [0, 2], [0, 0]]
    assert math.isfinite(LatentDirichletAllocation(2, len(vocabulary)).log_evidence(counts))
    with pytest.raises(DataError, match="text 1 is of type int"):
        count_words(["a", 3])
    with pytest.raises(DataError, match="have 1 words"):
        count_words("one one")


def test_topics_are_plotted():
    topics, _, _ = shuffled(10)
    axes = plot_topics(topics, list("abcdef"), num_words=2)
    assert [ax.get_yticklabels()[0].get_text() for ax in axes] == list("abcd")
    bars = [bar.get_width() for bar in axes[1].patches]
    assert bars == pytest.approx(topics.mean(0)[1].topk(2).values.tolist(), abs=1e-12)
    with pytest.raises(ShapeError, match="num_topics, 5"):
        plot_topics(topics, list("abcde"))
    with pytest.raises(ShapeError, match="there are 2 axes for 4 topics"):
        plot_topics(topics, list("abcdef"), axes[:2])


def test_too_many_words_name_the_remedy():
    with pytest.raises(SettingsError, match=r"evidence\.smc of Target\.from_pyro"):
        LatentDirichletAllocation(2, 3).log_evidence(torch.full((1, 3), 10))
