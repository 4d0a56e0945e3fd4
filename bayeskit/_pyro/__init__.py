"""The one adapter that reads Pyro models; nothing outside this folder sees Pyro's runtime."""

from bayeskit._pyro.density import PyroDensity, Site
from bayeskit._pyro.inspection import own_words, place_of, tensors_in

__all__ = ["PyroDensity", "Site", "own_words", "place_of", "tensors_in"]
