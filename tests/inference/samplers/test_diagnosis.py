"""Problems of draws are named by place, cause and remedy."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import SamplingWarning
from bayeskit.inference.samplers._diagnosis import problems, problems_in_tails

DOUBLE = torch.float64


def target_of(names, density=None):
    """A target whose coordinates have these names."""

    def model():
        values = [pyro.sample(name, dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0)) for name in names]
        pyro.factor("rest", 0 * values[0] if density is None else density(*values))

    return bk.Target.from_pyro(model)


def draws_of(x, target=None, log_density=None, diverging=None, steps=4):
    shape = x.shape[:2]
    level = torch.zeros(shape, dtype=DOUBLE) if log_density is None else log_density
    stats = {
        "diverging": torch.zeros(shape, dtype=torch.bool) if diverging is None else diverging,
        "n_steps": torch.full(shape, steps),
    }
    return bk.Draws(x, level, torch.zeros(shape, dtype=DOUBLE), torch.ones(len(x), dtype=DOUBLE), stats, target=target)


@pytest.fixture
def noise():
    return torch.randn(4, 500, 3, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)


@pytest.fixture(scope="module")
def target():
    return target_of(["mean", "scale", "slope"])


def sticky(noise, place, factor=0.99):
    """Autoregressive draws of one coordinate."""
    x = noise.clone()
    for t in range(1, x.shape[1]):
        x[:, t, place] = factor * x[:, t - 1, place] + math.sqrt(1 - factor**2) * noise[:, t, place]
    return x


def test_good_draws_have_no_problem(noise, target):
    assert problems(draws_of(noise, target), 256) == []


def test_the_halves_of_a_single_chain_are_compared(noise, target):
    assert problems(draws_of(noise[:1], target), 256) == []
    x = noise[:1].clone()
    x[:, 250:, 1] += 2
    (problem,) = problems(draws_of(x, target), 256)
    assert problem.startswith("the two halves of the chain disagree (R-hat ") and "for 'scale'" in problem


def test_too_few_draws_to_judge_are_said(noise, target):
    (problem,) = problems(draws_of(noise[:, :2], target), 256)
    assert problem.startswith("2 draws of each chain cannot tell whether chains agree; take num_samples=")
    assert problems(draws_of(noise[:, :4], target), 256) == []


def test_divergences_are_placed_where_they_gather(noise, target):
    x = noise.clone()
    deep = x[..., 1] < -1.8
    (said,) = problems(draws_of(x, target, diverging=deep), 256)
    assert said.startswith(f"{int(deep.sum())} of 2000 transitions diverged")
    assert "they gather where 'scale' is small" in said and "location + scale * standard normal" in said
    (said,) = problems(draws_of(x, target, diverging=x[..., 1] > 1.8), 256)
    assert "they gather where 'scale' is large" in said and "if it is a precision" in said
    anywhere = torch.zeros_like(deep)
    anywhere[:, ::100] = True
    (said,) = problems(draws_of(x, target, diverging=anywhere), 256)
    assert "gather" not in said and "raise target_acceptance" in said


@pytest.mark.calibration
def test_a_rare_divergence_counts_unless_the_scales_of_the_model_are_known_to_their_ends():
    def spread(of_scale):
        scale = pyro.sample("scale", of_scale)
        with pyro.plate("data", 8):
            y = torch.tensor([1.2, -0.7, 2.1, 0.3, -1.4, 0.8, 1.9, -0.2], dtype=DOUBLE)
            pyro.sample("y", dist.Normal(0.0, abs(scale)), obs=y)

    zero = torch.zeros((), dtype=DOUBLE)
    for of_scale, allowed in ((dist.LogNormal(zero, 1.0), 4), (dist.Normal(zero + 8, 1.0), 0)):
        draws = bk.sample(bk.Target.from_pyro(spread, of_scale), seed=1, progress=False)
        assert not bool(draws.sample_stats["diverging"].any())
        for count in (1, 4, 5):
            draws.sample_stats["diverging"][1, :count] = True
            assert bool(problems(draws, 256)) == (count > allowed)


@pytest.mark.calibration
def test_a_density_that_is_no_number_is_named_with_its_site():
    def half_a_disc():
        x = pyro.sample("x", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
        pyro.sample("y", dist.Normal(torch.zeros((), dtype=DOUBLE), 1.0))
        pyro.factor("height", (1 - x.square()).sqrt().log())

    with pytest.warns(bk.errors.SamplingWarning, match="the log likelihood is NaN where 'x' is far.*-inf") as caught:
        draws = bk.sample(half_a_disc, num_samples=300, progress=False)
    assert len(caught) == 1 and float(draws["x"].abs().max()) < 1


def test_a_chain_that_did_not_come_home_is_told_from_a_mode(noise, target):
    x = noise.clone()
    x[2, :, 2] += 50.0
    (said,) = problems(draws_of(x, target), 256)
    assert "R-hat" in said and "for 'slope'" in said and "different modes, at " in said
    assert "use samplers.sample_ladder with exchange=True" in said
    level = torch.zeros(4, 500, dtype=DOUBLE)
    level[2] = -1e5
    (said,) = problems(draws_of(x, target, level), 256)
    assert "chains [2] have not reached the posterior" in said and "farthest away in 'slope'" in said


def test_an_angle_is_known_by_its_density():
    target = target_of(["angle", "slope"], lambda angle, slope: 3 * angle.cos() + 0.5 * angle.square())
    x = 0.5 * torch.randn(4, 500, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    x[:2, :, 0] += 2 * math.pi
    (said,) = problems(draws_of(x, target), 256)
    assert "'angle' is an angle" in said and "dist.ProjectedNormal" in said
    other = target_of(["angle", "slope"])
    assert "different modes" in problems(draws_of(x, other), 256)[0]


def test_slow_chains_are_told_from_funnels_and_from_trajectories_at_the_limit(noise, target):
    slow = sticky(noise, 0)
    (said,) = problems(draws_of(slow, target), 256)
    assert "'mean'" in said and "run longer" in said and "funnel" not in said
    (said,) = problems(draws_of(slow, target, steps=250), 256)
    assert "limit of 256 steps" in said and "the scale of 'mean' differs" in said
    for power, how, remedy in (
        (2, "grows with 'scale'", "write the variables that it scales as location"),
        (-2, "shrinks as 'scale' grows", "sample them directly"),
    ):
        neck = sticky(noise, 1)
        neck[..., [0, 2]] *= (power * neck[..., 1:2]).exp()
        (said,) = problems(draws_of(neck, target), 256)
        assert f"{how}, as in a funnel" in said and remedy in said


def test_energies_that_hardly_change_are_said(noise, target):
    draws = draws_of(noise, target)
    draws.sample_stats["energy"] = noise[..., 0].square()
    assert problems(draws, 256) == problems_in_tails(draws, 256) == []
    draws.sample_stats["energy"] = sticky(noise, 0)[..., 0]
    (said,) = problems_in_tails(draws, 256)
    assert "E-BFMI 0.0" in said and "run longer" in said


def test_tails_that_chains_seldom_visit_are_said(noise, target):
    x = noise.clone()
    x[:, 200:210, 1] += 6 * torch.linspace(0.9, 1.1, 10)  # each chain goes far out once
    x[..., 1] = x[..., 1].clamp(min=-1.0)
    assert problems(draws_of(x, target), 256) == []
    x[:, 200:225, 1] = 6 + 0.1 * noise[:, 200:225, 1]
    (said,) = problems_in_tails(draws_of(x, target), 256)
    assert said.startswith("the highest 5 % of 'scale' have an effective sample size of")


def test_slow_chains_are_told_from_long_tails(noise, target):
    x = sticky(noise, 1)
    x[..., 1] = -x[..., 1].exp()
    (said,) = problems(draws_of(x, target), 256)
    assert "'scale' has a long tail at small values" in said and "give it a prior" in said
    (said,) = problems(draws_of(-x, target), 256)
    assert "long tail at large values" in said
    (said,) = problems(draws_of(sticky(noise, 1), target), 256)
    assert "tail" not in said


def test_few_draws_are_not_judged(noise, target):
    assert problems(draws_of(sticky(noise, 0)[:, :40], target), 256) == []
    (one,) = problems(draws_of(sticky(noise, 0)[:, :150], target), 256)
    assert "disagree (R-hat" in one and "> 1.07 for" in one


def cut_angle():
    """An angle near pi, whose mass lies on both sides of the cut."""
    angle = pyro.sample("angle", dist.VonMises(torch.tensor(math.pi - 0.02, dtype=DOUBLE), 300.0))
    pyro.factor("data", 200 * (angle - math.pi).cos())


def test_a_sampler_says_it_on_the_line_of_its_caller():
    """An angle at pi: half of the prior draws begin on the other side, and stay there."""
    start = torch.tensor([[5.0], [-5.0], [4.8], [-4.8]], dtype=DOUBLE)
    with pytest.warns(SamplingWarning, match="'angle' is an angle, and chains are separated") as said:
        bk.sample(bk.Target.from_pyro(cut_angle), num_warmup=50, num_samples=200, initial=start, progress=False)
    assert said[0].filename == __file__


def test_the_other_side_of_the_cut_of_an_angle_is_found():
    start = torch.tensor([[5.0], [5.2], [4.8], [4.9]], dtype=DOUBLE)
    with pytest.warns(SamplingWarning, match="no chain has been in a mode .* at angle = -"):
        bk.sample(bk.Target.from_pyro(cut_angle), num_warmup=50, num_samples=200, initial=start, progress=False)
