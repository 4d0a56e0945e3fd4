"""Both back ends of pruning for the likelihood of one tree."""

import pytest

from bayeskit.models.phylogenetics import _tree_model as tree_model


@pytest.fixture(params=[pytest.param("compiled", marks=pytest.mark.compiler), "tensors"])
def back_end(request, monkeypatch) -> str:
    if request.param == "tensors":
        monkeypatch.setattr(tree_model, "can_run", lambda *_: False)
    return request.param
