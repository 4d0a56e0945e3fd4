"""Genotypes as they are printed and plotted."""

import numpy as np
import pytest
import torch

from bayeskit.errors import ShapeError
from bayeskit.models.discrete._genotypes import NoisyGenotypes, plot_genotypes

OBSERVED = torch.tensor([[1.0, 0.0], [0.0, torch.nan], [1.0, 1.0]], dtype=torch.float64)


def test_what_is_printed_is_short_and_says_what_it_is():
    model = NoisyGenotypes(OBSERVED, 0.01, 0.2)
    assert repr(model) == (
        "NoisyGenotypes(3 cells, 2 mutations, 1 missing entries, false_positive_rate=0.01, false_negative_rate=0.2)"
    )
    assert "false_negative_rate=shape (4,))" in repr(NoisyGenotypes(OBSERVED, 0.01, torch.full((4,), 0.2)))
    posterior = model.enumerate()
    assert repr(posterior) == (
        f"GenotypePosterior(log_evidence={float(posterior.log_evidence):.6f}, {len(posterior.probabilities)} matrices "
        "of 3 cells and 2 mutations)"
    )


def test_a_plot_of_arrays_has_a_colour_bar_of_probabilities():
    probabilities = NoisyGenotypes(OBSERVED, 0.01, 0.2).marginals()
    axes = plot_genotypes(probabilities.numpy(), OBSERVED.numpy())
    (image,) = axes.images
    assert np.array_equal(image.get_array(), probabilities) and image.get_clim() == (0.0, 1.0)
    assert image.colorbar.ax.get_ylabel() == "probability to have the mutation"
    filled, hollow = (marks.get_offsets().data.tolist() for marks in axes.collections)
    assert sorted(filled) == [[0, 0], [0, 2], [1, 2]] and sorted(hollow) == [[0, 1], [1, 0]]
    with pytest.raises(ShapeError, match="cells, mutations"):
        plot_genotypes(probabilities[0], OBSERVED)
