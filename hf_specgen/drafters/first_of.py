"""The first drafter that is sure of itself drafts: a copy where the text copies, something else where it does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hf_specgen.draft import Draft, Drafter, Limit, Node
from hf_specgen.drafters.combined import Combination, Sessions, beside, checked, on_host

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.draft import Context, Request

# A draft is sure of its first tokens if these are accepted as likely as not.
LIKELY = 0.5


@dataclass(frozen=True, init=False)
class FirstOf:
    """Asks drafters in turn, row by row, until one is sure of its draft; a row nobody is sure of takes the last draft.

        FirstOf(PromptLookup(), DraftModel(small_model))

    A draft is sure if, by its own confidences, its first `at_least` tokens are accepted as likely as not. For
    `PromptLookup` that is what follows a match of `at_least` tokens or more, however deep it drafts. Retrieval is mixed
    with a model in this way by SAM-Decoding (arXiv 2411.10666), from 5 tokens on, and by TensorRT-LLM, from 4 on. The
    cheap drafter goes first: those behind it do no work for rows that are settled.

    A draft with `probs`, drawn under rejection or block verification, is taken wherever there is one: to choose by what
    was drawn would bias the text.

    Args:
        *drafters: two or more, the first to be asked in front.
        at_least: how many tokens a draft must be sure of, or all that a round has room for if that is less.
        num_assistant_tokens: how deep to draft where the caller does not say.
    """

    drafters: tuple[Drafter, ...]
    at_least: int
    num_assistant_tokens: int | None

    def __init__(self, *drafters: Drafter, at_least: int = 4, num_assistant_tokens: int | None = None) -> None:
        if at_least < 1:
            raise ValueError(f"at_least must be 1 or more, not {at_least}")
        object.__setattr__(self, "drafters", checked("FirstOf", drafters))
        object.__setattr__(self, "at_least", at_least)
        object.__setattr__(self, "num_assistant_tokens", num_assistant_tokens)

    def start(self, target: PreTrainedModel, request: Request) -> FirstOfSession:
        """See `Drafter`.

        Raises:
            ValueError: one of the drafters cannot work, or two of them read the target's hidden states.
        """
        return FirstOfSession(self.at_least, Sessions(self.drafters, target, request))


class FirstOfSession(Combination):
    """A session of each drafter, asked for the rows that those before it were not sure of."""

    def __init__(self, at_least: int, sessions: Sessions) -> None:
        self.at_least = at_least
        self.sessions = sessions
        self.needs = sessions.needs

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`. A draft that is to be checked as a whole is taken for all rows."""
        drafts: list[Draft] = []
        chosen: list[int | None] = [None] * len(limit.depth)
        open_depth = list(limit.depth)  # 0 for rows that are settled
        last = len(self.sessions.all) - 1
        for place in range(last + 1):
            asked = replace(limit, depth=tuple(open_depth))
            draft = self.sessions.propose(place, context, asked, lambda: beside(drafts, chosen))
            if draft.whole and draft.nodes:
                return draft
            if place == last and all(before is None for before in chosen):
                return draft  # with nothing to set beside it, it need not be read back from its device
            drafts.append(draft)
            for row, nodes in enumerate(on_host(draft) if draft.nodes else ()):
                if nodes and open_depth[row]:
                    chosen[row] = place
                    enough = min(self.at_least, open_depth[row])
                    if draft.probs is not None or reached(nodes, enough) >= LIKELY:
                        open_depth[row] = 0
        return beside(drafts, chosen)


def reached(nodes: Sequence[Node], depth: int) -> float:
    """The chance that `depth` tokens of a row are accepted, by the nodes' confidences."""
    along: list[tuple[int, float]] = [(0, 1.0)]  # of the root and each node: depth, chance
    total = 0.0
    for _, parent, confidence in nodes:
        above, chance = along[parent]
        along.append((above + 1, chance * confidence))
        if above + 1 == depth:
            total += chance * confidence
    return total
