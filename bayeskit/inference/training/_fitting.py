"""Training of a model and guide by stochastic optimization of an objective."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, nn

from bayeskit._core.inputs import real_number, whole_number
from bayeskit.distributed import Ranks
from bayeskit.errors import SettingsError
from bayeskit.inference.samplers._driver import CHECKPOINT_SECONDS, Control
from bayeskit.inference.training._loop import train
from bayeskit.inference.training._modules_inside import owning_module
from bayeskit.inference.training._parameter_store import FunctionWithParameters, parameters_in_store, without_parameters
from bayeskit.inference.training._plan import Precision, TrainingPlan, default_optimizer
from bayeskit.inference.training._result import Fit


def fit(
    model: Callable[..., Any],
    guide: Callable[..., Any],
    objective: Any,
    data: Any,
    *,
    num_epochs: int | None = None,
    num_steps: int | None = None,
    batch_size: int | None = None,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] = default_optimizer,
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
        Both are called with each minibatch: a tensor as the only argument, a tuple or list as positional arguments,
        a mapping as keyword arguments.
    objective : Objective or pyro.infer.ELBO
        State from earlier runs, such as a multiplier or annealing progress, is reset unless the run resumes from a
        checkpoint.
    data : Tensor, tuple or mapping of Tensor, iterable of batches, or None
        Tensors are indexed by item along the leading dimension and shuffled in each epoch. An iterable, such as a
        ``DataLoader``, is iterated anew in each epoch. With None, model and guide have no arguments.
    num_epochs, num_steps : int
        Length of the run; set exactly one. It may be increased when a run resumes.
    batch_size : int, optional
        Minibatch size, summed over processes; all items by default. An incomplete last minibatch is dropped.
    optimizer : callable, default Adam
        Function from a list of parameters to a torch optimizer, such as
        ``functools.partial(torch.optim.Adam, lr=0.01, fused=True)``. The default is fused Adam with learning rate 1e-3.
    schedule : callable, optional
        Function from the optimizer to a torch scheduler, which advances after every step. ``ReduceLROnPlateau``
        advances after every epoch, using the validation loss if available and the epoch loss otherwise.
    gradient_clipping : float, optional
        Maximum gradient norm, applied separately to the guide's parameters and to all other parameters.
    validation : like ``data``, optional
        Validation data; their loss is computed after each epoch with a fixed random seed.
    patience : int, optional
        Number of epochs without a lower validation loss before training stops. The parameters of the best epoch are
        restored however the run ends.
    validation_objective : Objective or pyro.infer.ELBO, optional
        Objective of the validation loss; ``objective`` by default. Losses of different epochs are not comparable under
        an annealed weight, :class:`GECO` or :class:`VCD`; ``patience`` then needs a fixed objective, such as
        ``ELBO()`` or ``IWAE(50)``.
    seed : int, default 0
        Seed of minibatches, initial parameters and draws.
    compile : bool or sequence of Module, default False
        Compile all networks inside model and guide, or only the given modules.
    precision : str, default "float32"
        ``"bfloat16"`` runs the networks inside model and guide in mixed precision. Network outputs and log densities
        keep the dtype of the parameters.
    ranks : Ranks, optional
        Processes that share each minibatch, from :func:`~bayeskit.distributed.process_group`.
    checkpoint : path, optional
        File for the state of the run. If it exists, the run resumes from it with bitwise identical results.
    checkpoint_seconds : float, default 10
        Seconds between checkpoints; 0 writes a checkpoint at every step.
    time_budget : float, optional
        Seconds after which the run stops and returns the current fit, as on Ctrl-C.
    progress : bool, default True
        Show a progress bar if the run takes more than two seconds.

    Returns
    -------
    Fit

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    GuideError
        If guide and model do not match.
    LossError
        If the loss or its gradient is not finite; the message names step and site. Modules keep the parameters of the
        last step with a finite loss, and the checkpoint precedes the failure.
    CheckpointError
        If the checkpoint is damaged or belongs to another run.

    Notes
    -----
    The loss is minimized and recorded *per observation*, so learning rates and losses do not depend on the sizes of
    data and minibatches. The loss is divided by ``size`` if the model rescales minibatches with
    ``pyro.plate("data", size, subsample_size=len(x))``, and by ``len(x)`` otherwise. Both are equivalent if all
    latent variables are local to an observation. A model with global latent variables needs the rescaling plate;
    without it the prior is counted once per minibatch, and a warning is issued.

    Pyro's global parameter store and torch's random states stay unchanged.

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
    if gradient_clipping is not None:
        gradient_clipping = real_number("gradient_clipping", gradient_clipping, "(0, inf)")
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
    plan = TrainingPlan(
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
    (bare_model, bare_guide), state = without_parameters(model, guide)
    outcome = train(bare_model, bare_guide, objective, data, validation, plan, state)
    with parameters_in_store(state):
        values = {name: _constrained(name, x, bare_model, bare_guide) for name, x in outcome.parameters.items()}
    known = {
        id(p)
        for module in (owning_module(bare_model), owning_module(bare_guide))
        if module
        for p in module.parameters()
    }
    loose = any(id(p) not in known for p in state["params"].values())
    return Fit(
        model=FunctionWithParameters(bare_model, state)
        if loose and not isinstance(bare_model, nn.Module)
        else bare_model,
        guide=FunctionWithParameters(bare_guide, state)
        if loose and not isinstance(bare_guide, nn.Module)
        else bare_guide,
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
    """Return the constrained value of a parameter."""
    kind, _, rest = name.partition(".")
    if kind == "store":
        return pyro.get_param_store()[rest].detach().clone()
    if not rest.endswith("_unconstrained"):
        return parameter
    path, _, own = rest.removesuffix("_unconstrained").rpartition(".")
    module = owning_module(model if kind == "model" else guide)
    value: Tensor = getattr(module.get_submodule(path), own)  # type: ignore[union-attr]
    return value.detach().clone()
