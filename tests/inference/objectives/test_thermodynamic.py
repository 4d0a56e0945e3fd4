"""The thermodynamic objective: Riemann sums, schedules, and the gradient by covariances."""

import math

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.objectives._thermodynamic import (
    TVO,
    EqualMoments,
    LogUniform,
    TemperatureSchedule,
    tempered_means,
    thermodynamic_bounds,
    thermodynamic_estimate,
)

LOG_MARGINAL, LOWER_BOUND = -1.515512, -1.674299  # z ~ N(0, 1), x given z ~ N(z, 1), x = 1, guide N(0.2, 0.9)


def log_normal(value: Tensor, mean: float, sd: float) -> Tensor:
    return -0.5 * ((value - mean) / sd) ** 2 - math.log(sd) - 0.5 * math.log(2 * math.pi)


def quantile_particles(count: int) -> Tensor:
    """Return log weights at evenly spaced quantiles of the guide: particles without noise."""
    z = 0.2 + 0.9 * torch.from_numpy(norm.ppf((torch.arange(count).double().numpy() + 0.5) / count))
    return log_normal(z, 0.0, 1.0) + log_normal(1 - z, 0.0, 1.0) - log_normal(z, 0.2, 0.9)


def exact_mean(beta: Tensor) -> Tensor:
    """Return the expected log weight under the tempered normal density."""
    precision = (1 - beta) / 0.81 + 2 * beta
    mean, variance = ((1 - beta) * 0.2 / 0.81 + beta) / precision, 1 / precision
    expected = -0.5 * (mean**2 + variance) - 0.5 * ((1 - mean) ** 2 + variance)
    expected = expected + 0.5 * ((mean - 0.2) ** 2 + variance) / 0.81
    return expected + math.log(0.9) - 0.5 * math.log(2 * math.pi)


def even(intervals: int) -> Tensor:
    return torch.linspace(0, 1, intervals + 1, dtype=torch.float64)


def test_expected_log_weights_at_each_temperature():
    beta = even(10)
    coarse, fine = (float((tempered_means(quantile_particles(n), beta) - exact_mean(beta)).abs().max())
                    for n in (2_000, 20_000))  # fmt: skip
    assert fine < coarse / 5 < 1e-3
    assert abs(float(exact_mean(beta[0])) - LOWER_BOUND) < 1e-6


def test_the_sums_close_in_on_the_log_marginal_likelihood():
    log_weight, gaps = quantile_particles(20_000), []
    rise = float(exact_mean(torch.tensor(1.0)) - exact_mean(torch.tensor(0.0)))
    for intervals in (1, 2, 10, 100):
        lower, upper = map(float, thermodynamic_bounds(log_weight, even(intervals)))
        assert lower < LOG_MARGINAL < upper
        assert upper - lower == pytest.approx(rise / intervals, abs=1e-3)
        gaps.append(abs((lower + upper) / 2 - LOG_MARGINAL))
    assert abs(float(thermodynamic_bounds(log_weight, even(1))[0]) - LOWER_BOUND) < 1e-3
    # The trapezoidal rule: error falls with the square of the number of intervals, down to that of the particles.
    assert gaps[1] < gaps[0] / 3 and gaps[2] < gaps[1] / 15 and gaps[3] < 1e-4


# One binary site: guide 5/8 for z = 1, so that eight particles represent it exactly.
ONES = torch.tensor([1] * 5 + [0] * 3)
JOINT = torch.tensor([0.7 * 0.09405, 0.3 * 0.28969], dtype=torch.float64).log()


def exact_lower(logit: Tensor, theta: Tensor, beta: Tensor) -> Tensor:
    log_q = torch.nn.functional.logsigmoid(torch.stack([-logit, logit]))
    log_p = JOINT + torch.stack([torch.zeros_like(theta), theta])
    step, b = beta.diff(), beta[:-1, None]
    density = ((1 - b) * log_q + b * log_p).softmax(1)
    return step @ (density @ (log_p - log_q))


def population_gradient(copies: int, beta: Tensor, estimate=thermodynamic_estimate) -> Tensor:
    logit = torch.tensor(math.log(5 / 3), dtype=torch.float64, requires_grad=True)
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    z = ONES.repeat(copies)
    log_q = torch.nn.functional.logsigmoid(torch.stack([-logit, logit]))[z]
    log_p = (JOINT + torch.stack([torch.zeros_like(theta), theta]))[z]
    return torch.stack(torch.autograd.grad(estimate(log_p, log_q, beta), [logit, theta]))


def infinite_population(beta: Tensor, estimate=thermodynamic_estimate) -> Tensor:
    """Take the limit of many copies: the covariance's factor count / (count - 1) enters linearly."""
    one, two = population_gradient(1, beta, estimate), population_gradient(2, beta, estimate)
    return two + (1 - 16 / 15) * (one - two) / (8 / 7 - 16 / 15)


@pytest.mark.parametrize("beta", [even(1), even(4), torch.tensor([0.0, 0.01, 0.3, 1.0], dtype=torch.float64)], ids=len)
def test_gradient_by_covariances(beta):
    logit = torch.tensor(math.log(5 / 3), dtype=torch.float64, requires_grad=True)
    theta = torch.zeros((), dtype=torch.float64, requires_grad=True)
    value = exact_lower(logit, theta, beta)
    exact = torch.stack(torch.autograd.grad(value, [logit, theta]))
    assert float((infinite_population(beta) - exact).abs().max()) < 1e-12
    log_q = torch.nn.functional.logsigmoid(torch.stack([-logit, logit]))[ONES]
    assert abs(float((thermodynamic_estimate(JOINT[ONES], log_q, beta) - value).detach())) < 1e-12


def test_a_dropped_covariance_is_noticed():
    def direct(log_model: Tensor, log_guide: Tensor, beta: Tensor) -> Tensor:
        log_weight = log_model - log_guide
        weights = (beta[:-1, None] * log_weight.detach()).softmax(1)
        return beta.diff() @ (weights * log_weight).sum(1)

    beta = even(4)
    assert float((infinite_population(beta, direct) - infinite_population(beta)).abs().min()) > 1e-3


def test_schedules():
    log_weight = quantile_particles(1_000)[:, None] + torch.tensor([0.0, 5.0], dtype=torch.float64)
    for schedule in (LogUniform(1), LogUniform(7, 1e-3), EqualMoments(1), EqualMoments(6)):
        assert isinstance(schedule, TemperatureSchedule)
        cuts = schedule(log_weight)
        assert cuts.shape == (schedule.num_intervals + 1,) and cuts.dtype == log_weight.dtype
        assert float(cuts[0]) == 0 and float(cuts[-1]) == 1 and bool((cuts.diff() > 0).all())
    logs = LogUniform(7, 1e-3)(log_weight)[1:].log().diff()
    assert float((logs - logs[0]).abs().max()) < 1e-12
    means = tempered_means(log_weight, EqualMoments(6)(log_weight)).mean(1).diff()
    assert float((means - means[0]).abs().max()) < 1e-12


def test_equal_weights_leave_no_moments_to_space():
    cuts = EqualMoments(3)(torch.zeros(4))
    assert bool((cuts.diff() >= 0).all()) and float(cuts[-1]) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: TVO(1),
        lambda: LogUniform(0),
        lambda: LogUniform(2, 0.0),
        lambda: LogUniform(2, 1.0),
        lambda: EqualMoments(0),
    ],
)
def test_settings_outside_their_domain(call):
    with pytest.raises(SettingsError):
        call()
