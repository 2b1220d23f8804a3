"""What came of runs of several settings on the same questions: ratios by category, as records and as a table."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from hf_specgen.bench.measure import Setting
from hf_specgen.bench.questions import COPYING
from hf_specgen.bench.table import PLAIN

# The categories that do not copy, all together.
OTHERS = "all others"


@dataclass(frozen=True)
class Compared:
    """A setting and what it is held against.

    Attributes:
        setting: arguments of `generate`, without the length.
        against: the setting whose time is its measure.
        same_as: the setting whose text must be its text.
        batches: takes several rows.
    """

    setting: Setting
    against: str = PLAIN
    same_as: str = PLAIN
    batches: bool = False

    @property
    def name(self) -> str:
        """Of the setting."""
        return self.setting.name


@dataclass(frozen=True)
class Outcome:
    """The runs of one setting on one batch of questions.

    Attributes:
        tokens: of each row.
        token_s: seconds a token after the first, of all rows together; the median run. None: there was one token only.
        call_s: seconds a token of the whole call; the median run.
        gained: tokens after the first ones, over all runs.
        row_rounds: rows that gained tokens, summed over rounds and runs.
        widths: how often a pass had so many nodes.
    """

    tokens: list[list[int]]
    token_s: float | None
    call_s: float
    gained: int
    row_rounds: int
    widths: Counter[int]

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, Any]]) -> Outcome:
        """From a journal's results."""
        tokens: list[list[int]] = runs[-1]["tokens"]
        count = sum(map(len, tokens))
        later = count - runs[-1]["first"]
        return cls(
            tokens=tokens,
            token_s=statistics.median(run["decode_s"] for run in runs) / later if later else None,
            call_s=statistics.median(run["call_s"] for run in runs) / count,
            gained=sum(sum(map(len, run["tokens"])) - run["first"] for run in runs),
            row_rounds=sum(run["row_rounds"] for run in runs),
            widths=Counter(width for run in runs for width in run["widths"]),
        )


def summary(results: Sequence[Mapping[str, Any]], compared: Sequence[Compared]) -> list[dict[str, Any]]:
    """One row for each number of rows, category and setting, and one for all categories that do not copy.

    Ratios are of medians on the same questions, as geometric means over the questions; the other figures are taken over
    all rounds. What its measure was not run for is left out.
    """
    runs: dict[tuple[int, str, str], dict[str, list[Mapping[str, Any]]]] = {}
    for result in results:
        place = result["rows"], result["category"], result["question"]
        runs.setdefault(place, {}).setdefault(result["setting"], []).append(result)
    groups: dict[tuple[int, str], list[dict[str, Outcome]]] = {}
    for (rows, category, _), by_setting in runs.items():
        outcomes = {name: Outcome.of(of_setting) for name, of_setting in by_setting.items()}
        groups.setdefault((rows, category), []).append(outcomes)
        if category not in COPYING:
            groups.setdefault((rows, OTHERS), []).append(outcomes)
    ordered = sorted(groups, key=lambda group: (group[0], group[1] == OTHERS))
    told = [_row(group, one, groups[group]) for group in ordered for one in compared]
    return [row for row in told if row is not None]


def _row(group: tuple[int, str], one: Compared, questions: Sequence[dict[str, Outcome]]) -> dict[str, Any] | None:
    asked = [outcomes for outcomes in questions if one.name in outcomes and one.against in outcomes]
    pairs = [(outcomes[one.name], outcomes[one.against]) for outcomes in asked]
    ratios = [plain.token_s / own.token_s for own, plain in pairs if plain.token_s and own.token_s]
    if not ratios:
        return None
    widths = sum((own.widths for own, _ in pairs), Counter[int]())
    drafted = sum(count for width, count in widths.items() if width)
    row_rounds = sum(own.row_rounds for own, _ in pairs)
    lengths = [len(row) for own, _ in pairs for row in own.tokens]
    texts = [(outcomes[one.name].tokens, outcomes.get(one.same_as)) for outcomes in asked]
    return {
        "rows": group[0],
        "category": group[1],
        "setting": one.name,
        "questions": len(pairs),
        "speedup": round(statistics.geometric_mean(ratios), 3),
        "speedups": [round(ratio, 3) for ratio in ratios],
        "call_speedup": round(statistics.geometric_mean(plain.call_s / own.call_s for own, plain in pairs), 3),
        "tokens_per_s": round(statistics.geometric_mean(1 / own.token_s for own, _ in pairs if own.token_s), 2),
        "mean_accepted_tokens": round(sum(own.gained for own, _ in pairs) / row_rounds, 3) if row_rounds else 1.0,
        "without_draft": round(1 - drafted / widths.total(), 3) if widths else 1.0,
        "mean_width": round(sum(w * count for w, count in widths.items()) / drafted, 1) if drafted else 0.0,
        "widths": {str(width): widths[width] for width in sorted(widths)},
        "lengths": [min(lengths), max(lengths)],
        "identical": all(reference is not None and tokens == reference.tokens for tokens, reference in texts),
    }


def table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The rows of `summary` for a terminal; `ratio` is to plain decoding, `call` the same of whole calls."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("category", "setting"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("rows", "tokens/s", "ratio", "call", "accepted", "no draft", "width", "length"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("identical", no_wrap=True)
    last = None
    for row in rows:
        group = row["rows"], row["category"]
        if last is not None and group != last:
            shown.add_section()
        shortest, longest = row["lengths"]
        shown.add_row(
            "" if group == last else row["category"],
            row["setting"],
            str(row["rows"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['call_speedup']:.2f}",
            f"{row['mean_accepted_tokens']:.2f}",
            f"{row['without_draft']:.0%}",
            f"{row['mean_width']:.1f}",
            str(longest) if shortest == longest else f"{shortest}-{longest}",
            "yes" if row["identical"] else "[bold red]NO[/]",
        )
        last = group
    return shown
