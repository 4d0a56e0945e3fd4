"""The default sampler on models of the gallery; all of them, with more replicates, in ``benchmarks/sbc.py``."""

import warnings

import numpy as np
import pytest
import torch

import bayeskit as bk
from bayeskit._core.randomness import new_generator
from bayeskit.errors import SamplingWarning, SettingsError, UnsupportedSiteError
from bayeskit.gallery._registry import get_model
from bayeskit.workflows import _simulation_based_calibration as simulation_based_calibration

FAILURE_RATE = 1e-5


def study(target, sampler, **settings):
    return bk.sbc(target, sampler, **({"num_replicates": 20, "num_draws": 15, "seed": 4, "progress": False} | settings))


def short(target, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SamplingWarning)  # a rare divergence in the tail of tau
        return bk.sample(target, 16, 100, 60, seed=seed, progress=False)


def narrowed(draws, target):
    """The mutation: draws pulled towards their mean."""
    mean = draws.unconstrained.mean((0, 1))
    u = mean + 0.1 * (draws.unconstrained - mean)
    return bk.Draws(u, *target.evaluate(u), draws.beta, target=target)


@pytest.fixture(scope="module")
def eight_schools():
    return get_model("eight_schools").build()


@pytest.mark.long
def test_hamiltonian_monte_carlo_on_eight_schools_and_draws_that_are_too_narrow(eight_schools):
    runs = {}

    def kept(target, seed):
        runs[seed] = short(target, seed)
        return runs[seed]

    result = study(eight_schools, kept)
    # A chain stuck in the neck of the funnel has few effective draws; which replicate that is depends on rounding.
    assert len(result.ranks) == 11 and (result.effective_sample_size <= result.num_draws).sum() <= 2
    assert result.smallest_p_value > FAILURE_RATE, result
    # One seed gives the same data and the same draws, which need not be made again.
    narrow = study(eight_schools, lambda target, seed: narrowed(runs[seed], target))
    assert narrow.smallest_p_value < FAILURE_RATE, narrow


@pytest.mark.calibration
def test_the_default_sampler_gives_the_same_ranks_in_one_process_and_in_two(monkeypatch):
    # Too few to judge uniformity by, which is not the question here.
    monkeypatch.setattr(simulation_based_calibration, "MIN_REPLICATES", 2)
    target = get_model("beta_binomial").build()
    first, second = (study(target, None, num_replicates=2, num_jobs=jobs) for jobs in (1, 2))
    assert list(first.ranks) == list(second.ranks) == ["p", "log_likelihood"]
    for name, ranks in first.ranks.items():
        assert np.array_equal(ranks, second.ranks[name])
    assert np.array_equal(first.effective_sample_size, second.effective_sample_size)
    assert len(set(first.effective_sample_size)) == 2  # the replicates are not the same run


@pytest.mark.long
def test_a_target_is_its_model_with_its_arguments(eight_schools):
    case = bk.exact.get("eight_schools")
    generator = new_generator(0)
    prior = eight_schools.sample_prior(60, seed=generator).unflatten(0, (4, 15))

    def prior_draws(target, seed):
        return bk.Draws(prior, *target.evaluate(prior), torch.ones(4, dtype=torch.float64), target=target)

    of_target, of_model = study(eight_schools, prior_draws), study(case.model, prior_draws, args=case.args)
    assert all(np.array_equal(of_target.ranks[name], of_model.ranks[name]) for name in of_model.ranks)
    with pytest.raises(SettingsError, match="leave args and kwargs out"):
        study(eight_schools, prior_draws, args=case.args)
    with pytest.raises(SettingsError, match="only a Pyro model"):
        study(bk.Target.from_functions(lambda u: -u.square().sum(-1), lambda u: u.sum(-1), 1), prior_draws)


def test_a_likelihood_without_a_simulator_is_named():
    with pytest.raises(UnsupportedSiteError, match=r"factor 'alignment'.*simulate="):
        study(get_model("primates").build(), short)
