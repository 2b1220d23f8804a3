"""The measurements behind the README: every setting on every prompt, interleaved.

Run as `python -m hf_specgen.bench --new-tokens 96 --repeats 3`.
"""

from __future__ import annotations

import argparse
import json

import torch
from rich.progress import Progress

import hf_specgen as sg
from hf_specgen.bench import smollm2
from hf_specgen.bench.measure import Setting, interleave, machine
from hf_specgen.bench.prompts import COPYING, FREE
from hf_specgen.bench.table import PLAIN, console, record, table
from hf_specgen.cli import encode


def settings(new_tokens: int) -> list[Setting]:
    """Stock plain, stock prompt lookup, and this package's plain, prompt lookup and "auto"."""
    common = {"do_sample": False, "max_new_tokens": new_tokens}
    return [
        Setting(PLAIN, common),
        Setting("stock prompt lookup", {**common, "prompt_lookup_num_tokens": 10}),
        Setting("Plain()", {**common, "assistant": sg.Plain()}, enabled=True),
        Setting("PromptLookup()", {**common, "assistant": sg.PromptLookup()}, enabled=True),
        Setting('"auto"', {**common, "assistant": "auto"}, enabled=True),
    ]


def main() -> None:
    """Prints a table, then one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=[*COPYING, *FREE], help="these prompts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model, tokenizer = smollm2.load()
    prompts = {name: text for name, text in (COPYING | FREE).items() if not arguments.only or name in arguments.only}
    compared = settings(arguments.new_tokens)
    shown = console()
    rows = []
    with Progress(console=shown, transient=True) as progress:
        task = progress.add_task("measuring", total=len(prompts) * len(compared) * (arguments.repeats + 1))
        for name, prompt in prompts.items():
            inputs = encode(tokenizer, prompt)
            rows += record(name, interleave(model, inputs, compared, arguments.repeats, lambda: progress.advance(task)))
    shown.print(table(rows, "greedy, after the first token; medians of interleaved runs"))
    print(json.dumps({"bench": rows, "machine": machine()}))


if __name__ == "__main__":
    main()
