"""A Pyro model whose data, and first argument, are variables beside its unknowns: experiments before their outcome."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any, cast

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from pyro.poutine.subsample_messenger import _Subsample
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bayeskit._core.inputs import unknown_name
from bayeskit._core.randomness import global_stream, new_generator, one_thread
from bayeskit._core.untraceable import UNTRACEABLE
from bayeskit._logdensity.pyro_density import PyroDensity
from bayeskit._logdensity.pyro_distributions import draw_values
from bayeskit._logdensity.pyro_runs import is_deterministic
from bayeskit._logdensity.target import Target
from bayeskit.errors import ModelError, SettingsError, UnsupportedSiteError

Data = Mapping[str, Tensor]  # by observed site, (n, *shape)


class WithOutcomes(Messenger):
    """A Pyro model with chosen ``sites`` observed: without data, at values drawn in the first run.

    Where ``sites`` is None and the model observes nothing, these are the sites on which no other site depends.
    """

    makes_data = True  # so that it may well observe nothing

    def __init__(self, model: Callable[..., Any], sites: Collection[str] | None) -> None:
        super().__init__()
        self.model, self.sites = model, None if sites is None else tuple(sites)
        self.seen = dict[str, bool]()  # by site, whether it has data of its own
        self.drawn: dict[str, Tensor] = {}
        self.ran = False
        with suppress(TypeError, ValueError):
            self.__signature__ = inspect.signature(model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.sites is None:
            self.sites = _last_sites(self.model, args, kwargs)
        with self:
            result = self.model(*args, **kwargs)
        self.ran = True  # to its end, so that all of its sites are known
        return result

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        self.seen.setdefault(name, msg["is_observed"])
        if name in (self.sites or ()) and not msg["is_observed"]:
            if name not in self.drawn:
                self.drawn[name] = draw_values(msg["fn"])
            msg["value"], msg["is_observed"] = self.drawn[name], True


def _last_sites(model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the sites on which the distribution of no other site depends; none if the model has data.

    None if the model fails: the run that reads it says what is wrong, or gives it lists as tensors and runs it again.
    """

    def run(values: Mapping[str, Any]) -> dict[str, Any]:
        with poutine.block():
            nodes = poutine.trace(poutine.condition(model, data=dict(values))).get_trace(*args, **kwargs).nodes
        sites = {name: node for name, node in nodes.items() if node["type"] == "sample"}
        return {k: v for k, v in sites.items() if not (isinstance(v["fn"], _Subsample) or is_deterministic(v))}

    def densities(values: Mapping[str, Any]) -> dict[str, float]:
        return {name: float(site["fn"].log_prob(values[name]).sum()) for name, site in run(values).items()}

    with torch.no_grad():
        try:
            sites = run({})
        except Exception:
            return None
        if any(site["is_observed"] for site in sites.values()):
            return ()
        values = {name: site["value"] for name, site in sites.items()}
        before, last = densities(values), []
        for name, site in sites.items():
            try:
                now = densities(values | {name: draw_values(site["fn"])})
            except (ValueError, RuntimeError):  # a value outside of the support of a site that depends on this one
                continue
            if now.keys() == before.keys() and all(now[k] == before[k] for k in sites if k != name):
                last.append(name)
    return tuple(last)


class Outcomes:
    """The joint density of a Pyro model with the data of its ``sites`` as variables, and its draws.

    SettingsError if other sites are observed, ModelError if a latent site depends on the data.
    """

    def __init__(self, model: Callable[..., Any], args: tuple[Any, ...], sites: Collection[str], seed: int) -> None:
        observed = WithOutcomes(model, sites) if callable(model) else model
        try:
            self.target = Target.from_pyro(observed, *args, compile=False, seed=seed)
        except ModelError as error:
            seen = observed.seen if isinstance(observed, WithOutcomes) and observed.ran else {}
            for name in sites:
                if seen and name not in seen:
                    raise unknown_name("site", name, list(seen)) from error
            raise
        density = cast(PyroDensity, self.target.density)
        self._density, self._loops = density, self.target.loops
        known = [*density.observed_sites, *(site.name for site in self.target.sites)]
        for name in sites:
            if name not in density.observed_sites:
                raise unknown_name("site", name, known)
        if others := [name for name in density.observed_sites if name not in sites]:
            raise SettingsError(
                f"site {others[0]!r} is observed, but not among the sites {list(sites)} that the information is about; "
                "name it there, or call the model without its data"
            )
        self.sites = tuple(density.observed_sites)
        self._refuse_feedback(new_generator(seed, stream="feedback of data"))

    def _refuse_feedback(self, generator: torch.Generator) -> None:
        u, data = self.draw(4, generator)
        here, there = (self.joint(u.unsqueeze(1), x)[0] for x in (data, {k: v.roll(1, 0) for k, v in data.items()}))
        if not torch.equal(here, there):
            raise ModelError(
                f"the distribution of a latent site depends on the data of the sites {list(self.sites)}; information "
                "is symmetric: exchange the two sets of sites, or name the dependent site among the data"
            )

    def draw(self, count: int, generator: torch.Generator) -> tuple[Tensor, dict[str, Tensor]]:
        """Draw unknowns ``(n, d)`` from the prior, and data given them."""
        u = self.target.sample_prior(count, seed=generator)
        drawn = self.target.predictive(u, seed=generator)
        return u, {name: drawn[name] for name in self.sites}

    def respond(self, u: Tensor, argument: Tensor, generator: torch.Generator) -> tuple[dict[str, Tensor], bool]:
        """Draw data at unknowns ``(n, d)`` and first arguments ``(n, *shape)``; tell whether they have gradients."""
        density = self._density

        def one(row: Tensor, argument: Tensor, reparameterized: bool) -> dict[str, Tensor]:
            values = density.values(row)
            drawn = density.predict(values, (), (argument, *density.args[1:]), None, reparameterized)
            return {name: drawn[name] for name in self.sites}

        def run(reparameterized: bool) -> dict[str, Tensor]:
            if not self._loops:
                try:
                    batched = torch.func.vmap(one, in_dims=(0, 0, None), randomness="different")
                    return batched(u, argument, reparameterized)
                except UnsupportedSiteError:
                    raise
                except UNTRACEABLE:  # a distribution that cannot be drawn in a batch
                    pass
            rows = [one(*pair, reparameterized) for pair in zip(u, argument, strict=True)]
            return {name: torch.stack([row[name] for row in rows]) for name in self.sites}

        with global_stream(generator), one_thread():
            try:
                return run(True), True
            except UnsupportedSiteError:
                return run(False), False

    def prior_depends(self, u: Tensor, argument: Tensor) -> bool:
        """Tell whether prior or values at unknowns ``(n, d)`` change where the first argument does, by a little."""
        nudged = argument + 1e-3 * torch.where(argument == 0, 1.0, argument.abs())

        def one(row: Tensor, argument: Tensor) -> tuple[dict[str, Tensor], Tensor]:
            density = self._density.given_args((argument, *self._density.args[1:]))
            return density.values(row), density.joint(row)[0]

        def run(argument: Tensor) -> list[Tensor]:
            if self._loops:
                return [x for row in u for x in tree_leaves(one(row, argument))]
            return tree_leaves(torch.func.vmap(one, in_dims=(0, None))(u, argument))

        with one_thread(), torch.no_grad():
            return not all(torch.equal(*pair) for pair in zip(run(argument), run(nudged), strict=True))

    def joint(self, u: Tensor, data: Data, argument: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return log prior and log likelihood of unknowns ``(n, m, d)`` for each data set, ``(n, m)``.

        The first argument of the model may differ between data sets, too, ``(n, *shape)``.
        """
        arguments = {} if argument is None else {"argument": argument}

        def one(row: Tensor, data: Data, arguments: Data) -> tuple[Tensor, Tensor]:
            density = self._density.given_observed(data)
            if arguments:
                density = density.given_args((arguments["argument"], *density.args[1:]))
            return density.joint(row)

        with one_thread():
            if not self._loops:
                try:
                    return torch.func.vmap(torch.func.vmap(one, in_dims=(0, None, None)))(u, data, arguments)
                except UNTRACEABLE:  # a model that reads values of its data
                    self._loops = True
            parts = []
            for i, rows in enumerate(u):
                given = {name: value[i] for name, value in data.items()}, {k: v[i] for k, v in arguments.items()}
                parts.append([torch.stack(pair) for pair in zip(*(one(row, *given) for row in rows), strict=True)])
            log_prior, log_likelihood = (torch.stack(part) for part in zip(*parts, strict=True))
            return log_prior, log_likelihood

    def prior_terms(self, u: Tensor) -> dict[str, Tensor]:
        """Return the log prior of each site at unknowns ``(n, d)``, by site ``(n,)``."""
        with one_thread():
            if self._loops:
                rows = [self._density.prior_terms(row) for row in u]
                return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
            return torch.func.vmap(self._density.prior_terms)(u)
