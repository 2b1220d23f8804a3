"""The rotary embedding of a head, which neither a dtype nor a pass changes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

if TYPE_CHECKING:
    from collections.abc import Callable

# Stock keeps what the longest position of a pass makes of these frequencies on their module.
MOVING = ("dynamic", "longrope")


# transformers tells rotary embeddings by this end of their names.
class HeadRotaryEmbedding(LlamaRotaryEmbedding):
    """Llama's, whose frequencies stay in float32 whatever the weights are moved to, as `from_pretrained` leaves them.

    Rounded to bfloat16 they would turn by another radian a thousand tokens on.
    """

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> HeadRotaryEmbedding:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, held in before.items():
            now = self._buffers[name]
            if held is not None and now is not None and now.dtype != held.dtype:
                self._buffers[name] = held.to(now.device)
        return self

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Returns cosines and sines, `(batch, width, head_dim)` each."""
        stock: Any = super().forward
        if self.rope_type in MOVING:
            # One of its own for each pass, since passes of several threads may use this one at a time.
            stock = LlamaRotaryEmbedding(self.config).to(x.device)
        turns: tuple[Tensor, Tensor] = stock(x, position_ids)
        return turns
