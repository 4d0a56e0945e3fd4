"""Names of substitution models, known without an import of torch."""

#: Partitions of the six rates by name, and whether base frequencies are equal where the name alone is given.
SIX_RATES = {
    "JC69": ("000000", True),
    "F81": ("000000", False),
    "HKY85": ("010010", False),
    "K80": ("010010", True),
    "TN93": ("010020", False),
    "TNe": ("010020", True),
    "K81": ("012210", True),
    "K81u": ("012210", False),
    "TPM2": ("010212", True),
    "TPM2u": ("010212", False),
    "TPM3": ("012012", True),
    "TPM3u": ("012012", False),
    "TIM": ("012230", False),
    "TIMe": ("012230", True),
    "TIM2": ("010232", False),
    "TIM2e": ("010232", True),
    "TIM3": ("012032", False),
    "TIM3e": ("012032", True),
    "TVM": ("012314", False),
    "TVMe": ("012314", True),
    "SYM": ("012345", True),
    "GTR": ("012345", False),
}
AMINO_ACID_MATRICES = ("LG", "WAG", "JTT", "JTTDCMut", "Dayhoff", "DCMut", "mtREV", "mtMAM", "cpREV", "Poisson")
#: Sets of stationary frequencies of classes of sites.
PROFILES = ("C10", "C20", "C30", "C40", "C50", "C60")
CODON_MODELS = ("GY94", "MG94", "M1a", "M2a", "M3K2", "M3K3", "M3K4", "M3K5")
#: Names that other programs have for the same models.
SYNONYMS = {
    **{"JC": "JC69", "K2P": "K80", "HKY": "HKY85", "TN": "TN93", "TrN": "TN93", "TrNe": "TNe", "TrNef": "TNe"},
    **{"K3P": "K81", "TPM1": "K81", "K3Pu": "K81u", "TPM1u": "K81u", "K81uf": "K81u", "TPM1uf": "K81u"},
    **{"TPM2uf": "TPM2u", "TPM3uf": "TPM3u", "TIM1": "TIM", "TIM1e": "TIMe", "TIM1ef": "TIMe", "TIM2ef": "TIM2e"},
    **{"TIM3ef": "TIM3e", "TVMef": "TVMe", "GY": "GY94"},
    **{"M0": "GY94", "MG": "MG94", "M3": "M3K3"},
}
MODEL_NAMES = (*SIX_RATES, *AMINO_ACID_MATRICES, *PROFILES, *CODON_MODELS, "Mk")
KNOWN_NAMES = (*MODEL_NAMES, *SYNONYMS)
