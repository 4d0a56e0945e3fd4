"""The matching model against sums over permutations, Pyro's own enumeration, and relaxations trained on it."""

import functools
import math

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import Trace_ELBO, TraceEnum_ELBO, TraceMeanField_ELBO, config_enumerate
from torch.distributions import Normal

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.permutations import (
    GibbsPermutation,
    GumbelSinkhornRelaxation,
    NoisyMatching,
    RoundingRelaxation,
    StickBreakingPermutation,
    StickBreakingRelaxation,
    all_permutations,
    doubly_stochastic,
    permutation_matrix,
    permutations,
)

FLOAT64 = torch.float64
RELAXATIONS = (RoundingRelaxation, StickBreakingRelaxation, GumbelSinkhornRelaxation)


def evidence_by_listing(matching):
    listed = all_permutations(matching.size)
    means = matching.centres[listed]
    log_likelihood = Normal(means, matching.scale).log_prob(matching.observations).sum((-1, -2))
    return float(log_likelihood.logsumexp(0)) - math.log(len(listed))


@pytest.mark.parametrize("size", [2, 4, 6])
def test_evidence_is_a_sum_over_permutations_and_pyros(size):
    matching, _ = NoisyMatching.simulate(size, 0.5, seed=size)
    assert abs(float(matching.log_evidence()) - evidence_by_listing(matching)) < 1e-10
    bound = TraceEnum_ELBO(max_plate_nesting=0)
    enumerated = -bound.loss(config_enumerate(matching.model), lambda: None)
    assert abs(float(matching.log_evidence()) - enumerated) < 1e-10


def test_mutation_a_weight_that_forgets_the_square_of_the_scale_is_noticed(monkeypatch):
    matching, _ = NoisyMatching.simulate(4, 0.5, seed=4)
    correct = evidence_by_listing(matching)
    weights = matching.log_weights * 0.5
    monkeypatch.setattr(NoisyMatching, "log_weights", property(lambda self: weights))
    assert abs(float(matching.log_evidence()) - correct) > 0.1


def test_posterior_is_that_of_all_permutations():
    matching, truth = NoisyMatching.simulate(5, 0.7, seed=3, dim=1, batch_shape=(3,))
    posterior = matching.posterior()
    listed = all_permutations(5).unsqueeze(1)
    means = matching.centres.squeeze(-1).expand(120, 3, 5).gather(-1, listed.expand(120, 3, 5))
    log_likelihood = Normal(means, 0.7).log_prob(matching.observations.squeeze(-1)).sum(-1)
    expected = log_likelihood.softmax(0)
    torch.testing.assert_close(posterior.log_prob(listed).exp(), expected, rtol=0, atol=1e-12)
    assert truth.shape == (3, 5) and bool(permutations.check(truth).all())


def test_posterior_is_calibrated(limit):
    # Over data drawn from the model, the mean probability of the true pairs is that of pairs of equal probability.
    matching, truth = NoisyMatching.simulate(5, 0.5, seed=0, batch_shape=(4000,))
    marginals = matching.posterior().marginals
    happened = permutation_matrix(truth, FLOAT64)
    sums = ((happened - marginals) * marginals).sum((-1, -2))
    assert abs(float(sums.mean() / (sums.std() / math.sqrt(len(sums))))) < limit()
    halved = (0.5 * matching.log_weights).detach()
    wrong = GibbsPermutation(halved).marginals
    sums = ((happened - wrong) * wrong).sum((-1, -2))
    assert abs(float(sums.mean() / (sums.std() / math.sqrt(len(sums))))) > limit()


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("kind", RELAXATIONS)
def test_relaxed_model_is_the_model_at_permutations(kind, linear):
    matching, _ = NoisyMatching.simulate(4, 0.5, seed=0, batch_shape=(2,))
    relaxation = kind((2, 4), dtype=FLOAT64)
    drawn = permutation_matrix(all_permutations(4)[[3, 17]], FLOAT64)
    relaxation.matrix = lambda value: drawn
    trace = pyro.poutine.trace(pyro.poutine.block(matching.relaxed_model, hide=[relaxation.site]))
    observed = trace.get_trace(relaxation, linear).nodes["observations"]
    log_likelihood = observed["fn"].log_prob(observed["value"])
    torch.testing.assert_close(log_likelihood, (drawn * matching.log_weights).sum(), rtol=0, atol=1e-10)


@functools.cache
def trained(kind, problems=8, steps=200):
    """Return relaxations of several problems of six, their marginals, those of the posterior, and the truth."""
    matching, truth = NoisyMatching.simulate(6, 0.25, seed=0, batch_shape=(problems,))
    pyro.clear_param_store()
    relaxation = kind((problems, 6), dtype=FLOAT64)
    optimizer = torch.optim.Adam(relaxation.parameters(), 0.1)
    bound = TraceMeanField_ELBO(num_particles=4, vectorize_particles=True, max_plate_nesting=0)
    with global_stream(new_generator(0)):
        for _ in range(steps):
            loss = bound.differentiable_loss(matching.relaxed_model, relaxation, relaxation)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    drawn = permutation_matrix(relaxation.sample_permutations(2000, seed=0), FLOAT64).mean(0)
    return relaxation, drawn, matching.posterior().marginals, permutation_matrix(truth, FLOAT64)


def squared_distance(one, other):
    return (one - other).square().sum((-1, -2)) / one.shape[-1]


def test_rounding_comes_near_the_exact_posterior_of_six():
    _, drawn, exact, truth = trained(RoundingRelaxation)
    uniform = torch.full_like(exact, 1 / 6)
    certain = (drawn == drawn.amax(-1, keepdim=True)).double()
    assert float(squared_distance(drawn, exact).mean()) < 0.1 * float(squared_distance(uniform, exact).mean())
    # It knows what it does not know: closer to the posterior than its own best guess held for certain.
    assert float(squared_distance(drawn, exact).mean()) < float(squared_distance(certain, exact).mean())
    assert float((drawn * truth).sum() / truth.sum()) > 0.8


@pytest.mark.calibration
@pytest.mark.parametrize("kind", RELAXATIONS)
def test_training_finds_most_pairs(kind):
    relaxation, drawn, _, truth = trained(kind)
    assert float((drawn * truth).sum() / truth.sum()) > 0.7
    untrained = kind((8, 6), dtype=FLOAT64).sample_permutations(2000, seed=0)
    by_chance = permutation_matrix(untrained, FLOAT64).mean(0)
    assert float((by_chance * truth).sum() / truth.sum()) < 0.4
    value = relaxation.posterior().sample((3,))
    matrix = relaxation.matrix(value)
    assert matrix.shape == (3, 8, 6, 6)
    if kind is StickBreakingRelaxation:
        assert bool(doubly_stochastic.check(matrix).all())


def test_mutation_a_likelihood_of_the_transposed_matrix_finds_less(monkeypatch):
    original = RoundingRelaxation.matrix

    class Transposed(RoundingRelaxation):
        def matrix(self, value):
            return original(self, value).mT

    _, drawn, _, truth = trained(Transposed)
    assert float((drawn * truth).sum() / truth.sum()) < 0.7


def test_bound_of_sticks_is_that_of_the_matrices():
    # The logits stand for matrices: log ratios are those of densities on the polytope, whose determinants cancel.
    relaxation = StickBreakingRelaxation((5,), temperature=0.8, dtype=FLOAT64)
    with torch.no_grad():
        relaxation.loc += 0.3
        relaxation.log_scale -= 0.2
    with global_stream(new_generator(0)):
        logits = relaxation.posterior().sample((20,))
    of_logits = relaxation.posterior().log_prob(logits) - relaxation.prior().log_prob(logits)
    matrices = relaxation.matrix(logits)
    prior = StickBreakingPermutation(relaxation.prior_loc, torch.ones(4, 4, dtype=FLOAT64), 0.8)
    of_matrices = relaxation.distribution().log_prob(matrices) - prior.log_prob(matrices)
    torch.testing.assert_close(of_logits, of_matrices, rtol=0, atol=1e-8)


def test_noise_of_gumbel_sinkhorn_has_the_stated_divergence(limit):
    relaxation = GumbelSinkhornRelaxation((4,), temperature=0.7, prior_temperature=0.5, dtype=FLOAT64)
    with torch.no_grad():
        relaxation.log_scores += torch.eye(4, dtype=FLOAT64)
    with global_stream(new_generator(0)):
        noise = relaxation.posterior().sample((40_000,))
    ratio = (relaxation.posterior().log_prob(noise) - relaxation.prior().log_prob(noise)).detach()
    z = (ratio.mean() - relaxation.distribution().noise_divergence(0.5).detach()) / (
        ratio.std() / math.sqrt(len(ratio))
    )
    assert abs(float(z)) < limit()


def test_plain_svi_trains_a_relaxation():
    matching, _ = NoisyMatching.simulate(4, 0.2, seed=0)
    relaxation = RoundingRelaxation((4,), temperature=0.5, dtype=FLOAT64)
    pyro.clear_param_store()
    svi = pyro.infer.SVI(matching.relaxed_model, relaxation, pyro.optim.Adam({"lr": 0.1}), Trace_ELBO())
    with global_stream(new_generator(0)):
        losses = [svi.step(relaxation) for _ in range(150)]
    assert sum(losses[-20:]) < sum(losses[:20])


def test_a_model_is_of_one_problem_and_a_relaxation_of_as_many():
    matching, _ = NoisyMatching.simulate(4, 0.5, seed=0, batch_shape=(2,))
    with pytest.raises(ShapeError, match=r"\(2, 4, 2\); model is of one problem"):
        matching.model()
    for shape in ((4,), (3, 4), (2, 5), (1, 2, 4)):
        for kind in RELAXATIONS:
            with pytest.raises(ShapeError, match=r"the centres of \(2, 4\)"):
                matching.relaxed_model(kind(shape))


def test_data_of_any_library():
    centres = [[0, 0], [1, 0], [0, 3]]
    observations = np.array([[0.1, 0.0], [0.0, 2.9], [1.1, 0.1]])
    matching = NoisyMatching(centres, observations, 0.3)
    assert matching.posterior().mode.tolist() == [0, 2, 1]
    as_tensors = NoisyMatching(torch.tensor(centres, dtype=FLOAT64), torch.as_tensor(observations), 0.3)
    assert abs(float(matching.log_evidence() - as_tensors.log_evidence())) < 1e-12
    with pytest.raises(DataError, match="centres"):
        NoisyMatching([["a", "b"]], observations, 0.3)


def test_bad_input_is_refused():
    table = torch.zeros(4, 2)
    with pytest.raises(ShapeError, match=r"\(4, 2\) and observations \(3, 2\)"):
        NoisyMatching(table, torch.zeros(3, 2), 1.0)
    with pytest.raises(DataError, match="1 of 8 values of observations"):
        NoisyMatching(
            table, table.index_fill(0, torch.tensor([1]), 0).masked_fill(torch.arange(8).view(4, 2) == 3, math.nan), 1.0
        )
    for scale in (0, -1, math.inf):
        with pytest.raises(SettingsError, match="scale"):
            NoisyMatching(table, table, scale)
    with pytest.raises(SettingsError, match="2,097,152 sets"):
        NoisyMatching.simulate(21, 0.1, seed=0)[0].log_evidence()
    for kind in RELAXATIONS:
        with pytest.raises(SettingsError, match="temperature"):
            kind((4,), temperature=0)
        for shape in ((), 4):
            with pytest.raises(SettingsError, match="shape"):
                kind(shape)
        with pytest.raises(SettingsError, match=r"shape\[-1\] must be at least 2"):
            kind((3, 1))
    with pytest.raises(SettingsError, match="the second must be greater"):
        RoundingRelaxation((4,), scales=(0.5, 0.5))
    with pytest.raises(SettingsError, match="scales"):
        RoundingRelaxation((4,), scales=(0.1, 0.5, 0.9))
