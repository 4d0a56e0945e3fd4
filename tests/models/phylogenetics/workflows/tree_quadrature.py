"""Exact evidence of small alignments: under Jukes-Cantor and exponential branch lengths, a polynomial's integral.

The likelihood is linear in `a = exp(-4 t / 3)` for each edge and site, and where t is exponential with rate 10, a has
density `7.5 a ** 6.5` on the unit interval. Gauss-Jacobi quadrature with n nodes is exact up to `2 n - 1` sites. Where
a proportion p of sites cannot change, all others have rate `r = 1 / (1 - p)`, and the same holds of `a ** r`.
"""

import torch
from scipy.special import roots_hermitenorm, roots_laguerre, roots_sh_jacobi

from bayeskit.models.phylogenetics import JC69, K80
from bayeskit.models.phylogenetics._forest import ForestLikelihood
from bayeskit.models.phylogenetics._site_rates import InvariantSites

RATE = 10.0


def log_evidence(alignment, topologies, proportion=0.0):
    """Log evidence of each topology, shape (topologies,)."""
    power = 0.75 * RATE * (1 - proportion)
    nodes, weights = roots_sh_jacobi(alignment.num_sites // 2 + 1, power, power)
    lengths = -0.75 * (1 - proportion) * torch.from_numpy(nodes).log()
    log_weights = torch.from_numpy(weights / weights.sum()).log()
    grid = torch.cartesian_prod(*[torch.arange(len(nodes))] * topologies.num_edges)
    rates = InvariantSites(proportion) if proportion else None
    likelihood = ForestLikelihood(alignment, JC69(), site_rates=rates)
    parts = []
    for some in grid.split(20_000):
        x = lengths[some][:, None].expand(-1, len(topologies), -1)
        parts.append(likelihood.log_likelihood(topologies, x) + log_weights[some].sum(-1, keepdim=True))
    return torch.cat(parts).logsumexp(0)


def log_evidence_with_kappa(alignment, topologies, num_lengths=6, num_kappas=16):
    """Log evidence of each topology under K80 with the usual prior of kappa, for few sites, shape (topologies,).

    Of 4 taxa and 8 sites: the likelihood is a sum of exponentials of lengths, for which Gauss-Laguerre quadrature with
    6 nodes an edge has converged to 5e-4, and kappa is log-normal: 16 nodes have converged to 1e-3.
    """
    nodes, weights = roots_laguerre(num_lengths)
    lengths, log_weights = torch.from_numpy(nodes) / RATE, torch.from_numpy(weights).log()
    grid = torch.cartesian_prod(*[torch.arange(num_lengths)] * topologies.num_edges)
    x = lengths[grid][:, None].expand(-1, len(topologies), -1)
    points, shares = roots_hermitenorm(num_kappas)
    parts = []
    for point, share in zip(points, shares / shares.sum(), strict=True):
        likelihood = ForestLikelihood(alignment, K80(float(torch.tensor(1.0 + 1.25 * point).exp())))
        value = likelihood.log_likelihood(topologies, x) + log_weights[grid].sum(-1, keepdim=True)
        parts.append(value.logsumexp(0) + torch.tensor(share).log())
    return torch.stack(parts).logsumexp(0)
