"""Rotary embeddings whose frequencies follow the longest position of a pass.

`longrope` has two sets of frequencies, one up to a length and one beyond; `dynamic` (NTK) computes its own for every
length beyond one. All positions of a pass are turned alike, whatever the row, so a pass over positions on both sides of
the switch would turn some of them otherwise than plain decoding does. The frequencies are kept on the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

KINDS = ("longrope", "dynamic")


@dataclass(frozen=True)
class Switch:
    """Where a rotary embedding changes.

    Attributes:
        kind: "longrope": once, at `position`; "dynamic": at every longest position from there on.
        position: the first one that is turned otherwise.
    """

    kind: str
    position: int

    def reach(self, root: int) -> int | None:
        """The longest path that a pass may hold behind a root at position `root`; None if any will do."""
        if root < self.position:
            return self.position - 1 - root
        return 0 if self.kind == "dynamic" else None


def asked_for(config: PreTrainedConfig) -> set[Switch]:
    """The switches that a (text) config speaks of. Whether they are there, its model knows: see `switches`."""
    parameters: Any = getattr(config, "rope_parameters", None) or {}
    every = (parameters, *(value for value in parameters.values() if isinstance(value, Mapping)))
    found = set()
    for one in every:
        if one.get("rope_type") in KINDS:
            position = one.get("original_max_position_embeddings")
            position = position or getattr(config, "original_max_position_embeddings", config.max_position_embeddings)
            found.add(Switch(one["rope_type"], int(position)))
    return found


def switches(model: PreTrainedModel) -> set[Switch]:
    """The switches of a model's rotary embeddings; layers of different kinds may have different ones."""
    found: set[Switch] = set()
    if not asked_for(model.config.get_text_config(decoder=True)):
        return found
    for module in model.modules():
        # Not the config's word: some families call "dynamic" what never moves, and give it a type of their own.
        kinds = vars(module).get("rope_type")
        for layer, kind in kinds.items() if isinstance(kinds, Mapping) else [(None, kinds)]:
            owner: Any = module
            if kind == "dynamic":
                found.add(Switch(kind, int(owner.original_max_seq_len)))
            elif kind == "longrope":
                parameters = owner.config.rope_parameters
                parameters = parameters if layer is None else parameters[layer]
                found.add(Switch(kind, int(parameters["original_max_position_embeddings"])))
    return found


def drops_cache(model: Any, columns: int, cached: int) -> bool:
    """Whether stock computes the cache anew before it goes on; Phi-3 does where its frequencies change.

    Args:
        model: the target.
        columns: ids of a row so far.
        cached: how many places the cache holds.
    """
    ids = torch.zeros((1, columns), dtype=torch.long)
    cache = SimpleNamespace(get_seq_length=lambda: cached)
    return model.prepare_inputs_for_generation(ids, next_sequence_length=1, cache=cache).get("cache") is None
