"""The target drafts for itself with fewer of its layers: by early exit, or without chosen attention and MLP halves.

Early exit: LayerSkip (arXiv 2404.16710). Skip sets: Draft & Verify (arXiv 2309.08168), SWIFT (arXiv 2410.06916).

The drafter is a view of the target's own modules, and it drafts in the target's own cache. What the layers that run
keep of the decided tokens is there already, so that it reads no prompt and takes no memory. What it writes lies behind
the committed length, where the next verify pass writes before anyone reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_specgen.cache import RowCache, SlotCache, SlotLayer, has_attention, new_cache
from hf_specgen.draft import Context, Draft, Limit, Needs, Request
from hf_specgen.drafters.draft_model import DraftModel, DraftModelSession, eval_view
from hf_specgen.drafters.layer_view import Decoder, SkipSet, view_of, why_not_skipped
from hf_specgen.prompt import generative, prompt_of
from hf_specgen.ranks import is_fully_sharded, several
from hf_specgen.target import Target, why_cropped
from hf_specgen.vocabulary import size


@dataclass(frozen=True)
class LayerSkip:
    """Drafts with the target's own layers, but for some. Exactly one of the first two says which.

    Early exit pays for models that were trained for it; of others `search_skip_set` finds what can best be spared.

    Args:
        exit_layer: so many of the first layers run, then the final norm and the LM head.
        skip: indices of whole layers to leave out, or a `SkipSet`, which tells attention and MLP apart.
        sample: as in `DraftModel`.
        branches: nodes a level of the tree; 1 drafts chains.
        num_assistant_tokens: how deep to draft where the caller does not say; None for as deep as pays.
    """

    exit_layer: int | None = None
    skip: Sequence[int] | SkipSet | None = None
    sample: bool = True
    branches: int = 1
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuses what says nothing, or two things."""
        if (self.exit_layer is None) == (self.skip is None):
            raise ValueError("LayerSkip takes exit_layer= or skip=, and exactly one of them")
        if not isinstance(self.exit_layer, int | None):
            raise ValueError(f"exit_layer must be a whole number, not {self.exit_layer!r}")
        if self.skip is not None:
            skip = self.skip if isinstance(self.skip, SkipSet) else SkipSet.whole(self.skip)
            object.__setattr__(self, "skip", skip)  # hashable, and nobody's list
            if not skip.attention and not skip.mlp:
                raise ValueError("the skip set is empty: with all of its layers a model drafts nothing faster")
        if self.branches < 1:
            raise ValueError(f"branches must be at least 1, not {self.branches}")

    @classmethod
    def from_file(cls, path: str | Path, **arguments: Any) -> LayerSkip:
        """Skips what a file says that `SkipSet.save` wrote.

        Args:
            path: of the file.
            **arguments: as for the class.
        """
        return cls(skip=SkipSet.load(path), **arguments)

    def start(self, target: PreTrainedModel, request: Request) -> LayerSkipSession:
        """See `Drafter`.

        Raises:
            ValueError: the model has no such layers, or none that could be left out; the message says why.
        """
        model = generative(target)
        refuse(model)
        count = len(Decoder.of(model).layers)
        if self.exit_layer is not None:
            if not 0 < self.exit_layer < count:
                raise ValueError(f"exit_layer={self.exit_layer} of {count} layers: it must lie in 1 to {count - 1}")
            skip = SkipSet.whole(range(self.exit_layer, count))
        else:
            assert isinstance(self.skip, SkipSet)
            skip = self.skip
        if (reason := why_not_skipped(model, skip)) is not None:
            raise ValueError(f"{type(model).__name__} cannot skip these layers: {reason}")
        view = view_of(eval_view(model), skip)
        if has_attention(new_cache(model.config)) and not has_attention(new_cache(view.config)):
            raise ValueError(f"{type(model).__name__} has no attention among the layers that would run: let more run")
        if (reason := why_cropped(view, prompt_of(view, [[0]]))) is not None:
            raise ValueError(f"{type(model).__name__} cannot draft for itself with fewer layers: {reason}")
        drafter = DraftModel(view, sample=self.sample, branches=self.branches)
        return LayerSkipSession(drafter, view, request, size(model))


def refuse(model: PreTrainedModel) -> None:
    """Raises ValueError for a model that has no view of fewer layers, whichever they are."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise ValueError(f"{name} is an encoder-decoder; LayerSkip takes causal LMs")
    if getattr(model.config.get_text_config(decoder=True), "cross_attention_layers", None):
        raise ValueError(f"{name} has layers that hold a picture, which LayerSkip does not take")
    if several() and is_fully_sharded(model):
        raise ValueError(
            f"{name} is sharded by FSDP or ZeRO-3, where each pass needs one of every rank, and ranks draft as often "
            "as their texts need it; LayerSkip takes models that are whole on each rank or split by tensor parallelism"
        )
    if any(parameter.device.type == "meta" for parameter in model.parameters()):
        raise ValueError(f"the weights of {name} are offloaded and would be brought back for every drafted token")


class LayerSkipSession(DraftModelSession):
    """One call of the view: in the target's cache where that is made of slots, else with a cache of its own."""

    needs = Needs(cache_view=True)
    _in_target = False

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`. The target's cache is left as it was, but for what lies behind the committed tokens."""
        cache = context.cache
        if not isinstance(cache, SlotCache) or not self._shares(cache):
            return super().propose(context, limit)
        if max(limit.depth) == 0:
            return Draft.empty(self.request.batch)
        committed = list(cache.lengths)
        # Room for all of it at once: a sliding layer that makes room later drops what the committed tokens still see.
        room = max(limit.depth)
        if not limit.chain:
            room = min(limit.nodes, room * self.drafter.branches) + 1
        cache.begin(room)
        try:
            return super().propose(context, limit)
        finally:
            cache.lengths[:] = committed
            if min(committed) < max(committed):
                self._wipe(cache, room)

    def _shares(self, cache: SlotCache) -> bool:
        """Whether it drafts in the target's cache; decided with the first draft."""
        # A recurrent state would have to be copied first; one rotated by length is computed anew in another cache.
        if self.runner is None and cache.trees and (behind := Behind(self.model, cache)).switch is None:
            self.runner, self._in_target = behind, True
        return self._in_target

    def _catch_up(self, runner: Target, context: Context, depth: tuple[int, ...]) -> Tensor:
        """Feeds the root; the decided tokens before it are in the cache."""
        if not self._in_target:
            return super()._catch_up(runner, context, depth)
        roots = torch.tensor([ids[-1] for ids in context.ids])
        logits = self._pass(roots, Draft.empty(len(depth), self.device), [not asked for asked in depth])
        runner.cache.commit([() if asked else None for asked in depth])
        self.settled = [len(ids) for ids in context.ids]
        return logits

    def _wipe(self, cache: SlotCache, room: int) -> None:
        """Zeros what was drafted: in rows of unequal length masked slots are read, and 0 times a stray NaN is NaN."""
        cache.begin(room)
        for layer in cache.layers:
            if isinstance(layer, SlotLayer):
                for buffer in (layer.keys, layer.values):
                    batch, heads, _, dim = buffer.shape
                    cache.write(buffer, buffer.new_zeros(1).expand(batch, heads, room, dim), layer.base)


class Behind(Target):
    """Passes of a view behind the committed tokens of the target's cache, at the positions that these slots stand for.

    Args:
        view: of the target.
        cache: the target's, filled.
    """

    cache: RowCache

    def __init__(self, view: PreTrainedModel, cache: SlotCache) -> None:
        batch = len(cache.lengths)
        super().__init__(view, prompt_of(view, [[0]] * batch))
        self.cache = cache
        self._offset = torch.zeros((batch, 1), dtype=torch.long, device=self.device)
        self._counted = torch.arange(2 * max(cache.lengths) + 256, device=self.device).view(-1, 1, 1)
