"""Time torchtree's likelihood and gradient; run by `tree_likelihood_speed.py`.

Usage: `torchtree_driver.py DESCRIPTION.json BATCH`. Prints one line of JSON: the log-likelihood at the
tree's branch lengths, and the median seconds of one evaluation. It needs torchtree and
imports nothing of bayeskit.
"""

import importlib
import json
import statistics
import sys
import time

import torch
from torchtree.core.utils import expand_plates, package_contents, process_objects, remove_comments


def main() -> None:
    description, batch = json.load(open(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    for name in package_contents("torchtree"):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
    remove_comments(description)
    expand_plates(description)
    objects: dict = {}
    for entry in description:
        if entry.get("type") not in ("Optimizer", "Logger", "Dumper", "Sampler"):
            process_objects(entry, objects)
    likelihood, parameter = objects["like"], objects["tree.blens"]
    lengths = parameter.tensor.detach().clone()

    def evaluate(values: torch.Tensor) -> torch.Tensor:
        parameter.tensor = values.clone().requires_grad_(True)
        result = likelihood()
        result.sum().backward()
        return result

    value = evaluate(lengths).sum().item()
    noise = torch.randn(batch, lengths.shape[-1], generator=torch.Generator().manual_seed(0))
    inputs = lengths * torch.exp(0.01 * noise)
    evaluate(inputs)
    taken = []
    for _ in range(60 if batch < 10 else 5):
        start = time.perf_counter()
        evaluate(inputs)
        taken.append(time.perf_counter() - start)
    print(json.dumps({"log_likelihood": value, "seconds": statistics.median(taken) / batch}))


if __name__ == "__main__":
    main()
