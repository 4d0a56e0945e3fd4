"""Scores of unmarked discrete sites: scales and masks weigh terms, not how probable a draw was."""

from __future__ import annotations

from contextlib import ExitStack

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.objectives import _drawing as drawing

REPLICATES = 6000
DATA = torch.tensor([1.0, -2.0, 0.3], dtype=torch.float64)
CASES = {
    "subsampled": {"size": 12},
    "scaled": {"scale": 0.5},
    "masked": {"mask": torch.tensor([True, False, True])},
}


def gradients(infer, *, size=3, scale=1.0, mask=None, seed=0):
    """Return the gradient of the bound in each replicate, `(replicates, 3)`."""
    logits = torch.tensor([0.3, -0.2, 0.5], dtype=torch.float64).repeat(REPLICATES, 1).requires_grad_(True)

    def sites(bit, location, observed):
        with pyro.plate("replicates", REPLICATES, dim=-2):
            w = pyro.sample("w", location)
            with pyro.plate("data", size, subsample=torch.arange(3), dim=-1):
                with ExitStack() as around:
                    around.enter_context(poutine.scale(scale=scale))
                    if mask is not None:
                        around.enter_context(poutine.mask(mask=mask))
                    c = pyro.sample("c", bit, infer=infer if not observed else None)
                if observed:
                    pyro.sample("x", dist.Normal(2 * c + w, 1.0), obs=DATA)

    def model():
        sites(dist.Bernoulli(torch.tensor(0.3, dtype=torch.float64)), dist.Normal(DATA.new_zeros(()), 1.0), True)

    def guide():
        sites(dist.Bernoulli(logits=logits), dist.Normal(DATA.new_tensor(0.2), 0.5), False)

    with global_stream(new_generator(seed, stream="scores")):
        loss = ELBO(num_particles=2).differentiable_loss(model, guide)
    return torch.autograd.grad(loss, logits)[0]


def largest_z(case, seed=1):
    exact, found = gradients({"enumerate": "parallel"}, **CASES[case]), gradients(None, seed=seed, **CASES[case])
    error = ((exact.var(0) + found.var(0)) / REPLICATES).sqrt()
    return float(((found.mean(0) - exact.mean(0)) / error).abs().max())


@pytest.mark.parametrize("case", CASES)
def test_scores_know_no_scales_and_masks(case, limit):
    assert largest_z(case) < limit(3)


@pytest.mark.parametrize("case", CASES)
def test_a_score_that_is_weighed_is_seen(case, monkeypatch, limit):
    def weighed(site):
        term = site["fn"].log_prob(site["value"]) * site["scale"]
        return term if site["mask"] is None else term * site["mask"]

    monkeypatch.setattr(drawing, "draw_log_density", weighed)
    assert largest_z(case) > limit(3)
