"""A smaller causal LM with another tokenizer drafts (arXiv 2502.05202, 2507.02659, 2510.15545).

The target's text is kept in the drafter's tokens beside it (`retokenize`), and what is drafted is carried back: token
by token where both vocabularies have it, or as text that is tokenised again (`carry`). A text that does not go through
both tokenizers unharmed makes bad drafts, and nothing worse: what is kept is the target's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_specgen.draft import Context, Draft, Limit, Node, Request
from hf_specgen.drafters.carry import Guess, NGrams, respelled
from hf_specgen.drafters.draft_model import DraftModel, DraftModelSession, eval_view, refuse_other_ranks
from hf_specgen.drafters.retokenize import Translation
from hf_specgen.prompt import generative, prompt_of
from hf_specgen.spelling import Pair
from hf_specgen.target import why_cropped
from hf_specgen.vocabulary import size

logger = logging.getLogger(__name__)

Method = Literal["auto", "tli", "slem", "ngram", "timing"]

# The part of the target's ids that must be shared for drafts of those alone to be of use; and for "auto" to make them.
FEW, ENOUGH = 0.02, 0.2


@dataclass(frozen=True)
class CrossVocabulary:
    """A causal LM with another vocabulary drafts, in chains, with a cache of its own, on its own device.

    Methods:
        "tli": it draws from the tokens that both vocabularies have, renormalised, so that `Draft.probs` is known; the
            only one with probabilities for `rejection` and `block` verification. Paper: arXiv 2502.05202.
        "slem": it drafts in its own tokens, whose text is tokenised again by the target's tokenizer. Same paper.
        "timing": the same, with probabilities carried over by dynamic time warping. Paper: arXiv 2510.15545.
        "ngram": shared tokens are taken over, and runs of its tokens that make one token that the target has used are
            merged. Paper: OmniDraft, arXiv 2507.02659, without its training of the drafter.
        "auto": "tli" where probabilities are read and a fifth of the target's tokens is shared, else "slem".

    All but "tli" draft without noise under `rejection` and `block`, and count as certain of themselves there: such a
    draft's q is one, whatever it was made by, which keeps the target's distribution.

    Args:
        model: drafts; see `DraftModel`.
        tokenizer: the drafter's.
        target_tokenizer: the target's; without it the `tokenizer=` of the call.
        method: how drafts are carried over.
        sample: as in `DraftModel`.
        num_assistant_tokens: how deep to draft where the caller does not say; None for as deep as pays.
    """

    model: torch.nn.Module
    tokenizer: PreTrainedTokenizerBase
    target_tokenizer: PreTrainedTokenizerBase | None = None
    method: Method = "auto"
    sample: bool = True
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuses what is no model or no tokenizer, and methods that do not exist."""
        if not isinstance(self.model, torch.nn.Module) or isinstance(self.tokenizer, str):
            raise ValueError("CrossVocabulary takes a loaded causal LM and its loaded tokenizer, not paths or hub ids")
        if self.method not in get_args(Method):
            raise ValueError(f"method={self.method!r} is not one of {', '.join(map(repr, get_args(Method)))}")

    def start(self, target: PreTrainedModel, request: Request) -> CrossVocabularySession:
        """See `Drafter`.

        Raises:
            ValueError: a tokenizer is missing or does not say what its tokens stand for, the vocabularies share too
                little for "tli", or the model cannot draft.
        """
        model = generative(self.model)
        refuse_other_ranks(target, model)
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder-decoder; a drafter must be a causal LM")
        if (reason := why_cropped(model, prompt_of(model, [[0]]))) is not None:
            raise ValueError(
                f"{type(model).__name__} cannot draft: its cache cannot be rolled back row by row ({reason})"
            )
        tokenizer = self.target_tokenizer or request.tokenizer
        if tokenizer is None:
            raise ValueError(
                "CrossVocabulary needs the target's tokenizer: pass tokenizer= to the call, or target_tokenizer= to "
                "CrossVocabulary"
            )
        pair = Pair.of((tokenizer, self.tokenizer), (size(target), size(model)))
        return CrossVocabularySession(self, eval_view(model), request, pair)


def _method(asked: Method, pair: Pair, wants_probs: bool) -> Method:
    """The method to use.

    Raises:
        ValueError: too few tokens are shared.
    """
    count = len(pair.shared.target)
    part = count / max(1, sum(spelled is not None for spelled in pair.target.spelled))
    if asked == "tli" and part < FEW:
        raise ValueError(
            f"the two vocabularies share {count} tokens, {part:.1%} of the target's: too few to draft from; "
            'use method="slem"'
        )
    if asked == "auto":
        return "tli" if wants_probs and part >= ENOUGH else "slem"
    return asked


class CrossVocabularySession(DraftModelSession):
    """The drafter's cache in one call, and each row in its tokens.

    Scores are laid out over ids of the target, so that its processors and its noise apply to what means the same. Ids
    without a partner lie behind, or with "tli" nowhere.
    """

    def __init__(self, drafter: CrossVocabulary, model: PreTrainedModel, request: Request, pair: Pair) -> None:
        self.method = _method(drafter.method, pair, request.wants_probs and request.sampled)
        shared = pair.shared
        alone = shared.alone[:0] if self.method == "tli" else shared.alone
        certain = request.wants_probs and self.method != "tli"
        model_alone = DraftModel(model, sample=drafter.sample and not certain)
        request = replace(request, wants_confidence=True)  # it is carried over from token to token
        super().__init__(model_alone, model, request, pair.size + len(alone))
        self.pair = pair
        self.vocabularies = f"{len(shared.target)} tokens are shared; {self.method}"
        self.translations = [Translation(pair) for _ in range(request.batch)]
        self.ngrams = NGrams(pair) if self.method == "ngram" else None
        self._learned = [0] * request.batch
        self._from = torch.cat([shared.drafter, alone]).to(self.device)
        self._to = torch.cat([shared.target, torch.arange(pair.size, self.vocabulary)]).to(self.device)
        self._spoken = torch.zeros(self.vocabulary, dtype=torch.long, device=self.device)
        self._spoken[self._to] = self._from
        self._decided: Context | None = None
        self._chosen: list[Tensor] = []

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        self._decided = context
        depth = list(limit.depth)
        for row, (translation, ids) in enumerate(zip(self.translations, context.ids, strict=True)):
            self._read(row, translation, ids)
            if translation.pending:  # half a character is no text to go on from
                depth[row] = 0
        spoken = Context([translation.ids for translation in self.translations], context.positions, context.noise)
        drafted = super().propose(spoken, replace(limit, depth=tuple(depth)))
        if not drafted.nodes:
            return Draft.empty(self.request.batch)
        return self._exact(drafted) if self.method == "tli" else self._guessed(drafted, limit)

    def _read(self, row: int, translation: Translation, ids: Sequence[int]) -> None:
        if self.ngrams is not None:
            self.ngrams.learn(ids[self._learned[row] :])
            self._learned[row] = len(ids)
        if not self.settled:
            translation.update(ids)
            return
        # A recurrent state holds what it was fed.
        frozen = 0 if self.runner is None or self.runner.forgets else self.settled[row]
        stayed = translation.update(ids, frozen)
        if stayed < self.settled[row]:
            self.settled[row] = stayed
            if self._fed:
                self._fed[row] = 0  # what was drafted lies behind what has changed

    def _chain(self, context: Context, depth: tuple[int, ...], logits: Tensor) -> Draft:
        """As in the class above; tokens are the drafter's, probabilities lie over the target's ids."""
        assert self.runner is not None
        assert self._decided is not None
        nothing = Draft.empty(len(depth), self.device)
        tokens: list[Tensor] = []
        self._chosen = []
        probs: list[Tensor] = []
        chances: list[Tensor] = []
        for step in range(max(depth)):
            if step:
                logits = self._pass(tokens[-1][:, 0], nothing, [step >= deep for deep in depth])
                self.runner.cache.commit([() if step < deep else None for deep in depth])
            prefixes = [[row] for row in self.scoring.host(nothing.tokens, *self._chosen)]
            scores = self.scoring(self._laid_out(logits), self._decided.ids, prefixes)
            noise = self.scoring.noise(context, step, 1)
            chosen = self.ranks.agree(scores.argmax(-1) if noise is None else noise.argmax(scores))
            q = scores.softmax(-1).nan_to_num(0)  # processors may leave nothing to draw from
            self._chosen.append(chosen)
            tokens.append(self._spoken[chosen])
            chances.append(q.gather(-1, chosen.unsqueeze(-1)).squeeze(-1))
            if self.request.wants_probs and noise is not None:
                probs.append(q)
        self._fed = [max(0, deep - 1) for deep in depth]
        drafted = Draft.chain(torch.cat(tokens, 1), depth, torch.cat(probs, 1) if probs else None)
        return replace(drafted, confidence=torch.cat(chances, 1))

    def _laid_out(self, logits: Tensor) -> Tensor:
        """`(batch, 1, vocab)` of the drafter as float32 over the ids of the target and what lies behind them."""
        laid_out = logits.new_full((*logits.shape[:-1], self.vocabulary), -torch.inf, dtype=torch.float32)
        laid_out[..., self._to] = logits[..., self._from].float()
        return laid_out

    def _exact(self, drafted: Draft) -> Draft:
        """The drawn tokens, which the target has too."""
        chosen = torch.cat(self._chosen, 1)
        depth = []
        for tokens, (_, chances) in zip(chosen.tolist(), _rows(drafted), strict=True):
            # Where there was nothing to draw from, which is known before a token is drawn, the chain ends.
            drawn = next((place for place, chance in enumerate(chances) if not chance), len(chances))
            depth.append(len(self._ended(tokens[:drawn])))
        return replace(Draft.chain(chosen, depth, drafted.probs), confidence=drafted.confidence)

    def _guessed(self, drafted: Draft, limit: Limit) -> Draft:
        """What the drafted text is in the target's tokens."""
        rows: list[list[Node]] = []
        for row, (tokens, chances) in enumerate(_rows(drafted)):
            guesses = self._carried(row, tokens, chances)[: limit.depth[row]]
            ids = self._ended([token for token, _ in guesses])
            rows.append([(token, place, guesses[place][1]) for place, token in enumerate(ids)])
        return Draft.of_nodes(rows)

    def _carried(self, row: int, tokens: list[int], chances: list[float]) -> list[Guess]:
        if self.ngrams is not None:
            return self.ngrams.merged(tokens, chances)
        return respelled(self.translations[row].tail, tokens, chances, self.pair, self.method == "timing")

    def _ended(self, ids: list[int]) -> list[int]:
        """Ids up to the first that ends a row, that one included, and none that the target does not have."""
        for place, token in enumerate(ids):
            if token >= self.pair.size:
                return ids[:place]
            if token in self.request.eos:
                return ids[: place + 1]
        return ids


def _rows(drafted: Draft) -> list[tuple[list[int], list[float]]]:
    """For each row the drafted ids and their probabilities."""
    assert drafted.confidence is not None
    rows = zip(drafted.tokens.tolist(), drafted.parents.tolist(), drafted.confidence.tolist(), strict=True)
    counted = [(tokens, sum(parent >= 0 for parent in parents), chances) for tokens, parents, chances in rows]
    return [(tokens[:count], chances[:count]) for tokens, count, chances in counted]
