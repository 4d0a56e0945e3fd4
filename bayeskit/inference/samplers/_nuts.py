"""The No-U-Turn sampler for a batch of chains that build their trees in lockstep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import torch
from torch import Tensor

from bayeskit._compiler import compile_function
from bayeskit._core.evaluation import Evaluation
from bayeskit._core.inputs import real_number
from bayeskit._logdensity.target import Target
from bayeskit.inference.samplers._hmc import HMCState, require_positive_step, require_temperature
from bayeskit.inference.samplers._metric import Metric

# Trajectory doubling of the No-U-Turn sampler for a batch of chains.
# All functions are pure; vectors have shape ``(n, d)`` and scalars ``(n,)``, with the chain first.


class TrajectoryEnd(NamedTuple):
    """An end of a trajectory."""

    position: Tensor
    momentum: Tensor
    gradient: Tensor


class DrawnState(NamedTuple):
    """The state drawn from a part of a trajectory, and its energy."""

    position: Tensor
    log_prior: Tensor
    log_likelihood: Tensor
    log_density: Tensor
    gradient: Tensor
    energy: Tensor


class Trajectory(NamedTuple):
    """The trajectory so far."""

    left: TrajectoryEnd
    right: TrajectoryEnd
    momentum_sum: Tensor
    log_weight: Tensor
    drawn: DrawnState
    depth: Tensor  # doublings begun
    active: Tensor  # bool: still doubling


class Half(NamedTuple):
    """The half that is being added leaf by leaf; counts refer to the whole step."""

    next_position: Tensor  # of the leaf to be evaluated
    half_momentum: Tensor  # half a step before it
    last_momentum: Tensor  # a step before it
    momentum_sum: Tensor
    log_weight: Tensor
    key: Tensor  # largest log weight plus Gumbel noise of the leaves; its leaf is drawn
    drawn: DrawnState
    step: Tensor  # step size, negative backward in time
    initial_energy: Tensor
    acceptance_sum: Tensor
    num_steps: Tensor
    diverging: Tensor  # bool
    alive: Tensor  # bool: neither turned nor diverged


def _choose(accept: Tensor, new: DrawnState, old: DrawnState) -> DrawnState:
    wide = accept.unsqueeze(-1)
    return DrawnState(*(torch.where(wide if a.dim() == 2 else accept, a, b) for a, b in zip(new, old, strict=True)))


def _advance(
    metric: Metric, step: Tensor, position: Tensor, momentum: Tensor, gradient: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the next position and the momentum half a step before it."""
    momentum = torch.addcmul(momentum, step.unsqueeze(-1), metric.to_momentum(gradient), value=0.5)
    return torch.addcmul(position, step.unsqueeze(-1), metric.to_position(momentum)), momentum


def start_trajectory(
    metric: Metric, state: HMCState, momentum: Tensor, direction: Tensor, step_size: Tensor
) -> tuple[Trajectory, Half]:
    """Return the tree of one leaf and the empty half that will be added to it."""
    zero = torch.zeros_like(state.log_density)
    no = torch.zeros_like(zero, dtype=torch.bool)
    energy = 0.5 * momentum.square().sum(-1) - state.log_density
    end = TrajectoryEnd(state.position, momentum, state.gradient)
    first = DrawnState(
        state.position, state.log_prior, state.log_likelihood, state.log_density, state.gradient, energy=energy
    )
    tree = Trajectory(end, end, momentum_sum=momentum, log_weight=zero, drawn=first, depth=zero, active=~no)
    half = Half(
        next_position=state.position,
        half_momentum=momentum,
        last_momentum=momentum,
        momentum_sum=momentum,
        log_weight=zero,
        key=zero,
        drawn=first,
        step=zero,
        initial_energy=energy,
        acceptance_sum=zero,
        num_steps=zero,
        diverging=no,
        alive=no,
    )
    return tree, _leave(metric, tree, half, direction, step_size)


def _leave(metric: Metric, tree: Trajectory, half: Half, direction: Tensor, step_size: Tensor) -> Half:
    """Empty the half and go from an end of the tree towards its first leaf."""
    forward = direction < 0.5
    step = torch.where(forward, step_size, -step_size)
    wide = forward.unsqueeze(-1)
    end = (torch.where(wide, right, left) for left, right in zip(tree.left, tree.right, strict=True))
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
    """Add the evaluated leaf and go half way to the next; return also its momentum and sums for later subtrees."""
    force = metric.to_momentum(evaluation.gradient)
    momentum = torch.addcmul(half.half_momentum, half.step.unsqueeze(-1), force, value=0.5)
    energy = 0.5 * momentum.square().sum(-1) - evaluation.log_density
    error = energy - half.initial_energy
    # NaN or an infinite density ends the trajectory of that chain only.
    wrong = ~((error <= max_energy_error) & (evaluation.log_density < torch.inf))
    log_weight = (-error).masked_fill(wrong, -torch.inf)
    key = log_weight - exponential.log()
    next_position, half_momentum = _advance(metric, half.step, half.next_position, momentum, evaluation.gradient)
    leaf = DrawnState(
        half.next_position,
        evaluation.log_prior,
        evaluation.log_likelihood,
        evaluation.log_density,
        evaluation.gradient,
        energy=energy,
    )
    added = half._replace(
        next_position=next_position,
        half_momentum=half_momentum,
        last_momentum=momentum,
        momentum_sum=half.momentum_sum + momentum,
        log_weight=torch.logaddexp(half.log_weight, log_weight),
        key=torch.maximum(half.key, key),
        drawn=_choose(key > half.key, leaf, half.drawn),
        acceptance_sum=half.acceptance_sum + half.alive * log_weight.clamp(max=0.0).exp(),
        num_steps=half.num_steps + half.alive,
        diverging=half.diverging | (half.alive & wrong),
        alive=half.alive & ~wrong,
    )
    return added, torch.stack([momentum, half.last_momentum, half.momentum_sum])


def _turns(momentum_sum: Tensor, begin: Tensor, end: Tensor) -> Tensor:
    return ((momentum_sum * begin).sum(-1) <= 0) | ((momentum_sum * end).sum(-1) <= 0)


def subtrees_turn(first: Tensor, middle: Tensor, half: Half) -> Tensor:
    """Tell whether each of ``k`` subtrees that end with the last leaf makes a U-turn, ``(k, n)``."""
    # first, middle: (k, 3, n, d), at the first leaf of a subtree and of its second half: momentum, momentum of the
    # previous leaf, and sum of all previous momenta.
    begin, _, before = first.unbind(1)
    second_begin, first_end, before_second = middle.unbind(1)
    end, total = half.last_momentum, half.momentum_sum
    return (
        _turns(total - before, begin, end)
        | _turns(before_second - before + second_begin, begin, second_begin)
        | _turns(total - before_second + first_end, first_end, end)
    )


def join_half(
    tree: Trajectory, half: Half, position: Tensor, gradient: Tensor, first_momentum: Tensor, luck: Tensor
) -> Trajectory:
    """Join a half, whose last leaf is at ``position``, to the tree."""
    forward = (half.step > 0).unsqueeze(-1)
    inner = torch.where(forward, tree.right.momentum, tree.left.momentum)
    outer = torch.where(forward, tree.left.momentum, tree.right.momentum)
    momentum_sum = tree.momentum_sum + half.momentum_sum
    turned = (
        _turns(momentum_sum, outer, half.last_momentum)
        | _turns(tree.momentum_sum + first_momentum, outer, first_momentum)
        | _turns(half.momentum_sum + inner, inner, half.last_momentum)
    )
    accept = half.alive & (luck < (half.log_weight - tree.log_weight).exp())
    end = TrajectoryEnd(position, half.last_momentum, gradient)
    # End points and weight of a stopped chain are wrong but no longer used.
    return Trajectory(
        left=TrajectoryEnd(*(torch.where(forward, old, new) for old, new in zip(tree.left, end, strict=True))),
        right=TrajectoryEnd(*(torch.where(forward, new, old) for old, new in zip(tree.right, end, strict=True))),
        momentum_sum=momentum_sum,
        log_weight=torch.logaddexp(tree.log_weight, half.log_weight),
        drawn=_choose(accept, half.drawn, tree.drawn),
        depth=tree.depth + tree.active,
        active=half.alive & ~turned,
    )


def _num_closed(leaf: int) -> int:
    """Return the number of subtrees that end with a leaf: the trailing ones of its index."""
    return (~leaf & (leaf + 1)).bit_length() - 1


class _Growth(Protocol):
    """A growing trajectory; each move returns the next position to evaluate and whether any chain still grows."""

    def start(self, state: HMCState, momentum: Tensor, direction: Tensor, step_size: Tensor) -> Tensor:
        """Begin at ``state`` with a momentum; the first direction is forward where it is below 1/2."""
        ...

    def add(self, leaf: int, evaluation: Evaluation, exponential: Tensor) -> tuple[Tensor, Tensor]:
        """Add the leaf of this index within its half; ``exponential`` is the noise that selects the drawn leaf."""
        ...

    def join(self, position: Tensor, gradient: Tensor, luck: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Join the half, whose last leaf is at ``position``, and begin the next; ``luck`` is uniform noise."""
        ...

    def parts(self) -> tuple[Trajectory, Half]:
        """Return the trajectory and the half with the counts."""
        ...


class _EagerGrowth:
    """Growth of trajectories operation by operation, for many chains or dimensions."""

    def __init__(self, metric: Metric, max_energy_error: float) -> None:
        self._metric, self._max_energy_error = metric, max_energy_error

    def start(self, state: HMCState, momentum: Tensor, direction: Tensor, step_size: Tensor) -> Tensor:
        """Begin with a tree of one leaf."""
        self._step_size = step_size
        self._tree, self._half = start_trajectory(self._metric, state, momentum, direction, step_size)
        self._memory = momentum.new_empty(1, 3, *momentum.shape)
        return self._half.next_position

    def add(self, leaf: int, evaluation: Evaluation, exponential: Tensor) -> tuple[Tensor, Tensor]:
        """Add a leaf and close the subtrees that it ends."""
        half, remembered = add_leaf(self._metric, self._max_energy_error, self._half, evaluation, exponential)
        slot, closed = leaf.bit_count(), _num_closed(leaf)
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
        self._half = _leave(self._metric, self._tree, self._half, direction, self._step_size)
        return self._half.next_position, self._tree.active.any()

    def parts(self) -> tuple[Trajectory, Half]:
        """Return the trajectory and the half with the counts."""
        return self._tree, self._half


# Compiled trajectory doubling, for few chains in few dimensions.
# There the bookkeeping of a leaf in separate operations costs several times as much as the density.

_CLOSED_AT_ONCE = 3  # subtrees checked by compiled code


class CompiledGrowth:
    """Growth by one compiled call per move, from :func:`compiled_moves` for these shapes of batch and metric."""

    def __init__(self, metric: Metric, moves: CompiledMoves, max_depth: int) -> None:
        self._metric, self._moves, self._max_depth = metric, moves, max_depth
        self._factor = metric.factor.contiguous()  # compiled code assumes dtype and strides

    def start(self, state: HMCState, momentum: Tensor, direction: Tensor, step_size: Tensor) -> Tensor:
        """Begin with a tree of one leaf."""
        self._step_size = step_size
        self._memory = momentum.new_empty(self._max_depth, 3, *momentum.shape)
        self._rows = self._memory.unbind(0)
        tree, half = start_trajectory(self._metric, state, momentum, direction, step_size)
        self._packed = [*_pack(tree), *_pack(half)]
        return half.next_position.contiguous()

    def add(self, leaf: int, evaluation: Evaluation, exponential: Tensor) -> tuple[Tensor, Tensor]:
        """Add a leaf and close the subtrees that it ends."""
        slot, closed = leaf.bit_count(), _num_closed(leaf)
        subtrees = self._moves.subtrees[slot][min(closed, _CLOSED_AT_ONCE)]
        plain = (x.to(self._factor.dtype).contiguous() for x in evaluation)
        position, growing, *self._packed[2:], remembered = self._moves.add(
            self._factor, *self._packed[2:], *plain, exponential, self._memory, subtrees
        )
        self._rows[slot].copy_(remembered)
        if closed > _CLOSED_AT_ONCE:
            growing = self._close_more(slot, closed)
        return position, growing

    def _close_more(self, slot: int, closed: int) -> Tensor:
        half = _unpack(Half, *self._packed[2:])
        first = self._memory[slot - closed : slot - _CLOSED_AT_ONCE]
        middle = self._memory[slot - closed + 1 : slot - _CLOSED_AT_ONCE + 1]
        alive = half.alive & ~subtrees_turn(first, middle, half).any(0)
        self._packed[2:] = _pack(half._replace(alive=alive))
        return alive.any()

    def join(self, position: Tensor, gradient: Tensor, luck: Tensor, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Join a half and begin the next."""
        plain = gradient.to(self._factor.dtype).contiguous()
        position, growing, *self._packed = self._moves.join(
            self._factor, *self._packed, position, plain, self._memory, luck, direction, self._step_size
        )
        return position, growing

    def parts(self) -> tuple[Trajectory, Half]:
        """Return the trajectory and the half with the counts."""
        return _unpack(Trajectory, *self._packed[:2]), _unpack(Half, *self._packed[2:])


_VECTORS = frozenset("position momentum gradient next_position half_momentum last_momentum momentum_sum".split())
_FLAGS = frozenset("active alive diverging".split())
_INNER: dict[str, Any] = {"left": TrajectoryEnd, "right": TrajectoryEnd, "drawn": DrawnState}
_Part = TypeVar("_Part", Trajectory, Half)


def _named(part: NamedTuple) -> Iterator[tuple[str, Tensor]]:
    for name, x in part._asdict().items():
        yield from _named(x) if name in _INNER else [(name, x)]


def _pack(part: Trajectory | Half) -> tuple[Tensor, Tensor]:
    """Put all vectors into one tensor, ``(k, n, d)``, and all numbers into another, ``(m, n)``: fewer arguments."""
    vectors = [x for name, x in _named(part) if name in _VECTORS]
    numbers = [x.to(vectors[0].dtype) for name, x in _named(part) if name not in _VECTORS]
    return torch.stack(vectors), torch.stack(numbers)


def _unpack(kind: type[_Part], vectors: Tensor, numbers: Tensor) -> _Part:
    rows = {True: iter(vectors.unbind(0)), False: iter(numbers.unbind(0))}

    def value(name: str) -> Any:
        if name in _INNER:
            return made(_INNER[name])
        x = next(rows[name in _VECTORS])
        return x != 0 if name in _FLAGS else x

    def made(kind: Any) -> Any:
        return kind(**{name: value(name) for name in kind._fields})

    return cast(_Part, made(kind))


class CompiledMoves(NamedTuple):
    """Compiled calls on packed tensors."""

    add: Callable[..., tuple[Tensor, ...]]
    join: Callable[..., tuple[Tensor, ...]]
    subtrees: tuple[tuple[Tensor, ...], ...]  # by slot and number of closed subtrees: slots of first leaves, or -1


@lru_cache(maxsize=16)
def compiled_moves(
    factor_shape: torch.Size,
    is_dense: bool,
    n: int,
    d: int,
    dtype: torch.dtype,
    device: torch.device,
    max_depth: int,
    max_energy_error: float,
) -> CompiledMoves | None:
    """Compile the moves for one shape of batch and metric; return None if that fails."""
    # Compiled code needs fixed shapes, so it always checks three subtrees and a tensor marks the existing ones. Only
    # every sixteenth leaf closes more.

    def add(factor: Tensor, vectors: Tensor, numbers: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        exponential, memory, subtrees = rest[4:]
        half = _unpack(Half, vectors, numbers)
        half, remembered = add_leaf(
            Metric(factor, is_dense), max_energy_error, half, Evaluation(*rest[:4]), exponential
        )
        first = memory[subtrees.clamp(min=0)]
        middle = torch.cat([first[1:], remembered.unsqueeze(0)])
        turned = subtrees_turn(first, middle, half) & (subtrees >= 0).unsqueeze(-1)
        half = half._replace(alive=half.alive & ~turned.any(0))
        return half.next_position, half.alive.any(), *_pack(half), remembered

    def join(factor: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        tree, half = _unpack(Trajectory, *rest[:2]), _unpack(Half, *rest[2:4])
        position, gradient, memory, luck, direction, step_size = rest[4:]
        tree = join_half(tree, half, position, gradient, memory[0, 0], luck)
        half = _leave(Metric(factor, is_dense), tree, half, direction, step_size)
        return half.next_position, tree.active.any(), *_pack(tree), *_pack(half)

    factor = torch.ones(factor_shape, dtype=dtype, device=device)
    vector, number = factor.new_zeros(n, d), factor.new_zeros(n)
    evaluation = (number, number, number, vector)
    memory = factor.new_zeros(max_depth, 3, n, d)
    subtrees = tuple(
        tuple(_slots(slot, closed, device) for closed in range(min(slot, _CLOSED_AT_ONCE) + 1))
        for slot in range(max_depth)
    )
    metric = Metric(factor, is_dense)
    state = HMCState(vector, *evaluation, iteration=number)
    tree, half = (_pack(part) for part in start_trajectory(metric, state, vector, number, number + 1))
    leaf = (factor, *half, *evaluation, number + 1, memory, subtrees[0][0])
    end = (factor, *tree, *half, vector, vector, memory, number, number, number + 1)
    try:
        return CompiledMoves(compile_function(add, leaf), compile_function(join, end), subtrees)
    except (RuntimeError, OSError, NotImplementedError, AttributeError, AssertionError):
        return None  # the density has already warned that compilation fails


def _slots(slot: int, closed: int, device: torch.device) -> Tensor:
    """Return the slots of the first leaves of the subtrees that the leaf in ``slot`` closes, after -1 for none."""
    slots = [slot - k if k <= closed else -1 for k in range(_CLOSED_AT_ONCE, 0, -1)]
    return torch.tensor(slots, device=device)


_LEAVES_PER_DRAW = 64  # leaves per draw of noise
LEAVES_PER_LOOK = {"cpu": 1}  # leapfrog steps between two tests whether any chain still grows
LEAVES_PER_LOOK_ELSEWHERE = 8  # other devices, where a test synchronises
_MAX_COMPILED_SIZE = 1024  # of n * d; beyond, arithmetic costs more than call overhead
_SECONDS_PER_LEAF = 1.5e-4  # of bookkeeping without compilation
COMPILE_SECONDS = 8.0  # to compile the bookkeeping


class NUTSInfo(NamedTuple):
    """Diagnostics of one step, also used by the adaptation."""

    acceptance_rate: Tensor  # (n,), mean Metropolis acceptance probability of the leaves
    diverging: Tensor  # (n,), bool: the energy error of a leaf was not finite or above the limit
    energy: Tensor  # (n,), Hamiltonian at the state kept
    num_steps: Tensor  # (n,), leapfrog steps
    tree_depth: Tensor  # (n,), doublings begun, so that num_steps <= 2 ** tree_depth - 1


@dataclass(frozen=True)
class NUTS:
    """The No-U-Turn sampler for a batch of chains.

    Each chain doubles its trajectory, forward or backward in time, until the trajectory makes a U-turn, and then
    draws its next state from it. All chains share each gradient call; chains with a complete trajectory wait. Step
    size, metric and inverse temperature are separate for each chain.

    Parameters
    ----------
    step_size : float or Tensor, default 0.1
        Positive; broadcasts to ``(n,)``.
    metric : Metric, optional
        Estimate of the posterior variances or covariance; identity by default.
    max_depth : int in [1, 20], default 10
        At most ``2 ** max_depth - 1`` leapfrog steps.
    beta : float or Tensor, default 1
        Inverse temperature; broadcasts to ``(n,)``.
    max_energy_error : float, default 1000
        A larger energy error counts as a divergence and ends the trajectory.
    planned_calls : int, default 1
        Expected number of gradient calls, which decides whether ``Target`` compiles.

    Notes
    -----
    States have weights ``exp(-energy)``. Within a subtree the state is drawn by the Gumbel-max trick; between the old
    trajectory and the new half it is drawn by the biased progressive sampling of Betancourt (2017). A U-turn is a
    negative inner product of the sum of momenta with the momentum at an end. The test applies to each subtree, and
    to each half extended by the first leaf of the other half, which detects steps of half a period.

    The tree is iterative. A leaf whose index has ``b`` ones in binary form is stored in slot ``b``. A leaf with
    ``k`` trailing ones closes ``k`` subtrees, which begin at the leaves in slots ``b - k`` to ``b - 1``.

    References
    ----------
    Hoffman, M. D., Gelman, A. (2014). The No-U-Turn sampler: adaptively setting path
    lengths in Hamiltonian Monte Carlo. JMLR 15, 1593-1623.
    Betancourt, M. (2017). A conceptual introduction to Hamiltonian Monte Carlo.
    arXiv:1701.02434.
    Phan, D., Pradhan, N., Jankowiak, M. (2019). Composable effects for flexible and
    accelerated probabilistic programming in NumPyro. arXiv:1912.11554.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import NUTS
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u.sum(-1), dim=3)
    >>> kernel, generator = NUTS(step_size=0.5), torch.Generator().manual_seed(0)
    >>> state = kernel.init(target, torch.zeros(8, 3, dtype=torch.float64))
    >>> state, info = kernel.step(target, state, generator=generator)
    >>> state.position.shape, bool((info.num_steps < 2**info.tree_depth).all())
    (torch.Size([8, 3]), True)
    """

    step_size: float | Tensor = 0.1
    metric: Metric | None = None
    max_depth: int = 10
    beta: float | Tensor = 1.0
    max_energy_error: float = 1000.0
    planned_calls: int = 1

    def __post_init__(self) -> None:
        # Only init checks tensors: a check here would synchronise with the device in every iteration of a warm-up.
        if not isinstance(self.step_size, Tensor):
            require_positive_step(torch.as_tensor(self.step_size))
        if not isinstance(self.beta, Tensor):
            require_temperature(torch.as_tensor(self.beta))
        real_number("max_depth", self.max_depth, "[1, 20]")
        real_number("max_energy_error", self.max_energy_error, "(0, inf)")

    def init(self, target: Target, position: Tensor) -> HMCState:
        """Evaluate the density at ``position``, shape ``(n, d)``.

        Raises
        ------
        SettingsError
            If a step size is not positive or an inverse temperature lies outside [0, 1].
        """
        require_positive_step(torch.as_tensor(self.step_size))
        require_temperature(torch.as_tensor(self.beta))
        evaluate = target.evaluator(position.shape[0], self.planned_calls)
        evaluation = evaluate(position, _per_chain(self.beta, position))
        return HMCState(position, *evaluation, torch.zeros((), dtype=torch.int64))

    def step(self, target: Target, state: HMCState, *, generator: torch.Generator) -> tuple[HMCState, NUTSInfo]:
        """Build one tree per chain and draw the next state from it."""
        q = state.position
        n = q.shape[0]
        like = {"dtype": q.dtype, "device": q.device}
        momentum = torch.randn(q.shape, generator=generator, **like)  # type: ignore[call-overload]
        uniform = torch.rand(2 * self.max_depth + 1, n, generator=generator, **like)  # type: ignore[call-overload]
        direction, luck = uniform[: self.max_depth + 1].unbind(0), uniform[self.max_depth + 1 :].unbind(0)
        beta = _per_chain(self.beta, q)
        evaluate = target.evaluator(n, self.planned_calls)
        look_every = LEAVES_PER_LOOK.get(q.device.type, LEAVES_PER_LOOK_ELSEWHERE)

        growth = self._growth(target, q)
        growing: Tensor | bool = True
        position = growth.start(state, momentum, direction[0], _per_chain(self.step_size, q))
        for doubling in range(self.max_depth):
            num_leaves = 1 << doubling
            for leaf in range(num_leaves):
                if leaf and leaf % look_every == 0 and not growing:
                    break
                if leaf % _LEAVES_PER_DRAW == 0:
                    exponential = torch.empty(min(num_leaves, _LEAVES_PER_DRAW), n, **like)  # type: ignore[call-overload]
                    noise = exponential.exponential_(generator=generator).unbind(0)
                end, evaluation = position, evaluate(position, beta)
                position, growing = growth.add(leaf, evaluation, noise[leaf % _LEAVES_PER_DRAW])
            position, growing = growth.join(end, evaluation.gradient, luck[doubling], direction[doubling + 1])
            if not growing:
                break
        tree, half = growth.parts()
        position, log_prior, log_likelihood, log_density, gradient, energy = tree.drawn
        new = HMCState(position, log_prior, log_likelihood, log_density, gradient, state.iteration + 1)
        rate = half.acceptance_sum / half.num_steps
        return new, NUTSInfo(rate, half.diverging, energy, half.num_steps.long(), tree.depth.long())

    def with_settings(self, **changes: object) -> NUTS:
        """Return a copy with some settings replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def _growth(self, target: Target, position: Tensor) -> _Growth:
        metric = self.metric or Metric(torch.ones_like(position[0]), is_dense=False)
        metric = replace(metric, factor=metric.factor.to(position))
        wanted = target.compile
        if wanted == "auto":
            wanted = self.planned_calls * _SECONDS_PER_LEAF > COMPILE_SECONDS
        if wanted and position.numel() <= _MAX_COMPILED_SIZE and metric.directions is None:
            form = (metric.factor.shape, metric.is_dense, *position.shape, position.dtype, position.device)
            moves = compiled_moves(*form, self.max_depth, self.max_energy_error)
            if moves is not None:
                return CompiledGrowth(metric, moves, self.max_depth)
        return _EagerGrowth(metric, self.max_energy_error)


def _per_chain(setting: float | Tensor, position: Tensor) -> Tensor:
    """Return one value a chain, shape ``(n,)``."""
    if not isinstance(setting, Tensor):
        return position.new_full(position.shape[:1], setting)
    return setting.to(position).expand(position.shape[0]).contiguous()
