"""The table of four Gaussian processes: the numbers of each, and words that tell them apart."""

import math

import pytest
import torch
from matplotlib.figure import Figure
from torch import nn

from bayeskit.errors import DataError, JitterWarning, KernelError, ShapeError, UnknownNameError
from bayeskit.models.wide_networks import infinite_width
from bayeskit.models.wide_networks.gaussian_processes import (
    compare_gaussian_processes,
    nngp_posterior,
    ntk_ensemble,
    ntk_posterior,
    ntk_regression,
)

DOUBLE = torch.float64
KERNEL = infinite_width(nn.Sequential(nn.Linear(2, 8), nn.GELU(), nn.Linear(8, 1)), bias_variance=0.3)
NAMES = ["NNGP posterior", "NTK ensemble", "NTK regression", "NTK posterior"]


def data(features=2, outputs=()):
    generator = torch.Generator().manual_seed(1)
    x, y, x_new = (
        torch.randn(n, *shape, generator=generator, dtype=DOUBLE)
        for n, shape in ((7, (features,)), (7, outputs), (5, (features,)))
    )
    return x, y, x_new


@pytest.mark.parametrize("outputs", [(), (3,)])
def test_the_table_holds_what_each_says_alone(outputs):
    x, y, x_new = data(outputs=outputs)
    table = compare_gaussian_processes(KERNEL, x, y, x_new, noise_variance=0.1, learning_rate=0.5, time=4.0)
    alone = {
        "NNGP posterior": nngp_posterior(KERNEL, x, y, 0.1),
        "NTK ensemble": ntk_ensemble(KERNEL, x, y, learning_rate=0.5, time=4.0, ridge=0.1),
        "NTK regression": ntk_regression(KERNEL, x, y, 0.1),
        "NTK posterior": ntk_posterior(KERNEL, x, y, 0.1),
    }
    assert list(table.predictions) == NAMES
    frame = table.to_pandas()
    assert list(frame.columns) == ["process", "point", "output", "mean", "standard_deviation"]
    assert len(frame) == 4 * 5 * math.prod(outputs)
    for name, one in alone.items():
        mean = one.mean(x_new)
        assert table[name].mean.shape == (5, *outputs)
        torch.testing.assert_close(table[name].mean, mean, rtol=1e-10, atol=1e-12)
        rows = frame[frame["process"] == name]
        torch.testing.assert_close(torch.tensor(rows["mean"].to_numpy()), mean.flatten(), rtol=1e-10, atol=1e-12)
        assert (rows["point"].to_numpy() * max(math.prod(outputs), 1) + rows["output"].to_numpy()).tolist() == list(
            range(len(rows))
        )
        if name == "NTK regression":
            assert table[name].variance is None
            assert rows["standard_deviation"].isna().all()
        else:
            torch.testing.assert_close(table[name].variance, one.variance(x_new), rtol=1e-9, atol=1e-12)
            wanted = one.variance(x_new).sqrt().repeat_interleave(math.prod(outputs))
            torch.testing.assert_close(torch.tensor(rows["standard_deviation"].to_numpy()), wanted)


def test_in_the_limit_three_share_a_mean_and_none_a_variance():
    x, y, x_new = data()
    table = compare_gaussian_processes(KERNEL, x, y, x_new, noise_variance=0.1)
    distances = table.distances()
    assert list(distances.index) == list(distances.columns) == NAMES
    assert float(distances.iloc[1:, 1:].to_numpy().max()) < 1e-12
    assert float(distances.iloc[0, 1:].min()) > 1e-3
    gap = (table["NNGP posterior"].mean - table["NTK posterior"].mean).square().mean().sqrt()
    summary = table.summary().set_index("process")
    assert summary["distance"]["NTK posterior"] == pytest.approx(float(gap))
    spreads = [table[name].variance for name in NAMES if name != "NTK regression"]
    for i, one in enumerate(spreads):
        assert all(float((one - other).abs().min()) > 1e-4 for other in spreads[:i])
    assert summary["random"].nunique() == 4
    assert summary["random"]["NTK regression"] == "nothing"
    assert summary["trained"]["NNGP posterior"].startswith("nothing")
    assert "all layers" in summary["trained"]["NTK ensemble"]


def test_it_prints_what_is_random_and_what_is_trained():
    x, y, x_new = data()
    table = compare_gaussian_processes(KERNEL, x, y, x_new, noise_variance=0.1, time=3.0)
    text = repr(table)
    assert all(name in text for name in NAMES)
    assert "random: the initial weights" in text
    assert "gradient flow to time 3" in text
    assert "jitter" not in text
    with pytest.warns(JitterWarning, match="was added"):
        twice = compare_gaussian_processes(KERNEL, torch.cat([x, x]), torch.cat([y, y]), x_new)
    assert repr(twice).count("jitter 1e-") == 4


@pytest.mark.parametrize("features", [1, 2])
def test_it_draws_a_panel_a_process(features):
    x, y, x_new = data(features, (2,))
    kernel = infinite_width(nn.Sequential(nn.Linear(features, 8), nn.ReLU(), nn.Linear(8, 1)), bias_variance=0.3)
    table = compare_gaussian_processes(kernel, x, y, x_new, noise_variance=0.1)
    figure = table.plot(output=1)
    assert [ax.get_title() for ax in figure.axes] == [
        *NAMES[:2],
        "NTK regression\n(point estimate, no variance)",
        NAMES[3],
    ]
    lines = [ax.lines[0].get_xydata() for ax in figure.axes]
    order = x_new[:, 0].argsort() if features == 1 else table["NNGP posterior"].mean[:, 1].argsort()
    for one, line in zip(table, lines, strict=True):
        assert line[:, 1].tolist() == one.mean[order, 1].tolist()
    assert [len(ax.collections) for ax in figure.axes] == [1, 1, 0, 1]
    words = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert words == ["mean", "2 standard deviations", *["data"] * (features == 1)]
    axes = list(Figure().subplots(1, 4))
    assert table.plot(axes=axes) is None
    assert all(len(ax.lines) == 3 - features for ax in axes)
    with pytest.raises(ShapeError, match="output"):
        table.plot(output=2)
    with pytest.raises(ShapeError, match="4 axes"):
        table.plot(axes=axes[:2])


def test_bad_input_is_named():
    x, y, x_new = data()
    with pytest.raises(ShapeError, match="7 training inputs"):
        compare_gaussian_processes(KERNEL, x, y[:3], x_new)
    with pytest.raises(ShapeError, match="one shape"):
        compare_gaussian_processes(KERNEL, x, y, x_new[:, :1])
    with pytest.raises(DataError, match="not finite"):
        compare_gaussian_processes(KERNEL, x, y, x_new * math.nan)
    with pytest.raises(KernelError, match="not positive definite"):
        compare_gaussian_processes(KERNEL, x[[0, 0]], y[:2], x_new, max_jitter=0.0)
    with pytest.raises(UnknownNameError, match="NNGP posterior"):
        compare_gaussian_processes(KERNEL, x, y, x_new)["NNGP"]
