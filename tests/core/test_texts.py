import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from bayeskit._core.texts import number_and_error, short_repr, with_error


def numbers(count=3000):
    """Yield values and errors over many orders of magnitude, with those that round up to another power of ten."""
    generator = np.random.default_rng(0)
    sizes, errors = 10 ** generator.uniform(-6, 7, count), 10 ** generator.uniform(-9, 5, count)
    yield from zip((sizes * generator.choice([-1, 1], count)).tolist(), errors.tolist(), strict=True)
    yield from [(-94.083, 0.0996), (3.0, 0.00995), (0.0, 0.2), (5.0, 9.96), (-6468.9, 99.7), (1e-9, 5e-5), (2.5, 1.0)]


def law(shown, value, error):
    """Tell whether a number is right to half a unit of the second digit of its error, or of the eighth decimal."""
    unit = max(10.0 ** (int(f"{error:.1e}".partition("e")[2]) - 1), 1e-8)
    return abs(float(shown) - value) <= 0.5 * unit * (1 + 1e-9) + 8e-15 * abs(value)


def test_numbers_are_shown_to_two_digits_of_their_errors():
    for value, error in numbers():
        shown, spread = number_and_error(value, error)
        assert law(shown, value, error), (value, error, shown)
        assert law(spread, error, error) and float(spread) > 0, (value, error, spread)
        if 1 <= error < 1e5:
            assert float(shown) == round(value, 1 if error < 9.95 else 0), "more digits than the error leaves"
    assert not all(law(f"{value:.4f}", value, error) for value, error in numbers()), "the law says nothing"


@pytest.mark.parametrize(
    ("value", "error", "shown"),
    [
        (-7.65190123, 3.1e-6, "-7.6519012 +- 3.1e-06"),
        (-94.083, 0.0996, "-94.08 +- 0.10"),
        (2.84e-20, 2.8e-23, "2.8e-20 +- 2.8e-23"),
        (-0.0001, 0.5, "0.00 +- 0.50"),
        (-2.5, math.nan, "-2.5000"),
        (1e-7, math.nan, "1e-07"),
        (0.0, 0.0, "0"),
        (-2.5, 0.0, "-2.5000 +- 0"),
        (-2.5, math.inf, "-2.5000 +- inf"),
        (math.nan, 0.1, "nan"),
        (-math.inf, math.nan, "-inf"),
        (1.5e20, 2e3, "1.5e+20 +- 2000"),
        (1.0, 1e-30, "1.00000000 +- 1.0e-30"),
    ],
)
def test_numbers_at_the_edges(value, error, shown):
    assert with_error(value, error) == shown
    assert with_error(value, error, "±") == shown.replace("+-", "±")


@dataclass
class Result:
    """A result with all kinds of fields."""

    value: float
    draws: torch.Tensor
    zero: torch.Tensor
    array: np.ndarray
    by_name: dict
    several: tuple
    function: object
    hidden: str = field(default="secret", repr=False)
    text: str = "a" * 100

    __repr__ = short_repr


def test_a_short_text_has_no_contents_of_tensors():
    long = dict.fromkeys("abcdefg")
    one = Result(1 / 3, torch.zeros(4, 1000), torch.tensor(2.5), np.zeros((2, 3)), long, (torch.ones(3), 1, None), law)
    assert repr(one) == (
        "Result(value=0.333333, draws=Tensor(4, 1000), zero=2.5, array=ndarray(2, 3), by_name={a, b, c, d, e, ...}, "
        f"several=(Tensor(3,), 1, None), function=law, text='{'a' * 56}...)"
    )
    assert "several=50 items" in repr(Result(0.0, None, None, None, {}, tuple(range(50)), None))
