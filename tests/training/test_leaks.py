"""What a fit or a hook takes of the process, it gives back: file descriptors and threads."""

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine.lanes import Lane
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.network.simulated import SimNetwork
from tests.support.local_steps import CHOSEN, auto
from tests.support.models import Small, data, small, take_steps, trainer
from tests.support.on_one_device import ACCELERATOR
from tests.support.processes import Ranks

FITS = 4


def held() -> tuple[int, int]:
    """File descriptors and threads of this process."""
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def after_each(work: Callable[[], object]) -> list[tuple[int, int]]:
    """What is held after each of several times ``work``; the first takes what the process takes once."""
    found = []
    for _ in range(FITS):
        work()
        found.append(held())
    return found


def grows(each: list[tuple[int, int]]) -> bool:
    """Whether every time took at least one of something; once, PyTorch may take or return one."""
    return any(last - first >= len(each) - 1 for first, last in zip(each[0], each[-1], strict=True))


class Breaks(Small):
    """Raises on every rank, between two steps."""

    def training_step(self, batch: Any, index: int) -> Any:
        if index == 1:
            raise KeyError("this batch")
        return super().training_step(batch, index)


def of_trainers(rank: int, size: int, folder: str) -> dict[str, list[tuple[int, int]]]:
    def fit(strategy: Any, model: L.LightningModule, **options: Any) -> L.Trainer:
        run = trainer(strategy, size, check_every=0, **({"max_steps": 2} | options))
        run.fit(model, data(run.max_steps, size))
        return run

    def saved_afterwards() -> None:
        run = fit(ls.SparseDDPStrategy("micro", local_group=2), small())
        run.save_checkpoint(f"{folder}/late.ckpt")
        assert torch.load(f"{folder}/late.ckpt", weights_only=True)["lightning_sparse"]["unsent"] or rank

    def in_local_steps() -> None:
        run = fit(auto(), small(optimizer="adam"), max_steps=CHOSEN + 2)
        assert isinstance(run.strategy.averager, LocalAverager)  # type: ignore[attr-defined]

    def broken() -> None:
        with pytest.raises(KeyError, match="this batch"):
            fit("micro", Breaks())

    kept = [trainer("micro", size, check_every=0, max_epochs=1)]

    def again() -> None:
        kept[0].fit_loop.max_epochs = kept[0].current_epoch + 1
        kept[0].fit(model, data(2, size))

    model = small()
    return {work.__name__: after_each(work) for work in (saved_afterwards, in_local_steps, broken, again)}


@pytest.mark.programs
def test_fits_one_after_the_other_hold_no_more_than_one(ranks: Ranks, tmp_path: Any) -> None:
    """On four ranks, since with two in a member a save after fit needs process groups."""
    for found in ranks.run(of_trainers, 4, str(tmp_path)):
        for name, each in found.items():
            assert not grows(each[1:]), (name, each)


def of_hooks(rank: int, size: int) -> dict[str, list[tuple[int, int]]]:
    run = L.Fabric(accelerator=ACCELERATOR, devices=size, strategy="micro")
    run.launch()

    def of_fabric() -> None:
        model = small().net
        model, _ = run.setup(model, torch.optim.SGD(model.parameters(), 0.1))  # type: ignore[assignment]
        run.backward(model(torch.ones(2, 8)).sum())
        assert len(run.strategy.hooks) == 1  # type: ignore[attr-defined]

    def dropped() -> None:
        ddp = DistributedDataParallel(small().net)
        ls.SparseHook(ddp, "skip_reduce", local_group=size)
        take_steps(ddp, torch.optim.SGD(ddp.parameters(), 0.1), 0, 2, rank)

    return {work.__name__: after_each(work) for work in (of_fabric, dropped)}


def test_a_hook_that_is_dropped_without_being_closed_holds_nothing(ranks: Ranks) -> None:
    for found in ranks.run(of_hooks, 2):
        for name, each in found.items():
            assert not grows(each), (name, each)


def by_rules_of_nccl(rank: int, size: int) -> dict[str, int]:
    """Process groups that stay when a hook ends, in several ways, where Gloo stands in for NCCL."""
    world = dist.distributed_c10d._world

    def closed(hooks: list[ls.SparseHook]) -> None:
        hooks.pop().close()

    def closed_after_an_error(hooks: list[ls.SparseHook]) -> None:
        try:
            raise KeyError("this batch")
        except KeyError:
            hooks.pop().close()

    def dropped(hooks: list[ls.SparseHook]) -> None:
        hooks.clear()
        gc.collect()

    found = {}
    for end in (closed, closed_after_an_error, dropped):
        before, ddp = len(world.pg_map), DistributedDataParallel(small().net)
        groups = ProcessGroups(ddp)
        groups.nccl, groups._on_cpu = True, False
        hooks = [ls.SparseHook(ddp, "skip_reduce", local_steps=2, process_groups=groups)]
        assert len(world.pg_map) == before + 1
        take_steps(ddp, torch.optim.SGD(ddp.parameters(), 0.1), 0, 2, rank)
        end(hooks)
        found[end.__name__] = len(world.pg_map) - before
    return found


def test_groups_over_nccl_are_destroyed_where_all_ranks_do_it_at_once(ranks: Ranks) -> None:
    expected = {"closed": 0, "closed_after_an_error": 1, "dropped": 1}
    assert ranks.run(by_rules_of_nccl, 2, gloo=True) == [expected] * 2


def lane_threads() -> int:
    return sum(thread.name == "lightning_sparse" for thread in threading.enumerate())


def test_a_lane_has_a_thread_from_its_first_work_on_that_holds_nothing_between_two() -> None:
    comm: Comm = SimNetwork(1).comms[0]
    lane, done = Lane(comm, threaded=True), threading.Event()
    before = lane_threads()
    lane.submit(done.set)
    assert done.wait(5)
    assert lane_threads() == before + 1

    class ThresholdController:
        def work(self) -> None: ...

    gone = weakref.ref(held := ThresholdController())
    lane.submit(held.work)
    del held
    deadline = time.monotonic() + 5
    while gone() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert gone() is None
    assert lane.close()
    assert lane_threads() == before
    with pytest.raises(RuntimeError, match="was closed"):
        lane.submit(done.set)
