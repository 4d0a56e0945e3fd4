"""Training of unnormalised models: noise contrast, persistent contrastive divergence and score matching."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.functional import cross_entropy, softplus

from bayeskit.errors import AccuracyWarning, DataError, LossError, ModelError, SettingsError
from bayeskit.extend import (
    HMC,
    Fit,
    Objective,
    fit,
    new_generator,
    real_number,
    score_matching,
    warn_user,
    whole_number,
)
from bayeskit.models.unnormalised._moves import Unnormalised, base_metric, move, require_vectors


class EnergyObjective(Objective):
    """Base class of objectives for unnormalised models, for :func:`fit_energy` and :func:`bayeskit.fit`.

    With classes, the loss is that of the inputs plus ``class_weight`` times the cross entropy of the logits, so the
    joint density of inputs and classes is trained.

    Parameters
    ----------
    class_weight : float, default 1.0
        Not negative.

    Raises
    ------
    SettingsError
        If ``class_weight`` is negative.

    Examples
    --------
    Maximum likelihood with the constant from a list of states is an objective of one method:

    >>> import torch
    >>> from bayeskit.models.unnormalised import EnergyObjective
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> class MaximumLikelihood(EnergyObjective):
    ...     def of_inputs(self, model, x):
    ...         return len(x) * model.exact_log_normaliser() - model.log_density(x).sum()
    >>> model = EnergyModel.of_bits(lambda x: 0 * x.sum(-1), 3)
    >>> round(MaximumLikelihood().loss(model, None, model.base.sample((4,))) / 4, 6)  # 3 log 2
    2.079442
    """

    def __init__(self, class_weight: float = 1.0) -> None:
        super().__init__(max_plate_nesting=0)
        self.class_weight = real_number("class_weight", class_weight, "[0, inf)")

    @abstractmethod
    def of_inputs(self, model: Unnormalised, x: Tensor) -> Tensor:
        """Return the loss of inputs ``(n, d)``, a scalar, summed over them."""

    def differentiable_loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss of inputs, or of inputs and their classes."""
        x, *classes = (*args, *kwargs.values())
        loss = self.of_inputs(model, x)
        if classes:
            loss = loss + self.class_weight * cross_entropy(model.logits(x), classes[0], reduction="sum")
        return loss

    def loss(self, model: Any, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Return the loss as a number; LossError if it is not finite."""
        with torch.no_grad():
            value = float(self.differentiable_loss(model, guide, *args, **kwargs))
        if not math.isfinite(value):
            raise LossError(
                f"the loss of {type(self).__name__} is {value}: the energy is not finite; lower the learning rate"
            )
        return value

    def estimate(self, draw: Any) -> NoReturn:
        """Refuse: the loss has no particles."""
        raise NotImplementedError(f"{type(self).__name__} has no particles; call differentiable_loss")


# Noise contrast.


class _WithNoise(EnergyObjective):
    """Objective that compares data with draws of a noise distribution."""

    def __init__(
        self, ratio: int = 5, noise: Distribution | None = None, *, redraw: bool = True, class_weight: float = 1.0
    ) -> None:
        super().__init__(class_weight)
        self.ratio = whole_number("ratio", ratio, least=1)
        self.noise, self.redraw = noise, bool(redraw)
        if noise is not None and (
            not isinstance(noise, Distribution) or noise.batch_shape or len(noise.event_shape) != 1
        ):
            raise SettingsError("noise must be a distribution of one vector; wrap it in Independent(noise, 1)")
        self.reset()

    def reset(self) -> None:
        """Forget the noise."""
        self._drawn = torch.empty(0)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the noise that is kept, if it is."""
        return {"noise": self._drawn.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self._drawn = state["noise"].clone()

    def _log_ratios(self, model: Unnormalised, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the log density over that of the noise at data ``(n,)`` and at noise ``(n, ratio)``."""
        require_vectors("data", x, model)
        count = self.ratio * len(x)
        drawn = self._drawn
        if self.redraw or len(drawn) != count:
            with torch.no_grad():
                drawn = (self.noise or model.base).sample((count,))
            self._drawn = self._drawn if self.redraw else drawn
        both = torch.cat([x, drawn.to(x)])
        ratio = model.log_ratio(both) if self.noise is None else model.log_density(both) - self.noise.log_prob(both)
        return ratio[: len(x)], ratio[len(x) :].reshape(len(x), self.ratio)


class NoiseContrastive(_WithNoise):
    r"""Noise-contrastive estimation: logistic regression of data against noise, with the log constant as a parameter.

    Its log odds are :math:`\log f(x) - c - \log q(x) - \log \nu`, with :math:`\nu` noise draws a datum. At the maximum,
    :math:`c`, the model's ``log_constant``, estimates :math:`\log Z`; with all else fixed it is the optimal bridge, see
    :func:`noise_contrastive_constant`. The variance tends to that of maximum likelihood as :math:`\nu` grows, if the
    noise covers the model.

    Parameters
    ----------
    ratio : int, default 5
        Noise draws a datum, :math:`\nu`, at least 1.
    noise : Distribution, optional
        With event shape ``(d,)``; the base by default.
    redraw : bool, default True
        Draw noise anew at each step. With False it is drawn once, so that the loss of the whole data is a fixed
        function of the parameters.
    class_weight : float, default 1.0
        As in :class:`EnergyObjective`.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Gutmann, M. U., Hyvarinen, A. (2012). Noise-contrastive estimation of unnormalized statistical models, with
    applications to natural image statistics. JMLR 13, 307-361.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.unnormalised import NoiseContrastive
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> model = EnergyModel.of_bits(lambda x: 0 * x.sum(-1), 3)  # all ratios are those of the constant, 3 log 2
    >>> x = model.base.sample((4,))
    >>> with torch.no_grad(): _ = model.log_constant.fill_(3 * 0.6931471806)
    >>> round(NoiseContrastive(1).loss(model, None, x) / 8, 6)  # a coin cannot do better than log 2
    0.693147
    """

    def of_inputs(self, model: Any, x: Tensor) -> Tensor:
        """Return the logistic loss of data and noise."""
        of_data, of_noise = self._log_ratios(model, x)
        offset = model.log_constant + math.log(self.ratio)
        return softplus(offset - of_data).sum() + softplus(of_noise - offset).sum()


class RankingNoiseContrastive(_WithNoise):
    r"""Ranking noise contrast: which of ``ratio + 1`` vectors is the datum, the others being noise.

    The loss is the cross entropy of the softmax of :math:`\log f - \log q`. The constant cancels, so that none is
    learnt, and classifiers whose constant depends on a context can be trained.

    Parameters
    ----------
    ratio, noise, redraw, class_weight
        As in :class:`NoiseContrastive`.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.

    References
    ----------
    Ma, Z., Collins, M. (2018). Noise contrastive estimation and negative sampling for conditional models: consistency
    and statistical efficiency. EMNLP.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.unnormalised import RankingNoiseContrastive
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> model = EnergyModel.of_bits(lambda x: 0 * x.sum(-1), 3)
    >>> x = model.base.sample((4,))
    >>> round(RankingNoiseContrastive(3).loss(model, None, x) / 4, 6)  # log 4
    1.386294
    """

    def of_inputs(self, model: Unnormalised, x: Tensor) -> Tensor:
        """Return the cross entropy of the datum among its noise."""
        of_data, of_noise = self._log_ratios(model, x)
        return (torch.cat([of_data.unsqueeze(1), of_noise], 1).logsumexp(1) - of_data).sum()


# Contrastive divergence with chains that persist.

_FAR, _TARGET_ACCEPTANCE, _RATE = 1e3, 0.8, 0.2


class PersistentContrastiveDivergence(EnergyObjective):
    """Stochastic maximum likelihood: data against Markov chains of the model that go on from step to step.

    The gradient is the mean over data minus the mean over chains of that of the log density. The value of the loss is
    the difference of the two means, which is near zero throughout and says nothing about convergence; the likelihood
    does, by :func:`log_normaliser`. Chains start at the base, and move by Hamiltonian Monte Carlo with a learnt step
    size or, for binary vectors, by Gibbs sweeps.

    Parameters
    ----------
    num_chains : int, default 128
    num_moves : int, default 1
        Moves of each chain a step.
    kernel : HMC, optional
        For real vectors; by default 5 steps in the metric of a normal base.
    max_gap : float, default 1e4
        Difference of the mean log densities of data and chains, in nats, beyond which training ends.
    class_weight : float, default 1.0
        As in :class:`EnergyObjective`.

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    LossError
        When run, if chains diverge: they are not finite, a thousand spreads of base and data away, or beyond
        ``max_gap``.

    References
    ----------
    Younes, L. (1989). Parametric inference for imperfectly observed Gibbsian fields. Probability Theory and Related
    Fields 82, 625-645.

    Tieleman, T. (2008). Training restricted Boltzmann machines using approximations to the likelihood gradient. ICML.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.unnormalised import PersistentContrastiveDivergence, fit_energy
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> energy = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Flatten(0)).double()
    >>> model = EnergyModel.of_bits(energy, 2)
    >>> x = torch.tensor([[1.0, 0.0]] * 7 + [[0.0, 1.0]] * 3, dtype=torch.float64)
    >>> fitted = fit_energy(model, x, objective=PersistentContrastiveDivergence(500), num_steps=300, progress=False)
    >>> bool(((-energy[0].weight).sigmoid() - x.mean(0)).abs().max() < 0.1)  # independent bits: the shares of ones
    True
    """

    def __init__(
        self,
        num_chains: int = 128,
        num_moves: int = 1,
        *,
        kernel: HMC | None = None,
        max_gap: float = 1e4,
        class_weight: float = 1.0,
    ) -> None:
        super().__init__(class_weight)
        self.num_chains = whole_number("num_chains", num_chains, least=2)
        self.num_moves = whole_number("num_moves", num_moves, least=1)
        self.kernel, self.max_gap = kernel, real_number("max_gap", max_gap, "(0, inf)")
        self.reset()

    @property
    def is_moving(self) -> bool:
        """True: the chains move during training."""
        return True

    def reset(self) -> None:
        """Forget the chains and the step size."""
        self._chains = torch.empty(0)
        self._log_step = torch.tensor(math.log(0.2), dtype=torch.float64)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the chains and the log of their step size."""
        return {"chains": self._chains.clone(), "log_step": self._log_step.clone()}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        self._chains, self._log_step = state["chains"].clone(), state["log_step"].clone()

    @property
    def chains(self) -> Tensor:
        """Positions of the chains, ``(num_chains, d)``, empty before training."""
        return self._chains

    def of_inputs(self, model: Unnormalised, x: Tensor) -> Tensor:
        """Return the difference of the mean log densities of chains and data, times the number of data."""
        require_vectors("data", x, model)
        chains = self._moved(model, x)
        of_data, of_chains = model.log_density(x).mean(), model.log_density(chains).mean()
        gap = float((of_chains - of_data).detach())
        if not abs(gap) <= self.max_gap:
            raise _diverged(f"the mean log densities of chains and data differ by {gap:.3g} nats")
        return (of_chains - of_data) * len(x)

    def _moved(self, model: Unnormalised, x: Tensor) -> Tensor:
        chains, log_step = self._chains, self._log_step
        if not len(chains):
            with torch.no_grad():
                chains = model.base.sample((self.num_chains,)).to(x)
        # Fit has set torch's stream from its seed.
        generator = new_generator(int(torch.randint(2**62, ())), x.device)
        kernel = self.kernel or HMC(num_steps=5, metric=base_metric(model))
        for _ in range(self.num_moves):
            chains, _, rate = move(model, chains, 1.0, kernel, float(log_step.exp()), generator)
            if not model.is_binary:
                log_step = log_step + _RATE * (rate - _TARGET_ACCEPTANCE)
        if not bool(chains.isfinite().all()):
            raise _diverged("chains are not finite")
        if not model.is_binary:
            centre = x.median(0).values
            spread = (torch.cat([x, model.base.sample((100,)).to(x)]) - centre).abs().mean()
            distance = float((chains - centre).abs().amax(1).median() / spread)
            if distance > _FAR:
                raise _diverged(f"half of the chains are {distance:.3g} spreads of base and data away")
        if torch.is_grad_enabled():
            self._chains, self._log_step = chains, log_step
        return chains


def _diverged(what: str) -> LossError:
    return LossError(
        f"the chains of persistent contrastive divergence diverge: {what}. Remedy: let the base be a factor of the "
        "density with tilt=True, lower the learning rate, or take more moves a step"
    )


# Score matching.


#: Parts whose slope jumps: their second derivative is zero wherever it exists.
_KINKED = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink),
    *(nn.Softshrink, nn.Threshold, nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
)


class ScoreMatchingObjective(EnergyObjective):
    """Score matching, for real vectors: no normalising constant, no noise, and no chains.

    The loss is :class:`~bayeskit.inference.generalized.losses.ScoreMatching` of the model's log density. A step costs
    ``d`` derivatives of the gradient. Shares of distant modes hardly enter the score, so they are not learnt. The loss
    is right for energies with continuous slopes and for densities that vanish at the bounds of the data: it does not
    see the kinks of ``|x|`` or of a ReLU, and parts with kinks are refused with ``ModelError``.

    Parameters
    ----------
    class_weight : float, default 1.0
        As in :class:`EnergyObjective`.

    References
    ----------
    Hyvarinen, A. (2005). Estimation of non-normalized statistical models by score matching. JMLR 6, 695-709.

    Examples
    --------
    >>> import torch
    >>> from torch.distributions import Independent, Normal
    >>> from bayeskit.models.unnormalised import ScoreMatchingObjective
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> model = EnergyModel(lambda x: 0.5 * x.square().sum(-1), Independent(Normal(torch.zeros(2), 1.0), 1))
    >>> ScoreMatchingObjective().loss(model, None, torch.tensor([[0.0, 0.0], [2.0, 1.0]]))  # x'x / 2 - 2, summed
    -1.5
    """

    def of_inputs(self, model: Unnormalised, x: Tensor) -> Tensor:
        """Return the sum of the losses of data."""
        require_vectors("data", x, model)
        if model.is_binary:
            raise SettingsError(
                "score matching differentiates by the data, and bits have no derivative; take noise contrast"
            )
        parts = model.modules() if isinstance(model, nn.Module) else ()
        if (part := next((part for part in parts if isinstance(part, _KINKED)), None)) is not None:
            raise ModelError(
                f"the energy has a part {type(part).__name__}, whose slope jumps where score matching does not see it; "
                "take Softplus, SiLU or Tanh, or NoiseContrastive()"
            )
        return score_matching(torch.func.grad(lambda rows: model.log_density(rows).sum()), x).sum()


# The call.


def _no_latents(*_: Any) -> None:
    """Do nothing: an energy model has no latent variables and needs no guide."""


def fit_energy(
    model: nn.Module,
    x: Tensor,
    y: Tensor | None = None,
    *,
    objective: EnergyObjective | None = None,
    num_steps: int = 1000,
    batch_size: int | None = None,
    learning_rate: float = 0.01,
    gradient_clipping: float | None = None,
    checkpoint: str | Path | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Fit:
    """Train an energy model in place by :func:`bayeskit.fit`, which has more settings.

    ``bk.fit(model, lambda *_: None, objective, x, ...)`` is the same with any optimizer, schedule and validation data.

    Parameters
    ----------
    model : EnergyModel
    x : Tensor
        Data, ``(n, d)``.
    y : Tensor, optional
        Classes, ``(n,)``, whole numbers, for a model made by ``EnergyModel.from_classifier``.
    objective : EnergyObjective, optional
        :class:`NoiseContrastive` by default.
    num_steps : int, default 1000
    batch_size : int, optional
        All data by default.
    learning_rate : float, default 0.01
        Of Adam.
    gradient_clipping : float, optional
        Largest norm of the gradient a datum.
    checkpoint : path, optional
        File from which the same call resumes.
    seed : int, default 0
    progress : bool, default True

    Returns
    -------
    Fit
        ``losses`` are per datum. Only those of noise contrast and score matching measure progress.

    Raises
    ------
    LossError
        If the loss is not finite, or chains of contrastive divergence diverge.
    DataError
        If data are not finite, or not bits where the model's vectors are.
    ShapeError
        If data are not vectors of the model.
    SettingsError
        If a setting lies outside its domain, or classes are given for a model without.

    Warns
    -----
    AccuracyWarning
        If the trained energy has no finite normalising constant, as far as can be seen.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.unnormalised import fit_energy
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> energy = torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Flatten(0)).double()
    >>> model = EnergyModel.of_bits(energy, 2)
    >>> x = torch.tensor([[1.0, 0.0]] * 7 + [[0.0, 1.0]] * 3, dtype=torch.float64)
    >>> fitted = fit_energy(model, x, num_steps=500, progress=False)
    >>> bool(((-energy[0].weight).sigmoid() - x.mean(0)).abs().max() < 0.2)
    True
    """
    if not (isinstance(model, nn.Module) and isinstance(model, Unnormalised)):
        raise SettingsError(f"model must be an EnergyModel, not {type(model).__name__}")
    require_vectors("x", x, model)
    if not bool(x.isfinite().all()):
        raise DataError(f"{int((~x.isfinite()).any(1).sum())} of {len(x)} rows of x are not finite; leave them out")
    if model.is_binary and not bool(((x == 0) | (x == 1)).all()):
        raise DataError("the model has binary vectors, and x has entries other than 0 and 1")
    if y is not None:
        with_classes: Any = model
        with_classes.logits(x[:1])
    learning_rate = real_number("learning_rate", learning_rate, "(0, inf)")
    fitted = fit(
        model,
        _no_latents,
        objective or NoiseContrastive(),
        x if y is None else (x, y),
        num_steps=num_steps,
        batch_size=batch_size,
        optimizer=functools.partial(torch.optim.Adam, lr=learning_rate),
        gradient_clipping=gradient_clipping,
        checkpoint=checkpoint,
        seed=seed,
        progress=progress,
    )
    is_finite, reason = model.check_normaliser()
    if is_finite is False:
        warn_user(
            f"the trained model has no finite normalising constant: {reason}; take the base as a factor with tilt=True",
            AccuracyWarning,
        )
    return fitted
