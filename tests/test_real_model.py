"""The main job on a real model: greedy text identical to stock's in float32, in batches and row by row."""

import itertools

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_specgen as sg
from hf_specgen.bench import smollm2
from hf_specgen.bench.prompts import COPYING, FREE

PROMPTS = list((COPYING | FREE).values())
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def smollm() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return smollm2.load()


def chat(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> dict[str, torch.Tensor]:
    turns = [[{"role": "user", "content": prompt}] for prompt in prompts]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True, "padding": True}
    return tokenizer.apply_chat_template(turns, tokenizer_kwargs={"padding_side": "left"}, **options)


@pytest.mark.parametrize("start", [0, 4])
def test_a_batch_of_four_and_its_rows_alone_equal_stock(
    smollm: tuple[PreTrainedModel, PreTrainedTokenizerBase], start: int
) -> None:
    model, tokenizer = smollm
    sg.disable(model)
    prompts = PROMPTS[start : start + 4]
    batch = chat(tokenizer, prompts)
    stock = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    sg.enable(model)
    stats = sg.Stats()
    together = model.generate(
        **batch, max_new_tokens=NEW_TOKENS, do_sample=False, assistant=sg.PromptLookup(), stats=stats
    )
    assert torch.equal(together, stock)
    assert start or stats.accepted, "the prompts that copy must have drafts accepted"
    for row, prompt in enumerate(prompts):
        inputs = chat(tokenizer, [prompt])
        alone = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, assistant=sg.PromptLookup())
        new = alone[0, inputs["input_ids"].shape[1] :]
        assert torch.equal(new, stock[row, -NEW_TOKENS:][: len(new)]), prompt[:60]
    sg.disable(model)


def test_sampled_text_for_a_seed_is_the_same_with_a_drafter_and_without(
    smollm: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = smollm
    sg.enable(model)
    inputs = chat(tokenizer, [COPYING["repeat"]])
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": True, "temperature": 0.7, "seed": 11}
    plain = model.generate(**inputs, assistant=sg.Plain(), **arguments)
    stats = sg.Stats()
    drafted = model.generate(**inputs, assistant=sg.PromptLookup(), stats=stats, **arguments)
    sg.disable(model)
    assert torch.equal(plain, drafted)
    assert stats.accepted


def test_stop_strings_and_the_streamer_end_at_the_same_token(
    smollm: tuple[PreTrainedModel, PreTrainedTokenizerBase],
) -> None:
    model, tokenizer = smollm
    inputs = chat(tokenizer, [COPYING["repeat"]])
    sg.disable(model)
    arguments = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "stop_strings": ["idal"], "tokenizer": tokenizer}
    stock = model.generate(**inputs, **arguments)
    assert stock.shape[1] - inputs["input_ids"].shape[1] < NEW_TOKENS, "the stop string must be met"
    sg.enable(model)
    drafted = model.generate(**inputs, assistant=sg.PromptLookup(), **arguments)
    steps = sg.stream(model, **inputs, assistant=sg.PromptLookup(), **arguments)
    streamed = list(itertools.chain.from_iterable(step.tokens[0] for step in steps))
    sg.disable(model)
    assert torch.equal(drafted, stock)
    assert streamed == stock[0, inputs["input_ids"].shape[1] :].tolist()
