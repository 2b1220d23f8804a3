"""Many rows at once, plainly: what a target says to a hundred prompts, as fast as a pass over a hundred tokens allows.

Speculation makes one row faster. With a hundred rows a pass is as dear as its tokens, and what counts is to share the
prompts' common start, to copy no cache, and to drop rows that have ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

# Of the rows of a pass, one in so many may have ended before the others are moved together.
IDLE = 8
# What `generate` is told so that a model's own generation config bends nothing.
NEUTRAL: dict[str, Any] = {"top_p": 1.0, "typical_p": 1.0, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
# Places that a cache grows by.
ROOM = 64


@dataclass(frozen=True)
class Draw:
    """How a token is chosen out of `(rows, vocab)` logits.

    Attributes:
        temperatures: one a row; None for the likeliest token.
        top_k: of which to draw.
        generator: to draw with.
    """

    temperatures: Tensor | None = None
    top_k: int = 50
    generator: torch.Generator | None = None

    @classmethod
    def seeded(cls, temperatures: Sequence[float], top_k: int, seed: int, device: torch.device) -> Draw:
        """Draws the same for the same seed on the same device."""
        return cls(torch.tensor(temperatures), top_k, torch.Generator(device).manual_seed(seed))

    def __call__(self, logits: Tensor, rows: Tensor) -> Tensor:
        """The ids, `(rows,)`; `rows` says which of the first call's rows these are."""
        if self.temperatures is None:
            return logits.argmax(-1)
        best, ids = logits.float().topk(min(self.top_k, logits.shape[-1]))  # before the softmax: it is the dear part
        shares = (best / self.temperatures[rows, None].to(best.device)).softmax(-1)
        return ids.gather(-1, torch.multinomial(shares, 1, generator=self.generator)).squeeze(-1)


@dataclass
class Text:
    """A row as it was decoded.

    Attributes:
        ids: prompt and answer.
        prompt: tokens of the prompt.
        ended: the target has ended it; otherwise the limit did.
        states: `(tokens, width)` float16 pieces, one after the other; empty where no layer is kept.
    """

    ids: list[int]
    prompt: int
    ended: bool = False
    states: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class Decoder:
    """Continues prompts until they end.

    Attributes:
        model: the target, in eval mode.
        ends: ids that end a row.
        layers: `hidden_states` indices of the states to keep.
        tick: called with the tokens that every step brought.
    """

    model: PreTrainedModel
    ends: frozenset[int]
    layers: tuple[int, ...] = ()
    tick: Callable[[int], object] = lambda tokens: None

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Sequence[int]], limit: int, draw: Draw) -> list[Text]:
        """Continues every prompt by at most `limit` tokens, the one that ends it included."""
        texts = [Text(list(prompt), len(prompt)) for prompt in prompts]
        device = self.model.device
        cache, mask, logits = self._prefill(prompts, texts)
        rows = torch.arange(len(texts))
        for _ in range(limit):
            tokens = draw(logits, rows)
            running = [not texts[row].ended for row in rows.tolist()]
            for row, token, runs in zip(rows.tolist(), tokens.tolist(), running, strict=True):
                if runs:
                    texts[row].ids.append(token)
            self.tick(sum(running))
            # The last token's pass brings its state, though nobody reads its logits.
            mask = torch.cat([mask, mask.new_ones(len(rows), 1)], dim=1)
            logits, states = self._forward(tokens[:, None], mask, cache)
            for place, (row, runs) in enumerate(zip(rows.tolist(), running, strict=True)):
                if runs:
                    if states is not None:
                        texts[row].states.append(states[place])
                    texts[row].ended = texts[row].ids[-1] in self.ends
            left = torch.tensor([place for place, row in enumerate(rows.tolist()) if not texts[row].ended])
            if len(left) == 0:
                break
            if len(rows) - len(left) >= max(1, len(rows) // IDLE):
                rows, mask, logits = rows[left], mask[left.to(device)], logits[left.to(device)]
                # Unlike `batch_select_indices` all kinds of layers have it, those with recurrent states too.
                cache.reorder_cache(cast(torch.LongTensor, left.to(device)))
        return texts

    def _prefill(self, prompts: Sequence[Sequence[int]], texts: Sequence[Text]) -> tuple[DynamicCache, Tensor, Tensor]:
        """The prompts' pass: what all begin with once, then the rest of each, padded on the left."""
        device, cache = self.model.device, DynamicCache(config=self.model.config)
        plain = all(type(layer) is DynamicLayer for layer in cache.layers)
        if plain:
            cache.layers = [RoomyLayer() for _ in cache.layers]  # type: ignore[no-untyped-call]
        # Windows and recurrent states would count the padding behind a shared start.
        shared = min(alike(prompts), min(map(len, prompts)) - 1) if plain else 0
        mask = torch.ones(len(prompts), shared, dtype=torch.long, device=device)
        if shared:
            start = torch.tensor([prompts[0][:shared]], device=device)
            _, states = self._forward(start, mask[:1], cache)
            cache.batch_repeat_interleave(len(prompts))
            if states is not None:
                for text in texts:
                    text.states.append(states[0])
        rest = [list(prompt[shared:]) for prompt in prompts]
        width = max(map(len, rest))
        ids = torch.tensor([[0] * (width - len(row)) + row for row in rest], device=device)
        there = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rest], device=device)
        mask = torch.cat([mask, there], dim=1)
        logits, states = self._forward(ids, mask, cache)
        if states is not None:
            for text, row, own in zip(texts, rest, states, strict=True):
                text.states.append(own[width - len(row) :])
        return cache, mask, logits

    def _forward(self, ids: Tensor, mask: Tensor, cache: DynamicCache) -> tuple[Tensor, Tensor | None]:
        """The last place's logits, `(rows, vocab)`, and all places' states, `(rows, places, width)`, on the host."""
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        output: Any = self.model(
            input_ids=ids,
            attention_mask=mask if bool((mask == 0).any()) else None,
            position_ids=positions,
            cache=cache,
            logits_to_keep=1,
            output_hidden_states=bool(self.layers),
        )
        states = chosen(output.hidden_states, self.layers) if self.layers else None
        return output.logits[:, -1], states


@dataclass(frozen=True)
class Drafted:
    """The same by `generate(assistant=...)`: for few rows, or where a pass over several tokens costs that of one.

    Attributes:
        model: the target, with `assistant=` enabled.
        ends: ids that end a row.
        assistant: as for `generate`.
        tick: called with the tokens that a call brought.
    """

    model: Any
    ends: frozenset[int]
    assistant: Any
    tick: Callable[[int], object] = lambda tokens: None

    def __call__(self, prompts: Sequence[Sequence[int]], limit: int, draw: Draw) -> list[Text]:
        """See `Decoder`; no states are kept, and all rows are drawn at the first one's temperature."""
        width = max(map(len, prompts))
        sampling: dict[str, Any] = {"do_sample": False}
        if draw.temperatures is not None and draw.generator is not None:
            sampling = {"do_sample": True, "top_k": draw.top_k, "temperature": float(draw.temperatures[0])}
            sampling["seed"] = draw.generator.initial_seed()
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        there = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        grown = self.model.generate(
            input_ids=ids.to(self.model.device),
            attention_mask=there.to(self.model.device),
            assistant=self.assistant,
            max_new_tokens=limit,
            eos_token_id=sorted(self.ends),
            pad_token_id=0,
            **NEUTRAL,
            **sampling,
        )
        texts = []
        for prompt, row in zip(prompts, grown[:, width:].tolist(), strict=True):
            end = next((place for place, token in enumerate(row) if token in self.ends), None)
            answer = row if end is None else row[: end + 1]
            texts.append(Text([*prompt, *answer], len(prompt), end is not None))
            self.tick(len(answer))
        return texts


def alike(rows: Sequence[Sequence[int]]) -> int:
    """Tokens that all rows begin with."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))


def chosen(hidden: Sequence[Tensor], layers: Sequence[int]) -> Tensor:
    """Layers side by side in float16, `(rows, places, width)`, on the host.

    Raises:
        ValueError: a layer's states do not fit into float16.
    """
    kept = []
    for layer in layers:
        half = hidden[layer].to("cpu", torch.float16)
        if not bool(half.isfinite().all()):
            most = float(hidden[layer].float().abs().max())
            raise ValueError(
                f"hidden_states[{layer}] reach {most:.3g}, and float16 ends at 65504: leave that layer out"
            )
        kept.append(half)
    return torch.cat(kept, dim=-1)


class RoomyLayer(DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values with room behind them: a step writes its own and copies none of those before."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """See transformers."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.roomy: list[Tensor] = []
        held, new = self.get_seq_length(), key_states.shape[-2]
        fits = bool(self.roomy) and self.roomy[0].shape[0] == key_states.shape[0]
        if not fits or self.roomy[0].shape[2] < held + new:
            self.roomy = []
            for before, states in ((self.keys, key_states), (self.values, value_states)):
                room = states.new_empty((*states.shape[:2], held + new + ROOM, states.shape[3]))
                if held and before is not None:
                    room[:, :, :held] = before
                self.roomy.append(room)
        for room, states in zip(self.roomy, (key_states, value_states), strict=True):
            room[:, :, held : held + new] = states
        keys, values = (room[:, :, : held + new] for room in self.roomy)
        self.keys, self.values = keys, values
        return keys, values
