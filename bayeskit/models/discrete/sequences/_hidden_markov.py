"""Hidden Markov models with marginalized states: distribution, Pyro model, and exact evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions import constraints as pyro_constraints
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import constraints

from bayeskit.errors import BayeskitWarning, DataError, SettingsError, ShapeError, UnknownNameError
from bayeskit.extend import (
    Draws,
    as_numbers,
    new_generator,
    process_state,
    real_number,
    unclamped,
    warn_user,
    whole_number,
)
from bayeskit.extend import draw_values as draw_from
from bayeskit.models.discrete._inputs import as_real, digits_of, log_dirichlet_moment, site_values
from bayeskit.models.discrete.sequences._chains import (
    Expectation,
    LogSum,
    MaxWeight,
    Semiring,
    chain_product,
    draw_categories,
    follow,
    identity,
    path_prefix_sums,
    predecessors,
    suffix_sums,
    surprisal,
)
from bayeskit.models.discrete.sequences._segmentations import checked_lengths

# Hidden Markov models as distributions over sequences, with states marginalized.


class HiddenMarkov(TorchDistribution):  # type: ignore[misc]
    r"""Distribution over sequences :math:`x_1, \dots, x_T` emitted by a Markov chain of hidden states.

    .. math::
        p(x) = \sum_{z_1, \dots, z_T} \pi_{z_1} \prod_{t=2}^T A_{z_{t-1} z_t} \prod_{t=1}^T p(x_t \mid z_t).

    Marginalization, most probable states and draws of states are exact. Sequences of a batch may have different
    lengths; padding is ignored. The first state emits the first observation, unlike in
    ``pyro.distributions.DiscreteHMM``, which makes a transition first. Warns with ``BayeskitWarning`` With validation,
    if logits look like probabilities.

    Parameters
    ----------
    initial_logits : Tensor or array
        Logits of the first state, shape ``(*batch, K)``; ``-inf`` excludes a state (not all).
    transition_logits : Tensor or array
        Logits of the next state, one row per previous state, shape ``(*batch, K, K)``.
    emission : Distribution
        Distribution of one observation in each state, batch shape ``(K,)``, ``(*batch, T, K)`` or ``(*batch, 1, K)``.
        Zero probabilities are kept (torch clamps them).
    duration : int
        Number of steps ``T``, including padding.
    lengths : Tensor or array of int, optional
        Shape ``(*batch)``, values 1 to ``T``; default ``T``.
    parallel : bool, default True
        Marginalize in ``log2(T)`` rounds of matrix products, cost :math:`T K^3`. Otherwise use ``T`` sequential steps,
        cost :math:`T K^2`, faster with dozens of states.
    validate_args : bool, optional
        Check parameters and values.

    Raises
    ------
    ShapeError
        If logits and emission differ in the number of states, or batch shapes do not broadcast.
    DataError
        If a length is not a whole number from 1 to ``T``.
    SettingsError
        If ``duration`` is less than 1. With validation, if logits are NaN or ``+inf``, or exclude every state.

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
        """Support of the emission, at every step."""
        return constraints.independent(self.emission.support, self.event_dim - len(self.emission.event_shape))

    def expand(self, batch_shape: Any, _instance: Any = None) -> HiddenMarkov:
        """Return the distribution expanded to another batch shape."""
        new = self._get_checked_instance(HiddenMarkov, _instance)
        vars(new).update(vars(self), lengths=self.lengths.expand(batch_shape))
        super(HiddenMarkov, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the marginal log density of sequences: ``(*batch, T, *event)`` to ``(*batch)``."""
        value = self._filled(value)
        if self._validate_args:
            self._validate_sample(value)
        start, steps = self._potentials(value, LogSum())
        if self.parallel:
            ends = LogSum().sum(start.unsqueeze(-1) + chain_product(LogSum(), steps), -2)
        else:
            ends = path_prefix_sums(LogSum(), start, steps)[..., -1, :]
        return LogSum().sum(ends, -1)

    def state_probabilities(self, value: Tensor) -> Tensor:
        """Return smoothed state probabilities: ``(*batch, T, *event)`` to ``(*batch, T, K)``, zero beyond the length.

        This and later methods raise ``DataError`` if a sequence has probability zero.
        """
        start, steps = self._possible(value, LogSum())
        joint = path_prefix_sums(LogSum(), start, steps, rescale=True) + suffix_sums(LogSum(), steps, rescale=True)
        return torch.where(self._inside().unsqueeze(-1), joint.softmax(-1), 0.0)

    def most_probable_states(self, value: Tensor) -> Tensor:
        """Return the most probable state sequence (Viterbi), int64, ``(*batch, T)``; -1 beyond the length."""
        return self._backtracked(value, MaxWeight(), lambda logits: logits.argmax(-1))

    def sample_states(self, value: Tensor, num_samples: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw state sequences given observations ``(*batch, T, *event)``.

        Returns ``(num_samples, *batch, T)``, int; -1 beyond the length. Raises ``SettingsError`` if ``num_samples`` is
        not a positive integer.
        """
        num_samples = whole_number("num_samples", num_samples, least=1)
        generator = new_generator(seed, self.lengths.device, stream="hidden_states")
        return self._backtracked(value, LogSum(), lambda logits: draw_categories(logits, num_samples, generator))

    def _backtracked(self, value: Tensor, semiring: Semiring, choose: Callable[[Tensor], Tensor]) -> Tensor:
        """Choose states from the last to the first, ``(*sample, *batch, T)``, from logits in the last dimension."""
        start, steps = self._possible(value, semiring)
        with torch.no_grad():
            sums = path_prefix_sums(semiring, start, steps, rescale=True)
            last = choose(sums[..., -1, :])
            states = follow(choose(predecessors(sums, steps)), last)
        return torch.where(self._inside(), states, -1)

    def state_entropy(self, value: Tensor) -> Tensor:
        """Return the posterior entropy of the state sequence in nats, ``(*batch)``, differentiable."""
        start, steps = self._possible(value, LogSum())
        semiring = Expectation()
        pairs = chain_product(semiring, semiring.elements(steps, surprisal(steps)))
        first = semiring.elements(start, surprisal(start))
        log_normalizer, mean = semiring.sum(semiring.sum(semiring.product(first.unsqueeze(-1), pairs), -2), -1)
        return log_normalizer + mean

    def log_joint(self, states: Tensor, value: Tensor) -> Tensor:
        """Return the joint log density of states and observations, ``(*sample, *batch)``.

        ``states``: ``(*sample, *batch, T)``; values beyond the length of a sequence are ignored. ``value``: ``(*batch,
        T, *event)``. Raises ``ShapeError`` if the number of steps is not ``T``, or batch shapes do not broadcast;
        ``DataError`` if a state is not an integer from 0 to ``K - 1``.
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
        """Return every state sequence with its joint log density; brute-force reference for small cases.

        ``value``: ``(*batch, T, *event)``, all of full length. ``limit``: maximum number of state sequences. Raises
        ``SettingsError`` if there are more than ``limit`` state sequences, or the lengths differ.

        Returns
        -------
        states : Tensor of int
            ``(K**T, T)``.
        log_joint : Tensor
            ``(K**T, *batch)``.
        """
        number = self.num_states**self.duration
        if number > limit:
            raise SettingsError(
                f"there are {self.num_states}**{self.duration} = {number} sequences of states, which exceed "
                f"limit={limit}; use log_prob, which is also exact"
            )
        if self._padded and bool((self.lengths < self.duration).any()):
            raise SettingsError("sequences have different lengths; enumerate sequences of equal length")
        states = digits_of(number, self.num_states, self.duration, self.lengths.device).flip(-1)
        shaped = states.reshape(number, *(1,) * len(self.batch_shape), self.duration)
        return states, self.log_joint(shaped, value)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw sequences ``(*sample, *batch, T, *event)``; all ``T`` steps are drawn regardless of ``lengths``."""
        return self.sample_with_states(sample_shape)[1]

    def sample_with_states(self, sample_shape: Any = ()) -> tuple[Tensor, Tensor]:
        """Draw states ``(*sample, *batch, T)`` and sequences ``(*sample, *batch, T, *event)`` from torch's stream."""
        shape = (*sample_shape, *self.batch_shape)
        with torch.no_grad():
            first = torch.distributions.Categorical(logits=self.initial_logits).expand(self.batch_shape)
            chain = [first.sample(sample_shape)]
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
        # Insert zeros last, to keep the gradients of all other probabilities finite.
        exact = unclamped(self.emission).log_prob(value)
        return emitted.masked_fill(exact.detach() == -math.inf, -math.inf)

    def _filled(self, value: Tensor) -> Tensor:
        """Replace padding by the sequence's first observation, so that densities and gradients are finite."""
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
                "its states have no posterior; allow the necessary transitions and emissions"
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
            "above minus infinity, because some state must be possible"
        )
    shares = logits.detach().double()
    sums_to_one = torch.isclose(shares.sum(-1), shares.new_ones(()), rtol=0.0, atol=1e-5)
    if bool((shares >= 0).all() & sums_to_one.all()) and not torch.allclose(shares, shares.softmax(-1), atol=1e-5):
        warn_user(f"the rows of {name} look like probabilities; give their logarithms, {name}.log()", BayeskitWarning)


def _checked_states(initial: Tensor, transition: Tensor, emission: Any, duration: int) -> int:
    states = initial.shape[-1] if initial.dim() else 0
    if states < 1 or transition.shape[-2:] != (states, states):
        raise ShapeError(
            f"initial_logits has shape {tuple(initial.shape)} and transition_logits {tuple(transition.shape)}; give "
            "shapes (*batch, K) and (*batch, K, K)"
        )
    shape = tuple(emission.batch_shape)
    if not shape or shape[-1] != states or (len(shape) > 1 and shape[-2] not in (1, duration)):
        raise ShapeError(
            f"emission has batch shape {shape}; its last dimension must be {states}, the number of states, and the "
            f"dimension before it, if any, {duration} (the number of steps) or 1"
        )
    return states


# A Pyro model: a hidden Markov model with priors on its parameters.


class Emission(Protocol):
    """Emission part of the Pyro model: samples the emission parameters from their priors."""

    def __call__(self, num_states: int, like: Tensor) -> Any:
        """Draw parameters (dtype and device of ``like``); return the emission, batch shape ``(num_states,)``."""


class OrderedNormal(TorchDistribution):  # type: ignore[misc]
    """Distribution of ``K`` independent normal variables, in ascending order.

    It removes label switching: the evidence equals that of the unordered model, and one of the ``K!`` symmetric modes
    remains.

    Parameters
    ----------
    location, scale : Tensor
        Mean and standard deviation of each variable before sorting, shape ``(*batch)``.
    size : int
        ``K``, at least 1.
    validate_args : bool, optional
        Check parameters and values.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import OrderedNormal
    >>> OrderedNormal(torch.tensor(0.0), torch.tensor(1.0), 3).log_prob(torch.tensor([-1.0, 0.0, 1.0]))
    tensor(-1.9651)
    """

    arg_constraints = {  # noqa: RUF012  as in all distributions of torch
        "location": pyro_constraints.real,
        "scale": pyro_constraints.positive,
    }
    support = pyro_constraints.ordered_vector

    def __init__(self, location: Tensor, scale: Tensor, size: int, validate_args: bool | None = None) -> None:
        size = whole_number("size", size, least=1)
        self.location, self.scale = torch.broadcast_tensors(location, scale)
        super().__init__(self.scale.shape, torch.Size([size]), validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> OrderedNormal:
        """Return the distribution expanded to another batch shape."""
        location, scale = self.location.expand(batch_shape), self.scale.expand(batch_shape)
        return OrderedNormal(location, scale, self.event_shape[0], self._validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, ``K!`` times the unordered density: ``(*batch, K)`` to ``(*batch)``."""
        if self._validate_args:
            self._validate_sample(value)
        normal = torch.distributions.Normal(self.location[..., None], self.scale[..., None], validate_args=False)
        return normal.log_prob(value).sum(-1) + math.lgamma(value.shape[-1] + 1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw ascending vectors, ``(*sample, *batch, K)``."""
        shape = self._extended_shape(torch.Size(sample_shape))
        with torch.no_grad():
            drawn = torch.normal(self.location[..., None].expand(shape), self.scale[..., None].expand(shape))
        return drawn.sort().values


@dataclass(frozen=True)
class GaussianEmission:
    """Normal emission with a mean and a scale per state.

    Means (site ``"mean"``) and log scales (site ``"log_scale"``) have independent normal priors. Sorting the states
    removes label switching and does not change the evidence. Sort by the parameter that separates the states; otherwise
    several modes remain. Raises ``SettingsError`` if ``mean_scale``, ``scale`` or ``scale_spread`` is not positive and
    finite, or ``order`` is invalid.

    Parameters
    ----------
    mean, mean_scale : float
        Prior mean and standard deviation of a state's mean.
    scale, scale_spread : float
        Prior median of a state's scale, and prior standard deviation of its logarithm.
    order : {"mean", "scale", "none"}
        Parameter by which the states are sorted.
    """

    mean: float = 0.0
    mean_scale: float = 1.0
    scale: float = 1.0
    scale_spread: float = 1.0
    order: Literal["mean", "scale", "none"] = "mean"

    def __post_init__(self) -> None:
        real_number("mean", self.mean, "(-inf, inf)")
        for name in ("mean_scale", "scale", "scale_spread"):
            real_number(name, getattr(self, name), "(0, inf)")
        if self.order not in ("mean", "scale", "none"):
            raise SettingsError(f"order must be 'mean', 'scale' or 'none', not {self.order!r}")

    def __call__(self, num_states: int, like: Tensor) -> dist.Normal:
        """Draw means and scales."""
        mean = self._numbers(num_states, like, self.mean, self.mean_scale, self.order == "mean")
        log_scale = self._numbers(num_states, like, math.log(self.scale), self.scale_spread, self.order == "scale")
        return dist.Normal(pyro.sample("mean", mean), pyro.sample("log_scale", log_scale).exp(), validate_args=False)

    def _numbers(self, size: int, like: Tensor, location: float, scale: float, ordered: bool) -> TorchDistribution:
        if ordered:
            return OrderedNormal(like.new_tensor(location), like.new_tensor(scale), size)
        return dist.Normal(like.new_full((size,), location), like.new_tensor(scale)).to_event(1)


@dataclass(frozen=True)
class CategoricalEmission:
    """Categorical emission with Dirichlet-distributed probabilities per state (site ``"emission"``).

    States are exchangeable: the posterior has symmetric modes, and the evidence includes all of them. Raises
    ``SettingsError`` if there are fewer than two categories, or the concentration is not positive and finite.

    Parameters
    ----------
    num_categories : int
    concentration : float, default 1
        Dirichlet concentration.
    """

    num_categories: int
    concentration: float = 1.0

    def __post_init__(self) -> None:
        whole_number("num_categories", self.num_categories, least=2)
        real_number("concentration", self.concentration, "(0, inf)")

    def __call__(self, num_states: int, like: Tensor) -> dist.Categorical:
        """Draw the probabilities of categories."""
        concentration = like.new_full((num_states, self.num_categories), self.concentration)
        probabilities = pyro.sample("emission", dist.Dirichlet(concentration).to_event(1))
        return dist.Categorical(logits=probabilities.log(), validate_args=False)


class _Given(Messenger):
    """Messenger that sets every latent site from a mapping; raises UnknownNameError for a missing site."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.sites = values, list[str]()

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        self.sites.append(name)
        if msg["is_observed"] or site_is_subsample(msg):
            return
        if name not in self.values:
            raise UnknownNameError(f"parameters lack site {name!r}; there are: {', '.join(self.values) or 'none'}")
        msg["value"] = self.values[name]

    def check(self) -> None:
        """Raise an error that names the first value without a site."""
        for name in self.values:
            if name not in self.sites:
                raise UnknownNameError(f"the model has no site {name!r}; its sites are: {', '.join(self.sites)}")


def _sequences(observations: Tensor) -> Tensor:
    observations = as_numbers("observations", observations)
    if observations.dim() < 1 or not observations.numel():
        raise ShapeError(
            f"observations has shape {tuple(observations.shape)}; give (sequences, T, *event) or (T,), without zeros"
        )
    return observations.unsqueeze(0) if observations.dim() == 1 else observations


def _batched(values: Mapping[str, Tensor], batch: torch.Size, ones: tuple[int, ...]) -> dict[str, Tensor]:
    """Insert dimensions of size one after the batch dimensions, for the dimensions of the observations."""
    for name, value in values.items():
        if value.shape[: len(batch)] != batch:
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)}, initial {tuple(values['initial'].shape)}; give the values of "
                "all sites for the same draws"
            )
    return {name: value.reshape(*batch, *ones, *value.shape[len(batch) :]) for name, value in values.items()}


class HiddenMarkovModel:
    r"""Pyro model of sequences with a hidden Markov model, states marginalized.

    The initial probabilities (site ``"initial"``) and the rows of the transition matrix (site ``"transition"``) have
    Dirichlet priors; ``emission`` samples its own parameters. The sequences are the observed site ``"observations"``.
    Pass the model to :meth:`bayeskit.Target.from_pyro`. :meth:`state_probabilities` averages over posterior draws;
    :meth:`distribution` returns the :class:`HiddenMarkov` distribution given parameter values.

    Raises ``SettingsError`` if there are fewer than two states, ``emission`` is invalid, a concentration is not
    positive and finite, or ``stay`` is negative.

    Parameters
    ----------
    num_states : int
    emission : Emission
        :class:`GaussianEmission`, :class:`CategoricalEmission`, or a function with the same signature.
    initial_concentration, transition_concentration : float, default 1
        Dirichlet concentrations.
    stay : float, default 0
        Added to the concentration of self-transitions.
    parallel : bool, default True
        As in :class:`HiddenMarkov`.

    References
    ----------
    Scott, S. L. (2002). Bayesian methods for hidden Markov models: recursive computing in the 21st century. JASA 97,
    337-351.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> from bayeskit.models.discrete.sequences import GaussianEmission, HiddenMarkovModel
    >>> model = HiddenMarkovModel(2, GaussianEmission())
    >>> x = torch.tensor([[-1.2, -0.7, 0.9, 1.4], [0.8, 0.5, 0.0, 0.0]], dtype=torch.float64)
    >>> target = bk.Target.from_pyro(model, x, torch.tensor([4, 2]))
    >>> target.dim, [site.name for site in target.sites]
    (7, ['initial', 'transition', 'mean', 'log_scale'])
    >>> model.state_probabilities(target.constrain(target.sample_prior(50)), x, torch.tensor([4, 2])).shape
    torch.Size([2, 4, 2])
    """

    def __init__(
        self,
        num_states: int,
        emission: Emission,
        *,
        initial_concentration: float = 1.0,
        transition_concentration: float = 1.0,
        stay: float = 0.0,
        parallel: bool = True,
    ) -> None:
        self.num_states = whole_number("num_states", num_states, least=2)
        if not callable(emission) or isinstance(emission, (type, torch.distributions.Distribution)):
            raise SettingsError(
                f"emission is {emission!r:.80}; give GaussianEmission(), CategoricalEmission(num_categories=...), or a "
                "function that draws the parameters and returns a distribution"
            )
        self.emission, self.parallel = emission, parallel
        self.initial_concentration = real_number("initial_concentration", initial_concentration, "(0, inf)")
        self.transition_concentration = real_number("transition_concentration", transition_concentration, "(0, inf)")
        self.stay = real_number("stay", stay, "[0, inf)")

    def __repr__(self) -> str:
        emission = getattr(self.emission, "__name__", None) or repr(self.emission)
        return f"HiddenMarkovModel({self.num_states} states, {emission}, stay={self.stay:g})"

    def __call__(self, observations: Tensor, lengths: Tensor | None = None) -> None:
        """Draw the parameters and observe sequences ``(sequences, T, *event)``, or ``(T,)`` of numbers or categories.

        Sequences shorter than ``T``, by ``lengths (sequences,)``, are padded with any value in the support.
        """
        observations = _sequences(observations)
        hmm = self._given_parameters(*self._draw(observations), observations, lengths)
        with pyro.plate("sequences", len(observations)):
            pyro.sample("observations", hmm, obs=observations)

    def distribution(
        self, parameters: Draws | Mapping[str, Tensor], observations: Tensor, lengths: Tensor | None = None
    ) -> HiddenMarkov:
        """Return the distribution of sequences given parameter values.

        ``parameters`` (Draws or mapping of str to tensor): draws, or the sites of the model, ``{site: (*batch,
        *shape)}``, as ``target.constrain`` returns them. ``observations``, ``lengths``: arguments of the model; only
        their shapes are used. Raises ``UnknownNameError`` if a site is missing or unknown; ``ShapeError`` if sites have
        different batch shapes.

        Returns
        -------
        HiddenMarkov
            Batch shape ``(*batch)`` for one sequence ``(T,)``; for several sequences ``(*batch, 1)`` or, with
            ``lengths``, ``(*batch, sequences)``.
        """
        values, several = site_values(parameters), as_numbers("observations", observations).dim() > 1
        observations = _sequences(observations)
        batch = values["initial"].shape[:-1] if "initial" in values else torch.Size()
        if batch:
            values = _batched(values, batch, (1, 1) if several else (1,))
        with process_state(), pyro.poutine.block(), _Given(values) as given:
            initial, transition, emission = self._draw(observations)
        given.check()
        if batch:  # drop the step dimension, which only the emission has
            initial, transition = initial.squeeze(-2), transition.squeeze(-3)
        return self._given_parameters(initial, transition, emission, observations, lengths)

    def state_probabilities(
        self, parameters: Draws | Mapping[str, Tensor], observations: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Return the smoothed state probabilities, averaged over parameter values: ``(sequences, T, K)``.

        Arguments and errors as in :meth:`distribution`; one sequence ``(T,)`` gives ``(T, K)``. The average is
        meaningful only if states have a common labelling across draws, e.g. with sorted states. Raises ``DataError`` if
        a sequence has probability zero.
        """
        observations = as_numbers("observations", observations)
        sequences = _sequences(observations)
        probabilities = self.distribution(parameters, sequences, lengths).state_probabilities(sequences)
        mean = probabilities.reshape(-1, *sequences.shape[:2], self.num_states).mean(0)
        return mean[0] if observations.dim() == 1 else mean

    def _given_parameters(
        self, initial: Tensor, transition: Tensor, emission: Any, observations: Tensor, lengths: Tensor | None
    ) -> HiddenMarkov:
        duration = observations.shape[1]
        return HiddenMarkov(initial.log(), transition.log(), emission, duration, lengths, parallel=self.parallel)

    def _draw(self, observations: Tensor) -> tuple[Tensor, Tensor, Any]:
        like = observations if observations.is_floating_point() else torch.empty((), device=observations.device)
        rows = torch.full_like(like.new_empty(self.num_states, self.num_states), self.transition_concentration)
        rows = rows + self.stay * torch.eye(self.num_states, dtype=rows.dtype, device=rows.device)
        initial = pyro.sample("initial", dist.Dirichlet(torch.full_like(rows[0], self.initial_concentration)))
        transition = pyro.sample("transition", dist.Dirichlet(rows).to_event(1))
        return initial, transition, self.emission(self.num_states, like)


# Exact evidence of a categorical hidden Markov model by enumeration of the state sequences.


def categorical_log_evidence(model: HiddenMarkovModel, observations: Tensor, limit: int = 2**20) -> float:
    """Return the exact log evidence of a few short categorical sequences under a :class:`HiddenMarkovModel`.

    State sequences are enumerated; given the states, the parameters are integrated out by conjugacy.

    Parameters
    ----------
    model : HiddenMarkovModel
        With :class:`CategoricalEmission`.
    observations : Tensor or array of int
        Shape ``(sequences, T)`` or ``(T,)``.
    limit : int, default 2**20
        Maximum number of joint state sequences.

    Raises
    ------
    SettingsError
        If the emission is not categorical, or there are more than ``limit`` joint state sequences.
    ShapeError
        If ``observations`` is not one- or two-dimensional.
    DataError
        If an observation is not an integer from 0 to ``num_categories - 1``.

    References
    ----------
    Minka, T. (2000). Estimating a Dirichlet distribution. Technical report, MIT. (The integral over probabilities.)

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import (
    ...     CategoricalEmission, HiddenMarkovModel, categorical_log_evidence)
    >>> model = HiddenMarkovModel(2, CategoricalEmission(2))
    >>> round(categorical_log_evidence(model, torch.tensor([0, 0, 1])), 6)
    -2.330756
    """
    emission = model.emission
    if not isinstance(emission, CategoricalEmission):
        raise SettingsError(f"the emission is {emission!r}; exact evidence requires CategoricalEmission")
    observations = as_numbers("observations", observations)
    observations = observations.unsqueeze(0) if observations.dim() == 1 else observations
    if observations.dim() != 2 or not observations.numel():
        raise ShapeError(f"observations has shape {tuple(observations.shape)}; give (sequences, T) or (T,)")
    if not bool(torch.isin(observations, torch.arange(emission.num_categories, device=observations.device)).all()):
        raise DataError(f"observations must be categories, whole numbers from 0 to {emission.num_categories - 1}")
    states, size = model.num_states, observations.numel()
    if states**size > whole_number("limit", limit, least=1):
        raise SettingsError(
            f"there are {states}**{size} = {states**size} sequences of states, which exceed limit={limit}; give "
            "shorter sequences, or estimate the evidence with bayeskit.inference.evidence"
        )
    paths = digits_of(states**size, states, size).reshape(-1, *observations.shape)
    rows = torch.full((states, states), model.transition_concentration, dtype=torch.float64)
    rows = rows + model.stay * torch.eye(states, dtype=torch.float64)
    first = torch.full((states,), model.initial_concentration, dtype=torch.float64)
    seen = torch.full((states, emission.num_categories), emission.concentration, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(paths, states).double()
    categories = torch.nn.functional.one_hot(observations.cpu().long(), emission.num_categories).double()
    moved = torch.einsum("psti,pstj->pij", one_hot[:, :, :-1], one_hot[:, :, 1:])
    emitted = torch.einsum("psti,stc->pic", one_hot, categories)
    log_joint = log_dirichlet_moment(one_hot[:, :, 0].sum(1), first)
    log_joint = log_joint + log_dirichlet_moment(moved, rows).sum(-1) + log_dirichlet_moment(emitted, seen).sum(-1)
    return float(log_joint.logsumexp(0))
