"""Splits a rank's own milliseconds into phases: one step of every compressor on one core, without a network.

python -m lightning_sparse.bench.account --elements 25000000 --ranks 4
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from types import CodeType, FrameType

import torch
from rich.console import Console
from rich.table import Table

from lightning_sparse import wire
from lightning_sparse.compressors import COMPRESSORS, Compressor, MomentumCorrection
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.simulated import SimComm, SimNetwork
from lightning_sparse.selection import estimate, sketch, sparse
from lightning_sparse.selection import host as select

STEPS_BEFORE, STEPS = 4, 5  # not timed: thresholds find their place in them; timed

NETWORK = "network"  # which is simulated, and not accounted for
REST = "rest"
STEP = "step"
# Phase -> the functions whose time it is, but for what another phase takes of it.
FUNCTIONS: dict[str, tuple[Callable[..., object], ...]] = {
    "add": (Group.add, Compressor.accumulate, MomentumCorrection.accumulate),
    "select": (
        *(select.above, estimate.sampled_threshold, estimate.summary, estimate.pooled_threshold),
        *(select.kth_largest, select.largest, select.at_most),
    ),
    "sketch": (sketch.CountSketch.encode, sketch.CountSketch.estimate),
    "code": (wire.MessageLayout.pack, wire.MessageLayout.unpack, wire.take, wire.add),
    "add up": (sparse.add_up_sparse, sparse.contained, sparse.nonzero),
    "hand back": (Group.hand_back,),
    NETWORK: (SimComm._launch, SimComm.buffer, SimNetwork.deliver),
}
PHASES = tuple(phase for phase in FUNCTIONS if phase != NETWORK)
_PHASE_OF: dict[CodeType, str] = {f.__code__: phase for phase, functions in FUNCTIONS.items() for f in functions}


class Clock:
    """Splits time among phases, each without what it calls of another."""

    def __init__(self) -> None:
        self.ms = dict.fromkeys((*FUNCTIONS, REST), 0.0)
        self._running = [REST]
        self._since_s = time.perf_counter()

    def switch(self, phase: str | None = None) -> None:
        """Start a phase within the one that runs; None ends that one."""
        now_s = time.perf_counter()
        self.ms[self._running[-1]] += 1e3 * (now_s - self._since_s)
        self._since_s = now_s
        if phase is None:
            self._running.pop()
        else:
            self._running.append(phase)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note every call of a function of ``FUNCTIONS`` in this thread, by whatever name it is called."""

        def notice(frame: FrameType, event: str, argument: object) -> None:
            del argument
            if event in ("call", "return") and (phase := _PHASE_OF.get(frame.f_code)):
                self.switch(phase if event == "call" else None)

        sys.setprofile(notice)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.switch(REST)


def account(compressor: Compressor, elements: int, ranks: int) -> dict[str, float]:
    """Milliseconds of each phase of one rank's step, and of the step: medians of ``STEPS`` steps, means over ranks.

    The ranks take turns in this process; all ``elements`` are one parameter in one group.
    """
    network = SimNetwork(ranks)
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(elements, generator=generator)
    groups = [Group(0, ("weight",), (weights,)) for _ in range(ranks)]
    gradients = [torch.empty(elements) for _ in range(ranks)]
    steps = []
    for _ in range(STEPS_BEFORE + STEPS):
        for gradient in gradients:
            torch.randn(elements, generator=generator, out=gradient)
        clock = Clock()
        with clock.watch():
            for group, gradient in zip(groups, gradients, strict=True):
                compressor.accumulate(group, [gradient], ranks)
            totals = network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)])
            for group, gradient, total in zip(groups, gradients, totals, strict=True):
                group.hand_back(total, [gradient], ranks)
        own = {phase: clock.ms[phase] / ranks for phase in (*PHASES, REST)}
        steps.append(own | {STEP: sum(own.values())})
    return {phase: median(step[phase] for step in steps[STEPS_BEFORE:]) for phase in steps[0]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Account for every compressor and print a table."""
    parser = argparse.ArgumentParser(prog="python -m lightning_sparse.bench.account", description=__doc__)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    table = Table("ms", title=f"{given.elements:,} elements, one of {given.ranks} ranks, one core")
    for heading in (*PHASES, REST, STEP):
        table.add_column(heading, justify="right")
    for name, kind in COMPRESSORS.items():
        ms = account(kind(), given.elements, given.ranks)
        table.add_row(name, *(f"{each:.1f}" for each in ms.values()))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
