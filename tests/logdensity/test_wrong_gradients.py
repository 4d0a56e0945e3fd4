"""A model whose gradient is not the derivative of its log density is named, and no other."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit.errors import AccuracyWarning

Y = [0.3, 1.2, -0.4]


def model(value_of, dtype):
    y = torch.tensor(Y, dtype=dtype)

    def run():
        mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
        spread = pyro.sample("spread", dist.HalfNormal(y.new_tensor(1.0)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, value_of(spread)), obs=y)

    return run


@pytest.mark.calibration
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.filterwarnings("ignore::bayeskit.errors.SlowModelWarning")
@pytest.mark.parametrize("value_of", [torch.Tensor.detach, torch.Tensor.item], ids=["detach", "item"])
def test_a_value_that_is_taken_out_of_differentiation_is_named(value_of, dtype):
    for seed in range(20):
        with pytest.warns(AccuracyWarning, match="with respect to 'spread' is not the derivative"):
            bk.Target.from_pyro(model(value_of, dtype), seed=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value_of", [lambda x: x, lambda x: x + 0.3 * (x > 50), lambda x: 1e4 * x + x**8])
def test_no_other_model_is(value_of, dtype):
    """Steps that are not on the way, and values that rounding or bends leave unsure."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(3):
            bk.Target.from_pyro(model(value_of, dtype), seed=seed)
    assert [w for w in said if w.category is AccuracyWarning] == []


class Own(dist.Beta):
    """A density that sees rounded values, as any but the known ones."""

    def log_prob(self, value):
        return super().log_prob(value) + 0.0


def test_values_that_are_rounded_to_an_end_are_no_wrong_gradient():
    def rounded():
        p = pyro.sample("p", Own(*torch.full((2,), 0.01, dtype=torch.float64)))
        pyro.sample("y", dist.Normal(p, 1.0), obs=torch.tensor(0.3, dtype=torch.float64))

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(20):
            bk.Target.from_pyro(rounded, seed=seed)
    assert [w for w in said if w.category is AccuracyWarning] == []


def test_no_generated_problem_is():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for seed in range(20):
            problem = exact.generate(seed)
            bk.Target.from_pyro(problem.model(), *problem.args(), seed=seed)
    assert [w for w in said if w.category is AccuracyWarning] == []
