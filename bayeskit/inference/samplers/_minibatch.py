"""Minibatch targets: unbiased estimates of a log density and its gradient from a few rows of the data."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset, default_collate

from bayeskit._compiler import Compile, compile_evaluation
from bayeskit._core.evaluation import Evaluation, with_gradient_loop
from bayeskit._core.inputs import as_numbers, warn_user, whole_number
from bayeskit._core.randomness import new_generator, validation_kept
from bayeskit._core.texts import short_repr
from bayeskit._core.torch_internals import gradient_and_rest
from bayeskit._core.untraceable import UNTRACEABLE, first_line
from bayeskit._logdensity.density import Constrained, FunctionDensity
from bayeskit._logdensity.labels import DimensionLabels
from bayeskit._logdensity.pyro_density import Site, SubsampledDensity
from bayeskit._logdensity.pyro_runs import tensors_in
from bayeskit._logdensity.target import PriorSampler, Target
from bayeskit.errors import DataError, ModelError, SettingsError, ShapeError, SlowModelWarning
from bayeskit.inference.samplers._control import (
    NUM_REFERENCES,
    Anchor,
    RowEstimate,
    WeightedJoint,
    normal_at_mode,
    optimal_probabilities,
)

ControlVariate = Literal["mode", "svrg"] | Tensor | None

# Densities of one vector with a likelihood estimated from rows of the data.


class _Sites(Protocol):
    """Sites with a bijection between their values and an unconstrained vector, ``(d,)``."""

    sites: tuple[Site, ...]
    dim: int
    dtype: torch.dtype
    device: torch.device
    data: list[Tensor]

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the sites."""
        ...

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vector of values of the sites."""
        ...


@dataclass(frozen=True, eq=False)
class MinibatchDensity:
    """A density of single vectors with a likelihood estimated from rows of the data.

    ``joint`` takes ``rows (B,)``, or ``(N,)`` if their number is not ``fixed``; each counts ``N / B`` times, or as
    often as its weight.
    """

    of: _Sites
    joint: WeightedJoint
    num_data: int
    batch_size: int
    sample_prior: PriorSampler | None
    fixed: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.batch_size <= self.num_data:
            raise SettingsError(
                f"batch_size must lie between 1 and the {self.num_data} rows of the data, not {self.batch_size}"
            )


class _OnRows:
    """A minibatch density with fixed rows, as the density of a Target."""

    def __init__(self, of: _Sites, estimate: RowEstimate, rows: Tensor) -> None:
        self.sites, self.dim, self.data, self.dtype, self.device = of.sites, of.dim, of.data, of.dtype, of.device
        self.values, self.vector = of.values, of.vector
        self.improper_sites: tuple[str, ...] = getattr(of, "improper_sites", ())
        self._of, self._estimate, self._rows = of, estimate, rows

    def joint(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self._estimate(u, self._rows)

    def log_jacobian(self, u: Tensor) -> Tensor:
        if not isinstance(self._of, Constrained):
            raise ModelError(f"the Jacobian of {type(self._of).__name__} is not known; make a Target of the model")
        return self._of.log_jacobian(u)

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        raise ModelError(
            "a minibatched target has no log likelihood of each observation; "
            "make a Target of the model with all of its data"
        )


@dataclass(frozen=True)
class _JointOfFunctions:
    """A log prior ``(d,) -> ()`` and the log likelihoods of rows, ``(d,), (B,) -> (B,)``."""

    log_prior: Callable[[Tensor], Tensor]
    log_likelihood: Callable[[Tensor, Tensor], Tensor]
    num_data: int

    def __call__(self, u: Tensor, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        with validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)  # it branches on values
            log_prior, log_likelihood = self.log_prior(u), self.log_likelihood(u, rows)
        if log_prior.shape != ():
            raise ModelError(f"log_prior returns shape {tuple(log_prior.shape)} for one vector instead of ()")
        return log_prior, _estimate_sum(log_likelihood, rows, self.num_data, weights)


class _ModuleDensity:
    """A torch module with independent normal priors on its parameters."""

    def __init__(
        self,
        module: torch.nn.Module,
        log_likelihood: Callable[..., Tensor],
        data: Sequence[Tensor] | Dataset[Any],
        prior_scale: float | Mapping[str, float | Tensor],
    ) -> None:
        self._tensors = tensors_of(data)
        self.num_data = len(self._tensors[0])
        self._module, self._log_likelihood = copy.deepcopy(module).eval(), log_likelihood
        parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        if not parameters:
            raise ModelError("the module has no parameter that requires a gradient, so there is nothing to sample")
        first = next(iter(parameters.values()))
        self.dtype, self.device = first.dtype, first.device
        self._tensors = [t.to(self.device) for t in self._tensors]
        sites, start = [], 0
        for name, parameter in parameters.items():
            if parameter.dtype != self.dtype or parameter.device != self.device:
                raise ModelError(f"parameter {name!r} differs in dtype or device from the others; make them alike")
            stop = start + parameter.numel()
            sites.append(Site(name, parameter.shape, parameter.shape, start, stop))
            start = stop
        self.sites, self.dim = tuple(sites), start
        self._scale = self._scales(prior_scale)
        self._log_constant = float(-self._scale.log().sum() - 0.5 * self.dim * math.log(2 * math.pi))
        self._module.requires_grad_(False)
        constants = [p for name, p in self._module.named_parameters() if name not in parameters]
        self.data = [*self._tensors, self._scale, *constants, *self._module.buffers(), *tensors_in(log_likelihood)]

    def _scales(self, prior_scale: float | Mapping[str, float | Tensor]) -> Tensor:
        names = {s.name for s in self.sites}
        if isinstance(prior_scale, Mapping) and set(prior_scale) != names:
            raise SettingsError(f"prior_scale must name each parameter: {sorted(names)}, not {sorted(prior_scale)}")
        pieces = []
        for site in self.sites:
            scale = prior_scale[site.name] if isinstance(prior_scale, Mapping) else prior_scale
            tensor = torch.as_tensor(scale, dtype=self.dtype, device=self.device)
            if not bool(((tensor > 0) & tensor.isfinite()).all()):
                raise SettingsError(f"prior_scale of {site.name!r} must be positive and finite, not {scale}")
            pieces.append(tensor.expand(site.shape).reshape(-1))
        return torch.cat(pieces)

    def joint(self, u: Tensor, rows: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        log_prior = self._log_constant - 0.5 * (u / self._scale).square().sum()
        inputs, *others = (t[rows] for t in self._tensors)
        with validation_kept():
            torch.distributions.Distribution.set_default_validate_args(False)  # it branches on values
            output = torch.func.functional_call(self._module, self.values(u), (inputs,))
            log_likelihood = self._log_likelihood(output, *others)
        return log_prior, _estimate_sum(log_likelihood, rows, self.num_data, weights)

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        return {s.name: u[s.start : s.stop].reshape(s.shape) for s in self.sites}

    def vector(self, values: Mapping[str, Tensor]) -> Tensor:
        return torch.cat([values[s.name].to(self.device, self.dtype).reshape(-1) for s in self.sites])

    def log_jacobian(self, u: Tensor) -> Tensor:
        return u.new_zeros(())

    def sample_prior(self, num_draws: int, generator: torch.Generator) -> Tensor:
        shape = (num_draws, self.dim)
        noise = torch.randn(shape, dtype=self.dtype, device=generator.device, generator=generator)
        return noise.to(self.device) * self._scale


def _estimate_sum(log_likelihood: Tensor, rows: Tensor, num_data: int, weights: Tensor | None) -> Tensor:
    """Estimate the sum over all rows from the values of ``rows``."""
    if log_likelihood.shape != rows.shape:
        raise ModelError(
            f"log_likelihood returns shape {tuple(log_likelihood.shape)} for {len(rows)} rows instead of "
            f"{tuple(rows.shape)}, one value per row; remove a last dimension of one by .squeeze(-1)"
        )
    if weights is not None:
        return (weights * log_likelihood).sum()
    return log_likelihood.sum() * (num_data / rows.shape[0])


def tensors_of(data: Sequence[Tensor] | Dataset[Any]) -> list[Tensor]:
    """Return data as tensors with one row per observation; DataError if they differ in length or hold NaN."""
    if isinstance(data, Tensor):
        data = (data,)
    if isinstance(data, TensorDataset):
        tensors = list(data.tensors)
    elif isinstance(data, Dataset):
        rows = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        collated = default_collate(rows)
        tensors = [collated] if isinstance(collated, Tensor) else list(collated)
    else:
        tensors = [as_numbers("data", t) for t in data]
    lengths = [len(t) for t in tensors]
    if not tensors or len(set(lengths)) != 1:
        raise DataError(f"data must be tensors of equal length, not of lengths {lengths}")
    for i, tensor in enumerate(tensors):
        if tensor.is_floating_point() and bool(tensor.isnan().any()):
            raise DataError(f"tensor {i} of the data holds {int(tensor.isnan().sum())} NaN; drop or impute those rows")
    return tensors


# The minibatch density and its gradient, traced once with the rows as input, and compiled if that saves time.

Estimator = Callable[..., Evaluation]
"""``(u (n, d), rows (n, B)) -> Evaluation``, with the chains' anchors as further arguments if these move."""


class _MinibatchEngine:
    """Estimators of one density, by number of chains and planned calls."""

    def __init__(
        self, density: MinibatchDensity, estimate: RowEstimate, moving: bool = False, loops: bool = False
    ) -> None:
        self._density, self._estimate, self._moving = density, estimate, moving
        self._estimators: dict[tuple[int, int, Compile], Estimator] = {}
        self.loops = loops or not self._can_be_batched()  # whether the density is evaluated chain by chain

    def estimator(self, num_vectors: int, num_calls: int, compile: Compile) -> Estimator:
        """Return the estimator for ``num_vectors`` chains, compiled as set by ``compile`` or by the expected cost."""
        key = (num_vectors, num_calls, compile)
        found = self._estimators.get(key)
        if found is None:
            found = self._estimators[key] = self._make(num_vectors, num_calls, compile)
        return found

    def _example(self, num_vectors: int) -> tuple[Tensor, ...]:
        of = self._density.of
        u = torch.zeros(num_vectors, of.dim, dtype=of.dtype, device=of.device)
        rows = torch.arange(self._density.batch_size, device=of.device).expand(num_vectors, -1).contiguous()
        return (u, rows, u.clone(), u[:, 0].clone(), u.clone()) if self._moving else (u, rows)

    def _can_be_batched(self) -> bool:
        example = self._example(2)
        try:
            torch.func.vmap(self._estimate)(*example)
        except ModelError:
            raise
        except UNTRACEABLE as error:
            try:
                self._estimate(*(x[0] for x in example))
            except UNTRACEABLE as own:
                raise ModelError(f"the density cannot be evaluated: {own}") from own
            warn_user(
                f"the model cannot be batched ({first_line(error)}), so it is evaluated in a loop over chains, "
                "many times slower; replace Python control flow on sampled values by torch.where",
                SlowModelWarning,
            )
            return False
        return True

    def _make(self, num_vectors: int, num_calls: int, compile: Compile) -> Estimator:
        if self.loops:
            return self._one_by_one
        return compile_evaluation(self._with_gradient, self._example(num_vectors), num_calls, compile)

    def _with_gradient(self, u: Tensor, *rows: Tensor) -> Evaluation:
        def total(u: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
            log_prior, log_likelihood = torch.func.vmap(self._estimate)(u, *rows)
            log_density = log_prior + log_likelihood
            return log_density.sum(), (log_prior, log_likelihood, log_density)

        gradient, log_prior, log_likelihood, log_density = gradient_and_rest(total, u)
        return Evaluation(log_prior, log_likelihood, log_density, gradient)

    def _one_by_one(self, u: Tensor, *rows: Tensor) -> Evaluation:
        parts = []
        for vector, *own in zip(u, *rows, strict=True):
            evaluate = with_gradient_loop(partial(self._of_one, own))
            parts.append(evaluate(vector.unsqueeze(0), vector.new_ones(1)))
        return Evaluation(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def _of_one(self, own: list[Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
        return self._estimate(u, *own)


# The order of the data rows in a stochastic-gradient sampler.


class RowState(NamedTuple):
    """Positions of ``n`` chains in their pass over ``N`` rows."""

    order: Tensor  # (n, N), int64; (n, 0) without an order
    used: Tensor  # (), int64, on the host whatever the device: rows of the current order already visited


class AnchoredRows(NamedTuple):
    """Rows of ``n`` chains whose control variates move."""

    rows: RowState
    age: Tensor  # (), int64, on the host: gradients since the anchors were taken
    anchor: Anchor  # of each chain


class RowOrder(Protocol):
    """Sampling scheme of minibatches; each chain has its own, so chains are independent."""

    def init(self, num_chains: int, num_data: int, *, generator: torch.Generator) -> RowState:
        """Return the first state."""
        ...

    def next(
        self, state: RowState, num_data: int, batch_size: int, *, generator: torch.Generator
    ) -> tuple[RowState, Tensor]:
        """Return the new state and the rows of the next minibatch, ``(n, B)``."""
        ...


@dataclass(frozen=True)
class Epochs:
    """Sampling without replacement: every epoch visits the rows once, in a new random order.

    A remainder of rows smaller than the batch is skipped. Each epoch has a new order, so every minibatch is a uniform
    random set of rows and its gradient is unbiased.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import Epochs
    >>> order, generator = Epochs(), torch.Generator().manual_seed(0)
    >>> state = order.init(1, 6, generator=generator)
    >>> state, first = order.next(state, 6, 3, generator=generator)
    >>> state, second = order.next(state, 6, 3, generator=generator)
    >>> sorted(torch.cat([first, second], 1)[0].tolist())
    [0, 1, 2, 3, 4, 5]
    """

    def init(self, num_chains: int, num_data: int, *, generator: torch.Generator) -> RowState:
        """Shuffle the rows for every chain."""
        return RowState(_permutations(num_chains, num_data, generator), torch.zeros((), dtype=torch.int64))

    def next(
        self, state: RowState, num_data: int, batch_size: int, *, generator: torch.Generator
    ) -> tuple[RowState, Tensor]:
        """Return the next rows of the order, reshuffled if too few are left."""
        order = state.order
        if batch_size == num_data:
            return state, order
        start = int(state.used)  # on the host, so this does not synchronise with a device
        if start + batch_size > num_data:
            order, start = _permutations(order.shape[0], num_data, generator), 0
        stop = start + batch_size
        return RowState(order, torch.tensor(stop)), order[:, start:stop]


@dataclass(frozen=True, eq=False)
class IndependentRows:
    """Sampling with replacement: every minibatch has new independent rows.

    The noise of successive gradients is independent, as the closed forms for the bias of a finite step assume;
    :class:`Epochs` has less noise. With unequal ``probabilities`` a minibatch estimates the sum over all data without
    bias if a row of probability ``p`` counts ``1 / (B p)`` times, as in a :class:`MinibatchTarget` with
    ``weights="optimal"``, which makes this order.

    Parameters
    ----------
    probabilities : Tensor, optional
        Positive, ``(N,)``, with sum one; equal by default.

    Raises
    ------
    SettingsError
        If the probabilities are not positive or their sum is not one, or the data have another number of rows.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers import IndependentRows
    >>> order, generator = IndependentRows(), torch.Generator().manual_seed(0)
    >>> state = order.init(2, 6, generator=generator)
    >>> order.next(state, 6, 3, generator=generator)[1].shape
    torch.Size([2, 3])
    >>> order = IndependentRows(torch.tensor([0.98, 0.01, 0.01]))
    >>> order.next(order.init(1, 3, generator=generator), 3, 5, generator=generator)[1]
    tensor([[0, 0, 0, 0, 0]])
    """

    probabilities: Tensor | None = None

    __repr__ = short_repr

    def __post_init__(self) -> None:
        p = self.probabilities
        if p is not None and (p.dim() != 1 or not bool((p > 0).all()) or abs(float(p.sum()) - 1) > 1e-3):
            raise SettingsError("probabilities must be positive numbers of shape (N,) that sum to one")

    @cached_property
    def _edges(self) -> Tensor | None:
        return None if self.probabilities is None else self.probabilities.double().cumsum(0)

    def init(self, num_chains: int, num_data: int, *, generator: torch.Generator) -> RowState:
        """Return a state without an order."""
        if self.probabilities is not None and len(self.probabilities) != num_data:
            raise SettingsError(f"there are {num_data} rows, but {len(self.probabilities)} probabilities")
        order = torch.zeros(num_chains, 0, dtype=torch.int64, device=generator.device)
        return RowState(order, torch.zeros((), dtype=torch.int64))

    def next(
        self, state: RowState, num_data: int, batch_size: int, *, generator: torch.Generator
    ) -> tuple[RowState, Tensor]:
        """Draw rows, each with its probability."""
        shape = (state.order.shape[0], batch_size)
        if self._edges is None:
            return state, torch.randint(num_data, shape, generator=generator, device=generator.device)
        edges = self._edges.to(generator.device)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64, device=generator.device)
        rows = torch.searchsorted(edges, uniform * edges[-1], right=True)
        return state, rows.clamp(max=num_data - 1)


def _permutations(num_chains: int, num_data: int, generator: torch.Generator) -> Tensor:
    rows = [torch.randperm(num_data, generator=generator, device=generator.device) for _ in range(num_chains)]
    return torch.stack(rows)


class MinibatchTarget:
    """A posterior with unbiased minibatch estimates of the log density and its gradient.

    The log likelihood estimate is ``N / B`` times the log likelihood of ``B`` of ``N`` rows; the log prior is exact.
    The rows are an explicit input, so value and gradient are traced once and compiled, with all chains in one batch.
    Each chain has its own rows: shared rows would correlate the errors of the chains and invalidate R-hat and standard
    errors.

    Constructors: :meth:`from_pyro`, :meth:`from_module`, :meth:`from_functions`.

    Attributes
    ----------
    dim : int
        Dimension ``d`` of the unconstrained space.
    sites : tuple of Site
        Continuous latent sites, or parameters of the module, with their slices of the vector.
    num_data, batch_size : int
        ``N`` and ``B``.
    dtype, device
        As for the model's data.
    row_order : Epochs or IndependentRows
        Sampling scheme of the rows.
    control : {"mode", "svrg"} or None
        Control variate of the estimates.
    anchor : Tensor or None
        Point at which the control variate is exact, ``(d,)``, if it does not move.

    Notes
    -----
    All constructors take ``control`` and ``weights``, which leave the mean of the estimates as it is, and shrink their
    variance.

    With a *control variate* at an anchor :math:`a` only the difference of each row's gradient from that at the anchor
    is estimated, and its mean over all data, known from one pass, is added. ``control="mode"`` finds a mode first,
    from prior draws; a point ``(d,)``, such as the weights of a trained network, is an anchor too. The variance then
    grows with the distance from the anchor, and may be larger than without control far from it. ``control="svrg"``
    takes the current position of each chain as anchor, anew after each pass over the data, for which it evaluates all
    data. A step costs two gradients of the minibatch, with ``"svrg"`` and its passes three.

    With ``weights="optimal"`` rows are drawn with replacement, with the probabilities that minimise the trace of the
    gradient's variance, in unconstrained coordinates and on average over 32 draws from a normal approximation at the
    mode. Alone they help little where rows are alike; together with a control variate they help more. They are
    optimal about the mode only; 5 % of the probability is uniform, so that the mean is right everywhere.

    What remains is the bias of the step size; the smaller the variance, the longer steps may be at one temperature.

    References
    ----------
    Johnson, R., Zhang, T. (2013). Accelerating stochastic gradient descent using predictive variance reduction.
    NeurIPS. Baker, J., Fearnhead, P., Fox, E. B., Nemeth, C. (2019). Control variates for stochastic gradient MCMC.
    Statistics and Computing 29, 599-615. Dubey, K. A., Reddi, S. J., Williamson, S. A., Poczos, B., Smola, A. J., Xing,
    E. P. (2016). Variance reduction in stochastic gradient Langevin dynamics. NeurIPS.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist
    >>> from bayeskit.inference.samplers import MinibatchTarget
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y), subsample_size=2) as rows:
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y[rows])
    >>> y = torch.tensor([1.0, 2.0, 4.0, 5.0], dtype=torch.float64)
    >>> target = MinibatchTarget.from_pyro(model, y)
    >>> target.gradient(torch.zeros(2, 1, dtype=torch.float64), torch.tensor([[0, 1], [2, 3]])).flatten()
    tensor([ 6., 18.], dtype=torch.float64)
    """

    has_density = True

    def __init__(
        self,
        density: MinibatchDensity,
        *,
        row_order: RowOrder | None,
        compile: Compile,
        control: ControlVariate = None,
        weights: Literal["optimal"] | None = None,
        seed: int = 0,
    ) -> None:
        if compile not in (True, False, "auto"):
            raise SettingsError(f"compile must be True, False or 'auto', not {compile!r}")
        if not isinstance(control, Tensor) and control not in (None, "mode", "svrg"):
            raise SettingsError(f"control must be 'mode', 'svrg', a point of shape (d,) or None, not {control!r:.80}")
        if weights not in (None, "optimal"):
            raise SettingsError(f"weights must be 'optimal' or None, not {weights!r:.80}")
        if weights is not None and row_order is not None:
            raise SettingsError(
                "weights='optimal' draws rows with replacement in an order of its own; leave out row_order"
            )
        self._density = density
        self.row_order: RowOrder = row_order or Epochs()
        self.compile = compile
        self.control = "mode" if isinstance(control, Tensor) else control
        self.anchor: Tensor | None = None
        of = density.of
        self.sites, self.dim, self.dtype, self.device = of.sites, of.dim, of.dtype, of.device
        self.num_data, self.batch_size = density.num_data, density.batch_size
        self._full: Target | None = None
        self._estimate = self._plain = RowEstimate(density.joint)
        self._engine = _MinibatchEngine(density, self._plain)
        self._loops = self._engine.loops
        if control is not None or weights is not None:
            self._take_control(control, weights, new_generator(seed, self.device, "control variates"))
        self._on_first_rows = self.on_rows(torch.arange(self.batch_size))

    def _take_control(self, control: ControlVariate, weights: str | None, generator: torch.Generator) -> None:
        """Set the anchor that does not move, the probabilities of the rows, and the estimates with both."""
        full = self._full_target()
        if isinstance(control, Tensor):
            if control.shape != (self.dim,):
                raise ShapeError(f"control must be a point of shape ({self.dim},), not {tuple(control.shape)}")
            if not bool(control.isfinite().all()):
                raise DataError("control is a point with numbers that are not finite")
            self.anchor = control.to(self.device, self.dtype)
        probabilities = None
        if weights is not None or (self.control == "mode" and self.anchor is None):
            normal = normal_at_mode(full, generator, self.anchor)
            if self.control == "mode" and self.anchor is None:
                self.anchor = normal.position
            if weights is not None:
                points = normal.draws(NUM_REFERENCES, generator)
                centre = normal.position if self.control == "svrg" else self.anchor
                joint = self._density.joint
                probabilities = optimal_probabilities(joint, self.num_data, points, centre, full.loops)
                self.row_order = IndependentRows(probabilities)
        anchor = None
        if self.anchor is not None:
            anchor = Anchor(*(x[0] for x in Anchor.at(full, self.anchor.unsqueeze(0))))
        self._estimate = RowEstimate(self._density.joint, probabilities, anchor)
        self._engine = _MinibatchEngine(self._density, self._estimate, self.control == "svrg", self._loops)

    def _full_target(self) -> Target:
        if self._full is None:
            self._full = self.full_target()
        return self._full

    @property
    def gradients_per_step(self) -> float:
        """Gradients of a minibatch that a step costs, on average."""
        if self.control is None:
            return 1.0
        return 2.0 if self.control == "mode" else 2.0 + self.num_data / (self.batch_size * self._refresh)

    @property
    def _refresh(self) -> int:
        return max(1, self.num_data // self.batch_size)

    # -- constructors -----------------------------------------------------------------------

    @classmethod
    def from_pyro(
        cls,
        model: Callable[..., Any],
        *args: Any,
        batch_size: int | None = None,
        plate: str | None = None,
        row_order: RowOrder | None = None,
        control: ControlVariate = None,
        weights: Literal["optimal"] | None = None,
        compile: Compile = "auto",
        seed: int = 0,
        **kwargs: Any,
    ) -> MinibatchTarget:
        """Make a target from a Pyro model that indexes its data by the rows of a plate.

        Parameters
        ----------
        model : callable
            Pyro model with ``with pyro.plate(name, N, subsample_size=B) as rows``.
        *args, **kwargs
            Arguments of the model.
        batch_size : int, optional
            Required if the plate has ``subsample_size=None``; the plate's ``subsample_size`` by default.
        plate : str, optional
            Name of the plate, required if several plates subsample.
        row_order : Epochs or IndependentRows, optional
            :class:`Epochs` by default.
        control : {"mode", "svrg"} or Tensor, optional
            Control variate at the mode, at moving anchors, or at a point ``(d,)`` of unconstrained space; see the notes
            of the class.
        weights : {"optimal"}, optional
            Draw rows with unequal probabilities; see the notes of the class.
        compile : bool or "auto", default "auto"
            Compile gradients always, never, or if that saves time.
        seed : int, default 0
            Seed of the runs that read the model's structure, and of the search for the mode.

        Returns
        -------
        MinibatchTarget

        Raises
        ------
        ModelError
            If no plate subsamples, several do, or the model ignores the rows.
        UnsupportedSiteError
            If a latent site is inside the plate, or an enumerated site outside of it; if the model sums out discrete
            sites and ``weights`` is set.
        SettingsError
            If ``batch_size`` exceeds the plate or differs from the model's.
        DataError
            If the data contain NaN.
        """
        of = SubsampledDensity(model, args, kwargs, plate, batch_size, new_generator(seed))
        # An improper prior, from which nothing can be drawn, reports itself.
        density = MinibatchDensity(of, of.joint, of.num_data, of.batch_size, of.sample_prior, of.fixed)
        return cls(density, row_order=row_order, compile=compile, control=control, weights=weights, seed=seed)

    @classmethod
    def from_module(
        cls,
        module: torch.nn.Module,
        log_likelihood: Callable[..., Tensor],
        data: Sequence[Tensor] | Dataset[Any],
        *,
        batch_size: int,
        prior_scale: float | Mapping[str, float | Tensor] = 1.0,
        row_order: RowOrder | None = None,
        control: ControlVariate = None,
        weights: Literal["optimal"] | None = None,
        compile: Compile = "auto",
    ) -> MinibatchTarget:
        """Make a target from a torch module with independent normal priors on its parameters.

        Parameters
        ----------
        module : torch.nn.Module
            Copied and used in evaluation mode, without dropout. Parameters with ``requires_grad=False`` are constant.
        log_likelihood : callable
            ``(module(inputs), *others) -> (B,)``, one value per row.
        data : tensors or torch Dataset
            ``inputs, *others``, each with ``N`` rows. A dataset is read into memory.
        batch_size : int
        prior_scale : float or mapping of parameter names, default 1
            Standard deviations of the normal priors, which have mean zero.
        row_order, control, weights, compile
            As in :meth:`from_pyro`.

        Returns
        -------
        MinibatchTarget

        Raises
        ------
        ModelError
            If the module has no trainable parameter, or ``log_likelihood`` returns another shape.
        DataError
            If the tensors differ in length or contain NaN.
        SettingsError
            If ``batch_size`` exceeds the number of rows, or a prior scale is missing or not positive.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.inference.samplers import MinibatchTarget
        >>> x = torch.linspace(-1, 1, 100, dtype=torch.float64)[:, None]
        >>> y = 2 * x[:, 0]
        >>> def log_likelihood(output, y):
        ...     return torch.distributions.Normal(output[:, 0], 0.1).log_prob(y)
        >>> line = torch.nn.Linear(1, 1, dtype=torch.float64)
        >>> target = MinibatchTarget.from_module(line, log_likelihood, (x, y), batch_size=10)
        >>> target.constrain(torch.zeros(3, 2, dtype=torch.float64))["weight"].shape
        torch.Size([3, 1, 1])
        """
        of = _ModuleDensity(module, log_likelihood, data, prior_scale)
        density = MinibatchDensity(of, of.joint, of.num_data, batch_size, of.sample_prior)
        return cls(density, row_order=row_order, compile=compile, control=control, weights=weights)

    @classmethod
    def from_functions(
        cls,
        log_prior: Callable[[Tensor], Tensor],
        log_likelihood: Callable[[Tensor, Tensor], Tensor],
        dim: int,
        num_data: int,
        *,
        batch_size: int,
        sample_prior: PriorSampler | None = None,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        row_order: RowOrder | None = None,
        control: ControlVariate = None,
        weights: Literal["optimal"] | None = None,
        compile: Compile = "auto",
    ) -> MinibatchTarget:
        """Make a target from two functions of an unconstrained vector.

        Parameters
        ----------
        log_prior : callable
            ``(dim,) -> ()``.
        log_likelihood : callable
            ``(dim,), (B,) -> (B,)``: vector and rows to one value per row.
        dim, num_data, batch_size : int
        sample_prior : callable, optional
            ``(n, generator) -> (n, dim)``, for starting points.
        dtype, device
            Of the unconstrained vectors.
        row_order, control, weights, compile
            As in :meth:`from_pyro`.

        Returns
        -------
        MinibatchTarget

        Raises
        ------
        SettingsError
            If a number is out of range.
        ModelError
            If a function returns another shape.

        Examples
        --------
        >>> import torch
        >>> from bayeskit.inference.samplers import MinibatchTarget
        >>> y = torch.arange(10.0, dtype=torch.float64)
        >>> target = MinibatchTarget.from_functions(
        ...     lambda u: -0.5 * u.square().sum(), lambda u, rows: -0.5 * (y[rows] - u).square(), 1, 10, batch_size=5)
        >>> target.gradient(torch.zeros(1, 1, dtype=torch.float64), torch.arange(5)).item()
        20.0
        """
        joint = _JointOfFunctions(log_prior, log_likelihood, num_data)
        dim = whole_number("dim", dim, least=1)
        of = FunctionDensity(log_prior, cast(Any, log_likelihood), dim, dtype, torch.device(device))
        density = MinibatchDensity(of, joint, num_data, batch_size, sample_prior)
        return cls(density, row_order=row_order, compile=compile, control=control, weights=weights)

    # -- estimates --------------------------------------------------------------------------

    def estimate(self, u: Tensor, rows: Tensor, anchor: Tensor | None = None) -> Evaluation:
        """Estimate log density and gradient from a minibatch.

        Parameters
        ----------
        u : Tensor
            Shape ``(n, d)``.
        rows : Tensor
            Integers from 0 to ``N - 1``, shape ``(n, B)``, or ``(B,)`` for the same rows in every chain.
        anchor : Tensor, optional
            Anchors ``(n, d)`` or ``(d,)`` of a target with ``control="svrg"``, where they are required.

        Returns
        -------
        Evaluation
            ``log_prior`` is exact; ``log_likelihood``, ``log_density`` and ``gradient`` are unbiased estimates.

        Raises
        ------
        ShapeError
            If ``u`` or ``rows`` has another shape.
        SettingsError
            If a row is out of range, or an anchor is missing or given to a target whose anchor does not move.
        """
        if u.dim() != 2 or u.shape[1] != self.dim:
            raise ShapeError(f"u must have shape (n, {self.dim}), not {tuple(u.shape)}")
        if rows.shape not in ((self.batch_size,), (len(u), self.batch_size)):
            raise ShapeError(
                f"rows must have shape ({self.batch_size},) or ({len(u)}, {self.batch_size}), not {tuple(rows.shape)}"
            )
        if bool(((rows < 0) | (rows >= self.num_data)).any()):
            raise SettingsError(f"rows must lie between 0 and {self.num_data - 1}")
        rows = rows.to(self.device, torch.int64).expand(len(u), -1)
        moving = self._anchors(len(u), anchor)
        return self.estimator(len(u))(u.to(self.device, self.dtype), rows, *moving)

    def _anchors(self, num_vectors: int, anchor: Tensor | None) -> tuple[Tensor, ...]:
        """Return the anchors of some vectors, as inputs of the estimator; nothing if they do not move."""
        if self.control != "svrg":
            if anchor is not None:
                raise SettingsError("anchor= is for targets with control='svrg'; this one has no use of it")
            return ()
        if anchor is None:
            raise SettingsError("with control='svrg' an estimate depends on its anchor; give anchor=")
        if anchor.shape not in ((self.dim,), (num_vectors, self.dim)):
            raise ShapeError(f"anchor must have shape ({num_vectors}, {self.dim}), not {tuple(anchor.shape)}")
        at = anchor.to(self.device, self.dtype).expand(num_vectors, -1)
        return tuple(Anchor.at(self._full_target(), at))

    def gradient(self, u: Tensor, rows: Tensor, anchor: Tensor | None = None) -> Tensor:
        """Return an unbiased estimate of the gradient of the log posterior, ``(n, d)``; see :meth:`estimate`."""
        return self.estimate(u, rows, anchor).gradient

    def gradient_variance(
        self, u: Tensor, num_batches: int = 100, anchor: Tensor | None = None, *, seed: int = 0
    ) -> Tensor:
        """Estimate the variance of the gradient estimate over minibatches.

        Parameters
        ----------
        u : Tensor
            Shape ``(n, d)``.
        num_batches : int, default 100
        anchor : Tensor, optional
            As in :meth:`estimate`.
        seed : int, default 0

        Returns
        -------
        Tensor
            Shape ``(n, d)``. Its mean over ``n`` can serve as ``gradient_noise`` of the kernels.
        """
        num_batches = whole_number("num_batches", num_batches, least=2)
        generator = new_generator(seed, self.device, "gradient variance")
        moving = self._anchors(len(u), anchor)
        u = u.to(self.device, self.dtype)
        estimates = []
        for _ in range(num_batches):
            # A new pass each time: minibatches of one pass are negatively correlated.
            _, rows = self.next_rows(self.start_rows(len(u), generator), generator)
            estimates.append(self.estimator(len(u))(u, rows, *moving).gradient)
        return torch.stack(estimates).var(0)

    def estimator(self, num_vectors: int, num_calls: int = 1) -> Estimator:
        """Return the estimate as a function for the inner loop of a kernel.

        Parameters
        ----------
        num_vectors : int
            Number of chains ``n`` per call.
        num_calls : int, default 1
            Expected number of calls, which decides on compilation if ``compile="auto"``.

        Returns
        -------
        callable
            ``(u (n, d), rows (n, B)) -> Evaluation``.
        """
        return self._engine.estimator(num_vectors, num_calls, self.compile)

    # -- rows -------------------------------------------------------------------------------

    def start_rows(self, num_chains: int, generator: torch.Generator) -> RowState:
        """Start the passes of ``num_chains`` chains over the data."""
        return self.row_order.init(num_chains, self.num_data, generator=generator)

    def next_rows(self, state: RowState, generator: torch.Generator) -> tuple[RowState, Tensor]:
        """Return the new state and each chain's next rows, ``(n, B)``."""
        return self.row_order.next(state, self.num_data, self.batch_size, generator=generator)

    def observe(
        self,
        u: Tensor,
        state: RowState | AnchoredRows | None,
        num_calls: int,
        generator: torch.Generator,
    ) -> tuple[RowState | AnchoredRows, Evaluation]:
        """Draw each chain's next minibatch and estimate the density at ``u`` from it, ``(n, d)``; for kernels.

        The first ``state`` is None; anchors that move are renewed after each pass over the data.
        """
        estimator = self.estimator(len(u), num_calls)
        if self.control != "svrg":
            rows = self.start_rows(len(u), generator) if state is None else cast(RowState, state)
            rows, minibatch = self.next_rows(rows, generator)
            return rows, estimator(u, minibatch)
        if state is None:
            state = AnchoredRows(
                self.start_rows(len(u), generator),
                torch.zeros((), dtype=torch.int64),
                Anchor.at(self._full_target(), u),
            )
        rows, age, anchor = cast(AnchoredRows, state)
        if int(age) >= self._refresh:
            new = Anchor.at(self._full_target(), u)
            # A chain at a point without a finite density keeps its anchor.
            fine = (new.log_density + new.gradient.sum(-1)).isfinite()
            anchor = Anchor(
                *(
                    torch.where(fine.unsqueeze(-1) if a.dim() == 2 else fine, a, b)
                    for a, b in zip(new, anchor, strict=True)
                )
            )
            age = torch.zeros_like(age)
        rows, minibatch = self.next_rows(rows, generator)
        return AnchoredRows(rows, age + 1, anchor), estimator(u, minibatch, *anchor)

    # -- transforms, and the full data ------------------------------------------------------

    def constrain(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the sites' values, ``(*batch, d) -> {site: (*batch, *shape)}``.

        Parameters
        ----------
        u : Tensor
            Unconstrained vectors, shape ``(*batch, d)``.
        deterministic : bool, default False
            Include ``pyro.deterministic`` sites outside the subsampled plate.
        """
        return self._on_first_rows.constrain(u, deterministic)

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of site values, ``{site: (*batch, *shape)} -> (*batch, d)``."""
        return self._on_first_rows.unconstrain(values)

    def sample_prior(self, num_draws: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw from the prior in unconstrained space, shape ``(num_draws, d)``."""
        return self._on_first_rows.sample_prior(num_draws, seed=seed)

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each unconstrained coordinate."""
        return self._on_first_rows.names

    @property
    def labels(self) -> DimensionLabels:
        """No labels: the elements of a site are numbered."""
        return DimensionLabels()

    def counted(self) -> dict[str, Tensor]:
        """Return no masks, because these differ between minibatches."""
        return {}

    def whole_numbers(self) -> frozenset[str]:
        """Return no names, because no data are drawn."""
        return frozenset()

    def fingerprint(self) -> str:
        """Return a digest of the sites, the data, and the estimate from the first rows at two fixed points."""
        return self._on_first_rows.fingerprint()

    def pointwise_log_likelihood(self, u: Tensor) -> dict[str, Tensor]:
        """Raise ModelError: a minibatch has no likelihood of every observation.

        Raises
        ------
        ModelError
            Always.
        """
        return self._on_first_rows.pointwise_log_likelihood(u)

    def on_rows(self, rows: Tensor) -> Target:
        """Return the target with the likelihood estimate from fixed ``rows``, shape ``(B,)``."""
        return self._on(rows, self._estimate)

    def _on(self, rows: Tensor, estimate: RowEstimate) -> Target:
        on_rows, sample_prior = _OnRows(self._density.of, estimate, rows.to(self.device)), self._density.sample_prior
        return Target(on_rows, batched=False, sample_prior=sample_prior, compile=self.compile, loops=self._loops)

    def full_target(self) -> Target:
        """Return the exact posterior, with the likelihood of all rows.

        Raises
        ------
        ModelError
            If the Pyro model fixes the number of rows.
        """
        if self._density.fixed:
            raise ModelError(
                f"the model's plate fixes subsample_size={self.batch_size}; make subsample_size an argument of the "
                "model, pass None for it, and give batch_size here"
            )
        return self._on(torch.arange(self.num_data), self._plain)

    def __repr__(self) -> str:
        return f"MinibatchTarget(dim={self.dim}, num_data={self.num_data}, batch_size={self.batch_size})"
