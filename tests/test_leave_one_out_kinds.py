"""Leave-one-out where labels are summed out, factors stand beside data, or rows have several sites: exact twins."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import DataError, DataWarning, ModelError, ShapeError, UnknownNameError

F64 = torch.float64
GRID = torch.linspace(-8.0, 8.0, 20_001, dtype=F64).unsqueeze(-1)


def by_quadrature(log_prior, terms):
    """Return the exact elpd of each group from log prior ``(grid,)`` and terms ``(grid, groups)`` on a grid."""
    whole = (log_prior + terms.sum(1)).logsumexp(0)
    return whole - (log_prior.unsqueeze(1) + terms.sum(1, keepdim=True) - terms).logsumexp(0)


def scored(model, *args, **how):
    draws = bk.sample(model, *args, num_samples=2000, seed=3, progress=False)
    return draws.loo(**how), draws.target


def agrees(score, exact, limit):
    error = score.pointwise_error.clamp(min=1e-6)
    assert score.trusted, score.warnings
    assert bool(((score.pointwise - exact).abs() < limit(len(exact)) * error).all())
    assert abs(score.elpd - float(exact.sum())) < 2 * score.monte_carlo_error + 1e-3


ITEMS = torch.tensor([[1, 1, 0], [0, 0, 1], [1, 1, 1], [0, 1, 0], [0, 0, 0]], dtype=F64)  # items, annotators


def annotators(y):
    skill = pyro.sample("skill", dist.Normal(1.0, 1.0))
    with pyro.plate("item", y.shape[0], dim=-2):
        label = pyro.sample("label", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        with pyro.plate("annotator", y.shape[1], dim=-1):
            right = torch.sigmoid(skill)
            pyro.sample("y", dist.Bernoulli(label * right + (1 - label) * (1 - right)), obs=y)


def _of_items(y):
    right = torch.sigmoid(GRID)
    terms = [(right.log() * y.sum(1) + (1 - right).log() * (3 - y.sum(1))) + math.log(0.4)]
    terms += [((1 - right).log() * y.sum(1) + right.log() * (3 - y.sum(1))) + math.log(0.6)]
    return by_quadrature(-0.5 * (GRID[:, 0] - 1).square(), torch.stack(terms).logsumexp(0))


@pytest.mark.long
def test_labels_that_are_summed_out_are_left_out_with_their_item(limit):
    score, target = scored(annotators, ITEMS, by="item")
    assert score.sites == {"item": {"item": 5}}
    agrees(score, _of_items(ITEMS), limit)
    with pytest.raises(ModelError, match="coupled by the summed-out sites 'label', .* as by='item'"):
        bk.sample(target, num_samples=100, progress=False).loo()
    with pytest.raises(ModelError, match="'label' is outside of plate 'annotator'"):
        bk.sample(target, num_samples=100, progress=False).loo(by="annotator")


def _dawid_skene(y, seen):
    """Two kinds of errors of annotators, who have not seen every item."""
    right = [pyro.sample(name, dist.Beta(4.0, 2.0)) for name in ("specificity", "sensitivity")]
    with pyro.plate("item", y.shape[0], dim=-2):
        label = pyro.sample("label", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        with pyro.plate("annotator", y.shape[1], dim=-1), pyro.poutine.mask(mask=seen):
            pyro.sample("y", dist.Bernoulli(torch.where(label > 0, right[1], 1 - right[0])), obs=y)


@pytest.mark.calibration
def test_items_of_dawid_and_skene(limit):
    seen = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1], [1, 0, 1], [1, 1, 1]]).bool()
    middles = (torch.arange(400, dtype=F64) + 0.5) / 400
    specificity, sensitivity = (x.reshape(-1, 1, 1) for x in torch.meshgrid(middles, middles, indexing="ij"))
    terms = []
    for share, one in ((0.4, sensitivity), (0.6, 1 - specificity)):
        each = torch.where(ITEMS > 0, one, 1 - one).log()
        terms.append((each * seen).sum(-1) + math.log(share))
    log_prior = sum(3 * x.log() + (1 - x).log() for x in (specificity, sensitivity)).flatten()
    score, _ = scored(_dawid_skene, ITEMS, seen, by="item")
    agrees(score, by_quadrature(log_prior, torch.stack(terms).logsumexp(0)), limit)


Y = torch.tensor([0.3, -0.5, 1.2, 0.1, 2.0, -0.7], dtype=F64)


def _mixture(y):
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        side = pyro.sample("side", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(shift + side, 0.8), obs=y)


@pytest.mark.calibration
def test_a_mixture_has_its_rows_with_and_without_by(limit):
    parts = [dist.Normal(GRID + side, 0.8).log_prob(Y) + math.log(share) for side, share in ((0.0, 0.7), (1.0, 0.3))]
    exact = by_quadrature(-0.5 * GRID[:, 0].square(), torch.stack(parts).logsumexp(0))
    for by in (None, "rows"):
        agrees(scored(_mixture, Y, by=by)[0], exact, limit)


@pytest.mark.calibration
@pytest.mark.filterwarnings("ignore:the factor:bayeskit.errors.DataWarning")
def test_a_factor_of_latent_values_belongs_to_the_prior(limit):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.factor("soft_sum_to_zero", -5.0 * (mean - 0.2).square())
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    prior = -0.5 * GRID[:, 0].square() - 5.0 * (GRID[:, 0] - 0.2).square()
    score, _ = scored(model, Y)
    agrees(score, by_quadrature(prior, dist.Normal(GRID, 1.0).log_prob(Y)), limit)
    assert len(score.pointwise) == len(Y)


@pytest.mark.calibration
@pytest.mark.filterwarnings("ignore:the factor:bayeskit.errors.DataWarning")
def test_a_conditional_autoregression_is_a_prior(limit):
    first, second = torch.tensor([0, 1, 2]), torch.tensor([1, 2, 3])

    def model(y):
        with pyro.plate("area", 4):
            effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(effect, 0.5), obs=y)
        pyro.factor("icar", -2.0 * (effect[first] - effect[second]).square().sum())

    precision = torch.eye(4, dtype=F64)
    for a, b in zip(first, second, strict=True):
        edge = torch.zeros(4, dtype=F64)
        edge[a], edge[b] = 1.0, -1.0
        precision += 4.0 * torch.outer(edge, edge)
    y, exact = Y[:4], []
    for left in range(4):
        kept = [i for i in range(4) if i != left]
        posterior = precision.clone()
        posterior[kept, kept] += 4.0
        shift = torch.zeros(4, dtype=F64)
        shift[kept] = 4.0 * y[kept]
        covariance = torch.linalg.inv(posterior)
        exact.append(dist.Normal((covariance @ shift)[left], (covariance[left, left] + 0.25).sqrt()).log_prob(y[left]))
    score, _ = scored(model, y)
    error = score.pointwise_error.clamp(min=1e-6)
    assert bool(((score.pointwise - torch.stack(exact)).abs() < limit(4) * error).all()), score


COUNTS = torch.tensor([0, 2, 0, 5, 1, 3], dtype=F64)


def _hurdle(counts):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("rows", len(counts)):
        pyro.sample("any", dist.Bernoulli(0.6), obs=(counts > 0).double())
        with pyro.poutine.mask(mask=counts > 0):
            pyro.sample("count", dist.Poisson(rate), obs=counts.clamp(min=1))
        pyro.factor("truncated", torch.where(counts > 0, -torch.log(-torch.expm1(-rate)), 0.0))


def _of_hurdle():
    rate = GRID.exp()
    positive = COUNTS * GRID - rate - torch.lgamma(COUNTS + 1) - torch.log(-torch.expm1(-rate)) + math.log(0.6)
    terms = torch.where(COUNTS > 0, positive, math.log(0.4))
    return by_quadrature((2 * GRID - rate)[:, 0], terms)


@pytest.mark.calibration
def test_rows_of_a_hurdle_are_units(limit):
    score, _ = scored(_hurdle, COUNTS)
    assert len(score.pointwise) == len(COUNTS) == int(score.counts.sum())
    agrees(score, _of_hurdle(), limit)


@pytest.mark.calibration
def test_rows_in_plates_of_their_own_are_joined_by_an_index(limit):
    positive = torch.nonzero(COUNTS > 0)[:, 0]

    def model(counts):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(counts)):
            pyro.sample("any", dist.Bernoulli(0.6), obs=(counts > 0).double())
        with pyro.plate("positive", len(positive)):
            pyro.sample("count", dist.Poisson(rate), obs=counts[positive])
            pyro.factor("truncated", -torch.log(-torch.expm1(-rate)).expand(len(positive)))

    rows = list("abcdef")
    groups = {"any": rows, "count": [rows[i] for i in positive], "truncated": np.array(rows)[positive]}
    score, _ = scored(model, COUNTS, by=groups)
    agrees(score, _of_hurdle(), limit)
    draws = bk.sample(model, COUNTS, num_samples=100, progress=False)
    with pytest.raises(UnknownNameError, match="'count'"):
        draws.loo(by={"any": rows})
    with pytest.raises(ShapeError, match="14 labels, the group of each datum"):
        draws.loo(by=rows)


def _mean(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


@pytest.mark.long
def test_groups_by_an_index(limit):
    each = dist.Normal(GRID, 1.0).log_prob(Y)
    exact = by_quadrature(
        -0.5 * GRID[:, 0].square(), torch.stack([each[:, [0, 3]].sum(1), each[:, [1, 2, 4, 5]].sum(1)], 1)
    )
    for labels in (["a", "b", "b", "a", "b", "b"], torch.tensor([0, 1, 1, 0, 1, 1]), np.array([7, 9, 9, 7, 9, 9])):
        agrees(scored(_mean, Y, by=labels)[0], exact, limit)


@pytest.mark.calibration
def test_groups_of_two_scores_are_paired_by_their_data():
    draws = bk.sample(_mean, Y, num_samples=200, seed=3, progress=False)
    first, renamed, other = (draws.loo(by=list(labels)) for labels in ("ccaabb", "aabbcc", "abcabc"))
    assert first.groups == ("c", "a", "b") and first.to_pandas()["group"].tolist() == ["c", "a", "b"]
    assert first.difference(renamed) == pytest.approx((0.0, 0.0), abs=1e-12)  # sums in another order
    with pytest.raises(DataError, match="other groups of the data"):
        first.difference(other)


@pytest.mark.calibration
def test_rows_of_two_sites_have_labels_of_rows_or_of_data():
    def model(any_, count):
        share, rate = pyro.sample("share", dist.Beta(1.0, 1.0)), pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("rows", len(count)):
            pyro.sample("any", dist.Bernoulli(share), obs=any_)
            pyro.sample("count", dist.Poisson(rate), obs=count)

    draws = bk.sample(model, [1, 0, 1, 1], [2, 1, 4, 3], num_samples=200, seed=3, progress=False)
    by_rows, by_data = draws.loo(by=list("aabb")), draws.loo(by={"any": list("aabb"), "count": list("aabb")})
    assert torch.equal(by_rows.pointwise, by_data.pointwise) and by_rows.groups == ("a", "b")
    with pytest.raises(ShapeError, match="4 labels, the group of each row, or 8 labels, the group of each datum"):
        draws.loo(by=list("aab"))
    with pytest.raises(ShapeError, match="by has 3 labels of site 'any', which has 4 data"):
        draws.loo(by={"any": list("aab"), "count": list("aabbb")})
    with pytest.raises(UnknownNameError, match="no observed site is called 'z'"):
        draws.loo(by={"z": [0, 1]})
    with pytest.raises(DataError, match="no label at place 1"):
        draws.loo(by=["a", None, "b", "b"])


@pytest.mark.calibration
def test_one_term_of_all_rows_is_named_for_what_it_is():
    def process(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        covariance = scale**2 * torch.exp(-(torch.arange(6.0)[:, None] - torch.arange(6.0)).abs()) + torch.eye(6)
        pyro.sample("y", dist.MultivariateNormal(torch.zeros(6), covariance), obs=y)

    score, _ = scored(process, Y)
    assert not score.trusted and "all data are one term" in score.warnings[-1]


@pytest.mark.calibration
def test_scores_of_other_data_have_no_difference():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    one, same, other, fewer = (bk.sample(model, y, num_samples=200, progress=False).loo() for y in (Y, Y, 2 * Y, Y[1:]))
    difference, error = one.difference(same)
    assert abs(difference) < 0.1 and error < 0.1
    with pytest.raises(DataError, match="the two scores have different data: value"):
        one.difference(other)
    assert one.difference(other, same_data=True)[0] > 0
    with pytest.raises(ShapeError, match="6 and 5 terms"):
        one.difference(fewer)


@pytest.mark.calibration
def test_a_factor_that_stays_is_said():
    def truncated(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        pyro.factor("truncation", -len(y) * dist.Normal(0.0, 1.0).cdf(mean).log())

    draws = bk.sample(truncated, Y.abs(), num_samples=200, progress=False)
    with pytest.warns(DataWarning, match="'truncation' is outside of every plate .* if it depends on data"):
        draws.loo()
