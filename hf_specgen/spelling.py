"""What the ids of two vocabularies stand for in characters, and which of them say the same."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)


class Piece(NamedTuple):
    """A token of a text: its id, and the characters that it stands for."""

    id: int
    start: int
    end: int


@dataclass(frozen=True, eq=False)
class Speller:
    """A tokenizer as two functions that keep nothing: what an id adds to a text, and the tokens of a text.

    It works on a copy of the user's tokenizer, whose padding and truncation may change under one's hands; on text a
    special token is spelled like any other word there.

    Attributes:
        spelled: for each id the bytes that it adds in the middle of a text; None for special tokens and unused ids.
        special: special tokens by their text.
        lead: what the tokenizer puts before every text, such as a BOS.
        eos: the id of the tokenizer's own EOS.
        inserts: it puts a space before a text; and before the text behind a special token.
    """

    spelled: list[bytes | None]
    special: dict[str, int]
    lead: list[int]
    eos: int | None
    inserts: tuple[bool, bool]
    _backend: Any

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> Speller:
        """The speller of a tokenizer, made once for each live tokenizer.

        Raises:
            ValueError: the tokenizer does not say which characters a token stands for.
        """
        known = _spellers.get(tokenizer)
        if known is None or known[0] != len(tokenizer):  # tokens may have been added since
            known = _spellers[tokenizer] = len(tokenizer), _speller(tokenizer)
        return known[1]

    def encode(self, text: str) -> list[Piece]:
        """The tokens of a text, without any that the tokenizer puts around it."""
        encoding = self._backend.encode(text, add_special_tokens=False)
        return [Piece(i, *span) for i, span in zip(encoding.ids, encoding.offsets, strict=True)]

    def continued(self, before: str, text: str) -> list[Piece]:
        """The tokens of `text` where it follows `before`, whose own tokens are settled. Places count from `text` on."""
        pieces = self._behind(before, text) if before else self.encode(text)
        return self.by_itself(text) if pieces is None else pieces

    def by_itself(self, text: str) -> list[Piece]:
        """The tokens of `text` where tokens end before it, without the space that some tokenizers put before a text."""
        return self._behind("a" if text[:1].isspace() else "\n", text) or []

    def _behind(self, before: str, text: str) -> list[Piece] | None:
        border, pieces = len(before), self.encode(before + text)
        if any(piece.start < border < piece.end for piece in pieces):
            return None
        return [Piece(i, start - border, end - border) for i, start, end in pieces if start >= border]


@dataclass(frozen=True, eq=False)
class Shared:
    """The ids of two vocabularies that stand for the same bytes, each with one partner at most.

    Special tokens are partners where they have the same text; the two EOS are partners in any case.

    Attributes:
        target: `(shared,)` ids of the target.
        drafter: `(shared,)` their partners.
        alone: ids of the drafter without a partner.
        to_target: the target's id for a drafter's.
        to_drafter: the drafter's id for a target's.
    """

    target: Tensor
    drafter: Tensor
    alone: Tensor
    to_target: dict[int, int]
    to_drafter: dict[int, int]


@dataclass(frozen=True)
class Pair:
    """The vocabularies of a target and of a drafter.

    Attributes:
        target: the target's speller.
        drafter: the drafter's.
        size: rows of the target's table.
        shared: the ids that say the same, within the two models' tables.
    """

    target: Speller
    drafter: Speller
    size: int
    shared: Shared

    @classmethod
    def of(cls, tokenizers: tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase], sizes: tuple[int, int]) -> Pair:
        """What two tokenizers share, looked up once for each live pair.

        Args:
            tokenizers: the target's and the drafter's.
            sizes: rows of the two models' tables. Ids beyond have no partner.

        Raises:
            ValueError: a tokenizer does not say which characters a token stands for.
        """
        target, drafter = map(Speller.of, tokenizers)
        known = _pairs.setdefault(target, WeakKeyDictionary()).setdefault(drafter, {})
        if sizes not in known:
            known[sizes] = _shared(target, drafter, sizes)
        return cls(target, drafter, sizes[0], known[sizes])


_spellers: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[int, Speller]] = WeakKeyDictionary()
_pairs: WeakKeyDictionary[Speller, WeakKeyDictionary[Speller, dict[tuple[int, int], Shared]]] = WeakKeyDictionary()


def _shared(target: Speller, drafter: Speller, sizes: tuple[int, int]) -> Shared:
    by_bytes: dict[bytes, int] = {}
    for i, spelled in enumerate(target.spelled[: sizes[0]]):
        if spelled:
            by_bytes.setdefault(spelled, i)
    to_target: dict[int, int] = {}
    for i, spelled in enumerate(drafter.spelled[: sizes[1]]):
        partner = by_bytes.pop(spelled, None) if spelled else None
        if partner is not None:
            to_target[i] = partner
    specials = [(i, target.special[text]) for text, i in drafter.special.items() if text in target.special]
    if drafter.eos is not None and target.eos is not None:
        specials.append((drafter.eos, target.eos))
    taken = set(to_target.values())
    for i, partner in specials:
        if i < sizes[1] and partner < sizes[0] and i not in to_target and partner not in taken:
            to_target[i] = partner
            taken.add(partner)
    return Shared(
        target=torch.tensor(list(to_target.values()), dtype=torch.long),
        drafter=torch.tensor(list(to_target), dtype=torch.long),
        alone=torch.tensor([i for i in range(sizes[1]) if i not in to_target], dtype=torch.long),
        to_target=to_target,
        to_drafter={ours: i for i, ours in to_target.items()},
    )


def _speller(tokenizer: PreTrainedTokenizerBase) -> Speller:
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} does not say which characters a token stands for; "
            "load one that is backed by the tokenizers library (use_fast=True)"
        )
    original: Any = tokenizer.backend_tokenizer
    described = original.to_str()
    backend = type(original).from_str(described)
    backend.no_padding()
    backend.no_truncation()
    framed = backend.encode("a")
    lead = framed.ids[: [*framed.special_tokens_mask, 0].index(0)]
    # Some post-processors take the spaces out of a token's span.
    backend.post_processor = None
    special = {str(token): i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special |= {str(tokenizer.convert_ids_to_tokens(i)): i for i in tokenizer.all_special_ids}
    spelled = _spelled(backend, json.loads(described)["decoder"], set(special.values()))
    inserts = [
        b"".join(spelled[i] or b"" for i in backend.encode(before + "a").ids).startswith(b" ")
        for before in ("", next(iter(special), ""))
    ]
    backend.encode_special_tokens = True
    return Speller(spelled, special, lead, tokenizer.eos_token_id, (inserts[0], inserts[1]), backend)


def _spelled(backend: Any, decoder: Any, special: set[int]) -> list[bytes | None]:
    """See `Speller.spelled`."""
    pieces = {i: piece for piece, i in backend.get_vocab().items() if i not in special}
    spelled: list[bytes | None] = [None] * (max(pieces, default=-1) + 1)
    if '"ByteLevel"' in json.dumps(decoder):
        byte_of = {letter: byte for byte, letter in enumerate(_letters())}
        for i, piece in pieces.items():
            # Tokens that were added are not written in the alphabet of bytes.
            in_bytes = all(letter in byte_of for letter in piece)
            spelled[i] = bytes(byte_of[letter] for letter in piece) if in_bytes else piece.encode()
        return spelled
    # What a decoder makes of a token in the middle of a text shows behind another token.
    ids = list(pieces)
    alone = backend.decode_batch([[i] for i in ids], skip_special_tokens=False)
    anchor, before = next(((i, text) for i, text in zip(ids, alone, strict=True) if text.isalnum()), (None, ""))
    pairs = [[i] if anchor is None else [anchor, i] for i in ids]
    for i, text in zip(ids, backend.decode_batch(pairs, skip_special_tokens=False), strict=True):
        as_byte = re.fullmatch("<0x([0-9A-F]{2})>", pieces[i]) if '"ByteFallback"' in json.dumps(decoder) else None
        spelled[i] = bytes.fromhex(as_byte[1]) if as_byte else text.removeprefix(before).encode()
    return spelled


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it can be printed."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]
