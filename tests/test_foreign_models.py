"""A share of the corpus of models that users of other packages write, in eight forms of their data."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import foreign_models

FEW = ("binomial_regression", "die", "hurdle_counts", "item_response", "nobody_was_censored", "normal_data_with_gaps")


@pytest.mark.calibration
@pytest.mark.parametrize("name", FEW)
def test_the_form_of_data_does_not_change_a_model(name):
    case = foreign_models.MODELS[name](np.random.default_rng(1))
    base = foreign_models.target_of(case, "double")
    u = base.sample_prior(3, seed=1)
    found = {form: foreign_models.judged(case, form, base, u, base.log_density(u)) for form in foreign_models.FORMS}
    refused, said = found.pop("columns")
    assert refused == "refused" and "squeeze" in said
    assert {form: verdict for form, (verdict, _) in found.items()} == dict.fromkeys(found, "right")
