r"""
GECO: a variational autoencoder under a constraint on its reconstructions
=========================================================================

**What you will learn:** how to train an autoencoder under a constraint on its reconstructions, and how to see that the
multiplier has nearly settled where the rate-distortion function has that slope.

Whoever weighs reconstruction against divergence has to guess the weight, or the noise of pixels, which is the same.
Often one knows what is wanted instead: how far pixels may be off. :cite:t:`rezende2018` minimise the divergence subject
to that, and let a Lagrange multiplier find the weight. The digits are 1,438 of the 1,797 images of eight by eight
pixels :cite:p:`alpaydin1998` in scikit-learn, those to train on.
"""

# sphinx_gallery_thumbnail_number = -1
import functools
import math

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.objectives import GECO, MeanSquaredError
from bayeskit.models.vae import likelihoods, load_digits, mlp_vae, plot_images

# %%
# The model
# ---------
# A network makes the mean of an image :math:`x` of a code :math:`z \sim N(0, I)` of ten numbers, and another one, the
# guide, the distribution of a code of an image. With a tolerance :math:`\tau` of the squared error, summed over
# pixels,
#
# .. math::
#
#    \min \; \mathrm{E}\, \mathrm{KL}\big(q(z \mid x) \,\|\, p(z)\big) \quad \text{subject to} \quad
#    \mathrm{E}\, C \le 0, \qquad C = \| x - \hat x(z) \|^2 - \tau, \quad z \sim q(z \mid x).
#
# The loss is the divergence plus :math:`\lambda C`. Each step multiplies :math:`\lambda` by :math:`\exp(\eta \bar C)`,
# where :math:`\bar C` is a moving average: it grows while images are not good enough and falls while they are better
# than asked for.

digits = load_digits()


def new_vae():
    with global_stream(torch.Generator().manual_seed(0)):
        return mlp_vae(64, (100,), 10, likelihoods.Gaussian(1.0, learn=False))


# %%
# Before the data
# ---------------
# Without training, the mean of an image scatters about zero, differently for each code, and nothing looks like a digit.
# (Values below zero are drawn white.)

before = Figure(figsize=(8, 1.6), layout="constrained")
axes = before.subplots()
with global_stream(torch.Generator().manual_seed(1)):
    codes = torch.randn(12, 10)
plot_images(torch.stack([digits.train[:12], new_vae().decode(codes)]), axes)
axes.set_title("digits, and what the untrained network makes of codes from the prior", fontsize="small")

# %%
# An exact twin
# -------------
# For independent normal data with variances :math:`v_i` and a linear network, the least divergence is the
# rate-distortion function of information theory, by water-filling: every coordinate has the error :math:`D_i =
# \min(\theta, v_i)`, where the level :math:`\theta` makes the errors add up to :math:`\tau`,
#
# .. math::
#
#    \mathrm{KL} = \sum_i \frac{1}{2} \log \frac{v_i}{D_i}, \qquad \lambda = \frac{1}{2 \theta} .
#
# With variances 4, 1 and 0.1 and :math:`\tau = 0.9` the level is 0.4: the third coordinate is not worth a code. Two
# points, one standard deviation up and down, stand in for draws; for squared errors their mean is the expectation, so
# that training has no noise and goes all the way to the optimum.


class TwoPoints(dist.Normal):
    def rsample(self, sample_shape=()):
        shape = self._extended_shape(sample_shape)
        signs = (-1.0) ** torch.arange(shape[0]).reshape(-1, *(1,) * (len(shape) - 1))
        return self.loc + self.scale * signs.to(self.loc).expand(shape)


class LinearCode(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.decode, self.encode = (torch.nn.Parameter(torch.full((3,), 0.5, dtype=torch.float64)) for _ in range(2))
        self.log_scale = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def model(self, x):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
            pyro.sample("x", dist.Normal(self.decode * z, 1.0).to_event(1), obs=x)

    def guide(self, x):
        with pyro.plate("data", len(x)):
            pyro.sample("z", TwoPoints(self.encode * x, self.log_scale.exp()).to_event(1))


variance = torch.tensor([4.0, 1.0, 0.1], dtype=torch.float64)
signs = torch.cartesian_prod(*[torch.tensor([1.0, -1.0], dtype=torch.float64)] * 3)
twin = LinearCode()
constrained = GECO(MeanSquaredError("x", 0.9, summed=True), num_particles=2, smoothing=0.9, rate=0.05)
x, steps = signs * variance.sqrt(), 800
adam = functools.partial(torch.optim.Adam, lr=0.1)
cosine = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
bk.fit(twin.model, twin.guide, constrained, x, num_steps=steps, optimizer=adam, schedule=cosine, progress=False)
with torch.no_grad():
    w, a, s = twin.decode, twin.encode, twin.log_scale.exp()
    divergence = (0.5 * (a**2 * variance + s**2 - 1) - s.log()).sum()
    found = [divergence, ((1 - w * a) ** 2 * variance + w**2 * s**2).sum(), constrained.multiplier]
exact = [0.5 * math.log(4 / 0.4) + 0.5 * math.log(1 / 0.4), 0.9, 1 / (2 * 0.4)]
for name, value, known in zip(("divergence", "squared error", "multiplier"), found, exact, strict=True):
    print(f"{name:13s} {float(value):.9f}, exactly {known:.9f}")
    assert abs(float(value) / known - 1) < 1e-9

# %%
# The fit
# -------
# Two tolerances. A constraint may be any function, so this one takes notes of the multiplier and of how far the images
# of a minibatch are off.

RATE, SMOOTHING = 0.02, 0.9
options = {
    "num_epochs": 40 if is_small() else 100,
    "batch_size": 100,
    "optimizer": functools.partial(torch.optim.Adam, lr=3e-3),
    "progress": False,
}


def train(tolerance: float, multiplier: float):
    error, notes = MeanSquaredError("x", tolerance, summed=True), []

    def constraint(particles):
        value = error(particles)
        notes.append((float(objective.multiplier), float(value.detach().mean())))
        return value

    objective, vae = GECO(constraint, smoothing=SMOOTHING, rate=RATE, multiplier=multiplier), new_vae()
    result = bk.fit(vae.model, vae.guide, objective, digits.train, **options)
    return vae, torch.tensor(notes[-result.num_steps :], dtype=torch.float64)


def evaluate(vae) -> tuple[float, float, float]:
    """Return the mean divergence, and the mean squared error with its Monte Carlo error."""
    with torch.no_grad(), global_stream(torch.Generator().manual_seed(2)):
        guide = vae.encoder(digits.train)
        error = (digits.train - vae.decoder(guide.sample((20,)))).square().sum(-1).mean(1)
        divergence = torch.distributions.kl_divergence(guide.base_dist, dist.Normal(torch.zeros(10), 1.0)).sum(-1)
    return float(divergence.mean()), float(error.mean()), float(error.std() / len(error) ** 0.5)


runs = {}
for tolerance in (2.0, 3.0):
    vae, notes = train(tolerance, 1.0)
    divergence, error, spread = evaluate(vae)
    runs[tolerance] = vae, notes, divergence, error, float(notes[-len(notes) // 3 :, 0].mean())
    print(f"tolerance {tolerance}: error {error:.4f} +- {spread:.4f}, divergence {divergence:.3f} nats, ", end="")
    print(f"multiplier {runs[tolerance][4]:.2f}")
    blocks = notes[len(notes) * 2 // 3 :, 1].unfold(0, 14, 14).mean(1)  # means of the last epochs' constraints
    assert blocks.mean() < 4.5 * blocks.std() / len(blocks) ** 0.5

# %%
# The errors printed are those of the training images with fresh codes. The constraint is one on average: from one step
# to the next images are a little better or worse, and over the last third of the epochs its mean is not above zero by
# more than 4.5 of its standard errors. With tolerance three the error printed is a little below the tolerance, so that
# the constraint is not quite tight; with tolerance two the multiplier still falls slowly at the end.
#
# The rate-distortion function is convex and its slope is minus the multiplier, so that the chord between two of its
# points is less steep than the tangent at the smaller error, and steeper than the one at the larger.

(_, _, rate_2, error_2, slope_2), (_, _, rate_3, error_3, slope_3) = runs.values()
chord = (rate_2 - rate_3) / (error_3 - error_2)
print(f"multipliers {slope_2:.2f} and {slope_3:.2f}, slope of the chord {chord:.2f} nats a unit of error")
assert slope_2 > chord > slope_3

# %%
# A failure on purpose
# --------------------
# The optimum does not depend on where the multiplier starts, but networks get stuck. Started at fifty, some nine times
# too high, it comes down again and the constraint holds; yet codes that were once made needlessly precise stay so.

stuck = train(2.0, 50.0)
divergence, error, spread = evaluate(stuck[0])
print(f"multiplier from 50: error {error:.4f} +- {spread:.4f}, divergence {divergence:.3f} nats, above {rate_2:.3f}")
assert divergence > rate_2

# %%
# What it says
# ------------
# One unit of squared error is worth as many nats of code as the multiplier says. It is also a statement on the noise
# of pixels: a Gaussian likelihood weighs errors by :math:`1 / (2 \sigma^2)`, so that :math:`\sigma` need not be
# guessed.

print(f"the tolerances amount to noise of {(0.5 / slope_2) ** 0.5:.3f} and {(0.5 / slope_3) ** 0.5:.3f} a pixel")
figure = Figure(figsize=(9, 3.6), layout="constrained")
left, right = figure.subplots(1, 2)
for k, (notes, label) in enumerate(
    [(runs[2.0][1], "2, from 1"), (runs[3.0][1], "3, from 1"), (stuck[1], "2, from 50")]
):
    left.semilogy(notes[:, 0], color=f"C{k}", linestyle=("-", "--", ":")[k], label=f"tolerance {label}")
left.set(xlabel="step", ylabel="multiplier (nats a unit of error)")
left.legend()
for k, (rate, error, slope) in enumerate([(rate_2, error_2, slope_2), (rate_3, error_3, slope_3)]):
    near = np.array([-0.4, 0.4])
    right.plot(
        error + near, rate - slope * near, color=f"C{k}", linestyle=("-", "--")[k], label="slope by the multiplier"
    )
    right.plot(error, rate, "os"[k], color=f"C{k}", label=f"tolerance {2 + k}")
right.set(xlabel="squared error of an image", ylabel="divergence (nats)")
right.legend()

# %%
# Try it on yours
# ---------------
# Replace the data and say how far pixels may be off. ``MeanSquaredError`` names the observed site; any function of the
# particles will do.
#
# .. code-block:: python
#
#    objective = GECO(MeanSquaredError("x", tolerance=2.0, summed=True), smoothing=0.9, rate=0.02)
#    vae = new_vae()
#    bk.fit(vae.model, vae.guide, objective, digits.train, num_epochs=5, batch_size=100)
#    print(float(objective.multiplier))
#
# Look at the multiplier over the steps: it has to settle. If it grows without end, the tolerance is out of reach of
# this network; if it falls to nothing, the constraint does nothing. Where the noise is known, the plain bound needs no
# multiplier.
#
# Where to go next: :doc:`variational_autoencoder` compares models by the likelihood of new images,
# :doc:`held_out_likelihood` has an autoencoder whose optimum is known.
