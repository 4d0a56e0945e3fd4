"""Posteriors of many data sets or weightings at once, against closed forms, quadrature and a sampler."""

import math

import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

import bayeskit as bk
from bayeskit._core.statistics import mean_error
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
from bayeskit.inference.generalized._coverage import QuadraticFits, as_functional, replicate_posteriors
from bayeskit.inference.generalized._posterior import Max

R, N = 30, 25


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64)


def counts(seed: int = 1) -> Tensor:
    drawn = torch.randint(N, (R, N), generator=generator(seed))
    return torch.zeros(R, N, dtype=torch.float64).scatter_add(1, drawn, torch.ones(R, N, dtype=torch.float64))


def conjugate(design: Tensor, outcome: Tensor, weight: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and covariance of a linear regression by half the squared error, prior N(0, 2^2)."""
    precision = torch.eye(design.shape[-1], dtype=torch.float64) / 4 + weight * design.mT @ (row[:, None] * design)
    return torch.linalg.solve(precision, weight * design.mT @ (row * outcome)), torch.linalg.inv(precision)


@pytest.mark.calibration
@pytest.mark.parametrize("shift", [1.0, 1.7], ids=["at the draws' weight", "at another weight"])
@pytest.mark.parametrize("kind", ["weightings", "data sets"])
def test_conjugate_normals_exactly(kind: str, shift: float) -> None:
    """The normal approximation is the posterior, and the control variate leaves nothing to chance."""
    design, outcome, row = normal(N, 2), normal(N, seed=2), counts()
    posterior = GibbsPosterior(
        dist.Normal(torch.zeros(2, dtype=torch.float64), 2.0), losses.HalfSquared(losses.linear), (design, outcome)
    )
    weight = 0.2 + torch.rand(R, generator=generator(3), dtype=torch.float64)
    if kind == "weightings":
        designs, outcomes, rows = design.expand(R, N, 2), outcome.expand(R, N), row
        found = replicate_posteriors(posterior, weights=row, weight=weight, num_draws=64)
    else:
        designs, outcomes, rows = normal(R, N, 2, seed=4), normal(R, N, seed=5), torch.ones_like(row)
        found = replicate_posteriors(posterior, data=(designs, outcomes), weight=weight, num_draws=64)
    weight = weight * shift
    point = torch.tensor([0.1, -0.2], dtype=torch.float64)
    below = found.probability_below(as_functional(posterior, None), point, weight)
    level = found.hpd_level(point, weight)
    for r in range(R):
        mean, covariance = conjugate(designs[r], outcomes[r], weight[r], rows[r])
        torch.testing.assert_close(found.mean(weight)[r], mean, rtol=0, atol=1e-10)
        torch.testing.assert_close(found.covariance(weight)[r], covariance, rtol=0, atol=1e-10)
        standard = torch.special.ndtr((point - mean) / covariance.diagonal().sqrt())
        torch.testing.assert_close(below[r], standard, rtol=0, atol=1e-10)
        squared = (point - mean) @ torch.linalg.solve(covariance, point - mean)
        torch.testing.assert_close(level[r], -torch.expm1(-0.5 * squared), rtol=0, atol=1e-10)  # two dimensions


def by_quadrature(row: Tensor, x: Tensor, weight: float, point: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return density level, probability below, mean and variance under the absolute error, prior N(0, 10^2)."""
    edges = torch.linspace(-9, 9, 36_001, dtype=torch.float64)
    grid = 0.5 * (edges[1:] + edges[:-1])
    log_density = -weight * (row @ (grid - x[:, None]).abs()) - grid.square() / 200
    mass = torch.softmax(log_density, -1)
    at = -weight * (row @ (point - x).abs()) - point**2 / 200
    mean = mass @ grid
    return (
        torch.where(log_density > at[:, None], mass, 0.0).sum(-1),
        mass[:, grid < point].sum(-1),
        mean,
        mass @ grid.square() - mean.square(),
    )


def largest_z(weight: float = 0.7) -> float:
    """Return the largest deviation from quadrature, in standard errors of independent draws."""
    x, row = 1.5 * normal(N), counts()
    posterior = GibbsPosterior(dist.Normal(0.0, 10.0), losses.Absolute(), x)
    found = replicate_posteriors(posterior, weights=row, weight=weight)
    assert bool(found.trusted.all())
    level, below, mean, variance = by_quadrature(row, x, weight, 0.2)
    effective = 1 / found._normalised(found.weight)[0].square().sum(-1)
    point = torch.tensor([0.2], dtype=torch.float64)
    pairs = [
        (found.hpd_level(point), level, level * (1 - level)),
        (found.probability_below(as_functional(posterior, None), point)[:, 0], below, below * (1 - below)),
        (found.mean()[:, 0], mean, variance),
    ]
    return max(float(((a - b) / (v / effective).sqrt()).abs().max()) for a, b, v in pairs)


def test_a_loss_with_kinks_against_quadrature(limit) -> None:
    assert largest_z() < limit(3 * R)


def test_a_wrong_proposal_density_fails(limit, monkeypatch) -> None:
    import bayeskit.inference.generalized._coverage as module

    original = module._student
    monkeypatch.setattr(module, "_student", lambda *args: (original(*args)[0], -original(*args)[1]))
    with pytest.raises(AssertionError):
        assert largest_z() < limit(3 * R)


def test_a_wrong_step_to_another_weight_fails(monkeypatch) -> None:
    """Without the prior's pull the normal is not the posterior, and the closed form is missed."""
    monkeypatch.setattr(
        QuadraticFits, "normal", lambda fits, w: (fits.position, w[:, None, None] * fits.hessian + fits.precision)
    )
    with pytest.raises(AssertionError):
        test_conjugate_normals_exactly("weightings", 1.7)


@pytest.mark.calibration
def test_a_skewed_posterior_against_a_sampler(limit) -> None:
    """The scale of a normal by minus its log density: a positive parameter, few data, not normal at all."""
    x = 3.0 * normal(2, 6)
    posterior = GibbsPosterior(
        dist.LogNormal(torch.tensor(0.0, dtype=torch.float64), 1.0),
        lambda s, x: (x / s).square() / 2 + s.log(),
        x[0],
        compile=False,
    )
    found = replicate_posteriors(posterior, data=x, weight=0.8, num_draws=4096)
    draws = bk.sample(
        posterior.with_data(x[1]).with_weight(0.8),
        num_chains=16,
        num_warmup=200,
        num_samples=300,
        seed=0,
        progress=False,
    )
    u = draws.unconstrained[..., 0]
    value = torch.tensor([2.5], dtype=torch.float64)
    scale = as_functional(posterior, lambda s: s)
    below = found.probability_below(scale, value)[1, 0]
    event = (u.exp() <= value).double()
    for ours, theirs in [(found.mean()[1, 0], u), (found.covariance()[1, 0, 0], (u - u.mean()).square())]:
        assert abs(float(ours - theirs.mean())) < limit(3) * float(mean_error(theirs))
    assert abs(float(below - event.mean())) < limit(3) * float(mean_error(event))
    assert bool(found.trusted.all())


def test_a_narrow_proposal_is_fitted_anew(monkeypatch) -> None:
    """A curvature fifty times too large still ends at the closed form, within its own doubt."""
    import bayeskit.inference.generalized._coverage as module

    original = module.hessian_of_loss
    monkeypatch.setattr(module, "hessian_of_loss", lambda *args: 50.0 * original(*args))
    x = normal(R, N)
    posterior = GibbsPosterior(Flat(), losses.HalfSquared(), x[0])
    found = replicate_posteriors(posterior, data=x, num_draws=2048)
    assert bool(found.trusted.all())
    # Twice fitted, the normal approximation's own error is of the order of the draws'.
    error = (found.mean()[:, 0] - x.mean(-1)).abs().max() * math.sqrt(N)
    assert float(error) < 4.3 / math.sqrt(0.3 * 2048)


@pytest.mark.calibration
def test_levels_rise_with_the_weight() -> None:
    x = normal(N)
    posterior = GibbsPosterior(Flat(), losses.Absolute(), x)
    found = replicate_posteriors(posterior, weights=counts(), weight=1.0)
    point = x.median()[None] + 0.05
    weights = torch.linspace(0.5, 2.0, 16, dtype=torch.float64)
    levels = torch.stack([found.hpd_level(point, float(w)) for w in weights])
    assert bool((levels.diff(dim=0) > -0.01).all())
    assert float(levels[-1].mean()) > float(levels[0].mean()) + 0.1


@pytest.mark.calibration
def test_losses_do_not_depend_on_chunks(monkeypatch) -> None:
    import bayeskit.inference.generalized._coverage as module

    posterior = GibbsPosterior(Flat(), losses.Absolute(), normal(N))
    whole = replicate_posteriors(posterior, weights=counts(), num_draws=64)
    for size in (2 * N, 100 * N):  # parts of one replicate's draws, and several replicates
        monkeypatch.setattr(module, "VALUES_AT_ONCE", size)
        torch.testing.assert_close(whole.losses(whole.draws), whole.points.loss, rtol=0, atol=1e-12)


@pytest.mark.calibration
def test_seeds_repeat_and_differ() -> None:
    posterior = GibbsPosterior(Flat(), losses.Absolute(), normal(N))
    state = torch.get_rng_state()
    first, again, other = (replicate_posteriors(posterior, weights=counts(), seed=s).draws for s in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(state, torch.get_rng_state())


def test_bad_input() -> None:
    x = normal(N)
    posterior = GibbsPosterior(Flat(), losses.HalfSquared(), x)
    with pytest.raises(SettingsError, match="weights= or data="):
        replicate_posteriors(posterior)
    with pytest.raises(SettingsError, match="weight"):
        replicate_posteriors(posterior, weights=counts(), weight=-1.0)
    with pytest.raises(SettingsError, match="positive"):
        replicate_posteriors(posterior, weights=counts(), weight=torch.zeros(R))
    with pytest.raises(ShapeError, match="weight"):
        replicate_posteriors(posterior, weights=counts(), weight=torch.ones(R + 1))
    with pytest.raises(ShapeError, match="weights"):
        replicate_posteriors(posterior, weights=counts()[:, :-1])
    with pytest.raises(SettingsError, match="add up"):
        replicate_posteriors(GibbsPosterior(Flat(), losses.HalfSquared(), x, pooling=Max()), weights=counts())
