"""Gibbs posteriors, with a loss in place of the negative log likelihood, and pooling of pointwise losses."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pyro
import torch
from torch import Tensor

from bayeskit.errors import (
    BayeskitError,
    CoherenceError,
    DataError,
    ImproperPosteriorError,
    ModelError,
    SettingsError,
    ShapeError,
)
from bayeskit.extend import (
    Compile,
    PyroDensity,
    Target,
    can_be_batched,
    new_generator,
    real_number,
    validation_kept,
    whole_number,
)
from bayeskit.inference.generalized._prior import Prior, direction_of_recession
from bayeskit.inference.generalized.losses._log_likelihood import NegativeLogLikelihood
from bayeskit.inference.generalized.losses._loss import (
    Data,
    FunctionLoss,
    Loss,
    PointwiseLoss,
    as_data,
    columns,
    num_data,
    taken,
)

# Pooling of pointwise losses into one loss; only the sum makes updates coherent.


class Pooling(ABC):
    """Symmetric function of the pointwise losses.

    Attributes
    ----------
    coherent : bool
        Whether sequential and joint updates give the same posterior.
    """

    coherent: bool = False

    @abstractmethod
    def __call__(self, each: Tensor) -> Tensor:
        """Return the pooled loss, ``(n,) -> ()``."""


@dataclass(frozen=True)
class Sum(Pooling):
    """Sum of the losses, the only coherent pooling.

    Examples
    --------
    >>> import torch
    >>> Sum()(torch.tensor([1.0, 2.0, 4.0])).item(), Sum().coherent
    (7.0, True)
    """

    coherent = True

    def __call__(self, each: Tensor) -> Tensor:
        """Return the sum."""
        return each.sum()


@dataclass(frozen=True)
class Mean(Pooling):
    """Mean of the losses; not coherent, and the posterior does not concentrate as ``n`` grows.

    Examples
    --------
    >>> import torch
    >>> Mean()(torch.tensor([1.0, 2.0, 6.0])).item(), Mean().coherent
    (3.0, False)
    """

    def __call__(self, each: Tensor) -> Tensor:
        """Return the mean."""
        return each.mean()


@dataclass(frozen=True)
class Max(Pooling):
    """Largest of the losses; not coherent.

    Examples
    --------
    >>> import torch
    >>> Max()(torch.tensor([1.0, 2.0, 4.0])).item(), Max().coherent
    (4.0, False)
    """

    def __call__(self, each: Tensor) -> Tensor:
        """Return the maximum."""
        return each.amax()


@dataclass(frozen=True)
class DeepSets(Pooling):
    """Pooling ``outer(inner(losses).sum(0))``, treated as not coherent.

    Every continuous symmetric function has this form if ``inner`` may return vectors.

    Parameters
    ----------
    inner : callable
        Elementwise function ``(n,) -> (n,)`` or ``(n, k)``.
    outer : callable
        ``() -> ()`` or ``(k,) -> ()``.

    References
    ----------
    Zaheer, M., Kottur, S., Ravanbakhsh, S., Poczos, B., Salakhutdinov, R., Smola, A. (2017). Deep sets. NeurIPS.

    Examples
    --------
    >>> import torch
    >>> root_mean_square = DeepSets(torch.square, torch.sqrt)
    >>> root_mean_square(torch.tensor([3.0, 4.0])).item()
    5.0
    """

    inner: Callable[[Tensor], Tensor]
    outer: Callable[[Tensor], Tensor]

    def __call__(self, each: Tensor) -> Tensor:
        """Return ``outer(inner(each).sum(0))``."""
        return self.outer(self.inner(each).sum(0))


def as_pooling(pooling: Pooling | Literal["sum", "mean", "max"] | Any, loss: Loss) -> Pooling:
    """Return a ``Pooling``, from an instance or a name; SettingsError for others, or if it does not fit the loss."""
    named = {"sum": Sum(), "mean": Mean(), "max": Max()}.get(pooling) if isinstance(pooling, str) else pooling
    if not isinstance(named, Pooling):
        raise SettingsError(
            f"pooling must be 'sum', 'mean', 'max' or an object such as DeepSets(...), not {pooling!r:.80}"
        )
    if not isinstance(loss, PointwiseLoss) and not isinstance(named, Sum):
        raise SettingsError(
            f"{type(loss).__name__} is not a sum over observations, so there is nothing to pool; leave pooling at 'sum'"
        )
    return named


def check_pooled_by_sum(posterior: GibbsPosterior, what: str = "a learning rate is calibrated") -> None:
    """Raise SettingsError unless losses are pooled by their sum."""
    if not isinstance(posterior.pooling, Sum):
        raise SettingsError(
            f"{what} for losses that add up, not ones pooled by {type(posterior.pooling).__name__}; leave pooling at "
            "'sum'"
        )


def check_pooling(posterior: GibbsPosterior) -> None:
    """Raise SettingsError unless losses are pooled by the sum or mean, so that observations can be weighted."""
    if not isinstance(posterior.pooling, (Sum, Mean)):
        raise SettingsError(
            f"observations cannot be weighted if losses are pooled by {type(posterior.pooling).__name__}; use pooling "
            "'sum'"
        )


# The Gibbs posterior.

_PROBES = 20
_SHOWN = 0.1  # components of a direction smaller than this are not named


class GibbsPosterior(Target):
    r"""Gibbs posterior :math:`\pi_w(\theta \mid x) \propto \exp(-w \sum_i \ell(\theta, x_i))\,\pi(\theta)` of a loss.

    It is a :class:`~bayeskit.Target`, accepted by every sampler and marginal-likelihood estimator. Called as a
    function it is a Pyro model, for guides, ``pyro.infer.SVI`` and :func:`bayeskit.fit`.

    Parameters
    ----------
    prior : distribution or Pyro model
        Pyro distribution of the parameter, or Pyro model without arguments and observations. The parameter passed to
        the loss is the return value of the model or, if that is None, the value of its only site, or a dict of the
        values of its sites. :class:`Flat` and ``ImproperUniform`` are improper.
    loss : Loss or callable
        One of :mod:`~bayeskit.inference.generalized.losses`, or a function ``(parameter, data) -> (n,)``.
    data : Tensor or tuple of Tensor
        Shapes ``(n, ...)``.
    weight : float, default 1.0
        Learning rate ``w``, positive; see :mod:`~bayeskit.inference.generalized.calibrate`.
    pooling : {"sum", "mean", "max"} or Pooling, default "sum"
        Function that combines the pointwise losses, in place of the sum.
    name : str, default "theta"
        Name of the parameter if ``prior`` is a distribution.
    compile, seed
        As in :meth:`bayeskit.Target.from_pyro`.

    Attributes
    ----------
    prior, loss, data, weight, pooling, num_data
        What is given, as a prior, loss, tensors, number and pooling, and the number of data.

    Raises
    ------
    SettingsError
        If ``weight`` is not a positive number, or ``pooling`` is unknown or does not fit the loss.
    DataError, ShapeError
        If data are empty or not finite, a loss is nan at a prior draw, a loss is infinite at all prior draws, or a
        shape is wrong.
    ImproperPosteriorError
        If the prior is improper and the loss is bounded or does not grow in some direction.
    ModelError
        If the prior is neither a distribution nor a Pyro model, or the loss fails or has no derivative.

    References
    ----------
    Bissiri, P. G., Holmes, C. C., Walker, S. G. (2016). A general framework for updating belief distributions. JRSS B
    78, 1103-1130.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
    >>> posterior = GibbsPosterior(dist.Normal(0.0, 5.0), losses.Absolute(), x, weight=0.8)
    >>> posterior.log_likelihood(torch.tensor([2.0], dtype=torch.float64)).item()
    -7.2
    """

    def __init__(
        self,
        prior: Any,
        loss: Any,
        data: Any,
        weight: float = 1.0,
        pooling: Pooling | Literal["sum", "mean", "max"] = "sum",
        *,
        name: str = "theta",
        compile: Compile = "auto",
        seed: int = 0,
    ) -> None:
        self.data: Data = as_data(data)
        self.weight = real_number("weight", weight, "(0, inf)")
        self.loss = as_loss(loss)
        self.pooling = as_pooling(pooling, self.loss)
        self.num_data = num_data(self.data)
        self._given = (prior, name, compile, seed)
        self.loss.check(self.data)
        like = next((x for x in columns(self.data) if x.is_floating_point()), columns(self.data)[0])
        like = like if like.is_floating_point() else like.to(torch.get_default_dtype())
        self.prior = Prior(prior, like=like, name=name, seed=seed)
        if not self.prior.is_proper and self.loss.bounded:
            raise ImproperPosteriorError(
                f"the prior of site {self.prior.improper[0]!r} counts as improper and the loss "
                f"{type(self.loss).__name__} is bounded, so the posterior is improper; take a proper prior, such as a "
                "wide normal, or on a bounded support dist.Uniform, dist.Beta or dist.Dirichlet"
            )
        self._check_losses(seed)
        density = PyroDensity(self, (), {}, new_generator(seed))
        loops = not can_be_batched(density, density.probe(new_generator(seed)))
        super().__init__(density, compile=compile, loops=loops)
        if not self.prior.is_proper and not loops:
            self._refuse_recession(seed)

    def __call__(self, *data: Tensor, subsample_size: int | None = None) -> Any:
        """Run as a Pyro model of all data, a minibatch ``data``, or ``subsample_size`` rows; return the parameter.

        The loss of a minibatch is scaled to ``n`` observations; SettingsError if the loss is not a sum over them.
        """
        if subsample_size is not None and not 1 <= whole_number("subsample_size", subsample_size) <= self.num_data:
            raise SettingsError(f"subsample_size must lie between 1 and {self.num_data} data, not {subsample_size}")
        parameter, drawn = self.prior.model()
        particles = drawn.particles(self.prior.sites)
        chosen = self._minibatch(data)
        if not (isinstance(self.loss, PointwiseLoss) and isinstance(self.pooling, Sum)):
            if subsample_size is not None or num_data(chosen) != self.num_data:
                raise SettingsError(
                    f"{type(self.loss).__name__} pooled by {type(self.pooling).__name__} is no sum over data, so "
                    "minibatches do not estimate the total loss; pass all data"
                )
            if particles is None:
                total = self.pooled_loss(parameter, chosen)
            else:
                total = self._of_particles(self.pooled_loss, particles[1], chosen).reshape(particles[0])
            pyro.factor("loss", -self.weight * total)
            return parameter
        if data and subsample_size is None:
            given = torch.arange(num_data(chosen), device=columns(chosen)[0].device)
            plate = pyro.plate("data", self.num_data, subsample=given)
        else:
            plate = pyro.plate("data", self.num_data, subsample_size=subsample_size)
        with plate as rows:
            if subsample_size is not None and rows is not None:
                chosen = taken(chosen, rows)
            if particles is None:
                each = self.loss.pointwise(parameter, chosen)
            else:
                each = self._of_particles(self.loss.pointwise, particles[1], chosen)
                each = each.reshape(*particles[0][:-1], num_data(chosen))
            pyro.factor("loss", -self.weight * each)
        return parameter

    def _of_particles(self, function: Any, values: dict[str, Tensor], data: Data) -> Tensor:
        """Return a function of parameter and data for each of a batch of runs, ``(P, ...)``."""

        def of_one(one: dict[str, Tensor]) -> Tensor:
            result: Tensor = function(self.prior.of_values(one), data)
            return result

        # Validation would branch on batched values.
        with validation_kept(), pyro.validation_enabled(False):
            result: Tensor = torch.func.vmap(of_one)(values)
        return result

    def _minibatch(self, given: tuple[Tensor, ...]) -> Data:
        if not given:
            return self.data
        own = columns(self.data)
        if len(given) != len(own) or any(a.shape[1:] != b.shape[1:] for a, b in zip(given, own, strict=True)):
            raise ShapeError(
                f"a minibatch of shapes {[tuple(x.shape) for x in given]} does not fit data of shapes "
                f"{[tuple(x.shape) for x in own]}"
            )
        if len(given[0]) > self.num_data:
            raise ShapeError(f"a minibatch of {len(given[0])} is larger than the {self.num_data} data")
        return given if isinstance(self.data, tuple) else given[0]

    def pooled_loss(self, parameter: Any, data: Data) -> Tensor:
        """Return the pooled loss of data at one parameter of the prior, scalar."""
        if isinstance(self.loss, PointwiseLoss):
            return self.pooling(self.loss.pointwise(parameter, data))
        return self.loss.total(parameter, data)

    def total_loss(self, u: Tensor) -> Tensor:
        """Return the pooled loss, not multiplied by the weight, ``(*batch, d) -> (*batch)``."""
        return -self.log_likelihood(u) / self.weight

    def parameter(self, u: Tensor) -> Any:
        """Return the parameter of the loss at one unconstrained vector ``(d,)``."""
        return self.prior.parameter(self._checked(u))

    def with_weight(self, weight: float) -> GibbsPosterior:
        """Return the posterior with another learning rate."""
        return self._with(self.data, weight)

    def with_data(self, data: Any) -> GibbsPosterior:
        """Return the posterior of other data."""
        return self._with(data, self.weight)

    def update(self, new_data: Any) -> GibbsPosterior:
        """Return the posterior given the present and further data, promoted to a common dtype.

        Raises
        ------
        CoherenceError, ShapeError
            If sequential and joint updates differ, since the loss is not pointwise or not pooled by the sum, or if
            shapes of the new data do not fit.
        """
        if not (isinstance(self.loss, PointwiseLoss) and self.pooling.coherent):
            what = (
                f"losses pooled by {type(self.pooling).__name__}"
                if isinstance(self.loss, PointwiseLoss)
                else f"{type(self.loss).__name__}, which looks at all data at once,"
            )
            raise CoherenceError(
                f"{what} cannot be updated sequentially: sequential and joint updates give different posteriors; make "
                "a new posterior of all data"
            )
        old, new = columns(self.data), columns(as_data(new_data))
        if len(old) != len(new) or any(a.shape[1:] != b.shape[1:] for a, b in zip(old, new, strict=True)):
            raise ShapeError(
                f"new data of shapes {[tuple(x.shape) for x in new]} do not continue those of shapes "
                f"{[tuple(x.shape) for x in old]}"
            )
        both = tuple(torch.cat([a, b.to(a.device)]) for a, b in zip(old, new, strict=True))
        return self._with(both if isinstance(self.data, tuple) else both[0], self.weight)

    def _with(self, data: Any, weight: float) -> GibbsPosterior:
        prior, name, compile, seed = self._given
        return GibbsPosterior(prior, self.loss, data, weight, self.pooling, name=name, compile=compile, seed=seed)

    def pointwise_log_likelihood(self, u: Tensor) -> dict[str, Tensor]:
        """Return minus the weighted loss of each observation, ``(*batch, d) -> {"loss": (*batch, n)}``.

        ModelError if the loss is not pointwise or not pooled by the sum.
        """
        if not (isinstance(self.loss, PointwiseLoss) and isinstance(self.pooling, Sum)):
            raise ModelError("this loss is not a sum over data, so it has no pointwise values")
        return super().pointwise_log_likelihood(u)

    def why_no_density(self) -> str | None:
        """Return why the weighted loss is not minus a log density of the data, or None if it is."""
        if isinstance(self.loss, NegativeLogLikelihood) and self.weight == 1:
            return None
        return (
            f"exp(-{self.weight:g} {type(self.loss).__name__}) is not a density of the data, so it has no predictive "
            "density; compare models by the loss on held-out data, or take NegativeLogLikelihood with weight 1"
        )

    def _check_losses(self, seed: int) -> None:
        """Raise an error if a loss is nan at a prior draw, infinite at all of them, or of the wrong shape."""
        infinite: Tensor | None = None
        pooling = type(self.pooling).__name__
        for u in self.prior.start(_PROBES, seed):
            value = self._probe(u)
            if bool(value.isnan().any()):
                raise DataError(f"the loss of {_datum(value.isnan())} is nan at {self.prior.parameter(u)!r:.200}")
            infinite = ~value.isfinite() if infinite is None else infinite & ~value.isfinite()
            pooled = self.pooling(value) if value.dim() else value
            if tuple(pooled.shape) != ():
                raise ShapeError(f"the pooling {pooling} returns {tuple(pooled.shape)} instead of a scalar")
            if bool(pooled.isnan()):
                raise DataError(f"the pooling {pooling} makes nan of losses {value.tolist()!r:.80}")
        if infinite is not None and bool(infinite.any()):
            raise DataError(f"the loss of {_datum(infinite)} is infinite at each of {_PROBES} draws from the prior")

    def _refuse_recession(self, seed: int) -> None:
        """Raise ImproperPosteriorError if the loss does not grow in a flat direction of the prior."""
        largest = max(float(x.abs().max()) for x in columns(self.data))
        found = direction_of_recession(self._joint_of_batch, self.prior, largest, seed)
        if found is None:
            return
        shown = [f"{name} {x:+.3g}" for name, x in zip(self.names, found.tolist(), strict=True) if abs(x) >= _SHOWN]
        sites = ", ".join(repr(name) for name in self.prior.improper)
        raise ImproperPosteriorError(
            f"the prior of {sites} is improper and the loss {type(self.loss).__name__}, pooled "
            f"by {type(self.pooling).__name__}, does not grow in the direction ({', '.join(shown)}) of unconstrained "
            "space, so the posterior is improper; take a proper prior, such as a wide normal, drop collinear "
            "covariates, or use a predictor and a pooling that do not bound the loss"
        )

    def _probe(self, u: Tensor) -> Tensor:
        wanted = (self.num_data,) if isinstance(self.loss, PointwiseLoss) else ()
        function: Any = self.loss.pointwise if isinstance(self.loss, PointwiseLoss) else self.loss.total
        with torch.enable_grad():
            parameter = self.prior.parameter(u.detach().requires_grad_())
        try:
            with torch.enable_grad(), warnings.catch_warnings():
                # Detached tensors are refused below.
                warnings.filterwarnings("ignore", message="Converting a tensor with requires_grad=True")
                value = function(parameter, self.data)
        except BayeskitError:
            raise
        except (RuntimeError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ModelError(f"the loss {type(self.loss).__name__} failed at a draw from the prior: {error}") from error
        if not isinstance(value, Tensor) or tuple(value.shape) != wanted:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ShapeError(
                f"the loss {type(self.loss).__name__} returns {shape} instead of {wanted} for {self.num_data} data "
                "and a single parameter"
            )
        if not value.requires_grad and not torch.is_inference_mode_enabled():
            raise ModelError(
                f"the loss {type(self.loss).__name__} has no derivative with respect to the parameter; compute it with "
                "differentiable torch operations, without numpy, float() or detach(), and use a smooth loss in place "
                "of one that counts errors"
            )
        return value.detach()

    def __getstate__(self) -> dict[str, Any]:
        # Compiled graphs cannot be pickled, and the density refers to this object as its model.
        return {name: value for name, value in super().__getstate__().items() if name != "_engine"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._engine = self._new_engine()

    def __repr__(self) -> str:
        return (
            f"GibbsPosterior({type(self.loss).__name__}, dim={self.dim}, num_data={self.num_data}, "
            f"weight={self.weight:g}, pooling={type(self.pooling).__name__})"
        )


def as_loss(loss: Any) -> Loss:
    """Return a loss, wrapping a function ``(parameter, data) -> (n,)``; SettingsError if it is neither."""
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) or not callable(loss):
        hint = f"; write {loss.__name__}(...)" if isinstance(loss, type) else ""
        raise SettingsError(
            f"loss must be one of bayeskit.inference.generalized.losses or a function, not {loss!r:.80}{hint}"
        )
    return FunctionLoss(loss)


def _datum(which: Tensor) -> str:
    if which.dim() == 0:
        return "the data"
    return f"datum {int(which.nonzero()[0])} ({int(which.sum())} in all)"
