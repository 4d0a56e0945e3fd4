"""Networks of an amortised posterior: an encoder of data of any size, and flows given what it found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bayeskit._core.flows import zuko

_KNEE = 5.0
"""Spreads from the centre at which a standardised number begins to count by its logarithm."""


_MOST_MULTIPLIED = 8
_HEADS, _KEY, _VALUE = 8, 8, 4
"""Heads of attention, and numbers of their keys and values."""
_LEAST_VARIANCE = 1e-8


class Inputs(NamedTuple):
    """Data of a batch of data sets of one size, as numbers.

    ``rows``, ``(B, n, k)``, are numbers of each of ``n`` observations; ``shared``, ``(B, m)``, those of the whole set.
    """

    rows: Tensor
    shared: Tensor


class Widths(NamedTuple):
    """Numbers of coordinates: of the global latent sites, of the local ones of each row, and of the data."""

    num_global: int
    num_local: int
    num_row_columns: int
    num_shared: int


def squashed(x: Tensor) -> Tensor:
    """Return standardised numbers, unchanged near the centre and of logarithmic growth in the tails."""
    far = x.abs().clamp(min=_KNEE)
    return torch.where(x.abs() > _KNEE, x.sign() * _KNEE * (1 + (far / _KNEE).log()), x)


class Standardizer(nn.Module):
    """A shift and a scale for each column, from medians and quartiles of simulations, in double precision."""

    location: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("location", torch.zeros(width, dtype=torch.float64))
        self.register_buffer("scale", torch.ones(width, dtype=torch.float64))

    @torch.no_grad()
    def learn(self, x: Tensor) -> None:
        """Set shift and scale from ``x``, ``(items, width)``; a column without spread keeps its scale."""
        if x.numel() == 0:
            return
        quarters = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64, device=x.device)
        low, middle, high = torch.quantile(x.double(), quarters, dim=0)
        spread = (high - low) / 1.35
        # Counts and indicators: most values are equal, and quartiles may be, too.
        spread = torch.where(spread > 0, spread, x.double().std(0).nan_to_num())
        self.location.copy_(middle)
        self.scale.copy_(torch.where(spread > 0, spread, 1.0))

    def forward(self, x: Tensor, like: Tensor) -> Tensor:
        """Return ``x`` standardised, in the dtype of a weight of the network."""
        return ((x - self.location) / self.scale).to(like.dtype)


def _products(rows: Tensor) -> Tensor:
    """Return rows with the products of pairs of few columns, whose sums are sufficient for normal data."""
    count = rows.shape[-1]
    if count > _MOST_MULTIPLIED:
        return rows
    first, second = torch.triu_indices(count, count, device=rows.device)
    return torch.cat([rows, rows[..., first] * rows[..., second]], -1)


class _Perceptron(nn.Module):
    """A network with two hidden layers beside a linear map, so that linear statistics pass without loss."""

    def __init__(self, width: int, hidden: int, out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, out)
        self.curved = nn.Sequential(
            nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, out)
        )

    def begin_at_zero(self) -> None:
        """Set the last layers to zero."""
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if name.startswith(("linear", "curved.4")):
                    parameter.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Return the sum of both."""
        found: Tensor = self.linear(x) + self.curved(x)
        return found


class _Attention(nn.Module):
    """Means of the rows of sets with weights that depend on a first code of the set (Vaswani et al. 2017)."""

    def __init__(self, width: int, hidden: int, code: int) -> None:
        super().__init__()
        self.query = nn.Linear(code, _HEADS * _KEY)
        self.of_row = _Perceptron(width, hidden, _HEADS * (_KEY + _VALUE))

    def forward(self, rows: Tensor, code: Tensor) -> Tensor:
        """Return the means of all heads, ``(B, n, k), (B, code) -> (B, heads * values)``."""
        query = self.query(code).unflatten(-1, (_HEADS, _KEY))
        key, value = self.of_row(rows).unflatten(-1, (_HEADS, _KEY + _VALUE)).split([_KEY, _VALUE], -1)
        weight = (torch.einsum("bhk,bnhk->bnh", query, key) / math.sqrt(_KEY)).softmax(1)
        return torch.einsum("bnh,bnhv->bhv", weight, value).flatten(1)


class Encoder(nn.Module):
    """Map data of any size to a code of fixed size.

    A set: the mean and the maximum over rows of a network of each row (Zaheer et al. 2017), the mean and the log
    standard deviation of each column, on which posteriors of location and scale depend linearly, and the number of
    rows. Attention: in addition weighted means over rows, with weights that depend on a code of all of these. A
    sequence: the last state of a recurrent network, and the number of rows.
    """

    def __init__(self, kind: str, num_row_columns: int, num_shared: int, row_width: int, code: int) -> None:
        super().__init__()
        self.kind, self.has_rows = kind, num_row_columns > 0
        self.rows, self.shared = Standardizer(num_row_columns), Standardizer(num_shared)
        width = num_shared
        if self.has_rows and kind == "sequence":
            self.recurrent = nn.GRU(num_row_columns, row_width, batch_first=True)
            width += row_width + 1
        elif self.has_rows:
            of_row = len(_products(torch.zeros(num_row_columns)))
            self.of_row = _Perceptron(of_row, row_width, row_width)
            width += 2 * row_width + 2 * num_row_columns + 1
            if kind == "attention":
                self.first = _Perceptron(width, 2 * code, code)
                self.attention = _Attention(of_row, row_width, code)
                width += _HEADS * _VALUE
        self.of_all = _Perceptron(width, 2 * code, code)

    def forward(self, inputs: Inputs) -> Tensor:
        """Return the code of each data set, ``(B, code)``."""
        like = self.of_all.linear.weight
        parts = [squashed(self.shared(inputs.shared, like))]
        if self.has_rows:
            rows = squashed(self.rows(inputs.rows, like))
            number = rows.new_full((len(rows), 1), math.log(rows.shape[1]))
            if self.kind == "sequence":
                parts += [self.recurrent(rows)[1][-1], number]
            else:
                numbers = _products(rows)
                coded = self.of_row(numbers)
                spread = rows.var(1, correction=0).clamp(min=_LEAST_VARIANCE).log() / 2
                parts += [coded.mean(1), coded.amax(1), rows.mean(1), spread, number]
                if self.kind == "attention":
                    parts.append(self.attention(numbers, self.first(torch.cat(parts, -1))))
        code: Tensor = self.of_all(torch.cat(parts, -1))
        return code


class _Flow(nn.Module):
    """A distribution of ``dim`` numbers given a code: splines of a normal with mean and covariance of the code."""

    def __init__(self, dim: int, code: int, num_transforms: int, hidden: int) -> None:
        super().__init__()
        self.dim = dim
        self.standard = Standardizer(dim)
        self.head = _Perceptron(code, hidden, 2 * dim + dim * (dim - 1) // 2)
        self.head.begin_at_zero()
        self.splines = zuko.flows.NSF(dim, code, transforms=num_transforms, hidden_features=(hidden, hidden)).transform

    def _normal(self, code: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the mean, the inverse of the covariance's factor, and minus the log determinant of the latter."""
        below = torch.tril_indices(self.dim, self.dim, -1, device=code.device)
        mean, log_precision, rest = self.head(code).split([self.dim, self.dim, below.shape[1]], -1)
        factor = torch.diag_embed(log_precision.exp())
        factor[..., below[0], below[1]] = rest
        return mean, factor, log_precision.sum(-1)

    def to_noise(self, u: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        """Return the standard normal noise of ``u``, ``(*batch, dim)``, and the log determinant of the map."""
        mean, factor, log_determinant = self._normal(code)
        x = ((self.standard(u, code) - mean).unsqueeze(-2) @ factor.mT).squeeze(-2)
        noise, log_volume = self.splines(code).call_and_ladj(x)
        return noise, log_volume + log_determinant - self.standard.scale.log().sum()

    def from_noise(self, noise: Tensor, code: Tensor) -> Tensor:
        """Return the vectors for ``noise``, ``(*batch, dim)``."""
        mean, factor, _ = self._normal(code)
        x = self.splines(code).inv(noise)
        x = torch.linalg.solve_triangular(factor, x.unsqueeze(-1), upper=False).squeeze(-1) + mean
        u: Tensor = x * self.standard.scale + self.standard.location
        return u


class AmortizingNetwork(nn.Module):
    """A distribution of latent coordinates given data of any size.

    Global coordinates depend on the code of all data. Local ones, of one row each, depend on the global ones, the
    code and the row, and are independent of each other given these.
    """

    def __init__(
        self, layout: Widths, kind: str, num_transforms: int = 2, row_width: int = 32, code: int = 32, hidden: int = 64
    ) -> None:
        super().__init__()
        self.layout = layout
        self.encoder = Encoder(kind, layout.num_row_columns, layout.num_shared, row_width, code)
        if layout.num_global:
            self.of_globals = _Flow(layout.num_global, code, num_transforms, hidden)
        if layout.num_local:
            self.of_rows = _Perceptron(layout.num_row_columns + layout.num_global + code, hidden, code)
            self.of_locals = _Flow(layout.num_local, code, num_transforms, hidden)

    @torch.no_grad()
    def learn_scales(self, batches: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]]) -> None:
        """Set the standardisation of all columns from batches of the arguments of :meth:`forward`."""
        top, local, rows, shared = zip(*batches, strict=True)
        self.encoder.rows.learn(torch.cat([x.flatten(0, 1) for x in rows]))
        self.encoder.shared.learn(torch.cat(shared))
        if self.layout.num_global:
            self.of_globals.standard.learn(torch.cat(top))
        if self.layout.num_local:
            self.of_locals.standard.learn(torch.cat([x.flatten(0, 1) for x in local]))

    def _code_of_rows(self, top: Tensor, code: Tensor, rows: Tensor) -> Tensor:
        """Return a code for each row, ``(B, n, code)``."""
        parts = [squashed(self.encoder.rows(rows, code)), code.unsqueeze(1).expand(-1, rows.shape[1], -1)]
        if self.layout.num_global:
            parts.append(squashed(self.of_globals.standard(top, code)).unsqueeze(1).expand(-1, rows.shape[1], -1))
        found: Tensor = self.of_rows(torch.cat(parts, -1))
        return found

    def to_noise(self, top: Tensor, local: Tensor, code: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noise of all coordinates, ``(B, d)``, and the log determinant ``(B,)``.

        ``top`` ``(B, g)`` are the global coordinates, ``local`` ``(B, n, l)`` those of each row.
        """
        parts, total = [], code.new_zeros(len(code))
        if self.layout.num_global:
            noise, log_volume = self.of_globals.to_noise(top, code)
            parts.append(noise)
            total = total + log_volume
        if self.layout.num_local:
            noise, log_volume = self.of_locals.to_noise(local, self._code_of_rows(top, code, rows))
            parts.append(noise.flatten(1))
            total = total + log_volume.sum(-1)
        return torch.cat(parts, -1), total

    def from_noise(self, noise: Tensor, code: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the global and the local coordinates for noise ``(B, d)``."""
        first, rest = noise.split([self.layout.num_global, noise.shape[-1] - self.layout.num_global], -1)
        top = self.of_globals.from_noise(first, code) if self.layout.num_global else first
        local = rest.unflatten(-1, (rows.shape[1], self.layout.num_local)) if self.layout.num_local else rest
        if self.layout.num_local:
            local = self.of_locals.from_noise(local, self._code_of_rows(top, code, rows))
        return top, local

    def forward(self, top: Tensor, local: Tensor, rows: Tensor, shared: Tensor) -> Tensor:
        """Return the log density of the coordinates given the data, ``(B,)``."""
        code = self.encoder(Inputs(rows, shared))
        noise, log_volume = self.to_noise(top, local, code, rows)
        return log_volume - 0.5 * noise.square().sum(-1) - 0.5 * noise.shape[-1] * math.log(2 * math.pi)
