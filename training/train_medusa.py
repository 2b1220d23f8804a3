"""Trains Medusa heads (arXiv 2401.10774) that draft for a model.

    python training/train_medusa.py --target MODEL --data DATA --output_dir build/medusa

Medusa-1: the model stays as it is. `DATA` is a folder of `generate_data.py`, or chats; where it holds the states of the
last layer (`--hidden_layers -1`), the model is not run in training. Medusa-2 (`--lora_rank 32 --heads build/medusa`):
the model learns along through an adapter, after the heads have learned alone; the adapter, the model it makes and the
heads for that model are saved. `--quantize 4bit` loads the model in 4 bits for either (QLoRA with the second).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, cast, get_args

import card
import datasets
import report
import torch
from learning.medusa import MedusaTraining, Recipe
from learning.some_ids import frequent
from running import provenance, runs
from running.command_line import refuse_below, told_plainly
from running.targets import let_gradients_through, load_target, whole_target, with_lora
from texts import data
from texts.fit import refuse_unfit
from torch import nn
from transformers import (
    AutoTokenizer,
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)

from hf_specgen.drafters.medusa_accuracies import measure_accuracies
from hf_specgen.heads.medusa import LMHeads, MedusaHeads
from hf_specgen.heads.recorded import TargetRecord

logger = logging.getLogger(__name__)

ADAPTER, MERGED = "adapter", "merged"


@dataclass
class Arguments(runs.CommonArguments):
    """What is trained, and how."""

    num_heads: int = field(default=4, metadata={"help": "Tokens guessed at once."})
    num_layers: int = field(default=2, metadata={"help": "Residual blocks a head."})
    lm_heads: str = field(
        default="target", metadata={"help": "target: the model's own, 2 MB a head or less; shared; or own, one a head."}
    )
    heads: str | None = field(default=None, metadata={"help": "Heads to begin with, such as those of Medusa-1."})
    decay: float = field(default=0.8, metadata={"help": "Head h counts decay ** h."})
    distillation: float = field(
        default=0.0, metadata={"help": "Share of the KL to the model's own distribution; the rest is cross-entropy."}
    )
    vocabulary: int = field(
        default=4096,
        metadata={"help": "Ids, the most frequent of the labels, that always have logits in training. 0: all ids."},
    )
    others: int = field(default=1024, metadata={"help": "Ids drawn for each batch among all others."})
    lora_rank: int = field(default=0, metadata={"help": "Of the adapter; 0 leaves the model as it is (Medusa-1)."})
    lora_alpha: int = field(default=16, metadata={"help": "Of the adapter."})
    lora_dropout: float = field(default=0.05, metadata={"help": "Of the adapter."})
    backbone_rate: float = field(default=0.25, metadata={"help": "The adapter's learning rate, by that of the heads."})
    heads_weight: float = field(default=0.2, metadata={"help": "Of the heads' loss beside the model's own."})
    heads_warmup: int = field(default=40, metadata={"help": "Steps over which that weight grows from 0."})
    measured: int = field(default=64, metadata={"help": "Held-out texts on which each head's guesses are counted."})
    report: bool = field(default=True, metadata={"help": "Measure before and after, in a process of its own."})

    def __post_init__(self) -> None:
        """Refuses what there is not."""
        super().__post_init__()
        if self.lm_heads not in get_args(LMHeads):
            raise ValueError(f"--lm_heads is one of {', '.join(get_args(LMHeads))}, not {self.lm_heads}")
        refuse_below(self, 1, "num_heads")
        refuse_below(
            self, 0, "num_layers", "vocabulary", "others", "lora_rank", "backbone_rate", "heads_warmup", "measured"
        )


def main(arguments: Arguments, training_arguments: TrainingArguments) -> None:
    """Loads, trains, saves, measures."""
    with told_plainly():
        out = runs.begin(arguments, training_arguments)
        set_seed(training_arguments.seed)  # adapters begin with noise
        target = load_target(arguments)
        heads = load_heads(arguments, target)
        rows = load_rows(arguments, columns_of(arguments, target))
        refuse_unfit(rows, arguments.data, target, arguments.max_length)
        recipe = Recipe(arguments.decay, arguments.distillation, arguments.heads_weight, arguments.others)

    text = target.config.get_text_config(decoder=True)
    ids = frequent(rows["labels"], arguments.vocabulary, text.vocab_size)
    stored_from = data.last_layer_at(arguments.data, text) or 0
    module = MedusaTraining(with_adapter(arguments, target), heads, recipe, ids, stored_from)
    collator = data.Collator(max_length=arguments.max_length)
    trainer = MedusaTrainer(module, arguments, training_arguments, train_dataset=rows, data_collator=collator)
    if not trainer.train_or_resume():
        return

    state, adapter = trainer.whole("heads"), trainer.whole("target") if module.learns else None
    if state is None:
        return
    heads = MedusaHeads(heads.config)
    heads.load_state_dict(state)
    saved_for = arguments.target
    if adapter is not None:
        module.target.save_pretrained(out / ADAPTER, state_dict=adapter)  # type: ignore[operator]
        target, saved_for = merge(arguments, out), str(out / MERGED)
    else:
        target = whole_target(arguments, target, trainer.sharded)
    heads.config.target = TargetRecord.of(target).to_dict()
    heads.to(device=target.device)  # type: ignore[call-arg]
    heads.config.accuracies = accuracies_of(target, heads, arguments)
    heads.to(dtype=runs.saved_as(arguments, target)).save_pretrained(out)  # type: ignore[call-arg]
    provenance.write(out, target, arguments, training_arguments, {"steps": trainer.state.global_step})
    card.write(out)
    logger.warning("saved in %s", out)
    if arguments.report:
        report.of_training(arguments, saved_for, out, arguments.heads or report.FRESH)


# ------------------------------------------------------------------------------------------------- what is trained


def load_heads(arguments: Arguments, target: PreTrainedModel) -> MedusaHeads:
    """Heads in float32: fresh, or those to begin with."""
    if arguments.heads is None:
        kind = cast(LMHeads, arguments.lm_heads)
        heads = MedusaHeads.fresh(target, arguments.num_heads, arguments.num_layers, kind)
    else:
        heads = MedusaHeads.from_pretrained(arguments.heads)
        TargetRecord.from_dict(heads.config.target or {}).check(target)
    return heads.to(dtype=torch.float32).requires_grad_(True).train()  # type: ignore[call-arg, no-any-return]


def with_adapter(arguments: Arguments, target: PreTrainedModel) -> nn.Module:
    """The model itself, or with LoRA on all its linear layers.

    The LM head has none, unlike the paper's: it is often the input embeddings too, and the heads use it as it is.
    """
    if not arguments.lora_rank:
        return target
    let_gradients_through(target)
    return with_lora(target, arguments.lora_rank, arguments.lora_alpha, arguments.lora_dropout)


def merge(arguments: Arguments, out: Path) -> PreTrainedModel:
    """Saves the model that the saved adapter makes of the target's own weights, unquantized, and its tokenizer."""
    import peft

    wrapped = peft.PeftModel.from_pretrained(load_target(arguments, quantize=False), out / ADAPTER)
    merged: Any = wrapped.merge_and_unload()
    merged.save_pretrained(out / MERGED)
    AutoTokenizer.from_pretrained(arguments.target, revision=arguments.revision or "main").save_pretrained(out / MERGED)
    merged.config.name_or_path = MERGED
    whole: PreTrainedModel = merged.eval()
    return whole


# ------------------------------------------------------------------------------------------------- what it learns from


def load_rows(arguments: Arguments, columns: list[str], held_out: bool = False) -> datasets.Dataset:
    """One side of the data; chats are labelled by the model's own template."""
    tokenizer = data.tokenizer_for(arguments.data, arguments.target, arguments.revision)
    return data.load(arguments.data, held_out, columns, tokenizer)


def columns_of(arguments: Arguments, target: PreTrainedModel) -> list[str]:
    """The columns that are read: states only where the model stays as it is, distributions only where these count."""
    columns = ["input_ids", "labels"]
    last_at = data.last_layer_at(arguments.data, target.config.get_text_config(decoder=True))
    if last_at is not None and not arguments.lora_rank:
        columns.append("hidden_states")
    if arguments.distillation:
        columns += [name for name in data.stored(arguments.data)[1] if name in ("top_ids", "top_logprobs")]
    return columns


def accuracies_of(target: PreTrainedModel, heads: MedusaHeads, arguments: Arguments) -> list[list[float]] | None:
    """How often each head's guesses are right on held-out texts, by which trees are built; None without such texts.

    They are others than those that a report measures on.
    """
    rows, _ = data.halves(load_rows(arguments, ["input_ids", "labels"], held_out=True))
    texts, prompts = [], []
    for row in islice(rows, arguments.measured):
        places = (row["labels"][: arguments.max_length] >= 0).nonzero().flatten()
        if len(places):
            texts.append(row["input_ids"][: int(places[-1]) + 1])
            prompts.append(int(places[0]))
    if not texts:
        logger.warning("no text is held out beside the report's: trees will grow by the heads' own probabilities")
        return None
    heads.train(False)
    return measure_accuracies(target, heads, texts, prompt_lengths=prompts)


# ------------------------------------------------------------------------------------------------------ how it learns


class MedusaTrainer(runs.DrafterTrainer):
    """With a learning rate of its own for the adapter, and heads whose loss comes in slowly beside the model's own."""

    def __init__(
        self, module: MedusaTraining, arguments: Arguments, training: TrainingArguments, **kwargs: Any
    ) -> None:
        super().__init__(module, arguments, training, **kwargs)
        self.backbone_rate = arguments.backbone_rate
        if module.learns:
            self.add_callback(HeadsWarmup(module, arguments.heads_warmup))

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """Trainer's own, with the adapter's tensors in groups of their own."""
        made = self.optimizer is None
        optimizer: torch.optim.Optimizer = super().create_optimizer(model)
        if made:
            trained: Any = self.model if model is None else model
            adapter = {id(parameter) for name, parameter in trained.named_parameters() if ".lora_" in name}
            for group in list(optimizer.param_groups):
                slow = [parameter for parameter in group["params"] if id(parameter) in adapter]
                if slow:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in adapter]
                    optimizer.add_param_group({**group, "params": slow, "lr": group["lr"] * self.backbone_rate})
        return optimizer


class HeadsWarmup(TrainerCallback):
    """Lets the weight of the heads' loss grow: at first it would pull the model to what heads cannot yet say.

    Args:
        module: whose heads learn.
        steps: over which it grows.
    """

    def __init__(self, module: MedusaTraining, steps: int) -> None:
        self.module, self.steps = module, steps

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A function of the step alone, so that a training that goes on has the same."""
        share = min(1.0, (state.global_step + 1) / self.steps) if self.steps else 1.0
        self.module.heads_weight = self.module.recipe.heads_weight * share


if __name__ == "__main__":
    main(*runs.parse(Arguments, learning_rate=3e-3, warmup_steps=20, num_train_epochs=5, adam_beta2=0.95))
