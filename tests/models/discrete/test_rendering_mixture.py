"""Rendering mixture: a convolutional layer against the list of all causes."""

import math

import numpy as np
import pytest
import torch

from bayeskit._core.randomness import new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete._rendering_mixture import RenderingMixture


def mixture(templates=3, shape=(2, 3), image=(5, 6), **settings):
    generator = new_generator(2, stream="templates")
    values = torch.randn(templates, *shape, generator=generator, dtype=torch.float64)
    return RenderingMixture(values, image, **{"noise_scale": 0.8, "on_probability": 0.3, **settings})


def listed(made, x):
    """Return the log joint density of an image and each cause, ``(2, templates, rows, columns)``."""
    count, height, width = made.templates.shape
    rows, columns = made.positions
    found = torch.empty(2, count, rows, columns, dtype=x.dtype)
    for k in range(count):
        for r in range(rows):
            for c in range(columns):
                for on in (0, 1):
                    mean = torch.zeros_like(x)
                    mean[r : r + height, c : c + width] = on * made.templates[k]
                    density = -0.5 * ((x - mean) / made.noise_scale) ** 2
                    density = (density - math.log(made.noise_scale) - 0.5 * math.log(2 * math.pi)).sum()
                    chance = made.on_probability if on else 1 - made.on_probability
                    found[on, k, r, c] = density + math.log(chance / (count * rows * columns))
    return found


def largest_errors(made, x, window):
    """Return those of maxima in windows and of the evidence."""
    features = made.feature_maps(x, window) + made.log_background(x).reshape(-1, 1, 1, 1)
    evidence, maxima, sums = made.log_evidence(x), [], []
    for row, image in enumerate(x):
        joint = listed(made, image)
        parts = joint.amax(0).unfold(1, window, window).unfold(2, window, window)
        maxima.append(float((features[row] - parts.amax((-1, -2))).abs().max()))
        sums.append(abs(float(evidence[row] - joint.flatten().logsumexp(0))))
    return max(maxima), max(sums)


@pytest.mark.parametrize("window", [1, 2, 4])
@pytest.mark.parametrize("on_probability", [0.05, 0.9])
def test_layer_is_max_sum_inference(window, on_probability):
    made = mixture(on_probability=on_probability)
    x, _ = made.sample(5, seed=0)
    assert max(largest_errors(made, x, window)) < 1e-11


@pytest.mark.parametrize("broken", ["bias", "sign", "flip"])
def test_a_broken_layer_is_seen(broken):
    class Broken(RenderingMixture):
        def weights(self):
            filters, biases = super().weights()
            changed = {"bias": (filters, biases * 0.99), "sign": (-filters, biases), "flip": (filters.flip(-1), biases)}
            return changed[broken]

    made = mixture()
    x, _ = made.sample(5, seed=0)
    made = Broken(made.templates, made.image_shape, 0.8, 0.3)
    assert min(largest_errors(made, x, 2)) > 1e-3


def test_most_probable_cause_is_the_largest_of_the_list():
    made = mixture(noise_scale=0.5)
    x, _ = made.sample(30, seed=1)
    found = made.most_probable(x)
    assert 5 < int(found.on.sum()) < 30
    for row, image in enumerate(x):
        joint = listed(made, image)
        here = joint[int(found.on[row]), found.template[row], found.position[row, 0], found.position[row, 1]]
        assert abs(float(here - joint.max())) < 1e-11


def test_evidence_integrates_to_one(limit):
    """Importance sampling of all images of two pixels from a wide normal distribution."""
    made = mixture(2, (1, 1), (1, 2))
    wide = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), 2.0)
    x = 2.0 * torch.randn(100_000, 1, 2, generator=new_generator(3), dtype=torch.float64)
    weight = (made.log_evidence(x) - wide.log_prob(x).sum((-1, -2))).exp()
    assert abs(float((weight.mean() - 1) / (weight.std() / len(x) ** 0.5))) < limit()


def test_draws_have_the_mixture_s_causes(limit):
    made = mixture(noise_scale=1e-9)
    x, causes = made.sample(4000, seed=2)
    assert torch.equal(x, made.sample(4000, seed=2)[0])
    found = made.most_probable(x)
    assert torch.equal(found.on, causes.on)
    assert torch.equal(found.template[causes.on], causes.template[causes.on])
    assert torch.equal(found.position[causes.on], causes.position[causes.on])
    assert abs(float(causes.on.double().mean()) - 0.3) < limit(4) * (0.3 * 0.7 / 4000) ** 0.5
    frequency = causes.template.bincount(minlength=3) / 4000
    assert float((frequency - 1 / 3).abs().max()) < limit(4) * (2 / 9 / 4000) ** 0.5


def test_sums_are_accurate_above_twenty():
    # Scores of 21 and 25: where softplus is taken to be its argument, the evidence is off by exp(-21).
    made = RenderingMixture(torch.full((1, 1, 1), 7.0, dtype=torch.float64), (1, 1))
    x = torch.tensor([45.5 / 7, 49.5 / 7], dtype=torch.float64).reshape(2, 1, 1)
    scores = made.scores(x).flatten()
    expected = scores + torch.log1p((-scores).exp())
    torch.testing.assert_close(made.log_evidence(x) - made.log_background(x), expected, rtol=0, atol=1e-13)
    assert float((expected - scores).abs().max()) > 1e-10


def test_data_of_any_library():
    made = RenderingMixture([[[3, 3]], [[3, -3]]], [4, 5])
    image = np.zeros((1, 4, 5), dtype=np.int64)
    image[0, 2, 1:3] = 3, -3
    assert made.most_probable(image).position.tolist() == [[2, 1]]
    single = RenderingMixture(torch.tensor([[[3.0, 3.0]], [[3.0, -3.0]]]), (4, 5))
    assert abs(float(single.log_evidence(image.astype(np.float64)) - made.log_evidence(image))) < 1e-4
    assert single.log_evidence(image).dtype == torch.float32


def test_bad_input():
    made = mixture()
    with pytest.raises(DataError, match="1 of 4 values of templates"):
        RenderingMixture(torch.tensor([[[1.0, 2.0], [math.nan, 1.0]]]), (5, 5))
    with pytest.raises(DataError, match="30 of 30 values of x"):
        made.log_evidence(torch.full((1, 5, 6), math.nan))
    for number in (-1, 0, 2.0):
        with pytest.raises(SettingsError, match="n must be"):
            made.sample(number, seed=0)
    for shape in (5, (5,), (5, 6, 7), (5.0, 6), ("a", 6)):
        with pytest.raises(SettingsError, match="image_shape"):
            RenderingMixture(made.templates, shape)
    with pytest.raises(ShapeError, match="templates, height, width"):
        RenderingMixture(torch.zeros(2, 3), (5, 5))
    with pytest.raises(ShapeError, match="do not fit"):
        RenderingMixture(torch.zeros(1, 3, 3), (2, 5))
    with pytest.raises(SettingsError, match="noise_scale"):
        mixture(noise_scale=0.0)
    with pytest.raises(SettingsError, match="on_probability"):
        mixture(on_probability=1.0)
    with pytest.raises(SettingsError, match="do not tile 4 by 4"):
        made.feature_maps(torch.zeros(1, 5, 6, dtype=torch.float64), 3)
    with pytest.raises(ShapeError, match="5, 6"):
        made.log_evidence(torch.zeros(1, 5, 5, dtype=torch.float64))
