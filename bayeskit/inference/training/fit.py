"""The training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pyro
import torch
from torch import Tensor, nn

from bayeskit._settings import whole_number
from bayeskit.distributed import Ranks
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.driver import CHECKPOINT_SECONDS, Control
from bayeskit.inference.training.history import Plan
from bayeskit.inference.training.loop import train
from bayeskit.inference.training.networks import owner
from bayeskit.inference.training.result import Fit, InStore

Precision = Literal["float32", "bfloat16"]


def adam(parameters: list[Tensor]) -> torch.optim.Adam:
    """Return Adam, in one operation for all parameters where torch has it: small networks spend their time here."""
    fused = all(parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() for parameter in parameters)
    return torch.optim.Adam(parameters, fused=fused)


def fit(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    objective: Any,
    data: Any,
    *,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    batch_size: int | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = adam,
    schedule: Callable[[torch.optim.Optimizer], Any] | None = None,
    gradient_clipping: float | None = None,
    validation: Any = None,
    patience: int | None = None,
    validation_objective: Any = None,
    seed: int = 0,
    compile: bool | Sequence[nn.Module] = False,
    precision: Precision = "float32",
    ranks: Ranks | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> Fit:
    """Train model and guide by an objective.

    Parameters
    ----------
    model, guide : callable
        Modules, their methods, or functions with ``pyro.param`` and ``pyro.module``; modules are trained in place.
        Both are called with each minibatch: a tensor is the one argument, a tuple or list is spread, a mapping gives
        keyword arguments.
    objective : Objective or pyro.infer.ELBO
        What it learnt in an earlier run, such as a multiplier or how far annealing has come, is forgotten, unless
        the run resumes from a checkpoint.
    data : Tensor, tuple or mapping of Tensor, iterable of batches, or None
        Tensors have the items as leading dimension, and are shuffled in each epoch. An iterable, such as a
        ``DataLoader``, is iterated anew in each epoch. Without data model and guide have no arguments.
    num_epochs, num_steps : int
        How long to train; exactly one of them. On resuming it may be larger than before.
    batch_size : int, optional
        Items of a minibatch, over all processes; all items by default. Items that do not fill a last one are left
        out of that epoch.
    optimizer : callable, default Adam
        Makes a torch optimiser of a list of parameters, such as a class or
        ``functools.partial(torch.optim.Adam, lr=0.01, fused=True)``. The default is torch's Adam with its learning
        rate of 1e-3, fused.
    schedule : callable, optional
        Makes a torch scheduler of the optimiser. It advances after every step; ``ReduceLROnPlateau`` after every
        epoch, by the validation loss or else the epoch's.
    gradient_clipping : float, optional
        Largest norm of the gradient of the guide's parameters, and likewise of all others: cut apart, for objectives
        such as :class:`SUMO` give guide and model gradients of very different size.
    validation : like ``data``, optional
        Its loss is computed after each epoch, always with the same random numbers.
    patience : int, optional
        Stop after so many epochs without a lower validation loss; whatever ends the run, the parameters of the best
        epoch are restored.
    validation_objective : Objective or pyro.infer.ELBO, optional
        Computes the validation loss; by default ``objective`` does. Under an annealed weight, :class:`GECO` or
        :class:`VCD` losses of different epochs are not comparable, and ``patience`` needs a fixed one, such as
        ``ELBO()`` or ``IWAE(50)``.
    seed : int, default 0
        Of minibatches, first parameters and draws.
    compile : bool or sequence of Module, default False
        Compile the networks inside model and guide, or these modules.
    precision : str, default "float32"
        With ``"bfloat16"`` the networks inside model and guide compute in mixed precision. What they return, and
        every log density, is as precise as the parameters are.
    ranks : Ranks, optional
        From :func:`~bayeskit.distributed.process_group`: the processes share each minibatch.
    checkpoint : path, optional
        File to write the state to and, if it exists, to resume from, bit for bit.
    checkpoint_seconds : float, default 10
        Seconds between two checkpoints; 0 writes one at every step.
    time_budget : float, optional
        Seconds after which the run ends with what it has, as it does on Ctrl-C.
    progress : bool, default True
        Show a bar on anything over two seconds.

    Returns
    -------
    Fit

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    GuideError
        If guide and model do not fit together.
    LossError
        If the loss or its gradient is not finite, naming step and site. Modules then hold the parameters of the
        last step whose loss was finite, and the last checkpoint was written before.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Notes
    -----
    What is minimised and recorded is the loss *for each datum*, so that learning rates and losses do not depend on
    the sizes of data and minibatches. If the model's plate scales a minibatch up,
    ``pyro.plate("data", size, subsample_size=len(x))``, the loss is divided by ``size``, otherwise by ``len(x)``.
    Where all latent variables belong to the data that is the same. A model with global latent variables needs the
    plate to scale: without it, each minibatch would count their prior as if it were all data, and a warning says so.

    Neither Pyro's global parameter store nor any random state of torch is changed.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.objectives import ELBO
    >>> from bayeskit.inference.training import fit
    >>> def model(x):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 10.0))
    ...     with pyro.plate("data", 100, subsample_size=len(x)):
    ...         pyro.sample("x", dist.Normal(mean, 1.0), obs=x)
    >>> def guide(x):
    ...     loc = pyro.param("loc", torch.tensor(0.0))
    ...     pyro.sample("mean", dist.Normal(loc, 0.1))
    >>> x = 3.0 + torch.randn(100, generator=torch.Generator().manual_seed(0))
    >>> result = fit(model, guide, ELBO(), x, num_epochs=40, batch_size=10,
    ...              optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.05))
    >>> result.num_steps, bool(abs(result.parameters["store.loc"] - x.mean()) < 0.3)
    (400, True)
    """
    if (num_epochs is None) == (num_steps is None):
        raise SettingsError("give exactly one of num_epochs and num_steps")
    if gradient_clipping is not None and not gradient_clipping > 0:
        raise SettingsError(f"gradient_clipping must be positive, not {gradient_clipping}")
    if precision not in ("float32", "bfloat16"):
        raise SettingsError(f'precision must be "float32" or "bfloat16", not {precision!r}')
    if patience is not None and validation is None:
        raise SettingsError("patience needs validation data; give validation=...")
    if validation_objective is not None and validation is None:
        raise SettingsError("validation_objective needs validation data; give validation=...")
    if validation_objective is not None and not hasattr(validation_objective, "differentiable_loss"):
        raise SettingsError(
            "validation_objective must be one of bayeskit.inference.objectives or a pyro.infer.ELBO, not "
            f"{validation_objective!r:.80}"
        )
    plan = Plan(
        num_epochs=None if num_epochs is None else whole_number("num_epochs", num_epochs, least=1),
        num_steps=None if num_steps is None else whole_number("num_steps", num_steps, least=1),
        batch_size=None if batch_size is None else whole_number("batch_size", batch_size, least=1),
        optimizer=optimizer,
        schedule=schedule,
        gradient_clipping=gradient_clipping,
        patience=None if patience is None else whole_number("patience", patience, least=1),
        validation_objective=validation_objective,
        seed=whole_number("seed", seed),
        compile=compile if isinstance(compile, bool) else tuple(compile),
        precision=precision,
        ranks=ranks or Ranks(),
        on_ranks_device=ranks is not None,
        control=Control(checkpoint, checkpoint_seconds, time_budget, progress),
    )
    (bare_model, bare_guide), state = _apart(model, guide)
    with pyro.get_param_store().scope(state) as store:
        outcome = train(bare_model, bare_guide, objective, data, validation, plan)
        values = {name: _constrained(name, x, bare_model, bare_guide) for name, x in outcome.parameters.items()}
    known = {id(p) for module in (owner(bare_model), owner(bare_guide)) if module for p in module.parameters()}
    loose = any(id(p) not in known for p in store["params"].values())
    return Fit(
        model=InStore(bare_model, store) if loose and not isinstance(bare_model, nn.Module) else bare_model,
        guide=InStore(bare_guide, store) if loose and not isinstance(bare_guide, nn.Module) else bare_guide,
        parameters=outcome.parameters,
        losses=torch.tensor(outcome.history.losses, dtype=torch.float64),
        epoch_losses=torch.tensor(outcome.history.epoch_losses(), dtype=torch.float64),
        validation_losses=torch.tensor(outcome.history.validation, dtype=torch.float64),
        epoch_ends=tuple(outcome.history.epoch_ends),
        ending=outcome.ending,
        best_epoch=outcome.best_epoch,
        seconds=outcome.seconds,
        settings={"objective": type(objective).__name__, "seed": plan.seed, "precision": precision},
        values={name.removesuffix("_unconstrained"): x for name, x in values.items()},
    )


def _constrained(name: str, parameter: Tensor, model: Any, guide: Any) -> Tensor:
    """Return a parameter as it is seen by the function that it belongs to."""
    kind, _, rest = name.partition(".")
    if kind == "store":
        return pyro.get_param_store()[rest].detach().clone()
    if not rest.endswith("_unconstrained"):
        return parameter
    path, _, own = rest.removesuffix("_unconstrained").rpartition(".")
    module = owner(model if kind == "model" else guide)
    value: Tensor = getattr(module.get_submodule(path), own)  # type: ignore[union-attr]
    return value.detach().clone()


def _apart(*functions: Callable[..., Any]) -> tuple[list[Callable[..., Any]], Any]:
    """Separate functions that an earlier fit returned from their parameters."""
    state: dict[str, dict[str, Any]] = {"params": {}, "constraints": {}}
    for function in functions:
        if isinstance(function, InStore):
            for name, values in state.items():
                values.update(function.state[name])
    return [f.function if isinstance(f, InStore) else f for f in functions], state
