"""Generated C++ does what torch does: a small share of `benchmarks/compiled_operations.py`."""

import random

import pytest
from random_operations import compared, random_case

from bayeskit.logdensity import native

pytestmark = pytest.mark.compiler


def test_random_operations_are_those_of_torch():
    chance, cases = random.Random(0), []
    while len(cases) < 60:
        case = random_case(chance)
        if case is not None:
            cases.append(case)
    wrong, left = compared(cases)
    assert [one.case.words for one in wrong] == [] and len(left) < 40


@pytest.mark.parametrize(("operation", "mistake"), [("sub", "({0} + {1})"), ("maximum", "({0} > {1} ? {0} : {1})")])
def test_mutation_random_operations_find_a_mistake(operation, mistake, monkeypatch):
    monkeypatch.setitem(native._EXPRESSIONS, operation, mistake)
    chance, cases = random.Random(0), []
    while len(cases) < 40:
        case = random_case(chance)
        if case is not None and ("sub" if operation == "sub" else "maximum") in case.words.partition(" of ")[0]:
            cases.append(case)
    assert compared(cases)[0]
