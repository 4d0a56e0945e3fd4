"""Sum discrete sites out of a product of log factors, exactly, plate by plate.

A factor is a log-density tensor whose dimensions carry labels: strings for
plates, integers for enumerated variables. Variables are eliminated by
log-sum-exp where they live, innermost plates first; what is left is summed over
its plate and handed to the plate around it (tensor variable elimination,
Obermeyer et al. 2019). ``opt_einsum`` finds the order of elimination.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import opt_einsum
import torch
from torch import Tensor

from bayeskit.errors import ModelError

Label = str | int


@dataclass(frozen=True)
class Factor:
    """A log-density tensor with one label a dimension; ``plates`` are those it is replicated over."""

    tensor: Tensor
    labels: tuple[Label, ...]
    plates: frozenset[str]

    @property
    def variables(self) -> frozenset[int]:
        """The enumerated variables this factor depends on."""
        return frozenset(label for label in self.labels if isinstance(label, int))


def sum_product(factors: list[Factor], home: dict[int, frozenset[str]], names: dict[int, str]) -> Tensor:
    """Return the log of the product of ``factors`` with every variable summed out.

    Parameters
    ----------
    factors : list of Factor
    home : dict
        For each variable the plates it is replicated over.
    names : dict
        For each variable the name of its site, for error messages.

    Raises
    ------
    ModelError
        If variables in different plates depend on each other, so that no order
        of plates allows an exact sum.
    """
    total: Tensor | None = None
    pending: dict[frozenset[str], list[Factor]] = {}
    for factor in factors:
        pending.setdefault(factor.plates, []).append(factor)
    while pending:
        leaf = max(pending, key=lambda plates: (len(plates), sorted(plates)))
        for component in _components(pending.pop(leaf), leaf, home):
            result = eliminate(component, leaf, home)
            target = frozenset().union(*(home[v] for v in result.variables))
            if not target < leaf and result.variables:
                sites = ", ".join(sorted({repr(names[v]) for v in result.variables}))
                raise ModelError(
                    f"the enumerated sites {sites} couple different plates and cannot be summed out plate by "
                    "plate; move one of them out of its plate or replace the plate by a Python loop"
                )
            result = _sum_plates(result, leaf - target)
            if result.labels:
                pending.setdefault(target, []).append(result)
            else:
                total = result.tensor if total is None else total + result.tensor
    return torch.zeros(()) if total is None else total


def eliminate(component: list[Factor], plates: frozenset[str], home: dict[int, frozenset[str]]) -> Factor:
    """Multiply the factors of one component and sum out the variables at home in ``plates``."""
    outer = frozenset().union(*(f.variables for f in component)) - {
        v for f in component for v in f.variables if home[v] == plates
    }
    present = {label for f in component for label in f.labels}
    output = tuple(sorted((p for p in plates if p in present), key=str)) + tuple(sorted(outer))
    if len(component) == 1:
        return Factor(_reduce(component[0], output), output, plates)
    remaining = list(component)
    for positions in _path(component, output):
        chosen = [remaining[i] for i in positions]
        for i in sorted(positions, reverse=True):
            remaining.pop(i)
        needed = set(output).union(*(f.labels for f in remaining))
        product = reduce(_multiply, chosen)
        keep = tuple(label for label in product.labels if label in needed)
        remaining.append(Factor(_reduce(product, keep), keep, plates))
    return Factor(_reduce(remaining[0], output), output, plates)


def _multiply(left: Factor, right: Factor) -> Factor:
    labels = tuple(dict.fromkeys(left.labels + right.labels))
    return Factor(_align(left, labels) + _align(right, labels), labels, left.plates)


def _path(component: list[Factor], output: tuple[Label, ...]) -> list[tuple[int, ...]]:
    symbols = {
        label: opt_einsum.get_symbol(i)
        for i, label in enumerate(dict.fromkeys(x for f in component for x in f.labels))
    }
    inputs = ",".join("".join(symbols[x] for x in f.labels) for f in component)
    equation = inputs + "->" + "".join(symbols[x] for x in output)
    shapes = [tuple(f.tensor.shape) for f in component]
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
    return list(path)


def _align(factor: Factor, labels: tuple[Label, ...]) -> Tensor:
    """Permute and pad ``factor`` so that its dimensions stand in the order of ``labels``."""
    order = [factor.labels.index(x) for x in labels if x in factor.labels]
    tensor = factor.tensor.permute(order) if order else factor.tensor
    for position, label in enumerate(labels):
        if label not in factor.labels:
            tensor = tensor.unsqueeze(position)
    return tensor


def _reduce(factor: Factor, keep: tuple[Label, ...]) -> Tensor:
    """Sum out, in log space, the labels not in ``keep`` and order the rest as ``keep``."""
    dims = [i for i, label in enumerate(factor.labels) if label not in keep]
    tensor = factor.tensor.logsumexp(dims) if dims else factor.tensor
    left = tuple(label for label in factor.labels if label in keep)
    return _align(Factor(tensor, left, factor.plates), keep)


def _sum_plates(factor: Factor, plates: frozenset[str]) -> Factor:
    dims = [i for i, label in enumerate(factor.labels) if label in plates]
    tensor = factor.tensor.sum(dims) if dims else factor.tensor
    labels = tuple(label for label in factor.labels if label not in plates)
    return Factor(tensor, labels, factor.plates - plates)


def _components(
    factors: list[Factor], plates: frozenset[str], home: dict[int, frozenset[str]]
) -> list[list[Factor]]:
    """Group factors that share a variable at home in ``plates``."""
    groups: list[tuple[set[int], list[Factor]]] = []
    for factor in factors:
        local = {v for v in factor.variables if home[v] == plates}
        touching = [g for g in groups if g[0] & local]
        groups = [g for g in groups if not g[0] & local]
        merged: list[Factor] = [f for g in touching for f in g[1]]
        groups.append((local.union(*(g[0] for g in touching)), [*merged, factor]))
    return [group for _, group in groups]
