"""Steps, epochs, checkpoints and endings of a training run.

It is no algorithm of ``drive``, whose states are values on one process: modules are trained in place, on several
processes that agree when to stop and to save, and the state of an optimiser is known only after its first step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from pyro import poutine
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from bayeskit._core.folders import save_or_warn
from bayeskit._core.inputs import real_number, warn_user, whole_number
from bayeskit._core.progress import progress_bar, watching
from bayeskit._core.randomness import global_stream, new_generator
from bayeskit.distributed import Ranks
from bayeskit.errors import BayeskitError, BayeskitWarning, DataError, LossError, SettingsError
from bayeskit.inference.objectives._drawing import rows_of_minibatch
from bayeskit.inference.samplers._driver import nothing_done, say_early
from bayeskit.inference.training._checkpoint import restored_checkpoint, settings_of_run, write_checkpoint
from bayeskit.inference.training._forward_passes import compiled_networks, in_mixed_precision, replaced_forward
from bayeskit.inference.training._history import History, TrainingEnding
from bayeskit.inference.training._learner import Learner
from bayeskit.inference.training._minibatches import Batch, Batches, Columns, as_batches
from bayeskit.inference.training._modules_inside import networks
from bayeskit.inference.training._parameter_store import parameters_in_store
from bayeskit.inference.training._plan import TrainingPlan, new_optimizer


class _Moment(NamedTuple):
    """State before a forward pass, which may change it."""

    stream: Tensor
    learnt: dict[str, Tensor]
    buffers: dict[str, Tensor]


class _Good(NamedTuple):
    """Last parameters with a finite loss, with objective state and buffers."""

    parameters: dict[str, Tensor]
    learnt: dict[str, Tensor]
    buffers: dict[str, Tensor]


class TrainingOutcome(NamedTuple):
    """Result of a training run."""

    history: History
    parameters: dict[str, Tensor]
    ending: TrainingEnding
    best_epoch: int | None
    seconds: float


def train(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    objective: Any,
    data: Any,
    validation: Any,
    plan: TrainingPlan,
    state: dict[str, dict[str, Any]],
) -> TrainingOutcome:
    """Run to the end; see :func:`~bayeskit.inference.training.fit`."""
    # ``state``: the parameters outside of modules, which are in Pyro's store while a step is made.
    batches = as_batches(data, plan.batch_size, plan.ranks, plan.seed)
    held_out = _held_out(validation, plan)
    first = next(batches.epoch(0), None)
    if first is None:
        raise DataError("the data have no batches")
    if plan.on_ranks_device:
        first = first.to(plan.ranks.device)
    with parameters_in_store(state), global_stream(new_generator(plan.seed, stream="first parameters")):
        learner = Learner(model, guide, objective, first)
    if plan.patience is not None and plan.validation_objective is None and getattr(objective, "is_moving", False):
        warn_user(
            f"the loss of {type(objective).__name__} changes in training even if model and guide do not, so patience "
            "may stop early and restore the wrong epoch; give validation_objective, such as ELBO()",
            BayeskitWarning,
        )
    count = batches.num_batches()
    if learner.has_global_latents and learner.whole is None and count is not None and count > 1:
        warn_user(
            "a latent variable stands outside every plate, and no plate rescales minibatches, so its prior is counted "
            'once per minibatch; write pyro.plate("data", size, subsample_size=len(x)) in the model',
            BayeskitWarning,
        )
    with ExitStack() as stack:
        if plan.precision == "bfloat16":
            found = networks(model, guide)
            stack.enter_context(replaced_forward(found, partial(in_mixed_precision, dtype=torch.bfloat16)))
        if plan.compile:
            chosen = networks(model, guide) if isinstance(plan.compile, bool) else list(plan.compile)
            with parameters_in_store(state):
                stack.enter_context(compiled_networks(learner, chosen, first, plan.seed))
        with parameters_in_store(state):
            training = _Run(learner, objective, batches, held_out, plan, first, state)
        return training.run()


def _held_out(validation: Any, plan: TrainingPlan) -> Batches | None:
    """Return the validation data; every process evaluates all of them."""
    if validation is None:
        return None
    whole = as_batches(validation, None, Ranks(), plan.seed)
    if plan.batch_size is None or not isinstance(whole, Columns) or plan.batch_size >= whole.num_data:
        return whole
    return as_batches(validation, plan.batch_size, Ranks(), plan.seed)


class _Run:
    def __init__(
        self,
        learner: Learner,
        objective: Any,
        batches: Batches,
        held_out: Batches | None,
        plan: TrainingPlan,
        first: Batch,
        state: dict[str, dict[str, Any]],
    ) -> None:
        self.learner, self.batches, self.held_out, self.plan = learner, batches, held_out, plan
        self.state = state
        self.ranks, self.control = plan.ranks, plan.control
        self.parameters = learner.trained()
        self.generator = self.ranks.generator(plan.seed, shared=learner.has_global_latents)
        self.optimizer = new_optimizer(plan.optimizer, list(self.parameters.values()))
        self.clipped: tuple[list[Tensor], ...] = ()
        if plan.gradient_clipping is not None:
            with global_stream(new_generator(plan.seed, stream="roles of parameters")):
                self.clipped = learner.groups(first)
        self.scheduler = None if plan.schedule is None else plan.schedule(self.optimizer)
        if self.ranks.world_size > 1 and any(name.startswith("store.") for name in self.parameters):
            raise SettingsError("several processes train modules only; replace pyro.param by PyroModule parameters")
        self.module = self.ranks.wrap(learner) if self.ranks.world_size > 1 else learner
        self.history = History()
        self.good = _Good(parameters={}, learnt={}, buffers={})
        self.best: dict[str, Tensor] = {}
        self.source: Iterator[Batch] = iter(())
        self.settings: dict[str, Any] = {}
        if self.control.checkpoint is not None:
            self.settings = settings_of_run(plan, objective, learner, batches, held_out, self.optimizer, self.scheduler)
        self.earlier = 0.0  # seconds of the runs before the last resume
        self.agreed: TrainingEnding | None = None
        self.last_save = -math.inf

    def run(self) -> TrainingOutcome:
        self.begin = time.monotonic()
        path = self.control.checkpoint
        if path is not None and Path(path).exists():
            with parameters_in_store(self.state), restored_checkpoint(path, self.settings) as state:
                self._load(state)
            self.last_save = self.begin
        self.source = self.batches.epoch(self.history.num_epochs, self.history.steps_of_epoch)
        first, count = self.history.num_steps, self.batches.num_batches()
        total = self.plan.num_steps
        if self.plan.num_epochs is not None:
            total = None if count is None else count * self.plan.num_epochs
        with (
            watching(self.control.time_budget) as self.watch,
            progress_bar("training", total, self.control.progress and self.ranks.rank == 0) as bar,
        ):
            while (ending := self._ending()) is None:
                # Handlers that pyro.infer.SVI has set up in another thread do not see this step.
                with parameters_in_store(self.state), poutine.block():
                    self._advance()
                if bar.due(done := self.history.num_steps):
                    speed = (done - first) / (time.monotonic() - self.begin)
                    recent = self.history.losses[-100:]
                    bar.update(done, f"loss {math.fsum(recent) / len(recent):.6g}, {speed:.3g} steps/s")
        if self.ranks.world_size == 1 and self.watch.interrupted.is_set():
            ending = "interrupted"  # also at the last step, so that a calling loop sees the interrupt
        if not self.history.losses:
            raise nothing_done(ending, self.control, "before the first step")  # type: ignore[arg-type]
        restored = self.plan.patience is not None and bool(self.best)
        with parameters_in_store(self.state):
            if self.history.num_steps > first:
                self._save_last()
            seconds = self._seconds()
            if restored:
                self._restore_best()
        say_early(ending, self.control, "training", f"after {self.history.num_steps} steps")  # type: ignore[arg-type]
        parameters = {name: p.detach().clone() for name, p in self.parameters.items()}
        return TrainingOutcome(
            history=self.history,
            parameters=parameters,
            ending=ending,
            best_epoch=self.history.best_epoch if restored else None,
            seconds=seconds,
        )

    def _ending(self) -> TrainingEnding | None:
        history, plan = self.history, self.plan
        if plan.num_steps is not None and history.num_steps >= plan.num_steps:
            return "finished"
        if plan.num_epochs is not None and history.num_epochs >= plan.num_epochs:
            return "finished"
        if plan.patience is not None and history.epochs_since_best >= plan.patience:
            return "early stopping"
        return self.agreed if self.ranks.world_size > 1 else self.watch.reason()

    def _advance(self) -> None:
        """Take a step, and end the epoch after its last step."""
        batch = next(self.source, None)
        if batch is not None:
            self._step(batch.to(self.ranks.device) if self.plan.on_ranks_device else batch)
            count = self.batches.num_batches()
            if count is None or self.history.steps_of_epoch < count:
                return
        elif self.history.steps_of_epoch == 0:
            raise DataError("the data have no batches in this epoch")
        self._end_epoch()
        self.source = self.batches.epoch(self.history.num_epochs)

    def _step(self, batch: Batch) -> None:
        learner = self.learner
        before = self._moment()
        self.optimizer.zero_grad()
        with global_stream(self.generator), rows_of_minibatch(batch.rows, batch.num_data):
            try:
                loss = self.module(*batch.args, **batch.kwargs) / learner.num_data(batch)
            except LossError as error:
                self._fail(batch, before, str(error))
            value, due = self._agree(float(loss.detach()))
            if math.isfinite(value) and loss.requires_grad:
                loss.backward()
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients) if gradients else loss.new_zeros(())
        if not (math.isfinite(value) and math.isfinite(norm)):
            self._fail(batch, before)
        self._remember_good(before)
        if due:
            first = self.last_save == -math.inf
            save_or_warn(lambda: self._save(before), "training goes on, and writes again", first=first)
        if self.plan.gradient_clipping is not None:
            for group in self.clipped:
                torch.nn.utils.clip_grad_norm_(group, self.plan.gradient_clipping)
        self.optimizer.step()
        learner.count_step()
        if self.scheduler is not None and not isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step()
        self.history.losses.append(value)

    def _moment(self) -> _Moment:
        learner = self.learner
        return _Moment(stream=self.generator.get_state(), learnt=learner.learnt(), buffers=learner.copied_buffers())

    def _remember_good(self, moment: _Moment) -> None:
        copies = self.good.parameters or {n: torch.empty_like(p) for n, p in self.parameters.items()}
        for name, parameter in self.parameters.items():
            copies[name].copy_(parameter.detach())
        self.good = _Good(parameters=copies, learnt=moment.learnt, buffers=moment.buffers)

    def _agree(self, loss: float) -> tuple[float, bool]:
        """Return the loss and whether to write a checkpoint, equal on all processes."""
        due = self.control.checkpoint is not None and (
            time.monotonic() - self.last_save >= self.control.checkpoint_seconds
        )
        if self.ranks.world_size == 1:
            return loss, due
        reason = self.watch.reason()
        facts = [loss, reason == "interrupted", reason == "time budget", due and self.ranks.rank == 0]
        shared = torch.tensor(facts, dtype=torch.float64, device=self.ranks.device)
        dist.all_reduce(shared)
        total, interrupted, out_of_time, save = shared.tolist()
        self.agreed = "interrupted" if interrupted else "time budget" if out_of_time else None
        self._share_learnt()
        return total / self.ranks.world_size, bool(save)

    def _share_learnt(self) -> None:
        """Replace the objective's state by its mean over the processes."""
        learnt = self.learner.learnt()
        for name, value in learnt.items():
            if value.is_floating_point():
                learnt[name] = self._mean_of_known(value)
        self.learner.load_learnt(learnt)

    def _mean_of_known(self, value: Tensor) -> Tensor:
        """Return the mean over the processes whose value is not NaN."""
        unknown = value.isnan()
        shared = torch.stack([value.masked_fill(unknown, 0.0), (~unknown).to(value.dtype)]).to(self.ranks.device)
        dist.all_reduce(shared)
        total, count = shared.to(value.device)
        return total / count

    def _mean(self, value: Tensor) -> Tensor:
        shared = value.to(self.ranks.device, copy=True)
        dist.all_reduce(shared)
        return (shared / self.ranks.world_size).to(value.device)

    def _fail(self, batch: Batch, before: _Moment, reason: str = "") -> NoReturn:
        """Restore the last parameters with a finite loss, and raise LossError with the responsible site."""
        self._restore(before)
        if not reason:
            stream = torch.Generator()
            stream.set_state(before.stream)
            with global_stream(stream):
                reason = self.learner.culprit(batch)
        # In the first step no loss was finite yet, and the parameters are those of the start.
        good = self.good if self.good.parameters else _Good(parameters={}, learnt=before.learnt, buffers=before.buffers)
        self.learner.load_trained(good.parameters)
        self.learner.load_learnt(good.learnt)
        self.learner.load_buffers(good.buffers)
        number = self.history.num_steps
        kept = "" if number == 0 else f"; the parameters of step {number - 1} are restored"
        raise LossError(f"step {number} in epoch {self.history.num_epochs}: {reason}{kept}")

    def _restore(self, moment: _Moment) -> None:
        self.learner.load_learnt(moment.learnt)
        self.learner.load_buffers(moment.buffers)

    def _end_epoch(self) -> None:
        history = self.history
        history.end_epoch()
        if self.held_out is not None and history.add_validation(self._validation_loss(self.held_out)):
            self._remember_best()
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(history.validation[-1] if history.validation else history.epoch_losses()[-1])

    def _validation_loss(self, batches: Batches) -> float:
        """Return the mean loss of the validation data, always with the same random numbers."""
        modes = [(module, module.training) for module in self.learner.all_modules()]
        for module, _ in modes:
            module.training = False
        total, items = 0.0, 0
        try:
            with torch.no_grad(), global_stream(new_generator(self.plan.seed, stream="validation")):
                for batch in batches.all():
                    here = batch.to(self.ranks.device) if self.plan.on_ranks_device else batch
                    try:
                        loss = self.learner.loss(here, self.plan.validation_objective) / self.learner.num_data(here)
                    except BayeskitError:
                        raise
                    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
                        raise DataError(
                            f"model and guide run with the data and fail with the validation data, where they raise "
                            f"{type(error).__name__}: {error}"
                        ) from error
                    total += float(loss) * here.num_rows
                    items += here.num_rows
        finally:
            for module, mode in modes:
                module.training = mode
        mean = total / items
        return mean if self.ranks.world_size == 1 else float(self._mean(torch.tensor(mean, dtype=torch.float64)))

    def _remember_best(self) -> None:
        if self.plan.patience is not None:
            tensors = {f"parameter.{n}": p.detach().clone() for n, p in self.parameters.items()}
            self.best = tensors | {f"buffer.{n}": b for n, b in self.learner.copied_buffers().items()}

    def _restore_best(self) -> None:
        for prefix, load in (("parameter.", self.learner.load_trained), ("buffer.", self.learner.load_buffers)):
            load({n.removeprefix(prefix): x for n, x in self.best.items() if n.startswith(prefix)})

    def _seconds(self) -> float:
        return self.earlier + time.monotonic() - self.begin

    def _save_last(self) -> None:
        if self.control.checkpoint is None:
            return
        moment = self._moment()
        save_or_warn(lambda: self._save(moment), "the last one is missing")  # a failed write must not lose the result

    def _save(self, moment: _Moment) -> None:
        """Write the state at ``moment``, before the current step; all processes take part."""
        streams = [moment.stream]
        if self.ranks.world_size > 1:
            mine = moment.stream.to(self.ranks.device)
            shared = [torch.empty_like(mine) for _ in range(self.ranks.world_size)]
            dist.all_gather(shared, mine)
            streams = [stream.cpu() for stream in shared]
        self.last_save = time.monotonic()
        if self.ranks.rank > 0 or self.control.checkpoint is None:
            return
        history = self.history
        state = {
            "losses": torch.tensor(history.losses, dtype=torch.float64),
            "validation": torch.tensor(history.validation, dtype=torch.float64),
            "epoch_ends": history.epoch_ends,
            "best_epoch": history.best_epoch,
            "seconds": self._seconds(),
            "streams": streams,
            "parameters": self.parameters,
            "buffers": moment.buffers,
            "learnt": moment.learnt,
            "best": self.best,
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.scheduler is None else self.scheduler.state_dict(),
        }
        write_checkpoint(self.control.checkpoint, self.settings, state)

    def _load(self, state: dict[str, Any]) -> None:
        best_epoch = state["best_epoch"]
        self.history = History(
            losses=[float(loss) for loss in state["losses"].tolist()],
            epoch_ends=[whole_number("epoch_ends", end, 0) for end in state["epoch_ends"]],
            validation=[float(loss) for loss in state["validation"].tolist()],
            best_epoch=None if best_epoch is None else whole_number("best_epoch", best_epoch, 0),
        )
        self.earlier, self.best = real_number("seconds", state["seconds"]), dict(state["best"])
        self._restore_best()  # only to see that it fits; the state of now follows
        self.generator.set_state(state["streams"][self.ranks.rank])
        self.learner.load_trained(state["parameters"])
        self.learner.load_buffers(state["buffers"])
        self.learner.load_learnt(state["learnt"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["schedule"])
