"""Initial value problems of a batch of chains, in models and outside of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from pyro.poutine.runtime import am_i_wrapped
from torch import Tensor

from bayeskit._compiler import Program, call_library, has_compiler, library_of, program_text, record
from bayeskit._core.functions_of_users import line_of, words_of
from bayeskit._core.inputs import real_number, unknown_name, warn_user, whole_number
from bayeskit._core.torch_internals import (
    disable_current_modes,
    has_forward_derivative,
    is_concrete,
    is_wrapped,
    tree_flatten,
    tree_unflatten,
    unwrap_dead_wrappers,
    without_idle_gradients,
)
from bayeskit._logdensity.pyro_runs import rule_out
from bayeskit._logdensity.target import Target
from bayeskit.errors import (
    AccuracyWarning,
    BayeskitError,
    CompilationWarning,
    DataError,
    DataWarning,
    ModelError,
    SettingsError,
    ShapeError,
)
from bayeskit.ode._methods import METHODS, bend, jacobian, pull, step
from bayeskit.ode._native import solution_gradient_source, solution_source
from bayeskit.ode._operations import FailureCount, counted, ode, ode_gradient

RightHandSide = Callable[[Tensor, Tensor, Any], Tensor]

_SITE_IN_SLOPE = (
    "is in the right-hand side of a differential equation, which must not have sites; sample before, and pass the "
    "value in params"
)


def solve(
    f: RightHandSide,
    y0: Tensor,
    times: Tensor,
    params: Any = (),
    *,
    method: Literal["dopri5", "rodas5"] = "dopri5",
    rtol: float = 1e-6,
    atol: float | None = None,
    max_steps: int = 10_000,
) -> Tensor:
    r"""Solve ``dy/dt = f(t, y, params)`` from ``y0`` at ``times[0]``, each chain with steps of its own.

    Numbers of a chain do not depend on its neighbours in the batch, to the last bit. Steps end at the times, so that
    the error there is the one that is controlled. The gradient with respect to ``y0``, ``params`` and tensors that
    ``f`` uses from outside is that of the computed solution, with its steps held fixed (discrete adjoint).

    In a Pyro model the solution is one operation of the traced density and its gradient another. On a CPU both run as
    C++ that is generated from ``f`` and compiled at first use, in about a second; the next process finds it on disk.
    Without a compiler, or where ``f`` has an operation that cannot be written as C++, all chains step at once in torch,
    which takes about a hundred times as long.

    Parameters
    ----------
    f : callable
        ``(t, y, params) -> dy/dt`` of one chain: ``t`` is a tensor ``()``, ``y`` and the result are ``(dim,)``. It is
        recorded once, so it must not branch on values (use ``torch.where``), change tensors in place, draw random
        numbers or have Pyro sites.
    y0 : Tensor
        States at ``times[0]``, ``(*batch, dim)``: each vector is a chain.
    times : Tensor
        Times of the solution, ``(times,)``, in increasing order; equal times have equal states. Put the times at which
        ``f`` jumps, such as the beginning and the end of a dose or a pulse, among them: a step can pass over a short
        one unnoticed.
    params : Tensor, or tuple, list or dict of them, optional
        Parameters. Tensors of shape ``(*batch, ...)`` have a row for each chain, of which ``f`` gets one; others are
        shared. A shared tensor that happens to have this shape can be used by ``f`` from outside. Numbers have the
        dtype of ``y0``.
    method : {"dopri5", "rodas5"}
        ``"dopri5"``, the explicit Runge-Kutta method of order 5 by Dormand and Prince, or ``"rodas5"``, the L-stable
        Rosenbrock method Rodas5P of order 5 for stiff systems, which factorises a ``(dim, dim)`` matrix a step.
    rtol : float
        Relative tolerance of the error of a step: the root mean square over the state of
        ``error / (atol + rtol * |y|)`` is at most one.
    atol : float, optional
        Absolute tolerance, in the units of ``y`` and the same for all components: states near it or below it are
        inaccurate. By default that of a component is ``rtol / 100`` times its largest absolute value so far in the
        chain, so that units do not matter, but at least the rounding error of the largest component. If a component is
        only noise, a number saves steps: ``rtol / 100`` times the smallest state that matters.
    max_steps : int
        Steps of a chain, accepted or not, over all times.

    Returns
    -------
    Tensor
        States at all times, ``(*batch, times, dim)``. The row of a chain is NaN if its state overflows, ``f`` or, for
        ``"rodas5"``, a derivative of it by the state or time is not finite, its step size falls below the rounding
        error of time, or it takes ``max_steps``. So is its gradient, where the row is used. Outside of models a warning
        has their number. In a model the log density of such a chain is minus infinity, and :func:`count_failures`
        counts them; predictions of a target, such as at draws from the prior, are NaN there.

    Raises
    ------
    ShapeError
        If ``y0`` or ``times`` has another shape, or ``f`` returns another shape or dtype than that of ``y``.
    DataError
        If ``times`` are out of order or not finite, or ``params`` has something else than tensors and numbers.
    ModelError
        If ``f`` raises an error or cannot be recorded, or ``times`` need a gradient.
    SettingsError
        If the method is unknown, or a tolerance or ``max_steps`` is not positive.

    Warns
    -----
    AccuracyWarning
        If chains fail, with their number.
    DataWarning
        If a tensor in ``params`` has the shape of the batch and of the state.
    CompilationWarning
        If there is no C++ compiler, or it fails.

    Notes
    -----
    Second and forward derivatives of the solution are not available.

    References
    ----------
    Dormand, J. R. & Prince, P. J. (1980). A family of embedded Runge-Kutta formulae. Journal of Computational and
    Applied Mathematics, 6(1), 19-26.

    Steinebach, G. (2023). Construction of Rosenbrock-Wanner method Rodas5P and numerical benchmarks within the Julia
    Differential Equations package. BIT Numerical Mathematics, 63, 27.

    Hairer, E., Norsett, S. P. & Wanner, G. (1993). Solving ordinary differential equations I. Springer.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> rates = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    >>> times = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    >>> path = bk.ode.solve(lambda t, y, rate: -rate * y, torch.ones_like(rates), times, rates)
    >>> path.squeeze(-1)
    tensor([[1.0000, 0.3679, 0.1353],
            [1.0000, 0.1353, 0.0183]], dtype=torch.float64)
    """
    settings = _settings(method, rtol, atol, max_steps)
    if not isinstance(y0, Tensor) or y0.dim() == 0 or 0 in y0.shape or not y0.is_floating_point():
        what = f"{tuple(y0.shape)}, {y0.dtype}" if isinstance(y0, Tensor) else type(y0).__name__
        raise ShapeError(f"y0 must be a tensor of floating-point numbers, (*batch, dim), not {what}")
    if y0.dtype not in (torch.float32, torch.float64):
        raise ShapeError(f"y0 must have single or double precision, not {y0.dtype}; write y0.double()")
    if has_forward_derivative():
        raise ModelError("the solution of a differential equation has no forward derivative; use reverse mode")
    grid, back = _grid(times, y0)
    if len(grid) - 1 > max_steps:
        raise SettingsError(
            f"max_steps={max_steps} is below the {len(grid) - 1} steps that {len(grid)} times need at least; raise it"
        )
    batch = y0.shape[:-1]
    start = y0.reshape(-1, y0.shape[-1])
    leaves, layout = tree_flatten(params)
    leaves = [_parameter(leaf, y0) for leaf in leaves]
    rows = [len(batch) > 0 and leaf.shape[: len(batch)] == batch for leaf in leaves]
    if batch == y0.shape[-1:] and batch[0] > 1 and any(leaf.shape == batch for leaf in leaves):
        warn_user(
            f"params have a tensor of shape {tuple(batch)}, which is that of the batch and of the state of a chain: "
            "each chain gets one number. Remedy: if so, give it the shape (*batch, 1), of which f gets (1,); if all "
            "chains share the vector, expand it to (*batch, dim), or let f use it from outside",
            DataWarning,
        )
    leaves = [x.reshape(-1, *x.shape[len(batch) :]) if row else x for x, row in zip(leaves, rows, strict=True)]
    slope, others = _recorded(f, grid, start, leaves, rows, layout)
    operands = [grid, start, *leaves, *others]
    plan = _Plan(slope, method, settings, (False, True, *rows, *(False,) * len(others)), len(start))
    path = _Solution.apply(plan, *operands)
    last = path[:, -1].sum()
    if am_i_wrapped():
        rule_out(last != last)
    elif is_concrete(path.detach()):
        _tell_of_failures(path.detach(), batch, method)
    path = path if back is None else path[:, back]
    return path.reshape(*batch, *path.shape[1:])


def count_failures(target: Target, u: Tensor) -> FailureCount:
    """Count the solutions at vectors of a target, and those that failed.

    A vector without a solution has density zero, and shows in no other way; samplers count it as a divergence. At
    draws from the prior the count says how often the model's equation cannot be solved, at draws from the posterior it
    is zero.

    Parameters
    ----------
    target : Target
        A target whose model calls :func:`solve`.
    u : Tensor
        Unconstrained vectors, ``(*batch, d)``, such as ``target.sample_prior(1000, seed=0)``.

    Returns
    -------
    FailureCount
        ``num_solutions``, one for each vector and each call of :func:`solve`, and ``num_failures``.

    Raises
    ------
    ModelError
        If the model solves no differential equation.

    Examples
    --------
    >>> import pyro, pyro.distributions as dist, torch, bayeskit as bk
    >>> def model(y):
    ...     start = pyro.sample("start", dist.Normal(0.5, 1.0))
    ...     times = torch.tensor([0.0, 1.0], dtype=torch.float64)
    ...     path = bk.ode.solve(lambda t, y, _: y**2, start.unsqueeze(-1), times)  # infinite at time 1 / start
    ...     pyro.sample("y", dist.Normal(path[..., -1, 0], 1.0), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor(1.0, dtype=torch.float64))
    >>> bk.ode.count_failures(target, torch.tensor([[-1.0], [0.5], [0.9], [2.0]], dtype=torch.float64))
    FailureCount(num_solutions=4, num_failures=1)
    """
    with counted() as counts, torch.no_grad():
        target.evaluate(u, compiled=False)
    if not counts:
        raise ModelError("the model solves no differential equation by bayeskit.ode.solve, so no failure is counted")
    return FailureCount(*(sum(column) for column in zip(*counts, strict=True)))


def _parameter(x: Any, y0: Tensor) -> Tensor:
    if isinstance(x, Tensor):
        return x
    try:
        return torch.as_tensor(x, dtype=y0.dtype if isinstance(x, float) else None, device=y0.device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            "params must be tensors or numbers, or a tuple, list or dict of them, and one is of type "
            f"{type(x).__name__}; let f use it from outside"
        ) from error


def _settings(method: str, rtol: float, atol: float | None, max_steps: int) -> tuple[float, float, float]:
    if method not in METHODS:
        raise unknown_name("method", method, METHODS)
    absolute = 0.0 if atol is None else real_number("atol", atol, "(0, inf)")
    return real_number("rtol", rtol, "(0, 1)"), absolute, float(whole_number("max_steps", max_steps, 1))


def _grid(times: Tensor, y0: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return different times in the dtype of the states, and the place among them of each time, or None if the same."""
    if not isinstance(times, Tensor) or times.dim() != 1 or len(times) == 0:
        what = tuple(times.shape) if isinstance(times, Tensor) else type(times).__name__
        raise ShapeError(f"times must be a tensor (times,) with at least one time, not {what}")
    times = without_idle_gradients(times)
    if is_wrapped(times) or times.requires_grad:
        raise ModelError(
            "times of a differential equation have no gradient. Remedy: keep them fixed; a time that is sampled, such "
            "as an onset or a period, goes into params, and f shifts or scales t by it"
        )
    grid = times.detach().to(y0.device, y0.dtype)
    steps = grid.diff()
    if not bool(grid.isfinite().all()):
        place = int((~grid.isfinite()).nonzero()[0])
        raise DataError(f"times must be finite, but times[{place}] is {float(grid[place])}")
    if bool((steps < 0).any()):
        place = int((steps < 0).nonzero()[0]) + 1
        raise DataError(
            f"times must increase, but times[{place}] = {float(grid[place]):g} is before times[{place - 1}] = "
            f"{float(grid[place - 1]):g}; sort the times and their data"
        )
    if bool((steps > 0).all()):
        return grid, None
    return grid.unique_consecutive(return_inverse=True)


def _recorded(
    f: RightHandSide, grid: Tensor, start: Tensor, leaves: Sequence[Tensor], rows: Sequence[bool], layout: Any
) -> tuple[Program, list[Tensor]]:
    """Return the slope of one chain as a program, and the tensors that it uses from outside."""
    given = [
        grid[0],
        start[0],
        *(leaf[0] if row else leaf.view_as(leaf) for leaf, row in zip(leaves, rows, strict=True)),
    ]
    try:
        found, tape = record(lambda t, y, *params: f(t, y, tree_unflatten(params, layout)), given, _SITE_IN_SLOPE)
    except BayeskitError:
        raise
    except Exception as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in given[2:])
        raise ModelError(
            f"f fails{line_of(error)} ({words_of(error)}) for one chain: t of shape (), y of shape "
            f"{tuple(given[1].shape)} and params of shape {shapes or 'none'}. Remedy: write f for one chain, such as "
            "with y[..., 0]; params that begin with the batch of y0 have a row for each chain"
        ) from error
    if not isinstance(found, Tensor) or found.shape != given[1].shape or found.dtype != given[1].dtype:
        now = f"{tuple(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else type(found).__name__
        raise ShapeError(
            f"f must return a tensor of the shape and dtype of y, {tuple(given[1].shape)}, {given[1].dtype}, not {now}"
        )
    if tape.lost:
        raise ModelError(
            "f cannot be recorded: it reads the value of a tensor, changes one in place, draws random numbers, "
            "switches gradients off or calls a transform of torch.func. Remedy: use torch.where instead of branches, "
            "and torch.stack instead of assignment"
        )
    return tape.program(given, [found])


def _tell_of_failures(path: Tensor, batch: torch.Size, method: str) -> None:
    failed = path[:, -1].isnan().any(-1)
    if not bool(failed.any()):
        return
    first = failed.reshape(batch).nonzero()[0].tolist()
    implicit = METHODS[method].is_implicit
    other = "" if implicit else 'method="rodas5" if the system is stiff, '
    cause = " or a derivative of it" if implicit else ""
    warn_user(
        f"{int(failed.sum())} of {len(path)} chains have no solution, the first at index "
        f"{', '.join(map(str, first)) or 0}: the state overflows, f{cause} is not finite, or max_steps are not enough; "
        f"their rows are NaN. Remedy: {other}a larger rtol, or more max_steps",
        AccuracyWarning,
    )


@dataclass(frozen=True)
class _Plan:
    """What is solved: operands are times, states and others, of which some have the batch first."""

    slope: Program
    method: str
    settings: tuple[float, float, float]
    batched: tuple[bool, ...]
    batch: int

    def merged(
        self, size: int, dims: Sequence[int | None], tensors: Sequence[Tensor], forced: Sequence[int] = ()
    ) -> tuple[_Plan, list[Tensor]]:
        """Merge a new batch dimension into the existing one; states, cotangents and ``forced`` operands get it."""
        found, batched = [], []
        for place, (x, dim) in enumerate(zip(tensors, dims, strict=True)):
            before = place >= len(self.batched) or self.batched[place]
            now = dim is not None or place == 1 or place >= len(self.batched) or place in forced
            if now or before:
                x = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
                x = x if before else x.unsqueeze(1).expand(size, self.batch, *x.shape[1:])
                x = x.reshape(size * self.batch, *x.shape[2:])
            found.append(x)
            batched.append(now or before)
        return replace(self, batch=size * self.batch, batched=tuple(batched[: len(self.batched)])), found


class _Solution(torch.autograd.Function):
    """The solution as a function of autograd, with a rule for vmap."""

    @staticmethod
    def forward(plan: _Plan, *operands: Tensor) -> Tensor:
        operands = unwrap_dead_wrappers(operands)
        texts, source = _code(plan, operands, None)
        return ode(list(operands), len(operands[0]), plan.batch, list(plan.settings), list(texts), source)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.plan, *operands = inputs
        ctx.save_for_backward(*operands)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        tensors = unwrap_dead_wrappers((*ctx.saved_tensors, *cotangents))
        wanted = tuple(place for place, needs in enumerate(ctx.needs_input_grad[1:]) if needs)
        found = dict(zip(wanted, _Gradient.apply(ctx.plan, wanted, *tensors), strict=True))
        return (None, *(found.get(place) for place in range(len(ctx.plan.batched))))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], plan: _Plan, *operands: Tensor) -> tuple[Any, Any]:
        new, merged = plan.merged(info.batch_size, in_dims[1:], operands)
        found = _Solution.apply(new, *merged)
        return found.reshape(info.batch_size, plan.batch, *found.shape[1:]), 0


class _Gradient(torch.autograd.Function):
    """The gradient of a solution by some operands, from the operands and the cotangent."""

    @staticmethod
    def forward(plan: _Plan, wanted: tuple[int, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        tensors = unwrap_dead_wrappers(tensors)
        texts, source = _code(plan, tensors[:-1], wanted)
        sizes = len(tensors[0]), plan.batch
        return tuple(ode_gradient(list(tensors), list(wanted), *sizes, list(plan.settings), list(texts), source))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        raise ModelError(
            "the solution of a differential equation has no second derivatives. Remedy: use methods that take "
            "gradients alone, or differences of gradients"
        )

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], plan: _Plan, wanted: tuple[int, ...], *tensors: Tensor
    ) -> tuple[Any, Any]:
        new, merged = plan.merged(info.batch_size, in_dims[2:], tensors, wanted)
        parts = (x.reshape(info.batch_size, plan.batch, *x.shape[1:]) for x in _Gradient.apply(new, wanted, *merged))
        found = tuple(x if plan.batched[place] else x.sum(1) for place, x in zip(wanted, parts, strict=True))
        return found, (0,) * len(found)


# -- code ---------------------------------------------------------------------------------------


def _code(plan: _Plan, operands: Sequence[Tensor], wanted: tuple[int, ...] | None) -> tuple[tuple[str, ...], str]:
    """Return the texts of the steps in torch, and C++ of the solution or of its gradient, one of which is empty."""
    kinds = tuple((x.shape, x.dtype, x.device) for x in operands)
    with disable_current_modes(), torch.no_grad():
        source = ""
        if kinds[1][2].type == "cpu" and _can_compile(wanted is None):
            source = _source(_Key(replace(plan, batch=0)), _of_one_chain(plan, kinds), wanted)
        if source and library_of(source) is not None:
            return (), source
        return _texts(_Key(plan), kinds, wanted), ""


def _can_compile(warns: bool) -> bool:
    found = has_compiler()
    if not found and warns:
        warn_user(
            "no C++ compiler was found, so differential equations are solved in torch, about a hundred times slower; "
            "install g++ or clang++",
            CompilationWarning,
        )
    return found


_Kinds = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


def _of_one_chain(plan: _Plan, kinds: _Kinds) -> _Kinds:
    """Return the kinds of the time and other operands of one chain."""
    rows = zip(kinds, plan.batched, strict=True)
    found = [(shape[1:] if row else shape, dtype, device) for (shape, dtype, device), row in rows]
    return (torch.Size(), found[0][1], found[0][2]), *found[1:]


class _Key:
    """A plan that is equal to another if both have the same text: slices have no hash, and 0.0 and -0.0 are equal."""

    def __init__(self, plan: _Plan) -> None:
        self.plan, self._text = plan, repr(plan)

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text


def _examples(kinds: _Kinds) -> list[Tensor]:
    return [torch.ones(shape, dtype=dtype, device=device) for shape, dtype, device in kinds]


@lru_cache(maxsize=256)
def _source(key: _Key, kinds: _Kinds, wanted: tuple[int, ...] | None) -> str:
    plan, examples, method = key.plan, _examples(kinds), METHODS[key.plan.method]
    if wanted is None:
        source = solution_source(method, plan.slope, examples, plan.batched, plan.settings)
    else:
        source = solution_gradient_source(method, plan.slope, examples, plan.batched, plan.settings, wanted)
    same = not source or _is_as_in_torch(source, plan.slope, examples, wanted, method.is_implicit)
    return source if same else ""


def _is_as_in_torch(
    source: str, slope: Program, examples: list[Tensor], wanted: tuple[int, ...] | None, is_implicit: bool
) -> bool:
    """Tell whether the C++ has torch's slope and Jacobian, or their gradients, at seeded points; warn if it has not."""
    library = library_of(source)
    if library is None:
        return False
    generator = torch.Generator().manual_seed(0)
    for shift in (0.5, -0.5):
        given = [
            torch.rand(x.shape, generator=generator, dtype=x.dtype) + shift
            if x.is_floating_point()
            else torch.randint(2, x.shape, generator=generator).to(x.dtype)
            for x in examples
        ]
        cotangents: list[Tensor] = []
        try:
            if wanted is None:
                expected = [*slope(*given), *(jacobian(slope, *given) if is_implicit else ())]
            else:
                y, places = examples[1], [place - 2 for place in wanted if place > 1]
                given.append(torch.rand(y.shape, generator=generator, dtype=y.dtype))
                pulled = list(pull(slope, places, *given))
                expected = pulled[1 - (1 in wanted) :]
                if is_implicit:
                    sizes = (y.numel(), y.numel()), y.shape
                    cotangents = [torch.rand(size, generator=generator, dtype=y.dtype) for size in sizes]
                    of_state, *others = bend(slope, places, *given[:-1], *cotangents)
                    expected += [of_state] * (1 in wanted)
                    expected += [a + b for a, b in zip(pulled[1:], others, strict=True)]
        except (RuntimeError, ValueError):
            continue  # such as a matrix that cannot be factorised at this point
        found = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in expected]
        call_library(library, given, [*found, *cotangents], -1, 1)
        near = 10 * math.sqrt(torch.finfo(examples[1].dtype).eps)
        if not all(a.allclose(b, near, near, equal_nan=True) for a, b in zip(found, expected, strict=True)):
            worst = max(float((a - b).abs().nan_to_num().max()) for a, b in zip(found, expected, strict=True))
            warn_user(
                f"the generated C++ of f{'' if wanted is None else ' and its gradient'} differs from torch by "
                f"{worst:.3g}, so the equation is solved in torch, more slowly; its operations are "
                f"{', '.join(sorted({getattr(call.function, '__name__', '?') for call in slope.calls}))}",
                CompilationWarning,
            )
            return False
    return True


@lru_cache(maxsize=256)
def _texts(key: _Key, kinds: _Kinds, wanted: tuple[int, ...] | None) -> tuple[str, ...]:
    plan, (_, y, *others) = key.plan, _examples(kinds)
    slope, method = plan.slope, METHODS[plan.method]
    t, dims = torch.ones_like(y[:, 0]), tuple(0 if row else None for row in plan.batched[1:])
    one_step = torch.func.vmap(lambda t, h, *x: step(method, slope, t, h, *x), in_dims=(0, 0, *dims))
    texts = [
        program_text(torch.func.vmap(slope, in_dims=(0, *dims)), (t, y, *others)),
        program_text(one_step, (t, t, y, *others)),
    ]
    if wanted is not None:
        moving = [place - 2 for place in wanted if place > 1]

        def stepped_back(t: Tensor, h: Tensor, *x: Tensor) -> tuple[Tensor, ...]:
            return pull(lambda t, *x: step(method, slope, t, h, *x)[:1], moving, t, *x)

        texts.append(program_text(torch.func.vmap(stepped_back, in_dims=(0, 0, *dims, 0)), (t, t, y, *others, y)))
    if any(constants for _, constants in texts):
        raise ModelError("f holds a constant tensor that cannot be recorded; pass it in params")
    return tuple(text for text, _ in texts)
