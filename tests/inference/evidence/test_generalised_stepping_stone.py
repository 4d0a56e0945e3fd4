"""Generalised stepping stone: a normalised reference, the same posterior, exact answers, and what it owns up to."""

import math

import pytest
import torch

import bayeskit as bk
from bayeskit import exact
from bayeskit._core.randomness import new_generator
from bayeskit._draws import Draws
from bayeskit._logdensity.combinators import rebased
from bayeskit.errors import DrawsError, ModelError, SettingsError
from bayeskit.inference._proposals import SplitStudentT
from bayeskit.inference.evidence._ladder import fit_reference, generalised_stepping_stone
from bayeskit.inference.samplers._ladder import Ladder


@pytest.fixture(scope="module")
def linear():
    """linreg10 as a target of functions, which is traced in no time."""
    case = exact.get("linreg10")
    x, y, noise, prior = case.args
    half = 0.5 * math.log(2 * math.pi)
    return case, bk.Target.from_functions(
        lambda u: (-0.5 * (u / prior).square() - prior.log() - half).sum(-1),
        lambda u: (-0.5 * ((y - u @ x.T) / noise).square() - noise.log() - half).sum(-1),
        10,
    )


def draws_of(case, target, seed, chains=4, count=200):
    """Independent draws from the posterior, which is normal."""
    factor = torch.linalg.cholesky(case.posterior_covariance["b"])
    noise = torch.randn(chains, count, 10, generator=new_generator(seed, stream="posterior"), dtype=torch.float64)
    u = case.posterior_mean["b"] + noise @ factor.T
    return Draws(u, *target.evaluate(u), torch.ones(chains, dtype=torch.float64), num_gradients=1, target=target)


def test_the_reference_is_a_density_and_its_draws_follow_it(limit):
    reference = SplitStudentT(*(torch.tensor([v], dtype=torch.float64) for v in (0.3, 0.5, 2.0)))
    u = torch.linspace(-2000, 2000, 2_000_001, dtype=torch.float64).unsqueeze(-1)
    density = reference.log_prob(u).exp()
    assert float(density.sum() * 2e-3) == pytest.approx(1, abs=1e-6)
    x = reference.sample(40_000, new_generator(0))[:, 0]
    cumulative = density.cumsum(0) * 2e-3
    for point in (-1.0, 0.3, 2.0, 6.0):
        p = float(cumulative[int((point + 2000) / 2e-3)])
        share = float((x < point).to(torch.float64).mean())
        assert abs(share - p) < limit(4) * math.sqrt(p * (1 - p) / 40_000), point


def test_the_reference_follows_skewness_and_moves_with_the_coordinates():
    generator = torch.Generator().manual_seed(1)
    skewed = torch._standard_gamma(torch.full((4000, 2), 0.7, dtype=torch.float64), generator=generator).log()
    fitted = SplitStudentT.fit(skewed)
    assert bool((fitted.left > 1.5 * fitted.right).all())
    moved = SplitStudentT.fit(3 - 2 * skewed)
    torch.testing.assert_close(moved.log_prob(3 - 2 * skewed), fitted.log_prob(skewed) - 2 * math.log(2))


def test_a_rebased_target_has_the_same_posterior(linear):
    case = linear[0]
    target = case.target()
    reference, _ = fit_reference(draws_of(case, target, 0))
    path = rebased(target, reference)
    u = reference.sample(70, new_generator(2))
    torch.testing.assert_close(path.log_density(u), target.log_density(u))
    for beta in (0.0, 0.3, 1.0):
        leaf = u.clone().requires_grad_(True)
        density = path.log_density(leaf, beta)
        value, gradient = path.value_and_grad(u, beta)
        torch.testing.assert_close(value, density.detach())
        torch.testing.assert_close(gradient, torch.autograd.grad(density.sum(), leaf)[0])
    assert torch.equal(path.constrain(u)["b"], target.constrain(u)["b"]) and path.can_sample_prior
    other = rebased(target, SplitStudentT(reference.location, reference.left, 1.01 * reference.right))
    assert path.fingerprint() != other.fingerprint()
    with pytest.raises(ModelError, match="rebased"):
        path.pointwise_log_likelihood(u)


@pytest.mark.long
def test_it_is_exact_and_sharp(linear, calibrated):
    """Over replicates z is standard normal, with an error far below that of a ladder from the prior."""
    case, target = linear
    found = [
        generalised_stepping_stone(
            target, draws_of(case, target, seed), num_temperatures=5, num_warmup=60, num_samples=100, seed=seed
        )
        for seed in range(12)
    ]
    assert all(z.trusted for z in found), [z.warnings for z in found]
    assert calibrated(((z.log_evidence - case.log_evidence) / z.standard_error for z in found), off=0.1), found
    assert max(z.standard_error for z in found) < 0.03


def test_a_reference_that_is_not_normalised_is_noticed(linear, limit, monkeypatch):
    case, target = linear
    right = SplitStudentT.log_prob
    monkeypatch.setattr(SplitStudentT, "log_prob", lambda self, u: right(self, u) + math.log(1.2))
    z = generalised_stepping_stone(target, draws_of(case, target, 0), num_warmup=60, num_samples=120)
    assert abs(z.log_evidence - case.log_evidence) > limit() * z.standard_error


def test_a_prior_that_cannot_be_drawn_from_is_no_hindrance(limit):
    """And in single precision: ``u ~ N(0, 1)``, one observation ``1.5 ~ N(u, 1)``."""
    half = 0.5 * math.log(2 * math.pi)
    target = bk.Target.from_functions(
        lambda u: (-0.5 * u.square() - half).sum(-1),
        lambda u: (-0.5 * (u - 1.5).square() - half).sum(-1),
        1,
        dtype=torch.float32,
    )
    known = -0.5 * math.log(4 * math.pi) - 1.5**2 / 4
    draws = bk.sample(target, 4, 100, 200, seed=0, progress=False)
    z = generalised_stepping_stone(target, draws, num_temperatures=4, num_warmup=60, num_samples=200)
    assert z.trusted and abs(z.log_evidence - known) < limit() * z.standard_error, str(z)


def test_lighter_tails_of_the_reference_are_seen(linear, monkeypatch):
    """A reference of 0.6 standard deviations and nearly normal tails leaves out what two steps cannot bring back."""
    case, target = linear
    right = SplitStudentT.fit

    def narrow(x):
        fitted = right(x)
        return SplitStudentT(fitted.location, 0.6 * fitted.left, 0.6 * fitted.right, 200.0)

    monkeypatch.setattr(SplitStudentT, "fit", narrow)
    z = generalised_stepping_stone(
        target, draws_of(case, target, 0, 4, 500), num_temperatures=2, num_warmup=60, num_samples=60
    )
    assert not z.trusted and "lighter tails" in " ".join(z.warnings)


@pytest.mark.calibration
def test_draws_that_the_ladder_does_not_meet_are_seen(linear):
    """The posterior draws lie in one of two modes, the ladder's other end in the other."""
    centre = torch.tensor([4.0, 0.0], dtype=torch.float64)

    def log_prior(u):
        return (-0.5 * (u / 5).square() - math.log(5) - 0.5 * math.log(2 * math.pi)).sum(-1)

    def log_likelihood(u):
        near, far = (-0.5 * ((u - c) / 0.3).square().sum(-1) for c in (centre, -centre))
        return torch.logaddexp(near, far + 1)

    target = bk.Target.from_functions(
        log_prior, log_likelihood, 2, lambda n, g: 5 * torch.randn(n, 2, generator=g, dtype=torch.float64)
    )
    noise = torch.randn(4, 400, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    here = centre * 25 / (25 + 0.3**2) + noise * math.sqrt(25 * 0.09 / 25.09)
    u = here * torch.tensor([1.0, 1.0, 1.0, -1.0]).double()[:, None, None]  # one chain of four in the heavier mode
    draws = Draws(u, log_prior(u), log_likelihood(u), torch.ones(4, dtype=torch.float64), target=target)
    z = generalised_stepping_stone(target, draws, num_temperatures=4, num_warmup=60, num_samples=120)
    assert not z.trusted and "disagree" in " ".join(z.warnings)


def test_what_cannot_be_fitted_is_refused(linear):
    case, target = linear
    few = draws_of(case, target, 0, 2, 16)
    with pytest.raises(DrawsError, match="too few to fit"):
        generalised_stepping_stone(target, few)
    still = draws_of(case, target, 0)
    still.unconstrained[..., 3] = 1.0
    with pytest.raises(DrawsError, match=r"coordinates \[3\] are constant"):
        fit_reference(still)
    with pytest.raises(DrawsError, match="another target"):
        generalised_stepping_stone(exact.linear_regression(prior_sd=1.0).target(), draws_of(case, target, 0))
    with pytest.raises(SettingsError, match="num_temperatures"):
        generalised_stepping_stone(target, draws_of(case, target, 0), num_temperatures=1)
    with pytest.raises(DrawsError, match=r"ladder\.posterior"):
        generalised_stepping_stone(target, Ladder(torch.ones(1), draws_of(case, target, 0)))
