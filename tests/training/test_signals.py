"""A signal from a scheduler ends all ranks after the same batch, or requeues the job, also if one rank is slower."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment

import lightning_sparse as ls
from lightning_sparse.checkpoint.state import KEY
from lightning_sparse.network import meeting
from lightning_sparse.network.meeting import Meeting
from tests.support.models import Does, Small, data, trainer
from tests.support.processes import Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]

SLOWER_S, BEGUN = 0.02, 5  # what a step of rank 1 takes longer; the step at which the signal may come
IN_TIME_S = 60
ENDLESS = 1_000_000  # steps


class Validated(Small):
    validation_step = Small.training_step


def fit(rank: int, size: int, strategy: Any, folder: Path, look_s: float, **options: Any) -> tuple[str, int]:
    """Train until a signal ends it; return with what error, and after how many steps."""
    meeting.LOOK_S = look_s

    def is_at_work(run: Any) -> None:
        time.sleep(SLOWER_S * rank)
        if run.global_step == BEGUN:
            (folder / f"{rank}.begun").touch()

    saver = OnExceptionCheckpoint(folder, "ended")
    callbacks = [Does("on_train_batch_start", is_at_work), saver]
    run = trainer(strategy, size, 0, max_steps=ENDLESS, callbacks=callbacks, default_root_dir=folder, **options)
    error = "none"
    try:
        run.fit(Validated(), data(4, size), data(2, size))
    except BaseException as raised:
        error = type(raised).__name__
    return error, run.global_step


def train(
    rank: int,
    size: int,
    name: str,
    local_steps: int,
    folder: Path,
    look_s: float = meeting.LOOK_S,
    local_group: int = 1,
) -> tuple[str, int]:
    timeout = timedelta(seconds=IN_TIME_S)
    strategy = ls.SparseDDPStrategy(name, local_steps=local_steps, local_group=local_group, timeout=timeout)
    return fit(rank, size, strategy, folder, look_s)


def train_under_slurm(rank: int, size: int, folder: Path) -> tuple[str, int]:
    os.environ.update(
        SLURM_JOB_ID="7", SLURM_JOB_NAME="train", SLURM_NTASKS=str(size), SLURM_NTASKS_PER_NODE=str(size),
        SLURM_PROCID=str(rank), SLURM_NODEID="0", SLURM_LOCALID=str(rank), SLURM_NODELIST="localhost",
        PATH=f"{folder}:{os.environ['PATH']}",
    )  # fmt: skip
    strategy = ls.SparseDDPStrategy("micro", timeout=timedelta(seconds=IN_TIME_S))
    return fit(rank, size, strategy, folder, meeting.LOOK_S, plugins=[SLURMEnvironment(auto_requeue=True)])


def wait_for(folder: Path, pattern: str, count: int) -> None:
    deadline = time.monotonic() + IN_TIME_S
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline, f"no {pattern} in {IN_TIME_S} s"
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("name", "local_steps", "to", "local_group"),
    [("micro", 0, [0, 1], 1), ("sparse_dense", 4, [1, 0], 1), ("sparse_dense", 0, [1], 1), ("sparse_dense", 4, [3], 2)],
)
def test_sigterm_ends_all_ranks_after_the_same_batch_and_nothing_is_lost(
    ranks: Ranks, tmp_path: Path, name: str, local_steps: int, to: list[int], local_group: int
) -> None:
    """Lightning's own handler hangs here in about every second try: it sends a message in the middle of a step."""
    size = 2 * local_group
    with ranks.start(train, size, name, local_steps, tmp_path, 0.5, local_group) as running:
        wait_for(tmp_path, "*.begun", size)
        for rank in to:
            os.kill(running.processes[rank].pid, signal.SIGTERM)
        (error, steps), *others = running.values(IN_TIME_S)
    assert error == "SIGTERMException"
    assert others == [(error, steps)] * (size - 1)
    saved = torch.load(tmp_path / "ended.ckpt", weights_only=True)
    assert saved["global_step"] == steps
    assert KEY in saved


def test_slurms_signal_requeues_the_job_once_and_training_goes_on_until_sigterm(ranks: Ranks, tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked.scontrol\n')
    scontrol.chmod(0o755)
    with ranks.start(train_under_slurm, 2, tmp_path) as running:
        wait_for(tmp_path, "*.begun", 2)
        for process in running.processes:
            os.kill(process.pid, signal.SIGUSR1)
        wait_for(tmp_path, "asked.scontrol", 1)
        for process in running.processes:
            os.kill(process.pid, signal.SIGTERM)
        first, second = running.values(IN_TIME_S)
    assert first == second
    assert first[0] == "SIGTERMException"
    assert (tmp_path / "asked.scontrol").read_text() == "requeue 7\n"
    assert KEY in torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=True)


def messages_before_batches(rank: int, size: int, strategy: Any) -> int:
    """Train for six steps; return how many messages there were just before the last three batches."""
    with mock.patch.object(torch.distributed, "broadcast", wraps=torch.distributed.broadcast) as broadcast:
        counts = Does("on_train_batch_start", lambda run: broadcast.call_count)
        trainer(strategy, size, 0, max_steps=6, callbacks=[counts]).fit(Small(), data(6, size))
    return int(counts.found[5] - counts.found[2])


def test_no_rank_waits_for_a_message_before_a_batch(ranks: Ranks) -> None:
    """Lightning broadcasts before each batch whether there was a SIGTERM, which costs the latency of a message."""
    assert ranks.run(messages_before_batches, 2, ls.SparseDDPStrategy("sparse_dense", local_steps=2)) == [0, 0]
    assert ranks.run(messages_before_batches, 2, ls.SparseDDPStrategy("micro")) == [0, 0]


class Kept(dict[str, Any]):
    """A store of one process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value

    def add(self, key: str, amount: int) -> int:
        self[key] = self.get(key, 0) + amount
        return int(self[key])

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


@pytest.mark.parametrize("ahead", range(5))
@pytest.mark.parametrize("asked", range(6))
def test_ranks_meet_at_a_place_that_none_has_passed(ahead: int, asked: int) -> None:
    """However far one is ahead of the other, and wherever it was when the signal came."""
    kept = Kept()
    slow, fast = (Meeting(kept, rank, 2) for rank in range(2))  # type: ignore[arg-type]  # all that it needs of a store
    met: dict[Meeting, int] = {}
    places = [(fast, place) for place in range(ahead)]
    for place in range(20):
        places += [(fast, place + ahead), (slow, place)]
    for number, (rank, place) in enumerate(places):
        if number == asked:
            slow.ask()
            fast.ask()
        if rank not in met and rank.is_at(place):
            met[rank] = place
    assert met[slow] == met[fast] <= asked + ahead + 2


def train_to_the_end(rank: int, size: int, folder: Path) -> str:
    def is_sent(run: Any) -> None:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    run = trainer(ls.SparseDDPStrategy("micro"), size, 0, max_steps=2, callbacks=[Does("on_train_end", is_sent)])
    try:
        run.fit(Small(), data(2, size))
    except SystemExit as raised:
        return str(raised.code)
    return "none"


def test_a_signal_after_the_last_batch_is_not_forgotten(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(train_to_the_end, 2, tmp_path) == ["none", "143"]
