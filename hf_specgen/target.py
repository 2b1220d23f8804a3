"""The target in one call: its passes, its positions, its extra inputs. The loop sees nothing else of the model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from hf_specgen.cache import CropCache, RowCache, SlotCache, is_users, new_cache, why_not_slots
from hf_specgen.draft import Draft

# Models whose attention counts positions by the cache (ALiBi, a local window, a temperature), not by position ids.
OWN_POSITIONS = frozenset({"bloom", "mpt", "gpt_neo", "llama4_text"})
# Kernels that take no 4-D mask.
MASKLESS_ATTENTION = ("flash", "flex", "paged")
# Inputs that run along the sequence beside the ids, and how stock continues them: the last value, or zero for text.
TOKEN_TYPES = {"token_type_ids": True, "mm_token_type_ids": False, "moe_mm_token_type_ids": False}


@dataclass(frozen=True)
class Pass:
    """What one forward returned.

    Attributes:
        logits: `(batch, width, vocab)`: one place for the root, then one a node. The prompt's pass has one.
        hidden_states: for each layer `(batch, width, hidden)`, where asked for; the prompt's pass has the whole prompt.
        is_prompt: the prompt's pass.
    """

    logits: Tensor
    hidden_states: tuple[Tensor, ...] | None = None
    is_prompt: bool = False


@dataclass
class Prompt:
    """What transformers prepared for the prompt's pass.

    Attributes:
        input_ids: `(batch, length)`, padding on the left; length 0 where `inputs_embeds` stand in for ids.
        generation_config: of the call, resolved.
        model_kwargs: everything else that stock would hand to the model, its empty or continued cache included.
    """

    input_ids: Tensor
    generation_config: GenerationConfig
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def attention_mask(self) -> Tensor | None:
        """`(batch, columns)` with 0 for padding; None where nothing is padded."""
        mask: Tensor | None = self.model_kwargs.get("attention_mask")
        return mask

    def use_dynamic_default(self, model: PreTrainedModel) -> None:
        """Puts a dynamic cache in the place of one that nobody asked for but the model's own defaults."""
        kind = getattr(model.generation_config, "cache_implementation", None)
        cache = self.model_kwargs.get("cache")
        if kind is not None and kind == self.generation_config.cache_implementation and not is_users(cache):
            self.model_kwargs["cache"] = new_cache(model.config.get_text_config(decoder=True))

    def padding(self) -> list[int] | None:
        """Places before each row's first token; None where a mask has holes elsewhere."""
        if self.attention_mask is None:
            return [0] * self.input_ids.shape[0]
        mask = self.attention_mask != 0
        if not bool((mask.int().diff(dim=1) >= 0).all()):
            return None
        padding: list[int] = (~mask).sum(1).tolist()
        return padding


def generative(model: torch.nn.Module) -> PreTrainedModel:
    """The model itself, or the one inside a wrapper such as PEFT's.

    Raises:
        ValueError: there is none that can generate.
    """
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and isinstance(module, GenerationMixin):
            return module
    raise ValueError(f"{type(model).__name__} holds no transformers model that can generate")


def why_cropped(model: PreTrainedModel, prompt: Prompt) -> str | None:
    """Why this call runs on a `CropCache`, in chains and with rows in lockstep; None if a `SlotCache` takes it.

    A `SlotCache` serves ragged rows and trees, and copies nothing on roll-back.
    """
    cache, config = prompt.model_kwargs["cache"], model.config.get_text_config(decoder=True)
    attention = config._attn_implementation or ""
    if is_users(cache):
        return f"the {type(cache).__name__} is the caller's"
    if (reason := why_not_slots(cache)) is not None:
        return reason
    if (
        "position_ids" not in inspect.signature(model.forward).parameters
        or prompt.model_kwargs.get("position_ids") is None
    ):
        return "the model takes no position ids"
    if any(name in attention for name in MASKLESS_ATTENTION):
        return f"{attention} takes no mask of a tree"
    if config.model_type in OWN_POSITIONS or getattr(config, "alibi", False):
        return f"{config.model_type} counts positions by its cache and not by position ids"
    return "the attention mask has holes" if prompt.padding() is None else None


class Target:
    """A model and its cache in one call.

    Args:
        model: the target.
        prompt: what transformers prepared.
        hidden_states: whether passes return them.

    Attributes:
        device: where it takes its inputs.
        cache: of the call; there from the prompt's pass on.
        prompt_lengths: for each row the tokens of the prompt, padding not counted; from the prompt's pass on.
    """

    def __init__(self, model: PreTrainedModel, prompt: Prompt, hidden_states: bool = False) -> None:
        self.model: Any = model  # transformers types a model's methods as tensors
        self.prompt = prompt
        self.hidden_states = hidden_states
        self.slots = why_cropped(model, prompt) is None
        # Properties that walk through all parameters: asked once, not once a pass.
        # With offloaded weights the model is nowhere (meta); its inputs go where the prompt is.
        self.device: torch.device = prompt.input_ids.device if model.device.type == "meta" else model.device
        self.dtype: torch.dtype = model.dtype
        self._ids: int = model.config.get_text_config(decoder=True).vocab_size
        prepare = getattr(self.model.prepare_inputs_for_generation, "__func__", None)
        # Stock's own preparation only sorts arguments; ours are sorted already.
        self._sorted = (
            self.slots and prepare is GenerationMixin.prepare_inputs_for_generation and not model.is_remote_code()
        )
        self.cache: RowCache
        self.prompt_lengths: list[int]
        self._extras: dict[str, Any] = {}
        self._types: list[str] = []
        self._offset: Tensor | None = None
        self._shifted = False
        self._counted = torch.empty((0, 1, 1), dtype=torch.long)
        self._began = False

    @property
    def ragged(self) -> bool:
        """Rows may keep different numbers of tokens."""
        return self.slots

    @property
    def trees(self) -> bool:
        """A pass may branch."""
        return self.slots

    def prefill(self) -> Pass:
        """The prompt's pass, as stock makes it, so that the first token and what is cached are stock's to the bit."""
        prompt, kwargs = self.prompt, dict(self.prompt.model_kwargs)
        kwargs["output_hidden_states"] = self.hidden_states or kwargs.get("output_hidden_states")
        padding, batch = prompt.padding(), prompt.input_ids.shape[0]
        outputs = self.model._prefill(prompt.input_ids, prompt.generation_config, kwargs)
        if outputs.get("cache") is None:
            raise ValueError(f"{type(self.model).__name__} returned no cache")
        if self.slots and padding is not None:
            self.cache = SlotCache(outputs.cache, self.model.config.get_text_config(decoder=True), padding)
            self.prompt_lengths = [length + 1 for length in self.cache.lengths]
        else:
            self.cache = CropCache(outputs.cache, prompt.attention_mask, batch)
            columns = self.cache.lengths[0] + 1
            mask = prompt.attention_mask
            self.prompt_lengths = [columns] * batch if mask is None else (mask != 0).sum(1).tolist()
        self._began = True
        self._extras = self._running_inputs()
        positions = prompt.model_kwargs.get("position_ids")
        if positions is not None:
            # What positions exceed the count of cached tokens by: 0 but for padding and positions the caller chose.
            lengths = torch.tensor(self.cache.lengths, device=positions.device).view(-1, 1)
            self._offset = (positions[..., -1:] - lengths).to(self.device)
            self._shifted = positions.ndim > 2 or bool(self._offset.any())
            self._counted = torch.arange(2 * max(self.prompt_lengths) + 256, device=self.device).view(-1, 1, 1)
        # The prompt's tensors (images among them) are not needed again.
        self.prompt = Prompt(prompt.input_ids, prompt.generation_config)
        return Pass(outputs.logits[:, -1:], outputs.hidden_states if self.hidden_states else None, is_prompt=True)

    def _running_inputs(self) -> dict[str, Any]:
        """What later passes get beside ids, mask, positions and cache; token types shrink to how they continue."""
        left_out = {"cache", "attention_mask", "position_ids", "inputs_embeds", "logits_to_keep", "use_cache"}
        left_out.update(MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL)
        extras = {
            key: value
            for key, value in self.prompt.model_kwargs.items()
            if key not in left_out and not (key in TOKEN_TYPES and value is None)
        }
        self._types = [name for name in TOKEN_TYPES if name in extras]
        for name in self._types:
            last = extras[name][:, -1:]
            extras[name] = last if TOKEN_TYPES[name] else torch.zeros_like(last)
        return extras

    def _positions(self, draft: Draft, idle: Sequence[bool]) -> Tensor:
        """Position ids of a pass: those of the roots, and by depth of the nodes."""
        lengths = self.cache.lengths
        if any(idle):
            # The last token of a row that has ended may lie beyond the model's last position; one before does not.
            lengths = [length - ended for length, ended in zip(lengths, idle, strict=True)]
        if len(lengths) == 1 and not self._shifted and lengths[0] < len(self._counted):
            roots = self._counted[lengths[0]]  # a view costs a third of a new tensor
        else:
            roots = torch.tensor([[length] for length in lengths], device=self.device)
            roots = self._offset + roots if self._shifted and self._offset is not None else roots
        return roots + draft.tree.depth if draft.nodes else roots

    def close(self) -> None:
        """Leaves a cache that belongs to the caller as one without a call in progress."""
        if self._began:
            self.cache.close()

    def verify(self, roots: Tensor, draft: Draft, idle: Sequence[bool] = ()) -> Pass:
        """One forward over `[root, *draft]` of every row.

        Args:
            roots: `(batch,)` each row's last decided token.
            draft: what to check; on the target's device.
            idle: for each row whether its result is of no interest, because it has ended; none are, unless said.
        """
        ids, width = roots.to(self.device).unsqueeze(1), draft.nodes + 1
        if draft.nodes:
            # An id that the model does not know is never chosen; it only must not be looked up.
            ids = torch.cat([ids, draft.tokens.clamp(0, self._ids - 1)], dim=1)
        self.cache.begin(width)
        kwargs = dict(self._extras)
        for name in self._types:
            kwargs[name] = kwargs[name].expand(-1, width)
        kwargs["attention_mask"] = self.cache.mask(draft, self.dtype)
        if self._offset is not None:
            kwargs["position_ids"] = self._positions(draft, idle)
        cache = self.cache.model_cache
        if self._sorted:
            inputs = {"input_ids": ids, "cache": cache, "use_cache": True, **kwargs}
        else:
            inputs = self.model.prepare_inputs_for_generation(ids, cache=cache, use_cache=True, **kwargs)
        if inputs.get("cache") is not cache:
            raise ValueError(f"{type(self.model).__name__} drops its cache in prepare_inputs_for_generation")
        if self.hidden_states:
            inputs["output_hidden_states"] = True
        outputs = self.model(**inputs, return_dict=True)
        return Pass(outputs.logits, outputs.hidden_states if self.hidden_states else None)


def prompt_of(model: PreTrainedModel, rows: Sequence[Sequence[int]]) -> Prompt:
    """What transformers would prepare for these rows, for a model that is run beside the one `generate` was called on.

    Args:
        model: a causal LM.
        rows: ids without padding, at least one a row.
    """
    width = max(map(len, rows))
    ids = torch.tensor([[*[0] * (width - len(row)), *row] for row in rows], device=model.device)
    mask = torch.tensor([[*[0] * (width - len(row)), *[1] * len(row)] for row in rows], device=model.device)
    kwargs: dict[str, Any] = {
        "cache": new_cache(model.config.get_text_config(decoder=True)),
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "attention_mask": None if min(map(len, rows)) == width else mask,
        "use_cache": True,
    }
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        del kwargs["position_ids"]
    if "logits_to_keep" in parameters:
        kwargs["logits_to_keep"] = 1
    return Prompt(ids, GenerationConfig(), kwargs)  # type: ignore[no-untyped-call]
