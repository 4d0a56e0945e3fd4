"""A Pyro model of sequences with hidden states: priors over the parameters of a hidden Markov model."""

from __future__ import annotations

import math
from collections.abc import Mapping
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

from bayeskit._inputs import as_numbers
from bayeskit._settings import real_number, whole_number
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError, ShapeError, UnknownNameError
from bayeskit.models.discrete.inputs import site_values
from bayeskit.models.discrete.sequences.hidden_markov import HiddenMarkov

POSITIVE = (0.0, math.inf)


class Emission(Protocol):
    """What hidden states emit: a part of a Pyro model, with priors of its own."""

    def __call__(self, num_states: int, like: Tensor) -> Any:
        """Draw the parameters and return the distribution of one observation, batch shape ``(num_states,)``.

        New tensors take the dtype and device of ``like``.
        """


class OrderedNormal(TorchDistribution):  # type: ignore[misc]
    """Distribution of ``K`` independent normal numbers, sorted.

    In a model whose components could swap names it names them: the prior and the evidence of the unordered model stay
    as they are, and only one of its ``K!`` equal modes is left.

    Parameters
    ----------
    location, scale : Tensor
        Mean and standard deviation of each number before sorting, shape ``(*batch)``.
    size : int
        ``K``, at least 1.
    validate_args : bool, optional
        Whether to check parameters and values, as in all distributions of torch.

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
        """Return the distribution with a larger batch shape."""
        new = self._get_checked_instance(OrderedNormal, _instance)
        new.location, new.scale = self.location.expand(batch_shape), self.scale.expand(batch_shape)
        super(OrderedNormal, new).__init__(torch.Size(batch_shape), self.event_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density: ``K!`` times that of the numbers before sorting; ``(*batch, K)`` to ``(*batch)``."""
        if self._validate_args:
            self._validate_sample(value)
        normal = torch.distributions.Normal(self.location[..., None], self.scale[..., None], validate_args=False)
        return normal.log_prob(value).sum(-1) + math.lgamma(value.shape[-1] + 1)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw sorted numbers, ``(*sample, *batch, K)``."""
        shape = self._extended_shape(torch.Size(sample_shape))
        with torch.no_grad():
            return (
                torch.normal(self.location[..., None].expand(shape), self.scale[..., None].expand(shape)).sort().values
            )


@dataclass(frozen=True)
class GaussianEmission:
    """Each state emits from a normal distribution with mean and scale of its own.

    Means (site ``"mean"``) and logarithms of scales (site ``"log_scale"``) are independent and normal. Sorting the
    states by one of them gives each a name, and leaves the evidence as it is; sort by what tells them apart, because
    otherwise several modes remain.

    Parameters
    ----------
    mean, mean_scale : float
        Mean and standard deviation of a state's mean.
    scale, scale_spread : float
        Median of a state's scale, and standard deviation of its logarithm.
    order : {"mean", "scale", "none"}
        What the states are sorted by.

    Raises
    ------
    SettingsError
        If a number but ``mean`` is not above zero and finite, or the order is another.
    """

    mean: float = 0.0
    mean_scale: float = 1.0
    scale: float = 1.0
    scale_spread: float = 1.0
    order: Literal["mean", "scale", "none"] = "mean"

    def __post_init__(self) -> None:
        real_number("mean", self.mean, (-math.inf, math.inf))
        for name in ("mean_scale", "scale", "scale_spread"):
            real_number(name, getattr(self, name), POSITIVE)
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
    """Each state emits categories with probabilities of its own, Dirichlet distributed (site ``"emission"``).

    States can swap names: the posterior has equal modes, and the evidence counts all of them.

    Parameters
    ----------
    num_categories : int
    concentration : float, default 1
        Of the Dirichlet distribution.

    Raises
    ------
    SettingsError
        If there are fewer than two categories, or the concentration is not above zero and finite.
    """

    num_categories: int
    concentration: float = 1.0

    def __post_init__(self) -> None:
        whole_number("num_categories", self.num_categories, least=2)
        real_number("concentration", self.concentration, POSITIVE)

    def __call__(self, num_states: int, like: Tensor) -> dist.Categorical:
        """Draw the probabilities of categories."""
        concentration = like.new_full((num_states, self.num_categories), self.concentration)
        probabilities = pyro.sample("emission", dist.Dirichlet(concentration).to_event(1))
        return dist.Categorical(logits=probabilities.log(), validate_args=False)


class _Given(Messenger):
    """Take the value of every latent site from a mapping, and refuse to draw one."""

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
    """Put dimensions of one after those of a batch, for the dimensions that observations have."""
    for name, value in values.items():
        if value.shape[: len(batch)] != batch:
            raise ShapeError(
                f"{name} has shape {tuple(value.shape)}, initial {tuple(values['initial'].shape)}; give the values of "
                "all sites for the same draws"
            )
    return {name: value.reshape(*batch, *ones, *value.shape[len(batch) :]) for name, value in values.items()}


class HiddenMarkovModel:
    r"""Sequences with hidden states: a Pyro model whose states are summed out.

    The probabilities of the first state (site ``"initial"``) and each row of those of the next state (site
    ``"transition"``) are Dirichlet distributed, the emission has priors of its own, and the sequences are the observed
    site ``"observations"``. Give it to :meth:`bayeskit.Target.from_pyro`; :meth:`state_probabilities` then averages
    over the draws, and :meth:`distribution` answers all questions about states for given values of the parameters.

    Parameters
    ----------
    num_states : int
    emission : Emission
        :class:`GaussianEmission`, :class:`CategoricalEmission`, or a function like them.
    initial_concentration, transition_concentration : float, default 1
        Of the Dirichlet distributions.
    stay : float, default 0
        Added to the concentration of staying in a state.
    parallel : bool, default True
        As in :class:`HiddenMarkov`.

    Raises
    ------
    SettingsError
        If there are fewer than two states, or the emission is no emission, or a concentration is not above zero and
        finite, or ``stay`` is negative.

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
        self.initial_concentration = real_number("initial_concentration", initial_concentration, POSITIVE)
        self.transition_concentration = real_number("transition_concentration", transition_concentration, POSITIVE)
        self.stay = real_number("stay", stay, (-math.inf, math.inf))
        if self.stay < 0:
            raise SettingsError(f"stay must be at least 0, not {self.stay:g}")

    def __repr__(self) -> str:
        emission = getattr(self.emission, "__name__", None) or repr(self.emission)
        return f"HiddenMarkovModel({self.num_states} states, {emission}, stay={self.stay:g})"

    def __call__(self, observations: Tensor, lengths: Tensor | None = None) -> None:
        """Draw the parameters and observe sequences.

        Parameters
        ----------
        observations : Tensor or array
            Shape ``(sequences, T, *event)``, or ``(T,)`` for one sequence of numbers or categories. Shorter sequences
            are padded with any value in the support. With categories, parameters have torch's default dtype.
        lengths : Tensor or array of int, optional
            Shape ``(sequences,)``.

        Raises
        ------
        ShapeError
            If ``observations`` is not a sequence or empty, or ``lengths`` does not fit.
        """
        observations = _sequences(observations)
        hmm = self._given_parameters(*self._draw(observations), observations, lengths)
        with pyro.plate("sequences", len(observations)):
            pyro.sample("observations", hmm, obs=observations)

    def distribution(
        self, parameters: Draws | Mapping[str, Tensor], observations: Tensor, lengths: Tensor | None = None
    ) -> HiddenMarkov:
        """Return the distribution of sequences for given values of the parameters.

        Parameters
        ----------
        parameters : Draws or mapping of str to Tensor
            Draws, or the sites of the model, ``{site: (*batch, *shape)}``, as ``target.constrain`` returns them.
        observations, lengths
            As the model takes them; values do not matter, only shapes.

        Returns
        -------
        HiddenMarkov
            For a batch of values, that of one sequence ``(T,)`` has batch shape ``(*batch)``, and that of several
            sequences ``(*batch, 1)`` or, with ``lengths``, ``(*batch, sequences)``: it takes all of them at once.

        Raises
        ------
        UnknownNameError
            If a site of the model is missing, or a name is none of them.
        ShapeError
            If sites have values for different draws.
        """
        values, several = site_values(parameters), as_numbers("observations", observations).dim() > 1
        observations = _sequences(observations)
        batch = values["initial"].shape[:-1] if "initial" in values else torch.Size()
        if batch:
            values = _batched(values, batch, (1, 1) if several else (1,))
        with pyro.poutine.block(), _Given(values) as given:
            initial, transition, emission = self._draw(observations)
        given.check()
        if batch:  # the last dimension of one is that of the steps, which only the emission has
            initial, transition = initial.squeeze(-2), transition.squeeze(-3)
        return self._given_parameters(initial, transition, emission, observations, lengths)

    def state_probabilities(
        self, parameters: Draws | Mapping[str, Tensor], observations: Tensor, lengths: Tensor | None = None
    ) -> Tensor:
        """Return the probability of each state at each step, averaged over values of the parameters.

        Averages mean something only where states keep their names from draw to draw, as sorted ones do.

        Parameters
        ----------
        parameters : Draws or mapping of str to Tensor
            Draws, or the sites of the model, ``{site: (*batch, *shape)}``.
        observations, lengths
            As the model takes them.

        Returns
        -------
        Tensor
            ``(T, K)`` of one sequence ``(T,)``, and ``(sequences, T, K)`` of several.

        Raises
        ------
        UnknownNameError
            If a site of the model is missing, or a name is none of them.
        ShapeError
            If sites have values for different draws, or ``lengths`` does not fit.
        DataError
            If a sequence has probability zero.
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
