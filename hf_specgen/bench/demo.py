"""The main job on a real model: text as it comes, drafted tokens coloured, and a table of speeds.

Run as `python -m hf_specgen.bench.demo`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from rich.progress import Progress

import hf_specgen as sg
from hf_specgen.bench import smollm2
from hf_specgen.bench.measure import Setting, interleave, machine
from hf_specgen.bench.prompts import COPYING, FREE
from hf_specgen.bench.table import PLAIN, console, record, table
from hf_specgen.cli import encode, pieces, summary

PROMPTS = {"summary": COPYING["summary"], "code edit": COPYING["code edit"], "chat": FREE["chat"]}
NEW_TOKENS = 64
REPEATS = 3
COMMON: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
# An EAGLE-3 head that was trained for this model. It lies in a checkout and not in an installed package.
HEAD = Path(__file__).parents[2] / "assets" / "eagle3"

ITS_COST = (
    "[dim]The head drafts 15 nodes a round here, whatever they cost. A GPU checks them for the price of one token; on "
    'a CPU they cost more than they bring, and with the draft length on "auto" the head would rest.[/]\n'
)


def main() -> None:
    """Streams answers, then measures them."""
    shown = console()
    # One thread: two on a small shared machine wait for one another more than they help, and times wander.
    torch.set_num_threads(1)
    model, tokenizer = smollm2.load()
    shown.print("SmolLM2-135M-Instruct, float32, one CPU thread, greedy. [green]Green[/] was drafted and accepted.\n")
    settings = [
        Setting(PLAIN, COMMON),
        Setting("stock prompt lookup", {**COMMON, "prompt_lookup_num_tokens": 10}),
        Setting('hf_specgen "auto"', {**COMMON, "assistant": "auto"}, enabled=True),
    ]
    sg.enable(model)
    for name, prompt in PROMPTS.items():
        stream(shown, name, prompt, "auto", model, tokenizer)
    if HEAD.is_dir():
        head = trees_of(HEAD, model)
        stream(shown, "chat, by a trained EAGLE-3 head", PROMPTS["chat"], head, model, tokenizer)
        shown.print(ITS_COST)
        settings.append(Setting("EAGLE-3 head", {**COMMON, "assistant": head}, enabled=True))
    sg.disable(model)

    rows = []
    runs = len(PROMPTS) * len(settings) * (REPEATS + 1)
    shown.print(f"Now {runs} answers again, each setting in turn, for a table: about three minutes.\n")
    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("measuring", total=runs)
        for name, prompt in PROMPTS.items():
            timings = interleave(model, encode(tokenizer, prompt), settings, REPEATS, lambda: progress.advance(task))
            rows += record(name, timings)
    shown.print(table(rows, f"{NEW_TOKENS} new tokens, after the first; medians of {REPEATS} interleaved runs"))
    print(json.dumps({"demo": rows, "machine": machine()}))


def trees_of(folder: Path, model: Any) -> sg.Drafter:
    """An EAGLE head that drafts trees of 15 nodes, 5 deep, whatever they cost."""
    loaded = cast(sg.Eagle, sg.load_assistant(folder, model))
    return replace(loaded, nodes=15, num_assistant_tokens=5)


def stream(shown: Console, title: str, prompt: str, assistant: Any, model: Any, tokenizer: Any) -> None:
    """Shows an answer as it comes.

    Args:
        shown: the terminal.
        title: of the answer.
        prompt: in words.
        assistant: as for `generate`.
        model: enabled.
        tokenizer: of the model.
    """
    shown.print(f"[bold]{title}[/]  [dim]{' '.join(prompt.split())[:100]} …[/]")
    stats = sg.Stats()
    steps = sg.stream(model, **encode(tokenizer, prompt), assistant=assistant, **COMMON, stats=stats)
    for piece, drafted in pieces(steps, tokenizer):
        shown.print(piece, style="green" if drafted else None, end="", markup=False, highlight=False, soft_wrap=True)
    shown.print(f"\n[dim]{summary(stats)}[/]\n")


if __name__ == "__main__":
    main()
