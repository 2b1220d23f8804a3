"""Data for training: what is labelled, which side of the split it is on, what a folder holds, how a batch is padded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import talking
import tiny
import torch
from talking import ASSISTANT, CHAT, END, USER
from texts import data
from texts.chats import Turns

TAGGED = (
    "{% for m in messages %}<{{ m['role'] }}>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}INSIDE{% endgeneration %}OUTSIDE{% else %}{{ m['content'] }}<end>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TEMPLATES = {
    "without tags": CHAT,
    "tags that leave the end out": TAGGED.replace("INSIDE", "").replace("OUTSIDE", "<end>\n"),
    "tags around the end": TAGGED.replace("INSIDE", "<end>").replace("OUTSIDE", "\n"),
    "tags around the end and more": TAGGED.replace("INSIDE", "<end>\n").replace("OUTSIDE", ""),
    "a blank before the end": CHAT.replace("<end>", " <end>"),
    "that trims": CHAT.replace("m['content']", "m['content'] | trim"),
    "with a default system prompt": "{% if messages[0]['role'] != 'system' %}<system>a b<end>\n{% endif %}" + CHAT,
}


@pytest.fixture(autouse=True)
def _cached_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def chat(*said: str, system: str | None = None) -> list[dict[str, str]]:
    roles = ["user", "assistant"] * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def shown(tokenizer: Any, ids: list[int], labels: list[int]) -> str:
    """The labelled tokens, and a line for every other one."""
    return "".join(
        "_" if label == -100 else tokenizer.decode([token]) for token, label in zip(ids, labels, strict=True)
    )


# -------------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
def test_labels_are_what_the_assistant_says_and_the_token_that_ends_its_turn(template: str) -> None:
    tokenizer = talking.letters(template)
    messages = chat("user", "assistant", "a", "a user, ends.")
    ids, labels = Turns(tokenizer).label(messages)
    assert ids == tokenizer.apply_chat_template(messages, return_dict=True)["input_ids"]
    assert all(label in (-100, token) for token, label in zip(ids, labels, strict=True))
    said = [run for run in shown(tokenizer, ids, labels).split("_") if run]
    whole = ["assistant<end>", "a user, ends.<end>"]
    assert said in (whole, ["assistant", "<end>", "a user, ends.", "<end>"])  # a blank stands before the end


def test_a_known_chat_is_labelled_as_by_hand() -> None:
    tokenizer = talking.words()
    ids, labels = Turns(tokenizer).label(chat("w1 w2", "w3 w4", "w5", "w6"))
    a, b, c, d, e, f = (tokenizer.convert_tokens_to_ids(f"w{number}") for number in range(1, 7))
    assert ids == [USER, a, b, END, ASSISTANT, c, d, END, USER, e, END, ASSISTANT, f, END]
    assert labels == [-100, -100, -100, -100, -100, c, d, END, -100, -100, -100, -100, f, END]


def test_the_end_of_an_empty_answer_is_labelled_too() -> None:
    tokenizer = talking.letters()
    ids, labels = Turns(tokenizer).label(chat("hi", "", "more", "no"))
    assert [run for run in shown(tokenizer, ids, labels).split("_") if run] == ["<end>", "no<end>"]


def test_a_chat_that_waits_for_an_answer_has_the_labels_of_those_before() -> None:
    tokenizer = talking.letters()
    ids, labels = Turns(tokenizer).label(chat("hi", "yes", "more", system="be"))
    assert shown(tokenizer, ids, labels).strip("_") == "yes<end>"


def test_an_end_that_belongs_to_the_next_turn_counts_where_the_template_has_no_other() -> None:
    tokenizer = talking.letters("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}")
    ids, labels = Turns(tokenizer).label(chat("hi", "yes", "more", "no"))
    assert shown(tokenizer, ids, labels).strip("_") == "yes<user>_____no"


def test_templates_that_cannot_be_labelled_are_refused() -> None:
    with pytest.raises(ValueError, match="no chat template"):
        Turns(talking.letters(None))
    forgetful = CHAT.replace("m['content']", "(m['content'] if loop.last else m['content'].split('|')[-1])")
    with pytest.raises(ValueError, match="changes what was said"):
        Turns(talking.letters(forgetful)).label(chat("hi", "thought|yes", "more", "no"))
    with pytest.raises(ValueError, match="does not show each message"):
        Turns(talking.letters("{{ messages[-1]['content'] }}")).label(chat("hi", "yes"))
    strict = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT
    with pytest.raises(ValueError, match="refuses a chat of system, user, assistant: no system"):
        Turns(talking.letters(strict)).label(chat("hi", "yes", system="be"))


# ------------------------------------------------------------------------------------------------------------ a folder


def row(question: str = "what", tokens: int = 5, answer: int = 2, width: int = 3) -> dict[str, Any]:
    ids = list(range(10, 10 + tokens))
    return {
        "input_ids": ids,
        "labels": [-100] * (tokens - answer) + ids[tokens - answer :],
        "held_out": data.is_held_out(question),
        "prompt": question,
        "hidden_states": np.arange(tokens * width, dtype=np.float16).reshape(tokens, width),
        "top_ids": np.arange(tokens * 2, dtype=np.int32).reshape(tokens, 2),
        "top_logprobs": -np.arange(tokens * 2, dtype=np.float32).reshape(tokens, 2),
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two parts with both sides of the split in each."""
    path = tmp_path / "data"
    data.write_info(path, {"hidden_layers": [-1]})
    for part in range(2):
        data.write_part(path, part, [row(f"question {number}", 5 + number % 3) for number in range(60)])
    return path


def test_a_folder_is_read_as_it_was_written(folder: Path) -> None:
    rows = data.load(folder, held_out=None)
    assert len(rows) == 120
    assert data.read_info(folder) == {"hidden_layers": [-1]}
    for place in (0, 61):
        for name, value in row(f"question {place % 60}", 5 + place % 60 % 3).items():
            read = rows[place][name]
            assert (
                read == value
                if isinstance(value, str | bool)
                else torch.equal(read, torch.as_tensor(value).to(read.dtype))
            )
    assert data.load(folder, columns=["labels"]).column_names == ["labels"]


def test_a_side_may_be_empty(tmp_path: Path) -> None:
    data.write_info(tmp_path / "data", {"hidden_layers": []})
    data.write_part(tmp_path / "data", 0, [row("question 1")])
    assert [len(data.load(tmp_path / "data", held_out=side)) for side in (False, True)] == [1, 0]


def test_a_part_that_was_cut_off_is_left_out_and_a_lost_one_is_missed(folder: Path) -> None:
    (folder / "part-00002.parquet.4711").write_bytes(b"half a par")
    assert len(data.load(folder, held_out=None)) == 120
    (folder / "part-00000.parquet").unlink()
    with pytest.raises(ValueError, match="no part-00000"):
        data.load(folder)


def test_what_is_no_folder_of_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no data\.json"):
        data.read_info(tmp_path)
    data.write_info(tmp_path / "begun", {"hidden_layers": []})
    with pytest.raises(ValueError, match="no complete part"):
        data.load(tmp_path / "begun")
    (tmp_path / "notes.txt").write_text("words")
    with pytest.raises(ValueError, match="a file of data is one of"):
        data.load(tmp_path / "notes.txt")


def test_the_split_is_by_question_and_never_changes(folder: Path) -> None:
    kept, held_out = (data.load(folder, held_out=side, columns=["prompt"]) for side in (False, True))
    assert not set(kept["prompt"]) & set(held_out["prompt"])
    assert len(kept) + len(held_out) == 120
    assert len(held_out) == 2 * len(set(held_out["prompt"])) > 0
    share = sum(data.is_held_out(f"question {number}") for number in range(10_000)) / 10_000
    assert abs(share - data.HELD_OUT / 1000) < 0.01
    assert [number for number in range(60) if data.is_held_out(f"question {number}")] == KNOWN
    assert all(data.is_held_out(f"  QUESTION, {number}?") for number in KNOWN)


KNOWN = [17, 23, 26, 39, 52]


# ---------------------------------------------------------------------------------------------------- other people's


def test_chats_of_a_file_become_rows_with_labels(tmp_path: Path) -> None:
    chats = [chat(f"question {number}", "yes") for number in range(60)]
    file = tmp_path / "chats.jsonl"
    file.write_text("\n".join(json.dumps({"messages": messages, "more": 1}) for messages in chats))
    tokenizer = talking.letters()
    rows = data.load(file, held_out=None, tokenizer=tokenizer)
    assert [rows[3]["input_ids"].tolist(), rows[3]["labels"].tolist()] == list(Turns(tokenizer).label(chats[3]))
    held_out = data.load(file, held_out=True, tokenizer=tokenizer)
    assert held_out["prompt"] == [f"question {number}" for number in KNOWN]
    with pytest.raises(ValueError, match="a tokenizer with a chat template is needed"):
        data.load(file)


def test_rows_with_labels_are_taken_as_they_are_and_split_by_what_precedes_the_labels(tmp_path: Path) -> None:
    made = [{"input_ids": [number, 7, 8], "labels": [-100, 7, 8]} for number in range(100) for _ in range(2)]
    file = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(made).to_parquet(str(file))
    sides = [data.load(file, held_out=side) for side in (False, True)]
    firsts = [{int(ids[0]) for ids in side["input_ids"]} for side in sides]
    assert not firsts[0] & firsts[1]
    assert firsts[1]
    assert sum(map(len, firsts)) == 100


def test_other_columns_and_messages_that_are_no_text_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text(json.dumps([{"text": "a"}]))
    with pytest.raises(ValueError, match="has the columns text"):
        data.load(file, tokenizer=talking.letters())
    with pytest.raises(ValueError, match="a role and a text"):
        data.chat_of({"messages": [{"role": "user", "content": [{"type": "image"}]}]})


def test_files_that_hold_nothing_or_no_rows_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("")
    with pytest.raises(ValueError, match=r"rows\.jsonl is empty"):
        data.load(file)
    file.write_text("{ no json")
    with pytest.raises(ValueError, match=r"rows\.jsonl cannot be read"):
        data.load(file)


def test_held_out_rows_are_decided_by_or_reported_on_and_never_both() -> None:
    for count in (0, 1, 2, 5):
        deciding, reported = data.halves(datasets.Dataset.from_dict({"row": list(range(count))}))
        assert sorted([*deciding["row"], *reported["row"]]) == list(range(count))
        assert 0 <= len(reported) - len(deciding) <= 1


def test_a_chat_that_is_called_like_our_own_file_is_a_chat(tmp_path: Path) -> None:
    for text in (json.dumps([{"messages": chat("a", "b")}]), '{"messages": 1}\n{"messages": 2}'):
        (tmp_path / "data.json").write_text(text)
        assert not data.is_generated(tmp_path)


def test_the_last_layer_is_found_by_both_of_its_names(folder: Path, tmp_path: Path) -> None:
    config, info = tiny.llama(num_hidden_layers=4).config, data.read_info(folder)
    for layers, found in (([0, -1], 1), ([4, 2], 0), ([0, 2], None)):
        data.write_info(folder, {**info, "hidden_layers": layers})
        assert data.last_layer_at(folder, config) == (None if found is None else found * config.hidden_size)
    assert data.last_layer_at(tmp_path / "chats.jsonl", config) is None


# ---------------------------------------------------------------------------------------------------------- collating


def test_padding_is_masked_by_place_and_never_by_id() -> None:
    """Where pad is EOS, the EOS that ends a turn keeps its label."""
    tokenizer = talking.words(pad="<end>")
    turns = Turns(tokenizer)
    rows = [
        dict(zip(("input_ids", "labels"), turns.label(chat("w1", said)), strict=True)) for said in ("w2", "w2 w3 w4")
    ]
    batch = data.Collator()(rows)
    assert batch["attention_mask"].tolist() == [[1] * 6 + [0] * 2, [1] * 8]
    assert batch["labels"][0].tolist() == [-100] * 4 + rows[0]["labels"][4:] + [-100] * 2
    assert [int(batch["labels"][0, 5]), int(batch["labels"][1, 7])] == [END, END]


def test_a_batch_holds_what_the_rows_hold() -> None:
    rows = [row("a", 5), row("b", 7)]
    batch = data.Collator(pad_to_multiple_of=4)(rows)
    assert {name: tuple(value.shape) for name, value in batch.items()} == {
        **dict.fromkeys(("attention_mask", "input_ids", "labels"), (2, 8)),
        "hidden_states": (2, 8, 3),
        **dict.fromkeys(("top_ids", "top_logprobs"), (2, 8, 2)),
    }
    for place, own in enumerate(rows):
        for name in data.TOKENS:
            kept = batch[name][place, batch["attention_mask"][place].bool()]
            assert torch.equal(kept, torch.as_tensor(own[name]).to(kept.dtype))
    cut = data.Collator(max_length=3)(rows)
    assert all(value.shape[1] == 3 for value in cut.values())
