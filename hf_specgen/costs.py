"""What a pass and a draft cost on this machine, by width, learnt while decoding.

Seconds are noisy, most widths are seen rarely, and all of them drift together when the machine gets busy. So the logs
of the seconds at a ladder of widths are one Gaussian that a Kalman filter follows: what is seen at one width moves its
neighbours, and, less, all others; what was not seen for long is believed less.
"""

from __future__ import annotations

import json
import math
import threading
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from weakref import WeakKeyDictionary

from torch.nn import Module

from hf_specgen.files import write_whole
from hf_specgen.record import Record

# Widths with an estimate of their own; between them it is interpolated.
LADDER = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
# Standard deviations of log seconds. Before anything is seen: of all widths together, and of each against the others,
# alike over about `REACH` rungs. What a round adds to both; and of one measured pass.
UNKNOWN, SHAPE, REACH = 5.0, 0.35, 4.0
DRIFT, SHAPE_DRIFT, NOISE = 0.03, 0.015, 0.12
# A pass that surprises by more standard deviations may be an accident of the machine, and counts as so many; or the
# machine is another one now, so that all that is known gets as doubtful as this.
MOST_SURPRISE, SURPRISED = 2.5, 0.2
# The first pass of a width pays for memory and kernels.
FIRST = 4.0

# Seconds of a pass against one of a single token, before anything is seen: on a CPU one token is a matrix-vector
# product and two are not, unless the weights are packed.
_TOKENS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
_CPU = (1.0, 1.7, 1.75, 1.9, 2.1, 2.4, 2.9, 3.4, 5.2, 9.5)
_PACKED = (1.0, 1.05, 1.2, 1.4, 1.6, 1.85, 2.3, 2.8, 4.5, 8.0)
_ACCELERATOR = (1.0, 1.01, 1.02, 1.04, 1.06, 1.08, 1.12, 1.16, 1.3, 1.6)

Matrix = list[list[float]]


def rungs(most: int) -> list[int]:
    """The widths of the ladder up to `most`, and that: enough to choose from, since costs are smooth between them."""
    return [*(width for width in LADDER if 0 < width < most), most]


def _alike(one: int, other: int) -> float:
    """How far two rungs move together. Plain decoding has kernels of its own, and so a cost of its own."""
    if one == other:
        return 1.0
    return 0.0 if 0 in (one, other) else math.exp(-abs(one - other) / REACH)


def _covariance(common: float, apart: float) -> Matrix:
    places = range(len(LADDER))
    return [[common**2 + apart**2 * _alike(one, other) for other in places] for one in places]


_PRIOR, _DRIFT = _covariance(UNKNOWN, SHAPE), _covariance(DRIFT, SHAPE_DRIFT)
_DOUBT = _covariance(SURPRISED, SURPRISED)


def _between(points: tuple[int, ...], value: float) -> tuple[int, float]:
    """The point before `value`, and which part of the way to the next it has gone; held at both ends."""
    place = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    part = (value - points[place]) / (points[place + 1] - points[place])
    return place, min(max(part, 0.0), 1.0)


class Curve:
    """Seconds by width.

    Args:
        log_seconds: of each rung of `LADDER`, before anything is seen.
    """

    def __init__(self, log_seconds: list[float]) -> None:
        self.mean = log_seconds
        self.covariance = [row.copy() for row in _PRIOR]
        self.seen = [0] * len(LADDER)

    def __call__(self, width: int) -> float:
        """Seconds at `width`."""
        place, part = _between(LADDER, width)
        return math.exp(self.mean[place] * (1 - part) + self.mean[place + 1] * part)

    def doubt(self, width: int) -> float:
        """Standard deviation of the log of the seconds."""
        place, part = _between(LADDER, width)
        rung = place + round(part)
        return math.sqrt(max(0.0, self.covariance[rung][rung]))

    def update(self, width: int, seconds: float) -> None:
        """Takes note of a measured pass."""
        place, part = _between(LADDER, width)
        known, places = self.covariance, range(len(LADDER))
        self._add(_DRIFT)
        moved = [row[place] * (1 - part) + row[place + 1] * part for row in known]
        first = not self.seen[place + round(part)]
        variance = moved[place] * (1 - part) + moved[place + 1] * part + NOISE**2 * (FIRST if first else 1.0)
        surprise = math.log(max(seconds, 1e-9)) - math.log(self(width))
        most = MOST_SURPRISE * math.sqrt(variance)
        accident = abs(surprise) > most
        surprise = min(max(surprise, -most), most)
        for rung in places:
            gain = moved[rung] / variance
            self.mean[rung] += gain * surprise
            for other in places:
                known[rung][other] -= gain * moved[other]
        self.seen[place + round(part)] += 1
        if accident:
            self._add(_DOUBT)

    def _add(self, doubt: Matrix) -> None:
        for row, more in zip(self.covariance, doubt, strict=True):
            for rung in range(len(LADDER)):
                row[rung] += more[rung]


@dataclass(frozen=True)
class Platform:
    """What passes run on, as far as it changes what they cost from call to call.

    Attributes:
        threads: of the CPU; 0 for an accelerator.
        linear: how linear layers multiply, see `hf_specgen.linear`.
    """

    threads: int = 1
    linear: str | None = None

    def __str__(self) -> str:
        """As saved costs name it."""
        kind = f", {self.linear} linear layers" if self.linear else ""
        return (f"{self.threads} threads" if self.threads else "accelerator") + kind


def _of_a_pass(batch: int, platform: Platform) -> list[float]:
    """Log seconds of a pass, up to a constant."""
    shape = _ACCELERATOR if not platform.threads else _PACKED if platform.linear == "packed" else _CPU

    def cost(tokens: int) -> float:
        if tokens > _TOKENS[-1]:  # from here on every token costs the same
            return shape[-1] * tokens / _TOKENS[-1]
        place, part = _between(_TOKENS, tokens)
        return shape[place] * (1 - part) + shape[place + 1] * part

    return [math.log(0.05 * cost(batch * (width + 1)) / cost(batch)) for width in LADDER]


def _of_a_draft() -> list[float]:
    """Log seconds of a draft: hardly anything, whatever its depth, until it is seen."""
    return [math.log(2e-4)] * len(LADDER)


class Costs:
    """Measured seconds of passes and drafts, by batch size. Learns from every call that uses it, unless it is frozen.

    A model's costs are kept as long as it lives, so that only its first call has to learn them; and beside them what is
    known of its drafters. Pass an object of your own as `Auto(costs=...)` to keep it elsewhere. With frozen costs every
    choice is a function of the text alone, and of what was known of the drafters when they froze.

    Args:
        frozen: never changes.
    """

    def __init__(self, frozen: bool = False) -> None:
        self.frozen = frozen
        self._curves: dict[str, Curve] = {}
        self._records: dict[str, Record] = {}
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, object]) -> Costs:
        """Itself: transformers copies what a call is given (Whisper's does), and this is to learn from the call."""
        return self

    def passes(self, batch: int, platform: Platform) -> Curve:
        """Seconds of a round without its draft, by width.

        Args:
            batch: rows.
            platform: what the target runs on.

        Raises:
            ValueError: frozen costs that do not hold them.
        """
        key = f"pass, batch {batch}, {platform}"
        if self.frozen and key not in self._curves:
            known = "; ".join(sorted(self._curves)) or "nothing"
            raise ValueError(
                f"frozen costs hold {known}, and not {key!r}: measure that too, or load them with frozen=False"
            )
        return self._curve(key, lambda: _of_a_pass(batch, platform))

    def drafts(self, drafter: str, batch: int, platform: Platform) -> Curve:
        """Seconds of a draft, by depth asked for; next to none where frozen costs do not know it.

        Args:
            drafter: its name.
            batch: rows.
            platform: what the target runs on.
        """
        return self._curve(f"draft, {drafter}, batch {batch}, {platform}", _of_a_draft)

    def record(self, drafter: str) -> Record:
        """What a call goes on from: what calls before saw of a drafter. What this one sees is kept, unless frozen.

        Of calls that run at the same time, what the one sees that began last is kept.

        Args:
            drafter: its name.
        """
        with self._lock:
            record = self._records[drafter].again() if drafter in self._records else Record()
            if not self.frozen:
                self._records[drafter] = record
            return record

    def _curve(self, key: str, prior: Callable[[], list[float]]) -> Curve:
        with self._lock:
            if key not in self._curves:
                if self.frozen:
                    return Curve(prior())
                self._curves[key] = Curve(prior())
            return self._curves[key]

    def learn(self, curve: Curve, width: int, seconds: float) -> None:
        """Takes note of a measurement, unless frozen.

        Args:
            curve: one of this object's.
            width: of the pass, or depth of the draft.
            seconds: measured.
        """
        if not self.frozen:
            with self._lock:
                curve.update(width, seconds)

    def save(self, path: str | PathLike[str]) -> None:
        """Writes JSON: seconds by width for each thing measured; not what is known of drafters."""
        with self._lock:
            told = {key: [math.exp(value) for value in curve.mean] for key, curve in self._curves.items()}
        write_whole(path, json.dumps({"widths": LADDER, "seconds": told}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | PathLike[str], frozen: bool = True) -> Costs:
        """Reads what `save` wrote.

        Args:
            path: of the file.
            frozen: see `Costs`.

        Raises:
            ValueError: the file was not written by `save`.
        """
        costs = cls(frozen)
        try:
            told = json.loads(Path(path).read_text(encoding="utf-8"))
            if told["widths"] != list(LADDER):
                raise ValueError(f"its widths are {told['widths']}, not {list(LADDER)}")
            for key, seconds in told["seconds"].items():
                if len(seconds) != len(LADDER) or not all(0 < value < math.inf for value in seconds):
                    raise ValueError(f"{key!r} has {seconds}, not {len(LADDER)} times in seconds")
                costs._curves[key] = curve = Curve([math.log(value) for value in seconds])
                curve.covariance = _covariance(SHAPE, SHAPE / 2)
                curve.seen = [1] * len(LADDER)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} was not written by Costs.save: {error!r}") from error
        return costs


_kept: WeakKeyDictionary[Module, Costs] = WeakKeyDictionary()


def costs_of(model: Module) -> Costs:
    """The costs of a live model, kept beside it and never on it."""
    return _kept.setdefault(model, Costs())
