"""What a call returns beside the tokens: scores, logits and hidden states, one entry a new token, as in stock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput, GenerateEncoderDecoderOutput

from hf_specgen.stats import Stats

if TYPE_CHECKING:
    from transformers import Cache

    from hf_specgen.encoder import Source
    from hf_specgen.target import Pass


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """Stock's output with the statistics of the call.

    Attributes:
        speculation: what was drafted and accepted.
    """

    speculation: Stats | None = None


@dataclass
class SpeculativeEncoderDecoderOutput(GenerateEncoderDecoderOutput):
    """Stock's output for encoder-decoders with the statistics of the call.

    Attributes:
        speculation: what was drafted and accepted. An attribute, and no entry of the mapping. Whisper's `generate`
            makes its output anew and leaves it at None; `stats=` counts there as well.
    """

    speculation: Stats | None = None


class Recorder:
    """Collects what the user asked to have returned. Entries after a row's end are zero.

    Args:
        config: of the call.
        batch: rows.
        source: for an encoder-decoder, what its encoder read.
    """

    def __init__(self, config: GenerationConfig, batch: int, source: Source | None = None) -> None:
        self._source = source
        returned = bool(config.return_dict_in_generate)
        self.scores_wanted = returned and bool(config.output_scores)
        self.logits_wanted = returned and bool(config.output_logits)
        self.hidden_wanted = returned and bool(config.output_hidden_states)
        self._prompt_hidden: tuple[Tensor, ...] = ()
        self._scores: list[list[Tensor]] = [[] for _ in range(batch)]
        self._logits: list[list[Tensor]] = [[] for _ in range(batch)]
        self._hidden: list[list[tuple[Tensor, ...]]] = [[] for _ in range(batch)]

    def record(self, row: int, node: int, passed: Pass, scores: Tensor) -> None:
        """Takes what belongs to the token chosen at `node` of `row`.

        Args:
            row: of the batch.
            node: place in the pass, 0 for the root.
            passed: the pass.
            scores: `(vocab,)` after the processors.
        """
        # Copies, because a view would keep the whole pass alive.
        if self.scores_wanted:
            self._scores[row].append(scores.clone())
        if self.logits_wanted:
            self._logits[row].append(passed.logits[row, node].to(torch.float32, copy=True))
        if self.hidden_wanted and passed.hidden_states is not None:
            if passed.is_prompt:
                self._prompt_hidden = passed.hidden_states
            else:
                self._hidden[row].append(tuple(layer[row, node].clone() for layer in passed.hidden_states))

    def output(
        self, sequences: Tensor, cache: Cache, stats: Stats
    ) -> SpeculativeOutput | SpeculativeEncoderDecoderOutput:
        """The call's result as `return_dict_in_generate=True` gives it."""
        hidden: Any = None
        if self.hidden_wanted:
            layers = range(len(self._prompt_hidden))
            columns = [_columns([[step[layer] for step in row] for row in self._hidden]) for layer in layers]
            later = [tuple(layer.unsqueeze(1) for layer in step) for step in zip(*columns, strict=True)]
            hidden = (self._prompt_hidden, *later)
        scores: Any = _columns(self._scores) if self.scores_wanted else None
        logits: Any = _columns(self._logits) if self.logits_wanted else None
        common: dict[str, Any] = {"sequences": sequences, "scores": scores, "logits": logits, "cache": cache}
        if self._source is None:
            return SpeculativeOutput(**common, hidden_states=hidden, speculation=stats)
        encoder = self._source.outputs.get("hidden_states") if self.hidden_wanted else None
        output = SpeculativeEncoderDecoderOutput(**common, encoder_hidden_states=encoder, decoder_hidden_states=hidden)
        # Beside the mapping, whose entries Whisper's `generate` splits by rows.
        object.__setattr__(output, "speculation", stats)
        return output


def _columns(rows: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """From entries by row to one `(batch, ...)` tensor a step."""
    longest = max(map(len, rows))
    if longest == 0:
        return ()
    blank = torch.zeros_like(next(row[0] for row in rows if row))
    return tuple(torch.stack([row[step] if step < len(row) else blank for row in rows]) for step in range(longest))
