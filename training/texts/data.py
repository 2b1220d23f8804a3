"""What drafters are trained on: a folder of conversations with labels, and other people's chats made into the same.

`generate_data.py` writes such a folder, `part-00000.parquet` and so on beside `data.json`. A row is one conversation:

    input_ids      (tokens,) int32
    labels         (tokens,) int32, unshifted: the token itself where the assistant says it or ends its turn by it,
                   else -100
    held_out       bool, by a hash of what was asked first, so that the same question is always on the same side
    prompt         str, what was asked first
    hidden_states  (tokens, width) float16, optional: the target's states AT each token, layers side by side in the
                   order of data.json's `hidden_layers` (transformers' indices; -1 is after the final norm)
    top_ids        (tokens, k) int32, optional: the target's likeliest tokens AFTER each token
    top_logprobs   (tokens, k) float32, optional: their log-probabilities
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from hf_specgen.files import write_whole
from texts.chats import IGNORED, Message, Turns

try:  # of all that the scripts need beside the package the first to be imported
    import datasets
    import pyarrow.parquet
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"{error}; training/ needs an extra of the package: pip install -e '.[train]'") from None

INFO = "data.json"
# Of a thousand questions, those that are held out of training.
HELD_OUT = 50
# Columns of one entry a token.
TOKENS = ("input_ids", "labels", "hidden_states", "top_ids", "top_logprobs")
# Endings of files that `datasets` reads, and its name for them.
FILES = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}
Row = dict[str, Any]


def hide_progress() -> None:
    """Of the steps of `datasets`, which would come between the lines of a script's own bar."""
    datasets.disable_progress_bars()


# ------------------------------------------------------------------------------------------------------------ a folder


def parts(folder: str | Path) -> list[Path]:
    """The complete parts of a data folder, in order; one that was cut off bears another name and is left out.

    Raises:
        ValueError: one between others is missing.
    """
    found = sorted(path for path in Path(folder).glob("part-*.parquet"))
    for number, path in enumerate(found):
        if path.name != part_name(number):
            raise ValueError(f"{folder} has {path.name}, but no {part_name(number)}")
    return found


def part_name(number: int) -> str:
    """The name of a part's file."""
    return f"part-{number:05d}.parquet"


def write_part(folder: str | Path, number: int, rows: Sequence[Row]) -> None:
    """Writes rows as one part, complete or not at all.

    Args:
        folder: of the data.
        number: of the part.
        rows: see above; states and top tokens as numpy arrays.
    """
    path = Path(folder, part_name(number))
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    features = datasets.Features({name: _feature(name, value) for name, value in rows[0].items()})
    columns = {name: [row[name] for row in rows] for name in features}
    datasets.Dataset.from_dict(columns, features=features).to_parquet(str(partial))
    partial.replace(path)


def _feature(name: str, value: Any) -> Any:
    if name in ("held_out", "prompt"):
        return datasets.Value("bool" if name == "held_out" else "string")
    if name in ("input_ids", "labels"):
        return datasets.List(datasets.Value("int32"))
    return datasets.Array2D((None, value.shape[1]), str(value.dtype))


def read_info(folder: str | Path) -> dict[str, Any]:
    """What `data.json` says: the target, how it answered, which hidden layers are kept.

    Raises:
        ValueError: there is none.
    """
    path = Path(folder, INFO)
    if not path.is_file():
        raise ValueError(f"{folder} has no {INFO}: it is no folder that generate_data.py wrote")
    info: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return info


def write_info(folder: str | Path, info: Mapping[str, Any]) -> None:
    """Writes `data.json`, and the folder if there is none."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_whole(Path(folder, INFO), json.dumps(info, indent=2) + "\n")


# ------------------------------------------------------------------------------------------------------------- loading


def load(
    source: str | Path,
    held_out: bool | None = False,
    columns: Sequence[str] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    split: str = "train",
) -> datasets.Dataset:
    """Conversations with labels, as torch tensors.

    Args:
        source: a folder of generate_data.py; or a file, folder or hub id of `datasets` with a column `messages`, or
            with `input_ids` and `labels`.
        held_out: the side of the split; None for both.
        columns: to be read; None for all. States are most of what a folder holds.
        tokenizer: with the target's chat template, for `messages`.
        split: of what `datasets` loads.

    Raises:
        ValueError: there is nothing to read, it has other columns, or a chat cannot be labelled.
    """
    if is_generated(source):
        files = [str(path) for path in _complete(source)]
        wanted = None if columns is None else sorted({*columns, "held_out"})
        rows = datasets.load_dataset("parquet", data_files=files, split="train", columns=wanted)
    else:
        rows = _labelled(read(source, split), source, tokenizer)
    if held_out is not None:
        rows = rows.select([place for place, side in enumerate(rows["held_out"]) if side == held_out])
    if columns is not None:
        rows = rows.select_columns(list(columns))
    return rows.with_format("torch")


def halves(rows: datasets.Dataset) -> tuple[datasets.Dataset, datasets.Dataset]:
    """Held-out rows in turn: those by which something is still decided, and those that reports measure on.

    What decided anything, such as the shape of Medusa's trees, would flatter the report. A single row is the report's.
    """
    return rows.select(range(1, len(rows), 2)), rows.select(range(0, len(rows), 2))


def stored(source: str | Path) -> tuple[list[int], list[str]]:
    """The layers whose states a data folder holds, and its columns; of other people's chats none are known.

    Raises:
        ValueError: there is nothing in it.
    """
    if not is_generated(source):
        return [], []
    names = pyarrow.parquet.read_schema(_complete(source)[0]).names
    return list(read_info(source).get("hidden_layers", ())), [name for name in TOKENS if name in names]


def last_layer_at(source: str | Path, config: PreTrainedConfig) -> int | None:
    """Where the last layer's states begin on the last axis of stored ones; None where they are not stored.

    Args:
        source: a data folder.
        config: of the target's text model. Its last layer has two names, -1 and its number.
    """
    places = [at for at, layer in enumerate(stored(source)[0]) if layer in (-1, config.num_hidden_layers)]
    return places[0] * int(config.hidden_size) if places else None


def _complete(folder: str | Path) -> list[Path]:
    """Its complete parts.

    Raises:
        ValueError: there are none.
    """
    if not (found := parts(folder)):
        raise ValueError(f"{folder} has no complete part yet: generate_data.py writes them")
    return found


def is_generated(source: str | Path) -> bool:
    """Whether generate_data.py wrote it; a file of somebody's chats may be called the same."""
    path = Path(source, INFO)
    try:
        told = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except json.JSONDecodeError:
        return False
    return isinstance(told, dict) and "hidden_layers" in told


def tokenizer_for(source: str | Path, target: str, revision: str | None = None) -> PreTrainedTokenizerBase | None:
    """The target's tokenizer, to label chats with; None for a data folder, which holds ids already.

    Args:
        source: as in `load`.
        target: path or hub id.
        revision: of the target on the hub.
    """
    if is_generated(source):
        return None
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(target, revision=revision or "main")
    return tokenizer


def read(source: str | Path, split: str = "train") -> datasets.Dataset:
    """What `datasets` makes of a file, a folder or a hub id.

    Raises:
        ValueError: there is no such thing, it is empty, cannot be read, or has no such split.
    """
    path = Path(source)
    if path.is_dir() and (path / "state.json").is_file():
        return datasets.load_from_disk(str(path))
    if path.is_file():
        if path.suffix not in FILES:
            raise ValueError(f"{path}: a file of data is one of {', '.join(FILES)}")
        if not path.stat().st_size:
            raise ValueError(f"{path} is empty")
        # A file has one split, whatever it is called elsewhere.
        try:
            return datasets.load_dataset(FILES[path.suffix], data_files=str(path), split="train")
        except datasets.exceptions.DatasetGenerationError as error:
            raise ValueError(f"{path} cannot be read: {error.__cause__ or error}") from error
    try:
        return datasets.load_dataset(str(source), split=split)
    except OSError as error:
        raise ValueError(f"{source} is not to be had, neither here nor from the hub: {error}") from error


def _labelled(
    rows: datasets.Dataset, source: str | Path, tokenizer: PreTrainedTokenizerBase | None
) -> datasets.Dataset:
    if {"input_ids", "labels"} <= set(rows.column_names):
        if "held_out" in rows.column_names:
            return rows
        return rows.map(lambda row: {"held_out": is_held_out(str(_before(row["input_ids"], row["labels"])))})
    if "messages" not in rows.column_names:
        raise ValueError(
            f"{source} has the columns {', '.join(rows.column_names)}: to train on it needs `messages`, or `input_ids` "
            "and `labels`; from prompts alone generate_data.py makes such data"
        )
    if tokenizer is None:
        raise ValueError(f"{source} holds chats: a tokenizer with a chat template is needed to label them")
    turns = Turns(tokenizer)

    def label(row: Row) -> Row:
        ids, labels = turns.label(chat_of(row))
        question = first_question(row)
        return {"input_ids": ids, "labels": labels, "held_out": is_held_out(question), "prompt": question}

    return rows.map(label, remove_columns=rows.column_names)


def _before(ids: Sequence[int], labels: Sequence[int]) -> list[int]:
    """The ids before the first label."""
    first = next((place for place, label in enumerate(labels) if label != IGNORED), len(labels))
    return list(ids[:first])


def chat_of(row: Mapping[str, Any]) -> list[Message]:
    """The messages of a row with a column `messages` or `prompt`.

    Raises:
        ValueError: it has neither, or messages that are not text.
    """
    chat = row.get("messages") or row.get("prompt")
    if isinstance(chat, str):
        return [{"role": "user", "content": chat}]
    if not chat:
        raise ValueError(f"a row of prompts has a column `messages` or `prompt`, not only {', '.join(row)}")
    if strange := [message for message in chat if not isinstance(message.get("content"), str)]:
        raise ValueError(f"a message is a role and a text, not {str(strange[0])[:80]}")
    return [{"role": message["role"], "content": message["content"]} for message in chat]


def first_question(row: Mapping[str, Any]) -> str:
    """What the user says first; nothing where nobody asks."""
    return next((message["content"] for message in chat_of(row) if message["role"] == "user"), "")


# ----------------------------------------------------------------------------------------------------------- the split


def normalised(prompt: str) -> str:
    """A prompt without what does not make it another one: case, punctuation, blanks, ways to write a letter."""
    return " ".join(re.findall(r"\w+", unicodedata.normalize("NFKC", prompt).casefold())) or prompt


def is_held_out(prompt: str) -> bool:
    """Which side of the split a question is on; the same everywhere and always."""
    return hashed(normalised(prompt).encode()) % 1000 < HELD_OUT


def seed_of(*numbers: int) -> int:
    """A seed for each choice of numbers."""
    return hashed(b"".join(number.to_bytes(8, "little", signed=True) for number in numbers)) >> 1


def hashed(text: bytes) -> int:
    """64 bits that are the same everywhere."""
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big")


# ----------------------------------------------------------------------------------------------------------- collating


@dataclass(frozen=True)
class Collator:
    """Rows as a batch, padded on the right.

    Padding is what `attention_mask` says it is, never an id: where pad is EOS, the real EOS keeps its label.

    Attributes:
        pad_to_multiple_of: tokens.
        max_length: longer rows are cut.
    """

    pad_to_multiple_of: int = 1
    max_length: int | None = None

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Makes a batch.

        Returns:
            `input_ids`, `attention_mask` and `labels`, int64 `(batch, length)`; and where the rows have them
            `hidden_states`, `top_ids` and `top_logprobs`, `(batch, length, ...)`, 0 where padded.
        """
        columns = {
            name: [torch.as_tensor(row[name])[: self.max_length] for row in rows] for name in TOKENS if name in rows[0]
        }
        lengths = [len(row) for row in columns["input_ids"]]
        length = -(-max(lengths) // self.pad_to_multiple_of) * self.pad_to_multiple_of
        batch = {"attention_mask": torch.tensor([[1] * own + [0] * (length - own) for own in lengths])}
        for name, values in columns.items():
            dtype = values[0].dtype if values[0].is_floating_point() else torch.long
            padded = torch.full(
                (len(rows), length, *values[0].shape[1:]), IGNORED if name == "labels" else 0, dtype=dtype
            )
            for row, own in zip(padded, values, strict=True):
                row[: len(own)] = own
            batch[name] = padded
        return batch
