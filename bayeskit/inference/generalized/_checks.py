"""Checks of Gibbs posteriors: propriety, coherence, and mismatch with the sandwich covariance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bayeskit.errors import DataError, ImproperPosteriorError, SettingsError, ShapeError
from bayeskit.extend import check_memory, new_generator, real_number, whole_number
from bayeskit.inference.generalized._minimizer import InformationMatrices, information_matrices
from bayeskit.inference.generalized._posterior import GibbsPosterior
from bayeskit.inference.generalized.losses._loss import Data, PointwiseLoss, num_data, taken

# Propriety of a posterior, judged by the decay of its density along rays.

_FAR = 1e12  # length of rays, in widths of the posterior
_RAY_STARTS, _GRADIENT_STEPS, _BISECTIONS = 8, 100, 32
_SLACK = 0.05  # tolerance for the slope, which is zero if all decades have the same mass
_POLES = 64  # number of data values at which poles are searched
_SHOWN = 0.1  # smaller components of a direction are not printed


@dataclass(frozen=True, eq=False)
class Ray:
    """Ray from the bulk of a posterior outwards, with the growth of the posterior mass along it."""

    direction: dict[str, float]  # unit vector, by unconstrained coordinate
    # Slope of the log mass in log distance: negative if the mass is finite, -inf if the density is zero.
    slope: float
    distance: float  # to the farthest point evaluated
    toward: dict[str, Tensor]  # values of the sites at that point

    def __repr__(self) -> str:
        shown = {name: x for name, x in self.direction.items() if abs(x) >= _SHOWN}
        return "(" + ", ".join(f"{name} {x:+.3g}" for name, x in shown.items()) + ")"


@dataclass(frozen=True, eq=False)
class ProprietyReport:
    """Result of :func:`propriety_check`.

    Attributes
    ----------
    proper : bool
        Whether the mass decreases along every ray.
    worst : Ray
        Ray with the largest slope.
    description : str
        Description of the posterior.
    """

    proper: bool
    worst: Ray
    rays: tuple[Ray, ...]
    description: str

    def raise_if_improper(self) -> None:
        """Raise ImproperPosteriorError, which names the direction, if ``proper`` is false."""
        if not self.proper:
            raise ImproperPosteriorError(repr(self))

    def __repr__(self) -> str:
        if self.proper:
            return f"seems proper: {self.description} falls off along each of {len(self.rays)} rays"
        ends = "; ".join(f"{site} to {_short(value)}" for site, value in self.worst.toward.items())
        return (
            f"improper: the mass of {self.description} does not decrease in the direction {self.worst!r} of "
            f"unconstrained space, where {ends}; take a proper prior, or one that vanishes there, or a loss that grows "
            "there"
        )


def propriety_check(posterior: GibbsPosterior, *, num_directions: int = 32, seed: int = 0) -> ProprietyReport:
    r"""Search for directions in which the posterior density decreases too slowly to be integrable.

    Rays run from the bulk of the posterior through unconstrained space: along coordinates, along directions of least
    change of the density, along diverging paths of an optimiser, and in random directions. The mass of a shell at
    distance ``r`` is approximately density times cross-section times ``r``; its logarithm must decrease in ``log r``.
    The cross-section is measured by the lengths, orthogonal to the ray, over which the log density drops by one. In a
    cone it grows as ``r**(d - 1)``, so the log density must decrease faster than ``-d * log r``.

    Poles where a location equals a datum and a scale tends to zero are searched too; for instance
    :class:`~bayeskit.inference.generalized.losses.BetaDivergence` and
    :class:`~bayeskit.inference.generalized.losses.GammaDivergence` have poles even under proper priors. These rays
    start where an unconstrained site with the shape of a datum equals one of the 64 most frequent data values, and
    follow one constrained coordinate. The cross-section is taken as the ball of radius ``exp(-2 * r)``, a lower bound
    if the density depends on distance over scale. Where the density is infinite at zero of an unconstrained coordinate,
    as under a log-uniform prior of either sign, rays lead there in the logarithm of the distance.

    Parameters
    ----------
    num_directions : int, default 32
        Number of random directions, at least one.

    Notes
    -----
    The check can show that a posterior is improper; it cannot prove that it is proper. It misses regions of infinite
    mass that no ray meets, such as narrow cones in many dimensions, curved funnels, and poles at other points. It
    misses poles of the beta- and gamma-divergence for regressions and mixtures, and if the location is a function of
    sites or the scale is not a constrained site.

    Rays end at about 1e12 widths or, for constrained coordinates, where values would overflow. A proper prior that is
    flat up to that distance, or a tail that is barely integrable, may therefore be reported as improper.

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
    rays = search.rays(directions) + search.poles() + search.zeros()
    worst = max(rays, key=lambda ray: ray.slope)
    return ProprietyReport(worst.slope < -_SLACK, worst, rays, repr(posterior))


class _Search:
    """Log density with the centre and the widths of its bulk."""

    def __init__(self, posterior: GibbsPosterior, seed: int) -> None:
        self.posterior = posterior
        self.dim = posterior.dim
        like = torch.zeros((), dtype=posterior.dtype, device=posterior.device)
        self.limit = math.log(torch.finfo(posterior.dtype).max) / 2.4  # squares of exp of it do not overflow
        starts = posterior.prior.start(_RAY_STARTS, seed).to(like)
        finite = posterior.log_density(starts).isfinite()
        self.starts = starts[finite] if bool(finite.any()) else starts
        self.ends = self._maximized(self.starts)
        self.centre = self.starts[0]
        self.curved = posterior.prior.curved(self.centre)
        stayed = (self.ends.abs() < torch.where(self.curved, self.limit / 4, _FAR**0.75)).all(-1)
        inside = self.ends[stayed] if bool(stayed.any()) else self.starts
        self.centre = inside[self.log_density(inside).argmax()]
        axes = torch.eye(self.dim).to(like)
        width = self._widths(self.centre.expand(self.dim, -1), axes, self.log_density(self.centre).expand(self.dim))
        # Coordinates without a finite width keep scale one.
        self.scale = torch.where((width > _FAR**-0.75) & (width < _FAR**0.75), width, 1.0)

    def log_density(self, u: Tensor) -> Tensor:
        return _ordered(self.posterior.log_density(u))

    def _value_and_grad(self, u: Tensor) -> tuple[Tensor, Tensor]:
        value, gradient = self.posterior.value_and_grad(u)
        return _ordered(value), gradient.nan_to_num(0.0, 0.0, 0.0)

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
        """Return orthogonal directions in order of decreasing change of the density, ``(d, d)``."""
        count = 8 * self.dim + 32
        noise = torch.randn(count, self.dim, generator=generator, dtype=self.centre.dtype).to(self.centre)
        points = self.centre + self.scale * noise * torch.logspace(-1, 1, count).to(noise)[:, None]
        gradients = self.posterior.value_and_grad(points)[1] * self.scale
        gradients = gradients[gradients.isfinite().all(-1)]
        # Normalised, so that the rounding error of the largest gradient does not hide the others.
        gradients = gradients / gradients.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(gradients.dtype).tiny)
        return torch.linalg.svd(torch.cat([gradients, torch.zeros_like(points[: self.dim])]), full_matrices=False).Vh

    def _maximized(self, position: Tensor) -> Tensor:
        """Follow the gradient of the log density with adaptive step sizes; return the ends, ``(k, d)``."""
        size = torch.ones_like(position[:, 0])
        value, gradient = self._value_and_grad(position)
        for _ in range(_GRADIENT_STEPS):
            steepness = gradient.norm(dim=-1, keepdim=True)
            trial = position + size[:, None] * gradient / steepness.clamp_min(torch.finfo(position.dtype).tiny)
            trial = torch.where(steepness > 0, trial, position).clamp(-_FAR, _FAR)
            if torch.equal(trial, position):
                break  # steps are below rounding
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
        reach = torch.where(bent > 0, self.limit / bent, torch.inf).clamp_max(_FAR)
        # The slope is estimated over the last three doublings, away from the bulk.
        distance = reach[:, None] * torch.tensor([1 / 8, 1 / 4, 1 / 2, 1.0]).to(step)
        points = self.centre + distance[..., None] * step[:, None]  # (m, 4, d)
        value = self.log_density(points)
        section = self._log_section(directions, distance, points, value)
        return self._followed(step, distance, points, value, section)

    def poles(self) -> tuple[Ray, ...]:
        """Follow each constrained coordinate in both directions from points where a location equals a datum."""
        data = self.posterior.data
        curved = self.curved.nonzero()[:, 0]
        if isinstance(data, tuple) or not data.is_floating_point() or not len(curved):
            return ()
        rows, counts = data.reshape(num_data(data), -1).unique(dim=0, return_counts=True)
        rows = rows[counts.argsort(descending=True, stable=True)[:_POLES]].to(self.centre)
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
            # Measured widths would be lost in the rounding of the location.
            section = (-2 * size * distance).expand(value.shape)
            found += self._followed(step, distance.expand(value.shape), points, value, section)
        return found

    def zeros(self) -> tuple[Ray, ...]:
        """Follow each unconstrained coordinate towards zero, where the density is infinite there; in log distance."""
        free = (~self.curved).nonzero()[:, 0]
        axes = torch.eye(self.dim).to(self.centre)[free]
        found = axes[self.posterior.log_density(self.centre * (1 - axes)) == torch.inf] if len(free) else axes
        if not len(found):
            return ()
        step = torch.cat([-found, found])
        distance = (self.limit * torch.tensor([1 / 8, 1 / 4, 1 / 2, 1.0]).to(step)).expand(len(step), -1)
        points = (self.centre * (1 - step.abs()))[:, None] - (-distance).exp()[..., None] * step[:, None]
        # The logarithm of the distance from zero is the coordinate; near a pole the section does not change.
        value = self.log_density(points) - distance
        return self._followed(step, distance, points, value, torch.zeros_like(value))

    def _followed(
        self, step: Tensor, distance: Tensor, points: Tensor, value: Tensor, section: Tensor
    ) -> tuple[Ray, ...]:
        """Return rays ``(m, d)`` with slopes estimated from four distances, ``(m, 4)``."""
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
        """Return the distance from each point in each direction at which the log density drops by one, ``(*k)``."""
        # Bisection on the log scale, relative to the distance: equally precise at all distances.
        low = torch.full_like(value, -60.0)
        high = torch.full_like(value, self.limit)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            dropped = self.log_density(start + middle.exp()[..., None] * direction) < value - 1
            high, low = torch.where(dropped, middle, high), torch.where(dropped, low, middle)
        return high.exp()


def _ordered(value: Tensor) -> Tensor:
    """Return log densities with nan replaced by minus infinity."""
    return value.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _short(value: Tensor) -> str:
    text = ", ".join(f"{x:.3g}" for x in value.reshape(-1)[:4].tolist())
    return f"[{text}{', ...' if value.numel() > 4 else ''}]" if value.dim() else text


# Coherence: agreement of joint and sequential updates.

_POINTS = 16


@dataclass(frozen=True)
class CoherenceReport:
    """Result of :func:`coherence_check`.

    Attributes
    ----------
    coherent : bool
        Whether the discrepancies are within the tolerance.
    discrepancy : float
        Largest of ``discrepancies``.
    discrepancies : tuple of float
        Largest difference of log density ratios between sequential and joint update, for each division of the data.
    splits : tuple of tuple of int
        Sizes of the parts of each division.
    tolerance : float
        Bound on the rounding error.
    description : str
        Loss and pooling.
    """

    coherent: bool
    discrepancy: float
    discrepancies: tuple[float, ...]
    splits: tuple[tuple[int, ...], ...]
    tolerance: float
    description: str

    def __repr__(self) -> str:
        worst = self.splits[self.discrepancies.index(self.discrepancy)]
        if self.coherent:
            return (
                f"coherent: {self.description}, divided in {len(self.splits)} ways, log densities by parts and at "
                f"once differ by {self.discrepancy:.1e} at most"
            )
        return (
            f"not coherent: {self.description}, log density ratios by parts of {_sizes(worst)} data and at once differ "
            f"by {self.discrepancy:.3g}; use all data at once"
        )


def coherence_check(
    posterior: GibbsPosterior, splits: int | Sequence[Sequence[int]] = 5, *, seed: int = 0
) -> CoherenceReport:
    """Compare sequential updates by parts of the data with the joint update.

    The sequential update is ``prior * exp(-weight * sum over parts of pooled loss)``. The update is coherent if this
    equals the posterior of all data up to a constant, which is checked at 16 draws from the prior.

    Parameters
    ----------
    splits : int or sequence of sequences of int, default 5
        Number of random divisions of the data, the first into single data if ``n <= 1000``; or divisions as sizes of
        consecutive parts, such as ``[(1, 2), (1, 1, 1)]`` for three data.

    Raises
    ------
    SettingsError
        If ``splits`` is empty, or a division has fewer than two parts or does not sum to ``n``.
    DataError
        If there is only one datum.

    Examples
    --------
    >>> import torch, pyro.distributions as dist
    >>> from bayeskit.inference.generalized import GibbsPosterior, losses
    >>> x = torch.tensor([1.0, 2.0, 10.0], dtype=torch.float64)
    >>> coherence_check(GibbsPosterior(dist.Normal(0.0, 5.0), losses.Absolute(), x)).coherent
    True
    >>> coherence_check(GibbsPosterior(dist.Normal(0.0, 5.0), losses.Absolute(), x, pooling="max")).coherent
    False
    """
    if posterior.num_data < 2:
        raise DataError("there is one datum, which cannot be divided; give at least two")
    points = posterior.prior.start(_POINTS, seed)
    whole = _pooled(posterior, points, posterior.data)
    sizes, discrepancies, scale = [], [], float(whole.nan_to_num(0.0, 0.0, 0.0).abs().max())
    for parts in _divisions(posterior.num_data, splits, seed):
        pieces = torch.stack([_pooled(posterior, points, taken(posterior.data, rows)) for rows in parts])
        together = pieces.sum(0)
        scale = max(scale, float(pieces.nan_to_num(0.0, 0.0, 0.0).abs().sum(0).max()))
        # Equal infinite losses agree.
        difference = torch.where(whole == together, 0.0, posterior.weight * (whole - together))
        spread = (
            difference.max() - difference.min()
            if bool(difference.isfinite().all())
            else difference.new_tensor(torch.inf)
        )
        sizes.append(tuple(len(rows) for rows in parts))
        discrepancies.append(float(spread))
    tolerance = posterior.weight * scale * (posterior.num_data + 16) * torch.finfo(posterior.dtype).eps
    largest = max(discrepancies)
    how = f" pooled by {type(posterior.pooling).__name__}" if isinstance(posterior.loss, PointwiseLoss) else ""
    description = type(posterior.loss).__name__ + how
    return CoherenceReport(largest <= tolerance, largest, tuple(discrepancies), tuple(sizes), tolerance, description)


def _pooled(posterior: GibbsPosterior, points: Tensor, data: Data) -> Tensor:
    """Return the pooled loss of data at each point, ``(p,)``."""
    return torch.stack([posterior.pooled_loss(posterior.prior.parameter(u), data) for u in points]).detach()


def _divisions(num_data: int, splits: int | Sequence[Sequence[int]], seed: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the rows of each part of each division."""
    if isinstance(splits, Sequence):
        if not splits:
            raise SettingsError("splits is empty; give at least one division, such as [(1, 2)] of three data")
        for sizes in splits:
            whole = [whole_number("the size of a part", size, 1) for size in sizes]
            if sum(whole) != num_data or len(whole) < 2:
                raise SettingsError(f"{_sizes(whole)} is not a division of {num_data} data into two or more parts")
            yield torch.arange(num_data).split(whole)
        return
    generator = new_generator(seed, stream="coherence")
    check_memory("splits", whole_number("splits", splits, 1))
    for number in range(splits):
        rows = torch.randperm(num_data, generator=generator)
        if number == 0 and num_data <= 1000:
            yield rows.split(1)
        else:
            num_parts = int(torch.randint(2, min(num_data, 8) + 1, (), generator=generator))
            cuts = 1 + torch.randperm(num_data - 1, generator=generator)[: num_parts - 1].sort().values
            yield rows.tensor_split(cuts)


def _sizes(sizes: Sequence[int]) -> str:
    shown = " + ".join(str(n) for n in sizes[:6])
    return shown if len(sizes) <= 6 else f"{shown} + ..."


# Mismatch of the posterior covariance with the sandwich covariance.


@dataclass(frozen=True, eq=False)
class ResidualMismatch:
    """Ratios of posterior to sampling standard deviation, with the linear functions in which they are extreme.

    Attributes
    ----------
    weight : float
        Learning rate of the posterior.
    ratios : Tensor
        Posterior over sampling standard deviation of the contrasts, increasing, ``(d,)``. The first and the last are
        the extremes over all linear functions of the unknowns.
    contrasts : Tensor
        Linear functions as rows of unit length, in unconstrained coordinates, ``(d, d)``.
    coverage : Tensor
        Asymptotic coverage of central ``level`` intervals for the contrasts, ``(d,)``.
    names : tuple of str
        Names of the coordinates.
    posterior_covariance, sandwich : Tensor
        Shape ``(d, d)``.
    """

    weight: float
    ratios: Tensor
    contrasts: Tensor
    coverage: Tensor
    level: float
    names: tuple[str, ...]
    posterior_covariance: Tensor = field(repr=False)
    sandwich: Tensor = field(repr=False)

    @property
    def most_understated(self) -> str:
        """Contrast with the smallest ratio, as text."""
        return self._named(0)

    @property
    def most_overstated(self) -> str:
        """Contrast with the largest ratio, as text."""
        return self._named(-1)

    def _named(self, row: int) -> str:
        contrast = self.contrasts[row]
        terms = [
            f"{'-' if c < 0 else '+'} {abs(c):.3g} {name}"
            for c, name in zip(contrast.tolist(), self.names, strict=True)
            if abs(c) > 1e-3
        ]
        return " ".join(terms).removeprefix("+ ")

    def __repr__(self) -> str:
        lines = [f"ResidualMismatch at weight {self.weight:.6g}: posterior over sampling standard deviation"]
        for what, row, text in (
            ("smallest", 0, self.most_understated),
            ("largest", -1, self.most_overstated),
        ):
            lines.append(
                f"  {what:8} {float(self.ratios[row]):.3f}, {100 * self.level:g} % intervals cover "
                f"{100 * float(self.coverage[row]):.1f} %: {text}"
            )
        return "\n".join(lines)


def residual_mismatch(
    posterior: GibbsPosterior,
    *,
    covariance: Tensor | None = None,
    level: float = 0.95,
    found: InformationMatrices | None = None,
) -> ResidualMismatch:
    r"""Compare the posterior covariance with the sandwich covariance of the loss minimiser.

    The generalised eigenvalues of the posterior covariance :math:`(n w J)^{-1}` relative to the sandwich :math:`J^{-1}
    I J^{-1} / n` are the variance ratios of the linear functions in which the two differ most. One weight can make all
    of them one only if ``I`` is a multiple of ``J``.

    Parameters
    ----------
    posterior : GibbsPosterior
        Posterior with the weight to check, such as ``selection.posterior``.
    covariance : Tensor, optional
        Posterior covariance in unconstrained coordinates, ``(d, d)``, for instance of draws; by default the asymptotic
        covariance.
    level : float, default 0.95
        Level of the intervals whose coverage is reported.
    found : InformationMatrices, optional
        Precomputed :func:`~bayeskit.inference.generalized.information_matrices` of the same loss and data.

    Raises
    ------
    DataError
        If the loss has no proper minimum, or a covariance is not positive definite.
    ShapeError
        If ``covariance`` is not ``(d, d)``.

    References
    ----------
    Kleijn, B. J. K., van der Vaart, A. W. (2012). The Bernstein-Von-Mises theorem under misspecification. Electronic
    Journal of Statistics 6, 354-381. Mueller, U. K. (2013). Risk of Bayesian inference in misspecified models, and the
    sandwich covariance matrix. Econometrica 81, 1805-1849.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.generalized import Flat, GibbsPosterior, losses
    >>> one, two = torch.tensor([[-1.0, -1.0], [1.0, -1.0], [-1.0, 1.0], [1.0, 1.0]], dtype=torch.float64).T
    >>> x = torch.stack([one, 3 * two], 1)  # of variances one and nine
    >>> residual_mismatch(GibbsPosterior(Flat((2,)), losses.HalfSquared(), x))
    ResidualMismatch at weight 1: posterior over sampling standard deviation
      smallest 0.333, 95 % intervals cover 48.6 %: 1 theta[1]
      largest  1.000, 95 % intervals cover 95.0 %: 1 theta[0]
    """
    level = real_number("level", level, "(0, 1)")
    found = information_matrices(posterior) if found is None else found
    ours = found.posterior_covariance / posterior.weight if covariance is None else covariance.to(found.position)
    if tuple(ours.shape) != (posterior.dim, posterior.dim):
        raise ShapeError(f"covariance must be ({posterior.dim}, {posterior.dim}), not {tuple(ours.shape)}")
    theirs = 0.5 * (found.sandwich + found.sandwich.mT)
    for name, matrix in (("posterior covariance", ours), ("sandwich", theirs)):
        if not bool((torch.linalg.eigvalsh(matrix) > 0).all()):
            raise DataError(f"the {name} is not positive definite; check whether the data are fitted without error")
    lower = torch.linalg.cholesky(theirs)
    half = torch.linalg.solve_triangular(lower, ours, upper=False)
    values, vectors = torch.linalg.eigh(torch.linalg.solve_triangular(lower, half.mT, upper=False))
    contrasts = torch.linalg.solve_triangular(lower.mT, vectors, upper=True).mT
    contrasts = contrasts / contrasts.norm(dim=-1, keepdim=True)
    largest = contrasts.gather(1, contrasts.abs().argmax(1, keepdim=True))
    ratios = values.sqrt()
    normal = torch.distributions.Normal(torch.zeros_like(ratios), 1.0)
    width = normal.icdf(torch.full_like(ratios, 0.5 + level / 2))
    return ResidualMismatch(
        weight=posterior.weight,
        ratios=ratios,
        contrasts=contrasts * largest.sign(),
        coverage=2 * normal.cdf(width * ratios) - 1,
        level=level,
        names=posterior.names,
        posterior_covariance=ours,
        sandwich=theirs,
    )
