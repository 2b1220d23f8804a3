"""Training-time test of EAGLE-3 (arXiv 2503.01840): drafts of several tokens from all places of a text at once.

Entry i of a text is made from the embedding of token i + 1 and a feature of token i. In step 0 the features are the
target's, as those of decided tokens are in drafting. In step j entry i stands for a node j deep: its feature is what
step j - 1 made at entry i - 1. It attends, as that node does in drafting, to the entries up to i - j of step 0, which
are the decided tokens', and to its ancestors, entry i - 1 of step j - 1 down to entry i - j + 1 of step 1, and itself.

The head itself runs every step, over the keys and values of all steps side by side, under a mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import DynamicCache

from hf_specgen.heads.eagle import EagleHead

# Keys and values of each layer.
Held = list[tuple[Tensor, Tensor]]
# Embeddings, features, position ids and mask, as the head takes them.
Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None]


class Step(NamedTuple):
    """What a step made of the entries it ran over.

    Attributes:
        hidden: `(batch, width, hidden)`, for the LM head.
        features: `(batch, width, hidden)`, see `EagleOutput`.
        entries: `(batch, width)` which entry of its row each column is.
        drafted: `(batch, width)` whether it and all of its ancestors are among those that were asked for; the other
            columns hold nothing that means anything.
    """

    hidden: Tensor
    features: Tensor
    entries: Tensor
    drafted: Tensor


def unroll(
    head: EagleHead,
    embeds: Tensor,
    features: Tensor,
    drafted: Tensor,
    steps: int,
    checkpointing: bool = False,
) -> list[Step]:
    """Runs the head for several steps, each under its own predictions.

    Args:
        head: to be trained.
        embeds: `(batch, entries, hidden)` of the tokens behind each place. Rows are padded on the right.
        features: `(batch, entries, hidden)` from `EagleHead.fuse`.
        drafted: `(batch, entries)` bool, those that are ever nodes of a draft. Step 0 runs over all entries, for their
            keys and values; later ones only over these.
        steps: how many, step 0 counted.
        checkpointing: keep no step's activations for the backward pass, but compute them again.
    """
    places = torch.arange(embeds.shape[1], device=embeds.device).expand_as(drafted)
    made, held = _pass(head, (embeds, features, places, None), [], checkpointing)
    results = [Step(*made, places, drafted)]
    if steps == 1:
        return results
    entries, real = _first(drafted)
    embeds, features = _at(entries, embeds), _at(entries, made[1])
    # A node's parent is in the column before, or nowhere.
    follows = real & (entries == entries.roll(1, dims=1) + 1)
    follows[:, 0] = False
    valid = real
    for step in range(1, steps):
        valid = follows & valid.roll(1, dims=1)
        mask = _mask(entries, places.shape[1], step, head.config.sliding_window).to(embeds.device)
        made, held = _pass(head, (embeds, features.roll(1, dims=1), entries, mask), held, checkpointing)
        features = made[1]
        results.append(Step(*made, entries, valid))
    return results


def _pass(head: EagleHead, inputs: Inputs, held: Held, checkpointing: bool) -> tuple[tuple[Tensor, Tensor], Held]:
    """One step; returns hidden states and features, and the keys and values with those of this step behind."""

    def run(inputs: Inputs, held: Held) -> tuple[tuple[Tensor, Tensor], Held]:
        cache = DynamicCache()
        for layer, (keys, values) in enumerate(held):
            cache.update(keys, values, layer)
        hidden, features = head(*inputs, cache=cache)
        layers: list[Any] = cache.layers
        return (hidden, features), [(layer.keys, layer.values) for layer in layers]

    if checkpointing and torch.is_grad_enabled():
        again: Any = checkpoint(run, inputs, held, use_reentrant=False)
        return again  # type: ignore[no-any-return]
    return run(inputs, held)


def _first(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """`(batch, width)` the chosen places of each row in ascending order, and which of the columns are such."""
    count = chosen.sum(1)
    width = max(1, int(count.max()))
    places = chosen.logical_not().to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    return places, torch.arange(width, device=chosen.device) < count.unsqueeze(1)


def _at(entries: Tensor, values: Tensor) -> Tensor:
    return values.take_along_dim(entries.unsqueeze(-1), dim=1)


def _mask(entries: Tensor, length: int, step: int, window: int | None) -> Tensor:
    """`(batch, 1, width, length + step * width)` bool: what the entries of a step see of step 0 and of those since."""
    width = entries.shape[1]
    behind = entries.unsqueeze(-1) - torch.arange(length, device=entries.device)
    decided = behind >= step
    if window is not None:
        decided &= behind < window
    column = torch.arange(width, device=entries.device)
    back = column.unsqueeze(1) - column
    ancestors = torch.cat([back == step - earlier for earlier in range(1, step + 1)], dim=1)
    return torch.cat([decided, ancestors.expand(len(entries), -1, -1)], dim=-1).unsqueeze(1)
