"""Random numbers of the host on another device, so that both compute the same from the same seed."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

HOST = torch.device("cpu")


class HostStreams(TorchDispatchMode):
    """Draw on the host what is drawn on a device, and move it there.

    Each generator of the device is replaced by one of the host with the same seed, and the global stream by the host's.
    """

    def __init__(self) -> None:
        super().__init__()
        self._pairs: dict[int, tuple[torch.Generator, torch.Generator]] = {}  # by address

    def of(self, generator: torch.Generator) -> torch.Generator:
        """Return the generator of the host that stands for one of the device."""
        if generator.device == HOST:
            return generator
        kept = self._pairs.get(generator._cdata)
        if kept is None or kept[1].initial_seed() != generator.initial_seed():
            kept = generator, torch.Generator().manual_seed(generator.initial_seed())
            self._pairs[generator._cdata] = kept
        return kept[1]

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        given = tree_leaves((args, kwargs))
        places = [x if isinstance(x, torch.device) else getattr(x, "device", HOST) for x in given]
        place = next((x for x in places if x != HOST), HOST)
        if place == HOST:
            return function(*args, **kwargs)

        def lent(x: Any) -> Any:
            if isinstance(x, torch.Generator):
                return self.of(x)
            if isinstance(x, torch.device):
                return HOST
            return x.to(HOST) if isinstance(x, torch.Tensor) else x

        drawn = function(*tree_map(lent, args), **tree_map(lent, kwargs))
        written = [x for x in function._schema.arguments if x.alias_info is not None and x.alias_info.is_write]
        if written:
            target = kwargs.get(written[0].name, args[0] if args else None)
            return target.copy_(drawn)
        return tree_map(lambda x: x.to(place) if isinstance(x, torch.Tensor) else x, drawn)
