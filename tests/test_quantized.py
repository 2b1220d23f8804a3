"""Quantized weights: where they are only unpacked the text is stock's; where a pass rounds its inputs, near-ties turn.

`docs/exactness.md` says which are which.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import bitsandbytes
import peft
import pytest
import tiny
import torch
from generating import counted
from tiny import ONE, RAGGED, Prompt, Scripted, run
from transformers import BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel, QuantoConfig

import hf_specgen as sg

NEW, BEYOND = 32, 16
ROWS = {"one": ONE, "ragged": RAGGED}

# What unpacks its weights in every pass, and the layers that do it. With llm_int8_threshold=0 every token is rounded by
# itself, whatever stands beside it in the pass.
UNPACKED: dict[str, tuple[Callable[[], Any], str]] = {
    "nf4": (lambda: bits4("nf4"), "Linear4bit"),
    "nf4 twice": (lambda: bits4("nf4", bnb_4bit_use_double_quant=True), "Linear4bit"),
    "fp4": (lambda: bits4("fp4"), "Linear4bit"),
    "int8 alone": (lambda: bits8(0.0), "Linear8bitLt"),
    "quanto": (lambda: QuantoConfig(weights="int8"), "QLinear"),
}
BITSANDBYTES = [kind for kind in UNPACKED if "quanto" not in kind]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    """bitsandbytes logs for every pass that it casts float32 to float16 before it makes int8 of it."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)


def bits4(kind: str, compute: torch.dtype = torch.float32, **more: Any) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type=kind, bnb_4bit_compute_dtype=compute, **more)


def bits8(threshold: float) -> BitsAndBytesConfig:
    return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=threshold)


@functools.cache
def checkpoint(sharp: bool = True) -> str:
    """A folder with a tiny Llama in float32, wide enough for blocks of 64 weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = LlamaForCausalLM(LlamaConfig(**tiny._sizes(hidden_size=64, intermediate_size=128)))
    if sharp:
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(6 if name.endswith("_proj.weight") else 25 if name == "lm_head.weight" else 1)
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    return folder


def load(config: Any = None, sharp: bool = True, as_it_comes: bool = False) -> PreTrainedModel:
    """The checkpoint, quantized by a config.

    Args:
        config: for transformers; None leaves the weights as they are.
        sharp: see `checkpoint`.
        as_it_comes: let bitsandbytes compute 4-bit layers in bfloat16 where the CPU can, whatever the config says.
    """
    kwargs = {} if config is None else {"quantization_config": config}
    model = LlamaForCausalLM.from_pretrained(checkpoint(sharp), dtype=torch.float32, **kwargs).eval()
    for module in model.modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit) and not as_it_comes:
            module.support_avx512bf16_for_cpu = False
    return model


@functools.cache
def target(kind: str) -> PreTrainedModel:
    config, layer = UNPACKED[kind]
    model = load(config())
    assert type(model.model.layers[0].mlp.up_proj).__name__ == layer
    return model


@functools.cache
def stock(kind: str, prompt: Prompt, mode: str) -> tuple[tuple[int, ...], ...]:
    """What stock says, or with sampling what plain decoding does."""
    model = target(kind)
    if "greedy" in mode:
        return run(sg.disable(model), prompt, mode, max_new_tokens=NEW + BEYOND)
    return tiny.truth_of(sg.enable(model), prompt, mode, NEW + BEYOND)


def first(texts: tuple[tuple[int, ...], ...], prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    return tuple(text[: len(ids) + NEW] for text, ids in zip(texts, prompt.rows, strict=True))


@pytest.mark.parametrize("mode", ["greedy", "sampled", pytest.param("penalties-greedy", marks=pytest.mark.slow)])
@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", UNPACKED)
def test_weights_that_are_only_unpacked_change_no_text(kind, rows, shape, mode):
    """Reports 80 and 82."""
    prompt, known = ROWS[rows], stock(kind, ROWS[rows], mode)
    script = Scripted(known, shape)
    assert run(sg.enable(target(kind)), prompt, mode, assistant=script, max_new_tokens=NEW) == first(known, prompt)
    assert script.seen.share("mixed") > 0.5
    assert not any(script.seen.chains)


def test_quantizing_changes_the_text():
    """Or the tests above would show nothing."""
    texts = {kind: stock(kind, ONE, "greedy")[0] for kind in UNPACKED}
    texts["none"] = run(load(), ONE, max_new_tokens=NEW + BEYOND)[0]
    assert len(set(texts.values())) >= len(texts) - 1  # double quantization may say what the single one does
    assert all(len(set(text[ONE.columns :])) > 8 for text in texts.values())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mode", ["greedy", "sampled"])
@pytest.mark.parametrize("kind", UNPACKED)
def test_a_quantized_drafter_drafts_for_what_it_was_made_from(kind, mode, rows):
    """Report 80."""
    model, prompt, stats = sg.enable(load()), ROWS[rows], sg.Stats()
    wanted = first(tiny.truth_of(model, prompt, mode, NEW), prompt)
    sg.disable(target(kind))
    assert run(model, prompt, mode, assistant=target(kind), stats=stats, max_new_tokens=NEW) == wanted
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("drafter", ["itself", "its original", "other bits"])
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_a_quantized_target_is_drafted_for(kind, drafter, rows):
    model, prompt, stats = sg.enable(target(kind)), ROWS[rows], sg.Stats()
    small = {"itself": lambda: model, "its original": load, "other bits": lambda: target("quanto")}[drafter]()
    texts = run(model, prompt, assistant=sg.DraftModel(small), stats=stats, max_new_tokens=NEW)
    assert texts == first(stock(kind, prompt, "greedy"), prompt)
    assert stats.accepted == stats.drafted if drafter == "itself" else 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("kind", ["nf4", "int8 alone"])
def test_a_quantized_drafter_in_train_mode_drafts_in_eval_mode(kind):
    model, small, stats = sg.enable(load()), load(UNPACKED[kind][0]()).train(), sg.Stats()
    wanted = first(tiny.truth_of(model, ONE, "greedy", NEW), ONE)
    assert run(model, ONE, assistant=small, stats=stats, max_new_tokens=NEW) == wanted
    assert all(module.training for module in small.modules())
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it by its old name
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_a_quantized_target_with_an_adapter(kind, rows):
    """QLoRA: on, off, and drafted for by the quantized base alone."""
    prompt, texts = ROWS[rows], []
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        wrapped = sg.enable(peft.get_peft_model(load(UNPACKED[kind][0]()), config).eval())
    for adapter in nullcontext(), wrapped.disable_adapter():
        with adapter:
            known, stats = run(wrapped, prompt, max_new_tokens=NEW + BEYOND), sg.Stats()
            script = Scripted(known, "tree")
            assert run(wrapped, prompt, assistant=script, max_new_tokens=NEW) == first(known, prompt)
            assert script.seen.share("mixed") > 0.5
            assert run(wrapped, prompt, assistant=target(kind), stats=stats, max_new_tokens=NEW) == first(known, prompt)
            assert stats.acceptance_rate == 1 if texts else 0 < stats.accepted < stats.drafted
        texts.append(known)
    assert texts[1] == stock(kind, prompt, "greedy") != texts[0]


@pytest.mark.parametrize("kind", UNPACKED)
def test_enabling_leaves_the_quantized_weights_alone(kind):
    model = target(kind)
    before = [(name, weight.data_ptr(), weight.dtype) for name, weight in model.named_parameters()]
    run(sg.enable(model), ONE, assistant=sg.PromptLookup(), max_new_tokens=4)
    sg.disable(model)
    assert type(model) is LlamaForCausalLM
    assert [(name, weight.data_ptr(), weight.dtype) for name, weight in model.named_parameters()] == before


# ---------------------------------------------------------------------------------------------- what rounds in the pass

# What rounds with what stands beside it in the pass, or in a narrow format: with a bound for how near a tie must be.
ROUNDED: dict[str, tuple[Callable[[], PreTrainedModel], float]] = {
    # Columns with a large value anywhere in the pass are computed in float16, the others in int8.
    "int8": (lambda: load(bits8(3.0)), 2**-6),
    "nf4 as it comes": (lambda: load(bits4("nf4"), as_it_comes=True), 2**-6),
    "nf4 in bfloat16": (lambda: load(bits4("nf4", torch.bfloat16), sharp=False), 2**-6),
    "nf4 in float16": (lambda: load(bits4("nf4", torch.float16), sharp=False), 2**-9),
}


@pytest.mark.parametrize("kind", ROUNDED)
def test_where_a_pass_rounds_the_first_difference_is_a_near_tie(kind):
    """Report 82, on eight prompts; drafting nothing makes stock's passes, and so stock's text."""
    make, margin = ROUNDED[kind]
    model, same = make(), []
    for seed in range(8):
        prompt = Prompt.random((20, seed))
        kwargs = {**prompt.inputs(), "max_new_tokens": NEW, "do_sample": False}
        wanted = sg.disable(model).generate(**kwargs, return_dict_in_generate=True, output_logits=True)
        script = Scripted([[*wanted.sequences[0].tolist(), *[5] * BEYOND]], "tree" if seed % 2 else "chain")
        answer = sg.enable(model).generate(**kwargs, assistant=script)
        differing = (answer != wanted.sequences).nonzero()
        same.append(not len(differing))
        if len(differing):
            logits = wanted.logits[int(differing[0, 1]) - prompt.columns][0]
            best = logits.topk(2).values
            assert float(best[0] - best[1]) <= margin * float(logits.abs().max())
        assert any(script.seen.mixed)
        assert torch.equal(model.generate(**kwargs, assistant=sg.Plain()), wanted.sequences)
    assert any(same)
    if kind == "int8":
        assert not all(same), "no column was ever large in one pass and not in another: nothing was shown"


def test_the_large_columns_of_int8_are_those_of_the_whole_pass():
    """Why there can be a difference at all: a token's result depends on the one beside it."""
    torch.manual_seed(0)
    weight = torch.randn(64, 64)
    one, other = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    other[..., 5] = 30.0
    for threshold, same in ((6.0, False), (0.0, True)):
        layer = bitsandbytes.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False, threshold=threshold)
        layer.weight = bitsandbytes.nn.Int8Params(weight.clone(), False, has_fp16_weights=False)
        layer = layer.to("cpu").eval()
        with torch.no_grad():
            alone, beside = layer(one)[0, 0], layer(torch.cat([one, other], dim=1))[0, 0]
        assert torch.equal(alone, beside) == same


def test_a_quantized_model_makes_as_few_passes_as_any():
    model = sg.enable(target("nf4"))
    script = Scripted(stock("nf4", ONE, "greedy"), spoiled=0)
    with counted(model) as widths:
        run(model, ONE, assistant=script, max_new_tokens=NEW)
    assert widths == [ONE.columns, 9, 9, 9, 4]
