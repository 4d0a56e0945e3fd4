"""Nodes with too many children, resolved at random."""

from __future__ import annotations

import torch


def resolve_at_random(
    children: list[list[int]], lengths: list[float | None], length: float | None, generator: torch.Generator
) -> None:
    """Resolve, in place, all nodes that join too many subtrees; every way is equally likely.

    Parameters
    ----------
    children : list of list of int
        Children of each node; node 0 is the root, which may have three. New nodes are appended.
    lengths : list of float or None
        Length of the edge above each node.
    length : float or None
        That of the new edges.
    generator : torch.Generator
        Source of randomness.

    Examples
    --------
    >>> children, lengths = [[1, 2, 3, 4], [], [], [], []], [None] * 5
    >>> resolve_at_random(children, lengths, None, torch.Generator().manual_seed(0))
    >>> len(children[0]), sorted(len(below) for below in children)
    (3, [0, 0, 0, 0, 0, 2, 3])
    """
    for node in range(len(children)):
        # At an unrooted root three edges meet, one of them as good as from above.
        kept = 1 if node == 0 and len(children[node]) > 2 else 0
        if len(children[node]) - kept > 2:
            top = _join(children[node][kept:], children, lengths, length, generator)
            # The topmost of the new nodes is the node itself.
            children[node] = [*children[node][:kept], *children[top]]
            children[top] = []


def _join(
    parts: list[int],
    children: list[list[int]],
    lengths: list[float | None],
    length: float | None,
    generator: torch.Generator,
) -> int:
    """Join nodes two at a time and return the topmost of the new ones."""
    nodes = [parts[0]]
    parents: dict[int, int] = {}
    for part in parts[1:]:
        # Grafted onto the edge above any node so far.
        target = nodes[int(torch.randint(len(nodes), (), generator=generator))]
        joint = len(children)
        children.append([target, part])
        lengths.append(length)
        if target in parents:
            above = children[parents[target]]
            above[above.index(target)] = joint
            parents[joint] = parents[target]
        parents[target] = parents[part] = joint
        nodes += [joint, part]
    return next(node for node in nodes if node not in parents)
