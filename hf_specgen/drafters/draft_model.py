"""A smaller causal LM that drafts: speculative decoding as in arXiv 2211.17192 and 2302.01318, in chains or trees."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.draft import Context, Draft, Limit, Needs, Request
from hf_specgen.drafters.scoring import Chains, Scoring
from hf_specgen.encoder import arguments_for, reads_source, why_not_for
from hf_specgen.prompt import generative, input_device, prompt_of
from hf_specgen.ranks import Ranks, is_fully_sharded, several
from hf_specgen.target import Target, why_cropped
from hf_specgen.trees import Growth
from hf_specgen.vocabulary import compare, size

logger = logging.getLogger(__name__)

# What configs call the most positions that a (decoder's) text may have.
POSITIONS = ("max_position_embeddings", "max_target_positions", "max_decoder_position_embeddings")


@dataclass(frozen=True)
class DraftModel:
    """A causal LM with the target's vocabulary drafts, with a cache of its own, on its own device.

    Args:
        model: drafts; a wrapper such as PEFT's will do. It is never written to; in train mode an eval-mode copy that
            shares its parameters drafts.
        tokenizer: the drafter's, for a comparison of the vocabularies token by token. Without both tokenizers only the
            sizes are compared.
        sample: draw drafts when the target samples (under `matching` with the target's own noise), or always take the
            most likely token.
        branches: nodes a level of the tree; 1 drafts chains.
        num_assistant_tokens: how deep to draft where the caller does not say; None for as deep as pays.
    """

    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase | None = None
    sample: bool = True
    branches: int = 1
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no model, and a tree without branches."""
        if not isinstance(self.model, torch.nn.Module):
            raise ValueError(
                f"model is {self.model!r}, not a loaded causal LM; to load one by its path or hub id pass "
                'assistant={"method": "draft_model", "model": path}'
            )
        if self.branches < 1:
            raise ValueError(f"branches must be at least 1, not {self.branches}")

    def start(self, target: PreTrainedModel, request: Request) -> DraftModelSession:
        """See `Drafter`.

        Raises:
            ValueError: the vocabularies differ; the message names the first token on which they do.
        """
        model = generative(self.model)
        refuse_other_ranks(target, model)
        if request.source is not None and reads_source(model):
            if (reason := why_not_for(model, target, request.source)) is not None:
                raise ValueError(f"{type(model).__name__} cannot draft for this {type(target).__name__}: {reason}")
        elif model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder-decoder; a drafter must be a causal LM")
        elif why_cropped(model, prompt_of(model, [[0]])) is not None:
            raise ValueError(
                f"{type(model).__name__} cannot draft: its cache cannot be rolled back row by row "
                f"(attention {model.config._attn_implementation!r})"
            )
        verdict = compare(target, model, request.tokenizer, self.tokenizer or request.assistant_tokenizer)
        session = DraftModelSession(self, eval_view(model), request, size(target))
        session.vocabularies = verdict
        return session


class DraftModelSession:
    """The drafter's cache in one call.

    For each row the cache holds `settled` decided tokens, and behind them `ahead`: drafted ones, which are compared
    with what was decided since. What they have in common stays, the rest is overwritten; nobody says what was rejected.

    A drafter that reads the target's source has a cache that is cropped, all rows at one column; `padding` are the
    columns before each row's first token. Its target advances in lockstep, so that this costs nothing.
    """

    needs = Needs()
    vocabularies = ""  # how the two compare, in words

    def __init__(self, drafter: DraftModel, model: PreTrainedModel, request: Request, vocabulary: int) -> None:
        self.drafter = drafter
        self.model = model
        self.device = input_device(model)  # walks through the parameters, so asked once
        # Passes of a model that is split over ranks must be fed the same on all of them.
        self.ranks = Ranks.of(model, self.device, synced_gpus=False)
        self.request = request
        self.vocabulary = vocabulary
        self.scoring = Scoring(request, vocabulary, self.device, drafter.sample)
        self.runner: Target | None = None
        self.settled: list[int] = []
        self.ahead: list[list[int]] = []
        self.padding = [0] * request.batch
        self._source = request.source if reads_source(model) else None
        self._known = size(model)
        self._mine: Draft | None = None
        self._fed: list[int] = []
        self._warned = False

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        depth = self._within_reach(context, limit)
        if max(depth) == 0:
            return Draft.empty(self.request.batch)
        if self.runner is None or self.runner.stale:
            # A row that is not drafted for takes part with its first token only, as a stand-in.
            logits = self._prefill([ids if asked else ids[:1] for ids, asked in zip(context.ids, depth, strict=True)])
        else:
            logits = self._catch_up(self.runner, context, depth)
        if self.drafter.branches > 1 and not limit.chain and self.runner is not None and self.runner.trees:
            roots = torch.tensor([ids[settled - 1] for ids, settled in zip(context.ids, self.settled, strict=True)])
            self._mine = self._tree(context, Limit(depth, limit.nodes, limit.chain), roots, logits)
        else:
            self._mine = self._chain(context, depth, logits)
        return self._mine

    def _within_reach(self, context: Context, limit: Limit) -> tuple[int, ...]:
        """The depths asked for, but nothing for rows that have outgrown the drafter's positions."""
        config = self.model.config.get_text_config()
        longest = next((getattr(config, name) for name in POSITIONS if hasattr(config, name)), None)
        if longest is None:
            return limit.depth
        lengths = [len(ids) for ids in context.ids]
        reach = [longest - (length if self._source is None else max(lengths)) for length in lengths]
        if min(reach) < 1 and not self._warned:
            logger.warning("a text has outgrown the drafter's %d positions; it goes on without drafts", longest)
            self._warned = True
        return tuple(max(0, min(asked, left)) for asked, left in zip(limit.depth, reach, strict=True))

    def _prefill(self, rows: list[Sequence[int]]) -> Tensor:
        """The prompt's pass of the drafter; returns each row's logits after its last token, `(batch, 1, vocab)`."""
        known = [[token if token < self._known else 0 for token in ids] for ids in rows]
        encoded = None if self._source is None else arguments_for(self.model, self._source, self.device)
        self.runner = Target(self.model, prompt_of(self.model, known, encoded))
        if not self.runner.ragged:
            self.padding = [max(map(len, rows)) - len(ids) for ids in rows]
        logits = self.runner.prefill().logits
        self.runner.cache.commit([()] * len(rows))
        self._settle(self.runner, [len(ids) for ids in rows])
        return logits

    def _settle(self, runner: Target, lengths: list[int]) -> None:
        self.settled = lengths
        self.ahead = [[] for _ in lengths]
        runner.cache.mark()

    def _catch_up(self, runner: Target, context: Context, depth: tuple[int, ...]) -> Tensor:
        """Feeds what was decided since the last draft; returns as `_prefill` does."""
        fed, last = self._mine, context.last
        if fed is not None and fed.is_chain:
            # Its ids are on the host if the round before checked this very draft.
            tokens = last.tokens if last is not None and last.draft is fed else fed.tokens.tolist()
            self.ahead = [drafted[:count] for drafted, count in zip(tokens, self._fed, strict=True)]
        kept = list(self.settled)
        for row, (ids, asked) in enumerate(zip(context.ids, depth, strict=True)):
            if asked and runner.forgets:
                kept[row] += _common(self.ahead[row], ids[kept[row] :])
            kept[row] = min(kept[row], len(ids) - 1)
        if not runner.ragged:
            column = min(held + pad for held, pad, asked in zip(kept, self.padding, depth, strict=True) if asked)
            kept = [column - pad for pad in self.padding]
        runner.cache.rewind([held + pad for held, pad in zip(kept, self.padding, strict=True)])
        # A row that is not drafted for takes part with a token that it does not keep.
        fresh = [
            list(ids[held:] if asked else ids[-1:]) for ids, held, asked in zip(context.ids, kept, depth, strict=True)
        ]
        roots = torch.tensor([new[0] for new in fresh])
        idle = [not asked for asked in depth]
        logits = self._pass(roots, Draft.ragged([new[1:] for new in fresh]).to(self.device), idle)
        paths = [range(1, len(new)) if asked else None for new, asked in zip(fresh, depth, strict=True)]
        runner.cache.commit(paths)
        self._settle(
            runner,
            [len(ids) if asked else held for ids, asked, held in zip(context.ids, depth, kept, strict=True)],
        )
        if len(set(map(len, fresh))) == 1:
            return logits[:, -1:]
        ends = torch.tensor([len(new) - 1 for new in fresh], device=logits.device)
        return logits.take_along_dim(ends.view(-1, 1, 1), dim=1)

    def _chain(self, context: Context, depth: tuple[int, ...], logits: Tensor) -> Draft:
        """One token a pass; a row's last one is not fed."""
        assert self.runner is not None
        nothing = Draft.empty(len(depth), self.device)
        chains = Chains(self.scoring, context, self.ranks.agree)
        token = chains.draw(logits)
        for step in range(1, max(depth)):
            logits = self._pass(token[:, 0], nothing, [step >= deep for deep in depth])
            # A row goes no further than was asked: its positions may end there.
            self.runner.cache.commit([() if step < deep else None for deep in depth])
            token = chains.draw(logits)
        self._fed = [max(0, deep - 1) for deep in depth]
        return chains.draft(depth)

    def _tree(self, context: Context, limit: Limit, roots: Tensor, logits: Tensor) -> Draft:
        """A beam of `branches` nodes a level, by the sum of log q + G; each level feeds the tree so far."""
        assert self.runner is not None
        width = min(self.drafter.branches, limit.nodes)
        # The last decided token becomes the root of every pass below.
        self.settled = [settled - (deep > 0) for settled, deep in zip(self.settled, limit.depth, strict=True)]
        lengths = self.runner.cache.lengths
        lengths[:] = [length - (deep > 0) for length, deep in zip(lengths, limit.depth, strict=True)]
        growth, last = Growth(limit.depth, width, width, self.device, self.ranks.agree), 1
        for step in range(min(max(limit.depth), limit.nodes // width)):
            if step:
                beam = Draft(growth.beam.tokens, growth.beam.parents)
                logits = self._pass(roots, beam, [not deep for deep in limit.depth])[:, -last:]
            scores = self.scoring(logits, context.ids, self.scoring.paths(growth.beam, last))
            noise = self.scoring.noise(context, step, last)
            ranked = scores if noise is None else noise.perturb(scores).float()
            last = growth.add(ranked.log_softmax(-1)).shape[1]
        return Draft(growth.beam.tokens, growth.beam.parents, confidence=growth.beam.chances)

    def _pass(self, roots: Tensor, draft: Draft, idle: Sequence[bool] = ()) -> Tensor:
        """A pass. Ids that a smaller table does not hold are fed as 0: worse guesses, and no error."""
        assert self.runner is not None
        if self._known < self.vocabulary:
            roots = roots.where(roots < self._known, 0)
            draft = replace(draft, tokens=draft.tokens.where(draft.tokens < self._known, 0))
        return self.runner.verify(roots, draft, idle).logits


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids two rows share."""
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def refuse_other_ranks(target: PreTrainedModel, model: PreTrainedModel) -> None:
    """Raises ValueError for a drafter whose passes wait for ranks that need not make as many."""
    if not several():
        return
    if is_fully_sharded(model):
        raise ValueError(
            f"the drafter {type(model).__name__} is sharded by FSDP or ZeRO-3, where each of its passes needs one of "
            "every rank, and ranks draft as often as their texts need it: load it whole on each rank"
        )
    ours, theirs = (Ranks.of(one, input_device(one)).members for one in (target, model))
    if theirs and theirs != ours:
        raise ValueError(
            f"the drafter {type(model).__name__} is split over ranks {theirs} and the target over {ours or 'none'}; "
            "split both alike, or load the drafter whole on each rank"
        )


def eval_view(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself in eval mode; else a copy of its modules in eval mode that shares every parameter and buffer."""
    if not any(module.training for module in model.modules()):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    view.train(False)
    return view
