"""Rates over sites on many topologies: enumeration, one topology at a time, gradients, shapes, mutations."""

import itertools
import math
import shutil

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.phylogenetics import Alignment, Topologies, Tree, TreeModel, all_topologies
from bayeskit.models.phylogenetics._forest import ForestLikelihood
from bayeskit.models.phylogenetics._pruning import _evaluation as forest_evaluation
from bayeskit.models.phylogenetics._pruning import _passes as forest_passes
from bayeskit.models.phylogenetics._pruning._passes import Mixed, mix_rows
from bayeskit.models.phylogenetics._site_rates import GammaRates, InvariantSites
from bayeskit.models.phylogenetics._substitution import GTR, HKY85, JC69

BOTH = [pytest.param(True, id="compiled", marks=pytest.mark.compiler), pytest.param(False, id="tensors")]
FREQUENCIES = [0.4, 0.3, 0.2, 0.1]
SUBSTITUTIONS = {
    "JC69": JC69(),
    "HKY85": HKY85(2.5, FREQUENCIES),
    "GTR": GTR([0.3, 2.0, 1.1, 0.7, 3.0, 1.0], FREQUENCIES),
}
RATES = {
    "Gamma": GammaRates(0.4),
    "invariant": InvariantSites(0.3),
    "both": InvariantSites(0.3, GammaRates(0.4)),
}
#: Columns that show ambiguity codes, gaps, the same base in all taxa, and one base that all taxa allow.
COLUMNS = ["AAAAA", "ACGTR", "YKMSW", "BDHVN", "A-?CC", "-----", "RARGA", "CCCCT", "GTGTG", "AACCA", "TTTTT", "CCCCT"]
FIVE = Alignment.from_sequences(
    {taxon: "".join(column[place] for column in COLUMNS) for place, taxon in enumerate("ABCDE")}
)


@pytest.fixture(params=BOTH)
def compiled(request) -> bool:
    return request.param


def lengths_for(topologies: Topologies, *sample: int, seed: int = 2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (*sample, len(topologies), topologies.num_edges)
    return 0.01 + 0.4 * torch.rand(shape, generator=generator, dtype=torch.float64)


def random_alignment(num_taxa: int, num_sites: int, seed: int = 1) -> Alignment:
    generator = torch.Generator().manual_seed(seed)
    symbols = "AAAAACGTRY-"
    picks = torch.randint(len(symbols), (num_taxa, num_sites), generator=generator).tolist()
    # Some sites show the same base in all taxa.
    rows = {f"t{i}": "".join(symbols[j] for j in row) + "AAG" for i, row in enumerate(picks)}
    return Alignment.from_sequences(rows)


def random_topologies(num_taxa: int, count: int, seed: int = 0) -> Topologies:
    generator, trees = torch.Generator().manual_seed(seed), []
    for _ in range(count):
        parts = [f"t{number}" for number in range(num_taxa)]
        while len(parts) > 3:
            one, other = torch.randperm(len(parts), generator=generator)[:2].tolist()
            joined = f"({parts[one]},{parts[other]})"
            parts = [part for number, part in enumerate(parts) if number not in (one, other)] + [joined]
        trees.append(Tree.from_newick(f"({','.join(parts)});"))
    return Topologies.from_trees(trees, [f"t{number}" for number in range(num_taxa)])


def one_at_a_time(alignment, topologies, lengths, substitution, rates) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and gradients from a model of each topology, in the order of edges of Topologies."""
    values, slopes = torch.empty(lengths.shape[:-1], dtype=torch.float64), torch.empty_like(lengths)
    for place in range(len(topologies)):
        tree = topologies.tree(place, torch.arange(topologies.num_edges, dtype=torch.float64))
        order = tree.branch_lengths.long()
        leaf = lengths[..., place, order].detach().requires_grad_()
        found = TreeModel(alignment, tree, substitution, site_rates=rates).log_likelihood(leaf)
        values[..., place] = found.detach()
        slopes[..., place, order] = torch.autograd.grad(found.sum(), leaf)[0]
    return values, slopes


def evaluate(forest: ForestLikelihood, topologies, lengths) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = lengths.detach().clone().requires_grad_()
    values = forest.log_likelihood(topologies, leaf)
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return ((value - reference).abs().max() / reference.abs().max()).item()


def enumerated(substitution, rates, tree: Tree, alignment: Alignment) -> float:
    """The log-likelihood as a sum over rates and the states of all internal nodes, by matrix exponentials."""
    like = torch.zeros((), dtype=torch.float64)
    found = rates.categories(like)
    classes = list(zip(found.rates.tolist(), found.weights.tolist(), strict=True))
    classes += [] if found.invariant is None else [(0.0, found.invariant.item())]
    masks = alignment.patterns[[alignment.taxa.index(taxon) for taxon in tree.taxa]].T.tolist()
    frequencies, parents = substitution.frequencies(like).tolist(), tree.parents
    inner = range(tree.num_taxa, tree.num_edges + 1)
    total = [0.0] * len(masks)
    for rate, weight in classes:
        exponent = substitution.rate_matrix(like) * rate * tree.branch_lengths[:, None, None]
        matrices = torch.matrix_exp(exponent).tolist()
        for (place, sets), states in itertools.product(
            enumerate(masks), itertools.product(range(4), repeat=len(inner))
        ):
            state = dict(zip(inner, states, strict=True))
            probability = weight * frequencies[state[tree.root]]
            for edge, parent in enumerate(parents):
                row = matrices[edge][state[parent]]
                tip = edge < tree.num_taxa
                probability *= sum(row[i] for i in range(4) if sets[edge] >> i & 1) if tip else row[state[edge]]
            total[place] += probability
    return sum(w * math.log(p) for w, p in zip(alignment.weights.tolist(), total, strict=True))


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("substitution", SUBSTITUTIONS.values(), ids=SUBSTITUTIONS)
def test_topologies_of_five_taxa_against_the_sum_over_rates_and_states(substitution, rates):
    topologies = all_topologies(FIVE.taxa)[::7]
    lengths = lengths_for(topologies)
    expected = [enumerated(substitution, rates, topologies.tree(i, lengths[i]), FIVE) for i in range(len(topologies))]
    for compile in (True, False) if shutil.which("g++") else (False,):
        forest = ForestLikelihood(FIVE, substitution, site_rates=rates, compile=compile)
        assert forest.log_likelihood(topologies, lengths).tolist() == pytest.approx(expected, rel=1e-13)


@pytest.mark.calibration
@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("substitution", SUBSTITUTIONS.values(), ids=SUBSTITUTIONS)
@pytest.mark.parametrize(("num_taxa", "sample"), [(3, ()), (5, (1,)), (12, (2, 3))])
def test_values_and_gradients_equal_those_of_one_topology_at_a_time(num_taxa, sample, substitution, rates, compiled):
    topologies, alignment = random_topologies(num_taxa, 3), random_alignment(num_taxa, 30)
    lengths = lengths_for(topologies, *sample)
    expected, expected_slopes = one_at_a_time(alignment, topologies, lengths, substitution, rates)
    forest = ForestLikelihood(alignment, substitution, site_rates=rates, compile=compiled)
    values, slopes = evaluate(forest, topologies, lengths)
    assert values.shape == (*sample, 3)
    assert ((values - expected) / expected).abs().max() < 1e-12
    assert relative_error(slopes, expected_slopes) < 1e-10
    with torch.no_grad():
        torch.testing.assert_close(forest.log_likelihood(topologies, lengths), values, rtol=1e-14, atol=0)


FREE = {
    "JC69, medians": (JC69(), GammaRates(num_categories=3, median=True)),
    "HKY85, invariant": (HKY85(), InvariantSites()),
    "GTR, both": (GTR(), InvariantSites(others=GammaRates(num_categories=2))),
}


def parameters(forest: ForestLikelihood, *batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def uniform(*event: int) -> torch.Tensor:
        return 0.2 + torch.rand(*batch, *event, generator=generator, dtype=torch.float64)

    values = {"exchangeabilities": uniform(6), "base_frequencies": uniform(4)}
    values |= {"kappa": 3 * uniform(), "shape": uniform(), "proportion": 0.5 * uniform()}
    for name in ("exchangeabilities", "base_frequencies"):
        values[name] = values[name] / values[name].sum(-1, keepdim=True)
    like = torch.zeros((), dtype=torch.float64)
    names = [*forest.substitution.priors(like), *forest.site_rates.priors(like)]
    return {name: values[name] for name in names}


@pytest.mark.calibration
@pytest.mark.parametrize("models", FREE.values(), ids=FREE)
def test_gradcheck_by_lengths_and_all_parameters(models, compiled):
    topologies = all_topologies(FIVE.taxa)[[3, 11]]
    forest = ForestLikelihood(FIVE, models[0], site_rates=models[1], compile=compiled)
    given = parameters(forest, 2, 1)
    leaves = [value.requires_grad_() for value in (lengths_for(topologies, 2), *given.values())]

    def value(lengths, *values):
        return forest.log_likelihood(topologies, lengths, **dict(zip(given, values, strict=True)))

    assert torch.autograd.gradcheck(value, leaves, eps=1e-6, atol=1e-6, rtol=1e-6)


def test_parameters_are_batched_over_samples_and_topologies(compiled):
    topologies = all_topologies(FIVE.taxa)[[2, 5, 9]]
    forest = ForestLikelihood(FIVE, HKY85(), site_rates=InvariantSites(others=GammaRates()), compile=compiled)
    lengths, given = lengths_for(topologies, 2), parameters(forest, 2, 3)
    found = forest.log_likelihood(topologies, lengths, **given)
    for i, j in itertools.product(range(2), range(3)):
        single = {name: value[i, j] for name, value in given.items()}
        tree = topologies.tree(j, lengths[i, j])
        model = TreeModel(FIVE, tree, HKY85(), site_rates=InvariantSites(others=GammaRates()))
        torch.testing.assert_close(found[i, j], model.log_likelihood(tree.branch_lengths, **single), rtol=1e-13, atol=0)
    for wrong in ({"shape": torch.ones(4)}, {"kappa": torch.ones(4)}):
        with pytest.raises(ShapeError, match=r"do not broadcast.*Remedy.*\(\*sample, 3\)"):
            forest.log_likelihood(topologies, lengths, **(given | wrong))
    with pytest.raises(ShapeError, match=r"\(\*sample, 1\)"):  # three parameters are not three topologies
        forest.log_likelihood(topologies[:1], lengths[:, :1], **given)
    with pytest.raises(SettingsError, match=r"\['base_frequencies', 'kappa', 'proportion', 'shape'\].*given for \[\]"):
        forest.log_likelihood(topologies, lengths)


def test_parts_and_groups_do_not_matter(compiled, monkeypatch):
    topologies, alignment = random_topologies(9, 5), random_alignment(9, 25)
    lengths, rates = lengths_for(topologies, 7), RATES["both"]
    expected = evaluate(ForestLikelihood(alignment, site_rates=rates, compile=compiled), topologies, lengths)
    monkeypatch.setattr(forest_evaluation, "_ROWS_SIZE", 1000)
    monkeypatch.setattr(forest_evaluation, "_TABLE_SIZE", 2000)
    small = ForestLikelihood(alignment, site_rates=rates, compile=compiled, cache_bytes=0)
    for found, reference in zip(evaluate(small, topologies, lengths), expected, strict=True):
        torch.testing.assert_close(found, reference, rtol=1e-12, atol=1e-11)


@pytest.mark.calibration
def test_vmap_and_tracing(compiled):
    topologies = random_topologies(7, 3)
    rates = InvariantSites(others=GammaRates(0.5, 2))
    forest = ForestLikelihood(random_alignment(7, 20), site_rates=rates, compile=compiled)
    lengths, proportion = lengths_for(topologies, 2), torch.tensor(0.3, dtype=torch.float64)

    def total(x, proportion):
        return forest.log_likelihood(topologies, x, proportion=proportion).sum()

    leaves = lengths.clone().requires_grad_(), proportion.clone().requires_grad_()
    expected = torch.autograd.grad(total(*leaves), leaves)
    mapped = vmap(grad(total, argnums=(0, 1)), in_dims=(0, None))(lengths, proportion)
    together = grad(lambda x, p: vmap(total, in_dims=(0, None))(x, p).sum(), argnums=(0, 1))
    traced = make_fx(together)(lengths.flip(0), proportion)
    for found in ((mapped[0], mapped[1].sum()), together(lengths, proportion), traced(lengths, proportion)):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)


@pytest.mark.calibration
@pytest.mark.parametrize("substitution", [JC69(), SUBSTITUTIONS["HKY85"]], ids=["JC69", "HKY85"])
def test_hundreds_of_taxa_in_single_precision(substitution, compiled):
    topologies, alignment = random_topologies(400, 2), random_alignment(400, 6)
    lengths, rates = lengths_for(topologies), InvariantSites(0.2, GammaRates(0.5, 2))
    double = ForestLikelihood(alignment, substitution, site_rates=rates, compile=compiled)
    values, slopes = evaluate(double, topologies, lengths)
    single = ForestLikelihood(alignment, substitution, site_rates=rates, dtype=torch.float32, compile=compiled)
    rounded, rounded_slopes = evaluate(single, topologies, lengths.float())
    assert rounded.dtype == rounded_slopes.dtype == torch.float32 and (values < -1000).all()
    torch.testing.assert_close(rounded.double(), values, rtol=1e-5, atol=0)
    assert relative_error(rounded_slopes.double(), slopes) < 1e-3


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
def test_impossible_data_and_no_data(rates, compiled):
    topologies = all_topologies(FIVE.taxa)[:2]
    forest = ForestLikelihood(FIVE, site_rates=rates, compile=compiled)
    values, slopes = evaluate(forest, topologies, torch.zeros(3, 2, 7, dtype=torch.float64))
    assert (values == -torch.inf).all() and not slopes.isnan().any()
    values, slopes = evaluate(forest, topologies, torch.zeros(0, 2, 7, dtype=torch.float64))
    assert values.shape == (0, 2) and slopes.shape == (0, 2, 7)


def without_invariant_sites(monkeypatch):
    monkeypatch.setattr(
        forest_evaluation, "mix_rows", lambda logs, rates, *rest: mix_rows(logs, rates._replace(invariant=None), *rest)
    )


def without_scalers(monkeypatch):
    monkeypatch.setattr(forest_passes, "_rows", lambda lines, num_states: torch.zeros_like(lines[::num_states]))


def equally_weighed_rates(monkeypatch):
    def mixed(*args) -> Mixed:
        found = mix_rows(*args)
        return found._replace(by_row=found.by_row.mean(0).expand_as(found.by_row))

    monkeypatch.setattr(forest_evaluation, "mix_rows", mixed)


@pytest.mark.parametrize(
    ("mutate", "wrong"), [(without_invariant_sites, "values"), (without_scalers, "values"), (equally_weighed_rates, "")]
)
def test_the_checks_catch_mutations(mutate, wrong, monkeypatch):
    topologies, alignment = random_topologies(12, 3), random_alignment(12, 30)
    lengths, rates = lengths_for(topologies), RATES["both"]
    expected, expected_slopes = one_at_a_time(alignment, topologies, lengths, JC69(), rates)
    mutate(monkeypatch)
    forest = ForestLikelihood(alignment, site_rates=rates, compile=False)
    if wrong:
        with torch.no_grad():
            values = forest.log_likelihood(topologies, lengths)
        assert ((values - expected) / expected).abs().max() > 1e-4
    else:
        assert relative_error(evaluate(forest, topologies, lengths)[1], expected_slopes) > 1e-3
