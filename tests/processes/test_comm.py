"""Real processes over Gloo: they agree with the simulated ones, count what the kernel counts, and end in time."""

import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import lightning_sparse as ls
from lightning_sparse.comm import Comm, Rounds, TorchComm, traffic, wire_dtype_named
from lightning_sparse.compressors.base import take_step
from lightning_sparse.group import Group
from lightning_sparse.lane import Lane
from lightning_sparse.simulation import simulate
from lightning_sparse.sparse import dense
from tests.conftest import EVERY_COMPRESSOR, Ranks

pytestmark = pytest.mark.processes


def run_real(
    rank: int, size: int, jobs: list[tuple[ls.Compressor, torch.Tensor, str]]
) -> list[tuple[torch.Tensor, torch.Tensor, list[int]]]:
    """What `simulate` does, on this rank of real ones: totals [T, n], unsent [n], sent bytes [T] of each job."""
    dist.init_process_group("gloo")
    results = []
    for compressor, gradients, wire_dtype in jobs:
        comm = TorchComm(dist.group.WORLD, wire_dtype_named(wire_dtype))
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


@pytest.mark.parametrize("size", [2, 3, 4])
def test_real_and_simulated_ranks_agree_bit_for_bit(ranks: Ranks, size: int) -> None:
    """Above two ranks an all-reduce may add in another order, so there the gradients are whole numbers."""
    whole = torch.randint(-64, 64, (4, size, 301)).float()
    jobs = [(c.values[0], whole, wire) for c in EVERY_COMPRESSOR for wire in ("float32", "bfloat16")]
    broken = torch.randn(4, size, 301)
    jobs += [(c.values[0], broken, wire) for c in EVERY_COMPRESSOR for wire in ("float32", "float16") if size == 2]
    jobs += [(ls.SkipReduce(skip=skip), broken, "float32") for skip in (0.0, 0.5, 1.0)]
    real = ranks.run(run_real, size, jobs)
    for number, (compressor, gradients, wire_dtype) in enumerate(jobs):
        expected = simulate(compressor, gradients, wire_dtype=wire_dtype)
        for rank in range(size):
            totals, unsent, sent = real[rank][number]
            assert torch.equal(totals / size, expected.mean), (compressor, wire_dtype)
            assert torch.equal(unsent, expected.unsent[rank]), (compressor, wire_dtype)
            assert sent == expected.sent_bytes[:, rank].tolist(), (compressor, wire_dtype)


def loopback_bytes() -> int:
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])  # transmitted


def send_much(rank: int, size: int, compressor: ls.Compressor, n: int, steps: int, wire: str) -> tuple[int, int, int]:
    """Bytes by our count (this rank), by the kernel's (all ranks together), and messages."""
    dist.init_process_group("gloo")
    lane = Lane(TorchComm(dist.group.WORLD, wire_dtype_named(wire)), threaded=False)
    group = Group(0, ("gradient",), (torch.zeros(n),))
    generator = torch.Generator().manual_seed(rank)
    dist.barrier()
    before = loopback_bytes()
    for _ in range(steps):
        group.unsent += torch.randn(n, generator=generator)
        lane.run(take_step(compressor, group, lane.comm))
    dist.barrier()
    return lane.comm.sent_bytes, loopback_bytes() - before, lane.comm.messages


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "compressor",
    [
        ls.Dense(), ls.SkipReduce(skip=0.5), ls.SkipReduce(skip=1.0),
        ls.TopK(density=0.1), ls.MiCRO(density=0.1), ls.OkTopk(density=0.1),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="reads the kernel's counters of the loopback interface")
def test_counted_bytes_are_the_kernels(ranks: Ranks, compressor: ls.Compressor, wire: str) -> None:
    """Headers, acknowledgements and Gloo's own handshakes come on top: below 3 % of messages this long."""
    size, n, steps = 4, 1_000_001, 5
    for attempt in range(3):  # other programs may talk over the loopback interface meanwhile
        counted, kernel, _ = zip(*ranks.run(send_much, size, compressor, n, steps, wire), strict=True)
        if sum(counted) <= kernel[0] <= 1.03 * sum(counted):
            break
        assert attempt < 2, (sum(counted), kernel)
    if isinstance(compressor, ls.SkipReduce):
        width = -(-n // size)
        slices = 2 * (size - 1) - compressor.steps_skipped(size)
        assert set(counted) == {slices * width * (4 if wire == "float32" else 2) * steps}


def bytes_a_pick(rank: int, size: int, compressor: ls.Compressor, wire: str) -> float:
    """Bytes all ranks sent by the kernel's count, over elements updated, once thresholds have settled."""
    dist.init_process_group("gloo")
    lane = Lane(TorchComm(dist.group.WORLD, wire_dtype_named(wire)), threaded=False)
    group = Group(0, ("gradient",), (torch.zeros(2_000_000),))
    generator = torch.Generator().manual_seed(rank)
    picked, before = 0, 0
    for step in range(60):
        if step == 34:  # after an evaluation of Ok-Topk's thresholds, and 30 steps before the next
            dist.barrier()
            picked, before = 0, loopback_bytes()
        group.unsent += torch.randn(group.n, generator=generator)
        lane.run(take_step(compressor, group, lane.comm))
        picked += int(group.picked)
    dist.barrier()
    return (loopback_bytes() - before) / picked


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="reads the kernel's counters of the loopback interface")
def test_micro_sends_less_than_half_of_what_ok_topks_own_format_does(ranks: Ranks) -> None:
    """At the same k, P = 4: bfloat16 and Elias-Fano against the paper's float32 and 32-bit indices."""
    for attempt in range(3):  # other programs may talk over the loopback interface meanwhile
        micro = ranks.run(bytes_a_pick, 4, ls.MiCRO(density=0.01, indices="elias_fano"), "bfloat16")
        ok_topk = ranks.run(bytes_a_pick, 4, ls.OkTopk(density=0.01, indices="int32"), "float32")
        if max(micro) <= 0.45 * min(ok_topk):
            break
        assert attempt < 2, (micro, ok_topk)


@dataclass(frozen=True)
class DifferentMessages(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        if comm.rank == 0:
            return (yield comm.shift(group.unsent.clone()))
        return (yield comm.all_reduce(group.unsent.clone()))


def disagree(rank: int, size: int) -> str:
    dist.init_process_group("gloo", timeout=timedelta(seconds=4))
    lane = Lane(TorchComm(dist.group.WORLD), threaded=False)
    group = Group(0, ("gradient",), (torch.zeros(64),))
    start = time.monotonic()
    try:
        lane.run(take_step(DifferentMessages(), group, lane.comm))
        dist.barrier()
    except RuntimeError as error:
        assert time.monotonic() - start < 20
        return str(error)
    return ""


def test_messages_that_differ_end_by_the_time_limit(ranks: Ranks) -> None:
    """In the simulated network the same mistake is an assertion that names both (test_simulation)."""
    assert any(ranks.run(disagree, 2, timeout_s=40))


def outlive(rank: int, size: int) -> list[str]:
    """What a rank hears of messages to one that has gone: of the first when it is waited for, of others at once."""
    dist.init_process_group("gloo")
    comm, errors = TorchComm(dist.group.WORLD), []
    for launch in (comm.all_reduce, comm.shift, comm.shift) if rank == 0 else ():
        with pytest.raises(RuntimeError) as failed:
            launch(torch.zeros(8)).wait()
        errors.append(str(failed.value))
    return errors


def test_a_message_to_a_rank_that_has_gone_says_so(ranks: Ranks) -> None:
    errors, _ = ranks.run(outlive, 2)
    assert len(errors) == 3
    assert all(error.startswith("a message among the ranks failed: ") for error in errors), errors


def test_traffic_of_an_unknown_message_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown message 'gossip'"):
        traffic("gossip", 10, 2)


def fail_on_one(rank: int, size: int) -> Any:
    if rank == 1:
        raise RuntimeError("as it should")
    time.sleep(60)


def test_the_harness_reports_a_failing_rank_at_once(ranks: Ranks) -> None:
    start = time.monotonic()
    with pytest.raises(AssertionError, match="as it should"):
        ranks.run(fail_on_one, 2)
    assert time.monotonic() - start < 20
