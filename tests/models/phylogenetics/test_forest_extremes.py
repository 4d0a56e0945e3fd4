"""The likelihood of many topologies at the ends of the numbers: negative ones, and such as are hardly above zero."""

import math

import numpy as np
import pytest
import torch

from bayeskit.models.phylogenetics import HKY85, JC69, Alignment, ForestLikelihood, Topologies, Tree, TreeModel
from bayeskit.models.phylogenetics._pruning import _passes as passes
from bayeskit.models.phylogenetics._pruning._native import CompiledPasses, can_run
from bayeskit.models.phylogenetics._pruning._passes import TensorPasses
from bayeskit.models.phylogenetics._pruning._plan import SubPatterns, make_plan
from bayeskit.models.phylogenetics._site_rates import GammaRates

BOTH = [pytest.param(True, id="compiled", marks=pytest.mark.compiler), pytest.param(False, id="tensors")]
TREE = Tree.from_newick("((A,B),C,D);")
FOUR = Topologies.from_trees([TREE], "ABCD")


@pytest.fixture(params=BOTH)
def compiled(request) -> bool:
    return request.param


@pytest.mark.parametrize("site_rates", [None, GammaRates(0.5)], ids=["one rate", "Gamma"])
def test_negative_lengths_have_no_likelihood(site_rates, compiled):
    alignment = Alignment.from_sequences({"A": "ACGTACCA", "B": "ACGATCTA", "C": "ACTTAGAA", "D": "CCTAAAGA"})
    # Enough to make some site's likelihood negative; and a single one, which does not.
    lengths = torch.tensor([[-0.01, -0.01, -0.01, 0.1, 0.1], [-1e-9, 0.1, 0.1, 0.1, 0.1], [0.1] * 5])[:, None]
    forest = ForestLikelihood(alignment, site_rates=site_rates, compile=compiled)
    assert forest.log_likelihood(FOUR, lengths).isnan().flatten().tolist() == [True, True, False]
    model = TreeModel(alignment, TREE, site_rates=site_rates)
    assert model.log_likelihood(lengths[:, 0]).isnan().tolist() == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("count", [1, 3])
def test_a_negative_likelihood_of_a_site_has_no_logarithm(count, dtype, compiled):
    masks = np.array([[1, 2], [1, 4], [1, 8], [1, 2]], dtype=np.uint8)
    patterns = SubPatterns("ABCD", masks, np.array([1.0, 2.0]), False, 2**20)
    matrices = torch.full((count, 1, 5, 4, 4), 0.25, dtype=dtype)
    # Of the second pattern alone.
    matrices[0, 0, 0, :, 1] = -0.25
    frequencies = torch.full((count, 1, 4), 0.25, dtype=dtype)
    plan = make_plan(FOUR, patterns)
    if compiled:
        assert can_run(dtype, torch.device("cpu"))
    both = (CompiledPasses if compiled else TensorPasses)(plan, dtype, torch.device("cpu"))
    (values,) = both.log_likelihoods(matrices, frequencies, False)
    rows = both.row_values(matrices, frequencies)
    expected = torch.full((count, 1, 2), 4 * math.log(0.25), dtype=dtype)
    expected[0, 0, 1] = torch.nan
    resolution = 4 * torch.finfo(dtype).eps
    torch.testing.assert_close(rows, expected, rtol=resolution, atol=0, equal_nan=True)
    torch.testing.assert_close(
        values, expected @ torch.tensor([1.0, 2.0], dtype=dtype), rtol=resolution, atol=0, equal_nan=True
    )


def evaluate(forest: ForestLikelihood, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = lengths.clone().requires_grad_()
    values = forest.log_likelihood(FOUR, leaf)
    return values.detach(), torch.autograd.grad(values.sum(), leaf)[0]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("substitution", [JC69(), HKY85(2.0, [0.3, 0.3, 0.2, 0.2])], ids=["JC69", "HKY85"])
@pytest.mark.parametrize(
    ("dtype", "scales"),
    [(torch.float64, (1e-300, 3e-308, 1e-308, 1e-309)), (torch.float32, (1e-30, 3e-38, 1e-38, 1e-39))],
    ids=["double", "single"],
)
def test_sites_of_hardly_any_likelihood_have_finite_gradients(
    dtype, scales, substitution, count, compiled, monkeypatch
):
    # The first two taxa differ at all sites, along branches that forbid nearly all changes; many sites are alike.
    alignment = Alignment.from_sequences({"A": "A" * 50, "B": "C" * 50, "C": "A" * 50, "D": "C" * 50})
    single = Alignment.from_sequences({"A": "A", "B": "C", "C": "A", "D": "C"})
    forest = ForestLikelihood(alignment, substitution, dtype=dtype, compile=compiled)
    near = torch.full((count, 1, 5), 0.1, dtype=torch.float64)
    near[..., :2] = 1e-20
    # There, a site's likelihood is proportional to the two lengths.
    reference = ForestLikelihood(single, substitution, compile=False).log_likelihood(FOUR, near)
    for scale in scales:
        lengths = near.to(dtype)
        lengths[..., :2] = scale
        values, slopes = evaluate(forest, lengths)
        expected = 50 * (reference + math.log(lengths[0, 0, 0].item()) - math.log(1e-20))
        # Numbers below the smallest normal one have fewer digits: their steps are all alike.
        kind, site = torch.finfo(dtype), math.exp(expected[0, 0].item() / 50)
        tolerance = 8 * kind.eps * expected.abs().max().item() + 50 * 4 * kind.tiny * kind.eps / site
        torch.testing.assert_close(values.double(), expected, rtol=0, atol=tolerance)
        assert torch.isfinite(slopes).all() and (slopes[..., :2] > 0).all()
        if scale == scales[0]:
            torch.testing.assert_close(
                slopes[..., :2].double() * scale,
                torch.full((count, 1, 2), 25.0, dtype=torch.float64),
                rtol=1e-5,
                atol=0,
            )
    if not compiled:  # the mutation
        monkeypatch.setattr(passes, "_largest_adjoint", lambda sites: math.inf)
        assert not torch.isfinite(evaluate(forest, lengths)[1]).all()
