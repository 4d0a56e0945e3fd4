"""The likelihood of a target, one observation at a time."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from bayeskit._pyro import PyroDensity
from bayeskit._pyro.likelihood_parts import FactorTerms, likelihood_parts
from bayeskit._torch import new_generator, one_thread
from bayeskit.errors import ModelError
from bayeskit.target import Target

PROBES = 2
REMEDY = "give every part of the likelihood a site of its own"


class Observations:
    """The data of a target, and how likely each is.

    Observations that are alike, such as sites of one pattern in an alignment, may share a term.

    Parameters
    ----------
    target : Target
        Made from a Pyro model whose observed sites are the data, or from one that tells what its ``pyro.factor``
        adds up, as :class:`~bayeskit.models.phylogenetics.TreeModel` does.

    Attributes
    ----------
    counts : Tensor
        Observations of each term, ``(n,)``, float64.

    Raises
    ------
    ModelError
        If the likelihood is not a sum of one known term for each observation, or its terms are losses instead of log
        densities.

    Examples
    --------
    >>> import torch, bayeskit as bk
    >>> target = bk.exact.get("linreg10").target()
    >>> observations = Observations(target)
    >>> observations.log_likelihood(torch.zeros(3, 10, dtype=torch.float64)).shape
    torch.Size([3, 50])
    """

    def __init__(self, target: Target) -> None:
        _refuse_loss(target)
        self._target = target
        self._factors, self._model = _factors(target)
        density = target._density
        self._all_are_factors = isinstance(density, PyroDensity) and set(density.observed_sites) == set(self._factors)
        generator = new_generator(0, stream="probes of the likelihood")
        probe = torch.randn(PROBES, target.dim, generator=generator, dtype=torch.float64).to(target.dtype)
        probe = probe.to(target.device)
        terms, counts = self._evaluate(probe)
        self.counts = torch.cat(counts)
        check_sum(torch.cat(terms, -1).to(torch.float64) @ self.counts, target.log_likelihood(probe), REMEDY)

    def log_likelihood(self, u: Tensor) -> Tensor:
        """Return the log likelihood of one observation of each term, ``(m, d) -> (m, n)``, float64."""
        return torch.cat(self._evaluate(u)[0], -1).to(torch.float64)

    def _evaluate(self, u: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        terms, counts = [], []
        if self._model is not None:
            with one_thread():
                found = self._model.factor_terms(self._target.constrain(u))
            for name in self._factors:
                terms.append(found[name][0])
                counts.append(found[name][1].to(u.device, torch.float64))
        others = {} if self._all_are_factors else self._target.pointwise_log_likelihood(u)
        for each in (x.reshape(len(x), -1) for name, x in others.items() if name not in self._factors):
            terms.append(each)
            counts.append(torch.ones(each.shape[1], dtype=torch.float64, device=u.device))
        return terms, counts


def refuses(target: Target) -> str | None:
    """Return why the observations of ``target`` cannot be scored one by one, or None where they can."""
    try:
        Observations(target)
    except ModelError as error:
        return str(error)
    return None


def _factors(target: Target) -> tuple[tuple[str, ...], FactorTerms | None]:
    """Return the factors of a Pyro model and who tells what they add up; refuse what is no density of single data."""
    if not isinstance(target._density, PyroDensity):
        return (), None
    parts = likelihood_parts(target._density)
    if parts.scaled:
        raise ModelError(
            f"{_quoted(parts.scaled)} is scaled by poutine.scale, so its terms are powers of predictive densities; "
            "remove the scale, and repeat observations that occur more than once"
        )
    if parts.factors and parts.model is None:
        raise ModelError(
            f"the factor {_quoted(parts.factors)} is one term for all data, so single observations cannot be scored; "
            "replace it by pyro.sample(..., obs=data) in a plate, or give the model a method factor_terms"
        )
    return parts.factors, parts.model if parts.factors else None


def _refuse_loss(target: Target) -> None:
    # Here, for that package takes log likelihoods of single data from this one.
    from bayeskit.inference.generalized.losses import NegativeLogLikelihood
    from bayeskit.inference.generalized.posterior import GibbsPosterior

    model = target._density._model if isinstance(target._density, PyroDensity) else None
    if isinstance(model, GibbsPosterior) and not (isinstance(model.loss, NegativeLogLikelihood) and model.weight == 1):
        raise ModelError(
            f"exp(-{model.weight:g} {type(model.loss).__name__}) is no density of the data, so it predicts none; "
            "compare models by the loss on held-out data, or take NegativeLogLikelihood with weight 1"
        )


def check_sum(total: Tensor, expected: Tensor, remedy: str, names: Iterable[str] = ()) -> None:
    """Refuse terms of a likelihood that do not add up to it.

    Parameters
    ----------
    total, expected : Tensor
        Sums of the terms and whole log likelihoods at some vectors, ``(m,)`` each.
    remedy : str
    names : iterable of str
        Observed sites, for the message.

    Raises
    ------
    ModelError
        If they differ at a vector where both are finite.
    """
    comparable = total.isfinite() & expected.isfinite()
    tolerance = 1e-3 if torch.float32 in (total.dtype, expected.dtype) else 1e-8
    off = (total - expected).abs() > tolerance * (1 + expected.abs())
    if bool((off & comparable).any()):
        of = _quoted(names)
        raise ModelError(
            f"the log likelihoods of the observations{' of ' + of if of else ''} do not add up to the whole, so "
            f"data cannot be taken one by one; {remedy}"
        )


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))
