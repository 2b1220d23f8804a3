"""What the encoder of an encoder-decoder reads, for drafters: text to copy from, or what they attend to themselves."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Source:
    """What the target's encoder was given in this call, and what it made of it.

    Attributes:
        inputs: `(batch, length)` ids, or features `(batch, ...)` of speech and pictures; None where the caller passed
            `encoder_outputs=` in their place.
        attention_mask: `(batch, length)` with 0 for padding; None where there is none.
        outputs: of the encoder, its hidden states `(batch, length, hidden)` first.
    """

    inputs: Tensor | None
    attention_mask: Tensor | None
    outputs: Any

    @classmethod
    def of(cls, inputs: Tensor | None, batch: int, model_kwargs: dict[str, Any]) -> Source:
        """From what stock `generate` has prepared; `inputs` has one row for each of its `num_return_sequences`."""
        if inputs is not None and not inputs.is_floating_point() and bool((inputs < 0).any()):
            inputs = None  # transformers' stand-in for ids that nobody passed
        if inputs is not None and inputs.shape[0] < batch:
            inputs = inputs.repeat_interleave(batch // inputs.shape[0], dim=0)
        return cls(inputs, model_kwargs.get("attention_mask"), model_kwargs["encoder_outputs"])

    def ids(self) -> list[list[int]] | None:
        """The source as ids without padding, row by row; None where it is no text."""
        if self.inputs is None or self.inputs.ndim != 2 or self.inputs.is_floating_point():
            return None
        rows: list[list[int]] = self.inputs.tolist()
        if self.attention_mask is None or self.attention_mask.shape != self.inputs.shape:
            return rows
        masks = self.attention_mask.tolist()
        return [
            [token for token, shown in zip(row, mask, strict=True) if shown]
            for row, mask in zip(rows, masks, strict=True)
        ]


def reads_source(model: PreTrainedModel) -> bool:
    """Whether a model attends to a source: with an encoder of its own, or as a decoder that is handed another's."""
    parameters = inspect.signature(model.forward).parameters
    return bool(model.config.is_encoder_decoder) or "encoder_outputs" in parameters


def why_not_for(model: PreTrainedModel, target: PreTrainedModel, source: Source) -> str | None:
    """Why a model that reads a source cannot draft from this one, in words; None if it can."""
    if "sliding_attention" in (getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()):
        return "its sliding layers cannot be rolled back between passes"
    if not model.config.is_encoder_decoder:
        ours, theirs = source.outputs[0].shape[-1], model.config.hidden_size
        return None if ours == theirs else f"it attends to states of size {theirs}, and the target's have {ours}"
    if source.inputs is None:
        return "its encoder needs the inputs that encoder_outputs= stands in for"
    if model.main_input_name != target.main_input_name:
        return f"its encoder reads {model.main_input_name}, and the target's {target.main_input_name}"
    return None


def arguments_for(model: PreTrainedModel, source: Source, device: torch.device) -> dict[str, Any]:
    """What the passes of such a model are given beside ids; runs its encoder, if it has one."""
    if not model.config.is_encoder_decoder:
        return {"encoder_outputs": (source.outputs[0].to(device),)}
    assert source.inputs is not None
    inputs = source.inputs.to(device)
    if inputs.is_floating_point():
        inputs = inputs.to(model.dtype)
    mask = None if source.attention_mask is None else source.attention_mask.to(device)
    encoder: Any = model.get_encoder()
    masked = {"attention_mask": mask} if "attention_mask" in inspect.signature(encoder.forward).parameters else {}
    with torch.no_grad():
        outputs = encoder(inputs, **masked, return_dict=True)
    return {"encoder_outputs": outputs, "attention_mask": mask}
