"""What a session is shown of the target's states: every one, once, and at the token it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import families
import pytest
import tiny
import torch
from families import FAMILIES, NAMED, NotBuiltError
from tiny import ONE, RAGGED, Prompt, Scripted, run
from torch import Tensor

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, Limit, Needs, Request

NEW = 24


@dataclass(frozen=True)
class Reader:
    """Drafts as another drafter does, and keeps the states it is shown."""

    drafter: Any
    layers: tuple[int, ...]
    seen: list[list[Tensor]] = field(default_factory=list)  # for each row
    ids: list[list[int]] = field(default_factory=list)  # for each row what had been decided when it was last asked
    num_assistant_tokens: int = 5

    def start(self, target: Any, request: Request) -> ReaderSession:
        return ReaderSession(self, self.drafter.start(target, request))


class ReaderSession:
    def __init__(self, reader: Reader, session: Any) -> None:
        self.reader = reader
        self.session = session
        self.needs = Needs(hidden_layers=reader.layers)

    def propose(self, context: Context, limit: Limit) -> Draft:
        assert context.hidden is not None
        self.reader.ids[:] = [list(ids) for ids in context.ids]
        self.reader.seen[:] = self.reader.seen or [torch.empty(0)] * len(context.ids)
        for row, states in enumerate(context.hidden):
            before = self.reader.seen[row]
            self.reader.seen[row] = torch.cat([before, states]) if before.numel() else states
        return self.session.propose(context, limit)


def wanted(model: Any, ids: list[int], layers: tuple[int, ...]) -> Tensor:
    with torch.no_grad():
        states = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1)


def check(model: Any, reader: Reader, lost: int = 0) -> None:
    """The states of all ids before the root, but for the first `lost`."""
    assert reader.seen
    for ids, seen in zip(reader.ids, reader.seen, strict=True):
        torch.testing.assert_close(seen, wanted(model, ids[:-1], reader.layers)[lost:], rtol=0, atol=1e-9)


@pytest.mark.parametrize("layers", [(-1,), (0, 1, 2), (2, 0)], ids=str)
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("rows", [ONE, RAGGED], ids=["one", "ragged"])
@pytest.mark.parametrize("cache", ["slot", "dynamic"])
def test_a_session_is_shown_every_state_once_and_in_order(model, layers, shape, rows, cache):
    """Report 107: layer i is what transformers itself calls hidden_states[i]."""
    sg.enable(model)
    texts = tiny.truth_of(model, rows, "greedy", NEW + 16)
    reader = Reader(Scripted(texts, shape), layers)
    kwargs = tiny.CACHES[cache](model, rows.columns + NEW)
    run(model, rows, assistant=reader, max_new_tokens=NEW, **kwargs)
    check(model, reader)


@dataclass(frozen=True)
class Resting:
    """A length that drafts in every third round only."""

    def start(self, situation: Any) -> Any:
        return RestingController()


class RestingController:
    rounds = 0

    def depth(self, most: int) -> int:
        self.rounds += 1
        return 4 if self.rounds % 3 == 0 else 0

    def nodes(self) -> int:
        return 64

    def choose(self, draft: Draft) -> Draft:
        return draft

    def update(self, step: Any) -> None:
        pass


@pytest.mark.parametrize("rows", [ONE, RAGGED], ids=["one", "ragged"])
def test_rounds_in_which_nobody_was_asked_are_shown_later(model, rows):
    sg.enable(model)
    reader = Reader(Scripted(tiny.truth_of(model, rows, "greedy", NEW + 16)), (1, -1))
    run(model, rows, assistant=reader, max_new_tokens=NEW, num_assistant_tokens=Resting())
    check(model, reader)


def test_a_prompt_that_is_read_in_chunks_shows_the_last(model):
    sg.enable(model)
    prompt = Prompt.random((20, 0))
    reader = Reader(Scripted(tiny.truth_of(model, prompt, "greedy", NEW + 16)), (1,))
    run(model, prompt, assistant=reader, max_new_tokens=NEW, prefill_chunk_size=8)
    check(model, reader, lost=16)


@pytest.mark.parametrize("kind", ["merge", "first-of"])
def test_a_combination_shows_them_to_the_one_that_asks(model, kind):
    sg.enable(model)
    texts = tiny.truth_of(model, ONE, "greedy", NEW + 16)
    reader = Reader(Scripted(texts), (-1,))
    other = Scripted(texts, spoiled=0)  # is sure of itself, so that the reader is asked for nothing
    drafter = sg.Merge(other, reader) if kind == "merge" else sg.FirstOf(other, reader)
    run(model, ONE, assistant=drafter, max_new_tokens=NEW)
    check(model, reader)


def test_only_the_layers_asked_for_are_kept_of_a_pass(model, monkeypatch):
    sg.enable(model)
    asked: list[Any] = []
    forward = type(model).forward
    monkeypatch.setattr(
        type(model),
        "forward",
        lambda self, *a, **k: asked.append(k.get("output_hidden_states")) or forward(self, *a, **k),
    )
    run(model, ONE, assistant=Reader(sg.PromptLookup(), (1,)), max_new_tokens=4)
    assert asked
    assert all(selected == [1] for selected in asked)
    asked.clear()
    run(model, ONE, assistant=sg.PromptLookup(), max_new_tokens=4)
    assert not any(asked), "nobody reads any"


@pytest.mark.parametrize("layer", [3, -4])
def test_a_layer_that_is_not_there_is_refused_before_any_pass(model, layer, monkeypatch):
    sg.enable(model)
    monkeypatch.setattr(type(model), "forward", lambda *a, **k: pytest.fail("a pass was made"))
    with pytest.raises(ValueError, match=f"{layer}.* has 2 layers"):
        run(model, ONE, assistant=Reader(sg.PromptLookup(), (layer,)), max_new_tokens=4)


# Their inner layers keep several vectors a token.
SEVERAL = {"gemma3n_text", "hy_v4"}


# Whisper writes through a `generate` of its own, which returns none.
SHOWN = [pytest.param(name, marks=[] if name in NAMED else pytest.mark.slow) for name in FAMILIES if name != "whisper"]


@pytest.mark.parametrize("name", SHOWN)
def test_every_family_shows_the_states_that_stock_returns(name):
    try:
        model = sg.enable(families.build(name))
    except NotBuiltError as reason:
        pytest.skip(str(reason))
    inputs, layers = families.inputs(name, Prompt.random((14, 9))), (-1, 1, 0)
    reader, kwargs = Reader(sg.SuffixLookup(), layers), {"max_new_tokens": 12, "do_sample": False}
    if not sg.check(model, sg.Plain(), **kwargs).ok:
        return  # test_families.py counts those that are refused
    if name in SEVERAL:
        model.register_forward_pre_hook(lambda *_: pytest.fail("a pass was made"))
        with pytest.raises(ValueError, match="one vector a token"):
            model.generate(**inputs, assistant=reader, **kwargs)
        return
    model.generate(**inputs, assistant=reader, **kwargs)
    stock = model.generate(**inputs, output_hidden_states=True, return_dict_in_generate=True, **kwargs)
    hidden = stock.decoder_hidden_states if model.config.is_encoder_decoder else stock.hidden_states
    passes = [torch.cat([step[layer][0] for layer in layers], dim=-1) for step in hidden]
    shown = reader.seen[0]
    torch.testing.assert_close(shown, torch.cat(passes)[: len(shown)], rtol=1e-3, atol=1e-3 * shown.std().item())
