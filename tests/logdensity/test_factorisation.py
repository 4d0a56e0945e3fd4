"""A matrix that cannot be factorised spoils its own vector and no other."""

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.randomness import new_generator
from bayeskit._logdensity.pyro_density import parts_of
from bayeskit.errors import ModelError
from bayeskit.exact.generated import WishartNormal


def log_likelihood(u):
    one = torch.ones_like(u[..., 0])
    matrix = torch.stack([one, u[..., 0], u[..., 0], one], -1).reshape(*u.shape[:-1], 2, 2)
    factor = torch.linalg.cholesky(matrix)  # fails for a correlation beyond one
    return -factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)


def target(compile):
    return bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), log_likelihood, 1, compile=compile)


U = torch.tensor([[0.5], [1.5], [-0.2]], dtype=torch.float64)


@pytest.mark.parametrize("compile", [False, True])
def test_value_and_gradient(compile):
    value, gradient = target(compile).value_and_grad(U)
    x = U[:, 0]
    exact = -0.5 * x.square() - 0.5 * (1 - x.square()).log()
    slope = -x + x / (1 - x.square())
    keep = [0, 2]
    torch.testing.assert_close(value[keep], exact[keep], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient[keep, 0], slope[keep], rtol=1e-12, atol=1e-12)
    assert bool(value[1].isnan()) and bool(gradient[1].isnan().all())


def test_evaluate():
    log_prior, values = target(False).evaluate(U)
    assert bool(values[1].isnan()) and bool(values[[0, 2]].isfinite().all())
    assert bool(log_prior[[0, 2]].isfinite().all())


@pytest.mark.calibration
@pytest.mark.parametrize("d", [2, 3])
def test_a_model_with_constant_masks_compiles(d):
    """The transform to correlation matrices picks entries below the diagonal by a boolean mask."""

    def model(y):
        factor = pyro.sample("factor", dist.LKJCholesky(d, torch.tensor(1.5, dtype=torch.float64)))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MultivariateNormal(torch.zeros(d).double(), scale_tril=factor), obs=y)

    y = torch.randn(5, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    compiled, plain = (bk.Target.from_pyro(model, y, compile=c) for c in (True, False))
    u = torch.randn(3, plain.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for first, second in zip(compiled.value_and_grad(u), plain.value_and_grad(u), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(plain.log_density(u), plain.value_and_grad(u)[0], rtol=1e-10, atol=1e-10)


def wishart_target():
    """Of few degrees of freedom: one precision of the prior in some thousands is singular to rounding."""
    return WishartNormal(1.327, 0.244, 2, (1.8893, -1.3949, 0.9263, 7.3799, -2.0479, -0.2206)).case().target()


@pytest.mark.filterwarnings("ignore:Low df values detected", "ignore:Singular sample detected")
def test_prior_draws_do_not_need_the_likelihood():
    target = wishart_target()
    u = target.sample_prior(4000, seed=torch.Generator().manual_seed(3))
    assert u.shape == (4000, 3) and bool(u.isfinite().all())
    log_prior, values = target.evaluate(u)
    bad = values.isnan()
    assert 0 < int(bad.sum()) < 80  # else nothing was tested; otherwise prior draws are of no use
    alone = torch.cat([target.evaluate(row[None])[1] for row in u[:5]])
    torch.testing.assert_close(values[:5], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("seed", range(3))
def test_a_matrix_that_a_later_site_needs_is_named_where_the_prior_is_drawn(seed):
    def model(y):
        slope = pyro.sample("slope", dist.Normal(y.new_zeros(()), 0.8))
        matrix = torch.stack([y.new_ones(()), slope, slope, y.new_ones(())]).reshape(2, 2)
        pyro.sample("effect", dist.MultivariateNormal(y.new_zeros(2), covariance_matrix=matrix))
        pyro.sample("y", dist.Normal(slope, 1.0), obs=y)

    target = bk.Target.from_pyro(model, torch.tensor(0.3, dtype=torch.float64), seed=seed)
    with pytest.raises(ModelError, match=r"cannot be factorised in .*, line \d+, in model .*a later site needs it"):
        target.sample_prior(100)


def by_distribution(y, matrix):
    pyro.sample("y", dist.MultivariateNormal(y.new_zeros(2), covariance_matrix=matrix), obs=y)


def by_hand(y, matrix):
    pyro.sample("y", dist.MultivariateNormal(y.new_zeros(2), scale_tril=torch.linalg.cholesky(matrix)), obs=y)


@pytest.mark.calibration
@pytest.mark.parametrize("likelihood", [by_distribution, by_hand])
def test_a_model_is_read_though_its_first_draws_cannot_be_factorised(likelihood):
    """A draw is beyond one with probability 0.40, twenty draws in a row are so with 1.4e-8."""

    def model(y):
        slope = pyro.sample("slope", dist.Normal(y.new_zeros(()), 1.2))
        likelihood(y, torch.stack([y.new_ones(()), slope, slope, y.new_ones(())]).reshape(2, 2))

    y = torch.tensor([0.3, -0.2], dtype=torch.float64)
    for seed in range(12):
        target = bk.Target.from_pyro(model, y, seed=seed)
        assert not target.loops
        (site,) = parts_of(target.density, new_generator(seed))[1:]  # of the one run that got through
        assert site.name == "y" and bool(site.distribution.scale_tril.isfinite().all())


@pytest.mark.filterwarnings("ignore:Low df values detected", "ignore:Singular sample detected")
def test_a_batch_with_such_a_matrix_is_evaluated_at_once(monkeypatch):
    target = wishart_target()
    u = target.sample_prior(4000, seed=torch.Generator().manual_seed(3))
    monkeypatch.setattr(bk.Target, "_evaluate_alone", None)
    assert bool(target.evaluate(u)[1].isnan().any())
