"""Models whose sums or densities would be silently other than meant: exact values, or a refusal that names the site."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.reparam import LocScaleReparam

import bayeskit as bk
from bayeskit.errors import ModelError, UnsupportedSiteError
from bayeskit.inference.samplers import MinibatchTarget

F64 = torch.float64
ENUMERATED = {"enumerate": "parallel"}
Y = torch.tensor([0.3, -1.2, 0.8, 2.0], dtype=F64)


def share():
    return pyro.sample("share", dist.Beta(torch.tensor(2.0, dtype=F64), 2.0))


def with_labels(around, infer=ENUMERATED):
    def model():
        p = share()
        with pyro.plate("data", 4), around():
            z = pyro.sample("z", dist.Bernoulli(p), infer=infer)
            pyro.sample("y", dist.Normal(2 * z - 1, 1.0), obs=Y)

    return model


def part_of_the_data():
    p = share()
    with pyro.plate("data", 12, subsample=torch.arange(4)):
        z = pyro.sample("z", dist.Bernoulli(p), infer=ENUMERATED)
        pyro.sample("y", dist.Normal(2 * z - 1, 1.0), obs=Y)


def hidden():
    with poutine.block():
        a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    b = pyro.sample("b", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    pyro.sample("y", dist.Normal(a + b, 1.0).expand([4]).to_event(1), obs=Y)


def two_plates():
    a = pyro.sample("a", dist.Normal(torch.zeros((), dtype=F64), 1.0))
    for size in (2, 4):
        with pyro.plate("data", size) as rows:
            pyro.sample(f"y{size}", dist.Normal(a, 1.0), obs=Y[rows])


def fixed():
    a = pyro.sample("a", dist.Delta(torch.zeros((), dtype=F64)))
    b = pyro.sample("b", dist.Normal(a, 1.0))
    pyro.sample("y", dist.Normal(b, 1.0).expand([4]).to_event(1), obs=Y)


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (with_labels(lambda: poutine.scale(scale=3.0)), ModelError, "'z' is summed out and scaled"),
        (part_of_the_data, ModelError, "'z' is summed out and scaled"),
        (
            with_labels(lambda: pyro.poutine.mask(mask=True), ENUMERATED | {"num_samples": 5}),
            UnsupportedSiteError,
            "'z' is marked for enumeration with num_samples",
        ),
        (hidden, ModelError, "something random is left in it, such as a site behind poutine.block"),
        (two_plates, ModelError, "two plates are named 'data', of sizes 2 and 4"),
        (fixed, UnsupportedSiteError, "'a' is a Delta, which has no density; replace it by pyro.deterministic"),
    ],
    ids=["scaled", "part of the data", "num_samples", "hidden", "two plates", "delta"],
)
def test_what_would_not_be_the_density_is_refused(model, kind, message):
    with pytest.raises(kind, match=message):
        bk.Target.from_pyro(model)


def test_observations_alone_may_be_scaled():
    def model():
        p = share()
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Bernoulli(p), infer=ENUMERATED)
            with poutine.scale(scale=3.0):
                pyro.sample("y", dist.Normal(2 * z - 1, 1.0), obs=Y)

    target = bk.Target.from_pyro(model)
    u = torch.zeros(1, dtype=F64)  # a share of one half
    parts = torch.stack([0.5 * (3 * dist.Normal(mean, 1.0).log_prob(Y)).exp() for mean in (-1.0, 1.0)])
    assert abs(float(target.log_likelihood(u) - parts.sum(0).log().sum())) < 1e-10


def test_minibatches_sum_before_they_scale():
    def model(y):
        p = share()
        with pyro.plate("data", len(y), subsample_size=3) as rows:
            z = pyro.sample("z", dist.Bernoulli(p), infer=ENUMERATED)
            pyro.sample("y", dist.Normal(2 * z - 1, 1.0), obs=y[rows])

    y = torch.linspace(-1, 1, 20, dtype=F64)
    target = MinibatchTarget.from_pyro(model, y).on_rows(torch.arange(3))
    parts = torch.stack([0.5 * dist.Normal(mean, 1.0).log_prob(y[:3]).exp() for mean in (-1.0, 1.0)])
    exact = 20 / 3 * float(parts.sum(0).log().sum())
    assert abs(float(target.log_likelihood(torch.zeros(1, dtype=F64))) - exact) < 1e-10


def test_pointwise_where_a_continuous_site_depends_on_one_that_is_summed_out():
    """Labels have their probability given the continuous sites."""

    def model():
        p = share()
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Bernoulli(p), infer=ENUMERATED)
            x = pyro.sample("x", dist.Normal(3 * z, 1.0))
            pyro.sample("y", dist.Normal(x + z, 1.0), obs=Y)

    target = bk.Target.from_pyro(model)
    p, x = torch.tensor(0.3, dtype=F64), torch.tensor([0.1, 1.4, 2.5, 3.3], dtype=F64)
    u = target.unconstrain({"share": p, "x": x})
    prior = torch.stack(
        [(1 - p) * dist.Normal(0.0, 1.0).log_prob(x).exp(), p * dist.Normal(3.0, 1.0).log_prob(x).exp()]
    )
    given = torch.stack([dist.Normal(x + z, 1.0).log_prob(Y).exp() for z in (0.0, 1.0)])
    exact = ((prior * given).sum(0) / prior.sum(0)).log()
    pointwise = target.pointwise_log_likelihood(u)["y"]
    torch.testing.assert_close(pointwise, exact, rtol=0, atol=1e-10)
    assert abs(float(pointwise.sum() - target.log_likelihood(u))) < 1e-10


def test_pointwise_has_the_shape_of_the_data_in_nested_plates():
    """Names of plates in the order of the alphabet, and against it."""
    y = torch.arange(6, dtype=F64).reshape(2, 3) / 3

    def model(outer, inner):
        p = share()
        with pyro.plate(outer, 2, dim=-2), pyro.plate(inner, 3, dim=-1):
            z = pyro.sample("z", dist.Bernoulli(p), infer=ENUMERATED)
            pyro.sample("y", dist.Normal(2 * z - 1, 1.0), obs=y)

    parts = torch.stack([0.5 * dist.Normal(mean, 1.0).log_prob(y).exp() for mean in (-1.0, 1.0)])
    for names in (("rows", "columns"), ("columns", "rows")):
        found = bk.Target.from_pyro(model, *names).pointwise_log_likelihood(torch.zeros(1, dtype=F64))["y"]
        torch.testing.assert_close(found, parts.sum(0).log(), rtol=0, atol=1e-10)


def test_a_reparameterised_site_is_no_datum():
    @poutine.reparam(config={"x": LocScaleReparam(0.0)})
    def model(y):
        scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=F64), 1.0))
        with pyro.plate("data", 4):
            x = pyro.sample("x", dist.Normal(1.0, scale))
            if y is not None:
                pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    target = bk.Target.from_pyro(model, Y)
    u = torch.linspace(-0.5, 0.5, 5, dtype=F64)
    assert set(target.pointwise_log_likelihood(u)) == {"y"}
    values = target.constrain(u, deterministic=True)
    torch.testing.assert_close(values["x"], 1 + values["scale"] * values["x_decentered"], rtol=0, atol=1e-12)
    with pytest.raises(ModelError, match="no observed site"):
        bk.Target.from_pyro(model, None).pointwise_log_likelihood(u)
