"""A smaller causal LM that drafts: speculative decoding as in arXiv 2211.17192 and 2302.01318, in chains or trees."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.draft import Context, Draft, Limit, Needs, Request, Verified
from hf_specgen.target import Target, generative, prompt_of, why_cropped
from hf_specgen.vocabulary import compare, size

if TYPE_CHECKING:
    from hf_specgen.sampling import Noise

logger = logging.getLogger(__name__)


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
        num_assistant_tokens: how deep to draft where the caller does not say.
    """

    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase | None = None
    sample: bool = True
    branches: int = 1
    num_assistant_tokens: int = 5

    def __post_init__(self) -> None:
        """Refuses a tree without branches."""
        if self.branches < 1:
            raise ValueError(f"branches must be at least 1, not {self.branches}")

    def start(self, target: PreTrainedModel, request: Request) -> DraftModelSession:
        """See `Drafter`.

        Raises:
            ValueError: the vocabularies differ; the message names the first token on which they do.
        """
        model = generative(self.model)
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder-decoder; a drafter must be a causal LM")
        if why_cropped(model, prompt_of(model, [[0]])) is not None:
            raise ValueError(
                f"{type(model).__name__} cannot draft: its cache cannot be rolled back row by row "
                f"(attention {model.config._attn_implementation!r})"
            )
        compare(target, model, request.tokenizer, self.tokenizer or request.assistant_tokenizer)
        return DraftModelSession(self, eval_view(model), request, size(target))


class DraftModelSession:
    """The drafter's cache in one call.

    For each row the cache holds `settled` decided tokens, and behind them `ahead`: drafted ones, which are compared
    with what was decided since. What they have in common stays, the rest is overwritten; nobody says what was rejected.
    """

    needs = Needs()

    def __init__(self, drafter: DraftModel, model: PreTrainedModel, request: Request, vocabulary: int) -> None:
        self.drafter = drafter
        self.model = model
        self.device: torch.device = model.device  # walks through the parameters, so asked once
        self.request = request
        self.vocabulary = vocabulary
        self.processors = None if request.processors is None else request.processors.to(model.device)
        self._reads_prefix = self.processors is not None and not self.processors.pure
        self.runner: Target | None = None
        self.settled: list[int] = []
        self.ahead: list[list[int]] = []
        self._known = size(model)
        self._mine: Draft | None = None
        self._fed: list[int] = []
        self._warned = False

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        depth = self._within_reach(context, limit)
        if max(depth) == 0:
            return Draft.empty(self.request.batch)
        # A row that is not drafted for takes part with its first token only, as a stand-in.
        rows = [ids if asked else ids[:1] for ids, asked in zip(context.ids, depth, strict=True)]
        logits = self._prefill(rows) if self.runner is None else self._catch_up(self.runner, rows, context.last)
        if self.drafter.branches > 1 and not limit.chain:
            roots = torch.tensor([ids[-1] for ids in rows])
            self._mine = self._tree(context, Limit(depth, limit.nodes, limit.chain), roots, logits)
        else:
            self._mine = self._chain(context, depth, logits)
        return self._mine

    def _within_reach(self, context: Context, limit: Limit) -> tuple[int, ...]:
        """The depths asked for, but nothing for rows that have outgrown the drafter's positions."""
        longest: int | None = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if longest is None:
            return limit.depth
        reach = [longest - len(ids) for ids in context.ids]
        if min(reach) < 1 and not self._warned:
            logger.warning("a text has outgrown the drafter's %d positions; it goes on without drafts", longest)
            self._warned = True
        return tuple(max(0, min(asked, left)) for asked, left in zip(limit.depth, reach, strict=True))

    def _prefill(self, rows: list[Sequence[int]]) -> Tensor:
        """The prompt's pass of the drafter; returns each row's logits after its last token, `(batch, 1, vocab)`."""
        known = [[token if token < self._known else 0 for token in ids] for ids in rows]
        self.runner = Target(self.model, prompt_of(self.model, known))
        logits = self.runner.prefill().logits
        self.runner.cache.commit([()] * len(rows))
        self._settle(rows)
        return logits

    def _settle(self, rows: list[Sequence[int]]) -> None:
        self.settled = [len(ids) for ids in rows]
        self.ahead = [[] for _ in rows]

    def _catch_up(self, runner: Target, rows: list[Sequence[int]], last: Verified | None) -> Tensor:
        """Feeds what was decided since the last draft; returns as `_prefill` does."""
        fed = self._mine
        if fed is not None and fed.is_chain:
            # Its ids are on the host if the round before checked this very draft.
            tokens = last.tokens if last is not None and last.draft is fed else fed.tokens.tolist()
            self.ahead = [drafted[:count] for drafted, count in zip(tokens, self._fed, strict=True)]
        fresh = []
        for row, ids in enumerate(rows):
            settled = self.settled[row]
            common = min(settled + _common(self.ahead[row], ids[settled:]), len(ids) - 1)
            runner.cache.lengths[row] = common
            fresh.append(list(ids[common:]))
        roots = torch.tensor([new[0] for new in fresh])
        logits = self._pass(roots, Draft.ragged([new[1:] for new in fresh]).to(self.device))
        runner.cache.commit([range(1, len(new)) for new in fresh])
        self._settle(rows)
        ends = torch.tensor([len(new) - 1 for new in fresh], device=logits.device)
        return logits.take_along_dim(ends.view(-1, 1, 1), dim=1)

    def _chain(self, context: Context, depth: tuple[int, ...], logits: Tensor) -> Draft:
        """One token a pass; a row's last one is not fed."""
        assert self.runner is not None
        nothing = Draft.empty(len(depth), self.device)
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for step in range(max(depth)):
            if step:
                logits = self._pass(tokens[-1][:, 0], nothing)
                # A row goes no further than was asked: its positions may end there.
                self.runner.cache.commit([() if step < deep else None for deep in depth])
            prefixes = [[row] for row in self._host(nothing.tokens, *tokens)] if self._reads_prefix else []
            scores = self._scores(logits, context, prefixes)
            noise = self._noise(context, step, 1)
            tokens.append(scores.argmax(-1) if noise is None else noise.argmax(scores))
            if self.request.wants_probs and noise is not None:
                probs.append(scores.softmax(-1))
        self._fed = [max(0, deep - 1) for deep in depth]
        return Draft.chain(torch.cat(tokens, 1), depth, torch.cat(probs, 1) if probs else None)

    def _tree(self, context: Context, limit: Limit, roots: Tensor, logits: Tensor) -> Draft:
        """A beam of `branches` nodes a level, by the sum of log q + G; each level feeds the tree so far."""
        assert self.runner is not None
        batch, width = len(limit.depth), min(self.drafter.branches, limit.nodes)
        # The last decided token becomes the root of every pass below.
        self.settled = [settled - 1 for settled in self.settled]
        self.runner.cache.lengths[:] = self.settled
        tokens = parents = torch.empty((batch, 0), dtype=torch.long, device=self.device)
        frontier = parents.new_zeros((batch, 1))
        sums = torch.zeros((batch, 1), device=self.device, dtype=torch.float32)
        for step in range(min(max(limit.depth), limit.nodes // width)):
            if step:
                passed = self._pass(roots, Draft(tokens, parents))
                logits = passed.take_along_dim(frontier.unsqueeze(-1), dim=1)
            scores = self._scores(logits, context, self._paths(tokens, parents, frontier))
            noise = self._noise(context, step, frontier.shape[1])
            ranked = (scores if noise is None else noise.perturb(scores).float()).log_softmax(-1)
            best = ranked.topk(min(width, ranked.shape[-1]))  # (batch, frontier, width)
            sums, place = (sums.unsqueeze(-1) + best.values).flatten(1).topk(best.indices.shape[-1])
            inside = torch.tensor([step < deep for deep in limit.depth], device=tokens.device).unsqueeze(1)
            above = frontier.gather(1, place // best.indices.shape[-1]).where(inside, -1)
            frontier = tokens.shape[1] + 1 + torch.arange(place.shape[1], device=tokens.device).expand(batch, -1)
            tokens = torch.cat([tokens, best.indices.flatten(1).gather(1, place)], dim=1)
            parents = torch.cat([parents, above], dim=1)
        return Draft(tokens, parents)

    def _pass(self, roots: Tensor, draft: Draft) -> Tensor:
        """A pass. Ids that a smaller table does not hold are fed as 0: worse guesses, and no error."""
        assert self.runner is not None
        if self._known < self.vocabulary:
            roots = roots.where(roots < self._known, 0)
            draft = replace(draft, tokens=draft.tokens.where(draft.tokens < self._known, 0))
        return self.runner.verify(roots, draft).logits

    def _noise(self, context: Context, step: int, nodes: int) -> Noise | None:
        """The noise of the tokens `step` places after the next one; None where drafts are the most likely tokens."""
        if context.noise is None or not self.drafter.sample:
            return None
        positions = torch.tensor(context.positions, device=self.device).unsqueeze(1)
        return context.noise.to(self.device).at((positions + step).expand(-1, nodes), positions[:, 0])

    def _scores(self, logits: Tensor, context: Context, paths: list[list[list[int]]]) -> Tensor:
        """`(batch, nodes, vocab)` float32 over the target's vocabulary, after the processors a drafter may run.

        Args:
            logits: `(batch, nodes, vocab)` of the drafter, whose table may be padded to another size.
            context: for the ids before the draft.
            paths: for each row and node the drafted ids up to it; only read where processors look at the prefix.
        """
        logits = logits.float()
        if logits.shape[-1] != self.vocabulary:
            missing = self.vocabulary - logits.shape[-1]  # negative: the drafter's table is the longer one
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        processors = self.processors
        if processors is None or processors.empty:
            return logits
        logits = logits.clone()  # processors may write into it
        if processors.pure:
            return processors.warp(logits)
        for row, ids in enumerate(context.ids):
            apart = processors.row(row)
            for node in range(logits.shape[1]):
                prefix = torch.tensor([[*ids, *paths[row][node]]], device=logits.device)
                logits[row, node] = apart(prefix, logits[row, node : node + 1])[0]
        return logits

    def _host(self, *columns: Tensor) -> list[list[int]]:
        """The drafted ids on the host, where a processor looks at them; elsewhere nothing is read from the device."""
        if not self._reads_prefix:
            return [[]] * columns[0].shape[0]
        rows: list[list[int]] = torch.cat(columns, dim=1).tolist()
        return rows

    def _paths(self, tokens: Tensor, parents: Tensor, frontier: Tensor) -> list[list[list[int]]]:
        """For each row and frontier node the drafted ids up to it."""
        drafted, above = self._host(tokens), self._host(parents)
        paths: list[list[list[int]]] = []
        for row, nodes in enumerate(self._host(frontier)):
            paths.append([])
            for node in nodes:
                path: list[int] = []
                while node > 0:
                    path.insert(0, drafted[row][node - 1])
                    node = above[row][node - 1]
                paths[-1].append(path)
        return paths


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading ids two rows share."""
    shared = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        shared += 1
    return shared


def eval_view(model: PreTrainedModel) -> PreTrainedModel:
    """The model itself in eval mode; else a copy of its modules in eval mode that shares every parameter and buffer."""
    if not any(module.training for module in model.modules()):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    view = copy.deepcopy(model, shared)
    view.train(False)
    return view
