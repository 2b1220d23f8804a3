"""Spec-Bench's six categories and code edits: this package's "auto" against plain decoding and stock's own drafters.

Run as `python -m hf_specgen.bench.categories --out categories.jsonl`. It goes on where it was stopped: each run is
appended to the file, and what is there already is not done again. Settings take turns on each question. With `--batch`
rows of one category are decoded together, and only settings that take several rows are compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hf_specgen as sg
from hf_specgen.bench import questions, smollm2
from hf_specgen.bench.journal import Journal
from hf_specgen.bench.measure import SEED, Setting, machine, timed
from hf_specgen.bench.outcomes import Compared, summary, table
from hf_specgen.bench.questions import Question, pick
from hf_specgen.bench.table import PLAIN, console

# What is measured as ours.
OURS: Any = "auto"
# The last layer of stock's early exit. Of SmolLM2's 30, of which none was trained for it, the best of 8, 15, 22 and 27.
EXIT = 27


def settings() -> list[Compared]:
    """Greedy and at a temperature of 0.7. A seed's text is that of `Plain()`, which stock does not know."""
    greedy, warm = {"do_sample": False}, {"do_sample": True, "temperature": 0.7}
    seeded = {**warm, "seed": SEED}
    warm_plain, reference = f"{PLAIN} T=0.7", "Plain() T=0.7"
    return [
        Compared(Setting(PLAIN, greedy), batches=True),
        Compared(Setting("stock lookup 4", {**greedy, "prompt_lookup_num_tokens": 4})),
        Compared(Setting("stock lookup 10", {**greedy, "prompt_lookup_num_tokens": 10})),
        Compared(Setting("stock early exit", {**greedy, "assistant_early_exit": EXIT})),
        Compared(Setting("auto", {**greedy, "assistant": OURS}, enabled=True), batches=True),
        Compared(Setting(warm_plain, warm), warm_plain, warm_plain, batches=True),
        Compared(Setting(reference, {**seeded, "assistant": sg.Plain()}, True), warm_plain, reference, batches=True),
        Compared(Setting("auto T=0.7", {**seeded, "assistant": OURS}, True), warm_plain, reference, batches=True),
    ]


@dataclass(frozen=True)
class Job:
    """One run of one setting on one batch of questions.

    Attributes:
        category: of the questions.
        question: the name of the first.
        prompts: of all.
        setting: its name.
        repeat: which one.
        conditions: what else a result depends on, in words.
    """

    category: str
    question: str
    prompts: tuple[str, ...]
    setting: str
    repeat: int
    conditions: str = ""

    @property
    def key(self) -> str:
        """What a journal knows it by."""
        parts = (self.category, self.question, len(self.prompts), self.setting, self.repeat, self.conditions)
        return " | ".join(map(str, parts))


def interleaved(
    batches: Iterable[Sequence[Question]], names: Sequence[str], repeats: int, conditions: str = ""
) -> Iterator[Job]:
    """The jobs in the order in which they are done: on each batch of questions the settings take turns."""
    for batch in batches:
        prompts = tuple(question.prompt for question in batch)
        for repeat in range(repeats):
            for name in names:
                yield Job(batch[0].category, batch[0].name, prompts, name, repeat, conditions)


def work(
    jobs: Sequence[Job],
    journal: Journal,
    measure: Callable[[Job], Mapping[str, Any]],
    tick: Callable[[], object] = lambda: None,
) -> list[dict[str, Any]]:
    """Does what is not in the journal yet.

    Args:
        jobs: in their order.
        journal: takes the results.
        measure: does a job.
        tick: called after each job, for a progress bar.

    Returns:
        What the journal has of these jobs, if it was interrupted.
    """
    with suppress(KeyboardInterrupt):
        for job in jobs:
            if job.key not in journal:
                told = {"category": job.category, "question": job.question, "rows": len(job.prompts)}
                journal.add(job.key, {**told, "setting": job.setting, "repeat": job.repeat, **measure(job)})
            tick()
    return [journal.results[job.key] for job in jobs if job.key in journal]


class Bench:
    """Does jobs on a model.

    Args:
        model: a causal LM; left disabled.
        tokenizer: its own.
        compared: the settings there are.
        new_tokens: the most a run decodes.
        enable: makes the model take `assistant=`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: PreTrainedTokenizerBase,
        compared: Sequence[Compared],
        new_tokens: int,
        enable: Callable[[Any], Any] = sg.enable,
    ) -> None:
        self.model, self.tokenizer, self.enable = model, tokenizer, enable
        self.settings = {one.name: one.setting for one in compared}
        self.new_tokens = new_tokens
        self._warm: set[str] = set()

    def __call__(self, job: Job) -> dict[str, Any]:
        """Runs it. The first run of a setting in a process is preceded by one that does not count."""
        setting = self.settings[job.setting]
        length = {**setting.arguments, "max_new_tokens": self.new_tokens}
        inputs = encode(self.tokenizer, job.prompts)
        (self.enable if setting.enabled else sg.disable)(self.model)
        try:
            if job.setting not in self._warm:
                self._warm.add(job.setting)
                timed(self.model, inputs, dataclasses.replace(setting, arguments={**length, "max_new_tokens": 8}))
            run = timed(self.model, inputs, dataclasses.replace(setting, arguments=length))
        finally:
            sg.disable(self.model)
        return dataclasses.asdict(run)


def encode(tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str]) -> Mapping[str, Tensor]:
    """Ids and mask of several prompts as a user's turns, padded on the left."""
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    inputs: Mapping[str, Tensor] = tokenizer(
        texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False
    )
    return inputs


# --------------------------------------------------------------------------------------------------------- the command


def arguments_of(argv: Sequence[str] | None, compared: Sequence[Compared]) -> argparse.Namespace:
    """What was asked for."""
    categories = [*dict.fromkeys(questions.CATEGORIES.values()), questions.CODE_EDITS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl or its folder; else it is fetched")
    parser.add_argument("--out", type=Path, required=True, help="the file of results, which is gone on with")
    parser.add_argument("--settings", nargs="+", choices=[one.name for one in compared], help="these and no others")
    parser.add_argument("--categories", nargs="+", choices=categories, default=categories)
    parser.add_argument("--per-category", type=int, default=2, help="questions, or batches of them")
    parser.add_argument("--batch", type=int, nargs="+", default=[1], help="rows decoded together")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--linear", help="for sg.enable(model, linear=...)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures what is missing; prints a table, then one line of JSON."""
    compared = settings()
    asked = arguments_of(argv, compared)
    torch.set_num_threads(asked.threads)
    pools = questions.load(asked.questions)
    chosen = [one for one in compared if not asked.settings or one.name in asked.settings]
    conditions = f"{asked.new_tokens} tokens, {asked.threads} threads, linear {asked.linear}"
    jobs: list[Job] = []
    for rows in asked.batch:
        batches = [batch for category in asked.categories for batch in pick(pools[category], asked.per_category, rows)]
        names = [one.name for one in chosen if one.batches or rows == 1]
        jobs += interleaved(batches, names, asked.repeats, conditions)
    journal, shown = Journal(asked.out), console()
    model, tokenizer = smollm2.load()
    enable: Any = sg.enable
    if asked.linear is not None:
        enable = functools.partial(enable, linear=asked.linear)
    bench = Bench(model, tokenizer, compared, asked.new_tokens, enable)
    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("measuring", total=len(jobs))
        results = work(jobs, journal, bench, lambda: progress.advance(task))
    rows_of = summary(results, compared)
    shown.print(table(rows_of, f"{conditions}; after the first token, medians of interleaved runs"))
    print(json.dumps({"categories": rows_of, "conditions": conditions, "machine": machine()}))


if __name__ == "__main__":
    main()
