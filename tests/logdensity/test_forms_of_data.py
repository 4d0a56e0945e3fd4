"""The form of data does not change a density: precision, whole numbers, columns, gaps, empty plates."""

import math
import warnings
from collections import OrderedDict, namedtuple
from contextlib import nullcontext
from dataclasses import make_dataclass
from types import SimpleNamespace

import numpy as np
import pandas as pd
import polars as pl
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import DataError, DataWarning, ModelError, PrecisionWarning

F64 = torch.float64
WIDTHS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.float32, F64]
COINS = torch.tensor([1, 0, 1, 1, 0, 1])


def _distributions(rate, share):
    """Return distributions of which zeros and ones are data."""
    two, cut = torch.stack([share, 1 - share], -1), torch.tensor([0.0])
    return {
        "asymmetric_laplace": dist.AsymmetricLaplace(rate, 0.7, 1.3),
        "bernoulli": dist.Bernoulli(share),
        "logits": dist.Bernoulli(logits=rate),
        "beta_binomial": dist.BetaBinomial(rate, 2.0, 3),
        "binomial": dist.Binomial(4, share),
        "categorical": dist.Categorical(two),
        "cauchy": dist.Cauchy(rate, 0.7),
        "exponential": dist.Exponential(rate),
        "gamma_poisson": dist.GammaPoisson(rate, 0.7),
        "geometric": dist.Geometric(share),
        "gumbel": dist.Gumbel(rate, 0.7),
        "half_cauchy": dist.HalfCauchy(rate),
        "half_normal": dist.HalfNormal(rate),
        "laplace": dist.Laplace(rate, 0.7),
        "logistic": dist.Logistic(rate, 0.7),
        "negative_binomial": dist.NegativeBinomial(rate, 0.3),
        "mixture": dist.MixtureSameFamily(dist.Categorical(two), dist.Normal(torch.stack([rate, -rate], -1), 0.7)),
        "normal": dist.Normal(rate, 0.7),
        "ordered_logistic": dist.OrderedLogistic(rate, cut),
        "poisson": dist.Poisson(rate),
        "soft_laplace": dist.SoftLaplace(rate, 0.7),
        "student": dist.StudentT(3.0, rate, 0.7),
        "uniform": dist.Uniform(-1.0, 2.0 + rate),
        "von_mises": dist.VonMises(share, rate),
        "zero_inflated_poisson": dist.ZeroInflatedPoisson(rate, gate=share),
        "zero_inflated_binomial": dist.ZeroInflatedNegativeBinomial(rate, probs=share, gate=0.2 * share),
    }


def _positive(rate):
    """Return distributions of which ones and twos are data."""
    return {
        "chi_squared": dist.Chi2(rate),
        "gamma": dist.Gamma(rate, 0.7),
        "inverse_gamma": dist.InverseGamma(rate, 0.7),
        "log_normal": dist.LogNormal(rate, 0.7),
        "pareto": dist.Pareto(0.5, rate),
        "snedecor": dist.FisherSnedecor(rate, 2.0),
        "weibull": dist.Weibull(rate, 1.3),
    }


VECTORS = {
    "multivariate_normal": lambda share: dist.MultivariateNormal(share.unsqueeze(-1).expand(2), torch.eye(2) + 0.3),
    "multivariate_student": lambda share: dist.MultivariateStudentT(3.0, share.unsqueeze(-1).expand(2), torch.eye(2)),
    "one_hot": lambda share: dist.OneHotCategorical(torch.stack([share, 1 - share], -1)),
    "multinomial": lambda share: dist.Multinomial(1, torch.stack([share, 1 - share], -1)),
    "dirichlet_multinomial": lambda share: dist.DirichletMultinomial(torch.stack([share, 2 * share], -1), 1),
}


FEW = ("binomial", "categorical", "ordered_logistic", "poisson")  # of a graph that is soon compiled


ALL = [*_distributions(torch.ones(()), torch.tensor(0.5)), *_positive(torch.ones(())), *VECTORS]


def _made(name, rate, share):
    if name in VECTORS:
        return VECTORS[name](share)
    return (_distributions(rate, share) | _positive(rate))[name]


def _data_of(name, x):
    if name in VECTORS:
        return torch.stack([x, 1 - x.long()], -1)
    return x + 1 if name in _positive(torch.ones(())) else x


def everything(x, names):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    share = pyro.sample("share", dist.Beta(2.0, 2.0))
    with pyro.plate("rows", len(x)):
        for name in names:
            pyro.sample(name, _made(name, rate, share), obs=_data_of(name, x))
    pyro.factor("arithmetic", (x * rate).sum() + (x / 3 + share).log().sum() + torch.lgamma(x + 2.0).sum())


def _by_pyro(x, names, u):
    """Return the log density of each vector by Pyro's own distributions, in double precision."""
    values = bk.Target.from_pyro(everything, x, names).constrain(u)
    total = []
    for rate, share in zip(values["rate"], values["share"], strict=True):
        parts = [dist.Gamma(2.0, 1.0).log_prob(rate) + rate.log(), dist.Beta(2.0, 2.0).log_prob(share)]
        parts += [(share * (1 - share)).log()]
        for name in names:
            parts += [_made(name, rate, share).log_prob(_data_of(name, x).to(x.dtype)).sum()]
        parts += [(x * rate).sum() + (x / 3 + share).log().sum() + torch.lgamma(x + 2.0).sum()]
        total.append(sum(parts))
    return torch.stack(total)


@pytest.fixture(autouse=True)
def _default_dtype(request):
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.long
@pytest.mark.parametrize(
    ("compile", "default", "names", "widths"),
    [
        (False, F64, ALL, (torch.int64, torch.bool, torch.float32, F64)),  # narrower ones become 64 bits wide
        (False, torch.float32, FEW, WIDTHS),
        pytest.param(True, torch.float32, FEW, WIDTHS, marks=pytest.mark.compiler),
    ],
    ids=["all", "few", "compiled"],
)
def test_every_width_of_number_gives_the_same_density(compile, default, names, widths):
    u = torch.randn(3, 2, dtype=F64, generator=torch.Generator().manual_seed(1))
    torch.set_default_dtype(F64)
    expected = _by_pyro(COINS.to(F64), names, u)
    torch.set_default_dtype(default)
    for width in widths:
        target = bk.Target.from_pyro(everything, COINS.to(width), names, compile=compile)
        torch.set_default_dtype(F64 if default == torch.float32 else torch.float32)  # between the calls
        found = u.to(target.dtype)
        near = 1e-9 if target.dtype == F64 else 2e-5
        for value in (target.log_density(found), target.value_and_grad(found)[0]):
            torch.testing.assert_close(value.to(F64), expected, rtol=near, atol=near)
        many = found.repeat(500, 1)  # in chunks
        torch.testing.assert_close(target.value_and_grad(many)[0].to(F64), expected.repeat(500), rtol=near, atol=near)
        pointwise = sum(x.reshape(len(x), -1).sum(1) for x in target.pointwise_log_likelihood(found).values())
        torch.testing.assert_close(pointwise, target.log_likelihood(found), rtol=near, atol=near)
        assert target.dtype == (torch.float32 if width == torch.float32 else F64)
        torch.set_default_dtype(default)


def counts(y, hours):
    rate = pyro.sample("rate", dist.Gamma(3.0, 1e-4))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Poisson(rate * hours), obs=y)


def test_whole_numbers_alone_do_not_make_a_model_single():
    y = torch.tensor([50_123, 49_870], dtype=torch.int32)
    target = bk.Target.from_pyro(counts, y, 2)
    u = torch.tensor([[10.1]], dtype=F64)
    assert target.dtype == F64
    rate = u.exp()
    expected = (y.double() * (2 * rate).log() - 2 * rate - torch.lgamma(y.double() + 1)).sum()
    assert float(target.log_likelihood(u)) == pytest.approx(float(expected), rel=1e-13)
    assert float(target.value_and_grad(u)[0] - target.log_prior(u)) == pytest.approx(float(expected), rel=1e-13)


def test_single_precision_is_said_and_is_that_of_the_whole_model():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(PrecisionWarning, match="computed in single precision"):
            bk.Target.from_pyro(counts, torch.tensor([3, 4]), torch.ones(2, dtype=torch.float32))
        target = bk.Target.from_pyro(counts, torch.tensor([3, 4]), np.ones(2))
        mixed = bk.Target.from_pyro(counts, torch.tensor([3.0, 4.0], dtype=torch.float32), np.ones(2))
    u = torch.tensor([[1.0]], dtype=F64)
    assert torch.equal(target.log_density(u), mixed.log_density(u))


def line(x, y):
    intercept, slope = (pyro.sample(name, dist.Normal(0.0, 3.0)) for name in ("intercept", "slope"))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal(intercept + slope * x, 0.7), obs=y)


X, Y = torch.linspace(-1.0, 1.0, 6, dtype=F64), torch.linspace(0.0, 2.0, 6, dtype=F64) ** 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: bk.Target.from_pyro(line, X[:, None], Y), r"'y' has batch shape \(6, 6\), data of shape \(6,\).*sque"),
        (lambda: bk.Target.from_pyro(line, X, Y[:, None]), r"'y' has batch shape \(6,\), data of shape \(6, 1\).*sque"),
        (lambda: bk.sample(line, X[:, None], Y[:, None], progress=False), "'y' has batch shape .*'rows' of size 6"),
        (lambda: bk.prior_predictive(line, X[:, None], Y), "outside every plate"),
        (lambda: bk.amortize(line, (X[:, None], Y), sizes=(1, 6), num_steps=1, progress=False), "outside every plate"),
        (lambda: bk.information(line, X[:, None], Y, of="slope", about="y"), "outside every plate"),
        (lambda: bk.Target.from_pyro(_coefficients, X, Y), r"'b' has batch shape \(2, 1\), and is inside no plate"),
        (lambda: bk.Target.from_pyro(_masked, X, Y), r"'y' .*a mask of shape \(6, 1\)"),
        (lambda: bk.Target.from_pyro(_summed, X, Y), "'y' has batch shape .*outside every plate"),
        (lambda: bk.Target.from_pyro(_factor, X, Y), "'loss' .*sum the factor over it, or put the factor inside"),
        (lambda: bk.exact.enumerate_latents(_coins, Y[:, None].bool()), "outside every plate"),
        (lambda: bk.Target.from_pyro(_event, X[:, None], Y, 1), r"'y' has shape \(6, 1\), .*\(6,\).* 36 pairs .*sque"),
        (lambda: bk.Target.from_pyro(_event, X[:, None], Y, 2), r"'y' has shape \(6, 1\), .* 36 pairs of numbers"),
        (lambda: bk.Target.from_pyro(_short, X, Y), r"'y' has .*, a mask of shape \(5,\), which do not fit together"),
    ],
)
def test_a_dimension_outside_every_plate_is_refused_at_every_door(call, said):
    with pytest.raises(ModelError, match=said):
        call()


def _short(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)), pyro.poutine.mask(mask=x[1:] > -2):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def _event(x, y, events):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)) if events == 1 else nullcontext():
        pyro.sample("y", dist.Normal(slope * x, 1.0).to_event(events), obs=y)


def _coefficients(x, y):
    b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2, 1]))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Normal((torch.stack([x, x], -1) @ b).squeeze(-1), 1.0), obs=y)


def _masked(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)), pyro.poutine.mask(mask=(y > 0)[:, None]):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def _summed(x, y):
    shift = pyro.sample("shift", dist.Normal(0.0, 1.0))
    with pyro.plate("rows", len(y)):
        z = pyro.sample("z", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(shift + z + x[:, None], 1.0), obs=y)


def _factor(x, y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    pyro.factor("loss", -(y - mean).square())


def _coins(y):
    share = 0.2 + 0.6 * pyro.sample("fair", dist.Bernoulli(torch.tensor(0.5)))
    with pyro.plate("rows", len(y)):
        pyro.sample("y", dist.Bernoulli(share), obs=y.double())


def test_infinite_covariates_are_named_with_row_and_column():
    table = pd.DataFrame({"x": X.numpy(), "z": [0.0, 1.0, np.inf, 3.0, 4.0, 5.0]})

    def model(table, y):
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(table @ b, 1.0), obs=y)

    with pytest.raises(DataError, match="column 'z' of argument 'table' .* 1 infinite values, .* row 2"):
        bk.Target.from_pyro(model, table, Y)
    with pytest.raises(DataError, match="argument 'table' .* infinite values, the first in row 2 and column 1"):
        bk.Target.from_pyro(model, torch.tensor(table.to_numpy()), Y)

    def bounded(upper, y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.factor("y", dist.Normal(mean, 1.0).cdf(upper).log() + dist.Normal(mean, 1.0).log_prob(y))

    assert bk.Target.from_pyro(bounded, torch.full((6,), math.inf, dtype=F64), Y).dim == 1


GAPS = torch.tensor([[0.1, 0.2, 3.4], [0.5, 0.1, math.nan], [math.nan, 0.5, math.nan], [math.nan] * 3], dtype=F64)
COVARIANCE = torch.tensor([[1.0, 0.3, 0.1], [0.3, 2.0, 0.2], [0.1, 0.2, 1.5]], dtype=F64)


def test_multivariate_normal_data_with_gaps():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.NanMaskedMultivariateNormal(mean, COVARIANCE), obs=y)

    target = bk.Target.from_pyro(model, GAPS)
    u = torch.randn(4, 3, dtype=F64, generator=torch.Generator().manual_seed(2))
    wanted = torch.stack([dist.NanMaskedMultivariateNormal(mean, COVARIANCE).log_prob(GAPS).sum() for mean in u])
    assert not target.loops
    torch.testing.assert_close(target.log_likelihood(u), wanted)
    value, gradient = target.value_and_grad(u)
    torch.testing.assert_close(value, target.log_density(u))
    leaf = u.clone().requires_grad_(True)
    total = sum(dist.NanMaskedMultivariateNormal(mean, COVARIANCE).log_prob(GAPS).sum() for mean in leaf)
    torch.testing.assert_close(gradient, torch.autograd.grad(total, leaf)[0] - u)


def test_masked_arrays_are_data_with_gaps():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.NanMaskedNormal(mean, 1.0), obs=y)

    gaps = np.ma.array([1.0, 9.0, 0.3], mask=[False, True, False])
    u = torch.zeros(2, 1, dtype=F64)
    whole = bk.Target.from_pyro(model, torch.tensor([1.0, 0.3], dtype=F64))
    target = bk.Target.from_pyro(model, gaps)
    for found, expected in zip(target.value_and_grad(u), whole.value_and_grad(u), strict=True):
        torch.testing.assert_close(found, expected)

    def plain(y):
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(pyro.sample("mean", dist.Normal(0.0, 1.0).expand([1])), 1.0), obs=y)

    with pytest.raises(DataError, match="'y' holds 1 NaN, the first at index .* or give them a NanMaskedNormal"):
        bk.Target.from_pyro(plain, gaps)


def test_an_empty_plate_beside_data_is_no_error():
    def survival(times, censored):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("seen", len(times)):
            pyro.sample("times", dist.Exponential(rate), obs=times)
        with pyro.plate("censored", len(censored)):
            pyro.factor("survived", -rate * censored)

    u = torch.tensor([[0.3], [-0.2]], dtype=F64)
    none = bk.Target.from_pyro(survival, torch.tensor([1.0, 2.0], dtype=F64), torch.zeros(0, dtype=F64))
    zero = bk.Target.from_pyro(survival, torch.tensor([1.0, 2.0], dtype=F64), torch.zeros(1, dtype=F64))
    for found, expected in zip(none.value_and_grad(u), zero.value_and_grad(u), strict=True):
        torch.testing.assert_close(found, expected)


def _log_likelihood(model, *args):
    return float(bk.Target.from_pyro(model, *args).log_likelihood(torch.ones(1, 1, dtype=F64)))


@pytest.mark.parametrize("form", [lambda x: x, torch.Tensor.numpy, lambda x: pd.Series(x.numpy()), torch.Tensor.tolist])
@pytest.mark.parametrize(
    "container",
    [
        lambda x, y: {"x": x, "y": y},
        lambda x, y: OrderedDict(x=x, y=y),
        lambda x, y: SimpleNamespace(x=x, y=y),
        namedtuple("Rows", "x y"),
        make_dataclass("Fields", ["x", "y"]),
    ],
    ids=["dict", "ordered", "namespace", "tuple", "dataclass"],
)
def test_containers_of_every_kind_are_looked_into(container, form):
    def model(data):
        x, y = (data["x"], data["y"]) if isinstance(data, dict) else (data.x, data.y)
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", 6):
            pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    expected = float(dist.Normal(X, 1.0).log_prob(Y).sum())
    assert _log_likelihood(model, container(form(X), form(Y))) == pytest.approx(expected, rel=1e-12)


def test_an_iterator_is_refused():
    def model(rows):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        for place, (x, y) in enumerate(rows):
            pyro.sample(f"y{place}", dist.Normal(mean * x, 1.0), obs=y)

    with pytest.raises(DataError, match=r"argument 'rows' is an iterator \(zip\), which is used up after one run"):
        bk.Target.from_pyro(model, zip(X, Y, strict=True))


def test_tensors_of_single_precision_around_a_model_are_computed_in_double():
    years = torch.arange(1990.0, 2020.0)  # single precision: sums over rows would lose seven of their digits

    def model(y):
        slope = pyro.sample("slope", dist.Normal(0.0, 3.0))
        with pyro.plate("rows", 30):
            pyro.sample("y", dist.Normal(slope * x32, 1e-3), obs=y)
            pyro.factor("inner", 0 * (slope * years.float()).float())

    x32 = 1.7 * years
    y = torch.as_tensor(np.asarray(x32), dtype=F64) + 1e-3 * torch.linspace(-1, 1, 30, dtype=F64)
    expected = float(dist.Normal(x32.double(), torch.tensor(1e-3, dtype=F64)).log_prob(y).sum())
    assert _log_likelihood(model, y.numpy()) == pytest.approx(expected, rel=1e-9)


def test_new_rows_have_the_codes_of_the_categories_of_the_model():
    def model(table):
        with pyro.plate("groups", 3):
            effect = pyro.sample("effect", dist.Normal(0.0, 10.0))
        with pyro.plate("rows", len(table)):
            pyro.sample("y", dist.Normal(effect[table["g"]], 0.01), obs=table["y"] if "y" in table else None)

    table = pd.DataFrame({"g": pd.Categorical(list("abcabc")), "y": [0.0, 10.0, 20.0] * 2})
    target = bk.Target.from_pyro(model, table)
    u = torch.tensor([[0.0, 10.0, 20.0]], dtype=F64)
    drawn = target.predictive(u, pd.DataFrame({"g": pd.Categorical(["c", "b"])}))["y"]
    assert drawn[0].tolist() == pytest.approx([20.0, 10.0], abs=0.1)
    with pytest.raises(DataError, match="column 'g' .* has the category 'z', and the model knows 'a', 'b', 'c'"):
        target.predictive(u, pd.DataFrame({"g": pd.Categorical(["c", "z"])}))


@pytest.mark.parametrize("form", [list, np.array, lambda x: np.array(x, dtype=object), pd.Series, pl.Series])
def test_texts_of_new_rows_have_the_codes_of_the_categories_of_the_model(form):
    def model(g, y=None):
        effect = pyro.sample("effect", dist.Normal(torch.zeros(3, dtype=F64), 10.0).to_event(1))
        with pyro.plate("rows", len(g)):
            pyro.sample("y", dist.Normal(effect[g], 0.01), obs=y)

    target = bk.Target.from_pyro(model, pd.Categorical(list("abcabc")), np.tile([0.0, 10.0, 20.0], 2))
    u = torch.tensor([[0.0, 10.0, 20.0]], dtype=F64)
    drawn = target.predictive(u, form(["c", "b", "b"]))["y"]
    assert drawn[0].tolist() == pytest.approx([20.0, 10.0, 10.0], abs=0.1)
    with pytest.raises(DataError, match="argument 'g' has the category 'z', and the model knows 'a', 'b', 'c'"):
        target.predictive(u, form(["c", "z"]))


def test_categories_with_several_codes_are_said():
    def model(table):
        with pyro.plate("teams", 3):
            skill = pyro.sample("skill", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(table)):
            pyro.sample("y", dist.Normal(skill[table["home"]] - skill[table["away"]], 1.0), obs=table["y"])

    table = pd.DataFrame({"home": pd.Categorical(list("AAB")), "away": pd.Categorical(list("BCC")), "y": [1.0, 2, 3]})
    with pytest.warns(DataWarning, match="'home' and 'away' have the category 'B' in common, and other"):
        bk.Target.from_pyro(model, table)


def test_one_number_of_a_whole_frame_is_refused():
    table = pd.DataFrame({"x": X.numpy(), "H": Y.numpy()})

    def model(table, centre):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("rows", len(table)):
            pyro.sample("y", dist.Normal(slope * (table - centre(table))[:, 0], 1.0), obs=table.H)

    with pytest.raises(DataError, match=r"\.mean\(\) of a data frame would be one number of all columns"):
        bk.Target.from_pyro(model, table, lambda t: t.mean())
    expected = float(dist.Normal(X - X.mean(), 1.0).log_prob(Y).sum())
    assert _log_likelihood(model, table, lambda t: t.mean(0)) == pytest.approx(expected, rel=1e-12)
