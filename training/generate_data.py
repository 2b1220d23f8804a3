"""Conversations with a target, to train its drafter on: from prompts at hand, or from nothing at all.

    python training/generate_data.py --target MODEL --out DATA --minutes 30 --hidden_layers eagle3

Without `--prompts` the target asks itself: it continues the header that its chat template puts before a user's text
(Magpie, arXiv 2406.08464), and then it answers. Data come in parts; the same command goes on after the last complete
one. A part follows from the seed, its number and the parts before it, so that a stop changes nothing.

A drafter learns what its target says, so answers are the target's own in any case: those of `--prompts` are not used.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from running import provenance
from running.command_line import Help, refuse_below, told_plainly
from texts import data
from texts.chats import IGNORED, Turns
from texts.decoding import Decoder, Drafted, Draw, Text
from texts.prompts import Chat, Drawing, Given, MadeUp, Prompts, Seen
from texts.recording import record
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, HfArgumentParser, PreTrainedModel

import hf_specgen as sg
from hf_specgen.heads.recorded import TargetRecord

# What may change when data are continued: how long, and how it is computed.
FREE = ("out", "target", "minutes", "tokens", "device", "dtype", "hidden_layers")
EAGLE3 = "eagle3"
# Of the draws of a part: 0 makes up its prompts.
ANSWERS = 1


@dataclass
class Arguments:
    """Of the command line."""

    target: str = field(metadata={"help": "Path or hub id of the model that answers."})
    out: str = field(metadata={"help": "The folder to write; one that holds parts is continued."})
    prompts: str | None = field(
        default=None, metadata={"help": "A file, folder or hub id with a column `messages` or `prompt`."}
    )
    split: str = field(default="train", metadata={"help": "Of --prompts."})
    minutes: float | None = field(
        default=None, metadata={"help": "Begin no part that would end later, by the longest so far."}
    )
    tokens: int | None = field(
        default=None, metadata={"help": "Stop after the part that brings so many answer tokens."}
    )
    rows: int = field(default=128, metadata={"help": "Prompts of a part, decoded together."})
    max_prompt_tokens: int = field(default=96, metadata={"help": "What the user says at a time; longer is left out."})
    max_new_tokens: int = field(default=256, metadata={"help": "Of an answer; a longer one is cut and has no end."})
    do_sample: bool = field(default=False, metadata={"help": "Draw the answers; else they are greedy."})
    temperature: float = field(default=1.0, metadata={"help": "Of drawn answers."})
    question_temperatures: list[float] = field(
        default_factory=lambda: [0.8, 1.0, 1.2], metadata={"help": "Of prompts that the target makes up, in turn."}
    )
    top_k: int = field(default=50, metadata={"help": "Tokens to draw from."})
    hidden_layers: list[str] = field(
        default_factory=list,
        metadata={"help": "Keep states: indices of transformers' hidden_states, or `eagle3` for 2, L//2, L-3 and -1."},
    )
    top_logprobs: int = field(default=0, metadata={"help": "Keep so many of the likeliest tokens after each token."})
    assistant: str | None = field(
        default=None,
        metadata={"help": "Decode with this drafter (`auto`, a path or a hub id): faster for few --rows, or on a GPU."},
    )
    seed: int = 0
    revision: str | None = field(default=None, metadata={"help": "Of the target on the hub."})
    dtype: str = field(default="auto", metadata={"help": "Of the target: auto, float32, bfloat16, float16."})
    device: str = field(default="cuda" if torch.cuda.is_available() else "cpu", metadata={"help": "Of the target."})

    def __post_init__(self) -> None:
        """Refuses what cannot be meant.

        Raises:
            ValueError: it has no end, or a number is too small.
        """
        if self.prompts is None and self.minutes is None and self.tokens is None:
            raise ValueError("a model that makes up its own prompts never comes to an end: pass --minutes or --tokens")
        refuse_below(self, 1, "rows", "max_prompt_tokens", "max_new_tokens", "top_k", "tokens")
        refuse_below(self, 0, "minutes", "top_logprobs")
        if not self.question_temperatures or min(self.temperature, *self.question_temperatures) <= 0:
            raise ValueError(
                "--temperature and --question_temperatures must be above 0; answers are greedy by themselves"
            )


# Prompts, the most tokens of an answer, how they are chosen.
Decode = Callable[[Sequence[Sequence[int]], int, Draw], list[Text]]


def main(arguments: Arguments) -> None:
    """Writes parts until the time, the tokens or the prompts are used up."""
    started = time.monotonic()
    data.hide_progress()
    turns = Turns(AutoTokenizer.from_pretrained(arguments.target, revision=arguments.revision))
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        arguments.target, revision=arguments.revision, dtype=arguments.dtype, device_map=arguments.device
    )
    sg.enable(model)
    layers = layers_of(arguments.hidden_layers, model)
    if arguments.top_logprobs > model.config.get_text_config(decoder=True).vocab_size:
        raise ValueError(f"--top_logprobs {arguments.top_logprobs} is more than {arguments.target} has tokens")
    info = begin(model, layers, arguments)
    prompts, made = resumed(model, turns, arguments)

    bar = tqdm(total=arguments.tokens, initial=made["answer_tokens"], unit=" tokens", smoothing=0.05)
    decode = decoder_of(model, turns, layers, arguments, bar)
    longest_s = 0.0
    for part in itertools.count(len(data.parts(arguments.out))):
        begun = time.monotonic()
        if arguments.minutes is not None and begun - started + longest_s >= 60 * arguments.minutes:
            break
        if arguments.tokens is not None and made["answer_tokens"] >= arguments.tokens:
            break
        bar.set_description(f"part {part}: prompts")
        chats = prompts.part(part)
        if chats is None:
            break
        bar.set_description(f"part {part}: answers")
        warmth = [arguments.temperature] * len(chats)
        seed = data.seed_of(arguments.seed, part, ANSWERS)
        draw = Draw.seeded(warmth, arguments.top_k, seed, model.device) if arguments.do_sample else Draw()
        rows = converse(decode, turns, chats, arguments, draw)
        kept = record(model, [text for text, _ in rows], layers, arguments.top_logprobs)
        written = [{**row, **more} for (_, row), more in zip(rows, kept, strict=True)]
        data.write_part(arguments.out, part, written)
        made = counted(made, [row["labels"] for row in written])
        data.write_info(arguments.out, {**info, **made})
        longest_s = max(longest_s, time.monotonic() - begun)
    bar.close()
    said = f"{made['conversations']} conversations, {made['answer_tokens']} answer tokens"
    print(f"{arguments.out}: {said}, {time.monotonic() - started:.0f} s", file=sys.stderr)


def converse(
    decode: Decode, turns: Turns, chats: Sequence[Chat], arguments: Arguments, draw: Draw
) -> list[tuple[Text, data.Row]]:
    """Answers what the user says in every chat, turn after turn, as long as the target ends its own.

    Returns:
        For each chat the last turn's text, which holds those before it, and its row.
    """
    asked = [[message for message in chat if message["role"] == "user"] for chat in chats]
    opening = [chat[: chat.index(users[0]) + 1] for chat, users in zip(chats, asked, strict=True)]
    texts = decode(
        [turns.encode(turns.render(chat, answering=True)) for chat in opening], arguments.max_new_tokens, draw
    )
    labels = [[IGNORED] * text.prompt + text.ids[text.prompt :] for text in texts]
    for turn in range(1, max(map(len, asked))):
        more: dict[int, list[int]] = {}
        for at, users in enumerate(asked):
            ids = turns.follow(texts[at].ids, *users[turn - 1 : turn + 1]) if turn < len(users) else None
            if ids is not None and len(ids) <= arguments.max_prompt_tokens + len(turns.header):
                more[at] = ids
            else:
                asked[at] = users[:turn]  # it ends here
        answered = (
            decode([texts[at].ids + ids for at, ids in more.items()], arguments.max_new_tokens, draw) if more else []
        )
        for (at, ids), text in zip(more.items(), answered, strict=True):
            labels[at] += [IGNORED] * len(ids) + text.ids[text.prompt :]
            texts[at] = text
    rows = []
    for text, own, users in zip(texts, labels, asked, strict=True):
        question = users[0]["content"]
        row = {"input_ids": text.ids, "labels": own, "held_out": data.is_held_out(question), "prompt": question}
        rows.append((text, row))
    return rows


def decoder_of(
    model: PreTrainedModel, turns: Turns, layers: tuple[int, ...], arguments: Arguments, bar: Any
) -> Decoder | Drafted:
    """What answers: a step for all rows, or drafts."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is no causal LM: its encoder would need data of its own")
    eos = model.generation_config.eos_token_id
    ends = turns.ends.union(eos if isinstance(eos, list) else [] if eos is None else [eos])
    if arguments.assistant is None:
        return Decoder(model, ends, layers, bar.update)
    return Drafted(model, ends, arguments.assistant, bar.update)


def layers_of(names: Sequence[str], model: PreTrainedModel) -> tuple[int, ...]:
    """Indices of `hidden_states` by what the command line calls them.

    Raises:
        ValueError: the target has no such layer.
    """
    count = int(model.config.get_text_config(decoder=True).num_hidden_layers)
    if list(names) == [EAGLE3]:
        names = [str(layer) for layer in (2, count // 2, count - 3, -1)]
    for name in names:
        if name not in map(str, range(-1, count + 1)):
            raise ValueError(f"--hidden_layers {name}: the target has 0 (embeddings) to {count}, and -1 (normed)")
    return tuple(map(int, names))


def begin(model: PreTrainedModel, layers: Sequence[int], arguments: Arguments) -> dict[str, Any]:
    """Opens the folder; what `data.json` says of all parts.

    Raises:
        ValueError: it was begun with another target or other settings.
    """
    settings = {name: value for name, value in asdict(arguments).items() if name not in FREE}
    record = TargetRecord.of(model).to_dict()
    info: dict[str, Any] = {"target_name": arguments.target, "target": record, "mark": provenance.mark_of(model)}
    info |= {"hidden_layers": list(layers), **settings}
    if not (data.is_generated(arguments.out) and data.parts(arguments.out)):
        told = {"command": provenance.command(sys.argv), "versions": provenance.versions()}
        data.write_info(arguments.out, {**info, **told})
        return {**info, **told}
    before = data.read_info(arguments.out)
    for name in ("hidden_layers", *settings):
        if before.get(name, info[name]) != info[name]:
            raise ValueError(
                f"{arguments.out} was begun with --{name} {before[name]}, not {info[name]}: go on with the same "
                "settings, or take another --out"
            )
    if (before["target"]["fingerprint"], before.get("mark", info["mark"])) != (record["fingerprint"], info["mark"]):
        raise ValueError(f"{arguments.out} was begun with another target, {before['target_name']}: take another --out")
    return before


def resumed(model: PreTrainedModel, turns: Turns, arguments: Arguments) -> tuple[Prompts, dict[str, int]]:
    """Where prompts come from, with those of the parts so far in mind; and what these parts hold."""
    made, asked = {"conversations": 0, "answer_tokens": 0}, []
    if data.parts(arguments.out):
        rows = data.load(arguments.out, held_out=None, columns=["prompt", "labels"])
        made = counted(made, rows["labels"])
        asked = list(rows["prompt"])
    if arguments.prompts is not None:
        given = Given.of(turns, arguments.prompts, arguments.split, arguments.rows, arguments.max_prompt_tokens)
        given.refuse_changed(asked)
        return given, made
    drawing = Drawing(arguments.question_temperatures, arguments.top_k, arguments.seed)
    decoder = Decoder(model, turns.user_ends)
    return MadeUp(decoder, turns, arguments.rows, arguments.max_prompt_tokens, drawing, Seen(asked)), made


def counted(made: dict[str, int], labels: Iterable[Any]) -> dict[str, int]:
    """What was made, with some more conversations."""
    new = [sum(int(label) != IGNORED for label in row) for row in labels]
    return {"conversations": made["conversations"] + len(new), "answer_tokens": made["answer_tokens"] + sum(new)}


if __name__ == "__main__":
    with told_plainly():
        parser = HfArgumentParser(Arguments, description=__doc__, formatter_class=Help)
        main(parser.parse_args_into_dataclasses()[0])
