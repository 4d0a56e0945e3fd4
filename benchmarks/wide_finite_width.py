"""How far kernels of finite ReLU networks are, on average, from those of infinite width, and how fast that falls.

Networks of one, two and three hidden layers, widths 8 to 64, four inputs: biases off the diagonal with standard errors,
the power of the width by which they fall with its confidence interval, and a test that there is none on the diagonal.

    python benchmarks/wide_finite_width.py --networks 100000
    python benchmarks/wide_finite_width.py --networks 1000000 --processes 2 --hidden 2
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor, nn

from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks._finite_width import FiniteWidthBias, finite_width_bias


def network(hidden: int, bias: bool) -> nn.Sequential:
    """Return a ReLU network with three inputs and one output."""
    layers: list[nn.Module] = [nn.Linear(3, 8, bias=bias)]
    for i in range(hidden):
        layers += [nn.ReLU(), nn.Linear(8, 8 if i < hidden - 1 else 1, bias=bias)]
    return nn.Sequential(*layers)


def inputs() -> Tensor:
    """Return four vectors of three, of one length, at angles of 25 to 130 degrees."""
    x = torch.tensor([[1.0, 0.5, -0.3], [0.2, -1.0, 0.7], [-0.5, 0.9, 1.2], [0.8, 0.8, 0.1]])
    return 3**0.5 * x / x.norm(dim=1, keepdim=True)


def show(result: FiniteWidthBias) -> None:
    """Print relative biases off the diagonal times the width, which a fall like 1/width leaves alone."""
    table = result.to_pandas()
    table = table[table["first"] != table["second"]]
    for (first, second), rows in table.groupby(["first", "second"]):
        cells = [
            f"{r.width * r.relative_bias:+7.3f} +- {r.width * r.relative_standard_error:.3f}" for r in rows.itertuples()
        ]
        print(f"    {first}, {second}: " + "   ".join(cells))


def main() -> None:
    """Run the study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=100_000, help="at each width")
    parser.add_argument("--widths", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument("--hidden", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--bias-variance", type=float, default=0.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for hidden in arguments.hidden:
        module = network(hidden, arguments.bias_variance > 0)
        kernel = infinite_width(module, weight_variance=2.0, bias_variance=arguments.bias_variance)
        for which in ("nngp", "ntk"):
            begin = time.perf_counter()
            result = finite_width_bias(
                kernel,
                inputs(),
                arguments.widths,
                arguments.networks,
                which,
                seed=arguments.seed,
                num_jobs=arguments.processes,
            )
            print(f"{hidden} hidden layers, {time.perf_counter() - begin:.1f} s: {result}")
            print(f"  relative bias off the diagonal times the width, at widths {', '.join(map(str, result.widths))}:")
            show(result)


if __name__ == "__main__":
    main()
