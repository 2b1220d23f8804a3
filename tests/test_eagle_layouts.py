"""Every published layout of EAGLE heads loads, means what its source says, and drafts."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path
from typing import Any

import published
import pytest
import tiny
import torch
from published import Published
from published import eagle as layouts
from torch import Tensor
from transformers import PreTrainedModel

import hf_specgen as sg
from hf_specgen.drafters.eagle import Eagle
from hf_specgen.heads import eagle_layouts
from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.eagle import EagleHead
from hf_specgen.heads.layouts import layout_of, read_head

EVERY = pytest.mark.parametrize("layout", layouts.READ, ids=lambda layout: layout.name)
LAYERS = 8  # of the tiny targets

# Which row of the table each is read by; that of the others is the original's EAGLE-3.
READERS = {
    **dict.fromkeys(("eagle-vicuna-7b", "eagle-llama3-8b", "eagle-qwen2-7b", "hass-llama2-7b"), "read_eagle"),
    "eagle-with-norms": "read_eagle",
    **dict.fromkeys(("speculators-eagle", "speculators-hass-norms"), "read_speculators_eagle"),
    **dict.fromkeys(("vllm-eagle", "vllm-eagle-token-map"), "read_vllm_eagle"),
    **dict.fromkeys(("speculators-llama", "speculators-qwen3"), "read_speculators_eagle3"),
}


def opened(layout: Published, folder: Path, **config: Any) -> Checkpoint:
    changed = dataclasses.replace(layout, config={**layout.config, **config}, sizes={**layout.sizes, **config})
    published.fill(changed, folder, seed=0)
    return Checkpoint.open(folder)


def loaded(layout: Published, folder: Path, **config: Any) -> EagleHead:
    head = read_head(opened(layout, folder, **config))
    assert isinstance(head, EagleHead)
    return head


def without(layout: Published, *keys: str) -> Published:
    assert set(keys) <= set(layout.tensors)
    return dataclasses.replace(layout, tensors={k: v for k, v in layout.tensors.items() if k not in keys})


def with_tensors(layout: Published, **tensors: tuple[str, tuple[int, ...]]) -> Published:
    return dataclasses.replace(layout, tensors={**layout.tensors, **tensors})


@functools.cache
def target(hidden_size: int) -> PreTrainedModel:
    return sg.enable(tiny.llama(hidden_size=hidden_size, num_hidden_layers=LAYERS, vocab_size=96))


@EVERY
def test_loads_whole_and_in_its_own_precision(layout: Published, tmp_path: Path) -> None:
    head = loaded(layout, tmp_path)
    assert not any(parameter.isnan().any() or parameter.is_meta for parameter in head.parameters())
    dtypes = {dtype for key, (dtype, _) in layout.tensors.items() if key.endswith("o_proj.weight")}
    assert {str(parameter.dtype).removeprefix("torch.") for parameter in head.parameters()} == dtypes
    assert head.rotary_emb.inv_freq.dtype == torch.float32
    assert not any(module.training for module in head.modules()), "or each call drafts with a copy"


@EVERY
def test_is_read_as_what_it_is(layout: Published, tmp_path: Path) -> None:
    found = layout_of(opened(layout, tmp_path))
    assert found is not None
    assert found.read.__name__ == READERS.get(layout.name, "read_eagle3")


def expected(layout: Published, name: str) -> str:
    """The published key of what `EagleHead` calls `name`, written out once more and the slow way."""
    for ours, theirs in (
        *(("layers.0.", "midlayer."), ("layers.0.", "transformer."), ("", "model.")),
        *(("fc.", "fusion_fc."), ("embed_norm.", "embed_layernorm."), ("embed_norm.", "embedding_layernorm.")),
        *(("embed_norm.", "enorm."), ("feature_norm.", "hnorm.")),
        *(("norm.", "pre_lm_head_layernorm."), ("norm.", "lm_head_layernorm.")),
        *(("layers.0.input_layernorm.", "hidden_layernorm."), ("layers.1.input_layernorm.", "layers.1.hidden_norm.")),
        *(("fc_norm.0.", "aux_norm_low."), ("fc_norm.1.", "aux_norm_mid."), ("fc_norm.2.", "aux_norm_high.")),
    ):
        if name.startswith(ours) and theirs + name.removeprefix(ours) in layout.tensors:
            return theirs + name.removeprefix(ours)
    return name


@EVERY
def test_every_number_lands_in_its_module(layout: Published, tmp_path: Path) -> None:
    head, values = loaded(layout, tmp_path), published.values(layout, seed=0)
    unread = set(values) - {expected(layout, name) for name, _ in head.named_parameters()}
    for name, parameter in head.named_parameters():
        assert torch.equal(parameter, values[expected(layout, name)]), name
    skipped = (
        {"model.norm.weight", "model.layers.0.input_layernorm.weight"} if layout.name.startswith("vllm") else set()
    )
    assert unread <= {"d2t", "t2d", "token_map", *skipped}


class Reference:
    """A layout's forward pass by its own keys and its own config, one entry after the other, as its source has it."""

    def __init__(self, layout: Published):
        config = layout.tiny_config()
        self.config: dict[str, Any] = {
            **config,
            **config.get("transformer_layer_config", {}),
            **config.get("model", {}),
        }
        self.layout, self.values = layout, published.values(layout, seed=0)
        self.eps = float(self.config.get("rms_norm_eps", 1e-6))

    def __contains__(self, name: str) -> bool:
        return expected(self.layout, name) in self.values

    def linear(self, name: str, x: Tensor) -> Tensor:
        weight = self.values[expected(self.layout, name + ".weight")].double()
        return x @ weight.T + (
            self.values[expected(self.layout, name + ".bias")].double() if name + ".bias" in self else 0
        )

    def norm(self, name: str, x: Tensor) -> Tensor:
        scaled = x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        return scaled * self.values[expected(self.layout, name + ".weight")].double()

    def rotated(self, x: Tensor) -> Tensor:
        """Of `(length, heads, size)`; column i turns with column i + size / 2."""
        half = x.shape[-1] // 2
        turns = torch.arange(len(x)).double()[:, None] * torch.tensor(self.frequencies(half)).double()
        cos, sin = turns.cos()[:, None], turns.sin()[:, None]
        return torch.cat([x[..., :half] * cos - x[..., half:] * sin, x[..., half:] * cos + x[..., :half] * sin], -1)

    def frequencies(self, half: int) -> list[float]:
        """Of the turns; slow ones are slowed down further by YaRN (arXiv 2309.00071, with DeepSeek's rounding)."""
        theta = self.config.get("rope_theta") or self.config.get("rope_parameters", {}).get("rope_theta", 10000.0)
        plain = [float(theta) ** (-i / half) for i in range(half)]
        yarn = self.yarn()
        if yarn is None:
            return plain

        def place(turns: float) -> float:
            return half * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)) / math.log(theta)

        low, high = max(math.floor(place(yarn["beta_fast"])), 0), min(math.ceil(place(yarn["beta_slow"])), 2 * half - 1)
        slowed = [min(max((i - low) / ((high - low) or 0.001), 0.0), 1.0) for i in range(half)]
        return [f * (1 - part) + f / yarn["factor"] * part for f, part in zip(plain, slowed, strict=True)]

    def yarn(self) -> dict[str, Any] | None:
        scaling = self.config.get("rope_scaling") or {}
        return scaling if scaling.get("type") == "yarn" else None

    def attention(self, layer: int, x: Tensor) -> Tensor:
        name = f"layers.{layer}.self_attn"
        heads = self.config["num_attention_heads"]
        q, k, v = (self.latent if f"{name}.kv_b_proj.weight" in self else self.plain)(name, x)
        scale = q.shape[-1] ** -0.5
        if yarn := self.yarn():
            scale *= (0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1) ** 2
        out = torch.zeros(len(x), heads, v.shape[-1], dtype=x.dtype)
        for head in range(heads):
            shared = head * k.shape[1] // heads
            scores = q[:, head] @ k[:, shared].T * scale
            scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
            out[:, head] = scores.softmax(-1) @ v[:, shared]
        return self.linear(f"{name}.o_proj", out.flatten(1))

    def plain(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.linear(f"{name}.{kind}_proj", x) for kind in "qkv")
        size = q.shape[1] // self.config["num_attention_heads"]
        q, k, v = (y.view(len(x), -1, size) for y in (q, k, v))
        if f"{name}.q_norm.weight" in self:
            q, k = self.norm(f"{name}.q_norm", q), self.norm(f"{name}.k_norm", k)
        return self.rotated(q), self.rotated(k), v

    def latent(self, name: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """DeepSeek-V2's multi-head latent attention (arXiv 2405.04434, appendix C); even columns turn with odd ones."""
        heads, config = self.config["num_attention_heads"], self.config
        if f"{name}.q_proj.weight" in self:
            q = self.linear(f"{name}.q_proj", x)
        else:
            q = self.linear(f"{name}.q_b_proj", self.norm(f"{name}.q_a_layernorm", self.linear(f"{name}.q_a_proj", x)))
        joined = self.linear(f"{name}.kv_a_proj_with_mqa", x)
        held, turned = joined[:, : config["kv_lora_rank"]], joined[:, config["kv_lora_rank"] :]
        kv = self.linear(f"{name}.kv_b_proj", self.norm(f"{name}.kv_a_layernorm", held)).view(len(x), heads, -1)
        q, still = q.view(len(x), heads, -1), config["qk_nope_head_dim"]

        def paired(y: Tensor) -> Tensor:
            even_odd = y if config.get("rope_interleave") is False else torch.cat([y[..., ::2], y[..., 1::2]], -1)
            return self.rotated(even_odd)

        shared = paired(turned[:, None]).expand(-1, heads, -1)
        return (
            torch.cat([q[..., :still], paired(q[..., still:])], -1),
            torch.cat([kv[..., :still], shared], -1),
            kv[..., still:],
        )

    def layer(self, layer: int, residual: Tensor, attended: Tensor) -> Tensor:
        hidden, name = residual + attended, f"layers.{layer}"
        x = self.norm(f"{name}.post_attention_layernorm", hidden)
        gate = torch.nn.functional.silu(self.linear(f"{name}.mlp.gate_proj", x))
        return hidden + self.linear(f"{name}.mlp.down_proj", gate * self.linear(f"{name}.mlp.up_proj", x))

    def later_layers(self, hidden: Tensor) -> Tensor:
        layer = 1
        while f"layers.{layer}.mlp.up_proj.weight" in self:
            attended = self.attention(layer, self.norm(f"layers.{layer}.input_layernorm", hidden))
            hidden = self.layer(layer, hidden, attended)
            layer += 1
        return hidden

    def eagle(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        skipped = "model" in self.layout.config  # vLLM's first and last norm
        if "embed_norm.weight" in self:
            embeds = self.norm("embed_norm", embeds)
        if "feature_norm.weight" in self:
            states = self.norm("feature_norm", states)
        hidden = self.linear("fc", torch.cat([embeds, states], -1))
        normed = not skipped and "layers.0.input_layernorm.weight" in self
        attended = self.attention(0, self.norm("layers.0.input_layernorm", hidden) if normed else hidden)
        hidden = self.later_layers(self.layer(0, hidden, attended))
        if not skipped and "norm.weight" in self:
            hidden = self.norm("norm", hidden)
        return hidden, hidden

    def eagle3(self, embeds: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        config = self.config
        if config.get("fc_norm") or config.get("use_aux_norm"):
            parts = states.split(config.get("target_hidden_size") or config["hidden_size"], -1)
            states = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in enumerate(parts)], -1)
        if config.get("norm_before_fc"):
            states = self.norm("input_norm", states)
        feature = self.linear("fc", states) if "fc.weight" in self else states
        normed = self.norm("layers.0.hidden_norm", feature)
        both = torch.cat([self.norm("layers.0.input_layernorm", embeds), normed], -1)
        residual = normed if config.get("norm_before_residual") else feature
        hidden = self.later_layers(self.layer(0, residual, self.attention(0, both)))
        normed = self.norm("norm", hidden)
        return normed, normed if config.get("norm_output") else hidden


@EVERY
def test_runs_as_its_source_does(layout: Published, tmp_path: Path) -> None:
    check_forward(loaded(layout, tmp_path), layout)


def check_forward(head: EagleHead, layout: Published) -> None:
    head, config = head.double(), head.config
    generator = torch.Generator().manual_seed(1)
    embeds = torch.randn(7, config.hidden_size, generator=generator, dtype=torch.float64)
    states = torch.randn(7, config.sources * int(config.target_hidden_size or 0), generator=generator).double()
    reference = Reference(layout)
    wanted = (reference.eagle if config.method == "eagle" else reference.eagle3)(embeds, states)
    with torch.no_grad():
        got = head(embeds[None], head.fuse(states)[None])
    for one, other in zip((got.hidden[0], got.features[0]), wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@EVERY
def test_says_the_ids_that_its_map_names(layout: Published, tmp_path: Path) -> None:
    head, values = loaded(layout, tmp_path), published.values(layout, seed=0)
    if "token_map" in values:
        ids: Tensor | None = values["token_map"]
    elif "d2t" in values and head.config.draft_vocab_size != head.config.vocab_size:
        ids = torch.arange(len(values["d2t"])) + values["d2t"]
        assert "t2d" not in values or torch.equal(ids, values["t2d"].nonzero().flatten())
    else:
        ids = None
    assert (ids is None) == (head.to_target is None)
    assert ids is None or torch.equal(ids, head.to_target)


DRAFTS = {layout.name: layout for layout in layouts.READ}


@pytest.mark.parametrize("name", DRAFTS)
@pytest.mark.parametrize("rows", [tiny.ONE, tiny.RAGGED], ids=["one", "ragged"])
def test_drafts_on_a_target_of_its_size(name: str, rows: tiny.Prompt, tmp_path: Path) -> None:
    head = loaded(DRAFTS[name], tmp_path)
    model = target(int(head.config.target_hidden_size or 0))
    drafter = Eagle(head.to(torch.float64), top_k=4, nodes=12)
    plain = tiny.run(model, rows, assistant=sg.Plain(), max_new_tokens=12)
    assert tiny.run(model, rows, assistant=drafter, num_assistant_tokens=3, max_new_tokens=12) == plain


@pytest.mark.parametrize(
    ("layout", "layers"),
    [
        (layouts.EAGLE_VICUNA, [-1]),
        (layouts.EAGLE3_LLAMA, None),
        (layouts.SPECULATORS, None),
        # An id within eagle_config is the layer whose output is read ...
        (layouts.MODELOPT, [2, 4, 5]),
        (layouts.SGLANG_2, [2, 3, 4, 5]),
        (layouts.MODELOPT_MLA, [2, 4, 5]),
        # ... but for lists that begin as the original's layers do, and at the top it is an index.
        (layouts.SPECFORGE_KIMI, [2, 4, 5]),
        (layouts.TORCHSPEC_MLA_31, [2, 4, 5]),
        (layouts.SPECULATORS_QWEN3, [2, 4, 5]),
        (layouts.MODELOPT_FINAL_STATE, [-1]),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_reads_the_states_that_its_config_names(layout: Published, layers: list[int] | None, tmp_path: Path) -> None:
    assert loaded(layout, tmp_path).config.feature_layers == layers


def test_both_numberings_name_the_same_states_of_a_deep_target() -> None:
    # ModelOpt's and SpecForge's defaults for 32 layers, and the original's.
    outputs = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}
    assert eagle_layouts.feature_layers(outputs) == [2, 16, 29]
    assert eagle_layouts.feature_layers({"eagle_aux_hidden_state_layer_ids": [29, 2, 16]}) == [2, 16, 29]


def test_layer_ids_that_could_be_read_otherwise_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="hf_specgen"):
        assert eagle_layouts.feature_layers({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 20, 40]}}) == [
            *(5, 21, 41)
        ]
    assert "[4, 20, 40]" in caplog.text


def test_the_fields_of_a_config_mean_what_they_say(tmp_path: Path) -> None:
    config = loaded(layouts.SPECULATORS_QWEN3, tmp_path / "qwen3").config
    assert (config.qk_norm, config.norm_before_residual, config.norm_before_fc) == (True, True, True)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    # What its config leaves out is the default of a Qwen3 layer.
    assert (config.rms_norm_eps, config.max_position_embeddings) == (1e-6, 32768)
    assert config.target is not None
    assert config.target["name"] == "Qwen/Qwen3-8B"
    config = loaded(layouts.SPECFORGE_31, tmp_path / "31").config
    assert (config.fc_norm, config.norm_output, config.norm_before_residual) == (True, True, False)
    config = loaded(layouts.SPECFORGE_MROPE, tmp_path / "mrope").config
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    config = loaded(layouts.SPECULATORS_HASS, tmp_path / "hass").config
    assert (config.embed_norm, config.first_layernorm, config.final_norm, config.norm_output) == (True,) * 4
    config = loaded(layouts.EAGLE_QWEN2, tmp_path / "qwen2").config
    assert (config.qkv_bias, config.o_bias, config.fc_bias) == (True, False, False)
    config = loaded(layouts.EAGLE3_LLAMA70B, tmp_path / "70b").config
    assert (config.hidden_size, config.target_hidden_size, config.own_embeddings) == (48, 32, True)


def test_the_original_rotates_by_its_own_base(tmp_path: Path) -> None:
    # No rope_theta: 10000, whatever the target's is.
    rope = loaded(layouts.EAGLE3_LLAMA, tmp_path).config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 10000.0}


def test_scaled_rotation_is_read_from_either_field(tmp_path: Path) -> None:
    scaling: dict[str, Any] = {"factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
    scaling["original_max_position_embeddings"] = 64
    old = loaded(layouts.MODELOPT, tmp_path / "old", rope_scaling=scaling, rope_theta=5e5).config.rope_parameters
    new = loaded(
        layouts.MODELOPT,
        tmp_path / "new",
        rope_scaling=None,
        rope_theta=None,
        rope_parameters={**scaling, "rope_theta": 5e5},
    ).config.rope_parameters
    assert old == new == {**scaling, "rope_theta": 5e5}


LATENT = layouts.MODELOPT_MLA
Q_A, Q_B = (f"layers.0.self_attn.q_{part}" for part in ("a_proj.weight", "b_proj.weight"))
# In DeepSeek-V2-Lite's manner: queries that are not compressed.
UNCOMPRESSED = with_tensors(
    without(LATENT, Q_A, Q_B, "layers.0.self_attn.q_a_layernorm.weight"),
    **{"layers.0.self_attn.q_proj.weight": ("bfloat16", (12288, 14336))},
)
LATENTS: dict[str, tuple[Published, dict[str, Any]]] = {
    "queries that are not compressed": (UNCOMPRESSED, {"q_lora_rank": None}),
    "half by half": (LATENT, {"rope_interleave": False}),
    "another mscale": (
        LATENT,
        {"rope_scaling": {**LATENT.config["rope_scaling"], "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "a fast and a slow beta": (layouts.TORCHSPEC_MLA_31, {"original_max_position_embeddings": 4096}),
    "heads of a target": (LATENT, {"num_key_value_heads": 1, "head_dim": 7}),
    "biases": (
        with_tensors(
            LATENT,
            **{
                f"layers.0.self_attn.{name}.bias": ("bfloat16", (size,))
                for name, size in (("q_a_proj", 1536), ("kv_a_proj_with_mqa", 576), ("o_proj", 7168))
            },
        ),
        {},
    ),
}


@pytest.mark.parametrize("case", LATENTS)
def test_variants_of_latent_attention_run_as_their_sources_do(case: str, tmp_path: Path) -> None:
    layout, config = LATENTS[case]
    layout = dataclasses.replace(layout, config={**layout.config, **config}, sizes={**layout.sizes, **config})
    check_forward(loaded(layout, tmp_path), layout)


def test_one_midlayer_is_one_layer_whatever_the_config_copied(tmp_path: Path) -> None:
    assert loaded(layouts.SPECFORGE_HF, tmp_path).config.num_hidden_layers == 1


def test_a_map_of_ids_instead_of_offsets_is_noticed(tmp_path: Path) -> None:
    plain = loaded(layouts.SPECFORGE, tmp_path / "offsets")
    values = published.values(layouts.SPECFORGE, seed=0)
    values["d2t"] += torch.arange(len(values["d2t"]))
    for masked in (True, False):
        folder = tmp_path / f"ids-{masked}"
        published.fill(layouts.SPECFORGE, folder, seed=0)
        held = values if masked else {key: value for key, value in values.items() if key != "t2d"}
        published.save(held, folder, layouts.SPECFORGE.file)
        head = read_head(Checkpoint.open(folder))
        assert isinstance(head, EagleHead)
        assert torch.equal(head.to_target, plain.to_target)


def test_the_mask_decides_between_offsets_and_ids(tmp_path: Path) -> None:
    """A map of 0, 1, 2, ... may add to each id its own number, or say that the first ids are kept."""
    layout = dataclasses.replace(layouts.SPECFORGE, sizes={**layouts.SPECFORGE.sizes, 32000: 32})
    places = torch.arange(32)
    masks = {"offsets": 2 * places, "ids": places, "none": None}
    for name, kept in masks.items():
        folder = tmp_path / name
        published.fill(layout, folder, seed=0)
        values = {**published.values(layout, seed=0), "d2t": places}
        values["t2d"] = torch.zeros(96, dtype=torch.bool)
        if kept is not None:
            values["t2d"][kept] = True
        published.save(values, folder, layout.file)
        head = read_head(Checkpoint.open(folder))
        assert isinstance(head, EagleHead)
        assert torch.equal(head.to_target, places if name == "ids" else 2 * places)


def test_a_mask_and_a_map_that_keep_different_numbers_of_ids_are_refused(tmp_path: Path) -> None:
    values = published.values(layouts.SPECFORGE, seed=0)
    count, kept = len(values["d2t"]), values["t2d"].nonzero()
    values["t2d"][kept[0]] = False
    published.fill(layouts.SPECFORGE, tmp_path, seed=0)
    published.save(values, tmp_path, layouts.SPECFORGE.file)
    with pytest.raises(ValueError, match=f"t2d keeps {count - 1} ids, and d2t has {count}"):
        read_head(Checkpoint.open(tmp_path))


def test_what_drafts_in_parallel_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = with_tensors(layouts.MODELOPT, **{"parallel_draft_heads.0.0.linear.weight": ("bfloat16", (4096, 4096))})
    head, plain = loaded(more, tmp_path / "more"), loaded(layouts.MODELOPT, tmp_path / "plain")
    assert head.state_dict().keys() == plain.state_dict().keys()
    assert ["parallel_draft_heads.0.0.linear.weight" in message for message in caplog.messages] == [True]


@pytest.mark.parametrize("layout", layouts.REFUSED, ids=lambda layout: layout.name)
def test_known_variants_that_cannot_run_are_refused_by_name(layout: Published, tmp_path: Path) -> None:
    kind = {"speculators-peagle": "P-EAGLE"}[layout.name]
    with pytest.raises(ValueError, match=kind):
        read_head(opened(layout, tmp_path))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"architectures": ["LlamaForCausalLMEagle4"]}, "EAGLE-4"),
        ({"partial_rotary_factor": 0.5}, "partial rotary"),
        ({"mla_use_nope": True}, "latent attention that is not rotated"),
    ],
    ids=["eagle-4", "rotary", "nope"],
)
def test_variants_told_by_the_config_are_refused_by_name(config: dict[str, Any], kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=kind):
        loaded(layouts.SPECFORGE, tmp_path, **config)


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("layers.0.mlp.experts.0.gate_proj.weight", "mixture of experts"),
        ("eagle_layers.0.self_attn.q_proj.weight", "MiniCPM"),
        ("eagle_linear.weight", "Mistral"),
        ("layers.0.mlp.gate_proj.weight_scale", "quantized"),
    ],
)
def test_variants_told_by_their_keys_are_refused_by_name(key: str, kind: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=kind):
        loaded(with_tensors(layouts.EAGLE_LLAMA3, **{key: ("float16", (4096, 4096))}), tmp_path)


def test_what_lacks_and_what_is_left_over_is_listed(tmp_path: Path) -> None:
    layout = with_tensors(without(layouts.SPECFORGE, "norm.weight", "d2t"), **{"extra.weight": ("bfloat16", (4096,))})
    with pytest.raises(ValueError, match=r"lacks d2t, norm\.weight and has extra\.weight, which nothing reads"):
        loaded(layout, tmp_path)


CONTRADICTIONS: dict[str, tuple[Published, dict[str, Any], str]] = {
    "layers": (layouts.MODELOPT_2, {"num_hidden_layers": 1}, "num_hidden_layers=1, and its keys are of 2"),
    "sources": (layouts.SPECULATORS_QWEN3, {"eagle_aux_hidden_state_layer_ids": [2, 4]}, r"3 states of 32.*\[2, 4\]"),
    "default sources": (layouts.SGLANG_2, {"eagle_config": {}}, "4 states of 32.*says none, so 3"),
    "vocabulary": (layouts.SPECFORGE, {"vocab_size": 97}, r"vocab_size=97, and t2d has shape \(96,\)"),
    "draft vocabulary": (layouts.MODELOPT, {"draft_vocab_size": 63}, "draft_vocab_size=63, and its map has 64"),
    "heads": (layouts.EAGLE_LLAMA3, {"num_key_value_heads": 4}, r"k_proj\.weight has shape \(16, 32\).*\(32, 32\)"),
    "bias": (layouts.EAGLE_LLAMA3, {"bias": True}, r"lacks fc\.bias"),
    "norm": (layouts.SPECFORGE, {"norm_before_fc": True}, r"lacks input_norm\.weight"),
    "windows": (layouts.MODELOPT_2, {"layer_types": ["sliding_attention", "full_attention"]}, "windows in some"),
    "latent rank": (
        layouts.MODELOPT_MLA,
        {"kv_lora_rank": 11},
        r"kv_a_proj_with_mqa\.weight has .*\(16, 64\).*\(15, 64\)",
    ),
    "no query rank": (layouts.MODELOPT_MLA, {"q_lora_rank": None}, r"lacks layers\.0\.self_attn\.q_proj\.weight and"),
    "no latent rank": (layouts.MODELOPT_MLA, {"kv_lora_rank": None}, "does not say kv_lora_rank"),
    "no size of values": (layouts.MODELOPT_MLA, {"v_head_dim": None}, "does not say v_head_dim"),
    "no size": (layouts.EAGLE_LLAMA3, {"num_attention_heads": None}, "does not say num_attention_heads"),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions_name_both_sides(case: str, tmp_path: Path) -> None:
    layout, config, message = CONTRADICTIONS[case]
    with pytest.raises(ValueError, match=message):
        loaded(layout, tmp_path, **config)


def test_windows_of_layers_that_are_there_are_read(tmp_path: Path) -> None:
    # Trainers copy a target's whole list of layers, and its window where no layer has one.
    kinds = ["sliding_attention", "full_attention"]
    head = loaded(layouts.SPECFORGE, tmp_path / "first", layer_types=kinds, sliding_window=32)
    assert head.config.sliding_window == 32
    head = loaded(layouts.SPECFORGE, tmp_path / "none", layer_types=kinds[::-1], sliding_window=32)
    assert head.config.sliding_window is None


def test_a_draft_vocabulary_needs_its_lm_head(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"lacks lm_head\.weight"):
        loaded(without(layouts.SPECFORGE, "lm_head.weight"), tmp_path)
    # Of all ids it is the target's.
    assert not loaded(without(layouts.MODELOPT_2, "lm_head.weight"), tmp_path / "whole").config.own_lm_head


def test_a_map_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    values = published.values(layouts.MODELOPT, seed=0)
    values["d2t"][-1] = 1000
    published.fill(layouts.MODELOPT, tmp_path, seed=0)
    published.save(values, tmp_path, layouts.MODELOPT.file)
    with pytest.raises(ValueError, match="d2t must lead to 64 of the target's 96 ids, each once"):
        read_head(Checkpoint.open(tmp_path))


def test_a_map_within_one_vocabulary_is_refused_unless_it_changes_nothing(tmp_path: Path) -> None:
    values = published.values(layouts.EAGLE3_VICUNA, seed=0)
    published.fill(layouts.EAGLE3_VICUNA, tmp_path, seed=0)
    values["d2t"] = torch.tensor([1, -1] + [0] * 94)
    published.save(values, tmp_path, layouts.EAGLE3_VICUNA.file)
    with pytest.raises(ValueError, match="d2t renames ids, and both vocabularies are of 96"):
        read_head(Checkpoint.open(tmp_path))
    # The ids themselves, and a mask that was never set.
    published.save({**values, "d2t": torch.arange(96), "t2d": torch.zeros(96).bool()}, tmp_path, "pytorch_model.bin")
    head = read_head(Checkpoint.open(tmp_path))
    assert isinstance(head, EagleHead)
    assert head.to_target is None


@pytest.mark.parametrize("layout", [layouts.EAGLE_VICUNA, layouts.SPECFORGE], ids=lambda layout: layout.name)
def test_saves_and_loads_again(layout: Published, tmp_path: Path) -> None:
    head = loaded(layout, tmp_path / "published")
    head.save_pretrained(tmp_path / "own")
    again = read_head(Checkpoint.open(tmp_path / "own"))
    assert isinstance(again, EagleHead)
    assert again.config.to_dict() == head.config.to_dict()
    ours, theirs = head.state_dict(), again.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_the_page_tells_every_layout() -> None:
    page = (Path(__file__).parents[1] / "docs" / "checkpoints.md").read_text(encoding="utf-8")
    untold = [layout.name for layout in (*layouts.READ, *layouts.REFUSED) if f"`{layout.name}`" not in page]
    assert not untold
