"""When what happened in a step: backward's start and end, each gradient's arrival, each group's averaging."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group

Moment: TypeAlias = "int | torch.cuda.Event"


@dataclass(frozen=True)
class GroupTime:
    """When one group of a step was ready, taken up and averaged, since backward began; and the processor's part."""

    ready_s: float
    start_s: float
    end_s: float
    busy_s: float

    @staticmethod
    def joined(times: Sequence["GroupTime"]) -> "GroupTime":
        """The time of several groups that count as one."""
        return GroupTime(
            max(time.ready_s for time in times),
            min(time.start_s for time in times),
            max(time.end_s for time in times),
            sum(time.busy_s for time in times),
        )


class Timeline:
    """The moments of this rank's last step, as its device passes them.

    On the CPU a moment is a reading of the clock; on CUDA an event in the current stream, so that noting one waits for
    nothing.  Reading times waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._began = self._ended = self._waits = self._waited = self.now()
        self._arrived: dict[Tensor, Moment] = {}
        self._averaged: dict[Tensor, tuple[Moment, Moment, float]] = {}  # first parameter -> taken up, averaged, busy

    def now(self) -> Moment:
        if self._device.type != "cuda":
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def begin_backward(self) -> None:
        self._began = self.now()

    def end_backward(self) -> None:
        """Note that every mean has arrived."""
        self._ended = self._waited = self.now()

    def begin_wait(self) -> None:
        """Note that from now on nothing is done but to wait for messages."""
        self._waits = self.now()

    def end_wait(self) -> None:
        self._waited = self.now()

    def arrive(self, parameters: Sequence[Tensor]) -> None:
        """Note that DDP handed over the gradients of ``parameters``, perhaps the last ones."""
        self.begin_wait()
        self._arrived.update(dict.fromkeys(parameters, self._waits))

    def average(self, group: Group, taken_up: Moment, busy_s: float) -> None:
        """Note that ``group``, ``taken_up`` then, is averaged now, and how long that kept the processor busy."""
        self._averaged[group.parameters[0]] = (taken_up, self.now(), busy_s)

    def span_s(self) -> float:
        """From the start of backward to its end."""
        return self._since_backward_began(self._ended)

    def wait(self) -> Callable[[], float]:
        """What tells, later, for how many seconds the last step has waited for messages."""
        return partial(_between_s, self._waits, self._waited)

    def arrival_s(self, parameter: Tensor) -> float:
        """From the start of backward until the gradient of ``parameter`` was handed over; NaN if it never was."""
        return self._since_backward_began(self._arrived[parameter]) if parameter in self._arrived else math.nan

    def group_times(self, groups: Sequence[Group]) -> list[GroupTime]:
        """The times of ``groups``, without those that have not been averaged since they were laid out."""
        found = []
        for group in groups:
            if group.parameters and group.parameters[0] in self._averaged:
                taken_up, averaged, busy_s = self._averaged[group.parameters[0]]
                ready_s = max(self.arrival_s(p) for p in group.parameters)
                start_s, end_s = self._since_backward_began(taken_up), self._since_backward_began(averaged)
                found.append(GroupTime(ready_s, start_s, end_s, busy_s))
        return found

    def _since_backward_began(self, moment: Moment) -> float:
        return _between_s(self._began, moment)


def _between_s(start: Moment, end: Moment) -> float:
    if isinstance(start, int) and isinstance(end, int):
        return (end - start) / 1e9
    assert isinstance(start, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
