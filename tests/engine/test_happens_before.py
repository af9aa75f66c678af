"""Whatever two streams do to the same memory of a device is ordered by an event; see tests.support.happens_before.

Of steps tests.engine.test_nobody_waits shows it; here, of what is done between them, and that each wait is missed.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.checkpoint import residuals
from lightning_sparse.checkpoint.rank_local import RankLocalState
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.local_steps.second_moments import EVERY
from lightning_sparse.network import process_groups
from tests.support.fake_cuda import DEVICE, Event, Stream, place, unavailable_reason
from tests.support.fake_nccl import FakeNccl, Work
from tests.support.happens_before import HappensBefore
from tests.support.on_fake_cuda import (
    SMALL,
    Between,
    Make,
    Scaler,
    ShardedTraining,
    Training,
    evaluate,
    gradients,
    local_steps,
    nothing,
    on_fake_cuda,
    parameters,
    train,
    watching,
)

reason = unavailable_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")


def unordered(make: Make, steps: int = 5, between: Between = nothing) -> list[str]:
    """Pairs of accesses that nothing orders, in some steps with ``between`` in their middle, and in closing."""
    return train(make, steps, between)[1]


def scaled(nccl: FakeNccl, of: dict[str, Tensor]) -> Averager:
    return gradients(nccl, of, ls.MomentumCorrection(0.9, ls.TopK()), "int4", scaler=Scaler(), bucket_bytes=SMALL)


def test_other_groups_and_a_checkpoint_are_ordered() -> None:
    def other_plan(averager: GradientAverager, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
        for kept in ("per_rank", "mean"):
            residuals.gather(
                averager,
                kept,
                process_groups.Between(comm := nccl.comm(), None, comm),
                "TopK()",
                {},
                RankLocalState((), None, torch.nn.Module(), False),
                True,
            )
        groups = lay_out(of, ls.TopK(), "none" if len(averager.groups) < len(of) else "bucket")
        averager.lay_out(groups)

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


def make_local(nccl: FakeNccl, of: dict[str, Tensor]) -> Averager:
    return watching(local_steps(nccl, of, ls.TopK(), "int4"))


def test_what_no_optimizer_trains_is_compared_in_order() -> None:
    assert unordered(make_local, EVERY + 3, evaluate) == []


def sharded_unordered(batches: int, dtype: torch.dtype = torch.float32) -> list[str]:
    """Pairs of accesses that nothing orders, in steps of a sharded model of which a rank skips a layer each time."""
    with on_fake_cuda(HappensBefore()) as (cuda, nccl):
        assert isinstance(cuda, HappensBefore)
        of = parameters()
        training = ShardedTraining(
            gradients(nccl, of, ls.TopK(), "int4", bucket_bytes=SMALL, may_be_unused=True), of, dtype
        )
        for step in range(6):
            training.step(skips=step % 4 - 1, batches=batches)
        training.averager.close()
        return cuda.unordered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batches", [1, 2])
def test_a_sharded_model_that_skips_layers_is_ordered(batches: int, dtype: torch.dtype) -> None:
    assert sharded_unordered(batches, dtype) == []


@pytest.mark.parametrize("forgets", [False, True])
def test_what_is_asked_within_a_step_is_ordered(forgets: bool) -> None:
    """Also where nobody looks at the answer."""
    with on_fake_cuda(HappensBefore()) as (cuda, nccl):
        assert isinstance(cuda, HappensBefore)
        averager = gradients(nccl, parameters(), ls.TopK(), "int4")
        answer = averager.lanes.run_message_beside(lambda comm: comm.all_reduce(torch.ones(5, device=DEVICE)))
        if not forgets:
            assert answer.result().tolist()
        del answer
        torch.ones(5, device=DEVICE)
        assert cuda.unordered == []


WAITS: list[tuple[type, str, str, Make, Between]] = [
    (Stream, "wait_stream", "engine/lanes.py wait_for_caller", scaled, nothing),
    (Work, "wait", "network/torch_comm.py wait", scaled, nothing),
    (Event, "synchronize", "compressors/group.py read", scaled, nothing),
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
    assert unordered(make, 5, between) != []
    assert left_out
