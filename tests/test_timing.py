"""What a round costs beside the model's own passes, against stock in the same run.

Tiny models, so that the loop is most of what is measured; one thread; the fastest of several interleaved calls each.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import tiny
import torch
from transformers import LlamaForCausalLM
from transformers.utils import logging

import hf_specgen as sg

NEW = 320
DRAFTED = 8


@dataclass
class Clock:
    """Seconds in the forwards of the models it is put on, and the passes of the first of them."""

    inside_s: float = 0.0
    passes: int = 0
    _first: Any = field(default=None, repr=False)

    def put_on(self, model: LlamaForCausalLM) -> LlamaForCausalLM:
        forward, first = model.forward, self._first is None
        self._first = self._first or model

        @functools.wraps(forward)
        def timed(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            output = forward(*args, **kwargs)
            self.inside_s += time.perf_counter() - begun
            self.passes += first
            return output

        object.__setattr__(model, "forward", timed)
        return model


def stock_drafter(**arguments: Any) -> LlamaForCausalLM:
    model = tiny.llama(**arguments).float()
    model.generation_config.num_assistant_tokens = DRAFTED
    model.generation_config.assistant_confidence_threshold = 0.0  # drafts of this length, as ours
    return model


def cost(call: Callable[[], Any], clock: Clock) -> tuple[float, float]:
    """Seconds a round: all of it, and what is not inside a forward."""
    clock.inside_s, clock.passes = 0.0, 0
    begun = time.perf_counter()
    call()
    took = time.perf_counter() - begun
    rounds = clock.passes - 1
    return took / rounds, (took - clock.inside_s) / rounds


def fastest(calls: dict[str, Callable[[], Any]], clock: Clock, repeats: int = 7) -> dict[str, tuple[float, float]]:
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            found[name].append(cost(call, clock))
    return {name: (min(a for a, _ in rows), min(b for _, b in rows)) for name, rows in found.items()}


@pytest.fixture
def prompt() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, tiny.VOCAB, (1, 150), generator=generator)


@pytest.fixture
def hushed() -> Iterator[None]:
    """Stock's assisted generation logs a deprecation of its own at every round."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


@pytest.mark.timing
@pytest.mark.usefixtures("hushed")
def test_a_round_of_prompt_lookup_costs_no_more_than_stocks(prompt: torch.Tensor) -> None:
    clock = Clock()
    stock = clock.put_on(tiny.llama(max_position_embeddings=1024).float())
    ours = sg.enable(tiny.llama(max_position_embeddings=1024).float())
    clock_ours = Clock()
    clock_ours.put_on(ours)
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    lookup = sg.PromptLookup(min_ngram=1, num_assistant_tokens=DRAFTED)
    theirs = fastest({"stock": lambda: stock.generate(prompt, prompt_lookup_num_tokens=DRAFTED, **arguments)}, clock)
    mine = fastest({"ours": lambda: ours.generate(prompt, assistant=lookup, **arguments)}, clock_ours)
    print({**theirs, **mine})
    assert mine["ours"][0] <= theirs["stock"][0]
    assert mine["ours"][1] <= theirs["stock"][1]


@pytest.mark.timing
@pytest.mark.usefixtures("hushed")
def test_a_round_of_a_draft_model_costs_a_fraction_of_stocks(prompt: torch.Tensor) -> None:
    clock_stock, clock_ours = Clock(), Clock()
    stock = clock_stock.put_on(tiny.llama(max_position_embeddings=1024).float())
    assistant = clock_stock.put_on(stock_drafter(max_position_embeddings=1024))
    ours = sg.enable(clock_ours.put_on(tiny.llama(max_position_embeddings=1024).float()))
    small = clock_ours.put_on(tiny.llama(max_position_embeddings=1024).float())
    arguments = {"max_new_tokens": NEW, "do_sample": False}
    drafter = sg.DraftModel(small, num_assistant_tokens=DRAFTED)
    theirs, mine = [], []
    for _ in range(7):
        theirs.append(cost(lambda: stock.generate(prompt, assistant_model=assistant, **arguments), clock_stock))
        mine.append(cost(lambda: ours.generate(prompt, assistant=drafter, **arguments), clock_ours))
    whole = min(a for a, _ in mine) / min(a for a, _ in theirs)
    outside = min(b for _, b in mine) / min(b for _, b in theirs)
    print({"whole": whole, "outside": outside, "ours": min(mine), "stock": min(theirs)})
    assert whole <= 1
    assert outside <= 0.4
