"""Chains over topologies, compiled and as array operations, against the exact posterior of few taxa, move by move."""

import functools
import math

import numpy as np
import pytest
import scipy.special
import torch
from pyro.distributions import Dirichlet

from bayeskit._core.libraries import load_library
from bayeskit._core.randomness import new_generator
from bayeskit.errors import CompilationWarning
from bayeskit.models.phylogenetics import (
    GTR,
    JC69,
    K80,
    Alignment,
    AminoAcidModel,
    ForestLikelihood,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    Mk,
    OrderedMk,
    Partition,
    PartitionedForestLikelihood,
    VariableSites,
    all_topologies,
    primates,
)
from bayeskit.models.phylogenetics._parameters import PartitionParameters
from bayeskit.models.phylogenetics._topology_constraints import log_number_of_topologies
from bayeskit.models.phylogenetics._topology_moves import _chains as module
from bayeskit.models.phylogenetics._topology_moves._chains import (
    CompiledChains,
    LengthPrior,
    Moves,
    Process,
    topologies_of,
)
from bayeskit.models.phylogenetics._topology_moves._reference import TreeReference
from bayeskit.models.phylogenetics._topology_moves._tensor_chains import TensorChains, tree_chains
from bayeskit.models.phylogenetics._variable_sites import sites_left_out

KINDS = ("length", "exchange", "likelihood_regraft", "parsimony_regraft", "near_regraft", "reconnection", "scale")
#: Moves after which rounding may have added up.
MANY = {"compiled": 2000, "tensors": 150}
ENGINES = [pytest.param("compiled", marks=pytest.mark.compiler), "tensors"]
ALIGNMENT = Alignment.from_sequences({"A": "ACGTA", "B": "ACGCA", "C": "AGTCA", "D": "AGTCT", "E": "ACTCT"})
#: Sites of which two copies leave several topologies probable.
SHORT = ALIGNMENT.select_sites([1, 4])


def exact_log_masses(alignment, rate=10.0):
    """Log evidence of each topology under JC69 with exponential branch lengths.

    Integrated over its length, an edge is a Markov kernel on the states of all N sites together, so that one pruning
    over 4**N states gives the evidence. Its entries are polynomials of degree N in ``exp(-4 t / 3)``, for which the
    quadrature is exact.
    """
    topologies, number = all_topologies(alignment.taxa), alignment.num_sites
    roots, weights = scipy.special.roots_jacobi((number + 2) // 2, 0.0, 0.75 * rate - 1)
    kernel = sum(
        weight * functools.reduce(np.kron, [kept * np.eye(4) + (1 - kept) / 4] * number)
        for kept, weight in zip((1 + roots) / 2, weights / weights.sum(), strict=True)
    )
    bases = (alignment.patterns[:, alignment.site_patterns, None].numpy() >> np.arange(4)) & 1
    tips = np.array([functools.reduce(np.kron, row) for row in bases]) @ kernel
    every = np.arange(len(topologies))
    above = np.repeat(tips[:, None], len(topologies), axis=1)  # (nodes, topologies, states), at the edges' upper ends
    for left, right in topologies.children.transpose(1, 2, 0):
        joined = above[left, every] * above[right, every]
        above = np.concatenate([above, (joined @ kernel)[None]])
    return topologies, torch.from_numpy(np.log((joined * tips[0]).mean(1)))


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


def chains_of(engine, *arguments, **settings):
    """Return chains of one kind, or, with an engine that is a class, of this class."""
    if engine != "compiled":
        return (TensorChains if engine == "tensors" else engine)(*arguments, **settings)
    library = module.compiled_code(arguments[2], settings.get("dtype", torch.float64))
    return CompiledChains(library, *arguments, **settings)


def made(engine, alignment, count, substitution=None, site_rates=None, sets=1, **settings):
    """Return chains and their process; of several sets, each has its own lengths in a part that repeats the sites."""
    substitution = JC69() if substitution is None else substitution
    like = torch.zeros((), dtype=torch.float64)
    frequencies, matrix = substitution.frequencies(like), substitution.rate_matrix(like)
    states = len(frequencies)
    prior = settings.pop("prior", LengthPrior())
    data = np.tile(alignment.patterns.numpy(), (1, sets)), np.tile(alignment.weights.numpy(), sets)
    of_parts = {"parts": [alignment.num_patterns] * sets, "part_sets": range(sets)}
    chains = chains_of(engine, *data, states, count, prior, **of_parts, **settings)
    categories = None if site_rates is None else site_rates.categories(like)
    process = Process.of(matrix.expand(count, -1, -1), frequencies.expand(count, -1), categories)
    return chains, Process.joined([process] * sets)


def shares(engine, alignment, kind, count=150, rounds=20, seed=1, reference=None, beta=0.5, sets=1):
    """Relative frequencies of all topologies in each chain, `(chains, topologies)`, and the moves accepted."""
    if engine != "compiled":  # the time is that of the steps, for any number of chains without a reference
        count, rounds = count if reference else 2 * count, rounds // 4
    chains, process = made(engine, alignment, count, sets=sets)
    generator = new_generator(seed, stream=f"moves {kind}")
    chosen = dict.fromkeys(KINDS, 0.0) | {"length": 1.0, kind: 1.0}
    chosen.setdefault("independent", 0.0)
    if kind in ("length", "scale"):
        chosen["exchange"] = 0.5
    moves, power = Moves(**chosen), torch.full((count,), 1.0 if reference is None else beta, dtype=torch.float64)
    number = {key: place for place, key in enumerate(keys(all_topologies(alignment.taxa)))}
    trees = chains.run(chains.start(generator, process), process, power, moves, 100, reference)
    found = np.zeros((count, len(number)))
    for _ in range(rounds):
        trees = chains.run(trees, process, power, moves, 30, reference)
        for chain, key in enumerate(keys(topologies_of(alignment.taxa, trees.splits)[0])):
            found[chain, number[key]] += 1 / rounds
    return found, trees.counts.sum(0)[(*KINDS, "independent").index(kind)]


def keys(topologies):
    return [sets.tobytes() for sets in topologies.below[:, topologies.num_taxa :]]


def scores(found, truth):
    """Score of each topology that few chains miss, and number of them."""
    common = truth * found.shape[0] > 2
    mean, error = found.mean(0)[common], found.std(0, ddof=1)[common] / np.sqrt(len(found))
    return (mean - truth[common]) / error, int(common.sum())


@pytest.fixture(scope="module")
def truth():
    return exact_log_masses(ALIGNMENT)[1].softmax(0).numpy()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_move_leaves_the_posterior_of_topologies_unchanged(engine, kind, truth, limit):
    found, counts = shares(engine, ALIGNMENT, kind)
    z, number = scores(found, truth)
    assert number >= 5 and np.abs(z).max() < limit(number, dof=len(found) - 1), z
    assert int(counts[1]) > 100


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_move_leaves_the_posterior_with_two_sets_of_lengths_unchanged(engine, kind, limit):
    """Parts with the same sites and their own lengths: the mass of a topology is that of one part, squared."""
    expected = (2 * exact_log_masses(SHORT)[1]).softmax(0).numpy()
    found, counts = shares(engine, SHORT, kind, sets=2)
    z, number = scores(found, expected)
    assert number >= 4 and np.abs(z).max() < limit(number, dof=len(found) - 1), z
    assert int(counts[1]) > 100


def reference_of(engine, constraints=None, sets=1):
    """Return a reference that is fitted to trees of few moves after draws from the prior."""
    chains, process = made(engine, ALIGNMENT, 60, sets=sets, constraints=constraints)
    generator, tempered = new_generator(3, stream="reference"), torch.full((60,), 0.3, dtype=torch.float64)
    trees = chains.draw(chains.start(generator, process), process, range(60), generator)
    trees = chains.run(trees, process, tempered, Moves(), 30)
    return TreeReference.fitted(trees.splits, trees.lengths, torch.ones(len(trees.splits)), 5)


def drawn(engine, reference, count, constraints=None, sets=1):
    """Return draws from the reference, and the log ratio of the posterior's density to its own."""
    chains, process = made(engine, ALIGNMENT, count, sets=sets, constraints=constraints)
    generator, ones = new_generator(4, stream="draws"), torch.ones(count, dtype=torch.float64)
    trees = chains.draw(chains.start(generator, process), process, range(count), generator, reference)
    trees = chains.run(trees, process, ones, Moves(), 0, reference)
    log_prior = chains.prior.log_density(trees.lengths, 5) - log_number_of_topologies(5, constraints)
    return trees, trees.log_likelihood + log_prior - trees.log_reference


def test_a_weight_in_the_fit_of_a_reference_counts_as_copies_of_its_tree():
    chains, process = made("tensors", ALIGNMENT, 40)
    warm = torch.full((40,), 0.3, dtype=torch.float64)
    trees = chains.run(chains.start(new_generator(3, stream="weights"), process), process, warm, Moves(), 30)
    copies = 1 + torch.arange(40) % 3
    weighted = TreeReference.fitted(trees.splits, trees.lengths, copies.double(), 5)
    places = torch.arange(40).repeat_interleave(copies)
    repeated = TreeReference.fitted(trees.splits[places], trees.lengths[places], torch.ones(len(places)), 5)
    assert all(
        torch.allclose(one.double(), other.double(), rtol=1e-12, atol=0)
        for one, other in zip(weighted, repeated, strict=True)
    )


@pytest.mark.calibration
@pytest.mark.parametrize("held", [False, True])
def test_the_reference_is_the_normalised_density_of_its_draws(engine, held, limit):
    # Taxa B and D lie on one side of a branch.
    constraints = np.array([[0b01010]] * 2, dtype=np.uint64) if held else None  # given twice, it counts once
    topologies, log_masses = exact_log_masses(ALIGNMENT)
    below = topologies.below[:, 5:, 0]
    allowed = ((below == 0b01010).any(1) if held else np.ones(15, dtype=bool)).nonzero()[0]
    trees, log_ratio = drawn(engine, reference_of(engine, constraints), 6000, constraints)
    found = topologies_of(ALIGNMENT.taxa, trees.splits)[0]
    assert set(keys(found)) == {keys(topologies)[place] for place in allowed}
    weights = (log_ratio - (log_masses[allowed].logsumexp(0) - math.log(len(allowed)))).exp()
    assert abs(float(weights.mean()) - 1) < limit(1, dof=500) * float(weights.std()) / math.sqrt(len(weights)) < 0.3


@pytest.mark.calibration
def test_the_reference_of_two_sets_of_lengths_is_the_normalised_density_of_its_draws(engine, limit):
    exact = float((2 * exact_log_masses(ALIGNMENT)[1]).logsumexp(0)) - math.log(15)
    weights = (drawn(engine, reference_of(engine, sets=2), 6000, sets=2)[1] - exact).exp()
    assert abs(float(weights.mean()) - 1) < limit(1, dof=500) * float(weights.std()) / math.sqrt(len(weights)) < 0.5


@functools.cache
def between(engine):
    """Return a reference, and the shares of topologies half-way from it to the posterior, with their errors."""
    reference = reference_of(engine)
    trees, log_ratio = drawn(engine, reference, 20_000)
    weights = (0.5 * log_ratio).softmax(0).numpy()
    number = {key: place for place, key in enumerate(keys(all_topologies(ALIGNMENT.taxa)))}
    at = np.array([number[key] for key in keys(topologies_of(ALIGNMENT.taxa, trees.splits)[0])])
    expected = np.bincount(at, weights, minlength=15)
    errors = [math.sqrt((weights**2 * ((at == place) - expected[place]) ** 2).sum()) for place in range(15)]
    return reference, expected, np.array(errors)


@pytest.mark.long
@pytest.mark.parametrize("kind", (*KINDS, "independent"))
def test_each_kind_of_move_leaves_a_density_between_reference_and_posterior_unchanged(engine, kind, limit):
    reference, expected, errors = between(engine)
    found, counts = shares(engine, ALIGNMENT, kind, reference=reference)
    common = expected * len(found) > 2  # many of the states
    both = np.hypot(errors, found.std(0, ddof=1) / np.sqrt(len(found)))[common]
    z = (found.mean(0) - expected)[common] / both
    assert len(z) >= 3 and np.abs(z).max() < limit(len(z), dof=len(found) - 1), z
    assert int(counts[1]) > 100


@pytest.mark.long
@pytest.mark.compiler
def test_a_tree_of_the_reference_without_its_density_is_noticed(truth, limit, monkeypatch):
    mutate(monkeypatch, "log_prior_of_tree() - log_reference_of_tree();", "log_prior_of_tree();", 2)
    z, number = scores(
        shares("compiled", ALIGNMENT, "independent", reference=reference_of("compiled"), beta=1.0)[0], truth
    )
    assert np.abs(z).max() > limit(number, dof=149), z


def mutate(monkeypatch, correct, wrong, times=1):
    """Replace a part of the source of the chains."""
    sources = {source.name: source.read_text(encoding="utf-8") for source in module._SOURCES}
    assert sources["chain.cpp"].count(correct) == times
    sources["chain.cpp"] = sources["chain.cpp"].replace(correct, wrong)
    mutated = load_library("tree_chain", sources, (*module._FLAGS, "-DREAL=double", "-DSTATES=4"))
    module.return_pointers(mutated)
    monkeypatch.setattr(module, "compiled_code", lambda *_: mutated)


@pytest.mark.long
@pytest.mark.compiler
def test_a_regraft_without_the_jacobian_of_its_lengths_is_noticed(truth, limit, monkeypatch):
    mutate(monkeypatch, "ratio += std::log(time[set]) - std::log(moved.time[set]);", ";")
    z, number = scores(shares("compiled", ALIGNMENT, "near_regraft", count=400, rounds=60)[0], truth)
    assert np.abs(z).max() > limit(number, dof=399), z


@pytest.mark.calibration
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("substitution", "site_rates"),
    [
        (JC69(), None),
        (GTR([0.1, 0.2, 0.3, 0.05, 0.25, 0.1], [0.1, 0.2, 0.3, 0.4]), InvariantSites(0.2, GammaRates(0.5))),
    ],
)
def test_the_likelihood_after_many_moves_is_that_of_the_forest(engine, substitution, site_rates, dtype):
    alignment = primates()[0]
    chains, process = made(engine, alignment, 3, substitution, site_rates, dtype=dtype)
    trees = chains.start(new_generator(2, stream="likelihood"), process)
    warm = torch.full((3,), 0.1, dtype=torch.float64)
    trees = chains.run(trees, process, 0.5 * warm, Moves(), MANY[engine])
    reference = TreeReference.fitted(trees.splits, trees.lengths, torch.ones(3), alignment.num_taxa)
    trees = chains.run(trees, process, 0.01 * warm, Moves(), MANY[engine] // 10, reference)
    accepted = trees.counts.sum(0)[:, 1] > 0
    assert int(accepted.sum()) >= (len(accepted) if engine == "compiled" else 6)  # few moves as array operations
    topologies, order = topologies_of(alignment.taxa, trees.splits)
    lengths = trees.lengths.gather(1, torch.from_numpy(order))
    likelihood = ForestLikelihood(alignment, substitution, site_rates=site_rates)
    expected = likelihood.log_likelihood(topologies, lengths[:, None].expand(3, 3, -1)).diagonal()
    tolerance = 1e-8 if dtype == torch.float64 else 1e-2
    assert torch.allclose(trees.log_likelihood, expected, rtol=0, atol=tolerance)


def test_chains_start_at_given_trees(engine):
    topologies = all_topologies("ABCDE")
    chains, process = made(engine, ALIGNMENT, 15)
    lengths = torch.rand(15, 7, generator=new_generator(9, stream="given"), dtype=torch.float64)
    trees = chains.start_at(topologies, lengths, new_generator(9, stream="start"), process)
    assert keys(topologies_of(ALIGNMENT.taxa, trees.splits)[0]) == keys(topologies)
    expected = ForestLikelihood(ALIGNMENT).log_likelihood(topologies, lengths)
    assert torch.allclose(trees.log_likelihood, expected, rtol=0, atol=1e-12)


def parted(engine, alignment, models, count, rates=(1.0, 1.0), **settings):
    """Chains over the first 300 sites and the others, each with a model, site rates and a relative rate."""
    subsets = alignment.partitioned({"first": range(300), "others": range(300, alignment.num_sites)})
    masks = np.concatenate([part.patterns.numpy() for part in subsets.values()], 1)
    weights = np.concatenate([part.weights.numpy() for part in subsets.values()])
    sizes = [part.num_patterns for part in subsets.values()]
    chains = chains_of(engine, masks, weights, 4, count, LengthPrior(), parts=sizes, **settings)
    partition = Partition(
        subsets,
        {name: model for name, (model, _) in zip(subsets, models, strict=True)},
        {name: site_rates for name, (_, site_rates) in zip(subsets, models, strict=True)},
        relative_rates=list(rates),
    )
    like, processes = torch.zeros(count, 0, dtype=torch.float64), []
    for model, categories in PartitionParameters(partition).parts(like):
        matrix, frequencies = model.rate_matrix(like.new_zeros(())), model.frequencies(like.new_zeros(()))
        processes.append(Process.of(matrix.expand(count, -1, -1), frequencies.expand(count, -1), categories))
    return chains, processes, partition


def errors_of_own_lengths(engine):
    """Return the errors of log-likelihoods after moves of two parts with their own lengths, and those of wrong ones."""
    alignment, count = primates()[0], 3
    models = [(K80(3.0), None), (JC69(), GammaRates(0.5))]
    chains, processes, partition = parted(engine, alignment, models, count, part_sets=[0, 1])
    partition = Partition(partition.subsets, partition.substitution, partition.site_rates)
    process, warm = Process.joined(processes), torch.full((count,), 0.05, dtype=torch.float64)
    trees = chains.run(chains.start(new_generator(2, stream="sets"), process), process, warm, Moves(), MANY[engine])
    reference = TreeReference.fitted(trees.splits, trees.lengths, torch.ones(count), alignment.num_taxa)
    trees = chains.run(trees, process, 0.1 * warm, Moves(), MANY[engine] // 5, reference)
    topologies, order = topologies_of(alignment.taxa, trees.splits)
    edges = torch.from_numpy(order)[:, None].expand(-1, 2, -1)
    lengths = trees.lengths.unflatten(1, (2, -1)).gather(2, edges)
    likelihood = PartitionedForestLikelihood(partition, separate_branch_lengths=True)
    # Lengths of the other set, or shared ones.
    given = lengths, lengths.flip(1), lengths[:, :1].expand(-1, 2, -1)
    values = torch.stack([likelihood.log_likelihood(topologies, one) for one in given])
    return (trees.log_likelihood - values).abs()


def test_parts_see_their_own_lengths(engine):
    errors = errors_of_own_lengths(engine)
    assert float(errors[0].max()) < 1e-8 and float(errors[1:].min()) > 1.0


@pytest.mark.compiler
def test_a_part_that_sees_the_lengths_of_another_set_is_noticed(monkeypatch):
    mutate(monkeypatch, "other, other_times[part.set], out)", "other, other_times[0], out)")
    assert float(errors_of_own_lengths("compiled")[0].min()) > 1.0


TWO_MODELS = [
    (GTR([0.1, 0.2, 0.3, 0.05, 0.25, 0.1], [0.1, 0.2, 0.3, 0.4]), InvariantSites(0.2, GammaRates(0.5))),
    (K80(3.0), None),
]


@pytest.mark.calibration
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_likelihood_of_parts_is_that_of_the_partition(engine, dtype):
    alignment, count = primates()[0], 3
    chains, processes, partition = parted(engine, alignment, TWO_MODELS, count, (0.5, 1.3), dtype=dtype)
    process = Process.joined(processes)
    trees = chains.start(new_generator(2, stream="parts"), process)
    trees = chains.run(trees, process, torch.full((count,), 0.05, dtype=torch.float64), Moves(), MANY[engine])
    accepted = trees.counts.sum(0)[:-1, 1] > 0
    assert int(accepted.sum()) >= (len(accepted) if engine == "compiled" else 5)
    topologies, order = topologies_of(alignment.taxa, trees.splits)
    lengths = trees.lengths.gather(1, torch.from_numpy(order))
    expected = PartitionedForestLikelihood(partition).log_likelihood(topologies, lengths)
    tolerance = 1e-8 if dtype == torch.float64 else 1e-2
    assert torch.allclose(trees.log_likelihood, expected, rtol=0, atol=tolerance)
    # Models that belong to other parts, or the relative rates of the others, are noticed.
    changed = parted(engine, alignment, TWO_MODELS, count, (1.3, 0.5))[1]
    for wrong in ([changed[0], processes[1]], [processes[0], changed[1]]):
        there = chains.run(trees, Process.joined(wrong), torch.ones(count, dtype=torch.float64), Moves(), 0)
        assert float((there.log_likelihood - expected).abs().max()) > 1.0


def test_parts_with_one_model_move_as_the_whole(engine):
    alignment, model = primates()[0], (TWO_MODELS[0][0], GammaRates(0.5))
    whole, process = made(engine, alignment, 2, *model)
    chains, processes, _ = parted(engine, alignment, [model, model], 2)
    ones, joined = torch.ones(2, dtype=torch.float64), Process.joined(processes)
    one = whole.run(whole.start(new_generator(8, stream="one"), process), process, ones, Moves(), MANY[engine] // 7)
    two = chains.run(chains.start(new_generator(8, stream="one"), joined), joined, ones, Moves(), MANY[engine] // 7)
    assert torch.equal(one.counts, two.counts) and torch.equal(one.splits, two.splits)
    # Sums in another order differ by rounding, which proposals that depend on them carry on.
    assert torch.allclose(one.lengths, two.lengths, rtol=1e-6, atol=0)
    assert torch.allclose(one.log_likelihood, two.log_likelihood, rtol=0, atol=1e-6)


@pytest.mark.calibration
def test_twenty_states(engine):
    rows = {"A": "MKVLATWYQN", "B": "MKILATWYHN", "C": "MRVLGTFYQD", "D": "MRILG-FYHD"}
    alignment = Alignment.from_sequences(rows, data_type="protein")
    model = AminoAcidModel("LG")
    chains, process = made(engine, alignment, 2, model)
    ones = torch.ones(2, dtype=torch.float64)
    trees = chains.run(chains.start(new_generator(2, stream="protein"), process), process, ones, Moves(), 200)
    topologies, order = topologies_of(alignment.taxa, trees.splits)
    lengths = trees.lengths.gather(1, torch.from_numpy(order))
    expected = ForestLikelihood(alignment, model).log_likelihood(topologies, lengths[:, None].expand(2, 2, -1))
    assert torch.allclose(trees.log_likelihood, expected.diagonal(), rtol=0, atol=1e-9)


def test_a_state_alone_decides_what_follows(engine):
    alignment, number = primates()[0], MANY[engine] // 7
    chains, process = made(engine, alignment, 2)
    ones = torch.ones(2, dtype=torch.float64)
    middle = chains.run(chains.start(new_generator(3, stream="bits"), process), process, ones, Moves(), number)
    expected = chains.run(middle, process, ones, Moves(), number)
    other, process = made(engine, alignment, 2, num_threads=2)
    for one, two in zip(expected, other.run(middle, process, ones, Moves(), number), strict=True):
        assert torch.equal(one, two)


def mixed_moves(num_threads=1):
    """States after all kinds of moves, some beside a reference, in several calls."""
    alignment, moves = primates()[0], Moves(parsimony_regraft=1.0, independent=1.0)
    chains, process = made("compiled", alignment, 3, num_threads=num_threads)
    trees = chains.start(new_generator(5, stream="bits"), process)
    power, ones = torch.tensor([0.1, 0.6, 1.0], dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    reference = TreeReference.fitted(trees.splits, trees.lengths, ones, alignment.num_taxa)
    for _ in range(3):
        trees = chains.run(trees, process, power, moves, 200, reference)
        trees = chains.run(trees, process, ones, moves, 50)
    return trees


def are_equal(one, other):
    return all(torch.equal(part, same) for part, same in zip(one, other, strict=True))


@pytest.mark.compiler
@pytest.mark.parametrize("num_threads", [1, 2, 4])
def test_chains_that_share_room_move_as_those_that_have_their_own(num_threads, monkeypatch):
    expected = mixed_moves()
    monkeypatch.setattr(module, "_MOST_BYTES", 0)
    assert are_equal(mixed_moves(num_threads), expected)


@pytest.mark.calibration
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("correct", "changed", "same"),
    [
        # What is kept between moves is what would be computed anew.
        ("void regraft(Move move) {", "void regraft(Move move) { std::fill(known.begin(), known.end(), 0);", True),
        ("if (referred != reference->number) {", "if (true) {", True),
        ("const Int cut = random.below(edges);", "forget_all(); const Int cut = random.below(edges);", True),
        # What is no longer right is forgotten.
        ("if (topology) known[place] = 0;", "", False),
        ("if (!same) split_logs[edge] =", "if (split_logs[edge] == 0) split_logs[edge] =", False),
    ],
)
def test_what_chains_keep_between_moves(correct, changed, same, monkeypatch):
    expected = mixed_moves()
    mutate(monkeypatch, correct, changed)
    assert are_equal(mixed_moves(), expected) == same


def test_draws_from_the_prior(engine, limit):
    alignment, count = ALIGNMENT, 3000
    gamma_dirichlet = GammaDirichlet(torch.full((7,), 1.0).index_fill(0, torch.tensor([5, 6]), 2.0), 3.0, 2.0)
    prior = LengthPrior(1.0, 2.0, 2.0, 3.0 - 9.0)
    chains, process = made(engine, alignment, count, prior=prior)
    generator = new_generator(4, stream="prior")
    trees = chains.draw(chains.start(generator, process), process, range(count), generator)
    number = {key: place for place, key in enumerate(keys(all_topologies(alignment.taxa)))}
    drawn = np.bincount([number[key] for key in keys(topologies_of(alignment.taxa, trees.splits)[0])], minlength=15)
    z = (drawn - count / 15) / np.sqrt(count / 15 * 14 / 15)
    assert np.abs(z).max() < limit(15)
    mean, deviation = gamma_dirichlet.mean, gamma_dirichlet.variance.sqrt()
    z = (trees.lengths.mean(0) - mean) / (deviation / count**0.5)
    assert float(z.abs().max()) < limit(7)
    # Its density differs from the prior's by a constant.
    values = gamma_dirichlet.sample((5,)).double()
    gap = prior.log_density(values, 5) - gamma_dirichlet.log_prob(values)
    assert float(gap.max() - gap.min()) < 1e-4


DEPENDENT = LengthPrior(1.0, 2.0, 2.0, 3.0 - 9.0)


def scores_of_lengths(engine, kind, prior, sets=1, count=400, number=60):
    """Return scores of lengths after moves of one kind that start from the prior, and the moves accepted."""
    blank = Alignment.from_sequences({name: "N" for name in "ABCDE"})
    chains, process = made(engine, blank, count, prior=prior, sets=sets)
    generator, ones = new_generator(5, stream=f"lengths {kind}"), torch.ones(count, dtype=torch.float64)
    trees = chains.draw(chains.start(generator, process), process, range(count), generator)
    moves = Moves(**(dict.fromkeys(KINDS, 0.0) | {"independent": 0.0, kind: 1.0}))
    trees = chains.run(trees, process, ones, moves, number)
    # Shares of the sum have a Dirichlet distribution, the sum itself a gamma distribution.
    lengths = trees.lengths.unflatten(1, (sets, 7)).flatten(0, 1)  # sets are independent
    shape, total, count = torch.tensor([prior.pendant] * 5 + [prior.inner] * 2).double(), lengths.sum(1), sets * count
    shares, whole = lengths / total[:, None], shape.sum()
    of_sum = whole + prior.power
    found = [shares, shares.log(), total[:, None] * prior.rate, (total[:, None] * prior.rate).log()]
    means = [shape / whole, shape.digamma() - whole.digamma(), of_sum[None], of_sum[None].digamma()]
    variances = [
        Dirichlet(shape).variance,
        torch.polygamma(1, shape) - torch.polygamma(1, whole),
        of_sum[None],
        torch.polygamma(1, of_sum[None]),
    ]
    z = (torch.cat(found, 1).mean(0) - torch.cat(means)) / (torch.cat(variances) / count).sqrt()
    return z.numpy(), int(trees.counts.sum(0)[KINDS.index(kind)][1])


@pytest.mark.calibration
@pytest.mark.parametrize("sets", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_moves_leave_a_dependent_prior_of_lengths_unchanged(engine, kind, sets, limit):
    z, accepted = scores_of_lengths(engine, kind, DEPENDENT, sets)
    assert np.abs(z).max() < limit(len(z)) and accepted > 100, z


@pytest.mark.calibration
@pytest.mark.compiler
@pytest.mark.parametrize(
    ("kind", "correct", "wrong"),
    [
        ("near_regraft", "(1 - part[set]) * whole[set]", "(1 - part[set]) * whole[0]"),
        ("exchange", "power * std::log(others[set] + at[set])", "power * std::log(others[0] + at[0])"),
    ],
)
def test_a_move_that_shares_lengths_by_mistake_is_noticed(kind, correct, wrong, limit, monkeypatch):
    mutate(monkeypatch, correct, wrong)
    z, _ = scores_of_lengths("compiled", kind, DEPENDENT, sets=2, count=2000, number=200)
    assert np.abs(z).max() > limit(len(z)), z


def test_constraints_hold_and_leave_the_others_equally_likely(engine, limit):
    count, blank = 600, Alignment.from_sequences({name: "N" for name in "ABCDEF"})
    split = np.array([[0b110000]], dtype=np.uint64)  # E and F
    chains, process = made(engine, blank, count, constraints=split)
    generator = new_generator(6, stream="constraints")
    trees = chains.start(generator, process)
    for drawn in (chains.draw(trees, process, range(count), generator), trees):
        after = chains.run(drawn, process, torch.ones(count, dtype=torch.float64), Moves(), 40)
        for found in (drawn, after):
            assert bool((found.splits == int(split[0, 0])).any(1).all())
        found = np.unique(keys(topologies_of(blank.taxa, after.splits)[0]), return_counts=True)[1]
        assert len(found) == 15
        assert np.abs((found - count / 15) / np.sqrt(count / 15 * 14 / 15)).max() < limit(15)


class Unscaled(TensorChains):
    """Chains whose regrafts take no notice of the lengths of the edges."""

    def _regrafted(self, *arguments):
        return super()._regrafted(*arguments)[0], 0.0


class Turned(TensorChains):
    """Chains whose ratios of densities of moves back and forth are the wrong way around."""

    def _proposed(self, *arguments):
        forest, edge, log_ratio = super()._proposed(*arguments)
        return forest, edge, -log_ratio


@pytest.mark.parametrize(("wrong", "kind"), [(Unscaled, "reconnection"), (Turned, "length")])
def test_a_wrong_ratio_of_array_operations_is_noticed(wrong, kind, limit):
    z, _ = scores_of_lengths(wrong, kind, LengthPrior())
    assert np.abs(z).max() > limit(len(z)), z


@pytest.mark.compiler
@pytest.mark.parametrize("held", [False, True])
def test_both_kinds_of_chains_have_one_density(held):
    alignment, count = primates()[0], 4
    constraints = np.array([[0b111000], [0b110000]], dtype=np.uint64) if held else None
    (compiled, process), (tensors, _) = (
        made(engine, alignment, count, *TWO_MODELS[0], constraints=constraints) for engine in ("compiled", "tensors")
    )
    ones, generator = torch.ones(count, dtype=torch.float64), new_generator(7, stream="both")
    trees = compiled.run(compiled.start(generator, process), process, 0.05 * ones, Moves(), 200)
    reference = TreeReference.fitted(trees.splits[:2], trees.lengths[:2], torch.tensor([1.0, 3.0]).double(), 12)
    for source in (trees, compiled.draw(trees, process, range(count), generator, reference)):
        topologies, order = topologies_of(alignment.taxa, source.splits)
        given = topologies, source.lengths.gather(1, torch.from_numpy(order)), generator, process
        one, two = (
            chains.run(chains.start_at(*given), process, ones, Moves(), 0, reference) for chains in (compiled, tensors)
        )
        assert torch.equal(one.splits, two.splits)
        assert torch.allclose(one.log_likelihood, two.log_likelihood, rtol=0, atol=1e-9)
        assert torch.allclose(one.log_reference, two.log_reference, rtol=0, atol=1e-10)


def test_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", "")
    module.compiled_code.cache_clear()
    arguments = ALIGNMENT.patterns.numpy(), ALIGNMENT.weights.numpy(), 4, 1, LengthPrior()
    with pytest.warns(
        CompilationWarning, match="chains over tree topologies .* many times slower .* no C\\+\\+ compiler"
    ):
        chains = tree_chains(*arguments)
    assert isinstance(chains, TensorChains) and isinstance(tree_chains(*arguments), TensorChains)  # said once
    module.compiled_code.cache_clear()


CHARACTERS = Alignment.from_sequences(
    {"A": "02110", "B": "02210", "C": "01112", "D": "12002", "E": "10222"}, data_type="standard"
)
CODINGS = {
    "Mkv": VariableSites(Mk(3)),
    "ordered": VariableSites(OrderedMk(3)),
    "informative": VariableSites(Mk(3), "informative"),
    "noabsence": VariableSites(OrderedMk(3), "noabsence"),
}


def conditioned(engine, alignment, model, count, weight=1.0, **settings):
    """Chains with data, and with the patterns that cannot be in them as a part of their own."""
    left_out = model.left_out(alignment.num_taxa)
    masks = np.concatenate([alignment.patterns.numpy().astype(np.int64), left_out.patterns], 1)
    weights = np.concatenate([alignment.weights.numpy(), weight * left_out.counts])
    parts = {"parts": [alignment.num_patterns, len(left_out.counts)], "conditioned": [0, alignment.num_sites]}
    chains = chains_of(engine, masks, weights, model.num_states, count, LengthPrior(), **parts, **settings)
    like = torch.zeros((), dtype=torch.float64)
    frequencies, matrix = model.frequencies(like), model.rate_matrix(like)
    one = Process.of(matrix.expand(count, -1, -1), frequencies.expand(count, -1))
    return chains, Process.joined([one, one])


@pytest.mark.parametrize("coding", CODINGS)
def test_the_likelihood_of_chosen_sites_is_that_of_the_forest(engine, coding):
    model = CODINGS[coding]
    out = set(sites_left_out(CHARACTERS, model.coding).tolist())
    alignment = CHARACTERS.select_sites([site for site in range(CHARACTERS.num_sites) if site not in out])
    chains, process = conditioned(engine, alignment, model, 3)
    generator, ones = new_generator(0, stream="trees"), torch.ones(3, dtype=torch.float64)
    trees = chains.run(chains.start(generator, process), process, ones, Moves(), MANY[engine])
    topologies, order = topologies_of(alignment.taxa, trees.splits)
    lengths = trees.lengths.gather(1, torch.from_numpy(order))
    expected = ForestLikelihood(alignment, model).log_likelihood(topologies, lengths)
    torch.testing.assert_close(trees.log_likelihood, expected, rtol=1e-9, atol=1e-9)
    # A wrong number of patterns is noticed.
    wrong, _ = conditioned(engine, alignment, model, 3, weight=0.9)
    assert (wrong.run(trees, process, ones, Moves(), 0).log_likelihood - expected).abs().min() > 1e-3
