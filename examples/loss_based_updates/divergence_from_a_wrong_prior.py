r"""
Generalised variational inference: which divergence protects against a wrong prior
==================================================================================

**What you will learn:** what takes the place of a posterior if its divergence from the prior is not that of Kullback
and Leibler, which divergences forget a prior in conflict with the data, and what each does to the width.

In 1778 Hutton computed the density of the Earth from the attraction of a mountain: 4.5 times that of water
:cite:p:`hutton1778`. Twenty years later Cavendish measured it in his laboratory :cite:p:`cavendish1798`, and got 5.4
and more. What if one took Hutton's number for a prior, and believed in it too firmly? :cite:t:`knoblauch2022` propose
to choose another divergence.
"""

import math
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad
from scipy.optimize import minimize
from scipy.stats import norm

import bayeskit as bk
from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.generalized import GibbsPosterior, losses
from bayeskit.inference.objectives import Objective

# %%
# The model
# ---------
# Measurements are :math:`N(\theta, \sigma^2)`, with :math:`\sigma` that of the sample, and :math:`\theta \sim N(4.5,
# 0.1^2)`. Beliefs :math:`q = N(m, s^2)` minimise
#
# .. math:: J(m, s) = \frac{1}{2\sigma^2} \sum_i E_q (\theta - x_i)^2 + D(q \,\|\, \pi),
#
# which Bayes's posterior does if :math:`D` is the Kullback-Leibler divergence. Others are Renyi's of order one half;
# the alpha-divergence of order one half, four times a squared Hellinger distance and so never above four; the
# Kullback-Leibler divergence of the prior from :math:`q`; and the squared Wasserstein distance.

DENSITIES = """5.50 5.61 4.88 5.07 5.26 5.55 5.36 5.29 5.58 5.65 5.57 5.53 5.62 5.29 5.44 5.34 5.79 5.10 5.27 5.39
5.42 5.47 5.63 5.34 5.46 5.30 5.75 5.68 5.85"""
x = torch.tensor([float(word) for word in DENSITIES.split()], dtype=torch.float64)
CENTRE, WIDTH = 4.5, 0.1
n, mean, sigma = len(x), float(x.mean()), float(x.std())
standard_error, squares = sigma / math.sqrt(n), float((x - x.mean()).square().sum())


posterior = GibbsPosterior(dist.Normal(x.new_tensor(CENTRE), WIDTH), losses.HalfSquared(), x, weight=sigma**-2)

# %%
# Before the data
# ---------------
# Hutton's prior expects measurements about 4.5. One like the smallest of Cavendish's would not surprise it; their mean
# is many standard deviations away.

print(f"{n} measurements, mean {mean:.3f} +- {standard_error:.3f}, expected {CENTRE} +- {WIDTH}")
away = [(v - CENTRE) / math.hypot(WIDTH, s) for v, s in ((float(x.min()), sigma), (mean, standard_error))]
print(f"standard deviations above the prior: the smallest {away[0]:.1f}, the mean {away[1]:.1f}")

# %%
# An exact twin
# -------------
# Between normal distributions all five divergences have closed forms, written out here and compared with their
# definitions by quadrature; the Wasserstein distance by quantiles. So the best :math:`m` and :math:`s` are known.


def renyi(m, s, a, lib=math):
    """Return the divergence of N(m, s^2) from N(a, WIDTH^2), by the functions of ``math`` or ``torch``."""
    mixed = (s**2 + WIDTH**2) / 2
    return (m - a) ** 2 / (4 * mixed) + lib.log(mixed / (s * WIDTH))


def kullback_leibler(m, s, a, b, lib=math):
    return lib.log(b / s) + (s**2 + (m - a) ** 2) / (2 * b**2) - 0.5


DIVERGENCES = {
    "Kullback-Leibler": lambda m, s, a, lib=math: kullback_leibler(m, s, a, WIDTH, lib),
    "Renyi, 1/2": renyi,
    "alpha, 1/2": lambda m, s, a, lib=math: -4 * lib.expm1(-renyi(m, s, a, lib) / 2),
    "reverse": lambda m, s, a, lib=math: kullback_leibler(a, WIDTH, m, s, lib),
    "Wasserstein": lambda m, s, a, lib=math: (m - a) ** 2 + (s - WIDTH) ** 2,
}
q, p = norm(4.6, 0.07), norm(CENTRE, WIDTH)
definitions = {
    "Kullback-Leibler": lambda t: q.pdf(t) * (q.logpdf(t) - p.logpdf(t)),
    "Renyi, 1/2": lambda t: math.sqrt(q.pdf(t) * p.pdf(t)),
    "alpha, 1/2": lambda t: 2 * (math.sqrt(q.pdf(t)) - math.sqrt(p.pdf(t))) ** 2,
    "reverse": lambda t: p.pdf(t) * (p.logpdf(t) - q.logpdf(t)),
    "Wasserstein": lambda t: norm.pdf(t) * (q.mean() + q.std() * t - p.mean() - p.std() * t) ** 2,
}
for name, definition in definitions.items():
    integral = quad(definition, 4.5 - 13, 4.5 + 13, points=(0, 4.5, 4.6), epsabs=1e-13, limit=200)[0]
    integral = -2 * math.log(integral) if name == "Renyi, 1/2" else integral
    closed = DIVERGENCES[name](4.6, 0.07, CENTRE)
    print(f"{name:17s} {closed:.9f}, by quadrature {integral:.9f}")
    assert abs(integral - closed) < 1e-8


def objective(divergence, a: float, u: np.ndarray) -> float:
    m, s = u[0], math.exp(u[1])
    return (squares + n * ((m - mean) ** 2 + s**2)) / (2 * sigma**2) + divergence(m, s, a)


def best(name: str, a: float) -> tuple[float, float, float]:
    starts = [(m, math.log(s)) for m in (mean, (mean + a) / 2, a) for s in (standard_error, 1e-4)]
    options = {"xatol": 1e-10, "fatol": 1e-13, "maxiter": 4000}
    function = partial(objective, DIVERGENCES[name], a)
    found = min((minimize(function, u, method="Nelder-Mead", options=options) for u in starts), key=lambda r: r.fun)
    return found.x[0], math.exp(found.x[1]), found.fun


assert abs(best("Kullback-Leibler", CENTRE)[1] ** -2 / (n / sigma**2 + WIDTH**-2) - 1) < 1e-5  # Bayes's posterior
assert abs(best("Wasserstein", CENTRE)[1] * (n / sigma**2 + 2) / (2 * WIDTH) - 1) < 1e-5

# %%
# The fit
# -------
# The same by stochastic gradients, the loss from draws of :math:`q`. An objective of one's own is a class with one
# method, which returns what is to be maximised. What is lost is the objective at the end above its least value.


class Normal(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.nn.Parameter(x.mean())
        self.log_sd = torch.nn.Parameter(torch.tensor(math.log(WIDTH), dtype=torch.float64))

    def forward(self) -> torch.Tensor:
        return pyro.sample("theta", dist.Normal(self.mean, self.log_sd.exp()))


class GeneralisedBound(Objective):
    """Minus the expected loss, from draws of a normal guide, and its divergence from the prior."""

    def __init__(self, divergence, guide: Normal, num_particles: int) -> None:
        super().__init__(num_particles)
        self.divergence, self.guide = divergence, guide

    def estimate(self, draw) -> torch.Tensor:
        expected_loss = -draw(self.num_particles).log_likelihood.mean(0)
        return -expected_loss - self.divergence(self.guide.mean, self.guide.log_sd.exp(), CENTRE, torch)


steps = 150 if is_small() else 600
cosine = partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps)
for seed, (name, divergence) in enumerate(DIVERGENCES.items()):
    guide = Normal()
    bound = GeneralisedBound(divergence, guide, num_particles=64)
    options = {
        "num_steps": steps,
        "optimizer": partial(torch.optim.Adam, lr=0.05),
        "schedule": cosine,
        "progress": False,
    }
    bk.fit(posterior, guide, bound, None, seed=seed + 1, **options)
    m, log_sd = guide.mean.item(), guide.log_sd.item()
    exact_m, exact_s, least = best(name, CENTRE)
    reached = objective(divergence, CENTRE, np.array([m, log_sd]))
    with global_stream(torch.Generator().manual_seed(seed)):
        values = torch.tensor([bound.loss(posterior, guide) for _ in range(50)], dtype=torch.float64)
    error = float(values.std()) / len(values) ** 0.5
    print(f"{name:17s} mean {m:.4f} (exactly {exact_m:.4f}), sd {math.exp(log_sd):.4f} ({exact_s:.4f}), ", end="")
    print(f"lost {reached - least:.4f}; objective {values.mean():.3f} +- {error:.3f} ({reached:.3f})")
    assert 0 <= reached - least + 1e-9 < (0.5 if is_small() else 0.05)
    assert abs(values.mean() - reached) < 4.5 * error + 1e-4

# %%
# A failure on purpose
# --------------------
# A bounded divergence stops at its bound: the alpha-divergence charges four for anything far from the prior, a point
# mass included. So nothing keeps :math:`s` up. With :math:`P = n / \sigma^2`, a prior of width :math:`b` and its centre
# at a distance :math:`\Delta` from the mean, :math:`s^{3/2} = 2 \sqrt 2\, e^{-\Delta^2 / 4 b^2} / (P \sqrt b)` to first
# order: the *more* prior and data disagree, the surer is the answer. And the Wasserstein distance has a unit. In
# kilograms per cubic metre the same belief and the same data give another answer.

precision, gap = n / sigma**2, mean - CENTRE
collapsed = (2 * math.sqrt(2) * math.exp(-((gap / WIDTH) ** 2) / 4) / (precision * math.sqrt(WIDTH))) ** (2 / 3)
print(f"alpha-divergence: sd {best('alpha, 1/2', CENTRE)[1]:.3e}, to first order {collapsed:.3e}")
assert abs(best("alpha, 1/2", CENTRE)[1] / collapsed - 1) < 0.1 and collapsed < standard_error / 1000
answers = {unit: (precision / unit**2 * mean + 2 * CENTRE) / (precision / unit**2 + 2) for unit in (1, 1000)}
print(f"Wasserstein: mean {answers[1]:.3f} in units of water, {1000 * answers[1000]:.0f} in kilograms per cubic metre")
assert abs(answers[1] - mean) < standard_error and abs(answers[1000] - CENTRE) < standard_error

# %%
# What it says
# ------------
# As the prior moves away from the data, Bayes's posterior follows it and is none the wider. The reverse divergence
# shifts by about one standard error at most, and widens with the conflict, like :math:`\sqrt{\Delta}\, P^{-1/4}`:
# cautious, and still too wide when the data are many. Renyi's does so in a strong conflict; in a mild one it shifts as
# Bayes's does, since both charge :math:`(m - a)^2 / (2 b^2)` for a centre :math:`a` of the prior once :math:`s` is
# small. None protects the mean, keeps an honest width and leaves a good prior its weight: a divergence is a choice that
# wants a reason, as a prior is.

centres = np.linspace(4.5, 5.45, 3 if is_small() else 20)
lines = {name: np.array([best(name, a) for a in centres]) for name in DIVERGENCES}
figure = Figure(figsize=(7, 6), layout="constrained")
top, bottom = figure.subplots(2, 1, sharex=True)
for style, (name, line) in zip(("-", "--", "-.", ":", "-"), lines.items(), strict=True):
    top.plot(centres, (mean - line[:, 0]) / standard_error, style, label=name)
    bottom.plot(centres, line[:, 1] / standard_error, style, label=name)
top.set(ylabel="shift (standard errors)", title="posterior under a prior that moves away from the data")
bottom.set(xlabel="centre of the prior", ylabel="width (standard errors)", yscale="log", ylim=(1e-3, 10))
top.legend(frameon=False)
shifts = {name: float((mean - line[0, 0]) / standard_error) for name, line in lines.items()}
assert shifts["reverse"] < 1.1 < 3 < shifts["Kullback-Leibler"]
print("shift by Hutton's prior in standard errors: " + ", ".join(f"{name} {v:.2f}" for name, v in shifts.items()))

# %%
# Try it on yours
# ---------------
# Any Pyro model will do, with minus the log likelihood as the loss. First move the prior by its own width, and see by
# how much the answer moves; then train with another divergence, and compare means *and* widths. Where there is no
# closed form, a divergence can be estimated from the log ratios of draws:
#
# .. code-block:: python
#
#    class ByDraws(GeneralisedBound):
#        def estimate(self, draw):
#            particles = draw(self.num_particles)
#            log_ratio = particles.log_guide_total - sum(particles.log_prior.values())
#            return (particles.log_likelihood - log_ratio).mean(0)  # Kullback and Leibler's
#
# Where to go next: :doc:`martingale_posteriors` needs no prior for these data, :doc:`contaminated_location` is robust
# to wrong data instead of a wrong prior.
