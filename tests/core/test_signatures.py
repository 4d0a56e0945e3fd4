"""Arguments of public calls: what is of a wrong type is refused by name, before any work."""

import inspect
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bayeskit as bk
from bayeskit.core.signatures import check_memory, checked
from bayeskit.errors import BayeskitError, DataError, SettingsError, ShapeError
from bayeskit.inference.generalized.losses import log_power_integral
from bayeskit.inference.gradients import best_k
from bayeskit.models.phylogenetics import Tree

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import fuzz_calls

TARGET = bk.exact.get("beta_binomial").target()


def test_every_public_call_is_checked():
    assert len(fuzz_calls.calls()) > 300
    unchecked = []
    for name, thing in fuzz_calls.calls().items():
        call = thing.__init__ if inspect.isclass(thing) else thing
        own = getattr(call, "__module__", "").startswith("bayeskit.") and not thing.__module__.startswith(
            "bayeskit.core"
        )
        if own and not hasattr(call, "checks_arguments"):
            unchecked.append(name)
    assert unchecked == []


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: bk.sample(TARGET, checkpoint=5), "checkpoint"),
        (lambda: bk.sample(TARGET, num_samples="many"), "num_samples must be a whole number"),
        (lambda: bk.sample(TARGET, num_samples=10**12), "num_samples=1e[+]12 needs at least 8,000 GB"),
        (lambda: bk.compare_models(5), "models"),
        (lambda: bk.compare_models({"a": TARGET, "b": TARGET}, budget=0), "budget"),
        (lambda: bk.Draws(torch.zeros(1, 1, 1), *[torch.zeros(1, 1)] * 2, beta="x"), "beta"),
        (lambda: Tree(("A", "B", "C"), ((0, 1, 2),), torch.full((3,), torch.nan)), "branch_lengths has NaN"),
        (lambda: Tree(("A", "B", "C"), 5), "children must be a list"),
        (lambda: best_k(torch.tensor(2.0), 2), "no categories"),
        (lambda: bk.exact.generate(1, ()), "families is empty"),
        (lambda: bk.NUTS(step_size=1j), "step_size must be"),
        (lambda: bk.evidence.bridge_sampling(5, 6), "Target"),
    ],
)
def test_wrong_arguments_are_named(call, named):
    with pytest.raises(BayeskitError, match=named):
        call()


class Stretch:
    """Keep settings."""

    @checked
    def __init__(
        self, x: torch.Tensor, times: int, share: float = 0.5, names: list[str] | None = None, flag: bool = True
    ):
        self.x, self.times = x, times


@checked
def stretch(x: torch.Tensor, times: int):
    """Stretch."""
    return x.abs() * times.__index__()


@pytest.mark.parametrize("times", [3, np.int64(3), torch.tensor(3)])
def test_whole_numbers_of_any_library_pass(times):
    assert stretch(torch.ones(2), times=times).sum() == 6
    assert Stretch([1.0], times, share=np.float32(0.5), names=["a"], flag=np.bool_(True)).times == 3


@pytest.mark.parametrize(
    "wrong",
    [{"times": 1.5}, {"times": None}, {"share": "a"}, {"share": torch.ones(2)}, {"names": [1]}, {"names": {}}]
    + [{"flag": "yes"}, {"x": "a"}, {"x": torch.ones(2, dtype=torch.complex64)}],
)
def test_a_constructor_refuses_wrong_types(wrong):
    with pytest.raises(BayeskitError, match=f"{next(iter(wrong))} must be .* of Stretch"):
        Stretch(**{"x": torch.ones(2), "times": 2, **wrong})


def test_an_argument_that_the_body_cannot_use_is_named():
    with pytest.raises(SettingsError, match="times must be a whole number, not 'a' of type str"):
        stretch(torch.ones(2), "a")
    with pytest.raises(DataError, match="x must be a tensor of real numbers, not an object of type list"):
        stretch(["a"], 2)


@checked
def numbers(n: int, share: float = 0.5, x: torch.Tensor | None = None, beta: float | torch.Tensor = 1.0) -> tuple:
    """Return the arguments as the body sees them."""
    return n, share, x, beta


@pytest.mark.parametrize("library", [np.array, np.float32, np.float64, torch.tensor])
def test_equal_values_of_other_libraries_are_those_of_the_signature(library):
    n, share, x, beta = numbers(np.int64(3), library(0.25), x=np.arange(2.0), beta=library(0.5))
    assert (n, share, float(beta)) == (3, 0.25, 0.5) and type(n) is int and type(share) is float
    assert torch.equal(x, torch.arange(2.0, dtype=torch.float64)) and x.dtype == torch.float64
    assert isinstance(beta, torch.Tensor) == (library is torch.tensor)
    assert torch.equal(numbers(torch.tensor(3), x=[[1, 2]])[2], torch.tensor([[1, 2]]))


@checked
def rows(table: object, num_rows: int, names: list[str] = (), device: torch.device | str | None = None) -> float:
    """Use the arguments as bodies do that check nothing."""
    torch.zeros(num_rows, device=device)
    return float(table.sum()) + len(names[0] if len(names) else "")


def test_arrays_of_names_are_lists_of_names():
    assert rows(torch.ones(3), 2, np.array(["ab"])) == 5


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"num_rows": -1}, "num_rows must not be negative"),
        ({"table": torch.ones(2, device="meta")}, "table must be"),
        ({"table": None}, "table must be .* not None"),
        ({"num_rows": "ab"}, "num_rows must be a whole number"),
        ({"names": [1]}, "names must be a list, each item a str"),
        ({"device": True}, "device must be a device such as 'cpu'"),
        ({"device": "x"}, "device must be a device such as 'cpu'"),
        ({"device": 2**63}, "device must be a device such as 'cpu'"),
    ],
)
def test_what_only_the_body_refuses_is_named(wrong, named):
    with pytest.raises(BayeskitError, match=named):
        rows(**{"table": torch.ones(2), "num_rows": 1, **wrong})


@checked
def spread(x: torch.Tensor, scale: float | torch.Tensor = 1.0, sites: object = None, width: int = 1) -> torch.Tensor:
    """Use values as bodies do that check nothing.

    Parameters
    ----------
    x : Tensor
        Rows, ``(n, d)``.
    """
    if isinstance(scale, float) or scale.dim() == 0:
        scale = torch.distributions.Normal(0.0, 1 / scale**2).scale
    chosen = x @ torch.ones(2) + scale if sites is None else x[:, sites["place"]]
    return chosen.repeat(width)


@pytest.mark.parametrize(
    ("wrong", "kind", "named"),
    [
        ({"x": torch.tensor(2.0)}, ShapeError, r"x has shape \(\) and must have \(n, d\) \(argument x of spread\)"),
        ({"x": torch.ones(3)}, ShapeError, r"x has shape \(3,\)"),
        ({"x": torch.ones(2, 3)}, ShapeError, r"shapes do not fit spread: x \(2, 3\)"),
        ({"scale": torch.ones(7)}, ShapeError, r"x \(3, 2\), scale \(7,\)"),
        ({"scale": torch.empty(0)}, DataError, "scale is empty, which spread cannot use"),
        ({"scale": torch.tensor(torch.nan)}, DataError, "scale has NaN"),
        (
            {"scale": torch.ones(3).to_sparse(), "sites": []},
            SettingsError,
            "scale must be a number or a tensor of real",
        ),
        ({"sites": 1}, SettingsError, "sites must be what its documentation says, not 1 of type int"),
        ({"sites": Path(".")}, SettingsError, "sites must be what its documentation says, not .* of type PosixPath"),
        (
            {"scale": int},
            SettingsError,
            "scale must be a number or a tensor of real numbers, not an object of type type",
        ),
        ({"scale": np.array([None, "a"])}, SettingsError, "scale must be a number or a tensor of real numbers"),
        ({"scale": 0.0}, SettingsError, None),
        ({"scale": 1e-320}, SettingsError, "scale is 1e-320"),
        ({"scale": float("inf")}, SettingsError, "scale is inf"),
        ({"sites": {}}, DataError, "sites has no 'place'"),
        ({"width": 2**63}, SettingsError, "width is beyond the whole numbers of 64 bits"),
        ({"width": 10**13}, SettingsError, "width needs more than the memory"),
    ],
)
def test_values_that_a_body_cannot_use_are_named(wrong, kind, named):
    given = {"x": torch.ones(3, 2), **wrong}
    if named is None:  # nothing is odd with zero: the error of the body stands
        with pytest.raises(ZeroDivisionError):
            spread(**given)
        return
    with pytest.raises(kind, match=named):
        spread(**given)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (
            {"log_prior": torch.ones(3)},
            r"log_likelihood has shape \(2,\) and must have \(M,\), where M is 3 as in log_prior",
        ),
        ({"log_likelihood": torch.ones(2, 1)}, r"log_likelihood has shape \(2, 1\) and must have \(M,\)"),
        ({"log_likelihood": []}, "log_likelihood has shape"),
    ],
)
def test_tensors_of_a_dataclass_have_the_shapes_of_its_docstring(wrong, named):
    given = {"assignments": {}, "log_prior": torch.zeros(2), "log_likelihood": torch.zeros(2)}
    bk.exact.EnumeratedPosterior(**given)
    with pytest.raises(ShapeError, match=named):
        bk.exact.EnumeratedPosterior(**given | wrong)


def test_one_and_zero_are_switches_and_other_numbers_are_not():
    @checked
    def body(flag: bool | list[str]) -> object:
        return flag if isinstance(flag, bool) else tuple(flag)

    assert [body(flag) for flag in (1, 0, np.int64(1), np.bool_(False), ["a"])] == [True, False, True, False, ("a",)]
    for wrong in (2, -1, 2**63):
        with pytest.raises(SettingsError, match="flag must be True or False or a list"):
            body(wrong)


def test_a_switch_is_no_number_and_letters_are_no_names():
    for wrong in ({"times": True}, {"share": False}, {"names": "ab"}):
        with pytest.raises(SettingsError, match=f"{next(iter(wrong))} must be"):
            Stretch(**{"x": torch.ones(2), "times": 2, **wrong})


def test_numbers_with_gradients_or_in_batches_stay_what_they_are():
    slope = torch.tensor(0.5, requires_grad=True)
    assert numbers(1, slope)[1] is slope and numbers(1, x=(items := [slope, slope]))[2] is items
    assert torch.equal(torch.func.vmap(lambda s: numbers(1, s)[1] * 2)(torch.ones(3)), torch.full((3,), 2.0))


def test_an_error_of_the_package_and_a_value_that_serves_stand():
    @checked
    def body(x: int) -> float:
        if x == "bad":
            raise DataError("own words")
        return x

    with pytest.raises(DataError, match="own words"):
        body("bad")
    assert body(0.5) == 0.5


def test_errors_of_the_body_and_missing_arguments_pass_through():
    @checked
    def body(x: object) -> None:
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        body(1)
    with pytest.raises(TypeError, match="missing 1 required"):
        body()


def test_a_checked_call_looks_like_the_call():
    assert list(inspect.signature(stretch).parameters) == ["x", "times"]
    assert stretch.__doc__ == "Stretch."
    assert pickle.loads(pickle.dumps(bk.sample)) is bk.sample


def test_memory_is_asked_before_it_is_taken():
    check_memory("num_samples", 1000)
    with pytest.raises(SettingsError, match="ask for fewer"):
        check_memory("num_samples", 10**15)
    check_memory("num_samples", 10**15, each=0)


@pytest.mark.parametrize("kind", ["HMC", "NUTS", "inference.samplers.Metric", "inference.samplers.Polynomial"])
def test_wild_settings_end_in_errors_of_the_package(kind, tmp_path):
    failures = [fuzz_calls.run_case(f"bayeskit.{kind}", seed, tmp_path) for seed in range(20)]
    assert [failure for failure in failures if failure is not None] == []


def test_the_fuzzer_forgives_the_error_of_a_function_that_the_call_was_given(monkeypatch):
    """With the note of the package, and only then: what fails in the package is told, with a note or without."""
    kind, plan = "bayeskit.parallel.map_tasks", {"tasks": "[None]"}
    assert fuzz_calls._failure(kind, plan) is None

    def failing(function, index, task):
        error = TypeError("of the package")
        error.add_note(f"raised by task {index}")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(bk.parallel, "_call", failing)
        assert "of the package" in fuzz_calls._failure(kind, plan)
    monkeypatch.setattr(bk.parallel, "_call", lambda function, index, task: (index, function(task)))
    assert "bad operand type" in fuzz_calls._failure(kind, plan)


def test_vectors_of_whole_numbers_stand_for_sequences():
    from bayeskit.models.vae import mlp_vae

    for hidden in (torch.tensor([3, 4]), np.array([3, 4], dtype=np.int32)):
        assert mlp_vae(data_dim=2, hidden=hidden, latent_dim=1).generate(2, seed=0).shape == (2, 2)


def test_a_number_outside_the_domain_of_a_function_is_named():
    with pytest.raises(SettingsError, match="power is 0, which log_power_integral cannot use"):
        log_power_integral(torch.distributions.Normal(torch.tensor(0.0), torch.tensor(1.0)), 0)

    def spread(scale: float):
        return torch.distributions.Normal(0.0, scale)

    with pytest.raises(SettingsError, match="scale is 0, which .*spread cannot use"):
        checked(spread)(0)
