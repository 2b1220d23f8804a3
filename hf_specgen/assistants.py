"""What `assistant=` may be, and the drafter it stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

from torch.nn import Module
from transformers import PreTrainedModel

from hf_specgen.draft import Drafter, named
from hf_specgen.drafters.first_of import FirstOf
from hf_specgen.drafters.merge import Merge
from hf_specgen.drafters.suffix_lookup import SuffixLookup
from hf_specgen.drafters.token_recycling import TokenRecycling
from hf_specgen.loading import Location, drafter_of, load_once
from hf_specgen.vllm_config import LOOKUPS, METHODS, read_config

ACCEPTED = (
    "a drafter such as hf_specgen.PromptLookup() or hf_specgen.Plain(), a causal LM that drafts, the path or hub id of "
    "a trained drafter (Medusa, EAGLE) or a causal LM, a dict with the fields of vLLM's speculative_config such as "
    '{"method": "ngram", "num_speculative_tokens": 5}, or "auto"'
)


@dataclass(frozen=True)
class Assistant:
    """A drafter and how deep it is to draft.

    Attributes:
        drafter: proposes.
        tokens: what the assistant itself says of the draft length, if anything; the call's `num_assistant_tokens` goes
            before it.
        origin: what it was recognised as, in words, where it was loaded for this call or an earlier one.
    """

    drafter: Drafter
    tokens: int | None
    origin: str | None = None


def parts_of(drafter: Drafter) -> tuple[str, ...]:
    """The names of what a combination is made of, combinations in it taken apart too; none for any other drafter."""
    if not isinstance(drafter, Merge | FirstOf):
        return ()
    return tuple(name for part in drafter.drafters for name in parts_of(part) or (named(part),))


def resolve(assistant: Any, target: PreTrainedModel) -> Assistant:
    """Turns what the user passed into a drafter.

    Args:
        assistant: see `ACCEPTED`.
        target: the model to be assisted.

    Raises:
        ValueError: it is none of what is accepted, a config names a method or field that does not exist, or what is to
            be loaded cannot be, or was trained for another model.
    """
    if isinstance(assistant, Module) and not callable(getattr(assistant, "start", None)):
        assistant = drafter_of(assistant).drafter
    if isinstance(assistant, str) and assistant == "auto":
        return Assistant(Merge(SuffixLookup(), TokenRecycling()), None)
    if isinstance(assistant, Mapping):
        drafter, tokens, origin = read_config(assistant, target)
        return Assistant(drafter, drafter.num_assistant_tokens if tokens is None else tokens, origin)
    if isinstance(assistant, str | PathLike):
        _refuse_word(str(assistant))
        loaded = load_once(Location.of(assistant), target)
        return Assistant(loaded.drafter, loaded.drafter.num_assistant_tokens, loaded.origin)
    if isinstance(assistant, type) or not callable(getattr(assistant, "start", None)):
        raise ValueError(f"assistant={assistant!r} is not {ACCEPTED}")
    if not hasattr(assistant, "num_assistant_tokens"):
        kind = type(assistant).__name__
        raise ValueError(f"{kind} has no num_assistant_tokens: give it None for as deep as pays, or a number")
    return Assistant(assistant, assistant.num_assistant_tokens)


def _refuse_word(word: str) -> None:
    """Raises ValueError for the name of a method where a path is meant."""
    if word == "plain":
        raise ValueError("assistant='plain' is no path or hub id: pass assistant=hf_specgen.Plain()")
    if word in METHODS:
        more = "" if word in LOOKUPS else ', "model": path_or_id'
        raise ValueError(
            f'assistant={word!r} is a method, not a path or hub id: pass assistant={{"method": "{word}"{more}}} '
            f"(a folder of that name: './{word}')"
        )
    if not word.strip():
        raise ValueError(f"assistant={word!r} is not {ACCEPTED}")
