"""Measures a drafter from its saved files: what is accepted at each depth, and how many tokens a round.

    python training/report.py --target T --drafter AFTER --before fresh --data DIR --out OUT

Prompts are the held-out rows of a data folder (`--data`), questions in Spec-Bench's form (`--questions`), or both. All
is greedy, with a fixed number of drafted nodes a round, and every text is compared with that of `Plain()`. `--speed`
also times the drafter, retrieval and both together, interleaved in one run. Writes `report.json`, `report.txt` and
`report.png`, and the model card where OUT is the drafter's own folder. Stopped, it goes on where it was.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import card
import torch
from measures import computed
from measures.measuring import (
    AFTER,
    BEFORE,
    Counting,
    Prompt,
    Timing,
    asked,
    compared,
    held_out,
    jobs_of,
    limited,
    untrained,
)
from measures.measuring import FRESH as FRESH  # for the trainings
from measures.positions import Counts, interval, pooled, quartiles
from measures.showing import as_text, draw
from rich.progress import Progress
from running import provenance
from running.command_line import Help, at_least, told_plainly
from running.runs import CommonArguments
from texts import data
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hf_specgen as sg
from hf_specgen.bench.categories import Job, work
from hf_specgen.bench.journal import Journal
from hf_specgen.bench.measure import machine
from hf_specgen.bench.outcomes import summary
from hf_specgen.bench.table import PLAIN, console
from hf_specgen.files import write_whole
from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.loading import Location, load

logger = logging.getLogger(__name__)

SCHEMA = "hf_specgen training report, 1"
ALL = "all prompts"
NODES = 15
# What a launcher tells its processes, and one of its own must not hear.
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
LAUNCHERS = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_")


def in_fresh_process(target: str, drafter: str | Path, out: str | Path, **flags: Any) -> dict[str, Any]:
    """Runs this script in a process of its own, so that what is measured is what was saved.

    Args:
        target: path or hub id.
        drafter: the trained one's folder.
        out: folder of the report; the drafter's own gets a model card as well.
        flags: the script's other flags, such as `before="fresh"`, `data=...` or `speed=True`; None leaves one out.

    Returns:
        What `report.json` holds.

    Raises:
        RuntimeError: it failed; its last words are in the message.
    """
    line = [sys.executable, __file__, "--target", target, "--drafter", str(drafter), "--out", str(out)]
    for name, value in flags.items():
        if value is not None and value is not False:
            values = [] if value is True else value if isinstance(value, list | tuple) else [value]
            line += [f"--{name}", *map(str, values)]
    alone = {k: v for k, v in os.environ.items() if k not in LAUNCHED and not k.startswith(LAUNCHERS)}
    run = subprocess.run(line, env=alone, stderr=subprocess.PIPE, text=True)
    if run.returncode:
        raise RuntimeError(f"the report was not made ({run.returncode}):\n{run.stderr[-2000:]}")
    sys.stderr.write(run.stderr)
    made: dict[str, Any] = json.loads((Path(out) / card.REPORT).read_text(encoding="utf-8"))
    return made


def of_training(arguments: CommonArguments, target: str, out: Path, before: str) -> None:
    """The report at the end of a training, on the model as the training loaded it.

    Args:
        arguments: of the training.
        target: the model that the drafter was saved for; the training's own, or one that learnt along.
        out: folder of the drafter.
        before: what it was before training.
    """
    revision = arguments.revision if target == arguments.target else None
    try:
        held_out(arguments.data, 1, data.tokenizer_for(arguments.data, arguments.target, arguments.revision))
    except ValueError as error:
        logger.warning("no report is made: %s", error)
        return
    in_fresh_process(target, out, out, before=before, data=arguments.data, revision=revision, dtype=arguments.dtype)


# ------------------------------------------------------------------------------------------------------------- figures


def results_of(done: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each group of prompts and each drafter what was accepted, and for all prompts together at the end."""
    rows = []
    for group, by_prompt in _groups(done):
        for drafter in (BEFORE, AFTER):
            runs = [runs for runs in by_prompt.values() if drafter in runs and PLAIN in runs]
            if runs:
                same = sum(one[drafter]["text"] == one[PLAIN]["text"] for one in runs)
                counts = [Counts(**one[drafter]["counts"]) for one in runs]
                rows.append({"group": group, "drafter": drafter, **_told(counts), "identical": same})
    return rows


def _told(counts: Sequence[Counts]) -> dict[str, Any]:
    whole = sum(counts, Counts())
    return {
        "prompts": len(counts),
        "tokens": whole.tokens,
        "rounds": whole.rounds,
        "nodes_a_round": whole.nodes / whole.rounds if whole.rounds else 0.0,
        "mean_accepted_tokens": whole.mean_accepted_tokens,
        "interval": interval(counts),
        "quartiles": quartiles(counts),
        "by_prompt": [one.mean_accepted_tokens for one in counts],
        "offered": whole.offered,
        "accepted": whole.accepted,
        "acceptance": whole.acceptance,
        "overall": whole.overall,
    }


def gains_of(done: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For each group what the drafter adds to the mean accepted tokens of the one before, or else of plain decoding."""
    rows = []
    for group, by_prompt in _groups(done):
        over = BEFORE if any(BEFORE in runs for runs in by_prompt.values()) else PLAIN
        pairs = [(runs[over], runs[AFTER]) for runs in by_prompt.values() if over in runs and AFTER in runs]
        if pairs:
            first, second = ([Counts(**one["counts"]) for one in side] for side in zip(*pairs, strict=True))
            added = pooled(second) - pooled(first)
            rows.append({"group": group, "over": over, "gain": added, "interval": interval(first, second)})
    return rows


def _groups(done: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, dict[str, dict[str, Any]]]]:
    """Results by prompt and setting, group by group."""
    groups: dict[str, dict[str, dict[str, Any]]] = {}
    for one in done:
        groups.setdefault(one["category"], {}).setdefault(one["question"], {})[one["setting"]] = one
    yield from groups.items()
    if len(groups) > 1:
        yield ALL, {f"{group} {name}": runs for group, held in groups.items() for name, runs in held.items()}


# ---------------------------------------------------------------------------------------------------------- the script


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    made.add_argument("--target", required=True, help="path or hub id of the model that the drafter is for")
    made.add_argument("--drafter", required=True, help="folder or hub id of the trained drafter")
    made.add_argument("--before", help=f"what it was before training: a folder, or '{FRESH}' for heads")
    made.add_argument("--data", help="a data folder, for its held-out prompts")
    made.add_argument("--questions", type=Path, help="questions in Spec-Bench's form, or their folder")
    made.add_argument("--categories", nargs="+", help="of the questions; all unless given")
    made.add_argument("--out", type=Path, required=True, help="folder of the report")
    made.add_argument("--prompts", type=at_least(1), default=32, help="held-out prompts")
    made.add_argument("--per_category", type=at_least(1), default=4, help="questions")
    made.add_argument("--new_tokens", type=at_least(1), default=64)
    made.add_argument("--nodes", type=at_least(1), default=NODES, help="drafted nodes a round")
    made.add_argument("--depth", type=at_least(1), help="of an EAGLE head's trees")
    made.add_argument("--branches", type=at_least(1), default=1, help="nodes a level of a sibling's drafts; 1: chains")
    made.add_argument("--revision", help="of the target on the hub")
    made.add_argument("--dtype", default="auto", help="of the target")
    made.add_argument("--threads", type=at_least(1), help="of the CPU")
    made.add_argument("--linear", help="for sg.enable(target, linear=...), such as packed")
    made.add_argument("--speed", action="store_true", help="time it as well")
    made.add_argument("--speed_prompts", type=at_least(1), default=2, help="of each group, when timing")
    made.add_argument("--repeats", type=at_least(1), default=3, help="when timing")
    return made


@dataclass(frozen=True)
class Loaded:
    """What is measured.

    Attributes:
        target: enabled.
        drafters: `BEFORE`, where there is one, and `AFTER`, as they were loaded.
        marks: for each of them, and for the target, what tells it from others.
        origin: what each is, in words.
    """

    target: Any
    drafters: Mapping[str, sg.Drafter]
    marks: Mapping[str, str]
    origin: Mapping[str, str]


def loaded(asked_for: argparse.Namespace) -> Loaded:
    """Loads target and drafters.

    Raises:
        ValueError: one of them cannot be loaded, or does not fit.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        asked_for.target, revision=asked_for.revision or "main", dtype=asked_for.dtype, device_map=device
    )
    target: PreTrainedModel = model.eval()
    after = load(Location.of(asked_for.drafter), target)
    drafters: dict[str, sg.Drafter] = {AFTER: after.drafter}
    origin = {AFTER: after.origin}
    marks = {
        PLAIN: f"{TargetRecord.of(target).fingerprint} {provenance.mark_of(target)}",
        AFTER: _mark(asked_for.drafter),
    }
    if asked_for.before == FRESH:
        drafters[BEFORE], origin[BEFORE] = untrained(after.drafter, target), "the same, freshly initialised"
        marks[BEFORE] = f"{FRESH} {marks[AFTER]}"
    elif asked_for.before:
        before = load(Location.of(asked_for.before), target)
        drafters[BEFORE], origin[BEFORE], marks[BEFORE] = before.drafter, before.origin, _mark(asked_for.before)
    order = [name for name in (BEFORE, AFTER) if name in drafters]
    return Loaded(sg.enable(target, asked_for.linear), {name: drafters[name] for name in order}, marks, origin)


def _mark(drafter: str) -> str:
    held = Path(drafter)
    return provenance.digest(provenance.weights_of(held))[:16] if held.exists() else drafter


def report_of(asked_for: argparse.Namespace) -> dict[str, Any]:
    """Measures what is not in the journal yet, and sums up."""
    have, prompts = loaded(asked_for), prompts_of(asked_for)
    nodes = asked_for.nodes, asked_for.depth, asked_for.branches
    drafters = {name: limited(drafter, *nodes) for name, drafter in have.drafters.items()}
    by_name = {prompt.name: prompt for prompt in prompts}
    dtype = str(have.target.dtype).removeprefix("torch.")
    common = f"{asked_for.new_tokens} tokens, {dtype}, target {have.marks[PLAIN]}"
    common += f", linear {asked_for.linear}" if asked_for.linear else ""
    fixed = {PLAIN: common} | {name: f"{common}, {name} {have.marks[name]}, nodes {nodes}" for name in drafters}
    jobs = jobs_of(prompts, fixed)
    journal = Journal(asked_for.out / "report.jsonl")
    counting = Counting(have.target, by_name, asked_for.new_tokens, {PLAIN: sg.Plain(), **drafters})
    done = _worked("counting", jobs, journal, counting)
    results = results_of(done)
    if not any(row["drafter"] == AFTER for row in results):
        raise ValueError("stopped before anything was measured; the same command goes on")
    context = sum(len(prompt.ids) for prompt in prompts) / len(prompts) + asked_for.new_tokens / 2
    return {
        "schema": SCHEMA,
        "command": provenance.command(sys.argv),
        "target": TargetRecord.of(have.target).to_dict(),
        "drafters": {name: {"what": have.origin[name], "mark": have.marks[name]} for name in drafters},
        "settings": {
            **{name: getattr(asked_for, name) for name in ("nodes", "depth", "branches", "new_tokens", "linear")},
            "dtype": dtype,
            "greedy": True,
        },
        "results": results,
        "gains": gains_of(done),
        "speed": speed_of(asked_for, have, prompts, journal) if asked_for.speed else None,
        "computed": [
            {"group": row["group"], **told}
            for row in results
            if row["drafter"] == AFTER
            for told in computed.speed_ups(have.target, drafters[AFTER], row["overall"], row["nodes_a_round"], context)
        ],
        "machine": {**machine(), "hardware": provenance.hardware()},
    }


def prompts_of(asked_for: argparse.Namespace) -> list[Prompt]:
    """Held-out prompts, then questions.

    Raises:
        ValueError: neither was asked for.
    """
    if not asked_for.data and not asked_for.questions:
        raise ValueError("nothing to measure on: name --data, --questions or both")
    prompts: list[Prompt] = []
    tokenizer: Any
    if asked_for.data:
        tokenizer = data.tokenizer_for(asked_for.data, asked_for.target, asked_for.revision)
        prompts += held_out(asked_for.data, asked_for.prompts, tokenizer)
    if asked_for.questions:
        tokenizer = AutoTokenizer.from_pretrained(asked_for.target, revision=asked_for.revision or "main")
        prompts += asked(asked_for.questions, tokenizer, asked_for.per_category, asked_for.categories)
    return prompts


def speed_of(
    asked_for: argparse.Namespace, have: Loaded, prompts: Sequence[Prompt], journal: Journal
) -> dict[str, Any]:
    """Times the trained drafter beside and with retrieval, on the first prompts of each group."""
    groups: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        groups.setdefault(prompt.group, []).append(prompt)
    chosen = [prompt for held in groups.values() for prompt in held[: asked_for.speed_prompts]]
    drafter = have.drafters[AFTER]
    settings = compared(drafter, limited(drafter, asked_for.nodes, asked_for.depth, asked_for.branches))
    told = f"timed, {asked_for.new_tokens} tokens, {have.target.dtype}, {have.marks[PLAIN]}, {have.marks[AFTER]}"
    told += f", {asked_for.nodes} {asked_for.depth} {asked_for.branches}, {torch.get_num_threads()} threads"
    told += f", linear {asked_for.linear}" if asked_for.linear else ""
    jobs = jobs_of(chosen, {one.name: told for one in settings}, asked_for.repeats)
    timing = Timing(
        have.target,
        {prompt.name: prompt for prompt in chosen},
        asked_for.new_tokens,
        {s.name: s.setting for s in settings},
    )
    rows = summary(_worked("timing", jobs, journal, timing), settings)
    if len(groups) == 1:
        rows = [row for row in rows if row["category"] in groups]
    return {"repeats": asked_for.repeats, "rows": rows, "machine": {**machine(), "hardware": provenance.hardware()}}


def _worked(title: str, jobs: Sequence[Job], journal: Journal, measure: Any) -> list[dict[str, Any]]:
    with Progress(console=console(), transient=True) as progress:
        task = progress.add_task(title, total=len(jobs))
        return work(jobs, journal, measure, lambda: progress.advance(task))


def main(line: Sequence[str] | None = None) -> None:
    """Writes the report; ends with an error where a text is not that of plain decoding, in single precision or more."""
    asked_for = parser().parse_args(line)
    if asked_for.threads:
        torch.set_num_threads(asked_for.threads)
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit('the picture needs matplotlib: pip install "hf_specgen[train]"')
    with told_plainly():
        report = provenance.without_places(report_of(asked_for))
    out = asked_for.out
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / card.REPORT, json.dumps(report, indent=2) + "\n")
    write_whole(out / "report.txt", as_text(report))
    draw(report, out / card.PICTURE)
    if provenance.read(out) is not None:
        card.write(out)
    print(as_text(report))
    others = sum(row["prompts"] - row["identical"] for row in report["results"] if row["group"] != ALL)
    if others and report["settings"]["dtype"] in ("float32", "float64"):
        raise SystemExit(f"{others} texts are not those of plain decoding: a fault of the package, please report it")


if __name__ == "__main__":
    main()
