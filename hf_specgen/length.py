"""How many tokens to draft next, and which of them to check.

`Auto` maximises expected tokens per second. A pass over a draft yields one token and, for each node, the chance that
the walk comes by: the product of the chances along its path. It costs what passes of its width were measured to cost.
Width 0, plain decoding, is one of the candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Protocol

from hf_specgen.acceptance import MEMORY, Acceptance, Guess, Trust, Watched
from hf_specgen.costs import Costs, Platform, rungs
from hf_specgen.draft import Draft
from hf_specgen.stats import Step

# What a drafter without confidences is believed to get right until it is seen.
UNSEEN = 0.7
# A drafter is cheap, and asked in every round, while a draft costs less than this part of a round.
CHEAP = 0.05
# How deep to ask while nobody knows what a draft costs.
FIRST_DEPTH = 5
# Rounds without a dear drafter before it gets another try; doubled with each try in vain, up to the last.
PATIENCE, MOST_PATIENCE = 16, 512
# How many standard deviations of doubt a cost is given credit for: what was not tried for long gets a try.
CREDIT = 0.3
# The most nodes of a tree that a session is asked for, unless one path alone is longer; the fewest of a dear drafter.
MOST_NODES, FEWEST_NODES = 64, 8
# What drafting must promise beyond plain decoding: of several estimates the highest is mostly too high.
MARGIN = 0.03


class Controller(Protocol):
    """Decides how deep to draft and learns from what came of it. One controller lives as long as one call."""

    def depth(self) -> int:
        """The longest path to ask for in the coming round; 0 for plain decoding."""
        ...

    def nodes(self) -> int:
        """The most nodes of a tree to ask for in the coming round; called after `depth`."""
        ...

    def choose(self, draft: Draft) -> Draft:
        """What of a session's draft is to be checked: all of it, some nodes, or none."""
        ...

    def update(self, step: Step) -> None:
        """Takes note of a round; the first is the prompt's pass."""
        ...


@dataclass(frozen=True)
class Situation:
    """What a controller is told about a call.

    Attributes:
        batch: rows.
        drafter: its name, to know its costs again.
        platform: what the target runs on.
        costs: of this target, as far as they are known.
    """

    batch: int
    drafter: str = ""
    platform: Platform = field(default_factory=Platform)
    costs: Costs = field(default_factory=Costs)


@dataclass(frozen=True)
class Fixed:
    """The same number of tokens every round.

    Args:
        tokens: how many.
    """

    tokens: int

    def __post_init__(self) -> None:
        """Refuses what cannot be a count."""
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 0:
            raise ValueError(f"num_assistant_tokens is {self.tokens!r}; it must be a whole number, 0 or more")

    def start(self, situation: Situation) -> Controller:
        """Itself, since it keeps nothing."""
        return self

    def depth(self) -> int:
        """See `Controller`."""
        return self.tokens

    def nodes(self) -> int:
        """As many as there may be."""
        return MOST_NODES

    def choose(self, draft: Draft) -> Draft:
        """All of it."""
        return draft

    def update(self, step: Step) -> None:
        """Learns nothing."""


@dataclass(frozen=True)
class Auto:
    """As many tokens as pay, from measured costs and measured acceptance; none where none do.

    A drafter that costs next to nothing is asked in every round, and what it says is compared with what came also where
    it was not checked: so a turn from prose to quotation is noticed. One that costs something is asked for the depth
    that pays; while none does it rests, and gets a try now and then.

    Args:
        costs: what passes cost; without it the target's own, kept as long as it lives.
        most: the deepest draft to ask for.
    """

    costs: Costs | None = None
    most: int = 32

    def __post_init__(self) -> None:
        """Refuses what cannot be a depth, and what are no costs."""
        if not isinstance(self.most, int) or self.most < 1:
            raise ValueError(f"most must be a whole number, 1 or more, not {self.most!r}")
        if not isinstance(self.costs, Costs | None):
            raise ValueError(f"costs={self.costs!r} is no hf_specgen.Costs")

    def start(self, situation: Situation) -> Controller:
        """A controller for one call."""
        costs = situation.costs if self.costs is None else self.costs
        return AutoController(replace(situation, costs=costs), self.most)


class Length(Protocol):
    """What `num_assistant_tokens=` may be beside a number and "auto": `Fixed`, `Auto`, or one of your own."""

    def start(self, situation: Situation) -> Controller:
        """A controller for one call."""
        ...


class AutoController:
    """See `Auto`.

    Args:
        situation: of the call.
        most: the deepest draft to ask for.
    """

    def __init__(self, situation: Situation, most: int) -> None:
        self.most = most
        self.costs = situation.costs
        self.passes = situation.costs.passes(situation.batch, situation.platform)
        self.drafts = situation.costs.drafts(situation.drafter, situation.batch, situation.platform)
        self.by_confidence = Acceptance()
        self.by_depth = Acceptance()
        self.trust = Trust()
        self._rounds = self._drafts = 0
        self._live = situation.batch  # rows that go on
        self._round_s = self.passes(0)  # of late
        # Of the round: the depth asked for, each row's draft, and what of it is checked promises.
        self._asked = 0
        self._guesses: list[Guess] = []
        self._promised: list[float] = []
        self._watched: list[list[Watched]] = [[] for _ in range(situation.batch)]
        self._nodes = MOST_NODES
        self._bushiness = 1.0  # nodes a level, of those of the last draft that were best to be checked
        self._rested, self._patience = 0, PATIENCE

    def depth(self) -> int:
        """See `Controller`."""
        self._guesses = []
        self._promised = []
        self._nodes = MOST_NODES
        if not any(self.drafts.seen) and not self.costs.frozen:
            self._asked = min(FIRST_DEPTH, self.most)
        elif self.drafts(self.most) < CHEAP * self._round_s:
            self._asked = self.most
        else:
            self._asked = self._paying_depth()
            # A dear drafter need not make many more nodes than are checked; the best may come to be more.
            self._nodes = min(MOST_NODES, max(FEWEST_NODES, 2 * round(self._asked * self._bushiness)))
        return self._asked

    def nodes(self) -> int:
        """See `Controller`."""
        return self._nodes

    def _paying_depth(self) -> int:
        """For a drafter that costs something: the best depth, if it pays, or if it is time for a try."""
        promised = [0.0]
        reached = 1.0
        for depth in range(1, self.most + 1):
            reached *= self.by_depth.chance(depth, UNSEEN)
            promised.append(promised[-1] + reached)

        def rate(depth: int, trust: float) -> float:
            cost = self._cost(round(depth * self._bushiness)) + self.drafts(depth)
            return (1 + trust * promised[depth]) / cost

        best = max(rungs(self.most), key=lambda depth: rate(depth, 1.0))
        if rate(best, self.trust(promised[best])) > 1 / self._cost(0):
            self._rested, self._patience = 0, PATIENCE
        else:
            self._rested += 1
            if self._rested < self._patience:
                return 0
            self._rested, self._patience = 0, min(2 * self._patience, MOST_PATIENCE)
        self._promised = [promised[best]] * len(self._watched)
        return best

    def _cost(self, width: int) -> float:
        """Seconds of a pass as the choice sees them: less some of the doubt, and plain passes less the margin."""
        return self.passes(width) * math.exp(-CREDIT * self.passes.doubt(width) - (0 if width else MARGIN))

    def choose(self, draft: Draft) -> Draft:
        """See `Controller`.

        What lies on an accelerator is not read back, and so not pruned. Neither is what was drawn from probabilities:
        an accept rule that reads them is exact only if nothing is taken back for what it is.
        """
        self._bushiness = max(1.0, draft.nodes / self._asked) if draft.nodes and self._asked else self._bushiness
        drawn, unread = draft.probs is not None, draft.tokens.device.type != "cpu"
        if drawn or unread or draft.confidence is None or not draft.nodes:
            return draft
        self._guesses = Guess.rows(draft)
        ranked = [guess.likeliest(self._chance) for guess in self._guesses]
        totals = [list(accumulate((chance for chance, _ in row), initial=0.0)) for row in ranked]

        def promised(width: int) -> list[float]:
            return [total[min(width, len(total) - 1)] for total in totals]

        def rate(width: int, trust: float) -> float:
            return (self._live + trust * sum(promised(width))) / self._cost(width)

        widths = [draft.nodes] if draft.whole else rungs(draft.nodes)
        width = max(widths, key=lambda width: rate(width, 1.0))
        trust = self.trust(sum(promised(width)) / self._live)
        width = max(widths, key=lambda width: rate(width, trust))
        self._bushiness = max(1.0, width / self._asked) if self._asked else self._bushiness
        self._promised = promised(width)
        kept = [
            guess.part([place for _, place in row[:width]]) for guess, row in zip(self._guesses, ranked, strict=True)
        ]
        if rate(width, trust) > rate(0, trust):
            return draft if width == draft.nodes else Draft.of_nodes(kept)
        for watched, total, nodes in zip(self._watched, self._promised, kept, strict=True):
            if nodes:
                watched.append(Watched(total, nodes))
        self._promised = []
        return Draft.empty(len(kept))

    def _chance(self, confidence: float) -> float:
        return self.by_confidence.chance(_kind(confidence), confidence)

    def update(self, step: Step) -> None:
        """See `Controller`."""
        self._rounds += 1
        if self._rounds == 1:  # the prompt's pass
            return
        self._live = sum(map(bool, step.tokens)) or 1
        self.costs.learn(self.passes, step.width, step.seconds - step.draft_s)
        if not self.costs.frozen:
            self._round_s = MEMORY * self._round_s + (1 - MEMORY) * step.seconds
        if self._asked:
            self._drafts += 1
            if self._drafts > 1:  # the first draft of a call reads the prompt
                self.costs.learn(self.drafts, self._asked, step.draft_s)
        self.by_confidence.fade()
        self.by_depth.fade()
        for row, tokens in enumerate(step.tokens):
            if tokens:
                self._learn(row, tokens, step)

    def _learn(self, row: int, tokens: Sequence[int], step: Step) -> None:
        """What a row's new tokens say of its drafts."""
        for watched in self._watched[row].copy():
            if not watched.follow(tokens):
                self.trust.saw(watched.promised, watched.kept)
                self._watched[row].remove(watched)
        if step.drafted[row] and self._promised:
            self.trust.saw(self._promised[row], step.accepted[row])
        if self._guesses:
            self._compare(self._guesses[row], tokens)
            return
        for depth in range(1, min(step.accepted[row] + 1, step.drafted[row], self._asked) + 1):
            self.by_depth.saw(depth, UNSEEN, depth <= step.accepted[row])

    def _compare(self, guess: Guess, tokens: Sequence[int]) -> None:
        """Sees which of a row's guesses were right, checked or not, as far as tokens have come."""
        stand = 0
        for depth, token in enumerate(tokens, 1):
            places = guess.below.get(stand)
            if places is None:
                return
            right = [place for place in places if guess.tokens[place - 1] == token]
            self.by_depth.saw(depth, UNSEEN, bool(right))
            for place in places:
                confidence = guess.confidence[place - 1]
                self.by_confidence.saw(_kind(confidence), confidence, place in right)
            if not right:
                return
            stand = right[0]


def _kind(confidence: float) -> int:
    """Confidences that are seen together."""
    return min(int(confidence * 20), 19)


def as_length(asked: int | str | Length | None) -> Length:
    """What `num_assistant_tokens=` means.

    Args:
        asked: a whole number, "auto" or None for `Auto()`, or an object such as `Fixed(5)`.

    Raises:
        ValueError: for anything else.
    """
    if asked is None or asked == "auto":
        return Auto()
    if isinstance(asked, int):
        return Fixed(asked)
    if isinstance(asked, str | float | type) or not callable(getattr(asked, "start", None)):
        raise ValueError(
            f"num_assistant_tokens is {asked!r}; it must be a whole number, 0 or more, or 'auto', or an object such as "
            "hf_specgen.Auto() or hf_specgen.Fixed(5)"
        )
    return asked


def within(depth: int, room: Sequence[int]) -> tuple[int, ...]:
    """The depth each row may use: one token of a row's remaining `room` is always the target's own."""
    return tuple(max(0, min(depth, left - 1)) for left in room)
