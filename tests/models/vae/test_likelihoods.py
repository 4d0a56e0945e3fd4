"""Likelihoods against sums over their levels, torch's own distributions, and their draws."""

import math

import pytest
import torch
from torch.distributions import Bernoulli, Independent, Normal

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError
from bayeskit.models.vae import likelihoods
from bayeskit.models.vae._distributions import DiscretizedLogisticMixture


def float64(*values):
    return torch.tensor(values, dtype=torch.float64)


def levels(count):
    return torch.arange(count, dtype=torch.float64) / (count - 1)


class OpenTails(DiscretizedLogisticMixture):
    """Leave out the tails beyond the outermost levels."""

    def _log_mass(self, value):
        half = 0.5 / (self.num_levels - 1)
        upper, lower = (((value + sign * half - self.loc) / self.log_scale.exp()).sigmoid() for sign in (1.0, -1.0))
        return (upper - lower).log()


def excess_mass(cls, count, components):
    """Return how far the masses of all levels are from summing to one, at worst over many parameters."""
    loc, log_scale = torch.meshgrid(float64(-20, -0.1, 0.0, 0.37, 1.0, 30), float64(-9, -5, -2, 0, 4), indexing="ij")
    if components == 1:
        masses = cls(loc, log_scale, num_levels=count).log_prob(levels(count).view(-1, 1, 1)).exp()
    else:
        logits = torch.linspace(-3, 3, loc.numel(), dtype=torch.float64)
        mixture = cls(loc.reshape(-1), log_scale.reshape(-1), logits, count)
        masses = mixture.log_prob(levels(count)).exp()
    return float((masses.sum(0) - 1).abs().max())


@pytest.mark.parametrize("components", [1, 30])
@pytest.mark.parametrize("count", [2, 17, 256])
def test_masses_of_all_levels_sum_to_one(count, components):
    assert excess_mass(DiscretizedLogisticMixture, count, components) < 1e-12


def test_the_sum_notices_open_tails():
    assert excess_mass(OpenTails, 256, 1) > 1e-3


def test_mass_of_a_level_is_a_difference_of_distribution_functions():
    loc, log_scale = float64(0.2, 0.5, 0.8), float64(-3.0, -2.0, -1.0)
    x = float64(30, 100, 200) / 255
    upper, lower = (((x + sign / 510 - loc) / log_scale.exp()).sigmoid() for sign in (1, -1))
    expected = (upper - lower).log()
    torch.testing.assert_close(DiscretizedLogisticMixture(loc, log_scale).log_prob(x), expected, rtol=0, atol=1e-10)


def test_far_tails_have_finite_densities_and_gradients_in_float32():
    loc = torch.tensor([-50.0, 60.0, 0.0], requires_grad=True)
    log_scale = torch.tensor([-6.0, -6.0, 20.0], requires_grad=True)
    log_prob = DiscretizedLogisticMixture(loc, log_scale).log_prob(torch.tensor([1.0, 0.0, 128 / 255]))
    log_prob.sum().backward()
    assert log_prob.isfinite().all() and loc.grad.isfinite().all() and log_scale.grad.isfinite().all()
    assert loc.grad[0] > 0 > loc.grad[1]


@pytest.mark.parametrize("components", [1, 3])
def test_draws_follow_the_masses(components, limit):
    if components == 1:
        pixel = DiscretizedLogisticMixture(float64(0.9).squeeze(), float64(-2.0).squeeze(), num_levels=9)
    else:
        pixel = DiscretizedLogisticMixture(
            float64(0.1, 0.5, 1.1), float64(-3, -2, -2), float64(0, 1, 0.5), num_levels=9
        )
    with global_stream(new_generator(0)):
        draws = pixel.expand((2,)).sample((20_000,)).reshape(-1)
    assert draws.dtype == torch.float64
    masses = pixel.log_prob(levels(9)).exp()
    shares = torch.stack([(draws == level).double().mean() for level in levels(9)])
    assert abs(float(shares.sum()) - 1) < 1e-12
    error = (masses * (1 - masses) / len(draws)).sqrt()
    assert float(((shares - masses) / error).abs().max()) < limit(9)
    torch.testing.assert_close(pixel.mean, (levels(9) * masses).sum(), rtol=0, atol=1e-12)


def test_a_mixture_weighs_its_components():
    loc, log_scale, logits = float64(0.1, 0.8), float64(-3, -1), float64(0.0, 1.0)
    x = float64(77) / 255
    parts = torch.stack([DiscretizedLogisticMixture(m, s).log_prob(x[0]) for m, s in zip(loc, log_scale, strict=True)])
    expected = (logits.log_softmax(-1) + parts).logsumexp(-1)
    torch.testing.assert_close(DiscretizedLogisticMixture(loc, log_scale, logits).log_prob(x[0]), expected)


def test_parameters_stand_along_the_first_dimension_of_a_datum():
    outputs = torch.randn(5, 2 * 3, 4, 4, generator=torch.Generator().manual_seed(0))
    fn = likelihoods.HeteroscedasticGaussian()(outputs, event_dim=3)
    assert fn.event_shape == (3, 4, 4) and fn.batch_shape == (5,)
    torch.testing.assert_close(fn.mean, outputs[:, :3])
    torch.testing.assert_close(fn.stddev, outputs[:, 3:].exp() + 1e-3)
    mixture = likelihoods.DiscretizedLogistic(num_components=2)
    outputs = torch.randn(5, 6 * 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = (torch.arange(7, dtype=torch.float64) * 30) / 255
    log_prob = mixture(outputs, event_dim=1).log_prob(x)
    parts = outputs.view(5, 6, 7)
    by_hand = DiscretizedLogisticMixture(parts[:, :2].mT, parts[:, 2:4].mT, parts[:, 4:].mT).log_prob(x).sum(-1)
    torch.testing.assert_close(log_prob, by_hand)


def test_bernoulli_has_the_form_that_objectives_compute_fast():
    fn = likelihoods.Bernoulli()(torch.zeros(2, 3, requires_grad=True), event_dim=1)
    assert isinstance(fn, Independent) and isinstance(fn.base_dist, Bernoulli)
    assert "logits" in fn.base_dist.__dict__ and "probs" not in fn.base_dist.__dict__
    intensities = torch.tensor([0.25, 0.5, 1.0])
    torch.testing.assert_close(fn.log_prob(intensities), torch.full((2,), 3 * math.log(0.5)))


@pytest.mark.parametrize("learn", [True, False])
def test_gaussian_with_one_scale(learn):
    likelihood = likelihoods.Gaussian(0.3, learn=learn).double()
    assert len(list(likelihood.parameters())) == learn and "log_scale" in likelihood.state_dict()
    means, x = float64(0.0, 1.0), float64(0.5, 0.5)
    scale = likelihood.log_scale.exp()
    torch.testing.assert_close(likelihood(means, 1).log_prob(x), Normal(means, scale).log_prob(x).sum())
    assert abs(float(scale.detach()) - 0.3) < 1e-6


@pytest.mark.parametrize(
    ("likelihood", "x", "message"),
    [
        (likelihoods.Bernoulli(), [0.0, 2.0], "range from 0 to 2"),
        (likelihoods.Bernoulli(), [0.0, math.nan], "1 values that are not finite"),
        (likelihoods.Gaussian(), [0.0, math.inf], "not finite"),
        (likelihoods.HeteroscedasticGaussian(), [math.nan, math.nan], "2 values"),
        (likelihoods.DiscretizedLogistic(), [0.0, 0.5], "between the 256 levels"),
        (likelihoods.DiscretizedLogistic(17), [0.0, -1.0], "range from -1"),
    ],
)
def test_impossible_values_are_named(likelihood, x, message):
    with pytest.raises(DataError, match=message):
        likelihood.check(torch.tensor(x))


def test_levels_pass_in_both_precisions():
    for dtype in (torch.float32, torch.float64):
        likelihoods.DiscretizedLogistic().check(torch.arange(256, dtype=dtype) / 255)
        likelihoods.DiscretizedLogistic(17).check(torch.arange(17, dtype=dtype) / 16)


@pytest.mark.parametrize(
    "make",
    [
        lambda: likelihoods.Gaussian(0.0),
        lambda: likelihoods.HeteroscedasticGaussian(-1.0),
        lambda: likelihoods.DiscretizedLogistic(1),
        lambda: likelihoods.DiscretizedLogistic(num_components=0),
    ],
)
def test_impossible_settings_are_refused(make):
    with pytest.raises(SettingsError):
        make()
