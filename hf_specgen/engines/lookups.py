"""Lookups, which have no weights: what of their settings an engine has no word for is said, not dropped."""

from __future__ import annotations

from dataclasses import fields

from hf_specgen.drafters.prompt_lookup import PromptLookup
from hf_specgen.drafters.suffix_lookup import SuffixLookup
from hf_specgen.engines.plan import Job


def refuse_store(job: Job, lookup: PromptLookup | SuffixLookup) -> None:
    """Refuses a lookup with a store of earlier texts.

    Raises:
        ValueError: it has one.
    """
    if lookup.store is not None:
        raise ValueError(f"{job.engine} cannot take over the texts of a {type(lookup.store).__name__}: leave store out")


def unsaid(job: Job, lookup: PromptLookup | SuffixLookup, said: tuple[str, ...] = ()) -> tuple[str, ...]:
    """A note of the settings that the engine decides for itself.

    Args:
        job: names the engine.
        lookup: whose settings they are.
        said: those that the engine is told.
    """
    left = [field.name for field in fields(lookup) if field.name not in (*said, "store", "num_assistant_tokens")]
    if not left:
        return ()
    told = ", ".join(f"{name}={getattr(lookup, name)!r}" for name in left)
    return (f"{job.engine} has its own way to look up and no words for {told}",)
