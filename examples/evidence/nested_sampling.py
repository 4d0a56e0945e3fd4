r"""Nested sampling of two thin shells.

What you will learn: how nested sampling finds an evidence where the posterior is curved and has two modes, and
how a run tells whether to believe it.

A set of live points starts as draws from the prior. Again and again the worst half of them dies and is replaced
by copies of the others, moved by slice sampling of the prior above the likelihood reached. Each death compresses the
prior volume :math:`X` by a factor of known distribution, so that the evidence is the one-dimensional integral

.. math:: Z = \int_0^1 L(X) \, dX.

The model needs no transform from the unit cube: points move in the unconstrained space that every target has.
"""

import os

import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.exact import gaussian_shells
from bayeskit.inference.evidence import nested_sampling
from bayeskit.inference.samplers import sample_nested

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
RADIUS, WIDTH, OFFSET, HALF_WIDTH = 2.0, 0.1, 3.5, 6.0


def model(centre):
    """Draw a point from a square; its likelihood is high on two circles."""
    edge = torch.full_like(centre, HALF_WIDTH)
    x = pyro.sample("x", dist.Uniform(-edge, edge).to_event(1))
    shells = [dist.Normal(RADIUS, WIDTH).log_prob((x - c).norm()) for c in (centre, -centre)]
    pyro.factor("shells", torch.logaddexp(*shells))


def main() -> None:
    target = bk.Target.from_pyro(model, torch.tensor([OFFSET, 0.0], dtype=torch.float64))
    run = sample_nested(target, num_live=100 if SMALL else 500, seed=1, progress=False)
    print(f"{len(run.position)} dead points, {run.num_evaluations} evaluations, ended: {run.ending}")

    print("\nlog volume   log likelihood   posterior mass below")
    mass = run.log_weights.exp().cumsum(0)
    for i in range(0, len(mass), len(mass) // 8):
        print(f"{float(run.log_volume[i]):10.2f} {float(run.log_likelihood[i]):16.2f} {float(mass[i]):17.3f}")

    # Does each new point come to lie uniformly among those it joined?
    print(f"\ninsertion test: p = {run.insertion_index_p_value:.2f}, information: {run.information:.2f} nats")

    exact = gaussian_shells(2).log_evidence
    estimate = nested_sampling(target, run)
    z = (estimate.log_evidence - exact) / estimate.standard_error
    print(f"{estimate}, {z:+.2f} standard errors from the exact {exact:.4f}")
    assert estimate.trusted and abs(z) < 5

    # The same run gives posterior draws, equally weighted.
    x = run.draws.values()["x"].flatten(0, 1)
    print(f"share of draws on the right shell: {float((x[:, 0] > 0).double().mean()):.2f}")


if __name__ == "__main__":
    main()
