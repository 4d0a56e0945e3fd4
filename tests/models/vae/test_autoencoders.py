"""What every autoencoder must do: sites, shapes, precisions, saved states, minibatches, and typed errors."""

import copy

import pyro
import pytest
import torch
import zuko
from pyro import poutine

from bayeskit._core.randomness import global_stream, new_generator, validation_kept
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.models.vae import (
    VAE,
    ConditionalFlow,
    DiagonalNormal,
    FlowPrior,
    LinearVAE,
    MissingDataVAE,
    conditional_vae,
    convolutional_vae,
    flow_vae,
    hierarchical_vae,
    likelihoods,
    mlp,
    mlp_vae,
    semi_supervised_vae,
)


def spline_vae():
    encoder = torch.nn.Sequential(mlp([6, 8]), ConditionalFlow(zuko.flows.NSF(2, 8, transforms=1, hidden_features=[8])))
    prior = FlowPrior(zuko.flows.NSF(2, transforms=1, hidden_features=[8]))
    return VAE(encoder, mlp([2, 8, 6]), 2, likelihoods.Bernoulli(), (6,), prior)


SMALL = {"data_dim": 6, "hidden": (8, 7), "latent_dim": 2}
FACTORIES = {
    "bernoulli": lambda: mlp_vae(**SMALL),
    "gaussian": lambda: mlp_vae(**SMALL, likelihood=likelihoods.Gaussian()),
    "heteroscedastic": lambda: mlp_vae(**SMALL, likelihood=likelihoods.HeteroscedasticGaussian()),
    "discretized": lambda: mlp_vae(**SMALL, likelihood=likelihoods.DiscretizedLogistic(17)),
    "mixture": lambda: mlp_vae(**SMALL, likelihood=likelihoods.DiscretizedLogistic(17, 3)),
    "convolutional 28": lambda: convolutional_vae((1, 28, 28), (3, 4), 8, 2),
    "convolutional 8": lambda: convolutional_vae(
        (3, 8, 8), (3, 4), 8, 2, likelihood=likelihoods.HeteroscedasticGaussian()
    ),
    "linear": lambda: LinearVAE(6, 2),
    "flows": lambda: flow_vae(**SMALL),
    "flow as posterior": lambda: flow_vae(**SMALL, prior_transforms=0),
    "flow as prior": lambda: flow_vae(**SMALL, posterior_transforms=0),
    "splines": spline_vae,
    "hierarchical": lambda: hierarchical_vae(6, ((8, 7), (6,), (5,)), (4, 3, 2)),
    "conditional": lambda: conditional_vae(6, 3, (8, 7), 2),
    "semi-supervised": lambda: semi_supervised_vae(6, 3, (8, 7), 2, classification_weight=0.5),
    "missing data": lambda: MissingDataVAE(mlp_vae(**SMALL)),
}
AUTOENCODERS = list(FACTORIES)[:12]


def make(name, dtype=torch.float64):
    with global_stream(new_generator(0, stream=name)):
        return FACTORIES[name]().to(dtype)


def arguments(name, model, rows=5):
    """Return data, drawn from levels 0 and 1, and what else the model is called with."""
    shape = model.vae.data_shape if name == "missing data" else model.data_shape
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    x = (torch.rand(rows, *shape, generator=generator, dtype=torch.float64) < 0.4).to(dtype)
    extra = {
        "conditional": (torch.randn(rows, 3, generator=generator, dtype=torch.float64).to(dtype),),
        "semi-supervised": (torch.arange(rows) % 3,),
        "missing data": (torch.rand(x.shape, generator=generator) < 0.7,),
    }
    return (x, *extra.get(name, ()))


def run(model, data, seed=2, **options):
    """Return the traces of guide and model on the guide's draws."""
    with global_stream(new_generator(seed)):
        guide = poutine.trace(model.guide).get_trace(*data, **options)
        joint = poutine.trace(poutine.replay(model.model, trace=guide)).get_trace(*data, **options)
    guide.compute_log_prob()
    joint.compute_log_prob()
    return guide, joint


def sites(trace):
    return {name: site for name, site in trace.nodes.items() if site["type"] == "sample" and name != "data"}


@pytest.mark.parametrize("name", FACTORIES)
def test_densities_are_of_each_row_and_of_its_own(name):
    model = make(name)
    data = arguments(name, model)
    traces = run(model, data)
    latent = {n: s["value"] for n, s in sites(traces[0]).items() if not s["is_observed"]}
    assert set(latent) <= set(sites(traces[1])) and latent
    for site in (s for trace in traces for s in sites(trace).values()):
        assert site["log_prob"].shape == (5,) and bool(site["log_prob"].isfinite().all())
    for row in (0, 3):  # one row alone, with the same draw, has the same densities
        single = tuple(argument[row : row + 1] for argument in data)
        values = {n: v[row : row + 1] for n, v in latent.items()}
        for function, whole in zip((model.guide, model.model), traces, strict=True):
            part = poutine.trace(poutine.condition(function, values)).get_trace(*single)
            part.compute_log_prob()
            for n, site in sites(part).items():
                expected = whole.nodes[n]["log_prob"][row : row + 1]
                torch.testing.assert_close(site["log_prob"], expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_minibatch_stands_for_all_items(name):
    model = make(name)
    data = arguments(name, model)
    state = torch.get_rng_state()
    for part, whole in zip(run(model, data, num_data=50), run(model, data), strict=True):
        torch.testing.assert_close(part.log_prob_sum(), 10 * whole.log_prob_sum(), rtol=1e-12, atol=0)
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(SettingsError, match="num_data is 3"):
        model.model(*data, num_data=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", FACTORIES)
def test_objectives_reach_every_parameter(name, dtype):
    model = make(name, dtype)
    with global_stream(new_generator(3)):
        data = arguments(name, model)
        loss = IWAE(2).differentiable_loss(model.model, model.guide, *data)
        loss = loss + ELBO().differentiable_loss(model.model, model.guide, *data)
        loss.backward()
    assert loss.dtype == dtype and bool(loss.isfinite())
    idle = {n for n, p in model.named_parameters() if p.grad is None or not bool(p.grad.any())}
    # A single autoregressive layer has biases of features that are masked out.
    assert not {n for n in idle if "flow" not in n}


@pytest.mark.parametrize("name", ["bernoulli", "linear", "hierarchical", "missing data"])
def test_svi_of_pyro_trains_every_parameter(name):
    model = make(name)
    before = copy.deepcopy(model.state_dict())
    data = arguments(name, model)
    with global_stream(new_generator(4)):
        svi = pyro.infer.SVI(model.model, model.guide, pyro.optim.Adam({"lr": 0.01}), loss=ELBO())
        for _ in range(2):
            svi.step(*data)
    assert all(bool((value != before[key]).any()) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", FACTORIES)
def test_state_goes_into_a_copy(name):
    model, other = make(name), FACTORIES[name]().double()
    data = arguments(name, model)
    other.load_state_dict(model.state_dict())
    for mine, its in zip(run(model, data), run(other, data), strict=True):
        assert float(mine.log_prob_sum().detach()) == float(its.log_prob_sum().detach())


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_conveniences_have_shapes_and_streams(name):
    model = make(name, torch.float32)
    (x,) = arguments(name, model)
    state = torch.get_rng_state()
    assert model.encode(x).shape == (5, 2)
    assert model.reconstruct(x).shape == x.shape
    assert model.decode(torch.zeros(4, 3, 2)).shape == (4, 3, *model.data_shape)
    torch.testing.assert_close(model.reconstruct(x)[2], model.reconstruct(x[2:3])[0], rtol=1e-3, atol=0.2)
    first, again, other = (model.generate(7, seed=seed) for seed in (0, 0, 1))
    assert first.shape == (7, *model.data_shape)
    assert torch.equal(first, again) and not torch.equal(first, other)
    model.likelihood.check(first)
    assert not first.requires_grad and torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("name", ["bernoulli", "convolutional 28", "gaussian"])
def test_one_datum_needs_no_batch(name):
    model = make(name)
    (x,) = arguments(name, model)
    torch.testing.assert_close(model.encode(x[1]), model.encode(x)[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(model.reconstruct(x[1]), model.reconstruct(x)[1], rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["bernoulli", "heteroscedastic", "convolutional 8"])
def test_log_joint_by_hand(name):
    model = make(name)
    (x,) = arguments(name, model)
    guide, joint = run(model, (x,))
    z = guide.nodes["z"]["value"]
    outputs = model.decoder(z)
    if name == "bernoulli":
        expected = -torch.nn.functional.binary_cross_entropy_with_logits(outputs, x, reduction="none")
    else:
        loc, log_scale = outputs.chunk(2, 1)
        expected = torch.distributions.Normal(loc, log_scale.exp() + 1e-3).log_prob(x)
    torch.testing.assert_close(joint.nodes["x"]["log_prob"], expected.flatten(1).sum(1))
    prior = torch.distributions.Normal(0, 1).log_prob(z).sum(-1)
    torch.testing.assert_close(joint.nodes["z"]["log_prob"], prior)


def test_moments_of_generated_data(limit):
    model = mlp_vae(4, (3,), 1).double()
    draws = model.generate(20_000, seed=0)
    grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
    weight = torch.distributions.Normal(0, 1).log_prob(grid).exp() * (grid[1] - grid[0])
    expected = weight @ model.decode(grid.unsqueeze(1))
    error = (expected * (1 - expected) / len(draws)).sqrt()
    assert float(((draws.mean(0) - expected) / error).abs().max()) < limit(4)


def test_bad_input_is_named():
    vae = mlp_vae(**SMALL)
    for call in (vae.model, vae.guide, vae.encode):
        with pytest.raises(ShapeError, match=r"\(5, 7\).*\(\*batch, 6\)"):
            call(torch.zeros(5, 7))
        with pytest.raises(DataError, match=r"x\.to\(torch\.float32\)"):
            call(torch.zeros(5, 6).double())
    for call in (vae.model, vae.guide):
        with pytest.raises(ShapeError, match=r"need \(n, 6\)"):
            call(torch.zeros(6))
    with pytest.raises(DataError, match="255"):
        vae.model(torch.full((5, 6), 255.0))
    with validation_kept(), pyro.validation_enabled(False):  # what is not looked at costs nothing
        vae.model(torch.full((5, 6), 255.0))
    with pytest.raises(ShapeError, match="last dimension must be 2"):
        vae.decode(torch.zeros(3))
    with pytest.raises(ShapeError, match=r"\(\*batch, 1, 8, 8\)"):
        convolutional_vae((1, 8, 8), (3,), 8, 2).model(torch.zeros(5, 64))


@pytest.mark.parametrize(
    "build",
    [
        lambda: mlp_vae(0),
        lambda: mlp_vae(hidden=(0,)),
        lambda: mlp_vae(latent_dim=0),
        lambda: mlp_vae(hidden=()),
        lambda: mlp([3]),
        lambda: flow_vae(hidden=()),
        lambda: flow_vae(prior_transforms=-1),
        lambda: conditional_vae(condition_dim=0),
        lambda: conditional_vae(hidden=()),
        lambda: semi_supervised_vae(hidden=()),
        lambda: semi_supervised_vae(num_classes=1),
        lambda: semi_supervised_vae(classification_weight=-1.0),
        lambda: hierarchical_vae(latent_dims=(5,)),
        lambda: hierarchical_vae(hidden=((8,),), latent_dims=(5,)),
        lambda: hierarchical_vae(hidden=((), (8,))),
        lambda: convolutional_vae((1, 10, 8)),
        lambda: convolutional_vae(channels=()),
        lambda: LinearVAE(3, 0),
        lambda: VAE(DiagonalNormal(6, 2), mlp([2, 6]), 2, likelihoods.Bernoulli(), ()),
    ],
)
def test_impossible_settings_are_refused(build):
    with pytest.raises(SettingsError):
        build()
