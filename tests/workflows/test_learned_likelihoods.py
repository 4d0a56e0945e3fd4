"""Likelihoods learned from simulators whose likelihood is known: in hierarchies, stored, refined; what is refused."""

import math
import random
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit.errors import CheckpointError, DataError, DataWarning, SettingsError, ShapeError
from bayeskit.workflows import learn_likelihood, rejection_abc
from bayeskit.workflows._learned_likelihoods import LearnedLikelihood

DOUBLE = torch.float64
PLAIN = dist.Normal(torch.zeros(1, dtype=DOUBLE), 2.0).to_event(1)


def location_and_scale():
    location = pyro.sample("location", dist.Normal(torch.zeros((), dtype=DOUBLE), 2.0))
    return location, pyro.sample("scale", dist.LogNormal(torch.zeros((), dtype=DOUBLE), 0.7))


def normal(theta, generator):
    return theta[:, 0] + theta[:, 1] * torch.randn(len(theta), generator=generator, dtype=DOUBLE)


def shifted(theta, generator):
    return theta[:, 0] + torch.randn(len(theta), generator=generator, dtype=DOUBLE)


def prior_draws(count, seed):
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return torch.stack([2 * noise[:, 0], (0.7 * noise[:, 1]).exp()], 1)


@pytest.fixture(scope="module")
def learned():
    return learn_likelihood(normal, location_and_scale, num_simulations=10_000, progress=False)


@pytest.fixture(scope="module")
def small():
    return learn_likelihood(shifted, PLAIN, num_simulations=1000, num_epochs=10, progress=False)


def divergence(likelihood, theta, seed=1):
    """Mean divergence from the true likelihood at parameters, and its standard error."""
    y = normal(theta, torch.Generator().manual_seed(seed))
    off = dist.Normal(theta[:, 0], theta[:, 1]).log_prob(y) - likelihood(theta, False).log_prob(y)
    return float(off.mean()), float(off.std()) / math.sqrt(len(off))


@pytest.mark.long
def test_the_likelihood_is_that_of_the_simulator(learned, limit):
    mean, error = divergence(learned, prior_draws(20_000, 0))
    assert -limit() * error < mean < 0.03 and learned.trusted and learned.num_simulations == 10_000
    # The entropy of the true likelihood, whose log scale has mean zero and standard deviation 0.7.
    entropy = 0.5 * math.log(2 * math.pi * math.e)
    spread = math.hypot(learned.score_error, 0.0)
    assert abs(learned.score + entropy) < 0.03 + limit() * spread and learned.calibration_error < 0.1
    assert "held-out" in str(learned) and learned.failures == {}


def on_a_grid():
    location = torch.linspace(-6, 6, 241, dtype=DOUBLE)
    log_scale = torch.linspace(-2, 2, 201, dtype=DOUBLE)
    grid = torch.cartesian_prod(location, log_scale)
    log_prior = dist.Normal(0.0, 2.0).log_prob(grid[:, 0]) + dist.Normal(0.0, 0.7).log_prob(grid[:, 1])
    return grid, log_prior


def moments(points, weights):
    mean = weights @ points
    return torch.cat([mean, (weights @ (points - mean).square()).sqrt()])


@pytest.mark.long
def test_a_posterior_is_nearer_than_that_of_rejection(learned):
    y = normal(torch.tensor([[1.0, 0.8]], dtype=DOUBLE).expand(20, 2), torch.Generator().manual_seed(3))
    grid, log_prior = on_a_grid()
    theta = torch.stack([grid[:, 0], grid[:, 1].exp()], 1)
    exact = moments(grid, (log_prior + sum(dist.Normal(*theta.T).log_prob(v) for v in y)).softmax(0))
    with torch.no_grad():
        by_network = sum(learned(theta, False).log_prob(v.expand(len(theta))) for v in y)
    found = moments(grid, (log_prior + by_network).softmax(0))
    kept = rejection_abc(normal, location_and_scale, y, num_simulations=10_000, share=0.05)
    points = torch.stack([kept[:, 0], kept[:, 1].log()], 1)
    rejected = moments(points, torch.full((len(points),), 1 / len(points), dtype=DOUBLE))
    spread = exact[2:].repeat(2)
    off, off_by_rejection = ((x - exact).abs() / spread for x in (found, rejected))
    assert float(off.max()) < 0.35 and float(off.max()) < 0.5 * float(off_by_rejection.max())


@pytest.mark.long
def test_in_a_hierarchy_it_stands_as_any_distribution(learned):
    def model(y, given):
        mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 1.0))
        with pyro.plate("groups", 2, dim=-1):
            effect = pyro.sample("effect", dist.Normal(mean, 1.0))
            with pyro.plate("data", 8, dim=-2):
                theta = torch.stack([effect, torch.ones_like(effect)], -1).expand(8, 2, 2)
                pyro.sample("y", given(theta) if given else dist.Normal(theta[..., 0], 1.0), obs=y)

    y = torch.randn(8, 2, generator=torch.Generator().manual_seed(0), dtype=DOUBLE) + torch.tensor([1.0, -0.5])
    target, twin = (bk.Target.from_pyro(model, y, given, compile=False) for given in (learned, None))
    assert not target.loops and target.names == ("mean", "effect[0]", "effect[1]")
    precision = torch.tensor([[3.0, -1.0, -1.0], [-1.0, 9.0, 0.0], [-1.0, 0.0, 9.0]], dtype=DOUBLE)
    centre = torch.linalg.solve(precision, torch.cat([y.new_zeros(1), y.sum(0)]))
    exact = dist.MultivariateNormal(centre, precision_matrix=precision)
    u = centre + torch.randn(2000, 3, generator=torch.Generator().manual_seed(1), dtype=DOUBLE) @ exact.scale_tril.T
    constant = twin.log_density(u) - exact.log_prob(u)
    assert float(constant.std()) < 1e-9  # the posterior of the twin is in closed form
    log_ratios = (target.log_density(u) - twin.log_density(u)).detach()
    assert abs(float(log_ratios.logsumexp(0)) - math.log(len(u))) < 0.5  # the log evidence of 16 data
    off = (log_ratios.softmax(0) @ u - centre) / exact.covariance_matrix.diagonal().sqrt()
    assert float(off.abs().max()) < 0.35
    value, gradient = target.value_and_grad(u[:3])
    shift = 1e-5 * torch.eye(3, dtype=DOUBLE)
    for i in range(3):
        ahead, behind = (target.log_density(u[:3] + sign * shift[i]) for sign in (1, -1))
        assert torch.allclose(gradient[:, i], (ahead - behind) / 2e-5, rtol=0, atol=1e-4)
    assert torch.allclose(value, target.log_density(u[:3])) and target.predictive(u[:3])["y"].shape == (3, 8, 2)
    assert target.pointwise_log_likelihood(u[:3])["y"].shape == (3, 8, 2)


@pytest.mark.long
def test_draws_are_those_of_the_simulator(learned, limit):
    theta = torch.tensor([[1.0, 0.5], [-2.0, 2.0]], dtype=DOUBLE, requires_grad=True)
    torch.manual_seed(0)
    drawn = learned(theta).rsample((4000,))
    assert drawn.shape == (4000, 2) and torch.allclose(drawn.mean(0), theta[:, 0], rtol=0, atol=0.25)
    assert torch.allclose(drawn.std(0), theta[:, 1], rtol=0.15)
    (slope,) = torch.autograd.grad(drawn.mean(0).sum(), theta)
    assert torch.allclose(slope[:, 0], torch.ones(2, dtype=DOUBLE), rtol=0, atol=0.2)


@pytest.mark.calibration
def test_heavy_tails_and_several_numbers(limit):
    def pair(theta, generator):
        noise = torch.randn(len(theta), 2, generator=generator, dtype=DOUBLE)
        first = theta[:, 0] + noise[:, 0].sinh()
        return torch.stack([first, 0.5 * theta[:, 0] + 0.8 * noise[:, 0] + 0.6 * noise[:, 1]], 1).reshape(-1, 1, 2)

    prior = dist.Normal(torch.zeros(1, dtype=DOUBLE), 1.0).to_event(1)
    found = learn_likelihood(pair, prior, num_simulations=4000, num_epochs=40, progress=False)
    assert found.event_shape == (1, 2) and found(torch.zeros(5, 1)).sample((3,)).shape == (3, 5, 1, 2)
    theta = torch.randn(4000, 1, generator=torch.Generator().manual_seed(2), dtype=DOUBLE)
    y = pair(theta, torch.Generator().manual_seed(3))
    z = (y[:, 0, 0] - theta[:, 0]).asinh()
    exact = dist.Normal(0.0, 1.0).log_prob(z) - z.cosh().log()
    exact = exact + dist.Normal(0.5 * theta[:, 0] + 0.8 * z, 0.6).log_prob(y[:, 0, 1])
    off = exact - found(theta, False).log_prob(y)
    assert -limit() * float(off.std()) / math.sqrt(4000) < float(off.mean()) < 0.12


@pytest.mark.long
def test_rounds_improve_where_the_data_are(learned):
    wide = dist.Normal(torch.zeros(2, dtype=DOUBLE), torch.tensor([20.0, 1.5], dtype=DOUBLE)).to_event(1)

    def simulator(theta, generator):
        return theta[:, 0] + theta[:, 1].exp() * torch.randn(len(theta), generator=generator, dtype=DOUBLE)

    y = torch.randn(10, generator=torch.Generator().manual_seed(4), dtype=DOUBLE)
    first = learn_likelihood(simulator, wide, num_simulations=2000, num_epochs=20, progress=False)
    near = torch.randn(2000, 2, generator=torch.Generator().manual_seed(5), dtype=DOUBLE) * 0.3
    second = first.refine(parameters=near, num_simulations=2000, progress=False)
    third = second.refine(y, num_simulations=500, num_epochs=5, progress=False)
    v = simulator(near, torch.Generator().manual_seed(6))
    true = dist.Normal(near[:, 0], near[:, 1].exp()).log_prob(v)
    before, after = (float((true - x(near, False).log_prob(v)).mean()) for x in (first, second))
    assert after < 0.1 and after < 0.5 * before
    assert (first.num_rounds, third.num_rounds, third.num_simulations) == (1, 3, 4500)
    assert bool(first.covers(torch.zeros(2))) and not bool(first.covers(torch.tensor([0.0, 40.0])))
    with pytest.raises(SettingsError, match="exactly one"):
        first.refine(y, parameters=near)


def test_failed_simulations_are_counted():
    def some_are_nan(theta, generator):
        y = shifted(theta, generator)
        return torch.where(theta[:, 0] > 1.0, math.nan, y)

    def some_fail(theta, generator):
        if theta[0] > 3:
            raise ValueError("no such thing")
        if theta[0] > 2:
            return None
        return torch.zeros(2) if theta[0] < -2.5 else theta[0] + torch.randn((), generator=generator, dtype=DOUBLE)

    with pytest.warns(DataWarning, match="not finite"):
        found = learn_likelihood(some_are_nan, PLAIN, num_simulations=1000, num_epochs=3, progress=False)
    assert 200 < found.failures["not finite"] < 420 and not found.trusted and "no valid data" in str(found)
    with pytest.warns(DataWarning, match="nothing"):
        found = learn_likelihood(some_fail, PLAIN, num_simulations=500, batched=False, num_epochs=3, progress=False)
    assert set(found.failures) == {"nothing", "raised an error", "another shape"} and found.event_shape == ()

    def no_key(theta):
        return {}["event"] if theta[0] < 1.5 else theta

    with pytest.raises(DataError, match="KeyError: 'event'") as raised:
        learn_likelihood(no_key, PLAIN, num_simulations=300, batched=False)
    assert isinstance(raised.value.__cause__, KeyError)
    with pytest.raises(DataError, match="no such thing"):
        learn_likelihood(lambda theta: some_fail(theta.abs() + 9, None), PLAIN, num_simulations=200, batched=False)
    with pytest.raises(DataError, match="gave no valid data"):
        learn_likelihood(lambda theta: theta[:, 0] * math.nan, PLAIN, num_simulations=200)


@pytest.mark.parametrize(
    ("simulator", "error", "words"),
    [
        (lambda theta: (theta[:, 0] > 0).long(), DataError, "discrete"),
        (lambda theta: theta[:, 0].round(), DataError, "takes one value"),
        (lambda theta: theta[:, 0].clamp(min=0.0), DataError, "takes one value"),
        (lambda theta: theta[0], ShapeError, "one row"),
        (lambda theta: None, ShapeError, "nothing"),
        (lambda theta: {"y": theta}, DataError, "returned a dict"),
        (lambda theta: "abc", DataError, "returned a str"),
        (lambda theta: (theta[:, 0], theta[:, 0]), DataError, "returned a tuple"),
        (lambda theta: torch.complex(theta[:, 0], theta[:, 0]), DataError, "complex"),
        (lambda theta: torch.zeros(len(theta), 0), ShapeError, "no data"),
        (lambda theta: 2 * theta[:, 0], DataError, "linear equation"),
        (lambda theta: torch.randn(len(theta), 2) @ torch.tensor([[1.0, 0, 1], [0, 1, 1]]), DataError, r"\[0, 1, 2\]"),
    ],
)
def test_data_without_a_density_are_refused(simulator, error, words):
    with pytest.raises(error, match=words):
        learn_likelihood(simulator, PLAIN, num_simulations=1000)


def test_settings_and_priors_are_checked():
    with pytest.raises(ShapeError, match="to_event"):
        learn_likelihood(shifted, dist.Normal(torch.zeros(2), 1.0))
    with pytest.raises(ShapeError, match="must return"):
        learn_likelihood(shifted, lambda: pyro.sample("x", dist.Normal(0.0, 1.0)) and None)
    with pytest.raises(SettingsError, match="pyro.distributions"):
        learn_likelihood(shifted, torch.distributions.Independent(torch.distributions.Normal(torch.zeros(1), 1.0), 1))
    with pytest.raises(SettingsError, match="num_simulations"):
        learn_likelihood(shifted, PLAIN, num_simulations=10)
    with pytest.raises(SettingsError, match="share"):
        rejection_abc(shifted, PLAIN, torch.zeros(2), share=2.0)
    with pytest.raises(SettingsError, match="data sets"):
        rejection_abc(shifted, PLAIN, torch.zeros(200), num_simulations=1000)
    with pytest.raises(DataError, match="NaN"):
        rejection_abc(shifted, PLAIN, torch.tensor([0.0, math.nan]))
    with pytest.raises(ShapeError, match="summary"):
        rejection_abc(shifted, PLAIN, torch.zeros(2), summary=lambda data: 3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rejection_abc(shifted, PLAIN, torch.tensor([1.0, 2.0]))
    with pytest.warns(DataWarning, match="farther"):
        rejection_abc(shifted, PLAIN, torch.tensor([100.0, 101.0]))


@pytest.mark.long
def test_data_off_the_simulations_are_refused(small):
    def model(y):
        mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), 2.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", small(mean.expand(len(y), 1)), obs=y)

    near, far = torch.tensor([0.5, -1.0], dtype=DOUBLE), torch.tensor([0.5, 60.0], dtype=DOUBLE)
    assert bk.Target.from_pyro(model, near).dim == 1
    with pytest.raises(DataError, match="1 of 2 data are far from all simulations"):
        bk.Target.from_pyro(model, far)
    assert float(small.surprise(near)[0]) > 0.05 and float(small.surprise(far)[1]) < 0.01
    assert bool(small(torch.zeros(2, 1), validate_args=False).log_prob(far).isfinite().all())
    outward = torch.linspace(3.0, 9.0, 601, dtype=DOUBLE)
    edge = outward[small.surprise(outward) < 0.006][0]
    with pytest.warns(DataWarning, match="10 of 10 data are among the farthest"):
        small.check(edge.expand(10))
    with pytest.raises(DataError, match="NaN"):
        small.check(torch.tensor([math.nan]))
    with pytest.raises(ShapeError, match="has 1 parameters"):
        small(torch.zeros(3, 2))
    pairs = learn_likelihood(
        lambda theta: theta + torch.randn(len(theta), 2), PLAIN, num_simulations=300, num_epochs=1, progress=False
    )
    with pytest.raises(ShapeError, match="one datum"):
        pairs(torch.zeros(3, 1)).log_prob(torch.zeros(3))


@pytest.mark.long
def test_a_stored_likelihood_is_the_same_and_knows_its_simulator(small, tmp_path):
    path = tmp_path / "likelihood.safetensors"
    small.save(path)
    loaded = LearnedLikelihood.load(path, simulator=shifted, prior=PLAIN)
    theta, y = torch.zeros(4, 1, dtype=DOUBLE), torch.tensor([0.0, 0.5, -1.0, 2.0], dtype=DOUBLE)
    assert torch.equal(loaded(theta).log_prob(y), small(theta).log_prob(y)) and str(loaded) == str(small)
    assert torch.equal(loaded.surprise(y), small.surprise(y))
    options = {"num_simulations": 300, "num_epochs": 2, "progress": False}
    again, other = (x.refine(y, **options) for x in (loaded, small))
    assert torch.equal(again(theta).log_prob(y), other(theta).log_prob(y))
    with pytest.raises(SettingsError, match="without its simulator"):
        LearnedLikelihood.load(path).refine(y)
    with pytest.raises(CheckpointError, match="another simulator"):
        LearnedLikelihood.load(path, simulator=normal)
    with pytest.raises(CheckpointError, match="of 1 parameters, but the prior has 2"):
        LearnedLikelihood.load(path, prior=location_and_scale)
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged"):
        LearnedLikelihood.load(tmp_path / "damaged")


@pytest.mark.long
def test_seeds_decide(small):
    again = learn_likelihood(shifted, PLAIN, num_simulations=1000, num_epochs=10, progress=False)
    other = learn_likelihood(shifted, PLAIN, num_simulations=1000, num_epochs=10, progress=False, seed=1)
    theta, y = torch.zeros(1, 1, dtype=DOUBLE), torch.zeros(1, dtype=DOUBLE)
    same, here, there = (x(theta).log_prob(y) for x in (again, small, other))
    assert torch.equal(same, here) and not torch.equal(here, there)


@pytest.mark.calibration
def test_a_likelihood_that_depends_on_the_parameters_in_another_way_is_not_trusted():
    def wave(theta, generator):
        return (8 * theta[:, 0]).sin() + 0.1 * torch.randn(len(theta), generator=generator, dtype=DOUBLE)

    def coupled(theta, generator):
        first, second = torch.randn(2, len(theta), generator=generator, dtype=DOUBLE)
        return torch.stack([first, (6 * theta[:, 0]).sin() * first + 0.3 * second], 1)

    wide = dist.Uniform(torch.full((1,), -math.pi, dtype=DOUBLE), math.pi).to_event(1)
    for simulator in (wave, coupled):  # both margins are learned well
        found = learn_likelihood(simulator, wide, num_simulations=5000, num_epochs=12, progress=False)
        assert found.calibration_error < 0.1 and "parameters still explain" in found.warnings[-1]


def test_too_few_simulations_cannot_tell():
    found = learn_likelihood(shifted, PLAIN, num_simulations=1000, num_epochs=60, progress=False)
    assert found.calibration_error < 0.17 and not found.trusted and "too few simulations to tell" in str(found)


def test_correlated_data_off_the_simulations_are_noticed():
    def pair(theta, generator):
        return theta + 0.1 * torch.randn(len(theta), 2, generator=generator, dtype=DOUBLE)

    found = learn_likelihood(pair, PLAIN, num_simulations=6000, num_epochs=2, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found.check(torch.tensor([[1.0, 1.0], [3.0, 3.1], [-2.0, -2.2]]))
    with pytest.raises(DataError, match="far from all"):
        found.check(torch.tensor([0.5, -0.5]))  # each number by itself is nothing special
    for off in torch.linspace(0.3, 1.0, 71):
        datum = torch.stack([off / 2, -off / 2])
        if float(found.surprise(datum)) <= 0.002:
            break
    with pytest.warns(DataWarning, match="1 of 1 data"):
        found.check(datum)


def at_mean(y, given, spread, mask):
    mean = pyro.sample("mean", dist.Normal(y.new_zeros(()), spread))
    with pyro.plate("data", len(y)), pyro.poutine.mask(mask=mask):
        pyro.sample("y", given(mean.expand(len(y), 1)), obs=y)


@pytest.mark.long
def test_a_prior_beyond_the_simulated_parameters_is_noticed(small):
    y, every = torch.tensor([0.5, -1.0], dtype=DOUBLE), torch.ones(2, dtype=torch.bool)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bk.Target.from_pyro(at_mean, y, small, 2.0, every, compile=False)
    with pytest.warns(DataWarning, match="the parameters of site 'y' are at [0-9]+ of 20 draws"):
        bk.Target.from_pyro(at_mean, y, small, 30.0, every, compile=False)


@pytest.mark.long
def test_masked_placeholders_are_no_data(small):
    y, mask = torch.tensor([0.5, -1.0], dtype=DOUBLE), torch.tensor([True, False])
    u = torch.zeros(1, 1, dtype=DOUBLE)
    odd = torch.tensor([0.5, 1e6], dtype=DOUBLE)
    here, there = (bk.Target.from_pyro(at_mean, x, small, 2.0, mask, compile=False).log_density(u) for x in (y, odd))
    assert torch.equal(here, there)
    assert bk.Target.from_pyro(at_mean, odd, small, 2.0, torch.tensor(False), compile=False).dim == 1
    with pytest.raises(DataError, match="far from all"):
        bk.Target.from_pyro(at_mean, odd, small, 2.0, torch.tensor([True, True]))


@pytest.mark.long
def test_parameters_of_other_shapes_and_libraries(small):
    y = torch.zeros(())
    assert torch.equal(small([0.0]).log_prob(y), small(np.zeros(1)).log_prob(y))
    with pytest.raises(ShapeError, match="has 1 parameters"):
        small.covers(torch.zeros(2))
    with pytest.raises(ShapeError, match="has 1 parameters"):
        small([0.0, 1.0])
    with pytest.raises(DataError, match="numbers"):
        small("a")
    with pytest.raises(ShapeError, match=r"\(m, 1\)"):
        small.refine(parameters=torch.zeros(0, 1))
    pairs = learn_likelihood(
        lambda theta: theta + torch.randn(len(theta), 2), PLAIN, num_simulations=300, num_epochs=1, progress=False
    )
    with pytest.raises(ShapeError, match="do not end in"):
        pairs.refine(torch.zeros(3, 1))


def test_simulators_with_global_random_numbers_of_other_libraries_are_repeatable():
    def by_numpy(theta):
        return theta[:, 0] + torch.as_tensor(np.random.randn(len(theta)))  # noqa: NPY002

    def by_python(theta):
        return torch.tensor([float(x) + random.gauss(0, 1) for x in theta[:, 0]], dtype=DOUBLE)

    before = random.getstate(), np.random.get_state()[1].copy()  # noqa: NPY002
    for simulator in (by_numpy, by_python):
        one, other = (
            learn_likelihood(simulator, PLAIN, num_simulations=300, num_epochs=1, progress=False).score for _ in "ab"
        )
        assert one == other
    assert random.getstate() == before[0] and (np.random.get_state()[1] == before[1]).all()  # noqa: NPY002
