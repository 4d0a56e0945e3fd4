"""The Ising model on a grid as a distribution, with its exact partition function."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints
from torch.nn.functional import logsigmoid, pad

from bayeskit._settings import whole_number
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.discrete.ising.transfer import Couplings, draw, first_row, messages, row_potentials, row_states

Shape = torch.Size | list[int] | tuple[int, ...]

#: Widest grids of which the transfer matrix can be applied; on a torus it is kept for each state of the first row.
MAX_WIDTH, MAX_TORUS_WIDTH = 16, 10
_MAX_ENUMERATED_SITES = 20


class _Spins(constraints.Constraint):
    """Matrices of -1 and 1."""

    is_discrete = True
    event_dim = 2

    def check(self, value: Tensor) -> Tensor:
        return (value.abs() == 1).flatten(-2).all(-1)


class IsingExpectations(NamedTuple):
    """Expectations under an Ising model, the derivatives of its log partition function.

    Attributes
    ----------
    horizontal, vertical : Tensor
        Of the products of neighbours, shaped like the couplings.
    spins : Tensor
        Of the spins, ``(*batch, height, width)``.
    """

    horizontal: Tensor
    vertical: Tensor
    spins: Tensor


class IsingGrid(TorchDistribution):  # type: ignore[misc]
    r"""Spins of -1 and 1 on a grid, each pulled towards its neighbours and its field.

    The log probability of spins :math:`s` is
    :math:`\sum_{ij} J_{ij} s_i s_j + \sum_i h_i s_i - \log Z`, with one coupling :math:`J` a pair of neighbours and
    one field :math:`h` a site, in units of the temperature. The partition function :math:`Z`, expectations and draws
    are exact, by a transfer matrix along the longer side, for grids of which the shorter side has at most 16 sites, 10
    if periodic. :meth:`log_pseudolikelihood` has no such limit.

    Parameters
    ----------
    horizontal : Tensor
        Coupling of each site with its right neighbour, ``(*batch, height, width - 1)``; ``(*batch, height, width)``
        if periodic, the last column with the first.
    vertical : Tensor
        Coupling of each site with the one below, ``(*batch, height - 1, width)``; ``(*batch, height, width)`` if
        periodic, the last row with the first.
    field : Tensor
        ``(*batch, height, width)``.
    periodic : bool, default False
        Whether the grid is a torus. A side of two sites then has two bonds between them.
    validate_args : bool, optional

    Raises
    ------
    ShapeError
        If couplings and field do not fit together.
    SettingsError
        If the partition function or draws are asked of a grid too wide for it.

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
        if min(x.dim() for x in (horizontal, vertical, field)) < 2:
            raise ShapeError("couplings and field must be at least matrices, (*batch, height, width)")
        height, width = field.shape[-2:]
        if periodic and min(height, width) < 2:
            raise ShapeError(
                f"a torus of {height} by {width} has bonds from sites to themselves; take two sites a side"
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
        self.horizontal, self.vertical, self.field = (
            x.expand(*batch, *x.shape[-2:]) for x in (horizontal, vertical, field)
        )
        self.periodic = periodic
        super().__init__(batch, torch.Size((height, width)), validate_args=validate_args)

    @classmethod
    def homogeneous(
        cls,
        height: int,
        width: int,
        coupling: Tensor,
        field: Tensor | float = 0.0,
        periodic: bool = False,
        validate_args: bool | None = None,
    ) -> IsingGrid:
        """Return a grid with one coupling and one field everywhere.

        Parameters
        ----------
        height, width : int
            At least one.
        coupling : Tensor
            Floating point, shape ``(*batch)``.
        field : Tensor or float, default 0.0
            Shape ``(*batch)``.
        periodic : bool, default False
        validate_args : bool, optional

        Raises
        ------
        ShapeError
            If the shapes of coupling and field do not broadcast.
        SettingsError
            If a side is not at least one.
        """
        height, width = whole_number("height", height, least=1), whole_number("width", width, least=1)
        field = torch.as_tensor(field, dtype=coupling.dtype, device=coupling.device)
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
        """Return the same distribution with another batch shape."""
        horizontal, vertical, field = (
            x.expand(*batch_shape, *x.shape[-2:]) for x in (self.horizontal, self.vertical, self.field)
        )
        return IsingGrid(horizontal, vertical, field, self.periodic, validate_args=False)

    def log_potential(self, spins: Tensor) -> Tensor:
        """Return the log probability without the partition function: ``(*batch, height, width)`` to ``(*batch)``."""
        horizontal, vertical, field = self._couplings
        bonds = horizontal * spins.roll(-1, -1) + vertical * spins.roll(-1, -2)
        return (spins * (bonds + field)).sum((-2, -1))

    @cached_property
    def log_partition(self) -> Tensor:
        """Log of the sum of ``exp(log_potential)`` over all spins, ``(*batch)``."""
        couplings = self._oriented()
        rows = row_potentials(couplings)
        stages = None
        for stages in messages(couplings, rows, self.periodic):  # noqa: B007  only the last is needed
            pass
        return first_row(couplings, rows, self.periodic, stages).logsumexp(-1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log probability of spins: ``(*batch, height, width)`` to ``(*batch)``."""
        if self._validate_args:
            self._validate_sample(value)
        return self.log_potential(value) - self.log_partition

    def log_pseudolikelihood(self, spins: Tensor) -> Tensor:
        """Return the sum of the log probabilities of each spin given all others.

        It needs no partition function; its maximum is consistent, but as a likelihood it is overconfident.

        Parameters
        ----------
        spins : Tensor
            Shape ``(*batch, height, width)``.

        Returns
        -------
        Tensor
            Shape ``(*batch)``.
        """
        horizontal, vertical, field = self._couplings
        pull = field + horizontal * spins.roll(-1, -1) + (horizontal * spins).roll(1, -1)
        pull = pull + vertical * spins.roll(-1, -2) + (vertical * spins).roll(1, -2)
        return logsigmoid(2 * spins * pull).sum((-2, -1))

    def expectations(self) -> IsingExpectations:
        """Return the exact expectations of spins and of products of neighbours."""
        with torch.enable_grad():
            horizontal, vertical, field = (
                x.detach().clone().requires_grad_() for x in (self.horizontal, self.vertical, self.field)
            )
            total = IsingGrid(horizontal, vertical, field, self.periodic, validate_args=False).log_partition.sum()
            gradient = torch.autograd.grad(total, (horizontal, vertical, field), materialize_grads=True)
            return IsingExpectations(*gradient)

    @property
    def mean(self) -> Tensor:
        """Exact expectations of the spins, ``(*batch, height, width)``."""
        return self.expectations().spins

    def sample(self, sample_shape: Shape = torch.Size()) -> Tensor:  # noqa: B008
        """Draw spins exactly and independently: ``sample_shape + (*batch, height, width)``."""
        sample_shape = torch.Size(sample_shape)
        if not sample_shape.numel():
            return self.field.new_empty(sample_shape + self.batch_shape + self.event_shape)
        with torch.no_grad():
            flat = Couplings(*(x.reshape(-1, *x.shape[-2:]) for x in self._oriented()))
            spins = draw(flat, self.periodic, sample_shape.numel()).transpose(0, 1)
            spins = spins.mT if self._transposed else spins
            return spins.reshape(sample_shape + self.batch_shape + self.event_shape)

    def enumerate_support(self, expand: bool = True) -> Tensor:
        """Return all spins: ``(2**sites, *batch, height, width)``, with a batch of ones unless expanded.

        Raises
        ------
        SettingsError
            If there are more than 20 sites.
        """
        height, width = self.event_shape
        if height * width > _MAX_ENUMERATED_SITES:
            raise SettingsError(
                f"{height} by {width} spins have 2**{height * width} = {2 ** (height * width)} states; at most "
                f"2**{_MAX_ENUMERATED_SITES} are listed; log_partition, expectations and sample need no list"
            )
        spins = row_states(height * width, self.field).unflatten(-1, (height, width))
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

    def _oriented(self) -> Couplings:
        """Return the couplings with the shorter side as rows."""
        width, most = min(self.event_shape), MAX_TORUS_WIDTH if self.periodic else MAX_WIDTH
        if width > most:
            kind = "periodic" if self.periodic else "free"
            raise SettingsError(
                f"the shorter side of the grid has {width} sites, so that a row has 2**{width} states; the transfer "
                f"matrix of a {kind} grid takes at most {most}; use log_pseudolikelihood, or a narrower grid"
            )
        return self._couplings.transpose() if self._transposed else self._couplings
