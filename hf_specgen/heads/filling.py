"""A head out of a checkpoint's weights: all that it has, and nothing beside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.heads.checkpoint import Checkpoint

Network = TypeVar("Network", bound=PreTrainedModel)


def filled(
    checkpoint: Checkpoint,
    make: Callable[[], Network],
    tensors: Mapping[str, Tensor],
    theirs: Callable[[str], str] = str,
    leftover: Iterable[str] = (),
) -> Network:
    """A head with these weights, in eval mode and in the dtype of its largest layers.

    Args:
        checkpoint: where they come from.
        make: makes the head without weights.
        tensors: the weights by the head's names.
        theirs: what the checkpoint calls a weight, whether it is there or not.
        leftover: what it holds beside them.

    Raises:
        ValueError: weights are missing or left over, or one has another shape.
    """
    with torch.device("meta"):
        head = make()
    wanted = head.state_dict()
    missing = [theirs(name) for name in wanted if name not in tensors]
    beside = [*(theirs(name) for name in tensors if name not in wanted), *leftover]
    if missing or beside:
        lacks = f"lacks {', '.join(missing)}" if missing else ""
        has = f"has {', '.join(beside)}, which nothing reads" if beside else ""
        raise ValueError(
            f"{checkpoint.where} is no whole {type(head).__name__}: it {' and '.join(filter(None, (lacks, has)))}"
        )
    for name, place in wanted.items():
        if tensors[name].shape != place.shape:
            raise ValueError(
                f"{checkpoint.where}: {theirs(name)} has shape {tuple(tensors[name].shape)}, and by its config it "
                f"should have {tuple(place.shape)}"
            )
    # Of a head in two dtypes that of its layers counts, not that of its norms, embeddings or LM head.
    inner = [tensor for name, tensor in tensors.items() if name.startswith(("layers.", "blocks."))]
    largest = max(inner or tensors.values(), key=lambda tensor: tensor.is_floating_point() * tensor.numel())
    kept = {name: held.to(largest.dtype) if held.is_floating_point() else held for name, held in tensors.items()}
    head.load_state_dict(kept, assign=True)
    head.train(False)
    return head
