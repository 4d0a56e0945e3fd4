"""Jumps along scales leave the posterior what it is, and lead to plateaus with their share of the draws."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.statistics import effective_sample_size
from bayeskit.inference.samplers import HMC
from bayeskit.inference.samplers._chains import Chains
from bayeskit.inference.samplers._scale_jumps import Proposal, ScaleJumps, jump, scale_jumps, within_reach

DOUBLE = torch.float64
BULK, HEIGHT, NEAR, FAR = 0.4, -4.0, 4.0, 40.0  # a plateau of the log scale, beside a normal bulk about zero
D = 3
MASS = math.exp(HEIGHT) * (FAR - NEAR) / (BULK * math.sqrt(2 * math.pi))
SHARE = MASS / (1 + MASS)  # of the plateau
SOFT = 0.5  # over which the plateau begins and ends


def model():
    """Far below a normal bulk the logarithm of a scale has a plateau; other variables have this scale."""
    scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=DOUBLE), 1.0))
    x = -scale.log()
    edges = torch.nn.functional.logsigmoid((x - NEAR) / SOFT) + torch.nn.functional.logsigmoid((FAR - x) / SOFT)
    shape = torch.logaddexp(-0.5 * (x / BULK) ** 2, edges + HEIGHT)
    pyro.factor("shape", shape - dist.Normal(0.0, 1.0).log_prob(x))
    with pyro.plate("members", D):
        pyro.sample("x", dist.Normal(torch.zeros((), dtype=DOUBLE), scale))


@pytest.fixture(scope="module")
def target():
    return bk.Target.from_pyro(model)


def exact_draws(n, seed=1):
    """Draw from the posterior; the soft edges of the plateau are logistic."""
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(3, n, generator=generator, dtype=DOUBLE)
    plateau = NEAR + (FAR - NEAR) * uniform[1] + SOFT * uniform[2].logit()
    bulk = BULK * torch.randn(n, generator=generator, dtype=DOUBLE)
    log_scale = -torch.where(uniform[0] < SHARE, plateau, bulk)
    noise = torch.randn(n, D, generator=generator, dtype=DOUBLE)
    return torch.cat([log_scale.unsqueeze(1), log_scale.exp().unsqueeze(1) * noise], 1)


@pytest.fixture(scope="module")
def jumps(target):
    width = torch.tensor([BULK, 1.0, 1.0, 1.0], dtype=DOUBLE)
    found, _ = scale_jumps(target, torch.zeros(1 + D, dtype=DOUBLE), width, 10**6, torch.Generator().manual_seed(0))
    assert found.columns == [0]
    return found


def test_the_density_of_proposals_is_that_with_which_they_are_drawn(target, jumps):
    proposal = Proposal(target, jumps.along(0), 0)
    there, log_density = proposal.draw(torch.zeros(500, 1 + D, dtype=DOUBLE), torch.Generator().manual_seed(2))
    assert torch.allclose(proposal.log_density(there), log_density, rtol=1e-6, atol=1e-6)
    # The variance of weights is that of Student's t with 8 degrees of freedom against a normal one, of three variables,
    # and the error of a density that is linear between knots half a nat from each other.
    weights = (target.log_density(there) - log_density).log_softmax(0).exp()
    assert 1 / float(weights.square().sum()) > 0.7 * len(weights)


def test_a_scale_is_drawn_from_the_density_between_its_knots(target, limit):
    """Two segments, one steeply down and one steeply up."""
    knots, heights = torch.tensor([0.0, 1.0, 3.0], dtype=DOUBLE), torch.tensor([0.0, -4.0, 1.0], dtype=DOUBLE)
    position = torch.zeros(3, 1 + D, dtype=DOUBLE)
    position[:, 0] = knots
    is_scale = torch.zeros_like(position, dtype=torch.bool)
    is_scale[:, 0] = True
    column = torch.zeros(3, dtype=torch.int64)
    table = ScaleJumps(column, position, torch.ones_like(position), heights, torch.zeros_like(heights), is_scale)
    x, _ = Proposal(target, table, 0).draw(torch.zeros(20_000, 1 + D, dtype=DOUBLE), torch.Generator().manual_seed(9))
    grid = torch.linspace(0, 3, 30_001, dtype=DOUBLE)
    rise = torch.where(grid < 1, -4 * grid, -4 + 2.5 * (grid - 1)).exp()
    for power in (1, 2, 3):
        moment = float(torch.trapezoid(rise * grid**power, grid) / torch.trapezoid(rise, grid))
        found = x[:, 0] ** power
        assert abs(float(found.mean()) - moment) < limit(3) * float(found.std()) / math.sqrt(len(found))


def test_jumps_leave_the_posterior_as_it_is(target, jumps, limit):
    u = exact_draws(20_000)
    kernel, generator = HMC(), torch.Generator().manual_seed(3)
    state = kernel.init(target, u)
    for _ in range(3):
        state, _ = jump(target, kernel, state, jumps, generator)
    moved = (state.position != u).any(1)
    assert float(moved.double().mean()) > 0.8
    before, after = (x[:, 0] < -0.5 * NEAR for x in (u, state.position))
    assert abs(float(after.double().mean()) - SHARE) < limit() * math.sqrt(SHARE * (1 - SHARE) / len(u))
    assert float((before != after).double().mean()) > 0.1
    for inside in (after, ~after):
        log_scale, x = state.position[inside, 0], state.position[inside, 1:]
        z = x / log_scale.exp().unsqueeze(1)
        n = z.numel()
        assert abs(float(z.mean())) < limit() / math.sqrt(n)
        assert abs(float(z.square().mean()) - 1) < limit() * math.sqrt(2 / n)
    plateau = -state.position[after, 0]
    sd = (FAR - NEAR) / math.sqrt(12)
    assert abs(float(plateau.mean()) - 0.5 * (NEAR + FAR)) < limit() * math.hypot(sd, SOFT) / math.sqrt(len(plateau))


@pytest.fixture(scope="module")
def draws():
    return bk.sample(model, seed=4, progress=False)


def on_plateau(draws):
    return (draws.unconstrained[..., 0] < -0.5 * NEAR).double()


@pytest.mark.long
def test_chains_find_a_plateau_that_trajectories_do_not_reach(target, draws, limit):
    with pytest.warns(bk.errors.SamplingWarning, match="no chain has been"):
        plain = bk.sample(bk.Target.from_pyro(model), seed=4, reparameterize=False, progress=False)
    assert not bool(on_plateau(plain).any())
    there = on_plateau(draws)
    error = math.sqrt(SHARE * (1 - SHARE) / float(effective_sample_size(there)))
    assert abs(float(there.mean()) - SHARE) < limit() * error < 0.5 * SHARE


@pytest.mark.long
def test_a_resumed_run_jumps_as_one_that_was_not_interrupted(tmp_path, monkeypatch):
    advance, count = Chains.advance, 0

    def until_killed(self, state, iteration, generator):
        nonlocal count
        count += 1
        if count == 220:
            raise ZeroDivisionError
        return advance(self, state, iteration, generator)

    settings = {"num_warmup": 150, "num_samples": 150, "seed": 4, "progress": False}
    whole = bk.sample(model, **settings)
    assert bool(on_plateau(whole).any())
    settings |= {"checkpoint": tmp_path / "run", "checkpoint_seconds": 0}
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Chains, "advance", until_killed)
        bk.sample(model, **settings)
    assert torch.equal(bk.sample(model, **settings).unconstrained, whole.unconstrained)


def test_a_trajectory_fails_without_harm_where_jumps_lead(target, jumps):
    kernel, u = HMC(), exact_draws(500)
    reached, _ = within_reach(target, kernel.init(target, u), jumps)
    assert float(reached.double().mean()) > 0.98
    beyond = u.clone()
    beyond[:, 0] = 60.0  # beyond all knots
    assert not bool(within_reach(target, kernel.init(target, beyond), jumps)[0].any())
    # Where the density is far higher than that of proposals, jumps come seldom.
    higher = kernel.init(target, u)
    higher = higher._replace(log_density=higher.log_density + 20)
    assert not bool(within_reach(target, higher, jumps)[0].any())


@pytest.mark.long
def test_other_scales_and_other_variables_are_proposed_from_their_conditional_distribution():
    """The data know one scale, and can do without the other."""

    def effects(y):
        spread = pyro.sample("spread", dist.HalfCauchy(torch.tensor(0.01, dtype=DOUBLE)))
        noise = pyro.sample("noise", dist.HalfCauchy(torch.tensor(5.0, dtype=DOUBLE)))
        with pyro.plate("groups", y.shape[0], dim=-2):
            effect = pyro.sample("effect", dist.Normal(torch.zeros((), dtype=DOUBLE), spread))
            with pyro.plate("members", y.shape[1], dim=-1):
                pyro.sample("y", dist.Normal(effect, noise), obs=y)

    generator = torch.Generator().manual_seed(5)
    y = 1.5 * torch.randn(6, 1, generator=generator, dtype=DOUBLE) + torch.randn(
        6, 5, generator=generator, dtype=DOUBLE
    )
    draws = bk.sample(effects, y, seed=6, progress=False)
    target, u = draws.target, draws.unconstrained
    centre, width = u.mean((0, 1)), u.std((0, 1))
    jumps, _ = scale_jumps(target, centre, width, 10**6, torch.Generator().manual_seed(7))
    assert jumps.columns == [0]
    proposal = Proposal(target, jumps.along(0), 0)
    there, log_density = proposal.draw(u[0, :400], torch.Generator().manual_seed(8))
    weights = (target.log_density(there) - log_density).log_softmax(0).exp()
    assert 1 / float(weights.square().sum()) > 0.4 * len(weights)
    assert torch.allclose(proposal.log_density(there), log_density, rtol=1e-6, atol=1e-6)


def test_scales_that_trajectories_cross_have_no_jumps():
    def regression(y):
        scale = pyro.sample("scale", dist.HalfCauchy(torch.tensor(5.0, dtype=DOUBLE)))
        mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=DOUBLE), 10.0))
        with pyro.plate("rows", len(y)):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)

    target = bk.Target.from_pyro(regression, torch.linspace(-1, 1, 20, dtype=DOUBLE))
    generator = torch.Generator().manual_seed(0)
    found, spent = scale_jumps(
        target, torch.zeros(2, dtype=DOUBLE), torch.full((2,), 0.2, dtype=DOUBLE), 10**6, generator
    )
    assert found.columns == [] and spent > 0


def test_without_a_width_or_gradients_to_spend_there_are_no_jumps():
    def single(y):
        scale = pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=DOUBLE), 3.0))
        pyro.sample("y", dist.Normal(torch.zeros((), dtype=DOUBLE), scale), obs=y)

    target = bk.Target.from_pyro(single, torch.zeros((), dtype=DOUBLE))
    generator, zero, one = torch.Generator().manual_seed(0), torch.zeros(1, dtype=DOUBLE), torch.ones(1, dtype=DOUBLE)
    for width in (0.0, math.nan, math.inf):
        assert scale_jumps(target, zero, width * one, 10**6, generator)[0].columns == []
    assert scale_jumps(target, zero, one, 0, generator)[0].columns == []


def test_a_density_that_fails_at_distant_points_is_sampled_by_trajectories(target, monkeypatch):
    def fails(self, u, *args, **kwargs):
        raise RuntimeError("out of range")

    monkeypatch.setattr(bk.Target, "constrain", fails)
    generator, d = torch.Generator().manual_seed(0), 1 + D
    found, spent = scale_jumps(target, torch.zeros(d, dtype=DOUBLE), torch.ones(d, dtype=DOUBLE), 10**6, generator)
    assert found.columns == [] and spent == 0
