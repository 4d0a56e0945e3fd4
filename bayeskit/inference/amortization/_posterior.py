"""Amortised posteriors: one network that maps data of any size to the posterior of a Pyro model."""

from __future__ import annotations

import inspect
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from operator import is_not
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

import pyro
import torch
from pyro.distributions import Delta, TorchDistribution, constraints
from torch import Tensor, nn

from bayeskit._core.arguments import arrays_as_tensors, lists_as_tensors
from bayeskit._core.folders import Schema
from bayeskit._core.inputs import real_number, unknown_name, whole_number
from bayeskit._core.randomness import derived_seed, global_stream, new_generator, one_thread
from bayeskit._core.statistics import (
    log_mean_exp,
    pareto_smoothed,
    stratified_log_mean_exp_error,
    weight_effective_sample_size,
)
from bayeskit._core.storage import decode, digest, encode, loaded_tensors, save_tensors
from bayeskit._draws import Draws
from bayeskit._logdensity.combinators import rebased
from bayeskit._logdensity.target import Target
from bayeskit.errors import CheckpointError, DataError, ModelError, SettingsError, ShapeError
from bayeskit.inference._proposals import normal_log_prob, student_log_prob, student_noise
from bayeskit.inference.amortization._networks import AmortizingNetwork, Inputs, Widths
from bayeskit.inference.amortization._simulations import (
    Arguments,
    Encoding,
    KeptSimulations,
    Simulations,
    Simulator,
    SizeStructure,
)
from bayeskit.inference.evidence._judging._densities import with_rounding, without_nan
from bayeskit.inference.evidence._judging._diagnostics import Diagnostics, from_draws
from bayeskit.inference.evidence._judging._weights import weight_problems
from bayeskit.inference.evidence._result import Evidence
from bayeskit.inference.evidence._sequential import average
from bayeskit.inference.samplers._driver import CHECKPOINT_SECONDS
from bayeskit.inference.samplers._smc import sample_smc
from bayeskit.inference.samplers._weighted_particles import systematic
from bayeskit.inference.training import Fit, fit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SCHEMA = Schema("an amortised posterior", 1)
_STEPS_PER_EPOCH, _VALIDATION_BATCHES, _PATIENCE, _SCALES_FROM = 100, 32, 20, 1024
_LEARNING_RATE, _MAX_GRADIENT = 2e-3, 10.0
_CHAINS = 4
#: Simulations by which data are judged, and the share of them that is the unit of each statistic.
_JUDGES, _TYPICAL = 2000, 0.99
#: Shares of the proposal of the correction: the network with Student-t noise, and the prior.
_TAIL_SHARE, _PRIOR_SHARE, _DEGREES_OF_FREEDOM = 0.2, 0.1, 6
_PROBES = 4
#: Difference of log densities, relative or in nats, by which a model is another one, by the precision of its numbers.
_SAME = {torch.float64: 1e-6}
_SAME_IN_SINGLE_PRECISION = 1e-3
_AUXILIARY = "_amortized"


class Corrected(NamedTuple):
    """Draws from the posterior itself, and the evidence.

    Attributes
    ----------
    draws : Draws
    evidence : Evidence
        Its method says how both were made.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> posterior = bk.amortize(model, (torch.tensor(0.0),), num_steps=50, progress=False)
    >>> posterior.correct(torch.tensor(0.3)).evidence.trusted
    True
    """

    draws: Draws
    evidence: Evidence


class _Conditioned:
    """A model with some of its sites observed: called with their values, and then with its own arguments."""

    def __init__(self, model: Callable[..., Any], names: tuple[str, ...]) -> None:
        self.model, self.names = model, names
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        try:
            own = list(inspect.signature(model).parameters.values())
        except (TypeError, ValueError):
            own = []
        taken = {parameter.name for parameter in own}
        first = []
        for name in names:
            word = re.sub(r"\W", "_", name)
            word = word if word.isidentifier() and not keyword.iskeyword(word) else f"_{word}"
            while word in taken:
                word += "_"
            taken.add(word)
            first.append(inspect.Parameter(word, kind))
        self.__signature__ = inspect.Signature([*first, *own]) if own or not names else inspect.Signature(first)

    def __call__(self, *args: Any) -> Any:
        values = dict(zip(self.names, args, strict=False))
        return pyro.condition(self.model, data=values)(*args[len(self.names) :])


class _At:
    """The distribution of unconstrained vectors that a network gives for one data set; see ``Reference``."""

    def __init__(self, network: AmortizingNetwork, structure: SizeStructure, target: Target, inputs: Inputs) -> None:
        self._network, self._structure, self._target, self._rows = network, structure, target, inputs.rows
        self.dim = target.dim
        self._size = inputs.rows.shape[1]
        self.code = network.encoder(inputs)

    @property
    def parameters(self) -> list[Tensor]:
        """The code and the rows, which determine the distribution given the network."""
        return [self.code.detach(), self._rows]

    def from_noise(self, noise: Tensor) -> Tensor:
        """Return vectors for noise, ``(*batch, d)``, in the dtype of the network's weights."""
        flat = noise.reshape(-1, self.dim)
        code, rows = self.code.expand(len(flat), -1), self._rows.expand(len(flat), -1, -1)
        top, local = self._network.from_noise(flat, code, rows)
        return self._structure.join(self._target, top, local).reshape(noise.shape)

    def to_noise(self, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return the noise of vectors ``(*batch, d)`` and the log volume, ``(*batch)``."""
        flat = u.reshape(-1, self.dim).double()
        code, rows = self.code.expand(len(flat), -1), self._rows.expand(len(flat), -1, -1)
        top, local = self._structure.split(self._target, flat, self._size)
        noise, log_volume = self._network.to_noise(top, local, code, rows)
        return noise.reshape(u.shape), log_volume.reshape(u.shape[:-1])

    def log_prob(self, u: Tensor) -> Tensor:
        """Return the log density, ``(*batch, d) -> (*batch)``."""
        noise, log_volume = self.to_noise(u)
        return log_volume + normal_log_prob(noise)

    def defensive_log_prob(self, u: Tensor, share: float) -> Tensor:
        """Return the log density of the mixture with a share of Student-t noise."""
        noise, log_volume = self.to_noise(u)
        light, heavy = normal_log_prob(noise), student_log_prob(noise, _DEGREES_OF_FREEDOM)
        return log_volume + torch.logaddexp(math.log1p(-share) + light, math.log(share) + heavy)

    def gradient(self, u: Tensor) -> Tensor:
        """Return the gradient of the log density, ``(*batch, d) -> (*batch, d)``."""
        with torch.enable_grad():
            x = u.detach().requires_grad_()
            return torch.autograd.grad(self.log_prob(x).sum(), x)[0].to(u.dtype)

    def sample(self, num_draws: int, generator: torch.Generator) -> Tensor:
        """Draw vectors, ``(num_draws, d)``."""
        shape = (num_draws, self.dim)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64, device=generator.device)
        return self.from_noise(noise).to(self._target.dtype)


class _Latent(TorchDistribution):  # type: ignore[misc]
    """Values of all latent sites as one unconstrained vector, with the density of the values."""

    support = constraints.real_vector
    arg_constraints: dict[str, Any] = {}
    has_rsample = True

    def __init__(self, at: _At, target: Target, batch_shape: torch.Size = torch.Size()) -> None:  # noqa: B008
        self._at, self._target = at, target
        super().__init__(batch_shape, torch.Size((at.dim,)), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> _Latent:
        """Return the distribution with another batch shape."""
        return _Latent(self._at, self._target, torch.Size(batch_shape))

    def rsample(self, sample_shape: Sequence[int] = ()) -> Tensor:
        """Draw vectors; differentiable with respect to the network."""
        shape, like = (*sample_shape, *self.batch_shape, self._at.dim), self._at.code
        noise = torch.randn(shape, dtype=like.dtype, device=like.device)
        return self._at.from_noise(noise)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of the sites' values."""
        with pyro.poutine.block():  # the target runs its model
            return self._at.log_prob(value) - self._target.log_jacobian(value)


class _Guide(nn.Module):
    """The network as a Pyro guide: called with the data, it draws all latent sites of the model."""

    def __init__(self, posterior: AmortizedPosterior) -> None:
        super().__init__()
        self.network = posterior.network
        self._posterior = posterior
        self._last: tuple[tuple[Any, ...], Target] | None = None

    def _target(self, data: tuple[Any, ...]) -> Target:
        """Return the target of the data, the last one if they are the same objects."""
        if self._last is None or len(data) != len(self._last[0]) or any(map(is_not, data, self._last[0])):
            self._last = data, self._posterior.target(*data)
        return self._last[1]

    def forward(self, *data: Any) -> None:
        """Draw the sites."""
        with pyro.poutine.block():  # the target runs its model, whose sites are none of the guide's
            target = self._target(data)
            latent = _Latent(self._posterior.at(target), target)
        u = pyro.sample(_AUXILIARY, latent, infer={"is_auxiliary": True})
        with pyro.poutine.block():
            values, plates = target.constrain(u), target.dimensions()
        around = u.shape[:-1]
        for name, value in values.items():
            names = plates[name]
            depth = max((i + 1 for i, plate in enumerate(names) if plate is not None), default=0)
            # Dimensions of plates inside those of the particles, in which the vector has length one.
            inside = value.reshape((*around[: max(len(around) - depth, 0)], *value.shape[len(around) :]))
            with ExitStack() as stack:
                for i, plate in enumerate(names[:depth]):
                    if plate is not None:
                        size = inside.shape[inside.dim() - len(names) + i]
                        stack.enter_context(pyro.plate(plate, size, dim=i - depth))
                pyro.sample(name, Delta(inside, event_dim=len(names) - depth))


@dataclass(frozen=True, eq=False)
class AmortizedPosterior:
    """Posteriors of a model for all data of the trained sizes; made by :func:`amortize`.

    It is a sampler for :func:`bayeskit.sbc`: ``bk.sbc(model, sampler=posterior, args=...)``.

    Attributes
    ----------
    model : callable
        The model, with its data as arguments.
    network : nn.Module
        In double precision.
    structure : NamedTuple
        Which sites and which data have a row for each observation.
    sizes : tuple of int or None
        The smallest and the largest number of observations.
    encoding : str
        ``"set"``, ``"attention"``, ``"sequence"`` or ``"vector"``.
    training : Fit or None
        The history of the losses; None after loading.
    settings : dict

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> posterior = bk.amortize(model, (torch.tensor(0.0),), num_steps=50, progress=False)
    >>> posterior.sample(torch.tensor(0.3), num_draws=400)["mean"].shape
    torch.Size([4, 100])
    """

    model: Callable[..., Any] = field(repr=False)
    network: AmortizingNetwork = field(repr=False)
    structure: SizeStructure = field(repr=False)
    sizes: tuple[int, int] | None
    encoding: Encoding
    example: tuple[Any, ...] = field(repr=False)
    settings: dict[str, Any] = field(repr=False, default_factory=dict)
    training: Fit | None = field(repr=False, default=None)

    def target(self, *data: Any) -> Target:
        """Return the target of the model with these data, which are those of a call of the model."""
        return Target.from_pyro(self.model, *(lists_as_tensors(value) for value in arrays_as_tensors(data)))

    def at(self, target: Target) -> _At:
        """Return the distribution that the network gives for the data of a target."""
        inputs = self._inputs(target)
        self.network.to(target.device)
        return _At(self.network, self.structure, target, inputs)

    def _inputs(self, target: Target) -> Inputs:
        names = [site.name for site in target.sites]
        if names != list(self.structure.sites):
            raise ModelError(
                f"the target has the latent sites {', '.join(names)}, and the network draws "
                f"{', '.join(self.structure.sites)}; amortize this model"
            )
        inputs, size = self.structure.inputs(target)
        if self.sizes is not None and not self.sizes[0] <= size <= self.sizes[1]:
            raise DataError(
                f"the data have {size} rows, outside of the sizes {self.sizes} of the training; train with "
                f"sizes=({min(size, self.sizes[0])}, {max(size, self.sizes[1])})"
            )
        layout = self.structure.layout(target, size if any(self.structure.sites.values()) else 1)
        if layout != self.network.layout:
            raise ShapeError(
                f"the data and sites have numbers of columns {tuple(layout)} here and {tuple(self.network.layout)} in "
                "the training (global and local coordinates, numbers of a row, shared numbers)"
            )
        return inputs

    # -- the network's posterior ---------------------------------------------------------------

    def sample(self, *data: Any, num_draws: int = 1000, seed: int = 0, check: bool = True) -> Draws:
        """Draw from the network's posterior.

        Parameters
        ----------
        *data
            Arguments of the model, by position.
        num_draws : int, default 1000
            Rounded up to a multiple of four; they are independent, and returned as four chains.
        seed : int, default 0
        check : bool, default True
            Refuse data that lie off the simulations, at which the network has learnt nothing.

        Returns
        -------
        Draws

        Raises
        ------
        DataError
            If the data lie off the simulations, or their number outside of the trained sizes.
        """
        num_draws, seed = whole_number("num_draws", num_draws, least=1), whole_number("seed", seed)
        target = self.target(*data)
        if check and (problem := self._off_simulations(target, seed)) is not None:
            raise DataError(f"{problem}; correct() draws from the posterior itself, whatever the network has learnt")
        return self._sample(target, num_draws, seed)

    @torch.no_grad()
    def _sample(self, target: Target, num_draws: int, seed: int) -> Draws:
        per_chain = -(-num_draws // _CHAINS)
        with one_thread():
            u = self.at(target).sample(_CHAINS * per_chain, new_generator(seed, target.device, "amortised posterior"))
        return _as_draws(target, u, {"sampler": "amortised posterior", "seed": seed})

    def __call__(self, target: Target, seed: int) -> Draws:
        """Draw 1000 vectors for the data of a target: a sampler for :func:`bayeskit.sbc`."""
        return self._sample(target, 1000, seed)

    def log_prob(self, values: Mapping[str, Tensor] | Tensor, *data: Any) -> Tensor:
        """Return the log density of the network's posterior.

        Parameters
        ----------
        values : mapping of str to Tensor, or Tensor
            Values of all sites, each ``(*batch, *shape)``, with the density in the space of the values; or
            unconstrained vectors ``(*batch, d)``, with the density in unconstrained space.
        *data
            Arguments of the model.

        Returns
        -------
        Tensor
            In nats, shape ``(*batch,)``.

        Raises
        ------
        ShapeError
            If vectors or values have other shapes than the sites.
        """
        target = self.target(*data)
        u = values if isinstance(values, Tensor) else target.unconstrain(values)
        if u.shape[-1:] != (target.dim,):
            raise ShapeError(f"unconstrained vectors have shape (*batch, {target.dim}), not {tuple(u.shape)}")
        with torch.no_grad(), one_thread():
            log_density = self.at(target).log_prob(u)
        return log_density if isinstance(values, Tensor) else log_density - target.log_jacobian(u)

    def to_arviz(self, *data: Any, num_draws: int = 1000, seed: int = 0) -> Any:
        """Return draws from :meth:`sample` for ArviZ."""
        return self.sample(*data, num_draws=num_draws, seed=seed).to_arviz()

    @property
    def guide(self) -> nn.Module:
        """A Pyro guide with the network's parameters, called with the arguments of the model."""
        return _Guide(self)

    # -- the posterior itself -------------------------------------------------------------------

    def correct(self, *data: Any, num_draws: int = 10_000, seed: int = 0, progress: bool = True) -> Corrected:
        """Draw from the posterior itself, and estimate the evidence, with the network as the proposal.

        Importance sampling: the proposal is the network, with a fifth of its draws from heavier tails, and a tenth of
        all draws from the prior, so that weights are at most ten times the likelihood. The weights of the
        draws are Pareto-smoothed and resampled; those of the evidence are not smoothed, so that it is unbiased. Where
        the weights vary too much, sequential Monte Carlo leads from the network to the posterior; where the data lie
        off the simulations, from the prior.

        Parameters
        ----------
        *data
            Arguments of the model.
        num_draws : int, default 10,000
            Draws of the proposal and of the result. Sequential Monte Carlo returns its particles.
        seed : int, default 0
        progress : bool, default True

        Returns
        -------
        Corrected
            ``draws`` and ``evidence``; the method of the latter says which way was taken.

        Raises
        ------
        DataError
            If the number of data lies outside of the trained sizes.

        References
        ----------
        Dax, M., Green, S. R., Gair, J., Puerrer, M., Wildberger, J., Macke, J. H., Buonanno, A., Schoelkopf, B.
        (2023). Neural importance sampling for rapid and reliable gravitational-wave inference. Physical Review Letters
        130, 171403.
        """
        num_draws, seed = whole_number("num_draws", num_draws, least=100), whole_number("seed", seed)
        target = self.target(*data)
        self._inputs(target)
        off = self._off_simulations(target, seed)
        if off is None:
            corrected = _judged(target, self._by_importance(target, num_draws, seed))
            if corrected.evidence.trusted:
                return corrected
        with torch.no_grad():
            start = target if off is not None else rebased(target, self.at(target))
            run = sample_smc(start, seed=seed, progress=progress)
            way = "from the prior" if off is not None else "from the network"
            evidence = average(start, run, f"amortised posterior, SMC {way}")
        draws = _as_draws(target, run.draws.unconstrained.flatten(0, 1), run.draws.settings | {"seed": seed})
        return _judged(target, Corrected(draws, evidence))

    @torch.no_grad()
    def _by_importance(self, target: Target, num_draws: int, seed: int) -> Corrected:
        generator = new_generator(seed, target.device, "correction of an amortised posterior")
        at = self.at(target)
        heavy, prior = round((1 - _PRIOR_SHARE) * _TAIL_SHARE * num_draws), round(_PRIOR_SHARE * num_draws)
        light = num_draws - heavy - prior
        with one_thread():
            normal = torch.randn(light, at.dim, generator=generator, dtype=torch.float64, device=generator.device)
            noise = torch.cat([normal, student_noise((heavy, at.dim), _DEGREES_OF_FREEDOM, generator)])
            u = torch.cat([at.from_noise(noise).to(target.dtype), target.sample_prior(prior, seed=generator)])
            log_prior, log_likelihood = target.evaluate(u)
            log_density = log_prior + log_likelihood
            _, problems = without_nan(log_density[: light + heavy])  # in the tails of the prior it may overflow
            log_density = torch.where(log_density.isnan(), -torch.inf, log_density)
            log_proposal = torch.logaddexp(
                math.log((light + heavy) / num_draws) + at.defensive_log_prob(u, heavy / (light + heavy)),
                math.log(prior / num_draws) + log_prior.double().nan_to_num(nan=-torch.inf),
            )
        log_weights = torch.where(log_density > -torch.inf, log_density.double() - log_proposal, -torch.inf)
        smoothed, shape = pareto_smoothed(log_weights)
        effective = float(weight_effective_sample_size(log_weights))
        part = torch.tensor([0] * light + [1] * heavy + [2] * prior, device=target.device)
        total = float(log_mean_exp(log_weights.unsqueeze(0)))
        error = float(stratified_log_mean_exp_error(log_weights, part))
        evidence = Evidence(
            "amortised posterior, importance sampling",
            total,
            with_rounding(error, log_density),
            num_draws,
            (*problems, *weight_problems(float(shape), effective)),
            {"pareto_shape": float(shape), "effective_draws": effective, "efficiency": effective / num_draws},
        )
        kept = systematic(smoothed.unsqueeze(0), generator)[0]
        kept = kept[torch.randperm(len(kept), generator=generator, device=kept.device)]
        facts = {"sampler": "amortised posterior, importance sampling", "seed": seed}
        return Corrected(_as_draws(target, u[kept[: len(kept) // _CHAINS * _CHAINS]], facts), evidence)

    # -- data off the simulations -----------------------------------------------------------------

    @torch.no_grad()
    def _off_simulations(self, target: Target, seed: int) -> str | None:
        """Return a sentence if the data lie outside of all simulations by one of their statistics."""
        inputs = self._inputs(target)
        simulator = Simulator.at(self.structure)
        drawn = simulator.batch_of(target, _JUDGES, new_generator(seed, stream="judges of data"))
        with one_thread():
            everything = self._statistics(Inputs(*(torch.cat(pair) for pair in zip(inputs, drawn.inputs, strict=True))))
        judges = everything[1:]
        centre = judges.median(0).values
        quarters = torch.tensor([0.25, 0.75], dtype=judges.dtype, device=judges.device)
        low, high = torch.quantile(judges, quarters, dim=0)
        spread = torch.where(high > low, (high - low) / 1.35, judges.std(0))
        far = torch.where(
            spread > 0, (everything - centre).abs() / spread, torch.where(everything == centre, 0.0, torch.inf)
        ).log1p()
        typical = torch.quantile(far[1:], _TYPICAL, dim=0).clamp(min=math.log(2))
        score = (far / typical).amax(-1)
        if bool(score[0] <= score[1:].max()):
            return None
        return f"the data lie off all {len(judges)} simulations from the model's prior"

    def _statistics(self, inputs: Inputs) -> Tensor:
        """Return statistics of each data set, ``(B, s)``: the network's code, and moments and extremes of the rows."""
        parts = [self.network.encoder(inputs), inputs.shared]
        if inputs.rows.shape[-1]:
            rows = inputs.rows
            parts += [rows.mean(1), rows.amin(1), rows.amax(1)]
            if rows.shape[1] > 1:
                parts.append(rows.std(1))
        return torch.cat(parts, -1)

    # -- files --------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the network and what it belongs to as one safetensors file; the model itself is code, and is not.

        Parameters
        ----------
        path : path
        """
        tensors = {f"network.{name}": value for name, value in self.network.state_dict().items()}
        stored: dict[str, Tensor] = {}
        target = self.target(*self.example)
        probes = target.sample_prior(_PROBES, seed=0)
        facts = {
            "structure": encode(tuple(self.structure), stored, {}),
            "example": encode(self.example, stored, {}, "an argument of the model"),
            "probes": encode((probes, torch.stack(target.evaluate(probes))), stored, {}),
            "sizes": self.sizes,
            "encoding": self.encoding,
            "layout": list(self.network.layout),
            "settings": self.settings,
        }
        save_tensors(path, tensors | {f"facts.{name}": value for name, value in stored.items()}, facts, _SCHEMA)

    @classmethod
    def load(cls, path: str | Path, model: Callable[..., Any]) -> AmortizedPosterior:
        """Read a file of :meth:`save`; no code of the file is run.

        Parameters
        ----------
        path : path
        model : callable
            The Pyro model of the training, as :func:`amortize` got it.

        Returns
        -------
        AmortizedPosterior

        Raises
        ------
        CheckpointError
            If the file is damaged, or the model has other densities than the one of the training.
        """
        with loaded_tensors(path, _SCHEMA) as (tensors, facts):
            stored = {n.removeprefix("facts."): x for n, x in tensors.items() if n.startswith("facts.")}
            settings = dict(facts["settings"])
            network = AmortizingNetwork(
                Widths(*facts["layout"]), facts["encoding"], num_transforms=settings["num_transforms"]
            ).double()
            network.load_state_dict(
                {n.removeprefix("network."): x for n, x in tensors.items() if n.startswith("network.")}
            )
            names = tuple(settings["observed"])
            posterior = cls(
                _Conditioned(model, names) if names else model,
                network,
                SizeStructure(*decode(facts["structure"], stored, {})),
                None if facts["sizes"] is None else (facts["sizes"][0], facts["sizes"][1]),
                facts["encoding"],
                decode(facts["example"], stored, {}),
                settings,
            )
            probes, values = decode(facts["probes"], stored, {})
        try:
            target = posterior.target(*posterior.example)
            posterior.at(target)
            found = torch.stack(target.evaluate(probes))
        except (ModelError, ShapeError, DataError) as error:
            raise CheckpointError(f"{path} belongs to another model: {error}") from error
        same = _SAME.get(values.dtype, _SAME_IN_SINGLE_PRECISION)
        if found.shape != values.shape or not torch.allclose(found, values, rtol=same, atol=same, equal_nan=True):
            raise CheckpointError(
                f"{path} belongs to another model: at {_PROBES} stored vectors the log prior and log likelihood of "
                "this model differ from those of the training; pass the model of the training, or amortize this one"
            )
        return posterior

    def fingerprint(self) -> str:
        """Return a digest of the network's weights."""
        return digest(dict(self.network.state_dict()))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Plot the losses of the training.

        Raises
        ------
        SettingsError
            If the posterior was loaded from a file, which holds no losses.
        """
        if self.training is None:
            raise SettingsError("a posterior that was loaded has no history of its training")
        return self.training.plot(ax)

    def __repr__(self) -> str:
        size = "" if self.sizes is None else f", {self.sizes[0]} to {self.sizes[1]} observations"
        return f"AmortizedPosterior(sites: {', '.join(self.structure.sites)}{size}, encoding={self.encoding!r})"


def _judged(target: Target, corrected: Corrected) -> Corrected:
    """Return the result with a warning if the draws miss a mode of the posterior."""
    draws, evidence = corrected
    return Corrected(draws, Diagnostics(target).judge(from_draws(evidence, draws)))


def _as_draws(target: Target, u: Tensor, settings: dict[str, Any]) -> Draws:
    """Return independent vectors ``(n, d)``, ``n`` a multiple of four, as draws of four chains."""
    x = u.reshape(_CHAINS, -1, target.dim)
    log_prior, log_likelihood = target.evaluate(x)
    beta = torch.ones(_CHAINS, dtype=target.dtype, device=target.device)
    return Draws(x, log_prior, log_likelihood, beta, settings=settings, target=target)


class _NegativeLogDensity:
    """The loss of a network: minus the log density of simulated coordinates given their data, in nats."""

    def differentiable_loss(self, model: Any, guide: Any, *batch: Tensor) -> Tensor:
        """Return the sum over a batch; ``model`` is not used."""
        total: Tensor = -guide(*batch).sum()
        return total


def _falling(num_steps: int, step: int) -> float:
    """Return the share of the learning rate that is left at a step: half a cosine."""
    return 0.5 * (1 + math.cos(math.pi * min(step / num_steps, 1.0)))


def _nothing(*_: Any) -> None:
    """Stand for the model of a training that needs none."""


def _conditioned(
    model: Callable[..., Any], names: tuple[str, ...], args: Arguments, sizes: tuple[int, int] | None, seed: int
) -> tuple[Callable[..., Any], Arguments, tuple[str, ...]]:
    """Return the model, its arguments and its first data, with named sites observed that it does not observe itself."""

    def sites(given: tuple[Any, ...]) -> list[Any]:
        with pyro.poutine.block(), torch.no_grad():
            nodes: Any = pyro.poutine.trace(model).get_trace(*given).nodes
        known = [name for name, site in nodes.items() if site["type"] == "sample"]
        for name in names:
            if name not in known:
                raise unknown_name("site", name, known)
        return [nodes[name] for name in names]

    def with_values(size: int) -> tuple[Any, ...]:
        given = args(size) if callable(args) else args
        return (*(site["value"] for site in sites(given)), *given)

    smallest = sizes[0] if sizes is not None else 0
    with global_stream(new_generator(seed, stream="sites that become data")):
        if all(site["is_observed"] for site in sites(args(smallest) if callable(args) else args)):
            return model, args, ()
        return _Conditioned(model, names), with_values if callable(args) else with_values(0), names


def _sizes_and_encoding(
    sizes: tuple[int, int] | None, encoding: Encoding | None, has_function_of_size: bool
) -> tuple[tuple[int, int] | None, Encoding]:
    if sizes is not None:
        if not isinstance(sizes, (tuple, list)) or len(sizes) != 2:
            raise SettingsError(f"sizes must be (smallest, largest), not {sizes}")
        sizes = (whole_number("sizes[0]", sizes[0], least=1), whole_number("sizes[1]", sizes[1], least=1))
        if sizes[1] < sizes[0]:
            raise SettingsError(f"sizes must be (smallest, largest), not {sizes}")
    elif has_function_of_size:
        raise SettingsError("a function of the size needs sizes=(smallest, largest)")
    if encoding is None:
        encoding = "vector" if sizes is None else "set"
    if encoding not in get_args(Encoding) or (encoding == "vector" and sizes is not None):
        raise SettingsError(
            f'encoding must be "set", "attention" or "sequence", or "vector" without sizes; it is {encoding!r} with '
            f"sizes={sizes}"
        )
    return sizes, encoding


def _source(
    simulator: Simulator,
    network: AmortizingNetwork,
    num_simulations: int | None,
    batch_size: int,
    is_validated: bool,
    generator: torch.Generator,
) -> tuple[Simulations | KeptSimulations, list[tuple[Any, ...]] | None]:
    """Return the batches of the training and those held out, of new or kept simulations; the network learns scales."""
    if num_simulations is None:
        network.learn_scales([simulator.batch(_SCALES_FROM // 8, generator) for _ in range(8)])
        number = _VALIDATION_BATCHES if is_validated else 0
        held_out = [tuple(simulator.batch(batch_size, generator)) for _ in range(number)]
        return Simulations(simulator, batch_size, _STEPS_PER_EPOCH), held_out or None
    count = whole_number("num_simulations", num_simulations, least=10 * batch_size) // batch_size
    kept = [simulator.batch(batch_size, generator) for _ in range(count)]
    network.learn_scales(kept[: -(-_SCALES_FROM // batch_size)])
    return KeptSimulations(kept[count // 10 :]), [tuple(batch) for batch in kept[: count // 10]]


def amortize(
    model: Callable[..., Any],
    args: Arguments = (),
    *,
    observed: str | Sequence[str] = (),
    sizes: tuple[int, int] | None = None,
    encoding: Encoding | None = None,
    num_steps: int = 5000,
    num_simulations: int | None = None,
    batch_size: int = 256,
    learning_rate: float = _LEARNING_RATE,
    num_transforms: int = 2,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    checkpoint_seconds: float = CHECKPOINT_SECONDS,
    time_budget: float | None = None,
    progress: bool = True,
) -> AmortizedPosterior:
    r"""Train one network that gives the posterior of a Pyro model for all data of many sizes.

    Latent values and data are drawn from the model in each step, and the network learns the density of the former
    given the latter: it minimises :math:`-\operatorname{E} \log q(z \mid x)` over the joint distribution (neural
    posterior estimation). Sizes are drawn uniformly on the scale of their logarithm. A set is coded by means, maxima
    and spreads over its rows. The density is a normal with mean and covariance of the code, bent by splines. Sites
    with one row for each observation, such as the effects of groups, are independent given the others, and one network
    serves all of their rows.

    Parameters
    ----------
    model : callable
        A Pyro model, all of whose sites have normalised distributions.
    args : tuple or callable
        Arguments of the model, with data of the largest size whose values are possible but do not matter: rows of them
        are chosen at random. Or a function of the size that returns such arguments; random numbers in it, such as
        covariates, come from torch's global stream, which is seeded.
    observed : str or sequence of str, optional
        Sites that are data although the model does not observe them. They become the first arguments.
    sizes : (int, int), optional
        Smallest and largest number of observations; by default the data have the shapes in ``args``.
    encoding : {"set", "attention", "sequence", "vector"}, optional
        How data are read: rows in any order, once or a second time with attention, rows in their order, or all numbers
        as one vector; ``"set"`` with sizes and ``"vector"`` without them by default. Attention pays where what a row
        says depends on the others, as in mixtures.
    num_steps : int, default 5000
        Steps of the optimiser.
    num_simulations : int, optional
        Number of data sets that are simulated before the training, for expensive models. A tenth of them are held out,
        and training stops where their loss no longer falls. By default each step has new simulations.
    batch_size : int, default 256
        Simulated data sets in a step.
    learning_rate : float, default 0.002
        Of Adam, at the beginning; it falls to zero with a cosine.
    num_transforms : int, default 2
        Layers of splines.
    patience : int, optional
        Epochs, of a hundred steps or of all simulations, without a lower loss on held-out simulations after which
        training stops, and the best network is returned; with ``num_simulations`` 20 by default.
    seed : int, default 0
    checkpoint : path, optional
        File for the state of the training. If it exists, training resumes from it with bitwise identical results;
        ``num_steps`` may be larger then.
    checkpoint_seconds : float, default 10
    time_budget : float, optional
        Seconds after which training stops; the network is then less exact.
    progress : bool, default True

    Returns
    -------
    AmortizedPosterior

    Raises
    ------
    SettingsError
        If a setting lies outside its domain.
    ModelError
        If the model cannot be simulated, or most simulations are not finite.
    ShapeError
        If sites or data grow with the size by another dimension than their first one.

    Warns
    -----
    DataWarning
        If simulations were not finite, and were left out.

    References
    ----------
    Papamakarios, G., Murray, I. (2016). Fast epsilon-free inference of simulation models with Bayesian conditional
    density estimation. NeurIPS 29.

    Vaswani, A., Shazeer, N., Parmar, N., Uszkoreit, J., Jones, L., Gomez, A. N., Kaiser, L., Polosukhin, I. (2017).
    Attention is all you need. NeurIPS 30.

    Zaheer, M., Kottur, S., Ravanbakhsh, S., Poczos, B., Salakhutdinov, R., Smola, A. (2017). Deep sets. NeurIPS 30.

    Examples
    --------
    >>> import torch, pyro, pyro.distributions as dist, bayeskit as bk
    >>> def model(y):
    ...     mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    ...     with pyro.plate("data", len(y)):
    ...         pyro.sample("y", dist.Normal(mean, 1.0), obs=y)
    >>> posterior = bk.amortize(model, (torch.zeros(20),), sizes=(1, 20), num_steps=300, progress=False)
    >>> y = torch.tensor([0.3, 1.1, 0.8, 0.4])
    >>> draws, evidence = posterior.correct(y)
    >>> abs(float(draws["mean"].mean()) - float(y.sum()) / 5) < 0.05, evidence.trusted
    (True, True)
    """
    if isinstance(model, Target):
        raise ModelError(
            "amortize takes a Pyro model and its arguments, not a target; pass the function, and write a model of "
            "another package for Pyro"
        )
    sizes, encoding = _sizes_and_encoding(sizes, encoding, callable(args))
    num_steps = whole_number("num_steps", num_steps, least=1)
    batch_size = whole_number("batch_size", batch_size, least=2)
    num_transforms = whole_number("num_transforms", num_transforms, least=1)
    learning_rate = real_number("learning_rate", learning_rate, "(0, inf)")
    patience = None if patience is None else whole_number("patience", patience, least=1)
    names: tuple[str, ...] = (observed,) if isinstance(observed, str) else tuple(observed)
    if not callable(args):
        if not isinstance(args, (tuple, list)):
            raise SettingsError(
                f"args must be a tuple of the model's arguments, such as (x,), not {type(args).__name__}"
            )
        args = tuple(lists_as_tensors(arrays_as_tensors(value)) for value in args)
    if names:
        model, args, names = _conditioned(model, names, args, sizes, seed)
    simulator = Simulator(model, args, sizes, encoding, seed)
    generator = new_generator(seed, stream="first weights of an amortised posterior")
    with global_stream(generator):
        network = AmortizingNetwork(simulator.layout, encoding, num_transforms).to(simulator.largest.device)
    source, held_out = _source(simulator, network, num_simulations, batch_size, patience is not None, generator)
    if num_simulations is not None and patience is None:
        patience = _PATIENCE
    with one_thread():  # tensors are small
        training = fit(
            _nothing,
            network,
            _NegativeLogDensity(),
            source,
            num_steps=num_steps,
            optimizer=partial(torch.optim.Adam, lr=learning_rate),
            schedule=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=partial(_falling, num_steps)),
            gradient_clipping=_MAX_GRADIENT,
            validation=held_out,
            patience=patience,
            seed=derived_seed(seed, "training of an amortised posterior"),
            checkpoint=checkpoint,
            checkpoint_seconds=checkpoint_seconds,
            time_budget=time_budget,
            progress=progress,
        )
    simulator.report()
    settings = {
        "observed": list(names),
        "num_transforms": num_transforms,
        "num_steps": training.num_steps,
        "seed": seed,
    }
    example = simulator.arguments(0 if sizes is None else sizes[1], generator)
    structure = simulator.structure
    return AmortizedPosterior(model, network.double(), structure, sizes, encoding, example, settings, training)
