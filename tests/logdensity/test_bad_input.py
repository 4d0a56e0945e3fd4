import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from target_checks import normal
from target_models import PARALLEL, mixture

from bayeskit import Target
from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError, UnsupportedSiteError

Y = normal(5, seed=3)
HOLES = Y.clone()
HOLES[1] = HOLES[4] = math.nan


def observe(mean, y=Y):
    pyro.sample("y", dist.Normal(mean, 1.0).expand(y.shape).to_event(y.dim()), obs=y)


def counts(y):
    rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("n", dist.Poisson(rate), obs=y)


def shares(y):
    observe(pyro.sample("mean", dist.Normal(0.0, 1.0)))
    with pyro.plate("data", len(y)):
        pyro.sample("n", dist.Uniform(0.0, 1.0), obs=y)


def simple(y):
    observe(pyro.sample("mean", dist.Normal(0.0, 1.0)), y)


def latent(make, **settings):
    def model(y):
        pyro.sample("first", dist.Normal(0.0, 1.0))
        pyro.sample("site", make(), **settings)
        observe(0.0, y)

    return model


def nothing_continuous(y):
    z = pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
    observe(z, y)


def subsampled(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y), subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


def twice(y):
    pyro.sample("mean", dist.Normal(0.0, 1.0))
    observe(pyro.sample("mean", dist.Normal(0.0, 1.0)), y)


def undeclared(y):
    pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
    mean = pyro.sample("mean", dist.Normal(torch.zeros(2), 1.0))
    observe(mean.sum(), y)


def moving_support(y):
    z = pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
    observe(pyro.sample("mean", dist.Uniform(0.0, 1.0 + z)), y)


def coupled_plates(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("a", 2, dim=-2):
        za = pyro.sample("za", dist.Bernoulli(0.5), infer=PARALLEL)
    with pyro.plate("b", 2, dim=-1):
        zb = pyro.sample("zb", dist.Bernoulli(0.5), infer=PARALLEL)
    with pyro.plate("a2", 2, dim=-2), pyro.plate("b2", 2, dim=-1):
        pass
    with pyro.plate("a", 2, dim=-2), pyro.plate("b", 2, dim=-1):
        pyro.sample("y", dist.Normal(mean + za * zb, 1.0), obs=y)


def covariate(x, y):
    weight = pyro.sample("weight", dist.Normal(0.0, 1.0))
    observe(weight * x, y)


BAD = {
    "not callable": (lambda: Target.from_pyro(3), ModelError, "callable.*got int.*from_functions"),
    "not Pyro": (lambda: Target.from_pyro(lambda: 3), ModelError, "reached no pyro.sample.*from_functions"),
    "nothing continuous": (
        lambda: Target.from_pyro(nothing_continuous, Y),
        ModelError,
        "no continuous latent site",
    ),
    "unmarked": (
        lambda: Target.from_pyro(latent(lambda: dist.Categorical(torch.ones(3))), Y),
        UnsupportedSiteError,
        "'site' is discrete; mark it with infer=.*parallel",
    ),
    "unmarked and infinite": (
        lambda: Target.from_pyro(latent(lambda: dist.Poisson(2.0)), Y),
        UnsupportedSiteError,
        "'site' is discrete; its support is infinite",
    ),
    "marked and infinite": (
        lambda: Target.from_pyro(latent(lambda: dist.Poisson(2.0), infer=PARALLEL), Y),
        UnsupportedSiteError,
        "'site' is marked for enumeration, but its support is infinite; use",
    ),
    "sphere": (
        lambda: Target.from_pyro(latent(lambda: dist.ProjectedNormal(torch.ones(3))), Y),
        UnsupportedSiteError,
        "'site' has support Sphere.*reparameterise",
    ),
    "half-line declared as a line": (
        lambda: Target.from_pyro(
            latent(
                lambda: dist.TransformedDistribution(dist.Exponential(1.0), dist.transforms.AffineTransform(2.0, -1.5))
            ),
            Y,
        ),
        UnsupportedSiteError,
        "'site' has support Real.*reparameterise",
    ),
    "no density": (
        lambda: Target.from_pyro(
            latent(
                lambda: dist.TransformedDistribution(
                    dist.Normal(torch.zeros(3), 1.0).to_event(1), dist.transforms.SoftmaxTransform()
                )
            ),
            Y,
        ),
        ModelError,
        "after site 'site'.*not implemented, such as the density",
    ),
    "missing data": (
        lambda: Target.from_pyro(simple, HOLES),
        DataError,
        r"observed site 'y' holds 2 NaN, the first at index \(1,\); drop or impute.*poutine.mask",
    ),
    "missing data in a closure": (
        lambda: Target.from_pyro(lambda: simple(HOLES)),
        DataError,
        "'y' holds 2 NaN",
    ),
    "half-masked missing data": (
        lambda: Target.from_pyro(poutine.mask(simple, mask=torch.tensor(True)), HOLES),
        DataError,
        "'y' holds 2 NaN",
    ),
    "missing covariate": (
        lambda: Target.from_pyro(covariate, HOLES, Y),
        DataError,
        "argument 'x' of the model holds 2 NaN, the first in row 1",
    ),
    "missing keyword": (
        lambda: Target.from_pyro(covariate, x=HOLES, y=Y),
        DataError,
        "argument 'x' of the model",
    ),
    "subsampled": (lambda: Target.from_pyro(subsampled, Y), ModelError, "plate 'data' subsamples.*full data"),
    "same name": (lambda: Target.from_pyro(twice, Y), ModelError, "two sites are named 'mean'"),
    "undeclared": (
        lambda: Target.from_pyro(undeclared, Y),
        ModelError,
        "'mean' has batch shape.*outside every plate.*to_event",
    ),
    "moving support": (
        lambda: Target.from_pyro(moving_support, Y),
        UnsupportedSiteError,
        "'mean'.*support.*summed-out",
    ),
    "coupled plates": (
        lambda: Target.from_pyro(coupled_plates, normal(2, 2)),
        ModelError,
        "'za', 'zb' couple different plates.*Python loop",
    ),
    "invalid prior": (
        lambda: Target.from_pyro(lambda y: observe(pyro.sample("tau", dist.Normal(0.0, -1.0)), y), Y),
        ModelError,
        "(?s)failed before its first site.*tau.*scale.*GreaterThan",
    ),
    "wrong number of arguments": (
        lambda: Target.from_pyro(simple),
        ModelError,
        "cannot be called.*argument",
    ),
    "arguments in a tuple": (
        lambda: Target.from_pyro(lambda x, y: simple(x + y), (Y, Y)),
        ModelError,
        r"cannot be called with \(tuple\).*'y'; pass its arguments one by one",
    ),
    "data outside of the support": (
        lambda: Target.from_pyro(counts, torch.tensor([1.0, 2.0, -3.0])),
        ModelError,
        r"'n'.*1 of its 3 observed values lie outside of the support of Poisson.*first is -3.0, at index \(2,\)",
    ),
    "data outside of fixed ends": (
        lambda: Target.from_pyro(shares, torch.tensor([0.5, 2.0])),
        ModelError,
        r"'n'.*1 of its 2 observed values lie outside of the support of Uniform.*upper_bound=1.0",
    ),
    "compile": (lambda: Target.from_pyro(simple, Y, compile="yes"), SettingsError, "compile must be"),
    "last dimension": (
        lambda: Target.from_pyro(simple, Y).log_density(torch.zeros(3, 2)),
        ShapeError,
        r"last dimension of u must be 1, but u has shape \(3, 2\)",
    ),
    "last dimension of a gradient": (
        lambda: Target.from_pyro(simple, Y).value_and_grad(torch.zeros(())),
        ShapeError,
        "last dimension of u must be 1",
    ),
    "missing site": (
        lambda: Target.from_pyro(simple, Y).unconstrain({"other": torch.zeros(())}),
        ShapeError,
        "site 'mean' has no value; pass values for the sites",
    ),
    "site shape": (
        lambda: Target.from_pyro(mixture, Y).unconstrain({"weights": torch.ones(2) / 2, "means": torch.zeros(3)}),
        ShapeError,
        r"'weights' has shape \(3,\), but its value has shape \(2,\)",
    ),
    "site batch": (
        lambda: Target.from_pyro(mixture, Y).unconstrain({"weights": torch.ones(2, 3) / 3, "means": torch.zeros(3)}),
        ShapeError,
        r"'means' has batch shape \(\), not \(2,\)",
    ),
    "site support": (
        lambda: Target.from_pyro(mixture, Y).unconstrain({"weights": torch.ones(3), "means": torch.zeros(3)}),
        DataError,
        "'weights' lies outside its support Simplex",
    ),
    "pointwise of functions": (
        lambda: Target.from_functions(lambda u: u.sum(-1), lambda u: u.sum(-1), 2).pointwise_log_likelihood(
            torch.zeros(1, 2)
        ),
        ModelError,
        "from_pyro",
    ),
    "shape of functions": (
        lambda: Target.from_functions(lambda u: u.sum(), lambda u: u.sum(-1), 2),
        ShapeError,
        r"log_prior maps \(2, 2\) to \(\)",
    ),
    "prior of functions": (
        lambda: Target.from_functions(lambda u: u.sum(-1), lambda u: u.sum(-1), 2).sample_prior(3),
        SettingsError,
        "pass sample_prior",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_typed_error_with_place_and_remedy(name):
    call, kind, message = BAD[name]
    with pytest.raises(kind, match=message) as caught:
        call()
    assert caught.type is kind


def test_a_plate_without_data_is_named():
    with pytest.raises(DataError, match="all plates of the observed sites have size zero"):
        Target.from_pyro(counts, torch.zeros(0))


def test_data_of_another_shape_do_not_meet_every_mean():
    x, y = normal(6, 2, seed=1), normal(6, seed=2)

    def model(x, y):
        b = pyro.sample("b", dist.Normal(torch.zeros(2, dtype=x.dtype), 1.0).to_event(1))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)

    assert Target.from_pyro(model, x, y).dim == 2
    with pytest.raises(ModelError, match=r"'y' has batch shape \(6,\), data of shape \(6, 1\).*squeeze"):
        Target.from_pyro(model, x, y[:, None])


def test_data_beyond_an_end_that_is_itself_sampled_have_no_density_and_no_error():
    def model():
        end = pyro.sample("end", dist.HalfNormal(1.0))
        with pyro.plate("data", 2):
            pyro.sample("y", dist.Uniform(0.0, end).to_event(0), obs=torch.tensor([0.5, 2.0]))

    for seed in range(10):  # of whose draws 19 in 20 do not reach around the data
        target = Target.from_pyro(model, seed=seed)
    value = target.log_density(torch.tensor([[1.0], [0.5]]))
    assert value[0].isfinite() and value[1] == -torch.inf


class ForkedGradient(torch.autograd.Function):
    """The identity, with the error of torch where a process was forked after a gradient beside a CUDA device."""

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")


def test_a_forked_process_that_cannot_compute_gradients_is_told_to_spawn():
    def model():
        x = pyro.sample("x", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(ForkedGradient.apply(x), 1.0), obs=torch.tensor(0.3))

    with pytest.raises(ModelError, match=r"forked process .*\('spawn'\)"):
        Target.from_pyro(model)


def test_a_prior_sampler_that_takes_no_generator_is_refused():
    other = Target.from_functions(
        lambda u: -u.square().sum(-1), lambda u: 0 * u.sum(-1), 1, lambda n, g: torch.ones(n, 1)
    )
    with pytest.raises(SettingsError, match="seed=generator"):
        Target.from_functions(other.log_prior, other.log_likelihood, 1, other.sample_prior)


@pytest.mark.parametrize(
    "handler",
    [poutine.scale(scale=5.0), poutine.mask(mask=False), poutine.trace(), pyro.plate("outer", 2)],
    ids=["scale", "mask", "trace", "plate"],
)
def test_handlers_around_the_reading_of_a_model_are_refused(handler):
    with pytest.raises(ModelError, match="is read inside of Pyro's .*apply handlers to the model"), handler:
        Target.from_pyro(counts, Y.abs().round())
