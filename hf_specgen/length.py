"""How many tokens to draft next, and which of them to check.

`Auto` maximises expected tokens per second. A pass over a draft yields one token and, for each node, the chance that
the walk comes by: the product of the chances along its path. It costs what passes of its width were measured to cost.
Width 0, plain decoding, is one of the candidates.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple, Protocol

from hf_specgen.acceptance import MEMORY, Acceptance, Guess, Trust, Watched, prunable
from hf_specgen.costs import Costs, Platform, rungs
from hf_specgen.draft import Draft, Node
from hf_specgen.parts import TRY_DEPTH, Part, hoped
from hf_specgen.record import RIGHT
from hf_specgen.stats import Step

# How many standard deviations of doubt a cost is given credit for: what was not tried for long gets a try.
CREDIT = 0.3
# The most nodes of a tree that a session is asked for, unless one path alone is longer; the fewest of a dear drafter.
MOST_NODES, FEWEST_NODES = 64, 8
# What drafting must promise beyond plain decoding: of several estimates the highest is mostly too high.
MARGIN = 0.03


class Controller(Protocol):
    """Decides how deep to draft and learns from what came of it. One controller lives as long as one call."""

    def depth(self, most: int) -> int:
        """The longest path to ask for in the coming round; 0 for plain decoding.

        Args:
            most: the longest that any row has room for; what is asked beyond it is cut off.
        """
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
        parts: the names of a combination's parts, where each is asked about by itself; see `hf_specgen.draft.Shares`.
        prompt: positions of the prompt, of all rows, padding too.
    """

    batch: int
    drafter: str = ""
    platform: Platform = field(default_factory=Platform)
    costs: Costs = field(default_factory=Costs)
    parts: tuple[str, ...] = ()
    prompt: int = 0


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

    def depth(self, most: int) -> int:
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


class Share(NamedTuple):
    """What a part of a combination may draft.

    Attributes:
        depth, nodes: at most.
        tried: only to see how right it is: its draft is not to be used.
    """

    depth: int
    nodes: int
    tried: bool


@dataclass
class Book:
    """What was seen of drafts that the same drafters made together."""

    by_confidence: Acceptance = field(default_factory=Acceptance)
    trust: Trust = field(default_factory=Trust)


@dataclass
class Weighed:
    """A draft on the host, and how much of it would best be checked.

    Attributes:
        guesses: each row's draft.
        kept: each row's likeliest nodes.
        promised: the tokens they promise, by row.
        trust: the part of these to expect.
        width: of a pass over them; 0 where plain decoding is better.
        rate: tokens a second.
    """

    guesses: list[Guess]
    kept: list[list[Node]]
    promised: list[float]
    trust: float
    width: int
    rate: float


class AutoController:
    """See `Auto`.

    Args:
        situation: of the call.
        most: the deepest draft to ask for.

    Attributes:
        apart: the drafter is a combination, each part of which is asked about by itself.
        parts: by name; of any other drafter one, itself.
    """

    def __init__(self, situation: Situation, most: int) -> None:
        self.most = most
        self.costs = situation.costs
        self.passes = situation.costs.passes(situation.batch, situation.platform)
        self.apart = bool(situation.parts)
        self.parts: dict[str, Part] = {}
        for name in situation.parts or (situation.drafter,):
            drafts = self.costs.drafts(name, situation.batch, situation.platform)
            record = self.costs.record(name)
            self.parts[name] = Part(drafts, record, self.costs.frozen, situation.batch, situation.prompt)
        self._whole = situation.drafter
        self._books: defaultdict[tuple[str, ...], Book] = defaultdict(Book)  # by the dear parts that drafted along
        self._rounds = 0
        self._live = situation.batch  # rows that go on
        self._round_s = self.passes(0)  # of late
        # Of the round: what is checked, and what would be without the dear parts.
        self._checked: Weighed | None = None
        self._without: Weighed | None = None
        self._watched: list[list[tuple[Trust, Watched]]] = [[] for _ in range(situation.batch)]
        self._nodes = MOST_NODES
        self._room = 0  # for tokens of the row that has most

    def depth(self, most: int) -> int:
        """See `Controller`."""
        self._checked = self._without = None
        self._nodes = MOST_NODES
        for part in self.parts.values():
            part.begin()
        self._room = most + 1
        most = min(most, self.most)
        if self.apart:
            return most
        share = self.share(self._whole, [most] * len(self._watched), Draft.empty(len(self._watched)))
        self._nodes = share.nodes
        return share.depth

    def nodes(self) -> int:
        """See `Controller`."""
        return self._nodes

    def cheap(self, name: str) -> bool:
        """Whether a part costs next to nothing, as far as is known."""
        return self.parts[name].cheap_depth(self.most, self._round_s) > 0

    def share(self, name: str, room: Sequence[int], beside: Draft) -> Share:
        """What a part may draft.

        Args:
            name: of the part.
            room: the longest path that each row may have; 0 for one that it would not draft for.
            beside: what would be proposed without it.
        """
        part, most = self.parts[name], min(self.most, max(room))
        if not most:
            return Share(0, 1, tried=False)
        if cheap := part.cheap_depth(self.most, self._round_s):
            depth = min(cheap, most)
            part.ask(depth, dear=False)
            return Share(depth, MOST_NODES, tried=False)
        self._without = self._weighed(beside, self._books[()])
        promised = part.promised(most)
        rate = self._rate_of(part, room, self._without)
        depth = max(rungs(most), key=lambda depth: rate(depth, promised[depth]))
        pays = part.known and part.may_be_used() and rate(depth, promised[depth]) > self._without.rate
        tried = not pays and part.may_be_tried(self.passes(0))
        tried = tried and any(rate(d, hoped(d)) > self._without.rate for d in rungs(self.most))
        depth = depth if pays else TRY_DEPTH if tried else 0
        if not depth:
            return Share(0, 1, tried=False)
        part.ask(depth, dear=True, tried=tried)
        # It need not make many more nodes than are checked; the best may come to be more.
        return Share(depth, min(MOST_NODES, max(FEWEST_NODES, 2 * round(depth * part.bushiness))), tried)

    def _rate_of(self, part: Part, room: Sequence[int], without: Weighed) -> Callable[[int, float], float]:
        """Tokens a second with a part's draft: by its depth, and the tokens a row to expect of it.

        Of what is expected of it and of what is there without it the better counts, so that no copy is drafted twice.
        """
        # Of reading the prompt, what a token still to come must pay.
        reading_s = part.reading_s / (self._live * part.record.ahead(self._room))
        others = [without.trust * tokens if without.width else 0.0 for tokens in without.promised]

        def rate(depth: int, mine: float) -> float:
            tokens = sum(max(mine, other) if ask else other for ask, other in zip(room, others, strict=True))
            width = max(1, round(depth * part.bushiness), without.width)
            gained = self._live + tokens
            return gained / (self._cost(width) + part.seconds(depth) + gained * reading_s)

        return rate

    def _cost(self, width: int) -> float:
        """Seconds of a pass as the choice sees them: less some of the doubt, and plain passes less the margin."""
        return self.passes(width) * math.exp(-CREDIT * self.passes.doubt(width) - (0 if width else MARGIN))

    def took(self, name: str, draft: Draft) -> None:
        """Takes a part's draft, to see what comes of it."""
        self.parts[name].drafted(draft)

    def choose(self, draft: Draft) -> Draft:
        """See `Controller`.

        What lies on an accelerator is not read back, and so not pruned. Neither is what was drawn from probabilities:
        an accept rule that reads them is exact only if nothing is taken back for what it is.
        """
        if not self.apart:
            part = self.parts[self._whole]
            part.drafted(draft)
            if part.tried:
                return Draft.empty(len(draft.tokens), draft.tokens.device)
        if not prunable(draft) or not draft.nodes:
            return draft
        weighed = self._checked = self._weighed(draft, self._book)
        for part in self.parts.values():
            part.best_checked(weighed.kept, weighed.width > 0)
        if weighed.width:
            return draft if weighed.width == draft.nodes else Draft.of_nodes(weighed.kept)
        self._watch(weighed, self._book)
        return Draft.empty(len(weighed.kept))

    @property
    def _book(self) -> Book:
        """Of those that drafted in this round."""
        dear = [name for name, part in self.parts.items() if part.dearly_asked]
        return self._books[tuple(dear) if self.apart else ()]

    def _weighed(self, draft: Draft, book: Book) -> Weighed:
        """How much of a draft would best be checked; nothing of one that cannot be read."""
        if not prunable(draft) or not draft.nodes:
            rows = len(draft.tokens)
            return Weighed([], [[]] * rows, [0.0] * rows, 1.0, 0, self._live / self._cost(0))
        guesses = Guess.rows(draft)
        ranked = [guess.likeliest(lambda said: book.by_confidence.chance(_kind(said), said)) for guess in guesses]
        totals = [list(accumulate((chance for chance, _ in row), initial=0.0)) for row in ranked]

        def promised(width: int) -> list[float]:
            return [total[min(width, len(total) - 1)] for total in totals]

        def rate(width: int, trust: float) -> float:
            return (self._live + trust * sum(promised(width))) / self._cost(width)

        widths = [draft.nodes] if draft.whole else rungs(draft.nodes)
        width = max(widths, key=lambda width: rate(width, 1.0))
        trust = book.trust(sum(promised(width)) / self._live)
        width = max(widths, key=lambda width: rate(width, trust))
        kept = [guess.part([place for _, place in row[:width]]) for guess, row in zip(guesses, ranked, strict=True)]
        best, plain = rate(width, trust), rate(0, trust)
        return Weighed(guesses, kept, promised(width), trust, width if best > plain else 0, max(best, plain))

    def _watch(self, weighed: Weighed, book: Book) -> None:
        """A draft that is not checked: what comes shows how its promises would have been kept."""
        for watching, promised, nodes in zip(self._watched, weighed.promised, weighed.kept, strict=True):
            if nodes:
                watching.append((book.trust, Watched(promised, nodes)))

    def update(self, step: Step) -> None:
        """See `Controller`."""
        self._rounds += 1
        if self._rounds == 1:  # the prompt's pass
            return
        self._live = sum(map(bool, step.tokens)) or 1
        self.costs.learn(self.passes, step.width, step.seconds - step.draft_s)
        if not self.costs.frozen:
            self._round_s = MEMORY * self._round_s + (1 - MEMORY) * step.seconds
        gained = sum(map(len, step.tokens)) / self._live
        pass_s, plain_s = self.passes(step.width), self.passes(0)
        for name, part in self.parts.items():
            if part.depth:
                spent = step.part_s.get(name, 0.0) if self.apart else step.draft_s
                took = part.took(spent, self._round_s)
                if part.dearly_asked:
                    part.record.checked(spent / plain_s, not part.in_vain)
                if took is not None:
                    self.costs.learn(part.drafts, part.depth, took)
            lost_s = self._lost(part, step, part.follow(step.tokens))
            part.record.lose(lost_s / plain_s, pass_s / plain_s)
            part.record.goes_on(gained, self._room - gained)
        self._learn(step)

    def _lost(self, part: Part, step: Step, right: bool) -> float:
        """Seconds that a dear part's draft cost more than the same tokens would have without it.

        A try was right if the text began as it said, and counts for less then.
        """
        without = self._without
        if not part.depth or not part.dear:
            return 0.0
        if part.tried or without is None:
            return part.draft_s * (RIGHT if right else 1.0)
        alone = [
            min(len(tokens), 1 + sum(Watched(0.0, nodes if without.width else ()).follow(tokens)))
            for tokens, nodes in zip(step.tokens, without.kept, strict=True)
        ]
        plain_s = self.passes(without.width) * sum(map(len, step.tokens)) / max(1, sum(alone))
        return part.draft_s + self.passes(step.width) - plain_s

    def _learn(self, step: Step) -> None:
        """What new tokens say of drafts as wholes."""
        book, plain = self._book, self._books[()]
        if book is not plain and self._without is not None:
            self._watch(self._without, plain)
        for known in (plain,) if book is plain else (plain, book):
            known.by_confidence.fade()
        for row, tokens in enumerate(step.tokens):
            if not tokens:
                continue
            for trust, watched in self._watched[row].copy():
                watched.follow(tokens)
                if watched.over:
                    trust.saw(watched.promised, watched.kept)
                    self._watched[row].remove((trust, watched))
            if self._checked is not None:
                if step.drafted[row] and self._checked.width:
                    book.trust.saw(self._checked.promised[row], step.accepted[row])
                _compare(self._checked.guesses[row], tokens, book.by_confidence)
            if book is not plain and self._without is not None and self._without.guesses:
                _compare(self._without.guesses[row], tokens, plain.by_confidence)


def _compare(guess: Guess, tokens: Sequence[int], seen: Acceptance) -> None:
    """Sees which of a row's guesses were right, checked or not, as far as tokens have come."""
    stand = 0
    for token in tokens:
        places = guess.below.get(stand)
        if places is None:
            return
        right = [place for place in places if guess.tokens[place - 1] == token]
        for place in places:
            confidence = guess.confidence[place - 1]
            seen.saw(_kind(confidence), confidence, place in right)
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
