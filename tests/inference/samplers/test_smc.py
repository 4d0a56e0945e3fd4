"""Tempered sequential Monte Carlo: unbiased, resumable, and right on targets with known answers."""

import math
import signal
import warnings
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from scipy.integrate import quad
from scipy.stats import cauchy, gamma, kstest, norm

import bayeskit as bk
from bayeskit.errors import (
    BudgetError,
    CheckpointError,
    DataError,
    InitializationError,
    SamplingWarning,
    SettingsError,
    ShapeError,
)
from bayeskit.inference.samplers._hmc import HMC
from bayeskit.inference.samplers._metric import Metric
from bayeskit.inference.samplers._population_moves import PopulationHMC
from bayeskit.inference.samplers._populations import SMCState, learn_metric, start_populations
from bayeskit.inference.samplers._smc import SMCSchedule, Stage, sample_smc
from bayeskit.inference.samplers._weighted_particles import (
    conditional_share,
    effective_share,
    next_temperature,
    systematic,
)

F64 = torch.float64
SMALL = {"num_particles": 32, "num_replicates": 16, "num_pilot_particles": 128, "ess_threshold": 0.9, "progress": False}
LOG_EVIDENCE = -math.log(4 * math.pi) - 0.5  # of normal_normal: N(1; 0, variance 2) twice


def new(seed=0):
    return torch.Generator().manual_seed(seed)


def identity(dim, scale=1.0):
    return Metric.diagonal(torch.full((dim,), scale, dtype=F64))


def normal(u, mean, sd):
    return (-0.5 * ((u - mean) / sd).square() - math.log(sd) - 0.5 * math.log(2 * math.pi)).sum(-1)


def score(log_evidence, truth):
    """Standardised error of the mean of unbiased estimates, given by their logarithms."""
    ratio = (log_evidence - truth).exp()
    return float((ratio.mean() - 1) / ratio.std() * math.sqrt(len(ratio)))


def pooled_score(draws, function, truth):
    """Standardised error of an expectation, its error from the spread over chains."""
    means = function(draws.unconstrained).mean(1)
    return float((means.mean() - truth) / means.std() * math.sqrt(len(means)))


# -- resampling -----------------------------------------------------------------------------


def test_systematic_resampling_draws_each_particle_as_often_as_it_weighs(limit):
    weight = torch.tensor([0.37, 0.0, 0.05, 0.41, 0.17], dtype=F64)
    index = systematic(weight.log().expand(20_000, 5), new())
    counts = torch.nn.functional.one_hot(index, 5).sum(1).to(F64)
    assert bool((counts >= (5 * weight).floor()).all()) and bool((counts <= (5 * weight).ceil()).all())
    error = counts.std(0) / math.sqrt(len(counts))
    z = (counts.mean(0) - 5 * weight)[error > 0] / error[error > 0]
    assert float(z.abs().max()) < limit(4)


def test_shares_of_known_weights():
    log_weight = torch.tensor([0.25, 0.25, 0.5, 0.0], dtype=F64).log()
    assert math.isclose(float(effective_share(log_weight)), 1 / (0.375 * 4))
    equal = torch.full((4,), 0.25, dtype=F64).log()
    assert math.isclose(float(conditional_share(equal, log_weight)), 1 / (0.375 * 3))  # the lost one does not count
    assert math.isclose(float(conditional_share(log_weight, torch.ones(4, dtype=F64))), 1.0)


def test_the_next_temperature_passes_over_particles_without_likelihood():
    log_weight = torch.full((1000,), 1e-3, dtype=F64).log()
    log_likelihood = torch.linspace(-1e9, 0, 1000, dtype=F64)
    log_likelihood[:700] = -torch.inf
    beta = next_temperature(log_weight, log_likelihood, torch.tensor(0.0, dtype=F64), 0.8)
    assert 0 < float(beta) < 1e-6
    assert abs(float(conditional_share(log_weight, beta * log_likelihood)) - 0.8) < 1e-6
    near = torch.tensor(1 - 1e-12, dtype=F64)
    assert float(next_temperature(log_weight, log_likelihood, near, 0.8)) == 1.0


# -- moves ----------------------------------------------------------------------------------


def _invariance_p_value(kernel, target):
    position = target.sample_prior(20_000, seed=3)
    state, generator = kernel.init(target, position), new(5)
    for _ in range(3):
        state, _ = kernel.step(target, state, generator=generator)
    return kstest(gamma.cdf(state.position[:, 0].exp().numpy(), 3), "uniform").pvalue


class _WrongDensity(PopulationHMC):
    """The mutation: the acceptance step sees the density without a linear term."""

    def _trajectory(self, target, state, p, step):
        end, p = super()._trajectory(target, state, p, step)
        return end._replace(log_density=end.log_density - 0.2 * (end.position - state.position)[:, 0]), p


def test_moves_leave_the_target_invariant(skewed):
    settings = (0.8, 2, identity(2), 1.0, 200)
    assert _invariance_p_value(PopulationHMC(*settings), skewed) > 1e-5
    assert _invariance_p_value(_WrongDensity(*settings), skewed) < 1e-5


def test_momenta_are_normal_for_each_particle_and_even_over_a_population(limit):
    kernel = PopulationHMC(1.0, 1, identity(2), 1.0, num_populations=20_000)
    p = kernel._momenta(torch.zeros(20_000 * 8, 2, dtype=F64), new()).reshape(20_000, 8, 2)
    one = p[:, 3]
    for x, truth in ((one, 0.0), (one.square(), 1.0), (one**4, 3.0), (one[:, :1] * one[:, 1:], 0.0)):
        z = (x.mean(0) - truth) / x.std(0) * math.sqrt(len(x))
        assert float(z.abs().max()) < limit(7)
    # One from each stratum: the variance of their sum lacks that of the strata's means, where independence gives 1.
    border = norm.pdf(norm.ppf(torch.linspace(0, 1, 9).double()))
    left = 1 - float(torch.as_tensor(8 * (border[:-1] - border[1:])).square().mean())
    square = 8 * p.mean(1).square()
    assert left < 0.2
    assert float(((square.mean(0) - left) / square.std(0)).abs().max()) * math.sqrt(len(p)) < limit(2)
    assert kstest(p[:, :, 0].flatten()[:20_000].numpy(), "norm").pvalue > 1e-5


def test_a_step_errs_less_than_a_third_of_two_leapfrog_steps(normal_normal, limit):
    position = normal_normal.sample_prior(2000, seed=0)
    ours = PopulationHMC(1.0, 1, identity(2), 1.0, step_size_jitter=0.0)
    leapfrog = HMC(step_size=0.5, num_steps=2.0, num_steps_jitter=0.0, step_size_jitter=0.0)

    def error(kernel):
        _, info = kernel.step(normal_normal, kernel.init(normal_normal, position), generator=new())
        return 1 - info.acceptance_rate

    margin = error(leapfrog) / 3 - error(ours)
    assert float(margin.mean() / margin.std()) * math.sqrt(len(margin)) > limit()


# -- the evidence is unbiased ---------------------------------------------------------------

FEW, MANY = 4, 100_000


def _through(stages, target, state, generator):
    increments = []
    for stage in stages:
        state, info = stage.step(target, state, generator=generator)
        increments.append(info.log_increment)
    return torch.stack(increments, 1)


@pytest.mark.calibration
def test_the_mean_over_replicates_is_unbiased_with_few_particles(normal_normal, limit):
    generator = new(1)
    stages = [Stage(beta, 1.5, 1, 1, identity(2, 0.7)) for beta in (0.1, 0.4, 1.0)]
    increments = _through(stages, normal_normal, start_populations(normal_normal, MANY, FEW, generator), generator)
    assert abs(score(increments.sum(1), LOG_EVIDENCE)) < limit()
    assert abs(score(increments[:, 1:].sum(1), LOG_EVIDENCE)) > 10 * limit()  # the mutation: one increment dropped


@pytest.mark.calibration
def test_choosing_temperatures_inside_the_run_would_be_biased(normal_normal, limit):
    """The mutation: each replicate picks, from a grid, how far its own particles may be tempered."""
    generator = new(2)
    state = start_populations(normal_normal, MANY, FEW, generator)
    grid = torch.linspace(0.05, 0.95, 10, dtype=F64)
    shares = torch.stack([conditional_share(state.log_weight, beta * state.log_likelihood) for beta in grid])
    choice = (shares >= 0.6).sum(0).clamp(min=1) - 1
    values = []
    for i, beta in enumerate(grid.tolist()):
        chosen = choice == i
        if bool(chosen.any()):
            some = SMCState(*(x[chosen] if x.dim() else x for x in state))
            stages = [Stage(b, 1.5, 1, 2, identity(2, 0.7)) for b in (beta, 1.0)]
            values.append(_through(stages, normal_normal, some, generator).sum(1))
    assert abs(score(torch.cat(values), LOG_EVIDENCE)) > limit()


def test_replicates_without_likelihood_count_as_zero(limit):
    """Half of the line is impossible, so a replicate of two has no possible particle a quarter of the time."""
    target = bk.Target.from_functions(
        lambda u: normal(u, 0.0, 1.0),
        lambda u: torch.where(u[..., 0] > 0, normal(u, 0.5, 1.0), -torch.inf),
        1,
        lambda n, g: torch.randn(n, 1, generator=g, dtype=F64),
    )
    truth = math.log(quad(lambda x: norm.pdf(x) * norm.pdf(x, 0.5), 0, 20)[0])
    generator = new(3)
    stages = [Stage(beta, 1.0, 1, 1, identity(1)) for beta in (0.3, 1.0)]
    log_evidence = _through(stages, target, start_populations(target, 50_000, 2, generator), generator).sum(1)
    impossible = float((log_evidence == -torch.inf).to(F64).mean())
    assert abs(impossible - 0.25) < limit(2) * math.sqrt(0.25 * 0.75 / 50_000)
    assert abs(score(log_evidence, truth)) < limit(2)


# -- whole runs -----------------------------------------------------------------------------


def test_posterior_and_evidence_of_a_conjugate_model(normal_normal, limit):
    run = sample_smc(normal_normal, 64, 64, seed=1, num_pilot_particles=256, ess_threshold=0.9, progress=False)
    assert run.draws.unconstrained.shape == (64, 64, 2) and bool((run.draws.beta == 1).all())
    scores = [score(run.log_evidence, LOG_EVIDENCE)]
    scores += [pooled_score(run.draws, lambda u, i=i: u[..., i], 0.5) for i in range(2)]
    scores += [pooled_score(run.draws, lambda u, i=i: (u[..., i] - 0.5).square(), 0.5) for i in range(2)]
    scores += [pooled_score(run.draws, lambda u: (u[..., 0] - 0.5) * (u[..., 1] - 0.5), 0.0)]
    assert max(map(abs, scores)) < limit(len(scores)), scores


@pytest.mark.calibration
def test_linear_regression_with_one_quick_run(limit):
    case = bk.exact.get("linreg10")
    run = sample_smc(case.target(), 32, 32, seed=2, num_pilot_particles=256, ess_threshold=0.9, progress=False)
    assert abs(score(run.log_evidence, case.log_evidence)) < limit()
    mean = case.posterior_mean["b"].tolist()
    scores = [pooled_score(run.draws, lambda u, i=i: u[..., i], truth) for i, truth in enumerate(mean)]
    assert max(map(abs, scores)) < limit(len(scores)), scores


def test_both_modes_are_found_in_proportion(limit):
    """Modes eight standard deviations of the likelihood and more apart, between which nothing moves."""

    def log_likelihood(u):
        return torch.logaddexp(math.log(0.3) + normal(u, -4.0, 0.3), math.log(0.7) + normal(u, 4.0, 0.3))

    target = bk.Target.from_functions(
        lambda u: normal(u, 0.0, 5.0),
        log_likelihood,
        2,
        lambda n, g: 5 * torch.randn(n, 2, generator=g, dtype=F64),
    )
    truth = 2 * norm.logpdf(4, 0, math.sqrt(25.09))
    run = sample_smc(target, 64, 32, seed=3, num_pilot_particles=256, ess_threshold=0.95, progress=False)
    assert abs(score(run.log_evidence, truth)) < limit(2)
    right = pooled_score(run.draws, lambda u: (u[..., 0] > 0).to(F64), 0.7)
    assert abs(right) < limit(2)
    one_side = run.draws.unconstrained.abs().mean(-1)
    assert bool((one_side > 2).all())  # nothing is left in between


def test_a_heavy_tailed_prior_does_not_break_the_metric(limit):
    """Cauchy prior, whose particles have no covariance, and a normal likelihood."""

    def sample(n, g):
        return (math.pi * (torch.rand(n, 2, generator=g, dtype=F64) - 0.5)).tan()

    target = bk.Target.from_functions(
        lambda u: (-math.log(math.pi) - u.square().log1p()).sum(-1), lambda u: normal(u, 2.0, 0.2), 2, sample
    )
    truth = 2 * math.log(quad(lambda x: cauchy.pdf(x) * norm.pdf(x, 2, 0.2), 0, 4)[0])
    run = sample_smc(target, 64, 32, seed=4, num_pilot_particles=512, ess_threshold=0.9, progress=False)
    assert abs(score(run.log_evidence, truth)) < limit()
    scale = run.schedule.stages[0].metric.factor.diagonal()
    assert bool((scale > 0.1).all()) and bool((scale < 10).all())
    assert float(run.info.acceptance_rate.mean(0).min()) > 0.4


def test_the_metric_is_the_covariance_of_weighted_particles(limit):
    """Normal draws weighted by another normal density: the product has a known covariance."""
    generator = new(6)
    covariance = torch.tensor([[1.0, 0.95], [0.95, 1.0]], dtype=F64)
    x = torch.randn(40_000, 2, generator=generator, dtype=F64) @ torch.linalg.cholesky(covariance).mT
    log_weight = (-0.5 * x[:, 0].square()).log_softmax(0)
    expected = torch.linalg.inv(torch.linalg.inv(covariance) + torch.diag(torch.tensor([1.0, 0.0], dtype=F64)))
    factor = learn_metric(x, log_weight).factor
    effective = 40_000 * float(effective_share(log_weight))
    found = factor @ factor.mT
    size = (expected.diag().outer(expected.diag()) + expected.square()).sqrt()  # of the error of a covariance
    assert float(((found - expected) / size).abs().max()) * math.sqrt(effective) < limit(3)


@pytest.mark.parametrize("tails", ["normal", "student"])
def test_the_metric_keeps_a_ridge_whatever_lies_far_out(tails):
    """Particles along a ridge that is 10,000 times longer than wide, turned: its width is known as well as its length.

    Bounds of their eigenvalues: random matrices of independent normal numbers (Marchenko and Pastur 1967).
    """
    n, d = 512, 30
    rotation = torch.linalg.qr(torch.randn(d, d, generator=new(1), dtype=F64)).Q
    x = torch.randn(n, d, generator=new(2), dtype=F64)
    if tails == "student":  # with three degrees of freedom, one factor for all coordinates of a particle
        x = x / (torch.randn(n, 3, generator=new(3), dtype=F64).square().mean(1, keepdim=True)).sqrt()
    stretch = rotation * torch.logspace(0, -4, d, dtype=F64)
    metric = learn_metric(x @ stretch.mT, torch.full((n,), -math.log(n), dtype=F64))
    values = torch.linalg.eigvalsh(
        torch.linalg.inv(stretch) @ metric.factor @ metric.factor.mT @ torch.linalg.inv(stretch.mT)
    )
    widest = (1 + math.sqrt(d / n)) ** 2 / (1 - math.sqrt(d / n)) ** 2
    assert float(values.max() / values.min()) < 2 * widest
    assert 0.3 < float(values.log().mean().exp()) < 3


@pytest.mark.calibration
def test_tempering_costs_no_more_on_a_ridge(limit):
    """A normal likelihood with variances over eight orders of magnitude, turned: step sizes stay long."""
    rotation = torch.linalg.qr(torch.randn(10, 10, generator=new(1), dtype=F64)).Q
    design = torch.logspace(-2, 2, 10, dtype=F64).unsqueeze(1) * rotation

    def likelihood(u):
        return -0.5 * ((u @ design.mT) / 0.01).square().sum(-1)

    target = bk.Target.from_functions(
        lambda u: normal(u, 0.0, 1.0),
        likelihood,
        dim=10,
        sample_prior=lambda n, generator: torch.randn(n, 10, generator=generator, dtype=F64),
    )
    run = sample_smc(target, seed=1, **SMALL | {"num_pilot_particles": 512})
    assert min(stage.step_size for stage in run.schedule) > 0.5
    truth = -0.5 * float(torch.log1p((torch.logspace(-2, 2, 10, dtype=F64) / 0.01).square()).sum())
    assert abs(score(run.log_evidence, truth)) < limit()


def test_a_learnt_schedule_serves_again(normal_normal, limit):
    first = sample_smc(normal_normal, **SMALL)
    again = sample_smc(normal_normal, seed=9, schedule=first.schedule, **SMALL)
    assert again.pilot_gradients == 0 < first.pilot_gradients
    assert not torch.equal(first.log_evidence, again.log_evidence)
    assert abs(score(again.log_evidence, LOG_EVIDENCE)) < limit()
    same = sample_smc(normal_normal, schedule=first.schedule, **SMALL)
    assert torch.equal(same.draws.unconstrained, first.draws.unconstrained)


def test_single_precision_stays_single(limit):
    case = bk.exact.get("beta_binomial")
    run = sample_smc(case.target(dtype=torch.float32), seed=1, **SMALL)
    assert run.draws.unconstrained.dtype == torch.float32
    assert abs(score(run.log_evidence, case.log_evidence)) < limit()


def test_stages_reach_arviz():
    run = sample_smc(bk.exact.get("beta_binomial").target(), **SMALL)
    stats = run.to_arviz()["sample_stats"]
    for name in ("beta", "log_marginal_likelihood", "accept_rate"):
        assert stats[name].dims == ("chain", "stage") and stats[name].shape == (16, len(run.schedule))
    assert stats["lp"].shape == (16, 32)
    reached = torch.as_tensor(stats["log_marginal_likelihood"].values[:, -1])
    assert torch.allclose(reached, run.log_evidence)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_everything_stays_on_the_device(limit):
    case = bk.exact.get("linreg10")
    run = sample_smc(case.target(device="cuda"), seed=1, **SMALL)
    assert run.draws.unconstrained.is_cuda
    assert abs(score(run.log_evidence, case.log_evidence)) < limit()


# -- interrupted runs -----------------------------------------------------------------------


@pytest.mark.parametrize("phase", ["pilot", "replicates"])
def test_a_run_that_died_resumes_bit_for_bit(normal_normal, tmp_path, monkeypatch, phase):
    whole = sample_smc(normal_normal, **SMALL)
    fatal = 3 if phase == "pilot" else len(whole.schedule) + 3
    calls, init = [], PopulationHMC.init

    def dies(self, target, position):
        calls.append(1)
        if len(calls) == fatal:
            raise MemoryError("killed")
        return init(self, target, position)

    monkeypatch.setattr(PopulationHMC, "init", dies)
    settings = SMALL | {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    with pytest.raises(MemoryError):
        sample_smc(normal_normal, **settings)
    _assert_same(sample_smc(normal_normal, **settings), whole)
    # One call a stage in each phase and one at the end; only the fatal one was made twice.
    assert len(calls) == 2 * len(whole.schedule) + 2
    _assert_same(sample_smc(normal_normal, **settings), whole)  # finished already


def _assert_same(a, b):
    assert torch.equal(a.draws.unconstrained, b.draws.unconstrained)
    assert all(torch.equal(a.draws.sample_stats[name], value) for name, value in b.draws.sample_stats.items())
    assert all(torch.equal(x, y) for x, y in zip(a.info, b.info, strict=True))
    assert a.num_gradients == b.num_gradients and a.pilot_gradients == b.pilot_gradients


def test_a_time_budget_ends_with_what_there_is(normal_normal, tmp_path):
    whole = sample_smc(normal_normal, **SMALL)
    settings = SMALL | {"checkpoint": tmp_path / "run"}
    with pytest.raises(BudgetError, match="first stage"):
        sample_smc(normal_normal, time_budget=1e-9, **settings)
    for _ in range(1000):  # each call adds a stage at least
        with suppress(BudgetError), warnings.catch_warnings(action="ignore", category=SamplingWarning):
            run = sample_smc(normal_normal, time_budget=0.02, **settings)
            if run.ending == "finished":
                break
    _assert_same(run, whole)


def test_a_pilot_that_is_interrupted_gives_a_power_posterior(normal_normal, monkeypatch):
    calls, init = [], PopulationHMC.init

    def interrupting(self, target, position):
        calls.append(1)
        if len(calls) == 1:
            signal.raise_signal(signal.SIGINT)
        return init(self, target, position)

    monkeypatch.setattr(PopulationHMC, "init", interrupting)
    with pytest.warns(SamplingWarning, match="interrupted at inverse temperature"):
        run = sample_smc(normal_normal, **SMALL)
    assert run.ending == "interrupted" and run.schedule is None
    assert 0 < float(run.draws.beta[0]) < 1 and run.draws.unconstrained.shape == (1, 128, 2)


@pytest.mark.parametrize(
    ("change", "name"),
    [({"seed": 1}, "seed"), ({"ess_threshold": 0.8}, "ess_threshold"), ({"num_particles": 16}, "num_particles")],
)
def test_a_checkpoint_of_other_settings_is_refused(normal_normal, tmp_path, change, name):
    sample_smc(normal_normal, checkpoint=tmp_path / "run", **SMALL)
    with pytest.raises(CheckpointError, match=name):
        sample_smc(normal_normal, checkpoint=tmp_path / "run", **(SMALL | change))


def test_a_checkpoint_of_another_dimension_is_refused(normal_normal, skewed, tmp_path):
    sample_smc(normal_normal, checkpoint=tmp_path / "run", **SMALL)
    with pytest.raises(CheckpointError, match="another model"):
        sample_smc(bk.exact.get("linreg10").target(), checkpoint=tmp_path / "run", **SMALL)


# -- bad input ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"num_particles": 0}, "num_particles"),
        ({"num_replicates": 0}, "num_replicates"),
        ({"num_pilot_particles": 0}, "num_pilot_particles"),
        ({"ess_threshold": 1.0}, "ess_threshold"),
        ({"max_correlation": 0.0}, "max_correlation"),
        ({"max_moves": 0}, "max_moves"),
        ({"target_acceptance": 1.5}, "target_acceptance"),
        ({"time_budget": -1.0}, "time_budget"),
        ({"schedule": "x"}, "schedule must be a Schedule"),
    ],
)
def test_settings_outside_their_domain_are_refused(normal_normal, setting, name):
    with pytest.raises(SettingsError, match=name):
        sample_smc(normal_normal, **(SMALL | setting))


@pytest.mark.parametrize(
    "change", [{"beta": 1.2}, {"beta": -0.1}, {"beta": 0.0}, {"step_size": 0.0}, {"num_steps": 0}, {"num_moves": 0}]
)
def test_stages_outside_their_domain_are_refused(change):
    with pytest.raises(SettingsError, match="temperature" if "beta" in change else next(iter(change))):
        replace(Stage(0.5, 1.0, 1, 1, identity(2)), **change)


@pytest.mark.parametrize("beta", [(), (0.5,), (0.5, 0.4, 1.0), (0.5, 0.5, 1.0)])
def test_temperatures_that_do_not_lead_to_the_posterior_are_refused(beta):
    with pytest.raises(SettingsError, match="increase"):
        SMCSchedule(tuple(Stage(b, 1.0, 1, 1, identity(2)) for b in beta))


def test_a_schedule_of_another_dimension_is_refused(normal_normal):
    schedule = sample_smc(normal_normal, **SMALL).schedule
    with pytest.raises(ShapeError, match="2 dimensions, the target has 10"):
        sample_smc(bk.exact.get("linreg10").target(), schedule=schedule, **SMALL)


def test_targets_that_cannot_be_tempered_are_refused():
    def target(log_likelihood, sample=lambda n, g: torch.randn(n, 1, generator=g, dtype=F64)):
        return bk.Target.from_functions(lambda u: normal(u, 0.0, 1.0), log_likelihood, 1, sample)

    with pytest.raises(SettingsError, match="cannot draw from its prior"):
        sample_smc(target(lambda u: 0 * u[..., 0], None), **SMALL)
    with pytest.raises(InitializationError, match="zero at all"):
        sample_smc(target(lambda u: 0 * u[..., 0] - torch.inf), **SMALL)
    with pytest.raises(DataError, match="NaN at every"):
        sample_smc(target(lambda u: 0 * u[..., 0] + torch.nan), **SMALL)


def test_a_likelihood_that_is_not_a_number_somewhere_counts_as_zero(limit):
    """A likelihood so flat that nothing is resampled, undefined at one prior draw in fifteen: those count as zero."""
    target = bk.Target.from_functions(
        lambda u: normal(u, 0.0, 1.0),
        lambda u: torch.where(u[..., 0] > 1.5, torch.nan, 0.1 * u[..., 0]),
        1,
        lambda n, generator: torch.randn(n, 1, generator=generator, dtype=F64),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)
        run = sample_smc(target, seed=4, **SMALL | {"num_replicates": 200})
    truth = math.log(norm.cdf(1.5 - 0.1)) + 0.005
    assert abs(score(run.log_evidence, truth)) < limit(1)
    assert float(run.draws.unconstrained.max()) < 1.5  # at the posterior nothing is left where it is undefined
