"""Pyro's automatic guides, whose sites are images of auxiliary draws: against Pyro's bound and sums by hand."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoLowRankMultivariateNormal, AutoMultivariateNormal, AutoNormal

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.inference.objectives import ELBO, IWAE, STL, DReG
from bayeskit.inference.objectives import _drawing as drawing
from bayeskit.inference.objectives import _drawing as terms
from bayeskit.inference.objectives import _evidence_lower_bound as evidence_lower_bound

COUNT = 3
GUIDES = [AutoNormal, AutoMultivariateNormal, AutoLowRankMultivariateNormal]


@pytest.fixture(autouse=True)
def double_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    with global_stream(new_generator(7, stream="test")), pyro.get_param_store().scope():
        yield
    torch.set_default_dtype(before)


def with_stream(function, seed=1):
    with global_stream(new_generator(seed, stream="objectives")):
        return function()


def data():
    return torch.tensor([1.0, 2.0, 0.5, 3.2])


def model(x):
    """Real, positive and simplex latents, of the whole data and of each datum."""
    mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    sd = pyro.sample("sd", dist.HalfNormal(2.0))
    share = pyro.sample("share", dist.Dirichlet(torch.full((3,), 2.0)))
    level = (share * torch.tensor([1.0, 2.0, 3.0])).sum(-1)
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.LogNormal(0.0, 1.0))
        pyro.sample("x", dist.Normal(mean + z * level, sd), obs=x)


def prepared(guide_class):
    """Return the guide, its parameters moved away from where they start."""
    guide = guide_class(model)
    guide(data())
    with torch.no_grad():
        for parameter in guide.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return guide


def gradient(loss, guide):
    found = torch.autograd.grad(loss, list(guide.parameters()), allow_unused=True)
    return torch.cat([g.flatten() for g in found if g is not None])


def log_densities(guide):
    """Return log weights of draws and the guide's log density with these draws held fixed, ``(COUNT,)`` each."""

    def total(trace):
        trace.compute_log_prob()
        terms = [site["log_prob"] for site in trace.nodes.values() if site["type"] == "sample"]
        return sum(t.expand(COUNT, t.shape[-1]).sum(-1) for t in terms if t.dim())

    def stacked(function):
        return pyro.plate("draws", COUNT, dim=-2)(function)

    drawn = poutine.trace(stacked(guide)).get_trace(data())
    joint = poutine.trace(poutine.replay(stacked(model), trace=drawn)).get_trace(data())
    log_weight = total(joint) - total(drawn)
    for node in drawn.nodes.values():
        if node["type"] == "sample" and isinstance(node["value"], torch.Tensor):
            node["value"] = node["value"].detach()
    again = poutine.trace(poutine.replay(stacked(guide), trace=drawn)).get_trace(data())
    return log_weight, total(again)


def compare(loss, reference, surrogate, guide):
    assert abs(float(loss.detach()) - float(reference.detach())) < 1e-10
    assert (gradient(loss, guide) - gradient(surrogate, guide)).abs().max() < 1e-10


def check_elbo(guide_class, analytic_kl):
    guide = prepared(guide_class)
    ours = ELBO(COUNT, analytic_kl=analytic_kl, max_plate_nesting=1)
    theirs = Trace_ELBO(COUNT, vectorize_particles=True, max_plate_nesting=1)
    loss = with_stream(lambda: ours.differentiable_loss(model, guide, data()))
    reference = with_stream(lambda: theirs.differentiable_loss(model, guide, data()))
    compare(loss, reference, reference, guide)


@pytest.mark.parametrize("analytic_kl", [True, False])
@pytest.mark.parametrize("guide_class", [*GUIDES, AutoDelta])
def test_the_elbo_is_pyros_draw_by_draw(guide_class, analytic_kl):
    # No site of such a guide has a closed form: the images carry the Jacobian, the auxiliary draws have no prior.
    check_elbo(guide_class, analytic_kl)


def test_a_jacobian_left_out_is_noticed(monkeypatch):
    monkeypatch.setattr(terms, "Delta", dist.Poisson)
    with pytest.raises(AssertionError):
        check_elbo(AutoNormal, True)


def check_weighted(guide_class, objective):
    guide = prepared(guide_class)
    loss = with_stream(lambda: objective(COUNT, max_plate_nesting=1).differentiable_loss(model, guide, data()))
    log_weight, direct = with_stream(lambda: log_densities(guide))
    along_path = log_weight + direct  # minus log q in the weight: this takes its direct part out
    bound = log_weight.logsumexp(0) - math.log(COUNT)
    share = log_weight.detach().softmax(0)
    reference, surrogate = {
        IWAE: (bound, bound),
        STL: (log_weight.mean(), along_path.mean()),
        DReG: (bound, (share.square() * along_path).sum()),
    }[objective]
    compare(loss, -reference, -surrogate, guide)


@pytest.mark.parametrize("objective", [IWAE, STL, DReG])
@pytest.mark.parametrize("guide_class", GUIDES)
def test_weights_and_paths_by_hand(guide_class, objective):
    check_weighted(guide_class, objective)


@pytest.mark.parametrize("objective", [STL, DReG])
def test_a_direct_part_left_in_is_noticed(objective, monkeypatch):
    monkeypatch.setattr(drawing, "_leave_path", lambda log_guide, direct: None)
    with pytest.raises(AssertionError):
        check_weighted(AutoMultivariateNormal, objective)


def two_signs(shape, dtype, device):
    """Replace two standard normal draws by plus and minus one: exact for quadratic functions."""
    return torch.tensor([1.0, -1.0], dtype=dtype, device=device).reshape(-1, *(1,) * (len(shape) - 1)).expand(shape)


def check_conjugate(guide_class, objective, monkeypatch):
    x = torch.randn(24) + 1

    def conjugate(x):
        mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(x)):
            pyro.sample("x", dist.Normal(mean, 1.0), obs=x)

    guide = guide_class(conjugate)
    guide(x)
    for place in ("normal", "multivariate_normal"):
        monkeypatch.setattr(f"torch.distributions.{place}._standard_normal", two_signs)
    optimizer = torch.optim.Adam(guide.parameters(), lr=0.1, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
    for _ in range(400):
        optimizer.zero_grad()
        objective.loss_and_grads(conjugate, guide, x)
        optimizer.step()
        schedule.step()
    drawn = poutine.trace(pyro.plate("draws", 2, dim=-2)(guide)).get_trace(x)
    high, low = drawn.nodes["mean"]["value"].detach().flatten()
    precision = len(x) + 0.25
    assert abs((high + low) / 2 - x.sum() / precision) < 1e-5
    assert abs((high - low) / 2 - precision**-0.5) < 1e-5
    evidence = dist.MultivariateNormal(torch.zeros(24), torch.eye(24) + 4.0).log_prob(x)
    assert abs(objective.loss(conjugate, guide, x) + evidence) < 1e-8


@pytest.mark.long
@pytest.mark.parametrize("objective", [ELBO, STL])
@pytest.mark.parametrize("guide_class", [AutoNormal, AutoMultivariateNormal])
def test_a_conjugate_mean_gets_its_posterior(guide_class, objective, monkeypatch):
    check_conjugate(guide_class, objective(2, max_plate_nesting=1), monkeypatch)


def test_a_posterior_that_collapses_is_noticed(monkeypatch):
    def without_auxiliary_sites(particles):
        return {name: particles.log_guide[name] - prior for name, prior in particles.log_prior.items()}

    monkeypatch.setattr(evidence_lower_bound, "divergences", without_auxiliary_sites)
    with pytest.raises(AssertionError):
        check_conjugate(AutoNormal, ELBO(2, max_plate_nesting=1), monkeypatch)
