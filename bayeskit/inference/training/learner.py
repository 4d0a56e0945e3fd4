"""What is trained: model, guide and objective as one module whose call returns the loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from bayeskit.errors import BayeskitError, DataError, GuideError, LossError, SettingsError
from bayeskit.inference.gradients.temperature import Annealed
from bayeskit.inference.objectives.objective import Objective
from bayeskit.inference.objectives.weighting import GRADIENT
from bayeskit.inference.training.batches import Batch
from bayeskit.inference.training.networks import named_modules, named_modules_in_settings, owner


class Learner(nn.Module):
    """The loss of model and guide as a function of a minibatch, and everything that it depends on.

    Belongs into a scope of Pyro's parameter store that was empty before.

    Parameters
    ----------
    model, guide : callable
    objective : pyro.infer.ELBO
    first : Batch
        Model and guide run on it once, so that guides make their parameters.

    Attributes
    ----------
    whole : int or None
        Number of items to which a plate of the model scales minibatches up; None where none does.
    has_global_latents : bool
        Whether a latent variable of the model stands outside every plate.

    Raises
    ------
    SettingsError
        If ``objective`` is no objective, or there is nothing to train.
    DataError
        If model or guide cannot be run, and the data are not finite.
    GuideError
        If a site names a gradient estimator, of which an objective of Pyro knows nothing.
    """

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any], objective: Any, first: Batch) -> None:
        super().__init__()
        if isinstance(objective, type) or not hasattr(objective, "differentiable_loss"):
            raise SettingsError(
                "objective must be one of bayeskit.inference.objectives or a pyro.infer.ELBO, such as ELBO(), not "
                f"{objective!r:.80}"
            )
        self._call = (model, guide, objective)
        self.model, self.guide = owner(model), owner(guide)
        if isinstance(objective, Objective):
            objective.reset()
        before, learnt = self.copied_buffers(), self.learnt()
        try:
            with torch.no_grad():
                self(*first.args, **first.kwargs)
        except ValueError as error:
            if isinstance(error, BayeskitError) or not (where := _not_finite(first)):
                raise
            raise DataError(f"{where}; leave such rows out, or mask them in the model") from error
        self.load_buffers(before)
        self.load_learnt(learnt)
        self.whole, self.has_global_latents = self._plates(first)
        if not self.trained():
            raise SettingsError(
                "model and guide have no parameters to train; use modules, pyro.module or pyro.param, and check "
                "requires_grad"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a minibatch."""
        model, guide, objective = self._call
        loss: Tensor = objective.differentiable_loss(model, guide, *args, **kwargs)
        if torch.is_grad_enabled() and torch.distributed.is_initialized():
            # Processes wait for the gradient of every parameter, also of those that this objective does not use.
            loss = loss + sum(p.flatten()[:0].sum().to(loss.dtype) for p in self.parameters() if p.requires_grad)
        return loss

    def loss(self, batch: Batch, objective: Any = None) -> Tensor:
        """Return the loss of ``batch``, by another objective if one is given."""
        model, guide, own = self._call
        loss: Tensor = (objective or own).differentiable_loss(model, guide, *batch.args, **batch.kwargs)
        return loss

    def num_data(self, batch: Batch) -> int:
        """Return how many data the loss of ``batch`` is the loss of."""
        return batch.num_items if self.whole is None else self.whole

    def culprit(self, batch: Batch) -> str:
        """Say which site makes the loss of ``batch`` non-finite."""
        model, guide, objective = self._call
        if isinstance(objective, Objective):
            try:
                objective.loss(model, guide, *batch.args, **batch.kwargs)
            except LossError as error:
                return str(error)
        return "the loss or its gradient is not finite; lower the learning rate or clip the gradient"

    def trained(self) -> dict[str, Tensor]:
        """Return all parameters by name: those of modules, then those of Pyro's store."""
        found: dict[str, Tensor] = {name: p for name, p in self.named_parameters() if p.requires_grad}
        known = {id(p) for p in self.parameters()}
        for name, parameter in pyro.get_param_store().named_parameters():
            if id(parameter) not in known and parameter.requires_grad:
                found[f"store.{name}"] = parameter
        return found

    def buffers_by_name(self) -> dict[str, Tensor]:
        """Return what modules remember besides parameters, such as running means."""
        found = dict(self.named_buffers())
        for function in self._call[:2]:
            for name, module in {**named_modules(function), **named_modules_in_settings(function)}.items():
                found |= {f"function.{name}.{key}": value for key, value in module.named_buffers()}
        return found

    def count_step(self) -> None:
        """Let temperatures that fall from step to step go on."""
        inside = [module for function in self._call[:2] for module in named_modules_in_settings(function).values()]
        for module in {id(m): m for m in [*self.all_modules(), *inside]}.values():
            if isinstance(module, Annealed):
                module.step()

    def copied_buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers."""
        return {name: buffer.clone() for name, buffer in self.buffers_by_name().items()}

    def load_buffers(self, state: Mapping[str, Tensor]) -> None:
        """Write into the buffers; those that ``state`` does not name stay."""
        _write(self.buffers_by_name(), state)

    def load_trained(self, state: Mapping[str, Tensor]) -> None:
        """Write into the parameters."""
        _write(self.trained(), state)

    def groups(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters that the guide's draws and their density depend on, and the others."""
        trained = list(self.trained().values())
        with poutine.block(), torch.enable_grad():
            trace = poutine.trace(self._call[1]).get_trace(*batch.args, **batch.kwargs)
            trace.compute_log_prob()
            sites = [s for s in prune_subsample_sites(trace).nodes.values() if s["type"] == "sample"]
            seen: list[Any] = [x for s in sites for x in (s["value"], s["log_prob"])]
            total = sum((x.sum() for x in seen if x.requires_grad), torch.zeros((), requires_grad=True))
            found = torch.autograd.grad(total, trained, allow_unused=True)
        used = [gradient is not None for gradient in found]
        return (
            [p for p, of_guide in zip(trained, used, strict=True) if of_guide],
            [p for p, of_guide in zip(trained, used, strict=True) if not of_guide],
        )

    def learnt(self) -> dict[str, Tensor]:
        """Return a copy of what the objective has learnt."""
        objective = self._call[2]
        state = objective.state_dict() if isinstance(objective, Objective) else {}
        return {name: value.clone() for name, value in state.items()}

    def load_learnt(self, state: Mapping[str, Tensor]) -> None:
        """Give back to the objective what :meth:`learnt` returned."""
        objective = self._call[2]
        if isinstance(objective, Objective):
            objective.load_state_dict(state)

    def all_modules(self) -> list[nn.Module]:
        """Return every module that model and guide are made of."""
        around = [m for function in self._call[:2] for part in named_modules(function).values() for m in part.modules()]
        return [*self.modules(), *around]

    def fingerprint(self) -> str:
        """Return a digest of names, shapes and types of parameters and buffers."""
        tensors = {**self.trained(), **self.buffers_by_name()}
        lines = [f"{name} {tuple(x.shape)} {x.dtype}" for name, x in tensors.items()]
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def _plates(self, batch: Batch) -> tuple[int | None, bool]:
        model, guide, objective = self._call
        with poutine.block(), torch.no_grad():
            drawn = poutine.trace(guide).get_trace(*batch.args, **batch.kwargs)
            trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*batch.args, **batch.kwargs)
        if not isinstance(objective, Objective):
            _refuse_marks(drawn, objective)
        sites = [s for s in prune_subsample_sites(trace).nodes.values() if s["type"] == "sample"]
        frames = [f for s in sites for f in s["cond_indep_stack"]]
        whole = max((f.full_size for f in frames if f.full_size and f.full_size > f.size), default=None)
        return whole, any(not s["cond_indep_stack"] for s in sites if not s["is_observed"])


def _refuse_marks(trace: Any, objective: Any) -> None:
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and GRADIENT in site["infer"]:
            raise GuideError(
                f"site {name!r} has infer['gradient'], which {type(objective).__name__} of Pyro does not know; train "
                "by bayeskit.inference.objectives.ELBO"
            )


def _not_finite(batch: Batch) -> str | None:
    """Say where the data are not finite, if they are not."""
    for name, x in [*enumerate(batch.args), *batch.kwargs.items()]:
        if isinstance(x, Tensor) and x.is_floating_point() and not bool((good := x.isfinite()).all()):
            place = tuple(int(i) for i in (~good).nonzero()[0])
            return f"argument {name!r} of model and guide is {float(x[place])} at {place} of the first minibatch"
    return None


def _write(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            if name in values:
                target.copy_(values[name])
