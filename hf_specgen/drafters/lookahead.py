"""Lookahead decoding (arXiv 2402.02057): the target makes up n-grams ahead of the text in the passes that verify.

A window of guesses lies behind the root. Each pass improves all of them at once (Jacobi iteration), and what a column
of the window goes through, one guess a pass, is an n-gram. N-grams go into a pool; those that begin with the root are
the draft.

The window is a tree. With columns a, b, c of up to two guesses a column, the older one before the younger one:

    root - a0 - b0 - c0      the trunk: of each column the oldest guess
           |    |    |
           a1   b1   c1      below it the column's later guesses

What follows a1 after `root a0 a1` is the next guess of column a, `a0 a1 next` is an n-gram, and a0 is dropped: by then
the root has moved on by one place, so that a1 stands where a0 stood.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_specgen.draft import Draft, Needs, Node

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.draft import Context, Limit, Request, Verified

# What an n-gram gets of the chance that better ones left, at the root and below a node that was accepted. SmolLM2-135M,
# greedy, three texts of 96 tokens with windows of 5 and 7: the most recent n-gram began right in 0.26 of 198 rounds,
# later ones where there were any in 0.16, 0.13 and 0.06; a right beginning went on right in 0.68.
FIRST, BELOW = 0.25, 0.65
# A column begins with one of so many last tokens of the text, as good a guess as any.
RECENT = 256


@dataclass(frozen=True)
class Lookahead:
    """Drafts the n-grams that a Jacobi window of the target's own guesses yields. No model, no training.

    A pass holds up to `window * (levels - 1)` nodes for the window and `candidates * (levels - 1)` for n-grams, so it
    gains only where wide passes cost hardly more than narrow ones: accelerators with one row, hardly ever a CPU. The
    paper's settings for 7B models on an A100 are 15, 5, 15; the defaults here are for less. Paper: arXiv 2402.02057.

    Where chains are asked for there is no window: the pool is filled from the decided text alone, and its most recent
    n-gram is drafted. When sampling, the guesses are still the target's likeliest tokens.

    Attributes:
        window: columns of guesses. Fewer are used where limits leave no room, as at the end of a row.
        levels: most tokens of an n-gram; a draft has one less.
        candidates: most n-grams kept for each first token, and so drafted at once; the most recent ones.
        num_assistant_tokens: how deep to draft where the caller does not say. The window is whole from a depth of
            `window + levels - 2` on. None leaves it to what a pass costs.
    """

    window: int = 5
    levels: int = 4
    candidates: int = 4
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.window < 1 or self.levels < 2 or self.candidates < 1:
            raise ValueError(
                "window and candidates must be at least 1 and levels at least 2, not "
                f"window={self.window}, candidates={self.candidates}, levels={self.levels}"
            )

    def start(self, target: PreTrainedModel, request: Request) -> LookaheadSession:
        """See `Drafter`."""
        return LookaheadSession(self, request)


class LookaheadSession:
    """A window and a pool for each row."""

    def __init__(self, drafter: Lookahead, request: Request) -> None:
        self.request = request
        self.rows = [RowWindow(drafter, request.eos) for _ in range(request.batch)]
        self._draft: Draft | None = None

    @property
    def needs(self) -> Needs:
        """The target's best id at every node."""
        return Needs(top_k=0 if self.request.chain else 1)

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`. A draft with a window is `Draft.whole`: without all of it the window stands still."""
        chain = limit.chain or self.request.chain
        last = context.last if context.last is not None and context.last.draft is self._draft else None
        rows: list[list[Node]] = []
        for number, (row, ids, depth) in enumerate(zip(self.rows, context.ids, limit.depth, strict=True)):
            if last is not None:
                row.look_back(number, last)
            row.read(ids)
            rows.append(row.draft(ids, depth, limit.nodes, chain))
        draft = Draft.of_nodes(rows)
        self._draft = draft if chain else replace(draft, whole=True)
        return self._draft


class RowWindow:
    """The window and the pool of one row.

    Args:
        drafter: the settings.
        eos: ids that end a row. No n-gram and no column goes on behind one.
    """

    def __init__(self, drafter: Lookahead, eos: frozenset[int]) -> None:
        self.drafter = drafter
        self.eos = eos
        self._pool: dict[int, list[tuple[int, ...]]] = {}  # by first token what followed it, the most recent first
        self._read = 0  # first tokens of n-grams of the text that are in the pool
        self._columns: list[list[int]] = []  # the guesses of each, the oldest first
        self._ends: list[int] = []  # of each column that is in the last draft the place of its last node
        self._random = random.Random(0)

    def read(self, ids: Sequence[int]) -> None:
        """Takes n-grams of the decided text into the pool."""
        levels = self.drafter.levels
        for start in range(self._read, len(ids) - levels + 1):
            self.add(ids[start : start + levels])
        self._read = max(self._read, len(ids) - levels + 1)

    def add(self, ngram: Sequence[int]) -> None:
        """Puts an n-gram into the pool, in front of those with the same first token."""
        first, tail = ngram[0], _until(ngram[1:], self.eos)
        if first in self.eos:
            return
        tails = self._pool.setdefault(first, [])
        if tail in tails:
            tails.remove(tail)
        tails.insert(0, tail)
        del tails[self.drafter.candidates :]

    def look_back(self, number: int, last: Verified) -> None:
        """Moves the window on by what the target found at the columns' ends."""
        if not last.top or not last.top[number] or not last.tokens[number]:
            return  # the row has ended, or nothing of the draft was checked
        top, parents = last.top[number], last.parents[number]
        columns = []
        for column, end in zip(self._columns, self._ends, strict=False):
            if parents[end - 1] < 0:
                break
            guess = top[end][0]
            column.append(guess)
            self.add(column)
            # What the target would say after its EOS is no guess about the text: such a column begins anew.
            if guess in self.eos:
                column = []
            columns.append(column[1:] if len(column) == self.drafter.levels else column)
        self._columns = columns

    def draft(self, ids: Sequence[int], depth: int, most: int, chain: bool) -> list[Node]:
        """The n-grams that begin with the root, and the window behind them as far as it fits."""
        tree, self._ends = _Tree(), []
        if not depth or not ids:
            return []
        tails = self._pool.get(ids[-1], [])
        for tail in tails[:1] if chain else tails:
            tree.add_branch(tail[:depth], most)
        if not chain:
            self._lay_out(tree, ids, depth, most)
        return tree.nodes

    def _lay_out(self, tree: _Tree, ids: Sequence[int], depth: int, most: int) -> None:
        """Adds the columns that fit into the tree, and begins those that are missing with tokens of the text."""
        recent = [token for token in ids[-RECENT:] if token not in self.eos]
        self._columns += [[] for _ in range(self.drafter.window - len(self._columns))]
        trunk = 0
        for place, column in enumerate(self._columns, 1):
            if not column and recent:
                column.append(self._random.choice(recent))
            if not column or place + len(column) - 1 > depth or len(tree.nodes) + len(column) > most:
                return
            trunk = end = tree.add(trunk, column[0], 0.0)
            for token in column[1:]:
                end = tree.add(end, token, 0.0)
            self._ends.append(end)


class _Tree:
    """Nodes as they are added; two paths share the nodes of what they begin with."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._places: dict[tuple[int, int], int] = {}  # by parent and token
        self._left: dict[int, float] = {}  # for each parent the chance that its children have left

    def add(self, parent: int, token: int, share: float) -> int:
        """The place of the node with that parent and token, which is added if it is not there.

        Args:
            parent: a place.
            token: an id.
            share: of the chance that earlier children of the parent have left, what goes to a new one.
        """
        place = self._places.get((parent, token))
        if place is None:
            left = self._left.get(parent, 1.0)
            self.nodes.append((token, parent, left * share))
            self._left[parent] = left - left * share
            place = self._places[parent, token] = len(self.nodes)
        return place

    def add_branch(self, tokens: Sequence[int], most: int) -> None:
        """A path from the root, as far as there is room for `most` nodes."""
        place = 0
        for token in tokens:
            if len(self.nodes) == most:
                return
            place = self.add(place, token, BELOW if place else FIRST)


def _until(tokens: Sequence[int], eos: frozenset[int]) -> tuple[int, ...]:
    """Tokens up to the first that ends a row, that one included."""
    for place, token in enumerate(tokens, 1):
        if token in eos:
            return tuple(tokens[:place])
    return tuple(tokens)
