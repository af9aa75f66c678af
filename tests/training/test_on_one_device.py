"""Ranks on one CUDA device over NCCL, each a host of its own: ``pytest -m cuda``.  The same over Gloo on the CPU."""

import os
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

import lightning_sparse as ls
from lightning_sparse.bench import doctor
from lightning_sparse.bench.compare.ranks import on_shared_device
from lightning_sparse.bench.compare.run import on_this_machine
from lightning_sparse.network.machines import identity
from tests.support.processes import Ranks
from tests.training.test_sharded_trainer import fitted

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(600)]
LIMIT_S = 60  # for each training
on_each = pytest.mark.parametrize("accelerator", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])


class Apart(doctor.CheckedModel):
    """The model that checks each step, on ranks that are hosts of their own to NCCL."""

    def on_train_start(self) -> None:
        super().on_train_start()
        assert len(set(_everywhere(identity()))) == self.trainer.world_size


def _everywhere(x: Any) -> list[Any]:
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, x)
    return found


FEW = ("sparse_dense:wire_dtype=int4", "micro")


@on_each
@pytest.mark.parametrize(
    ("size", "strategies"), [(2, FEW), (4, ("ddp", *FEW, "sparse_auto", doctor.LOCAL, *doctor.MEMBERS))]
)
def test_nothing_is_lost_and_replicas_are_equal(accelerator: str, size: int, strategies: tuple[str, ...]) -> None:
    model = f"{__name__}:{Apart.__name__}"
    schedule = replace(doctor.plan(accelerator, strategies), workload=model, limit_s=LIMIT_S)
    errors = {each.strategy: each.error for each in on_this_machine(schedule, size, on_one_device=True)}
    assert errors == dict.fromkeys(strategies, "")


def _sharded(rank: int, size: int, accelerator: str, compressor: str, options: dict[str, Any]) -> None:
    os.environ.update(on_shared_device(rank))
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank), NCCL_SOCKET_IFNAME="lo")
    backend = "nccl" if accelerator == "cuda" else "gloo"
    strategy = ls.SparseHSDPStrategy(compressor, replicate_size=2, process_group_backend=backend, **options)
    run = fitted(5, strategy, accelerator=accelerator, devices=1, num_nodes=size)  # replicas are compared
    assert (strategy.root_device.type, dist.get_backend()) == (accelerator, backend)
    assert strategy.averager.steps == run.global_step == 5


@on_each
@pytest.mark.parametrize(
    ("compressor", "options"),
    [
        ("sparse_dense", {"wire_dtype": "int4"}),
        ("micro", {}),
        ("sparse_auto", {}),
        ("sparse_dense", {"wire_dtype": "int4", "local_steps": 2}),
    ],
)
def test_replicas_of_sharded_models_are_equal(
    ranks: Ranks, accelerator: str, compressor: str, options: dict[str, Any]
) -> None:
    ranks.run(_sharded, 4, accelerator, compressor, options, timeout_s=LIMIT_S)
