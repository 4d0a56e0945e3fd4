"""Selectors of the learning rate: each aims at a target of its own, which its result names."""

from bayeskit.inference.generalized.calibrate.bootstrap_score_matching import bootstrap_score_matching
from bayeskit.inference.generalized.calibrate.held_out_predictive import held_out_predictive
from bayeskit.inference.generalized.calibrate.holmes_walker import holmes_walker
from bayeskit.inference.generalized.calibrate.information_matching import information_matching
from bayeskit.inference.generalized.calibrate.posterior_coverage import posterior_coverage
from bayeskit.inference.generalized.calibrate.resampling import all_resamples
from bayeskit.inference.generalized.calibrate.safe_bayes import safe_bayes
from bayeskit.inference.generalized.calibrate.selection import Curve, Selection
from bayeskit.inference.generalized.calibrate.weighted_likelihood_bootstrap_matching import (
    weighted_likelihood_bootstrap_matching,
)

__all__ = [
    "Curve",
    "Selection",
    "all_resamples",
    "bootstrap_score_matching",
    "held_out_predictive",
    "holmes_walker",
    "information_matching",
    "posterior_coverage",
    "safe_bayes",
    "weighted_likelihood_bootstrap_matching",
]
