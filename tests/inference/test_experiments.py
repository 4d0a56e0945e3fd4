"""Information of experiments: closed forms and quadratures between both bounds, its limit, gradients by the design."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError, UnknownNameError, UnsupportedSiteError
from bayeskit.inference._experiments import best_design, information, information_gradient

DOUBLE = torch.float64
CORRELATION = torch.tensor(0.9, dtype=DOUBLE)
ROWS = torch.tensor([[1.0, 0.2], [-0.5, 1.0], [2.0, 0.0], [0.3, -1.4]], dtype=DOUBLE)
QUESTIONS = torch.tensor([0.5, 1.0, -1.0], dtype=DOUBLE)


def pair(rho, y=None):
    theta = pyro.sample("theta", dist.Normal(torch.zeros_like(rho), 1.0))
    pyro.sample("y", dist.Normal(rho * theta, (1 - rho * rho).sqrt()), obs=y)


def regression(x, offset=False, y=None):
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(x.shape[1]), 1.0).to_event(1))
    shift = pyro.sample("shift", dist.Normal(x.new_zeros(()), 2.0)) if offset else 0.0
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(x @ weights + shift, 0.5), obs=y)


def log_determinant(x, noise):
    return 0.5 * (torch.logdet(noise + x @ x.T) - torch.logdet(noise))


def hierarchy(x):
    mean = pyro.sample("mean", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("groups", len(x)):
        effect = pyro.sample("effect", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(effect, 1.0))


def answers(x):
    ability = pyro.sample("ability", dist.Normal(x.new_zeros(()), 2.0))
    with pyro.plate("questions", len(x)):
        pyro.sample("y", dist.Bernoulli(logits=x * ability))


def of_answers(x):
    """Information of the ability, by a sum over all answers and a quadrature."""
    grid = torch.linspace(-20, 20, 20001, dtype=DOUBLE)
    weights = dist.Normal(0.0, 2.0).log_prob(grid).exp() * (grid[1] - grid[0])
    all_answers = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=DOUBLE)] * len(x))
    log_p = dist.Bernoulli(logits=(grid[:, None] * x)[:, None]).log_prob(all_answers).sum(-1)
    marginal = (weights[:, None] * log_p.exp()).sum(0)
    return (weights[:, None] * log_p.exp() * (log_p - marginal.log())).sum()


def encloses(found, truth, limit):
    lower, upper = (found.lower - truth) / found.lower_error, (found.upper - truth) / found.upper_error
    return found.trusted and found.gap < 0.01 and lower < limit(2) and upper > -limit(2)


@pytest.mark.calibration
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_bivariate_normal(dtype, limit):
    found = information(pair, CORRELATION.to(dtype), of=["theta"], about=["y"])
    assert encloses(found, 0.830366, limit) and found.value == (found.lower + found.upper) / 2
    assert abs(found.value - 0.830366) < limit() * found.standard_error and found.standard_error < 0.005
    assert "bounds" in str(found)


@pytest.mark.calibration
def test_linear_regression_with_data_or_without(limit):
    truth = float(log_determinant(ROWS, 0.25 * torch.eye(4, dtype=DOUBLE)))
    found = information(regression, ROWS, of=["weights"], about=["y"])
    given = information(regression, ROWS, False, torch.full((4,), 100.0, dtype=DOUBLE), of=["weights"], about=["y"])
    assert encloses(found, truth, limit) and encloses(given, truth, limit)
    assert abs(found.value - truth) < limit() * found.standard_error and found.standard_error < 0.01


def test_discrete_data(limit):
    found = information(answers, QUESTIONS, of=["ability"], about=["y"])
    assert encloses(found, float(of_answers(QUESTIONS)), limit)
    assert abs(found.value - float(of_answers(QUESTIONS))) < limit() * found.standard_error


@pytest.mark.calibration
@pytest.mark.parametrize("proposal", ["fitted", "prior"])
def test_other_sites_are_integrated_out(proposal, limit):
    noise = 0.25 * torch.eye(4, dtype=DOUBLE) + 4 * torch.ones(4, 4, dtype=DOUBLE)
    truth = float(log_determinant(ROWS[:, :1], noise))
    numbers = {} if proposal == "fitted" else {"num_outer": 300, "num_inner": 1000}
    found = information(regression, ROWS[:, :1], True, of=["weights"], about=["y"], proposal=proposal, **numbers)
    assert found.lower - limit(2) * found.lower_error < truth < found.upper + limit(2) * found.upper_error
    assert found.trusted and found.gap < 0.01 or proposal == "prior"


@pytest.mark.calibration
def test_sites_above_and_below_others(limit):
    x, ones, one = torch.zeros(3, dtype=DOUBLE), torch.ones(3, 3, dtype=DOUBLE), torch.eye(3, dtype=DOUBLE)
    of_effects = 0.5 * float(torch.logdet(ones + 2 * one))
    of_mean = of_effects - 0.5 * float(torch.logdet(2 * one))
    assert encloses(information(hierarchy, x, of=["effect"], about=["y"]), of_effects, limit)
    assert encloses(information(hierarchy, x, of=["mean"], about=["y"]), of_mean, limit)
    both = information(hierarchy, x, of=["mean", "effect"], about=["y"])
    assert encloses(both, of_effects, limit)  # the mean tells nothing more than the effects


@pytest.mark.calibration
def test_summed_out_sites_and_unrelated_data(limit):
    def marked(x):
        theta = pyro.sample("theta", dist.Normal(x, 1.0))
        side = pyro.sample("side", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        pyro.sample("y", dist.Normal(theta + 3 * side, 0.5))

    def mixture(x):
        theta = pyro.sample("theta", dist.Normal(x, 1.0))
        parts = dist.Normal(theta.unsqueeze(-1) + torch.tensor([0.0, 3.0], dtype=x.dtype), 0.5)
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(torch.ones(2, dtype=x.dtype)), parts))

    def unrelated(x):
        pyro.sample("theta", dist.Normal(x, 1.0))
        pyro.sample("y", dist.Normal(x, 1.0))

    x = torch.zeros((), dtype=DOUBLE)
    one, other = (information(m, x, of=["theta"], about=["y"], num_inner=200) for m in (marked, mixture))
    assert one.trusted and abs(one.value - other.value) < limit() * math.hypot(one.standard_error, other.standard_error)
    y, grid = torch.linspace(-6, 9, 3001, dtype=DOUBLE), torch.linspace(-6, 6, 1201, dtype=DOUBLE)
    density = 0.5 * sum(dist.Normal(grid + shift, 0.5).log_prob(y[:, None]).exp() for shift in (0.0, 3.0))
    weights = dist.Normal(0.0, 1.0).log_prob(grid).exp() * (grid[1] - grid[0]) * (y[1] - y[0])
    marginal = density @ weights / (y[1] - y[0])
    truth = float((weights * torch.xlogy(density, density / marginal[:, None].clamp(min=1e-300))).sum())
    assert encloses(one, truth, limit)
    nothing = information(unrelated, x, of=["theta"], about=["y"])
    assert abs(nothing.value) < 0.01 and nothing.trusted


def test_the_contrastive_bound_has_a_limit():
    x = torch.full((1, 1), 500.0, dtype=DOUBLE)
    truth = float(log_determinant(x, 0.25 * torch.eye(1, dtype=DOUBLE)))
    from_prior = information(regression, x, of=["weights"], about=["y"], proposal="prior", num_inner=15, num_outer=500)
    assert (
        abs(from_prior.limit - math.log(16)) < 1e-9 and from_prior.lower < from_prior.limit < truth < from_prior.upper
    )
    assert not from_prior.trusted and "near its limit" in from_prior.warnings[0] and "apart" in from_prior.warnings[1]
    fitted = information(regression, x, of=["weights"], about=["y"], num_inner=15)
    assert fitted.trusted and abs(fitted.value - truth) < 0.05 and fitted.limit > truth


@pytest.mark.long
def test_errors_are_of_the_right_size(calibrated):
    def score(seed):
        found = information(answers, QUESTIONS, of=["ability"], about=["y"], num_outer=500, seed=seed)
        return (found.value - float(of_answers(QUESTIONS))) / found.standard_error

    assert calibrated([score(seed) for seed in range(30)], off=0.1, bias=0.1)


@pytest.mark.calibration
def test_gradients_by_the_design(limit):
    found = information_gradient(pair, CORRELATION, of=["theta"], about=["y"])
    assert abs(float(found.gradient) - 4.736842) < limit() * float(found.standard_error) < 0.3
    assert found.information.trusted
    exact = torch.func.grad(lambda x: log_determinant(x, 0.25 * torch.eye(4, dtype=DOUBLE)))(ROWS)
    found = information_gradient(regression, ROWS, of=["weights"], about=["y"])
    assert bool(((found.gradient - exact).abs() < limit(8) * found.standard_error).all())
    assert float(found.standard_error.max()) < 0.03
    noise = 0.25 * torch.eye(4, dtype=DOUBLE) + 4 * torch.ones(4, 4, dtype=DOUBLE)
    exact = torch.func.grad(lambda x: log_determinant(x, noise))(ROWS)
    found = information_gradient(regression, ROWS, True, of=["weights"], about=["y"])
    assert bool(((found.gradient - exact).abs() < limit(8) * found.standard_error).all())


@pytest.mark.calibration
def test_gradients_of_discrete_data(limit):
    exact = torch.func.grad(of_answers)(QUESTIONS)
    found = information_gradient(answers, QUESTIONS, of=["ability"], about=["y"])
    assert bool(((found.gradient - exact).abs() < limit(3) * found.standard_error).all())
    assert float(found.standard_error.max()) < 0.02


@pytest.mark.long
def test_the_best_design_is_found():
    def dose(x):
        effect = pyro.sample("effect", dist.Normal(torch.zeros_like(x), 1.0))
        pyro.sample("y", dist.Normal(3 * effect * x * (-0.5 * x * x).exp(), 0.5))

    start = torch.tensor(0.3, dtype=DOUBLE)
    found = best_design(dose, start, of=["effect"], about=["y"], num_steps=60)
    assert abs(float(found.design) - 1) < 0.05 and found.path.shape == (60,)
    truth = 0.5 * math.log(1 + 36 * math.exp(-1))
    assert abs(found.information.value - truth) < 5 * found.information.standard_error
    assert found.start.value < found.information.value - 0.2 and start == 0.3


@pytest.mark.parametrize(
    ("sites", "error", "words"),
    [
        ({"of": ["thta"], "about": ["y"]}, UnknownNameError, "theta"),
        ({"of": ["theta"], "about": ["z"]}, UnknownNameError, "z"),
        ({"of": ["theta"], "about": ["theta"]}, SettingsError, "infinite"),
        ({"of": [], "about": ["y"]}, SettingsError, "of is empty"),
        ({"of": ["theta"], "about": ["y"], "num_outer": 1}, SettingsError, "num_outer"),
        ({"of": ["theta"], "about": ["y"], "proposal": "Prior"}, UnknownNameError, "did you mean 'prior'"),
    ],
)
def test_bad_sites_are_named(sites, error, words):
    with pytest.raises(error, match=words):
        information(pair, CORRELATION, **sites)


def test_models_without_an_answer_are_refused():
    def feedback(x):
        first = pyro.sample("first", dist.Normal(x, 1.0))
        pyro.sample("second", dist.Normal(first, 1.0))

    def earlier(x):
        theta = pyro.sample("theta", dist.Normal(x, 1.0))
        pyro.sample("past", dist.Normal(theta, 1.0), obs=x)
        pyro.sample("y", dist.Normal(theta, 1.0))

    def flat(x):
        theta = pyro.sample("theta", dist.ImproperUniform(dist.constraints.real, (), ()))
        pyro.sample("y", dist.Normal(theta + x, 1.0))

    def factor(x):
        theta = pyro.sample("theta", dist.Normal(x, 1.0))
        pyro.factor("y", -theta.square())

    x = torch.zeros((), dtype=DOUBLE)
    with pytest.raises(ModelError, match="exchange the two sets"):
        information(feedback, x, of=["second"], about=["first"])
    with pytest.raises(SettingsError, match="'past' is observed"):
        information(earlier, x, of=["theta"], about=["y"])
    with pytest.raises(SettingsError, match="improper"):
        information(flat, x, of=["theta"], about=["y"])
    with pytest.raises(UnsupportedSiteError, match="factor"):
        information(factor, x, of=["theta"], about=["y"])
    with pytest.raises(SettingsError, match="depends on other sites"):
        information(hierarchy, torch.zeros(2), of=["effect"], about=["y"], proposal="prior")
    with pytest.raises(ShapeError, match="real number"):
        information_gradient(pair, torch.tensor(1), of=["theta"], about=["y"])
    with pytest.raises(SettingsError, match="do not depend"):
        information_gradient(lambda d, x: pair(x), x, CORRELATION, of=["theta"], about=["y"], num_outer=100)
    with pytest.raises(SettingsError, match="within"):
        best_design(pair, CORRELATION, of=["theta"], about=["y"], within=(1.0, 0.0))


def test_one_site_may_be_given_by_its_name():
    one, several = (
        information(pair, CORRELATION, of=x, about=y, num_outer=100) for x, y in (("theta", "y"), (["theta"], ["y"]))
    )
    assert one.value == several.value


def test_data_that_are_not_finite_are_counted():
    def logarithm(x):
        theta = pyro.sample("theta", dist.Normal(x, 1.0))
        pyro.sample("y", dist.Normal((theta + 1.5).log(), 1.0, validate_args=False))

    with pytest.raises(DataError, match="in [0-9]+ of 500 experiments"):
        information(logarithm, torch.zeros((), dtype=DOUBLE), of="theta", about="y", num_outer=500)


def test_a_model_that_fails_before_its_data_says_why():
    def part(y):
        theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 10, subsample_size=3):
            pyro.sample("y", dist.Normal(theta, 1.0), obs=y)

    with pytest.raises(ModelError, match="subsamples"):
        information(part, torch.zeros(3), of="theta", about="y")


def window(x):
    theta = pyro.sample("theta", dist.Normal(torch.zeros_like(x), 1.0))
    pyro.sample("y", dist.Uniform(theta - x, theta + x))


@pytest.mark.long
def test_gradients_are_compared_with_differences():
    def step(x):
        theta = pyro.sample("theta", dist.Normal(torch.zeros_like(x), 1.0))
        pyro.sample("y", dist.Normal(torch.where(theta < x, x, 0 * x), 0.2))

    def scaled(x):
        theta = pyro.sample("theta", dist.Normal(torch.zeros_like(x), x))
        pyro.sample("y", dist.Normal(theta, 1.0))

    def bounded(x):
        theta = pyro.sample("theta", dist.Uniform(torch.zeros_like(x), x))
        pyro.sample("y", dist.Normal(theta, 1.0))

    one = torch.ones((), dtype=DOUBLE)
    for model in (window, step):  # exact gradients are -.751 and -.312, and those found about 0 and .09
        found = information_gradient(model, one, of="theta", about="y")
        assert found.information.trusted and not found.trusted and "along a random direction" in found.warnings[0]
    for model in (scaled, bounded):
        with pytest.raises(ModelError, match="prior depends on the first argument"):
            information_gradient(model, 2 * one, of="theta", about="y")
    assert information_gradient(answers, QUESTIONS, of="ability", about="y").trusted
    assert information_gradient(hierarchy_at, 1.5 * one, of="effect", about="y", seed=1).trusted


def hierarchy_at(x):
    mean = pyro.sample("mean", dist.Normal(torch.zeros_like(x), 1.0))
    with pyro.plate("groups", 4):
        effect = pyro.sample("effect", dist.Normal(mean, 1.0))
        pyro.sample("y", dist.Normal(effect * x, 1.0))


def slope(x):
    theta = pyro.sample("theta", dist.Normal(0.0, 1.0))
    pyro.sample("y", dist.Normal(theta * x.sum(), 1.0))


@pytest.mark.long
def test_a_design_that_was_still_getting_better_is_not_trusted():
    options = {"of": "theta", "about": "y", "num_outer": 100, "num_steps": 30}
    found = best_design(slope, torch.tensor(0.5, dtype=DOUBLE), within=(0.0, 100.0), **options)
    assert not found.trusted and "still rising" in found.warnings[0]
    found = best_design(slope, 1.5, within=(0.0, 2.0), **options)
    assert found.trusted and found.design == 2.0
    found = best_design(window, torch.ones((), dtype=DOUBLE), within=(0.5, 2.0), **options)
    assert not found.trusted and "support of the data" in found.warnings[0]


@pytest.mark.long
def test_designs_and_bounds_are_of_any_library():
    options = {"of": "theta", "about": "y", "num_outer": 50}
    for design in (1.5, [1.5], torch.tensor(1.5, dtype=DOUBLE).numpy()):
        assert information_gradient(slope, design, **options).gradient.shape == torch.as_tensor(design).shape
    for design in (None, "a", torch.tensor(math.nan)):
        with pytest.raises(DataError, match="design"):
            information_gradient(slope, design, **options)
    start = torch.tensor([0.5, 0.5], dtype=DOUBLE)
    found = best_design(slope, start, within=([0.0, 0.0], [0.7, 1.0]), num_steps=20, **options)
    assert torch.equal(found.path.amax(0), torch.tensor([0.7, 1.0], dtype=DOUBLE))
    for within in ((2.0,), 2.0, (math.nan, 1.0), ("a", "b"), ([0.0, 0.0, 0.0], 1.0), (0.0, [1.0, 0.0])):
        with pytest.raises(SettingsError, match="within"):
            best_design(slope, start, within=within, **options)
