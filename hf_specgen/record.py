"""What is known of a drafter from one call to another: how often it is right, and when it may be tried again.

A dear drafter is not asked where it does not pay, and then nothing is learnt of it. So it gets a try now and then: a
short draft that nobody checks, compared with the text that comes. What tries cost, and drafts that did not pay, is
booked, and the next try waits until a small share of the time has made up for it. A try that was right counts for less,
or a good drafter that is not cheap would never be found.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from hf_specgen.acceptance import Acceptance

# Rounds that a dear drafter rests between two tries: doubled by one in vain, a quarter after one that was right.
PATIENCE, MOST_PATIENCE = 8, 64
# A dear drafter gets a try while less was lost to it than so many plain passes, and this share of the time is forgiven.
# No more is ever held against it than so many plain passes, so that it is not shut out.
LOSABLE, FORGIVEN, HELD = 0.65, 0.005, 1.3
# The part of its cost by which a try counts that was right.
RIGHT = 0.3
# A prompt is read for a try only if that takes no more than this share of the time since one was read.
READING = 0.0025
# Reading is believed to cost nothing, and this counts as so many positions; of earlier readings half is remembered.
UNREAD, KEPT = 64, 0.5


@dataclass
class Record:
    """See above.

    Attributes:
        by_depth: how often it is right.
        lost: to it of late, in plain passes.
        patience: rounds that it rests between two tries.
        rested: rounds since it was asked last; the first try comes at once.
        since: rounds that it rested since it read a prompt.
        read: positions of prompts that it has read of late.
        read_s: seconds that it took.
    """

    by_depth: Acceptance = field(default_factory=Acceptance)
    lost: float = 0.0
    patience: int = PATIENCE
    rested: int = PATIENCE
    since: float = math.inf
    read: float = 0.0
    read_s: float = 0.0

    def again(self) -> Record:
        """What another call begins with."""
        return replace(self, by_depth=self.by_depth.again())

    def rests(self) -> None:
        """A round begins in which it would not pay."""
        self.rested += 1
        self.since += 1

    def may_be_tried(self, cost: float, reading: float) -> bool:
        """Whether it is time for a try, and it may cost something still.

        Args:
            cost: of the try, in plain passes. Even one that costs more than may be lost gets its turn.
            reading: of the prompt, if that is still to be read.
        """
        due = self.rested >= self.patience and reading <= READING * self.since
        return due and self.lost + min(cost, LOSABLE) <= LOSABLE

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

    def lose(self, lost: float, took: float) -> None:
        """Takes note of a round.

        Args:
            lost: to the drafter, in plain passes; gains make up for earlier losses only.
            took: the round's pass, in plain passes.
        """
        self.lost = min(max(self.lost + lost - FORGIVEN * took, 0.0), HELD)

    def reading_s(self, positions: int) -> float:
        """Seconds that it will take to read a prompt.

        Args:
            positions: of it, of all rows.
        """
        return self.read_s * positions / (self.read + UNREAD)

    def has_read(self, positions: int, seconds: float) -> None:
        """Takes note of a prompt that was read.

        Args:
            positions: of it, of all rows.
            seconds: measured.
        """
        self.since = 0
        self.read = KEPT * self.read + positions
        self.read_s = KEPT * self.read_s + max(0.0, seconds)
