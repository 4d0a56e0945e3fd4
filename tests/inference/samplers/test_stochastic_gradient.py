import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit.inference.samplers import _stochastic_gradient as sghmc
from bayeskit.inference.samplers import _stochastic_gradient as sgld
from bayeskit.inference.samplers._metric import Metric
from bayeskit.inference.samplers._minibatch import Epochs, IndependentRows, MinibatchTarget
from bayeskit.inference.samplers._stochastic_gradient import (
    SGHMC,
    SGLD,
    Polynomial,
    PreconditionedSGLD,
    sample_stochastic_gradient,
)

NUM_DATA, BATCH_SIZE, NUM_CHAINS = 40, 5, 4000
Y = 1 + torch.randn(NUM_DATA, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
# The posterior of the mean, and the variance of its gradient over minibatches drawn with replacement.
PRECISION = float(1 + NUM_DATA)
MEAN = float(Y.sum()) / PRECISION
NOISE = NUM_DATA**2 / BATCH_SIZE * float(Y.var(correction=0))


def normal_mean(y, batch_size):
    """Prior N(0, 1), observations N(mean, 1)."""
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])


@pytest.fixture(scope="module")
def target():
    return MinibatchTarget.from_pyro(normal_mean, Y, BATCH_SIZE, row_order=IndependentRows())


@pytest.fixture(scope="module")
def whole():
    return MinibatchTarget.from_pyro(normal_mean, Y, NUM_DATA)


@pytest.fixture(scope="module")
def epochs():
    return MinibatchTarget.from_pyro(normal_mean, Y, BATCH_SIZE)


def last_of(target, kernel, num_steps, seed=0, num_chains=NUM_CHAINS, initial=MEAN):
    """Return where independent chains are after ``num_steps`` steps from one point, ``(n, d)``."""
    start = torch.full((target.dim,), initial, dtype=torch.float64) if isinstance(initial, float) else initial
    draws = sample_stochastic_gradient(
        target, kernel, num_chains, num_steps - 1, 1, seed=seed, initial=start, progress=False
    )
    return draws.unconstrained[:, 0]


def z_score(values, truth):
    """Standardised error of the mean of independent ``values``, shape ``(n,)``."""
    return abs(float((values.mean() - truth) / (values.std() / math.sqrt(len(values)))))


def stationary_variance(kernel):
    if isinstance(kernel, SGLD):
        return float(kernel.stationary_variance(PRECISION, NOISE))
    return float(kernel.stationary_covariance(PRECISION, NOISE)[0, 0])


def scores(x, mean, variance):
    return [z_score(x, mean), z_score((x - mean).square(), variance)]


# -- the law of the draws, in closed form ---------------------------------------------------


@pytest.mark.calibration
@pytest.mark.parametrize("step_size", [0.02, 0.06])
def test_sgld_has_its_known_stationary_variance(target, whole, limit, step_size):
    kernel = SGLD(step_size)
    exact = {target: kernel.stationary_variance(PRECISION, NOISE), whole: kernel.stationary_variance(PRECISION)}
    found = [z for t, v in exact.items() for z in scores(last_of(t, kernel, 60)[:, 0], MEAN, float(v))]
    assert max(found) < limit(len(found)), found
    # The test is sharp enough to see the bias of the step, and of the minibatches.
    assert z_score((last_of(whole, kernel, 60)[:, 0] - MEAN).square(), 1 / PRECISION) > limit()
    assert z_score((last_of(target, kernel, 60)[:, 0] - MEAN).square(), float(exact[whole])) > limit()


def test_the_stationary_variance_of_sgld_solves_its_recursion():
    step, p, v = 0.03, 12.0, 50.0
    variance = SGLD(step).stationary_variance(p, v)
    assert abs(float((1 - step * p / 2) ** 2 * variance + step + step**2 / 4 * v - variance)) < 1e-15
    assert abs(float(SGLD(step).stationary_variance(p)) - (1 / p) / (1 - step * p / 4)) < 1e-15


@pytest.mark.parametrize("estimate", [0.0, 0.5, 1.0])
def test_sghmc_has_its_known_stationary_covariance(target, limit, estimate):
    kernel = SGHMC(0.03, friction=8.0, gradient_noise=estimate * NOISE)
    exact = kernel.stationary_covariance(PRECISION, NOISE)
    found = scores(last_of(target, kernel, 120)[:, 0], MEAN, float(exact[0, 0]))
    assert max(found) < limit(len(found)), found


def test_sghmc_keeps_its_stationary_covariance_from_step_to_step(target, limit):
    """Start in the stationary law; one step later all second moments are still the same."""
    kernel, generator = SGHMC(0.05, friction=5.0), torch.Generator().manual_seed(3)
    exact = kernel.stationary_covariance(PRECISION, NOISE)
    start = torch.randn(200_000, 2, generator=generator, dtype=torch.float64) @ torch.linalg.cholesky(exact).mT
    state = kernel.init(target, MEAN + start[:, :1], generator=generator)._replace(momentum=start[:, 1:])
    state, _ = kernel.step(target, state, generator=generator)
    x, p = state.position[:, 0] - MEAN, state.momentum[:, 0]
    found = [z_score(a * b, float(c)) for a, b, c in ((x, x, exact[0, 0]), (x, p, exact[0, 1]), (p, p, exact[1, 1]))]
    assert max(found) < limit(3), found


def test_the_covariance_of_sghmc_solves_its_recursion_and_has_a_closed_form():
    step, friction, known, p, v = 0.04, 3.0, 20.0, torch.tensor([5.0, 60.0], dtype=torch.float64), 45.0
    kernel = SGHMC(step, friction=friction, gradient_noise=known)
    covariance = kernel.stationary_covariance(p, v)
    assert covariance.shape == (2, 2, 2)
    for precision, sigma in zip(p.tolist(), covariance, strict=True):
        a = torch.tensor([[1, step], [-step * precision, 1 - step * friction - step**2 * precision]]).double()
        added = 2 * step * friction + step**2 * (v - known)
        change = a @ sigma @ a.mT - sigma
        change[1, 1] += added
        assert float(change.abs().max()) < 1e-7  # the matrix a holds single-precision numbers
        excess = 1 + step * (v - known) / (2 * friction)
        share = 1 - step * friction / 2
        variance = share * excess / (share - step**2 * precision / 4) / precision
        assert abs(float(sigma[0, 0]) - variance) < 1e-12
        assert abs(float(sigma[1, 1]) * share - float(sigma[0, 0]) * precision) < 1e-12


@pytest.mark.parametrize("kernel", [SGLD(0.04), SGHMC(0.05, friction=4.0)])
def test_the_temperature_measures_the_bias(target, limit, kernel):
    factor = stationary_variance(kernel) * PRECISION
    draws = sample_stochastic_gradient(target, kernel, NUM_CHAINS, 99, 1, initial=torch.tensor([MEAN]), progress=False)
    assert factor > 1.2
    assert z_score(draws.sample_stats["temperature"][:, 0], factor) < limit()


@pytest.mark.calibration
def test_a_constant_preconditioner_gives_sgld(target, whole):
    """Bit for bit, with the preconditioner taken into the step size."""
    kernel, generator = PreconditionedSGLD(0.5, decay=1.0), torch.Generator().manual_seed(0)
    start = MEAN + torch.randn(6, 1, generator=generator, dtype=torch.float64)
    state = kernel.init(target, start, generator=torch.Generator().manual_seed(1))
    plain = SGLD(0.5 * kernel.preconditioner(state)[:, 0])
    other = plain.init(target, start, generator=torch.Generator().manual_seed(1))
    first, second = torch.Generator().manual_seed(2), torch.Generator().manual_seed(2)
    for _ in range(5):
        state, info = kernel.step(target, state, generator=first)
        other, expected = plain.step(target, other, generator=second)
        torch.testing.assert_close(state.position, other.position, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(info.temperature, expected.temperature, rtol=1e-13, atol=1e-13)


def test_a_constant_preconditioner_has_the_stationary_variance_of_sgld(target, limit):
    """With a large regularisation the gradients count for nothing, and the preconditioner is its inverse."""
    kernel = PreconditionedSGLD(0.04 * 1e6, decay=1.0, regularization=1e6)
    exact = float(SGLD(0.04).stationary_variance(PRECISION, NOISE))
    found = scores(last_of(target, kernel, 60)[:, 0], MEAN, exact)
    assert max(found) < limit(len(found)), found


def test_the_running_mean_of_the_preconditioner(target):
    kernel, generator = PreconditionedSGLD(0.01, decay=0.9), torch.Generator().manual_seed(0)
    state = kernel.init(target, torch.zeros(3, 1, dtype=torch.float64), generator=generator)
    expected = (state.gradient / NUM_DATA).square()
    for _ in range(4):
        torch.testing.assert_close(kernel.preconditioner(state), 1 / (1e-5 + expected.sqrt()))
        state, _ = kernel.step(target, state, generator=generator)
        expected = 0.9 * expected + 0.1 * (state.gradient / NUM_DATA).square()


def test_shrinking_steps_follow_their_recursion(target, limit):
    schedule, num_steps, variance = Polynomial(0.1, 2.0, 0.6), 15, 0.0
    for t in range(num_steps):
        step = 0.1 * (2.0 + t) ** -0.6
        variance = (1 - step * PRECISION / 2) ** 2 * variance + step + step**2 / 4 * NOISE
    found = scores(last_of(target, SGLD(schedule), num_steps)[:, 0], MEAN, variance)
    assert max(found) < limit(len(found)), found
    draws = sample_stochastic_gradient(target, SGLD(schedule), 2, 3, 5, 2, progress=False)
    steps = torch.tensor([0.1 * (2.0 + t) ** -0.6 for t in (4, 6, 8, 10, 12)], dtype=torch.float64)
    torch.testing.assert_close(draws.sample_stats["step_size"], steps.expand(2, -1))


def test_minibatches_of_an_epoch_cancel_as_they_should(epochs, limit):
    """After one epoch from the mean: the noise of its minibatches is negatively correlated."""
    step, num_batches = 0.01, NUM_DATA // BATCH_SIZE
    single = NOISE * (NUM_DATA - BATCH_SIZE) / (NUM_DATA - 1)
    powers = (1 - step * PRECISION / 2) ** torch.arange(num_batches, dtype=torch.float64)
    same, cross = float(powers.square().sum()), float(powers.sum() ** 2 - powers.square().sum())
    variance = same * (step + step**2 / 4 * single) - cross * step**2 / 4 * single / (num_batches - 1)
    x = last_of(epochs, SGLD(step), num_batches)[:, 0]
    found = scores(x, MEAN, variance)
    assert max(found) < limit(len(found)), found
    assert z_score((x - MEAN).square(), same * (step + step**2 / 4 * NOISE)) > limit()


@pytest.mark.parametrize(
    ("module", "kernel"), [(sgld, SGLD(0.04)), (sghmc, SGHMC(0.03, friction=8.0))], ids=["SGLD", "SGHMC"]
)
def test_a_forgotten_factor_of_two_in_the_noise_is_noticed(target, limit, monkeypatch, module, kernel):
    """The mutation: the added noise has half its variance."""
    variance, right = stationary_variance(kernel), module.standard_normal
    monkeypatch.setattr(module, "standard_normal", lambda *arguments: right(*arguments) / math.sqrt(2))
    assert z_score((last_of(target, kernel, 120)[:, 0] - MEAN).square(), variance) > limit()


# -- several dimensions, modules, metrics ---------------------------------------------------


@pytest.fixture(scope="module")
def regression():
    """A linear layer on correlated inputs, known noise: the posterior is normal."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(60, 2, generator=generator, dtype=torch.float64)
    x[:, 1] = 0.8 * x[:, 0] + 0.6 * x[:, 1]
    y = x @ torch.tensor([1.0, -1.0], dtype=torch.float64) + 0.5
    y = y + 0.7 * torch.randn(60, generator=generator, dtype=torch.float64)
    design = torch.cat([x, torch.ones(60, 1, dtype=torch.float64)], 1)
    precision = design.mT @ design / 0.49 + torch.eye(3, dtype=torch.float64) / 4
    mean = torch.linalg.solve(precision, design.mT @ y / 0.49)

    def make(batch_size, order):
        return MinibatchTarget.from_module(
            torch.nn.Linear(2, 1, dtype=torch.float64),
            lambda output, y: dist.Normal(output[:, 0], 0.7).log_prob(y),
            (x, y),
            batch_size=batch_size,
            prior_scale=2.0,
            row_order=order,
        )

    return make, mean, precision


@pytest.mark.calibration
def test_a_linear_layer_has_the_conjugate_posterior(regression, limit):
    make, mean, precision = regression
    values, vectors = torch.linalg.eigh(precision)
    kernel = SGLD(0.5 / float(values[-1]))
    x = last_of(make(60, Epochs()), kernel, 200, initial=mean, num_chains=1500)
    along = (x - mean) @ vectors
    exact = kernel.stationary_variance(values)
    found = [z for i in range(3) for z in scores(along[:, i], 0.0, float(exact[i]))]
    found += [z_score(along[:, i] * along[:, j], 0.0) for i, j in ((0, 1), (0, 2), (1, 2))]
    assert max(found) < limit(len(found)), found


@pytest.mark.calibration
def test_minibatches_leave_the_mean_of_a_normal_posterior_alone(regression, limit):
    make, mean, precision = regression
    target, start, num_steps = make(6, IndependentRows()), torch.zeros(3, dtype=torch.float64), 300
    step = 0.2 / float(precision.trace())
    contraction = torch.linalg.matrix_power(torch.eye(3, dtype=torch.float64) - 0.5 * step * precision, num_steps)
    # SGLD is still on its way there, at a point that is known; SGHMC has arrived.
    expected = {SGLD(step): mean - contraction @ mean, SGHMC(0.02, friction=10.0): mean}
    found = []
    for kernel, truth in expected.items():
        x = last_of(target, kernel, num_steps, initial=start, num_chains=500)
        found += [z_score(x[:, i], float(truth[i])) for i in range(3)]
    assert max(found) < limit(len(found)), found


@pytest.mark.parametrize("kernel", [SGLD(0.1), SGHMC(0.2, friction=1.0)])
def test_a_metric_whitens(kernel):
    """With the metric of a correlated normal, the chain is the image of one on a round normal, bit for bit almost."""
    factor = torch.tensor([[2.0, 0.0], [1.5, 0.3]], dtype=torch.float64)
    inverse = torch.linalg.inv(factor)

    def round_normal(u):
        return -0.5 * u.square().sum()

    def nothing(u, rows):
        return 0 * rows

    settings = {"dim": 2, "num_data": 1, "batch_size": 1}
    white = MinibatchTarget.from_functions(round_normal, nothing, **settings)
    coloured = MinibatchTarget.from_functions(lambda u: round_normal(inverse @ u), nothing, **settings)
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    stretched = type(kernel)(kernel.step_size, metric=Metric.dense(factor @ factor.mT))
    start = torch.ones(3, 2, dtype=torch.float64)
    state = kernel.init(white, start, generator=generators[0])
    other = stretched.init(coloured, start @ factor.mT, generator=generators[1])
    for _ in range(10):
        state, _ = kernel.step(white, state, generator=generators[0])
        other, _ = stretched.step(coloured, other, generator=generators[1])
    torch.testing.assert_close(state.position @ factor.mT, other.position, rtol=1e-11, atol=1e-11)
