import dataclasses
import math

import pytest
import torch

from bayeskit import Target, exact
from bayeskit.errors import DrawsError, SettingsError
from bayeskit.exact._several_modes import eggbox, gaussian_shells, spike_and_slab
from bayeskit.inference._known_modes import KnownModes
from bayeskit.inference.evidence._nested_evidence import expected_error, nested_sampling
from bayeskit.inference.samplers._nested import ConstrainedSlice, SliceInfo, sample_nested


@pytest.fixture(scope="module")
def case():
    return exact.get("beta_binomial")


@pytest.fixture(scope="module")
def run(case):
    return sample_nested(case.target(), 300, seed=1, progress=False)


CASES = {
    "beta_binomial": lambda: exact.get("beta_binomial"),
    "linreg10": lambda: exact.get("linreg10"),
    "eight_schools": lambda: exact.get("eight_schools"),
    "shells2": gaussian_shells,
    "eggbox": eggbox,
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_evidence_of_known_problems(name, limit):
    case = CASES[name]()
    z = nested_sampling(case.target(), num_live=100, seed=3)
    assert abs(z.log_evidence - case.log_evidence) / z.standard_error < limit(), z
    assert z.trusted, z
    assert z.method == "nested_sampling" and z.num_evaluations > 100 and z.seconds > 0
    assert z.standard_error == pytest.approx(z.diagnostics["expected_error"], rel=0.25)


@pytest.mark.calibration
def test_a_given_run_is_used_and_the_seed_moves_the_error_only(case, run):
    first, second = (nested_sampling(run.target, run, seed=seed) for seed in (0, 1))
    assert first.log_evidence == second.log_evidence == run.log_evidence
    assert first.standard_error != second.standard_error
    assert nested_sampling(case.target(), run).log_evidence == run.log_evidence  # an equal target is as good


@pytest.mark.calibration
def test_the_error_falls_with_the_root_of_the_live_points(case, run):
    small, large = nested_sampling(case.target(), num_live=50), nested_sampling(run.target, run)
    assert 1.7 < small.standard_error / large.standard_error < 3.5


@pytest.mark.calibration
def test_a_run_on_another_target_is_refused(run):
    with pytest.raises(DrawsError, match="another target"):
        nested_sampling(exact.get("linreg10").target(), run)
    with pytest.raises(SettingsError, match="sample_nested"):
        nested_sampling(run.target, run.draws)


@pytest.mark.calibration
def test_the_expected_error_counts_how_points_die(run):
    """Where half of them die at once, each of the ``log 2`` of a block adds ``1 / n`` of variance."""
    single = math.sqrt(run.information / run.num_live)
    assert expected_error(run) == pytest.approx(single / math.sqrt(math.log(2)), rel=0.15)
    alone = dataclasses.replace(run, live_counts=torch.full_like(run.live_counts, run.num_live))
    assert expected_error(alone) == pytest.approx(math.sqrt(alone.information / run.num_live), rel=0.05)


def test_a_run_that_ended_early_says_so(case):
    short = sample_nested(case.target(), 100, seed=0, max_blocks=1, progress=False)
    z = nested_sampling(short.target, short)
    assert not z.trusted and "ended early (finished)" in z.warnings[0] and "resume" in z.warnings[0]
    assert z.num_evaluations == short.num_evaluations  # nothing has been climbed


@pytest.mark.calibration
def test_few_effective_draws_are_said(case):
    z = nested_sampling(case.target(), num_live=10)
    assert any("effective draws: use more live points" in w for w in z.warnings)


def test_points_that_do_not_move_are_noticed(case, monkeypatch):
    """The mutation: new points are copies of survivors."""

    def copied(self, target, state, *, generator):
        zero = torch.zeros(len(state.label), dtype=torch.int64)
        return state, SliceInfo(zero, zero, zero, torch.tensor(1))

    monkeypatch.setattr(ConstrainedSlice, "step", copied)
    z = nested_sampling(exact.get("linreg10").target(), num_live=100)
    assert any("not uniform" in w and "more slice steps" in w for w in z.warnings)
    assert any("depend on their starting points" in w for w in z.warnings)


@pytest.mark.calibration
def test_insertions_that_drift_in_one_stretch_are_noticed(run):
    """The mutation: for one stretch of the run new points come to lie too high; the whole run hardly shows it."""
    n = run.num_live
    insertion = run.insertion.clone()
    stretch = (~run.start.isnan()).nonzero().squeeze(1)[n : 2 * n]  # of copies, as draws from the prior show nothing
    insertion[stretch] = insertion[stretch].sqrt()
    drifting = dataclasses.replace(run, insertion=insertion)
    assert nested_sampling(run.target, run).trusted
    assert drifting.rolling_insertion_index_p_value < 1e-4 < run.rolling_insertion_index_p_value
    assert any("not uniform" in w for w in nested_sampling(run.target, drifting).warnings)


def normal_log_density(u):
    return (-0.5 * u.square() - 0.5 * math.log(2 * math.pi)).sum(-1)


def make_target(log_likelihood, dim=2):
    return Target.from_functions(
        normal_log_density,
        log_likelihood,
        dim,
        lambda n, generator: torch.randn(n, dim, generator=generator, dtype=torch.float64),
    )


@pytest.mark.calibration
def test_a_narrow_peak_within_a_broad_one_is_noticed_and_found_by_going_on(limit):
    """Where the run ends, the spike holds all of the evidence and a volume that no live point has seen."""
    case = spike_and_slab(5, spike_sd=0.001)
    target = case.target()
    missed = nested_sampling(target, num_live=60)
    assert abs(missed.log_evidence - case.log_evidence) / missed.standard_error > limit()
    assert any("a mode" in w and "smaller termination" in w for w in missed.warnings)
    # What the climb from the last points has found is known to all methods.
    assert any(peak.found_by == "nested points" for peak in KnownModes.of(target).weighted)
    found = nested_sampling(target, sample_nested(target, 60, termination=1e-11, progress=False))
    assert abs(found.log_evidence - case.log_evidence) / found.standard_error < limit()
    assert found.trusted


def test_nan_is_flagged_with_its_share():
    z = nested_sampling(make_target(lambda u: torch.where(u[..., 0] > 1, torch.nan, -u.square().sum(-1))), num_live=100)
    assert any("NaN at" in w and "correct the model" in w for w in z.warnings)


@pytest.mark.calibration
def test_a_likelihood_that_differs_from_call_to_call_is_noticed(run):
    z = nested_sampling(run.target, dataclasses.replace(run, num_stuck=50))
    assert any("50 slice updates found no new point" in w for w in z.warnings)


def test_blocks_smaller_than_the_dimension_are_said():
    z = nested_sampling(make_target(lambda u: -u.square().sum(-1), dim=8), num_live=12)
    assert any("blocks of 6 points" in w for w in z.warnings)


def test_a_constant_likelihood_has_no_error_but_rounding():
    z = nested_sampling(make_target(lambda u: 0 * u[..., 0] - 3.0), num_live=200)
    assert abs(z.log_evidence + 3) < 1e-12 and z.standard_error < 1e-12
    assert [text[:39] for text in z.warnings] == ["the likelihood is the same at all draws"]
