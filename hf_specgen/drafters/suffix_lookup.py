"""Suffix decoding (arXiv 2411.04975): trees of what followed the last tokens, earlier in the text and in other texts.

The text and the store are read as a variable-order Markov model, as in PPM compression (Cleary and Witten 1984): what
comes next is what followed the longest match; the chance that it is something else goes to what followed the next
shorter one. A tree is that model unrolled from the root, the likeliest node first, so that a long match gives a long
chain and a short one a small bush.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import itemgetter
from typing import TYPE_CHECKING

from hf_specgen.draft import Draft, Needs, Node
from hf_specgen.drafters.suffix_store import LONGEST, StoredText, SuffixStore
from hf_specgen.drafters.suffixes import Match, SuffixAutomaton
from hf_specgen.vocabulary import size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.draft import Context, Limit, Request

# How many contexts are asked at a node: of shorter ones still the gain was nil.
CONTEXTS = 2
# A context that so many different tokens followed predicts none of them, and would cost time.
MOST_FOLLOWERS = 32
# What weighs beside the number of times a token followed: that it was the latest; and how sure repetition makes.
LATEST, SURER = 0.5, 3.0

# The longest match in each of the automatons.
_Matches = list[tuple[SuffixAutomaton, Match]]


@dataclass(frozen=True)
class SuffixLookup:
    """Drafts trees by copying: what followed the longest matches of the last tokens, weighted by how often it did.

    Works with any target and costs a small part of a millisecond. It gains where an answer repeats its prompt or
    itself, and with a store where answers resemble earlier ones (agents, edits, the same question again). For an
    encoder-decoder the text that the encoder reads counts as part of the prompt. Paper: SuffixDecoding (arXiv
    2411.04975), whose settings have the names of ArcticInference. SmolLM2, greedy, 26 texts, new tokens a pass at
    4, 8, 16, 32 nodes: 1.75, 1.87, 1.92, 1.94 as chains and 1.80, 1.96, 2.07, 2.11 as trees (PromptLookup: 1.50,
    1.58, 1.62, 1.64).

    Attributes:
        branches: most children of a node. 1 drafts chains.
        store: earlier outputs to look into as well; None shares nothing.
        min_match: fewest tokens that must match in the row's own text; in the store it is one more.
        min_token_prob: a node that is less likely to be reached and accepted is not drafted.
        max_spec_factor: a draft is at most so many times as deep as the match is long; None sets no bound, since the
            probabilities do.
        num_assistant_tokens: how deep to draft where the caller does not say.
    """

    branches: int = 4
    store: SuffixStore | None = None
    min_match: int = 1
    min_token_prob: float = 0.02
    max_spec_factor: float | None = None
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.store, SuffixStore | None):
            raise ValueError(f"store={self.store!r} is no hf_specgen.SuffixStore")
        if self.branches < 1:
            raise ValueError(f"branches must be at least 1, not {self.branches}")
        if not 1 <= self.min_match < LONGEST:
            raise ValueError(f"min_match must lie in 1..{LONGEST - 1}, not {self.min_match}")
        if not 0 <= self.min_token_prob <= 1:
            raise ValueError(f"min_token_prob must lie in 0..1, not {self.min_token_prob}")
        if self.max_spec_factor is not None and self.max_spec_factor <= 0:
            raise ValueError(f"max_spec_factor must be larger than 0, not {self.max_spec_factor}")

    def start(self, target: PreTrainedModel, request: Request) -> SuffixLookupSession:
        """See `Drafter`.

        Raises:
            ValueError: the store has ids that the target does not know.
        """
        if self.store is not None and self.store.largest_id >= size(target):
            raise ValueError(
                f"the store holds id {self.store.largest_id}, but {type(target).__name__} knows {size(target)} ids; "
                "keep one store for each vocabulary"
            )
        return SuffixLookupSession(self, request)


class SuffixLookupSession:
    """The indices of one call's rows.

    `Draft.confidence` is the model's chance of a node after its parent. A context of L tokens that k different tokens
    followed, n times in all, holds with (e - 0.3) / (e + 1.2), where e = L + 3 (n - k) / n: repetition makes it surer.
    SmolLM2, greedy, gave for n = 1 and L = 1, 2, 3, 4, 5..6, 7..8, 9..16, more: 0.29, 0.51, 0.64, 0.81, 0.80, 0.82,
    0.90, 0.94. Each token has its part of that by how often it followed; the latest counts half a time more. In trees
    of 32 nodes on 26 texts, nodes given 0.06, 0.14, 0.24, 0.33, 0.45, 0.54, 0.65, 0.75, 0.85, 0.93 were accepted with
    0.07, 0.15, 0.24, 0.29, 0.49, 0.51, 0.67, 0.80, 0.88, 0.95.
    """

    needs = Needs()

    def __init__(self, drafter: SuffixLookup, request: Request) -> None:
        self.drafter = drafter
        self.request = request
        self._texts = [SuffixAutomaton(LONGEST + 1) for _ in range(request.batch)]
        source = None if request.source is None else request.source.ids()
        self._sources: list[list[int]] = [[]] * request.batch if source is None else source
        self._stored: list[tuple[int, StoredText | None]] = []  # for each row: ids dealt with, text in the store

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        if self.drafter.store is not None:
            self._remember(self.drafter.store, context.ids)
        branches = 1 if limit.chain or self.request.chain else self.drafter.branches
        return Draft.of_nodes(
            [
                self._draft(row, ids, depth, limit.nodes, branches) if depth else []
                for row, (ids, depth) in enumerate(zip(context.ids, limit.depth, strict=True))
            ]
        )

    def _remember(self, store: SuffixStore, texts: Sequence[Sequence[int]]) -> None:
        """Adds what was generated since the last proposal; at the first one that is the last id of each row."""
        if not self._stored:
            self._stored = [(max(0, len(ids) - 1), None) for ids in texts]
        self._stored = [
            (len(ids), store.add(ids[done:], text)) for ids, (done, text) in zip(texts, self._stored, strict=True)
        ]

    def _draft(self, row: int, ids: Sequence[int], depth: int, nodes: int, branches: int) -> list[Node]:
        text, source, store = self._texts[row], self._sources[row], self.drafter.store
        if text.size < len(source):
            text.extend(source)
        text.extend(ids[text.size - len(source) :])
        if store is None:
            return self._grow([(text, text.suffix())], depth, nodes, branches)
        with store.lock:
            return self._grow([(text, text.suffix()), *store.find(ids)], depth, nodes, branches)

    def _grow(self, matches: _Matches, depth: int, nodes: int, branches: int) -> list[Node]:
        """Unrolls the model from the root, the likeliest node first."""
        least, factor, eos = self.drafter.min_token_prob, self.drafter.max_spec_factor, self.request.eos
        if factor is not None:
            depth = min(depth, int(factor * max((length for length, _, _ in self._contexts(matches)), default=0)))
        tree: list[Node] = []
        # Minus its chance, its parent, its rank among the siblings; token, confidence, depth, matches at the parent.
        waiting: list[tuple[float, int, int, int, float, int, _Matches]] = []
        chance, level = 1.0, 0
        while len(tree) < nodes:
            if level < depth:
                for rank, (token, confidence) in enumerate(self._children(matches, branches)):
                    if chance * confidence < least:
                        break
                    node = (-chance * confidence, len(tree), rank, token, confidence, level + 1, matches)
                    heapq.heappush(waiting, node)
            if not waiting:
                break
            minus_chance, parent, _, token, confidence, level, matches = heapq.heappop(waiting)
            tree.append((token, parent, confidence))
            chance = -minus_chance
            if token in eos:
                level = depth  # nothing below it
            elif level < depth:
                matches = [(automaton, automaton.step(match, token)) for automaton, match in matches]
        return tree

    def _children(self, matches: _Matches, branches: int) -> list[tuple[int, float]]:
        """Tokens and their chances, the likeliest first."""
        chances: dict[int, float] = {}
        left = 1.0
        for length, automaton, state in self._contexts(matches):
            count, end = automaton.count, automaton.end
            followers = automaton.edges[state].items()
            fresh = [(end[to], token, count[to]) for token, to in followers if token not in chances]
            if not fresh:
                continue
            fresh.sort(reverse=True)
            total = sum(times for _, _, times in fresh)
            evidence = length + SURER * (total - len(fresh)) / total
            share = left * (evidence - 0.3) / (evidence + 1.2)
            left -= share
            share /= total + LATEST
            for place, (_, token, times) in enumerate(fresh):
                chances[token] = share * (times if place else times + LATEST)
        return heapq.nlargest(branches, chances.items(), key=itemgetter(1))

    def _contexts(self, matches: _Matches) -> list[tuple[int, SuffixAutomaton, int]]:
        """Length, automaton and state of the contexts to ask, the longest first; of equal ones the row's own."""
        shortest, contexts = self.drafter.min_match, []
        for automaton, match in matches:
            for state, length in islice(automaton.contexts(match, shortest), CONTEXTS):
                if len(automaton.edges[state]) <= MOST_FOLLOWERS:
                    contexts.append((length, automaton, state))
            shortest = self.drafter.min_match + 1  # elsewhere
        if len(matches) > 1:
            contexts.sort(key=itemgetter(0), reverse=True)
        return contexts
