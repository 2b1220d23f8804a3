"""What a drafter may get wrong, and what a call may ask for at its edges, without a wrong text."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from accelerate import cpu_offload
from peft import PromptTuningConfig, get_peft_model
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
)

import hf_specgen as sg
from hf_specgen.draft import Context, Draft, Limit, Needs, Request

PROMPT = torch.tensor([[10, 11, 12, 13, 10, 11]])
NEW = 24


@dataclass(frozen=True)
class Shaped:
    """Drafts the five tokens that will come, in whatever shape a test makes of them."""

    text: list[int]
    shape: Callable[[Tensor], Any]
    num_assistant_tokens: int = 5

    needs = Needs()

    def start(self, target: Any, request: Request) -> "Shaped":
        return self

    def propose(self, context: Context, limit: Limit) -> Any:
        coming = [*self.text[len(context.ids[0]) :], *[1] * 5][:5]
        return self.shape(torch.tensor([coming]))


def text(model: LlamaForCausalLM, **arguments: Any) -> list[int]:
    output = sg.enable(model).generate(PROMPT, max_new_tokens=NEW, **arguments)
    return output[0].tolist()


BROKEN = {
    "children before their parents": lambda t: Draft(t.flip(1), torch.tensor([[2, 3, 4, 5, 0]])),
    "a cycle": lambda t: Draft(t, torch.tensor([[0, 3, 2, 3, 4]])),
    "nodes that are their own parents": lambda t: Draft(torch.arange(60)[None], torch.arange(1, 61)[None]),
    "parents that do not exist": lambda t: Draft(t, torch.tensor([[0, 1, 2, 3, 99]])),
    "siblings called a chain": lambda t: Draft(t, torch.zeros(1, 5).long(), is_chain=True),
    "tokens out of the vocabulary": lambda t: Draft(t.where(torch.arange(5) != 1, 10**6), torch.arange(5)[None]),
    "negative tokens": lambda t: Draft(t.where(torch.arange(5) != 1, -7), torch.arange(5)[None], is_chain=True),
}


@pytest.mark.parametrize("broken", BROKEN)
@pytest.mark.parametrize("walk", ["at once", "by step"])
def test_a_draft_that_breaks_the_rules_changes_no_text(model: LlamaForCausalLM, broken: str, walk: str) -> None:
    arguments = {} if walk == "at once" else {"repetition_penalty": 1.1}
    plain = text(model, assistant=sg.Plain(), **arguments)
    assert text(model, assistant=Shaped(plain, BROKEN[broken]), **arguments) == plain


@pytest.mark.parametrize(
    "answer",
    [
        lambda t: None,
        lambda t: Draft(t.float(), torch.arange(5)[None]),
        lambda t: Draft(t, torch.arange(4)[None]),
        lambda t: Draft(t.repeat(2, 1), torch.arange(5).repeat(2, 1)),
    ],
    ids=["none", "floats", "unequal shapes", "too many rows"],
)
def test_an_answer_that_is_no_draft_is_refused_by_the_name_of_its_session(
    model: LlamaForCausalLM, answer: Callable[[Tensor], Any]
) -> None:
    with pytest.raises(ValueError, match="Shaped proposed"):
        text(model, assistant=Shaped([0] * 40, answer))


class Nothing(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf)


def test_sampling_from_nothing_raises_as_in_stock(model: LlamaForCausalLM) -> None:
    sample = {"do_sample": True, "seed": 1, "assistant": sg.Plain()}
    with pytest.raises(ValueError, match="cannot sample"):
        text(model, logits_processor=LogitsProcessorList([Nothing()]), **sample)
    model.lm_head.weight.data.fill_(float("nan"))
    for acceptance in ("matching", "rejection", "block"):
        with pytest.raises(ValueError, match="cannot sample"):
            text(model, acceptance=acceptance, **sample)


def test_inputs_carried_on_in_a_models_own_way_are_refused() -> None:
    class Own(LlamaForCausalLM):
        def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return super()._update_model_kwargs_for_generation(*args, **kwargs)

    model = tiny.llama()
    model.__class__ = Own
    with pytest.raises(ValueError, match=r"Own carries inputs"):
        text(model, assistant=sg.Plain())


@pytest.mark.parametrize("tokens", [0, 65, 500])
@pytest.mark.parametrize("branches", [1, 3, 100])
def test_any_draft_length_and_any_number_of_branches(model: LlamaForCausalLM, tokens: int, branches: int) -> None:
    plain = text(model, assistant=sg.Plain())
    drafter = sg.DraftModel(tiny.llama(), branches=branches)
    assert text(model, assistant=drafter, num_assistant_tokens=tokens) == plain


def test_a_mask_of_floats_counts_as_one_of_integers(model: LlamaForCausalLM) -> None:
    inputs = tiny.RAGGED.inputs()
    sg.enable(model)
    arguments = {"do_sample": True, "seed": 1, "max_new_tokens": 6, "assistant": sg.Plain()}
    texts = [
        model.generate(inputs["input_ids"], attention_mask=mask, **arguments, **extra)
        for mask in (inputs["attention_mask"], inputs["attention_mask"].float())
        for extra in ({}, {"cache": DynamicCache(config=model.config)})
    ]
    assert all(torch.equal(one, texts[0]) for one in texts)


def test_a_cache_that_was_lent_is_left_as_it_came(windowed: Any) -> None:
    sg.enable(windowed)
    cache = DynamicCache(config=windowed.config)
    windowed.generate(PROMPT, max_new_tokens=NEW, do_sample=False, assistant=sg.PromptLookup(1), cache=cache)
    assert not any(layer.record_past for layer in cache.layers)
    assert all(layer.keys.shape[-2] == 7 for layer in cache.layers)
    steps = sg.stream(
        windowed,
        PROMPT,
        max_new_tokens=NEW,
        assistant=sg.PromptLookup(1),
        cache=(abandoned := DynamicCache(config=windowed.config)),
    )
    next(steps), next(steps)
    steps.close()
    assert not any(layer.record_past for layer in abandoned.layers)


class Fails(LogitsProcessor):
    """Raises at the call that is told."""

    def __init__(self, at: int) -> None:
        self.calls, self.at = 0, at

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise RuntimeError("on purpose")
        return scores


@pytest.mark.parametrize("at", range(1, 12))
def test_an_error_in_a_round_takes_back_what_the_round_wrote(model: LlamaForCausalLM, at: int) -> None:
    plain = text(model, assistant=sg.Plain())
    cache = DynamicCache(config=model.config)
    drafter = Shaped(plain, lambda t: Draft(t, torch.arange(5)[None], is_chain=True))
    steps = sg.stream(
        model,
        PROMPT,
        max_new_tokens=NEW,
        assistant=drafter,
        cache=cache,
        logits_processor=LogitsProcessorList([Fails(at)]),
    )
    done: list[sg.Step] = []
    with pytest.raises(RuntimeError, match="on purpose"):
        done.extend(steps)
    decided = PROMPT.shape[1] + sum(len(step.tokens[0]) for step in done)
    assert cache.get_seq_length() == max(PROMPT.shape[1], decided - 1)
    # What was decided goes on from this cache as if nothing had happened.
    known = torch.tensor([plain[: max(decided, PROMPT.shape[1] + 1)]])
    again = model.generate(known, max_new_tokens=4, cache=cache, assistant=sg.Plain(), do_sample=False)
    assert again[0].tolist() == plain[: known.shape[1] + 4]


def test_narrow_ids_come_back_wide_as_in_stock(model: LlamaForCausalLM) -> None:
    stock = model.generate(PROMPT.int(), max_new_tokens=4, do_sample=False)
    ours = sg.enable(model).generate(PROMPT.int(), max_new_tokens=4, do_sample=False, assistant=sg.Plain())
    assert ours.dtype == stock.dtype
    assert torch.equal(ours, stock)


def test_arguments_that_say_nothing_say_nothing(model: LlamaForCausalLM) -> None:
    plain = text(model, assistant=sg.Plain())
    assert text(model, assistant=sg.Plain(), custom_generate=None, acceptance=None, streamer=None) == plain
    steps = sg.stream(model, PROMPT, max_new_tokens=NEW, assistant=sg.Plain(), streamer=None)
    assert [token for step in steps for token in step.tokens[0]] == plain[PROMPT.shape[1] :]
    with pytest.raises(ValueError, match="neither an integer nor a list"):
        text(model, assistant=sg.Plain(), do_sample=True, seed=1.5)


@pytest.mark.parametrize("new", [9, 10, 11])
def test_report_110_a_row_that_ended_at_the_last_position_waits_there(new: int) -> None:
    """Rows of 14 and 4 tokens in a model of 24 positions; the long one is drafted right and ends long before."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24, "initializer_range": 0.6}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).double().eval()
    ids = torch.randint(3, 96, (2, 14))
    mask = torch.ones_like(ids)
    mask[1, :10] = 0
    arguments = {"attention_mask": mask, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    stock = model.generate(ids, **arguments)
    sg.enable(model)

    @dataclass(frozen=True)
    class FirstRow(Shaped):
        def propose(self, context: Context, limit: Limit) -> Draft:
            coming = self.text[len(context.ids[0]) :][: limit.depth[0]]
            return Draft.ragged([coming, []])

    drafter = FirstRow(stock[0].tolist(), lambda t: t)
    for extra in ({}, {"return_dict_in_generate": True}):
        output = model.generate(ids, assistant=drafter, **arguments, **extra)
        assert torch.equal(output["sequences"] if extra else output, stock)


@pytest.mark.parametrize("kind", ["static"])
def test_report_13_a_cache_that_only_the_models_defaults_ask_for_gives_way(windowed: Any, kind: str) -> None:
    windowed.generation_config.cache_implementation = kind
    stock = windowed.generate(PROMPT, max_new_tokens=NEW, do_sample=False)
    sg.enable(windowed)
    drafted = windowed.generate(PROMPT, max_new_tokens=NEW, do_sample=False, assistant=sg.PromptLookup(1))
    assert torch.equal(drafted, stock)
    windowed.generation_config.cache_implementation = None
    with pytest.raises(ValueError, match="StaticSlidingWindowLayer"):
        windowed.generate(PROMPT, max_new_tokens=NEW, assistant=sg.PromptLookup(1), cache_implementation="static")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it by its old name
def test_prompt_learning_is_refused_by_name() -> None:
    inner = tiny.llama().float()
    wrapped = sg.enable(get_peft_model(inner, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)))
    with pytest.raises(ValueError, match="PEFT prompt learning"):
        wrapped.generate(input_ids=PROMPT, max_new_tokens=5, assistant=sg.PromptLookup(1))


def test_a_target_whose_weights_are_offloaded(model: LlamaForCausalLM) -> None:
    plain = text(model, assistant=sg.Plain(), do_sample=False)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert text(model, assistant=sg.PromptLookup(1), do_sample=False) == plain
