"""The posterior of summed-out sites, against enumeration of all joint values by Pyro itself."""

from itertools import product

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from scipy.stats import chisquare

import bayeskit as bk
from bayeskit._logdensity import pyro_density as pyro_density
from bayeskit.errors import DrawsError, ModelError

Y = torch.tensor([0.3, 1.2, 2.0], dtype=torch.float64)
MARK = {"enumerate": "parallel"}


def nested(y):
    """An element of each observation, whose weights depend on a later choice for all of them."""
    shift = pyro.sample("shift", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    data = pyro.plate("data", len(y))
    with data:
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.2, 0.5, 0.3], dtype=y.dtype)), infer=MARK)
    h = pyro.sample("h", dist.Bernoulli(torch.tensor(0.3, dtype=y.dtype)), infer=MARK)
    with data:
        pyro.sample("y", dist.Normal(shift + z * (1 - 2 * h) + 2 * h, 0.7), obs=y)


def chain(y):
    """A hidden Markov chain in which one change is impossible."""
    stay = pyro.sample("stay", dist.Beta(torch.full((), 2.0, dtype=y.dtype), 2.0))
    x = 0
    for i in pyro.markov(range(len(y))):
        rows = torch.stack([torch.stack([stay, 1 - stay]), torch.stack([0 * stay, 0 * stay + 1])])
        x = pyro.sample(f"x_{i}", dist.Categorical(rows[x]), infer=MARK)
        pyro.sample(f"y_{i}", dist.Normal(x.to(y.dtype), 1.0), obs=y[i])


def coded(y):
    """A one-hot site beside a plate of two dimensions."""
    shift = pyro.sample("shift", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
    code = pyro.sample("code", dist.OneHotCategorical(torch.tensor([0.5, 0.2, 0.3], dtype=y.dtype)), infer=MARK)
    means = (code * torch.tensor([0.0, 1.0, 2.0], dtype=y.dtype)).sum(-1)
    with pyro.plate("rows", 2, dim=-2), pyro.plate("data", len(y), dim=-1):
        side = pyro.sample("side", dist.Bernoulli(torch.tensor(0.4, dtype=y.dtype)), infer=MARK)
        pyro.sample("y", dist.Normal(shift + means + side, 1.0), obs=torch.stack([y, y.flip(0)]))


nested.sites = {"z": ([0, 1, 2], (3,)), "h": ([0.0, 1.0], ())}
chain.sites = {f"x_{i}": ([0, 1], ()) for i in range(3)}
coded.sites = {"code": ([0, 1, 2], ()), "side": ([0.0, 1.0], (2, 3))}
MODELS = [nested, chain, coded]


def enumerated(model, at):
    """Return all joint values ``{site: (n, *shape)}`` as numbers of values, and their probabilities at ``at``."""
    spots = [(name, i) for name, (_, shape) in model.sites.items() for i in range(torch.Size(shape).numel())]
    numbers = torch.tensor(list(product(*[range(len(model.sites[name][0])) for name, _ in spots])))
    log_joint, found = [], {}
    for name, (_, shape) in model.sites.items():
        places = [i for i, (owner, _) in enumerate(spots) if owner == name]
        found[name] = numbers[:, places].reshape(-1, *shape)
    for row in range(len(numbers)):
        given = {}
        for name, (values, _) in model.sites.items():
            value = torch.tensor(values)[found[name][row]]
            given[name] = torch.eye(3, dtype=Y.dtype)[value] if name == "code" else value
        log_joint.append(poutine.trace(poutine.condition(model, given | at)).get_trace(Y).log_prob_sum())
    return found, torch.stack(log_joint).softmax(0)


def vector_of(model):
    at = {"stay": torch.tensor(0.6)} if model is chain else {"shift": torch.tensor(0.25)}
    at = {name: value.to(Y.dtype) for name, value in at.items()}
    target = bk.Target.from_pyro(model, Y)
    return target, target.unconstrain(at), at


@pytest.mark.parametrize("model", MODELS)
def test_probabilities_are_those_of_enumeration(model):
    target, u, at = vector_of(model)
    found, weights = enumerated(model, at)
    probabilities = target.discrete_probabilities(torch.stack([u, u + 1, u]))
    assert list(probabilities) == list(model.sites)
    for name, (values, shape) in model.sites.items():
        taken = torch.stack([found[name] == k for k in range(len(values))], -1).to(weights)
        expected = (weights @ taken.flatten(1)).reshape(*shape, len(values))
        assert probabilities[name].shape == (3, *shape, len(values))
        torch.testing.assert_close(probabilities[name][2], expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(probabilities[name][0], probabilities[name][2])
        assert (probabilities[name][1] - probabilities[name][0]).abs().max() > 1e-3


def tail_of_joint_draws(model, num_draws=20_000):
    """Return the p-value of joint draws among all joint values that they may have at one vector."""
    target, u, at = vector_of(model)
    found, weights = enumerated(model, at)
    drawn = target.infer_discrete(u.expand(num_draws, -1), seed=1)
    number, row = 0, 0
    for name, (values, shape) in model.sites.items():
        index = drawn[name].argmax(-1) if name == "code" else drawn[name].long()
        assert index.shape == (num_draws, *shape)
        for drawn_one, listed in zip(
            index.reshape(num_draws, -1).T, found[name].reshape(len(weights), -1).T, strict=True
        ):
            number, row = number * len(values) + drawn_one, row * len(values) + listed
    counts = torch.bincount(number, minlength=int(row.max()) + 1)[row]
    assert int(counts.sum()) == num_draws
    assert int(counts[weights * num_draws < 1e-5].sum()) == 0
    # Rare joint values are counted as one.
    few = weights * num_draws < 10
    kept = [counts[~few], counts[few].sum().reshape(1)], [weights[~few], weights[few].sum().reshape(1)]
    seen, expected = (torch.cat(parts) for parts in kept)
    enough = expected * num_draws >= 1
    seen, expected = seen[enough], expected[enough]
    return chisquare(seen.numpy(), (seen.sum() * expected / expected.sum()).numpy()).pvalue


@pytest.mark.calibration
@pytest.mark.parametrize("model", MODELS)
def test_joint_draws_are_those_of_enumeration(model):
    assert tail_of_joint_draws(model) > 1e-5


@pytest.mark.parametrize("model", MODELS)
def test_mutation_draws_of_one_site_after_the_other_without_those_before(model, monkeypatch):
    def forgotten(factor, variable, index):
        return factor

    monkeypatch.setattr(pyro_density, "conditioned", forgotten)
    with pytest.raises(AssertionError):
        assert tail_of_joint_draws(model) > 1e-5


def test_draws_carry_discrete_sites_to_summary_file_and_arviz(tmp_path):
    draws = bk.sample(coded, Y, num_chains=2, num_warmup=50, num_samples=20, progress=False)
    assert "side" not in draws.values() and "code" not in draws.to_arviz().posterior
    whole = draws.infer_discrete(seed=3)
    assert whole["side"].shape == (2, 20, 2, 3) and whole["code"].shape == (2, 20, 3)
    assert whole.to_arviz().posterior["side"].dims == ("chain", "draw", "rows", "data")
    assert "side[0, 0]" in whole.summary().index
    assert whole.thin(2)["side"].equal(whole["side"][:, 1::2]) and whole.select([1])["code"].equal(whole["code"][[1]])
    assert bk.Draws.join([whole, whole])["side"].shape == (4, 20, 2, 3)
    whole.save(tmp_path / "draws.safetensors")
    assert bk.Draws.load(tmp_path / "draws.safetensors", draws.target)["side"].equal(whole["side"])
    assert draws.infer_discrete(seed=3)["side"].equal(whole["side"])
    assert not draws.infer_discrete(seed=4)["side"].equal(whole["side"])


def test_models_without_summed_out_sites_are_refused():
    def plain(y):
        mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=y.dtype), 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand(y.shape).to_event(1), obs=y)

    draws = bk.sample(plain, Y, num_chains=2, num_warmup=50, num_samples=20, progress=False)
    with pytest.raises(ModelError, match="no site that is summed out"):
        draws.infer_discrete()
    functions = bk.Target.from_functions(lambda u: u.sum(-1), lambda u: u.sum(-1), dim=1)
    with pytest.raises(ModelError, match="no site that is summed out"):
        functions.discrete_probabilities(torch.zeros(1, dtype=torch.float64))
    bare = bk.Draws(draws.unconstrained, draws.log_prior, draws.log_likelihood, draws.beta)
    with pytest.raises(DrawsError, match="no target"):
        bare.infer_discrete()
