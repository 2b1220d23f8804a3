"""Trees of ranks for Medusa: which guess of each head is combined with which of the heads before.

A node is the path of ranks that leads to it: `(0,)` is the best guess of the first head, `(0, 2)` the third best of the
second head behind it.
"""

from __future__ import annotations

import heapq
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.prompt import input_device

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
    top_k, count = min(top_k, heads.guesses or top_k), heads.config.num_heads
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
    lm_head = target.get_output_embeddings()  # type: ignore[no-untyped-call]
    return heads.to_target(heads(states, lm_head))
