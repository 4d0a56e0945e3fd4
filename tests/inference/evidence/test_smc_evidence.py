"""The evidence by sequential Monte Carlo: right, calibrated, counted, and aware of its failures."""

import math
import signal
from dataclasses import replace

import pytest
import torch
from scipy.stats import binom, norm
from scipy.stats import t as student

import bayeskit as bk
from bayeskit._core import statistics as _statistics
from bayeskit._core.statistics import replicates_log_mean_error
from bayeskit.errors import DrawsError, SamplingWarning, SettingsError
from bayeskit.inference.evidence._sequential import smc
from bayeskit.inference.samplers._smc import AdaptiveTempering, sample_smc

F64 = torch.float64
SMALL = {"num_particles": 32, "num_replicates": 16, "num_pilot_particles": 128, "ess_threshold": 0.9, "progress": False}


@pytest.fixture(scope="module")
def case():
    return bk.exact.get("beta_binomial")


@pytest.fixture(scope="module")
def target(case):
    return case.target()


@pytest.fixture(scope="module")
def run(target):
    return sample_smc(target, seed=1, **SMALL)


CASES = ("linreg10", "radiata_pine_m1", "radiata_pine_m2", "beta_binomial", "eight_schools", "three_taxon_tree")


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_it_agrees_with_the_exact_answer(name, limit):
    case = bk.exact.get(name)
    target = case.target()
    z = smc(target, sample_smc(target, seed=1, **SMALL))
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error, str(z)
    assert 0 < z.standard_error < 0.2 and z.trusted, str(z)


def test_a_target_is_enough(case, target, limit):
    z = smc(target, seed=3, progress=False)
    assert z.method == "smc" and z.trusted and z.standard_error < 0.01
    assert abs(z.log_evidence - case.log_evidence) < limit() * z.standard_error


def _log_ratios(num_trials, groups, num_replicates, spread):
    """Draw log-normal estimates of one, over their mean, as from that many groups."""
    shape = (num_trials, groups, num_replicates)
    normal = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=F64)
    log_values = spread * normal - 0.5 * spread**2
    log_mean = log_values.logsumexp((1, 2)) - math.log(groups * num_replicates)
    return log_values - log_mean[:, None, None], log_mean


def _covered(num_replicates, spread=0.1, groups=1, by_values_alone=False):
    """How many of 4000 intervals of 1.96 standard errors cover the truth."""
    log_ratio, log_mean = _log_ratios(4000, groups, num_replicates, spread)
    error, of_values = replicates_log_mean_error(log_ratio)
    if by_values_alone:
        error = student(groups * (num_replicates - 1)).ppf(0.975) / 1.959964 * of_values / math.sqrt(num_replicates)
    return int((log_mean.abs() <= 1.959964 * error / math.sqrt(groups)).sum())


@pytest.mark.parametrize("num_replicates", [4, 16])
def test_intervals_cover_as_often_as_they_say(num_replicates):
    low, high = binom.ppf([5e-6, 1 - 5e-6], 4000, 0.95)
    assert low <= _covered(num_replicates) <= high


def test_intervals_cover_where_log_normal_estimates_spread_far():
    """Of sixteen estimates with a relative error of 1.1 the values alone tell too little."""
    least = binom.ppf(5e-6, 4000, 0.94)
    assert _covered(16, spread=0.9) >= least > _covered(16, spread=0.9, by_values_alone=True)


@pytest.mark.parametrize(("groups", "num_replicates"), [(4, 4), (32, 2)])
def test_groups_are_pooled(groups, num_replicates):
    low, high = binom.ppf([5e-6, 1 - 5e-6], 4000, [0.94, 0.965])
    assert low <= _covered(num_replicates, spread=0.66, groups=groups) <= high


def test_one_replicate_that_found_nothing_does_not_decide():
    log_ratio = torch.zeros(1, 16, dtype=F64)
    errors = []
    for nothing in (-2.5, -50.0, -math.inf):
        log_ratio[0, 0] = nothing
        errors.append(float(replicates_log_mean_error(log_ratio - log_ratio.logsumexp(1) + math.log(16))[0]))
    assert 0 < errors[0] < errors[1] == errors[2] < 0.2


def test_intervals_that_ignore_the_number_of_replicates_would_not(monkeypatch):
    """The mutation: the quantile of the normal distribution instead of Student's."""
    monkeypatch.setattr(_statistics.scipy.special, "stdtrit", lambda _, level: 1.959964)
    assert _covered(4) < binom.ppf(5e-6, 4000, 0.95)


def test_every_evaluation_is_counted(case, monkeypatch):
    target, rows = case.target(), []
    evaluator, evaluate = target.evaluator, target.evaluate

    def counted(n, num_calls=1):
        call = evaluator(n, num_calls)
        return lambda u, beta: (rows.append(len(u)), call(u, beta))[1]

    monkeypatch.setattr(target, "evaluator", counted)
    monkeypatch.setattr(target, "evaluate", lambda u, **how: (rows.append(len(u)), evaluate(u, **how))[1])
    advance = AdaptiveTempering.advance

    def interrupting(*arguments):
        signal.raise_signal(signal.SIGINT)
        return advance(*arguments)

    with monkeypatch.context() as patch, pytest.warns(SamplingWarning, match="interrupted"):
        patch.setattr(AdaptiveTempering, "advance", interrupting)
        stopped = sample_smc(target, **SMALL)
    assert stopped.num_gradients == sum(rows)
    rows.clear()
    run = sample_smc(target, seed=1, **SMALL)
    assert run.num_gradients == sum(rows)
    monkeypatch.undo()
    assert smc(target, run).num_evaluations > run.num_gradients > run.pilot_gradients > 0


def _with_info(run, **changes):
    return replace(run, info=run.info._replace(**changes))


def _spread(run):
    return run.info.log_increment + torch.linspace(-2, 2, 16, dtype=F64).unsqueeze(1)


@pytest.mark.parametrize(
    ("broken", "complaint"),
    [
        (lambda run: _with_info(run, log_increment=_spread(run)), "replicates disagree"),
        (lambda run: _with_info(run, log_increment=torch.full_like(_spread(run), torch.nan)), "replicates disagree"),
        (lambda run: _with_info(run, conditional_share=0.2 * run.info.conditional_share), "ess_threshold"),
        (lambda run: _with_info(run, effective_share=0.1 * run.info.effective_share), "effective particles"),
        (lambda run: _with_info(run, acceptance_rate=0.2 * run.info.acceptance_rate), "accepts"),
        (lambda run: _with_info(run, num_ancestors=torch.ones_like(run.info.num_ancestors)), "descend"),
        (lambda run: replace(run, correlation=torch.full_like(run.correlation, 0.95)), "max_moves"),
    ],
)
def test_it_says_when_it_cannot_be_trusted(target, run, broken, complaint):
    assert smc(target, run).trusted
    z = smc(target, broken(run))
    assert not z.trusted and any(complaint in warning for warning in z.warnings), z.warnings


def test_a_few_replicates_show_no_error(target):
    few = SMALL | {"num_replicates": 4}
    z = smc(target, sample_smc(target, seed=1, **few))
    assert not z.trusted and "num_replicates" in z.warnings[0] and math.isfinite(z.standard_error)
    one = SMALL | {"num_replicates": 1, "num_particles": 512}
    z = smc(target, sample_smc(target, seed=1, **one))
    assert not z.trusted and math.isnan(z.standard_error) and math.isfinite(z.log_evidence)
    assert len(z.warnings) == 1 and math.isnan(z.diagnostics["relative_spread"])  # one cannot disagree


def test_a_poor_schedule_is_noticed():
    """A schedule that was learnt on little data does not fit much."""

    def posterior(n):
        data = torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=F64) + 3
        return bk.Target.from_functions(
            lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
            lambda u: -0.5 * (data - u).square().sum(-1),
            1,
            lambda k, g: torch.randn(k, 1, generator=g, dtype=F64),
        )

    schedule = sample_smc(posterior(2), **SMALL).schedule
    target = posterior(2000)
    z = smc(target, sample_smc(target, schedule=schedule, **SMALL))
    assert not z.trusted and any("stage" in warning for warning in z.warnings)


@pytest.mark.parametrize("wrong", [torch.nan, torch.inf])
def test_a_likelihood_that_is_not_a_number_is_said(wrong, limit):
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1),
        lambda u: torch.where(u[..., 0] < 1, 0.1 * u[..., 0], wrong),
        2,
        lambda n, g: torch.randn(n, 2, generator=g, dtype=F64),
    )
    z = smc(target, sample_smc(target, **SMALL))
    below = math.exp(0.005) * norm.cdf(0.9)  # the integral of the rest
    assert abs(z.log_evidence - math.log(below)) < limit() * z.standard_error
    assert not z.trusted and "NaN or infinite" in z.warnings[-1]


def test_a_narrow_peak_that_tempering_misses_is_noticed():
    """A spike of most of the mass on a broad slab, in twenty dimensions: all replicates agree on the slab."""

    def normal(u, sd):
        return (-0.5 * (u / sd).square() - math.log(sd) - 0.5 * math.log(2 * math.pi)).sum(-1)

    def target(spike):
        return bk.Target.from_functions(
            lambda u: normal(u, 1.0),
            lambda u: torch.logaddexp(math.log(spike) + normal(u, 0.01), normal(u, 0.1)),
            20,
            lambda n, g: torch.randn(n, 20, generator=g, dtype=F64),
        )

    z = smc(target(100.0), sample_smc(target(100.0), **SMALL))
    assert not z.trusted and len(z.warnings) == 1
    assert 50 < z.diagnostics["missed_share"] < 150
    without = target(1e-9)
    assert smc(without, sample_smc(without, **SMALL)).trusted


def test_runs_that_do_not_belong_are_refused(target, run):
    with pytest.raises(DrawsError, match="another target"):
        smc(bk.exact.beta_binomial(3, 10).target(), run)
    with pytest.raises(DrawsError, match="resume"):
        smc(target, replace(run, ending="time budget"))
    with pytest.raises(SettingsError, match="sample_smc"):
        smc(target, run.draws)
