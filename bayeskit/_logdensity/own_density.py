"""A posterior known as one function of an unconstrained vector, of any library, with its gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bayeskit._compiler import Compile, Cost, is_traced
from bayeskit._core.evaluation import Evaluation, Evaluator, tempered, with_gradient
from bayeskit._core.functions_of_users import is_for_want_of_memory, line_of, words_of
from bayeskit._core.inputs import warn_user, whole_number
from bayeskit._core.randomness import new_generator, validation_kept
from bayeskit._core.untraceable import UNTRACEABLE, first_line
from bayeskit._logdensity.labels import unconstrained_names
from bayeskit._logdensity.pyro_density import Site
from bayeskit._logdensity.pyro_runs import tensors_in
from bayeskit.errors import (
    AccuracyWarning,
    BayeskitError,
    DataError,
    InitializationError,
    ModelError,
    SettingsError,
    ShapeError,
)

Names = Mapping[str, int | Sequence[int]] | Sequence[str]
#: Maps positions to log densities and their gradients.
ValueAndGradient = Callable[[Tensor], tuple[Tensor, Tensor]]

ONE_DENSITY = (
    "it was made from one log density of both prior and likelihood: use Target.from_functions or Target.from_pyro"
)
"""Why a part of the posterior is not known, and the remedy."""

#: Errors by which a function may say that it is not defined at a point, as a Stan program does.
_FAILURES = (ArithmeticError, ValueError, RuntimeError)
#: Largest number of rows that a function of batches is given.
_MOST_ROWS = 1024
#: Number of candidates for the point at which the function is checked, and the widths of the box that they come from.
_CANDIDATES, _NEAR, _WIDE = 20, 0.5, 2.0
_DTYPES = (torch.float64, torch.float32)


# The density of a function: without a prior of its own, with values that the user names.


class OwnDensity:
    """A function of torch as a density that is not split into prior and likelihood: all of it is the likelihood."""

    def __init__(
        self,
        function: Callable[..., Any],
        dim: int,
        *,
        names: Names | None,
        constrain: Callable[..., Any] | None,
        batched: bool,
        inputs: Literal["numpy", "torch"],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.function, self.dim, self.dtype, self.device = function, dim, dtype, device
        self.batched, self._inputs, self._constrain = batched, inputs, constrain
        self.sites = _sites(names, dim)
        self.data = tensors_in(function) if inputs == "torch" else []
        #: A point of positive density, ``(d,)``.
        self.start = torch.zeros(dim, dtype=dtype, device=device)
        #: Shape of each named value.
        self.shapes: dict[str, torch.Size] = {site.name: site.shape for site in self.sites}

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return zero and the log density, ``(*batch, d) -> (*batch)``."""
        with validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)
            value = self.function(u)
        return torch.zeros_like(value), value

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the named values at ``u``: what ``constrain`` returns, else the coordinates by name."""
        if self._constrain is None:
            named = ((s, u[..., s.start : s.stop]) for s in self.sites)
            return {site.name: part.reshape((*u.shape[:-1], *site.shape)) for site, part in named}
        found = self._constrain(self.given(u))
        if not isinstance(found, Mapping) or not found:
            raise ModelError(
                f"constrain returns {_kind(found)}, not a mapping of names to values; return a dictionary such as "
                '{"beta": u[:3], "sigma": np.exp(u[3])}'
            )
        return {str(name): self._returned(value, f"constrain's {name!r}") for name, value in found.items()}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the vector of named coordinates."""
        if self._constrain is not None:
            raise ModelError("the inverse of constrain is not known; give unconstrained vectors of shape (dim,)")
        parts = [torch.as_tensor(values[site.name], dtype=self.dtype, device=self.device) for site in self.sites]
        return torch.cat([part.reshape(-1) for part in parts])

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return zeros where the values are the coordinates."""
        if self._constrain is not None:
            raise ModelError("the Jacobian of constrain is not known; leave constrain out, or use Target.from_pyro")
        return u.new_zeros(u.shape[:-1])

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Raise ``ModelError``: a function has no pointwise terms."""
        raise ModelError(
            "a target made from one log density has no pointwise log likelihood; build it with Target.from_pyro"
        )

    def given(self, u: Tensor) -> Any:
        """Return vectors in the form that the functions take, which they may change."""
        return u.detach().clone() if self._inputs == "torch" else u.detach().cpu().numpy().copy()

    def _returned(self, value: Any, what: str) -> Tensor:
        """Return what a function has returned as a tensor of its own."""
        if isinstance(value, Tensor):
            return value.detach().to(self.device, self.dtype, copy=True)
        try:
            array = np.array(value, dtype=np.float64 if self.dtype == torch.float64 else np.float32)
        except (TypeError, ValueError) as error:
            raise ModelError(f"{what} is {_kind(value)}, which cannot be read as numbers ({error})") from error
        return torch.from_numpy(array).to(self.device)


class OwnGradient(OwnDensity):
    """A function of any library that returns value and gradient; the source of its own evaluators."""

    _failed = False

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return zero and the log density, ``(*batch, d) -> (*batch)``, differentiable once."""
        if is_traced():
            raise RuntimeError("a log density of another library cannot be traced")
        value, _ = _Known.apply(u, self)
        return torch.zeros_like(value), value

    def value_and_gradient(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return log densities and gradients, ``(n, d) -> (n,), (n, d)``; zero density where the function fails."""
        parts = [self._of_some(some) for some in rows.detach().split(_MOST_ROWS if self.batched else 1)]
        return torch.cat([value for value, _ in parts]), torch.cat([gradient for _, gradient in parts])

    def _of_some(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return self._called(rows)
        except BayeskitError:
            raise
        except _FAILURES as error:
            if is_for_want_of_memory(error):
                raise
            if len(rows) > 1:
                value, gradient = zip(*map(self._of_some, rows.split(1)), strict=True)
                return torch.cat(value), torch.cat(gradient)
            self._warn(error)
            return rows.new_full((1,), -math.inf), torch.zeros_like(rows)

    def _warn(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            warn_user(
                f"the log density fails at some points{line_of(error)} ({words_of(error)}), which count as "
                "points of density zero. Remedy: return minus infinity there, or correct the function",
                AccuracyWarning,
            )

    def _called(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the function returns for all rows, or for the only row of one that takes vectors."""
        u = rows if self.batched else rows[0]
        # Searches ask for points far away, where numbers of NumPy overflow; what is not finite has density zero.
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            value, gradient = _pair(self.function(self.given(u)))
        value, gradient = self._returned(value, "the value"), self._returned(gradient, "the gradient")
        if value.shape != u.shape[:-1] or gradient.shape != u.shape:
            raise ShapeError(_shapes(u, value, gradient, self.batched))
        return value.reshape(len(rows)), gradient.reshape(rows.shape)

    def evaluator(self, num_vectors: int, num_calls: int, compile: Compile) -> Evaluator:
        """Return the evaluator, which serves any number of rows."""
        return self._evaluation

    def _evaluation(self, u: Tensor, beta: Tensor) -> Evaluation:
        value, gradient = self.value_and_gradient(u)
        prior = torch.zeros_like(value)
        return Evaluation(prior, value, tempered(prior, value, beta), gradient * beta.unsqueeze(-1))

    def compiled(self, num_vectors: int) -> None:
        """Return None: the function is what it is."""
        return None

    @property
    def cost(self) -> Cost:
        """Nothing is known of the cost; rows are split here, not by the target."""
        return Cost(0, 1)


class _Known(torch.autograd.Function):
    """A log density whose gradient comes with its value, for automatic differentiation."""

    generate_vmap_rule = False

    @staticmethod
    def forward(u: Tensor, density: OwnGradient) -> tuple[Tensor, Tensor]:
        value, gradient = density.value_and_gradient(u.reshape(-1, u.shape[-1]))
        return value.reshape(u.shape[:-1]), gradient.reshape(u.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    def backward(ctx: Any, along: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return along.unsqueeze(-1) * gradient, None

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], u: Tensor, density: OwnGradient
    ) -> tuple[Any, tuple[int, int]]:
        return _Known.apply(u.movedim(in_dims[0] or 0, 0), density), (0, 0)


def _sites(names: Names | None, dim: int) -> tuple[Site, ...]:
    """Return the named blocks of the vector; ShapeError if they do not add up to it."""
    if names is None:
        names = {"u": (dim,)}
    if isinstance(names, str) or not isinstance(names, Mapping | Sequence) or not names:
        raise SettingsError(f"names must be a mapping of names to shapes, or a sequence of names, not {names!r}")
    if not isinstance(names, Mapping):
        if len(set(names)) < len(names):
            raise SettingsError(f"names holds a name twice: {list(names)}; give every coordinate a name of its own")
        names = dict.fromkeys(names, ())
    sites, start = [], 0
    for name, given in names.items():
        sizes = given if isinstance(given, Iterable) else (given,)
        shape = torch.Size(whole_number(f"the shape of {name!r}", size, 1) for size in sizes)
        sites.append(Site(str(name), shape, shape, start, start + shape.numel()))
        start += shape.numel()
    if start != dim:
        parts = ", ".join(f"{site.name} {tuple(site.shape)}" for site in sites[:6]) + (
            ", ..." if len(sites) > 6 else ""
        )
        raise ShapeError(f"names have {start} coordinates ({parts}), but dim is {dim}; make the two agree")
    return tuple(sites)


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")


def _pair(found: Any) -> tuple[Any, Any]:
    if isinstance(found, tuple | list) and len(found) == 2:
        return found[0], found[1]
    raise ModelError(
        f"the function returns {_kind(found)}, not a pair of value and gradient. Remedy: return both, such as by "
        'jax.value_and_grad, or write the log density with torch and pass inputs="torch", which differentiates it'
    )


def _shapes(u: Tensor, value: Tensor, gradient: Tensor, batched: bool) -> str:
    before, after = tuple(u.shape), (tuple(value.shape), tuple(gradient.shape))
    how = (
        "with batched=True every row is a vector; pass batched=False for a function of one vector, or batch it, such "
        "as by jax.vmap"
        if batched
        else "the value is one number and the gradient has one number a coordinate; pass batched=True for a function "
        "of the rows of a matrix"
    )
    return (
        f"the function maps shape {before} to a value of shape {after[0]} and a gradient of shape {after[1]}, instead "
        f"of {before[:-1]} and {before}: {how}"
    )


# Checks of a function at one point, before anything is computed with it.


def checked_density(
    function: Callable[..., Any],
    dim: int,
    *,
    names: Names | None,
    constrain: Callable[..., Any] | None,
    batched: bool,
    inputs: Literal["numpy", "torch"],
    start: Any,
    dtype: torch.dtype | None,
    device: torch.device,
    check_gradient: bool,
) -> OwnDensity:
    """Return the density of a function, after calls at a few points that show whether it can be used."""
    dim = whole_number("dim", dim, 1)
    for name, one in (("value_and_grad", function), ("constrain", constrain)):
        if not callable(one) and (one is not None or name == "value_and_grad"):
            raise SettingsError(f"{name} must be callable, not {_kind(one)}")
    if inputs not in ("numpy", "torch"):
        raise SettingsError(f'inputs must be "numpy" or "torch", not {inputs!r}')
    if dtype not in (None, *_DTYPES):
        raise SettingsError(f"dtype must be torch.float64, torch.float32 or None, not {dtype!r}")

    settings: dict[str, Any] = {"names": names, "constrain": constrain, "batched": batched}
    settings |= {"inputs": inputs, "device": device}
    first = OwnDensity(function, dim, dtype=dtype or torch.float64, **settings)
    candidates = _candidates(start, dim).to(device)
    found = _first_answer(first, candidates)
    returned = found if isinstance(found, Tensor) and inputs == "torch" else _pair(found)[1]
    own_dtype = _dtype_of(returned)
    if dtype == torch.float64 != own_dtype:
        raise SettingsError(
            "the function computes in single precision, but dtype is torch.float64. Remedy: let it compute in double "
            'precision, such as by jax.config.update("jax_enable_x64", True), or leave dtype out'
        )
    if returned is found:
        density = OwnDensity(function, dim, dtype=dtype or own_dtype, **settings)
        evaluate = _differentiated(density, candidates.to(density.dtype))
    else:
        density = own = OwnGradient(function, dim, dtype=dtype or own_dtype, **settings)
        evaluate = own.value_and_gradient
    density.start = _place(evaluate, candidates.to(density.dtype), density, start is not None)
    _require_repeatable(evaluate, density.start)
    if check_gradient:
        _require_gradient(evaluate, density.start, unconstrained_names(density.sites))
    if constrain is not None:
        at = density.start.unsqueeze(0) if batched else density.start
        shapes = {name: value.shape for name, value in density.values(at).items()}
        wrong = [name for name, shape in shapes.items() if batched and (not shape or shape[0] != 1)]
        if wrong:
            raise ShapeError(
                f"constrain maps (1, {dim}) to shape {tuple(shapes[wrong[0]])} of {wrong[0]!r}; with batched=True the "
                "first dimension of every value is that of the rows"
            )
        density.shapes = {name: shape[1:] if batched else shape for name, shape in shapes.items()}
    return density


def _candidates(start: Any, dim: int) -> Tensor:
    """Return points at which the function is tried, of which there are not ``dim``, so that shapes tell the two."""
    if start is not None:
        point = torch.as_tensor(start, dtype=torch.float64)
        if point.shape != (dim,):
            raise ShapeError(f"start must have shape {(dim,)}, not {tuple(point.shape)}")
        if not bool(point.isfinite().all()):
            raise InitializationError("start holds NaN or infinite numbers; give finite numbers")
        return point.expand(2 + (dim == 2), dim)
    count = _CANDIDATES + (dim == _CANDIDATES)
    noise = 2 * torch.rand(count, dim, dtype=torch.float64, generator=new_generator(0, stream="own density")) - 1
    width = torch.full((count, 1), _WIDE, dtype=torch.float64)
    width[: count // 2] = _NEAR
    return width * noise


def _first_answer(density: OwnDensity, candidates: Tensor) -> Any:
    """Return what the function returns for all candidates, or for the first that it is defined at."""
    rows = candidates.to(density.dtype)
    attempts: list[Tensor] = [rows, *rows.split(1)] if density.batched else list(rows)
    for left, attempt in zip(reversed(range(len(attempts))), attempts, strict=True):
        try:
            return density.function(density.given(attempt))
        except BayeskitError:
            raise
        except Exception as error:  # of whatever kind: the function is the user's
            if left and isinstance(error, _FAILURES):
                continue
            raise ModelError(
                f"the function fails{line_of(error)} ({words_of(error)}) for "
                f"{'a matrix of shape' if density.batched else 'a vector of shape'} {tuple(attempt.shape)}. Remedy: "
                'pass inputs="torch" if it takes tensors, batched according to its argument, and start= if it is '
                "defined in a small region only"
            ) from error
    raise ModelError("the function was tried at no point")


def _dtype_of(value: Any) -> torch.dtype:
    """Return the precision of what a function returned; whole numbers count as double precision."""
    name = str(value.dtype) if isinstance(value, Tensor) else np.asarray(value).dtype.name
    name = name.removeprefix("torch.")
    if name.startswith(("int", "uint", "bool")):
        return torch.float64
    if name not in ("float64", "float32"):
        raise ModelError(f"the function returns numbers of type {name}; let it return float64 or float32")
    return torch.float64 if name == "float64" else torch.float32


def _differentiated(density: OwnDensity, rows: Tensor) -> ValueAndGradient:
    """Return value and gradient by torch; ModelError or ShapeError if they cannot be had for a batch."""
    joint = density.joint if density.batched else torch.func.vmap(density.joint)
    evaluate = with_gradient(joint)

    def value_and_gradient(u: Tensor) -> tuple[Tensor, Tensor]:
        found = evaluate(u, torch.ones_like(u[:, 0]))
        return found.log_density.detach(), found.gradient.detach()

    try:
        shape = tuple(joint(rows)[1].shape)
        if shape != (len(rows),):
            before, after = (tuple(rows.shape), shape) if density.batched else (tuple(rows.shape[1:]), shape[1:])
            raise ShapeError(
                f"the function maps shape {before} to {after} instead of {before[:-1]}; sum over the last dimension "
                "only, and pass batched=True for a function of the rows of a matrix"
            )
        value_and_gradient(rows)
    except BayeskitError:
        raise
    except UNTRACEABLE as error:
        raise ModelError(
            f"torch cannot batch or differentiate the function ({first_line(error)}). Remedy: replace control flow on "
            "values by torch.where, or return a pair of value and gradient"
        ) from error
    return value_and_gradient


def _place(evaluate: ValueAndGradient, candidates: Tensor, density: OwnDensity, given: bool) -> Tensor:
    """Return the first candidate of finite density and gradient, ``(d,)``."""
    seen, endless = [], None
    for rows in candidates.split(len(candidates) if density.batched else 1):
        value, gradient = evaluate(rows)
        seen.append(value)
        smooth = gradient.isfinite().all(-1)
        fine = value.isfinite() & smooth
        if bool(fine.any()):
            return rows[int(fine.to(torch.uint8).argmax())].clone()
        if bool((value.isfinite() & ~smooth).any()):
            row = gradient[int((value.isfinite() & ~smooth).to(torch.uint8).argmax())]
            endless = unconstrained_names(density.sites)[int((~row.isfinite()).to(torch.uint8).argmax())]
    where = "at start" if given else f"at all of {len(candidates)} points within {_WIDE:g} of zero"
    remedy = "give another start" if given else "pass start= with a point of positive density"
    values = torch.cat(seen)
    if endless is not None:
        raise DataError(
            f"the gradient with respect to {endless} is not finite {where}, although the log density is; {remedy}, or "
            "correct the gradient"
        )
    if bool(values.isnan().any()):
        raise DataError(f"the log density is NaN {where}; look for NaN in the data, or {remedy}")
    raise InitializationError(f"the log density is {float(values.max()):g} {where}; {remedy}")


def _require_repeatable(evaluate: ValueAndGradient, u: Tensor) -> None:
    first, second = (float(evaluate(u.unsqueeze(0))[0]) for _ in range(2))
    if abs(first - second) > (1e-3 if u.dtype == torch.float32 else 1e-6) * (1 + abs(first)):
        raise ModelError(
            f"the log density of one point is {first:g} and then {second:g}; it must not be random, nor depend on "
            "earlier calls"
        )


# Gradients against differences, along random diagonals: an error in any coordinate shows in each of them.

_NUM_DIRECTIONS, _NUM_NEIGHBOURS, _ASIDE = 4, 9, 0.03
#: Differences count as known up to so many of their errors; gradients, up to this share of the sum of their terms.
_ERRORS, _SHARE = 3.0, {torch.float64: 1e-6, torch.float32: 1e-4}


def _require_gradient(evaluate: ValueAndGradient, u: Tensor, names: Sequence[str]) -> None:
    """Raise ``ModelError``, naming a coordinate, if the gradient at ``u (d,)`` is not the derivative of the value."""
    scale = u.abs().clamp(min=1.0)
    signs = torch.randint(2, (_NUM_DIRECTIONS, len(u)), generator=torch.Generator().manual_seed(0)).to(u) * 2 - 1
    gap, slope = _disagreement(evaluate, u, scale * signs)
    if not bool(gap.any()):
        return
    # A kink next to the point misleads differences there, but not also at a neighbour.
    other = u + _ASIDE * scale * signs[0]
    if bool(evaluate(other.unsqueeze(0))[0].isfinite()) and not bool(
        _disagreement(evaluate, other, scale * signs)[0].any()
    ):
        return
    along, low, high = scale * signs[int(gap.argmax())], 0, len(u)
    slope = slope[int(gap.argmax())]
    # A half of the direction that is wrong, and a half of that, lead to a coordinate.
    while high - low > 1:
        middle = (low + high) // 2
        halves = torch.zeros(2, len(u), dtype=u.dtype, device=u.device)
        halves[0, low:middle], halves[1, middle:high] = along[low:middle], along[middle:high]
        gap, slopes = _disagreement(evaluate, u, halves)
        if not bool(gap.any()):
            break
        half = int(gap.argmax())
        low, high, along, slope = *((low, middle) if half == 0 else (middle, high)), halves[half], slopes[half]
    where = f" with respect to {names[low]}" if high - low == 1 else ""
    unit = along[low] if high - low == 1 else 1.0
    raise ModelError(
        f"the gradient{where} is not the derivative of the log density: it is "
        f"{float(evaluate(u.unsqueeze(0))[1][0] @ along / unit):.6g}, where differences of the log density give "
        f"{float(slope / unit):.6g}. Remedy: correct its sign, scale or terms; an approximation that is meant passes "
        "with check_gradient=False"
    )


def _disagreement(evaluate: ValueAndGradient, u: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """Return gaps between gradient and differences along ``(k, d)``, zero where in tolerance, and the differences."""
    slope, error = _slopes(evaluate, u, along)
    terms = (evaluate(u.unsqueeze(0))[1] * along).double()
    gap = (terms.sum(-1) - slope).abs()
    return torch.where(gap > _ERRORS * error + _SHARE[u.dtype] * terms.abs().sum(-1), gap, 0.0), slope


def _slopes(evaluate: ValueAndGradient, u: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """Return derivatives along ``(k, d)`` by central differences, and bounds of their errors, ``(k,)``."""
    eps = torch.finfo(u.dtype).eps
    steps = 0.25 ** torch.arange(1, 2 - int(math.log2(eps)) // 4, device=u.device).to(u.dtype)  # to the root of eps
    spacing = 4 * math.sqrt(eps) * torch.arange(_NUM_NEIGHBOURS, device=u.device)
    offsets = torch.cat([steps, -steps, spacing.to(u.dtype)])
    points = u + offsets[:, None] * along.unsqueeze(1)  # (k, 2 steps + neighbours, d)
    value = evaluate(points.flatten(0, 1))[0].double().reshape(points.shape[:2])
    above, below, near = value.split([len(steps), len(steps), _NUM_NEIGHBOURS], 1)
    # Fourth differences of neighbours show the rounding error of the log density, which its size may understate.
    noise = (near.diff(n=4, dim=1).square().mean() / 70).sqrt().nan_to_num(nan=0.0)
    noise = torch.maximum(noise, eps * near.abs().amax())
    slope = (above - below) / (2 * steps.double())
    # The truncation error of a difference is far below the change from a step four times as long.
    error = (slope[:, 1:] - slope[:, :-1]).abs() + 4 * noise / steps[1:].double()
    error = error.nan_to_num(nan=math.inf)
    best = error.argmin(1, keepdim=True)
    return slope[:, 1:].gather(1, best)[:, 0], error.gather(1, best)[:, 0]
