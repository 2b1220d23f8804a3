"""From a draft's `parents` to everything a pass needs to know about its shape: depth and ancestors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_specgen.draft import Draft


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
    def of(cls, draft: Draft) -> Tree:
        """Depth and ancestors without reading anything back from the device.

        The ancestor relation is the closure of "parent or self"; squaring it doubles the reach, so that
        ceil(log2(width)) small products suffice whatever the shape.
        """
        batch, nodes = draft.tokens.shape
        width = nodes + 1
        if draft.is_chain:
            device = draft.parents.device
            # A place without a node must not claim a position: beyond the model's last one there is nothing to look up.
            depth = torch.nn.functional.pad(draft.parents + 1, (1, 0))
            return cls(depth, torch.ones(width, width, dtype=torch.bool, device=device).tril().expand(batch, -1, -1))
        reach = torch.eye(width, device=draft.parents.device).repeat(batch, 1, 1)
        if nodes:
            places = torch.arange(width, device=draft.parents.device)
            reach[:, 1:] += (draft.parents.unsqueeze(-1) == places).to(reach.dtype)
        span = 1
        while span < nodes:
            reach = (reach @ reach).clamp_(max=1)
            span *= 2
        ancestors = reach > 0
        return cls(ancestors.sum(-1) - 1, ancestors)
