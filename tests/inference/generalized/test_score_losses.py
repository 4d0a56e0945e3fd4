"""Score matching and the discrete Fisher divergence: closed forms, identities under the model, mutations."""

import itertools
import math

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import DataError, ImproperPosteriorError, SettingsError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior
from bayeskit.inference.generalized.losses._scores import DiscreteFisherDivergence, ScoreMatching


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


# -- score matching -----------------------------------------------------------------------------------------


def normal_density(p, x):  # mean and log precision, no normaliser
    return -p[1].exp() * (x - p[0]) ** 2 / 2


def test_normal_law_in_closed_form():
    x, p = double(-1.0, 0.5, 3.0), double(0.3, 0.4)
    precision = math.exp(0.4)
    expected = (precision * (x - 0.3)) ** 2 / 2 - precision
    torch.testing.assert_close(ScoreMatching(normal_density).pointwise(p, x), expected, rtol=1e-13, atol=0)
    # Its minimiser is that of the likelihood: mean and variance of the data.
    best = torch.stack([x.mean(), -x.var(correction=0).log()])
    gradient = torch.func.grad(ScoreMatching(normal_density).total)(best, x)
    assert gradient.abs().max() < 1e-12


def test_several_entries_against_the_hessian():
    x, p = torch.tensor([[0.1, 1.0], [-1.0, 0.4]], dtype=torch.float64), double(0.2, -0.4)

    def one(x):
        return -((x - p) ** 2).sum() / 2 - 0.1 * (x**4).sum() - 0.3 * x[0] * x[1] ** 2

    def log_density(p, x):
        return torch.func.vmap(one)(x)

    expected = torch.stack(
        [torch.func.grad(one)(a).square().sum() / 2 + torch.func.jacrev(torch.func.grad(one))(a).trace() for a in x]
    )
    torch.testing.assert_close(ScoreMatching(log_density).pointwise(p, x), expected, rtol=1e-12, atol=0)


def fisher_gap(loss, model_score, grid, mass, p):
    """Expected loss minus the expected halved squared distance of scores, which must not depend on ``p``."""
    divergence = (mass * (model_score(p, grid) + grid) ** 2).sum() / 2
    return ((mass * loss.pointwise(p, grid)).sum() - divergence).item()


def test_expected_loss_is_the_fisher_divergence():
    grid = torch.linspace(-12, 12, 4001, dtype=torch.float64)
    mass = dist.Normal(0.0, 1.0).log_prob(grid).exp() * (grid[1] - grid[0])

    def score(p, x):
        return -p[1].exp() * (x - p[0])

    gaps = [
        fisher_gap(ScoreMatching(normal_density), score, grid, mass, p) for p in (double(0.0, 0.0), double(1.0, 0.7))
    ]
    assert abs(gaps[0] - gaps[1]) < 1e-12


class _WithoutSlope(ScoreMatching):
    """Drops the derivative of the weight."""

    def pointwise(self, parameter, data):
        plain = ScoreMatching(self.log_density)
        return self.weight(data) * plain.pointwise(parameter, data)


@pytest.mark.parametrize(("family", "right"), [(ScoreMatching, True), (_WithoutSlope, False)])
def test_weighted_loss_on_the_half_line(family, right):
    """Gamma(4, 1) against x^a exp(-b x) with the weight x, which vanishes at zero."""
    grid = torch.linspace(0, 60, 120_001, dtype=torch.float64)[1:]
    mass = dist.Gamma(4.0, 1.0).log_prob(grid).exp() * (grid[1] - grid[0])

    def log_density(p, x):
        return p[0] * x.log() - p[1] * x

    loss, truth = family(log_density, weight=lambda x: x), 3 / grid - 1

    def gap(p):
        divergence = (mass * grid * (p[0] / grid - p[1] - truth) ** 2).sum() / 2
        return ((mass * loss.pointwise(p, grid)).sum() - divergence).item()

    # The trapezoidal rule's error is of the order of the spacing, 5e-4, squared.
    assert (abs(gap(double(1.0, 1.0)) - gap(double(2.0, 0.5))) < 1e-6) == right


def test_conditional_models():
    x, y, p = double(0.0, 1.0, 2.0), double(0.3, 0.8, 2.5), double(0.1, 1.1)
    loss = ScoreMatching(lambda p, x, y: -((y - p[0] - p[1] * x) ** 2) / 2)
    torch.testing.assert_close(loss.pointwise(p, (x, y)), (y - 0.1 - 1.1 * x) ** 2 / 2 - 1, rtol=1e-12, atol=0)


def test_score_matching_refuses_whole_numbers_and_says_what_it_got():
    with pytest.raises(DataError, match="floating"):
        GibbsPosterior(dist.Normal(0.0, 1.0), ScoreMatching(lambda m, x: -((x - m) ** 2)), torch.tensor([1, 2]))
    with pytest.raises(ShapeError, match="log_density returns shape"):
        ScoreMatching(lambda m, x: (x - m).sum()).total(torch.zeros(()), double(1.0, 2.0))
    # N(0, 1/p): the loss tends to zero as the precision does.
    with pytest.raises(ImproperPosteriorError):
        GibbsPosterior(Flat(), ScoreMatching(lambda p, x: -p.exp() * x**2 / 2, bounded=True), double(1.0, 2.0))


# -- the discrete Fisher divergence -------------------------------------------------------------------------


def log_poisson(rate, x):
    return x * rate.log() - torch.lgamma(x + 1)


def test_poisson_law_in_closed_form():
    x, rate = double(0.0, 1.0, 4.0), torch.tensor(1.7, dtype=torch.float64)
    expected = (x / 1.7) ** 2 - 2 * (x + 1) / 1.7
    torch.testing.assert_close(DiscreteFisherDivergence(log_poisson).pointwise(rate, x), expected, rtol=1e-12, atol=0)
    # Quadratic in 1 / rate, least at mean(x^2) / (mean(x) + 1), which is the rate for the law itself.
    best = (x**2).mean() / (x.mean() + 1)
    assert torch.func.grad(DiscreteFisherDivergence(log_poisson).total)(best, x).abs() < 1e-12


def divergence_gap(loss, log_mass, states, truth, p):
    """Expected loss minus the expected squared distance of ratios of masses, which must not depend on ``p``."""
    size = loss.num_states

    def ratio(table, x, j):
        lower = list(x)
        lower[j] -= 1
        if size is None and lower[j] < 0:
            return 0.0
        lower[j] %= size or 10**9
        return table[tuple(lower)] / table[tuple(x)]

    x = torch.tensor(states, dtype=torch.float64)
    model = dict(zip(states, log_mass(p, x).exp().tolist(), strict=True))
    divergence = sum(truth[s] * (ratio(model, s, j) - ratio(truth, s, j)) ** 2 for s in states for j in range(len(s)))
    mass = torch.tensor([truth[s] for s in states], dtype=torch.float64)
    return (mass * loss.pointwise(p, x)).sum().item() - divergence


def ising(p, x):
    return p[0] * x.sum(-1) + p[1] * (x[..., 0] * x[..., 1]) - 0.2 * x[..., 1] * x[..., 2]


def potts(p, x):
    return p[0] * x.sum(-1) + p[1] * (x[..., 0] - x[..., 1]) ** 2


def counts(p, x):
    return (p[0] * x - torch.lgamma(x + 1) - p[1].exp() * x**2 / 40).sum(-1)


class _OneSided(DiscreteFisherDivergence):
    """Drops the factor of two."""

    def pointwise(self, parameter, data):
        x = data
        total = super().pointwise(parameter, data)
        up = 0.0
        for j in range(x.shape[1]):
            higher = x.clone()
            higher[:, j] = higher[:, j] + 1 if self.num_states is None else (higher[:, j] + 1) % self.num_states
            up = up + (self.log_mass(parameter, x) - self.log_mass(parameter, higher)).exp()
        return total + up


@pytest.mark.parametrize(("family", "right"), [(DiscreteFisherDivergence, True), (_OneSided, False)])
@pytest.mark.parametrize(
    ("log_mass", "num_states", "entries"),
    [(ising, 2, 3), (potts, 4, 2), (counts, None, 2)],
    ids=["bits", "states", "counts"],
)
def test_expected_loss_is_the_divergence(log_mass, num_states, entries, family, right):
    states = list(itertools.product(range(num_states or 25), repeat=entries))
    weights = torch.randn(len(states), generator=torch.Generator().manual_seed(3), dtype=torch.float64).exp()
    if num_states is None:  # the law of the data must fall off at the end of the table
        weights = weights * torch.tensor(
            [math.exp(-math.lgamma(a + 1) - math.lgamma(b + 1)) for a, b in states], dtype=torch.float64
        )
    truth = dict(zip(states, (weights / weights.sum()).tolist(), strict=True))
    loss = family(log_mass, num_states)
    gaps = [divergence_gap(loss, log_mass, states, truth, p) for p in (double(0.1, 0.2), double(-0.4, 0.5))]
    assert (abs(gaps[0] - gaps[1]) < 1e-9) == right


def test_normalisers_do_not_matter():
    x, p = torch.tensor([[0.0, 1.0, 1.0], [1.0, 1.0, 0.0]], dtype=torch.float64), double(0.3, -0.2)
    shifted = DiscreteFisherDivergence(lambda p, x: ising(p, x) + 7 * p[0], 2)
    torch.testing.assert_close(
        shifted.pointwise(p, x), DiscreteFisherDivergence(ising, 2).pointwise(p, x), rtol=1e-12, atol=0
    )


def test_whole_number_types_are_taken():
    p = double(0.3, -0.2)
    bits = torch.tensor([[0, 1, 1], [1, 1, 0]])
    loss = DiscreteFisherDivergence(potts, 2)
    torch.testing.assert_close(loss.pointwise(p, bits), loss.pointwise(p, bits.double()), rtol=1e-12, atol=0)


def test_discrete_data_and_settings_are_checked():
    prior = dist.Gamma(2.0, 1.0)
    with pytest.raises(DataError, match=r"counts, unlike datum 1 \(1 in all\)"):
        GibbsPosterior(prior, DiscreteFisherDivergence(log_poisson), double(1.0, 1.5))
    with pytest.raises(DataError, match="counts, unlike datum 0"):
        GibbsPosterior(prior, DiscreteFisherDivergence(log_poisson), double(-1.0, 2.0))
    with pytest.raises(DataError, match=r"states 0, ..., 1, unlike datum 1"):
        GibbsPosterior(prior, DiscreteFisherDivergence(log_poisson, 2), double(1.0, 2.0))
    with pytest.raises(SettingsError, match="num_states"):
        DiscreteFisherDivergence(log_poisson, 1)
    with pytest.raises(ShapeError, match="log_mass returns shape"):
        DiscreteFisherDivergence(lambda p, x: x.sum()).total(torch.ones(()), double(1.0, 2.0))


def test_improper_priors_are_refused_where_the_loss_flattens():
    x = double(0.0, 2.0, 3.0)
    with pytest.raises(ImproperPosteriorError):
        GibbsPosterior(Flat(), DiscreteFisherDivergence(lambda t, x: log_poisson(t.exp(), x)), x)
    # And rightly so: as the rate grows the loss tends to zero.
    assert DiscreteFisherDivergence(log_poisson).total(torch.tensor(1e9, dtype=torch.float64), x).abs() < 1e-7
