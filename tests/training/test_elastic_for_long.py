"""Faults that come to hosts of elastic trainings from outside, at any moment, for a long time."""

import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from lightning_sparse.bench.cluster import INTERFACE, Cluster
from lightning_sparse.local_steps.settings import LocalSteps
from tests import conftest
from tests.support.elastic import (
    CALM,
    Journals,
    Lighthouse,
    Plan,
    fallen_after,
    rate_after,
    train,
    train_in,
    wait_until,
)
from tests.support.processes import End, Ranks, Running

pytest.importorskip("torchft")
MINUTES, SEED = float(os.environ.get("ELASTIC_MINUTES", "0")), int(os.environ.get("ELASTIC_SEED", "0"))
IN_TIME_S = 150  # to start, or to end, beside other work on few cores
TIMEOUT_S = 2.0  # of a message, where faults come at random
STEPS, CLOSE = 240, 20  # of a training, and those of which hosts that have caught up are not further apart
SLOW_S = 0.15  # longer for each step, until no more faults come: some must be left then
LOOK_S = 0.3  # from one look at how far hosts are to the next
BACK_S = 2 * TIMEOUT_S  # after a fault, before others that must have all that was sent may have one
pytestmark = pytest.mark.skipif(not MINUTES, reason="ELASTIC_MINUTES=10 has random faults for so long")


def step_of(folder: Path, rank: int) -> int:
    """The furthest step that a host has begun."""
    return max((int(path.suffix.removeprefix(".at")) for path in folder.glob(f"{rank}.at*")), default=-1)


def check_ends(ends: dict[int, Any], steps: int) -> None:
    """Every host has ended by itself, at the step that was asked for, with its learning rate."""
    for end in ends.values():
        assert (end["step"], end["schedules"]) == (steps, fallen_after(steps)), ends
        assert end["rate"] == pytest.approx(rate_after(steps), rel=1e-9)


@pytest.mark.timeout(4 * IN_TIME_S)
@pytest.mark.parametrize("own_pace", [False, True], ids=["", "own_pace"])
@pytest.mark.parametrize(("stopped", "place"), [(2, "start"), (0, "middle"), (1, "end")])
@pytest.mark.parametrize("stop_s", [12, 30, 60])
def test_a_host_stops_for_longer_than_others_wait(
    ranks: Ranks, tmp_path: Path, stop_s: int, stopped: int, place: str, own_pace: bool
) -> None:
    """At the end the others do not wait: it ends later, alone, from what it had, at the step that was asked for."""
    at = {"start": 1, "middle": 250, "end": 490}[place]
    with Lighthouse() as lighthouse:
        plan = Plan(lighthouse.address, tmp_path, steps=500, timeout_s=3.0, own_pace=own_pace, falls=True)
        plan.local = {"local_steps": LocalSteps(6, fragments=2), "wire_dtype": "int4"}
        plan.slow_below, plan.slow_s = (0, 0.0) if place == "end" else (3, stop_s / 200)
        with ranks.start(train, 3, plan) as running:
            wait_until(lambda: step_of(tmp_path, stopped) >= at, 2 * IN_TIME_S, LOOK_S)
            os.kill(running.processes[stopped].pid, signal.SIGSTOP)
            time.sleep(stop_s)
            os.kill(running.processes[stopped].pid, signal.SIGCONT)
            found = {end.rank: end.value or end.error for end in running.ends(IN_TIME_S)}
    print(stop_s, place, f"{own_pace=}:", *found.items(), sep="\n")
    check_ends(found, plan.steps)
    others = [end for rank, end in found.items() if rank != stopped]
    assert len({end["bits"] for end in (others if place == "end" else found.values())}) == 1
    assert own_pace or all(end["optimizer"] == {plan.steps} for end in found.values())
    journals = Journals(tmp_path)
    journals.check_steps(plan.steps)
    if place != "end":
        journals.check_bits()
        print(f"the law over so many hosts, so often: {journals.check_law()}")


class FromOutside:
    """Kills, stops and cuts hosts at random moments, and has others join; at any time one host has nothing and goes on.

    A host that goes on has all that hosts have sent each other, so whoever comes back finds it.
    """

    def __init__(self, draw: random.Random, running: Running, cluster: Cluster, folder: Path, first: int) -> None:
        self._draw, self._running, self._cluster, self._folder = draw, running, cluster, folder
        self._alive = set(range(first))
        self._to_join = list(range(first, len(running.processes)))
        self._until_s: dict[int, float] = {}  # a host's fault lasts, and what follows it
        self._timers: list[threading.Timer] = []
        self.killed: set[int] = set()
        self.log: list[str] = []
        self._begun_s = time.monotonic()

    def happen(self, times: int) -> None:
        """Have so many faults, and see them end."""
        for _ in range(times):
            time.sleep(self._draw.uniform(0.1, 2.0))
            kind = self._draw.choice(["kill", "join", "stop", "stop", "cut", "cut"])
            if kind == "join":
                self._join()
            elif len(well := self._well()) > 1:
                getattr(self, f"_{kind}")(self._draw.choice(well))
        while self._to_join:
            self._join()
        for timer in self._timers:
            timer.join()

    def wait_for_all(self) -> None:
        """Wait until all hosts that are left have caught up."""
        wait_until(lambda: len(self._well()) == len(self._alive), IN_TIME_S, LOOK_S)

    def _well(self) -> list[int]:
        """Hosts that have no fault, and are as far as any."""
        now_s = time.monotonic()
        steps = {rank: step_of(self._folder, rank) for rank in sorted(self._alive)}
        furthest = max(steps.values())
        near = [rank for rank, step in steps.items() if step >= furthest - CLOSE]
        return [r for r in near if self._until_s.get(r, 0.0) < now_s and self._running.processes[r].is_alive()]

    def _note(self, *what: object) -> None:
        self.log.append(f"{time.monotonic() - self._begun_s:.1f} s: {' '.join(map(str, what))}")

    def _join(self) -> None:
        if self._to_join:
            rank = self._to_join.pop()
            self._note("join", rank)
            (self._folder / f"0.at{-rank}").touch()
            self._alive.add(rank)

    def _kill(self, rank: int) -> None:
        if len(self._alive) > 2:
            self._note("kill", rank)
            self._alive.remove(rank)
            self.killed.add(rank)
            os.kill(self._running.processes[rank].pid, signal.SIGKILL)

    def _stop(self, rank: int) -> None:
        pid = self._running.processes[rank].pid
        self._for_a_while("stop", rank, lambda on: os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP))

    def _cut(self, rank: int) -> None:
        def switch(on: bool) -> None:
            command = ["ip", "link", "set", "dev", INTERFACE, "up" if on else "down"]
            assert self._cluster.popen(rank, command, stderr=subprocess.DEVNULL).wait() == 0

        self._for_a_while("cut", rank, switch)

    def _for_a_while(self, kind: str, rank: int, switch: Callable[[bool], None]) -> None:
        seconds = self._draw.choice([self._draw.uniform(0.1, TIMEOUT_S), self._draw.uniform(TIMEOUT_S, 8.0)])
        self._note(kind, rank, f"for {seconds:.1f} s")
        self._until_s[rank] = time.monotonic() + seconds + BACK_S
        switch(False)
        self._timers.append(threading.Timer(seconds, switch, [True]))
        self._timers[-1].start()


def drawn(draw: random.Random, folder: Path, first: int, joining: int) -> Plan:
    """A training to which faults come; if it does not sleep, until it ends."""
    plan = Plan("", folder, STEPS, timeout_s=TIMEOUT_S, falls=True)
    plan.compressor = draw.choice(["sparse_dense", "micro", "ok_topk", "skip_reduce", "low_rank", "sparse_topk"])
    steps, overlap = draw.choice([1, 2, 3, 6]), draw.random() < 0.5
    settings = LocalSteps(steps, fragments=draw.choice([None, 1]), overlap=overlap)
    plan.local = {"local_steps": settings, "wire_dtype": draw.choice(["float32", "int4", "sign"])}
    plan.own_pace, plan.batches = draw.random() < 0.5, draw.choice([0, 70])
    plan.joins = {rank: -rank for rank in range(first, first + joining)}  # once this test has made a file
    slower = [SLOW_S, 3 * SLOW_S] if plan.own_pace else [SLOW_S]
    plan.sleeps = {rank: draw.choice(slower) for rank in range(1, first + joining)} | {0: SLOW_S}
    if draw.random() < 0.25:
        plan.sleeps, plan.steps = {}, STEPS // 2
    return plan


@pytest.mark.skipif(os.geteuid() != 0, reason="a host that joins its network namespace must be root")
@conftest.emulated(60 * MINUTES + 4 * IN_TIME_S)
def test_random_faults_from_outside(ranks: Ranks, tmp_path: Path) -> None:
    """ELASTIC_SEED=7 begins with round 7; what is drawn is the same again, the moment is not."""
    end_s = time.monotonic() + 60 * MINUTES
    for seed in count(SEED):
        if time.monotonic() > end_s:
            break
        draw, folder = random.Random(seed), tmp_path / str(seed)
        folder.mkdir()
        first, joining = draw.randint(3, 5), draw.randint(0, 2)
        plan = drawn(draw, folder, first, joining)
        print(f"seed {seed}: {first} hosts, {plan}", flush=True)
        a_round(ranks, plan, draw, first)


def a_round(ranks: Ranks, plan: Plan, draw: random.Random, first: int) -> None:
    hosts, lighthouse, began_s = first + len(plan.joins), Lighthouse(), time.monotonic()
    with Cluster(f"{hosts + 1}x1gbit") as cluster:
        cluster.popen(hosts, lighthouse.command)
        plan.lighthouse = f"http://{cluster.address(hosts)}:{lighthouse.port}"
        with ranks.start(train_in, hosts, [cluster.namespace(host) for host in range(hosts)], plan) as running:
            wait_until(lambda: all((plan.folder / f"{rank}.started").exists() for rank in range(first)))
            faults = FromOutside(draw, running, cluster, plan.folder, first)
            try:
                faults.happen(draw.randint(4, 12))
                if plan.sleeps:
                    faults.wait_for_all()
            finally:
                print(*faults.log, sep="; ", flush=True)
                print("steps", {rank: step_of(plan.folder, rank) for rank in range(hosts)}, flush=True)
            (plan.folder / CALM).touch()
            ends = list(running.ends(IN_TIME_S))
    check_round(plan, ends, faults.killed)
    print(f"{time.monotonic() - began_s:.0f} s", flush=True)


def check_round(plan: Plan, ends: Sequence[End], killed: set[int]) -> None:
    """Nobody has ended but as it should; hosts that faults have kept until the others had ended have other weights."""
    died = {end.rank for end in ends if end.error == "died with exit code -9"}
    check_ends(found := {end.rank: end.value or end.error for end in ends if end.rank not in died}, plan.steps)
    journals = Journals(plan.folder)
    journals.check_steps(plan.steps)
    if plan.sleeps:
        assert died == killed
        assert len({end["bits"] for end in found.values()}) == 1, found
        assert {end["hosts"] for end in found.values()} == {len(found)}
        journals.check_bits()
        print(f"the law over so many hosts, so often: {journals.check_law()}")
    assert died <= killed
