"""Whatever two streams do to the same memory of a device is ordered by an event; see tests.support.happens_before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.checkpoint import residuals
from lightning_sparse.checkpoint.parts import Parts
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.gradients import GradientExchange
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.engine.second_moments import EVERY
from lightning_sparse.wire import WIRE_DTYPES
from tests.engine.test_nobody_waits import Scaler
from tests.support.fake_cuda import DEVICE, Event, Stream, place, unavailable_reason
from tests.support.fake_nccl import FakeNccl, Work
from tests.support.happens_before import HappensBefore
from tests.support.on_fake_cuda import (
    COMPRESSORS,
    LOCAL_SETTINGS,
    Training,
    gradients,
    local_steps,
    nodes,
    on_fake_cuda,
    parameters,
    watched,
)

reason = unavailable_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")

SMALL = 2_000  # bytes of a group: a bucket of DDP has groups of both lanes

Make = Callable[[FakeNccl, dict[str, Tensor]], Exchange]
Between = Callable[[Any, FakeNccl, dict[str, Tensor]], None]


def nothing(exchange: Any, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
    """Between steps."""


def unordered(make: Make, steps: int = 5, between: Between = nothing, adam: bool = False) -> list[str]:
    """Pairs of accesses that nothing orders, in some steps with ``between`` in their middle, and in closing."""
    with on_fake_cuda(HappensBefore()) as (cuda, nccl):
        assert isinstance(cuda, HappensBefore)
        cuda.sees = 5.0
        of = parameters()
        exchange = make(nccl, of)
        training = Training(exchange, of, adam=adam)
        for step in range(steps):
            if step == steps // 2:
                between(exchange, nccl, of)
            training.step()
        between(exchange, nccl, of)
        exchange.close()
        assert cuda.accesses > 20 * steps
        return cuda.unordered


@pytest.mark.parametrize("wire_dtype", ["float32", "bfloat16", "int4"])
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_a_step_is_ordered(compressor: ls.Compressor, wire_dtype: str) -> None:
    assert unordered(lambda nccl, of: gradients(nccl, of, compressor, wire_dtype, bucket_bytes=SMALL)) == []


@pytest.mark.parametrize("wire_dtype", [str(each) for each in WIRE_DTYPES])
def test_a_step_in_every_format_is_ordered(wire_dtype: str) -> None:
    assert unordered(lambda nccl, of: gradients(nccl, of, ls.Dense(), wire_dtype, bucket_bytes=SMALL)) == []


def scaled(nccl: FakeNccl, of: dict[str, Tensor]) -> Exchange:
    return gradients(nccl, of, ls.MomentumCorrection(0.9, ls.TopK()), "int4", scaler=Scaler(), bucket_bytes=SMALL)


def test_a_step_with_a_loss_scale_is_ordered_and_so_is_one_that_is_undone() -> None:
    assert unordered(scaled) == []  # the host sees that each has overflowed


def test_a_step_whose_sums_lie_in_ddp_s_buckets_is_ordered() -> None:
    def make(nccl: FakeNccl, of: dict[str, Tensor]) -> Exchange:
        exchange = gradients(nccl, of, ls.Dense(), may_sum_in_place=True)
        exchange.nothing_unsent = True
        return exchange

    assert unordered(make) == []


def test_a_step_that_is_watched_and_recorded_is_ordered() -> None:
    def look(exchange: GradientExchange, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
        assert exchange.sample is not None
        exchange.sample.waiting()
        exchange.sample.age()
        exchange.delivered()
        exchange.unsent_norm()

    assert unordered(watched, between=look) == []


def test_other_groups_and_a_checkpoint_are_ordered() -> None:
    def other_plan(exchange: GradientExchange, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
        for kept in ("per_rank", "mean"):
            residuals.gather(exchange, kept, nccl.comm(), "TopK()", {}, Parts((), None, torch.nn.Module(), False), True)
        groups = lay_out(of, ls.TopK(), "none" if len(exchange.groups) < len(of) else "bucket")
        exchange.lay_out(groups)

    assert (
        unordered(lambda nccl, of: gradients(nccl, of, ls.TopK(), "int4", bucket_bytes=SMALL), between=other_plan) == []
    )


@pytest.mark.parametrize("make", [gradients, local_steps])
def test_another_engine_in_the_place_of_one_is_ordered(make: Any) -> None:
    with on_fake_cuda(HappensBefore()) as (cuda, nccl):
        of = parameters()
        before = make(nccl, of, ls.TopK(), "int4")
        training = Training(before, of)
        for _ in range(3):
            training.step()
        after = make(nccl, of, ls.Dense(), "int4")
        before.settle()
        after.take_over(before, memories=False)
        before.close()
        del before, training
        training = Training(after, of)
        for _ in range(3):
            training.step()
        assert isinstance(cuda, HappensBefore)
        assert cuda.unordered == []


@pytest.mark.parametrize("leader", [True, False])
def test_a_step_of_nodes_is_ordered(leader: bool) -> None:
    assert unordered(lambda nccl, of: nodes(nccl, of, leader, scaler=Scaler())) == []


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("compressor", [ls.Dense(), ls.TopK(), ls.LowRank(), ls.MiCRO(density=0.01)], ids=repr)
def test_local_steps_are_ordered(compressor: ls.Compressor, overlap: bool) -> None:
    def make(nccl: FakeNccl, of: dict[str, Tensor]) -> Exchange:
        return watching(local_steps(nccl, of, compressor, "int4", overlap=overlap, outer_momentum=0.5))

    assert unordered(make, 2 * EVERY + 3, evaluate) == []


def evaluate(exchange: LocalExchange, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
    exchange.show_average()
    for p in of.values():
        p.sum()
    exchange.compare()


@pytest.mark.parametrize("wire_dtype", ["int2", "sign"])
@pytest.mark.parametrize("settings", LOCAL_SETTINGS, ids=repr)
def test_local_steps_with_adam_are_ordered(settings: dict[str, Any], wire_dtype: str) -> None:
    """Before each of its steps the second moments of the ranks' gradients are looked at, and after it compared."""

    def make(nccl: FakeNccl, of: dict[str, Tensor]) -> Exchange:
        return local_steps(nccl, of, ls.Dense(), wire_dtype, **settings)

    def evaluate_and_save(exchange: LocalExchange, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
        exchange.state()
        evaluate(exchange, nccl, of)

    assert unordered(make, 7, evaluate_and_save, adam=True) == []


def watching(exchange: LocalExchange) -> LocalExchange:
    """Have an exchange tell other ranks of a tensor that no optimizer trains."""
    running = torch.zeros(8, device=DEVICE)
    exchange.untrained.watched["running mean"] = lambda: running
    exchange.untrained.begin()
    return exchange


def make_local(nccl: FakeNccl, of: dict[str, Tensor]) -> Exchange:
    return watching(local_steps(nccl, of, ls.TopK(), "int4"))


WAITS: list[tuple[type, str, str, Make, Between]] = [
    (Stream, "wait_stream", "engine/lane.py wait_for_caller", make_local, nothing),
    (Stream, "wait_stream", "engine/lane.py have_caller_wait", make_local, lambda e, *_: e.compare()),
    (Stream, "wait_stream", "engine/lane.py wait_for_caller", scaled, nothing),
    (Stream, "wait_stream", "engine/lane.py have_caller_wait", scaled, nothing),
    (Work, "wait", "network/torch_comm.py wait", scaled, nothing),
    (Event, "synchronize", "kernels/host_copy.py read", scaled, nothing),
]


@pytest.mark.parametrize(("of", "name", "at", "make", "between"), WAITS, ids=[at for _, _, at, _, _ in WAITS])
def test_each_wait_is_missed(
    of: type, name: str, at: str, make: Make, between: Between, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait, left_out = getattr(of, name), []

    def waits(self: Any, *arguments: Any) -> Any:
        if place() == at:
            left_out.append(at)
            return None
        return wait(self, *arguments)

    monkeypatch.setattr(of, name, waits)
    assert unordered(make, 2 * EVERY + 3, between) != []
    assert left_out
