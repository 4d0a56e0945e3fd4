"""Models of PyMC and Bambi as densities."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bayeskit._core.functions_of_users import words_of
from bayeskit._core.inputs import unknown_name
from bayeskit._core.progress import progress_bar
from bayeskit._logdensity.foreign_density import ForeignDensity, kept_inside
from bayeskit._logdensity.jax_functions import JaxDensity, JaxFunction, double_precision
from bayeskit._logdensity.pyro_density import Site
from bayeskit.errors import DataError, ModelError, SettingsError, UnsupportedSiteError

_FLAT = {"FlatRV", "HalfFlatRV"}


class PyMCDensity(ForeignDensity):
    """A PyMC model: its graph of log densities, which PyTensor translates and JAX compiles."""

    package = "PyMC"

    def __init__(self, model: Any) -> None:
        if find_spec("jax") is None:
            raise ModuleNotFoundError("JAX compiles PyMC's models; pip install 'bayeskit[pymc]' brings it", name="jax")
        self.model = model = _of_bambi(model)
        if not hasattr(model, "free_RVs"):
            raise ModelError(f"a PyMC or Bambi model is needed, not a {type(model).__name__}")
        free, observed = list(model.free_RVs), list(model.observed_RVs)
        _refuse(model)
        #: Values of shared variables: the target keeps those of its beginning.
        self._shared_values = [np.array(x.get_value()) for x in _shared_variables(model)]
        with _without_compilation():
            parts, shapes = model.initial_point(), model.eval_rv_shapes()
            data = {rv.name: _tensor(model.rvs_to_values[rv].eval()) for rv in observed}
        layout, start = [], 0
        for rv in free:
            part = torch.Size(np.shape(parts[model.rvs_to_values[rv].name]))
            layout.append(Site(rv.name, torch.Size(map(int, shapes[rv.name])), part, start, start + part.numel()))
            start += part.numel()
        for name, x in data.items():
            if x.is_floating_point() and bool(x.isnan().any()):
                raise DataError(f"observed variable {name!r} holds {int(x.isnan().sum())} NaN; leave these rows out")
        constant = {x.name: _tensor(self._shared.get(x, x.get_value())) for x in model.data_vars if x.name not in data}
        named = model.named_vars_to_dims
        sizes = {site.name: len(site.shape) for site in layout} | {n: x.dim() for n, x in (data | constant).items()}
        sizes |= {x.name: x.ndim for x in model.deterministics}
        dimensions = {n: tuple(named.get(n, (None,) * size)) for n, size in sizes.items()}
        labels = {name: tuple(x) for name, x in model.coords.items() if x is not None}
        flat = tuple(rv.name for rv in free if _ops([rv]) & _FLAT)
        super().__init__(tuple(layout), data, constant, dimensions, labels, flat)
        self.factor_sites = tuple(x.name for x in model.potentials)
        self._restricted = tuple(rv.name for rv in free if _restricts(rv, model.rvs_to_transforms[rv]))
        self.draws_prior = not self._restricted and self._can_draw()
        _ = self.functions  # what cannot be translated is named here

    @property
    def _shared(self) -> dict[Any, np.ndarray]:
        return dict(zip(_shared_variables(self.model), self._shared_values, strict=True))

    # -- graphs -----------------------------------------------------------------------------

    def _values_of_model(self) -> list[Any]:
        return [self.model.rvs_to_values[rv] for rv in self.model.free_RVs]

    def _translated(self, outputs: Sequence[Any], inputs: Sequence[Any] | None = None) -> Callable[..., Any]:
        """Return the function of JAX from the parts of a vector, or other inputs, to the outputs of a graph."""
        given = self._values_of_model() if inputs is None else list(inputs)
        try:
            return _in_jax(given, outputs, self._shared)
        except Exception as error:
            raise ModelError(
                f"PyTensor cannot translate the model to JAX ({words_of(error)}); a newer PyTensor may, and "
                "Target.from_log_density takes the model's own logp_dlogp_function"
            ) from error

    def _of_vector(self, outputs: Sequence[Any]) -> Callable[[Any], Any]:
        function = self._translated(outputs)
        sites = self.sites

        def of_vector(u: Any) -> Any:
            return function(*(u[s.start : s.stop].reshape(s.unconstrained_shape) for s in sites))

        return of_vector

    @cached_property
    def functions(self) -> JaxDensity:
        """The density, compiled by JAX."""
        model = self.model
        terms = [*model.observed_RVs, *model.potentials]
        try:
            outputs = [model.logp(vars=model.free_RVs)] + ([model.logp(vars=terms)] if terms else [])
        except Exception as error:
            raise ModelError(f"PyMC has no log density of the model: {words_of(error)}") from error
        function = self._of_vector(outputs)

        def joint(u: Any) -> tuple[Any, Any]:
            log_prior, *log_likelihood = function(u)
            return log_prior, log_likelihood[0] if log_likelihood else 0.0 * log_prior

        return JaxDensity(joint)

    @cached_property
    def _values(self) -> JaxFunction:
        variables = [*self.model.free_RVs, *self.model.deterministics]
        return JaxFunction(self._of_vector(self.model.replace_rvs_by_values(variables)))

    def values(self, u: Tensor, deterministic: bool = False) -> dict[str, Tensor]:
        """Return the values of the sites, ``(n, *shape)``, and of deterministic ones."""
        names = [x.name for x in (*self.model.free_RVs, *self.model.deterministics)]
        found = dict(zip(names, self._values(u), strict=True))
        return found if deterministic else {site.name: found[site.name] for site in self.sites}

    @cached_property
    def _log_jacobian(self) -> JaxFunction:
        free = self.model.free_RVs
        both = [self.model.logp(vars=free), self.model.logp(vars=free, jacobian=False)]
        function = self._of_vector(both)

        def difference(u: Any) -> Any:
            with_jacobian, without = function(u)
            return with_jacobian - without

        return JaxFunction(difference)

    def log_jacobian(self, u: Tensor) -> Tensor:
        """Return log |d constrained / d unconstrained|, ``(n,)``."""
        return self._log_jacobian(u)

    @cached_property
    def _pointwise(self) -> JaxFunction:
        terms = [*self.model.observed_RVs, *self.model.potentials]
        return JaxFunction(self._of_vector(self.model.logp(vars=terms, sum=False)))

    def pointwise(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log likelihood of each observation, ``(n, *shape)`` by observed variable."""
        found = dict(zip((*self.observed_sites, *self.factor_sites), self._pointwise(u), strict=True))
        factors = {name: found[name].reshape(len(u), -1).sum(-1) for name in self.factor_sites}
        return found | factors

    # -- moving between spaces, and drawing -------------------------------------------------

    def _unconstrained(self) -> list[Any]:
        """Return the unconstrained parts of the random variables, as graphs of these."""
        model, found = self.model, []
        for rv in model.free_RVs:
            transform = model.rvs_to_transforms[rv]
            found.append(rv if transform is None else transform.forward(rv, *rv.owner.inputs))
        return found

    @cached_property
    def _vectors(self) -> JaxFunction:
        import jax.numpy as jnp
        from pytensor.graph.replace import clone_replace

        inputs = {rv: rv.type() for rv in self.model.free_RVs}
        function = self._translated(clone_replace(self._unconstrained(), inputs), list(inputs.values()))
        return JaxFunction(lambda *values: jnp.concatenate([x.reshape(-1) for x in function(*values)]))

    def vectors(self, values: Mapping[str, Tensor]) -> Tensor:
        """Return the unconstrained vectors of values ``(n, *shape)``; DataError for values outside the support."""
        found: Tensor = self._vectors(*(values[site.name].to(torch.float64) for site in self.sites))
        self.require_inside(values, found)
        return found

    def prior_draws(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Return vectors drawn from the prior, ``(num_draws, d)``."""
        import pymc

        self.require_prior_draws()
        if self._restricted:
            raise SettingsError(
                f"the prior of {self._restricted[0]!r} cannot be drawn: its transform restricts it to some of its "
                "values, over which it is not normalised"
            )
        try:
            with self._with_data({}), _without_compilation():
                drawn = pymc.draw(self._unconstrained(), draws=num_draws, random_seed=_seed(generator))
        except Exception as error:
            raise SettingsError(f"PyMC cannot draw from the prior: {words_of(error)}") from error
        return kept_inside(torch.cat([_tensor(x).reshape(num_draws, -1) for x in drawn], -1).to(torch.float64))

    def _can_draw(self) -> bool:
        """Tell whether PyMC can draw from the prior, as it cannot from densities without a generator."""
        if self.improper_sites:
            return True  # which has words of its own
        with suppress(SettingsError):
            return bool(self.prior_draws(1, torch.Generator().manual_seed(0)).isnan().logical_not().all())
        return False

    def predictive(
        self,
        u: Tensor,
        generator: torch.Generator,
        redraw: Collection[str],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> dict[str, Tensor]:
        """Draw data at each vector, ``(n, *shape)`` by variable, with other values of ``pymc.Data`` by name."""
        if args:
            raise SettingsError("a PyMC model has no arguments; give new values of its pymc.Data by name")
        model, given = self.model, self.values(u)
        fixed = [rv for rv in model.free_RVs if rv.name not in redraw]
        drawn = [*model.observed_RVs, *(rv for rv in model.free_RVs if rv.name in redraw)]
        drawn += model.deterministics if kwargs else []
        values = [given[rv.name].numpy().astype(rv.dtype) for rv in fixed]
        with self._with_data(kwargs), _without_compilation():
            try:
                found = _drawn(len(u), fixed, values, drawn, _seed(generator))
            except Exception as error:
                raise ModelError(f"PyMC cannot draw data of the model: {words_of(error)}") from error
        return {rv.name: _tensor(x) for rv, x in zip(drawn, found, strict=True)}

    @contextmanager
    def _with_data(self, values: Mapping[str, Any]) -> Iterator[None]:
        """Set values of ``pymc.Data`` for a time."""
        import pymc

        known = {x.name: x for x in self.model.data_vars}
        for name in values:
            if name not in known:
                raise unknown_name("pymc.Data", name, list(known))
        before = {name: x.get_value() for name, x in known.items()}
        changed = {x.name: value for x, value in self._shared.items() if x.name in known}
        changed |= {name: np.asarray(x) for name, x in values.items()}
        changed = {name: x for name, x in changed.items() if not np.array_equal(x, before[name])}
        before = {name: before[name] for name in changed}
        labels = {name: tuple(x) for name, x in self.model.coords.items() if x is not None}
        # A dimension of another length has numbers as labels.
        others = {
            dim: np.arange(np.shape(changed[name])[i])
            for name in changed
            for i, dim in enumerate(self.model.named_vars_to_dims.get(name, ()))
            if dim in labels and np.shape(changed[name])[i] != len(labels[dim])
        }
        if not changed:
            yield
            return
        with self.model:
            pymc.set_data(changed, coords=others)
            try:
                yield
            finally:
                pymc.set_data(before, coords={dim: labels[dim] for dim in others})


def _in_jax(inputs: Sequence[Any], outputs: Sequence[Any], shared: Mapping[Any, np.ndarray]) -> Callable[..., Any]:
    """Return the function of JAX that computes a graph in double precision, with values of shared variables."""
    import jax
    import pytensor.tensor as pt
    from pytensor.compile import get_mode
    from pytensor.graph.fg import FunctionGraph
    from pytensor.graph.replace import clone_replace

    before = jax.config.read("jax_enable_x64")
    try:
        from pytensor.link.jax.dispatch import jax_funcify  # whose import changes the precision of JAX
    finally:
        jax.config.update("jax_enable_x64", before)
    constants: dict[Any, Any] = {x: pt.constant(value) for x, value in shared.items()}
    double = _in_double_precision(clone_replace(list(outputs), constants))
    graph = FunctionGraph(inputs=list(inputs), outputs=double, clone=True)
    # Constants become arrays of JAX here.
    with double_precision(), _without_warnings():
        get_mode("JAX").optimizer.rewrite(graph)
        return jax_funcify(graph)


_LOW = ("float16", "float32")


def _in_double_precision(outputs: Sequence[Any]) -> list[Any]:
    """Return a graph whose real numbers are all in double precision.

    PyTensor takes a number of Python that single precision holds exactly as such, and computes its logarithm or gamma
    function in single precision.
    """
    import pytensor.tensor as pt
    from pytensor.graph.basic import Constant
    from pytensor.graph.traversal import toposort
    from pytensor.scalar.basic import Cast
    from pytensor.tensor.elemwise import Elemwise

    found: dict[Any, Any] = {}

    def of(x: Any) -> Any:
        if x not in found and isinstance(x, Constant) and getattr(x.type, "dtype", "") in _LOW:
            found[x] = pt.constant(np.asarray(x.data, dtype=np.float64), name=x.name)
        return found.get(x, x)

    for node in toposort(outputs):
        given, op = [of(x) for x in node.inputs], node.op
        if isinstance(op, Elemwise) and any(x.type.dtype in _LOW for x in node.outputs):
            if isinstance(op.scalar_op, Cast):
                found[node.outputs[0]] = pt.cast(given[0], "float64")
                continue
            given = [pt.cast(x, "float64") if x.type.dtype.startswith(("int", "uint", *_LOW)) else x for x in given]
        if any(new is not old for new, old in zip(given, node.inputs, strict=True)):
            found |= dict(zip(node.outputs, op.make_node(*given).outputs, strict=True))
    return [of(x) for x in outputs]


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leave out PyTensor's warnings of what JAX does in another way."""
    with warnings.catch_warnings():
        # A parameter outside of its domain has density zero instead of an error.
        warnings.filterwarnings("ignore", "Skipping Check", UserWarning)
        warnings.filterwarnings("ignore", "PyTensor could not link to a BLAS", UserWarning)
        yield


@contextmanager
def _without_compilation() -> Iterator[None]:
    """Let PyTensor interpret graphs: for what is computed once."""
    import pytensor

    with pytensor.config.change_flags(mode="FAST_COMPILE"), _without_warnings():
        yield


def _drawn(
    count: int, fixed: Sequence[Any], values: Sequence[np.ndarray], drawn: Sequence[Any], seed: int
) -> list[np.ndarray]:
    """Draw variables at rows of values ``(n, *shape)`` of the ``fixed`` ones, ``(n, *shape)`` each."""
    from pymc.pytensorf import compile as compile_drawing

    one = compile_drawing(list(fixed), list(drawn), random_seed=seed, on_unused_input="ignore")
    rows = []
    with progress_bar("drawing by PyMC", count) as bar:
        for place in range(count):
            rows.append(one(*(x[place] for x in values)))
            bar.update(len(rows))
    return [np.stack(column) for column in zip(*rows, strict=True)]


def _of_bambi(model: Any) -> Any:
    """Return the PyMC model of a Bambi model, and any other as it is."""
    if type(model).__module__.split(".")[0] != "bambi":
        return model
    if not model.built:
        model.build()
    return model.backend.model


def _restricts(rv: Any, transform: Any) -> bool:
    """Tell whether a transform of the user, such as an order, may restrict a variable to some of its values."""
    from pymc.distributions.transforms import _default_transform

    return type(transform) is not type(_default_transform(rv.owner.op, rv))


def _ops(variables: Sequence[Any]) -> set[str]:
    """Return the names of the operations that variables come from."""
    from pytensor.graph.traversal import ancestors

    return {type(x.owner.op).__name__ for x in ancestors(variables) if x.owner is not None}


def _shared_variables(model: Any) -> list[Any]:
    """Return the shared variables that a model depends on, without generators of random numbers."""
    from pytensor.compile.sharedvalue import SharedVariable
    from pytensor.graph.traversal import ancestors

    of_data = [model.rvs_to_values[rv] for rv in model.observed_RVs]
    variables = [*model.basic_RVs, *of_data, *model.potentials, *model.deterministics]
    found = dict.fromkeys(x for x in ancestors(variables) if isinstance(x, SharedVariable))
    return [x for x in found if hasattr(x.type, "dtype")]


def _refuse(model: Any) -> None:
    """Raise a typed error for models that are no target."""
    import pymc

    if not model.free_RVs:
        raise ModelError("the model has no continuous latent variable, so there is nothing to sample")
    for rv in model.free_RVs:
        if rv.dtype.startswith(("int", "uint", "bool")):
            raise UnsupportedSiteError(
                f"{rv.name!r} is discrete and not observed; sum it out, as by pymc_extras.marginalize, or write a "
                "mixture, such as pymc.Mixture"
            )
        if "_LKJCholeskyCovRV" in _ops([rv]) and _is_old(pymc.__version__):
            raise UnsupportedSiteError(
                f"{rv.name!r} is an LKJCholeskyCov, whose density has another constant before PyMC 6; update PyMC, or "
                "write LKJCorr and scales"
            )
    for rv in (*model.observed_RVs, *model.potentials):
        kinds = _ops([rv, model.rvs_to_values[rv]] if rv in model.rvs_to_values else [rv])
        if any("Minibatch" in kind for kind in kinds):
            raise UnsupportedSiteError(f"{rv.name!r} is of a minibatch, or has a total_size; give it all of the data")
        if any("Simulator" in kind for kind in kinds):
            raise UnsupportedSiteError(
                f"{rv.name!r} is of a simulator, which has no density; learn it, by bayeskit.workflows.learn_likelihood"
            )


def _is_old(version: str) -> bool:
    return int(version.partition(".")[0]) < 6


def _seed(generator: torch.Generator) -> int:
    return int(torch.randint(2**31 - 1, (), generator=generator, device=generator.device))


def _tensor(x: Any) -> Tensor:
    array = np.array(getattr(x, "data", x) if np.ma.isMaskedArray(x) else x)
    return torch.from_numpy(array.astype(np.int64) if array.dtype.kind in "iu" else array)
