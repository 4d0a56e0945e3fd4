r"""
Latent ODE in Pyro: a variational autoencoder for irregularly sampled time series
=================================================================================

**What you will learn:** how to train an autoencoder whose decoder is a differential equation, so that every series may
be observed at times of its own, and what is lost by a model that does not look at the times.

Pendulums swing with friction, and a few times, each at its own, their angles are measured; speeds never are. The code
of a series is the state at time zero, the decoder a differential equation with parameters to be learnt, and the guide a
network :cite:p:`chen2018,rubanova2019`.
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

NOISE, TIMES = 0.1, torch.linspace(0.0, 4.0, 17)


def pendulums(count: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return angles at all times, measurements, and which of them are seen, each ``(count, times)``."""
    stream = torch.Generator().manual_seed(seed)
    start = torch.randn(count, 2, generator=stream)
    path = bk.ode.solve(lambda t, z, _: torch.stack([z[1], -2 * z[0].sin() - 0.3 * z[1]]), start, TIMES)
    angle = path[..., 0]
    seen = torch.rand(angle.shape, generator=stream) < 0.4
    return angle, torch.where(seen, angle + NOISE * torch.randn(angle.shape, generator=stream), 0.0), seen


_, train, train_seen = pendulums(400 if is_small() else 1000, 0)
truth, test, test_seen = pendulums(100 if is_small() else 200, 1)
print(f"{len(train)} series of {float(train_seen.sum(1).float().mean()):.1f} measurements each")

# %%
# The model
# ---------
#
# .. math::
#
#    z_0 \sim N(0, I), \qquad \dot z_1 = z_2, \quad \dot z_2 = -\theta_1 \sin z_1 - \theta_2 z_2, \qquad
#    x_i \mid z_0 \sim N(z_1(t_i), s^2), \qquad q(z_0 \mid x) = N(m(x), \mathrm{diag}\, v(x)),
#
# where :math:`m` and :math:`v` come from the mean of a network's outputs for all pairs :math:`(t_i, x_i)` that are
# seen, whatever their number; it is given waves of :math:`t_i`, and their products with :math:`x_i`. All series are
# solved on the union of their times, with steps of their own.


class LatentEquation(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.log_rates, self.log_noise = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.tensor(-1.0))
        self.each = nn.Sequential(nn.Linear(24, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.whole = nn.Sequential(nn.Linear(33, 32), nn.Tanh(), nn.Linear(32, 4))

    def slope(self, t: Tensor, z: Tensor, rates: Tensor) -> Tensor:
        return torch.stack([z[1], -rates[0] * z[0].sin() - rates[1] * z[1]])

    def angles(self, z: Tensor) -> Tensor:
        return bk.ode.solve(self.slope, z, TIMES.to(z), self.log_rates.exp(), rtol=1e-4, atol=1e-4)[..., 0]

    @pyro_method
    def model(self, x: Tensor, seen: Tensor) -> None:
        with pyro.plate("series", len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros_like(x[0, :2]), 1.0).to_event(1))
            noise = dist.Normal(self.angles(z), self.log_noise.exp())
            pyro.sample("x", noise.mask(seen).to_event(1), obs=x)

    @pyro_method
    def guide(self, x: Tensor, seen: Tensor) -> None:
        waves = torch.outer(TIMES.to(x), torch.linspace(0.0, 2.5, 6, dtype=x.dtype))
        waves = torch.cat([waves.cos(), waves.sin()], -1)
        pairs = torch.cat([waves.expand(len(x), -1, -1), x.unsqueeze(-1) * waves], -1)
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
# Series of the equation before it has learnt: all swing too slowly, and with too much friction.

figure = Figure(figsize=(7, 2.6), layout="constrained")
axes = figure.subplots()
with torch.no_grad():
    axes.plot(TIMES, new_equation().angles(torch.randn(8, 2, generator=torch.Generator().manual_seed(2))).mT)
axes.set(xlabel="time", ylabel="angle, untrained")

# %%
# An exact twin
# -------------
# With :math:`z_1` in place of its sine, all measurements of a series are jointly normal, and their likelihood is known
# from matrix exponentials. Importance sampling has to find it.


class Linear(LatentEquation):
    def slope(self, t: Tensor, z: Tensor, rates: Tensor) -> Tensor:
        return torch.stack([z[1], -rates[0] * z[0] - rates[1] * z[1]])


linear = Linear().double()
few, few_seen = test[:20].double(), test_seen[:20]
linear.log_noise.requires_grad_(False).fill_(0.0)
matrix = torch.tensor([[0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
reach = torch.linalg.matrix_exp(matrix * TIMES.double()[:, None, None])[:, 0]
exact = []
for x, own in zip(few, few_seen, strict=True):
    covariance = reach[own] @ reach[own].mT + torch.eye(int(own.sum()), dtype=torch.float64)
    exact.append(dist.MultivariateNormal(torch.zeros_like(x[own]), covariance).log_prob(x[own]))


def prior_as_guide(x: Tensor, seen: Tensor) -> None:
    with pyro.plate("series", len(x)):
        pyro.sample("z", dist.Normal(x.new_zeros(2), 1.0).to_event(1))


found = importance_sampling(linear.model, prior_as_guide, few, few_seen, num_draws=4000, seed=0, progress=False)
z = (found.log_likelihood - torch.stack(exact)) / found.pointwise_standard_error
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


adam = functools.partial(torch.optim.Adam, lr=1e-2)
options = {"num_epochs": 100, "batch_size": 100, "optimizer": adam, "seed": 0, "progress": False}
scores, trained = {}, {}
for name, change in (("times", lambda *data: data), ("no times", without_times)):
    vae = trained[name] = new_equation()
    bk.fit(vae.model, vae.guide, IWAE(num_particles=5), change(train, train_seen), gradient_clipping=10.0, **options)
    data = change(test, test_seen)
    scores[name] = importance_sampling(vae.model, vae.guide, *data, num_draws=500, seed=1, progress=False)
    rates, noise = vae.log_rates.detach().exp().tolist(), float(vae.log_noise.detach().exp())
    print(f"{name}: {scores[name].mean:.2f} +- {scores[name].standard_error:.2f} nats a series", end="")
    print(f", trusted: {scores[name].trusted}, rates {rates[0]:.3f} and {rates[1]:.3f}, noise {noise:.3f}")
gain = scores["times"].log_likelihood - scores["no times"].log_likelihood
print(f"what times are worth: {float(gain.mean()):.2f} +- {float(gain.std()) / math.sqrt(len(gain)):.2f} nats a series")
better = float((gain > 0).double().mean())  # one series that a guide misses moves the mean, and not this share
print(f"with times, {100 * better:.0f} % of the series have the higher likelihood")
assert better > 0.5 + 4.5 * 0.5 / math.sqrt(len(gain))

# %%
# What it says
# ------------
# The true rates are 2 and 0.3, and the model with times finds them nearly; the noise, truly 0.1, comes out larger,
# because it covers for a guide that misses some codes, of which importance sampling warns, too. Paths of three test
# series, from twenty codes of the guide, go through what is seen, and between it near the truth.

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
# Put your series on the union of their times with a mask of what is seen. A network serves as slope where no law is
# known: :func:`~bayeskit.ode.solve` differentiates what ``f`` uses from outside. Inputs that drive the system go into
# ``params``. Look at ``trusted`` of the held-out likelihood: where it is not, the guide misses codes.
#
# .. code-block:: python
#
#    vae = new_equation()
#    bk.fit(vae.model, vae.guide, IWAE(num_particles=5), (train, train_seen), num_epochs=5, batch_size=100)
#    print(importance_sampling(vae.model, vae.guide, test, test_seen, num_draws=500).trusted)
#
# Where to go next: :doc:`/gallery/sampling/predator_and_prey` samples the parameters of one series,
# :doc:`held_out_likelihood` compares estimates of such likelihoods.
