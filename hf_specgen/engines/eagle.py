"""EAGLE heads in the layouts that engines load: the names are the original's, the config around them differs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from hf_specgen.engines.plan import Job, dtype_of, rebuilt
from hf_specgen.heads.eagle import EagleConfig, EagleHead
from hf_specgen.heads.eagle_layouts import EAGLE3_NAMES
from hf_specgen.heads.recorded import TargetRecord

# Of no layout's network here: what a head may have that was read from others' files.
PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "kv_lora_rank": (None,),
    "sliding_window": (None,),
}
FIRST: dict[str, tuple[Any, ...]] = {
    **PLAIN,
    "embed_norm": (False,),
    "feature_norm": (False,),
    "first_layernorm": (False,),
    "fc_norm": (False,),
    "norm_before_fc": (False,),
    "final_norm": (False,),
    "norm_output": (False,),
    "own_lm_head": (False,),
    "qk_norm": (False,),
    "feature_layers": ([-1],),
}
THIRD: dict[str, tuple[Any, ...]] = {**PLAIN, "fc_bias": (False,), "final_norm": (True,)}
UNBIASED: dict[str, tuple[Any, ...]] = {"qkv_bias": (False,), "o_bias": (False,), "qk_norm": (False,)}

LATER_NORM = re.compile(r"(layers\.[1-9]\d*\.)input_layernorm\.")
# What the original calls the first layer.
FIRST_LAYER = next(theirs for theirs, ours in EAGLE3_NAMES.items() if ours == "layers.0.")


def layers_of(head: EagleHead, job: Job) -> list[int] | None:
    """The target's states that an EAGLE-3 head reads, as indices of `hidden_states`; None if that cannot be known here.

    Then they are the original's, 2, L // 2 and L - 3 of a target of L layers, which every engine takes by default.

    Raises:
        ValueError: they are in no order that engines know, or the final state is among several.
    """
    named = head.config.feature_layers
    count = job.target.num_layers or TargetRecord.from_dict(head.config.target or {}).num_layers
    if not head.config.use_fc or (named is None and count is None):
        return None
    listed = list(head.config.layers_of(count)) if count is not None else list(named or ())
    if count is not None:
        listed = [layer if layer >= 0 or layer == -1 else count + 1 + layer for layer in listed]
    if min(listed) < 0:
        raise ValueError(
            f"{job.engine} hands out the outputs of the target's layers, and feature_layers={named} of this head names "
            "a state behind the final norm, or counts from the end of a target that is not known"
        )
    if listed != sorted(set(listed)):
        raise ValueError(
            f"{job.engine} joins the target's states in the order of the layers, each once, and this head reads "
            f"feature_layers={named}"
        )
    return listed


def refuse_embeddings(job: Job, layers: list[int] | None) -> None:
    """Refuses heads that read the target's embeddings as they are, where an engine has only outputs of layers."""
    if layers and layers[0] == 0:
        raise ValueError(
            f"{job.engine} hands out outputs of layers only; feature_layers={layers} has the embeddings (0)"
        )


def refuse_own_embeddings(job: Job, config: EagleConfig) -> None:
    """Refuses embeddings that the engine would put the target's in the place of."""
    if config.own_embeddings and config.hidden_size == config.target_hidden_size:
        raise ValueError(
            f"{job.engine} uses the target's embeddings in a head that is as wide as the target, and this head has "
            "own_embeddings"
        )


def refuse_one_state(job: Job, config: EagleConfig) -> None:
    """Refuses heads whose `fc` the engine would leave out, since it takes as many numbers as it gives."""
    if config.sources * int(config.target_hidden_size or 0) == config.hidden_size:
        raise ValueError(
            f"{job.engine} tells the target's states from the head's own by their width, and this head reads "
            f"{config.sources} of {config.target_hidden_size} and is {config.hidden_size} wide itself"
        )


def with_lm_head(head: EagleHead, job: Job) -> EagleHead:
    """The same head with an LM head of its own, the target's if it had none."""
    if head.config.own_lm_head:
        return head
    why = f"{job.engine} wants an LM head in the file, and this head uses the target's"
    return _with(head, job, "lm_head.weight", job.target.lm_head(why), "own_lm_head")


def with_embeddings(head: EagleHead, job: Job) -> EagleHead:
    """The same head with embeddings of its own, the target's if it had none."""
    if head.config.own_embeddings:
        return head
    why = f"{job.engine} wants embeddings in the file, and this head uses the target's"
    return _with(head, job, "embed_tokens.weight", job.target.embeddings(why), "own_embeddings")


def _with(head: EagleHead, job: Job, name: str, weight: Tensor, field: str) -> EagleHead:
    wanted = (head.config.vocab_size, head.config.hidden_size)
    if tuple(weight.shape) != wanted:
        raise ValueError(
            f"{job.engine}: {name} of the target {job.target.name} has shape {tuple(weight.shape)}, the head needs "
            f"{wanted}"
        )
    tensors = head.state_dict()
    return rebuilt(head, {**tensors, name: weight.to(tensors["layers.0.mlp.up_proj.weight"].dtype)}, **{field: True})


def with_fc_bias(head: EagleHead) -> EagleHead:
    """The same head with a bias in `fc`, zeros if it had none."""
    if head.config.fc_bias:
        return head
    tensors = head.state_dict()
    return rebuilt(head, {**tensors, "fc.bias": torch.zeros_like(tensors["fc.weight"][:, 0])}, fc_bias=True)


def tensors_of(head: EagleHead, mask: bool = True) -> dict[str, Tensor]:
    """The head's tensors, and beside `d2t` its mask over the target's ids, `t2d`."""
    tensors = dict(head.state_dict())
    if mask and "d2t" in tensors:
        ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        tensors["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def later_norms_hidden(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are called where the norm of a later layer's input is its `hidden_norm`."""
    return {LATER_NORM.sub(r"\1hidden_norm.", name): tensor for name, tensor in tensors.items()}


def midlayer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a head of one layer as the original calls them."""
    return {name.replace("layers.0.", FIRST_LAYER): tensor for name, tensor in tensors.items()}


def network(head: EagleHead) -> dict[str, Any]:
    """The part of a config that describes a layer, as transformers' Llama and Qwen3 have it."""
    config = head.config
    rope = dict(config.rope_parameters or {})
    theta = rope.pop("rope_theta", 10_000.0)
    scaled = rope if rope.get("rope_type", "default") != "default" else None
    names = (
        *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
        *("head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings", "vocab_size"),
    )
    return {
        "model_type": "qwen3" if config.qk_norm else "llama",
        **{name: getattr(config, name) for name in names},
        "rope_theta": theta,
        "rope_scaling": scaled,
        "attention_bias": config.o_bias or config.qkv_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": False,
    }


def first(head: EagleHead, architecture: str) -> dict[str, Any]:
    """The config of an EAGLE-1 or 2 head."""
    return {"architectures": [architecture], **network(head), "torch_dtype": dtype_of(head.state_dict())}


def third(head: EagleHead, architecture: str, layers: list[int] | None) -> dict[str, Any]:
    """The config of an EAGLE-3 head, layer ids in both numberings: those at the top go before those within.

    Args:
        head: whose config it is.
        architecture: what the engine calls it.
        layers: the target's states that are read; None for the engine's default.
    """
    config = head.config
    inner: dict[str, Any] = {"use_aux_hidden_state": config.use_fc, "norm_before_fc": config.norm_before_fc}
    if layers is not None:
        # Within, an id names the layer whose output is read (ModelOpt, SGLang); at the top it is an index (vLLM).
        inner["eagle_aux_hidden_state_layer_ids"] = [layer - 1 for layer in layers]
    return {
        "architectures": [architecture],
        **network(head),
        "target_hidden_size": config.target_hidden_size,
        # Engines take null as "the target's LM head".
        "draft_vocab_size": config.draft_vocab_size if config.own_lm_head else None,
        **({} if layers is None else {"eagle_aux_hidden_state_layer_ids": layers}),
        "eagle_config": inner,
        "norm_before_residual": config.norm_before_residual,
        "fc_norm": config.fc_norm,
        "norm_before_fc": config.norm_before_fc,
        "norm_output": config.norm_output,
        "torch_dtype": dtype_of(head.state_dict()),
    }
