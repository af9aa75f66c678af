"""Ranks on one CUDA device over NCCL, each a host of its own: ``pytest -m cuda``.  The same over Gloo on the CPU."""

import os
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch.distributed as dist

import lightning_sparse as ls
from lightning_sparse.bench import doctor
from lightning_sparse.bench.compare.ranks import on_shared_device
from lightning_sparse.bench.compare.run import on_this_machine
from lightning_sparse.fusion import layer_fusion
from lightning_sparse.network.machines import identity
from tests.support.models import Small
from tests.support.processes import Ranks
from tests.training.test_sharded_trainer import ShardedSmall, fitted

pytestmark = [pytest.mark.programs, pytest.mark.processes, pytest.mark.timeout(900)]
LIMIT_S = 90  # for each training, kernels that must be compiled included
STEPS, MOST = 24, 400  # of a training, which goes on until `sparse_auto` has chosen
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
@pytest.mark.parametrize(("size", "strategies"), [(2, FEW), (4, ("ddp", *FEW, doctor.LOCAL, *doctor.MEMBERS))])
def test_nothing_is_lost_and_replicas_are_equal(accelerator: str, size: int, strategies: tuple[str, ...]) -> None:
    model = f"{__name__}:{Apart.__name__}"
    schedule = replace(doctor.plan(accelerator, strategies), workload=model, limit_s=LIMIT_S)
    errors = {each.strategy: each.error for each in on_this_machine(schedule, size, on_one_device=True)}
    assert errors == dict.fromkeys(strategies, "")


class UntilChosen(L.Callback):
    """Ends the training after ``STEPS`` on the step, the same on every rank, on which nothing is to be chosen."""

    def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
        chooser = trainer.strategy.hook.chooser
        trainer.should_stop = trainer.global_step >= STEPS and (chooser is None or chooser.chosen is not None)


def _trained(rank: int, size: int, accelerator: str, kind: Any, module: Any, options: dict[str, Any]) -> None:
    layer_fusion.WORTH_PLANNING = 1  # small models choose too
    os.environ.update(on_shared_device(rank))
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=str(rank), NCCL_SOCKET_IFNAME="lo")
    backend = "nccl" if accelerator == "cuda" else "gloo"
    strategy = kind(process_group_backend=backend, **options)
    on = {"accelerator": accelerator, "devices": 1, "num_nodes": size, "callbacks": [UntilChosen()]}
    run = fitted(MOST, strategy, module(), **on)  # replicas are compared
    assert (strategy.root_device.type, dist.get_backend()) == (accelerator, backend)
    assert STEPS <= strategy.averager.steps == run.global_step < MOST


HSDP = ls.SparseHSDPStrategy, ShardedSmall, {"replicate_size": 2}
DDP = ls.SparseDDPStrategy, Small, {}


@on_each
@pytest.mark.parametrize(
    ("of", "options"),
    [
        (HSDP, {"compressor": "sparse_dense", "wire_dtype": "int4"}),
        (HSDP, {"compressor": "sparse_dense", "wire_dtype": "int4", "local_steps": 2}),
        (HSDP, {"compressor": "micro"}),
        (HSDP, {"compressor": "sparse_auto"}),
        (DDP, {"compressor": "sparse_auto"}),
        (DDP, {"compressor": "sparse_auto", "local_group": 2}),
    ],
)
def test_replicas_are_equal(ranks: Ranks, accelerator: str, of: Any, options: dict[str, Any]) -> None:
    kind, module, given = of
    ranks.run(_trained, 4, accelerator, kind, module, given | options, timeout_s=LIMIT_S)
