"""Models of the substitution of codons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal, NamedTuple

import torch
from pyro.distributions import Dirichlet, LogNormal
from torch import Tensor

from bayeskit.errors import AlignmentError
from bayeskit.extend import unknown_name
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._data_types import DataType, codons
from bayeskit.models.phylogenetics._substitution import Given, Parameter, ReversibleModel, state_counts

#: Transitions against transversions: as kappa of HKY85.
RATIO = Parameter(lambda like: LogNormal(like.new_tensor(1.0), like.new_tensor(1.25)))
#: Amino-acid changes against silent ones: median one, as likely above as below, 95 % from .09 to 12.
SELECTION = Parameter(lambda like: LogNormal(like.new_tensor(0.0), like.new_tensor(1.25)))


class _Changes(NamedTuple):
    """Facts of each change between two codons, 0 or 1, `(codons, codons)`."""

    single: Tensor  # of one base
    transitions: Tensor  # of A and G, or C and T
    replacing: Tensor  # of the amino acid


def _bases(data_type: DataType) -> Tensor:
    """Return the bases of each codon as places in ACGT, `(codons, 3)`."""
    return torch.tensor([["ACGT".index(base) for base in codon] for codon in data_type.states])


@lru_cache
def _changes(data_type: DataType) -> _Changes:
    bases = _bases(data_type)
    differ = bases[:, None] != bases[None]  # (codons, codons, 3)
    single = differ.sum(-1) == 1
    transitions = single & ((bases[:, None] - bases[None]).abs() == 2).any(-1)
    encoded = torch.tensor([ord(letter) for letter in data_type.amino_acids])
    return _Changes(single.double(), transitions.double(), (single & (encoded[:, None] != encoded)).double())


def exchanges(kappa: Tensor, omega: Tensor, data_type: DataType) -> Tensor:
    """Return rates of changes without the frequency of the new codon, `(*batch,) -> (*batch, codons, codons)`."""
    single, transitions, replacing = (facts.to(kappa) for facts in _changes(data_type))
    kappa, omega = kappa[..., None, None], omega[..., None, None]
    return single * (1.0 + (kappa - 1.0) * transitions) * (1.0 + (omega - 1.0) * replacing)


@dataclass(frozen=True, eq=False)
class GY94(ReversibleModel):
    """The codon model of Goldman and Yang, in its form with one ratio of amino-acid changes to silent ones: M0.

    Codons change one base at a time. The rate to codon `j` is its frequency, times `kappa` for a transition, times
    `omega` where the amino acid changes.

    Parameters
    ----------
    kappa : float, Tensor or TorchDistribution, optional
        Ratio of the rates of transitions (A-G, C-T) and transversions, shape `(*batch,)`, above 0; or its prior, by
        default LogNormal(1, 1.25).
    omega : float, Tensor or TorchDistribution, optional
        Ratio of the rates of changes with and without another amino acid (dN/dS), shape `(*batch,)`, above 0; or its
        prior, by default LogNormal(0, 1.25).
    codon_frequencies : "equal", sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies, shape `(*batch, codons)`, above 0, scaled to sum to one; or their prior, by None
        Dirichlet(1, ..., 1). By default equal; `codon_frequencies` gives those of an alignment.
    genetic_code : str, default "standard"
        One of `GENETIC_CODES`.

    Raises
    ------
    SettingsError
        If values, or values in the support of a prior, are not above 0.
    ShapeError
        If there is not one frequency for each codon.
    UnknownNameError
        If there is no such genetic code.

    References
    ----------
    N. Goldman and Z. Yang (1994), A codon-based model of nucleotide substitution for protein-coding DNA sequences,
    Molecular Biology and Evolution 11, 725-736.

    R. Nielsen and Z. Yang (1998), Likelihood models for detecting positively selected amino acid sites and
    applications to the HIV-1 envelope gene, Genetics 148, 929-936.

    Examples
    --------
    >>> model = GY94(kappa=2.0, omega=0.5)
    >>> model.transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0, :4]
    tensor([0.9163, 0.0064, 0.0249, 0.0064], dtype=torch.float64)
    """

    kappa: Given = None
    omega: Given = None
    codon_frequencies: Given | str = "equal"
    genetic_code: str = "standard"

    def __post_init__(self) -> None:
        """Check the settings."""
        size = self.num_states
        if isinstance(self.codon_frequencies, str) and self.codon_frequencies == "equal":
            object.__setattr__(self, "codon_frequencies", torch.full((size,), 1.0 / size, dtype=torch.float64))
        super().__post_init__()

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Both ratios and the frequencies."""
        size = self.num_states
        frequencies = Parameter(lambda like: Dirichlet(like.new_ones(size)), size=size)
        return MappingProxyType({"kappa": RATIO, "omega": SELECTION, "codon_frequencies": frequencies})

    @property
    def data_type(self) -> DataType:
        """Codons of the genetic code."""
        return codons(self.genetic_code)

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, codons)`, with the dtype and device of `like`."""
        values = self._values("codon_frequencies", like)
        return values / values.sum(-1, keepdim=True)

    def exchangeability_matrix(self, like: Tensor) -> Tensor:
        """Return the exchangeabilities, shape `(*batch, codons, codons)`, with the dtype and device of `like`."""
        return exchanges(self._values("kappa", like), self._values("omega", like), self.data_type)


@dataclass(frozen=True, eq=False)
class MG94(ReversibleModel):
    """The codon model of Muse and Gaut, with a ratio of transitions to transversions.

    Codons change one base at a time. The rate is the frequency of the new base, not of the new codon as in `GY94`,
    times `kappa` for a transition, times `omega` where the amino acid changes. The stationary frequency of a codon is
    proportional to the product of the frequencies of its bases.

    Parameters
    ----------
    kappa : float, Tensor or TorchDistribution, optional
        Ratio of the rates of transitions (A-G, C-T) and transversions, shape `(*batch,)`, above 0; or its prior, by
        default LogNormal(1, 1.25). In the original model it is 1.
    omega : float, Tensor or TorchDistribution, optional
        Ratio of the rates of changes with and without another amino acid (dN/dS), shape `(*batch,)`, above 0; or its
        prior, by default LogNormal(0, 1.25).
    base_frequencies : sequence of float, Tensor or TorchDistribution, optional
        Of A, C, G and T, shape `(*batch, 4)`, above 0, scaled to sum to one; or those at each of the three places of a
        codon, one after another, shape `(*batch, 12)`; or their prior, by default Dirichlet(1, 1, 1, 1).
    genetic_code : str, default "standard"
        One of `GENETIC_CODES`.

    Raises
    ------
    SettingsError
        If values, or values in the support of a prior, are not above 0.
    ShapeError
        If there are neither four nor twelve frequencies.
    UnknownNameError
        If there is no such genetic code.

    References
    ----------
    S. V. Muse and B. S. Gaut (1994), A likelihood approach for comparing synonymous and nonsynonymous nucleotide
    substitution rates, with application to the chloroplast genome, Molecular Biology and Evolution 11, 715-724.

    Examples
    --------
    >>> model = MG94(kappa=2.0, omega=0.5, base_frequencies=[0.4, 0.2, 0.1, 0.3])
    >>> model.transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0, :4]
    tensor([0.9404, 0.0059, 0.0115, 0.0088], dtype=torch.float64)
    """

    kappa: Given = None
    omega: Given = None
    base_frequencies: Given = None
    genetic_code: str = "standard"

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Both ratios and the frequencies."""
        given = self.base_frequencies
        places = 3 if isinstance(given, Tensor | Sequence) and torch.as_tensor(given).shape[-1:] == (12,) else 1
        bases = Parameter(lambda like: Dirichlet(like.new_ones(4)), size=4 * places)
        return MappingProxyType({"kappa": RATIO, "omega": SELECTION, "base_frequencies": bases})

    @property
    def data_type(self) -> DataType:
        """Codons of the genetic code."""
        return codons(self.genetic_code)

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, codons)`, with the dtype and device of `like`."""
        products = self._of_bases(like).prod(-1)
        return products / products.sum(-1, keepdim=True)

    def exchangeability_matrix(self, like: Tensor) -> Tensor:
        """Return the exchangeabilities, shape `(*batch, codons, codons)`, with the dtype and device of `like`."""
        found, bases = self._of_bases(like), _bases(self.data_type).to(like.device)
        differ = (bases[:, None] != bases[None]).to(like)  # (codons, codons, 3)
        # The frequency of the new base, divided by that of the new codon: the places that stay the same remain.
        target = (differ * found[..., None, :, :]).sum(-1) / found.prod(-1)[..., None, :]
        return target * exchanges(self._values("kappa", like), self._values("omega", like), self.data_type)

    def _of_bases(self, like: Tensor) -> Tensor:
        """Return the frequency of each base of each codon, `(*batch, codons, 3)`."""
        values = self._values("base_frequencies", like)
        table = values.unflatten(-1, (-1, 4))
        table = (table / table.sum(-1, keepdim=True)).expand(*values.shape[:-1], 3, 4)
        return table[..., torch.arange(3), _bases(self.data_type)]


def codon_frequencies(alignment: Alignment, method: Literal["F1x4", "F3x4"] = "F3x4") -> Tensor:
    """Return frequencies of codons from those of the bases in an alignment.

    Parameters
    ----------
    alignment : Alignment
        Of codons.
    method : {"F1x4", "F3x4"}, default "F3x4"
        Products of the frequencies of bases anywhere, or at each of the three places of a codon, without stop codons.
        `empirical_frequencies` counts whole codons (F61).

    Returns
    -------
    Tensor
        Shape `(codons,)`, float64, in the order of `alignment.data_type.states`; sums to one.

    Raises
    ------
    AlignmentError
        If the data are no codons, or a base never occurs.
    UnknownNameError
        If there is no such method.

    Examples
    --------
    >>> alignment = Alignment.from_sequences({"A": "ATGCCA", "B": "ATGCGT"}, data_type="codon")
    >>> codon_frequencies(alignment, "F1x4")[:3]
    tensor([0.0164, 0.0164, 0.0164], dtype=torch.float64)
    """
    table = place_frequencies(alignment, method)
    products = table[torch.arange(3), _bases(alignment.data_type)].prod(-1)
    return products / products.sum()


def place_frequencies(alignment: Alignment, method: str) -> Tensor:
    """Return the frequencies of the bases at the places of a codon, `(3, 4)`; errors as `codon_frequencies`."""
    if method not in ("F1x4", "F3x4"):
        raise unknown_name("method for frequencies of codons", str(method), ("F1x4", "F3x4"))
    kind = alignment.data_type
    if kind.name != "codon":
        raise AlignmentError(
            f"The data of the alignment are {kind}, not codons. Remedy: read it with data_type='codon'."
        )
    bases = _bases(kind)
    counts = torch.zeros(3, 4, dtype=torch.float64)
    for place in range(3):
        counts[place].index_add_(0, bases[:, place], state_counts(alignment))
    counts = counts.sum(0, keepdim=True).expand(3, 4) if method == "F1x4" else counts
    if (counts == 0).any():
        place, base = (counts == 0).nonzero()[0].tolist()
        where = "" if method == "F1x4" else f" at place {place + 1} of a codon"
        raise AlignmentError(
            f"The base {'ACGT'[base]} never occurs{where}, so that frequencies of codons would be zero. Remedy: give "
            "frequencies above zero, or leave them to a prior."
        )
    return counts / counts.sum(-1, keepdim=True)
