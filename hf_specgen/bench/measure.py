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


class Stopwatch(BaseStreamer):
    """A streamer that notes when the first token and the last one came."""

    def __init__(self) -> None:
        self.started_s = time.perf_counter()
        self.first_s: float | None = None
        self.last_s = self.started_s
        self._prompt_seen = False

    def put(self, value: Tensor) -> None:
        """Called once for the prompt, then for tokens."""
        self.last_s = time.perf_counter()
        if self._prompt_seen and self.first_s is None:
            self.first_s = self.last_s
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


def run_once(model: Any, inputs: Mapping[str, Tensor], setting: Setting, timing: Timing) -> None:
    """One call, noted in `timing`."""
    (sg.enable if setting.enabled else sg.disable)(model)
    passes = 0

    def count(*_: Any) -> None:
        nonlocal passes
        passes += 1

    handle = model.get_decoder().register_forward_pre_hook(count)
    watch = Stopwatch()
    started = time.perf_counter()
    output = model.generate(**inputs, streamer=watch, **setting.arguments)
    call_s = time.perf_counter() - started
    handle.remove()
    sg.disable(model)
    timing.tokens = output[0, inputs["input_ids"].shape[1] :].tolist()
    timing.passes = passes - 1
    timing.decode_s.append(watch.last_s - (watch.first_s or watch.last_s))
    timing.call_s.append(call_s)


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
