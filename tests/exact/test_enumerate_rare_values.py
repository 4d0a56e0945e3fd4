"""Probabilities below the rounding unit, and exact zeros, of latent and observed sites; the bar of long sums."""

import math
import sys
from contextlib import contextmanager

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._logdensity import pyro_runs as replay
from bayeskit.errors import ImproperPosteriorError, UnknownNameError
from bayeskit.exact._enumeration import enumerate_latents

module = sys.modules["bayeskit.exact._enumeration"]  # the package may show the function under this name
F64 = torch.float64


def forbidden_but_for(prior, scores):
    """A site whose common values the data forbid, so that all the evidence comes from rare ones."""

    def model():
        z = pyro.sample("z", prior)
        pyro.factor("data", torch.tensor(scores, dtype=F64)[z.long()])

    return model


RARE = {
    "categorical": (dist.Categorical(torch.tensor([1.0, 1e-20, 0.0], dtype=F64)), [-1000.0, 0.0, 0.0], 1e-20, 2),
    "bit": (dist.Bernoulli(torch.tensor(1e-16, dtype=F64)), [-1000.0, 0.0], 1e-16, 2),
    "bit in single precision": (dist.Bernoulli(torch.tensor(2.0**-30)), [-1000.0, 0.0], 2.0**-30, 2),
    "common bit": (dist.Bernoulli(torch.tensor(1 - 2.0**-50, dtype=F64)), [0.0, -1000.0], 2.0**-50, 2),
    "binomial": (dist.Binomial(2, torch.tensor(1e-20, dtype=F64)), [-1000.0, -1000.0, 0.0], 1e-40, 3),
    "certain binomial": (dist.Binomial(2, torch.tensor(0.0, dtype=F64)), [0.5, 0.0, 0.0], math.exp(0.5), 1),
}


@pytest.mark.parametrize("name", RARE)
def test_rare_values_keep_their_probability(name):
    prior, scores, evidence, count = RARE[name]
    posterior = enumerate_latents(forbidden_but_for(prior, scores))
    rounding = 2e-6 if "single" in name else 1e-12  # of the logarithm of this size
    assert posterior.log_evidence == pytest.approx(math.log(evidence), abs=rounding)
    assert len(posterior) == count


def test_the_distributions_of_the_model_stay_as_they_are():
    prior = dist.Categorical(torch.tensor([1.0, 1e-20], dtype=F64))
    enumerate_latents(forbidden_but_for(prior, [0.0, 0.0]))
    assert bool(torch.isfinite(dist.Categorical.log_prob(prior, torch.tensor(1))))
    assert float(prior.log_prob(torch.tensor(1))) > -37


ZERO = torch.zeros(2, dtype=F64)
FIRST = torch.tensor([[1.0, 0.0], [1.0, 0.0]], dtype=F64)
OBSERVED = {
    "bit": (lambda c: dist.Bernoulli(ZERO[c]), 1.0, 0.0),
    "bits": (lambda c: dist.Bernoulli(ZERO[c]).expand([2]).to_event(1), [0.0, 1.0], [0.0, 0.0]),
    "category": (lambda c: dist.Categorical(FIRST[c]), 1, 0),
    "one-hot": (lambda c: dist.OneHotCategorical(FIRST[c]), [0.0, 1.0], [1.0, 0.0]),
    "multinomial": (lambda c: dist.Multinomial(2, FIRST[c]), [1.0, 1.0], [2.0, 0.0]),
    "binomial": (lambda c: dist.Binomial(2, ZERO[c]), 1.0, 0.0),
}


@pytest.mark.parametrize("name", OBSERVED)
@pytest.mark.parametrize("batched", [True, False])
def test_impossible_data_have_no_posterior(name, batched, monkeypatch):
    law, impossible, certain = OBSERVED[name]

    def model(x):
        c = pyro.sample("c", dist.Bernoulli(0.5)).long()
        pyro.sample("x", law(c), obs=x)

    if not batched:
        monkeypatch.setattr(module, "_looks_fixed", lambda *arguments: False)
    posterior = enumerate_latents(model, torch.tensor(impossible))
    assert posterior.log_evidence == -math.inf
    with pytest.raises(ImproperPosteriorError):
        posterior.most_probable()
    assert abs(enumerate_latents(model, torch.tensor(certain)).log_evidence) < 1e-12


def test_masked_data_may_be_impossible():
    def model():
        c = pyro.sample("c", dist.Bernoulli(0.5)).long()
        pyro.sample("x", dist.Bernoulli(ZERO[c]).expand([2]).mask(torch.tensor([True, False])).to_event(1), obs=data)

    data = torch.tensor([0.0, 1.0])
    assert abs(enumerate_latents(model).log_evidence) < 1e-12


def test_probabilities_raised_to_the_rounding_unit_are_seen(monkeypatch):
    monkeypatch.setattr(replay, "unclamped", lambda fn: fn)
    prior, scores, evidence, _ = RARE["categorical"]
    assert abs(enumerate_latents(forbidden_but_for(prior, scores)).log_evidence - math.log(evidence)) > 5


def branching(x):
    if pyro.sample("a", dist.Bernoulli(0.5)):
        pyro.sample("b", dist.Bernoulli(0.5))


@pytest.mark.parametrize(
    ("model", "expected"), [(branching, (None, [1, 2, 3])), (lambda x: pyro.sample("a", dist.Bernoulli(x)), (2, [2]))]
)
def test_a_bar_counts_the_assignments(model, expected, monkeypatch):
    seen = []

    @contextmanager
    def bar(description, total, enabled):
        class Bar:
            def update(self, completed):
                steps.append(completed)

        steps = []
        yield Bar()
        seen.append((enabled, total, steps))

    monkeypatch.setattr(module, "progress_bar", bar)
    enumerate_latents(model, torch.tensor(0.5))
    enumerate_latents(model, torch.tensor(0.5), progress=False)
    assert seen == [(True, *expected), (False, *expected)]


def test_marginals_are_plotted():
    def model():
        pyro.sample("one", dist.Categorical(torch.tensor([0.2, 0.3, 0.5], dtype=F64)))
        pyro.sample("two", dist.Bernoulli(torch.tensor([0.25, 0.5], dtype=F64)).to_event(1))

    posterior = enumerate_latents(model)
    ax = posterior.plot("one")
    assert [bar.get_height() for bar in ax.patches] == pytest.approx([0.2, 0.3, 0.5], abs=1e-12)
    ax = posterior.plot("two")
    image = ax.images[0].get_array()
    assert image[1].tolist() == pytest.approx([0.25, 0.5], abs=1e-12)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0", "1"]
    with pytest.raises(UnknownNameError, match="'three'"):
        posterior.plot("three")
