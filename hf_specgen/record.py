"""What is known of a drafter from one call to another: how often it is right, and when it may be tried again.

A dear drafter is not asked where it does not pay, and then nothing is learnt of it. So it gets a try now and then: a
short draft that nobody checks, compared with the text that comes. What tries cost, and drafts that did not pay, is
booked, and the next try waits until a small share of the time has made up for it. A try that was right counts for less,
or a good drafter that is not cheap would never be found. Reading the prompt, as most drafters do before their first
draft of a call, has an account of its own: once it is read, tries are as cheap as ever.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hf_specgen.acceptance import Acceptance

# Rounds that a dear drafter rests between two tries: twice as many after one in vain, a quarter after one that was
# right, and the first number again when it was of use.
PATIENCE, MOST_PATIENCE = 8, 64
# A dear drafter gets a try while what was lost to it and the try come to no more than so many plain passes, and this
# share of the time is forgiven. No more is ever held against it than so many, so that it is not shut out.
LOSABLE, FORGIVEN, HELD = 0.65, 0.005, 1.3
# The part of its cost by which a try counts that was right.
RIGHT = 0.3
# A prompt is read for a try only if that is no more than this share of the rounds that it rested since the last; and it
# counts as so many plain passes at most, so that no prompt is too long for ever.
READING, MOST_READING = 0.0025, 2.5
# Tokens that a text is expected to go on for, at most and until texts were seen.
LONG = 128


@dataclass
class Record:
    """See above.

    Attributes:
        by_depth: how often it is right.
        lost: to it of late, in plain passes.
        patience: rounds that it rests between two tries.
        rested: rounds that it rested since it was asked; the first try comes at once.
        in_vain: lost to drafts of which nothing was checked, since the last of which something was, in plain passes.
        since: rounds that it rested since it read a prompt, if it ever did.
        read_s: seconds that reading took, by the number of binary digits of the prompt's positions.
        length: tokens that a text has when it ends by itself, as far as is known.
        came: tokens that the rows of this text have gained on average.
        cut: the text had no room to go on.
    """

    by_depth: Acceptance = field(default_factory=Acceptance)
    lost: float = 0.0
    patience: int = PATIENCE
    rested: int = PATIENCE
    in_vain: float = 0.0
    since: float = math.inf
    read_s: dict[int, float] = field(default_factory=dict)
    length: float = LONG
    came: float = 0.0
    cut: bool = True

    def again(self) -> Record:
        """What another call begins with."""
        length = min(max(self.length, self.came) if self.cut else (self.length + self.came) / 2, LONG)
        read_s = self.read_s.copy()  # of a call of its own, as calls may run at the same time
        return replace(self, by_depth=self.by_depth.again(), read_s=read_s, length=length, came=0.0, cut=True)

    def goes_on(self, tokens: float, room: float) -> None:
        """Takes note of tokens that came.

        Args:
            tokens: that a row gained, on average.
            room: for how many more there is.
        """
        self.came += tokens
        self.cut = room < 1

    def ahead(self, room: int) -> float:
        """Tokens that are expected still to come.

        Args:
            room: for how many there is.
        """
        return min(room, max(1.0, self.length - self.came))

    def rests(self) -> None:
        """A round begins in which it would not pay."""
        self.rested += 1
        self.since += 1

    def may_be_tried(self, cost: float) -> bool:
        """Whether it is time for a try, and it may cost something still.

        Args:
            cost: of the try, in plain passes. Even one that costs more than may be lost gets its turn.
        """
        return self.rested >= self.patience and self.lost + min(cost, LOSABLE) <= LOSABLE

    def may_begin(self) -> bool:
        """Whether a call's first draft may count if it pays, whatever it costs: else short ones would, at a text's end.

        In texts that soon copy, calls may end one after another before anything of a draft was worth checking.
        """
        return self.in_vain <= LOSABLE

    def may_read(self, cost: float) -> bool:
        """Whether it may read a prompt for a try.

        Args:
            cost: of that, in plain passes.
        """
        return min(cost, MOST_READING) <= READING * self.since

    def used(self) -> None:
        """It pays, and is asked for a draft that counts."""
        self.rested, self.patience = 0, PATIENCE

    def tried(self, right: bool) -> None:
        """It was asked for a try.

        Args:
            right: the text began as it said.
        """
        self.rested = 0
        self.patience = max(1, self.patience // 4) if right else min(2 * self.patience, MOST_PATIENCE)

    def checked(self, cost: float, something: bool) -> None:
        """Takes note of a draft that was to count.

        Args:
            cost: of it, in plain passes.
            something: of it was checked.
        """
        self.in_vain = 0.0 if something else min(self.in_vain + cost, HELD)

    def lose(self, lost: float, took: float) -> None:
        """Takes note of a round.

        Args:
            lost: to the drafter, in plain passes; gains make up for earlier losses only.
            took: the round's pass, in plain passes.
        """
        self.lost = min(max(self.lost + lost - FORGIVEN * took, 0.0), HELD)
        self.in_vain = max(self.in_vain - FORGIVEN * took, 0.0)

    def reading_s(self, positions: int) -> float:
        """Seconds that it will take to read a prompt.

        A longer one than was ever read is believed to cost no more, since a drafter that is believed too dear is not
        asked, and so nothing would tell otherwise; a shorter one costs less in proportion.

        Args:
            positions: of it, of all rows.
        """
        size = positions.bit_length()
        if known := [seen for seen in self.read_s if seen <= size]:
            return self.read_s[max(known)]
        longer = min(self.read_s, default=None)
        return self.read_s[longer] * positions / 2**longer if longer else 0.0

    def has_read(self, positions: int, seconds: float) -> None:
        """Takes note of a prompt that was read; of what was believed before half is kept.

        Args:
            positions: of it, of all rows.
            seconds: measured.
        """
        size, seconds = positions.bit_length(), max(0.0, seconds)
        self.since = 0
        self.read_s[size] = (self.read_s.get(size, seconds) + seconds) / 2
