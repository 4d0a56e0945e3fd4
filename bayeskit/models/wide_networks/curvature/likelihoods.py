"""Likelihoods of data given a network's outputs, with their curvature in those outputs."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import DataError, SettingsError, ShapeError


class Likelihood(ABC):
    """A law of data given outputs; a user's own derives from this.

    Outputs are ``(n, k)`` throughout, one row a datum.

    Attributes
    ----------
    natural : bool
        Whether outputs are natural parameters of an exponential family. Then the Hessian does not depend on the data,
        and is the Fisher information.
    """

    natural: bool = False

    @abstractmethod
    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return data in the form that other methods take, or raise ``DataError`` or ``ShapeError``."""

    @abstractmethod
    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log density of each datum, ``(n,)``."""

    @abstractmethod
    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the log density with respect to outputs, ``(n, k)``."""

    @abstractmethod
    def hessian(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the Hessian of minus the log density with respect to outputs, ``(n, k, k)``."""

    @abstractmethod
    def fisher(self, outputs: Tensor) -> Tensor:
        """Return the mean outer product of scores under the law itself, ``(n, k, k)``."""

    @abstractmethod
    def sample(self, outputs: Tensor, generator: torch.Generator) -> Tensor:
        """Draw data, one for each row of outputs."""

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Return ``R`` with ``R R^T`` the Fisher information, ``(n, k, k)``."""
        values, vectors = torch.linalg.eigh(self.fisher(outputs))
        return vectors * values.clamp(min=0).sqrt().unsqueeze(-2)


class _Independent(Likelihood):
    """An exponential family for each output by itself, whose natural parameter is proportional to the output."""

    natural = True

    @abstractmethod
    def _precision(self, outputs: Tensor) -> Tensor:
        """Return the second derivative of minus the log density, ``(n, k)``."""

    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return data as ``(n, k)`` in the dtype of outputs; ``(n,)`` is fine for one output."""
        if y.dim() == 1 and outputs.shape[1] == 1:
            y = y.unsqueeze(1)
        if y.shape != outputs.shape:
            raise ShapeError(f"y must be {tuple(outputs.shape)} as the outputs are, not {tuple(y.shape)}")
        y = y.to(outputs)
        _refuse_rows(~torch.isfinite(y), "y has values that are not finite")
        return y

    def hessian(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the Hessian of minus the log density, ``(n, k, k)``: the Fisher information, whatever the data."""
        return self.fisher(outputs)

    def fisher(self, outputs: Tensor) -> Tensor:
        """Return a diagonal matrix for each row, ``(n, k, k)``."""
        return torch.diag_embed(self._precision(outputs))

    def fisher_root(self, outputs: Tensor) -> Tensor:
        """Return its square root, diagonal, too, ``(n, k, k)``."""
        return torch.diag_embed(self._precision(outputs).sqrt())


@dataclass(frozen=True)
class Gaussian(_Independent):
    """Normal data with known variance; outputs are the means.

    Parameters
    ----------
    variance : float, default 1
        Of the data about their mean, positive.

    Raises
    ------
    SettingsError
        If the variance is not positive and finite.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Gaussian
    >>> Gaussian(0.25).fisher(torch.zeros(1, 2))
    tensor([[[4., 0.],
             [0., 4.]]])
    """

    variance: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "variance", real_number("variance", self.variance, between=(0, math.inf)))

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log density of each datum, ``(n,)``."""
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
class Bernoulli(_Independent):
    """Zeros and ones; outputs are logits.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.wide_networks.curvature import Bernoulli
    >>> Bernoulli().fisher(torch.zeros(1, 1))
    tensor([[[0.2500]]])
    """

    def targets(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return zeros and ones, ``(n, k)``."""
        y = super().targets(outputs, y)
        _refuse_rows((y != 0) & (y != 1), "y must be zeros and ones")
        return y

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log probability of each datum, ``(n,)``."""
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
    """Counts; outputs are logarithms of rates.

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
        _refuse_rows((y < 0) | (y != y.round()), "y must be counts, whole numbers from zero")
        return y

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log probability of each datum, ``(n,)``."""
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
class Categorical(Likelihood):
    """One of ``k`` classes; outputs are logits.

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
        """Return the numbers of classes, ``(n,)``."""
        if outputs.shape[1] < 2:
            raise ShapeError("a categorical likelihood needs two or more outputs; for one logit take Bernoulli()")
        if y.shape != outputs.shape[:1]:
            raise ShapeError(f"y must be the numbers of classes, ({len(outputs)},), not {tuple(y.shape)}")
        if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
            raise DataError(f"y must be the numbers of classes, in an integer dtype, not {y.dtype}")
        wrong = (y < 0) | (y >= outputs.shape[1])
        _refuse_rows(wrong.unsqueeze(1), f"y must be classes from 0 to {outputs.shape[1] - 1}")
        return y.to(outputs.device, torch.long)

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the log probability of each class observed, ``(n,)``."""
        return outputs.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return indicators of classes minus probabilities, ``(n, k)``."""
        return torch.nn.functional.one_hot(y, outputs.shape[1]).to(outputs) - outputs.softmax(1)

    def hessian(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the Hessian of minus the log density, ``(n, k, k)``: the Fisher information, whatever the data."""
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


def checked_likelihood(likelihood: Likelihood) -> Likelihood:
    """Return a likelihood as it is, or say that it is none."""
    if not isinstance(likelihood, Likelihood):
        raise SettingsError(
            f"likelihood must be an object such as Gaussian(0.1), Bernoulli() or Categorical(), not {likelihood!r}"
        )
    return likelihood


def _refuse_rows(wrong: Tensor, message: str) -> None:
    rows = wrong.any(1).nonzero()
    if len(rows):
        raise DataError(f"{message}; the first that is not is in row {int(rows[0])}")
