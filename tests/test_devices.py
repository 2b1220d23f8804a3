"""Weights on more than one device, on disk, or brought back for each pass: the text is that of a model in one place."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from accelerate import cpu_offload, disk_offload
from tiny import ONE, RAGGED, Prompt, Scripted
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers import LlamaForCausalLM, PreTrainedModel
from two_devices import AWAY, HERE, TwoDevices, is_away, send_away

import hf_specgen as sg
from hf_specgen.assistants import resolve
from hf_specgen.target import one_thread

NEW = 14
ROWS = {"one": ONE, "ragged": RAGGED}


@functools.cache
def truth(prompt: Prompt, mode: str, windowed: bool = False) -> tuple[tuple[int, ...], ...]:
    model = sg.enable(tiny.mistral() if windowed else tiny.llama())
    return tiny.truth_of(model, prompt, mode, NEW + 16)


def shortened(texts: tuple[tuple[int, ...], ...], prompt: Prompt) -> tuple[tuple[int, ...], ...]:
    return tuple(text[: len(ids) + NEW] for text, ids in zip(texts, prompt.rows, strict=True))


# ------------------------------------------------------------------------------------- device_map, as accelerate has it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama and a sibling, as checkpoints."""
    return tiny.checkpoints(tmp_path_factory.mktemp("devices"))


def mapped(folder: Path, name: str, last_layer: str = "disk", head: str = "cpu") -> PreTrainedModel:
    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": last_layer}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": head}
    kwargs = {"device_map": places, "offload_folder": folder / f"{name}-offloaded", "dtype": torch.float64}
    return LlamaForCausalLM.from_pretrained(folder / name, **kwargs)


def all_on_disk(folder: Path, name: str) -> PreTrainedModel:
    model = LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
    return disk_offload(model, folder / f"{name}-disk", execution_device=HERE)


def in_memory(folder: Path, name: str) -> PreTrainedModel:
    """Nowhere between passes, and the first parameter with the rest."""
    return cpu_offload(LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float64), execution_device=HERE)


PLACES: dict[str, Callable[[Path, str], PreTrainedModel]] = {
    "a layer on disk": mapped,
    "a layer and the head on disk": lambda folder, name: mapped(folder, name, head="disk"),
    "all on disk": all_on_disk,
    "all in memory": in_memory,
}


@pytest.mark.parametrize("place", PLACES)
def test_weights_that_are_offloaded_decode_the_same(place, folder):
    model = sg.enable(PLACES[place](folder, "llama"))
    assert any(parameter.device.type == "meta" for parameter in model.parameters())
    for prompt, mode, shape in (ONE, "greedy", "tree"), (RAGGED, "penalties-sampled", "chain"):
        texts = truth(prompt, mode)
        for assistant in Scripted(texts, shape), sg.DraftModel(tiny.sibling(tiny.llama())):
            assert tiny.run(model, prompt, mode, assistant=assistant, max_new_tokens=NEW) == shortened(texts, prompt)
    assert "offloaded" in (one_thread(model) or "")
    assert one_thread(tiny.llama()) is None


@pytest.mark.parametrize("place", PLACES)
def test_a_drafter_may_be_offloaded_and_so_may_both(place, folder):
    small, near = PLACES[place](folder, "sibling"), tiny.sibling(tiny.llama())
    both = [(tiny.llama(), 1, RAGGED, "penalties-sampled"), (PLACES[place](folder, "llama"), 3, ONE, "greedy")]
    for model, branches, prompt, mode in both:
        counts = []
        for target, drafter in (model, small), (tiny.llama(), near):
            stats = sg.Stats()
            kwargs = {"max_new_tokens": NEW, "suppress_tokens": [8, 9]}  # a tensor that goes to the drafter
            plain = tiny.run(sg.enable(tiny.llama()), prompt, mode, assistant=sg.Plain(), **kwargs)
            assistant = sg.DraftModel(drafter, branches=branches)
            assert tiny.run(sg.enable(target), prompt, mode, assistant=assistant, stats=stats, **kwargs) == plain
            counts.append((stats.drafted, stats.accepted))
        assert counts[0] == counts[1]
        assert 0 < counts[0][1] < counts[0][0]


def test_a_drafter_that_is_loaded_for_an_offloaded_target_is_where_inputs_are(folder):
    model = sg.enable(in_memory(folder, "llama"))
    config = {"method": "draft_model", "model": str(folder / "sibling")}
    assert resolve(config, model).drafter.model.device == HERE
    assert tiny.run(model, ONE, assistant=config, max_new_tokens=NEW) == shortened(truth(ONE, "greedy"), ONE)


# ---------------------------------------------------------------------------------------------------------- two devices


def lead(module: nn.Module, device: torch.device, back: bool = False) -> None:
    """Brings what a module is given to its device, as accelerate's hooks do, and what it returns back."""

    def there(value: Any) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    def here(value: Any) -> Any:
        return value.to(HERE) if isinstance(value, Tensor) else value

    module.register_forward_pre_hook(lambda _, args, kwargs: tree_map(there, (args, kwargs)), with_kwargs=True)
    if back:
        module.register_forward_hook(lambda _, args, outputs: tree_map(here, outputs))


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """The last layer and the head away, as `device_map` spreads a model over two devices."""
    model = copy.deepcopy(model)
    for module in (model.model.layers[1], model.model.norm, model.lm_head):
        send_away(module)
        lead(module, AWAY)
    lead(model.model.embed_tokens, HERE)
    lead(model.model.layers[0], HERE)
    lead(model, HERE, back=True)
    return model


@pytest.mark.parametrize("mode", ["sampled", "penalties-greedy"])
@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize("rows", ROWS)
def test_report_79_layers_of_one_model_on_two_devices(mode, windowed, rows):
    prompt, texts = ROWS[rows], truth(ROWS[rows], mode, windowed)
    model = sg.enable(spread(tiny.mistral() if windowed else tiny.llama()))
    for assistant in sg.Plain(), Scripted(texts), Scripted(texts, "tree"):
        with TwoDevices() as world:
            assert model.device == HERE
            answer = tiny.run(model, prompt, mode, assistant=assistant, max_new_tokens=NEW)
        assert answer == shortened(texts, prompt)
        assert {away for away, _ in world.moves} == {True, False}


@pytest.mark.parametrize("branches", [1, 3])
def test_report_79_so_may_a_drafter_s_be_and_both(branches):
    small = spread(tiny.sibling(tiny.llama()))
    for model in sg.enable(tiny.llama()), sg.enable(spread(tiny.llama())):
        with TwoDevices():
            answer = tiny.run(model, RAGGED, assistant=sg.DraftModel(small, branches=branches), max_new_tokens=NEW)
        assert answer == shortened(truth(RAGGED, "greedy"), RAGGED)


def test_report_79_the_cache_that_is_returned_lies_where_the_layers_do():
    texts = truth(RAGGED, "greedy")
    model, whole = sg.enable(spread(tiny.llama())), sg.enable(tiny.llama())
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    with TwoDevices():
        got = model.generate(**RAGGED.inputs(), **kwargs, assistant=Scripted(texts, "tree"))
        assert [is_away(layer.keys) for layer in got.cache.layers] == [False, True]
    wanted = whole.generate(**RAGGED.inputs(), **kwargs, assistant=sg.Plain())
    for ours, theirs in zip(got.cache.layers, wanted.cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys)
    for ours, theirs in zip(got.scores, wanted.scores, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.cuda
@pytest.mark.parametrize("rows", ROWS)
def test_report_79_layers_on_the_cpu_and_on_a_gpu(rows, folder):
    prompt, texts = ROWS[rows], truth(ROWS[rows], "greedy")
    places = {"model.embed_tokens": 0, "model.layers.0": 0, "model.rotary_emb": 0, "lm_head": 0, "model.norm": 0}
    kwargs = {"device_map": {**places, "model.layers.1": "cpu"}, "dtype": torch.float64}
    model = sg.enable(LlamaForCausalLM.from_pretrained(folder / "llama", **kwargs))
    inputs = {key: value.to(0) for key, value in prompt.inputs().items()}
    for assistant in sg.Plain(), Scripted(texts), Scripted(texts, "tree"), tiny.sibling(tiny.llama()):
        ids = model.generate(**inputs, assistant=assistant, max_new_tokens=NEW, do_sample=False)
        assert ids.device.type == "cuda"
        assert tiny.texts(prompt, ids) == shortened(texts, prompt)
