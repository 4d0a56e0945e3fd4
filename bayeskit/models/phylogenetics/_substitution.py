"""Substitution models: continuous-time Markov chains of the states of a site along an edge."""

from __future__ import annotations

import copy
import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pyro.distributions import Dirichlet, LogNormal, TorchDistribution
from torch import Tensor

from bayeskit.errors import AlignmentError, SettingsError, ShapeError
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._data_types import DNA, DataType, standard_characters

# Parameters of a model, either fixed or with a prior.

#: A parameter as the user gives it: numbers fix it, a distribution is its prior, None selects the default prior.
Given = float | Sequence[float] | Tensor | TorchDistribution | None


@dataclass(frozen=True)
class Parameter:
    """Shape, domain and default prior of one parameter.

    Attributes
    ----------
    usual_prior : callable
        Returns the default prior, with dtype and device of the tensor given.
    size : int or None
        Length of the vector; None for a scalar.
    upper : float
        Values lie between 0 and this bound, both excluded.

    Examples
    --------
    >>> from pyro.distributions import Exponential
    >>> Parameter(lambda like: Exponential(like.new_ones(()))).checked("GammaRates, shape", 2)
    tensor(2., dtype=torch.float64)
    """

    usual_prior: Callable[[Tensor], TorchDistribution]
    size: int | None = None
    upper: float = math.inf

    @property
    def event_shape(self) -> tuple[int, ...]:
        """Shape of one value, `()` or `(size,)`."""
        return () if self.size is None else (self.size,)

    def checked(self, place: str, given: Given) -> Tensor | TorchDistribution | None:
        """Check a user's value or prior and return it, numbers as a tensor.

        Parameters
        ----------
        place : str
            Name of the parameter in messages.
        given : float, sequence of float, Tensor, TorchDistribution or None
            Values, shape `(*batch, *event_shape)`, or a prior.

        Raises
        ------
        SettingsError
            If values or the support of a prior lie outside the domain, or the prior has another event shape.
        ShapeError
            If values have another shape.
        """
        if given is None:
            return None
        if isinstance(given, torch.distributions.Distribution):
            self._check_prior(place, given)
            return given
        try:
            values = torch.as_tensor(given)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SettingsError(f"{place}: {given!r} is neither numbers nor a prior. {self._remedy}") from error
        if not values.is_floating_point() or not isinstance(given, Tensor):
            # Plain numbers keep all their digits.
            values = torch.as_tensor(given, dtype=torch.float64)
        self.check_shape(place, values)
        if not ((values > 0) & (values < self.upper)).all():
            raise SettingsError(f"{place}: {values.tolist()} does not lie {self._domain}. {self._remedy}")
        return values

    def check_shape(self, place: str, values: Tensor) -> None:
        """Raise if values lack the event shape.

        Raises
        ------
        ShapeError
            If the last dimension is missing or has another size.
        """
        if self.size is not None and (values.dim() == 0 or values.shape[-1] != self.size):
            raise ShapeError(f"{place}: shape {tuple(values.shape)} is not (*batch, {self.size}). {self._remedy}")

    @property
    def _domain(self) -> str:
        return "above 0" if self.upper == math.inf else f"between 0 and {self.upper:g}"

    @property
    def _remedy(self) -> str:
        values = "one number" if self.size is None else f"{self.size} numbers"
        return f"Remedy: give {values} {self._domain}, a prior with this support, or None for the usual prior."

    def _check_prior(self, place: str, prior: TorchDistribution) -> None:
        if prior.batch_shape or tuple(prior.event_shape) != self.event_shape:
            shapes = tuple(prior.batch_shape), tuple(prior.event_shape)
            raise SettingsError(f"{place}: the prior has batch_shape and event_shape {shapes}. {self._remedy}")
        support: Any = prior.support
        for outside in (-1.0, 2.0 * self.upper):
            if math.isfinite(outside) and support.check(torch.full(self.event_shape, outside)).all():
                raise SettingsError(f"{place}: the prior {prior} allows {outside:g}. {self._remedy}")


class Parameterized:
    """Base class of frozen dataclasses with model parameters as fields.

    A subclass lists these fields in `parameters`. Each holds values as a tensor, a prior, or None for the default
    prior.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._substitution import HKY85
    >>> model = HKY85(base_frequencies=[0.4, 0.2, 0.1, 0.3])
    >>> sorted(model.priors(torch.zeros(())))
    ['kappa']
    >>> sorted(model.with_parameters({"kappa": torch.tensor(2.0)}).priors(torch.zeros(())))
    []
    """

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The parameters by field name; most subclasses have the same for all of their objects."""
        return MappingProxyType({})

    def __post_init__(self) -> None:
        """Check the fields that are parameters."""
        for name, parameter in self.parameters.items():
            given = parameter.checked(f"{type(self).__name__}, {name}", getattr(self, name))
            object.__setattr__(self, name, given)

    def priors(self, like: Tensor) -> dict[str, TorchDistribution]:
        """Return the priors of all parameters without a value.

        Parameters
        ----------
        like : Tensor
            Sets dtype and device of the default priors.

        Returns
        -------
        dict of str to TorchDistribution
            By parameter name.
        """
        free = {name: getattr(self, name) for name in self.parameters}
        return {
            name: self.parameters[name].usual_prior(like) if prior is None else prior
            for name, prior in free.items()
            if not isinstance(prior, Tensor)
        }

    def with_parameters(self, values: Mapping[str, Tensor]) -> Self:
        """Return a copy with values for some of the parameters.

        Only shapes are checked, not values, so that the method can be vmapped and traced. Unknown names are ignored.

        Parameters
        ----------
        values : mapping of str to Tensor
            Shapes `(*batch, *event_shape)`.

        Raises
        ------
        ShapeError
            If values lack the event shape of the parameter.
        """
        made = copy.copy(self)
        for name, parameter in self.parameters.items():
            if name in values:
                parameter.check_shape(name, values[name])
                object.__setattr__(made, name, values[name])
        return made

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the parameter values."""
        found = {name: getattr(self, name) for name in self.parameters}
        return torch.broadcast_shapes(
            *(
                values.shape[: values.dim() - len(self.parameters[name].event_shape)]
                for name, values in found.items()
                if isinstance(values, Tensor)
            )
        )

    def _values(self, name: str, like: Tensor) -> Tensor:
        """Return the values of a parameter with the dtype and device of `like`."""
        values = getattr(self, name)
        if not isinstance(values, Tensor):
            model = type(self).__name__
            raise SettingsError(
                f"{model}, {name}: the parameter has a prior but no value. Remedy: give a value, as in "
                f"{model}({name}=...), or use with_parameters."
            )
        return values.to(dtype=like.dtype, device=like.device)


# The interface of substitution models, and shared parts.

#: Stationary frequencies; the default prior is flat, as in MrBayes.
_BASE_FREQUENCIES = Parameter(lambda like: Dirichlet(like.new_ones(4)), size=4)
_TWO_FREQUENCIES = Parameter(lambda like: Dirichlet(like.new_ones(2)), size=2)


class SubstitutionModel(Parameterized, ABC):
    """A time-reversible substitution model over the four bases, or over the states of another type of data.

    The rate matrix is scaled to one expected substitution per site and unit of branch length. Parameters given as
    numbers (with any batch dimensions) are fixed; a `TreeModel` samples those given as a prior or not at all.

    A subclass implements `frequencies`, `rate_matrix` and `transition_matrices`; the likelihood and its derivatives
    follow from these. `data_type` says which data it is for, bases where it does not. A subclass with equal rates may
    set `is_uniform` for a faster likelihood. `ReversibleModel` computes all matrices from exchangeabilities.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics._substitution import JC69, SubstitutionModel
    >>> isinstance(JC69(), SubstitutionModel)
    True
    """

    @property
    def data_type(self) -> DataType:
        """What the sites are, bases by default."""
        return DNA

    @property
    def num_states(self) -> int:
        """Number of states."""
        return self.data_type.num_states

    @property
    def is_uniform(self) -> bool:
        """Whether all substitutions have the same rate, as in the Jukes-Cantor model."""
        return False

    @abstractmethod
    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, states)`, with the dtype and device of `like`."""

    @abstractmethod
    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the instantaneous rate matrix.

        Parameters
        ----------
        like : Tensor
            Sets dtype and device of the result.

        Returns
        -------
        Tensor
            Shape `(*batch, states, states)`; entry `[..., i, j]` is the rate from `i` to `j`; rows sum to zero.
        """

    @abstractmethod
    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Shape `(*batch, edges, states, states)`, with the dtype and device of `branch_lengths`; entry `[..., i, j]`
            is the probability of state `j` at the end given `i` at the start. Branch lengths and parameters broadcast.
        """


def check_data_type(alignment: Alignment, substitution: SubstitutionModel) -> None:
    """Raise if a substitution model is for another type of data than that of an alignment.

    Raises
    ------
    SettingsError
        With both types.

    Examples
    --------
    >>> check_data_type(Alignment.from_sequences({"A": "AACG", "B": "A-RT"}), JC69())
    """
    if not alignment.data_type.fits(substitution.data_type):
        raise SettingsError(
            f"substitution: {type(substitution).__name__} is a model of {substitution.data_type} data, but the data of "
            f"the alignment are {alignment.data_type}. Remedy: choose a model of such data ({_MODELS_OF}), or read the "
            "alignment with the right data_type."
        )


_MODELS_OF = "DNA: GTR; protein: AminoAcidModel; codon: GY94; standard: Mk"


def empirical_frequencies(alignment: Alignment) -> Tensor:
    """Return the relative frequency of each state in an alignment.

    An ambiguity code counts in equal parts for the states that it allows; gaps and unknown states do not count.

    Parameters
    ----------
    alignment : Alignment

    Returns
    -------
    Tensor
        Shape `(states,)`, float64, in the order of `alignment.data_type.states`, for bases A, C, G, T; sums to one.

    Raises
    ------
    AlignmentError
        If a state never occurs.

    Examples
    --------
    >>> empirical_frequencies(Alignment.from_sequences({"A": "AACG", "B": "A-RT"}))
    tensor([0.5000, 0.1429, 0.2143, 0.1429], dtype=torch.float64)
    """
    counts = state_counts(alignment)
    states = alignment.data_type.states
    absent = [state for state, count in zip(states, counts.tolist(), strict=True) if count == 0]
    if absent:
        kind = {"DNA": "base", "protein": "amino acid", "codon": "codon"}.get(alignment.data_type.name, "state")
        raise AlignmentError(
            f"The {kind} {absent[0]} never occurs in the alignment, so its frequency would be zero. Remedy: give "
            "frequencies above zero, or leave them to a prior."
        )
    return counts / counts.sum()


def state_counts(alignment: Alignment) -> Tensor:
    """Return how often each state occurs, `(states,)`, float64; ambiguity codes in equal parts, gaps not at all.

    Examples
    --------
    >>> state_counts(Alignment.from_sequences({"A": "AACG", "B": "A-RT"}))
    tensor([3.5000, 1.0000, 1.5000, 1.0000], dtype=torch.float64)
    """
    num_states = alignment.data_type.num_states
    allowed = ((alignment.patterns.long()[..., None] >> torch.arange(num_states)) & 1).to(torch.float64)
    known = (allowed.sum(-1) < num_states).to(torch.float64) * alignment.weights
    return (known[..., None] * allowed / allowed.sum(-1, keepdim=True)).sum((0, 1))


def _normalised(frequencies: Tensor) -> Tensor:
    """Scale frequencies `(*batch, states)` so that they sum to one."""
    return frequencies / frequencies.sum(-1, keepdim=True)


def _of_pairs(exchangeabilities: Tensor) -> Tensor:
    """Return the symmetric matrix, `(*batch, 4, 4)`, of AC, AG, AT, CG, CT and GT, `(*batch, 6)`."""
    ac, ag, at, cg, ct, gt = exchangeabilities.unbind(-1)
    none = torch.zeros_like(ac)
    pairs = [none, ac, ag, at, ac, none, cg, ct, ag, cg, none, gt, at, ct, gt, none]
    return torch.stack(pairs, -1).reshape(*none.shape, 4, 4)


def _reversible_rate_matrix(exchangeabilities: Tensor, frequencies: Tensor) -> Tensor:
    """Return the rates of a time-reversible model, `(*batch, n, n)`, scaled to one expected change."""
    # `exchangeabilities` (*batch, n, n): symmetric, up to a factor, no diagonal; `frequencies` (*batch, n).
    changes = exchangeabilities * frequencies[..., None, :]
    leaving = changes.sum(-1)
    speed = (frequencies * leaving).sum(-1)[..., None, None]
    return (changes - torch.diag_embed(leaving)) / speed


def _gone(events: Tensor) -> Tensor:
    """Return `1 - exp(-events)` without loss of digits for few expected events."""
    # Compilers may evaluate `expm1` as `exp() - 1`; the hyperbolic tangent keeps the precision.
    half = torch.tanh(0.5 * events)
    return 2.0 * half / (1.0 + half)


# Equal rates between all states: the models of Jukes and Cantor, and of Lewis.


class _EqualRates(SubstitutionModel):
    """All substitutions have the same rate."""

    @property
    def is_uniform(self) -> bool:
        """Always True."""
        return True

    def frequencies(self, like: Tensor) -> Tensor:
        """Return equal frequencies, shape `(states,)`, with the dtype and device of `like`."""
        return like.new_full((self.num_states,), 1.0 / self.num_states)

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the rate matrix, shape `(states, states)`, with the dtype and device of `like`."""
        n = self.num_states
        identity = torch.eye(n, dtype=like.dtype, device=like.device)
        return like.new_full((n, n), 1.0 / (n - 1)) - identity * (n / (n - 1))

    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities, shape `(*batch, edges, states, states)`.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Shape `(*batch, edges, states, states)`, with the dtype and device of `branch_lengths`.
        """
        n = self.num_states
        events = branch_lengths[..., None, None] * (n / (n - 1))
        identity = torch.eye(n, dtype=branch_lengths.dtype, device=branch_lengths.device)
        return torch.exp(-events) * identity + _gone(events) * (1.0 / n)


@dataclass(frozen=True)
class JC69(_EqualRates):
    """The Jukes-Cantor model: equal base frequencies and equal rates.

    References
    ----------
    T. H. Jukes and C. R. Cantor (1969), Evolution of protein molecules, in H. N. Munro (ed.),
    Mammalian Protein Metabolism III, 21-132.

    Examples
    --------
    >>> JC69().transition_matrices(torch.tensor([0.0, 0.1], dtype=torch.float64))[1, 0]
    tensor([0.9064, 0.0312, 0.0312, 0.0312], dtype=torch.float64)
    """


@dataclass(frozen=True)
class Mk(_EqualRates):
    """The model of Lewis for morphological characters: any number of states, equal frequencies and equal rates.

    Characters that are the same in all taxa count as data; `VariableSites(Mk(3))` corrects for their being left out.

    Parameters
    ----------
    states : int, default 2
        Number of states, from 2 to 36.

    Raises
    ------
    SettingsError
        If `states` is not such a number.

    References
    ----------
    P. O. Lewis (2001), A likelihood approach to estimating phylogeny from discrete morphological character data,
    Systematic Biology 50, 913-925.

    Examples
    --------
    >>> Mk(3).transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0]
    tensor([0.9071, 0.0464, 0.0464], dtype=torch.float64)
    """

    states: int = 2

    def __post_init__(self) -> None:
        """Check the number of states."""
        super().__post_init__()
        object.__setattr__(self, "states", standard_characters(self.states).num_states)

    @property
    def data_type(self) -> DataType:
        """Symbols of that many states."""
        return standard_characters(self.states)


# Models with separate rates of transitions and transversions: K80, HKY85 and TN93.

#: Ratio of the rates of transitions and transversions. The default prior is that of BEAST 1 (its wiki, page on
#: parameter priors), BEAST 2 (BEAUti's template `SubstModels.xml`, M=1 and S=1.25 of the logarithm) and torchtree
#: (`cli/evolution.py`): median 2.7, central 95 % interval from 0.23 to 31. It is weakly informative and has little mass
#: near 0 and infinity. MrBayes has a flat prior, Beta(1, 1), of kappa / (1 + kappa) instead.
_KAPPA = Parameter(lambda like: LogNormal(like.new_tensor(1.0), like.new_tensor(1.25)))


class _TwoRates(SubstitutionModel):
    """A model with one rate of transitions, one of transversions, and any base frequencies."""

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the rate matrix, shape `(*batch, 4, 4)`, with the dtype and device of `like`."""
        kappa = self._values("kappa", like)
        one = torch.ones_like(kappa)
        pairs = torch.stack([one, kappa, one, one, kappa, one], -1)
        return _reversible_rate_matrix(_of_pairs(pairs), self.frequencies(like))

    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities, shape `(*batch, edges, 4, 4)`.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Shape `(*batch, edges, 4, 4)`, with the dtype and device of `branch_lengths`.

        Raises
        ------
        SettingsError
            If a parameter has no value.
        """
        # Probabilities of rare substitutions on short branches are small differences: single precision loses them.
        lengths = branch_lengths.double()
        kappa = self._values("kappa", lengths)
        frequencies = self.frequencies(lengths)
        a, c, g, t = frequencies.unbind(-1)
        speed = 0.5 / ((a + g) * (c + t) + kappa * (a * g + c * t))
        return _transitions_by_class(lengths, frequencies, kappa[..., None], speed).to(branch_lengths.dtype)


def _transitions_by_class(lengths: Tensor, frequencies: Tensor, ratios: Tensor, speed: Tensor) -> Tensor:
    """Return transition matrices, `(*batch, edges, 4, 4)`, where transitions have a rate by the class of the bases."""
    # `lengths` (*batch, edges); `frequencies` (*batch, 4); `ratios` (*batch, 1 or 4): of transitions from each base to
    # transversions; `speed` (*batch,): the rate from any base to all of the other class, divided by their frequency.
    a, c, g, t = frequencies.unbind(-1)
    # By base: the frequency of its own class (purines or pyrimidines), of the other class, and of the other base in its
    # class.
    own = torch.stack([a + g, c + t, a + g, c + t], -1)
    other = torch.stack([c + t, a + g, c + t, a + g], -1)
    partner = torch.stack([g, t, a, c], -1)
    between = (speed[..., None] * lengths)[..., None]
    within = between * (other + ratios * own)[..., None, :]
    frequencies, own, other, partner = (vector[..., None, :] for vector in (frequencies, own, other, partner))
    transversions = frequencies * _gone(between)
    transitions = frequencies / own * (_gone(within) - other * _gone(between))
    same = frequencies + (frequencies * other * torch.exp(-between) + partner * torch.exp(-within)) / own
    s, v, k = same.unbind(-1), transversions.unbind(-1), transitions.unbind(-1)
    rows = [
        *(s[0], v[1], k[2], v[3]),
        *(v[0], s[1], v[2], k[3]),
        *(k[0], v[1], s[2], v[3]),
        *(v[0], k[1], v[2], s[3]),
    ]
    return torch.stack(rows, -1).reshape(*s[0].shape, 4, 4)


@dataclass(frozen=True, eq=False)
class K80(_TwoRates):
    """Kimura's two-parameter model: equal base frequencies, different rates of transitions and transversions.

    Parameters
    ----------
    kappa : float, Tensor or TorchDistribution, optional
        Ratio of the rates of transitions (A-G, C-T) and transversions, shape `(*batch,)`, above 0; or its prior, by
        default LogNormal(1, 1.25), as in BEAST 2 (Bouckaert et al., 2019).

    Raises
    ------
    SettingsError
        If `kappa` is not above 0, or its prior is not over one positive number.

    References
    ----------
    M. Kimura (1980), A simple method for estimating evolutionary rates of base substitutions through comparative
    studies of nucleotide sequences, Journal of Molecular Evolution 16, 111-120.

    R. Bouckaert et al. (2019), BEAST 2.5: an advanced software platform for Bayesian evolutionary analysis, PLOS
    Computational Biology 15, e1006650.

    Examples
    --------
    >>> K80(kappa=2.0).transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0]
    tensor([0.9066, 0.0238, 0.0459, 0.0238], dtype=torch.float64)
    """

    kappa: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"kappa": _KAPPA})

    def frequencies(self, like: Tensor) -> Tensor:
        """Return `(1/4, 1/4, 1/4, 1/4)` with the dtype and device of `like`."""
        return like.new_full((4,), 0.25)


@dataclass(frozen=True, eq=False)
class HKY85(_TwoRates):
    """The Hasegawa-Kishino-Yano model: any base frequencies, different rates of transitions and transversions.

    Parameters
    ----------
    kappa : float, Tensor or TorchDistribution, optional
        Ratio of the rates of transitions (A-G, C-T) and transversions, shape `(*batch,)`, above 0; or its prior, by
        default LogNormal(1, 1.25), as in BEAST 2 (Bouckaert et al., 2019).
    base_frequencies : sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies of A, C, G and T, shape `(*batch, 4)`, above 0, scaled to sum to one; or their prior,
        by default Dirichlet(1, 1, 1, 1). `empirical_frequencies` gives those of an alignment.

    Raises
    ------
    SettingsError
        If values, or values in the support of a prior, are not above 0.
    ShapeError
        If there are not four frequencies.

    References
    ----------
    M. Hasegawa, H. Kishino and T. Yano (1985), Dating of the human-ape splitting by a molecular clock of
    mitochondrial DNA, Journal of Molecular Evolution 22, 160-174.

    R. Bouckaert et al. (2019), BEAST 2.5: an advanced software platform for Bayesian evolutionary analysis, PLOS
    Computational Biology 15, e1006650.

    Examples
    --------
    >>> model = HKY85(kappa=2.0, base_frequencies=[0.4, 0.3, 0.2, 0.1])
    >>> model.transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0]
    tensor([0.9193, 0.0309, 0.0395, 0.0103], dtype=torch.float64)
    """

    kappa: Given = None
    base_frequencies: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"kappa": _KAPPA, "base_frequencies": _BASE_FREQUENCIES}
    )

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 4)`, with the dtype and device of `like`."""
        return _normalised(self._values("base_frequencies", like))


@dataclass(frozen=True, eq=False)
class TN93(SubstitutionModel):
    """The Tamura-Nei model: any base frequencies, different rates of both kinds of transitions and of transversions.

    With equal ratios it is HKY85. Transition matrices have a closed form.

    Parameters
    ----------
    kappa_purines : float, Tensor or TorchDistribution, optional
        Ratio of the rates of transitions between purines (A-G) and of transversions, shape `(*batch,)`, above 0; or its
        prior, by default LogNormal(1, 1.25), as in BEAST 2 (Bouckaert et al., 2019).
    kappa_pyrimidines : float, Tensor or TorchDistribution, optional
        The same of transitions between pyrimidines (C-T).
    base_frequencies : sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies of A, C, G and T, shape `(*batch, 4)`, above 0, scaled to sum to one; or their prior,
        by default Dirichlet(1, 1, 1, 1). `empirical_frequencies` gives those of an alignment.

    Raises
    ------
    SettingsError
        If values, or values in the support of a prior, are not above 0.
    ShapeError
        If there are not four frequencies.

    References
    ----------
    K. Tamura and M. Nei (1993), Estimation of the number of nucleotide substitutions in the control region of
    mitochondrial DNA in humans and chimpanzees, Molecular Biology and Evolution 10, 512-526.

    R. Bouckaert et al. (2019), BEAST 2.5: an advanced software platform for Bayesian evolutionary analysis, PLOS
    Computational Biology 15, e1006650.

    Examples
    --------
    >>> model = TN93(kappa_purines=2.0, kappa_pyrimidines=5.0, base_frequencies=[0.4, 0.3, 0.2, 0.1])
    >>> model.transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0]
    tensor([0.9317, 0.0261, 0.0335, 0.0087], dtype=torch.float64)
    """

    kappa_purines: Given = None
    kappa_pyrimidines: Given = None
    base_frequencies: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"kappa_purines": _KAPPA, "kappa_pyrimidines": _KAPPA, "base_frequencies": _BASE_FREQUENCIES}
    )

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 4)`, with the dtype and device of `like`."""
        return _normalised(self._values("base_frequencies", like))

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the rate matrix, shape `(*batch, 4, 4)`, with the dtype and device of `like`."""
        purines, pyrimidines = self._ratios(like)
        one = torch.ones_like(purines)
        pairs = torch.stack([one, purines, one, one, pyrimidines, one], -1)
        return _reversible_rate_matrix(_of_pairs(pairs), self.frequencies(like))

    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities, shape `(*batch, edges, 4, 4)`.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Shape `(*batch, edges, 4, 4)`, with the dtype and device of `branch_lengths`.

        Raises
        ------
        SettingsError
            If a parameter has no value.
        """
        # Probabilities of rare substitutions on short branches are small differences: single precision loses them.
        lengths = branch_lengths.double()
        purines, pyrimidines = self._ratios(lengths)
        frequencies = self.frequencies(lengths)
        a, c, g, t = frequencies.unbind(-1)
        speed = 0.5 / ((a + g) * (c + t) + purines * a * g + pyrimidines * c * t)
        ratios = torch.stack([purines, pyrimidines, purines, pyrimidines], -1)
        return _transitions_by_class(lengths, frequencies, ratios, speed).to(branch_lengths.dtype)

    def _ratios(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the ratios of purines and of pyrimidines, of one shape `(*batch,)`."""
        purines, pyrimidines = self._values("kappa_purines", like), self._values("kappa_pyrimidines", like)
        purines, pyrimidines = torch.broadcast_tensors(purines, pyrimidines)
        return purines, pyrimidines


# Time-reversible models by exchangeabilities: GTR and its submodels.

#: Exchangeabilities, identified up to a common factor; the default prior is flat, as in MrBayes.
_EXCHANGEABILITIES = Parameter(lambda like: Dirichlet(like.new_ones(6)), size=6)


class ReversibleModel(SubstitutionModel):
    """A time-reversible model of any states, given by `exchangeability_matrix` and `frequencies`.

    Transition matrices are computed from the eigendecomposition of the symmetrised rate matrix. Their derivative with
    respect to the parameters is exact for repeated eigenvalues too (as under Jukes-Cantor). They are differentiable
    once with respect to the parameters, and any number of times with respect to branch lengths.

    References
    ----------
    R. Bhatia (1997), Matrix Analysis, chapter V (the derivative of a matrix function by divided differences).

    Examples
    --------
    >>> isinstance(GTR(), ReversibleModel)
    True
    """

    @abstractmethod
    def exchangeability_matrix(self, like: Tensor) -> Tensor:
        """Return exchangeabilities up to a factor, symmetric, with zeros on the diagonal.

        Parameters
        ----------
        like : Tensor
            Sets dtype and device of the result.

        Returns
        -------
        Tensor
            Shape `(*batch, states, states)`; the rate from `i` to `j` is entry `[..., i, j]` times the frequency of
            `j`.
        """

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the rate matrix, shape `(*batch, states, states)`, with the dtype and device of `like`."""
        return _reversible_rate_matrix(self.exchangeability_matrix(like), self.frequencies(like))

    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities, shape `(*batch, edges, states, states)`.

        Parameters
        ----------
        branch_lengths : Tensor
            Expected substitutions per site, shape `(*batch, edges)`, at least 0.

        Returns
        -------
        Tensor
            Shape `(*batch, edges, states, states)`, with the dtype and device of `branch_lengths`.

        Raises
        ------
        SettingsError
            If a parameter has no value.
        """
        # Probabilities of rare substitutions on short branches are small differences: single precision loses them.
        # Longer branches are at stationarity; an infinite length times a zero eigenvalue would be NaN.
        lengths = branch_lengths.double().clamp(max=1e100)
        roots = self.frequencies(lengths).sqrt()
        scaling = roots[..., None, :] / roots[..., :, None]
        symmetric = self.rate_matrix(lengths) / scaling
        change = _exponential_minus_identity(0.5 * (symmetric + symmetric.mT), lengths)
        identity = torch.eye(self.num_states, dtype=lengths.dtype, device=lengths.device)
        # Rounding may make a very small probability negative.
        return (identity + scaling[..., None, :, :] * change).clamp(min=0.0).to(branch_lengths.dtype)


@dataclass(frozen=True, eq=False)
class GTR(ReversibleModel):
    """The general time-reversible model: any base frequencies, one exchangeability for each pair of bases.

    Transition matrices are differentiable once with respect to the parameters, and any number of times with respect to
    branch lengths.

    Parameters
    ----------
    exchangeabilities : sequence of float, Tensor or TorchDistribution, optional
        Exchangeabilities A-C, A-G, A-T, C-G, C-T and G-T up to a common factor, shape `(*batch, 6)`, above 0; the
        rate from `i` to `j` is the exchangeability times the frequency of `j`. Or their prior, by default
        Dirichlet(1, 1, 1, 1, 1, 1).
    base_frequencies : sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies of A, C, G and T, shape `(*batch, 4)`, above 0, scaled to sum to one; or their prior,
        by default Dirichlet(1, 1, 1, 1). `empirical_frequencies` gives those of an alignment.

    Raises
    ------
    SettingsError
        If values, or values in the support of a prior, are not above 0.
    ShapeError
        If there are not six exchangeabilities or not four frequencies.

    References
    ----------
    S. Tavare (1986), Some probabilistic and statistical problems in the analysis of DNA sequences, Lectures on
    Mathematics in the Life Sciences 17, 57-86.

    Examples
    --------
    >>> model = GTR(exchangeabilities=[1, 2, 1, 1, 2, 1], base_frequencies=[0.4, 0.3, 0.2, 0.1])
    >>> model.transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0]
    tensor([0.9193, 0.0309, 0.0395, 0.0103], dtype=torch.float64)
    """

    exchangeabilities: Given = None
    base_frequencies: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType(
        {"exchangeabilities": _EXCHANGEABILITIES, "base_frequencies": _BASE_FREQUENCIES}
    )

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 4)`, with the dtype and device of `like`."""
        return _normalised(self._values("base_frequencies", like))

    def exchangeability_matrix(self, like: Tensor) -> Tensor:
        """Return the exchangeabilities, shape `(*batch, 4, 4)`, with the dtype and device of `like`."""
        return _of_pairs(self._values("exchangeabilities", like))


@dataclass(frozen=True, eq=False)
class GTRSubmodel(ReversibleModel):
    """A submodel of GTR in which some exchangeabilities are equal, such as F81, TIM2 or TVM.

    `parse_substitution` knows the names of these models; `all_reversible_models` lists all of them.

    Parameters
    ----------
    partition : str, default "012345"
        The classes of A-C, A-G, A-T, C-G, C-T and G-T, as six digits: pairs with the same digit have the same
        exchangeability. HKY85 is "010010", GTR "012345".
    exchangeabilities : sequence of float, Tensor or TorchDistribution, optional
        One for each class in the order of the digits, up to a common factor, shape `(*batch, classes)`, above 0; or
        their prior, by default Dirichlet(1, ..., 1). There is no such parameter where all are equal.
    base_frequencies : sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies of A, C, G and T, shape `(*batch, 4)`, above 0, scaled to sum to one; or their prior,
        by default Dirichlet(1, 1, 1, 1).

    Raises
    ------
    SettingsError
        If `partition` is not six digits, or values, or values in the support of a prior, are not above 0.
    ShapeError
        If there is not one exchangeability for each class, or there are not four frequencies.

    References
    ----------
    J. P. Huelsenbeck, B. Larget and M. E. Alfaro (2004), Bayesian phylogenetic model selection using reversible jump
    Markov chain Monte Carlo, Molecular Biology and Evolution 21, 1123-1133.

    Examples
    --------
    >>> model = GTRSubmodel("010020", [1.0, 2.0, 5.0], [0.4, 0.3, 0.2, 0.1])  # as TN93
    >>> model.transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0]
    tensor([0.9317, 0.0261, 0.0335, 0.0087], dtype=torch.float64)
    >>> sorted(GTRSubmodel("000000").priors(torch.zeros(())))
    ['base_frequencies']
    """

    partition: str = "012345"
    exchangeabilities: Given = None
    base_frequencies: Given = None

    def __post_init__(self) -> None:
        """Check the partition and the parameters; classes are numbered in the order in which they occur."""
        if not isinstance(self.partition, str) or not re.fullmatch("[0-9]{6}", self.partition):
            raise SettingsError(
                f"partition={self.partition!r} is not six digits. Remedy: give the classes of the pairs A-C, A-G, A-T, "
                "C-G, C-T and G-T, such as '010010' for equal transitions and equal transversions."
            )
        number = {digit: str(place) for place, digit in enumerate(dict.fromkeys(self.partition))}
        object.__setattr__(self, "partition", "".join(number[digit] for digit in self.partition))
        if self._num_classes == 1 and self.exchangeabilities is not None:
            raise SettingsError("exchangeabilities: all are equal, so that they have no value. Remedy: leave them out.")
        super().__post_init__()

    @property
    def _num_classes(self) -> int:
        return len(set(self.partition))

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """The exchangeability of each class, if there are several, and the base frequencies."""
        size = self._num_classes
        classes = {"exchangeabilities": Parameter(lambda like: Dirichlet(like.new_ones(size)), size=size)}
        return MappingProxyType((classes if size > 1 else {}) | {"base_frequencies": _BASE_FREQUENCIES})

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 4)`, with the dtype and device of `like`."""
        return _normalised(self._values("base_frequencies", like))

    def exchangeability_matrix(self, like: Tensor) -> Tensor:
        """Return the exchangeabilities, shape `(*batch, 4, 4)`, with the dtype and device of `like`."""
        classes = self._values("exchangeabilities", like) if self._num_classes > 1 else like.new_ones(1)
        return _of_pairs(classes[..., [int(digit) for digit in self.partition]])


def all_reversible_models() -> tuple[str, ...]:
    """Return the partitions of all 203 submodels of GTR, from the simplest to GTR.

    Returns
    -------
    tuple of str
        For `GTRSubmodel`, ordered by the number of classes.

    Examples
    --------
    >>> codes = all_reversible_models()
    >>> len(codes), codes[0], codes[-1]
    (203, '000000', '012345')
    """
    codes = [""]
    for _ in range(6):
        codes = [code + str(digit) for code in codes for digit in range(len(set(code)) + 1)]
    return tuple(sorted(codes, key=lambda code: (len(set(code)), code)))


# Morphological characters and restriction sites.


@dataclass(frozen=True)
class OrderedMk(ReversibleModel):
    """The model of ordered morphological characters: changes between neighbouring states only, all at one rate.

    Frequencies of the states are equal.

    Parameters
    ----------
    states : int, default 3
        Number of states, from 2 to 36.

    Raises
    ------
    SettingsError
        If `states` is not such a number.

    References
    ----------
    F. Ronquist et al. (2012), MrBayes 3.2: efficient Bayesian phylogenetic inference and model choice across a large
    model space, Systematic Biology 61, 539-542.

    Examples
    --------
    >>> OrderedMk(3).rate_matrix(torch.empty(0))
    tensor([[-0.7500,  0.7500,  0.0000],
            [ 0.7500, -1.5000,  0.7500],
            [ 0.0000,  0.7500, -0.7500]])
    """

    states: int = 3

    def __post_init__(self) -> None:
        """Check the number of states."""
        super().__post_init__()
        object.__setattr__(self, "states", standard_characters(self.states).num_states)

    @property
    def data_type(self) -> DataType:
        """Symbols of that many states."""
        return standard_characters(self.states)

    def frequencies(self, like: Tensor) -> Tensor:
        """Return equal frequencies, shape `(states,)`, with the dtype and device of `like`."""
        return like.new_full((self.states,), 1 / self.states)

    def exchangeability_matrix(self, like: Tensor) -> Tensor:
        """Return ones for neighbouring states, shape `(states, states)`."""
        place = torch.arange(self.states, device=like.device)
        return ((place[:, None] - place).abs() == 1).to(like.dtype)


@dataclass(frozen=True, eq=False)
class Binary(ReversibleModel):
    """The model of two states with any frequencies: restriction sites, presence and absence.

    Parameters
    ----------
    state_frequencies : sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies of the states 0 and 1, shape `(*batch, 2)`, above 0, scaled to sum to one; or their
        prior, by default Dirichlet(1, 1).

    Raises
    ------
    SettingsError
        If values, or values in the support of a prior, are not above 0.
    ShapeError
        If there are not two frequencies.

    References
    ----------
    J. Felsenstein (1992), Phylogenies from restriction sites: a maximum-likelihood approach, Evolution 46, 159-173.

    Examples
    --------
    >>> Binary([0.2, 0.8]).rate_matrix(torch.empty(0))
    tensor([[-2.5000,  2.5000],
            [ 0.6250, -0.6250]])
    """

    state_frequencies: Given = None

    parameters: ClassVar[Mapping[str, Parameter]] = {"state_frequencies": _TWO_FREQUENCIES}

    @property
    def data_type(self) -> DataType:
        """Two symbols."""
        return standard_characters(2)

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 2)`, with the dtype and device of `like`."""
        return _normalised(self._values("state_frequencies", like))

    def exchangeability_matrix(self, like: Tensor) -> Tensor:
        """Return a one for the two states, shape `(2, 2)`."""
        return 1 - torch.eye(2, dtype=like.dtype, device=like.device)


# Models of sites that are in the data because of what they show.

#: Largest logarithm of the probability of a site that is left out; that of a tree without lengths is zero.
_SURELY_LEFT_OUT = -1e-15
#: The most patterns of sites that are left out.
_MOST_PATTERNS = 4096
_CODINGS = ("variable", "informative", "noabsence")


@dataclass(frozen=True, eq=False)
class VariableSites(SubstitutionModel):
    """A substitution model of sites that were chosen because of what they show: Mkv, or `+ASC`.

    Morphological characters are recorded where taxa differ, alignments of single-nucleotide polymorphisms leave out
    constant sites, and restriction sites that no taxon has are not seen. The likelihood of each site is conditional on
    this: it is divided by the probability of the sites that can be in the data. All taxa count, also those whose state
    at a site is missing.

    Parameters
    ----------
    model : SubstitutionModel, default Mk()
    coding : {"variable", "informative", "noabsence"}, default "variable"
        Which sites can be in the data: those at which not all taxa have the same state; those at which two states are
        in two taxa or more (parsimony-informative ones); those at which not all taxa have the first state.

    Raises
    ------
    SettingsError
        If `model` is no substitution model, or has the correction already, or there is no such coding.

    References
    ----------
    P. O. Lewis (2001), A likelihood approach to estimating phylogeny from discrete morphological character data,
    Systematic Biology 50, 913-925.

    J. Felsenstein (1992), Phylogenies from restriction sites: a maximum-likelihood approach, Evolution 46, 159-173.

    Examples
    --------
    >>> from bayeskit.models.phylogenetics import Tree, TreeModel
    >>> alignment = Alignment.from_sequences({"A": "001", "B": "010", "C": "100"}, data_type="standard")
    >>> model = TreeModel(alignment, Tree.from_newick("(A,B,C);"), VariableSites(Mk(2)))
    >>> model.log_likelihood(torch.full((3,), 0.1, dtype=torch.float64)).exp()  # a sixth for each site
    tensor(0.0046, dtype=torch.float64)
    """

    model: SubstitutionModel = field(default_factory=Mk)
    coding: str = "variable"

    def __post_init__(self) -> None:
        """Check the model."""
        if not isinstance(self.model, SubstitutionModel) or isinstance(self.model, VariableSites):
            raise SettingsError(
                f"VariableSites: {self.model!r:.80} is not a substitution model without this correction. Remedy: give "
                "an object such as Mk(3) or GTR()."
            )
        if self.coding not in _CODINGS:
            raise SettingsError(f"coding={self.coding!r:.60} is unknown. Remedy: use one of {', '.join(_CODINGS)}.")

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Those of the model."""
        return self.model.parameters

    @property
    def data_type(self) -> DataType:
        """That of the model."""
        return self.model.data_type

    @property
    def is_uniform(self) -> bool:
        """Whether all substitutions have the same rate."""
        return self.model.is_uniform

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of the parameter values."""
        return self.model.batch_shape

    def priors(self, like: Tensor) -> dict[str, TorchDistribution]:
        """Return the priors of the model's parameters without a value."""
        return self.model.priors(like)

    def with_parameters(self, values: Mapping[str, Tensor]) -> Self:
        """Return a copy with values for some of the parameters."""
        made = copy.copy(self)
        object.__setattr__(made, "model", self.model.with_parameters(values))
        return made

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, states)`, with the dtype and device of `like`."""
        return self.model.frequencies(like)

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the rate matrix, shape `(*batch, states, states)`, with the dtype and device of `like`."""
        return self.model.rate_matrix(like)

    def transition_matrices(self, branch_lengths: Tensor) -> Tensor:
        """Return the matrices of transition probabilities, shape `(*batch, edges, states, states)`."""
        return self.model.transition_matrices(branch_lengths)

    def left_out(self, num_taxa: int) -> ExcludedPatterns:
        """Return the patterns of sites that cannot be in the data; patterns of equal probability are one.

        Raises
        ------
        SettingsError
            If there are too many.
        """
        return _left_out(self.coding, self.num_states, self.is_uniform, num_taxa)

    def log_observable(self, log_left_out: Tensor, counts: Tensor) -> Tensor:
        """Return the log probability that a site can be in the data.

        Parameters
        ----------
        log_left_out : Tensor
            Log probability of each pattern of `left_out`, shape `(patterns, *batch)`.
        counts : Tensor
            Number of patterns with this probability, shape `(patterns,)`.

        Returns
        -------
        Tensor
            Shape `(*batch)`.
        """
        weights = counts.log().to(log_left_out).reshape(-1, *(1,) * (log_left_out.dim() - 1))
        total = (log_left_out + weights).logsumexp(0)
        return _gone(-total.clamp(max=_SURELY_LEFT_OUT)).log()


class ExcludedPatterns(NamedTuple):
    """Patterns of sites that cannot be in the data."""

    patterns: NDArray[np.int64]  # set of states of each taxon as bits, (taxa, patterns)
    counts: NDArray[np.float64]  # number of patterns of the same probability, (patterns,)


@lru_cache
def _left_out(coding: str, states: int, is_uniform: bool, num_taxa: int) -> ExcludedPatterns:
    """List the patterns; if all states are alike, one for each set of taxa that differ from the others."""
    if coding == "noabsence":
        return ExcludedPatterns(np.ones((num_taxa, 1), dtype=np.int64), np.ones(1))
    others = range(1 if coding == "variable" else min(states, num_taxa))
    columns: list[NDArray[np.int64]] = []
    counts: list[float] = []
    for number in others:
        # One state in most taxa, and states of their own in the others.
        chosen = [tuple(range(number + 1))] if is_uniform else list(itertools.permutations(range(states), number + 1))
        if len(columns) + math.comb(num_taxa, number) * len(chosen) > _MOST_PATTERNS:
            raise SettingsError(
                f"coding={coding!r}: the patterns of {num_taxa} taxa and {states} states that are left out are more "
                f"than {_MOST_PATTERNS}. Remedy: use coding='variable', or characters with fewer states."
            )
        for taxa in itertools.combinations(range(num_taxa), number):
            if number == num_taxa - 1 > 0 and 0 in taxa:
                continue  # all taxa differ, so that any of them may be the one that stays
            for most, *rest in chosen:
                column = np.full(num_taxa, 1 << most, dtype=np.int64)
                column[list(taxa)] = [1 << state for state in rest]
                columns.append(column)
                counts.append(float(math.perm(states, number + 1)) if is_uniform else 1.0)
    return ExcludedPatterns(np.stack(columns, 1), np.array(counts))


#: Up to this number, all edges are turned from eigenvectors to states by one product with a matrix of pairs.
_FEW_STATES = 4


def _exponential_minus_identity(matrix: Tensor, times: Tensor) -> Tensor:
    """Return `exp(times * matrix) - I` of symmetric matrices with largest eigenvalue zero: `(*batch, edges, n, n)`."""
    # `matrix` (*batch, n, n), `times` (*batch, edges). The value comes from the eigendecomposition. The derivative in
    # direction `E`, in the basis of eigenvectors, is `E` times the divided differences of `exp` between each pair of
    # eigenvalues (Daleckii and Krein); eigenvalues may be equal and eigenvectors not unique.
    # Extreme parameters may give rates that are no numbers, for which the decomposition raises an error.
    finite = matrix.detach().isfinite().all(-1).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, matrix.detach(), 0.0))
    values = torch.where(finite[..., 0], values, torch.nan)
    # The largest eigenvalue is exactly zero; its rounding error would let very long branches decay for ever.
    decay = torch.cat([-values[..., :-1].clamp(max=0.0), torch.zeros_like(values[..., -1:])], -1)
    direction = _Direction.apply(matrix, vectors)
    events = times[..., None] * decay[..., None, :]
    in_eigenvectors = torch.diag_embed(-_gone(events))
    in_eigenvectors = in_eigenvectors + _divided_differences(decay, times) * direction[..., None, :, :]
    n = matrix.shape[-1]
    if n > _FEW_STATES:
        return vectors[..., None, :, :] @ in_eigenvectors @ vectors.mT[..., None, :, :]
    pairs = torch.einsum("...ik,...jl->...klij", vectors, vectors).flatten(-2).flatten(-3, -2)
    return (in_eigenvectors.flatten(-2) @ pairs).unflatten(-1, (n, n))


def _divided_differences(decay: Tensor, times: Tensor) -> Tensor:
    """Return `(exp(-a t) - exp(-b t)) / (b - a)` for each two of `decay`, shape `(*batch, edges, n, n)`."""
    slower = torch.minimum(decay[..., :, None], decay[..., None, :])[..., None, :, :]
    times = times[..., None, None]
    apart = (decay[..., :, None] - decay[..., None, :]).abs()[..., None, :, :] * times
    distinct = apart > 0
    apart = torch.where(distinct, apart, torch.ones_like(apart))
    return times * torch.exp(-slower * times) * torch.where(distinct, _gone(apart) / apart, torch.ones_like(apart))


class _Direction(torch.autograd.Function):
    """Zeros that carry the derivative of `vectors.T @ matrix @ vectors` by the matrix."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, vectors: Tensor) -> Tensor:
        return torch.zeros_like(matrix)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _FromEigenvectors.apply(cotangent, *ctx.saved_tensors), None


class _FromEigenvectors(torch.autograd.Function):
    """`vectors @ matrix @ vectors.T`; not differentiable, as the derivative of the eigenvectors would be missing."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, vectors: Tensor) -> Tensor:
        return vectors @ matrix @ vectors.mT

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> None:  # type: ignore[override]
        raise NotImplementedError(
            "The model has only first derivatives with respect to its parameters. Remedy: use finite differences of "
            "its gradient."
        )
