"""What scripts are called with: their help, and how they say that something cannot be, before any work is begun."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and a script's description as it is written."""


@contextmanager
def told_plainly() -> Iterator[None]:
    """Ends the script with the message of what it is given and cannot take: a traceback would tell of our code only.

    Raises:
        SystemExit: in place of ValueError and OSError.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        raise SystemExit(f"{Path(sys.argv[0]).name}: {error}") from error


def refuse_below(arguments: Any, least: float, *names: str) -> None:
    """Looks at numbers of a command line.

    Args:
        arguments: a dataclass; what is None was not given.
        least: that each may be.
        names: of those that are looked at.

    Raises:
        ValueError: one is less.
    """
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be {least} or more, not {value}")


def at_least(least: int) -> Callable[[str], int]:
    """A type for `argparse`: whole numbers from `least` on."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be {least} or more, not {value}")
        return value

    return number
