"""What Lightning's own tests ask of DDPStrategy before it trains, asked of both: the answers are the same.

Which of Lightning's tests each of these stands for: docs/lightnings-tests.md.
"""

import re
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment, SLURMEnvironment, TorchElasticEnvironment
from lightning.pytorch.plugins import HalfPrecision, TorchCheckpointIO, TorchSyncBatchNorm
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch import nn

import lightning_sparse as ls
from tests.support.models import data, small, trainer
from tests.support.said import error_of


def described(run: L.Trainer) -> dict[str, Any]:
    """What a Trainer and its strategy say of themselves."""
    strategy: Any = run.strategy
    parts = "accelerator", "precision_plugin", "checkpoint_io", "cluster_environment", "launcher", "_layer_sync"
    values = (
        "world_size", "global_rank", "local_rank", "node_rank", "num_nodes", "num_processes", "is_global_zero",
        "root_device", "parallel_devices", "process_group_backend", "distributed_sampler_kwargs", "_start_method",
        "restore_checkpoint_after_setup", "lightning_restore_optimizer", "handles_gradient_accumulation",
    )  # fmt: skip
    ranks = run.world_size, run.global_rank, run.local_rank, run.node_rank, run.num_devices, run.device_ids
    return (
        {part: type(getattr(strategy, part)).__name__ for part in parts}
        | {value: getattr(strategy, value) for value in values}
        | {
            "ranks": ranks,
            "backend": strategy._get_process_group_backend(),
            "interactive": strategy.launcher and strategy.launcher.is_interactive_compatible,
            "ddp": isinstance(strategy, DDPStrategy),
            "unused": strategy._ddp_kwargs.get("find_unused_parameters"),
        }
    )


def of_each(name: str, **options: Any) -> list[L.Trainer]:
    """A Trainer with the strategy of this name, once plain and once ours; {} stands for the name."""
    options = {"accelerator": "cpu", "devices": 2, "logger": False} | options
    return [L.Trainer(strategy=name.format(each), **options) for each in ("ddp", "sparse_dense")]


@pytest.mark.parametrize(
    "variant", ["", "_spawn", "_fork", "_notebook", "_find_unused_parameters_true", "_FIND_UNUSED_PARAMETERS_TRUE"]
)
def test_a_name_gives_what_ddps_name_gives(variant: str) -> None:
    plain, sparse = of_each("{}" + variant)
    assert described(plain) == described(sparse)


ENVIRONMENTS: dict[str, tuple[type, dict[str, str]]] = {
    "lightning": (LightningEnvironment, {"LOCAL_RANK": "1", "NODE_RANK": "1", "WORLD_SIZE": "8"}),
    "slurm": (
        SLURMEnvironment,
        {
            "SLURM_JOB_NAME": "job", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_PROCID": "3",
            "SLURM_NTASKS": "4", "SLURM_NTASKS_PER_NODE": "2",
        },
    ),
    "torchrun": (
        TorchElasticEnvironment,
        {
            "LOCAL_RANK": "1", "GROUP_RANK": "1", "RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2",
            "TORCHELASTIC_RUN_ID": "1",
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", ENVIRONMENTS)
@pytest.mark.filterwarnings("ignore:The `srun` command is available")
def test_ranks_are_known_before_training(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, variables = ENVIRONMENTS[where]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    plain, sparse = (
        L.Trainer(strategy=make(cluster_environment=kind()), accelerator="cpu", devices=2, num_nodes=2, logger=False)
        for make in (DDPStrategy, ours)
    )
    assert described(plain) == described(sparse)
    assert (plain.world_size, plain.global_rank, plain.local_rank, plain.node_rank) == (4, 3, 1, 1)


@pytest.mark.parametrize(
    "options",
    [
        {"sync_batchnorm": True}, {"plugins": [TorchSyncBatchNorm()]}, {"plugins": [TorchCheckpointIO()]},
        {"plugins": [LightningEnvironment()]}, {"precision": "bf16-mixed"}, {"precision": "16-true"},
        {"num_nodes": 3}, {"devices": 1}, {"barebones": True},
    ],
    ids=lambda options: re.sub(r" object at \w+", "", str(options)),  # the same in every process
)  # fmt: skip
def test_options_of_the_trainer_reach_the_strategy(options: dict[str, Any]) -> None:
    if "barebones" in options:
        options = options | {"logger": None}
    plain, sparse = of_each("{}", **options)
    assert described(plain) == described(sparse)


def test_options_of_ddp_reach_the_strategy() -> None:
    options: list[dict[str, Any]] = [
        {"process_group_backend": "other"},
        {"parallel_devices": [torch.device("cpu")] * 3},
        {"precision_plugin": HalfPrecision("bf16-true")},
        {"checkpoint_io": TorchCheckpointIO()},
        {"timeout": timedelta(seconds=1)},
        {"start_method": "spawn"},
    ]
    for each in options:
        plain, sparse = (
            L.Trainer(strategy=make(**each), accelerator="cpu", logger=False) for make in (DDPStrategy, ours)
        )
        assert described(plain) == described(sparse), each
        for run in (plain, sparse):
            with run.init_module():
                layer = nn.Linear(2, 2)
            half = "precision_plugin" in each
            assert layer.weight.dtype == (torch.bfloat16 if half else torch.float32)


def test_a_name_of_ones_own() -> None:
    kept = TorchCheckpointIO()
    StrategyRegistry.register("sparse_of_ones_own", ls.SparseDDPStrategy, "", checkpoint_io=kept, compressor="micro")
    try:
        strategy = L.Trainer(strategy="sparse_of_ones_own", accelerator="cpu", devices=2, logger=False).strategy
    finally:
        StrategyRegistry.remove("sparse_of_ones_own")
    assert isinstance(strategy, ls.SparseDDPStrategy)
    assert strategy.checkpoint_io is kept


def ours(**options: Any) -> ls.SparseDDPStrategy:
    return ls.SparseDDPStrategy("sparse_dense", **options)


class StartsTooMany(LightningEnvironment):
    """Says of every rank that Lightning is to start the others."""

    @property
    def creates_processes_externally(self) -> bool:
        return False


def test_errors_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where Lightning knows its own names by heart the texts differ."""

    def errors(name: str, make: Callable[..., DDPStrategy]) -> list[tuple[str, str]]:
        def named(start: str) -> tuple[str, str]:
            kind, text = error_of(lambda: L.Trainer(strategy=name + start, accelerator="cpu", devices=2, logger=False))
            return kind, text.replace(f"'{name}{start}'", f"'{start}'")

        on_cuda = make(parallel_devices=[torch.device("cuda", 0)])
        found = [error_of(lambda: L.Trainer(strategy=on_cuda, accelerator="cpu", logger=False))]
        with monkeypatch.context() as patch:
            patch.setenv("LOCAL_RANK", "1")
            run = trainer(make(cluster_environment=StartsTooMany()), 2, max_steps=1)
            found.append(error_of(lambda: run.fit(small(), data(1, 1))))
        with monkeypatch.context() as patch:
            patch.setattr(accelerator_connector, "_IS_INTERACTIVE", True)
            found += map(named, ("", "_spawn", "_fork", "_notebook"))
        with monkeypatch.context() as patch:
            patch.setattr(torch.multiprocessing, "get_all_start_methods", lambda: ["spawn"])
            found += [(named(start)[0], "'fork' is not there") for start in ("_fork", "_notebook", "_spawn")]
        return [(kind, text.replace("SparseDDPStrategy", "DDPStrategy")) for kind, text in found]

    plain, sparse = errors("ddp", DDPStrategy), errors("sparse_dense", ours)
    assert sparse == plain
    wrong, none = "MisconfigurationException", ""
    assert [kind for kind, _ in plain] == [
        *(wrong, "RuntimeError"), *(wrong, wrong, none, none), *("ValueError", "ValueError", none)
    ]  # fmt: skip
