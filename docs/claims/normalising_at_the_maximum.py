"""Normalising the posterior at its maximum ranks tree topologies better than 6 of 19 ways to the marginal likelihood.

Title: Marginal likelihood of tree topologies: posterior at its maximum
Subject: Marginal likelihoods of trees
Made in: summaries of {cite:t}`fourment2020`
Verdict: fails
Number: in one recorded run, without errors, it ranks better than 4 of the 24 other ways of our table, which has more
    than theirs, among them nested sampling with 64 live points; its trees'
    probabilities diverge from those of a long run by 0.0982
Page: evidence/eight_schools_by_every_estimator
"""

import re
from pathlib import Path

import bayeskit

# The table of our own run, in which nested sampling has 64 live points, too few for 51 branches.
text = (Path(bayeskit.__file__).parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
table = text.partition("## Nineteen dubious ways, again")[2]
divergence = {name: float(value) for name, value in re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", table, re.MULTILINE)}
maximum = divergence["maximum_posterior"]
beaten = {name for name, value in divergence.items() if value > maximum}
found = len(beaten), len(divergence) - 1, 64, maximum
assert beaten == {"lognormal_laplus", "harmonic_mean", "nested_sampling", "naive_monte_carlo"}
