"""The interface of the density that a Target evaluates, and the density made of two functions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from bayeskit._core.evaluation import Evaluator, with_gradient_loop
from bayeskit._core.functions_of_users import remedy_of, words_of
from bayeskit._core.inputs import warn_user
from bayeskit._core.randomness import validation_kept
from bayeskit._core.untraceable import UNTRACEABLE, first_line, raise_if_forked
from bayeskit._logdensity.pyro_density import Site
from bayeskit._logdensity.pyro_runs import place_of, tensors_in
from bayeskit.errors import AccuracyWarning, BayeskitError, ModelError

# Split and join results of chunks or of single vectors.


def lift(result: Any) -> Any:
    """Give the result for one vector a leading batch dimension."""
    if isinstance(result, dict):
        return {k: v.unsqueeze(0) for k, v in result.items()}
    if isinstance(result, tuple):
        return tuple(v.unsqueeze(0) for v in result)
    return result.unsqueeze(0)


def first_rows(result: Any, count: int) -> Any:
    """Keep the first rows of each tensor of a result."""
    if isinstance(result, dict):
        return {k: v[:count] for k, v in result.items()}
    return tuple(v[:count] for v in result)


def gather(parts: list[Any], batch: torch.Size) -> Any:
    """Concatenate chunk results and give them the caller's batch shape."""

    def join(tensors: list[Tensor]) -> Tensor:
        whole = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        return whole.reshape(batch + whole.shape[1:])

    if isinstance(parts[0], dict):
        return {k: join([p[k] for p in parts]) for k in parts[0]}
    return tuple(join([p[i] for p in parts]) for i in range(len(parts[0])))


_GRADIENT_STEP, _NUM_DIRECTIONS, _MAX_GAP, _MAX_NAMED = 0.03, 3, 0.05, 3


class Density(Protocol):
    """The density that a Target evaluates: of single vectors, or of batches where ``batched`` is true."""

    sites: tuple[Site, ...]
    dim: int
    dtype: torch.dtype
    device: torch.device
    data: list[Tensor]

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood of ``u``."""
        ...

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the sites at ``u``."""
        ...

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vector of values of the sites."""
        ...

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation, by site."""
        ...


@runtime_checkable
class Constrained(Protocol):
    """A density that knows the Jacobian of its bijection."""

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained|, of the shape that ``joint`` gives its terms."""
        ...


@runtime_checkable
class Started(Protocol):
    """A density that knows a vector at which it is not negligible."""

    start: Tensor  # (d,)


class FunctionDensity:
    """Two functions of a vector, with the identity as their bijection."""

    def __init__(
        self,
        log_prior: Callable[[Tensor], Tensor],
        log_likelihood: Callable[[Tensor], Tensor],
        dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = torch.Size((dim,))
        self.sites: tuple[Site, ...] = (Site("u", shape, shape, 0, dim),)
        self.dim, self.dtype, self.device = dim, dtype, device
        self.log_prior, self.log_likelihood = log_prior, log_likelihood
        self.data = tensors_in((log_prior, log_likelihood))

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Call both functions."""
        with validation_kept():
            # Distributions that check their arguments branch on values, which a trace cannot follow.
            torch.distributions.Distribution.set_default_validate_args(False)
            return self.log_prior(u), self.log_likelihood(u)

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the vector as the one site's value."""
        return {"u": u}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the one site's value."""
        return torch.as_tensor(values["u"], dtype=self.dtype, device=self.device)

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return zeros."""
        return u.new_zeros(u.shape[:-1])

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Raise ``ModelError``: a function has no pointwise terms."""
        raise ModelError("a target made from functions has no pointwise log likelihood; build it with Target.from_pyro")


def fingerprint(
    density: Density, evaluate: Callable[[Tensor], tuple[Tensor, Tensor]], start: Tensor | None = None
) -> str:
    """Return a digest of the sites, the data, and the density at two fixed points, rounded to reproducible digits."""
    grid = torch.linspace(-0.5, 0.5, density.dim)
    points = torch.stack([torch.zeros_like(grid), grid])
    digits = 2 if density.dtype == torch.float32 else 5
    if start is not None:
        # Data that a function keeps to itself are seen in its values only: where it has some, and to more digits.
        points = torch.cat([points, points + start.to(points)])
        digits += 3 * (density.dtype == torch.float64)
    values = torch.cat(evaluate(points))
    digest = hashlib.sha256()
    for tensor in density.data:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    facts = {
        "sites": [(s.name, list(s.shape), s.start) for s in density.sites],
        "dtype": str(values.dtype),
        "data": digest.hexdigest(),
        "density": [f"{float(x):.{digits}e}" for x in values],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def raise_if_broken(density: Density, u: Tensor) -> None:
    """Raise the model's own error if it cannot be evaluated at a single vector either."""
    try:
        density.joint(u)
    except BayeskitError:
        raise
    except UNTRACEABLE as error:
        markov = "; a loop over enumerated sites needs pyro.markov around its range"
        raise ModelError(
            f"the model runs once, but its density cannot be evaluated{place_of(error)}: {words_of(error)}"
            f"{markov if getattr(density, 'summed_sites', ()) else ''}"
        ) from error


_IN_PLACE = "change no tensor in place: write x = x + y for x.add_(y), and torch.stack for assignments to elements"


def raise_if_not_differentiable(density: Density, u: Tensor) -> None:
    """Raise a typed error if the gradient at a single vector fails where the value does not."""
    try:
        with_gradient_loop(density.joint)(u.unsqueeze(0), torch.ones_like(u[:1]))
    except BayeskitError:
        raise
    except UNTRACEABLE as error:
        if isinstance(error, torch.linalg.LinAlgError):
            return
        raise_if_forked(error)
        remedy = remedy_of(error) or _IN_PLACE
        raise ModelError(
            f"the gradient of the model's density fails{place_of(error)}: {first_line(error)}. Remedy: {remedy}"
        ) from error


def warn_if_gradient_is_wrong(density: Density, evaluate: Evaluator, u: Tensor) -> None:
    """Warn of sites whose gradient is not the derivative of the log density around ``u`` and ``-u``, ``(d,)``."""
    # The integral of the gradient over a short interval, by Simpson's rule, must be the difference of log densities at
    # its ends; in a single direction errors may cancel, or be small beside the rest.
    signs = torch.randint(2, (_NUM_DIRECTIONS, len(u)), generator=torch.Generator().manual_seed(0)).to(u) * 2 - 1
    steps = _GRADIENT_STEP * torch.cat([torch.ones_like(u).unsqueeze(0), signs])
    centres = torch.stack([u, u / 2, -u, -u / 2])
    wrong = _are_wrong(evaluate, centres, steps)
    # Also half-way to the origin, where no value is rounded to the end of an interval, which would cause jumps.
    wrong_twice = wrong[0::2] & wrong[1::2]
    if not bool(wrong_twice.any()):
        return
    sites = torch.zeros(len(density.sites), len(u), dtype=u.dtype, device=u.device)
    for along, site in zip(sites, density.sites, strict=True):
        along[site.start : site.stop] = _GRADIENT_STEP
    names: list[str] = []
    for centre in centres[0::2][wrong_twice.any(1)]:
        for site, along in zip(density.sites, sites, strict=True):
            if len(names) < _MAX_NAMED and bool(_are_wrong(evaluate, centre.unsqueeze(0), along.unsqueeze(0))):
                names.append(f"'{site.name}'")
        if names:
            break
    where = f" with respect to {', '.join(names)}" if names else ""
    warn_user(
        f"the gradient{where} is not the derivative of the log density; the model may call .detach(), .item() or "
        ".numpy() on a value, or the density may be discontinuous. Samplers then mix slowly, and modes, Laplace "
        "approximations and objectives are wrong. Remedy: remove these calls and compute with tensors only",
        AccuracyWarning,
    )


def _are_wrong(evaluate: Evaluator, centres: Tensor, steps: Tensor) -> Tensor:
    """Tell for ``centres`` of shape ``(c, d)`` and ``steps`` ``(s, d)`` where the gradient is wrong: ``(c, s)``."""
    points = centres[:, None, None] + steps[:, None] * centres.new_tensor([-1.0, 0.0, 1.0])[:, None]
    flat = points.flatten(0, 2)
    found = evaluate(flat, torch.ones_like(flat[:, 0]))
    value = found.log_density.detach().double().reshape(points.shape[:-1])
    gradient = found.gradient.detach().double().reshape(points.shape)
    first, middle, last = (gradient * steps[:, None].double()).sum(-1).unbind(-1)
    rise, expected, straight = value[..., 2] - value[..., 0], (first + 4 * middle + last) / 3, first + last
    size = rise.abs() + first.abs() + middle.abs() + last.abs()
    unsure = (expected - straight).abs() + 100 * torch.finfo(centres.dtype).eps * value.abs().amax(-1)
    return ((rise - expected).abs() > _MAX_GAP * size) & (unsure < 0.1 * _MAX_GAP * size)
