"""The benchmark over categories: what is measured is measured once, and the ratios are those of the times."""

from __future__ import annotations

import itertools
import json
import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from test_cli import tokenizer  # noqa: F401
from transformers import PreTrainedTokenizerFast

import hf_specgen as sg
from hf_specgen.bench import categories, plot, questions
from hf_specgen.bench.categories import Bench, Job, interleaved, work
from hf_specgen.bench.journal import Journal
from hf_specgen.bench.measure import Setting
from hf_specgen.bench.outcomes import OTHERS, Compared, summary, table
from hf_specgen.bench.questions import CODE_EDITS, Question, pick
from hf_specgen.bench.table import console

SLOW_FAST = [Compared(Setting("plain"), batches=True), Compared(Setting("fast", enabled=True), batches=True)]


def asked(category: str = "translation", *names: str) -> list[list[Question]]:
    return [[Question(name, category, f"prompt {name}")] for name in names or ("a", "b")]


def told(decode_s: float, tokens: int = 11, **changed: Any) -> dict[str, Any]:
    """A run of one row; its call takes a second more."""
    run = {"tokens": [list(range(tokens))], "first": 1, "widths": [0] * (tokens - 1), "row_rounds": tokens - 1}
    return {**run, "decode_s": decode_s, "call_s": decode_s + 1.0, **changed}


# -------------------------------------------------------------------------------------------------------- going on


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path):
    jobs, out = list(interleaved(asked(), ["plain", "fast"], repeats=2)), tmp_path / "out.jsonl"
    done: list[Job] = []

    def stopped(job: Job) -> dict[str, Any]:
        if len(done) == 3:
            raise KeyboardInterrupt
        done.append(job)
        return told(1.0)

    assert len(work(jobs, Journal(out), stopped)) == 3
    out.write_text(out.read_text()[:-20])  # killed while it wrote the third
    again: list[Job] = []
    results = work(jobs, Journal(out), lambda job: again.append(job) or told(2.0))
    assert [*done[:2], *again] == jobs
    assert [result["decode_s"] for result in results] == [1.0] * 2 + [2.0] * 6
    assert work(jobs, Journal(out), lambda job: pytest.fail("measured twice")) == results


def test_results_of_other_conditions_are_not_taken(tmp_path):
    journal = Journal(tmp_path / "out.jsonl")
    work(list(interleaved(asked(), ["plain"], 1, "64 tokens")), journal, lambda job: told(1.0))
    others = [
        list(interleaved(asked(), ["plain"], 1, "32 tokens")),
        list(interleaved([batch * 2 for batch in asked()], ["plain"], 1, "64 tokens")),
        list(interleaved(asked("mathematics"), ["plain"], 1, "64 tokens")),
        list(interleaved(asked(), ["fast"], 1, "64 tokens")),
    ]
    for jobs in others:
        assert not any(job.key in journal for job in jobs)


def test_settings_take_turns_on_each_question():
    order = [(job.question, job.repeat, job.setting) for job in interleaved(asked(), ["plain", "fast"], repeats=2)]
    assert order == list(itertools.product("ab", (0, 1), ("plain", "fast")))


# ------------------------------------------------------------------------------------------------------------ ratios


def rows_of(times: dict[tuple[str, str, str], list[dict[str, Any]]], compared: Any = SLOW_FAST) -> dict[Any, Any]:
    """The summary by category and setting."""
    results = [
        {"category": category, "question": question, "setting": setting, "rows": len(run["tokens"]), **run}
        for (category, question, setting), runs in times.items()
        for run in runs
    ]
    rows = summary(results, compared)
    console().print(table(rows, "made up"))
    return {(row["category"], row["setting"]): row for row in rows}


def test_ratios_are_of_medians_and_their_geometric_mean_over_the_questions():
    rows = rows_of(
        {
            ("translation", "a", "plain"): [told(4.0), told(8.0), told(9.0)],
            ("translation", "a", "fast"): [told(2.0), told(1.0), told(50.0)],
            ("translation", "b", "plain"): [told(3.0)],
            ("translation", "b", "fast"): [told(3.0)],
        }
    )
    assert rows["translation", "fast"]["speedups"] == [4.0, 1.0]
    assert rows["translation", "fast"]["speedup"] == 2.0
    assert rows["translation", "fast"]["call_speedup"] == pytest.approx((9 / 3) ** 0.5, abs=1e-3)
    assert rows["translation", "plain"]["speedup"] == 1.0
    assert rows["translation", "plain"]["tokens_per_s"] == pytest.approx((10 / 8 * 10 / 3) ** 0.5, abs=1e-2)


def test_texts_of_unequal_length_are_compared_by_the_token_after_what_came_first():
    rows = rows_of(
        {
            ("RAG", "a", "plain"): [told(10.0, tokens=11)],
            ("RAG", "a", "fast"): [told(1.0, tokens=6, first=4, row_rounds=1, widths=[2])],
        }
    )
    fast = rows["RAG", "fast"]
    assert fast["speedup"] == 2.0
    assert fast["mean_accepted_tokens"] == 2.0
    assert fast["lengths"] == [6, 6]
    assert not fast["identical"]


def test_the_figures_beside_the_ratio_are_over_all_rounds():
    runs = [told(1.0, row_rounds=4, widths=[0, 0, 6, 2]), told(1.0, row_rounds=6, widths=[0, 0, 0, 0, 1, 1])]
    fast = rows_of({("RAG", "a", "plain"): [told(1.0)], ("RAG", "a", "fast"): runs})["RAG", "fast"]
    assert fast["mean_accepted_tokens"] == 2.0
    assert fast["without_draft"] == 0.6
    assert fast["mean_width"] == 2.5
    assert fast["widths"] == {"0": 6, "1": 2, "2": 1, "6": 1}
    assert fast["identical"]


def test_what_does_not_copy_is_summed_up_and_one_token_has_no_ratio():
    times = {
        ("translation", "a", "plain"): [told(4.0)],
        ("translation", "a", "fast"): [told(1.0)],
        ("mathematics", "b", "plain"): [told(1.0)],
        ("mathematics", "b", "fast"): [told(1.0)],
        ("mathematics", "c", "plain"): [told(0.0, tokens=1)],
        ("mathematics", "c", "fast"): [told(0.0, tokens=1)],
        ("RAG", "d", "plain"): [told(9.0)],
        ("RAG", "d", "fast"): [told(1.0)],
    }
    rows = rows_of(times)
    assert rows[OTHERS, "fast"]["speedups"] == [4.0, 1.0]
    assert rows[OTHERS, "fast"]["questions"] == 3
    assert list(rows)[-1] == (OTHERS, "fast")


def test_a_text_is_held_against_its_own_reference():
    compared = [
        Compared(Setting("stock")),
        Compared(Setting("warm"), "warm", "warm"),
        Compared(Setting("reference"), "warm", "reference"),
        Compared(Setting("drafted"), "warm", "reference"),
    ]
    other = [[99] * 11]
    times = {
        ("RAG", "a", "warm"): [told(2.0)],
        ("RAG", "a", "reference"): [told(2.0, tokens=11) | {"tokens": other}],
        ("RAG", "a", "drafted"): [told(1.0) | {"tokens": other}],
        ("RAG", "a", "stock"): [told(1.0)],  # whose measure was not run
    }
    rows = rows_of(times, compared)
    assert set(rows) == {("RAG", name) for name in ("warm", "reference", "drafted")}
    assert all(row["identical"] for row in rows.values())
    assert rows["RAG", "drafted"]["speedup"] == 2.0


# --------------------------------------------------------------------------------------------------------- questions


def some_questions(path: Path, numbers: range) -> Path:
    """Spec-Bench's file, cut down to lines that look like its own."""
    kinds = ["writing", "math", "translation", "summarization", "qa", "math_reasoning", "rag"]
    lines = [
        json.dumps({"question_id": f"{kind}{number}", "category": kind, "turns": [f"ask {kind} {number}", "and then?"]})
        for kind in kinds
        for number in numbers
    ]
    (path / questions.FILE).write_text("\n".join(lines))
    return path


def test_questions_come_in_six_categories_and_code_edits(tmp_path):
    for path in some_questions(tmp_path, range(4)), tmp_path / questions.FILE:
        pools = questions.load(path)
        assert set(pools) == set(questions.CATEGORIES.values()) | {CODE_EDITS}
        assert len(pools["conversation"]) == 8
        assert pools["RAG"][1] == Question("rag1", "RAG", "ask rag 1")
        assert len(pools[CODE_EDITS]) == 2


def test_half_of_the_file_gives_the_same_questions(tmp_path):
    (tmp_path / "half").mkdir()
    whole, half = some_questions(tmp_path, range(40)), some_questions(tmp_path / "half", range(0, 40, 2))
    for category, pool in questions.load(whole).items():
        assert pick(pool, 2) == pick(questions.load(half)[category], 2)


def test_batches_are_of_one_category_and_a_small_pool_is_gone_through_again():
    pool = [question for (question,) in asked("RAG", *"abcd")]
    assert [[question.name for question in batch] for batch in pick(pool, 2, rows=3)] == [list("abc"), list("cda")]
    assert [len(batch) for batch in pick(pool[:2], 1, rows=5)] == [5]


def test_without_a_file_it_is_fetched_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path / "cache"))
    home = some_questions(tmp_path, range(2)) / questions.FILE
    monkeypatch.setattr(questions, "HOME", home.as_uri())
    pools = questions.load()
    home.unlink()
    assert questions.load() == pools


def test_without_a_network_it_says_what_to_do(tmp_path, monkeypatch):
    def unreachable(*_: Any, **__: Any) -> None:
        raise urllib.error.URLError("no route")

    monkeypatch.setenv("HF_SPECGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(urllib.request, "urlopen", unreachable)
    with pytest.raises(RuntimeError, match=r"no route.*--questions"):
        questions.load()
    with pytest.raises(FileNotFoundError, match="does not exist"):
        questions.load(tmp_path / "nowhere.jsonl")
    (tmp_path / questions.FILE).write_text('{"question_id": 1, "category": "cooking", "turns": ["?"]}')
    with pytest.raises(ValueError, match="line 1"):
        questions.load(tmp_path)


# ------------------------------------------------------------------------------------------- the whole, on a tiny model

TEMPLATE = "{% for message in messages %}{{ message.content }}:{% endfor %}"


@pytest.fixture
def small(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:  # noqa: F811
    """In SmolLM2's place. What stock's early exit logs of its own deprecated ways is no fault of ours."""
    tokenizer.chat_template, tokenizer.pad_token = TEMPLATE, "Ġ"
    model = tiny.llama(vocab_size=len(tokenizer), max_position_embeddings=2048)
    monkeypatch.setattr(categories.smollm2, "load", lambda: (model, tokenizer))
    monkeypatch.setattr(categories, "EXIT", 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    yield model
    logger.setLevel(level)


def test_the_command_measures_every_setting_and_tells_it_in_one_line(tmp_path, small, capsys):
    folder, out = some_questions(tmp_path, range(2)), tmp_path / "out.jsonl"
    asked = ["--questions", str(folder), "--out", str(out), "--categories", "RAG", "translation", "--per-category", "1"]
    lines = []
    for _ in range(2):
        categories.main([*asked, "--new-tokens", "16", "--repeats", "1"])
        lines.append(json.loads(capsys.readouterr().out.splitlines()[-1]))
    rows = lines[0]["categories"]
    assert lines[0] == lines[1], "the second time nothing is measured"
    assert [row["setting"] for row in rows] == [one.name for one in categories.settings()] * 3
    assert [row["category"] for row in rows[::8]] == ["RAG", "translation", OTHERS]
    assert all(row["identical"] for row in rows)
    assert {row["mean_accepted_tokens"] for row in rows if "ain" in row["setting"].lower()} == {1.0}
    assert not isinstance(small, sg.SpecGenMixin)


def test_batches_are_compared_with_plain_decoding_of_the_same_batch(tmp_path, small, capsys):
    folder, out = some_questions(tmp_path, range(3)), tmp_path / "out.jsonl"
    asked = ["--questions", str(folder), "--out", str(out), "--categories", "translation", "--batch", "1", "3"]
    names = ["plain", "stock lookup 4", "auto"]
    categories.main([*asked, "--per-category", "1", "--new-tokens", "12", "--repeats", "1", "--settings", *names])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["categories"]
    found = [(row["rows"], row["setting"]) for row in rows if row["category"] == "translation"]
    assert found == [(1, "plain"), (1, "stock lookup 4"), (1, "auto"), (3, "plain"), (3, "auto")]
    assert all(row["identical"] for row in rows)


def test_linear_is_passed_on_only_if_it_is_asked_for(tmp_path, small, monkeypatch):
    seen: list[dict[str, Any]] = []
    enable = sg.enable
    monkeypatch.setattr(sg, "enable", lambda model, **kwargs: seen.append(kwargs) or enable(model))
    asked = ["--questions", str(some_questions(tmp_path, range(1))), "--categories", "RAG", "--settings", "auto"]
    asked += ["--per-category", "1", "--new-tokens", "4", "--repeats", "1"]
    categories.main([*asked, "--out", str(tmp_path / "one.jsonl")])
    categories.main([*asked, "--out", str(tmp_path / "two.jsonl"), "--linear", "packed"])
    assert seen == [{}, {"linear": "packed"}]


def test_a_setting_is_warmed_up_once_in_a_process(small, monkeypatch):
    _, tokenizer = categories.smollm2.load()  # noqa: F811
    calls: list[int] = []
    timed = categories.timed
    monkeypatch.setattr(
        categories, "timed", lambda *args: calls.append(args[2].arguments["max_new_tokens"]) or timed(*args)
    )
    bench = Bench(small, tokenizer, [Compared(Setting("plain", {"do_sample": False}))], new_tokens=12)
    for repeat in range(2):
        bench(Job("RAG", "a", ("text",), "plain", repeat))
    assert calls == [8, 12, 12]


# ---------------------------------------------------------------------------------------------------------- the picture


def test_a_given_text_is_replayed_whatever_the_model_says(small):
    _, tokenizer = categories.smollm2.load()  # noqa: F811
    ids, turns = plot.tokens_of(tokenizer, ["some prose ", "the words of the prompt", " again"])
    assert turns == (11, 34)
    inputs = tokenizer("the words of the prompt and more", return_tensors="pt")
    with plot.Progress(disable=True) as progress:
        plain, ours = (
            plot.replay(sg.enable(small), inputs, ids, assistant, progress)
            for assistant in (sg.Plain(), sg.PromptLookup(2, num_assistant_tokens=8))
        )
    assert [one.end for one in plain] == list(range(1, len(ids) + 1))
    assert ours[-1].end == len(ids)
    assert len(ours) < len(plain)
    quoted = [one for one in ours if turns[0] < one.end <= turns[1]]
    assert max(one.accepted for one in quoted) > 3
    assert plot.time_of(plain, 1) == 0.0
    sg.disable(small)
