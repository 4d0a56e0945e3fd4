"""Latent Gaussian models: fields, random walks and random effects, to be integrated out by ``bk.marginalize``."""

from bayeskit.models.latent_gaussian._fields import (
    AreaGraph,
    bym2,
    icar,
    matern_32,
    matern_52,
    random_walk,
    squared_exponential,
)
from bayeskit.models.latent_gaussian._likelihoods import (
    BinomialLikelihood,
    NegativeBinomialLikelihood,
    NormalLikelihood,
    PoissonLikelihood,
)
from bayeskit.models.latent_gaussian._lip_cancer import scottish_lip_cancer
from bayeskit.models.latent_gaussian._models import DiseaseMap, GaussianProcessModel, RandomEffects, RandomWalkModel
from bayeskit.models.latent_gaussian._priors import PCLength, PCProportion, PCScale

__all__ = [
    "AreaGraph",
    "BinomialLikelihood",
    "DiseaseMap",
    "GaussianProcessModel",
    "NegativeBinomialLikelihood",
    "NormalLikelihood",
    "PCLength",
    "PCProportion",
    "PCScale",
    "PoissonLikelihood",
    "RandomEffects",
    "RandomWalkModel",
    "bym2",
    "icar",
    "matern_32",
    "matern_52",
    "random_walk",
    "scottish_lip_cancer",
    "squared_exponential",
]
