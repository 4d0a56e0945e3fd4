"""Automatic centring: chains move in coordinates of location-scale sites that are chosen from the warm-up's draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bayeskit._logdensity.centring import Locations, Recentred, location_scale_sites, locations
from bayeskit._logdensity.pyro_density import Site
from bayeskit._logdensity.target import Target
from bayeskit.inference._known_modes import KnownModes
from bayeskit.inference.samplers._adaptation import Adaptation, AdaptationState
from bayeskit.inference.samplers._driver import Ending, Records
from bayeskit.inference.samplers._starts import candidate_points, starting_points

_GRID = 21  # values of the centredness that are compared
_WORTHWHILE = 0.05  # nats by which an element of constant scale has to gain from another centredness than one
_SIBLINGS = 2.0  # weight of the median cost of a site's elements, beside one of the element itself
_LONG_NECK = 0.5  # standard deviation of a log scale from which on the neck of its funnel is within reach
_SLACK = 0.1  # nats by which such an element may be worse for less centring: the neck counts beyond the draws
_WORTH_MOVING = 0.02  # nats an element, on average, by which other coordinates have to be better than those in use
_CHOICES = 2  # windows of the warm-up at whose ends the centredness is chosen
_LEAST_DRAWS = 40  # in a window from which it is chosen
# What is left of a funnel wants shorter steps, and half a period of a standard normal to be crossed.
_REJECTED, _LEAST_LENGTH = 0.5, 3.0
_LOOKS = 40  # candidates at which scales are compared


def divergence(x: Tensor, at: Locations, centredness: Tensor, linear: bool = True) -> Tensor:
    r"""Return how far draws are from a normal distribution, element by element, up to terms without the centredness.

    With the coordinate :math:`v = c m + (x - m) s^{c - 1}` the Kullback-Leibler divergence of the law of the draws from
    a normal distribution over :math:`v` and the parents is, up to a constant, the logarithm of the standard deviation
    of :math:`v` given the parents plus :math:`(1 - c) E \log s`: the second term is the change of entropy.

    Parameters
    ----------
    x : Tensor
        Draws of the elements of a site, ``(k, m)``.
    at : Locations
        Their locations and log scales at the same draws, ``(k, m)`` each.
    centredness : Tensor
        Of shape ``()`` or ``(m,)``.
    linear : bool, default True
        Whether the deviation is that of the residuals of a regression on :math:`m` and :math:`\log s`, as for a metric
        that takes care of linear relations.

    Returns
    -------
    Tensor
        Shape ``(m,)``.
    """
    location, log_scale = at
    v = centredness * location + (x - location) * ((centredness - 1) * log_scale).exp()
    rest = v - v.mean(0)
    for feature in _orthogonal(location, log_scale) if linear else ():
        rest = rest - (rest * feature).sum(0) * feature
    return 0.5 * rest.square().mean(0).log() + (1 - centredness) * log_scale.mean(0)


def best_centredness(x: Tensor, at: Locations, linear: bool = True) -> Tensor:
    """Return the centredness in [0, 1] of each element in which draws are closest to a normal distribution.

    To the :func:`divergence` of an element, which draws of a short window tell roughly, comes the median of those of
    the site's elements with a weight of two, because siblings are often alike; what the data say clearly of an element
    outweighs it. If a log scale has a standard deviation above 0.5, chains can reach the neck of its funnel, and the
    least centredness within 0.1 nats of the best is taken.

    Parameters
    ----------
    x, at, linear
        As in :func:`divergence`.

    Returns
    -------
    Tensor
        Shape ``(m,)``; one for an element of constant scale unless it gains 0.05 nats.

    References
    ----------
    Gorinova, M. I., Moore, D., Hoffman, M. D. (2020). Automatic reparameterisation of probabilistic programs. ICML,
    PMLR 119, 3648-3657 (which maximises the evidence lower bound of a normal distribution instead).

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.samplers._centring import best_centredness
    >>> from bayeskit._logdensity.centring import Locations
    >>> generator = torch.Generator().manual_seed(0)
    >>> log_scale, noise = torch.randn(2, 1000, 1, generator=generator, dtype=torch.float64)
    >>> log_scale = 0.4 * log_scale
    >>> at = Locations(torch.zeros_like(noise), log_scale)
    >>> weak, strong = best_centredness(log_scale.exp() * noise, at), best_centredness(noise, at)
    >>> bool(weak < 0.2), bool(strong > 0.8)
    (True, True)
    """
    grid = torch.linspace(1.0, 0.0, _GRID, dtype=x.dtype, device=x.device)
    cost = torch.stack([divergence(x, at, c, linear) for c in grid])
    cost = cost - cost[0]
    cost = (cost + _SIBLINGS * cost.median(1, keepdim=True).values) / (1 + _SIBLINGS)
    cost = torch.where(cost.isfinite(), cost, torch.inf)
    best = cost.min(0)
    slack = torch.where(at.log_scale.std(0) > _LONG_NECK, _SLACK, 0.0)
    least = len(grid) - 1 - (cost <= best.values + slack).flip(0).to(torch.uint8).argmax(0)
    chosen = grid[least]
    return torch.where(_varies(at.log_scale) | (best.values < -_WORTHWHILE), chosen, 1.0)


def _varies(log_scale: Tensor) -> Tensor:
    """Tell which scales differ between draws, ``(k, m) -> (m,)``."""
    return log_scale.amax(0) - log_scale.amin(0) > torch.finfo(log_scale.dtype).eps ** 0.5


def _orthogonal(*features: Tensor) -> list[Tensor]:
    """Return centred features of length one, orthogonal to those before, ``(k, m)`` each; zero where none is left."""
    found = list[Tensor]()
    for feature in features:
        rest = feature - feature.mean(0)
        size = rest.norm(dim=0)
        for other in found:
            rest = rest - (rest * other).sum(0) * other
        left = rest.norm(dim=0)
        near = torch.finfo(feature.dtype).eps ** 0.5
        found.append(torch.where(left > near * size, rest / left.clamp(min=torch.finfo(feature.dtype).tiny), 0.0))
    return found


class CentringState(NamedTuple):
    """State of chains of which some coordinates are partly centred."""

    chains: AdaptationState  # in the coordinates in which the chains move
    centredness: Tensor  # (d,), one for coordinates of the target itself
    window: Tensor  # (k, n, d): positions in the chains' coordinates since the last window; empty after the last choice
    before: Tensor  # (), int64: gradients before this window


@dataclass
class Centring:
    """Chains that move in partly centred coordinates, as an algorithm for the driver.

    The warm-up starts with sites of varying scale not centred, so that no neck of a funnel is out of reach. At the end
    of some of its windows, the centredness of each element of the location-scale sites is chosen from the draws of
    the window, and the chains continue from where they are in these coordinates. Records are in the coordinates of the
    chains; :meth:`original` takes them back.

    Parameters
    ----------
    chains : Chains
    sites : tuple of Site
        Location-scale sites of its target.
    """

    chains: Any
    sites: tuple[Site, ...]
    _last: tuple[bytes, int, Any, Recentred | None] | None = field(default=None, init=False, repr=False)

    @classmethod
    def of(cls, chains: Any) -> Centring | None:
        """Return the algorithm for chains; None if their target has no sites to centre, or the warm-up is too short."""
        if chains.adaptation.num_groups > 1 or not _choices(chains.adaptation):
            return None
        sites = location_scale_sites(chains.target)
        if not sites:
            return None
        rejected = _REJECTED * (1 - chains.adaptation.target_acceptance)
        adaptation = replace(chains.adaptation, target_acceptance=1 - rejected, least_length=_LEAST_LENGTH)
        return cls(replace(chains, adaptation=adaptation), sites)

    @property
    def description(self) -> str:
        """Text of the progress bar."""
        return str(self.chains.description)

    @property
    def num_steps(self) -> int:
        """Iterations, warm-up included."""
        return int(self.chains.num_steps)

    def start(self, generator: torch.Generator, again: bool = False) -> CentringState:
        """Start the chains, with sites of varying scale not centred: there no part of the posterior is out of reach."""
        target = self.chains.target
        ones = torch.ones(target.dim, dtype=target.dtype, device=target.device)
        log_scale = locations(target, candidate_points(target, _LOOKS, generator)).log_scale
        log_scale = log_scale[log_scale.isfinite().all(-1)]
        varies = self._in_sites(_varies(log_scale)) if len(log_scale) else torch.zeros_like(ones, dtype=torch.bool)
        centredness = torch.where(varies, 0.0, ones)
        recentred = _recentred(target, centredness)
        chains = self.chains
        if recentred is not None:
            known, there = KnownModes.of(target), KnownModes.of(recentred.target)
            initial = chains.initial
            if initial is not None:
                one = torch.ones(chains.settings.num_chains, dtype=target.dtype, device=target.device)
                initial = starting_points(target, len(one), one, generator, initial)
                initial = recentred.from_original(initial)
            there.unvisited = [replace(one, position=recentred.from_original(one.position)) for one in known.unvisited]
            chains = replace(chains, target=recentred.target, initial=initial)
        state = chains.start(generator, again)
        if recentred is not None:
            ends = there.ends(recentred.target)
            ends = recentred.to_original(ends).position if len(ends) else ends
            known.note(ends, "starts", independent=True)
        window = state.kernel.position.new_zeros(0, *state.kernel.position.shape)
        return CentringState(state, centredness, window, _count(int(state.num_gradients)))

    def _in_sites(self, of: Tensor) -> Tensor:
        """Return which coordinates ``(d,)`` belong to the sites, among those ``of`` which something is true."""
        inside = torch.zeros_like(of)
        for site in self.sites:
            inside[site.start : site.stop] = of[site.start : site.stop]
        return inside

    def advance(
        self, state: CentringState, iteration: int, generator: torch.Generator
    ) -> tuple[CentringState, Mapping[str, Tensor]]:
        """Run one iteration of all chains; at the end of some windows, choose other coordinates."""
        before = int(state.chains.iteration)  # of this warm-up, which may have begun again
        chains, recentred = self._at(state.centredness, before)
        new, row = chains.advance(state.chains, iteration, generator)
        state, choices = state._replace(chains=new), _choices(self.chains.adaptation)
        if self.chains.begins_again(new, iteration + 1):
            return self._again(state, generator), row
        if before >= choices[-1]:
            return state, row
        state = state._replace(window=torch.cat([state.window, new.kernel.position.unsqueeze(0)]))
        if before + 1 in choices:
            state = self._choose(state, recentred, generator)
        if before + 1 in self.chains.adaptation.window_ends:
            state = state._replace(window=state.window[:0].clone(), before=_count(int(state.chains.num_gradients)))
        return state, row

    def _again(self, state: CentringState, generator: torch.Generator) -> CentringState:
        """Begin the warm-up again, in the coordinates in which it began."""
        fresh, old = self.start(generator, again=True), state.chains
        chains = fresh.chains._replace(
            restarts=old.restarts + 1, num_gradients=fresh.chains.num_gradients + old.num_gradients
        )
        return fresh._replace(chains=chains, before=_count(int(chains.num_gradients)))

    def _at(self, centredness: Tensor, iteration: int) -> tuple[Any, Recentred | None]:
        """Return the chains in their present coordinates, and these; None for those of the target."""
        # Until the next choice only: the calls that are planned decide whether a density is compiled.
        until = next((end for end in _choices(self.chains.adaptation) if end > iteration), self.num_steps)
        key = centredness.cpu().numpy().tobytes()
        last = self._last
        if last is None or last[:2] != (key, until):
            known = last is not None and last[0] == key
            recentred = last[3] if known and last is not None else _recentred(self.chains.target, centredness)
            target = self.chains.target if recentred is None else recentred.target
            adaptation: Adaptation = self.chains.adaptation
            if until < self.num_steps:
                adaptation = replace(adaptation, num_samples=until - adaptation.num_warmup)
            # With a starting point they do not begin again by themselves, in these coordinates.
            chains = replace(self.chains, target=target, adaptation=adaptation, initial=centredness)
            last = self._last = key, until, chains, recentred
        return last[2], last[3]

    def _choose(self, state: CentringState, recentred: Recentred | None, generator: torch.Generator) -> CentringState:
        kernel = state.chains.kernel
        alive = kernel.log_density.isfinite()
        draws = state.window[:, alive].flatten(0, 1)
        if len(draws) < _LEAST_DRAWS:
            return state
        u = draws if recentred is None else recentred.to_original(draws).position
        u = u[u.isfinite().all(-1)]
        at, linear = locations(self.chains.target, u), state.chains.factor.dim() == 3
        wanted, gains = torch.ones_like(state.centredness), list[Tensor]()
        for site in self.sites:
            part = slice(site.start, site.stop)
            there = Locations(at.location[:, part], at.log_scale[:, part])
            wanted[part] = best_centredness(u[:, part], there, linear)
            now, then = (divergence(u[:, part], there, c[part], linear) for c in (state.centredness, wanted))
            gains.append(now - then)
        if bool(torch.cat(gains).mean() < _WORTH_MOVING):
            return state
        return self._moved(state, wanted, u, generator)

    def _moved(self, state: CentringState, wanted: Tensor, draws: Tensor, generator: torch.Generator) -> CentringState:
        """Continue in other coordinates, with draws ``(k, d)`` of the target for a first metric."""
        if torch.equal(wanted, state.centredness):
            return state
        position, alive = state.chains.kernel.position, state.chains.kernel.log_density.isfinite()
        old, new = (_recentred(self.chains.target, c) for c in (state.centredness, wanted))
        position = position if old is None else old.to_original(position).position
        points, moved = (position, draws) if new is None else (new.from_original(position), new.from_original(draws))
        moved = moved[moved.isfinite().all(-1)]
        if not bool(points[alive].isfinite().all()) or len(moved) < _LEAST_DRAWS:
            return state  # a scale that rounds to zero
        points = torch.where(
            points.isfinite(), points, position
        )  # of chains at zero density, which stay where they are
        state = state._replace(centredness=wanted)
        chains, _ = self._at(wanted, int(state.chains.iteration))
        return state._replace(chains=self._restarted(state, chains, points, moved, generator))

    def _restarted(
        self,
        state: CentringState,
        chains: Any,
        points: Tensor,
        draws: Tensor,
        generator: torch.Generator,
    ) -> AdaptationState:
        """Start the adaptation anew at points in other coordinates, with a metric from draws there."""
        old, adaptation = state.chains, chains.adaptation
        new: AdaptationState = adaptation.init(
            chains.target, points, generator=generator, covariance=_rough_covariance(draws)
        )
        spent = int(old.num_gradients) - int(state.before)
        left = adaptation.num_warmup + adaptation.num_samples - int(old.iteration)
        planned = left * spent // (len(points) * max(1, len(state.window)))
        return new._replace(
            kernel=new.kernel._replace(iteration=old.kernel.iteration),
            iteration=old.iteration,
            restarts=old.restarts,
            num_gradients=old.num_gradients + new.num_gradients + len(points),
            planned_calls=torch.clamp(torch.ones_like(old.planned_calls) * planned, min=1),
        )

    def original(self, state: CentringState, position: Tensor, log_prior: Tensor) -> tuple[Tensor, Tensor]:
        """Return positions ``(*batch, d)`` and log priors of the last coordinates in those of the target."""
        recentred = self._at(state.centredness, self.num_steps)[1]
        if recentred is None:
            return position, log_prior
        original, log_jacobian = recentred.to_original(position)
        return original, log_prior - log_jacobian

    def ending(self, state: CentringState, iteration: int, records: Records) -> Ending | None:
        """Return the ending of the chains, by draws in the coordinates of the target."""
        ending: Ending | None = self.chains.ending(state.chains, iteration, _InOriginal(self, state, records))
        return ending

    def note(self, state: CentringState, iteration: int, records: Records) -> str:
        """Return the text behind the progress bar."""
        return str(self.chains.note(state.chains, iteration, records))

    def facts(self) -> dict[str, Any]:
        """Return the settings that have to be equal in a checkpoint and in the run that resumes it."""
        return {**self.chains.facts(), "reparameterize": "auto"}


class _InOriginal:
    """Records with positions and log priors in the coordinates of the target, which are computed when asked for."""

    def __init__(self, centring: Centring, state: CentringState, records: Records) -> None:
        self._centring, self._state, self._records = centring, state, records
        self._found: dict[str, Tensor] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._records

    def __getitem__(self, name: str) -> Tensor:
        if name not in ("position", "log_prior"):
            return self._records[name]
        if not self._found:
            rows = self._centring.original(self._state, self._records["position"], self._records["log_prior"])
            self._found = dict(zip(("position", "log_prior"), rows, strict=True))
        return self._found[name]


def _choices(adaptation: Adaptation) -> list[int]:
    """Return the iterations before which the centredness is chosen: ends of windows, the last one excepted."""
    return adaptation.window_ends[:-1][-_CHOICES:]


def _recentred(target: Target, centredness: Tensor) -> Recentred | None:
    return Recentred(target, centredness) if bool((centredness != 1).any()) else None


def _count(number: int) -> Tensor:
    return torch.tensor(number, dtype=torch.int64)


def _rough_covariance(draws: Tensor) -> Tensor:
    """Return the covariance of draws ``(k, d)``, ``(d, d)``, its correlations shrunk; variances for few draws."""
    k, d = draws.shape
    variance = draws.var(0)
    variance = torch.where(variance > 0, variance, 1.0)
    if k < 5 * d:
        return variance
    deviation = variance.sqrt()
    standard = (draws - draws.mean(0)) / deviation
    correlation = standard.T @ standard / (k - 1)
    weight = k / (k + 5.0 * d)
    identity = torch.eye(d, dtype=draws.dtype, device=draws.device)
    return deviation[:, None] * (weight * correlation + (1 - weight) * identity) * deviation
