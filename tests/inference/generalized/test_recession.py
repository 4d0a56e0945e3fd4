"""Flat priors that a loss does not make proper are refused where the posterior is made."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from bayeskit.errors import ImproperPosteriorError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized import _prior as recession
from bayeskit.inference.generalized._minimizer import minimize
from bayeskit.inference.generalized._posterior import DeepSets

Y = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
_generator = torch.Generator().manual_seed(0)
X = torch.randn(20, 3, generator=_generator, dtype=torch.float64)
OUTCOME = X @ X.new_tensor([1.0, -1.0, 2.0]) + torch.randn(20, generator=_generator, dtype=torch.float64)
LABELS = torch.sign(torch.randn(20, generator=_generator, dtype=torch.float64))
COLLINEAR = torch.cat([X[:, :2], X[:, :1] - 2 * X[:, 1:2]], 1)
NULL = X.new_tensor([1.0, -2.0, -1.0]) / 6**0.5
NEARLY = COLLINEAR + 1e-4 * X.flip(1)
LINEAR = losses.HalfSquared(losses.linear)


def sigmoid(coefficients, covariates):
    return torch.sigmoid(covariates @ coefficients)


def saturating(total):
    return total / (1 + total)


def shift_and_mean(shift):
    def model():
        return pyro.sample("shift", shift) + pyro.sample("mean", Flat())

    return model


def made(prior, loss, data, pooling="sum"):
    return GibbsPosterior(prior, loss, data, pooling=pooling, compile=False)


IMPROPER = {
    "bounded predictor": (Flat((3,)), losses.HalfSquared(sigmoid), (X, OUTCOME)),
    "bounded pooling": (Flat(), losses.HalfSquared(), Y, DeepSets(torch.square, saturating)),
    "losses bounded one by one": (Flat(), losses.HalfSquared(), Y, DeepSets(torch.tanh, lambda x: x)),
    "bounded predictor on half a line": (
        Flat((), constraints.positive),
        losses.HalfSquared(lambda s, x: torch.tanh(s * x)),
        (Y, Y),
    ),
    "collinear": (Flat((3,)), LINEAR, (COLLINEAR, OUTCOME)),
    "collinear, absolute": (Flat((3,)), losses.Absolute(losses.linear), (COLLINEAR, OUTCOME)),
    "collinear, logistic": (Flat((3,)), losses.Logistic(losses.linear), (COLLINEAR, LABELS)),
    "collinear, other units": (Flat((3,)), LINEAR, (COLLINEAR * X.new_tensor([1.0, 1e6, 1e-6]), OUTCOME)),
    "collinear, large outcomes": (Flat((3,)), losses.Absolute(losses.linear), (COLLINEAR, OUTCOME * 1e9)),
    "collinear, single precision": (Flat((3,)), LINEAR, (COLLINEAR.float(), OUTCOME.float())),
    "without effect": (Flat((2,)), losses.HalfSquared(lambda b, x: x * b[0]), (Y, Y)),
    "too few data": (Flat((3,)), LINEAR, (X[:2], OUTCOME[:2])),
    "two flat shifts": (shift_and_mean(Flat()), losses.HalfSquared(), Y),
}
PROPER = {
    "absolute": (Flat(), losses.Absolute(), Y),
    "absolute, far from zero": (Flat((3,)), losses.Absolute(losses.linear), (X, OUTCOME + 1e9)),
    "regression": (Flat((3,)), LINEAR, (X, OUTCOME)),
    "regression in other units": (Flat((3,)), LINEAR, (X * X.new_tensor([1.0, 1e6, 1e-6]), OUTCOME * 1e9)),
    "nearly collinear": (Flat((3,)), LINEAR, (NEARLY, OUTCOME)),
    "nearly collinear, absolute": (Flat((3,)), losses.Absolute(losses.linear), (NEARLY, OUTCOME)),
    "as many data as coefficients": (Flat((3,)), LINEAR, (X[:3], OUTCOME[:3])),
    "logistic": (Flat((3,)), losses.Logistic(losses.linear), (X, LABELS)),
    "hinge": (Flat((3,)), losses.Hinge(losses.linear), (X, LABELS)),
    "single precision": (Flat((3,)), LINEAR, (X.float(), OUTCOME.float())),
    "half a line": (Flat((), constraints.positive), losses.HalfSquared(), Y),
    "root of squares": (Flat(), losses.HalfSquared(), Y, DeepSets(torch.square, torch.sqrt)),
    "worst datum": (Flat(), losses.Absolute(), Y, "max"),
    "one proper shift": (shift_and_mean(dist.Normal(0.0, 10.0)), losses.HalfSquared(), Y),
    "bounded, proper prior": (dist.Normal(torch.zeros(3), 1e6), losses.HalfSquared(sigmoid), (X, OUTCOME)),
    "collinear, proper prior": (dist.Normal(torch.zeros(3), 1e6), LINEAR, (COLLINEAR, OUTCOME)),
}


@pytest.mark.parametrize("name", IMPROPER)
def test_what_has_no_integral_is_refused(name):
    with pytest.raises(ImproperPosteriorError, match="does not grow in the direction .*take a proper prior"):
        made(*IMPROPER[name])


@pytest.mark.parametrize("name", PROPER)
def test_what_has_an_integral_is_not(name):
    assert made(*PROPER[name]).dim in (1, 2, 3)


def test_risk_sets_of_the_cox_model():
    # Survival times in no order of the covariates; and in the very order of one, which then has no bound.
    time, event = torch.rand(20, generator=torch.Generator().manual_seed(1), dtype=torch.float64), torch.ones(20)
    event = event.double()
    assert made(Flat((3,)), losses.CoxPartialLikelihood(), (X, time, event)).dim == 3
    with pytest.raises(ImproperPosteriorError, match="theta"):
        made(Flat((3,)), losses.CoxPartialLikelihood(), (COLLINEAR, time, event))
    with pytest.raises(ImproperPosteriorError, match=r"theta\[0\] \+1"):
        made(Flat((1,)), losses.CoxPartialLikelihood(), (-time[:, None], time, event))


def test_the_combination_is_named():
    posterior = made(dist.Normal(torch.zeros(3), 1.0), LINEAR, (COLLINEAR, OUTCOME))
    prior = made(Flat((3,)), LINEAR, (X, OUTCOME)).prior
    found = recession.direction_of_recession(posterior._joint_of_batch, prior, 1.0, 0)
    assert float(found @ NULL) ** 2 == pytest.approx(1.0, abs=1e-12)


def test_other_data_are_looked_at_again():
    posterior = made(Flat((3,)), LINEAR, (X, OUTCOME))
    with pytest.raises(ImproperPosteriorError):
        posterior.with_data((COLLINEAR, OUTCOME))


@pytest.mark.parametrize(
    ("search", "name"),
    [("bounded_ray", "bounded predictor"), ("bounded_ray", "bounded pooling"), ("without_effect", "collinear")],
)
def test_mutation_neither_search_finds_what_the_other_does(monkeypatch, search, name):
    monkeypatch.setattr(recession._Search, search, lambda self: None)
    assert made(*IMPROPER[name]).dim in (1, 3)


def test_mutation_what_is_far_depends_on_the_data():
    # Before a location passes data that are further still, absolute errors fall in its direction.
    def searched(largest):
        posterior = made(Flat(), losses.Absolute(), Y * 1e30)
        return recession.direction_of_recession(posterior._joint_of_batch, posterior.prior, largest, 0)

    assert searched(4e30) is None
    assert searched(1.0).item() == 1


def test_several_flat_sites_of_one_number():
    """A regression with a site for each coefficient: nothing is without effect, and the posterior is the usual one."""

    def model():
        return pyro.sample("intercept", Flat()), pyro.sample("slope", Flat())

    def line(parameter, covariates):
        return parameter[0] + parameter[1] * covariates

    posterior = made(model, losses.HalfSquared(line), (X[:, 0], OUTCOME))
    design = torch.stack([torch.ones(20, dtype=torch.float64), X[:, 0]], 1)
    found = minimize(posterior).position
    torch.testing.assert_close(found, torch.linalg.lstsq(design, OUTCOME).solution, rtol=0, atol=1e-9)
    with pytest.raises(ImproperPosteriorError):
        made(model, losses.HalfSquared(line), (torch.ones_like(OUTCOME), OUTCOME))
