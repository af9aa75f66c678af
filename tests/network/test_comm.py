"""Real processes over Gloo: they agree with the simulated ones, count what the kernel counts, and end in time."""

import os
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import lightning_sparse as ls
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.lanes import Lane
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.torch_comm import TorchComm
from lightning_sparse.selection.sparse import dense
from lightning_sparse.simulation import simulate
from lightning_sparse.wire import wire_format
from tests.support.compressors import EVERY_COMPRESSOR
from tests.support.processes import Ranks
from tests.support.said import refusal

pytestmark = pytest.mark.processes


def run_real(
    rank: int, size: int, jobs: list[tuple[ls.Compressor, torch.Tensor, str]]
) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """What `simulate` does, on this rank of real ones: totals [T, n], unsent [n], sent bytes [T] of each job."""
    results = []
    for compressor, gradients, wire_dtype in jobs:
        comm = TorchComm(dist.group.WORLD).in_format(wire_format(wire_dtype))
        lane = Lane(comm, threaded=False)
        group = Group(0, ("gradient",), (torch.zeros(gradients.shape[2]),))
        totals, sent = [], []
        for gradient in gradients:
            group.unsent += gradient[rank]
            before = comm.sent_bytes
            totals.append(dense(lane.run(take_step(compressor, group, comm)), group.n).clone())
            sent.append(comm.sent_bytes - before)
        results.append((torch.stack(totals), group.unsent, sent))
    return results


@pytest.mark.parametrize("size", [2, 3])
def test_real_and_simulated_ranks_agree_bit_for_bit(ranks: Ranks, size: int) -> None:
    """Above two ranks an all-reduce may add in another order, so there the gradients are whole numbers."""
    whole = torch.randint(-64, 64, (4, size, 301)).float()
    jobs = [(c.values[0], whole, wire) for c in EVERY_COMPRESSOR for wire in ("float32", "bfloat16")]
    broken = torch.randn(4, size, 301)
    jobs += [(c.values[0], broken, wire) for c in EVERY_COMPRESSOR for wire in ("float32", "float16") if size == 2]
    real = ranks.run(run_real, size, jobs, gloo=True)
    for number, (compressor, gradients, wire_dtype) in enumerate(jobs):
        expected = simulate(compressor, gradients, wire_dtype=wire_dtype)
        for rank in range(size):
            totals, unsent, sent = real[rank][number]
            assert torch.equal(totals / size, expected.mean), (compressor, wire_dtype)
            assert torch.equal(unsent, expected.unsent[rank]), (compressor, wire_dtype)
            assert sent == expected.sent_bytes[:, rank].tolist(), (compressor, wire_dtype)


def acknowledged_bytes() -> int:
    """Bytes that this process has sent over TCP and that have arrived, by the kernel's count of each connection."""
    total = 0
    for path in list(Path("/proc/self/fd").iterdir()):
        if path.is_socket():
            with suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as connection:  # where it is TCP's
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
                total += int.from_bytes(info[120:128], sys.byteorder)  # tcpi_bytes_acked
    return total


counts_connections = pytest.mark.skipif(sys.platform != "linux", reason="reads the kernel's count of each connection")


def send_much(rank: int, size: int, jobs: list[tuple[ls.Compressor, str]], n: int, steps: int) -> list[tuple[int, int]]:
    """Bytes that this rank sent in each job, by our count and by the kernel's."""
    results = []
    for compressor, wire in jobs:
        lane = Lane(TorchComm(dist.group.WORLD).in_format(wire_format(wire)), threaded=False)
        group = Group(0, ("gradient",), (torch.zeros(n),))
        generator = torch.Generator().manual_seed(rank)
        dist.barrier()
        before = acknowledged_bytes()
        for _ in range(steps):
            group.unsent += torch.randn(n, generator=generator)
            lane.run(take_step(compressor, group, lane.comm))
        dist.barrier()
        results.append((lane.comm.sent_bytes, acknowledged_bytes() - before))
    dist.barrier()  # nobody may leave, and close a connection, before all have counted
    return results


@counts_connections
def test_counted_bytes_are_the_kernels(ranks: Ranks) -> None:
    """Gloo's own headers and barriers come on top: below 3 % of messages this long."""
    size, n, steps = 4, 300_001, 3
    compressors = [
        ls.Dense(), ls.SkipReduce(skip=0.5), ls.MiCRO(density=0.1), ls.OkTopk(density=0.1),
    ]  # fmt: skip
    jobs = [(compressor, wire) for compressor in compressors for wire in ("float32", "bfloat16")]
    for (compressor, wire), *each in zip(jobs, *ranks.run(send_much, size, jobs, n, steps, gloo=True), strict=True):
        for counted, kernel in each:
            assert counted <= kernel <= 1.03 * counted, (compressor, wire)
        if isinstance(compressor, ls.SkipReduce):
            width = -(-n // size)
            slices = 2 * (size - 1) - compressor.steps_skipped(size)
            slice_bytes = 4 * width if wire == "float32" else 4 * -(-width // 2)  # in whole words
            assert {counted for counted, _ in each} == {slices * slice_bytes * steps}


@dataclass(frozen=True)
class DifferentMessages(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        if comm.rank == 0:
            return (yield comm.shift(group.unsent.clone()))
        return (yield comm.all_reduce(group.unsent.clone()))


def disagree(rank: int, size: int) -> str:
    some = dist.new_group(timeout=timedelta(seconds=2))
    lane = Lane(TorchComm(some), threaded=False)
    group = Group(0, ("gradient",), (torch.zeros(64),))
    return refusal(lambda: (lane.run(take_step(DifferentMessages(), group, lane.comm)), dist.barrier(some)))


def test_messages_that_differ_end_by_the_time_limit(ranks: Ranks) -> None:
    """In the simulated network the same mistake is an assertion that names both (test_simulation)."""
    assert any(ranks.run(disagree, 2, gloo=True))


def outlive(rank: int, size: int) -> list[str]:
    """What a rank hears of messages to one that has gone: of the first when it is waited for, of others at once."""
    comm, errors = TorchComm(dist.group.WORLD), []
    for launch in (comm.all_reduce, comm.shift, comm.shift) if rank == 0 else ():
        with pytest.raises(RuntimeError) as failed:
            launch(torch.zeros(8)).wait()
        errors.append(str(failed.value))
    return errors


def test_a_message_to_a_rank_that_has_gone_says_so(ranks: Ranks) -> None:
    errors, _ = ranks.run(outlive, 2, gloo=True)
    assert len(errors) == 3
    assert all(error.startswith("a message among the ranks failed: ") for error in errors), errors
