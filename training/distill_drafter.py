"""Distils a sibling of a model: a smaller causal LM that learns to say what the model would (arXiv 2310.08461).

    python training/distill_drafter.py --target MODEL --data DATA --output_dir build/sibling

The sibling is given (`--drafter PATH`), or made of the model by keeping some of its layers: so many (`--layers 6`), or
these (`--keep_layers 0 1 2 14 27 29`). `DATA` is a folder of `generate_data.py`, or chats; where it holds the states of
the last layer (`--hidden_layers -1`) or the likeliest ids, the model is not run in training. With `--on_policy 0.5` the
sibling answers the prompts of half the batches itself, and the model says what it would have said.

All of the sibling learns but its embeddings and LM head (`--train_embeddings`), or an adapter (`--lora_rank 32`), which
is kept in `adapter` beside the merged weights. What the sibling was before lies in `before`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import card
import report
import torch
from learning.distill import DistillTraining, Recipe, refuse_unknown_head
from learning.on_policy import DistillTrainer, OnPolicy
from learning.siblings import keep_layers, spread
from learning.some_ids import frequent
from running import provenance, runs
from running.command_line import refuse_below, told_plainly
from running.targets import load_target, whole_target, with_lora
from texts import data
from texts.fit import refuse_unfit
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from hf_specgen.drafters.fitting import lent
from hf_specgen.vocabulary import compare

logger = logging.getLogger(__name__)

ADAPTER, BEFORE = "adapter", "before"


@dataclass
class Arguments(runs.CommonArguments):
    """What is distilled, and how."""

    drafter: str | None = field(default=None, metadata={"help": "A causal LM to teach; else one is made."})
    layers: int = field(default=6, metadata={"help": "How many of the target's layers it is made of."})
    keep_layers: list[int] | None = field(default=None, metadata={"help": "Which ones; else first, last and between."})
    divergence: str = field(default="forward_kl", metadata={"help": "forward_kl, reverse_kl, jsd or tvd."})
    beta: float = field(default=0.5, metadata={"help": "Of jsd: the target's share of the mixture."})
    temperature: float = field(default=1.0, metadata={"help": "Divides the logits of both in the loss."})
    hidden_loss: float = field(default=0.0, metadata={"help": "Weight of the distance between last states."})
    vocabulary: int = field(
        default=8192,
        metadata={"help": "Ids, the most frequent of the labels, that always have logits in training. 0: all ids."},
    )
    others: int = field(default=1024, metadata={"help": "Ids drawn for each batch among all others."})
    on_policy: float = field(default=0.0, metadata={"help": "Share of batches that are the drafter's own answers."})
    max_new_tokens: int = field(default=128, metadata={"help": "Of its own answers."})
    train_embeddings: bool = field(default=False, metadata={"help": "Embeddings and LM head learn as well."})
    lora_rank: int = field(default=0, metadata={"help": "Of an adapter that learns; 0: the drafter itself does."})
    lora_alpha: int = field(default=16, metadata={"help": "Of the adapter."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Of the adapter."})
    report: bool = field(default=True, metadata={"help": "Measure before and after, in a process of its own."})

    def __post_init__(self) -> None:
        """Refuses what there is not."""
        super().__post_init__()
        refuse_below(self, 1, "layers", "max_new_tokens")
        refuse_below(self, 0, "vocabulary", "others", "lora_rank")
        if self.drafter is not None and self.keep_layers is not None:
            raise ValueError("--drafter gives a drafter and --keep_layers makes one: pass one of them")
        if self.lora_rank and self.train_embeddings:
            raise ValueError("--lora_rank trains an adapter, and --train_embeddings all of the embeddings: pass one")


def main(arguments: Arguments, training_arguments: TrainingArguments) -> None:
    """Loads, trains, saves, measures."""
    with told_plainly():
        out = runs.begin(arguments, training_arguments)
        tokenizer = load_tokenizer(arguments.target, arguments.revision)
        target = load_target(arguments)
        text = target.config.get_text_config(decoder=True)
        columns, stored_from = read_of(arguments, text)
        rows = data.load(arguments.data, held_out=False, columns=columns, tokenizer=tokenizer)
        refuse_unfit(rows, arguments.data, target, arguments.max_length)
        drafter, before = load_drafter(arguments, target, tokenizer, out)
        recipe = Recipe(
            arguments.divergence, arguments.beta, arguments.temperature, arguments.hidden_loss, arguments.others
        )
        ids = frequent(rows["labels"], arguments.vocabulary, text.vocab_size)
        module = DistillTraining(target, learning(arguments, drafter), recipe, ids, stored_from)
        on_policy = OnPolicy(arguments.on_policy, arguments.max_new_tokens)

    collator = data.Collator(max_length=arguments.max_length)
    trainer = DistillTrainer(
        module, arguments, training_arguments, on_policy, train_dataset=rows, data_collator=collator
    )
    if not trainer.train_or_resume():
        return

    state = trainer.whole("drafter")
    if state is None:
        return
    if arguments.lora_rank:
        cast(Any, module.drafter).save_pretrained(out / ADAPTER, state_dict=state)
        drafter = merged(before, out / ADAPTER)
    else:
        drafter = AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32)
        drafter.load_state_dict(state)
    save(cast(Any, drafter).to(dtype=runs.saved_as(arguments, target)), tokenizer, out)
    target = whole_target(arguments, target, trainer.sharded)
    provenance.write(out, target, arguments, training_arguments, {"steps": trainer.state.global_step})
    card.write(out)
    logger.warning("saved in %s", out)
    if arguments.report:
        report.of_training(arguments, arguments.target, out, str(before))


# ------------------------------------------------------------------------------------------------- what is trained


def load_tokenizer(path: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """A model's tokenizer."""
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, revision=revision or "main")
    return tokenizer


def load_drafter(
    arguments: Arguments, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path
) -> tuple[PreTrainedModel, Path]:
    """The sibling in float32 as it is before training, and where that is saved.

    Raises:
        ValueError: its vocabulary is not the target's, or there are no logits of its states.
    """
    if arguments.drafter is not None:
        theirs = load_tokenizer(arguments.drafter)
        drafter: PreTrainedModel = AutoModelForCausalLM.from_pretrained(arguments.drafter, dtype=torch.float32)
        compare(target, drafter, tokenizer, theirs)
        before = Path(arguments.drafter)
    else:
        whole = target if arguments.quantize is None else load_target(arguments, quantize=False)
        total = whole.config.get_text_config(decoder=True).num_hidden_layers
        drafter = keep_layers(whole, arguments.keep_layers or spread(total, arguments.layers))
        before = out / BEFORE
        if runs.is_main():
            save(drafter, tokenizer, before)
    for model in (target, drafter):
        refuse_unknown_head(model)
    return cast(Any, drafter).to(dtype=torch.float32), before


def learning(arguments: Arguments, drafter: PreTrainedModel) -> nn.Module:
    """The sibling with what is to learn of it."""
    if arguments.lora_rank:
        return with_lora(drafter, arguments.lora_rank, arguments.lora_alpha, arguments.lora_dropout)
    drafter.requires_grad_(True)
    for what in ("embeddings", "LM head"):
        lent(drafter, what).requires_grad_(arguments.train_embeddings)
    return drafter


def merged(before: Path, adapter: Path) -> PreTrainedModel:
    """What the saved adapter makes of the sibling as it was before."""
    import peft

    wrapped = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(before, dtype=torch.float32), adapter)
    return cast(PreTrainedModel, wrapped.merge_and_unload())


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """A folder that `from_pretrained`, `assistant=` and other engines load."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# -------------------------------------------------------------------------------------------------- what it learns from


def read_of(arguments: Arguments, text: PreTrainedConfig) -> tuple[list[str], int]:
    """The columns that are read, and where the last layer begins among stored states.

    Read are the last layer's states, where there are none the likeliest ids, and where those are not stored either the
    texts alone.

    Raises:
        ValueError: last states are to be compared, and only the likeliest ids are stored.
    """
    last_at, likeliest = data.last_layer_at(arguments.data, text), []
    if last_at is None:
        likeliest = [name for name in data.stored(arguments.data)[1] if name.startswith("top_")]
    if arguments.hidden_loss and likeliest:
        raise ValueError(
            f"--hidden_loss compares last states, and {arguments.data} holds only the likeliest ids: leave it out, or "
            "generate data with --hidden_layers -1"
        )
    known = likeliest if last_at is None else ["hidden_states"]
    return ["input_ids", "labels", *known], last_at or 0


if __name__ == "__main__":
    # Small batches: after 40 steps of SmolLM2 two rows a step had brought as much agreement as eight.
    main(*runs.parse(Arguments, per_device_train_batch_size=2, learning_rate=1e-3, warmup_steps=20, adam_beta2=0.95))
