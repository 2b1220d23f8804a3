"""What an EAGLE head learns from a batch (arXiv 2503.01840, 2401.15077): drafts of several tokens from every place."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from running.runs import DrafterTraining
from running.targets import hidden_states
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torch.utils.checkpoint import checkpoint

from hf_specgen.drafters.fitting import lent
from hf_specgen.drafters.scoring import target_logits
from hf_specgen.heads.eagle import EagleHead
from hf_specgen.heads.said import copy_lm_head, lm_head_of
from hf_specgen.prompt import generative
from learning.losses import IGNORED, LOWEST, cross_entropy, divergence, mean
from learning.unroll import Step, unroll

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """How the parts of the loss are weighed.

    Attributes:
        steps: tokens that are drafted from each place, the later ones under the head's own predictions. 1 is plain
            teacher forcing.
        decay: step j counts `decay ** j`: it is only reached in drafting if those before were right.
        distillation: share of KL(target || head); the rest is cross-entropy with the text.
        regression: weight of the distance between the features made and the target's last states, for EAGLE-1, where
            the former stand for the latter. Those of EAGLE-3 are free.
    """

    steps: int = 4
    decay: float = 0.8
    distillation: float = 1.0
    regression: float = 0.0

    def __post_init__(self) -> None:
        """Refuses weights that are none."""
        if self.steps < 1 or not 0 < self.decay <= 1:
            raise ValueError(
                f"steps must be 1 or more and decay above 0 and at most 1, not {self.steps} and {self.decay}"
            )
        if not 0 <= self.distillation <= 1 or self.regression < 0:
            raise ValueError(
                f"distillation is a share from 0 to 1 and regression 0 or more, not {self.distillation} and "
                f"{self.regression}"
            )


class EagleTraining(DrafterTraining):
    """A head beside its frozen target.

    Entry i of a text (see `hf_specgen.heads.eagle`) is scored in every step on what follows token i + 1, whatever its
    feature was made of: by the text, and by the target's own distribution at the same prefix. Scored are nodes that
    there are in drafting: the token that is fed and the one that follows are both labelled, and so is the one each
    ancestor was fed. (A text's first labelled token comes from the target itself.)

    A label outside the draft vocabulary can be said by nobody and has no loss. Elsewhere the target's distribution is
    that over the draft vocabulary, made to sum up to 1.

    Args:
        target: the model; it stays as it is.
        head: to be trained.
        recipe: the weights of the loss.
        ids: `(n,)` ascending, to which the loss is kept for a head that borrows the target's LM head; None for all. A
            head with its own is trained on what it can say.
        stored_layers: which of the target's `hidden_states` the batches hold side by side. With those that the head
            reads, and the last one, the target is not run.

    Raises:
        ValueError: the head attends by a kernel that takes no mask.
    """

    def __init__(
        self,
        target: nn.Module,
        head: EagleHead,
        recipe: Recipe = Recipe(),
        ids: Tensor | None = None,
        stored_layers: Sequence[int] = (),
    ) -> None:
        if head.config._attn_implementation != "sdpa":
            raise ValueError(
                f"the head attends by {head.config._attn_implementation!r}, which does not take the masks of drafts in "
                'training: load it with attn_implementation="sdpa"'
            )
        super().__init__(target.requires_grad_(False))
        self.head = head.requires_grad_(True)
        if head.config.own_embeddings:
            head.embed_tokens.requires_grad_(False)
        self.recipe = recipe
        self.checkpointing = False
        model = generative(target)
        self.text = model.config.get_text_config(decoder=True)
        depth = self.text.num_hidden_layers
        # The last one has two names.
        self.reads = [layer % (depth + 1) for layer in head.config.layers_of(depth)]
        self.stored = {layer % (depth + 1): place for place, layer in enumerate(stored_layers)}
        said = head.to_target if head.config.own_lm_head else ids
        # The target's LM head, as far as the loss goes; a copy where it is a part.
        self.rows: nn.Linear | None = None
        if said is not None:
            theirs = lm_head_of(model)
            biased = getattr(theirs, "bias", None) is not None
            self.rows = nn.Linear(self.text.hidden_size, len(said), bias=biased, device=model.device, dtype=model.dtype)
            copy_lm_head(theirs, self.rows, said.tolist())
            self.rows.requires_grad_(False)
        said = torch.arange(self.text.vocab_size) if said is None else said.cpu()
        place = torch.full((self.text.vocab_size,), IGNORED)
        place[said] = torch.arange(len(said))
        self.register_buffer("place", place.to(head.device), persistent=False)
        self.known = len(said)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """What Trainer calls for `--gradient_checkpointing`: a step's layers and logits are computed twice."""
        self.checkpointing = True

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
        **stored: Tensor,
    ) -> dict[str, Tensor]:
        """The loss, and how often each step is right.

        Args:
            input_ids: `(batch, tokens)`, padded on the right.
            attention_mask: `(batch, tokens)`.
            labels: `(batch, tokens)`, not shifted; `IGNORED` where nothing is to be learned.
            num_items_in_batch: labels of the whole accumulation window; None for those of this batch.
            stored: what a data folder may hold: `hidden_states` `(batch, tokens, width)`; `top_ids` and `top_logprobs`
                `(batch, tokens, k)`, the target's distribution behind each token.

        Returns:
            "loss"; "accuracy_0", ...: the share of places where a step says the label, NaN where there are none.

        Raises:
            ValueError: rows are padded on the left.
        """
        if bool((attention_mask[:, 1:] > attention_mask[:, :-1]).any()):
            raise ValueError("rows are padded on the left: a collator for training pads on the right")
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        drafted = (labels[:, 1:-1] != IGNORED) & (labels[:, 2:] != IGNORED)
        if not bool(drafted.any()):
            logger.warning("a batch has no two labels in a row: it adds nothing to the loss")
        if not drafted.shape[1]:
            return {"loss": torch.stack([0 * weight.sum() for weight in self.head.parameters()]).sum()}
        states = self._states(input_ids, attention_mask, stored)
        embeddings = self.head.embed_tokens if self.head.config.own_embeddings else self._lent("embeddings")
        embeds = embeddings(input_ids[:, 1:-1]).to(self.head.dtype)
        features = self.head.fuse(
            torch.cat([states[layer][:, :-2] for layer in self.reads], dim=-1).to(self.head.dtype)
        )
        steps = unroll(self.head, embeds, features, drafted, self.recipe.steps, self.checkpointing)
        last = states.get(self.text.num_hidden_layers)
        teacher = self._teacher(drafted, None if last is None else last[:, 1:-1], stored)
        number = drafted.flatten().cumsum(0).view_as(drafted) - 1
        report, total = {}, torch.zeros((), device=embeds.device)
        for ahead, step in enumerate(steps):
            rows, columns = step.drafted.nonzero(as_tuple=True)
            entries = step.entries[rows, columns]
            known = self._place(labels[rows, entries + 2])
            kept = (known != IGNORED).nonzero().squeeze(1)
            theirs = None if teacher is None else teacher[number[rows, entries][kept]]
            loss, hits = self._step(step.hidden[rows, columns][kept], known[kept], theirs, count)
            if self.recipe.regression:
                assert last is not None
                loss = loss + self.recipe.regression * _distance(step, last[:, 1:-1], count)
            total = total + self.recipe.decay**ahead * loss
            report[f"accuracy_{ahead}"] = hits / len(rows) if len(rows) else hits.new_full((), torch.nan)
        return {"loss": total, **report}

    def _step(
        self, hidden: Tensor, labels: Tensor, teacher: Tensor | None, count: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """One step's loss and hits over places `(places, hidden)`, whose labels are places in the draft vocabulary."""
        share = self.recipe.distillation

        def scored(hidden: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.head.lm_head(hidden) if self.head.config.own_lm_head else self._logits(hidden)
            loss = torch.zeros((), device=hidden.device)
            if share < 1:
                loss = loss + (1 - share) * cross_entropy(logits, labels, count)
            if teacher is not None:
                loss = loss + share * divergence("forward_kl", logits, teacher, count=count)
            return loss, (logits.argmax(-1) == labels).sum().float()

        if self.checkpointing and torch.is_grad_enabled():
            return cast("tuple[Tensor, Tensor]", checkpoint(scored, hidden, use_reentrant=False))
        return scored(hidden)

    def _states(self, input_ids: Tensor, attention_mask: Tensor, stored: dict[str, Tensor]) -> dict[int, Tensor]:
        """`(batch, tokens, hidden)` of the target's layers by number: those stored, if all are that are needed."""
        size, held = self.text.hidden_size, stored.get("hidden_states")
        found = {}
        if held is not None:
            found = {layer: held[..., place * size :][..., :size] for layer, place in self.stored.items()}
        if self.needs("top_ids" in stored) <= found.keys():
            return found
        with torch.no_grad():
            return dict(enumerate(hidden_states(self.target, input_ids, attention_mask)))

    def needs(self, top_ids: bool = False) -> set[int]:
        """The layers of the target, counted from 0, without which it must be run.

        Args:
            top_ids: whether the batches hold the target's likeliest ids.
        """
        last = self.recipe.regression > 0 or (self.recipe.distillation > 0 and not top_ids)
        return {*self.reads, self.text.num_hidden_layers} if last else set(self.reads)

    @torch.no_grad()
    def _teacher(self, drafted: Tensor, last: Tensor | None, stored: dict[str, Tensor]) -> Tensor | None:
        """`(places, draft vocabulary)` logits of the target of what follows the tokens fed, for all drafted places."""
        if not self.recipe.distillation:
            return None
        if last is not None:
            return self._logits(last[drafted])
        ids, log_probs = (stored[name][:, 1:-1][drafted] for name in ("top_ids", "top_logprobs"))
        places = self._place(ids.long())
        # Those outside of the draft vocabulary are put in a column that is then cut off.
        logits = log_probs.new_full((len(ids), self.known + 1), LOWEST, dtype=torch.float32)
        logits.scatter_(1, places.where(places != IGNORED, self.known), log_probs.float())
        return logits[:, :-1]

    def _logits(self, states: Tensor) -> Tensor:
        """What the target's LM head says of states, as far as the loss goes."""
        lm_head: Any = self._lent("LM head") if self.rows is None else self.rows
        return target_logits(lm_head(states.to(lm_head.weight.dtype)), self.text)

    def _lent(self, what: str) -> nn.Module:
        return lent(generative(self.target), what)

    def _place(self, ids: Tensor) -> Tensor:
        """Where ids are in the draft vocabulary; `IGNORED` for those that are not."""
        return cast("Tensor", self.place)[ids]


def _distance(step: Step, last: Tensor, count: Tensor | int) -> Tensor:
    """Smooth L1 of features and the target's states behind the tokens fed, a mean over the state's size."""
    rows, columns = step.drafted.nonzero(as_tuple=True)
    made, theirs = step.features[rows, columns], last[rows, step.entries[rows, columns]].to(step.features.dtype)
    return mean(smooth_l1_loss(made, theirs, reduction="none").mean(-1), count)
