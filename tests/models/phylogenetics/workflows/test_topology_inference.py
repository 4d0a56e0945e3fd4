"""Topologies from an alignment alone: posterior and evidence against quadrature, resumption, refusals, files."""

import math
import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import scipy.special
import torch
from pyro.distributions import Dirichlet, Gamma, LogNormal, Normal

from bayeskit._core.statistics import r_hat
from bayeskit.errors import (
    AlignmentError,
    BudgetError,
    CheckpointError,
    DataWarning,
    SamplingWarning,
    SettingsError,
    TreeError,
)
from bayeskit.models.phylogenetics import (
    HKY85,
    K80,
    Alignment,
    AminoAcidModel,
    ForestLikelihood,
    GammaRates,
    InvariantSites,
    Mk,
    Partition,
    PartitionedForestLikelihood,
    PartitionedTreeModel,
    Topologies,
    Tree,
    TreeSample,
    all_topologies,
    asdsf,
    jukes_cantor_distances,
    neighbour_joining,
    primates,
)
from bayeskit.models.phylogenetics._topology_moves._chains import Moves
from bayeskit.models.phylogenetics.workflows import (
    LearningRates,
    SupportGrowth,
    TopologyInference,
    VariationalPosterior,
    compare_topologies,
    infer_topologies,
    topology_evidence,
    variational_inference,
)
from bayeskit.models.phylogenetics.workflows import _topology_inference as module
from bayeskit.models.phylogenetics.workflows._topology_report import write_topology_report
from bayeskit.parallel import map_tasks
from tests.models.phylogenetics.test_tree_chains import ALIGNMENT, exact_log_masses, keys

pytestmark = pytest.mark.compiler  # thousands of rounds, which take minutes as array operations
FOUR = Alignment.from_sequences({"A": "ACGTA", "B": "ACGCA", "C": "AGTCA", "D": "AGTTA"})
SIX = Alignment.from_sequences(
    {"A": "ACGTA", "B": "ACGCA", "C": "AGTCA", "D": "AGTCT", "E": "ACTCT", "F": "GCTCT"},
)


@pytest.fixture(scope="module")
def five():
    return infer_topologies(ALIGNMENT, num_warmup=300, num_samples=2500, num_temperatures=6, progress=False)


@pytest.fixture(scope="module", params=[FOUR, ALIGNMENT, SIX], ids=["4 taxa", "5 taxa", "6 taxa"])
def few(request):
    """Return a search over all topologies of few taxa, these topologies, and their exact evidence."""
    if request.param is ALIGNMENT:
        return request.getfixturevalue("five"), *exact_log_masses(ALIGNMENT)
    found = infer_topologies(request.param, num_warmup=150, num_samples=1000, num_temperatures=5, progress=False)
    return found, *exact_log_masses(request.param)


@pytest.mark.long
def test_evidence_over_all_topologies_of_few_taxa(few, limit):
    found, topologies, log_masses = few
    exact = float(log_masses.logsumexp(0)) - math.log(len(topologies))
    assert len(topologies) in (3, 15, 105) and found.evidence.trusted
    assert abs(found.log_evidence - exact) < limit() * found.evidence.standard_error < 0.2


@pytest.mark.long
def test_posterior_of_topologies_of_few_taxa(few, limit):
    found, topologies, log_masses = few
    truth = dict(zip(keys(topologies), log_masses.softmax(0).tolist(), strict=True))
    common = [key for key in truth if 0.03 < truth[key] < 0.97]
    series = torch.zeros(len(common), *found.log_prior.shape, dtype=torch.float64)
    for run, sample in enumerate(found.samples):
        names = keys(sample.topologies)
        for place, key in enumerate(common):
            series[place, run] = torch.from_numpy(np.array([names[i] == key for i in sample.index]))
    z = (series.mean((1, 2)) - torch.tensor([truth[key] for key in common])) / module.mean_error(series)
    assert len(common) >= 2
    assert float(z.abs().max()) < limit(len(common)), z


@pytest.mark.calibration
def test_a_free_parameter_is_integrated_out(limit):
    prior = LogNormal(torch.tensor(1.0, dtype=torch.float64), torch.tensor(0.5, dtype=torch.float64))
    nodes, weights = scipy.special.roots_hermitenorm(8)
    lengths, length_weights = scipy.special.roots_laguerre(5)
    topologies, likelihood = all_topologies(FOUR.taxa), ForestLikelihood(FOUR, K80())
    grid = torch.cartesian_prod(*[torch.as_tensor(lengths / 10)] * 5)
    logs = torch.cartesian_prod(*[torch.as_tensor(np.log(length_weights))] * 5).sum(-1)
    total = []
    for node, weight in zip(nodes, weights / weights.sum(), strict=True):
        kappa = torch.tensor(math.exp(1 + 0.5 * node), dtype=torch.float64)
        values = likelihood.log_likelihood(topologies, grid[:, None].expand(-1, 3, -1), kappa=kappa)
        total.append((values + logs[:, None]).logsumexp((0, 1)) + math.log(weight / 3))
    exact = float(torch.stack(total).logsumexp(0))
    found = infer_topologies(
        FOUR, substitution=K80(prior), num_warmup=150, num_samples=450, num_temperatures=4, progress=False
    )
    posterior = (torch.stack(total).softmax(0) * torch.as_tensor(1 + 0.5 * nodes)).sum()
    logs = found.parameters["kappa"].log()
    assert abs(float(logs.mean() - posterior) / float(module.mean_error(logs))) < limit()
    # The quadrature is not exact: some 1e-3 at these short sequences.
    assert abs(found.log_evidence - exact) < limit() * math.hypot(found.evidence.standard_error, 1e-3)


def runs_until_killed_and_to_the_end(data, folder, **model):
    """Return a run, and another one that is killed and resumed."""
    settings = {"num_warmup": 80, "num_samples": 20, "num_temperatures": 4, "progress": False, "seed": 3} | model
    expected = infer_topologies(data, **settings)
    resumed = {"checkpoint": folder / "search", "checkpoint_seconds": 0.0}

    class Killed(Exception):
        pass

    def killed(self, state, iteration, records, plain=module.TopologySearch.ending):
        if iteration == 47:  # between two adaptations
            raise Killed
        return plain(self, state, iteration, records)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module.TopologySearch, "ending", killed)
        with pytest.raises(Killed):
            infer_topologies(data, **settings, **resumed)
    return expected, infer_topologies(data, num_jobs=2, **settings, **resumed)


@pytest.mark.calibration
def test_a_killed_run_goes_on_bit_for_bit(tmp_path):
    expected, found = runs_until_killed_and_to_the_end(primates()[0], tmp_path, substitution=K80())
    assert torch.equal(found.log_likelihood, expected.log_likelihood)
    assert torch.equal(found.parameters["kappa"], expected.parameters["kappa"])
    assert torch.equal(found.sample.branch_lengths, expected.sample.branch_lengths)
    assert (found.sample.index == expected.sample.index).all()


def test_a_checkpoint_knows_the_numbers_of_a_prior(tmp_path):
    settings = {"num_warmup": 10, "num_samples": 10, "num_temperatures": 4, "progress": False}
    one, other = (LogNormal(torch.tensor(loc), torch.tensor(0.5)) for loc in (0.0, 1.0))
    infer_topologies(FOUR, substitution=K80(one), checkpoint=tmp_path / "search", **settings)
    with pytest.raises(CheckpointError, match="model"):
        infer_topologies(FOUR, substitution=K80(other), checkpoint=tmp_path / "search", **settings)
    infer_topologies(FOUR, substitution=K80(one), checkpoint=tmp_path / "search", **settings)


def test_a_run_that_ends_in_its_warm_up_says_so():
    settings = {"num_warmup": 100_000, "num_samples": 10, "num_temperatures": 4, "progress": False}
    with pytest.warns(SamplingWarning, match="in the warm-up"):
        found = infer_topologies(primates()[0], time_budget=1.0, **settings)
    assert not found.is_converged and not found.is_warm and "NOT CONVERGED" in repr(found)
    assert not found.evidence.trusted
    with pytest.raises(BudgetError, match="rounds"):
        infer_topologies(primates()[0], time_budget=1e-9, **settings)


@pytest.mark.calibration
def test_a_path_from_the_prior(limit):
    exact = float(exact_log_masses(ALIGNMENT)[1].logsumexp(0)) - math.log(15)
    settings = {"num_warmup": 100, "num_samples": 500, "num_temperatures": 5, "progress": False}
    found = infer_topologies(ALIGNMENT, path="prior", **settings)
    assert abs(found.log_evidence - exact) < limit() * found.evidence.standard_error < 0.5
    assert torch.equal(found.log_ratio, found.log_likelihood) and found.moves["independent"][0] == 0
    found = infer_topologies(ALIGNMENT, **settings)
    assert found.moves["independent"][0] > 500 and found.moves["independent"][1] > 0.2


@pytest.fixture(scope="module")
def constrained():
    return infer_topologies(ALIGNMENT, constraints=[["A", "E"]], num_warmup=150, num_samples=1000, progress=False)


def exact_constrained():
    """Log evidence of each of the topologies in which A and E are neighbours."""
    topologies, log_masses = exact_log_masses(ALIGNMENT)
    return log_masses[[is_allowed(text) for text in map(topologies.to_newick, range(15))]]


@pytest.mark.calibration
def test_evidence_over_the_topologies_that_constraints_allow(constrained, limit):
    exact = float(exact_constrained().logsumexp(0)) - math.log(3)
    assert len(exact_constrained()) == 3 and len(constrained.sample.topologies) == 3
    assert abs(constrained.log_evidence - exact) < limit() * constrained.evidence.standard_error < 0.5


def is_allowed(text):
    return "(A,E,(" in text or "(A,E)" in text or "(B,(C,D))" in text or "(C,(B,D))" in text or "(D,(B,C))" in text


def test_constraints_and_a_prior_of_its_own():
    found = infer_topologies(
        ALIGNMENT,
        constraints=[["A", "E"]],
        branch_length_prior=Gamma(torch.tensor(2.0), torch.tensor(20.0)),
        num_warmup=50,
        num_samples=50,
        num_temperatures=4,
        progress=False,
    )
    assert all(map(is_allowed, newicks(found)))
    for groups, words in (
        ([["A", "B"], ["B", "C"]], "contradict"),
        ([["A", "X"]], "'X'"),
        ([["A"]], "at least two"),
        (["AB"], "lists"),
    ):
        with pytest.raises(SettingsError, match=words):
            infer_topologies(ALIGNMENT, constraints=groups)


def newicks(found):
    return [found.sample.topologies.to_newick(place) for place in range(len(found.sample.topologies))]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"branch_length_prior": Normal(torch.tensor(0.0), torch.tensor(1.0))}, "Normal is not supported"),
        ({"num_runs": 1, "stop": 0.01}, "num_runs=2"),
        ({"dtype": torch.float16}, "float64 or torch.float32"),
        ({"moves": "all"}, "moves"),
        ({"num_temperatures": 1}, "num_temperatures"),
        ({"path": "posterior"}, "prior"),
        ({"num_warmup": 9}, "num_warmup"),
        ({"num_samples": 7}, "num_samples"),
    ],
)
def test_settings_outside_their_domain(settings, words):
    with pytest.raises(SettingsError, match=words):
        infer_topologies(ALIGNMENT, **settings)


@pytest.mark.parametrize("start", ["neighbour_joining", "list", "text", "tree"])
def test_starts(start, monkeypatch):
    # Before there is a reference, whose trees would replace those of the start.
    ending = module.TopologySearch.ending
    monkeypatch.setattr(
        module.TopologySearch, "ending", lambda *args: "interrupted" if args[2] == 20 else ending(*args)
    )
    texts = ["(A:0.1,B:0.2,((C:0.1,D:0.1):0.3,E:0.1):0.2);", "((A,C),B,(D,E));"]
    trees = {"list": [texts[0], Tree.from_newick(texts[1])], "text": texts[0], "tree": Tree.from_newick(texts[1])}
    moves = Moves(1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)  # topologies stay
    with pytest.warns(SamplingWarning, match="in the warm-up"):
        found = infer_topologies(ALIGNMENT, start=trees.get(start, start), moves=moves, num_warmup=100, progress=False)
    expected = {"list": texts, "text": texts[:1] * 2, "tree": texts[1:] * 2}
    distances = jukes_cantor_distances(ALIGNMENT)
    finite = distances.clamp(max=distances[distances.isfinite()].max())
    joined = neighbour_joining(finite, ALIGNMENT.taxa).to_newick()
    for sample, text in zip(found.samples, expected.get(start, [joined] * 2), strict=True):
        assert keys(sample.topologies) == keys(Topologies.from_trees([Tree.from_newick(text)], ALIGNMENT.taxa))


@pytest.mark.parametrize(
    ("start", "error", "words"),
    [
        ("random", SettingsError, "'random' is no start.*'neighbour_joining'"),
        ([], SettingsError, "is no start"),
        (["((A,B),(C,D),E);"] * 3, SettingsError, "3 trees for 2 runs"),
        ("((A,B),(C,D),X);", TreeError, "'X'"),
        ("((A,B),C,D);", TreeError, "'E'"),
        ("((A,B),(C,D),E", TreeError, "Remedy"),
        (["((A,E),(C,D),B);", "((A,B),(C,D),E);"], SettingsError, "constraint on A, E excludes tree 2.*parsimony"),
        ("neighbour_joining", SettingsError, "constraint on A, E excludes tree 1"),
    ],
)
def test_starts_that_are_refused(start, error, words):
    with pytest.raises(error, match=words):
        infer_topologies(ALIGNMENT, start=start, constraints=[["A", "E"]])


SUBSETS = FOUR.partitioned({"slow": [0, 1, 2], "fast": [3, 4]})


def exact_log_evidence(partition, unit=0.75, nodes=4, rate=10.0):
    """Log evidence of each topology of four taxa by quadrature.

    Exact if the likelihood is a polynomial in ``exp(-t / unit)`` of each edge of a degree below twice the nodes.
    """
    roots, weights = scipy.special.roots_jacobi(nodes, 0.0, unit * rate - 1)
    lengths = torch.cartesian_prod(*[torch.as_tensor(-unit * np.log((1 + roots) / 2))] * 5)
    log_weights = torch.cartesian_prod(*[torch.as_tensor(np.log(weights / weights.sum()))] * 5).sum(-1)
    topologies, likelihood = all_topologies(FOUR.taxa), PartitionedForestLikelihood(partition)
    values = likelihood.log_likelihood(topologies, lengths[:, None].expand(-1, 3, -1))
    return (values + log_weights[:, None]).logsumexp(0)


def exact_partition(rate_pairs):
    """Log evidence of four taxa, `(pairs of relative rates, topologies)`; exact for the rates 1 and 2, of degree 7."""
    rows = [exact_log_evidence(Partition(SUBSETS, relative_rates=rates)) for rates in rate_pairs]
    return all_topologies(FOUR.taxa), torch.stack(rows)


@pytest.mark.calibration
def test_subsets_of_unlike_types_of_data(limit):
    marks = Alignment.from_sequences({"A": "01", "B": "10", "C": "00", "D": "11"}, data_type="standard")
    proteins = Alignment.from_sequences({"A": "MK", "B": "M-", "C": "LK", "D": "IR"}, data_type="protein")
    bases = FOUR.select_sites([2, 3])
    # In exp(-2 t / 3), the degree is 4 for the bases and 6 for the marks.
    partition = Partition({"bases": bases, "marks": marks}, {"marks": Mk(2)})
    masses = exact_log_evidence(partition, unit=1.5, nodes=6)
    found = infer_topologies(partition, num_warmup=150, num_samples=1000, num_temperatures=5, progress=False)
    exact = float(masses.logsumexp(0)) - math.log(3)
    assert abs(found.log_evidence - exact) < limit() * found.evidence.standard_error < 0.2
    models = {"bases": HKY85(2.0, [0.4, 0.3, 0.2, 0.1]), "marks": Mk(2), "proteins": AminoAcidModel("LG")}
    subsets = {"bases": bases, "marks": marks, "proteins": proteins}
    partition = Partition(subsets, models, {"bases": GammaRates(0.5), "proteins": InvariantSites(0.2)})
    settings = {"num_warmup": 10, "num_samples": 8, "num_temperatures": 4, "dtype": torch.float64, "progress": False}
    found = infer_topologies(partition, start="neighbour_joining", **settings)
    sample = found.samples[0]
    for draw in (0, 7):
        tree = sample.topologies.tree(sample.index[draw], sample.branch_lengths[draw])
        expected = PartitionedTreeModel(partition, tree).log_likelihood(tree.branch_lengths)
        assert abs(float(found.log_likelihood[-1, 0, draw] - expected)) < 1e-10


def shares_of_topologies(found, topologies):
    """Indicators of each topology, `(topologies, runs, draws)`."""
    names = [np.array(keys(sample.topologies))[sample.index] for sample in found.samples]
    return torch.tensor(np.array([[run == key for run in names] for key in keys(topologies)])).double()


@pytest.fixture(scope="module")
def fixed_rates():
    partition = Partition(SUBSETS, relative_rates=[1.0, 2.0])
    return infer_topologies(
        partition, num_warmup=200, num_samples=1500, num_temperatures=5, dtype=torch.float64, progress=False
    )


@pytest.mark.calibration
def test_a_partition_of_four_taxa(fixed_rates, limit):
    topologies, logs = exact_partition([[1.0, 2.0]])
    exact = float(logs.logsumexp((0, 1))) - math.log(3)
    assert fixed_rates.evidence.trusted and fixed_rates.evidence.standard_error < 0.05
    assert abs(fixed_rates.log_evidence - exact) < limit() * fixed_rates.evidence.standard_error
    series = shares_of_topologies(fixed_rates, topologies)
    z = (series.mean((1, 2)) - logs[0].softmax(0)) / module.mean_error(series)
    assert float(z.abs().max()) < limit(3)
    # Equal rates would be noticed.
    equal = float(exact_partition([[1.0, 1.0]])[1].logsumexp((0, 1))) - math.log(3)
    assert abs(fixed_rates.log_evidence - equal) > limit() * fixed_rates.evidence.standard_error


@pytest.mark.calibration
def test_the_log_likelihood_is_that_of_the_partitioned_tree_model(fixed_rates):
    sample = fixed_rates.samples[0]
    for draw in range(0, 1500, 300):
        tree = sample.topologies.tree(sample.index[draw], sample.branch_lengths[draw])
        expected = PartitionedTreeModel(fixed_rates.alignment, tree).log_likelihood(tree.branch_lengths)
        assert abs(float(fixed_rates.log_likelihood[-1, 0, draw] - expected)) < 1e-10


def exact_free_rates():
    """Log evidence at shares of the rate, with their weights under Dirichlet(2, 2), and these shares."""
    roots, weights = scipy.special.roots_jacobi(5, 1.0, 1.0)
    shares, weights = torch.as_tensor((1 + roots) / 2), torch.as_tensor(weights / weights.sum())
    pairs = torch.stack([shares * 5 / 3, (1 - shares) * 5 / 2], 1)
    return exact_partition(pairs.tolist())[1].logsumexp(1) + weights.log() - math.log(3), shares


@pytest.mark.long
def test_relative_rates_are_integrated_out(limit):
    prior = Dirichlet(torch.tensor([2.0, 2.0], dtype=torch.float64))
    partition = Partition(SUBSETS, relative_rates=prior)
    found = infer_topologies(partition, num_warmup=150, num_samples=450, num_temperatures=4, progress=False)
    assert found.moves["gradient"][0] == 2 * 600 // module._GRADIENT_ROUNDS and found.moves["gradient"][1] > 0.4
    logs, shares = exact_free_rates()
    # The quadrature is not exact: some 1e-4 at these short sequences.
    assert abs(found.log_evidence - float(logs.logsumexp(0))) < limit() * math.hypot(
        found.evidence.standard_error, 1e-4
    )
    drawn = found.parameters["rate_shares"][..., 0]
    assert abs(float((drawn.mean() - logs.softmax(0) @ shares) / module.mean_error(drawn))) < limit()
    assert torch.allclose(found.parameters["relative_rates"], torch.stack([drawn * 5 / 3, (1 - drawn) * 5 / 2], -1))


def test_a_partition_with_parameters_of_its_own():
    subsets = primates()[0].partitioned({"coding": range(457), "others": range(457, 898)})
    subsets["others"] = subsets["others"].select(subsets["coding"].taxa[::-1])
    partition = Partition(subsets, HKY85(), {"coding": GammaRates()}, linked=["kappa"])
    settings = {"num_warmup": 10, "num_samples": 10, "dtype": torch.float64, "progress": False}
    found = infer_topologies(partition, start="neighbour_joining", **settings)
    assert sorted(found.parameters) == ["base_frequencies_coding", "base_frequencies_others", "kappa", "shape_coding"]
    assert isinstance(found.substitution["coding"], HKY85) and found.site_rates["others"] is None
    place = found.samples[0].index[-1]
    expected = PartitionedForestLikelihood(partition).log_likelihood(
        found.samples[0].topologies[place].with_taxa(subsets["coding"].taxa)[0],
        found.samples[0].branch_lengths[-1:],
        **{name: values[0, -1] for name, values in found.parameters.items()},
    )
    assert abs(float(found.log_likelihood[-1, 0, -1] - expected)) < 1e-8


def test_a_checkpoint_knows_its_partition(tmp_path):
    settings = {"num_warmup": 10, "num_samples": 8, "num_temperatures": 4, "progress": False}
    first, other = (Partition(SUBSETS, relative_rates=Dirichlet(torch.tensor(two))) for two in ([1.0, 1.0], [2.0, 1.0]))
    found = infer_topologies(first, checkpoint=tmp_path / "search", **settings)
    again = infer_topologies(first, checkpoint=tmp_path / "search", **settings)
    assert torch.equal(found.log_likelihood, again.log_likelihood)
    with pytest.raises(CheckpointError):
        infer_topologies(other, checkpoint=tmp_path / "search", **settings)


@pytest.mark.parametrize(
    ("data", "settings", "error", "words"),
    [
        (Partition(SUBSETS), {"substitution": K80()}, SettingsError, "Partition"),
        (Partition(SUBSETS, AminoAcidModel("LG")), {}, SettingsError, "protein"),
        (
            Partition({"a": FOUR, "b": Alignment.from_sequences(dict.fromkeys("ABCX", "AC"))}),
            {},
            TreeError,
            "'X'.*",
        ),
        (
            Partition(FOUR.select(["A", "B", "C"]).partitioned({"a": [0], "b": range(1, 5)})),
            {},
            AlignmentError,
            "four taxa",
        ),
        (Alignment.from_sequences(dict.fromkeys("ABCD", "MK"), data_type="protein"), {}, SettingsError, "protein"),
    ],
)
def test_data_that_are_refused(data, settings, error, words):
    with pytest.raises(error, match=words):
        infer_topologies(data, **settings)


def test_too_few_taxa():
    with pytest.raises(AlignmentError, match="four taxa"):
        infer_topologies(Alignment.from_sequences({"A": "ACGT", "B": "ACGA", "C": "ACCA"}))


def test_moves_adapt_in_the_warm_up_alone(monkeypatch):
    efforts, plain = [], module.TopologySearch.advance

    def advance(self, state, iteration, generator):
        efforts.append(state.effort.tolist())
        return plain(self, state, iteration, generator)

    monkeypatch.setattr(module.TopologySearch, "advance", advance)
    infer_topologies(primates()[0], num_warmup=80, num_samples=20, num_temperatures=4, progress=False)
    warmer, independent = np.array(efforts).T
    assert (efforts[:24] == [[1.0, Moves().independent]] * 24) and len(set(map(tuple, efforts))) > 1
    assert efforts[80:] == [efforts[80]] * 20
    assert warmer.min() >= 0.2 and warmer.max() == 1.0
    assert independent.min() >= 0.1 * Moves().independent and independent.max() == Moves().independent


def test_runs_that_agree_end_early():
    found = infer_topologies(ALIGNMENT, stop=0.5, num_warmup=20, num_samples=4000, num_temperatures=4, progress=False)
    draws = found.samples[0].num_samples
    assert found.ending == "converged" and draws < 4000 and draws % 200 == 0
    assert float(found.split_effective_sizes.min()) >= 100


EXACT = {
    "five": lambda: exact_log_masses(ALIGNMENT)[1],
    "fixed_rates": lambda: exact_partition([[1.0, 2.0]])[1][0],
    "constrained": exact_constrained,
}


@pytest.mark.calibration
@pytest.mark.parametrize("search", EXACT)
def test_three_ways_agree(search, request, limit):
    run, masses = request.getfixturevalue(search), EXACT[search]()
    found = topology_evidence(run, num_steps=400, num_draws=4000, progress=False)
    exact = float(masses.logsumexp(0)) - math.log(len(masses))
    assert set(found.table.results) == {"bidirectional_ratio", "sum_over_topologies", "variational_importance_sampling"}
    # With all topologies in the search's sample, none is missing from the support of the last way.
    # The wrong number of topologies would be noticed: the constraint leaves 3 of 15, whose logarithms differ by 1.6.
    missing = len(run.sample.topologies) < len(masses)
    for z in list(found.table)[: 2 if missing else 3]:
        assert abs(z.log_evidence - exact) < limit(3) * z.standard_error < 0.5, z
    assert found.verdict.is_agreed and abs(found.log_evidence - exact) < 0.1


@pytest.mark.calibration
def test_constraints_that_leave_one_topology(limit):
    topologies, log_masses = exact_log_masses(FOUR)
    found = infer_topologies(FOUR, constraints=[["A", "B"]], num_warmup=50, num_samples=500, progress=False)
    evidence = topology_evidence(found, num_steps=200, num_draws=2000, progress=False)
    exact = float(log_masses[[topologies.to_newick(place) for place in range(3)].index("(A,B,(C,D));")])
    for z in evidence.table:
        assert abs(z.log_evidence - exact) < limit(3) * z.standard_error < 0.5, z


def test_free_rates_of_subsets_in_a_sum_and_in_variational_inference(limit, tmp_path):
    partition = Partition(SUBSETS, relative_rates=Dirichlet(torch.tensor([2.0, 2.0], dtype=torch.float64)))
    exact = float(exact_free_rates()[0].logsumexp(0))
    total = compare_topologies(partition, all_topologies(FOUR.taxa), num_draws=3000, progress=False).total_log_evidence
    rates = LearningRates(0.02, 0.02)
    settings = {"learning_rates": rates, "progress": False}
    fitted = variational_inference(partition, all_topologies(FOUR.taxa), num_steps=100, **settings)
    z = fitted.log_evidence(3000)
    for value, error in (total, (z.log_evidence, z.standard_error)):
        assert abs(value - exact) < limit(2) * math.hypot(error, 1e-4) < 0.5
    # A stored approximation keeps the partition and the constraints.
    support, constraints = [Tree.from_newick("((A,B),C,D);")], [["A", "B"]]
    fitted = variational_inference(partition, support, constraints=constraints, num_steps=2, **settings)
    fitted.save(tmp_path / "posterior")
    loaded = VariationalPosterior.load(tmp_path / "posterior")
    assert loaded.target.constraints == (("A", "B"),) and abs(loaded.target.log_topologies) < 1e-12
    assert torch.equal(loaded.weighted_trees(50).log_weight, fitted.weighted_trees(50).log_weight)


@pytest.mark.calibration
@pytest.mark.parametrize("data", ["partition", "constraints"])
def test_variational_inference_finds_the_support_of_a_partition_and_under_constraints(data, limit):
    settings = {"num_steps": 150, "learning_rates": LearningRates(0.02, 0.02), "progress": False}
    if data == "partition":
        masses = exact_partition([[1.0, 2.0]])[1][0]
        fitted = variational_inference(Partition(SUBSETS, relative_rates=[1.0, 2.0]), **settings)
    else:
        masses = exact_constrained()
        fitted = variational_inference(ALIGNMENT, constraints=[["A", "E"]], **settings)
        topologies = fitted.sample(300).topologies
        assert all(is_allowed(topologies.to_newick(place)) for place in range(len(topologies)))
    z = fitted.log_evidence(3000)
    assert abs(z.log_evidence - float(masses.logsumexp(0)) + math.log(3)) < limit() * z.standard_error < 0.5
    with pytest.raises(SettingsError, match="growth: neighbours of trees may violate"):
        variational_inference(ALIGNMENT, constraints=[["A", "E"]], growth=SupportGrowth(), **settings)


def test_trees_that_constraints_exclude_are_refused():
    trees = all_topologies(FOUR.taxa)
    for call in (compare_topologies, variational_inference):
        with pytest.raises(SettingsError, match="that on A, B excludes a tree"):
            call(FOUR, trees, constraints=[["A", "B"]], progress=False)
    for call in (compare_topologies, variational_inference):
        with pytest.raises(SettingsError, match="partition has its own"):
            call(Partition(SUBSETS), trees, substitution=K80(), progress=False)


def caterpillar(taxa):
    """Return a tree that joins the taxa one after the other."""
    first, *others, last, outermost = taxa
    for taxon in others:
        first = f"({first},{taxon})"
    return f"({first},{last},{outermost});"


def test_without_signal_no_split_may_be_frequent(tmp_path):
    """Four random sites of thirty taxa: the verdict and the report say that there is no such split."""
    random = np.random.default_rng(0)
    rows = {f"t{taxon}": "".join(random.choice(list("ACGT"), 4)) for taxon in range(30)}
    settings = {"num_warmup": 0, "num_samples": 24, "num_temperatures": 3, "path": "prior", "progress": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DataWarning)  # of identical rows
        found = infer_topologies(Alignment.from_sequences(rows), **settings)
    assert found.verdict.startswith("NOT CONVERGED (ASDSF 0.")

    # Caterpillars, each of which begins at another taxon: no split is in more than two of them.
    taxa = found.samples[0].taxa
    turned = [caterpillar([*taxa[place:], *taxa[:place]]) for place in range(24)]
    topologies = Topologies.from_trees([Tree.from_newick(text) for text in turned], taxa)
    runs = [TreeSample.from_topologies(topologies, branch_lengths=run.branch_lengths) for run in found.samples]
    without = replace(found, samples=tuple(runs))
    assert math.isnan(without.asdsf)
    assert "(no split reaches a frequency of 0.1, 48 trees, 24 topologies)" in without.verdict
    assert not any("split frequencies" in problem for problem in without.problems)
    write_topology_report(tmp_path / "report.html", without, title="random")
    assert "splits with a frequency of at least 0.1 in a run" in (tmp_path / "report.html").read_text()


def search_of(seed):
    numbers = {"num_warmup": 10, "num_samples": 40, "num_temperatures": 3}
    return infer_topologies(ALIGNMENT, substitution=K80(), seed=seed, progress=False, **numbers)


@pytest.mark.calibration
def test_searches_are_pooled(tmp_path):
    """Runs are joined and compared with each other; the evidence is the mean of the estimates."""
    searches = map_tasks(search_of, [3, 4, 5], progress=False)
    pooled = TopologyInference.pooled([pickle.loads(pickle.dumps(one)) for one in searches])
    runs = [run for one in searches for run in one.samples]
    assert pooled.asdsf == asdsf(runs).average and pooled.sample.num_samples == 240
    torch.testing.assert_close(pooled.parameters["kappa"][2:4], searches[1].parameters["kappa"], rtol=0, atol=0)
    series = torch.cat([one.parameters["kappa"] for one in searches])
    assert pooled.r_hat["kappa"] == float(r_hat(series[None])[0])
    values = np.array([one.log_evidence for one in searches])
    errors = np.array([one.evidence.standard_error for one in searches])
    z = pooled.evidence
    assert z.log_evidence == pytest.approx(values.mean(), rel=1e-12)
    by_errors, by_spread = np.sqrt((errors**2).sum()) / 3, values.std(ddof=1) / np.sqrt(3)
    assert z.standard_error == pytest.approx(max(by_errors, by_spread), rel=1e-12)
    assert z.num_evaluations == sum(one.evidence.num_evaluations for one in searches)
    assert int(pooled.exchange.round_trips.sum()) == sum(int(one.exchange.round_trips.sum()) for one in searches)
    assert pooled.settings["seed"] == [3, 4, 5] and pooled.settings["num_runs"] == 6
    write_topology_report(tmp_path / "report.html", pooled, title="pooled")


def test_searches_that_disagree_or_do_not_belong_together():
    one = search_of(0)
    far = replace(one, settings=one.settings | {"seed": 1}, log_ratio=one.log_ratio + 100)
    found = TopologyInference.pooled([one, far])
    assert "differ by more than their errors" in found.evidence.warnings[-1]
    assert found.evidence.standard_error >= 50 / math.sqrt(2)
    for others, words in [
        ([], "two results"),
        ([found], "none of them pooled"),
        ([one], "same seed"),
        ([replace(one, settings=one.settings | {"path": "prior"})], "differ in path"),
        ([replace(one, log_prior=one.log_prior[:, :9])], "numbers of draws"),
    ]:
        with pytest.raises(SettingsError, match=words):
            TopologyInference.pooled([one, *others])


def test_arviz(five):
    data = five.to_arviz()
    assert data.posterior["tree_length"].shape == (2, 2500)
    assert "lp" in data.sample_stats
