"""What a target thinks of finished texts: its states at every token, and its likeliest tokens after each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from texts.decoding import Text, chosen

# Tokens of a pass, padding included.
TOKENS = 2048


@torch.no_grad()
def record(model: PreTrainedModel, texts: Sequence[Text], layers: Sequence[int], count: int) -> list[dict[str, Any]]:
    """Passes over texts, those of a length together.

    Args:
        model: the target.
        texts: finished; those that bring their states keep them.
        layers: `hidden_states` indices.
        count: likeliest tokens; 0 for none.

    Returns:
        For each text `hidden_states` float16, `top_ids` int32 and `top_logprobs` float32 as numpy arrays
        `(tokens, ...)`, as far as they are asked for.

    Raises:
        ValueError: states do not fit into float16.
    """
    wanted = () if all(text.states for text in texts) else layers
    rows: list[dict[str, Any]] = [{} for _ in texts]
    for batch in _batches(texts) if wanted or count else ():
        width = max(len(texts[at].ids) for at in batch)
        ids = torch.tensor([texts[at].ids + [0] * (width - len(texts[at].ids)) for at in batch])
        there = torch.tensor([[1] * len(texts[at].ids) + [0] * (width - len(texts[at].ids)) for at in batch])
        output: Any = model(
            input_ids=ids.to(model.device),
            attention_mask=there.to(model.device),
            use_cache=False,
            output_hidden_states=bool(wanted),
            logits_to_keep=0 if count else 1,
        )
        if wanted:
            for at, states in zip(batch, chosen(output.hidden_states, wanted), strict=True):
                rows[at]["hidden_states"] = states[: len(texts[at].ids)].numpy()
        if count:
            for at, logits in zip(batch, output.logits, strict=True):
                best, top = _likeliest(logits[: len(texts[at].ids)], count)
                rows[at].update(top_ids=top.int().cpu().numpy(), top_logprobs=best.cpu().numpy())
    for row, text in zip(rows, texts, strict=True):
        if not wanted and text.states:
            row["hidden_states"] = torch.cat(text.states).numpy()
    return rows


def _likeliest(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids, `(tokens, count)`: of all the vocabulary, not of the few."""
    best, ids = logits.float().topk(count)
    return best - logits.float().logsumexp(-1, keepdim=True), ids


def _batches(texts: Sequence[Text]) -> Iterator[list[int]]:
    """Places of texts of about one length, as many as fit into a pass."""
    batch: list[int] = []
    for at in sorted(range(len(texts)), key=lambda at: len(texts[at].ids)):
        if batch and (len(batch) + 1) * len(texts[at].ids) > TOKENS:
            yield batch
            batch = []
        batch.append(at)
    if batch:
        yield batch
