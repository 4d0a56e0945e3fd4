"""Bennett's equation: the root by other means, exact ratios, and densities that do not overlap."""

import math
import warnings

import pytest
import torch
from scipy.optimize import brentq
from torch.distributions import Normal

from bayeskit._core.randomness import new_generator
from bayeskit.inference._ratio import bidirectional_ratio
from bayeskit.models.unnormalised import noise_contrastive_constant

DOUBLE = torch.float64
LOG_RATIO = 7.0


def draws(shift, num_numerator=2000, num_denominator=3000):
    """Return log ratios at draws of ``exp(7) N(shift, 1)`` and of ``N(0, 1)``."""
    generator = new_generator(0, stream=f"ratio {shift}")
    x = shift + torch.randn(num_numerator, generator=generator, dtype=DOUBLE)
    y = torch.randn(num_denominator, generator=generator, dtype=DOUBLE)
    return tuple(LOG_RATIO + Normal(shift, 1.0).log_prob(z) - Normal(0.0, 1.0).log_prob(z) for z in (x, y))


@pytest.mark.parametrize("effective", [2000.0, 137.3])
@pytest.mark.parametrize("shift", [0.0, 0.5, 2.0, 8.0])
def test_it_is_the_root_of_the_equation(shift, effective):
    a, b = draws(shift)
    found = bidirectional_ratio(a, b, effective)
    odds = effective / len(b)

    def excess(c):
        one = 1 / (1 + odds * (a - c).exp())
        other = odds * (b - c).exp() / (1 + odds * (b - c).exp())
        return effective * float(one.mean()) - len(b) * float(other.mean())

    assert float(found.log_ratio) == pytest.approx(brentq(excess, -100, 200, xtol=1e-13, rtol=1e-14), abs=1e-9)


def test_the_ratio_and_its_error_are_right(limit):
    a, b = draws(1.5)
    c, one, other, _ = bidirectional_ratio(a, b)
    error = sum(float(h.var() / h.mean().square()) / len(h) for h in (one, other)) ** 0.5
    assert abs(float(c) - LOG_RATIO) < limit(1) * error < 0.3


def test_rows_are_apart():
    pairs = [draws(shift, 400, 400) for shift in (0.3, 1.0, 4.0)]
    together = bidirectional_ratio(*(torch.stack(column) for column in zip(*pairs, strict=True)))
    for row, pair in enumerate(pairs):
        alone = bidirectional_ratio(*pair)
        for one, all_ in zip(alone, together, strict=True):
            torch.testing.assert_close(all_[row], one, rtol=1e-12, atol=1e-12)


def test_densities_exchanged_give_the_negative():
    a, b = draws(1.0)
    there, back = bidirectional_ratio(a, b), bidirectional_ratio(-b, -a)
    assert float(there.log_ratio) == pytest.approx(-float(back.log_ratio), abs=1e-12)
    torch.testing.assert_close(there.of_numerator, back.of_denominator)


def test_draws_without_density_and_no_overlap():
    a, b = draws(1.0)
    gone = b.masked_fill(b < b.median(), -math.inf)
    assert bidirectional_ratio(a, gone).log_ratio < bidirectional_ratio(a, b).log_ratio
    assert bidirectional_ratio(a, torch.full_like(b, -math.inf)).log_ratio == -math.inf
    assert bidirectional_ratio(torch.full_like(a, math.inf), b).log_ratio == math.inf


@pytest.mark.parametrize("apart", [50.0, 250.0, 1e4])
def test_densities_that_hardly_overlap_are_told_apart(apart):
    """The terms are as even as can be, and the root is found, but the overlap tells that it says nothing."""
    noise = torch.linspace(-0.1, 0.1, 1000, dtype=DOUBLE)
    found = bidirectional_ratio(apart + noise, -apart + noise)
    assert float(found.log_ratio) == pytest.approx(0.0, abs=1e-9) and float(found.overlap) < 1e-15
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        z = noise_contrastive_constant(apart + noise, -apart + noise)
    assert not z.trusted and "only 0 effective" in z.warnings[0]


def test_equal_densities_overlap_wholly():
    same = torch.full((100,), 3.0, dtype=DOUBLE)
    for effective in (None, 10.0):
        assert float(bidirectional_ratio(same, same[:40], effective).overlap) == pytest.approx(1.0)
