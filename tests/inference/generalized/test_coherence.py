"""Reports on coherence."""

import itertools

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import DataError, SettingsError
from bayeskit.inference.generalized import DeepSets, GibbsPosterior, Pooling, losses
from bayeskit.inference.generalized._checks import coherence_check

X = torch.tensor([1.0, 2.0, 10.0, -3.0, 0.5], dtype=torch.float64)


def posterior(pooling="sum", data=X, loss=None):
    return GibbsPosterior(dist.Normal(0.0, 5.0), loss or losses.Absolute(), data, 0.8, pooling, compile=False)


class Spread(losses.Loss):
    """Looks at all data at once."""

    def total(self, parameter, data, weights=None):
        return (data - data.mean()).square().sum() * parameter.square()


def after_another(m, x):
    """Depends on the order of the data."""
    return (x - m).abs() + (x - x.roll(1)).abs() * m.abs()


def test_sums_are_coherent():
    report = coherence_check(posterior())
    assert report.coherent and report.discrepancy <= report.tolerance < 1e-11
    assert len(report.splits) == 5 and all(sum(sizes) == 5 and len(sizes) > 1 for sizes in report.splits)
    assert repr(report).startswith("coherent: Absolute pooled by Sum")


class Doubled(Pooling):
    """A sum that counts the first datum twice."""

    def __call__(self, each):
        return each.sum() + each[0]


@pytest.mark.calibration
@pytest.mark.parametrize(
    "made",
    [
        {"pooling": "mean"},
        {"pooling": "max"},
        {"pooling": DeepSets(torch.square, torch.sqrt)},
        {"pooling": Doubled()},
        {"loss": Spread()},
        {"loss": after_another},
    ],
)
def test_all_else_is_not(made):
    report = coherence_check(posterior(**made))
    assert not report.coherent and report.discrepancy > 0.1
    assert repr(report).startswith("not coherent")


def test_an_outer_function_that_is_the_identity_is_coherent():
    assert coherence_check(posterior(DeepSets(lambda e: e.square() + e, lambda s: s))).coherent


def test_the_discrepancy_is_that_of_log_density_ratios():
    three = posterior("max", X[:3])
    report = coherence_check(three, splits=[(1, 2), (1, 1, 1)], seed=4)
    u = three.prior.start(16, 4)
    each = (X[:3] - u).abs()
    by_parts = [each[:, 0] + each[:, 1:].amax(-1), each.sum(-1)]
    differences = [0.8 * (each.amax(-1) - together) for together in by_parts]
    wanted = [max(float(abs(a - b)) for a, b in itertools.combinations(d, 2)) for d in differences]
    assert report.discrepancies == pytest.approx(wanted, abs=1e-12)
    assert report.splits == ((1, 2), (1, 1, 1)) and report.discrepancy == max(report.discrepancies)


def test_large_losses_are_not_mistaken_for_incoherence():
    assert coherence_check(posterior(data=X * 1e12)).coherent
    many = torch.linspace(-3, 3, 2000, dtype=torch.float64)
    assert coherence_check(posterior(data=many), splits=2).coherent


def test_reports_are_reproducible():
    assert coherence_check(posterior("max"), seed=3) == coherence_check(posterior("max"), seed=3)


@pytest.mark.parametrize("splits", [[(1, 2)], [(5,)], [(0, 5)], [], 0, 2.5])
def test_divisions_that_are_none(splits):
    with pytest.raises(SettingsError):
        coherence_check(posterior(), splits=splits)


def test_one_datum_cannot_be_divided():
    with pytest.raises(DataError, match="one datum"):
        coherence_check(posterior(data=X[:1]))
