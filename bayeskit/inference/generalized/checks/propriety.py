"""Whether a posterior integrates to one, judged by how its density falls off along rays."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bayeskit._settings import whole_number
from bayeskit._torch import new_generator
from bayeskit.errors import ImproperPosteriorError
from bayeskit.inference.generalized.losses.loss import num_data
from bayeskit.inference.generalized.posterior import GibbsPosterior

FAR = 1e12  # how far rays reach, in units of the posterior's width
STARTS, CLIMBS, BISECTIONS = 8, 100, 32
SLACK = 0.05  # of a slope that is zero where the mass of every decade is the same
POLES = 64  # values among the data at which poles are looked for
SHOWN = 0.1  # components of a direction smaller than this are not named


@dataclass(frozen=True, eq=False)
class Ray:
    """A direction from the bulk of a posterior outwards.

    Attributes
    ----------
    direction : dict of str to float
        Components by unconstrained coordinate, a unit vector.
    slope : float
        By how much the logarithm of the mass about the ray grows, decade by decade, per unit of log distance:
        negative where the mass beyond is finite, ``-inf`` where the density vanishes.
    distance : float
        How far the ray could be followed.
    toward : dict of Tensor
        The sites' values there.
    """

    direction: dict[str, float]
    slope: float
    distance: float
    toward: dict[str, Tensor]

    def __repr__(self) -> str:
        shown = {name: x for name, x in self.direction.items() if abs(x) >= SHOWN}
        return "(" + ", ".join(f"{name} {x:+.3g}" for name, x in shown.items()) + ")"


@dataclass(frozen=True, eq=False)
class ProprietyReport:
    """What :func:`propriety_check` finds.

    Attributes
    ----------
    proper : bool
        Whether the mass falls off along every ray that was tried.
    worst : Ray
        The one along which it falls off least.
    rays : tuple of Ray
    description : str
        Of the posterior.
    """

    proper: bool
    worst: Ray
    rays: tuple[Ray, ...]
    description: str

    def raise_if_improper(self) -> None:
        """Refuse a posterior that does not seem to exist.

        Raises
        ------
        ImproperPosteriorError
            Naming the direction, if ``proper`` is false.
        """
        if not self.proper:
            raise ImproperPosteriorError(repr(self))

    def __repr__(self) -> str:
        if self.proper:
            return f"seems proper: {self.description} falls off along each of {len(self.rays)} rays"
        ends = "; ".join(f"{site} to {_short(value)}" for site, value in self.worst.toward.items())
        return (
            f"improper: the mass of {self.description} does not fall off in the direction {self.worst!r} of "
            f"unconstrained space, where {ends}; take a proper prior, or one that vanishes there where this one is "
            "proper, or a loss that grows there"
        )


def propriety_check(posterior: GibbsPosterior, *, num_directions: int = 32, seed: int = 0) -> ProprietyReport:
    r"""Look for directions in which a posterior does not fall off fast enough to integrate to one.

    Unconstrained space is searched from the bulk of the posterior outwards along straight rays: each coordinate both
    ways, the directions in which the density changes least, those in which an optimiser runs off, and random ones.
    At distances ``r`` that double, the mass of a shell about a ray is about density times cross-section times ``r``,
    whose logarithm must fall with ``log r``. Where the cross-section widens as ``r**(d - 1)``, as it does in a cone,
    this says that the log density must fall faster than ``-d * log r``. The cross-section is measured: the lengths,
    across the ray, over which the log density drops by one.

    Poles that a loss has where a location meets a datum while a scale goes to zero are looked for as well, as the
    :class:`~bayeskit.inference.generalized.losses.BetaDivergence` and
    :class:`~bayeskit.inference.generalized.losses.GammaDivergence` have them under proper priors, too. Rays then start
    where a site without constraints, of the shape of a datum, equals one of the most frequent 64 data, and follow one
    constrained coordinate. What comes as near to the datum as the square of ``exp(-r)`` counts as the cross-section,
    which is less than there is where the density is a function of the distance over the scale.

    Parameters
    ----------
    posterior : GibbsPosterior
    num_directions : int, default 32
        Number of random directions, at least one.
    seed : int, default 0
        Of these and of the points where searches start.

    Returns
    -------
    ProprietyReport

    Notes
    -----
    This can find a posterior improper, and does not prove one proper. It sees no region of infinite mass that no
    straight ray meets, such as a narrow cone among many dimensions that no optimiser runs into, a curved funnel, or a
    pole of the density at a finite place. Of the poles of the beta- and gamma-divergence it sees neither those of
    regressions and mixtures, nor those where a location is a function of sites, or a scale not a site with a
    constraint. Nor does it look beyond distances of about 1e12 widths, or, of coordinates that a transform maps to part
    of the line, beyond where their values overflow: a prior that is flat so far is called improper although it may not
    be, as is a density whose tail is very nearly not integrable. That a direction is named means that the mass of ever
    more distant shells along it had not begun to fall there.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> x = torch.tensor([1.0], dtype=torch.float64)
    >>> cauchy = losses.FunctionLoss(lambda centre, x: (x - centre).square().log1p())
    >>> propriety_check(GibbsPosterior(Flat(), cauchy, x, weight=0.6)).proper
    True
    >>> report = propriety_check(GibbsPosterior(Flat(), cauchy, x, weight=0.4))
    >>> report.proper, round(report.worst.slope, 6)
    (False, 0.2)
    """
    num_directions = whole_number("num_directions", num_directions, least=1)
    search = _Search(posterior, seed)
    directions = search.directions(num_directions, new_generator(seed, stream="propriety"))
    rays = search.rays(directions) + search.poles()
    worst = max(rays, key=lambda ray: ray.slope)
    return ProprietyReport(worst.slope < -SLACK, worst, rays, repr(posterior))


class _Search:
    """A density about its bulk, in coordinates whose units are its widths there."""

    def __init__(self, posterior: GibbsPosterior, seed: int) -> None:
        self.posterior = posterior
        self.dim = posterior.dim
        like = torch.zeros((), dtype=posterior.dtype, device=posterior.device)
        self.limit = math.log(torch.finfo(posterior.dtype).max) / 2.4  # squares of exp of it do not overflow
        starts = posterior.prior.start(STARTS, seed).to(like)
        finite = posterior.log_density(starts).isfinite()
        self.starts = starts[finite] if bool(finite.any()) else starts
        self.ends = self._climb(self.starts)
        self.centre = self.starts[0]
        self.curved = self._curved()
        stayed = (self.ends.abs() < torch.where(self.curved, self.limit / 4, FAR**0.75)).all(-1)
        inside = self.ends[stayed] if bool(stayed.any()) else self.starts
        self.centre = inside[self.log_density(inside).argmax()]
        axes = torch.eye(self.dim).to(like)
        width = self._widths(self.centre.expand(self.dim, -1), axes, self.log_density(self.centre).expand(self.dim))
        # A coordinate along which nothing changes has no width.
        self.scale = torch.where((width > FAR**-0.75) & (width < FAR**0.75), width, 1.0)

    def log_density(self, u: Tensor) -> Tensor:
        return _ordered(self.posterior.log_density(u))

    def _value_and_grad(self, u: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.posterior.value_and_grad(u)
        return _ordered(value), gradient.nan_to_num(0.0, 0.0, 0.0)

    def _curved(self) -> Tensor:
        """Return which coordinates a transform maps to something else than themselves, ``(d,)``."""
        found = torch.ones(self.dim, dtype=torch.bool, device=self.centre.device)
        values = self.posterior.constrain(self.centre)
        for site in self.posterior.sites:
            own = self.centre[site.start : site.stop]
            found[site.start : site.stop] = not torch.equal(values[site.name].reshape(-1), own)
        return found

    # -- directions -------------------------------------------------------------------------

    def directions(self, num_random: int, generator: torch.Generator) -> Tensor:
        """Return unit vectors, in units of widths, ``(m, d)``."""
        axes = torch.eye(self.dim).to(self.centre)
        random = torch.randn(num_random, self.dim, generator=generator, dtype=axes.dtype).to(axes)
        found = [axes, -axes]
        if self.dim > 1:
            still = self._still(generator)
            found += [still, -still, random]
        runs = (self.ends - self.starts) / self.scale
        found.append(runs[runs.norm(dim=-1) > 0])
        joint = torch.cat(found)
        return joint / joint.norm(dim=-1, keepdim=True)

    def _still(self, generator: torch.Generator) -> Tensor:
        """Return orthogonal directions, from those in which the density changes to those in which it does not."""
        count = 8 * self.dim + 32
        noise = torch.randn(count, self.dim, generator=generator, dtype=self.centre.dtype).to(self.centre)
        points = self.centre + self.scale * noise * torch.logspace(-1, 1, count).to(noise)[:, None]
        gradients = self.posterior.value_and_grad(points)[1] * self.scale
        gradients = gradients[gradients.isfinite().all(-1)]
        # All count alike, that rounding of the largest does not hide where the others point.
        gradients = gradients / gradients.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(gradients.dtype).tiny)
        return torch.linalg.svd(torch.cat([gradients, torch.zeros_like(points[: self.dim])]), full_matrices=False).Vh

    def _climb(self, position: Tensor) -> Tensor:
        """Go uphill with steps that grow while they succeed, ``(k, d)``."""
        size = torch.ones_like(position[:, 0])
        value, gradient = self._value_and_grad(position)
        for _ in range(CLIMBS):
            steepness = gradient.norm(dim=-1, keepdim=True)
            trial = position + size[:, None] * gradient / steepness.clamp_min(torch.finfo(position.dtype).tiny)
            trial = torch.where(steepness > 0, trial, position).clamp(-FAR, FAR)
            if torch.equal(trial, position):
                break  # steps have become so small that rounding takes them back
            reached, slope = self._value_and_grad(trial)
            better = (reached > value) & reached.isfinite()
            position = torch.where(better[:, None], trial, position)
            gradient = torch.where(better[:, None], slope, gradient)
            value = torch.where(better, reached, value)
            size = torch.where(better, size * 2, size / 3)
        return position

    # -- along them -------------------------------------------------------------------------

    def rays(self, directions: Tensor) -> tuple[Ray, ...]:
        """Follow directions ``(m, d)`` outwards."""
        step = self.scale * directions
        bent = (step * self.curved).abs().amax(-1)
        reach = torch.where(bent > 0, self.limit / bent, torch.inf).clamp_max(FAR)
        # Over the last three doublings; nearer by, what matters may still be the bulk.
        distance = reach[:, None] * torch.tensor([1 / 8, 1 / 4, 1 / 2, 1.0]).to(step)
        points = self.centre + distance[..., None] * step[:, None]  # (m, 4, d)
        value = self.log_density(points)
        section = self._log_section(directions, distance, points, value)
        return self._followed(step, distance, points, value, section)

    def poles(self) -> tuple[Ray, ...]:
        """Follow each constrained coordinate both ways from where a location equals a datum."""
        data = self.posterior.data
        curved = self.curved.nonzero()[:, 0]
        if isinstance(data, tuple) or not data.is_floating_point() or not len(curved):
            return ()
        rows, counts = data.reshape(num_data(data), -1).unique(dim=0, return_counts=True)
        rows = rows[counts.argsort(descending=True, stable=True)[:POLES]].to(self.centre)
        axes = torch.eye(self.dim).to(self.centre)[curved]
        both = torch.cat([axes, -axes])
        distance = self.limit * torch.tensor([1 / 8, 1 / 4, 1 / 2, 1.0]).to(self.centre)
        found: tuple[Ray, ...] = ()
        for site in self.posterior.sites:
            size = site.stop - site.start
            if size != rows.shape[1] or bool(self.curved[site.start : site.stop].any()):
                continue
            starts = self.centre.repeat(len(rows), 1)
            starts[:, site.start : site.stop] = rows
            starts, step = starts.repeat_interleave(len(both), 0), both.repeat(len(rows), 1)
            points = starts[:, None] + distance[:, None] * step[:, None]
            value = self.log_density(points)
            # Widths would be lost in rounding of the location.
            section = (-2 * size * distance).expand(value.shape)
            found += self._followed(step, distance.expand(value.shape), points, value, section)
        return found

    def _followed(
        self, step: Tensor, distance: Tensor, points: Tensor, value: Tensor, section: Tensor
    ) -> tuple[Ray, ...]:
        """Describe rays ``(m, d)`` by what was found at four distances, ``(m, 4)``."""
        mass = value + distance.log() + section
        x = distance.log() - distance.log().mean(-1, keepdim=True)
        slope = (x * mass).sum(-1) / x.square().sum(-1)
        slope = torch.where((value == torch.inf).any(-1), torch.inf, slope)
        slope = torch.where((value == -torch.inf).any(-1), -torch.inf, slope)
        toward = self.posterior.constrain(points[:, -1])
        length = step.norm(dim=-1)
        unit = (step / length[:, None]).tolist()
        return tuple(
            Ray(
                dict(zip(self.posterior.names, unit[i], strict=True)),
                float(slope[i]),
                float(distance[i, -1] * length[i]),
                {name: values[i].detach() for name, values in toward.items()},
            )
            for i in range(len(step))
        )

    def _log_section(self, directions: Tensor, distance: Tensor, points: Tensor, value: Tensor) -> Tensor:
        """Return the logarithm of the cross-section about each point of each ray, up to a constant, ``(m, 4)``."""
        if self.dim == 1:
            return torch.zeros_like(value)
        axes = torch.eye(self.dim).to(directions).expand(len(directions), -1, -1)
        # The first column of the orthogonal factor is the direction itself.
        across = torch.linalg.qr(torch.cat([directions[..., None], axes], -1)).Q[..., 1:].mT
        sides = torch.cat([across, -across], 1) * self.scale  # (m, 2 (d - 1), d)
        shape = (*value.shape, sides.shape[1])
        relative = self._widths(
            points[:, :, None].expand(*shape, -1),
            (sides[:, None] * distance[:, :, None, None]).expand(*shape, -1),
            value[..., None].expand(shape),
        )
        both = relative.reshape(*value.shape, 2, -1).sum(2)
        return both.log().sum(-1) + (self.dim - 1) * distance.log()

    def _widths(self, start: Tensor, direction: Tensor, value: Tensor) -> Tensor:
        """Return how far, from each point in each direction, the log density drops by one, ``(*k)``."""
        # Bisection in units of the distance, so that what looks alike at all distances is measured alike.
        low = torch.full_like(value, -60.0)
        high = torch.full_like(value, self.limit)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            dropped = self.log_density(start + middle.exp()[..., None] * direction) < value - 1
            high, low = torch.where(dropped, middle, high), torch.where(dropped, low, middle)
        return high.exp()


def _ordered(value: Tensor) -> Tensor:
    """Return log densities with what is not a number below all others."""
    return value.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _short(value: Tensor) -> str:
    text = ", ".join(f"{x:.3g}" for x in value.reshape(-1)[:4].tolist())
    return f"[{text}{', ...' if value.numel() > 4 else ''}]" if value.dim() else text
