"""What is known of a call before its first pass: the prompt as transformers prepared it, and the model it is for."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from hf_specgen.cache import is_static, new_cache, offloads

if TYPE_CHECKING:
    from hf_specgen.encoder import Source


@dataclass
class Prompt:
    """What transformers prepared for the prompt's pass.

    Attributes:
        input_ids: `(batch, length)`, padding on the left; length 0 where `inputs_embeds` stand in for ids. Those of the
            decoder where there is an encoder.
        generation_config: of the call, resolved.
        model_kwargs: everything else that stock would hand to the model, its empty or continued cache included.
        prefix: before the names of the decoder's arguments and outputs, where the plain ones are an encoder's.
        source: what that encoder reads, for drafters.
    """

    input_ids: Tensor
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    prefix: str = ""
    source: Source | None = None

    @property
    def attention_mask(self) -> Tensor | None:
        """`(batch, columns)` with 0 for padding; None where nothing is padded."""
        mask: Tensor | None = self.model_kwargs.get(self.prefix + "attention_mask")
        return mask

    @property
    def position_ids(self) -> Tensor | None:
        """`(batch or 1, columns)`, or with one axis more in front; None where the model counts for itself."""
        positions: Tensor | None = self.model_kwargs.get(self.prefix + "position_ids")
        return positions

    def use_dynamic_default(self, model: PreTrainedModel) -> None:
        """Puts a dynamic cache in the place of a static one that nobody asked for but the model's own defaults.

        Other kinds stay: an offloaded cache saves memory, and a quantized one changes the text.
        """
        kind = getattr(model.generation_config, "cache_implementation", None)
        cache = self.model_kwargs.get("cache")
        if kind is not None and kind == self.generation_config.cache_implementation and is_static(cache):
            self.model_kwargs["cache"] = new_cache(model.config, offloading=offloads(cache))

    @property
    def columns(self) -> int:
        """Places of a row, padding and what a continued cache holds included."""
        if self.attention_mask is not None:
            return self.attention_mask.shape[1]
        embeds: Tensor | None = self.model_kwargs.get("inputs_embeds")
        if embeds is not None:
            return embeds.shape[1]
        # transformers drops a mask of ones and notes its length: ids may be the new ones only.
        return int(getattr(self.generation_config, "_mask_length", self.input_ids.shape[1]))

    def padding(self) -> list[int] | None:
        """Places before each row's first token; None where a mask has holes elsewhere."""
        if self.attention_mask is None:
            return [0] * self.input_ids.shape[0]
        mask = self.attention_mask != 0
        if not bool((mask.int().diff(dim=1) >= 0).all()):
            return None
        padding: list[int] = (~mask).sum(1).tolist()
        return padding


def prompt_of(
    model: PreTrainedModel, rows: Sequence[Sequence[int]], encoded: Mapping[str, Any] | None = None
) -> Prompt:
    """What transformers would prepare for these rows, for a model that is run beside the one `generate` was called on.

    Args:
        model: a causal LM, or an encoder-decoder.
        rows: ids without padding, at least one a row.
        encoded: for a model that attends to an encoder's states: those, and their mask.
    """
    width, device = max(map(len, rows)), input_device(model)
    ids = torch.tensor([[*[0] * (width - len(row)), *row] for row in rows], device=device)
    mask = torch.tensor([[*[0] * (width - len(row)), *[1] * len(row)] for row in rows], device=device)
    prefix = "decoder_" if model.config.is_encoder_decoder else ""
    kwargs: dict[str, Any] = {
        **(encoded or {}),
        "cache": new_cache(model.config),
        f"{prefix}position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        f"{prefix}attention_mask": None if min(map(len, rows)) == width else mask,
        "use_cache": True,
    }
    parameters = inspect.signature(model.forward).parameters
    if f"{prefix}position_ids" not in parameters:
        del kwargs[f"{prefix}position_ids"]
    if "logits_to_keep" in parameters:
        kwargs["logits_to_keep"] = 1
    return Prompt(ids, GenerationConfig(), kwargs, prefix)  # type: ignore[no-untyped-call]


def generative(model: torch.nn.Module) -> PreTrainedModel:
    """The model itself, or the one inside a wrapper such as PEFT's.

    Raises:
        ValueError: there is none that can generate.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(module, GenerationMixin):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model that can generate")


def input_device(model: PreTrainedModel) -> torch.device:
    """Where a model's inputs may be. Offloaded weights are nowhere (meta), and their hooks move what they are given."""
    device: torch.device = model.device
    return torch.device("cpu") if device.type == "meta" else device
