"""Sums of exponentials replaced by their terms."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._logdensity.summands import objectives_of_summands
from bayeskit.inference._optimize import lbfgs

DOUBLE = torch.float64
CENTRES = torch.tensor([-1.0, 0.5, 2.0], dtype=DOUBLE)


def terms(x, how):
    wide = [dist.Normal(torch.zeros(2, dtype=DOUBLE), 1.0).log_prob(x).sum(-1) + math.log(0.5)]
    narrow = [dist.Normal(centre, 0.01).log_prob(x).sum(-1) + math.log(0.25) for centre in CENTRES]
    if how == "logaddexp":
        return torch.logaddexp(wide[0], narrow[2])
    if how == "stacked":
        return torch.stack(wide + narrow).logsumexp(0)
    return torch.logsumexp(torch.stack(wide + narrow, -1), dim=-1, keepdim=True).squeeze(-1)


@pytest.mark.parametrize(("how", "modes"), [("logaddexp", [2.0]), ("stacked", CENTRES), ("last", CENTRES)])
def test_each_narrow_term_is_found_from_afar(how, modes):
    def model():
        x = pyro.sample("x", dist.Normal(torch.zeros(2, dtype=DOUBLE), 3.0).to_event(1))
        pyro.factor("likelihood", terms(x, how))

    target = bk.Target.from_pyro(model)
    start = torch.tensor([[5.0, -7.0]], dtype=DOUBLE)
    ends = torch.cat([lbfgs(objective, start)[0] for objective in objectives_of_summands(target)])
    for mode in modes:
        assert float((ends - mode).norm(dim=-1).min()) < 0.01
    assert float((search_plainly(target, start) - CENTRES[2]).norm(dim=-1).min()) > 0.1  # which the density is not


def search_plainly(target, start):
    return lbfgs(target.value_and_grad, start)[0]


def test_components_of_a_mixture_distribution_are_terms():
    def model(y):
        centre = pyro.sample("centre", dist.Normal(torch.zeros(2, dtype=DOUBLE), 5.0).to_event(1))
        weights = dist.Categorical(torch.tensor([0.5, 0.5], dtype=DOUBLE))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(centre, 0.5)), obs=y)

    target = bk.Target.from_pyro(model, torch.tensor([1.0, 1.2, 0.8], dtype=DOUBLE))
    found = [lbfgs(objective, torch.zeros(1, 2, dtype=DOUBLE))[0][0] for objective in objectives_of_summands(target)]
    assert len(found) == 3  # the mean, and each component
    exact = 3.0 / (3 + 0.25 / 25)
    assert abs(float(found[1][0]) - exact) < 0.02 and abs(float(found[2][1]) - exact) < 0.02


def test_a_density_without_sums_has_no_terms():
    assert list(objectives_of_summands(bk.exact.get("linreg10").target())) == []
    foreign = bk.Target.from_log_density(lambda u: (-0.5 * u @ u, -u), 2)
    assert list(objectives_of_summands(foreign)) == []
