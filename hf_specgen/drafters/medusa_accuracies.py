"""How often Medusa's heads are right, counted on texts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.drafters.fitting import lent
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.said import spread
from hf_specgen.prompt import input_device
from hf_specgen.vocabulary import size


@torch.no_grad()
def measure_accuracies(
    target: PreTrainedModel,
    heads: MedusaHeads,
    input_ids: Iterable[Sequence[int] | Tensor],
    top_k: int = 10,
    prompt_lengths: Iterable[int] | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[list[float]]:
    """How often each head's best, second best, ... guess is the token that comes.

    Measure on texts as the target itself writes them, not the ones the heads were trained on. Kept in
    `heads.config.accuracies`, the result decides how trees are built.

    Args:
        target: the model the heads are for.
        heads: the heads.
        input_ids: texts, each as ids without padding. One pass of the target each.
        top_k: ranks that are counted.
        prompt_lengths: for each text how many ids at its beginning are not counted, as the target did not write them.
        progress: called behind every text with the number of texts done.

    Returns:
        `[head][rank]`, each between 0 and 1; 0 where no text was long enough.
    """
    top_k, count = min(top_k, heads.known_ids or top_k), heads.config.num_heads
    hits, seen = torch.zeros(count, top_k, dtype=torch.long), [0] * count
    lengths = None if prompt_lengths is None else iter(prompt_lengths)
    for done, text in enumerate(input_ids, 1):
        ids = torch.as_tensor(text).view(1, -1)
        prompt = 0 if lengths is None else next(lengths)
        logits = _guesses(target, heads, ids)
        best = logits.topk(min(top_k, logits.shape[-1])).indices.cpu()  # (length, heads, k)
        for head in range(count):
            start = max(0, prompt - head - 2)
            came = ids[0, start + head + 2 :].cpu()
            right = best[start : start + len(came), head] == came.unsqueeze(1)
            hits[head, : right.shape[1]] += right.sum(0)
            seen[head] += len(came)
        if progress is not None:
            progress(done)
    return [[int(hit) / max(1, total) for hit in row] for row, total in zip(hits, seen, strict=True)]


def _guesses(target: PreTrainedModel, heads: MedusaHeads, ids: Tensor) -> Tensor:
    """`(length, heads, vocab)`: what the heads make of each state of a text."""
    kwargs: dict[str, Any] = {"output_hidden_states": True, "use_cache": False}
    if "logits_to_keep" in inspect.signature(target.forward).parameters:
        kwargs["logits_to_keep"] = 1
    states = target(ids.to(input_device(target)), **kwargs).hidden_states[-1][0]
    said = heads(states, lent(target, "LM head") if heads.borrows else None)
    return spread(said, heads.to_target, size(target))
