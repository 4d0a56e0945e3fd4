import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.stats import chi2, kstest

import bayeskit as bk
from bayeskit.errors import BayeskitError, BudgetError, CheckpointError, DataError, InitializationError, SettingsError
from bayeskit.inference.samplers import _nested as nested
from bayeskit.inference.samplers._nested import (
    ConstrainedSlice,
    NestedSampler,
    SliceInfo,
    SliceState,
    insertion_quantiles,
    log_shells,
    metric_of,
    sample_nested,
)

SD = 0.1
NUM_LIVE = 60


def normal_log_density(u, mean=0.0, sd=1.0):
    return (-0.5 * ((u - mean) / sd).square() - math.log(sd) - 0.5 * math.log(2 * math.pi)).sum(-1)


def draw_normal(dim):
    return lambda n, generator: torch.randn(n, dim, generator=generator, dtype=torch.float64)


def make_target(log_likelihood, dim=2):
    return bk.Target.from_functions(normal_log_density, log_likelihood, dim, draw_normal(dim))


def conjugate(dim, sd):
    """Prior N(0, 1), likelihood N(0.5; u, sd^2) on each coordinate; returns the target and its log evidence."""
    target = make_target(lambda u: normal_log_density(u, 0.5, sd), dim)
    total = 1 + sd**2
    return target, dim * (-0.5 * 0.25 / total - 0.5 * math.log(2 * math.pi * total))


@pytest.fixture(scope="module")
def sharp():
    return conjugate(2, SD)


@pytest.fixture(scope="module")
def replicates(sharp):
    return [sample_nested(sharp[0], NUM_LIVE, seed=seed, num_slice_steps=10, progress=False) for seed in range(20)]


def z_scores(runs, exact):
    return torch.tensor(
        [(r.log_evidence - exact) / float(r.simulate_log_evidence(200, seed=i).std()) for i, r in enumerate(runs)]
    )


def calibration_p_value(z):
    """P-value of mean and spread of z together, standard normal if the error bars are right."""
    return min(1.0, 2 * float(min(chi2.sf(z.square().sum(), len(z)), chi2.sf(z.mean() ** 2 * len(z), 1))))


@pytest.mark.calibration
def test_error_bars_are_calibrated(sharp, replicates):
    z = z_scores(replicates, sharp[1])
    assert calibration_p_value(z) > 1e-5, z
    assert chi2.cdf(z.square().sum(), len(z)) > 1e-5, z  # nor are they too wide


@pytest.mark.calibration
def test_the_calibration_notices_wrong_shrinkage_in_a_block(sharp, replicates):
    """The mutation: every death of a block shrinks the volume as if all n points were alive."""
    wrong = [dataclasses.replace(r, live_counts=torch.full_like(r.live_counts, NUM_LIVE)) for r in replicates]
    assert calibration_p_value(z_scores(wrong, sharp[1])) < 1e-5


def shrinking_volumes(num_runs=150, n=50, k=25, num_blocks=20):
    """Exact nested sampling of a uniform volume: log volumes (runs, deaths) and live counts (deaths)."""
    generator = torch.Generator().manual_seed(0)
    live = torch.rand(num_runs, n, generator=generator, dtype=torch.float64).log()
    dead, counts = [], []
    for _ in range(num_blocks):
        live = live.sort(descending=True).values
        dead.append(live[:, :k])
        fresh = torch.rand(num_runs, k, generator=generator, dtype=torch.float64).log() + live[:, k - 1 : k]
        live = torch.cat([live[:, k:], fresh], 1)
        counts.append(torch.arange(n, n - k, -1, dtype=torch.float64))
    dead.append(live.sort(descending=True).values)
    counts.append(torch.arange(n, 0, -1, dtype=torch.float64))
    return torch.cat(dead, 1), torch.cat(counts)


@pytest.mark.calibration
@pytest.mark.parametrize("mutated", [False, True])
def test_volumes_are_calibrated_under_exact_sampling(replicates, mutated):
    """Likelihood exp(-20 X^0.2) of a known volume X, whose integral has a closed form."""
    log_volume, counts = shrinking_volumes()
    exact = math.log(5 * math.factorial(4) / 20**5)
    if mutated:
        counts = torch.full_like(counts, 50.0)
    runs = [
        dataclasses.replace(replicates[0], live_counts=counts, log_likelihood=-20 * torch.exp(0.2 * x))
        for x in log_volume
    ]
    assert (calibration_p_value(z_scores(runs, exact)) < 1e-5) == mutated


@pytest.mark.calibration
def test_shells_cover_the_prior_and_weights_the_posterior(replicates):
    run = replicates[0]
    assert abs(float(log_shells(run.log_volume).exp().sum()) - 1) < 1e-12
    assert abs(float(run.log_weights.exp().sum()) - 1) < 1e-12
    assert bool((run.log_likelihood.diff() >= 0).all()) and bool((run.log_volume.diff() < 0).all())
    k = NUM_LIVE // 2
    assert run.live_counts[: k + 1].tolist() == [*range(NUM_LIVE, k, -1), NUM_LIVE]
    assert run.live_counts[-NUM_LIVE:].tolist() == [*range(NUM_LIVE, 0, -1)]
    assert len(run.position) == len(run.insertion) + NUM_LIVE


def test_posterior_draws_have_the_posterior_moments(sharp, limit):
    run = sample_nested(sharp[0], 400, seed=3, progress=False)
    draws = run.resample(500, 2, seed=1)
    assert draws.unconstrained.shape == (2, 500, 2) and draws.target is sharp[0]
    mean, sd = 0.5 / (1 + SD**2), SD / math.sqrt(1 + SD**2)
    x = run.draws.unconstrained.flatten(0, 1)
    # As many draws as are effective, resampled: twice the variance of independent ones at the most.
    error = sd * math.sqrt(2 / run.effective_draws)
    scores = [*((x.mean(0) - mean) / error), *(((x - mean) / sd).square().mean(0) - 1) * sd / error / math.sqrt(2)]
    assert max(map(abs, scores)) < limit(len(scores)), scores
    log_prior, log_likelihood = sharp[0].evaluate(draws.unconstrained)
    torch.testing.assert_close(draws.log_prior, log_prior)
    torch.testing.assert_close(draws.log_likelihood, log_likelihood)


@pytest.mark.calibration
def test_information_is_that_of_the_conjugate_posterior(sharp, replicates, limit):
    variance = SD**2 / (1 + SD**2)
    mean = 0.5 / (1 + SD**2)
    exact = 2 * 0.5 * (variance + mean**2 - 1 - math.log(variance))
    values = torch.tensor([r.information for r in replicates])
    assert abs(float((values.mean() - exact) / values.std())) * math.sqrt(len(values)) < limit()


@pytest.mark.calibration
def test_a_run_reaches_arviz(limit):
    """Draws under the names of a Pyro model, with the weights they stood for, and the evidence."""
    case = bk.exact.get("linreg10")
    run = sample_nested(case.target(), 200, seed=0, progress=False)
    tree, draws = run.to_arviz(), run.draws
    shape = (draws.num_chains, draws.num_draws)
    assert tree.posterior["b"].shape == (*shape, 10)
    np.testing.assert_array_equal(tree.posterior["b"].values, draws.values()["b"].numpy())
    stats = tree.sample_stats
    assert {"lp", "log_likelihood", "log_prior", "log_weight"} <= set(stats.data_vars)
    assert all(stats[name].dims == ("chain", "draw") and stats[name].shape == shape for name in stats.data_vars)
    # A draw's weight is that of the one dead point with its likelihood.
    weight = dict(zip(run.log_likelihood.tolist(), run.log_weights.tolist(), strict=True))
    assert stats["log_weight"].values.ravel().tolist() == [weight[x] for x in stats["log_likelihood"].values.ravel()]
    facts = tree.posterior.attrs
    assert facts["log_evidence"] == run.log_evidence and facts["ending"] == "converged"
    assert abs(facts["log_evidence"] - case.log_evidence) < limit() * facts["log_evidence_error"]


@pytest.mark.calibration
def test_a_run_prints_on_one_line(replicates):
    text = repr(replicates[0])
    assert text.startswith(f"NestedRun(log_evidence={replicates[0].log_evidence:.3f}") and len(text) < 100


@pytest.mark.calibration
@pytest.mark.parametrize(
    "wrong", [{"live_counts": torch.zeros(3)}, {"live_counts": 0}, {"log_likelihood": torch.zeros(2)}]
)
def test_points_and_their_counts_belong_together(replicates, wrong):
    with pytest.raises(BayeskitError, match="live_counts"):
        replace(replicates[0], **wrong)


# -- the insertion test ---------------------------------------------------------------------


@pytest.mark.calibration
def test_insertions_of_right_sampling_are_uniform(replicates):
    together = torch.cat([r.insertion for r in replicates])
    assert kstest(together.numpy(), "uniform").pvalue > 1e-5
    assert min(r.rolling_insertion_index_p_value for r in replicates) > 1e-5


def test_sequential_ranks_of_independent_points_are_uniform_and_uncorrelated(limit):
    generator = torch.Generator().manual_seed(1)

    def points(count):
        values = torch.rand(count, generator=generator, dtype=torch.float64)
        return SliceState(values.unsqueeze(1), values, values, values)

    uniform = torch.rand(100, 20, generator=generator, dtype=torch.float64)
    ranks = torch.stack([insertion_quantiles(points(20), points(20), u) for u in uniform])
    assert kstest(ranks.flatten().numpy(), "uniform").pvalue > 1e-5
    correlation = float(torch.stack([ranks[:, 10], ranks[:, 19]]).corrcoef()[0, 1])
    assert abs(correlation) * math.sqrt(len(ranks)) < limit()


def copied(self, target, state, *, generator):
    zero = torch.zeros(len(state.label), dtype=torch.int64)
    return state, SliceInfo(zero, zero, zero, torch.tensor(1))


def everywhere(self, log_likelihood, label):
    return torch.ones_like(log_likelihood, dtype=torch.bool)


def improper(self, log_prior, new_prior, level):
    return torch.ones_like(new_prior, dtype=torch.bool)


@pytest.fixture
def by_copies_alone(monkeypatch):
    monkeypatch.setattr(nested, "PRIOR_DRAWS_PER_EVALUATION", 0.0)


@pytest.mark.usefixtures("by_copies_alone")
@pytest.mark.parametrize(("method", "mutant"), [("step", copied), ("above", everywhere)])
def test_the_insertion_test_notices_a_broken_kernel(sharp, monkeypatch, method, mutant):
    monkeypatch.setattr(ConstrainedSlice, method, mutant)
    assert sample_nested(sharp[0], 300, seed=0, max_blocks=8, progress=False).insertion_index_p_value < 1e-5


@pytest.mark.calibration
@pytest.mark.usefixtures("by_copies_alone")
def test_a_likelihood_far_out_in_the_prior_needs_the_prior_density(monkeypatch, limit):
    """The mutation, slices without the prior, keeps its own balance: only the evidence shows it."""
    target = make_target(lambda u: normal_log_density(u, 3.0))
    exact = -4.5 - math.log(4 * math.pi)

    def z():
        run = sample_nested(target, 300, seed=0, progress=False)
        return abs(float(z_scores([run], exact)))

    assert z() < limit()
    monkeypatch.setattr(ConstrainedSlice, "_inside", improper)
    assert z() > limit()


@pytest.mark.calibration
def test_the_metric_may_not_know_the_points_it_moves(monkeypatch):
    """The mutation: a metric of the survivors lets them drift inwards, so that the evidence comes out too large."""
    target, exact = conjugate(10, 0.3)

    def p_value():
        runs = [sample_nested(target, 40, seed=seed, num_slice_steps=10, progress=False) for seed in range(5)]
        return calibration_p_value(z_scores(runs, exact))

    assert p_value() > 1e-5
    take = nested._take
    pieces = []

    def remember(state, index):
        pieces.append(take(state, index))
        return pieces[-1]

    # The survivors are the second block taken out of the ordered live points, just before the kernel is made.
    right = NestedSampler._kernel
    monkeypatch.setattr(nested, "_take", remember)
    monkeypatch.setattr(
        NestedSampler,
        "_kernel",
        lambda self, dead: dataclasses.replace(
            right(self, dead), metric=metric_of(pieces[-1].position), ensemble=pieces[-1].position
        ),
    )
    assert p_value() < 1e-5


# -- plateaus and impossible values ---------------------------------------------------------


def test_a_constant_likelihood_has_an_exact_evidence():
    run = sample_nested(make_target(lambda u: 0 * u[..., 0] - 3.0), 50, seed=0, progress=False)
    assert abs(run.log_evidence + 3) < 1e-12 and abs(run.information) < 1e-12
    assert float((run.simulate_log_evidence(50) + 3).abs().max()) < 1e-12
    assert kstest(run.insertion.numpy(), "uniform").pvalue > 1e-5


@pytest.mark.calibration
def test_a_run_ends_where_all_live_points_tie():
    """The smallest share that doubles know takes 740 more factors of e, of which labels of ties can tell 36 apart."""
    target, log_evidence = conjugate(2, 1.0)
    run = sample_nested(target, 50, seed=0, termination=1e-320, progress=False)
    assert run.ending == "converged" and run.num_stuck == 0
    assert float(run.live_counts.reciprocal().sum()) < 100
    assert abs(run.log_evidence - log_evidence) < 5 * float(run.simulate_log_evidence(200).std())


PLATEAUS = {
    "two levels": (lambda u: torch.where(u[..., 0] > 1.5, 5.0, 0 * u[..., 0]), lambda p: p * math.exp(5) + 1 - p),
    "zero but for a corner": (lambda u: torch.where(u[..., 0] > 1.5, 0 * u[..., 0], -torch.inf), lambda p: p),
}


@pytest.mark.calibration
@pytest.mark.parametrize("name", PLATEAUS)
def test_plateaus_are_compressed_like_anything_else(name):
    log_likelihood, evidence = PLATEAUS[name]
    exact = math.log(evidence(0.5 * math.erfc(1.5 / math.sqrt(2))))
    target = make_target(log_likelihood)
    runs = [sample_nested(target, 200, seed=seed, num_slice_steps=10, progress=False) for seed in range(5)]
    assert all(r.ending == "converged" for r in runs)
    z = z_scores(runs, exact)
    assert calibration_p_value(z) > 1e-5, z


def test_a_likelihood_that_is_sometimes_nan_counts_as_zero_there(limit):
    def log_likelihood(u):
        return torch.where(u[..., 0] > 0, normal_log_density(u, 0.5, 0.5), torch.nan)

    run = sample_nested(make_target(log_likelihood), 200, seed=0, progress=False)
    # Half of each coordinate's posterior N(0.4, 0.2) that is cut off has mass Phi(-0.4 / sqrt(0.2)).
    _, exact = conjugate(2, 0.5)
    exact += math.log(0.5 * math.erfc(-0.4 / math.sqrt(0.2) / math.sqrt(2)))
    assert run.num_nan > 50
    assert abs(run.log_evidence - exact) / float(run.simulate_log_evidence().std()) < limit()


BROKEN = {
    "nan": (lambda u: torch.full_like(u[..., 0], torch.nan), DataError, "NaN at every prior draw"),
    "zero": (lambda u: torch.full_like(u[..., 0], -torch.inf), InitializationError, "zero at all 20"),
    "infinite": (lambda u: torch.where(u[..., 0] > 0, torch.inf, u[..., 0]), DataError, "infinite at a prior draw"),
    "infinite later": (
        lambda u: torch.where(u[..., 0] > 4, torch.inf, u[..., 0]),
        DataError,
        "the evidence is infinite",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_impossible_likelihood_is_named(name):
    log_likelihood, error, text = BROKEN[name]
    with pytest.raises(error, match=text):
        sample_nested(make_target(log_likelihood), 20, seed=0, termination=1e-9, progress=False)


def test_a_prior_that_does_not_draw_from_itself_is_named():
    target = bk.Target.from_functions(
        lambda u: torch.where(u[..., 0] > 0, -u[..., 0], -torch.inf), lambda u: u[..., 0], 1, draw_normal(1)
    )
    with pytest.raises(InitializationError, match="draws of sample_prior"):
        sample_nested(target, 20, seed=0, progress=False)


@pytest.mark.parametrize(
    "setting",
    [
        {"num_live": 1},
        {"num_live": 2},
        {"num_delete": 60},
        {"num_delete": 1},
        {"num_slice_steps": 0},
        {"termination": 0.0},
        {"termination": 1.0},
        {"max_blocks": 0},
        {"time_budget": 0.0},
    ],
    ids=str,
)
def test_settings_outside_their_domain_are_refused(sharp, setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        sample_nested(sharp[0], **({"num_live": NUM_LIVE} | setting))


def test_fewer_live_points_than_dimensions_are_refused():
    with pytest.raises(SettingsError, match="at least 11 in 10 dimensions"):
        sample_nested(conjugate(10, 1.0)[0], 10)


def test_a_target_without_a_prior_sampler_is_refused():
    with pytest.raises(SettingsError, match="sample_prior"):
        sample_nested(bk.Target.from_functions(normal_log_density, normal_log_density, 2))


@pytest.mark.calibration
@pytest.mark.parametrize("arguments", [{"num_draws": 0}, {"num_chains": 0}])
def test_resampling_nothing_is_refused(replicates, arguments):
    with pytest.raises(SettingsError, match="at least 1"):
        replicates[0].resample(**arguments)
    with pytest.raises(SettingsError, match="num_simulations"):
        replicates[0].simulate_log_evidence(1)


def test_a_flat_cloud_gets_a_diagonal_metric():
    line = torch.linspace(-1, 1, 20, dtype=torch.float64)
    flat = metric_of(torch.stack([line, 2 * line], -1)).factor
    torch.testing.assert_close(flat, torch.diag(torch.stack([line, 2 * line]).std(1)))
    cloud = torch.randn(100, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    factor = metric_of(cloud).factor
    torch.testing.assert_close(factor @ factor.T, cloud.T.cov())


# -- the loop -------------------------------------------------------------------------------


def assert_same(first, second):
    for field in ("position", "log_prior", "log_likelihood", "live_counts", "insertion", "start", "end"):
        assert torch.equal(*(getattr(run, field).nan_to_num(nan=-1.0) for run in (first, second))), field
    assert (first.num_evaluations, first.ending) == (second.num_evaluations, second.ending)


@pytest.mark.calibration
def test_the_seed_decides(sharp, replicates):
    again = sample_nested(sharp[0], NUM_LIVE, seed=0, num_slice_steps=10, progress=False)
    assert_same(again, replicates[0])
    assert not torch.equal(replicates[0].position[:50], replicates[1].position[:50])


@pytest.mark.calibration
def test_a_crashed_run_resumes_bit_for_bit(sharp, replicates, tmp_path, monkeypatch):
    settings = {"num_slice_steps": 10, "progress": False, "checkpoint": tmp_path / "run", "checkpoint_seconds": 0.0}
    calls, step = [], ConstrainedSlice.step

    def crash(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:
            raise RuntimeError("power cut")
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(ConstrainedSlice, "step", crash)
        with pytest.raises(RuntimeError, match="power cut"):
            sample_nested(sharp[0], NUM_LIVE, seed=0, **settings)
    assert_same(sample_nested(sharp[0], NUM_LIVE, seed=0, **settings), replicates[0])


@pytest.mark.calibration
def test_a_run_cut_short_returns_what_it_has_and_can_go_on(sharp, replicates, tmp_path):
    settings = {"num_slice_steps": 10, "progress": False, "checkpoint": tmp_path / "run"}
    with pytest.raises(BudgetError, match="first block"):
        sample_nested(sharp[0], NUM_LIVE, seed=0, time_budget=1e-9, **settings)
    none = torch.zeros(0, dtype=torch.float64)
    unborn = dataclasses.replace(replicates[0], insertion=none, start=none, end=none)
    assert unborn.start_correlation == 0 and unborn.insertion_index_p_value == 1
    short = sample_nested(sharp[0], NUM_LIVE, seed=0, max_blocks=3, **settings)
    assert short.ending == "finished" and len(short.position) == NUM_LIVE + 3 * NUM_LIVE // 2
    assert short.remaining_share > replicates[0].remaining_share
    assert_same(sample_nested(sharp[0], NUM_LIVE, seed=0, **settings), replicates[0])


@pytest.mark.parametrize(
    "change", [{"num_live": 61}, {"num_delete": 20}, {"num_slice_steps": 11}, {"seed": 1}], ids=str
)
def test_a_run_does_not_resume_with_other_settings(sharp, tmp_path, change):
    settings = {"num_live": NUM_LIVE, "num_slice_steps": 10, "progress": False, "checkpoint": tmp_path / "run"}
    sample_nested(sharp[0], max_blocks=1, **settings)
    with pytest.raises(CheckpointError, match=next(iter(change))):
        sample_nested(sharp[0], **(settings | change))


def test_a_run_does_not_resume_with_another_dimension(sharp, tmp_path):
    settings = {"num_live": NUM_LIVE, "progress": False, "checkpoint": tmp_path / "run", "max_blocks": 1}
    sample_nested(sharp[0], **settings)
    with pytest.raises(CheckpointError, match="another model"):
        sample_nested(conjugate(3, SD)[0], **settings)


def test_float32_stays_float32_and_ties_do_no_harm(limit):
    target = bk.Target.from_functions(
        normal_log_density,
        lambda u: normal_log_density(u, 0.5, SD) + 1e6,  # rounded to steps of 1/16
        2,
        lambda n, g: torch.randn(n, 2, generator=g),
        dtype=torch.float32,
    )
    run = sample_nested(target, 200, seed=0, progress=False)
    assert run.position.dtype == torch.float32 and int((run.log_likelihood.diff() == 0).sum()) > 50
    error = float(run.simulate_log_evidence().std())
    assert abs(run.log_evidence - 1e6 - conjugate(2, SD)[1]) / (error + 1 / 32) < limit()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_run_on_a_device(limit):
    target = bk.Target.from_functions(
        normal_log_density,
        lambda u: normal_log_density(u, 0.5, SD),
        2,
        lambda n, g: torch.randn(n, 2, generator=g, dtype=torch.float64, device=g.device),
        device="cuda",
    )
    run = sample_nested(target, 200, seed=0, progress=False)
    assert run.position.device.type == "cuda"
    assert abs(run.log_evidence - conjugate(2, SD)[1]) / float(run.simulate_log_evidence().std()) < limit()
