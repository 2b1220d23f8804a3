"""What has been decided so far, row by row, as the drafters, the processors and the user see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Ends:
    """How rows end.

    Attributes:
        max_length: the most places a row may have, prompt and padding included.
        pad: what rows that have ended are filled up with.
        together: a row that met its stop goes on until every row has; so stock does where no EOS is known.
    """

    max_length: int
    pad: int = 0
    together: bool = False


class Rows:
    """The growing rows of one call.

    Args:
        prompt: `(batch, length)` ids as stock holds them, padding on the left.
        attention_mask: 0 where a row is padded; None where no row is.
        ends: how rows end.

    Attributes:
        ids: for each row its true tokens, without padding; the last one is the root.
        generated: for each row the tokens decided since the prompt.
        finished: for each row whether it has ended.
        prompt_lengths: for each row the true tokens before the first generated one; the loop corrects them after the
            prompt's pass, because a continued cache or `inputs_embeds` stand for tokens that have no ids here.
    """

    def __init__(self, prompt: Tensor, attention_mask: Tensor | None, ends: Ends) -> None:
        self.prompt = prompt
        self.ends = ends
        self.ids: list[list[int]] = prompt.tolist()
        if attention_mask is not None and prompt.shape[1]:
            # A mask also covers what a continued cache holds; the ids at hand are the last of it.
            kept = attention_mask[:, -prompt.shape[1] :].tolist()
            self.ids = [
                [token for token, keep in zip(row, mask, strict=True) if keep]
                for row, mask in zip(self.ids, kept, strict=True)
            ]
        self.generated = [0] * len(self.ids)
        self.finished = [False] * len(self.ids)
        self._met = [False] * len(self.ids)
        self.prompt_lengths = [len(row) for row in self.ids]
        # Stock decides one token before it looks at the length.
        self._limit = max(1, ends.max_length - prompt.shape[1])
        # Grows by doubling; a view of it is what processors and criteria are shown.
        self._sequences = torch.cat([prompt, prompt.new_empty(prompt.shape[0], 16)], dim=1)

    @property
    def batch(self) -> int:
        """Rows."""
        return len(self.ids)

    @property
    def all_finished(self) -> bool:
        """Nothing is left to decode."""
        return all(self.finished)

    def room(self) -> list[int]:
        """For each row the tokens it may still gain; 0 once it has ended."""
        return [0 if end else self._limit - new for new, end in zip(self.generated, self.finished, strict=True)]

    def roots(self) -> Tensor:
        """`(batch,)` each row's last decided token."""
        return torch.tensor([row[-1] for row in self.ids], device=self.prompt.device)

    def positions(self) -> list[int]:
        """For each row the position, among its true tokens, of the token that comes next."""
        return [start + new for start, new in zip(self.prompt_lengths, self.generated, strict=True)]

    def next_positions(self) -> Tensor:
        """`positions` as a `(batch, 1)` tensor."""
        return torch.tensor(self.positions(), device=self.prompt.device).unsqueeze(1)

    def append(self, row: int, tokens: Sequence[int]) -> None:
        """Takes decided tokens; the row must have room for them."""
        self.ids[row].extend(tokens)
        self.generated[row] += len(tokens)

    def show(self, rows: Sequence[int], column: int) -> Tensor:
        """The first `column` generated places of neighbouring `rows` behind their prompt, as stock shows them."""
        end = self.prompt.shape[1] + column
        return self._sequences[rows[0] : rows[-1] + 1, :end].contiguous()

    def write(self, rows: Sequence[int], column: int, tokens: dict[int, int]) -> None:
        """Puts one token a row into generated place `column`, for `show`."""
        place = self.prompt.shape[1] + column
        if place >= self._sequences.shape[1]:
            self._sequences = torch.cat([self._sequences, torch.empty_like(self._sequences)], dim=1)
        values = torch.tensor([tokens[row] for row in rows], device=self._sequences.device)
        self._sequences[rows[0] : rows[-1] + 1, place] = values

    def stop(self, rows: Sequence[int], met: Sequence[bool]) -> None:
        """Takes what the criteria said of neighbouring `rows` after their last token."""
        for row, now in zip(rows, met, strict=True):
            self._met[row] |= now
        if not self.ends.together:
            self.finished = list(self._met)
        elif all(self._met):
            self.finished = [True] * self.batch

    def sequences(self) -> Tensor:
        """`(batch, length)` prompt and generated ids, rows that ended early filled up with padding."""
        longest = max(self.generated)
        new = [
            [*row[len(row) - count :], *[self.ends.pad] * (longest - count)]
            for row, count in zip(self.ids, self.generated, strict=True)
        ]
        tail = torch.tensor(new, dtype=torch.long, device=self.prompt.device).view(self.batch, longest)
        return torch.cat([self.prompt, tail], dim=1)
