"""Models of sequence evolution by the names that other programs use."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import numpy as np

from bayeskit.errors import DataWarning, SettingsError
from bayeskit.extend import unknown_name, warn_user
from bayeskit.models._substitution_names import (
    AMINO_ACID_MATRICES,
    CODON_MODELS,
    KNOWN_NAMES,
    MODEL_NAMES,
    PROFILES,
    SIX_RATES,
    SYNONYMS,
)
from bayeskit.models.phylogenetics._alignments import Alignment
from bayeskit.models.phylogenetics._amino_acids import AminoAcidModel
from bayeskit.models.phylogenetics._codon_mixtures import M3, M1a, M2a
from bayeskit.models.phylogenetics._codon_models import GY94, MG94, codon_frequencies, place_frequencies
from bayeskit.models.phylogenetics._mixture_models import ProfileMixture, check_mixture
from bayeskit.models.phylogenetics._site_rates import FreeRates, GammaRates, InvariantSites, SiteRates
from bayeskit.models.phylogenetics._substitution import (
    GTR,
    HKY85,
    JC69,
    K80,
    TN93,
    Binary,
    Given,
    GTRSubmodel,
    Mk,
    OrderedMk,
    SubstitutionModel,
    VariableSites,
    check_data_type,
    empirical_frequencies,
)
from bayeskit.models.phylogenetics._variable_sites import check_variable_sites

#: The models with one process for all sites, by the names of their classes, for files of fitted posteriors.
SUBSTITUTION_MODELS: dict[str, type[SubstitutionModel]] = {
    model.__name__: model
    for model in (
        JC69,
        K80,
        HKY85,
        TN93,
        GTR,
        GTRSubmodel,
        AminoAcidModel,
        GY94,
        MG94,
        Mk,
        OrderedMk,
        Binary,
        VariableSites,
    )
}

_CLASSES: dict[str, Callable[[Given], SubstitutionModel]] = {
    "010010": lambda frequencies: HKY85(base_frequencies=frequencies),
    "010020": lambda frequencies: TN93(base_frequencies=frequencies),
    "012345": lambda frequencies: GTR(base_frequencies=frequencies),
}
_REMEDY = "Remedy: write a model and what is added to it, such as HKY85, GTR+G4, TIM2+FQ+I+G4 or LG+F+R3"


def parse_substitution(text: str, alignment: Alignment | None = None) -> tuple[SubstitutionModel, SiteRates | None]:
    """Return the substitution model and the site rates that a text such as "GTR+I+G4" names.

    Names and suffixes are those of IQ-TREE and ModelTest, in capitals or not. Parameters have their usual priors.

    Parameters
    ----------
    text : str
        A model: JC69, F81, K80, HKY85, TN93, TNe, K81, K81u, TPM2, TPM2u, TPM3, TPM3u, TIM, TIMe, TIM2, TIM2e, TIM3,
        TIM3e, TVM, TVMe, SYM, GTR, or six digits for a `GTRSubmodel`, whose exchangeabilities have the same prior
        whatever the digits (HKY85 and TN93 have one of their ratios, kappa); LG, WAG, JTT, JTTDCMut, Dayhoff, DCMut,
        mtREV, mtMAM, cpREV, Poisson; C10, C20, C30, C40, C50, C60, the profiles of a `ProfileMixture`, alone with equal
        exchangeabilities or after those of a matrix, as in LG+C20; GY94 (M0), MG94, M1a, M2a, M3 (M3K3; M3K2 to M3K5
        say how many classes); Mk.
        Then, in any order, frequencies: `+F` those of the alignment, `+FO` free, `+FQ` equal, `+F1x4` and `+F3x4` for
        codons; rates of sites: `+I` some invariant, `+G` or `+G4` Gamma-distributed in so many categories, `+R` or
        `+R4` free rates; and `+ASC` for data without constant sites (`VariableSites`; Mkv is Mk+ASC). Without such a
        suffix, base frequencies are free or, by the model, equal, those of amino acids are the published ones, those of
        codons equal, and all sites have one rate (the C20 of IQ-TREE is C20+G4).
    alignment : Alignment, optional
        Needed for `+F`, `+F1x4`, `+F3x4` and Mk, which has as many states as the alignment, with a warning where
        characters show fewer (`Partition.of_characters`). If given, its type of data must be that of the model.

    Returns
    -------
    substitution : SubstitutionModel
    site_rates : SiteRates or None

    Raises
    ------
    UnknownNameError
        If there is no such model.
    SettingsError
        If a suffix is unknown or does not fit, the alignment is needed, or its data are of another type.
    AlignmentError
        If a state never occurs whose frequency is to be that of the alignment, or a site may be constant under +ASC.

    Examples
    --------
    >>> parse_substitution("K80+G4")
    (K80(kappa=None), GammaRates(shape=None, num_categories=4, median=False))
    >>> parse_substitution("TVM")[0].partition
    '012314'
    """
    name, *suffixes = str(text).strip().split("+")
    suffixes = [suffix.upper() for suffix in suffixes]
    corrected = name.lower() == "mkv" or "ASC" in suffixes
    name = "Mk" if name.lower() == "mkv" else name
    suffixes = [suffix for suffix in suffixes if suffix != "ASC"]
    frequencies = [suffix for suffix in suffixes if suffix.startswith("F")]
    profiles = [suffix for suffix in suffixes if suffix in PROFILES]
    site_rates = _site_rates([suffix for suffix in suffixes if suffix not in frequencies + profiles], text)
    if corrected and isinstance(site_rates, InvariantSites):
        raise SettingsError(f"{text!r}: +I and +ASC exclude each other. Remedy: leave one of them out.")
    if len(frequencies) > 1:
        raise SettingsError(f"{text!r} names frequencies twice. {_REMEDY}.")
    substitution: SubstitutionModel
    if profiles:
        substitution = _profile_mixture(name, profiles, frequencies, text)
    else:
        substitution = _substitution(name, "".join(frequencies), alignment, text)
    substitution = VariableSites(substitution) if corrected else substitution
    check_mixture(substitution)
    if alignment is not None:
        check_data_type(alignment, substitution)
        check_variable_sites(alignment, substitution, site_rates)
    return substitution, site_rates


def _profile_mixture(name: str, profiles: list[str], frequencies: list[str], text: str) -> ProfileMixture:
    """Return the mixture that a matrix and profiles such as C20 name."""
    matrix = {spelling.lower(): spelling for spelling in AMINO_ACID_MATRICES}.get(name.lower())
    if matrix is None or len(profiles) > 1 or frequencies:
        raise SettingsError(
            f"{text!r}: profiles such as +{profiles[0]} follow a matrix of amino acids, without other frequencies. "
            f"{_REMEDY}."
        )
    return ProfileMixture(profiles[0], matrix)


def _site_rates(suffixes: list[str], text: str) -> SiteRates | None:
    """Return the rates of sites named by suffixes such as I and G4."""
    others: list[SiteRates] = []
    for suffix in suffixes:
        found = re.fullmatch(r"([GR])([1-9][0-9]*)?", suffix)
        if suffix != "I" and found is None:
            raise SettingsError(f"{text!r}: +{suffix} is unknown. {_REMEDY}.")
        if found is not None:
            count = int(found.group(2) or 4)
            gamma = found.group(1) == "G"
            others.append(GammaRates(num_categories=count) if gamma else FreeRates(num_categories=count))
    if len(others) > 1 or suffixes.count("I") > 1:
        raise SettingsError(f"{text!r} names rates of sites twice. {_REMEDY}.")
    rates = others[0] if others else None
    return InvariantSites(others=rates) if "I" in suffixes else rates


def _substitution(name: str, suffix: str, alignment: Alignment | None, text: str) -> SubstitutionModel:
    """Return the model with the frequencies that a suffix says."""
    known = {spelling.lower(): spelling for spelling in KNOWN_NAMES}
    if name.lower() in known:
        name = SYNONYMS.get(known[name.lower()], known[name.lower()])
    elif not re.fullmatch("[0-9]{6}", name):
        raise unknown_name("substitution model", name, MODEL_NAMES)
    fitting: tuple[str, ...] = ("", "F", "FO", "FQ")
    if name in CODON_MODELS:  # the frequencies of MG94 are those of bases
        fitting = (*(() if name == "MG94" else ("F",)), "", "FO", "FQ", "F1X4", "F3X4")
    if name in PROFILES or name == "Mk":
        fitting = ("",) if name in PROFILES else ("", "FQ")
    if suffix not in fitting:
        raise SettingsError(f"{text!r}: +{suffix} does not fit {name}. {_REMEDY}.")
    if alignment is None and (name == "Mk" or suffix in ("F", "F1X4", "F3X4")):
        raise SettingsError(f"{text!r} depends on the alignment. Remedy: give parse_substitution the alignment, too.")
    if name == "Mk":
        return _of_characters(alignment)
    if name in PROFILES:
        return ProfileMixture(name)
    if name in CODON_MODELS:
        return _of_codons(name, suffix, alignment)
    given = empirical_frequencies(alignment) if alignment is not None and suffix == "F" else None
    if name in AMINO_ACID_MATRICES:
        return AminoAcidModel(name, "own" if not suffix else [0.05] * 20 if suffix == "FQ" else given)
    return _of_bases(name, suffix, given)


def _of_codons(name: str, suffix: str, alignment: Alignment | None) -> SubstitutionModel:
    """Return a codon model, for the genetic code of the alignment."""
    code = (alignment.data_type.genetic_code if alignment is not None else "") or "standard"
    method: Literal["F1x4", "F3x4"] = "F1x4" if suffix == "F1X4" else "F3x4"
    if name == "MG94":
        bases: Given = None if suffix == "FO" else [0.25] * 4
        if alignment is not None and suffix in ("F1X4", "F3X4"):
            bases = place_frequencies(alignment, method).flatten()
        return MG94(base_frequencies=bases, genetic_code=code)
    given: Given | str = None if suffix == "FO" else "equal"
    if alignment is not None and suffix == "F":
        given = empirical_frequencies(alignment)
    elif alignment is not None and suffix in ("F1X4", "F3X4"):
        given = codon_frequencies(alignment, method)
    if name.startswith("M3K"):
        return M3(classes=int(name.removeprefix("M3K")), codon_frequencies=given, genetic_code=code)
    if name == "GY94":
        return GY94(codon_frequencies=given, genetic_code=code)
    return (M1a if name == "M1a" else M2a)(codon_frequencies=given, genetic_code=code)


def _of_characters(alignment: Alignment | None) -> Mk:
    """Return the model of as many states as the alignment has; warn if some characters show fewer."""
    if alignment is None or alignment.data_type.name != "standard":
        return Mk(2)
    number = alignment.data_type.num_states
    fewer = np.maximum(alignment.num_states_shown, 2) < number
    if fewer.any():
        warn_user(
            f"{int(fewer.sum())} of {len(fewer)} characters show fewer than {number} states, and Mk gives each of them "
            f"{number}. Remedy: Partition.of_characters(alignment) gives each the states that it shows.",
            DataWarning,
        )
    return Mk(number)


def _of_bases(name: str, suffix: str, given: Given) -> SubstitutionModel:
    """Return a submodel of GTR, as a class of its own where one has the name."""
    partition, equal = SIX_RATES.get(name, (name, False))
    partition = GTRSubmodel(partition).partition
    if suffix == "FQ" or (equal and not suffix):
        if partition == "000000":
            return JC69()
        if partition == "010010" and name in SIX_RATES:
            return K80()
        given = [0.25] * 4
    if partition in _CLASSES and name in SIX_RATES:
        return _CLASSES[partition](given)
    return GTRSubmodel(partition, base_frequencies=given)
