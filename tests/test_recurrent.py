"""Recurrent targets and drafters: a state that cannot be cut off is moved to where each row's tokens end."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
from typing import Any

import families
import pytest
import tiny
import torch
from generating import BATCHES
from torch import Tensor, nn
from transformers import DynamicCache

import hf_specgen as sg
from hf_specgen import cache, recurrent
from hf_specgen.recurrent import Kept, RecurrentLayer, mixers

# One of each recurrence: gates of their own, joined gates, negative eigenvalues, beside attention, alone, convolutions.
GATED = ["qwen3_5_text", "qwen3_next", "olmo_hybrid"]
STATE_SPACE = ["falcon_h1", "bamba", "mamba2"]
RECURRENT = [*GATED, *STATE_SPACE, "lfm2"]
FAMILIES = pytest.mark.parametrize("family", RECURRENT)
ROWS = tiny.Prompt.random((20, 1), (7, 2), (13, 3))
# Their kernels compute in float32, whatever the model's format.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}

pytestmark = pytest.mark.filterwarnings("ignore:.*falling back to its reference:UserWarning")


@functools.cache
def told(family: str, prompt: tiny.Prompt) -> tuple[tuple[int, ...], ...]:
    """What stock says after the prompt, and the prompt."""
    ids = families.build(family).generate(**prompt.inputs(), max_new_tokens=60, do_sample=False)
    return tiny.texts(prompt, ids)


def states(held: Any) -> list[Tensor]:
    """Everything a cache's recurrent layers hold."""
    layers = [layer for layer in held.layers if hasattr(layer, "conv_states")]
    both = [state for layer in layers for state in (layer.conv_states[0], layer.recurrent_states[0])]
    return [state for state in both if state is not None]


@FAMILIES
@pytest.mark.parametrize("prompt", [tiny.ONE, ROWS], ids=["one", "ragged"])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_the_text_is_stock_s_and_drafts_are_chains(family: str, prompt: tiny.Prompt, sampled: bool) -> None:
    model = sg.enable(families.build(family))
    kwargs = {**prompt.inputs(), "max_new_tokens": 40}
    if sampled:
        kwargs.update(do_sample=True, temperature=1.5, top_k=20, seed=5)
        expected = model.generate(**kwargs, assistant=sg.Plain())
    else:
        expected = model.generate(**kwargs, do_sample=False)
    beyond = model.generate(**{**kwargs, "max_new_tokens": 50}, assistant=sg.Plain())
    script = tiny.Scripted(tiny.texts(prompt, beyond), "tree", spoiled=1 / 3)
    assert torch.equal(model.generate(**kwargs, assistant=script), expected)
    assert all(script.seen.chains)
    assert script.seen.share("mixed") > 0.5


@FAMILIES
def test_after_every_round_the_state_is_that_of_the_decided_tokens(family: str) -> None:
    """Report 11. Compared with the state that stock has after those very tokens, one by one."""
    model, seen = families.build(family), []
    commit = cache.SlotCache.commit

    def noted(self: Any, paths: Any) -> None:
        commit(self, paths)
        held = [[layer.conv_states[0], layer.recurrent_states[0]] for layer, _ in self._recurrent]
        seen.append((list(self.lengths), [s.clone() for pair in held for s in pair if s is not None]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache.SlotCache, "commit", noted)
        script = tiny.Scripted(told(family, ROWS), spoiled=1 / 3)
        sg.enable(model).generate(**ROWS.inputs(), max_new_tokens=16, do_sample=False, assistant=script)
    sg.disable(model)
    assert len({lengths[0] - lengths[1] for lengths, _ in seen}) > 1
    for row in range(ROWS.batch):
        text, stock, after = told(family, ROWS)[row], DynamicCache(config=model.config), {}
        ids = torch.tensor([text])
        for at in range(len(ROWS.rows[row]), seen[-1][0][row] + 1):
            new = ids[:, :at] if at == len(ROWS.rows[row]) else ids[:, at - 1 : at]
            places = torch.arange(at - new.shape[1], at).unsqueeze(0)
            inputs = {"position_ids": places} if "position_ids" in inspect.signature(model.forward).parameters else {}
            with torch.no_grad():
                model(input_ids=new, cache=stock, use_cache=True, **inputs)
            after[at] = [state.clone() for state in states(stock)]
        for lengths, held in seen:
            for mine, theirs in zip(held, after[lengths[row]], strict=True):
                scale = theirs.abs().max()
                torch.testing.assert_close(mine[row] / scale, theirs[0] / scale, **CLOSE, check_dtype=False)


@pytest.mark.parametrize("family", [*GATED, *STATE_SPACE])
@pytest.mark.parametrize("width", [2, 7])
def test_the_closed_form_is_the_mixer_run_over_the_kept_tokens_alone(family: str, width: int) -> None:
    """Every count of kept tokens at once, one a row, against the mixer's own passes over one token."""
    model = families.build(family)
    index, mixer = next(iter(mixers(model).items()))
    generator = torch.Generator().manual_seed(3)
    size = model.config.get_text_config().hidden_size
    inputs = torch.randn((width + 1, 5 + width, size), generator=generator, dtype=model.dtype)
    stock, batch = DynamicCache(config=model.config), width + 1
    with torch.no_grad():
        mixer(inputs[:, :5], cache=stock)
        layer = RecurrentLayer(stock.layers[index], mixer)
        before = layer.snapshot()
        ours = DynamicCache(config=model.config)
        ours.layers[index] = layer
        layer.begin(width, in_place=False)
        mixer(inputs[:, 5:], cache=ours)
        assert all(torch.equal(layer.conv_states[0][row], before[0][0][row]) for row in range(batch))
        assert all(torch.equal(layer.recurrent_states[0][row], before[1][0][row]) for row in range(batch))
        layer.commit(Kept.of(list(range(batch)), width, inputs.device))
        layer.close()
        for step in range(width):
            mixer(inputs[:, 5 + step : 6 + step], cache=stock)
            row, theirs = step + 1, stock.layers[index]
            torch.testing.assert_close(layer.recurrent_states[0][row], theirs.recurrent_states[0][row], **CLOSE)
            torch.testing.assert_close(layer.conv_states[0][row], theirs.conv_states[0][row], **CLOSE)
    assert torch.equal(layer.conv_states[0][0], before[0][0][0])
    torch.testing.assert_close(layer.recurrent_states[0][0], before[1][0][0], **CLOSE)


def whole_pass(self: Any, before: Tensor, counts: Tensor, width: int) -> Tensor:
    return self._pending[0].to(before.dtype)


def no_move(self: Any, before: Tensor, counts: Tensor, width: int) -> Tensor:
    return before


def late_window(both: Tensor, counts: Tensor, width: int) -> Tensor:
    return both[..., width:]


# A short convolution has no state behind it that could be moved wrongly.
MUTANTS = [
    (family, mutant)
    for family in RECURRENT
    for mutant in (whole_pass, no_move, late_window)
    if family != "lfm2" or mutant is late_window
]


@pytest.mark.parametrize(("family", "mutant"), MUTANTS)
@pytest.mark.parametrize("prompt", [tiny.ONE, ROWS], ids=["one", "ragged"])
def test_a_state_that_is_moved_wrongly_changes_the_text(family: str, prompt: tiny.Prompt, mutant: Any) -> None:
    model = sg.enable(families.build(family))
    with pytest.MonkeyPatch.context() as patch:
        if mutant is late_window:
            patch.setattr(recurrent, "_window", mutant)
        else:
            patch.setattr(RecurrentLayer, "_advanced", mutant)
        script = tiny.Scripted(told(family, prompt), spoiled=1 / 3)
        ids = model.generate(**prompt.inputs(), max_new_tokens=50, do_sample=False, assistant=script)
    assert tiny.texts(prompt, ids) != tuple(text[: len(text) - 10] for text in told(family, prompt))


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "lfm2"])
@BATCHES
def test_a_recurrent_model_drafts(family: str, prompt: tiny.Prompt) -> None:
    """It goes back to the mark it set before it drafted, and reads what was decided since."""
    model = sg.enable(families.build(family))
    kwargs = {**prompt.inputs(), "max_new_tokens": 30, "do_sample": False}
    expected = model.generate(**kwargs)
    itself = sg.Stats()
    assert torch.equal(model.generate(**kwargs, assistant=model, stats=itself), expected)
    assert itself.accepted == itself.drafted
    other = sg.Stats()
    assert torch.equal(model.generate(**kwargs, assistant=tiny.sibling(model, 0.1), stats=other), expected)
    assert 0 < other.accepted < other.drafted


@FAMILIES
@pytest.mark.parametrize("prompt", [tiny.ONE, ROWS], ids=["one", "ragged"])
def test_a_conversation_goes_on_from_a_returned_cache(family: str, prompt: tiny.Prompt) -> None:
    model = sg.enable(families.build(family))
    inputs = prompt.inputs()
    first = [
        model.generate(**inputs, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, assistant=which)
        for which in (None, tiny.Scripted(told(family, prompt)))
    ]
    asked = torch.tensor([[5, 6, 7, 8]]).expand(prompt.batch, -1)
    ids = torch.cat([first[0].sequences, asked], dim=1)
    seen = torch.nn.functional.pad(inputs["attention_mask"], (0, ids.shape[1] - prompt.columns), value=1)
    more = {"input_ids": ids, "attention_mask": seen, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(**more, cache=first[0].cache)
    script = tiny.Scripted(tiny.texts(prompt, model.generate(**{**more, "max_new_tokens": 20})), spoiled=1 / 3)
    assert torch.equal(model.generate(**more, cache=first[1].cache, assistant=script), expected)
    assert script.seen.share("mixed") > 0.3
    # The caller's own cache holds all of it now, as stock's does.
    for mine, theirs in zip(states(first[1].cache), states(first[0].cache), strict=True):
        torch.testing.assert_close(mine / theirs.abs().max(), theirs / theirs.abs().max(), **CLOSE)


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


def test_hooks_live_as_long_as_the_call() -> None:
    model = families.build("qwen3_5_text")
    before = hooks(model)
    steps = sg.stream(sg.enable(model), **tiny.ONE.inputs(), max_new_tokens=20, assistant=sg.PromptLookup())
    next(steps)
    assert hooks(model) > before
    steps.close()
    assert hooks(model) == before

    class Broken(tiny.AlwaysWrong):
        def start(self, *args: Any) -> Any:
            session = super().start(*args)
            session.propose = lambda context, limit: 1 / 0
            return session

    with pytest.raises(ZeroDivisionError):
        model.generate(**tiny.ONE.inputs(), max_new_tokens=20, assistant=Broken(told("qwen3_5_text", tiny.ONE)))
    assert hooks(model) == before


def test_a_model_can_be_copied_while_it_decodes() -> None:
    model = sg.enable(families.build("qwen3_5_text"))
    kwargs = {**tiny.ONE.inputs(), "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(**kwargs)
    steps = sg.stream(model, **kwargs, assistant=tiny.Scripted(told("qwen3_5_text", tiny.ONE)))
    next(steps)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        script = tiny.Scripted(told("qwen3_5_text", tiny.ONE), spoiled=1 / 3)
        assert torch.equal(copied.generate(**kwargs, assistant=script), expected)
    rest = [token for step in steps for token in step.tokens[0]]
    assert rest == expected[0, tiny.ONE.columns + 1 :].tolist()


def test_two_threads_share_one_recurrent_model() -> None:
    model = sg.enable(families.build("qwen3_5_text"))
    prompts = [tiny.ONE, ROWS, tiny.Prompt.random((9, 4), (3, 5))]
    expected = [model.generate(**p.inputs(), max_new_tokens=30, do_sample=False) for p in prompts]
    longer = [model.generate(**p.inputs(), max_new_tokens=40, do_sample=False) for p in prompts]
    found: dict[int, Tensor] = {}

    def run(which: int) -> None:
        script = tiny.Scripted(tiny.texts(prompts[which], longer[which]), spoiled=1 / 3)
        found[which] = model.generate(**prompts[which].inputs(), max_new_tokens=30, do_sample=False, assistant=script)

    threads = [threading.Thread(target=run, args=(which,)) for which in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(found[which], ids) for which, ids in enumerate(expected))


def test_one_forward_a_round_and_none_to_repair_the_state() -> None:
    model = sg.enable(families.build("falcon_h1"))
    passes = []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    stats = sg.Stats()
    script = tiny.Scripted(told("falcon_h1", ROWS), spoiled=1 / 3)
    model.generate(**ROWS.inputs(), max_new_tokens=30, do_sample=False, assistant=script, stats=stats)
    assert len(passes) == stats.rounds + 1


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("jamba", "JambaMambaMixer over several tokens"),
        ("mamba", "MambaMixer over several tokens"),
        ("bailing_hybrid", "state of layer 0 .BailingHybridDeltaAttention"),
        ("nemotron_h", "bounds its time step"),
    ],
)
def test_a_recurrence_that_cannot_be_served_is_refused_by_name(family: str, words: str) -> None:
    model = families.build(family)
    passes = []
    model.register_forward_hook(lambda *_: passes.append(1))
    with pytest.raises(ValueError, match=words):
        sg.enable(model).generate(**tiny.ONE.inputs(), max_new_tokens=4, assistant=sg.PromptLookup())
    with pytest.raises(ValueError, match="cannot draft"):
        sg.enable(tiny.llama()).generate(**tiny.ONE.inputs(), max_new_tokens=4, assistant=model)
    assert not passes


def test_passes_over_one_token_write_the_state_in_place() -> None:
    """So that decoding without drafts copies nothing."""
    model, kept = families.build("qwen3_5_text"), []
    begin = RecurrentLayer.begin

    def noted(self: Any, width: int, in_place: bool) -> None:
        begin(self, width, in_place)
        kept.append((in_place, self.recurrent_states[0].data_ptr()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecurrentLayer, "begin", noted)
        sg.enable(model).generate(**tiny.ONE.inputs(), max_new_tokens=10, do_sample=False, assistant=sg.Plain())
    assert all(in_place for in_place, _ in kept)
    assert len({pointer for _, pointer in kept}) == len(mixers(model))


@pytest.mark.parametrize("family", ["qwen3_5_text", "falcon_h1", "mamba2", "lfm2"])
@pytest.mark.parametrize("assistant", ["plain", "chain"])
def test_a_pass_that_breaks_off_leaves_the_caller_s_cache_as_the_last_round_did(family: str, assistant: str) -> None:
    model = sg.enable(families.build(family))
    inputs = {**tiny.ONE.inputs(), "do_sample": False, "return_dict_in_generate": True}
    held = model.generate(**inputs, max_new_tokens=6, assistant=sg.Plain()).cache
    ids = torch.tensor([[*told(family, tiny.ONE)[0][: len(tiny.ONE.rows[0]) + 6], 5, 6]])
    more = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    expected = model.generate(ids, **more, max_new_tokens=20)
    script = sg.Plain() if assistant == "plain" else tiny.Scripted(expected.tolist(), spoiled=1 / 3)
    passes, stats = [], sg.Stats()

    def broken(*_: Any) -> None:
        passes.append(1)
        if len(passes) == 4:  # behind all layers, before anything is decided
            raise ZeroDivisionError

    hook = model.lm_head.register_forward_hook(broken)
    with pytest.raises(ZeroDivisionError):
        model.generate(ids, **more, max_new_tokens=20, cache=held, assistant=script, stats=stats)
    hook.remove()
    decided = ids.shape[1] + stats.tokens
    begun = expected[:, :decided]
    mask = torch.ones_like(begun)
    left = expected.shape[1] - decided
    actual = model.generate(begun, attention_mask=mask, do_sample=False, max_new_tokens=left, cache=held)
    assert torch.equal(actual, expected)
