"""What a call did: one `Step` a round, and `Stats`, their sum. Counts are stored, ratios derived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Step:
    """One round.

    Attributes:
        tokens: for each row the ids it gained; empty for rows that had finished.
        drafted: for each row how many tokens were drafted.
        accepted: for each row how many of `tokens` were drafted ones.
        width: nodes beside the root in the verify pass; 0 for the prompt's pass.
        draft_s: seconds spent proposing.
        verify_s: seconds spent in the target's pass.
        seconds: the whole round, on the host. On CUDA the other two are times on the device; on other accelerators
            they are the host's, which runs ahead.
        part_s: of `draft_s`, by the names of a combination's parts; empty where nobody asks.
    """

    tokens: list[list[int]]
    drafted: list[int]
    accepted: list[int]
    width: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    seconds: float = 0.0
    part_s: Mapping[str, float] = field(default_factory=dict)


@dataclass
class Stats:
    """The sum of a call's steps. Pass one as `stats=`; it may be passed to several calls and then sums them all.

    Attributes:
        calls: calls summed here.
        rounds: verify passes, whatever the number of rows.
        row_rounds: rows that gained tokens, summed over rounds: the denominator of `mean_accepted_tokens`.
        tokens: ids gained, those of the prompts' passes included.
        first_tokens: ids that the prompts' passes decided.
        drafted: tokens drafted.
        accepted: drafted tokens that were kept.
        accepted_histogram: row-rounds by the number of drafted tokens they kept.
        prefill_s, draft_s, verify_s, seconds: where the time went; `seconds` is all of it.
    """

    calls: int = 0
    rounds: int = 0
    row_rounds: int = 0
    tokens: int = 0
    first_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    seconds: float = 0.0

    def add_prefill(self, step: Step) -> None:
        """Adds the prompt's pass, which opens a call and decides one token a row without a draft."""
        self.calls += 1
        first = sum(map(len, step.tokens))
        self.tokens += first
        self.first_tokens += first
        self.prefill_s += step.verify_s
        self.seconds += step.seconds

    def add(self, step: Step) -> None:
        """Adds one round."""
        self.rounds += 1
        self.drafted += sum(step.drafted)
        self.accepted += sum(step.accepted)
        for tokens, accepted in zip(step.tokens, step.accepted, strict=True):
            if tokens:
                self.row_rounds += 1
                self.tokens += len(tokens)
                self.accepted_histogram[accepted] += 1
        self.draft_s += step.draft_s
        self.verify_s += step.verify_s
        self.seconds += step.seconds

    @property
    def mean_accepted_tokens(self) -> float:
        """Tokens a row gains in a round, the target's own included: 1.00 for plain decoding (Spec-Bench's count)."""
        return (self.tokens - self.first_tokens) / self.row_rounds if self.row_rounds else 1.0

    @property
    def acceptance_rate(self) -> float:
        """Drafted tokens that were kept, 0..1."""
        return self.accepted / self.drafted if self.drafted else 0.0
