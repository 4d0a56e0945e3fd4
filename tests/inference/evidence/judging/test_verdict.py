"""What several estimates amount to."""

import math

import numpy as np
import pytest

from bayeskit.errors import SettingsError
from bayeskit.inference.evidence import Evidence, Verdict

GOOD = Evidence("bridge_sampling", -94.083, 0.004, 8000)
OTHER = Evidence("path_sampling", -94.090, 0.020, 9000)
ABSURD = Evidence("harmonic_mean", -2.0, 0.3, 4000, ("infinite variance: use bridge sampling",))
FAILED = Evidence("stepping_stone", math.nan, math.nan, 0, ("failed: no ladder",))


def test_the_most_precise_trusted_estimate_speaks():
    verdict = Verdict.of([GOOD, OTHER, ABSURD, FAILED])
    assert verdict.best is GOOD and verdict.is_agreed
    assert (verdict.log_evidence, verdict.standard_error) == (-94.083, 0.004)
    assert verdict.agreeing == ("bridge_sampling", "path_sampling") and verdict.disagreeing == {}
    assert set(verdict.untrusted) == {"harmonic_mean", "stepping_stone"}
    assert (verdict.num_trusted, verdict.num_methods) == (2, 4)


def test_one_precise_method_does_not_outvote_the_others():
    """A method that missed half of the posterior claims the smallest error; three others agree without it."""
    missed = Evidence("bridge_sampling", -94.776, 0.001, 8000)
    others = [Evidence(name, -94.083 + 0.01 * i, 0.02, 8000) for i, name in enumerate(("a", "b", "c"))]
    verdict = Verdict.of([missed, *others])
    assert verdict.best is others[0] and verdict.agreeing == ("a", "b", "c")
    assert list(verdict.disagreeing) == ["bridge_sampling"]
    assert verdict.disagreeing["bridge_sampling"] == pytest.approx(0.693 / math.hypot(0.02, 0.001))
    assert "disagrees with bridge_sampling" in str(verdict)


def estimates(**values):
    return [Evidence(name, value, error, 1) for name, (value, error) in values.items()]


def test_vague_estimates_carry_no_precise_one():
    """Three with errors of .3 agree with whatever is near; the two precise ones that agree are right."""
    verdict = Verdict.of(
        estimates(vis=(-54.9, 0.002), bridge=(-55.43, 0.005), warp=(-55.43, 0.003), nested=(-55.4, 0.3),
                  smc=(-55.2, 0.25), adaptive=(-55.2, 0.3), prequential=(-55.2, 0.25))
    )  # fmt: skip
    assert verdict.best.method == "warp" and verdict.is_agreed and list(verdict.disagreeing) == ["vis"]


def test_no_vague_estimate_reconciles_precise_ones_that_contradict_each_other():
    verdict = Verdict.of(estimates(a=(-10, 0.01), b=(-20, 0.01), c=(-15, 100), d=(0, 100), e=(5, 100)))
    assert not verdict.is_agreed and "no agreement" in str(verdict) and verdict.standard_error == 0.01


def test_an_error_of_nothing_wins_no_vote():
    """A plateau gave naive Monte Carlo the error zero; all others agree on another value."""
    others = {f"m{i}": (-1.7 + 0.02 * i, 0.05) for i in range(5)}
    verdict = Verdict.of(estimates(naive=(-38.7, 1e-14), **others))
    assert verdict.is_agreed and verdict.best.method != "naive" and list(verdict.disagreeing) == ["naive"]


def test_one_alone_agrees_with_nobody():
    verdict = Verdict.of(estimates(a=(-10, 0.01)))
    assert verdict.best is not None and not verdict.is_agreed and "no agreement" not in str(verdict)


def test_two_estimates_of_one_method_are_refused():
    with pytest.raises(SettingsError, match="several estimates by smc"):
        Verdict.of([Evidence("smc", -10.0, 0.01, 1), Evidence("smc", -20.0, 0.01, 1)])


def test_two_that_differ_do_not_agree():
    far = Evidence("path_sampling", -94.30, 0.02, 9000)
    verdict = Verdict.of([GOOD, far])
    assert not verdict.is_agreed and list(verdict.disagreeing) == ["path_sampling"]
    assert "no agreement" in str(verdict)


def test_without_a_trusted_method_there_is_no_number():
    verdict = Verdict.of([ABSURD, FAILED])
    assert verdict.best is None and math.isnan(verdict.log_evidence) and not verdict.is_agreed
    assert "unknown" in str(verdict)


def test_a_lone_trusted_estimate_is_contradicted_by_a_refused_one_that_found_more_mass():
    ladder = Evidence("stepping_stone", -93.0, 0.05, 9000, ("chains disagree: run longer",))
    verdict = Verdict.of([GOOD, ladder, ABSURD])
    assert verdict.best is GOOD and not verdict.is_agreed and list(verdict.contradicted_by) == ["stepping_stone"]
    assert verdict.contradicted_by["stepping_stone"] == pytest.approx(1.083 / math.hypot(0.05, 0.004))
    assert "more mass was found, without trust, by stepping_stone (21.6 standard errors above)" in str(verdict)
    missing = Evidence("stepping_stone", -95.0, 0.05, 9000, ("chains disagree: run longer",))
    assert Verdict.of([GOOD, missing]).contradicted_by == {}


@pytest.mark.parametrize(
    ("third", "is_agreed"),
    [
        ("nested_sampling", True),
        ("laplace_importance_sampling", False),  # which knows the modes of the chains only
        ("warp_bridge_sampling", False),  # on the draws of the first
    ],
)
def test_three_that_agree_outweigh_a_refused_one_if_one_of_them_begins_at_the_prior(third, is_agreed):
    """As for NumPyro's batting averages with logits: -49.527 by quadrature, and a ladder whose chains disagree."""
    names = {"bridge_sampling", "learned_harmonic_mean", "warp_bridge_sampling", third}
    estimates = [Evidence(name, -49.53, 0.02, 9000) for name in sorted(names)]
    ladder = Evidence("stepping_stone", -48.7, 0.1, 9000, ("chains disagree: run longer",))
    sources = dict.fromkeys(names - {third}, "posterior") | {third: third}
    verdict = Verdict.of([*estimates, ladder], sources=sources)
    assert verdict.is_agreed == is_agreed and list(verdict.contradicted_by) == ["stepping_stone"]
    assert "more mass was found, without trust, by stepping_stone" in str(verdict)
    assert ("they agree" in str(verdict)) == is_agreed
    # A trusted one counts all the same.
    assert not Verdict.of([*estimates, Evidence("stepping_stone", -48.7, 0.1, 9000)], sources=sources).is_agreed


def test_estimates_of_several_runs_that_found_more_mass_are_not_outweighed():
    agreeing = [GOOD, Evidence("warp_bridge_sampling", -94.08, 0.004, 8000), Evidence("smc", -94.1, 0.1, 9000)]
    more = [Evidence(name, -92.0, 0.2, 9000, ("why",)) for name in ("stepping_stone", "nested_sampling")]
    assert Verdict.of([*agreeing, more[0]]).is_agreed
    assert not Verdict.of([*agreeing, *more]).is_agreed


def test_a_vague_estimate_from_the_prior_outweighs_nothing():
    posterior = [GOOD, Evidence("warp_bridge_sampling", -94.08, 0.004, 8000)]
    more = Evidence("smc", -92.9, 0.2, 9000, ("why",))
    for error, is_agreed in ((0.05, True), (0.6, False)):
        vague = Evidence("naive_monte_carlo", -94.0, error, 9000)
        assert Verdict.of([*posterior, vague, more]).is_agreed == is_agreed


def test_methods_of_one_run_are_one_source_by_default():
    ladder = [
        Evidence(name, -94.08, 0.05, 9000)
        for name in ("stepping_stone", "modified_path_sampling", "thermodynamic_integration")
    ]
    verdict = Verdict.of([*ladder, Evidence("smc", -92.0, 0.2, 9000, ("why",))])
    assert verdict.num_sources == 1 and not verdict.is_agreed


def test_a_trusted_estimate_that_found_more_mass_leaves_no_agreement():
    more = Evidence("smc", -93.5, 0.05, 9000)
    others = [GOOD, OTHER, Evidence("warp_bridge_sampling", -94.08, 0.004, 8000)]
    verdict = Verdict.of([*others, more])
    assert verdict.best is GOOD and not verdict.is_agreed and verdict.contradicted_by == {}
    assert "no agreement: this estimate disagrees with smc" in str(verdict)
    less = Evidence("smc", -94.5, 0.05, 9000)
    assert Verdict.of([*others, less]).is_agreed


@pytest.mark.parametrize(("gap", "is_agreed"), [(1.7, True), (0.01, False)])
def test_an_integral_over_too_few_temperatures_contradicts_nothing_within_its_known_error(gap, is_agreed):
    coarse = Evidence(
        "modified_path_sampling", -93.0, 0.03, 9000, ("the ladder is too coarse",), {"remaining_gap": gap}
    )
    assert Verdict.of([GOOD, OTHER, coarse]).is_agreed == is_agreed


def test_methods_on_the_same_draws_count_as_one_source():
    sources = {"bridge_sampling": "posterior", "path_sampling": "ladder", "warp": "posterior"}
    verdict = Verdict.of([GOOD, OTHER, Evidence("warp", -94.08, 0.004, 8000)], sources=sources)
    assert verdict.num_sources == 2 and "2 separate sets of draws" in str(verdict)


def test_right_estimates_are_rarely_said_to_disagree():
    """A hundred tables in ten thousand may: 10,000 tables of twelve estimates with right errors."""
    generator = np.random.default_rng(0)
    errors = generator.uniform(0.01, 0.2, 12)
    alarms = 0
    for _ in range(2000):
        noise = generator.normal(0.0, errors)
        estimated = [Evidence(str(i), x, e, 1) for i, (x, e) in enumerate(zip(noise, errors, strict=True))]
        alarms += bool(Verdict.of(estimated).disagreeing)
    # At most 1 % by construction: 2,000 tables exceed 42 with probability below 1e-5.
    assert alarms <= 42


def test_an_exact_answer_beside_an_estimate():
    exact = Evidence("chib", -94.0845, 0.0, 10)
    assert Verdict.of([exact, GOOD]).is_agreed
    assert not Verdict.of([exact, Evidence("twin", -94.0, 0.0, 10)]).is_agreed


def test_scores_alone_are_no_methods_that_failed():
    assert str(Verdict.of([], refused={})) == "log evidence unknown: none of the selected methods estimates it"
    assert str(Verdict.of([], refused={"chib": "no blocks"})) == "log evidence unknown: none of 1 methods applies"


def test_nothing_to_judge_is_refused():
    with pytest.raises(SettingsError, match="estimates is empty"):
        Verdict.of([])
