"""Both engines of derivatives, on modules that do unusual things: each result is compared with ordinary gradients."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from bayeskit.errors import AccuracyWarning, DataError, ModelError, SettingsError, ShapeError
from bayeskit.inference.curvature import (
    BernoulliOutputs,
    Categorical,
    GaussianOutputs,
    find_parameter_mode,
    fisher,
    laplace_posterior,
)
from bayeskit.models.wide_networks import _empirical_kernels as kernel
from bayeskit.models.wide_networks import empirical_ntk, infinite_width, linearize, ntk_vector_product

DOUBLE = torch.float64
INTEGERS = torch.tensor([[0, 1, 2], [3, 3, 1], [6, 5, 0], [2, 4, 4], [1, 2, 6]])


def points(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def filled(module):
    """Weights that need no random numbers."""
    parameters = list(module.double().parameters())
    size = sum(p.numel() for p in parameters)
    nn.utils.vector_to_parameters(torch.sin(1.7 * torch.arange(1, size + 1, dtype=DOUBLE)), parameters)
    return module


class Function(nn.Module):
    """Layers, and what a module does with them."""

    def __init__(self, function, **layers):
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, x):
        return self.function(self, x)


def small(function):
    return filled(Function(function, a=nn.Linear(3, 4), b=nn.Linear(4, 2)))


def jacobian(module, x):
    """Of one input after another, ``(n, k, p)``."""
    chosen = [p for p in module.parameters() if p.requires_grad]
    found = []
    for row in x.split(1):
        y = module(row).reshape(-1)
        parts = [torch.autograd.grad(v, chosen, retain_graph=True, materialize_grads=True) for v in y]
        found.append(torch.stack([torch.cat([g.flatten() for g in gradients]) for gradients in parts]))
    return torch.stack(found)


def error(found, right):
    return float((found - right).abs().max() / right.abs().max())


def sort_rows(self, x):
    order = x[:, 0].argsort()
    return self.b(self.a(x[order]).tanh())[order.argsort()]


def route(self, x):
    first = x[:, 0] > 0
    rows = torch.arange(len(x))
    hidden = torch.zeros(len(x), 4, dtype=x.dtype)
    return self.b(hidden.index_put((rows[first],), self.a(x[first])).index_put((rows[~first],), x[~first] @ self.c))


def patched():
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    forward = module[0].forward
    module[0].forward = lambda x: 2 * forward(x)
    return filled(module)


def hooked():
    module = filled(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    module[0].register_forward_hook(lambda layer, entered, left: 3 * left)
    return module


def router():
    return filled(Function(route, a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Parameter(torch.zeros(3, 4))))


ROWS = {
    "sorted": lambda: small(sort_rows),
    "routed": router,
    "in chunks": lambda: small(lambda self, x: self.b(torch.cat([self.a(part) for part in x.split(2)]))),
    "patched": patched,
    "hooked": hooked,
}


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("block_size", [None, 3])
def test_kernels_of_modules_that_do_something_else_with_more_inputs(case, block_size):
    module, x = ROWS[case](), points(5, 3)
    x[:2, 0] = torch.tensor([0.1, 2.0])  # two inputs in order, and on one side
    right = torch.einsum("iap,jbp->ijab", *[jacobian(module, x)] * 2)
    assert error(empirical_ntk(module, x, block_size=block_size), right) < 1e-12
    found = empirical_ntk(module, x[2:], x, outputs="trace", block_size=block_size)
    assert error(found, right[2:].diagonal(dim1=2, dim2=3).mean(-1)) < 1e-12


USES = {
    "kernel": lambda module, x: empirical_ntk(module, x),
    "product": lambda module, x: ntk_vector_product(module, x, None, torch.ones(len(x), 2, dtype=DOUBLE)),
    "Fisher": lambda module, x: fisher(module, GaussianOutputs(), x).matrix(),
    "expansion": lambda module, x: linearize(module)(x),
}


@pytest.mark.parametrize("use", USES)
def test_a_layer_with_two_names_keeps_its_tensors(use):
    """torch's functional_call alone leaves a tensor in place of its weights, which optimisers no longer find."""
    layer = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3).eval())
    module, x = filled(nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(3, 2))), points(5, 3)
    before = [*module.parameters(), *module.buffers()]
    USES[use](module, x)
    assert all(a is b for a, b in zip(before, [*module.parameters(), *module.buffers()], strict=True))
    assert module[2][0].weight is before[0]


class Tripled(torch.autograd.Function):
    """A function that torch.func does not take."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


def test_products_of_a_layer_with_two_names_beside_a_function_without_forward_mode():
    """The failed attempt in forward mode must not change what the next one differentiates."""
    layer = nn.Linear(3, 3)
    module = filled(nn.Sequential(layer, Function(lambda self, x: Tripled.apply(x).tanh()), layer)).double()
    x, v = points(5, 3), points(5, 3, seed=1)
    right = torch.einsum("iap,jbp,jb->ia", *[jacobian(module, x)] * 2, v)
    assert error(ntk_vector_product(module, x, None, v), right) < 1e-12


def test_an_expansion_of_a_layer_with_two_names_can_be_trained():
    layer = nn.Linear(3, 3)
    expansion = linearize(filled(nn.Sequential(layer, nn.Tanh(), layer)))
    before = list(expansion.parameters())
    expansion(points(5, 3)).sum().backward()
    assert all(a is b and a.grad is not None for a, b in zip(before, expansion.parameters(), strict=True))


def test_an_expansion_of_attention():
    """In evaluation torch's layer has a fast path without derivatives along vectors."""
    layer = filled(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)).eval()
    x = points(3, 2, 4)
    torch.testing.assert_close(linearize(layer)(x), layer(x), rtol=1e-12, atol=1e-12)


def test_without_the_comparison_sorted_inputs_are_wrong(monkeypatch):
    module, x = small(sort_rows), points(5, 3)
    x[:2, 0] = torch.tensor([0.1, 2.0])
    right = torch.einsum("iap,jbp->ijab", *[jacobian(module, x)] * 2)
    monkeypatch.setattr(kernel, "_check", lambda *arguments: None)
    assert error(empirical_ntk(module, x), right) > 0.1


def test_the_comparison_sees_what_two_inputs_do_not_show():
    module = small(lambda self, x: self.b((self.a(x) - (self.a(x).mean(0) if len(x) > 2 else 0)).tanh()))
    with pytest.raises(ModelError, match="do not add up"):
        empirical_ntk(module, points(5, 3))
    with pytest.raises(ModelError, match="do not add up"):
        fisher(module, GaussianOutputs(), points(5, 3)).matrix()


def test_a_frozen_layer_does_not_set_the_dtype():
    first = nn.Linear(3, 4).bfloat16().requires_grad_(False)
    module = Function(lambda self, x: self.b(self.a(x.bfloat16()).to(x.dtype)), a=first, b=nn.Linear(4, 1).double())
    found = empirical_ntk(module, x := points(5, 3), block_size=1)
    assert found.dtype == DOUBLE
    assert error(found, torch.einsum("iap,jbp->ijab", *[jacobian(module, x)] * 2)) < 1e-12


def test_memory_covers_gradients_of_single_inputs():
    module = Function(lambda self, x: (x @ self.v).tanh(), v=nn.Parameter(points(30, 4)))
    plan = kernel.make_gradient_plan(module, points(2, 30))
    assert plan.num_numbers >= 4 * 4 * 120  # four copies, of four outputs


@pytest.mark.parametrize("mixing", [lambda h: h - h.mean(0), lambda h: h.softmax(0)], ids=["centred", "softmax"])
def test_curvatures_of_modules_that_mix_inputs_are_refused(mixing):
    with pytest.raises(ModelError, match="depend on other inputs"):
        fisher(small(lambda self, x: self.b(mixing(self.a(x)))), GaussianOutputs(), points(6, 3))


def test_curvatures_of_random_outputs_are_refused():
    module = small(lambda self, x: self.b(functional.dropout(self.a(x), 0.5)))
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match="random numbers"):
        fisher(module, GaussianOutputs(), points(6, 3))
    assert torch.equal(torch.get_rng_state(), before)


def tied():
    function = lambda self, x: functional.linear(self.b(self.e(x)).tanh().mean(1), self.e.weight)  # noqa: E731
    return Function(function, e=nn.Embedding(7, 4, padding_idx=0), b=nn.Linear(4, 4)), INTEGERS


def attention():
    layer = nn.MultiheadAttention(4, 2, batch_first=True)
    function = lambda self, x: self.b(self.a(x, x, x, need_weights=False)[0].mean(1))  # noqa: E731
    return Function(function, a=layer, b=nn.Linear(4, 1)).eval(), points(5, 3, 4)


def recurrent():
    function = lambda self, x: self.b(self.g(x)[0][:, -1])  # noqa: E731
    return Function(function, g=nn.GRU(3, 4, batch_first=True), b=nn.Linear(4, 2)), points(5, 4, 3)


UNUSUAL = {
    "padding": lambda: (
        Function(
            lambda self, x: self.b(self.e(x).mean(1).tanh()), e=nn.Embedding(7, 4, padding_idx=0), b=nn.Linear(4, 2)
        ),
        INTEGERS,
    ),
    "tied with padding": tied,
    "attention": attention,
    "recurrent": recurrent,
    "transposed convolution": lambda: (
        nn.Sequential(nn.ConvTranspose1d(1, 3, 3), nn.PReLU(3), nn.Flatten(), nn.Linear(30, 2)),
        points(5, 1, 8),
    ),
    "weight normalisation": lambda: (
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), nn.Tanh(), nn.Linear(4, 2)),
        points(5, 3),
    ),
    "transformer": lambda: (
        nn.Sequential(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Flatten(), nn.Linear(12, 2)).eval(),
        points(5, 3, 4),
    ),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_modules(case):
    module, x = UNUSUAL[case]()
    gradients = jacobian(filled(module), x)
    right = torch.einsum("nkp,nkq->pq", gradients, gradients)
    found = fisher(module, GaussianOutputs(), x)
    v = points(len(right), 3)
    assert error(found.matrix(), right) < 1e-11
    assert error(found @ v, right @ v) < 1e-11
    assert error(found @ v[:, 0], right @ v[:, 0]) < 1e-11
    weights = points(*gradients.shape[:2], seed=1)
    product = torch.einsum("iap,jbp,jb->ia", gradients, gradients, weights)
    assert error(ntk_vector_product(module, x, None, weights), product) < 1e-11


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_functions_whose_gradients_have_none():
    module = filled(Function(lambda self, x: self.b(self.g(x)), g=nn.EmbeddingBag(7, 4, mode="max"), b=nn.Linear(4, 2)))
    gradients, weights = jacobian(module, INTEGERS), points(5, 2, seed=1)
    product = torch.einsum("iap,jbp,jb->ia", gradients, gradients, weights)
    assert error(ntk_vector_product(module, INTEGERS, None, weights), product) < 1e-12
    v = points(gradients.shape[2])
    right = torch.einsum("nkp,nkq->pq", gradients, gradients) @ v
    assert error(fisher(module, GaussianOutputs(), INTEGERS) @ v, right) < 1e-12


def test_a_module_that_starts_to_train_does_not_reach_a_curvature():
    module = filled(nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1)).eval())
    found, v = fisher(module, GaussianOutputs(), points(6, 3)), torch.ones(41, dtype=DOUBLE)
    before = found @ v
    module.train()
    assert torch.equal(found @ v, before)


def test_products_say_what_does_not_fit():
    module, x = filled(nn.Linear(3, 2)), points(4, 3)
    with pytest.raises(ShapeError, match="one shape"):
        ntk_vector_product(module, x, points(2, 4, 3), points(2, 2))
    with pytest.raises(DataError, match="v has values that are not finite"):
        ntk_vector_product(module, x, None, points(4, 2) / 0)
    with pytest.raises(DataError, match="v has values that are not finite"):
        fisher(module, GaussianOutputs(), x) @ torch.full((8,), math.nan, dtype=DOUBLE)
    with pytest.raises(ShapeError, match="cannot be applied"):
        fisher(module, GaussianOutputs(), points(4, 5))


def single():
    x = points(60, 3)
    return filled(nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))), x, torch.sin(x.sum(1, keepdim=True))


@pytest.mark.calibration
def test_modes_are_found_in_single_precision():
    module, x, y = single()
    module, x, y = module.float(), x.float(), y.float()
    mode = find_parameter_mode(module, GaussianOutputs(0.01), x, y, 1.0)
    assert next(mode.parameters()).dtype == torch.float32
    assert laplace_posterior(mode, GaussianOutputs(0.01), x, y, 1.0).distance < 1e-3


def test_an_unfinished_search_says_so(monkeypatch):
    module, x, y = single()
    monkeypatch.setattr("bayeskit.inference.curvature._laplace._NUM_STEPS", 1)
    with pytest.warns(AccuracyWarning, match="max_iterations"):
        find_parameter_mode(module, GaussianOutputs(0.01), x, y, 1.0, max_iterations=1)
    monkeypatch.setattr("bayeskit.inference.curvature._laplace._POLISHED", 1)
    with pytest.warns(AccuracyWarning, match="max_iterations"):
        find_parameter_mode(module, GaussianOutputs(0.01), x, y, 1.0, max_iterations=1)


@pytest.mark.parametrize("scale", [0.3, 30.0])
def test_probabilities_of_ones(scale):
    x = scale * points(6, 2)
    y = (x[:, :1] > 0).to(DOUBLE)
    mode = find_parameter_mode(filled(nn.Linear(2, 1)), BernoulliOutputs(), x, y, 0.5)
    posterior = laplace_posterior(mode, BernoulliOutputs(), x, y, 0.5)
    assert len(repr(posterior).splitlines()) == 1
    assert posterior.sample().shape == (1, 3)
    mean, covariance = posterior.predict(x)
    z = torch.linspace(-10, 10, 200_001, dtype=DOUBLE)
    logits = mean + covariance[:, 0].sqrt() * z
    right = (logits.sigmoid() * torch.exp(-0.5 * z.square())).sum(1) * 1e-4 / math.sqrt(2 * math.pi)
    assert (posterior.predict_probabilities(x)[:, 0] - right).abs().max() < 1e-8
    assert (mean.sigmoid()[:, 0] - right).abs().max() > 1e-3  # the rung: outputs taken for known


def test_probabilities_of_classes(limit):
    x = points(6, 2)
    y = torch.tensor([0, 1, 0, 1, 1, 0])
    mode = find_parameter_mode(filled(nn.Linear(2, 2)), Categorical(), x, y, 0.5)
    posterior = laplace_posterior(mode, Categorical(), x, y, 0.5)
    found = posterior.predict_probabilities(x, num_draws=40_000, seed=3)
    assert torch.equal(found, posterior.predict_probabilities(x, num_draws=40_000, seed=3))
    # With two classes, the difference of logits is one normal variable.
    mean, covariance = posterior.predict(x)
    contrast = torch.tensor([1.0, -1.0], dtype=DOUBLE)
    z = torch.linspace(-10, 10, 20_001, dtype=DOUBLE)
    logits = (mean @ contrast)[:, None] + torch.einsum("a,nab,b->n", contrast, covariance, contrast)[:, None].sqrt() * z
    weights = torch.exp(-0.5 * z.square()) * 1e-3 / math.sqrt(2 * math.pi)
    right = (logits.sigmoid() * weights).sum(1)
    spread = ((logits.sigmoid() - right[:, None]).square() * weights).sum(1).sqrt() / math.sqrt(40_000)
    assert ((found[:, 0] - right) / spread).abs().max() < limit(6)
    draw = copy.deepcopy(mode)
    nn.utils.vector_to_parameters(posterior.sample(seed=1)[0], [p for p in draw.parameters() if p.requires_grad])
    with pytest.raises(SettingsError, match="BernoulliOutputs or Categorical"):
        laplace_posterior(mode, GaussianOutputs(), x, points(6, 2), 0.5, tolerance=1e9).predict_probabilities(x)


def test_modules_just_built_have_the_kernel_of_the_standard_parametrisation(limit):
    """With normal weights of torch's variances, one hidden layer: the limit is the mean at every width."""
    module = filled(nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 1)))
    linear = {name: m for name, m in module.named_modules() if isinstance(m, nn.Linear)}
    biases = {name: 1 / (3 * m.in_features) for name, m in linear.items()}
    limits = infinite_width(module, "standard", weight_variance=1 / 3, bias_variance=biases)
    x = points(3, 3)
    generator, found = torch.Generator().manual_seed(0), []
    for _ in range(200):
        with torch.no_grad():
            for m in linear.values():
                for p in (m.weight, m.bias):
                    p.normal_(generator=generator).mul_((3 * m.in_features) ** -0.5)
        found.append(empirical_ntk(module, x, outputs="trace"))
    mean, spread = torch.stack(found).mean(0), torch.stack(found).std(0) / math.sqrt(200)
    assert ((mean - limits.ntk(x)) / spread).abs().max() < limit(6)
    assert ((mean - infinite_width(module).ntk(x)) / spread).abs().max() > 20
