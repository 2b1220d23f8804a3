"""The target's states on their way from its passes to a session that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_specgen.target import Pass


class States:
    """Collects the states of decided tokens until the session is asked again; see `Context.hidden`.

    A round that drafts nothing asks nobody, and its states must not be lost: a head that caches what it was shown would
    have a gap for good.
    """

    def __init__(self) -> None:
        self._rows: list[list[Tensor]] = []

    def take(self, passed: Pass, paths: Sequence[Sequence[int] | None], prompt_lengths: Sequence[int]) -> None:
        """Takes the states of the tokens that a pass has committed; nothing where no session reads any.

        Args:
            passed: the pass.
            paths: for each row the nodes that were kept behind the root; None for a row that keeps nothing.
            prompt_lengths: for each row the tokens of the prompt, which lie at the end of the prompt's pass.
        """
        if passed.states is None:
            return
        self._rows = self._rows or [[] for _ in paths]
        for row, path in enumerate(paths):
            states = passed.states[row]
            if passed.is_prompt:
                self._rows[row].append(states[-prompt_lengths[row] :])
            elif path is not None:
                # Copied: a view would keep the whole pass alive, nodes that were rejected and other rows included.
                self._rows[row].append(states[torch.tensor([0, *path], device=states.device)])

    def hand_over(self) -> list[Tensor] | None:
        """For each row `(new, size)` what came since the last time; None where no states were read."""
        if not self._rows:
            return None
        none = next(states for parts in self._rows for states in parts)[:0]
        handed = [parts[0] if len(parts) == 1 else torch.cat([none, *parts]) for parts in self._rows]
        self._rows = [[] for _ in self._rows]
        return handed
