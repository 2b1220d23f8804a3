"""What `assistant=` may be, and the drafter it stands for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from os import PathLike
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn import Module
from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_specgen.draft import Drafter
from hf_specgen.drafters.draft_model import DraftModel
from hf_specgen.drafters.merge import Merge
from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.suffix_lookup import SuffixLookup
from hf_specgen.drafters.token_recycling import TokenRecycling
from hf_specgen.prompt import input_device

ACCEPTED = (
    "a drafter such as hf_specgen.PromptLookup() or hf_specgen.Plain(), a causal LM that drafts, "
    "a dict with the fields of vLLM's speculative_config such as "
    '{"method": "ngram", "num_speculative_tokens": 5}, or "auto"'
)

# Drafters loaded from a path, once for each live target and path.
_loaded: WeakKeyDictionary[PreTrainedModel, dict[str, PreTrainedModel]] = WeakKeyDictionary()


@dataclass(frozen=True)
class Assistant:
    """A drafter and how deep it is to draft.

    Attributes:
        drafter: proposes.
        tokens: what the assistant itself says of the draft length, if anything; the call's `num_assistant_tokens` goes
            before it.
    """

    drafter: Drafter
    tokens: int | None


def named(drafter: Any) -> str:
    """What a drafter's costs are known by: its class, those of its parts, and the sizes of its models."""
    parts = [getattr(drafter, field.name) for field in fields(drafter)] if is_dataclass(drafter) else []
    told = [f"{sum(p.numel() for p in part.parameters()):,} parameters" for part in parts if isinstance(part, Module)]
    values = zip(fields(drafter), parts, strict=True) if parts else ()
    told += [f"{field.name}={value}" for field, value in values if type(value) is int]
    inner = [one for part in parts if isinstance(part, tuple) for one in part]
    told += [named(one) for one in inner if callable(getattr(one, "start", None))]
    return type(drafter).__name__ + (f"({', '.join(told)})" if told else "")


def resolve(assistant: Any, target: PreTrainedModel) -> Assistant:
    """Turns what the user passed into a drafter.

    Args:
        assistant: see `ACCEPTED`.
        target: the model to be assisted.

    Raises:
        ValueError: it is none of what is accepted, or a config names a method or field that does not exist.
    """
    if isinstance(assistant, torch.nn.Module) and not callable(getattr(assistant, "start", None)):
        assistant = DraftModel(assistant)
    if isinstance(assistant, str) and assistant == "auto":
        return Assistant(Merge(SuffixLookup(), TokenRecycling()), None)
    if isinstance(assistant, Mapping):
        return _from_config(dict(assistant), target)
    if isinstance(assistant, type) or not callable(getattr(assistant, "start", None)):
        raise ValueError(f"assistant={assistant!r} is not {ACCEPTED}")
    if not hasattr(assistant, "num_assistant_tokens"):
        kind = type(assistant).__name__
        raise ValueError(f"{kind} has no num_assistant_tokens: give it None for as deep as pays, or a number")
    return Assistant(assistant, assistant.num_assistant_tokens)


def _from_config(config: dict[str, Any], target: PreTrainedModel) -> Assistant:
    """Reads vLLM's field names."""
    method = config.pop("method", None)
    if not isinstance(method, str) or method not in _METHODS:
        raise ValueError(f"method={method!r} is not one of {', '.join(map(repr, _METHODS))}")
    tokens: int | None = config.pop("num_speculative_tokens", None)
    drafter = _METHODS[method](config, target)
    if config:
        raise ValueError(f"method={method!r} takes no {', '.join(map(repr, config))}")
    return Assistant(drafter, drafter.num_assistant_tokens if tokens is None else tokens)


def _ngram(config: dict[str, Any], target: PreTrainedModel) -> Drafter:
    # vLLM's defaults: where one bound is missing it equals the other.
    longest = config.pop("prompt_lookup_max", None)
    shortest = config.pop("prompt_lookup_min", longest)
    longest = shortest if longest is None else longest
    return PromptLookup() if longest is None else PromptLookup(min_ngram=shortest, max_ngram=longest)


def _suffix(config: dict[str, Any], target: PreTrainedModel) -> Drafter:
    if config.pop("suffix_decoding_max_cached_requests", 0):
        raise ValueError(
            "'suffix_decoding_max_cached_requests' keeps users' texts between calls: pass a store of your own instead, "
            "assistant=hf_specgen.SuffixLookup(store=hf_specgen.SuffixStore())"
        )
    names = {f"suffix_decoding_{name}": name for name in ("max_spec_factor", "min_token_prob")}
    settings = {names[name]: config.pop(name) for name in names.keys() & config.keys()}
    return SuffixLookup(**settings, num_assistant_tokens=config.pop("suffix_decoding_max_tree_depth", None))


def _draft_model(config: dict[str, Any], target: PreTrainedModel) -> Drafter:
    model = config.pop("model", None)
    if model is None:
        raise ValueError("method='draft_model' needs 'model': a path, a hub id or a loaded causal LM")
    if not isinstance(model, str | PathLike | torch.nn.Module):
        raise ValueError(f"'model' is {model!r}; it must be a path, a hub id or a loaded causal LM")
    if not isinstance(model, torch.nn.Module):
        known, path = _loaded.setdefault(target, {}), str(model)
        if path not in known:
            loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=target.dtype)
            known[path] = loaded.to(input_device(target)).eval()
        model = known[path]
    return DraftModel(model)


_METHODS: dict[str, Callable[[dict[str, Any], PreTrainedModel], Drafter]] = {
    "ngram": _ngram,
    "suffix": _suffix,
    "draft_model": _draft_model,
}
