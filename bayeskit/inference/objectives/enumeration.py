"""Sites that are summed out: of the model by log-sum-exp, of the guide by expectation."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from pyro.poutine.runtime import _ENUM_ALLOCATOR
from torch import Tensor

from bayeskit._enumeration import Factor, align, pack, sum_product
from bayeskit.errors import GuideError
from bayeskit.inference.objectives.layout import Layout, masked
from bayeskit.inference.objectives.sites import Site


@dataclass(frozen=True)
class Enumerated:
    """The enumerated sites of one run.

    Attributes
    ----------
    variables : dict
        Names of the sites by the number Pyro gave them.
    dims : dict
        That number by the dimension it takes, where no Markov chain says otherwise.
    in_guide : bool
        Whether these are sites of the guide.
    """

    variables: dict[int, str]
    dims: dict[int, int]
    in_guide: bool

    @classmethod
    def of(cls, model: Mapping[str, Site], guide: Mapping[str, Site]) -> Enumerated | None:
        """Find them; None where nothing is enumerated.

        Raises
        ------
        GuideError
            If some belong to the guide and others to the model alone.
        """
        found: dict[bool, dict[int, str]] = {True: {}, False: {}}
        for name, site in {**model, **guide}.items():
            dim = site["infer"].get("_enumerate_dim")
            if dim is not None and not site["is_observed"]:
                found[name in guide][site["infer"]["_dim_to_id"][dim]] = name
        if found[True] and found[False]:
            ours, theirs = next(iter(found[True].values())), next(iter(found[False].values()))
            raise GuideError(
                f"site {ours!r} is enumerated in the guide and {theirs!r} in the model alone; either give both to the "
                "guide or neither"
            )
        in_guide = bool(found[True])
        variables = found[in_guide]
        return cls(variables, dict(_ENUM_ALLOCATOR.dim_to_id), in_guide) if variables else None

    def factor(self, site: Site, term: Tensor, layout: Layout, *, bare: bool = False) -> Factor:
        """Label the dimensions of a term of a site, masked and without the scale of the data's plates.

        A mask around a site that is summed out of the model is padding, whose prior integrates to one.
        """
        scale = 1.0 if bare else site["scale"] / layout.scale
        if isinstance(scale, Tensor) or abs(scale - 1) > 1e-12:
            if term.dim() > layout.nesting + 1 and not self.in_guide:
                raise GuideError(
                    f"site {site['name']!r} depends on enumerated sites and is scaled or subsampled; only the plates "
                    "that hold all sites may be subsampled then"
                )
            term = term * scale
        plates = {f.dim: (f.name, f.size) for f in site["cond_indep_stack"] if f.vectorized}
        dims = {**self.dims, **site["infer"].get("_dim_to_id", {})}
        summed_out = not self.in_guide and "_enumerate_dim" in site["infer"] and not site["is_observed"]
        term = term if bare or summed_out else masked(site, term)
        return pack(site["name"], term, plates, dims, -layout.nesting - 2)

    def home(self, sites: Mapping[str, Site]) -> dict[int, frozenset[str]]:
        """Return the plates of each variable."""
        return {
            number: frozenset(f.name for f in sites[name]["cond_indep_stack"] if f.vectorized)
            for number, name in self.variables.items()
        }

    def summed(self, factors: dict[str, Factor], sites: Mapping[str, Site], layout: Layout) -> Tensor:
        """Sum the model's sites out of the product of ``factors``: ``(K, *batch)``."""
        keep = layout.labels
        total = sum_product(list(factors.values()), self.home(sites), self.variables, keep)
        return layout.shaped(total)

    def expected(self, cost: Factor, own: Mapping[int, Factor], layout: Layout) -> Tensor:
        """Return the expectation of a term over the guide's enumerated sites that it depends on, ``(K, *batch)``.

        Parameters
        ----------
        cost : Factor
        own : mapping
            The weight of each point of an enumerated site of the guide, such as its probability.
        layout : Layout

        Raises
        ------
        GuideError
            If the term lies outside a plate of such a site.
        """
        needed: set[int] = set()
        reached = set(cost.variables)
        while reached - needed:
            number = (reached - needed).pop()
            needed.add(number)
            reached |= own[number].variables
        for number in needed:
            if not own[number].plates <= cost.plates:
                raise GuideError(
                    f"the enumerated site {self.variables[number]!r} stands in a plate that a site depending on it "
                    "does not; draw it instead, or move that site into the plate"
                )
        labels = tuple(dict.fromkeys((*cost.labels, *(x for n in needed for x in own[n].labels))))
        value = align(cost, labels)
        if needed:
            weight = math.prod((align(own[n], labels) for n in needed), start=torch.ones(()))
            # Masked before the product: its derivative by a weight of zero would be infinite, and NaN further back.
            value = weight * torch.where((weight != 0) | value.isfinite(), value, value.new_zeros(()))
        return self.added_up(Factor(value, labels, cost.plates), layout)

    def added_up(self, term: Factor, layout: Layout) -> Tensor:
        """Sum a term over everything but particles and data: ``(K, *batch)``."""
        kept = layout.labels
        drop = [i for i, label in enumerate(term.labels) if label not in kept]
        value = term.tensor.sum(drop) if drop else term.tensor
        left = tuple(label for label in term.labels if label in kept)
        return layout.shaped(align(Factor(value, left, frozenset(kept)), kept))
