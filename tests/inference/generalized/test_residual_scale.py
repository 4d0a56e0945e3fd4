"""The scale on which kinks are smoothed, for losses that wrap others and for outcomes that are mostly the same."""

from dataclasses import dataclass

import pyro.distributions as dist
import pytest
import torch

from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized._minimizer import information_matrices, minimize, residual_spread

_generator = torch.Generator().manual_seed(0)
X = torch.randn(40, 2, generator=_generator, dtype=torch.float64)
LABELS = torch.sign(X @ X.new_tensor([1.0, -0.5]) + torch.randn(40, generator=_generator, dtype=torch.float64) + 0.8)
HINGE = losses.Hinge(losses.linear)
AT = torch.tensor([0.3, -0.2], dtype=torch.float64)


@dataclass(frozen=True)
class Wrapper(losses.PointwiseLoss):
    """A user's loss that hands everything on, but does not say what its residuals are."""

    inner: losses.Loss

    def pointwise(self, parameter, data):
        return self.inner.pointwise(parameter, data)

    def smoothed(self, width):
        return Wrapper(self.inner.smoothed(width))


class Frank(Wrapper):
    """And one that does."""

    def residuals(self, parameter, data):
        return self.inner.residuals(parameter, data)


class Careless(Wrapper):
    """The mutation: deviations from the median, which labels have none of."""

    def residuals(self, parameter, data):
        return data[-1] - data[-1].median()


def made(loss, labels=LABELS, prior=None):
    return GibbsPosterior(prior or Flat((2,)), loss, (X, labels), compile=False)


@pytest.mark.calibration
def test_a_wrapper_that_names_its_residuals_is_smoothed_as_what_it_wraps():
    plain, wrapped = made(HINGE), made(Frank(HINGE))
    assert torch.equal(residual_spread(wrapped, AT), residual_spread(plain, AT))
    for one, other in zip(minimize(wrapped), minimize(plain), strict=True):
        assert torch.equal(one, other)
    assert torch.equal(information_matrices(wrapped).mean_hessian, information_matrices(plain).mean_hessian)


def test_predictions_have_the_residuals_that_they_leave():
    residuals = (LABELS - X @ AT).abs()
    assert float(residual_spread(made(HINGE), AT)) == pytest.approx(float(residuals.median()), rel=1e-14)


def test_labels_have_the_scale_of_their_deviations_from_the_mean():
    share = float((LABELS > 0).double().mean())
    assert 0.5 < share < 1
    assert float(residual_spread(made(Wrapper(HINGE)), AT)) == pytest.approx(2 * (1 - share), rel=1e-12)
    # Truth values and whole numbers are labels, too.
    assert float(residual_spread(made(Wrapper(HINGE), LABELS.long()), AT)) == pytest.approx(2 * (1 - share), rel=1e-6)


def test_equal_outcomes_have_the_scale_of_their_size():
    prior = dist.Normal(torch.zeros(2), 1.0)
    assert float(residual_spread(made(Wrapper(HINGE), LABELS.abs(), prior), AT)) == 1.0


def test_a_wrapper_that_does_not_is_minimised_all_the_same():
    wrapped, plain = minimize(made(Wrapper(HINGE))), minimize(made(HINGE))
    assert bool(wrapped.converged)
    assert float(wrapped.value) == pytest.approx(float(plain.value), rel=1e-6)


def test_data_sets_in_one_batch_have_the_scale_that_each_has_alone():
    posterior = made(Wrapper(HINGE))
    several = torch.stack([LABELS, LABELS.abs(), -LABELS])
    batched = torch.func.vmap(lambda y: residual_spread(posterior, AT, (X, y)))(several)
    alone = torch.stack([residual_spread(posterior, AT, (X, y)) for y in several])
    assert torch.equal(batched, alone) and bool((alone > 0.1).all())


def test_mutation_deviations_from_the_median_of_labels_have_no_scale():
    assert float(residual_spread(made(Careless(HINGE)), AT)) < 1e-3
