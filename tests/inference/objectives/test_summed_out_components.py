"""Components summed out of the model or averaged over in the guide: against mixtures and sums by hand."""

import contextlib

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import TraceEnum_ELBO

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError
from bayeskit.inference.objectives import (
    ELBO,
    GECO,
    IWAE,
    STL,
    SUMO,
    TVO,
    DReG,
    LogLikelihoodConstraint,
    Renyi,
    ReweightedWakeSleep,
)
from bayeskit.inference.objectives import (
    _drawing as drawing,
)
from bayeskit.inference.objectives import _drawing as enumeration

DATA = torch.linspace(-2, 2, 6, dtype=torch.float64)
LOCATIONS = torch.tensor([-1.0, 2.0], dtype=torch.float64)
WEIGHTS = torch.tensor([0.4, 0.6], dtype=torch.float64)
UNLABELLED = torch.tensor([False, False, True, True, True, False])
PARALLEL = {"enumerate": "parallel"}


def with_stream(function, seed=0):
    with global_stream(new_generator(seed, stream="objectives")):
        return function()


def pair():
    """Return a mixture with its component as a site, the same as one density, a guide, and their parameters."""
    slope, sd = (torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (0.5, 0.7))

    def enumerated(x):
        with pyro.plate("data", len(x)):
            y = pyro.sample("y", dist.Categorical(WEIGHTS), infer=PARALLEL)
            z = pyro.sample("z", dist.Normal(LOCATIONS[y], sd))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def by_hand(x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.MixtureSameFamily(dist.Categorical(WEIGHTS), dist.Normal(LOCATIONS, sd)))
            pyro.sample("x", dist.Normal(z, 0.5), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(slope * x, slope))

    return enumerated, by_hand, guide, [slope, sd]


def loss_and_gradient(objective, model, guide, parameters):
    loss = with_stream(lambda: objective.differentiable_loss(model, guide, DATA))
    return torch.stack([loss.detach(), *torch.autograd.grad(loss, parameters)])


SUMMED = [
    lambda: ELBO(2, analytic_kl=False),
    lambda: IWAE(3),
    lambda: STL(3),
    lambda: DReG(3),
    lambda: DReG(4, chunk_size=2),
    lambda: Renyi(0.5, 3),
    lambda: SUMO(),
    lambda: TVO(3),
    lambda: ReweightedWakeSleep(3),
]


@pytest.mark.parametrize("make", SUMMED)
def test_a_component_summed_out_makes_the_mixture(make):
    enumerated, by_hand, guide, parameters = pair()
    found, wanted = (loss_and_gradient(make(), m, guide, parameters) for m in (enumerated, by_hand))
    assert (found - wanted).abs().max() < 1e-10


@pytest.mark.parametrize("make", [lambda: STL(3), lambda: DReG(3)])
def test_a_direct_part_left_in_is_noticed(make, monkeypatch):
    enumerated, by_hand, guide, parameters = pair()
    wanted = loss_and_gradient(make(), by_hand, guide, parameters)
    monkeypatch.setattr(drawing, "_leave_path", lambda log_guide, direct: None)
    found = loss_and_gradient(make(), enumerated, guide, parameters)
    assert abs(found[0] - wanted[0]) < 1e-10  # only the gradient tells
    assert (found - wanted).abs().max() > 1e-3


@pytest.mark.parametrize(
    "objective",
    [
        ELBO(2, kl_weight=4.0),
        ELBO(2, free_bits=3.0),
        ELBO(4, chunk_size=2, kl_weight=4.0),
        GECO(LogLikelihoodConstraint("x", 1.0), 2),
    ],
)
def test_a_divergence_hidden_in_the_sum_is_not_weighed(objective):
    enumerated, by_hand, guide, _ = pair()
    with_stream(lambda: objective.loss(by_hand, guide, DATA))
    with pytest.raises(GuideError, match="'z'"):
        with_stream(lambda: objective.loss(enumerated, guide, DATA))


def labelled(around):
    """Return a model and a guide that enumerates the label, with a messenger around both sites."""
    slope = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)

    def model(x):
        with pyro.plate("data", len(x)):
            with around():
                y = pyro.sample("y", dist.Categorical(WEIGHTS))
            pyro.sample("x", dist.Normal(LOCATIONS[y], 0.5), obs=x)

    def guide(x):
        with pyro.plate("data", len(x)), around():
            pyro.sample("y", dist.Categorical(logits=torch.stack([-slope * x, slope * x], -1)), infer=PARALLEL)

    return model, guide, slope


@pytest.mark.parametrize("settings", [{}, {"chunk_size": 2}, {"vectorize_particles": False}])
def test_an_average_is_no_weight_however_it_is_drawn(settings):
    model, guide, _ = labelled(contextlib.nullcontext)
    with pytest.raises(GuideError, match="'y'"):
        IWAE(4, **settings).loss(model, guide, DATA)


def check_label_weighed(around, share):
    """Compare with the average of the likelihood over all labels, less a share of their divergence."""
    model, guide, slope = labelled(around)
    guess = torch.stack([-slope * DATA, slope * DATA], -1).softmax(-1)
    likelihood = (guess * dist.Normal(LOCATIONS, 0.5).log_prob(DATA.unsqueeze(-1))).sum(-1)
    divergence = (guess * (guess.log() - WEIGHTS.log())).sum(-1)
    by_hand = -(likelihood - share * divergence).sum()
    loss = ELBO().differentiable_loss(model, guide, DATA)
    assert abs(float(loss.detach()) - float(by_hand.detach())) < 1e-10
    assert abs(torch.autograd.grad(loss, slope)[0] - torch.autograd.grad(by_hand, slope)[0]) < 1e-10


def test_a_mask_takes_the_density_of_an_enumerated_label_out_not_the_average():
    check_label_weighed(lambda: poutine.mask(mask=UNLABELLED), UNLABELLED.double())


def test_a_scale_weighs_the_density_of_an_enumerated_label_not_the_average():
    check_label_weighed(lambda: poutine.scale(scale=0.5), 0.5)


def test_an_average_that_takes_the_mask_in_is_noticed(monkeypatch):
    whole = enumeration.Enumerated.factor
    monkeypatch.setattr(
        enumeration.Enumerated,
        "factor",
        lambda self, site, term, layout, *, bare=False: whole(self, site, term, layout),
    )
    with pytest.raises(AssertionError):
        check_label_weighed(lambda: poutine.mask(mask=UNLABELLED), UNLABELLED.double())


def test_a_scale_around_everything_is_pyros():
    plain, plain_guide, _ = labelled(contextlib.nullcontext)
    model, guide = poutine.scale(plain, scale=0.1), poutine.scale(plain_guide, scale=0.1)
    whole = ELBO().loss(plain, plain_guide, DATA)
    assert abs(ELBO().loss(model, guide, DATA) - 0.1 * whole) < 1e-10
    assert abs(ELBO().loss(model, guide, DATA) - TraceEnum_ELBO(max_plate_nesting=1).loss(model, guide, DATA)) < 1e-10
