"""What `generate` returns, and from what it can go on: everything as stock returns it."""

import pytest
import tiny
import torch
from generating import BATCHES, DRAFTERS, SHAPES, counted, drafter, ends, said, same_as_stock, truth, whole
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM, GPT2Config, GPT2LMHeadModel

import hf_specgen as sg

DICT = {"return_dict_in_generate": True, "do_sample": False}
EVERYTHING = {**DICT, "output_scores": True, "output_logits": True, "output_hidden_states": True}


@DRAFTERS
@BATCHES
@pytest.mark.parametrize("processors", [{}, {"repetition_penalty": 1.1}], ids=["at once", "by step"])
def test_scores_logits_and_hidden_states_are_one_entry_a_token_and_equal_stock(model, prompt, kind, processors):
    """Reports 62 and 64. Rows end at different times; after its end a row's entries mean nothing."""
    eos = said(model, prompt)[0][8]
    kwargs = {**prompt.inputs(), **EVERYTHING, "max_new_tokens": 20, "eos_token_id": eos, **processors}
    expected = model.generate(**kwargs)
    rows = expected.sequences[:, prompt.columns :].tolist()
    assistant = drafter(kind, model, whole(prompt, rows))
    actual = sg.enable(model).generate(**kwargs, assistant=assistant)
    assert torch.equal(actual.sequences, expected.sequences)
    for field in ("scores", "logits", "hidden_states"):
        assert len(getattr(actual, field)) == len(getattr(expected, field)) == len(rows[0])
    for row, end in enumerate(ends(rows, eos)):
        for step in range(end):
            for field in ("scores", "logits"):
                mine, theirs = (getattr(output, field)[step] for output in (actual, expected))
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
                torch.testing.assert_close(mine[row], theirs[row], rtol=1e-5, atol=1e-4)
            for mine, theirs in zip(actual.hidden_states[step], expected.hidden_states[step], strict=True):
                assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
                torch.testing.assert_close(mine[row], theirs[row])


def test_what_was_not_asked_for_is_none_as_in_stock(model):
    kwargs = {**tiny.ONE.inputs(), **DICT, "max_new_tokens": 6}
    expected, actual = model.generate(**kwargs), sg.enable(model).generate(**kwargs, assistant=sg.Plain())
    assert set(actual) == {*expected, "speculation"}
    assert (actual.scores, actual.logits, actual.hidden_states, actual.attentions) == (None,) * 4


def test_without_a_dict_a_tensor_comes_back_whatever_else_is_asked_for(model):
    same_as_stock(model, sg.Plain(), **tiny.ONE.inputs(), max_new_tokens=6, output_scores=True)


@SHAPES
@BATCHES
def test_statistics_count_what_was_returned(model, prompt, shape):
    rows = said(model, prompt)
    eos = rows[-1][17]
    kwargs = {**prompt.inputs(), **DICT, "max_new_tokens": 24, "eos_token_id": eos}
    output = sg.enable(model).generate(**kwargs, assistant=drafter(shape, model, whole(prompt, rows)))
    stats = output.speculation
    assert isinstance(stats, sg.Stats)
    assert (stats.calls, stats.first_tokens) == (1, prompt.batch)
    assert stats.tokens == sum(ends(output.sequences[:, prompt.columns :].tolist(), eos))
    assert 0 < stats.accepted < stats.drafted
    assert sum(stats.accepted_histogram.values()) == stats.row_rounds
    assert sum(kept * rounds for kept, rounds in stats.accepted_histogram.items()) == stats.accepted
    # Every row-round ends with a token of the target's own, but for a row's last where the end itself was drafted.
    own = stats.tokens - stats.first_tokens - stats.accepted
    assert stats.row_rounds - prompt.batch <= own <= stats.row_rounds
    assert stats.mean_accepted_tokens == (stats.tokens - prompt.batch) / stats.row_rounds


def test_an_end_inside_a_block_is_where_counting_stops(model):
    """Report 37: five tokens drafted, the third is the end; three count, not six."""
    rows = said(model, tiny.ONE)
    script = tiny.Scripted(whole(tiny.ONE, rows), spoiled=0, num_assistant_tokens=5)
    stats = sg.Stats()
    kwargs = {**tiny.ONE.inputs(), "max_new_tokens": 12, "do_sample": False, "eos_token_id": rows[0][3]}
    sg.enable(model).generate(**kwargs, assistant=script, stats=stats)
    assert (stats.rounds, stats.drafted, stats.accepted, stats.tokens) == (1, 5, 3, 4)


def test_statistics_passed_in_sum_several_calls(model):
    stats = sg.Stats()
    kwargs = {**tiny.RAGGED.inputs(), **DICT, "max_new_tokens": 5, "assistant": sg.Plain(), "stats": stats}
    for calls in (1, 2):
        assert sg.enable(model).generate(**kwargs).speculation is stats
        assert (stats.calls, stats.tokens, stats.rounds) == (calls, 15 * calls, 4 * calls)
        assert stats.mean_accepted_tokens == 1


def second_turn(sequences, mask, eos):
    """Ids and mask of a next turn behind what was generated; the padding behind a row's end is masked."""
    answers = sequences[:, mask.shape[1] :]
    kept = [[1] * end + [0] * (answers.shape[1] - end) for end in ends(answers.tolist(), eos)]
    turn = tiny.Prompt.random(*[(4, 11 + row) for row in range(len(sequences))]).inputs()
    return {
        "input_ids": torch.cat([sequences, turn["input_ids"]], dim=1),
        "attention_mask": torch.cat([mask, torch.tensor(kept), turn["attention_mask"]], dim=1),
    }


LEVEL = tiny.Prompt.random((9, 1), (9, 2), (9, 3))


@pytest.mark.parametrize("kind", ["plain", "tree", "model"])
@pytest.mark.parametrize("prompt", [tiny.ONE, LEVEL, tiny.RAGGED], ids=["one", "level", "ragged"])
@pytest.mark.parametrize("window", [None, 8], ids=["full", "sliding"])
def test_the_returned_cache_can_be_gone_on_with(prompt, kind, window):
    """A second turn on the cache of the first, decoded by stock and by us: what stock makes of its own cache.

    The rows of the first turn end at different times, one of them before all that a sliding layer keeps.
    """
    model = tiny.llama() if window is None else tiny.mistral(window=window)
    eos = said(model, prompt)[0][9] if prompt.batch == 1 else said(model, prompt)[1][2]
    kwargs = {**DICT, "max_new_tokens": 14, "eos_token_id": eos}
    inputs = prompt.inputs()
    first = model.generate(**inputs, **kwargs)
    turn = second_turn(first.sequences, inputs["attention_mask"], eos)
    second = model.generate(**turn, **kwargs, cache=first.cache)
    texts = [truth(first.sequences, inputs["attention_mask"]), truth(second.sequences, turn["attention_mask"])]
    sg.enable(model)
    for assisted_again in (False, True):
        mine = model.generate(**inputs, **kwargs, assistant=drafter(kind, tiny.llama(), texts[0]))
        assert torch.equal(mine.sequences, first.sequences)
        assert mine.cache.get_seq_length() == first.sequences.shape[1] - 1
        assistant = drafter(kind, tiny.llama(), texts[1]) if assisted_again else None
        again = model.generate(**turn, **kwargs, cache=mine.cache, assistant=assistant)
        assert torch.equal(again.sequences, second.sequences)
        assert again.cache is mine.cache
        assert again.cache.get_seq_length() == second.sequences.shape[1] - 1


def test_the_returned_cache_holds_what_stock_s_holds(model):
    inputs = tiny.RAGGED.inputs()
    kwargs = {**inputs, **DICT, "max_new_tokens": 9}
    expected = model.generate(**kwargs)
    script = drafter("tree", model, truth(expected.sequences, inputs["attention_mask"]))
    actual = sg.enable(model).generate(**kwargs, assistant=script)
    assert type(actual.cache) is DynamicCache
    real = torch.cat([inputs["attention_mask"], torch.ones(3, 8)], dim=1).bool()
    for mine, theirs in zip(actual.cache.layers, expected.cache.layers, strict=True):
        for tensor, reference in ((mine.keys, theirs.keys), (mine.values, theirs.values)):
            assert tensor.shape == reference.shape
            torch.testing.assert_close(tensor.transpose(1, 2)[real], reference.transpose(1, 2)[real])


def filled(model, inputs, columns):
    """A cache that holds the first columns of a prompt."""
    cache = DynamicCache(config=model.config)
    mask = inputs["attention_mask"][:, :columns]
    with torch.no_grad():
        model(
            inputs["input_ids"][:, :columns],
            attention_mask=mask,
            position_ids=(mask.cumsum(1) - 1).clamp(min=0),
            cache=cache,
        )
    return cache


SIX = tiny.Prompt.random((11, 5), (9, 6), (8, 7))


@DRAFTERS
@pytest.mark.parametrize("prompt", [tiny.ONE, SIX], ids=["one", "ragged"])
@pytest.mark.parametrize("whole_prompt", [True, False], ids=["full ids", "new ids only"])
def test_continuing_from_a_filled_cache_equals_stock(model, prompt, kind, whole_prompt):
    """Report 14: the drafter has a cache of its own, whatever the target's holds."""
    inputs = prompt.inputs()
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    shown = ids if whole_prompt else ids[:, 8:]
    kwargs = {"inputs": shown, "attention_mask": mask, "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**kwargs, cache=filled(model, inputs, 8))
    assert expected[:, -16:].tolist() == [row[:16] for row in said(model, prompt)]
    cache = filled(model, inputs, 8)
    assistant = drafter(kind, model, truth(expected, mask[:, -shown.shape[1] :]))
    actual = sg.enable(model).generate(**kwargs, cache=cache, assistant=assistant)
    assert torch.equal(actual, expected)
    assert cache.get_seq_length() == prompt.columns + 16 - 1


@DRAFTERS
@BATCHES
def test_an_empty_cache_that_was_passed_in_is_filled_and_returned(model, prompt, kind):
    rows = said(model, prompt, 12)
    cache = DynamicCache(config=model.config)
    kwargs = {**prompt.inputs(), **DICT, "max_new_tokens": 12, "cache": cache}
    actual = sg.enable(model).generate(**kwargs, assistant=drafter(kind, model, whole(prompt, rows)))
    assert actual.sequences[:, prompt.columns :].tolist() == rows
    assert actual.cache is cache
    assert cache.get_seq_length() == prompt.columns + 12 - 1


@pytest.mark.parametrize("kind", ["plain", "chain", "lookup"])
def test_a_cache_kind_that_the_model_itself_asks_for_is_no_obstacle(kind):
    """Report 13: a kind in the model's own generation config is no choice of the user's."""
    sizes = {**tiny.llama().config.to_dict(), "sliding_window": 64, "head_dim": 8, "query_pre_attn_scalar": 8}
    for key in ("model_type", "architectures", "rope_parameters", "layer_types"):
        sizes.pop(key, None)
    model = tiny.sharpen(Gemma2ForCausalLM(Gemma2Config(**sizes)))
    model.generation_config.cache_implementation = "static"
    script = drafter(kind, model, whole(tiny.ONE, said(model, tiny.ONE)))
    same_as_stock(model, script, **tiny.ONE.inputs(), max_new_tokens=12)


@DRAFTERS
@BATCHES
@pytest.mark.parametrize("with_ids", [False, True], ids=["embeds alone", "with ids"])
def test_inputs_embeds_equal_stock(model, prompt, kind, with_ids):
    inputs, rows = prompt.inputs(), said(model, prompt, 15)
    ids = inputs.pop("input_ids")
    kwargs = {**inputs, "inputs_embeds": model.get_input_embeddings()(ids).detach(), "max_new_tokens": 15}
    script = whole(prompt, rows) if with_ids else rows
    if with_ids:
        kwargs["input_ids"] = ids
    answer = same_as_stock(model, drafter(kind, model, script), **kwargs)
    assert answer[:, -15:].tolist() == rows


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("limit", [{"max_new_tokens": 5}, {"max_length": 18}, {}], ids=["new", "length", "none"])
@pytest.mark.parametrize("with_ids", [False, True], ids=["embeds alone", "with ids"])
def test_inputs_embeds_are_gone_on_with_as_long_as_stock_does(model, limit, with_ids):
    ids = tiny.ONE.inputs()["input_ids"]
    kwargs = {"inputs_embeds": model.get_input_embeddings()(ids).detach(), **limit}
    if with_ids:
        kwargs["input_ids"] = ids
    same_as_stock(model, sg.PromptLookup(), **kwargs)


@DRAFTERS
@BATCHES
def test_several_returned_sequences_equal_plain_and_differ_from_one_another(model, prompt, kind):
    kwargs = {**prompt.inputs(), "max_new_tokens": 16, "do_sample": True, "temperature": 4.0}
    kwargs |= {"num_return_sequences": 3, "seed": 5}
    expected = sg.enable(model).generate(**kwargs, assistant=sg.Plain())
    assert len({tuple(row) for row in expected.tolist()}) == len(expected) == 3 * prompt.batch
    mask = prompt.inputs()["attention_mask"].repeat_interleave(3, dim=0)
    assert torch.equal(model.generate(**kwargs, assistant=drafter(kind, model, truth(expected, mask))), expected)


def gpt2():
    config = GPT2Config(
        vocab_size=tiny.VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=256,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(3)
    model = GPT2LMHeadModel(config).double().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
                weight.mul_(8)
    return model


@DRAFTERS
@BATCHES
def test_token_types_go_on_as_in_stock(prompt, kind):
    """Report 68."""
    model, inputs = gpt2(), prompt.inputs()
    types = torch.arange(prompt.columns).expand_as(inputs["input_ids"]) % 3
    kwargs = {**inputs, "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**kwargs, token_type_ids=types)
    assert not torch.equal(expected, model.generate(**kwargs, token_type_ids=torch.zeros_like(types)))
    assistant = drafter(kind, tiny.llama(), truth(expected, inputs["attention_mask"]))
    actual = sg.enable(model).generate(**kwargs, token_type_ids=types, assistant=assistant)
    assert torch.equal(actual, expected)


@DRAFTERS
@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_shortest_prompts(model, length, kind):
    """Report 1."""
    prompt = tiny.Prompt.random((length, 4))
    script = whole(prompt, said(model, prompt, 30))
    same_as_stock(model, drafter(kind, model, script), **prompt.inputs(), max_new_tokens=30)


@pytest.mark.parametrize("mask", ["none", "ones"])
def test_no_mask_and_a_mask_of_ones_are_the_same(model, mask):
    """Report 23; left padding is in nearly every other test."""
    rows, inputs = said(model, tiny.ONE, 20), tiny.ONE.inputs()
    if mask == "none":
        del inputs["attention_mask"]
    script = drafter("tree", model, whole(tiny.ONE, rows))
    answer = same_as_stock(model, script, **inputs, max_new_tokens=20)
    assert answer[:, tiny.ONE.columns :].tolist() == rows


@BATCHES
def test_a_prompt_in_chunks_is_the_same_prompt(model, prompt):
    script = drafter("chain", model, whole(prompt, said(model, prompt)))
    with counted(model) as widths:
        same_as_stock(model, script, **prompt.inputs(), max_new_tokens=12, prefill_chunk_size=10)
    assert widths[0] == 10


@BATCHES
def test_positions_that_the_caller_chose_go_on_from_there(model, prompt):
    inputs = prompt.inputs()
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0) * 2 + 3
    kwargs = {**inputs, "max_new_tokens": 14, "position_ids": positions}
    expected = model.generate(**kwargs, do_sample=False)
    assert expected[:, prompt.columns :].tolist() != [row[:14] for row in said(model, prompt)]
    same_as_stock(model, drafter("tree", model, truth(expected, inputs["attention_mask"])), **kwargs)
