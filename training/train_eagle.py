"""Trains an EAGLE head that drafts for a frozen model.

    python training/train_eagle.py --target MODEL --data DATA --output_dir build/eagle

EAGLE-3 (arXiv 2503.01840) with training-time test: the head drafts several tokens from every place of an answer, under
its own predictions, and learns from all of them. `--method eagle` makes EAGLE-1's head (arXiv 2401.15077), whose
features learn to be the model's states besides. `DATA` is a folder of `generate_data.py`, or chats; where it holds the
states that the head reads (`--hidden_layers eagle3`), the model is not run in training. `--quantize 4bit` loads it in 4
bits.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import card
import datasets
import report
import torch
from learning.beginning import begin_as_layer
from learning.eagle import EagleTraining, Recipe
from learning.some_ids import occurrences
from running import provenance, runs
from running.command_line import refuse_below, told_plainly
from running.targets import load_target, whole_target
from texts import data
from texts.fit import refuse_unfit
from torch import Tensor
from transformers import PreTrainedModel, TrainingArguments

from hf_specgen.files import write_whole
from hf_specgen.heads.eagle import METHODS, EagleHead
from hf_specgen.heads.recorded import TargetRecord

logger = logging.getLogger(__name__)

# Beside the checkpoints: a training that goes on has the ids it began with, also where its data have grown.
CHOSEN = "draft_vocabulary.json"


@dataclass
class Arguments(runs.CommonArguments):
    """What is trained, and how."""

    method: str = field(default="eagle3", metadata={"help": "eagle3; or eagle, the head of EAGLE-1 and 2."})
    head: str | None = field(default=None, metadata={"help": "A trained head to begin with."})
    num_layers: int = field(default=1, metadata={"help": "Layers of the head."})
    begin_as_layer: bool = field(
        default=True,
        metadata={"help": "Begin an EAGLE-3 head as a layer of the model, where it is built as those are."},
    )
    feature_layers: list[int] | None = field(
        default=None, metadata={"help": "The model's hidden_states that the head reads; 2, L//2 and L-3 unless given."}
    )
    draft_vocabulary: int = field(
        default=8192,
        metadata={
            "help": "Ids that an EAGLE-3 head can say, the most frequent of the labels; 0: all. An EAGLE-1 head says "
            "all by the model's own LM head, and these are those that the loss is over."
        },
    )
    drafted: int = field(default=Recipe.steps, metadata={"help": "Tokens drafted from each place."})
    decay: float = field(default=Recipe.decay, metadata={"help": "The token j places on counts decay ** j."})
    distillation: float = field(
        default=Recipe.distillation,
        metadata={"help": "Share of the KL to the model's own distribution; the rest is cross-entropy."},
    )
    regression: float | None = field(
        default=None, metadata={"help": "Weight of features' distance to the model's states; 10 for eagle, else 0."}
    )
    report: bool = field(default=True, metadata={"help": "Measure before and after, in a process of its own."})

    def __post_init__(self) -> None:
        """Refuses what there is not."""
        super().__post_init__()
        if self.method not in METHODS:
            raise ValueError(f"--method is one of {', '.join(METHODS)}, not {self.method}")
        if self.regression is None:
            self.regression = 10.0 if self.method == "eagle" else 0.0
        refuse_below(self, 1, "num_layers")
        refuse_below(self, 0, "draft_vocabulary")


def main(arguments: Arguments, training_arguments: TrainingArguments) -> None:
    """Loads, trains, saves, measures."""
    with told_plainly():
        out = runs.begin(arguments, training_arguments)
        target = load_target(arguments)
        rows = load_rows(arguments)
        # A draft begins behind the first token of an answer, which the target says itself.
        refuse_unfit(rows, arguments.data, target, arguments.max_length, in_a_row=2)
        recipe = Recipe(arguments.drafted, arguments.decay, arguments.distillation, float(arguments.regression or 0))
        ids = draft_vocabulary(arguments, target, rows["labels"], out / CHOSEN)
        head = load_head(arguments, target, ids)

    module = EagleTraining(target, head, recipe, ids, data.stored(arguments.data)[0])
    collator = data.Collator(max_length=arguments.max_length)
    trainer = runs.DrafterTrainer(module, arguments, training_arguments, train_dataset=rows, data_collator=collator)
    if not trainer.train_or_resume():
        return

    state = trainer.whole("head")
    if state is None:
        return
    head = EagleHead(head.config)
    head.load_state_dict(state)
    head.to(dtype=runs.saved_as(arguments, target)).save_pretrained(out)  # type: ignore[call-arg]
    target = whole_target(arguments, target, trainer.sharded)
    provenance.write(out, target, arguments, training_arguments, {"steps": trainer.state.global_step})
    card.write(out)
    logger.warning("saved in %s", out)
    if arguments.report:
        report.of_training(arguments, arguments.target, out, arguments.head or report.FRESH)


# ------------------------------------------------------------------------------------------------- what is trained


def load_head(arguments: Arguments, target: PreTrainedModel, ids: Tensor | None) -> EagleHead:
    """A head in float32: fresh, or one to begin with, which has a draft vocabulary of its own."""
    if arguments.head is not None:
        head = EagleHead.from_pretrained(arguments.head)
        TargetRecord.from_dict(head.config.target or {}).check(target)
        if head.config.method != arguments.method:
            raise ValueError(
                f"{arguments.head} is a head of method {head.config.method}: pass --method {head.config.method}"
            )
    else:
        # An EAGLE-3 head has an LM head of its own, whatever it can say.
        every = range(target.config.get_text_config(decoder=True).vocab_size)
        token_map = None if arguments.method == "eagle" else every if ids is None else ids.tolist()
        head = EagleHead.fresh(target, arguments.method, arguments.num_layers, arguments.feature_layers, token_map)
        if arguments.begin_as_layer:
            number = begin_as_layer(head, target)
            logger.warning("the head begins as %s", "nothing" if number is None else f"layer {number} of the model")
    return head.to(dtype=torch.float32).train()  # type: ignore[call-arg, no-any-return]


# ---------------------------------------------------------------------------------------------- what it learns from


def draft_vocabulary(
    arguments: Arguments, target: PreTrainedModel, labels: Iterable[Tensor], chosen: Path
) -> Tensor | None:
    """The ids that an EAGLE-3 head can say; of EAGLE-1's, those that count in training. None for all."""
    vocabulary = target.config.get_text_config(decoder=True).vocab_size
    if not 0 < arguments.draft_vocabulary < vocabulary or arguments.head is not None:
        return None
    if arguments.resume and chosen.is_file():
        return torch.tensor(json.loads(chosen.read_text(encoding="utf-8")))
    ids, covered = most_frequent(labels, vocabulary, arguments.draft_vocabulary, ends_of(target))
    told = "a draft vocabulary of %d of %d ids covers %.2f %% of all labels"
    logger.warning(told, len(ids), vocabulary, 100 * covered)
    if runs.is_main():
        chosen.parent.mkdir(parents=True, exist_ok=True)
        write_whole(chosen, json.dumps(ids.tolist()))
    return ids


def most_frequent(labels: Iterable[Tensor], vocabulary: int, size: int, always: Iterable[int]) -> tuple[Tensor, float]:
    """Ids, ascending, and their share of the labels.

    Args:
        labels: of all rows.
        vocabulary: how many ids there are.
        size: how many to take. Where the labels have fewer, the lowest others follow: a tokenizer's first merges, and
            so the most frequent in the text that it was made from.
        always: ids that are taken whatever the labels are.
    """
    seen = occurrences(labels, vocabulary)
    order = seen.clone()
    order[list(always)] = torch.iinfo(torch.long).max
    ids = order.argsort(descending=True, stable=True)[:size].sort().values
    return ids, float(seen[ids].sum() / seen.sum())


def ends_of(target: PreTrainedModel) -> set[int]:
    """The ids that end what a model says: without them no draft ever would."""
    said = [target.config.get_text_config(decoder=True).eos_token_id]
    if target.generation_config is not None:
        said.append(target.generation_config.eos_token_id)
    return {token for ids in said if ids is not None for token in (ids if isinstance(ids, list) else [ids])}


def load_rows(arguments: Arguments) -> datasets.Dataset:
    """Conversations; with a column by which those of a batch are of about one length, so that little is padding."""
    columns = data.stored(arguments.data)[1] or ["input_ids", "labels"]
    tokenizer = data.tokenizer_for(arguments.data, arguments.target, arguments.revision)
    rows = data.load(arguments.data, columns=columns, tokenizer=tokenizer)
    lengths = [min(len(ids), arguments.max_length) for ids in rows.select_columns(["input_ids"])["input_ids"]]
    return rows.add_column("length", lengths)


if __name__ == "__main__":
    main(
        *runs.parse(
            Arguments,
            learning_rate=1e-3,
            warmup_steps=0.05,
            num_train_epochs=3,
            adam_beta2=0.95,
            per_device_train_batch_size=4,
            train_sampling_strategy="group_by_length",
        )
    )
