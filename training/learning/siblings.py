"""A smaller model out of a larger one: some of its layers, everything around them as it is."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from hf_specgen.drafters.layer_view import Decoder

# What a layer knows of its place, and what others do with it: not what it computes.
OF_ITS_PLACE = {"layer_idx", "layer_id", "layer_index", "layer_number", "training", "gradient_checkpointing"}

# Kinds of layers that keep no keys, as configs name them: a cache of these alone cannot tell how far it has come.
WITHOUT_KEYS = {"linear_attention", "mamba", "conv", "mlp", "moe"}


def spread(layers: int, count: int) -> list[int]:
    """Which layers to keep: a third of them the first ones, a third the last ones, between them evenly.

    The first ones make words of tokens and the last ones tokens of words; what lies between resembles its neighbours.

    Args:
        layers: of the model.
        count: how many to keep.
    """
    if not 0 < count <= layers:
        raise ValueError(f"{count} of {layers} layers cannot be kept")
    if count == 1:
        return [layers - 1]
    ends = max(1, count // 3)
    first, last = list(range(ends)), list(range(layers - ends, layers))
    middle = count - 2 * ends
    step = (last[0] - first[-1]) / (middle + 1)
    return first + [first[-1] + round(step * (place + 1)) for place in range(middle)] + last


def keep_layers(model: PreTrainedModel, kept: Sequence[int]) -> PreTrainedModel:
    """A model with some of another's layers, in their order, and copies of all its other weights.

    Args:
        model: a causal LM; it is not written to.
        kept: indices of its decoder layers, ascending.

    Returns:
        A model of the same class, dtype and device, in eval mode.

    Raises:
        ValueError: there are no such layers, the model is quantized, or fewer layers do not make a model of its kind.
    """
    decoder, kind = Decoder.of(model), type(model).__name__
    kept, total = list(kept), len(decoder.layers)
    if not kept or kept != sorted(set(kept)) or not 0 <= kept[0] <= kept[-1] < total:
        raise ValueError(f"layers to keep must ascend from 0 to {total - 1}, each once, not {kept}")
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or [None] * total
    attending = [layer for layer, named in enumerate(kinds) if named not in WITHOUT_KEYS]
    if attending and not set(attending) & set(kept):
        raise ValueError(
            f"none of layers {kept} attends, and so none knows how long a text is: keep some of {attending}"
        )
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(f"{kind} is quantized: keep layers of its unquantized checkpoint, or give a drafter")
    sibling: Any = type(model)(_with(model.config, kept))
    for parameter in sibling.parameters():
        # Not `to`: rotary frequencies stay in single precision, as in a model that is loaded.
        parameter.data = parameter.data.to(model.dtype)
    sibling.to(device=model.device)
    prefix = ".".join(filter(None, (decoder.path, decoder.name)))
    place = {old: new for new, old in enumerate(kept)}
    state = {}
    for name, tensor in model.state_dict().items():
        found = re.match(rf"{re.escape(prefix)}\.(\d+)\.", name)
        if found is None:
            state[name] = tensor
        elif (old := int(found[1])) in place:
            state[f"{prefix}.{place[old]}.{name[found.end() :]}"] = tensor
    try:
        sibling.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"{kind} cannot be had with {len(kept)} of its layers: {error}") from error
    for layer, old in zip(Decoder.of(sibling).layers, kept, strict=True):
        if (other := _difference(layer, decoder.layers[old])) is not None:
            raise ValueError(
                f"the config of {kind} cannot say that layer {old} comes as number {place[old]} ({other}): keep layers "
                "of the same kinds in the same order, or give a drafter"
            )
    sibling.generation_config = copy.deepcopy(model.generation_config)
    whole: PreTrainedModel = sibling.eval()
    return whole


def _with(config: PreTrainedConfig, kept: Sequence[int]) -> PreTrainedConfig:
    """A config of these layers: what it lists layer by layer is cut along."""
    short = copy.deepcopy(config)
    text = short.get_text_config(decoder=True)
    total = text.num_hidden_layers
    text.num_hidden_layers = len(kept)
    for name, value in vars(config.get_text_config(decoder=True)).items():
        if isinstance(value, list | tuple) and len(value) == total and not _is_of_ids(name):
            setattr(text, name, [value[index] for index in kept])
    shared = getattr(text, "num_kv_shared_layers", None)
    if shared:
        text.num_kv_shared_layers = sum(index >= total - shared for index in kept)
    return short


def _is_of_ids(name: str) -> bool:
    """Whether a field's entries are token ids, or names of the model, however many layers there are."""
    return "token_id" in name or name == "architectures"


def _difference(one: nn.Module, other: nn.Module) -> str | None:
    """The first thing in which two layers differ beside their weights; None if they compute the same."""
    if str(one) != str(other):
        return f"{type(other).__name__} there has other parts"
    for (name, part), (_, twin) in zip(one.named_modules(), other.named_modules(), strict=True):
        for field, value in _plain(part).items():
            if value != vars(twin).get(field):
                return f"{'.'.join(filter(None, (name, field)))} would be {value!r} and not {vars(twin).get(field)!r}"
    return None


def _plain(module: nn.Module) -> dict[str, Any]:
    """A module's own numbers, words and switches."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, bool | int | float | str | None) and name not in OF_ITS_PLACE and not name.startswith("_")
    }
