"""A target of a few lines, and its passes over drafts: for drafters that learn from what the target says."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from hf_specgen.draft import Draft, Verified


@dataclass(frozen=True)
class Language:
    """What a target would say, a function of a text's last tokens.

    Attributes:
        vocab: ids.
        order: how many last tokens matter.
        surprise: how often another than the best id is chosen, as when sampling.
        seed: of the language.
    """

    vocab: int = 12
    order: int = 2
    surprise: float = 0.1
    seed: int = 0

    def best(self, text: Sequence[int], count: int) -> list[int]:
        """The ids likeliest to follow a text, best first."""
        return random.Random(f"{self.seed} {list(text[-self.order :])}").sample(range(self.vocab), count)

    def choice(self, text: Sequence[int]) -> int:
        """The id that is chosen to follow it."""
        chance = random.Random(f"{self.seed} {len(text)} {list(text[-self.order :])}")
        best, second = self.best(text, 2)
        return second if chance.random() < self.surprise else best


def verify(
    language: Language, rows: list[list[int]], draft: Draft, count: int, checked: Draft | None = None
) -> Verified:
    """A pass over a draft: appends to each row what was accepted and the token behind it.

    Args:
        language: the target.
        rows: for each row the ids decided so far; those of rows that have ended are empty lists.
        draft: as it was proposed.
        count: of the best ids that are wanted.
        checked: what of the draft is checked; all of it, unless said.
    """
    checked = draft if checked is None else checked
    tokens, parents = checked.tokens.tolist(), checked.parents.tolist()
    top: list[list[list[int]]] = []
    for row, ids in enumerate(rows):
        if not ids:
            tokens[row] = []
            top.append([])
            continue
        texts = [list(ids)]
        for token, parent in zip(tokens[row], parents[row], strict=True):
            texts.append([*texts[max(parent, 0)], token])
        top.append([language.best(text, count) for text in texts])
        at: int | None = 0
        while at is not None:
            chosen = language.choice(ids)
            ids.append(chosen)
            children = [i for i, parent in enumerate(parents[row], 1) if parent == at and tokens[row][i - 1] == chosen]
            at = children[0] if children else None
    return Verified(draft, tokens, parents, top)


def thinned(draft: Draft, keep: Callable[[], bool]) -> Draft:
    """What a controller might leave of a draft: nodes that were kept and whose parents were."""
    rows = []
    for tokens, parents in zip(draft.tokens.tolist(), draft.parents.tolist(), strict=True):
        moved, nodes = {0: 0}, []
        for place, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
            if parent in moved and keep():
                nodes.append((token, moved[parent], 0.0))
                moved[place] = len(nodes)
        rows.append(nodes)
    return replace(Draft.of_nodes(rows), confidence=None)


# A node on its path from the root, and the confidences along it.
Path = tuple[tuple[int, ...], tuple[float, ...]]


def nodes_of(draft: Draft, row: int = 0) -> list[Path]:
    """The nodes of a row in their order, each by its path."""
    assert draft.tokens.dtype == draft.parents.dtype == torch.long
    assert draft.confidence is not None or not draft.nodes
    confidence = [] if draft.confidence is None else draft.confidence[row].tolist()
    tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
    count = sum(parent >= 0 for parent in parents)
    assert parents[count:] == [-1] * (len(parents) - count), "padding stands at the end"
    paths: list[Path] = [((), ())]
    for place in range(count):
        assert parents[place] <= place, "a parent stands before its children"
        above = paths[parents[place]]
        paths.append(((*above[0], tokens[place]), (*above[1], confidence[place])))
    assert len({path for path, _ in paths}) == len(paths), "siblings carry different tokens"
    return paths[1:]


def sums_of_siblings(nodes: Sequence[Path]) -> list[float]:
    """For each node with children the sum of their confidences."""
    sums: dict[tuple[int, ...], float] = {}
    for path, confidences in nodes:
        sums[path[:-1]] = sums.get(path[:-1], 0.0) + confidences[-1]
    return list(sums.values())
