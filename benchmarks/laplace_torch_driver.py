"""Laplace posteriors of laplace-torch, run by `wide_laplace.py` with a Python that has it.

Reads one problem from standard input, as JSON, and writes what laplace-torch finds to standard output.
"""

import json
import sys

import torch
from laplace import Laplace
from laplace.curvature.curvlinops import CurvlinopsGGN
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    problem = json.load(sys.stdin)
    torch.set_default_dtype(torch.float64)
    sizes = problem["sizes"]
    layers = []
    for before, after in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(before, after), nn.Tanh()]
    module = nn.Sequential(*layers[:-1])
    nn.utils.vector_to_parameters(torch.tensor(problem["parameters"]), module.parameters())
    x, y = torch.tensor(problem["x"]), torch.tensor(problem["y"])
    classes = problem["variance"] is None
    posterior = Laplace(
        module,
        "classification" if classes else "regression",
        subset_of_weights="all",
        hessian_structure="full",
        prior_precision=problem["prior_precision"],
        sigma_noise=1.0 if classes else problem["variance"] ** 0.5,
        backend=CurvlinopsGGN,
    )
    posterior.fit(DataLoader(TensorDataset(x, y), batch_size=len(x)))
    with torch.no_grad():
        log_evidence = float(posterior.log_marginal_likelihood())
    mean, covariance = posterior._glm_predictive_distribution(torch.tensor(problem["at"]))
    found = {
        "precision": posterior.posterior_precision.tolist(),
        "mean": mean.tolist(),
        "covariance": covariance.tolist(),
        "log_evidence": log_evidence,
    }
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
