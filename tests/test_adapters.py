"""Adapted models: with whatever adapter is active when the call is made, as target, as drafter and as both."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import peft
import pytest
import tiny
import torch
from generating import counted
from tiny import ONE, RAGGED, Prompt, Scripted, run
from transformers import LlamaForCausalLM, PreTrainedModel

import hf_specgen as sg

# PEFT asks transformers for it by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")

NEW, BEYOND = 24, 16
ROWS = {"one": ONE, "ragged": RAGGED}
Texts = tuple[tuple[int, ...], ...]


def lora(seed: int = 0, **changed: Any) -> peft.LoraConfig:
    """An adapter that says something of its own from the start; its weights follow from the seed of torch."""
    return peft.LoraConfig(
        r=4, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False, task_type="CAUSAL_LM", **changed
    )


def adapted(model: PreTrainedModel | None = None, seeds: tuple[int, ...] = (0,), config: Any = None) -> Any:
    """A model with adapters named by their seeds, the first of them active."""
    with torch.random.fork_rng():
        for seed in seeds:
            torch.manual_seed(seed)
            if seed == seeds[0]:
                wrapped = peft.get_peft_model(model or tiny.llama(), config or lora(), adapter_name=str(seed))
            else:
                wrapped.add_adapter(str(seed), lora())
    return wrapped.double().eval()


def first(texts: Texts, prompt: Prompt) -> Texts:
    return tuple(text[: len(ids) + NEW] for text, ids in zip(texts, prompt.rows, strict=True))


def speaks_as_stock(model: Any, prompt: Prompt, shape: str = "tree", **kwargs: Any) -> Texts:
    """What an enabled model says with a script and without it, which is the same."""
    known = run(model, prompt, max_new_tokens=NEW + BEYOND, **kwargs)
    script = Scripted(known, shape)
    assert run(model, prompt, assistant=script, max_new_tokens=NEW, **kwargs) == first(known, prompt)
    assert script.seen.share("mixed") > 0.5
    return known


# --------------------------------------------------------------------------------------------------------------- target


@pytest.mark.parametrize("shape", [pytest.param("chain", marks=pytest.mark.slow), "tree"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("door", ["the wrapper", "the inner model", "wrapped later", "custom_generate"])
def test_a_target_speaks_with_the_adapter_that_is_active(door, rows, shape):
    """Report 80: active, switched, disabled, and back again."""
    prompt, inner = ROWS[rows], tiny.llama()
    plain = run(inner, prompt, max_new_tokens=NEW + BEYOND)
    if door == "wrapped later":
        sg.enable(inner)
    wrapped = adapted(inner, (0, 1))
    kwargs = {}
    if door == "custom_generate":
        script = Scripted(run(wrapped, prompt, max_new_tokens=NEW + BEYOND), shape)
        kwargs = {"custom_generate": sg.speculate, "assistant": script, "max_new_tokens": NEW}
        assert run(wrapped, prompt, **kwargs) == first(script.truth, prompt)
        assert script.seen.share("mixed") > 0.5
        assert type(inner) is LlamaForCausalLM
        return
    sg.enable(inner if door == "the inner model" else wrapped)
    model = inner if door == "the inner model" else wrapped
    texts = []
    for adapter in "0", "1", "0":
        wrapped.set_adapter(adapter)
        texts.append(speaks_as_stock(model, prompt, shape))
    assert texts[0] == texts[2]
    assert len({*texts, plain}) == 3
    with wrapped.disable_adapter():
        assert speaks_as_stock(model, prompt, shape) == plain
    assert speaks_as_stock(model, prompt, shape) == texts[2]
    wrapped.base_model.disable_adapter_layers()
    assert speaks_as_stock(model, prompt, shape) == plain
    wrapped.base_model.enable_adapter_layers()
    # Two at once.
    wrapped.base_model.set_adapter(["0", "1"])
    assert speaks_as_stock(model, prompt, shape) not in {*texts, plain}


@pytest.mark.parametrize("mode", ["sampled", "hash-sampled"])
@pytest.mark.parametrize("rows", ROWS)
def test_so_it_does_when_sampling(mode, rows):
    wrapped, prompt = sg.enable(adapted()), ROWS[rows]
    known = tiny.truth_of(wrapped, prompt, mode, NEW + BEYOND)
    script = Scripted(known, "tree")
    assert run(wrapped, prompt, mode, assistant=script, max_new_tokens=NEW) == first(known, prompt)
    assert script.seen.share("mixed") > 0.5
    with wrapped.disable_adapter():
        assert tiny.truth_of(wrapped, prompt, mode, NEW) != first(known, prompt)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("order", ["enable first", "merge first"])
def test_merged_and_taken_apart_again(rows, order):
    prompt, wrapped = ROWS[rows], adapted()
    plain = run(tiny.llama(), prompt, max_new_tokens=NEW + BEYOND)
    active = run(wrapped, prompt, max_new_tokens=NEW + BEYOND)
    for step in "merge", "unmerge", "whole":
        if order == "enable first":
            sg.enable(wrapped)
        if step == "whole":
            whole = wrapped.merge_and_unload()
            assert speaks_as_stock(sg.enable(whole), prompt) == active
            assert type(sg.disable(whole)) is LlamaForCausalLM
        else:
            wrapped.merge_adapter() if step == "merge" else wrapped.unmerge_adapter()
            assert speaks_as_stock(sg.enable(wrapped), prompt) == active
            sg.disable(wrapped)
    unloaded = adapted(sg.enable(tiny.llama())).unload()
    assert speaks_as_stock(unloaded, prompt) == plain


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_an_adapter_for_every_row(shape):
    """The base, two adapters and the base again, in one batch whose rows keep unequal numbers of tokens."""
    prompt = Prompt((*RAGGED.rows, ONE.rows[0]))
    names = ["0", "__base__", "1", "__base__"]
    wrapped = sg.enable(adapted(None, (0, 1)))
    known = speaks_as_stock(wrapped, prompt, shape, adapter_names=names)
    for row, name in enumerate(names):
        if name != "__base__":
            wrapped.set_adapter(name)
        with wrapped.disable_adapter() if name == "__base__" else nullcontext():
            assert speaks_as_stock(wrapped, prompt.alone(row)) == (known[row],)
    stats = sg.Stats()
    kwargs = {"adapter_names": names, "assistant": tiny.sibling(tiny.llama()), "stats": stats, "max_new_tokens": NEW}
    assert run(wrapped, prompt, **kwargs) == first(known, prompt)
    assert 0 < stats.accepted < stats.drafted
    with pytest.raises(ValueError, match="PEFT forgets adapter_names= when generate"):
        sg.stream(wrapped, **prompt.inputs(), adapter_names=names, assistant=sg.Plain())


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")  # PEFT, of every second adapter
@pytest.mark.parametrize("rows", ROWS)
def test_transformers_own_adapters(rows, tmp_path, monkeypatch):
    """`model.add_adapter` and `model.load_adapter`: no wrapper at all."""
    # transformers 5.24 asks for a PEFT that is not out yet.
    monkeypatch.setattr("transformers.integrations.peft.MIN_PEFT_VERSION", peft.__version__)
    model, prompt = sg.enable(tiny.llama()), ROWS[rows]
    plain = run(model, prompt, max_new_tokens=NEW + BEYOND)
    adapted(None, (5,)).save_pretrained(tmp_path)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model.add_adapter(lora(), adapter_name="first")
    model.load_adapter(str(tmp_path / "5"), adapter_name="second")
    model.double()
    texts = []
    for name in "first", "second":
        model.set_adapter(name)
        texts.append(speaks_as_stock(model, prompt))
    assert texts[1] == run(adapted(None, (5,)), prompt, max_new_tokens=NEW + BEYOND)
    model.disable_adapters()
    texts.append(speaks_as_stock(model, prompt))
    assert texts[2] == plain
    assert len(set(texts)) == 3
    model.enable_adapters()
    model.delete_adapter("first")
    assert speaks_as_stock(model, prompt) == texts[1]
    assert sg.disable(model) is model


# Other adapters of PEFT, each with some random weights; those of LoRA's layers and those with layers of their own.
PROJECTIONS: dict[str, Any] = {"target_modules": ["q_proj", "v_proj", "up_proj"], "task_type": "CAUSAL_LM"}
OTHERS: dict[str, Callable[[], Any]] = {
    "dora": lambda: lora(use_dora=True),
    "embeddings": lambda: peft.LoraConfig(r=4, target_modules=["q_proj", "embed_tokens"], init_lora_weights=False),
    "saved head": lambda: lora(modules_to_save=["lm_head"]),
    "ia3": lambda: peft.IA3Config(**PROJECTIONS, feedforward_modules=["up_proj"]),
    "vera": lambda: peft.VeraConfig(**PROJECTIONS),
    "loha": lambda: peft.LoHaConfig(**PROJECTIONS, init_weights=False),
    "oft": lambda: peft.OFTConfig(**PROJECTIONS, init_weights=False),
    "road": lambda: peft.RoadConfig(**PROJECTIONS, group_size=16),
    "prompts in layers": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"),
}


def stirred(wrapped: Any) -> Any:
    """The adapter with noise on its weights, since most start as the identity."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if weight.requires_grad and "modules_to_save" not in name:
                scale = 1.0 if "gate" in name else 0.05
                weight.add_(scale * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
    return wrapped


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("kind", OTHERS)
def test_other_adapters(kind, rows):
    prompt, wrapped = ROWS[rows], stirred(adapted(config=OTHERS[kind]()))
    assert speaks_as_stock(sg.enable(wrapped), prompt) != run(tiny.llama(), prompt, max_new_tokens=NEW + BEYOND)


# What depends on the company a token has in its pass.
DEPENDENT: dict[str, tuple[Callable[[], Any], str]] = {
    "activated lora": (
        lambda: lora(alora_invocation_tokens=list(ONE.rows[0][-3:])),
        r"an activated LoRA \(aLoRA\), which counts from the end of a pass",
    ),
    "lily": (lambda: peft.LilyConfig(**PROJECTIONS), "Lily, which mixes its experts over all the tokens of a pass"),
}


@pytest.mark.parametrize("door", ["enabled", "custom_generate"])
@pytest.mark.parametrize("kind", DEPENDENT)
def test_adapters_for_which_a_draft_would_matter_are_refused(kind, door):
    config, message = DEPENDENT[kind]
    wrapped = stirred(adapted(config=config()))
    kwargs = {"custom_generate": sg.speculate} if door == "custom_generate" else {}
    if door == "enabled":
        sg.enable(wrapped)
    with counted(wrapped.get_base_model()) as passes, pytest.raises(ValueError, match=message):
        run(wrapped, ONE, assistant=sg.Plain(), max_new_tokens=NEW, **kwargs)
    assert passes == []
    with wrapped.disable_adapter():
        plain = run(tiny.llama(), ONE, max_new_tokens=NEW)
        assert run(wrapped, ONE, assistant=sg.PromptLookup(1), max_new_tokens=NEW, **kwargs) == plain


def test_they_do_depend_on_the_pass():
    """Or there would be no reason to refuse them: without the refusal a text is another."""
    for config, _ in DEPENDENT.values():
        wrapped = sg.enable(stirred(adapted(config=config())))
        known = run(wrapped, ONE, max_new_tokens=NEW + BEYOND)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_specgen.refusals.refuse_adapters", lambda model: None)
            assert run(wrapped, ONE, assistant=Scripted(known), max_new_tokens=NEW) != first(known, ONE)


def test_an_activated_lora_among_the_adapters_of_a_batch_is_refused_where_a_row_uses_it():
    wrapped = sg.enable(adapted(None, (0,), lora(alora_invocation_tokens=[5, 6])))
    wrapped.add_adapter("plain", lora())
    wrapped.double().set_adapter("plain")
    speaks_as_stock(wrapped, ONE)
    with pytest.raises(ValueError, match="aLoRA"):
        run(wrapped, RAGGED, adapter_names=["plain", "0", "plain"], assistant=sg.Plain(), max_new_tokens=NEW)


# -------------------------------------------------------------------------------------------------------------- drafter


@functools.cache
def base(prompt: Prompt) -> Texts:
    return run(tiny.llama(), prompt, max_new_tokens=NEW)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("branches", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", ["plain", "adapted"])
def test_a_drafter_drafts_with_the_adapter_that_is_active(target, branches, rows):
    """Report 80: its text is never seen, but the share of it that is accepted is."""
    prompt, drafter = ROWS[rows], adapted(None, (0, 1))
    model = sg.enable(tiny.llama() if target == "plain" else adapted(None, (0, 1)))
    wanted, shares = run(model, prompt, max_new_tokens=NEW), {}

    def share() -> float:
        stats = sg.Stats()
        assistant = sg.DraftModel(drafter, branches=branches)
        assert run(model, prompt, assistant=assistant, stats=stats, max_new_tokens=NEW) == wanted
        return stats.accepted / (stats.tokens - stats.first_tokens)

    shares["0"] = share()
    drafter.set_adapter("1")
    shares["1"] = share()
    with drafter.disable_adapter():
        shares["none"] = share()
    drafter.merge_adapter()
    shares["1 merged"] = share()
    drafter.unmerge_adapter()
    drafter.set_adapter("0")
    assert share() == shares["0"]
    assert shares["1 merged"] == shares["1"]
    own = "none" if target == "plain" else "0"
    assert all(share < shares[own] for name, share in shares.items() if name != own)


def test_an_adapted_target_is_drafted_for_by_a_copy_of_its_base():
    """What a LoRA is often drafted for by; a second copy of the weights, because one cannot be both at once."""
    wrapped, stats = sg.enable(adapted()), sg.Stats()
    wanted = run(wrapped, RAGGED, max_new_tokens=NEW)
    assert run(wrapped, RAGGED, assistant=tiny.llama(), stats=stats, max_new_tokens=NEW) == wanted
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("drafter", ["the base inside", "the wrapper"])
def test_the_base_inside_of_a_target_speaks_with_the_targets_adapter(drafter):
    """An adapter sits in the modules: whoever shares them shares it, and then the target drafts for itself."""
    wrapped, stats = sg.enable(adapted()), sg.Stats()
    wanted = run(wrapped, RAGGED, max_new_tokens=NEW)
    small = wrapped if drafter == "the wrapper" else wrapped.get_base_model()
    assert run(wrapped, RAGGED, assistant=small, stats=stats, max_new_tokens=NEW) == wanted
    assert stats.acceptance_rate == 1


def test_a_drafter_in_train_mode_shares_its_adapter_with_the_copy_that_drafts():
    """As between two steps of training: the copy must follow what was learnt since, and dropout must be off."""
    drafter, model, rates = adapted(config=lora(lora_dropout=0.5)).train(), sg.enable(tiny.llama()), []
    for scale in 1.0, 0.0:
        with torch.no_grad():
            for name, weight in drafter.named_parameters():
                if "lora_B" in name:
                    weight.mul_(scale)
        stats = sg.Stats()
        run(model, RAGGED, assistant=drafter, stats=stats, max_new_tokens=NEW)
        rates.append(stats.acceptance_rate)
        assert all(module.training for module in drafter.modules() if not isinstance(module, torch.nn.Identity))
    assert rates[0] < rates[1] == 1


def test_a_call_leaves_no_trace_on_a_wrapper():
    wrapped = sg.enable(adapted(None, (0, 1)))
    run(wrapped, ONE, max_new_tokens=2)
    inner = wrapped.get_base_model()

    def state() -> list[Any]:
        hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in wrapped.modules()]
        weights = [(name, weight.data_ptr(), weight._version) for name, weight in wrapped.named_parameters()]
        return [hooks, weights, sorted(vars(wrapped)), sorted(vars(inner)), wrapped.active_adapter]

    before = state()
    for assistant in sg.Plain(), sg.PromptLookup(1), adapted(None, (3,)):
        run(wrapped, RAGGED, assistant=assistant, adapter_names=["0", "1", "__base__"], max_new_tokens=NEW)
        assert state() == before
    assert inspect.ismethod(wrapped.base_model.prepare_inputs_for_generation)
