"""How EAGLE heads (1, 2 and 3) are published, and how each layout becomes an `EagleHead`.

docs/checkpoints.md says what each was checked against.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from hf_specgen.heads.checkpoint import Checkpoint
from hf_specgen.heads.eagle import EagleConfig, EagleHead
from hf_specgen.heads.filling import filled
from hf_specgen.heads.recorded import TargetRecord
from hf_specgen.heads.rotary import HeadRotaryEmbedding
from hf_specgen.heads.said import fault_of

logger = logging.getLogger(__name__)

# What each layout calls the modules that EagleHead names otherwise.
EAGLE_NAMES = {
    # Red Hat's variant with norms, as it was before their library took it over.
    "embed_layernorm.": "embed_norm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "lm_head_layernorm.": "norm.",
}
EAGLE3_NAMES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}
SPECULATORS_EAGLE_NAMES = {
    "fusion_fc.": "fc.",
    "transformer.": "layers.0.",
    "embedding_layernorm.": "embed_norm.",
    "pre_lm_head_layernorm.": "norm.",
}
VLLM_EAGLE_NAMES = {"enorm.": "embed_norm.", "hnorm.": "feature_norm."}

# Follows from other weights, or is the target's and only needed to train.
UNREAD = re.compile(r"t2d|verifier_norm\.weight|verifier_lm_head\.weight|.*rotary_emb\.inv_freq")
LAYER = re.compile(r"layers\.(\d+)\.")


@dataclass(frozen=True)
class Renamed:
    """A checkpoint with its keys as `EagleHead` names them.

    Attributes:
        checkpoint: what is read.
        config: the part of its config that describes the network.
        keys: by our names, the names they have there.
        mask: the key of the mask over the target's ids that the head can say, if there is one.
    """

    checkpoint: Checkpoint
    config: Mapping[str, Any]
    keys: dict[str, str]
    mask: str | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the weight that we call `name`."""
        return self.checkpoint.shapes[self.keys[name]][1]

    def error(self, text: str) -> ValueError:
        """An error that says where."""
        return ValueError(f"{self.checkpoint.where}: {text}")

    def get(self, field: str) -> Any:
        """A field of the config.

        Raises:
            ValueError: it is not there.
        """
        if not self.checkpoint.config:
            raise self.error(f"there is no config.json beside its weights to say {field}, which no weight tells")
        if self.config.get(field) is None:
            raise self.error(f"its config does not say {field}, which no weight tells")
        return self.config[field]


def is_own(checkpoint: Checkpoint) -> bool:
    """What `EagleHead.save_pretrained` writes."""
    return checkpoint.config.get("model_type") == EagleConfig.model_type


def is_speculators_eagle3(checkpoint: Checkpoint) -> bool:
    """The library speculators' EAGLE-3, such as RedHatAI's."""
    return checkpoint.config.get("speculators_model_type") in ("eagle3", "peagle")


def is_speculators_eagle(checkpoint: Checkpoint) -> bool:
    """The EAGLE-1 and HASS of the library speculators, which no longer writes them."""
    return checkpoint.config.get("speculators_model_type") == "eagle"


def is_vllm_eagle(checkpoint: Checkpoint) -> bool:
    """EAGLE-1 with the network's config nested, as vLLM wants it."""
    return checkpoint.config.get("model_type") == "eagle" and isinstance(checkpoint.config.get("model"), Mapping)


def is_eagle3(checkpoint: Checkpoint) -> bool:
    """EAGLE-3 as the original, SpecForge, AngelSlim and ModelOpt write it: a first layer with a norm of the feature."""
    bare = {key.removeprefix("model.") for key in checkpoint.shapes}
    return any(key in bare for key in ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"))


def is_eagle(checkpoint: Checkpoint) -> bool:
    """EAGLE-1 and 2 as the original writes them, and HASS: an `fc` over embedding and state, and layers."""
    bare = {key.removeprefix("model."): key for key in checkpoint.shapes}
    if "eagle_linear.weight" in bare or any(key.startswith("eagle_layers.") for key in bare):
        return True
    if "fc.weight" not in bare or not any(LAYER.match(key) for key in bare):
        return False
    _, shape = checkpoint.shapes[bare["fc.weight"]]
    # DFlash heads have the same names but for a norm of the fused state.
    return len(shape) == 2 and shape[1] == 2 * shape[0] and "hidden_norm.weight" not in bare


def read_own(checkpoint: Checkpoint) -> EagleHead:
    """Reads what `EagleHead.save_pretrained` wrote."""
    config = EagleConfig.from_dict(checkpoint.config)
    return _filled(Renamed(checkpoint, checkpoint.config, {key: key for key in checkpoint.shapes}), config)


def read_eagle(checkpoint: Checkpoint) -> EagleHead:
    """Reads the original's EAGLE-1 and 2."""
    return _read_first(_renamed(checkpoint, checkpoint.config, EAGLE_NAMES))


def read_speculators_eagle(checkpoint: Checkpoint) -> EagleHead:
    """Reads EAGLE-1 of the library speculators."""
    return _read_first(_renamed(checkpoint, _layer_config(checkpoint), SPECULATORS_EAGLE_NAMES))


def read_vllm_eagle(checkpoint: Checkpoint) -> EagleHead:
    """Reads vLLM's EAGLE-1, whose two norms are only there to be skipped unless the config says otherwise."""
    outer, inner = checkpoint.config, dict(checkpoint.config["model"])
    bias = any(outer.get(field) for field in ("bias", "eagle_fc_bias"))
    renamed = _renamed(checkpoint, {**inner, "bias": bias}, VLLM_EAGLE_NAMES)
    for field, name in (("skip_prenorm", "layers.0.input_layernorm.weight"), ("skip_output_norm", "norm.weight")):
        if inner.get(field, True):
            renamed.keys.pop(name, None)
    return _read_first(renamed)


def read_eagle3(checkpoint: Checkpoint) -> EagleHead:
    """Reads EAGLE-3 of the original, SpecForge, AngelSlim and ModelOpt."""
    return _read_third(_renamed(checkpoint, checkpoint.config, EAGLE3_NAMES))


def read_speculators_eagle3(checkpoint: Checkpoint) -> EagleHead:
    """Reads EAGLE-3 of the library speculators."""
    layer = {**_layer_config(checkpoint), "eagle_config": None}
    names = (
        *("draft_vocab_size", "target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
        *("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
    )
    return _read_third(_renamed(checkpoint, {**layer, **{k: checkpoint.config.get(k) for k in names}}, EAGLE3_NAMES))


def feature_layers(config: Mapping[str, Any]) -> list[int] | None:
    """Which of the target's states EAGLE-3 reads, as indices into transformers' `hidden_states`.

    There are two numberings. At the top of a config (speculators, vLLM) an id is such an index. Within `eagle_config`
    (ModelOpt, SpecForge, SGLang) it is the layer whose output is read, so one less; only lists that begin with 2, as
    the original's layers do, are indices there too (sglang#25454). Servers read them in the order of the layers.

    Returns:
        None where the config does not say: then it is the original's choice, see `EagleConfig.layers_of`.
    """
    if ids := config.get("eagle_aux_hidden_state_layer_ids"):
        return sorted(int(i) for i in ids)
    ids = sorted(int(i) for i in (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or ())
    if not ids:
        return None
    if ids[0] > 2:
        logger.warning("layer ids %s are read as outputs of these layers, counted from 0", ids)
    return ids if ids[0] == 2 else [i + 1 for i in ids]


def _layer_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The network's part of a config of speculators, which leaves out what is the default of its model type."""
    held = dict(checkpoint.config.get("transformer_layer_config") or {})
    whole = AutoConfig.for_model(held.pop("model_type", None) or "qwen3", **held).to_dict()
    return {**whole, **held, "tie_word_embeddings": False}


def _renamed(checkpoint: Checkpoint, config: Mapping[str, Any], names: Mapping[str, str]) -> Renamed:
    """Our names for a checkpoint's keys.

    Raises:
        ValueError: it is a variant that cannot be run, or two keys are the same weight.
    """
    if variant := _refused(checkpoint, config):
        raise ValueError(f"{checkpoint.where} is {variant}: such heads are not supported")
    keys: dict[str, str] = {}
    mask = None
    for key in checkpoint.shapes:
        bare = key.removeprefix("model.").removeprefix("model.")
        mask = key if bare == "t2d" else mask
        if UNREAD.fullmatch(bare):
            continue
        if bare.startswith("parallel_draft_heads."):
            logger.warning("%s: %s is not used; the head drafts token by token", checkpoint.where, key)
            continue
        ours = next((to + bare.removeprefix(name) for name, to in names.items() if bare.startswith(name)), bare)
        if ours in keys:
            raise ValueError(f"{checkpoint.where}: {keys[ours]} and {key} are the same weight")
        keys[ours] = key
    return Renamed(checkpoint, config, keys, mask)


def _refused(checkpoint: Checkpoint, config: Mapping[str, Any]) -> str | None:
    """What kind of head it is, if one whose layout is known and that cannot be run."""
    keys, whole = checkpoint.shapes, checkpoint.config
    architectures = " ".join(whole.get("architectures") or ())
    kinds = {
        "a P-EAGLE head, which drafts in parallel": whole.get("speculators_model_type") == "peagle"
        or "peagle" in architectures.lower()
        or any(key.endswith("mask_hidden") for key in keys),
        "an EAGLE-4 head": "Eagle4" in architectures or "efficient_lm_head_config" in whole,
        "a head with latent attention that is not rotated (as of Kimi-K3)": bool(config.get("mla_use_nope")),
        "a head with a mixture of experts": any(".experts." in key for key in keys),
        "a MiniCPM EAGLE head, with scaled residuals": any("eagle_layers." in key for key in keys),
        "an EAGLE head by Mistral's own names (eagle_linear)": any("eagle_linear." in key for key in keys),
        "a Cohere EAGLE head, with parallel attention and MLP": "Cohere" in architectures
        or str(config.get("model_type")).startswith("cohere"),
        "a quantized head": any(_quantized(key, dtype) for key, (dtype, _) in keys.items()),
        "a head with partial rotary embeddings": _rope(config).get("partial_rotary_factor", 1.0) != 1.0,
    }
    return next((kind for kind, found in kinds.items() if found), None)


def _quantized(key: str, dtype: torch.dtype) -> bool:
    if key.endswith(("_scale", "_scale_inv", "_scale_2", "qweight", "weight_packed")):
        return True
    return key.endswith("weight") and (not dtype.is_floating_point or dtype.itemsize < 2)


def _read_first(renamed: Renamed) -> EagleHead:
    """EAGLE-1: what follows from config and keys, then the weights."""
    target = renamed.config.get("target_hidden_size") or renamed.get("hidden_size")
    return _filled(
        renamed,
        EagleConfig(
            method="eagle",
            target_hidden_size=target,
            first_layernorm="layers.0.input_layernorm.weight" in renamed.keys,
            embed_norm="embed_norm.weight" in renamed.keys,
            feature_norm="feature_norm.weight" in renamed.keys,
            final_norm="norm.weight" in renamed.keys,
            # The target's states that the head continues are normed ones.
            norm_output="norm.weight" in renamed.keys,
            **_shape(renamed),
        ),
    )


def _read_third(renamed: Renamed) -> EagleHead:
    """EAGLE-3: what follows from config and keys, then the weights."""
    config, inner = renamed.config, renamed.config.get("eagle_config") or {}
    for name, key in list(renamed.keys.items()):
        # In SGLang's later layers the norm of the input has another name.
        if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name):
            ours = name.replace("hidden_norm", "input_layernorm")
            if ours in renamed.keys:
                raise renamed.error(
                    f"{key} and {renamed.keys[ours]} both norm the input of a layer: it is not known which"
                )
            renamed.keys[ours] = renamed.keys.pop(name)
    layers, target = feature_layers(config), config.get("target_hidden_size") or renamed.get("hidden_size")
    use_fc = bool(inner.get("use_aux_hidden_state", True))
    return _filled(
        renamed,
        EagleConfig(
            method="eagle3",
            target_hidden_size=target,
            feature_layers=_checked_layers(renamed, layers, target) if use_fc else [-1],
            use_fc=use_fc,
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            norm_before_fc=bool(inner.get("norm_before_fc", config.get("norm_before_fc", False))),
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
            norm_output=bool(config.get("norm_output", False)),
            **_shape(renamed),
        ),
    )


def _checked_layers(renamed: Renamed, layers: list[int] | None, target: int) -> list[int] | None:
    """The layers that are read, if the first weight takes as many.

    Raises:
        ValueError: it takes more or fewer, or states of another size.
    """
    if "fc.weight" not in renamed.keys:
        return layers  # it will be listed as missing
    width, count = renamed.shape("fc.weight")[1], 3 if layers is None else len(layers)
    if width != count * target:
        said = "says none, so 3" if layers is None else f"says {layers}"
        raise renamed.error(
            f"{renamed.keys['fc.weight']} takes {width} numbers, so {width / target:g} states of {target}, and of "
            f"eagle_aux_hidden_state_layer_ids its config {said}"
        )
    return layers


def _shape(renamed: Renamed) -> dict[str, Any]:
    """The fields that both methods share."""
    config, keys = renamed.config, renamed.keys
    vocabulary, draft = _vocabularies(renamed)
    verifier = (renamed.checkpoint.config.get("speculators_config") or {}).get("verifier") or {}
    layers = _layers(renamed)
    kinds = set((config.get("layer_types") or ())[:layers])
    if len(kinds) > 1:
        raise renamed.error(f"its layers are of {', '.join(sorted(kinds))}: windows in some only are not supported")
    first, latent = "layers.0.self_attn", _latent(renamed)
    return {
        "hidden_size": renamed.get("hidden_size"),
        "intermediate_size": renamed.get("intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": renamed.get("num_attention_heads"),
        # A latent is expanded to all heads, whatever number was copied from a target's config.
        "num_key_value_heads": None if latent else config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "hidden_act": config.get("hidden_act") or "silu",
        "rms_norm_eps": config.get("rms_norm_eps") or 1e-6,
        "rope_parameters": _rope(config),
        "max_position_embeddings": config.get("max_position_embeddings") or 2048,
        "vocab_size": vocabulary,
        "draft_vocab_size": draft,
        # Several trainers copy the biases of a target's config and make none: the keys are right.
        "fc_bias": "fc.bias" in keys or config.get("bias") is True,
        "qkv_bias": f"{first}.{'kv_a_proj_with_mqa' if latent else 'q_proj'}.bias" in keys,
        "o_bias": f"{first}.o_proj.bias" in keys,
        "mlp_bias": "layers.0.mlp.gate_proj.bias" in keys,
        "qk_norm": f"{first}.q_norm.weight" in keys,
        "own_embeddings": "embed_tokens.weight" in keys,
        "own_lm_head": "lm_head.weight" in keys or draft != vocabulary,
        "sliding_window": config.get("sliding_window") if kinds == {"sliding_attention"} else None,
        "target": TargetRecord(
            name=verifier.get("name_or_path"),
            hidden_size=config.get("target_hidden_size") or config.get("hidden_size"),
            vocab_size=vocabulary,
        ).to_dict(),
        **latent,
    }


def _latent(renamed: Renamed) -> dict[str, Any]:
    """The fields of multi-head latent attention, as in DeepSeek-V3 and Kimi-K2; none where the keys are of plain one.

    Raises:
        ValueError: the config does not say them all.
    """
    if "layers.0.self_attn.kv_a_proj_with_mqa.weight" not in renamed.keys:
        return {}
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {
        **{size: renamed.get(size) for size in sizes},
        # Without it queries are not compressed.
        "q_lora_rank": renamed.config.get("q_lora_rank"),
        "rope_interleave": bool(renamed.config.get("rope_interleave", True)),
    }


def _layers(renamed: Renamed) -> int:
    """How many layers there are.

    Raises:
        ValueError: the config says another number.
    """
    found = 1 + max((int(match[1]) for name in renamed.keys if (match := LAYER.match(name))), default=0)
    said = renamed.config.get("num_hidden_layers")
    # Trainers that have a `midlayer` have no more, whatever number they copied from the target's config.
    single = any("midlayer." in key for key in renamed.keys.values())
    if said is not None and said != found and not single:
        raise renamed.error(f"its config says num_hidden_layers={said}, and its keys are of {found}")
    return found


def _vocabularies(renamed: Renamed) -> tuple[int, int]:
    """How many ids the target has, and how many the head.

    Raises:
        ValueError: config and weights do not agree.
    """
    whole: int = renamed.get("vocab_size")
    mask = (whole,) if renamed.mask is None else renamed.checkpoint.shapes[renamed.mask][1]
    if mask != (whole,):
        raise renamed.error(f"its config says vocab_size={whole}, and t2d has shape {mask}")
    said = renamed.config.get("draft_vocab_size") or renamed.checkpoint.config.get("truncated_vocab_size")
    mapped = next((renamed.shape(name)[0] for name in ("d2t", "token_map") if name in renamed.keys), None)
    draft = said or mapped or whole
    if mapped is not None and mapped != draft:
        raise renamed.error(f"its config says draft_vocab_size={draft}, and its map has {mapped} ids")
    return whole, draft


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding's parameters, from any of the fields that have held them."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if nested := next((rope[kind] for kind in ("full_attention", "sliding_attention") if kind in rope), None):
        rope = dict(nested)
    kind = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or kind or "default"
    theta = rope.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    if kind == "mrope" or "mrope_section" in rope:
        # Of text all three positions are the same, and so is the rotation.
        kind, rope = "default", {k: v for k, v in rope.items() if not k.startswith("mrope")}
    if factor := config.get("partial_rotary_factor"):
        rope.setdefault("partial_rotary_factor", factor)
    return {**rope, "rope_type": kind, "rope_theta": float(theta)}


def _filled(renamed: Renamed, config: EagleConfig) -> EagleHead:
    """A head of this shape with the checkpoint's weights.

    Raises:
        ValueError: keys are missing or left over, one has another shape, or the map to the target's ids is none.
    """
    keys = dict(renamed.keys)
    mapped = [keys.pop(name) for name in ("d2t", "token_map") if name in keys]
    read = dict(zip(keys, renamed.checkpoint.tensors(keys.values()).values(), strict=True))
    if mapped:
        offsets = _offsets(renamed, config, renamed.checkpoint.tensors(mapped)[mapped[0]])
        lm_head = read.get("lm_head.weight")
        if lm_head is not None and len(offsets) != len(lm_head) == config.vocab_size:
            # vLLM takes a whole LM head too and keeps the rows that its map names.
            read["lm_head.weight"] = lm_head[torch.arange(len(offsets)) + offsets]
        if config.draft_vocab_size != config.vocab_size:
            read["d2t"] = offsets
        elif bool(offsets.any()):
            raise renamed.error(f"{mapped[0]} renames ids, and both vocabularies are of {config.vocab_size}")
    head = filled(renamed.checkpoint, lambda: EagleHead(config), read, lambda name: renamed.keys.get(name, name))
    # The frequencies are no weights and still on meta.
    head.rotary_emb = HeadRotaryEmbedding(config).eval()  # type: ignore[arg-type]
    return head


def _offsets(renamed: Renamed, config: EagleConfig, raw: Tensor) -> Tensor:
    """What is added to a draft id to get the target's; some files hold the target's ids themselves.

    Raises:
        ValueError: neither reading gives ids of the target's vocabulary, each once.
    """
    raw = raw.reshape(-1).long()
    places = torch.arange(len(raw))
    readings = [raw - places] if "token_map" in renamed.keys else [raw, raw - places]
    kept = _kept(renamed, len(raw))
    for offsets in readings:
        ids = places + offsets
        if fault_of(ids, config.vocab_size) is None and (kept is None or torch.equal(ids.sort().values, kept)):
            return offsets
    raise renamed.error(
        f"{_map_key(renamed)} must lead to {len(raw)} of the target's {config.vocab_size} ids, each once"
        f"{'' if kept is None else ', those that t2d keeps'}; read as offsets or as ids it does not"
    )


def _kept(renamed: Renamed, count: int) -> Tensor | None:
    """The target's ids that the head can say, by the mask over them; None where there is none or it was never set.

    Raises:
        ValueError: it is set for more or fewer ids than the map has.
    """
    if renamed.mask is None:
        return None
    kept = renamed.checkpoint.tensors([renamed.mask])[renamed.mask].reshape(-1).nonzero().reshape(-1)
    if len(kept) not in (0, count):
        raise renamed.error(f"{renamed.mask} keeps {len(kept)} ids, and {_map_key(renamed)} has {count}: one is wrong")
    return kept if len(kept) else None


def _map_key(renamed: Renamed) -> str:
    return next(renamed.keys[name] for name in ("d2t", "token_map") if name in renamed.keys)
