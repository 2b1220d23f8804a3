"""On-policy data (arXiv 2306.13649): the sibling answers the prompts itself, and its target says what it had said."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from running.runs import CommonArguments, DrafterTrainer
from texts.decoding import NEUTRAL
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel, TrainingArguments

import hf_specgen as sg
from hf_specgen.prompt import generative
from learning.losses import IGNORED

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class OnPolicy:
    """How many batches are the sibling's own texts.

    Args:
        share: of the batches, 0 to 1; each is wholly one or the other.
        max_new_tokens: of an answer.
        temperature: at which answers are drawn.
    """

    share: float = 0.0
    max_new_tokens: int = 128
    temperature: float = 1.0

    def __post_init__(self) -> None:
        """Refuses a share that is none."""
        if not 0 <= self.share <= 1 or self.max_new_tokens < 1 or self.temperature <= 0:
            raise ValueError(
                "on_policy is a share from 0 to 1, max_new_tokens at least 1 and a temperature above 0, not "
                f"{self.share}, {self.max_new_tokens} and {self.temperature}"
            )


def answered(drafter: PreTrainedModel, batch: Batch, on_policy: OnPolicy, seed: int) -> Batch:
    """A batch's prompts with the sibling's own answers to them; labels are those answers, to their end token.

    A row's prompt is what comes before its last answer: all turns but that one stay as they are. The sibling answers in
    eval mode, and is left in the mode it was in.

    Args:
        drafter: the sibling.
        batch: `input_ids`, `attention_mask`, `labels`, each `(batch, tokens)`, padded on the right.
        on_policy: how to draw.
        seed: of the draw.

    Returns:
        `input_ids`, `attention_mask` and `labels`, padded on the right; the batch itself where no row has a label.
    """
    prompts = _prompts(batch)
    if not prompts:
        return batch
    device, width = batch["input_ids"].device, max(map(len, prompts))
    left = [[0] * (width - len(prompt)) for prompt in prompts]
    ids = torch.tensor([pad + prompt for pad, prompt in zip(left, prompts, strict=True)], device=device)
    mask = torch.tensor([pad + [1] * len(prompt) for pad, prompt in zip(left, prompts, strict=True)], device=device)
    named = drafter.generation_config.eos_token_id
    ends = set(named if isinstance(named, list) else [] if named is None else [named])
    drawn = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=True,
        temperature=on_policy.temperature,
        top_k=0,
        max_new_tokens=on_policy.max_new_tokens,
        eos_token_id=sorted(ends) or None,
        pad_token_id=0,
        **NEUTRAL,
    )
    model: Any = drafter
    training = model.training
    model.eval()
    with torch.no_grad():
        texts = model.generate(
            ids,
            attention_mask=mask,
            generation_config=drawn,
            custom_generate=sg.speculate,
            assistant=sg.Plain(),
            seed=seed,
        )
    model.train(training)
    answers = [_to_its_end(text, ends) for text in texts[:, width:].tolist()]
    return _padded(prompts, answers, device)


def _prompts(batch: Batch) -> list[list[int]]:
    """What comes before the last labelled run of each row that has one, a token at least."""
    prompts = []
    for ids, labels in zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        last = max((place for place, label in enumerate(labels) if label != IGNORED), default=0)
        while last and labels[last - 1] != IGNORED:
            last -= 1
        if last:
            prompts.append(ids[:last])
    return prompts


def _to_its_end(answer: list[int], ends: set[int]) -> list[int]:
    """An answer with its end token and without the padding behind it."""
    found = next((place for place, token in enumerate(answer) if token in ends), len(answer))
    return answer[: found + 1]


def _padded(prompts: list[list[int]], answers: list[list[int]], device: torch.device) -> Batch:
    """A batch padded on the right, in which answers are what is learned from."""
    rows = list(zip(prompts, answers, strict=True))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    gaps = [[0] * (width - len(prompt) - len(answer)) for prompt, answer in rows]
    filled = {
        "input_ids": [prompt + answer + gap for (prompt, answer), gap in zip(rows, gaps, strict=True)],
        "attention_mask": [[1] * (width - len(gap)) + gap for gap in gaps],
        "labels": [
            [IGNORED] * len(prompt) + answer + [IGNORED] * len(gap)
            for (prompt, answer), gap in zip(rows, gaps, strict=True)
        ],
    }
    return {name: torch.tensor(values, device=device) for name, values in filled.items()}


class DistillTrainer(DrafterTrainer):
    """Puts the sibling's own answers in the place of the data's, in a share of the batches.

    Which batches, and what is drawn, follow from the seed and the step alone, so that a resumed training goes on alike.
    All ranks draw in the same batches.

    Args:
        module: a `DistillTraining`.
        arguments: of the script.
        training: of Trainer.
        on_policy: the share.
        kwargs: further arguments of Trainer.

    Raises:
        ValueError: the sibling is sharded, whose passes would have to be equally many on all ranks.
    """

    def __init__(
        self,
        module: nn.Module,
        arguments: CommonArguments,
        training: TrainingArguments,
        on_policy: OnPolicy = OnPolicy(),
        **kwargs: Any,
    ) -> None:
        super().__init__(module, arguments, training, **kwargs)
        if on_policy.share and (self.is_fsdp_enabled or self.is_deepspeed_enabled):
            raise ValueError("on_policy needs the sibling whole on each rank: train without FSDP and DeepSpeed")
        self.on_policy = on_policy

    def get_batch_samples(
        self, epoch_iterator: Iterator[Batch], num_batches: int, device: torch.device
    ) -> tuple[list[Batch], Any]:
        """The batches of an accumulation window. They are answered before their labels are counted."""
        batches: Iterator[Batch] = map(self._maybe_answered, epoch_iterator, itertools.count())
        window: tuple[list[Batch], Any] = super().get_batch_samples(batches, num_batches, device)
        return window

    def _maybe_answered(self, batch: Batch, place: int) -> Batch:
        chance = random.Random(f"{self.args.seed} {self.state.global_step} {place}")
        if chance.random() >= self.on_policy.share:
            return batch
        seed = chance.getrandbits(32) + self.args.process_index
        drafter = generative(cast(nn.Module, self.accelerator.unwrap_model(self.model).drafter))
        with self.compute_loss_context_manager():
            return answered(drafter, batch, self.on_policy, seed)
