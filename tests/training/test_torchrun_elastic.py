"""torchrun with a range of hosts: one joins, is killed for good, and each time all go on from the last checkpoint."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import lightning_sparse as ls
from tests.support.elastic import wait_until
from tests.support.models import Does, data, small, trainer, weights
from tests.support.processes import Ranks, Running, free_port, print_to

SOON = {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}  # seconds; looks for a host
EPOCH, STEPS = 4, 60  # a checkpoint is written after so many steps
IN_TIME_S = 90
pytestmark = [pytest.mark.processes, pytest.mark.programs, pytest.mark.timeout(2 * IN_TIME_S)]


def work(folder: Path, agent: int) -> None:
    """One of torchrun's ranks; that of the last host is killed, and torchrun there with it."""
    size, taken = int(os.environ["WORLD_SIZE"]), list[int]()

    def fault(run: Any) -> None:
        if size == 3:
            (folder / "joined").touch()
        elif not (folder / "joined").exists():
            time.sleep(0.2)  # so that there are steps left for one that joins
        taken.append(run.global_step)
        if agent == 2 and len(taken) == EPOCH + 2:  # with a checkpoint of three ranks behind it
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    saved = sorted(folder.glob("step=*.ckpt"), key=lambda path: path.stat().st_mtime)
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=EPOCH, save_top_k=-1, filename="{step}")
    model = small()
    callbacks = [saver, Does("on_train_batch_start", fault)]
    run = trainer(ls.SparseDDPStrategy("micro"), 1, max_steps=STEPS, num_nodes=size, callbacks=callbacks)
    run.fit(model, data(20, size), ckpt_path=str(saved[-1]) if saved else None)
    torch.save((size, run.global_step, weights(model)), folder / f"end{agent}.pt")


def host(rank: int, size: int, folder: Path, port: int) -> None:
    """What ``torchrun --nnodes=2:3 --max-restarts=3 --rdzv-backend=c10d`` does on one host, with forked processes."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    del os.environ["TORCHELASTIC_RUN_ID"]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    print_to(folder / f"output{rank}")
    if rank == 2:
        wait_until((folder / "step=4.ckpt").exists)
    config = LaunchConfig(
        min_nodes=2, max_nodes=3, nproc_per_node=1, max_restarts=3, start_method="fork", monitor_interval=0.1,
        run_id="tests", rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}",
        rdzv_configs=SOON | {"is_host": rank == 0}, local_addr="localhost",
    )  # fmt: skip
    elastic_launch(config, work)(folder, rank)


def test_a_host_joins_and_is_killed_and_all_go_on_from_the_last_checkpoint(ranks: Ranks, tmp_path: Path) -> None:
    with Running(ranks.context, host, 3, (tmp_path, free_port()), daemon=False) as running:  # they start others
        ends = sorted(running.ends(IN_TIME_S), key=lambda end: end.rank)
    killed = [end.rank for end in ends if end.error == "died with exit code -9"]
    assert killed == [2], [end.error for end in ends]
    said = (tmp_path / "output0").read_text()
    assert "2 ranks wrote it and 3 read it" in said
    assert "3 ranks wrote it and 2 read it" in said
    results = [torch.load(tmp_path / f"end{rank}.pt", weights_only=True) for rank in range(2)]
    assert [(size, step) for size, step, _ in results] == [(2, STEPS), (2, STEPS)]
    assert torch.equal(results[0][2], results[1][2])
