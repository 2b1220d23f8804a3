"""What a head can say: ids of its own for some of the target's, and an LM head that begins as the target's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def spread(logits: Tensor, ids: Tensor | None, vocabulary: int) -> Tensor:
    """Logits over the target's ids: -inf for those that the head does not know.

    Args:
        logits: `(..., known ids)` as an LM head says them.
        ids: `(known ids,)` the target's id for each; None where they are the same.
        vocabulary: how many ids the target has.
    """
    if ids is None:
        return logits
    whole = logits.new_full((*logits.shape[:-1], vocabulary), -torch.inf)
    return whole.index_copy_(-1, ids, logits)


def fault_of(ids: Tensor, vocabulary: int) -> str | None:
    """What is wrong with a map to the target's ids, if anything is."""
    if ids.numel() == 0:
        return "is empty"
    least, most = int(ids.min()), int(ids.max())
    if not 0 <= least <= most < vocabulary:
        return f"leads to ids from {least} to {most}, and the target has {vocabulary}"
    reached = torch.zeros(vocabulary, dtype=torch.bool, device=ids.device)
    reached[ids] = True
    return "leads to an id more than once" if int(reached.sum()) < len(ids) else None


def checked_map(ids: Sequence[int] | Tensor, vocabulary: int) -> list[int]:
    """The ids that a new head is to say, which must be the target's in ascending order.

    Raises:
        ValueError: they are not.
    """
    listed = torch.as_tensor(ids).tolist()
    fault = fault_of(torch.tensor(listed), vocabulary)
    if fault is None and listed != sorted(listed):
        fault = "is not in ascending order"
    if fault:
        raise ValueError(f"token_map {fault}: it must hold ids of the target's, ascending, each once")
    return listed


def lm_head_of(target: PreTrainedModel) -> nn.Module:
    """A target's LM head.

    Raises:
        ValueError: it has none.
    """
    module: nn.Module | None = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    if module is None:
        raise ValueError(f"{type(target).__name__} has no LM head")
    return module


@torch.no_grad()
def copy_lm_head(theirs: nn.Module, ours: nn.Module, ids: Sequence[int] | None = None) -> None:
    """Copies a target's LM head, whole or the rows of `ids`. On the meta device there is nothing to copy.

    Raises:
        ValueError: its weights are not whole, or quantized.
    """
    for name, parameter in ours.named_parameters():
        held = getattr(theirs, name, None)
        told = f"a {type(theirs).__name__}"  # quantized modules may have a method of that name
        if isinstance(held, Tensor):
            told = f"{tuple(held.shape)} of {held.dtype}"
            if held.is_floating_point() and held.element_size() > 1:
                if ids is not None:
                    held = held[list(ids)] if max(ids) < len(held) else held[:0]
                if held.shape == parameter.shape:
                    parameter.copy_(held)
                    continue
        raise ValueError(
            f"the target's LM head is {told} and not {tuple(parameter.shape)} of floats: gather sharded weights and "
            "undo quantization first, or leave the LM head with the target (lm_heads='target' of Medusa, "
            "token_map=None of EAGLE)"
        )
