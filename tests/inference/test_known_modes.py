"""What is known of the modes of a target: one store, read by all judgements."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import norm

import bayeskit as bk
from bayeskit.errors import SamplingWarning
from bayeskit.inference import evidence
from bayeskit.inference._known_modes import (
    KnownModes,
    check_modes,
    half_nat_widths,
    reflections,
    remembered_checks,
    weigh_mode,
)

DOUBLE = torch.float64
SHARE, SD, D = 0.3, 0.02, 4


def spike():
    """A narrow mode inside a wide one, whose slope nothing feels from outside."""
    x = pyro.sample("x", dist.Normal(torch.zeros(D, dtype=DOUBLE), 1.0).to_event(1))
    wide = dist.Normal(torch.tensor(-0.5, dtype=DOUBLE), 1.0).log_prob(x).sum(-1) + math.log(1 - SHARE)
    narrow = dist.Normal(torch.tensor(0.8, dtype=DOUBLE), SD).log_prob(x).sum(-1) + math.log(SHARE)
    pyro.factor("likelihood", torch.logaddexp(wide, narrow))


def exact_parts():
    parts = ((1 - SHARE, -0.5, 1.0), (SHARE, 0.8, SD))
    return [math.log(w) + D * norm.logpdf(m, 0, math.sqrt(1 + s * s)) for w, m, s in parts]


def test_peaks_have_the_mass_of_their_modes(limit):
    target = bk.Target.from_pyro(spike)
    known = KnownModes.of(target)
    known.search_summands(target, torch.zeros(1, D, dtype=DOUBLE))
    known.search(target, torch.zeros(1, D, dtype=DOUBLE), "search")
    known.weigh(target)
    assert [mode.found_by for mode in known.weighted] == ["terms of a mixture"] * 2
    for mode, exact in zip(known.weighted, exact_parts(), strict=True):
        assert abs(mode.log_mass - exact - math.log(0.9)) < limit(2) * mode.relative_error
    assert KnownModes.of(target) is known
    assert known.search_summands(target, torch.zeros(1, D, dtype=DOUBLE)) == 0  # once is enough


def test_ends_in_a_known_peak_are_not_weighed_again():
    target = bk.exact.get("linreg10").target()
    known = KnownModes.of(target)
    start = torch.zeros(2, target.dim, dtype=DOUBLE)
    known.search(target, start, "first")
    known.weigh(target)
    known.search(target, start, "second")
    known.weigh(target)
    assert [mode.found_by for mode in known.weighted] == ["first"]


@pytest.mark.calibration
def test_no_method_of_a_table_trusts_itself_beside_a_mode_that_it_misses():
    methods = ["bridge_sampling", "laplace_importance_sampling", "smc"]
    with pytest.warns(SamplingWarning, match="no chain has been in a mode with about 3"):
        table = evidence.compare(bk.Target.from_pyro(spike), methods, progress=False)
    exact = float(torch.tensor(exact_parts()).logsumexp(0))
    for z in table:
        assert abs(z.log_evidence - exact) > 0.3  # all miss the narrow mode
        assert not z.trusted and "a mode with a mass of 0.5" in "; ".join(z.warnings)
    assert table.verdict.best is None


def test_checks_are_made_again_for_modes_that_are_found_later():
    seen = []
    with remembered_checks() as checks:
        assert check_modes(lambda modes: seen.append(len(modes)) or ["missed"] * bool(modes), []) == []
    assert checks[0]([object()]) == ["missed"] and seen == [0, 1]
    assert check_modes(lambda modes: ["now"], []) == ["now"] and len(checks) == 1  # nothing is remembered outside


def test_a_verdict_is_no_agreement_beside_more_mass_in_a_refused_row():
    trusted = [evidence.Evidence(name, -10.0, 0.01, 1) for name in ("bridge_sampling", "smc")]

    def verdict(log_evidence, method="nested_sampling"):
        refused = evidence.Evidence(method, log_evidence, 0.1, 1, ("refused",))
        return evidence.Verdict.of([*trusted, refused])

    assert not verdict(-9.0).is_agreed
    assert verdict(-11.0).is_agreed  # it has found less
    assert verdict(-9.0, "harmonic_mean").is_agreed  # which is infinitely variable


def test_reflections_of_comparable_density_are_starts():
    signs = bk.Target.from_functions(
        lambda u: -0.5 * u.square().sum(-1), lambda u: -10 * (u[..., 0].square() - 4).square(), 2
    )
    x = torch.tensor([[2.0, 0.3], [1.9, -0.2]], dtype=DOUBLE)
    found, spent = reflections(signs, x)
    assert len(found) == 2 and bool((found[:, 0] < 0).any()) and spent == 8
    far = bk.Target.from_functions(lambda u: -0.5 * u.square().sum(-1), lambda u: -50 * (u - 3).square().sum(-1), 2)
    assert len(reflections(far, torch.full((2, 2), 3.0, dtype=DOUBLE))[0]) == 0


def test_a_flat_mode_and_one_at_an_edge_have_a_mass(limit):
    """The integrals of exp(-x^4) and of exp(-x) from zero on, in the part of the ellipsoid where they lie."""
    for log_density, end, wanted in (
        (lambda u: -(u[..., 0] ** 4), 0.0, lambda r: 2 * quad(lambda x: math.exp(-(x**4)), 0, r)[0]),
        (lambda u: torch.where(u[..., 0] > 0, -u[..., 0], -torch.inf), 1e-9, lambda r: -math.expm1(-r)),
    ):
        target = bk.Target.from_functions(log_density, lambda u: 0 * u[..., 0], 1, compile=False)
        mode, _ = weigh_mode(target, torch.tensor([end], dtype=DOUBLE))
        reach = mode.radius / float(mode.factor)
        assert abs(math.expm1(mode.log_mass - math.log(wanted(reach)))) < limit(2) * mode.relative_error


def test_widths_are_those_of_half_a_nat():
    widths, _ = half_nat_widths(
        lambda u: -0.5 * (u[..., 0] / 3).square() - u[..., 1].abs().where(u[..., 1] < 0.1, 1e9),
        torch.zeros(1, 2, dtype=DOUBLE),
        torch.eye(2, dtype=DOUBLE),
    )
    torch.testing.assert_close(widths[:, 0, 0], torch.full((2,), 3.0, dtype=DOUBLE), rtol=0.03, atol=0)
    torch.testing.assert_close(widths[:, 0, 1], torch.tensor([0.1, 0.5], dtype=DOUBLE), rtol=0.03, atol=0)


def test_what_searches_have_not_met_is_said():
    target = bk.Target.from_pyro(spike)
    known = KnownModes.of(target)
    assert known.summary == "" and known.unmet == 1.0
    known.search_summands(target, torch.zeros(1, D, dtype=DOUBLE))
    known.search(target, torch.zeros(3, D, dtype=DOUBLE), "draws")  # which begin where a mode is known
    known.search(target, torch.zeros(18, D, dtype=DOUBLE), "prior draws", independent=True)
    known.weigh(target)
    count = known.num_searches
    assert count == 18 and known.unmet == pytest.approx(2 * 3 / (count * (count - 1)))
    wide, narrow = (math.exp(part) for part in exact_parts())
    assert known.shares == pytest.approx([wide / (wide + narrow), narrow / (wide + narrow)], rel=0.3)
    assert str(known).startswith("2 modes are known, of ") and str(known).endswith("% of starts may lead to others")
