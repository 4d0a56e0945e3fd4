"""New live points that are drawn from the prior, beside copies that are moved."""

import math

import pytest
import torch
from scipy.stats import chi2

import bayeskit as bk
from bayeskit.exact._neals_funnel import neals_funnel
from bayeskit.inference.samplers import _nested as nested
from bayeskit.inference.samplers._metric import Metric
from bayeskit.inference.samplers._nested import ConstrainedSlice, NestedSampler, SliceInfo, draw_above, sample_nested

F64 = torch.float64


def normal_log_density(u, mean=0.0, sd=1.0):
    return (-0.5 * ((u - mean) / sd).square() - math.log(sd) - 0.5 * math.log(2 * math.pi)).sum(-1)


def draw_normal(n, generator):
    return torch.randn(n, 2, generator=generator, dtype=F64)


@pytest.fixture(scope="module")
def sharp():
    """A standard normal prior in the plane and a likelihood N(0.5; u, 0.1^2) of each coordinate; its log evidence."""
    target = bk.Target.from_functions(normal_log_density, lambda u: normal_log_density(u, 0.5, 0.1), 2, draw_normal)
    return target, 2 * (-0.5 * 0.25 / 1.01 - 0.5 * math.log(2 * math.pi * 1.01))


def z_scores(runs, exact):
    return torch.tensor(
        [(r.log_evidence - exact) / float(r.simulate_log_evidence(200, seed=i).std()) for i, r in enumerate(runs)]
    )


def squared_scores_on_a_funnel(count, num_slice_steps):
    """Return their sum and its quantiles, the claimed error being right within a tenth."""
    case = neals_funnel(3)
    target = case.target()
    settings = {"num_slice_steps": num_slice_steps, "termination": 0.01, "progress": False}
    runs = [sample_nested(target, 30, seed=i, **settings) for i in range(count)]
    low, high = chi2.ppf([5e-6, 1 - 5e-6], count)
    return float(z_scores(runs, case.log_evidence).square().sum()), 0.9**2 * low, 1.1**2 * high


@pytest.mark.long
def test_points_drawn_from_the_prior_keep_errors_right_on_a_funnel(monkeypatch):
    """The mutation: copies alone that hardly move, and their scale least of all."""
    found, low, high = squared_scores_on_a_funnel(25, 3)
    assert low < found < high
    monkeypatch.setattr(nested, "PRIOR_DRAWS_PER_EVALUATION", 0.0)
    found, _, high = squared_scores_on_a_funnel(120, 1)
    assert found > high


@pytest.mark.parametrize(("log_volume", "drawn"), [(0.0, 50), (-3.0, 50), (-1000.0, 0)])
def test_points_are_drawn_while_that_is_cheap(sharp, log_volume, drawn):
    """The reciprocal of the last share is no number."""
    sampler = NestedSampler(sharp[0], 100, 50, 20, 1e-3, 10, seed=0)
    generator = torch.Generator().manual_seed(0)
    state = sampler.start(generator)
    state = state._replace(log_volume=torch.tensor(log_volume, dtype=F64))
    _, row = sampler.advance(state, 0, generator)
    assert int(row["start"].isnan().sum()) == drawn


@pytest.mark.calibration
def test_too_few_draws_from_the_prior_are_made_up_for_by_copies(sharp, limit, monkeypatch):
    """A share that is said to be larger than it is."""
    drawn = nested.draw_above
    monkeypatch.setattr(nested, "draw_above", lambda *a: drawn(*a[:3], min(1.0, 30 * a[3]), *a[4:]))
    runs = [sample_nested(sharp[0], 100, seed=seed, num_slice_steps=5, progress=False) for seed in range(10)]
    assert any(0 < int(run.start.isnan().sum()) % 50 for run in runs)
    assert abs(float(z_scores(runs, sharp[1]).mean())) * math.sqrt(10) < limit()


def test_beside_draws_each_copy_keeps_its_own_start(sharp, monkeypatch):
    """Copies that do not move lie where they started, and those that are not needed count for nothing."""

    def still(self, target, state, *, generator):
        zero = torch.zeros(len(state.label), dtype=torch.int64)
        return state, SliceInfo(zero, zero + 1, zero, torch.tensor(1))

    drawn = nested.draw_above

    def half(*arguments):
        found = drawn(*arguments)
        return found._replace(points=type(found.points)(*(column[:20] for column in found.points)))

    monkeypatch.setattr(ConstrainedSlice, "step", still)
    monkeypatch.setattr(nested, "draw_above", half)
    sampler = NestedSampler(sharp[0], 100, 50, 20, 1e-3, 10, seed=0)
    generator = torch.Generator().manual_seed(0)
    state, row = sampler.advance(sampler.start(generator), 0, generator)
    assert torch.equal(row["start"].isnan(), torch.arange(50) < 20)
    assert torch.equal(row["start"][20:], row["end"][20:])
    assert int(state.num_stuck) == 30


def kernel_of(level):
    ensemble = torch.zeros(2, 2, dtype=F64)
    level = torch.tensor(level, dtype=F64)
    return ConstrainedSlice(level, torch.zeros((), dtype=F64), Metric.dense(torch.eye(2, dtype=F64)), ensemble)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_prior_draw_that_overflows_is_no_point(bad):
    """The likelihood is as large there as anywhere."""

    def sample_prior(n, generator):
        return draw_normal(n, generator).index_fill(0, torch.arange(0, n, 2), bad)

    target = bk.Target.from_functions(normal_log_density, lambda u: 0 * u.nan_to_num().sum(-1), 2, sample_prior)
    found = draw_above(target, kernel_of(-1.0), 30, 0.5, 60, torch.Generator().manual_seed(0))
    assert len(found.points.label) == 30 and bool(found.points.position.isfinite().all())


def test_an_infinite_likelihood_stays_infinite():
    """So that the run can say so."""
    target = bk.Target.from_functions(
        normal_log_density, lambda u: torch.where(u[..., 0] > 0, torch.inf, 0.0).to(u), 2, draw_normal
    )
    found = draw_above(target, kernel_of(-1.0), 30, 1.0, 60, torch.Generator().manual_seed(0))
    assert bool((found.points.log_likelihood == torch.inf).any())


@pytest.mark.parametrize("num_points", [10, 200])
def test_no_more_rows_are_evaluated_at_once_than_asked_for(sharp, num_points):
    rows = []

    def sample_prior(n, generator):
        rows.append(n)
        return draw_normal(n, generator)

    target = bk.Target.from_functions(normal_log_density, sharp[0].log_likelihood, 2, sample_prior)
    found = draw_above(target, kernel_of(-5.0), num_points, 0.05, 40, torch.Generator().manual_seed(0))
    assert max(rows) == 40 and sum(rows) == found.num_evaluations


def test_small_blocks_take_few_evaluations_of_the_prior(sharp):
    """As many rows at once as there are live points. With twice the block at once it would be some 700 evaluations."""
    rows = []

    def sample_prior(n, generator):
        rows.append(n)
        return draw_normal(n, generator)

    target = bk.Target.from_functions(normal_log_density, sharp[0].log_likelihood, 2, sample_prior)
    run = sample_nested(target, 50, num_delete=2, max_blocks=100, progress=False)
    assert run.ending == "finished" and bool(run.start.isnan().all())
    assert max(rows) == 50 and len(rows) < 300
