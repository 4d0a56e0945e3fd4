"""Average over all reversible substitution models of the primates: seconds, posterior probabilities, errors.

python benchmarks/substitution_models.py
python benchmarks/substitution_models.py --gamma --every 5
"""

from __future__ import annotations

import argparse
import time

from bayeskit.models.phylogenetics import GammaRates, all_reversible_models, primates
from bayeskit.models.phylogenetics.workflows import average_substitution_models


def main() -> None:
    """Run the average and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gamma", action="store_true", help="four categories of gamma-distributed rates of sites")
    parser.add_argument("--every", type=int, default=1, help="take every so many of the 203 models, and GTR")
    arguments = parser.parse_args()
    codes = [*all_reversible_models()[: -1 : arguments.every], "012345"]
    alignment, tree = primates()
    begin = time.process_time()
    found = average_substitution_models(
        alignment, tree, codes, site_rates=GammaRates() if arguments.gamma else None, progress=False
    )
    seconds = time.process_time() - begin
    table = found.to_pandas()
    print(f"{len(codes)} models, {table['num_evaluations'].sum()} evaluations, {seconds:.1f} processor seconds")
    columns = ["model", "log_evidence", "standard_error", "posterior_probability", "posterior_probability_error"]
    print(table[columns].head(10).to_string(index=False))
    print(
        f"largest error of a log evidence {table['standard_error'].max():.3f}, not trusted: {(~table['trusted']).sum()}"
    )
    print(found.averages_to_pandas().head(10).to_string(index=False))
    print("A-G and C-T are equal:", found.probability_of_equal("A-G", "C-T"))


if __name__ == "__main__":
    main()
