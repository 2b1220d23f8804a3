"""How often texts part from plain decoding in each number format, and whether each first difference is a near-tie.

Run as `python -m hf_specgen.bench.precision --tokens 10000 --dtypes float32 bfloat16`.

Sixteen rows at a time, answers begun with a sampled stretch each, are gone on with greedily by stock `generate` and by
`assistant=`, whose drafts are mostly wrong on purpose: tokens are looked up after a match of one. A text counts to
its first difference, since behind it the two have nothing to do with one another.
"""

from __future__ import annotations

import argparse
import json
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import PreTrainedTokenizerBase

import hf_specgen as sg
from hf_specgen.bench import smollm2
from hf_specgen.bench.measure import machine
from hf_specgen.bench.prompts import FREE
from hf_specgen.bench.table import console
from hf_specgen.explain import Difference, explain_difference

NEW_TOKENS = 128
STRETCH = 24
ANSWERS = 4


@dataclass
class Count:
    """What was found in one number format.

    Attributes:
        dtype: its name.
        tokens: compared, first differences included.
        accepted: of them, drafted ones.
        drafted: tokens drafted.
        differences: the first ones.
    """

    dtype: str
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    differences: list[Difference] = field(default_factory=list)

    def told(self) -> dict[str, Any]:
        """For the JSON line. Gaps are between the two best logits of the re-score."""
        gaps = [difference.gap for difference in self.differences]
        return {
            "dtype": self.dtype,
            "tokens": self.tokens,
            "first_differences": len(gaps),
            "per_10000_tokens": round(10_000 * len(gaps) / self.tokens, 2),
            "near_ties": sum(bool(difference.near_tie) for difference in self.differences),
            "gap_median": round(statistics.median(gaps), 5) if gaps else None,
            "gap_max": round(max(gaps), 5) if gaps else None,
            "rounding_max": round(max(d.rounding for d in self.differences), 5) if gaps else None,
            "accepted": self.accepted,
            "drafted": self.drafted,
        }


def prompts(model: Any, tokenizer: PreTrainedTokenizerBase, seed: int) -> dict[str, Tensor]:
    """Four prompts, four sampled beginnings of an answer to each, padded on the left."""
    turns = [[{"role": "user", "content": text}] for text in FREE.values() for _ in range(ANSWERS)]
    texts = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left")
    seeds = [1000 * seed + row for row in range(len(turns))]
    sampled = {"do_sample": True, "seed": seeds, "max_new_tokens": STRETCH, "eos_token_id": None}
    begun = model.generate(**inputs, assistant=sg.Plain(), **sampled)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, STRETCH), value=1)
    return {"input_ids": begun, "attention_mask": mask}


def compare(model: Any, inputs: dict[str, Tensor], count: Count) -> None:
    """One batch, noted in `count`."""
    # Without an end every text is of full length.
    kwargs = {**inputs, "do_sample": False, "max_new_tokens": NEW_TOKENS, "eos_token_id": None}
    stats = sg.Stats()
    plain = sg.disable(model).generate(**kwargs)
    drafter = sg.PromptLookup(min_ngram=1)
    assisted = sg.enable(model).generate(**kwargs, assistant=drafter, num_assistant_tokens=4, stats=stats)
    columns = inputs["input_ids"].shape[1]
    for row in (plain != assisted)[:, columns:]:
        parted = row.nonzero()
        count.tokens += int(parted[0]) + 1 if len(parted) else NEW_TOKENS
    count.accepted += stats.accepted
    count.drafted += stats.drafted
    if not torch.equal(plain, assisted):
        told = explain_difference(model, plain, assisted, **inputs, do_sample=False, float32=True)
        count.differences.extend(told.differences)


def main() -> None:
    """Prints each first difference, then one line of JSON; an interrupt ends the counting early."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=10_000, help="to compare in each format")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16", "float16"]
    )
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    shown, counts = console(), [Count(dtype) for dtype in arguments.dtypes]
    with Progress(console=shown, transient=True) as progress, suppress(KeyboardInterrupt):
        for count in counts:
            model, tokenizer = smollm2.load(getattr(torch, count.dtype))
            task, seed = progress.add_task(count.dtype, total=arguments.tokens), 0
            while count.tokens < arguments.tokens:
                before = len(count.differences)
                compare(model, prompts(sg.enable(model), tokenizer, seed), count)
                for difference in count.differences[before:]:
                    shown.print(f"{count.dtype}, seed {seed}: {difference.told(tokenizer)}", highlight=False)
                seed += 1
                progress.update(task, completed=min(count.tokens, arguments.tokens))
    print(json.dumps({"precision": [count.told() for count in counts if count.tokens], "machine": machine()}))


if __name__ == "__main__":
    main()
