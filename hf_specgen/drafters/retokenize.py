"""The same text in two vocabularies: the target's rows in the drafter's tokens, and what it drafts in the target's.

Only the end of a text is ever tokenised again. What a token is depends on the text before and behind it, but not from
afar: of the window that is encoded anew the first tokens are there as context, and the old tokens go over into the new
ones at the first place where both have a border between tokens.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from hf_specgen.spelling import Pair, Piece, Speller

# Tokens of the window that are context only; tokens that later text may still change; where no space comes, the most.
LEFT, RIGHT, MOST = 6, 8, 64


class Translation:
    """One row of the target in the drafter's tokens, kept up to date at a cost that does not grow with the text.

    Bytes that do not make a character yet are held back. What is no text at all, special tokens, has a partner or is
    left out; on both of its sides tokens are made apart.

    Args:
        pair: the vocabularies.

    Attributes:
        ids: the drafter's, what its tokenizer puts before a text included.
        tail: the end of the text that they stand for, as far as it may be tokenised again.
    """

    def __init__(self, pair: Pair) -> None:
        self.ids = list(pair.drafter.lead)
        self.tail = ""
        self._target, self._drafter, self._partners = pair.target, pair.drafter, pair.shared.to_drafter
        self._pieces: list[Piece] = []  # the last ids, which stand for the tail
        self._whole = True  # the tail is all of a text, so that there is no context before it
        self._silent = True  # there was no text yet
        self._read = 0
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        """The text ends within a character."""
        return bool(self._characters.getstate()[0])

    def update(self, ids: Sequence[int], frozen: int = 0) -> int:
        """Reads on.

        Args:
            ids: the target's row; it only ever grows.
            frozen: so many of the drafter's tokens must stay as they are.

        Returns:
            How many of the drafter's tokens stayed as they were.
        """
        kept, spelled, text = len(self.ids), self._target.spelled, bytearray()
        for token in ids[self._read :]:
            said = spelled[token] if token < len(spelled) else None
            if said is not None:
                text += said
                continue
            kept = min(kept, self._append(bytes(text), frozen, final=True))
            text.clear()
            self._mark(token)
        kept = min(kept, self._append(bytes(text), frozen))
        self._read = len(ids)
        if not self.ids:
            self.ids.append(self._drafter.eos or 0)  # a model needs something to go on
        return kept

    def _mark(self, token: int) -> None:
        """A special token: the text before it is closed."""
        partner = self._partners.get(token)
        opening = self._silent and partner in self._drafter.lead  # the drafter's tokenizer has put it there already
        if partner is not None and not opening:
            self.ids.append(partner)
        self.tail, self._pieces, self._whole = "", [], True

    def _append(self, spelled: bytes, frozen: int, final: bool = False) -> int:
        """Adds text; returns as `update` does."""
        text = self._characters.decode(spelled, final)
        if final:
            self._characters.reset()
        if text and not self._pieces and self._target.inserts[not self._silent]:
            text = text.removeprefix(" ")
        self._silent = self._silent and not text
        old, window = self._pieces, len(self.ids) - len(self._pieces)
        if not text:
            return len(self.ids)
        self._pieces = self._spliced(text, frozen - window)
        self.tail += text
        stayed = 0
        for before, after in zip(old, self._pieces, strict=False):
            if before.id != after.id:
                break
            stayed += 1
        self.ids[window + stayed :] = [piece.id for piece in self._pieces[stayed:]]
        self._forget()
        return window + stayed

    def _spliced(self, text: str, frozen: int) -> list[Piece]:
        """The tail's tokens with `text` behind it: old ones as far as they hold, new ones from there on."""
        old, new, end = self._pieces, self._drafter.encode(self.tail + text), len(self.tail)
        least = max(0 if self._whole else LEFT, frozen)
        if least == 0:
            return new
        borders = {piece.start: place for place, piece in reversed(list(enumerate(new))) if _border(new, place)}
        for place in range(min(least, len(old)), len(old) + 1):
            start = old[place].start if place < len(old) else end
            if start in borders and _border([*old, Piece(0, end, end)], place):
                return old[:place] + new[borders[start] :]
        if frozen <= 0:
            return new
        return old + [Piece(i, start + end, stop + end) for i, start, stop in self._drafter.by_itself(text)]

    def _forget(self) -> None:
        """Takes what is settled out of the window, which begins anew before a word, where tokens mostly do."""
        pieces, text = self._pieces, self.tail
        last = len(pieces) - LEFT - RIGHT
        for place in range(last, 0, -1):
            at = pieces[place - 1].end
            before_word = [letter.isspace() for letter in text[at - 1 : at + 2]] == [False, True, False]
            if _border(pieces, place) and (before_word or last - place >= MOST):
                self._pieces = [Piece(i, start - at, end - at) for i, start, end in pieces[place:]]
                self.tail, self._whole = text[at:], False
                return


def _border(pieces: Sequence[Piece], place: int) -> bool:
    """Whether a token begins behind the end of the one before; those that share a character do not."""
    return place == 0 or pieces[place - 1].end <= pieces[place].start


def text_of(ids: Sequence[int], speller: Speller) -> tuple[str, list[int], bool]:
    """Drafted tokens as text.

    Args:
        ids: up to a special token they count.
        speller: of their vocabulary.

    Returns:
        The text, whole characters only; for each token that counts where in it it begins; and whether the text ends
        with its last token, not within a character.
    """
    characters = codecs.getincrementaldecoder("utf-8")("replace")
    text, starts = "", []
    for token in ids:
        spelled = speller.spelled[token] if token < len(speller.spelled) else None
        if spelled is None:
            break
        starts.append(len(text))
        text += characters.decode(spelled)
    return text, starts, not characters.getstate()[0]
