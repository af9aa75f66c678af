"""Ranks of a host watch each other: one that dies, fails or stands still has the others end, and no other."""

import os
import signal
import time
from typing import Any

import pytest
import torch.distributed as dist

from lightning_sparse.elastic.watch import Watch
from lightning_sparse.network.host_ranks import HostRanks
from tests.support.processes import Ranks, _with_gloo

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
LIMIT_S = 1.5


def watched(rank: int, size: int, what: str) -> Any:
    """Watch the others, of which rank 1 does ``what``; returns whether hosts were to wait for this rank no longer."""
    left: list[bool] = []
    ranks = HostRanks(dist.new_group(backend="gloo"))
    watch = Watch(ranks, "127.0.0.1", LIMIT_S, leave=lambda: left.append(True))
    if rank == 1:
        if what == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        watch.close(is_over=what == "ends")
        return None
    limit_s = time.monotonic() + (LIMIT_S if what == "ends" else 60)
    while not left and time.monotonic() < limit_s:
        time.sleep(0.02)
    watch.close(is_over=what == "ends")
    return bool(left)


@pytest.mark.parametrize(("what", "left"), [("dies", True), ("fails", True), ("ends", False)])
def test_ranks_end_together_unless_their_training_is_over(ranks: Ranks, what: str, left: bool) -> None:
    with ranks.start(_with_gloo, 3, watched, what) as running:
        ends = {end.rank: end.value for end in running.ends(60)}
    assert (ends[0], ends[2]) == (left, left)


def decided(rank: int, size: int) -> list[Any]:
    own = HostRanks(dist.new_group(backend="gloo"))
    found: list[Any] = [own.all(True), own.all(rank == 0), own.of_first({"from": rank})]
    try:
        own.check(ValueError("this rank") if rank == 1 else None)
    except (ValueError, RuntimeError) as error:
        found.append(str(error))
    return found


def test_ranks_of_a_host_decide_together(ranks: Ranks) -> None:
    assert [HostRanks().all(False), HostRanks().of_first(3)] == [False, 3]
    first, second = ranks.run(decided, 2, gloo=True)
    assert first[:3] == second[:3] == [True, False, {"from": 0}]
    assert "another rank of this host has failed" in first[3]
    assert second[3] == "this rank"
