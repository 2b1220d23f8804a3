"""Rotary embeddings that change at a length: no pass lies across the switch, and there the cache is what stock's is."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tiny
import torch
from tiny import AlwaysWrong, Prompt, Scripted, sharpen
from torch import Tensor
from transformers import (
    Cache,
    DynamicCache,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    HunYuanDenseV1Config,
    HunYuanDenseV1ForCausalLM,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    PreTrainedModel,
)

import hf_specgen as sg
from hf_specgen import generation, rope
from hf_specgen.loop import Call
from hf_specgen.target import Target, one_thread

# The first position that is turned otherwise; wider than any pass.
SWITCH = 72
NEW = 28
BEYOND = 12

LONG = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [4.0, 3.7, 3.4, 3.1],
    "original_max_position_embeddings": SWITCH,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
SIZES = tiny._sizes(max_position_embeddings=4 * SWITCH)


def phi3() -> PreTrainedModel:
    return Phi3ForCausalLM(Phi3Config(**SIZES, original_max_position_embeddings=SWITCH, rope_parameters={**LONG}))


def phimoe() -> PreTrainedModel:
    scales = {"short_mscale": 1.0, "long_mscale": 1.3}
    model = PhimoeForCausalLM(PhimoeConfig(**SIZES, num_local_experts=4, rope_parameters={**LONG, **scales}))
    model.set_experts_implementation("eager")  # torch's grouped products know no float64
    return model


def gemma3() -> PreTrainedModel:
    """Only the layers that see everything switch."""
    kinds = ["full_attention", "sliding_attention"]
    parameters = {"full_attention": {**LONG}, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    config = Gemma3TextConfig(**SIZES, head_dim=8, layer_types=kinds, sliding_window=8, rope_parameters=parameters)
    return Gemma3ForCausalLM(config)


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "phi3": phi3,
    "phimoe": phimoe,
    "gemma3": gemma3,
    "llama, longrope": lambda: tiny.llama(max_position_embeddings=4 * SWITCH, rope_parameters={**LONG}),
    "llama, dynamic": lambda: tiny.llama(max_position_embeddings=SWITCH, rope_parameters={**DYNAMIC}),
}


# Phimoe switches as Phi-3 does, and takes a third of the time of all: its other tests are for `make test-all`.
QUICK = [pytest.param(name, marks=pytest.mark.slow if name == "phimoe" else []) for name in FAMILIES]


@functools.cache
def family(name: str) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = FAMILIES[name]()
    return sg.enable(model if name.startswith("llama") else sharpen(model))


def fresh(model: PreTrainedModel) -> PreTrainedModel:
    """The model as no call had been before: "dynamic" keeps the frequencies of the longest text until a short one."""
    with torch.no_grad():
        model(torch.tensor([[1, 2]]))
    return model


# Where the prompt ends: far before the switch, just before, at and behind it, so that drafts meet it early and late.
ROWS = {
    "before": Prompt.random((52, 9)),
    "short by one": Prompt.random((SWITCH - 1, 9)),
    "at": Prompt.random((SWITCH, 9)),
    "behind": Prompt.random((SWITCH + 1, 9)),
    "past": Prompt.random((90, 3)),
    "ragged": Prompt.random((44, 3), (58, 1), (49, 2)),
}


def inputs_of(prompt: Prompt, padding: int = 0) -> dict[str, Tensor]:
    """The prompt's, with more padding than it needs in front."""
    return {key: torch.nn.functional.pad(value, (padding, 0)) for key, value in prompt.inputs().items()}


def answer(model: PreTrainedModel, inputs: dict[str, Tensor], **kwargs: Any) -> list[list[int]]:
    """The new tokens of each row."""
    arguments = {"do_sample": False, "max_new_tokens": NEW, **kwargs}
    ids = fresh(model).generate(**inputs, **arguments)
    new: list[list[int]] = ids[:, inputs["input_ids"].shape[1] :].tolist()
    return new


@functools.cache
def stock(name: str, prompt: Prompt, padding: int = 0) -> list[list[int]]:
    """Stock's text, and some tokens more than are asked for."""
    return answer(family(name), inputs_of(prompt, padding), max_new_tokens=NEW + BEYOND)


def same_cache(ours: Cache, theirs: Cache, prompt: Prompt, new: list[int], padding: int = 0) -> None:
    """The keys of each row's tokens, of which so many are `new`, are the same; sliding layers hold the last ones."""
    for mine, other in zip(ours.layers, theirs.layers, strict=True):
        assert mine.keys.shape == other.keys.shape
        missing = theirs.get_seq_length() - other.keys.shape[2]
        for row, (ids, more) in enumerate(zip(prompt.rows, new, strict=True)):
            first = padding + prompt.columns - len(ids)
            seen = slice(max(0, first - missing), padding + prompt.columns + more - missing)
            torch.testing.assert_close(mine.keys[row, :, seen], other.keys[row, :, seen], rtol=1e-4, atol=1e-4)


def known(prompt: Prompt, texts: list[list[int]]) -> list[list[int]]:
    """What a scripted drafter is told: texts from the prompt's first token on."""
    return [[*ids, *text] for ids, text in zip(prompt.rows, texts, strict=True)]


def shortened(texts: list[list[int]], new: int = NEW) -> list[list[int]]:
    return [text[:new] for text in texts]


DRAFTERS: dict[str, Callable[[PreTrainedModel, list[list[int]]], Any]] = {
    "plain": lambda model, texts: sg.Plain(),
    "chain": lambda model, texts: Scripted(texts, spoiled=1 / 4),
    "tree": lambda model, texts: Scripted(texts, "tree", spoiled=1 / 4),
    "overlong": lambda model, texts: Scripted(texts, "tree", spoiled=1 / 4, overlong=True),
    "wrong": lambda model, texts: AlwaysWrong(texts, "tree"),
    "sibling": lambda model, texts: sg.DraftModel(tiny.sibling(model, noise=0.05), branches=2),
    "itself": lambda model, texts: sg.DraftModel(model),
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("rows", ROWS)
def test_before_at_and_past_the_switch_the_text_is_stock_s(name, rows):
    model, prompt = family(name), ROWS[rows]
    whole = stock(name, prompt)
    for kind, make in DRAFTERS.items():
        assistant, stats = make(model, known(prompt, whole)), sg.Stats()
        assert answer(model, inputs_of(prompt), assistant=assistant, stats=stats) == shortened(whole), kind
        reached = max(map(len, prompt.rows)) >= SWITCH - 1
        if name == "llama, dynamic" and reached:
            assert stats.drafted == 0, "beyond the switch every length has frequencies of its own"
        elif isinstance(assistant, Scripted):
            assert sum(assistant.seen.mixed) >= 2
        elif kind == "itself" and "phi" in name:
            assert stats.acceptance_rate > 0.6, "the drafter computes its cache anew as well"


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("mode", ["sampled", "hash-sampled", "penalties-greedy"])
def test_so_it_is_under_every_walk(name, mode):
    model, prompt = family(name), ROWS["ragged"]
    kwargs = {**tiny.MODES[mode](), "seed": 7}
    texts = answer(model, inputs_of(prompt), assistant=sg.Plain(), **{**kwargs, "max_new_tokens": NEW + BEYOND})
    if "greedy" in mode:
        assert shortened(texts) == answer(model, inputs_of(prompt), **tiny.MODES[mode]())
    for shape in "chain", "tree":
        assistant = Scripted(known(prompt, texts), shape)
        assert answer(model, inputs_of(prompt), assistant=assistant, **{**kwargs, **tiny.MODES[mode]()}) == shortened(
            texts
        )
        assert assistant.seen.share("mixed") > 0.5


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("first", [0, 2])
def test_rows_that_end_apart_still_switch_together(name, padding, first):
    """Stock counts on where a row has ended, so a long row switches the others after its end too."""
    model, prompt = family(name), ROWS["ragged"]
    inputs = inputs_of(prompt, padding)
    whole = stock(name, prompt, padding)
    eos = whole[first][6]
    kwargs = {"eos_token_id": eos, "max_new_tokens": NEW}
    wanted = answer(model, inputs, **kwargs)
    assert [row.index(eos) if eos in row else NEW for row in wanted][first] <= 6
    for shape in "chain", "tree":
        assert answer(model, inputs, assistant=Scripted(known(prompt, whole), shape), **kwargs) == wanted
    kwargs |= {"return_dict_in_generate": True, "do_sample": False}
    theirs = fresh(model).generate(**inputs, **kwargs).cache
    ours = fresh(model).generate(**inputs, **kwargs, assistant=Scripted(known(prompt, whole))).cache
    same_cache(ours, theirs, prompt, [row.index(eos) + 1 if eos in row else len(row) - 1 for row in wanted], padding)


CACHES: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "static": lambda model: {"cache_implementation": "static"},
    "dynamic": lambda model: {"cache": DynamicCache(config=model.config)},
}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ("gemma3", "phimoe")])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("rows", ["before", "ragged"])
def test_so_it_is_with_a_cache_of_the_caller_s(name, cache, rows):
    model, prompt = family(name), ROWS[rows]
    whole = stock(name, prompt)
    assert answer(model, inputs_of(prompt), **CACHES[cache](model)) == shortened(whole)
    for assistant in sg.Plain(), Scripted(known(prompt, whole)):
        assert answer(model, inputs_of(prompt), assistant=assistant, **CACHES[cache](model)) == shortened(whole)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("rows", ["before", "ragged"])
def test_what_is_returned_is_what_stock_returns(name, rows):
    model, prompt = family(name), ROWS[rows]
    kwargs = {
        **inputs_of(prompt),
        "do_sample": False,
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
    }
    wanted = fresh(model).generate(**kwargs)
    got = fresh(model).generate(**kwargs, assistant=Scripted(known(prompt, stock(name, prompt))))
    assert torch.equal(got.sequences, wanted.sequences)
    for ours, theirs in zip(got.scores, wanted.scores, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    for ours, theirs in zip(got.hidden_states[1:], wanted.hidden_states[1:], strict=True):
        # Where stock computes its cache anew, it hands out every state once more.
        torch.testing.assert_close(ours[-1], theirs[-1][:, -1:], rtol=1e-4, atol=1e-4)
    same_cache(got.cache, wanted.cache, prompt, [NEW - 1] * prompt.batch)


@pytest.mark.parametrize("name", QUICK)
@pytest.mark.parametrize("first", [8, 24])
def test_a_conversation_goes_on_across_the_switch(name, first):
    """A turn that ends before the switch or behind it, and another from its cache."""
    model, prompt = family(name), ROWS["before"]
    more = torch.tensor([Prompt.random((9, 5)).rows[0]])

    def talk(assistant: Any) -> list[list[int]]:
        turn = {"do_sample": False, "return_dict_in_generate": True, "assistant": assistant}
        one = fresh(model).generate(**inputs_of(prompt), max_new_tokens=first, **turn)
        ids = torch.cat([one.sequences, more], dim=1)
        mask = torch.ones_like(ids)
        two = model.generate(ids, attention_mask=mask, cache=one.cache, max_new_tokens=NEW, **turn)
        answer: list[list[int]] = two.sequences.tolist()
        return answer

    wanted = talk(None)
    assert talk(sg.Plain()) == wanted
    assert talk(Scripted(wanted)) == wanted


def test_a_pass_never_lies_across_the_switch(monkeypatch):
    """And what is before it is drafted for as far as it goes."""
    seen: list[tuple[int, int]] = []
    verify = Target.verify

    def watched(self: Target, roots: Tensor, draft: Any, idle: Any = ()) -> Any:
        positions = self._positions(draft, idle)
        seen.append((int(positions.min()), int(positions.max())))
        return verify(self, roots, draft, idle)

    monkeypatch.setattr(Target, "verify", watched)
    name, prompt = "llama, longrope", ROWS["before"]
    texts = known(prompt, stock(name, prompt))
    answer(family(name), inputs_of(prompt), assistant=Scripted(texts, spoiled=0, num_assistant_tokens=9))
    assert all(last < SWITCH or first >= SWITCH for first, last in seen)
    assert any(last == SWITCH - 1 for _, last in seen)
    assert max(last - first for first, last in seen) == 9


def test_the_cache_holds_what_was_decided_after_it_was_computed_anew(monkeypatch):
    """Rows that have ended too: stock's pass at the switch goes over their padding."""
    decode, rebuilt = generation.decode, []

    def watched(call: Call) -> Iterator[sg.Step]:
        for step in decode(call):
            assert call.target.cache.lengths == [len(ids) - 1 for ids in call.rows.ids]
            rebuilt.append(call.target.switch is not None and not call.target.follows_length)
            yield step

    monkeypatch.setattr(generation, "decode", watched)
    prompt = ROWS["ragged"]
    texts = stock("phi3", prompt)
    answer(family("phi3"), inputs_of(prompt), assistant=Scripted(known(prompt, texts)), eos_token_id=texts[0][6])
    assert rebuilt[0] is False
    assert rebuilt[-1] is True


# -------------------------------------------------------------------------------------------------------------- refused


def refused(model: PreTrainedModel, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        model.generate(**inputs_of(ROWS["before"]), max_new_tokens=NEW, assistant=sg.Plain())
    short = {"max_new_tokens": SWITCH - 52, "do_sample": False}
    assert torch.equal(
        model.generate(**inputs_of(ROWS["before"]), assistant=sg.Plain(), **short),
        model.generate(**inputs_of(ROWS["before"]), **short),
    )


def test_two_switches_in_one_model_are_refused():
    kinds = ["full_attention", "sliding_attention"]
    parameters = {"full_attention": {**LONG}, "sliding_attention": {**LONG, "original_max_position_embeddings": 90}}
    config = Gemma3TextConfig(**SIZES, head_dim=8, layer_types=kinds, sliding_window=8, rope_parameters=parameters)
    refused(sg.enable(sharpen(Gemma3ForCausalLM(config))), "longrope beyond 72 tokens in more than one way.* 80")


def test_frequencies_of_every_length_and_a_cache_that_is_dropped_are_refused():
    class Dropping(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids: Tensor, cache: Any = None, **kwargs: Any) -> Any:
            if cache is not None and input_ids.shape[1] > SWITCH >= cache.get_seq_length():
                cache = None
            return super().prepare_inputs_for_generation(input_ids, cache=cache, **kwargs)

    model = FAMILIES["llama, dynamic"]()
    model.config.original_max_position_embeddings = SWITCH
    model.__class__ = Dropping
    refused(sg.enable(model), "dynamic beyond 72 tokens and drops its cache.* 80")


def test_a_rotary_embedding_in_code_of_its_own_is_refused():
    model = sg.enable(FAMILIES["llama, longrope"]())

    class Own(torch.nn.Module):
        def __init__(self, stock: torch.nn.Module) -> None:
            super().__init__()
            self.stock = [stock]  # a list hides it

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.stock[0](*args, **kwargs)

    model.model.rotary_emb = Own(model.model.rotary_emb)
    refused(model, "longrope beyond 72 tokens in code of its own.* 80")


def test_what_is_only_called_dynamic_does_not_switch():
    parameters = {**DYNAMIC, "alpha": 1000.0}
    sizes = {**SIZES, "max_position_embeddings": SWITCH, "head_dim": 8}
    model = sg.enable(sharpen(HunYuanDenseV1ForCausalLM(HunYuanDenseV1Config(**sizes, rope_parameters=parameters))))
    assert rope.switches(model) == set()
    wanted = answer(model, inputs_of(ROWS["ragged"]), max_new_tokens=NEW + BEYOND)
    assistant = Scripted(known(ROWS["ragged"], wanted), "tree")
    assert answer(model, inputs_of(ROWS["ragged"]), assistant=assistant) == shortened(wanted)


@pytest.mark.parametrize("name", FAMILIES)
def test_such_a_model_serves_one_thread(name):
    assert "rotary" in (one_thread(family(name)) or "")
    assert one_thread(tiny.llama()) is None
