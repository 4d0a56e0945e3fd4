"""The correction for constant sites that were left out: against IQ-TREE, and as a distribution over variable sites."""

import itertools
import math
from dataclasses import replace

import pytest
import torch

import bayeskit as bk
from bayeskit.errors import AlignmentError, DataWarning, SettingsError
from bayeskit.models.phylogenetics import (
    GTR,
    HKY85,
    JC69,
    Alignment,
    Binary,
    ForestLikelihood,
    FreeRates,
    GammaRates,
    InvariantSites,
    Mk,
    OrderedMk,
    SubstitutionModel,
    TimeTreeModel,
    Topologies,
    Tree,
    TreeModel,
    VariableSites,
    all_topologies,
    parse_substitution,
    standard_characters,
)
from bayeskit.models.phylogenetics._variable_sites import sites_left_out

DOUBLE = torch.float64
TREE = Tree.from_newick("((a:0.1,b:0.2):0.05,(c:0.3,d:0.15):0.12,(e:0.4,f:0.07):0.2);")
CHARACTERS = """221001101210122221201020220201211120201212002110020102120022
    001001101200122220201022220200212110200212001010020102121022
    201001101220020211201221121200201100002102001110200211121020
    221001100001120201201022222220201102000202102110020211121020
    211201100210122201201120010222002100200212202111020212102202
    011001110200022021101220011220201100200112002221020012110021"""
BASES = """GATTACAGGTTCAGCATCGA GATTCCAGATTCGGCATAGA GGTTACAAGTCCAGTATCGC
    AATTACTGGTTTAGCACCGA GATCACAGGCTCAGCGTCAA CATTAGAGTTTAAACATTGA"""


def variable(rows: str, data_type: str) -> Alignment:
    """The columns that are not constant."""
    columns = [column for column in zip(*rows.split(), strict=True) if len(set(column)) > 1]
    return Alignment.from_sequences(
        {taxon: "".join(row) for taxon, row in zip("abcdef", zip(*columns, strict=True), strict=True)},
        data_type=data_type,
    )


GTR_OF_THE_RUN = GTR([1.5, 3.0, 0.7, 0.9, 4.0, 1.0], [0.3, 0.25, 0.15, 0.3])
#: Log-likelihoods of IQ-TREE 2.0.7 with `-te TREE -blfix` and the models MK+ASC, MK+G4{0.6}+ASC and
#: GTR{1.5,3.0,0.7,0.9,4.0}+F{0.3,0.25,0.15,0.3}+ASC.
OF_IQTREE = {
    "MK+ASC": (CHARACTERS, "standard", Mk(3), None, -266.2604),
    "MK+G4+ASC": (CHARACTERS, "standard", Mk(3), GammaRates(0.6), -265.3599),
    "GTR+ASC": (BASES, "DNA", GTR_OF_THE_RUN, None, -105.8446),
}


@pytest.mark.parametrize("name", OF_IQTREE)
def test_as_in_iqtree(name, back_end):
    rows, data_type, substitution, rates, expected = OF_IQTREE[name]
    model = TreeModel(variable(rows, data_type), TREE, VariableSites(substitution), site_rates=rates)
    assert float(model.log_likelihood(TREE.branch_lengths)) == pytest.approx(expected, abs=1e-4)
    by_pattern = model.pattern_log_likelihoods(TREE.branch_lengths) @ model.alignment.weights.double()
    assert float(by_pattern) == pytest.approx(expected, abs=1e-4)


MODELS = {
    "Mk2": (Mk(2), "01", None),
    "Mk3": (Mk(3), "012", FreeRates.of([0.2, 1.8], [0.5, 0.5])),
    "JC69": (JC69(), "ACGT", GammaRates(0.4)),
    "HKY85": (HKY85(3.0, [0.4, 0.3, 0.2, 0.1]), "ACGT", GammaRates(0.4)),
}


@pytest.mark.parametrize("corrected", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_the_probabilities_of_all_variable_sites_sum_to_one(name, corrected, back_end):
    """The mutation: without the correction they sum to less."""
    substitution, states, rates = MODELS[name]
    sites = [site for site in itertools.product(states, repeat=4) if len(set(site)) > 1]
    rows = {taxon: "".join(row) for taxon, row in zip("abcd", zip(*sites, strict=True), strict=True)}
    alignment = Alignment.from_sequences(rows, data_type="DNA" if "A" in states else "standard")
    tree = Tree.from_newick("((a,b),c,d);")
    lengths = torch.tensor([[0.1, 0.3, 0.05, 0.6, 0.2], [1e-3] * 5, [9.0] * 5], dtype=DOUBLE)
    model = TreeModel(alignment, tree, VariableSites(substitution) if corrected else substitution, site_rates=rates)
    total = model.pattern_log_likelihoods(lengths).exp().sum(-1)
    assert ((total - 1).abs() < 1e-12).all() == corrected
    assert (total < 0.99).all() != corrected
    whole = (model.pattern_log_likelihoods(lengths) * alignment.weights).sum(-1)
    torch.testing.assert_close(model.log_likelihood(lengths), whole, rtol=1e-12, atol=0)


CODINGS = {
    "informative, two states": (Mk(2), "informative", 4),
    "informative, three states": (Mk(3), "informative", 5),
    "informative, ordered": (OrderedMk(3), "informative", 4),
    "informative, as many states as taxa": (Mk(4), "informative", 4),
    "noabsence": (Binary([0.3, 0.7]), "noabsence", 4),
    "noabsence, three states": (OrderedMk(3), "noabsence", 4),
}


@pytest.mark.parametrize("name", CODINGS)
def test_the_probabilities_of_all_sites_of_a_coding_sum_to_one(name, back_end):
    substitution, coding, number = CODINGS[name]
    taxa, kind = "abcde"[:number], standard_characters(substitution.num_states)
    sites = list(zip(*itertools.product(kind.states, repeat=number), strict=True))
    every = Alignment.from_sequences({t: "".join(row) for t, row in zip(taxa, sites, strict=True)}, data_type=kind)
    out = sites_left_out(every, coding)
    alignment = every.select_sites([site for site in range(every.num_sites) if site not in set(out.tolist())])
    tree = Tree.from_newick("((a,b),c,d);" if number == 4 else "((a,b),(c,e),d);")
    lengths = torch.tensor([0.1, 0.3, 0.05, 0.6, 0.2, 0.4, 0.7][: 2 * number - 3], dtype=DOUBLE)
    model = TreeModel(alignment, tree, VariableSites(substitution, coding))
    assert float(model.pattern_log_likelihoods(lengths).exp().sum()) == pytest.approx(1, abs=1e-12)
    whole = float((model.pattern_log_likelihoods(lengths) * alignment.weights).sum())
    topologies = Topologies.from_trees([tree])
    of_forest = ForestLikelihood(alignment, model.substitution).log_likelihood(
        topologies, topologies.branch_lengths_of([replace(tree, branch_lengths=lengths)])
    )
    assert float(model.log_likelihood(lengths)) == pytest.approx(whole, rel=1e-12)
    assert float(of_forest) == pytest.approx(whole, rel=1e-12)
    # The mutation: without the correction they sum to less.
    assert float(TreeModel(alignment, tree, substitution).pattern_log_likelihoods(lengths).exp().sum()) < 0.999


#: Log-likelihoods of MrBayes 3.2.7a at branch lengths of 0.1, by `lset coding` and, for order, `ctype ordered`.
OF_MRBAYES = [
    ({"a": "0", "b": "1", "c": "2", "d": "0"}, OrderedMk(3), -8.915131),
    ({"a": "0", "b": "1", "c": "3", "d": "0"}, OrderedMk(4), -13.02753),
    ({"a": "01", "b": "10", "c": "00", "d": "01"}, VariableSites(Mk(2)), -6.409235),
    ({"a": "0", "b": "0", "c": "1", "d": "1"}, VariableSites(Mk(2), "informative"), -1.004677),
    ({"a": "010", "b": "101", "c": "000", "d": "010"}, VariableSites(Binary([0.5, 0.5]), "noabsence"), -10.61022),
    ({"a": "010", "b": "101", "c": "000", "d": "010"}, Binary([0.3, 0.7]), -12.28936),
]


@pytest.mark.parametrize(("rows", "substitution", "expected"), OF_MRBAYES)
def test_as_in_mrbayes(rows, substitution, expected):
    tree = Tree.from_newick("(a:0.1,b:0.1,(c:0.1,d:0.1):0.1);")
    alignment = Alignment.from_sequences(rows, data_type=standard_characters(substitution.num_states))
    found = TreeModel(alignment, tree, substitution).log_likelihood(tree.branch_lengths)
    assert float(found) == pytest.approx(expected, abs=1e-5)


def test_codings_that_are_refused():
    with pytest.raises(SettingsError, match="coding='some' is unknown"):
        VariableSites(Mk(2), "some")
    with pytest.raises(SettingsError, match="more than 4096"):
        VariableSites(Mk(5), "informative").left_out(40)


@pytest.mark.parametrize("substitution", [Mk(3), None], ids=["Mk", "free frequencies"])
def test_many_topologies_and_gradients(substitution):
    if substitution is None:
        alignment, substitution, parameters = variable(BASES, "DNA"), GTR(exchangeabilities=[1.0] * 6), 4
    else:
        alignment, parameters = variable(CHARACTERS, "standard"), 0
    topologies = all_topologies("abcdef")[::20]
    generator = torch.Generator().manual_seed(0)
    lengths = torch.rand(2, len(topologies), 9, generator=generator, dtype=DOUBLE, requires_grad=True)
    values = {"base_frequencies": torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=DOUBLE)} if parameters else {}
    corrected = VariableSites(substitution)
    found = ForestLikelihood(alignment, corrected).log_likelihood(topologies, lengths, **values)
    for place in range(len(topologies)):
        tree = topologies.tree(place)
        model = TreeModel(alignment, tree, corrected)
        one = lengths[:, place][:, topologies.tree_edges(place)]
        torch.testing.assert_close(found[:, place], model.log_likelihood(one, **values), rtol=1e-12, atol=0)
    slow = ForestLikelihood(alignment, corrected, compile=False).log_likelihood(topologies, lengths, **values)
    torch.testing.assert_close(found, slow, rtol=1e-12, atol=0)
    (slope,) = torch.autograd.grad(found.sum(), lengths)
    step = torch.zeros_like(lengths)
    step[0, 1, 3] = 1e-5
    with torch.no_grad():
        up, down = (
            ForestLikelihood(alignment, corrected).log_likelihood(topologies, lengths + sign * step, **values)
            for sign in (1, -1)
        )
    assert float(slope[0, 1, 3]) == pytest.approx(float((up - down).sum()) / 2e-5, rel=1e-6)


def test_trees_without_length_give_no_nan():
    """The probability that a site varies is then zero, and so is the likelihood."""
    alignment, tree = variable(CHARACTERS, "standard"), Tree.from_newick("((a,b),(c,d),(e,f));")
    model = TreeModel(alignment, tree, VariableSites(Mk(3)))
    short = torch.tensor([0.0, 1e-300, 1e-20, 1e-9, 1e-6], dtype=DOUBLE)[:, None].expand(5, 9)
    found = model.log_likelihood(short)
    assert not found.isnan().any() and found[0] == -math.inf and (found < 0).all()
    assert model.log_likelihood(torch.full((9,), -1.0, dtype=DOUBLE)).isnan()


def test_lengths_are_shorter_than_without_the_correction():
    """A posterior whose target is traced and batched."""
    alignment, tree = variable(CHARACTERS, "standard"), Tree.from_newick("((a,b),(c,d),(e,f));")
    totals = []
    for substitution in (Mk(3), VariableSites(Mk(3))):
        target = bk.Target.from_pyro(TreeModel(alignment, tree, substitution))
        u = torch.full((3, 9), math.log(0.1), dtype=DOUBLE)
        value, gradient = target.value_and_grad(u)
        model = TreeModel(alignment, tree, substitution)
        assert float(value[0] - target.log_prior(u)[0]) == pytest.approx(float(model.log_likelihood(u[0].exp())))
        totals.append(float(gradient[0].sum()))
    assert totals[1] < totals[0]


def test_a_clock_takes_the_model():
    alignment = variable(CHARACTERS, "standard")
    clock = TimeTreeModel(alignment, "((((a,b),c),d),(e,f));", substitution=VariableSites(Mk(3)))
    target = bk.Target.from_pyro(clock)
    u = torch.zeros(1, target.dim, dtype=DOUBLE)
    plain = bk.Target.from_pyro(TimeTreeModel(alignment, "((((a,b),c),d),(e,f));", substitution=Mk(3)))
    assert target.log_likelihood(u).item() > plain.log_likelihood(u).item()


def test_names():
    alignment = variable(CHARACTERS, "standard")
    for text in ("Mkv", "mk+asc", "Mk+ASC+G4", "MKV+G"):
        with pytest.warns(DataWarning, match="9 of 45 characters show fewer than 3 states"):
            model, rates = parse_substitution(text, alignment)
        assert isinstance(model, VariableSites) and model.model == Mk(3) and (rates is None) == ("G" not in text)
    model, _ = parse_substitution("HKY+ASC")
    assert sorted(model.priors(torch.zeros(()))) == ["base_frequencies", "kappa"]
    values = {"kappa": torch.tensor(3.0), "base_frequencies": torch.tensor([0.1, 0.2, 0.3, 0.4])}
    assert model.with_parameters(values).frequencies(torch.zeros(())).tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    assert model.batch_shape == () and isinstance(model, SubstitutionModel)


@pytest.mark.parametrize("column", ["000000", "0?0?00", "???0??", "------"])
def test_a_column_that_may_be_constant_is_named(column):
    rows = ["01" + symbol + "1" for symbol in column]
    rows[0] = "10" + column[0] + "0"
    alignment = Alignment.from_sequences(dict(zip("abcdef", rows, strict=True)), data_type="standard")
    tree = Tree.from_newick("((a,b),(c,d),(e,f));")
    for make in (lambda model: TreeModel(alignment, tree, model), lambda model: ForestLikelihood(alignment, model)):
        with pytest.raises(AlignmentError, match=r"Sites 3 \(counted from 1\).*Remedy: leave these sites out"):
            make(VariableSites(Mk(2)))
    TreeModel(alignment.select_sites([0, 1, 3]), tree, VariableSites(Mk(2)))


def test_what_does_not_fit_is_refused():
    alignment, tree = variable(CHARACTERS, "standard"), Tree.from_newick("((a,b),(c,d),(e,f));")
    with pytest.raises(SettingsError, match="InvariantSites have no variable site"):
        TreeModel(alignment, tree, VariableSites(Mk(3)), site_rates=InvariantSites(0.1))
    with pytest.raises(SettingsError, match="branch_derivatives has no correction"):
        TreeModel(alignment, tree, VariableSites(Mk(3))).branch_derivatives(torch.full((9,), 0.1, dtype=DOUBLE))
    for wrong in (VariableSites(), "Mk", Mk):
        with pytest.raises(SettingsError, match="without this correction"):
            VariableSites(wrong)
