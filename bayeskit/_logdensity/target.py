"""Target: any model as a batched, compiled, temperable log density over an unconstrained vector."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast, overload

import torch
from torch import Tensor

from bayeskit._compiler import Compile, Cost, Engine, Evaluators, FailingApart
from bayeskit._core.evaluation import Evaluator, tempered, with_gradient, with_gradient_loop
from bayeskit._core.functions_of_users import lines_named, words_of
from bayeskit._core.inputs import remedy_for_model, unknown_name, warn_user, whole_number
from bayeskit._core.page import PageTable, result_html
from bayeskit._core.process_state import process_state
from bayeskit._core.progress import progress_bar
from bayeskit._core.randomness import global_stream, new_generator, one_thread
from bayeskit._core.untraceable import UNTRACEABLE, first_line
from bayeskit._logdensity.density import (
    Constrained,
    Density,
    FunctionDensity,
    fingerprint,
    first_rows,
    gather,
    lift,
    raise_if_broken,
    raise_if_not_differentiable,
    warn_if_gradient_is_wrong,
)
from bayeskit._logdensity.foreign_density import ForeignDensity
from bayeskit._logdensity.labels import DimensionLabels, checked_coords, sizes_of, unconstrained_names, with_names
from bayeskit._logdensity.own_density import ONE_DENSITY, Names, OwnDensity, OwnGradient, checked_density
from bayeskit._logdensity.pyro_density import PyroDensity
from bayeskit._logdensity.pyro_runs import place_of
from bayeskit.errors import BayeskitError, DrawsError, ModelError, SettingsError, ShapeError, SlowModelWarning

#: Densities that are read from a model, which knows its data, its prior and its names.
MODELS = (PyroDensity, ForeignDensity)

_FEW_VECTORS = 8  # that are made one by one
_DRAWN_TOGETHER = 1000  # vectors at which data or discrete sites are drawn in one batch

P = ParamSpec("P")
R = TypeVar("R", covariant=True)
PriorSampler = Callable[[int, torch.Generator], Tensor]


NO_TARGET = "these draws have no target; load them with Draws.load(path, target=target)"


def can_be_batched(density: PyroDensity, probe: Tensor) -> bool:
    """Tell whether the density and its gradient can be evaluated at ``probe`` ``(d,)`` under vmap; warn if not."""
    both = torch.stack([probe, probe])
    try:
        # With its gradient, because samplers need it.
        with_gradient(torch.func.vmap(density.joint))(both, torch.ones_like(both[:, 0]))
    except UNTRACEABLE as error:
        raise_if_broken(density, probe)
        raise_if_not_differentiable(density, probe)
        warn_user(
            f"the model cannot be batched{place_of(error)} ({first_line(error)}), so it is evaluated in a loop, "
            "many times slower. Remedy: replace Python control flow on sampled values by torch.where, assignments to "
            "elements by torch.stack, or the distribution by a batchable distribution. If only draws are needed, "
            "bayeskit.inference.samplers.sample_with_pyro may take less time",
            SlowModelWarning,
        )
        return False
    return True


def require_target(value: Any) -> Target:
    """Return a target, or that of draws; raise ``SettingsError`` for anything else, such as a model."""
    carried = value if isinstance(value, Target) else getattr(value, "target", value)
    if isinstance(carried, Target):
        if not carried.has_density:
            raise DrawsError(NO_TARGET)
        return carried
    raise SettingsError(f"a Target is needed, not a {type(value).__name__}; {remedy_for_model(value)}")


class HasTarget(Protocol):
    """What stands for the target that it carries, such as draws."""

    @property
    def target(self) -> Target: ...


class OfTarget(Protocol[P, R]):
    """A function of a target, or of draws in place of a target and of the draws that it takes."""

    __name__: str

    @overload
    def __call__(self, target: Target, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, target: HasTarget, *args: Any, **kwargs: Any) -> R: ...


def takes_draws(function: Callable[Concatenate[Target, P], R]) -> OfTarget[P, R]:
    """Decorate a function of a target, so that draws stand for their target, and for themselves as ``draws``."""
    has_draws = "draws" in inspect.signature(function).parameters

    @wraps(function)
    def of_target(target: Any, *given: Any, **named: Any) -> R:
        drawn = not isinstance(target, Target) and isinstance(getattr(target, "target", None), Target)
        if drawn and has_draws and "draws" not in named and not (given and isinstance(given[0], type(target))):
            named["draws"] = target
        return function(require_target(target), *given, **named)

    of_target.__wrapped__ = inspect.unwrap(function)  # the function itself, however many decorators it has
    return cast(OfTarget[P, R], of_target)


def _takes_two(function: Callable[..., Any]) -> bool:
    """Whether a function can be called with two positional arguments; True where Python cannot tell."""
    if not callable(function):
        return False
    try:
        signature = inspect.signature(function)
    except ValueError:
        return True
    try:
        signature.bind(1, 2)
    except TypeError:
        return False
    return True


class Target:
    """A posterior over an unconstrained vector, split into prior and likelihood.

    Make one with :meth:`from_pyro`, :meth:`from_functions` or, where only their product is known,
    :meth:`from_log_density`. All methods take vectors with any leading batch shape and never change a torch global.

    Attributes
    ----------
    dim : int
        Dimension ``d`` of the unconstrained vector.
    sites : tuple of Site
        The continuous latent sites, in model order, with their slice of the vector.
    dtype, device
        Dtype and device of the model's data.
    compile : bool or "auto"
        Whether gradients are compiled; "auto" compiles where the planned work repays it.
    density : Density
        The evaluated density: of single vectors, or of batches where ``batched`` is true.
    loops : bool
        Whether the model cannot be batched, so that vectors are evaluated one by one.
    full_conditionals : callable or None
        For Gibbs sampling: returns, by block of sites, functions from the other sites' values to its distribution.
    has_density : bool
        False for the target of draws that were loaded without it, which can only be asked for names.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> target = bk.Target.from_pyro(model, torch.tensor([0.5, 1.5], dtype=torch.float64))
    >>> target.dim, target.dtype
    (1, torch.float64)
    >>> target.log_density(torch.zeros(3, 1, dtype=torch.float64)).shape
    torch.Size([3])
    """

    full_conditionals: Callable[[], Mapping[tuple[str, ...], Callable[[dict[str, Tensor]], Any]]] | None = None
    has_density = True

    def __init__(
        self,
        density: Density,
        *,
        compile: Compile,
        batched: bool = False,
        loops: bool = False,
        sample_prior: PriorSampler | None = None,
        engine: Evaluators | None = None,
    ) -> None:
        if compile not in (True, False, "auto"):
            raise SettingsError(f"compile must be True, False or 'auto', not {compile!r}")
        self.density = density
        self.batched = batched
        self.loops = loops
        self._sample_prior = sample_prior
        self.compile = compile
        self.dim, self.dtype, self.device = density.dim, density.dtype, density.device
        self.sites = density.sites
        self._engine = self._new_engine() if engine is None else engine
        self._dims: Mapping[str, Sequence[str]] = {}
        self._coords: Mapping[str, Sequence[Any]] = {}
        #: Cached diagnostics of this target; copies start without them.
        self.findings: dict[str, Any] = {}

    # -- making one -------------------------------------------------------------------------

    @classmethod
    def from_pyro(
        cls, model: Callable[..., Any], *args: Any, compile: Compile = "auto", seed: int = 0, **kwargs: Any
    ) -> Target:
        """Make a target from a Pyro model.

        Unobserved continuous sites become coordinates; observed sites and
        ``pyro.factor`` become the likelihood; sites marked
        ``infer={"enumerate": "parallel"}`` are summed out. ``pyro.param`` values are
        constants. A model without observed sites and factors has the likelihood one: its posterior is its prior.

        Parameters
        ----------
        model : callable
            A Pyro model: function, ``PyroModule`` or object with ``__call__``.
        *args, **kwargs
            Arguments of the model. Dtype and device are those of the tensors in them; arrays are tensors, and lists of
            real numbers are in double precision where no tensor of real numbers is beside them.
        compile : bool or "auto", default "auto"
            Compile gradients always, never, or where the planned work repays it.
        seed : int, default 0
            Seed of the run that reads the model's structure.

        Returns
        -------
        Target

        Raises
        ------
        ModelError
            If ``model`` is not a Pyro model, has no continuous latent site, or fails when run.
        UnsupportedSiteError
            If a latent site is discrete and unmarked, or its support has no bijection.
        DataError
            If an observed site or an argument holds NaN.

        Warns
        -----
        DataWarning
            If tensors are among the arguments, and the model has no observed site.
        SlowModelWarning
            If the model cannot be batched.
        AccuracyWarning
            If the gradient is not the derivative of the log density, for example if the model calls ``.detach()`` or
            ``.item()``.
        """
        with process_state():
            density = PyroDensity(model, args, kwargs, new_generator(seed))
            if not getattr(model, "makes_data", False):
                density.warn_without_data()
            probe = density.probe(new_generator(seed))
            density.check_repeatable(probe, new_generator(seed))
            loops = not can_be_batched(density, probe)
            density.check_parameters(new_generator(seed), batched=not loops)
            if loops:
                evaluate = with_gradient_loop(density.joint)
            else:
                evaluate = with_gradient(torch.func.vmap(density.joint))
            with suppress(*UNTRACEABLE):  # the model may fail at a neighbour of the probe
                warn_if_gradient_is_wrong(density, evaluate, probe)
        return cls(density, compile=compile, loops=loops)

    @classmethod
    def from_functions(
        cls,
        log_prior: Callable[[Tensor], Tensor],
        log_likelihood: Callable[[Tensor], Tensor],
        dim: int,
        sample_prior: PriorSampler | None = None,
        *,
        dtype: torch.dtype = torch.float64,
        device: torch.device | str = "cpu",
        compile: Compile = "auto",
    ) -> Target:
        """Make a target from two functions of an unconstrained vector.

        Parameters
        ----------
        log_prior, log_likelihood : callable
            ``(*batch, dim) -> (*batch)``. The prior must integrate to one.
        dim : int
            Dimension of the vector.
        sample_prior : callable, optional
            ``(n, generator) -> (n, dim)``; methods that start at the prior need it.
        dtype, device
            Dtype and device of the vectors that the functions take.
        compile : bool or "auto", default "auto"
            As in :meth:`from_pyro`.

        Returns
        -------
        Target

        Raises
        ------
        SettingsError
            If ``dim`` is less than one, or ``sample_prior`` does not take two positional arguments.
        ShapeError
            If a function does not map ``(2, dim)`` to ``(2,)``.

        Examples
        --------
        >>> import torch, bayeskit as bk
        >>> normal = torch.distributions.Normal(torch.tensor(0.0, dtype=torch.float64), 1.0)
        >>> target = bk.Target.from_functions(
        ...     lambda u: normal.log_prob(u).sum(-1), lambda u: -u.square().sum(-1), dim=2,
        ...     sample_prior=lambda n, g: torch.randn(n, 2, generator=g, dtype=torch.float64))
        >>> target.value_and_grad(torch.zeros(4, 2, dtype=torch.float64))[1].shape
        torch.Size([4, 2])
        """
        dim = whole_number("dim", dim, least=1)
        device = torch.device(device)
        probe = torch.zeros(2, dim, dtype=dtype, device=device)
        for name, function in (("log_prior", log_prior), ("log_likelihood", log_likelihood)):
            with lines_named(name):
                shape = tuple(torch.as_tensor(function(probe)).shape)
            if shape != (2,):
                raise ShapeError(
                    f"{name} maps (2, {dim}) to {shape} instead of (2,); sum over the last dimension only, "
                    "or wrap a function of one vector in torch.func.vmap"
                )
        if sample_prior is not None and not _takes_two(sample_prior):
            raise SettingsError(
                "sample_prior cannot be called as sample_prior(n, generator). Remedy: wrap it, such as "
                "lambda n, generator: other.sample_prior(n, seed=generator)"
            )
        density = FunctionDensity(log_prior, log_likelihood, dim, dtype, device)
        return cls(density, compile=compile, batched=True, sample_prior=sample_prior)

    @classmethod
    def from_log_density(
        cls,
        value_and_grad: Callable[..., Any],
        dim: int,
        *,
        names: Names | None = None,
        constrain: Callable[..., Mapping[str, Any]] | None = None,
        batched: bool = False,
        inputs: Literal["numpy", "torch"] = "numpy",
        start: Any = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        compile: Compile = "auto",
        check_gradient: bool = True,
    ) -> Target:
        """Make a target from one function: a log posterior density over unconstrained space, with its gradient.

        The function may be of any library: of BridgeStan, PyMC, JAX or your own. It is tried at a few points before
        anything is computed with it. Samplers, and all estimators of the evidence that need no prior of its own, take
        the target; others refuse it. The evidence is the integral of the function, so it has to hold the Jacobian of
        the constraints, and the constants of prior and likelihood.

        Parameters
        ----------
        value_and_grad : callable
            From a vector ``(dim,)`` to a pair: the log density, a number, and its gradient ``(dim,)``, as NumPy or JAX
            arrays, numbers or tensors. Where it is not defined it returns minus infinity, or raises an
            ``ArithmeticError``, ``ValueError`` or ``RuntimeError``. With ``inputs="torch"`` it may return the log
            density alone, which torch then differentiates.
        dim : int
            Number ``d`` of unconstrained coordinates.
        names : mapping of str to shape, or sequence of str, optional
            Names of blocks of the vector, in order, such as ``{"beta": (3,), "log_sigma": ()}``, or of each coordinate.
        constrain : callable, optional
            From the same argument as ``value_and_grad`` to a dictionary of values, which draws then have instead of the
            coordinates.
        batched : bool, default False
            Whether both functions take the rows of a matrix ``(n, dim)``, with ``n`` the first dimension of all that
            they return. If not, chains are evaluated one by one.
        inputs : {"numpy", "torch"}, default "numpy"
            What both functions take: arrays or tensors.
        start : array_like, optional
            A point of positive density, ``(dim,)``. The function is checked there, and chains start around it; by
            default both happen around zero.
        dtype : torch.float64 or torch.float32, optional
            Precision, by default that of the gradient that the function returns.
        device : torch.device or str, default "cpu"
            Device of the draws.
        compile : bool or "auto", default "auto"
            As in :meth:`from_pyro`, for functions that torch differentiates.
        check_gradient : bool, default True
            Compare the gradient with differences of the log density, at one point.

        Returns
        -------
        Target
            :attr:`is_split` is false; :meth:`evaluate` returns zero as the log prior.

        Raises
        ------
        SettingsError
            If an argument is not of the kind above, or ``dtype`` claims more precision than the function has.
        ShapeError
            If the function returns another shape, or ``names`` or ``start`` do not fit ``dim``.
        ModelError
            If the function raises, returns no pair or is random, or the gradient is not the derivative of the value up
            to rounding and the error of differences.
        DataError
            If the log density or its gradient is NaN at the start.
        InitializationError
            If the density is zero there.

        Warns
        -----
        AccuracyWarning
            If the function raises at some points.

        Examples
        --------
        >>> import numpy as np, bayeskit as bk
        >>> def value_and_grad(u):
        ...     return -0.5 * u @ u, -u
        >>> target = bk.Target.from_log_density(value_and_grad, 2, names=["x", "y"])
        >>> target
        Target(dim=2, sites=[x(), y()], dtype=torch.float64, device=cpu)
        >>> draws = bk.sample(target, num_samples=500, progress=False)
        >>> z = bk.evidence.bridge_sampling(target, draws)
        >>> bool(abs(z.log_evidence - np.log(2 * np.pi)) < 4 * z.standard_error)
        True
        """
        density = checked_density(
            value_and_grad,
            dim,
            names=names,
            constrain=constrain,
            batched=batched,
            inputs=inputs,
            start=start,
            dtype=dtype,
            device=torch.device(device),
            check_gradient=check_gradient,
        )
        known = isinstance(density, OwnGradient)
        return cls(density, compile=compile, batched=batched or known, loops=known and not batched)

    @classmethod
    def from_numpyro(cls, model: Callable[..., Any], *args: Any, seed: int = 0, **kwargs: Any) -> Target:
        """Make a target from a NumPyro model.

        The density, its gradient and all draws are NumPyro's own, compiled and batched by JAX in double precision.
        Observed sites and ``numpyro.factor`` become the likelihood, discrete latent sites are summed out by funsor.

        Parameters
        ----------
        model : callable
            A NumPyro model.
        *args, **kwargs
            Arguments of the model.
        seed : int, default 0
            Seed of the run that reads the model's structure.

        Returns
        -------
        Target

        Raises
        ------
        ModelError
            If the model has no continuous latent site, or fails when run.
        UnsupportedSiteError
            If a plate is subsampled, a site is a parameter to be optimised, or a discrete site cannot be summed out.
        DataError
            If an observed site holds NaN.
        ImportError
            If NumPyro is not installed.

        Warns
        -----
        PrecisionWarning
            If an argument has single precision.

        Examples
        --------
        >>> import numpy as np, numpyro, numpyro.distributions as dist, bayeskit as bk
        >>> def model(y):
        ...     mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("row", len(y)):
        ...         numpyro.sample("y", dist.Normal(mean, 1.0), obs=y)
        >>> target = bk.Target.from_numpyro(model, np.array([0.5, 1.5]))
        >>> target.dim, target.dimensions()["y"]
        (1, ('row',))
        """
        from bayeskit._logdensity.numpyro_density import NumPyroDensity

        return cls(NumPyroDensity(model, args, kwargs, seed), compile=False, batched=True)

    @classmethod
    def from_pymc(cls, model: Any) -> Target:
        """Make a target from a PyMC or Bambi model.

        The density is the graph that PyMC makes of the model, compiled and batched by JAX in double precision. Free
        variables are the prior; observed ones, and potentials, are the likelihood. Names of dimensions and labels are
        the model's own. Predictions take new values of ``pymc.Data`` by name: ``draws.predictive(x=x_new)``.

        Parameters
        ----------
        model : pymc.Model or bambi.Model
            A model with data. Values of ``pymc.Data`` that are set later do not change the target.

        Returns
        -------
        Target

        Raises
        ------
        ModelError
            If the model has no continuous latent variable, or PyTensor cannot translate an operation to JAX.
        UnsupportedSiteError
            If a latent variable is discrete, or data are a minibatch or those of a simulator.
        DataError
            If data hold NaN.
        ImportError
            If PyMC or JAX is not installed.

        Examples
        --------
        >>> import numpy as np, pymc as pm, bayeskit as bk
        >>> with pm.Model(coords={"row": ["a", "b"]}) as model:
        ...     mean = pm.Normal("mean", 0.0, 1.0, dims="row")
        ...     y = pm.Normal("y", mean, 1.0, observed=np.array([0.5, 1.5]), dims="row")
        >>> bk.Target.from_pymc(model).names
        ('mean[a]', 'mean[b]')
        """
        from bayeskit._logdensity.pymc_density import PyMCDensity

        return cls(PyMCDensity(model), compile=False, batched=True)

    @classmethod
    def from_stan(
        cls, program: str | Path, data: Any, *, prior: str | Path | Mapping[str, Any] | None = None
    ) -> Target:
        """Make a target from a Stan program and its data.

        The program is translated and compiled as Stan does it, with all constants of its densities; rows of vectors are
        evaluated in one call. Transformed parameters are deterministic sites, ``log_lik`` is the log likelihood of the
        observations, and other generated quantities are predictions.

        A program does not tell its prior from its likelihood. Without ``prior``, :attr:`is_split` is false, and methods
        that need the prior by itself refuse the target by name.

        Parameters
        ----------
        program : str or Path
            The program, or the path of a file ``.stan``.
        data : mapping or path
            Data by name, or the path of a file of JSON.
        prior : str, Path or mapping, optional
            A program with the same parameters whose density is the prior, or data by which the same program becomes it,
            such as ``{"prior_only": 1}`` in programs of brms.

        Returns
        -------
        Target
            It has no draws from the prior.

        Raises
        ------
        ModelError
            If Stan or the C++ compiler refuses the program, or the prior has other parameters.
        DataError
            If the program refuses its data, or these hold NaN.
        ImportError
            If Stan's compiler and headers, which PyStan brings, are not installed.

        Warns
        -----
        AccuracyWarning
            If the program rejects all of several points. Rejected points have density zero.

        Examples
        --------
        >>> import torch, bayeskit as bk
        >>> program = "parameters { real<lower=0> x; } model { x ~ exponential(1); }"
        >>> target = bk.Target.from_stan(program, {})
        >>> target.log_density(torch.zeros(1, dtype=torch.float64))  # x is one, and the Jacobian as well
        tensor(-1., dtype=torch.float64)
        """
        from bayeskit._logdensity.stan_density import StanDensity

        return cls(StanDensity(program, data, prior), compile=False, batched=True)

    # -- evaluating -------------------------------------------------------------------------

    @property
    def is_split(self) -> bool:
        """Whether prior and likelihood are known apart, as they are not for :meth:`from_log_density`."""
        return not isinstance(self.density, OwnDensity) and getattr(self.density, "is_split", True)

    @property
    def has_constant_likelihood(self) -> bool:
        """Whether the likelihood is one number, because nothing in it depends on the vector."""
        if "constant likelihood" not in self.findings:
            self.findings["constant likelihood"] = self.is_split and not self.loops and not self._likelihood_varies()
        return bool(self.findings["constant likelihood"])

    def _likelihood_varies(self) -> bool:
        if isinstance(self.density, ForeignDensity):
            return self.density.has_likelihood
        leaf = torch.zeros(1, self.dim, dtype=self.dtype, device=self.device, requires_grad=True)
        try:
            with torch.enable_grad(), process_state():
                return bool(self._joint_of_batch(leaf)[1].requires_grad)
        except UNTRACEABLE:
            return True

    def _require_split(self, what: str) -> None:
        if not self.is_split:
            raise ModelError(f"this target has no {what} of its own, because {ONE_DENSITY}")

    def log_prior(self, u: Tensor) -> Tensor:
        """Return the log prior density over unconstrained space, ``(*batch, d) -> (*batch)``."""
        self._require_split("prior")
        return self.evaluate(u)[0]

    def log_likelihood(self, u: Tensor) -> Tensor:
        """Return the log likelihood, ``(*batch, d) -> (*batch)``."""
        self._require_split("likelihood")
        return self.evaluate(u)[1]

    def log_density(self, u: Tensor, beta: float | Tensor = 1.0) -> Tensor:
        """Return ``log_prior + beta * log_likelihood``, ``(*batch, d) -> (*batch)``; ``beta`` broadcasts."""
        log_prior, log_likelihood = self.evaluate(u)
        return tempered(log_prior, log_likelihood, self._beta(beta, u.shape[:-1]))

    def evaluate(self, u: Tensor, *, compiled: bool = True) -> tuple[Tensor, Tensor]:
        """Return ``(log_prior, log_likelihood)``, each ``(*batch, d) -> (*batch)``, in one pass.

        ``compiled=False`` gives the same bits, independent of earlier compilation.
        """
        u = self._checked(u)
        fast = self._engine.compiled(u.shape[:-1].numel()) if compiled else None
        if fast is not None and not u.requires_grad:
            # A compiled gradient costs less than an eager value.
            with one_thread():
                flat = u.reshape(-1, self.dim)
                result = fast(flat, torch.ones_like(flat[:, 0]))
            return result.log_prior.reshape(u.shape[:-1]), result.log_likelihood.reshape(u.shape[:-1])
        return self._evaluate_eagerly(u)

    def _evaluate_eagerly(self, u: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return self._map(self.density.joint, u)
        except torch.linalg.LinAlgError:
            # One matrix that cannot be factorised stops the whole batch; take the vectors one by one.
            rows = [self._evaluate_alone(row) for row in u.reshape(-1, self.dim)]
            return gather(rows, u.shape[:-1])

    def _evaluate_alone(self, row: Tensor) -> tuple[Tensor, Tensor]:
        try:
            return self._map(self.density.joint, row.unsqueeze(0))
        except torch.linalg.LinAlgError:
            nan = torch.full((1,), torch.nan, dtype=self.dtype, device=self.device)
            return nan, nan

    def pointwise_log_likelihood(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation, ``(*batch, d) -> {site: (*batch, *obs)}``.

        Raises
        ------
        ModelError
            If summed-out sites couple the observations, or the target has no
            observed site of its own.
        """
        return self._map(self.density.pointwise, self._checked(u))

    def log_likelihood_by_plate(self, u: Tensor, plate: str) -> Tensor:
        """Return the log likelihood of all observations in each element of a plate, ``(*batch, d) -> (*batch, size)``.

        Discrete sites are summed out within each element.

        Raises
        ------
        ModelError
            If an observed or summed-out site is outside of the plate, or the target is not made from a Pyro model.
        """
        density = self.density
        if not isinstance(density, PyroDensity):
            raise ModelError("plates are known of a Pyro model only, and this target was made from functions")
        found = self._map(lambda row: {plate: density.by_plate(row, plate)}, self._checked(u))
        return cast(Tensor, found[plate])

    def value_and_grad(self, u: Tensor, beta: float | Tensor = 1.0) -> tuple[Tensor, Tensor]:
        """Return the tempered log density and its gradient, ``(*batch, d) -> (*batch), (*batch, d)``.

        The graph is traced on the first call with a given number of vectors.
        """
        batch = u.shape[:-1]
        ready = isinstance(beta, Tensor) and beta.shape == batch and u.dtype == beta.dtype == self.dtype
        if ready and isinstance(beta, Tensor) and batch.numel() > 0 and u.dim() == 2 and u.shape[1] == self.dim:
            result = self.evaluator(batch[0])(u, beta)
            return result.log_density, result.gradient
        flat = self._checked(u).reshape(-1, self.dim)
        b = self._beta(beta, batch).expand(batch).reshape(-1)
        if len(flat) == 0:
            return flat.new_empty(batch), torch.empty_like(u, dtype=self.dtype, device=self.device)
        result = self.evaluator(len(flat))(flat, b)
        return result.log_density.reshape(batch), result.gradient.reshape(u.shape)

    def evaluator(self, num_vectors: int, num_calls: int = 1) -> Evaluator:
        """Return the function that gradient-based samplers call in their inner loop.

        Parameters
        ----------
        num_vectors : int
            Number of rows ``n`` of every call.
        num_calls : int, default 1
            Planned number of calls; under ``compile="auto"`` the graph is compiled
            if the traced graph would need more than a few seconds for them.

        Returns
        -------
        callable
            ``(u (n, d), beta (n,)) -> Evaluation``.
        """
        return self._engine.evaluator(num_vectors, num_calls, self.compile)

    def ready_evaluator(self, num_vectors: int) -> Evaluator:
        """Return an evaluator that exists: the compiled one that serves ``num_vectors`` rows, or else a traced one."""
        return self._engine.compiled(num_vectors) or self.evaluator(num_vectors)

    def untraced(self) -> Evaluator | None:
        """Return an evaluator that runs the model anew in each call; None if it loops, or its gradient is not torch's.

        Whatever changes the functions of torch for a time, such as a ``TorchFunctionMode``, changes its results.
        """
        if self.loops or isinstance(self.density, Evaluators):
            return None
        return with_gradient(self._joint_of_batch)

    @property
    def cost(self) -> Cost:
        """Nodes and bytes of the gradient graph of one vector."""
        return self._engine.cost

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"findings": {}}

    def without_graphs(self) -> Target:
        """Return a copy of the target without its traced and compiled graphs."""
        bare = copy.copy(self)
        bare.density = copy.copy(self.density)
        bare._engine = bare._new_engine()
        return bare

    def _new_engine(self) -> Evaluators:
        if isinstance(self.density, Evaluators):
            return self.density
        data_bytes = sum(x.numel() * x.element_size() for x in self.density.data)
        one_by_one = self.density.joint if self.loops else None
        return Engine(self._joint_of_batch, self.dim, self.dtype, self.device, data_bytes, one_by_one)

    def _joint_of_batch(self, u: Tensor) -> tuple[Tensor, Tensor]:
        return self.density.joint(u) if self.batched else torch.func.vmap(self.density.joint)(u)

    def _map(self, function: Callable[[Tensor], Any], u: Tensor) -> Any:
        """Apply a function of one vector to every vector of a batch, in chunks."""
        batch = u.shape[:-1]
        if batch.numel() == 0:
            shapes = self._map(function, u.new_zeros(1, self.dim))  # one vector gives the shapes
            return gather([first_rows(shapes, 0)], batch)
        flat = u.reshape(-1, self.dim)
        if self.loops:
            return gather([lift(function(row)) for row in flat], batch)
        batched = function if self.batched else torch.func.vmap(function)
        chunk = len(flat) if len(flat) <= 64 else self.cost.chunk_size(len(flat))
        parts = []
        with one_thread():
            for rows in flat.split(chunk):
                try:
                    parts.append(batched(rows))
                except torch.linalg.LinAlgError:
                    with FailingApart():
                        parts.append(batched(rows))
        return gather(parts, batch)

    def predictive(
        self, u: Tensor, *args: Any, seed: int | torch.Generator = 0, redraw: Collection[str] = (), **kwargs: Any
    ) -> dict[str, Tensor]:
        """Draw data from the model at given parameters, ``(*batch, d) -> {site: (*batch, *shape)}``.

        Parameters
        ----------
        u : Tensor
            Unconstrained vectors, shape ``(*batch, d)``.
        *args, **kwargs
            Other arguments for the model, such as new covariates; by default its own. Data that the model takes are
            given with the shape that is to be drawn, or as None where the model then leaves them out.
        seed : int or torch.Generator, default 0
        redraw : collection of str, optional
            Latent sites that are drawn anew, such as the effects of new groups.

        Returns
        -------
        dict of str to Tensor
            Of the observed sites, of discrete and redrawn sites and, for new arguments, of deterministic sites.

        Raises
        ------
        ModelError
            If the target was made from functions, or the model fails with these arguments.
        ShapeError
            If a latent site has another shape with these arguments.
        UnsupportedSiteError
            If the data of a site cannot be drawn, as those of a factor.
        UnknownNameError
            If a site to be redrawn does not exist.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(x, y):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> target = bk.Target.from_pyro(model, torch.zeros(3), torch.zeros(3))
        >>> target.predictive(torch.zeros(10, 1), torch.arange(5.0), None)["y"].shape
        torch.Size([10, 5])
        """
        density, generator = self.density, new_generator(seed, stream="predictive")
        for name in redraw:
            if name not in (known := [site.name for site in self.sites]):
                raise unknown_name("latent site", name, known)
        if isinstance(density, ForeignDensity):
            rows = self._checked(u)
            found = density.predictive(rows.reshape(-1, self.dim), generator, redraw, args, kwargs)
            return {name: x.reshape(rows.shape[:-1] + x.shape[1:]) for name, x in found.items()}
        if not isinstance(density, PyroDensity):
            raise ModelError("data can be drawn from a model only, and this target was made from functions")
        given = density.arguments(args, kwargs) if args or kwargs else (None, None)

        def one(row: Tensor) -> dict[str, Tensor]:
            return density.predict(density.values(row, False), redraw, *given)

        return self._at_random(one, self._checked(u), generator)

    def _at_random(
        self, draw: Callable[[Tensor], dict[str, Tensor]], u: Tensor, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Draw at every vector of a batch."""
        flat = u.reshape(-1, self.dim)
        with global_stream(generator), one_thread():
            try:
                chunks = flat.split(_DRAWN_TOGETHER)
                parts = [torch.func.vmap(draw, randomness="different")(rows) for rows in chunks]
            except UNTRACEABLE:  # a distribution that cannot be drawn in a batch, or a model that fails
                parts = []
                with progress_bar("drawing one by one", len(flat), True) as bar:
                    for row in flat:
                        parts.append(lift(self._drawn(draw, row)))
                        bar.update(len(parts))
        drawn: dict[str, Tensor] = gather(parts, u.shape[:-1])
        return drawn

    @staticmethod
    def _drawn(draw: Callable[[Tensor], dict[str, Tensor]], row: Tensor) -> dict[str, Tensor]:
        try:
            return draw(row)
        except UNTRACEABLE as error:
            if isinstance(error, BayeskitError):
                raise
            raise ModelError(f"the model fails with these arguments{place_of(error)}: {words_of(error)}") from error

    def discrete_probabilities(self, u: Tensor) -> dict[str, Tensor]:
        """Return the posterior probabilities of the values of each summed-out site, given parameters and data.

        Parameters
        ----------
        u : Tensor
            Unconstrained vectors, shape ``(*batch, d)``.

        Returns
        -------
        dict of str to Tensor
            For each site marked for enumeration ``(*batch, *plates, K)``: the probability of each of its ``K`` values,
            in the order of ``enumerate_support``, with all other such sites summed out.

        Raises
        ------
        ModelError
            If the model has no site that is summed out, or its sites cannot be summed out plate by plate.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(y):
        ...     distance = pyro.sample("distance", dist.HalfNormal(3.0))
        ...     with pyro.plate("data", len(y)):
        ...         side = pyro.sample("side", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        ...         pyro.sample("y", dist.Normal(distance * (2 * side - 1), 1.0), obs=y)
        >>> target = bk.Target.from_pyro(model, torch.tensor([-2.0, 0.0, 1.0]))
        >>> at = target.unconstrain({"distance": torch.tensor(1.0)})
        >>> target.discrete_probabilities(at)["side"][:, 1]
        tensor([0.0180, 0.5000, 0.8808])
        """
        density = self._summing()
        return self._map(lambda row: density.discrete(row, draw=False), self._checked(u))

    def infer_discrete(self, u: Tensor, *, seed: int | torch.Generator = 0) -> dict[str, Tensor]:
        """Draw the summed-out sites jointly from their posterior given parameters and data.

        Parameters
        ----------
        u : Tensor
            Unconstrained vectors, shape ``(*batch, d)``.
        seed : int or torch.Generator, default 0

        Returns
        -------
        dict of str to Tensor
            ``{site: (*batch, *shape)}``, one joint draw at each vector.

        Raises
        ------
        ModelError
            As :meth:`discrete_probabilities`.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(y):
        ...     distance = pyro.sample("distance", dist.HalfNormal(3.0))
        ...     with pyro.plate("data", len(y)):
        ...         side = pyro.sample("side", dist.Bernoulli(0.5), infer={"enumerate": "parallel"})
        ...         pyro.sample("y", dist.Normal(distance * (2 * side - 1), 1.0), obs=y)
        >>> target = bk.Target.from_pyro(model, torch.tensor([-2.0, 0.0, 1.0]))
        >>> target.infer_discrete(torch.zeros(10, 1))["side"].shape
        torch.Size([10, 3])
        """
        density = self._summing()
        generator = new_generator(seed, stream="discrete sites")
        return self._at_random(lambda row: density.discrete(row, draw=True), self._checked(u), generator)

    def _summing(self) -> PyroDensity:
        if not isinstance(self.density, PyroDensity) or not self.density.summed_sites:
            raise ModelError(
                "the model has no site that is summed out; discrete sites marked with "
                'infer={"enumerate": "parallel"} are'
            )
        return self.density

    def dimensions(self) -> dict[str, tuple[str | None, ...]]:
        """Return the plate along each dimension of each site's value, None where there is none."""
        own: dict[str, tuple[str | None, ...]] = {}
        if isinstance(self.density, OwnDensity):
            own = {name: (None,) * len(shape) for name, shape in self.density.shapes.items()}
        elif isinstance(self.density, MODELS):
            own = {name: (None,) * value.dim() for name, value in self.named_data()[1].items()}
            own |= self.density.dimensions()
        return with_names(own, self._dims)

    @property
    def labels(self) -> DimensionLabels:
        """Names of the dimensions of sites, and labels along them: of categories by the name of a plate, or given."""
        sizes = self._sizes()
        fitting = {name: labels for name, labels in self.categories.items() if len(labels) == sizes.get(name)}
        return DimensionLabels(self.dimensions(), fitting | dict(self._coords))

    def _sizes(self) -> dict[str, int]:
        """Return the sizes of plates and named dimensions."""
        observed, constant = self.named_data()
        shapes = {site.name: site.shape for site in self.sites}
        shapes |= {name: value.shape for name, value in (observed | constant).items()}
        return sizes_of(self.dimensions(), shapes)

    def labelled(
        self, coords: Mapping[str, Sequence[Any]] | None = None, dims: Mapping[str, Sequence[str]] | None = None
    ) -> Target:
        """Return the same target with labels along its plates and dimensions.

        Summaries, warnings, reports and ArviZ have these labels, such as ``effect[Minnesota]``. A plate with the name
        of a categorical argument or column has the categories as labels by itself.

        Parameters
        ----------
        coords : mapping of str to sequence, optional
            Labels by plate or dimension, such as ``{"state": ["Iowa", "Minnesota"]}``.
        dims : mapping of str to sequence of str, optional
            Names of the last dimensions of a site, or of an argument of the model, where plates do not name them.

        Raises
        ------
        DataError
            If two labels of a dimension are equal.
        ShapeError
            If there are more names than dimensions, or another number of labels than the dimension has.
        UnknownNameError
            If there is no such site, plate or dimension.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(y):
        ...     with pyro.plate("state", 2):
        ...         effect = pyro.sample("effect", dist.Normal(0.0, 1.0))
        ...         pyro.sample("y", dist.Normal(effect, 1.0), obs=y)
        >>> target = bk.Target.from_pyro(model, torch.tensor([0.5, 1.5], dtype=torch.float64))
        >>> target.labelled(coords={"state": ["Iowa", "Minnesota"]}).names
        ('effect[Iowa]', 'effect[Minnesota]')
        """
        other = object.__new__(type(self))
        other.__dict__ |= self.__dict__  # with its graphs, and what is known of it
        other._dims = {**self._dims, **(dims or {})}
        other._coords = {**self._coords, **checked_coords(coords, other._sizes())}
        return other

    def counted(self) -> dict[str, Tensor]:
        """Return which data of a site count, bool ``(*plates)``, of the sites of which a mask leaves some out."""
        return self.density.counted if isinstance(self.density, MODELS) else {}

    def whole_numbers(self) -> frozenset[str]:
        """Return the names of observed and summed-out sites whose values are whole numbers."""
        return frozenset(self.density.whole_numbers) if isinstance(self.density, MODELS) else frozenset()

    def element_names(self) -> dict[str, tuple[str, ...]]:
        """Return names of the elements of vector sites, where the model has an attribute ``element_names``."""
        named = getattr(self._model, "element_names", {})
        sizes = {site.name: tuple(site.shape) for site in self.sites}
        return {site: tuple(of) for site, of in named.items() if sizes.get(site) == (len(of),)}

    def plot_values(self, values: Mapping[str, Tensor], ax: Any) -> tuple[str, str] | None:
        """Let a model with a method ``plot_values`` draw itself at values of its sites; return words, a caption."""
        plot = getattr(self._model, "plot_values", None)
        return None if plot is None else plot(values, ax)

    @property
    def _model(self) -> Any:
        return self.density.model if isinstance(self.density, PyroDensity) else None

    def named_data(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the data of the observed sites, and the other tensors among the model's arguments, by name."""
        return self.density.named_data() if isinstance(self.density, MODELS) else ({}, {})

    # -- moving between spaces --------------------------------------------------------------

    def sample_prior(self, num_draws: int, *, seed: int | torch.Generator = 0) -> Tensor:
        """Draw from the prior, in unconstrained space.

        Parameters
        ----------
        num_draws : int
            Number of draws ``n``.
        seed : int or torch.Generator, default 0

        Returns
        -------
        Tensor
            Shape ``(n, d)``.

        Raises
        ------
        SettingsError
            If ``num_draws`` is less than one, functions came without ``sample_prior``, or a prior is flat or masked.
        """
        num_draws = whole_number("num_draws", num_draws, least=1)
        generator = new_generator(seed, stream="prior")
        if not self.is_split:
            raise SettingsError(f"this target cannot draw from its prior, because {ONE_DENSITY}")
        if isinstance(self.density, PyroDensity):
            return self.density.prior_draws(num_draws, generator, not self.loops)
        if isinstance(self.density, ForeignDensity):
            return self.density.prior_draws(num_draws, generator)
        if self._sample_prior is None:
            missing = "pass sample_prior=(n, generator) -> (n, dim) to Target.from_functions"
            raise SettingsError(f"this target cannot draw from its prior; {missing}")
        draws = self._sample_prior(num_draws, generator)
        if tuple(draws.shape) != (num_draws, self.dim):
            raise ShapeError(f"sample_prior returned shape {tuple(draws.shape)} instead of {(num_draws, self.dim)}")
        return draws.to(self.dtype)

    @property
    def can_sample_prior(self) -> bool:
        """Whether :meth:`sample_prior` works."""
        foreign = isinstance(self.density, ForeignDensity) and self.density.draws_prior
        drawn = foreign or isinstance(self.density, PyroDensity) or self._sample_prior is not None
        return drawn and not getattr(self.density, "improper_sites", ())

    def constrain(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the sites' values, ``(*batch, d) -> {site: (*batch, *shape)}``.

        Parameters
        ----------
        u : Tensor
            Unconstrained vectors, shape ``(*batch, d)``.
        deterministic : bool, default False
            Include the model's ``pyro.deterministic`` sites, except those that depend on
            a summed-out site and so have no single value.
        """
        return self._map(lambda v: self.density.values(v, deterministic), self._checked(u))

    def unconstrain(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of site values, ``{site: (*batch, *shape)} -> (*batch, d)``.

        Raises
        ------
        ShapeError
            If a site is missing or its trailing shape is not that of the model.
        DataError
            If a value lies outside the support of its site.
        """
        batch: torch.Size | None = None
        flat = {}
        for site in self.sites:
            if site.name not in values:
                needed = [s.name for s in self.sites]
                raise ShapeError(f"site {site.name!r} has no value; pass values for the sites {needed}")
            value = torch.as_tensor(values[site.name], dtype=self.dtype, device=self.device)
            cut = value.dim() - len(site.shape)
            if cut < 0 or value.shape[cut:] != site.shape:
                raise ShapeError(
                    f"site {site.name!r} has shape {tuple(site.shape)}, but its value has shape {tuple(value.shape)}"
                )
            if batch is not None and batch != value.shape[:cut]:
                raise ShapeError(f"site {site.name!r} has batch shape {tuple(value.shape[:cut])}, not {tuple(batch)}")
            batch = value.shape[:cut]
            flat[site.name] = value.reshape(-1, *site.shape)
        count = next(iter(flat.values())).shape[0]
        if count == 0:
            return torch.empty(*(batch or ()), self.dim, dtype=self.dtype, device=self.device)
        vectors = self._vectors_together(flat, count)
        if vectors is None:
            rows = [self.density.vector({k: v[i] for k, v in flat.items()}) for i in range(count)]
            vectors = torch.stack(rows)
        return vectors.reshape(*(batch or ()), self.dim)

    def _vectors_together(self, values: dict[str, Tensor], count: int) -> Tensor | None:
        """Return the unconstrained vectors of values ``(count, *shape)`` from one batch, or None.

        vmap forbids the check of supports. None is returned where the vectors do not give the values back, which is so
        for values outside of their support.
        """
        if isinstance(self.density, ForeignDensity):
            return self.density.vectors(values)
        if count < _FEW_VECTORS or self.loops or not isinstance(self.density, PyroDensity):
            return None
        convert = partial(self.density.vector, check=False)
        try:
            vectors = torch.func.vmap(convert, chunk_size=_DRAWN_TOGETHER)(values)
            again = self.constrain(vectors)
        except UNTRACEABLE:
            return None
        close = 10 * torch.finfo(self.dtype).eps ** 0.5
        same = [(again[name] - x).abs() <= close * (x.abs() + x.std()) for name, x in values.items()]
        return vectors if all(bool(each.all()) for each in same) else None

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log abs(d constrained / d unconstrained), ``(*batch, d) -> (*batch)``; zero for functions.

        ``log_density(u) - log_jacobian(u)`` is a density of the constrained values: of all entries of a simplex but
        the last, and of one triangle of a symmetric matrix.

        Raises
        ------
        ModelError
            If the Jacobian of the target's density is not known.
        """
        density = self.density
        if not isinstance(density, Constrained):
            raise ModelError(f"the Jacobian of {type(density).__name__} is not known; build it with Target.from_pyro")
        result: tuple[Tensor] = self._map(lambda v: (density.log_jacobian(v),), self._checked(u))
        return result[0]

    def rounding(self, u: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change of the log density due to values that are rounded to an end of their support.

        The likelihood depends on values, not on coordinates: a probability with a logit above 36 is rounded to one. The
        prior is exact there, and so is a likelihood that tends to a limit; a likelihood that keeps changing is not.

        Parameters
        ----------
        u : Tensor
            Shape ``(*batch, d)``.

        Returns
        -------
        change : Tensor
            Change of the log density when rounded values move one unit of rounding inside, ``(*batch)``;
            zero where no value is rounded, and for targets from functions.
        rounded : dict of Tensor
            By site, whether a value is rounded, ``(*batch)``, bool.

        Examples
        --------
        >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
        >>> def model(y):
        ...     p = pyro.sample("p", dist.Beta(0.1, 0.1))
        ...     pyro.sample("y", dist.Bernoulli(p), obs=y)
        >>> target = bk.Target.from_pyro(model, torch.tensor(0.0, dtype=torch.float64))
        >>> change, rounded = target.rounding(torch.tensor([[3.0], [50.0]], dtype=torch.float64))
        >>> change, rounded["p"]
        (tensor([0.0000, 0.6931], dtype=torch.float64), tensor([False,  True]))
        """
        u = self._checked(u)
        density = self.density
        if not isinstance(density, PyroDensity):
            return torch.zeros_like(u[..., 0]), {}
        change, rounded = self._map(density.rounding, u)
        return change, {site.name: rounded[..., i] for i, site in enumerate(self.sites)}

    @property
    def problems(self) -> tuple[str, ...]:
        """Why the density cannot be trusted, each with its remedy; estimates of the evidence repeat them."""
        return ()

    @property
    def needs_correction(self) -> bool:
        """Whether the density approximates another, and estimates of the evidence are corrected for it."""
        return False

    def correction(self, draws: Any, *, seed: int | torch.Generator = 0, progress: bool = True) -> Any:
        """Return what the density misses of the log evidence, from draws of it; None where it is no approximation."""
        return None

    @property
    def names(self) -> tuple[str, ...]:
        """A readable name for each unconstrained coordinate, such as ``theta[2]``, or ``theta[Iowa]`` by a label."""
        return unconstrained_names(self.sites, self.labels)

    @property
    def categories(self) -> dict[str, tuple[Any, ...]]:
        """Labels of the categories among the model's arguments, in the order of their codes.

        Keys are the names of arguments, or of columns and keys where an argument is a frame or a mapping.
        """
        return dict(self.density.categories) if isinstance(self.density, MODELS) else {}

    def fingerprint(self) -> str:
        """Return a digest of the model's sites, its data, and its density at two fixed points.

        Of a single function (:meth:`from_log_density`) the digest has the density at four points, to nine digits: other
        data are noticed if they change one of these numbers.
        """
        start = self.density.start if isinstance(self.density, OwnDensity) else None
        return fingerprint(self.density, lambda u: self._evaluate_eagerly(self._checked(u)), start)

    # -- checking ---------------------------------------------------------------------------

    def _checked(self, u: Tensor) -> Tensor:
        if u.dim() == 0 or u.shape[-1] != self.dim:
            raise ShapeError(f"the last dimension of u must be {self.dim}, but u has shape {tuple(u.shape)}")
        return u.to(dtype=self.dtype, device=self.device)

    def _beta(self, beta: float | Tensor, batch: torch.Size) -> Tensor:
        result = torch.as_tensor(beta, dtype=self.dtype, device=self.device)
        padded = (1,) * (len(batch) - result.dim()) + tuple(result.shape)
        if len(padded) > len(batch) or any(n not in (1, m) for n, m in zip(padded, batch, strict=True)):
            raise ShapeError(f"beta has shape {tuple(result.shape)}, which does not broadcast to {tuple(batch)}")
        return result

    def _repr_html_(self) -> str:
        dimensions, observed = self.dimensions(), self.named_data()[0]
        rows = [(site.name, tuple(site.shape), "latent") for site in self.sites]
        rows += [(name, tuple(x.shape), "observed") for name, x in observed.items()]
        cells = [
            (name, role, " x ".join(map(str, shape)) or "scalar", ", ".join(d or "-" for d in dimensions.get(name, ())))
            for name, shape, role in rows
        ]
        facts = {"dtype": str(self.dtype).removeprefix("torch."), "device": str(self.device)}
        headline = f"Target of {self.dim} unconstrained coordinates"
        return result_html(headline, [PageTable("Sites", ("site", "role", "shape", "dimensions"), cells)], facts=facts)

    def __repr__(self) -> str:
        sites = ", ".join(f"{s.name}{tuple(s.shape)}" for s in self.sites)
        return f"Target(dim={self.dim}, sites=[{sites}], dtype={self.dtype}, device={self.device})"
