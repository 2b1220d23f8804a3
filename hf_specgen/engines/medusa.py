"""Medusa heads in the two layouts that engines load: numbered (Medusa-1, TGI) and named (vLLM)."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from hf_specgen.engines.plan import Job, dtype_of, rebuilt
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.medusa_layouts import NAMED_NAMES, NUMBERED_NAMES, Found

LM_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def with_lm_heads(heads: MedusaHeads, job: Job, kept: str) -> MedusaHeads:
    """The same heads with the LM heads that a layout wants: "own", one a head, or "shared", one for all.

    They say the same: copies of the shared one, or of the target's.
    """
    config, tensors = heads.config, dict(heads.state_dict())
    if config.lm_heads == kept:
        return heads
    if config.lm_heads == "target":
        why = f"{job.engine} wants LM heads beside the blocks, and these heads use the target's"
        source = job.target.lm_head(why).to(next(iter(tensors.values())).dtype)
        if config.vocab_size not in (None, len(source)) or source.shape[1] != config.hidden_size:
            raise ValueError(f"{why}: that of {job.target.name} is {tuple(source.shape)}, of another size")
    else:
        source = tensors["lm_heads.0.weight"]
    for head in range(config.num_heads if kept == "own" else 1):
        tensors[f"lm_heads.{head}.weight"] = source.clone()
    return rebuilt(heads, tensors, lm_heads=kept, vocab_size=config.vocab_size or len(source))


def with_biases(heads: MedusaHeads) -> MedusaHeads:
    """The same heads with biases in their blocks, zeros where they had none."""
    if heads.config.block_bias:
        return heads
    tensors = dict(heads.state_dict())
    zeros = {
        name.replace("weight", "bias"): torch.zeros(len(weight), dtype=weight.dtype)
        for name, weight in tensors.items()
        if name.startswith("blocks.")
    }
    return rebuilt(heads, {**tensors, **zeros}, block_bias=True)


def numbered(heads: MedusaHeads, job: Job) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of Medusa-1; without LM heads of its own it is what is called version 2.

    TGI takes whatever has `architectures` in its config for something else, so there are none.
    """
    config = heads.config
    known = Found(*NUMBERED_NAMES, layers=config.num_layers)
    tensors = {known.theirs(name): tensor for name, tensor in heads.state_dict().items()}
    return {
        "base_model_name_or_path": job.target.name,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "torch_dtype": dtype_of(tensors),
        **({"version": "2"} if config.lm_heads == "target" else {}),
    }, tensors


def named(heads: MedusaHeads, job: Job) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of vLLM's layout, with one LM head or one a head."""
    config, shared = heads.config, heads.config.lm_heads == "shared"
    known = Found(*NAMED_NAMES, layers=config.num_layers)
    tensors = {}
    for name, tensor in heads.state_dict().items():
        theirs = name if name == "token_map" else known.theirs(name)
        tensors["lm_head.weight" if shared and LM_HEAD.fullmatch(name) else theirs] = tensor
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "base_model_name_or_path": job.target.name,
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.draft_vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": config.block_bias,
        "original_lm_head": shared,
        "logit_scale": config.logit_scale,
        "torch_dtype": dtype_of(tensors),
    }, tensors
