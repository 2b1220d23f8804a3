"""What is kept of a draft: a verifier chooses one token a node, the walk follows the choices, the cut ends a row.

The walk is common to all verifiers: from the root, while a drafted child carries the token chosen where one stands,
step to it; the first choice that no child carries is the round's last token. A verifier therefore says what comes next
at each node, and nothing else.

One of your own is a callable with five attributes; this one ignores the noise and so always decodes greedily:

    @dataclass(frozen=True)
    class Greedy:
        name = "greedy"
        coupled = wants_probs = chain_only = all_nodes = False

        def __call__(self, scores, draft, noise):
            return scores.argmax(-1)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_specgen.draft import Draft
from hf_specgen.sampling import Noise


@runtime_checkable
class Verifier(Protocol):
    """An accept rule: a small immutable callable, in the manner of a logits processor. Plain attributes will do."""

    @property
    def name(self) -> str:
        """What the user calls it."""
        ...

    @property
    def coupled(self) -> bool:
        """Drafts may be sampled with the target's own noise: right only for a rule that reads no draft probability."""
        ...

    @property
    def wants_probs(self) -> bool:
        """Reads `Draft.probs`."""
        ...

    @property
    def chain_only(self) -> bool:
        """Takes drafts without branches."""
        ...

    @property
    def all_nodes(self) -> bool:
        """Has to see the whole draft at once, and so cannot be asked while one walks."""
        ...

    def __call__(self, scores: Tensor, draft: Draft, noise: Noise | None) -> Tensor:
        """Chooses the token that follows each node.

        Args:
            scores: `(batch, m, vocab)` float32 processed scores of the target at the root and the first m - 1 nodes.
            draft: node i is the child to be judged at place i of a chain. Has m - 1 nodes, or m where the child of the
                last place is known too: the lazy walk shows one place and its child at a time, `m = 1`.
            noise: bound to the positions of the m tokens to be chosen; None when decoding is greedy.

        Returns:
            `(batch, m)` int64. What stands at places that no walk reaches means nothing.
        """
        ...


@dataclass(frozen=True)
class Matching:
    """The target chooses its own token at every node: what comes out does not depend on the draft at all.

    Takes any tree. Sampled text for a seed is the text that plain decoding gives, and a drafter that samples with the
    same noise agrees almost as often as under rejection sampling.
    """

    name: ClassVar[str] = "matching"
    coupled: ClassVar[bool] = True
    wants_probs: ClassVar[bool] = False
    chain_only: ClassVar[bool] = False
    all_nodes: ClassVar[bool] = False

    def __call__(self, scores: Tensor, draft: Draft, noise: Noise | None) -> Tensor:
        """See `Verifier`."""
        return scores.argmax(-1) if noise is None else noise.argmax(scores)


@dataclass(frozen=True)
class Rejection:
    """Speculative sampling (arXiv 2211.17192, 2302.01318): the target's distribution from chains drawn from a known q.

    A drafted x is accepted with probability min(1, p(x) / q(x)); after a rejection the token is drawn from
    max(0, p - q), normalised. Exact if `Draft.probs` is what the tokens were drawn from, with noise of a stream of
    their own, and if a drafted token is never taken back for what it is: a draft may end because of its last token,
    but with it. A draft without `probs` is judged by q(x) = 1, which is right for any guess made without noise.
    """

    name: ClassVar[str] = "rejection"
    coupled: ClassVar[bool] = False
    wants_probs: ClassVar[bool] = True
    chain_only: ClassVar[bool] = True
    all_nodes: ClassVar[bool] = False

    def __call__(self, scores: Tensor, draft: Draft, noise: Noise | None) -> Tensor:
        """See `Verifier`."""
        if noise is None or not draft.nodes:
            return Matching()(scores, draft, noise)
        chain = _Chain.of(scores, draft)
        passed = chain.child & (noise.stream("accept").uniform() * chain.q < chain.p)
        kept = passed.long().cumprod(-1).sum(-1)
        return chain.settled(kept, torch.ones_like(chain.p[:, 0]), noise)


@dataclass(frozen=True)
class BlockRejection:
    """Block verification (arXiv 2403.10444): `Rejection`'s distribution, and never fewer tokens on average.

    With w_0 = 1 and w_i = min(1, w_{i-1} p(x_i) / q(x_i)), the first i drafted tokens are to be kept with probability
    w_i. Let S_i = sum_x max(0, w_i p(x) - q(x)), p and q being what follows x_i. Over its possible values, x_{i+1} is
    kept with probability sum_x min(w_i p(x), q(x)) = w_i - S_i; the first i alone must then be kept with S_i in all.
    So each i is tested with S_i / (S_i + 1 - w_i), the whole draft with its w, and the longest that passes is kept.
    What follows it is drawn from max(0, w_i p - q), normalised: with min(w_i p, q) from longer ones that makes w_i p.
    Exact under the conditions of `Rejection`.
    """

    name: ClassVar[str] = "block"
    coupled: ClassVar[bool] = False
    wants_probs: ClassVar[bool] = True
    chain_only: ClassVar[bool] = True
    all_nodes: ClassVar[bool] = True

    def __call__(self, scores: Tensor, draft: Draft, noise: Noise | None) -> Tensor:
        """See `Verifier`."""
        if noise is None or not draft.nodes:
            return Matching()(scores, draft, noise)
        chain = _Chain.of(scores, draft)
        weight = chain.weights()
        missing = weight.unsqueeze(-1).to(chain.target.dtype) * chain.target - chain.drafted
        total = missing.clamp_(min=0).sum(-1, dtype=torch.float64)
        # 0 / 0 where p and q agree: should rounding fail what follows, this much is right.
        chance = torch.where(total + 1 - weight > 0, total / (total + 1 - weight), 1.0)
        # Behind a row's last token the weight is 0.
        passed = noise.stream("accept").uniform() < torch.where(chain.child, chance, weight)
        kept = (passed * torch.arange(passed.shape[1], device=passed.device)).amax(-1)
        return chain.settled(kept, weight.gather(1, kept.unsqueeze(1)).squeeze(1), noise)


@dataclass(frozen=True)
class _Chain:
    """A chain beside the target's view of it: at each of m places the child, if any, and both distributions.

    Attributes:
        scores: `(batch, m, vocab)`, the target's.
        child: `(batch, m)` bool, a token was drafted to follow here.
        tokens: `(batch, m)` int64, that token; 0 without one.
        target: `(batch, m, vocab)`, the target's distribution of it.
        drafted: `(batch, m, vocab)`, the drafter's; means nothing without a token.
        p: `(batch, m)` float64, the target's probability of the token; 0 without one.
        q: `(batch, m)` float64, the drafter's.
    """

    scores: Tensor
    child: Tensor
    tokens: Tensor
    target: Tensor
    drafted: Tensor
    p: Tensor
    q: Tensor

    @classmethod
    def of(cls, scores: Tensor, draft: Draft) -> _Chain:
        _, places, vocab = scores.shape
        more = places - draft.nodes
        child = pad(draft.parents, (0, more), value=-1) >= 0
        tokens = pad(draft.tokens, (0, more)).masked_fill(~child, 0)
        target = scores.float().softmax(-1)
        # The target cannot choose an id beyond its vocabulary; a drafter's may be padded further.
        inside = child & (tokens < vocab)
        index = tokens.clamp(max=vocab - 1).unsqueeze(-1)
        if draft.probs is None:
            drafted = torch.zeros_like(target).scatter_(-1, index, inside.unsqueeze(-1).to(target.dtype))
            q = child.double()
        else:
            own = draft.probs.gather(-1, tokens[:, : draft.nodes].unsqueeze(-1)).squeeze(-1)
            q = pad(own, (0, more)).double()
            drafted = pad(draft.probs, (0, vocab - draft.probs.shape[-1], 0, more))
        p = target.gather(-1, index).squeeze(-1).double().masked_fill(~inside, 0.0)
        # At most 1 even if q was rounded up: a token of which the target is certain must never be turned down.
        return cls(scores, child, tokens, target, drafted, p, q.clamp(max=1))

    def weights(self) -> Tensor:
        """`(batch, m)` float64, block verification's w: the chance that the tokens before a place are all kept."""
        ratio = self.p / self.q.clamp(min=torch.finfo(torch.float64).tiny)
        weights = [torch.ones_like(self.p[:, 0])]
        for place in range(self.p.shape[1] - 1):
            weights.append((weights[-1] * ratio[:, place]).clamp(max=1))
        return torch.stack(weights, dim=1)

    def settled(self, kept: Tensor, weight: Tensor, noise: Noise) -> Tensor:
        """`(batch, m)` choices: the first `kept` drafted tokens, then one from max(0, weight p - q), normalised.

        After the last token of a draft the target chooses instead, as everywhere. One token a row is drawn.

        Args:
            kept: `(batch,)` int64; m if the child of the last place is kept too.
            weight: `(batch,)`.
            noise: the target's, bound to the m places.
        """
        stop = kept.clamp(max=self.child.shape[1] - 1)
        row = torch.arange(len(stop), device=stop.device)
        target, child = self.target[row, stop], self.child[row, stop]
        residual = weight.unsqueeze(1).to(target.dtype) * target - self.drafted[row, stop]
        # The token that was turned down has no residual, but for rounding: taken out, it cannot lead the walk on.
        ids = torch.arange(target.shape[-1], device=target.device)
        others = ids != self.tokens[row, stop].unsqueeze(1)
        residual = residual.clamp(min=0) * others
        # Nothing is left only where p and q agree, up to rounding.
        residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, target * others)
        scores = torch.where(child.unsqueeze(1), residual.log(), self.scores[row, stop])
        here = noise.node(stop)
        drawn = here.stream("residual").where(child, here).argmax(scores.unsqueeze(1))
        place = torch.arange(self.child.shape[1], device=stop.device)
        return torch.where(place < kept.unsqueeze(1), self.tokens, drawn)


def walked(tokens: Sequence[int], parents: Sequence[int], chosen: Sequence[int]) -> list[int]:
    """The nodes on a row's path: from the root on, each carries what the one before it chose.

    Of siblings with the same token only the first counts. On the host, where a round's one read from the device goes
    anyway: a walk of kernels costs more than the whole of this.

    Args:
        tokens: of the row's `nodes` places.
        parents: see `Draft.parents`.
        chosen: of a verifier, at `[root, *nodes]`.

    Returns:
        Places of the path as `parents` counts them, so from 1 on. Their number is how many drafted tokens are kept,
        before the cut.
    """
    here, path = 0, []
    # Parents come before children, so that one look at each node is enough.
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True), 1):
        if parent == here and token == chosen[here]:
            here = node
            path.append(node)
    return path


def cut(tokens: list[int], eos: frozenset[int], room: int) -> int:
    """How many of a row's newly decided tokens are kept: through the first EOS, and no more than there is room for.

    Args:
        tokens: what the round decided, in order.
        eos: ids that end a row.
        room: tokens that still fit.
    """
    for count, token in enumerate(tokens[:room], start=1):
        if token in eos:
            return count
    return min(len(tokens), room)


_BY_NAME: dict[str, Verifier] = {rule.name: rule for rule in (Matching(), Rejection(), BlockRejection())}


def by_name(acceptance: str | Verifier) -> Verifier:
    """The verifier that `acceptance=` means.

    Args:
        acceptance: "matching", "rejection", "block" or a verifier.

    Raises:
        ValueError: for anything else.
    """
    if isinstance(acceptance, str) and acceptance in _BY_NAME:
        return _BY_NAME[acceptance]
    # A class has its instances' attributes, and is callable too.
    if isinstance(acceptance, Verifier) and not isinstance(acceptance, type):
        return acceptance
    raise ValueError(f"acceptance={acceptance!r} is none of {', '.join(map(repr, _BY_NAME))}, nor a verifier object.")
