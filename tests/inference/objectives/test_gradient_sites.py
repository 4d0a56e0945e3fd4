"""Sites of a guide that name their gradient estimator, against full enumeration of the same guide."""

import math
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import GuideError
from bayeskit.inference.gradients import (
    DisARM,
    Enumeration,
    LeaveOneOut,
    MovingAverage,
    RaoBlackwell,
    ScoreFunction,
    UnorderedSet,
)
from bayeskit.inference.gradients._relaxed import REBAR, RELAX, GumbelSoftmax, StraightThrough
from bayeskit.inference.gradients._score_function import VIMCO, ControlVariate
from bayeskit.inference.gradients._space import space_of
from bayeskit.inference.objectives import ELBO, IWAE
from bayeskit.inference.objectives import _drawing as drawing
from bayeskit.inference.objectives import _drawing as terms
from bayeskit.inference.objectives import _drawing as weighting

REPLICATES = 20_000
DTYPE = torch.float64
DATA = torch.tensor([1.0, -2.0, 0.3], dtype=DTYPE)
PRIOR = torch.tensor([0.0, 0.5, -1.0], dtype=DTYPE)
LOCATIONS = torch.tensor([-1.5, 0.0, 3.0], dtype=DTYPE)
CHANCES = torch.tensor([0.2, 0.5, 0.9], dtype=DTYPE)
LOGITS = torch.tensor([[0.1, 0.2, 0.3], [0.0, -1.0, 1.0], [2.0, 0.1, 0.4]], dtype=DTYPE)
SLOPES = torch.tensor([[0.3, -0.4, 1.0]], dtype=DTYPE)
PARALLEL = {"enumerate": "parallel"}


def by(estimator):
    return {"gradient": estimator}


def constant(values: Tensor) -> Tensor:
    return values.new_tensor(-2.0)


def nested(first, second, *, num_particles=1, size=3, replicates=REPLICATES, seed=0, objective=ELBO):
    """Return the loss a replicate and each replicate's gradient, `(replicates, 13)`.

    A continuous w outside of the data's plate, a category z for each datum, and a bit y given both.
    """
    location = torch.full((replicates, 1), 0.2, dtype=DTYPE, requires_grad=True)
    logits = LOGITS.expand(replicates, 3, 3).clone().requires_grad_()
    slopes = SLOPES.expand(replicates, 1, 3).clone().requires_grad_()

    def plates():
        return (
            pyro.plate("replicates", replicates, dim=-2),
            pyro.plate("data", size, subsample=torch.arange(3), dim=-1),
        )

    def model():
        outer, inner = plates()
        with outer:
            w = pyro.sample("w", dist.Normal(DATA.new_zeros(()), 1.0))
            with inner:
                z = pyro.sample("z", dist.OneHotCategorical(logits=PRIOR))
                y = pyro.sample("y", dist.Bernoulli(z @ CHANCES))
                pyro.sample("x", dist.Normal(z @ LOCATIONS + w + y, 1.0), obs=DATA)

    def guide():
        outer, inner = plates()
        with outer:
            w = pyro.sample("w", dist.Normal(location, 0.1))
            with inner:
                z = pyro.sample("z", dist.OneHotCategorical(logits=logits), infer=first)
                pyro.sample("y", dist.Bernoulli(logits=(slopes * z).sum(-1) + w), infer=second)

    with global_stream(new_generator(seed, stream="gradient sites")):
        loss = objective(num_particles=num_particles).differentiable_loss(model, guide)
    found = torch.autograd.grad(loss, [location, logits, slopes])
    return float(loss.detach()) / replicates, torch.cat([g.reshape(replicates, -1) for g in found], -1)


@pytest.fixture(scope="module")
def enumerated():
    """Loss and gradients with both discrete sites summed over, for plates of 3 and of 12 data."""
    return {size: nested(PARALLEL, PARALLEL, size=size, seed=1) for size in (3, 12)}


def largest_z(found, exact):
    error = (found.var(0) / len(found) + exact.var(0) / len(exact)).sqrt()
    return float(((found.mean(0) - exact.mean(0)) / error).abs().max())


def curved(z: Tensor) -> Tensor:
    return (z * LOCATIONS).sum(-1).square()


def chosen(z: Tensor) -> Tensor:
    return z @ LOCATIONS


def mean_chosen(distribution):
    return distribution.probs @ LOCATIONS


def doubled(bit: Tensor) -> Tensor:
    return 2.0 * bit


def mean_doubled(distribution):
    return 2.0 * distribution.probs


PAIRS = [
    (by(RELAX(curved)), by(RELAX(doubled, scale=0.0))),
    (by(RELAX(curved, scale=0.5, num_samples=2)), by(ControlVariate(doubled, mean_doubled))),
    (by(ControlVariate(chosen, mean_chosen, 2)), by(ControlVariate(doubled, mean_doubled))),
    (by(LeaveOneOut(2)), by(ControlVariate(doubled, mean_doubled))),
    (by(REBAR()), by(REBAR(1.0, 0.5))),
    (by(REBAR()), PARALLEL),
    (PARALLEL, by(REBAR(0.3))),
    (by(UnorderedSet(2)), by(REBAR())),
    (by(REBAR(num_samples=2)), by(DisARM())),
    (by(RaoBlackwell(1)), by(LeaveOneOut(2))),
    (by(ScoreFunction()), by(ScoreFunction(2))),
    (by(ScoreFunction(1, constant)), by(ScoreFunction(2, constant))),
    (by(LeaveOneOut(2)), by(ScoreFunction(1, constant))),
]


@pytest.mark.calibration
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_two_sites_one_given_the_other(first, second, enumerated, limit):
    _, found = nested(first, second)
    assert largest_z(found, enumerated[3][1]) < limit(13)


@pytest.mark.calibration
@pytest.mark.parametrize(("first", "second"), [PAIRS[0], PAIRS[2], PAIRS[4], PAIRS[7], PAIRS[11]])
def test_several_particles_and_a_subsampled_plate(first, second, enumerated, limit):
    _, found = nested(first, second, num_particles=3, size=12, replicates=6000)
    assert largest_z(found, enumerated[12][1]) < limit(13)


@pytest.mark.calibration
def test_all_points_are_the_same_as_enumeration(enumerated):
    loss, found = nested(by(Enumeration()), by(Enumeration()), seed=1)
    assert abs(loss - enumerated[3][0]) < 1e-10 * abs(loss)
    assert torch.allclose(found, enumerated[3][1], atol=1e-10, rtol=0)


@pytest.mark.calibration
def test_a_density_that_ignores_where_a_point_lies_is_noticed(monkeypatch, enumerated, limit):
    def rounded(name, fn, value):
        if fn.event_shape:
            value = torch.nn.functional.one_hot(value.argmax(-1), 3).to(value.dtype)
        return fn.log_prob(value.round())

    monkeypatch.setattr(terms, "relaxed_log_density", rounded)
    _, found = nested(by(REBAR()), by(REBAR()))
    assert largest_z(found, enumerated[3][1]) > limit(13)


@pytest.mark.calibration
def test_a_control_variate_with_another_mean_is_noticed(enumerated, limit):
    def wrong(distribution):
        return 2.0 * distribution.probs.detach()

    _, found = nested(by(LeaveOneOut(2)), by(ControlVariate(doubled, wrong)))
    assert largest_z(found, enumerated[3][1]) > limit(13)


@pytest.mark.calibration
def test_a_control_variate_weighs_as_the_draws_that_it_depends_on(enumerated, monkeypatch):
    """A control variate near the cost lowers the variance; counted twice it lowers it less."""
    good = by(ControlVariate(lambda bit: -6.0 + 0.0 * bit, lambda q: -6.0 + 0.0 * q.probs))
    with_it = nested(by(LeaveOneOut(2)), good, seed=3)[1].var(0).sum()
    without = nested(by(LeaveOneOut(2)), by(ScoreFunction()), seed=3)[1].var(0).sum()
    assert float(with_it) < 0.9 * float(without)
    offset = weighting.offset
    monkeypatch.setattr(drawing, "offset", lambda site: None if offset(site) is None else 2 * offset(site))
    doubly = nested(by(LeaveOneOut(2)), good, seed=3)[1].var(0).sum()
    assert float(doubly) > float(with_it)


@pytest.mark.calibration
def test_a_baseline_that_sees_its_own_draw_is_noticed(enumerated, limit):
    _, found = nested(by(ScoreFunction(1, lambda values: values.mean(0))), PARALLEL)
    assert largest_z(found, enumerated[3][1]) > limit(13)


def test_a_control_is_learnt_through_a_guide():
    """By the square of the bound's gradient; the loss itself has none by the control's parameters."""
    control = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1), torch.nn.Flatten(-2))
    with global_stream(new_generator(1)):
        control = control.to(DTYPE)
        for layer in (control[0], control[2]):
            layer.reset_parameters()
    estimator, optimizer = RELAX(control, scale=0.0), torch.optim.Adam(control.parameters(), lr=0.03)

    def gradient(**settings):
        logits = LOGITS.expand(200, 3, 3).clone().requires_grad_()
        loss = single(category_prior, category_guide, estimator, logits, **settings)
        (unmoved,) = torch.autograd.grad(loss, control[0].weight, retain_graph=True)
        assert float(unmoved.abs().max()) < 1e-10 * abs(float(loss.detach()))
        return torch.autograd.grad(loss, logits, create_graph=True)[0]

    before = gradient(seed=0).detach().var(0).sum()
    for step in range(60):
        optimizer.zero_grad()
        gradient(seed=step + 1).square().mean().backward(inputs=list(control.parameters()))
        optimizer.step()
    assert float(gradient(seed=0).detach().var(0).sum()) < 0.5 * float(before)


def test_a_good_baseline_lowers_the_variance():
    baseline = MovingAverage(0.5)
    first = by(ScoreFunction(1, baseline))
    without = nested(by(ScoreFunction()), PARALLEL, seed=2)[1]
    untaught = nested(first, PARALLEL, seed=2)[1]
    assert torch.allclose(untaught, without, atol=1e-10, rtol=0), "the first mean is zero"
    taught = nested(first, PARALLEL, seed=2)[1]
    assert float(taught.var(0).sum()) < 0.8 * float(without.var(0).sum())


# One site: a row of bits or a category, a likelihood that is not linear in it.
def bits_prior():
    return dist.Bernoulli(logits=PRIOR).to_event(1)


def bits_guide(logits):
    return dist.Bernoulli(logits=logits).to_event(1)


def category_prior():
    return dist.OneHotCategorical(logits=PRIOR)


def category_guide(logits):
    return dist.OneHotCategorical(logits=logits)


def likelihood(z):
    return dist.Normal(((z * LOCATIONS).sum(-1) - 0.5).square(), 2.0)


def single(prior, guide_of, estimator, logits, *, objective=None, subsampled=1, seed=5):
    def plates():
        return pyro.plate("rows", len(logits), dim=-2) if logits.dim() > 2 else nullcontext()

    def model():
        with plates(), pyro.plate("data", 3 * subsampled, subsample=torch.arange(3)):
            z = pyro.sample("z", prior())
            pyro.sample("x", likelihood(z), obs=DATA)

    def guide():
        with plates(), pyro.plate("data", 3 * subsampled, subsample=torch.arange(3)):
            pyro.sample("z", guide_of(logits), infer=by(estimator))

    with global_stream(new_generator(seed, stream="gradient sites")):
        return (objective or ELBO()).differentiable_loss(model, guide)


def linear_density(distribution, z):
    """Log density with the value where the corner would be."""
    base = distribution.base_dist if hasattr(distribution, "base_dist") else distribution
    if isinstance(base, dist.OneHotCategorical):
        return (z * base.logits.log_softmax(-1)).sum(-1)
    return (z * base.probs.log() + (1 - z) * (1 - base.probs).log()).sum(-1)


RELAXED = [
    GumbelSoftmax(0.5),
    GumbelSoftmax(1.0, 3, hard=True),
    StraightThrough(2),
    REBAR(0.5, 0.8),
    RELAX(curved, 0.5, 0.8, 2),
    RELAX(curved, scale=0.0),
    ScoreFunction(3, constant),
]


@pytest.mark.parametrize("estimator", RELAXED, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("prior", "guide_of"), [(bits_prior, bits_guide), (category_prior, category_guide)])
@pytest.mark.parametrize("subsampled", [1, 4])
def test_one_site_is_the_surrogate_of_its_cost(prior, guide_of, estimator, subsampled):
    logits, again = (LOGITS.clone().requires_grad_() for _ in range(2))
    loss = single(prior, guide_of, estimator, logits, subsampled=subsampled)

    def cost(z):
        joint = linear_density(prior(), z) + likelihood(z).log_prob(DATA)
        return joint - linear_density(guide_of(again), z)

    with global_stream(new_generator(5, stream="gradient sites")):
        by_hand = -subsampled * estimator.surrogate(guide_of(again), cost).sum()
    assert abs(float(loss.detach() - by_hand.detach())) < 1e-10
    ours, theirs = torch.autograd.grad(loss, logits)[0], torch.autograd.grad(by_hand, again)[0]
    assert torch.allclose(ours, theirs, atol=1e-10, rtol=0)


def pair_of(prior, posterior, infer):
    def model():
        z = pyro.sample("z", prior)
        pyro.sample("x", dist.Normal(z.to(DTYPE).sum(), 1.0), obs=DATA[0])

    def guide():
        pyro.sample("z", posterior, infer=infer)

    return model, guide


def test_other_objectives_say_what_to_use():
    model, guide = pair_of(dist.Bernoulli(DATA.new_tensor(0.3)), dist.Bernoulli(DATA.new_tensor(0.4)), by(REBAR()))
    with pytest.raises(GuideError, match="'z'.*ELBO"):
        IWAE(2).loss(model, guide)


def test_the_multi_sample_bound_is_not_about_one_site():
    model, guide = pair_of(dist.Bernoulli(DATA.new_tensor(0.3)), dist.Bernoulli(DATA.new_tensor(0.4)), by(VIMCO(3)))
    with pytest.raises(GuideError, match=r"'z'.*IWAE\(num_particles=3\)"):
        ELBO().loss(model, guide)


def test_a_surrogate_of_its_own_is_refused():
    class Twice(LeaveOneOut):
        def surrogate(self, distribution, f, generator=None):
            return 2 * super().surrogate(distribution, f, generator)

    model, guide = pair_of(dist.Bernoulli(DATA.new_tensor(0.3)), dist.Bernoulli(DATA.new_tensor(0.4)), by(Twice()))
    with pytest.raises(GuideError, match="'z'.*Twice.*offset"):
        ELBO().loss(model, guide)


@pytest.mark.parametrize(
    ("prior", "posterior", "estimator", "message"),
    [
        (dist.Categorical(PRIOR.softmax(-1)), dist.Categorical(PRIOR.softmax(-1)), REBAR(), "OneHotCategorical"),
        (dist.Binomial(1, DATA.new_tensor(0.3)), dist.Bernoulli(DATA.new_tensor(0.3)), GumbelSoftmax(), "Binomial"),
        (dist.Normal(DATA[0], 1.0), dist.Normal(DATA[0], 1.0), REBAR(), "discrete"),
        (dist.Bernoulli(DATA.new_tensor(0.3)), dist.Bernoulli(DATA.new_tensor(0.3)), REBAR, "estimator"),
    ],
    ids=["Categorical", "Binomial", "Normal", "class"],
)
def test_sites_that_do_not_fit_are_refused(prior, posterior, estimator, message):
    model, guide = pair_of(prior, posterior, by(estimator))
    with pytest.raises(GuideError, match=f"'z'.*{message}"):
        ELBO(max_plate_nesting=0).loss(model, guide)


def test_a_mark_in_the_model_alone_is_no_guide():
    def model():
        pyro.sample("z", dist.Bernoulli(DATA.new_tensor(0.3)), infer=by(UnorderedSet(1)))

    with pytest.raises(GuideError, match="no site for the latent site 'z'"):
        ELBO().loss(model, lambda: None)


@pytest.mark.parametrize("estimator", [Enumeration(), UnorderedSet(2), RaoBlackwell(1), PARALLEL], ids=str)
def test_a_point_without_weight_may_be_impossible(estimator):
    """At a logit of 800 the other category's probability is zero, and so is its term in loss and gradient."""
    logits = torch.tensor([800.0, 0.0], dtype=DTYPE, requires_grad=True)

    def model():
        z = pyro.sample("z", dist.Categorical(torch.tensor([0.5, 0.5], dtype=DTYPE)))
        pyro.factor("impossible", torch.tensor([0.0, -torch.inf], dtype=DTYPE)[z])

    def guide():
        infer = estimator if estimator is PARALLEL else by(estimator)
        pyro.sample("z", dist.Categorical(logits=logits), infer=infer)

    with global_stream(new_generator(0)):
        loss = ELBO(max_plate_nesting=0).differentiable_loss(model, guide)
    assert abs(float(loss.detach()) - math.log(2)) < 1e-12
    assert torch.equal(torch.autograd.grad(loss, logits)[0], torch.zeros(2, dtype=DTYPE))


def count_of(estimator, objective=None):
    """How many points the model sees of a site."""
    seen = []

    def model():
        z = pyro.sample("z", dist.Bernoulli(DATA.new_tensor(0.3)))
        seen.append(z.numel())

    def guide():
        logits = torch.zeros((), dtype=DTYPE, requires_grad=True)
        pyro.sample("z", dist.Bernoulli(logits=logits), infer=by(estimator))

    with global_stream(new_generator(0)):
        (objective or ELBO(max_plate_nesting=0)).differentiable_loss(model, guide)
    return seen[-1]


@pytest.mark.parametrize("estimator", [GumbelSoftmax(), StraightThrough(), GumbelSoftmax(num_samples=3), REBAR()])
def test_relaxed_points_are_evaluated_once(estimator):
    with pyro.validation_enabled(False):
        assert count_of(estimator) == estimator.num_evaluations(space_of(dist.Bernoulli(logits=torch.zeros(()))))


def test_one_relaxed_draw_is_still_no_draw_of_other_bounds():
    with pyro.validation_enabled(False), pytest.raises(GuideError, match="'z'.*ELBO"):
        count_of(GumbelSoftmax(), IWAE(2, max_plate_nesting=0))


def test_too_many_points_of_many_sites_are_refused():
    def model():
        for i in range(17):
            pyro.sample(f"z{i}", dist.Bernoulli(DATA.new_tensor(0.3)))

    def guide():
        for i in range(17):
            pyro.sample(f"z{i}", dist.Bernoulli(DATA.new_tensor(0.3)), infer=by(LeaveOneOut(2)))

    with pytest.raises(GuideError, match="'z16'.*131072.*65536.*plate"):
        ELBO(max_plate_nesting=0).loss(model, guide)


def test_markov_chains_are_refused():
    def model():
        for t in pyro.markov(range(2)):
            pyro.sample(f"z{t}", dist.Bernoulli(DATA.new_tensor(0.3)))

    def guide():
        for t in pyro.markov(range(2)):
            pyro.sample(f"z{t}", dist.Bernoulli(DATA.new_tensor(0.4)), infer=by(REBAR()))

    with pytest.raises(GuideError, match="z0.*markov"):
        ELBO().loss(model, guide)


def test_a_baseline_does_not_learn_twice_from_a_chunk():
    objective = ELBO(num_particles=4, chunk_size=2)
    logits = LOGITS.clone().requires_grad_()
    with pytest.raises(GuideError, match="chunk_size.*LeaveOneOut"):
        single(bits_prior, bits_guide, ScoreFunction(1, MovingAverage()), logits, objective=objective)
    loss = single(bits_prior, bits_guide, LeaveOneOut(2), logits, objective=objective)
    assert bool(torch.autograd.grad(loss, logits)[0].isfinite().all())


def test_a_baseline_learns_in_training_alone():
    baseline = MovingAverage()
    with torch.no_grad():
        single(bits_prior, bits_guide, ScoreFunction(1, baseline), LOGITS.clone())
    assert int(baseline.num_draws) == 0
