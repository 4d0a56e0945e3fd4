"""Generated C++ of equations: torch's types, memory on the heap, statuses, and a comparison with torch at first use."""

import ctypes
import warnings

import pytest
import torch

import bayeskit as bk
from bayeskit._compiler import native_library as native_library
from bayeskit._compiler import native_source as native_source
from bayeskit._compiler import native_writer as native_writer
from bayeskit._compiler.native_library import call_library, library_of, space_of_loop
from bayeskit._core.libraries import raise_for_status
from bayeskit.errors import CompilationWarning, ModelError, SettingsError, ShapeError
from bayeskit.ode import _native as ode_native
from bayeskit.ode import _solving as solving

F64 = torch.float64
TIMES = torch.tensor([0.0, 2.0], dtype=F64)
pytestmark = pytest.mark.compiler

WHOLE = {
    torch.int32: [2_000_000_000, 1_000_000_000],
    torch.int64: [2_000_000_000, 1_000_000_000],
    torch.uint8: [200, 100],
    torch.bool: [True, True],
}
OPERATIONS = {
    "sum": lambda p: p.sum(),
    "double": lambda p: (p * 2).sum(),
    "plus": lambda p: (p + 3).sum(),
    "product": lambda p: (p[0] * p[1] * 1e-9).sum(),
    "compared": lambda p: (p > 1).sum() + (p == p.flip(0)).sum(),
    "maximum": lambda p: torch.maximum(p, p.flip(0)).sum(),
    "chosen": lambda p: torch.where(p > 150, p, 7).sum(),
    "mean": lambda p: (p * 1.0).mean(),
    "ratio": lambda p: (p / 3).sum(),
    "sign": lambda p: torch.sign(p * 1).sum(),
    "power": lambda p: (p.long() ** 2).sum(),
}


@pytest.mark.calibration
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("dtype", WHOLE)
def test_whole_numbers_have_the_types_of_torch(dtype, operation):
    p = torch.tensor(WHOLE[dtype], dtype=dtype)
    slope = OPERATIONS[operation](p).to(F64)
    scale = 1 / max(1.0, abs(float(slope)))
    found = bk.ode.solve(
        lambda t, y, p: OPERATIONS[operation](p).to(F64) * scale + 0 * y, torch.zeros(1, dtype=F64), TIMES, p
    )
    assert float(found[-1]) == pytest.approx(2 * float(slope) * scale, rel=1e-9)


@pytest.mark.parametrize("size", [200, 5_000, 150_000])
def test_states_of_any_size_and_their_gradients(size):
    start = torch.linspace(0.0, 1.0, size, dtype=F64)
    rate = torch.tensor(0.7, dtype=F64, requires_grad=True)
    path = bk.ode.solve(lambda t, y, rate: -rate * y, start, torch.tensor([0.0, 0.2], dtype=F64), rate)
    torch.testing.assert_close(path[-1].detach(), start * 0.8693582353988059, rtol=1e-5, atol=0)
    path[-1].sum().backward()
    assert float(rate.grad) == pytest.approx(-0.2 * float(path[-1].detach().sum()), rel=1e-4)


def test_arrays_beyond_the_stack_are_in_the_memory_of_the_caller():
    source = native_source.function_source(
        "f", lambda x: ((x.exp() + 1).log().cumsum(0),), [torch.zeros(20, dtype=F64)]
    )
    assert source is not None and source.space == 0
    many = native_source.row_source(lambda u, b: (b + u.exp().sum(1), b, b, u * 2), _rows(40_000), (1, 1, 1, 0))
    few = native_source.row_source(lambda u, b: (b + u.exp().sum(1), b, b, u * 2), _rows(100), (1, 1, 1, 0))
    assert space_of_loop(many.text) >= 8 * 40_000 and space_of_loop(few.text) == 0
    assert library_of(many.text).space == space_of_loop(many.text)


def _rows(dim):
    return torch.zeros(1, dim, dtype=F64), torch.ones(1, dtype=F64)


def test_a_status_is_an_error_with_words():
    raise_for_status(0, "steps")
    with pytest.raises(MemoryError, match="too little memory for steps"):
        raise_for_status(1, "steps")
    with pytest.raises(ModelError, match="cannot go on with trees: all weights of a choice are NaN or zero"):
        raise_for_status(2, "trees")


def test_a_loop_without_memory_returns_its_status():
    """The record of steps asks for memory while it grows; a realloc that fails is a status."""
    text = native_library.batch_source(
        ["double* x = (double*)std::realloc(nullptr, (size_t)-1 / 4); if (!x) return 1;"]
    )
    library = library_of(text)
    assert library.loop(None, ctypes.c_int64(1), ctypes.c_int64(1), None) == 1


@pytest.mark.parametrize(
    ("y0", "settings", "said"),
    [
        (torch.ones(2, dtype=torch.float16), {}, "single or double precision, not torch.float16; write y0.double"),
        (torch.ones(2, dtype=torch.bfloat16), {}, "single or double precision"),
        (torch.ones(2, dtype=F64), {"max_steps": 100}, "max_steps=100 is below the 199 steps that 200 times need"),
    ],
)
def test_what_cannot_be_solved_is_said_before(y0, settings, said):
    with pytest.raises((ShapeError, SettingsError), match=said):
        bk.ode.solve(lambda t, y, _: -y, y0, torch.linspace(0.0, 1.0, 200, dtype=y0.dtype), **settings)


def test_code_that_differs_from_torch_is_left_to_torch(monkeypatch):
    """A mutation of the writer: additions are subtractions."""
    monkeypatch.setitem(native_writer._EXPRESSIONS, "add", "({0} - {1})")
    for cached in (solving._source, solving._texts):
        cached.cache_clear()
    try:
        with pytest.warns(CompilationWarning, match=r"C\+\+ of f differs from torch by .* its operations are .*add"):
            found = bk.ode.solve(lambda t, y, _: 1.0 + 0 * y + y * 0, torch.zeros(1, dtype=F64), TIMES)
    finally:
        solving._source.cache_clear()
    assert float(found[-1]) == pytest.approx(2.0, rel=1e-6)


@pytest.mark.calibration
@pytest.mark.parametrize("name", ["jacobian", "bend"])
def test_a_wrong_jacobian_of_an_implicit_method_is_left_to_torch(name, monkeypatch):
    right = getattr(ode_native, name)
    monkeypatch.setattr(ode_native, name, lambda *x: tuple(1.5 * part for part in right(*x)))
    solving._source.cache_clear()
    rate = torch.tensor(0.7, dtype=F64, requires_grad=True)
    try:
        with pytest.warns(CompilationWarning, match=r"differs from torch"):
            found = bk.ode.solve(
                lambda t, y, rate: -rate * y.square() * (1 + t), torch.ones(2, dtype=F64), TIMES, rate, method="rodas5"
            )
            found[-1].sum().backward()
    finally:
        solving._source.cache_clear()
    exact = 1 / (1 + 0.7 * 4.0)  # y' = -r y^2 (1 + t), so that 1 / y = 1 + r (t + t^2 / 2)
    assert float(found[-1, 0].detach()) == pytest.approx(exact, rel=1e-4)
    assert float(rate.grad) == pytest.approx(-2 * 4.0 * exact**2, rel=1e-3)


def test_a_wrong_gradient_is_left_to_torch(monkeypatch):
    monkeypatch.setattr(ode_native, "pull", lambda *x: tuple(1.5 * part for part in solving.pull(*x)))
    solving._source.cache_clear()
    rate = torch.tensor(0.7, dtype=F64, requires_grad=True)
    try:
        with pytest.warns(CompilationWarning, match=r"generated C\+\+ of f and its gradient differs from torch"):
            path = bk.ode.solve(lambda t, y, rate: -rate * y, torch.ones(1, dtype=F64), TIMES, rate)
            path[-1].sum().backward()
    finally:
        solving._source.cache_clear()
    assert float(rate.grad) == pytest.approx(-2 * float(path[-1].detach().sum()), rel=1e-5)


def test_tables_of_one_library_are_not_those_of_another():
    """Libraries of one process have functions and tables of the same names, which a linker may take for one."""
    x = torch.arange(300, dtype=F64)
    for seed in range(3):
        places = torch.randperm(300, generator=torch.Generator().manual_seed(seed)).tolist()
        source = native_source.function_source("slope", lambda x, places=places: (x[places] * x,), [x])
        call = "slope::call(space, (const double*)pointers[0], (double*)pointers[1]);"
        library = library_of(native_library.batch_source([call], [source.text], source.space))
        found = torch.empty_like(x)
        call_library(library, [x], [found], 1, 1)
        assert torch.equal(found, x[places] * x)


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_equations_of_shifted_numbers_are_compiled_and_right(shift):
    start = torch.linspace(0.1, 1.0, 300, dtype=F64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CompilationWarning)
        found = bk.ode.solve(lambda t, y, params: (y.roll(shift) - y) * params, start, TIMES, torch.tensor(0.5))
    moves = torch.fft.fft(torch.eye(300, dtype=F64)[shift]) - 1
    exact = torch.fft.ifft(torch.fft.fft(start) * (moves * 0.5 * 2.0).exp()).real
    torch.testing.assert_close(found[-1], exact, rtol=1e-5, atol=1e-6)
