"""Dense sums where DDP has the gradients: as plain DDP and PyTorch's hook do it; on real processes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.bench.compare.strategies import bf16_hook
from lightning_sparse.compressors.wrappers import Rounded
from lightning_sparse.engine import groups
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.network import costs
from tests.support.models import weights
from tests.support.processes import Ranks

SHAPE = (200, 50)  # large enough not to go to all ranks in one hop
LR = 0.003  # of two layers, which diverge sooner than one


def layer() -> DistributedDataParallel:
    torch.manual_seed(0)
    return DistributedDataParallel(nn.Linear(*SHAPE))


def two_layers(bucket_cap_mb: float = 25, views: bool = False) -> DistributedDataParallel:
    """A model of four parameters, each of which may be a bucket."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(*SHAPE), nn.Linear(SHAPE[1], SHAPE[1]))
    return DistributedDataParallel(model, bucket_cap_mb=bucket_cap_mb, gradient_as_bucket_view=views)


def step(ddp: DistributedDataParallel, rank: int, number: int, lr: float = 0.1) -> None:
    generator = torch.Generator().manual_seed(100 * rank + number)
    ddp.zero_grad()
    ddp(torch.randn(4, SHAPE[0], generator=generator)).square().sum().backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter -= lr * parameter.grad


def trained(rank: int, size: int, bucket_cap_mb: float, message_bytes: int) -> Any:
    groups.MESSAGES = 2**20  # so that ``message_bytes`` decides
    plain, ours, again = two_layers(), two_layers(bucket_cap_mb), two_layers(bucket_cap_mb, views=True)
    hook = ls.SparseHook(ours, "sparse_dense")
    hook.averager.in_place.may = True
    hook.averager.lanes.set_latencies(*hook.averager.lanes.latencies[:2], message_bytes)
    whole = []
    for number in range(6):
        sent_before = hook.averager.lanes[0].comm.messages
        step(plain, rank, number, LR)
        step(ours, rank, number, LR)
        whole.append(hook.averager.nothing_unsent)
        if number == 2:
            saved, kept = [hook.state_dict()], ours.state_dict()
            dist.broadcast_object_list(saved)
            again.load_state_dict(kept)
            resumed = ls.SparseHook(again, "sparse_dense")
            resumed.averager.in_place.may = True
            resumed.load_state_dict(saved[0])
        if number > 2:
            step(again, rank, number, LR)
    report, messages = hook.averager.last, hook.averager.lanes[0].comm.messages - sent_before
    results = weights(plain), weights(ours), weights(again), whole, report.sent_bytes, hook.averager.steps, messages
    resumed.close()
    hook.close()
    return results


@pytest.mark.parametrize(
    ("bucket_cap_mb", "message_bytes", "expected"), [(25, 25 << 20, 1), (1e-4, 25 << 20, 2), (1e-4, 100, 4)]
)
def test_it_is_plain_ddp_but_for_the_order_of_sums(
    ranks: Ranks, bucket_cap_mb: float, message_bytes: int, expected: int
) -> None:
    """The first bucket travels alone, as DDP's; later ones travel together, up to so many bytes."""
    every = ranks.run(trained, 3, bucket_cap_mb, message_bytes, gloo=True)
    for plain, ours, resumed, whole, sent_bytes, steps, messages in every:
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(ours, resumed, rtol=1e-3, atol=1e-4)
        assert torch.equal(ours, every[0][1])
        assert all(whole)
        assert sent_bytes == pytest.approx(2 * 2 / 3 * 4 * (sum(SHAPE) + 2) * SHAPE[1], abs=16)
        assert steps == 6
        assert messages == expected


def rounded_then_exact(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """The sum of all means, and of all gradients of this rank, where int4 makes way for float32."""
    ddp = layer()
    hook = ls.SparseHook(ddp, Rounded(ls.Dense(), "int4"), wire_dtype="float32", fusion="bucket")
    hook.averager.in_place.may = True
    means, own = torch.zeros(SHAPE[1]), torch.zeros(SHAPE[1])
    for number in range(8):
        if number == 4:
            assert hook.layer_fusion is None
            before = hook.averager.groups
            after = lay_out(dict(ddp.module.named_parameters()), ls.Dense(), "bucket", 25 << 20)
            after[0][0].unsent.copy_(before[0].unsent)
            hook.averager.lay_out(after)
        generator = torch.Generator().manual_seed(100 * rank + number)
        ddp.zero_grad()
        factor = torch.randn(SHAPE[1], generator=generator)
        (ddp(torch.zeros(1, SHAPE[0])) * factor).sum().backward()
        own += factor
        means += ddp.module.bias.grad
        assert hook.averager.nothing_unsent == (number >= 4)
    hook.close()
    return means, own


def test_what_rounding_left_is_sent_before_sums_are_in_place(ranks: Ranks) -> None:
    results = ranks.run(rounded_then_exact, 3, gloo=True)
    torch.testing.assert_close(3 * results[0][0], sum(own for _, own in results))


def after_int4(rank: int, size: int) -> tuple[list[torch.dtype | None], list[bool], list[bool], list[int]]:
    """Of each step of sums in bfloat16 after int4: in place or not, as with PyTorch's hook, unsent, bytes."""
    ours, hooked = layer(), layer()
    hook = ls.SparseHook(ours, Rounded(ls.Dense(), "int4"), wire_dtype="float32", fusion="bucket")
    hook.averager.in_place.may = True
    hooked.register_comm_hook(None, bf16_hook)
    found = []
    for number in range(7):
        if number == 1:
            after = lay_out(dict(ours.module.named_parameters()), Rounded(ls.Dense(), "bfloat16"), "bucket", 25 << 20)
            after[0][0].unsent.copy_(hook.averager.groups[0].unsent)
            hook.averager.lay_out(after)
        if number == 4:
            hook.averager.defer(True)
        elif number == 5:
            hook.averager.defer(False)
        hooked.load_state_dict(ours.state_dict())
        step(ours, rank, number)
        step(hooked, rank, number)
        averager = hook.averager
        as_hooked = torch.equal(weights(ours), weights(hooked))
        found.append((averager._step.in_place, as_hooked, averager.unsent_norm() > 0, averager.last.sent_bytes))
    hook.close()
    return tuple(map(list, zip(*found, strict=True)))


def test_bfloat16_is_summed_as_by_pytorchs_hook_once_nothing_is_unsent(ranks: Ranks) -> None:
    """And in groups, with rounding errors that are kept, while backward is timed alone."""
    for in_place, as_hooked, is_unsent, sent_bytes in ranks.run(after_int4, 3, gloo=True):
        rounded = torch.bfloat16
        assert in_place == [None, None, rounded, rounded, None, None, rounded]
        assert is_unsent == [True, False, False, False, True, False, False]
        assert [x for x, place in zip(as_hooked, in_place, strict=True) if place] == [True, True, True]
        elements = (SHAPE[0] + 1) * SHAPE[1]
        assert sent_bytes[1] == pytest.approx(2 * 2 / 3 * 4 * elements, abs=8)
        assert sent_bytes[2] == pytest.approx(2 * 2 / 3 * 2 * elements, abs=4)


class StartsEmpty(nn.Module):
    """A layer after a parameter without elements, whose gradient arrives last."""

    def __init__(self) -> None:
        super().__init__()
        self.empty, self.layer = nn.Parameter(torch.zeros(0)), nn.Linear(*SHAPE)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.empty.sum()).square().sum()


def with_an_empty_bucket(rank: int, size: int) -> list[Tensor]:
    """Train a model whose last bucket has no elements, in bfloat16 where DDP has it, and after the hook was closed."""
    costs.MOST_MESSAGE_BYTES = 50  # so that it is sent alone
    torch.manual_seed(0)
    model = StartsEmpty()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4)
    hook = ls.SparseHook(ddp, Rounded(ls.Dense(), "bfloat16"), wire_dtype="float32", fusion="bucket")
    hook.averager.in_place.may = True
    used = []
    for number in range(4):
        generator = torch.Generator().manual_seed(100 * rank + number)
        ddp.zero_grad()
        ddp(torch.randn(4, SHAPE[0], generator=generator)).backward()
        used.append(hook.averager._step.in_place)
    assert used[1:] == 3 * [torch.bfloat16]
    hook.averager.lanes[0].close()
    with pytest.raises(RuntimeError, match="was closed"):
        ddp(torch.randn(4, SHAPE[0])).backward()
    return [parameter.grad for parameter in model.parameters()]


def test_a_bucket_without_elements_and_a_closed_hook(ranks: Ranks) -> None:
    first, *others = ranks.run(with_an_empty_bucket, 2, gloo=True)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(
    ("latency_s", "on_processor", "seconds"), [(1e-4, False, 3e-4), (1e-4, True, 0.025), (0.02, True, 0.06)]
)
def test_a_message_is_long_beside_its_latency_and_beside_its_work_where_a_processor_trains(
    latency_s: float, on_processor: bool, seconds: float
) -> None:
    link = costs.Link(latency_s, 1e-8, latency_s)  # of 800 Mbit/s
    *_, payload_bytes = link.latencies(4, on_processor)
    assert costs.traffic("all_reduce", payload_bytes, 4) * link.s_per_byte == pytest.approx(seconds, rel=0.1)
