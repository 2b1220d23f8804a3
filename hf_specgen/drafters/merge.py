"""Branches of several drafters in one tree, each path once, the likeliest ones as far as there is room."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_specgen.draft import Draft, Drafter, Limit, Node
from hf_specgen.drafters.combined import Combination, Sessions, beside, checked, on_host

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.draft import Context, Request


@dataclass(frozen=True, init=False)
class Merge:
    """Asks all drafters every round and merges their drafts: into one tree, or where trees are not taken one chain.

        Merge(SuffixLookup(), TokenRecycling())

    Equal paths become one. What drafters say of the same place is combined in order of their sureness: the surest
    one's word stands, and each of the others speaks for what those before it left. So two who agree on a token with p
    and q give it `p + (1 - p) q`, a rival of theirs gets its share of the rest, and siblings never sum to more than 1.
    This takes the drafters' errors for independent; where they look at the same source it is too sure.

    The nodes with the largest product of confidences are kept. A chain is the path on which most tokens can be expected
    to be accepted.

    Under rejection and block verification, where drafts come with `probs`, a row takes the draft of the first drafter
    that has one: probabilities of several must not be mixed, and to choose by what was drawn would bias the text.

    Args:
        *drafters: two or more.
        num_assistant_tokens: how deep to draft where the caller does not say.
    """

    drafters: tuple[Drafter, ...]
    num_assistant_tokens: int | None

    def __init__(self, *drafters: Drafter, num_assistant_tokens: int | None = None) -> None:
        object.__setattr__(self, "drafters", checked("Merge", drafters))
        object.__setattr__(self, "num_assistant_tokens", num_assistant_tokens)

    def start(self, target: PreTrainedModel, request: Request) -> MergeSession:
        """See `Drafter`.

        Raises:
            ValueError: one of the drafters cannot work, or two of them read the target's hidden states.
        """
        return MergeSession(Sessions(self.drafters, target, request))


class MergeSession(Combination):
    """A session of each drafter."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions = sessions
        self.needs = sessions.needs

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`. A draft that is to be checked as a whole is taken alone."""
        drafts: dict[int, Draft] = {}

        def beside() -> Draft:
            return _merged([drafts[place] for place in sorted(drafts)], limit)

        for place in self.sessions.turns(limit):
            draft = self.sessions.propose(place, context, limit, beside)
            if draft.nodes:
                drafts[place] = draft
        return beside()


def _merged(drafts: Sequence[Draft], limit: Limit) -> Draft:
    """One draft of several that have nodes, the first drafter's first."""
    if not drafts:
        return Draft.empty(len(limit.depth))
    alone = next((draft for draft in drafts if draft.whole), drafts[0] if len(drafts) == 1 else None)
    if alone is not None:
        return alone
    rows = [list(trees) for trees in zip(*map(on_host, drafts), strict=True)]
    if any(draft.probs is not None for draft in drafts):
        return beside(drafts, [next((i for i, tree in enumerate(trees) if tree), None) for trees in rows])
    nodes: list[list[Node]] = []
    for trees, depth in zip(rows, limit.depth, strict=True):
        trie = Trie(trees, depth)
        nodes.append(trie.best_chain() if limit.chain else trie.best(limit.nodes))
    return Draft.of_nodes(nodes)


class Trie:
    """One row's drafts as one tree, in lists by node; the root is node 0, and parents come before children.

    Args:
        trees: of each drafter.
        depth: of the longest path that is wanted.
    """

    def __init__(self, trees: Sequence[Sequence[Node]], depth: int) -> None:
        self.tokens = [-1]
        self.parents = [-1]
        self._depth = [0]
        self._places: dict[tuple[int, int], int] = {}  # of parent and token
        # For each node with children what each drafter says of these.
        self._words: dict[int, list[dict[int, float]]] = {}
        for tree in trees:
            self._add(tree, depth)
        self.confidence = self._combined()
        self.chances = [1.0]
        for parent, confidence in zip(self.parents[1:], self.confidence[1:], strict=True):
            self.chances.append(self.chances[parent] * min(1.0, confidence))  # it may be rounded up

    def _add(self, tree: Sequence[Node], deepest: int) -> None:
        places = [0]  # of the tree's nodes; -1 for one that is not wanted
        words: dict[int, dict[int, float]] = {}
        for token, parent, confidence in tree:
            above = places[parent]
            if above < 0 or self._depth[above] == deepest:
                places.append(-1)
                continue
            node = self._places.setdefault((above, token), len(self.tokens))
            if node == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(above)
                self._depth.append(self._depth[above] + 1)
            places.append(node)
            word = words.setdefault(above, {})
            word[node] = word.get(node, 0.0) + confidence
        for above, word in words.items():
            self._words.setdefault(above, []).append(word)

    def _combined(self) -> list[float]:
        """Each node's confidence, see `Merge`."""
        confidence = [0.0] * len(self.tokens)
        for words in self._words.values():
            if len(words) > 1:
                # Of equally sure ones the first speaks first, since the sort is stable.
                words.sort(key=_claimed, reverse=True)
            left = 1.0
            for word in words:
                claimed = _claimed(word)
                share = left / claimed if claimed > 1.0 else left  # nobody can claim more than everything
                for node, said in word.items():
                    confidence[node] += share * said
                left -= share * claimed
        return confidence

    def best(self, most: int) -> list[Node]:
        """The likeliest nodes; none of them is likelier than its parent, which comes first, so these are a tree."""
        kept = sorted(heapq.nlargest(most, range(1, len(self.tokens)), key=self.chances.__getitem__))
        return self._nodes(kept)

    def best_chain(self) -> list[Node]:
        """The path on which most tokens are expected to be accepted."""
        expected = list(self.chances)
        onwards = [0] * len(self.tokens)  # the child to go to; 0 for none
        for node in range(len(self.tokens) - 1, 0, -1):
            expected[node] += expected[onwards[node]] if onwards[node] else 0.0
            rival = onwards[self.parents[node]]
            if not rival or expected[node] >= expected[rival]:
                onwards[self.parents[node]] = node
        path: list[int] = []
        node = onwards[0]
        while node:
            path.append(node)
            node = onwards[node]
        return self._nodes(path)

    def _nodes(self, kept: Sequence[int]) -> list[Node]:
        place = {0: 0} | {node: i for i, node in enumerate(kept, start=1)}
        return [(self.tokens[node], place[self.parents[node]], self.confidence[node]) for node in kept]


def _claimed(word: dict[int, float]) -> float:
    return sum(word.values())
