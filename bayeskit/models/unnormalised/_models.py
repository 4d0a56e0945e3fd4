"""Models whose normalising constant is unknown: an energy over real or binary vectors, or of a classifier."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributions import Bernoulli, Distribution, Independent, MultivariateNormal, Normal, constraints

from bayeskit.errors import ModelError, SettingsError, ShapeError
from bayeskit.extend import global_stream, new_generator, whole_number

# Whether an energy over real vectors has a finite normalising constant.

#: Largest slopes of functions that act on each number.
_SLOPES: dict[type[nn.Module], float] = {
    nn.Identity: 1.0,
    nn.Flatten: 1.0,
    nn.Dropout: 1.0,
    nn.ReLU: 1.0,
    nn.Tanh: 1.0,
    nn.Softplus: 1.0,
    nn.Sigmoid: 0.25,
    nn.SiLU: 1.1,
    nn.GELU: 1.13,
}
#: Rays from the base's centre, and the distances, in units of the base's spread, between which decay is measured.
_NUM_RAYS, _DISTANCES = 256, (1e3, 1e4)


class NormaliserCheck(NamedTuple):
    """Whether a model has a finite normalising constant, as far as bounds allow.

    Attributes
    ----------
    is_finite : bool or None
        True if a bound proves it, False if the density does not fall fast enough along a ray, None if all rays that
        were tried allow it and no bound applies.
    reason : str

    Examples
    --------
    >>> import torch
    >>> from torch.distributions import Independent, Normal
    >>> from bayeskit.models.unnormalised._models import EnergyModel
    >>> base = Independent(Normal(torch.zeros(2), 1.0), 1)
    >>> EnergyModel(lambda x: x.abs().sum(-1), base).check_normaliser().is_finite is None
    True
    >>> EnergyModel(lambda x: x.tanh().square().sum(-1), base).check_normaliser().is_finite
    False
    """

    is_finite: bool | None
    reason: str


def lipschitz_bound(module: nn.Module) -> float | None:
    """Return an upper bound on the Lipschitz constant of a network, in Euclidean norms, or None if a part is unknown.

    The bound is the product of the largest singular values of the weights and the largest slopes of the activations.

    Parameters
    ----------
    module : Module
        A linear layer, an activation, or a sequence of these.

    Returns
    -------
    float or None

    References
    ----------
    Szegedy, C. et al. (2014). Intriguing properties of neural networks. ICLR.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Linear(2, 2)
    >>> with torch.no_grad(): _ = layer.weight.copy_(torch.tensor([[3.0, 0.0], [0.0, 2.0]]))
    >>> round(lipschitz_bound(torch.nn.Sequential(layer, torch.nn.ReLU())), 6)
    3.0
    """
    kind = type(module)  # a subclass may compute anything
    if kind is nn.Sequential:
        bounds = [lipschitz_bound(part) for part in cast(nn.Sequential, module)]
        return None if None in bounds else math.prod(bound for bound in bounds if bound is not None)
    if kind is nn.Linear:
        return float(torch.linalg.matrix_norm(cast(nn.Linear, module).weight.detach(), 2))
    if kind is nn.LeakyReLU:
        return max(1.0, abs(cast(nn.LeakyReLU, module).negative_slope))
    if kind is nn.ELU:
        return max(1.0, abs(cast(nn.ELU, module).alpha))
    if kind is nn.Dropout and module.training:
        return None
    return _SLOPES.get(kind)


# The model.

#: Dimension up to which all binary vectors are listed.
_MAX_LISTED = 20


class _ClassifierEnergy(nn.Module):
    """Minus the log of the sum of the exponentials of a classifier's logits."""

    def __init__(self, classifier: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, x: Tensor) -> Tensor:
        return -self.classifier(x).logsumexp(-1)


class EnergyModel(nn.Module):
    r"""Distribution over real or binary vectors that is known up to its normalising constant.

    The density is :math:`e^{-E(x)} / Z`, or :math:`b(x) e^{-E(x)} / Z` with ``tilt``, where :math:`b` is the base
    distribution. Of binary vectors, with entries 0 and 1, it is a probability. Training, the normalising constant with
    its error, and posteriors of parameters are functions of :mod:`bayeskit.models.unnormalised`.

    Parameters
    ----------
    energy : callable
        ``(*batch, d) -> (*batch)``; a module is trained, a function is not. Differentiable for real vectors.
    base : Distribution
        Distribution of vectors, with event shape ``(d,)``, such as ``Independent(Normal(...), 1)`` or
        ``Independent(Bernoulli(...), 1)``. Annealing starts from it, and it is the default noise of noise-contrastive
        estimation. Its support, all real or all binary vectors, is that of the model.
    tilt : bool, default False
        Whether the base is a factor of the density. A network over real vectors then has a normalising constant: its
        energy falls linearly at most, and the log density of a normal base quadratically.

    Attributes
    ----------
    log_constant : Parameter
        Estimate of :math:`\log Z`, a scalar, learnt by noise-contrastive estimation and zero before.

    Raises
    ------
    ShapeError
        If the base is not a distribution of one vector, or the energy does not map ``(*batch, d)`` to ``(*batch)``.
    SettingsError
        If the support of the base is neither all real nor all binary vectors.
    ModelError
        If the energy fails at draws from the base, or has another dtype.

    References
    ----------
    LeCun, Y., Chopra, S., Hadsell, R., Ranzato, M. A., Huang, F. J. (2006). A tutorial on energy-based learning.

    Grathwohl, W., Wang, K.-C., Jacobsen, J.-H., Duvenaud, D., Norouzi, M., Swersky, K. (2020). Your classifier is
    secretly an energy based model and you should treat it like one. ICLR.

    Examples
    --------
    Spins on a ring of four, coded as bits:

    >>> import torch
    >>> def energy(x):
    ...     spins = 2 * x - 1
    ...     return -0.4 * (spins * spins.roll(1, -1)).sum(-1)
    >>> model = EnergyModel.of_bits(energy, 4, dtype=torch.float64)
    >>> exactly = ((2 * torch.tensor(0.4).cosh()) ** 4 + (2 * torch.tensor(0.4).sinh()) ** 4).log()
    >>> abs(float(model.exact_log_normaliser() - exactly)) < 1e-6
    True
    """

    def __init__(self, energy: Callable[[Tensor], Tensor], base: Distribution, *, tilt: bool = False) -> None:
        super().__init__()
        if not isinstance(base, Distribution) or base.batch_shape or len(base.event_shape) != 1:
            shapes = f" of batch shape {tuple(base.batch_shape)}" if isinstance(base, Distribution) else ""
            raise ShapeError(
                f"base must be a distribution of one vector, with event shape (d,), not {type(base).__name__}{shapes}; "
                "wrap independent entries in torch.distributions.Independent(base, 1)"
            )
        self.dim = base.event_shape[0]
        kinds = (constraints.boolean, constraints.real, constraints.real_vector)
        support = base.support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        if all(support is not kind for kind in kinds):
            raise SettingsError(
                f"the base has the support {support}; give a distribution over all real vectors or over all binary "
                "vectors, and transform variables with other supports"
            )
        self.is_binary = support is constraints.boolean
        self.energy, self.base, self.tilt = energy, base, bool(tilt)
        probe = self._checked()
        self.log_constant = nn.Parameter(probe.new_zeros(()))

    @classmethod
    def of_bits(
        cls, energy: Callable[[Tensor], Tensor], dim: int, *, dtype: torch.dtype = torch.float64
    ) -> EnergyModel:
        """Return a model of binary vectors with fair, independent bits as the base, which is no factor of the density.

        ``dim``: at least 1. The base is on the device of the energy's parameters.
        """
        own = next(energy.parameters(), None) if isinstance(energy, nn.Module) else None
        device = None if own is None else own.device
        half = torch.full((whole_number("dim", dim, least=1),), 0.5, dtype=dtype, device=device)
        return cls(energy, Independent(Bernoulli(half), 1))

    @classmethod
    def from_classifier(
        cls, classifier: Callable[[Tensor], Tensor], base: Distribution, *, tilt: bool = True
    ) -> EnergyModel:
        r"""Return the model of inputs that a classifier implies (joint energy-based model, JEM).

        The joint density of input and class :math:`y` is proportional to :math:`e^{f_y(x)}`, with logits :math:`f`, so
        :math:`E(x) = -\log\sum_y e^{f_y(x)}`, and the classifier is the conditional probability of the class. The
        difference of logits says nothing about the density of inputs; their common level is what training adds.

        Parameters
        ----------
        classifier : callable
            ``(*batch, d) -> (*batch, classes)``: logits.
        base, tilt
            As in :class:`EnergyModel`. Without the base as a factor, networks over real vectors have no finite
            normalising constant.

        Examples
        --------
        Linear logits on bits are a mixture of independent bits, with a closed form:

        >>> import torch
        >>> from torch.distributions import Bernoulli, Independent
        >>> w = torch.tensor([[1.0, -0.5, 0.3], [-0.2, 0.8, -1.0]], dtype=torch.float64)
        >>> b = torch.tensor([0.1, -0.4], dtype=torch.float64)
        >>> base = Independent(Bernoulli(torch.full((3,), 0.5, dtype=torch.float64)), 1)
        >>> model = EnergyModel.from_classifier(lambda x: x @ w.T + b, base, tilt=False)
        >>> closed_form = (b + torch.nn.functional.softplus(w).sum(-1)).logsumexp(0)
        >>> round(float(closed_form), 12), round(float(model.exact_log_normaliser()), 12)
        (3.039377520649, 3.039377520649)
        """
        return cls(_ClassifierEnergy(classifier), base, tilt=tilt)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> EnergyModel:
        """Move the base with the parameters, in ``.to(device)`` and ``.double()``."""
        super()._apply(fn, recurse)
        self.base = _moved(self.base, fn)
        return self

    def forward(self, x: Tensor, *_: Any) -> Tensor:
        """Return :meth:`log_density`; further arguments, such as classes, are ignored."""
        return self.log_density(x)

    def log_density(self, x: Tensor) -> Tensor:
        """Return the log density without its constant, ``(*batch, d) -> (*batch)``."""
        energy = self._energy(x)
        return self.base.log_prob(x) - energy if self.tilt else -energy

    def log_ratio(self, x: Tensor) -> Tensor:
        """Return the log of the density without its constant over the base's density, ``(*batch, d) -> (*batch)``."""
        energy = self._energy(x)
        return -energy if self.tilt else -energy - self.base.log_prob(x)

    def log_prob(self, x: Tensor) -> Tensor:
        """Return :meth:`log_density` minus :attr:`log_constant`, ``(*batch, d) -> (*batch)``."""
        return self.log_density(x) - self.log_constant

    def logits(self, x: Tensor) -> Tensor:
        """Return the logits of the classifier, ``(*batch, d) -> (*batch, classes)``; SettingsError without one."""
        if not isinstance(self.energy, _ClassifierEnergy):
            raise SettingsError("the model has no classes; make it with EnergyModel.from_classifier")
        return self.energy.classifier(x)

    def enumerate_states(self) -> Tensor:
        """Return all binary vectors, ``(2**d, d)``; SettingsError for real vectors or more than 20 entries."""
        if not self.is_binary:
            raise SettingsError("real vectors cannot be listed; estimate the constant by log_normaliser")
        if self.dim > _MAX_LISTED:
            raise SettingsError(
                f"{self.dim} bits have 2**{self.dim} states, and at most 2**{_MAX_LISTED} are listed; estimate the "
                "constant by log_normaliser"
            )
        index = torch.arange(2**self.dim, device=self.log_constant.device)
        return (index.unsqueeze(-1) >> torch.arange(self.dim, device=index.device) & 1).to(self.log_constant.dtype)

    def exact_log_normaliser(self) -> Tensor:
        """Return the log normalising constant by summing over all binary vectors, a scalar, with gradient.

        Raises ``SettingsError`` for real vectors or more than 20 entries.
        """
        return self.log_density(self.enumerate_states()).logsumexp(0)

    def check_normaliser(self) -> NormaliserCheck:
        r"""Return whether the normalising constant is finite, as far as bounds allow.

        Proven for binary vectors, and for a Lipschitz energy (see :func:`lipschitz_bound`) that tilts a normal base.
        Otherwise the density is followed along 256 random rays. With radius :math:`r` it has to fall faster than
        :math:`r^{-d}`: a ray on which it does not lies in a cone with an infinite integral, and refutes the model. Rays
        on which it does prove nothing.
        """
        if self.is_binary:
            return NormaliserCheck(True, f"a sum over 2**{self.dim} states is finite")
        bound = self._lipschitz_bound()
        if self.tilt and bound is not None and _is_normal(self.base):
            return NormaliserCheck(True, f"the energy is {bound:.3g}-Lipschitz, and the base is normal")
        generator = new_generator(0, stream="rays")
        like = self.log_constant
        rays = torch.randn(_NUM_RAYS, self.dim, generator=generator, dtype=torch.float64)
        rays = (rays / rays.norm(dim=-1, keepdim=True)).to(like)
        centre, spread = _place_of(self._draws(512))
        with torch.no_grad():
            near, far = (self.log_density(centre + distance * spread * rays).double() for distance in _DISTANCES)
        exponent = -(far - near) / math.log(_DISTANCES[1] / _DISTANCES[0])
        exponent = torch.where(far == -torch.inf, torch.inf, exponent)
        wrong = ~(exponent > self.dim * (1 + 1e-6))
        if bool(wrong.any()):
            worst = float(exponent[wrong].nan_to_num(nan=-math.inf).min())
            return NormaliserCheck(
                False,
                f"along {int(wrong.sum())} of {_NUM_RAYS} random rays the density behaves like radius to the power "
                f"{-worst:.3g}, and an integral over {self.dim} dimensions needs less than {-self.dim}",
            )
        return NormaliserCheck(
            None,
            f"the density falls fast enough along {_NUM_RAYS} random rays, which is no proof, and no bound applies",
        )

    def _lipschitz_bound(self) -> float | None:
        inner = self.energy.classifier if isinstance(self.energy, _ClassifierEnergy) else self.energy
        return lipschitz_bound(inner) if isinstance(inner, nn.Module) else None

    def _energy(self, x: Tensor) -> Tensor:
        energy = self.energy(x)
        if energy.shape != x.shape[:-1]:
            raise ShapeError(
                f"the energy maps shape {tuple(x.shape)} to {tuple(energy.shape)} instead of {tuple(x.shape[:-1])}; "
                "give one number a vector"
            )
        return energy

    def _draws(self, count: int) -> Tensor:
        with global_stream(new_generator(0, stream="draws of a base")):
            return self.base.sample((count,))

    def _checked(self) -> Tensor:
        """Return two draws of the base, after a call of the energy there."""
        draws = self._draws(2)
        try:
            with torch.no_grad():
                found = self._energy(draws)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
            if isinstance(error, ShapeError):
                raise
            raise ModelError(
                f"the energy fails at draws of the base, of shape {tuple(draws.shape)} and type {draws.dtype} "
                f"({type(error).__name__}: {error}); give network and base the same dtype, such as by module.double()"
            ) from error
        if found.dtype != draws.dtype or not bool(found.isfinite().all()):
            raise ModelError(
                f"the energy at draws of the base is {found.tolist()}, of type {found.dtype}; it must be finite and of "
                f"the base's type, {draws.dtype}"
            )
        return draws


def _moved(distribution: Distribution, fn: Callable[[Tensor], Tensor]) -> Distribution:
    """Return a distribution with a function applied to its tensors, and to those of distributions inside of it."""
    moved = copy(distribution)
    for name, value in vars(distribution).items():
        if isinstance(value, Tensor):
            setattr(moved, name, fn(value))
        elif isinstance(value, Distribution):
            setattr(moved, name, _moved(value, fn))
    return moved


def _is_normal(base: Distribution) -> bool:
    inside = base.base_dist if isinstance(base, Independent) else base
    return isinstance(inside, (Normal, MultivariateNormal))


def _place_of(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Return medians and typical distances from them, which heavy tails leave finite."""
    centre = draws.median(0).values
    return centre, (draws - centre).abs().median(0).values.clamp(min=torch.finfo(draws.dtype).tiny)
