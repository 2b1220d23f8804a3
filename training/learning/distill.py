"""What a sibling learns from a batch (DistillSpec, arXiv 2310.08461): to say what its target would, token by token."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from running.runs import DrafterTraining
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from hf_specgen.drafters.fitting import lent
from hf_specgen.drafters.scoring import target_logits
from hf_specgen.prompt import generative
from learning.chunks import in_chunks
from learning.losses import DIVERGENCES, IGNORED, Kind, Teacher, TopK, agreement, divergence, jsd, mean
from learning.some_ids import SomeIds


@dataclass(frozen=True)
class Recipe:
    """How the two distributions are compared.

    Attributes:
        divergence: "forward_kl", "reverse_kl", "jsd" or "tvd".
        beta: of the generalised "jsd": the teacher's share of the mixture.
        temperature: divides the logits of both.
        hidden_loss: weight of the distance between the last states beside it, see `DistillTraining`.
        others: ids drawn anew for each batch among those outside `ids`, see `SomeIds`.
    """

    divergence: str = "forward_kl"
    beta: float = 0.5
    temperature: float = 1.0
    hidden_loss: float = 0.0
    others: int = 1024

    def __post_init__(self) -> None:
        """Refuses what is no divergence, and weights that are none."""
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"there is no divergence {self.divergence!r}; there are {', '.join(DIVERGENCES)}")
        if not 0 < self.beta < 1 or self.temperature <= 0 or self.hidden_loss < 0 or self.others < 0:
            raise ValueError(
                "beta must be between 0 and 1, temperature above 0, hidden_loss and others 0 or more, not "
                f"{self.beta}, {self.temperature}, {self.hidden_loss} and {self.others}"
            )

    @property
    def kind(self) -> Kind:
        """The divergence as a function."""
        return partial(jsd, beta=self.beta) if self.divergence == "jsd" else DIVERGENCES[self.divergence]


class DistillTraining(DrafterTraining):
    """A sibling that learns, and its target as the teacher: frozen, in eval mode, not run where its states are stored.

    Only labelled places pass the LM heads. The distance between last states is that between the logits they lead to, in
    the teacher's own head: the squares' mean over all ids, which needs a matrix of hidden size only.

    Args:
        target: the teacher. Its tensors are set to need no gradient.
        drafter: the sibling, or it with an adapter; whatever of it requires a gradient learns.
        recipe: of the loss.
        ids: `(n,)` ascending, the ids whose logits are computed, with some of the others; see `SomeIds`. None for all
            ids: exact, and dear where the vocabulary is large and the model small.
        stored_from: where the last layer's states begin on the last axis of stored `hidden_states`.

    Raises:
        ValueError: last states are to be compared, and differ in size.
    """

    metric: Tensor | None

    def __init__(
        self,
        target: nn.Module,
        drafter: nn.Module,
        recipe: Recipe = Recipe(),
        ids: Tensor | None = None,
        stored_from: int = 0,
    ) -> None:
        super().__init__(target.requires_grad_(False).eval())
        self.drafter = drafter
        self.recipe = recipe
        self.stored_from = stored_from
        text = generative(target).config.get_text_config(decoder=True)
        # Siblings may pad their tables to other sizes; only what both have are tokens.
        self.size = min(text.vocab_size, generative(drafter).config.get_text_config(decoder=True).vocab_size)
        self.some = None if ids is None else SomeIds(ids, self.size, recipe.others)
        metric = None
        if recipe.hidden_loss:
            ours = generative(drafter).config.get_text_config(decoder=True).hidden_size
            if ours != text.hidden_size:
                raise ValueError(
                    f"hidden_loss compares last states, of size {ours} in the drafter and {text.hidden_size} in the "
                    "target: leave it out, or keep layers of the target"
                )
            metric = _metric(generative(target))
        self.register_buffer("metric", metric, persistent=False)

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """What Trainer calls for `--gradient_checkpointing`; of the teacher nothing is kept anyway."""
        inner: Any = generative(self.drafter)
        inner.activation_checkpointing_enable(**kwargs)
        # Reentrant checkpointing gives no gradient where no input has one, and embeddings are frozen.
        inner.enable_input_require_grads()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **stored: Tensor,
    ) -> dict[str, Tensor]:
        """The loss, and how often both find the same token likeliest.

        Args:
            input_ids: `(batch, tokens)`, padded on the right.
            attention_mask: `(batch, tokens)`. Nothing is masked by it: no token sees the padding behind it.
            labels: `(batch, tokens)`, not shifted; None for all tokens. Only where they are matters, not what they say.
            num_items_in_batch: labels of the whole accumulation window; None for those of this batch.
            stored: what a data folder may hold: `hidden_states` `(batch, tokens, width)`, or `top_ids` and
                `top_logprobs` `(batch, tokens, k)`. Without any the teacher is run.

        Returns:
            "loss"; "agreement", NaN where there are no labels.

        Raises:
            ValueError: a row is padded on the left.
        """
        if attention_mask is not None and not bool(attention_mask[:, 0].all()):
            raise ValueError("a row is padded on the left; batches for training are padded on the right")
        before = input_ids[:, :-1]
        places = torch.ones_like(before, dtype=torch.bool) if labels is None else labels[:, 1:] != IGNORED
        count = places.sum() if num_items_in_batch is None else num_items_in_batch
        ours = _last_states(generative(self.drafter), before)[places]  # (places, width)
        ids: Tensor | None = None
        if "top_ids" in stored and "hidden_states" not in stored:
            theirs: Tensor | TopK = TopK(
                stored["top_ids"][:, :-1][places].long(), stored["top_logprobs"][:, :-1][places]
            )
        else:
            theirs = self._teacher_states(before, stored)[places]
            ids = None if self.some is None else self.some.draw()
        compared = partial(self._compare, ours, theirs, count, ids)
        loss, hits = in_chunks(compared, len(ours), self.size if ids is None else len(ids))
        share = hits / len(ours) if len(ours) else hits.new_full((), torch.nan)
        return {"loss": loss, "agreement": share}

    def _teacher_states(self, ids: Tensor, stored: dict[str, Tensor]) -> Tensor:
        """`(batch, tokens, width)` of the last layer."""
        teacher = generative(self.target)
        if "hidden_states" in stored:
            width = teacher.config.get_text_config(decoder=True).hidden_size
            return stored["hidden_states"][:, :-1, self.stored_from : self.stored_from + width]
        with torch.no_grad():
            return _last_states(teacher, ids)

    def _compare(
        self, ours: Tensor, theirs: Tensor | TopK, count: Tensor | int, ids: Tensor | None, chunk: slice
    ) -> tuple[Tensor, Tensor]:
        """The loss and how many places agree, of some places of the sibling's states and the teacher's, or its ids."""
        ours, theirs = ours[chunk], theirs[chunk]
        student = self._logits(self.drafter, ours, ids)
        if isinstance(theirs, TopK):
            teacher: Teacher = theirs
        else:
            with torch.no_grad():
                teacher = self._logits(self.target, theirs, ids)
        loss = divergence(self.recipe.kind, student, teacher, None, count, self.recipe.temperature)
        if self.metric is not None and isinstance(theirs, Tensor):
            apart = (ours - theirs).to(self.metric.dtype)
            loss = loss + self.recipe.hidden_loss * mean(((apart @ self.metric) * apart).sum(-1), count)
        known = None if self.some is None or ids is None else len(self.some.ids)
        teacher = teacher if isinstance(teacher, TopK) else teacher[:, :known]
        return loss, agreement(student[:, :known], teacher).sum().float()

    def _logits(self, model: nn.Module, states: Tensor, ids: Tensor | None) -> Tensor:
        """`(places, ids)` of a model's last states."""
        inner = generative(model)
        head = lent(inner, "LM head")
        weight = cast(Tensor, head.weight)
        states, config = states.to(weight.dtype), inner.config.get_text_config(decoder=True)
        if self.some is None or ids is None:
            return target_logits(head(states)[:, : self.size], config)
        bias: Tensor | None = getattr(head, "bias", None)
        return self.some.weighed(
            target_logits(linear(states, weight[ids], None if bias is None else bias[ids]), config)
        )


def _last_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """`(batch, tokens, width)`, as the LM head reads them."""
    decoder: nn.Module = model.get_decoder()  # type: ignore[no-untyped-call]
    # Right padding: what a place sees are the tokens before it, so that no mask is needed.
    states: Tensor = decoder(input_ids=ids, use_cache=False).last_hidden_state
    return states


@torch.no_grad()
def _metric(model: PreTrainedModel) -> Tensor:
    """`(width, width)`, by which the squares of a difference of states become the variance of that of their logits."""
    weight = cast(Tensor, lent(model, "LM head").weight).detach().float()
    weight = weight - weight.mean(0)  # what all logits have in common changes nothing
    return weight.T @ weight / len(weight)


@torch.no_grad()
def refuse_unknown_head(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that makes other logits of its last states than `DistillTraining` would.

    Args:
        model: a causal LM, in eval mode.
    """
    head = lent(model, "LM head")
    ids = torch.arange(4, device=model.device).unsqueeze(0)
    said = model(input_ids=ids, use_cache=False).logits.float()
    states = _last_states(model, ids).to(cast(Tensor, head.weight).dtype)
    ours = target_logits(head(states), model.config.get_text_config(decoder=True)).float()
    if not torch.allclose(ours, said, rtol=1e-2, atol=1e-2 * float(said.abs().max())):
        raise ValueError(
            f"{type(model).__name__} makes its logits of its last states in a way that is not known here; it cannot be "
            "distilled"
        )
