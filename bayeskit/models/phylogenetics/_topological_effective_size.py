"""Effective number of sampled trees, as far as their topologies are concerned."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import _clades as clades
from bayeskit.models.phylogenetics._samples import TreeSample, check_sample

_METHODS = ("frechet", "pseudo")
#: Trees to which distances are taken, as many as Lanfear et al. did.
_FOCAL = 100


def topological_effective_size(sample: TreeSample, method: str = "frechet", *, seed: int = 0) -> float:
    """Estimate how many independent trees a chain's topologies are worth.

    Parameters
    ----------
    sample : TreeSample
        Trees of one chain in their order, with equal weights, such as an element of `TopologyInference.samples`.
    method : {"frechet", "pseudo"}, default "frechet"
        "frechet": the autocorrelation of trees is one less the mean squared Robinson-Foulds distance of trees some
        steps apart over that of independent ones (Magee et al., 2023). "pseudo": the median effective size of the
        distances to 100 focal trees that are drawn from the chain (Lanfear et al., 2016).
    seed : int, default 0
        Of the focal trees.

    Returns
    -------
    float
        From 1 to the number of trees; the number of trees if all have one topology.

    Raises
    ------
    TreeError
        If `sample` is no sample of trees.
    SettingsError
        If there are fewer than eight trees, their weights differ, or the method is unknown.

    References
    ----------
    R. Lanfear, X. Hua and D. L. Warren (2016), Estimating the effective sample size of tree topologies from Bayesian
    phylogenetic analyses, Genome Biology and Evolution 8, 2319-2332.

    A. F. Magee, M. D. Karcher, F. A. Matsen IV and V. N. Minin (2023), How trustworthy is your tree? Bayesian
    phylogenetic effective sample size through the lens of Monte Carlo error, Bayesian Analysis 18, 1-29.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Tree
    >>> trees = [Tree.from_newick(text) for text in ("((A,B),C,D);", "((A,C),B,D);")]
    >>> sticky = TreeSample.from_trees([trees[step // 25 % 2] for step in range(1000)])
    >>> topological_effective_size(sticky) < 100
    True
    """
    weights = check_sample(sample).sample_weights
    if len(weights) < 8 or np.ptp(weights) > 1e-12:
        raise SettingsError(
            "sample: the trees of a chain, eight or more with equal weights, are needed. Remedy: give an element of "
            "TopologyInference.samples, or TreeSample.from_file of one run."
        )
    if method not in _METHODS:
        raise SettingsError(f"method={method!r:.60} is unknown. Remedy: use one of {', '.join(_METHODS)}.")
    splits = _splits(sample)
    if method == "frechet":
        return _effective_size(_squared_distances(splits), _independent_squared_distance(splits))
    generator = np.random.default_rng(seed)
    focal = splits[np.sort(generator.choice(len(weights), min(_FOCAL, len(weights)), replace=False))]
    count = splits.sum(1)
    distances = count[:, None] + focal.sum(1) - 2 * (splits @ focal.T).toarray()
    return float(np.median([_effective_size_of(series) for series in distances.T.astype(np.float64)]))


def _splits(sample: TreeSample) -> csr_array:
    """Return which splits each tree has, `(trees, splits)`."""
    inner = sample.topologies.below[:, sample.topologies.num_taxa :]
    known, index = clades.identify(inner)
    rows = index[sample.index]
    ends = np.arange(len(rows) + 1) * rows.shape[1]
    return csr_array((np.ones(rows.size), rows.ravel(), ends), shape=(len(rows), len(known)))


def _squared_distances(splits: csr_array) -> NDArray[np.float64]:
    """Return the mean squared distance of trees by the number of steps between them, `(trees // 2,)`."""
    count = splits.sum(1)
    found = np.zeros(splits.shape[0] // 2)
    for lag in range(1, len(found)):
        shared = splits[:-lag].multiply(splits[lag:]).sum(1)
        found[lag] = np.square(count[:-lag] + count[lag:] - 2 * shared).mean()
    return found


def _independent_squared_distance(splits: csr_array) -> float:
    """Return the mean squared distance of all pairs of different places in the chain."""
    # Of distinct trees, with their numbers.
    number, total, row = splits.shape[0], 0.0, splits.sum(1)
    for start in range(0, number, 256):
        block = splits[start : start + 256]
        shared = (block @ splits.T).toarray()
        total += float(np.square(row[start : start + 256, None] + row - 2 * shared).sum())
    return total / (number * (number - 1))


def _effective_size(by_lag: NDArray[np.float64], independent: float) -> float:
    """Return the effective size of a chain from mean squared distances by lag, by initial positive pairs."""
    number = 2 * len(by_lag)
    if independent == 0:
        return float(number)
    correlation = 1 - by_lag / independent
    pairs = correlation[: len(correlation) // 2 * 2].reshape(-1, 2).sum(1)
    last = int(np.argmax(pairs <= 0)) if (pairs <= 0).any() else len(pairs)
    time = 2 * np.minimum.accumulate(pairs[:last]).sum() - 1
    return float(min(number, max(1.0, number / max(time, 1e-12))))


def _effective_size_of(series: NDArray[np.float64]) -> float:
    """Return the effective size of numbers, `(draws,)`."""
    centred = series - series.mean()
    size = len(series)
    spectrum = np.fft.rfft(centred, 2 * size)
    covariance = np.fft.irfft(spectrum * spectrum.conj())[: size // 2] / (size - np.arange(size // 2))
    # Squared distances of numbers are twice their variance less their covariance.
    return _effective_size(2 * (covariance[0] - covariance), 2 * covariance[0] * size / (size - 1))
