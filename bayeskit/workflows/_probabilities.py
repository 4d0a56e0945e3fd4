"""Posterior probabilities of models whose log evidences are uncertain."""

from __future__ import annotations

import numpy as np
from scipy.special import logsumexp

_PAIRS = 10_000


def simulated_probabilities(weight: np.ndarray, error: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return standard deviations and central 95 % intervals of the softmax of weights with independent normal errors.

    To first order in the errors would be cheaper, and wrong as soon as they exceed a fraction of a nat. Draws come in
    pairs of opposite sign, which have no third moment to disturb small errors; their seed is fixed.

    Parameters
    ----------
    weight : ndarray
        Log weights, shape ``(n,)``; -inf for none.
    error : ndarray
        Their standard errors, shape ``(n,)``.

    Returns
    -------
    tuple of ndarray
        Standard deviation, lower and upper end, each of shape ``(n,)``.

    Examples
    --------
    >>> import numpy as np
    >>> spread, low, high = simulated_probabilities(np.array([-100.0, -110.0]), np.array([5.0, 0.1]))
    >>> spread.round(1).tolist(), low.round(1).tolist()
    ([0.1, 0.1], [0.6, 0.0])
    """
    if not error.any():
        p = np.exp(weight - logsumexp(weight))
        return np.zeros_like(p), p.copy(), p
    pairs = max(1000, min(_PAIRS, 10**7 // len(weight)))
    noise = np.random.default_rng(0).standard_normal((pairs, len(weight))) * error
    drawn = weight + np.concatenate([noise, -noise])
    drawn -= drawn.max(1, keepdims=True)
    np.exp(drawn, out=drawn)
    drawn /= drawn.sum(1, keepdims=True)
    low, high = np.quantile(drawn, [0.025, 0.975], axis=0)
    return drawn.std(0), low, high
