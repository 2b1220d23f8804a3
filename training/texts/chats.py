"""Where turns begin and end, as a tokenizer's chat template says it; and what of a chat is the assistant's."""

from __future__ import annotations

import itertools
import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

IGNORED = -100
Message = Mapping[str, str]
# First token and the one behind the last.
Spans = list[tuple[int, int]]
# Texts that no template writes by itself, and that none trims or escapes.
MARK = "Xq{}markZ"
GENERATION = re.compile(r"\{%-?\s*generation\b")


@dataclass(frozen=True)
class Turns:
    """A chat template taken apart around what is said.

    Attributes:
        tokenizer: with the template.
    """

    tokenizer: PreTrainedTokenizerBase

    def __post_init__(self) -> None:
        """Refuses a tokenizer that cannot tell who speaks.

        Raises:
            ValueError: it has no template, or cannot tell where its tokens stand in a text.
        """
        if not self.tokenizer.is_fast:
            raise ValueError(f"{type(self.tokenizer).__name__} is a slow tokenizer: it tells no places in a text")
        if self.tokenizer.chat_template is None:
            name = self.tokenizer.name_or_path or "this model"
            raise ValueError(
                f"the tokenizer of {name} has no chat template, so nothing tells who speaks: use a chat model's, or "
                "set tokenizer.chat_template and save it"
            )

    # ----------------------------------------------------------------------------------------------------- the pieces

    def render(self, messages: Sequence[Message], answering: bool = False) -> str:
        """A chat as text.

        Args:
            messages: with `role` and `content`.
            answering: the assistant's next turn is begun.

        Raises:
            ValueError: the template does not take such a chat.
        """
        try:
            text: Any = self.tokenizer.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=answering
            )
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ValueError(f"the chat template refuses a chat of {roles}: {error}") from error
        return str(text)

    def glue(self, roles: Sequence[str], answering: bool = False) -> list[str]:
        """What the template writes before, between and behind what is said.

        Args:
            roles: who speaks.
            answering: the assistant's next turn is begun.

        Raises:
            ValueError: it does not show every message once, in order.
        """
        marks = [MARK.format(place) for place in range(len(roles))]
        chat = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        pieces, rest = [], self.render(chat, answering)
        for mark in marks:
            piece, found, rest = rest.partition(mark)
            if not found or mark in rest:
                raise ValueError(f"the chat template does not show each message of a chat of {', '.join(roles)} once")
            pieces.append(piece)
        return [*pieces, rest]

    def encode(self, text: str) -> list[int]:
        """Ids of a rendered text; special tokens are those that the template has written."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    @cached_property
    def header(self) -> list[int]:
        """What stands before a user's first text: what the target continues to ask itself."""
        return self.encode(self.glue(["user"])[0])

    @cached_property
    def user_closing(self) -> str:
        """What stands behind a user's text, without blanks around it."""
        return self.glue(["user"], answering=True)[1].strip()

    @cached_property
    def user_ends(self) -> frozenset[int]:
        """Ids that end a user's turn; only EOS where the template ends it by text."""
        return frozenset({self.tokenizer.eos_token_id, self.first_special(self.user_closing)}.difference([None]))

    def question(self, ids: Sequence[int]) -> str:
        """The user's text out of what continues `header`; nothing where it does not end, or holds a special token."""
        if ids[-1] in self.user_ends:
            said = self._text(ids[:-1])
            return "" if self.special.intersection(ids[:-1]) else said.strip()
        closing = self.user_closing.split()[:1]
        said, ended, _ = self._text(ids).partition(closing[0]) if closing else ("", "", "")
        return said.strip() if ended and self.special.isdisjoint(self.encode(said)) else ""

    def follow(self, said: Sequence[int], asked: Message, question: Message) -> list[int] | None:
        """What follows the assistant's answer when the user goes on, up to where the assistant speaks again.

        Args:
            said: ids so far; the last one ends the assistant's turn.
            asked: what the user said last.
            question: what the user says next.

        Returns:
            Ids; None where the answer was ended by another token than the template's, or not at all.
        """
        answer = {"role": "assistant", "content": MARK}
        behind = self.render([asked, answer, question], answering=True).rpartition(MARK)[2]
        first, *rest = self.encode(behind.lstrip())
        return rest if first in self.special and first == said[-1] else None

    @cached_property
    def special(self) -> frozenset[int]:
        """Ids that are no text."""
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset([*self.tokenizer.all_special_ids, *(token for token, kind in added if kind.special)])

    @cached_property
    def ends(self) -> frozenset[int]:
        """Ids that end the assistant's turn: the template's own, and the tokenizer's EOS."""
        closings = (self.glue(["user", "assistant"])[2], self.glue(["user", "assistant", "user"])[2])
        return frozenset({self.tokenizer.eos_token_id, *map(self.first_special, closings)}.difference([None]))

    def first_special(self, glue: str) -> int | None:
        """The special token that a piece of the template begins with; blanks before it do not count."""
        first = self.encode(glue.lstrip())[:1]
        return first[0] if first and first[0] in self.special else None

    # ---------------------------------------------------------------------------------------------------------- labels

    def label(self, messages: Sequence[Message]) -> tuple[list[int], list[int]]:
        """A chat as ids, and its labels: the ids of what the assistant says and of the token that ends its turn.

        A template's `{% generation %}` marks tell what the assistant says. Without them it is found between what the
        template writes around every message.

        Args:
            messages: with `role` and `content`, of any number of turns.

        Raises:
            ValueError: the template changes what was said.
        """
        tagged = GENERATION.search(str(self.tokenizer.chat_template))
        ids, spans = self._marked(messages) if tagged else self._found(messages)
        labels = [IGNORED] * len(ids)
        for start, end in spans:
            for place in self._turn(ids, start, end):
                labels[place] = ids[place]
        return ids, labels

    def _turn(self, ids: Sequence[int], start: int, end: int) -> list[int]:
        """Places of what the assistant says from `start` to before `end`, and of the token that ends its turn."""
        for place in range(start, end):
            if ids[place] in self.ends:  # marked already; behind it the target says nothing
                return list(range(start, place + 1))
        closing = end
        while closing < len(ids) and ids[closing] not in self.special and self._blank(ids[closing]):
            closing += 1
        ended = closing < len(ids) and ids[closing] in self.special
        return [*range(start, end), *([closing] if ended else [])]

    def _blank(self, token: int) -> bool:
        return not self._text([token]).strip()

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids)))

    def _marked(self, messages: Sequence[Message]) -> tuple[list[int], Spans]:
        """Ids, and where the template's marks say that the assistant speaks."""
        rendered: Any = self.tokenizer.apply_chat_template(
            [dict(message) for message in messages], return_dict=True, return_assistant_tokens_mask=True
        )
        turns = [0, *map(int, rendered["assistant_masks"]), 0]
        changes = [place for place, (before, after) in enumerate(itertools.pairwise(turns)) if before != after]
        return list(rendered["input_ids"]), list(zip(changes[::2], changes[1::2], strict=True))

    def _found(self, messages: Sequence[Message]) -> tuple[list[int], Spans]:
        """Ids, and where the assistant speaks by what the template writes around every message."""
        text, spans, at = self.render(messages), [], 0
        pieces = self.glue([message["role"] for message in messages])
        said = [message["content"] for message in messages]
        if text != _joined(pieces, said):
            said = [content.strip() for content in said]  # many templates trim
        if text != _joined(pieces, said):
            raise ValueError(
                "the chat template changes what was said (it may leave out earlier thoughts), so that the assistant's "
                "text is not found again: train on one turn a row, or use a template with {% generation %}"
            )
        encoded = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        starts, ends = zip(*encoded["offset_mapping"], strict=True)
        for piece, content, message in zip(pieces, said, messages, strict=False):
            at += len(piece)
            if message["role"] == "assistant":
                # From the token that ends behind its first letter to the one that begins behind its last.
                spans.append((bisect_right(ends, at), bisect_left(starts, at + len(content))))
            at += len(content)
        return list(encoded["input_ids"]), spans


def _joined(pieces: Sequence[str], said: Sequence[str]) -> str:
    return "".join(piece + content for piece, content in zip(pieces, [*said, ""], strict=True))
