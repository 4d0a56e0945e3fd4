"""Likelihoods learned from simulations, which stand in Pyro models as distributions of the data."""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple, cast
from weakref import WeakKeyDictionary

import pyro
import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.poutine.runtime import get_mask
from scipy.stats import binom, norm
from torch import Tensor, nn
from torch.distributions import constraints
from torch.nn.functional import silu

from bayeskit._core.flows import zuko
from bayeskit._core.folders import Schema
from bayeskit._core.functions_of_users import lines_named
from bayeskit._core.inputs import as_numbers, real_number, warn_user, whole_number
from bayeskit._core.randomness import derived_seed, global_stream, new_generator, one_thread, other_streams
from bayeskit._core.storage import digest, loaded_tensors, save_tensors
from bayeskit._core.texts import with_error
from bayeskit._core.torch_internals import is_batched
from bayeskit._logdensity.target import Target
from bayeskit.errors import CheckpointError, DataError, DataWarning, SettingsError, ShapeError
from bayeskit.inference.objectives import ELBO
from bayeskit.inference.samplers import sample
from bayeskit.inference.training import fit

_SCHEMA = Schema("a learned likelihood", 1)
_PARAMETERS = "_parameters_of_simulator"
#: Robust scales beyond which few numbers of normal data lie; a column with more of them is heavy-tailed.
_FAR, _HEAVY_SHARE = 6.0, 1e-3
#: Ratio of extreme quantiles above which positive parameters enter the network by their logarithm.
_ORDERS = 10.0
#: Shares of simulations for validation and for the test; numbers of simulations that data are compared with.
_VALIDATION, _TEST = 0.1, 0.1
_REFERENCES, _NEIGHBOURS = 4000, 5
#: Multiple of the largest distance of a simulation from the others at which data are refused.
_REFUSED = 1.5
_RARE, _SURPRISING = 2e-3, 2.5e-3  # by which a single datum at the farthest 1/500 of simulations is told
_MOST_FAILURES, _TRUSTED_FAILURES = 0.5, 0.01
_MISCALIBRATED, _CERTAIN = 0.02, 1e-4
#: Largest error that chance may hide, share of the variance of noise that parameters may explain, number of neighbours
#: by which that is estimated, and numbers of parameters or data of which pairs are looked at.
_UNSEEN, _DEPENDENT, _AROUND, _FEW = 0.08, 0.05, 10, 6
_COMPARED = 2000  # simulations, for that estimate
_LEARNING_RATE, _CLIPPING, _BATCH, _PATIENCE = 5e-3, 5.0, 500, 15
_LEAST_SIMULATIONS = 200
_FLAT = 1e-12  # share of variance that is no more than rounding

Simulator = Callable[..., Any]
Prior = Any  # a distribution, or a Pyro model that returns the parameters


# The network: a conditional flow, and the scales of parameters and data.


class _Network(nn.Module):
    """Density of data ``(*batch, k)`` given parameters ``(*batch, p)``, in double precision."""

    flow: Any
    parameter_location: Tensor
    parameter_scale: Tensor
    parameter_bent: Tensor
    data_location: Tensor
    data_scale: Tensor
    data_bent: Tensor

    def __init__(self, num_parameters: int, num_data: int, hidden: Sequence[int], num_transforms: int, bins: int):
        super().__init__()
        options: dict[str, Any] = {"hidden_features": tuple(hidden), "activation": _Smooth}
        affine = zuko.flows.MAF(num_data, num_parameters, transforms=1, **options)
        splines = zuko.flows.NSF(num_data, num_parameters, bins=bins, transforms=num_transforms, **options)
        self.flow = zuko.flows.Flow([*affine.transform.transforms, *splines.transform.transforms], splines.base)
        for name, size in (("parameter", num_parameters), ("data", num_data)):
            self.register_buffer(f"{name}_location", torch.zeros(size))
            self.register_buffer(f"{name}_scale", torch.ones(size))
            self.register_buffer(f"{name}_bent", torch.zeros(size, dtype=torch.bool))
        self.double()

    def learn_scales(self, parameters: Tensor, data: Tensor) -> None:
        """Set the scales by simulations."""
        low, high = parameters.quantile(torch.tensor([0.01, 0.99], dtype=torch.float64), 0)
        self.parameter_bent.copy_((parameters.amin(0) > 0) & (high > _ORDERS * low.clamp(min=1e-300)))
        straight = self._straight(parameters)
        self.parameter_location.copy_(straight.mean(0))
        self.parameter_scale.copy_(_positive(straight.std(0)))
        low, centre, high = data.quantile(torch.tensor([0.16, 0.5, 0.84], dtype=torch.float64), 0)
        self.data_location.copy_(centre)
        self.data_scale.copy_(_positive((high - low) / 2))
        far = ((data - self.data_location) / self.data_scale).abs() > _FAR
        self.data_bent.copy_(far.double().mean(0) > _HEAVY_SHARE)

    def _straight(self, parameters: Tensor) -> Tensor:
        logarithms = parameters.clamp(min=torch.finfo(torch.float64).tiny).log()
        return torch.where(self.parameter_bent, logarithms, parameters)

    def scaled_parameters(self, parameters: Tensor) -> Tensor:
        """Return parameters as they enter the flow."""
        return (self._straight(parameters) - self.parameter_location) / self.parameter_scale

    def _transform(self, parameters: Tensor) -> Any:
        return self.flow(self.scaled_parameters(parameters)).transform

    def scaled(self, data: Tensor) -> Tensor:
        """Return data in scales in which simulations are near zero, also where their tails are heavy."""
        v = (data - self.data_location) / self.data_scale
        return torch.where(self.data_bent, v.asinh(), v)

    def noise(self, parameters: Tensor, data: Tensor) -> tuple[Tensor, Tensor]:
        """Return the standard normal noise of data and the log volume ``(*batch)``."""
        v = (data - self.data_location) / self.data_scale
        bend = torch.where(self.data_bent, -0.5 * v.square().log1p(), 0.0)
        noise, log_volume = self._transform(parameters).call_and_ladj(torch.where(self.data_bent, v.asinh(), v))
        return noise, log_volume + bend.sum(-1) - self.data_scale.log().sum()

    def log_prob(self, parameters: Tensor, data: Tensor) -> Tensor:
        noise, log_volume = self.noise(parameters, data)
        return log_volume - 0.5 * (noise.square().sum(-1) + noise.shape[-1] * math.log(2 * math.pi))

    def draw(self, parameters: Tensor, noise: Tensor) -> Tensor:
        v = self._transform(parameters).inv(noise)
        return self.data_location + self.data_scale * torch.where(self.data_bent, v.sinh(), v)


class _Smooth(nn.Module):
    """A smooth activation, so that samplers see smooth gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return silu(x)


#: Copies of networks on other devices.
_COPIES: WeakKeyDictionary[_Network, dict[torch.device, _Network]] = WeakKeyDictionary()


def _on(network: _Network, device: torch.device) -> _Network:
    """Return a network on a device; a copy is made once."""
    if device == network.data_scale.device:
        return network
    copies = _COPIES.setdefault(network, {})
    if device not in copies:
        copies[device] = copy.deepcopy(network).to(device)
    return copies[device]


def _positive(scale: Tensor) -> Tensor:
    return torch.where(scale > 0, scale, 1.0)


class _Simulated(constraints.Constraint):
    """The range of simulated parameters: no domain, but a target warns where its prior leaves it."""

    advice = (
        "outside of those that the likelihood was learned from, where it is a guess: learn it from a wider prior, or "
        "make sure that its method covers() is true at your draws"
    )

    def __init__(self, lower_bound: Tensor, upper_bound: Tensor) -> None:
        self.lower_bound, self.upper_bound = lower_bound, upper_bound
        super().__init__()

    def check(self, value: Tensor) -> Tensor:
        return torch.ones_like(value, dtype=torch.bool)


class LearnedDistribution(TorchDistribution):  # type: ignore[misc]
    """Distribution of the data of a simulator at parameters; made by :class:`LearnedLikelihood`.

    Densities and draws have gradients by the parameters. With validation, as when a target is made, data far from all
    simulations raise ``DataError``, unless ``poutine.mask`` leaves them out. A target warns if the prior of its model
    often gives parameters outside of those that were simulated.

    Parameters
    ----------
    likelihood : LearnedLikelihood
    parameters : Tensor
        Shape ``(*batch, p)``.
    validate_args : bool, optional

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.workflows import learn_likelihood
    >>> def simulator(theta, generator):
    ...     return theta[:, 0] + torch.randn(len(theta), generator=generator)
    >>> prior = dist.Normal(torch.zeros(1), 1.0).to_event(1)
    >>> likelihood = learn_likelihood(simulator, prior, num_simulations=500, num_epochs=2, progress=False)
    >>> distribution = likelihood(torch.zeros(4, 1))
    >>> distribution.batch_shape, distribution.event_shape, distribution.log_prob(torch.zeros(4)).shape
    (torch.Size([4]), torch.Size([]), torch.Size([4]))
    """

    arg_constraints: dict[str, constraints.Constraint] = {}
    has_rsample = True

    def __init__(self, likelihood: LearnedLikelihood, parameters: Tensor, validate_args: bool | None = None) -> None:
        self.likelihood, self.parameters = likelihood, parameters
        self.arg_constraints = {"parameters": _Simulated(*(end.to(parameters) for end in likelihood.simulated_range()))}
        super().__init__(parameters.shape[:-1], likelihood.event_shape, validate_args=validate_args)

    @property
    def support(self) -> constraints.Constraint:
        """Real numbers of the shape of one datum."""
        return (
            constraints.independent(constraints.real, len(self.event_shape)) if self.event_shape else constraints.real
        )

    def expand(self, batch_shape: Any, _instance: None = None) -> LearnedDistribution:
        """Return the same distribution with another batch shape."""
        parameters = self.parameters.expand(*batch_shape, self.parameters.shape[-1])
        return LearnedDistribution(self.likelihood, parameters, self._validate_args)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of data ``(*batch, *event)``."""
        cut = value.dim() - len(self.event_shape)
        if cut < 0 or value.shape[cut:] != self.event_shape:
            raise ShapeError(
                f"one datum of the simulator has shape {tuple(self.event_shape)}, but the data have shape "
                f"{tuple(value.shape)}"
            )
        if self._validate_args and not is_batched(value) and not value.requires_grad:
            self.likelihood.check(_not_masked(value, cut))
        data = value.reshape(*value.shape[:cut], -1).to(torch.float64)
        found = _on(self.likelihood.network, data.device).log_prob(self.parameters.to(torch.float64), data)
        return found.to(self.parameters.dtype)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008  torch's own signature
        """Draw data ``(*sample, *batch, *event)`` with gradients by the parameters."""
        shape = torch.Size(sample_shape) + self.batch_shape
        parameters = self.parameters.to(torch.float64)
        size = self.event_shape.numel()
        noise = torch.randn(*shape, size, dtype=torch.float64, device=parameters.device)
        drawn = _on(self.likelihood.network, noise.device).draw(parameters.expand(*shape, parameters.shape[-1]), noise)
        return drawn.reshape(shape + self.event_shape).to(self.parameters.dtype)


def _not_masked(value: Tensor, cut: int) -> Tensor:
    """Return the data that no ``poutine.mask`` around the site leaves out: placeholders need not be possible data."""
    mask = get_mask()
    if mask is None or mask is True:
        return value
    shape = torch.broadcast_shapes(value.shape[:cut], torch.as_tensor(mask).shape)
    kept = torch.as_tensor(mask, device=value.device).expand(shape)
    return value.expand(*shape, *value.shape[cut:])[kept]


# Simulations, those that failed among them.


class _Simulations(NamedTuple):
    """Parameters ``(n, p)`` and data ``(n, k)`` in double precision."""

    parameters: Tensor
    data: Tensor
    part: Tensor  # (n,): 0 of training, 1 of validation, 2 of the test
    round: Tensor  # (n,)

    def of(self, part: int) -> tuple[Tensor, Tensor]:
        chosen = self.part == part
        return self.parameters[chosen], self.data[chosen]


def _as_model(prior: Prior) -> Callable[[], Tensor]:
    """Return a Pyro model that samples and returns a vector of parameters."""
    if isinstance(prior, torch.distributions.Distribution):
        if not isinstance(prior, TorchDistributionMixin):
            raise SettingsError(
                f"the prior is a {type(prior).__name__} of torch.distributions; make it with pyro.distributions, such "
                "as Normal(...).to_event(1)"
            )
        if len(prior.batch_shape) or len(prior.event_shape) > 1:
            raise ShapeError(
                f"the prior has batch shape {tuple(prior.batch_shape)} and event shape {tuple(prior.event_shape)}; "
                "give the distribution of one vector, for example by to_event(1)"
            )
        distribution: Any = prior
        return lambda: pyro.sample("parameters", distribution).reshape(-1)
    if not callable(prior):
        raise SettingsError(
            f"the prior is a {type(prior).__name__}; give a distribution, or a Pyro model that returns the parameters"
        )

    def model() -> Tensor:
        returned = prior()
        values = returned if isinstance(returned, (tuple, list)) else [returned]
        if not all(isinstance(value, Tensor) for value in values) or not values:
            raise ShapeError("the Pyro model of the prior must return its parameters: a tensor, or a tuple of tensors")
        return torch.cat([value.reshape(-1) for value in values])

    return model


def _prior_target(prior: Callable[[], Tensor], log_likelihood: Callable[[Tensor], Tensor] | None = None) -> Target:
    def model() -> None:
        parameters = pyro.deterministic(_PARAMETERS, prior())
        value = parameters.new_zeros(()) if log_likelihood is None else log_likelihood(parameters)
        pyro.factor("data_of_simulator", value)

    return Target.from_pyro(model)


def _prior_draws(prior: Callable[[], Tensor], count: int, generator: torch.Generator) -> Tensor:
    target = _prior_target(prior)
    return target.constrain(target.sample_prior(count, seed=generator), deterministic=True)[_PARAMETERS]


class _Run:
    """A simulator, called for all parameters or row by row, with its failures counted."""

    def __init__(self, simulator: Simulator, batched: bool) -> None:
        self._simulator, self._batched = simulator, batched
        self._takes_generator = _takes_two(simulator)
        self.failures: Counter[str] = Counter()
        self.first_error: Exception | None = None
        self.event_shape = torch.Size()  # of the last call

    def __call__(
        self, parameters: Tensor, generator: torch.Generator, event_shape: torch.Size | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the valid rows of parameters ``(n, p)`` and their data ``(n, k)``."""
        own = torch.Generator(parameters.device)
        seed = int(torch.randint(2**62, (), generator=generator))
        own.manual_seed(seed)
        given = (own,) if self._takes_generator else ()
        with global_stream(own), other_streams(seed), torch.no_grad():
            if self._batched:
                with lines_named("the simulator"):
                    result = _as_tensor(self._simulator(parameters, *given))
                if result is None or result.dim() == 0 or len(result) != len(parameters):
                    got = "nothing" if result is None else f"shape {tuple(result.shape)}"
                    raise ShapeError(
                        f"the simulator returned {got} for {len(parameters)} vectors of parameters; return one row "
                        "for each, or pass batched=False to call it with one vector at a time"
                    )
                rows, data = torch.arange(len(parameters)), result
            else:
                rows, data = self._one_by_one(parameters, given, event_shape)
        if data.is_complex():
            raise DataError("the simulator returns complex numbers; return torch.view_as_real of them")
        if data.dtype == torch.bool or not (data.is_floating_point()):
            raise DataError(
                f"the simulator returns {str(data.dtype).removeprefix('torch.')}: discrete data have no density; add "
                "noise to them, or write their likelihood in Pyro"
            )
        shape = data.shape[1:]
        if not shape.numel():
            raise ShapeError(f"one datum of the simulator has shape {tuple(shape)}, so that there are no data")
        if event_shape is not None and shape != event_shape:
            raise ShapeError(f"one datum of the simulator had shape {tuple(event_shape)} and now has {tuple(shape)}")
        self.event_shape = shape
        flat = data.reshape(len(data), -1).cpu().to(torch.float64)
        finite = flat.isfinite().all(1)
        self._count("not finite", int((~finite).sum()))
        return parameters.cpu()[rows[finite]].to(torch.float64), flat[finite]

    def _one_by_one(
        self, parameters: Tensor, given: tuple[Any, ...], event_shape: torch.Size | None
    ) -> tuple[Tensor, Tensor]:
        results: list[Tensor | None] = []
        for row in parameters:
            try:
                results.append(_as_tensor(self._simulator(row, *given)))
            except Exception as error:  # of any program that it calls
                self._count("raised an error", 1)
                self.first_error = self.first_error or error
                results.append(torch.empty(0))
        self._count("nothing", sum(result is None for result in results))
        shapes = Counter(result.shape for result in results if result is not None and result.numel())
        if not shapes:
            raise DataError(
                f"no simulation returned data{self.because()}; a simulator is called with one vector of parameters"
            ) from self.first_error
        shape = shapes.most_common(1)[0][0] if event_shape is None else event_shape
        self._count("another shape", sum(count for other, count in shapes.items() if other != shape))
        kept = [
            i for i, result in enumerate(results) if result is not None and result.numel() and result.shape == shape
        ]
        if not kept:
            raise DataError(f"no simulation returned data of shape {tuple(shape)}{self.because()}")
        return torch.tensor(kept), torch.stack([result for i in kept if (result := results[i]) is not None])

    def _count(self, what: str, times: int) -> None:
        if times:
            self.failures[what] += times

    def because(self) -> str:
        """Return the first error, for a message."""
        return "" if self.first_error is None else f" ({type(self.first_error).__name__}: {self.first_error})"


def _takes_two(function: Simulator) -> bool:
    try:
        inspect.signature(function).bind(1, 2)
    except ValueError:
        return True
    except TypeError:
        return False
    return True


def _as_tensor(value: Any) -> Tensor | None:
    if value is None:
        return None
    try:
        return torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"the simulator returned a {type(value).__name__} that is no tensor ({error}); return one tensor of real "
            "numbers, with a row for each vector of parameters"
        ) from error


def _refuse_atoms(data: Tensor) -> None:
    """Refuse data with values that repeat: discrete columns, and mixtures of values and densities."""
    for column, values in enumerate(data.T):
        most = int(values.unique(return_counts=True)[1].max())
        if most > max(5, 0.01 * len(values)):
            raise DataError(
                f"number {column} of the simulated data takes one value in {most} of {len(values)} simulations, so it "
                "has no density; add noise to it, leave it out, or write its likelihood in Pyro"
            )


def _refuse_equations(parameters: Tensor, data: Tensor) -> None:
    """Refuse data that lie in a plane, given the parameters: they have no density."""
    spread = data.std(0)
    if len(data) <= 2 * (data.shape[1] + parameters.shape[1]) or not bool(
        spread.isfinite().all() and (spread > 0).all()
    ):
        return
    known = torch.cat([torch.ones_like(parameters[:, :1]), parameters], 1)
    data = (data - data.mean(0)) / spread
    rest = data - known @ torch.linalg.lstsq(known, data, driver="gelsd").solution
    values, vectors = torch.linalg.eigh(rest.T @ rest / len(rest))
    if float(values[0]) < _FLAT:
        involved = (vectors[:, 0].abs() > 0.01).nonzero().flatten().tolist()
        raise DataError(
            f"numbers {involved} of the simulated data follow from one another and the parameters by a linear equation "
            "without noise, so they have no density; leave one of them out, or add noise"
        )


# What is learned.


@dataclass(frozen=True, eq=False)
class LearnedLikelihood:
    """A likelihood learned from simulations; made by :func:`learn_likelihood` or :meth:`load`.

    ``pyro.sample("y", likelihood(parameters), obs=y)`` stands in any model, also in plates, with parameters of shape
    ``(*batch, p)`` and data of shape ``(*batch, *event)``.

    Attributes
    ----------
    event_shape : tuple of int
        Shape of one datum.
    num_parameters : int
        ``p``.
    score, score_error : float
        Mean log density of held-out simulations of the last round, and its standard error. The mean divergence of the
        learned from the true distribution is the mean log density by the latter less this score.
    calibration_error : float
        Largest distance of the distribution of held-out noise from a normal one, in probability: zero for the truth.
    failures : dict of str to int
        Number of simulations without valid data, by what they returned.
    num_simulations : int
        Of all rounds, with those that failed.
    num_rounds : int
    warnings : tuple of str
        Reasons not to rely on the likelihood, each with its remedy.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> from bayeskit.workflows import learn_likelihood
    >>> def simulator(theta, generator):
    ...     return theta[:, 0] + 0.5 * torch.randn(len(theta), generator=generator)
    >>> prior = dist.Normal(torch.zeros(1), 2.0).to_event(1)
    >>> likelihood = learn_likelihood(simulator, prior, num_simulations=2000, num_epochs=10, progress=False)
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 2.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", likelihood(mean.expand(len(y), 1)), obs=y)
    >>> bk.Target.from_pyro(model, torch.tensor([0.5, 1.0])).log_likelihood(torch.zeros(3, 1)).shape
    torch.Size([3])
    """

    network: Any = field(repr=False)
    event_shape: torch.Size
    num_parameters: int
    score: float
    score_error: float
    calibration_error: float
    failures: dict[str, int]
    num_simulations: int
    num_rounds: int
    warnings: tuple[str, ...]
    settings: dict[str, Any] = field(repr=False)
    _simulations: Any = field(repr=False)
    _distances: Tensor = field(repr=False)
    _simulator: Any = field(repr=False, default=None)
    _prior: Any = field(repr=False, default=None)

    def __str__(self) -> str:
        flag = "" if self.trusted else "  NOT TRUSTED: " + "; ".join(self.warnings)
        return (
            f"likelihood of data {tuple(self.event_shape)} given {self.num_parameters} parameters, from "
            f"{self.num_simulations} simulations: held-out log density {with_error(self.score, self.score_error)}, "
            f"calibration error {self.calibration_error:.3f}{flag}"
        )

    @property
    def trusted(self) -> bool:
        """True if no diagnostic found a problem."""
        return not self.warnings and math.isfinite(self.score)

    def distribution(self, parameters: Tensor, validate_args: bool | None = None) -> LearnedDistribution:
        """Return the distribution of data at parameters ``(*batch, p)``.

        Raises
        ------
        ShapeError
            If the last dimension is not that of the parameters of the simulator.
        """
        return LearnedDistribution(self, self._as_parameters(parameters), validate_args)

    def _as_parameters(self, parameters: Any) -> Tensor:
        parameters = as_numbers("parameters", parameters)
        if parameters.dim() == 0 or parameters.shape[-1] != self.num_parameters:
            raise ShapeError(
                f"the simulator has {self.num_parameters} parameters, but they have shape {tuple(parameters.shape)}; "
                "the last dimension holds the parameters, as of torch.stack([...], -1)"
            )
        return parameters if parameters.is_floating_point() else parameters.to(torch.get_default_dtype())

    def __call__(self, parameters: Tensor, validate_args: bool | None = None) -> LearnedDistribution:
        """Return :meth:`distribution`."""
        return self.distribution(parameters, validate_args)

    # -- where the simulations were -------------------------------------------------------------

    def surprise(self, data: Tensor) -> Tensor:
        """Return the share of simulations that are as far from the others as each datum, ``(*batch)``.

        Raises
        ------
        ShapeError
            If the data end in another shape than ``event_shape``.
        """
        distance = self._distance(data)
        beyond = (self._distances >= distance.reshape(-1, 1)).double().sum(1)
        return ((1 + beyond) / (1 + len(self._distances))).reshape(distance.shape).to(data.device)

    def _distance(self, data: Tensor) -> Tensor:
        cut = data.dim() - len(self.event_shape)
        if cut < 0 or data.shape[cut:] != self.event_shape:
            raise ShapeError(f"data of shape {tuple(data.shape)} do not end in {tuple(self.event_shape)}")
        flat = data.detach().reshape(-1, self.event_shape.numel()).to(self._distances)
        return _distances(self.network, self._simulations, flat).reshape(data.shape[:cut])

    def check(self, data: Tensor) -> None:
        """Refuse data that are not where the simulations were; a target that is made with them calls this.

        Raises
        ------
        DataError
            If a datum is not finite, or clearly farther from the simulations than any of these from the others.

        Warns
        -----
        DataWarning
            If too many data are among the farthest, such as a single one that is farther than all but 1 of 500.
        """
        if not bool(data.isfinite().all()):
            raise DataError("the data hold NaN or infinite values; drop or impute them")
        distance = self._distance(data)
        if not distance.numel():
            return
        off = distance > _REFUSED * self._distances.max()
        if bool(off.any()):
            raise DataError(
                f"{int(off.sum())} of {off.numel()} data are far from all simulations, where the likelihood was not "
                "learned: simulate from a prior that can give such data, correct the data or the simulator, or pass "
                "validate_args=False to evaluate the density anyway"
            )
        share = max(_RARE, 1 / (1 + len(self._distances)))
        rare = int((self.surprise(data) <= share).sum())
        if rare and binom.sf(rare - 1, distance.numel(), share) < _SURPRISING:
            warn_user(
                f"{rare} of {distance.numel()} data are among the farthest {share:.1%} of simulations; simulator or "
                "prior may be wrong, and the likelihood there is learned from few simulations: call refine",
                DataWarning,
            )

    def simulated_range(self) -> tuple[Tensor, Tensor]:
        """Return the least and the largest of each simulated parameter, ``(p,)``."""
        low, high = self._simulations.parameters.aminmax(dim=0)
        return low, high

    def covers(self, parameters: Tensor) -> Tensor:
        """Tell whether parameters ``(*batch, p)`` lie within the range of the simulated ones, ``(*batch)``, bool.

        Raises
        ------
        ShapeError
            If the last dimension is not that of the parameters of the simulator.
        """
        parameters = self._as_parameters(parameters)
        low, high = (end.to(parameters) for end in self.simulated_range())
        return ((parameters >= low) & (parameters <= high)).all(-1)

    # -- sequential rounds ----------------------------------------------------------------------

    def refine(
        self,
        observed: Tensor | None = None,
        *,
        parameters: Tensor | None = None,
        num_simulations: int = 5000,
        num_epochs: int = 30,
        seed: int = 0,
        progress: bool = True,
    ) -> LearnedLikelihood:
        """Simulate at parameters from the current posterior, and go on training with all simulations.

        Parameters
        ----------
        observed : Tensor, optional
            Data ``(n, *event)`` of one vector of parameters, whose posterior under the prior is drawn from.
        parameters : Tensor, optional
            Draws ``(m, p)`` from the posterior of any model instead, such as those of all groups of a hierarchy.
        num_simulations : int, default 5000
        num_epochs : int, default 30
        seed : int, default 0
        progress : bool, default True

        Returns
        -------
        LearnedLikelihood
            A new one; scores are of the new simulations.

        Raises
        ------
        SettingsError
            If not exactly one of ``observed`` and ``parameters`` is given, or the likelihood was loaded without its
            simulator.
        DataError
            If the data are far from all simulations.
        ShapeError
            If data or parameters have another shape.

        References
        ----------
        Papamakarios, G., Sterratt, D. C., Murray, I. (2019). Sequential neural likelihood: fast likelihood-free
        inference with autoregressive flows. AISTATS.
        """
        whole_number("num_simulations", num_simulations, least=_LEAST_SIMULATIONS)
        if (observed is None) == (parameters is None):
            raise SettingsError("give exactly one of observed and parameters")
        if self._simulator is None or (observed is not None and self._prior is None):
            raise SettingsError("the likelihood was loaded without its simulator and prior; pass them to load")
        generator = new_generator(seed, stream="further round of simulations")
        if observed is not None:
            self._distance(torch.as_tensor(observed))  # of the right shape
        if parameters is None:
            parameters = self._posterior(cast(Tensor, observed), derived_seed(seed, "posterior of a round"))
        parameters = self._as_parameters(parameters)
        if parameters.dim() != 2 or not len(parameters):
            raise ShapeError(f"parameters must have shape (m, {self.num_parameters}), not {tuple(parameters.shape)}")
        chosen = torch.randint(len(parameters), (num_simulations,), generator=generator)
        run = _Run(self._simulator, self.settings["batched"])
        new = _split(run, parameters[chosen].detach(), generator, self.event_shape, self.num_rounds)
        together = _Simulations(*(torch.cat(pair) for pair in zip(self._simulations, new, strict=True)))
        network = copy.deepcopy(self.network)
        _train(network, together, num_epochs, derived_seed(seed, "training of a round"), progress)
        failures = Counter(self.failures) + run.failures
        return _result(self, network, together, failures, self.num_simulations + num_simulations)

    def _posterior(self, observed: Tensor, seed: int) -> Tensor:
        observed = torch.as_tensor(observed)
        data = observed.reshape(-1, *self.event_shape)
        self.check(data)

        def log_likelihood(parameters: Tensor) -> Tensor:
            return self.distribution(parameters, False).expand((len(data),)).log_prob(data).sum()

        target = _prior_target(_as_model(self._prior), log_likelihood)
        draws = sample(target, num_warmup=300, num_samples=500, seed=seed, progress=False)
        return target.constrain(draws.unconstrained.reshape(-1, target.dim), deterministic=True)[_PARAMETERS]

    # -- storing --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write network and simulations to one safetensors file, which :meth:`load` reads without running code."""
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        tensors |= {f"simulations.{name}": value for name, value in self._simulations._asdict().items()}
        names = ("num_parameters", "score", "score_error", "calibration_error", "failures", "num_simulations")
        facts = {name: getattr(self, name) for name in (*names, "num_rounds", "settings")}
        facts |= {"event_shape": list(self.event_shape), "warnings": list(self.warnings)}
        facts["simulator"] = _recognised(self._simulator) or self.settings.get("simulator")
        save_tensors(path, tensors | {"distances": self._distances}, facts, _SCHEMA)

    @classmethod
    def load(cls, path: str | Path, *, simulator: Simulator | None = None, prior: Prior = None) -> LearnedLikelihood:
        """Read a likelihood that :meth:`save` wrote.

        Parameters
        ----------
        path : str or Path
        simulator : callable, optional
            The simulator, for :meth:`refine`, and to make sure that the file belongs to it.
        prior : Distribution or callable, optional
            The prior, likewise.

        Returns
        -------
        LearnedLikelihood

        Raises
        ------
        CheckpointError
            If the file is damaged, not of this kind, or of another simulator or number of parameters.
        """
        with loaded_tensors(path, _SCHEMA) as (tensors, facts):
            known, settings = facts.pop("simulator"), facts["settings"]
            event_shape = torch.Size(facts.pop("event_shape"))
            made = settings["hidden"], settings["num_transforms"], settings["num_bins"]
            network = _Network(facts["num_parameters"], event_shape.numel(), *made)
            network.load_state_dict({k.removeprefix("network."): v for k, v in tensors.items() if k[:8] == "network."})
            network.requires_grad_(False)
            simulations = _Simulations(**{name: tensors[f"simulations.{name}"] for name in _Simulations._fields})
            distances, warnings = tensors["distances"], tuple(facts.pop("warnings"))
            facts["settings"] = settings | {"simulator": known}
            loaded = cls(
                network,
                event_shape,
                **facts,
                warnings=warnings,
                _simulations=simulations,
                _distances=distances,
                _simulator=simulator,
                _prior=prior,
            )
        if simulator is not None and known is not None and _recognised(simulator) not in (None, known):
            raise CheckpointError(f"{path} holds the likelihood of another simulator; give that one, or learn anew")
        if prior is not None:
            count = _prior_draws(_as_model(prior), 1, new_generator(0)).shape[1]
            if count != loaded.num_parameters:
                raise CheckpointError(
                    f"{path} holds a likelihood of {loaded.num_parameters} parameters, but the prior has {count}"
                )
        return loaded


def _recognised(simulator: Simulator | None) -> str | None:
    try:
        return None if simulator is None else digest(simulator)
    except CheckpointError:  # an object that a later run cannot recognise
        return None


def _distances(network: _Network, simulations: _Simulations, data: Tensor, leave_out: bool = False) -> Tensor:
    """Return the mean distance of data ``(n, k)`` from the nearest simulations, in scales without correlations."""
    references = network.scaled(simulations.data[:: max(1, len(simulations.data) // _REFERENCES)][:_REFERENCES])
    covariance = references.T.cov().reshape(2 * references.shape[1:])
    eigenvalues, vectors = torch.linalg.eigh(covariance)
    white = vectors * eigenvalues.clamp(min=1e-10 * float(eigenvalues.max())).rsqrt()
    references = references @ white
    near = min(_NEIGHBOURS, len(references) - 1) + leave_out
    parts = []
    for rows in (network.scaled(data) @ white).split(1000):
        nearest = torch.cdist(rows, references).topk(near, largest=False).values
        parts.append(nearest[:, int(leave_out) :].mean(1))
    return torch.cat(parts) if parts else data.new_zeros(0)


def _split(
    run: _Run, parameters: Tensor, generator: torch.Generator, event_shape: torch.Size | None, number: int
) -> _Simulations:
    count = len(parameters)
    parameters, data = run(parameters, generator, event_shape)
    failed = sum(run.failures.values())
    if failed > _MOST_FAILURES * count:
        said = ", ".join(f"{what}: {times}" for what, times in run.failures.items())
        raise DataError(
            f"{failed} of {count} simulations gave no valid data ({said}){run.because()}; correct the simulator or "
            "the prior"
        ) from run.first_error
    if failed:
        said = ", ".join(f"{what}: {times}" for what, times in run.failures.items())
        warn_user(
            f"{failed} of {count} simulations gave no valid data and were left out ({said}), so that the likelihood is "
            "that of valid data; correct the simulator, or leave such parameters out of the prior",
            DataWarning,
        )
    _refuse_atoms(data)
    _refuse_equations(parameters, data)
    part = torch.zeros(len(data), dtype=torch.long)
    order = torch.randperm(len(data), generator=generator)
    validation, test = int(_VALIDATION * len(data)), int(_TEST * len(data))
    part[order[:validation]], part[order[validation : validation + test]] = 1, 2
    return _Simulations(parameters, data, part, torch.full_like(part, number))


class _Training(nn.Module):
    """A Pyro model of simulations, for training."""

    def __init__(self, network: _Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, parameters: Tensor, data: Tensor) -> None:
        with pyro.plate("simulations", len(data)):
            pyro.factor("density", self.network.log_prob(parameters, data))


def _train(
    network: _Network,
    simulations: _Simulations,
    num_epochs: int,
    seed: int,
    progress: bool,
    checkpoint: str | Path | None = None,
) -> None:
    network.requires_grad_(True)
    train, size = simulations.of(0), min(_BATCH, int((simulations.part == 0).sum()))
    steps = num_epochs * max(1, len(train[0]) // size)
    with one_thread():
        fit(
            _Training(network),
            _no_latents,
            ELBO(),
            train,
            num_epochs=num_epochs,
            batch_size=size,
            optimizer=partial(torch.optim.Adam, lr=_LEARNING_RATE),
            schedule=partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=steps),
            gradient_clipping=_CLIPPING,
            validation=simulations.of(1),
            patience=_PATIENCE,
            seed=seed,
            checkpoint=checkpoint,
            progress=progress,
        )
    network.requires_grad_(False)


def _no_latents(parameters: Tensor, data: Tensor) -> None:
    """Sample nothing, as the guide of a model without latent sites."""


def _result(
    before: LearnedLikelihood | dict[str, Any],
    network: _Network,
    simulations: _Simulations,
    failures: Counter[str],
    total: int,
) -> LearnedLikelihood:
    """Measure the error on held-out simulations of the last round."""
    rounds = int(simulations.round.max())
    last = simulations.round == rounds
    with torch.no_grad(), one_thread():
        chosen = last & (simulations.part == 2)
        scores = network.log_prob(simulations.parameters[chosen], simulations.data[chosen])
        # Simulations that stopped the training are as good as others for tests of what was learned.
        chosen = last & (simulations.part > 0)
        parameters, data = simulations.parameters[chosen], simulations.data[chosen]
        noise, _ = network.noise(parameters, data)
        uniform = torch.special.ndtr(noise)
        ordered = uniform.sort(0).values
        n = len(uniform)
        steps = torch.arange(n + 1, dtype=torch.float64).unsqueeze(1) / n
        off = torch.maximum((ordered - steps[:-1]).abs(), (steps[1:] - ordered).abs()).max()
        explained, explained_by_chance = _explained(network.scaled_parameters(parameters), uniform)
        held_out = simulations.data[simulations.part > 0][:_REFERENCES]
        distances = _distances(network, simulations, held_out, leave_out=True)
    problems = []
    # By chance the distance is above this with a small probability (Dvoretzky, Kiefer and Wolfowitz).
    chance = math.sqrt(math.log(2 * noise.shape[1] / _CERTAIN) / (2 * n))
    larger = "raise num_simulations or num_epochs, or make the network larger by hidden and num_transforms"
    if not float(off) <= chance + _MISCALIBRATED:
        problems.append(f"held-out data are not distributed as learned, by {float(off):.3f} in probability: {larger}")
    elif chance > _UNSEEN:
        problems.append(
            f"too few simulations to tell: an error of {chance:.2f} in probability would not be seen in {n} held-out "
            "ones; raise num_simulations"
        )
    if not explained <= explained_by_chance + _DEPENDENT:
        problems.append(
            f"parameters still explain {explained:.0%} of the variance of held-out noise, so the likelihood depends on "
            f"them in another way than learned: {larger}"
        )
    failed = sum(failures.values())
    if failed > _TRUSTED_FAILURES * total:
        said = ", ".join(f"{what}: {times}" for what, times in failures.items())
        problems.append(f"{failed} of {total} simulations gave no valid data ({said}): correct simulator or prior")
    found: dict[str, Any] = {
        "network": network,
        "score": float(scores.mean()),
        "score_error": float(scores.std()) / math.sqrt(len(scores)),
        "calibration_error": float(off),
        "failures": dict(failures),
        "num_simulations": total,
        "num_rounds": rounds + 1,
        "warnings": tuple(problems),
        "_simulations": simulations,
        "_distances": distances.sort().values,
    }
    return LearnedLikelihood(**before, **found) if isinstance(before, dict) else replace(before, **found)


def _explained(parameters: Tensor, uniform: Tensor) -> tuple[float, float]:
    """Return the share of the variance of noise ``(n, k)`` that parameters ``(n, p)`` explain, and that by chance.

    Polynomials of the noise are compared with their means over neighbours by each parameter, each pair and all of them:
    the mean product estimates the variance of the expectation given the parameters (Moran 1950).
    """
    parameters, uniform = parameters[:_COMPARED], uniform[:_COMPARED]
    first, second = math.sqrt(12) * (uniform - 0.5), math.sqrt(5) * (6 * uniform * uniform - 6 * uniform + 1)
    rows, columns = torch.triu_indices(k := uniform.shape[1], k, 1)
    products = first[:, rows] * first[:, columns] if k <= _FEW else first[:, :0]
    f = torch.cat([first, second, products], 1)
    n, p = parameters.shape
    groups = [(i,) for i in range(p)] + (list(combinations(range(p), 2)) if p <= _FEW else []) + [tuple(range(p))]
    found = -math.inf
    for group in dict.fromkeys(groups):
        distance = torch.cdist(parameters[:, group], parameters[:, group])
        near = distance.fill_diagonal_(math.inf).topk(_AROUND, largest=False).indices
        around = f[near].mean(1)
        found = max(found, float((f * around).mean(0).max()))
    by_chance = norm.isf(_CERTAIN / (f.shape[1] * len(groups))) * math.sqrt(2 / (n * _AROUND))
    return found, float(by_chance)


def learn_likelihood(
    simulator: Simulator,
    prior: Prior,
    *,
    num_simulations: int = 10_000,
    batched: bool = True,
    hidden: Sequence[int] = (32, 32),
    num_transforms: int | None = None,
    num_bins: int = 8,
    num_epochs: int = 60,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> LearnedLikelihood:
    r"""Learn the likelihood of a simulator: a distribution of data with gradients, for any Pyro model.

    Parameters are drawn from the prior and data simulated at each. A conditional normalizing flow, an autoregressive
    affine transform followed by splines, learns :math:`p(y \mid \theta)` by maximum likelihood, in double precision.
    Positive parameters of several orders of magnitude enter by their logarithm, and heavy-tailed data are bent by an
    inverse hyperbolic sine. A tenth of the simulations stops the training and another tenth measures the error.

    Parameters
    ----------
    simulator : callable
        ``(parameters (n, p), generator) -> data (n, *event)``, of real numbers; the generator is of the device of the
        parameters. A simulator that takes parameters alone draws from the global streams of torch, NumPy
        (``np.random``) and Python (``random``), which are seeded; one with a generator of its own is not repeatable.
        Not finite data are left out and counted.
    prior : Distribution or callable
        Where the simulations are made: a distribution of one vector, or a Pyro model that returns the parameters, as a
        tensor or a tuple of tensors. It has to be wide enough for all parameters that a model will ask for.
    num_simulations : int, default 10,000
    batched : bool, default True
        If false, the simulator is called as ``(parameters (p,), generator) -> data (*event)``. None, errors of any
        kind and data of another shape than most are then left out and counted.
    hidden : sequence of int, default (32, 32)
        Widths of the layers of each network.
    num_transforms : int, optional
        Number of spline transforms; by default one for a single number and two for several.
    num_bins : int, default 8
        Bins of each spline.
    num_epochs : int, default 60
        Largest number of passes over the simulations.
    seed : int, default 0
    checkpoint : path, optional
        File of the training, from which the same call resumes. The simulations are made again by the seed.
    progress : bool, default True

    Returns
    -------
    LearnedLikelihood
        Not trusted if held-out noise, which the flow makes of data, is not normal, depends on the parameters, or there
        are too few held-out simulations to tell: about 4,000 simulations are needed.

    Raises
    ------
    DataError
        If data are discrete, complex or hold values that repeat, follow from one another by a linear equation, or more
        than half of the simulations fail.
    ShapeError
        If the simulator does not return a row for each vector of parameters, or the prior is not of one vector.
    SettingsError
        If a number is not positive, or the prior is improper.
    CheckpointError
        If the checkpoint is damaged, or the simulator, the prior or a setting is another one.

    Warns
    -----
    DataWarning
        If some simulations gave no valid data.

    References
    ----------
    Papamakarios, G., Sterratt, D. C., Murray, I. (2019). Sequential neural likelihood: fast likelihood-free inference
    with autoregressive flows. AISTATS.

    Moran, P. A. P. (1950). Notes on continuous stochastic phenomena. Biometrika 37, 17-23.

    Durkan, C., Bekasov, A., Murray, I., Papamakarios, G. (2019). Neural spline flows. NeurIPS.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.workflows import learn_likelihood
    >>> def simulator(theta, generator):
    ...     return theta + torch.randn(theta.shape, generator=generator)
    >>> prior = dist.Normal(torch.zeros(1), 2.0).to_event(1)
    >>> likelihood = learn_likelihood(simulator, prior, num_simulations=5000, num_epochs=20, progress=False)
    >>> abs(likelihood.score + 1.42) < 0.05 + 4 * likelihood.score_error, likelihood.trusted
    (True, True)
    """
    whole_number("num_simulations", num_simulations, least=_LEAST_SIMULATIONS)
    whole_number("num_epochs", num_epochs, least=1)
    whole_number("num_bins", num_bins, least=2)
    if not hidden or any(whole_number("hidden", width, least=1) < 1 for width in hidden):
        raise SettingsError("hidden is empty; give the width of at least one layer")
    generator = new_generator(seed, stream="simulations for a likelihood")
    parameters = _prior_draws(_as_model(prior), num_simulations, generator)
    run = _Run(simulator, batched)
    simulations = _split(run, parameters, generator, None, 0)
    num_data = simulations.data.shape[1]
    if num_transforms is None:
        num_transforms = 1 if num_data == 1 else 2
    whole_number("num_transforms", num_transforms, least=1)
    made = tuple(hidden), num_transforms, num_bins
    with global_stream(new_generator(seed, stream="network of a likelihood")):
        network = _Network(parameters.shape[1], num_data, *made)
    network.learn_scales(*simulations.of(0))
    _train(network, simulations, num_epochs, derived_seed(seed, "training of a likelihood"), progress, checkpoint)
    known = {
        "event_shape": run.event_shape,
        "num_parameters": parameters.shape[1],
        "settings": {
            "hidden": list(hidden),
            "num_transforms": num_transforms,
            "num_bins": num_bins,
            "batched": batched,
        },
        "_simulator": simulator,
        "_prior": prior,
    }
    return _result(known, network, simulations, run.failures, num_simulations)


# What it has to beat.


def rejection_abc(
    simulator: Simulator,
    prior: Prior,
    observed: Tensor,
    *,
    num_simulations: int = 10_000,
    share: float = 0.01,
    summary: Callable[[Tensor], Tensor] | None = None,
    batched: bool = True,
    seed: int = 0,
) -> Tensor:
    """Draw from an approximate posterior by rejection (approximate Bayesian computation): a baseline.

    Parameters are drawn from the prior, a data set of ``n`` rows is simulated at each, and those whose summaries are
    nearest to the observed ones are kept. The result is that of a wider likelihood, and gets worse with the number of
    summaries.

    Parameters
    ----------
    simulator, prior
        As for :func:`learn_likelihood`.
    observed : Tensor
        Data ``(n, *event)`` of one vector of parameters.
    num_simulations : int, default 10,000
        Number of rows that are simulated, ``n`` for each vector of parameters.
    share : float, default 0.01
        Share of the vectors that is kept, at least ten vectors.
    summary : callable, optional
        From data sets ``(m, n, k)`` to summaries ``(m, s)``; by default the means and, for several rows, the standard
        deviations.
    batched : bool, default True
    seed : int, default 0

    Returns
    -------
    Tensor
        Parameters ``(kept, p)``.

    Raises
    ------
    SettingsError
        If ``share`` lies outside (0, 1], or fewer than 20 data sets can be simulated.
    DataError, ShapeError
        As :func:`learn_likelihood`, and if observed data or summaries are not finite, or the latter not ``(m, s)``.

    Warns
    -----
    DataWarning
        If the observed summaries are far from those of all simulations.

    References
    ----------
    Pritchard, J. K., Seielstad, M. T., Perez-Lezaun, A., Feldman, M. W. (1999). Population growth of human Y
    chromosomes: a study of Y chromosome microsatellites. Molecular Biology and Evolution 16, 1791-1798.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.workflows import rejection_abc
    >>> def simulator(theta, generator):
    ...     return theta[:, 0] + torch.randn(len(theta), generator=generator)
    >>> prior = dist.Normal(torch.zeros(1), 1.0).to_event(1)
    >>> kept = rejection_abc(simulator, prior, torch.tensor([1.0, 1.2]), num_simulations=20_000)
    >>> kept.shape, bool((kept.mean() - 2.2 / 3).abs() < 0.3)
    (torch.Size([100, 1]), True)
    """
    share = real_number("share", share, "(0, 1]")
    generator = new_generator(seed, stream="rejection")
    if not bool(observed.isfinite().all()):
        raise DataError("observed holds NaN or infinite values; drop or impute them")
    rows = len(observed)
    sets = num_simulations // rows
    if sets < 20:
        raise SettingsError(f"{num_simulations} simulations are fewer than 20 data sets of {rows} rows; simulate more")
    parameters = _prior_draws(_as_model(prior), sets, generator)
    run = _Run(simulator, batched)
    tagged = torch.arange(sets).repeat_interleave(rows)
    every, data = run(parameters[tagged], generator, torch.Size(observed.shape[1:]))
    if len(data) < sets * rows:
        raise DataError(f"{sets * rows - len(data)} simulations gave no valid data; correct the simulator or the prior")
    simulated = data.reshape(sets, rows, -1)
    given = observed.reshape(1, rows, -1).cpu().to(torch.float64)
    summarised = summary or _moments
    found, wanted = (_checked_summaries(summarised(x), len(x)) for x in (simulated, given))
    scale = _positive((found - found.median(0).values).abs().median(0).values)
    found, wanted = found / scale, wanted / scale
    others = (
        torch.cdist(found[:_REFERENCES], found).topk(min(_NEIGHBOURS + 1, sets), largest=False).values[:, 1:].mean(1)
    )
    own = torch.cdist(wanted, found).topk(min(_NEIGHBOURS, sets), largest=False).values.mean()
    if float((others >= own).double().mean()) < _RARE:
        warn_user(
            "the observed summaries are farther from those of all simulations than these are from each other, so what "
            "is kept is not near the data: correct the data or the simulator, or widen the prior",
            DataWarning,
        )
    distance = (found - wanted).square().sum(1)
    kept = distance.topk(max(10, round(share * sets)), largest=False).indices
    return every.reshape(sets, rows, -1)[kept, 0].to(parameters)


def _checked_summaries(summaries: Any, sets: int) -> Tensor:
    if not isinstance(summaries, Tensor) or summaries.dim() != 2 or len(summaries) != sets:
        got = tuple(summaries.shape) if isinstance(summaries, Tensor) else type(summaries).__name__
        raise ShapeError(f"summary must return a tensor of shape ({sets}, s) for {sets} data sets, not {got}")
    if not bool(summaries.isfinite().all()):
        raise DataError("summary returns NaN or infinite values")
    return summaries.to(torch.float64)


def _moments(data: Tensor) -> Tensor:
    means = data.mean(1)
    return means if data.shape[1] == 1 else torch.cat([means, data.std(1)], 1)
