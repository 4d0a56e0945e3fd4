"""Maxima of the evidence: closed forms and quadrature, edges, several maxima, and what the result says."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm, poisson
from sklearn.datasets import load_diabetes
from sklearn.linear_model import BayesianRidge

import bayeskit as bk
from bayeskit._core.randomness import new_generator
from bayeskit.errors import ModelError, SettingsError, UnknownNameError
from bayeskit.inference.evidence import maximize
from bayeskit.inference.evidence._empirical_bayes import LocalMaximum, MaximizedEvidence

DOUBLE = torch.float64
EFFECTS = torch.tensor([28.0, 8, -3, 7, -1, 1, 18, 12], dtype=DOUBLE)
ERRORS = torch.tensor([15.0, 10, 16, 11, 9, 11, 10, 18], dtype=DOUBLE)


def schools(y, s):
    mean = pyro.sample("mean", dist.Normal(0.0, 20.0))
    spread = pyro.sample("spread", dist.HalfCauchy(5.0))
    with pyro.plate("schools", len(y)):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(effect, s), obs=y)


def of_schools(u, y, s):
    """Log evidence of mean and log spread."""
    return dist.Normal(u[0], (s.square() + (2 * u[1]).exp()).sqrt()).log_prob(y).sum()


def maximum(function, start):
    """Return the maximum of a function of a vector, the value, and the inverse of the negative Hessian there."""

    def loss(u):
        leaf = torch.tensor(u, dtype=DOUBLE, requires_grad=True)
        value = -function(leaf)
        return value.item(), torch.autograd.grad(value, leaf)[0].numpy()

    found = minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-10})
    u = torch.tensor(found.x, dtype=DOUBLE)
    hessian = torch.autograd.functional.hessian(function, u)
    u = u - torch.linalg.solve(hessian, torch.autograd.functional.jacobian(function, u))  # to the last digits
    return u, float(function(u)), torch.linalg.inv(-torch.autograd.functional.hessian(function, u))


def close(a, b, within=1e-6):
    return bool(torch.allclose(torch.as_tensor(a).to(DOUBLE), torch.as_tensor(b).to(DOUBLE), rtol=within, atol=within))


@pytest.mark.long
def test_hierarchy_of_normals_with_its_standard_errors():
    y = 3 * EFFECTS
    u, height, covariance = maximum(lambda u: of_schools(u, y, ERRORS), [20.0, 3.0])
    target = bk.Target.from_pyro(schools, y, ERRORS)
    z = maximize(target, over=["mean", "spread"])
    assert z.trusted and z.integrated_out == ("effect",)
    assert abs(z.log_evidence - height) < 1e-9 and z.height == pytest.approx(z.log_evidence, abs=1e-9)
    assert close(z.position, u) and close(z.covariance, covariance, 1e-5)
    assert close(z.values["mean"], u[0]) and close(z.values["spread"], u[1].exp())
    assert close(z.standard_errors["mean"], covariance[0, 0].sqrt(), 1e-5)
    assert close(z.standard_errors["spread"], u[1].exp() * covariance[1, 1].sqrt(), 1e-5)
    assert (z.num_starts, z.num_reached, z.other_maxima) == (8, 8, ())
    # A target with the other sites integrated out already, another seed, and only one search find the same.
    same = maximize(bk.marginalize(target, ["effect"]), over=["spread", "mean"], num_starts=1, seed=3)
    assert same.trusted and close(same.position, z.position) and close(same.covariance, z.covariance, 1e-5)


@pytest.mark.calibration
def test_one_site_is_estimated_and_two_are_integrated_out():
    y = 3 * EFFECTS

    def function(u):
        covariance = (ERRORS.square() + (2 * u[0]).exp()).diag() + 400
        return dist.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)

    u, height, covariance = maximum(function, [3.0])
    marginal = bk.marginalize(bk.Target.from_pyro(schools, y, ERRORS), ["effect"])
    for target in (marginal, marginal.whole):
        z = maximize(target, over="spread")
        assert z.trusted and z.integrated_out == ("mean", "effect")
        assert abs(z.log_evidence - height) < 1e-9
        assert close(z.position, u) and close(z.covariance, covariance, 1e-5)


@pytest.mark.calibration
def test_with_the_prior_of_the_hyperparameters():
    def function(u):
        prior = (
            dist.Normal(torch.zeros_like(u[0]), 20.0).log_prob(u[0])
            + dist.HalfCauchy(5.0 * torch.ones_like(u[1])).log_prob(u[1].exp())
            + u[1]
        )
        return prior + of_schools(u, EFFECTS, ERRORS)

    u, height, covariance = maximum(function, [7.0, 1.0])
    z = maximize(bk.Target.from_pyro(schools, EFFECTS, ERRORS), over=["mean", "spread"], prior=True)
    assert abs(z.height - height) < 1e-9 and close(z.position, u) and close(z.covariance, covariance, 1e-5)
    assert abs(z.log_evidence - float(of_schools(u, EFFECTS, ERRORS))) < 1e-6
    assert z.method == "type-II maximum a posteriori"


def test_all_sites_are_estimated():
    y = EFFECTS

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 20.0))
        sd = pyro.sample("sd", dist.HalfNormal(20.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, sd), obs=y)

    z = maximize(bk.Target.from_pyro(model, y), over=["mean", "sd"])
    sd = float(y.std(correction=0))
    assert z.integrated_out == () and z.method == "type-II maximum likelihood"
    assert close(z.values["mean"], y.mean()) and close(z.values["sd"], sd)
    assert close(z.standard_errors["mean"], sd / math.sqrt(8), 1e-5)
    assert close(z.standard_errors["sd"], sd / math.sqrt(16), 1e-5)


def regression(x, y, relevance=False):
    size = (x.shape[1],) if relevance else ()
    scale = pyro.sample("scale", dist.HalfNormal(torch.ones(size, dtype=x.dtype)).to_event(len(size)))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    b = pyro.sample("b", dist.Normal(torch.zeros_like(x[0]), scale).to_event(1))
    with pyro.plate("patients", len(x)):
        pyro.sample("y", dist.Normal(x @ b, noise), obs=y)


def diabetes():
    x, y = load_diabetes(return_X_y=True)
    return x / x.std(0), (y - y.mean()) / y.std()


def of_regression(u, x, y):
    """Log evidence of log scales and log noise."""
    covariance = (x * (2 * u[:-1]).exp()) @ x.T + (2 * u[-1]).exp() * torch.eye(len(x), dtype=x.dtype)
    return dist.MultivariateNormal(torch.zeros_like(y), covariance).log_prob(y)


@pytest.mark.calibration
def test_ridge_regression_against_another_package():
    x, y = diabetes()
    none = dict.fromkeys(("alpha_1", "alpha_2", "lambda_1", "lambda_2"), 0.0)
    peer = BayesianRidge(fit_intercept=False, tol=1e-12, max_iter=100_000, compute_score=True, **none).fit(x, y)
    x, y = torch.tensor(x), torch.tensor(y)
    z = maximize(bk.Target.from_pyro(regression, x, y), over=["scale", "noise"], num_starts=4)
    assert z.trusted and z.num_reached == 4
    assert close(z.values["scale"], peer.lambda_**-0.5) and close(z.values["noise"], peer.alpha_**-0.5)
    assert abs(z.log_evidence - peer.scores_[-1]) < 1e-7
    u, height, covariance = maximum(lambda u: of_regression(u, x, y), [-2.0, -0.3])
    assert abs(z.log_evidence - height) < 1e-8 and close(z.covariance, covariance, 1e-5)
    errors = torch.stack([z.standard_errors[name] for name in ("scale", "noise")])
    assert close(errors, u.exp() * covariance.diagonal().sqrt(), 1e-5)


@pytest.mark.calibration
def test_coefficients_without_relevance_are_named():
    x, y = (torch.tensor(a) for a in diabetes())
    x = x[:, [0, 1, 2, 3]]  # age is of no use beside sex, weight and blood pressure
    z = maximize(bk.Target.from_pyro(regression, x, y, True), over=["scale", "noise"], num_starts=2)
    u, height, _ = maximum(lambda u: of_regression(u, x[:, 1:], y), [-2.0, -1, -1, -0.3])
    assert not z.trusted and [("by scale[0]:" in why) for why in z.warnings] == [True]
    assert abs(z.log_evidence - height) < 1e-6 and close(z.position[1:], u, 1e-3)
    # What is so is seen in the closed form: with a scale of age, the evidence falls.
    heights = [of_regression(torch.cat([torch.tensor([a], dtype=DOUBLE), u]), x, y) for a in (-8.0, -4.0, -3.0, -2.0)]
    assert heights == sorted(heights, reverse=True)


@pytest.mark.long
def test_counts_with_normal_effects_against_quadrature():
    y = [52.0, 61, 140, 33, 88, 70, 45, 97, 120, 66]

    def model(y):
        level = pyro.sample("level", dist.Normal(4.0, 1.0))
        spread = pyro.sample("spread", dist.HalfNormal(1.0))
        with pyro.plate("groups", len(y)):
            effect = pyro.sample("effect", dist.Normal(level, spread))
            pyro.sample("y", dist.Poisson(effect.exp()), obs=y)

    z = maximize(bk.Target.from_pyro(model, torch.tensor(y, dtype=DOUBLE)), over=["level", "spread"])
    assert z.trusted

    def exactly(u):
        level, spread = float(u[0]), math.exp(float(u[1]))

        def one(count):
            def density(effect):
                return norm.pdf(effect, level, spread) * poisson.pmf(count, math.exp(effect))

            width, middle = 6 / math.sqrt(count + spread**-2), math.log(count)
            low, high = min(middle, level) - width, max(middle, level) + width
            return math.log(quad(density, low, high, epsabs=0, epsrel=1e-12, limit=200)[0])

        return sum(map(one, y))

    assert abs(z.log_evidence - exactly(z.position)) < 0.01  # ten errors of Laplace's approximation, each about 1 / 12n
    step = 1e-3 * z.covariance.diagonal().sqrt().diag()
    slope = torch.tensor([(exactly(z.position + e) - exactly(z.position - e)) / (2 * float(e.sum())) for e in step])
    gain = 0.5 * float(slope.to(DOUBLE) @ z.covariance @ slope.to(DOUBLE))
    assert gain < 1e-4  # the maximum of the exact evidence is within some hundredths of a standard error


@pytest.mark.long
def test_standard_errors_are_those_of_repeated_data(calibrated):
    # A spread below the errors would have its maximum at zero in some of the data sets, without a standard error.
    truth = torch.tensor([5.0, math.log(20.0)], dtype=DOUBLE)
    generator, s = new_generator(0, stream="test of empirical Bayes"), ERRORS.repeat(12)
    scores = []
    for _ in range(16):
        y = truth[0] + (s**2 + 400).sqrt() * torch.randn(len(s), generator=generator, dtype=DOUBLE)
        z = maximize(bk.Target.from_pyro(schools, y, s, compile=False), over=["mean", "spread"], num_starts=1)
        scores.append((z.position - truth) / z.covariance.diagonal().sqrt())
    mean, spread = torch.stack(scores).T
    assert calibrated(mean, off=0.1)  # the spread is estimated, too
    # With 96 groups, the maximum of the likelihood is low by a share of its error, and not quite normal.
    assert calibrated(spread, off=0.2, bias=0.3)


@pytest.mark.calibration
def test_eight_schools_have_no_interior_maximum():
    weights = ERRORS.square().reciprocal()
    pooled = float((weights * EFFECTS).sum() / weights.sum())
    at_zero = float(dist.Normal(pooled, ERRORS).log_prob(EFFECTS).sum())
    target = bk.Target.from_pyro(schools, EFFECTS, ERRORS)
    for over in (["mean", "spread"], ["spread"]):
        z = maximize(target, over=over)
        assert not z.trusted and len(z.warnings) == 1 and z.num_reached == 8
        assert "no interior maximum by spread" in z.warnings[0] and "prior=True" in z.warnings[0]
        assert bool(z.covariance.isnan().all()) and bool(z.standard_errors["spread"].isnan())
        assert float(z.values["spread"]) < 0.01
        if "mean" in over:
            assert abs(z.log_evidence - at_zero) < 1e-6 and abs(float(z.values["mean"]) - pooled) < 1e-3


@pytest.mark.calibration
def test_a_maximum_that_is_flat_on_one_side_is_no_interval():
    z = maximize(bk.Target.from_pyro(schools, 1.5 * EFFECTS, ERRORS), over=["mean", "spread"])
    u, height, _ = maximum(lambda u: of_schools(u, 1.5 * EFFECTS, ERRORS), [11.0, 1.8])
    assert close(z.position, u) and abs(z.log_evidence - height) < 1e-9
    assert len(z.warnings) == 1 and "the standard error of spread makes no interval" in z.warnings[0]
    assert bool(z.covariance.isfinite().all())


@pytest.mark.calibration
def test_evidence_without_a_bound():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
        sd = pyro.sample("sd", dist.HalfNormal(3.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, sd), obs=y)

    z = maximize(bk.Target.from_pyro(model, torch.full((4,), 1.5, dtype=DOUBLE)), over=["mean", "sd"])
    assert not z.trusted and any("no interior maximum by sd" in why for why in z.warnings)


def two_roots(y):
    """Two numbers, of which one knows the square of the hyperparameter and the other hints at its sign."""
    root = pyro.sample("root", dist.Normal(0.0, 3.0))
    noise = pyro.sample("noise", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
    pyro.sample("y", dist.Normal(torch.stack([root**2, 0.3 * root]) + noise, 1.0).to_event(1), obs=y)


@pytest.mark.calibration
@pytest.mark.parametrize(("hint", "trusted"), [(0.4, False), (6.0, True)])
def test_two_maxima(hint, trusted):
    y = torch.tensor([6.0, hint], dtype=DOUBLE)

    def function(u):
        return dist.Normal(torch.stack([u[0] ** 2, 0.3 * u[0]]), math.sqrt(2)).log_prob(y).sum()

    (best, high, covariance), (other, low, _) = maximum(function, [2.5]), maximum(function, [-2.5])
    z = maximize(bk.Target.from_pyro(two_roots, y), over="root", num_starts=20)
    assert close(z.position, best) and abs(z.log_evidence - high) < 1e-9 and close(z.covariance, covariance, 1e-5)
    (second,) = z.other_maxima
    assert isinstance(second, LocalMaximum) and close(second.values["root"], other[0])
    assert abs(second.height - low) < 1e-9
    assert z.num_reached + second.num_reached == z.num_starts
    assert z.trusted == trusted and ("is lower by" in " ".join(z.warnings)) != trusted


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:the density of 'effect' has several modes")
@pytest.mark.parametrize(("report", "smooth"), [(28.0, True), (70.0, False), (80.0, False), (120.0, True)])
def test_a_jump_of_laplaces_approximation_is_seen(report, smooth):
    """Given the mean, the effect of a school that is unlike the others has two modes; far away, only one."""

    def model(y, s):
        mean = pyro.sample("mean", dist.Normal(0.0, 20.0))
        with pyro.plate("schools", len(y)):
            effect = pyro.sample("effect", dist.StudentT(4.0, mean, 5.0))
            pyro.sample("y", dist.Normal(effect, s), obs=y)

    y = torch.cat([torch.tensor([report], dtype=DOUBLE), EFFECTS[1:]])

    def exactly(mean):
        x = torch.linspace(-200, 300, 20001, dtype=DOUBLE)[:, None]  # the trapezoidal rule is exact for such functions
        log_density = dist.Normal(x, ERRORS).log_prob(y) + dist.StudentT(torch.full_like(x, 4.0), mean, 5.0).log_prob(x)
        return float((log_density.logsumexp(0) + math.log(500 / 20000)).sum())

    exact = max(torch.linspace(0, 20, 401, dtype=DOUBLE).tolist(), key=exactly)
    for seed in range(3):
        z = maximize(bk.Target.from_pyro(model, y, ERRORS), over="mean", num_starts=4, seed=seed)
        off = abs(float(z.values["mean"]) - exact) / 4.5  # the standard error of the mean with normal effects
        if smooth:
            assert z.trusted and off < 0.1
        else:
            assert not z.trusted and any("another mode of the other sites" in why for why in z.warnings)


@pytest.mark.long
def test_seeds_repeat_a_search():
    target = bk.Target.from_pyro(two_roots, torch.tensor([6.0, 0.4], dtype=DOUBLE))
    one, same, other = (maximize(target, over="root", num_starts=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.position, same.position) and one.num_evaluations == same.num_evaluations
    assert one.num_evaluations != other.num_evaluations


@pytest.mark.calibration
def test_single_precision():
    y, s = (3 * EFFECTS).float(), ERRORS.float()
    u, height, covariance = maximum(lambda u: of_schools(u, 3 * EFFECTS, ERRORS), [20.0, 3.0])
    z = maximize(bk.Target.from_pyro(schools, y, s), over=["mean", "spread"])
    assert z.position.dtype == torch.float32 and z.trusted
    assert close(z.position, u, 1e-3) and close(z.covariance, covariance, 1e-2) and abs(z.log_evidence - height) < 1e-3


def test_what_cannot_be_maximised():
    target = bk.Target.from_pyro(schools, EFFECTS, ERRORS)
    with pytest.raises(UnknownNameError, match="spred"):
        maximize(target, over=["spred"])
    with pytest.raises(SettingsError, match="over is empty"):
        maximize(target, over=[])
    with pytest.raises(SettingsError, match="num_starts"):
        maximize(target, over=["spread"], num_starts=0)
    with pytest.raises(ModelError, match="depends on the sites"):
        maximize(target, over=["effect"])


@pytest.mark.long
def test_the_result_says_what_it_is():
    z = maximize(bk.Target.from_pyro(schools, 3 * EFFECTS, ERRORS), over=["mean", "spread"])
    assert isinstance(z, MaximizedEvidence)
    assert str(z).startswith("type-II maximum likelihood: log evidence -38.2577, reached by 8 of 8 searches\n  mean = ")
    table = z.to_pandas()
    assert list(table["name"]) == ["mean", "spread"] and np.allclose(table["value"], [25.52, 25.5], atol=0.5)
    assert "Hyperparameters" in z._repr_html_() and "not trusted" not in z._repr_html_()
    vector = maximize(
        bk.Target.from_pyro(regression, *(torch.tensor(a) for a in diabetes()), True),
        over=["scale", "noise"],
        num_starts=1,
    )
    assert list(vector.to_pandas()["name"]) == [*(f"scale[{i}]" for i in range(10)), "noise"]
    assert "not trusted" in vector._repr_html_() and "NOT TRUSTED" in str(vector)
