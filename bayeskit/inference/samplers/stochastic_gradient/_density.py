"""What a MinibatchTarget stands on: densities of one vector whose likelihood is estimated from rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from bayeskit._density import Constrained
from bayeskit._pyro import Site, tensors_in
from bayeskit._torch import validation_kept
from bayeskit.errors import DataError, ModelError, SettingsError


class MinibatchDensity(Protocol):
    """A density of single vectors; ``rows`` has shape ``(B,)``, or ``(N,)`` where the number is not fixed."""

    sites: tuple[Site, ...]
    dim: int
    dtype: torch.dtype
    device: torch.device
    data: list[Tensor]
    num_data: int
    batch_size: int
    fixed: bool

    def joint(self, u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]: ...
    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]: ...
    def vector(self, values: Mapping[str, Tensor]) -> Tensor: ...
    @property
    def can_sample_prior(self) -> bool: ...

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor: ...


class OnRows:
    """A minibatch density with its rows fixed: the density of a Target."""

    def __init__(self, density: MinibatchDensity, rows: Tensor) -> None:
        self.sites, self.dim, self.data = density.sites, density.dim, density.data
        self.dtype, self.device = density.dtype, density.device
        self._density, self._rows = density, rows

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self._density.joint(u, self._rows)

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        return self._density.values(u, deterministic)

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        return self._density.vector(values)

    @property
    def improper_sites(self) -> tuple[str, ...]:
        found: tuple[str, ...] = getattr(self._density, "improper_sites", ())
        return found

    def log_jacobian(self, u: Tensor) -> Tensor:
        if not isinstance(self._density, Constrained):
            raise ModelError(f"the Jacobian of {type(self._density).__name__} is not known; make a Target of the model")
        return self._density.log_jacobian(u)

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        raise ModelError(
            "a minibatched target has no log likelihood of each observation; "
            "make a Target of the model with all of its data"
        )


class FunctionDensity:
    """Two functions of one vector, with the identity as their bijection."""

    fixed = False

    def __init__(
        self,
        log_prior: Callable[[Tensor], Tensor],
        log_likelihood: Callable[[Tensor, Tensor], Tensor],
        dim: int,
        num_data: int,
        batch_size: int,
        sample_prior: Callable[[int, torch.Generator], Tensor] | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        if dim < 1:
            raise SettingsError(f"dim must be at least 1, not {dim}")
        check_batch_size(batch_size, num_data)
        shape = torch.Size((dim,))
        self.sites: tuple[Site, ...] = (Site("u", shape, shape, 0, dim),)
        self.dim, self.dtype, self.device = dim, dtype, device
        self.num_data, self.batch_size = num_data, batch_size
        self.data = tensors_in((log_prior, log_likelihood))
        self._log_prior, self._log_likelihood, self._sample_prior = log_prior, log_likelihood, sample_prior
        self.can_sample_prior = sample_prior is not None

    def joint(self, u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        with validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)  # it branches on values
            log_prior, log_likelihood = self._log_prior(u), self._log_likelihood(u, rows)
        if log_prior.shape != ():
            raise ModelError(f"log_prior returns shape {tuple(log_prior.shape)} for one vector instead of ()")
        return log_prior, estimate_sum(log_likelihood, rows, self.num_data)

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        return {"u": u}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.as_tensor(values["u"], dtype=self.dtype, device=self.device)

    def log_jacobian(self, u: Tensor) -> Tensor:
        return u.new_zeros(())

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        return cast(Callable[[int, torch.Generator], Tensor], self._sample_prior)(num_draws, generator)


class ModuleDensity:
    """A torch module with independent normal priors on its parameters."""

    fixed = False
    can_sample_prior = True

    def __init__(
        self,
        module: torch.nn.Module,
        log_likelihood: Callable[..., Tensor],
        data: Sequence[Tensor] | Dataset[Any],
        batch_size: int,
        prior_scale: float | Mapping[str, float | Tensor],
    ) -> None:
        self._tensors = tensors_of(data)
        self.num_data = len(self._tensors[0])
        check_batch_size(batch_size, self.num_data)
        self.batch_size = batch_size
        self._module, self._log_likelihood = copy.deepcopy(module).eval(), log_likelihood
        parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ModelError("the module has no parameter that requires a gradient, so there is nothing to sample")
        first = next(iter(parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self._tensors = [t.to(self.device) for t in self._tensors]
        sites, start = [], 0
        for name, parameter in parameters.items():
            if parameter.dtype != self.dtype or parameter.device != self.device:
                raise ModelError(f"parameter {name!r} differs in dtype or device from the others; make them alike")
            stop = start + parameter.numel()
            sites.append(Site(name, parameter.shape, parameter.shape, start, stop))
            start = stop
        self.sites, self.dim = tuple(sites), start
        self._scale = self._scales(prior_scale)
        self._log_constant = float(-self._scale.log().sum() - 0.5 * self.dim * math.log(2 * math.pi))
        self._module.requires_grad_(False)
        constants = [p for name, p in self._module.named_parameters() if name not in parameters]
        self.data = [*self._tensors, self._scale, *constants, *self._module.buffers(), *tensors_in(log_likelihood)]

    def _scales(self, prior_scale: float | Mapping[str, float | Tensor]) -> Tensor:
        names = {s.name for s in self.sites}
        if isinstance(prior_scale, Mapping) and set(prior_scale) != names:
            raise SettingsError(f"prior_scale must name each parameter: {sorted(names)}, not {sorted(prior_scale)}")
        pieces = []
        for site in self.sites:
            scale = prior_scale[site.name] if isinstance(prior_scale, Mapping) else prior_scale
            tensor = torch.as_tensor(scale, dtype=self.dtype, device=self.device)
            if not bool(((tensor > 0) & tensor.isfinite()).all()):
                raise SettingsError(f"prior_scale of {site.name!r} must be positive and finite, not {scale}")
            pieces.append(tensor.expand(site.shape).reshape(-1))
        return torch.cat(pieces)

    def joint(self, u: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        log_prior = self._log_constant - 0.5 * (u / self._scale).square().sum()
        inputs, *others = (t[rows] for t in self._tensors)
        with validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)  # it branches on values
            output = torch.func.functional_call(self._module, self.values(u), (inputs,))
            log_likelihood = self._log_likelihood(output, *others)
        return log_prior, estimate_sum(log_likelihood, rows, self.num_data)

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        return {s.name: u[s.start : s.stop].reshape(s.shape) for s in self.sites}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[s.name].to(self.device, self.dtype).reshape(-1) for s in self.sites])

    def log_jacobian(self, u: Tensor) -> Tensor:
        return u.new_zeros(())

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        shape = (num_draws, self.dim)
        noise = torch.randn(shape, dtype=self.dtype, device=generator.device, generator=generator)
        return noise.to(self.device) * self._scale


def estimate_sum(log_likelihood: Tensor, rows: Tensor, num_data: int) -> Tensor:
    """Estimate the sum over all rows from the values of ``rows``."""
    if log_likelihood.shape != rows.shape:
        raise ModelError(
            f"log_likelihood returns shape {tuple(log_likelihood.shape)} for {len(rows)} rows instead of "
            f"{tuple(rows.shape)}, one value a row; a last dimension of one often wants .squeeze(-1)"
        )
    return log_likelihood.sum() * (num_data / rows.shape[0])


def check_batch_size(batch_size: int, num_data: int) -> None:
    """Refuse a batch size outside of the data."""
    if not 1 <= batch_size <= num_data:
        raise SettingsError(f"batch_size must lie between 1 and the {num_data} rows of the data, not {batch_size}")


def tensors_of(data: Sequence[Tensor] | Dataset[Any]) -> list[Tensor]:
    """Return data as tensors with one row an observation.

    Raises
    ------
    DataError
        If they differ in length or hold NaN.
    """
    if isinstance(data, Tensor):
        data = (data,)
    if isinstance(data, TensorDataset):
        tensors = list(data.tensors)
    elif isinstance(data, Dataset):
        rows = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        collated = default_collate(rows)
        tensors = [collated] if isinstance(collated, Tensor) else list(collated)
    else:
        tensors = [torch.as_tensor(t) for t in data]
    lengths = [len(t) for t in tensors]
    if not tensors or len(set(lengths)) != 1:
        raise DataError(f"data must be tensors of equal length, not of lengths {lengths}")
    for i, tensor in enumerate(tensors):
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise DataError(f"tensor {i} of the data holds {int(tensor.isnan().sum())} NaN; drop or impute those rows")
    return tensors
