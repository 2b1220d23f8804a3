"""The model that a drafter is for, as the trainings take it: frozen, in few bits if asked for, or adapted."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

from hf_specgen.prompt import generative
from running.runs import CommonArguments

NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def load_target(arguments: CommonArguments, quantize: bool = True) -> PreTrainedModel:
    """The model, with nothing to learn.

    Args:
        arguments: of the script.
        quantize: in few bits, if `arguments.quantize` says so; else whole.
    """
    kwargs: dict[str, Any] = {}
    if arguments.quantize is not None and quantize:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        compute = torch.bfloat16 if device == "cuda" else torch.float32
        kind: Any = BitsAndBytesConfig
        bits = {**NF4, "bnb_4bit_compute_dtype": compute} if arguments.quantize == "4bit" else {"load_in_8bit": True}
        kwargs = {"quantization_config": kind(**bits), "device_map": device}
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        arguments.target, revision=arguments.revision or "main", dtype=arguments.dtype, **kwargs
    )
    return model.requires_grad_(False)


def whole_target(arguments: CommonArguments, target: PreTrainedModel, sharded: bool) -> PreTrainedModel:
    """The model with all its weights here: loaded again where those in training lie in pieces on several ranks."""
    return load_target(arguments) if sharded else target


def let_gradients_through(model: PreTrainedModel) -> PreTrainedModel:
    """A quantized model that an adapter can learn in.

    On CPUs with bfloat16 a pass in eval mode packs 4-bit weights anew, and no gradient gets through them any more.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return model


def with_lora(model: PreTrainedModel, rank: int, alpha: int, dropout: float) -> nn.Module:
    """A model with LoRA on all its linear layers but the LM head (arXiv 2106.09685), which is what then learns."""
    import peft

    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    return cast(nn.Module, peft.get_peft_model(model, config))


def hidden_states(target: nn.Module, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:
    """A target's `hidden_states`, each `(batch, tokens, hidden)`, without logits where it can."""
    kwargs: dict[str, Any] = {"attention_mask": attention_mask, "output_hidden_states": True, "use_cache": False}
    if "logits_to_keep" in inspect.signature(generative(target).forward).parameters:
        kwargs["logits_to_keep"] = 1
    return cast("tuple[Tensor, ...]", target(input_ids, **kwargs).hidden_states)
