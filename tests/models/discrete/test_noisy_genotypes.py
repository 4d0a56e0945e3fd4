"""Genotype matrices against lists of all of them, sums with fractions, and integrals over error rates."""

import itertools
import math
from fractions import Fraction

import pyro.distributions as dist
import pytest
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete import _genotypes as nested_columns
from bayeskit.models.discrete._genotypes import (
    GenotypeModel,
    MutationTree,
    NoisyGenotypes,
    conflict_free_matrices,
    conflicting_pairs,
    has_conflict,
    num_conflict_free,
    plot_genotypes,
)

CONFLICT = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
NAN = float("nan")
COUNTS = {(3, 2): 58, (3, 3): 398, (4, 2): 196, (4, 3): 2116, (5, 2): 634, (1, 4): 16, (2, 5): 1024}


def all_matrices(cells, mutations):
    bits = torch.arange(2 ** (cells * mutations)).unsqueeze(1) >> torch.arange(cells * mutations)
    return (bits & 1).view(-1, cells, mutations)


def random_observed(cells, mutations, seed):
    generator = torch.Generator().manual_seed(seed)
    observed = (torch.rand(cells, mutations, generator=generator, dtype=torch.float64) < 0.45).double()
    observed[0, -1] = NAN
    return observed


def codes(genotypes):
    flat = genotypes.long().flatten(-2)
    return (flat * 2 ** torch.arange(flat.shape[-1])).sum(-1)


def largest_z(draws, posterior):
    """Return the largest |z| of the frequencies of matrices with at least ten expected draws, and their number."""
    often = posterior.probabilities * len(draws) >= 10
    exact, places = posterior.probabilities[often], codes(posterior.genotypes[often])
    found = torch.stack([(codes(draws) == place).double().mean() for place in places])
    return float(((found - exact) / (exact * (1 - exact) / len(draws)).sqrt()).abs().max()), int(often.sum())


# --- The rule, the counts and the list


@pytest.mark.parametrize(("shape", "count"), COUNTS.items())
def test_numbers_of_conflict_free_matrices(shape, count):
    assert int((~has_conflict(all_matrices(*shape))).sum()) == count
    assert num_conflict_free(*shape) == count
    listed = conflict_free_matrices(*shape)
    assert len(codes(listed).unique()) == len(listed) == count
    assert not bool(has_conflict(listed).any())


def test_the_rule_is_that_columns_are_nested_or_disjoint():
    for matrix in all_matrices(3, 3):
        columns = [set(column.nonzero().flatten().tolist()) for column in matrix.T]
        nested = all(not (a & b) or a <= b or b <= a for a, b in itertools.combinations(columns, 2))
        assert bool(has_conflict(matrix)) is not nested


def test_mutation_four_gametes_would_count_differently():
    matrices = all_matrices(4, 2)
    without_any = ((1 - matrices).prod(-1) == 1).any(-1)
    assert int((~(has_conflict(matrices) & without_any)).sum()) != COUNTS[4, 2]


def test_conflicts_are_batched():
    matrices = all_matrices(3, 2).view(8, 8, 3, 2)
    pairs = conflicting_pairs(matrices)
    assert pairs.shape == (8, 8, 2, 2)
    assert torch.equal(pairs[..., 0, 1], has_conflict(matrices))
    assert not bool(pairs.diagonal(dim1=-2, dim2=-1).any())
    assert torch.equal(has_conflict(matrices.bool()), has_conflict(matrices.double()))


def test_large_counts_agree_with_the_recursion_over_sets():
    ones = torch.zeros(6, 2**7, dtype=torch.float64)
    total = float(nested_columns.log_sum_over_columns(ones).exp())
    assert abs(total / num_conflict_free(7, 6) - 1) < 1e-12


# --- The posterior


def exact_with_fractions(observed, positive, negative):
    """Return evidence and weights of all matrices, without a rounding error."""
    weights = {}
    for matrix in all_matrices(*observed.shape):
        if bool(has_conflict(matrix)):
            continue
        weight = Fraction(1)
        for true, read in zip(matrix.flatten().tolist(), observed.flatten().tolist(), strict=True):
            if not math.isnan(read):
                rate = negative if true else positive
                weight *= rate if read != true else 1 - rate
        weights[tuple(matrix.flatten().tolist())] = weight
    return sum(weights.values()) / len(weights), weights


def test_two_ways_out_of_a_conflict_are_equally_probable():
    model = NoisyGenotypes(CONFLICT, 0.01, 0.2)
    evidence, weights = exact_with_fractions(CONFLICT, Fraction(1, 100), Fraction(1, 5))
    posterior = model.enumerate()
    assert abs(float(posterior.probabilities[0]) - 0.393501) < 5e-7
    assert abs(float(posterior.probabilities[0] - posterior.probabilities[1])) < 1e-14
    assert float(posterior.probabilities[2]) < 0.1
    best = {tuple(matrix.int().flatten().tolist()) for matrix in posterior.genotypes[:2]}
    assert best == {(1, 1, 0, 1, 1, 1), (1, 0, 1, 1, 1, 1)}
    assert abs(float(posterior.log_evidence) - math.log(evidence)) < 1e-12
    assert abs(float(model.log_evidence()) - math.log(evidence)) < 1e-12
    for matrix, probability in zip(posterior.genotypes, posterior.probabilities.tolist(), strict=True):
        exact = weights[tuple(matrix.int().flatten().tolist())] / sum(weights.values())
        assert abs(probability - float(exact)) < 1e-14


def worst_error(observed, positive, negative):
    """Return by how much the recursion differs from the list, in evidence and in probabilities of entries."""
    model = NoisyGenotypes(observed, positive, negative)
    posterior = model.enumerate()
    marginals = (posterior.probabilities[:, None, None] * posterior.genotypes).sum(0)
    return max(
        float((model.log_evidence() - posterior.log_evidence).abs()),
        float((model.marginals() - marginals).abs().max()),
    )


CASES = [(4, 3, 0.01, 0.2), (3, 4, 0.1, 0.3), (5, 3, 0.3, 0.01), (6, 2, 0.0, 0.2), (4, 4, 0.05, 0.0), (2, 2, 0.6, 0.7)]


@pytest.mark.parametrize(("cells", "mutations", "positive", "negative"), CASES)
def test_the_recursion_over_sets_equals_the_list(cells, mutations, positive, negative):
    observed = random_observed(cells, mutations, seed=cells)
    assert worst_error(observed, positive, negative) < 1e-11


def test_mutation_a_forgotten_part_is_noticed(monkeypatch):
    parts = nested_columns._proper_parts
    nested_columns._levels.cache_clear()
    monkeypatch.setattr(nested_columns, "_proper_parts", lambda cells, low: parts(cells, low)[1:])
    assert worst_error(random_observed(4, 3, seed=4), 0.01, 0.2) > 1e-3
    nested_columns._levels.cache_clear()


def test_weights_of_any_kind_are_summed():
    generator = torch.Generator().manual_seed(1)
    weights = 4 * torch.randn(2, 3, 2**4, generator=generator, dtype=torch.float64)
    matrices = conflict_free_matrices(4, 3)
    column = (matrices * 2 ** torch.arange(4).unsqueeze(1)).sum(1)
    listed = sum(weights[:, j, column[:, j]] for j in range(3)).logsumexp(-1)
    torch.testing.assert_close(nested_columns.log_sum_over_columns(weights), listed, rtol=0, atol=1e-11)


def test_rates_are_batched_and_differentiable():
    observed = random_observed(4, 3, seed=0)
    positive = torch.tensor([0.01, 0.1, 0.2], dtype=torch.float64, requires_grad=True)
    model = NoisyGenotypes(observed, positive, 0.15)
    single = [NoisyGenotypes(observed, rate, 0.15).log_evidence() for rate in positive.tolist()]
    torch.testing.assert_close(model.log_evidence().detach(), torch.stack(single), rtol=0, atol=1e-12)
    assert model.marginals().shape == (3, 4, 3)
    (gradient,) = torch.autograd.grad(model.log_evidence().sum(), positive)
    terms = NoisyGenotypes(observed, positive, 0.15).log_likelihood(conflict_free_matrices(4, 3).unsqueeze(1))
    (listed,) = torch.autograd.grad(terms.logsumexp(0).sum(), positive)
    torch.testing.assert_close(gradient, listed, rtol=0, atol=1e-10)


def test_missing_entries_say_nothing():
    nothing = torch.full((3, 2), NAN, dtype=torch.float64)
    model = NoisyGenotypes(nothing, 0.1, 0.2)
    assert abs(float(model.log_evidence())) < 1e-12
    torch.testing.assert_close(
        model.marginals(), conflict_free_matrices(3, 2).double().mean(0), rtol=0, atol=1e-12, check_dtype=False
    )


def test_without_errors_the_observed_matrix_is_certain():
    observed = torch.tensor([[1, 0], [1, 1], [0, 0]])
    model = NoisyGenotypes(observed.double(), 0.0, 0.0)
    assert torch.equal(model.enumerate().genotypes[0], observed == 1)
    assert abs(float(model.log_evidence()) + math.log(58)) < 1e-12
    impossible = NoisyGenotypes(CONFLICT, 0.0, 0.0)
    assert float(impossible.log_evidence()) == -math.inf
    for refused in (impossible.enumerate, impossible.marginals, lambda: impossible.sample(3)):
        with pytest.raises(DataError, match="rates above zero"):
            refused()


@pytest.mark.parametrize("rate", [1e-4, 1e-7, 1e-20])
def test_small_rates_in_single_precision(rate):
    observed = random_observed(7, 6, seed=2).nan_to_num(1.0)
    single, double = NoisyGenotypes(observed.bool(), rate, rate), NoisyGenotypes(observed, rate, rate)
    assert single.log_evidence().dtype == single.marginals().dtype == torch.float32
    exact = float(double.log_evidence())
    assert abs(float(single.log_evidence()) - exact) < 2 * torch.finfo(torch.float32).eps * abs(exact)
    assert float((single.marginals() - double.marginals()).abs().max()) < 1e-6
    few = observed[:4, :4]
    assert worst_error(few, rate, rate) < 1e-10  # against logarithms of listed probabilities
    draws = NoisyGenotypes(few.bool(), rate, rate).sample(20)
    assert float(NoisyGenotypes(few, rate, rate).log_likelihood(draws).amin()) > -math.inf


def test_what_is_too_improbable_is_told_from_the_impossible():
    model = NoisyGenotypes(CONFLICT, 1e-300, 1e-300)
    assert abs(float(model.enumerate().log_evidence) + 300 * math.log(10) - math.log(6 / 58)) < 1e-9
    for refused in (model.log_evidence, model.marginals, lambda: model.sample(3)):
        with pytest.raises(SettingsError, match="below the range.*not zero"):
            refused()


def test_the_gradient_by_a_rate_of_zero_is_undefined_and_those_above_are_exact():
    rate = torch.tensor([0.0, 1e-9], dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(NoisyGenotypes(CONFLICT, rate, 0.2).log_evidence().sum(), rate)
    (listed,) = torch.autograd.grad(NoisyGenotypes(CONFLICT, rate[1], 0.2).enumerate().log_evidence, rate)
    assert bool(gradient[0].isnan())
    assert abs(float(gradient[1] / listed[1]) - 1) < 1e-10


# --- Draws


def test_draws_have_the_exact_posterior(limit):
    model = NoisyGenotypes(random_observed(3, 3, seed=3), 0.1, 0.3)
    draws = model.sample(20_000, seed=1)
    assert draws.shape == (20_000, 3, 3) and not bool(has_conflict(draws).any())
    z, comparisons = largest_z(draws, model.enumerate())
    assert comparisons > 50 and z < limit(comparisons)
    assert torch.equal(draws[:100], model.sample(20_000, seed=1)[:100])


def swept(model, sweeper, sweeps=1, chains=20_000):
    """Return exact draws after sweeps, which should have the same distribution."""
    generator = torch.Generator().manual_seed(5)
    draws = model.sample(chains, seed=2)
    for _ in range(sweeps):
        draws = sweeper.gibbs_sweep(draws, generator=generator)
    return draws


def test_sweeps_keep_the_posterior(limit):
    model = NoisyGenotypes(random_observed(3, 3, seed=3), 0.1, 0.3)
    z, comparisons = largest_z(swept(model, model), model.enumerate())
    assert z < limit(comparisons)


def test_mutation_sweeps_with_exchanged_rates_are_noticed(limit):
    model = NoisyGenotypes(random_observed(3, 3, seed=3), 0.1, 0.3)
    z, comparisons = largest_z(swept(model, NoisyGenotypes(model.observed, 0.3, 0.1)), model.enumerate())
    assert z > 2 * limit(comparisons)


def test_sweeps_find_the_posterior_from_nothing(limit):
    model = NoisyGenotypes(random_observed(8, 4, seed=1), 0.1, 0.3)
    generator = torch.Generator().manual_seed(0)
    present = torch.zeros(1000, 8, 4)
    for _ in range(30):
        present = model.gibbs_sweep(present, generator=generator)
    exact = model.marginals()
    z = (present.double().mean(0) - exact) / (exact * (1 - exact) / len(present)).sqrt()
    assert float(z.abs().max()) < limit(z.numel())


@pytest.mark.parametrize("rates", [(0.0, 0.3), (0.3, 0.0), (torch.tensor([0.1, 0.0]), 0.3)])
def test_sweeps_without_one_kind_of_error_are_refused(rates):
    model = NoisyGenotypes(random_observed(6, 4, seed=4), *rates)
    with pytest.raises(SettingsError, match="above zero.*use sample"):
        model.gibbs_sweep(torch.zeros(5, 2, 6, 4), generator=torch.Generator())


# --- Trees


def test_a_tree_has_its_matrix_back():
    for matrix in conflict_free_matrices(4, 3):
        tree = MutationTree.from_genotypes(matrix)
        assert torch.equal(tree.to_genotypes(), matrix)
        assert all(parent < node for node, parent in enumerate(tree.parents))
        assert all(tree.mutations[1:])  # only the ancestor has no mutation of its own
        assert len(tree.to_text().splitlines()) == len(tree.parents)


def test_clones_of_a_tree():
    genotypes = torch.tensor([[1, 1, 0, 0, 1], [1, 0, 1, 0, 1], [1, 1, 0, 0, 1], [0, 0, 0, 0, 0]])
    tree = MutationTree.from_genotypes(genotypes)
    assert tree.parents == (-1, 0, 1, 1)
    assert tree.mutations == ((), (0, 4), (1,), (2,))
    assert tree.cells == ((3,), (), (0, 2), (1,))
    assert tree.absent == (3,)
    with pytest.raises(DataError, match="no tree fits"):
        MutationTree.from_genotypes(CONFLICT)


def test_a_long_chain_of_clones_has_a_text():
    nodes = range(1, 3000)
    tree = MutationTree(
        (-1, *range(2999)), ((), *((node,) for node in nodes)), ((0,), *((node,) for node in nodes)), ()
    )
    assert tree.to_text().splitlines()[-1] == "  " * 2999 + "mutations 2999: cells 2999"


# --- Unknown error rates


def log_beta(a, b):
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def exact_log_evidence(observed, positive, negative):
    """Return the log evidence with Beta priors of the rates, which integrate out for each matrix."""
    terms = []
    for matrix in conflict_free_matrices(*observed.shape):
        wrong_ones = int(((observed == 1) & ~matrix).sum())
        right_zeros = int(((observed == 0) & ~matrix).sum())
        wrong_zeros = int(((observed == 0) & matrix).sum())
        right_ones = int(((observed == 1) & matrix).sum())
        terms.append(
            log_beta(positive[0] + wrong_ones, positive[1] + right_zeros)
            + log_beta(negative[0] + wrong_zeros, negative[1] + right_ones)
            - log_beta(*positive)
            - log_beta(*negative)
        )
    return float(torch.tensor(terms, dtype=torch.float64).logsumexp(0)) - math.log(len(terms))


def test_the_evidence_with_unknown_rates_is_that_of_beta_integrals():
    observed = torch.tensor([[1, 0], [0, 1], [1, 1], [1, NAN]], dtype=torch.float64)
    target = bk.Target.from_pyro(GenotypeModel(observed))
    # The trapezoidal rule in the logit of each rate converges faster than any power of its step.
    line = torch.linspace(-30, 10, 161, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    log_density = torch.cat([target.log_density(chunk) for chunk in grid.split(10_000)])
    found = float(log_density.logsumexp(0)) + 2 * math.log(float(line[1] - line[0]))
    assert abs(found - exact_log_evidence(observed, (1.0, 20.0), (2.0, 6.0))) < 1e-9


def test_the_target_is_the_exact_sum():
    observed = random_observed(4, 3, seed=2)
    target = bk.Target.from_pyro(GenotypeModel(observed))
    position = torch.randn(6, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rates = target.constrain(position)
    exact = NoisyGenotypes(observed, rates["false_positive_rate"], rates["false_negative_rate"]).log_evidence()
    torch.testing.assert_close(target.log_likelihood(position), exact, rtol=0, atol=1e-12)
    _, gradient = target.value_and_grad(position)
    step = 1e-5 * torch.eye(2, dtype=torch.float64)
    slope = (target.log_density(position[:, None] + step) - target.log_density(position[:, None] - step)) / 2e-5
    torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-6)


@pytest.mark.calibration
def test_the_target_far_out_in_single_precision():
    observed = random_observed(8, 5, seed=2).nan_to_num(1.0)
    values, gradients = zip(
        *(
            bk.Target.from_pyro(GenotypeModel(matrix)).value_and_grad(torch.full((1, 2), -30.0, dtype=matrix.dtype))
            for matrix in (observed.float(), observed)
        ),
        strict=True,
    )
    assert gradients[0].dtype == torch.float32
    for single, double in (values, gradients):
        assert float((single / double - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("prior", [dist.Uniform(0.1, 0.4), dist.Kumaraswamy(1.0, 3.0)])
def test_priors_within_the_unit_interval_will_do(prior):
    target = bk.Target.from_pyro(GenotypeModel(CONFLICT.float(), prior))
    assert bool(target.log_density(torch.tensor([[-3.0, -1.0], [3.0, 0.0]])).isfinite().all())


@pytest.mark.parametrize(
    "prior", [dist.Normal(0.0, 1.0), dist.Gamma(1.0, 1.0), dist.Uniform(0.0, 2.0), dist.Beta(torch.ones(2), 1.0), 0.1]
)
def test_priors_beyond_the_unit_interval_are_refused(prior):
    with pytest.raises(SettingsError, match="between 0 and 1"):
        GenotypeModel(CONFLICT, false_negative_prior=prior)


# --- Plots and bad input


def test_the_plot_has_a_mark_for_each_entry_that_was_read():
    observed = random_observed(4, 3, seed=0)
    axes = plot_genotypes(torch.rand(4, 3), observed, Figure().subplots())
    ones, zeros = (len(marks.get_offsets()) for marks in axes.collections)
    assert (ones, zeros) == (int((observed == 1).sum()), int((observed == 0).sum()))
    with pytest.raises(ShapeError, match="cells, mutations"):
        plot_genotypes(torch.rand(4, 2), observed, Figure().subplots())


GOOD = NoisyGenotypes(CONFLICT, 0.01, 0.2)
PAIR = NoisyGenotypes(CONFLICT, torch.tensor([0.1, 0.2]), 0.2)
LARGE = NoisyGenotypes(torch.zeros(8, 8), 0.01, 0.2)
LARGER = NoisyGenotypes(torch.zeros(11, 3), 0.01, 0.2)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: NoisyGenotypes(torch.zeros(3), 0.1, 0.1), ShapeError, "give \\(cells, mutations\\)"),
        (lambda: NoisyGenotypes(torch.zeros(3, 0), 0.1, 0.1), ShapeError, "at least one of each"),
        (lambda: NoisyGenotypes(torch.full((3, 2), 2.0), 0.1, 0.1), DataError, "cell 0 and mutation 0 is 2"),
        (lambda: NoisyGenotypes(CONFLICT, 1.0, 0.1), SettingsError, "false_positive_rate"),
        (lambda: NoisyGenotypes(CONFLICT, 0.1, NAN), SettingsError, "false_negative_rate"),
        (lambda: NoisyGenotypes(CONFLICT, torch.zeros(2), torch.zeros(3)), ShapeError, "same"),
        (lambda: NoisyGenotypes(CONFLICT, "a", 0.1), SettingsError, "false_positive_rate must be a number"),
        (lambda: NoisyGenotypes(CONFLICT, 0.1, None), SettingsError, "false_negative_rate must be a number"),
        (lambda: PAIR.log_likelihood(torch.zeros(5, 3, 2)), ShapeError, "does not broadcast"),
        (lambda: PAIR.gibbs_sweep(torch.zeros(5, 3, 2), generator=None), ShapeError, "does not broadcast"),
        (lambda: PAIR.gibbs_sweep(torch.zeros(3, 2), generator=None), ShapeError, "each pair of rates"),
        (lambda: GOOD.log_likelihood(torch.zeros(2, 2)), ShapeError, "3, 2"),
        (lambda: GOOD.log_likelihood(CONFLICT * 3), DataError, "other than 0 and 1"),
        (lambda: GOOD.gibbs_sweep(CONFLICT, generator=torch.Generator()), DataError, "start from zeros"),
        (lambda: GOOD.sample(0), SettingsError, "num_samples"),
        (lambda: NoisyGenotypes(CONFLICT, torch.zeros(2), 0.1).sample(3), SettingsError, "one pair of rates"),
        (lambda: NoisyGenotypes(CONFLICT, torch.zeros(2), 0.1).enumerate(), SettingsError, "one pair of rates"),
        (lambda: LARGE.enumerate(), SettingsError, "there are 15411841765756"),
        (lambda: conflict_free_matrices(3, 2, limit=57), SettingsError, "there are 58"),
        (lambda: LARGER.log_evidence(), SettingsError, "at most 10 cells.*there are 11 and 3; use"),
        (lambda: NoisyGenotypes(torch.zeros(100, 50), 0.1, 0.1).log_evidence(), SettingsError, "50; use fewer"),
        (lambda: conflict_free_matrices(400, 3), SettingsError, "more than 2..400"),
        (lambda: LARGER.marginals(), SettingsError, "gibbs_sweep"),
        (lambda: LARGER.sample(2), SettingsError, "at most 10 cells"),
        (
            lambda: NoisyGenotypes(torch.zeros(2, 13), 0.1, 0.1).gibbs_sweep(None, generator=None),
            SettingsError,
            "2..13",
        ),
        (lambda: GenotypeModel(torch.zeros(11, 3)), SettingsError, "at most 10 cells"),
        (lambda: has_conflict(torch.zeros(3)), ShapeError, "cells, mutations"),
        (lambda: num_conflict_free(0, 2), SettingsError, "num_cells"),
        (lambda: MutationTree.from_genotypes(torch.zeros(2, 3, 2)), ShapeError, "one matrix"),
    ],
)
def test_bad_input_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def is_linear(genotypes):
    """Say of each matrix whether the cells of any two mutations are nested, pair by pair."""
    found = torch.ones(len(genotypes), dtype=torch.bool)
    for first in range(genotypes.shape[-1]):
        for second in range(first):
            one, other = genotypes[..., first], genotypes[..., second]
            found &= (one & ~other).any(-1).logical_not() | (other & ~one).any(-1).logical_not()
    return found


@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 3), (4, 3), (3, 4), (5, 3)])
def test_linear_probability_is_that_of_the_list(shape):
    observed = torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(0)).double()
    observed[0, 0] = torch.nan
    rates = torch.tensor([0.02, 0.1, 0.0], dtype=torch.float64), torch.tensor([0.3, 0.2, 0.4], dtype=torch.float64)
    found = NoisyGenotypes(observed, *rates).linear_probability()
    for probability, positive, negative in zip(found, *rates, strict=True):
        listed = NoisyGenotypes(observed, positive, negative).enumerate()
        exact = listed.probabilities[is_linear(listed.genotypes)].sum()
        assert abs(float(probability - exact)) < 1e-12


def test_conflict_free_probability_is_that_of_the_list_of_all_matrices():
    observed = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, torch.nan]], dtype=torch.float64)
    model = NoisyGenotypes(observed, 0.05, 0.2)
    every = torch.cartesian_prod(*[torch.tensor([False, True])] * 9).reshape(-1, 3, 3)
    weights = model.log_likelihood(every).softmax(0)
    assert abs(float(model.conflict_free_probability() - weights[~has_conflict(every)].sum())) < 1e-12


def test_linear_probability_without_a_possible_matrix_is_refused():
    observed = torch.tensor([[1, 0], [0, 1], [1, 1]], dtype=torch.float64)
    with pytest.raises(DataError, match="probability zero"):
        NoisyGenotypes(observed, 0.0, 0.0).linear_probability()
