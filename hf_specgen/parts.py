"""One drafter in a call, alone or as a part of a combination: what it costs, what it promises, and what comes of it.

Of a tree it promises what the nodes bring that are worth checking, and not what all of them would: its costs are those
of the nodes that are checked.
"""

from __future__ import annotations

from collections.abc import Sequence

from hf_specgen.acceptance import Guess, Watched, prunable
from hf_specgen.costs import LADDER, Curve, rungs
from hf_specgen.draft import Draft, Node
from hf_specgen.record import Record

# What a drafter is believed to get right until it is seen: a try costs less than a draft that is checked in vain, so
# rather too little. And what it may get right at best: one that would not pay even then is not tried.
UNSEEN, HOPED = 0.5, 0.9
# A drafter is cheap, and asked in every round, if its deepest draft costs less than this part of a round.
CHEAP = 0.03
# How deep to ask for a try, and while nobody knows what a draft costs.
TRY_DEPTH = 1


def hoped(depth: int) -> float:
    """The tokens of a draft that are accepted at best."""
    return HOPED * (1 - HOPED**depth) / (1 - HOPED)


class Part:
    """See above.

    Args:
        drafts: seconds of a draft, by depth.
        record: what is known of it from call to call, and learnt on.
        frozen: the seconds are not learnt any more.
        batch: rows.
        prompt: positions of the prompt, of all rows.

    Attributes:
        bushiness: nodes a level, of those of its last draft that were best to be checked.
        depth: asked for in this round.
        dear: it costs something.
        tried: it is asked only to see how right it is.
        in_vain: it was asked for a draft that counts, and nothing of that is checked.
        deepest: the deepest draft whose costs are known.
        unread: positions of the prompt until its first draft of the call, which may have to read them.
    """

    def __init__(self, drafts: Curve, record: Record, frozen: bool, batch: int, prompt: int = 0) -> None:
        self.drafts = drafts
        self.record = record
        self.frozen = frozen
        self.bushiness = 1.0
        self.depth = 0
        self.dear = self.tried = self.in_vain = False
        self.deepest = LADDER[-1] if frozen else 0
        self.unread = prompt
        self._asked = 0  # times
        self._draft: Draft | None = None
        self._watched: list[list[tuple[Watched, int]]] = [[] for _ in range(batch)]

    @property
    def known(self) -> bool:
        """Its costs are."""
        return self.deepest > 0

    def seconds(self, depth: int) -> float:
        """Of a draft; deeper than was ever asked for in proportion to the depth."""
        deepest = self.deepest
        return self.drafts(depth) if depth <= deepest or not deepest else self.drafts(deepest) * depth / deepest

    def cheap_depth(self, most: int, round_s: float) -> int:
        """How deep it drafts for next to nothing, beside a round of so many seconds: `most`, or 0 if not as deep.

        What is not known to cost more deep down is asked for somewhat more each time.
        """
        depths = (depth for depth in reversed(rungs(most)) if depth == most or depth > self.deepest)
        return next((depth for depth in depths if self.known and self.seconds(depth) < CHEAP * round_s), 0)

    def promised(self, most: int) -> list[float]:
        """The tokens that may be expected of a draft, by its depth from 0 to `most`."""
        promised, reached = [0.0], 1.0
        for depth in range(1, most + 1):
            reached *= self.record.by_depth.chance(depth, UNSEEN)
            promised.append(promised[-1] + reached)
        return promised

    def begin(self) -> None:
        """A round begins, in which nobody has asked it yet."""
        self.depth, self.tried, self.in_vain, self._draft = 0, False, False, None
        if not self.frozen:
            self.deepest = max((depth for depth, seen in zip(LADDER, self.drafts.seen, strict=True) if seen), default=0)

    def ask(self, depth: int, dear: bool, tried: bool = False) -> None:
        """It is asked for a draft.

        Args:
            depth: how deep.
            dear: see `Part`.
            tried: see `Part`.
        """
        self.depth, self.dear, self.tried = depth, dear, tried
        self._asked += 1
        if not tried:
            self.record.used()

    def may_be_used(self) -> bool:
        """Whether its draft may count if it pays; see `Record.may_begin`."""
        return not self.unread or self.record.may_begin()

    def may_be_tried(self, plain_s: float) -> bool:
        """Whether it is time for a try, and it may cost something still.

        Args:
            plain_s: seconds of a plain pass.
        """
        self.record.rests()
        if not self.record.may_read(self.reading_s / plain_s):
            return False
        return not self.known or self.record.may_be_tried(self.seconds(TRY_DEPTH) / plain_s)

    @property
    def reading_s(self) -> float:
        """Seconds that its next draft takes to read the prompt first, as far as is known."""
        return self.record.reading_s(self.unread)

    @property
    def dearly_asked(self) -> bool:
        """Whether it was asked in this round for a draft that costs something and is to be used."""
        return self.depth > 0 and self.dear and not self.tried

    def drafted(self, draft: Draft) -> None:
        """Takes its draft, to see what comes of it."""
        self._draft = draft
        self.in_vain = self.dearly_asked and not draft.nodes
        if draft.nodes and self.dearly_asked:
            self.bushiness = max(1.0, draft.nodes / self.depth)

    def best_checked(self, nodes: Sequence[Sequence[Node]], checked: bool) -> None:
        """Takes note of what is best checked of all drafts. Nodes of its own are some of them, or none.

        Args:
            nodes: of each row.
            checked: they are, since that is better than plain decoding.
        """
        if self._draft is not None and self._draft.nodes and self.dearly_asked:
            rows = zip(Guess.rows(self._draft), nodes, strict=True)
            most = max(guess.among(best) for guess, best in rows)
            self.bushiness = max(1.0, most / self.depth)
            self.in_vain = not (checked and most)

    def took(self, seconds: float, round_s: float) -> float | None:
        """Takes note of a draft's seconds; those to be learnt, if they are.

        The first draft of a call reads the prompt. It tells what the later ones cost only if it cost nothing.
        """
        if self.unread and not self.frozen:
            # While nobody knows what a draft costs, it counts as reading: a call may have no second one to tell.
            self.record.has_read(self.unread, seconds - self.draft_s)
        self.unread = 0
        return seconds if self._asked > 1 or seconds < CHEAP * round_s else None

    @property
    def draft_s(self) -> float:
        """Seconds of this round's draft without reading the prompt; 0 while nobody knows."""
        return self.drafts(self.depth) if self.known else 0.0

    def follow(self, tokens: Sequence[Sequence[int]]) -> bool:
        """Sees how right its drafts are, checked or not, as far as tokens have come.

        Returns:
            Whether the text began as it drafted in this round.
        """
        if self._draft is not None and self._draft.nodes:
            self.record.by_depth.fade()
            for watching, nodes in zip(self._watched, self._likeliest(self._draft), strict=True):
                if nodes:
                    watching.append((Watched(0.0, nodes), self.depth))
        hit = False
        for new, watching in zip(tokens, self._watched, strict=True):
            for watched, asked in watching.copy():
                start = watched.kept + 1
                # A text that goes on behind a draft's end: what it was asked for and did not say, it has not right.
                right = [False] if watched.over and new else watched.follow(new)
                for depth, hits in enumerate(right, start):
                    self.record.by_depth.saw(depth, UNSEEN, hits)
                if watched.over and (right[-1:] == [False] or watched.kept >= asked):
                    watching.remove((watched, asked))
                hit = hit or (start == 1 and watched.kept >= start)
        if self.tried:
            self.record.tried(hit)
        return hit

    def _likeliest(self, draft: Draft) -> list[list[Node]]:
        """Each row's nodes, as many as are counted on to be checked: what is promised is promised of these."""
        most = max(1, round(self.depth * self.bushiness)) if prunable(draft) else draft.nodes
        guesses = Guess.rows(draft)
        ranked = [guess.likeliest(lambda said: said) for guess in guesses]
        return [guess.part([place for _, place in row[:most]]) for guess, row in zip(guesses, ranked, strict=True)]
