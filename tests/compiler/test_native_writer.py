"""Generated C++ does what torch does: a small share of `benchmarks/compiled_operations.py`."""

import random

import mpmath
import pytest
import torch
from random_operations import Case, compared, random_case

from bayeskit._compiler import native_writer as native_writer

pytestmark = pytest.mark.compiler


def test_random_operations_are_those_of_torch():
    chance, cases = random.Random(0), []
    while len(cases) < 60:
        case = random_case(chance)
        if case is not None:
            cases.append(case)
    wrong, left = compared(cases)
    assert [one.case.words for one in wrong] == [] and len(left) < 40


def test_digamma_is_exact_beside_its_poles():
    x = torch.tensor([-1e-10, -1e-300, 1e-12, -0.5, -2.0 + 1e-9, -7.0000001, -123.456], dtype=torch.float64)
    exact = torch.tensor([float(mpmath.digamma(value)) for value in x.tolist()], dtype=torch.float64)
    case = Case("", lambda x, y: (torch.digamma(x),), x, x, exact, 1e-13 * exact.abs())
    wrong, left = compared([case])
    assert not left and not wrong, [one.found for one in wrong]


@pytest.mark.parametrize(("operation", "mistake"), [("sub", "({0} + {1})"), ("maximum", "({0} > {1} ? {0} : {1})")])
def test_mutation_random_operations_find_a_mistake(operation, mistake, monkeypatch):
    monkeypatch.setitem(native_writer._EXPRESSIONS, operation, mistake)
    chance, cases = random.Random(0), []
    while len(cases) < 40:
        case = random_case(chance)
        if case is not None and ("sub" if operation == "sub" else "maximum") in case.words.partition(" of ")[0]:
            cases.append(case)
    assert compared(cases)[0]
