"""Functions of JAX as functions of torch: batched, compiled, in double precision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeskit._core.evaluation import Evaluation, Integrator

#: Numbers of rows that functions are compiled for. Few, because compilation takes longer than runs of small models.
_SIZES = (4, 64, 1024)
#: The most calls of one size that a larger size does not replace.
_CALLS = 4
#: Steps of a path are counted by an array of at least this length, so that one length is compiled.
_STEPS = 1024


def double_precision() -> Any:
    """Return a context in which JAX computes in double precision."""
    import jax

    return jax.enable_x64(True)


def seeds(count: int, generator: torch.Generator) -> Tensor:
    """Return a seed for each of ``count`` rows."""
    return torch.randint(2**62, (count,), generator=generator, device=generator.device).cpu()


def _as_torch(found: Any) -> Any:
    """Return arrays of JAX in a nest as tensors, of memory of their own that may be written to."""
    import jax

    # To share memory by dlpack takes longer than a call of a small model, and torch would write to arrays of JAX.
    return _copied(found) if isinstance(found, jax.Array) else jax.tree.map(_copied, found)


def _copied(x: Any) -> Tensor:
    return torch.from_numpy(np.array(x))


def _first(found: Any, count: int) -> Any:
    import jax

    return jax.tree.map(lambda x: x[:count], found)


class JaxFunction:
    """A function of vectors of JAX that takes and returns rows of torch.

    Parameters
    ----------
    function : callable
        From arrays to a nest of arrays.
    is_rare : bool, default False
        True if it runs a few times only, so that it is compiled without optimisation, which takes longer than the runs.
    """

    def __init__(self, function: Callable[..., Any], is_rare: bool = False) -> None:
        self.function = function
        self._options = {"xla_backend_optimization_level": 0} if is_rare else None
        self._compiled: Any = None

    def __call__(self, *rows: Tensor) -> Any:
        """Return the results for all rows, ``(n, ...)`` each, as tensors."""
        import jax

        if self._compiled is None:
            self._compiled = jax.jit(jax.vmap(self.function), compiler_options=self._options)
        count = len(rows[0])
        # By the count alone: a row's last digits depend on the size.
        size = next((size for size in _SIZES if count <= _CALLS * size), _SIZES[-1])
        with double_precision():
            if count <= size:
                return self._of_some(rows, count, size)
            parts = [self._of_some(x, len(x[0]), size) for x in zip(*(x.split(size) for x in rows), strict=True)]
            return jax.tree.map(lambda *each: torch.cat(each), *parts)

    def _of_some(self, rows: tuple[Tensor, ...], count: int, size: int) -> Any:
        if size > count:
            rows = tuple(_padded(x, size) for x in rows)
        found = _as_torch(self._compiled(*(x.numpy() for x in rows)))
        return found if size == count else _first(found, count)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_compiled": None}


def _padded(x: Tensor, size: int) -> Tensor:
    """Return ``size`` rows: those of ``x``, and the last one again, or zeros where there is none."""
    last = x[-1:] if len(x) else x.new_zeros(1, *x.shape[1:])
    return torch.cat([x, last.expand(size - len(x), *x.shape[1:])])


class JaxDensity(Integrator):
    """Log prior and log likelihood of JAX, whose trajectories run within JAX as well.

    Parameters
    ----------
    joint : callable
        From a vector ``(d,)`` to log prior and log likelihood.
    """

    def __init__(self, joint: Callable[[Any], tuple[Any, Any]]) -> None:
        self._joint = joint
        self._rows = JaxFunction(self._packed)
        self._paths: dict[bool, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_paths": {}}

    def _with_gradient(self, u: Any, prior: Any, likelihood: Any) -> tuple[Any, Any, Any, Any]:
        """Return both parts, their sum with weights, and its gradient."""
        import jax
        import jax.numpy as jnp

        def total(u: Any) -> tuple[Any, tuple[Any, Any]]:
            log_prior, log_likelihood = self._joint(u)
            # At weight zero, as at the prior, a likelihood of zero is no hindrance.
            return prior * log_prior + jnp.where(likelihood == 0, 0.0, likelihood * log_likelihood), (
                log_prior,
                log_likelihood,
            )

        (weighted, (log_prior, log_likelihood)), gradient = jax.value_and_grad(total, has_aux=True)(u)
        return log_prior, log_likelihood, weighted, gradient

    def _packed(self, u: Any, prior: Any, likelihood: Any) -> Any:
        """Return log prior, log likelihood, their sum with weights, and its gradient, ``(d + 3,)``."""
        import jax.numpy as jnp

        *parts, gradient = self._with_gradient(u, prior, likelihood)
        return jnp.concatenate([jnp.stack(parts), gradient])

    def weighted(self, u: Tensor, prior: Tensor, likelihood: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log prior and log likelihood ``(n,)``, and the gradient of their sum with weights ``(n,)`` each."""
        found = self._rows(u.detach(), prior, likelihood)
        return found[:, 0], found[:, 1], found[:, 3:]

    def values(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood of rows, ``(n, d) -> (n,)``."""
        one = torch.ones_like(u[:, 0])
        return self.weighted(u, one, one)[:2]

    def __call__(self, u: Tensor, beta: Tensor) -> Evaluation:
        """Evaluate rows ``(n, d)`` at inverse temperatures ``(n,)``."""
        found = self._rows(u.detach(), torch.ones_like(beta), beta)
        log_prior, log_likelihood, log_density = found[:, :3].unbind(1)
        return Evaluation(log_prior, log_likelihood, log_density, found[:, 3:])

    def fits(self, q: Tensor, factor: Tensor, is_dense: bool) -> bool:
        """Tell whether positions ``(n, d)`` and the factor of a metric are in double precision and of one size."""
        one = factor.dim() == (2 if is_dense else 1)
        return q.dtype == factor.dtype == torch.float64 and (one or len(q) % len(factor) == 0)

    def integrate(
        self,
        q: Tensor,
        p: Tensor,
        step: Tensor,
        beta: Tensor,
        factor: Tensor,
        is_dense: bool,
        drift: float,
        kicks: Sequence[float],
        start: Evaluation | None = None,
    ) -> tuple[Tensor, Tensor, Evaluation, Tensor]:
        """Move positions and momenta within JAX."""
        import jax

        if is_dense not in self._paths:
            self._paths[is_dense] = jax.jit(self._over_groups(is_dense))
        (n, d), count = q.shape, len(kicks)
        groups = 1 if factor.dim() == (2 if is_dense else 1) else len(factor)
        kicked = np.zeros(max(_STEPS, 1 << max(0, count - 1).bit_length()))
        kicked[:count] = kicks
        # Without turns the evaluation of the start is neither known nor used.
        *values, gradient = start or (beta, beta, beta, q)
        # One array each way: to pass an array takes longer than a step of a small model.
        rows = torch.cat([q, p, gradient, torch.stack([step, beta, *values], -1)], -1).detach().to(torch.float64)
        of_groups = factor.reshape(groups, *factor.shape[-(1 + is_dense) :]).numpy()
        by_group = rows.reshape(groups, -1, 3 * d + 5).numpy()
        with double_precision():
            path = self._paths[is_dense]
            found = _as_torch(path(of_groups, kicked, count, float(drift), start is not None, by_group))
        position, momentum, gradient, others = found.reshape(n, -1).split((d, d, d, 7), -1)
        others = others.T.contiguous()
        return position, momentum, Evaluation(others[0], others[1], others[2], gradient), others[3:]

    def _over_groups(self, is_dense: bool) -> Callable[..., Any]:
        """Return the function of all rows, by group of a metric."""
        import jax

        def of_all(factor: Any, kicks: Any, count: Any, drift: Any, turns: Any, rows: Any) -> Any:
            def of_group(factor: Any, rows: Any) -> Any:
                path = partial(self._path, is_dense, factor, kicks, count, drift, turns)
                return jax.vmap(path)(rows)

            return jax.vmap(of_group)(factor, rows)

        return of_all

    def _path(
        self,
        is_dense: bool,
        factor: Any,
        kicks: Any,
        count: Any,
        drift: Any,
        turns: Any,
        row: Any,
    ) -> Any:
        """Return the end of a path of ``count`` steps, its evaluation, and what was met on it, ``(3 d + 7,)``.

        A row has position, momentum and gradient, ``(d,)`` each, step, inverse temperature, log prior, log likelihood
        and log density. Where ``turns`` is true, a step into zero density keeps the position and reverses the momentum.
        """
        import jax
        import jax.numpy as jnp

        q, p, gradient = row[:-5].reshape(3, -1)
        step, beta, *values = row[-5:]
        here = (*values, gradient)

        def pull(gradient: Any) -> Any:
            return gradient @ factor if is_dense else gradient * factor

        inside = here[2] > -jnp.inf

        def advance(number: Any, state: Any) -> Any:
            q, p, here, force, lowest, highest, reversals = state
            moved = q + drift * step * (factor @ p if is_dense else factor * p)
            there = self._with_gradient(moved, 1.0, beta)
            lowest = jnp.minimum(lowest, there[2])
            back = turns & inside & (there[2] == -jnp.inf)
            reversals = reversals + back
            q, p = jnp.where(back, q, moved), jnp.where(back, -p, p)
            force = jnp.where(back, force, pull(there[3]))
            here = tuple(jnp.where(back, old, new) for old, new in zip(here, there, strict=True))
            middle = p + 0.5 * step * force
            highest = jnp.maximum(highest, 0.5 * middle @ middle - here[2])
            return q, p + kicks[number] * step * force, here, force, lowest, highest, reversals

        first = (q, p, here, pull(here[3]), jnp.inf, -jnp.inf, 0.0)
        q, p, here, _, *met = jax.lax.fori_loop(0, count, advance, first)
        return jnp.concatenate([q, p, here[3], jnp.stack([*here[:3], *met, inside.astype(float)])])
