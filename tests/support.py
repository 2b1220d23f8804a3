"""The page `docs/support.md`: what each family of transformers does with `assistant=`, as text and back."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import transformers

import hf_specgen as sg

PAGE = Path(__file__).parents[1] / "docs" / "support.md"
COLUMNS = ("chain", "tree", "ragged batch", "sampling", "past the window", "static cache", "continued")
EXACT, CHAIN, REFUSED, STOCK, WRONG, NONE = "exact", "as a chain", "refused", "stock raises", "wrong", "–"

INTRODUCTION = """\
# Families

What `model.generate(..., assistant=...)` does for each model family of transformers. The tests write this page and hold
the package to it (`tests/test_families.py`; `make support` writes it anew), on a tiny random model of each family with
every kind of its layers, with hf_specgen {ours} and transformers {theirs}, on the CPU. Drafts are scripted, so that in
every run between 20 and 90 % of the drafted tokens (of a tree: of its levels) are accepted and most rounds reject some.

- **exact**: the tokens are stock's (for sampling: those of `Plain()` with the same seed), and the logits agree to
  rounding.
- **as a chain**: exact too, but a drafter is asked for chains only.
- **refused**: a `ValueError` before the first pass. The number leads to what it says.
- **stock raises**: transformers itself cannot do it.
- **–**: the family has no window.

Columns: a **chain** or a **tree** of drafts for one row; a **ragged batch** of three rows of unequal length, padded on
the left, that accept different numbers of tokens; **sampling**; a prompt shorter than the **window** (or chunk) and a
text that goes past it (the other columns lie past it from the start); `cache_implementation="static"`; a conversation
**continued** from the cache that the first call returned.

{exact} of {built} families are exact in chains, trees and ragged batches, {chains} more with chains only.
"""
REASONS = """\
## What is refused, and why

"""
THREADS = """\
## One thread

The forward of these families leaves something of a call on the model itself, with or without this package. Do not run
two calls at once on one model. By their source that is also true of those that keep `rope_deltas` there: {keepers}.

"""
OWN = """\
## Passes of their own that differ

For these families a pass of transformers over several cached tokens gives other logits than the same tokens one by one
(the largest difference, in standard deviations of the logits), so that no draft could be checked. On any model
`sg.check(model, probe=True)` measures it.

"""
LEFT_OUT = """\
## Not built

No tiny model is made of these, so nothing is known.

"""


@dataclass
class Row:
    """What is known of a family.

    Attributes:
        family: its name in `families.FAMILIES`.
        kind: the model class.
        cells: what each column came to.
        reasons: what was said where a cell is refused, wrong or raises.
        state: what a forward leaves on the model.
        own: how far its own passes differ, in words; empty where they agree.
        left_out: why no model was built.
    """

    family: str
    kind: str = ""
    cells: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    state: str = ""
    own: str = ""
    left_out: str = ""

    def comparable(self) -> dict[str, object]:
        """What must not change from run to run; how far passes differ may, in its last digit."""
        return {**vars(self), "own": bool(self.own)}

    def exact(self, *columns: str, trees: bool = True) -> bool:
        return all(self.cells.get(column) in ((EXACT,) if trees else (EXACT, CHAIN)) for column in columns)


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


@functools.cache
def keepers_of_rope_deltas() -> list[str]:
    """The model types whose forward writes an attribute of that name, as their source has it."""
    models = Path(transformers.__file__).parent / "models"
    written = re.compile(r"^ +self\.rope_deltas = rope_deltas", re.MULTILINE)
    files = models.glob("*/modeling_*.py")
    return sorted({file.parent.name for file in files if written.search(file.read_text(encoding="utf-8"))})


def text(rows: Mapping[str, Row]) -> str:
    """The page."""
    known = [rows[name] for name in sorted(rows)]
    built = [row for row in known if not row.left_out]
    numbers: dict[str, int] = {}
    lines = []
    for row in built:
        cells = []
        for column in COLUMNS:
            reason = row.reasons.get(column)
            number = f" ({numbers.setdefault(reason, len(numbers) + 1)})" if reason else ""
            cells.append(row.cells[column] + number)
        lines.append([row.family, f"`{row.kind}`", *cells])
    three = ("chain", "tree", "ragged batch")
    trees = sum(row.exact(*three) for row in built)
    counts = {
        "exact": trees,
        "built": len(built),
        "chains": sum(row.exact(*three, trees=False) for row in built) - trees,
    }
    parts = [
        INTRODUCTION.format(ours=sg.__version__, theirs=transformers.__version__, **counts),
        table(["family", "class", *COLUMNS], lines),
        REASONS + table(["", "reason"], [[str(number), reason] for reason, number in numbers.items()]),
        THREADS.format(keepers=", ".join(keepers_of_rope_deltas()))
        + table(["family", "what is left"], [[row.family, row.state] for row in built if row.state]),
        OWN + table(["family", "difference"], [[row.family, row.own] for row in built if row.own]),
        LEFT_OUT + table(["family", "reason"], [[row.family, row.left_out] for row in known if row.left_out]),
    ]
    return "\n".join(parts)


def read(page: str) -> dict[str, Row]:
    """The rows of a page."""
    tables = [
        [[cell.replace("\\|", "|") for cell in re.split(r"(?<!\\) \| ", line[2:-2])] for line in block.splitlines()[2:]]
        for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE)
    ]
    if not tables:
        return {}
    main, reasons, states, owns, left_out = tables
    said = dict(reasons)
    rows = {}
    for family, kind, *cells in main:
        row = rows[family] = Row(family, kind.strip("`"))
        for column, cell in zip(COLUMNS, cells, strict=True):
            value, _, number = cell.partition(" (")
            row.cells[column] = value
            if number:
                row.reasons[column] = said[number.rstrip(")")]
    for family, state in states:
        rows[family].state = state
    for family, own in owns:
        rows[family].own = own
    rows.update({family: Row(family, left_out=reason) for family, reason in left_out})
    return rows


def version(page: str) -> str:
    """Of the transformers that the page was written with."""
    found = re.search(r"transformers (\S+), on", page)
    assert found
    return found[1]
