"""The only file that knows transformers' caches.

Both caches here answer the same five questions for `target.Target`: what object the model is given, how long each row
is, which mask a pass needs, what to keep of a pass, and what to hand back to the user.

The invariant, after every `commit`, for every row: the cache holds every decided token but the last.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    get_layer_types_and_kwargs,
)

if TYPE_CHECKING:
    from hf_specgen.draft import Draft

Mask = Tensor | dict[str, Tensor] | None
SMALLEST_CAPACITY = 64


class RowCache(Protocol):
    """A cache as a decoding call sees it.

    Attributes:
        lengths: for each row the tokens it holds for good. What a pass writes lies beyond and does not count yet.
        ragged: rows may keep different numbers of tokens.
        trees: a pass may branch.
    """

    lengths: list[int]
    ragged: bool
    trees: bool

    @property
    def model_cache(self) -> Cache:
        """What the model's forward is given."""
        ...

    def begin(self, width: int) -> None:
        """Makes room for a pass over `width` tokens a row (the root and its nodes)."""
        ...

    def mask(self, draft: Draft, dtype: torch.dtype) -> Mask:
        """The attention mask of the pass announced by `begin`; None where the model needs none."""
        ...

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keeps of the last pass the root and the nodes of `paths`, for each row; None keeps nothing of that row."""
        ...

    def release(self) -> Cache:
        """The cache as stock `generate` would return it. The call is over then."""
        ...

    def close(self) -> None:
        """Undoes what only a call in progress needs of the model's cache."""
        ...


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """One layer's keys and values in buffers that outlive a pass; row b's token at position p lies in slot p.

    Args:
        slots: the bookkeeping that all layers of a cache share.
        window: how far back this layer attends; None for all the way.
    """

    is_croppable = True
    keys: Tensor
    values: Tensor

    def __init__(self, slots: SlotCache, window: int | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slots = slots
        self.window = window
        self.is_sliding = window is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Called for a layer that the prompt's pass did not fill, which cannot happen."""
        raise AssertionError("a slot layer is filled from the prompt's pass")

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Takes over filled buffers, `(batch, heads, capacity, dim)` each; keys and values may differ in dim."""
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes a pass's keys and values behind each row's committed ones; returns the slots in use."""
        self.slots.write(self.keys, key_states)
        self.slots.write(self.values, value_states)
        seen = slice(*self.slots.span(key_states.shape[-2], self.window))
        return self.keys[:, :, seen], self.values[:, :, seen]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys that `update` will return."""
        first, last = self.slots.span(query_length, self.window)
        return last - first, first

    def get_seq_length(self) -> int:
        """The longest row."""
        return max(self.slots.lengths)

    def get_max_length(self) -> int:
        """No maximum: the buffers grow."""
        return -1


class SlotCache(Cache):
    """Preallocated keys and values with a length per row: rolling back is setting a number.

    Node i of a pass is written to slot `lengths[b] + i` of row b, whatever its depth; a mask lets it see the committed
    slots and its ancestors. Committing a chain moves nothing, committing a branch gathers its path.

    Args:
        prefilled: the cache of the prompt's pass; it is emptied, and filled again by `release`.
        config: the text model's config, for the kinds of its layers.
        padding: places without a token at the start of each row.
    """

    ragged = True
    trees = True

    def __init__(self, prefilled: DynamicCache, config: PreTrainedConfig, padding: Sequence[int]) -> None:
        kinds, sizes = get_layer_types_and_kwargs(config)
        self.prefilled = prefilled
        self.padding = list(padding)
        self.dict_masks = getattr(config, "layer_types", None) is not None
        self.windows: dict[str, int | None] = {}
        layers: list[Any] = []
        for kind, size, layer in zip(kinds, sizes, prefilled.layers, strict=True):
            if isinstance(layer, DummyLayer):
                layers.append(layer)
                continue
            window = size.get("sliding_window")
            self.windows[kind] = window
            # Weak, since a cycle would keep a call's buffers until the garbage collector comes by.
            layers.append(SlotLayer(weakref.proxy(self), window))
        super().__init__(layers=layers)
        self._filled: list[tuple[SlotLayer, Any]] = [
            (mine, theirs)
            for mine, theirs in zip(layers, prefilled.layers, strict=True)
            if isinstance(mine, SlotLayer) and isinstance(theirs, DynamicLayer) and theirs.is_initialized
        ]
        self._index: Tensor | None = None
        columns = prefilled.get_seq_length()
        # The last prompt token is the first root: it is in the buffers already and counts from the first commit on.
        self.lengths = [columns - pad - 1 for pad in self.padding]
        self.capacity = max(SMALLEST_CAPACITY, 2 * columns)
        for slot_layer, layer in self._filled:
            # A sliding layer kept only the columns that later tokens can still see.
            first = columns - layer.keys.shape[-2]
            slot_layer.hold(self._rolled(layer.keys, first), self._rolled(layer.values, first))
            layer.keys = layer.values = None

    @property
    def model_cache(self) -> Cache:
        """This very object."""
        return self

    def _rolled(self, states: Tensor, first: int) -> Tensor:
        """A buffer with each row's states moved to the start; `first` is the column of `states[..., 0, :]`."""
        batch, heads, columns, dim = states.shape
        # Zeros and not merely empty: a masked slot is multiplied by 0, and 0 times a stray NaN is NaN.
        buffer = states.new_zeros((batch, heads, self.capacity, dim))
        for row, pad in enumerate(self.padding):
            skip = max(0, pad - first)
            start = first + skip - pad
            buffer[row, :, start : start + columns - skip] = states[row, :, skip:]
        return buffer

    def begin(self, width: int) -> None:
        """See `RowCache`. Buffers double when they are full."""
        needed = max(self.lengths) + width
        if needed > self.capacity:
            self.capacity = max(needed, 2 * self.capacity)
            for layer, _ in self._filled:
                layer.hold(self._grown(layer.keys), self._grown(layer.values))
        if self._level():
            self._index = None
        else:
            starts = torch.tensor(self.lengths, device=self._device()).view(-1, 1, 1, 1)
            self._index = starts + torch.arange(width, device=self._device()).view(1, 1, -1, 1)

    def _grown(self, buffer: Tensor) -> Tensor:
        batch, heads, old, dim = buffer.shape
        grown = buffer.new_zeros((batch, heads, self.capacity, dim))
        grown[:, :, :old] = buffer
        return grown

    def _device(self) -> torch.device:
        return self._filled[0][0].keys.device

    def _level(self) -> bool:
        return min(self.lengths) == max(self.lengths)

    def write(self, buffer: Tensor, states: Tensor) -> None:
        """Puts `states` `(batch, heads, width, dim)` behind each row's committed slots."""
        if self._index is None:
            start = self.lengths[0]
            buffer[:, :, start : start + states.shape[-2]] = states
        else:
            buffer.scatter_(2, self._index.to(buffer.device).expand_as(states), states)

    def span(self, width: int, window: int | None) -> tuple[int, int]:
        """First and last slot (exclusive) that a pass over `width` tokens a row can see in a layer of that window."""
        first = 0 if window is None else max(0, min(self.lengths) - window + 1)
        return first, max(self.lengths) + width

    def mask(self, draft: Draft, dtype: torch.dtype) -> Mask:
        """Additive `(batch, 1, width, slots)`, one a kind of layer where the model tells its kinds apart.

        None for one token a row at equal lengths: every slot is visible then, and kernels are fastest without a mask.
        """
        width = draft.nodes + 1
        if width == 1 and self._level():
            return None
        hidden = self._hidden(draft)
        # Eager attention softmaxes in float32 whatever the model's format: float64's own minimum would be -inf there.
        blocking = max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)
        masks = {}
        for kind, window in self.windows.items():
            first, last = self.span(width, window)
            mask = torch.zeros((hidden.shape[0], 1, width, last - first), dtype=dtype, device=hidden.device)
            if window is not None:
                far = self._far(draft, kind, window)
                far[..., last - hidden.shape[-1] :] |= hidden
                mask.masked_fill_(far[..., first:].unsqueeze(1), blocking)
            else:
                mask[..., last - hidden.shape[-1] :].masked_fill_(hidden.unsqueeze(1), blocking)
            masks[kind] = mask
        return masks if self.dict_masks else next(iter(masks.values()))

    def _hidden(self, draft: Draft) -> Tensor:
        """`(batch, width, slots)` bool over the last slots in use: neither committed, nor an ancestor, nor itself.

        Rows of one length share every committed slot, so that only the slots of the pass itself are looked at.
        """
        strangers = ~draft.tree.ancestors
        if self._level():
            return strangers
        node = self._node_in_slot(draft)
        hidden = strangers.gather(2, node.clamp(0, draft.nodes).unsqueeze(1).expand(-1, draft.nodes + 1, -1))
        hidden |= (node > draft.nodes).unsqueeze(1)
        hidden &= (node >= 0).unsqueeze(1)
        return hidden

    def _far(self, draft: Draft, kind: str, window: int) -> Tensor:
        """`(batch, width, slots)` bool: outside a layer's window or chunk, by true positions."""
        depth, node = draft.tree.depth, self._node_in_slot(draft)
        lengths = torch.tensor(self.lengths, device=depth.device).view(-1, 1)
        query = (lengths + depth).unsqueeze(-1)
        in_pass = lengths + depth.gather(1, node.clamp(0, draft.nodes))
        key = torch.where(node < 0, lengths + node, in_pass).unsqueeze(1)
        return query // window != key // window if kind == "chunked_attention" else query - key >= window

    def _node_in_slot(self, draft: Draft) -> Tensor:
        """`(batch, slots)` which place of the pass lies in a slot; negative for a committed token."""
        lengths = torch.tensor(self.lengths, device=draft.tokens.device).view(-1, 1)
        return torch.arange(max(self.lengths) + draft.nodes + 1, device=draft.tokens.device) - lengths

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """See `RowCache`. Moves nothing for a path that lies in order behind the root."""
        for row, path in enumerate(paths):
            if path is None:
                continue
            start = self.lengths[row] + 1
            if list(path) != list(range(1, len(path) + 1)):
                source = torch.tensor(path, device=self._device()) + (start - 1)
                for layer, _ in self._filled:
                    for buffer in (layer.keys, layer.values):
                        rows = buffer[row]
                        rows[:, start : start + len(path)] = rows.index_select(1, source.to(buffer.device))
            self.lengths[row] = start + len(path)

    def to_dynamic(self) -> DynamicCache:
        """A stock cache: each row behind its padding again, columns as in the sequences that `generate` returns."""
        columns = max(pad + length for pad, length in zip(self.padding, self.lengths, strict=True))
        for slot_layer, layer in self._filled:
            first = 0 if slot_layer.window is None else max(0, columns - slot_layer.window + 1)
            layer.keys = self._unrolled(slot_layer.keys, first, columns)
            layer.values = self._unrolled(slot_layer.values, first, columns)
            if slot_layer.window is not None:
                layer.cumulative_length = columns
        return self.prefilled

    def _unrolled(self, buffer: Tensor, first: int, columns: int) -> Tensor:
        batch, heads, _, dim = buffer.shape
        states = buffer.new_zeros((batch, heads, columns - first, dim))
        for row, (pad, length) in enumerate(zip(self.padding, self.lengths, strict=True)):
            # A row that ended long before the others may lie before the window altogether.
            skip = min(max(first, pad), pad + length)
            if skip >= first:
                states[row, :, skip - first : pad + length - first] = buffer[row, :, skip - pad : length]
        return states

    def release(self) -> Cache:
        """See `RowCache`."""
        return self.to_dynamic()

    def close(self) -> None:
        """See `RowCache`: nothing here is the caller's."""


class CropCache:
    """Any transformers cache that can be cropped, rolled back by cropping; all rows keep the same number of tokens.

    For what cannot take a 4-D mask or position ids, and for a cache that the caller passed in.

    Args:
        cache: the cache after the prompt's pass.
        attention_mask: `(batch, length)` with 0 for padding, or None.
        batch: rows.
    """

    ragged = False
    trees = False

    def __init__(self, cache: Cache, attention_mask: Tensor | None, batch: int) -> None:
        self.cache = cache
        self.attention_mask = attention_mask
        # Counted here from now on: a static cache keeps its own count on the device.
        self.lengths = [int(cache.get_seq_length()) - 1] * batch
        self.width = 1
        self.recording = self.undecided = False
        # Layers that keep what they may have to restore only while this call lasts.
        self._borrowed = [layer for layer in getattr(cache, "layers", ()) if vars(layer).get("record_past") is False]

    @property
    def model_cache(self) -> Cache:
        """The cache as it was given."""
        return self.cache

    def begin(self, width: int) -> None:
        """See `RowCache`. After the prompt's pass sliding layers keep what they may have to restore."""
        if not self.recording:
            self.cache.activate_past_recording()  # type: ignore[no-untyped-call]
            self.recording = True
        self.width, self.undecided = width, True

    def mask(self, draft: Draft, dtype: torch.dtype) -> Mask:
        """The stock two-dimensional mask, or None where no row is padded."""
        if self.attention_mask is None:
            return None
        missing = self.lengths[0] + self.width - self.attention_mask.shape[1]
        return torch.nn.functional.pad(self.attention_mask, (0, missing), value=1)

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """See `RowCache`. Rows that go on have chains of one length."""
        # A row that ended within the walk has a shorter path; it is padding from there on, as in stock.
        keep = max(1 + len(path) for path in paths if path is not None)
        if self.recording:
            # crop(0) is no waste: it lets sliding layers fall back to their window.
            self.cache.crop(keep - self.width)
        self.lengths = [length + keep for length in self.lengths]
        self.undecided = False
        held = self.cache.get_seq_length()
        # A static cache keeps its count on the device, where it is not worth a read; stock's are tested.
        if isinstance(held, int) and held != self.lengths[0]:
            raise RuntimeError(
                f"{type(self.cache).__name__} holds {held} tokens after crop() and not {self.lengths[0]}: "
                "rejected tokens cannot be removed from it"
            )

    def release(self) -> Cache:
        """See `RowCache`."""
        return self.cache

    def close(self) -> None:
        """See `RowCache`. After an error between a pass and its commit, what the pass wrote goes too."""
        if self.undecided and int(self.cache.get_seq_length()) == self.lengths[0] + self.width:
            self.cache.crop(-self.width)
            self.undecided = False
        if self.recording:
            for layer in self._borrowed:
                layer.record_past = False
            self.recording = False


def is_users(cache: Cache | None) -> bool:
    """Whether the caller of `generate` passed this cache in (transformers marks it)."""
    return getattr(cache, "_is_user_defined", False)


def why_not_slots(cache: Cache) -> str | None:
    """Why an empty cache that transformers prepared cannot become a `SlotCache`, in words; None if it can."""
    if type(cache) is not DynamicCache or not cache.layers:
        return f"{type(cache).__name__} is kept as it is"
    if cache.offloading:
        return "its keys and values are offloaded"
    known = (DynamicLayer, DynamicSlidingWindowLayer, DummyLayer)
    strange = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in known})
    return f"it has layers of its own kind: {', '.join(strange)}" if strange else None


def why_not_croppable(cache: Cache) -> str | None:
    """The layers that no rejected token can be removed from, in words; None if there are none."""
    stuck = sorted({type(layer).__name__ for layer in getattr(cache, "layers", ()) if not layer.is_croppable})
    return f"{type(cache).__name__} with {', '.join(stuck)}" if stuck else None


def new_cache(config: PreTrainedConfig) -> Cache:
    """The cache that transformers would prepare for a model of this (text) config."""
    return DynamicCache(config=config)
