"""Times settings against each other: interleaved in one process, so that a drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

import hf_specgen as sg

SEED = 7


class Stopwatch(BaseStreamer):
    """A streamer that notes when the first token and the last one came.

    Attributes:
        first_tokens: that came at once with the first; stock drafts behind the prompt already.
    """

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.first_s: float | None = None
        self.first_tokens = 0
        self.last_s = self.started_s
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Called once for the prompt, then for tokens."""
        self.last_s = time.perf_counter()
        if self._prompt_seen and self.first_s is None:
            self.first_s = self.last_s
            self.first_tokens = value.numel()
        self._prompt_seen = True

    def end(self) -> None:
        """Called once."""


@dataclass(frozen=True)
class Setting:
    """One way to generate.

    Attributes:
        name: for the table.
        arguments: for `generate`.
        enabled: whether the model is enabled for it; stock settings run on the stock model.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    enabled: bool = False


@dataclass
class Timing:
    """Runs of one setting on one prompt.

    Attributes:
        tokens: the new ids.
        passes: forwards of the target after the prompt's.
        decode_s: for each run the seconds between the first token and the last.
        call_s: for each run the seconds of the whole call.
    """

    tokens: list[int] = field(default_factory=list)
    passes: int = 0
    decode_s: list[float] = field(default_factory=list)
    call_s: list[float] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """After the first token, median over runs."""
        return (len(self.tokens) - 1) / statistics.median(self.decode_s)

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens a pass after the prompt's; 1.00 for plain decoding."""
        return (len(self.tokens) - 1) / self.passes if self.passes else 1.0


@dataclass
class Run:
    """One call.

    Attributes:
        tokens: for each row its new ids, its EOS included and nothing behind it.
        first: how many of them came with the first, of all rows together.
        widths: for each pass of the whole target after the prompt's the tokens in it beside the root.
        row_rounds: rows that gained tokens, summed over these passes.
        decode_s: seconds between the first token and the last.
        call_s: seconds of the whole call.
    """

    tokens: list[list[int]]
    first: int
    widths: list[int]
    row_rounds: int
    decode_s: float
    call_s: float


@dataclass
class Rounds(sg.Stats):
    """Stats that note when the first token and the last one came: a streamer would keep the rows of a batch in step."""

    first_s: float = 0.0
    last_s: float = 0.0

    def add_prefill(self, step: sg.Step) -> None:
        """See `Stats`."""
        super().add_prefill(step)
        self.first_s = self.last_s = time.perf_counter()

    def add(self, step: sg.Step) -> None:
        """See `Stats`."""
        super().add(step)
        self.last_s = time.perf_counter()


def timed(model: Any, inputs: Mapping[str, Tensor], setting: Setting) -> Run:
    """One call of a model that is enabled, or not, as the setting wants it.

    Args:
        model: a causal LM.
        inputs: ids and mask, padded on the left.
        setting: one that samples gets the same seed each time.
    """
    decoder = model.get_decoder()
    layers = decoder.config.num_hidden_layers
    widths: list[int] = []

    def count(module: Any, _: Any, kwargs: dict[str, Any]) -> None:
        if module.config.num_hidden_layers == layers:  # stock's early exit drafts with fewer of them
            widths.append(kwargs["input_ids"].shape[1] - 1)

    torch.manual_seed(SEED)
    handle, watch, rounds = decoder.register_forward_pre_hook(count, with_kwargs=True), Stopwatch(), Rounds()
    noted = {"stats": rounds} if setting.enabled else {"streamer": watch}
    started = time.perf_counter()
    output = model.generate(**inputs, **noted, **setting.arguments)
    call_s = time.perf_counter() - started
    handle.remove()
    tokens = _through_eos(output[:, inputs["input_ids"].shape[1] :].tolist(), model.generation_config.eos_token_id)
    if setting.enabled:
        return Run(tokens, len(tokens), widths[1:], rounds.row_rounds, rounds.last_s - rounds.first_s, call_s)
    # Stock takes several rows in plain decoding only.
    row_rounds = len(widths) - 1 if len(tokens) == 1 else sum(len(row) - 1 for row in tokens)
    decode_s = watch.last_s - (watch.first_s or watch.last_s)
    return Run(tokens, watch.first_tokens, widths[1:], row_rounds, decode_s, call_s)


def _through_eos(rows: list[list[int]], eos: int | list[int] | None) -> list[list[int]]:
    ends = set() if eos is None else {eos} if isinstance(eos, int) else set(eos)
    stops = [next((place for place, token in enumerate(row) if token in ends), len(row)) for row in rows]
    return [row[: stop + 1] for row, stop in zip(rows, stops, strict=True)]


def run_once(model: Any, inputs: Mapping[str, Tensor], setting: Setting, timing: Timing) -> None:
    """One call, noted in `timing`."""
    (sg.enable if setting.enabled else sg.disable)(model)
    run = timed(model, inputs, setting)
    sg.disable(model)
    timing.tokens = run.tokens[0]
    timing.passes = len(run.widths)
    timing.decode_s.append(run.decode_s)
    timing.call_s.append(run.call_s)


def interleave(
    model: Any,
    inputs: Mapping[str, Tensor],
    settings: Sequence[Setting],
    repeats: int,
    tick: Callable[[], object] = lambda: None,
) -> dict[str, Timing]:
    """Runs every setting in turn, `repeats` times, after one round that is not counted.

    Args:
        model: a causal LM; left disabled.
        inputs: ids and mask of one prompt.
        settings: to be compared.
        repeats: counted rounds.
        tick: called after every run, for a progress bar.
    """
    timings = {setting.name: Timing() for setting in settings}
    for setting in settings:
        run_once(model, inputs, setting, Timing())
        tick()
    for _ in range(repeats):
        for setting in settings:
            run_once(model, inputs, setting, timings[setting.name])
            tick()
    return timings


def machine() -> dict[str, Any]:
    """What a number needs beside it."""
    import transformers

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_specgen": sg.__version__,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
