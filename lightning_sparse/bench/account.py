"""Where a rank's own milliseconds go: one step of every compressor on one core, without a network.

python -m lightning_sparse.bench.account --elements 25000000 --ranks 4
"""

import argparse
import importlib
import time
from collections.abc import Callable, Sequence
from functools import wraps
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.group import Group
from lightning_sparse.simulation import SimNetwork

STEPS_BEFORE, STEPS = 4, 5  # not timed: thresholds find their place in them; timed

# Phase -> the functions whose time it is, but for what another phase takes of it.
PHASES: dict[str, tuple[str, ...]] = {
    "add": ("group.Group.add",),
    "select": (
        *(f"select.{name}" for name in ("above", "sampled_threshold", "summary", "pooled_threshold")),
        *(f"select.{name}" for name in ("kth_largest", "largest", "at_most")),
    ),
    "sketch": ("sketch.CountSketch.encode", "sketch.CountSketch.estimate"),
    "code": ("wire.picks.PickLayout.pack", "wire.picks.PickLayout.unpack", "wire.values.take", "wire.values.add"),
    "add up": ("sparse.add_up", "sparse.contained", "sparse.nonzero"),
    "hand back": ("group.Group.hand_back",),
}
NETWORK = "network"  # which is simulated, and not accounted for
NETWORK_CALLS = tuple(f"simulation.{name}" for name in ("SimComm._launch", "SimComm.buffer", "SimNetwork.deliver"))
REST = "rest"
STEP = "step"


class Clock:
    """Splits time among phases, each without what it calls of another."""

    def __init__(self) -> None:
        self.ms = dict.fromkeys((*PHASES, REST, NETWORK), 0.0)
        self._running = [REST]
        self._since_s = time.perf_counter()

    def enter(self, phase: str) -> None:
        """Start a phase within the one that runs."""
        self._note()
        self._running.append(phase)

    def leave(self) -> None:
        """End it."""
        self._note()
        self._running.pop()

    def _note(self) -> None:
        now_s = time.perf_counter()
        self.ms[self._running[-1]] += 1e3 * (now_s - self._since_s)
        self._since_s = now_s


def account(compressor: Compressor, elements: int, ranks: int) -> dict[str, float]:
    """Milliseconds of each phase of one rank's step, and of the step: medians of ``STEPS`` steps, means over ranks.

    Args:
        compressor: whose.
        elements: n, of one group with one parameter.
        ranks: P, in this process, by turns.
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
        with _timed(clock):
            for group, gradient in zip(groups, gradients, strict=True):
                compressor.accumulate(group, [gradient], ranks)
            totals = network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)])
            for group, gradient, total in zip(groups, gradients, totals, strict=True):
                group.hand_back(total, [gradient], ranks)
            clock.enter(REST)
            clock.leave()
        own = {phase: ms / ranks for phase, ms in clock.ms.items() if phase != NETWORK}
        steps.append(own | {STEP: sum(own.values())})
    return {phase: median(step[phase] for step in steps[STEPS_BEFORE:]) for phase in steps[0]}


def copying(elements: int) -> float:
    """Milliseconds of copying a float32 vector of as many elements: the unit of what is accounted for."""
    source, target = torch.randn(elements), torch.empty(elements)
    times = []
    for _ in range(STEPS_BEFORE + STEPS):
        start_s = time.perf_counter()
        target.copy_(source)
        times.append(1e3 * (time.perf_counter() - start_s))
    return median(times[STEPS_BEFORE:])


def table(rows: dict[str, dict[str, float]], copy_ms: float, title: str) -> Table:
    """Phases by compressor, in milliseconds, and what adding and selecting is of a copy."""
    shown = Table(title=title)
    shown.add_column("ms")
    for name in (*PHASES, REST, STEP, "(add + select) / copy"):
        shown.add_column(name, justify="right")
    for name, ms in rows.items():
        ratio = (ms["add"] + ms["select"]) / copy_ms
        shown.add_row(name, *(f"{ms[phase]:.1f}" for phase in (*PHASES, REST, STEP)), f"{ratio:.2f}")
    return shown


class _timed:  # used as a context
    """Has a clock told of every call of a phase's functions, wherever they were imported to."""

    def __init__(self, clock: Clock) -> None:
        self._patches = []
        for phase, names in (*PHASES.items(), (NETWORK, NETWORK_CALLS)):
            for name in names:
                for owner, attribute, function in _places(name):
                    self._patches.append(patch.object(owner, attribute, _told(clock, phase, function)))

    def __enter__(self) -> None:
        for each in self._patches:
            each.start()

    def __exit__(self, *error: object) -> None:
        for each in self._patches:
            each.stop()


def _told(clock: Clock, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        clock.enter(phase)
        try:
            return function(*args, **kwargs)
        finally:
            clock.leave()

    return timed


def _places(name: str) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Where the function is found by those who call it: its class, or every module of ours that imported it."""
    module_name, _, attribute = name.rpartition(".")
    head, _, last = module_name.rpartition(".")
    if last[:1].isupper():
        owner = getattr(importlib.import_module(f"lightning_sparse.{head}"), last)
        return [(owner, attribute, getattr(owner, attribute))]
    function: Callable[..., Any] = getattr(importlib.import_module(f"lightning_sparse.{module_name}"), attribute)
    users = [f"compressors.{path}" for path in ("micro", "importance", "ok_topk", "sketch_fusion", "top_k", "base")]
    users += [module_name, "ring", "select", "sparse_collectives", "sparse"]
    modules = [importlib.import_module(f"lightning_sparse.{user}") for user in dict.fromkeys(users)]
    return [(m, attribute, function) for m in modules if vars(m).get(attribute) is function]


def main(arguments: Sequence[str] | None = None) -> None:
    """Account for every compressor and print."""
    parser = argparse.ArgumentParser(prog="python -m lightning_sparse.bench.account", description=__doc__)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--ranks", type=int, default=4)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    copy_ms = copying(asked.elements)
    rows = {name: account(kind(), asked.elements, asked.ranks) for name, kind in COMPRESSORS.items()}
    title = f"{asked.elements:,} elements, one of {asked.ranks} ranks, one core; copying them: {copy_ms:.1f} ms"
    Console(width=120).print(table(rows, copy_ms, title))


if __name__ == "__main__":
    main()
