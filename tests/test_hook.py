"""The hook without a Trainer: on a bare DistributedDataParallel, and through Fabric."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.fabric import SparseDDPStrategy
from tests.support.models import batch, small, take_steps, unsent, weights
from tests.support.on_one_device import ACCELERATOR
from tests.support.processes import Ranks
from tests.support.said import refusal


def bare(rank: int, size: int, names: list[str]) -> list[Any]:
    results: list[Any] = []
    plain = DistributedDataParallel(small().net)
    take_steps(plain, torch.optim.SGD(plain.parameters(), 0.1), 0, 10, rank)
    for name in names:
        ddp = DistributedDataParallel(small().net)
        hook = ls.SparseHook(ddp, name)
        optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
        take_steps(ddp, optimizer, 0, 5, rank)
        saved = [hook.state_dict()]
        dist.broadcast_object_list(saved)  # as if read from rank 0's file
        model = {key: value.clone() for key, value in ddp.module.state_dict().items()}
        take_steps(ddp, optimizer, 5, 10, rank)
        hook.close()

        again = DistributedDataParallel(small().net)
        again.module.load_state_dict(model)
        resumed = ls.SparseHook(again, name)
        resumed.load_state_dict(saved[0])
        take_steps(again, torch.optim.SGD(again.parameters(), 0.1), 5, 10, rank)
        resumed.close()
        results.append((weights(ddp), weights(again), weights(plain)))
    return results


def test_a_bare_ddp_trains_and_resumes_bit_for_bit(ranks: Ranks) -> None:
    names = ["sparse_dense", "micro", "low_rank"]
    every = ranks.run(bare, 2, names, gloo=True)
    for results in every:
        for i, (name, (straight, resumed, plain)) in enumerate(zip(names, results, strict=True)):
            assert torch.equal(straight, resumed), name
            assert torch.equal(straight, every[0][i][0]), name
            assert torch.equal(straight, plain) == (name == "sparse_dense"), name


def in_parts(rank: int, size: int) -> tuple[Tensor | None, Tensor]:
    """Two replicas each of two models, and a rank that trains none."""
    parts = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mean = None
    if rank < 4:
        ddp = DistributedDataParallel(nn.Linear(3, 1, bias=False), process_group=parts[rank // 2])
        hook = ls.SparseHook(ddp, "sparse_dense")
        ddp(torch.full((1, 3), float(rank))).sum().backward()
        mean = ddp.module.weight.grad
        hook.close()
        with pytest.raises(ValueError, match="must be of all 5 ranks; got one of 2"):
            ls.SparseHook(ddp, "sparse_dense", local_steps=2)
    total = torch.ones(1)
    dist.all_reduce(total, group=dist.new_group(list(range(size))))
    return mean, total


def test_a_ddp_of_some_ranks_leaves_the_others_alone(ranks: Ranks) -> None:
    for rank, (mean, total) in enumerate(ranks.run(in_parts, 5, gloo=True)):
        assert total == 5
        assert mean is None if rank == 4 else torch.equal(mean, torch.full((1, 3), 2 * (rank // 2) + 0.5))


def said(rank: int, size: int, cases: list[tuple[ls.Compressor, int]]) -> list[list[str]]:
    """What is said before and in each of four steps, with nodes of so many ranks."""
    rank_zero_only.rank = rank  # as Lightning sets it, and torchrun's variables before it is imported
    results = []
    for compressor, local_size in cases:
        ddp = DistributedDataParallel(nn.Linear(100, 50))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hook = ls.SparseHook(ddp, compressor, wire_dtype="float32", local_group=local_size)
            for step in range(4):
                ddp(torch.randn(2, 100)).sum().backward()
                warnings.warn(f"end of step {step}", stacklevel=1)
            hook.close()
        results.append([str(each.message) for each in caught])
    return results


def test_bytes_that_reach_those_of_dense_ddp_are_named_once(ranks: Ranks) -> None:
    steps = [f"end of step {step}" for step in range(4)]
    cases = [(ls.MiCRO(density=1.0), 1), (ls.MiCRO(density=0.05), 1), (ls.MiCRO(density=1.0), 2)]
    results = ranks.run(said, 2, cases, gloo=True)
    assert results[1] == [steps] * len(cases)  # rank 0 speaks
    micro, other, alone = results[0]
    assert micro[:1] + micro[2:] == steps
    assert micro[1].startswith("lightning_sparse: MiCRO(density=1.0, ")
    assert " sent 20,540 bytes in a step, where dense DDP sends 20,200: nothing is saved" in micro[1]
    assert other == steps
    assert alone[1:] == steps
    assert "node or replica, and nobody to send to: every step updates all elements, as under ddp" in alone[0]


def fabric(rank: int, size: int, strategy: Any, folder: str) -> tuple[Tensor, Tensor, list[str]]:
    run = L.Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy)
    run.launch()

    def train(first: int, last: int, resume: str | None) -> Tensor:
        model = small().net
        optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
        model, optimizer = run.setup(model, optimizer)
        hook = run.strategy.hooks[-1]  # type: ignore[attr-defined]
        state = {"model": model, "unsent": hook}
        if resume:
            run.load(resume, state)
        for step in range(first, last):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            run.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            if step == 4:
                run.save(Path(folder) / "half.ckpt", state)
        return weights(model)

    straight = train(0, 10, None)
    resumed = train(5, 10, str(Path(folder) / "half.ckpt"))
    return straight, resumed, sorted(torch.load(Path(folder) / "half.ckpt", weights_only=True)["unsent"]["unsent"])


def test_fabric_trains_saves_and_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    strategy = SparseDDPStrategy(ls.SkipReduce(0.5), wire_dtype="bfloat16")
    results = ranks.run(fabric, 2, strategy, str(tmp_path))
    for straight, resumed, saved in results:
        assert torch.equal(straight, resumed)
        assert torch.equal(straight, results[0][0])
        assert saved == sorted(name for name, _ in small().net.named_parameters())


def exact(rank: int, size: int, folder: str) -> tuple[int, str, bool, int]:
    """Of exact sums one parameter has something unsent, on one rank; and of sparse ones each rank has its own."""
    ddp = DistributedDataParallel(small().net)
    hook = ls.SparseHook(ddp, "sparse_dense")
    take_steps(ddp, torch.optim.SGD(ddp.parameters(), 0.1), 0, 2, rank)
    hook.load_state_dict(hook.state_dict())  # all there is to know is known on every rank
    (group,) = hook.averager.groups
    if rank == 1:
        group.slots(group.unsent)[group.names.index("0.bias")].fill_(1e-9)
    file, before = Path(folder) / "exact.ckpt", unsent(hook)
    state = hook.state_dict()
    if rank == 0:
        torch.save(state, file)
    dist.barrier()
    loaded = torch.load(file, weights_only=True)
    group.unsent.fill_(1)
    hook.load_state_dict(loaded)
    now = unsent(hook)
    is_as_saved = all(torch.equal(now[name], x) for name, x in before.items())
    hook.close()
    other = DistributedDataParallel(small().net)
    hook = ls.SparseHook(other, "micro")
    take_steps(other, torch.optim.SGD(other.parameters(), 0.1), 0, 2, rank)
    refused = refusal(hook.load_state_dict, hook.state_dict())
    hook.close()
    return (
        file.stat().st_size,
        refused,
        is_as_saved,
        sum(x.untyped_storage().nbytes() > 4 for x in loaded["unsent"].values()),
    )


def test_what_is_zero_on_every_rank_is_not_written_and_rank_0_alone_has_all(ranks: Ranks, tmp_path: Path) -> None:
    for size, refused, is_as_saved, written in ranks.run(exact, 2, str(tmp_path), gloo=True):
        assert (is_as_saved, written) == (True, 1)
        assert size < 4 * 929  # bytes of one rank's gradient; the file would have those of two
        assert "state must be what state_dict() returned on rank 0" in refused
        assert "on rank 1 it is what state_dict() returned on another rank than 0. Save it on rank 0" in refused


def chooses(rank: int, size: int) -> tuple[bool, Tensor]:
    ddp = DistributedDataParallel(small().net)
    hook = ls.SparseHook(ddp, "sparse_auto")
    take_steps(ddp, torch.optim.SGD(ddp.parameters(), 0.1), 0, 3, rank)
    hook.close()
    return hook.chooser is not None, weights(ddp)


def test_a_hook_takes_sparse_auto_as_it_is(ranks: Ranks) -> None:
    (chooser, one), (_, other) = ranks.run(chooses, 2, gloo=True)
    assert chooser
    assert torch.equal(one, other)
