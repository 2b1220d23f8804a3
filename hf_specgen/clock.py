"""What time a round takes, also where the device works behind the host."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Moment:
    """A point in time.

    Attributes:
        host: seconds.
        event: the same point in a CUDA device's queue of work.
    """

    host: float
    event: torch.Event | None = None

    def until(self, later: Moment) -> float:
        """Seconds to a later moment: on the device where there is one, which must have come so far."""
        if self.event is None or later.event is None:
            return later.host - self.host
        later.event.synchronize()
        return float(self.event.elapsed_time(later.event)) / 1000


class Clock:
    """Tells the time of one call.

    Args:
        device: of the target. CUDA's work is timed by events in its queue; what is asked of them after the round's
            tokens were read costs no wait.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> Moment:
        """This moment."""
        if self.device.type != "cuda":
            return Moment(time.perf_counter())
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return Moment(time.perf_counter(), event)
