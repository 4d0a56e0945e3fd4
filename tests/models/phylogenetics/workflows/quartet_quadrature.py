"""Exact evidence of four taxa by a likelihood of its own, for substitution models with free parameters.

The tree is ((A,B),C,D) with exponential branch lengths of rate 10. The likelihood of few sites is a sum of exponentials
of lengths, for which Gauss-Laguerre quadrature converges quickly; parameters on simplices are integrated by
Gauss-Legendre quadrature of the fractions of what is left.
"""

from typing import NamedTuple

import numpy as np
import torch
from scipy.special import gammainc, gammaincinv, roots_laguerre, roots_legendre
from scipy.stats import qmc

RATE = 10.0


class Exact(NamedTuple):
    """Log evidence and posterior means of one model."""

    log_evidence: float
    exchangeabilities: torch.Tensor  # (6,), which sum to one
    frequencies: torch.Tensor  # (4,)
    inner_length: float


def simplex(size, num_nodes):
    """Nodes and weights of the flat distribution on a simplex, (nodes, size) and (nodes,)."""
    nodes, weights = roots_legendre(num_nodes)
    nodes, weights = (nodes + 1) / 2, weights / 2
    points, shares = np.ones((1, 1)), np.ones(1)
    for left in range(size - 1, 0, -1):
        # The fraction that the next entry takes of what is left has a beta density.
        density = left * (1 - nodes) ** (left - 1) * weights
        rest = points[:, None, -1:]
        head = np.repeat(points[:, None, :-1], num_nodes, 1)
        points = np.concatenate([head, rest * nodes[None, :, None], rest * (1 - nodes[None, :, None])], -1)
        points, shares = points.reshape(-1, points.shape[-1]), (shares[:, None] * density).ravel()
    return torch.from_numpy(points), torch.from_numpy(shares)


def gamma_rates(shape, num_categories):
    """Mean rates of equally probable categories, (nodes, categories)."""
    bounds = gammaincinv(shape[:, None], np.arange(1, num_categories) / num_categories)
    shares = np.diff(gammainc(shape[:, None] + 1, bounds), prepend=0.0, append=1.0)
    return torch.from_numpy(num_categories * shares)


def exact(alignment, partition, free_frequencies=False, gamma=False, num_lengths=6, num_nodes=12):
    """Integrate over lengths, rates of the classes of `partition`, frequencies and, for two categories, their shape."""
    none = torch.ones(1, 1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    classes = simplex(len(set(partition)), num_nodes)
    bases = simplex(4, 6) if free_frequencies else (none[0].expand(1, 4) / 4, none[1])
    shapes = roots_laguerre(30)
    rates = (gamma_rates(shapes[0], 2), torch.from_numpy(shapes[1])) if gamma else none
    grid = torch.cartesian_prod(*(torch.arange(len(one[1])) for one in (classes, bases, rates)))
    pairs = classes[0][:, [int(digit) for digit in partition]][grid[:, 0]]
    pairs = pairs / pairs.sum(-1, keepdim=True)
    frequencies, speeds = bases[0][grid[:, 1]], rates[0][grid[:, 2]]
    log_prior = sum(one[1].log()[grid[:, column]] for column, one in enumerate((classes, bases, rates)))
    found = integrated(alignment, pairs, frequencies, speeds, num_lengths)
    log_weights = found[:, 0] + log_prior
    weights = log_weights.softmax(0)
    return Exact(float(log_weights.logsumexp(0)), weights @ pairs, weights @ frequencies, float(weights @ found[:, 1]))


def evidence_of_general_model(alignment, num_points=512, num_replicates=8, num_lengths=4):
    """Evidence under GTR with two gamma rates, all parameters free, and its standard error.

    Lengths are integrated by quadrature, the other eleven numbers by scrambled Sobol points of their prior.
    """
    means = []
    for replicate in range(num_replicates):
        u = qmc.Sobol(11, rng=np.random.default_rng(replicate)).random(num_points)
        drawn = -np.log1p(
            -u.clip(max=1 - 1e-12)
        )  # exponential variables, which are flat on a simplex if they sum to one
        pairs, frequencies = (torch.from_numpy(x / x.sum(-1, keepdims=True)) for x in (drawn[:, :6], drawn[:, 6:10]))
        found = integrated(alignment, pairs, frequencies, gamma_rates(drawn[:, 10], 2), num_lengths)[:, 0]
        means.append(float(found.exp().mean()))
    return np.mean(means), np.std(means, ddof=1) / np.sqrt(num_replicates)


def integrated(alignment, pairs, frequencies, speeds, num_lengths=6):
    """Log evidence and mean inner length at each point of the parameters, (points, 2)."""
    parts = zip(pairs.split(32), frequencies.split(32), speeds.split(32), strict=True)
    return torch.cat([_integrated(alignment, *part, num_lengths) for part in parts])


def _integrated(alignment, pairs, frequencies, speeds, num_lengths):
    nodes, shares = roots_laguerre(num_lengths)
    lengths, shares = torch.from_numpy(nodes / RATE), torch.from_numpy(shares)
    rates = torch.zeros(len(pairs), 4, 4, dtype=torch.float64)
    rates[:, *torch.triu_indices(4, 4, 1)] = pairs
    rates = (rates + rates.mT) * frequencies[:, None]
    rates = rates - torch.diag_embed(rates.sum(-1))
    rates = rates / -(frequencies * rates.diagonal(dim1=1, dim2=2)).sum(-1)[:, None, None]
    times = speeds[:, :, None] * lengths
    moves = torch.matrix_exp(rates[:, None, None] * times[..., None, None])  # (points, rates, lengths, 4, 4)
    sites = alignment.patterns[:, alignment.site_patterns].long()
    tips = ((sites[..., None] >> torch.arange(4)) & 1).double()
    a, b, c, d = (torch.einsum("prlxy,sy->prlsx", moves, tip) for tip in tips)
    left = torch.einsum("prisx,prjsx,prkyx->prijksy", a, b, moves)
    right = torch.einsum("prlsy,prmsy,py->prlmsy", c, d, frequencies)
    likelihood = torch.einsum("prqsy,prtsy->prqts", left.flatten(2, 4), right.flatten(2, 3)).mean(1).prod(-1)
    inner = torch.einsum("pijkt,i,j,t->pk", likelihood.unflatten(1, [num_lengths] * 3), shares, shares,
                         torch.outer(shares, shares).ravel())  # fmt: skip
    evidence = inner @ shares
    return torch.stack([evidence.log(), inner @ (shares * lengths) / evidence], -1)
