"""What passes ``from_pyro`` runs, and what a model does wrong is said with site, line and remedy."""

import math

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.distributions import constraints

import bayeskit as bk
from bayeskit._core.statistics import effective_sample_size
from bayeskit.errors import DataError, ModelError, SettingsError, SlowModelWarning, UnsupportedSiteError
from bayeskit.inference import evidence

F64 = torch.float64
Y = torch.randn(20, generator=torch.Generator().manual_seed(0), dtype=F64)
X = torch.randn(20, generator=torch.Generator().manual_seed(1), dtype=F64)
SEEN = torch.rand(10, 4, generator=torch.Generator().manual_seed(2)) < 0.5


def gradient_of(model, *args, u=0.3):
    """Return value and gradient of the traced target at one point."""
    target = bk.Target.from_pyro(model, *args, compile=False)
    assert not target.loops
    value, gradient = target.value_and_grad(torch.full((2, target.dim), u, dtype=target.dtype))
    assert value.isfinite().all() and gradient.isfinite().all()
    return value[0], gradient[0]


# -- in-place changes -----------------------------------------------------------------------------------------------


def slope(y=Y):
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("n", len(y)):
        pyro.sample("y", dist.Normal(1 + 2 * b * X, 1.0), obs=y)


def added(y=Y):
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    mean = torch.zeros(len(y))
    mean += b * X
    mean *= 2
    mean += 1
    with pyro.plate("n", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def test_augmented_assignments_are_those_out_of_place():
    for found, exact in zip(gradient_of(added), gradient_of(slope), strict=True):
        torch.testing.assert_close(found, exact)


def test_calls_that_change_in_place_still_do():
    def model():
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        mean = b * X
        mean.mul_(2)
        mean.add_(1)
        with pyro.plate("n", len(Y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=Y)

    for found, exact in zip(gradient_of(model), gradient_of(slope), strict=True):
        torch.testing.assert_close(found, exact)


def capture_recapture():
    """A mask that grows, as in the capture-recapture models of Pyro."""
    survival = pyro.sample("survival", dist.Beta(1.0, 1.0))
    caught = pyro.sample("caught", dist.Beta(1.0, 1.0))
    first, alive = torch.zeros(10, dtype=torch.bool), torch.ones(10)
    with pyro.plate("animals", 10):
        for t in range(4):
            with poutine.mask(mask=first):
                pyro.sample(f"y{t}", dist.Bernoulli(caught * alive), obs=SEEN[:, t].to(alive))
            first |= SEEN[:, t]
            alive = alive * survival


def test_a_mask_that_grows_can_be_sampled():
    draws = bk.sample(bk.Target.from_pyro(capture_recapture), num_warmup=20, num_samples=20, progress=False)
    assert draws.unconstrained.isfinite().all()


def test_elements_that_are_assigned_run_in_a_loop_that_is_right():
    def model():
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        mean = torch.zeros(20)
        for i in range(20):
            mean[i] = 1 + 2 * b * X[i]
        with pyro.plate("n", 20):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=Y)

    with pytest.warns(SlowModelWarning, match="torch.stack"):
        target = bk.Target.from_pyro(model)
    value, gradient = target.value_and_grad(torch.full((1, 1), 0.3, dtype=F64))
    exact_value, exact_gradient = gradient_of(slope)
    torch.testing.assert_close(value[0], exact_value)
    torch.testing.assert_close(gradient[0], exact_gradient)


def test_a_gradient_that_fails_is_said_at_once():
    def model():
        b = pyro.sample("b", dist.Normal(0.0, 1.0).expand([20]).to_event(1))
        scale = b.exp()
        mean = scale.sqrt()
        scale[0] = float(b[1].detach()) ** 2 + 1  # read as a number: the loop, where sqrt needs what is overwritten
        mean.mul_(2)
        with pyro.plate("n", 20):
            pyro.sample("y", dist.Normal(mean, scale), obs=Y)

    with pytest.raises(ModelError, match="in place.*torch.stack"):
        bk.Target.from_pyro(model)


# -- discrete sites that nobody marked ------------------------------------------------------------------------------


def indexed():
    means = pyro.sample("means", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    kind = pyro.sample("kind", dist.Categorical(torch.ones(2)))
    pyro.sample("y", dist.Normal(means[kind], 1.0), obs=Y[0])


def branching():
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    kind = pyro.sample("kind", dist.Bernoulli(0.5))
    pyro.sample("y", dist.Normal(mean + 1 if kind else mean, 1.0), obs=Y[0])


@pytest.mark.parametrize("model", [indexed, branching])
def test_an_unmarked_discrete_site_is_named_with_its_mark(model):
    with pytest.raises(UnsupportedSiteError, match='\'kind\' is discrete.*infer=."enumerate": "parallel"'):
        bk.Target.from_pyro(model)


# -- parameters out of their domain ---------------------------------------------------------------------------------


def test_a_scale_that_may_be_negative_is_named():
    def model():
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        with pyro.plate("n", 20):
            pyro.sample("y", dist.Normal(0.0, scale), obs=Y)

    with pytest.raises(ModelError, match="scale of site 'y' leaves its domain in .*, line .*, in model.*HalfNormal"):
        bk.Target.from_pyro(model)


@pytest.mark.parametrize("seed", range(3))
def test_a_latent_site_with_a_scale_that_may_be_negative_is_named(seed):
    def model():
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        with pyro.plate("n", 20):
            effect = pyro.sample("effect", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(effect, 1.0), obs=Y)

    with pytest.raises(
        ModelError, match="the scale of site 'effect' leaves its domain in .*, line .*, in model.*HalfNormal"
    ):
        bk.Target.from_pyro(model, seed=seed)


@pytest.mark.filterwarnings("ignore::bayeskit.errors.SlowModelWarning", "ignore:Converting a tensor:UserWarning")
def test_a_scale_that_may_be_negative_is_named_where_the_model_cannot_be_batched():
    """One of the branches has such a scale; a prior on the right support passes."""

    def model(prior):
        scale = pyro.sample("scale", prior)
        if float(scale) > 0.5:
            pyro.sample("y", dist.Normal(0.0, 1.0).expand([20]).to_event(1), obs=Y)
        else:
            pyro.sample("y", dist.Normal(0.0, scale).expand([20]).to_event(1), obs=Y)

    with pytest.raises(ModelError, match=r"the scale of site 'y' leaves its domain in .*, line .* of 20 draws"):
        bk.Target.from_pyro(model, dist.Normal(0.0, 1.0))
    assert bk.Target.from_pyro(model, dist.HalfNormal(1.0)).loops


@pytest.mark.filterwarnings("ignore::bayeskit.errors.SlowModelWarning")
def test_a_parameter_is_looked_at_before_a_later_failure():
    """The matrix of the last site cannot be factorised at just the draws at which the scale is negative."""

    def model():
        scale = pyro.sample("scale", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(0.0, scale).expand([20]).to_event(1), obs=Y)
        factor = torch.linalg.cholesky(scale.item() * torch.eye(2))
        pyro.sample("z", dist.MultivariateNormal(torch.zeros(2), scale_tril=factor), obs=Y[:2])

    with pytest.raises(ModelError, match="the scale of site 'y' leaves its domain"):
        bk.Target.from_pyro(model)


def test_a_mixture_of_one_component_is_its_component():
    def model(num_components):
        weights = pyro.sample("weights", dist.Dirichlet(torch.ones(num_components, dtype=F64)))
        with pyro.plate("components", num_components):
            mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=F64), 3.0))
        with pyro.plate("n", 20):
            z = pyro.sample("z", dist.Categorical(weights), infer={"enumerate": "parallel"})
            pyro.sample("y", dist.Normal(mean[z], 1.0), obs=Y)

    def component(num_components):
        mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=F64), 3.0))
        with pyro.plate("n", 20):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=Y)

    mixture, single = (bk.Target.from_pyro(one, 1) for one in (model, component))
    u = torch.linspace(-2, 2, 5, dtype=F64).unsqueeze(1)
    assert mixture.dim == 1
    torch.testing.assert_close(mixture.log_density(u), single.log_density(u))
    assert bool((mixture.constrain(u)["weights"] == 1).all())


@pytest.mark.parametrize("tiny", [1e-3, 1e-6])
def test_a_scale_that_only_rounds_to_zero_is_no_fault(tiny):
    def model():
        scale = pyro.sample("scale", dist.Gamma(torch.tensor(tiny, dtype=F64), 1.0))
        p = pyro.sample("p", dist.Beta(torch.tensor(tiny, dtype=F64), 1.0))
        pyro.sample("y", dist.Normal(0.0, scale), obs=Y[0])
        pyro.sample("z", dist.Bernoulli(p * (2 - p)), obs=torch.ones((), dtype=F64))

    assert bk.Target.from_pyro(model).dim == 2


def test_data_outside_of_their_support_are_no_fault():
    def model():
        top = pyro.sample("top", dist.Gamma(2.0, 1.0))
        with pyro.plate("n", 20):
            pyro.sample("y", dist.Uniform(0.0, top), obs=Y.abs())

    assert bk.Target.from_pyro(model).dim == 1


# -- data of other libraries ----------------------------------------------------------------------------------------


def regression(x, y):
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    with pyro.plate("n", len(y)):
        pyro.sample("y", dist.Normal(1 + 2 * b * x, 1.0), obs=y)


@pytest.mark.parametrize("made", [np.asarray, lambda v: pd.Series(v.numpy()), torch.Tensor.tolist])
def test_arrays_columns_and_lists_are_data(made):
    for found, exact in zip(gradient_of(regression, made(X), made(Y)), gradient_of(slope), strict=True):
        assert found.dtype == F64
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("made", [np.asarray, torch.Tensor.tolist])
def test_observations_may_be_arrays_and_lists(made):
    y = made(Y)
    for found, exact in zip(gradient_of(slope, y), gradient_of(slope), strict=True):
        torch.testing.assert_close(found, exact)


@pytest.mark.parametrize("compile", [False, True])
def test_elements_that_data_point_to_in_a_loop_are_traced(compile):
    """Indices that are numbers of data, one at a time; warnings would be errors here."""
    pairs = torch.tensor([[0, 1], [1, 2], [2, 0], [0, 2]])
    won = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=F64)

    def looped():
        skill = pyro.sample("skill", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        for i in pyro.plate("games", len(pairs)):
            logits = skill[pairs[i, 0]] - skill[pairs[i, 1]]
            pyro.sample(f"won_{i}", dist.Bernoulli(logits=logits), obs=won[i])

    def together():
        skill = pyro.sample("skill", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("games", len(pairs)):
            pyro.sample("won", dist.Bernoulli(logits=skill[pairs[:, 0]] - skill[pairs[:, 1]]), obs=won)

    u = torch.tensor([[0.1, -0.7, 1.2], [0.4, 0.2, -0.3]], dtype=F64)
    results = [bk.Target.from_pyro(model, compile=compile).value_and_grad(u) for model in (looped, together)]
    for found, exact in zip(*results, strict=True):
        torch.testing.assert_close(found, exact)


def test_sizes_that_are_lists_stay_lists():
    def model(shape, names):
        assert isinstance(shape, list) and names == ["a"]
        b = pyro.sample(names[0], dist.Normal(0.0, 1.0).expand(shape).to_event(1))
        pyro.sample("y", dist.Normal(b.sum(), 1.0), obs=Y[0])

    assert bk.Target.from_pyro(model, [3], ["a"]).dim == 3


def test_lists_are_doubles_where_no_tensor_says_otherwise():
    """As arrays are; a model that makes its own tensors of a list computes in double precision too."""

    def model(y, scale):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        with pyro.plate("n", len(y)):
            pyro.sample("y", dist.Normal(b, torch.as_tensor(scale)), obs=torch.as_tensor(y))

    values, scales = Y.tolist(), [0.5] * len(Y)
    listed, exact = (bk.Target.from_pyro(model, *data) for data in ((values, scales), (Y, Y.new_tensor(scales))))
    u = Y[:4, None]
    assert listed.dtype == F64 and torch.equal(listed.log_density(u), exact.log_density(u))
    assert [x.dtype for x in listed.density.data] == [F64] * 3
    assert bk.Target.from_pyro(model, Y.float(), scales).dtype == torch.float32
    assert bk.Target.from_pyro(model, Y.float(), 0.5).dtype == torch.float32


def test_observations_that_are_no_numbers_are_named():
    def model():
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(b, 1.0), obs=["one"])

    with pytest.raises(DataError, match="observed site .y."):
        bk.Target.from_pyro(model)


# -- flat priors ----------------------------------------------------------------------------------------------------


def flat(y):
    mean = pyro.sample("mean", dist.ImproperUniform(constraints.real, (), ()))
    scale = pyro.sample("scale", dist.ImproperUniform(constraints.positive, (), ()))
    with pyro.plate("n", len(y)):
        pyro.sample("y", dist.Normal(mean, scale), obs=y)


@pytest.mark.calibration
def test_flat_priors_can_be_sampled_and_have_no_evidence(limit):
    """The posterior of mean and scale, flat in both: a Student-t of n - 2 degrees, and a root of an inverse gamma."""
    target = bk.Target.from_pyro(flat, 100 + Y)
    assert not target.can_sample_prior
    draws = bk.sample(target, 8, 300, 500, seed=0, progress=False)
    n, square = len(Y), float((Y - Y.mean()).square().sum())
    values = draws.values()
    precision = values["scale"] ** -2  # Gamma((n - 2) / 2, square / 2)
    degrees = n - 2
    exact = {"mean": (100 + float(Y.mean()), math.sqrt(square / degrees / n * degrees / (degrees - 2)))}
    exact["precision"] = (degrees / square, math.sqrt(2 * degrees) / square)
    for name, found in (("mean", values["mean"]), ("precision", precision)):
        mean, deviation = exact[name]
        error = deviation / math.sqrt(float(effective_sample_size(found)))
        assert abs(float(found.mean()) - mean) < limit(2) * error
    with pytest.raises(SettingsError, match="'mean'.*improper"):
        evidence.bridge_sampling(target, draws)


def test_a_data_frame_is_a_matrix_whose_columns_have_names():
    table = pd.DataFrame({"x": [0.0, 1.0, 2.0], "z": [1.0, 0.0, 1.0]})
    y = torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64)

    def linear(table, y):
        slopes = pyro.sample("slopes", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(table @ slopes.to(table), 1.0), obs=y)

    def by_name(table, y):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(slope * table["x"], 1.0), obs=y)

    u = torch.tensor([[0.3, -0.2]], dtype=torch.float64)
    matrix = bk.Target.from_pyro(linear, torch.tensor(table.to_numpy()), y, compile=False)
    assert torch.equal(bk.Target.from_pyro(linear, table, y, compile=False).log_density(u), matrix.log_density(u))
    column = bk.Target.from_pyro(by_name, table["x"].rename("slope").to_frame().rename(columns={"slope": "x"}), y)
    assert torch.equal(column.log_density(u[:, :1]), bk.Target.from_pyro(by_name, table, y).log_density(u[:, :1]))


@pytest.mark.parametrize(
    ("support", "shape"),
    [(constraints.simplex, (3,)), (constraints.unit_interval, ()), (constraints.corr_cholesky, (2, 2))],
)
def test_flat_priors_of_all_supports_start(support, shape):
    def model():
        value = pyro.sample("value", dist.ImproperUniform(support, (), shape))
        pyro.sample("y", dist.Normal(value.sum(), 1.0), obs=Y[0])

    draws = bk.sample(bk.Target.from_pyro(model), num_warmup=20, num_samples=20, progress=False)
    assert support.check(draws.values()["value"]).all()
