"""Quadrature and importance sampling of what Laplace's approximation misses, and corrected targets."""

import math

import pyro.distributions as dist
import pytest
import torch
from hierarchies import COUNTS, FLOAT, at, counted, marginal, points, rows
from scipy.stats import kstwo

import bayeskit as bk
from bayeskit.errors import AccuracyWarning, DrawsError, SettingsError
from bayeskit.inference import evidence


def rotation_of(size):
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(2), dtype=FLOAT))[0]


def exact_counts(level, scale, y):
    """Return the log likelihood of counts with independent normal effects, by the trapezoidal rule."""
    z = torch.linspace(-14 * scale, 14 * scale, 400_001, dtype=FLOAT)
    rate = (level + z).clamp(max=50).exp()
    each = dist.Normal(0.0, torch.tensor(scale, dtype=FLOAT)).log_prob(z) + dist.Poisson(rate).log_prob(y[:, None])
    return float((torch.logsumexp(each, 1) + math.log(28 * scale / 400_000)).sum())


@pytest.mark.calibration
def test_importance_sampling_corrects_dense_groups(limit):
    target = marginal(counted, ["effect"], COUNTS, rotation_of(len(COUNTS)))
    u = target.unconstrain({"level": torch.tensor(0.5), "log_scale": torch.tensor(0.4, dtype=FLOAT)})
    correction = target.correction(at(target, u, 200), num_inner=16)
    # A rotation of independent normal effects is a set of independent normal effects.
    missed = exact_counts(0.5, math.exp(0.4), COUNTS) - float(target.log_likelihood(u))
    assert abs(missed) > 0.02
    assert abs(correction.log_ratio - missed) < limit(1) * correction.standard_error
    assert 0 < correction.standard_error < 0.02


@pytest.mark.calibration
def test_wide_integrals_take_finer_panels_or_are_flagged():
    y = torch.zeros(3, dtype=FLOAT)
    target = marginal(counted, ["effect"], y)
    u = torch.tensor([0.5, 4.0], dtype=FLOAT)
    correction = target.correction(at(target, u, 2))
    missed = exact_counts(0.5, math.exp(4.0), y) - float(target.log_likelihood(u))
    assert correction.log_ratio == pytest.approx(missed, abs=1e-4)
    assert correction.trusted
    assert abs(missed) > 0.1
    far = target.correction(at(target, torch.tensor([0.5, 9.0], dtype=FLOAT), 2))
    assert not far.trusted
    assert "quadrature" in far.warnings[0]


def corrected(model, sites, *args):
    return bk.marginalize(bk.Target.from_pyro(model, *args), sites, correct=True)


@pytest.mark.long
def test_the_corrected_evidence_is_exact(limit):
    target = corrected(counted, ["effect"], COUNTS)
    step = 0.125
    u = torch.cartesian_prod(step * torch.arange(-24, 32, dtype=FLOAT), step * torch.arange(-36, 26, dtype=FLOAT))
    likelihood = target.correction(rows(target, u), num_rows=len(u)).log_weights.flatten() + target.log_likelihood(u)
    prior = target.log_prior(u)
    exact = float((prior + likelihood).logsumexp(0)) + 2 * math.log(step)
    draws = bk.sample(target, num_samples=500, progress=False)
    found = evidence.bridge_sampling(target, draws)
    assert found.trusted
    assert abs(found.log_evidence - exact) < limit(1) * found.standard_error
    correction = target.correction(draws)
    laplace = float((prior + target.log_likelihood(u)).logsumexp(0)) + 2 * math.log(step)
    assert abs(correction.log_ratio - (exact - laplace)) < limit(1) * correction.standard_error
    # By hand, for a target that is not corrected of itself; in a comparison; and by an estimator without draws.
    plain = evidence.bridge_sampling(marginal(counted, ["effect"], COUNTS), draws)
    by_hand = correction.applied(plain)
    assert by_hand.log_evidence == pytest.approx(found.log_evidence, rel=1e-9)
    assert by_hand.standard_error == pytest.approx(found.standard_error, rel=1e-6)
    assert found.diagnostics["laplace_correction"] == pytest.approx(correction.log_ratio, rel=1e-6)
    table = evidence.compare(target, ["bridge_sampling", "laplace"], draws=draws, progress=False)
    assert table["bridge_sampling"].log_evidence == pytest.approx(found.log_evidence, rel=1e-9)
    alone, shared = evidence.laplace(target), table["laplace"]
    assert alone.log_evidence == pytest.approx(shared.log_evidence, abs=0.01)


@pytest.mark.long
@pytest.mark.parametrize("scale", [0.7, 2.5])
def test_latents_of_a_corrected_target_have_the_density_itself(scale):
    """One count, at fixed values of the other sites: Kolmogorov's distance to the distribution by quadrature."""
    target = corrected(counted, ["effect"], COUNTS[:2])
    u = target.unconstrain({"level": torch.tensor(0.5), "log_scale": torch.tensor(math.log(scale), dtype=FLOAT)})
    drawn = target.with_latents(at(target, u, 2000), seed=2, progress=False)["effect"].reshape(-1, 2)
    grid = torch.linspace(-14 * scale, 14 * scale, 40_001, dtype=FLOAT)
    for x, y in zip(drawn.T, COUNTS, strict=False):
        height = dist.Poisson((0.5 + grid).exp()).log_prob(y) + dist.Normal(0.0, scale).log_prob(grid)
        function = (height - height.logsumexp(0)).exp().cumsum(0)
        below = function[torch.searchsorted(grid, x.sort().values.contiguous()) - 1]
        steps = torch.arange(1, len(x) + 1, dtype=FLOAT) / len(x)
        distance = max(float((steps - below).max()), float((below - steps + 1 / len(x)).max()))
        assert kstwo.sf(distance, len(x)) > 1e-5 / 4
    # The normal approximation is another distribution.
    plain = marginal(counted, ["effect"], COUNTS[:2]).with_latents(at(target, u, 2000))["effect"].reshape(-1, 2)
    moved = (plain.mean(0) - drawn.mean(0)).abs() / (plain.std(0) / math.sqrt(2000))
    assert scale < 1 or float(moved.max()) > 8


@pytest.mark.calibration
def test_importance_sampling_draws_the_latents_of_dense_groups(limit):
    target = corrected(counted, ["effect"], COUNTS, rotation_of(len(COUNTS)))
    u = target.unconstrain({"level": torch.tensor(0.5), "log_scale": torch.tensor(0.4, dtype=FLOAT)})
    drawn = target.with_latents(at(target, u, 1000), seed=2, progress=False)["effect"]
    effect = drawn.flatten(0, 1) @ rotation_of(len(COUNTS)).T
    grid = torch.linspace(-20, 20, 40_001, dtype=FLOAT)[:, None]
    height = dist.Poisson((0.5 + grid).exp()).log_prob(COUNTS) + dist.Normal(0.0, math.exp(0.4)).log_prob(grid)
    weight = (height - height.logsumexp(0)).exp()
    mean = (weight * grid).sum(0)
    # Resampling repeats draws: the error of a mean is larger than that of 2,000 independent ones.
    repeats = len(effect) / len(effect[:, 0].unique())
    z = (effect.mean(0) - mean) / (effect.std(0) * math.sqrt(2 * repeats / len(effect)))
    assert float(z.abs().max()) < limit(len(COUNTS))


@pytest.mark.long
def test_draws_are_weighted_by_the_likelihood_itself():
    """Half of the draws at either of two vectors: after resampling the shares are those of the exact likelihood."""
    target = corrected(counted, ["effect"], COUNTS)
    pair = torch.tensor([[0.5, -0.5], [1.0, 1.5]], dtype=FLOAT)
    u = pair[:, None].expand(2, 500, 2).reshape(1, 1000, 2).expand(2, 1000, 2)
    zeros = torch.zeros(2, 1000, dtype=FLOAT)
    draws = target.with_latents(bk.Draws(u, zeros, zeros, torch.ones(2, dtype=FLOAT)), progress=False)
    exact = torch.tensor([exact_counts(float(a), math.exp(float(b)), COUNTS) for a, b in pair])
    ratio = (exact - target.log_likelihood(pair)).softmax(0)
    assert float((ratio[0] - 0.5).abs()) > 0.01
    share = (draws["level"] == 0.5).double().mean(1)
    torch.testing.assert_close(share, ratio[0].expand(2).double(), rtol=0, atol=1.5e-3)
    torch.testing.assert_close(draws.log_density, target.whole.log_density(draws.unconstrained))


@pytest.mark.calibration
def test_latents_that_cannot_be_corrected_warn():
    target = corrected(counted, ["effect"], torch.zeros(3, dtype=FLOAT))
    far = at(target, torch.tensor([0.5, 9.0], dtype=FLOAT), 2)
    with pytest.warns(AccuracyWarning, match="the quadrature leaves out"):
        target.with_latents(far, progress=False)


@pytest.mark.calibration
def test_statistics_follow_the_draws_that_are_resampled():
    target = corrected(counted, ["effect"], COUNTS)
    u = points(target, 400, 1.2).reshape(2, 200, 2)
    zeros, number = torch.zeros(2, 200, dtype=FLOAT), torch.arange(400).reshape(2, 200)
    draws = bk.Draws(u, zeros, zeros, torch.ones(2, dtype=FLOAT), sample_stats={"number": number})
    found = target.with_latents(draws, progress=False)
    kept = found.sample_stats["number"]
    assert len(kept.unique()) < 400
    assert torch.equal(found.unconstrained[..., :2], u.reshape(400, 2)[kept])


@pytest.mark.long
def test_a_correction_is_applied_once_and_to_draws_of_the_target():
    target = corrected(counted, ["effect"], COUNTS)
    draws = bk.sample(target, num_chains=2, num_warmup=100, num_samples=100, progress=False)
    found = evidence.bridge_sampling(target, draws)
    few = target.correction(draws, num_rows=2, progress=False)
    assert few.log_weights.shape == (2, 4) and "nats" in repr(few)
    with pytest.raises(SettingsError, match="corrected already"):
        few.applied(found)
    other = corrected(counted, ["effect"], COUNTS + 1)
    for call in (other.correction, other.with_latents):
        with pytest.raises(DrawsError, match="come from another target"):
            call(draws)
        with pytest.raises(DrawsError, match="not a Tensor"):
            call(draws.unconstrained)
    table = evidence.compare(target, ["bridge_sampling", "conditional_predictive_ordinates"], draws=draws)
    assert table["bridge_sampling"].diagnostics["laplace_correction"] == pytest.approx(
        found.diagnostics["laplace_correction"], rel=1e-6
    )
