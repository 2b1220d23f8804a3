"""What is looked at before a training: data that do not fit it, arguments that cannot be meant."""

from __future__ import annotations

import argparse
import copy
from dataclasses import dataclass
from typing import Any

import datasets
import pytest
import talking
import tiny
import torch
from running import provenance
from running.command_line import at_least, refuse_below, told_plainly
from texts.chats import Turns
from texts.fit import refuse_another_target, refuse_malformed, refuse_unlabelled

from hf_specgen.heads.recorded import TargetRecord


def rows(*labels: list[int], ids: list[int] | None = None) -> datasets.Dataset:
    """Rows by their labels; ids are the labels, or 9 where there are none."""
    own = [[9 if label == -100 else label for label in row] if ids is None else ids for row in labels]
    return datasets.Dataset.from_dict({"input_ids": own, "labels": list(labels)})


def test_rows_that_teach_nothing_are_refused() -> None:
    refuse_unlabelled(rows([-100, 4], [-100, -100, -100, -100]), "x", max_length=3)
    with pytest.raises(ValueError, match="row 1 of x has no label"):
        refuse_unlabelled(rows([-100, 4], [-100, -100]), "x")
    with pytest.raises(ValueError, match="no label within 2 tokens"):
        refuse_unlabelled(rows([-100, -100, 4]), "x", max_length=2)
    with pytest.raises(ValueError, match="no rows"):
        refuse_unlabelled(rows(), "x")
    # A template of other roles: what "bot" says is nobody's.
    tokenizer = talking.letters()
    ids, found = Turns(tokenizer).label([{"role": "user", "content": "hi"}, {"role": "bot", "content": "yes"}])
    assert found == [-100] * len(ids)


def test_answers_without_room_for_a_draft_are_refused() -> None:
    """An EAGLE head would be saved as it began: every batch has a loss of 0."""
    refuse_unlabelled(rows([-100, 4], [-100, 4, 5]), "x", in_a_row=2)
    for alone in ([-100, 4, -100, 5], [4, 5], [-100, 4]):
        with pytest.raises(ValueError, match="no answer of 2 or more tokens"):
            refuse_unlabelled(rows(alone), "x", in_a_row=2)
    with pytest.raises(ValueError, match="no answer of 2"):
        refuse_unlabelled(rows([-100, 4, 5]), "x", max_length=2, in_a_row=2)


def test_rows_that_are_no_texts_with_labels_are_refused() -> None:
    refuse_malformed(rows([-100, 4, 19]), "x", 20)
    with pytest.raises(ValueError, match="row 1 of x has ids from 4 to 19, and the target's end at 18"):
        refuse_malformed(rows([-100, 4], [4, 19]), "x", 19)
    with pytest.raises(ValueError, match="row 0 of x has ids from -1"):
        refuse_malformed(rows([-100, -100], ids=[-1, 3]), "x", 20)
    with pytest.raises(ValueError, match="3 input_ids and 2 labels"):
        refuse_malformed(rows([-100, 4], ids=[9, 4, 5]), "x", 20)
    with pytest.raises(ValueError, match="they are shifted in training"):
        refuse_malformed(rows([4, 5, -100], ids=[9, 4, 5]), "x", 20)


@pytest.mark.parametrize("column", ["hidden_states", "top_ids"])
def test_states_of_another_model_are_refused_and_its_texts_are_not(column: str) -> None:
    target, texts = tiny.llama(), ["input_ids", "labels"]

    def look(other: Any, *more: str) -> None:
        info = {"target_name": "T", "target": TargetRecord.of(other).to_dict()}
        refuse_another_target(info, "x", target, [*texts, *more])

    look(tiny.llama(), column)
    for other in (tiny.llama(seed=tiny.SEED + 1), tiny.llama(num_hidden_layers=3)):
        look(other)
        with pytest.raises(ValueError, match="x was written by T, whose states or distributions it holds"):
            look(other, column)
    with pytest.raises(ValueError, match=f"of {tiny.VOCAB + 8} token ids, and the target has {tiny.VOCAB}"):
        look(tiny.llama(vocab_size=tiny.VOCAB + 8))
    refuse_another_target({}, "x", target, [*texts, column])  # it does not say
    info = {"mark": provenance.mark_of(target)}
    refuse_another_target(info, "x", target, [*texts, column])
    refuse_another_target(info, "x", copy.deepcopy(target).to(torch.bfloat16), [*texts, column])
    with torch.no_grad():
        target.model.layers[0].mlp.up_proj.weight.mul_(1.1)  # trained further
    with pytest.raises(ValueError, match="the target is another model"):
        refuse_another_target(info, "x", target, [*texts, column])


def test_what_cannot_be_taken_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["somewhere/script.py"])
    for error in (ValueError("no"), FileNotFoundError("no")):
        with pytest.raises(SystemExit, match=r"^script\.py: no$"), told_plainly():
            raise error
    with pytest.raises(RuntimeError), told_plainly():  # a fault of ours keeps its traceback
        raise RuntimeError("fault")


def test_numbers_that_are_too_small_are_refused() -> None:
    @dataclass
    class Asked:
        rows: int | None

    refuse_below(Asked(1), 1, "rows")
    refuse_below(Asked(None), 1, "rows")
    with pytest.raises(ValueError, match="--rows must be 1 or more, not 0"):
        refuse_below(Asked(0), 1, "rows")
    assert at_least(2)("2") == 2
    with pytest.raises(argparse.ArgumentTypeError, match="must be 2 or more, not 1"):
        at_least(2)("1")
