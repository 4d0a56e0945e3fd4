"""What can be said of topologies by their weights alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

from bayeskit.errors import SettingsError
from bayeskit.models.phylogenetics.trees.topologies import Topologies

if TYPE_CHECKING:
    import pandas as pd


class RankedTopologies(ABC):
    """Distinct topologies in the order of their weights; a `TreeSample` is one.

    Attributes
    ----------
    topologies : Topologies
        Each once.
    """

    topologies: Topologies

    @property
    @abstractmethod
    def weights(self) -> np.ndarray:
        """Weight of each topology, shape `(topologies,)`, float64; they sum to one."""

    def top(self, count: int) -> np.ndarray:
        """Return the most probable topologies as positions in `topologies`, the most probable first.

        Parameters
        ----------
        count : int
            How many, at most.

        Returns
        -------
        ndarray
            Shape `(count,)`, int64; of equal weights those that appeared first.

        Raises
        ------
        SettingsError
            If `count` is below one.
        """
        if count < 1:
            raise SettingsError(f"count={count}. Remedy: ask for at least one topology.")
        return np.argsort(-self.weights, kind="stable")[:count]

    def credible_set(self, level: float = 0.95) -> np.ndarray:
        """Return the fewest topologies that have at least a given probability together.

        Parameters
        ----------
        level : float, default 0.95
            The probability, above 0 and at most 1.

        Returns
        -------
        ndarray
            Their positions in `topologies`, the most probable first, int64.

        Raises
        ------
        SettingsError
            If `level` is outside its domain.

        Examples
        --------
        >>> from bayeskit.models.phylogenetics.samples.tree_sample import TreeSample
        >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
        >>> sample = TreeSample.from_topologies(all_topologies("ABCD"), [1, 6, 3])
        >>> chosen = sample.credible_set(0.9)
        >>> chosen.tolist(), sample.weights[chosen].tolist(), len(sample.topologies[chosen])
        ([1, 2], [0.6, 0.3], 2)
        """
        if not 0 < level <= 1:
            raise SettingsError(f"level={level} is no probability. Remedy: give a number above 0 and at most 1.")
        order = self.top(len(self.weights))
        # The sum of all weights, too, is one only up to rounding.
        return order[: 1 + int(np.searchsorted(np.cumsum(self.weights[order]), level - 1e-12))]

    @property
    def most_probable(self) -> Topologies:
        """The topology of the largest weight."""
        return self.topologies[self.top(1)]

    def to_pandas(self) -> pd.DataFrame:
        """Return a table, a row for each topology, the most probable first.

        Returns
        -------
        DataFrame
            Columns `topology` (its position in `topologies`), `weight`, `cumulative` (the weights added up) and
            `newick` (without branch lengths).

        Examples
        --------
        >>> from bayeskit.models.phylogenetics.samples.tree_sample import TreeSample
        >>> from bayeskit.models.phylogenetics.trees.enumeration import all_topologies
        >>> TreeSample.from_topologies(all_topologies("ABCD"), [1, 6, 3]).to_pandas().round(3)
           topology  weight  cumulative        newick
        0         1     0.6         0.6  (A,D,(B,C));
        1         2     0.3         0.9  (A,B,(C,D));
        2         0     0.1         1.0  (A,C,(B,D));
        """
        import pandas as pd

        order = self.top(len(self.weights))
        weights = self.weights[order]
        newick = [self.topologies.to_newick(place) for place in order.tolist()]
        return pd.DataFrame({"topology": order, "weight": weights, "cumulative": weights.cumsum(), "newick": newick})
