"""Mixtures whose number of components is unknown."""

from __future__ import annotations

from collections.abc import Mapping

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit.draws import Draws
from bayeskit.errors import SettingsError, ShapeError
from bayeskit.models.discrete.inputs import site_values
from bayeskit.models.discrete.mixtures.gaussian_mixture import GaussianMixture


class UnknownSizeMixture:
    """Create a mixture of at most as many components as another has, their number summed out like the assignments.

    Of the gamma variables ``share`` the first ``K`` make the weights of ``K`` components, which are Dirichlet for
    every ``K``; the parameters of the others come from the prior. The evidence is the mean of those of all ``K`` under
    their prior, and one run gives their posterior. The components are not exchangeable here.

    Parameters
    ----------
    mixture : GaussianMixture
        Of the largest number of components, two or more, with means that are not ordered.
    probabilities : Tensor or array, optional
        Prior of ``1, ..., K`` components, shape ``(K,)``; by default uniform.

    Raises
    ------
    SettingsError
        If the mixture has one component or ordered means, or a probability is negative or not finite.
    ShapeError
        If there are not as many probabilities as components.

    Examples
    --------
    >>> import bayeskit as bk
    >>> from bayeskit.models.discrete.mixtures import GaussianMixture, UnknownSizeMixture, galaxy_velocities
    >>> model = UnknownSizeMixture(GaussianMixture(galaxy_velocities(), num_components=6))
    >>> bk.Target.from_pyro(model).dim
    19
    """

    def __init__(self, mixture: GaussianMixture, probabilities: Tensor | None = None) -> None:
        count = mixture.num_components
        if count < 2 or mixture.ordered:
            raise SettingsError("give a mixture of two or more components whose means are not ordered")
        uniform = torch.full((count,), 1 / count, dtype=mixture.y.dtype, device=mixture.y.device)
        given = uniform if probabilities is None else as_numbers("probabilities", probabilities).to(uniform)
        if given.shape != uniform.shape:
            raise ShapeError(f"probabilities have shape {tuple(given.shape)}; give one for each of {count} components")
        if not bool((given >= 0).all() and given.isfinite().all() and given.sum() > 0):
            raise SettingsError(f"probabilities must be nonnegative, some above zero, not {given.tolist()}")
        self.mixture, self.probabilities = mixture, given / given.sum()

    def __call__(self) -> None:
        """Run the model."""
        mixture = self.mixture
        values = mixture.sample_parameters()
        correlation = values.get("correlation")
        slots = torch.arange(mixture.num_components, device=mixture.y.device)
        last = pyro.sample("last", dist.Categorical(self.probabilities), infer={"enumerate": "parallel"})
        absent = slots > last.unsqueeze(-1)
        with pyro.plate("data", len(mixture.y)):
            weights = dist.Categorical(logits=values["share"].log().masked_fill(absent, -torch.inf))
            z = pyro.sample("assignment", weights, infer={"enumerate": "parallel"})
            component = mixture.component(
                values["mean"][z],
                values["precision"] if mixture.equal_scales else values["precision"][z],
                None if correlation is None else correlation[z],
            )
            pyro.sample("y", component, obs=mixture.y)

    def __repr__(self) -> str:
        return f"UnknownSizeMixture({self.mixture!r})"

    def size_probabilities(self, values: Draws | Mapping[str, Tensor]) -> Tensor:
        """Return the probability of ``1, ..., K`` components given parameters and data.

        Its mean over posterior draws is the posterior of the number of components.

        Parameters
        ----------
        values : Draws or mapping of str to Tensor
            Draws, or the sites, ``{site: (*batch, *shape)}``.

        Returns
        -------
        Tensor
            Shape ``(*batch, K)``.
        """
        values = site_values(values)
        joint = self.mixture.log_component_density(values, self.mixture.y)  # (*batch, n, K)
        share = values["share"].log()
        normalised = share - share.logsumexp(-1, keepdim=True)
        each = joint.logcumsumexp(-1) - normalised.logcumsumexp(-1).unsqueeze(-2)
        return (each.sum(-2) + self.probabilities.log()).softmax(-1)
