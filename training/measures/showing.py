"""A report as text and as a picture."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from hf_specgen.bench import outcomes
from measures.measuring import AFTER, BEFORE

WIDTH = 150
COLOURS = {BEFORE: "0.6", AFTER: "#238b45"}


def as_text(report: Mapping[str, Any]) -> str:
    """The report's tables."""
    out, how = io.StringIO(), report["settings"]
    shown = Console(file=out, width=WIDTH)
    shown.print(_lengths(report["results"], limits_of(how)))
    shown.print(_depths(report["results"]))
    several = {row["group"] for row in report["results"] if row["prompts"] > 1}
    for row in report["gains"]:
        low, high = row["interval"]
        bounds = f"95 % within {low:+.2f} to {high:+.2f}" if row["group"] in several else "one prompt"
        shown.print(f"{row['group']}: {row['gain']:+.2f} over {row['over']}, {bounds}")
    if speed := report["speed"]:
        title = f"tokens a second against Plain(): medians of {speed['repeats']} interleaved runs"
        shown.print(outcomes.table(speed["rows"], title))
    shown.print(_computed(report["computed"]))
    return out.getvalue()


def limits_of(how: Mapping[str, Any]) -> str:
    """How a report was measured, in words, from its settings."""
    told = f"greedy, at most {how['nodes']} drafted nodes a round and {how['new_tokens']} new tokens, {how['dtype']}"
    return told + (f", linear layers {how['linear']}" if how["linear"] else "")


def _lengths(rows: Iterable[Mapping[str, Any]], limits: str) -> Table:
    shown = _table(f"mean accepted tokens: {limits}", ["prompts", "drafter"], ["number", "mean", "95 % over prompts"])
    for heading in ("quartiles of prompts", "nodes", "as plain"):
        shown.add_column(heading, justify="right")
    for row in rows:
        low, high = row["interval"]
        shown.add_row(
            row["group"],
            row["drafter"],
            str(row["prompts"]),
            f"{row['mean_accepted_tokens']:.2f}",
            f"{low:.2f} to {high:.2f}" if row["prompts"] > 1 else "",
            " ".join(f"{quartile:.2f}" for quartile in row["quartiles"]) if row["prompts"] > 1 else "",
            f"{row['nodes_a_round']:.1f}",
            f"{row['identical']} of {row['prompts']}",
        )
    return shown


def _depths(rows: Iterable[Mapping[str, Any]]) -> Table:
    shown = _table("accepted at depth 1, 2, ...", ["prompts", "drafter", "given the parent was", "of all rounds"], [])
    for row in rows:
        shares = [" ".join(f"{share:.2f}" for share in row[which][:8]) for which in ("acceptance", "overall")]
        shown.add_row(row["group"], row["drafter"], *shares)
    return shown


def _computed(rows: Iterable[Mapping[str, Any]]) -> Table:
    title = "computed, not measured: the same accepted lengths at a GPU's costs, against plain decoding"
    shown = _table(title, ["prompts", "GPU"], ["ratio", "drafting, in passes", "checking, in passes"])
    for row in rows:
        shown.add_row(row["group"], row["machine"], *(f"{row[key]:.2f}" for key in ("speedup", "draft", "verify")))
    return shown


def _table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left", header_style="bold")
    for heading in names:
        shown.add_column(heading)
    for heading in numbers:
        shown.add_column(heading, justify="right")
    return shown


def draw(report: Mapping[str, Any], out: Path) -> None:
    """Two panels of the last group, all prompts where there are several: acceptance by depth, and spread over prompts.

    Args:
        report: as `report.py` makes it.
        out: the picture; its ending says of what kind.
    """
    try:
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ImportError('the picture needs matplotlib: pip install "hf_specgen[train]"') from error
    group = report["results"][-1]["group"]
    rows = [row for row in report["results"] if row["group"] == group]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), constrained_layout=True)
    for row in rows:
        colour = COLOURS[row["drafter"]]
        for which, style in (("acceptance", "o-"), ("overall", "o:")):
            depths = range(1, 1 + len(row[which]))
            told = "given the parent was" if which == "acceptance" else "of all rounds"
            left.plot(depths, row[which], style, color=colour, label=f"{row['drafter']}, {told}")
    left.set(xlabel="depth in the draft", ylabel="accepted", ylim=(0, 1))
    left.xaxis.get_major_locator().set_params(integer=True)
    left.legend(frameon=False, fontsize="small")
    right.boxplot(
        [row["by_prompt"] for row in rows],
        tick_labels=[f"{row['drafter']}\nmean {row['mean_accepted_tokens']:.2f}" for row in rows],
        widths=0.5,
    )
    for place, row in enumerate(rows, 1):
        right.plot([place] * row["prompts"], row["by_prompt"], ".", color=COLOURS[row["drafter"]], alpha=0.5)
    right.axhline(1.0, color="0.8", zorder=0)
    right.set_ylabel("mean accepted tokens of each prompt")
    figure.suptitle(
        f"{group}: {rows[-1]['prompts']} of them, {report['settings']['nodes']} nodes a round", fontsize="medium"
    )
    figure.savefig(out, dpi=110)
    pyplot.close(figure)
