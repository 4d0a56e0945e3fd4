"""Amortised posteriors: normalised densities, corrected draws and evidences, groups, order, files, refusals."""

import math
import pickle
from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch
from scipy.stats import kstwo, norm

import bayeskit as bk
from bayeskit.errors import (
    CheckpointError,
    DataError,
    DataWarning,
    ModelError,
    SettingsError,
    ShapeError,
    UnknownNameError,
)
from bayeskit.inference.amortization._simulations import Simulator
from bayeskit.inference.objectives import ELBO, IWAE

FLOAT = torch.float64


def normal(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def groups(y, sigma):
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", len(y)):
        effect = pyro.sample("effect", dist.Normal(mean, scale))
        pyro.sample("y", dist.Normal(effect, sigma), obs=y)


def zeros(size):
    return torch.zeros(size, dtype=FLOAT)


@pytest.fixture(scope="module")
def of_normal():
    return bk.amortize(normal, (zeros(30),), sizes=(1, 30), num_steps=400, batch_size=128, progress=False)


@pytest.fixture(scope="module")
def of_groups():
    def arguments(size):
        return zeros(size), 0.3 + torch.rand(size, dtype=FLOAT)

    return bk.amortize(groups, arguments, sizes=(2, 8), num_steps=200, batch_size=64, progress=False)


def log_evidence(y):
    covariance = torch.eye(len(y), dtype=FLOAT) + 1
    return float(dist.MultivariateNormal(zeros(len(y)), covariance).log_prob(y))


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 4, 30])
def test_density_integrates_to_one_and_is_near_the_posterior(of_normal, size):
    y = torch.linspace(-1.0, 2.0, size, dtype=FLOAT)
    u = torch.linspace(-7.0, 7.0, 20_001, dtype=FLOAT).unsqueeze(-1)
    density = of_normal.log_prob(u, y).exp()
    cell = float(u[1] - u[0])
    assert float(density.sum()) * cell == pytest.approx(1.0, abs=1e-4)
    # Nearer to the posterior than the prior is by a factor, measured in nats.
    exact = dist.Normal(y.sum() / (size + 1), (size + 1) ** -0.5).log_prob(u[:, 0])
    divergence = float((exact.exp() * (exact - density.log())).sum()) * cell
    from_prior = float((exact.exp() * (exact - dist.Normal(0.0, 1.0).log_prob(u[:, 0]))).sum()) * cell
    assert 0 <= divergence < 0.25 * from_prior


@pytest.mark.long
def test_draws_follow_the_density(of_normal, limit):
    y = torch.tensor([0.4, 1.5, -0.3], dtype=FLOAT)
    draws = of_normal.sample(y, num_draws=4000, seed=3)
    assert draws.unconstrained.shape == (4, 1000, 1)
    grid = torch.linspace(-7.0, 7.0, 20_001, dtype=FLOAT).unsqueeze(-1)
    below = of_normal.log_prob(grid, y).exp().cumsum(0) * float(grid[1] - grid[0])
    x = draws["mean"].flatten().sort().values
    at = below[torch.searchsorted(grid[:, 0], x).clamp(max=20_000)]
    steps = torch.arange(1, 4001, dtype=FLOAT) / 4000
    largest = float(torch.maximum((steps - at).abs(), (at - steps + 1 / 4000).abs()).max())
    assert kstwo.sf(largest - 1e-4, 4000) > 1e-5
    assert torch.equal(draws.unconstrained, of_normal.sample(y, num_draws=4000, seed=3).unconstrained)
    assert torch.allclose(draws.log_density, draws.target.log_density(draws.unconstrained))


@pytest.mark.long
@pytest.mark.parametrize("size", [1, 5, 30])
def test_correction_is_exact_within_its_error(of_normal, size, limit):
    y = torch.linspace(-0.5, 1.5, size, dtype=FLOAT)
    draws, z = of_normal.correct(y, seed=size)
    assert z.trusted and "importance sampling" in z.method and z.standard_error < 0.02
    assert abs(z.log_evidence - log_evidence(y)) < limit(3) * z.standard_error
    # Resampled draws of n / 2 effective ones, at least.
    error = math.sqrt(1 / (size + 1) / (0.5 * z.diagnostics["effective_draws"]))
    assert abs(float(draws["mean"].mean()) - float(y.sum()) / (size + 1)) < limit(3) * error
    assert float(draws["mean"].var()) == pytest.approx(
        1 / (size + 1), rel=limit(3) * math.sqrt(4 / z.diagnostics["effective_draws"])
    )


@pytest.mark.long
def test_corrected_evidences_are_calibrated_for_a_poor_network_too(of_normal, calibrated):
    generator = torch.Generator().manual_seed(5)
    scores = []
    for replicate in range(60):
        y = torch.randn(1 + replicate % 9, generator=generator, dtype=FLOAT)
        y += torch.randn((), generator=generator, dtype=FLOAT)
        z = of_normal.correct(y, num_draws=1000, seed=replicate).evidence
        scores.append((z.log_evidence - log_evidence(y)) / z.standard_error)
    assert calibrated(scores)


@pytest.mark.long
def test_correction_finds_the_mutation(of_normal, limit, monkeypatch):
    y = torch.linspace(-0.5, 1.5, 5, dtype=FLOAT)
    network = type(of_normal.network)
    whole = network.to_noise

    def without_volume(self, *parts):
        noise, log_volume = whole(self, *parts)
        return noise, 0.9 * log_volume

    monkeypatch.setattr(network, "to_noise", without_volume)
    z = of_normal.correct(y).evidence
    assert abs(z.log_evidence - log_evidence(y)) > limit() * z.standard_error


@pytest.mark.long
def test_bad_network_leads_to_monte_carlo_from_it(of_normal, limit):
    y = torch.linspace(-0.5, 1.5, 30, dtype=FLOAT)
    network = pickle.loads(pickle.dumps(of_normal.network))
    with torch.no_grad():  # far too narrow, and beside the posterior
        network.of_globals.head.linear.bias += torch.tensor([1.0, 3.0], dtype=FLOAT)
    draws, z = replace(of_normal, network=network).correct(y, num_draws=400, progress=False)
    assert "SMC from the network" in z.method
    assert abs(z.log_evidence - log_evidence(y)) < limit() * z.standard_error
    assert float(draws["mean"].std()) == pytest.approx(31**-0.5, rel=0.2)


@pytest.mark.long
def test_data_off_the_simulations_are_refused_and_corrected_from_the_prior(of_normal, limit):
    y = torch.linspace(-1.0, 1.0, 8, dtype=FLOAT) + 12.0
    with pytest.raises(DataError, match="off all 2000 simulations"):
        of_normal.sample(y)
    of_normal.sample(y, check=False)
    z = of_normal.correct(y, progress=False).evidence
    assert "SMC from the prior" in z.method
    assert abs(z.log_evidence - log_evidence(y)) < limit() * z.standard_error


@pytest.mark.long
def test_few_of_the_models_own_data_are_refused(of_normal):
    refused = 0
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        y = torch.randn(10, generator=generator, dtype=FLOAT) + torch.randn((), generator=generator, dtype=FLOAT)
        try:
            of_normal.sample(y, num_draws=4)
        except DataError:
            refused += 1
    assert refused <= 2  # one in 2000 is expected: three of 40 have probability 1e-6


@pytest.mark.long
def test_ranks_are_uniform_after_simulations_and_not_for_a_shifted_network(of_normal):
    arguments = (zeros(6),)
    shifted = pickle.loads(pickle.dumps(of_normal.network))
    with torch.no_grad():
        shifted.of_globals.head.linear.bias[0] += 0.5
    bad = bk.sbc(normal, replace(of_normal, network=shifted), args=arguments, num_replicates=60, progress=False)
    assert not bad.passed

    def corrected(target, seed):
        return of_normal.correct(target.named_data()[0]["y"], num_draws=1000, seed=seed).draws

    good = bk.sbc(normal, corrected, args=arguments, num_replicates=40, progress=False, significance=1e-5)
    assert good.passed


@pytest.mark.long
def test_groups_are_exchangeable_and_corrected(of_groups, limit):
    y, sigma = torch.tensor([0.3, -1.2, 2.0, 0.8], dtype=FLOAT), torch.tensor([0.4, 1.0, 0.6, 0.5], dtype=FLOAT)
    order = torch.tensor([2, 0, 3, 1])
    u = of_groups.sample(y, sigma, num_draws=8).unconstrained.flatten(0, 1)
    turned = torch.cat([u[:, :2], u[:, 2:][:, order]], 1)
    assert torch.allclose(of_groups.log_prob(u, y, sigma), of_groups.log_prob(turned, y[order], sigma[order]))
    target = of_groups.target(y, sigma)
    at = of_groups.at(target)
    with torch.no_grad():
        assert torch.allclose(at.from_noise(at.to_noise(u)[0]), u, atol=1e-8)
    # The same evidence with the effects integrated out in closed form, and the rest by quadrature.
    marginal = bk.marginalize(target, ["effect"])
    axes = torch.linspace(-9.0, 9.0, 401, dtype=FLOAT), torch.linspace(-9.0, 4.0, 401, dtype=FLOAT)
    grid = torch.cartesian_prod(*axes)
    cell = float((axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0]))
    exact = float(marginal.log_density(grid).logsumexp(0)) + math.log(cell)
    draws, z = of_groups.correct(y, sigma, progress=False)
    assert z.trusted and abs(z.log_evidence - exact) < limit() * z.standard_error
    assert draws["effect"].shape == (*draws.unconstrained.shape[:2], 4)


@pytest.mark.long
def test_guide_gives_bounds_and_gradients(of_groups):
    y, sigma = torch.tensor([0.3, -1.2, 2.0], dtype=FLOAT), torch.tensor([0.4, 1.0, 0.6], dtype=FLOAT)
    z = of_groups.correct(y, sigma, progress=False).evidence
    guide = of_groups.guide
    pyro.set_rng_seed(0)
    with torch.no_grad():
        loss = torch.stack([IWAE(num_particles=200)(groups, guide)(y, sigma) for _ in range(20)])
    # The bound lies below the evidence, by half the relative variance of the mean weight or about so.
    assert -0.3 < float(-loss.mean()) - z.log_evidence < 5 * float(loss.std()) / math.sqrt(20) + 5 * z.standard_error
    one_by_one = IWAE(num_particles=3, vectorize_particles=False)(groups, guide)(y, sigma)
    assert bool(one_by_one.isfinite())
    ELBO()(groups, guide)(y, sigma).backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in guide.parameters())
    trained = bk.fit(groups, pickle.loads(pickle.dumps(guide)), ELBO(), [(y, sigma)], num_steps=3, progress=False)
    assert bool(trained.losses.isfinite().all())


@pytest.mark.long
def test_density_of_values_has_the_jacobian(of_groups):
    y, sigma = torch.tensor([0.3, -1.2], dtype=FLOAT), torch.tensor([0.4, 1.0], dtype=FLOAT)
    draws = of_groups.sample(y, sigma, num_draws=4)
    u, values = draws.unconstrained[0], {name: x[0] for name, x in draws.values().items()}
    # Only the scale is transformed, by the exponential function.
    expected = of_groups.log_prob(u, y, sigma) - values["scale"].log()
    assert torch.allclose(of_groups.log_prob(values, y, sigma), expected)


@pytest.mark.calibration
def test_sequence_reads_the_order_and_a_set_does_not():
    def walk(y):
        drift = pyro.sample("drift", dist.Normal(0.0, 1.0))
        before = torch.cat([y.new_zeros(1), y[:-1]])
        pyro.sample("y", dist.Normal(before + drift, 1.0).to_event(1), obs=y)

    y = torch.tensor([1.0, 0.5, 2.0, 3.5, 3.0], dtype=FLOAT)
    u = torch.zeros(1, 1, dtype=FLOAT)
    for encoding, reads in (("sequence", True), ("set", False), ("attention", False)):
        posterior = bk.amortize(
            walk, (zeros(6),), sizes=(2, 6), encoding=encoding, num_steps=10, batch_size=8, progress=False
        )
        assert bool(torch.isclose(posterior.log_prob(u, y), posterior.log_prob(u, y.flip(0)))) is not reads


@pytest.mark.calibration
def test_sites_that_the_model_does_not_observe_can_be_the_data(limit):
    def model():
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", 5):
            pyro.sample("y", dist.Poisson(rate))

    posterior = bk.amortize(model, observed="y", num_steps=60, batch_size=64, progress=False)
    y = torch.tensor([1.0, 0, 3, 2, 1])
    _, z = posterior.correct(y, progress=False)
    shape, rate = 2.0 + float(y.sum()), 1.0 + 5
    exact = math.lgamma(shape) - math.lgamma(2.0) - shape * math.log(rate) - float((y + 1).lgamma().sum())
    assert abs(z.log_evidence - exact) < limit() * z.standard_error + 1e-5
    with pytest.raises(UnknownNameError):
        bk.amortize(model, observed="z", num_steps=1)


@pytest.mark.long
def test_training_resumes_bit_for_bit_and_a_file_returns_the_network(tmp_path, of_normal):
    settings = {"sizes": (1, 30), "num_steps": 60, "batch_size": 16, "progress": False, "seed": 4}
    whole = bk.amortize(normal, (zeros(30),), **settings)
    file = tmp_path / "training"
    bk.amortize(normal, (zeros(30),), **settings | {"num_steps": 25}, checkpoint=file, checkpoint_seconds=0.0)
    y = torch.tensor([0.3, 1.0], dtype=FLOAT)
    longer = bk.amortize(normal, (zeros(30),), **settings, checkpoint=file)
    assert longer.training.num_steps == 60 and float(longer.training.losses[:25].sum()) != 0
    other = tmp_path / "interrupted"
    with pytest.warns(UserWarning, match="time budget"):
        bk.amortize(normal, (zeros(30),), **settings, checkpoint=other, checkpoint_seconds=0.0, time_budget=0.05)
    resumed = bk.amortize(normal, (zeros(30),), **settings, checkpoint=other)
    assert torch.equal(whole.sample(y).unconstrained, resumed.sample(y).unconstrained)

    path = tmp_path / "posterior.safetensors"
    of_normal.save(path)
    loaded = bk.AmortizedPosterior.load(path, normal)
    assert torch.equal(loaded.sample(y).unconstrained, of_normal.sample(y).unconstrained)
    assert loaded.fingerprint() == of_normal.fingerprint() != resumed.fingerprint()
    with pytest.raises(SettingsError, match="history"):
        loaded.plot()

    def wider(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.001))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    def renamed(y):
        mean = pyro.sample("centre", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    for model in (wider, renamed, groups):
        with pytest.raises(CheckpointError, match="another model"):
            bk.AmortizedPosterior.load(path, model)
    whole_file = path.read_bytes()
    path.write_bytes(whole_file[:-100])
    with pytest.raises(CheckpointError):
        bk.AmortizedPosterior.load(path, normal)
    path.write_bytes(whole_file[:-100] + bytes(100))
    with pytest.raises(CheckpointError):
        bk.AmortizedPosterior.load(path, normal)


def test_simulations_without_finite_data_are_counted():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(torch.where(mean > 1.5, torch.nan, mean), 1.0, validate_args=False), obs=y)

    def hopeless(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(torch.where(mean > -1.0, torch.nan, mean), 1.0, validate_args=False), obs=y)

    with pytest.warns(DataWarning, match="simulated data sets held NaN") as caught:
        bk.amortize(model, (zeros(3),), num_steps=20, batch_size=64, progress=False)
    words = str(caught[-1].message).split()
    dropped, drawn = int(words[0]), int(words[2])
    share, expected = dropped / drawn, float(norm.sf(1.5))
    assert abs(share - expected) < 5 * math.sqrt(expected / drawn)
    with pytest.raises(ModelError, match="NaN or infinite"):
        bk.amortize(hopeless, (zeros(3),), num_steps=20, batch_size=64, progress=False)


@pytest.mark.long
def test_wrong_data_and_settings_are_named(of_normal, of_groups):
    with pytest.raises(DataError, match="31 rows, outside of the sizes"):
        of_normal.sample(zeros(31))
    with pytest.raises(DataError, match="31 rows"):
        of_normal.correct(zeros(31))
    with pytest.raises(DataError, match="NaN"):
        of_normal.sample(torch.tensor([0.0, torch.nan], dtype=FLOAT))
    with pytest.raises(ModelError):
        of_normal.sample(torch.zeros(3, 2, dtype=FLOAT))
    with pytest.raises(ModelError):
        of_groups._sample(of_normal.target(zeros(3)), 4, 0)
    for wrong in ({"sizes": (5, 3)}, {"sizes": (1, 40)}, {"encoding": "vector", "sizes": (1, 3)}, {"encoding": "tree"}):
        with pytest.raises(SettingsError):
            bk.amortize(normal, (zeros(30),), num_steps=1, **wrong)
    with pytest.raises(SettingsError, match="needs sizes"):
        bk.amortize(normal, lambda size: (zeros(size),), num_steps=1)
    with pytest.raises(SettingsError, match="tuple"):
        bk.amortize(normal, zeros, sizes=(1, 3), num_steps=1)

    def sideways(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(mean * torch.ones_like(y), 1.0).to_event(2), obs=y)

    with pytest.raises(ShapeError, match="first dimension"):
        bk.amortize(sideways, lambda size: (torch.zeros(2, size, dtype=FLOAT),), sizes=(1, 3), num_steps=1)

    def constant(y, scale):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, scale), obs=y)

    scale = torch.tensor(2.0, dtype=FLOAT)
    posterior = bk.amortize(constant, (zeros(4), scale), sizes=(1, 4), num_steps=2, batch_size=8, progress=False)
    with pytest.raises(DataError, match="'scale' was the same in all simulations"):
        posterior.sample(zeros(2), torch.tensor(3.0, dtype=FLOAT))


@pytest.mark.calibration
def test_integer_and_shared_data_of_many_shapes(limit):
    def model(counts, total, exposure):
        rate = pyro.sample("rate", dist.Gamma(3.0, 1.0))
        with pyro.plate("data", len(counts)):
            pyro.sample("counts", dist.Poisson(rate * exposure), obs=counts)
        pyro.sample("total", dist.Normal(rate, 0.5), obs=total)

    def arguments(size):
        return torch.zeros(size), torch.zeros(()), 1 + torch.rand(size)

    posterior = bk.amortize(model, arguments, sizes=(1, 5), num_steps=40, batch_size=32, progress=False)
    assert posterior.structure.data == {"counts": True, "total": False, "exposure": True}
    data = torch.tensor([2.0, 4.0]), torch.tensor(2.5), torch.tensor([1.1, 1.7])
    _, z = posterior.correct(*data, progress=False)
    u = torch.linspace(-6.0, 4.0, 4001).unsqueeze(-1)
    exact = float(posterior.target(*data).log_density(u).double().logsumexp(0)) + math.log(10 / 4000)
    assert abs(z.log_evidence - exact) < limit() * z.standard_error + 1e-4


@pytest.mark.calibration
def test_simulations_can_be_drawn_once(limit):
    calls = []

    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        calls.append(len(y))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    settings = {"num_steps": 60, "num_simulations": 320, "batch_size": 32, "progress": False}
    for sizes in (None, (1, 4)):
        before = len(calls)
        posterior = bk.amortize(model, (zeros(4),), sizes=sizes, **settings)
        long = len(calls) - before
        bk.amortize(model, (zeros(4),), sizes=sizes, **settings | {"num_steps": 120})
        assert len(calls) - before == 2 * long
        assert len(posterior.training.validation_losses) > 0 and posterior.training.best_epoch is not None
        y = torch.tensor([0.4, 1.0, -0.3, 0.8], dtype=FLOAT)
        z = posterior.correct(y, progress=False).evidence
        assert abs(z.log_evidence - log_evidence(y)) < limit(2) * z.standard_error
    with pytest.raises(SettingsError, match="num_simulations"):
        bk.amortize(normal, (zeros(4),), num_simulations=100)


def slopes(y, x):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)


def test_covariates_are_new_in_each_batch_at_every_size():
    simulator = Simulator(slopes, lambda size: (zeros(size), torch.randn(size, dtype=FLOAT)), (1, 5), "set", 0)
    generator = torch.Generator().manual_seed(0)
    for size in (1, 3, 5):
        seen = {tuple(simulator.batch(4, generator, size=size).rows[0, :, 1].tolist()) for _ in range(4)}
        assert len(seen) == 4
    of_one_size = Simulator(slopes, lambda size: (zeros(size), torch.rand((), dtype=FLOAT)), (5, 5), "set", 0)
    assert of_one_size.structure.data == {"y": True, "x": False} and not of_one_size.structure.constants


def test_numbers_among_the_arguments_are_compared():
    def arguments(size):
        return zeros(size), 0.5

    posterior = bk.amortize(slopes, arguments, sizes=(2, 3), num_steps=2, batch_size=8, progress=False)
    posterior.sample(zeros(2), 0.5)
    with pytest.raises(DataError, match=r"argument 2 was 0\.5 in all simulations and is 2\.0 here"):
        posterior.sample(zeros(2), 2.0)
    with pytest.raises(SettingsError, match="the network reads tensors"):
        bk.amortize(slopes, lambda size: (zeros(size), 0.5 * size), sizes=(2, 3), num_steps=2)

    def counted(size):
        rate = pyro.sample("rate", dist.Gamma(2.0, 1.0))
        with pyro.plate("data", size):
            pyro.sample("y", dist.Poisson(rate))

    of_sizes = bk.amortize(counted, lambda size: (size,), observed="y", sizes=(2, 4), num_steps=2, progress=False)
    assert of_sizes.sample(torch.tensor([1.0, 2.0, 0.0]), 3, num_draws=4).unconstrained.shape == (4, 1, 1)


def test_what_the_likelihood_leaves_out_is_refused():
    def masked(y, mask):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)), pyro.poutine.mask(mask=mask):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    def scaled(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)), pyro.poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    with pytest.raises(ModelError, match="'y' is masked"):
        bk.amortize(masked, (zeros(4), torch.tensor([True, True, False, False])), num_steps=2)
    with pytest.raises(ModelError, match="'y' is scaled"):
        bk.amortize(scaled, (zeros(4),), num_steps=2)


def test_a_likelihood_that_is_not_a_number_is_not_trusted_from_the_network():
    def model(y):
        mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(torch.where(mean > 0.5, torch.nan, mean), 1.0, validate_args=False), obs=y)

    with pytest.warns(DataWarning):
        posterior = bk.amortize(model, (zeros(3),), num_steps=40, batch_size=32, progress=False)
    target = posterior.target(torch.tensor([0.4, 0.5, 0.6], dtype=FLOAT))
    z = posterior._by_importance(target, 1000, 0).evidence
    assert not z.trusted and "NaN" in z.warnings[0]


def test_data_by_name_leave_torchs_stream_alone_and_take_rows():
    def model(x):
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(slope * x, 1.0))

    before = torch.get_rng_state()
    posterior = bk.amortize(
        model, ([0.5, 1.0, -1.0, 2.0],), observed="y", sizes=(1, 4), num_steps=2, batch_size=8, progress=False
    )
    assert torch.equal(before, torch.get_rng_state())
    assert posterior.sample([0.1, 0.2], [1.0, -0.5], num_draws=4).unconstrained.shape == (4, 1, 1)
    with pytest.raises(ShapeError, match=r"\(\*batch, 1\)"):
        posterior.log_prob(torch.zeros(2, 3), [0.1, 0.2], [1.0, -0.5])
    for wrong in ({"learning_rate": -1.0}, {"sizes": (1, 2, 3)}, {"patience": 0}):
        with pytest.raises(SettingsError):
            bk.amortize(normal, (zeros(4),), num_steps=1, **wrong)


def test_a_vector_as_long_as_the_data_is_no_site_of_rows():
    def model(x, y):
        weights = pyro.sample("weights", dist.Normal(torch.zeros(3, dtype=FLOAT), 1.0).to_event(1))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(x @ weights, 1.0), obs=y)

    posterior = bk.amortize(
        model, lambda size: (torch.randn(size, 3, dtype=FLOAT), zeros(size)), sizes=(3, 3), num_steps=2, progress=False
    )
    assert posterior.structure.sites == {"weights": False} and posterior.network.layout.num_global == 3
