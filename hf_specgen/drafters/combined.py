"""What `FirstOf` and `Merge` share: several drafters' sessions in one call, and their drafts on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_specgen.draft import Context, Draft, Drafter, Limit, Needs, Node, named

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.draft import DraftSession, Request

# The confidence of a node whose drafter names none, given that none of its elder siblings is accepted.
ASSUMED = 0.7


def checked(name: str, drafters: Sequence[Drafter]) -> tuple[Drafter, ...]:
    """The drafters, if they are any.

    Raises:
        ValueError: there are fewer than two, or one of them is none.
    """
    for drafter in drafters:
        if isinstance(drafter, type) or not callable(getattr(drafter, "start", None)):
            raise ValueError(
                f"{name} takes drafters such as hf_specgen.PromptLookup(), not a {type(drafter).__name__}; "
                "a causal LM goes into hf_specgen.DraftModel(model), heads go into Medusa(heads) or Eagle(head), and "
                "hf_specgen.load_assistant(path, target) makes a drafter of a path"
            )
    if len(drafters) < 2:
        raise ValueError(f"{name} takes two drafters or more, not {len(drafters)}")
    return tuple(drafters)


class Combination:
    """The session of a combination, which asks about each of its parts itself."""


class Sessions:
    """The sessions of several drafters in one call.

    A draft that goes to the target as one of them made it comes back in `Context.last` as that session's own. Any other
    is nobody's, so that each session repairs itself from the ids.

    Attributes:
        all: in the order of their drafters.
        needs: what they want of the target's passes, all together.
    """

    def __init__(self, drafters: Sequence[Drafter], target: PreTrainedModel, request: Request) -> None:
        request = replace(request, wants_confidence=True)  # by which drafts are compared
        self.all: list[DraftSession] = [drafter.start(target, request) for drafter in drafters]
        self._names = [named(drafter) for drafter in drafters]
        self._needs = [session.needs for session in self.all]
        layers = [needs.hidden_layers for needs in self._needs if needs.hidden_layers]
        if len(layers) > 1:
            readers = [type(d).__name__ for d, n in zip(drafters, self._needs, strict=True) if n.hidden_layers]
            raise ValueError(
                f"{' and '.join(readers)} both read the target's hidden states, which reach one session only; combine "
                "one of them with drafters that read none"
            )
        self.needs = Needs(
            hidden_layers=layers[0] if layers else (),
            top_k=max(needs.top_k for needs in self._needs),
            cache_view=any(needs.cache_view for needs in self._needs),
        )

    def propose(self, place: int, context: Context, limit: Limit, beside: Callable[[], Draft]) -> Draft:
        """One session's draft; it is shown what it asked for, and asked for what it may draft.

        Args:
            place: of the session.
            context: as the loop gives it.
            limit: for this session.
            beside: makes the draft that there is without it.
        """
        session, shares, part = self.all[place], limit.shares, self._names[place]
        if isinstance(session, Combination) or shares is None:
            return self._ask(place, context, limit)
        if any(limit.depth):
            limit = shares.limit(part, limit, beside())
        draft = self._ask(place, context, replace(limit, shares=None))
        return shares.took(part, draft) if any(limit.depth) else draft

    def _ask(self, place: int, context: Context, limit: Limit) -> Draft:
        if any(limit.depth) or self.reads(place):
            return self.all[place].propose(self._context(place, context), limit)
        return Draft.empty(len(limit.depth))

    def turns(self, limit: Limit) -> list[int]:
        """The places of the sessions, those first that cost next to nothing."""
        places, shares = range(len(self.all)), limit.shares
        if shares is None:
            return list(places)
        inner = [isinstance(session, Combination) for session in self.all]
        return sorted(places, key=lambda place: inner[place] or not shares.cheap(self._names[place]))

    def reads(self, place: int) -> bool:
        """Whether a session learns from every pass, also from those that it drafted nothing for."""
        needs = self._needs[place]
        return bool(needs.top_k or needs.hidden_layers)

    def _context(self, place: int, context: Context) -> Context:
        needs, last = self._needs[place], context.last
        if last is not None and needs.top_k < self.needs.top_k:
            top = [[best[: needs.top_k] for best in row] for row in last.top] if needs.top_k else []
            last = replace(last, top=top)
        return replace(
            context,
            last=last,
            hidden=context.hidden if needs.hidden_layers else None,
            cache=context.cache if needs.cache_view else None,
        )


def on_host(draft: Draft) -> list[list[Node]]:
    """A draft as `Draft.of_nodes` takes it: row by row, places without a node left out.

    Where its drafter names no confidence, a node has `ASSUMED` of what its elder siblings left.
    """
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    confidence: Sequence[Sequence[float | None]] = draft.chances() or [[None] * draft.nodes] * len(tokens)
    return [_row(*row) for row in zip(tokens, parents, confidence, strict=True)]


def _row(tokens: list[int], parents: list[int], confidence: Sequence[float | None]) -> list[Node]:
    nodes: list[Node] = []
    moved = {0: 0}  # place in the draft to place among the nodes, both with the root as 0
    left: dict[int, float] = {}
    for place, (token, parent, chance) in enumerate(zip(tokens, parents, confidence, strict=True), start=1):
        if (above := moved.get(parent)) is None:
            continue
        if chance is None:
            chance = ASSUMED * left.get(above, 1.0)
            left[above] = left.get(above, 1.0) - chance
        nodes.append((token, above, chance))
        moved[place] = len(nodes)
    return nodes


def beside(drafts: Sequence[Draft], chosen: Sequence[int | None]) -> Draft:
    """One draft of several, each row from one of them.

    Args:
        drafts: of all rows each.
        chosen: for each row the place of its draft; None: the row has none.

    Returns:
        If all rows that have one share it, that draft itself.
    """
    places = {place for place in chosen if place is not None}
    if len(places) < 2:
        return drafts[places.pop()] if places else Draft.empty(len(chosen))
    hosted = {place: on_host(drafts[place]) for place in places}
    rows = [[] if place is None else hosted[place][row] for row, place in enumerate(chosen)]
    draft = Draft.of_nodes(rows)
    known = [drafts[place].probs for place in sorted(places)]
    like = next((probs for probs in known if probs is not None), None)
    if like is None:
        return draft
    # What was drafted without noise was certain. Drafts with probs are chains, so that nodes keep their places.
    tokens = draft.tokens.to(like.device)
    probs = torch.zeros((*tokens.shape, like.shape[-1]), device=like.device).scatter_(-1, tokens.unsqueeze(-1), 1.0)
    for row, place in enumerate(chosen):
        own: Tensor | None = None if place is None else drafts[place].probs
        if own is not None:
            probs[row, : len(rows[row])] = own[row, : len(rows[row])].to(like.device)
    return replace(draft, probs=probs)
