"""Substitution models that tell transitions from transversions: K80 and HKY85."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from pyro.distributions import LogNormal
from torch import Tensor

from bayeskit.models.phylogenetics.substitution.base import (
    BASE_FREQUENCIES,
    SubstitutionModel,
    gone,
    normalised,
    reversible_rate_matrix,
)
from bayeskit.models.phylogenetics.substitution.parameters import Given, Parameter

#: Ratio of the rates of transitions and transversions. The usual prior is that of BEAST 1 (its wiki, page on parameter
#: priors) and BEAST 2 (BEAUti's template `SubstModels.xml`, M=1 and S=1.25 of the logarithm), and of torchtree
#: (`cli/evolution.py`), with median 2.7 and 95 % of its mass between 0.23 and 31; it leaves the data to decide and yet
#: keeps away from 0 and infinity. MrBayes has a flat prior of kappa / (1 + kappa) instead, which is Beta(1, 1).
KAPPA = Parameter(lambda like: LogNormal(like.new_tensor(1.0), like.new_tensor(1.25)))


class _TwoRates(SubstitutionModel):
    """A model with one rate of transitions, one of transversions, and any frequencies."""

    def rate_matrix(self, like: Tensor) -> Tensor:
        """Return the rates of change, shape `(*batch, 4, 4)`, with the dtype and device of `like`."""
        kappa = self._values("kappa", like)
        one = torch.ones_like(kappa)
        return reversible_rate_matrix(torch.stack([one, kappa, one, one, kappa, one], -1), self.frequencies(like))

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
        # Differences of almost equal numbers give rare changes along short branches: single precision loses them.
        lengths = branch_lengths.double()
        kappa = self._values("kappa", lengths)[..., None]
        frequencies = self.frequencies(lengths)
        a, c, g, t = frequencies.unbind(-1)
        # What belongs to a base: the frequency of its own class (purines or pyrimidines), of the other class, and
        # of the other base in its class.
        own = torch.stack([a + g, c + t, a + g, c + t], -1)
        other = torch.stack([c + t, a + g, c + t, a + g], -1)
        partner = torch.stack([g, t, a, c], -1)
        speed = 0.5 / ((a + g) * (c + t) + kappa[..., 0] * (a * g + c * t))
        between = (speed[..., None] * lengths)[..., None]
        within = between * (other + kappa * own)[..., None, :]
        frequencies, own, other, partner = (vector[..., None, :] for vector in (frequencies, own, other, partner))
        transversions = frequencies * gone(between)
        transitions = frequencies / own * (gone(within) - other * gone(between))
        same = frequencies + (frequencies * other * torch.exp(-between) + partner * torch.exp(-within)) / own
        s, v, k = same.unbind(-1), transversions.unbind(-1), transitions.unbind(-1)
        rows = [
            *(s[0], v[1], k[2], v[3]),
            *(v[0], s[1], v[2], k[3]),
            *(k[0], v[1], s[2], v[3]),
            *(v[0], k[1], v[2], s[3]),
        ]
        return torch.stack(rows, -1).reshape(*s[0].shape, 4, 4).to(branch_lengths.dtype)


@dataclass(frozen=True, eq=False)
class K80(_TwoRates):
    """Kimura's model: equal frequencies, and transitions at another rate than transversions.

    Parameters
    ----------
    kappa : float, Tensor or TorchDistribution, optional
        Rate of transitions (A-G, C-T) divided by that of transversions, shape `(*batch,)`, or its prior. By default
        the prior is LogNormal(1, 1.25), as in BEAST 2 (Bouckaert et al., 2019).

    Raises
    ------
    SettingsError
        If `kappa` is not above 0, or its prior is not over one such number.

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

    parameters: ClassVar[Mapping[str, Parameter]] = MappingProxyType({"kappa": KAPPA})

    def frequencies(self, like: Tensor) -> Tensor:
        """Return `(1/4, 1/4, 1/4, 1/4)` with the dtype and device of `like`."""
        return like.new_full((4,), 0.25)


@dataclass(frozen=True, eq=False)
class HKY85(_TwoRates):
    """The model of Hasegawa, Kishino and Yano: any frequencies, two rates of change.

    Parameters
    ----------
    kappa : float, Tensor or TorchDistribution, optional
        Rate of transitions (A-G, C-T) divided by that of transversions, shape `(*batch,)`, or its prior. By default
        the prior is LogNormal(1, 1.25), as in BEAST 2 (Bouckaert et al., 2019).
    base_frequencies : sequence of float, Tensor or TorchDistribution, optional
        Stationary frequencies of A, C, G and T, shape `(*batch, 4)`, above 0; they are scaled to sum to one. Or their
        prior; by default it is flat, Dirichlet(1, 1, 1, 1). `empirical_frequencies` counts them in an alignment.

    Raises
    ------
    SettingsError
        If values are not above 0, or a prior is not over such values.
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
        {"kappa": KAPPA, "base_frequencies": BASE_FREQUENCIES}
    )

    def frequencies(self, like: Tensor) -> Tensor:
        """Return the stationary frequencies, shape `(*batch, 4)`, with the dtype and device of `like`."""
        return normalised(self._values("base_frequencies", like))
