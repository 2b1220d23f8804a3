"""The only file, beside `recurrent`, that knows transformers' caches.

Both caches here answer the same five questions for `target.Target`: what object the model is given, how long each row
is, which mask a pass needs, what to keep of a pass, and what to hand back to the user.

The invariant, after every `commit`, for every row: the cache holds every decided token but the last.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    CacheLayerMixin,
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
    Fp8QuantizedLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    QuantizedCache,
    StaticCache,
    StaticLayer,
    get_layer_types_and_kwargs,
)

from hf_specgen.recurrent import Kept, RecurrentLayer, Snapshot, mixers

if TYPE_CHECKING:
    from hf_specgen.draft import Draft

# One for all layers, or one a kind of layer: None for the kinds that need none.
Mask = Tensor | dict[str, Tensor | None] | None
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

    def begin(self, width: int, some_idle: bool = False) -> None:
        """Makes room for a pass over `width` tokens a row (the root and its nodes).

        Args:
            width: tokens.
            some_idle: some rows will keep nothing of it.
        """
        ...

    def mask(self, draft: Draft, dtype: torch.dtype) -> Mask:
        """The attention mask of the pass announced by `begin`; None where the model needs none."""
        ...

    def commit(self, paths: Sequence[Sequence[int] | None]) -> None:
        """Keeps of the last pass the root and the nodes of `paths`, for each row; None keeps nothing of that row."""
        ...

    def mark(self) -> None:
        """Remembers what is committed now, for `rewind`."""
        ...

    def rewind(self, lengths: Sequence[int]) -> None:
        """Takes back what the rows hold beyond `lengths`; where something is recurrent, these are those of the mark."""
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
        # The slot in the first place of the buffers: those before it have slid out of sight.
        self.base = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Called for a layer that the prompt's pass did not fill, which cannot happen."""
        raise AssertionError("a slot layer is filled from the prompt's pass")

    def hold(self, keys: Tensor, values: Tensor) -> None:
        """Takes over filled buffers, `(batch, heads, capacity, dim)` each; keys and values may differ in dim."""
        self.keys, self.values = keys, values
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes a pass's keys and values behind each row's committed ones; returns the slots in use."""
        self.slots.write(self.keys, key_states, self.base)
        self.slots.write(self.values, value_states, self.base)
        first, last = self.slots.span(key_states.shape[-2], self.window)
        seen = slice(first - self.base, last - self.base)
        return self.keys[:, :, seen], self.values[:, :, seen]

    def make_room(self, needed: int, oldest: int, newest: int) -> None:
        """Grows the buffers by doubling, or where this layer slides drops what no later token can see.

        Args:
            needed: slots that the next pass takes, from the first one on.
            oldest: the shortest row may go back to this length.
            newest: committed tokens of the longest row.
        """
        if needed - self.base <= self.keys.shape[2]:
            return
        base = self.base
        if self.window is not None:
            self.base = max(base, oldest - self.window + 1)
        # Twice what is needed, so that a token is moved about once in the time that it is seen.
        capacity = max(self.keys.shape[2], 2 * (needed - self.base) if self.window is not None else 0)
        while capacity < needed - self.base:
            capacity *= 2
        held = slice(self.base - base, newest - base)
        self.hold(_moved(self.keys, held, capacity), _moved(self.values, held, capacity))

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


class HybridLayer(RecurrentLayer, SlotLayer):  # type: ignore[no-untyped-call]
    """Attention and a recurrent mixer side by side in one layer; see its two parents."""

    is_compileable = False

    def __init__(self, slots: SlotCache, stock: Any, mixer: nn.Module) -> None:
        RecurrentLayer.__init__(self, stock, mixer)
        SlotLayer.__init__(self, slots, window=None)


class SlotCache(Cache):
    """Preallocated keys and values with a length per row: rolling back is setting a number.

    Node i of a pass is written to slot `lengths[b] + i` of row b, whatever its depth; a mask lets it see the committed
    slots and its ancestors. Committing a chain moves nothing, committing a branch gathers its path. Recurrent layers
    stand beside the buffers and take chains only; see `recurrent`.

    Args:
        prefilled: the cache of the prompt's pass; it is emptied, and filled again by `release`.
        model: whose pass it was; its text config tells the kinds of its layers.
        padding: places without a token at the start of each row.
        columns: of the prompt, padding and what a continued cache holds included.
    """

    ragged = True

    def __init__(self, prefilled: DynamicCache, model: PreTrainedModel, padding: Sequence[int], columns: int) -> None:
        config = model.config.get_text_config(decoder=True)
        kinds, sizes = get_layer_types_and_kwargs(config)
        self.prefilled = prefilled
        self.padding = list(padding)
        self.windows: dict[str, int | None] = {}
        layers: list[Any] = []
        known = mixers(model) if has_recurrent(prefilled) else {}
        # Layers that hold a picture and not the text (Mllama): the prompt's pass has filled them for good.
        picture = frozenset(getattr(config, "cross_attention_layers", None) or ())
        # Weak, since a cycle would keep a call's buffers until the garbage collector comes by.
        slots: SlotCache = weakref.proxy(self)
        for index, (kind, size, layer) in enumerate(zip(kinds, sizes, prefilled.layers, strict=True)):
            if isinstance(layer, DummyLayer) or index in picture:
                layers.append(layer)
            elif type(layer) is LinearAttentionLayer:
                layers.append(RecurrentLayer(layer, known[index]))
            else:
                self.windows[kind] = window = size.get("sliding_window")
                both = isinstance(layer, LinearAttentionLayer)
                layers.append(HybridLayer(slots, layer, known[index]) if both else SlotLayer(slots, window))
        super().__init__(layers=layers)
        self._recurrent: list[tuple[RecurrentLayer, Any]] = [
            (mine, theirs)
            for mine, theirs in zip(layers, prefilled.layers, strict=True)
            if isinstance(mine, RecurrentLayer)
        ]
        self.trees = not self._recurrent
        # One mask for all kinds of attention is spread over them by models with recurrent layers themselves.
        self.dict_masks = getattr(config, "layer_types", None) is not None and (self.trees or len(self.windows) > 1)
        self._maskless = set(kinds).difference(self.windows) if self._recurrent else set()
        self._width, self._behind = 1, 0
        self._marks: list[Snapshot] = []
        self._marked: list[int] | None = None
        # Where the buffers of each window begin, since layers of one window slide together; and the first slot that
        # some buffer lacks, so that passes which fit do not ask every layer.
        self._bases: dict[int | None, int] = {}
        self._end = 0
        self._filled: list[tuple[SlotLayer, Any]] = [
            (mine, theirs)
            for mine, theirs in zip(layers, prefilled.layers, strict=True)
            if isinstance(mine, SlotLayer) and isinstance(theirs, DynamicLayer) and theirs.is_initialized
        ]
        self._index: Tensor | None = None
        # The last prompt token is the first root: it is in the buffers already and counts from the first commit on.
        self.lengths = [columns - pad - 1 for pad in self.padding]
        for slot_layer, layer in self._filled:
            # A sliding layer kept only the columns that later tokens can still see.
            first = columns - layer.keys.shape[-2]
            if first < 0:
                raise ValueError(
                    f"the prompt's pass left {layer.keys.shape[-2]} tokens in the cache for a prompt of {columns}: "
                    "the model keeps something without ids there, which assistant= does not take"
                )
            if slot_layer.window is not None:
                slot_layer.base = max(0, first - max(self.padding))
            slot_layer.hold(*(self._rolled(states, first, slot_layer.base) for states in (layer.keys, layer.values)))
            layer.keys = layer.values = None
        self._find_ends()

    @property
    def model_cache(self) -> Cache:
        """This very object."""
        return self

    @property
    def least(self) -> int:
        """No row may be shorter than this: what it would see has slid out of sight."""
        return max((layer.base + layer.window for layer, _ in self._filled if layer.window is not None), default=0)

    def _rolled(self, states: Tensor, first: int, base: int) -> Tensor:
        """A buffer from slot `base` on with each row's states, of which `states[..., 0, :]` are in column `first`."""
        batch, heads, columns, dim = states.shape
        # Zeros and not merely empty: a masked slot is multiplied by 0, and 0 times a stray NaN is NaN.
        buffer = states.new_zeros((batch, heads, max(SMALLEST_CAPACITY, 2 * (first + columns - base)), dim))
        for row, pad in enumerate(self.padding):
            skip = max(0, pad - first)
            start = first + skip - pad - base
            buffer[row, :, start : start + columns - skip] = states[row, :, skip:]
        return buffer

    def begin(self, width: int, some_idle: bool = False, behind: int = 0) -> None:
        """See `RowCache`. Buffers double when they are full.

        Args:
            width: tokens.
            some_idle: some rows will keep nothing of it.
            behind: tokens of earlier passes that lie behind the committed ones and are to stay: with them a drafter
                feeds a tree level by level, each node once. `mask` then takes the whole tree.
        """
        self._width, self._behind = width, behind
        for recurrent, _ in self._recurrent:
            # What a pass broke off half-way has written in place could not be taken back from the caller's cache.
            recurrent.begin(width, in_place=width == 1 and not some_idle and not is_users(self.prefilled))
        newest = max(self.lengths) + behind
        if newest + width > self._end:
            oldest = min(self._marked or self.lengths) - 1
            for layer, _ in self._filled:
                layer.make_room(newest + width, oldest, newest)
            self._find_ends()
        if self._level():
            self._index = None
        else:
            starts = torch.tensor(self.lengths, device=self._device()).view(-1, 1, 1, 1) + behind
            self._index = starts + torch.arange(width, device=self._device()).view(1, 1, -1, 1)

    def _find_ends(self) -> None:
        self._bases = {layer.window: layer.base for layer, _ in self._filled}
        self._end = min((layer.base + layer.keys.shape[2] for layer, _ in self._filled), default=sys.maxsize)

    def _device(self) -> torch.device:
        return self._filled[0][0].keys.device if self._filled else self._recurrent[0][0].mixer_device

    def _level(self) -> bool:
        return min(self.lengths) == max(self.lengths)

    def write(self, buffer: Tensor, states: Tensor, base: int) -> None:
        """Puts `states` `(batch, heads, width, dim)` behind each row's committed slots; `base`: the buffer's first."""
        if self._index is None:
            start = self.lengths[0] + self._behind - base
            buffer[:, :, start : start + states.shape[-2]] = states
        else:
            buffer.scatter_(2, (self._index - base).to(buffer.device).expand_as(states), states)

    def span(self, width: int, window: int | None) -> tuple[int, int]:
        """First and last slot (exclusive) that a pass over `width` tokens a row can see in a layer of that window."""
        # A drafter may feed the prompt's last token again, whose farthest neighbour stock's layer did not keep.
        first = 0 if window is None else max(self._bases.get(window, 0), min(self.lengths) - window + 1)
        return first, max(self.lengths) + self._behind + width

    def mask(self, draft: Draft, dtype: torch.dtype) -> Mask:
        """Additive `(batch, 1, width, slots)`, one a kind of layer where the model tells its kinds apart.

        None for one token a row at equal lengths: every slot is visible then, and kernels are fastest without a mask.
        """
        width = draft.nodes + 1 - self._behind
        if (draft.nodes == 0 and self._level()) or not self.windows:
            return None
        blocking = _blocking(dtype)
        if draft.is_chain and self._level() and not any(self.windows.values()):
            # What the general way below comes to for chains at one length, in a quarter of the time.
            later = draft.tokens.new_full((draft.nodes + 1, draft.nodes + 1), blocking, dtype=dtype).triu_(1)
            mask = nn.functional.pad(later[-width:], (self.lengths[0], 0)).expand(len(self.lengths), 1, -1, -1)
            return self._by_kind(dict.fromkeys(self.windows, mask))
        hidden = self._hidden(draft)[:, -width:]
        masks = {}
        for kind, window in self.windows.items():
            first, last = self.span(width, window)
            mask = torch.zeros((hidden.shape[0], 1, width, last - first), dtype=dtype, device=hidden.device)
            if window is not None:
                far = self._far(draft, kind, window)[:, -width:]
                far[..., last - hidden.shape[-1] :] |= hidden
                mask.masked_fill_(far[..., first:].unsqueeze(1), blocking)
            else:
                mask[..., last - hidden.shape[-1] :].masked_fill_(hidden.unsqueeze(1), blocking)
            masks[kind] = mask
        return self._by_kind(masks)

    def _by_kind(self, masks: dict[str, Tensor]) -> Mask:
        return {**dict.fromkeys(self._maskless), **masks} if self.dict_masks else next(iter(masks.values()))

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
        self._commit_recurrent(paths)
        for row, path in enumerate(paths):
            if path is None:
                continue
            start = self.lengths[row] + 1
            if list(path) != list(range(1, len(path) + 1)):
                source = torch.tensor(path, device=self._device()) + (start - 1)
                for layer, _ in self._filled:
                    for buffer in (layer.keys, layer.values):
                        rows, to = buffer[row], start - layer.base
                        rows[:, to : to + len(path)] = rows.index_select(1, source.to(buffer.device) - layer.base)
            self.lengths[row] = start + len(path)

    def _commit_recurrent(self, paths: Sequence[Sequence[int] | None]) -> None:
        if not self._recurrent:
            return
        kept = Kept.of([0 if path is None else 1 + len(path) for path in paths], self._width, self._device())
        for layer, _ in self._recurrent:
            layer.commit(kept)

    def mark(self) -> None:
        """See `RowCache`. Sliding layers keep what those lengths see, recurrent ones a copy of their states."""
        self._marked = list(self.lengths)
        self._marks = [layer.snapshot() for layer, _ in self._recurrent]

    def rewind(self, lengths: Sequence[int]) -> None:
        """See `RowCache`."""
        self.lengths[:] = lengths
        for (layer, _), snapshot in zip(self._recurrent, self._marks, strict=True):
            layer.restore(snapshot)

    def to_dynamic(self) -> DynamicCache:
        """A stock cache: each row behind its padding again, columns as in the sequences that `generate` returns."""
        columns = max(pad + length for pad, length in zip(self.padding, self.lengths, strict=True))
        for slot_layer, layer in self._filled:
            first = 0 if slot_layer.window is None else max(0, columns - slot_layer.window + 1)
            layer.keys = self._unrolled(slot_layer.keys, slice(first, columns), slot_layer.base)
            layer.values = self._unrolled(slot_layer.values, slice(first, columns), slot_layer.base)
            if slot_layer.window is not None:
                layer.cumulative_length = columns
        for recurrent, layer in self._recurrent:
            recurrent.give_back(layer)
        return self.prefilled

    def _unrolled(self, buffer: Tensor, columns: slice, base: int) -> Tensor:
        batch, heads, _, dim = buffer.shape
        first = columns.start
        states = buffer.new_zeros((batch, heads, columns.stop - first, dim))
        for row, (pad, length) in enumerate(zip(self.padding, self.lengths, strict=True)):
            # A row that ended long before the others may lie before the window altogether.
            skip = min(max(first, pad), pad + length)
            if skip >= first:
                states[row, :, skip - first : pad + length - first] = buffer[row, :, skip - pad - base : length - base]
        return states

    def release(self) -> Cache:
        """See `RowCache`."""
        return self.to_dynamic()

    def close(self) -> None:
        """See `RowCache`. A cache with recurrent layers may be the caller's, who finds it as the last round left it."""
        for recurrent, _ in self._recurrent:
            recurrent.close()
        if is_users(self.prefilled):
            self.to_dynamic()


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
        # Cropped by itself: stock's EncoderDecoderCache refuses to crop static layers, which can be cropped.
        self._growing = _growing(cache)
        self.attention_mask = attention_mask
        # Counted here from now on: a static cache keeps its own count on the device.
        self.lengths = [int(cache.get_seq_length()) - 1] * batch
        self.width = 1
        self.recording = self.undecided = False
        # Layers that keep what they may have to restore only while this call lasts.
        self._borrowed = [layer for layer in _layers(cache) if vars(layer).get("record_past") is False]

    @property
    def model_cache(self) -> Cache:
        """The cache as it was given."""
        return self.cache

    def begin(self, width: int, some_idle: bool = False) -> None:
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
            _crop(self._growing, keep - self.width)
        self.lengths = [length + keep for length in self.lengths]
        self.undecided = False
        held = self.cache.get_seq_length()
        # A static cache keeps its count on the device, where it is not worth a read; stock's are tested.
        if isinstance(held, int) and held != self.lengths[0]:
            raise RuntimeError(
                f"{type(self.cache).__name__} holds {held} tokens after crop() and not {self.lengths[0]}: "
                "rejected tokens cannot be removed from it"
            )

    def rewind(self, lengths: Sequence[int]) -> None:
        """See `RowCache`. Rows keep the same number of tokens, and sliding layers cannot do this."""
        _crop(self._growing, lengths[0] - self.lengths[0])
        self.lengths = list(lengths)

    def mark(self) -> None:
        """See `RowCache`. Nothing that can be cropped needs it."""

    def release(self) -> Cache:
        """See `RowCache`."""
        return self.cache

    def close(self) -> None:
        """See `RowCache`. After an error between a pass and its commit, what the pass wrote goes too."""
        if self.undecided and int(self.cache.get_seq_length()) == self.lengths[0] + self.width:
            _crop(self._growing, -self.width)
            self.undecided = False
        if self.recording:
            for layer in self._borrowed:
                layer.record_past = False
            self.recording = False


@functools.lru_cache
def _blocking(dtype: torch.dtype) -> float:
    """What a mask adds where a token must not look.

    Eager attention softmaxes in float32 whatever the model's format: float64's own minimum would be -inf there.
    """
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


def _moved(buffer: Tensor, held: slice, capacity: int) -> Tensor:
    """The places `held` of a buffer at the start of one of `capacity`; of the same one where its size stays."""
    kept = buffer[:, :, held]
    if capacity == buffer.shape[2]:
        buffer[:, :, : kept.shape[2]] = kept.clone()
        return buffer
    moved = buffer.new_zeros((*buffer.shape[:2], capacity, buffer.shape[3]))
    moved[:, :, : kept.shape[2]] = kept
    return moved


def is_users(cache: Cache | None) -> bool:
    """Whether the caller of `generate` passed this cache in (transformers marks it)."""
    return getattr(cache, "_is_user_defined", False)


def has_recurrent(cache: Cache | None) -> bool:
    """Whether some layers of a cache keep a recurrent state."""
    return any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in getattr(cache, "layers", ()))


def has_indexer(cache: Cache | None) -> bool:
    """Whether some layers of a growing cache keep the keys of an indexer; one of a fixed size shows it all columns."""
    return any(isinstance(layer, DynamicIndexedLayer) for layer in getattr(cache, "layers", ()))


def has_attention(cache: Cache) -> bool:
    """Whether some layers of a cache keep keys and values."""
    return any(isinstance(layer, CacheLayerMixin) for layer in getattr(cache, "layers", ()))


def why_not_slots(cache: Cache) -> str | None:
    """Why a cache that transformers prepared cannot become a `SlotCache`, in words; None if it can."""
    if type(cache) is not DynamicCache or not cache.layers:
        return f"{type(cache).__name__} is kept as it is"
    if cache.offloading:
        return "its keys and values are offloaded"
    known = (
        DynamicLayer,
        DynamicSlidingWindowLayer,
        DummyLayer,
        LinearAttentionLayer,
        LinearAttentionAndFullAttentionLayer,
    )
    strange = sorted({type(layer).__name__ for layer in cache.layers if type(layer) not in known})
    return f"it has layers of its own kind: {', '.join(strange)}" if strange else None


def why_not_croppable(cache: Cache) -> str | None:
    """The layers that no rejected token can be removed from, in words; None if there are none."""
    croppable = [layer for layer in _layers(cache) if layer.is_croppable or isinstance(layer, Fp8QuantizedLayer)]
    stuck = sorted({type(layer).__name__ for layer in _layers(cache) if layer not in croppable})
    return f"{type(cache).__name__} with {', '.join(stuck)}" if stuck else None


def croppable_instead(cache: Cache) -> str:
    """What to do about a cache that cannot be cropped, as the end of a sentence."""
    if isinstance(_growing(cache), QuantizedCache):
        return "they can from one with cache_config={'backend': 'fp8'}, which never quantizes anew what it holds"
    if is_static(cache) and not has_recurrent(cache):
        return "leave cache_implementation= out or pass a DynamicCache"
    return f"{'leave cache_implementation= out or ' if is_static(cache) else ''}generate without assistant="


def offloads(cache: Cache | None) -> bool:
    """Whether a cache keeps its layers on the CPU while they are not needed."""
    return cache is not None and bool(getattr(_growing(cache), "offloading", False))


def is_pair(cache: Cache) -> bool:
    """Whether a cache has a part for the text and a part for what an encoder said."""
    return isinstance(cache, EncoderDecoderCache)


def is_static(cache: Cache | None) -> bool:
    """Whether a cache has a size that is set once."""
    return cache is not None and isinstance(_growing(cache), StaticCache)


def room(cache: Cache) -> int | None:
    """The most tokens a row that a cache can take, those it holds included; None if it grows."""
    return min((layer.max_cache_len for layer in _layers(cache) if isinstance(layer, StaticLayer)), default=None)


def filled(cache: Cache) -> tuple[int, int]:
    """The rows that a cache is made for, 0 as long as it takes any number, and the tokens a row that it holds."""
    rows = [0]
    for layer in _layers(cache):
        if isinstance(layer, Fp8QuantizedLayer):
            states = [None if layer._quantized_keys is None else layer._quantized_keys[0]]
        elif isinstance(layer, LinearAttentionCacheLayerMixin):
            states = list(layer.conv_states.values())
        else:
            states = [layer.keys]
        rows += [state.shape[0] for state in states if isinstance(state, Tensor) and state.ndim > 1]
    return max(rows), int(cache.get_seq_length()) if has_attention(_growing(cache)) else 0


def new_cache(config: PreTrainedConfig, offloading: bool = False) -> Cache:
    """The cache that transformers would prepare for a model of this config."""
    decoder = config.get_text_config(decoder=True)
    cache = DynamicCache(config=decoder, offloading=offloading)
    return EncoderDecoderCache(cache, DynamicCache(config=decoder)) if config.is_encoder_decoder else cache


def _crop(cache: Cache, tokens: int) -> None:
    """Takes the last `-tokens` tokens of every row away, also where stock's cache cannot."""
    if not isinstance(cache, QuantizedCache):
        cache.crop(tokens)
    elif tokens:
        # Its scales are those of the prompt for good, so that a token is stored alike in whatever pass it came.
        layers: Any = cache.layers
        for layer in layers:
            keys, key_scale = layer._quantized_keys
            values, value_scale = layer._quantized_values
            layer._quantized_keys = keys[..., :tokens, :], key_scale
            layer._quantized_values = values[..., :tokens, :], value_scale
            layer.cumulative_length += tokens


def _layers(cache: Cache) -> Sequence[Any]:
    """The layers that grow with the text; those of a cross-attention hold what the encoder said."""
    return getattr(_growing(cache), "layers", ())


def _growing(cache: Cache) -> Cache:
    """The part of a cache that grows with the text."""
    return cache.self_attention_cache if isinstance(cache, EncoderDecoderCache) else cache
