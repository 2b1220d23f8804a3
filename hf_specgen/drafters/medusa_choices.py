"""Trees of ranks for Medusa: which guess of each head is combined with which of the heads before.

A node is the path of ranks that leads to it: `(0,)` is the best guess of the first head, `(0, 2)` the third best of the
second head behind it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Path = tuple[int, ...]


def closed(choices: Iterable[Sequence[int]]) -> tuple[Path, ...]:
    """The paths in their order, each behind the paths that lead to it, which are added where they are missing.

    Raises:
        ValueError: there is none, or one is no sequence of ranks.
    """
    found: dict[Path, None] = {}
    for choice in choices:
        path = () if isinstance(choice, str | int) else tuple(choice)
        if not path or any(type(rank) is not int or rank < 0 for rank in path):
            raise ValueError(f"a choice is a path of ranks from 0 on, such as (0, 2), not {choice!r}")
        for end in range(1, len(path) + 1):
            found.setdefault(path[:end])
    if not found:
        raise ValueError("choices holds no path; leave it out for a tree that grows with the text")
    return tuple(found)


def choices_from(accuracies: Sequence[Sequence[float]], nodes: int) -> tuple[Path, ...]:
    """The tree of so many nodes in which most tokens are accepted, if heads are right independently of one another.

    A node is accepted as often as all ranks of its path are right, so that the best tree is that of the largest
    products (arXiv 2401.10774, section 2.3.3).

    Args:
        accuracies: for each head how often its best, second best, ... guess is right; see `measure_accuracies`.
        nodes: how many; nodes that are never right are left out.

    Returns:
        Paths of ranks, the likeliest first.
    """
    # Ranks of a head by how often they are right: by chance a lower one may have been right more often.
    ordered = [sorted(range(len(head)), key=lambda rank, head=head: -head[rank]) for head in accuracies]  # type: ignore[misc]
    chosen: list[Path] = []
    # Chance (negative), the path as places in `ordered`, chance of its parent.
    waiting: list[tuple[float, Path, float]] = []

    def offer(places: Path, parent: float) -> None:
        depth = len(places) - 1
        if depth < len(ordered) and places[-1] < len(ordered[depth]):
            chance = parent * accuracies[depth][ordered[depth][places[-1]]]
            if chance > 0:
                heapq.heappush(waiting, (-chance, places, parent))

    offer((0,), 1.0)
    while waiting and len(chosen) < nodes:
        negative, places, parent = heapq.heappop(waiting)
        chosen.append(tuple(ordered[depth][place] for depth, place in enumerate(places)))
        offer((*places[:-1], places[-1] + 1), parent)
        offer((*places, 0), -negative)
    return tuple(chosen)


@dataclass(frozen=True)
class Shape:
    """A fixed tree, nodes in an order in which parents come first.

    Attributes:
        paths: of ranks, one a node.
        parents: `(nodes,)` as in `Draft`.
        depth: `(nodes,)`, 1 for children of the root.
        ranks: `(nodes,)` the last rank of each path.
        measured: `(nodes,)` how often these ranks are right; None where that was not measured for all of them.
    """

    paths: tuple[Path, ...]
    parents: Tensor
    depth: Tensor
    ranks: Tensor
    measured: Tensor | None

    @classmethod
    def of(cls, paths: tuple[Path, ...], accuracies: list[list[float]] | None, device: torch.device) -> Shape:
        """The shape of closed paths."""
        places = {(): 0, **{path: place for place, path in enumerate(paths, 1)}}
        columns = [(places[path[:-1]], len(path), path[-1]) for path in paths]
        parents, depth, ranks = torch.tensor(columns, device=device).view(-1, 3).unbind(1)
        measured = None
        if accuracies is not None and all(
            deep <= len(accuracies) and rank < len(accuracies[deep - 1]) for _, deep, rank in columns
        ):
            measured = torch.tensor([float(accuracies[deep - 1][rank]) for _, deep, rank in columns], device=device)
        return cls(paths, parents, depth, ranks, measured)

    @property
    def branches(self) -> int:
        """The most ranks that a node's children take."""
        return 1 + max(path[-1] for path in self.paths)
