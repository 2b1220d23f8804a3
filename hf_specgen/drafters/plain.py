"""Plain decoding as a drafter: the reference that every other drafter is held against."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_specgen.draft import Context, Draft, Limit, Needs, Request


@dataclass(frozen=True)
class Plain:
    """Drafts nothing, so that each round is one step of plain decoding, in the same loop as everything else."""

    num_assistant_tokens: int = 0

    def start(self, target: PreTrainedModel, request: Request) -> PlainSession:
        """See `Drafter`."""
        return PlainSession(request.batch)


class PlainSession:
    """Proposes the empty draft."""

    needs = Needs()

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        return Draft.empty(self.batch)
