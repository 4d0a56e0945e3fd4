"""Likelihoods of all substitution models with rates over sites: enumeration, gradients, batches, Pyro."""

import itertools
import math

import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch.func import grad, grad_and_value, vmap

import bayeskit as bk
from bayeskit._compiler.tracing import traced
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.phylogenetics import Alignment, Tree, TreeModel, primates
from bayeskit.models.phylogenetics import _site_rates as site_rates
from bayeskit.models.phylogenetics import _tree_model as tree_model
from bayeskit.models.phylogenetics._branch_length_priors import GammaDirichlet
from bayeskit.models.phylogenetics._pruning import _evaluation as evaluation
from bayeskit.models.phylogenetics._pruning import _passes as passes
from bayeskit.models.phylogenetics._site_rates import GammaRates, InvariantSites
from bayeskit.models.phylogenetics._substitution import GTR, HKY85, JC69, K80

pytestmark = pytest.mark.usefixtures("back_end")

FREQUENCIES = [0.4, 0.3, 0.2, 0.1]
SUBSTITUTIONS = {
    "JC69": JC69(),
    "K80": K80(3.0),
    "HKY85": HKY85(2.5, FREQUENCIES),
    "GTR": GTR([0.3, 2.0, 1.1, 0.7, 3.0, 1.0], FREQUENCIES),
}
RATES = {
    "one rate": None,
    "Gamma": GammaRates(0.4),
    "invariant": InvariantSites(0.3),
    "both": InvariantSites(0.3, GammaRates(0.4, 3)),
}
#: Columns that show all ambiguity codes, the same base in all taxa, and bases that no two taxa share.
COLUMNS = ["AAAAA", "ACGTR", "YKMSW", "BDHVN", "A-?CC", "-----", "RRRRR", "RARGA", "CCCCT", "GTGTG", "AACCA", "TTTTT"]
TREE = Tree.from_newick("((A,B),(C,D),E);")
ALIGNMENT = Alignment.from_sequences(
    {taxon: "".join(column[place] for column in COLUMNS) for place, taxon in enumerate("ABCDE")}
)
LENGTHS = torch.tensor([0.1, 0.4, 0.02, 0.3, 0.2, 0.15, 0.6], dtype=torch.float64)


def enumerated(masks: list[int], tree: Tree, matrices: list, frequencies: list[float]) -> float:
    """Likelihood of one site as a sum over all states of the internal nodes and all states that the tips allow."""
    num_nodes = tree.num_edges + 1
    parents = tree.parents
    total = 0.0
    for inner in itertools.product(range(4), repeat=num_nodes - tree.num_taxa):
        states = dict(enumerate(inner, tree.num_taxa))
        probability = frequencies[states[tree.root]]
        for edge, parent in enumerate(parents):
            row = matrices[edge][states[parent]]
            if edge < tree.num_taxa:
                probability *= sum(row[state] for state in range(4) if masks[edge] >> state & 1)
            else:
                probability *= row[states[edge]]
        total += probability
    return total


def expected_logs(substitution, rates, tree: Tree, alignment: Alignment, lengths: torch.Tensor) -> torch.Tensor:
    """Log-likelihood of each pattern; rows of the alignment in the order of the tree."""
    like = torch.zeros((), dtype=torch.float64)
    categories = [(1.0, 1.0)]
    if rates is not None:
        found = rates.categories(like)
        categories = list(zip(found.rates.tolist(), found.weights.tolist(), strict=True))
        if found.invariant is not None:
            categories.append((0.0, found.invariant.item()))
    frequencies, total = substitution.frequencies(like).tolist(), 0.0
    for rate, weight in categories:
        matrices = torch.matrix_exp(substitution.rate_matrix(like) * rate * lengths[:, None, None]).tolist()
        sites = [enumerated(column.tolist(), tree, matrices, frequencies) for column in alignment.patterns.T]
        total = total + weight * torch.tensor(sites, dtype=torch.float64)
    return total.log()


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("substitution", SUBSTITUTIONS.values(), ids=SUBSTITUTIONS)
def test_likelihood_equals_the_sum_over_all_states(substitution, rates):
    model = TreeModel(ALIGNMENT, TREE, substitution, site_rates=rates)
    expected = expected_logs(substitution, rates, TREE, ALIGNMENT, LENGTHS)
    torch.testing.assert_close(model.pattern_log_likelihoods(LENGTHS), expected, rtol=1e-12, atol=1e-13)
    total = (ALIGNMENT.weights * expected).sum()
    torch.testing.assert_close(model.log_likelihood(LENGTHS), total, rtol=1e-13, atol=0)


@pytest.mark.parametrize("rates", RATES.values(), ids=RATES)
@pytest.mark.parametrize("substitution", SUBSTITUTIONS.values(), ids=SUBSTITUTIONS)
def test_all_patterns_of_four_taxa_sum_to_one(substitution, rates):
    columns = ["".join(column) for column in itertools.product("ACGT", repeat=4)]
    rows = zip("ABCD", zip(*columns, strict=True), strict=True)
    alignment = Alignment.from_sequences({taxon: "".join(row) for taxon, row in rows})
    model = TreeModel(alignment, Tree.from_newick("((A,B),C,D);"), substitution, site_rates=rates)
    total = model.pattern_log_likelihoods(LENGTHS[:5]).exp().sum()
    assert total.item() == pytest.approx(1.0, abs=2e-14)


def parameters(model: TreeModel, *batch: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Parameters drawn around ordinary values."""
    generator = torch.Generator().manual_seed(seed)

    def vector(size: int) -> torch.Tensor:
        found = 0.2 + torch.rand(*batch, size, generator=generator, dtype=torch.float64)
        return found / found.sum(-1, keepdim=True)

    values = {"exchangeabilities": vector(6), "base_frequencies": vector(4)}
    for name, scale in (("kappa", 3.0), ("shape", 1.0), ("proportion", 0.5)):
        values[name] = scale * (0.2 + 0.7 * torch.rand(batch, generator=generator, dtype=torch.float64))
    return {name: values[name] for name in model.priors}


def lengths_like(tree: Tree, *batch: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 0.01 + 0.4 * torch.rand(*batch, tree.num_edges, generator=generator, dtype=torch.float64)


FREE = {
    "K80, Gamma": (K80(), GammaRates(num_categories=3)),
    "HKY85, invariant": (HKY85(), InvariantSites()),
    "GTR, both": (GTR(), InvariantSites(others=GammaRates(num_categories=2))),
    "JC69, medians": (JC69(), GammaRates(num_categories=3, median=True)),
    "GTR, one rate": (GTR(), None),
}


@pytest.fixture(params=FREE.values(), ids=FREE)
def free_model(request) -> TreeModel:
    substitution, rates = request.param
    return TreeModel(ALIGNMENT, TREE, substitution, site_rates=rates)


def positional(model: TreeModel, function):
    """The function of a model as one of branch lengths and all parameters in order."""
    return lambda lengths, *values: function(lengths, **dict(zip(model.priors, values, strict=True)))


@pytest.mark.calibration
def test_gradcheck_by_all_parameters(free_model):
    arguments = [lengths_like(TREE, 2), *parameters(free_model, 2).values()]
    leaves = [argument.requires_grad_() for argument in arguments]
    call = positional(free_model, free_model.log_likelihood)
    assert torch.autograd.gradcheck(call, leaves, eps=1e-6, atol=1e-6, rtol=1e-6)


def test_two_pass_gradient_equals_autograd(free_model):
    leaves = [a.requires_grad_() for a in (lengths_like(TREE, 3), *parameters(free_model, 3).values())]
    fast = positional(free_model, free_model.log_likelihood)(*leaves)
    plain = positional(free_model, free_model.pattern_log_likelihoods)(*leaves) @ ALIGNMENT.weights
    torch.testing.assert_close(fast, plain, rtol=1e-13, atol=0)
    found, expected = (torch.autograd.grad(value.sum(), leaves) for value in (fast, plain))
    for one, other in zip(found, expected, strict=True):
        assert ((one - other).abs().max() / other.abs().max()).item() < 1e-11


def test_batches_of_lengths_and_parameters_broadcast(free_model):
    lengths, values = lengths_like(TREE, 2, 3), parameters(free_model, 3)
    found = free_model.log_likelihood(lengths, **values)
    patterns = free_model.pattern_log_likelihoods(lengths, **values)
    assert found.shape == (2, 3) and patterns.shape == (2, 3, ALIGNMENT.num_patterns)
    for i, j in itertools.product(range(2), range(3)):
        single = {name: value[j] for name, value in values.items()}
        expected = free_model.log_likelihood(lengths[i, j], **single)
        torch.testing.assert_close(found[i, j], expected, rtol=1e-12, atol=0)
        expected = free_model.pattern_log_likelihoods(lengths[i, j], **single)
        torch.testing.assert_close(patterns[i, j], expected, rtol=1e-12, atol=1e-13)
    assert free_model.log_likelihood(lengths[0, 0], **values).shape == (3,)


def test_batches_of_fixed_parameters():
    model = TreeModel(
        ALIGNMENT,
        TREE,
        HKY85(torch.tensor([1.0, 4.0]), FREQUENCIES),
        site_rates=GammaRates(torch.tensor([[0.5], [2.0], [9.0]])),
    )
    found = model.log_likelihood(LENGTHS)
    assert found.shape == (3, 2)
    single = TreeModel(ALIGNMENT, TREE, HKY85(4.0, FREQUENCIES), site_rates=GammaRates(9.0))
    torch.testing.assert_close(found[2, 1], single.log_likelihood(LENGTHS), rtol=1e-6, atol=0)


@pytest.mark.calibration
def test_transforms_and_tracing(free_model):
    call = positional(free_model, free_model.log_likelihood)
    arguments = (lengths_like(TREE, 4), *parameters(free_model, 4).values())
    places = tuple(range(len(arguments)))
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    values = call(*leaves)
    slopes = torch.autograd.grad(values.sum(), leaves)
    mapped, mapped_values = vmap(grad_and_value(call, argnums=places))(*arguments)
    torch.testing.assert_close(mapped_values, values.detach(), rtol=1e-13, atol=0)
    total = grad(lambda *given: vmap(call)(*given).sum(), argnums=places)
    flipped = traced(total, *arguments)(*(argument.flip(0) for argument in arguments))
    for slope, one, two, three in zip(slopes, mapped, total(*arguments), flipped, strict=True):
        torch.testing.assert_close(one, slope, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(two, slope, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(three.flip(0), slope, rtol=1e-10, atol=1e-11)


@pytest.mark.calibration
@pytest.mark.parametrize("substitution", [JC69(), HKY85(3.0, FREQUENCIES)], ids=["JC69", "HKY85"])
def test_a_thousand_taxa_in_single_precision(substitution):
    rates = InvariantSites(0.2, GammaRates(0.5, 2))
    generator = torch.Generator().manual_seed(12)
    text = "t0"
    for number in range(1, 998):
        text = f"({text},t{number})"
    tree = Tree.from_newick(f"({text},t998,t999);")
    picks = torch.randint(4, (1000, 6), generator=generator)
    picks[:, 0] = 2  # one site shows the same base everywhere
    alignment = Alignment.from_sequences(
        {f"t{i}": "".join("ACGT"[j] for j in row) for i, row in enumerate(picks.tolist())}
    )
    lengths = lengths_like(tree, seed=3)
    double, single = (
        TreeModel(alignment, tree, substitution, site_rates=rates, dtype=dtype)
        for dtype in (torch.float64, torch.float32)
    )
    found, slopes = {}, {}
    for model in (double, single):
        leaf = lengths.to(model.dtype).requires_grad_()
        found[model] = model.log_likelihood(leaf)
        (slopes[model],) = torch.autograd.grad(found[model], leaf)
    # Most sites have a probability near 4^-1000, far below the smallest number of either precision.
    assert found[double].item() < -4000
    assert found[single].dtype == torch.float32
    assert found[single].item() == pytest.approx(found[double].item(), rel=1e-5)
    plain = model_sum(double, lengths)
    assert found[double].item() == pytest.approx(plain, rel=1e-12)
    error = (slopes[single].double() - slopes[double]).abs().max() / slopes[double].abs().max()
    assert error.item() < 1e-3


def model_sum(model: TreeModel, lengths: torch.Tensor) -> float:
    """The log-likelihood from passes over patterns, without repeats."""
    return model.branch_derivatives(lengths).value.item()


def test_impossible_data_have_log_likelihood_minus_infinity():
    for substitution, rates in itertools.product(SUBSTITUTIONS.values(), RATES.values()):
        model = TreeModel(ALIGNMENT, TREE, substitution, site_rates=rates)
        leaf = torch.zeros(7, dtype=torch.float64, requires_grad=True)
        value = model.log_likelihood(leaf)
        assert value.item() == -math.inf
        assert not torch.autograd.grad(value, leaf)[0].isnan().any()


def test_a_model_with_rates_that_hardly_vary_is_that_with_one_rate():
    equal = TreeModel(ALIGNMENT, TREE, SUBSTITUTIONS["GTR"]).log_likelihood(LENGTHS)
    for rates in (GammaRates(1e9), InvariantSites(1e-9), GammaRates(0.3, num_categories=1)):
        model = TreeModel(ALIGNMENT, TREE, SUBSTITUTIONS["GTR"], site_rates=rates)
        assert model.log_likelihood(LENGTHS).item() == pytest.approx(equal.item(), rel=1e-7)


def dropped_invariant(monkeypatch):
    original = evaluation.mix_rows
    monkeypatch.setattr(
        evaluation, "mix_rows", lambda logs, rates, *rest: original(logs, rates._replace(invariant=None), *rest)
    )


def unscaled_rates(monkeypatch):
    original = InvariantSites.categories

    def categories(self, like):
        rates, weights, invariant = original(self, like)
        return site_rates.Categories(rates * (1 - invariant[..., None]), weights, invariant)

    monkeypatch.setattr(InvariantSites, "categories", categories)


def dropped_scalers(monkeypatch):
    monkeypatch.setattr(tree_model, "can_run", lambda *_: False)
    monkeypatch.setattr(passes, "_rows", lambda lines, num_states: torch.zeros_like(lines[::num_states]))


@pytest.mark.parametrize("mutate", [dropped_invariant, unscaled_rates, dropped_scalers])
def test_the_enumeration_check_catches_mutations(mutate, monkeypatch):
    substitution, rates = SUBSTITUTIONS["HKY85"], RATES["both"]
    expected = (ALIGNMENT.weights * expected_logs(substitution, rates, TREE, ALIGNMENT, LENGTHS)).sum().item()
    model = TreeModel(ALIGNMENT, TREE, substitution, site_rates=rates)
    assert model.log_likelihood(LENGTHS).item() == pytest.approx(expected, rel=1e-12)
    mutate(monkeypatch)
    assert abs(model.log_likelihood(LENGTHS).item() / expected - 1) > 1e-3


def test_sites_of_the_pyro_model():
    prior = GammaDirichlet.for_tree(TREE)
    model = TreeModel(
        ALIGNMENT, TREE, HKY85(), prior, site_rates=InvariantSites(others=GammaRates(dist.Gamma(2.0, 4.0)))
    )
    trace = poutine.trace(model).get_trace()
    trace.compute_log_prob()
    names = [name for name, site in trace.nodes.items() if site["type"] == "sample"]
    assert names == ["branch_lengths", "kappa", "base_frequencies", "proportion", "shape", "alignment"]
    values = {name: trace.nodes[name]["value"] for name in names[:-1]}
    expected = model.log_likelihood(values.pop("branch_lengths"), **values)
    torch.testing.assert_close(trace.nodes["alignment"]["log_prob"], expected)
    lengths = trace.nodes["branch_lengths"]
    torch.testing.assert_close(lengths["log_prob"], prior.log_prob(lengths["value"]))


def log_densities(target: bk.Target, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value, slope = target.value_and_grad(u)
    return value, slope


@pytest.mark.calibration
def test_target_of_a_model_with_all_parameters():
    model = TreeModel(
        ALIGNMENT, TREE, GTR(), GammaDirichlet.for_tree(TREE), site_rates=InvariantSites(others=GammaRates())
    )
    target = bk.Target.from_pyro(model)
    assert target.dim == 7 + 5 + 3 + 1 + 1
    u = 0.5 * torch.randn(3, target.dim, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    value, slope = log_densities(target, u)
    torch.testing.assert_close(value, target.log_density(u), rtol=1e-11, atol=0)
    values = target.constrain(u)
    lengths = values.pop("branch_lengths")
    torch.testing.assert_close(target.log_likelihood(u), model.log_likelihood(lengths, **values), rtol=1e-12, atol=0)
    step = 1e-5
    shifts = step * torch.eye(target.dim, dtype=torch.float64)
    up, down = (target.log_density((u[:, None] + sign * shifts).flatten(0, 1)) for sign in (1.0, -1.0))
    differences = ((up - down) / (2 * step)).reshape(slope.shape)
    torch.testing.assert_close(slope, differences, rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.compiler
def test_compiled_target_agrees_with_the_traced_one():
    # As small as can be, for compiling takes long: three taxa, and rates that are known.
    alignment = Alignment.from_sequences({"A": "AAC", "B": "AAC", "C": "ATC"})
    model = TreeModel(alignment, Tree.from_newick("(A,B,C);"), site_rates=GammaRates(0.5, 2))
    traced, compiled = bk.Target.from_pyro(model), bk.Target.from_pyro(model, compile=True)
    u = 0.5 * torch.randn(19, traced.dim, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    for one, other in zip(log_densities(compiled, u), log_densities(traced, u), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_bad_parameters_are_named():
    model = TreeModel(ALIGNMENT, TREE, HKY85(2.0), site_rates=GammaRates())
    values = parameters(model)
    with pytest.raises(SettingsError, match=r"\['base_frequencies', 'shape'\], but values are given for \[\].*Remedy"):
        model.log_likelihood(LENGTHS)
    with pytest.raises(SettingsError, match="given for.*kappa"):
        model.branch_derivatives(LENGTHS, kappa=torch.tensor(2.0), **values)
    with pytest.raises(ShapeError, match=r"base_frequencies.*\(\*batch, 4\)"):
        model.pattern_log_likelihoods(LENGTHS, shape=values["shape"], base_frequencies=torch.ones(3))
    with pytest.raises(ShapeError, match="do not broadcast.*Remedy"):
        model.log_likelihood(LENGTHS.expand(3, 7), shape=torch.ones(2), base_frequencies=values["base_frequencies"])
    for prior in (GammaDirichlet(torch.ones(6)), dist.Exponential(torch.ones(7)), GammaDirichlet(torch.ones(2, 7))):
        with pytest.raises(SettingsError, match=r"branch_length_prior.*vectors \(7,\)"):
            TreeModel(ALIGNMENT, TREE, branch_length_prior=prior)


def test_primates_prefer_transitions_and_unequal_rates():
    # A sanity check on data: mitochondrial DNA of primates has far more transitions than transversions.
    alignment, tree = primates()
    lengths = torch.full((tree.num_edges,), 0.1, dtype=torch.float64)
    values = [
        TreeModel(alignment, tree, K80(kappa), site_rates=rates).log_likelihood(lengths).item()
        for kappa, rates in ((1.0, None), (5.0, None), (5.0, GammaRates(0.5)))
    ]
    assert values[0] == pytest.approx(-6745.634651656332, rel=1e-12)
    assert values[0] < values[1] < values[2]
