"""Models of other data are not compared; those of transformed data are, if the Jacobian stands beside them."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._logdensity.observations import check_same_data
from bayeskit.errors import DataError

Y = torch.tensor([0.3, 1.7, 0.8, 2.5, 0.4, 1.1], dtype=torch.float64)


def target(y, jacobian=None, name="y"):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample(name, dist.Normal(mean, 1.0), obs=y)
        if jacobian is not None:
            pyro.factor("jacobian", torch.as_tensor(jacobian, dtype=torch.float64))

    return bk.Target.from_pyro(model, y)


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("transformed", "derivative"),
    [
        (Y.log(), 1 / Y),
        (Y.sqrt(), 0.5 / Y.sqrt()),
        (1 / Y, 1 / Y.square()),
        (Y.exp(), Y.exp()),
        (Y.square(), 2 * Y),
        ((Y - Y.mean()) / Y.std(), torch.full_like(Y, 1 / float(Y.std()))),
        (3 - 2 * Y.log1p(), 2 / (1 + Y)),
        (torch.sigmoid(Y), torch.sigmoid(Y) * torch.sigmoid(-Y)),
    ],
    ids=["log", "sqrt", "reciprocal", "exp", "square", "standardised", "log1p", "sigmoid"],
)
def test_a_transformation_with_its_jacobian_is_the_same_data(transformed, derivative):
    jacobian = float(derivative.log().sum())
    check_same_data({"raw": target(Y), "new": target(transformed.flip(0), jacobian, "other_name")})
    check_same_data({"new": target(transformed, jacobian + 2.0), "raw": target(Y, 2.0)})
    for wrong in (-jacobian, jacobian + 0.1):
        with pytest.raises(
            DataError, match="'raw' and 'new' have different data, and their constant factors differ by"
        ):
            check_same_data({"raw": target(Y), "new": target(transformed, wrong)})
    with pytest.raises(DataError, match="different data: value .* add the log Jacobian"):
        check_same_data({"raw": target(Y), "new": target(transformed)})


def test_a_constant_factor_is_no_licence_for_other_data():
    with pytest.raises(DataError, match="differ by -1, which is not the log Jacobian of a usual transformation;"):
        check_same_data({"a": target(Y.log()), "b": target(7 * Y + torch.arange(6), 1.0)})
    with pytest.raises(DataError, match="6 and 5 observed values"):
        check_same_data({"a": target(Y), "b": target(Y[1:], 1.0)})


def test_one_of_two_outcomes_may_be_transformed():
    def model(y, z, jacobian):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
            pyro.sample("z", dist.Normal(mean, 1.0), obs=z)
        pyro.factor("jacobian", torch.tensor(jacobian, dtype=torch.float64))

    other = torch.linspace(-1.0, 1.0, 6, dtype=torch.float64)
    jacobian = -float(Y.log().sum())
    assert math.isfinite(jacobian)
    check_same_data(
        {"a": bk.Target.from_pyro(model, Y, other, 0.0), "b": bk.Target.from_pyro(model, Y.log(), other, jacobian)}
    )


def test_models_of_other_data_have_no_probabilities():
    with pytest.raises(DataError, match="'a' and 'b' have different data: 6 and 5 observed values"):
        bk.compare_models({"a": target(Y), "b": target(Y[1:])}, progress=False)
