"""Relaxed permutations: maps against loops and inverses, densities against Jacobians, quadrature and draws."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from torch.distributions import Gumbel, Normal, kl_divergence

from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError
from bayeskit.models.discrete.permutations import (
    GibbsPermutation,
    GumbelSinkhorn,
    RoundedPermutation,
    SequentialPermutation,
    StickBreakingPermutation,
    StickBreakingTransform,
    all_permutations,
    doubly_stochastic,
    nearest_permutation,
    permutation_matrix,
    permutations,
    sinkhorn,
)
from bayeskit.models.discrete.permutations import _relaxations as stick_breaking


def normal(*shape, seed=0, scale=1.5):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def zeros(*shape):
    return torch.zeros(shape, dtype=torch.float64)


def broken_one_by_one(fractions):
    """Fill a matrix entry by entry between its least and its greatest possible value."""
    size = len(fractions) + 1
    matrix = zeros(size, size)
    for m in range(size - 1):
        for n in range(size - 1):
            row, column = 1 - matrix[m, :n].sum(), 1 - matrix[:m, n].sum()
            later = (1 - matrix[:m, n + 1 :].sum(0)).sum()
            least, greatest = torch.clamp(row - later, min=0), torch.minimum(row, column)
            matrix[m, n] = least + fractions[m, n] * (greatest - least)
        matrix[m, -1] = 1 - matrix[m, :-1].sum()
    matrix[-1] = 1 - matrix[:-1].sum(0)
    return matrix


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
def test_sticks_are_broken_as_in_the_definition_and_the_inverse_is_exact(size):
    logits = normal(6, size - 1, size - 1)
    transform = StickBreakingTransform(temperature=0.7)
    matrices = transform(logits)
    assert bool(doubly_stochastic.check(matrices).all())
    expected = torch.stack([broken_one_by_one((one / 0.7).sigmoid()) for one in logits])
    torch.testing.assert_close(matrices, expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(transform.inv(matrices), logits, rtol=0, atol=1e-12)


def test_the_map_is_onto_all_doubly_stochastic_matrices():
    matrices = sinkhorn(normal(50, 6, 6), 2000).exp()
    transform = StickBreakingTransform(temperature=0.3)
    torch.testing.assert_close(transform(transform.inv(matrices)), matrices, rtol=0, atol=1e-12)


def gap_to_jacobian(size, temperature=0.4):
    """Return how far the log determinant is from that of the Jacobian found by automatic differentiation."""
    logits = normal(size - 1, size - 1, seed=size)
    transform = StickBreakingTransform(temperature)
    jacobian = torch.autograd.functional.jacobian(lambda x: transform(x)[:-1, :-1], logits)
    expected = torch.linalg.slogdet(jacobian.reshape((size - 1) ** 2, -1))[1]
    return float((transform.log_abs_det_jacobian(logits, transform(logits)) - expected).abs())


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_determinant_is_that_of_the_jacobian(size):
    assert gap_to_jacobian(size) < 1e-9
    cached = StickBreakingTransform(0.4, cache_size=1)
    logits = normal(size - 1, size - 1)
    matrix = cached(logits)
    again = StickBreakingTransform(0.4).log_abs_det_jacobian(logits, matrix)
    torch.testing.assert_close(cached.log_abs_det_jacobian(logits, matrix), again, rtol=0, atol=1e-10)


def test_mutation_bounds_without_the_columns_to_come_are_noticed(monkeypatch):
    # The simplex has this determinant row by row: it forgets that later columns cannot take more than they have left.
    original = stick_breaking.taken_and_left

    def of_rows_alone(matrix):
        taken, left = original(matrix)
        rest = 1 - matrix.cumsum(-1)[..., :-1, :-1]
        return taken, torch.maximum(left, rest)

    monkeypatch.setattr(stick_breaking, "taken_and_left", of_rows_alone)
    assert min(gap_to_jacobian(size) for size in (3, 4, 5, 6)) > 1e-2


def test_gradients_of_matrices_and_lengths():
    logits = normal(3, 3).requires_grad_()
    assert torch.autograd.gradcheck(stick_breaking.break_sticks, logits)
    # At equal sticks, where the map has kinks, gradients stay finite.
    flat = zeros(4, 4).requires_grad_()
    matrix, lengths = stick_breaking.break_sticks(flat)
    (gradient,) = torch.autograd.grad(matrix.exp().square().sum() + lengths.sum(), flat)
    assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_density_of_two_by_two_integrates_to_one(temperature):
    broken = StickBreakingPermutation(zeros(1, 1) + 0.3, zeros(1, 1) + 0.8, temperature)
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.legendre.leggauss(400))
    x = (nodes + 1) / 2
    matrices = torch.stack([torch.stack([x, 1 - x], -1), torch.stack([1 - x, x], -1)], -2)
    density = broken.log_prob(matrices).exp()
    assert abs(float((density * weights).sum() / 2) - 1) < 1e-9
    # Half of the entries are above the median, the fraction at the mean of the logits.
    median = 1 / (1 + math.exp(-0.3 / temperature))
    x = (nodes + 1) / 2 * median
    matrices = torch.stack([torch.stack([x, 1 - x], -1), torch.stack([1 - x, x], -1)], -2)
    assert abs(float((broken.log_prob(matrices).exp() * weights).sum() / 2) * median - 0.5) < 1e-9


def densities_of_three_by_three(broken, num_points):
    """Return densities of 3 x 3 matrices whose first four entries fill a cube, zero where others are negative."""
    corner = torch.quasirandom.SobolEngine(4, scramble=True, seed=0).draw(num_points, dtype=torch.float64)
    corner = corner.reshape(-1, 2, 2)
    right, below = 1 - corner.sum(-1, keepdim=True), 1 - corner.sum(-2, keepdim=True)
    last = 1 - right.sum(-2, keepdim=True)
    matrices = torch.cat([torch.cat([corner, right], -1), torch.cat([below, last], -1)], -2)
    inside = (matrices >= 0).all(-1).all(-1)
    densities = zeros(num_points)
    densities[inside] = broken.log_prob(matrices[inside]).exp()
    return densities


def test_density_of_three_by_three_integrates_to_one(limit):
    broken = StickBreakingPermutation(normal(2, 2, scale=0.2), zeros(2, 2) + 0.6, 0.8, validate_args=False)
    density = densities_of_three_by_three(broken, 1_000_000)
    # Independent points would have this error; those of a Sobol sequence lie closer.
    error = float(density.std() / math.sqrt(len(density)))
    assert error < 0.01 and abs(float(density.mean()) - 1) < limit() * error


def test_density_is_the_change_of_variables_and_survives_low_temperatures():
    loc, scale = normal(4, 4), normal(4, 4, seed=1).exp()
    broken = StickBreakingPermutation(loc, scale, 0.5)
    with global_stream(new_generator(0)):
        matrices = broken.rsample((7,))
    transform = StickBreakingTransform(0.5)
    logits = transform.inv(matrices)
    log_normal = Normal(loc, scale).log_prob(logits).sum((-1, -2))
    expected = log_normal - transform.log_abs_det_jacobian(logits, matrices)
    torch.testing.assert_close(broken.log_prob(matrices), expected, rtol=0, atol=1e-8)
    torch.testing.assert_close(broken.log_prob(matrices.clone()), expected, rtol=0, atol=1e-8)
    cold = StickBreakingPermutation(normal(29, 29).float(), torch.ones(29, 29), 0.01)
    with global_stream(new_generator(1)):
        matrices = cold.rsample((5,))
    assert matrices.dtype == torch.float32 and bool((matrices == 0).any())
    assert bool(cold.log_prob(matrices).isfinite().all()) and bool((matrices.amax(-1) > 0.99).float().mean() > 0.3)
    corner = permutation_matrix(torch.arange(5), torch.float64)
    assert float(broken.log_prob(corner)) == -math.inf


def determinant_in_long_arithmetic(logits, temperature):
    """Break sticks as in the definition, with 300 digits."""
    with localcontext() as context:
        context.prec = 300
        rows, columns, total = [Decimal(1)] * len(logits), [Decimal(1)] * len(logits), 0.0
        for m, line in enumerate(logits.tolist()):
            outside = 1 - sum(rows[:m], Decimal(0))  # what the last column has left
            for n, logit in enumerate(line):
                least = max(Decimal(0), rows[m] - sum(columns[n + 1 :], outside))
                length = min(rows[m], columns[n]) - least
                fraction = 1 / (1 + (-Decimal(logit) / Decimal(temperature)).exp())
                entry = least + fraction * length
                total += float((length * fraction * (1 - fraction) / Decimal(temperature)).ln())
                rows[m], columns[n] = rows[m] - entry, columns[n] - entry
        return total


def largest_gap_at_low_temperature(dtype, temperature):
    logits = normal(4, 4, 4, seed=6, scale=1.0).to(dtype)
    transform = StickBreakingTransform(temperature, cache_size=1)
    found = transform.log_abs_det_jacobian(logits, transform(logits)).tolist()
    return max(abs(a - determinant_in_long_arithmetic(b, temperature)) for a, b in zip(found, logits, strict=True))


@pytest.mark.parametrize(("dtype", "room"), [(torch.float32, 1e-4), (torch.float64, 1e-8)])
def test_determinant_is_that_of_long_arithmetic_down_to_the_stated_temperature(dtype, room):
    assert largest_gap_at_low_temperature(dtype, 0.05) < room
    assert largest_gap_at_low_temperature(torch.float64, 0.005) > 1  # beyond what the docstring promises


def test_a_matrix_with_nan_has_no_density():
    broken = StickBreakingPermutation(zeros(2, 2), zeros(2, 2) + 1, validate_args=False)
    assert bool(broken.log_prob(zeros(3, 3) + math.nan).isnan())


def test_sequential_permutations_are_validated():
    decisions = SequentialPermutation(zeros(2, 2))
    for wrong in ([0, 0, 1], [0, 1], [0, 1, 2, 3]):
        with pytest.raises(ValueError, match="support|shape|log_prob|size"):
            decisions.log_prob(torch.tensor(wrong))


def test_pathwise_gradient_of_broken_sticks_is_unbiased(limit):
    # E of the square of an entry of a 2 x 2 matrix, its derivative by quadrature, and draws.
    loc = zeros(200_000, 1, 1).add_(0.4).requires_grad_()
    with global_stream(new_generator(0)):
        matrices = StickBreakingPermutation(loc, torch.ones_like(loc), 0.7).rsample()
    (gradient,) = torch.autograd.grad(matrices[:, 0, 0].square().sum(), loc)
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.hermite_e.hermegauss(80))
    fraction = ((0.4 + nodes) / 0.7).sigmoid()
    expected = (2 * fraction**2 * (1 - fraction) / 0.7 * weights).sum() / math.sqrt(2 * math.pi)
    z = (gradient.mean() - expected) / (gradient.std() / math.sqrt(gradient.numel()))
    assert abs(float(z)) < limit()


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_limit_of_low_temperatures(size, limit):
    broken = StickBreakingPermutation(normal(size - 1, size - 1), zeros(size - 1, size - 1) + 0.8, 1e-4)
    listed = all_permutations(size)
    masses = broken.limit.log_prob(listed).exp()
    assert abs(float(masses.sum()) - 1) < 1e-12
    with global_stream(new_generator(size)):
        rounded = nearest_permutation(broken.sample((20_000,)))
        drawn = broken.sample_permutations((20_000,))
    for draws in (rounded, drawn):
        found = (draws.unsqueeze(1) == listed).all(-1).double().mean(0)
        z = (found - masses) / (masses * (1 - masses) / len(draws)).sqrt().clamp_min(1e-12)
        assert float(z[masses * len(draws) > 20].abs().max()) < limit(2 * len(listed))


def test_nearly_uniform_decisions_are_those_of_uniform_permutations():
    size = 5
    decisions = SequentialPermutation.near_uniform(size, torch.float64)
    matrices = permutation_matrix(all_permutations(size), torch.float64)
    for m in range(size - 1):
        for n in range(size - 1):
            still_open = (matrices[:, m, :n].sum(-1) == 0) & (matrices[:, :m, n].sum(-1) == 0)
            expected = matrices[still_open, m, n].mean()
            torch.testing.assert_close(decisions.logits[m, n].sigmoid(), expected, rtol=0, atol=1e-12)
    two = SequentialPermutation.near_uniform(2, torch.float64).log_prob(all_permutations(2)).exp()
    torch.testing.assert_close(two, zeros(2) + 0.5)


def masses_of_two(rounded):
    """Integrate a density over 2 x 2 matrices nearer to one permutation, then to the other, and over the hole."""
    gauss, gauss_weights = (torch.as_tensor(part) for part in np.polynomial.legendre.leggauss(24))
    # What rounding looks at is the difference of the two diagonals; in the other directions the density is smooth.
    towards = torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=torch.float64) / 2
    others = [
        torch.tensor(m, dtype=torch.float64) / 2 for m in ([[1, 1], [1, 1]], [[1, 1], [-1, -1]], [[1, -1], [1, -1]])
    ]
    step = 0.3
    grid = (torch.arange(12, dtype=torch.float64) - 5.5) * step
    edge = 1 - rounded.temperature
    masses = []
    for low, high in ((edge, edge + 3.0), (-edge - 3.0, -edge), (-edge, edge)):
        along = low + (gauss + 1) / 2 * (high - low)
        points = torch.cartesian_prod(along, grid, grid, grid)
        matrices = sum(points[:, k, None, None] * direction for k, direction in enumerate([towards, *others]))
        density = rounded.log_prob(matrices + 0.5).exp().reshape(24, -1).sum(1) * step**3
        masses.append(float((density * gauss_weights).sum() * (high - low) / 2))
    return masses


@pytest.mark.calibration
def test_rounded_density_of_two_by_two_integrates_to_one():
    loc = torch.tensor([[0.7, 0.35], [0.2, 0.6]], dtype=torch.float64)
    rounded = RoundedPermutation(loc, zeros(2, 2) + 0.5, temperature=0.6)
    first, second, hole = masses_of_two(rounded)
    # The difference of the diagonals is normal with the standard deviation of four entries.
    expected = float(Normal(0.0, 1.0).cdf(torch.tensor(float((loc[0, 0] + loc[1, 1] - loc[0, 1] - loc[1, 0]) / 1.0))))
    assert hole == 0 and abs(first - expected) < 1e-5 and abs(second - (1 - expected)) < 1e-5


def test_mutation_a_determinant_of_one_power_too_few_is_noticed(monkeypatch):
    original = RoundedPermutation.log_prob
    monkeypatch.setattr(RoundedPermutation, "log_prob", lambda self, x: original(self, x) + math.log(self.temperature))
    rounded = RoundedPermutation(zeros(2, 2) + 0.5, zeros(2, 2) + 0.5, temperature=0.6)
    assert abs(sum(masses_of_two(rounded)) - 1) > 0.3


@pytest.mark.parametrize("temperature", [0.2, 0.9, 1.0])
def test_rounded_density_is_the_change_of_variables(temperature):
    loc, scale = normal(5, 5, scale=0.3), normal(5, 5, seed=1, scale=0.3).exp()
    rounded = RoundedPermutation(loc, scale, temperature)
    with global_stream(new_generator(0)):
        matrices = rounded.rsample((50,))
    with global_stream(new_generator(0)):
        unrounded = RoundedPermutation(loc, scale, 1.0).rsample((50,))
    assert torch.equal(nearest_permutation(matrices), nearest_permutation(unrounded))
    expected = Normal(loc, scale).log_prob(unrounded).sum((-1, -2)) - 25 * math.log(temperature)
    torch.testing.assert_close(rounded.log_prob(matrices), expected, rtol=0, atol=1e-9)


def test_all_draws_have_a_density_in_single_precision():
    cold = RoundedPermutation(torch.full((6, 6), 1 / 6), torch.ones(6, 6), 0.01)
    with global_stream(new_generator(0)):
        matrices = cold.rsample((20_000,))
    assert bool(cold.log_prob(matrices).isfinite().all())
    inside = cold.log_prob(matrices[:100] / 2 + matrices[:100].flip(-1) / 2)
    assert bool((inside == -math.inf).float().mean() > 0.9)


def test_rounding_near_gibbs_has_its_probabilities():
    # Of two rows: a normal distribution function in place of the logistic one, nowhere off by more than 0.023.
    for gap in (0.5, 1.0, 2.0, 4.0):
        log_weights = zeros(2, 2) + gap / 2 * torch.eye(2)
        near = RoundedPermutation.near_gibbs(log_weights)
        assert float(near.scale.square().sum()) == pytest.approx(math.pi**2 / 3, abs=1e-12)
        chance = float(Normal(0.0, 1.0).cdf(torch.tensor(gap / float(near.scale.square().sum()) ** 0.5)))
        assert abs(chance - float(GibbsPermutation(log_weights).marginals[0, 0])) < 0.023
    weights = normal(4, 6, 6)
    with global_stream(new_generator(0)):
        found = permutation_matrix(RoundedPermutation.near_gibbs(weights).sample_permutations((4000,))).mean(0)
        half = permutation_matrix(RoundedPermutation.near_gibbs(weights / 2).sample_permutations((4000,))).mean(0)
    exact = GibbsPermutation(weights).marginals
    distance, of_half = (float((p - exact).square().sum((-1, -2)).mean()) for p in (found, half))
    assert distance < 0.05 and of_half > 5 * distance


def test_gradient_of_rounding_takes_the_permutation_as_given():
    loc = normal(4, 4).requires_grad_()
    with global_stream(new_generator(0)):
        matrix = RoundedPermutation(loc, torch.ones_like(loc), 0.3).rsample()
    weights = normal(4, 4, seed=2)
    (gradient,) = torch.autograd.grad((weights * matrix).sum(), loc)
    torch.testing.assert_close(gradient, 0.3 * weights, rtol=0, atol=1e-14)


def test_gumbel_sinkhorn_is_doubly_stochastic_and_has_no_density():
    scores = normal(2, 5, 5)
    relaxed = GumbelSinkhorn(scores, temperature=1.0, num_iterations=1000).expand((3, 2))
    with global_stream(new_generator(0)):
        matrices = relaxed.rsample((4,))
        drawn = relaxed.sample_permutations((4,))
    assert matrices.shape == (4, 3, 2, 5, 5) and drawn.shape == (4, 3, 2, 5)
    torch.testing.assert_close(matrices.sum(-1), torch.ones_like(matrices[..., 0]), rtol=0, atol=1e-10)
    torch.testing.assert_close(matrices.sum(-2), torch.ones_like(matrices[..., 0]), rtol=0, atol=1e-14)
    assert bool(permutations.check(drawn).all())
    with pytest.raises(ModelError, match="no density in closed form"):
        relaxed.log_prob(matrices)
    with global_stream(new_generator(0)):
        cold = nearest_permutation(GumbelSinkhorn(scores, 0.02, 1000).rsample((30,)))
    with global_stream(new_generator(0)):
        assert torch.equal(cold, GumbelSinkhorn(scores, 0.02).sample_permutations((30,)))


def test_draws_of_gumbel_sinkhorn_are_in_the_stated_support_with_its_defaults():
    for temperature in (0.05, 0.5, 1.0):
        relaxed = GumbelSinkhorn(zeros(10, 10), temperature)
        with global_stream(new_generator(0)):
            matrices = relaxed.rsample((500,))
        assert bool(relaxed.support.check(matrices).all())
        torch.testing.assert_close(matrices.sum(-2), torch.ones_like(matrices[..., 0]), rtol=0, atol=1e-13)
        off = (matrices.sum(-1) - 1).abs().amax(-1)
        expected = {0.05: (0.1, 0.7, 0.95), 0.5: (0.01, 0.25, 0.45), 1.0: (0.01, 0.0, 0.05)}[temperature]
        assert expected[1] <= float((off > expected[0]).double().mean()) <= expected[2]


def test_sinkhorn_keeps_ratios_and_scales_away_rows_and_columns():
    log_weights = normal(5, 5)
    scaled = sinkhorn(log_weights, 1000)
    rows, columns = normal(2, 5, seed=3)
    torch.testing.assert_close(sinkhorn(log_weights + rows[:, None] + columns, 1000), scaled, rtol=0, atol=1e-10)
    difference = scaled - log_weights
    assert float((difference - difference[:1] - difference[:, :1] + difference[0, 0]).abs().max()) < 1e-10


@pytest.mark.parametrize("prior", [0.3, 1.0, 1.7])
def test_divergence_of_noise_is_that_of_gumbel_distributions(prior):
    relaxed = GumbelSinkhorn(normal(3, 4, 4), temperature=0.7)
    ends = ((relaxed.log_scores / 0.7, 1 / 0.7), (zeros(4, 4), 1 / prior))
    expected = kl_divergence(*(Gumbel(loc, torch.full_like(loc, scale)) for loc, scale in ends)).sum((-1, -2))
    torch.testing.assert_close(relaxed.noise_divergence(prior), expected, rtol=0, atol=1e-10)


def test_impossible_pairs_add_nothing_to_the_divergence_and_extremes_do_not_overflow():
    scores = normal(3, 3)
    finite = GumbelSinkhorn(scores).noise_divergence(0.5)
    of_one = GumbelSinkhorn(scores[:1, :1]).noise_divergence(0.5)
    hidden = scores.clone()
    hidden[0, 0] = -math.inf
    hidden.requires_grad_()
    divergence = GumbelSinkhorn(hidden).noise_divergence(0.5)
    torch.testing.assert_close(divergence.detach(), finite - of_one, rtol=0, atol=1e-12)
    divergence.backward()
    assert bool(hidden.grad.isfinite().all()) and float(hidden.grad[0, 0]) == 0
    assert float(GumbelSinkhorn(zeros(2, 2), temperature=0.005).noise_divergence(1.0)) == math.inf


def test_patterns_without_a_permutation_are_refused():
    crowded = zeros(2, 3, 3)
    crowded[1, :2, 1:] = -math.inf
    for make in (GumbelSinkhorn, GibbsPermutation):
        with pytest.raises(DataError, match="1 of 2 matrices of log_.* leave no permutation"):
            make(crowded)


def test_bad_input_is_refused():
    for temperature in (0, -1.0, math.nan, "cold"):
        for make in (
            lambda t: StickBreakingTransform(t),
            lambda t: RoundedPermutation(torch.eye(2), torch.ones(2, 2), t),
            lambda t: GumbelSinkhorn(torch.eye(2), t),
            lambda t: StickBreakingPermutation(torch.eye(2), torch.ones(2, 2), t),
        ):
            with pytest.raises(SettingsError, match="temperature"):
                make(temperature)
    with pytest.raises(SettingsError, match=r"\(0, 1\], not 1.5"):
        RoundedPermutation(torch.eye(2), torch.ones(2, 2), 1.5)
    for make in (RoundedPermutation, StickBreakingPermutation):
        with pytest.raises(ShapeError, match=r"\(2, 3\)"):
            make(torch.zeros(2, 3), torch.ones(2, 3))
        with pytest.raises(DataError, match="1 of 4 entries of scale"):
            make(torch.zeros(2, 2), torch.ones(2, 2) - torch.eye(2) * torch.tensor([1, 0]))
    with pytest.raises(DataError, match=r"log_scores is -inf everywhere in 1 row\(s\), the first is row 1"):
        GumbelSinkhorn(torch.tensor([[1.0, 1.0], [0.0, 0.0]]).log())
    with pytest.raises(SettingsError, match="num_iterations"):
        sinkhorn(torch.zeros(2, 2), 0)
    with pytest.raises(DataError, match="1 of 4 logits are NaN"):
        SequentialPermutation(torch.tensor([[math.nan, 0], [0, 0]]))
    with pytest.raises(ValueError, match="support"):
        StickBreakingPermutation(torch.zeros(1, 1), torch.ones(1, 1), validate_args=True).log_prob(torch.ones(2, 2))


def test_doubly_stochastic_matrices_are_recognised():
    matrices = torch.stack([torch.eye(3), torch.full((3, 3), 1 / 3), torch.ones(3, 3), 2 * torch.eye(3) - 1 / 3])
    assert doubly_stochastic.check(matrices).tolist() == [True, True, False, False]
    assert permutations.check(torch.tensor([[0, 1, 2], [2, 0, 1], [0, 0, 1]])).tolist() == [True, True, False]
