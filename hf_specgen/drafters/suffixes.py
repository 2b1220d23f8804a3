"""A suffix automaton: every substring of growing texts, how often it occurs and where it ended last.

Blumer et al. 1985; used for drafting in SAM-Decoding (arXiv 2411.10666). It grows by one token in amortised constant
time and knows the longest suffix that occurred before, whatever its length. Tables of n-grams, one for each length,
are simpler and as exact, but cost more with every length. Indexing 20,000 random ids takes 20 ms and 9 MB as an
automaton for any length, 50 ms and 19 MB as tables for 2..8 tokens, 136 ms and 49 MB for 2..16 (one core, CPython
3.11). Long lengths hardly change what is drafted, but tell sure copies from lucky ones.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence

# Where a text stands: the state of the whole of it, and the state of its last `max_length` tokens.
TextEnd = tuple[int, int]
# A state, and how many tokens of it are meant: that suffix of its longest substring.
Match = tuple[int, int]
BEGIN: TextEnd = (0, 0)
NOTHING: Match = (0, 0)


class SuffixAutomaton:
    """Every substring of a growing text, with its number and the latest two places where it ends.

    A state stands for the substrings that end at the same places: a run of suffixes of one another, of which the
    longest has `length[state]` tokens and the shortest one more than the longest of `link[state]`. Following `link`
    from the whole text visits all its suffixes, from long to short. State 0 is the empty string.

    It takes several texts as well (Mohri et al. 2009, a generalised automaton), which may grow in turns. Places then
    number the tokens in the order they came, whatever their text.

    Args:
        max_length: counts and places are kept up to date for substrings of at most this many tokens. A token then
            costs at most so many steps, even in a text that repeats one token.
    """

    def __init__(self, max_length: int) -> None:
        self.size = 0
        self.edges: list[dict[int, int]] = [{}]  # by state: the state of its substrings with one more token
        self.count = [0]
        self.end = [-1]
        self.edge_count = 0
        self._max_length = max_length
        self._link = [-1]
        self._length = [0]
        self._previous_end = [-1]
        self._text = BEGIN

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the text, about a microsecond each."""
        self._text = self.grow(self._text, tokens)

    def grow(self, text: TextEnd, tokens: Iterable[int]) -> TextEnd:
        """Appends tokens to one of several texts.

        Args:
            text: what the last call for this text returned; `BEGIN` begins one.
            tokens: ids that follow.
        """
        link, length, count, end, previous_end = self._link, self._length, self.count, self.end, self._previous_end
        whole, suffix = text
        for token in tokens:
            whole = self._append(whole, token)
            # If a clone has taken the short substrings from this state, what is left are longer suffixes of the same
            # text: they lead to a longer suffix of the new one, and the links lead back.
            suffix = self.edges[suffix][token]
            kept = min(length[whole], self._max_length)
            while length[link[suffix]] >= kept:
                suffix = link[suffix]
            state = suffix
            while state:
                count[state] += 1
                previous_end[state] = end[state]
                end[state] = self.size
                state = link[state]
            self.size += 1
        return whole, suffix

    def _append(self, whole: int, token: int) -> int:
        """Blumer's step: states, edges and links for a text with one more token; returns the new whole's state."""
        edges, link, length = self.edges, self._link, self._length
        known = edges[whole].get(token)
        if known is not None:  # another text began with the same tokens
            return known if length[known] == length[whole] + 1 else self._split(whole, token, known)
        new = self._new_state({}, length[whole] + 1)
        state = whole
        while state >= 0 and token not in edges[state]:
            edges[state][token] = new
            self.edge_count += 1
            state = link[state]
        if state >= 0:
            known = edges[state][token]
            link[new] = known if length[known] == length[state] + 1 else self._split(state, token, known)
        return new

    def _split(self, state: int, token: int, known: int) -> int:
        """Only the shorter substrings of `known` end here too: they move to a state of their own."""
        edges, link = self.edges, self._link
        clone = self._new_state(edges[known].copy(), self._length[state] + 1)
        self.edge_count += len(edges[known])
        link[clone], self.end[clone], self.count[clone] = link[known], self.end[known], self.count[known]
        self._previous_end[clone] = self._previous_end[known]
        link[known] = clone
        while state >= 0 and edges[state].get(token) == known:
            edges[state][token] = clone
            state = link[state]
        return clone

    def _new_state(self, edges: dict[int, int], length: int) -> int:
        self.edges.append(edges)
        self.count.append(0)
        self.end.append(-1)
        self._link.append(0)
        self._length.append(length)
        self._previous_end.append(-1)
        return len(self.edges) - 1

    def matches(self, shortest: int, longest: int) -> Iterator[tuple[int, int, int]]:
        """Suffixes of the text that occurred before, the longest first.

        Args:
            shortest: fewest tokens of a match.
            longest: most tokens of a match, at most `max_length`.

        Yields:
            The number of tokens that match, the place after the latest earlier occurrence, and the state.
        """
        state = self._text[1]
        while state and self._length[self._link[state]] >= longest:
            state = self._link[state]
        while state and self._length[state] >= shortest:
            if self._previous_end[state] >= 0:
                yield min(self._length[state], longest), self._previous_end[state] + 1, state
            state = self._link[state]

    def followers(self, state: int, count: int) -> list[int]:
        """Latest places of up to `count` different tokens that followed a match, the latest first.

        Args:
            state: from `matches`, with `longest` below `max_length`, since one token more is looked at.
            count: most places.
        """
        return heapq.nlargest(count, (self.end[follower] for follower in self.edges[state].values()))

    def suffix(self) -> Match:
        """The last `max_length - 1` tokens of the text."""
        return self._shortened(self._text[1], self._length[self._text[0]])

    def find(self, tokens: Sequence[int]) -> Match:
        """The longest suffix of `tokens` that occurs in a text, of at most `max_length - 1` tokens."""
        match = NOTHING
        for token in tokens:
            match = self.step(match, token)
        return match

    def step(self, match: Match, token: int) -> Match:
        """The longest suffix that occurs in a text after one more token.

        Args:
            match: the same before that token.
            token: follows it.
        """
        state, length = match
        while token not in self.edges[state]:
            if not state:
                return NOTHING
            state = self._link[state]
            length = self._length[state]
        return self._shortened(self.edges[state][token], length + 1)

    def _shortened(self, state: int, length: int) -> Match:
        """Room is left for a follower, so that its count is up to date too."""
        while self._length[self._link[state]] >= self._max_length - 1:
            state = self._link[state]
        return state, min(length, self._max_length - 1)

    def contexts(self, match: Match, shortest: int) -> Iterator[Match]:
        """The suffixes of a match that something followed, the longest first, one for each set of places.

        Args:
            match: from `suffix`, `find` or `step`.
            shortest: fewest tokens.
        """
        state, length = match
        while state and length >= shortest:
            if self.edges[state]:
                yield state, length
            state = self._link[state]
            length = self._length[state]
