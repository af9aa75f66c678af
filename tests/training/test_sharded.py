"""Models that FSDP2 shards inside nodes: the laws per shard, equality with PyTorch's own sums, resume, and more."""

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import lightning_sparse as ls
from lightning_sparse.checkpoint.sharded import save_tensors
from lightning_sparse.wire import WIRE_DTYPES
from tests.support.compressors import EVERY_COMPRESSOR
from tests.support.models import flat
from tests.support.processes import Ranks
from tests.support.sharded import Checkpointed, Compiled, Net, Policy, Sharded, Tied, backward, keep, kept, mesh

MESHES = ((2, 2), (4, 1), (1, 4))
beside_native = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_force_sum_reduction_for_comms"), reason="this PyTorch's own HSDP needs NCCL"
)


# - as PyTorch

SKIPPED = (0, 3, 4, 6)


def _as_native(rank: int, size: int) -> None:
    for replicate, shard in MESHES:
        for batches in (1, 3):
            native, ours = Sharded(mesh(replicate, shard)), Sharded(mesh(replicate, shard), ls.Dense())
            for step in range(50 if (replicate, batches) == (2, 1) else 8):
                native.step(step, batches)
                ours.step(step, batches)
            # Of two replicas the sum has one order; of four Gloo adds in another order than our two hops.
            tolerance = {"rtol": 0.0, "atol": 0.0} if replicate < 4 else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(ours.weights, native.weights, **tolerance)
            ours.close()


@pytest.mark.programs
@beside_native
def test_dense_sums_in_float32_are_those_of_native_hsdp(ranks: Ranks) -> None:
    """Bit for bit on 2x2 and 1x4, with clipping by the global norm, also where gradients are accumulated."""
    ranks.run(_as_native, 4, gloo=True)


# - the laws


def _laws(rank: int, size: int) -> list[str]:
    tried = []
    every: list[Any] = [(each.values[0], None) for each in EVERY_COMPRESSOR]
    every += [(each, wire) for wire in WIRE_DTYPES for each in (ls.Dense(), ls.MiCRO(density=0.2))]
    on = mesh(2, 2)
    for compressor, wire in every:
        ours = Sharded(on, compressor, wire_dtype=wire)
        ours.watch()
        for step in range(3):
            before = ours.unsent
            ours.given.clear()
            ours.optimizer.zero_grad()
            backward(ours, step)
            means = ours.in_order({name: p.grad.to_local() for name, p in ours.sharded.sharded.items()})  # type: ignore[union-attr]
            due = ours.column_sum(before + ours.in_order(ours.given))
            torch.testing.assert_close(
                2 * means + ours.column_sum(ours.unsent),
                due,
                rtol=1e-4,
                atol=1e-5,
                msg=partial(_named, compressor, wire),
            )
            assert ours.is_same_in_column(means), f"{compressor} {wire}"
            ours.optimizer.step()
        tried.append(f"{compressor} {wire}")
        ours.close()
    return tried


def _named(compressor: Any, wire: Any, text: str) -> str:
    return f"{compressor}, {wire}: {text}"


def test_nothing_is_lost_of_a_shard_and_replicas_get_equal_means(ranks: Ranks) -> None:
    assert len(ranks.run(_laws, 4, gloo=True)[0]) == len(EVERY_COMPRESSOR) + 2 * len(WIRE_DTYPES)


# - what FSDP2 can do


class Frozen(Net):
    """Of whose blocks biases are trained alone."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0].weight.requires_grad_(False)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS = {
    "tied": Tied,
    "checkpointed": Checkpointed,
    "mixed": partial(Policy, mp_policy=BF16),
    "kept unsharded": partial(Policy, reshard_after_forward=False),
    "compiled": Compiled,
    "frozen": Frozen,
}


def _kinds(rank: int, size: int) -> None:
    on = mesh(2, 2)
    for kind, make in KINDS.items():
        native, ours = Sharded(on, make=make), Sharded(on, ls.Dense(), make=make)
        for step in range(4):
            native.step(step)
            ours.step(step)
        assert torch.equal(ours.weights, native.weights), kind
        ours.close()


@pytest.mark.programs
@beside_native
def test_what_fsdp_can_do_is_done(ranks: Ranks) -> None:
    ranks.run(_kinds, 4, gloo=True)


class Branches(Net):
    """Some of whose forwards leave out the first block."""

    uses_first = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks[1](self.blocks[0](x) if self.uses_first else x))
        return y


def _partly(rank: int, size: int) -> None:
    """Replica 0 leaves a block out in even steps, and all do in the last one."""
    for compressor in (ls.Dense(), ls.MiCRO(density=0.3)):
        ours = Sharded(mesh(2, 2), compressor, make=Branches)
        block: Any = ours.module.blocks[0]  # type: ignore[index]
        for step in range(6):
            ours.module.uses_first = step < 5 and (rank >= 2 or step % 2 == 1)  # type: ignore[assignment]
            unsent = ours.unsent
            backward(ours, step)
            gradients = [p.grad.to_local() for p in ours.sharded.sharded.values() if p.grad is not None]  # type: ignore[attr-defined]
            assert ours.is_same_in_column(flat(gradients))
            assert (block[0].weight.grad is None) == (step == 5)
            if step == 5:
                assert (ours.unsent == unsent).sum() >= block[0].weight.to_local().numel()
            ours.optimizer.step()
            ours.optimizer.zero_grad()
        ours.close()


def test_parameters_that_some_replicas_do_not_use_keep_what_is_unsent(ranks: Ranks) -> None:
    ranks.run(_partly, 4, gloo=True)


def _twice(rank: int, size: int) -> None:
    native, ours = Sharded(mesh(2, 2)), Sharded(mesh(2, 2), ls.Dense())
    for step in range(3):
        for each in (native, ours):
            backward(each, step)
            backward(each, 100 + step)
            each.optimizer.step()
            each.optimizer.zero_grad()
    torch.testing.assert_close(ours.weights, native.weights, rtol=1e-5, atol=1e-6)
    ours.close()


@beside_native
def test_a_second_backward_adds_its_mean_to_the_first(ranks: Ranks) -> None:
    ranks.run(_twice, 4, gloo=True)


# - resume


def _skips(rank: int, size: int) -> None:
    for compressor, wire in (("micro", None), ("sparse_dense", "int4"), ("skip_reduce", None)):
        found = []
        for throws in (True, False):
            training = Sharded(mesh(2, 2), compressor, wire_dtype=wire)
            training.hook.note(training.optimizer)
            for step in range(9):
                if step not in SKIPPED:
                    training.step(step)
                elif throws:
                    training.hook.begin_forward()
                    training.module(torch.randn(4, 9)).square().mean().backward()
                    training.hook.end_forward()
                    training.optimizer.zero_grad()
            found.append((training.weights, training.unsent))
            training.hook.close()
        assert all(torch.equal(x, y) for x, y in zip(*found, strict=True)), compressor


@pytest.mark.programs
def test_a_step_that_is_skipped_never_was(ranks: Ranks) -> None:
    ranks.run(_skips, 4, gloo=True)


def _goes_on(rank: int, size: int, folder: Path) -> None:
    for compressor, path in (
        (ls.MiCRO(density=0.2), folder / "1"),
        (ls.LowRank(rank=1), None),
        (ls.SkipReduce(), folder),
    ):
        whole, first, second = (Sharded(mesh(2, 2), compressor) for _ in range(3))
        for step in range(10):
            whole.step(step)
        for step in range(5):
            first.step(step)
        said = _saved(first, "per_rank", path)
        second.module.load_state_dict(first.module.state_dict())
        second.optimizer.load_state_dict(first.optimizer.state_dict())
        second.hook.restore(said, path)
        for step in range(5, 10):
            second.step(step)
        assert torch.equal(second.weights, whole.weights), compressor
        assert torch.equal(second.unsent, whole.unsent), compressor
        for each in (whole, first, second):
            each.close()


def _kept(rank: int, size: int, folder: Path) -> None:
    for residuals in ("per_rank", "mean"):
        ours = Sharded(mesh(2, 2), ls.MiCRO(density=0.1))
        for step in range(3):
            ours.step(step)
        keep(ours, folder / residuals, residuals, unsent=ours.unsent_of_mean())
        ours.close()


def _elsewhere(rank: int, size: int, folder: Path, meshes: list[tuple[int, int]]) -> list[str]:
    """Go on with what was kept; the next step has it, or some of it is unsent still."""
    said_of: list[str] = []
    cases = [
        (sizes, each) for sizes in meshes for residuals in ("per_rank", "mean") for each in kept(folder / residuals)
    ]
    for sizes, (said, path, more) in cases:
        ours = Sharded(mesh(*sizes), ls.MiCRO(density=0.1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ours.hook.restore(said, path)
        said_of += [str(each.message) for each in caught]
        for name, x in ours.unsent_of_mean().items():
            torch.testing.assert_close(x, more["unsent"][name], msg=lambda text, name=name: f"{name}: {text}")
        ours.watch()
        before = ours.column_sum(ours.unsent)
        backward(ours, 3)
        given = ours.column_sum(ours.in_order(ours.given))
        means = ours.in_order({name: p.grad.to_local() for name, p in ours.sharded.sharded.items()})  # type: ignore[union-attr]
        after = ours.averager.size * means + ours.column_sum(ours.unsent)
        torch.testing.assert_close(after, before + given, rtol=1e-4, atol=1e-5)
        ours.close()
    return said_of


def _saved(training: Sharded, residuals: str, folder: Path | None) -> dict[str, Any]:
    """What rank 0 has of a checkpoint, in a ``folder`` if it is a distributed one."""
    said, tensors = training.hook.gather(residuals, folder is not None)
    if folder is not None:
        save_tensors(tensors, folder)
    only: list[Any] = [said]
    dist.broadcast_object_list(only)
    return only[0]


def test_resumed_on_the_same_mesh_it_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_goes_on, 4, tmp_path, gloo=True)


@pytest.mark.programs
def test_resumed_on_another_mesh_nothing_unsent_of_the_mean_is_lost(ranks: Ranks, tmp_path: Path) -> None:
    """Of 2 x 2, on meshes of as many ranks and of half as many."""
    ranks.run(_kept, 4, tmp_path, gloo=True)
    for meshes in ([(2, 2), (4, 1), (1, 4)], [(2, 1), (1, 2)]):
        said = ranks.run(_elsewhere, meshes[0][0] * meshes[0][1], tmp_path, meshes, gloo=True)[0]
        assert any("starts from the mean" in each for each in said)
