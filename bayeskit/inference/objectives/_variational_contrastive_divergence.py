"""Variational contrastive divergence: a guide trained with Markov chains started at its draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bayeskit._core.inputs import real_number, whole_number
from bayeskit.errors import SettingsError
from bayeskit.inference.objectives._drawing import Layout, SubsampleIndices, require_reparameterized
from bayeskit.inference.objectives._latent_density import LatentDensity
from bayeskit.inference.objectives._objective import Draw, Objective, with_gradient_of
from bayeskit.inference.samplers._hmc import HMC


class LatentKernel(Protocol):
    """A Markov kernel over the rows of a :class:`LatentDensity`; its state has a ``position``, ``(rows, d)``."""

    def init(self, target: Any, position: Tensor) -> Any:
        """Return the state at ``position``."""
        ...

    def step(self, target: Any, state: Any, *, generator: torch.Generator) -> tuple[Any, Any]:
        """Return the next state and information about the step."""
        ...


def contrastive_estimate(
    weight_before: Tensor,
    log_joint_after: Tensor,
    log_guide_after: Tensor,
    log_score: Tensor,
    control_variate: Tensor | float = 0.0,
) -> Tensor:
    """Return minus the divergence, ``(*batch)``, with the gradient by which guide and model are trained."""
    # All arguments are (K, *batch). weight_before: log weight of the guide's draws, differentiable in the draws;
    # log_joint_after and log_guide_after: log densities at the final states, differentiable in the parameters;
    # log_score: log guide density at the fixed initial states; control_variate: baseline subtracted from the log
    # weight after the chains, independent of these draws.
    weight_after = (log_joint_after - log_guide_after).detach()
    value = weight_before.detach() - weight_after
    surrogate = weight_before + log_guide_after - (weight_after - control_variate) * log_score
    return with_gradient_of(value.mean(0), (surrogate + log_joint_after).mean(0))


class VCD(Objective):
    """Variational contrastive divergence between the guide and its draws after ``num_steps`` Markov steps.

    Let ``q_t`` be the distribution of guide draws after ``t`` steps of a kernel with the posterior ``p`` invariant.
    The loss is the divergence ``KL(q, p) - KL(q_t, p) + KL(q_t, q)``, which is zero only at the posterior. It
    increases with ``t`` from zero to the symmetrized Kullback-Leibler divergence, so the guide covers more of the
    posterior than with the ELBO. The model's parameters maximize the expected log joint density under ``q_t``.

    The guide must be reparameterized. The score-function term of the gradient uses one control variate per
    observation, a moving average of the log weight after the chain, stored by the observation's index in its plate.
    :func:`bayeskit.fit` supplies the indices of a minibatch. In other training loops use
    ``pyro.plate("data", size, subsample=indices)`` or ``subsample_size``. A plate of the minibatch's size stores the
    averages by position, which is valid but noisier.

    Parameters
    ----------
    num_steps : int, default 8
        Number ``t`` of kernel steps, at least zero.
    kernel : Kernel, optional
        ``HMC(step_size=0.1, num_steps=5)`` by default; ``HMC(num_steps=1, num_steps_jitter=0)`` is the
        Metropolis-adjusted Langevin algorithm.
    target_acceptance : float or None, default 0.9
        Target acceptance rate for adapting the kernel's ``step_size``; None disables adaptation.
    adaptation_rate : float, default 0.1
        Change of the log step size per training step and unit difference from the target acceptance rate.
    decay : float in [0, 1), default 0.9
        Weight of previous steps in the control variate.
    max_plate_nesting, data_plate
        As in :class:`Objective`.

    Attributes
    ----------
    step_size_factor : Tensor
        Scalar factor of the kernel's step size.
    acceptance_rate : float
        Acceptance rate of the last training step.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, or the kernel has no ``step_size`` to adapt.
    GuideError
        On use, if a latent site is discrete or the guide is not reparameterized.

    References
    ----------
    Ruiz, F. J. R., Titsias, M. K. (2019). A contrastive divergence for combining variational inference and MCMC. ICML.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from bayeskit.inference.objectives._variational_contrastive_divergence import VCD
    >>> def model(x):
    ...     z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...     pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))  # the exact posterior
    >>> loss = VCD(num_particles=10, num_steps=3).loss(model, guide, torch.tensor(1.0))
    >>> abs(loss) < 1e-5
    True
    """

    def __init__(
        self,
        num_particles: int = 1,
        *,
        num_steps: int = 8,
        kernel: LatentKernel | None = None,
        target_acceptance: float | None = 0.9,
        adaptation_rate: float = 0.1,
        decay: float = 0.9,
        max_plate_nesting: int | None = None,
        data_plate: str | None = None,
    ) -> None:
        super().__init__(num_particles, max_plate_nesting=max_plate_nesting, data_plate=data_plate)
        if target_acceptance is not None:
            target_acceptance = real_number("target_acceptance", target_acceptance, "(0, 1)")
        decay = real_number("decay", decay, "[0, 1)")
        self.kernel: LatentKernel = HMC(step_size=0.1, num_steps=5) if kernel is None else kernel
        if target_acceptance is not None and not _has_step_size(self.kernel):
            raise SettingsError(
                f"the kernel {type(self.kernel).__name__} is no dataclass with a step_size to adapt; "
                "give target_acceptance=None"
            )
        self.num_steps, self.target_acceptance = whole_number("num_steps", num_steps, least=0), target_acceptance
        self.adaptation_rate = real_number("adaptation_rate", adaptation_rate, "(0, inf)")
        self.decay = float(decay)
        self.reset()

    @property
    def is_moving(self) -> bool:
        """True: the kernel's step size adapts during training."""
        return True

    def reset(self) -> None:
        """Reset the step size and the control variates."""
        self._acceptance_rate = float("nan")
        self._log_factor = torch.zeros((), dtype=torch.float64)
        self._control_variate = torch.empty(0)

    @property
    def acceptance_rate(self) -> float:
        """Acceptance rate of the last training step."""
        return self._acceptance_rate

    @property
    def step_size_factor(self) -> Tensor:
        """Scalar factor of the kernel's step size."""
        return self._log_factor.exp()

    def estimate(self, draw: Draw) -> Tensor:
        """Return minus the divergence for each observation, ``(*batch)``."""
        learn = torch.is_grad_enabled()
        with SubsampleIndices() as indices:
            particles = draw(self.num_particles)
        require_reparameterized(particles.guide_sites, "VCD", "another objective, such as ELBO")
        density = LatentDensity(draw.model, draw.guide, draw.args, draw.kwargs, particles, indices.values)
        before = density.flatten({name: site["value"] for name, site in particles.guide_sites.items()})
        after = self._moved(density, before.detach(), learn)

        # The pathwise term holds the model's parameters constant, so the gradient at the draw suffices.
        log_joint, slope = density.value_and_grad(before)
        joint = with_gradient_of(log_joint, (slope * before).sum(-1))
        weight_before, log_joint_after, log_guide_after, log_score = (
            density.by_datum(term)
            for term in (
                joint - density.log_guide(before),
                density.log_joint(after),
                density.log_guide(after),
                density.log_score(before.detach()),
            )
        )
        weight_after = (log_joint_after - log_guide_after).detach()
        control_variate = self._control_variate_of(weight_after, density.layout, indices, learn)
        return contrastive_estimate(weight_before, log_joint_after, log_guide_after, log_score, control_variate)

    @torch.no_grad()
    def _moved(self, density: LatentDensity, position: Tensor, learn: bool) -> Tensor:
        """Run chains from ``position``, ``(rows, d)``, and learn the step size from how often they were refused."""
        if self.num_steps == 0:
            return position
        kernel: Any = self.kernel
        target = self.target_acceptance
        if target is not None:
            step_size = kernel.step_size * self.step_size_factor.to(position)
            kernel = dataclasses.replace(kernel, step_size=step_size)
        generator = _global_generator(position.device)
        state, rates = kernel.init(density, position), []
        for _ in range(self.num_steps):
            state, info = kernel.step(density, state, generator=generator)
            if target is not None:
                rates.append(info.acceptance_rate.mean())
        if target is not None and learn:
            self._acceptance_rate = float(torch.stack(rates).mean())
            self._log_factor += self.adaptation_rate * (self._acceptance_rate - target)
        return state.position  # type: ignore[no-any-return]

    @torch.no_grad()
    def _control_variate_of(self, weight: Tensor, layout: Layout, indices: SubsampleIndices, learn: bool) -> Tensor:
        """Return what earlier steps say of log weights ``(K, *batch)``, and add these to what later steps will hear."""
        plates = sorted(layout.plates.items(), key=lambda item: item[1].dim)
        self._make_room(tuple(indices.sizes[name] for name, _ in plates), weight)
        chosen = [indices.items[name].to(weight.device) for name, _ in plates]
        items = torch.meshgrid(*chosen, indexing="ij") if chosen else ()
        known, mean = self._control_variate[items].clone(), weight.mean(0)
        unknown = ~known.isfinite()
        # New observations use the mean over the other observations of the batch, independent of their own draws.
        others = (mean.sum() - mean) / max(mean.numel() - 1, 1)
        if learn:
            self._control_variate[items] = torch.where(unknown, mean, torch.lerp(mean, known, self.decay))
        return torch.where(unknown, others, known)

    def _make_room(self, shape: tuple[int, ...], like: Tensor) -> None:
        """Let the table of control variates have at least the shape of the whole data."""
        old = self._control_variate.to(like)
        if old.dim() != len(shape):
            old = like.new_empty((0,) * len(shape)) if shape else like.new_full((), torch.nan)
        wanted = tuple(max(sizes) for sizes in zip(old.shape, shape, strict=True))
        table = old
        if wanted != tuple(old.shape):
            table = like.new_full(wanted, torch.nan)
            table[tuple(slice(size) for size in old.shape)] = old
        self._control_variate = table

    def state_dict(self) -> dict[str, Tensor]:
        """Return the log step size factor and the control variate of each observation."""
        return {"log_factor": self._log_factor.clone(), "control_variate": self._control_variate.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self._log_factor = state["log_factor"].clone()
        self._control_variate = state["control_variate"].clone()


def _has_step_size(kernel: LatentKernel) -> bool:
    return dataclasses.is_dataclass(kernel) and any(f.name == "step_size" for f in dataclasses.fields(kernel))


def _global_generator(device: torch.device) -> torch.Generator:
    """Return the generator behind torch's global stream, from which guides draw, too."""
    if device.type == "cpu":
        return torch.default_generator
    of_device: Any = torch.get_device_module(device)
    index = of_device.current_device() if device.index is None else device.index
    return of_device.default_generators[index]  # type: ignore[no-any-return]
