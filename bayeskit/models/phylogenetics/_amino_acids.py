"""Models of amino-acid replacement with exchangeabilities estimated from large collections of proteins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import torch
from pyro.distributions import Dirichlet
from torch import Tensor

from bayeskit.extend import unknown_name
from bayeskit.models._substitution_names import AMINO_ACID_MATRICES
from bayeskit.models.phylogenetics._data_types import PROTEIN, DataType
from bayeskit.models.phylogenetics._substitution import Given, Parameter, ReversibleModel

_FREQUENCIES = Parameter(lambda like: Dirichlet(like.new_ones(20)), size=20)


class _Published(NamedTuple):
    exchangeabilities: Tensor  # (20, 20), float64
    frequencies: Tensor  # (20,), float64, as printed


@lru_cache
def _published() -> Mapping[str, _Published]:
    """Read the matrices that ship with the package."""
    text = (resources.files(__package__) / "data" / "amino_acids.txt").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    found = {}
    for start in range(0, len(lines), 21):
        name, *rows, last = lines[start : start + 21]
        lower = torch.zeros(20, 20, dtype=torch.float64)
        for place, row in enumerate(rows, start=1):
            lower[place, :place] = torch.tensor([float(number) for number in row.split()], dtype=torch.float64)
        frequencies = torch.tensor([float(number) for number in last.split()], dtype=torch.float64)
        found[name] = _Published(lower + lower.mT, frequencies)
    found["Poisson"] = _Published(1.0 - torch.eye(20, dtype=torch.float64), torch.full_like(frequencies, 0.05))
    return MappingProxyType(found)


@dataclass(frozen=True, eq=False)
class AminoAcidModel(ReversibleModel):
    """Amino-acid replacement with published exchangeabilities, such as LG, WAG, JTT or mtREV.

    Parameters
    ----------
    matrix : str, default "LG"
        Of proteins in general: "LG" (Le and Gascuel, 2008), "WAG" (Whelan and Goldman, 2001), "JTT" (Jones et al.,
        1992), "Dayhoff" (1978), and "JTTDCMut" and "DCMut", the last two recomputed from their data by Kosiol and
        Goldman (2005). Of proteins of mitochondria: "mtREV" (Adachi and Hasegawa, 1996; vertebrates) and "mtMAM" (Yang
        et al., 1998; mammals). Of chloroplasts: "cpREV" (Adachi et al., 2000). "Poisson": all are equal.
    amino_acid_frequencies : "own", sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies, shape `(*batch, 20)`, above 0, scaled to sum to one, in the order of `PROTEIN.states`;
        or their prior, by None Dirichlet(1, ..., 1). By default those published with the matrix;
        `empirical_frequencies` gives those of an alignment.

    Raises
    ------
    UnknownNameError
        If there is no such matrix.
    SettingsError
        If values, or values in the support of a prior, are not above 0.
    ShapeError
        If there are not twenty frequencies.

    References
    ----------
    S. Q. Le and O. Gascuel (2008), An improved general amino acid replacement matrix, Molecular Biology and Evolution
    25, 1307-1320.

    S. Whelan and N. Goldman (2001), A general empirical model of protein evolution derived from multiple protein
    families using a maximum-likelihood approach, Molecular Biology and Evolution 18, 691-699.

    D. T. Jones, W. R. Taylor and J. M. Thornton (1992), The rapid generation of mutation data matrices from protein
    sequences, Computer Applications in the Biosciences 8, 275-282.

    M. O. Dayhoff, R. M. Schwartz and B. C. Orcutt (1978), A model of evolutionary change in proteins, Atlas of Protein
    Sequence and Structure 5, 345-352.

    C. Kosiol and N. Goldman (2005), Different versions of the Dayhoff rate matrix, Molecular Biology and Evolution 22,
    193-199.

    J. Adachi and M. Hasegawa (1996), Model of amino acid substitution in proteins encoded by mitochondrial DNA, Journal
    of Molecular Evolution 42, 459-468.

    Z. Yang, R. Nielsen and M. Hasegawa (1998), Models of amino acid substitution and applications to mitochondrial
    protein evolution, Molecular Biology and Evolution 15, 1600-1611.

    J. Adachi, P. J. Waddell, W. Martin and M. Hasegawa (2000), Plastid genome phylogeny and a model of amino acid
    substitution for proteins encoded by chloroplast DNA, Journal of Molecular Evolution 50, 348-358.

    Examples
    --------
    >>> model = AminoAcidModel("WAG")
    >>> model.transition_matrices(torch.tensor([0.1], dtype=torch.float64))[0, 0, :4]
    tensor([0.8951, 0.0025, 0.0022, 0.0043], dtype=torch.float64)
    >>> sorted(AminoAcidModel("LG", None).priors(torch.zeros(())))
    ['amino_acid_frequencies']
    """

    matrix: str = "LG"
    amino_acid_frequencies: Given | str = "own"

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"amino_acid_frequencies": _FREQUENCIES})

    def __post_init__(self) -> None:
        """Check the settings, and take the published frequencies."""
        if self.matrix not in AMINO_ACID_MATRICES:
            raise unknown_name("matrix of amino-acid exchangeabilities", str(self.matrix), AMINO_ACID_MATRICES)
        if isinstance(self.amino_acid_frequencies, str) and self.amino_acid_frequencies == "own":
            object.__setattr__(self, "amino_acid_frequencies", _published()[self.matrix].frequencies)
        super().__post_init__()

    @property
    def data_type(self) -> DataType:
        """Amino acids."""
        return PROTEIN

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 20)`, with the dtype and device of `like`."""
        values = self._values("amino_acid_frequencies", like)
        return values / values.sum(-1, keepdim=True)

    def exchangeability_matrix(self, like: Tensor) -> Tensor:
        """Return the exchangeabilities, shape `(20, 20)`, with the dtype and device of `like`."""
        return _published()[self.matrix].exchangeabilities.to(like)
