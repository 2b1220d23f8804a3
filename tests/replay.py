"""Decoding of a saved text without its model: what a drafter and a controller make of it, at saved costs.

tests/data/texts.json holds greedy answers of SmolLM2-135M-Instruct (float32) to the prompts of hf_specgen/bench: for
each its ids, those of the prompt, and the model's eight best ids at each place of the answer. `python tests/replay.py`
writes it anew. What the model found likely behind tokens that it did not choose is not in there, so that drafters which
recycle that get less than they would.

tests/data/costs-*.json hold seconds of a pass by width, with stock's linear layers and with packed ones: medians of 15
passes behind 300 tokens, one thread of an AMD EPYC, SmolLM2 in float32. `python tests/replay.py costs` writes them
anew.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_specgen.draft import Context, Draft, Limit, Request, Verified
from hf_specgen.length import Length, Situation, within
from hf_specgen.stats import Step

DATA = Path(__file__).parent / "data"
NEW_TOKENS, TOP = 96, 8
# What proposing, choosing and learning took a round on the free texts, and 0.7 ms on those that copy (CPU time).
DRAFT_S = 0.0004


@dataclass(frozen=True)
class Text:
    """One saved answer."""

    copies: bool
    prompt: list[int]
    answer: list[int]
    top: list[list[int]]


@dataclass(frozen=True)
class Outcome:
    """Width and gained tokens of each round, and the seconds that all of them cost."""

    rounds: list[tuple[int, int]]
    seconds: float

    @property
    def seconds_a_token(self) -> float:
        return self.seconds / sum(gained for _, gained in self.rounds)


def texts() -> dict[str, Text]:
    saved = json.loads((DATA / "texts.json").read_text(encoding="utf-8"))
    return {name: Text(**text) for name, text in saved.items()}


def replay(text: Text, drafter: Any, length: Length, seconds: Callable[[int], float]) -> Outcome:
    """Decodes `text` as the loop would, with greedy matching.

    Args:
        text: what the target says.
        drafter: proposes.
        length: controls it.
        seconds: of a pass, by width.
    """
    session = drafter.start(None, Request(batch=1))
    controller = length.start(Situation(batch=1, drafter=type(drafter).__name__))
    top_k = session.needs.top_k
    answer, ids = text.answer, [*text.prompt, text.answer[0]]
    controller.update(Step([ids[-1:]], [0], [0]))
    last = Verified(Draft.empty(1), [[]], [[]], [[text.top[0][:top_k]]] if top_k else [])
    rounds: list[tuple[int, int]] = []
    spent = 0.0
    while (done := len(ids) - len(text.prompt)) < len(answer):
        room = len(answer) - done
        depth = within(controller.depth(room - 1), [room])
        limit = Limit(depth, max(controller.nodes(), *depth), chain=False)
        proposed = session.propose(Context([ids], [len(ids)], last=last), limit) if any(depth) else Draft.empty(1)
        checked = controller.choose(proposed)
        path = _walk(checked, answer[done:])
        gained = answer[done : done + len(path) + 1]
        draft_s = DRAFT_S if any(depth) else 0.0
        took = seconds(checked.nodes) + draft_s
        drafted = int((checked.parents >= 0).sum())
        controller.update(Step([gained], [drafted], [len(path)], checked.nodes, draft_s, seconds=took))
        rounds.append((checked.nodes, len(gained)))
        spent += took
        # The path is what is known of the pass.
        tokens, tops = gained[: len(path)], text.top[done : done + len(gained)]
        shown = [[best[:top_k] for best in tops]] if top_k else []
        last = Verified(proposed, [tokens], [list(range(len(tokens)))], shown)
        ids.extend(gained)
    return Outcome(rounds, spent)


def _walk(draft: Draft, coming: list[int]) -> list[int]:
    """The places of a one-row draft that the text goes through; the last token of a text is never a drafted one."""
    path, stand = [], 0
    tokens, parents = draft.tokens[0].tolist(), draft.parents[0].tolist()
    for token in coming[:-1]:
        places = [place for place, of in enumerate(zip(tokens, parents, strict=True), 1) if of == (token, stand)]
        if not places:
            break
        stand = places[0]
        path.append(stand)
    return path


def _write() -> None:
    from hf_specgen.bench import smollm2
    from hf_specgen.bench.prompts import COPYING, FREE
    from hf_specgen.cli import encode

    model, tokenizer = smollm2.load()
    lines = []
    for copies, prompts in (True, COPYING), (False, FREE):
        for name, prompt in prompts.items():
            inputs = encode(tokenizer, prompt)
            kwargs = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
            out = model.generate(**inputs, **kwargs, return_dict_in_generate=True, output_logits=True)
            prompt_ids = inputs["input_ids"][0].tolist()
            text = {
                "copies": copies,
                "prompt": prompt_ids,
                "answer": out.sequences[0, len(prompt_ids) :].tolist(),
                "top": [logits[0].topk(TOP).indices.tolist() for logits in out.logits],
            }
            lines.append(f'"{name}": {json.dumps(text, separators=(",", ":"))}')
    (DATA / "texts.json").write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _write_costs() -> None:
    import statistics
    import time

    import torch

    import hf_specgen as sg
    from hf_specgen.bench import smollm2
    from hf_specgen.costs import LADDER
    from hf_specgen.prompt import prompt_of
    from hf_specgen.target import Target

    torch.set_num_threads(1)
    model, _ = smollm2.load()
    for name, linear in (("eager", None), ("packed", "packed")):
        sg.enable(model, linear=linear)
        taken: dict[int, list[float]] = {width: [] for width in LADDER}
        with torch.no_grad():
            target = Target(model, prompt_of(model, torch.randint(100, 4000, (1, 300)).tolist()))
            target.prefill()
            target.cache.commit([()])
            for width, warm in [(width, place > 1) for _ in range(3) for width in LADDER for place in range(7)]:
                draft = Draft.chain(torch.randint(100, 4000, (1, width)), [width]) if width else Draft.empty(1)
                begun = time.perf_counter()
                target.verify(torch.tensor([5]), draft).logits.argmax(-1).tolist()
                if warm:
                    taken[width].append(time.perf_counter() - begun)
        seconds = {"pass, batch 1, 1 threads": [round(statistics.median(taken[width]), 4) for width in LADDER]}
        text = json.dumps({"widths": LADDER, "seconds": seconds}, indent=1)
        (DATA / f"costs-{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write_costs() if sys.argv[1:] == ["costs"] else _write()
