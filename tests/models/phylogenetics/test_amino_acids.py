"""Published matrices of amino-acid exchangeabilities against IQ-TREE."""

import pytest
import torch

from bayeskit.models._substitution_names import AMINO_ACID_MATRICES
from bayeskit.models.phylogenetics import Alignment, AminoAcidModel, Tree, TreeModel

TREE = Tree.from_newick("((A:0.11,B:0.23):0.07,(C:0.31,D:0.05):0.13,(E:0.19,F:0.42):0.09);")
SEQUENCES = """RLKANYARVAGLLQNSMMSLIDLIELCSARIQRFHNMDYD RLKGNHARVKSLLQNSLLALVDLIELCSTRIQRFHNMDYD
    RPKDNEARVKGMSQDSLLRLTELIEVVSVRIQRWHNMPPD RPKANYARIKGLMQNSMLSLSDLLEICSVRIQRWHNIDYD
    RLKANYAPIKGILQKSMLSLVDLIELCSTRIQRWHNMDSD RIKANYARVKGLLKQAELTIVDLIELCKSKMQRWYNLDYN"""

# Log-likelihoods of IQ-TREE 2.0.7 for these sequences and branch lengths.
PUBLISHED = {
    "Poisson": -395.4237,
    "Dayhoff": -365.0995,
    "DCMut": -365.1312,
    "JTTDCMut": -356.7106,
    "mtREV": -365.8468,
    "mtMAM": -376.6252,
    "cpREV": -358.1048,
}


@pytest.mark.calibration
@pytest.mark.parametrize("matrix", PUBLISHED)
def test_likelihoods_as_in_iqtree(matrix, back_end):
    alignment = Alignment.from_sequences(dict(zip("ABCDEF", SEQUENCES.split(), strict=True)), data_type="protein")
    model = TreeModel(alignment, TREE, AminoAcidModel(matrix))
    assert model.log_likelihood(TREE.branch_lengths).item() == pytest.approx(PUBLISHED[matrix], abs=1e-4)


@pytest.mark.parametrize("matrix", AMINO_ACID_MATRICES)
def test_every_matrix_is_reversible_with_its_frequencies(matrix):
    model, like = AminoAcidModel(matrix), torch.zeros((), dtype=torch.float64)
    rates, frequencies = model.rate_matrix(like), model.frequencies(like)
    assert (frequencies > 0).all() and (rates - rates.diag().diag() >= 0).all()
    torch.testing.assert_close(frequencies @ rates, torch.zeros_like(frequencies), rtol=0, atol=1e-13)
    torch.testing.assert_close((frequencies * rates.diag()).sum(), like - 1.0, rtol=1e-13, atol=0)
