"""What cannot be served exactly, refused by name before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_specgen.cache import why_not_croppable
from hf_specgen.target import Prompt

# Models that keep call state of their own, or shape masks in a way that a pass over several cached tokens breaks.
OWN_STATE = frozenset({"deepseek_v4", "cpmant", "prophetnet", "openai-gpt", "xlm"})
# Rotary frequencies that follow the longest position of a pass: early nodes of a block would be turned by late ones.
MOVING_ROPE = frozenset({"dynamic", "longrope"})


def refuse(model: PreTrainedModel, prompt: Prompt, max_length: int) -> None:
    """Raises ValueError for a call that cannot be served exactly.

    Args:
        model: the target.
        prompt: what transformers prepared; nothing has run yet.
        max_length: the most tokens a row may have.
    """
    config = prompt.generation_config
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
        raise ValueError(f"assistant= takes greedy decoding and sampling, but the arguments ask for {mode.value}")
    if config.output_attentions:
        raise ValueError("output_attentions=True is not supported with assistant=: a pass looks at several tokens")
    if not config.use_cache:
        raise ValueError(
            "use_cache=False is not supported with assistant=; pass use_cache=True "
            "(a model that was trained with gradient checkpointing may carry False in its config)"
        )
    cache = prompt.model_kwargs.get("cache")
    if cache is None:
        raise ValueError(f"{type(model).__name__} keeps its state in no transformers cache and cannot be rolled back")
    if (stuck := why_not_croppable(cache)) is not None:
        raise ValueError(f"rejected tokens cannot be removed from a {stuck}, so assistant= cannot use it")
    refuse_model(model, max_length)


def refuse_model(model: Any, max_length: int) -> None:
    """Raises ValueError for a target whose passes over several tokens would not be exact."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    refuse_encoder_decoder(model)
    if config.model_type in OWN_STATE:
        raise ValueError(f"{name} ({config.model_type}) cannot check several tokens in one pass")
    stock = GenerationMixin._update_model_kwargs_for_generation
    if getattr(model._update_model_kwargs_for_generation, "__func__", None) is not stock:
        raise ValueError(
            f"{name} carries inputs from token to token in a way of its own, which assistant= does not know"
        )
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if owner is not model and getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(f"{name} is wrapped in PEFT prompt learning, whose virtual tokens assistant= does not take")
    kind, limit = moving_rope(config)
    if limit is not None and max_length > limit:
        raise ValueError(
            f"{name} turns its positions by {kind!r} beyond {limit} tokens, and this call may reach {max_length}; "
            f"with assistant= keep prompt and new tokens together within {limit}"
        )


def refuse_encoder_decoder(model: Any) -> None:
    """Raises ValueError for a model whose encoder stock `generate` would run before our loop is ever asked."""
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is an encoder-decoder, which assistant= does not take yet")


def moving_rope(config: PreTrainedConfig) -> tuple[str, int | None]:
    """The kind of a rotary embedding that changes with length, and the length from which it does; None if none does."""
    parameters = getattr(config, "rope_parameters", None) or {}
    kinds = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    for one in kinds:
        kind = one.get("rope_type")
        if kind in MOVING_ROPE:
            original = one.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            return kind, int(original or config.max_position_embeddings)
    return "", None
