"""Compare Laplace posteriors of networks with laplace-torch's: precision, predictions and evidence.

Networks are trained to a mode here, and both sides take them from there. Prints the largest
differences, relative to the largest entries. `laplace_torch_driver.py` runs the peer in its own environment.

    python benchmarks/wide_laplace.py --peer-python PATH
"""

from __future__ import annotations

import argparse
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from bayeskit.inference.curvature import (
    Categorical,
    GaussianOutputs,
    OutputLikelihood,
    find_parameter_mode,
    laplace_posterior,
)


@dataclass(frozen=True)
class Problem:
    """A network with weights that need no random numbers, its data, and inputs to predict at."""

    name: str
    sizes: tuple[int, ...]
    likelihood: OutputLikelihood
    prior_precision: float
    num_data: int

    def module(self) -> nn.Sequential:
        """Return the network before training."""
        layers: list[nn.Module] = []
        for before, after in zip(self.sizes[:-1], self.sizes[1:], strict=True):
            layers += [nn.Linear(before, after, dtype=torch.float64), nn.Tanh()]
        result = nn.Sequential(*layers[:-1])
        size = sum(p.numel() for p in result.parameters())
        weights = torch.sin(1.7 * torch.arange(1, size + 1, dtype=torch.float64))
        nn.utils.vector_to_parameters(weights, result.parameters())
        return result

    def inputs(self, count: int, phase: float = 0.0) -> Tensor:
        """Return inputs, ``(count, features)``."""
        steps = torch.arange(count * self.sizes[0], dtype=torch.float64)
        return 2 * torch.cos(1.3 * steps.square() + phase).reshape(count, self.sizes[0])

    def data(self) -> tuple[Tensor, Tensor]:
        """Return inputs and waves with an error, or the numbers of the largest of them."""
        x = self.inputs(self.num_data)
        signal = torch.stack([torch.sin(x.sum(1) + shift) for shift in range(self.sizes[-1])], 1)
        noise = 0.3 * torch.cos(7.1 * torch.arange(signal.numel(), dtype=torch.float64) ** 2).reshape(signal.shape)
        return x, (signal + noise).argmax(1) if isinstance(self.likelihood, Categorical) else signal + noise


PROBLEMS = (
    Problem("regression", (2, 6, 2), GaussianOutputs(0.09), 0.7, 40),
    Problem("classification", (2, 6, 3), Categorical(), 0.7, 40),
    Problem("regression, through the dual", (2, 16, 16, 1), GaussianOutputs(0.09), 2.0, 40),
    Problem("classification, through the dual", (3, 24, 24, 3), Categorical(), 1.0, 60),
)


def compare(problem: Problem, python: str) -> dict[str, object]:
    x, y = problem.data()
    at = problem.inputs(10, phase=0.5)
    mode = find_parameter_mode(problem.module(), problem.likelihood, x, y, problem.prior_precision)
    posterior = laplace_posterior(mode, problem.likelihood, x, y, problem.prior_precision)
    found = posterior.predict(at)
    described = {
        "sizes": problem.sizes,
        "parameters": posterior.mean.tolist(),
        "x": x.tolist(),
        "y": y.tolist(),
        "variance": getattr(problem.likelihood, "variance", None),
        "prior_precision": problem.prior_precision,
        "at": at.tolist(),
    }
    command = [python, str(Path(__file__).with_name("laplace_torch_driver.py"))]
    done = subprocess.run(command, input=json.dumps(described), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    peer = json.loads(done.stdout.splitlines()[-1])
    return {
        "problem": problem.name,
        "parameters": len(posterior.mean),
        "distance to mode": posterior.distance,
        "precision": _difference(posterior.precision(), peer["precision"]),
        "mean": _difference(found.mean, peer["mean"]),
        "covariance": _difference(found.covariance, peer["covariance"]),
        "log evidence": posterior.log_evidence,
        "difference of log evidence": abs(posterior.log_evidence - peer["log_evidence"]),
    }


def _difference(mine: Tensor, theirs: list) -> float:
    other = torch.tensor(theirs, dtype=torch.float64)
    return float((mine - other).abs().max() / other.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python", required=True, help="a Python with laplace-torch 0.3")
    arguments = parser.parse_args()
    table = pd.DataFrame([compare(problem, arguments.peer_python) for problem in PROBLEMS])
    print(table.to_string(index=False, float_format=lambda value: f"{value:.3g}"))


if __name__ == "__main__":
    main()
