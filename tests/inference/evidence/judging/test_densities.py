"""Estimates are refused where values that are rounded to an end of their support can move them, and only there."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.special import betaln

import bayeskit as bk
from bayeskit.exact.generated import BetaBernoulli
from bayeskit.inference import evidence
from bayeskit.inference.evidence._judging._densities import rounding_problems

F64 = torch.float64
LIMIT = 4.42  # standard errors, at a failure rate of 1e-5


def model(y, a):
    p = pyro.sample("p", dist.Beta(torch.full((), a, dtype=y.dtype), torch.full((), a, dtype=y.dtype)))
    with pyro.plate("n", len(y)):
        pyro.sample("y", dist.Bernoulli(p), obs=y)


def target_of(y, a, dtype=F64):
    return bk.Target.from_pyro(model, torch.tensor(y, dtype=dtype), a, compile=False)


def exact(y, a):
    return float(betaln(a + sum(y), a + len(y) - sum(y)) - betaln(a, a))


@pytest.mark.parametrize(("dtype", "a"), [(F64, 1e-16), (torch.float32, 1e-7)])
def test_a_likelihood_that_goes_on_to_change_is_refused(dtype, a):
    """Half of the prior lies where p is one, which has the probability of a rounding unit and should have none."""
    found = evidence.naive_monte_carlo(target_of([1.0, 0.0], a, dtype), num_draws=2000)
    (problem,) = [w for w in found.warnings if "rounded to an end" in w]
    assert "'p'" in problem and "logits" in problem and not found.trusted


def test_a_likelihood_with_a_limit_is_trusted():
    y, a = [1.0, 1.0, 1.0], 0.05
    found = evidence.naive_monte_carlo(target_of(y, a))
    assert found.trusted and abs(found.log_evidence - exact(y, a)) < LIMIT * found.standard_error


@pytest.mark.calibration
def test_posterior_draws_within_are_no_reason_to_refuse():
    y, a = [1.0, 0.0], 0.01
    target = target_of(y, a)
    draws = bk.sample(target, num_warmup=200, num_samples=300, progress=False)
    found = evidence.bridge_sampling(target, draws)
    assert found.trusted and found.diagnostics["rounded_share"] == 0
    assert abs(found.log_evidence - exact(y, a)) < LIMIT * found.standard_error


def test_priors_that_see_rounded_values_only_are_refused_and_known_ones_are_not():
    """Half of the values are one, where a density of one's own is evaluated, too: it is infinite there."""

    class Own(dist.Beta):
        def log_prob(self, value):
            return super().log_prob(value) + 0.0

    problems = {}
    for kind in (dist.Beta, Own):

        def prior(kind=kind):
            p = pyro.sample("p", kind(torch.tensor(0.01, dtype=F64), torch.tensor(0.01, dtype=F64)))
            pyro.sample("y", dist.Normal(p, 1.0), obs=torch.tensor(0.3, dtype=F64))

        target = bk.Target.from_pyro(prior, compile=False)
        points = torch.tensor([[60.0], [0.0], [45.0], [1.0]], dtype=F64)
        problems[kind], _ = rounding_problems(target, points, None, 0.1)
    assert problems[dist.Beta] == [] and "'p'" in problems[Own][0]


def test_the_share_counts_weights():
    target = target_of([0.0], 0.5)
    points = torch.tensor([[0.0], [38.0], [60.0], [-800.0]], dtype=F64)
    log_weights = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=F64).log()
    problems, share = rounding_problems(target, points, log_weights, 0.1)
    # The likelihood 1 - p should be exp(-u) and is the unit of rounding; at p = 0 it has a limit.
    lost = [1 - math.exp(-u) / torch.finfo(F64).eps for u in (38.0, 60.0)]
    assert share == pytest.approx(0.25 * lost[0] + 0.15 * lost[1]) and len(problems) == 1
    assert rounding_problems(target, points, log_weights, 0.4)[0] == []


def scales(y):
    scale = pyro.sample("scale", dist.InverseGamma(torch.tensor(1e-3, dtype=F64), torch.tensor(1.0, dtype=F64)))
    share = pyro.sample("share", dist.Dirichlet(torch.full((3,), 1e-3, dtype=F64)))
    place = pyro.sample("place", dist.Uniform(torch.tensor(2.0, dtype=F64), torch.tensor(5.0, dtype=F64)))
    pyro.sample("y", dist.Normal(0.0, scale + place), obs=y)
    pyro.sample("n", dist.Poisson(share[..., 1:].sum()), obs=torch.tensor(1.0, dtype=F64))


@pytest.mark.parametrize(
    ("u", "rounded"),
    [
        ([0.0, 0.0, 0.0, 0.0], ()),
        ([-720.0, 0.0, 0.0, 0.0], ("scale",)),
        ([720.0, 0.0, 0.0, 0.0], ("scale",)),
        ([0.0, 750.0, 0.0, 0.0], ("share",)),
        ([0.0, 40.0, 0.0, 0.0], ()),  # the other pieces are small and known
        ([0.0, 0.0, 0.0, 40.0], ("place",)),
        ([0.0, 0.0, 0.0, -40.0], ("place",)),
    ],
)
def test_ends_of_all_supports_are_seen(u, rounded):
    target = bk.Target.from_pyro(scales, torch.tensor(0.3, dtype=F64), compile=False)
    change, found = target.rounding(torch.tensor(u, dtype=F64))
    assert tuple(name for name, value in found.items() if bool(value)) == rounded
    assert change.isfinite() and (rounded or float(change) == 0)


def test_a_target_of_functions_rounds_nothing():
    target = bk.Target.from_functions(lambda u: -u.square().sum(-1), lambda u: 0 * u.sum(-1), 2)
    change, rounded = target.rounding(torch.full((3, 2), 900.0, dtype=F64))
    assert change.tolist() == [0.0] * 3 and rounded == {}
    assert math.isfinite(float(change.sum()))


SLOW_CHANGE = BetaBernoulli(a=4.06, b=0.028, weight=0.109, y=(0.0,))
"""A likelihood to the power of a tenth loses little by one unit of rounding, and all of 4 % of the mass by 30."""


def test_a_slow_change_far_beyond_the_end_counts_by_its_distance():
    target = SLOW_CHANGE.case().target()
    u = torch.linspace(-20, 1200, 200_001, dtype=F64).unsqueeze(1)
    log_weights = target.log_density(u)  # on a grid, so without Monte Carlo error
    beyond = float(log_weights.softmax(0)[u[:, 0] > -math.log(torch.finfo(F64).eps)].sum())
    (warning,), share = rounding_problems(target, u, log_weights, 0.02)
    assert 0.03 < share < beyond < 0.05 and "'p'" in warning and "rounded to an end" in warning
    assert rounding_problems(target, u, log_weights, 0.05) == ([], share)


@pytest.mark.calibration
@pytest.mark.parametrize("method", ["stepping_stone", "path_sampling", "smc"])
def test_a_slow_change_far_beyond_the_end_is_refused(method):
    budget = evidence.Budget(32, 150, 150, num_temperatures=20, ladder_samples=300)
    table = evidence.compare(SLOW_CHANGE.case().target(), [method], seed=1, budget=budget, progress=False)
    assert any("rounded to an end" in warning for warning in table[method].warnings), str(table[method])
