"""Token recycling (arXiv 2408.08696): drafts from the target's own second thoughts. No model, no training.

Each pass gives, at every node it checked, the ids the target found likeliest to come next. They are kept by the token
of the node: one short row a token, overwritten whenever that token is seen again. A draft follows these rows from the
root, token by token, and branches where a row has more than one id to offer.
"""

from __future__ import annotations

import heapq
import json
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hf_specgen.draft import Draft, Needs, Node
from hf_specgen.files import write_whole

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.draft import Context, Limit, Request, Verified

# SmolLM2-135M, greedy, 15 texts of up to 128 tokens, a matrix for each: the next token was the first id of the row in
# 0.37 of 774 places; but in 0.16 where it had mostly not been so for this token, and in 0.83 where it mostly had. So a
# row counts how often its first id came, on top of these: so many times out of so many.
PRIOR_HITS, PRIOR_SEEN = 0.45, 1.5
# A row's counts are halved when they reach this many. In a matrix filled by other texts this predicted better than
# counting for ever, and there the age of a row said little more.
MOST_SEEN = 8.0
# Below a node that was accepted, the first id came more often than that: the odds were about twice as high.
BELOW = 2.0
# Where the first id did not come, how often each of the others did.
OTHERS = (0.18, 0.075, 0.055, 0.04, 0.03, 0.03, 0.02)


class Candidates(NamedTuple):
    """A row of the matrix.

    Attributes:
        ids: what the target found likeliest to follow, best first, when it last saw the token.
        seen: how often the token was followed by another while it had a row; older times count less.
        hits: how many of these followers were the first of `ids`.
    """

    ids: tuple[int, ...]
    seen: float
    hits: float

    def confidence(self, below: bool) -> list[float]:
        """For each of `ids` the chance that it comes next; together less than 1.

        Args:
            below: the token is itself a draft that was accepted.
        """
        first = (self.hits + PRIOR_HITS) / (self.seen + PRIOR_SEEN)
        if below:
            first = BELOW * first / (1 + (BELOW - 1) * first)
        return [first, *((1 - first) * share for share in OTHERS[: len(self.ids) - 1])]

    def followed_by(self, token: int) -> Candidates:
        """The same row after one more occurrence of its token, which `token` followed."""
        seen, hits = self.seen + 1, self.hits + (self.ids[0] == token)
        return Candidates(self.ids, seen / 2, hits / 2) if seen >= MOST_SEEN else Candidates(self.ids, seen, hits)


class CandidateMatrix:
    """For each token the ids the target found likeliest to follow it; one serves any number of calls and threads.

    It holds statistics of users' texts: pairs of tokens, without order. Share and keep it as you would share and keep
    those. It belongs to one vocabulary, and its ids mean nothing to another. Under `matching` its content never changes
    a text; under the other accept rules, which follow the drafts, the same seed repeats its text only with the same
    content.

    Only tokens that were seen have a row, of about 300 bytes with 8 ids.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, Candidates] = {}

    def __len__(self) -> int:
        """Tokens that have a row."""
        return len(self._rows)

    def get(self, token: int) -> Candidates | None:
        """The row of a token. Rows are replaced, never changed, so that nobody needs to wait for a reader."""
        return self._rows.get(token)

    def update(self, followed: Iterable[tuple[int, int]], found: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Takes in what a pass has shown.

        Args:
            followed: tokens, each with the one that was then decided. They are compared with the rows as they are.
            found: tokens, each with the ids that are its new row, best first. Of a token's rows the last one counts.
        """
        with self._lock:
            for token, follower in followed:
                row = self._rows.get(token)
                if row is not None:
                    self._rows[token] = row.followed_by(follower)
            for token, ids in found:
                row = self._rows.get(token)
                seen, hits = (0.0, 0.0) if row is None else (row.seen, row.hits)
                self._rows[token] = Candidates(tuple(ids), seen, hits)

    def clear(self) -> None:
        """Forgets everything. Calls in progress go on to fill it."""
        with self._lock:
            self._rows.clear()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes it to a file as JSON: for each token its ids and the two counts of `Candidates`."""
        with self._lock:
            rows = {token: [list(row.ids), row.seen, row.hits] for token, row in self._rows.items()}
        write_whole(path, json.dumps({"candidate_matrix": rows}))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> CandidateMatrix:
        """Reads what `save` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        matrix = cls()
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            for token, (ids, seen, hits) in content["candidate_matrix"].items():
                row = Candidates(tuple(map(int, ids)), float(seen), float(hits))
                if not row.ids or not 0 <= min(row.ids) <= max(row.ids) < 2**31 or not 0 <= row.hits <= row.seen:
                    raise ValueError(f"row {token} is {ids}, {seen}, {hits}")
                matrix._rows[int(token)] = row
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{os.fspath(path)} was not written by CandidateMatrix.save: {error}") from error
        return matrix


@dataclass(frozen=True)
class TokenRecycling:
    """Drafts trees of what the target itself found likely after each token. Works with any target that takes trees.

    It gains on any text, copied or not, but needs passes over more than a few tokens to be cheap: mean accepted tokens
    grow slowly with the nodes. Where chains are asked for only the first id of each row is drafted. Rows of a batch
    share one matrix, and so do calls that are given one. Paper: arXiv 2408.08696; unlike there the tree is not a fixed
    one, but grows best first by how often each row has been right.

    Attributes:
        matrix: filled by earlier calls and by this one, so that a call starts warm; None makes one for each call.
            It holds statistics of users' texts.
        top_k: ids kept for each token. 1 drafts chains.
        num_assistant_tokens: how deep to draft where the caller does not say; None leaves it to what a pass costs.
    """

    matrix: CandidateMatrix | None = None
    top_k: int = 8
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= 1 + len(OTHERS):
            raise ValueError(f"top_k must be 1 to {1 + len(OTHERS)}, not {self.top_k}")
        if not isinstance(self.matrix, CandidateMatrix | None):
            raise ValueError(f"matrix={self.matrix!r} is no hf_specgen.CandidateMatrix")

    def start(self, target: PreTrainedModel, request: Request) -> TokenRecyclingSession:
        """See `Drafter`."""
        return TokenRecyclingSession(self, request)


class TokenRecyclingSession:
    """One call's matrix, or the one that was given.

    `Draft.confidence` is that of `Candidates`. On the texts of the comments above 0.03, 0.13, 0.30 and 0.54 were
    accepted where it said 0.03, 0.14, 0.29 and 0.51.
    """

    def __init__(self, drafter: TokenRecycling, request: Request) -> None:
        self.drafter = drafter
        self.request = request
        self.matrix = CandidateMatrix() if drafter.matrix is None else drafter.matrix
        self._lengths: list[int] = []  # of the rows, when they were last asked about

    @property
    def needs(self) -> Needs:
        """The target's best ids at every node."""
        return Needs(top_k=self.drafter.top_k)

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        if context.last is not None and context.last.top:
            for row, ids in enumerate(context.ids):
                self._recycle(row, ids, context.last)
        self._lengths = [len(ids) for ids in context.ids]
        branches = 1 if limit.chain or self.request.chain else self.drafter.top_k
        return Draft.of_nodes(
            [
                self._grow(ids[-1], depth, limit.nodes, branches) if depth and ids else []
                for ids, depth in zip(context.ids, limit.depth, strict=True)
            ]
        )

    def _recycle(self, row: int, ids: Sequence[int], last: Verified) -> None:
        """Takes a row's part of the last pass into the matrix, what was rejected first: the path is to stay.

        Rejected nodes are worth it: without them 16 nodes gave 1.24 mean accepted tokens instead of 1.41 (SmolLM2-135M,
        greedy, three texts of 96 tokens, each with a matrix of its own).
        """
        top, tokens, parents = last.top[row], last.tokens[row], last.parents[row]
        # A pass without nodes decides one token, even if this session was not asked before it.
        before = self._lengths[row] if tokens and self._lengths else len(ids) - 1
        if not top or before < 1:
            return
        path = _path(tokens, parents, ids[before:-1])
        if path is None:  # the pass was about another place than was thought
            return
        root = ids[before - 1]
        walked = list(zip(ids[before - 1 : -1], ids[before:], strict=True))
        rejected = [place for place, parent in enumerate(parents, 1) if parent >= 0 and place not in path]
        found = [(tokens[place - 1] if place else root, top[place]) for place in (*rejected, *path)]
        self.matrix.update(walked, found)

    def _grow(self, root: int, depth: int, most: int, branches: int) -> list[Node]:
        """The tree of at most `most` nodes that are likeliest to be accepted, the likeliest first."""
        nodes: list[Node] = []
        # Chance (negative), a number that settles ties by age, node, depth.
        waiting: list[tuple[float, int, Node, int]] = []
        number, token, at, chance = 0, root, 0, 1.0
        while True:
            row = self.matrix.get(token) if at < depth and not (nodes and token in self.request.eos) else None
            if row is not None:
                for child, confidence in zip(row.ids[:branches], row.confidence(below=at > 0), strict=False):
                    number += 1
                    heapq.heappush(waiting, (-chance * confidence, number, (child, len(nodes), confidence), at + 1))
            if not waiting or len(nodes) == most:
                return nodes
            negative, _, node, at = heapq.heappop(waiting)
            nodes.append(node)
            token, chance = node[0], -negative


def _path(tokens: Sequence[int], parents: Sequence[int], accepted: Sequence[int]) -> list[int] | None:
    """The places, root included, that carry the accepted tokens; None if the tree has no such path."""
    children: dict[tuple[int, int], int] = {}
    for place, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        children.setdefault((parent, token), place)  # of two twins the first was walked
    path = [0]
    for token in accepted:
        child = children.get((path[-1], token))
        if child is None:
            return None
        path.append(child)
    return path
