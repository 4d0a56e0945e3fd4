"""What several estimates amount to."""

import math

import numpy as np
import pytest

from bayeskit.inference.evidence import Evidence, judge

GOOD = Evidence("bridge_sampling", -94.083, 0.004, 8000)
OTHER = Evidence("path_sampling", -94.090, 0.020, 9000)
ABSURD = Evidence("harmonic_mean", -2.0, 0.3, 4000, ("infinite variance: use bridge sampling",))
FAILED = Evidence("stepping_stone", math.nan, math.nan, 0, ("failed: no ladder",))


def test_the_most_precise_trusted_estimate_speaks():
    verdict = judge([GOOD, OTHER, ABSURD, FAILED])
    assert verdict.best is GOOD and verdict.is_agreed
    assert (verdict.log_evidence, verdict.standard_error) == (-94.083, 0.004)
    assert verdict.agreeing == ("bridge_sampling", "path_sampling") and verdict.disagreeing == {}
    assert set(verdict.untrusted) == {"harmonic_mean", "stepping_stone"}
    assert (verdict.num_trusted, verdict.num_methods) == (2, 4)


def test_one_precise_method_does_not_outvote_the_others():
    """A method that missed half of the posterior claims the smallest error; three others agree without it."""
    missed = Evidence("bridge_sampling", -94.776, 0.001, 8000)
    others = [Evidence(name, -94.083 + 0.01 * i, 0.02, 8000) for i, name in enumerate(("a", "b", "c"))]
    verdict = judge([missed, *others])
    assert verdict.best is others[0] and verdict.agreeing == ("a", "b", "c")
    assert list(verdict.disagreeing) == ["bridge_sampling"]
    assert verdict.disagreeing["bridge_sampling"] == pytest.approx(0.693 / math.hypot(0.02, 0.001))
    assert "disagrees with bridge_sampling" in str(verdict)


def test_two_that_differ_do_not_agree():
    far = Evidence("path_sampling", -94.30, 0.02, 9000)
    verdict = judge([GOOD, far])
    assert not verdict.is_agreed and list(verdict.disagreeing) == ["path_sampling"]
    assert "no agreement" in str(verdict)


def test_without_a_trusted_method_there_is_no_number():
    verdict = judge([ABSURD, FAILED])
    assert verdict.best is None and math.isnan(verdict.log_evidence) and not verdict.is_agreed
    assert "unknown" in str(verdict)


def test_methods_on_the_same_draws_count_as_one_source():
    sources = {"bridge_sampling": frozenset({"posterior"}), "path_sampling": frozenset({"ladder"}),
               "warp": frozenset({"posterior"})}  # fmt: skip
    verdict = judge([GOOD, OTHER, Evidence("warp", -94.08, 0.004, 8000)], sources=sources)
    assert verdict.num_sources == 2 and "2 separate sets of draws" in str(verdict)


def test_right_estimates_are_rarely_said_to_disagree():
    """A hundred tables in ten thousand may: 10,000 tables of twelve estimates with right errors."""
    generator = np.random.default_rng(0)
    errors = generator.uniform(0.01, 0.2, 12)
    alarms = 0
    for _ in range(2000):
        noise = generator.normal(0.0, errors)
        alarms += bool(
            judge([Evidence(str(i), x, e, 1) for i, (x, e) in enumerate(zip(noise, errors, strict=True))]).disagreeing
        )
    # At most 1 % by construction: 2,000 tables exceed 42 with probability below 1e-5.
    assert alarms <= 42


def test_an_exact_answer_beside_an_estimate():
    exact = Evidence("chib", -94.0845, 0.0, 10)
    assert judge([exact, GOOD]).is_agreed
    assert not judge([exact, Evidence("twin", -94.0, 0.0, 10)]).is_agreed
