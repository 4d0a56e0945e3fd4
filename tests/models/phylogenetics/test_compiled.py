"""The likelihood under functorch transforms, tracing and compilation."""

import pytest
import torch
from torch.func import grad, grad_and_value, jacrev, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from bayeskit.models.phylogenetics import JC69, Alignment, Tree, TreeModel, primates
from bayeskit.models.phylogenetics._pruning import _evaluation as evaluation

pytestmark = pytest.mark.usefixtures("back_end")


class JC69ByMatrices(JC69):
    """Jukes-Cantor without its shortcut."""

    @property
    def is_uniform(self) -> bool:
        return False


@pytest.fixture(params=[JC69(), JC69ByMatrices()], ids=["uniform", "matrices"])
def model(request):
    return TreeModel(*primates(), request.param)


@pytest.fixture
def small_model():
    tree = Tree.from_newick("(((A,B),C),(D,E),F);")
    rows = {
        "A": "ACGTACCA",
        "B": "ACGTACCC",
        "C": "ATGRAC-A",
        "D": "CTGAACTA",
        "E": "GTGAGCTA",
        "F": "GTAA?CTA",
    }
    return TreeModel(Alignment.from_sequences(rows), tree)


@pytest.fixture
def undisturbed_globals():
    """Compile on one thread; torch.compile also turns the validation of distributions off for good."""
    threads, validate = torch.get_num_threads(), torch.distributions.Distribution._validate_args
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.distributions.Distribution.set_default_validate_args(validate)
    torch._dynamo.reset()


def lengths_for(model: TreeModel, *batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return 0.01 + 0.3 * torch.rand(*batch, model.tree.num_edges, generator=generator, dtype=torch.float64)


def assert_same(value: torch.Tensor, reference: torch.Tensor) -> None:
    assert value.shape == reference.shape
    assert (value - reference).abs().max() <= 1e-12 * reference.abs().max()


def autograd_gradient(model: TreeModel, lengths: torch.Tensor) -> torch.Tensor:
    leaf = lengths.clone().requires_grad_()
    return torch.autograd.grad(model.log_likelihood(leaf).sum(), leaf)[0]


def value_and_gradient(model: TreeModel):
    def total(lengths):
        values = vmap(model.log_likelihood)(lengths)
        return values.sum(), values

    def call(lengths):
        slope, values = grad(total, has_aux=True)(lengths)
        return values, slope

    return call


def test_every_order_of_vmap_and_grad(model):
    f, lengths = model.log_likelihood, lengths_for(model, 4)
    values, slopes = f(lengths), autograd_gradient(model, lengths)
    assert_same(vmap(f)(lengths), values)
    assert_same(grad(lambda u: vmap(f)(u).sum())(lengths), slopes)
    assert_same(vmap(grad(f))(lengths), slopes)
    mapped_slopes, mapped_values = vmap(grad_and_value(f))(lengths)
    assert_same(mapped_slopes, slopes)
    assert_same(mapped_values, values)
    assert_same(jacrev(f)(lengths)[range(4), range(4)], slopes)
    assert_same(vmap(f, in_dims=1)(lengths.T.contiguous()), values)


def test_nested_vmap(model):
    f, lengths = model.log_likelihood, lengths_for(model, 2, 3)
    assert_same(vmap(vmap(f))(lengths), f(lengths))
    assert_same(vmap(vmap(grad(f)))(lengths), autograd_gradient(model, lengths))
    assert_same(vmap(grad(lambda u: vmap(f)(u).sum()))(lengths), autograd_gradient(model, lengths))
    # Also where a mapped call is itself given a batch.
    assert_same(vmap(f, in_dims=1, out_dims=1)(lengths), f(lengths))


def test_cotangents_may_be_mapped_alone(model):
    lengths = lengths_for(model, 3)
    _, pullback = torch.func.vjp(model.log_likelihood, lengths)
    (rows,) = vmap(pullback)(torch.eye(3, dtype=torch.float64))
    assert_same(rows[range(3), range(3)], autograd_gradient(model, lengths))
    assert rows[0, 1:].abs().max() == 0


def test_vmap_is_one_call(model, monkeypatch):
    sizes = []
    original = evaluation._evaluate
    monkeypatch.setattr(
        evaluation,
        "_evaluate",
        lambda groups, slopes, *rest: sizes.append(len(rest[0])) or original(groups, slopes, *rest),
    )
    vmap(grad(model.log_likelihood))(lengths_for(model, 5))
    assert sizes == [5]


@pytest.mark.calibration
def test_tracing(model):
    call, lengths = value_and_gradient(model), lengths_for(model, 4)
    traced = make_fx(call)(lengths)
    other = lengths_for(model, 4).flip(0)
    for value, reference in zip(traced(other), call(other), strict=True):
        assert_same(value, reference)


@pytest.mark.long
@pytest.mark.compiler
def test_compiled_code_agrees_with_eager(small_model, undisturbed_globals):
    call = value_and_gradient(small_model)
    # Both a full run of vector lanes and a remainder.
    lengths = lengths_for(small_model, 19)
    compiled = torch.compile(make_fx(call)(lengths))
    for scale in (1.0, 1e-9, 20.0):
        for value, reference in zip(compiled(scale * lengths), call(scale * lengths), strict=True):
            assert_same(value, reference)


def test_gradients_repeat_bit_for_bit(model):
    lengths = lengths_for(model, 32)
    first = autograd_gradient(model, lengths)
    assert all(torch.equal(first, autograd_gradient(model, lengths)) for _ in range(3))
