"""Medusa (arXiv 2401.10774): heads on the target's last state guess the next tokens all at once, in chains or trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_specgen.draft import Context, Draft, Limit, Needs, Request
from hf_specgen.drafters.fitting import lent, refuse_misfit
from hf_specgen.drafters.medusa_choices import Shape, choices_from, closed
from hf_specgen.drafters.scoring import Scoring
from hf_specgen.heads.medusa import MedusaHeads
from hf_specgen.heads.said import spread
from hf_specgen.prompt import input_device
from hf_specgen.trees import Growth, Tree
from hf_specgen.vocabulary import size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_specgen.sampling import Noise


@dataclass(frozen=True)
class Medusa:
    """Trained heads draft from the target's last state: one pass of small layers a round, and no cache.

    Where trees can be checked it drafts trees: those of `choices`; else the best ones by `heads.config.accuracies`,
    where these were measured; else one that grows each round by the heads' own probabilities. No tree is deeper than
    there are heads.

    Args:
        heads: trained for this target; see `load_assistant` for published ones, `MedusaHeads.fresh` for new ones. Never
            written to; in train mode they say the same, having no dropout.
        choices: the nodes of a fixed tree as paths of ranks, as in Medusa's own files: `(0, 2)` is the third best guess
            of the second head behind the best of the first. Paths that lead to others are added where they are missing.
            Where fewer nodes are asked for, the first are taken.
        top_k: children of a node in a tree that grows.
        nodes: of a tree that is built by accuracies or grows.
        sample: draw drafts when the target samples (under `matching` with the target's own noise), or always take the
            most likely tokens.
        num_assistant_tokens: how deep to draft where the caller does not say; None for as deep as pays.
    """

    heads: MedusaHeads
    choices: Sequence[Sequence[int]] | None = None
    top_k: int = 10
    nodes: int = 63
    sample: bool = True
    num_assistant_tokens: int | None = None

    def __post_init__(self) -> None:
        """Refuses what are no heads, and trees without nodes."""
        if not isinstance(self.heads, MedusaHeads):
            raise ValueError(
                f"heads is a {type(self.heads).__name__}, not hf_specgen.MedusaHeads; to load published ones pass "
                "their path or hub id as assistant="
            )
        if not all(isinstance(count, int) and count > 0 for count in (self.top_k, self.nodes)):
            raise ValueError(f"top_k and nodes must be whole numbers, 1 or more, not {self.top_k} and {self.nodes}")
        if self.choices is not None:
            object.__setattr__(self, "choices", closed(self.choices))

    def start(self, target: PreTrainedModel, request: Request) -> MedusaSession:
        """See `Drafter`.

        Raises:
            ValueError: the heads do not fit the target, or `choices` asks for guesses that they do not make.
        """
        refuse_misfit(self.heads, target)
        known = self.heads.known_ids or size(target)
        if self.choices is not None and (highest := max(map(max, self.choices))) >= known:
            raise ValueError(f"choices asks for rank {highest}, and the heads tell {known} ids apart")
        return MedusaSession(self, target, request)


class MedusaSession:
    """One call's last states: what the heads read.

    The state that belongs to the token before the root is the one by which the root was chosen; from it the first head
    guesses what follows the root. Nothing else is kept.
    """

    def __init__(self, drafter: Medusa, target: PreTrainedModel, request: Request) -> None:
        self.drafter = drafter
        self.heads = drafter.heads
        self.request = request
        self.device = input_device(drafter.heads if any(True for _ in drafter.heads.parameters()) else target)
        self.lm_head = lent(target, "LM head") if self.heads.borrows else None
        self.scoring = Scoring(request, size(target), self.device, drafter.sample)
        self.accuracies: list[list[float]] | None = self.heads.config.accuracies
        mapped = self.heads.to_target
        self._to_target = None if mapped is None else mapped.to(self.device)
        self._states: list[Tensor] = []
        self._shapes: dict[tuple[int, int], Shape] = {}

    @property
    def needs(self) -> Needs:
        """The state behind the final norm."""
        return Needs(hidden_layers=(-1,))

    def propose(self, context: Context, limit: Limit) -> Draft:
        """See `DraftSession`."""
        self._remember(context)
        depth = tuple(min(asked, self.heads.config.num_heads) for asked in limit.depth)
        deepest = max(depth)
        if deepest == 0:
            return Draft.empty(self.request.batch)
        logits = self._logits(deepest)
        if limit.chain or self.request.chain:
            return self._chain(context, depth, logits)
        if self.drafter.choices is None and self.accuracies is None:
            return self._grown(context, replace(limit, depth=depth), logits)
        return self._fixed(context, replace(limit, depth=depth), logits)

    def _remember(self, context: Context) -> None:
        """Keeps each row's last state; a row that has gained nothing since the last time has the one from then."""
        if context.hidden is None:
            return
        new = [states[-1:] for states in context.hidden]
        if self._states:
            new = [state if len(state) else old for state, old in zip(new, self._states, strict=True)]
        self._states = new

    def _logits(self, count: int) -> Tensor:
        """`(batch, count, vocab)` of the first heads, over the target's ids."""
        size = self.heads.config.hidden_size
        rows = [state if len(state) else state.new_zeros(1, size) for state in self._states]
        states = rows[0] if len(rows) == 1 else torch.cat(rows)
        said = self.heads(states, self.lm_head, count).to(self.device)
        return spread(said, self._to_target, self.scoring.vocabulary)

    def _noise(self, context: Context, start: int, stop: int) -> Noise | None:
        """The noise of one token at each depth from `start` to `stop`, 0 for children of the root."""
        noise = self.scoring.noise(context, start, stop - start)
        if noise is None or noise.positions is None:
            return noise
        return noise.at(noise.positions + torch.arange(stop - start, device=self.device), noise.root)

    def _chain(self, context: Context, depth: tuple[int, ...], logits: Tensor) -> Draft:
        """Each head's choice. Where a processor looks at the prefix, head by head behind what was chosen."""
        deepest = logits.shape[1]
        step = 1 if self.scoring.reads_prefix else deepest
        tokens = torch.empty((logits.shape[0], 0), dtype=torch.long, device=self.device)
        seen: list[Tensor] = []
        for start in range(0, deepest, step):
            paths = [[row] for row in self.scoring.host(tokens)]
            scores = self.scoring(logits[:, start : start + step], context.ids, paths)
            noise = self._noise(context, start, start + step)
            tokens = torch.cat([tokens, scores.argmax(-1) if noise is None else noise.argmax(scores)], dim=1)
            seen.append(scores)
        scores = torch.cat(seen, dim=1)
        drawn = context.noise is not None and self.drafter.sample
        draft = Draft.chain(tokens, depth, scores.softmax(-1) if drawn and self.request.wants_probs else None)
        if not self.request.wants_confidence:
            return draft
        measured = self._line(deepest).measured
        if measured is not None:
            return replace(draft, confidence=measured.expand(tokens.shape))
        sure = (scores.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) - scores.logsumexp(-1)).exp()
        return replace(draft, confidence=sure)

    def _ranked(self, scores: Tensor, noise: Noise | None) -> Tensor:
        """Log chances by which children are chosen: where the target samples, with the noise that it will choose by."""
        return (scores if noise is None else noise.perturb(scores)).float().log_softmax(-1)

    def _grown(self, context: Context, limit: Limit, logits: Tensor) -> Draft:
        """The likeliest nodes by the heads' own probabilities."""
        most, branches = min(self.drafter.nodes, limit.nodes), self.drafter.top_k
        if self.scoring.reads_prefix:
            return self._grown_apart(context, limit, logits)
        # All nodes of a level have the same children, so that it grows by ranks instead of ids; and nodes are cheap, so
        # that as many are kept a level as there may be in all.
        growth = Growth(limit.depth, branches, most, self.device)
        scores = self.scoring(logits, context.ids, [])
        best = self._best(scores, self._noise(context, 0, logits.shape[1]), branches)
        width = 1
        for level in best.values.unbind(1):
            width = growth.add(level.unsqueeze(1).expand(-1, width, -1)).shape[1]
        nodes = growth.best(most)
        depth = Tree.of(nodes.parents).depth[:, 1:].clamp(min=1)
        tokens = best.indices.flatten(1).gather(1, (depth - 1) * best.indices.shape[-1] + nodes.tokens)
        return Draft(tokens, nodes.parents, confidence=nodes.chances)

    def _grown_apart(self, context: Context, limit: Limit, logits: Tensor) -> Draft:
        """The same where a processor gives each node children of its own; only `top_k` nodes a level have any."""
        growth, width = Growth(limit.depth, self.drafter.top_k, self.drafter.top_k, self.device), 1
        for step in range(logits.shape[1]):
            paths = self.scoring.paths(growth.beam, width)
            scores = self.scoring(logits[:, step : step + 1].expand(-1, width, -1), context.ids, paths)
            width = growth.add(self._ranked(scores, self.scoring.noise(context, step, width))).shape[1]
        nodes = growth.best(min(self.drafter.nodes, limit.nodes))
        return Draft(nodes.tokens, nodes.parents, confidence=nodes.chances)

    def _best(self, scores: Tensor, noise: Noise | None, count: int) -> torch.return_types.topk:
        """The best `count` ids at each of `scores`, and their log chances."""
        return self._ranked(scores, noise).topk(min(count, scores.shape[-1]))

    def _fixed(self, context: Context, limit: Limit, logits: Tensor) -> Draft:
        """The tree of given ranks. Its nodes at one depth share their head's guesses, unless a processor parts them."""
        shape = self._shape(logits.shape[1], limit.nodes)
        if not shape.paths:
            return Draft.empty(self.request.batch, self.device)
        batch = logits.shape[0]
        if not self.scoring.reads_prefix:
            scores = self.scoring(logits, context.ids, [])
            best = self._best(scores, self._noise(context, 0, logits.shape[1]), shape.branches)
            places = ((shape.depth - 1) * best.indices.shape[-1] + shape.ranks).expand(batch, -1)
            tokens, logs = (part.flatten(1).gather(1, places) for part in (best.indices, best.values))
        else:
            tokens, logs = self._apart(context, shape, logits)
        inside = shape.depth <= torch.tensor(limit.depth, device=self.device).unsqueeze(1)
        parents = shape.parents.expand(batch, -1).where(inside, -1)
        sure = logs.exp() if shape.measured is None else shape.measured.expand(batch, -1)
        return Draft(tokens, parents, confidence=sure)

    def _apart(self, context: Context, shape: Shape, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of a fixed tree and their log chances, where each node has children of its own."""
        batch = logits.shape[0]
        places = {(): 0, **{path: place for place, path in enumerate(shape.paths, 1)}}
        tokens = torch.zeros((batch, len(shape.paths)), dtype=torch.long, device=self.device)
        logs = torch.zeros((batch, len(shape.paths)), device=self.device)
        for step in range(max(map(len, shape.paths))):
            above = list(dict.fromkeys(path[:-1] for path in shape.paths if len(path) == step + 1))
            drafted = tokens.tolist()
            paths = [[[row[places[path[: end + 1]] - 1] for end in range(step)] for path in above] for row in drafted]
            scores = self.scoring(logits[:, step : step + 1].expand(-1, len(above), -1), context.ids, paths)
            best = self._best(scores, self.scoring.noise(context, step, len(above)), shape.branches)
            level = [place for place, path in enumerate(shape.paths) if len(path) == step + 1]
            order = torch.tensor([above.index(shape.paths[place][:-1]) for place in level], device=self.device)
            columns = order * best.indices.shape[-1] + shape.ranks[level]
            tokens[:, level] = best.indices.flatten(1)[:, columns]
            logs[:, level] = best.values.flatten(1)[:, columns]
        return tokens, logs

    def _shape(self, deepest: int, most: int) -> Shape:
        """The fixed tree of at most that depth and so many nodes."""
        if (deepest, most) not in self._shapes:
            if self.drafter.choices is not None:
                paths = tuple(tuple(path) for path in self.drafter.choices if len(path) <= deepest)[:most]
            else:
                assert self.accuracies is not None
                paths = choices_from(self.accuracies[:deepest], min(most, self.drafter.nodes))
            self._shapes[deepest, most] = Shape.of(paths, self.accuracies, self.device)
        return self._shapes[deepest, most]

    def _line(self, deepest: int) -> Shape:
        """The best guess of each head."""
        if (deepest, 0) not in self._shapes:
            paths = tuple((0,) * length for length in range(1, deepest + 1))
            self._shapes[deepest, 0] = Shape.of(paths, self.accuracies, self.device)
        return self._shapes[deepest, 0]
