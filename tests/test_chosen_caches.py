"""Caches that the caller chooses, by name or as an object: exact on them, or refused by name before any pass."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tiny
import torch
from generating import counted
from tiny import ONE, RAGGED, Prompt, Scripted, run
from transformers import Cache, DynamicCache, PreTrainedModel, QuantizedCache, StaticCache
from transformers.cache_utils import Fp8QuantizedLayer, StaticSlidingWindowLayer
from transformers.generation import utils
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS

import hf_specgen as sg
from hf_specgen import refusals
from hf_specgen.bench import smollm2
from hf_specgen.bench.prompts import ARTICLE

NEW, BEYOND = 24, 16
ROWS = {"one": ONE, "ragged": RAGGED}
MODES = ("greedy", "sampled", "hash-sampled", "penalties-greedy")
MAKERS: dict[str, Callable[[], PreTrainedModel]] = {"llama": tiny.llama, "mistral": tiny.mistral}

FP8 = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
# The names of transformers, in three classes; the quantized one is exact or refused by its backend.
STATIC = ("static", "sliding_window", "hybrid_chunked")
EXACT: dict[str, dict[str, Any]] = {
    **{name: {"cache_implementation": name} for name in ("dynamic", "hybrid", *STATIC)},
    "fp8": FP8,
}
OFFLOADED = ("offloaded", "offloaded_static", "offloaded_hybrid", "offloaded_hybrid_chunked")


@pytest.fixture(autouse=True)
def _old_names_are_not_our_doing(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers logs that some of its names are deprecated, which fails a test; they are tested all the same."""
    monkeypatch.setattr(utils.logger, "disabled", True)


@functools.cache
def target(kind: str = "llama") -> PreTrainedModel:
    return sg.enable(MAKERS[kind]())


@functools.cache
def truth(kind: str, prompt: Prompt, mode: str = "greedy") -> tuple[tuple[int, ...], ...]:
    return tiny.truth_of(target(kind), prompt, mode, 3 * NEW + BEYOND)


@functools.cache
def fp8_truth(prompt: Prompt, mode: str) -> tuple[tuple[int, ...], ...]:
    """An fp8 cache says something of its own, so that its reference is plain decoding on such a cache."""
    return run(target(), prompt, mode, assistant=sg.Plain(), max_new_tokens=NEW + BEYOND, **FP8)


@contextmanager
def no_pass(model: PreTrainedModel) -> Iterator[None]:
    with counted(model) as passes:
        yield
    assert passes == []


def refused(message: str, kind: str = "llama", prompt: Prompt = ONE, **kwargs: Any) -> None:
    model = target(kind)
    with no_pass(model), pytest.raises(ValueError, match=message):
        run(model, prompt, assistant=sg.Plain(), **{"max_new_tokens": NEW, **kwargs})


# --------------------------------------------------------------------------------------------------------------- names


def test_every_name_that_transformers_knows_is_somewhere_in_this_file():
    assert {*EXACT, *OFFLOADED, "quantized"} - {"fp8"} == set(ALL_CACHE_IMPLEMENTATIONS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", EXACT)
def test_a_cache_by_name_changes_no_text(name, rows, mode):
    """Report 13."""
    prompt = ROWS[rows]
    known = fp8_truth(prompt, mode) if name == "fp8" else truth("llama", prompt, mode)
    script = Scripted(known, "tree")
    texts = run(target(), prompt, mode, assistant=script, max_new_tokens=NEW, **EXACT[name])
    assert texts == tuple(text[: len(ids) + NEW] for text, ids in zip(known, prompt.rows, strict=True))
    assert script.seen.share("mixed") > 0.5
    if "greedy" in mode:
        assert texts == run(tiny.llama(), prompt, mode, max_new_tokens=NEW, **EXACT[name])
    # What can branch is our own cache; all others stay what was asked for.
    assert all(script.seen.chains) == (name not in ("dynamic", "hybrid"))


def test_an_fp8_cache_says_something_of_its_own():
    assert fp8_truth(ONE, "greedy")[0] != truth("llama", ONE)[0][: ONE.columns + NEW + BEYOND]


def test_an_fp8_cache_stays_one_and_holds_what_stocks_holds():
    known, outputs = fp8_truth(RAGGED, "greedy"), []
    for assistant in None, Scripted(known):
        kwargs = {**RAGGED.inputs(), **FP8, "max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}
        outputs.append(target().generate(**kwargs, assistant=assistant).cache)
    theirs, ours = outputs
    assert ours.get_seq_length() == theirs.get_seq_length() == RAGGED.columns + NEW - 1
    for mine, stocks in zip(ours.layers, theirs.layers, strict=True):
        assert type(mine) is Fp8QuantizedLayer
        pairs = [(mine._quantized_keys, stocks._quantized_keys), (mine._quantized_values, stocks._quantized_values)]
        for (states, scale), (wanted, wanted_scale) in pairs:
            assert torch.equal(states.float(), wanted.float())
            assert scale == wanted_scale


@pytest.mark.slow
def test_in_float32_the_first_difference_of_an_fp8_cache_is_a_near_tie():
    """A key that lies within rounding of the middle between two fp8 numbers goes the other way in another pass."""
    model, tokenizer = smollm2.load()
    chat = [{"role": "user", "content": ARTICLE}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    kwargs = {**inputs, **FP8, "max_new_tokens": 64, "do_sample": False}
    # Even another attention function would make another text.
    wanted = sg.enable(model).generate(**kwargs, return_dict_in_generate=True, output_logits=True)
    answer = model.generate(**kwargs, assistant=sg.PromptLookup(2))
    shared = min(answer.shape[1], wanted.sequences.shape[1])
    differing = (answer[:, :shared] != wanted.sequences[:, :shared]).nonzero()
    if len(differing):
        logits = wanted.logits[int(differing[0, 1]) - inputs["input_ids"].shape[1]][0]
        best = logits.topk(2).values
        assert float(best[0] - best[1]) <= 2**-7 * float(logits.abs().max())
    assert torch.equal(model.generate(**kwargs, assistant=sg.Plain()), wanted.sequences)


@pytest.mark.parametrize("name", STATIC)
@pytest.mark.parametrize("rows", [ONE, Prompt.random((6, 1), (3, 2))], ids=["one", "ragged"])
def test_a_static_cache_that_stays_within_its_window_is_exact(name, rows):
    model = sg.enable(tiny.mistral(window=64))
    known = tiny.truth_of(model, rows, "greedy", NEW + BEYOND)
    script = Scripted(known)
    texts = run(model, rows, assistant=script, max_new_tokens=NEW, cache_implementation=name)
    assert texts == run(tiny.mistral(window=64), rows, max_new_tokens=NEW, cache_implementation=name)
    assert script.seen.share("mixed") > 0.5


@pytest.mark.parametrize("name", STATIC)
def test_one_that_outgrows_its_window_is_refused(name):
    message = "cannot be removed from a StaticCache with StaticSlidingWindowLayer.*leave cache_implementation= out"
    refused(message, "mistral", cache_implementation=name)


@pytest.mark.parametrize("home", ["call", "defaults"])
@pytest.mark.parametrize("name", OFFLOADED)
def test_an_offloaded_cache_is_refused_where_there_is_nothing_to_offload_from(name, home):
    if home == "call":
        refused("an offloaded .*Cache moves keys and values between a GPU and the CPU", cache_implementation=name)
    else:
        model = sg.enable(tiny.llama())
        model.generation_config.cache_implementation = name
        with no_pass(model), pytest.raises(ValueError, match="leave cache_implementation= out"):
            run(model, ONE, assistant=sg.Plain(), max_new_tokens=NEW)


class Stream:
    """A stream of a device that has none."""

    def wait_stream(self, other: Any) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("kind", ["llama", pytest.param("mistral", id="sliding")])
def test_rolling_back_an_offloaded_cache_leaves_it_offloaded(name, rows, kind, monkeypatch):
    """On the CPU, as if it were a GPU: what goes where is noted and not moved."""
    prompt, known, moved = ROWS[rows], truth(kind, ROWS[rows]), []
    monkeypatch.setattr(torch, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: Stream())
    monkeypatch.setattr(refusals, "offloads", lambda cache: False)
    for move in ("offload", "prefetch"):
        monkeypatch.setattr(Cache, move, lambda self, layer, *_, move=move: moved.append((move, layer % 2)))
    if kind == "mistral" and name != "offloaded":
        refused("StaticSlidingWindowLayer", kind, prompt, cache_implementation=name)
        return
    script = Scripted(known)
    kwargs = {"cache_implementation": name, "max_new_tokens": NEW}
    texts = run(target(kind), prompt, assistant=script, **kwargs)
    assert texts == tuple(text[: len(ids) + NEW] for text, ids in zip(known, prompt.rows, strict=True))
    assert script.seen.share("mixed") > 0.5
    assert all(script.seen.chains)
    # Every pass offloads each layer after its use, and fetches the next one before.
    assert moved == [("prefetch", 1), ("offload", 0), ("prefetch", 0), ("offload", 1)] * (len(moved) // 4)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", OFFLOADED)
def test_an_offloaded_cache_is_exact_on_a_gpu(name, rows):
    model, prompt = sg.enable(tiny.llama()).cuda(), ROWS[rows]
    inputs = {key: value.cuda() for key, value in prompt.inputs().items()}
    script = Scripted(truth("llama", prompt))
    kwargs = {**inputs, "cache_implementation": name, "max_new_tokens": NEW, "do_sample": False}
    assert torch.equal(model.generate(**kwargs, assistant=script), model.generate(**kwargs))
    assert script.seen.share("mixed") > 0.5


@pytest.mark.parametrize("given", ["by name", "as an object", "by the model's defaults"])
def test_a_cache_that_quantizes_anew_what_it_holds_is_refused(given):
    """Its text depends on which tokens came together: 128 of them wait and are then stored together with the rest."""
    message = "QuantizedCache with QuantoQuantizedLayer.*they can from one with cache_config={'backend': 'fp8'}"
    model = target()
    if given == "as an object":
        refused(message, cache=QuantizedCache("quanto", model.config))
    elif given == "by name":
        refused(message, cache_implementation="quantized")
    else:
        # Not swapped for another kind, as a static default is: its text would be another.
        model = sg.enable(tiny.llama())
        model.generation_config.cache_implementation = "quantized"
        with no_pass(model), pytest.raises(ValueError, match=message):
            run(model, ONE, assistant=sg.Plain(), max_new_tokens=NEW)


def test_fp8_as_the_model_s_default_is_kept():
    model = sg.enable(tiny.llama())
    model.generation_config.update(**FP8)
    known = fp8_truth(ONE, "greedy")
    assert run(model, ONE, assistant=Scripted(known), max_new_tokens=NEW) == (known[0][: ONE.columns + NEW],)


def test_what_has_no_such_cache_is_refused_by_stock():
    refused("Invalid `cache_implementation`", cache_implementation="dynamic_full")
    refused("only supported for models with only full attention", "mistral", **FP8)


# ------------------------------------------------------------------------------------------------------------- objects

# Makers of caches for a model and the most columns there can be.
OBJECTS: dict[str, Callable[[PreTrainedModel, int], Cache]] = {
    "dynamic": lambda model, columns: DynamicCache(config=model.config),
    "without config": lambda model, columns: DynamicCache(),
    "static": lambda model, columns: StaticCache(config=model.config, max_cache_len=columns),
    "static with room": lambda model, columns: StaticCache(config=model.config, max_cache_len=columns + 50),
    "fp8": lambda model, columns: QuantizedCache("fp8", model.config),
}
CONVERSATIONS = [("llama", name) for name in OBJECTS] + [("mistral", "dynamic"), ("mistral", "without config")]


@pytest.mark.parametrize("shown", ["everything", "the new ids"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("kind", "name"), CONVERSATIONS)
@pytest.mark.parametrize("chunk", [None, pytest.param(3, marks=pytest.mark.slow)], ids=["whole", "chunks"])
def test_a_conversation_goes_on_in_the_cache_that_holds_it(kind, name, rows, shown, chunk):
    """Reports 5 and 14: three turns, against stock on a cache of the same kind."""
    model, prompt = target(kind), ROWS[rows]
    said = torch.tensor([[7, 8, 9, 10]] * prompt.batch)
    texts, script, mixed = [], None, []
    for drafted in False, True:
        ids, mask = prompt.inputs().values()
        cache = OBJECTS[name](model, prompt.columns + 3 * NEW + 2 * said.shape[1])
        for turn in range(3):
            if turn:
                ids, mask = torch.cat([ids, said], 1), torch.nn.functional.pad(mask, (0, said.shape[1]), value=1)
            new = ids if shown == "everything" or not turn else ids[:, int(cache.get_seq_length()) :]
            if drafted:
                # What is drafted in this turn follows the ids that are shown in it.
                pads = [0] * prompt.batch if new is not ids else [int((row == 0).sum()) for row in mask]
                script = Scripted(
                    [[*row[pad:], *text] for row, pad, text in zip(new.tolist(), pads, texts[turn], strict=True)]
                )
            kwargs = {"attention_mask": mask, "cache": cache, "do_sample": False, "max_new_tokens": NEW}
            whole = model.generate(new, **kwargs, prefill_chunk_size=chunk, assistant=script)
            answer = whole[:, -NEW:].tolist()
            if drafted:
                assert answer == texts[turn]
                mixed += script.seen.mixed
            else:
                texts.append(answer)
            ids = torch.cat([ids, whole[:, -NEW:]], 1)
            mask = torch.nn.functional.pad(mask, (0, NEW), value=1)
        assert int(cache.get_seq_length()) == ids.shape[1] - 1
    assert sum(mixed) > len(mixed) / 2
    assert len({tuple(row) for turn in texts for row in turn}) == 3 * prompt.batch


def test_a_cache_with_nothing_new_to_say_to_it_is_refused():
    """Stock feeds all of the prompt a second time, and answers something else."""
    for held, prompt in ((14, ONE), (20, ONE), (24, RAGGED)):
        cache = DynamicCache(config=target().config)
        with torch.no_grad():
            target()(torch.full((prompt.batch, held), 5), cache=cache)
        refused(f"DynamicCache holds {held} tokens, .* no more than {prompt.columns}.*crop", prompt=prompt, cache=cache)
    cache.crop(-1)
    run(target(), RAGGED, assistant=sg.Plain(), cache=cache, max_new_tokens=2)


def test_new_ids_without_a_mask_over_the_conversation_are_refused():
    cache = DynamicCache(config=target().config)
    ids = ONE.inputs()["input_ids"]
    target().generate(ids, cache=cache, max_new_tokens=NEW, do_sample=False)
    message = f"holds {ONE.columns + NEW - 1} tokens, .* no more than 2: .* an attention mask over all of it"
    with no_pass(target()), pytest.raises(ValueError, match=message):
        target().generate(ids[:, :2], cache=cache, max_new_tokens=NEW, assistant=sg.Plain())


@pytest.mark.parametrize("name", OBJECTS)
def test_a_cache_of_other_rows_is_refused(name):
    cache = OBJECTS[name](target(), 200)
    with torch.no_grad():
        target()(torch.full((3, 4), 5), cache=cache)
    kind = type(cache).__name__
    refused(f"the {kind} is made for 3 rows, and the prompt has 1; pass one for 1", cache=cache)
    if name != "fp8":  # which cannot do this
        cache.reset()
    message = "is made for 3 rows, and the prompt has 2" if isinstance(cache, StaticCache) or name == "fp8" else None
    ids = torch.full((1, 9), 5)
    kwargs = {
        "cache": cache,
        "num_return_sequences": 2,
        "do_sample": True,
        "max_new_tokens": 2,
        "assistant": sg.Plain(),
    }
    if message is None:
        assert target().generate(ids, **kwargs).shape == (2, 11)
    else:
        with no_pass(target()), pytest.raises(ValueError, match=message):
            target().generate(ids, **kwargs)


@pytest.mark.parametrize("rows", ROWS)
def test_a_static_cache_must_have_room_for_all_but_the_last_token(rows):
    prompt, known = ROWS[rows], truth("llama", ROWS[rows])
    needed = prompt.columns + NEW - 1
    cache = StaticCache(config=target().config, max_cache_len=needed - 1)
    message = (
        f"has room for {needed - 1} tokens, and this call may need {needed}: {prompt.columns} of the prompt "
        f"and all but the last of {NEW} new ones"
    )
    refused(message, prompt=prompt, cache=cache)
    cache = StaticCache(config=target().config, max_cache_len=needed)
    texts = run(target(), prompt, assistant=Scripted(known, overlong=True), max_new_tokens=NEW, cache=cache)
    assert texts == tuple(text[: len(ids) + NEW] for text, ids in zip(known, prompt.rows, strict=True))


@pytest.mark.parametrize("shown", ["everything", "the new ids"])
def test_so_must_one_that_holds_a_conversation(shown):
    model, size = target(), ONE.columns + 2 * NEW + 1
    cache = StaticCache(config=model.config, max_cache_len=size)
    ids = model.generate(ONE.inputs()["input_ids"], cache=cache, do_sample=False, max_new_tokens=NEW)
    ids = torch.cat([ids, torch.tensor([[7, 8]])], 1)
    new = ids if shown == "everything" else ids[:, -3:]
    kwargs = {"attention_mask": torch.ones_like(ids), "cache": cache, "do_sample": False, "assistant": sg.Plain()}
    with no_pass(model), pytest.raises(ValueError, match=f"has room for {size} tokens, .* may need {size + 1}"):
        model.generate(new, **kwargs, max_new_tokens=NEW + 1)
    assert model.generate(new, **kwargs, max_new_tokens=NEW).shape[1] == new.shape[1] + NEW


def test_embeddings_count_as_columns_too():
    model = target()
    embeds = model.get_input_embeddings()(ONE.inputs()["input_ids"]).detach()
    needed = ONE.columns + NEW - 1
    kwargs = {"inputs_embeds": embeds, "do_sample": False, "max_new_tokens": NEW, "assistant": sg.Plain()}
    with no_pass(model), pytest.raises(ValueError, match=f"room for {needed - 1} tokens, .* may need {needed}"):
        model.generate(**kwargs, cache=StaticCache(config=model.config, max_cache_len=needed - 1))
    answer = model.generate(**kwargs, cache=StaticCache(config=model.config, max_cache_len=needed))
    assert tuple(answer[0].tolist()) == truth("llama", ONE)[0][ONE.columns :][:NEW]


def test_a_static_cache_whose_window_it_outgrows_is_refused_as_an_object_too():
    cache = StaticCache(config=target("mistral").config, max_cache_len=60)
    assert type(cache.layers[0]) is StaticSlidingWindowLayer
    refused("StaticSlidingWindowLayer.*pass a DynamicCache", "mistral", cache=cache)


def test_an_error_in_a_round_takes_its_tokens_out_of_an_fp8_cache_too():
    cache, known = QuantizedCache("fp8", target().config), fp8_truth(ONE, "greedy")
    steps = sg.stream(
        target(), **ONE.inputs(), assistant=Scripted(known), cache=cache, do_sample=False, max_new_tokens=NEW
    )
    decided = ONE.columns + len(next(steps).tokens[0])
    decided += len(next(steps).tokens[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_specgen.walk.WalkAtOnce.__call__", lambda *_: pytest.fail("on purpose"))
        with pytest.raises(pytest.fail.Exception, match="on purpose"):
            next(steps)
    assert cache.get_seq_length() == decided - 1
    ids = torch.tensor([known[0][:decided]])
    answer = target().generate(ids, cache=cache, do_sample=False, max_new_tokens=4)
    assert tuple(answer[0].tolist()) == known[0][: decided + 4]


# ------------------------------------------------------------------------------------------------- the prompt in chunks


@pytest.mark.parametrize("size", [1, 5, 14, 100])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("cache", [{}, {"cache_implementation": "static"}, FP8], ids=["slot", "static", "fp8"])
def test_a_prompt_in_chunks_is_read_as_by_stock(kind, rows, size, cache):
    model, prompt = target(kind), ROWS[rows]
    if kind == "mistral" and cache:
        return  # refused above
    kwargs = {"prefill_chunk_size": size, "max_new_tokens": NEW, **cache}
    with counted(model) as theirs:
        wanted = run(model, prompt, **kwargs)
    pad = [prompt.columns - len(row) for row in prompt.rows]
    script = Scripted([[*row, *[5] * BEYOND] for row in wanted], "tree")
    with counted(model) as ours:
        assert run(model, prompt, assistant=script, **kwargs) == wanted
    chunks = -(-prompt.columns // size)
    assert ours[:chunks] == theirs[:chunks] == [size] * (chunks - 1) + [prompt.columns - size * (chunks - 1)]
    assert pad[0] >= 0
    assert len(ours) < len(theirs)
    assert script.seen.share("mixed") > 0.5


@pytest.mark.parametrize("rows", ROWS)
def test_what_stock_returns_of_a_prompt_in_chunks_is_returned(rows):
    kwargs = {**ROWS[rows].inputs(), "prefill_chunk_size": 5, "max_new_tokens": NEW, "do_sample": False}
    kwargs |= {"return_dict_in_generate": True, "output_hidden_states": True, "output_logits": True}
    theirs = target().generate(**kwargs)
    ours = target().generate(**kwargs, assistant=Scripted(truth("llama", ROWS[rows])))
    assert torch.equal(ours.sequences, theirs.sequences)
    assert [state.shape for state in ours.hidden_states[0]] == [state.shape for state in theirs.hidden_states[0]]
    torch.testing.assert_close(ours.hidden_states[0][-1], theirs.hidden_states[0][-1], rtol=0, atol=1e-9)
    torch.testing.assert_close(torch.stack(ours.logits), torch.stack(theirs.logits), rtol=0, atol=1e-3)


def test_chunks_may_come_from_a_generation_config():
    config = target().generation_config.__class__(prefill_chunk_size=4, max_new_tokens=NEW, do_sample=False)
    with counted(target()) as widths:
        answer = target().generate(**ONE.inputs(), generation_config=config, assistant=sg.PromptLookup())
    assert widths[:4] == [4, 4, 4, 2]
    assert tuple(answer[0].tolist()) == truth("llama", ONE)[0][: ONE.columns + NEW]


@pytest.mark.parametrize("assistant", [sg.Plain(), sg.PromptLookup(min_ngram=1)], ids=["plain", "lookup"])
def test_a_row_that_ended_early_lies_in_the_caller_s_cache_where_stock_puts_it(assistant):
    """Its last token too, so that one can go on from there with the padding masked."""
    model, prompt = target(), Prompt.random((9, 0), (9, 50))
    inputs, ended = prompt.inputs(), prompt.columns + 5
    eos = int(model.generate(**inputs, do_sample=False, max_new_tokens=20)[0, ended])
    caches = []
    for which in (None, assistant):
        caches.append(DynamicCache(config=model.config))
        kwargs = {"do_sample": False, "cache": caches[-1], **({} if which is None else {"assistant": which})}
        ids = model.generate(**inputs, max_new_tokens=20, eos_token_id=eos, **kwargs)
        assert ids[0, ended] == eos
        assert ids.shape[1] > ended + 2
    for theirs, ours in zip(caches[0].layers, caches[1].layers, strict=True):
        torch.testing.assert_close(ours.keys[0, :, : ended + 1], theirs.keys[0, :, : ended + 1])
        torch.testing.assert_close(ours.keys[1], theirs.keys[1])
