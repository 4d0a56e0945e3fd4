#!/usr/bin/env bash
# The way of somebody who has never seen bayeskit, from a clone to a number: docs/first_contact.sh [REPOSITORY]
#
# Clones the repository into a new folder, runs `make demo`, the quick start of the README, a model and an alignment that
# are not in the package, and a page of the gallery; before each step it says how many seconds have gone by.
set -euo pipefail

repository="$(cd "${1:-$(dirname "$0")/..}" && pwd)"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
began=$SECONDS

step() {
    echo
    echo "== $1 ($((SECONDS - began)) s)"
}

step "clone"
git clone --quiet "$repository" "$folder/bayeskit"
cd "$folder/bayeskit"

step "make demo"
make demo
test -s demo/report.html
test -s demo/evidence.csv

step "the quick start of the README"
python="$PWD/.venv/bin/python"
mkdir "$folder/mine"
"$python" - README.md > "$folder/mine/quick_start.py" <<'PYTHON'
import pathlib
import re
import sys

text = pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")
print(re.search(r"## Quick start\n+```python\n(.*?)```", text, re.DOTALL)[1])
PYTHON
cd "$folder/mine"
"$python" quick_start.py

step "a model of my own"
cat > my_model.py <<'PYTHON'
import math

import pyro
import pyro.distributions as dist
import torch

import bayeskit as bk
from bayeskit.inference import evidence

trees = torch.tensor([31.0, 28.0, 40.0, 35.0, 22.0, 38.0], dtype=torch.float64)


def counts(trees):
    rate = pyro.sample("rate", dist.Gamma(trees.new_tensor(2.0), 0.05))
    with pyro.plate("plots", len(trees)):
        pyro.sample("trees", dist.Poisson(rate), obs=trees)


target = bk.Target.from_pyro(counts, trees)
ways = evidence.compare(target, ["laplace_importance_sampling", "warp_bridge_sampling"], seed=0, progress=False)
print(ways.verdict)

# Gamma and Poisson are conjugate, so that the answer is known.
shape, rate, number, total = 2.0, 0.05, len(trees), float(trees.sum())
exact = shape * math.log(rate) - math.lgamma(shape)
exact += math.lgamma(shape + total) - (shape + total) * math.log(rate + number)
exact -= sum(math.lgamma(count + 1) for count in trees.tolist())
print(f"exactly {exact:.4f}")
assert abs(ways.verdict.log_evidence - exact) < 4.5 * ways.verdict.standard_error
PYTHON
"$python" my_model.py

step "an alignment of my own"
printf '>human\nACGTACGTTA\n>chimp\nACGTACGTTA\n>gorilla\nACGTACGATA\n>orang\nACGAACGATC\n>gibbon\nACGAACCATC\n' > mine.fasta
echo '((human,chimp),gorilla,(orang,gibbon));' > mine.nwk
"$folder/bayeskit/.venv/bin/bayeskit" evidence --alignment mine.fasta --tree mine.nwk \
    --methods laplace_importance_sampling,gamma_laplus_importance_sampling,bridge_sampling --out results
test -s results/report.html

step "a page of the gallery"
"$folder/bayeskit/.venv/bin/bayeskit" run nile_change_point --small --out page
test -s page/nile_change_point_1.png

step "done"
