"""Likelihoods of data given a network's outputs, with the curvature in the outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number
from bayeskit.errors import DataError, SettingsError, ShapeError


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
    >>> from bayeskit.inference.curvature import GaussianOutputs
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
    >>> from bayeskit.inference.curvature import BernoulliOutputs
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
    >>> from bayeskit.inference.curvature import Poisson
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
    >>> from bayeskit.inference.curvature import Categorical
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


def check_likelihood(likelihood: OutputLikelihood) -> OutputLikelihood:
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
