"""One decoding loop: chain and tree, one row and many, greedy and sampled, plain and speculative.

    prefill -> walk -> commit -> emit -> propose -> verify -> walk -> commit -> emit -> ...

Everything else (`generate`, `stream`, the statistics) is a fold over the generator below. The loop knows drafters by
their protocol only.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace

import torch

from hf_specgen.clock import Clock, Moment
from hf_specgen.draft import Context, Draft, DraftSession, Limit, Verified
from hf_specgen.length import AutoController, Controller, within
from hf_specgen.ranks import Ranks
from hf_specgen.rows import Rows
from hf_specgen.sampling import Noise
from hf_specgen.states import States
from hf_specgen.stats import Stats, Step
from hf_specgen.target import Pass, Target
from hf_specgen.walk import Decision, Walk


@dataclass
class Call:
    """Everything one call is made of.

    Attributes:
        target: the model and its cache.
        rows: what has been decided.
        walk: from logits to a decision.
        session: the drafter's state.
        controller: how deep to draft.
        noise: the target's; None when greedy.
        coupled: a drafter samples with that same noise.
        chain: drafts may not branch.
        stats: takes every step.
        ranks: the processes to keep in step with.
        states: of the target, on their way to the session.
    """

    target: Target
    rows: Rows
    walk: Walk
    session: DraftSession
    controller: Controller
    noise: Noise | None
    coupled: bool
    chain: bool
    stats: Stats
    ranks: Ranks
    states: States = field(default_factory=States)


class Turns:
    """The `Shares` of a call: the controller decides, on the deciding rank, and each part's time is taken.

    Args:
        controller: of the call.
        ranks: the processes to keep in step with.
        clock: tells the time.
    """

    def __init__(self, controller: AutoController, ranks: Ranks, clock: Clock) -> None:
        self.controller, self.ranks, self.clock = controller, ranks, clock
        self._since = clock.now()
        self._tried = False
        self._times: list[tuple[str, Moment, Moment]] = []

    def cheap(self, part: str) -> bool:
        """See `Shares`."""
        return bool(self.ranks.agree_on(int(self.controller.cheap(part))))

    def limit(self, part: str, limit: Limit, beside: Draft) -> Limit:
        """See `Shares`."""
        share = self.controller.share(part, limit.depth, beside)
        depth, nodes, tried = self.ranks.agree(torch.tensor([share.depth, share.nodes, share.tried])).tolist()
        self._tried, self._since = bool(tried), self.clock.now()
        return replace(limit, depth=tuple(min(depth, deep) for deep in limit.depth), nodes=min(nodes, limit.nodes))

    def took(self, part: str, draft: Draft) -> Draft:
        """See `Shares`."""
        self._times.append((part, self._since, self.clock.now()))
        self.controller.took(part, draft)
        return Draft.empty(len(draft.tokens), draft.tokens.device) if self._tried else draft

    def seconds(self) -> dict[str, float]:
        """What each part took since this was last asked."""
        seconds: dict[str, float] = {}
        for part, since, until in self._times:
            seconds[part] = seconds.get(part, 0.0) + since.until(until)
        self._times = []
        return seconds


@torch.no_grad()
def decode(call: Call) -> Iterator[Step]:
    """Decodes until every row has ended, and yields what each round decided.

    The first step is the prompt's pass, which decides one token a row. Between steps the invariant holds: the caches
    keep every decided token but the last, which is the root of the next round.
    """
    with closing(call.target):
        yield from _rounds(call)


def _rounds(call: Call) -> Iterator[Step]:
    target, rows = call.target, call.rows
    clock = Clock(target.device)
    turns = None
    if isinstance(call.controller, AutoController) and call.controller.apart:
        turns = Turns(call.controller, call.ranks, clock)
    started = clock.now()
    proposed = draft = Draft.empty(rows.batch, target.device)
    drafted = started
    passed = target.prefill()
    rows.prompt_lengths = target.prompt_lengths
    while True:
        verified = clock.now()
        decision = call.walk(passed, draft, rows)
        target.cache.commit(decision.paths)
        call.states.take(passed, decision.paths, rows.prompt_lengths)
        step = Step(
            tokens=decision.tokens,
            drafted=decision.drafted,
            accepted=decision.accepted,
            width=draft.nodes,
            draft_s=started.until(drafted),
            verify_s=drafted.until(verified),
            seconds=time.perf_counter() - started.host,
            part_s={} if turns is None else turns.seconds(),
        )
        (call.stats.add_prefill if passed.is_prompt else call.stats.add)(step)
        call.controller.update(step)
        yield step
        # Every rank asks once a round, and makes one pass if anyone goes on.
        while call.ranks.anyone(not rows.all_finished) and rows.all_finished:
            target.idle()
        if rows.all_finished:
            return
        started = clock.now()
        proposed, draft = _propose(call, _seen(call, proposed, draft, passed, decision), turns)
        roots = rows.roots()
        draft = target.fit(roots, draft.to(target.device))
        drafted = clock.now()
        if target.stale:
            passed = target.rebuild(rows.sequences(), rows.finished)
        else:
            passed = target.verify(roots, draft, rows.finished)


def _seen(call: Call, proposed: Draft, draft: Draft, passed: Pass, decision: Decision) -> Verified:
    """What a session may know of the round before."""
    count = call.session.needs.top_k
    if not count:
        return Verified(proposed, decision.draft_tokens)
    best: list[list[list[int]]] = passed.logits.topk(min(count, passed.logits.shape[-1])).indices.tolist()
    top = [row if gained else [] for row, gained in zip(best, decision.tokens, strict=True)]
    return Verified(proposed, decision.draft_tokens, draft.parents.tolist(), top)


def _propose(call: Call, last: Verified, turns: Turns | None) -> tuple[Draft, Draft]:
    """Asks the session, and the controller what of its draft is to be checked; returns both."""
    proposed = _asked(call, last, turns)
    chosen = call.controller.choose(proposed)
    agreed = call.ranks.agree_on_draft(chosen)
    # Another rank's draft must not be taken by the session for its own.
    return (proposed if agreed is chosen else agreed), agreed


def _asked(call: Call, last: Verified, turns: Turns | None) -> Draft:
    """Asks the session, and refuses an answer that breaks the limit."""
    rows = call.rows
    room, reach = rows.room(), call.target.reach()
    if reach is not None:
        room = [min(left, reach + 1) for left in room]
    depth = within(call.ranks.agree_on(call.controller.depth(max(0, max(room) - 1))), room)
    deepest = max(depth)
    if deepest == 0:
        return Draft.empty(rows.batch)
    most = deepest if call.chain else max(deepest, call.controller.nodes())
    limit = Limit(depth, nodes=most, chain=call.chain, shares=turns)
    noise = call.noise
    if noise is not None and not call.coupled:
        noise = noise.stream("draft", rows.next_positions()[:, 0])
    cache = call.target.cache if call.session.needs.cache_view else None
    context = Context(rows.ids, rows.positions(), noise, last, call.states.hand_over(), cache)
    draft = call.session.propose(context, limit)
    alike = isinstance(draft, Draft) and draft.tokens.shape == draft.parents.shape and draft.tokens.dtype == torch.long
    if not alike or (draft.confidence is not None and draft.confidence.shape != draft.tokens.shape):
        raise ValueError(f"{type(call.session).__name__} proposed {draft!r}; see hf_specgen.Draft for what it must be")
    fits = draft.tokens.shape[0] == rows.batch and draft.nodes <= limit.nodes
    if not fits or (call.chain and not draft.is_chain):
        shape, kind = tuple(draft.tokens.shape), "chain" if draft.is_chain else "tree"
        raise ValueError(
            f"{type(call.session).__name__} proposed a {kind} of shape {shape}, but was asked for at most "
            f"{(rows.batch, limit.nodes)}{' in chains' if call.chain else ''}"
        )
    if reach is not None and draft.nodes > reach:
        draft = draft.up_to(reach)
    return draft
