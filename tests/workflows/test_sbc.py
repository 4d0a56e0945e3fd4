import itertools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import binom, chisquare

import bayeskit as bk
from bayeskit import exact
from bayeskit._core.randomness import new_generator
from bayeskit._core.uniformity import chi_square_p_value, ecdf_band, ecdf_p_value, holm, local_p_value
from bayeskit._logdensity.combinators import Replicas
from bayeskit.errors import (
    CheckpointError,
    DataError,
    ModelError,
    SettingsError,
    UnknownNameError,
    UnsupportedSiteError,
)
from bayeskit.workflows import _simulation_based_calibration as simulation_based_calibration
from bayeskit.workflows._simulation_based_calibration import SBCResult, sbc

FAILURE_RATE = 1e-5
NUM_DATA = 5
Y = torch.zeros(NUM_DATA, dtype=torch.float64)


def normal_model(y):
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


class Conjugate:
    """Independent draws from the posterior of the normal model, or from something else."""

    def __init__(self, shift=0.0, scale=1.0, ignores_data=False):
        self.shift, self.scale, self.ignores_data = shift, scale, ignores_data

    def __call__(self, target, seed):
        _, gradient = target.value_and_grad(torch.zeros(1, 1, dtype=torch.float64))
        precision = 1 if self.ignores_data else 1 + NUM_DATA
        noise = torch.randn(4, 250, 1, generator=new_generator(seed), dtype=torch.float64)
        mean = 0.0 if self.ignores_data else gradient / precision
        u = mean + (self.shift + self.scale * noise) / math.sqrt(precision)
        log_prior, log_likelihood = target.evaluate(u)
        return bk.Draws(u, log_prior, log_likelihood, torch.ones(4, dtype=torch.float64), target=target)


def study(sampler, num_replicates=300, **settings):
    return sbc(normal_model, sampler, args=(Y,), num_replicates=num_replicates, progress=False, **settings)


# -- the verdict --------------------------------------------------------------------------------


@pytest.mark.calibration
def test_exact_draws_pass():
    result = study(Conjugate())
    assert set(result.ranks) == {"mean", "log_likelihood"}
    assert result.smallest_p_value > FAILURE_RATE and not result.warnings
    assert result.ranks["mean"].min() >= 0 and result.ranks["mean"].max() <= 63


@pytest.mark.calibration
@pytest.mark.parametrize(
    ("sampler", "sign", "num_replicates"),
    [(Conjugate(shift=0.65), -1, 300), (Conjugate(shift=-0.65), 1, 300), (Conjugate(scale=0.5), 0, 200)],
)
def test_draws_that_are_shifted_or_too_narrow_are_noticed(sampler, sign, num_replicates, limit):
    result = study(sampler, num_replicates)
    z, spread = result.to_pandas().set_index("quantity").loc["mean", ["z", "spread"]]
    assert not result.passed and result.p_values.loc["mean"].min() < FAILURE_RATE
    assert sign * z > limit() if sign else spread > 1.1 and abs(z) < limit() * spread


def test_a_sampler_that_ignores_the_data_is_noticed_by_the_log_likelihood_alone():
    result = study(Conjugate(ignores_data=True), 100)
    assert result.p_values.loc["mean"].min() > FAILURE_RATE
    assert result.p_values.loc["log_likelihood"].min() < FAILURE_RATE and not result.passed


def short(target, seed):
    return bk.sample(target, 16, 50, 20, seed=seed, progress=False)


@pytest.mark.calibration
def test_a_sampler_that_is_wrong_for_some_data_is_noticed_locally():
    exact_draws = study(Conjugate())
    assert set(exact_draws.data_statistics) == {"mean of y", "sd of y"}
    assert exact_draws.local_p_values.to_numpy().min() > FAILURE_RATE and exact_draws.passed_locally
    # Ranks of draws from the prior are uniform, and depend on nothing but the data.
    prior = study(Conjugate(ignores_data=True))
    assert prior.p_values.loc["mean"].min() > FAILURE_RATE
    assert prior.local_p_values.loc["mean", "mean of y"] < FAILURE_RATE and not prior.passed_locally


def test_local_p_values_are_uniform(limit):
    generator = np.random.default_rng(3)
    below = 0
    for _ in range(2000):
        statistic = generator.integers(0, 4, 80) if _ % 2 else generator.standard_cauchy(80)
        below += local_p_value(generator.integers(0, 20, 80), 19, statistic) < 0.05
    assert abs(below - 100) < limit() * math.sqrt(2000 * 0.05 * 0.95)
    assert local_p_value(generator.integers(0, 20, 80), 19, np.ones(80)) == 1.0


@pytest.mark.calibration
def test_hamiltonian_monte_carlo_on_a_binomial():
    case = exact.get("beta_binomial")
    result = sbc(case.model, short, args=case.args, num_replicates=24, num_draws=15, seed=4, progress=False)
    assert set(result.ranks) == {"p", "log_likelihood"} and not result.warnings
    assert result.smallest_p_value > FAILURE_RATE, result


def counts_model(x, count):
    """Poisson counts whose rates come from two groups, the membership summed out."""
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 0.5))
    share = pyro.sample("share", dist.Beta(x.new_tensor(2.0), 2.0))
    with pyro.plate("data", len(x)):
        group = pyro.sample("group", dist.Bernoulli(share), infer={"enumerate": "parallel"})
        pyro.sample("count", dist.Poisson((slope * x + 1.5 * group).exp()), obs=count)


@pytest.mark.long
def test_hamiltonian_monte_carlo_on_a_mixture_of_counts():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)
    args = (x, torch.zeros(12, dtype=torch.int64))
    result = sbc(counts_model, short, args=args, num_replicates=24, num_draws=15, seed=1, progress=False)
    assert set(result.ranks) == {"slope", "share", "log_likelihood"} and not result.warnings
    assert result.smallest_p_value > FAILURE_RATE, result


# -- running ------------------------------------------------------------------------------------


@pytest.mark.calibration
def test_processes_and_an_interruption_change_nothing(tmp_path):
    settings = {"num_replicates": 24, "num_draws": 15, "seed": 3}
    expected = study(Conjugate(), **settings)
    folder = tmp_path / "run"
    first = study(Conjugate(), checkpoint=folder, **settings)
    for index in (3, 20):
        (folder / f"task-{index:06d}.safetensors").unlink()
    resumed = study(Conjugate(), checkpoint=folder, num_jobs=2, **settings)
    for result in (first, resumed):
        assert all(np.array_equal(result.ranks[name], expected.ranks[name]) for name in expected.ranks)
        assert np.array_equal(result.effective_sample_size, expected.effective_sample_size)
    other = study(Conjugate(), **(settings | {"seed": 4}))
    assert not np.array_equal(other.ranks["mean"], expected.ranks["mean"])
    with pytest.raises(CheckpointError, match="give another checkpoint folder"):
        study(Conjugate(), checkpoint=folder, **(settings | {"seed": 4}))
    with pytest.raises(CheckpointError, match="give another checkpoint folder"):
        study(Conjugate(shift=1.0), checkpoint=folder, **settings)


def factor_model(y):
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
    pyro.factor("data", dist.Normal(mean, 1.0).log_prob(y).sum())


def simulate_normal(values, generator):
    return (values["mean"] + torch.randn(NUM_DATA, generator=generator, dtype=torch.float64),)


def simulate_too_wide(values, generator):
    return (values["mean"] + 2 * torch.randn(NUM_DATA, generator=generator, dtype=torch.float64),)


@pytest.mark.calibration
def test_a_factor_needs_a_simulator_of_its_own():
    with pytest.raises(UnsupportedSiteError, match=r"factor 'data'.*simulate="):
        sbc(factor_model, Conjugate(), args=(Y,), progress=False)
    settings = {"args": (Y,), "num_replicates": 100, "progress": False}
    right = sbc(factor_model, Conjugate(), simulate=simulate_normal, **settings)
    wrong = sbc(factor_model, Conjugate(), simulate=simulate_too_wide, **settings)
    assert right.smallest_p_value > FAILURE_RATE > wrong.smallest_p_value


def test_the_default_sampler_runs_longer_where_draws_are_correlated(monkeypatch):
    lengths = []

    def sample(target, num_chains, num_warmup, num_samples, seed, *, progress):
        lengths.append(num_samples)
        draws = Conjugate()(target, seed)
        u = draws.unconstrained
        if num_samples == 200:
            u = u[:, :9].repeat_interleave(7, 1)
        return bk.Draws(u, *target.evaluate(u), draws.beta, target=target)

    monkeypatch.setattr(simulation_based_calibration, "sample", sample)
    result = study(None, 20, num_draws=63)
    assert lengths == [200, 600] * 20 and not result.warnings


def test_correlated_draws_are_said():
    def stuck(target, seed):
        draws = Conjugate()(target, seed)
        u = draws.unconstrained[:, :9].repeat_interleave(7, 1)
        return bk.Draws(u, *target.evaluate(u), draws.beta, target=target)

    result = study(stuck, 20)
    assert "effective sample size is below" in result.warnings[0] and "20 of 20" in str(result)


def test_the_table_and_the_plot():
    result = study(Conjugate(), 40, num_draws=19)
    table = result.to_pandas()
    assert list(table["quantity"]) == ["mean", "log_likelihood"] and (table["adjusted"] >= table["ecdf"]).all()
    figure = result.plot()
    assert len(figure.axes) == 4 and len(result.plot(["mean"]).axes) == 2
    with pytest.raises(UnknownNameError, match="'variance'"):
        result.plot(["variance"])


@pytest.mark.parametrize("setting", [{"num_replicates": 5}, {"num_draws": 1}, {"significance": 0.0}, {"num_jobs": 0}])
def test_settings_outside_their_domain_are_refused(setting):
    with pytest.raises(SettingsError, match=next(iter(setting))):
        sbc(normal_model, Conjugate(), args=(Y,), progress=False, **setting)


def test_what_is_no_sampler_or_no_tuple_is_refused():
    settings = {"num_replicates": 20, "progress": False}
    with pytest.raises(SettingsError, match="sampler must be a function, not 'nuts'"):
        sbc(normal_model, "nuts", args=(Y,), **settings)
    with pytest.raises(SettingsError, match=r"args must be a tuple such as \(data,\), not a Tensor"):
        sbc(normal_model, Conjugate(), args=Y, **settings)
    with pytest.raises(SettingsError, match=r"must return bayeskit\.Draws, not Tensor"):
        sbc(normal_model, lambda target, seed: target.sample_prior(63, seed=seed), args=(Y,), **settings)


# -- simulating, and the graph that all data share ------------------------------------------------


def test_simulated_data_follow_the_prior_predictive(limit):
    replicas = Replicas(bk.Target.from_pyro(normal_model, Y), 1)
    generator = new_generator(0)
    runs = [replicas.simulate(generator) for _ in range(2000)]
    mean = torch.stack([run.latent["mean"] for run in runs])
    y = torch.stack([run.observed["y"] for run in runs])
    scores = {
        "mean of y": y[:, 0].mean() / y[:, 0].std(),
        "variance of y": (y[:, 0].square() - 2).mean() / y[:, 0].square().std(),
        "covariance with the mean": (y[:, 0] * mean - 1).mean() / (y[:, 0] * mean).std(),
        "covariance of two data": (y[:, 0] * y[:, 1] - 1).mean() / (y[:, 0] * y[:, 1]).std(),
    }
    assert max(abs(float(z)) for z in scores.values()) * math.sqrt(len(runs)) < limit(len(scores)), scores


def test_the_shared_graph_is_the_density_given_the_simulated_data():
    x = torch.linspace(-1, 1, 12, dtype=torch.float64)
    target = bk.Target.from_pyro(counts_model, x, torch.zeros(12, dtype=torch.int64))
    replicas = Replicas(target, 1)
    generator = new_generator(1)
    u = torch.randn(6, target.dim, generator=generator, dtype=torch.float64)
    beta = torch.rand(6, generator=generator, dtype=torch.float64)
    fingerprints = {target.fingerprint()}
    for _ in range(2):
        observed = replicas.simulate(generator).observed
        shared, own = replicas.given_observed(observed), bk.Target.from_pyro(counts_model, x, observed["count"])
        for ours, theirs in zip(shared.evaluator(6)(u, beta), own.evaluator(6)(u, beta), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(shared.evaluate(u), own.evaluate(u), rtol=1e-12, atol=1e-12)
        fingerprints.add(shared.fingerprint())
    assert len(fingerprints) == 3  # the first target keeps its data


def test_arguments_share_a_graph_too_where_their_shapes_agree():
    target = bk.Target.from_pyro(factor_model, Y)
    replicas = Replicas(target, 1)
    u = torch.linspace(-1, 1, 3, dtype=torch.float64).unsqueeze(-1)
    for y in (Y + 1, Y - 2, torch.ones(7, dtype=torch.float64)):
        given, own = replicas.given_args((y,)), bk.Target.from_pyro(factor_model, y)
        torch.testing.assert_close(given.value_and_grad(u), own.value_and_grad(u), rtol=1e-12, atol=1e-12)
        assert given.fingerprint() == replicas.given_args((y,)).fingerprint() != target.fingerprint()
    assert len(replicas._engines) == 1


def test_counts_beyond_single_precision_get_a_graph_of_their_own():
    zero = torch.zeros((), dtype=torch.float32)

    def model(count):
        rate = pyro.sample("rate", dist.Normal(zero, 1.0))
        pyro.sample("count", dist.Poisson(rate.exp()), obs=count)

    target = bk.Target.from_pyro(model, torch.tensor(3))
    assert target.dtype == torch.float32
    large = torch.tensor(2**24 + 1)
    given = Replicas(target, 1).given_observed({"count": large})
    u = torch.zeros(2, 1)
    torch.testing.assert_close(given.evaluate(u), bk.Target.from_pyro(model, large).evaluate(u))
    torch.testing.assert_close(given.value_and_grad(u), bk.Target.from_pyro(model, large).value_and_grad(u))


def test_data_without_a_plate_keep_their_shape():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
        pyro.sample("y", dist.Normal(mean, 1.0).expand([len(y)]).to_event(1), obs=y)

    observed = Replicas(bk.Target.from_pyro(model, Y), 1).simulate(new_generator(0)).observed
    assert observed["y"].shape == (NUM_DATA,) and len(observed["y"].unique()) == NUM_DATA


def test_a_scaled_likelihood_and_a_target_of_functions_cannot_be_simulated():
    def scaled(y):
        mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.poutine.scale(scale=0.5), pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    with pytest.raises(ModelError, match=r"'y' is scaled.*simulate="):
        sbc(scaled, Conjugate(), args=(Y,), progress=False)
    target = bk.Target.from_functions(lambda u: -u.square().sum(-1), lambda u: u.sum(-1), 1)
    with pytest.raises(SettingsError, match="only a Pyro model"):
        Replicas(target, 1)


# -- the tests of uniformity ----------------------------------------------------------------------


def all_ranks(num_replicates, num_draws):
    return np.array(list(itertools.product(range(num_draws + 1), repeat=num_replicates)))


def test_the_p_value_of_the_ecdf_is_its_probability():
    """Against full enumeration: a p-value p is exceeded downwards, and met, with probability p."""
    values = np.array([ecdf_p_value(ranks, 3) for ranks in all_ranks(5, 3)])
    for p in np.unique(values):
        assert abs((values <= p + 1e-12).mean() - p) < 1e-12


def test_the_band_holds_as_many_curves_as_it_says():
    ranks = all_ranks(6, 3)
    curves = (ranks[:, :, None] <= np.arange(3)).mean(1)
    shares = []
    for coverage in (0.5, 0.8, 0.95):
        low, high = ecdf_band(6, 3, coverage)
        shares.append(((curves >= low) & (curves <= high)).all(1).mean())
        assert shares[-1] >= coverage
    assert shares[0] < 0.95  # discrete, but not wide without need


def test_pearson_and_holm():
    ranks = np.random.default_rng(0).integers(0, 16, 160)
    assert abs(chi_square_p_value(ranks, 15) - chisquare(np.bincount(ranks, minlength=16)).pvalue) < 1e-12
    np.testing.assert_allclose(holm(np.array([[0.04, 0.01], [0.03, 0.9]])), [[0.09, 0.04], [0.09, 0.9]])


def test_a_result_with_uniform_ranks_is_not_refused_more_often_than_its_level():
    generator = np.random.default_rng(1)
    failed = sum(
        not SBCResult(
            {"a": generator.integers(0, 20, 50), "b": generator.integers(0, 20, 50)},
            19,
            np.full(50, 100.0),
            np.zeros(50, dtype=int),
            significance=0.1,
        ).passed
        for _ in range(200)
    )
    assert failed <= binom.isf(1e-5, 200, 0.1)


def explosive_model(y):
    start = pyro.sample("start", dist.Normal(y.new_zeros(()), 1.0))
    times = torch.tensor([0.0, 0.5, 1.0, 2.0], dtype=y.dtype)
    path = bk.ode.solve(lambda t, z, _: z**2, start.reshape(1), times)  # infinite at time 1 / start
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Normal(path[1:, 0], 0.3), obs=y)


def draws_on_a_grid(target, seed):
    generator = new_generator(seed)
    grid = torch.linspace(-5, 0.5, 4000, dtype=torch.float64).unsqueeze(-1)
    weights = target.log_density(grid).nan_to_num(nan=-math.inf).softmax(0)
    u = grid[torch.multinomial(weights, 1000, replacement=True, generator=generator)].reshape(4, 250, 1)
    u = u + (torch.rand(u.shape, generator=generator, dtype=torch.float64) - 0.5) * float(grid[1] - grid[0])
    log_prior, log_likelihood = target.evaluate(u)
    return bk.Draws(u, log_prior, log_likelihood, torch.ones(4, dtype=torch.float64), target=target)


@pytest.mark.calibration
def test_parameters_without_finite_data_are_drawn_again_and_counted():
    result = sbc(explosive_model, draws_on_a_grid, args=(Y[:3],), num_replicates=100, progress=False)
    again = int(result.num_not_finite.sum())
    share = float(torch.distributions.Normal(0.0, 1.0).cdf(torch.tensor(-0.5)))  # starts above .5
    low, high = binom.ppf([FAILURE_RATE, 1 - FAILURE_RATE], again + 100, share)
    assert low <= again <= high and f"{again} of {again + 100} simulated data were not finite" in str(result)
    assert result.smallest_p_value > FAILURE_RATE
    assert "finite" not in str(study(Conjugate(), 20))


def test_data_that_are_never_finite_are_refused(monkeypatch):
    monkeypatch.setattr(simulation_based_calibration, "_MOST_SIMULATIONS", 20)
    with pytest.raises(DataError, match="20 simulations in turn"):
        simulate = lambda values, generator: (torch.full_like(Y, math.nan),)  # noqa: E731
        sbc(factor_model, Conjugate(), args=(Y,), simulate=simulate, num_replicates=20, progress=False)


def test_simulated_arguments_may_hold_infinite_bounds():
    def model(y, upper):
        factor_model(torch.minimum(y, upper))

    def simulate(values, generator):
        return *simulate_normal(values, generator), torch.tensor(math.inf, dtype=torch.float64)

    args = Y, torch.tensor(math.inf, dtype=torch.float64)
    result = sbc(model, Conjugate(), args=args, simulate=simulate, num_replicates=20, progress=False)
    assert result.num_replicates == 20 and not result.num_not_finite.any()


def test_a_simulation_without_arguments_is_refused():
    with pytest.raises(SettingsError, match="simulate returned NoneType and must return the arguments"):
        sbc(factor_model, Conjugate(), args=(Y,), simulate=lambda *_: None, num_replicates=20, progress=False)
