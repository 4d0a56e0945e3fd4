"""Every way to compute a marginal likelihood, side by side.

What you will learn: how to compute the evidence of one model in every way there is, how to read the verdict, and how
to find out for yourself whether an error bar is right.

The model is the smallest phylogeny, three sequences on a star tree with exponential branch lengths, for which
quadrature knows the answer to nine digits. Some ways are approximations without an error, some are known to fail, and
one is no evidence at all: the table says so in each case.
"""

import os

from bayeskit import exact
from bayeskit.inference import evidence

SMALL = bool(os.environ.get("BAYESKIT_SMALL_EXAMPLES"))
SIZE = (
    {"num_chains": 8, "num_warmup": 150, "num_samples": 200, "num_temperatures": 24, "ladder_chains": 8}
    | {"ladder_warmup": 80, "ladder_samples": 100, "num_particles": 32, "num_replicates": 16, "num_live": 100}
    if SMALL
    else {}
)


def main() -> None:
    case = exact.get("three_taxon_tree")
    print(f"{case.description}: log evidence {case.log_evidence:.6f} by quadrature\n")

    # One posterior run, one tempered ladder, one fit of each kind serve all methods that need them.
    ways = evidence.compare(case.target(), seed=0, budget=evidence.Budget(**SIZE))
    table = ways.to_pandas()
    table["off by"] = table["log_evidence"] - case.log_evidence
    print(table[["method", "log_evidence", "standard_error", "off by", "trusted"]].to_string(index=False))

    verdict = ways.verdict
    print(f"\n{verdict}")
    for method, reason in verdict.untrusted.items():
        print(f"  {method}: {reason}")
    for score in ways.scores.values():
        print(f"  {score} (how well sites are foretold, not an evidence)")

    # Nobody has to believe an error bar: repeat the method and compare.
    replicates = 12 if SMALL else 100
    found = evidence.calibrate("bridge_sampling", case, replicates, budget=evidence.Budget(4, 150, 250))
    spread = found.to_pandas()["sd_of_z"][0]
    print(f"\nbridge sampling, {replicates} replicates: standard deviation of z {spread:.2f}, ideally 1")

    assert verdict.is_agreed and abs(verdict.log_evidence - case.log_evidence) < 4 * verdict.standard_error
    for estimate in ways:
        error = estimate.log_evidence - case.log_evidence
        assert not estimate.trusted or abs(error) < 5 * estimate.standard_error, str(estimate)


if __name__ == "__main__":
    main()
