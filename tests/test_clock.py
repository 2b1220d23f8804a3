"""Times of a round: the host's, and a device's own where it works behind the host."""

import time

import pytest
import torch

from hf_specgen.clock import Clock, Moment


class Event:
    """What CUDA's event does, at a time of its own."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms
        self.waited = False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, later: "Event") -> float:
        assert later.waited, "nothing is known of a moment that has not come"
        return later.at_ms - self.at_ms


def test_a_cpu_has_the_time_of_the_host():
    clock = Clock(torch.device("cpu"))
    begun = clock.now()
    time.sleep(0.01)
    assert begun.event is None
    assert 0.01 <= begun.until(clock.now()) < 1.0


def test_a_device_has_its_own_time():
    first, later = Moment(1.0, Event(500.0)), Moment(1.001, Event(740.0))
    assert first.until(later) == pytest.approx(0.24)


@pytest.mark.cuda
def test_work_that_the_host_did_not_wait_for_is_timed():
    clock = Clock(torch.device("cuda"))
    values = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    begun = clock.now()
    for _ in range(20):
        values = values @ values
    assert begun.until(clock.now()) > 0.001
