"""Ising grids against lists of all states, Kaufman's closed form, and conformal field theory."""

import itertools
import math

import pyro
import pyro.distributions as dist
import pytest
import torch

import bayeskit as bk
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete import _ising as ising_grid
from bayeskit.models.discrete import _ising as transfer
from bayeskit.models.discrete._ising import CRITICAL_COUPLING, IsingGrid, kaufman_log_partition

SHAPES = [(3, 4, False), (4, 3, False), (1, 6, False), (5, 1, False), (1, 1, False)]
TORI = [(3, 3, True), (3, 4, True), (4, 3, True), (2, 5, True), (3, 2, True), (2, 2, True)]


def float64(value):
    return torch.tensor(value, dtype=torch.float64)


def random_grid(height, width, periodic, batch=(2,), scale=1.0):
    generator = torch.Generator().manual_seed(10 * height + width)

    def normal(*shape):
        return scale * torch.randn(*batch, *shape, generator=generator, dtype=torch.float64)

    missing = 0 if periodic else 1
    return IsingGrid(normal(height, width - missing), normal(height - missing, width), normal(height, width), periodic)


def slow_potential(grid, spins):
    """Add up one bond after the other, for a grid without a batch."""
    height, width = grid.event_shape
    total = 0.0
    for i, j in itertools.product(range(height), range(width)):
        total += float(grid.field[i, j] * spins[i, j])
        if j + 1 < width or grid.periodic:
            total += float(grid.horizontal[i, j] * spins[i, j] * spins[i, (j + 1) % width])
        if i + 1 < height or grid.periodic:
            total += float(grid.vertical[i, j] * spins[i, j] * spins[(i + 1) % height, j])
    return total


def partition_error(grid):
    listed = grid.log_potential(grid.enumerate_support()).logsumexp(0)
    return float((grid.log_partition - listed).abs().max())


# --- The partition function


@pytest.mark.parametrize(("height", "width", "periodic"), SHAPES + TORI)
def test_potential_adds_up_bonds_and_fields(height, width, periodic):
    grid = random_grid(height, width, periodic, batch=())
    states = grid.enumerate_support()[:: max(1, 2 ** (height * width) // 40)]
    expected = float64([slow_potential(grid, spins) for spins in states])
    torch.testing.assert_close(grid.log_potential(states), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("height", "width", "periodic"), SHAPES + TORI)
def test_partition_function_is_the_sum_over_all_states(height, width, periodic):
    assert partition_error(random_grid(height, width, periodic)) < 1e-12


@pytest.mark.parametrize("periodic", [False, True])
def test_mutation_a_bond_of_the_wrong_sign_is_noticed(monkeypatch, periodic):
    cross = transfer._cross_bonds
    monkeypatch.setattr(transfer, "_cross_bonds", lambda message, coupling: cross(message, -coupling))
    assert partition_error(random_grid(3, 4, periodic)) > 0.1


@pytest.mark.parametrize("coupling", [0.1, CRITICAL_COUPLING, 0.9, 5.0])
@pytest.mark.parametrize(("height", "width"), [(2, 2), (3, 4), (4, 3), (6, 5), (7, 7)])
def test_homogeneous_torus_has_kaufmans_partition_function(height, width, coupling):
    weak, strong = float64(0.7 * coupling), float64(coupling)
    zeros = torch.zeros(height, width, dtype=torch.float64)
    for vertical, horizontal in ((strong, strong), (strong, weak), (weak, strong)):
        grid = IsingGrid(horizontal.expand(height, width), vertical.expand(height, width), zeros, periodic=True)
        exact = kaufman_log_partition(height, width, vertical, horizontal)
        assert abs(float(grid.log_partition / exact) - 1) < 1e-13


def test_closed_form_is_batched_and_has_energy_as_its_slope():
    couplings = torch.tensor([0.2, 0.6], dtype=torch.float64, requires_grad=True)
    total = kaufman_log_partition(4, 5, couplings)
    assert total.shape == (2,)
    (energy,) = torch.autograd.grad(total.sum(), couplings)
    grid = IsingGrid.homogeneous(4, 5, couplings.detach(), periodic=True)
    expected = grid.expectations()
    bonds = expected.horizontal.sum((-2, -1)) + expected.vertical.sum((-2, -1))
    torch.testing.assert_close(energy, bonds, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_closed_form_at_the_ends_of_its_domain(dtype):
    couplings = torch.tensor([1e-30, 1e-8, 1e-6, 100.0, 1000.0], dtype=dtype, requires_grad=True)
    found = kaufman_log_partition(4, 5, couplings)
    # All states are alike without coupling, and two are left of a strong one, of forty bonds.
    size = couplings.detach().double()
    exact = torch.where(size < 1, 20 * math.log(2) + 20 * size**2, 40 * size + math.log(2))
    assert found.dtype == dtype
    assert float((found.detach().double() / exact - 1).abs().max()) < 2 * torch.finfo(dtype).eps
    (slope,) = torch.autograd.grad(found.sum(), couplings)
    torch.testing.assert_close(slope.double(), torch.where(size < 1, 40 * size, 40.0), rtol=1e-6, atol=1e-13)


def test_slope_of_the_closed_form_on_the_critical_line():
    vertical = torch.linspace(0.1, 1.5, 60, dtype=torch.float64)
    horizontal = 0.5 * (1 / (2 * vertical).sinh()).asinh()
    couplings = (
        torch.cat([vertical, float64([CRITICAL_COUPLING])]),
        torch.cat([horizontal, float64([CRITICAL_COUPLING])]),
    )
    couplings = [x.requires_grad_() for x in couplings]
    slopes = torch.autograd.grad(kaufman_log_partition(2, 3, *couplings).sum(), couplings)
    down, right = (x.detach()[:, None, None].expand(-1, 2, 3) for x in couplings)
    expected = IsingGrid(right, down, torch.zeros_like(down), periodic=True).expectations()
    for slope, bonds in zip(slopes, (expected.vertical, expected.horizontal), strict=True):
        torch.testing.assert_close(slope, bonds.sum((-2, -1)), rtol=0, atol=1e-12)


def test_critical_torus_approaches_conformal_field_theory():
    # Per site 2 G / pi + log(2) / 2 (Onsager), and beyond it log((theta2 + theta3 + theta4) / (2 eta)) at tau = i.
    catalan, nome = 0.915965594177219015, math.exp(-math.pi)
    theta2 = 2 * sum(nome ** ((n + 0.5) ** 2) for n in range(6))
    theta3 = 1 + 2 * sum(nome ** (n * n) for n in range(1, 6))
    theta4 = 1 + 2 * sum((-1) ** n * nome ** (n * n) for n in range(1, 6))
    eta = nome ** (1 / 12) * math.prod(1 - nome ** (2 * n) for n in range(1, 12))
    limit_value = math.log((theta2 + theta3 + theta4) / (2 * eta))
    side = 256
    beyond = float(kaufman_log_partition(side, side, CRITICAL_COUPLING))
    beyond -= side**2 * (2 * catalan / math.pi + 0.5 * math.log(2))
    # Corrections are of order 1 / side**2.
    assert abs(beyond - limit_value) < 10 / side**2


def test_wide_grids_and_their_symmetries():
    grid = random_grid(12, 9, False, batch=())
    turned = IsingGrid(grid.vertical.mT, grid.horizontal.mT, grid.field.mT)
    flipped = IsingGrid(grid.horizontal, grid.vertical, -grid.field)
    for other in (turned, flipped):
        assert abs(float(other.log_partition - grid.log_partition)) < 1e-11
    alone = IsingGrid(grid.horizontal * 0, grid.vertical * 0, grid.field)
    assert abs(float(alone.log_partition - (2 * grid.field.cosh()).log().sum())) < 1e-10


# --- Expectations


@pytest.mark.parametrize(("height", "width", "periodic"), [*SHAPES[:3], *TORI[:4]])
def test_gradient_of_log_partition_is_expectations(height, width, periodic):
    grid = random_grid(height, width, periodic)
    states = grid.enumerate_support()
    probability = grid.log_prob(states).exp()[..., None, None]
    found = grid.expectations()
    horizontal, vertical = (states * states.roll(-1, dim) for dim in (-1, -2))
    if not periodic:
        horizontal, vertical = horizontal[..., :-1], vertical[..., :-1, :]
    for gradient, products in zip(found, (horizontal, vertical, states), strict=True):
        torch.testing.assert_close(gradient, (probability * products).sum(0), rtol=0, atol=1e-12)
    assert torch.equal(grid.mean, found.spins)


def test_log_prob_is_differentiable_by_parameters():
    coupling, field = float64([0.3, -0.2]).requires_grad_(), float64([0.4, -0.1]).requires_grad_()
    spins = torch.ones(4, 3, dtype=torch.float64)
    spins[1] = -1
    assert torch.autograd.gradcheck(
        lambda k, h: IsingGrid.homogeneous(4, 3, k, h).log_prob(spins), (coupling, field), atol=1e-8, rtol=1e-6
    )


def test_every_log_prob_of_a_grid_has_its_gradient():
    coupling = float64(0.4).requires_grad_()
    grid, spins = IsingGrid.homogeneous(3, 3, coupling), torch.ones(3, 3, dtype=torch.float64)
    with torch.no_grad():
        grid.log_prob(spins)
    expected = grid.expectations()
    exact = float((12 - expected.horizontal.sum() - expected.vertical.sum()).detach())
    for _ in range(2):
        (slope,) = torch.autograd.grad(grid.log_prob(spins), coupling)
        assert abs(float(slope) - exact) < 1e-12


def test_expectations_are_differentiable():
    coupling, field = float64(0.3).requires_grad_(), float64(0.2)
    slope = torch.autograd.functional.jacobian(lambda k: IsingGrid.homogeneous(2, 3, k, field).mean, coupling)
    grid = IsingGrid.homogeneous(2, 3, coupling.detach(), field)
    states = grid.enumerate_support()
    probability = grid.log_prob(states).exp()
    bonds = grid.log_potential(states) - field * states.sum((-2, -1))
    bonds = (bonds - probability @ bonds) / coupling.detach()
    torch.testing.assert_close(slope, ((probability * bonds)[:, None, None] * states).sum(0), rtol=0, atol=1e-12)
    assert not grid.mean.requires_grad


# --- Draws


def largest_z(grid, sampler, count=20_000):
    """Return the largest |z| of the frequencies of states that are expected at least ten times, and their number."""
    with global_stream(new_generator(3)):
        draws = sampler.sample((count,))
    states = grid.enumerate_support()
    exact = grid.log_prob(states).exp()
    place = 2 ** torch.arange(math.prod(grid.event_shape))
    code, listed = (((x > 0).flatten(-2) * place).sum(-1) for x in (draws, states))
    worst, comparisons = 0.0, 0
    for b in range(exact.shape[1]):
        often = exact[:, b] * count >= 10
        share = torch.bincount(code[:, b], minlength=len(states))[listed[often, b]] / count
        p = exact[often, b]
        worst = max(worst, float(((share - p) / (p * (1 - p) / count).sqrt()).abs().max()))
        comparisons += int(often.sum())
    return worst, comparisons


@pytest.mark.parametrize(("height", "width", "periodic"), [(3, 3, False), (2, 4, False), (3, 3, True), (4, 2, True)])
def test_draws_have_the_exact_distribution(height, width, periodic, limit):
    grid = random_grid(height, width, periodic, scale=0.5)
    z, comparisons = largest_z(grid, grid)
    assert comparisons > 40 and z < limit(comparisons)


def test_mutation_draws_of_another_coupling_are_noticed(limit):
    grid = random_grid(3, 3, True, scale=0.5)
    z, comparisons = largest_z(grid, IsingGrid(grid.horizontal, -grid.vertical, grid.field, True))
    assert z > 2 * limit(comparisons)


def test_draws_of_a_large_grid_have_its_expectations(limit):
    grid = IsingGrid.homogeneous(20, 10, float64([0.3, CRITICAL_COUPLING]), field=0.05)
    with global_stream(new_generator(0)):
        spins = grid.sample((2000,))
    assert spins.shape == (2000, 2, 20, 10)
    exact = grid.expectations()
    for found, expected in (
        (spins, exact.spins),
        (spins[..., :-1] * spins[..., 1:], exact.horizontal),
        (spins[..., :-1, :] * spins[..., 1:, :], exact.vertical),
    ):
        z = (found.mean(0) - expected) / ((1 - expected.square()) / 2000).sqrt()
        assert float(z.abs().max()) < limit(z.numel())


# --- Pseudo-likelihood


@pytest.mark.parametrize(("height", "width", "periodic"), [*SHAPES, *TORI])
def test_pseudolikelihood_is_that_of_each_spin_given_the_others(height, width, periodic):
    grid = random_grid(height, width, periodic, batch=())
    with global_stream(new_generator(1)):
        spins = grid.sample()
    expected = 0.0
    for i, j in itertools.product(range(height), range(width)):
        other = spins.clone()
        other[i, j] *= -1
        expected -= math.log1p(math.exp(float(grid.log_prob(other) - grid.log_prob(spins))))
    assert abs(float(grid.log_pseudolikelihood(spins)) - expected) < 1e-10


# --- As a distribution in Pyro


def test_distribution_expands_and_lives_in_a_plate():
    grid = random_grid(3, 3, False, batch=())
    wide = grid.expand([4])
    assert wide.batch_shape == (4,) and wide.event_shape == (3, 3)
    with global_stream(new_generator(0)), pyro.plate("grids", 4):
        spins = pyro.sample("spins", grid)
    assert spins.shape == (4, 3, 3)
    torch.testing.assert_close(wide.log_prob(spins), grid.log_prob(spins), rtol=0, atol=1e-14)
    assert grid.sample((0,)).shape == (0, 3, 3)
    assert wide.enumerate_support(expand=False).shape == (512, 1, 3, 3)


def test_spins_are_validated_wherever_the_distribution_goes():
    grid, bad = IsingGrid.homogeneous(2, 2, float64(0.4)), float64([[0.0, 1.0], [1.0, 0.0]])
    assert not IsingGrid.homogeneous(2, 2, float64(0.4), validate_args=False).expand([3])._validate_args

    def model():
        coupling = pyro.sample("coupling", dist.Normal(float64(0.0), 1.0))
        with pyro.plate("grids", 3):
            pyro.sample("spins", IsingGrid.homogeneous(2, 2, coupling), obs=bad.expand(3, 2, 2))

    for call in (
        lambda: grid.expand([3]).log_prob(bad),
        lambda: grid.log_potential(bad),
        lambda: grid.log_pseudolikelihood(bad),
        lambda: grid.log_pseudolikelihood(bad.new_ones(1, 2)),
        lambda: bk.Target.from_pyro(model),
    ):
        with pytest.raises(ValueError, match=r"support|event_shape"):
            call()


def test_parameters_take_the_widest_dtype():
    single, double = torch.zeros(2, 2), torch.zeros(2, 2, dtype=torch.float64)
    grid = IsingGrid(single[:, 1:], double[1:], single)
    assert grid.field.dtype == grid.log_partition.dtype == grid.sample().dtype == torch.float64
    assert IsingGrid.homogeneous(2, 2, 0.4, field=float64(0.1)).log_partition.dtype == torch.float64


def test_grids_too_many_for_the_memory_are_counted(monkeypatch):
    monkeypatch.setattr(ising_grid, "_MAX_WEIGHTS", 2**12)
    torus = IsingGrid.homogeneous(3, 4, float64([0.1] * 16), periodic=True)
    assert torus.log_partition.shape == (16,)  # 4 * 64 numbers each
    for call in (torus.expectations, torus.sample):
        with pytest.raises(SettingsError, match="16 periodic grids of 3 by 4 need .* numbers at once"):
            call()


def test_single_precision_stays_single():
    grid = IsingGrid.homogeneous(4, 4, torch.tensor(0.4))
    assert grid.log_partition.dtype == grid.sample().dtype == torch.float32
    assert grid.log_prob(grid.sample()).dtype == torch.float32


def test_the_target_of_an_unknown_coupling():
    with global_stream(new_generator(0)):
        spins = IsingGrid.homogeneous(6, 4, float64(0.3)).sample()

    def model():
        coupling = pyro.sample("coupling", dist.Normal(float64(0.0), 1.0))
        pyro.sample("spins", IsingGrid.homogeneous(6, 4, coupling), obs=spins)

    target = bk.Target.from_pyro(model)
    position = torch.linspace(-1, 1, 5, dtype=torch.float64).unsqueeze(1)
    grid = IsingGrid.homogeneous(6, 4, position[:, 0])
    torch.testing.assert_close(target.log_likelihood(position), grid.log_prob(spins), rtol=0, atol=1e-12)
    _, gradient = target.value_and_grad(position)
    bonds = float((spins[1:] * spins[:-1]).sum() + (spins[:, 1:] * spins[:, :-1]).sum())
    expected = sum(x.sum((-2, -1)) for x in grid.expectations()[:2])
    torch.testing.assert_close(gradient[:, 0], bonds - expected - position[:, 0], rtol=0, atol=1e-10)


# --- Bad input


FLAT = torch.zeros(17, 17)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: IsingGrid(torch.zeros(3, 3), torch.zeros(2, 3), torch.zeros(3, 3)), ShapeError, "horizontal.*3, 2"),
        (lambda: IsingGrid(torch.zeros(3, 3), torch.zeros(2, 3), torch.zeros(3, 3), True), ShapeError, "vertical"),
        (lambda: IsingGrid(torch.zeros(3), torch.zeros(2, 3), torch.zeros(3, 3)), ShapeError, "matrices"),
        (
            lambda: IsingGrid(torch.zeros(2, 3, 2), torch.zeros(5, 2, 3), torch.zeros(3, 3)),
            ShapeError,
            "do not broadcast",
        ),
        (lambda: IsingGrid(*[torch.zeros(1, 4)] * 3, periodic=True), ShapeError, "two sites a side"),
        (lambda: IsingGrid.homogeneous(0, 3, torch.tensor(0.1)), SettingsError, "height"),
        (lambda: IsingGrid(FLAT[:, 1:], FLAT[1:], FLAT).log_partition, SettingsError, "free grid supports at most 16"),
        (lambda: IsingGrid(FLAT, FLAT, FLAT, True).sample(), SettingsError, "periodic grid supports at most 10"),
        (lambda: IsingGrid(FLAT[:, 1:], FLAT[1:], FLAT).enumerate_support(), SettingsError, f"= {2**289} states"),
        (lambda: IsingGrid.homogeneous(2, 2, torch.tensor(math.nan)), ValueError, "horizontal"),
        (lambda: IsingGrid.homogeneous(2, 2, torch.tensor(0.1)).log_prob(torch.zeros(2, 2)), ValueError, "support"),
        (lambda: kaufman_log_partition(4, 4, -0.1), SettingsError, "must be positive"),
        (lambda: kaufman_log_partition(1, 4, 0.1), SettingsError, "height"),
        (lambda: kaufman_log_partition(4, 4, math.inf), SettingsError, "positive and finite"),
        (lambda: kaufman_log_partition(4, 4, torch.ones(2), torch.ones(3)), ShapeError, r"\(2,\) and \(3,\)"),
        (lambda: IsingGrid.homogeneous(2, 2, torch.tensor(math.inf)), DataError, "horizontal has an entry of size inf"),
        (lambda: IsingGrid.homogeneous(2, 2, 0.1, torch.tensor(-math.inf)), DataError, "field"),
        (lambda: IsingGrid.homogeneous(2, 2, torch.tensor(1)), DataError, "horizontal is torch.int64"),
        (lambda: IsingGrid(torch.zeros(0, 2), torch.zeros(0, 3), torch.zeros(0, 3)), ShapeError, "without sites"),
        (lambda: IsingGrid.homogeneous(2, 2, 0.1).sample((-1,)), SettingsError, "sample_shape"),
        (lambda: IsingGrid.homogeneous(2, 2, 0.1).sample((2.5,)), SettingsError, "sample_shape"),
    ],
)
def test_bad_input_is_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()
