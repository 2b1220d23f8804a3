"""What the target is asked: prompts at hand, or those that it makes up itself."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from texts import data
from texts.chats import Message, Turns
from texts.decoding import Decoder, Draw

Chat = list[Message]
# Of the draws of a part; 1 are its answers.
PROMPTS = 0
# Draws of a part's prompts until one of them is usable.
TRIES = 4


class Seen:
    """Prompts so far. What shares most of its four-word runs with one of them is the same prompt again."""

    RUN, ALIKE = 4, 0.6

    def __init__(self, prompts: Iterable[str] = ()) -> None:
        self._whole: set[str] = set()
        self._owners: dict[tuple[str, ...], int] = {}
        for prompt in prompts:
            self.add(prompt)

    def add(self, prompt: str) -> bool:
        """Takes a prompt; False where it is there already."""
        text = data.normalised(prompt)
        words = text.split()
        runs = {tuple(words[at : at + self.RUN]) for at in range(max(1, len(words) - self.RUN + 1))}
        shared = Counter(self._owners[run] for run in runs if run in self._owners)
        if text in self._whole or max(shared.values(), default=0) > self.ALIKE * len(runs):
            return False
        for run in runs:
            self._owners.setdefault(run, len(self._whole))
        self._whole.add(text)
        return True


class Prompts(Protocol):
    """Where prompts come from."""

    def part(self, number: int) -> list[Chat] | None:
        """The chats of a part, without the assistant's turns; None where there are no more. Parts come in order."""
        ...


@dataclass(frozen=True)
class Given:
    """Prompts at hand, each once.

    Attributes:
        chats: without the assistant's turns.
        rows: of a part.
    """

    chats: Sequence[Chat]
    rows: int

    @classmethod
    def of(cls, turns: Turns, source: str, split: str, rows: int, longest: int) -> Given:
        """Reads them with `datasets`.

        Args:
            turns: of the target.
            source: a file, a folder or a hub id, with a column `messages` or `prompt`.
            split: of it.
            rows: of a part.
            longest: tokens of the first question; what is longer is left out.

        Raises:
            ValueError: there are none.
        """
        seen, chats = Seen(), []
        for row in data.read(source, split):
            question = data.first_question(row)
            if question.strip() and len(turns.encode(question)) <= longest and seen.add(question):
                chats.append([message for message in data.chat_of(row) if message["role"] in ("system", "user")])
        if not chats:
            raise ValueError(f"{source} holds no prompt of 1 to {longest} tokens")
        return cls(chats, rows)

    def refuse_changed(self, asked: Sequence[str]) -> None:
        """Compares what was asked in the parts so far with what would have been.

        Raises:
            ValueError: it is something else.
        """
        if list(asked) != [data.first_question({"messages": chat}) for chat in self.chats[: len(asked)]]:
            raise ValueError(
                "--prompts no longer begins with what was asked so far: add new ones behind, or take another --out"
            )

    def part(self, number: int) -> list[Chat] | None:
        """See `Prompts`."""
        return list(self.chats[number * self.rows : (number + 1) * self.rows]) or None


@dataclass(frozen=True)
class Drawing:
    """How prompts are drawn.

    Attributes:
        temperatures: of rows, in turn.
        top_k: tokens to draw from.
        seed: of all parts.
    """

    temperatures: Sequence[float]
    top_k: int
    seed: int


@dataclass(frozen=True)
class MadeUp:
    """Prompts that the target makes up: it continues the header before a user's text (Magpie, arXiv 2406.08464).

    Attributes:
        decoder: continues rows until the user's turn ends.
        turns: of the target.
        rows: of a part; fewer are usable.
        longest: tokens; what has not ended by then is left out.
        drawing: how.
        seen: prompts of the parts so far.
    """

    decoder: Decoder
    turns: Turns
    rows: int
    longest: int
    drawing: Drawing
    seen: Seen = field(default_factory=Seen)

    def part(self, number: int) -> list[Chat] | None:
        """See `Prompts`.

        Raises:
            ValueError: none is usable and new.
        """
        warmth = list(itertools.islice(itertools.cycle(self.drawing.temperatures), self.rows))
        for again in range(TRIES):
            seed = data.seed_of(self.drawing.seed, number, PROMPTS, *((again,) if again else ()))
            draw = Draw.seeded(warmth, self.drawing.top_k, seed, self.decoder.model.device)
            texts = self.decoder([self.turns.header] * self.rows, self.longest, draw)
            found = [self.turns.question(text.ids[text.prompt :]) for text in texts]
            if new := [question for question in found if usable(question) and self.seen.add(question)]:
                return [[{"role": "user", "content": question}] for question in new]
        raise ValueError(
            f"none of {TRIES} times {self.rows} prompts that the target made up is usable and new, such as "
            f"{found[0]!r}: pass --prompts, or other --question_temperatures"
        )


def usable(question: str) -> bool:
    """Whether it is a text of some words, and neither noise nor one thing over and over."""
    words = question.split()
    wordlike = sum(character.isalnum() or character.isspace() for character in question)
    return (
        len(words) >= 3
        and "\N{REPLACEMENT CHARACTER}" not in question
        and wordlike >= 0.7 * len(question)
        and len(set(words)) >= 0.5 * len(words)
    )
