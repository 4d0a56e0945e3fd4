import pytest
import torch
from target_checks import (
    assert_close,
    assert_matches_hand,
    double,
    finite_differences,
    normal,
    points,
)
from target_models import ALL, CONTINUOUS, ENUMERATED, Case, hidden_markov, mixture
from torch.distributions import von_mises

from bayeskit import Target
from bayeskit._compiler import cost as cost
from bayeskit._logdensity.pyro_density import PyroDensity
from bayeskit._logdensity.pyro_runs import Coordinate
from bayeskit.errors import ModelError


def make(case: Case, **settings) -> Target:
    return Target.from_pyro(case.model, *case.args, **settings, **case.kwargs)


@pytest.fixture(scope="module", params=ALL)
def named(request) -> tuple[str, Case, Target]:
    case = ALL[request.param]
    return request.param, case, make(case, compile=False)


@pytest.mark.calibration
def test_density_is_pyros_trace_plus_jacobian(named, monkeypatch):
    name, case, target = named
    # Torch's own approximation is off by 2e-8.
    monkeypatch.setattr(von_mises, "_log_modified_bessel_fn", lambda x, order=0: torch.special.i0e(x).log() + x)
    assert_matches_hand(target, case, n=1 if name in ("groups_and_items", "discrete_chain_in_plate") else 3)


@pytest.mark.long
@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_gradient_is_that_of_the_value(named, beta):
    _, _, target = named
    u = points(target)
    value, gradient = target.value_and_grad(u, beta)
    log_prior, log_likelihood = target.evaluate(u)
    assert_close(value, log_prior + beta * log_likelihood)
    leaf = u.clone().requires_grad_(True)
    (automatic,) = torch.autograd.grad(target.log_density(leaf, beta).sum(), leaf)
    assert_close(gradient, automatic)
    # Fourth-order differences at step 1e-3: truncation near 1e-11, rounding near 1e-12.
    numeric = finite_differences(lambda v: target.log_density(v, beta), u, step=1e-3)
    torch.testing.assert_close(gradient, numeric, rtol=1e-7, atol=1e-7)
    assert not value.requires_grad and not gradient.requires_grad


@pytest.mark.long
def test_batch_shapes(named):
    _, _, target = named
    u = normal(2, 3, target.dim, seed=8, scale=0.5)
    expected = target.log_density(u)
    assert expected.shape == (2, 3)
    assert_close(target.log_density(u[1]), expected[1])
    assert_close(target.log_density(u[1, 2]), expected[1, 2])
    value, gradient = target.value_and_grad(u)
    assert value.shape == (2, 3) and gradient.shape == u.shape
    assert_close(value, expected)
    for single in (target.value_and_grad(u[0, 1]), target.value_and_grad(u[0, 1:2])):
        assert_close(single[0].reshape(()), value[0, 1])
        assert_close(single[1].reshape(-1), gradient[0, 1])


def test_round_trip(named):
    _, _, target = named
    u = normal(2, 2, target.dim, seed=9, scale=0.8)
    values = target.constrain(u)
    assert list(values) == [s.name for s in target.sites]
    assert all(values[s.name].shape == (2, 2, *s.shape) for s in target.sites)
    assert_close(target.unconstrain(values), u)
    assert len(target.names) == len(set(target.names)) == target.dim


def test_no_vectors_give_no_values(named):
    _, _, target = named
    u = torch.empty(0, target.dim, dtype=torch.float64)
    assert target.log_density(u).shape == (0,)
    value, gradient = target.value_and_grad(u)
    assert value.shape == (0,) and gradient.shape == u.shape
    values = target.constrain(u)
    assert all(values[s.name].shape == (0, *s.shape) for s in target.sites)
    assert target.unconstrain(values).shape == u.shape


@pytest.mark.parametrize("name", CONTINUOUS)
def test_pointwise_log_likelihood_sums_to_the_whole(name):
    target = make(CONTINUOUS[name])
    u = points(target)
    pointwise = target.pointwise_log_likelihood(u)
    assert_close(sum(v.reshape(len(u), -1).sum(-1) for v in pointwise.values()), target.log_likelihood(u))


@pytest.mark.parametrize("name", ["mixture", "decorated", "two_parents"])
def test_pointwise_log_likelihood_of_local_mixtures(name):
    target = make(ENUMERATED[name])
    u = points(target)
    pointwise = target.pointwise_log_likelihood(u)["y"]
    assert pointwise.shape == (len(u), len(ENUMERATED[name].args[0]))
    assert_close(pointwise.sum(-1), target.log_likelihood(u))
    shorter = Target.from_pyro(ENUMERATED[name].model, ENUMERATED[name].args[0][:1])
    assert_close(pointwise[:, 0], shorter.log_likelihood(u))


@pytest.mark.parametrize(
    "name",
    ["global_switch", "hidden_markov", "groups_and_items", "mixed_likelihood", "discrete_chain_in_plate"],
)
def test_coupled_observations_have_no_pointwise_log_likelihood(name):
    target = make(ENUMERATED[name])
    with pytest.raises(ModelError, match="coupled by the summed-out sites '[gz]"):
        target.pointwise_log_likelihood(points(target))


@pytest.mark.parametrize("name", ["mixture", "hidden_markov", "global_switch", "discrete_parent"])
def test_enumeration_agrees_with_pyros_potential(name):
    from pyro.infer.mcmc.util import initialize_model

    case = ENUMERATED[name]
    target = make(case)
    u = points(target)
    with double():
        _, potential, _, _ = initialize_model(case.model, model_args=case.args, max_plate_nesting=1)
        expected = []
        for v in u:
            sites = {s.name: v[s.start : s.stop].reshape(s.unconstrained_shape) for s in target.sites}
            expected.append(-potential(sites))
    assert_close(target.log_density(u), torch.stack(expected))


def forward_algorithm(y, rows, means):
    weights = rows[0].log()
    for t, observation in enumerate(y):
        if t:
            weights = (weights.unsqueeze(-1) + rows.log()).logsumexp(0)
        weights = weights + torch.distributions.Normal(means, 0.7).log_prob(observation)
    return weights.logsumexp(0)


@pytest.mark.parametrize("use_markov", [True, False])
def test_thirty_hidden_steps_agree_with_the_forward_algorithm(use_markov):
    y = normal(30, seed=10)
    target = Target.from_pyro(hidden_markov, y, use_markov, compile=False)
    u = points(target)
    values = target.constrain(u)
    expected = [forward_algorithm(y, r, m) for r, m in zip(values["rows"], values["means"], strict=True)]
    assert_close(target.log_likelihood(u), torch.stack(expected))


@pytest.mark.calibration
def test_more_hidden_steps_than_tensor_dimensions():
    y = normal(70, seed=10)
    with pytest.raises(ModelError, match="pyro.markov"):
        Target.from_pyro(hidden_markov, y, False)
    target = Target.from_pyro(hidden_markov, y, True)
    u = points(target, 1)
    values = target.constrain(u[0])
    assert_close(target.log_likelihood(u[0]), forward_algorithm(y, values["rows"], values["means"]))


def test_deterministic_sites_of_enumerated_models():
    target = make(ENUMERATED["mixture"])
    values = target.constrain(points(target), deterministic=True)
    assert list(values) == ["weights", "means"]  # the third one depends on the summed-out class
    target = make(CONTINUOUS["deterministic"])
    values = target.constrain(points(target), deterministic=True)
    assert_close(values["mean"], values["raw"] ** 3)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")
@pytest.mark.parametrize("name", ["mixture"])
def test_compiled_agrees_with_traced(name):
    case = ALL[name]
    compiled, traced = make(case, compile=True), make(case, compile=False)
    u = points(traced)
    for beta in (0.0, 0.3, 1.0):
        for a, b in zip(compiled.value_and_grad(u, beta), traced.value_and_grad(u, beta), strict=True):
            assert_close(a, b)


@pytest.mark.parametrize("name", ["mixture", "factors"])
def test_chunks_change_nothing(name, monkeypatch):
    whole = make(ALL[name], compile=False)
    u = normal(75, whole.dim, seed=11, scale=0.5)
    beta = torch.linspace(0, 1, 75, dtype=torch.float64)
    expected = (*whole.value_and_grad(u, beta), whole.log_density(u, beta))
    values = whole.constrain(u)
    monkeypatch.setattr(cost, "CHUNK_BYTES", 8 * whole.cost.num_bytes + 1)
    parts = make(ALL[name], compile=False)
    assert parts.cost.chunk_size(75) < 75
    for a, b in zip((*parts.value_and_grad(u, beta), parts.log_density(u, beta)), expected, strict=True):
        assert_close(a, b)
    for site, value in parts.constrain(u).items():
        assert_close(value, values[site])


# -- mutations: the comparison above must notice a broken Target --------------------------------------------


@pytest.mark.parametrize("factor", [0.0, -1.0])
@pytest.mark.parametrize("name", ["plate", "simplices", "hierarchical", "dependent_bounds"])
def test_a_wrong_jacobian_is_noticed(name, factor, monkeypatch):
    right = PyroDensity._from_vector

    def wrong(self, u):
        supply = right(self, u)

        def altered(site, fn):
            value, (jacobian, density) = supply(site, fn)
            change = (factor - 1) * jacobian
            return value, Coordinate(jacobian + change, None if density is None else density + change)

        return altered

    monkeypatch.setattr(PyroDensity, "_from_vector", wrong)
    with pytest.raises(AssertionError, match="not close"):
        assert_matches_hand(make(CONTINUOUS[name]), CONTINUOUS[name])


@pytest.mark.parametrize("name", ["mixture", "global_switch", "hidden_markov", "discrete_parent", "two_parents"])
def test_a_lost_discrete_prior_is_noticed(name, monkeypatch):
    right = PyroDensity._factors

    def wrong(self, records):
        factors, home, names = right(self, records)
        return [(k, f) for k, f in factors if k != "enumerated"], home, names

    monkeypatch.setattr(PyroDensity, "_factors", wrong)
    with pytest.raises(AssertionError, match="not close"):
        assert_matches_hand(make(ENUMERATED[name]), ENUMERATED[name])


def test_mixture_needs_no_loop():
    # An enumerated model that silently left vmap would warn, and warnings are errors here.
    assert not Target.from_pyro(mixture, normal(6)).loops
