"""Writing what calls have learnt."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def whole_folder(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A folder to write into; it lies at `path` once all is written, and nothing does if writing fails.

    Args:
        path: of the folder.

    Raises:
        ValueError: there is something already.
    """
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is there already and not empty: name another folder, or remove it first")
    beside = folder.with_name(f"{folder.name}.{os.getpid()}.{threading.get_ident()}")
    beside.mkdir(parents=True)
    try:
        yield beside
        beside.replace(folder)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise
