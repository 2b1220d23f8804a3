"""EAGLE: a head drafts from the target's own states, in chains or in trees that grow where it is sure.

A round feeds what was decided since the last one in one pass, then level by level only the nodes that are to go on.
What the head caches of decided tokens always comes from the target's states; of drafted ones nothing stays.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_specgen.cache import SlotCache, new_cache
from hf_specgen.draft import Context, Draft, Limit, Needs, Request
from hf_specgen.drafters.draft_model import eval_view
from hf_specgen.drafters.fitting import lent, refuse_misfit
from hf_specgen.drafters.scoring import Chains, Scoring, target_logits
from hf_specgen.heads.eagle import CONTINUES, EagleHead, EagleOutput
from hf_specgen.heads.said import spread
from hf_specgen.prompt import input_device
from hf_specgen.ranks import Ranks
from hf_specgen.target import MASKLESS_ATTENTION
from hf_specgen.trees import Growth
from hf_specgen.vocabulary import size

if TYPE_CHECKING:
    from transformers import DynamicCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Eagle:
    """A head of EAGLE-1, 2 (arXiv 2401.15077, 2406.16858) or 3 (2503.01840) drafts; the trees are those of EAGLE-2.

    Args:
        head: drafts, on its own device. It is never written to; in train mode an eval-mode copy that shares its
            parameters drafts.
        top_k: children that a node proposes, and the most nodes of a level that go on; 1 drafts chains.
        nodes: the most nodes of a tree.
        sample: draw drafts when the target samples (under `matching` with the target's own noise), or always take the
            most likely tokens.
        num_assistant_tokens: how deep to draft where the caller does not say; None for as deep as pays. The papers
            draft 7 deep.
    """

    head: EagleHead
    top_k: int = 10
    nodes: int = 60
    sample: bool = True
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no head, and trees without nodes."""
        if not isinstance(self.head, EagleHead):
            raise ValueError(
                f"head is a {type(self.head).__name__}, not hf_specgen.EagleHead; to load a published one pass its "
                "path or hub id as assistant="
            )
        if not all(isinstance(count, int) and count > 0 for count in (self.top_k, self.nodes)):
            raise ValueError(f"top_k and nodes must be whole numbers, 1 or more, not {self.top_k} and {self.nodes}")

    def start(self, target: PreTrainedModel, request: Request) -> EagleSession:
        """See `Drafter`.

        Raises:
            ValueError: the head does not fit the target, or cannot draft; the message names both sides.
        """
        _refuse_reading(self.head, target)
        refuse_misfit(self.head, target)
        view = eval_view(self.head)
        assert isinstance(view, EagleHead)
        return EagleSession(self, view.attending_like(target), target, request)


def _refuse_reading(head: EagleHead, target: PreTrainedModel) -> None:
    """Raises ValueError for a head that cannot read a target's states, or cannot attend under a tree."""
    name = type(target).__name__
    if target.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; {CONTINUES}")
    implementation = head.config._attn_implementation or ""
    if any(kind in implementation for kind in MASKLESS_ATTENTION):
        raise ValueError(
            f"the head cannot draft with attention {implementation!r}, which takes no mask of a tree: load it with "
            'attn_implementation="sdpa"'
        )
    head.config.layers_of(target.config.get_text_config(decoder=True).num_hidden_layers)


class EagleSession:
    """The head's cache in one call.

    With n decided ids a row has n - 1 entries (fewer where the target showed no states of the first ones): entry i is
    made from the embedding of `ids[i + 1]` and the target's states at `ids[i]`. The last one holds the root, and says
    what the first level is.

    Attributes:
        head_tokens: entries and nodes fed so far, padding not counted; on the device once a tree has grown there.
    """

    def __init__(self, drafter: Eagle, head: EagleHead, target: PreTrainedModel, request: Request) -> None:
        self.drafter = drafter
        self.head = head
        self.request = request
        self.device = input_device(head)  # walks through the parameters, so asked once
        config = head.config
        text = target.config.get_text_config(decoder=True)
        self.needs = Needs(config.layers_of(text.num_hidden_layers))
        self.scoring = Scoring(request, size(target), self.device, drafter.sample)
        self.head_tokens: int | Tensor = 0
        self._embed: nn.Module = head.embed_tokens if config.own_embeddings else lent(target, "embeddings")
        self._lm_head: nn.Module = head.lm_head if config.own_lm_head else lent(target, "LM head")
        # What is borrowed may be on other devices, and of another dtype.
        self._embed_takes = _device_of(self._embed, input_device(target))
        whose = head if config.own_lm_head else target
        self._lm_head_takes = _device_of(self._lm_head, input_device(whose)), whose.dtype
        # Borrowed modules of a target that is split over ranks must be fed the same on all of them.
        self.ranks = Ranks.of(target if head.borrows else head, self.device, synced_gpus=False)
        # EAGLE-1 learns the target's own states. Those of EAGLE-3 are learned for what the LM head itself says of them.
        self._finished_as = text if config.method == "eagle" and not config.own_lm_head else None
        self._to_target = head.to_target
        self._dtype = head.dtype
        self._cache: SlotCache | None = None
        self._held: list[int] = []  # entries of each row
        # States of decided tokens that no entry was made of yet.
        self._waiting: list[list[Tensor]] = [[] for _ in range(request.batch)]
        self._warned = False

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        for waiting, states in zip(self._waiting, context.hidden or (), strict=True):
            if len(states):
                waiting.append(states)
        depth = self._within_reach(context, limit)
        if max(depth) == 0:
            return Draft.empty(self.request.batch, self.device)
        root = self._catch_up(context, [deep > 0 for deep in depth])
        if limit.chain or self.drafter.top_k == 1:
            return self._chain(context, [min(deep, self.drafter.nodes) for deep in depth], root)
        return self._tree(context, depth, min(self.drafter.nodes, limit.nodes), root)

    def _within_reach(self, context: Context, limit: Limit) -> tuple[int, ...]:
        """The depths asked for, but nothing for rows that have outgrown the head's positions."""
        longest = self.head.config.max_position_embeddings
        reach = [longest - position for position in context.positions]
        if min(reach) < 1 and not self._warned:
            logger.warning("a text has outgrown the head's %d positions; it goes on without drafts", longest)
            self._warned = True
        for waiting, left in zip(self._waiting, reach, strict=True):
            if left < 1:
                waiting.clear()  # nobody will read them
        asked = zip(limit.depth, reach, self._waiting, strict=True)
        return tuple(max(0, min(deep, left)) if waiting else 0 for deep, left, waiting in asked)

    # Entries

    def _catch_up(self, context: Context, asked: Sequence[bool]) -> EagleOutput:
        """Makes the entries that are missing; returns those of the roots, `(batch, 1, hidden)` each."""
        states = [self._taken(row, len(context.ids[row])) if ask else None for row, ask in enumerate(asked)]
        # A row that is not drafted for takes part with an entry that it does not keep.
        like = next(held for held in states if held is not None)[:1]
        fresh = [torch.zeros_like(like) if held is None else held for held in states]
        counts = [len(held) for held in fresh]
        tokens = [list(ids[-count:]) for ids, count in zip(context.ids, counts, strict=True)]
        self.head_tokens += sum(count for count, ask in zip(counts, asked, strict=True) if ask)
        paths = [range(1, count) if ask else None for count, ask in zip(counts, asked, strict=True)]
        if self._cache is None:
            output = self._first(tokens, fresh, paths)
            ends = [0] * len(counts)
        else:
            output = self._later(self._cache, tokens, fresh, paths)
            ends = [count - 1 for count in counts]
        assert self._cache is not None
        self._cache.mark()
        self._held = list(self._cache.lengths)
        place = torch.tensor(ends, device=self.device).view(-1, 1, 1)
        return EagleOutput(*(part.take_along_dim(place, dim=1) for part in output))

    def _taken(self, row: int, ids: int) -> Tensor:
        """A row's waiting states, of which there are no more than ids."""
        states = torch.cat([states.to(self.device, self._dtype) for states in self._waiting[row]])[-ids:]
        self._waiting[row] = []
        return states

    def _first(
        self, tokens: list[list[int]], states: list[Tensor], paths: Sequence[Sequence[int] | None]
    ) -> EagleOutput:
        """The first entries, padded on the left as stock pads prompts, so that the cache is made as the target's is.

        Returns those of the roots.
        """
        columns = max(map(len, tokens))
        padding = [columns - len(row) for row in tokens]
        pads = list(zip(padding, tokens, states, strict=True))
        ids = torch.tensor([[*[0] * pad, *row] for pad, row, _ in pads])
        features = torch.stack([nn.functional.pad(held, (0, 0, pad, 0)) for pad, _, held in pads])
        places = torch.arange(columns, device=self.device) - torch.tensor(padding, device=self.device).view(-1, 1)
        mask = (places >= 0).long() if any(padding) else None
        cache = cast("DynamicCache", new_cache(self.head.config))
        output = self.head(
            self._embedded(ids), self.head.fuse(features), places.clamp(min=0), mask, cache, last_only=True
        )
        self._cache = SlotCache(cache, self.head, padding, columns)
        self._cache.commit([None if path is None else () for path in paths])
        return EagleOutput(*output)

    def _later(
        self,
        cache: SlotCache,
        tokens: list[list[int]],
        states: list[Tensor],
        paths: Sequence[Sequence[int] | None],
    ) -> EagleOutput:
        """Entries behind those that are there; rows of unequal length are padded on the right."""
        chains = Draft.ragged([row[1:] for row in tokens]).to(self.device)
        ids = torch.tensor([[*row, *[0] * (chains.nodes + 1 - len(row))] for row in tokens])
        features = nn.utils.rnn.pad_sequence(states, batch_first=True)
        cache.begin(chains.nodes + 1)
        output = self._pass(cache, ids, self.head.fuse(features), chains, chains.tree.depth)
        cache.commit(paths)
        return output

    def _pass(self, cache: SlotCache, ids: Tensor, features: Tensor, draft: Draft, depth: Tensor) -> EagleOutput:
        """A pass over places of a draft that lie `depth` behind the committed entries of their rows.

        Positions count entries, also where those of the first tokens are missing: rotary turns are relative.
        """
        start = torch.tensor(cache.lengths, device=self.device).view(-1, 1)
        mask = cache.mask(draft, self._dtype)
        output = self.head(self._embedded(ids), features, start + depth, mask, cache)
        return EagleOutput(*output)

    def _embedded(self, ids: Tensor) -> Tensor:
        embedded: Tensor = self._embed(ids.to(self._embed_takes))
        return embedded.to(self.device, self._dtype)

    # Drafts

    def _logits(self, hidden: Tensor) -> Tensor:
        """`(batch, width, vocab)` over the target's ids; those that the head cannot say have -inf."""
        logits: Tensor = self._lm_head(hidden.to(*self._lm_head_takes)).to(self.device)
        if self._finished_as is not None:
            logits = target_logits(logits, self._finished_as)
        return spread(logits, self._to_target, self.scoring.vocabulary)

    def _chain(self, context: Context, depth: Sequence[int], place: EagleOutput) -> Draft:
        """One token a pass; a row's last one is not fed."""
        assert self._cache is not None
        nothing = Draft.empty(len(depth), self.device)
        chains = Chains(self.scoring, context, self.ranks.agree)
        token = chains.draw(self._logits(place.hidden))
        for step in range(1, max(depth)):
            self._cache.begin(1)
            place = self._pass(self._cache, token, place.features, nothing, nothing.tree.depth)
            self._cache.commit([() if step < deep else None for deep in depth])
            self.head_tokens += sum(step < deep for deep in depth)
            token = chains.draw(self._logits(place.hidden))
        self._cache.rewind(self._held)
        return chains.draft(depth)

    def _tree(self, context: Context, depth: Sequence[int], most: int, place: EagleOutput) -> Draft:
        """Level by level; of all nodes that were proposed the `most` likeliest are the draft."""
        levels, count = min(max(depth), most), 1
        # No more nodes are fed than are asked for; those of the last level are not.
        width = min(self.drafter.top_k, most // max(1, levels - 1))
        features = place.features
        growth = Growth(depth, self.drafter.top_k, width, self.device, self.ranks.agree)
        for step in range(levels):
            if step:
                place = self._level(growth, count, features)
                self.head_tokens = self.head_tokens + (growth.beam.parents[:, -count:] >= 0).sum()
            scores = self.scoring(self._logits(place.hidden), context.ids, self.scoring.paths(growth.beam, count))
            noise = self.scoring.noise(context, step, count)
            ranked = scores if noise is None else noise.perturb(scores).float()
            above = growth.add(ranked.log_softmax(-1))
            features, count = place.features.take_along_dim(above.unsqueeze(-1), dim=1), above.shape[1]
        best = growth.best(most)
        return Draft(best.tokens, best.parents, confidence=best.chances)

    def _level(self, growth: Growth, count: int, features: Tensor) -> EagleOutput:
        """A pass over the last `count` nodes of the beam, behind the root and the nodes fed before."""
        assert self._cache is not None
        beam = Draft(growth.beam.tokens, growth.beam.parents)
        # The root's entry is committed, and is the root of the tree that the mask is made of. A row without entries has
        # no draft either.
        self._cache.lengths[:] = [max(held - 1, 0) for held in self._held]
        self._cache.begin(count, behind=1 + beam.nodes - count)
        output = self._pass(self._cache, beam.tokens[:, -count:], features, beam, beam.tree.depth[:, -count:])
        self._cache.rewind(self._held)
        return output


def _device_of(module: nn.Module, otherwise: torch.device) -> torch.device:
    """Where a module is; offloaded weights are nowhere (meta)."""
    parameter = next(module.parameters(), None)
    return otherwise if parameter is None or parameter.is_meta else parameter.device
