"""What cannot be served exactly, refused by name before anything is computed."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel
from transformers.generation.configuration_utils import GenerationMode

from hf_specgen.cache import (
    croppable_instead,
    filled,
    has_recurrent,
    is_pair,
    is_static,
    is_users,
    offloads,
    room,
    why_not_croppable,
)
from hf_specgen.prompt import Prompt
from hf_specgen.ranks import Ranks
from hf_specgen.rope import asked_for, drops_cache, switches
from hf_specgen.target import Target, why_cropped

# Models whose passes over several cached tokens are not those over one, and why.
OWN_STATE = {
    "cpmant": "the tokens of a pass all see one another",
    "deepseek_v4": "its cache compresses windows of tokens, and crop() does not undo that",
    "dory": "its loops add layers to the cache",
    "fsmt": "it masks nothing once it has a cache",
    "git": "its pictures lie in the cache and have no place in ids and mask",
    "openai-gpt": "it keeps no cache and reads the whole text for each token",
    "prophetnet": "its decoder takes one token a pass",
    "unlimited_ocr_text": "its window begins where the first pass ended",
    "xlm": "it appends a mask token to each pass",
}
# Models that count a static cache's empty places as tokens: with one, stock's own text is another.
COUNT_EMPTY = frozenset({"gpt_neo", "led"})
# Models whose own mask over several tokens is wider than their window. A slot cache comes with masks of its own.
WIDE_MASK = frozenset({"moshi"})
# Layers that take the position of a token for its place in the cache.
BLOCKS_OF_PLACES = "minimax_m3_sparse"
# Models whose own update of the inputs from token to token adds what stays the same for every later one.
OWN_UPDATE = frozenset({"idefics", "mllama", "paligemma"})


def refuse(model: PreTrainedModel, prompt: Prompt, max_length: int) -> None:
    """Raises ValueError for a call that cannot be served exactly.

    Args:
        model: the target.
        prompt: what transformers prepared; nothing has run yet.
        max_length: the most tokens a row may have.
    """
    refuse_config(prompt.generation_config)
    if prompt.input_ids.ndim != 2:
        raise ValueError(f"{type(model).__name__} writes ids of several kinds at once, which assistant= does not take")
    cache = prompt.model_kwargs.get("cache")
    if cache is None:
        raise ValueError(f"{type(model).__name__} keeps its state in no transformers cache and cannot be rolled back")
    reason = why_cropped(model, prompt)
    if reason is not None and (stuck := why_not_croppable(cache)) is not None:
        raise ValueError(f"rejected tokens cannot be removed from a {stuck}: {reason}; {croppable_instead(cache)}")
    if has_recurrent(cache) and prompt.padding() is None:
        raise ValueError(
            f"{type(model).__name__} keeps a state that runs over padding in the middle of a row, with assistant= and "
            "without: go on row by row, or pass the conversation anew"
        )
    if reason is not None and getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None):
        raise ValueError(
            f"{type(model).__name__} keeps pictures in the cache of its text, where assistant= cannot tell them apart "
            f"if {reason}: leave cache= and cache_implementation= out"
        )
    refuse_own_masks(model, prompt)
    refuse_cache(model, prompt, max_length - prompt.input_ids.shape[1])
    refuse_model(model, max_length)


def refuse_config(config: GenerationConfig) -> None:
    """Raises ValueError for what a resolved generation config asks for and no assisted call can give."""
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


def refuse_own_masks(model: PreTrainedModel, prompt: Prompt) -> None:
    """Raises ValueError where masks of the model's own make passes over several tokens differ from those over one."""
    config = model.config.get_text_config(decoder=True)
    name, kind = f"{type(model).__name__} ({config.model_type})", config.model_type
    if kind in COUNT_EMPTY and is_static(prompt.model_kwargs["cache"]):
        raise ValueError(
            f"{name} takes the empty places of a static cache for tokens, with assistant= and without: "
            "leave cache_implementation= out or pass a DynamicCache"
        )
    if kind in WIDE_MASK and (reason := why_cropped(model, prompt)) is not None:
        raise ValueError(
            f"{name} sees past its window in passes over several tokens, which only the cache of this package "
            f"prevents, but {reason}: leave cache= and cache_implementation= out"
        )
    padded = prompt.attention_mask is not None and not bool(prompt.attention_mask.all())
    if padded and BLOCKS_OF_PLACES in (getattr(config, "layer_types", None) or ()):
        raise ValueError(
            f"{name} picks blocks of keys in its {BLOCKS_OF_PLACES} layers by place and not by position, so that a "
            "padded row picks padding, with assistant= and without: pass rows of one length, or one at a time"
        )


def refuse_cache(model: PreTrainedModel, prompt: Prompt, new_tokens: int) -> None:
    """Raises ValueError for a cache that this prompt cannot go on from, or that has too little room for it."""
    cache, batch, columns = prompt.model_kwargs["cache"], prompt.input_ids.shape[0], prompt.columns
    name, size = type(cache).__name__, room(cache)
    if is_users(cache):
        refuse_mixed(model, cache)
    rows, held = filled(cache)
    if rows not in (0, batch):
        raise ValueError(f"the {name} is made for {rows} rows, and the prompt has {batch}; pass one for {batch}")
    if held >= columns:
        raise ValueError(
            f"the {name} holds {held} tokens, and the prompt with its attention mask has no more than {columns}: no "
            "token is left to go on from. Pass all of the conversation, or an attention mask over all of it; "
            "cache.crop(-1) takes a last token back"
        )
    # The last new token is never fed.
    if size is not None and columns + new_tokens - 1 > size:
        raise ValueError(
            f"the {name} has room for {size} tokens, and this call may need {columns + new_tokens - 1}: {columns} of "
            f"the prompt and all but the last of {new_tokens} new ones; make it larger or max_new_tokens smaller"
        )
    if offloads(cache) and all(parameter.device.type == "cpu" for parameter in model.parameters()):
        raise ValueError(
            f"an offloaded {name} moves keys and values between a GPU and the CPU, and {type(model).__name__} is on "
            "the CPU altogether: leave cache_implementation= out"
        )


def refuse_mixed(model: Any, cache: Any) -> None:
    """Raises ValueError for a cache that an encoder-decoder would fill with text and source alike, as stock does."""
    if model.config.is_encoder_decoder and cache is not None and not is_pair(cache):
        name = type(cache).__name__
        raise ValueError(
            f"the {name} mixes what {type(model).__name__} keeps of its text with what its encoder said; pass an "
            f"EncoderDecoderCache({name}(...), {name}(...)), or none"
        )


def refuse_model(model: Any, max_length: int) -> None:
    """Raises ValueError for a target whose passes over several tokens would not be exact."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    for kind in (config.model_type, model.config.model_type):
        if kind in OWN_STATE:
            raise ValueError(f"{name} ({kind}) cannot check several tokens in one pass: {OWN_STATE[kind]}")
    update = getattr(model._update_model_kwargs_for_generation, "__func__", None)
    if update is not GenerationMixin._update_model_kwargs_for_generation and model.config.model_type not in OWN_UPDATE:
        raise ValueError(
            f"{name} carries inputs from token to token in a way of its own, which assistant= does not know"
        )
    refuse_adapters(model)
    stages = getattr(getattr(model.config, "distributed_config", None), "pp_size", 1)
    if stages > 1:
        raise ValueError(
            f"{name} is cut into {stages} pipeline stages, of which each holds a part of the cache; "
            "assistant= takes tensor parallelism and FSDP"
        )
    refuse_rope(model, max_length)


def refuse_adapters(model: Any) -> None:
    """Raises ValueError for an active PEFT adapter that takes a token otherwise in a pass with others than alone."""
    name, kind = type(model).__name__, None
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if owner is not model and getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(f"{name} is wrapped in PEFT prompt learning, whose virtual tokens assistant= does not take")
    if not getattr(model, "peft_config", None):  # which PEFT leaves on every model that it changes
        return
    for module in model.modules():
        if getattr(module, "disable_adapters", True):
            continue
        if any("alora_offsets" in getattr(hook, "keywords", ()) for hook in module._forward_pre_hooks.values()):
            kind = "an activated LoRA (aLoRA), which counts from the end of a pass where it is active"
        elif "lily_router" in getattr(module, "adapter_layer_names", ()):
            kind = "Lily, which mixes its experts over all the tokens of a pass"
    if kind is not None:
        raise ValueError(f"{name} is adapted by {kind}: its text would depend on the drafts; disable the adapter")


def refuse_ranks(target: Target, ranks: Ranks) -> None:
    """Raises ValueError for a call that ranks could not make together."""
    if ranks.gathering and target.prompt.generation_config.prefill_chunk_size is not None:
        raise ValueError("prefill_chunk_size= is not supported where ranks wait for one another: drop it")
    if (ranks.gathering or ranks.deciders) and not target.forgets:
        raise ValueError(
            f"{type(target.model).__name__} has recurrent layers whose state follows from their weights, and those are "
            "spread over ranks; assistant= takes it whole on one rank"
        )


def refuse_rope(model: Any, max_length: int) -> None:
    """Raises ValueError for a call that meets a switch of the rotary embedding which is not understood."""
    name, config = type(model).__name__, model.config.get_text_config(decoder=True)
    if not asked_for(config):
        return
    found, foreign = switches(model), not any("rope_type" in vars(module) for module in model.modules())
    moving = asked_for(config) if foreign else found
    if not moving:
        return
    limit, kinds = min(switch.position for switch in moving), sorted({switch.kind for switch in moving})
    original = getattr(config, "original_max_position_embeddings", None)
    if foreign:
        why = "in code of its own"
    elif len(found) > 1:
        why = "in more than one way"
    elif kinds == ["dynamic"] and original is not None and drops_cache(model, original + 1, original):
        limit, why = original, "and drops its cache there"
    else:
        return
    if max_length > limit:
        raise ValueError(
            f"{name} turns its positions by {' and '.join(kinds)} beyond {limit} tokens {why}, and this call may reach "
            f"{max_length}; with assistant= keep prompt and new tokens together within {limit}"
        )
