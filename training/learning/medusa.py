"""What Medusa's heads learn from a batch (arXiv 2401.10774): head h the token h + 2 places after the state it reads."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from running.runs import DrafterTraining
from running.targets import hidden_states
from torch import Tensor, nn

from hf_specgen.drafters.fitting import lent
from hf_specgen.drafters.scoring import target_logits
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.prompt import generative
from learning.chunks import in_chunks
from learning.losses import IGNORED, Teacher, TopK, cross_entropy, divergence
from learning.some_ids import SomeIds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How the parts of the loss are weighed.

    Attributes:
        decay: head h counts `decay ** h`: far tokens can hardly be guessed, and matter less.
        distillation: share of the KL to the target's own distribution at a head's place; the rest is cross-entropy.
        heads_weight: of all heads together beside the target's own loss, where the target learns too.
        others: ids drawn anew for each batch among those outside `ids`, see `MedusaTraining`.
    """

    decay: float = 0.8
    distillation: float = 0.0
    heads_weight: float = 0.2
    others: int = 1024

    def __post_init__(self) -> None:
        """Refuses shares that are none."""
        if not 0 <= self.distillation <= 1:
            raise ValueError(f"distillation is a share from 0 to 1, not {self.distillation}")
        if not 0 < self.decay <= 1 or self.heads_weight < 0 or self.others < 0:
            raise ValueError(
                f"decay must be above 0 and at most 1, heads_weight and others 0 or more, not {self.decay}, "
                f"{self.heads_weight} and {self.others}"
            )


@dataclass(frozen=True)
class Places:
    """The labelled tokens of a batch, in one line.

    Attributes:
        rows: `(places,)`.
        columns: `(places,)`, of the label; what the target says of it stands one column before.
        labels: `(places,)` ids.
    """

    rows: Tensor
    columns: Tensor
    labels: Tensor

    @classmethod
    def of(cls, labels: Tensor) -> Places:
        """Those of unshifted labels `(batch, tokens)`. Nothing foretells a first token."""
        rows, before = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
        return cls(rows, before + 1, labels[rows, before + 1])


class MedusaTraining(DrafterTraining):
    """Heads, and a target that is frozen (Medusa-1) or learns through an adapter (Medusa-2).

    Args:
        target: the model; where any of its tensors requires a gradient it learns too.
        heads: to be trained.
        recipe: the weights of the loss.
        ids: `(n,)` ascending, those whose logits are computed in training, see `SomeIds`; labels outside are left out.
            None for all: exact, and many times slower where the vocabulary is large.
        stored_from: where the last layer's states begin on the last axis of stored `hidden_states`.
    """

    def __init__(
        self,
        target: nn.Module,
        heads: MedusaHeads,
        recipe: Recipe = Recipe(),
        ids: Tensor | None = None,
        stored_from: int = 0,
    ) -> None:
        super().__init__(target)
        self.heads = heads
        self.recipe = recipe
        self.heads_weight = recipe.heads_weight
        self.stored_from = stored_from
        self.learns = any(parameter.requires_grad for parameter in target.parameters())
        self.text = generative(target).config.get_text_config(decoder=True)
        self.some = None if ids is None else SomeIds(ids.to(heads.device), self.text.vocab_size, recipe.others)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """What Trainer calls for `--gradient_checkpointing`; of a frozen target nothing is kept anyway."""
        if self.learns:
            generative(self.target).activation_checkpointing_enable(**kwargs)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **stored: Tensor,
    ) -> dict[str, Tensor]:
        """The loss, and how often each head is right.

        Args:
            input_ids: `(batch, tokens)`, padded on the right.
            attention_mask: `(batch, tokens)`.
            labels: `(batch, tokens)`, not shifted; `IGNORED` where nothing is to be learned.
            num_items_in_batch: labels of the whole accumulation window; None for those of this batch.
            stored: what a data folder may hold: `hidden_states` `(batch, tokens, width)`, then a frozen target is not
                run; `top_ids` and `top_logprobs` `(batch, tokens, k)`, the target's distribution behind each token.

        Returns:
            "loss"; "accuracy_0", ...: the share of labels that a head says, NaN where there are none; where the target
            learns, its own "language_loss" too.
        """
        places = Places.of(labels)
        if len(places.labels) == 0:
            logger.warning("a batch has no labels: it adds nothing to the loss")
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        states = self._states(input_ids, attention_mask, stored.get("hidden_states"))
        teacher = self._teacher(input_ids, attention_mask, places, states, stored)
        report = self._heads(states, places, teacher, count)
        if self.learns:
            report["language_loss"] = self._weighed(self._said(states, places), places.labels, teacher, count)
            report["loss"] = report["language_loss"] + self.heads_weight * report["loss"]
        return report

    def _heads(self, states: Tensor, places: Places, teacher: Teacher | None, count: Tensor | int) -> dict[str, Tensor]:
        """The heads' losses together, and how often each is right."""
        drawn, labels = None, places.labels
        if self.some is not None:
            drawn, labels = self.some.draw(), self.some.labels(labels)
            teacher = None if teacher is None else self.some.teacher(teacher)
        report: dict[str, Tensor] = {}
        total = torch.zeros((), device=states.device)
        for head in range(self.heads.config.num_heads):
            ahead = head + 2
            kept = ((places.columns >= ahead) & (labels != IGNORED)).nonzero().squeeze(1)
            read = states[places.rows[kept], places.columns[kept] - ahead]
            theirs = None if teacher is None else teacher[kept]
            scored = partial(self._scored, partial(self._logits, head, drawn), read, labels[kept], theirs, count)
            loss, hits = in_chunks(scored, len(kept), self.text.vocab_size if drawn is None else len(drawn))
            total = total + self.recipe.decay**head * loss
            report[f"accuracy_{head}"] = hits / len(kept) if len(kept) else hits.new_full((), torch.nan)
        return {"loss": total, **report}

    def _scored(
        self,
        logits_of: Callable[[Tensor], Tensor],
        states: Tensor,
        labels: Tensor,
        teacher: Teacher | None,
        count: Tensor | int,
        chunk: slice,
    ) -> tuple[Tensor, Tensor]:
        """One head's loss and hits over some of its places."""
        logits, labels = logits_of(states[chunk]), labels[chunk]
        loss = self._weighed(logits, labels, None if teacher is None else teacher[chunk], count)
        return loss, (logits.argmax(-1) == labels).sum().float()

    def _weighed(self, logits: Tensor, labels: Tensor, teacher: Teacher | None, count: Tensor | int) -> Tensor:
        """Cross-entropy, and the KL to the target's distribution beside it."""
        loss = cross_entropy(logits, labels, count)
        if teacher is None:
            return loss
        share = self.recipe.distillation
        return (1 - share) * loss + share * divergence("forward_kl", logits, teacher, count=count)

    def _logits(self, head: int, drawn: Tensor | None, states: Tensor) -> Tensor:
        """`(places, known ids)` of one head."""
        own = self.heads.lm_heads
        lm_head: Any = own[min(head, len(own) - 1)] if len(own) else lent(generative(self.target), "LM head")
        features = self.heads.features(head, states.to(self.heads.dtype)).to(lm_head.weight.dtype)
        scale = self.heads.config.logit_scale
        if drawn is None:
            return cast(Tensor, lm_head(features) * scale)
        return cast(SomeIds, self.some).logits(lm_head, features, drawn, scale)

    def _states(self, input_ids: Tensor, attention_mask: Tensor, stored: Tensor | None = None) -> Tensor:
        """The target's last states `(batch, tokens, hidden)`; stored ones are those of a target that stays as it is."""
        if stored is not None and not self.learns:
            return stored[..., self.stored_from : self.stored_from + self.heads.config.hidden_size]
        with torch.set_grad_enabled(self.learns and torch.is_grad_enabled()):
            return hidden_states(self.target, input_ids, attention_mask)[-1]

    def _said(self, states: Tensor, places: Places) -> Tensor:
        """`(places, vocab)`: the target's logits of the token at each place."""
        lm_head: Any = lent(generative(self.target), "LM head")
        logits = lm_head(states[places.rows, places.columns - 1].to(lm_head.weight.dtype))
        return target_logits(logits, self.text)

    @torch.no_grad()
    def _teacher(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        places: Places,
        states: Tensor,
        stored: dict[str, Tensor],
    ) -> Teacher | None:
        """The target's own distribution of the token at each place; before an adapter changed it."""
        if not self.recipe.distillation:
            return None
        if "top_ids" in stored:
            at = places.rows, places.columns - 1
            return TopK(stored["top_ids"][at].long(), stored["top_logprobs"][at].float())
        if not self.learns:
            return self._said(states, places)
        training = self.target.training
        self.target.eval()
        with self.target.disable_adapter():  # type: ignore[operator]
            said = self._said(self._states(input_ids, attention_mask), places)
        self.target.train(training)
        return said
