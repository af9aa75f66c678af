from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_sparse.bench.compare import ranks as turns_of_ranks
from lightning_sparse.bench.compare.ranks import STOPPED, RankInfo, Turn, connect, results_of
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.strategies import parse_strategies
from tests.conftest import Ranks

LIMIT_S = 60
SCHEDULE = Schedule("", "byte_lm", "ddp,micro", steps=2, warmup=0, rounds=2, accelerator="cpu", interleave=True)


def test_trainings_of_a_round_are_interleaved() -> None:
    assert [[(n, row.label) for n, row in group] for group in SCHEDULE.groups()] == [
        [(0, "ddp"), (0, "micro")],
        [(1, "micro"), (1, "ddp")],
    ]


def _take_turns(rank: int, port: int, folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """Train three, of which the second fails on rank 1 when it goes on; each writes down when it trains."""
    place = RankInfo(rank, 0, 2, 1, 2, "127.0.0.1", port, store_is_there=True, interface="lo")
    store, (row,) = connect(place), parse_strategies("ddp")
    turns = [Turn(SCHEDULE, place, 0, row, PrefixStore(key, store), key) for key in "abc"]

    def train(turn: Turn, results: Connection) -> None:
        waiting = turn.waiting(results)
        for part in range(3):
            next(waiting)
            if (turn.key, rank, part) == ("b", 1, 1):
                os._exit(3)
            with (folder / str(rank)).open("a") as file:
                file.write(turn.key)
            met = PrefixStore(turn.key, connect(place))
            met.set(f"met {part} {rank}", "")
            met.wait([f"met {part} {other}" for other in range(2)])  # as in an evaluation
        results.send({"parts": 3})

    return [(turn.key, json.loads(result)) for turn, result in results_of(turns, train)]


@pytest.mark.timeout(LIMIT_S + 20)
def test_each_trains_until_it_waits_for_the_others_and_one_that_fails_is_left_out(ranks: Ranks, tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def taken(rank: int) -> dict[str, Any]:
        output = tmp_path / f"output of {rank}"
        return dict(ranks.apart(_take_turns, output, rank, server.port, tmp_path, timeout_s=LIMIT_S))

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(taken, range(2)))
    done = {"parts": 3}
    assert found == [
        {"a": done, "b": {"error": STOPPED}, "c": done},
        {"a": done, "b": {"error": "the process of rank 1 ended with status 3"}, "c": done},
    ]
    orders = [(tmp_path / str(rank)).read_text() for rank in range(2)]
    assert orders == ["abcabcac", "abcacac"]


def _one_hangs(port: int) -> list[dict[str, Any]]:
    """Train three, one after the other, of which the second never ends."""
    place = RankInfo(0, 0, 1, 1, 1, "127.0.0.1", port, store_is_there=True, interface="lo")
    store, (row,) = connect(place), parse_strategies("ddp")
    turns_of_ranks._GLANCE_S = 0.2

    def train(turn: Turn, results: Connection) -> None:
        next(turn.waiting(results))
        time.sleep(1000 if turn.key == "b" else 0)
        results.send({"trained": turn.key})

    schedule = replace(SCHEDULE, limit_s=3)
    turns = [Turn(schedule, place, 0, row, PrefixStore(key, store), key) for key in "abc"]
    return [json.loads(result) for turn in turns for _, result in results_of([turn], train)]


@pytest.mark.timeout(LIMIT_S + 20)
def test_one_that_hangs_is_ended_and_says_where_it_was_and_the_next_trains(ranks: Ranks, tmp_path: Path) -> None:
    server, output = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), tmp_path / "output"
    first, second, third = ranks.apart(_one_hangs, output, server.port, timeout_s=LIMIT_S)
    assert (first, third) == ({"trained": "a"}, {"trained": "c"})
    assert "it hung: rank 0 had not ended after 3 s" in second["error"]
    assert "in train" in output.read_text()
