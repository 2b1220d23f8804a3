"""Trees of tokens: from `parents` to all that a pass needs to know of a shape, and how a tree grows and is pruned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """The shape of a draft with its root, `width = nodes + 1` places a row.

    Attributes:
        depth: `(batch, width)` int64 steps from the root. The root and places without a node have 0.
    """

    depth: Tensor
    _ancestors: Tensor | None = None

    @cached_property
    def ancestors(self) -> Tensor:
        """`(batch, width, width)` bool; `[b, i, j]` says that j lies on the path from the root to i, i itself included.

        For a place without a node it means nothing, but it has itself.
        """
        if self._ancestors is not None:
            return self._ancestors
        batch, width = self.depth.shape
        return torch.ones(width, width, dtype=torch.bool, device=self.depth.device).tril().expand(batch, -1, -1)

    @classmethod
    def of(cls, parents: Tensor) -> Tree:
        """Depth and ancestors of any tree, without reading anything back from the device.

        The ancestor relation is the closure of "parent or self"; squaring it doubles the reach, so that
        ceil(log2(width)) small products suffice whatever the shape.

        Args:
            parents: `(batch, nodes)`, see `Draft`.
        """
        batch, nodes = parents.shape
        width, device = nodes + 1, parents.device
        reach = torch.eye(width, device=device).repeat(batch, 1, 1)
        places = torch.arange(width, device=device)
        reach[:, 1:] += (parents.unsqueeze(-1) == places).to(reach.dtype)
        span = 1
        while span < nodes:
            reach = (reach @ reach).clamp_(max=1)
            span *= 2
        ancestors = reach > 0
        return cls(ancestors.sum(-1) - 1, ancestors)

    @classmethod
    def of_chain(cls, parents: Tensor) -> Tree:
        """The same for chains, at less cost: most passes over one need its depth only.

        Args:
            parents: `(batch, nodes)`: 0, 1, 2, ..., and -1 from a row's end on.
        """
        # A place without a node must not claim a position: beyond the model's last one there is nothing to look up.
        return cls(torch.nn.functional.pad(parents + 1, (1, 0)))


@dataclass(frozen=True)
class Nodes:
    """Some nodes of a growing tree, for each row.

    Attributes:
        tokens: `(batch, nodes)` ids, parents before children.
        parents: `(batch, nodes)` as in `Draft`: 0 is the root, i + 1 is node i, -1 is a place without a node.
        chances: `(batch, nodes)` the chance of each node given its parent.
    """

    tokens: Tensor
    parents: Tensor
    chances: Tensor


class Growth:
    """Grows a tree a row, level by level, on the device and without reading from it (EAGLE-2, arXiv 2406.16858).

    Every node of the last level's beam proposes its likeliest children; of all of these the likeliest, by the product
    of chances from the root, are the beam of the next level. `beam` is the tree of nodes that have been in a beam, so
    of those that a drafter has to run on; `best` is the part of all nodes proposed that is worth checking.

    Args:
        depth: for each row how deep it may grow; 0 for none at all.
        branches: children a node proposes.
        width: nodes a beam.
        device: where the chances will be.
        agree: of ranks, whose chances may differ in the last bit, makes one choice.
    """

    def __init__(
        self,
        depth: Sequence[int],
        branches: int,
        width: int,
        device: torch.device | str,
        agree: Callable[[Tensor], Tensor] = lambda choice: choice,
    ) -> None:
        self.branches = branches
        self.width = width
        self._agree = agree
        self._level = 0
        self._deepest = torch.tensor(depth, device=device).unsqueeze(1)
        none = torch.empty((len(depth), 0), dtype=torch.long, device=device)
        # Of all nodes proposed, and of the beams: their parents counted among the nodes of the same tree.
        self._tokens = self._parents = none
        self._logs = self._sums = none.float()
        self.beam = Nodes(none, none, none.float())
        # Where the nodes of the last beam are, in the tree of all nodes and in that of the beams; at first the root.
        self._place = self._beam_place = none.new_zeros((len(depth), 1))
        self._sum = torch.zeros((len(depth), 1), device=device)

    def add(self, log_chances: Tensor) -> Tensor:
        """Grows one level.

        Args:
            log_chances: `(batch, beam, vocab)` log probabilities of what follows each node of the last beam, at first
                `(batch, 1, vocab)` of what follows the root.

        Returns:
            `(batch, new beam)` for each node of the new beam the place of its parent in the last one.
        """
        self._level += 1
        best = log_chances.float().topk(min(self.branches, log_chances.shape[-1]))
        children = best.indices.shape[-1]
        batch, proposed = log_chances.shape[0], self._tokens.shape[1]
        # Rounding may leave a logarithm just above 0, and a node is never likelier than its parent.
        logs = best.values.flatten(1).nan_to_num(nan=-torch.inf, neginf=-torch.inf).clamp(max=0.0)
        logs = logs.where(self._level <= self._deepest, -torch.inf)
        above = torch.arange(log_chances.shape[1], device=logs.device).repeat_interleave(children).expand(batch, -1)
        tokens, sums = self._agree(best.indices.flatten(1)), self._sum.gather(1, above) + logs
        self._tokens = torch.cat([self._tokens, tokens], dim=1)
        self._parents = torch.cat([self._parents, self._place.gather(1, above)], dim=1)
        self._logs = torch.cat([self._logs, logs], dim=1)
        self._sums = torch.cat([self._sums, sums], dim=1)
        chosen = self._agree(sums.topk(min(self.width, sums.shape[1])).indices)
        self._sum = sums.gather(1, chosen)
        if sums.device.type == "cpu":  # elsewhere it is not worth a read to leave out places without a node
            living = max(1, int((self._sum > -torch.inf).sum(1).max()))
            chosen, self._sum = chosen[:, :living], self._sum[:, :living]
        parents = self._beam_place.gather(1, above.gather(1, chosen)).where(self._sum > -torch.inf, -1)
        beam = self.beam
        self._place = proposed + 1 + chosen
        self._beam_place = (
            beam.tokens.shape[1] + 1 + torch.arange(chosen.shape[1], device=logs.device).expand(batch, -1)
        )
        self.beam = Nodes(
            torch.cat([beam.tokens, tokens.gather(1, chosen)], dim=1),
            torch.cat([beam.parents, parents], dim=1),
            torch.cat([beam.chances, logs.gather(1, chosen).exp()], dim=1),
        )
        return above.gather(1, chosen)

    def best(self, most: int) -> Nodes:
        """The likeliest of all nodes proposed, which are a tree: no node is likelier than its parent.

        Args:
            most: nodes a row.
        """
        # Stable, so that of a parent and a child that is certain the parent comes first.
        likeliest = self._sums.sort(dim=1, descending=True, stable=True).indices[:, :most]
        kept = self._agree(likeliest.sort(dim=1).values)
        sums, above = self._sums.gather(1, kept), self._parents.gather(1, kept)
        place = self._parents.new_zeros((kept.shape[0], self._parents.shape[1] + 1))
        place.scatter_(1, kept + 1, torch.arange(1, kept.shape[1] + 1, device=kept.device).expand_as(kept))
        parents = place.gather(1, above.clamp(min=0)).where(sums > -torch.inf, -1)
        return Nodes(self._tokens.gather(1, kept), parents, self._logs.gather(1, kept).exp())
