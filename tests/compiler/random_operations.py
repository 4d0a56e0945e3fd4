"""Random operations of torch, of all types and layouts, as generated C++ and in torch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._compiler.native_library import NUMBER_TYPES, batch_source, call_library, library_of
from bayeskit._compiler.native_source import function_source

DTYPES = tuple(NUMBER_TYPES)
SHAPES = ((), (1,), (3,), (2, 3), (1, 4), (5, 1), (12,), (3, 8), (2, 2, 3))
F = torch.nn.functional

# A name tells what is called; ``x`` and ``y`` are tensors of any type, and ``y`` broadcasts with ``x``.
SMOOTH: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in "exp log log1p expm1 tanh sin cos tan sqrt rsqrt sigmoid lgamma digamma erf erfc atan asin acos "
        "sinh cosh reciprocal neg abs square exp2 log2 log10 positive asinh erfinv i0 sinc".split()
    },
    "relu": F.relu,
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "silu": F.silu,
    "clamp": lambda x: x.clamp(-1, 2),
    "clamp_min": lambda x: x.clamp(min=1),
    "nan_to_num": lambda x: x.nan_to_num(1.0, 2.0, -2.0),
    "x ** 2": lambda x: x**2,
    "x ** 3": lambda x: x**3,
    "x ** .5": lambda x: x**0.5,
    "x ** -1.5": lambda x: x**-1.5,
    "2 ** x": lambda x: 2**x,
    "x + 2": lambda x: x + 2,
    "x * 2.5": lambda x: x * 2.5,
    "3 - x": lambda x: 3 - x,
    "x / 2": lambda x: x / 2,
    "1 / x": lambda x: 1 / x,
    "x * True": lambda x: x * True,
    "x + 300": lambda x: x + 300,
    "double": lambda x: x.double(),
    "float": lambda x: x.float(),
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(-1),
    "sum in single precision": lambda x: x.sum(-1, dtype=torch.float32),
    "mean": lambda x: x.mean(),
    "prod": lambda x: x.prod(),
    "amax": lambda x: x.amax(-1),
    "amin": lambda x: x.amin(0),
    "max": lambda x: x.max(),
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "logsumexp": lambda x: x.logsumexp(-1),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "cumsum": lambda x: x.cumsum(-1),
    "cumprod": lambda x: x.cumprod(0),
    "diff": lambda x: x.diff(),
    "transpose": lambda x: x.movedim(0, -1),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(1, -1),
    "every other": lambda x: x[::2],
    "last": lambda x: x[..., -1],
    "expand": lambda x: x.expand(2, *x.shape),
    "flatten": lambda x: x.reshape(-1),
    "cat": lambda x: torch.cat([x, x.flip(0)]),
    "stack": lambda x: torch.stack([x, x]),
    "repeat": lambda x: x.repeat(2, *[1] * (x.dim() - 1)),
    "diagonal": lambda x: x.diagonal(),
    "tril": lambda x: x.tril(),
    "index": lambda x: x[[0, 0, -1]],
    "outer": lambda x: torch.outer(x.reshape(-1), x.reshape(-1)),
    "gram": lambda x: x @ x.mT,
    "unsqueeze": lambda x: x.unsqueeze(1),
}
SHARP: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in "floor ceil round trunc frac sign isnan isinf isfinite logical_not bitwise_not signbit".split()
    },
    **{f"to {str(dtype)[6:]}": lambda x, dtype=dtype: x.to(dtype) for dtype in DTYPES},
    "x > 1": lambda x: x > 1,
    "x == x": lambda x: x == x,
    "x // 2": lambda x: x // 2,
    "x % 3": lambda x: x % 3,
    "x // -2": lambda x: x // -2,
    "x % -3": lambda x: x % -3,
    "x % 2.5": lambda x: x % 2.5,
    "all": lambda x: x.all(),
    "any": lambda x: x.bool().any(-1),
    "count_nonzero": lambda x: (x != 0).sum(-1),
    "argmax": lambda x: x.argmax(-1),
    "one_hot": lambda x: F.one_hot(x.long().clamp(0, 2), 3),
}
SMOOTH_OF_TWO: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in "add sub mul div maximum minimum pow atan2 hypot logaddexp".split()},
    "xlogy": torch.xlogy,
    "add twice": lambda x, y: torch.add(x, y, alpha=2),
    "sub twice": lambda x, y: torch.sub(x, y, alpha=2),
    "rsub": lambda x, y: torch.rsub(x, y),
    "lerp": lambda x, y: torch.lerp(x, y.double(), 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, y.double(), y.double(), value=0.5),
    "sum of products": lambda x, y: (x * y).sum(),
    "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]),
    "+=": lambda x, y: x.clone().add_(y),
    "*=": lambda x, y: x.clone().mul_(y),
}
SHARP_OF_TWO: dict[str, Callable[..., Tensor]] = {
    **{
        name: getattr(torch, name)
        for name in "eq ne lt le gt ge fmod remainder floor_divide logical_and logical_or logical_xor bitwise_and "
        "bitwise_or bitwise_xor".split()
    },
    "trunc_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where or 7": lambda x, y: torch.where(y > 0, x, 7),
    "masked_fill": lambda x, y: x.masked_fill((y > 0).broadcast_to(x.shape), 3),
    "heaviside": lambda x, y: torch.heaviside(x.double(), y.double()),
    "copysign": lambda x, y: torch.copysign(x, y),
}


OF_DOUBLES = "mean var norm logsumexp softmax log_softmax gram lerp addcmul".split()


class Case(NamedTuple):
    """A function of two tensors, and where it is compared."""

    words: str
    function: Callable[[Tensor, Tensor], tuple[Tensor, ...]]
    x: Tensor
    y: Tensor
    expected: Tensor
    allowed: Tensor  # difference, by rounding of the arguments


class Difference(NamedTuple):
    """Where the C++ gives something else than torch."""

    case: Case
    found: Tensor


def _numbers(chance: random.Random, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    size = torch.Size(shape).numel()
    if dtype == torch.bool:
        values: list[Any] = [chance.random() < 0.5 for _ in range(size)]
    elif dtype.is_floating_point:
        odd = (0.0, -0.0, 1.0, -1.0, 0.5, 2.5, -2.5, 1e10, -1e-10, torch.inf, -torch.inf, torch.nan, 800.0)
        values = [chance.choice(odd) if chance.random() < 0.15 else chance.gauss(0.0, 2.0) for _ in range(size)]
    else:
        limits = torch.iinfo(dtype)
        odd = (0, 1, 2, limits.max, limits.min, limits.max // 2 + 1)
        least = max(limits.min, -9)
        values = [chance.choice(odd) if chance.random() < 0.15 else chance.randint(least, 9) for _ in range(size)]
    return torch.tensor(values, dtype=dtype).reshape(shape)


def _broadcast(chance: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    kept = tuple(size if chance.random() < 0.7 else 1 for size in shape)
    return kept[chance.randint(0, len(kept)) :] if chance.random() < 0.3 else kept


def _rounded(x: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return a tensor with other rounding errors."""
    if generator is None or not x.dtype.is_floating_point:
        return x
    noise = 2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1
    return x * (1 + torch.finfo(x.dtype).eps * noise).to(x.dtype)


class _Composed:
    """Operations, one after the other, on a tensor and a second one."""

    def __init__(self, steps: list[tuple[str, Callable[..., Tensor], bool]]) -> None:
        self.steps = steps

    def __call__(self, x: Tensor, y: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor]:
        y = _rounded(y, generator)
        for place, (_, operation, of_two) in enumerate(self.steps):
            if place or operation in SMOOTH.values() or operation in SMOOTH_OF_TWO.values():
                x = _rounded(x, generator)
            x = operation(x, y) if of_two else operation(x)
        return (_rounded(x, generator).contiguous(),)


def random_case(chance: random.Random) -> Case | None:
    """Return a case of one to three operations; None if torch itself refuses or does not define it."""
    shape = chance.choice(SHAPES)
    steps: list[tuple[str, Callable[..., Tensor], bool]] = []
    for place in range(chance.randint(1, 3)):
        of_two = chance.random() < 0.4
        sharp = place == 0 and chance.random() < 0.4  # later, a rounding error could become a whole one
        table = (SHARP_OF_TWO if sharp else SMOOTH_OF_TWO) if of_two else (SHARP if sharp else SMOOTH)
        name = chance.choice(sorted(table))
        if name in OF_DOUBLES:
            steps.append(("double", SMOOTH["double"], False))
        steps.append((name, table[name], of_two))
    function = _Composed(steps)
    x = _numbers(chance, shape, chance.choice(DTYPES))
    y = _numbers(chance, _broadcast(chance, shape), chance.choice(DTYPES))
    # What a number that is not finite, or lies outside, becomes as a whole one, C++ and torch leave open.
    if any(_is_undefined(name, z) for name, *_ in steps for z in (x, y)):
        return None
    words = f"{' > '.join(name for name, *_ in steps)} of {x.dtype} {tuple(x.shape)} and {y.dtype} {tuple(y.shape)}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            (expected,) = function(x, y)
            if expected.dtype not in NUMBER_TYPES or not 0 < expected.numel() < 200:
                return None
            allowed, generator = torch.zeros_like(expected, dtype=torch.float64), torch.Generator().manual_seed(0)
            for _ in range(8 * expected.dtype.is_floating_point):
                near, exact = function(x, y, generator)[0].double(), expected.double()
                same = (near == exact) | (near.isnan() & exact.isnan())
                off = torch.where(same, 0.0, (near - exact).abs().nan_to_num(torch.inf))  # infinite: any number will do
                allowed = torch.maximum(allowed, 64 * off)
    except (RuntimeError, TypeError, IndexError, ValueError, ZeroDivisionError, NotImplementedError):
        return None
    return Case(words, function, x, y, expected, allowed)


def _is_undefined(name: str, x: Tensor) -> bool:
    to_whole = name.startswith(("to int", "to uint")) or name == "one_hot"
    if not (to_whole and x.dtype.is_floating_point):
        return False
    least = 0 if "uint" in name else -(2.0**31)
    return not bool(x.isfinite().all()) or bool((x <= least - 1).any()) or bool((x >= 2.0**31).any())


def compared(cases: list[Case]) -> tuple[list[Difference], list[Case]]:
    """Run cases as C++; return those that differ from torch, and those whose operations are left to torch."""
    left, texts, calls, space, known = [], [], [], 0, []
    for case in cases:
        name = f"F{len(known)}"
        source = function_source(name, case.function, (torch.ones_like(case.x), torch.ones_like(case.y)))
        if source is None:
            left.append(case)
            continue
        kinds = (f"const {NUMBER_TYPES[case.x.dtype]}*", f"const {NUMBER_TYPES[case.y.dtype]}*")
        kinds += (f"{NUMBER_TYPES[case.expected.dtype]}*",)
        given = ", ".join(f"({kind})pointers[{place}]" for place, kind in enumerate(kinds))
        calls.append(f"if (times == {len(known)} && {name}::call(space, {given})) return 1;")
        texts.append(source.text)
        space = max(space, source.space)
        known.append(case)
    if not known:
        return [], left
    library = library_of(batch_source(calls, texts, space))
    assert library is not None
    wrong = []
    for place, case in enumerate(known):
        found = torch.empty_like(case.expected)
        call_library(library, (case.x, case.y), [found], place, 1)
        a, b = found.double(), case.expected.double()
        same = (a == b) | (a.isnan() & b.isnan()) | ((a - b).abs() <= case.allowed) | case.allowed.isinf()
        if case.expected.dtype == torch.int64:
            same &= found == case.expected
        if not bool(same.all()):
            wrong.append(Difference(case, found))
    return wrong, left
