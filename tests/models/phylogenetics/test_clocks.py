"""Rates of the edges under molecular clocks."""

import pyro.distributions as dist
import pytest
import torch

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics import StrictClock, UncorrelatedLogNormalClock
from bayeskit.models.phylogenetics._clocks import Clock


def test_relaxed_rates_have_the_mean_and_the_deviation_of_the_clock(limit):
    clock, edges, count = UncorrelatedLogNormalClock(), 3, 200_000
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(count, edges, generator=generator, dtype=torch.float64)
    values = {"clock_rate": torch.tensor(0.02), "rate_deviation": torch.tensor(0.5), "rate_scores": scores}
    rates = clock.rates(values, edges)
    assert rates.shape == (count, edges)
    z = (rates.mean(0) - 0.02) / (rates.std(0) / count**0.5)
    assert z.abs().max() < limit(edges)
    torch.testing.assert_close(rates.log(), dist_log_rates(scores), rtol=1e-6, atol=0)
    site = clock.sites(edges, torch.zeros((), dtype=torch.float64))["rate_scores"]
    torch.testing.assert_close(site.log_prob(scores), torch.distributions.Normal(0.0, 1.0).log_prob(scores).sum(-1))


def dist_log_rates(scores):
    return torch.tensor(0.02).log() - 0.125 + 0.5 * scores


def test_reference_prior_of_the_rate_has_no_unit():
    rate, length = torch.tensor(0.3, dtype=torch.float64), torch.tensor(40.0, dtype=torch.float64)
    found = Clock.rate_given_tree_length(length).log_prob(rate).exp()
    torch.testing.assert_close(found, (length / (torch.pi * rate)).sqrt() * (-rate * length).exp())
    in_days = Clock.rate_given_tree_length(365 * length).log_prob(rate / 365).exp()
    torch.testing.assert_close(in_days, 365 * found)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: StrictClock(0.0), "StrictClock, clock_rate: 0.0 does not lie above 0"),
        (lambda: StrictClock("fast"), "neither numbers nor a prior"),
        (lambda: StrictClock(float("nan")), "does not lie above 0"),
        (lambda: StrictClock(dist.Normal(0.0, 1.0)), "allows -1"),
        (lambda: UncorrelatedLogNormalClock(rate_deviation=-1.0), "rate_deviation: -1.0 does not lie above 0"),
    ],
)
def test_settings_are_checked(call, message):
    with pytest.raises(SettingsError, match=message) as error:
        call()
    assert "Remedy" in str(error.value)
