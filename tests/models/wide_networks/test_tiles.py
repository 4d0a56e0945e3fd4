"""Blocks, threads, files and tensors given by the caller do not change kernels."""

import numpy as np
import pytest
import torch
from torch import nn

from bayeskit.errors import OutputError, SettingsError, ShapeError
from bayeskit.models.wide_networks import _covariance as tiles
from bayeskit.models.wide_networks._kernels import infinite_width


def dense():
    layers = nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)
    return infinite_width(nn.Sequential(*layers), weight_variance=2.0, bias_variance=0.01)


def convolution(**options):
    layers = nn.Conv2d(2, 8, 3, **options), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)
    return infinite_width(nn.Sequential(*layers), weight_variance=2.0, bias_variance=0.01)


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(tiles, "SIZE", 49)
    monkeypatch.setattr(tiles, "GROUP", 3)


@pytest.mark.parametrize(("rows", "columns"), [(50, 50), (50, 23), (3, 3), (1, 40)])
@pytest.mark.parametrize("symmetric", [False, True])
def test_blocks_cover_each_pair_once(rows, columns, symmetric):
    columns = rows if symmetric else columns
    count = torch.zeros(rows, columns, dtype=torch.int64)
    for block in tiles.matrix_blocks(rows, columns, symmetric, 4):
        count[block.rows, block.columns] += 1
        if block.mirrored:
            count[block.columns, block.rows] += 1
    assert torch.equal(count, torch.ones_like(count))


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("two_sets", [False, True])
def test_files_tensors_and_blocks_hold_the_same_bits(two_sets, tmp_path):
    kernel, x = dense(), data(40, 5)
    x2 = data(17, 5, seed=1) if two_sets else None
    both = kernel.both(x, x2)
    shape = both.nngp.shape

    given = x.new_full(shape, float("nan")), x.new_full(shape, float("nan"))
    kernel.both(x, x2, out=given)
    assert torch.equal(given[0], both.nngp) and torch.equal(given[1], both.ntk)
    alone = x.new_full(shape, float("nan"))
    assert kernel.ntk(x, x2, out=alone) is alone
    assert torch.equal(alone, both.ntk)
    assert torch.equal(kernel.nngp(x, x2, out=alone), both.nngp)

    kernel.save(x, x2, nngp=tmp_path / "nngp.npy", ntk=tmp_path / "ntk.npy")
    assert np.array_equal(np.load(tmp_path / "nngp.npy"), both.nngp.numpy())
    assert np.array_equal(np.load(tmp_path / "ntk.npy", mmap_mode="r"), both.ntk.numpy())
    assert {path.name for path in tmp_path.iterdir()} == {"nngp.npy", "ntk.npy"}

    pieced = x.new_full(shape, float("nan"))
    for block in kernel.blocks(x, x2):
        pieced[block.rows, block.columns] = block.ntk
        if block.mirrored:
            pieced[block.columns, block.rows] = block.ntk.mT
    assert torch.equal(pieced, both.ntk)


@pytest.mark.usefixtures("small_blocks")
def test_symmetric_kernels_are_symmetric_to_the_last_bit_with_exact_diagonals():
    x = data(40, 5)
    x[7] = x[3] * (1 + 1e-9)
    for kernel in dense().both(x):
        assert torch.equal(kernel, kernel.mT)
    assert torch.equal(dense().both(x).ntk.diagonal(), dense().ntk_diagonal(x))


@pytest.mark.usefixtures("small_blocks")
def test_threads_change_neither_a_bit_nor_torch():
    kernel, x = dense(), data(64, 5)
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(kernel.both(x))
            for _ in kernel.blocks(x):
                assert torch.get_num_threads() == count
                assert torch.is_grad_enabled()
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0].nngp, found[1].nngp) and torch.equal(found[0].ntk, found[1].ntk)


@pytest.mark.parametrize("mode", ["zeros", "circular", "reflect", "replicate"])
@pytest.mark.parametrize(("stride", "dilation", "padding"), [(1, 1, 1), (2, 1, 2), (1, 2, 1), (3, 1, 0), (2, 2, 3)])
def test_windows_of_pairs_are_those_of_a_convolution_of_products(mode, stride, dilation, padding):
    """A linear layer's covariance is the average over channels of products of padded inputs, window by window."""
    layers = nn.Conv1d(2, 8, 3, stride, padding, dilation, padding_mode=mode), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    kernel = infinite_width(nn.Sequential(*layers, nn.Linear(8, 1)))
    x = data(3, 2, 9)
    options = {} if mode == "zeros" else {"mode": mode}
    padded = nn.functional.pad(x, (padding, padding), **({"mode": "constant"} if mode == "zeros" else options))
    windows = nn.functional.unfold(padded[:, :, None], (1, 3), dilation=(1, dilation), stride=(1, stride))
    mean = windows.mean(-1)
    torch.testing.assert_close(kernel.nngp(x), mean @ mean.mT / 6, rtol=1e-12, atol=1e-14)


def test_the_check_of_windows_notices_one_that_is_shifted(monkeypatch):
    from bayeskit.models.wide_networks._layers import Convolution

    original = Convolution._slide

    def shifted(self, x, axes, axis, width, name):
        return original(self, x, axes, axis, (width[0] + 1, width[1] - 1), name)

    monkeypatch.setattr(Convolution, "_slide", shifted)
    with pytest.raises(AssertionError):
        test_windows_of_pairs_are_those_of_a_convolution_of_products("zeros", 1, 1, 1)


def test_threads_share_wider_blocks_of_large_matrices(monkeypatch):
    kernel, x = dense(), data(60, 5)
    whole = kernel.both(x)
    cpu, before = torch.device("cpu"), torch.get_num_threads()
    monkeypatch.setattr(tiles, "SIZE", 16)
    monkeypatch.setattr(tiles, "WIDE_SIZE", 64)
    monkeypatch.setattr(tiles, "WIDE_BLOCKS", 4)
    try:
        torch.set_num_threads(1)
        assert tiles.shared_size(10**6, cpu) == 16
        torch.set_num_threads(2)
        assert tiles.shared_size(2 * 4 * 64 - 1, cpu) == 16 and tiles.shared_size(2 * 4 * 64, cpu) == 64
        for found, expected in zip(kernel.both(x), whole, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)
    finally:
        torch.set_num_threads(before)


def test_blocks_of_images_agree_with_one_block(monkeypatch):
    kernel, x = convolution(padding=1), data(9, 2, 3, 3)
    whole = kernel.both(x)
    monkeypatch.setattr(tiles, "SIZE", 4 * 81)
    for found, expected in zip(kernel.both(x), whole, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-14)


def test_a_missing_folder_or_an_error_leaves_no_file(tmp_path, monkeypatch):
    kernel, x = dense(), data(6, 5)
    with pytest.raises(OutputError, match="missing"):
        kernel.save(x, nngp=tmp_path / "missing" / "nngp.npy")
    with pytest.raises(SettingsError, match="at least one"):
        kernel.save(x)
    (tmp_path / "old.npy").write_bytes(b"old")
    monkeypatch.setattr(type(kernel.graph), "cross", lambda *arguments: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        kernel.save(x, nngp=tmp_path / "old.npy")
    assert [path.name for path in tmp_path.iterdir()] == ["old.npy"]
    assert (tmp_path / "old.npy").read_bytes() == b"old"


def test_tensors_that_do_not_fit_or_would_lose_gradients_are_refused():
    kernel, x = dense(), data(6, 5)
    with pytest.raises(ShapeError, match="out must be"):
        kernel.nngp(x, out=x.new_empty(6, 5))
    with pytest.raises(ShapeError, match="out must be"):
        kernel.ntk(x, out=torch.empty(6, 6))
    with pytest.raises(SettingsError, match="gradients"):
        kernel.nngp(x.requires_grad_(), out=torch.empty(6, 6, dtype=x.dtype))
