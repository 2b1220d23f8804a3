"""From a draft's `parents` to everything a pass needs to know about its shape: depth and ancestors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tree:
    """The shape of a draft with its root, `width = nodes + 1` places a row.

    Attributes:
        depth: `(batch, width)` int64 steps from the root. The root and places without a node have 0.
        ancestors: `(batch, width, width)` bool; `[b, i, j]` says that j lies on the path from the root to i, i itself
            included. For a place without a node it means nothing, but it has itself.
    """

    depth: Tensor
    ancestors: Tensor

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
        """The same for chains, at less cost.

        Args:
            parents: `(batch, nodes)`: 0, 1, 2, ..., and -1 from a row's end on.
        """
        batch, nodes = parents.shape
        # A place without a node must not claim a position: beyond the model's last one there is nothing to look up.
        depth = torch.nn.functional.pad(parents + 1, (1, 0))
        before = torch.ones(nodes + 1, nodes + 1, dtype=torch.bool, device=parents.device).tril()
        return cls(depth, before.expand(batch, -1, -1))
