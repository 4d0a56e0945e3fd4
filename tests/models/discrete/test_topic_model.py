"""Latent Dirichlet allocation: exact evidence against one-topic closed forms, quadrature and prior averages."""

import itertools
import math

import pyro
import pytest
import torch

import bayeskit as bk
from bayeskit._torch import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete import topic_model
from bayeskit.models.discrete.topic_model import LatentDirichletAllocation

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
