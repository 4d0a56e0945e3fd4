"""Fisher and Gauss-Newton matrices of a network's parameters, natural gradients and Laplace approximations."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import minimize
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor, nn
from torch.func import vjp

from bayeskit.core.inputs import real_number, warn_user, whole_number
from bayeskit.core.plots import BLUE, ORANGE, VERMILION
from bayeskit.core.randomness import new_generator
from bayeskit.errors import (
    AccuracyWarning,
    BayeskitError,
    BudgetError,
    DataError,
    ModelError,
    SettingsError,
    ShapeError,
)
from bayeskit.models.wide_networks.empirical_kernels import make_gradient_plan, plain_attention
from bayeskit.models.wide_networks.finite import along, call_with
from bayeskit.models.wide_networks.layers import check_finite

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "BLOCK_SIZE",
    "BernoulliOutputs",
    "Categorical",
    "Curvature",
    "EXACT_SIZE",
    "FlatNetwork",
    "GaussianOutputs",
    "GradientFields",
    "LARGEST",
    "LaplacePosterior",
    "NUM_STEPS",
    "OutputCurvature",
    "OutputLikelihood",
    "POLISHED",
    "PRODUCT_ROWS",
    "Poisson",
    "Prediction",
    "System",
    "Trace",
    "empirical_fisher",
    "find_parameter_mode",
    "fisher",
    "flat_network",
    "gauss_newton",
    "gauss_newton_of",
    "gradient_fields",
    "laplace_posterior",
    "log_likelihood_gradient",
    "natural_gradient",
]


# A network as a function of its parameter vector, with derivatives.

BLOCK_SIZE = 1 << 22  # largest number of entries of Jacobians or output curvatures held at once
PRODUCT_ROWS = 512  # largest number of inputs whose activations are held at once


@dataclass(frozen=True)
class FlatNetwork:
    """Copy of a module with a flat parameter vector; later changes of the module have no effect on it.

    Attributes
    ----------
    module : torch.nn.Module
    vector : Tensor
        Flattened parameters that require gradients, in the module's order, ``(p,)``.
    shapes : dict
        Shapes of these parameters, by name.
    constants : dict
        Buffers and parameters that do not require gradients.
    """

    module: nn.Module
    vector: Tensor
    shapes: dict[str, torch.Size]
    constants: dict[str, Tensor]

    @property
    def num_parameters(self) -> int:
        """Number of trainable parameters, ``p``."""
        return len(self.vector)

    def at(self, vector: Tensor) -> FlatNetwork:
        """Return the network with parameters ``vector``, ``(p,)``."""
        return replace(self, vector=vector)

    def outputs(self, x: Tensor) -> Tensor:
        """Return the outputs, ``(n, k)``."""
        with torch.no_grad():
            return torch.cat([self._call(self.vector, x[rows]) for rows in _row_blocks(len(x), PRODUCT_ROWS)])

    def jacobian(self, x: Tensor) -> Tensor:
        """Return the Jacobian of outputs with respect to parameters, ``(n, k, p)``."""
        num_outputs = self.outputs(x[:1]).shape[1]
        identity = torch.eye(num_outputs, dtype=self.vector.dtype, device=self.vector.device)
        return self.pull_each(x, identity.expand(len(x), -1, -1))

    def pull_each(self, x: Tensor, cotangents: Tensor) -> Tensor:
        """Return per-input products ``J_i^T C_i`` with cotangents ``C``, ``(n, k, r)``, as ``(n, r, p)``.

        Raises
        ------
        ModelError
            If their sum over inputs is not the gradient at all inputs.
        """
        weights = torch.arange(1.0, len(x) * cotangents.shape[2] + 1, dtype=torch.float64).cos().to(cotangents)
        weights = weights.view(len(x), -1)
        total = self.pull(x, torch.einsum("nkr,nr->nk", cotangents, weights))
        found = self._batched(x, cotangents)
        if found is None or not _add_up(found, weights, total):
            found = torch.stack([self._pull_one(row, c) for row, c in zip(x.split(1), cotangents, strict=True)])
            if not _add_up(found, weights, total):
                raise ModelError(
                    "gradients at single inputs do not add up to the gradient at all inputs, because outputs at one "
                    "input depend on other inputs; let each row of outputs depend only on the same row of inputs"
                )
        return found

    def _batched(self, x: Tensor, cotangents: Tensor) -> Tensor | None:
        """Return the gradients at all inputs, or None if torch cannot batch a function of the module."""

        def one(row: Tensor, columns: Tensor) -> Tensor:
            back = vjp(lambda vector: self._call(vector, row.unsqueeze(0)).squeeze(0), self.vector)[1]
            return torch.vmap(lambda column: back(column)[0], in_dims=1)(columns)

        try:
            return torch.vmap(one)(x, cotangents).detach()
        except (RuntimeError, ValueError, UserWarning):
            return None

    def _pull_one(self, row: Tensor, columns: Tensor) -> Tensor:
        """Return gradients of one input's outputs, ``(1, ...)``, weighted by columns, ``(k, r)``, as ``(r, p)``."""
        back = vjp(lambda vector: self._call(vector, row), self.vector)[1]
        return torch.stack([back(column[None])[0] for column in columns.mT]).detach()

    def push(self, x: Tensor, tangent: Tensor) -> Tensor:
        """Return the derivative of outputs along a parameter vector, ``(n, k)``.

        This is the transpose of :meth:`pull`. If torch's forward mode is missing or is not the transpose, reverse mode
        is applied twice.
        """
        if self._has_plain_forward_mode:
            try:
                result: Tensor = along(lambda vector: self._call(vector, x), self.vector, tangent)[1]
                return result
            except (RuntimeError, NotImplementedError):  # a function of the module has no forward mode
                pass
        outputs, back = vjp(lambda vector: self._call(vector, x), self.vector)[:2]
        try:
            return vjp(lambda weights: back(weights)[0], torch.zeros_like(outputs))[1](tangent)[0]
        except (RuntimeError, NotImplementedError):  # the gradient of a function of the module has none
            identity = torch.eye(outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
            return torch.cat([(self._pull_one(row, identity) @ tangent)[None] for row in x.split(1)])

    @property
    def _has_plain_forward_mode(self) -> bool:
        """Whether no embedding has a padding row or scales gradients by frequency; forward mode ignores both."""
        kinds = (nn.Embedding, nn.EmbeddingBag)
        embeddings = [m for m in self.module.modules() if isinstance(m, kinds)]
        return all(m.padding_idx is None and not m.scale_grad_by_freq for m in embeddings)

    def pull(self, x: Tensor, cotangent: Tensor) -> Tensor:
        """Return the gradient of outputs weighted by ``cotangent``, ``(n, k)``, as ``(p,)``."""
        return vjp(lambda vector: self._call(vector, x), self.vector)[1](cotangent)[0]

    def _call(self, vector: Tensor, x: Tensor) -> Tensor:
        pieces = vector.split([shape.numel() for shape in self.shapes.values()])
        named = {name: piece.reshape(shape) for (name, shape), piece in zip(self.shapes.items(), pieces, strict=True)}
        constants = {name: value.clone() for name, value in self.constants.items()}  # the module may change them
        with plain_attention():
            result: Any = call_with(self.module, {**named, **constants}, x)
        if not isinstance(result, Tensor) or result.dim() not in (1, 2) or len(result) != len(x):
            found = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
            raise ShapeError(f"the module must return one row of outputs per input, ({len(x)}, k), not {found}")
        return result.unsqueeze(1) if result.dim() == 1 else result


def flat_network(module: nn.Module) -> FlatNetwork:
    """Return a copy of a module as a function of the flat vector of its parameters that require gradients.

    No such parameters, mixed dtypes or devices, and BatchNorm or dropout in training mode raise ``ModelError``.
    """
    if not isinstance(module, nn.Module):
        raise ModelError(f"the module must be a torch.nn.Module, not {type(module).__name__}")
    for name, layer in module.named_modules():
        if layer.training and isinstance(layer, nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd):
            raise ModelError(
                f"layer {name!r} ({type(layer).__name__}) is in training mode, where outputs are random or depend on "
                "the other inputs; call module.eval() first"
            )
    learned = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    if not learned:
        raise ModelError("the module has no parameters that require gradients")
    kinds = {(p.dtype, p.device) for p in learned.values()}
    if len(kinds) > 1:
        raise ModelError(f"parameters must have one dtype and device, not {sorted(map(str, kinds))}")
    fixed = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    fixed |= {name: b.detach().clone() for name, b in module.named_buffers()}
    vector = torch.cat([p.reshape(-1) for p in learned.values()])
    try:
        module = copy.deepcopy(module)
    except (RuntimeError, TypeError) as error:
        raise ModelError(
            f"the module cannot be copied: {error}; apply detach() to stored tensors that have an autograd graph"
        ) from error
    return FlatNetwork(module, vector, {name: p.shape for name, p in learned.items()}, fixed)


def _check_data(network: FlatNetwork, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the detached inputs ``(n, ...)`` and outputs ``(n, k)``, or raise if either is not finite or does not fit.

    Outputs that are random, or depend on other inputs, raise a ``ModelError``.
    """
    if not isinstance(x, Tensor) or x.dim() < 1 or not len(x):
        raise ShapeError(f"x must be a tensor with at least one input, (n, ...), not {getattr(x, 'shape', type(x))}")
    if x.is_floating_point() and x.dtype != network.vector.dtype:
        raise DataError(f"x is {x.dtype} but the parameters are {network.vector.dtype}; convert one of them")
    if x.device != network.vector.device:
        raise DataError(f"x is on {x.device} but the parameters are on {network.vector.device}; move one of them")
    x = x.detach()
    check_finite(x, "x")
    make_gradient_plan(network.module, x)
    outputs = network.outputs(x)
    check_finite(outputs, "the network's output")
    return x, outputs


def _add_up(rows: Tensor, weights: Tensor, total: Tensor) -> bool:
    """Whether gradients ``(n, r, p)``, weighted by ``(n, r)``, sum to the gradient at all inputs, ``(p,)``."""
    largest = max(float(rows.abs().max()), float(total.abs().max()))
    wrong = float((torch.tensordot(weights, rows, 2) - total).abs().max())
    return wrong <= torch.finfo(rows.dtype).eps ** 0.5 * largest * weights.numel() ** 0.5


def _row_blocks(num_rows: int, length: int) -> Iterator[slice]:
    """Yield consecutive blocks of rows."""
    for first in range(0, num_rows, length):
        yield slice(first, min(first + length, num_rows))


# Likelihoods of data given a network's outputs, with the curvature in the outputs.


class OutputLikelihood(ABC):
    """Base class of likelihoods of data given outputs.

    Outputs are ``(n, k)``, one row per observation.

    Attributes
    ----------
    natural : bool
        Whether outputs are natural parameters of an exponential family. The Hessian is then the Fisher information and
        does not depend on the data.
    """

    natural: bool = False

    @abstractmethod
    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return data in the form that other methods need; raise ``DataError`` or ``ShapeError`` if they do not fit."""

    @abstractmethod
    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log density of each observation, ``(n,)``."""

    @abstractmethod
    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the log density with respect to outputs, ``(n, k)``."""

    @abstractmethod
    def hessian(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the Hessian of the negative log density with respect to outputs, ``(n, k, k)``."""

    @abstractmethod
    def fisher(self, outputs: Tensor) -> Tensor:
        """Return the Fisher information with respect to outputs, ``(n, k, k)``."""

    @abstractmethod
    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one observation for each row of outputs."""

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Return ``R`` with ``R R^T`` the Fisher information, ``(n, k, k)``."""
        values, vectors = torch.linalg.eigh(self.fisher(outputs))
        return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


class _Independent(OutputLikelihood):
    """Independent exponential families, with natural parameters proportional to the outputs."""

    natural = True

    @abstractmethod
    def _precision(self, outputs: Tensor) -> Tensor:
        """Return the second derivative of minus the log density, ``(n, k)``."""

    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return data as ``(n, k)`` in the dtype of outputs; ``(n,)`` is allowed for one output."""
        if y.dim() == 1 and outputs.shape[1] == 1:
            y = y.unsqueeze(1)
        if y.shape != outputs.shape:
            raise ShapeError(f"y must be {tuple(outputs.shape)}, the shape of the outputs, not {tuple(y.shape)}")
        y = y.to(outputs)
        _refuse_rows(~torch.isfinite(y), "y has values that are not finite")
        return y

    def hessian(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the Hessian of the negative log density, ``(n, k, k)``; it equals the Fisher information."""
        return self.fisher(outputs)

    def fisher(self, outputs: Tensor) -> Tensor:
        """Return the Fisher information, diagonal, ``(n, k, k)``."""
        return torch.diag_embed(self._precision(outputs))

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Return the square root of the Fisher information, diagonal, ``(n, k, k)``."""
        return torch.diag_embed(self._precision(outputs).sqrt())


@dataclass(frozen=True)
class GaussianOutputs(_Independent):
    """Normal observations with known variance; outputs are means.

    Parameters
    ----------
    variance : float, default 1
        Observation variance, positive.

    Raises
    ------
    SettingsError
        If the variance is not positive and finite.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import GaussianOutputs
    >>> GaussianOutputs(0.25).fisher(torch.zeros(1, 2))
    tensor([[[4., 0.],
             [0., 4.]]])
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "variance", real_number("variance", self.variance, "(0, inf)"))

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log density of each observation, ``(n,)``."""
        constant = math.log(2 * math.pi * self.variance)
        return -0.5 * ((y - outputs).square() / self.variance + constant).sum(1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return residuals over the variance, ``(n, k)``."""
        return (y - outputs) / self.variance

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw data, ``(n, k)``."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=outputs.dtype, device=generator.device)
        return outputs + math.sqrt(self.variance) * noise.to(outputs.device)

    def _precision(self, outputs: Tensor) -> Tensor:
        return torch.full_like(outputs, 1 / self.variance)


@dataclass(frozen=True)
class BernoulliOutputs(_Independent):
    """Binary observations; outputs are logits.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import BernoulliOutputs
    >>> BernoulliOutputs().fisher(torch.zeros(1, 1))
    tensor([[[0.2500]]])
    """

    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return data as zeros and ones, ``(n, k)``."""
        y = super().targets(outputs, y)
        _refuse_rows((y != 0) & (y != 1), "y must be zeros and ones")
        return y

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log probability of each observation, ``(n,)``."""
        return (y * outputs - torch.nn.functional.softplus(outputs)).sum(1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return data minus probabilities, ``(n, k)``."""
        return y - outputs.sigmoid()

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw zeros and ones, ``(n, k)``."""
        return torch.bernoulli(outputs.sigmoid().to(generator.device), generator=generator).to(outputs)

    def _precision(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid() * (-outputs).sigmoid()


@dataclass(frozen=True)
class Poisson(_Independent):
    """Poisson counts; outputs are log rates.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Poisson
    >>> Poisson().score(torch.zeros(1, 1), torch.tensor([[3.0]]))
    tensor([[2.]])
    """

    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return counts, ``(n, k)``."""
        y = super().targets(outputs, y)
        _refuse_rows((y < 0) | (y != y.round()), "y must be counts, that is non-negative whole numbers")
        return y

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log probability of each observation, ``(n,)``."""
        return (y * outputs - outputs.exp() - torch.lgamma(y + 1)).sum(1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return counts minus rates, ``(n, k)``."""
        return y - outputs.exp()

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw counts, ``(n, k)``."""
        return torch.poisson(outputs.exp().to(generator.device), generator=generator).to(outputs)

    def _precision(self, outputs: Tensor) -> Tensor:
        return outputs.exp()


@dataclass(frozen=True)
class Categorical(OutputLikelihood):
    """Class labels, with ``k`` classes; outputs are logits.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Categorical
    >>> Categorical().fisher(torch.zeros(1, 2))
    tensor([[[ 0.2500, -0.2500],
             [-0.2500,  0.2500]]])
    """

    natural = True

    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return class indices, ``(n,)``."""
        if outputs.shape[1] < 2:
            raise ShapeError("a categorical likelihood needs two or more outputs; for one logit use BernoulliOutputs()")
        if y.shape != outputs.shape[:1]:
            raise ShapeError(f"y must be class indices, ({len(outputs)},), not {tuple(y.shape)}")
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise DataError(f"y must be class indices in an integer dtype, not {y.dtype}")
        wrong = (y < 0) | (y >= outputs.shape[1])
        _refuse_rows(wrong.unsqueeze(1), f"y must be class indices from 0 to {outputs.shape[1] - 1}")
        return y.to(outputs.device, torch.long)

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log probability of each observed class, ``(n,)``."""
        return outputs.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return class indicators minus probabilities, ``(n, k)``."""
        return torch.nn.functional.one_hot(y, outputs.shape[1]).to(outputs) - outputs.softmax(1)

    def hessian(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the Hessian of the negative log density, ``(n, k, k)``; it equals the Fisher information."""
        return self.fisher(outputs)

    def fisher(self, outputs: Tensor) -> Tensor:
        """Return ``diag(p) - p p^T``, ``(n, k, k)``."""
        p = outputs.softmax(1)
        return torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Return ``diag(sqrt p) - p sqrt(p)^T``, ``(n, k, k)``."""
        p = outputs.softmax(1)
        return torch.diag_embed(p.sqrt()) - p.unsqueeze(2) * p.sqrt().unsqueeze(1)

    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw classes, ``(n,)``."""
        p = outputs.softmax(1).to(generator.device)
        return torch.multinomial(p, 1, replacement=True, generator=generator).squeeze(1).to(outputs.device)


def _checked_likelihood(likelihood: OutputLikelihood) -> OutputLikelihood:
    """Return the likelihood, or raise a ``SettingsError`` if it is not an ``OutputLikelihood``."""
    if not isinstance(likelihood, OutputLikelihood):
        raise SettingsError(
            "likelihood must be an object such as GaussianOutputs(0.1), BernoulliOutputs() or Categorical(), not "
            f"{likelihood!r}"
        )
    return likelihood


def _refuse_rows(wrong: Tensor, message: str) -> None:
    rows = wrong.any(1).nonzero()
    if len(rows):
        raise DataError(f"{message}; the first invalid row is row {int(rows[0])}")


# A symmetric matrix: the identity plus a low-rank term.


@dataclass(frozen=True)
class System:
    """The matrix ``I + W^T W``: the posterior precision for prior precision one.

    Attributes
    ----------
    factor : Tensor
        Cholesky factor of the matrix in the coordinates of ``basis``, ``(m, m)``.
    basis : Tensor or None
        Orthonormal basis of the span of the rows of ``W``, as columns, ``(p, m)``; None for the whole space.
    """

    factor: Tensor
    basis: Tensor | None

    @property
    def log_determinant(self) -> float:
        """Log determinant of the matrix."""
        return 2 * float(self.factor.diagonal().log().sum())

    def quadratic(self, a: Tensor) -> Tensor:
        """Return ``a (I + W^T W)^{-1} a^T``, ``(m, m)``."""
        inside, outside = self._parts(a.mT)
        half = torch.linalg.solve_triangular(self.factor, inside, upper=False)
        # A sum of squares: the difference in Woodbury's formula cancels if the data are informative.
        return half.mT @ half + (0 if outside is None else outside.mT @ outside)

    def solve(self, v: Tensor) -> Tensor:
        """Return ``(I + W^T W)^{-1} v``, ``(p,)``."""
        inside, outside = self._parts(v.unsqueeze(1))
        inside = torch.cholesky_solve(inside, self.factor)
        return (inside if self.basis is None or outside is None else outside + self.basis @ inside).squeeze(1)

    def sample(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw from the centred normal distribution with this precision, ``(count, p)``."""
        size = len(self.factor if self.basis is None else self.basis)
        drawn = torch.randn(size, count, generator=generator, dtype=self.factor.dtype, device=generator.device)
        inside, outside = self._parts(drawn.to(self.factor.device))
        inside = torch.linalg.solve_triangular(self.factor.mT, inside, upper=True)
        return (inside if self.basis is None or outside is None else outside + self.basis @ inside).mT

    def _parts(self, columns: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the coordinates in the span of ``basis``, and the components orthogonal to it (or None)."""
        if self.basis is None:
            return columns, None
        inside = self.basis.mT @ columns
        outside = columns - self.basis @ inside
        # A second projection removes rounding errors.
        return inside, outside - self.basis @ (self.basis.mT @ outside)


# A curvature matrix of a network, held as its factors.

LARGEST = 20_000  # largest number of rows of a matrix that is formed
_COLUMNS = 16  # number of vectors multiplied at once


class OutputCurvature(NamedTuple):
    """Curvature in the outputs, ``root diag(signs) root^T`` for each observation.

    Attributes
    ----------
    root : Tensor
        ``(n, k, r)``.
    signs : Tensor or None
        Plus and minus one, ``(n, r)``; None if all are plus one.
    """

    root: Tensor
    signs: Tensor | None


class Trace(NamedTuple):
    """A trace and its Monte Carlo standard error, which is zero for an exact trace."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Curvature:
    """Symmetric ``p x p`` matrix ``scale * sum_i J_i^T A_i J_i``.

    ``J_i`` is the Jacobian of the outputs at input ``i`` with respect to the parameters, ``A_i`` the curvature in these
    outputs. Made by :func:`fisher`, :func:`gauss_newton` and :func:`empirical_fisher`.

    Attributes
    ----------
    name : str
        Name of the matrix.
    network : FlatNetwork
    x : Tensor
        Inputs, ``(n, ...)``.
    factor : callable
        Maps a slice of inputs to its :class:`OutputCurvature`.
    num_outputs : int
        ``k``.
    rank : int
        Number of columns of a factor, ``r``.
    scale : float
        1 for the sum over observations, ``1 / n`` for the mean.
    warnings : tuple of str
        Failed diagnostics, each with a remedy.
    diagnostics : dict of float
        Values of the diagnostics.
    """

    name: str
    network: FlatNetwork
    x: Tensor
    factor: Callable[[slice], OutputCurvature]
    num_outputs: int
    rank: int
    scale: float = 1.0
    warnings: tuple[str, ...] = ()
    diagnostics: dict[str, float] = field(default_factory=dict)

    @property
    def trusted(self) -> bool:
        """Whether all diagnostics passed."""
        return not self.warnings

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, ``(p, p)``."""
        return self.network.num_parameters, self.network.num_parameters

    @property
    def dual_size(self) -> int:
        """Number of rows of :meth:`dual`, ``n * r``."""
        return len(self.x) * self.rank

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return f"{self.name} of {self.shape[0]} parameters and {len(self.x)} data{flag}"

    def __matmul__(self, v: Tensor) -> Tensor:
        """Multiply by a vector ``(p,)`` or by the columns of a matrix ``(p, m)``, without forming the curvature."""
        if v.dim() not in (1, 2) or len(v) != self.shape[0]:
            raise ShapeError(
                f"the curvature can be multiplied by ({self.shape[0]},) or ({self.shape[0]}, m), not {tuple(v.shape)}"
            )
        if not bool(torch.isfinite(v).all()):
            raise DataError("v has values that are not finite")
        v = v.detach().to(self.network.vector)
        if v.dim() == 1:
            return self._product(v)
        return self._batched_products(v)

    def _batched_products(self, v: Tensor) -> Tensor:
        """Multiply by all columns at once, or one by one if batched products fail or are wrong."""
        weights = torch.arange(1.0, v.shape[1] + 1, dtype=torch.float64).cos().to(v)
        try:
            found = torch.vmap(self._product, in_dims=1, out_dims=1, chunk_size=_COLUMNS)(v)
            total = self._product(v @ weights)
            accuracy = torch.finfo(v.dtype).eps ** 0.5
            if float((found @ weights - total).abs().max()) <= accuracy * float(found.abs().max()) * v.shape[1] ** 0.5:
                return found
        except (RuntimeError, NotImplementedError, UserWarning):  # a function of the module cannot be batched
            pass
        return torch.stack([self._product(column) for column in v.mT], 1)

    def matrix(self) -> Tensor:
        """Return the dense matrix, ``(p, p)``.

        Raises
        ------
        SettingsError
            If there are too many parameters.
        """
        p = _formed("the curvature", self.shape[0], "multiply by vectors (@), or use dual()")
        result = self.network.vector.new_zeros(p, p)
        for rows, signs in self._rows():
            result.addmm_((rows if signs is None else rows * signs.unsqueeze(1)).mT, rows)
        return self.scale * result

    def dual(self) -> Tensor:
        r"""Return the dual matrix ``scale * G G^T``, ``(n r, n r)``, if the matrix is ``scale * G^T G``.

        The nonzero eigenvalues of both are the same. For the Fisher information of normal observations with unit
        variance, ``G = J`` and the dual is the empirical neural tangent kernel.

        Raises
        ------
        ModelError
            If the matrix is indefinite.
        SettingsError
            If there are too many observations.
        """
        rows = self.rows()
        return self.scale * (rows @ rows.mT)

    def rows(self) -> Tensor:
        """Return ``G``, ``(n r, p)``, if the matrix is ``scale * G^T G``; errors are the same as for :meth:`dual`."""
        _formed("the dual", self.dual_size, "multiply by vectors (@), or use matrix()")
        if self.dual_size * self.shape[0] > LARGEST**2:
            raise SettingsError(
                f"the gradients would be {self.dual_size} x {self.shape[0]} numbers, more than {LARGEST**2}; multiply "
                "by vectors (@), freeze parameters, or use fewer observations"
            )
        result = self.network.vector.new_empty(self.dual_size, self.shape[0])
        first = 0
        for rows, signs in self._rows():
            if signs is not None and bool((signs < 0).any()):
                raise ModelError(f"the {self.name} is indefinite at these data; use the Fisher information instead")
            result[first : first + len(rows)] = rows if signs is None else rows * signs.unsqueeze(1)
            first += len(rows)
        return result

    def diagonal(self) -> Tensor:
        """Return the diagonal, ``(p,)``."""
        result = torch.zeros_like(self.network.vector)
        for rows, signs in self._rows():
            squares = rows.square()
            result += (squares if signs is None else squares * signs.unsqueeze(1)).sum(0)
        return self.scale * result

    def trace(self, num_probes: int | None = None, *, seed: int | torch.Generator = 0) -> Trace:
        """Return the trace, exact or estimated from products with random vectors.

        Parameters
        ----------
        num_probes : int, optional
            Number of random sign vectors, at least 2. By default the trace is exact and all Jacobians are computed.
        seed : int or torch.Generator, default 0

        References
        ----------
        Hutchinson, M. F. (1989). A stochastic estimator of the trace of the influence matrix for Laplacian smoothing
        splines. Communications in Statistics: Simulation and Computation 18, 1059-1076.
        """
        if num_probes is None:
            return Trace(float(self.diagonal().sum()), 0.0)
        count = whole_number("num_probes", num_probes, least=2)
        generator = new_generator(seed, stream="trace")
        values = []
        for _ in range(count):
            bits = torch.randint(0, 2, (self.shape[0],), generator=generator, device=generator.device)
            probe = (2 * bits - 1).to(self.network.vector)
            values.append(float(probe @ self._product(probe)))
        return Trace(float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(count))

    def eigenvalues(self) -> Tensor:
        """Return all eigenvalues, ascending, ``(p,)``, computed from the smaller of the matrix and its dual.

        Raises
        ------
        SettingsError
            If both are too large.
        """
        if self.dual_size >= self.shape[0]:
            return torch.linalg.eigvalsh(self.matrix())
        found = torch.linalg.eigvalsh(self.dual())
        return torch.cat([found.new_zeros(self.shape[0] - len(found)), found]).sort().values

    def solve(
        self, v: Tensor, damping: float, *, tolerance: float | None = None, max_iterations: int | None = None
    ) -> Tensor:
        """Return the solution of ``(matrix + damping I) u = v`` by conjugate gradients, ``(p,)``.

        Parameters
        ----------
        v : Tensor
            ``(p,)``.
        damping : float
            Non-negative.
        tolerance : float, optional
            Norm of the residual relative to the norm of ``v``; by default 1e-10, or 1e-5 in single precision.
        max_iterations : int, optional
            By default ``10 p``.

        Raises
        ------
        BudgetError
            If the iterations do not reach the tolerance.
        DataError
            If ``v`` is not finite.
        """
        v, damping = self._system(v, damping)
        if tolerance is None:
            tolerance = 1e-10 if v.dtype == torch.float64 else 1e-5

        def product(u: np.ndarray) -> np.ndarray:
            given = torch.as_tensor(np.ascontiguousarray(u).reshape(-1)).to(v)
            return (self._product(given) + damping * given).double().cpu().numpy()

        operator = LinearOperator(self.shape, matvec=product, dtype=np.float64)
        found, failed = cg(operator, v.double().cpu().numpy(), rtol=tolerance, atol=0.0, maxiter=max_iterations)
        if failed:
            raise BudgetError(
                f"conjugate gradients did not reach a relative residual of {tolerance:g} in {failed} iterations; "
                "raise damping, tolerance or max_iterations, or call solve_exactly"
            )
        return torch.as_tensor(found).to(v)

    def solve_exactly(self, v: Tensor, damping: float) -> Tensor:
        """Return the solution of ``(matrix + damping I) u = v`` by Cholesky factorisation, ``(p,)``.

        With positive damping the smaller of the matrix and its dual is factorised, otherwise the matrix.

        Raises
        ------
        ModelError
            If the dual is used and the matrix is indefinite.
        SettingsError
            If the damped matrix is not positive definite to working precision, or both matrices are too large.
        """
        v, damping = self._system(v, damping)
        if self.dual_size >= self.shape[0] or damping == 0:
            return _positive_solve(_damped(self.matrix(), damping), v, self.name)
        rows = self.rows()
        kernel = _damped(self.scale * (rows @ rows.mT), damping)
        return (v - self.scale * rows.mT @ _positive_solve(kernel, rows @ v, self.name)) / damping

    def _system(self, v: Tensor, damping: float) -> tuple[Tensor, float]:
        if v.shape != (self.shape[0],):
            raise ShapeError(f"v must be ({self.shape[0]},), not {tuple(v.shape)}")
        if not bool(torch.isfinite(v).all()):
            raise DataError("v has values that are not finite")
        damping = real_number("damping", damping)
        if not 0 <= damping < math.inf:
            raise SettingsError(f"damping must be finite and not negative, not {damping:g}")
        return v.detach().to(self.network.vector), damping

    def _product(self, v: Tensor) -> Tensor:
        result = torch.zeros_like(v)
        for block in _row_blocks(len(self.x), self._length(self.num_outputs, PRODUCT_ROWS)):
            root, signs = self.factor(block)
            inner = torch.einsum("nkr,nk->nr", root, self.network.push(self.x[block], v))
            if signs is not None:
                inner = signs * inner
            result = result + self.network.pull(self.x[block], torch.einsum("nkr,nr->nk", root, inner))
        return self.scale * result

    def _rows(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield blocks of ``G``, ``(rows, p)``, and their signs."""
        for block in _row_blocks(len(self.x), self._length(self.shape[0] + self.num_outputs, len(self.x))):
            root, signs = self.factor(block)
            rows = self.network.pull_each(self.x[block], root)
            yield rows.flatten(0, 1), None if signs is None else signs.flatten()

    def _length(self, numbers: int, most: int) -> int:
        """Return the number of inputs per block, given the numbers held per input and column of a factor."""
        return max(min(BLOCK_SIZE // (numbers * self.rank), most), 1)


def _formed(name: str, size: int, remedy: str) -> int:
    if size > LARGEST:
        raise SettingsError(f"{name} would have {size} rows, more than {LARGEST}; {remedy}")
    return size


def _damped(matrix: Tensor, damping: float) -> Tensor:
    return matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype, device=matrix.device)


def _positive_solve(matrix: Tensor, v: Tensor, name: str) -> Tensor:
    factor, failed = torch.linalg.cholesky_ex(matrix)
    # Rounding often makes a singular matrix factorisable; its pivots are then tiny.
    pivots = factor.diagonal().square() / matrix.diagonal()
    if bool(failed) or float(pivots.min()) < 8 * len(matrix) * torch.finfo(matrix.dtype).eps:
        raise SettingsError(f"the {name} with this damping is not positive definite; use a larger damping")
    return torch.cholesky_solve(v.unsqueeze(1), factor).squeeze(1)


# Tests whether the empirical Fisher is close to the Fisher information for the observed data.

_NUM_DIRECTIONS = 8
_NUM_REPLICATES = 200
_LARGEST_RATIO = 1.25
_LARGEST_Z = 5.0
_LARGEST_NOISE = 0.3
_LARGEST_GRADIENT = 12.0  # a squared standard normal variable exceeds it with probability 1 / 2,000


def _empirical_problems(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, outputs: Tensor, targets: Tensor, seed: int
) -> tuple[tuple[str, ...], dict[str, float]]:
    """Return problems with remedies, and diagnostics, of empirical against expected Fisher along random directions."""
    generator = new_generator(seed, stream="empirical Fisher")
    tangents = torch.randn(
        _NUM_DIRECTIONS,
        network.num_parameters,
        generator=generator,
        dtype=network.vector.dtype,
        device=generator.device,
    ).to(network.vector)
    along = _pushed(network, x, tangents)
    root = torch.einsum("nkr,nkm->nrm", likelihood.fisher_root(outputs), along)
    expected = root.square().sum((0, 1))
    score = likelihood.score(outputs, targets)
    ratio = _quadratic(score, along) / expected
    drawn = torch.stack(
        [
            _quadratic(likelihood.score(outputs, likelihood.sample(outputs, generator)), along) / expected
            for _ in range(_NUM_REPLICATES)
        ]
    )
    noise = drawn.std(0)
    # The mean square of random Gaussian projections is the trace.
    projected = torch.einsum("nk,nkm->m", score, along)
    diagnostics = {
        "ratio": float(ratio.mean()),
        "z": float(((ratio - 1) / noise)[((ratio - 1) / noise).abs().argmax()]),
        "noise": float(noise.mean()),
        "gradient": float(projected.square().sum() / expected.sum()),
    }
    return tuple(_problems(ratio, noise, diagnostics)), diagnostics


def _problems(ratio: Tensor, noise: Tensor, diagnostics: dict[str, float]) -> list[str]:
    remedy = "use fisher() or gauss_newton()"
    found = []
    unlike = (torch.maximum(ratio, 1 / ratio) > _LARGEST_RATIO) & (((ratio - 1) / noise).abs() > _LARGEST_Z)
    if bool(unlike.any()) or not bool(torch.isfinite(ratio).all()):
        worst = float(ratio[ratio.log().abs().argmax()])
        found.append(
            f"the residuals disagree with the model: along a random direction the empirical Fisher is {worst:.3g} "
            f"times the Fisher information; {remedy}"
        )
    if diagnostics["gradient"] > _LARGEST_GRADIENT:
        found.append(
            f"the parameters are not at an optimum: the squared gradient is {diagnostics['gradient']:.3g} times its "
            f"expectation under the model; {remedy}"
        )
    if diagnostics["noise"] > _LARGEST_NOISE:
        found.append(
            f"there are too few observations: even for data from the model, the empirical Fisher would have a relative "
            f"error of {100 * diagnostics['noise']:.0f} %; {remedy}"
        )
    return found


def _pushed(network: FlatNetwork, x: Tensor, tangents: Tensor) -> Tensor:
    """Return derivatives of outputs along each vector, ``(n, k, m)``."""
    blocks = _row_blocks(len(x), PRODUCT_ROWS)
    return torch.cat([torch.stack([network.push(x[rows], v) for v in tangents], 2) for rows in blocks])


def _quadratic(score: Tensor, along: Tensor) -> Tensor:
    return torch.einsum("nk,nkm->nm", score, along).square().sum(0)


# Fisher information, generalized Gauss-Newton and empirical Fisher of a network.


def fisher(module: nn.Module, likelihood: OutputLikelihood, x: Tensor, *, mean: bool = False) -> Curvature:
    r"""Return the Fisher information of a network's parameters, at their current values.

    .. math:: F = \sum_i \mathrm{E}_{y \sim p(y \mid f_\theta(x_i))}
       \nabla_\theta \log p(y \mid f_\theta(x_i))\, \nabla_\theta \log p(y \mid f_\theta(x_i))^\top
       = \sum_i J_i^\top F_i J_i.

    The expectation is over data from the model; observed data are not used.

    Parameters
    ----------
    module : torch.nn.Module
        Maps ``(n, ...)`` to outputs ``(n, k)`` or ``(n,)``. Parameters that do not require gradients are constants.
    likelihood : OutputLikelihood
        Distribution of the data given outputs.
    x : Tensor
        Inputs, ``(n, ...)``.
    mean : bool, default False
        Whether to divide the sum over observations by ``n``.

    Returns
    -------
    Curvature

    Raises
    ------
    ModelError
        If no parameter requires gradients, or outputs are random.
    DataError, ShapeError
        If inputs or outputs are not finite or have the wrong shape.

    References
    ----------
    Amari, S. (1998). Natural gradient works efficiently in learning. Neural Computation 10, 251-276.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import GaussianOutputs, fisher
    >>> line = torch.nn.Linear(2, 1, bias=False)
    >>> fisher(line, GaussianOutputs(), torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])).matrix()
    tensor([[3., 3.],
            [3., 5.]])
    """
    return _fisher_of(flat_network(module), _checked_likelihood(likelihood), x, mean)


def gauss_newton(
    module: nn.Module, likelihood: OutputLikelihood, x: Tensor, y: Tensor, *, mean: bool = False
) -> Curvature:
    r"""Return the generalized Gauss-Newton matrix of the negative log likelihood, at the current parameters.

    .. math:: G = \sum_i J_i^\top \Big[-\nabla_f^2 \log p(y_i \mid f)\Big]_{f = f_\theta(x_i)} J_i

    It is the Hessian without the terms with second derivatives of the network. It equals the Hessian if outputs are
    linear in the parameters, and the Fisher information if outputs are natural parameters.

    Parameters
    ----------
    module, likelihood, x, mean
        As in :func:`fisher`.
    y : Tensor
        Data, ``(n, k)``, or ``(n,)`` for one output or class labels.

    Returns
    -------
    Curvature

    Raises
    ------
    ModelError, DataError, ShapeError
        As in :func:`fisher`, and if data do not fit the likelihood.

    References
    ----------
    Schraudolph, N. N. (2002). Fast curvature matrix-vector products for second-order gradient descent. Neural
    Computation 14, 1723-1738.

    Martens, J. (2020). New insights and perspectives on the natural gradient method. Journal of Machine Learning
    Research 21 (146), 1-76.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Poisson, gauss_newton
    >>> rate = torch.nn.Linear(1, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(rate.weight)
    >>> gauss_newton(rate, Poisson(), torch.tensor([[1.0], [2.0]]), torch.tensor([0, 3])).matrix()
    tensor([[5.]])
    """
    return gauss_newton_of(flat_network(module), _checked_likelihood(likelihood), x, y, mean)


def empirical_fisher(
    module: nn.Module, likelihood: OutputLikelihood, x: Tensor, y: Tensor, *, mean: bool = False, seed: int = 0
) -> Curvature:
    r"""Return the empirical Fisher: the sum of outer products of per-observation gradients at the observed data.

    .. math:: E = \sum_i \nabla_\theta \log p(y_i \mid f_\theta(x_i))\,
       \nabla_\theta \log p(y_i \mid f_\theta(x_i))^\top

    Its expectation is the Fisher information only if the data come from the model at these parameters. Otherwise
    observations are weighted by squared residuals, which are unrelated to curvature. The result is tested for this: see
    ``trusted`` and ``warnings``.

    Parameters
    ----------
    module, likelihood, x, y, mean
        As in :func:`gauss_newton`.
    seed : int, default 0
        Seed of the test.

    Returns
    -------
    Curvature
        Its ``diagnostics`` are ``ratio`` (empirical Fisher over Fisher information, mean over random directions),
        ``noise`` (standard deviation of the ratio under the model), ``z`` (largest deviation of the ratio from one, in
        standard deviations), and ``gradient`` (squared gradient over its expectation under the model).

    Raises
    ------
    ModelError, DataError, ShapeError
        As in :func:`gauss_newton`.

    References
    ----------
    Kunstner, F., Balles, L., Hennig, P. (2019). Limitations of the empirical Fisher approximation for natural gradient
    descent. Advances in Neural Information Processing Systems 32.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import GaussianOutputs, empirical_fisher
    >>> line = torch.nn.Linear(2, 1, bias=False)
    >>> _ = torch.nn.init.zeros_(line.weight)
    >>> x, y = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]), torch.tensor([0.0, 2.0, 1.0])
    >>> found = empirical_fisher(line, GaussianOutputs(), x, y)
    >>> found.matrix(), found.trusted
    (tensor([[5., 6.],
            [6., 8.]]), False)
    """
    likelihood, network = _checked_likelihood(likelihood), flat_network(module)
    found = _empirical_fisher_of(network, likelihood, x, y, mean)
    outputs = network.outputs(found.x)
    problems, diagnostics = _empirical_problems(
        network, likelihood, found.x, outputs, likelihood.targets(outputs, y), seed
    )
    return replace(found, warnings=problems, diagnostics=diagnostics)


def _fisher_of(network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, mean: bool = False) -> Curvature:
    """Return the Fisher information of a flat network."""
    x, outputs = _check_data(network, x)

    def factor(rows: slice) -> OutputCurvature:
        return OutputCurvature(likelihood.fisher_root(outputs[rows]), None)

    return Curvature(
        "Fisher information", network, x, factor, outputs.shape[1], outputs.shape[1], 1 / len(x) if mean else 1.0
    )


def gauss_newton_of(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, y: Tensor, mean: bool = False
) -> Curvature:
    """Return the generalized Gauss-Newton matrix of a flat network."""
    x, outputs = _check_data(network, x)
    targets = likelihood.targets(outputs, y)

    def factor(rows: slice) -> OutputCurvature:
        if likelihood.natural:
            return OutputCurvature(likelihood.fisher_root(outputs[rows]), None)
        values, vectors = torch.linalg.eigh(likelihood.hessian(outputs[rows], targets[rows]))
        return OutputCurvature(vectors * values.abs().sqrt().unsqueeze(1), values.sign())

    name = "generalized Gauss-Newton matrix"
    return Curvature(name, network, x, factor, outputs.shape[1], outputs.shape[1], 1 / len(x) if mean else 1.0)


def _empirical_fisher_of(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, y: Tensor, mean: bool = False
) -> Curvature:
    """Return the empirical Fisher of a flat network, without the test."""
    x, outputs = _check_data(network, x)
    targets = likelihood.targets(outputs, y)

    def factor(rows: slice) -> OutputCurvature:
        return OutputCurvature(likelihood.score(outputs[rows], targets[rows]).unsqueeze(2), None)

    return Curvature("empirical Fisher", network, x, factor, outputs.shape[1], 1, 1 / len(x) if mean else 1.0)


# Natural gradients, and their fields over the plane of two parameters.

EXACT_SIZE = 2000  # largest number of rows of a matrix that is factorised


def natural_gradient(
    module: nn.Module, likelihood: OutputLikelihood, x: Tensor, y: Tensor, damping: float = 0.0
) -> Tensor:
    r"""Return the natural gradient of the log likelihood.

    .. math:: (F + \lambda I)^{-1} \nabla_\theta \sum_i \log p(y_i \mid f_\theta(x_i))

    Without damping the resulting change of the outputs is, to first order, invariant to the parametrisation of the
    network.

    Parameters
    ----------
    module, likelihood, x, y
        As in :func:`gauss_newton`.
    damping : float, default 0
        :math:`\lambda`; must be positive if the number of parameters exceeds the total number of outputs, ``n k``.

    Returns
    -------
    Tensor
        Natural gradient in the order of the parameters that require gradients, ``(p,)``. It is computed by
        factorisation if the Fisher information or its dual has at most 2,000 rows, otherwise by conjugate gradients.

    Raises
    ------
    SettingsError
        If the damped Fisher information is singular.
    BudgetError
        If conjugate gradients do not converge.
    ModelError, DataError, ShapeError
        As in :func:`gauss_newton`.

    References
    ----------
    Amari, S. (1998). Natural gradient works efficiently in learning. Neural Computation 10, 251-276.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import GaussianOutputs, natural_gradient
    >>> line = torch.nn.Linear(2, 1, bias=False, dtype=torch.float64)
    >>> _ = torch.nn.init.zeros_(line.weight)
    >>> x = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]], dtype=torch.float64)
    >>> natural_gradient(line, GaussianOutputs(), x, torch.tensor([0.0, 2.0, 1.0]))  # the least-squares fit in a step
    tensor([0.5000, 0.5000], dtype=torch.float64)
    """
    likelihood, network = _checked_likelihood(likelihood), flat_network(module)
    return _solved(_fisher_of(network, likelihood, x), log_likelihood_gradient(network, likelihood, x, y), damping)


def log_likelihood_gradient(network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the log likelihood of all data, ``(p,)``."""
    x, outputs = _check_data(network, x)
    score = likelihood.score(outputs, likelihood.targets(outputs, y))
    result = torch.zeros_like(network.vector)
    for rows in _row_blocks(len(x), PRODUCT_ROWS):
        result = result + network.pull(x[rows], score[rows])
    return result


class GradientFields(NamedTuple):
    """Three directions of ascent at each point of a grid; all tensors are ``(n1, n2, 2)``.

    Attributes
    ----------
    points : Tensor
        Values of the two parameters.
    gradient : Tensor
        Gradient of the log likelihood.
    natural : Tensor
        Gradient preconditioned with the Fisher information.
    empirical : Tensor
        Gradient preconditioned with the empirical Fisher.
    """

    points: Tensor
    gradient: Tensor
    natural: Tensor
    empirical: Tensor

    def plot(self, axes: list[Axes]) -> None:
        """Plot each of the three fields as streamlines in one of the axes."""
        fields = (self.gradient, self.natural, self.empirical)
        titles = ("gradient", "natural gradient", "empirical Fisher")
        first, second = self.points[:, 0, 0].cpu().numpy(), self.points[0, :, 1].cpu().numpy()
        for ax, title, arrows, colour in zip(axes, titles, fields, (BLUE, ORANGE, VERMILION), strict=True):
            # Matplotlib's rows are the vertical axis.
            u, v = arrows.permute(2, 1, 0).cpu().numpy()
            ax.streamplot(first, second, u, v, color=colour, linewidth=0.8, density=0.9, arrowsize=0.8)
            ax.set(title=title, xlabel="first parameter", ylabel="second parameter")


def gradient_fields(
    module: nn.Module,
    likelihood: OutputLikelihood,
    x: Tensor,
    y: Tensor,
    first: Tensor,
    second: Tensor,
    damping: float = 1e-8,
) -> GradientFields:
    """Evaluate the gradient, the natural gradient and the empirical-Fisher gradient on a grid of two parameters.

    Parameters
    ----------
    module, likelihood, x, y
        As in :func:`gauss_newton`; the module has two parameters.
    first, second : Tensor
        Values of the two parameters, ``(n1,)`` and ``(n2,)``; for plots increasing and evenly spaced.
    damping : float, default 1e-8
        Added to both matrices.

    Returns
    -------
    GradientFields

    Raises
    ------
    ModelError
        If the module does not have two parameters.
    SettingsError, DataError, ShapeError
        As in :func:`natural_gradient`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import GaussianOutputs, gradient_fields
    >>> x, y = torch.tensor([[-1.0], [0.0], [1.0]]), torch.tensor([-1.0, 0.5, 2.0])
    >>> grid = torch.linspace(-3.0, 3.0, 5)
    >>> fields = gradient_fields(torch.nn.Linear(1, 1), GaussianOutputs(), x, y, grid, grid)
    >>> (fields.points + fields.natural)[0, 0]  # every arrow ends at the fit
    tensor([1.5000, 0.5000])
    """
    likelihood, network = _checked_likelihood(likelihood), flat_network(module)
    if network.num_parameters != 2:
        raise ModelError(
            f"the module must have 2 parameters that require gradients, not {network.num_parameters}; freeze the others"
        )
    if first.dim() != 1 or second.dim() != 1:
        raise ShapeError(f"first and second must be (n1,) and (n2,), not {tuple(first.shape)}, {tuple(second.shape)}")
    points = torch.stack(torch.meshgrid(first, second, indexing="ij"), 2).to(network.vector)
    found = []
    for point in points.reshape(-1, 2):
        here = network.at(point)
        gradient = log_likelihood_gradient(here, likelihood, x, y)
        matrices = _fisher_of(here, likelihood, x), _empirical_fisher_of(here, likelihood, x, y)
        found.append(torch.stack([gradient, *(m.solve_exactly(gradient, damping) for m in matrices)]))
    fields = torch.stack(found).reshape(*points.shape[:2], 3, 2)
    return GradientFields(points, *fields.unbind(2))


def _solved(curvature: Curvature, v: Tensor, damping: float) -> Tensor:
    if min(curvature.dual_size, curvature.shape[0]) <= EXACT_SIZE:
        return curvature.solve_exactly(v, damping)
    return curvature.solve(v, damping)


# The normal approximation to a network's posterior at a mode, with the Gauss-Newton matrix as its curvature.

POLISHED = 1000  # largest number of rows of a matrix for which Gauss-Newton steps are taken
NUM_STEPS = 20
_CLOSE = 0.1  # posterior standard deviations


class Prediction(NamedTuple):
    """Normal distribution of a linearised network's outputs.

    Attributes
    ----------
    mean : Tensor
        Outputs at the mode, ``(n, k)``.
    covariance : Tensor
        Covariance of outputs at each input, without observation noise, ``(n, k, k)``.
    """

    mean: Tensor
    covariance: Tensor


@dataclass(frozen=True, repr=False)
class LaplacePosterior:
    r"""Laplace posterior ``N(mean, (diag(prior_precision) + GGN)^{-1})``; made by :func:`laplace_posterior`.

    Attributes
    ----------
    curvature : Curvature
        Gauss-Newton matrix (GGN).
    prior_precision : Tensor
        ``(p,)``.
    log_likelihood : float
        Log likelihood of all data at the mode.
    distance : float
        Length of a Newton step from ``mean``, in posterior standard deviations.
    system : System
        Factorised precision, scaled to prior precision one.
    likelihood : OutputLikelihood
    """

    curvature: Curvature
    prior_precision: Tensor
    log_likelihood: float
    distance: float
    system: System
    likelihood: OutputLikelihood

    def __repr__(self) -> str:
        n, p = len(self.curvature.x), len(self.mean)
        return f"Laplace posterior of {p} parameters from {n} data, log evidence {self.log_evidence:.6g}"

    @property
    def mean(self) -> Tensor:
        """The mode, ``(p,)``."""
        return self.curvature.network.vector

    @property
    def log_evidence(self) -> float:
        """Laplace approximation to the log marginal likelihood."""
        misfit = float((self.prior_precision * self.mean.square()).sum())
        return self.log_likelihood - 0.5 * misfit - 0.5 * self.system.log_determinant

    def precision(self) -> Tensor:
        """Return the inverse covariance, ``(p, p)``."""
        return self.curvature.matrix() + torch.diag(self.prior_precision)

    def covariance(self) -> Tensor:
        """Return the covariance of parameters, ``(p, p)``."""
        return self.system.quadratic(torch.diag(self.prior_precision.rsqrt()))

    def predict(self, x: Tensor) -> Prediction:
        """Return mean and covariance of the outputs of the network linearised at the mode.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, ...)``.

        References
        ----------
        Immer, A., Korzepa, M., Bauer, M. (2021). Improving predictions of Bayesian neural nets via local
        linearization. International Conference on Artificial Intelligence and Statistics.
        """
        network = self.curvature.network
        x, outputs = _check_data(network, x)
        length = max(BLOCK_SIZE // (network.num_parameters * outputs.shape[1]), 1)
        found = []
        for rows in _row_blocks(len(x), length):
            scaled = network.jacobian(x[rows]) * self.prior_precision.rsqrt()
            found += [self.system.quadratic(one) for one in scaled]
        return Prediction(outputs, torch.stack(found))

    def predict_probabilities(self, x: Tensor, *, num_samples: int = 10_000, seed: int | torch.Generator = 0) -> Tensor:
        """Return predictive probabilities, averaged over the distribution of outputs from :meth:`predict`.

        Parameters
        ----------
        x : Tensor
            Inputs, ``(n, ...)``.
        num_samples : int, default 10_000
            Number of draws of outputs for :class:`Categorical`; the standard error is at most
            ``0.5 / sqrt(num_samples)``. Not used for :class:`BernoulliOutputs`, whose integrals are computed to about
            eight digits.
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor
            ``(n, k)``: probabilities of ones for :class:`BernoulliOutputs`, of classes for :class:`Categorical`.

        Raises
        ------
        SettingsError
            If the likelihood is neither of these.
        """
        count = whole_number("num_samples", num_samples, least=1)
        if not isinstance(self.likelihood, BernoulliOutputs | Categorical):
            name = type(self.likelihood).__name__
            raise SettingsError(f"the likelihood must be BernoulliOutputs or Categorical, not {name}; call predict()")
        mean, covariance = self.predict(x)
        if isinstance(self.likelihood, BernoulliOutputs):
            return _mean_sigmoid(mean, covariance.diagonal(dim1=1, dim2=2).sqrt())
        generator = new_generator(seed, stream="predictive probabilities")
        size = count, mean.shape[1]
        noise = torch.randn(size, generator=generator, dtype=mean.dtype, device=generator.device).to(mean)
        values, vectors = torch.linalg.eigh(covariance)
        roots = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        return torch.stack([(m + noise @ root.mT).softmax(1).mean(0) for m, root in zip(mean, roots, strict=True)])

    def sample(self, num_samples: int = 1, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw parameters, ``(num_samples, p)``.

        To write a draw into a copy of the module, use
        ``torch.nn.utils.vector_to_parameters(draw, [p for p in module.parameters() if p.requires_grad])``.
        """
        count = whole_number("num_samples", num_samples, least=1)
        generator = new_generator(seed, stream="laplace posterior")
        return self.mean + self.system.sample(count, generator) * self.prior_precision.rsqrt()


def laplace_posterior(
    module: nn.Module,
    likelihood: OutputLikelihood,
    x: Tensor,
    y: Tensor,
    prior_precision: float | Tensor,
    *,
    tolerance: float = 0.1,
) -> LaplacePosterior:
    r"""Return the Laplace approximation to the posterior of a network's parameters at a mode.

    The prior is normal with mean zero. The posterior precision is the prior precision plus the generalized Gauss-Newton
    matrix. If outputs are natural parameters, this matrix is positive semidefinite and does not depend on residuals.

    Parameters
    ----------
    module : torch.nn.Module
        Its parameters must be at a mode of the posterior; see :func:`find_parameter_mode`.
    likelihood, x, y
        As in :func:`gauss_newton`.
    prior_precision : float or Tensor
        Positive; a number, or a value per parameter, ``(p,)``.
    tolerance : float, default 0.1
        Largest length of a Newton step at the mode, in posterior standard deviations.

    Returns
    -------
    LaplacePosterior
        Factorised in the space of parameters or, if smaller, of the outputs of all observations.

    Raises
    ------
    ModelError
        If the module is not at a mode, or the Gauss-Newton matrix is indefinite.
    SettingsError
        If the prior precision is not positive, or there are too many parameters and observations.
    DataError, ShapeError
        As in :func:`gauss_newton`.

    References
    ----------
    MacKay, D. J. C. (1992). A practical Bayesian framework for backpropagation networks. Neural Computation 4, 448-472.

    Daxberger, E., Kristiadi, A., Immer, A., Eschenhagen, R., Bauer, M., Hennig, P. (2021). Laplace redux: effortless
    Bayesian deep learning. Advances in Neural Information Processing Systems 34.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import GaussianOutputs, find_parameter_mode, laplace_posterior
    >>> x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    >>> y = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> line = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    >>> mode = find_parameter_mode(line, GaussianOutputs(), x, y, prior_precision=1.0)
    >>> posterior = laplace_posterior(mode, GaussianOutputs(), x, y, prior_precision=1.0)
    >>> posterior.precision()
    tensor([[6.]], dtype=torch.float64)
    >>> exact = torch.distributions.MultivariateNormal(torch.zeros(2).double(), torch.eye(2).double() + x @ x.mT)
    >>> abs(posterior.log_evidence - float(exact.log_prob(y))) < 1e-12
    True
    """
    likelihood, network = _checked_likelihood(likelihood), flat_network(module)
    prior = _checked_precision(prior_precision, network.vector)
    curvature = gauss_newton_of(network, likelihood, x, y)
    system = _factorised(curvature, prior)
    distance = _newton_step(curvature, system, likelihood, y, prior)[1]
    if not distance <= real_number("tolerance", tolerance, "(0, inf)"):
        raise ModelError(
            f"the module is not at a mode of this posterior: the length of a Newton step is {distance:.3g} posterior "
            f"standard deviations, more than {tolerance:g}; train the module further with the same likelihood and "
            "prior, for example by find_parameter_mode"
        )
    outputs = network.outputs(curvature.x)
    value = float(likelihood.log_likelihood(outputs, likelihood.targets(outputs, y)).sum())
    return LaplacePosterior(curvature, prior, value, distance, system, likelihood)


def find_parameter_mode(
    module: nn.Module,
    likelihood: OutputLikelihood,
    x: Tensor,
    y: Tensor,
    prior_precision: float | Tensor,
    *,
    max_iterations: int = 5000,
) -> nn.Module:
    """Return a copy of a module at a posterior mode, found by L-BFGS and, for small matrices, Gauss-Newton steps.

    Arguments are the same as for :func:`laplace_posterior`; a search that does not converge warns with
    ``AccuracyWarning``.
    """
    likelihood, network = _checked_likelihood(likelihood), flat_network(module)
    prior = _checked_precision(prior_precision, network.vector)
    x, outputs = _check_data(network, x)
    targets = likelihood.targets(outputs, y)
    network, x, prior = _in_double(network, x, prior)
    targets = likelihood.targets(network.outputs(x), y)

    def loss(position: np.ndarray) -> tuple[float, np.ndarray]:
        vector = torch.as_tensor(position).to(network.vector)
        value, gradient = _negative_log_posterior(network.at(vector), likelihood, x, targets, prior)
        if not math.isfinite(value):
            return 1e300, np.zeros_like(position)
        return value, gradient.double().cpu().numpy()

    options = {"maxiter": whole_number("max_iterations", max_iterations, least=1), "maxfun": 10**9, "maxls": 50}
    start = network.vector.double().cpu().numpy()
    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={**options, "ftol": 0.0, "gtol": 1e-9})
    network = network.at(torch.as_tensor(found.x).to(network.vector))
    network, distance = _polished(network, likelihood, x, y, prior)
    if found.status == 1 if distance is None else not distance <= _CLOSE:
        far = "" if distance is None else f" (length of the next step: {distance:.3g} posterior standard deviations)"
        warn_user(
            f"the search for a mode did not converge in {found.nit} iterations{far}; raise max_iterations, or train "
            "the module further first",
            AccuracyWarning,
        )
    result = copy.deepcopy(module)
    learned = [parameter for parameter in result.parameters() if parameter.requires_grad]
    with torch.no_grad():
        nn.utils.vector_to_parameters(network.vector.to(learned[0]), learned)
    return result


def _in_double(network: FlatNetwork, x: Tensor, prior: Tensor) -> tuple[FlatNetwork, Tensor, Tensor]:
    """Return the arguments in double precision if the module supports it; gradient errors limit the search."""
    wide = x.double() if x.is_floating_point() else x
    try:
        converted = flat_network(copy.deepcopy(network.module).double())
        _check_data(converted, wide)
    except (BayeskitError, RuntimeError):  # a layer or the device does not support double precision
        return network, x, prior
    return converted, wide, prior.double()


def _polished(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, y: Tensor, prior: Tensor
) -> tuple[FlatNetwork, float | None]:
    """Take Gauss-Newton steps; also return the length of the last step computed, or None without steps."""
    outputs = network.outputs(x)
    p, dual = network.num_parameters, outputs.numel()
    if min(p, dual) > POLISHED or p * min(p, dual) > POLISHED**2:
        return network, None
    targets = likelihood.targets(outputs, y)
    distance = math.inf
    for _ in range(NUM_STEPS):
        try:
            curvature = gauss_newton_of(network, likelihood, x, y)
            step, distance = _newton_step(curvature, _factorised(curvature, prior), likelihood, y, prior)
        except ModelError:  # indefinite
            return network, None
        if distance <= 1e-6 * _CLOSE:
            break
        value = _negative_log_posterior(network, likelihood, x, targets, prior)[0]
        tried = [network.at(network.vector + 0.5**i * step) for i in range(5)]
        better = (t for t in tried if _negative_log_posterior(t, likelihood, x, targets, prior)[0] < value)
        network, before = next(better, network), network
        if network is before:
            break
    return network, distance


def _newton_step(
    curvature: Curvature, system: System, likelihood: OutputLikelihood, y: Tensor, prior: Tensor
) -> tuple[Tensor, float]:
    """Return the step to the mode of the quadratic model, and its length in posterior standard deviations."""
    network = curvature.network
    gradient = log_likelihood_gradient(network, likelihood, curvature.x, y) - prior * network.vector
    scaled = gradient * prior.rsqrt()
    return system.solve(scaled) * prior.rsqrt(), math.sqrt(float(system.quadratic(scaled.unsqueeze(0))))


def _mean_sigmoid(mean: Tensor, deviation: Tensor) -> Tensor:
    """Return ``E[sigmoid(mean + deviation * N(0, 1))]`` by the trapezoidal rule, in the shape of ``mean``."""
    # The error falls exponentially in the distance of the sigmoid's poles, pi / deviation, divided by the step.
    largest = float(deviation.max())
    step = min(0.25, 1.0 / max(largest, 1e-3))
    half = round(9 / step)
    result = torch.zeros_like(mean)
    for i in range(-half, half + 1):
        weight = step / math.sqrt(2 * math.pi) * math.exp(-0.5 * (i * step) ** 2)
        result += weight * (mean + i * step * deviation).sigmoid()
    return result.clamp_(0, 1)


def _negative_log_posterior(
    network: FlatNetwork, likelihood: OutputLikelihood, x: Tensor, targets: Tensor, prior: Tensor
) -> tuple[float, Tensor]:
    outputs = network.outputs(x)
    score = likelihood.score(outputs, targets)
    value = 0.5 * (prior * network.vector.square()).sum() - likelihood.log_likelihood(outputs, targets).sum()
    return float(value), prior * network.vector - network.pull(x, score)


def _factorised(curvature: Curvature, prior: Tensor) -> System:
    basis = None
    if curvature.dual_size < curvature.shape[0]:
        basis, triangle = torch.linalg.qr((curvature.rows() * prior.rsqrt()).mT)
        matrix = triangle @ triangle.mT
    else:
        matrix = curvature.matrix() * prior.rsqrt() * prior.rsqrt().unsqueeze(1)
    matrix.diagonal().add_(1.0)
    factor, failed = torch.linalg.cholesky_ex(matrix)
    if bool(failed):
        raise ModelError(
            "the posterior precision is not positive definite at these parameters; this can happen if outputs are not "
            "natural parameters of the likelihood. Remedy: train further, or raise prior_precision"
        )
    return System(factor, basis)


def _checked_precision(value: float | Tensor, vector: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        value = torch.tensor(real_number("prior_precision", value), dtype=torch.float64)
    value = value.detach().to(vector)
    if value.dim() and value.shape != vector.shape:
        raise ShapeError(f"prior_precision must be one number or ({len(vector)},), not {tuple(value.shape)}")
    if not bool((torch.isfinite(value) & (value > 0)).all()):
        raise SettingsError("prior_precision must be positive and finite")
    return value.expand_as(vector)
