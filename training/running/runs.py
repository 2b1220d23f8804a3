"""What the training scripts share: arguments, and a Trainer that trains a part of a module and goes on after a stop.

Everything that `transformers.Trainer` does is a flag here too: several GPUs, FSDP and DeepSpeed by `accelerate launch`,
mixed precision, gradient accumulation, activation checkpointing, logging to TensorBoard and the like.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import Sampler
from transformers import (
    HfArgumentParser,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer_pt_utils import LengthGroupedSampler
from transformers.trainer_utils import SaveStrategy

from hf_specgen.files import write_whole
from running.command_line import Help, refuse_below
from running.provenance import glance

logger = logging.getLogger(__name__)

TRAINED, COMPLETE, BEGUN = "trained.safetensors", "complete.json", "begun.json"
# Arguments that are none of the training's: how long, and what is done at the end.
MAY_CHANGE = ("resume", "minutes", "report", "save_dtype")
# Arguments of Trainer that its loss curve depends on; with the rows of an update, however they are shared out.
DECIDING = ("learning_rate", "lr_scheduler_type", "warmup_steps", "optim", "weight_decay", "adam_beta2", "seed")
# What is kept beside the arguments: marks of what --data held.
CONTENTS = "data_marks"
# Arguments that name what is read.
GIVEN = ("target", "data", "drafter", "head", "heads")
SAVED = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class CommonArguments:
    """Arguments of every training script."""

    target: str = field(metadata={"help": "Path or hub id of the model that the drafter is for."})
    data: str = field(metadata={"help": "A folder of generate_data.py, or what `datasets` loads with chats in it."})
    revision: str | None = field(default=None, metadata={"help": "Of the target on the hub."})
    dtype: str = field(default="auto", metadata={"help": "The frozen target's: auto, float32, bfloat16, float16."})
    save_dtype: str | None = field(
        default=None,
        metadata={"help": "Of the saved weights; the target's unless given.", "choices": [*SAVED]},
    )
    quantize: str | None = field(
        default=None, metadata={"help": "The target, by bitsandbytes.", "choices": ["4bit", "8bit"]}
    )
    max_length: int = field(default=2048, metadata={"help": "Tokens; what is longer is cut."})
    resume: bool = field(default=False, metadata={"help": "Go on from the last complete checkpoint in --output_dir."})
    minutes: float | None = field(default=None, metadata={"help": "Save and stop after so long; --resume goes on."})

    def __post_init__(self) -> None:
        """Refuses numbers that cannot be meant."""
        refuse_below(self, 2, "max_length")
        refuse_below(self, 0, "minutes")


@dataclass
class DrafterTrainingArguments(TrainingArguments):
    """transformers' own arguments, with defaults that fit drafters."""

    output_dir: str | None = field(default=None, metadata={"help": "Folder of the drafter and of its checkpoints."})
    learning_rate: float = 1e-3
    lr_scheduler_type: str = "cosine"
    logging_steps: float = 10
    logging_nan_inf_filter: bool = False
    save_steps: float = 100
    save_total_limit: int | None = 2
    remove_unused_columns: bool | None = False
    dataloader_pin_memory: bool = field(default_factory=torch.accelerator.is_available)
    label_names: list[str] | None = field(default_factory=lambda: ["labels"])

    def __post_init__(self) -> None:
        """Refuses what would lose something."""
        if not self.output_dir:
            raise ValueError("--output_dir is needed: the folder of the drafter and of its checkpoints")
        super().__post_init__()
        if self.save_only_model or self.logging_strategy != "steps":
            raise ValueError(
                "a training goes on by its optimizer and its log: no --save_only_model, --logging_strategy steps"
            )
        if self.eval_strategy != "no" or self.label_smoothing_factor:
            raise ValueError(
                "losses are the script's own, and the report is the evaluation: no --eval_strategy, no smoothing"
            )
        if self.save_strategy == "steps" and self.save_steps % self.logging_steps:
            # The loss of a logging window lives in memory: a stop inside of one would lose it.
            raise ValueError(f"save_steps {self.save_steps} is no multiple of logging_steps {self.logging_steps}")
        if self.save_total_limit == 1:
            raise ValueError("save_total_limit 1 deletes the last checkpoint before the next one is complete; use 2")


A = TypeVar("A", bound=CommonArguments)


def parse(arguments: type[A], line: Sequence[str] | None = None, **defaults: Any) -> tuple[A, TrainingArguments]:
    """Reads the command line.

    Args:
        arguments: a dataclass with the script's own.
        line: the words to read; None for those the script was called with.
        defaults: of single arguments, where the script wants others.
    """
    parser = HfArgumentParser(
        (arguments, DrafterTrainingArguments), description=sys.modules["__main__"].__doc__, formatter_class=Help
    )
    parser.set_defaults(**defaults)
    try:
        own, training = parser.parse_args_into_dataclasses(line)
    except ValueError as error:
        parser.error(str(error))
    # What is trained begins with numbers of this seed, the same on every rank.
    set_seed(training.seed)
    return own, training


def begin(arguments: CommonArguments, training: TrainingArguments) -> Path:
    """The folder to write to; called before anything is written.

    Raises:
        SystemExit: it holds another training's checkpoints, or one's that began with other arguments.
        ValueError: it is something that is read; or weights would be in pieces where losses read some of their rows.
    """
    if is_deepspeed_zero3_enabled():
        raise ValueError("DeepSpeed's stage 3 hides the rows of an LM head that losses read: take stage 2, or FSDP")
    folder = Path(str(training.output_dir))
    asked = {name: value for name, value in asdict(arguments).items() if name not in MAY_CHANGE}
    for name in GIVEN:
        if asked.get(name) and Path(asked[name]).resolve() == folder.resolve():
            raise ValueError(f"--output_dir is what --{name} is: it would be written over")
    asked |= {name: str(getattr(training, name)) for name in DECIDING}
    asked["batch"] = training.train_batch_size * training.gradient_accumulation_steps * training.world_size
    asked[CONTENTS] = glance(Path(arguments.data), folder)
    if goes_on_from(folder, arguments.resume) is None:
        if is_main():
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(folder / BEGUN, json.dumps(asked, indent=2) + "\n")
        return folder
    begun = json.loads((folder / BEGUN).read_text(encoding="utf-8")) if (folder / BEGUN).is_file() else asked
    for name, value in json.loads(json.dumps(asked)).items():
        if name == CONTENTS:
            # More of them is no other data.
            if not begun.get(name, {}).items() <= value.items():
                raise SystemExit(f"{folder} was begun when --data {arguments.data} held something else: begin anew")
        elif begun.get(name, value) != value:
            raise SystemExit(f"{folder} was begun with --{name} {begun.get(name)}, not {value}: resume with the same")
    return folder


class DrafterTraining(nn.Module):
    """The module a Trainer gets: a drafter that learns, beside a target that is frozen or carries adapters.

    `forward(**batch, num_items_in_batch)` returns `{"loss": ..., "<metric>": ...}`. The loss is a sum over labelled
    places, divided by `num_items_in_batch`: labels of the whole accumulation window, on all ranks. So the gradient
    does not depend on how a window is cut into batches.

    Args:
        target: the model that the drafter is for; without an adapter it stays in eval mode, whoever calls `train`.
    """

    def __init__(self, target: PreTrainedModel | nn.Module) -> None:
        super().__init__()
        self.target = target
        # What FSDP shards as one: the layers, so that not all weights are on each rank at once.
        models = [part for part in target.modules() if isinstance(part, PreTrainedModel)]
        self._no_split_modules = sorted({name for model in models for name in model._no_split_modules or ()})

    def train(self, mode: bool = True) -> DrafterTraining:
        """Puts what learns into training mode; a frozen target has no dropout to make its states noisy."""
        super().train(mode)
        if not any(parameter.requires_grad for parameter in self.target.parameters()):
            self.target.eval()
        return self

    def activation_checkpointing_enable(self, **kwargs: Any) -> None:
        """What Trainer calls for `--gradient_checkpointing` and `--activation_checkpointing`."""
        for module in self.children():
            learns = any(parameter.requires_grad for parameter in module.parameters())
            if learns and isinstance(module, PreTrainedModel) and module.supports_gradient_checkpointing:
                module.activation_checkpointing_enable(**kwargs)


class DrafterTrainer(Trainer):
    """Trains those tensors of a module that require a gradient, and keeps only those in its checkpoints.

    Args:
        module: see `DrafterTraining`.
        arguments: of the script.
        training: of Trainer.
        kwargs: further arguments of Trainer.
    """

    loss_is_scaled_for_ga = True  # by `num_items_in_batch`

    def __init__(
        self, module: nn.Module, arguments: CommonArguments, training: TrainingArguments, **kwargs: Any
    ) -> None:
        super().__init__(module, training, **kwargs)
        self.arguments = arguments
        self.model_accepts_loss_kwargs = True
        if training.save_strategy == SaveStrategy.EPOCH:
            self.add_callback(LogsAtEpochs())
        self._metrics: dict[str, list[Tensor]] = {}
        if arguments.minutes is not None:
            self.add_callback(StopAfter(arguments.minutes))

    def train_or_resume(self) -> bool:
        """Trains, from the last complete checkpoint where `resume` says so; whether all steps are done.

        Raises:
            SystemExit: the folder holds another training's checkpoints, and `resume` was not asked for.
        """
        folder = Path(self.args.output_dir)
        last = goes_on_from(folder, self.arguments.resume)
        if self.arguments.resume:
            logger.warning("going on from %s", last) if last else logger.warning(
                "no complete checkpoint in %s: starting from the beginning", folder
            )
        self.train(resume_from_checkpoint=None if last is None else str(last))
        done = self.state.global_step >= self.state.max_steps
        if not done:
            logger.warning(
                "stopped after step %d of %d; --resume goes on", self.state.global_step, self.state.max_steps
            )
        return done

    def whole(self, name: str) -> dict[str, Tensor] | None:
        """A submodule's full tensors on the main process, gathered from all ranks; None on the others.

        Args:
            name: of the submodule.

        Raises:
            RuntimeError: a tensor is empty or holds NaN or infinity.
        """
        state = self.accelerator.get_state_dict(self.model_wrapped if self.sharded else self.model)
        if not self.args.should_save:
            return None
        return _sound(
            {key.removeprefix(f"{name}."): value for key, value in state.items() if key.startswith(f"{name}.")}
        )

    @property
    def sharded(self) -> bool:
        """Weights lie in pieces on several ranks, so that a pass of one rank alone would wait for ever."""
        return bool(self.is_fsdp_enabled or self.is_deepspeed_enabled)

    def _get_train_sampler(self, train_dataset: Any = None) -> Sampler[int] | None:
        """Trainer's own; rows of about one length come together in an order that a resumed training finds again."""
        sampler: Sampler[int] | None = super()._get_train_sampler(train_dataset)
        if isinstance(sampler, LengthGroupedSampler):
            return ByLength(sampler.batch_size, lengths=sampler.lengths, seed=self.args.data_seed or self.args.seed)
        return sampler

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Trainer's own, and keeps what else the module returns for the log."""
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        for name, value in outputs.items():
            if name != "loss":
                self._metrics.setdefault(name, []).append(value.detach().float())
        return (loss, outputs) if return_outputs else loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the means of the metrics since the last time.

        Raises:
            FloatingPointError: the loss is no number.
        """
        for name, values in self._metrics.items():
            logs[name] = round(float(self.accelerator.reduce(torch.stack(values).nanmean(), "mean")), 4)
        self._metrics = {}
        super().log(logs, start_time)
        if "loss" in logs and not torch.isfinite(torch.tensor(logs["loss"])):
            raise FloatingPointError(
                f"the loss is {logs['loss']} at step {self.state.global_step}; a lower --learning_rate may help"
            )

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None) -> None:
        """What is trained, by name; the frozen rest is the target's own checkpoint."""
        if not self.args.should_save:
            return
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        state = self.model.state_dict() if state_dict is None else state_dict
        save_file(_sound({name: state[name].contiguous() for name in trained(self.model)}), folder / TRAINED)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """Trainer's own; a mark made last tells a complete checkpoint from one that was cut off."""
        super()._save_checkpoint(model, trial)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            step = self.state.global_step
            mark = Path(self.args.output_dir, f"checkpoint-{step}", COMPLETE)
            write_whole(mark, json.dumps({"step": step}))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        """Brings the trained tensors back.

        Raises:
            ValueError: other tensors were trained than are now.
        """
        if self.sharded:
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        parameters = trained(self.model if model is None else model)
        saved = load_file(Path(resume_from_checkpoint) / TRAINED)
        if saved.keys() != parameters.keys():
            changed = sorted(saved.keys() ^ parameters.keys())
            raise ValueError(
                f"{resume_from_checkpoint} trained other tensors: {', '.join(changed[:8])} are only in one of the two; "
                "resume with the arguments of the first start"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(saved[name])


class ByLength(LengthGroupedSampler):  # type: ignore[misc]
    """Trainer's own, but that its order follows from seed and epoch: the global generator's state would be another."""

    def __init__(self, batch_size: int, lengths: list[int], seed: int) -> None:
        super().__init__(batch_size, lengths=lengths)
        self.seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Called before each epoch."""
        self.generator = torch.Generator().manual_seed(self.seed + epoch)


class LogsAtEpochs(TrainerCallback):
    """Ends a logging window where a checkpoint is written: its losses live in memory, and a stop would lose them."""

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Asks for the log."""
        control.should_log = True
        return control


class StopAfter(TrainerCallback):
    """Saves and stops when the time is up, where a logging window ends.

    Args:
        minutes: of this process.
    """

    def __init__(self, minutes: float) -> None:
        self.end = time.monotonic() + 60 * minutes

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Asks for the last checkpoint."""
        if state.global_step % max(1, int(args.logging_steps)) == 0 and self._late(args.device):
            control.should_save = control.should_training_stop = True
        return control

    def _late(self, device: torch.device) -> bool:
        """Whether the time is up for any rank: all stop at the same step, whatever their clocks say."""
        late = torch.tensor(int(time.monotonic() >= self.end), device=device)
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(late, torch.distributed.ReduceOp.MAX)
        return bool(late)


def trained(module: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def goes_on_from(folder: Path, resume: bool) -> Path | None:
    """The checkpoint that a training in a folder goes on from; None for one from the beginning.

    Raises:
        SystemExit: there is one, and `resume` was not asked for.
    """
    last = last_complete(folder)
    if last is not None and not resume:
        raise SystemExit(f"{folder} holds checkpoints of a training: pass --resume, or another --output_dir")
    return last


def last_complete(folder: Path) -> Path | None:
    """The checkpoint with the most steps that was written to its end; others are ignored, and named.

    Args:
        folder: `--output_dir` of a training.
    """
    numbered = {path: path.name.removeprefix("checkpoint-") for path in folder.glob("checkpoint-*")}
    found = sorted(
        (path for path, number in numbered.items() if number.isdecimal()), key=lambda path: int(numbered[path])
    )
    for path in (path for path in found if not (path / COMPLETE).is_file()):
        logger.warning("%s was cut off and is ignored", path)
    return next((path for path in reversed(found) if (path / COMPLETE).is_file()), None)


def _sound(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, if all hold numbers.

    Raises:
        RuntimeError: one is empty (its shards were not gathered) or not finite.
    """
    for name, tensor in state.items():
        if tensor.numel() == 0 or not bool(tensor.isfinite().all()):
            raise RuntimeError(f"{name} {'is empty' if tensor.numel() == 0 else 'holds NaN or infinity'}: not saved")
    return dict(state)


def saved_as(arguments: CommonArguments, target: PreTrainedModel) -> torch.dtype:
    """The dtype that weights are saved in."""
    return target.dtype if arguments.save_dtype is None else SAVED[arguments.save_dtype]


def is_main() -> bool:
    """Whether this process is the one that writes."""
    return int(os.environ.get("RANK", "0")) == 0
