"""Normal and beta posteriors in closed form: reference values, normalisers by quadrature, draws that agree."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import DataError, ImproperPosteriorError, ModelError, SettingsError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized._exact import beta_posterior, gaussian_posterior
from bayeskit.inference.generalized.losses._densities import BetaDivergence
from bayeskit.inference.generalized.losses._scores import KernelSteinDiscrepancy, ScoreMatching, score_of


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


ZERO = torch.zeros((), dtype=torch.float64)
STEIN = KernelSteinDiscrepancy(lambda mean, x: mean - x)


def close(found, expected, tolerance=1e-10):
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


# -- reference values ---------------------------------------------------------------------------------------


def test_half_squared_loss():
    posterior = GibbsPosterior(dist.Normal(0.0, 1.0), losses.HalfSquared(), double(1.0, 2.0, 4.0), weight=0.5)
    exact = gaussian_posterior(posterior)
    close(exact.mean, double(1.4))
    close(exact.covariance, double(0.4)[None])
    # Evidence by the textbook: exp(-w sum (x - t)^2 / 2) under N(0, 1).
    grid = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
    log_joint = torch.func.vmap(lambda u: posterior.log_density(u))(grid[:, None])
    close(exact.log_normalizer, log_joint.logsumexp(0) + math.log(1e-3))


def test_kernel_stein_discrepancy():
    x = double(-1.0, 0.0, 2.0)
    alone = gaussian_posterior(GibbsPosterior(Flat(), STEIN, x))
    hessian, least = 1 / alone.covariance.item(), alone.mean.item()
    assert abs(hessian / 2 / 3 - 0.660122) < 5e-7
    assert abs(-hessian * least / 3 + 0.334122) < 5e-7 and abs(least - 0.253076) < 5e-7
    constant = math.log(2 * math.pi / hessian) / 2 + hessian * least**2 / 2 - alone.log_normalizer.item()
    assert abs(constant / 3 - 0.447969) < 5e-7
    exact = gaussian_posterior(GibbsPosterior(dist.Normal(0.0, 1.0), STEIN, x))
    assert abs(exact.mean.item() - 0.202060) < 5e-7 and abs(exact.covariance.item() - 0.201583) < 5e-7


# -- the formulas -------------------------------------------------------------------------------------------


def regression():
    generator = torch.Generator().manual_seed(0)
    x = torch.cat([torch.ones(12, 1), torch.randn(12, 2, generator=generator)], -1).double()
    return x, x @ double(1.0, -2.0, 0.5) + torch.randn(12, generator=generator, dtype=torch.float64)


def test_regression_in_matrices():
    x, y = regression()
    root = torch.tensor([[1.0, 0.0, 0.0], [0.4, 2.0, 0.0], [0.1, -0.3, 0.7]], dtype=torch.float64)
    mean, covariance = double(0.5, 0.0, -1.0), root @ root.mT
    prior = dist.MultivariateNormal(mean, covariance)
    for weight in (0.3, 2.0):
        exact = gaussian_posterior(GibbsPosterior(prior, losses.HalfSquared(losses.linear), (x, y), weight=weight))
        precision = covariance.inverse() + weight * x.mT @ x
        expected = precision.inverse() @ (covariance.inverse() @ mean + weight * x.mT @ y)
        close(exact.mean, expected)
        close(exact.covariance, precision.inverse())
        # y ~ N(x mean, x C x' + 1 / w), times the constant of n normals of variance 1 / w.
        marginal = dist.MultivariateNormal(
            x @ mean, x @ covariance @ x.mT + torch.eye(12, dtype=torch.float64) / weight
        )
        evidence = marginal.log_prob(y) + 6 * math.log(2 * math.pi / weight)
        close(exact.log_normalizer, evidence)


def test_flat_prior_gives_least_squares():
    x, y = regression()
    exact = gaussian_posterior(GibbsPosterior(Flat((3,)), losses.HalfSquared(losses.linear), (x, y)))
    close(exact.mean, torch.linalg.lstsq(x, y[:, None]).solution[:, 0])
    close(exact.covariance, (x.mT @ x).inverse())


def test_priors_that_are_models():
    def prior():
        centre = pyro.sample("centre", dist.Normal(0.0, 2.0))
        return pyro.sample("theta", dist.Normal(centre, 1.0))

    x = double(1.0, 2.0, 4.0)
    exact = gaussian_posterior(GibbsPosterior(prior, losses.HalfSquared(), x))
    alone = gaussian_posterior(GibbsPosterior(dist.Normal(0.0, 5.0**0.5), losses.HalfSquared(), x))
    close(exact.mean[1:], alone.mean, 1e-7)  # Pyro keeps the square root of five in single precision
    close(exact.log_normalizer, alone.log_normalizer, 1e-7)


def natural_density(p, x):
    """A law of the exponential family with statistics x, x^2 and exp(-x^2)."""
    return p[0] * x - (1 + p[1]) * x**2 + p[2] * (-(x**2)).exp()


@pytest.mark.calibration
@pytest.mark.parametrize("loss", [ScoreMatching(natural_density), KernelSteinDiscrepancy(score_of(natural_density))])
def test_natural_parameters_give_normal_posteriors(loss):
    x, prior = double(-1.0, 0.0, 0.3, 2.0, 1.1), dist.Normal(torch.zeros(3), 0.5).to_event(1)
    posterior = GibbsPosterior(prior, loss, x, weight=0.8)
    exact = gaussian_posterior(posterior)
    points = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    close(posterior.log_density(points), exact.distribution.log_prob(points) + exact.log_normalizer, 1e-9)


# -- draws agree --------------------------------------------------------------------------------------------


def moment_scores(draws, law):
    """z of mean and second moment of whitened draws (chains, draws, d), from means of batches of 30."""
    root = torch.linalg.cholesky(law.covariance)
    white = torch.linalg.solve_triangular(root, (draws - law.mean).mT, upper=False)
    scores = []
    for values in (white, white**2 - 1):
        means = values.unflatten(-1, (-1, 30)).mean(-1).transpose(0, 1).flatten(1)
        scores.append(means.mean(-1) / (means.std(-1) / means.shape[1] ** 0.5))
    return torch.cat(scores)


@pytest.mark.long
@pytest.mark.parametrize(
    ("prior", "loss", "data", "weight"),
    [
        (dist.Normal(0.0, 1.0), losses.HalfSquared(), double(1.0, 2.0, 4.0), 0.5),
        (dist.Normal(0.0, 1.0), STEIN, double(-1.0, 0.0, 2.0), 1.0),
        (
            dist.Normal(torch.zeros(3), 0.5).to_event(1),
            ScoreMatching(natural_density),
            double(-1.0, 0.0, 0.3, 2.0, 1.1),
            0.8,
        ),
    ],
    ids=["squared", "Stein", "score matching"],
)
def test_draws_have_these_moments(prior, loss, data, weight, limit):
    posterior = GibbsPosterior(prior, loss, data, weight=weight, compile=False)
    draws = bk.sample(posterior, num_chains=4, num_warmup=200, num_samples=600, seed=1).unconstrained
    exact, other = gaussian_posterior(posterior), gaussian_posterior(posterior.with_weight(weight / 2))
    assert moment_scores(draws, exact).abs().max() < limit(2 * posterior.dim)
    assert moment_scores(draws, other).abs().max() > limit(2 * posterior.dim)


# -- coins --------------------------------------------------------------------------------------------------


def test_beta_power_posterior():
    y = double(1.0, 1.0, 0.0, 1.0)
    exact = beta_posterior(dist.Beta(2.0, 3.0), y, weight=0.4)
    assert exact.distribution.mean.item() == pytest.approx((2 + 1.2) / (5 + 1.6), rel=1e-12)
    close(exact.concentration1, torch.tensor(3.2, dtype=torch.float64))
    close(exact.concentration0, torch.tensor(3.4, dtype=torch.float64))
    close(beta_posterior(dist.Beta(1.0, 1.0), y).log_normalizer, torch.tensor(1 / 20, dtype=torch.float64).log())
    grid = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    log_joint = dist.Beta(double(2.0)[0], 3.0).log_prob(grid) + 0.4 * (3 * grid.log() + (1 - grid).log())
    close(exact.log_normalizer, log_joint.logsumexp(0) - math.log(200_000), 1e-8)


def test_beta_posterior_is_that_of_the_loss():
    y, prior = double(1.0, 1.0, 0.0, 1.0), dist.Beta(double(2.0)[0], double(3.0)[0])
    posterior = GibbsPosterior(prior, lambda p, y: -dist.Bernoulli(p).log_prob(y), y, weight=0.4)
    exact = beta_posterior(prior, y, weight=0.4)
    for u in double(-1.0, 0.3, 2.0)[:, None]:
        p = u.sigmoid()
        jacobian = (p * (1 - p)).log()
        close(posterior.log_density(u), (exact.distribution.log_prob(p) + exact.log_normalizer + jacobian)[0])


def test_weights_of_coins_are_repeated_data():
    y, counts = double(1.0, 0.0, 1.0), double(2.0, 3.0, 0.0)
    weighted = beta_posterior(dist.Beta(1.0, 2.0), y, 0.7, counts)
    repeated = beta_posterior(dist.Beta(1.0, 2.0), y.repeat_interleave(counts.long()), 0.7)
    assert weighted == repeated
    assert beta_posterior(dist.Beta(1.0, 2.0), torch.tensor([1, 0])).concentration1 == 2


# -- refusals -----------------------------------------------------------------------------------------------


@pytest.mark.calibration
@pytest.mark.parametrize(
    "loss",
    [
        losses.Absolute(),
        losses.SmoothAbsolute(width=0.5),
        BetaDivergence(0.3, lambda mean: dist.Normal(mean, 1.0)),
        ScoreMatching(lambda p, x: -(p**2) * x**2),
        lambda mean, x: torch.nn.functional.huber_loss(mean.expand_as(x), x, reduction="none", delta=30.0),
    ],
    ids=["absolute", "smooth", "beta", "not natural", "Huber"],
)
def test_other_losses_are_refused(loss):
    posterior = GibbsPosterior(dist.Normal(0.0, 1.0), loss, double(1.0, 2.0, 4.0))
    with pytest.raises(ModelError, match=r"the loss \w+ is not quadratic"):
        gaussian_posterior(posterior)


def test_other_priors_are_refused():
    x = double(1.0, 2.0, 4.0)
    for prior in (dist.StudentT(5.0, 0.0, 1.0), dist.Gamma(2.0, 1.0)):
        with pytest.raises(ModelError, match="minus the log prior is not quadratic"):
            gaussian_posterior(GibbsPosterior(prior, losses.HalfSquared(), x))


class Unguarded(GibbsPosterior):
    """A posterior that is made without a look at the loss along flat directions."""

    def _refuse_recession(self, seed):
        pass


def test_improper_posteriors_are_refused():
    x = torch.ones(3, 2, dtype=torch.float64)
    posterior = Unguarded(Flat((2,)), losses.HalfSquared(losses.linear), (x, double(1.0, 2.0, 4.0)))
    with pytest.raises(ImproperPosteriorError, match="do not grow in every direction"):
        gaussian_posterior(posterior)


def test_other_coins_are_refused():
    prior = dist.Beta(1.0, 1.0)
    with pytest.raises(DataError, match="unlike datum 1"):
        beta_posterior(prior, double(1.0, 0.5))
    with pytest.raises(DataError, match="zeros and ones"):
        beta_posterior(prior, torch.ones(2, 2))
    with pytest.raises(SettingsError, match="weight"):
        beta_posterior(prior, double(1.0), weight=-1.0)
    for wrong in (dist.Normal(0.0, 1.0), dist.Beta(torch.ones(2), 1.0)):
        with pytest.raises(SettingsError, match="prior must be Beta"):
            beta_posterior(wrong, double(1.0))


@pytest.mark.parametrize("outcomes", [torch.tensor([1, 1, 0]), torch.tensor([True, True, False])])
def test_whole_number_coins_keep_the_priors_precision(outcomes):
    found = beta_posterior(dist.Beta(double(1.1)[0], double(1.0)[0]), outcomes)
    assert found.concentration1.dtype == torch.float64 and found.concentration1 == 3.1
    weighted = beta_posterior(dist.Beta(double(1.1)[0], double(1.0)[0]), outcomes, weights=torch.tensor([1, 1, 1]))
    assert weighted.concentration1 == found.concentration1 and weighted.concentration1.dtype == torch.float64


def test_weights_of_coins_are_checked():
    prior, coins = dist.Beta(1.0, 1.0), double(1.0, 0.0)
    for weights in (double(1.0, -0.5), double(1.0, math.nan)):
        with pytest.raises(DataError, match="datum 1"):
            beta_posterior(prior, coins, weights=weights)
    with pytest.raises(ShapeError, match=r"\(2,\), not \(3,\)"):
        beta_posterior(prior, coins, weights=double(1.0, 1.0, 1.0))
