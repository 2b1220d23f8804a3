"""How the width of a draft follows a text that turns from prose to quotation and back.

Run as `python -m hf_specgen.bench.plot --out docs/width.png`; needs matplotlib, which the extra `bench` brings. The
text is given: a logits processor lets the target choose nothing else, while its passes and the drafts are what they
always are. So the picture shows the controller and not the luck of a prompt.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedTokenizerBase

import hf_specgen as sg
from hf_specgen.bench import smollm2
from hf_specgen.bench.categories import OURS
from hf_specgen.bench.measure import machine
from hf_specgen.bench.prompts import ARTICLE, TURNING
from hf_specgen.bench.table import console
from hf_specgen.cli import encode

PROMPT = f"{ARTICLE}\n\nWrite a column about what is new in the harbour, and quote the article."


class Given(LogitsProcessor):
    """Lets nothing be chosen but a given text.

    Args:
        start: ids before it.
        ids: of the text.
    """

    def __init__(self, start: int, ids: Sequence[int]) -> None:
        self.start = start
        self.ids = ids

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """See transformers."""
        only = torch.full_like(scores, -torch.inf)
        only[:, self.ids[input_ids.shape[1] - self.start]] = 0.0
        return only


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        end_s: seconds since the first token.
        end: tokens of the text that are there.
        width: nodes checked.
        accepted: of them.
    """

    end_s: float
    end: int
    width: int
    accepted: int


def replay(model: Any, inputs: Any, ids: Sequence[int], assistant: Any, progress: Progress) -> list[Round]:
    """Decodes a given text; the first round is the prompt's pass.

    Args:
        model: enabled.
        inputs: of the prompt.
        ids: of the text.
        assistant: drafts.
        progress: is shown.
    """
    task = progress.add_task("replaying", total=len(ids))
    given = LogitsProcessorList([Given(inputs["input_ids"].shape[1], ids)])
    length: dict[str, Any] = {"max_new_tokens": len(ids), "eos_token_id": None}
    rounds: list[Round] = []
    for step in sg.stream(model, **inputs, assistant=assistant, do_sample=False, logits_processor=given, **length):
        gained = len(step.tokens[0])
        before = rounds[-1] if rounds else Round(-step.seconds, 0, 0, 0)
        rounds.append(Round(before.end_s + step.seconds, before.end + gained, step.width, step.accepted[0]))
        progress.advance(task, gained)
    return rounds


def time_of(rounds: Sequence[Round], token: int) -> float:
    """When so many tokens were there."""
    return next(one.end_s for one in rounds if one.end >= token)


def draw(ours: Sequence[Round], plain: Sequence[Round], turns: tuple[int, int], out: Path) -> None:
    """Two panels over the same time: width and accepted tokens of each round, and tokens so far beside plain decoding.

    Args:
        ours: rounds with drafts.
        plain: rounds without.
        turns: the tokens with which the quotation begins and ends.
        out: the picture.
    """
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError('the picture needs matplotlib: pip install "hf_specgen[bench]"') from error
    figure, (above, below) = pyplot.subplots(2, sharex=True, figsize=(9, 5.5), constrained_layout=True)
    edges = [one.end_s for one in ours]
    above.stairs([one.width for one in ours[1:]], edges, fill=True, color="#9ecae1", label="width: nodes checked")
    above.stairs([one.accepted for one in ours[1:]], edges, fill=True, color="#238b45", label="accepted")
    above.set_ylabel("nodes a round")
    above.legend(loc="upper left", frameon=False)
    below.plot(edges, [one.end for one in ours], color="#238b45", label="with drafts")
    below.plot([one.end_s for one in plain], [one.end for one in plain], color="0.5", label="plain decoding")
    below.set_ylabel("tokens")
    below.set_xlabel("seconds since the first token")
    below.legend(loc="lower right", frameon=False)
    begin, end = (time_of(ours, token) for token in turns)
    for panel in above, below:
        panel.axvspan(begin, end, color="0.93", zorder=0)
    above.set_title("shaded: the text quotes its prompt word for word", fontsize="medium")
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def tokens_of(tokenizer: PreTrainedTokenizerBase, parts: Sequence[str]) -> tuple[list[int], tuple[int, int]]:
    """Ids of prose, quotation and prose, and where the quotation begins and ends."""
    ids: list[int] = []
    ends: list[int] = []
    for part in parts:
        ids += tokenizer(part, add_special_tokens=False)["input_ids"]
        ends.append(len(ids))
    return ids, (ends[0], ends[1])


def main() -> None:
    """Writes the picture; prints one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the picture; its ending says of what kind")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit('the picture needs matplotlib: pip install "hf_specgen[bench]"')
    torch.set_num_threads(arguments.threads)
    model, tokenizer = smollm2.load()
    inputs = encode(tokenizer, PROMPT)
    ids, turns = tokens_of(tokenizer, TURNING)
    sg.enable(model)
    with Progress(console=console(), transient=True) as progress:
        plain, ours = (replay(model, inputs, ids, assistant, progress) for assistant in (sg.Plain(), OURS))
    draw(ours, plain, turns, arguments.out)
    begin, end = turns
    parts = {"before": (1, begin), "quotation": (begin, end), "after": (end, len(ids))}
    speedups = {name: round(_seconds(plain, part) / _seconds(ours, part), 3) for name, part in parts.items()}
    print(json.dumps({"plot": str(arguments.out), "speedup": speedups, "machine": machine()}))


def _seconds(rounds: Sequence[Round], part: tuple[int, int]) -> float:
    return time_of(rounds, part[1]) - time_of(rounds, part[0])


if __name__ == "__main__":
    main()
