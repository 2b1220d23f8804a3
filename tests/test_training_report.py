"""Reports, provenance and cards of trained drafters: figures against a count by hand, and no place on this machine."""

from __future__ import annotations

import json
import os
import re
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import card
import heads
import pyarrow
import pyarrow.parquet
import pytest
import report
import tiny
import torch
from measures import computed, measuring
from measures.positions import Counts, Noting, count, interval, pooled, quartiles
from running import provenance
from test_cli import tokenizer  # noqa: F401
from transformers import TrainingArguments

import hf_specgen as sg
from hf_specgen.bench import questions
from hf_specgen.draft import Draft
from hf_specgen.theory import Machine, Model, Roofline

# ----------------------------------------------------------------------------------------------------------- positions


@dataclass(frozen=True)
class Watching:
    """Keeps all drafts of another drafter."""

    drafter: Any
    drafts: list[Draft]

    @property
    def num_assistant_tokens(self) -> int | None:
        return self.drafter.num_assistant_tokens  # type: ignore[no-any-return]

    def start(self, target: Any, request: Any) -> Any:
        session = self.drafter.start(target, request)
        propose = session.propose

        def watched(context: Any, limit: Any) -> Draft:
            self.drafts.append(propose(context, limit))
            return self.drafts[-1]

        session.propose = watched
        return session


def paths_of(draft: Draft) -> set[tuple[int, ...]]:
    """The tokens from the root to every node."""
    paths: list[tuple[int, ...] | None] = [()]
    for token, parent in zip(draft.tokens[0].tolist(), draft.parents[0].tolist(), strict=True):
        above = paths[parent] if parent >= 0 else None
        paths.append(None if above is None else (*above, token))
    return {path for path in paths if path}


def by_hand(model: Any, prompt: Sequence[int], drafter: Any, new_tokens: int) -> tuple[list[int], list[int]]:
    """Offered and accepted by depth, from the drafts and a text decoded without any: whole paths are compared."""
    inputs = {"input_ids": torch.tensor([prompt]), "do_sample": False, "max_new_tokens": new_tokens}
    text = model.generate(**inputs, assistant=sg.Plain())[0].tolist()
    drafts: list[Draft] = []
    steps = list(sg.stream(model, **inputs, assistant=Watching(drafter, drafts)))
    offered, accepted, place = [0] * new_tokens, [0] * new_tokens, len(prompt) + 1
    for draft, step in zip(drafts, steps[1:], strict=False):
        paths, ahead = paths_of(draft), tuple(text[place : place + len(step.tokens[0])])
        for depth in range(len(ahead)):
            above = [path for path in paths if len(path) == depth + 1 and path[:depth] == ahead[:depth]]
            offered[depth] += bool(above)
            accepted[depth] += any(path[depth] == ahead[depth] for path in above)
        place += len(ahead)
    deep = sum(number > 0 for number in offered)
    return offered[:deep], accepted[:deep]


@pytest.mark.parametrize("ends", [False, True], ids=["by length", "by EOS"])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_what_is_accepted_at_each_depth_is_what_a_slow_count_of_whole_paths_finds(model, shape, ends):
    sg.enable(model)
    prompt = tiny.ONE
    (truth,) = tiny.truth_of(model, prompt, "greedy", 60)
    if ends:
        new = truth[len(prompt.rows[0]) :]
        model.generation_config.eos_token_id = max(set(new[:45]), key=new.index)
    drafter = tiny.Scripted([truth], shape)
    text, counts = count(model, prompt.inputs(), drafter, 48)
    assert (counts.offered, counts.accepted) == by_hand(model, prompt.rows[0], drafter, 48)
    assert text == list(truth[len(prompt.rows[0]) :][: len(text)])
    assert len(text) < 48 if ends else len(text) == 48
    assert 0 < counts.accepted[0] < counts.offered[0]
    assert len(counts.accepted) > 3

    stats = sg.Stats()
    model.generate(**prompt.inputs(), assistant=drafter, do_sample=False, max_new_tokens=48, stats=stats)
    assert (counts.rounds, counts.nodes, sum(counts.accepted)) == (stats.rounds, stats.drafted, stats.accepted)
    assert counts.mean_accepted_tokens == stats.mean_accepted_tokens
    assert counts.acceptance[0] == counts.accepted[0] / counts.offered[0]
    assert counts.overall[1] == counts.accepted[1] / counts.rounds


def test_a_drafter_that_says_nothing_counts_as_plain_decoding(model):
    sg.enable(model)
    _, counts = count(model, tiny.ONE.inputs(), sg.Plain(), 12)
    assert (counts.mean_accepted_tokens, counts.acceptance, counts.overall, counts.rounds) == (1.0, [], [], 11)
    _, single = count(model, tiny.ONE.inputs(), sg.Plain(), 1)
    assert (single.mean_accepted_tokens, single.overall) == (1.0, [])
    assert interval([single, single]) == [1.0, 1.0]


def test_a_round_without_room_for_a_draft_is_not_counted_with_the_draft_before(model):
    sg.enable(model)
    (truth,) = tiny.truth_of(model, tiny.ONE, "greedy", 40)
    noting = Noting(tiny.Scripted([truth], spoiled=0.0))
    steps = sg.stream(model, **tiny.ONE.inputs(), assistant=noting, do_sample=False, max_new_tokens=11)
    kept = [(noting.take(), step.width) for step in steps]
    assert [draft is None for draft, _ in kept] == [width == 0 for _, width in kept]
    assert kept[-1] == (None, 0)


def some(*means: float) -> list[Counts]:
    """Prompts of 10 rounds each."""
    return [Counts(rounds=10, tokens=round(10 * mean)) for mean in means]


def test_the_interval_holds_the_mean_and_is_as_wide_as_the_prompts_differ():
    wide, narrow = some(*[1.0, 3.0] * 8), some(*[1.9, 2.1] * 8)
    for prompts in wide, narrow:
        low, high = interval(prompts)
        assert low < pooled(prompts) < high
    # Of 16 prompts of standard deviation 1 the mean has one of 1/4.
    low, high = interval(wide)
    assert high - low == pytest.approx(2 * 1.96 / 4, rel=0.1)
    assert interval(narrow)[1] - interval(narrow)[0] < (high - low) / 5
    assert interval(some(2.0)) == [2.0, 2.0]


def test_a_gain_is_judged_prompt_by_prompt():
    before = some(*[1.0, 3.0] * 8)
    after = [replace(one, tokens=one.tokens + 2) for one in before]
    assert interval(before, after) == pytest.approx([0.2, 0.2])
    assert interval(before, before) == [0.0, 0.0]


def test_quartiles_are_those_of_the_prompts_own_means():
    assert quartiles(some(1.0, 2.0, 3.0, 4.0, 5.0)) == [2.0, 3.0, 4.0]
    assert quartiles(some(1.5)) == [1.5, 1.5, 1.5]


# ------------------------------------------------------------------------------------------------------------ drafters


@pytest.mark.parametrize("nodes", [1, 5, 15])
@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3", "sibling", "sibling tree"])
def test_no_round_checks_more_nodes_than_were_asked_for(kind, nodes):
    model = heads.speaker()
    texts = heads.babble(2, 30, seed=3).tolist()
    drafter: Any
    if kind == "medusa":
        drafter = sg.Medusa(heads.medusa_of(model, texts))
    elif kind.startswith("eagle"):
        drafter = sg.Eagle(heads.eagle_of(model, texts, kind, steps=2))
    else:
        drafter = sg.DraftModel(model)
    fixed = measuring.limited(drafter, nodes, branches=min(3, nodes) if kind == "sibling tree" else 1)
    ids = {"input_ids": torch.tensor([texts[0][:8]])}
    widths = [step.width for step in sg.stream(model, **ids, assistant=fixed, do_sample=False, max_new_tokens=40)]
    assert max(widths) <= nodes
    assert max(widths) > nodes - 3  # three a level do not always come out even


def test_fresh_heads_have_the_shape_of_the_trained_ones_and_a_sibling_has_none():
    model = heads.speaker()
    trained = sg.MedusaHeads.fresh(model, num_heads=3, num_layers=2, lm_heads="shared")
    fresh = measuring.untrained(sg.Medusa(trained), model)
    assert {name: p.shape for name, p in fresh.heads.named_parameters()} == {
        name: p.shape for name, p in trained.named_parameters()
    }
    eagle = sg.EagleHead.fresh(model, "eagle3", feature_layers=[0, 1, -1], token_map=[1, 3, 5, 7])
    again = measuring.untrained(sg.Eagle(eagle), model)
    assert again.head.to_target.tolist() == [1, 3, 5, 7]
    assert again.head.config.feature_layers == [0, 1, -1]
    with pytest.raises(ValueError, match="sibling"):
        measuring.untrained(sg.DraftModel(model), model)
    with pytest.raises(ValueError, match="PromptLookup"):
        measuring.limited(sg.PromptLookup(), 15)


# ------------------------------------------------------------------------------------------------------------- prompts

TEXTS = heads.babble(6, 40, seed=900).tolist()
PROMPT = 8


def write_data(folder: Path, rows: Sequence[dict[str, Any]]) -> None:
    folder.mkdir()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), folder / "part-00000.parquet")
    told = {"target": {"name": str(folder.parent / "target")}, "hidden_layers": [], "rows": len(rows)}
    (folder / "data.json").write_text(json.dumps(told))


def rows_of(texts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """The first row is there to be trained on; of the others every second one is reported on."""
    labels = [[-100] * PROMPT + text[PROMPT:] for text in texts]
    pairs = enumerate(zip(texts, labels, strict=True))
    return [{"input_ids": ids, "labels": said, "held_out": place > 0} for place, (ids, said) in pairs]


def test_prompts_are_the_held_out_rows_up_to_their_first_label(tmp_path):
    rows = rows_of(TEXTS)
    rows[3]["labels"] = [-100] * len(TEXTS[3])  # no answer
    rows.append({"input_ids": TEXTS[0], "labels": TEXTS[0], "held_out": True})  # no prompt
    rows.append(rows[1])  # twice
    write_data(tmp_path / "data", rows)
    prompts = measuring.held_out(str(tmp_path / "data"), 10)
    assert [list(prompt.ids) for prompt in prompts] == [TEXTS[1][:PROMPT], TEXTS[5][:PROMPT]]
    assert len(measuring.held_out(str(tmp_path / "data"), 1)) == 1
    write_data(tmp_path / "none", [{**row, "labels": [-100] * 40} for row in rows_of(TEXTS)])
    with pytest.raises(ValueError, match="no held-out row"):
        measuring.held_out(str(tmp_path / "none"), 10)


def test_questions_come_by_category(tmp_path, tokenizer):  # noqa: F811
    entries = [
        {"question_id": place, "category": kind, "turns": [f"{kind} {place}"]}
        for kind in ("qa", "rag")
        for place in range(4)
    ]
    file = tmp_path / questions.FILE
    file.write_text("\n".join(map(json.dumps, entries)))
    prompts = measuring.asked(file, tokenizer, 2, ["RAG"])
    assert [(prompt.group, tokenizer.decode(list(prompt.ids))) for prompt in prompts] == [
        ("RAG", "rag 0"),
        ("RAG", "rag 2"),
    ]
    groups = {prompt.group for prompt in measuring.asked(file, tokenizer, 1)}
    assert groups == {"question answering", "RAG", questions.CODE_EDITS}
    with pytest.raises(ValueError, match="no category 'cooking'"):
        measuring.asked(file, tokenizer, 2, ["cooking"])


# ---------------------------------------------------------------------------------------------------------- provenance


@dataclass
class Script:
    """Arguments as a training script has them."""

    target: str
    data: str
    other: str | None = None


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its heads with their provenance, and data."""
    place = tmp_path_factory.mktemp("a place")
    model = heads.speaker()
    sg.disable(model)
    model.save_pretrained(place / "target")
    sg.enable(model)
    heads.medusa_of(model, heads.babble(4, 40, seed=1).tolist(), num_heads=3, steps=20).save_pretrained(place / "heads")
    write_data(place / "data", rows_of(TEXTS))
    script = Script(str(place / "target"), str(place / "data"), other=f"'{place / 'x'}', /a/b and https://hub/c/d")
    training = TrainingArguments(output_dir=str(place / "heads"), learning_rate=0.125, use_cpu=True)
    provenance.write(place / "heads", model, script, training, {"steps": 20, "loss": 1.5})
    return place


def strings(told: Any) -> Iterator[str]:
    """All of them."""
    if isinstance(told, dict | list):
        for value in told.values() if isinstance(told, dict) else told:
            yield from strings(value)
    elif isinstance(told, str):
        yield told


def refuse_places(text: str, *places: Path) -> None:
    for place in (*places, Path.cwd(), Path.home(), Path(sys.executable).parent, Path(provenance.__file__).parent):
        assert str(place) not in text
    assert not re.search(r"(^|[\s'\"(=])/\w", text), text
    assert os.uname().nodename not in text


def test_provenance_says_what_was_done_and_names_no_place_on_the_machine(home):
    told = provenance.read(home / "heads")
    assert told is not None
    refuse_places((home / "heads" / provenance.FILE).read_text(), home)
    assert told["data"]["name"] == "data"
    assert told["data"]["info"] == {"target": {"name": "target"}, "hidden_layers": [], "rows": len(TEXTS)}
    assert told["data"]["fingerprint"] == provenance.digest([home / "data" / "part-00000.parquet"])
    assert told["settings"]["learning_rate"] == 0.125
    assert told["settings"]["other"] == "'x', b and https://hub/c/d"
    assert told["result"] == {"steps": 20, "loss": 1.5}
    assert told["target"]["fingerprint"]
    assert told["target"]["vocab_size"] == 20
    assert {"python", "torch", "transformers", "hf_specgen", "peft", "accelerate"} <= set(told["versions"])
    assert told["weights"] == {"model.safetensors": provenance.digest([home / "heads" / "model.safetensors"])}
    assert re.fullmatch(r"[0-9a-f]{40}( with changes)?", told["commit"] or "0" * 40)


def test_the_fingerprint_of_data_changes_with_any_part(tmp_path):
    write_data(tmp_path / "data", rows_of(TEXTS))
    first = provenance.data_of(str(tmp_path / "data"))["fingerprint"]
    assert provenance.data_of(str(tmp_path / "data"))["fingerprint"] == first
    (tmp_path / "data" / "part-00001.parquet").write_bytes(b"more")
    assert provenance.data_of(str(tmp_path / "data"))["fingerprint"] != first
    assert provenance.data_of("org/on-the-hub") == {"name": "org/on-the-hub", "info": None, "fingerprint": None}


@pytest.mark.parametrize(
    ("text", "clean"),
    [
        ("/nowhere/at/all/heads", "heads"),
        ("--out=/nowhere/heads --data /nowhere/data", "--out=heads --data data"),
        ('{"a": "/nowhere/b", c:/nowhere/d}', '{"a": "b", c:d}'),
        ("org/name, ../data/x, ./y, https://hub.co/org/name, 3/4, and/or", None),
    ],
)
def test_absolute_paths_in_any_text_are_cut_and_nothing_else(text, clean):
    assert provenance.without_paths(text) == (text if clean is None else clean)


def test_paths_inside_the_working_folder_become_relative(tmp_path, monkeypatch):
    (tmp_path / "my data").mkdir()
    monkeypatch.chdir(tmp_path)
    assert provenance.without_paths(str(tmp_path / "build" / "heads")) == "build/heads"
    said = provenance.command([str(tmp_path / "train.py"), "--data", str(tmp_path / "my data"), "--lr=0.1"])
    assert said == "python train.py --data 'my data' --lr=0.1"


def test_outside_of_a_repository_there_is_no_commit(tmp_path):
    assert provenance.commit(tmp_path) is None


def test_a_license_is_what_the_targets_own_card_says(tmp_path):
    assert provenance.license_of(str(tmp_path)) is None
    (tmp_path / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    assert provenance.license_of(str(tmp_path)) == "apache-2.0"
    (tmp_path / "README.md").write_text("# A model\n")
    assert provenance.license_of(str(tmp_path)) is None
    assert provenance.license_of("org/not-here") is None


# --------------------------------------------------------------------------------------------------------- the report


def line_of(home: Path, out: Path, *more: str) -> list[str]:
    asked = {"target": home / "target", "drafter": home / "heads", "data": home / "data", "out": out}
    words = [word for name, value in asked.items() for word in (f"--{name}", str(value))]
    return [*words, "--before", "fresh", "--new_tokens", "24", *more]


@pytest.fixture(scope="module")
def made(home: Path) -> dict[str, Any]:
    """The report of the heads, made beside them."""
    report.main(line_of(home, home / "heads"))
    told: dict[str, Any] = json.loads((home / "heads" / card.REPORT).read_text())
    return told


def test_the_report_tells_what_training_has_gained(home, made):
    before, after = made["results"]
    assert (before["drafter"], after["drafter"]) == ("before", "after")
    assert before["prompts"] == after["prompts"] == after["identical"] == 3
    assert after["mean_accepted_tokens"] > before["mean_accepted_tokens"] + 0.3
    (gain,) = made["gains"]
    assert gain["gain"] == pytest.approx(after["mean_accepted_tokens"] - before["mean_accepted_tokens"])
    assert gain["interval"][0] <= gain["gain"] <= gain["interval"][1]
    assert after["interval"][0] <= after["mean_accepted_tokens"] <= after["interval"][1]

    counts = Counts()
    model = heads.speaker()
    drafter = measuring.limited(sg.load_assistant(home / "heads", model), 15)
    for text in TEXTS[1::2]:
        counts += count(model, {"input_ids": torch.tensor([text[:PROMPT]])}, drafter, 24)[1]
    assert (after["offered"], after["accepted"], after["tokens"]) == (counts.offered, counts.accepted, counts.tokens)
    assert after["nodes_a_round"] <= 15
    assert statistics.fmean(after["by_prompt"]) == pytest.approx(after["mean_accepted_tokens"], abs=0.3)


def test_report_and_card_name_no_place_on_the_machine_and_agree(home, made):
    folder = home / "heads"
    assert (folder / card.PICTURE).stat().st_size > 10_000
    for name in card.REPORT, "report.txt", "README.md":
        refuse_places((folder / name).read_text(), home)
    shown = (folder / "README.md").read_text()
    text = (folder / "report.txt").read_text()
    for row in made["results"]:
        low, high = row["interval"]
        assert f"{row['mean_accepted_tokens']:.2f} [{low:.2f}, {high:.2f}]" in shown
        assert f"{row['mean_accepted_tokens']:.2f}" in text
        assert " ".join(f"{share:.2f}" for share in row["acceptance"]) in shown
    for row in made["computed"]:
        assert f"| {row['machine']} | {row['speedup']:.2f} |" in shown
    assert "Computed, not measured" in shown
    assert "computed, not measured" in text
    assert "3 Medusa heads for target" in shown
    assert "| learning_rate | 0.125 |" in shown
    assert "base_model: target" in shown
    assert "license" not in shown.split("---")[1]
    assert 'assistant="heads"' in shown
    assert "hf-specgen export heads --to vllm" in shown


def test_a_card_is_told_what_the_target_is_called_and_remembers_it(home, made):
    card.main([str(home / "heads"), "--base_model", "org/speaker", "--license", "apache-2.0"])
    card.write(home / "heads")
    front = (home / "heads" / "README.md").read_text().split("---")[1]
    assert "base_model: org/speaker" in front
    assert "license: apache-2.0" in front
    provenance.keep(home / "heads", {**(provenance.read(home / "heads") or {})})


def test_a_card_without_a_report_says_so_and_one_without_provenance_is_refused(home, tmp_path):
    with pytest.raises(ValueError, match=r"no provenance\.json"):
        card.write(tmp_path)
    with pytest.raises(SystemExit, match=r"no provenance\.json"):
        card.main([str(tmp_path)])
    provenance.keep(tmp_path, provenance.read(home / "heads") or {})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3}))
    shown = card.write(tmp_path).read_text()
    assert "Not yet" in shown
    assert "A sibling of 3 layers" in shown


def test_a_stopped_report_goes_on_and_what_was_trained_anew_is_measured_anew(home, made, tmp_path, monkeypatch):
    done: list[str] = []
    counting = measuring.Counting.__call__
    monkeypatch.setattr(
        measuring.Counting, "__call__", lambda self, job: done.append(job.setting) or counting(self, job)
    )

    def stopped(self: Any, job: Any) -> Any:
        if len(done) == 4:
            raise KeyboardInterrupt
        done.append(job.setting)
        return counting(self, job)

    monkeypatch.setattr(measuring.Counting, "__call__", stopped)
    report.main(line_of(home, tmp_path))
    part = json.loads((tmp_path / card.REPORT).read_text())
    assert part["results"][-1]["prompts"] == 1
    monkeypatch.setattr(
        measuring.Counting, "__call__", lambda self, job: done.append(job.setting) or counting(self, job)
    )
    report.main(line_of(home, tmp_path))
    assert done == ["plain", "before", "after"] * 3
    whole = json.loads((tmp_path / card.REPORT).read_text())
    assert whole["results"] == made["results"]
    assert not (tmp_path / "README.md").exists(), "no card for a folder that is no drafter's"

    other = heads.medusa_of(heads.speaker(), heads.babble(4, 40, seed=2).tolist(), num_heads=2, steps=2)
    other.save_pretrained(tmp_path / "other")
    done.clear()
    report.main([*line_of(home, tmp_path), "--drafter", str(tmp_path / "other")])
    assert done == ["before", "after"] * 3


def test_a_sibling_is_measured_too_with_nothing_before_it(home, tmp_path):
    asked = line_of(home, tmp_path, "--drafter", str(home / "target"))
    asked[asked.index("--before") : asked.index("--before") + 2] = []
    report.main([*asked, "--nodes", "4"])
    told = json.loads((tmp_path / card.REPORT).read_text())
    (row,) = told["results"]
    # It is the target itself.
    assert row["acceptance"] == [1.0] * 4
    assert row["identical"] == 3
    assert told["gains"][0]["over"] == "plain"
    with pytest.raises(SystemExit, match="sibling"):
        report.main([*asked, "--before", "fresh"])


def test_what_cannot_be_measured_is_refused(home, tmp_path, monkeypatch):
    asked = ["--target", str(home / "target"), "--drafter", str(home / "heads"), "--out", str(tmp_path)]
    with pytest.raises(SystemExit, match=r"--data, --questions or both"):
        report.main(asked)
    with pytest.raises(SystemExit):
        report.main([*asked, "--drafter", str(tmp_path / "nothing"), "--data", str(home / "data")])

    def other(self: Any, job: Any) -> Any:
        counts = {"rounds": 1, "tokens": 1, "nodes": 0, "offered": [], "accepted": []}
        return {"text": [1] if job.setting == "after" else [2], "counts": counts}

    monkeypatch.setattr(measuring.Counting, "__call__", other)
    with pytest.raises(SystemExit, match="3 texts are not those of plain decoding"):
        report.main(line_of(home, tmp_path))
    assert json.loads((tmp_path / card.REPORT).read_text())["results"][1]["identical"] == 0


def test_speed_is_timed_in_turns_and_told_beside_the_lengths(home, tmp_path):
    more = ["--speed", "--speed_prompts", "1", "--repeats", "1", "--new_tokens", "10", "--prompts", "2"]
    report.main(line_of(home, tmp_path, *more))
    told = json.loads((tmp_path / card.REPORT).read_text())
    rows = {row["setting"]: row for row in told["speed"]["rows"] if row["category"] == measuring.HELD_OUT}
    assert list(rows) == [
        *("plain", "drafter, fixed", "drafter", "PromptLookup()", '"auto"'),
        *("Merge(lookup, drafter)", "FirstOf(lookup, drafter)"),
    ]
    assert rows["plain"]["speedup"] == 1.0
    assert all(row["identical"] and row["speedup"] > 0 for row in rows.values())
    provenance.keep(tmp_path, provenance.read(home / "heads") or {})
    assert f"| FirstOf(lookup, drafter) | {rows['FirstOf(lookup, drafter)']['speedup']:.2f} |" in (
        card.write(tmp_path).read_text()
    )
    assert "FirstOf(lookup, drafter)" in (tmp_path / "report.txt").read_text()


@pytest.mark.slow
def test_a_fresh_process_makes_the_same_report(home, made, tmp_path):
    flags = {"before": "fresh", "data": home / "data", "new_tokens": 24, "threads": 1}
    told = report.in_fresh_process(str(home / "target"), home / "heads", tmp_path, **flags)
    assert told["results"] == made["results"]


STAND_IN = """
import json, os, pathlib, sys
assert "--fail" not in sys.argv, "there is nothing"
told = {"line": sys.argv[1:], "rank": os.environ.get("RANK"), "home": "HOME" in os.environ}
pathlib.Path(sys.argv[6], "report.json").write_text(json.dumps(told))
"""


def test_the_fresh_process_gets_the_flags_but_not_the_launchers_words_and_says_why_it_fails(tmp_path, monkeypatch):
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    monkeypatch.setattr(report, "__file__", str(tmp_path / "stand_in.py"))
    monkeypatch.setenv("RANK", "1")
    flags = {"before": None, "speed": True, "categories": ["RAG", "translation"], "nodes": 7}
    told = report.in_fresh_process("target", "heads", tmp_path, **flags)
    line = ["--target", "target", "--drafter", "heads", "--out", str(tmp_path)]
    assert told["line"] == [*line, "--speed", "--categories", "RAG", "translation", "--nodes", "7"]
    assert (told["rank"], told["home"]) == (None, True)
    with pytest.raises(RuntimeError, match="there is nothing"):
        report.in_fresh_process("target", "heads", tmp_path, fail=True)


# ------------------------------------------------------------------------------------------------------------ computed


def test_speed_at_a_gpus_costs_is_tokens_a_round_over_the_passes_that_a_round_takes(monkeypatch):
    model = heads.speaker()
    size, layers, key_values = 48, 2, 48
    weights = sum(parameter.numel() for parameter in model.parameters()) - 20 * size
    machine = Machine(flops=1e9, bandwidth=1e9)
    monkeypatch.setattr(computed, "MACHINES", {"made up": machine})
    shape = Model(weights, 2, cache_bytes=2 * layers * key_values * 2, attention_flops=4 * layers * 48)
    plain = Roofline(shape, machine, context=10)

    medusa = sg.Medusa(sg.MedusaHeads.fresh(model, num_heads=3, lm_heads="target"))
    (row,) = computed.speed_ups(model, medusa, [0.5, 0.25], nodes=15.2, context=10)
    read = 3 * (size * size + size) + 20 * size
    drafting = max(2 * read / 1e9, 2 * read / 1e9) / plain.pass_s(1)
    assert row["draft"] == pytest.approx(drafting)
    assert row["verify"] == pytest.approx(plain.verify(15))
    assert row["speedup"] == pytest.approx(1.75 / (drafting + plain.verify(15)))

    (itself,) = computed.speed_ups(model, sg.DraftModel(model), [1.0, 1.0], nodes=2, context=10)
    assert itself["draft"] == pytest.approx(2 * Roofline(Model(weights, 2), machine).pass_s(1) / plain.pass_s(1))
    (nothing,) = computed.speed_ups(model, medusa, [], nodes=0, context=10)
    assert nothing["speedup"] == 1.0
