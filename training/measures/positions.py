"""How often what was drafted at each depth is accepted, and how much that varies from prompt to prompt."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from transformers import PreTrainedModel

import hf_specgen as sg

RESAMPLES = 2000


@dataclass
class Counts:
    """What became of the drafts of some calls with one row.

    A round walks from the root as long as a node carries the target's token. It is *offered* a node at depth d if it
    comes to place d and the draft has a node there, and it *accepts* one if such a node carries the token. Behind an
    end of text, or the length limit, nothing is decided and so nothing offered.

    Attributes:
        rounds: passes behind the prompts'.
        tokens: gained by them.
        nodes: checked by them, beside the roots.
        offered: by depth, children of the root first.
        accepted: likewise.
    """

    rounds: int = 0
    tokens: int = 0
    nodes: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, step: sg.Step, draft: sg.Draft | None) -> None:
        """Adds a round, with the draft that it checked."""
        self.rounds += 1
        self.tokens += len(step.tokens[0])
        self.nodes += step.drafted[0]
        children: dict[int, dict[int, int]] = {}  # of each node: token to child
        if draft is not None:
            for node, (token, parent) in enumerate(
                zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True), 1
            ):
                if parent >= 0:
                    children.setdefault(parent, {}).setdefault(token, node)
        at: int | None = 0
        for depth, token in enumerate(step.tokens[0]):
            if at is None or at not in children:
                break
            at = children[at].get(token)
            self._note(depth, at is not None)

    def _note(self, depth: int, accepted: bool) -> None:
        if depth == len(self.offered):
            self.offered.append(0)
            self.accepted.append(0)
        self.offered[depth] += 1
        self.accepted[depth] += accepted

    def __add__(self, other: Counts) -> Counts:
        """Both together."""
        return Counts(
            self.rounds + other.rounds,
            self.tokens + other.tokens,
            self.nodes + other.nodes,
            [a + b for a, b in zip_longest(self.offered, other.offered, fillvalue=0)],
            [a + b for a, b in zip_longest(self.accepted, other.accepted, fillvalue=0)],
        )

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens a round, the target's own included: 1.00 for plain decoding."""
        return self.tokens / self.rounds if self.rounds else 1.0

    @property
    def acceptance(self) -> list[float]:
        """By depth: accepted, given that the parent was and that the draft went on."""
        return [a / o if o else 0.0 for a, o in zip(self.accepted, self.offered, strict=True)]

    @property
    def overall(self) -> list[float]:
        """By depth: the share of all rounds that accepted a node so deep."""
        return [a / self.rounds for a in self.accepted]


@dataclass(frozen=True)
class Noting:
    """Drafts as another drafter does, and keeps the last draft: a step tells only how much of it was accepted.

    Attributes:
        drafter: the other one.
        last: the draft that the coming step checks, taken by `take`.
    """

    drafter: sg.Drafter
    last: list[sg.Draft] = field(default_factory=list)

    @property
    def num_assistant_tokens(self) -> int | None:
        return self.drafter.num_assistant_tokens

    def start(self, target: PreTrainedModel, request: sg.Request) -> sg.DraftSession:
        return _NotingSession(self.drafter.start(target, request), self.last)

    def take(self) -> sg.Draft | None:
        """The draft of the round that has just ended; None where there was no room for one."""
        return self.last.pop() if self.last else None


class _NotingSession:
    def __init__(self, session: sg.DraftSession, last: list[sg.Draft]) -> None:
        self.session = session
        self.last = last

    @property
    def needs(self) -> sg.Needs:
        return self.session.needs

    def propose(self, context: sg.Context, limit: sg.Limit) -> sg.Draft:
        draft = self.session.propose(context, limit)
        self.last[:] = [draft]
        return draft


def count(model: Any, inputs: Mapping[str, Any], drafter: sg.Drafter, new_tokens: int) -> tuple[list[int], Counts]:
    """Decodes a prompt greedily.

    Args:
        model: enabled.
        inputs: ids and mask, `(1, length)`.
        drafter: says itself how deep it drafts.
        new_tokens: the most that is decoded.

    Returns:
        The new ids, and what became of the drafts.
    """
    noting, counts, text = Noting(drafter), Counts(), list[int]()
    for step in sg.stream(model, **inputs, assistant=noting, do_sample=False, max_new_tokens=new_tokens):
        if text:
            counts.add(step, noting.take())
        text += step.tokens[0]
    return text, counts


def pooled(prompts: Sequence[Counts]) -> float:
    """Mean accepted tokens over all rounds of all prompts."""
    return sum(prompts, Counts()).mean_accepted_tokens


def interval(*sides: Sequence[Counts], share: float = 0.95) -> list[float]:
    """Where the mean accepted tokens lie if the prompts had been others like these: a bootstrap over prompts.

    Args:
        sides: counts prompt by prompt; with a second side over the same prompts, the second's mean minus the first's,
            with the same prompts drawn for both.
        share: of the resampled means that lie within.

    Returns:
        Its two ends.
    """
    chance = random.Random(0)
    places = range(len(sides[0]))
    means: list[float] = []
    for _ in range(RESAMPLES):
        drawn = chance.choices(places, k=len(places))
        each = [_ratio([side[place] for place in drawn]) for side in sides]
        means.append(each[-1] - (each[0] if len(each) > 1 else 0.0))
    means.sort()
    out = round((1 - share) / 2 * (RESAMPLES - 1))
    return [means[out], means[-1 - out]]


def _ratio(prompts: Sequence[Counts]) -> float:
    rounds = sum(one.rounds for one in prompts)
    return sum(one.tokens for one in prompts) / rounds if rounds else 1.0


def quartiles(prompts: Sequence[Counts]) -> list[float]:
    """Of the prompts' own mean accepted tokens: a quarter of them lies below the first, a half below the second."""
    means = [one.mean_accepted_tokens for one in prompts]
    return means * 3 if len(means) == 1 else statistics.quantiles(means, n=4, method="inclusive")
