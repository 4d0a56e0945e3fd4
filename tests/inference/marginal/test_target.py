"""Targets with sites integrated out: exact where they are normal, else Laplace's numbers, gradients and failures."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.integrate import quad
from scipy.stats import kstwo, norm, poisson

import bayeskit as bk
from bayeskit.core import inputs
from bayeskit.errors import (
    AccuracyWarning,
    DrawsError,
    InitializationError,
    ModelError,
    SettingsError,
    UnknownNameError,
)
from bayeskit.inference import evidence
from bayeskit.inference.marginal import MarginalTarget
from bayeskit.inference.marginal import target as target_module
from bayeskit.inference.samplers.starts import starting_points

FLOAT = torch.float64
COUNTS = torch.tensor([1.0, 0, 3, 7, 2, 0], dtype=FLOAT)
HEIGHTS = torch.tensor([1.2, -2.0, 3.1, 0.5, 0.9], dtype=FLOAT)


def normal_means(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        effect = pyro.sample("effect", dist.Normal(mean, scale))
        pyro.sample("y", dist.Normal(effect, 0.7), obs=y)


def counted(y, rotation=None):
    """Poisson counts with normal effects on the log rate; a rotation of these leaves the distribution as it is."""
    level = pyro.sample("level", dist.Normal(0.5, 1.0))
    log_scale = pyro.sample("log_scale", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", len(y)):
        effect = pyro.sample("effect", dist.Normal(0.0, log_scale.exp()))
    rate = effect if rotation is None else rotation @ effect
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((level + rate).exp()), obs=y)


def field(y):
    """Poisson counts on a line, with a Gaussian process as log rate."""
    log_length = pyro.sample("log_length", dist.Normal(1.0, 0.5))
    log_size = pyro.sample("log_size", dist.Normal(0.0, 0.5))
    place = torch.arange(len(y), dtype=y.dtype)
    distance = (place[:, None] - place) / log_length.exp()
    covariance = (2 * log_size).exp() * (-0.5 * distance.square()).exp() + 1e-4 * torch.eye(len(y), dtype=y.dtype)
    noise = pyro.sample("noise", dist.Normal(torch.zeros(len(y), dtype=y.dtype), 1.0).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((torch.linalg.cholesky(covariance) @ noise).exp()), obs=y)


def passed(y):
    """Successes of groups, with random intercepts."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", y.shape[1]):
        intercept = pyro.sample("intercept", dist.Normal(level, scale))
        with pyro.plate("trials", y.shape[0]):
            pyro.sample("y", dist.Bernoulli(logits=intercept), obs=y)


def pulled(y, together=False):
    """Normal coordinates times a factor that has no integral where ``pull`` is one or more."""
    pull = pyro.sample("pull", dist.Normal(0.0, 0.3))
    z = pyro.sample("z", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
    pyro.factor("data", 0.5 * pull * (z.sum().square() / len(y) if together else z.square().sum()))


def trials():
    return (torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.4).to(FLOAT)


def marginal(model, sites, *args):
    return bk.marginalize(bk.Target.from_pyro(model, *args), sites)


def points(target, n, scale=1.0):
    """Return vectors that depend on no seed shift."""
    return scale * torch.randn(n, target.dim, generator=torch.Generator().manual_seed(3), dtype=FLOAT)


def rows(target, u):
    """Return vectors ``(n, d)`` as draws of two chains, or one vector as many."""
    u = u.reshape(2, -1, target.dim)
    zeros = torch.zeros(u.shape[:2], dtype=FLOAT)
    return bk.Draws(u, zeros, zeros, torch.ones(2, dtype=FLOAT))


def at(target, u, num_draws):
    """Return draws that are all one vector."""
    return rows(target, u.expand(2 * num_draws, target.dim))


def gradient_error(target, u, step=4e-3):
    """Return the largest error of the gradient against differences of order six, relative to its length."""
    found = target.value_and_grad(u)[1]
    shifts = step * torch.tensor([1.0, -1, 2, -2, 3, -3], dtype=FLOAT)
    weights = torch.tensor([45.0, -45, -9, 9, 1, -1], dtype=FLOAT) / (60 * step)
    around = u[:, None, None] + shifts[:, None] * torch.eye(target.dim, dtype=FLOAT)[:, None]
    expected = (target.log_density(around) * weights).sum(-1)
    return float(((found - expected).norm(dim=1) / found.norm(dim=1)).max())


# -- exact values ---------------------------------------------------------------------------


def test_normal_means_are_integrated_exactly():
    target = marginal(normal_means, ["effect"], HEIGHTS)
    u = points(target, 4)
    values = target.constrain(u)
    total = (values["scale"].square() + 0.7**2).sqrt()
    exact = dist.Normal(values["mean"][:, None], total[:, None]).log_prob(HEIGHTS).sum(-1)
    torch.testing.assert_close(target.log_likelihood(u), exact, rtol=1e-10, atol=0)
    three, two = torch.tensor([3.0, 2.0], dtype=FLOAT)
    prior = dist.Normal(0 * three, three).log_prob(values["mean"]) + dist.HalfNormal(two).log_prob(values["scale"])
    prior = prior + u[:, 1]
    torch.testing.assert_close(target.log_prior(u), prior, rtol=1e-10, atol=0)
    assert target.is_exact
    assert target.curvature == "normal: 5 groups of 1"


def test_latents_of_normal_means_have_their_exact_distribution(limit):
    target = marginal(normal_means, ["effect"], HEIGHTS)
    u = target.unconstrain({"mean": torch.tensor(1.0), "scale": torch.tensor(1.5)}).expand(2, 2000, -1)
    zeros = torch.zeros(2, 2000, dtype=FLOAT)
    draws = target.with_latents(bk.Draws(u, zeros, zeros, torch.ones(2, dtype=FLOAT)), seed=1)
    precision = 1 / 1.5**2 + 1 / 0.7**2
    mean = (1.0 / 1.5**2 + HEIGHTS / 0.7**2) / precision
    z = (draws["effect"].flatten(0, 1) - mean) * math.sqrt(precision)
    assert float((z.mean(0) * math.sqrt(4000)).abs().max()) < limit(10)
    assert float(((z.var(0) - 1) * math.sqrt(4000 / 2)).abs().max()) < limit(10)
    covariance = (z - z.mean(0)).T @ (z - z.mean(0)) / 4000
    assert float((covariance - covariance.diagonal().diag()).abs().max() * math.sqrt(4000)) < limit(10)
    torch.testing.assert_close(draws.log_density, target.whole.log_density(draws.unconstrained))
    assert set(draws.values()) == {"mean", "scale", "effect"}


@pytest.mark.parametrize(
    ("y", "scale", "known", "error"),
    [(1, 1.0, -1.475985, 0.0022), (1, 2.0, -1.845893, -0.0228), (0, 1.0, None, 0.0078)],
)
def test_the_error_of_one_count_is_that_of_laplace(y, scale, known, error):
    target = marginal(counted, ["effect"], torch.tensor([float(y)], dtype=FLOAT))
    u = target.unconstrain({"level": torch.tensor(0.5), "log_scale": torch.tensor(math.log(scale), dtype=FLOAT)})
    found = float(target.log_likelihood(u))
    exact = math.log(
        quad(lambda z: poisson.pmf(y, math.exp(0.5 + z)) * norm.pdf(z, 0, scale), -12, 12, epsabs=1e-13)[0]
    )
    z = 0.0
    for _ in range(50):
        rate = math.exp(0.5 + z)
        z += (y - rate - z / scale**2) / (rate + 1 / scale**2)
    rate = math.exp(0.5 + z)
    height = y * (0.5 + z) - rate - math.lgamma(y + 1) + norm.logpdf(z, 0, scale)
    by_hand = height + 0.5 * math.log(2 * math.pi) - 0.5 * math.log(rate + 1 / scale**2)
    assert abs(found - by_hand) < 1e-10
    assert found - exact == pytest.approx(error, abs=6e-5)
    assert known is None or exact == pytest.approx(known, abs=6e-7)
    correction = target.correction(at(target, u, 4))
    assert correction.log_ratio == pytest.approx(exact - found, abs=1e-8)
    assert correction.trusted
    assert correction.standard_error == 0


def test_a_rotation_of_independent_groups_is_dense_and_changes_nothing():
    y = torch.poisson(torch.full((30,), 2.0), generator=torch.Generator().manual_seed(1)).to(FLOAT)
    rotation = torch.linalg.qr(torch.randn(30, 30, generator=torch.Generator().manual_seed(2), dtype=FLOAT))[0]
    apart, together = marginal(counted, ["effect"], y), marginal(counted, ["effect"], y, rotation)
    assert (apart.curvature, together.curvature) == ("30 groups of 1", "dense, 30")
    u = points(apart, 3, 0.5)
    value, gradient = apart.value_and_grad(u)
    again, other = together.value_and_grad(u)
    torch.testing.assert_close(value, again, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, other, rtol=1e-11, atol=1e-11)


def rotation_of(size):
    return torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(2), dtype=FLOAT))[0]


def exact_counts(level, scale, y):
    """Return the log likelihood of counts with independent normal effects, by the trapezoidal rule."""
    z = torch.linspace(-14 * scale, 14 * scale, 400_001, dtype=FLOAT)
    rate = (level + z).clamp(max=50).exp()
    each = dist.Normal(0.0, torch.tensor(scale, dtype=FLOAT)).log_prob(z) + dist.Poisson(rate).log_prob(y[:, None])
    return float((torch.logsumexp(each, 1) + math.log(28 * scale / 400_000)).sum())


def test_importance_sampling_corrects_dense_groups(limit):
    target = marginal(counted, ["effect"], COUNTS, rotation_of(len(COUNTS)))
    u = target.unconstrain({"level": torch.tensor(0.5), "log_scale": torch.tensor(0.4, dtype=FLOAT)})
    correction = target.correction(at(target, u, 200), num_inner=16)
    # A rotation of independent normal effects is a set of independent normal effects.
    missed = exact_counts(0.5, math.exp(0.4), COUNTS) - float(target.log_likelihood(u))
    assert abs(missed) > 0.02
    assert abs(correction.log_ratio - missed) < limit(1) * correction.standard_error
    assert 0 < correction.standard_error < 0.02


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


# -- corrected targets ----------------------------------------------------------------------


def corrected(model, sites, *args):
    return bk.marginalize(bk.Target.from_pyro(model, *args), sites, correct=True)


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


def test_latents_that_cannot_be_corrected_warn():
    target = corrected(counted, ["effect"], torch.zeros(3, dtype=FLOAT))
    far = at(target, torch.tensor([0.5, 9.0], dtype=FLOAT), 2)
    with pytest.warns(AccuracyWarning, match="the quadrature leaves out"):
        target.with_latents(far, progress=False)


def test_statistics_follow_the_draws_that_are_resampled():
    target = corrected(counted, ["effect"], COUNTS)
    u = points(target, 400, 1.2).reshape(2, 200, 2)
    zeros, number = torch.zeros(2, 200, dtype=FLOAT), torch.arange(400).reshape(2, 200)
    draws = bk.Draws(u, zeros, zeros, torch.ones(2, dtype=FLOAT), sample_stats={"number": number})
    found = target.with_latents(draws, progress=False)
    kept = found.sample_stats["number"]
    assert len(kept.unique()) < 400
    assert torch.equal(found.unconstrained[..., :2], u.reshape(400, 2)[kept])


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


# -- structure ------------------------------------------------------------------------------


def test_groups_and_chains_are_found():
    def model(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        first = pyro.sample("first", dist.Normal(0.0, 1.0))
        with pyro.plate("groups", len(y)):
            level = pyro.sample("level", dist.Normal(0.0, scale))
            slope = pyro.sample("slope", dist.Normal(0.0, scale))
            pyro.sample("y", dist.Normal(level + slope, 0.5), obs=y)
        pyro.sample("x", dist.Normal(first, 0.5), obs=y[0])

    target = bk.Target.from_pyro(model, HEIGHTS)
    some = bk.marginalize(target, ["slope", "level"])
    assert (some.over, some.curvature) == (("level", "slope"), "normal: 5 groups of 2")
    more = bk.marginalize(target, ["level", "slope", "first"])
    assert more.curvature == "normal: 6 groups of up to 2"
    u = some.unconstrain({"scale": torch.tensor(0.8), "first": torch.tensor(0.3)})
    total = dist.Normal(0.0, math.sqrt(2 * 0.8**2 + 0.5**2)).log_prob(HEIGHTS).sum()
    given = dist.Normal(0.3, 0.5).log_prob(HEIGHTS[0])
    without = dist.Normal(0.0, math.sqrt(1.25)).log_prob(HEIGHTS[0])
    assert float(some.log_likelihood(u)) == pytest.approx(float(total + given), rel=1e-7)
    assert float(more.log_likelihood(u[:1])) == pytest.approx(float(total + without), rel=1e-7)


def test_a_random_walk_is_coloured():
    def model(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        level = pyro.sample("level", dist.Normal(torch.zeros_like(y), 5.0).to_event(1))
        pyro.factor("steps", dist.Normal(0.0, scale).log_prob(level.diff()).sum())
        pyro.sample("y", dist.Normal(level, 1.0).to_event(1), obs=y)

    target = marginal(model, ["level"], HEIGHTS)
    assert target.curvature == "normal: dense, 5, from 3 products"
    u = target.unconstrain({"scale": torch.tensor([0.4, 1.3])})
    steps = torch.diff(torch.eye(5, dtype=FLOAT), dim=0)
    for row, scale in zip(u, (0.4, 1.3), strict=True):
        precision = torch.eye(5, dtype=FLOAT) * (1 + 1 / 25) + steps.T @ steps / scale**2
        mean = torch.linalg.solve(precision, HEIGHTS)
        height = dist.Normal(0.0, 5.0).log_prob(mean).sum() + dist.Normal(mean, 1.0).log_prob(HEIGHTS).sum()
        height = height + dist.Normal(0.0, scale).log_prob(mean.diff()).sum()
        exact = height + 2.5 * math.log(2 * math.pi) - 0.5 * precision.logdet()
        assert float(target.log_likelihood(row)) == pytest.approx(float(exact), rel=1e-7)
    assert gradient_error(target, u) < 1e-8


def test_a_coupling_in_a_part_of_space_is_seen():
    def model(y):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(0.0 * y, 1.0).to_event(1))
        pyro.factor("data", -torch.relu(z[0] + z[1] - 1.8).pow(3) - (z - level).square().sum())

    # Three draws may show it, and then its group is known.
    assert marginal(model, ["z"], HEIGHTS).curvature in {"dense, 5", "4 groups of up to 2"}


def test_rates_that_round_to_nothing_are_concave():
    """With a vague intercept some draws from the prior have rates of 1e-13 and less, whose curvature is rounding."""

    def model(y):
        level = pyro.sample("level", dist.Normal(0.0, torch.tensor(30.0, dtype=FLOAT)))
        size = pyro.sample("size", dist.HalfNormal(1.0))
        place = torch.arange(len(y), dtype=y.dtype)
        covariance = size**2 * (-(place[:, None] - place).abs() / 3).exp()
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=covariance))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((level + f).exp()), obs=y)

    target = marginal(model, ["f"], torch.tensor([2.0, 3, 1, 4, 6, 2, 3, 5], dtype=FLOAT))
    assert target.curvature == "Gaussian field of 8"
    u = torch.tensor([[1.0, 0.1], [-25.0, 0.5]], dtype=FLOAT)
    assert target.log_density(u).isfinite().all()
    assert gradient_error(target, u) < 1e-8


def two_humps(y):
    """A coordinate that is known up to its sign only."""
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        z = pyro.sample("z", dist.Normal(0.2, scale))
        pyro.sample("y", dist.Normal(z.square(), 0.5), obs=y)


def test_several_modes_are_flagged_and_estimates_repeat_it():
    with pytest.warns(AccuracyWarning, match="density of 'z' has several modes given the other sites"):
        target = marginal(two_humps, ["z"], HEIGHTS.abs() + 2)
    assert len(target.problems) == 1
    draws = bk.sample(target, num_samples=200, progress=False)
    found = evidence.bridge_sampling(target, draws)
    assert not found.trusted
    assert found.warnings[-1] == target.problems[0]


@pytest.mark.filterwarnings("error")
def test_one_mode_is_not_taken_for_several():
    y = torch.poisson(torch.full((30,), 2.0), generator=torch.Generator().manual_seed(1)).to(FLOAT)
    for target in (marginal(counted, ["effect"], y), marginal(passed, ["intercept"], trials())):
        assert target.problems == ()


def test_vague_priors_do_not_lead_the_search_astray():
    """All draws from these priors have rates beyond any number, or of nothing."""

    def model(y):
        place = torch.arange(len(y), dtype=FLOAT)
        level = pyro.sample("level", dist.Normal(0.0, torch.tensor(1000.0, dtype=FLOAT)))
        slope = pyro.sample("slope", dist.Normal(0.0, torch.tensor(300.0, dtype=FLOAT)))
        size = pyro.sample("size", dist.HalfNormal(1.0))
        covariance = size**2 * (-(place[:, None] - place).abs() / 3).exp()
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=covariance))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Poisson((level + slope * place / 8 + f).exp()), obs=y)

    target = marginal(model, ["f"], torch.tensor([2.0, 3, 1, 4, 6, 2, 3, 5], dtype=FLOAT))
    start = target.density.start
    value, gradient = target.value_and_grad(start.unsqueeze(0))
    assert float(gradient.norm()) < 1
    assert float(target.log_likelihood(start)) > -20
    # Chains may begin there, and each is where the density is not negligible.
    points = starting_points(target, 4, torch.ones(4, dtype=FLOAT), torch.Generator().manual_seed(1))
    assert bool((target.log_density(points) > value - 200).all())
    assert len(points.unique(dim=0)) == 4


# -- gradients ------------------------------------------------------------------------------

HIERARCHIES = {
    "counts": (counted, ["effect"], COUNTS, "6 groups of 1"),
    "successes": (passed, ["intercept"], trials(), "8 groups of 1"),
    "field": (field, ["noise"], torch.tensor([0.0, 1, 0, 2, 4, 3, 6, 4, 2, 1] * 2, dtype=FLOAT), "dense, 20"),
}


@pytest.mark.parametrize("name", HIERARCHIES)
def test_gradients_are_those_of_the_approximation(name):
    model, sites, y, curvature = HIERARCHIES[name]
    target = marginal(model, sites, y)
    assert target.curvature == curvature
    u = points(target, 2, 0.5)
    assert gradient_error(target, u) < 1e-8
    assert target.num_failures == 0
    # Tempered, and through automatic differentiation of the two parts.
    leaf = u.clone().requires_grad_(True)
    prior, likelihood = target.evaluate(leaf)
    (by_parts,) = torch.autograd.grad((prior + 0.3 * likelihood).sum(), leaf)
    torch.testing.assert_close(by_parts, target.value_and_grad(u, 0.3)[1], rtol=1e-11, atol=1e-11)


def test_mutation_a_gradient_without_the_determinant_is_noticed(monkeypatch):
    def without(self, r, z, weights):
        return torch.zeros_like(r), torch.zeros_like(z)

    monkeypatch.setattr(target_module._LaplaceDensity, "_bend", without)
    target = marginal(counted, ["effect"], COUNTS)
    assert gradient_error(target, points(target, 2, 0.5)) > 1e-3


# -- failures -------------------------------------------------------------------------------


@pytest.mark.parametrize(("together", "num_directions"), [(False, 5), (True, 1)])
def test_a_chain_without_a_mode_leaves_the_others_as_they_are(together, num_directions):
    target = marginal(pulled, ["z"], HEIGHTS, together)
    u = torch.tensor([[0.1], [0.3], [-1.0], [0.5]], dtype=FLOAT)
    value, gradient = target.value_and_grad(u)
    likelihood = target.log_likelihood(u)
    torch.testing.assert_close(likelihood, -0.5 * num_directions * (-u[:, 0]).log1p(), rtol=1e-10, atol=0)
    assert target.num_failures == 0
    u[1] = 2.0
    failing, slope = target.value_and_grad(u)
    others = [0, 2, 3]
    assert torch.equal(failing[others], value[others]) and torch.equal(slope[others], gradient[others])
    assert torch.equal(target.log_likelihood(u)[others], likelihood[others])
    assert failing[1] == -math.inf and torch.isfinite(slope[1]).all()
    assert target.num_failures == 2
    assert torch.isfinite(target.log_density(u, 0.0)).all()
    zeros = torch.zeros(1, 4, dtype=FLOAT)
    with pytest.raises(DrawsError, match=r"no mode of \['z'\] is found at 1 of 4 draws"):
        target.with_latents(bk.Draws(u[None], zeros, zeros, torch.ones(1, dtype=FLOAT)))


def test_values_do_not_depend_on_what_was_evaluated_before():
    target = marginal(counted, ["effect"], COUNTS)
    again = pickle.loads(pickle.dumps(bk.Target.without_graphs(target)))
    u = points(target, 4)
    target.value_and_grad(3 * u)
    first, second = target.value_and_grad(u), again.value_and_grad(u)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert target.fingerprint() == again.fingerprint()


def test_a_density_without_a_mode_is_refused():
    def model(y):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.factor("data", z.square() + level)

    with pytest.raises(InitializationError, match=r"no mode of 'z' .* Remedy: .* proper prior, .* log-concave"):
        marginal(model, ["z"], HEIGHTS)


# -- samplers and estimators ----------------------------------------------------------------


def test_the_marginal_of_eight_schools_has_its_posterior_and_evidence(limit):
    case = bk.exact.get("eight_schools")
    target = bk.marginalize(case.target(), ["eta"])
    settings = {"num_chains": 4, "num_warmup": 50, "num_samples": 100, "seed": 0, "progress": False}
    draws = bk.sample(target, initial=target.sample_prior(4, seed=1), **settings)
    evidence = bk.evidence.bridge_sampling(target, draws)
    assert abs(evidence.log_evidence - case.log_evidence) < limit(4) * evidence.standard_error
    whole = target.with_latents(draws)
    table = whole.summary()
    for row, name in (("mu", "mu"), ("tau", "tau"), ("eta[0]", "eta")):
        exact = float(case.posterior_mean[name].reshape(-1)[0])
        assert abs(table.loc[row, "mean"] - exact) < limit(4) * 1.5 * table.loc[row, "mcse_mean"]
    assert set(whole.values()) == {"mu", "tau", "eta", "theta"}
    assert set(draws.values()) == {"mu", "tau"}  # theta depends on eta


# -- refusals -------------------------------------------------------------------------------


def mixed(y):
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        side = pyro.sample("side", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        effect = pyro.sample("effect", dist.Normal(level, 1.0))
        pyro.sample("y", dist.Normal(effect + side, 1.0), obs=y)


@pytest.mark.parametrize(
    ("sites", "error", "message"),
    [
        (["efect"], UnknownNameError, "did you mean 'effect'"),
        ([], SettingsError, "sites is empty"),
        (["level", "effect"], SettingsError, "no target is left"),
        (["side"], SettingsError, "'side' is discrete and summed out already"),
        (["y"], SettingsError, "'y' is observed"),
        (["level"], ModelError, "prior of site 'effect' depends on the sites to be integrated out"),
    ],
)
def test_sites_that_cannot_be_integrated_out_are_refused(sites, error, message):
    target = bk.Target.from_pyro(mixed, HEIGHTS)
    with pytest.raises(error, match=message):
        bk.marginalize(target, sites)


def test_discrete_sites_may_remain_summed_out():
    target = marginal(mixed, ["effect"], HEIGHTS)
    assert isinstance(target, MarginalTarget) and [site.name for site in target.sites] == ["level"]
    assert gradient_error(target, torch.tensor([[0.2], [-0.4]], dtype=FLOAT)) < 1e-8


def test_a_prior_that_is_a_sum_is_refused():
    def model(y):
        side = pyro.sample("side", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        level = pyro.sample("level", dist.Normal(4.0 * side, 1.0))
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(level + effect, 1.0), obs=y[0])

    with pytest.raises(ModelError, match="prior of site 'level' depends on a summed-out site"):
        marginal(model, ["effect"], HEIGHTS)


def test_functions_loops_and_methods_are_refused(normal_normal):
    with pytest.raises(ModelError, match=r"only a target of a Pyro model.*from_pyro"):
        bk.marginalize(normal_normal, ["u"])
    with pytest.raises(SettingsError, match="method must be 'laplace'"):
        bk.marginalize(bk.Target.from_pyro(normal_means, HEIGHTS), ["effect"], method="exact")

    def branching(y):
        level = pyro.sample("level", dist.Normal(0.0, 1.0))
        effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(effect if level > 0 else -effect, 1.0), obs=y[0])

    with pytest.warns(bk.errors.SlowModelWarning):
        target = bk.Target.from_pyro(branching, HEIGHTS)
    with pytest.raises(ModelError, match="cannot be batched"):
        bk.marginalize(target, ["effect"])


def test_a_hessian_beyond_the_memory_is_refused_before_it_is_made(monkeypatch):
    target = bk.Target.from_pyro(counted, HEIGHTS.abs().round())
    monkeypatch.setattr(inputs, "_memory", lambda: 300.0)
    with pytest.raises(SettingsError, match="Hessian of 'effect' has 5 x 5 entries"):
        bk.marginalize(target, ["effect"])


def test_draws_that_do_not_fit_are_refused():
    target = marginal(normal_means, ["effect"], HEIGHTS)
    zeros = torch.zeros(1, 2, dtype=FLOAT)
    with pytest.raises(DrawsError, match="dimension 3, and this target 2"):
        target.with_latents(bk.Draws(torch.zeros(1, 2, 3, dtype=FLOAT), zeros, zeros, torch.ones(1, dtype=FLOAT)))
    with pytest.raises(DrawsError, match="tempered"):
        target.with_latents(bk.Draws(torch.zeros(1, 2, 2, dtype=FLOAT), zeros, zeros, zeros[:, 0]))
    with pytest.raises(ModelError, match="with_latents"):
        target.pointwise_log_likelihood(torch.zeros(1, 2, dtype=FLOAT))


# -- fields and chains ----------------------------------------------------------------------


def smooth(y, white=False):
    """Poisson counts with a Gaussian process on the log rate, centred or in terms of standard normal coordinates."""
    size = pyro.sample("size", dist.HalfNormal(1.0))
    length = pyro.sample("length", dist.LogNormal(1.0, 0.5))
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    place = torch.arange(len(y), dtype=y.dtype)
    distance = (place[:, None] - place) / length
    covariance = size**2 * (-0.5 * distance.square()).exp() + 1e-4 * torch.eye(len(y), dtype=y.dtype)
    if white:
        noise = pyro.sample("field", dist.Normal(torch.zeros_like(y), 1.0).to_event(1))
        rate = level + torch.linalg.cholesky(covariance) @ noise
    else:
        mean = level.expand(y.shape)
        rate = pyro.sample("field", dist.MultivariateNormal(mean, covariance_matrix=covariance))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson(rate.exp()), obs=y)


def test_a_gaussian_field_is_that_of_standard_normal_coordinates(limit):
    y = torch.tensor([0.0, 2, 1, 0, 4, 7, 3, 1, 0, 1], dtype=FLOAT)
    field, white = marginal(smooth, ["field"], y), marginal(smooth, ["field"], y, True)
    assert (field.curvature, white.curvature) == ("Gaussian field of 10", "dense, 10")
    u = points(field, 4, 0.5)
    value, gradient = field.value_and_grad(u)
    again, other = white.value_and_grad(u)
    torch.testing.assert_close(value, again, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradient, other, rtol=1e-7, atol=1e-7)
    assert gradient_error(field, u) < 1e-8
    # What the approximation misses is the same, too, from independent points.
    first, second = (target.correction(at(target, u[:1], 200), seed=k) for k, target in enumerate((field, white)))
    error = math.hypot(first.standard_error, second.standard_error)
    assert abs(first.log_ratio - second.log_ratio) < limit(1) * error
    assert error < 0.02 < first.log_ratio


def test_a_field_with_normal_data_is_exact():
    def model(y):
        scale = pyro.sample("scale", dist.HalfNormal(1.0))
        covariance = scale**2 * ROOT @ ROOT.T
        f = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=covariance))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    target = marginal(model, ["f"], HEIGHTS)
    u = points(target, 4)
    covariance = target.constrain(u)["scale"][:, None, None].square() * ROOT @ ROOT.T
    total = covariance + 0.25 * torch.eye(5, dtype=FLOAT)
    exact = dist.MultivariateNormal(torch.zeros(5, dtype=FLOAT), covariance_matrix=total).log_prob(HEIGHTS)
    torch.testing.assert_close(target.log_likelihood(u), exact, rtol=1e-10, atol=0)


ROOT = torch.eye(5, dtype=FLOAT) + 0.3 * torch.randn(5, 5, generator=torch.Generator().manual_seed(6), dtype=FLOAT)


def heavy(y):
    """Student t data about a field: a likelihood that is not log-concave."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    covariance = scale**2 * ROOT @ ROOT.T
    f = pyro.sample("f", dist.MultivariateNormal(torch.zeros_like(y), covariance_matrix=covariance))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.StudentT(3.0, f, 0.5), obs=y)


def test_a_likelihood_that_is_not_log_concave_takes_the_dense_way():
    target = marginal(heavy, ["f"], HEIGHTS)
    assert "dense" in target.curvature
    assert gradient_error(target, points(target, 3, 0.5)) < 1e-8


def walk(y):
    """Poisson counts along a random walk."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    x = pyro.sample("x", dist.Normal(torch.zeros_like(y), 5.0).to_event(1))
    pyro.factor("walk", dist.Normal(x[:-1], scale).log_prob(x[1:]).sum())
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


def bent(y):
    """A random walk of order two, whose likelihood is not quadratic either."""
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    x = pyro.sample("x", dist.StudentT(8.0, torch.zeros_like(y), 5.0).to_event(1))
    pyro.factor("walk", dist.Normal(2 * x[1:-1] - x[:-2], scale).log_prob(x[2:]).sum())
    with pyro.plate("times", len(y)):
        pyro.sample("y", dist.Poisson(x.exp()), obs=y)


@pytest.mark.parametrize(("model", "bandwidth"), [(walk, 1), (bent, 2)])
def test_a_long_chain_has_the_value_and_the_gradient_of_a_dense_one(model, bandwidth, monkeypatch):
    y = torch.poisson(torch.full((101,), 1.5), generator=torch.Generator().manual_seed(4)).to(FLOAT)
    chain = marginal(model, ["x"], y)
    assert chain.curvature == f"chain of 101, bandwidth {bandwidth}"
    monkeypatch.setattr(target_module, "_LONG", 1000)
    dense = marginal(model, ["x"], y)
    assert dense.curvature.startswith("dense, 101")
    u = points(chain, 3, 0.3)
    value, gradient = chain.value_and_grad(u)
    again, other = dense.value_and_grad(u)
    torch.testing.assert_close(value, again, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient, other, rtol=1e-9, atol=1e-9)


def test_long_groups_are_found_without_a_dense_pattern():
    y = torch.poisson(torch.full((150,), 1.5), generator=torch.Generator().manual_seed(4)).to(FLOAT)
    target = marginal(counted, ["effect"], y)
    assert target.curvature == "150 groups of 1"
    assert gradient_error(target, points(target, 2, 0.3)) < 1e-8
