r"""
SUMO for reverse KL and entropy: where the IWAE bound is exploited
==================================================================

**What you will learn:** why a lower bound of a log likelihood must not be minimised, what happens if one does, and how
the unbiased estimator SUMO fits a latent variable model to a density by the reverse KL divergence.

To fit a model :math:`q_\theta(x)` to a density known by its formula, one minimises :math:`\mathrm{KL}(q_\theta \| p) =
-H(q_\theta) - \mathrm{E}_{q_\theta} \log p(x)`. A model with a latent variable has no formula for the entropy
:math:`H`. The importance-weighted bound (IWAE, :cite:alp:`burda2016`) is below :math:`\log q_\theta(x)`, and so the
entropy that it reports is above the true one. The optimiser finds parameters at which the bound is worst.
:cite:t:`luo2020` made an estimator, SUMO, whose expectation is :math:`\log q_\theta(x)` itself.
"""

# sphinx_gallery_thumbnail_number = -1
import math

import numpy as np
import torch
from matplotlib.figure import Figure
from scipy.integrate import quad

from bayeskit.distributed import global_stream
from bayeskit.gallery import is_small
from bayeskit.inference.objectives import ELBO, IWAE, SUMO, ReciprocalTail
from bayeskit.models.vae import VAE, DiagonalNormal, likelihoods, mlp

# %%
# The model
# ---------
# The target is a ring in the plane, of radius 2 and width 0.3. Its constant is an integral over the radius. The model
# bends a line to a ribbon: a normal number :math:`z` and a network :math:`g` make the middle, and noise of learnt
# standard deviation :math:`s` makes the width,
#
# .. math::
#
#    p(x) \propto \exp\Big(-\frac{(\|x\| - 2)^2}{2 \cdot 0.3^2}\Big), \qquad
#    q_\theta(x) = \int N(z; 0, 1) \, N\big(x; g(z), s^2 I\big) \, dz .
#
# The latent variable has one dimension, so that the integral is a sum over a fine grid: :math:`\log q_\theta(x)` is
# known, and every claim below can be checked.

constant = math.log(2 * math.pi * quad(lambda r: r * math.exp(-0.5 * ((r - 2) / 0.3) ** 2), 0, 8, points=[2])[0])
grid = torch.linspace(-6, 6, 601, dtype=torch.float64).unsqueeze(1)
log_mass = torch.distributions.Normal(0.0, 1.0).log_prob(grid[:, 0]) + math.log(0.02)


def log_target(x: torch.Tensor) -> torch.Tensor:
    return -0.5 * ((x.norm(dim=-1) - 2) / 0.3) ** 2 - constant


def new_model() -> VAE:
    with global_stream(torch.Generator().manual_seed(0)):
        encoder = torch.nn.Sequential(mlp([2, 32, 32]), torch.nn.Tanh(), DiagonalNormal(32, 1))
        return VAE(encoder, mlp([1, 32, 32, 2]), 1, likelihoods.Gaussian(1.0), (2,)).double()


def exact_log_density(vae: VAE, x: torch.Tensor) -> torch.Tensor:
    noise = torch.distributions.Normal(vae.decoder(grid).unsqueeze(1), vae.likelihood.log_scale.exp())
    return (log_mass.unsqueeze(1) + noise.log_prob(x).sum(-1)).logsumexp(0)


def draw(vae: VAE, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    z = torch.randn(n, 1, dtype=torch.float64)
    return z, vae.decoder(z) + vae.likelihood.log_scale.exp() * torch.randn(n, 2, dtype=torch.float64)


# %%
# Before the data
# ---------------
# The ring, and points of the untrained model: a cloud about zero.

start = new_model()
with global_stream(torch.Generator().manual_seed(1)), torch.no_grad():
    _, points = draw(start, 2000)
line = torch.linspace(-3.4, 3.4, 120, dtype=torch.float64)
density = log_target(torch.cartesian_prod(line, line)).exp().reshape(120, 120).T
before = Figure(figsize=(4.5, 4.2), layout="constrained")
axes = before.subplots()
axes.contourf(line, line, density, cmap="Greys")
axes.plot(*points[:500].T, ".", color="C1", markersize=3, label="untrained model")
axes.set(xlabel="$x_1$", ylabel="$x_2$", title="target (grey)", xlim=(-3.4, 3.4), ylim=(-3.4, 3.4))
axes.legend()

# %%
# An exact twin
# -------------
# The grid is fine enough: the density integrates to one over the plane. Then the estimates at 200 points of the
# untrained model. The bounds of one weight and of nine are too low; SUMO is right on average, with about nine weights.
# So are its gradients in :math:`x`, the scores that a sampler or a reverse KL divergence needs. (The tail is cut at
# 100, which leaves a bias far below the errors and makes the variance finite.)

square = torch.cartesian_prod(*[torch.linspace(-7, 7, 71, dtype=torch.float64)] * 2)
with torch.no_grad():
    total = float(exact_log_density(start, square).exp().sum()) * 0.2**2
print(f"integral of the model's density: {total:.9f}")
assert abs(total - 1) < 1e-6

sumo = SUMO(ReciprocalTail(cap=100), minimum_particles=4)
x = points[:200].requires_grad_()
truth = exact_log_density(start, x)
(score,) = torch.autograd.grad(truth.sum(), x)
passes, values, scores = 100 if is_small() else 1000, {}, []
with global_stream(torch.Generator().manual_seed(2)):
    for name, bound in (("ELBO", ELBO()), ("IWAE-9", IWAE(9))):
        values[name] = torch.tensor([-bound.loss(start.model, start.guide, points[:200]) / 200 for _ in range(60)])
    estimates = []
    for _ in range(passes):
        estimate = sumo.log_marginal(start.model, start.guide, x).mean()
        scores.append(torch.autograd.grad(estimate, x)[0] * 200)
        estimates.append(estimate.detach())
values["SUMO"] = torch.stack(estimates)
off = {name: ((v.mean() - truth.mean()).item(), float(v.std() / len(v) ** 0.5)) for name, v in values.items()}
for name, (bias, error) in off.items():
    print(f"{name:7s} log density less the truth: {bias:.4f} +- {error:.4f}")
radial = (torch.stack(scores) * points[:200]).sum(-1).mean(1)  # of each pass: the mean of x times the score
exact_radial, error = float((score * points[:200]).sum(-1).mean()), float(radial.std() / passes**0.5)
print(f"mean of x times the score: {radial.mean():.4f} +- {error:.4f}, exactly {exact_radial:.4f}")
assert abs(off["SUMO"][0]) < 4.5 * off["SUMO"][1] and off["ELBO"][0] < -4.5 * off["ELBO"][1]
assert abs(float(radial.mean()) - exact_radial) < 4.5 * error

# %%
# The fit
# -------
# The same start and the same training of the guide, by pairs of :math:`x` and :math:`z` that the model makes. Only the
# estimate of :math:`\log q_\theta(x)` in the loss differs. Each loss is an estimate of the divergence, as the constant
# of the target is known; the exact divergence is estimated from 4,000 points by the grid.


def train(objective) -> tuple[VAE, list[float], dict[int, float]]:
    vae, claimed, exact = new_model(), [], {}
    of_model = [*vae.decoder.parameters(), *vae.likelihood.parameters()]
    model_steps, guide_steps = torch.optim.Adam(of_model, 3e-3), torch.optim.Adam(vae.encoder.parameters(), 3e-3)
    with global_stream(torch.Generator().manual_seed(3)):
        for step in range(steps + 1):
            if step % (steps // 10) == 0:
                exact[step] = divergence(vae, 1000).mean().item()
            _, x = draw(vae, 200)
            if isinstance(objective, SUMO):
                log_density = objective.log_marginal(vae.model, vae.guide, x).mean()
            else:
                log_density = -objective.differentiable_loss(vae.model, vae.guide, x) / len(x)
            loss = log_density - log_target(x).mean()
            model_steps.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(of_model, 1.0)
            model_steps.step()
            z, x = draw(vae, 200)
            guide_steps.zero_grad()
            (-vae.encoder(x.detach()).log_prob(z).mean()).backward()
            guide_steps.step()
            claimed.append(loss.item())
    return vae, claimed, exact


def divergence(vae: VAE, n: int) -> torch.Tensor:
    with torch.no_grad():
        _, x = draw(vae, n)
        return exact_log_density(vae, x) - log_target(x)


steps, runs = 20 if is_small() else 800, {}
for name, objective in {"SUMO": sumo, "IWAE-9": IWAE(9), "ELBO": ELBO()}.items():
    vae, claimed, exact = runs[name] = train(objective)
    with global_stream(torch.Generator().manual_seed(4)):
        found = divergence(vae, 4000)
    error, said = float(found.std() / len(found) ** 0.5), float(np.mean(claimed[-50:]))
    print(f"{name:7s} divergence {float(found.mean()):8.3f} +- {error:.3f}, by its own loss {said:8.3f}")
    runs[name] = vae, claimed, exact, float(found.mean()), said
assert is_small() or (0 < runs["SUMO"][3] < 0.1 and abs(runs["SUMO"][4] - runs["SUMO"][3]) < 0.1)

# %%
# A failure on purpose
# --------------------
# A divergence cannot be negative. The losses of both bounds are, and fall without end, while the model leaves the
# target. More weights only delay it: the optimiser has to find points at which nine draws of the guide all miss. A loss
# below zero gives this away here; where the constant of the target is unknown, nothing does.

assert is_small() or all(runs[name][4] < -0.3 and runs[name][3] > 0.3 for name in ("IWAE-9", "ELBO"))

# %%
# What it says
# ------------
# A lower bound is safe where it is maximised. In an entropy that is maximised it stands on the wrong side, and needs to
# be replaced by an estimate without bias, or by an upper bound. SUMO's guide does not matter for the expectation, but
# for the variance; so train it to cover the posterior.

figure = Figure(figsize=(9, 6), layout="constrained")
panels = figure.subplots(2, 3)
for (name, (vae, claimed, exact, _, _)), (top, bottom) in zip(runs.items(), panels.T, strict=True):
    with global_stream(torch.Generator().manual_seed(5)), torch.no_grad():
        _, x = draw(vae, 800)
    top.contourf(line, line, density, cmap="Greys")
    top.plot(*x.T, ".", color="C1", markersize=2)
    top.set(title=name, xlim=(-3.4, 3.4), ylim=(-3.4, 3.4), aspect="equal")
    bottom.plot(claimed, color="C0", linewidth=0.7, label="its own loss")
    bottom.plot(list(exact), list(exact.values()), "o-", color="C3", markersize=3, label="exact divergence")
    bottom.axhline(0, color="0.6", linewidth=1)
    bottom.set(xlabel="step", yscale="symlog")
panels[1, 0].set_ylabel("KL divergence (nats)")
panels[1, 0].legend()

# %%
# Try it on yours
# ---------------
# Replace ``log_target`` by your log density, and the decoder by one of your dimension. Watch the loss beside an
# estimate with many more weights: if they part, the bound is being exploited.
#
# .. code-block:: python
#
#    log_density = SUMO(ReciprocalTail(cap=100), minimum_particles=4).log_marginal(vae.model, vae.guide, x)
#    loss = (log_density - log_target(x)).mean()
#
# Where to go next: :doc:`elbo_iwae_sumo` has the price of SUMO in variance, :doc:`held_out_likelihood` brackets log
# likelihoods from both sides.
