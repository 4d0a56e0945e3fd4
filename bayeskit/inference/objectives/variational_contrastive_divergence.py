"""The variational contrastive divergence of Ruiz and Titsias: a guide trained by where Markov chains take its draws."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.objectives.drawing import Layout, SubsampleIndices, require_reparameterized
from bayeskit.inference.objectives.latent_density import LatentDensity
from bayeskit.inference.objectives.objective import Draw, Objective, with_gradient_of
from bayeskit.inference.samplers.hmc import HMC

__all__ = ["LatentKernel", "VCD", "contrastive_estimate"]


class LatentKernel(Protocol):
    """A Markov kernel over the rows of a :class:`LatentDensity`; its state has a ``position``, ``(rows, d)``."""

    def init(self, target: Any, position: Tensor) -> Any:
        """Return the state at ``position``."""
        ...

    def step(self, target: Any, state: Any, *, generator: torch.Generator) -> tuple[Any, Any]:
        """Return the next state and what happened."""
        ...


def contrastive_estimate(
    weight_before: Tensor,
    log_joint_after: Tensor,
    log_guide_after: Tensor,
    log_score: Tensor,
    control_variate: Tensor | float = 0.0,
) -> Tensor:
    """Return minus the divergence, ``(*batch)``, with the gradient by which guide and model are trained."""
    # All arguments are (K, *batch). weight_before: log weight of the guide's draws, differentiable along these;
    # log_joint_after and log_guide_after: log densities at the chains' ends, differentiable in the parameters;
    # log_score: log density of the guide at the chains' starts, held fixed; control_variate: the value that the log
    # weight after the chains is compared with, independent of these draws.
    weight_after = (log_joint_after - log_guide_after).detach()
    value = weight_before.detach() - weight_after
    surrogate = weight_before + log_guide_after - (weight_after - control_variate) * log_score
    return with_gradient_of(value.mean(0), (surrogate + log_joint_after).mean(0))


class VCD(Objective):
    """Variational contrastive divergence: the guide is trained by where ``num_steps`` of a Markov chain take its draws.

    With ``q_t`` the law of the guide's draws after ``t`` steps of a kernel that leaves the posterior ``p`` invariant,
    the divergence ``KL(q, p) - KL(q_t, p) + KL(q_t, q)`` is zero at the posterior only. It grows with ``t`` from zero
    to the symmetrised Kullback-Leibler divergence, so that the guide covers more of the posterior than the ELBO's.
    The model's parameters climb the expected log joint density under ``q_t``. The loss is the divergence.

    The guide's draws must be reparameterised. The gradient holds a score-function term, whose control variate is for
    each datum a moving average of the log weight after the chain. It is kept by the datum's index in its plate:
    :func:`bayeskit.fit` tells which data a minibatch holds; elsewhere give minibatches as
    ``pyro.plate("data", size, subsample=indices)`` or by ``subsample_size``. With a plate of the minibatch's size the
    averages would go by position, which is not wrong, but noisier.

    Parameters
    ----------
    num_particles : int, default 1
    num_steps : int, default 8
        Steps ``t`` of the kernel, at least zero.
    kernel : Kernel, optional
        ``HMC(step_size=0.1, num_steps=5)`` by default; ``HMC(num_steps=1, num_steps_jitter=0)`` is Langevin's with
        a Metropolis step.
    target_acceptance : float or None, default 0.9
        Towards which a factor on the kernel's ``step_size`` is moved in each training step; None leaves the kernel
        as it is.
    adaptation_rate : float, default 0.1
        Change of the log step size in a training step per unit of acceptance missing.
    decay : float in [0, 1), default 0.9
        Weight of the past in the control variate.
    max_plate_nesting, data_plate
        As in :class:`Objective`.

    Attributes
    ----------
    step_size_factor : Tensor
        By what the kernel's step size is multiplied, learnt so far; a scalar.
    acceptance_rate : float
        Of the last training step.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain, or the kernel has no ``step_size`` to adapt.
    GuideError
        On use: if a latent site is discrete, or the guide's draws carry no gradient.

    References
    ----------
    Ruiz, F. J. R., Titsias, M. K. (2019). A contrastive divergence for combining variational inference and MCMC.
    ICML.

    Examples
    --------
    >>> import pyro, torch, pyro.distributions as dist
    >>> from bayeskit.inference.objectives.variational_contrastive_divergence import VCD
    >>> def model(x):
    ...     with pyro.plate("data", len(x)):
    ...         z = pyro.sample("z", dist.Normal(0.0, 1.0))
    ...         pyro.sample("x", dist.Normal(z, 1.0), obs=x)
    >>> def guide(x):
    ...     with pyro.plate("data", len(x)):
    ...         pyro.sample("z", dist.Normal(x / 2, 0.5**0.5))  # the exact posterior
    >>> loss = VCD(num_particles=10, num_steps=3).loss(model, guide, torch.tensor([1.0, -0.5]))
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
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 0:
            raise SettingsError(f"num_steps must be a whole number of at least 0, not {num_steps!r}")
        if target_acceptance is not None and not 0 < target_acceptance < 1:
            raise SettingsError(f"target_acceptance must lie between 0 and 1, or be None, not {target_acceptance}")
        if not adaptation_rate > 0:
            raise SettingsError(f"adaptation_rate must be positive, not {adaptation_rate}")
        if not 0 <= decay < 1:
            raise SettingsError(f"decay must lie in [0, 1), not {decay}")
        self.kernel: LatentKernel = HMC(step_size=0.1, num_steps=5) if kernel is None else kernel
        if target_acceptance is not None and not _has_step_size(self.kernel):
            raise SettingsError(
                f"the kernel {type(self.kernel).__name__} is no dataclass with a step_size to adapt; "
                "give target_acceptance=None"
            )
        self.num_steps, self.target_acceptance = num_steps, target_acceptance
        self.adaptation_rate, self.decay = float(adaptation_rate), float(decay)
        self.reset()

    @property
    def is_moving(self) -> bool:
        """True: the kernel's step size moves."""
        return True

    def reset(self) -> None:
        """Forget step size and control variates."""
        self._acceptance_rate = float("nan")
        self._log_factor = torch.zeros((), dtype=torch.float64)
        self._control_variate = torch.empty(0)

    @property
    def acceptance_rate(self) -> float:
        """Of the last training step."""
        return self._acceptance_rate

    @property
    def step_size_factor(self) -> Tensor:
        """By what the kernel's own step size is multiplied."""
        return self._log_factor.exp()

    def estimate(self, draw: Draw) -> Tensor:
        """Return minus the divergence of each datum, ``(*batch)``."""
        learn = torch.is_grad_enabled()
        with SubsampleIndices() as indices:
            particles = draw(self.num_particles)
        require_reparameterized(particles.guide_sites, "VCD", "another objective, such as ELBO")
        density = LatentDensity(draw.model, draw.guide, draw.args, draw.kwargs, particles, indices.values)
        before = density.flatten({name: site["value"] for name, site in particles.guide_sites.items()})
        after = self._moved(density, before.detach(), learn)

        # Along the draw the model's parameters are constants, so that its gradient at the draw is all it takes.
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
        # Data not met before take the mean of the others in the batch, which knows nothing of their own draws.
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
        """Return the factor of the step size, as a logarithm, and the control variate of each datum."""
        return {"log_factor": self._log_factor.clone(), "control_variate": self._control_variate.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`state_dict` returned."""
        self._log_factor = state["log_factor"].clone()
        self._control_variate = state["control_variate"].clone()


def _has_step_size(kernel: LatentKernel) -> bool:
    return dataclasses.is_dataclass(kernel) and any(f.name == "step_size" for f in dataclasses.fields(kernel))


def _global_generator(device: torch.device) -> torch.Generator:
    """Return the generator behind torch's global stream, from which guides draw, too."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator
