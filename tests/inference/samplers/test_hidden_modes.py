"""Modes that no chain of a run visits are said, with their share, and are starts of the next run."""

import math
import pickle
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import SamplingWarning
from bayeskit.inference._known_modes import KnownModes
from bayeskit.inference.samplers._hidden_modes import hidden_modes
from bayeskit.inference.samplers._sampling import _RunGroup

DOUBLE = torch.float64


def unequal():
    """Return two normal modes, of which the narrow one has 9 % of the mass and hardly any start."""
    x = pyro.sample("x", dist.Normal(torch.zeros(4, dtype=DOUBLE), 3.0).to_event(1))
    wide = dist.Normal(torch.zeros(4, dtype=DOUBLE), 1.0).log_prob(x).sum(-1) + math.log(0.6)
    narrow = dist.Normal(torch.full((4,), 3.0, dtype=DOUBLE), 0.1).log_prob(x).sum(-1) + math.log(0.4)
    pyro.factor("likelihood", torch.logaddexp(wide, narrow))


def exact_share():
    parts = [(0.6, 0.0, 1.0), (0.4, 3.0, 0.1)]
    masses = [
        w * math.exp(4 * float(dist.Normal(0.0, math.sqrt(9 + s * s)).log_prob(torch.tensor(m)))) for w, m, s in parts
    ]
    return masses[1] / sum(masses)


@pytest.mark.calibration
def test_a_mode_without_a_chain_is_said_and_visited_by_the_next_run():
    target = bk.Target.from_pyro(unequal)
    with pytest.warns(SamplingWarning, match=r"no chain has been in a mode with about") as seen:
        draws = bk.sample(target, seed=0, progress=False)
    assert float(draws.unconstrained.mean(-1).max()) < 2.5
    said = float(str(seen[0].message).split("about ")[1].split(" %")[0]) / 100
    assert abs(said / exact_share() - 1) < 0.3  # the peaks' masses, each known to a few per cent, and shares of draws
    # Chains in other processes start there, too, and a mode is kept once, however often a run misses it.
    assert len(KnownModes.of(target).unvisited) == 1
    assert len(KnownModes.of(pickle.loads(pickle.dumps(_RunGroup(target, "a group")))._target).unvisited) == 1
    bk.evidence.bridge_sampling(target, draws)
    hidden_modes(draws, seed=1)
    assert len(KnownModes.of(target).unvisited) == 1
    with pytest.warns(SamplingWarning, match="the chains disagree"):
        again = bk.sample(target, seed=0, progress=False)
    assert bool((again.unconstrained.mean(-1) > 2.5).all(1).any())
    hidden_modes(again, seed=0)
    assert KnownModes.of(target).unvisited == []


@pytest.mark.calibration
def test_a_posterior_of_one_mode_has_no_hidden_one():
    target = bk.exact.get("linreg10").target()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draws = bk.sample(target, seed=1, progress=False)
    assert KnownModes.of(target).unvisited == []
    # The same target gives the same draws again.
    assert torch.equal(draws.unconstrained, bk.sample(target, seed=1, progress=False).unconstrained)
