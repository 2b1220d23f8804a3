"""How many tokens to draft next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hf_specgen.stats import Step


class Controller(Protocol):
    """Decides how deep to draft and learns from what came of it. One controller lives as long as one call."""

    def depth(self) -> int:
        """The longest path to ask for in the coming round; 0 for plain decoding."""
        ...

    def update(self, step: Step) -> None:
        """Takes note of a round."""
        ...


@dataclass(frozen=True)
class Fixed:
    """The same number of tokens every round.

    Args:
        tokens: how many.
    """

    tokens: int

    def __post_init__(self) -> None:
        """Refuses what cannot be a count."""
        if not isinstance(self.tokens, int) or self.tokens < 0:
            raise ValueError(f"num_assistant_tokens is {self.tokens!r}; it must be a whole number, 0 or more")

    def depth(self) -> int:
        """See `Controller`."""
        return self.tokens

    def update(self, step: Step) -> None:
        """Learns nothing."""


def within(depth: int, room: Sequence[int]) -> tuple[int, ...]:
    """The depth each row may use: one token of a row's remaining `room` is always the target's own."""
    return tuple(max(0, min(depth, left - 1)) for left in room)
