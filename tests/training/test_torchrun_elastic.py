"""torchrun with a range of hosts: one is killed for good, and the rest go on from the last checkpoint."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import lightning_sparse as ls
from tests.support.models import Does, data, small, trainer, weights
from tests.support.processes import Ranks, Running, free_port, print_to

SOON = {"last_call_timeout": 3, "keep_alive_interval": 1, "keep_alive_max_attempt": 3}  # seconds; looks for a host
IN_TIME_S = 90
pytestmark = [pytest.mark.processes, pytest.mark.programs, pytest.mark.timeout(2 * IN_TIME_S)]


def work(folder: Path, agent: int) -> None:
    """One of torchrun's ranks; that of the last host is killed, and torchrun there with it."""
    size = int(os.environ["WORLD_SIZE"])

    def fault(run: Any) -> None:
        if agent == 2 and run.global_step == 5:
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    saved = sorted(folder.glob("step=*.ckpt"), key=lambda path: path.stat().st_mtime)
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=4, save_top_k=-1, filename="{step}")
    model = small()
    callbacks = [saver, Does("on_train_batch_start", fault)]
    run = trainer(ls.SparseDDPStrategy("micro"), 1, max_steps=12, num_nodes=size, callbacks=callbacks)
    run.fit(model, data(20, size), ckpt_path=str(saved[-1]) if saved else None)
    torch.save((size, run.global_step, weights(model)), folder / f"end{agent}.pt")


def host(rank: int, size: int, folder: Path, port: int) -> None:
    """What ``torchrun --nnodes=2:3 --max-restarts=3 --rdzv-backend=c10d`` does on one host, with forked processes."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    del os.environ["TORCHELASTIC_RUN_ID"]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    print_to(folder / f"output{rank}")
    config = LaunchConfig(
        min_nodes=2, max_nodes=3, nproc_per_node=1, max_restarts=3, start_method="fork", monitor_interval=0.1,
        run_id="tests", rdzv_backend="c10d", rdzv_endpoint=f"localhost:{port}",
        rdzv_configs=SOON | {"is_host": rank == 0}, local_addr="localhost",
    )  # fmt: skip
    elastic_launch(config, work)(folder, rank)


def test_the_rest_go_on_from_the_last_checkpoint_on_fewer_ranks(ranks: Ranks, tmp_path: Path) -> None:
    with Running(ranks.context, host, 3, (tmp_path, free_port()), daemon=False) as running:  # they start others
        ends = sorted(running.ends(IN_TIME_S), key=lambda end: end.rank)
    killed = [end.rank for end in ends if end.error == "died with exit code -9"]
    assert len(killed) == 1, [end.error for end in ends]
    assert "step=4.ckpt" in "".join((tmp_path / f"output{rank}").read_text() for rank in range(3))  # "Restoring ..."
    results = [torch.load(tmp_path / f"end{rank}.pt", weights_only=True) for rank in range(3) if rank not in killed]
    assert [(size, step) for size, step, _ in results] == [(2, 12), (2, 12)]
    assert torch.equal(results[0][2], results[1][2])
