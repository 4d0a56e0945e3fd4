"""Blocks of sites with known full conditional distributions, and the check against the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bayeskit._logdensity.pyro_density import Site
from bayeskit._logdensity.pyro_distributions import draw_values
from bayeskit._logdensity.target import Target
from bayeskit.errors import ModelError, SettingsError, ShapeError

Values = Mapping[str, Tensor]
Conditional = Callable[[dict[str, Tensor]], Any]
_MAX_DISAGREEMENT = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass(frozen=True, init=False)
class ConjugateBlock:
    """Latent sites with a known joint distribution given all other sites and the data.

    Parameters
    ----------
    sites : str or sequence of str
        Names of the sites.
    conditional : callable
        Function of the values of all other sites, ``{site: (*batch, *shape)}``. Returns a torch or Pyro distribution
        with draws of shape ``(*batch, *shape)`` for one site, or ``(*batch, k)`` for several sites (flattened values,
        concatenated). Without other sites, the mapping and the batch are empty.

    Raises
    ------
    SettingsError
        If no site is named, a site is named twice, or ``conditional`` is not callable.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.inference.evidence._conditionals import ConjugateBlock
    >>> block = ConjugateBlock("mean", lambda values: torch.distributions.Normal(0.0, values["precision"].rsqrt()))
    >>> block.sites, block.given({"mean": torch.zeros(4), "precision": torch.ones(4)}).batch_shape
    (('mean',), torch.Size([4]))
    """

    sites: tuple[str, ...]
    conditional: Conditional

    def __init__(self, sites: str | Sequence[str], conditional: Conditional) -> None:
        names = (sites,) if isinstance(sites, str) else tuple(sites)
        if not names or len(set(names)) < len(names):
            raise SettingsError(f"a block needs one or several different sites, not {names}")
        if not callable(conditional):
            raise SettingsError(f"the conditional of block {', '.join(names)} must be a function of the other sites")
        object.__setattr__(self, "sites", names)
        object.__setattr__(self, "conditional", conditional)

    def __str__(self) -> str:
        return "(" + ", ".join(self.sites) + ")" if len(self.sites) > 1 else repr(self.sites[0])

    def given(self, values: Values) -> Any:
        """Return the distribution given the values of the other sites.

        Raises
        ------
        ModelError
            If ``conditional`` requests an unknown site.
        """
        others = {name: value for name, value in values.items() if name not in self.sites}
        try:
            return self.conditional(others)
        except KeyError as error:
            raise ModelError(
                f"the conditional of block {self} asks for {error}, but it may only depend on the other sites: "
                f"{', '.join(others) or 'there are none'}"
            ) from error


def blocks_of(target: Target) -> tuple[ConjugateBlock, ...]:
    """Return the blocks of a target's ``full_conditionals``, an empty tuple if it has none."""
    known = {} if target.full_conditionals is None else target.full_conditionals()
    return tuple(ConjugateBlock(sites, conditional) for sites, conditional in known.items())


class Blocks:
    """A partition of a target's sites into blocks with full conditionals; SettingsError if it is not a partition."""

    def __init__(self, target: Target, blocks: Sequence[ConjugateBlock]) -> None:
        if not isinstance(blocks, ConjugateBlock | Sequence):
            raise SettingsError(f"blocks must be a list of ConjugateBlock objects, not {type(blocks).__name__}")
        blocks = [blocks] if isinstance(blocks, ConjugateBlock) else list(blocks)
        for block in blocks:
            if not isinstance(block, ConjugateBlock):
                raise SettingsError(f"blocks must be ConjugateBlock objects, not {type(block).__name__}")
        named = [name for block in blocks for name in block.sites]
        sites = [site.name for site in target.sites]
        if sorted(named) != sorted(sites):
            wrong = {
                "in no block": [name for name in sites if name not in named],
                "in two blocks": sorted({name for name in named if named.count(name) > 1}),
                "not in the model": [name for name in named if name not in sites],
            }
            said = "; ".join(f"{what}: {', '.join(names)}" for what, names in wrong.items() if names)
            raise SettingsError(f"each latent site must be in exactly one block ({said}); the sites are {sites}")
        self.target, self.blocks = target, tuple(blocks)
        self._sites = {site.name: site for site in target.sites}

    def draw(self, index: int, values: Values) -> dict[str, Tensor]:
        """Return the values with one block redrawn from its conditional, by torch's global stream."""
        fn, batch = self._distribution(index, values)
        return {**values, **self.split(index, draw_values(fn).to(self.target.dtype), batch)}

    def log_prob(self, index: int, values: Values, point: Values | None = None) -> Tensor:
        """Return the log density of one block at its values, or at another point, given the others', ``(batch,)``."""
        fn, batch = self._distribution(index, values)
        x = self.join(index, values if point is None else point, batch)
        result = fn.log_prob(x.to(self.target.dtype))
        return result.reshape(batch, -1).sum(1)

    def split(self, index: int, x: Tensor, batch: int) -> dict[str, Tensor]:
        """Return the values ``(batch, *shape)`` by site of a block's draws ``(batch, ...)``, or raise ShapeError."""
        block = self.blocks[index]
        sites = [self._sites[name] for name in block.sites]
        sizes = [site.shape.numel() for site in sites]
        expected = (batch, *sites[0].shape) if len(sites) == 1 else (batch, sum(sizes))
        if tuple(x.shape) != expected:
            raise ShapeError(
                f"the conditional of block {block} draws shape {tuple(x.shape)} instead of {expected}; its first "
                "dimension must be the batch dimension of the other sites' values"
            )
        if len(sites) == 1:
            return {sites[0].name: x}
        parts = x.split(sizes, 1)
        return {site.name: part.reshape(batch, *site.shape) for site, part in zip(sites, parts, strict=True)}

    def join(self, index: int, values: Values, batch: int) -> Tensor:
        """Invert :meth:`split`; values of one point are expanded to the batch."""
        block = self.blocks[index]
        sites = [self._sites[name] for name in block.sites]
        if len(sites) == 1:
            return values[sites[0].name].expand(batch, *sites[0].shape)
        return torch.cat([values[s.name].expand(batch, *s.shape).reshape(batch, -1) for s in sites], 1)

    def _distribution(self, index: int, values: Values) -> tuple[Any, int]:
        """Return a block's conditional and the batch size."""
        block = self.blocks[index]
        batch = max(len(value) for value in values.values())
        fn = block.given(values)
        if not (hasattr(fn, "log_prob") and hasattr(fn, "sample") and hasattr(fn, "expand")):
            raise ModelError(f"the conditional of block {block} must return a distribution, not {type(fn).__name__}")
        if len(block.sites) == len(self._sites):
            # No other sites: one distribution for the whole batch.
            fn = fn.expand(torch.Size((batch, *fn.batch_shape)))
        return fn, batch


def log_volume(target: Target, u: Tensor) -> Tensor:
    """Return the log Jacobian determinant of the map to the free coordinates of sites, ``(m, d) -> (m,)``."""
    # A density of the values times this Jacobian is a density of the unconstrained vector.
    with torch.enable_grad():
        u = u.detach().clone().requires_grad_(True)
        values = target.constrain(u)
        free = torch.cat([_free_coordinates(site, values[site.name]) for site in target.sites], 1)
        rows = [torch.autograd.grad(free[:, j].sum(), u, retain_graph=True)[0] for j in range(free.shape[1])]
    return torch.linalg.slogdet(torch.stack(rows, 1)).logabsdet.detach()


def _free_coordinates(site: Site, value: Tensor) -> Tensor:
    """Return the coordinates over which the density of a site is defined, ``(m, k)``."""
    shape, free = site.shape, site.unconstrained_shape
    if shape.numel() == free.numel():
        return value.reshape(len(value), -1)
    if len(shape) and tuple(free) == (*shape[:-1], shape[-1] - 1):
        return value[..., :-1].reshape(len(value), -1)  # a simplex: the last entry follows from the others
    raise ModelError(
        f"site {site.name!r} has values of shape {tuple(shape)} with {free.numel()} free coordinates, and the "
        "coordinates of its density are unknown; use a real, positive or simplex-valued site instead"
    )


def check_conditionals(blocks: Blocks, values: Values) -> None:
    """Raise ModelError unless, redrawn from ``{site: (m, *shape)}``, conditionals and target change alike."""
    target = blocks.target
    for index, block in enumerate(blocks.blocks):
        offsets = []
        for _ in range(2):
            values = blocks.draw(index, values)
            u = target.unconstrain(values)
            joint = target.log_density(u) - log_volume(target, u)
            offsets.append((blocks.log_prob(index, values) - joint, joint.abs()))
        (first, size), (second, other_size) = offsets
        worst = (first - second).abs() / (1 + torch.maximum(size, other_size))
        # NaN counts as disagreement.
        if not bool((worst <= _MAX_DISAGREEMENT[target.dtype]).all()):
            change = float((first - second).abs().nan_to_num(nan=torch.inf).max())
            raise ModelError(
                f"the conditional of block {block} is not that of this model: between two values of the block, with "
                f"all other sites fixed, its log density changes by up to {change:.3g} nats more or less than the "
                "model's; correct the conditional"
            )
