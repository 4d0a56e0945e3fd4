"""The exact evidence of a hidden Markov model of categories, by summing over all sequences of states."""

from __future__ import annotations

import torch
from torch import Tensor

from bayeskit._inputs import as_numbers
from bayeskit._settings import whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.sequences.hidden_markov_model import CategoricalEmission, HiddenMarkovModel


def categorical_log_evidence(model: HiddenMarkovModel, observations: Tensor, limit: int = 2**20) -> float:
    """Return the exact log evidence of a few short sequences of categories: the twin of :class:`HiddenMarkovModel`.

    Given the states, all parameters are integrated out by conjugacy; the states are enumerated.

    Parameters
    ----------
    model : HiddenMarkovModel
        With :class:`CategoricalEmission`.
    observations : Tensor or array of int
        Shape ``(sequences, T)`` or ``(T,)``.
    limit : int, default 2**20
        The largest number of joint sequences of states.

    Raises
    ------
    SettingsError
        If the emission is of another kind, or there are more sequences of states; the message says how many.
    ShapeError
        If ``observations`` has another shape.
    DataError
        If an observation is no category.

    References
    ----------
    Minka, T. (2000). Estimating a Dirichlet distribution. Technical report, MIT. (The integral over probabilities.)

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.sequences import (
    ...     CategoricalEmission, HiddenMarkovModel, categorical_log_evidence)
    >>> model = HiddenMarkovModel(2, CategoricalEmission(2))
    >>> round(categorical_log_evidence(model, torch.tensor([0, 0, 1])), 6)
    -2.330756
    """
    emission = model.emission
    if not isinstance(emission, CategoricalEmission):
        raise SettingsError(f"the emission is {emission!r}; the exact evidence is known for CategoricalEmission only")
    observations = as_numbers("observations", observations)
    observations = observations.unsqueeze(0) if observations.dim() == 1 else observations
    if observations.dim() != 2 or not observations.numel():
        raise ShapeError(f"observations has shape {tuple(observations.shape)}; give (sequences, T) or (T,)")
    if not bool(torch.isin(observations, torch.arange(emission.num_categories, device=observations.device)).all()):
        raise DataError(f"observations must be categories, whole numbers from 0 to {emission.num_categories - 1}")
    states, size = model.num_states, observations.numel()
    if states**size > whole_number("limit", limit, least=1):
        raise SettingsError(
            f"there are {states}**{size} = {states**size} sequences of states, which exceed limit={limit}; give "
            "shorter sequences, or estimate the evidence with bayeskit.inference.evidence"
        )
    digits = states ** torch.arange(size)
    paths = torch.arange(states**size).unsqueeze(1) // digits % states
    paths = paths.reshape(-1, *observations.shape)
    rows = torch.full((states, states), model.transition_concentration, dtype=torch.float64)
    rows = rows + model.stay * torch.eye(states, dtype=torch.float64)
    first = torch.full((states,), model.initial_concentration, dtype=torch.float64)
    seen = torch.full((states, emission.num_categories), emission.concentration, dtype=torch.float64)
    one_hot = torch.nn.functional.one_hot(paths, states).double()
    categories = torch.nn.functional.one_hot(observations.cpu().long(), emission.num_categories).double()
    moved = torch.einsum("psti,pstj->pij", one_hot[:, :, :-1], one_hot[:, :, 1:])
    emitted = torch.einsum("psti,stc->pic", one_hot, categories)
    log_joint = _log_moment(one_hot[:, :, 0].sum(1), first)
    log_joint = log_joint + _log_moment(moved, rows).sum(-1) + _log_moment(emitted, seen).sum(-1)
    return float(log_joint.logsumexp(0))


def _log_moment(counts: Tensor, concentration: Tensor) -> Tensor:
    """Return the log of the mean of the product of probabilities to the power of counts, over the last dimension."""
    powers = (torch.lgamma(counts + concentration) - torch.lgamma(concentration)).sum(-1)
    total = concentration.sum(-1)
    return powers + torch.lgamma(total) - torch.lgamma(total + counts.sum(-1))
