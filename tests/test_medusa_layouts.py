"""Published layouts of Medusa heads: each loads into the right modules, and drafts."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from published import Published, fill, medusa, save, values
from safetensors.torch import save_file
from tiny import ONE, run
from torch import Tensor
from torch.nn.functional import linear, silu

import hf_specgen as sg
from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.layouts import layout_of, read_head
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.said import spread

NEW = 16


@functools.cache
def target() -> Any:
    return sg.enable(tiny.llama())


@functools.cache
def truth() -> Any:
    return run(target(), ONE, assistant=sg.Plain(), max_new_tokens=NEW)


def write(published: Published, folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """The layout with other tensors, or other fields in its config; a field that is ... is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    merged = {key: value for key, value in {**published.tiny_config(), **config}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(merged), encoding="utf-8")
    save(tensors, folder, published.file)
    return folder


def load(folder: Path) -> MedusaHeads:
    heads = read_head(Checkpoint.open(folder))
    assert isinstance(heads, MedusaHeads)
    return heads


def as_published(published: Published, tensors: dict[str, Tensor], states: Tensor) -> Tensor:
    """`(batch, heads, vocab)` straight from the published tensors, by the formulas of those who publish them."""
    tensors = {key: tensor.float() if tensor.is_floating_point() else tensor for key, tensor in tensors.items()}
    for key in [key for key in tensors if key.endswith("weight_scale")]:
        tensors[key.removesuffix("_scale")] = (tensors[key.removesuffix("_scale")] * tensors[key]).bfloat16().float()
    if any("blocks." in key for key in tensors):
        return by_name(
            {key.removeprefix("medusa_heads."): tensor for key, tensor in tensors.items()}, published, states
        )
    prefix = next((p for p in ("medusa_head.", "medusa_heads.") if any(key.startswith(p) for key in tensors)), "")
    rows = []
    for head in range(sum(key.startswith(prefix) and key.endswith(".0.linear.weight") for key in tensors) or 2):
        x, place = states, 0
        while (name := f"{prefix}{head}.{place}.linear.weight") in tensors:
            x = x + silu(linear(x, tensors[name], tensors[name.replace("weight", "bias")]))
            place += 1
        own = tensors.get(f"{prefix}{head}.{place}.weight")
        rows.append(linear(x, target().lm_head.weight.float() if own is None else own))
    return torch.stack(rows, 1)


def by_name(tensors: dict[str, Tensor], published: Published, states: Tensor) -> Tensor:
    config, rows = published.tiny_config(), []
    for head in range(config["num_heads"]):
        x = states
        for layer in range(config["num_hidden_layers"]):
            name = f"blocks.{head}.layers.{layer}"
            x = x + silu(linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
        shared = "lm_head.weight" if "lm_head.weight" in tensors else f"lm_heads.{head}.weight"
        logits = linear(x, tensors[shared]) * config.get("logit_scale", 1.0)
        if "token_map" in tensors:
            whole = torch.full((len(x), config["vocab_size"]), -torch.inf)
            whole[:, tensors["token_map"]] = logits
            logits = whole
        rows.append(logits)
    return torch.stack(rows, 1)


def drawn(published: Published, seed: int = 0) -> dict[str, Tensor]:
    tensors = values(published, seed)
    if "token_map" in tensors:
        count = len(tensors["token_map"])
        tensors["token_map"] = torch.randperm(tiny.VOCAB, generator=torch.Generator().manual_seed(seed))[:count]
    return tensors


@pytest.mark.parametrize("published", medusa.ALL, ids=lambda one: one.name)
def test_every_published_layout_loads_into_the_right_modules_and_drafts(published, tmp_path):
    """Report 103: both ways in which the heads of version 1 are saved, and all others."""
    tensors = drawn(published)
    heads = load(write(published, tmp_path, tensors))
    assert not any(weight.isnan().any() for weight in heads.parameters())
    assert not any(weight.is_meta for weight in heads.parameters())
    states = torch.randn((3, 32), generator=torch.Generator().manual_seed(1))
    wide = heads.float()
    lm_head = torch.nn.Linear(32, tiny.VOCAB, bias=False)
    lm_head.weight.data = target().lm_head.weight.detach().float()
    torch.testing.assert_close(
        spread(wide(states, lm_head), wide.to_target, 96), as_published(published, tensors, states)
    )
    assert run(target(), ONE, assistant=sg.Medusa(load(tmp_path)), max_new_tokens=NEW) == truth()


@pytest.mark.parametrize("published", medusa.ALL, ids=lambda one: one.name)
def test_one_layout_recognises_it(published, tmp_path):
    fill(published, tmp_path, 0)
    layout = layout_of(Checkpoint.open(tmp_path))
    expected = {"medusa_lm_head": "Medusa-1", "pytorch_model": "Medusa-2"}
    name = expected.get(published.file.split(".")[0].split("-")[0])
    if name is None:
        name = "ModelOpt's Medusa" if "medusa" in published.config else "vLLM's Medusa"
    assert layout is not None
    assert layout.name == name


# Fields whose contradiction is an error, by layout; counts one too small and one too large.
RELIABLE = [
    (medusa.MISTRAL_TGI, {"medusa_num_layers": 2}),
    (medusa.MISTRAL_TGI, {"medusa_num_layers": 0}),
    (medusa.MISTRAL_TGI, {"medusa_num_heads": 4}),
    (medusa.ZEPHYR_VERSION_2, {"medusa_num_layers": 2}),
    (medusa.VICUNA_7B_V1_5, {"medusa_num_heads": 4}),
    (medusa.VICUNA_7B_V1_5, {"medusa_num_heads": 6}),
    (medusa.VICUNA_7B_V1_5, {"hidden_size": 64}),
    (medusa.VICUNA_7B_V1_5, {"vocab_size": 97}),
    (medusa.MODELOPT, {"medusa": {"num_medusa_heads": 3, "num_medusa_layers": 1}}),
    (medusa.MODELOPT, {"medusa": {"num_medusa_heads": 2, "num_medusa_layers": 2}}),
    (medusa.VLLM, {"num_heads": 4}),
    (medusa.VLLM, {"num_hidden_layers": 2}),
    (medusa.VLLM, {"hidden_size": 33}),
    (medusa.VLLM, {"medusa_fc_bias": True}),
    (medusa.VLLM_TRUNCATED, {"truncated_vocab_size": 61}),
]


@pytest.mark.parametrize(("published", "changed"), RELIABLE, ids=lambda one: getattr(one, "name", None) or str(one))
def test_a_config_that_contradicts_its_weights_is_an_error(published, changed, tmp_path):
    with pytest.raises(ValueError, match=next(iter(changed))):
        load(write(published, tmp_path, drawn(published), **changed))


def test_a_count_that_published_configs_have_wrong_is_reported_and_the_weights_count(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "hf_specgen"):
        heads = load(write(medusa.VICUNA_7B_V1_3, tmp_path, drawn(medusa.VICUNA_7B_V1_3)))
    assert heads.config.num_heads == 5
    assert any("medusa_num_heads=2" in message and "5" in message for message in caplog.messages)


@pytest.mark.parametrize("published", [medusa.VICUNA_7B_V1_5, medusa.MISTRAL_TGI, medusa.VLLM, medusa.MODELOPT])
def test_counts_that_a_config_lacks_come_from_the_weights(published, tmp_path):
    """Report 104; what contradicts the weights is in the tests above."""
    gone = ("medusa_num_heads", "medusa_num_layers", "medusa", "num_heads", "num_hidden_layers")
    tensors = drawn(published)
    heads = load(write(published, tmp_path / "without", tensors, **dict.fromkeys(gone, ...)))
    whole = load(write(published, tmp_path / "with", tensors))
    assert (heads.config.num_heads, heads.config.num_layers) == (whole.config.num_heads, whole.config.num_layers)


@pytest.mark.parametrize(
    ("published", "missing", "leftover"),
    [
        (medusa.MISTRAL_TGI, "1.0.linear.weight", None),
        (medusa.MISTRAL_TGI, "1.1.weight", None),
        (medusa.MISTRAL_TGI, "0.0.linear.bias", None),
        (medusa.MISTRAL_TGI, None, "1.0.bias"),
        (medusa.VICUNA_7B_V1_5, None, "medusa_head.norm.weight"),
        (medusa.MODELOPT, "medusa_heads.1.1.weight", None),
        (medusa.VLLM, "lm_heads.3.weight", None),
        (medusa.VLLM, None, "blocks.0.norm.weight"),
    ],
    ids=lambda one: getattr(one, "name", None) or str(one),
)
def test_missing_and_unexpected_keys_are_listed(published, missing, leftover, tmp_path):
    tensors = drawn(published)
    if missing:
        del tensors[missing]
    else:
        tensors[leftover] = torch.ones(32)
    with pytest.raises(ValueError, match=rf"lacks .*{missing}" if missing else rf"has {leftover}, which nothing reads"):
        load(write(published, tmp_path, tensors))


def test_beside_a_model_only_the_heads_are_read(tmp_path, monkeypatch):
    read: list[str] = []
    tensors_of = Checkpoint.tensors

    def noted(self: Checkpoint, names: Any = "") -> dict[str, Tensor]:
        found = tensors_of(self, names)
        read.extend(found)
        return found

    monkeypatch.setattr(Checkpoint, "tensors", noted)
    for published in (medusa.VICUNA_7B_V1_5, medusa.MODELOPT, medusa.MODELOPT_FP8):
        fill(published, tmp_path / published.name, 0)
        load(tmp_path / published.name)
    assert read
    assert all(key.startswith(("medusa_head.", "medusa_heads.")) for key in read)


def test_one_block_that_is_there_several_times_may_be_saved_once(tmp_path):
    """The original makes its blocks as `[ResBlock()] * n`; savers that drop doubles keep the first name."""
    block, bias = torch.randn(32, 32), torch.randn(32)
    repeated = {f"0.{place}.linear.weight": block for place in range(3)}
    repeated |= {f"0.{place}.linear.bias": bias for place in range(3)} | {"0.3.weight": torch.randn(96, 32)}
    published = dataclasses.replace(medusa.VICUNA_7B_V1_3, config={"medusa_num_layers": 3})
    whole = load(write(published, tmp_path / "pickled", repeated))
    kept = {key: tensor for key, tensor in repeated.items() if not key.startswith(("0.1.", "0.2."))}
    thin = load(write(published, tmp_path / "once", kept))
    assert thin.config.num_layers == whole.config.num_layers == 3
    states = torch.randn(2, 32)
    torch.testing.assert_close(thin(states), whole(states))
    thin.save_pretrained(tmp_path / "again")
    torch.testing.assert_close(load(tmp_path / "again")(states), whole(states))


def test_vllm_reads_one_lm_head_under_either_name(tmp_path):
    tensors = drawn(medusa.VLLM)
    states = torch.randn(2, 32, dtype=torch.float16)
    first = tensors["lm_heads.0.weight"]
    heads = load(write(medusa.VLLM, tmp_path / "first", tensors, original_lm_head=True))
    alone = {key: tensor for key, tensor in tensors.items() if not key.startswith("lm_heads")}
    named = load(write(medusa.VLLM, tmp_path / "named", {**alone, "lm_head.weight": first}, original_lm_head=True))
    assert heads.config.lm_heads == named.config.lm_heads == "shared"
    torch.testing.assert_close(heads(states), named(states))
    none = load(write(medusa.VLLM, tmp_path / "none", alone, original_lm_head=True))
    assert none.config.lm_heads == "target"


def test_a_truncated_vocabulary_may_come_with_whole_lm_heads(tmp_path):
    tensors = drawn(medusa.VLLM_TRUNCATED)
    rows = torch.randn(96, 32).bfloat16()
    whole = {**tensors, "medusa_heads.lm_head.weight": rows}
    cut = {**tensors, "medusa_heads.lm_head.weight": rows[tensors["token_map"]]}
    states = torch.randn(2, 32).bfloat16()
    one, other = (load(write(medusa.VLLM_TRUNCATED, tmp_path / str(n), t)) for n, t in enumerate((whole, cut)))
    torch.testing.assert_close(*(spread(heads(states), heads.to_target, 96) for heads in (one, other)))
    assert one.known_ids == 60


@pytest.mark.parametrize("whole", [False, True], ids=["cut", "whole LM heads"])
@pytest.mark.parametrize(
    ("first", "fault"), [(96, "to ids from 2 to 96"), (-1, "to ids from -1 to 60"), (2, "to an id more than once")]
)
def test_a_token_map_that_is_none_is_refused(first, fault, whole, tmp_path):
    tensors = drawn(medusa.VLLM_TRUNCATED)
    tensors["token_map"] = torch.tensor([first, *range(2, 61)]).to(tensors["token_map"].dtype)
    if whole:
        tensors["medusa_heads.lm_head.weight"] = torch.randn(96, 32).bfloat16()
    with pytest.raises(ValueError, match=f"token_map leads {fault}"):
        load(write(medusa.VLLM_TRUNCATED, tmp_path, tensors))


def test_biases_that_vllm_would_leave_out_are_used_and_reported(tmp_path, caplog):
    tensors = drawn(medusa.VLLM) | {f"blocks.{head}.layers.0.bias": torch.ones(32).half() for head in range(5)}
    heads = load(write(medusa.VLLM, tmp_path, tensors))
    assert heads.config.block_bias
    assert any("medusa_fc_bias" in message for message in caplog.messages)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e5m2])
def test_weights_that_are_quantized_in_another_way_are_refused(dtype, tmp_path):
    tensors = drawn(medusa.MODELOPT_FP8)
    key = "medusa_heads.0.0.linear.weight"
    tensors[key] = tensors[key].float().abs().to(dtype)
    with pytest.raises(ValueError, match=key):
        load(write(medusa.MODELOPT_FP8, tmp_path, tensors))


def test_the_recorded_target_is_the_published_one(tmp_path):
    fill(medusa.MISTRAL_TGI, tmp_path, 0)
    config = load(tmp_path).config
    assert config.target is not None
    assert config.target["name"] == "mistralai/Mistral-7B-Instruct-v0.2"


@pytest.mark.parametrize("lm_heads", ["own", "shared", "target"])
def test_heads_come_back_as_they_were_saved(lm_heads, tmp_path):
    heads = MedusaHeads.fresh(target(), 2, 2, lm_heads)
    with torch.no_grad():
        for weight in heads.parameters():
            weight.add_(torch.randn_like(weight))
    heads.config.accuracies = [[0.5, 0.25], [0.25, 0.125]]
    heads.save_pretrained(tmp_path)
    for again in (MedusaHeads.from_pretrained(tmp_path), load(tmp_path)):
        assert again.config.to_diff_dict().keys() == heads.config.to_diff_dict().keys()
        assert again.config.accuracies == heads.config.accuracies
        assert again.config.target == heads.config.target
        assert again.dtype == heads.dtype
        assert all(
            torch.equal(ours, theirs) for ours, theirs in zip(again.parameters(), heads.parameters(), strict=True)
        )
    assert run(target(), ONE, assistant=sg.Medusa(again), max_new_tokens=NEW) == truth()


def test_a_token_map_comes_back_as_it_was_saved(tmp_path):
    heads = load(write(medusa.VLLM_TRUNCATED, tmp_path / "published", drawn(medusa.VLLM_TRUNCATED)))
    heads.save_pretrained(tmp_path / "ours")
    again = MedusaHeads.from_pretrained(tmp_path / "ours")
    assert torch.equal(again.token_map, heads.token_map)
    assert again.config.logit_scale == 0.5


def test_what_a_saved_file_lacks_stays_nan_and_is_refused(tmp_path):
    MedusaHeads.fresh(target(), 2).save_pretrained(tmp_path)
    tensors = Checkpoint.open(tmp_path).tensors()
    del tensors["blocks.1.0.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"blocks\.1\.0\.weight"):
        load(tmp_path)
    with pytest.raises(ValueError, match=r"blocks\.1\.0\.weight"):
        run(target(), ONE, assistant=sg.Medusa(MedusaHeads.from_pretrained(tmp_path)), max_new_tokens=NEW)
