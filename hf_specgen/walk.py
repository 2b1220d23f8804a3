"""From a pass's logits to what is decided: score, accept, cut.

There are two walks. `WalkAtOnce` scores every node in one call and reads one small tensor back: it serves whatever does
not depend on the prefix. `WalkByStep` goes from node to node and shows processors and criteria exactly what stock shows
them, once a token, in order; so whatever keeps state just works. Both end in the same `Decision`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StopStringCriteria,
)

from hf_specgen.draft import Draft
from hf_specgen.ranks import Ranks
from hf_specgen.rows import Rows
from hf_specgen.sampling import Noise, Processors
from hf_specgen.verify import Verifier, cut, walked

if TYPE_CHECKING:
    from hf_specgen.outputs import Recorder
    from hf_specgen.target import Pass

# Criteria that the host can apply to a row's tokens by itself.
COUNTED = (MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria)
# Criteria that keep no state and judge every row by itself.
ROW_BY_ROW = (*COUNTED, StopStringCriteria)

# Processed scores and the tokens chosen by them.
Scored = tuple[Tensor, Tensor]


@dataclass
class Decision:
    """What a pass decided.

    Attributes:
        tokens: for each row the ids it gains.
        paths: for each row the nodes that stay in the cache behind the root; None for a row that keeps nothing.
        accepted: for each row how many of its tokens were drafted.
        drafted: for each row how many tokens were drafted in all.
        draft_tokens: for each row the draft's ids, on the host.
    """

    tokens: list[list[int]]
    paths: list[list[int] | None]
    accepted: list[int]
    drafted: list[int]
    draft_tokens: list[list[int]]

    @classmethod
    def nothing(cls, batch: int) -> Decision:
        """The start: no row has gained anything."""
        return cls([[] for _ in range(batch)], [None] * batch, [0] * batch, [0] * batch, [[] for _ in range(batch)])


@dataclass(frozen=True)
class Rules:
    """How a call chooses and when it stops.

    Attributes:
        processors: of the target.
        criteria: stock's list, custom ones included.
        verifier: the accept rule.
        noise: None when greedy.
        lockstep: all rows keep the same number of tokens.
        ranks: the processes that must come to the same decision.
    """

    processors: Processors
    criteria: StoppingCriteriaList
    verifier: Verifier
    noise: Noise | None = None
    lockstep: bool = False
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def eos(self) -> frozenset[int]:
        """Ids that end a row."""
        ids: set[int] = set()
        for criterion in self.criteria:
            if isinstance(criterion, EosTokenCriteria):
                ids.update(criterion.eos_token_id.tolist())
        return frozenset(ids)

    @property
    def prefix_free(self) -> bool:
        """Neither the scores nor the stops depend on what was decided, but for EOS, length and time."""
        return self.processors.pure and all(type(criterion) in COUNTED for criterion in self.criteria)

    def in_lockstep(self, together: bool) -> Rules:
        """The same rules, with the rows together or each by itself."""
        return replace(self, lockstep=together)

    def must_lockstep(self) -> bool:
        """Whether something in here looks at the whole batch at once."""
        apart = self.processors.separable and all(type(criterion) in ROW_BY_ROW for criterion in self.criteria)
        # Without an EOS stock goes on decoding a row that has met a stop string until all rows have met theirs.
        endless = not self.eos and any(type(c) not in (MaxLengthCriteria, MaxTimeCriteria) for c in self.criteria)
        return not apart or endless


class Walk(Protocol):
    """A way from logits to a decision."""

    rules: Rules

    def __call__(self, passed: Pass, draft: Draft, rows: Rows) -> Decision:
        """Decides, takes the tokens into `rows`, and marks rows that have ended."""
        ...


def score(rules: Rules, passed: Pass, draft: Draft, rows: Rows) -> Scored:
    """The target's processed scores and choices at every node, for processors that ignore the prefix.

    Returns:
        `(batch, width, vocab)` float32 and `(batch, width)` int64.
    """
    logits = passed.logits.float()
    # Processors may write into what they are given.
    scores = logits if rules.processors.empty else rules.processors.warp(logits.clone())
    noise = rules.noise
    if noise is None:
        return scores, rules.verifier(scores, draft, None)
    first = rows.next_positions().to(scores.device)
    chosen = rules.verifier(scores, draft, noise.at(first + draft.tree.depth, first[:, 0]))
    return scores, marked(chosen, scores)


def marked(chosen: Tensor, scores: Tensor) -> Tensor:
    """The choices, with -1 where nothing could be drawn; the host raises when it meets one, without a read of its own.

    Args:
        chosen: `(..., )` ids.
        scores: `(..., vocab)` they were drawn by.
    """
    return chosen.where(scores.gather(-1, chosen.unsqueeze(-1)).squeeze(-1).isfinite(), -1)


def drawn(tokens: list[int]) -> list[int]:
    """The tokens, if all of them could be drawn.

    Raises:
        ValueError: for a token that no finite score stood behind, as stock sampling raises too.
    """
    if -1 in tokens:
        raise ValueError("cannot sample: the scores of a token are all -inf, or contain inf or nan")
    return tokens


class WalkAtOnce:
    """Every node is scored in one call; the round's one read from the device is here.

    Args:
        rules: of the call; they must be prefix-free.
        recorder: takes what the user wants returned.
    """

    def __init__(self, rules: Rules, recorder: Recorder) -> None:
        self.rules = rules
        self.recorder = recorder
        self._eos = rules.eos
        self._clocks = [criterion for criterion in rules.criteria if isinstance(criterion, MaxTimeCriteria)]

    def __call__(self, passed: Pass, draft: Draft, rows: Rows) -> Decision:
        """See `Walk`."""
        scores, chosen = score(self.rules, passed, draft, rows)
        nodes = draft.nodes
        outcome = torch.cat([draft.tokens, draft.parents, chosen], dim=1) if nodes else chosen
        read: list[list[int]] = self.rules.ranks.agree(outcome).tolist()
        paths = [walked(row[:nodes], row[nodes : 2 * nodes], row[2 * nodes :]) for row in read]
        decision = Decision.nothing(rows.batch)
        room = most = rows.room()
        if self.rules.lockstep:
            least = min(1 + len(path) for path, left in zip(paths, room, strict=True) if left)
            most = [min(least, left) for left in room]
        for row, left in enumerate(room):
            if left == 0:
                continue
            path, choices = paths[row], read[row][2 * nodes :]
            decision.draft_tokens[row] = read[row][:nodes]
            decision.drafted[row] = sum(parent >= 0 for parent in read[row][nodes : 2 * nodes])
            tokens = drawn([choices[node] for node in (0, *path)])
            count = cut(tokens, self._eos, most[row])
            decision.tokens[row] = tokens[:count]
            decision.paths[row] = path[: count - 1]
            decision.accepted[row] = min(len(path), count)
            for node in (0, *path[: count - 1]):
                self.recorder.record(row, node, passed, scores[row, node])
            rows.append(row, tokens[:count])
            if tokens[count - 1] in self._eos or count == left:
                rows.finished[row] = True
        late = any(bool(clock(rows.prompt, None).any()) for clock in self._clocks)
        if self._clocks and self.rules.ranks.agree_on(late):
            rows.finished = [True] * rows.batch
        return decision


class WalkByStep:
    """From node to node, as the processors and criteria of stock see it.

    Rows walk by themselves, or all together in lockstep: then each call of a processor sees the whole batch.

    Args:
        rules: of the call.
        recorder: takes what the user wants returned.
        batch: rows.
    """

    def __init__(self, rules: Rules, recorder: Recorder, batch: int) -> None:
        self.rules = rules
        self.recorder = recorder
        everyone = list(range(batch))
        together = rules.lockstep or batch == 1
        self.groups = [everyone] if together else [[row] for row in everyone]
        self.processors = [rules.processors] if together else [rules.processors.row(row) for row in everyone]
        # What stock shows a criterion beside the ids; criteria that read it are custom, and so in lockstep.
        self._seen: tuple[Tensor, ...] | None = () if recorder.scores_wanted and together else None

    def __call__(self, passed: Pass, draft: Draft, rows: Rows) -> Decision:
        """See `Walk`."""
        decision = Decision.nothing(rows.batch)
        children = Children(draft)
        # A rule that wants every node at once has chosen before anybody walks.
        ready = score(self.rules, passed, draft, rows) if self.rules.verifier.all_nodes else None
        for group, processors in zip(self.groups, self.processors, strict=True):
            if not all(rows.finished[row] for row in group):
                for row in group:
                    decision.drafted[row] = children.count[row]
                    decision.draft_tokens[row] = children.tokens[row]
                stand = _Stand(group, processors, passed, children, rows.next_positions()[group])
                self._walk(stand, ready, rows, decision)
        return decision

    def _walk(self, stand: _Stand, ready: Scored | None, rows: Rows, decision: Decision) -> None:
        """Choose, take, ask the criteria, step to the child: until a row of the group has no such child."""
        group = stand.group
        while True:
            live = [row for row in group if not rows.finished[row]]
            column = max(rows.generated[row] for row in group)
            scores, chosen = self._choose(stand, rows) if ready is None else stand.pick(ready)
            if self._seen is not None:
                self._seen += (scores,)
            tokens = dict.fromkeys(group, rows.ends.pad)
            for row, token, place_scores in zip(group, self.rules.ranks.agree(chosen).tolist(), scores, strict=True):
                if row in live:
                    drawn([token])
                    self.recorder.record(row, stand.node[row], stand.passed, place_scores)
                    stand.take(row, token, decision)
                    rows.append(row, [token])
                    tokens[row] = token
            rows.write(group, column, tokens)
            met = self.rules.criteria(rows.show(group, column + 1), self._seen)
            rows.stop(group, self.rules.ranks.agree(met).tolist())
            stuck = [row for row in live if not stand.step(row, tokens[row], decision) and not rows.finished[row]]
            if stuck or all(rows.finished[row] for row in group):
                return

    def _choose(self, stand: _Stand, rows: Rows) -> Scored:
        """The processed scores `(rows, vocab)` and the choice `(rows,)` at the node where each row stands."""
        group, nodes, rules = stand.group, stand.nodes, self.rules
        logits = stand.passed.logits[group, nodes].to(torch.float32, copy=True)
        scores = stand.processors(rows.show(group, max(rows.generated[row] for row in group)), logits)
        noise = rules.noise
        if noise is not None:
            noise = noise.rows(group).at(rows.next_positions()[group], stand.first[:, 0])
        below = Draft.empty(len(group)) if rules.verifier.coupled else stand.children.draft_below(group, nodes)
        chosen = rules.verifier(scores.unsqueeze(1), below, noise)[:, 0]
        return scores, chosen if noise is None else marked(chosen, scores)


class Children:
    """Which node hangs below which, on the host.

    Args:
        draft: any; siblings with one token count as the first of them.

    Attributes:
        count: nodes of each row.
        tokens: the draft's ids.
    """

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.count = [0] * draft.tokens.shape[0]
        self.tokens: list[list[int]] = draft.tokens.tolist()
        self._node: dict[tuple[int, int, int], int] = {}
        for row, (tokens, parents) in enumerate(zip(self.tokens, draft.parents.tolist(), strict=True)):
            for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
                if parent >= 0:
                    self.count[row] += 1
                    self._node.setdefault((row, parent, token), node)

    def find(self, row: int, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`."""
        return self._node.get((row, node, token))

    def draft_below(self, rows: list[int], nodes: list[int]) -> Draft:
        """For a chain: the one-node draft below the node where each row stands."""
        draft, width = self.draft, self.draft.nodes
        if width == 0:
            return Draft.empty(len(rows))
        # The child of place i in a chain is node i + 1, which lies in column i.
        column = torch.tensor(nodes, device=draft.tokens.device).clamp(max=width - 1)
        picked = torch.tensor(rows, device=draft.tokens.device)
        there = (draft.parents[picked, column] == torch.tensor(nodes, device=draft.tokens.device)).long()
        probs = None if draft.probs is None else draft.probs[picked, column].unsqueeze(1)
        return Draft(draft.tokens[picked, column].unsqueeze(1), there.unsqueeze(1) - 1, probs, is_chain=True)


@dataclass
class _Stand:
    """Where the rows of a group stand in their drafts.

    Attributes:
        group: neighbouring rows that walk together.
        processors: what their scores go through.
        passed: the target's pass.
        children: of the draft.
        first: `(rows, 1)` the position of the first token that this walk decides.
        node: for each row the node it stands on; the root to begin with.
    """

    group: list[int]
    processors: Processors
    passed: Pass
    children: Children
    first: Tensor
    node: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        """Every row starts at its root."""
        self.node = dict.fromkeys(self.group, 0)

    @property
    def nodes(self) -> list[int]:
        """`node` in the order of the group."""
        return [self.node[row] for row in self.group]

    def pick(self, ready: Scored) -> Scored:
        """What was scored and chosen beforehand where the rows stand."""
        scores, chosen = ready
        return scores[self.group, self.nodes], chosen[self.group, self.nodes]

    def take(self, row: int, token: int, decision: Decision) -> None:
        """Keeps the node on which the row stands, and the token chosen there."""
        path = decision.paths[row] or []
        decision.paths[row] = [*path, self.node[row]] if self.node[row] else path
        decision.tokens[row].append(token)

    def step(self, row: int, token: int, decision: Decision) -> bool:
        """Moves the row to the child that carries `token`; False if there is none."""
        child = self.children.find(row, self.node[row], token)
        if child is None:
            return False
        self.node[row] = child
        decision.accepted[row] += 1
        return True
