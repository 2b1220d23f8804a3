"""The main job on a real model: text as it comes, drafted tokens coloured, and a table of speeds.

Run as `python -m hf_specgen.bench.demo`.
"""

from __future__ import annotations

import json

import torch
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
SETTINGS = [
    Setting(PLAIN, {"do_sample": False, "max_new_tokens": NEW_TOKENS}),
    Setting("stock prompt lookup", {"do_sample": False, "max_new_tokens": NEW_TOKENS, "prompt_lookup_num_tokens": 10}),
    Setting(
        'hf_specgen "auto"',
        {"do_sample": False, "max_new_tokens": NEW_TOKENS, "assistant": "auto"},
        enabled=True,
    ),
]


def main() -> None:
    """Streams three answers, then measures them."""
    shown = console()
    # One thread: two on a small shared machine wait for one another more than they help, and times wander.
    torch.set_num_threads(1)
    model, tokenizer = smollm2.load()
    shown.print("SmolLM2-135M-Instruct, float32, one CPU thread, greedy. [green]Green[/] was drafted and accepted.\n")
    for name, prompt in PROMPTS.items():
        shown.print(f"[bold]{name}[/]  [dim]{' '.join(prompt.split())[:100]} …[/]")
        stats = sg.Stats()
        sg.enable(model)
        steps = sg.stream(
            model,
            **encode(tokenizer, prompt),
            assistant="auto",
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            stats=stats,
        )
        for piece, drafted in pieces(steps, tokenizer):
            shown.print(
                piece, style="green" if drafted else None, end="", markup=False, highlight=False, soft_wrap=True
            )
        shown.print(f"\n[dim]{summary(stats)}[/]\n")
    sg.disable(model)

    rows = []
    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("measuring", total=len(PROMPTS) * len(SETTINGS) * (REPEATS + 1))
        for name, prompt in PROMPTS.items():
            timings = interleave(model, encode(tokenizer, prompt), SETTINGS, REPEATS, lambda: progress.advance(task))
            rows += record(name, timings)
    shown.print(table(rows, f"{NEW_TOKENS} new tokens, after the first; medians of {REPEATS} interleaved runs"))
    print(json.dumps({"demo": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
