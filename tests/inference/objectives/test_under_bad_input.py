import math

import pyro
import pyro.distributions as dist
import pytest
import torch

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError, LossError, ModelError, SettingsError
from bayeskit.inference.objectives import (
    ELBO,
    GECO,
    IWAE,
    SUMO,
    VCD,
    InfoVAE,
    LogLikelihoodConstraint,
    MeanSquaredError,
)
from bayeskit.inference.objectives import _objective as module

X = torch.linspace(-1.0, 1.0, 4, dtype=torch.float64)
MEANS, WEIGHTS = torch.tensor([-1.0, 2.0], dtype=torch.float64), torch.tensor([0.4, 0.6], dtype=torch.float64)
ENUMERATE = {"enumerate": "parallel"}


@pytest.fixture(autouse=True)
def stream():
    with global_stream(new_generator(11, stream="test")):
        yield


class Normal:
    """One latent variable for each datum; the likelihood is NaN in calls of the model that ``bad`` names."""

    def __init__(self, bad=(), plate="data"):
        self.loc = torch.zeros((), dtype=torch.float64, requires_grad=True)
        self.calls, self.bad, self.plate = 0, bad, plate

    def model(self, x):
        broken = self.calls in self.bad
        self.calls += 1
        with pyro.plate(self.plate, len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            pyro.sample("x", dist.Normal(z * (math.nan if broken else 1.0), 1.0, validate_args=False), obs=x)

    def guide(self, x):
        with pyro.plate(self.plate, len(x)):
            pyro.sample("z", dist.Normal(self.loc, 1.0))


def mixture(x):
    with pyro.plate("data", len(x)):
        y = pyro.sample("y", dist.Categorical(WEIGHTS))
        pyro.sample("x", dist.Normal(MEANS[y], 0.5), obs=x)


def enumerated(x):
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Categorical(logits=torch.stack([x, -x], -1)), infer=ENUMERATE)


@pytest.mark.parametrize("objective", [GECO, VCD], ids=["multiplier", "control variate"])
def test_a_loss_that_is_not_finite_teaches_nothing(objective):
    def make():
        return (
            GECO(LogLikelihoodConstraint("x", 1.0), max_plate_nesting=1)
            if objective is GECO
            else VCD(num_steps=1, max_plate_nesting=1)
        )

    for past in (False, True):
        troubled = make()
        if past:
            troubled.loss_and_grads(Normal().model, Normal().guide, X)
        before = {name: value.clone() for name, value in troubled.state_dict().items()}
        vae = Normal(bad=range(100))
        with pytest.raises(LossError, match="site 'x'"):
            troubled.loss_and_grads(vae.model, vae.guide, X)
        after = troubled.state_dict()
        if objective is GECO:
            assert all(torch.equal(after[n].nan_to_num(-1.0), v.nan_to_num(-1.0)) for n, v in before.items())
        vae = Normal()
        assert math.isfinite(troubled.loss_and_grads(vae.model, vae.guide, X))
        assert all(bool(value.isfinite().all()) for value in troubled.state_dict().values())


@pytest.mark.parametrize("particles", [1, 3])
@pytest.mark.parametrize("constraint", [MeanSquaredError("x", 0.3), LogLikelihoodConstraint("x", 1.0)])
def test_constraints_on_enumerated_sites_are_refused(constraint, particles):
    with pytest.raises(GuideError, match="about site 'x', which depends on site 'y', enumerated .* take the mark"):
        GECO(constraint, particles).loss(mixture, enumerated, X)


def test_the_remedy_for_a_constraint_on_an_enumerated_site_is_exact():
    objective = GECO(lambda particles: -particles.log_likelihood - 1.0)
    posterior = torch.stack([X, -X], -1).log_softmax(-1)
    expected = (posterior.exp() * dist.Normal(MEANS, 0.5).log_prob(X[:, None])).sum(-1)
    divergence = (posterior.exp() * (posterior - WEIGHTS.log())).sum(-1)
    loss = (-expected - 1.0 + divergence).sum()
    assert abs(objective.loss(mixture, enumerated, X) - float(loss)) < 1e-10


def test_a_constraint_on_a_site_that_the_model_sums_over_is_refused():
    def model(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x.new_zeros(()), 1.0))
            y = pyro.sample("y", dist.Categorical(WEIGHTS), infer=ENUMERATE)
            pyro.sample("x", dist.Normal(MEANS[y], 0.5), obs=x)

    with pytest.raises(GuideError, match="about site 'x', which depends on an enumerated site"):
        GECO(MeanSquaredError("x", 0.3)).loss(model, Normal().guide, X)
    # Only what the guide draws has a code.
    assert math.isfinite(InfoVAE(0.5, 2.0).loss(model, Normal().guide, X))


def test_info_vae_refuses_an_enumerated_guide():
    with pytest.raises(GuideError, match="site 'y' is enumerated in the guide.*take the mark out"):
        InfoVAE(0.5, 2.0).loss(mixture, enumerated, X)
    # Without the aggregates' part there is nothing to refuse.
    assert abs(InfoVAE(0.0, 1.0).loss(mixture, enumerated, X) - ELBO().loss(mixture, enumerated, X)) < 1e-10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SUMO(tail=3.0), "tail must be a distribution of the stopping index.*not 3.0"),
        (lambda: SUMO(centre="x"), "centre must be a number"),
        (lambda: SUMO(centre=math.inf), "centre must lie"),
        (lambda: ELBO(kl_weight="x"), "kl_weight must be a number in .*, not 'x'"),
        (lambda: ELBO(free_bits="x"), "free_bits must be a number"),
        (lambda: ELBO(kl_weight=-1.0), "kl_weight must lie in"),
    ],
)
def test_settings_of_a_wrong_kind_are_refused(make, message):
    with pytest.raises(SettingsError, match=message):
        make()


@pytest.mark.parametrize(
    "settings", [{"num_particles": 1}, {"num_particles": 3}, {"num_particles": 1, "max_plate_nesting": 1}]
)
def test_the_name_of_the_particles_plate_is_taken(settings):
    vae = Normal(plate="_particles")
    with pytest.raises(ModelError, match="plate '_particles' is taken"):
        IWAE(**settings).loss(vae.model, vae.guide, X)
    assert math.isfinite(IWAE(**settings).loss(Normal().model, Normal().guide, X))


@pytest.mark.parametrize("settings", [{"chunk_size": 2}, {"vectorize_particles": False}])
@pytest.mark.parametrize("run", ["loss", "loss_and_grads"])
def test_chunks_name_the_site_wherever_it_failed(settings, run):
    for bad in (0, 1):
        vae = Normal(bad=(bad,))
        with pytest.raises(LossError, match="log density of site 'x' is not finite"):
            getattr(IWAE(4, max_plate_nesting=1, **settings), run)(vae.model, vae.guide, X)


def test_chunks_repeat_the_random_stream_of_every_device(monkeypatch):
    """The chunks' tensors name the devices, whether they come by position or by name, and an accelerator beside."""
    seen = []

    def spy(function, *tensors, use_reentrant):
        seen.append(tensors)
        return function(*tensors)

    vae = Normal()
    monkeypatch.setattr(module, "checkpoint", spy)
    IWAE(4, chunk_size=2).differentiable_loss(vae.model, vae.guide, x=X)
    assert all(any(tensor is X for tensor in tensors) for tensors in seen) and len(seen) == 2


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_chunks_draw_the_same_again_where_no_data_are(device):
    loc = torch.zeros(4, device=device, requires_grad=True)
    drawn = []

    def model():
        with pyro.plate("data", 4):
            z = pyro.sample("z", dist.Normal(torch.zeros(4, device=device), 1.0))
            pyro.sample("x", dist.Normal(z, 1.0), obs=torch.ones(4, device=device))

    def guide():
        with pyro.plate("data", 4):
            drawn.append(float(pyro.sample("z", dist.Normal(loc, 1.0)).detach().sum()))

    IWAE(4, chunk_size=2, max_plate_nesting=1).differentiable_loss(model, guide).backward()
    assert len(drawn) == 4 and sorted(drawn[:2]) == sorted(drawn[2:]) and drawn[0] != drawn[1]
