"""Losses over more places than there is memory for the logits of: chunk by chunk, computed again for the gradient."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits that are held at once, 256 MB in float32.
HELD = 2**26


def in_chunks(part: Callable[[slice], tuple[Tensor, Tensor]], places: int, logits: int) -> tuple[Tensor, Tensor]:
    """A loss and a number of hits, summed up over chunks of places.

    Args:
        part: both of some of the places.
        places: how many there are.
        logits: of each.
    """
    size = max(1, HELD // logits)
    if places <= size:
        return part(slice(0, places))
    chunks = [slice(start, start + size) for start in range(0, places, size)]
    losses, hits = zip(*(checkpoint(part, chunk, use_reentrant=False) for chunk in chunks), strict=True)
    return torch.stack(losses).sum(), torch.stack(hits).sum()
