"""Sum discrete sites out of a product of log factors, exactly, plate by plate.

A factor is a log-density tensor whose dimensions carry labels: strings for
plates, integers for enumerated variables. Variables are eliminated by
log-sum-exp in their own plates, innermost plates first; each result is summed over
its plate and becomes a factor of the enclosing plate (tensor variable elimination,
Obermeyer et al. 2019). ``opt_einsum`` finds the order of elimination.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

import opt_einsum
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.enum_messenger import EnumMessenger
from torch import Tensor

from bayeskit.errors import ModelError

Label = str | int


@dataclass(frozen=True)
class Factor:
    """A log-density tensor with one label for each dimension, replicated over ``plates``."""

    tensor: Tensor
    labels: tuple[Label, ...]
    plates: frozenset[str]

    @property
    def variables(self) -> frozenset[int]:
        """The enumerated variables this factor depends on."""
        return frozenset(label for label in self.labels if isinstance(label, int))


class EnumeratedDimensions(EnumMessenger):
    """Pyro's allocation of a dimension to each enumerated site, without the ``.data`` that vmap refuses."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if not isinstance(msg["fn"], TorchDistributionMixin):
            return
        batch = msg["value"].shape[: msg["value"].dim() - msg["fn"].event_dim]
        dim_to_id = msg["infer"].setdefault("_dim_to_id", {})
        dim_to_id.update(self._param_dims.get(msg["name"], {}))
        self._value_dims[msg["name"]] = {
            dim: variable for dim, variable in dim_to_id.items() if len(batch) >= -dim and batch[dim] > 1
        }


def pack(
    name: str,
    tensor: Tensor,
    plates: dict[int, tuple[str, int]],  # name and size at each negative dimension
    dim_to_variable: dict[int, int],  # enumerated variable at each negative dimension
    first_available_dim: int,  # this and those left of it belong to enumerated variables
) -> Factor:
    """Label the dimensions of a site's log probability; raise ``ModelError`` for a dimension without label."""
    shape = list(tensor.shape)
    shape = [1] * max(0, -min(plates, default=0) - len(shape)) + shape
    for dim, (_, size) in plates.items():
        shape[dim] = size
    tensor = tensor.expand(shape)
    labels: list[Label] = []
    drop = []
    for position in range(len(shape)):
        dim = position - len(shape)
        if dim in plates:
            labels.append(plates[dim][0])
        elif shape[position] == 1:
            drop.append(position)
        elif dim <= first_available_dim and dim in dim_to_variable:
            labels.append(dim_to_variable[dim])
        else:
            raise ModelError(
                f"site {name!r} has a batch dimension ({dim}) outside every plate; "
                "declare it with pyro.plate or .to_event"
            )
    replicated = frozenset(plate for plate, _ in plates.values())
    return Factor(tensor.squeeze(drop) if drop else tensor, tuple(labels), replicated)


def couplings(
    packed: dict[str, Factor], name: str, observed: tuple[str, ...], home: dict[int, frozenset[str]]
) -> tuple[list[Factor], frozenset[int], bool]:
    """Return the factors and variables joined to site ``name``, and whether they couple its observations."""
    joined, variables = {name: packed[name]}, packed[name].variables
    growing = True
    while growing:
        reached = {n: f for n, f in packed.items() if n not in joined and f.variables & variables}
        growing = bool(reached)
        joined.update(reached)
        variables = variables.union(*(f.variables for f in reached.values()))
    elsewhere = any(home[v] != packed[name].plates for v in variables)
    shared = any(n != name and n in observed for n in joined)
    return list(joined.values()), variables, elsewhere or shared


def sum_product(
    factors: list[Factor],
    home: dict[int, frozenset[str]],  # plates that each variable is replicated over
    names: dict[int, str],  # site of each variable, for errors
    keep: tuple[str, ...] = (),  # plates of all variables that stay as dimensions, of size one if no factor has them
) -> Tensor:
    """Return the log of the product of ``factors``, variables summed out; ``ModelError`` where they couple plates."""
    total: Tensor | None = None
    kept = frozenset(keep)
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
            result = _sum_plates(result, leaf - target - kept)
            if result.variables or not kept.issuperset(result.labels):
                pending.setdefault(result.plates, []).append(result)
            else:
                term = align(result, keep)
                total = term if total is None else total + term
    return torch.zeros((1,) * len(keep)) if total is None else total


def marginal(
    factors: list[Factor],
    home: dict[int, frozenset[str]],
    names: dict[int, str],
    variable: int,
    weights: Factor,  # zeros, labelled by the plates of the variable and the variable
) -> Tensor:
    """Return the probabilities of one variable, of the shape of ``weights``, all others summed out."""

    # The derivative of the log of a sum with respect to the log weight of a value is the value's probability.
    def total(log_weights: Tensor) -> Tensor:
        return sum_product([*factors, Factor(log_weights, weights.labels, home[variable])], home, names)

    probabilities: Tensor = torch.func.grad(total)(weights.tensor)
    return probabilities


def conditioned(factor: Factor, variable: int, index: Factor) -> Factor:
    """Return a factor at given values of a variable, whose indices are labelled by the plates of the variable."""
    if variable not in factor.labels:
        return factor
    labels = tuple(dict.fromkeys((*index.labels, *factor.labels)))
    position, tensor = labels.index(variable), align(factor, labels)
    picked = align(index, labels)
    shape = torch.broadcast_shapes(tensor.shape, picked.shape)
    picked = picked.expand(*shape[:position], 1, *shape[position + 1 :])
    tensor = tensor.expand(*shape[:position], tensor.shape[position], *shape[position + 1 :]).gather(position, picked)
    left = tuple(label for label in labels if label != variable)
    return Factor(tensor.squeeze(position), left, factor.plates)


def eliminate(component: list[Factor], plates: frozenset[str], home: dict[int, frozenset[str]]) -> Factor:
    """Multiply the factors of one component and sum out the variables of ``plates``."""
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
    return Factor(align(left, labels) + align(right, labels), labels, left.plates)


def _path(component: list[Factor], output: tuple[Label, ...]) -> list[tuple[int, ...]]:
    symbols = {
        label: opt_einsum.get_symbol(i) for i, label in enumerate(dict.fromkeys(x for f in component for x in f.labels))
    }
    inputs = ",".join("".join(symbols[x] for x in f.labels) for f in component)
    equation = inputs + "->" + "".join(symbols[x] for x in output)
    shapes = [tuple(f.tensor.shape) for f in component]
    path, _ = opt_einsum.contract_path(equation, *shapes, shapes=True, optimize="auto")
    return list(path)


def align(factor: Factor, labels: tuple[Label, ...]) -> Tensor:
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
    return align(Factor(tensor, left, factor.plates), keep)


def _sum_plates(factor: Factor, plates: frozenset[str]) -> Factor:
    dims = [i for i, label in enumerate(factor.labels) if label in plates]
    tensor = factor.tensor.sum(dims) if dims else factor.tensor
    labels = tuple(label for label in factor.labels if label not in plates)
    return Factor(tensor, labels, factor.plates - plates)


def _components(factors: list[Factor], plates: frozenset[str], home: dict[int, frozenset[str]]) -> list[list[Factor]]:
    """Group factors that share a variable of ``plates``."""
    groups: list[tuple[set[int], list[Factor]]] = []
    for factor in factors:
        local = {v for v in factor.variables if home[v] == plates}
        touching = [g for g in groups if g[0] & local]
        groups = [g for g in groups if not g[0] & local]
        merged: list[Factor] = [f for g in touching for f in g[1]]
        groups.append((local.union(*(g[0] for g in touching)), [*merged, factor]))
    return [group for _, group in groups]
