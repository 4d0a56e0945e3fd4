"""What a factorised normal guide covers of three planar targets, fitted by ELBO, VCD and the symmetrised divergence.

Banana and mixture are those of Ruiz and Titsias (2019); the paper has no funnel, so that one is Neal's with a smaller
spread, for which the symmetrised divergence is finite and short chains move. ELBO and symmetrised divergence are
minimised by quadrature, VCD by its objective with Hamiltonian chains. It prints the fitted standard deviations and the
mass of the target inside the guide's 95 % ellipse, and whether VCD's lies between the other two.

That it does is no theorem: the divergence weighs each direction by how far the chains have moved in it. The paper's
five leapfrog steps (--leapfrog 5) come back to where they began in the narrow directions of the funnel, and VCD then
covers a little more of it than the symmetrised divergence does.

    python benchmarks/vcd_coverage.py --steps 1 3 10 --out DIR
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._core.randomness import global_stream, new_generator, one_thread
from bayeskit.inference.objectives._variational_contrastive_divergence import VCD
from bayeskit.inference.samplers import HMC

DOUBLE = torch.float64
ELLIPSE = -2 * math.log(0.05)  # of a planar normal: squared radius with 95 % inside


@dataclass(frozen=True)
class Planar:
    """A normalised density of the plane and a box that holds it."""

    name: str
    log_density: Callable[[Tensor], Tensor]
    box: tuple[tuple[float, float], tuple[float, float]]
    starts: tuple[tuple[float, float], ...]

    def grid(self, nodes: int = 500) -> tuple[Tensor, Tensor]:
        """Return midpoints ``(n, 2)`` and their share of the mass, ``(n,)``."""
        axes = []
        for low, high in self.box:
            edges = torch.linspace(low, high, nodes + 1, dtype=DOUBLE)
            axes.append((edges[1:] + edges[:-1]) / 2)
        points = torch.cartesian_prod(*axes)
        return points, self.log_density(points).softmax(0)


def normal(mean: tuple[float, float], correlation: float) -> dist.MultivariateNormal:
    covariance = torch.tensor([[1.0, correlation], [correlation, 1.0]], dtype=DOUBLE)
    return dist.MultivariateNormal(torch.tensor(mean, dtype=DOUBLE), covariance)


def banana(z: Tensor) -> Tensor:
    bent = torch.stack([z[..., 0], z[..., 1] + z[..., 0].square() + 1], -1)
    return normal((0.0, 0.0), 0.9).log_prob(bent)


def mixture(z: Tensor) -> Tensor:
    first, second = normal((0.8, 0.8), 0.8).log_prob(z), normal((-2.0, -2.0), -0.6).log_prob(z)
    return torch.logaddexp(first + math.log(0.3), second + math.log(0.7))


def funnel(z: Tensor) -> Tensor:
    v, x = z[..., 0], z[..., 1]
    return dist.Normal(0.0, 1.5).log_prob(v) + dist.Normal(0.0, (v / 2).exp()).log_prob(x)


TARGETS = (
    Planar("banana", banana, ((-6.0, 6.0), (-30.0, 5.0)), ((0.0, -1.5),)),
    Planar("mixture", mixture, ((-7.0, 6.0), (-7.0, 6.0)), ((0.8, 0.8), (-2.0, -2.0), (-1.2, -1.2))),
    Planar("funnel", funnel, ((-8.0, 8.0), (-40.0, 40.0)), ((0.0, 0.0),)),
)


@dataclass(frozen=True)
class Guide:
    """A normal guide with independent coordinates."""

    mean: Tensor
    log_scale: Tensor

    def log_density(self, z: Tensor) -> Tensor:
        """Return the log density, ``(*batch, 2) -> (*batch)``."""
        return dist.Normal(self.mean, self.log_scale.exp()).log_prob(z).sum(-1)


def by_quadrature(target: Planar, symmetrised: bool) -> Guide:
    """Minimise KL(q, p), or that plus KL(p, q), from each starting point, and return the best guide."""
    at, weight = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(40))
    noise = torch.cartesian_prod(at, at)
    share = torch.cartesian_prod(weight, weight).prod(-1)
    share = share / share.sum()
    points, mass = target.grid(300)
    best: tuple[float, Guide] | None = None
    for start in target.starts:
        guide = Guide(
            torch.tensor(start, dtype=DOUBLE, requires_grad=True), torch.zeros(2, dtype=DOUBLE).requires_grad_()
        )
        optimizer = torch.optim.LBFGS([guide.mean, guide.log_scale], max_iter=200, line_search_fn="strong_wolfe")

        def divergence(guide: Guide = guide, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            z = guide.mean + guide.log_scale.exp() * noise
            value = (share * (guide.log_density(z) - target.log_density(z))).sum()
            if symmetrised:
                value = value + (mass * (target.log_density(points) - guide.log_density(points))).sum()
            value.backward()
            return value

        optimizer.step(divergence)
        value = float(divergence().detach())
        if best is None or value < best[0]:
            best = value, Guide(guide.mean.detach(), guide.log_scale.detach())
    assert best is not None
    return best[1]


def by_vcd(
    target: Planar, num_steps: int, start: Guide, leapfrog: int, iterations: int, particles: int, seed: int
) -> Guide:
    """Train a guide by the contrastive divergence and return the average of the last third of its path."""
    prior = dist.Normal(torch.zeros(2, dtype=DOUBLE), 10.0).to_event(1)
    mean, log_scale = start.mean.clone().requires_grad_(), start.log_scale.clone().requires_grad_()

    def model() -> None:
        z = pyro.sample("z", prior)
        pyro.factor("target", target.log_density(z) - prior.log_prob(z))

    def guide() -> None:
        pyro.sample("z", dist.Normal(mean, log_scale.exp()).to_event(1))

    objective = VCD(particles, num_steps=num_steps, kernel=HMC(step_size=0.25, num_steps=leapfrog))
    optimizer = torch.optim.Adam([mean, log_scale], lr=0.03)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.05 ** (1 / iterations))
    tail: list[tuple[Tensor, Tensor]] = []
    with global_stream(new_generator(seed, stream="vcd coverage")), pyro.validation_enabled(False):
        for iteration in range(iterations):
            optimizer.zero_grad()
            objective.loss_and_grads(model, guide)
            optimizer.step()
            schedule.step()
            if iteration >= 2 * iterations // 3:
                tail.append((mean.detach().clone(), log_scale.detach().clone()))
    return Guide(*(torch.stack(parts).mean(0) for parts in zip(*tail, strict=True)))


def coverage(target: Planar, guide: Guide) -> float:
    """Return the target's mass inside the guide's 95 % ellipse."""
    points, mass = target.grid(1500)
    radius = ((points - guide.mean) / guide.log_scale.exp()).square().sum(-1)
    return float(mass[radius < ELLIPSE].sum())


def draw(fits: dict[str, dict[str, Guide]], out: Path) -> None:
    """Plot each target with the 95 % ellipses of its fits, and save the figure."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(TARGETS), figsize=(5 * len(TARGETS), 4.5), constrained_layout=True)
    turn = torch.linspace(0, 2 * math.pi, 200, dtype=DOUBLE)
    circle = math.sqrt(ELLIPSE) * torch.stack([turn.cos(), turn.sin()], -1)
    for axis, target in zip(axes, TARGETS, strict=True):
        points, mass = target.grid(300)
        order = mass.argsort(descending=True)
        inside = torch.empty_like(mass)
        inside[order] = mass[order].cumsum(0)
        columns = (points[:, 0].reshape(300, 300), points[:, 1].reshape(300, 300), inside.reshape(300, 300))
        axis.contourf(*columns, levels=[0.0, 0.5, 0.8, 0.95], colors=["#5b8c5a", "#9dc19b", "#d8e8d6"])
        for color, (name, guide) in zip(["C0", "C1", "C4", "C5", "C3"], fits[target.name].items(), strict=False):
            edge = guide.mean + guide.log_scale.exp() * circle
            axis.plot(edge[:, 0], edge[:, 1], color=color, label=f"{name}: {coverage(target, guide):.2f}")
        edges = points[inside < 0.99]
        axis.set(title=target.name, xlim=(edges[:, 0].min() - 1, edges[:, 0].max() + 1))
        axis.set(ylim=(edges[:, 1].min() - 1, edges[:, 1].max() + 1), xlabel="$z_1$", ylabel="$z_2$")
        axis.legend(title="mass inside the 95 % ellipse", fontsize=8, title_fontsize=8)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "vcd_coverage.png", dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3, 10], help="steps t of the chains")
    parser.add_argument("--leapfrog", type=int, default=2, help="leapfrog steps of each step of a chain")
    parser.add_argument("--iterations", type=int, default=400)
    parser.add_argument("--particles", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the plot")
    options = parser.parse_args()
    fits: dict[str, dict[str, Guide]] = {}
    rows = []
    with one_thread():
        for target in TARGETS:
            elbo = by_quadrature(target, symmetrised=False)
            fitted = {"ELBO": elbo}
            for t in options.steps:
                run = (options.leapfrog, options.iterations, options.particles, options.seed)
                fitted[f"VCD, t = {t}"] = by_vcd(target, t, elbo, *run)
            fitted["symmetrised"] = by_quadrature(target, symmetrised=True)
            fits[target.name] = fitted
            ends = sorted((coverage(target, elbo), coverage(target, fitted["symmetrised"])))
            for name, guide in fitted.items():
                covered, (sd_1, sd_2) = coverage(target, guide), guide.log_scale.exp().tolist()
                between = ends[0] < covered < ends[1] if name.startswith("VCD") else ""
                rows.append((target.name, name, sd_1, sd_2, covered, between))
    table = pd.DataFrame(rows, columns=["target", "objective", "sd 1", "sd 2", "coverage", "between"])
    print(table.to_string(index=False, float_format="%.3f"))
    if options.out is not None:
        draw(fits, options.out)


if __name__ == "__main__":
    main()
