"""Models that count positions by their cache: chains on a cropped cache. And those that no pass over several serves."""

from __future__ import annotations

import functools
from typing import Any

import families
import pytest
import tiny
import torch
from generating import counted
from tiny import CACHES, Prompt, Scripted, run
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen import refusals
from hf_specgen import target as targets
from hf_specgen.indexer import OneByOne

NEW, BEYOND = 36, 16
# Prompts of the lengths that matter to a window of 8 tokens and to a temperature that changes every 4.
ROWS = {
    "before": Prompt.random((3, 0)),
    "at": Prompt.random((7, 1)),
    "past": Prompt.random((20, 3)),
    "ragged": Prompt.random((1, 4), (9, 5), (20, 6)),
}
FEW = ("past", "ragged")

# ALiBi in three ways, a local window counted from the end of the cache, a temperature that follows its length.
COUNTING = ("bloom", "falcon-alibi", "mpt", "gpt_neo", "llama4_text")
Texts = tuple[tuple[int, ...], ...]


def build(family: str) -> PreTrainedModel:
    """A tiny model of a family; of Llama 4 one whose layers without rotary embedding have a steep temperature."""
    with pytest.MonkeyPatch.context() as patch:
        steep = {"floor_scale": 4, "attn_scale": 8.2, "no_rope_layers": [0, 1, 0]}
        patch.setitem(families.CHANGES, "llama4_text", steep)
        return families._built.__wrapped__(family)


@functools.cache
def target(family: str) -> PreTrainedModel:
    return sg.enable(build(family))


@functools.cache
def truth(family: str, prompt: Prompt, mode: str = "greedy") -> Texts:
    """Stock's text, or with sampling that of plain decoding here."""
    if "greedy" in mode:
        return run(build(family), prompt, mode, max_new_tokens=NEW + BEYOND)
    return tiny.truth_of(target(family), prompt, mode, NEW + BEYOND)


def first(texts: Texts, prompt: Prompt, new: int = NEW) -> Texts:
    return tuple(text[: len(ids) + new] for text, ids in zip(texts, prompt.rows, strict=True))


def cell(family: str, prompt: Prompt, mode: str = "greedy", **kwargs: Any) -> Scripted:
    """One text against its reference; the script was partly right in most rounds."""
    known = truth(family, prompt, mode)
    script = Scripted(known, "tree")
    assert run(target(family), prompt, mode, assistant=script, max_new_tokens=NEW, **kwargs) == first(known, prompt)
    assert script.seen.share("mixed") > 0.5
    assert all(script.seen.chains)
    return script


# --------------------------------------------------------------------------------------- positions counted by the cache


@pytest.mark.parametrize("mode", ["greedy", "hash-sampled", pytest.param("penalties-greedy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("family", COUNTING)
def test_the_text_is_stocks_before_at_and_past_where_positions_matter(family, rows, mode):
    cell(family, ROWS[rows], mode)


# What becomes of a static cache: stock itself cannot use it with two of them, and knows of one only.
STATIC = {"llama4_text": "StaticSlidingWindowLayer", "gpt_neo": "takes the empty places of a static cache for tokens"}


@pytest.mark.parametrize("cache", ["dynamic", "static", "static-object"])
@pytest.mark.parametrize("rows", FEW)
@pytest.mark.parametrize("family", COUNTING)
def test_so_it_is_in_a_cache_that_the_caller_chose(family, rows, cache):
    prompt, model = ROWS[rows], target(family)
    kwargs = CACHES[cache](model, prompt.columns + NEW)
    if cache == "dynamic" or family in ("bloom", "mpt"):
        cell(family, prompt, **kwargs)
    elif family in STATIC:
        with counted(model) as passes, pytest.raises(ValueError, match=STATIC[family]):
            run(model, prompt, assistant=sg.Plain(), max_new_tokens=NEW, **kwargs)
        assert passes == []
    else:
        for assistant in None, sg.Plain():
            with pytest.raises((RuntimeError, ValueError), match=r"must match the size|too many values"):
                run(model, prompt, assistant=assistant, max_new_tokens=NEW, **kwargs)


@pytest.mark.parametrize("place", [0, 8])
@pytest.mark.parametrize("rows", FEW)
@pytest.mark.parametrize("family", COUNTING)
def test_rows_end_where_stocks_end(family, rows, place):
    prompt = ROWS[rows]
    known = truth(family, prompt)
    eos = [text[len(ids) + place + 3 * row] for row, (text, ids) in enumerate(zip(known, prompt.rows, strict=True))]
    kwargs = {"max_new_tokens": NEW, "eos_token_id": eos}
    script = Scripted(known, spoiled=0.1)
    assert run(target(family), prompt, assistant=script, **kwargs) == run(target(family), prompt, **kwargs)


@pytest.mark.parametrize("rows", FEW)
@pytest.mark.parametrize("family", COUNTING)
def test_a_conversation_goes_on_from_the_cache_of_the_first_turn(family, rows):
    prompt, model, answers = ROWS[rows], target(family), []
    said = torch.tensor([[7, 8, 9]] * prompt.batch)
    for drafted in False, True:
        kwargs = {"do_sample": False, "max_new_tokens": NEW, "return_dict_in_generate": True}
        script = Scripted(truth(family, prompt)) if drafted else None
        turn = model.generate(**prompt.inputs(), **kwargs, assistant=script)
        ids = torch.cat([turn.sequences, said], dim=1)
        mask = torch.nn.functional.pad(prompt.inputs()["attention_mask"], (0, NEW + 3), value=1)
        if drafted:
            pads = (mask == 0).sum(1).tolist()
            rows_of = [[*row[pad:], *text] for row, pad, text in zip(ids.tolist(), pads, answers[0], strict=True)]
            script = Scripted(rows_of)
        turn = model.generate(ids, attention_mask=mask, cache=turn.cache, **kwargs, assistant=script)
        answers.append(turn.sequences[:, -NEW:].tolist())
    assert answers[0] == answers[1]
    assert script.seen.share("mixed") > 0.5


@pytest.mark.parametrize("family", COUNTING)
def test_a_draft_model_drafts_for_them_and_none_of_them_drafts(family):
    stats, prompt = sg.Stats(), ROWS["past"]
    known = truth(family, prompt)
    small = tiny.llama(vocab_size=tiny.VOCAB)
    texts = run(target(family), prompt, assistant=small, max_new_tokens=NEW, stats=stats)
    assert texts == first(known, prompt)
    assert stats.drafted > 0
    with counted(target(family)) as passes, pytest.raises(ValueError, match="cannot draft: its cache cannot be rolled"):
        run(sg.enable(small), prompt, assistant=target(family), max_new_tokens=NEW)
    assert passes == []


@pytest.mark.parametrize("family", COUNTING)
def test_on_a_cache_of_rows_of_their_own_length_they_would_be_wrong(family, monkeypatch):
    """Why they are cropped in lockstep: with position ids and a mask of their own alone, a text is another or none."""
    prompt, known = ROWS["ragged"], truth(family, ROWS["ragged"])
    monkeypatch.setattr(targets, "why_cropped", lambda model, prompt: None)
    try:
        texts = run(target(family), prompt, assistant=Scripted(known, "tree"), max_new_tokens=NEW)
    except (ValueError, RuntimeError):
        return
    assert texts != first(known, prompt)


# -------------------------------------------------------------------------------------- what stays refused, by its name

REFUSED = {
    "deepseek_v4": "its cache compresses windows of tokens, and crop",
    "cpmant": "the tokens of a pass all see one another",
    "openai-gpt": "it keeps no cache and reads the whole text",
    "prophetnet-causal": "its decoder takes one token a pass",
    "prophetnet": "its decoder takes one token a pass",
    "xlm": "it appends a mask token to each pass",
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_no_pass_over_several_tokens_serves_is_refused_by_name(family):
    """Reports 10 and 17."""
    model = sg.enable(families.build(family))
    inputs = families.inputs(family, ROWS["past"])
    message = rf"{type(model).__name__} \(.*\) cannot check several tokens in one pass: {REFUSED[family]}"
    with counted(model) as passes, pytest.raises(ValueError, match=message):
        model.generate(**inputs, assistant=sg.PromptLookup(), max_new_tokens=NEW)
    assert passes == []


@pytest.mark.parametrize("family", REFUSED)
def test_and_rightly(family, monkeypatch):
    """Were it served on a cropped cache, its text would be another or none. If this fails, serve it."""
    prompt = ROWS["past"]
    inputs = {**families.inputs(family, prompt), "max_new_tokens": NEW, "do_sample": False}
    model = families.build(family)
    known = model.generate(**inputs)
    monkeypatch.setattr(refusals, "OWN_STATE", {})
    script = Scripted([[*known[0].tolist(), *[5] * BEYOND]])
    try:
        answer = sg.enable(model).generate(**inputs, assistant=script)
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return
    assert answer.tolist() != known.tolist()


# ----------------------------------------------------------------------- attention to what an indexer takes the best of

INDEXED = ("deepseek_v32", "glm_moe_dsa", "hy_v4", "axk2", "dots3_note_text")


@functools.cache
def indexed(family: str, heads: int) -> PreTrainedModel:
    """With few heads most scores are exactly 0, and ties decide; the best 8 are taken of up to 56 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.SIZES, "index_n_heads", heads)
        model = families._built.__wrapped__(family)
    assert model.config.index_n_heads == heads
    assert model.config.index_topk == 8
    return sg.enable(model)


@functools.cache
def indexed_truth(family: str, heads: int, prompt: Prompt, mode: str) -> Texts:
    if "greedy" in mode:
        return run(indexed(family, heads), prompt, mode, max_new_tokens=NEW + BEYOND)
    return tiny.truth_of(indexed(family, heads), prompt, mode, NEW + BEYOND)


@pytest.mark.parametrize("heads", [2, *(pytest.param(heads, marks=pytest.mark.slow) for heads in (1, 32))])
@pytest.mark.parametrize("rows", FEW)
@pytest.mark.parametrize("mode", ["greedy", pytest.param("hash-sampled", marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", INDEXED)
def test_an_indexer_chooses_as_in_passes_over_one_token(family, mode, rows, heads):
    prompt, known = ROWS[rows], indexed_truth(family, heads, ROWS[rows], mode)
    script = Scripted(known, "tree")
    texts = run(indexed(family, heads), prompt, mode, assistant=script, max_new_tokens=NEW)
    assert texts == first(known, prompt)
    assert script.seen.share("mixed") > 0.5
    assert all(script.seen.chains)


@pytest.mark.parametrize("cache", ["dynamic", "static", "static-object"])
@pytest.mark.parametrize("rows", FEW)
@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_so_it_does_in_a_cache_that_the_caller_chose(family, rows, cache):
    model, prompt = indexed(family, 2), ROWS[rows]
    arguments = [CACHES[cache](model, prompt.columns + NEW) for _ in range(2)]
    known = run(model, prompt, max_new_tokens=NEW, **arguments[0])
    script = Scripted([[*text, *[5] * BEYOND] for text in known])
    assert run(model, prompt, assistant=script, max_new_tokens=NEW, **arguments[1]) == known
    assert script.seen.share("mixed") > 0.5


@pytest.mark.parametrize("family", INDEXED)
def test_left_to_itself_it_would_choose_otherwise(family, monkeypatch):
    """Ties do decide here, so that the tests above can fail."""
    prompt, known = ROWS["ragged"], indexed_truth(family, 2, ROWS["ragged"], "greedy")
    monkeypatch.setattr(targets, "OneByOne", lambda *shape: targets.nullcontext())
    assert run(indexed(family, 2), prompt, assistant=Scripted(known), max_new_tokens=NEW) != first(known, prompt)


@pytest.mark.parametrize("k", [3, 8, 12])
@pytest.mark.parametrize("width", [2, 5])
def test_what_is_chosen_is_what_a_shorter_row_of_scores_gives(width, k):
    scores = torch.randn(2, width, 12).relu()
    scores[..., 4:9] = 0
    columns = 12 - width + 1 + torch.arange(width)
    scores.masked_fill_(torch.arange(12) >= columns.view(-1, 1), -torch.inf)
    with OneByOne(2, width, 12):
        best = scores.topk(k, dim=-1)
        other = torch.topk(scores[:, :1], 2)  # a tensor of another shape
    for place, seen in enumerate(columns.tolist()):
        alone = scores[:, place : place + 1, :seen].topk(min(k, seen), dim=-1).indices
        assert torch.equal(
            best.indices[:, place : place + 1].sort().values[..., : alone.shape[-1]], alone.sort().values
        )
    assert torch.equal(best.values, scores.gather(-1, best.indices))
    assert torch.equal(other.indices, scores[:, :1].topk(2).indices)


def test_other_models_are_not_watched_over():
    """Every torch function would come by."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(targets, "OneByOne", lambda *shape: seen.append(shape) or targets.nullcontext())
        run(sg.enable(tiny.llama()), tiny.ONE, assistant=Scripted(((5,) * 64,)), max_new_tokens=8)
        assert seen == []
        run(indexed("deepseek_v32", 2), tiny.ONE, assistant=Scripted(((5,) * 64,)), max_new_tokens=8)
    assert seen
    assert all(shape[1] > 1 for shape in seen)
