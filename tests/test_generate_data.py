"""Data from a target: it says what stock generate says, states are a plain pass's, and a stop changes nothing."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import families
import generate_data
import numpy as np
import pytest
import talking
import tiny
import torch
from generate_data import Arguments
from talking import END, USER
from texts import data
from texts.chats import Turns
from texts.decoding import Decoder, Drafted, Draw, Text, chosen
from texts.prompts import Given, Seen, usable
from texts.recording import record
from transformers import GenerationConfig, HfArgumentParser

import hf_specgen as sg

LAYERS = (0, 1, -1)
# Of several lengths, with a common start; some answers end, some are cut.
PROMPTS = [
    [4, 9, USER, 20, 3],
    [4, 9, USER, 31, 32, 33, 8, 3],
    [4, 9, USER, 3],
    *([4, 9, USER, n, 3] for n in range(40, 52)),
]
LIMIT = 24


@pytest.fixture(autouse=True)
def _cached_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def target() -> Any:
    return sg.enable(talking.speaker())


@pytest.fixture(scope="module")
def texts(target: Any) -> list[Text]:
    return Decoder(target, frozenset([END]), LAYERS)(PROMPTS, LIMIT, Draw())


@torch.no_grad()
def passed(target: Any, ids: Sequence[int]) -> Any:
    return target(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)


# ------------------------------------------------------------------------------------------------------------ decoding


def test_rows_decoded_together_are_those_of_stock_generate(target: Any, texts: list[Text]) -> None:
    for prompt, text in zip(PROMPTS, texts, strict=True):
        alone = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=LIMIT, eos_token_id=END)
        assert text.ids == alone[0].tolist()
        assert (text.prompt, text.ended) == (len(prompt), text.ids[-1] == END)
    assert 1 < sum(text.ended for text in texts) < len(texts)


def test_states_are_those_of_a_plain_pass_at_every_token(target: Any, texts: list[Text]) -> None:
    for text in texts:
        states = torch.cat(text.states)
        assert torch.equal(states, chosen(passed(target, text.ids).hidden_states, LAYERS)[0])


def test_rows_without_a_common_start_and_a_single_row_are_decoded_too(target: Any, texts: list[Text]) -> None:
    decode = Decoder(target, frozenset([END]), LAYERS)
    assert decode([PROMPTS[1]], LIMIT, Draw())[0].ids == texts[1].ids
    apart = decode([[7], PROMPTS[1]], LIMIT, Draw())
    assert apart[1].ids == texts[1].ids
    assert len(torch.cat(apart[0].states)) == len(apart[0].ids)


def test_a_sliding_window_is_decoded_as_by_stock(windowed: Any) -> None:
    rows = [list(range(3, 20)), [*range(3, 8), 50], [5, 6]]
    for text in Decoder(windowed, frozenset([END]))(rows, LIMIT, Draw()):
        alone = windowed.generate(torch.tensor([text.ids[: text.prompt]]), max_new_tokens=LIMIT, eos_token_id=END)
        assert text.ids == alone[0].tolist()


@pytest.mark.parametrize("family", ["lfm2", "qwen3_next"])
def test_recurrent_states_of_rows_that_end_are_dropped_with_them(family: str) -> None:
    model: Any = families.build(family)
    rows = [list(range(3, 12)), [*range(3, 8), 20], [5, 6]]
    alone = [model.generate(torch.tensor([row]), do_sample=False, max_new_tokens=LIMIT)[0].tolist() for row in rows]
    end = alone[1][len(rows[1]) + 3]  # one row ends early, and the others go on without it
    texts = Decoder(model, frozenset([end]))(rows, LIMIT, Draw())
    for text, row, whole in zip(texts, rows, alone, strict=True):
        answer = whole[len(row) :]
        assert text.ids[len(row) :] == (answer[: answer.index(end) + 1] if end in answer else answer)
    assert 0 < sum(text.ended for text in texts) < len(texts)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_drafter_changes_only_how_long_it_takes(target: Any, texts: list[Text], sampled: bool) -> None:
    draw = Draw.seeded([0.7] * len(PROMPTS), 5, 3, target.device) if sampled else Draw()
    drafted = Drafted(target, frozenset([END]), sg.PromptLookup())(PROMPTS, LIMIT, draw)
    plain = Drafted(target, frozenset([END]), sg.Plain())(PROMPTS, LIMIT, draw) if sampled else texts
    assert [(text.ids, text.prompt, text.ended) for text in drafted] == [
        (text.ids, text.prompt, text.ended) for text in plain
    ]
    assert sampled == ([text.ids for text in drafted] != [text.ids for text in texts])


def test_tokens_are_drawn_from_the_top_k_at_each_rows_temperature() -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0]).repeat(8000, 1)
    warmth = [0.5, 1.5] * 4000
    drawn = Draw.seeded(warmth, 3, 0, torch.device("cpu"))(logits, torch.arange(8000))
    for first, temperature in enumerate((0.5, 1.5)):
        wanted = (logits[0, :3] / temperature).softmax(-1)
        counts = drawn[first::2].bincount(minlength=5) / 4000
        assert torch.allclose(counts[:3], wanted, atol=0.03)
        assert counts[3:].sum() == 0


def test_what_does_not_fit_into_float16_is_refused() -> None:
    with pytest.raises(ValueError, match=r"hidden_states\[1\] reach 7e\+04"):
        chosen([torch.zeros(1, 1, 2), torch.full((1, 1, 2), 7e4)], (0, 1))


def test_recorded_states_and_likeliest_tokens_are_those_of_a_plain_pass(target: Any, texts: list[Text]) -> None:
    bare = [replace(text, states=[]) for text in texts]
    for text, row in zip(texts, record(target, bare, LAYERS, 7), strict=True):
        output = passed(target, text.ids)
        assert torch.equal(torch.as_tensor(row["hidden_states"]), chosen(output.hidden_states, LAYERS)[0])
        best, ids = output.logits[0].float().log_softmax(-1).topk(7)
        assert torch.equal(torch.as_tensor(row["top_ids"]).long(), ids)
        assert torch.allclose(torch.as_tensor(row["top_logprobs"]), best, atol=1e-5)
    (kept, *_) = record(target, texts, LAYERS, 0)
    assert torch.equal(torch.as_tensor(kept["hidden_states"]), torch.cat(texts[0].states))
    assert record(target, bare, (), 0) == [{}] * len(bare)


# ------------------------------------------------------------------------------------------------------------- prompts


def test_a_prompt_that_says_almost_the_same_is_the_same() -> None:
    seen = Seen(["Can you tell me how to bake a cake for my son?"])
    assert not seen.add("can you tell me  how to bake a cake for my son")
    assert not seen.add("Can you tell me how to bake a cake for my daughter?")
    assert seen.add("Can you tell me how to build a house for my son?")
    assert seen.add("Why?")
    assert not seen.add("why")


@pytest.mark.parametrize(
    "text", ["", "two words", "a a a a a a b", "# $ % & ( ) a b c", "what is \N{REPLACEMENT CHARACTER} that"]
)
def test_what_is_no_question_is_not_asked(text: str) -> None:
    assert not usable(text)
    assert usable("what is that")


def test_a_question_ends_where_the_template_ends_the_users_turn() -> None:
    turns = Turns(talking.words())
    assert turns.header == [USER]
    assert turns.question([6, 7, END]) == "w1 w2"
    assert turns.question([6, 7]) == turns.question([6, 3, END]) == ""
    written = Turns(
        talking.letters("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }} [/{{ m['role'] }}]{% endfor %}")
    )
    assert written.user_closing == "[/user]"
    assert written.question(written.encode("hi you [/user] more")) == "hi you"
    assert written.question(written.encode("hi you [/us")) == ""


def prompts(path: Path, *rows: Any) -> str:
    path.write_text("\n".join(json.dumps({"messages" if isinstance(row, list) else "prompt": row}) for row in rows))
    return str(path)


def test_given_prompts_are_asked_once_and_long_ones_never(tmp_path: Path) -> None:
    file = prompts(tmp_path / "p.jsonl", "w1 w2", "w3", "W1, w2", " ", "w4 " * 9, "w5")
    given = Given.of(Turns(talking.words()), file, "train", rows=2, longest=8)
    parts = [given.part(number) for number in range(3)]
    assert [[chat[0]["content"] for chat in part or []] for part in parts] == [["w1 w2", "w3"], ["w5"], []]
    assert parts[2] is None
    with pytest.raises(ValueError, match="holds no prompt"):
        Given.of(Turns(talking.words()), file, "train", rows=2, longest=0)


# ---------------------------------------------------------------------------------------------------------- the script


def arguments(target: str, out: Path, **changed: Any) -> Arguments:
    small: dict[str, Any] = {"rows": 24, "max_prompt_tokens": 16, "max_new_tokens": 12, "device": "cpu"}
    return Arguments(target, str(out), **{**small, "hidden_layers": ["0", "-1"], "top_logprobs": 3, **changed})


def rows_of(out: Path) -> list[dict[str, Any]]:
    return list(data.load(out, held_out=None).with_format("numpy"))


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    return len(ours) == len(theirs) and all(
        one.keys() == other.keys() and all(np.array_equal(one[name], other[name]) for name in one)
        for one, other in zip(ours, theirs, strict=True)
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_a_stop_changes_nothing(tmp_path: Path, sampled: bool) -> None:
    """Two parts at once, and two with a stop and a part that was cut off between them."""
    model = talking.saved(tmp_path / "target")
    generate_data.main(arguments(model, tmp_path / "once", tokens=40, do_sample=sampled))
    generate_data.main(arguments(model, tmp_path / "twice", tokens=1, do_sample=sampled))
    assert len(data.parts(tmp_path / "twice")) == 1
    (tmp_path / "twice" / "part-00001.parquet.99").write_bytes(b"half")
    generate_data.main(arguments(model, tmp_path / "twice", tokens=40, do_sample=sampled))
    once, twice = rows_of(tmp_path / "once"), rows_of(tmp_path / "twice")
    assert len(data.parts(tmp_path / "once")) >= 2
    assert same(once, twice)
    asked = [row["prompt"] for row in once]
    assert len(set(map(data.normalised, asked))) == len(asked)
    told = data.read_info(tmp_path / "twice")
    assert told["conversations"] == len(once)
    assert told["answer_tokens"] == sum(int((row["labels"] != -100).sum()) for row in once)


def test_prompts_from_before_a_stop_are_not_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "seed_of", lambda *numbers: 0)  # every part makes up the same
    model = talking.saved(tmp_path / "target")
    generate_data.main(arguments(model, tmp_path / "data", tokens=1))
    with pytest.raises(ValueError, match="none of 4 times 24 prompts that the target made up is usable and new"):
        generate_data.main(arguments(model, tmp_path / "data", tokens=10_000))
    assert len(data.parts(tmp_path / "data")) == 1


def test_rows_are_what_the_target_says_to_their_prompt(tmp_path: Path) -> None:
    name = talking.saved(tmp_path / "target")
    generate_data.main(arguments(name, tmp_path / "data", tokens=1))
    model, turns = talking.speaker(), Turns(talking.words())
    info, rows = data.read_info(tmp_path / "data"), rows_of(tmp_path / "data")
    assert info["hidden_layers"] == [0, -1]
    assert {row["input_ids"][-1] == END for row in rows} == {True, False}
    for row in rows:
        prompt = turns.encode(turns.render([{"role": "user", "content": row["prompt"]}], answering=True))
        ids = row["input_ids"].tolist()
        said = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12)[0].tolist()
        assert ids == said
        assert row["labels"].tolist() == [-100] * len(prompt) + said[len(prompt) :]
        assert row["held_out"] == data.is_held_out(row["prompt"])
        assert row["hidden_states"].shape == (len(ids), 2 * 32)
        assert row["top_ids"][len(prompt) - 1 : -1, 0].tolist() == said[len(prompt) :]


def test_a_chat_is_answered_turn_after_turn_as_long_as_turns_end(tmp_path: Path) -> None:
    chat = [
        {"role": role, "content": text}
        for role, text in [("system", "w0"), ("user", "w{}"), ("assistant", "w9"), ("user", "w2 w3")]
    ]
    chats = [[{**message, "content": message["content"].format(10 + n)} for message in chat] for n in range(30)]
    file = prompts(tmp_path / "p.jsonl", *chats)
    generate_data.main(arguments(talking.saved(tmp_path / "target"), tmp_path / "data", prompts=file, rows=64))
    turns, turned = Turns(talking.words()), 0
    for row, own in zip(rows_of(tmp_path / "data"), chats, strict=True):
        ids = row["input_ids"].tolist()
        said = [turns.tokenizer.decode(run) for run in runs(row["labels"].tolist())]
        assert 1 <= len(said) <= 2
        assert (len(said) == 2) == said[0].endswith("<end>")
        turned += len(said) == 2
        answers = [text.removesuffix("<end>").strip() for text in said]
        if not any(marker in "".join(answers) for marker in talking.SPECIAL):
            told = [*own[:2], {"role": "assistant", "content": answers[0]}]
            told += [own[3], {"role": "assistant", "content": answers[1]}] if len(said) == 2 else []
            expected, labels = turns.label(told)
            assert ids == expected[: len(ids)]
            assert row["labels"].tolist() == labels[: len(ids)]
    assert 3 < turned < 27


def runs(labels: list[int]) -> list[list[int]]:
    """Neighbouring labels, without those between them."""
    found: list[list[int]] = []
    for before, label in zip([-100, *labels], labels, strict=False):
        if label != -100:
            if before == -100:
                found.append([])
            found[-1].append(label)
    return found


def test_a_drafter_makes_the_same_data(tmp_path: Path) -> None:
    model = talking.saved(tmp_path / "target")
    file = prompts(tmp_path / "p.jsonl", *(f"w{n}" for n in range(6)))
    for name, assistant in (("plain", None), ("drafted", "auto")):
        generate_data.main(arguments(model, tmp_path / name, prompts=file, rows=3, assistant=assistant))
    assert same(rows_of(tmp_path / "plain"), rows_of(tmp_path / "drafted"))


def test_a_models_own_generation_config_bends_no_answer(tmp_path: Path) -> None:
    model, file = talking.saved(tmp_path / "target"), tmp_path / "prompts.jsonl"
    bent = GenerationConfig(repetition_penalty=1.5, no_repeat_ngram_size=2, eos_token_id=END)
    bent.save_pretrained(model)
    file.write_text("".join(json.dumps({"prompt": f"w{n} w{n + 1} w{n + 2} w3"}) + "\n" for n in range(6)))
    for name, assistant in (("plain", None), ("drafted", "auto")):
        generate_data.main(arguments(model, tmp_path / name, prompts=str(file), rows=3, assistant=assistant))
    assert same(rows_of(tmp_path / "plain"), rows_of(tmp_path / "drafted"))


def test_prompts_that_changed_before_those_asked_are_refused(tmp_path: Path) -> None:
    model, file = talking.saved(tmp_path / "target"), tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"w{n} w{n + 7} w{2 * n} w{n + 3}"}) + "\n" for n in range(8)]
    file.write_text("".join(lines[2:5]))
    generate_data.main(arguments(model, tmp_path / "data", prompts=str(file), rows=3))
    file.write_text("".join(lines))
    with pytest.raises(ValueError, match="no longer begins with what was asked"):
        generate_data.main(arguments(model, tmp_path / "data", prompts=str(file), rows=3))
    file.write_text("".join([*lines[2:], *lines[:2]]))  # behind them there may be more
    generate_data.main(arguments(model, tmp_path / "data", prompts=str(file), rows=3))
    assert len(rows_of(tmp_path / "data")) == 8


def test_a_model_that_was_trained_further_is_another_one(tmp_path: Path) -> None:
    """Its embeddings are what they were, and so is the fingerprint that heads remember."""
    model = talking.saved(tmp_path / "target")
    generate_data.main(arguments(model, tmp_path / "data", tokens=1))
    further = talking.speaker()
    with torch.no_grad():
        further.model.layers[0].mlp.up_proj.weight.mul_(1.1)
    further.save_pretrained(tmp_path / "further")
    talking.words().save_pretrained(tmp_path / "further")
    with pytest.raises(ValueError, match="another target"):
        generate_data.main(arguments(str(tmp_path / "further"), tmp_path / "data", tokens=1))


def test_the_command_line_takes_layers_by_number_and_by_name() -> None:
    parser = HfArgumentParser(Arguments)
    (own,) = parser.parse_args_into_dataclasses(
        ["--target", "t", "--out", "o", "--tokens", "1", "--hidden_layers", "2", "-1"]
    )
    assert generate_data.layers_of(own.hidden_layers, tiny.llama()) == (2, -1)
    assert generate_data.layers_of(["eagle3"], tiny.llama(num_hidden_layers=8)) == (2, 4, 5, -1)


def test_no_part_is_begun_that_would_end_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = talking.saved(tmp_path / "target")
    generate_data.main(arguments(model, tmp_path / "data", minutes=1e-9))
    assert data.parts(tmp_path / "data") == []
    clock = itertools.count()  # every look at it is a second
    monkeypatch.setattr(generate_data.time, "monotonic", lambda: float(next(clock)))
    generate_data.main(arguments(model, tmp_path / "data", minutes=5 / 60))
    assert len(data.parts(tmp_path / "data")) == 2  # begun after 1 and 3 s; a third would end after 6


def test_what_cannot_be_done_is_refused(tmp_path: Path) -> None:
    model, out = talking.saved(tmp_path / "target"), tmp_path / "data"
    with pytest.raises(ValueError, match=r"--hidden_layers 7: the target has 0 .* to 2"):
        generate_data.main(arguments(model, out, hidden_layers=["7"], tokens=1))
    with pytest.raises(ValueError, match=r"--top_logprobs 1000000 is more than .* has tokens"):
        generate_data.main(arguments(model, out, top_logprobs=1_000_000, tokens=1))
    with pytest.raises(ValueError, match="no chat template"):
        generate_data.main(arguments(talking.saved(tmp_path / "mute", template=None), out, tokens=1))
    with pytest.raises(ValueError, match="none of 4 times 1 prompts"):
        generate_data.main(arguments(model, out, rows=1, max_prompt_tokens=1, tokens=1))
    generate_data.main(arguments(model, out, tokens=1))  # what began with no part binds nobody
    with pytest.raises(ValueError, match="was begun with --max_new_tokens 12, not 13"):
        generate_data.main(arguments(model, out, max_new_tokens=13, tokens=1))
    with pytest.raises(ValueError, match=r"--hidden_layers \[0, -1\], not \[1\]"):
        generate_data.main(arguments(model, out, hidden_layers=["1"], tokens=1))
    with pytest.raises(ValueError, match="another target"):
        generate_data.main(arguments(talking.saved(tmp_path / "other", seed=1), out, tokens=1))


def test_made_up_prompts_without_a_budget_are_refused(model: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pass --minutes or --tokens"):
        generate_data.main(arguments(model, tmp_path / "data"))


@pytest.mark.parametrize(
    "changed", [{"rows": 0}, {"max_new_tokens": 0}, {"tokens": -1}, {"temperature": 0.0}, {"question_temperatures": []}]
)
def test_numbers_that_cannot_be_meant_are_refused(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(ValueError, match=f"--{name}"):
        generate_data.Arguments(**{"target": "t", "out": "o", "tokens": 1, **changed})
