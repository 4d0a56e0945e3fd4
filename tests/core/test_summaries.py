"""The table of draws against ArviZ's own, on the version of ArviZ that is installed."""

import arviz
import numpy as np
import pytest
import torch

from bayeskit._core.compatibility import summary
from bayeskit._core.summaries import summary_table
from bayeskit._logdensity.labels import DimensionLabels

NAMES = DimensionLabels().of


def sites(chains, draws, generator):
    """Independent, autocorrelated, antithetic and discrete numbers, and ties."""
    noise = torch.randn(5, chains, draws, generator=generator, dtype=torch.float64)
    slow, fast = noise[1].clone(), noise[2].clone()
    for t in range(1, draws):
        slow[:, t] += 0.95 * slow[:, t - 1]
        fast[:, t] -= 0.6 * fast[:, t - 1]
    apart = noise[3] + torch.arange(chains, dtype=torch.float64)[:, None]
    return {
        "x": noise[0],
        "y": torch.stack([slow, fast, apart, noise[4].round(), torch.exp(2 * slow)], -1).unflatten(-1, (5, 1)),
        "n": (noise[0] > 1).to(torch.int64),
    }


@pytest.mark.parametrize(("chains", "draws"), [(4, 500), (2, 201), (1, 60), (3, 9)])
def test_the_table_is_that_of_arviz(chains, draws):
    given = sites(chains, draws, torch.Generator().manual_seed(0))
    ours, theirs = summary_table(given, NAMES, "none"), summary(given, {}, {}, round_to="none")
    assert list(ours.index) == list(theirs.index)
    if arviz.__version__.startswith("0."):
        assert list(ours.columns) == list(theirs.columns)
        np.testing.assert_allclose(ours.to_numpy(), theirs.astype(float).to_numpy(), rtol=1e-8, atol=1e-12)
        assert summary_table(given, NAMES).equals(summary(given, {}, {}).astype(float))


def test_constants_and_numbers_that_are_not_finite():
    x = torch.randn(2, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    table = summary_table({"constant": torch.ones(2, 50), "nan": torch.where(x > 2, torch.nan, x)}, NAMES)
    assert table.loc["constant", ["sd", "mcse_mean"]].eq(0).all() and table.loc["constant", "ess_bulk"] == 100
    assert table.loc["nan", "mcse_mean":"r_hat"].isna().all()
    few = summary_table({"x": x[:, :3]}, NAMES)
    assert few["sd"]["x"] == round(float(x[:, :3].std()), 3) and few.loc["x", "mcse_mean":].isna().all()
