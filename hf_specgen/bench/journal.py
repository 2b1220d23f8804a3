"""A file of results, one a line, so that a measurement that was interrupted goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Journal:
    """Results by key. Each is on disk as soon as it is there; one that was half written is measured again.

    Args:
        path: of the file; it and its folder are made with the first result.

    Attributes:
        results: what is there, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        self._mend = False
        if path.exists():
            text = path.read_text(encoding="utf-8")
            self._mend = bool(text) and not text.endswith("\n")
            read = filter(None, map(_read, text.splitlines()))
            self.results = {result["key"]: result for result in read}

    def __contains__(self, key: str) -> bool:
        """Whether it was measured."""
        return key in self.results

    def add(self, key: str, result: Mapping[str, Any]) -> None:
        """Appends a result."""
        kept = {"key": key, **result}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(("\n" if self._mend else "") + json.dumps(kept) + "\n")
        self._mend = False
        self.results[key] = kept


def _read(line: str) -> dict[str, Any] | None:
    """A result; None for the rest of a line at which a run was killed."""
    try:
        result: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return result
