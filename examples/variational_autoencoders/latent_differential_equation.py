r"""
Irregular times: a latent differential equation
===============================================

**What you will learn:** how to train an autoencoder whose decoder is a differential equation, so that every series may
be observed at times of its own, and what is lost by a model that does not look at the times.

A pendulum swings with friction, and a few times, each series at its own, its angle is measured. The code of a series is
the state of a hidden system at time zero, a network is the slope of that system, and a linear map turns states into
angles :cite:p:`chen2018,rubanova2019`.
"""

# sphinx_gallery_thumbnail_number = -1
import functools
import math

import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from pyro.nn import PyroModule, pyro_method
from torch import Tensor, nn

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.held_out import importance_sampling
from bayeskit.inference.objectives import IWAE

NOISE, TIMES = 0.1, torch.linspace(0.0, 8.0, 33)


def pendulums(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return angles at all times, measurements, and which of them are seen, each ``(count, times)``."""
    stream = torch.Generator().manual_seed(seed)
    start = torch.randn(count, 2, generator=stream)
    path = bk.ode.solve(lambda t, z, _: torch.stack([z[1], -2 * z[0].sin() - 0.3 * z[1]]), start, TIMES)
    angle = path[..., 0]
    seen = torch.rand(angle.shape, generator=stream) < 0.25
    return angle, torch.where(seen, angle + NOISE * torch.randn(angle.shape, generator=stream), 0.0), seen


_, train, train_seen = pendulums(100 if is_small() else 500, 0)
truth, test, test_seen = pendulums(50 if is_small() else 200, 1)
print(f"{len(train)} series of {float(train_seen.sum(1).float().mean()):.1f} measurements each")

# %%
# The model
# ---------
#
# .. math::
#
#    z_0 \sim N(0, I), \qquad \dot z = f_\theta(z), \qquad x_i \mid z_0 \sim N(a^\top z(t_i) + b, s^2), \qquad
#    q(z_0 \mid x) = N(m(x), \mathrm{diag}\, v(x)),
#
# where :math:`m` and :math:`v` come from the mean of a network's outputs for all pairs :math:`(t_i, x_i)` that are
# seen, whatever their number. All series are solved on the union of their times, with steps of their own.


class LatentEquation(PyroModule):
    def __init__(self, dim: int = 3, width: int = 32) -> None:
        super().__init__()
        self.slope = nn.Sequential(nn.Linear(dim, width), nn.Tanh(), nn.Linear(width, dim))
        self.readout, self.log_noise = nn.Linear(dim, 1), nn.Parameter(torch.tensor(-1.0))
        self.each = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        self.whole = nn.Sequential(nn.Linear(65, 64), nn.Tanh(), nn.Linear(64, 2 * dim))
        self.dim = dim

    def angles(self, z: Tensor) -> Tensor:
        path = bk.ode.solve(lambda t, z, _: self.slope(z), z, TIMES.to(z), rtol=1e-4, atol=1e-4)
        return self.readout(path).squeeze(-1)

    @pyro_method
    def model(self, x: Tensor, seen: Tensor) -> None:
        with pyro.plate("series", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros_like(x[0, : self.dim]), 1.0).to_event(1))
            noise = dist.Normal(self.angles(z), self.log_noise.exp())
            pyro.sample("x", noise.mask(seen).to_event(1), obs=x)

    @pyro_method
    def guide(self, x: Tensor, seen: Tensor) -> None:
        pairs = torch.stack([TIMES.to(x).expand_as(x) / 8, x], -1)
        found = (self.each(pairs) * seen.unsqueeze(-1)).sum(1)
        count = seen.sum(1, keepdim=True)
        loc, log_scale = self.whole(torch.cat([found / count.clamp(min=1), count / 8], -1)).chunk(2, -1)
        with pyro.plate("series", len(x)):
            pyro.sample("z", dist.Normal(loc, (log_scale - 1).exp()).to_event(1))


def new_equation() -> LatentEquation:
    with global_stream(torch.Generator().manual_seed(0)):
        return LatentEquation()


# %%
# Before the data
# ---------------
# Series of an untrained equation: smooth, and unlike a pendulum.

figure = Figure(figsize=(7, 2.6), layout="constrained")
axes = figure.subplots()
with torch.no_grad():
    axes.plot(TIMES, new_equation().angles(torch.randn(8, 3, generator=torch.Generator().manual_seed(2))).mT)
axes.set(xlabel="time", ylabel="angle, untrained")

# %%
# An exact twin
# -------------
# With a linear slope, all measurements of a series are jointly normal, and their likelihood is known from matrix
# exponentials. Importance sampling has to find it.

linear = new_equation().double()
linear.slope = nn.Linear(3, 3, bias=False).double()
with torch.no_grad():
    linear.slope.weight.copy_(torch.tensor([[-0.2, 1.5, 0.0], [-1.5, -0.2, 0.0], [0.0, 0.5, -0.5]]))
    linear.log_noise.fill_(0.0)
few, few_seen = test[:20].double(), test_seen[:20]
reach = linear.readout.weight @ torch.linalg.matrix_exp(linear.slope.weight * TIMES.double()[:, None, None])
reach = reach.squeeze(1).detach()
exact = torch.stack([
    dist.MultivariateNormal(
        linear.readout.bias.detach().expand(int(own.sum())), reach[own] @ reach[own].mT + torch.eye(int(own.sum()))
    ).log_prob(x[own])
    for x, own in zip(few, few_seen, strict=True)
])  # fmt: skip


def prior_as_guide(x: Tensor, seen: Tensor) -> None:
    with pyro.plate("series", len(x)):
        pyro.sample("z", dist.Normal(x.new_zeros(3), 1.0).to_event(1))


found = importance_sampling(linear.model, prior_as_guide, few, few_seen, num_samples=2000, seed=0, progress=False)
z = (found.log_likelihood - exact) / found.pointwise_standard_error
print(f"importance sampling is off by at most {float(z.abs().max()):.2f} of its standard errors")
assert found.trusted and z.abs().max() < 4.5

# %%
# The fit
# -------
# And a failure on purpose: the same model of the same numbers, in their order, but as if they were measured at the
# first times of the grid, one after the other. That is what a network for regular series sees.


def without_times(x: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    order = (~seen).to(torch.int8).argsort(dim=1, stable=True)
    return x.gather(1, order), seen.gather(1, order)


epochs = 15 if is_small() else 150
adam = functools.partial(torch.optim.Adam, lr=5e-3)
options = {"num_epochs": epochs, "batch_size": 50, "optimizer": adam, "seed": 0, "progress": False}
scores, trained = {}, {}
for name, change in (("times", lambda *data: data), ("no times", without_times)):
    vae = trained[name] = new_equation()
    bk.fit(vae.model, vae.guide, IWAE(num_particles=5), change(train, train_seen), gradient_clipping=10.0, **options)
    data = change(test, test_seen)
    scores[name] = importance_sampling(vae.model, vae.guide, *data, num_samples=500, seed=1, progress=False)
    print(f"{name}: {scores[name].mean:.2f} +- {scores[name].standard_error:.2f} nats a series, trusted: ", end="")
    print(f"{scores[name].trusted}, noise {float(vae.log_noise.detach().exp()):.3f}")
gain = scores["times"].log_likelihood - scores["no times"].log_likelihood
print(f"what times are worth: {float(gain.mean()):.2f} +- {float(gain.std()) / math.sqrt(len(gain)):.2f} nats a series")
assert gain.mean() > 4.5 * gain.std() / math.sqrt(len(gain))

# %%
# What it says
# ------------
# Paths of three test series, from twenty codes of the guide, go through what is seen, and between it near the truth.

figure = Figure(figsize=(7.5, 2.6), layout="constrained")
with torch.no_grad(), global_stream(torch.Generator().manual_seed(3)):
    codes = torch.stack([
        pyro.poutine.trace(trained["times"].guide).get_trace(test, test_seen).nodes["z"]["value"] for _ in range(20)
    ])  # fmt: skip
    paths = trained["times"].angles(codes[:, :3])
for n, axes in enumerate(figure.subplots(1, 3, sharey=True)):
    axes.plot(TIMES, paths[:, n].mT, color="C0", alpha=0.3, linewidth=1)
    axes.plot(TIMES, truth[n], color="0.4", linestyle="--")
    axes.plot(TIMES[test_seen[n]], test[n, test_seen[n]], "o", color="C1")
    axes.set(xlabel="time")

# %%
# Try it on yours
# ---------------
# Put your series on the union of their times with a mask of what is seen; more outputs of ``readout`` serve several
# quantities, and inputs that drive the system go into ``params``.
