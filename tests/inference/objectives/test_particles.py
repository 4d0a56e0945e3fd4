"""The core: log weights for every datum, and gradients that reach whom they should."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError, LossError, SettingsError
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.inference.objectives._drawing import Gate, site_log_density
from bayeskit.inference.objectives._objective import Draw

DATA = torch.tensor([0.3, -1.2, 2.5, 0.9, 0.1], dtype=torch.float64)


@pytest.fixture(autouse=True)
def stream():
    pyro.clear_param_store()
    with global_stream(new_generator(0, stream="objectives")):
        yield
    pyro.clear_param_store()


class Pair(nn.Module):
    """Two latent layers, the lower one in the guide given the upper one."""

    def __init__(self):
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.5, -0.3], dtype=torch.float64))
        self.weight = nn.Parameter(torch.tensor([0.4, 0.7], dtype=torch.float64))

    def model(self, x, size=None):
        with pyro.plate("data", size or len(x), subsample=torch.arange(len(x))):
            top = pyro.sample("top", dist.Normal(torch.zeros_like(x), 1.0))
            low = pyro.sample("low", dist.Normal(self.weight[0] * top, 0.8))
            pyro.sample("x", dist.Normal(self.weight[1] * low, 0.6), obs=x)

    def guide(self, x, size=None):
        with pyro.plate("data", size or len(x), subsample=torch.arange(len(x))):
            low = pyro.sample("low", dist.Normal(self.slope[0] * x, 0.7))
            pyro.sample("top", dist.Normal(self.slope[1] * low, 0.9))


def draw(pair, num_particles, objective=None, args=(DATA,), **options):
    return Draw(objective or IWAE(num_particles), pair.model, pair.guide, args, {})(num_particles, **options)


def test_weights_are_those_worked_out_by_hand():
    pair = Pair()
    particles = draw(pair, 3)
    low, top = (particles.guide_sites[n]["value"] for n in ("low", "top"))
    model = (
        dist.Normal(0.0, 1.0).log_prob(top)
        + dist.Normal(0.4 * top, 0.8).log_prob(low)
        + dist.Normal(0.7 * low, 0.6).log_prob(DATA)
    )
    guide = dist.Normal(0.5 * DATA, 0.7).log_prob(low) + dist.Normal(-0.3 * low, 0.9).log_prob(top)
    assert particles.log_weight.shape == (3, 5)
    assert torch.allclose(particles.log_weight, model - guide, rtol=1e-13, atol=1e-13)


def test_minibatches_stand_for_the_whole_data():
    pair = Pair()
    losses = []
    for args in ((DATA,), (DATA, 35)):
        with global_stream(new_generator(1)):
            losses.append(IWAE(4).loss(pair.model, pair.guide, *args))
    assert losses[1] == pytest.approx(7 * losses[0], rel=1e-13)


def test_without_a_common_plate_the_whole_data_are_one_datum():
    def model(x):
        mean = pyro.sample("mean", dist.Normal(torch.zeros((), dtype=x.dtype), 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    def guide(x):
        pyro.sample("mean", dist.Normal(torch.full((), 0.2, dtype=x.dtype), 0.5))

    particles = Draw(IWAE(3), model, guide, (DATA,), {})(3)
    mean = particles.guide_sites["mean"]["value"].reshape(3)
    by_hand = (
        dist.Normal(mean.unsqueeze(1), 1.0).log_prob(DATA).sum(1)
        + dist.Normal(0.0, 1.0).log_prob(mean)
        - dist.Normal(0.2, 0.5).log_prob(mean)
    )
    assert particles.log_weight.shape == (3,)
    assert torch.allclose(particles.log_weight, by_hand, rtol=1e-6)
    with pytest.raises(GuideError, match="'mean' stands outside the plate 'data'"):
        IWAE(3, data_plate="data").loss(model, guide, DATA)


@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"chunk_size": 3}])
def test_chunks_change_nothing_but_memory(options):
    """The stream is drawn in another order, so that replayed values are compared: particle by particle."""
    gradients = []
    for extra in ({}, options):
        pair = Pair()
        objective = IWAE(1, **extra)
        # A single particle at a time is drawn alike whether or not the rest follows.
        objective.num_particles = 6
        with global_stream(new_generator(2)):
            pieces = []
            if extra:
                pieces = [Draw(objective, pair.model, pair.guide, (DATA,), {})(6).log_weight]
            else:
                size = options["chunk_size"]
                whole = IWAE(1)
                pieces = [Draw(whole, pair.model, pair.guide, (DATA,), {})(size).log_weight for _ in range(6 // size)]
            loss = -torch.cat(pieces).logsumexp(0).sum()
            loss.backward()
        gradients.append(torch.cat([pair.slope.grad, pair.weight.grad, loss.detach().reshape(1)]))
    assert torch.equal(gradients[0], gradients[1])


@pytest.mark.calibration
def test_particles_one_by_one_follow_the_same_law(limit):
    """Models that cannot be broadcast: same bound, drawn in a loop."""
    pair = Pair()
    bounds = []
    for vectorize in (True, False):
        objective = IWAE(3, vectorize_particles=vectorize)
        bounds.append(torch.tensor([objective.loss(pair.model, pair.guide, DATA.repeat(8)) for _ in range(100)]))
    difference = bounds[0].mean() - bounds[1].mean()
    error = math.sqrt(sum(b.var().item() / len(b) for b in bounds))
    assert abs(difference.item()) < limit() * error


def test_svi_and_module_take_the_same_step():
    results = []
    for way in ("svi", "module"):
        pair = Pair()
        with global_stream(new_generator(3)):
            if way == "svi":
                # A plain function guide that registers the module, as scripts of Pyro do.
                def model(x, pair=pair):
                    pyro.module("pair", pair)
                    pair.model(x)

                def guide(x, pair=pair):
                    pyro.module("pair", pair)
                    pair.guide(x)

                svi = pyro.infer.SVI(model, guide, pyro.optim.SGD({"lr": 1e-2}), loss=IWAE(4, max_plate_nesting=1))
                loss = svi.step(DATA)
            else:
                module = IWAE(4, max_plate_nesting=1)(pair.model, pair.guide)
                optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
                value = module(DATA)
                value.backward()
                optimizer.step()
                loss = value.item()
        results.append(torch.cat([pair.slope, pair.weight, torch.tensor([loss], dtype=torch.float64)]).detach())
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0][:4], torch.tensor([0.5, -0.3, 0.4, 0.7], dtype=torch.float64))


def test_a_path_is_what_is_left_of_the_gradient_when_the_score_is_gone():
    """Hierarchical guide: the path through the lower draw to the density of the upper one must survive."""
    pair = Pair()
    particles = draw(pair, 2, path_only=True)
    low, top = (particles.guide_sites[n]["value"] for n in ("low", "top"))
    fixed = pair.slope.detach()
    by_hand = dist.Normal(fixed[0] * DATA, 0.7).log_prob(low) + dist.Normal(fixed[1] * low, 0.9).log_prob(top)
    wanted = torch.autograd.grad(by_hand.sum(), pair.slope, retain_graph=True)[0]
    found = torch.autograd.grad(particles.log_guide_total.sum(), pair.slope, retain_graph=True)[0]
    assert torch.allclose(found, wanted, rtol=1e-12, atol=1e-12)
    cut = dist.Normal(fixed[1] * low.detach(), 0.9).log_prob(top)
    wrong = torch.autograd.grad((dist.Normal(fixed[0] * DATA, 0.7).log_prob(low) + cut).sum(), pair.slope)
    assert not torch.allclose(found, wrong[0], rtol=1e-3)


def test_detached_draws_leave_scores_only():
    pair = Pair()
    particles = draw(pair, 2, detached=True)
    assert particles.log_score is not None
    low, top = (particles.guide_sites[n]["value"] for n in ("low", "top"))
    assert not low.requires_grad and not top.requires_grad
    by_hand = dist.Normal(pair.slope[0] * DATA, 0.7).log_prob(low) + dist.Normal(pair.slope[1] * low, 0.9).log_prob(top)
    wanted = torch.autograd.grad(by_hand.sum(), pair.slope)[0]
    assert torch.allclose(torch.autograd.grad(particles.log_score.sum(), pair.slope)[0], wanted, rtol=1e-12)


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_gate_weighs_the_guides_gradient_and_leaves_the_models(chunk_size):
    factor = torch.linspace(-1, 2, 20, dtype=torch.float64).reshape(4, 5)
    pair = Pair()
    objective = IWAE(4, chunk_size=chunk_size)
    gate = Gate()
    with global_stream(new_generator(4)):
        log_weight = draw(pair, 4, objective, gate=gate).log_weight
    gate.factor = factor
    log_weight.sum().backward()
    gated = pair.slope.grad.clone(), pair.weight.grad.clone()
    plain = Pair()
    with global_stream(new_generator(4)):
        log_weight = draw(plain, 4, objective).log_weight
    slope = torch.autograd.grad((factor * log_weight).sum(), plain.slope, retain_graph=True)[0]
    weight = torch.autograd.grad(log_weight.sum(), plain.weight)[0]
    assert torch.allclose(gated[0], slope, rtol=1e-12) and torch.allclose(gated[1], weight, rtol=1e-12)


@pytest.mark.parametrize("shape", [(3, 4, 6), (4, 6), (3, 4, 2, 6)])
def test_bernoulli_pixels_match_torch(shape):
    generator = new_generator(5)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    events = 2 if len(shape) == 4 else 1
    value = (torch.rand(shape[-events - 1 :], generator=generator) < 0.4).double()
    weight = torch.randn(shape[:-events], generator=generator, dtype=torch.float64)
    fn = dist.Bernoulli(logits=logits, validate_args=True).to_event(events)
    results = []
    for term in (site_log_density(fn, value), fn.log_prob(value.expand(shape))):
        gradient = torch.autograd.grad((weight * term).sum(), logits)[0]
        results.append(torch.cat([term.detach().reshape(-1), gradient.reshape(-1)]))
    assert torch.allclose(*results, rtol=1e-13, atol=1e-13)
    with pytest.raises(ValueError, match="support"):
        site_log_density(fn, value + 0.5)


def test_a_loss_that_is_not_finite_names_its_site():
    def model(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0, validate_args=False))
            pyro.sample("x", dist.Normal(z, 1.0, validate_args=False), obs=x)

    def guide(x):
        scale = pyro.param("scale", torch.tensor(math.nan))
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x, scale, validate_args=False))

    with pytest.raises(LossError, match="'z' is not finite"):
        ELBO(analytic_kl=False).loss_and_grads(model, guide, DATA.float())


@pytest.mark.parametrize("settings", [{"num_particles": 0}, {"num_particles": 2.0}, {"chunk_size": 0}])
def test_nothing_to_draw_is_refused(settings):
    with pytest.raises(SettingsError, match=next(iter(settings))):
        IWAE(**settings)


def guide_with(**sites):
    def guide(x):
        with pyro.plate("data", len(x)):
            for name, fn in sites.items():
                pyro.sample(name, fn)

    return guide


def positive(x):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Gamma(2.0, 1.0))
        w = pyro.sample("w", dist.Bernoulli(0.5))
        pyro.sample("x", dist.Normal(z + w, 1.0), obs=x)


GAMMA, COIN = dist.Gamma(2.0, 1.0), dist.Bernoulli(0.4)


@pytest.mark.parametrize(
    "sites, message",
    [
        ({"z": GAMMA}, "no site for the latent site 'w'"),
        ({"z": GAMMA, "w": COIN, "v": COIN}, "'v' that the model lacks"),
        ({"z": dist.Normal(5.0, 0.1), "w": COIN}, "'z': the guide's Normal has support"),
        (
            {
                "z": dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.Normal(torch.ones(2), 1.0)),
                "w": COIN,
            },
            "'z': the guide's MixtureSameFamily has support",
        ),
        ({"z": GAMMA, "w": dist.Uniform(0.0, 1.0)}, "'w': the guide's Uniform has support"),
        ({"z": GAMMA, "w": dist.Poisson(30.0)}, "'w'"),
        ({"z": GAMMA, "w": COIN, "x": COIN}, "'x', which the model observes"),
        ({"z": dist.Gamma(torch.ones(2), 1.0).to_event(1), "w": COIN}, "'z': a draw of the guide has shape"),
    ],
)
def test_a_guide_that_does_not_fit_is_refused(sites, message):
    with pytest.raises(GuideError, match=message):
        IWAE(2).loss(positive, guide_with(**sites), DATA.float())


@pytest.mark.parametrize(
    "positive_guide",
    [
        dist.LogNormal(0.0, 1.0),
        dist.MixtureSameFamily(dist.Categorical(torch.ones(2)), dist.LogNormal(torch.tensor([-1.0, 1.0]), 1.0)),
        dist.TransformedDistribution(dist.Beta(2.0, 2.0), [dist.transforms.AffineTransform(0.0, 3.0)]),
    ],
)
def test_a_guide_inside_the_models_support_is_welcome(positive_guide):
    sites = {"z": positive_guide, "w": COIN}
    assert math.isfinite(IWAE(2).loss(positive, guide_with(**sites), DATA.float()))


@pytest.mark.parametrize("options", [{"chunk_size": 2}, {"vectorize_particles": False}])
def test_particles_drawn_in_turn_share_one_minibatch(options):
    def model(x):
        with pyro.plate("data", len(x), subsample_size=2) as rows:
            z = pyro.sample("z", dist.Normal(torch.zeros(2), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=x[rows])

    def guide(x):
        with pyro.plate("data", len(x), subsample_size=2) as rows:
            pyro.sample("z", dist.Normal(x[rows] / 2, 0.5**0.5))

    # At the exact posterior every weight of a datum is its marginal likelihood.
    log_weight = Draw(IWAE(6, **options), model, guide, (DATA.float(),), {})(6).log_weight
    assert torch.allclose(log_weight, log_weight[:1].expand(6, 2), atol=1e-5)


def mixed(components):
    return dist.MixtureSameFamily(dist.Categorical(torch.ones(components.batch_shape)), components)


def between(low, high):
    return dist.Uniform(torch.as_tensor(low), torch.as_tensor(high))


THIRD = dist.transforms.AffineTransform(0.0, 3.0)


@pytest.mark.parametrize(
    ("prior", "posterior", "fits"),
    [
        (dist.Gamma(2.0, 1.0), mixed(mixed(dist.LogNormal(torch.zeros(2, 2), 1.0))), True),
        (mixed(dist.LogNormal(torch.zeros(2), 1.0)), dist.LogNormal(0.0, 1.0), True),
        (mixed(dist.LogNormal(torch.zeros(2), 1.0)), dist.Normal(3.0, 1.0), False),
        (between([0.0] * 3, [1.0] * 3), mixed(between([[0.0] * 2] * 3, [[1.0] * 2] * 3)), True),
        (between([0.0] * 3, [1.0] * 3), mixed(between([[0.0] * 2] * 3, [[1.0, 1.5]] * 3)), False),
        # As many elements as components, each beside bounds of its own.
        (between([0.0, 2.0], [1.0, 3.0]), mixed(between([[0.0] * 2, [2.0] * 2], [[1.0] * 2, [3.0] * 2])), True),
        (between(0.0, 3.0), mixed(dist.TransformedDistribution(dist.Beta(torch.ones(2), 1.0), [THIRD])), True),
    ],
)
def test_supports_of_mixtures_are_those_of_their_components(prior, posterior, fits):
    def site(fn):
        def program():
            with pyro.plate("rows", len(torch.empty((*fn.batch_shape, 1)).flatten())):
                pyro.sample("z", fn)

        return program

    if fits:
        assert math.isfinite(IWAE(2).loss(site(prior), site(posterior)))
    else:
        with pytest.raises(GuideError, match="'z': the guide"):
            IWAE(2).loss(site(prior), site(posterior))
