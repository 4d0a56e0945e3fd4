"""Ising models on grids with exact partition functions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import reduce
from typing import NamedTuple

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid, pad

from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.extend import whole_number
from bayeskit.models.discrete._inputs import Shape, digits_of

# Kaufman's partition function of the homogeneous torus.

#: Critical coupling of the infinite square lattice.
CRITICAL_COUPLING = 0.5 * math.asinh(1.0)


def kaufman_log_partition(
    height: int, width: int, vertical: Tensor | float, horizontal: Tensor | float | None = None
) -> Tensor:
    r"""Return the exact log partition function of a homogeneous torus of any size without field (Kaufman).

    Parameters
    ----------
    height, width : int
        At least 2. A side of 2 has two bonds between each pair of neighbours.
    vertical, horizontal : Tensor or float
        Couplings in units of the temperature, positive, shape ``(*batch)``; ``horizontal`` defaults to ``vertical``.

    Returns
    -------
    Tensor
        Shape ``(*batch)``, computed in float64, returned in the dtype of the couplings (float64 for Python floats).

    Raises
    ------
    SettingsError
        If a coupling is not positive and finite, or a side is less than 2.
    ShapeError
        If batch shapes do not broadcast.

    References
    ----------
    Kaufman, B. (1949). Crystal statistics. II. Partition function evaluated by spinor analysis.
    Physical Review 76, 1232-1243.

    Examples
    --------
    >>> round(float(kaufman_log_partition(64, 64, CRITICAL_COUPLING)) / 64**2, 6)
    0.929852
    """
    height = whole_number("height", height, least=2)
    width = whole_number("width", width, least=2)
    between = _positive("vertical", vertical)
    within = between if horizontal is None else _positive("horizontal", horizontal)
    dtype = torch.promote_types(between.dtype, within.dtype)
    try:
        between, within = torch.broadcast_tensors(between.double(), within.double())
    except RuntimeError as error:
        shapes = f"{tuple(between.shape)} and {tuple(within.shape)}"
        raise ShapeError(f"the batches of vertical and horizontal do not broadcast: {shapes}") from error
    gamma, growth = _modes(width, between, within)
    # For each mode: 2 cosh(height gamma / 2) times tanh(K)**(height / 2), and the signed ratio of sinh to cosh.
    size = torch.where(gamma > 0, gamma, -gamma)  # absolute value; its slope at zero matches that of growth
    log_cosh = 0.5 * height * growth + (-height * size).exp().log1p()
    ratio = (0.5 * height * gamma).tanh()
    odd, even = log_cosh[..., 1::2].sum(-1), log_cosh[..., 0::2].sum(-1)
    largest = torch.maximum(odd, even).detach()
    total = (odd - largest).exp() * (1 + ratio[..., 1::2].prod(-1))
    total = total + (even - largest).exp() * (1 + ratio[..., 0::2].prod(-1))
    log_two_cosh = between + (-2 * between).exp().log1p()
    return (height * width * log_two_cosh + largest + total.log() - math.log(2)).to(dtype)


def _modes(width: int, between: Tensor, within: Tensor) -> tuple[Tensor, Tensor]:
    """Return the exponent of each mode per row, ``(*batch, 2 * width)``, and its excess over ``-log(tanh(K))``."""
    between, within = between.unsqueeze(-1), within.unsqueeze(-1)
    # Without coupling within rows all modes have exponent -log(tanh(K)). It diverges as the coupling K between rows
    # tends to zero, so the excess over it is computed. With decay = exp(-2 K') for the coupling K' within rows,
    # cosh(gamma) - 1 = distance / (tanh * decay).
    log_tanh = (-(-2 * between).expm1()).log() - (-2 * between).exp().log1p()
    # The exponent of the mode at angle zero changes sign at the critical coupling.
    zero = 2 * within + log_tanh
    zero_growth = torch.where(zero > 0, zero + log_tanh, -2 * within)
    angle = torch.arange(1, 2 * width).to(between) * (math.pi / width)
    tanh, decay = between.tanh(), (-2 * within).exp()
    below_one = 2 * (-2 * between).exp() / (1 + (-2 * between).exp())  # 1 - tanh
    distance = 0.5 * ((-2 * within).expm1() + below_one).square()
    distance = distance - 0.5 * below_one * (1 + tanh) * (-4 * within).expm1() * (angle / 2).sin().square()
    scale = tanh * decay
    growth = 2 * within + (scale + distance + (distance * (distance + 2 * scale)).sqrt()).log()
    return torch.cat([zero, growth - log_tanh], -1), torch.cat([zero_growth, growth], -1)


def _positive(name: str, value: Tensor | float) -> Tensor:
    coupling = torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64)
    if not bool(((coupling > 0) & coupling.isfinite()).all()):
        raise SettingsError(f"{name} must be positive and finite, not {value}; the closed form is for ferromagnets")
    return coupling if coupling.is_floating_point() else coupling.to(torch.get_default_dtype())


# Transfer matrix of an Ising grid, applied bond by bond in log space.


class Couplings(NamedTuple):
    """Couplings and fields of a grid, all of shape ``(*batch, rows, columns)``.

    Attributes
    ----------
    horizontal : Tensor
        Coupling of each site with its right neighbour; in the last column with the first, zero unless periodic.
    vertical : Tensor
        Coupling of each site with the site below; in the last row with the first, zero unless periodic.
    field : Tensor
        Field at each site.
    """

    horizontal: Tensor
    vertical: Tensor
    field: Tensor

    def transpose(self) -> Couplings:
        """Return the transposed grid."""
        return Couplings(self.vertical.mT, self.horizontal.mT, self.field.mT)


def _row_states(width: int, like: Tensor) -> Tensor:
    """Return all states of a row, spins of -1 and 1: ``(2**width, width)``; bit ``j`` of a state is its spin ``j``."""
    return (2 * digits_of(2**width, 2, width, like.device) - 1).to(like)


def _row_potentials(couplings: Couplings) -> Tensor:
    """Return the log weight of each state of each row from fields and its own bonds, ``(*batch, rows, 2**columns)``."""
    states = _row_states(couplings.field.shape[-1], couplings.field)
    return couplings.field @ states.mT + couplings.horizontal @ (states * states.roll(-1, -1)).mT


def _messages(couplings: Couplings, rows: Tensor, periodic: bool) -> Iterator[Tensor]:
    """Yield log weights of all rows below a row given its state, ``(*batch, first, 2**columns)``, from the last row up.

    ``first`` is the number of states of the first row on a torus, otherwise 1.
    """
    message = _closing_bonds(couplings, rows, periodic)
    yield message
    for row in range(rows.shape[-2] - 1, 0, -1):
        message = _cross_bonds(message + rows[..., row, None, :], couplings.vertical[..., row - 1, :])[-1]
        yield message


def _first_row(rows: Tensor, periodic: bool, below: Tensor) -> Tensor:
    """Return the log weight of each state of the first row, ``(*batch, 2**columns)``, from the last message."""
    return rows[..., 0, :] + (below.diagonal(dim1=-2, dim2=-1) if periodic else below.squeeze(-2))


def draw_grids(couplings: Couplings, periodic: bool, count: int) -> Tensor:
    """Draw exact spins ``(batch, count, rows, columns)`` sequentially, from torch's global stream."""
    rows = _row_potentials(couplings)
    below = list(_messages(couplings, rows, periodic))
    logits = _first_row(rows, periodic, below.pop())
    first = torch.multinomial(logits.softmax(-1), count, replacement=True)
    start = first * logits.shape[-1] if periodic else first * 0
    states, state = [first], first
    for row in range(1, rows.shape[-2]):
        # Recomputed to save memory: storing the stages of all rows would need a factor of the number of columns.
        stages = _cross_bonds(below.pop() + rows[..., row, None, :], couplings.vertical[..., row - 1, :])
        for j in reversed(range(len(stages) - 1)):
            # Bits above j are spins of this row; the other bits are spins of the row above.
            weight = stages[j].flatten(-2)
            down, up = state & ~(1 << j), state | (1 << j)
            above = 2.0 * ((state >> j) & 1) - 1.0
            log_odds = weight.gather(-1, start + up) - weight.gather(-1, start + down)
            log_odds = log_odds + 2 * above * couplings.vertical[..., row - 1, j, None]
            state = torch.where(torch.rand_like(log_odds) < log_odds.sigmoid(), up, down)
        states.append(state)
    return _row_states(rows.shape[-1].bit_length() - 1, rows)[torch.stack(states, dim=-1)]


def _closing_bonds(couplings: Couplings, rows: Tensor, periodic: bool) -> Tensor:
    """Return the initial message below the last row: zero, or the bonds to the first row on a torus."""
    if not periodic:
        return (rows[..., -1, :] * 0).unsqueeze(-2)
    states = _row_states(couplings.field.shape[-1], rows)
    return (states * couplings.vertical[..., -1, None, :]) @ states.mT


def _cross_bonds(message: Tensor, coupling: Tensor) -> list[Tensor]:
    """Return ``message`` after summing out ``0, 1, ..., columns`` of its spins, each replaced by the spin above it."""
    # At stage k the bits below k are spins of the row above.
    width = coupling.shape[-1]
    stages = [message]
    for j in range(width):
        split = stages[-1].unflatten(-1, (2 ** (width - 1 - j), 2, 2**j))
        bond = coupling[..., j, None, None, None, None]
        stages.append(torch.logaddexp(split + bond, split.flip(-2) - bond).flatten(-3))
    return stages


# Ising model on a grid as a distribution.

#: Maximum width for the transfer matrix; on a torus it is stored for each state of the first row.
_MAX_WIDTH, _MAX_TORUS_WIDTH = 16, 10
_MAX_ENUMERATED_SITES = 20
#: Maximum number of row weights in memory, 8 GiB in double precision.
_MAX_WEIGHTS = 2**30


class _Spins(constraints.Constraint):
    """Matrices of -1 and 1."""

    is_discrete = True
    event_dim = 2

    def check(self, value: Tensor) -> Tensor:
        return (value.abs() == 1).flatten(-2).all(-1)


class IsingExpectations(NamedTuple):
    """Expectations under an Ising model.

    Attributes
    ----------
    horizontal, vertical : Tensor
        Expected products of neighbouring spins, shaped as the couplings.
    spins : Tensor
        Expected spins, ``(*batch, height, width)``.
    """

    horizontal: Tensor
    vertical: Tensor
    spins: Tensor


class IsingGrid(TorchDistribution):  # type: ignore[misc]
    r"""Ising model on a grid, with spins -1 and 1.

    The log probability of spins :math:`s` is
    :math:`\sum_{ij} J_{ij} s_i s_j + \sum_i h_i s_i - \log Z`, with a coupling :math:`J_{ij}` per pair of neighbours
    and a field :math:`h_i` per site, in units of the temperature. The partition function :math:`Z`, expectations and
    draws are exact (transfer matrix) if the shorter side has at most 16 sites, or 10 if periodic.
    :meth:`log_pseudolikelihood` has no size limit.

    With ``width`` the shorter side, gradients and :meth:`expectations` store ``2 * 2**width`` numbers per site, and
    :meth:`sample` ``2**width`` numbers per row; on a torus multiply by ``2**width``. In float64 the peak memory per
    batch element is 1.6 GB and 0.5 GB for a 10 by 10 torus, and 0.3 GB and 0.1 GB for a free 16 by 16 grid. Every call
    of :meth:`log_prob` recomputes the partition function.

    Parameters
    ----------
    horizontal : Tensor
        Coupling of each site with its right neighbour, ``(*batch, height, width - 1)``, or ``(*batch, height, width)``
        if periodic (last column with first).
    vertical : Tensor
        Coupling of each site with the site below, ``(*batch, height - 1, width)``, or ``(*batch, height, width)`` if
        periodic (last row with first).
    field : Tensor
        ``(*batch, height, width)``. All three are floating point and promoted to their widest dtype.
    periodic : bool, default False
        Use a torus. A side of 2 then has two bonds between each pair of neighbours.
    validate_args : bool, optional

    Raises
    ------
    ShapeError
        If shapes of couplings and field are incompatible, or there is no site.
    DataError
        If an argument is not a floating-point tensor or, with validation, not finite.
    SettingsError
        If the grid or the batch is too large, when the partition function or draws are computed.

    References
    ----------
    Kramers, H. A., Wannier, G. H. (1941). Statistics of the two-dimensional ferromagnet. Part I.
    Physical Review 60, 252-262.

    Besag, J. (1975). Statistical analysis of non-lattice data. The Statistician 24, 179-195.

    Examples
    --------
    >>> import torch
    >>> grid = IsingGrid.homogeneous(3, 4, torch.tensor(0.4, dtype=torch.float64))
    >>> everything = grid.enumerate_support()
    >>> everything.shape, grid.log_prob(everything).exp().sum()
    (torch.Size([4096, 3, 4]), tensor(1.0000, dtype=torch.float64))
    """

    arg_constraints = {
        "horizontal": constraints.independent(constraints.real, 2),
        "vertical": constraints.independent(constraints.real, 2),
        "field": constraints.independent(constraints.real, 2),
    }
    support = _Spins()
    has_enumerate_support = True

    def __init__(
        self,
        horizontal: Tensor,
        vertical: Tensor,
        field: Tensor,
        periodic: bool = False,
        validate_args: bool | None = None,
    ) -> None:
        _check_floating(horizontal=horizontal, vertical=vertical, field=field)
        if min(x.dim() for x in (horizontal, vertical, field)) < 2:
            raise ShapeError("couplings and field must be at least matrices, (*batch, height, width)")
        height, width = field.shape[-2:]
        if not min(height, width):
            raise ShapeError(f"the field is {height} by {width}, a grid without sites; use at least one by one")
        if periodic and min(height, width) < 2:
            raise ShapeError(
                f"a torus of {height} by {width} has bonds from sites to themselves; use at least two sites a side"
            )
        missing = 0 if periodic else 1
        for name, coupling, shape in (
            ("horizontal", horizontal, (height, width - missing)),
            ("vertical", vertical, (height - missing, width)),
        ):
            if coupling.shape[-2:] != shape:
                raise ShapeError(
                    f"{name} has shape {tuple(coupling.shape)}; with a field of {height} by {width} and "
                    f"periodic={periodic} give (*batch, {shape[0]}, {shape[1]})"
                )
        try:
            batch = torch.broadcast_shapes(*(x.shape[:-2] for x in (horizontal, vertical, field)))
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(x.shape)) for x in (horizontal, vertical, field))
            raise ShapeError(f"the batches of horizontal, vertical and field do not broadcast: {shapes}") from error
        dtype = reduce(torch.promote_types, (x.dtype for x in (horizontal, vertical, field)))
        self.horizontal, self.vertical, self.field = (
            x.to(dtype).expand(*batch, *x.shape[-2:]) for x in (horizontal, vertical, field)
        )
        if self._validate_args if validate_args is None else validate_args:
            _check_finite(horizontal=self.horizontal, vertical=self.vertical, field=self.field)
        self.periodic = periodic
        super().__init__(batch, torch.Size((height, width)), validate_args=validate_args)

    @classmethod
    def homogeneous(
        cls,
        height: int,
        width: int,
        coupling: Tensor | float,
        field: Tensor | float = 0.0,
        periodic: bool = False,
        validate_args: bool | None = None,
    ) -> IsingGrid:
        """Return a grid with homogeneous coupling and field.

        ``height``, ``width``: at least 1. ``coupling``: ``(*batch)``. ``field``: ``(*batch)``. Raises ``ShapeError`` if
        coupling and field do not broadcast; ``DataError`` if a tensor is not floating point or, with validation, not
        finite; ``SettingsError`` if a side is less than 1.
        """
        height, width = whole_number("height", height, least=1), whole_number("width", width, least=1)
        like = next((x for x in (coupling, field) if isinstance(x, Tensor)), torch.empty(()))
        coupling, field = (
            x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=like.dtype, device=like.device)
            for x in (coupling, field)
        )
        missing = 0 if periodic else 1
        bond = coupling[..., None, None]
        return cls(
            bond.expand(*coupling.shape, height, width - missing),
            bond.expand(*coupling.shape, height - missing, width),
            field[..., None, None].expand(*field.shape, height, width),
            periodic,
            validate_args,
        )

    def expand(self, batch_shape: Shape, _instance: None = None) -> IsingGrid:
        """Return the distribution expanded to another batch shape."""
        horizontal, vertical, field = (
            x.expand(*batch_shape, *x.shape[-2:]) for x in (self.horizontal, self.vertical, self.field)
        )
        expanded = IsingGrid(horizontal, vertical, field, self.periodic, validate_args=False)
        expanded._validate_args = self._validate_args
        return expanded

    def log_potential(self, spins: Tensor) -> Tensor:
        """Return the unnormalized log probability: ``(*batch, height, width)`` to ``(*batch)``."""
        if self._validate_args:
            self._validate_sample(spins)
        horizontal, vertical, field = self._couplings
        bonds = horizontal * spins.roll(-1, -1) + vertical * spins.roll(-1, -2)
        return (spins * (bonds + field)).sum((-2, -1))

    @property
    def log_partition(self) -> Tensor:
        """Log partition function, ``(*batch)``."""
        stages = min(self.event_shape) + 1
        couplings = self._oriented(2 * stages * max(self.event_shape) if self._tracked else stages)
        rows = _row_potentials(couplings)
        for below in _messages(couplings, rows, self.periodic):  # noqa: B007  only the last is needed
            pass
        return _first_row(rows, self.periodic, below).logsumexp(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of spins: ``(*batch, height, width)`` to ``(*batch)``."""
        return self.log_potential(value) - self.log_partition

    def log_pseudolikelihood(self, spins: Tensor) -> Tensor:
        """Return the sum of the log conditional probabilities of spins: ``(*batch, height, width)`` to ``(*batch)``.

        The maximum pseudolikelihood estimate is consistent, but as a likelihood it is overconfident.
        """
        if self._validate_args:
            self._validate_sample(spins)
        horizontal, vertical, field = self._couplings
        pull = field + horizontal * spins.roll(-1, -1) + (horizontal * spins).roll(1, -1)
        pull = pull + vertical * spins.roll(-1, -2) + (vertical * spins).roll(1, -2)
        return logsigmoid(2 * spins * pull).sum((-2, -1))

    def expectations(self) -> IsingExpectations:
        """Return exact expectations of spins and of products of neighbouring spins, differentiable.

        Derivatives (not the expectations) are NaN if the total coupling and field at a spin exceeds about 350, or 44 in
        single precision.
        """
        tracked = self._tracked
        with torch.enable_grad():
            horizontal, vertical, field = parameters = tuple(
                x if tracked and x.requires_grad else x.detach().clone().requires_grad_()
                for x in (self.horizontal, self.vertical, self.field)
            )
            total = IsingGrid(horizontal, vertical, field, self.periodic, validate_args=False).log_partition.sum()
            gradient = torch.autograd.grad(total, parameters, create_graph=tracked, materialize_grads=True)
            return IsingExpectations(*gradient)

    @property
    def mean(self) -> Tensor:
        """Exact expectations of the spins, ``(*batch, height, width)``, differentiable."""
        return self.expectations().spins

    def sample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw exact, independent samples, ``sample_shape + (*batch, height, width)``."""
        sample_shape = torch.Size(whole_number("a size in sample_shape", size, least=0) for size in sample_shape)
        if not sample_shape.numel():
            return self.field.new_empty(sample_shape + self.batch_shape + self.event_shape)
        with torch.no_grad():
            oriented = self._oriented(sum(self.event_shape) + 1)
            flat = Couplings(*(x.reshape(-1, *x.shape[-2:]) for x in oriented))
            spins = draw_grids(flat, self.periodic, sample_shape.numel()).transpose(0, 1)
            spins = spins.mT if self._transposed else spins
            return spins.reshape(sample_shape + self.batch_shape + self.event_shape)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all spin configurations, ``(2**sites, *batch, height, width)``; batch dimensions 1 unless expanded.

        Raises ``SettingsError`` if there are more than 20 sites.
        """
        height, width = self.event_shape
        if height * width > _MAX_ENUMERATED_SITES:
            raise SettingsError(
                f"{height} by {width} spins have 2**{height * width} = {2 ** (height * width)} states; at most "
                f"2**{_MAX_ENUMERATED_SITES} are enumerated; log_partition, expectations and sample need no enumeration"
            )
        spins = _row_states(height * width, self.field).unflatten(-1, (height, width))
        spins = spins.reshape(-1, *[1] * len(self.batch_shape), height, width)
        return spins.expand(-1, *self.batch_shape, -1, -1) if expand else spins

    @property
    def _couplings(self) -> Couplings:
        if self.periodic:
            return Couplings(self.horizontal, self.vertical, self.field)
        return Couplings(pad(self.horizontal, (0, 1)), pad(self.vertical, (0, 0, 0, 1)), self.field)

    @property
    def _transposed(self) -> bool:
        return self.event_shape[1] > self.event_shape[0]

    @property
    def _tracked(self) -> bool:
        parameters = (self.horizontal, self.vertical, self.field)
        return torch.is_grad_enabled() and any(x.requires_grad for x in parameters)

    def _oriented(self, num_rows: int) -> Couplings:
        """Return couplings with the shorter side as rows; SettingsError if the grid or ``num_rows`` is too large."""
        width, most = min(self.event_shape), _MAX_TORUS_WIDTH if self.periodic else _MAX_WIDTH
        kind = "periodic" if self.periodic else "free"
        if width > most:
            raise SettingsError(
                f"the shorter side of the grid has {width} sites, so a row has 2**{width} states; the transfer matrix "
                f"of a {kind} grid supports at most {most} sites; use log_pseudolikelihood, or a narrower grid"
            )
        num_grids = self.batch_shape.numel()
        count = num_grids * num_rows * 2 ** (2 * width if self.periodic else width)
        if count > _MAX_WEIGHTS:
            height, width = self.event_shape
            raise SettingsError(
                f"{num_grids} {kind} grids of {height} by {width} need {count} numbers at once, "
                f"{count * self.field.dtype.itemsize / 2**30:.1f} GiB; the limit is {_MAX_WEIGHTS}; use fewer or "
                "smaller grids at a time, or log_pseudolikelihood"
            )
        return self._couplings.transpose() if self._transposed else self._couplings


def _check_floating(**parameters: Tensor) -> None:
    for name, value in parameters.items():
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise DataError(f"{name} is {kind}; give a floating-point tensor, such as {name}.double()")


def _check_finite(**parameters: Tensor) -> None:
    for name, value in parameters.items():
        if not bool(value.abs().sum((-2, -1)).isfinite().all()):
            raise DataError(
                f"{name} has an entry of size {float(value.abs().amax()):g}; entries and their sum must be finite"
            )
