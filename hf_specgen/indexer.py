"""Sparse attention with an indexer: equal scores must be chosen from as in passes over one token.

An indexer (DeepSeek Sparse Attention, arXiv 2512.02556) scores every cached token by a sum of rectified products, and
attention sees the best k. What no head looks at scores exactly 0, so that ties at the edge of those k are common where
heads are few. Which of equal columns `topk` takes depends on how many it is shown: a pass over several tokens shows all
of them the columns of the last one, and would choose otherwise than stock, token by token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class OneByOne(TorchFunctionMode):
    """Within it an indexer chooses for each token of a pass from the columns which a pass over it alone would show.

    It holds for the thread that enters it, and changes no module.

    Args:
        batch: rows.
        width: tokens of the pass.
        columns: what its last token sees.
    """

    def __init__(self, batch: int, width: int, columns: int) -> None:
        super().__init__()
        # No router of experts asks for such a shape: theirs begin with all tokens of all rows.
        self.shape = (batch, width, columns)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Every call of a torch function comes here; all but the indexer's are passed on."""
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk) and tuple(args[0].shape) == self.shape:
            return self._topk(*args, **kwargs)
        return func(*args, **kwargs)

    def _topk(self, scores: Tensor, k: int, dim: int = -1) -> Any:
        """As `topk` over the last dimension of `scores`, `(batch, width, columns)`."""
        _, width, columns = self.shape
        chosen = []
        for place in range(width):
            seen = columns - width + 1 + place
            if seen > k:
                chosen.append(scores[:, place : place + 1, :seen].topk(k, dim=dim).indices)
            else:  # all of them, and what the mask hides anyway
                chosen.append(torch.arange(k, device=scores.device).expand(scores.shape[0], 1, k))
        indices = torch.cat(chosen, dim=1)
        return torch.return_types.topk((scores.gather(-1, indices), indices))
