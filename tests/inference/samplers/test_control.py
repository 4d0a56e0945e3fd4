"""Control variates and row weights: means by enumeration of batches, variances in closed form, runs, refusals."""

import copy
import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from sklearn.datasets import load_diabetes

from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError, UnsupportedSiteError
from bayeskit.inference.samplers import (
    SGHMC,
    SGLD,
    Epochs,
    IndependentRows,
    MinibatchTarget,
    sample_stochastic_gradient,
)
from bayeskit.inference.samplers._minibatch import AnchoredRows

_generator = torch.Generator().manual_seed(3)
NUM_DATA = 6
X = torch.randn(NUM_DATA, 2, generator=_generator, dtype=torch.float64) * torch.tensor([1.0, 3.0]).double()
Y = (torch.arange(NUM_DATA) % 2).double()


def logistic(x, y, batch_size=None):
    """A positive parameter, and an observation outside the plate."""
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.5))
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(2), scale).to_event(1))
    pyro.sample("pilot", dist.Normal(weight[0], 1.0), obs=x.new_tensor(0.4))
    with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
        pyro.sample("y", dist.Bernoulli(logits=x[rows] @ weight), obs=y[rows])


def make(name, **settings):
    settings = {"batch_size": 2, "compile": False} | settings
    if name == "pyro":
        return MinibatchTarget.from_pyro(logistic, X, Y, **settings)
    if name == "module":
        module = torch.nn.Linear(2, 1, dtype=torch.float64)
        torch.nn.init.zeros_(module.weight)
        return MinibatchTarget.from_module(
            module, lambda output, y: dist.Bernoulli(logits=output.squeeze(-1)).log_prob(y), (X, Y), **settings
        )
    return MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(), lambda u, rows: -((Y[rows] - X[rows] @ u).abs() ** 1.5), 2, 6, **settings
    )


def enumerated(target, u, anchor=None):
    """Mean of the estimates over all ordered pairs of rows, with their probabilities."""
    chances = torch.full((NUM_DATA,), 1 / NUM_DATA, dtype=torch.float64)
    if getattr(target.row_order, "probabilities", None) is not None:
        chances = target.row_order.probabilities
    value, gradient = 0.0, 0.0
    for pair in itertools.product(range(NUM_DATA), repeat=2):
        rows, chance = torch.tensor(pair), chances[list(pair)].prod()
        found = target.estimate(u, rows, anchor)
        value, gradient = value + chance * found.log_density, gradient + chance * found.gradient
    return value, gradient


SETTINGS = [
    {"control": "mode"},
    {"control": torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)},
    {"weights": "optimal"},
    {"control": "mode", "weights": "optimal"},
    {"control": "svrg", "weights": "optimal"},
    {"control": "svrg"},
]


@pytest.mark.long
@pytest.mark.parametrize("name", ["pyro", "module", "functions"])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda s: "-".join(str(v)[:7] for v in s.values()))
def test_the_mean_over_all_batches_is_exact(name, settings):
    if isinstance(settings.get("control"), torch.Tensor) and name == "functions":
        settings = {"control": settings["control"][:2]}
    target = make(name, **settings)
    u = torch.randn(3, target.dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    anchor = u + 0.5 if settings.get("control") == "svrg" else None
    value, gradient = enumerated(target, u, anchor)
    exact, slope = target.full_target().value_and_grad(u)
    torch.testing.assert_close(value, exact, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(gradient, slope, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("forgotten", ["weights", "anchor"])
def test_the_enumeration_notices_what_is_forgotten(forgotten):
    target = make("functions", control="mode", weights="optimal")
    order = target.row_order
    if forgotten == "weights":
        target = make("functions", control="mode", row_order=IndependentRows())
        target.row_order = order  # rows are drawn with unequal chances, and count alike
    else:
        anchor = target._estimate.anchor
        moved = anchor._replace(gradient=anchor.gradient + 0.1)
        object.__setattr__(target._estimate, "anchor", moved)
    u = torch.full((1, 2), 0.2, dtype=torch.float64)
    _, gradient = enumerated(target, u)
    assert float((gradient - target.full_target().value_and_grad(u)[1]).abs().max()) > 1e-3


def test_rows_are_drawn_with_their_probabilities(limit):
    chances = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    order, generator = IndependentRows(chances), torch.Generator().manual_seed(0)
    _, rows = order.next(order.init(20_000, 4, generator=generator), 4, 3, generator=generator)
    found = torch.bincount(rows.flatten(), minlength=4) / rows.numel()
    z = (found - chances) / (chances * (1 - chances) / rows.numel()).sqrt()
    assert float(z.abs().max()) < limit(4)
    with pytest.raises(SettingsError, match="sum to one"):
        IndependentRows(chances / 2)
    with pytest.raises(SettingsError, match="5 rows, but 4 probabilities"):
        order.init(1, 5, generator=generator)


# Diabetes: linear regression, with all variances in closed form.

NOISE = 0.5


def diabetes():
    x, y = (torch.as_tensor(part) for part in load_diabetes(return_X_y=True))
    y = (y - y.mean()) / y.std(correction=0)
    covariance = torch.linalg.inv(torch.eye(10).double() + x.T @ x / NOISE)
    return x, y, covariance @ (x.T @ y) / NOISE, covariance


def trace(slopes, chances):
    """Trace of the variance of the gradient estimated from one row."""
    return float((slopes.square().sum(1) / chances).sum() - slopes.sum(0).square().sum())


def regression(**settings):
    x, y, *_ = diabetes()
    return MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(),
        lambda u, rows: -0.5 * (y[rows] - x[rows] @ u).square() / NOISE,
        10,
        len(y),
        batch_size=20,
        sample_prior=lambda n, g: torch.randn(n, 10, generator=g, dtype=torch.float64),
        compile=False,
        **settings,
    )


def test_variances_on_diabetes(limit):
    x, y, mean, covariance = diabetes()
    n, equal = len(y), torch.full((len(y),), 1 / len(y), dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    factor = torch.linalg.cholesky(covariance)
    points = mean + torch.randn(400, 10, generator=generator, dtype=torch.float64) @ factor.mT
    target = regression(control="mode", weights="optimal")
    chances = target.row_order.probabilities
    assert float((target.anchor - mean).abs().max()) < 0.1 * float(covariance.diagonal().sqrt().min())
    sizes = {"plain": 0.0, "control": 0.0, "both": 0.0, "oracle": 0.0}
    for u in points:
        slopes, change = (x * (y - x @ u)[:, None] / NOISE, x * (x @ (target.anchor - u))[:, None] / NOISE)
        norms = change.norm(dim=1)
        parts = (slopes, equal), (change, equal), (change, chances), (change, norms / norms.sum())
        sizes = {k: v + trace(*part) for (k, v), part in zip(sizes.items(), parts, strict=True)}
    control, both, oracle = (sizes[k] / sizes["plain"] for k in ("control", "both", "oracle"))
    assert control < 0.02 and both < 0.012 < control and oracle < 0.007
    # Fixed probabilities of the least variance are known here; the estimated ones come close.
    best = ((x @ covariance) * x).sum(1).sqrt() * x.norm(dim=1)
    best = best / best.sum()
    least = sum(trace(x * (x @ (target.anchor - u))[:, None] / NOISE, best) for u in points)
    assert least < both * sizes["plain"] < 1.15 * least
    # What the target estimates by batches is what the formulas say.
    u = points[:1].expand(4000, -1)
    change = x * (x @ (target.anchor - points[0]))[:, None] / NOISE
    measured = target.gradient_variance(u, 4).sum(1)
    expected = trace(change, chances) / 20
    z = (float(measured.mean()) - expected) / (float(measured.std()) / math.sqrt(len(measured)))
    assert abs(z) < limit()
    assert n == 442


def test_a_far_anchor_makes_it_worse():
    x, y, mean, _ = diabetes()
    far = regression(control=mean + 10, row_order=IndependentRows())
    plain, near = regression(row_order=IndependentRows()), regression(control=mean, row_order=IndependentRows())
    u = mean.expand(2, -1)
    found = [float(target.gradient_variance(u, 200).sum(1).mean()) for target in (near, plain, far)]
    assert found[0] < 1e-20 and found[1] > 0 and found[2] > 5 * found[1]


def normal_mean(**settings):
    y = torch.linspace(-2.0, 2.5, 50, dtype=torch.float64)
    return MinibatchTarget.from_functions(
        lambda u: -0.5 * u.square().sum(),
        lambda u, rows: -0.5 * (y[rows] - u).square(),
        1,
        50,
        batch_size=5,
        **settings,
    )


@pytest.mark.calibration
@pytest.mark.parametrize("control", ["mode", "svrg"])
@pytest.mark.parametrize("kernel", [SGLD(0.01), SGHMC(0.05, friction=2.0)], ids=["SGLD", "SGHMC"])
def test_runs_have_the_variance_without_noise(control, kernel, limit):
    """Rows of equal curvature leave no noise under control, so that only the bias of the step size remains."""
    draws = sample_stochastic_gradient(
        normal_mean(control=control, row_order=IndependentRows()),
        kernel,
        64,
        200,
        300,
        seed=1,
        initial=torch.zeros(1, dtype=torch.float64),
        progress=False,
    )
    exact = 12.5 / 51
    squares = (draws.unconstrained - exact).square().mean((1, 2))
    if isinstance(kernel, SGLD):
        right, noisy = (float(kernel.stationary_variance(51.0, v)) for v in (0.0, 2500 / 5 * 1.7))
    else:
        right, noisy = (float(kernel.stationary_covariance(51.0, v)[0, 0]) for v in (0.0, 2500 / 5 * 1.7))
    error = float(squares.std()) / 8
    assert abs(float(squares.mean()) - right) < limit(dof=63) * error
    assert noisy - float(squares.mean()) > limit(dof=63) * error
    assert draws.num_gradients == round(64 * 501 * (2 if control == "mode" else 3))


def test_moving_anchors_follow_the_chains():
    target = normal_mean(control="svrg")
    generator = torch.Generator().manual_seed(0)
    u = torch.zeros(3, 1, dtype=torch.float64)
    state, _ = target.observe(u, None, 1, generator)
    for step in range(1, 25):
        state, found = target.observe(u + step, state, 1, generator)
        assert isinstance(state, AnchoredRows)
        assert float(state.anchor.position[0, 0]) == 10 * (step // 10)
    torch.testing.assert_close(found.gradient, target.full_target().value_and_grad(u + 24)[1])
    broken = torch.tensor([[1.0], [math.nan], [2.0]], dtype=torch.float64)
    state = state._replace(age=torch.tensor(10))
    state, _ = target.observe(broken, state, 1, generator)
    assert state.anchor.position.flatten().tolist() == [1.0, 20.0, 2.0]


@pytest.mark.calibration
@pytest.mark.parametrize("settings", [{"control": "svrg"}, {"control": "mode", "weights": "optimal"}])
def test_a_stopped_run_resumes_bit_for_bit(tmp_path, monkeypatch, settings):
    target, path, steps, step = make("pyro", **settings), tmp_path / "run", [], SGLD.step
    run = {"num_chains": 3, "num_warmup": 5, "num_samples": 12, "seed": 2, "progress": False}
    whole = sample_stochastic_gradient(target, SGLD(0.01), **run)

    def stopping(*arguments, **named):
        steps.append(1)
        if len(steps) > 10:
            raise KeyError
        return step(*arguments, **named)

    with monkeypatch.context() as patch, pytest.raises(KeyError):
        patch.setattr(SGLD, "step", stopping)
        sample_stochastic_gradient(target, SGLD(0.01), **run, checkpoint=path, checkpoint_seconds=0)
    again = sample_stochastic_gradient(copy.deepcopy(target), SGLD(0.01), **run, checkpoint=path)
    assert torch.equal(again.unconstrained, whole.unconstrained)


@pytest.mark.calibration
@pytest.mark.compiler
def test_compiled_estimates_agree():
    u = torch.randn(3, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rows = torch.randint(NUM_DATA, (3, 2), generator=torch.Generator().manual_seed(0))
    traced, compiled = (make("functions", control="svrg", compile=c) for c in (False, True))
    for a, b in zip(traced.estimate(u, rows, u + 0.3), compiled.estimate(u, rows, u + 0.3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def mixture(y, batch_size=None):
    place = pyro.sample("place", dist.Normal(y.new_zeros(2), 2.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=batch_size) as rows:
        which = pyro.sample("which", dist.Bernoulli(y.new_tensor(0.3)), infer={"enumerate": "parallel"}).long()
        pyro.sample("y", dist.Normal(place[which], 1.0), obs=y[rows])


def fixed(x, y):
    weight = pyro.sample("weight", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    with pyro.plate("data", len(y), subsample_size=2) as rows:
        pyro.sample("y", dist.Normal(x[rows] @ weight, 1.0), obs=y[rows])


def test_what_cannot_be_controlled_is_refused():
    with pytest.raises(UnsupportedSiteError, match="rows cannot be weighted"):
        MinibatchTarget.from_pyro(mixture, Y, batch_size=2, weights="optimal")
    with pytest.raises(ModelError, match="fixes subsample_size=2"):
        MinibatchTarget.from_pyro(fixed, X, Y, control="mode")
    with pytest.raises(SettingsError, match="leave out row_order"):
        make("functions", weights="optimal", row_order=Epochs())
    with pytest.raises(SettingsError, match="'mode', 'svrg', a point"):
        make("functions", control="median")
    with pytest.raises(SettingsError, match="'optimal' or None"):
        make("functions", weights="norms")
    with pytest.raises(ShapeError, match="a point of shape"):
        make("functions", control=torch.zeros(5))
    u, rows = torch.zeros(1, 2, dtype=torch.float64), torch.arange(2)
    with pytest.raises(SettingsError, match="give anchor="):
        make("functions", control="svrg").estimate(u, rows)
    with pytest.raises(SettingsError, match="has no use of it"):
        make("functions", control="mode").estimate(u, rows, u)
    with pytest.raises(ShapeError, match="anchor must have shape"):
        make("functions", control="svrg").estimate(u, rows, torch.zeros(3))
    target = MinibatchTarget.from_pyro(mixture, Y, batch_size=2, control="mode", row_order=IndependentRows())
    value, gradient = enumerated(target, u)
    torch.testing.assert_close(gradient, target.full_target().value_and_grad(u)[1], rtol=1e-11, atol=1e-11)


@pytest.mark.filterwarnings("ignore::bayeskit.errors.SlowModelWarning")
@pytest.mark.parametrize("options", [{"control": "mode"}, {"control": "svrg"}, {"weights": "optimal"}])
def test_densities_that_branch_on_values_have_control(options):
    y = torch.linspace(-1, 2, 6, dtype=torch.float64)

    def branching(u, rows):
        return -0.5 * (y[rows] - u).square() if u[0] > 0 else -0.6 * (y[rows] - u).square()

    def log_prior(u):
        return -0.5 * u.square().sum()

    target = MinibatchTarget.from_functions(log_prior, branching, 1, 6, batch_size=6, **options)
    u = torch.tensor([[0.4]], dtype=torch.float64)
    found = target.full_target().value_and_grad(u)[0]
    assert torch.allclose(found, log_prior(u) + branching(u[0], torch.arange(6)).sum())


def test_an_anchor_that_is_not_finite_is_refused():
    with pytest.raises(DataError, match="not finite"):
        MinibatchTarget.from_functions(
            lambda u: -0.5 * u.square().sum(),
            lambda u, r: -0.5 * u.square().expand(len(r)),
            1,
            6,
            batch_size=2,
            control=torch.tensor([math.nan]),
        )
