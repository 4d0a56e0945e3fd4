"""The No-U-Turn sampler over a batch of chains that grow their trees in lockstep."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from bayeskit.errors import SettingsError
from bayeskit.inference.samplers.hmc import HMCState, require_positive_step, require_temperature
from bayeskit.inference.samplers.metric import Metric
from bayeskit.inference.samplers.nuts.compiled_doubling import CompiledGrowth, compiled_moves
from bayeskit.inference.samplers.nuts.doubling import EagerGrowth, Growth, drawn
from bayeskit.target import Target

LEAVES_PER_DRAW = 64  # for which noise is drawn at once
LEAVES_PER_LOOK = {"cpu": 1}  # leapfrog steps between two looks at whether any chain still grows
LEAVES_PER_LOOK_ELSEWHERE = 8  # where a look waits for the device
MAX_COMPILED_SIZE = 1024  # of n * d: beyond, arithmetic costs more than the overhead of calling it
SECONDS_PER_LEAF = 1.5e-4  # of bookkeeping that is not compiled
COMPILE_SECONDS = 8.0  # that compiling it takes


class NUTSInfo(NamedTuple):
    """What happened in one step, for diagnostics and adaptation."""

    acceptance_rate: Tensor  # (n,), mean Metropolis acceptance probability of the leaves
    diverging: Tensor  # (n,), bool: the energy error of a leaf was not finite or above the limit
    energy: Tensor  # (n,), Hamiltonian at the state kept
    num_steps: Tensor  # (n,), leapfrog steps
    tree_depth: Tensor  # (n,), doublings begun, so that num_steps <= 2 ** tree_depth - 1


@dataclass(frozen=True)
class NUTS:
    """The No-U-Turn sampler: Hamiltonian trajectories that end where they turn back.

    Each chain doubles its trajectory, forward or backward in time, until its ends
    approach each other, and moves to a state drawn from it. All chains are at the same
    leaf of their trees, so that one gradient call serves them all; those that
    have turned wait. Step size, metric and inverse temperature are each chain's own.

    Parameters
    ----------
    step_size : float or Tensor, default 0.1
        Positive; broadcasts to ``(n,)``.
    metric : Metric, optional
        Ideally of the posterior's variances or covariance; by default the identity.
    max_depth : int in [1, 20], default 10
        At most ``2 ** max_depth - 1`` leapfrog steps.
    beta : float or Tensor, default 1
        Inverse temperature, broadcasts to ``(n,)``.
    max_energy_error : float, default 1000
        A larger error of the Hamiltonian counts as a divergence and ends the trajectory.
    planned_calls : int, default 1
        Gradient calls still to come, from which follows whether to compile.

    Notes
    -----
    States are drawn from the trajectory with weights ``exp(-energy)``, within a subtree
    by the Gumbel-max trick, between the old trajectory and the new half with the bias
    towards the new half of Betancourt (2017). A trajectory turns where the sum of its
    momenta points against the momentum at an end; this is asked of each
    subtree and, so that a step of half a period does not go unnoticed, of
    either half with the first leaf of the other.

    The tree is not recursive. With ``b`` the number of ones in the binary form of a leaf's
    index, the leaf is remembered in slot ``b``. A leaf with ``k`` trailing ones
    closes ``k`` subtrees, which begin at the leaves in slots ``b - k`` to ``b - 1``.

    References
    ----------
    Hoffman, M. D., Gelman, A. (2014). The No-U-Turn sampler: adaptively setting path
    lengths in Hamiltonian Monte Carlo. JMLR 15, 1593-1623.
    Betancourt, M. (2017). A conceptual introduction to Hamiltonian Monte Carlo.
    arXiv:1701.02434.
    Phan, D., Pradhan, N., Jankowiak, M. (2019). Composable effects for flexible and
    accelerated probabilistic programming in NumPyro. arXiv:1912.11554.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.inference.samplers import NUTS
    >>> target = bk.Target.from_functions(
    ...     lambda u: -0.5 * u.square().sum(-1), lambda u: 0 * u.sum(-1), dim=3)
    >>> kernel, generator = NUTS(step_size=0.5), torch.Generator().manual_seed(0)
    >>> state = kernel.init(target, torch.zeros(8, 3, dtype=torch.float64))
    >>> state, info = kernel.step(target, state, generator=generator)
    >>> state.position.shape, bool((info.num_steps < 2**info.tree_depth).all())
    (torch.Size([8, 3]), True)
    """

    step_size: float | Tensor = 0.1
    metric: Metric | None = None
    max_depth: int = 10
    beta: float | Tensor = 1.0
    max_energy_error: float = 1000.0
    planned_calls: int = 1

    def __post_init__(self) -> None:
        # Tensors are looked at by init: here it would cost a look at the device in every iteration of a warm-up.
        if not isinstance(self.step_size, Tensor):
            require_positive_step(torch.as_tensor(self.step_size))
        if not isinstance(self.beta, Tensor):
            require_temperature(torch.as_tensor(self.beta))
        if not 1 <= self.max_depth <= 20:
            raise SettingsError(f"max_depth must lie in [1, 20], not {self.max_depth}")
        if not self.max_energy_error > 0:
            raise SettingsError(f"max_energy_error must be positive, not {self.max_energy_error}")

    def init(self, target: Target, position: Tensor) -> HMCState:
        """Evaluate the density at ``position``, shape ``(n, d)``.

        Raises
        ------
        SettingsError
            If a step size is not positive or an inverse temperature outside [0, 1].
        """
        require_positive_step(torch.as_tensor(self.step_size))
        require_temperature(torch.as_tensor(self.beta))
        evaluate = target.evaluator(position.shape[0], self.planned_calls)
        evaluation = evaluate(position, _per_chain(self.beta, position))
        return HMCState(position, *evaluation, torch.zeros((), dtype=torch.int64))

    def step(self, target: Target, state: HMCState, *, generator: torch.Generator) -> tuple[HMCState, NUTSInfo]:
        """Grow one tree per chain and move to a state drawn from it."""
        q = state.position
        n = q.shape[0]
        like = {"dtype": q.dtype, "device": q.device}
        momentum = torch.randn(q.shape, generator=generator, **like)  # type: ignore[call-overload]
        uniform = torch.rand(2 * self.max_depth + 1, n, generator=generator, **like)  # type: ignore[call-overload]
        direction, luck = uniform[: self.max_depth + 1].unbind(0), uniform[self.max_depth + 1 :].unbind(0)
        beta = _per_chain(self.beta, q)
        evaluate = target.evaluator(n, self.planned_calls)
        look_every = LEAVES_PER_LOOK.get(q.device.type, LEAVES_PER_LOOK_ELSEWHERE)

        growth = self._growth(target, q)
        growing: Tensor | bool = True
        position = growth.start(state, momentum, direction[0], _per_chain(self.step_size, q))
        for doubling in range(self.max_depth):
            num_leaves = 1 << doubling
            for leaf in range(num_leaves):
                if leaf and leaf % look_every == 0 and not growing:
                    break
                if leaf % LEAVES_PER_DRAW == 0:
                    exponential = torch.empty(min(num_leaves, LEAVES_PER_DRAW), n, **like)  # type: ignore[call-overload]
                    noise = exponential.exponential_(generator=generator).unbind(0)
                end, evaluation = position, evaluate(position, beta)
                position, growing = growth.add(leaf, evaluation, noise[leaf % LEAVES_PER_DRAW])
            position, growing = growth.join(end, evaluation.gradient, luck[doubling], direction[doubling + 1])
            if not growing:
                break
        tree, half = growth.parts()
        new = HMCState._make((*drawn(tree)[:5], state.iteration + 1))
        rate = half.acceptance_sum / half.num_steps
        return new, NUTSInfo(rate, half.diverging, tree.energy, half.num_steps.long(), tree.depth.long())

    def with_settings(self, **changes: object) -> NUTS:
        """Return a copy with some settings replaced."""
        return replace(self, **changes)  # type: ignore[arg-type]

    def _growth(self, target: Target, position: Tensor) -> Growth:
        metric = self.metric or Metric(torch.ones_like(position[0]), is_dense=False)
        metric = replace(metric, factor=metric.factor.to(position))
        wanted = target.compile
        if wanted == "auto":
            wanted = self.planned_calls * SECONDS_PER_LEAF > COMPILE_SECONDS
        if wanted and position.numel() <= MAX_COMPILED_SIZE and metric.directions is None:
            form = (metric.factor.shape, metric.is_dense, *position.shape, position.dtype, position.device)
            moves = compiled_moves(*form, self.max_depth, self.max_energy_error)
            if moves is not None:
                return CompiledGrowth(metric, moves, self.max_depth)
        return EagerGrowth(metric, self.max_energy_error)


def _per_chain(setting: float | Tensor, position: Tensor) -> Tensor:
    """Return one value a chain, shape ``(n,)``."""
    if not isinstance(setting, Tensor):
        return position.new_full(position.shape[:1], setting)
    return setting.to(position).expand(position.shape[0]).contiguous()
