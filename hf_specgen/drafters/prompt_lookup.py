"""Prompt lookup (Saxena 2023): drafts what followed the last tokens where they stood earlier in the text. No model."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hf_specgen.draft import Draft, Needs, Node
from hf_specgen.drafters.suffixes import SuffixAutomaton

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.draft import Context, Limit, Request

# How many tokens match, and what to draft after them.
_Path = tuple[int, list[int]]

# When a copy left its source: so many tokens, so near, so soon after are enough to take it up again.
RESUMED, NEARBY, RECENT = 2, 16, 24


@dataclass(slots=True)
class _Stored:
    """One stored token: the serial numbers of its neighbours in its own text, and the n-gram before it."""

    token: int
    previous: int
    next: int
    ngram: tuple[int, ...]


class LookupStore:
    """Earlier outputs, for lookups across calls and threads. It holds users' text: share it as you would share that.

    What a session generates is added at each of its proposals, so rows of one batch and calls in other threads see it
    at once. Prompts are not added, and neither are the tokens of a call's last round, since nobody tells a session that
    it ended. Under `matching` the content never changes a text; under the other accept rules, which follow the
    drafts, the same seed repeats its text only with the same content.

    Each token is indexed once, under the n-gram before it, with the `max_places` latest places of that n-gram; the
    longest match among these is taken.

    Args:
        max_tokens: most tokens held; the oldest are evicted one by one. A token takes about 300 bytes.
        min_ngram: fewest tokens of a match.
    """

    max_places = 8

    def __init__(self, max_tokens: int = 100_000, min_ngram: int = 4) -> None:
        if max_tokens < 1 or min_ngram < 1:
            raise ValueError(f"max_tokens and min_ngram must be at least 1, not {max_tokens} and {min_ngram}")
        self.max_tokens = max_tokens
        self.min_ngram = min_ngram
        self._lock = threading.Lock()
        self._tokens: dict[int, _Stored] = {}  # by serial number, oldest first
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._serial = 0  # of the next token; never used twice, so that a stale number finds nothing

    def __len__(self) -> int:
        """Tokens held."""
        return len(self._tokens)

    def clear(self) -> None:
        """Forgets everything. Calls in progress go on to add what they generate from here on."""
        with self._lock:
            self._tokens.clear()
            self._places.clear()

    def add(self, tokens: Iterable[int], after: int = -1) -> int:
        """Appends tokens to a text.

        Args:
            tokens: ids that follow the text's earlier ones.
            after: what the last call for this text returned; -1 begins a text.

        Returns:
            The place at which this text can go on.
        """
        with self._lock:
            for token in tokens:
                if len(self._tokens) == self.max_tokens:
                    self._evict()
                before = self._tokens.get(after)
                ngram: tuple[int, ...] = ()
                if before is not None:
                    before.next = self._serial
                    ngram = (*before.ngram, before.token)[-self.min_ngram :]
                self._tokens[self._serial] = _Stored(token, after, -1, ngram)
                if len(ngram) == self.min_ngram:
                    places = self._places.setdefault(ngram, [])
                    places.append(self._serial)
                    del places[: -self.max_places]
                after = self._serial
                self._serial += 1
        return after

    def _evict(self) -> None:
        oldest = self._serial - len(self._tokens)
        ngram = self._tokens.pop(oldest).ngram
        places = self._places.get(ngram, [])
        if places and places[0] == oldest:  # otherwise more recent places have displaced it
            del places[0]
            if not places:
                del self._places[ngram]

    def find(self, suffix: Sequence[int], more_than: int, depth: int) -> list[_Path]:
        """Looks for what followed the end of `suffix`.

        Args:
            suffix: the last ids of a text; a match is at most this long.
            more_than: a match must have more tokens than this.
            depth: most tokens of a continuation.

        Returns:
            Matched tokens and continuation, the longest match first, of equal ones the latest.
        """
        with self._lock:
            places = reversed(self._places.get(tuple(suffix[-self.min_ngram :]), ()))
            matches = [(self._agreement(place, suffix), place) for place in places]
            matches = [match for match in matches if match[0] > more_than]
            matches.sort(key=lambda match: -match[0])
            return [(length, self._continuation(place, depth)) for length, place in matches]

    def _agreement(self, place: int, suffix: Sequence[int]) -> int:
        """How many tokens before `place` equal the end of `suffix`."""
        length = 0
        stored = self._tokens.get(self._tokens[place].previous)
        while stored is not None and length < len(suffix) and stored.token == suffix[-1 - length]:
            length += 1
            stored = self._tokens.get(stored.previous)
        return length

    def _continuation(self, place: int, depth: int) -> list[int]:
        tokens: list[int] = []
        stored = self._tokens.get(place)
        while stored is not None and len(tokens) < depth:
            tokens.append(stored.token)
            stored = self._tokens.get(stored.next)
        return tokens


@dataclass(frozen=True)
class PromptLookup:
    """Drafts by copying: what followed the longest match of the last tokens, at its most recent place.

    Works with any target and costs a small part of a millisecond. It gains where an answer repeats its prompt or itself
    (summaries, edits, quotations, loops). For an encoder-decoder the text that the encoder reads counts as part of the
    prompt. Paper: prompt lookup decoding (Saxena 2023), with a suffix automaton for an
    index.

    Attributes:
        min_ngram: fewest tokens that must match. 2 gains more on some copying text and loses more elsewhere.
        max_ngram: beyond so many tokens the most recent match is taken, not the longest.
        branches: paths in a tree. 1 drafts chains; more add the other tokens that followed the match, then those
            that followed shorter ones. The best nodes are kept where not all fit.
        store: earlier outputs to look into when the row's own text has no match as long; None shares nothing.
        num_assistant_tokens: how deep to draft where the caller does not say; None for as deep as pays.
        resume: after a copy was left, two tokens that match close behind its end are enough to take it up again.
    """

    min_ngram: int = 3
    max_ngram: int = 32
    branches: int = 1
    store: LookupStore | None = None
    num_assistant_tokens: int | None = None
    resume: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(f"1 <= min_ngram <= max_ngram does not hold for {self.min_ngram} and {self.max_ngram}")
        if self.branches < 1:
            raise ValueError(f"branches must be at least 1, not {self.branches}")
        if not isinstance(self.store, LookupStore | None):
            raise ValueError(f"store={self.store!r} is no hf_specgen.LookupStore; a SuffixStore goes into SuffixLookup")
        if self.store is not None and self.max_ngram < self.store.min_ngram:
            raise ValueError(f"max_ngram={self.max_ngram} never reaches the store's min_ngram={self.store.min_ngram}")

    def start(self, target: PreTrainedModel, request: Request) -> PromptLookupSession:
        """See `Drafter`."""
        return PromptLookupSession(self, request)


class PromptLookupSession:
    """The indices of one call's rows.

    `Draft.confidence` counts agreement: with L tokens that agree so far, those of the match and those drafted before
    the node, the next agrees with L / (L + 1). This is Laplace's rule of succession with one token of the match not
    counted, since the match was searched for. SmolLM2, greedy, gave 0.54, 0.68, 0.86, 0.90 for L = 2, 3, 4, 8. Where a
    tree branches, each path takes that share of what the better ones left, so that siblings sum to less than 1.
    """

    needs = Needs()

    def __init__(self, drafter: PromptLookup, request: Request) -> None:
        self.drafter = drafter
        self.request = request
        # One token more than is matched, since a branch asks where a match with its follower ends.
        self._texts = [SuffixAutomaton(drafter.max_ngram + 1) for _ in range(request.batch)]
        source = None if request.source is None else request.source.ids()
        self._sources: list[list[int]] = [[]] * request.batch if source is None else source
        self._stored: list[tuple[int, int]] = []  # for each row: ids dealt with, place in the store
        self._copies = [_Copy() for _ in range(request.batch)]

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        if self.drafter.store is not None:
            self._remember(self.drafter.store, context.ids)
        branches = 1 if limit.chain or self.request.chain else self.drafter.branches
        rows: list[list[Node]] = []
        for row, (text, ids, depth) in enumerate(zip(self._texts, context.ids, limit.depth, strict=True)):
            paths: list[_Path] = []
            if depth:
                if self._sources[row]:
                    ids = [*self._sources[row], *ids]
                text.extend(ids[text.size :])
                self._copies[row].follow(ids)
                paths = self._paths(row, ids, depth, branches)
            rows.append(_grow(paths, limit.nodes))
        return Draft.of_nodes(rows)

    def _remember(self, store: LookupStore, texts: Sequence[Sequence[int]]) -> None:
        """Adds what was generated since the last proposal; at the first one that is the last id of each row."""
        if not self._stored:
            self._stored = [(max(0, len(ids) - 1), -1) for ids in texts]
        self._stored = [
            (len(ids), store.add(ids[done:], after)) for ids, (done, after) in zip(texts, self._stored, strict=True)
        ]

    def _paths(self, row: int, ids: Sequence[int], depth: int, branches: int) -> list[_Path]:
        """Up to `branches` continuations that begin with different tokens, the best first."""
        paths: dict[int, _Path] = {}
        for length, tokens in self._continuations(row, ids, depth, branches):
            paths.setdefault(tokens[0], (length, _until(tokens, self.request.eos)))
            if len(paths) == branches:
                break
        return list(paths.values())

    def _continuations(self, row: int, ids: Sequence[int], depth: int, branches: int) -> Iterator[_Path]:
        """Continuations from the longest match to the shortest, of equal ones the row's own before the store's."""
        shortest, longest, store = self.drafter.min_ngram, self.drafter.max_ngram, self.drafter.store
        text, copy = self._texts[row], self._copies[row]
        if store is not None:
            best = next(text.matches(shortest, longest), None)
            length = shortest - 1 if best is None else best[0]
            if length < longest:
                yield from store.find(ids[-longest:], length, depth)
        for length, place, state in text.matches(shortest, longest):
            # A chain needs the most recent place only, which is known without asking every follower.
            for start in [place] if branches == 1 else text.followers(state, branches):
                tokens = _copy(ids, start, depth)
                copy.begin(start, tokens, len(ids))
                yield length, tokens
        resumed = copy.resumed(ids) if self.drafter.resume and shortest > RESUMED else None
        if resumed is not None:
            tokens = _copy(ids, resumed, depth)
            copy.begin(resumed, tokens, len(ids))
            yield RESUMED, tokens


class _Copy:
    """Where the last copy that was of use left its source.

    An answer that follows a source mostly comes back to it a little further on. There fewer tokens are proof enough:
    `RESUMED` ones, at most `NEARBY` places behind where the copy left, within `RECENT` tokens since.
    """

    def __init__(self) -> None:
        self._begun: tuple[int, list[int], int] | None = None  # source, tokens, place of the first of them
        self._left: tuple[int, int] | None = None  # source, place

    def begin(self, source: int, tokens: list[int], place: int) -> None:
        """Takes note of a draft; of several for one place the first counts."""
        if self._begun is None:
            self._begun = source, tokens, place

    def follow(self, ids: Sequence[int]) -> None:
        """Sees how far the last draft agreed with what was decided."""
        if self._begun is None:
            return
        source, tokens, place = self._begun
        agreed = 0
        for drafted, decided in zip(tokens, ids[place : place + len(tokens)], strict=False):
            if drafted != decided:
                break
            agreed += 1
        if agreed:
            self._left = source + agreed, place + agreed
        self._begun = None

    def resumed(self, ids: Sequence[int]) -> int | None:
        """The place of the source at which the text has come back to it."""
        if self._left is None or len(ids) - self._left[1] > RECENT:
            return None
        source, _ = self._left
        tail = list(ids[-RESUMED:])
        for start in range(max(source - RESUMED, RESUMED), min(source + NEARBY, len(ids) - 1)):
            if list(ids[start - RESUMED : start]) == tail:
                return start
        return None


def _copy(ids: Sequence[int], start: int, depth: int) -> list[int]:
    """`depth` tokens from `start` on; past the end it reads its own copy, so that a repeating text is continued."""
    tokens = list(ids[start : start + depth])
    period = len(ids) - start
    for place in range(period, depth):
        tokens.append(tokens[place - period])
    return tokens


def _until(tokens: list[int], eos: frozenset[int]) -> list[int]:
    """Tokens up to the first that ends a row, that one included."""
    for place, token in enumerate(tokens):
        if token in eos:
            return tokens[: place + 1]
    return tokens


def _grow(paths: list[_Path], most_nodes: int) -> list[Node]:
    """Lays paths out as a tree, parents first. Of too many nodes those most likely to be reached and accepted stay."""
    candidates: list[tuple[float, int, int]] = []  # chance, path, depth
    confidence: list[list[float]] = []
    left = 1.0
    for path, (length, tokens) in enumerate(paths):
        along = [(length + depth) / (length + depth + 1) for depth in range(len(tokens))]
        along[0] *= left
        left -= along[0]
        confidence.append(along)
        chance = 1.0
        for depth, factor in enumerate(along):
            chance *= factor
            candidates.append((chance, path, depth))
    # The chance falls along a path, so what is kept of a path is its beginning.
    kept = heapq.nlargest(most_nodes, candidates, key=lambda candidate: candidate[0])
    nodes: list[Node] = []
    for _, path, depth in sorted(kept, key=lambda candidate: candidate[1:]):
        nodes.append((paths[path][1][depth], len(nodes) if depth else 0, confidence[path][depth]))
    return nodes
