"""The class of problems with known log evidence and posterior moments."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from bayeskit._core.texts import short_repr
from bayeskit.errors import DataError, SettingsError, ShapeError

if TYPE_CHECKING:
    from bayeskit._logdensity.target import Target

# Reading of shipped tables, and validation of arguments of case builders.


def read_table(file_name: str) -> dict[str, Tensor]:
    """Return the columns ``(rows,)`` of a shipped table in ``bayeskit/exact/data``, float64, in file order."""
    resource = files("bayeskit.exact").joinpath("data", file_name)
    header, *rows = list(csv.reader(resource.read_text(encoding="utf-8").splitlines()))
    columns = zip(*rows, strict=True)
    return {
        name: torch.tensor([float(entry) for entry in column], dtype=torch.float64)
        for name, column in zip(header, columns, strict=True)
    }


def finite_tensor(name: str, values: ArrayLike | Tensor, ndim: int) -> Tensor:
    """Return a float64 copy on the CPU; DataError unless finite, ShapeError for a wrong number of dimensions."""
    try:
        if isinstance(values, Tensor):
            tensor = values.detach().to(device="cpu", dtype=torch.float64, copy=True)
        else:
            # Convert with NumPy, because torch would round a list of Python floats to its default dtype.
            tensor = torch.from_numpy(np.array(values, dtype=np.float64))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{name} cannot be read as an array of numbers: {error}") from error
    if tensor.ndim != ndim:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs {ndim} dimension(s).")
    if tensor.numel() == 0:
        raise DataError(f"{name} is empty; pass at least one observation.")
    finite = torch.isfinite(tensor)
    if not bool(finite.all()):
        position = tuple((~finite).nonzero()[0].tolist())
        raise DataError(f"{name} is not finite at index {position}; remove or impute that entry.")
    return tensor


def positive_scalar(name: str, value: float) -> Tensor:
    """Return ``value`` as a float64 tensor ``()``; SettingsError unless it is positive and finite."""
    try:
        number = float(value)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{name} is {value!r}; it must be a number above zero.") from error
    if not (math.isfinite(number) and number > 0.0):
        raise SettingsError(f"{name} is {value}; it must be finite and above zero.")
    return torch.tensor(number, dtype=torch.float64)


#: Full conditional distribution of each block of sites, as a function of the values of all other sites.
Conditionals = Mapping[tuple[str, ...], Callable[[dict[str, Tensor]], Any]]


@dataclass(frozen=True, eq=False)
class ExactCase:
    """A Pyro model with data, exact log evidence and posterior moments.

    Cases compare by identity.

    Attributes
    ----------
    name : str
        Identifier in tables.
    description : str
        One line.
    model : callable
        Pyro model, a module-level function of ``args``, so that the case can be pickled.
    args : tuple of Tensor
        Arguments of ``model``, float64; data first, then hyperparameters.
    log_evidence : float
        Log marginal likelihood in nats.
    posterior_mean : mapping of str to Tensor, or None
        Posterior mean of each latent site in constrained space, in the shape of the site. Deterministic
        sites may be included.
    posterior_covariance : mapping of str to Tensor, or None
        Posterior covariance of each flattened site, shape ``(numel, numel)``; ``(1, 1)`` for a scalar.
    reference : str
        Method of the exact results (closed form or quadrature), with a citation.
    standard_error : float
        Error of ``log_evidence`` in nats; 0 if it is exact up to rounding.
    full_conditionals : callable, optional
        Module-level function of ``args`` that returns the full conditionals of a Gibbs sampler: for each block (a
        tuple of site names), a function from the values of all other sites, ``{site: (*batch, *shape)}``, to the
        distribution of the flattened and concatenated sites of the block.

    Raises
    ------
    DataError
        If ``log_evidence`` is not finite, ``standard_error`` is negative or not finite, an argument is not a tensor,
        or the shape of a covariance does not match its mean.

    Examples
    --------
    >>> from bayeskit.exact import beta_binomial
    >>> case = beta_binomial()
    >>> case.name, round(case.log_evidence, 4)
    ('beta_binomial', -2.3979)
    >>> round(case.posterior_mean["p"].item(), 4)
    0.25
    """

    name: str
    description: str
    model: Callable[..., Any]
    args: tuple[Tensor, ...]
    log_evidence: float
    posterior_mean: Mapping[str, Tensor] | None
    posterior_covariance: Mapping[str, Tensor] | None
    reference: str
    standard_error: float = 0.0
    full_conditionals: Callable[..., Conditionals] | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not math.isfinite(self.log_evidence):
            raise DataError(f"{self.name}: log_evidence is {self.log_evidence}; it must be finite.")
        if not (math.isfinite(self.standard_error) and self.standard_error >= 0):
            raise DataError(f"{self.name}: standard_error is {self.standard_error}; it must be finite and at least 0.")
        for position, argument in enumerate(self.args):
            if not isinstance(argument, Tensor):
                raise DataError(
                    f"{self.name}: argument {position} of the model is a {type(argument).__name__}; "
                    "pass a tensor, so that target() can convert its dtype and device."
                )
        means = self.posterior_mean or {}
        for site, covariance in (self.posterior_covariance or {}).items():
            if site not in means:
                raise DataError(f"{self.name}: site '{site}' has a posterior covariance but no mean.")
            size = means[site].numel()
            if tuple(covariance.shape) != (size, size):
                raise DataError(
                    f"{self.name}: posterior covariance of site '{site}' has shape "
                    f"{tuple(covariance.shape)}; its mean needs ({size}, {size})."
                )

    def converted_args(
        self, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> tuple[Tensor, ...]:
        """Return the model's arguments with a given dtype and device.

        Parameters
        ----------
        dtype : torch.dtype, optional
            Floating-point type, default unchanged (float64).
        device : torch.device or str, optional
            Default unchanged.

        Returns
        -------
        tuple of Tensor
            Same shapes as ``args``.

        Raises
        ------
        SettingsError
            If ``dtype`` is not a real floating-point type.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.exact import beta_binomial
        >>> {argument.dtype for argument in beta_binomial().converted_args(dtype=torch.float32)}
        {torch.float32}
        """
        if dtype is not None and not dtype.is_floating_point:
            raise SettingsError(f"dtype is {dtype}; pass torch.float32 or torch.float64.")
        return tuple(argument.to(device=device, dtype=dtype) for argument in self.args)

    def target(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> Target:
        """Create the :class:`~bayeskit.Target` of this case.

        Parameters
        ----------
        dtype : torch.dtype, optional
            Floating-point type, default float64.
        device : torch.device or str, optional
            Default CPU.

        Returns
        -------
        Target
            With a normalized prior; prior times likelihood integrates to ``exp(log_evidence)``.

        Raises
        ------
        SettingsError
            If ``dtype`` is not a real floating-point type.

        Examples
        --------
        >>> from bayeskit.exact import beta_binomial
        >>> beta_binomial().target().dim
        1
        """
        # Imported here so that exact results do not depend on the code tested against them.
        from bayeskit._logdensity.target import Target

        args = self.converted_args(dtype, device)
        target = Target.from_pyro(self.model, *args)
        if self.full_conditionals is not None:
            target.full_conditionals = partial(self.full_conditionals, *args)
        return target
