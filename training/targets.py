"""The model that a drafter is for, as the trainings take it: frozen, and in few bits where that is asked for."""

from __future__ import annotations

from typing import Any

import torch
from runs import CommonArguments
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel

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


def let_gradients_through(model: PreTrainedModel) -> PreTrainedModel:
    """A quantized model that an adapter can learn in.

    On CPUs with bfloat16 a pass in eval mode packs 4-bit weights anew, and no gradient gets through them any more.
    """
    for module in model.modules():
        if type(module).__name__ == "Linear4bit":
            module.support_avx512bf16_for_cpu = False  # type: ignore[assignment]
    return model
