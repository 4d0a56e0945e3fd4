"""Posterior mass beyond the ends of the draws of a scale is said with its share."""

import math
from dataclasses import replace
from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.inference.evidence import bridge_sampling
from bayeskit.inference.samplers._unseen_tails import unseen_tails

DOUBLE = torch.float64
BULK, HEIGHT, NEAR, FAR = 0.4, -5.0, 1.5, 9.0  # a plateau of the log scale, beside a normal bulk about zero
D = 3
BEYOND_A_VALLEY = 4.0


def share_of_plateau(near):
    return math.exp(HEIGHT) * (FAR - near) / (math.exp(HEIGHT) * (FAR - near) + BULK * math.sqrt(2 * math.pi))


def model(height, scaled, near):
    """The logarithm of a scale is normal, with a plateau far above; other variables have this scale."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=DOUBLE), 1.0))
    log_scale = scale.log()
    edges = torch.sigmoid((log_scale - near) / 0.02).log() + torch.sigmoid((FAR - log_scale) / 0.02).log()
    bulk = -0.5 * (log_scale / BULK) ** 2
    pyro.factor("shape", torch.logaddexp(bulk, edges + height) - dist.Normal(0.0, 1.0).log_prob(log_scale))
    if scaled:
        with pyro.plate("members", D):
            pyro.sample("x", dist.Normal(torch.zeros((), dtype=DOUBLE), scale))


def draws_of_bulk(height, scaled, sd=BULK, near=NEAR):
    """Return draws of the bulk alone, as those of chains that have never met the plateau."""
    target = bk.Target.from_pyro(model, height, scaled, near)
    generator = torch.Generator().manual_seed(3)
    u = sd * torch.randn(4, 1000, 1, generator=generator, dtype=DOUBLE)
    if scaled:
        u = torch.cat([u, u.exp() * torch.randn(4, 1000, D, generator=generator, dtype=DOUBLE)], -1)
    draws = bk.sample(target, num_warmup=20, num_samples=20, reparameterize=False, progress=False)
    log_prior, log_likelihood = target.evaluate(u)
    return replace(
        draws, unconstrained=u, log_prior=log_prior, log_likelihood=log_likelihood, num_gradients=20_000, target=target
    )


@pytest.mark.calibration
def test_a_plateau_of_a_scale_is_found_with_its_share(limit):
    for scaled, near in product((False, True), (NEAR, BEYOND_A_VALLEY)):
        (found,) = unseen_tails(draws_of_bulk(HEIGHT, scaled, near=near)).found
        # The density in the tail comes from 60 draws. A plateau that ends between two points counts half that piece.
        rough = limit() / math.sqrt(60) + 0.5 * 8 * BULK / (FAR - near)
        assert abs(math.log(found.share / share_of_plateau(near))) < rough
        assert "'scale' is above" in found.warning


def test_a_spread_that_rests_on_a_few_draws_is_said():
    """Chains that met the plateau three times: R-hat and effective sizes are those of the bulk."""
    draws = draws_of_bulk(HEIGHT, True)
    draws.unconstrained[:3, 500, 0] = 16.0
    (found,) = unseen_tails(draws).found
    square = (draws.unconstrained[..., 0] - draws.unconstrained[..., 0].mean()).square()
    number = float(square.sum() ** 2 / square.square().sum())
    assert f"the variance of 'scale' on the unconstrained scale comes from about {number:.0f} of" in found.warning
    assert found.share == number / 4000


def test_too_few_draws_to_have_tails_are_no_error():
    draws = draws_of_bulk(HEIGHT, True)
    for count in (1, 2, 3, 49):
        short = replace(
            draws,
            unconstrained=draws.unconstrained[:, :count],
            log_prior=draws.log_prior[:, :count],
            log_likelihood=draws.log_likelihood[:, :count],
            sample_stats={},
        )
        assert unseen_tails(short).found == []


def test_a_density_that_is_no_number_far_away_hides_no_tail():
    for failing in (False, True):
        draws = draws_of_bulk(HEIGHT, False)
        density = draws.target.log_density

        def broken(u, density=density, failing=failing):
            if failing and float(u.max()) > FAR + 1:
                raise ValueError("no density there")
            return torch.where(u[..., 0] > FAR + 1, math.nan, density(u))

        draws.target.log_density = broken
        (found,) = unseen_tails(draws).found
        assert abs(math.log(found.share / share_of_plateau(NEAR))) < 1


def test_a_plateau_without_mass_is_not_mentioned():
    assert unseen_tails(draws_of_bulk(-12.0, True)).found == []


def test_draws_that_end_too_early_are_noticed_on_both_sides():
    """Half of the spread of the bulk: chains that were too short."""
    (found,) = unseen_tails(draws_of_bulk(-40.0, True, sd=0.3 * BULK)).found
    assert found.share > 0.01


@pytest.mark.calibration
def test_an_estimate_from_such_draws_is_not_trusted():
    z = bridge_sampling(draws_of_bulk(HEIGHT, False).target, draws_of_bulk(HEIGHT, False))
    assert not z.trusted


@pytest.mark.calibration
def test_probabilities_and_scales_are_looked_at_and_nothing_else():
    def others():
        pyro.sample("share", dist.Beta(torch.tensor(2.0, dtype=DOUBLE), 3.0))
        location = pyro.sample("location", dist.Normal(torch.zeros(2, dtype=DOUBLE), 1.0).to_event(1))
        pyro.factor("data", -location.square().sum(-1))

    draws = bk.sample(others, num_samples=200, progress=False)
    assert unseen_tails(draws).found == []


@pytest.mark.calibration
def test_functions_of_a_user_are_not_asked_for_distant_values():
    def constrain(u):
        assert float(abs(u).max()) < 15
        return {"scale": math.exp(float(u[0]))}

    target = bk.Target.from_log_density(
        lambda u: (-0.5 * float(u @ u), -u), 2, names={"log_scale": (), "x": ()}, constrain=constrain
    )
    assert unseen_tails(bk.sample(target, num_samples=300, progress=False)).found == []
