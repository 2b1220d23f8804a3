"""Timings as a table for people and as a record for programs."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_specgen.bench.measure import Timing

PLAIN = "plain"


def console() -> Console:
    """A console wide enough for the table where nobody says how wide it is."""
    plain = Console()
    return plain if plain.is_terminal else Console(width=120)


def record(prompt: str, timings: Mapping[str, Timing]) -> list[dict[str, Any]]:
    """One row a setting; ratios are of medians, against the plain run beside it."""
    plain = timings[PLAIN]
    rows = []
    for name, timing in timings.items():
        rows.append(
            {
                "prompt": prompt,
                "setting": name,
                "tokens": len(timing.tokens),
                "tokens_per_s": round(timing.tokens_per_s, 2),
                "speedup": round(timing.tokens_per_s / plain.tokens_per_s, 3),
                "call_speedup": round(statistics.median(plain.call_s) / statistics.median(timing.call_s), 3),
                "mean_accepted_tokens": round(timing.mean_accepted_tokens, 3),
                "identical": timing.tokens == plain.tokens,
            }
        )
    return rows


def table(rows: list[dict[str, Any]], title: str) -> Table:
    """The rows of `record` for a terminal."""
    shown = Table(title=title, title_justify="left", header_style="bold")
    for heading in ("prompt", "setting"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("tokens/s", "ratio to plain", "whole call", "mean accepted tokens"):
        shown.add_column(heading, justify="right")
    shown.add_column("identical")
    last = None
    for row in rows:
        if last is not None and row["prompt"] != last:
            shown.add_section()
        shown.add_row(
            "" if row["prompt"] == last else row["prompt"],
            row["setting"],
            f"{row['tokens_per_s']:.1f}",
            f"{row['speedup']:.2f}",
            f"{row['call_speedup']:.2f}",
            f"{row['mean_accepted_tokens']:.2f}",
            "yes" if row["identical"] else "[bold red]NO[/]",
        )
        last = row["prompt"]
    return shown
