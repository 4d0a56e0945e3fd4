"""Settings as users give them: numbers of any library, and words where numbers belong."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

import bayeskit as bk
from bayeskit._core.inputs import real_number, unknown_name
from bayeskit._core.randomness import new_generator
from bayeskit.errors import SettingsError


@pytest.mark.parametrize("value", [0.75, np.float32(0.75), torch.tensor(0.75), torch.tensor([0.75]), Fraction(3, 4)])
def test_numbers_of_any_library_become_pythons_own(value):
    number = real_number("share", value, "(0, 1)")
    assert type(number) is float and number == 0.75


def test_without_limits_every_number_is_fine():
    assert [real_number("seconds", value) for value in (3, -1.5, math.inf)] == [3.0, -1.5, math.inf]
    assert math.isnan(real_number("seconds", math.nan))


@pytest.mark.parametrize("value", ["0.8", b"0.8", None, True, [0.8], 0.8j, torch.tensor([0.1, 0.2])])
def test_what_is_no_number_is_named(value):
    with pytest.raises(SettingsError, match=r"share must be a number in \(0, 1\), not "):
        real_number("share", value, "(0, 1)")
    with pytest.raises(SettingsError, match="share must be a number, not "):
        real_number("share", value)


@pytest.mark.parametrize("value", [0, 1.0, -0.1, math.inf, math.nan])
def test_numbers_beyond_the_limits_are_refused(value):
    with pytest.raises(SettingsError, match=r"share must lie in \(0, 1\), not "):
        real_number("share", value, "(0, 1)")


@pytest.mark.parametrize(("domain", "ends"), [("[0, 1)", [0]), ("(0, 1]", [1]), ("[0, 1]", [0, 1]), ("(0, 1)", [])])
def test_square_brackets_include_an_end(domain, ends):
    for value in (0, 1):
        if value in ends:
            assert real_number("share", value, domain) == value
        else:
            with pytest.raises(SettingsError, match="share must lie in "):
                real_number("share", value, domain)
    parameter = torch.nn.Parameter(torch.tensor(0.5))
    assert real_number("share", parameter, domain) == 0.5 and real_number("steps", math.inf, "[1, inf]") == math.inf


def test_words_are_refused_before_any_work():
    target = bk.exact.get("beta_binomial").target()
    with pytest.raises(SettingsError, match="target_acceptance must be a number in"):
        bk.sample(target, target_acceptance="0.8")


def test_a_name_that_is_missing_meets_the_nearest_and_few_others():
    known = [f"model_{i}" for i in range(40)]
    message = unknown_name("model", "modl_7", known).args[0]
    assert "did you mean 'model_7'" in message and "model_8" not in message and "Known names" not in message
    assert unknown_name("model", "xyz", known).args[0].endswith("model_39")
    assert unknown_name("substitution model", "JC6", ["JC69", "K80"]).args[0].endswith("'JC69'? Known names: JC69, K80")


def test_a_seed_that_is_no_number_is_refused():
    with pytest.raises(SettingsError, match="seed must be a whole number"):
        new_generator("a")
