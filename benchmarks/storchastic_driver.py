"""Time of one gradient by storchastic: ten categories, four evaluations; run by gradient_estimators.py.

Its unordered set without a baseline ends in an error of its own (0.3.7), so that only the other is timed.
"""

from __future__ import annotations

import json
import statistics
import time

import storch
import torch
from storch.method import ScoreFunction, UnorderedSetEstimator

torch.set_num_threads(1)
VALUES = torch.sin(1.0 + 3.0 * torch.arange(10.0, dtype=torch.float64)) * 3.0 + 1.0


def single(make) -> float:  # type: ignore[no-untyped-def]
    """Return the seconds of one gradient, as a user takes it in training."""
    storch.reset()
    method = make()
    begin = time.perf_counter()
    logits = torch.zeros(10, dtype=torch.float64, requires_grad=True)
    z = method(torch.distributions.OneHotCategorical(logits=logits))
    storch.add_cost((z * VALUES).sum(-1), "f")
    storch.backward()
    return time.perf_counter() - begin


METHODS = {
    "score function": lambda: ScoreFunction("z", n_samples=4, baseline_factory="batch_average"),
    "unordered set, baseline": lambda: UnorderedSetEstimator("z", k=4, use_baseline=True),
}
print(json.dumps({name: statistics.median(single(make) for _ in range(20)) for name, make in METHODS.items()}))
