"""Writing what calls have learnt."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """Writes a file complete or not at all: whoever reads meanwhile finds the old one or the new one.

    Args:
        path: of the file.
        text: what it is to hold.
    """
    beside = Path(f"{os.fspath(path)}.{os.getpid()}.{threading.get_ident()}")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)
