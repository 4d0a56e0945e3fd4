"""Chains that go on: more draws after a run, or from its checkpoint, are those of one longer run."""

import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import CheckpointError, DrawsError, SettingsError
from bayeskit.inference.evidence import _shared_runs
from bayeskit.inference.samplers import NUTS, sample_nested

EFFECTS = torch.tensor([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0], dtype=torch.float64)
ERRORS = torch.tensor([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0], dtype=torch.float64)


def schools(effects, errors):
    mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
    spread = pyro.sample("spread", dist.HalfCauchy(5.0))
    with pyro.plate("school", 8):
        effect = pyro.sample("effect", dist.Normal(mean, spread))
        pyro.sample("y", dist.Normal(effect, errors), obs=effects)


def target(effects=EFFECTS):
    """Return a new target: one that has been sampled knows modes, from which later chains start."""
    return bk.Target.from_pyro(schools, effects, ERRORS, compile=False)


def run(num_samples, **settings):
    return bk.sample(target(), num_warmup=40, num_samples=num_samples, progress=False, **settings)


def assert_same(one, other):
    for part in ("unconstrained", "log_prior", "log_likelihood", "beta"):
        assert torch.equal(getattr(one, part), getattr(other, part))
    assert one.sample_stats.keys() == other.sample_stats.keys()
    assert all(torch.equal(x, other.sample_stats[name]) for name, x in one.sample_stats.items())
    assert one.num_gradients == other.num_gradients and one.settings == other.settings


pytestmark = [
    pytest.mark.calibration,
    pytest.mark.filterwarnings("ignore::bayeskit.errors.SamplingWarning"),  # short chains
]


@pytest.mark.parametrize(
    "settings",
    [{}, {"kernel": NUTS()}, {"thinning": 2}, {"num_groups": 2}, {"reparameterize": False, "metric": "dense"}],
    ids=lambda settings: "-".join(settings) or "defaults",
)
def test_draws_go_on_bit_for_bit(settings):
    short = run(20, **settings)
    assert_same(short.extend(15, progress=False).extend(5), run(40, **settings))
    assert short.num_draws == 20  # as they were


def test_a_checkpoint_goes_on_with_more_draws(tmp_path):
    path = tmp_path / "run"
    run(20, checkpoint=path)
    written = path.read_bytes()
    with pytest.raises(CheckpointError, match="num_samples=20, this run has num_samples=10"):
        run(10, checkpoint=path)
    with pytest.raises(CheckpointError, match="another model or of other data"):
        bk.sample(target(2 * EFFECTS), num_warmup=40, num_samples=40, progress=False, checkpoint=path)
    assert path.read_bytes() == written
    assert_same(run(40, checkpoint=path), run(40))


def test_what_was_drawn_at_the_old_draws_alone_is_left_out():
    short = run(20).predictive()
    longer = short.extend(5, progress=False)
    assert short.posterior_predictive and not longer.posterior_predictive
    assert_same(longer, run(25))


def test_draws_of_another_process_go_on():
    short = run(20)
    assert_same(pickle.loads(pickle.dumps(short)).extend(5, progress=False), run(25))


def test_an_interrupted_run_goes_on():
    stopped = run(10**6, time_budget=5.0)
    longer = stopped.extend(5, progress=False)
    assert longer.num_draws == stopped.num_draws + 5 and longer.settings["ending"] == "finished"


def test_where_the_chains_ended_has_to_be_known(tmp_path):
    draws = run(20)
    draws.save(tmp_path / "draws")
    loaded = bk.Draws.load(tmp_path / "draws", target())
    nested = sample_nested(bk.exact.get("beta_binomial").target(), num_live=20, progress=False).draws
    for other in (loaded, draws.thin(2), draws.select([0, 1]), bk.Draws.join([draws, draws]), nested):
        with pytest.raises(DrawsError, match="cannot be extended: .* with more num_samples"):
            other.extend(5)
    for wrong in (0, 2.5, "many"):
        with pytest.raises(SettingsError, match="num_samples"):
            draws.extend(wrong)


def test_draws_stand_for_their_target(tmp_path):
    draws = run(200)
    evidence = bk.evidence
    for name in ("bridge_sampling", "laplace", "learned_harmonic_mean"):
        estimate = getattr(evidence, name)
        alone, both = estimate(draws, seed=2), estimate(draws.target, draws=draws, seed=2)
        assert (alone.log_evidence, alone.standard_error) == (both.log_evidence, both.standard_error)
    few = evidence.bridge_sampling(draws, num_proposals=64)
    assert few.num_evaluations < evidence.bridge_sampling(draws, draws).num_evaluations
    table = evidence.compare(draws, ["bridge_sampling"], progress=False)
    assert table.draws is draws
    one = evidence.bridge_sampling(draws)
    assert table["bridge_sampling"].log_evidence == one.log_evidence
    assert evidence.naive_monte_carlo(draws, num_draws=100).log_evidence < 0
    draws.save(tmp_path / "draws")
    with pytest.raises(DrawsError, match="no target"):
        evidence.bridge_sampling(bk.Draws.load(tmp_path / "draws"))


def test_models_are_compared_by_the_draws_that_there_are(monkeypatch):
    def pooled(effects, errors):
        mean = pyro.sample("mean", dist.Normal(0.0, 5.0))
        with pyro.plate("school", 8):
            pyro.sample("y", dist.Normal(mean, errors), obs=effects)

    draws = {"groups": run(200), "pooled": bk.sample(pooled, EFFECTS, ERRORS, progress=False)}
    monkeypatch.setattr(_shared_runs, "sample", None)
    found = bk.compare_models(draws, progress=False)
    for name, own in draws.items():
        alone = bk.evidence.bridge_sampling(own)
        assert abs(found[name].log_evidence - alone.log_evidence) < 6 * alone.standard_error
