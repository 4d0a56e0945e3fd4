"""Trajectories that grow by doubling: the moves of the No-U-Turn sampler, for a batch of chains.

All functions are pure; vectors have shape ``(n, d)`` and numbers ``(n,)``, the chain first.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from bayeskit._evaluation import Evaluation
from bayeskit.inference.samplers.hmc import HMCState
from bayeskit.inference.samplers.metric import Metric


class Tree(NamedTuple):
    """The trajectory so far: its ends, and the state drawn from it."""

    left_position: Tensor
    left_momentum: Tensor
    left_gradient: Tensor
    right_position: Tensor
    right_momentum: Tensor
    right_gradient: Tensor
    momentum_sum: Tensor
    log_weight: Tensor
    position: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    log_density: Tensor
    gradient: Tensor
    energy: Tensor
    depth: Tensor  # doublings begun
    active: Tensor  # bool: the chain doubles on


class Half(NamedTuple):
    """The half that is being added leaf by leaf; the counts are of the whole step."""

    next_position: Tensor  # of the leaf to be evaluated
    half_momentum: Tensor  # half a step before it
    last_momentum: Tensor  # a step before it
    momentum_sum: Tensor
    log_weight: Tensor
    key: Tensor  # the largest of the leaves' log weights plus Gumbel noise; its leaf is the one drawn
    position: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    log_density: Tensor
    gradient: Tensor
    energy: Tensor
    step: Tensor  # step size, negative backward in time
    initial_energy: Tensor
    acceptance_sum: Tensor
    num_steps: Tensor
    diverging: Tensor  # bool
    alive: Tensor  # bool: neither turned nor diverged


def drawn(part: Tree | Half) -> tuple[Tensor, ...]:
    """Return the state drawn from a part of the trajectory, and its energy."""
    first = part._fields.index("position")
    return part[first : first + 6]


def _choose(accept: Tensor, new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    wide = accept.unsqueeze(-1)
    return tuple(torch.where(wide if a.dim() == 2 else accept, a, b) for a, b in zip(new, old, strict=True))


def _advance(
    metric: Metric, step: Tensor, position: Tensor, momentum: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next position and the momentum half a step before it."""
    momentum = torch.addcmul(momentum, step.unsqueeze(-1), metric.to_momentum(gradient), value=0.5)
    return torch.addcmul(position, step.unsqueeze(-1), metric.to_position(momentum)), momentum


def start(metric: Metric, state: HMCState, momentum: Tensor, direction: Tensor, step_size: Tensor) -> tuple[Tree, Half]:
    """Return the tree of one leaf and the empty half that will be added to it."""
    zero = torch.zeros_like(state.log_density)
    no = torch.zeros_like(zero, dtype=torch.bool)
    energy = 0.5 * momentum.square().sum(-1) - state.log_density
    end = (state.position, momentum, state.gradient)
    tree = Tree(*end, *end, momentum, zero, *state[:5], energy, zero, ~no)
    half = Half._make((*end, momentum, zero, zero, *drawn(tree), zero, energy, zero, zero, no, no))
    return tree, leave(metric, tree, half, direction, step_size)


def leave(metric: Metric, tree: Tree, half: Half, direction: Tensor, step_size: Tensor) -> Half:
    """Empty the half and go from an end of the tree towards its first leaf."""
    forward = direction < 0.5
    step = torch.where(forward, step_size, -step_size)
    wide = forward.unsqueeze(-1)
    end = (torch.where(wide, right, left) for left, right in zip(tree[:3], tree[3:6], strict=True))
    position, momentum = _advance(metric, step, *end)
    lowest = torch.full_like(half.log_weight, -torch.inf)
    return half._replace(
        next_position=position,
        half_momentum=momentum,
        momentum_sum=torch.zeros_like(momentum),
        log_weight=lowest,
        key=lowest,
        step=step,
        alive=tree.active,
    )


def add_leaf(
    metric: Metric, max_energy_error: float, half: Half, evaluation: Evaluation, exponential: Tensor
) -> tuple[Half, Tensor]:
    """Add the leaf that was just evaluated and go half way to the next; return also what to remember of it."""
    force = metric.to_momentum(evaluation.gradient)
    momentum = torch.addcmul(half.half_momentum, half.step.unsqueeze(-1), force, value=0.5)
    energy = 0.5 * momentum.square().sum(-1) - evaluation.log_density
    error = energy - half.initial_energy
    # A chain that meets NaN or an infinite density ends here; the others do not notice.
    wrong = ~((error <= max_energy_error) & (evaluation.log_density < torch.inf))
    log_weight = (-error).masked_fill(wrong, -torch.inf)
    key = log_weight - exponential.log()
    next_position, half_momentum = _advance(metric, half.step, half.next_position, momentum, evaluation.gradient)
    added = (
        next_position,
        half_momentum,
        momentum,
        half.momentum_sum + momentum,
        torch.logaddexp(half.log_weight, log_weight),
        torch.maximum(half.key, key),
        *_choose(key > half.key, (half.next_position, *evaluation, energy), drawn(half)),
        half.step,
        half.initial_energy,
        half.acceptance_sum + half.alive * log_weight.clamp(max=0.0).exp(),
        half.num_steps + half.alive,
        half.diverging | (half.alive & wrong),
        half.alive & ~wrong,
    )
    return Half._make(added), torch.stack([momentum, half.last_momentum, half.momentum_sum])


def _turns(momentum_sum: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    return ((momentum_sum * begin).sum(-1) <= 0) | ((momentum_sum * end).sum(-1) <= 0)


def subtrees_turn(first: Tensor, middle: Tensor, half: Half) -> Tensor:
    """Tell of each of ``k`` subtrees that end with the last leaf whether it turns, shape ``(k, n)``.

    ``first`` and ``middle``, each ``(k, 3, n, d)``, are what was remembered of the first leaves of
    the subtree and of its second half: momentum, momentum of the leaf before, sum of all momenta before.
    """
    begin, _, before = first.unbind(1)
    second_begin, first_end, before_second = middle.unbind(1)
    end, total = half.last_momentum, half.momentum_sum
    return (
        _turns(total - before, begin, end)
        | _turns(before_second - before + second_begin, begin, second_begin)
        | _turns(total - before_second + first_end, first_end, end)
    )


def join_half(tree: Tree, half: Half, position: Tensor, gradient: Tensor, first_momentum: Tensor, luck: Tensor) -> Tree:
    """Join a half, whose last leaf is at ``position``, to the tree."""
    forward = (half.step > 0).unsqueeze(-1)
    inner = torch.where(forward, tree.right_momentum, tree.left_momentum)
    outer = torch.where(forward, tree.left_momentum, tree.right_momentum)
    momentum_sum = tree.momentum_sum + half.momentum_sum
    turned = (
        _turns(momentum_sum, outer, half.last_momentum)
        | _turns(tree.momentum_sum + first_momentum, outer, first_momentum)
        | _turns(half.momentum_sum + inner, inner, half.last_momentum)
    )
    accept = half.alive & (luck < (half.log_weight - tree.log_weight).exp())
    end = (position, half.last_momentum, gradient)
    # Ends and weight of a chain that stops here are wrong, but not asked for any more.
    joined = (
        *(torch.where(forward, old, new) for old, new in zip(tree[:3], end, strict=True)),
        *(torch.where(forward, new, old) for old, new in zip(tree[3:6], end, strict=True)),
        momentum_sum,
        torch.logaddexp(tree.log_weight, half.log_weight),
        *_choose(accept, drawn(half), drawn(tree)),
        tree.depth + tree.active,
        half.alive & ~turned,
    )
    return Tree._make(joined)


def num_closed(leaf: int) -> int:
    """Return the number of subtrees that end with a leaf: the trailing ones of its index."""
    return (~leaf & (leaf + 1)).bit_length() - 1


class Growth(Protocol):
    """A trajectory that grows; each move returns the next position to evaluate and whether any chain goes on."""

    def start(self, state: HMCState, momentum: Tensor, direction: Tensor, step_size: Tensor) -> Tensor:
        """Begin at ``state`` with a momentum; the first direction is forward where it is below 1/2."""
        ...

    def add(self, leaf: int, evaluation: Evaluation, exponential: Tensor) -> tuple[Tensor, Tensor]:
        """Add the leaf of this index within its half; ``exponential`` is the noise that decides what is drawn."""
        ...

    def join(self, position: Tensor, gradient: Tensor, luck: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Join the half, whose last leaf is at ``position``, and begin the next; ``luck`` is uniform noise."""
        ...

    def parts(self) -> tuple[Tree, Half]:
        """Return the trajectory and what has been counted."""
        ...


class EagerGrowth:
    """Growth operation by operation: for many chains or dimensions, where calls cost little beside arithmetic.

    Parameters
    ----------
    metric : Metric
    max_energy_error : float
        A larger error of the Hamiltonian ends a chain's trajectory.
    """

    def __init__(self, metric: Metric, max_energy_error: float) -> None:
        self._metric, self._max_energy_error = metric, max_energy_error

    def start(self, state: HMCState, momentum: Tensor, direction: Tensor, step_size: Tensor) -> Tensor:
        """Begin with a tree of one leaf."""
        self._step_size = step_size
        self._tree, self._half = start(self._metric, state, momentum, direction, step_size)
        self._memory = momentum.new_empty(1, 3, *momentum.shape)
        return self._half.next_position

    def add(self, leaf: int, evaluation: Evaluation, exponential: Tensor) -> tuple[Tensor, Tensor]:
        """Add a leaf and close the subtrees that it ends."""
        half, remembered = add_leaf(self._metric, self._max_energy_error, self._half, evaluation, exponential)
        slot, closed = leaf.bit_count(), num_closed(leaf)
        if slot == len(self._memory):
            self._memory = torch.cat([self._memory, remembered.unsqueeze(0)])
        self._memory[slot] = remembered
        if closed:
            first, middle = self._memory[slot - closed : slot], self._memory[slot - closed + 1 : slot + 1]
            half = half._replace(alive=half.alive & ~subtrees_turn(first, middle, half).any(0))
        self._half = half
        return half.next_position, half.alive.any()

    def join(self, position: Tensor, gradient: Tensor, luck: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Join a half and begin the next."""
        self._tree = join_half(self._tree, self._half, position, gradient, self._memory[0, 0], luck)
        self._half = leave(self._metric, self._tree, self._half, direction, self._step_size)
        return self._half.next_position, self._tree.active.any()

    def parts(self) -> tuple[Tree, Half]:
        """Return the trajectory and what has been counted."""
        return self._tree, self._half
