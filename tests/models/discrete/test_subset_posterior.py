"""What a spike-and-slab posterior says of coefficients and responses: against mixtures worked out by hand."""

import math
import pickle
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from scipy import stats

from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.discrete import spike_and_slab
from bayeskit.models.discrete.spike_and_slab import IndependentInclusion, SpikeAndSlabRegression

SETTINGS = {"slab_scale": 0.7, "intercept_scale": 3.0, "noise_shape": 2.5, "noise_rate": 1.5}
REGRESSION = SpikeAndSlabRegression(**SETTINGS, inclusion=IndependentInclusion(0.4))


def data(n=12, p=3, offset=0.0):
    generator = torch.Generator().manual_seed(5)
    x = offset + torch.randn(n, p, generator=generator, dtype=torch.float64)
    noise = torch.randn(n, generator=generator, dtype=torch.float64)
    return x, 1.0 + 1.5 * (x[:, 0] - offset) - 0.5 * (x[:, 1] - offset) + noise


def by_hand(x, y, regression=REGRESSION):
    """Return each subset's log weight, mean, scale matrix and degrees of freedom, by the normal equations."""
    x, y = x.numpy(), y.numpy()
    n, p = x.shape
    rows = []
    for number in range(2**p):
        subset = [j for j in range(p) if number >> j & 1]
        places = [0, *(j + 1 for j in subset)]
        design = np.column_stack([np.ones(n), x[:, subset]])
        scales = np.array([regression.intercept_scale] + [regression.slab_scale] * len(subset))
        covariance = np.linalg.inv(design.T @ design + np.diag(scales**-2))
        mean, freedom = covariance @ design.T @ y, 2 * regression.noise_shape + n
        total = np.eye(n) + design @ np.diag(scales**2) @ design.T
        rate = regression.noise_rate + 0.5 * y @ np.linalg.solve(total, y)
        weight = -0.5 * np.linalg.slogdet(total)[1] - 0.5 * freedom * math.log(rate)
        weight += len(subset) * math.log(0.4) + (p - len(subset)) * math.log(0.6)
        full_mean, full = np.zeros(p + 1), np.zeros((p + 1, p + 1))
        full_mean[places], full[np.ix_(places, places)] = mean, 2 * rate / freedom * covariance
        rows.append((weight, full_mean, full, 2 * rate / freedom))
    weights = np.exp([row[0] for row in rows] - max(row[0] for row in rows))
    return weights / weights.sum(), *(np.array([row[i] for row in rows]) for i in (1, 2, 3)), freedom


def moments(x, y, new):
    """Return the covariance of coefficients and standard deviations of responses."""
    weights, means, scales, noise, freedom = by_hand(x, y)
    wider = freedom / (freedom - 2)
    centred = means - weights @ means
    covariance = np.einsum("k,kij->ij", weights, wider * scales + centred[:, :, None] * centred[:, None])
    design = np.column_stack([np.ones(len(new)), new.numpy()])
    return covariance, np.sqrt(wider * weights @ noise + np.einsum("mi,ij,mj->m", design, covariance, design))


@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_moments_are_those_of_the_mixture(offset):
    x, y = data(offset=offset)
    posterior, new = REGRESSION.posterior(x, y), offset + torch.eye(3, dtype=torch.float64)
    covariance, deviations = moments(x, y, new)
    assert np.abs(posterior.covariance.numpy() - covariance).max() < 1e-9 * max(1.0, np.abs(covariance).max())
    assert np.abs(posterior.standard_deviations.numpy() - np.sqrt(np.diag(covariance))).max() < 1e-9
    assert np.abs(posterior.predictive_deviations(new).numpy() - deviations).max() < 1e-9
    wrong = replace(posterior, noise_rate_each=1.001 * posterior.noise_rate_each)
    assert np.abs(wrong.standard_deviations.numpy() - np.sqrt(np.diag(covariance))).max() > 1e-5
    assert np.abs(wrong.predictive_deviations(new).numpy() - deviations).max() > 1e-5


def test_a_large_offset_of_predictors_does_not_reach_the_slopes():
    """Where the intercept is free, slopes do not know of it."""
    regression = SpikeAndSlabRegression(intercept_scale=1e9)
    x, y = data()
    near, far = (regression.posterior(x + shift, y).standard_deviations for shift in (0.0, 1e5))
    assert float((near[1:] - far[1:]).abs().max()) < 1e-8


@pytest.mark.parametrize("probability", [0.5, 0.9, 0.999])
def test_intervals_end_at_quantiles_of_the_mixture(probability):
    x, y = data()
    weights, means, scales, noise, freedom = by_hand(x, y)
    posterior, tail = REGRESSION.posterior(x, y), (1 - probability) / 2
    points = 0
    for j, ends in enumerate(posterior.intervals(probability).tolist()):
        sd = np.sqrt(scales[:, j, j])
        for end, level in zip(ends, (tail, 1 - tail), strict=True):
            density = weights @ np.where(sd > 0, stats.t.cdf(end, freedom, means[:, j], np.where(sd > 0, sd, 1)), 0)
            at_zero = weights[sd == 0].sum()
            if end == 0:
                points += 1
                assert density < level <= density + at_zero
            else:
                assert abs(density + at_zero * (end > 0) - level) < 1e-10
    assert points or probability != 0.5
    design = np.array([1.0, 0.3, -2.0, 0.5])
    low, high = posterior.predictive_intervals(design[None, 1:], probability)[0].tolist()
    scale = np.sqrt(noise + np.einsum("i,kij,j->k", design, scales, design))
    for end, level in ((low, tail), (high, 1 - tail)):
        assert abs(weights @ stats.t.cdf(end, freedom, means @ design, scale) - level) < 1e-10


def test_draws_have_the_moments_of_the_mixture(limit):
    x, y = data()
    posterior, num_draws = REGRESSION.posterior(x, y), 100_000
    draws = posterior.sample(num_draws, seed=3)
    weights, means, scales, noise, freedom = by_hand(x, y)
    exact = np.einsum("k,kij->ij", weights, freedom / (freedom - 2) * scales + means[:, :, None] * means[:, None])
    values = draws["coefficients"].numpy()

    def largest(values):
        squares = values[:, :, None] * values[:, None]
        z = [
            (found.mean(0) - expected) / (found.std(0) / math.sqrt(num_draws))
            for found, expected in (
                (values, weights @ means),
                (squares, exact),
                (draws["inclusion"].numpy(), posterior.inclusion_probabilities.numpy()),
                (draws["noise_scale"].numpy() ** 2, weights @ noise * freedom / (freedom - 2)),
            )
        ]
        return max(float(np.abs(each).max()) for each in z)

    assert largest(values) < limit(24)
    shuffled = np.column_stack([values[:, 0], values[np.random.default_rng(0).permutation(num_draws), 1:]])
    assert largest(shuffled) > limit(24)  # the intercept depends on the slopes, which makes about 15
    assert ((values[:, 1:] == 0) == (draws["inclusion"].numpy() == 0)).all()
    again = posterior.sample(num_draws, seed=torch.Generator().manual_seed(1))
    assert not torch.equal(again["coefficients"], draws["coefficients"])
    assert torch.equal(posterior.sample(5, seed=3)["noise_scale"], posterior.sample(5, seed=3)["noise_scale"])


def test_data_of_other_libraries_and_the_table():
    x, y = data()
    frame = pd.DataFrame(x.numpy(), columns=["dose", "age", "sex"]).assign(y=y.numpy())
    posterior = REGRESSION.posterior(frame[["dose", "age", "sex"]], frame.y)
    plain = REGRESSION.posterior(x, y)
    assert torch.equal(posterior.probabilities, plain.probabilities)
    assert torch.equal(posterior.predict(frame[["dose", "age", "sex"]]), plain.predict(x))
    table = posterior.to_pandas()
    assert list(table.index) == ["intercept", "dose", "age", "sex"]
    assert list(plain.to_pandas().index) == ["intercept", "x[0]", "x[1]", "x[2]"]
    assert np.array_equal(table["sd"], posterior.standard_deviations) and table.inclusion["intercept"] == 1
    assert np.array_equal(table[["lower", "upper"]], posterior.intervals())
    axes = posterior.plot(ax=Figure().subplots())
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dose", "age", "sex"]
    assert [bar.get_width() for bar in axes.patches] == posterior.inclusion_probabilities.tolist()
    assert posterior.plot(["a", "b", "c"]).get_xlabel() == "posterior probability of being in"
    assert repr(posterior) == f"SubsetPosterior(log_evidence={posterior.log_evidence:.6f}, 8 subsets of 3 predictors)"
    restored = pickle.loads(pickle.dumps(posterior))
    assert torch.equal(restored.covariance, posterior.covariance)
    assert {"Tensor", "Any"}.isdisjoint(spike_and_slab.__all__)
    counts = (10 * x).round()
    assert torch.equal(
        REGRESSION.posterior(counts.long(), y).probabilities, REGRESSION.posterior(counts, y).probabilities
    )
    with pytest.raises(ShapeError, match="2 names are given for 3"):
        posterior.to_pandas(["a", "b"])
    for probability in (0.0, 1.0):
        with pytest.raises(SettingsError, match="probability"):
            posterior.intervals(probability)
    with pytest.raises(ShapeError, match=r"\(m, 3\)"):
        posterior.predictive_intervals(x[:, :2])
    with pytest.raises(SettingsError, match="num_draws"):
        posterior.sample(0)
