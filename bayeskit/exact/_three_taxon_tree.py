"""Three taxa on a star tree under Jukes-Cantor: phylogenetic evidence by quadrature."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from scipy.special import roots_laguerre
from torch import Tensor

from bayeskit.errors import AlignmentError, SettingsError, ShapeError
from bayeskit.exact._case import ExactCase, positive_scalar

PATTERN_CLASSES = ("xxx", "xxy", "xyx", "yxx", "xyz")
"""Classes of site patterns, in the order used for counts and probabilities."""

# One term per pattern class, with 44, 12, 8, 5 and 3 sites.
_SEQUENCES = {
    "taxon1": "ACGT" * 11 + "ACGTACGTACGT" + "ACGTACGT" + "ACGTA" + "ACG",
    "taxon2": "ACGT" * 11 + "ACGTACGTACGT" + "GTACCATG" + "GTACT" + "CGT",
    "taxon3": "ACGT" * 11 + "GTACCATGTGCA" + "ACGTACGT" + "GTACT" + "GTA",
}
_TOLERANCE = 1e-9


def three_taxon_sequences() -> dict[str, str]:
    """Return the aligned sequences of the default case.

    Returns
    -------
    dict of str to str
        Sequence by taxon: three artificial sequences of 72 sites without gaps. The pattern classes ``xxx``,
        ``xxy``, ``xyx``, ``yxx`` and ``xyz`` occur 44, 12, 8, 5 and 3 times.

    Examples
    --------
    >>> from bayeskit.exact import three_taxon_sequences
    >>> from bayeskit.exact._three_taxon_tree import count_site_patterns
    >>> sequences = three_taxon_sequences()
    >>> list(sequences), {len(sequence) for sequence in sequences.values()}
    (['taxon1', 'taxon2', 'taxon3'], {72})
    >>> count_site_patterns(sequences).tolist()
    [44.0, 12.0, 8.0, 5.0, 3.0]
    """
    return dict(_SEQUENCES)


def count_site_patterns(sequences: Mapping[str, str]) -> Tensor:
    """Count the five classes of site patterns of three aligned sequences.

    Parameters
    ----------
    sequences : mapping of str to str
        Three sequences of equal length over ``A``, ``C``, ``G``, ``T`` (either case), in the order of the
        branches.

    Returns
    -------
    Tensor, shape (5,)
        Float64 counts of ``xxx``, ``xxy``, ``xyx``, ``yxx`` and ``xyz``.

    Raises
    ------
    AlignmentError
        If there are not three sequences, their lengths differ or are zero, or a character is not a base.

    Examples
    --------
    >>> from bayeskit.exact._three_taxon_tree import count_site_patterns
    >>> count_site_patterns({"a": "AAC", "b": "AAG", "c": "ACT"}).tolist()
    [1.0, 1.0, 0.0, 0.0, 1.0]
    """
    if len(sequences) != 3:
        raise AlignmentError(f"There are {len(sequences)} sequences; this case has three taxa.")
    lengths = {taxon: len(sequence) for taxon, sequence in sequences.items()}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise AlignmentError(f"The sequences have lengths {lengths}; align them to one length above zero.")
    for taxon, sequence in sequences.items():
        for site, character in enumerate(sequence.upper(), start=1):
            if character not in "ACGT":
                raise AlignmentError(
                    f"Taxon '{taxon}' has the character {character!r} at site {site}; this case supports only "
                    "A, C, G and T. Remove sites with gaps or ambiguity."
                )
    counts = dict.fromkeys(PATTERN_CLASSES, 0)
    for first, second, third in zip(*(sequence.upper() for sequence in sequences.values()), strict=True):
        if first == second == third:
            counts["xxx"] += 1
        elif first == second:
            counts["xxy"] += 1
        elif first == third:
            counts["xyx"] += 1
        elif second == third:
            counts["yxx"] += 1
        else:
            counts["xyz"] += 1
    return torch.tensor([float(count) for count in counts.values()], dtype=torch.float64)


def pattern_log_probabilities(branch_lengths: Tensor) -> Tensor:
    r"""Return the log probability of one site pattern of each class.

    Let :math:`s_i = \tfrac14 + \tfrac34 e^{-4 t_i / 3}` be the probability that both ends of branch ``i`` have
    the same base, and :math:`d_i = \tfrac14 - \tfrac14 e^{-4 t_i / 3}` the probability of a given other base.
    The sum over the base at the centre is :math:`\tfrac14 (s_1 s_2 s_3 + 3 d_1 d_2 d_3)` for ``xxx``,
    :math:`\tfrac14 (s_1 s_2 d_3 + d_1 d_2 s_3 + 2 d_1 d_2 d_3)` for ``xxy``, similarly for ``xyx`` and
    ``yxx``, and :math:`\tfrac14 (s_1 d_2 d_3 + d_1 s_2 d_3 + d_1 d_2 s_3 + d_1 d_2 d_3)` for ``xyz``.

    Parameters
    ----------
    branch_lengths : Tensor
        Expected substitutions per site, nonnegative, shape ``(*batch, 3)``.

    Returns
    -------
    Tensor
        Log probability of a single pattern of each class (such as ``AAC`` for ``xxy``), not of the class, shape
        ``(*batch, 5)``. The classes contain 4, 12, 12, 12 and 24 of the 64 patterns.

    Raises
    ------
    ShapeError
        If the last dimension is not 3.

    References
    ----------
    Jukes and Cantor (1969), Evolution of protein molecules, in Mammalian Protein Metabolism.
    Felsenstein (2004), Inferring Phylogenies, chapter 16.

    Examples
    --------
    >>> import torch
        >>> from bayeskit.exact import pattern_log_probabilities
    >>> probabilities = pattern_log_probabilities(torch.tensor([0.1, 0.2, 0.3])).exp()
    >>> round(float(probabilities @ torch.tensor([4.0, 12.0, 12.0, 12.0, 24.0])), 5)
    1.0
    """
    if branch_lengths.shape[-1:] != (3,):
        raise ShapeError(f"branch_lengths has shape {tuple(branch_lengths.shape)}; the last must be 3.")
    # expm1 preserves the precision of substitution probabilities on short branches; all sums below have positive
    # terms for the same reason.
    different = -0.25 * torch.expm1(branch_lengths * (-4.0 / 3.0))
    same = 1.0 - 3.0 * different
    d1, d2, d3 = different.unbind(-1)
    s1, s2, s3 = same.unbind(-1)
    all_changed = d1 * d2 * d3
    probabilities = torch.stack(
        [
            s1 * s2 * s3 + 3.0 * all_changed,
            s1 * s2 * d3 + d1 * d2 * s3 + 2.0 * all_changed,
            s1 * d2 * s3 + d1 * s2 * d3 + 2.0 * all_changed,
            d1 * s2 * s3 + s1 * d2 * d3 + 2.0 * all_changed,
            s1 * d2 * d3 + d1 * s2 * d3 + d1 * d2 * s3 + all_changed,
        ],
        dim=-1,
    )
    return probabilities.log() - math.log(4.0)


def three_taxon_tree_model(counts: Tensor, rate: Tensor) -> None:
    """Pyro model: independent exponential branch lengths and the Jukes-Cantor likelihood of the counts.

    Parameters
    ----------
    counts : Tensor, shape (5,)
        Number of sites per pattern class, see :func:`count_site_patterns`.
    rate : Tensor, shape ()
        Rate of the exponential prior, positive.

    Examples
    --------
    >>> import pyro
        >>> from bayeskit.exact import three_taxon_tree
    >>> case = three_taxon_tree()
    >>> trace = pyro.poutine.trace(case.model).get_trace(*case.args)
    >>> tuple(trace.nodes["branch_lengths"]["value"].shape)
    (3,)
    """
    branch_lengths = pyro.sample("branch_lengths", dist.Exponential(rate).expand([3]).to_event(1))
    pyro.factor("likelihood", (counts * pattern_log_probabilities(branch_lengths)).sum(-1))


def _integrate(counts: Tensor, rate: float, num_nodes: int) -> tuple[float, Tensor, Tensor]:
    """Return log evidence, mean ``(3,)`` and covariance ``(3, 3)`` by a product of Gauss-Laguerre rules."""
    abscissae, weights = roots_laguerre(num_nodes)
    # The weights of distant nodes underflow; their contribution is negligible.
    abscissae, weights = abscissae[weights > 0.0], weights[weights > 0.0]
    # Constant sites make the likelihood decay in t. With part of this decay in the weight exp(-scale * t), 32 nodes are
    # as accurate as 80 nodes with the prior as the weight.
    scale = rate + 0.25 * counts.sum().item()
    nodes = torch.from_numpy(abscissae / scale)
    log_weights = torch.from_numpy(np.log(weights) + np.log(rate / scale) + (1.0 - rate / scale) * abscissae)
    grid = torch.cartesian_prod(nodes, nodes, nodes)
    log_mass = torch.cartesian_prod(log_weights, log_weights, log_weights).sum(-1)
    log_mass = log_mass + pattern_log_probabilities(grid) @ counts
    log_evidence = log_mass.logsumexp(0)
    mass = (log_mass - log_evidence).exp()
    mean = mass @ grid
    deviation = grid - mean
    return log_evidence.item(), mean, deviation.mT @ (mass.unsqueeze(-1) * deviation)


def three_taxon_tree(
    sequences: Mapping[str, str] | None = None, *, rate: float = 10.0, num_nodes: int = 64
) -> ExactCase:
    r"""Build the three-taxon case: star tree, Jukes-Cantor, exponential branch lengths.

    The evidence :math:`\int \prod_c P_c(t)^{n_c} \prod_i \lambda e^{-\lambda t_i} dt` is computed by a
    product of three Gauss-Laguerre rules in :math:`x = (\lambda + n / 4) t` for ``n`` sites. The weight of the
    rule includes the prior and part of the decay of the likelihood.

    The likelihood has no multinomial coefficient, so it equals the likelihood of the alignment by the pruning
    algorithm. Three taxa have only one unrooted topology.

    Parameters
    ----------
    sequences : mapping of str to str, optional
        Three aligned sequences over ``A``, ``C``, ``G``, ``T``; default :func:`three_taxon_sequences`.
    rate : float
        Rate of the exponential prior of each branch length, positive.
    num_nodes : int
        Nodes per branch, from 8 to 128.

    Returns
    -------
    ExactCase
        Latent site ``"branch_lengths"`` of shape ``(3,)``, in the order of the sequences. ``args[0]`` are
        the counts of :data:`PATTERN_CLASSES`.

    Raises
    ------
    AlignmentError
        If the sequences are not three aligned sequences without gaps.
    SettingsError
        If ``rate`` is not positive, ``num_nodes`` is out of range, or the quadrature has not converged with
        ``num_nodes`` nodes.

    References
    ----------
    Jukes and Cantor (1969), Evolution of protein molecules, in Mammalian Protein Metabolism.
    Davis and Rabinowitz (1984), Methods of Numerical Integration, section 3.6.

    Examples
    --------
    >>> from bayeskit.exact import three_taxon_tree
    >>> case = three_taxon_tree()
    >>> abs(case.log_evidence - three_taxon_tree(num_nodes=40).log_evidence) < 1e-10
    True
    """
    counts = count_site_patterns(_SEQUENCES if sequences is None else sequences)
    rate_tensor = positive_scalar("rate", rate)
    if int(num_nodes) != num_nodes or not 8 <= num_nodes <= 128:
        raise SettingsError(f"num_nodes is {num_nodes}; pass a whole number between 8 and 128.")
    log_evidence, mean, covariance = _integrate(counts, rate, num_nodes)
    coarse, _, _ = _integrate(counts, rate, num_nodes * 3 // 4)
    if not abs(log_evidence - coarse) < _TOLERANCE:
        raise SettingsError(
            f"num_nodes is {num_nodes}, too few for these sequences: with a quarter fewer nodes the log evidence "
            f"changes by {abs(log_evidence - coarse):.1e}. Pass a larger num_nodes, or fewer sites."
        )
    num_sites = int(counts.sum())
    return ExactCase(
        name="three_taxon_tree",
        description=f"three-taxon star tree, {num_sites} sites, Jukes-Cantor, Exponential({rate:g}) prior",
        model=three_taxon_tree_model,
        args=(counts, rate_tensor),
        log_evidence=log_evidence,
        posterior_mean={"branch_lengths": mean},
        posterior_covariance={"branch_lengths": covariance},
        reference=f"tensor Gauss-Laguerre quadrature, {num_nodes} nodes a branch (Davis and Rabinowitz 1984)",
    )
