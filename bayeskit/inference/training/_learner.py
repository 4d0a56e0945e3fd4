"""Model, guide and objective as one module whose call returns the loss."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.poutine.util import prune_subsample_sites
from torch import Tensor, nn

from bayeskit._core.functions_of_users import lines_named
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit._logdensity.pyro_distributions import MendedDraws
from bayeskit._logdensity.pyro_runs import check_plates
from bayeskit.errors import BayeskitError, DataError, GuideError, LossError, ModelError, SettingsError, ShapeError
from bayeskit.inference.gradients._relaxed import Annealed
from bayeskit.inference.objectives._drawing import GRADIENT
from bayeskit.inference.objectives._objective import Objective, not_finite_as_loss_error
from bayeskit.inference.training._minibatches import Batch
from bayeskit.inference.training._modules_inside import named_modules, named_modules_in_settings, owning_module


class Learner(nn.Module):
    """The loss of model and guide as a function of a minibatch, with all state on which it depends."""

    # Construct it in an empty scope of Pyro's parameter store. Model and guide run once on ``first`` to create the
    # guide's parameters.

    def __init__(self, model: Callable[..., Any], guide: Callable[..., Any], objective: Any, first: Batch) -> None:
        super().__init__()
        if isinstance(objective, type) or not hasattr(objective, "differentiable_loss"):
            raise SettingsError(
                "objective must be one of bayeskit.inference.objectives or a pyro.infer.ELBO, such as ELBO(), not "
                f"{objective!r:.80}"
            )
        for what, function in (("model", model), ("guide", guide)):
            _check_call(what, function, first)
        self._call = (model, guide, objective)
        self.model, self.guide = owning_module(model), owning_module(guide)
        if isinstance(objective, Objective):
            objective.reset()
        before, learnt = self.copied_buffers(), self.learnt()
        try:
            # Later steps may raise what a user throws on purpose.
            with torch.no_grad(), lines_named("the model or the guide"):
                # Full data size of a plate that rescales minibatches, or None; whether a latent site lies outside all
                # plates.
                self.whole, self.has_global_latents = self._plates(first)
                self(*first.args, **first.kwargs)
        except (ValueError, LossError) as error:
            foreign = isinstance(error, LossError) or not isinstance(error.__cause__ or error, BayeskitError)
            if not foreign or not (where := _not_finite(first)):
                raise
            raise DataError(f"{where}; leave such rows out, or mask them in the model") from error
        self.load_buffers(before)
        self.load_learnt(learnt)
        if not self.trained():
            raise SettingsError(
                "model and guide have no parameters to train; use modules, pyro.module or pyro.param, and check "
                "requires_grad"
            )

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of a minibatch."""
        model, guide, objective = self._call
        with not_finite_as_loss_error():  # of objectives of Pyro too
            loss: Tensor = objective.differentiable_loss(model, guide, *args, **kwargs)
        if torch.is_grad_enabled() and torch.distributed.is_initialized():
            # Distributed processes wait for the gradient of every parameter, including unused parameters.
            loss = loss + sum(p.flatten()[:0].sum().to(loss.dtype) for p in self.parameters() if p.requires_grad)
        return loss

    def loss(self, batch: Batch, objective: Any = None) -> Tensor:
        """Return the loss of ``batch`` under ``objective``, by default the own one."""
        model, guide, own = self._call
        loss: Tensor = (objective or own).differentiable_loss(model, guide, *batch.args, **batch.kwargs)
        return loss

    def num_data(self, batch: Batch) -> int:
        """Return the number of observations to which the loss of ``batch`` refers."""
        return batch.num_rows if self.whole is None else self.whole

    def culprit(self, batch: Batch) -> str:
        """Return a message with the site that makes the loss of ``batch`` non-finite."""
        model, guide, objective = self._call
        if isinstance(objective, Objective):
            try:
                objective.loss(model, guide, *batch.args, **batch.kwargs)
            except LossError as error:
                return str(error)
        return "the loss or its gradient is not finite; lower the learning rate or clip the gradient"

    def trained(self) -> dict[str, Tensor]:
        """Return all parameters by name: of modules, then of Pyro's store."""
        found: dict[str, Tensor] = {name: p for name, p in self.named_parameters() if p.requires_grad}
        known = {id(p) for p in self.parameters()}
        for name, parameter in pyro.get_param_store().named_parameters():
            if id(parameter) not in known and parameter.requires_grad:
                found[f"store.{name}"] = parameter
        return found

    def buffers_by_name(self) -> dict[str, Tensor]:
        """Return the buffers of modules, such as running means."""
        found = dict(self.named_buffers())
        for function in self._call[:2]:
            for name, module in {**named_modules(function), **named_modules_in_settings(function)}.items():
                found |= {f"function.{name}.{key}": value for key, value in module.named_buffers()}
        return found

    def count_step(self) -> None:
        """Advance annealed temperatures by one step."""
        inside = [module for function in self._call[:2] for module in named_modules_in_settings(function).values()]
        for module in {id(m): m for m in [*self.all_modules(), *inside]}.values():
            if isinstance(module, Annealed):
                module.step()

    def copied_buffers(self) -> dict[str, Tensor]:
        """Return copies of the buffers."""
        return {name: buffer.clone() for name, buffer in self.buffers_by_name().items()}

    def load_buffers(self, state: Mapping[str, Tensor]) -> None:
        """Write into the buffers; buffers not in ``state`` stay."""
        _write(self.buffers_by_name(), state)

    def load_trained(self, state: Mapping[str, Tensor]) -> None:
        """Write into the parameters."""
        _write(self.trained(), state)

    def groups(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters of the guide, on which its draws or their density depend, and the others."""
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
        """Return a copy of the objective's state."""
        objective = self._call[2]
        state = objective.state_dict() if isinstance(objective, Objective) else {}
        return {name: value.clone() for name, value in state.items()}

    def load_learnt(self, state: Mapping[str, Tensor]) -> None:
        """Restore the objective's state from :meth:`learnt`."""
        objective = self._call[2]
        if isinstance(objective, Objective):
            objective.load_state_dict(state)

    def all_modules(self) -> list[nn.Module]:
        """Return all modules of model and guide."""
        around = [m for function in self._call[:2] for part in named_modules(function).values() for m in part.modules()]
        return [*self.modules(), *around]

    def fingerprint(self, batch: Batch) -> dict[str, Any]:
        """Return shapes of parameters and buffers, and log densities of all sites where training does not lead.

        Parameters, and buffers that a run changes, have values from a seed, so that a run and the run that resumes it
        have one fingerprint; what else the densities depend on belongs to the model.
        """
        trained, buffers = self.trained(), self.copied_buffers()
        tensors = {**trained, **self.buffers_by_name()}
        before, learnt = {name: x.detach().clone() for name, x in trained.items()}, self.learnt()
        generator = new_generator(0, stream="fingerprint of model and guide")
        try:
            self._densities(batch)
            changed = {name: x for name, x in self.copied_buffers().items() if not torch.equal(x, buffers[name])}
            self.load_buffers(buffers)
            seeded = {
                name: (0.1 * torch.randn(x.shape, generator=generator, dtype=torch.float64)).to(x)
                for name, x in sorted({**before, **changed}.items())
                if x.is_floating_point()
            }
            _write({**trained, **self.buffers_by_name()}, seeded)
            densities = self._densities(batch)
        finally:
            _write(trained, before)
            self.load_buffers(buffers)
            self.load_learnt(learnt)
        shapes = {name: f"{tuple(x.shape)} {x.dtype}" for name, x in tensors.items()}
        fixed = {
            name: float(x.double().sum()) for name, x in buffers.items() if name not in changed and not x.is_complex()
        }
        return {"parameters": shapes, "buffers": fixed, "log densities": densities}

    def _densities(self, batch: Batch) -> dict[str, Any]:
        """Return the log density of each site of guide and model, as far as a run at any parameters gets."""
        model, guide, _ = self._call
        found: dict[str, Any] = {}
        stream = global_stream(new_generator(0, stream="draws of the fingerprint of model and guide"))
        try:
            with poutine.block(), torch.no_grad(), stream, MendedDraws():
                drawn = poutine.trace(guide).get_trace(*batch.args, **batch.kwargs)
                trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*batch.args, **batch.kwargs)
                for what, one in (("guide", drawn), ("model", trace)):
                    for name, site in prune_subsample_sites(one).nodes.items():
                        if site["type"] == "sample":
                            fn: Any = site["fn"]
                            terms = scale_and_mask(fn.log_prob(site["value"]), site["scale"], site["mask"])
                            total = float(torch.as_tensor(terms).double().sum())
                            place = f"the log density of site {name!r} of the {what}"
                            found[place] = total if math.isfinite(total) else repr(total)
                if not found:  # an objective that needs no sites
                    found["the loss"] = float(self(*batch.args, **batch.kwargs))
        except Exception as error:  # such as parameters outside of a domain; up to there the sites are known
            found["the end of a run"] = type(error).__name__
        return found

    def _plates(self, batch: Batch) -> tuple[int | None, bool]:
        model, guide, objective = self._call
        with poutine.block(), torch.no_grad(), not_finite_as_loss_error():
            drawn = poutine.trace(guide).get_trace(*batch.args, **batch.kwargs)
            trace = poutine.trace(poutine.replay(model, trace=drawn)).get_trace(*batch.args, **batch.kwargs)
        if not isinstance(objective, Objective):
            _refuse_marks(drawn, objective)
        of_guide, sites = (
            [s for s in prune_subsample_sites(t).nodes.values() if s["type"] == "sample"] for t in (drawn, trace)
        )
        for site in (*of_guide, *sites):
            check_plates(site)
        frames = [f for s in sites for f in s["cond_indep_stack"]]
        whole = max((f.full_size for f in frames if f.full_size and f.full_size > f.size), default=None)
        return whole, any(not s["cond_indep_stack"] for s in sites if not s["is_observed"])


def _check_call(what: str, function: Callable[..., Any], batch: Batch) -> None:
    """Raise a typed error if a model or guide cannot be called with a minibatch."""
    if inspect.isclass(function):
        raise SettingsError(f"{what} is a class; give an object of it, such as {function.__name__}(model)")
    try:
        inspect.signature(function).bind(*batch.args, **batch.kwargs)
    except TypeError as error:
        raise ModelError(
            f"the {what} cannot be called with minibatches of {len(batch.args) + len(batch.kwargs)} arguments: {error}"
            "; give the arguments in a tuple or a mapping, as a list is taken for batches"
        ) from error
    except ValueError:
        return  # it has no signature, as functions in C


def _refuse_marks(trace: Any, objective: Any) -> None:
    for name, site in trace.nodes.items():
        if site["type"] == "sample" and GRADIENT in site["infer"]:
            raise GuideError(
                f"site {name!r} has infer['gradient'], which {type(objective).__name__} of Pyro does not support; "
                "train by bayeskit.inference.objectives.ELBO"
            )


def _not_finite(batch: Batch) -> str | None:
    """Return a message with the place of the first non-finite value of the data, or None."""
    for name, x in [*enumerate(batch.args), *batch.kwargs.items()]:
        if isinstance(x, Tensor) and x.is_floating_point() and not bool((good := x.isfinite()).all()):
            place = tuple(int(i) for i in (~good).nonzero()[0])
            return f"argument {name!r} of model and guide is {float(x[place])} at {place} of the first minibatch"
    return None


def _write(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, target in targets.items():
            if name in values:
                if (found := values[name]).shape != target.shape or found.dtype != target.dtype:
                    raise ShapeError(f"{name} is {found.dtype}, {tuple(found.shape)}, not of the shape and type here")
                target.copy_(found)
