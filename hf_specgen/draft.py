"""The words everyone shares: what a drafter is asked, what it answers, and what it may read.

A drafter can be written against this file alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.nn import Module

from hf_specgen.trees import Tree

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from hf_specgen.cache import RowCache
    from hf_specgen.encoder import Source
    from hf_specgen.sampling import Noise, Processors


# A node on the host: its token, its parent as in `Draft.parents`, and its confidence as in `Draft.confidence`.
Node = tuple[int, int, float]


@dataclass(frozen=True)
class Draft:
    """Guessed tokens, one tree a row; a chain is a tree without branches.

    Attributes:
        tokens: `(batch, nodes)` int64 ids, parents before children. May hold no node at all.
        parents: `(batch, nodes)` int64, an index into `[root, *tokens]`: 0 is the root, i + 1 is node i.
            -1 marks a place without a node, so that rows of unequal size share one rectangle.
        probs: `(batch, nodes, vocab)` float32, the distribution each token was drawn from, after the processors.
            Read by rejection and block verification only; without it a draft counts as certain of itself.
        confidence: `(batch, nodes)` in 0..1, the drafter's estimate that a node is accepted given that its parent was.
        is_chain: every row is one unbranched path without gaps before its end. Known by the maker, so that nobody
            has to read a device tensor to find out.
        whole: its nodes serve more than the coming round, so that it is checked as it is or not at all.
    """

    tokens: Tensor
    parents: Tensor
    probs: Tensor | None = None
    confidence: Tensor | None = None
    is_chain: bool = False
    whole: bool = False

    @classmethod
    def empty(cls, batch: int, device: torch.device | str = "cpu") -> Draft:
        """A draft without nodes: with it a round is one step of plain decoding."""
        none = torch.empty((batch, 0), dtype=torch.long, device=device)
        return cls(none, none, is_chain=True)

    @classmethod
    def chain(cls, tokens: Tensor, depth: Sequence[int], probs: Tensor | None = None) -> Draft:
        """Chains from a tensor.

        Args:
            tokens: `(batch, nodes)` ids, first drafted first.
            depth: for each row how many of them count.
            probs: see `Draft`.
        """
        parents = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        if min(depth) < tokens.shape[1]:
            parents = parents.where(parents < torch.tensor(depth, device=tokens.device).unsqueeze(1), -1)
        return cls(tokens, parents, probs, is_chain=True)

    @classmethod
    def ragged(cls, chains: Sequence[Sequence[int]]) -> Draft:
        """Chains of unequal length, one a row, from host lists; a row may be empty."""
        width = max((len(chain) for chain in chains), default=0)
        tokens = torch.tensor([[*chain, *[0] * (width - len(chain))] for chain in chains], dtype=torch.long)
        parents = torch.tensor([[*range(len(c)), *[-1] * (width - len(c))] for c in chains], dtype=torch.long)
        return cls(tokens.view(len(chains), width), parents.view(len(chains), width), is_chain=True)

    @classmethod
    def of_nodes(cls, rows: Sequence[Sequence[Node]]) -> Draft:
        """Trees of unequal size, one a row, from host lists; a row may be empty.

        Args:
            rows: for each row its nodes, parents before children.
        """
        width = max(map(len, rows), default=0)
        if width == 0:
            return cls.empty(len(rows))
        padded = [[*row, *[(0, -1, 0.0)] * (width - len(row))] for row in rows]
        return cls(
            tokens=torch.tensor([[token for token, _, _ in row] for row in padded]),
            parents=torch.tensor([[parent for _, parent, _ in row] for row in padded]),
            confidence=torch.tensor([[confidence for _, _, confidence in row] for row in padded]),
            is_chain=all(parent == place for row in rows for place, (_, parent, _) in enumerate(row)),
        )

    def chances(self) -> list[list[float]] | None:
        """`confidence` on the host, if there is any: what is no chance counts as the nearest, and NaN as none."""
        return None if self.confidence is None else self.confidence.nan_to_num(0.0).clamp(0, 1).tolist()

    @cached_property
    def nodes(self) -> int:
        """Places a row, padding included."""
        return self.tokens.shape[1]

    @cached_property
    def tree(self) -> Tree:
        """Its shape, root included."""
        return Tree.of_chain(self.parents) if self.is_chain else Tree.of(self.parents)

    def up_to(self, depth: int) -> Draft:
        """The same draft without the nodes that lie deeper."""
        return replace(self, parents=self.parents.where(self.tree.depth[:, 1:] <= depth, -1))

    def to(self, device: torch.device) -> Draft:
        """The same draft on `device`."""
        if self.tokens.device == device:
            return self

        def move(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(device)

        return replace(
            self,
            tokens=self.tokens.to(device),
            parents=self.parents.to(device),
            probs=move(self.probs),
            confidence=move(self.confidence),
        )


@dataclass(frozen=True)
class Limit:
    """How much may be drafted this round.

    Attributes:
        depth: for each row the longest path; 0 for rows that have finished.
        nodes: the most nodes a row.
        chain: no branches, because the target or the accept rule takes chains only.
        shares: whom a combination of drafters asks about each of its parts; None: all of them draft as deep.
    """

    depth: tuple[int, ...]
    nodes: int
    chain: bool
    shares: Shares | None = None


class Shares(Protocol):
    """Says of each part of a combination how deep it may draft, so that a dear one rests where it does not pay.

    Parts are known by their names, see `named`.
    """

    def cheap(self, part: str) -> bool:
        """Whether a part costs next to nothing; those that do are to be asked first where the order is free."""
        ...

    def limit(self, part: str, limit: Limit, beside: Draft) -> Limit:
        """How much a part may draft; called right before it is asked.

        Args:
            part: its name.
            limit: the depth of rows that need nothing of it is 0.
            beside: what would be proposed without it, as far as that is known.
        """
        ...

    def took(self, part: str, draft: Draft) -> Draft:
        """What of a part's draft is to be used: nothing where it was asked to see only how right it is."""
        ...


@dataclass(frozen=True)
class Needs:
    """What a session wants from the target's passes.

    Attributes:
        hidden_layers: indices into transformers' `hidden_states`, whose states are concatenated in this order:
            `Context.hidden`. 0 is the output of the embedding, i that of layer i - 1, and -1 that of the final norm.
        top_k: so many of the target's best ids at the root and every node of the last pass, rejected ones included:
            `Verified.top`.
        cache_view: `Context.cache`.
    """

    hidden_layers: tuple[int, ...] = ()
    top_k: int = 0
    cache_view: bool = False


@dataclass(frozen=True)
class Verified:
    """The last draft that the target checked, back on the host.

    Attributes:
        draft: as it was proposed, so that a session can tell whether it is its own. Less of it may have been checked.
        tokens: row by row the ids that were checked, places without a node included.
        parents: of those, as in `Draft`; read back only where `Needs.top_k` asks for something at all.
        top: for each row the `Needs.top_k` best ids to follow each of `[root, *tokens]`, best first, before any
            processor. Empty where nothing was asked for, and for rows that had ended.
    """

    draft: Draft
    tokens: list[list[int]]
    parents: list[list[int]] = field(default_factory=list)
    top: list[list[list[int]]] = field(default_factory=list)


@dataclass(frozen=True)
class Context:
    """What a session may read when it proposes.

    Attributes:
        ids: for each row every token decided so far, without padding; the last one is the root. The lists belong to
            the loop and only ever grow. A continued cache or `inputs_embeds` stand for tokens that are not in here.
        positions: for each row the true position of the token that comes next.
        noise: the Gumbel noise a drafter samples with, to be bound by `noise.at(positions)`. Under `matching` it is
            the target's own, which makes drafts agree with it far more often; None when decoding is greedy.
        last: the draft of the round before, if there was one.
        hidden: for sessions that ask for `Needs.hidden_layers`, for each row `(new, size)` the target's states at the
            tokens that joined `ids[:-1]` since the session was last asked; the last state is that by which the root was
            chosen. At first these are the prompt's: fewer than it has tokens where it was read in chunks or continues a
            cache, and more than there are ids where `inputs_embeds` stood for some.
        cache: the target's cache, for sessions that ask for `Needs.cache_view`. What it has committed is only to be
            read; slots behind that may be written to, since the next pass overwrites them before anyone reads them.
    """

    ids: Sequence[Sequence[int]]
    positions: Sequence[int]
    noise: Noise | None = None
    last: Verified | None = None
    hidden: Sequence[Tensor] | None = None
    cache: RowCache | None = None


@dataclass(frozen=True)
class Request:
    """What a drafter is told about a call before it starts.

    Attributes:
        batch: rows.
        chain: drafts may not branch.
        sampled: the target samples (False: greedy).
        wants_probs: the accept rule reads `Draft.probs`.
        wants_confidence: `Draft.confidence` is read: not where the draft length is fixed.
        processors: the target's logits processors as far as a drafter may run them (never stateful ones).
        eos: ids that end a row.
        tokenizer: the target's, where the caller gave it.
        assistant_tokenizer: the drafter's, where the caller gave it.
        source: what the target's encoder reads; None where it has none.
    """

    batch: int
    chain: bool = False
    sampled: bool = False
    wants_probs: bool = False
    wants_confidence: bool = True
    processors: Processors | None = None
    eos: frozenset[int] = frozenset()
    tokenizer: PreTrainedTokenizerBase | None = None
    assistant_tokenizer: PreTrainedTokenizerBase | None = None
    source: Source | None = None


class DraftSession(Protocol):
    """A drafter's state in one call. It repairs itself from `Context.ids`: nobody tells it what was rejected."""

    @property
    def needs(self) -> Needs:
        """What it reads of the target's passes."""
        ...

    def propose(self, context: Context, limit: Limit) -> Draft:
        """Guesses what follows the last id of each row.

        Args:
            context: what has been decided.
            limit: how much may be drafted. A draft may be smaller, never larger.
        """
        ...


class Drafter(Protocol):
    """What a user builds once: immutable, and shared between calls and threads."""

    @property
    def num_assistant_tokens(self) -> int | None:
        """How deep to draft where the caller does not say; None leaves it to what a pass costs and what is accepted."""
        ...

    def start(self, target: PreTrainedModel, request: Request) -> DraftSession:
        """Opens a session for one call; raises ValueError for what cannot work, before any forward pass."""
        ...


def named(drafter: Any) -> str:
    """What a drafter's costs are known by: its class, those of its parts, and the sizes of its models."""
    parts = [getattr(drafter, field.name) for field in fields(drafter)] if is_dataclass(drafter) else []
    told = [f"{sum(p.numel() for p in part.parameters()):,} parameters" for part in parts if isinstance(part, Module)]
    values = zip(fields(drafter), parts, strict=True) if parts else ()
    told += [f"{field.name}={value}" for field, value in values if type(value) is int]
    inner = [one for part in parts if isinstance(part, tuple) for one in part]
    told += [named(one) for one in inner if callable(getattr(one, "start", None))]
    return type(drafter).__name__ + (f"({', '.join(told)})" if told else "")
