"""Hidden Markov models as distributions over sequences, their states summed out."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from bayeskit._inputs import as_numbers
from bayeskit._pyro.draws import draw as draw_from
from bayeskit._pyro.unclamped import unclamped
from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import BayeskitWarning, DataError, SettingsError, ShapeError
from bayeskit.models.discrete.inputs import as_real
from bayeskit.models.discrete.sequences.chains import (
    chain_product,
    follow,
    identity,
    predecessors,
    prefix_sums,
    suffix_sums,
)
from bayeskit.models.discrete.sequences.segmentations import checked_lengths
from bayeskit.models.discrete.sequences.semirings import Expectation, LogSum, Max, Semiring, draw, surprisal


class HiddenMarkov(TorchDistribution):  # type: ignore[misc]
    r"""Distribution over sequences :math:`x_1, \dots, x_T` emitted by a Markov chain of hidden states.

    .. math::
        p(x) = \sum_{z_1, \dots, z_T} \pi_{z_1} \prod_{t=2}^T A_{z_{t-1} z_t} \prod_{t=1}^T p(x_t \mid z_t).

    Sums over states, most probable states and draws of states are exact. Sequences of a batch may have different
    lengths: what they are padded with is not read. The first state emits the first observation;
    ``pyro.distributions.DiscreteHMM`` makes a transition before.

    Parameters
    ----------
    initial_logits : Tensor or array
        Logits of the first state, shape ``(*batch, K)``; minus infinity forbids a state, but not all of them.
    transition_logits : Tensor or array
        Logits of the next state, a row for each state before, shape ``(*batch, K, K)``.
    emission : Distribution
        Of one observation in each state: its batch shape ends in ``K``, as in ``(K,)``, or in ``(T, K)`` or ``(1, K)``
        with further batch dimensions before. Probabilities of zero are kept, although torch raises them a little.
    duration : int
        The number of steps ``T``, padding included.
    lengths : Tensor or array of int, optional
        Shape ``(*batch)``, from 1 to ``T``; by default all sequences have ``T`` steps.
    parallel : bool, default True
        Sum states out in ``log2(T)`` rounds of matrix products, in time :math:`T K^3`; or else in ``T`` steps, in time
        :math:`T K^2`, which is faster with dozens of states.
    validate_args : bool, optional
        Whether to check parameters and values, as in all distributions of torch.

    Raises
    ------
    ShapeError
        If logits and emission disagree about the number of states, or they or ``lengths`` do not fit one batch.
    DataError
        If a length is not a whole number from 1 to ``T``.
    SettingsError
        If ``duration`` is below 1. With validation, if logits are NaN or plus infinity, or forbid every state.

    Warns
    -----
    BayeskitWarning
        With validation, if logits look like probabilities.

    References
    ----------
    Rabiner, L. R. (1989). A tutorial on hidden Markov models and selected applications in speech recognition.
    Proceedings of the IEEE 77, 257-286.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.models.discrete.sequences import HiddenMarkov
    >>> stay = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
    >>> hmm = HiddenMarkov(torch.zeros(2), stay, dist.Normal(torch.tensor([-1.0, 1.0]), 0.5), duration=5)
    >>> x = torch.tensor([-1.2, -0.7, 0.9, 1.4, 0.8])
    >>> hmm.log_prob(x), hmm.most_probable_states(x)
    (tensor(-5.3518), tensor([0, 0, 1, 1, 1]))
    """

    arg_constraints = {  # noqa: RUF012  as in all distributions of torch
        "initial_logits": constraints.independent(constraints.real, 1),
        "transition_logits": constraints.independent(constraints.real, 2),
    }

    def __init__(
        self,
        initial_logits: Tensor,
        transition_logits: Tensor,
        emission: Any,
        duration: int,
        lengths: Tensor | None = None,
        *,
        parallel: bool = True,
        validate_args: bool | None = None,
    ) -> None:
        duration = whole_number("duration", duration, least=1)
        initial_logits = as_real("initial_logits", initial_logits)
        transition_logits = as_real("transition_logits", transition_logits)
        lengths = None if lengths is None else as_numbers("lengths", lengths)
        num_states = _checked_states(initial_logits, transition_logits, emission, duration)
        batch = _broadcast(
            initial_logits=initial_logits.shape[:-1],
            transition_logits=transition_logits.shape[:-2],
            emission=emission.batch_shape[:-2],
            lengths=() if lengths is None else lengths.shape,
        )
        if self._validate_args if validate_args is None else validate_args:
            _check_logits("initial_logits", initial_logits)
            _check_logits("transition_logits", transition_logits)
        self.num_states, self.duration, self.emission, self.parallel = num_states, duration, emission, parallel
        self.initial_logits, self.transition_logits = initial_logits.log_softmax(-1), transition_logits.log_softmax(-1)
        self._padded = lengths is not None
        self.lengths = checked_lengths(lengths, batch, duration, initial_logits.device)
        super().__init__(batch, torch.Size((duration, *emission.event_shape)), validate_args=validate_args)

    @property
    def support(self) -> Any:
        """The support of one observation, at every step."""
        return constraints.independent(self.emission.support, self.event_dim - len(self.emission.event_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> HiddenMarkov:
        """Return the distribution with a larger batch shape."""
        new = self._get_checked_instance(HiddenMarkov, _instance)
        new.num_states, new.duration, new.emission, new.parallel = (
            self.num_states,
            self.duration,
            self.emission,
            self.parallel,
        )
        new.initial_logits, new.transition_logits = self.initial_logits, self.transition_logits
        new._padded, new.lengths = self._padded, self.lengths.expand(batch_shape)
        super(HiddenMarkov, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of sequences, states summed out: ``(*batch, T, *event)`` to ``(*batch)``."""
        value = self._filled(value)
        if self._validate_args:
            self._validate_sample(value)
        start, steps = self._potentials(value, LogSum())
        if self.parallel:
            ends = LogSum().sum(start.unsqueeze(-1) + chain_product(LogSum(), steps), -2)
        else:
            ends = prefix_sums(LogSum(), start, steps)[..., -1, :]
        return LogSum().sum(ends, -1)

    def state_probabilities(self, value: Tensor) -> Tensor:
        """Return the probability of each state at each step given all observations (smoothing).

        Parameters
        ----------
        value : Tensor
            ``(*batch, T, *event)``.

        Returns
        -------
        Tensor
            ``(*batch, T, K)``, zero beyond the length of a sequence. It is the gradient of :meth:`log_prob` with
            respect to the log density of each observation in each state.

        Raises
        ------
        DataError
            If a sequence has probability zero.
        """
        start, steps = self._possible(value, LogSum())
        joint = prefix_sums(LogSum(), start, steps, rescale=True) + suffix_sums(LogSum(), steps, rescale=True)
        return torch.where(self._inside().unsqueeze(-1), joint.softmax(-1), 0.0)

    def most_probable_states(self, value: Tensor) -> Tensor:
        """Return the most probable sequence of states (Viterbi), int64, ``(*batch, T)``; -1 beyond the length.

        Raises
        ------
        DataError
            If a sequence has probability zero.
        """
        start, steps = self._possible(value, Max())
        with torch.no_grad():
            sums = prefix_sums(Max(), start, steps, rescale=True)
            states = follow(predecessors(sums, steps).argmax(-1), sums[..., -1, :].argmax(-1))
        return torch.where(self._inside(), states, -1)

    def sample_states(self, value: Tensor, num_samples: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw sequences of states given the observations.

        Parameters
        ----------
        value : Tensor
            ``(*batch, T, *event)``.
        num_samples : int
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor of int
            ``(num_samples, *batch, T)``; -1 beyond the length.

        Raises
        ------
        DataError
            If a sequence has probability zero.
        SettingsError
            If ``num_samples`` is not a whole number of at least 1.
        """
        num_samples = whole_number("num_samples", num_samples, least=1)
        start, steps = self._possible(value, LogSum())
        generator = new_generator(seed, start.device, stream="hidden_states")
        with torch.no_grad():
            sums = prefix_sums(LogSum(), start, steps, rescale=True)
            last = draw(sums[..., -1, :], num_samples, generator)
            states = follow(draw(predecessors(sums, steps), num_samples, generator), last)
        return torch.where(self._inside(), states, -1)

    def state_entropy(self, value: Tensor) -> Tensor:
        """Return the entropy in nats of the sequence of states given the observations, ``(*batch)``, differentiable.

        Raises
        ------
        DataError
            If a sequence has probability zero.
        """
        start, steps = self._possible(value, LogSum())
        semiring = Expectation()
        pairs = chain_product(semiring, semiring.elements(steps, surprisal(steps)))
        first = semiring.elements(start, surprisal(start))
        log_normalizer, mean = semiring.sum(semiring.sum(semiring.product(first.unsqueeze(-1), pairs), -2), -1)
        return log_normalizer + mean

    def log_joint(self, states: Tensor, value: Tensor) -> Tensor:
        """Return the log density of states and observations together.

        Parameters
        ----------
        states : Tensor of int
            ``(*sample, *batch, T)``; beyond the length of a sequence they are not read.
        value : Tensor
            ``(*batch, T, *event)``.

        Raises
        ------
        ShapeError
            If states or observations have another number of steps, or their batches do not fit.
        DataError
            If a state is none of the whole numbers from 0 to ``K - 1``.
        """
        inside = self._inside()
        emitted = self._emitted(value)
        states = self._checked_path(states)
        shape = _broadcast(states=states.shape, lengths=inside.shape, value=emitted.shape[:-1])
        states = states.expand(shape)
        seen = emitted.expand(*shape, self.num_states).gather(-1, states.unsqueeze(-1)).squeeze(-1)
        rows = self.transition_logits.expand(*shape[:-1], self.num_states, self.num_states)
        before = states[..., :-1, None].expand(*shape[:-1], shape[-1] - 1, self.num_states)
        moved = rows.gather(-2, before).gather(-1, states[..., 1:, None]).squeeze(-1)
        first = self.initial_logits.expand(*shape[:-1], self.num_states).gather(-1, states[..., :1])
        return torch.where(inside, seen + torch.cat([first, moved], -1), 0.0).sum(-1)

    def enumerate_states(self, value: Tensor, limit: int = 2**20) -> tuple[Tensor, Tensor]:
        """Return every sequence of states with its log joint density: the exact twin, for small cases.

        Parameters
        ----------
        value : Tensor
            ``(*batch, T, *event)``, all of full length.
        limit : int, default 2**20
            The largest number of sequences of states.

        Returns
        -------
        states : Tensor of int
            ``(K**T, T)``.
        log_joint : Tensor
            ``(K**T, *batch)``.

        Raises
        ------
        SettingsError
            If there are more than ``limit``; the message says how many. If sequences have different lengths.
        """
        number = self.num_states**self.duration
        if number > limit:
            raise SettingsError(
                f"there are {self.num_states}**{self.duration} = {number} sequences of states, which exceed "
                f"limit={limit}; use log_prob, which is exact, too"
            )
        if self._padded and bool((self.lengths < self.duration).any()):
            raise SettingsError("sequences have different lengths; enumerate those of one length at a time")
        digits = self.num_states ** torch.arange(self.duration - 1, -1, -1, device=self.lengths.device)
        states = torch.arange(number, device=self.lengths.device).unsqueeze(-1) // digits % self.num_states
        shaped = states.reshape(number, *(1,) * len(self.batch_shape), self.duration)
        return states, self.log_joint(shaped, value)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw sequences, ``(*sample, *batch, T, *event)``; beyond the length of one, the chain goes on."""
        return self.sample_with_states(sample_shape)[1]

    def sample_with_states(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Draw states and sequences from torch's global stream.

        Returns
        -------
        states : Tensor of int
            ``(*sample, *batch, T)``.
        value : Tensor
            ``(*sample, *batch, T, *event)``.
        """
        shape = (*sample_shape, *self.batch_shape)
        with torch.no_grad():
            state = (
                torch.distributions.Categorical(logits=self.initial_logits)
                .expand(self.batch_shape)
                .sample(sample_shape)
            )
            chain = [state]
            rows = self.transition_logits.expand(*shape, self.num_states, self.num_states)
            for _ in range(self.duration - 1):
                row = rows.gather(-2, chain[-1][..., None, None].expand(*shape, 1, self.num_states)).squeeze(-2)
                chain.append(torch.distributions.Categorical(logits=row).sample())
            states = torch.stack(chain, -1)
            event = self.emission.event_shape
            drawn = draw_from(self.emission.expand((*shape, self.duration, self.num_states)))
            index = states.reshape(*states.shape, 1, *(1,) * len(event)).expand(*states.shape, 1, *event)
            return states, drawn.gather(len(shape) + 1, index).squeeze(len(shape) + 1)

    def _emitted(self, value: Tensor) -> Tensor:
        """Return the log density of each observation in each state, ``(*batch, T, K)``."""
        value = self._filled(value).unsqueeze(-1 - len(self.emission.event_shape))
        emitted = self.emission.log_prob(value)
        if not self.emission.support.is_discrete:
            return emitted
        # Filled in afterwards, zeros leave the slopes of all other probabilities finite.
        exact = unclamped(self.emission).log_prob(value)
        return emitted.masked_fill(exact.detach() == -math.inf, -math.inf)

    def _filled(self, value: Tensor) -> Tensor:
        """Put a sequence's first observation for what it is padded with, so that densities and slopes are finite."""
        value = as_numbers("value", value)
        if value.dtype == torch.bool or not (value.is_floating_point() or self.emission.support.is_discrete):
            value = value.to(self.initial_logits.dtype)
        if value.shape[-self.event_dim :] != self.event_shape:
            raise ShapeError(
                f"value has shape {tuple(value.shape)}; give (*batch, {', '.join(map(str, self.event_shape))})"
            )
        _broadcast(value=value.shape[: -self.event_dim], distribution=self.batch_shape)
        if not self._padded:
            return value
        inside = self._inside().reshape(*self.batch_shape, self.duration, *(1,) * len(self.emission.event_shape))
        return torch.where(inside, value, value.narrow(-self.event_dim, 0, 1))

    def _checked_path(self, states: Tensor) -> Tensor:
        states = as_numbers("states", states)
        if states.shape[-1:] != (self.duration,):
            raise ShapeError(f"states has shape {tuple(states.shape)}; give (*sample, *batch, {self.duration})")
        if states.dtype == torch.bool or states.is_floating_point() or states.is_complex():
            raise DataError(f"states are {states.dtype}; give integers from 0 to {self.num_states - 1}")
        _broadcast(states=states.shape[:-1], lengths=self.lengths.shape)
        states = torch.where(self._inside(), states, 0).long()
        bad = ((states < 0) | (states >= self.num_states)).nonzero()
        if len(bad):
            index = tuple(bad[0].tolist())
            raise DataError(f"states{list(index)} is {int(states[index])}; give states from 0 to {self.num_states - 1}")
        return states

    def _inside(self) -> Tensor:
        """Mark the steps within each sequence, ``(*batch, T)``."""
        return torch.arange(self.duration, device=self.lengths.device) < self.lengths.unsqueeze(-1)

    def _potentials(self, value: Tensor, semiring: Semiring) -> tuple[Tensor, Tensor]:
        """Return the log weights of first states, ``(*batch, K)``, and of steps, ``(*batch, T - 1, K, K)``."""
        emitted = self._emitted(value)
        batch = torch.broadcast_shapes(self.batch_shape, emitted.shape[:-2])
        emitted = emitted.expand(*batch, self.duration, self.num_states)
        steps = self.transition_logits.unsqueeze(-3) + emitted[..., 1:, :].unsqueeze(-2)
        if self._padded:
            stay = identity(semiring, steps)
            steps = torch.where(self._inside()[..., 1:, None, None], steps, stay)
        return self.initial_logits + emitted[..., 0, :], steps

    def _possible(self, value: Tensor, semiring: Semiring) -> tuple[Tensor, Tensor]:
        lost = ~self.log_prob(value).isfinite()
        if bool(lost.any()):
            index = tuple(int(i) for i in lost.nonzero()[0])
            raise DataError(
                f"the sequence{f' {index}' if index else ''} has log density {float(self.log_prob(value)[index])}, so "
                "there is no posterior of its states; allow the transitions and emissions that it needs"
            )
        return self._potentials(value, semiring)


def _broadcast(**shapes: Any) -> torch.Size:
    try:
        return torch.broadcast_shapes(*shapes.values())
    except RuntimeError:
        found = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        raise ShapeError(f"batches do not fit: {found}; give shapes that can be broadcast") from None


def _check_logits(name: str, logits: Tensor) -> None:
    bad = (~logits.detach().logsumexp(-1).isfinite()).nonzero()
    if len(bad):
        row = tuple(bad[0].tolist())
        raise SettingsError(
            f"{name}{list(row) if row else ''} is {logits[row].tolist()}; give logits below infinity, and at least one "
            "above minus infinity, for some state must be possible"
        )
    shares = logits.detach().double()
    sums_to_one = torch.isclose(shares.sum(-1), shares.new_ones(()), rtol=0.0, atol=1e-5)
    if bool((shares >= 0).all() & sums_to_one.all()) and not torch.allclose(shares, shares.softmax(-1), atol=1e-5):
        warnings.warn(
            f"the rows of {name} look like probabilities; give their logarithms, {name}.log()",
            BayeskitWarning,
            stacklevel=4,
        )


def _checked_states(initial: Tensor, transition: Tensor, emission: Any, duration: int) -> int:
    states = initial.shape[-1] if initial.dim() else 0
    if states < 1 or transition.shape[-2:] != (states, states):
        raise ShapeError(
            f"initial_logits has shape {tuple(initial.shape)} and transition_logits {tuple(transition.shape)}; give "
            "(*batch, K) and (*batch, K, K)"
        )
    shape = tuple(emission.batch_shape)
    if not shape or shape[-1] != states or (len(shape) > 1 and shape[-2] not in (1, duration)):
        raise ShapeError(
            f"emission has batch shape {shape}; give one that ends in {states}, the number of states, after "
            f"{duration} or 1, the number of steps, where it has more dimensions"
        )
    return states
