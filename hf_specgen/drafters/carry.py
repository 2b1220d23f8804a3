"""From the drafter's tokens to the target's, with the drafter's probabilities: three ways to carry them over."""

from __future__ import annotations

import math
from collections.abc import Sequence

from hf_specgen.drafters.retokenize import text_of
from hf_specgen.spelling import Pair, Piece

# A token of the target and the drafter's probability of it.
Guess = tuple[int, float]


def by_place(starts: Sequence[int], chances: Sequence[float], pieces: Sequence[Piece]) -> list[float]:
    """A token of the target is as likely as all tokens of the drafter that begin within it; others follow from those.

    Args:
        starts: for each token of the drafter the character at which it begins.
        chances: its probability.
        pieces: the target's tokens of the same text.
    """
    carried, place = [], 0
    for piece in pieces:
        chance = 1.0
        while place < len(starts) and starts[place] < piece.end:
            chance *= chances[place]
            place += 1
        carried.append(chance)
    return carried


def by_warping(words: Sequence[str], chances: Sequence[float], others: Sequence[str]) -> list[float]:
    """The same by dynamic time warping (TokenTiming, arXiv 2510.15545): tokens are paired by what they look like.

    Of all ways to go through both rows of tokens in step, one or both moving on, the one is taken on which tokens that
    stand side by side differ least. It needs no places, and so also works where the two texts are not quite the same.

    Args:
        words: the text of each token of the drafter.
        chances: its probability.
        others: the text of each token of the target.
    """
    if not words or not others:
        return [1.0] * len(others)
    total = [[math.inf] * (len(others) + 1) for _ in range(len(words) + 1)]
    total[0][0] = 0.0
    for i, word in enumerate(words, 1):
        for j, other in enumerate(others, 1):
            total[i][j] = unlike(word, other) + min(total[i - 1][j - 1], total[i - 1][j], total[i][j - 1])
    carried, i, j = [1.0] * len(others), len(words), len(others)
    while i and j:
        before = min((total[i - 1][j - 1], i - 1, j - 1), (total[i - 1][j], i - 1, j), (total[i][j - 1], i, j - 1))
        if before[1] < i:  # the first token of the target that stands beside this one has its chance
            carried[j - 1] *= chances[i - 1]
        _, i, j = before
    return carried


def unlike(word: str, other: str) -> float:
    """0 for equal tokens, 1 for such that neither begin nor end alike."""
    if word == other:
        return 0.0
    shorter, longer = sorted((word, other), key=len)
    if shorter and shorter in longer:
        return 1 - len(shorter) / len(longer)
    alike = max(_agreeing(word, other), _agreeing(word[::-1], other[::-1]))
    return 1 - alike / max(len(longer), 1)


def _agreeing(word: str, other: str) -> int:
    """How many leading letters two words share."""
    pairs = zip(word, other, strict=False)
    return next((place for place, (one, two) in enumerate(pairs) if one != two), min(len(word), len(other)))


class NGrams:
    """Which several tokens of the drafter make one of the target: OmniDraft's map (arXiv 2507.02659), learned as we go.

    Args:
        pair: the vocabularies; ids that they share need no map.
    """

    def __init__(self, pair: Pair) -> None:
        self._target, self._drafter, self._shared = pair.target, pair.drafter, pair.shared
        self._known: dict[tuple[int, ...], int] = {}
        self._seen: set[int] = set()
        self._longest = 1

    def __len__(self) -> int:
        """N-grams known."""
        return len(self._known)

    def learn(self, ids: Sequence[int]) -> None:
        """Takes note of tokens that the target has used."""
        for token in ids:
            if token in self._seen or token in self._shared.to_drafter or token >= len(self._target.spelled):
                continue
            self._seen.add(token)
            spelled = self._target.spelled[token] or b""
            text = spelled.decode("utf-8", "ignore")
            if not text or text.encode() != spelled:
                continue
            ngram = tuple(piece.id for piece in self._drafter.by_itself(text))
            said = [self._drafter.spelled[i] or b"" for i in ngram if i < len(self._drafter.spelled)]
            if len(ngram) > 1 and b"".join(said) == spelled:
                self._known.setdefault(ngram, token)
                self._longest = max(self._longest, len(ngram))

    def merged(self, drafted: Sequence[int], chances: Sequence[float]) -> list[Guess]:
        """What was drafted, up to the first token that says nothing to the target; the longest n-gram comes first.

        Args:
            drafted: the drafter's ids.
            chances: the probability of each; an n-gram's is the product.
        """
        guesses: list[Guess] = []
        place = 0
        while place < len(drafted):
            for length in range(min(self._longest, len(drafted) - place), 0, -1):
                ngram = tuple(drafted[place : place + length])
                token = self._shared.to_target.get(ngram[0]) if length == 1 else self._known.get(ngram)
                if token is not None:
                    guesses.append((token, math.prod(chances[place : place + length])))
                    place += length
                    break
            else:
                break
        return guesses


def respelled(before: str, drafted: Sequence[int], chances: Sequence[float], pair: Pair, warp: bool) -> list[Guess]:
    """The drafted text in the target's tokens (SLEM, arXiv 2502.05202), as far as it is whole characters.

    Args:
        before: the end of the text that it follows.
        drafted: the drafter's ids; a special token ends them.
        chances: the probability of each.
        pair: the vocabularies.
        warp: carry the probabilities over by dynamic time warping, not by place.
    """
    text, starts, whole = text_of(drafted, pair.drafter)
    pieces = pair.target.continued(before, text) if text else []
    if warp:
        ends = [*starts, len(text)][1:]
        words = [text[start:end] for start, end in zip(starts, ends, strict=True)]
        carried = by_warping(words, chances, [text[piece.start : piece.end] for piece in pieces])
    else:
        carried = by_place(starts, chances, pieces)
    guesses: list[Guess] = []
    for piece, chance in zip(pieces, carried, strict=True):
        if piece.id >= len(pair.target.spelled) or pair.target.spelled[piece.id] is None:
            return guesses  # the target has no word for it
        guesses.append((piece.id, chance))
    if whole and len(starts) < len(drafted):  # a special token, perhaps the end
        partner = pair.shared.to_target.get(drafted[len(starts)])
        if partner is not None:
            guesses.append((partner, chances[len(starts)]))
    return guesses
