"""What is written for other engines has their keys, comes back as the same head, and is refused where it would not."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import venv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import families
import pytest
import tiny
import torch
from safetensors.torch import load_file
from tiny import ONE, run
from torch import Tensor, nn
from typer.testing import CliRunner

import hf_specgen as sg
from hf_specgen.cli import app
from hf_specgen.engines import eagle as layouts
from hf_specgen.heads.eagle import EagleConfig, EagleHead
from hf_specgen.heads.medusa import MedusaConfig, MedusaHeads

LAYERS, SIZE, WIDE, IDS, DRAFT = 8, 32, 48, 96, 60


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama of `LAYERS` layers on disk and loaded from there."""
    folder = tmp_path_factory.mktemp("target") / "llama"
    model = tiny.llama(hidden_size=SIZE, intermediate_size=WIDE, num_hidden_layers=LAYERS, vocab_size=IDS).float()
    model.save_pretrained(folder)
    return sg.enable(type(model).from_pretrained(folder).eval())


def scattered(head: Any, seed: int = 0) -> Any:
    """Random weights; a map between vocabularies is a true one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * 0.2
        parameter.data = drawn + 1 if "norm" in name else drawn
    for name, buffer in head.named_buffers():
        if name in ("d2t", "token_map"):
            ids = torch.randperm(IDS, generator=generator)[: len(buffer)].sort().values
            buffer.copy_(ids - torch.arange(len(ids)) if name == "d2t" else ids)
    return head.eval()


def medusa(**changed: Any) -> MedusaHeads:
    return scattered(MedusaHeads(MedusaConfig(**{"hidden_size": SIZE, "vocab_size": IDS, "num_heads": 3, **changed})))


def eagle(method: str = "eagle3", **changed: Any) -> EagleHead:
    sizes = {"hidden_size": SIZE, "intermediate_size": WIDE, "num_attention_heads": 4, "num_key_value_heads": 2}
    return scattered(EagleHead(EagleConfig(**{"method": method, **sizes, "vocab_size": IDS, **changed})))


def small_vocabulary(**changed: Any) -> EagleHead:
    return eagle(draft_vocab_size=DRAFT, own_lm_head=True, **changed)


def wrote(folder: Path, file: str = "model.safetensors") -> tuple[dict[str, Any], dict[str, Tensor]]:
    return json.loads((folder / "config.json").read_text()), load_file(folder / file)


# Keys and shapes as the engines' own modules have them, each list written out by hand from its source. h hidden, i
# intermediate, q and k of all heads of queries and keys, v the target's ids, d the head's own, n the states it reads.
SHAPES = {"h": SIZE, "i": WIDE, "q": SIZE, "k": SIZE // 2, "v": IDS, "d": DRAFT, "2h": 2 * SIZE, "nh": 3 * SIZE}
SELF = {
    "self_attn.q_proj.weight": ("q", "h"),
    "self_attn.k_proj.weight": ("k", "h"),
    "self_attn.v_proj.weight": ("k", "h"),
    "self_attn.o_proj.weight": ("h", "q"),
    "mlp.gate_proj.weight": ("i", "h"),
    "mlp.up_proj.weight": ("i", "h"),
    "mlp.down_proj.weight": ("h", "i"),
    "post_attention_layernorm.weight": ("h",),
}
FUSED = {
    **SELF,
    "self_attn.q_proj.weight": ("q", "2h"),
    "self_attn.k_proj.weight": ("k", "2h"),
    "self_attn.v_proj.weight": ("k", "2h"),
    "hidden_norm.weight": ("h",),
    "input_layernorm.weight": ("h",),
}
MAPS = {"d2t": ("d",), "t2d": ("v",)}


def layer(prefix: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + key: shape for key, shape in keys.items()}


# vllm 0.33.0 model_executor/models/llama_eagle3.py (Eagle3LlamaForCausalLM.load_weights, LlamaModel); two layers.
VLLM_EAGLE3 = {
    **layer("layers.0.", FUSED),
    **layer("layers.1.", {**SELF, "input_layernorm.weight": ("h",)}),
    "fc.weight": ("h", "nh"),
    "norm.weight": ("h",),
    "lm_head.weight": ("d", "h"),
    **MAPS,
}
# sglang 0.5.23 srt/models/llama_eagle3.py: a later layer norms its input by `hidden_norm`; TensorRT-LLM 00679c66
# _torch/models/modeling_speculative.py (Eagle3DecoderLayer, `_next_layer_regular`; layers.{i} become midlayer.{i}).
SGLANG_EAGLE3 = {
    **layer("layers.0.", FUSED),
    **layer("layers.1.", {**SELF, "hidden_norm.weight": ("h",)}),
    "fc.weight": ("h", "nh"),
    "norm.weight": ("h",),
    "lm_head.weight": ("d", "h"),
    **MAPS,
}
# speculators 0.9.0 model.py, models/eagle3/core.py and model_definitions.py: what its own models save.
SPECULATORS_EAGLE3 = {**VLLM_EAGLE3, "embed_tokens.weight": ("v", "h")}
# lmdeploy 1263d5cd pytorch/models/llama_eagle3.py: `model.` + key, one layer called midlayer.
LMDEPLOY_EAGLE3 = {
    **layer("midlayer.", FUSED),
    "fc.weight": ("h", "nh"),
    "norm.weight": ("h",),
    "lm_head.weight": ("d", "h"),
    **MAPS,
}
# vllm 0.33.0 model_executor/models/llama_eagle.py: fc without a bias, embeddings shared where the file has none.
VLLM_EAGLE = {**layer("layers.0.", SELF), "fc.weight": ("h", "2h")}
# sglang 0.5.23 srt/models/llama_eagle.py: fc is a torch.nn.Linear with its bias.
SGLANG_EAGLE = {**VLLM_EAGLE, "fc.bias": ("h",)}
# lmdeploy 1263d5cd pytorch/models/llama_eagle.py: embeddings of its own, which nothing shares.
LMDEPLOY_EAGLE = {**VLLM_EAGLE, "embed_tokens.weight": ("v", "h")}

TWO = {"num_hidden_layers": 2}
EAGLES: dict[str, tuple[str, Callable[[], EagleHead], Mapping[str, Any]]] = {
    "vllm": ("vllm", functools.partial(small_vocabulary, **TWO), VLLM_EAGLE3),
    "speculators": ("speculators", functools.partial(small_vocabulary, **TWO), SPECULATORS_EAGLE3),
    "sglang": ("sglang", functools.partial(small_vocabulary, **TWO), SGLANG_EAGLE3),
    "trtllm": ("trtllm", functools.partial(small_vocabulary, **TWO), SGLANG_EAGLE3),
    "lmdeploy": ("lmdeploy", small_vocabulary, LMDEPLOY_EAGLE3),
    "vllm-eagle": ("vllm", functools.partial(eagle, "eagle"), VLLM_EAGLE),
    "sglang-eagle": ("sglang", functools.partial(eagle, "eagle"), SGLANG_EAGLE),
    "lmdeploy-eagle": ("lmdeploy", functools.partial(eagle, "eagle"), LMDEPLOY_EAGLE),
}
EVERY_EAGLE = pytest.mark.parametrize("case", EAGLES)


@EVERY_EAGLE
def test_keys_and_shapes_are_those_of_the_engines_loader(case: str, target: Any, tmp_path: Path) -> None:
    engine, make, keys = EAGLES[case]
    _, tensors = wrote(sg.export(make(), engine, tmp_path / "out", target).path)
    wanted = {key: tuple(SHAPES[size] for size in shape) for key, shape in keys.items()}
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == wanted


@EVERY_EAGLE
def test_an_exported_head_is_read_here_again_bit_for_bit(case: str, target: Any, tmp_path: Path) -> None:
    engine, make, _ = EAGLES[case]
    head = make()
    read = sg.load_assistant(sg.export(head, engine, tmp_path / "out", target).path, target).head.state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in head.state_dict().items())


@pytest.mark.parametrize("case", ["sglang", "speculators", "lmdeploy-eagle"])
def test_and_drafts_the_same(case: str, target: Any, tmp_path: Path) -> None:
    engine, make, _ = EAGLES[case]
    head = make()
    again = sg.load_assistant(sg.export(head, engine, tmp_path / "out", target).path, target)
    assert drafts(sg.Eagle(head), target) == drafts(again, target)


def drafts(drafter: Any, target: Any) -> list[int]:
    """A text and what was drafted on the way to it."""
    stats = sg.Stats()
    settings = {"assistant": drafter, "num_assistant_tokens": 4, "stats": stats, "max_new_tokens": 12}
    return [*run(target, ONE, **settings)[0], stats.rounds, stats.drafted, stats.accepted]


MEDUSAS = [
    pytest.param(changed, engine, id=f"{engine}-{'-'.join(map(str, changed.values())) or 'own'}")
    for engine in ("vllm", "tgi")
    for changed in (
        {},
        {"lm_heads": "shared"},
        {"lm_heads": "target"},
        {"lm_heads": "target", "num_layers": 2},
        {"block_bias": False},
        *([{"lm_heads": "shared", "draft_vocab_size": DRAFT, "logit_scale": 0.5}] if engine == "vllm" else []),
    )
]


@pytest.mark.parametrize(("changed", "engine"), MEDUSAS)
def test_exported_medusa_heads_say_the_same(changed: dict[str, Any], engine: str, target: Any, tmp_path: Path) -> None:
    heads = medusa(**changed)
    again = sg.load_assistant(sg.export(heads, engine, tmp_path / "out", target).path, target).heads
    states = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(1))
    assert torch.equal(heads(states, target.lm_head), again(states, target.lm_head))
    blocks = again.state_dict()
    assert all(torch.equal(tensor, blocks[n]) for n, tensor in heads.state_dict().items() if n.startswith("blocks."))
    assert heads.to_target is None or torch.equal(heads.to_target, again.to_target)


def blocks_of(name: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    shapes = {"weight": ("h", "h"), "bias": ("h",)}
    return {name.format(head, kind): shapes[kind] for head in range(3) for kind in kinds}


BOTH = ("weight", "bias")
NUMBERED = blocks_of("{}.0.linear.{}", BOTH)
MEDUSA_KEYS = {
    # vllm 0.32.0 model_executor/models/medusa.py (0.33.0 has none): medusa_fc_bias, original_lm_head, token_map.
    "vllm": (
        {},
        {**blocks_of("blocks.{}.layers.0.{}", BOTH), **{f"lm_heads.{h}.weight": ("v", "h") for h in range(3)}},
    ),
    "vllm-target": ({"lm_heads": "target"}, {**blocks_of("blocks.{}.layers.0.{}", BOTH), "lm_head.weight": ("v", "h")}),
    "vllm-mapped": (
        {"lm_heads": "shared", "draft_vocab_size": DRAFT, "block_bias": False},
        {**blocks_of("blocks.{}.layers.0.{}", ("weight",)), "lm_head.weight": ("d", "h"), "token_map": ("d",)},
    ),
    # text-generation-inference db931fcf server/text_generation_server/layers/medusa.py: MedusaHeadV1, and MedusaHeadV2.
    "tgi": ({}, {**NUMBERED, **{f"{head}.1.weight": ("v", "h") for head in range(3)}}),
    "tgi-target": ({"lm_heads": "target"}, NUMBERED),
    "tgi-unbiased": ({"lm_heads": "target", "block_bias": False}, NUMBERED),
}


@pytest.mark.parametrize("case", MEDUSA_KEYS)
def test_keys_of_medusa_are_those_of_the_engines_loader(case: str, target: Any, tmp_path: Path) -> None:
    changed, keys = MEDUSA_KEYS[case]
    engine = case.split("-")[0]
    folder = sg.export(medusa(**changed), engine, tmp_path / "out", target).path
    config, tensors = wrote(folder, "medusa_lm_head.safetensors" if engine == "tgi" else "model.safetensors")
    wanted = {key: tuple(SHAPES[size] for size in shape) for key, shape in keys.items()}
    assert {key: tuple(tensor.shape) for key, tensor in tensors.items()} == wanted
    if engine == "tgi":  # whatever has architectures is no Medusa to it (layers/speculative.py)
        assert "architectures" not in config
        assert config["base_model_name_or_path"] == target.config.name_or_path
        assert config["medusa_num_heads"] == 3


def test_the_copied_lm_head_is_the_targets(target: Any, tmp_path: Path) -> None:
    for name, given in (("loaded", target), ("path", target.config.name_or_path)):
        _, tensors = wrote(sg.export(eagle(), "lmdeploy", tmp_path / name, given).path)
        assert torch.equal(tensors["lm_head.weight"], target.lm_head.weight)
        # Without this map LMDeploy would draft id 0 only.
        assert torch.equal(tensors["d2t"], torch.zeros(IDS, dtype=torch.long))


def test_copied_embeddings_are_scaled_as_the_target_scales_them(tmp_path: Path) -> None:
    gemma: Any = families.build("gemma3_text")
    gemma.save_pretrained(tmp_path / "target")
    config = gemma.config
    head = eagle(hidden_size=config.hidden_size, vocab_size=config.vocab_size, feature_layers=[1, 2])
    gemma.config.name_or_path = str(tmp_path / "target")
    _, tensors = wrote(sg.export(head, "speculators", tmp_path / "out", gemma).path)
    (written,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    weight = gemma.get_input_embeddings().weight
    torch.testing.assert_close(written.to(weight.dtype), weight * config.hidden_size**0.5)
    with pytest.raises(ValueError, match="scales its own: pass the loaded model"):
        sg.export(head, "speculators", tmp_path / "other", str(tmp_path / "target"))


def test_maps_lead_to_the_same_ids(target: Any, tmp_path: Path) -> None:
    head = small_vocabulary()
    _, tensors = wrote(sg.export(head, "vllm", tmp_path / "out", target).path)
    ids = [place + int(offset) for place, offset in enumerate(tensors["d2t"])]
    assert ids == head.to_target.tolist()
    assert [token for token in range(IDS) if tensors["t2d"][token]] == ids


def test_each_engine_is_told_the_layers_in_its_own_numbering(target: Any, tmp_path: Path) -> None:
    # A list that begins with 3 is one that begins with 2 where ids are outputs of layers.
    head = small_vocabulary(feature_layers=[3, 4, 6])
    told = {engine: sg.export(head, engine, tmp_path / engine, target) for engine in ("vllm", "sglang", "trtllm")}
    config, _ = wrote(told["vllm"].path)
    assert config["eagle_aux_hidden_state_layer_ids"] == [3, 4, 6]  # vllm 0.33.0 v1/worker/gpu_model_runner.py
    config, _ = wrote(told["sglang"].path)
    # sglang 0.5.23 srt/models/llama.py adds one to what eagle_config has.
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 3, 5]
    assert told["trtllm"].config["eagle3_layers_to_capture"] == [2, 3, 5]
    for made in told.values():
        assert sg.load_assistant(made.path, target).head.config.feature_layers == [3, 4, 6]
    with pytest.raises(ValueError, match=r"\[2, 4, 5\] and no others, and this head reads \[3, 4, 6\]"):
        sg.export(head, "lmdeploy", tmp_path / "lmdeploy", target)


OPTIONS = {
    "norms": {"norm_before_residual": True, "fc_norm": True, "norm_output": True},
    "one-norm": {"norm_before_fc": True},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "qk-norm": {"qk_norm": True},
    "embeddings": {"own_embeddings": True},
    "borrowed": {"own_lm_head": False, "draft_vocab_size": None},
    "five-states": {"feature_layers": [1, 2, 3, 4, 6]},
    "rope": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}},
}
TAKEN = {
    "vllm": set(OPTIONS),
    "speculators": set(OPTIONS),
    "sglang": {"one-norm", "borrowed", "five-states", "rope"},
    "trtllm": {"one-norm", "borrowed", "five-states", "rope"},
    "lmdeploy": {"embeddings", "borrowed", "rope"},
}


@pytest.mark.parametrize("engine", TAKEN)
@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_is_kept_or_refused_by_name(option: str, engine: str, target: Any, tmp_path: Path) -> None:
    head = small_vocabulary(**OPTIONS[option]) if option != "borrowed" else eagle()
    if option not in TAKEN[engine]:
        named = "reads" if option == "five-states" else "|".join(OPTIONS[option])
        with pytest.raises(ValueError, match=named):
            sg.export(head, engine, tmp_path / "out", target)
        assert not (tmp_path / "out").exists()
        return
    again = sg.load_assistant(sg.export(head, engine, tmp_path / "out", target).path, target).head
    ids, states = torch.arange(7)[None], torch.randn(1, 7, head.config.sources * SIZE)
    embeds = target.get_input_embeddings()(ids)
    ours, theirs = (one(embeds, one.fuse(states)) for one in (head, again))
    assert torch.equal(ours.hidden, theirs.hidden)
    assert torch.equal(ours.features, theirs.features)


@pytest.mark.parametrize(
    ("make", "engine", "named"),
    [
        (lambda: medusa(hidden_act="gelu"), "vllm", "hidden_act"),
        (lambda: medusa(lm_head_bias=True), "tgi", "lm_head_bias"),
        (lambda: medusa(draft_vocab_size=DRAFT), "vllm", "token_map"),
        (lambda: medusa(lm_heads="shared", draft_vocab_size=DRAFT), "tgi", "draft_vocab_size"),
        (lambda: medusa(logit_scale=0.5), "tgi", "logit_scale"),
        (lambda: medusa(num_layers=0), "vllm", "num_layers=0"),
        (lambda: medusa(), "sglang", "no drafter of the kind 'medusa'; it takes eagle, eagle3, draft_model, ngram"),
        (lambda: small_vocabulary(), "tgi", "'eagle3'; it takes medusa, ngram"),
        (lambda: eagle("eagle"), "trtllm", "'eagle'; it takes eagle3"),
        (lambda: eagle("eagle", fc_bias=True), "vllm", "fc_bias"),
        (lambda: eagle("eagle", first_layernorm=True), "vllm", "first_layernorm"),
        (lambda: eagle("eagle", own_embeddings=True), "sglang", "own_embeddings"),
        (lambda: small_vocabulary(sliding_window=4), "vllm", "sliding_window"),
        (lambda: small_vocabulary(feature_layers=[4, 2, 3]), "vllm", "order of the layers"),
        (lambda: small_vocabulary(feature_layers=[2, 3, -1]), "vllm", "final norm"),
        (lambda: small_vocabulary(feature_layers=[0, 2, 3]), "sglang", "embeddings"),
        (lambda: small_vocabulary(feature_layers=[3]), "sglang", "by their width"),
        (lambda: medusa(hidden_size=16), "vllm", "heads"),
        (lambda: sg.Merge(sg.PromptLookup(), sg.SuffixLookup()), "vllm", "no other engine takes a Merge"),
        (lambda: sg.PromptLookup(store=sg.LookupStore()), "vllm", "LookupStore"),
        (lambda: sg.SuffixLookup(store=sg.SuffixStore()), "trtllm", "SuffixStore"),
        (lambda: "suffix", "sglang", "'suffix'"),
        (lambda: {"method": "ngram", "prompt_lookup_mix": 3}, "vllm", "prompt_lookup_mix"),
    ],
)
def test_what_an_engine_has_no_words_for_is_refused(
    make: Callable[[], Any], engine: str, named: str, target: Any, tmp_path: Path
) -> None:
    if named == "heads":  # heads of another width than the target, which the record tells
        drafter = medusa(hidden_size=16, target={"hidden_size": 16})
        named = "hidden_size=16; the target"
    else:
        drafter = make()
    with pytest.raises(ValueError, match=named):
        sg.export(drafter, engine, tmp_path / "out", target)
    assert list(tmp_path.iterdir()) == []


def test_a_target_is_asked_for_where_its_weights_are_needed(target: Any, tmp_path: Path) -> None:
    head = eagle(target={"name": "org/model"})
    made = sg.export(head, "vllm", tmp_path / "out")
    assert "serve org/model " in made.command
    with pytest.raises(ValueError, match="wants an LM head in the file, and this head uses the target's: pass target="):
        sg.export(head, "lmdeploy", tmp_path / "other")
    with pytest.raises(ValueError, match="does not say what it was trained for: pass target="):
        sg.export(eagle(), "vllm", tmp_path / "other")


def test_nothing_that_is_there_is_overwritten(target: Any, tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    with pytest.raises(ValueError, match="not empty"):
        sg.export(medusa(), "vllm", tmp_path, target)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


def test_what_a_layout_would_lose_is_noticed_and_nothing_stays(
    target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = layouts.third
    monkeypatch.setattr(layouts, "third", lambda *args: {**whole(*args), "norm_output": False})
    with pytest.raises(ValueError, match="the layout of vllm has no place for norm_output of this head"):
        sg.export(small_vocabulary(norm_output=True), "vllm", tmp_path / "out", target)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_is_rounded_once(dtype: str, target: Any, tmp_path: Path) -> None:
    head = small_vocabulary()
    config, tensors = wrote(sg.export(head, "vllm", tmp_path / "out", target, dtype=dtype).path)
    assert config["torch_dtype"] == dtype
    assert torch.equal(tensors["fc.weight"], head.fc.weight.to(getattr(torch, dtype)))
    assert head.fc.weight.dtype == torch.float32
    with pytest.raises(ValueError, match="no engine computes in"):
        sg.export(small_vocabulary().double(), "vllm", tmp_path / "double", target)


def test_a_sibling_is_a_model_that_transformers_loads(target: Any, tmp_path: Path) -> None:
    small = tiny.llama(hidden_size=16, num_hidden_layers=1, vocab_size=IDS).float()
    for engine, words in (("vllm", "draft_model"), ("sglang", "STANDALONE"), ("trtllm", "Draft_Target")):
        made = sg.export(sg.DraftModel(small), engine, tmp_path / engine, target, dtype="bfloat16")
        again = sg.load_assistant(made.path, target)
        assert words in json.dumps(dict(made.config))
        halved = small.lm_head.weight.bfloat16().float()
        assert torch.equal(again.model.lm_head.weight, halved)
    assert small.dtype == torch.float32
    with pytest.raises(ValueError, match="'draft_model'; it takes"):
        sg.export(small, "lmdeploy", tmp_path / "lmdeploy", target)
    other = tiny.llama(hidden_size=16, num_hidden_layers=1, vocab_size=50).float()
    with pytest.raises(ValueError, match="50 ids"):
        sg.export(other, "vllm", tmp_path / "other", target)


def test_vllms_config_is_one_that_assistant_takes(target: Any, tmp_path: Path) -> None:
    for name, drafter in (("e", small_vocabulary()), ("m", medusa()), ("n", "ngram"), ("s", "suffix")):
        made = sg.export(drafter, "vllm", tmp_path / name, target, num_speculative_tokens=2)
        assert json.loads((made.path / "speculative_config.json").read_text()) == made.config
        assert made.config["num_speculative_tokens"] == 2
        config = json.loads(shlex.split(made.command)[-1])
        assert config == made.config
        run(target, ONE, assistant=config, max_new_tokens=6)
        assert (made.path / "launch.sh").read_text().splitlines()[-1] == made.command


def test_the_command_line_writes_and_says_how_to_start(target: Any, tmp_path: Path) -> None:
    medusa(lm_heads="target").save_pretrained(tmp_path / "heads")
    words = ["export", str(tmp_path / "heads"), "--to", "vllm", "--target", target.config.name_or_path]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out"), "--dtype", "float16"])
    assert result.exit_code == 0, result.output
    assert "vllm serve" in result.stdout
    assert "0.33 no longer has Medusa" in result.stderr
    config, tensors = wrote(tmp_path / "out")
    assert tensors["lm_head.weight"].dtype == torch.float16
    assert config["original_lm_head"]
    refused = CliRunner().invoke(app, [*words[:3], "sglang", *words[4:], "--out", str(tmp_path / "none")])
    assert refused.exit_code != 0
    assert "it takes eagle, eagle3" in " ".join(refused.output.replace("│", " ").split())


# The library itself

SPECULATORS = "speculators==0.9.0"


@functools.cache
def python_of_speculators(folder: Path) -> str:
    """A python that has the library, with the transformers it wants: named by SPECULATORS_PYTHON, or made anew."""
    if given := os.environ.get("SPECULATORS_PYTHON"):
        return given
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", SPECULATORS], check=True)
    return python


def step_by_step(head: EagleHead, target: Any, ids: Tensor, states: Tensor, steps: int) -> Tensor:
    """`(steps, length, known ids)` of logits: at each place alone, continued with the tokens that are there."""
    embedding = head.embed_tokens if head.config.own_embeddings else target.get_input_embeddings()
    embeds, features = embedding(ids), head.fuse(states)
    lm_head: nn.Module = head.lm_head if head.config.own_lm_head else target.lm_head
    rows = []
    for place in range(ids.shape[1]):
        seen, known, row = embeds[:, : place + 1], features[:, : place + 1], []
        for step in range(steps):
            output = head(seen, known)
            row.append(lm_head(output.hidden[0, -1]))
            follows = ids[:, place + step + 1 : place + step + 2]
            # Behind the text's end the library goes on with id 0.
            follows = follows if follows.numel() else torch.zeros(1, 1, dtype=torch.long)
            seen = torch.cat([seen, embedding(follows)], dim=1)
            known = torch.cat([known, output.features[:, -1:]], dim=1)
        rows.append(torch.stack(row))
    return torch.stack(rows, dim=1)


@pytest.mark.slow
@torch.no_grad()
def test_the_library_speculators_loads_it_and_says_the_same(target: Any, tmp_path: Path) -> None:
    heads = {
        "plain": small_vocabulary(),
        "borrowed": eagle(),
        "two": small_vocabulary(num_hidden_layers=2, norm_before_residual=True),
        "qwen3": small_vocabulary(qk_norm=True, norm_output=True),
        "norms": small_vocabulary(fc_norm=True, own_embeddings=True),
        "norm": small_vocabulary(norm_before_fc=True, feature_layers=[1, 3, 5, 6]),
        "biases": small_vocabulary(qkv_bias=True, o_bias=True, mlp_bias=True),
        "linear": small_vocabulary(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}),
    }
    ids = torch.randint(IDS, (1, 9), generator=torch.Generator().manual_seed(3))
    inputs: dict[str, Tensor] = {"input_ids": ids}
    folders = []
    for name, head in heads.items():
        inputs[name] = torch.randn(1, 9, head.config.sources * SIZE, generator=torch.Generator().manual_seed(4))
        folders.append(str(sg.export(head, "speculators", tmp_path / name, target).path))
    torch.save(inputs, tmp_path / "inputs")
    script = str(Path(__file__).with_name("speculators_forward.py"))
    python = python_of_speculators(tmp_path / "speculators")
    words = [python, script, str(tmp_path / "inputs"), str(tmp_path / "outputs"), *folders]
    environment = {**os.environ, "TORCH_COMPILE_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = torch.load(tmp_path / "outputs")
    for name, head in heads.items():
        theirs = said[name]
        assert theirs["class"] == "Eagle3DraftModel"
        assert tuple(theirs["layers"]) == head.config.layers_of(LAYERS)
        assert head.to_target is None or torch.equal(theirs["d2t"], head.d2t)
        ours = step_by_step(head, target, ids, inputs[name], 3)
        torch.testing.assert_close(theirs["logits"][:, 0], ours, rtol=1e-4, atol=1e-4)
        assert torch.equal(theirs["drafted"][:, 0], ours.argmax(-1))
