"""Base class of objectives: settings, runs of guide and model, and the loss for Pyro and torch."""

from __future__ import annotations

import inspect
import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any

import pyro.infer
import torch
from pyro.infer.elbo import ELBOModule
from pyro.infer.enum import get_importance_trace
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bayeskit._core.functions_of_users import line_of
from bayeskit._core.inputs import whole_number
from bayeskit._core.process_state import process_state
from bayeskit._logdensity.pyro_runs import own_words
from bayeskit.errors import LossError, ModelError
from bayeskit.inference.objectives._drawing import (
    PARTICLES,
    Compatibility,
    Gate,
    Particles,
    Site,
    plate_nesting,
    run_particles,
    stacked,
)


class _SameSubsample(Messenger):
    """Let all runs of a step see the minibatch that the first one drew."""

    def __init__(self) -> None:
        super().__init__()
        self._indices: dict[str, Tensor] = {}

    def _pyro_post_sample(self, message: Any) -> None:
        # The subsample is drawn anyway, so that a chunk recomputed in the backward pass uses the same random numbers.
        # The particle plate is smaller in an incomplete last chunk.
        if isinstance(message["fn"], _Subsample) and message["name"] != PARTICLES:
            message["value"] = self._indices.setdefault(message["name"], message["value"])


class Draw:
    """Model, guide and data of one training step, used by an objective to draw particles."""

    def __init__(
        self, objective: Objective, model: Callable[..., Any], guide: Callable[..., Any], args: Any, kwargs: Any
    ) -> None:
        self.objective = objective
        self.model, self.guide, self.args, self.kwargs = model, guide, args, kwargs
        self.last: Particles | None = None  # most recent particles
        self._subsample = _SameSubsample()
        if math.isinf(objective.max_plate_nesting):
            with own_words():
                objective.max_plate_nesting = plate_nesting(model, guide, args, kwargs, objective.compatibility)

    def __call__(
        self,
        num_particles: int,
        *,
        detached: bool = False,
        path_only: bool = False,
        analytic_kl: bool = False,
        gate: Gate | None = None,
    ) -> Particles:
        """Draw particles; see :func:`~bayeskit.inference.objectives._drawing.run_particles`."""
        # More particles than the objective's chunk_size are drawn in chunks and recomputed in the backward pass, so
        # memory holds one chunk.
        options = {"detached": detached, "path_only": path_only, "analytic_kl": analytic_kl}
        chunk = self.objective.chunk_size or num_particles
        if not self.objective.vectorize_particles:
            chunk = 1
        sizes = [min(chunk, num_particles - start) for start in range(0, num_particles, chunk)]
        if len(sizes) == 1:
            self.last = self._run(num_particles, options, gate)
            return self.last
        gates = [None if gate is None else Gate() for _ in sizes]
        runs = [
            self._recomputed(size, options, part)
            if self.objective.vectorize_particles and torch.is_grad_enabled()
            else self._run(size, options, part)
            for size, part in zip(sizes, gates, strict=True)
        ]
        if gate is not None:
            gate.parts = [(part, size) for part, size in zip(gates, sizes, strict=True) if part is not None]
        self.last = stacked(runs)
        return self.last

    def _run(self, num_particles: int, options: dict[str, bool], gate: Gate | None) -> Particles:
        with process_state(), self._subsample, own_words():
            particles = run_particles(
                self.model,
                self.guide,
                self.args,
                self.kwargs,
                num_particles=num_particles,
                nesting=int(self.objective.max_plate_nesting),
                **options,
                gate=gate,
                data_plate=self.objective.data_plate,
                compatibility=self.objective.compatibility,
            )
        self.objective.check(particles.model_sites, particles.guide_sites)
        return particles

    def _recomputed(self, num_particles: int, options: dict[str, bool], gate: Gate | None) -> Particles:
        """Draw a chunk whose intermediate tensors are made again in the backward pass."""
        found: list[Particles] = []

        def tensors(*_: Any) -> tuple[Tensor, ...]:
            particles = self._run(num_particles, options, gate)
            if not found:
                found.append(particles.without_sites())
            return particles.tensors()

        # Devices of the tensor arguments determine the random streams to replay; data may be on other devices.
        seen = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, Tensor)]
        if torch.cuda.is_initialized():
            seen.append(torch.empty(0, device="cuda"))
        result = checkpoint(tensors, *seen, use_reentrant=False)
        return found[0].with_tensors(result)


class Objective(pyro.infer.ELBO):  # type: ignore[misc]
    """Base class of bounds and divergences for training a model and guide.

    Use ``pyro.infer.SVI(model, guide, optimizer, loss=objective)``, or ``objective(model, guide)``, a module that
    returns the loss when called on the data.

    Parameters
    ----------
    num_particles : int, default 1
        Guide draws per observation.
    max_plate_nesting : int, optional
        Number of plate dimensions of model and guide; found by running both once if omitted.
    vectorize_particles : bool, default True
        Draw all particles in one run, in a plate to the left of the model's plates. With False, model and guide run
        once per particle, for models that cannot be broadcast.
    chunk_size : int, optional
        Maximum number of particles per run. Chunks are recomputed in the backward pass, so memory does not grow with
        ``num_particles``, at up to twice the time. Batch normalization in training mode updates its running statistics
        at every run of model and guide: each chunk, its recomputation, and the run that finds ``max_plate_nesting``.
    data_plate : str, optional
        Name of the plate over observations. By default every plate that contains all sites; without such a plate the
        whole data set has one importance weight.

    Raises
    ------
    SettingsError
        If ``num_particles`` or ``chunk_size`` is less than 1.
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        max_plate_nesting: int | None = None,
        vectorize_particles: bool = True,
        chunk_size: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        for name, value in (("num_particles", num_particles), ("chunk_size", 1 if chunk_size is None else chunk_size)):
            whole_number(name, value, least=1)
        super().__init__(num_particles=num_particles, vectorize_particles=vectorize_particles)
        # Pyro's max_plate_nesting includes the particle plate; this class excludes it.
        self.max_plate_nesting = math.inf if max_plate_nesting is None else max_plate_nesting
        self.chunk_size = chunk_size
        self.data_plate = data_plate
        self.compatibility = Compatibility()

    def __call__(self, model: Any, guide: Any) -> ELBOModule:
        """Return a module that maps data to the loss and holds the parameters of model and guide."""
        module: ELBOModule = super().__call__(model, guide)
        owners = [getattr(role, "__self__", None) for role in (model, guide)]
        for name, owner in zip(("model_owner", "guide_owner"), owners, strict=True):
            if isinstance(owner, torch.nn.Module) and (name == "model_owner" or owner is not owners[0]):
                module.add_module(name, owner)
        return module

    @abstractmethod
    def estimate(self, draw: Draw) -> Tensor:
        """Return the quantity to maximize for each observation, ``(*batch)``.

        The loss reports its value and the optimizer follows its gradient. The gradient may match the value only in
        expectation.
        """

    @property
    def is_moving(self) -> bool:
        """Whether the loss changes during training for fixed model and guide, as with annealed weights."""
        return False

    def reset(self) -> None:
        """Reset the state of the objective for a new training run."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the objective, such as a multiplier or a baseline."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state returned by :meth:`state_dict`."""

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the scalar loss: minus the sum over observations, scaled from the minibatch to the full data."""
        with _turn():
            return self._loss(Draw(self, model, guide, args, kwargs))

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Return the loss as a number."""
        with _turn(), torch.no_grad():
            draw = Draw(self, model, guide, args, kwargs)
            return _checked(float(self._loss(draw)), draw)

    def loss_and_grads(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Return the loss as a number and accumulate its gradients in the parameters.

        LossError if the loss is not finite; gradients then stay unchanged. ModelError if ``pyro.infer.SVI`` runs it in
        one thread while another runs a model.
        """
        with _turn():
            draw = Draw(self, model, guide, args, kwargs)
            loss = self._loss(draw)
            value = _checked(float(loss.detach()), draw)
            if loss.requires_grad:
                loss.backward(retain_graph=self.retain_graph)
        return value

    def _loss(self, draw: Draw) -> Tensor:
        estimate = self.estimate(draw)
        if draw.last is None:
            raise RuntimeError(f"{type(self).__name__}.estimate drew no particles")
        return estimate.sum() * -draw.last.scale

    def check(self, model: Mapping[str, Site], guide: Mapping[str, Site]) -> None:
        """Raise an error for unsupported sites; called at every run. The default accepts all sites."""

    def _get_trace(self, model: Any, guide: Any, args: Any, kwargs: Any) -> Any:
        return get_importance_trace("flat", self.max_plate_nesting, model, guide, args, kwargs)


# Pyro's SVI adds a handler to those of the process before it calls the objective, and so before it could wait.
_STEP = pyro.infer.SVI.step.__code__
_DISTURBED = (
    "pyro.infer.SVI.step ran while another thread ran a Pyro model, and Pyro has one stack of handlers for all "
    "threads. Remedy: train by bayeskit.inference.training.fit, which takes turns, or in processes"
)


@contextmanager
def _turn() -> Iterator[None]:
    """Let no other thread run a Pyro model; raise ``ModelError`` if handlers of two threads were mixed."""
    with process_state() as waited:
        if waited and any(frame.f_code is _STEP for frame, _ in walk_stack(None)):
            raise ModelError(_DISTURBED)
        try:
            with not_finite_as_loss_error():
                yield
        except (ValueError, IndexError) as error:
            if _last_frame(error).f_code is not Messenger.__exit__.__code__:
                raise
            raise ModelError(_DISTURBED) from error  # a handler was not where Pyro had put it


@contextmanager
def not_finite_as_loss_error() -> Iterator[None]:
    """Raise ``LossError`` where torch's validation of a distribution meets NaN or infinite numbers."""
    try:
        yield
    except ValueError as error:
        frame = _last_frame(error)
        value: Any = frame.f_locals.get("value")
        of_torch = frame.f_code.co_filename == _VALIDATION and isinstance(value, Tensor) and value.is_floating_point()
        if not of_torch or bool((good := value.isfinite()).all()):
            raise
        what = frame.f_locals.get("param", "value")
        raise LossError(
            f"the loss is not finite: the {what} of {type(frame.f_locals['self']).__name__}{line_of(error)} is "
            f"{float(value.detach()[~good][0])}; lower the learning rate, or look at the data and parameters on which "
            "it depends"
        ) from error


_VALIDATION = inspect.getfile(torch.distributions.Distribution)


def _last_frame(error: Exception) -> FrameType:
    return list(walk_tb(error.__traceback__))[-1][0]


def _checked(value: float, draw: Draw) -> float:
    if not math.isfinite(value):
        site = draw.last.culprit() if draw.last is not None else None
        where = (
            f"the log density of site {site!r} is not" if site else "its terms are, but their sum or weights are not"
        )
        raise LossError(
            f"the loss is {value}: {where} finite; lower the learning rate or look at that site's parameters"
        )
    return value


def with_gradient_of(value: Tensor, surrogate: Tensor) -> Tensor:
    """Return ``value`` with the gradient of ``surrogate``."""
    return value.detach() + (surrogate - surrogate.detach())


def log_mean_weight(log_weight: Tensor) -> Tensor:
    """Return the log of the mean of ``exp(log_weight)`` over particles: ``(K, *batch) -> (*batch)``."""
    return log_weight.logsumexp(0) - math.log(len(log_weight))
