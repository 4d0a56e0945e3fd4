"""Substitution models: transition matrices and their derivatives against matrix exponentials."""

import pickle

import pyro.distributions as dist
import pytest
import torch
from torch.func import grad, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from bayeskit.errors import AlignmentError, SettingsError, ShapeError
from bayeskit.models import phylogenetics
from bayeskit.models.phylogenetics import Alignment
from bayeskit.models.phylogenetics import _substitution as time_reversible
from bayeskit.models.phylogenetics._mixture_models import MixtureModel
from bayeskit.models.phylogenetics._model_names import SUBSTITUTION_MODELS
from bayeskit.models.phylogenetics._substitution import (
    GTR,
    HKY85,
    JC69,
    K80,
    TN93,
    ReversibleModel,
    SubstitutionModel,
    empirical_frequencies,
)

FREQUENCIES = [0.4, 0.3, 0.2, 0.1]
EXCHANGEABILITIES = [0.3, 2.0, 1.1, 0.7, 3.0, 1.0]
LENGTHS = torch.tensor([0.0, 1e-12, 1e-6, 0.1, 2.0, 50.0], dtype=torch.float64)
MODELS = {
    "JC69": JC69(),
    "K80": K80(kappa=3.0),
    "K80, few transitions": K80(kappa=0.2),
    "HKY85": HKY85(kappa=2.5, base_frequencies=FREQUENCIES),
    "TN93": TN93(kappa_purines=2.5, kappa_pyrimidines=6.0, base_frequencies=FREQUENCIES),
    "TN93, few transitions": TN93(kappa_purines=0.4, kappa_pyrimidines=0.1, base_frequencies=FREQUENCIES),
    "GTR": GTR(EXCHANGEABILITIES, FREQUENCIES),
    "GTR with equal eigenvalues": GTR([1.0] * 6, [0.25] * 4),
}


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def rates(exchangeabilities: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    """Rates from the definition, entry by entry, for parameters without batch."""
    frequencies = frequencies / frequencies.sum()
    pairs = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    matrix = torch.zeros(4, 4, dtype=torch.float64)
    for number, (one, other) in enumerate(pairs):
        for start, end in ((one, other), (other, one)):
            place = torch.zeros(4, 4, dtype=torch.float64)
            place[start, end] = 1.0
            matrix = matrix + place * exchangeabilities[number] * frequencies[end]
    matrix = matrix - torch.diag(matrix.sum(1))
    return matrix / -(frequencies * matrix.diagonal()).sum()


def exponential(exchangeabilities, frequencies, lengths):
    return torch.matrix_exp(rates(exchangeabilities, frequencies) * lengths[:, None, None])


def definition(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Exchangeabilities and frequencies of a model in MODELS."""
    if name == "GTR":
        return tensor(EXCHANGEABILITIES), tensor(FREQUENCIES)
    ratios = {
        "K80": (3.0, 3.0),
        "K80, few transitions": (0.2, 0.2),
        "HKY85": (2.5, 2.5),
        "TN93": (2.5, 6.0),
        "TN93, few transitions": (0.4, 0.1),
    }
    purines, pyrimidines = ratios.get(name, (1.0, 1.0))
    unequal = name.startswith(("HKY85", "TN93"))
    return tensor([1.0, purines, 1.0, 1.0, pyrimidines, 1.0]), tensor(FREQUENCIES if unequal else [0.25] * 4)


@pytest.mark.parametrize("name", MODELS)
def test_matrices_equal_the_matrix_exponential(name):
    model, (pairs, frequencies) = MODELS[name], definition(name)
    matrices, expected = model.transition_matrices(LENGTHS), exponential(pairs, frequencies, LENGTHS)
    torch.testing.assert_close(model.rate_matrix(LENGTHS), rates(pairs, frequencies), rtol=1e-14, atol=1e-15)
    torch.testing.assert_close(matrices, expected, rtol=0, atol=2e-14)
    # The chance of a change along a short branch keeps all its digits.
    changes = ~torch.eye(4, dtype=torch.bool)
    torch.testing.assert_close(matrices[1:, changes], expected[1:, changes], rtol=1e-12, atol=0)
    assert torch.equal(matrices[0], torch.eye(4, dtype=torch.float64)) or name.startswith(("HKY85", "TN93"))
    torch.testing.assert_close(matrices[0], torch.eye(4, dtype=torch.float64), rtol=0, atol=5e-16)


@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_those_of_a_reversible_process(name):
    model = MODELS[name]
    frequencies, matrices = model.frequencies(LENGTHS), model.transition_matrices(LENGTHS)
    torch.testing.assert_close(matrices.sum(-1), torch.ones(6, 4, dtype=torch.float64), rtol=0, atol=2e-14)
    flow = frequencies[:, None] * matrices
    torch.testing.assert_close(flow, flow.mT, rtol=0, atol=1e-15)
    torch.testing.assert_close(
        matrices[4] @ matrices[3], model.transition_matrices(tensor([2.1]))[0], rtol=1e-13, atol=0
    )
    # One substitution is expected per unit of length.
    assert -(frequencies * model.rate_matrix(LENGTHS).diagonal()).sum().item() == pytest.approx(1.0, abs=1e-15)
    # A branch that long forgets where it began.
    torch.testing.assert_close(matrices[5], frequencies.expand(4, 4), rtol=1e-9, atol=0)


def test_models_are_special_cases_of_more_general_ones():
    lengths = tensor([1e-9, 0.1, 1.0])
    cases = [
        (GTR([2.0] * 6, [0.25] * 4), JC69()),
        (GTR([1.0, 3.0, 1.0, 1.0, 3.0, 1.0], [0.25] * 4), K80(kappa=3.0)),
        (GTR([1.0, 3.0, 1.0, 1.0, 3.0, 1.0], FREQUENCIES), HKY85(3.0, FREQUENCIES)),
        (GTR([1.0, 3.0, 1.0, 1.0, 7.0, 1.0], FREQUENCIES), TN93(3.0, 7.0, FREQUENCIES)),
        (TN93(3.0, 3.0, FREQUENCIES), HKY85(3.0, FREQUENCIES)),
        (TN93(0.2, 0.2, FREQUENCIES), HKY85(0.2, FREQUENCIES)),
        (TN93(3.0, 3.0, [0.25] * 4), K80(kappa=3.0)),
        (HKY85(1.0, [0.25] * 4), JC69()),
    ]
    for general, special in cases:
        torch.testing.assert_close(
            general.transition_matrices(lengths), special.transition_matrices(lengths), rtol=1e-12, atol=1e-15
        )
    # Felsenstein's model of 1981: whatever happens, a base is drawn from the frequencies.
    frequencies = tensor(FREQUENCIES)
    events = lengths[:, None, None] / (1 - (frequencies**2).sum())
    expected = torch.exp(-events) * torch.eye(4, dtype=torch.float64) - torch.expm1(-events) * frequencies
    for model in (GTR([1.0] * 6, FREQUENCIES), HKY85(1.0, FREQUENCIES), TN93(1.0, 1.0, FREQUENCIES)):
        torch.testing.assert_close(model.transition_matrices(lengths), expected, rtol=1e-12, atol=0)


def gradients(matrices_of, *arguments: torch.Tensor) -> list[torch.Tensor]:
    """Gradients of a fixed mixture of all entries."""
    leaves = [argument.clone().requires_grad_() for argument in arguments]
    weights = torch.randn(len(LENGTHS), 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return list(torch.autograd.grad((matrices_of(*leaves) * weights).sum(), leaves))


def gtr(exchangeabilities, frequencies, lengths):
    values = {"exchangeabilities": exchangeabilities, "base_frequencies": frequencies}
    return GTR().with_parameters(values).transition_matrices(lengths)


def hky(kappa, frequencies, lengths):
    return HKY85().with_parameters({"kappa": kappa, "base_frequencies": frequencies}).transition_matrices(lengths)


def tn(purines, pyrimidines, frequencies, lengths):
    values = {"kappa_purines": purines, "kappa_pyrimidines": pyrimidines, "base_frequencies": frequencies}
    return TN93().with_parameters(values).transition_matrices(lengths)


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    return max(
        ((one - other).abs().max() / other.abs().max()).item() for one, other in zip(found, expected, strict=True)
    )


PAIRS = {
    "all equal": [1.0] * 6,
    "two eigenvalues equal": [1.0, 3.0, 1.0, 1.0, 3.0, 1.0],
    "all but equal": [1.0, 1.0 + 1e-9, 1.0, 1.0 - 1e-12, 1.0, 1.0],
    "distinct": EXCHANGEABILITIES,
}


@pytest.mark.parametrize("frequencies", [[0.25] * 4, FREQUENCIES], ids=["equal", "unequal"])
@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS)
def test_gradient_of_gtr_is_exact_at_equal_eigenvalues_too(pairs, frequencies):
    arguments = tensor(pairs), tensor(frequencies), LENGTHS
    assert worst(gradients(gtr, *arguments), gradients(exponential, *arguments)) < 1e-12


@pytest.mark.parametrize("kappa", [0.1, 1.0, 4.0])
def test_gradient_of_hky_is_exact(kappa):
    def expected(kappa, frequencies, lengths):
        one = torch.ones_like(kappa)
        return exponential(torch.stack([one, kappa, one, one, kappa, one]), frequencies, lengths)

    arguments = tensor(kappa), tensor(FREQUENCIES), LENGTHS
    assert worst(gradients(hky, *arguments), gradients(expected, *arguments)) < 1e-12


@pytest.mark.parametrize(("purines", "pyrimidines"), [(1.0, 1.0), (0.1, 4.0), (6.0, 2.0)])
def test_gradient_of_tn93_is_exact(purines, pyrimidines):
    def expected(purines, pyrimidines, frequencies, lengths):
        one = torch.ones_like(purines)
        return exponential(torch.stack([one, purines, one, one, pyrimidines, one]), frequencies, lengths)

    arguments = tensor(purines), tensor(pyrimidines), tensor(FREQUENCIES), LENGTHS
    assert worst(gradients(tn, *arguments), gradients(expected, *arguments)) < 1e-12


def test_the_ratio_of_purines_is_that_of_a_and_g():
    """Swapping both ratios would pass wherever they are equal."""
    matrix = TN93(8.0, 2.0, [0.25] * 4).rate_matrix(LENGTHS)
    assert (matrix[0, 2] / matrix[0, 1]).item() == pytest.approx(8.0, rel=1e-14)
    assert (matrix[1, 3] / matrix[0, 1]).item() == pytest.approx(2.0, rel=1e-14)
    first, second = TN93(8.0, 2.0, FREQUENCIES), TN93(2.0, 8.0, FREQUENCIES)
    assert (first.transition_matrices(LENGTHS) - second.transition_matrices(LENGTHS)).abs().max() > 0.01
    # To exchange purines and pyrimidines throughout changes nothing.
    swap = [1, 0, 3, 2]
    swapped = TN93(2.0, 8.0, tensor(FREQUENCIES)[swap]).transition_matrices(LENGTHS)
    expected = first.transition_matrices(LENGTHS)[:, swap][:, :, swap]
    torch.testing.assert_close(swapped, expected, rtol=1e-13, atol=1e-16)


def test_the_gradient_check_catches_wrong_divided_differences(monkeypatch):
    arguments = tensor(EXCHANGEABILITIES), tensor(FREQUENCIES), LENGTHS
    expected = gradients(exponential, *arguments)

    def derivatives_only(decay, times):
        return (times[..., None] * torch.exp(-decay * times[..., None]))[..., None, :].expand(*times.shape, 4, 4)

    monkeypatch.setattr(time_reversible, "_divided_differences", derivatives_only)
    assert worst(gradients(gtr, *arguments), expected) > 1e-3


def test_parameters_and_branch_lengths_may_be_batched():
    generator = torch.Generator().manual_seed(2)
    lengths = torch.rand(2, 3, 5, generator=generator, dtype=torch.float64)
    pairs = 0.2 + torch.rand(3, 6, generator=generator, dtype=torch.float64)
    frequencies = 0.2 + torch.rand(2, 1, 4, generator=generator, dtype=torch.float64)
    kappa = 0.2 + torch.rand(2, 3, generator=generator, dtype=torch.float64)
    general, two = GTR(pairs, frequencies), HKY85(kappa, frequencies)
    assert general.batch_shape == two.batch_shape == (2, 3)
    for i, j in ((0, 0), (1, 2)):
        single = GTR(pairs[j], frequencies[i, 0]), HKY85(kappa[i, j], frequencies[i, 0])
        for batched, alone in zip((general, two), single, strict=True):
            torch.testing.assert_close(
                batched.transition_matrices(lengths)[i, j], alone.transition_matrices(lengths[i, j]), rtol=1e-12, atol=0
            )
            torch.testing.assert_close(batched.rate_matrix(lengths)[i, j], alone.rate_matrix(lengths))
    assert general.transition_matrices(lengths[0, 0]).shape == (2, 3, 5, 4, 4)
    three = TN93(kappa, kappa[0] + 1.0, frequencies)  # ratios of different batch shapes
    assert three.batch_shape == (2, 3)
    alone = TN93(kappa[1, 2], kappa[0, 2] + 1.0, frequencies[1, 0])
    batched = three.transition_matrices(lengths)[1, 2]
    torch.testing.assert_close(batched, alone.transition_matrices(lengths[1, 2]), rtol=1e-12, atol=0)
    torch.testing.assert_close(three.rate_matrix(lengths)[1, 2], alone.rate_matrix(lengths))
    assert general.transition_matrices(lengths.float()).dtype == torch.float32


def test_gtr_under_transforms_and_tracing():
    lengths = tensor([0.1, 0.5])
    weights = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    pairs = torch.stack([tensor(values) for values in PAIRS.values()])

    def value(pairs):
        return (gtr(pairs, tensor(FREQUENCIES), lengths) * weights).sum()

    slopes = vmap(grad(value))(pairs)
    for pair, slope in zip(pairs, slopes, strict=True):
        leaf = pair.clone().requires_grad_()
        (expected,) = torch.autograd.grad((exponential(leaf, tensor(FREQUENCIES), lengths) * weights).sum(), leaf)
        torch.testing.assert_close(slope, expected, rtol=1e-11, atol=1e-13)
    traced = make_fx(vmap(grad(value)))(pairs)
    torch.testing.assert_close(traced(pairs.flip(0)), slopes.flip(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(jacrev(vmap(value))(pairs)[range(4), range(4)], slopes, rtol=1e-12, atol=1e-14)


def test_second_derivatives_of_gtr_by_lengths_are_right_and_by_parameters_refused():
    length, pairs = tensor([0.3]).requires_grad_(), tensor([1.0] * 6).requires_grad_()
    matrices = gtr(pairs, tensor(FREQUENCIES), length)
    (slope,) = torch.autograd.grad(matrices[0, 0, 1], length, create_graph=True)
    (bend,) = torch.autograd.grad(slope, length, retain_graph=True)
    matrix = rates(pairs.detach(), tensor(FREQUENCIES))
    expected = (matrix @ matrix @ torch.matrix_exp(0.3 * matrix))[0, 1]
    assert bend.item() == pytest.approx(expected.item(), rel=1e-12)
    (slope,) = torch.autograd.grad(matrices[0, 0, 1], pairs, create_graph=True)
    with pytest.raises(NotImplementedError, match="Remedy"):
        slope.sum().backward()


def test_empirical_frequencies_share_out_ambiguity():
    alignment = Alignment.from_sequences({"A": "AACC", "B": "R-GT", "C": "N?TT"})
    # R is half an A and half a G; gaps, N and ? say nothing.
    assert empirical_frequencies(alignment).tolist() == pytest.approx([2.5 / 9, 2 / 9, 1.5 / 9, 3 / 9], abs=1e-15)
    with pytest.raises(AlignmentError, match=r"base G never.*Remedy"):
        empirical_frequencies(Alignment.from_sequences({"A": "ACTT"}))


def test_free_parameters_have_priors_and_fixed_ones_none():
    like = torch.zeros((), dtype=torch.float64)
    assert JC69().priors(like) == {}
    priors = GTR().priors(like)
    assert priors.keys() == {"exchangeabilities", "base_frequencies"}
    assert priors["exchangeabilities"].event_shape == (6,) and priors["base_frequencies"].event_shape == (4,)
    own = dist.Gamma(2.0, 1.0)
    assert HKY85(own, FREQUENCIES).priors(like) == {"kappa": own}
    assert HKY85(2.0, FREQUENCIES).priors(like) == {}
    assert TN93(2.0).priors(like).keys() == {"kappa_pyrimidines", "base_frequencies"}
    both = TN93(base_frequencies=FREQUENCIES).priors(like)
    assert all((prior.loc.item(), prior.scale.item()) == (1.0, 1.25) for prior in both.values()) and len(both) == 2
    kappa = K80().priors(like)["kappa"]
    assert kappa.sample().dtype == torch.float64
    # BEAST's: 95 % between 0.23 and 31.
    low, high = kappa.icdf(tensor(0.025)).item(), kappa.icdf(tensor(0.975)).item()
    assert low == pytest.approx(0.2346, abs=1e-4) and high == pytest.approx(31.50, abs=1e-2)


def test_models_can_be_pickled():
    model = pickle.loads(pickle.dumps(GTR(EXCHANGEABILITIES)))
    assert model.exchangeabilities.tolist() == EXCHANGEABILITIES and model.base_frequencies is None


BAD = [
    (lambda: K80(kappa=0.0), SettingsError, "K80, kappa.*above 0"),
    (lambda: K80(kappa=float("nan")), SettingsError, "kappa"),
    (lambda: K80(kappa=float("inf")), SettingsError, "kappa"),
    (lambda: K80(kappa="fast"), SettingsError, "neither numbers nor a prior"),
    (lambda: K80(kappa=dist.Normal(0.0, 1.0)), SettingsError, "allows -1"),
    (lambda: K80(kappa=dist.Exponential(torch.ones(3))), SettingsError, "batch_shape"),
    (lambda: HKY85(2.0, [0.5, 0.5, 0.0, 0.0]), SettingsError, "HKY85, base_frequencies"),
    (lambda: HKY85(2.0, [0.3, 0.3, 0.4]), ShapeError, r"\(\*batch, 4\)"),
    (lambda: HKY85(2.0, 0.25), ShapeError, "base_frequencies"),
    (lambda: TN93(2.0, 0.0), SettingsError, "TN93, kappa_pyrimidines.*above 0"),
    (lambda: TN93(2.0, 3.0, [0.3, 0.3, 0.4]), ShapeError, r"\(\*batch, 4\)"),
    (lambda: TN93(2.0, None, FREQUENCIES).rate_matrix(LENGTHS), SettingsError, "TN93, kappa_pyrimidines.*no value"),
    (lambda: GTR([1.0] * 5), ShapeError, r"exchangeabilities.*\(\*batch, 6\)"),
    (lambda: GTR(dist.Dirichlet(torch.ones(4))), SettingsError, "exchangeabilities"),
    (lambda: GTR([1.0, -1.0, 1.0, 1.0, 1.0, 1.0]), SettingsError, "exchangeabilities"),
    (lambda: GTR().with_parameters({"exchangeabilities": torch.ones(5)}), ShapeError, "exchangeabilities"),
    (lambda: HKY85(2.0).transition_matrices(LENGTHS), SettingsError, "HKY85, base_frequencies.*no value"),
    (lambda: GTR(None, FREQUENCIES).rate_matrix(LENGTHS), SettingsError, "GTR, exchangeabilities.*no value"),
]


@pytest.mark.parametrize(("make", "error", "message"), BAD)
def test_bad_input_is_named(make, error, message):
    with pytest.raises(error, match=message) as caught:
        make()
    assert "Remedy" in str(caught.value)


@pytest.mark.parametrize(
    "model",
    [
        JC69(),
        HKY85(kappa=2.0, base_frequencies=FREQUENCIES),
        TN93(kappa_purines=2.0, kappa_pyrimidines=5.0, base_frequencies=FREQUENCIES),
        GTR(exchangeabilities=EXCHANGEABILITIES, base_frequencies=FREQUENCIES),
    ],
    ids=lambda model: type(model).__name__,
)
def test_infinite_branches_have_the_stationary_frequencies(model):
    lengths = torch.tensor([1.0, torch.inf], dtype=torch.float64)
    found = model.transition_matrices(lengths)
    torch.testing.assert_close(found[1], model.frequencies(lengths).expand(4, 4), rtol=1e-13, atol=1e-14)


def test_every_model_can_be_stored():
    classes = [thing for thing in vars(phylogenetics).values() if isinstance(thing, type)]
    others = SubstitutionModel, ReversibleModel
    models = {c.__name__: c for c in classes if issubclass(c, SubstitutionModel) and c not in others}
    # Mixtures have no single process, and saving an approximation with one is an error that names it.
    models = {name: model for name, model in models.items() if not issubclass(model, MixtureModel)}
    assert models == SUBSTITUTION_MODELS


def test_rates_that_are_no_numbers_give_nan_and_not_an_error():
    frequencies = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.1, 0.2, 0.3, 0.4]], dtype=torch.float64)
    model = GTR().with_parameters(
        {"base_frequencies": frequencies, "exchangeabilities": torch.full((2, 6), 1 / 6, dtype=torch.float64)}
    )
    found = model.transition_matrices(torch.full((2, 3), 0.1, dtype=torch.float64))
    assert found[0].isnan().any() and found[1].isfinite().all()
