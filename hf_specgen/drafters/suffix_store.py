"""Earlier outputs for `SuffixLookup`: an index that calls and threads share, bounded in bytes, kept in a file."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hf_specgen.drafters.suffixes import BEGIN, Match, SuffixAutomaton, TextEnd
from hf_specgen.files import write_whole

# Longest match. Also what a text takes along into the next part, so that matches reach across.
LONGEST = 32
# An automaton cannot forget, so there are several, of which the oldest goes.
PARTS = 4
LEAST_BYTES = 2**20
# Measured (CPython 3.11, 64 bits) on random and on repetitive text: what a state and what an edge takes.
STATE_BYTES, EDGE_BYTES, TOKEN_BYTES = 260, 60, 40

FORMAT = "hf_specgen.SuffixStore 1"


@dataclass(eq=False)
class _Part:
    """An index of some texts."""

    automaton: SuffixAutomaton = field(default_factory=lambda: SuffixAutomaton(LONGEST + 1))
    texts: list[list[int]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        """About what it takes in memory."""
        states, edges, tokens = len(self.automaton.edges), self.automaton.edge_count, self.automaton.size
        return STATE_BYTES * states + EDGE_BYTES * edges + TOKEN_BYTES * tokens


@dataclass(slots=True)
class StoredText:
    """A text that may go on: `SuffixStore.add` gives and takes it."""

    part: _Part
    tokens: list[int]
    end: TextEnd = BEGIN


class SuffixStore:
    """Earlier outputs, for drafts across calls and threads. It holds users' text: share it as you would share that.

    What a session generates is added at each of its proposals, so rows of one batch and calls in other threads see it
    at once. Prompts are not added, and neither are the tokens of a call's last round, since nobody tells a session that
    it ended. Under `matching` the content never changes a text; under the other accept rules, which follow the drafts,
    the same seed repeats its text only with the same content. The ids are those of one vocabulary: keep a store for
    each.

    The texts are indexed by a few suffix automata, one after the other. When `max_bytes` are used up, the oldest is
    dropped whole; so from three quarters of it to all of it stay in use.

    Args:
        max_bytes: the most memory, by an estimate that is right within a fifth. A token takes about 500 bytes.

    Attributes:
        lock: held by whoever reads or writes the index.
    """

    def __init__(self, max_bytes: int = 64 * 2**20) -> None:
        if max_bytes < LEAST_BYTES:
            raise ValueError(f"max_bytes must be at least {LEAST_BYTES}, not {max_bytes}")
        self.max_bytes = max_bytes
        self.lock = threading.Lock()
        self._parts = [_Part()]
        self._largest = -1

    def __len__(self) -> int:
        """Tokens held; some count twice, where a text goes on from one automaton to the next."""
        with self.lock:
            return sum(part.automaton.size for part in self._parts)

    @property
    def bytes(self) -> int:
        """About what it takes in memory."""
        with self.lock:
            return sum(part.bytes for part in self._parts)

    @property
    def largest_id(self) -> int:
        """The largest id that was ever added since it was empty; -1 where there is none."""
        return self._largest

    def clear(self) -> None:
        """Forgets everything. Calls in progress go on to add what they generate from here on."""
        with self.lock:
            self._parts = [_Part()]
            self._largest = -1

    def add(self, tokens: Iterable[int], text: StoredText | None = None) -> StoredText | None:
        """Appends tokens to a text.

        Args:
            tokens: ids that follow the text's earlier ones.
            text: what the last call for this text returned; None begins one.

        Returns:
            The text, to go on with; None as long as it has no tokens.
        """
        with self.lock:
            for token in tokens:
                if text is None or text.part is not self._parts[-1]:
                    text = self._begin(text)
                text.end = text.part.automaton.grow(text.end, (token,))
                text.tokens.append(token)
                self._largest = max(self._largest, token)
                self._make_room()
        return text

    def _begin(self, earlier: StoredText | None) -> StoredText:
        """A text in the newest part. What was cleared or dropped does not come along."""
        part = self._parts[-1]
        known = earlier is not None and any(earlier.part is held for held in self._parts)
        tokens = earlier.tokens[-LONGEST:] if earlier is not None and known else []
        part.texts.append(tokens)
        return StoredText(part, tokens, part.automaton.grow(BEGIN, tokens))

    def _make_room(self) -> None:
        if self._parts[-1].bytes > self.max_bytes // PARTS:
            self._parts.append(_Part())
        while sum(part.bytes for part in self._parts) > self.max_bytes:
            del self._parts[0]

    def find(self, tokens: Sequence[int]) -> list[tuple[SuffixAutomaton, Match]]:
        """The longest match of the last tokens in each automaton, the latest first; the caller holds `lock`."""
        last = tokens[-LONGEST:]
        found = [(part.automaton, part.automaton.find(last)) for part in reversed(self._parts)]
        return [(automaton, match) for automaton, match in found if match[1]]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the texts as JSON. The file holds users' text as the store does."""
        with self.lock:
            texts = [list(text) for part in self._parts for text in part.texts]
        write_whole(path, json.dumps({"format": FORMAT, "texts": texts}))

    @classmethod
    def load(cls, path: str | os.PathLike[str], max_bytes: int = 64 * 2**20) -> SuffixStore:
        """A store with what `save` wrote; of too much the latest stays.

        Args:
            path: of the file.
            max_bytes: see the class.

        Raises:
            ValueError: the file is something else.
        """
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{path} was not written by SuffixStore.save: {error}") from error
        texts = saved.get("texts") if isinstance(saved, dict) and saved.get("format") == FORMAT else None
        if not isinstance(texts, list) or not all(isinstance(text, list) and _are_ids(text) for text in texts):
            raise ValueError(f"{path} was not written by SuffixStore.save: it must hold lists of token ids")
        store = cls(max_bytes)
        for text in texts:
            store.add(text)
        return store


def _are_ids(values: list[object]) -> bool:
    return all(type(value) is int and value >= 0 for value in values)
