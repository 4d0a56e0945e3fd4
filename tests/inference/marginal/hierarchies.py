"""Models with sites to be integrated out, and points and draws of their targets, shared by the tests."""

import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk

FLOAT = torch.float64


COUNTS = torch.tensor([1.0, 0, 3, 7, 2, 0], dtype=FLOAT)


HEIGHTS = torch.tensor([1.2, -2.0, 3.1, 0.5, 0.9], dtype=FLOAT)


def normal_means(y):
    mean = pyro.sample("mean", dist.Normal(0.0, 3.0))
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    with pyro.plate("groups", len(y)):
        effect = pyro.sample("effect", dist.Normal(mean, scale))
        pyro.sample("y", dist.Normal(effect, 0.7), obs=y)


def counted(y, rotation=None):
    """Poisson counts with normal effects on the log rate; a rotation of these leaves the distribution as it is."""
    level = pyro.sample("level", dist.Normal(0.5, 1.0))
    log_scale = pyro.sample("log_scale", dist.Normal(0.0, 1.0))
    with pyro.plate("groups", len(y)):
        effect = pyro.sample("effect", dist.Normal(0.0, log_scale.exp()))
    rate = effect if rotation is None else rotation @ effect
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Poisson((level + rate).exp()), obs=y)


def passed(y):
    """Successes of groups, with random intercepts."""
    level = pyro.sample("level", dist.Normal(0.0, 1.0))
    scale = pyro.sample("scale", dist.HalfNormal(1.0))
    with pyro.plate("groups", y.shape[1]):
        intercept = pyro.sample("intercept", dist.Normal(level, scale))
        with pyro.plate("trials", y.shape[0]):
            pyro.sample("y", dist.Bernoulli(logits=intercept), obs=y)


def trials():
    return (torch.rand(6, 8, generator=torch.Generator().manual_seed(0)) < 0.4).to(FLOAT)


def marginal(model, sites, *args):
    return bk.marginalize(bk.Target.from_pyro(model, *args), sites)


def points(target, n, scale=1.0):
    """Return vectors that depend on no seed shift."""
    return scale * torch.randn(n, target.dim, generator=torch.Generator().manual_seed(3), dtype=FLOAT)


def rows(target, u):
    """Return vectors ``(n, d)`` as draws of two chains, or one vector as many."""
    u = u.reshape(2, -1, target.dim)
    zeros = torch.zeros(u.shape[:2], dtype=FLOAT)
    return bk.Draws(u, zeros, zeros, torch.ones(2, dtype=FLOAT))


def at(target, u, num_draws):
    """Return draws that are all one vector."""
    return rows(target, u.expand(2 * num_draws, target.dim))


def gradient_error(target, u, step=4e-3):
    """Return the largest error of the gradient against differences of order six, relative to its length."""
    found = target.value_and_grad(u)[1]
    shifts = step * torch.tensor([1.0, -1, 2, -2, 3, -3], dtype=FLOAT)
    weights = torch.tensor([45.0, -45, -9, 9, 1, -1], dtype=FLOAT) / (60 * step)
    around = u[:, None, None] + shifts[:, None] * torch.eye(target.dim, dtype=FLOAT)[:, None]
    expected = (target.log_density(around) * weights).sum(-1)
    return float(((found - expected).norm(dim=1) / found.norm(dim=1)).max())
