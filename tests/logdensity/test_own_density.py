"""A posterior known as one function with its gradient: a twin of a Pyro model, refusals, and wrong functions."""

import math
import pickle
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import (
    AccuracyWarning,
    CheckpointError,
    DataError,
    InitializationError,
    ModelError,
    SettingsError,
    ShapeError,
)
from bayeskit.inference import evidence
from bayeskit.inference.evidence import METHODS
from bayeskit.inference.evidence._shared_runs import SharedRuns
from bayeskit.inference.samplers import sample_ladder

X = np.random.default_rng(0).normal(size=(30, 3))
Y = X @ np.array([1.0, -1.0, 0.5]) + 0.7 * np.random.default_rng(1).normal(size=30)
SHAPE, RATE, SPREAD = 3.0, 2.0, 2.0
NAMES = {"variance": (), "beta": (3,)}
APPLIED = {
    "laplace",
    "maximum_posterior",
    "evidence_lower_bound",
    "laplace_importance_sampling",
    "variational_importance_sampling",
    "bridge_sampling",
    "warp_bridge_sampling",
    "flow_importance_sampling",
    "learned_harmonic_mean",
    "corrected_arithmetic_mean",
    "generalised_stepping_stone",
}


def regression(x, y):
    """A regression with a normal-inverse-gamma prior, whose evidence is known."""
    variance = pyro.sample("variance", dist.InverseGamma(x.new_tensor(SHAPE), x.new_tensor(RATE)))
    beta = pyro.sample("beta", dist.Normal(x.new_zeros(3), SPREAD * variance.sqrt()).to_event(1))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(x @ beta, variance.sqrt()), obs=y)


def log_evidence():
    """Return the log density of a Student-t with ``2 SHAPE`` degrees of freedom at the data."""
    n, scale = len(Y), RATE / SHAPE * (np.eye(len(Y)) + SPREAD**2 * X @ X.T)
    square, df = Y @ np.linalg.solve(scale, Y), 2 * SHAPE
    constant = math.lgamma((df + n) / 2) - math.lgamma(df / 2) - n / 2 * math.log(df * math.pi)
    return constant - 0.5 * np.linalg.slogdet(scale)[1] - (df + n) / 2 * math.log1p(square / df)


CONSTANT = SHAPE * math.log(RATE) - math.lgamma(SHAPE) - (len(Y) + 3) / 2 * math.log(2 * math.pi) - 3 * math.log(SPREAD)
POWER = SHAPE + (len(Y) + 3) / 2


def value_and_grad(u):
    """The same posterior of log variance and coefficients by NumPy, ``(*batch, 4)``."""
    t, b = u[..., 0], u[..., 1:]
    residual = Y - b @ X.T
    over = (RATE + 0.5 * (b**2).sum(-1) / SPREAD**2 + 0.5 * (residual**2).sum(-1)) * np.exp(-t)
    slope = (residual @ X - b / SPREAD**2) * np.exp(-t)[..., None]
    return CONSTANT - POWER * t - over, np.concatenate([(over - POWER)[..., None], slope], -1)


def constrained(u):
    return {"variance": np.exp(u[..., 0]), "beta": u[..., 1:]}


def by_torch(u):
    """The same without its gradient."""
    t, b = u[..., 0], u[..., 1:]
    residual = torch.from_numpy(Y) - b @ torch.from_numpy(X).mT
    over = RATE + 0.5 * b.square().sum(-1) / SPREAD**2 + 0.5 * residual.square().sum(-1)
    return CONSTANT - POWER * t - over * (-t).exp()


def normal(u):
    return -0.5 * (u * u).sum(-1), -u


@pytest.fixture(scope="module")
def twin():
    return bk.Target.from_pyro(regression, torch.from_numpy(X), torch.from_numpy(Y))


@pytest.fixture(scope="module")
def own():
    return bk.Target.from_log_density(value_and_grad, 4, names=NAMES, constrain=constrained, batched=True)


@pytest.fixture(scope="module")
def draws(own):
    return bk.sample(own, num_chains=16, num_warmup=150, num_samples=150, progress=False)


@pytest.fixture
def points():
    return 0.7 * torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# The twin of a Pyro model.


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (value_and_grad, {"batched": True}),
        (value_and_grad, {}),
        (by_torch, {"inputs": "torch"}),
        (by_torch, {"inputs": "torch", "batched": True}),
        (lambda u: (lambda v, g: (v.tolist(), g.tolist()))(*value_and_grad(u)), {}),
        (lambda u: tuple(map(torch.from_numpy, value_and_grad(u.numpy()))), {"inputs": "torch", "batched": True}),
    ],
    ids=["numpy rows", "numpy", "torch", "torch rows", "numbers", "torch pairs"],
)
def test_it_is_its_twin(function, settings, twin, points):
    target = bk.Target.from_log_density(function, 4, names=NAMES, **settings)
    value, gradient = target.value_and_grad(points)
    expected, slope = twin.value_and_grad(points)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(target.log_density(points), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(target.value_and_grad(points, 0.3)[1], 0.3 * gradient)
    assert target.log_density(points[:0]).shape == (0, 2)
    assert target.names == ("variance", "beta[0]", "beta[1]", "beta[2]")
    assert not target.is_split and twin.is_split


def test_torch_differentiates_through_it(own, points):
    leaf = points.clone().requires_grad_(True)
    own.log_density(leaf).sum().backward()
    torch.testing.assert_close(leaf.grad, own.value_and_grad(points)[1])
    torch.testing.assert_close(torch.func.vmap(own.density.joint)(points[:, 0])[1], own.log_density(points[:, 0]))


def test_rows_and_vectors_give_the_same_chains():
    settings = {"num_chains": 2, "num_warmup": 20, "num_samples": 4, "progress": False}
    rows, vectors = (
        bk.sample(bk.Target.from_log_density(value_and_grad, 4, batched=batched), **settings)
        for batched in (True, False)
    )
    torch.testing.assert_close(rows.unconstrained, vectors.unconstrained, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("method", ["bridge_sampling", "warp_bridge_sampling", "corrected_arithmetic_mean"])
def test_the_evidence_is_exact(method, own, draws, limit):
    z = getattr(evidence, method)(own, draws)
    assert abs(z.log_evidence - log_evidence()) < limit() * z.standard_error < 0.5
    assert z.trusted


def test_a_comparison_says_what_applies(own, draws, limit):
    methods = ["laplace_importance_sampling", "bridge_sampling", "harmonic_mean", "nested_sampling"]
    table = evidence.compare(own, methods, draws=draws, progress=False)
    assert set(table.results) == set(methods[:2])
    assert set(table.refused) == set(methods[2:])
    assert table.verdict.is_agreed
    assert abs(table.verdict.log_evidence - log_evidence()) < limit() * table.verdict.standard_error
    assert any("prior and likelihood are one function" in note for note in table.verdict.notes)


def test_generalised_stepping_stone_starts_from_a_reference(limit):
    target = bk.Target.from_log_density(normal, 2, batched=True)
    drawn = bk.sample(target, num_chains=8, num_warmup=60, num_samples=100, progress=False)
    settings = {"num_temperatures": 4, "num_chains": 4, "num_warmup": 50, "num_samples": 100}
    z = evidence.generalised_stepping_stone(target, drawn, **settings, progress=False)
    assert abs(z.log_evidence - math.log(2 * math.pi)) < limit() * z.standard_error


# What needs prior or likelihood by itself.


def test_methods_apply_that_evaluate_the_posterior_alone(own):
    plain = bk.Target.from_log_density(value_and_grad, 4)
    reasons = {name: method.refusal(plain, SharedRuns(plain)) for name, method in METHODS.items()}
    assert {name for name, reason in reasons.items() if reason is None} == APPLIED
    # The density of constrained values needs their Jacobian.
    assert "Jacobian of constrain" in METHODS["maximum_posterior"].refusal(own, SharedRuns(own))


@pytest.mark.parametrize("name", ["naive_monte_carlo", "nested_sampling", "smc", "adaptive_smc", "maximum_likelihood"])
def test_others_refuse_by_name(own, name):
    with pytest.raises(SettingsError, match=f"{name} does not apply: .*one log density: use bridge_sampling"):
        getattr(evidence, name)(own)


@pytest.mark.parametrize("name", ["harmonic_mean", "stabilised_harmonic_mean"])
def test_means_of_the_likelihood_refuse_its_draws(own, draws, name):
    with pytest.raises(SettingsError, match=f"{name} does not apply: it needs the likelihood by itself"):
        getattr(evidence, name)(own, draws)


def test_what_is_not_known_is_not_returned(own, draws, points):
    for what, call in (("prior", own.log_prior), ("likelihood", own.log_likelihood)):
        with pytest.raises(ModelError, match=f"no {what} of its own"):
            call(points)
    for call in (lambda: own.sample_prior(3), lambda: sample_ladder(own, 4, 4, 10, 10, progress=False)):
        with pytest.raises(SettingsError, match="Target.from_functions or Target.from_pyro"):
            call()
    for call in (own.unconstrain, lambda values: own.log_jacobian(points)):
        with pytest.raises(ModelError, match="constrain"):
            call(own.constrain(points))
    with pytest.raises(ModelError, match="pointwise"):
        own.pointwise_log_likelihood(points)
    with pytest.raises(SettingsError, match="harmonic_mean does not apply to model 'a'"):
        bk.compare_models({"a": own, "b": own}, "harmonic_mean")
    report = evidence.check_constants(own)
    assert report.fine and math.isnan(report.log_prior_integral) and "Jacobian" in report.notes[0]


# Names and values.


def test_draws_have_the_names_that_were_given(own, draws):
    assert draws["beta"].shape == (16, 150, 3)
    torch.testing.assert_close(draws["variance"], draws.unconstrained[..., 0].exp())
    groups = draws.to_datasets(dims={"beta": ["covariate"]}, coords={"covariate": ["a", "b", "c"]})
    assert groups["posterior"]["beta"].dims == ("chain", "draw", "covariate")
    assert "lp" in groups["sample_stats"] and not {"log_prior", "log_likelihood"} & set(groups["sample_stats"])
    assert "log_prior" not in groups


def test_names_of_coordinates(points):
    target = bk.Target.from_log_density(value_and_grad, 4, names=["t", "a", "b", "c"])
    values = target.constrain(points)
    torch.testing.assert_close(values["b"], points[..., 2])
    torch.testing.assert_close(target.unconstrain(values), points)
    assert not target.log_jacobian(points).any()


def test_constrain_of_one_vector(points):
    target = bk.Target.from_log_density(value_and_grad, 4, constrain=constrained)
    values = target.constrain(points)
    torch.testing.assert_close(values["variance"], points[..., 0].exp())
    assert target.dimensions() == {"variance": (), "beta": (None,)}


# Precision, starts and points without density.


class Foreign:
    """An array of another library."""

    def __init__(self, array):
        self._array = np.asarray(array)
        self.shape, self.dtype = self._array.shape, self._array.dtype

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype=dtype)


def test_the_precision_is_that_of_the_gradient():
    def single(u):
        assert u.dtype in (np.float32, np.float64)
        return tuple(Foreign(np.asarray(x, dtype=np.float32)) for x in normal(u))

    target = bk.Target.from_log_density(single, 3)
    assert target.dtype == torch.float32
    value, gradient = target.value_and_grad(torch.ones(2, 3))
    assert value.dtype == gradient.dtype == torch.float32 and value.tolist() == [-1.5, -1.5]
    assert bk.sample(target, num_chains=2, num_warmup=20, num_samples=4, progress=False).unconstrained.isfinite().all()
    with pytest.raises(SettingsError, match="single precision, but dtype is torch.float64"):
        bk.Target.from_log_density(single, 3, dtype=torch.float64)


def test_arguments_and_results_are_copies():
    buffer = np.zeros(3)

    def careless(u):
        value, buffer[:] = normal(u)
        u[:] = 7.0
        return value, buffer

    u = torch.arange(6.0, dtype=torch.float64).reshape(2, 3)
    value, gradient = bk.Target.from_log_density(careless, 3).value_and_grad(u)
    assert u.tolist() == [[0, 1, 2], [3, 4, 5]] and gradient.equal(-u) and value.tolist() == [-2.5, -25.0]


@pytest.mark.parametrize("batched", [False, True])
def test_points_at_which_it_raises_have_no_density(batched):
    def half(u):
        if (u[..., 0] > 1.5).any():
            raise RuntimeError("scale is infinite")
        return normal(u)

    with pytest.warns(AccuracyWarning, match=r", in half .*\(RuntimeError: scale is infinite\)") as caught:
        target = bk.Target.from_log_density(half, 2, batched=batched)
        value, gradient = target.value_and_grad(torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64))
    assert value.tolist() == [-0.5, -math.inf] and gradient.tolist() == [[-1, 0], [0, 0]]
    assert len(caught) == 1


def test_chains_start_around_a_known_point():
    def narrow(u):
        inside = np.abs(u - 100.0).max() < 1e-3
        value, gradient = normal((u - 100.0) / 1e-4)
        return (value, gradient / 1e-4) if inside else (-math.inf, 0 * u)

    with pytest.raises(InitializationError, match="pass start="):
        bk.Target.from_log_density(narrow, 2)
    target = bk.Target.from_log_density(narrow, 2, start=[100.0001, 100.0])
    drawn = bk.sample(target, num_chains=2, num_warmup=40, num_samples=10, progress=False)
    assert ((drawn.unconstrained - 100).abs() < 1e-3).all()


# Checkpoints and other processes.


def test_its_fingerprint_is_of_its_values(tmp_path):
    def shifted(by):
        return bk.Target.from_log_density(lambda u: normal(u - by), 2, start=[50.0, 50.0])

    assert shifted(0.0).fingerprint() == shifted(0.0).fingerprint()
    for other in (1e-7, 1.0):
        assert shifted(0.0).fingerprint() != shifted(other).fingerprint()
    settings = {"num_chains": 2, "num_warmup": 20, "num_samples": 4, "initial": torch.zeros(2), "progress": False}
    settings["checkpoint"] = tmp_path / "run"
    first = bk.sample(shifted(0.0), **settings)
    assert bk.sample(shifted(0.0), **settings).unconstrained.equal(first.unconstrained)
    with pytest.raises(CheckpointError):
        bk.sample(shifted(1e-7), **settings)


def test_it_travels_to_other_processes(own, points):
    there = pickle.loads(pickle.dumps(own.without_graphs()))
    assert there.value_and_grad(points)[1].equal(own.value_and_grad(points)[1])


# Functions that cannot be used.


@pytest.mark.parametrize(
    ("function", "settings", "error", "text"),
    [
        (None, {}, SettingsError, "value_and_grad must be callable"),
        (normal, {"dim": 0}, SettingsError, "dim must be at least 1"),
        (normal, {"dim": 2.5}, SettingsError, "dim must be a whole number"),
        (normal, {"inputs": "jax"}, SettingsError, "inputs must be"),
        (normal, {"dtype": torch.int64}, SettingsError, "dtype must be"),
        (normal, {"constrain": 3}, SettingsError, "constrain must be callable"),
        (normal, {"compile": "never"}, SettingsError, "compile must be"),
        (normal, {"names": "ab"}, SettingsError, "names must be a mapping"),
        (normal, {"names": ["a", "a"]}, SettingsError, "holds a name twice"),
        (normal, {"names": {"a": (0,)}}, SettingsError, "shape of 'a'"),
        (
            normal,
            {"names": {"a": (2,), "b": 3}},
            ShapeError,
            r"names have 5 coordinates \(a \(2,\), b \(3,\)\), but dim",
        ),
        (normal, {"start": [0.0]}, ShapeError, r"start must have shape \(3,\)"),
        (normal, {"start": [0.0, math.nan, 0.0]}, InitializationError, "start holds NaN"),
        (lambda u: -0.5 * u @ u, {}, ModelError, "not a pair of value and gradient"),
        (lambda u: (-0.5 * u * u, -u), {}, ShapeError, r"value of shape \(3,\).*pass batched=True"),
        (lambda u: (-0.5 * u @ u, -u[:2]), {}, ShapeError, r"gradient of shape \(2,\)"),
        (lambda u: (-0.5 * (u * u).sum(), -u), {"batched": True}, ShapeError, r"shape \(\).*pass batched=False"),
        (lambda u: (-0.5 * u @ u, -u[:, None]), {}, ShapeError, r"gradient of shape \(3, 1\)"),
        (lambda u: normal(u + np.zeros(4)), {}, ModelError, r"raises ValueError .*shape \(3,\)"),
        (lambda u: normal(u.exp()), {}, ModelError, 'raises AttributeError .*inputs="torch"'),
        (lambda u: ("high", -u), {}, ModelError, "the value is a str"),
        (lambda u: (1j, -u * 1j), {}, ModelError, "numbers of type complex128"),
        (lambda u: (math.nan, -u), {}, DataError, "the log density is NaN at all of 20 points"),
        (lambda u: (math.nan, -u), {"start": [0.0, 0.0, 0.0]}, DataError, "NaN at start"),
        (lambda u: (-math.inf, -u), {"start": [0.0, 0.0, 0.0]}, InitializationError, "is -inf at start"),
        (lambda u: (-0.5 * u @ u, u * [-1, math.nan, -1]), {}, DataError, r"with respect to u\[1\] is not finite"),
        (lambda u: (np.random.default_rng().normal(), -u), {}, ModelError, "must not be random"),
        (normal, {"constrain": lambda u: u}, ModelError, "constrain returns a ndarray"),
        (normal, {"constrain": lambda u: {"a": "b"}}, ModelError, "constrain's 'a' is a str"),
        (
            normal,
            {"constrain": lambda u: {"a": u.sum()}, "batched": True},
            ShapeError,
            "first dimension of every value",
        ),
        (lambda u: u, {"inputs": "torch"}, ShapeError, r"maps shape \(3,\) to \(3,\) instead of \(\)"),
        (lambda u: u.sum() if u[0] > 0 else -u.sum(), {"inputs": "torch"}, ModelError, "torch cannot batch"),
        (lambda u: -u.detach().square().sum(), {"inputs": "torch"}, ModelError, "is not the derivative"),
    ],
)
def test_bad_input_is_refused_at_once(function, settings, error, text):
    with pytest.raises(error, match=text):
        bk.Target.from_log_density(function, **{"dim": 3, **settings})


def test_a_density_that_changes_its_shape_is_noticed_later():
    def odd(u):
        value, gradient = normal(u)
        return (value, gradient) if u[0] < 5 else (value, gradient[:1])

    target = bk.Target.from_log_density(odd, 2)
    with pytest.raises(ShapeError, match=r"gradient of shape \(1,\)"):
        target.log_density(torch.full((2,), 6.0))


# Gradients that do not belong to their values.


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        (lambda g: -g, ".*"),
        (lambda g: 2 * g, ".*"),
        (lambda g: g * [1, 1, 1.001, 1], r"beta\[1\]"),
        (lambda g: g + [0, 0, 0, 1e-3], r"beta\[2\]"),
        (lambda g: g - [1, 0, 0, 0], "variance"),
        (lambda g: g * [1, -1, 1, 1], r"beta\[0\]"),
    ],
    ids=["sign", "scale", "a thousandth", "a constant", "Jacobian", "one sign"],
)
def test_a_wrong_gradient_is_noticed(wrong, name, batched):
    def function(u):
        value, gradient = value_and_grad(u)
        return value, wrong(gradient)

    with pytest.raises(ModelError, match="is not the derivative") as caught:
        bk.Target.from_log_density(function, 4, names=NAMES, batched=batched, start=[0.0, 0.8, -0.8, 0.3])
    assert caught.match(f"with respect to {name} ")
    bk.Target.from_log_density(function, 4, names=NAMES, batched=batched, check_gradient=False)


def test_one_coordinate_of_many_is_named():
    def function(u):
        value, gradient = normal(u)
        gradient[..., 77] *= 1.01
        return value, gradient

    with pytest.raises(ModelError, match=r"with respect to u\[77\] is not .*: it is (\S+), where .* give (\S+)\. "):
        bk.Target.from_log_density(function, 200, batched=True)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "function",
    [
        normal,
        lambda u: (lambda v, g: (v + 1e7, g))(*normal(u)),
        lambda u: (lambda v, g: (v, 1e3 * g))(*normal(1e3 * u)),
        lambda u: (lambda v, g: (v, 1e-4 * g))(*normal(1e-4 * u)),
        lambda u: (-np.abs(u).sum(-1), -np.sign(u)),
        lambda u: (-np.exp(5 * u).sum(-1), -5 * np.exp(5 * u)),
        lambda u: (-(u**8).sum(-1), -8 * u**7),
        lambda u: (-2.5 * np.log1p(u**2 / 4).sum(-1), -5 * u / (4 + u**2)),
        # Large terms that cancel, so that the rounding error is far larger than that of the value.
        lambda u: (((u + 3e4) ** 2 - (u - 3e4) ** 2 - 12e4 * u).sum(-1) - 0.5 * (u * u).sum(-1), -u),
        lambda u: (np.where(u > 40, -np.inf, 0).sum(-1) - 0.5 * (u * u).sum(-1), -u),
    ],
)
def test_no_other_gradient_is(function, seed, dtype):
    where = np.random.default_rng(seed).normal(size=6) * 10.0 ** (seed - 1)
    shape = np.float32 if dtype == np.float32 else np.float64

    def cast(u):
        value, gradient = function(u.astype(dtype))
        return shape(value) if np.ndim(value) == 0 else value.astype(shape), gradient.astype(shape)

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("error")
        try:
            bk.Target.from_log_density(cast, 6, batched=True, start=None if seed == 0 else where)
        except InitializationError:
            pass  # without density there
