"""Matrices in blocks and in bands against dense linear algebra."""

import pytest
import torch

from bayeskit.inference.curvature._structure import Band, BandStencil, DiagonalBlocks, Stencil

FLOAT = torch.float64


def banded(size, width):
    """Return two symmetric positive definite matrices of a bandwidth, ``(2, m, m)``."""
    place = torch.arange(size)
    noise = torch.randn(2, size, size, generator=torch.Generator().manual_seed(size + width), dtype=FLOAT)
    noise = noise * ((place[:, None] - place).abs() <= width)
    return noise + noise.mT + 8 * width * torch.eye(size, dtype=FLOAT)


SIZES = [(1, 1), (2, 1), (3, 1), (7, 1), (8, 1), (13, 2), (40, 3), (17, 4), (64, 1), (5, 4)]


@pytest.mark.parametrize(("size", "width"), SIZES)
def test_a_band_is_the_matrix_that_its_products_hold(size, width):
    whole = banded(size, width)
    structure = Band(size, width, torch.device("cpu"))
    stencil = BandStencil(structure, width, torch.device("cpu"))
    products = torch.einsum("nij,cj->cni", whole, stencil.directions.to(FLOAT))
    band = structure.completed(stencil.blocks(-products))
    z = torch.randn(2, size, generator=torch.Generator().manual_seed(1), dtype=FLOAT)
    torch.testing.assert_close(structure.times(band, z), (whole @ z[..., None])[..., 0])
    factor, definite = structure.factorised(band)
    assert bool(definite.all())
    torch.testing.assert_close(structure.half_log_det(factor), 0.5 * whole.logdet())
    torch.testing.assert_close(structure.solved(factor, z), torch.linalg.solve(whole, z))
    # The trace of the inverse times any matrix of the same band.
    other = banded(size, width).flip(0)
    weights = stencil.weights(structure.inverted(band, factor))
    products = torch.einsum("nij,cj->cni", other, stencil.directions.to(FLOAT))
    trace = (torch.linalg.inv(whole) @ other).diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close((weights * products).sum((0, 2)), trace)


@pytest.mark.parametrize(("size", "width"), SIZES)
def test_spread_draws_have_the_inverse_as_covariance(size, width):
    whole = banded(size, width)[:1]
    structure = Band(size, width, torch.device("cpu"))
    stencil = BandStencil(structure, width, torch.device("cpu"))
    products = torch.einsum("nij,cj->cni", whole, stencil.directions.to(FLOAT))
    band = structure.completed(stencil.blocks(-products)).expand(size, -1, -1, -1, -1)
    root = structure.spread(structure.factorised(band)[0], torch.eye(size, dtype=FLOAT)).mT
    torch.testing.assert_close(root @ root.mT, torch.linalg.inv(whole[0]))


def test_an_indefinite_band_is_seen_apart_from_the_others():
    for width in (1, 2):
        structure = Band(9, width, torch.device("cpu"))
        band = structure.completed(torch.zeros(2, structure.count, 2, width, width, dtype=FLOAT))
        band = structure.identity(band) + torch.zeros_like(band)
        band[1, 3, 0] -= 2 * torch.eye(width, dtype=FLOAT)
        assert structure.factorised(band)[1].tolist() == [True, False]


def test_groups_of_unequal_size_are_completed():
    pattern = torch.eye(5, dtype=torch.bool)
    pattern[0, 3] = pattern[3, 0] = True
    blocks = DiagonalBlocks.joined(pattern)
    stencil = Stencil(pattern, blocks)
    whole = torch.diag(torch.arange(2.0, 7.0, dtype=FLOAT))
    whole[0, 3] = whole[3, 0] = 0.5
    products = torch.einsum("ij,cj->ci", whole, stencil.directions.to(FLOAT)).unsqueeze(1)
    found = blocks.completed(stencil.blocks(-products))
    factor, definite = blocks.factorised(found)
    z = torch.linspace(-1, 1, 5, dtype=FLOAT).unsqueeze(0)
    assert definite.tolist() == [True]
    assert blocks.description == "4 groups of up to 2"
    torch.testing.assert_close(blocks.solved(factor, z)[0], torch.linalg.solve(whole, z[0]))
    torch.testing.assert_close(blocks.half_log_det(factor)[0], 0.5 * whole.logdet())
    torch.testing.assert_close(blocks.times(found, z)[0], whole @ z[0])
    trace = (stencil.weights(blocks.inverted(found, factor)) * products).sum()
    torch.testing.assert_close(trace, torch.tensor(5.0, dtype=FLOAT))
