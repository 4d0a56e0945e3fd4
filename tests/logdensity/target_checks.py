"""Independent ways to compute what a Target computes."""

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import Tensor

from bayeskit import Target

F64 = torch.float64


@contextmanager
def double() -> Iterator[None]:
    """Let Pyro's own handlers see the same constants as a float64 target, with no trace left behind."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(F64)
    try:
        with pyro.get_param_store().scope(), torch.random.fork_rng():
            yield
    finally:
        torch.set_default_dtype(before)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(shape, generator=generator, dtype=F64)


def points(target: Target, n: int = 4, seed: int = 1) -> Tensor:
    return normal(n, target.dim, seed=seed, scale=0.7)


def free_coordinates(value: Tensor, length: int) -> Tensor:
    """Return the entries of a constrained event of which the others are functions."""
    n = value.shape[-1] if value.dim() else 0
    if value.numel() == length:
        return value.reshape(-1)
    if value.dim() > 1 and value.shape[-2] == n and length * n * n == value.numel() * (n * (n + 1) // 2):
        rows, columns = torch.tril_indices(n, n)
        return value[..., rows, columns].reshape(-1)
    if value.dim() > 1 and value.shape[-2] == n and length * n * n == value.numel() * (n * (n - 1) // 2):
        rows, columns = torch.tril_indices(n, n, -1)
        return value[..., rows, columns].reshape(-1)
    assert length * n == value.numel() * (n - 1)
    return value[..., :-1].reshape(-1)


def log_jacobian(target: Target, u: Tensor) -> Tensor:
    """Return log |d constrained / d unconstrained| at one vector, by differentiating ``constrain`` itself."""

    def flat(v: Tensor) -> Tensor:
        values = target.constrain(v)
        return torch.cat([free_coordinates(values[s.name], s.stop - s.start) for s in target.sites])

    matrix = torch.autograd.functional.jacobian(flat, u)
    return torch.linalg.slogdet(matrix).logabsdet


def pyro_terms(
    model: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    values: Mapping[str, Tensor],
    observed: tuple[str, ...],
) -> tuple[Tensor, Tensor]:
    """Return log prior (over constrained values) and log likelihood as Pyro's own trace reads them."""
    with double():
        trace = poutine.trace(poutine.condition(model, data=dict(values))).get_trace(*args, **kwargs)
        prior = trace.log_prob_sum(lambda name, site: name not in observed)
        likelihood = trace.log_prob_sum(lambda name, site: name in observed)
    return torch.as_tensor(prior, dtype=F64), torch.as_tensor(likelihood, dtype=F64)


def by_hand(target: Target, case: Any, u: Tensor) -> tuple[Tensor, Tensor]:
    """Return log prior and log likelihood at one vector: Pyro's trace, summed over all discrete values."""
    values = target.constrain(u)
    observed = target.density.observed_sites
    assignments = [
        [torch.stack(flat).reshape(shape) for flat in itertools.product(support, repeat=shape.numel())]
        for support, shape in case.discrete.values()
    ]
    priors, totals = [], []
    for assignment in itertools.product(*assignments):
        given = {**values, **dict(zip(case.discrete, assignment, strict=True))}
        prior, likelihood = pyro_terms(case.model, case.args, case.kwargs, given, observed)
        priors.append(prior)
        totals.append(prior + likelihood)
    prior, total = torch.stack(priors).logsumexp(0), torch.stack(totals).logsumexp(0)
    return prior + log_jacobian(target, u), total - prior


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def assert_matches_hand(target: Target, case: Any, n: int = 3) -> None:
    u = points(target, n)
    log_prior, log_likelihood = target.evaluate(u)
    expected = [by_hand(target, case, v) for v in u]
    assert_close(log_prior, torch.stack([e[0] for e in expected]))
    assert_close(log_likelihood, torch.stack([e[1] for e in expected]))


def finite_differences(function: Any, u: Tensor, step: float = 1e-5) -> Tensor:
    """Return central differences, fourth order, of ``(n, d) -> (n)``, shape ``(n, d)``."""
    columns = []
    for i in range(u.shape[-1]):
        e = torch.zeros_like(u)
        e[:, i] = step
        near = function(u + e) - function(u - e)
        far = function(u + 2 * e) - function(u - 2 * e)
        columns.append((8 * near - far) / (12 * step))
    return torch.stack(columns, -1)
