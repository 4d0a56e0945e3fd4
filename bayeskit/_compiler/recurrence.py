"""Recurrences in time: each state is a function of the state before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bayeskit._compiler.affine_recurrence import affine_paths
from bayeskit._compiler.loops import MAX_DENSE_STATES, paths
from bayeskit._compiler.tape import QUERIES, NoSites, Tape, changes_in_place, name_of
from bayeskit._compiler.tracing import is_traced
from bayeskit._core.augmented_assignment import AugmentedAssignment
from bayeskit._core.functions_of_users import lines_named
from bayeskit._core.inputs import whole_number
from bayeskit._core.process_state import process_state
from bayeskit._core.torch_internals import (
    batching_level,
    has_forward_derivative,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit.errors import SettingsError, ShapeError

Step = Callable[[Any, Any], tuple[Any, Any]]


def scan(step: Step, state: Any, inputs: Any = None, length: int | None = None) -> tuple[Any, Any]:
    r"""Apply a step repeatedly: each new state enters the next step.

    When a model becomes a target, the step is traced once for all times: the loop is one operation of the graph and its
    gradient another, both compiled with the density. The step may use parameters from outside, and has second
    derivatives. Works in a Pyro model, and under ``torch.func``.

    A step whose new state is an affine function of the old state, ``A x + b`` with ``A`` and ``b`` computed from inputs
    and parameters, is detected; without a compiler, all times are then computed at once, in a number of operations that
    grows with the logarithm of the length. Examples are autoregressions, moving averages, exponential smoothing, and
    the variance of a GARCH process. A step that branches on values, changes tensors in place, or runs a transform of
    ``torch.func`` is unrolled: its graph grows with the length.

    Parameters
    ----------
    step : callable
        ``(state, input) -> (state, output)``. Without side effects, and without ``pyro.sample``.
    state : Tensor, or tuple, list or dict of them
        Initial state; steps keep its shapes and dtypes.
    inputs : Tensor, or tuple, list or dict of them, optional
        Inputs of all times; the first dimension is time, of length ``T``.
    length : int, optional
        ``T``; required without inputs.

    Returns
    -------
    state
        State after the last step.
    outputs
        Outputs stacked along time, the first dimension; None where the step returns None.

    Raises
    ------
    ShapeError
        If inputs differ in length, or the step changes the shape or dtype of the state.
    SettingsError
        If neither inputs nor a length are given.
    ModelError
        If the step has a Pyro site.

    Notes
    -----
    The matrices of an affine step are multiplied, and for gradients the Jacobian matrices of any step. If these
    products overflow although the states do not, for example with ``1e200 * x`` from zero, the result is NaN, unless it
    is compiled.

    References
    ----------
    Blelloch, G. E. (1990). Prefix sums and their applications. Carnegie Mellon University, CMU-CS-90-190.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> y = torch.tensor([1.0, 2.0, 4.0])
    >>> def smooth(level, y):
    ...     level = 0.5 * level + 0.5 * y
    ...     return level, level
    >>> bk.scan(smooth, torch.tensor(0.0), y)
    (tensor(2.6250), tensor([0.5000, 1.2500, 2.6250]))
    """
    state = _as_tensors("state", state)
    inputs = _as_tensors("inputs", inputs)
    times = _length(inputs, length)
    with lines_named("the step"):
        run = _Run(step, state, _at(inputs, 0) if times else _nothing(inputs))
    if times == 0:
        return state, _map(lambda leaf: _as_tensor(leaf).new_empty(0, *_as_tensor(leaf).shape), run.found[1])
    if times > 1:
        try:
            if _is_transformed() and run.agrees(_Run(step, run.found[0], _at(inputs, 1))):
                return _replayed(run, state, inputs, times)
            if run.is_affine:
                return _all_at_once(step, state, inputs, times)
        except UNTRACEABLE:
            pass  # a step that branches on its inputs
    return _one_by_one(step, state, inputs, times)


def _is_transformed() -> bool:
    """Tell whether functorch batches or differentiates, in reverse alone, or something is traced."""
    return (batching_level() is not None or is_traced()) and not has_forward_derivative()


class _Run:
    """One run of a step, its tape, and whether the new state is an affine function of the old one."""

    def __init__(self, step: Step, state: Any, inputs: Any) -> None:
        # Views, to distinguish the state from the same tensor used by the step from outside.
        state, inputs = _map(lambda leaf: leaf.view_as(leaf), state), _map(lambda leaf: leaf.view_as(leaf), inputs)
        self.state = tree_leaves(state)
        self.inputs = [leaf for leaf in tree_leaves(inputs) if leaf is not None]
        self.tape = Tape([*self.state, *self.inputs])
        with process_state(), NoSites(_SITE_IN_STEP), self.tape, _Degrees(state) as degrees, AugmentedAssignment():
            self.found = step(state, inputs)
        _check(self.found, state)
        small = sum(leaf.numel() for leaf in self.state) <= MAX_DENSE_STATES
        alike = self.state[0].is_floating_point() and len({leaf.dtype for leaf in self.state}) == 1
        self.is_affine = small and alike and not self.tape.lost and degrees.is_affine(self.found[0])

    def agrees(self, other: _Run) -> bool:
        """Tell whether both runs made the same calls, all of which are on the tape."""
        return self.tape.agrees(other.tape, tree_leaves(self.found), tree_leaves(other.found))


def _replayed(run: _Run, state: Any, inputs: Any, times: int) -> tuple[Any, Any]:
    """Compute the states by the tape of one step, and then all outputs at once."""
    new = tree_leaves(run.found[0])
    first, spec = tree_flatten(state)
    columns = [leaf for leaf in tree_leaves(inputs) if leaf is not None]
    step, others = run.tape.program([*run.state, *run.inputs], new)
    after = paths(step, run.is_affine, times, len(first), len(columns), *first, *columns, *others)
    known = {id(x): path for x, path in zip(new, after, strict=True)}
    leaves, layout = tree_flatten(run.found[1])
    wanted = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in known]
    if wanted:
        output, others = run.tape.program([*run.state, *run.inputs, *new], wanted)
        before = [torch.cat([x.unsqueeze(0), path[:-1]]) for x, path in zip(first, after, strict=True)]
        in_turn = [*before, *columns, *after]
        dims = (*(0,) * len(in_turn), *(None,) * len(others))
        made = torch.func.vmap(output, in_dims=dims)(*in_turn, *others)
        known |= {id(x): path for x, path in zip(wanted, made, strict=True)}
    outputs = [
        leaf
        if leaf is None
        else known[id(leaf)]
        if isinstance(leaf, Tensor)
        else _as_tensor(leaf).expand(times, *_as_tensor(leaf).shape)
        for leaf in leaves
    ]
    return tree_unflatten([path[-1] for path in after], spec), tree_unflatten(outputs, layout)


def _one_by_one(step: Step, state: Any, inputs: Any, times: int) -> tuple[Any, Any]:
    outputs = []
    with AugmentedAssignment():
        for t in range(times):
            state, output = step(state, _at(inputs, t))
            outputs.append(output)
    spec = tree_flatten(outputs[0])[1]
    columns = zip(*(tree_flatten(output)[0] for output in outputs), strict=True)
    stacked = [None if column[0] is None else torch.stack([_as_tensor(v) for v in column]) for column in columns]
    return state, tree_unflatten(stacked, spec)


def _all_at_once(step: Step, state: Any, inputs: Any, times: int) -> tuple[Any, Any]:
    """Compute all states from the matrices and offsets of all times."""
    leaves, spec = tree_flatten(state)
    k = len(leaves)
    columns, layout = tree_flatten(inputs)

    def flat_step(*leaves: Tensor) -> tuple[Tensor, ...]:
        new, _ = step(tree_unflatten(leaves[:k], spec), tree_unflatten(leaves[k:], layout))
        return tuple(tree_leaves(new))

    def output_of(*leaves: Tensor) -> Any:
        return step(tree_unflatten(leaves[:k], spec), tree_unflatten(leaves[k:], layout))[1]

    states = affine_paths(flat_step, times, k, len(columns), *leaves, *columns)
    outputs = step(state, _at(inputs, 0))[1]
    if any(leaf is not None for leaf in tree_leaves(outputs)):
        before = [torch.cat([x.unsqueeze(0), path[:-1]]) for x, path in zip(leaves, states, strict=True)]
        outputs = torch.func.vmap(output_of)(*before, *columns)
    return tree_unflatten([path[-1] for path in states], spec), outputs


class _Degrees(TorchFunctionMode):
    """Follow one step and tell, by known rules, whether its new state is an affine function of the old one."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self._followed: dict[int, Tensor] = {id(leaf): leaf for leaf in tree_flatten(state)[0]}  # kept alive, for ids
        self._beyond: dict[int, Tensor] = {}  # tensors that depend on the state, but not affinely
        self._lost = False  # set by reading a number of the state, assigning to it or changing it in place

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        followed, beyond = self._depends((args, kwargs), self._followed), self._depends((args, kwargs), self._beyond)
        if not followed and not beyond:
            return result
        made = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
        name = name_of(func)
        if changes_in_place(func, kwargs) or (not made and name not in QUERIES):
            self._lost = True
        plain = not self._depends(kwargs, self._followed) and "rounding_mode" not in kwargs
        is_affine = not beyond and plain and self._is_affine_rule(name, args)
        kept = self._followed if is_affine else self._beyond
        kept.update((id(leaf), leaf) for leaf in made)
        return result

    @staticmethod
    def _depends(data: Any, known: dict[int, Tensor]) -> bool:
        return any(isinstance(leaf, Tensor) and id(leaf) in known for leaf in tree_flatten(data)[0])

    def _is_affine_rule(self, name: str, args: tuple[Any, ...]) -> bool:
        follows = [self._depends(argument, self._followed) for argument in args]
        if name in _SUMS:
            return True
        if name in _PRODUCTS:
            return follows.count(True) == 1
        if name in _OF_FIRST:
            return follows.count(True) == 1 and follows[0]
        return name == "where" and len(args) == 3 and not follows[0]

    def is_affine(self, state: Any) -> bool:
        """Tell whether every part of a new state is an affine function of the old one."""
        return not self._lost and not self._depends(state, self._beyond)


# Names of torch's functions, methods and attributes, without underscores, that are linear in all arguments together, in
# one factor, and in the first argument alone.
_SUMS = frozenset("add radd sub rsub stack cat concatenate".split())
_PRODUCTS = frozenset("mul rmul multiply matmul rmatmul mv mm dot".split())
_OF_FIRST = frozenset(
    "neg positive getitem unsqueeze squeeze reshape view flatten sum mean expand clone unbind permute transpose "
    "movedim t contiguous cumsum roll flip diff select narrow truediv div divide T mT".split()
)
_SITE_IN_STEP = (
    "is in the step of a scan, which must not have sites; draw the values of all times before the scan, in a plate or "
    "as one vector, pass them as inputs, and observe the outputs after it"
)


def _as_tensors(name: str, data: Any) -> Any:
    leaves, spec = tree_flatten(data)
    if not leaves and name == "state":
        raise ShapeError("the state of a scan holds no tensor; give a tensor, or a tuple or dictionary of tensors")
    for leaf in leaves:
        if leaf is not None and not isinstance(leaf, (Tensor, int, float)):
            raise ShapeError(f"the {name} of a scan must be tensors, not {type(leaf).__name__}; use torch.as_tensor")
    like = next((leaf for leaf in leaves if isinstance(leaf, Tensor)), None)
    made = [
        leaf
        if leaf is None or isinstance(leaf, Tensor)
        else torch.as_tensor(float(leaf), dtype=None if like is None else like.dtype)
        for leaf in leaves
    ]
    return tree_unflatten(made, spec)


def _length(inputs: Any, length: int | None) -> int:
    sizes = {len(leaf) if leaf.dim() else None for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)}
    if None in sizes:
        raise ShapeError("an input of a scan has no time dimension; make time its first dimension")
    if length is not None:
        sizes.add(whole_number("length", length, least=0))
    if not sizes:
        raise SettingsError("a scan has neither inputs nor a length; pass inputs or length=")
    if len(sizes) > 1:
        raise ShapeError(f"the inputs of a scan differ in length: {sorted(s for s in sizes if s is not None)}")
    return int(sizes.pop() or 0)


def _at(inputs: Any, t: int) -> Any:
    return _map(lambda leaf: leaf[t], inputs)


def _nothing(inputs: Any) -> Any:
    """Return zeros as the inputs of one time, for inputs of length zero."""
    return _map(lambda leaf: leaf.new_zeros(leaf.shape[1:]), inputs)


def _map(function: Callable[[Any], Any], data: Any) -> Any:
    leaves, spec = tree_flatten(data)
    return tree_unflatten([leaf if leaf is None else function(leaf) for leaf in leaves], spec)


def _as_tensor(value: Any) -> Tensor:
    """Return an output as a tensor; numbers may be outputs, too."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ShapeError(f"an output of a scan is a {type(value).__name__}, not a tensor or a number") from error


def _check(found: Any, state: Any) -> None:
    if not isinstance(found, tuple) or len(found) != 2:
        raise ShapeError("the step of a scan must return (state, output); return (state, None) if there is no output")
    old, new = tree_flatten(state), tree_flatten(found[0])
    if old[1] != new[1]:
        raise ShapeError(f"the step of a scan changes the structure of its state, from {old[1]} to {new[1]}")
    for place, (before, after) in enumerate(zip(old[0], new[0], strict=True)):
        if not isinstance(after, Tensor) or before.shape != after.shape or before.dtype != after.dtype:
            now = f"{tuple(after.shape)}, {after.dtype}" if isinstance(after, Tensor) else type(after).__name__
            raise ShapeError(
                f"part {place} of the state of a scan has shape {tuple(before.shape)}, {before.dtype}, and after one "
                f"step {now}; pass an initial state with the shape and dtype that the step returns"
            )
