"""From a drafter's logits to the scores and the noise its tokens are chosen by, as the target would choose them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_specgen.draft import Draft

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hf_specgen.draft import Context, Request
    from hf_specgen.sampling import Noise, Processors
    from hf_specgen.trees import Nodes

# Fields by which some targets multiply what their LM head says, with the power of the factor.
FACTORS = {
    "logit_scale": 1,  # Cohere
    "lm_head_multiplier": 1,  # Falcon-H1
    "output_multiplier": 1,  # Muse
    "logits_scaling": -1,  # Granite, MiniCPM3
    "logits_mup_width_multiplier": -1,  # Inkling
}
# Of these model types the fields above mean something else: MPT does not read its own, HyperCLOVA X multiplies.
OTHERWISE = {"mpt": {"logit_scale": 0}, "hyperclovax": {"logits_scaling": 1}}
# Fields with the largest logit that there can be; greater ones are bent down to it.
CAPS = (
    "final_logit_softcapping",  # Gemma 2 and later, NanoChat, Mistral Large 4, ...
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)


def target_logits(logits: Tensor, config: PreTrainedConfig) -> Tensor:
    """What a target makes of its LM head's output for a state that is its own, or meant to be.

    Order and so greedy drafts stay as they are; distributions and confidences would be too sharp or too flat without.

    Args:
        logits: `(..., vocab)` as the LM head says them.
        config: the target's text config.
    """
    for field, power in {**FACTORS, **OTHERWISE.get(config.model_type, {})}.items():
        factor: float | None = getattr(config, field, None)
        if power and factor is not None:
            logits = logits * factor**power
    for field in CAPS:
        cap: float | None = getattr(config, field, None)
        if cap is not None:
            logits = torch.tanh(logits / cap) * cap
    return logits


class Scoring:
    """How a drafter that has logits chooses in one call.

    Args:
        request: of the call.
        vocabulary: the target's size.
        device: where the drafter's logits are.
        sample: draw where the target samples, or always take the most likely token.

    Attributes:
        drawn_from: the accept rule divides by the probabilities that drafts are drawn from.
        reads_prefix: some processor looks at the drafted ids, so that these are needed on the host.
    """

    def __init__(self, request: Request, vocabulary: int, device: torch.device, sample: bool = True) -> None:
        self.processors = None if request.processors is None else request.processors.to(device)
        self.request = request
        self.vocabulary = vocabulary
        self.device = device
        self.sample = sample
        self.drawn_from = request.wants_probs and request.sampled and sample
        self.reads_prefix = self.processors is not None and not self.processors.pure

    def __call__(self, logits: Tensor, ids: Sequence[Sequence[int]], paths: Sequence[list[list[int]]]) -> Tensor:
        """`(batch, nodes, vocab)` float32 over the target's vocabulary, after the processors a drafter may run.

        Args:
            logits: `(batch, nodes, vocab)` of the drafter, whose table may be padded to another size.
            ids: for each row what was decided before the draft.
            paths: for each row and node the drafted ids up to it; only read where processors look at the prefix.
        """
        logits = logits.float()
        if logits.shape[-1] != self.vocabulary:
            missing = self.vocabulary - logits.shape[-1]  # negative: the drafter's table is the longer one
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        processors = self.processors
        if processors is not None and not processors.empty:
            logits = logits.clone()  # processors may write into it
            if processors.pure:
                logits = processors.warp(logits)
            else:
                self._in_context(processors, logits, ids, paths)
        return _drawable(logits) if self.drawn_from else logits

    def _in_context(
        self, processors: Processors, logits: Tensor, ids: Sequence[Sequence[int]], paths: Sequence[list[list[int]]]
    ) -> None:
        """Runs processors that look at the prefix, node by node, into `logits`."""
        for row, decided in enumerate(ids):
            apart, known = processors.row(row), torch.tensor([decided], device=logits.device)
            for node in range(logits.shape[1]):
                ahead = torch.tensor([paths[row][node]], dtype=torch.long, device=logits.device)
                prefix = torch.cat([known, ahead], dim=1)
                logits[row, node] = apart(prefix, logits[row, node : node + 1])[0]

    def noise(self, context: Context, step: int, nodes: int) -> Noise | None:
        """The noise of the tokens `step` places after the next one; None where drafts are the most likely tokens.

        Args:
            context: of the round.
            step: 0 for the token below the root.
            nodes: tokens a row to be chosen there.
        """
        if context.noise is None or not self.sample:
            return None
        positions = torch.tensor(context.positions, device=self.device).unsqueeze(1)
        return context.noise.to(self.device).at((positions + step).expand(-1, nodes), positions[:, 0])

    def host(self, *columns: Tensor) -> list[list[int]]:
        """Drafted ids on the host, where a processor looks at them; elsewhere nothing is read from the device."""
        if not self.reads_prefix:
            return [[]] * columns[0].shape[0]
        rows: list[list[int]] = torch.cat(columns, dim=1).tolist()
        return rows

    def paths(self, beam: Nodes, count: int) -> list[list[list[int]]]:
        """For each row and each of the last `count` nodes the drafted ids up to it; without nodes those of the root.

        Args:
            beam: a tree.
            count: nodes of its last level.
        """
        if not self.reads_prefix or not beam.tokens.shape[1]:
            return [[[]]] * beam.tokens.shape[0]
        paths: list[list[list[int]]] = []
        for tokens, parents in zip(beam.tokens.tolist(), beam.parents.tolist(), strict=True):
            along: list[list[int]] = [[]]
            for token, parent in zip(tokens, parents, strict=True):
                along.append([*along[max(parent, 0)], token])
            paths.append(along[-count:])
        return paths


class Chains:
    """Chains that a drafter makes token by token, one of every row in each step.

    Args:
        scoring: of the call.
        context: of the round.
        agree: of ranks, whose scores may differ in the last bit, makes one choice.
    """

    def __init__(self, scoring: Scoring, context: Context, agree: Callable[[Tensor], Tensor]) -> None:
        self._scoring, self._context, self._agree = scoring, context, agree
        self._tokens: list[Tensor] = []
        self._seen: list[Tensor] = []
        self._probs: list[Tensor] = []

    def draw(self, logits: Tensor) -> Tensor:
        """The next token of every row, `(batch, 1)`.

        Args:
            logits: `(batch, 1, vocab)` of the drafter behind what was drawn so far.
        """
        scoring = self._scoring
        paths: list[list[list[int]]] = []
        if scoring.reads_prefix:
            none = logits.new_empty((logits.shape[0], 0), dtype=torch.long)
            paths = [[row] for row in scoring.host(none, *self._tokens)]
        scores = scoring(logits, self._context.ids, paths)
        noise = scoring.noise(self._context, len(self._tokens), 1)
        self._tokens.append(self._agree(scores.argmax(-1) if noise is None else noise.argmax(scores)))
        if scoring.request.wants_confidence:
            self._seen.append(scores)
        if scoring.request.wants_probs and noise is not None:
            self._probs.append(scores.softmax(-1))
        return self._tokens[-1]

    def draft(self, depth: Sequence[int]) -> Draft:
        """What was drawn, with confidences and probabilities where these are read.

        Args:
            depth: for each row how many of its tokens count.
        """
        drafted = torch.cat(self._tokens, 1)
        draft = Draft.chain(drafted, depth, torch.cat(self._probs, 1) if self._probs else None)
        if not self._seen:
            return draft
        scores = torch.cat(self._seen, 1)  # at once: in every step it costs ten times as much
        sure = (scores.gather(-1, drafted.unsqueeze(-1)).squeeze(-1) - scores.logsumexp(-1)).exp()
        return replace(draft, confidence=sure)


def _drawable(scores: Tensor) -> Tensor:
    """Scores that can be drawn from: where a drafter has nothing to say that the processors allow, anything will do.

    A rule that divides by q is exact for every q that is a distribution, and for none that is NaN.
    """
    scores = scores.where(scores.isfinite(), -torch.inf)
    return scores.where(scores.isfinite().any(-1, keepdim=True), 0.0)
