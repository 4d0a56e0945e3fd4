"""Reports on posteriors that do not exist."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from bayeskit.errors import ImproperPosteriorError, SettingsError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized._checks import propriety_check

Y = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
_generator = torch.Generator().manual_seed(0)
X = torch.randn(20, 3, generator=_generator, dtype=torch.float64)
OUTCOME = X @ X.new_tensor([1.0, -1.0, 2.0]) + torch.randn(20, generator=_generator, dtype=torch.float64)
COLLINEAR = torch.cat([X[:, :2], X[:, :1] - 2 * X[:, 1:2]], 1)
NULL = X.new_tensor([1.0, -2.0, -1.0]) / 6**0.5
SEPARATED = torch.sign(X @ X.new_tensor([1.0, -1.0, 0.5]))
FLIPPED = SEPARATED * (1 - 2 * (torch.arange(20) < 6).double())
STANDARD = dist.Normal(torch.zeros(3), 10.0)


def logistic(coefficients, data):
    return torch.nn.functional.softplus(-data[1] * (data[0] @ coefficients))


def forgotten(m, x):
    """Bounded, but not marked so."""
    return 1 - torch.exp(-(x - m).square())


def heavy(m, x):
    return (x - m).square().log1p()


def heavy_entries(m, x):
    return (x[:, None] - m).square().log1p().sum(-1)


def location_and_scale():
    return pyro.sample("mean", Flat()), pyro.sample("scale", Flat((), constraints.positive))


def normal(p, x):
    return ((x - p[0]) / p[1]).square() / 2 + p[1].log()


class Unguarded(GibbsPosterior):
    """A posterior that is made without a look at the loss along flat directions, to be checked afterwards."""

    def _refuse_recession(self, seed):
        pass


def made(prior, loss, data, weight=1.0):
    return Unguarded(prior, loss, data, weight, compile=False)


PROPER = {
    "squared": (Flat(), losses.HalfSquared(), Y),
    "one datum": (Flat(), losses.HalfSquared(), Y[:1]),
    "absolute": (Flat(), losses.Absolute(), Y),
    "large numbers": (Flat(), losses.HalfSquared(), Y * 1e9),
    "regression": (Flat((3,)), losses.HalfSquared(losses.linear), (X, OUTCOME)),
    "median regression": (Flat((3,)), losses.Absolute(losses.linear), (X, OUTCOME)),
    "collinear, wide prior": (
        dist.Normal(torch.zeros(3), 1e6),
        losses.HalfSquared(losses.linear),
        (COLLINEAR, OUTCOME),
    ),
    "not separable": (Flat((3,)), logistic, (X, FLIPPED)),
    "separable, proper prior": (STANDARD, logistic, (X, SEPARATED)),
    "separable, heavy tails": (dist.StudentT(3.0, torch.zeros(3), 1.0), logistic, (X, SEPARATED)),
    "bounded, wide prior": (dist.Normal(0.0, 1e4), forgotten, Y),
    "just integrable": (Flat(), heavy, Y[:1], 0.6),
    "just integrable in each dimension": (Flat((3,)), heavy_entries, Y[:1], 0.6),
    "Cauchy": (dist.Cauchy(torch.zeros(4), 1.0), lambda m, x: 0 * x * m[0], Y),
    "scale, three data": (location_and_scale, normal, Y),
    "Gamma": (dist.Gamma(2.0, 1.0), losses.HalfSquared(), Y),
    "flat on half a line": (Flat((), constraints.positive), losses.HalfSquared(), Y),
    "simplex": (dist.Dirichlet(torch.full((3,), 0.5)), lambda p, x: x * p[0], Y),
    "single precision": (Flat(), losses.HalfSquared(), Y.float()),
}
IMPROPER = {
    "flag forgotten": (Flat(), forgotten, Y),
    "collinear": (Flat((3,)), losses.HalfSquared(losses.linear), (COLLINEAR, OUTCOME)),
    "collinear, absolute": (Flat((3,)), losses.Absolute(losses.linear), (COLLINEAR, OUTCOME)),
    "too few data": (Flat((3,)), losses.HalfSquared(losses.linear), (X[:2], OUTCOME[:2])),
    "separable": (Flat((3,)), logistic, (X, SEPARATED)),
    "just not integrable": (Flat(), heavy, Y[:1], 0.4),
    "just not integrable in each dimension": (Flat((3,)), heavy_entries, Y[:1], 0.4),
    "scale, two data": (location_and_scale, normal, Y[:2]),
    "scale that the loss ignores": (location_and_scale, lambda p, x: (x - p[0]).square(), Y),
    "loss that falls with the scale": (Flat((), constraints.positive), lambda p, x: x / p, Y),
    "single precision": (Flat(), forgotten, Y.float()),
}


@pytest.mark.calibration
@pytest.mark.parametrize("name", PROPER)
def test_proper_posteriors_are_called_so(name):
    report = propriety_check(made(*PROPER[name]), num_directions=8)
    assert report.proper, repr(report)
    report.raise_if_improper()
    assert repr(report).startswith("seems proper")


@pytest.mark.calibration
@pytest.mark.parametrize("name", IMPROPER)
def test_improper_posteriors_are_found(name):
    report = propriety_check(made(*IMPROPER[name]), num_directions=8)
    assert not report.proper
    with pytest.raises(ImproperPosteriorError, match="direction"):
        report.raise_if_improper()


def test_slopes_are_exact_for_power_tails():
    # The density falls as r ** (-2 w), and mass per decade as r ** (1 - 2 w).
    for weight in (0.3, 0.4, 0.6, 2.0):
        report = propriety_check(made(Flat(), heavy, Y[:1], weight), num_directions=1)
        assert report.worst.slope == pytest.approx(1 - 2 * weight, abs=1e-6)


@pytest.mark.parametrize("name", ["collinear", "collinear, absolute"])
def test_the_offending_direction_is_named(name):
    report = propriety_check(made(*IMPROPER[name]), num_directions=8)
    found = X.new_tensor([report.worst.direction[f"theta[{i}]"] for i in range(3)])
    assert float(found @ NULL) ** 2 == pytest.approx(1.0, abs=1e-12)
    assert report.worst.slope == pytest.approx(1.0, abs=1e-3)  # one dimension without end
    assert "theta[1]" in repr(report)


def test_a_separating_direction_is_named():
    report = propriety_check(made(*IMPROPER["separable"]), num_directions=1)
    found = X.new_tensor([report.worst.direction[f"theta[{i}]"] for i in range(3)])
    assert bool((SEPARATED * (X @ found) > 0).all())


def test_the_report_speaks_of_the_users_sites():
    report = propriety_check(made(*IMPROPER["scale that the loss ignores"]), num_directions=8)
    assert report.worst.direction["scale"] == pytest.approx(1.0)
    assert float(report.worst.toward["scale"]) > 1e30
    assert "scale +1" in repr(report) and "mean to" in repr(report)


class RewardsLosses(GibbsPosterior):
    """The sign of the loss dropped."""

    def log_density(self, u, beta=1.0):
        log_prior, log_likelihood = self.evaluate(u)
        return log_prior - beta * log_likelihood


def test_a_dropped_sign_is_found():
    assert not propriety_check(RewardsLosses(Flat(), losses.HalfSquared(), Y, compile=False)).proper


def test_reports_are_reproducible():
    first, second = (propriety_check(made(*PROPER["regression"]), seed=3) for _ in range(2))
    assert [ray.slope for ray in first.rays] == [ray.slope for ray in second.rays]


def test_bad_settings():
    for number in (-1, 0):
        with pytest.raises(SettingsError, match="num_directions"):
            propriety_check(made(*PROPER["squared"]), num_directions=number)


def normal_law(p):
    return dist.Normal(p[0], p[1])


def with_scale(law):
    zero = torch.zeros((), dtype=torch.float64)
    return lambda: (pyro.sample("mean", dist.Normal(zero, 5.0)), pyro.sample("scale", law(zero)))


HALF_NORMAL = with_scale(lambda zero: dist.HalfNormal(zero + 5.0))
INVERSE_GAMMA = with_scale(lambda zero: dist.InverseGamma(zero + 2.0, zero + 1.0))
TWELVE = X.flatten()[:12]


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("prior", "loss", "data", "proper"),
    [
        (HALF_NORMAL, losses.GammaDivergence(0.5, normal_law), TWELVE, False),
        (INVERSE_GAMMA, losses.GammaDivergence(0.5, normal_law), TWELVE, True),
        # Its pole at one value needs fewer than 11.54 data.
        (HALF_NORMAL, losses.BetaDivergence(0.1, normal_law), TWELVE, True),
        (HALF_NORMAL, losses.BetaDivergence(0.1, normal_law), TWELVE[:11], False),
        (HALF_NORMAL, losses.BetaDivergence(0.1, normal_law), TWELVE.round(), False),
        # Poles of the ordinary likelihood, of one datum and three tied ones: only the second has no integral.
        (HALF_NORMAL, losses.NegativeLogLikelihood(normal_law), Y[:1], True),
        (HALF_NORMAL, losses.NegativeLogLikelihood(normal_law), Y[[0, 0, 0]], False),
    ],
)
def test_poles_at_data(prior, loss, data, proper):
    report = propriety_check(made(prior, loss, data), num_directions=1)
    assert report.proper == proper, repr(report)
    if not proper:
        assert report.worst.direction == {"mean": 0.0, "scale": -1.0}
        assert bool((report.worst.toward["mean"] == data).any()) and report.worst.toward["scale"] < 1e-100
        assert "one that vanishes there" in repr(report)


def test_poles_in_two_dimensions():
    zero = torch.zeros(2, dtype=torch.float64)

    def prior():
        return pyro.sample("mean", dist.Normal(zero, 5.0).to_event(1)), pyro.sample("scale", dist.HalfNormal(5.0))

    loss = losses.GammaDivergence(0.5, lambda p: dist.Normal(p[0], p[1]).to_event(1))
    assert not propriety_check(made(prior, loss, X[:8, :2]), num_directions=1).proper
