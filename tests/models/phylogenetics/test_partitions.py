"""Partitions: subsets of sites with their own models on one tree."""

import itertools
import pickle

import pyro
import pytest
import torch
from pyro import poutine
from pyro.distributions import Beta, Dirichlet, Exponential, Gamma, LogNormal, Uniform

import bayeskit as bk
from bayeskit.errors import SettingsError, ShapeError, TreeError
from bayeskit.inference import evidence
from bayeskit.models.phylogenetics import (
    GTR,
    HKY85,
    JC69,
    K80,
    Alignment,
    GammaDirichlet,
    GammaRates,
    InvariantSites,
    Partition,
    PartitionedForestLikelihood,
    PartitionedTreeModel,
    Topologies,
    Tree,
    TreeModel,
    primates,
)

FIVE = {
    "t0": "CTAATCTCTAACATCAGCGACCGAAAGATTGATTCCTGGG",
    "t1": "TTATTAGCTAACATCAGCCGGCTATAGACGGATTAGTGAG",
    "t2": "CAAATCTCTAACATCAGAGATCGGTAGACGGCTTCCAGAC",
    "t3": "CTAATCTCTAAGATCCGCCTGCGATAGACGGAGTCTTGAG",
    "t4": "AGAATCACTAGCATCAGCGAGTGATAGACGGATTCCTGAG",
}
SIX = {
    "t0": "ATCAGTATCTGCTTCTTTGAAACTTGAGATTGG",
    "t1": "ATCAGTGTACGCCTCTTTGAAACATGTGTAGCG",
    "t2": "ACCATTGTACGTTTCTTTGTTACTTGGGTTTGA",
    "t3": "ATCGGTGTATGGCTCTTTAGAATCTGAGTTTGG",
    "t4": "ATCAATGTATTCTTTCTTGCCACTTGAGGTTGG",
    "t5": "ATCAGAGTGTGTTAGTTTGCAACTTGAGTGTGT",
}
MODELS = [
    (HKY85(2.5, [0.3, 0.2, 0.15, 0.35]), GammaRates(0.5)),
    (GTR([1.2, 3.1, 0.7, 0.9, 4.2, 1.0], [0.22, 0.28, 0.27, 0.23]), InvariantSites(0.2, GammaRates(0.8))),
    (JC69(), None),
]
# Alignment, tree, subsets, and of IQ-TREE 2.0.7 (-te, -blfix): the log-likelihood with equal rates (-q); and with the
# relative rates that it found (-p), these rates, the factor of all lengths, and the log-likelihood.
IQTREE = {
    "five": (
        Alignment.from_sequences(FIVE),
        Tree.from_newick("(t0:0.1,(t1:0.2,t2:0.05):0.15,(t3:0.3,t4:0.12):0.08);"),
        "a = 1-40\\2\nb = 2-40\\2\n",
        -203.0359,
        ([0.9791683886, 1.020831611], 0.1668770122 / 0.1, -202.1760),
    ),
    "six": (
        Alignment.from_sequences(SIX),
        Tree.from_newick("(t0:0.1,(t1:0.2,(t2:0.05,t5:0.4):0.07):0.15,(t3:0.3,t4:0.12):0.08);"),
        "a = 1-33\\3\nb = 2-33\\3\nc = 3-33\\3\n",
        -196.2318,
        ([0.4214111186, 1.56588918, 1.012699702], 0.1473672612 / 0.1, -193.9216),
    ),
    "primates": (
        primates()[0],
        Tree.from_newick(primates()[1].to_newick(torch.linspace(0.02, 0.2, 21, dtype=torch.float64).tolist())),
        "a = 1-457\nb = 458-660\nc = 661-898\n",
        -6483.1686,
        ([1.020379969, 0.6496585599, 1.259687675], 0.0794153710 / 0.119, -6442.8671),
    ),
}


def subsets_of(alignment, text, tmp_path):
    path = tmp_path / "genes.txt"
    path.write_text(text)
    return alignment.partitioned(path)


def models_of(subsets):
    substitution = {name: model for name, (model, _) in zip(subsets, MODELS, strict=False)}
    return substitution, {name: rates for name, (_, rates) in zip(subsets, MODELS, strict=False)}


@pytest.mark.parametrize("case", IQTREE)
def test_likelihood_against_iqtree(tmp_path, case):
    alignment, tree, text, equal, (rates, factor, proportional) = IQTREE[case]
    subsets = subsets_of(alignment, text, tmp_path)
    model = PartitionedTreeModel(Partition(subsets, *models_of(subsets)), tree)
    assert abs(model.log_likelihood(tree.branch_lengths).item() - equal) < 1e-4
    model = PartitionedTreeModel(Partition(subsets, *models_of(subsets), relative_rates=rates), tree)
    assert abs(model.log_likelihood(factor * tree.branch_lengths).item() - proportional) < 1e-4
    # A mutation: the rates are exchanged.
    wrong = PartitionedTreeModel(Partition(subsets, *models_of(subsets), relative_rates=rates[::-1]), tree)
    assert abs(wrong.log_likelihood(factor * tree.branch_lengths).item() - proportional) > 1e-3


def brute_force(alignment: Alignment, tree: Tree, lengths, substitution, categories) -> float:
    """Sum over the states of all inner nodes, the rates, and invariant sites."""
    like = torch.empty(0, dtype=torch.float64)
    pi, rates = substitution.frequencies(like), substitution.rate_matrix(like)
    row = {taxon: place for place, taxon in enumerate(alignment.taxa)}
    parent = {child: tree.num_taxa + place for place, below in enumerate(tree.children) for child in below}
    root = tree.num_taxa + len(tree.children) - 1
    total = 0.0
    for pattern, weight in zip(alignment.patterns.T.tolist(), alignment.weights.tolist(), strict=True):
        allowed = [[base for base in range(4) if pattern[row[taxon]] >> base & 1] for taxon in tree.taxa]
        site = 0.0
        for rate, probability in zip(categories.rates, categories.weights, strict=True):
            moves = torch.matrix_exp(rates * (rate * lengths)[:, None, None])
            for states in itertools.product(*allowed, *[range(4)] * len(tree.children)):
                path = [moves[child, states[above], states[child]] for child, above in parent.items()]
                site += float(probability * pi[states[root]] * torch.stack(path).prod())
        if categories.invariant is not None:
            constant = [base for base in range(4) if all(base in bases for bases in allowed)]
            site += float(categories.invariant * sum(pi[base] for base in constant))
        total += weight * torch.tensor(site, dtype=torch.float64).log().item()
    return total


def test_likelihood_against_brute_force():
    alignment = Alignment.from_sequences({"A": "ACGTRA", "B": "ACAT-A", "C": "GCGAAA", "D": "GTGAAC"})
    tree = Tree.from_newick("((A:0.1,B:0.3):0.2,C:0.15,D:0.4);")
    subsets = alignment.partitioned({"x": [0, 2], "y": [1, 3], "z": [5, 4]})
    substitution, site_rates = models_of(subsets)
    site_rates = {"x": GammaRates(0.5, num_categories=2), "y": InvariantSites(0.2), "z": None}
    rates = [0.5, 2.0, 0.7]
    partition = Partition(subsets, substitution, site_rates, relative_rates=rates)
    like = torch.empty(0, dtype=torch.float64)
    expected = 0.0
    for rate, name in zip(rates, subsets, strict=True):
        from_rates = site_rates[name] or GammaRates(1.0, num_categories=1)
        lengths = rate * tree.branch_lengths
        expected += brute_force(subsets[name], tree, lengths, substitution[name], from_rates.categories(like))
    model = PartitionedTreeModel(partition, tree)
    assert model.log_likelihood(tree.branch_lengths).item() == pytest.approx(expected, rel=1e-12)
    terms, weights = model.factor_terms({"branch_lengths": tree.branch_lengths})["alignment"]
    assert (terms * weights).sum().item() == pytest.approx(expected, rel=1e-12)


def test_one_subset_is_a_tree_model():
    alignment, tree = primates()
    lengths = torch.linspace(0.02, 0.2, 21, dtype=torch.float64)
    plain = TreeModel(alignment, tree, K80(3.0), site_rates=GammaRates(0.7)).log_likelihood(lengths)
    partition = Partition({"all": alignment}, K80(3.0), GammaRates(0.7))
    assert torch.equal(PartitionedTreeModel(partition, tree).log_likelihood(lengths), plain)
    # The same model in all subsets does not see the partition.
    subsets = alignment.partitioned({"odd": range(0, 898, 2), "even": range(1, 898, 2)})
    divided = PartitionedTreeModel(Partition(subsets, K80(3.0), GammaRates(0.7)), tree).log_likelihood(lengths)
    torch.testing.assert_close(divided, plain, rtol=1e-13, atol=0)


def test_forest_agrees_with_tree_models():
    alignment = Alignment.from_sequences(SIX)
    subsets = alignment.partitioned({"a": range(0, 33, 2), "b": range(1, 33, 2)})
    prior = Dirichlet(torch.tensor([2.0, 3.0], dtype=torch.float64))
    partition = Partition(subsets, HKY85(), {"a": GammaRates()}, linked=["kappa"], relative_rates=prior)
    trees = [Tree.from_newick(text) for text in ("(t0,(t1,(t2,t5)),(t3,t4));", "(t0,t3,((t1,t4),(t2,t5)));")]
    topologies = Topologies.from_trees(trees)
    generator = torch.Generator().manual_seed(0)
    lengths = 0.3 * torch.rand(5, 2, topologies.num_edges, dtype=torch.float64, generator=generator)
    values = {name: own.sample((5, 2)) for name, own in partition.priors(torch.empty(0, dtype=torch.float64)).items()}
    lengths.requires_grad_()
    found = PartitionedForestLikelihood(partition).log_likelihood(topologies, lengths, **values)
    for place in range(2):
        tree = topologies.tree(place)
        model = PartitionedTreeModel(partition, tree)
        # In the order of the tree's edges.
        own = {name: value[:, place] for name, value in values.items()}
        order = topologies.tree_edges(place)
        expected = model.log_likelihood(lengths[:, place][:, order], **own)
        torch.testing.assert_close(found[:, place], expected, rtol=1e-12, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), lengths)
    assert bool(gradient.isfinite().all())


def test_rates_have_mean_one_over_sites():
    subsets = Alignment.from_sequences(SIX).partitioned({"a": range(30), "b": range(30, 33)})
    partition = Partition(subsets, relative_rates=Dirichlet(torch.ones(2)))
    shares = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    rates = partition.rates({"rate_shares": shares}, shares)
    torch.testing.assert_close(rates, torch.tensor([[0.55, 5.5], [0.99, 1.1]], dtype=torch.float64))
    torch.testing.assert_close(rates @ torch.tensor([30.0, 3.0], dtype=torch.float64) / 33, torch.ones(2).double())


ALIGNMENT = Alignment.from_sequences({"A": "ACGTCA", "B": "ACGACA", "C": "AC-AGT", "D": "ATGACT"})
TREE = Tree.from_newick("((A,B),C,D);")
THREE = ALIGNMENT.partitioned({"x": [0, 1], "y": [2, 3], "z": [4, 5]})


def test_names_of_parameters():
    like = torch.empty(0, dtype=torch.float64)

    def names(**settings):
        return sorted(Partition(THREE, {"x": HKY85(), "y": HKY85(), "z": K80()}, **settings).priors(like))

    frequencies = ["base_frequencies_x", "base_frequencies_y"]
    assert names() == [*frequencies, "kappa_x", "kappa_y", "kappa_z"]
    assert names(linked=["kappa"]) == [*frequencies, "kappa"]
    assert names(linked=["kappa", "base_frequencies"]) == ["base_frequencies", "kappa"]
    assert names(linked={"kappa": [("z", "x")]}) == [*frequencies, "kappa_x_z", "kappa_y"]
    assert names(site_rates={"z": GammaRates()}, linked=["kappa"]) == [*frequencies, "kappa", "shape_z"]
    assert Partition(THREE, K80(), linked={"kappa": [("z", "x")]}).linked == {"kappa": (("x", "z"),)}


def test_linked_parameters_have_one_value():
    values = {"kappa": torch.tensor(3.0, dtype=torch.float64), "kappa_x": torch.tensor(5.0, dtype=torch.float64)}
    lengths = torch.full((5,), 0.1, dtype=torch.float64)
    linked = PartitionedTreeModel(Partition(THREE, K80(), linked=["kappa"]), TREE)
    fixed = PartitionedTreeModel(Partition(THREE, K80(3.0)), TREE)
    assert torch.equal(linked.log_likelihood(lengths, kappa=values["kappa"]), fixed.log_likelihood(lengths))
    with pytest.raises(
        SettingsError, match=r"parameters are \['kappa'\], but values are given for \['kappa', 'kappa_x"
    ):
        linked.log_likelihood(lengths, **values)
    with pytest.raises(SettingsError, match=r"given for \[\]"):
        PartitionedForestLikelihood(linked.partition).log_likelihood(Topologies.from_trees([TREE]), lengths[None])


def test_groups_of_subsets_have_one_rate():
    linked = {"relative_rates": [("z", "x")]}
    two = Partition(THREE, linked=linked, relative_rates=[0.5, 2.0])
    assert two.rate_groups == (("x", "z"), ("y",)) and two.length_groups == (("x",), ("y",), ("z",))
    lengths = torch.linspace(0.1, 0.3, 5, dtype=torch.float64)
    three = Partition(THREE, relative_rates=[0.5, 2.0, 0.5])
    found, expected = (PartitionedTreeModel(one, TREE).log_likelihood(lengths) for one in (two, three))
    assert torch.equal(found, expected)
    wrong = PartitionedTreeModel(Partition(THREE, relative_rates=[0.5, 0.5, 2.0]), TREE).log_likelihood(lengths)
    assert abs(float(wrong - expected)) > 1e-3
    prior = Dirichlet(torch.ones(2, dtype=torch.float64))
    free = Partition(THREE, linked=linked, relative_rates=prior)
    shares = torch.tensor([[0.5, 0.5], [0.9, 0.1]], dtype=torch.float64)
    rates = free.rates({"rate_shares": shares}, shares)
    torch.testing.assert_close(rates, torch.tensor([[0.75, 1.5, 0.75], [1.35, 0.3, 1.35]], dtype=torch.float64))
    torch.testing.assert_close(rates.mean(-1), torch.ones(2, dtype=torch.float64))  # of two sites each
    model = PartitionedTreeModel(free, TREE)
    assert model.element_names["rate_shares"] == ("x_z", "y")
    trace = poutine.trace(model).get_trace()
    assert trace.nodes["relative_rates"]["value"].shape == (3,)
    with pytest.raises(ShapeError, match=r"relative_rates: shape \(3,\) is not \(\*batch, 2\)"):
        Partition(THREE, linked=linked, relative_rates=[1.0, 1.0, 1.0])


def test_groups_of_subsets_have_the_same_lengths_of_their_own():
    partition = Partition(THREE, {"y": K80(3.0)}, linked={"branch_lengths": [("x", "z")]})
    assert partition.length_groups == (("x", "z"), ("y",)) and partition.length_indices == [0, 1, 0]
    model = PartitionedTreeModel(partition, TREE, separate_branch_lengths=True)
    every = PartitionedTreeModel(Partition(THREE, {"y": K80(3.0)}), TREE, separate_branch_lengths=True)
    lengths = torch.linspace(0.05, 0.5, 10, dtype=torch.float64).reshape(2, 5)
    assert torch.equal(model.log_likelihood(lengths), every.log_likelihood(lengths[[0, 1, 0]]))
    assert poutine.trace(model).get_trace().nodes["branch_lengths"]["value"].shape == (2, 5)
    topologies = Topologies.from_trees([TREE])
    order = topologies.tree_edges(0)
    forest = PartitionedForestLikelihood(partition, separate_branch_lengths=True)
    found = forest.log_likelihood(topologies, lengths[None])[0]
    torch.testing.assert_close(found, model.log_likelihood(lengths[:, order]), rtol=1e-12, atol=0)
    with pytest.raises(ShapeError, match=r"give shape \(\*batch, 2, 5\)"):
        model.log_likelihood(lengths[[0, 1, 0]])
    # Without lengths of their own, all subsets have the same.
    assert PartitionedTreeModel(partition, TREE).log_likelihood(lengths[0]).shape == ()


def test_characters_of_one_matrix_are_linked():
    rows = {"A": "0010", "B": "0111", "C": "1020", "D": "1?21"}
    characters = Partition.of_characters(Alignment.from_sequences(rows, data_type="standard"), site_rates=GammaRates())
    groups = (("states_2", "states_3"),)
    assert characters.rate_groups == characters.length_groups == groups
    assert characters.linked == dict.fromkeys(["shape", "relative_rates", "branch_lengths"], groups)
    subsets, models = {"bases": ALIGNMENT} | characters.subsets, {"bases": K80()} | characters.substitution
    linked = {name: characters.linked[name] for name in ("relative_rates", "branch_lengths")}
    beside = Partition(subsets, models, linked=linked, relative_rates=[1.0, 0.5])
    assert beside.rate_groups == (("bases",), *groups)


def normal(loc):
    return LogNormal(torch.tensor(loc), torch.tensor(1.0))


WRONG = {
    "no subsets": (lambda: Partition({}), "are not subsets of sites"),
    "an alignment": (lambda: Partition(ALIGNMENT), "are not subsets of sites"),
    "unknown subset": (lambda: Partition(THREE, {"w": JC69()}), "substitution: there is no subset 'w'.*x, y, z"),
    "linked text": (lambda: Partition(THREE, K80(), linked="kappa"), r"linked: 'kappa' is one name.*\['kappa'\]"),
    "linked, not sampled": (lambda: Partition(THREE, K80(2.0), linked=["kappa"]), "no subset samples 'kappa'"),
    "rates linked twice": (
        lambda: Partition(THREE, linked={"relative_rates": [("x", "y"), ("y", "z")]}),
        "'relative_rates' is not sampled in 'y', or this subset is in two groups",
    ),
    "lengths linked elsewhere": (
        lambda: Partition(THREE, linked={"branch_lengths": [("x", "w")]}),
        "'branch_lengths' is not sampled in 'w'",
    ),
    "linked twice": (
        lambda: Partition(THREE, K80(), linked={"kappa": [("x", "y"), ("y", "z")]}),
        "'kappa' is not sampled in 'y', or this subset is in two groups",
    ),
    "linked elsewhere": (lambda: Partition(THREE, K80(), linked={"kappa": [("x", "w")]}), "is not sampled in 'w'"),
    "other priors": (
        lambda: Partition(THREE, {"x": K80(normal(0.0)), "y": K80(normal(1.0)), "z": K80()}, linked=["kappa"]),
        "'kappa' has different priors in 'x' and 'y'",
    ),
    "other kinds of priors": (
        lambda: Partition(
            THREE, {"x": K80(Exponential(torch.tensor(1.0)))}, {"y": GammaRates()}, linked={"shape": [("x", "y")]}
        ),
        "'shape' is not sampled in 'x'",
    ),
    "clash": (
        lambda: Partition(
            ALIGNMENT.partitioned({"y_z": [0, 1], "y": [2, 3], "z": [4, 5]}), K80(), linked={"kappa": [("y", "z")]}
        ),
        "Two parameters would be called 'kappa_y_z'",
    ),
    "negative rates": (lambda: Partition(THREE, relative_rates=[1.0, -1.0, 1.0]), "does not lie above 0"),
    "a prior of rates": (
        lambda: Partition(THREE, relative_rates=Gamma(torch.ones(3), 1.0).to_event(1)),
        "is not a prior of shares.*Dirichlet",
    ),
    "lengths and rates": (
        lambda: PartitionedTreeModel(Partition(THREE, relative_rates=[1, 1, 1.0]), TREE, separate_branch_lengths=True),
        "relative_rates are not supported beside",
    ),
    "lengths and rates of a forest": (
        lambda: PartitionedForestLikelihood(Partition(THREE, relative_rates=[1, 1, 1.0]), separate_branch_lengths=True),
        "relative_rates are not supported beside",
    ),
    "subsets as partition": (lambda: PartitionedTreeModel(THREE, TREE), "partition: dict has the wrong type"),
    "an alignment as partition": (lambda: PartitionedForestLikelihood(ALIGNMENT), "partition: Alignment has the wrong"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_settings(case):
    call, message = WRONG[case]
    with pytest.raises(SettingsError, match=f"{message}.*" if "Two" in message else message) as error:
        call()
    assert "Remedy" in str(error.value)


def test_shapes_are_checked():
    with pytest.raises(ShapeError, match=r"relative_rates: shape \(2,\) is not \(\*batch, 3\)"):
        Partition(THREE, relative_rates=[1.0, 1.0])
    model = PartitionedTreeModel(Partition(THREE), TREE)
    apart = PartitionedTreeModel(Partition(THREE), TREE, separate_branch_lengths=True)
    with pytest.raises(ShapeError, match=r"give shape \(\*batch, 5\)"):
        model.log_likelihood(torch.ones(4))
    with pytest.raises(ShapeError, match=r"give shape \(\*batch, 3, 5\)"):
        apart.log_likelihood(torch.ones(5))
    with pytest.raises(ShapeError, match="branch_lengths: list is not a tensor"):
        model.log_likelihood([0.1] * 5)
    with pytest.raises(TreeError, match="only in the tree: 'E'"):
        PartitionedTreeModel(Partition(THREE), Tree.from_newick("((A,B),C,E);"))


def test_equal_priors_may_be_linked():
    one, other = torch.tensor(1.0), torch.tensor(2.0)
    for make in (lambda: LogNormal(one, other), lambda: Gamma(other, one), lambda: Exponential(other)):
        Partition(THREE, {name: K80(make()) for name in THREE}, linked=["kappa"])
    rates = {name: InvariantSites(Uniform(0.0, 0.5), GammaRates()) for name in THREE}
    assert Partition(THREE, None, rates, linked=["proportion", "shape"]).linked["shape"] == (("x", "y", "z"),)
    rates |= {"x": InvariantSites(Beta(one, one), GammaRates())}
    with pytest.raises(SettingsError, match="different priors"):
        Partition(THREE, None, rates, linked=["proportion"])


@pytest.mark.calibration
@pytest.mark.parametrize("separate", [False, True])
def test_as_a_target(separate):
    rates = None if separate else Dirichlet(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    partition = Partition(THREE, HKY85(), {"x": GammaRates()}, linked=["kappa"], relative_rates=rates)
    model = PartitionedTreeModel(partition, TREE, GammaDirichlet.for_tree(TREE), separate_branch_lengths=separate)
    with pyro.validation_enabled(True):
        trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    lengths = trace.nodes["branch_lengths"]["value"]
    assert lengths.shape == ((3, 5) if separate else (5,))
    expected = GammaDirichlet.for_tree(TREE).log_prob(lengths).sum()
    torch.testing.assert_close(trace.nodes["branch_lengths"]["log_prob"], expected)
    sampled = {name: site["value"] for name, site in trace.nodes.items() if name in model.priors}
    torch.testing.assert_close(trace.nodes["alignment"]["log_prob"], model.log_likelihood(lengths, **sampled))
    target = bk.Target.from_pyro(model, compile=False)
    u = target.sample_prior(4, seed=0)
    value, gradient = target.value_and_grad(u)
    step = torch.zeros_like(u)
    step[:, 0] = 1e-5
    slope = (target.log_density(u + step) - target.log_density(u - step)) / 2e-5
    torch.testing.assert_close(gradient[:, 0], slope, rtol=1e-4, atol=1e-4)
    copy = pickle.loads(pickle.dumps(model))
    values = target.constrain(u)
    parameters = {name: values[name] for name in model.priors}
    found = copy.log_likelihood(values["branch_lengths"], **parameters)
    torch.testing.assert_close(found, target.log_likelihood(u), rtol=1e-12, atol=0)
    terms, weights = model.factor_terms(values)["alignment"]
    torch.testing.assert_close(terms @ weights, found, rtol=1e-12, atol=0)


@pytest.mark.calibration
def test_evidence_of_separate_lengths_is_a_product(limit):
    """Subsets that share nothing but the topology are independent."""
    subsets = ALIGNMENT.partitioned({"x": [0, 1, 2], "y": [3, 4, 5]})
    model = PartitionedTreeModel(Partition(subsets), TREE, separate_branch_lengths=True)

    def log_evidence(model):
        target = bk.Target.from_pyro(model, compile=False)
        return evidence.naive_monte_carlo(target, num_draws=20_000, seed=1)

    joint = log_evidence(model)
    parts = [log_evidence(TreeModel(alignment, TREE)) for alignment in subsets.values()]
    error = sum(part.standard_error**2 for part in [joint, *parts]) ** 0.5
    assert abs(joint.log_evidence - sum(part.log_evidence for part in parts)) < limit() * error
    assert error < 0.05
