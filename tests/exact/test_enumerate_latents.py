import math
import sys

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO, config_enumerate

import bayeskit as bk
from bayeskit._logdensity import pyro_runs as replay
from bayeskit.errors import (
    ImproperPosteriorError,
    ModelError,
    SettingsError,
    ShapeError,
    UnknownNameError,
    UnsupportedSiteError,
)
from bayeskit.exact._enumeration import enumerate_latents

module = sys.modules["bayeskit.exact._enumeration"]  # the package may show the function under this name
F64 = torch.float64
ENUMERATE = {"enumerate": "parallel"}


def sprinkler(wet):
    rain = pyro.sample("rain", dist.Bernoulli(0.2))
    on = pyro.sample("on", dist.Bernoulli(0.01 if rain else 0.4))
    chance = torch.tensor([[0.05, 0.9], [0.8, 0.99]])[rain.long(), on.long()]
    pyro.sample("wet", dist.Bernoulli(chance), obs=wet)


def mixture(y):
    """A mixture whose mean is a site, so that Target can read it too."""
    centre = pyro.sample("centre", dist.Normal(y.new_zeros(()), 2.0))
    weights = y.new_tensor([0.2, 0.3, 0.5])
    with pyro.plate("data", len(y)):
        z = pyro.sample("z", dist.Categorical(weights), infer=ENUMERATE)
        pyro.sample("y", dist.Normal(centre + y.new_tensor([-1.0, 0.0, 2.5])[z], 1.0), obs=y)


def hidden_markov(y):
    centre = pyro.sample("centre", dist.Normal(y.new_zeros(()), 2.0))
    move = y.new_tensor([[0.7, 0.2, 0.1], [0.0, 0.6, 0.4], [0.3, 0.3, 0.4]])
    state = torch.tensor(0)
    for t in pyro.markov(range(len(y))):
        state = pyro.sample(f"x_{t}", dist.Categorical(move[state]), infer=ENUMERATE)
        pyro.sample(f"y_{t}", dist.Normal(centre + y.new_tensor([-1.0, 0.0, 2.5])[state], 1.0), obs=y[t])


def nested_plates(y):
    centre = pyro.sample("centre", dist.Normal(y.new_zeros(()), 2.0))
    with pyro.plate("groups", 2, dim=-2):
        kind = pyro.sample("kind", dist.Bernoulli(y.new_tensor(0.3)), infer=ENUMERATE)
        with pyro.plate("members", 3, dim=-1):
            on = pyro.sample("on", dist.Bernoulli(0.2 + 0.6 * kind), infer=ENUMERATE)
            pyro.sample("y", dist.Normal(centre + on - kind, 1.0), obs=y)


DATA = torch.tensor([0.3, -1.2, 2.0, 1.1, 0.0, -0.4], dtype=F64)
WET = torch.tensor(1.0, dtype=F64)
CENTRE = torch.tensor(0.35, dtype=F64)
SECOND_OPINIONS = {
    "mixture": (mixture, DATA),
    "hidden_markov": (hidden_markov, DATA),
    "nested_plates": (nested_plates, DATA.reshape(2, 3)),
}


def evidence_of_target(model, y):
    target = bk.Target.from_pyro(model, y)
    return float(target.log_density(target.unconstrain({"centre": CENTRE.reshape(1)})))


def test_by_hand():
    joint = {(0, 0): 0.8 * 0.6 * 0.05, (0, 1): 0.8 * 0.4 * 0.9, (1, 0): 0.2 * 0.99 * 0.8, (1, 1): 0.2 * 0.01 * 0.99}
    total = sum(joint.values())
    posterior = enumerate_latents(sprinkler, WET)
    assert posterior.log_evidence == pytest.approx(math.log(total), abs=1e-14)
    table = posterior.to_pandas()
    assert table["probability"].is_monotonic_decreasing
    for row in table.itertuples():
        assert row.probability == pytest.approx(joint[row.rain, row.on] / total, abs=1e-14)
    rain = posterior.marginal("rain")
    assert rain.values.tolist() == [0.0, 1.0]
    assert float(rain.probabilities[1]) == pytest.approx((joint[1, 0] + joint[1, 1]) / total, abs=1e-14)
    best = posterior.most_probable()
    assert (best.values["rain"], best.values["on"]) == (0, 1)
    assert best.probability == pytest.approx(joint[0, 1] / total, abs=1e-14)
    both = posterior.expectation(lambda sites: sites["rain"] * sites["on"])
    assert float(both) == pytest.approx(joint[1, 1] / total, abs=1e-14)


@pytest.mark.parametrize("name", SECOND_OPINIONS)
def test_against_target_and_pyro(name):
    model, y = SECOND_OPINIONS[name]
    fixed = pyro.condition(model, {"centre": CENTRE})
    ours = enumerate_latents(fixed, y)
    assert ours.log_evidence == pytest.approx(evidence_of_target(model, y), abs=1e-12)
    plates = 2 if name == "nested_plates" else 1
    elbo = TraceEnum_ELBO(max_plate_nesting=plates)
    assert ours.log_evidence == pytest.approx(-elbo.loss(config_enumerate(fixed), lambda y: None, y), abs=1e-5)


@pytest.mark.parametrize("name", SECOND_OPINIONS)
def test_replays_agree_with_batches(name, monkeypatch):
    model, y = SECOND_OPINIONS[name]
    fixed = pyro.condition(model, {"centre": CENTRE})
    y = y[:4] if name != "nested_plates" else y
    batched = enumerate_latents(fixed, y)

    def refuse(*arguments):
        raise RuntimeError("no batches here")

    monkeypatch.setattr(replay.ReplayedModel, "run_batch", refuse)
    replayed = enumerate_latents(fixed, y)
    assert len(replayed) == len(batched)
    for site, values in batched.assignments.items():
        assert torch.equal(replayed.assignments[site], values)
    assert torch.allclose(replayed.log_joint, batched.log_joint, rtol=0, atol=1e-12)


def test_hidden_markov_leaves_out_what_cannot_be():
    fixed = pyro.condition(hidden_markov, {"centre": CENTRE})
    posterior = enumerate_latents(fixed, DATA[:4])
    # No move leads from state 1 to state 0: count the paths by powers of the adjacency matrix.
    allowed = np.array([[1, 1, 1], [0, 1, 1], [1, 1, 1]])
    assert len(posterior) == np.linalg.matrix_power(allowed, 4)[0].sum()
    assert float(posterior.log_prior.logsumexp(0)) == pytest.approx(0, abs=1e-12)


def test_sites_that_exist_only_sometimes():
    """Toss until the first head, at most five times; the data say how often."""

    def tosses():
        for i in range(5):
            if pyro.sample(f"head_{i}", dist.Bernoulli(0.3)):
                break
        pyro.sample("seen", dist.Normal(float(i), 1.0), obs=torch.tensor(2.0))

    posterior = enumerate_latents(tosses)
    prior = [0.3 * 0.7**i for i in range(4)] + [0.7**4 * 0.3, 0.7**5]
    counts = [0, 1, 2, 3, 4, 4]
    normal = [math.exp(-0.5 * (n - 2) ** 2) / math.sqrt(2 * math.pi) for n in counts]
    assert len(posterior) == 6
    total = sum(p * f for p, f in zip(prior, normal, strict=True))
    assert posterior.log_evidence == pytest.approx(math.log(total), abs=1e-13)
    exists = sum(p * f for p, f in zip(prior[2:], normal[2:], strict=True)) / total
    assert float(posterior.marginal("head_2").probabilities.sum()) == pytest.approx(exists, abs=1e-13)
    assert posterior.to_pandas()["head_4"].isna().sum() == 4


def test_values_that_depend_on_others():
    def thinned():
        n = pyro.sample("n", dist.Binomial(4, 0.4))
        k = pyro.sample("k", dist.Binomial(int(n), 0.5))
        with pyro.plate("marks", int(k) + 1):
            mark = pyro.sample("mark", dist.Categorical(torch.tensor([0.5, 0.25, 0.25])))
        pyro.sample("o", dist.Normal(mark.sum().double(), 1.0), obs=torch.tensor(1.5))

    posterior = enumerate_latents(thinned)
    # A thinned binomial is binomial, and the marks are independent of the rest.
    total, size = 0.0, 0
    marks = np.array([0.5, 0.25, 0.25])
    for k in range(5):
        weight = math.comb(4, k) * 0.2**k * 0.8 ** (4 - k)
        sums = np.array([1.0])
        for _ in range(k + 1):
            sums = np.convolve(sums, marks)
        density = np.exp(-0.5 * (np.arange(len(sums)) - 1.5) ** 2) / math.sqrt(2 * math.pi)
        total += weight * float(sums @ density)
        size += (5 - k) * 3 ** (k + 1)
    assert len(posterior) == size
    assert posterior.log_evidence == pytest.approx(math.log(total), abs=1e-12)
    assert posterior.assignments["mark"].shape == (size, 5)
    assert float(posterior.marginal("mark").probabilities[0].sum()) == pytest.approx(1, abs=1e-12)


def test_factors_that_forbid():
    """Colour a triangle with three colours: 6 of 27."""

    def colours():
        with pyro.plate("corners", 3):
            c = pyro.sample("c", dist.Categorical(torch.ones(3)))
        clash = (c[0] == c[1]) | (c[1] == c[2]) | (c[0] == c[2])
        pyro.factor("proper", torch.where(clash, -math.inf, 0.0))

    posterior = enumerate_latents(colours)
    assert posterior.log_evidence == pytest.approx(math.log(6 / 27), abs=1e-13)
    assert int((posterior.probabilities > 0).sum()) == 6
    # A function may be undefined where the posterior is zero.
    value = posterior.expectation(lambda sites: 1 / (sites["c"][:, 0] - sites["c"][:, 1]).double().abs())
    assert float(value) == pytest.approx((4 * 1 + 2 * 0.5) / 6, abs=1e-13)


def test_unusual_sites():
    def model():
        one_hot = pyro.sample("one_hot", dist.OneHotCategorical(torch.tensor([0.2, 0.3, 0.5])))
        bits = pyro.sample("bits", dist.Bernoulli(torch.tensor(0.3)).expand([2]).to_event(1))
        with poutine.mask(mask=torch.tensor([True, False])), pyro.plate("pair", 2):
            pyro.sample("hidden", dist.Bernoulli(0.1))
        pyro.sample("o", dist.Bernoulli(0.1 + 0.4 * one_hot[2] + 0.2 * bits.sum()), obs=torch.tensor(1.0))

    posterior = enumerate_latents(model)
    assert len(posterior) == 3 * 4 * 4
    assert posterior.log_evidence == pytest.approx(math.log(0.1 + 0.4 * 0.5 + 0.2 * 0.6), abs=1e-13)
    assert posterior.marginal("one_hot").probabilities.shape == (3, 2)
    assert torch.allclose(posterior.marginal("hidden").probabilities[:, 1], torch.tensor(0.1, dtype=F64), atol=1e-12)


def test_points_and_single_precision():
    def model(y):
        shift = pyro.sample("shift", dist.Delta(torch.tensor(0.5)))
        z = pyro.sample("z", dist.Bernoulli(torch.tensor(0.3, dtype=torch.float32)))
        twice = pyro.deterministic("twice", 2 * z)
        pyro.sample("y", dist.Normal(twice + shift, 1.0), obs=y)

    posterior = enumerate_latents(model, torch.tensor(1.0))
    normal = [math.exp(-0.5 * (1.0 - m) ** 2) / math.sqrt(2 * math.pi) for m in (0.5, 2.5)]
    assert posterior.log_evidence == pytest.approx(math.log(0.7 * normal[0] + 0.3 * normal[1]), abs=1e-6)
    assert list(posterior.assignments) == ["z"]


def test_draws_and_tables(limit):
    posterior = enumerate_latents(sprinkler, WET)
    draws = posterior.sample(20_000, seed=3)
    p = float(posterior.marginal("rain").probabilities[1])
    z = (float(draws["rain"].double().mean()) - p) / math.sqrt(p * (1 - p) / 20_000)
    assert abs(z) < limit()
    data = posterior.to_arviz(num_chains=2, num_draws=50)
    assert data["posterior"]["rain"].shape == (2, 50)
    fixed = pyro.condition(nested_plates, {"centre": CENTRE})
    table = enumerate_latents(fixed, DATA.reshape(2, 3)).to_pandas()
    assert list(table)[:3] == ["kind[0,0]", "kind[1,0]", "on[0,0]"]
    assert table["probability"].sum() == pytest.approx(1, abs=1e-12)


def test_a_model_without_latent_sites():
    posterior = enumerate_latents(lambda: pyro.sample("y", dist.Bernoulli(0.25), obs=torch.tensor(1.0)))
    assert posterior.log_evidence == pytest.approx(math.log(0.25), abs=1e-14)
    assert len(posterior) == len(posterior.to_pandas()) == 1


def test_parameters_are_constants_and_stay_where_they_were():
    def model():
        p = pyro.param("p", torch.tensor(0.3, dtype=F64))
        z = pyro.sample("z", dist.Bernoulli(p))
        pyro.sample("y", dist.Bernoulli(0.2 + 0.5 * z), obs=torch.tensor(1.0))

    assert enumerate_latents(model).log_evidence == pytest.approx(math.log(0.2 + 0.15), abs=1e-14)
    assert "p" not in pyro.get_param_store()
    with pyro.get_param_store().scope():
        pyro.param("p", torch.tensor(0.6, dtype=F64))
        assert enumerate_latents(model).log_evidence == pytest.approx(math.log(0.2 + 0.3), abs=1e-14)


def test_the_space_is_counted_first():
    fixed = pyro.condition(mixture, {"centre": CENTRE})
    with pytest.raises(SettingsError, match="12157665459056928801 joint assignments, and max_assignments is 100000"):
        enumerate_latents(fixed, torch.zeros(40, dtype=F64))
    assert len(enumerate_latents(fixed, DATA, max_assignments=729)) == 729
    with pytest.raises(SettingsError, match="729 joint assignments"):
        enumerate_latents(fixed, DATA, max_assignments=728)

    def growing():
        n = pyro.sample("n", dist.Categorical(torch.ones(6)))
        with pyro.plate("p", int(n) + 1):
            pyro.sample("x", dist.Bernoulli(0.5))

    assert len(enumerate_latents(growing, max_assignments=126)) == 126
    with pytest.raises(SettingsError, match="more than 125 joint assignments"):
        enumerate_latents(growing, max_assignments=125)
    with pytest.raises(SettingsError, match="max_assignments must be at least 1"):
        enumerate_latents(growing, max_assignments=0)


def subsampled():
    with pyro.plate("data", 10, subsample_size=2):
        pyro.sample("z", dist.Bernoulli(0.5))


def scaled():
    with poutine.scale(scale=2.0):
        pyro.sample("z", dist.Bernoulli(0.5))


def undefined():
    z = pyro.sample("z", dist.Bernoulli(0.5))
    pyro.sample("f", dist.Normal(torch.where(z > 0, math.nan, 0.0), 1.0, validate_args=False), obs=torch.tensor(0.0))


def broken():
    z = pyro.sample("z", dist.Categorical(torch.ones(3)))
    torch.ones(2)[int(z)]


def twice():
    pyro.sample("z", dist.Bernoulli(0.5))
    pyro.factor("z", torch.tensor(0.5))


def unlike():
    with pyro.plate("p", 2):
        pyro.sample("z", dist.Binomial(torch.tensor([1.0, 2.0]), 0.5))


@pytest.mark.parametrize(
    ("model", "error", "said"),
    [
        (
            lambda: pyro.sample("mu", dist.Normal(0.0, 1.0)),
            UnsupportedSiteError,
            "'mu' is continuous .Normal.*condition",
        ),
        (lambda: pyro.sample("n", dist.Poisson(2.0)), UnsupportedSiteError, "'n' is a Poisson.*truncate"),
        (unlike, UnsupportedSiteError, "site 'z' have different supports.*Python loop"),
        (subsampled, ModelError, "plate 'data' subsamples"),
        (scaled, ModelError, "'z' is scaled"),
        (undefined, ModelError, "site 'f' is nan at z = 1.0"),
        (broken, ModelError, "at or after site 'z' in .*, line .*, in broken"),
        (twice, ModelError, "two sites are named 'z'"),
        (3, ModelError, "a Pyro model is a callable"),
    ],
)
def test_bad_models(model, error, said):
    with pytest.raises(error, match=said):
        enumerate_latents(model)


def test_bad_questions():
    posterior = enumerate_latents(sprinkler, WET)
    with pytest.raises(UnknownNameError, match="'snow'; there are: rain, on"):
        posterior.marginal("snow")
    with pytest.raises(ShapeError, match="all assignments at once"):
        posterior.expectation(lambda sites: sites["rain"].sum())
    impossible = enumerate_latents(lambda: pyro.factor("never", torch.tensor(-math.inf)))
    assert impossible.log_evidence == -math.inf
    with pytest.raises(ImproperPosteriorError, match="zero at every assignment"):
        impossible.to_pandas()


def test_what_is_random_outside_the_sites_is_noticed():
    names = iter(["a", "b", "a", "c", "a", "d", "a", "e"])

    def model():
        pyro.sample(next(names), dist.Bernoulli(0.5))
        pyro.sample(next(names), dist.Bernoulli(0.5))

    with pytest.raises(ModelError, match=r"by pyro\.sample only"):
        enumerate_latents(model)


def test_mutations_are_caught(monkeypatch):
    fixed = pyro.condition(mixture, {"centre": CENTRE})
    truth = evidence_of_target(mixture, DATA[:3])
    good = module._assignments

    def one_value_short(choices, number):
        return {name: value.clamp(max=1) for name, value in good(choices, number).items()}

    with monkeypatch.context() as patch:
        patch.setattr(module, "_assignments", one_value_short)
        # Batches whose prior does not add up to one are not believed.
        assert enumerate_latents(fixed, DATA[:3]).log_evidence == pytest.approx(truth, abs=1e-12)
        patch.setattr(module, "UNIT_MASS", math.inf)
        assert abs(enumerate_latents(fixed, DATA[:3]).log_evidence - truth) > 0.1
    with monkeypatch.context() as patch:
        listed = replay.values_of_element
        patch.setattr(replay, "values_of_element", lambda name, base: listed(name, base)[:-1])
        with pytest.raises(ModelError, match="add up to 0.5 instead of one"):
            enumerate_latents(fixed, DATA[:3])
