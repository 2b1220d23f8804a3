"""Whether data fit a training: rows that teach something, in the target's own ids, with the target's own states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import torch
from running import provenance
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.heads.recorded import TURNED, TargetRecord, distance
from texts import data
from texts.chats import IGNORED

# Columns that only the target itself can have filled.
ITS_OWN = ("hidden_states", "top_ids", "top_logprobs")


def refuse_unfit(
    rows: datasets.Dataset, source: str | Path, target: PreTrainedModel, max_length: int, in_a_row: int = 1
) -> None:
    """Looks at all rows before anything is trained on them.

    Args:
        rows: with `input_ids` and `labels`, and of other columns those that are used.
        source: where they come from.
        target: the model that the drafter is for.
        max_length: where longer rows are cut.
        in_a_row: how many labels must follow one another for a row to teach something.

    Raises:
        ValueError: see `refuse_another_target`, `refuse_malformed` and `refuse_unlabelled`.
    """
    if data.is_generated(source):
        refuse_another_target(data.read_info(source), source, target, rows.column_names)
    refuse_malformed(rows, source, target.config.get_text_config(decoder=True).vocab_size)
    refuse_unlabelled(rows, source, max_length, in_a_row)


def refuse_another_target(
    info: dict[str, Any], source: str | Path, target: PreTrainedModel, columns: list[str]
) -> None:
    """Compares the model that wrote data with the one that is to be drafted for.

    Texts of another model with the same vocabulary are let pass: they are what one has of a model too large to ask.

    Args:
        info: see `data.read_info`.
        source: where the data come from.
        target: the model that is to be drafted for.
        columns: that are used.

    Raises:
        ValueError: it has another vocabulary; or it is another one, and the data hold its states or distributions.
    """
    theirs, ours = TargetRecord.from_dict(info.get("target") or {}), TargetRecord.of(target)
    told = f"{source} was written by {info.get('target_name') or 'another model'}"
    if theirs.vocab_size not in (None, ours.vocab_size):
        raise ValueError(f"{told}, of {theirs.vocab_size} token ids, and the target has {ours.vocab_size}")
    if not set(ITS_OWN).intersection(columns):
        return
    sizes = [(theirs.hidden_size, ours.hidden_size), (theirs.num_layers, ours.num_layers)]
    another = any(one not in (None, other) for one, other in sizes)
    if theirs.fingerprint and ours.fingerprint:
        another |= distance(theirs.fingerprint, ours.fingerprint) > TURNED
    if (mark := info.get("mark")) is not None:
        another |= provenance.mark_of(target) not in (None, mark)
    if another:
        raise ValueError(
            f"{told}, whose states or distributions it holds, and the target is another model: generate data with "
            "this one"
        )


def refuse_malformed(rows: datasets.Dataset, source: str | Path, vocabulary: int) -> None:
    """Looks for rows that are no texts with labels.

    Args:
        rows: with `input_ids` and `labels`.
        source: what they are called.
        vocabulary: how many ids there are.

    Raises:
        ValueError: ids are not the vocabulary's; or labels are fewer than ids, or others.
    """
    for number, row in enumerate(rows.select_columns(["input_ids", "labels"])):
        ids, labels = _tokens(row["input_ids"]), _tokens(row["labels"])
        told = f"row {number} of {source}"
        if len(ids) != len(labels):
            raise ValueError(f"{told} has {len(ids)} input_ids and {len(labels)} labels: there is one for each")
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise ValueError(
                f"{told} has ids from {int(ids.min())} to {int(ids.max())}, and the target's end at {vocabulary - 1}: "
                "they are another tokenizer's"
            )
        if bool((ids[labels != IGNORED] != labels[labels != IGNORED]).any()):
            raise ValueError(
                f"{told} has labels other than its ids: a label is the id at its own place, or {IGNORED}; they are "
                "shifted in training, not in the data"
            )


def refuse_unlabelled(
    rows: datasets.Dataset, source: str | Path, max_length: int | None = None, in_a_row: int = 1
) -> None:
    """Looks for rows that would teach nothing.

    Args:
        rows: with `labels`.
        source: what they are called.
        max_length: where longer rows are cut.
        in_a_row: how many labels must follow one another in some row.

    Raises:
        ValueError: there are no rows; or a row that is not cut has no label; or every label is cut off; or none is
            followed by as many others.
    """
    if not len(rows):
        raise ValueError(f"{source} has no rows")
    some = enough = False
    for number, row in enumerate(rows.select_columns(["labels"])):
        labels = _tokens(row["labels"])
        labelled = labels[:max_length] != IGNORED
        some |= bool(labelled.any())
        # Nothing foretells a first token.
        enough |= len(labelled) > in_a_row and bool(labelled[1:].unfold(0, in_a_row, 1).all(-1).any())
        if not bool(labelled.any()) and (max_length is None or len(labels) <= max_length):
            raise ValueError(
                f"row {number} of {source} has no label: nothing in it is the assistant's. Either nobody answers in "
                "it, or the roles are not those of the chat template"
            )
    if not some:
        raise ValueError(f"{source} has no label within {max_length} tokens: raise --max_length")
    if not enough:
        raise ValueError(f"{source} has no answer of {in_a_row} or more tokens: there is nothing to draft in it")


def _tokens(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.long)
