"""How far a posterior's covariance stays from the sandwich, which one learning rate cannot mend in all directions."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product

import torch
from torch import Tensor

from bayeskit._settings import real_number
from bayeskit.errors import DataError, ShapeError
from bayeskit.inference.generalized.posterior import GibbsPosterior
from bayeskit.inference.generalized.sandwich import Information, information


@dataclass(frozen=True, eq=False)
class ResidualMismatch:
    """By how much a posterior over- and understates the spread of the loss minimiser, direction by direction.

    Attributes
    ----------
    weight : float
        Learning rate of the posterior.
    ratios : Tensor
        Posterior over sampling standard deviation of the contrasts, ``(d,)``, increasing: generalised eigenvalues'
        roots. No linear function of the unknowns has a smaller or a larger ratio.
    contrasts : Tensor
        Rows ``(d, d)`` are the linear functions, of unit length, in unconstrained coordinates.
    coverage : Tensor
        Asymptotic coverage of central intervals of ``level`` for the contrasts, ``(d,)``.
    level : float
    names : tuple of str
        Of the coordinates.
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
        """The contrast whose spread the posterior understates most, in words."""
        return self._named(0)

    @property
    def most_overstated(self) -> str:
        """The contrast whose spread the posterior overstates most, in words."""
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
    found: Information | None = None,
) -> ResidualMismatch:
    r"""Compare the covariance of a posterior with that of the loss minimiser under repeated sampling.

    The generalised eigenvalues of the posterior covariance :math:`(n w J)^{-1}` and of the sandwich :math:`J^{-1} I
    J^{-1} / n` are the ratios of both variances for the linear functions of the unknowns in which they differ most.
    All are one only if ``I`` is a multiple of ``J``: otherwise a calibrated weight trades one direction for another.

    Parameters
    ----------
    posterior : GibbsPosterior
        At the weight to be judged, such as ``selection.posterior``.
    covariance : Tensor, optional
        Of the posterior in unconstrained coordinates, ``(d, d)``, such as that of draws; by default the asymptotic
        one.
    level : float, default 0.95
        Of the intervals whose coverage is given.
    found : Information, optional
        Of the same loss and data, where it is known.

    Returns
    -------
    ResidualMismatch

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
    level = real_number("level", level, between=(0.0, 1.0))
    found = information(posterior) if found is None else found
    ours = found.posterior_covariance / posterior.weight if covariance is None else covariance.to(found.position)
    if tuple(ours.shape) != (posterior.dim, posterior.dim):
        raise ShapeError(f"covariance must be ({posterior.dim}, {posterior.dim}), not {tuple(ours.shape)}")
    theirs = 0.5 * (found.sandwich + found.sandwich.mT)
    for name, matrix in (("posterior covariance", ours), ("sandwich", theirs)):
        if not bool((torch.linalg.eigvalsh(matrix) > 0).all()):
            raise DataError(f"the {name} is not positive definite; are the data fitted without error?")
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
        names=_names(posterior),
        posterior_covariance=ours,
        sandwich=theirs,
    )


def _names(posterior: GibbsPosterior) -> tuple[str, ...]:
    """Return the names of unconstrained coordinates."""
    names: list[str] = []
    for site in posterior.prior.sites:
        indices = product(*(range(size) for size in site.unconstrained_shape))
        names += [f"{site.name}[{','.join(map(str, index))}]" if index else site.name for index in indices]
    return tuple(names)
