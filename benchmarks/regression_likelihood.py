"""The regressions of `evidence_peers.py` in NumPy, for tools that take a likelihood and a prior transform."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri


class Regression:
    """A linear or logistic regression whose coefficients have independent normal priors.

    Parameters
    ----------
    problem : dict
        `design`, `response`, `prior_sd`, and `noise_sd`, which is None for a logistic regression.
    """

    def __init__(self, problem: dict[str, Any]) -> None:
        self.design_t = np.ascontiguousarray(np.asarray(problem["design"], dtype=float).T)
        self.response = np.asarray(problem["response"], dtype=float)
        self.prior_sd, self.noise_sd = float(problem["prior_sd"]), problem["noise_sd"]
        self.dim = self.design_t.shape[0]
        self.evaluations = 0
        if self.noise_sd is not None:
            self.constant = -0.5 * len(self.response) * math.log(2 * math.pi * self.noise_sd**2)

    def log_likelihoods(self, coefficients: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the log likelihood of each row."""
        self.evaluations += len(coefficients)
        predictor = coefficients @ self.design_t
        if self.noise_sd is None:
            return predictor @ self.response - np.logaddexp(0.0, predictor).sum(1)
        return self.constant - 0.5 * (((self.response - predictor) / self.noise_sd) ** 2).sum(1)

    def log_likelihood(self, coefficients: NDArray[np.float64]) -> float:
        """Return the log likelihood of one vector."""
        self.evaluations += 1
        predictor = coefficients @ self.design_t
        if self.noise_sd is None:
            return float(predictor @ self.response - np.logaddexp(0.0, predictor).sum())
        residual = (self.response - predictor) / self.noise_sd
        return self.constant - 0.5 * float(residual @ residual)

    def prior_transform(self, uniform: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the coefficients at the quantiles of their prior."""
        return self.prior_sd * ndtri(uniform)
