"""Trees that grow: against the same thing in plain lists, and against all paths there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from hf_specgen.draft import Draft
from hf_specgen.trees import Growth

VOCAB = 7

Path = tuple[int, ...]


def said(path: Path, row: int, sharp: float = 1.0) -> Tensor:
    """`(vocab,)` log probabilities of what follows a path: any function of it will do."""
    generator = torch.Generator().manual_seed(hash((row, path)) % 2**31)
    return (sharp * torch.randn(VOCAB, generator=generator)).log_softmax(-1)


def paths_of(tokens: Sequence[int], parents: Sequence[int]) -> list[Path | None]:
    """Each node's path; None for a place without a node."""
    along: list[Path | None] = [()]
    for token, parent in zip(tokens, parents, strict=True):
        above = along[parent] if parent >= 0 else None
        along.append(None if above is None else (*above, token))
    return along[1:]


def grown(depth: Sequence[int], branches: int, width: int, sharp: float = 1.0) -> Growth:
    growth = Growth(depth, branches, width, "cpu")
    last = [[()] for _ in depth]
    for _ in range(max(depth)):
        growth.add(
            torch.stack([torch.stack([said(path or (), row, sharp) for path in beam]) for row, beam in enumerate(last)])
        )
        beams = zip(growth.beam.tokens.tolist(), growth.beam.parents.tolist(), strict=True)
        count = min(width, branches * len(last[0]))
        last = [paths_of(*beam)[-count:] for beam in beams]
    return growth


def in_lists(
    depth: int, branches: int, width: int, row: int, sharp: float = 1.0
) -> tuple[dict[Path, float], set[Path]]:
    """Every path proposed with its chance, and those that were in a beam: written the long way."""
    chances: dict[Path, float] = {}
    expanded: set[Path] = set()
    beam: list[tuple[float, Path]] = [(1.0, ())]
    for _ in range(depth):
        level: list[tuple[float, Path]] = []
        for chance, path in beam:
            odds = said(path, row, sharp).exp().tolist()
            first = sorted(range(VOCAB), key=odds.__getitem__, reverse=True)[:branches]
            level.extend((chance * odds[token], (*path, token)) for token in first)
        chances.update({path: chance for chance, path in level})
        beam = sorted(level, reverse=True)[:width]
        expanded.update(path for _, path in beam)
    return chances, expanded


def likeliest(chances: dict[Path, float], most: int) -> set[Path]:
    return set(sorted(chances, key=chances.__getitem__, reverse=True)[:most])


@pytest.mark.parametrize(("branches", "width"), [(1, 1), (2, 2), (3, 2), (2, 4), (4, 4)])
@pytest.mark.parametrize("most", [1, 5, 12, 100])
def test_a_tree_is_that_of_the_long_way(branches, width, most):
    depth = [4, 2, 0]
    growth = grown(depth, branches, width)
    best = growth.best(most)
    for row, deep in enumerate(depth):
        chances, expanded = in_lists(deep, branches, width, row)
        kept = paths_of(best.tokens[row].tolist(), best.parents[row].tolist())
        assert {path for path in kept if path is not None} == likeliest(chances, most)
        beam = paths_of(growth.beam.tokens[row].tolist(), growth.beam.parents[row].tolist())
        assert {path for path in beam if path is not None} == expanded
        for path, chance in zip(kept, best.chances[row].tolist(), strict=True):
            if path is not None:
                assert chance == pytest.approx(said(path[:-1], row)[path[-1]].exp().item(), rel=1e-5)


def test_a_tree_of_the_published_size_is_that_of_the_long_way(monkeypatch):
    """EAGLE-2's own: 60 nodes, 7 deep, 10 children a node, 10 nodes of a level go on (arXiv 2406.16858)."""
    monkeypatch.setitem(globals(), "VOCAB", 30)
    best = grown([7], 10, 10).best(60)
    chances, _ = in_lists(7, 10, 10, row=0)
    assert len(chances) == 10 + 6 * 100
    assert set(paths_of(best.tokens[0].tolist(), best.parents[0].tolist())) == likeliest(chances, 60)


def test_a_beam_that_leaves_nothing_out_finds_the_likeliest_of_all_paths():
    growth, depth = grown([3], VOCAB, VOCAB**3), 3
    every = {}
    for length in range(1, depth + 1):
        for path in itertools.product(range(VOCAB), repeat=length):
            every[path] = math.exp(sum(said(path[:i], 0)[path[i]].item() for i in range(length)))
    best = growth.best(40)
    assert set(paths_of(best.tokens[0].tolist(), best.parents[0].tolist())) == likeliest(every, 40)


def test_a_child_as_likely_as_its_parent_never_stands_without_it():
    certain = torch.full((1, 1, VOCAB), -torch.inf)
    certain[..., 3] = 0.0
    growth = Growth([5], 2, 2, "cpu")
    for _ in range(5):
        assert growth.add(certain).shape[1] == 1, "what cannot follow is not fed"
    for most in range(1, 6):
        best = growth.best(most)
        assert best.tokens.tolist() == [[3] * most]
        assert best.parents.tolist() == [list(range(most))]
        assert best.chances.tolist() == [[1.0] * most]


def test_what_cannot_follow_is_no_node():
    nothing = torch.full((1, 1, VOCAB), -torch.inf)
    nothing[..., 2] = 0.0
    growth = Growth([1], 4, 4, "cpu")
    growth.add(nothing)
    best = growth.best(4)
    assert [
        token
        for token, parent in zip(*(t[0].tolist() for t in (best.tokens, best.parents)), strict=True)
        if parent >= 0
    ] == [2]
    assert (growth.beam.parents[0] >= 0).sum() == 1


@pytest.mark.parametrize("sharp", [0.1, 1.0, 8.0])
def test_parents_come_before_children_and_siblings_share_one(sharp):
    best = grown([5, 3], 3, 3, sharp).best(20)
    draft = Draft(best.tokens, best.parents, confidence=best.chances)
    for tokens, parents, chances in zip(draft.tokens, draft.parents, best.chances, strict=True):
        shares: dict[int, float] = {}
        for node, (parent, chance) in enumerate(zip(parents.tolist(), chances.tolist(), strict=True)):
            assert parent <= node
            if parent >= 0:
                shares[parent] = shares.get(parent, 0.0) + chance
        assert max(shares.values()) <= 1 + 1e-6
        twins = [
            (parent, token) for parent, token in zip(parents.tolist(), tokens.tolist(), strict=True) if parent >= 0
        ]
        assert len(set(twins)) == len(twins)
