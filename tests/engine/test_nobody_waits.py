"""No step of a training waits for the device, but where ``docs/internals.md`` says so, and what its streams do to the
same memory is ordered: on a fake device, of which nothing is known but shapes, every look at data and every access is
noted.
"""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

import lightning_sparse as ls
from lightning_sparse.checkpoint import residuals
from lightning_sparse.checkpoint.rank_local import RankLocalState
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.groups import make_groups, pieces_of
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.kernels import select
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.local_steps.second_moments import EVERY
from lightning_sparse.monitor.record import delivered_by
from lightning_sparse.network.process_groups import Between as Whom
from lightning_sparse.wire import WIRE_DTYPES
from tests.support.buckets import Bucket
from tests.support.fake_cuda import DEVICE, unavailable_reason
from tests.support.fake_nccl import FakeNccl
from tests.support.on_fake_cuda import (
    COMPRESSORS,
    LOCAL_SETTINGS,
    SMALL,
    Make,
    Scaler,
    Training,
    evaluate,
    gradients,
    local_steps,
    members,
    on_fake_cuda,
    parameters,
    train,
    watched,
    watching,
)

#: Where the host may wait for the device: the function that does, and what docs/internals.md says of it.
MAY_WAIT = {
    "compressors/micro.py reduce": "`micro`, in the first step and where its threshold was lost",
    "engine/inside.py mean_of_slices": "a rank that did not use",
    "compressors/wrappers.py _shrunk": "`MomentumCorrection(clip_norm=...)`, in every step",
    "local_steps/untrained.py end": "every 10 steps, to see whether what no optimizer trains has changed",
    "local_steps/buffers.py _compared": "every 10 steps, and in the second step after the "
    "average was shown, to see which",
    "local_steps/buffers.py _note_what_was_set": "where the average was shown, to see whether somebody changed it",
    "local_steps/weights.py _take_over": "where the average was shown, to see whether somebody changed it",
    "compressors/group.py read": "what is unsent after a step with a loss scale, asked between two steps",
    "engine/observers.py waiting": "how long gradients wait",
    "monitor/record.py delivered_by": "how long gradients wait",
    "engine/averager.py unsent_norm": "how long gradients wait",
    "local_steps/averager.py metrics": "by how much Adam's steps are shorter",
    "engine/timeline.py _between_s": "when groups were averaged",
    "checkpoint/residuals.py zero_everywhere": "a checkpoint",
    "network/torch_comm.py gather": "a checkpoint",
    "network/torch_comm.py mean": "a checkpoint",
}

EVERY_TEN_STEPS = {place for place, why in MAY_WAIT.items() if why.startswith("every 10 steps")}
AFTER_THE_AVERAGE = {place for place, why in MAY_WAIT.items() if "where the average was shown" in why}

FORMATS = [str(each) for each in WIRE_DTYPES]

reason = unavailable_reason()
pytestmark = pytest.mark.skipif(reason is not None, reason=reason or "")


def waits(make: Make, *arguments: Any, **options: Any) -> list[set[str]]:
    """Where the host waits, in each step of a training in which everything is ordered."""
    found, unordered = train(make, *arguments, **options)
    assert unordered == []
    return found


def test_a_look_at_data_is_noted() -> None:
    looks: list[Callable[[Tensor], object]] = [
        bool, float, Tensor.item, lambda x: x.expand(3).tolist(), Tensor.cpu, Tensor.nonzero, lambda x: x.to("cpu"),
        lambda x: torch.equal(x, x), lambda x: torch.ones(3).to(DEVICE), lambda x: torch.cuda.synchronize(),
        lambda x: x.expand(3)[x.expand(3) > 0], lambda x: torch.cuda.current_stream().synchronize(),
    ]  # fmt: skip
    for look in looks:
        with on_fake_cuda() as (cuda, _):
            look(torch.ones((), device=DEVICE))
            assert cuda.waits
    with on_fake_cuda() as (cuda, _):
        x = torch.ones(3, device=DEVICE)
        torch.ones(3).to(DEVICE, non_blocking=True)
        select(x, x.sum(), 3).index.clamp(max=2)
        torch.empty(3).copy_(x, non_blocking=True)
        assert cuda.waits == []


# Each compressor in a format, so that each format is of sums and of messages of elements.
IN_FORMATS = [
    *zip(COMPRESSORS, itertools.cycle(FORMATS), strict=False),
    *[(ls.Dense(), wire_dtype) for wire_dtype in FORMATS[1::2]],
]


@pytest.mark.parametrize(("compressor", "wire_dtype"), IN_FORMATS, ids=repr)
def test_nobody_waits_in_a_step(compressor: ls.Compressor, wire_dtype: str) -> None:
    found = waits(lambda nccl, of: gradients(nccl, of, compressor, wire_dtype, bucket_bytes=SMALL))
    assert set().union(*found) <= may_wait(compressor)


def may_wait(compressor: ls.Compressor) -> set[str]:
    return {"compressors/micro.py reduce"} if isinstance(compressor, ls.MiCRO) else set()


def test_nobody_waits_for_sums_in_one_hop_two_hops_and_many_segments() -> None:
    shapes = {"small": (100,), "middle": (100, 1000), "large": (3000, 3000)}
    assert not set().union(*waits(lambda nccl, of: gradients(nccl, of, ls.Dense(), "int4"), 3, shapes=shapes))


@pytest.mark.parametrize(
    "compressor", [ls.LowRank(), ls.MiCRO(density=0.01), ls.MomentumCorrection(0.9, ls.TopK())], ids=repr
)
def test_nobody_waits_with_a_loss_scale(compressor: ls.Compressor) -> None:
    """Also in a step that is undone: the host sees that each has overflowed."""
    found = waits(lambda nccl, of: gradients(nccl, of, compressor, "int4", scaler=Scaler(), bucket_bytes=SMALL))
    assert set().union(*found) <= may_wait(compressor)


def test_nobody_waits_for_what_may_be_unused() -> None:
    def make(nccl: FakeNccl, of: dict[str, Tensor]) -> Averager:
        for p in of.values():
            p.requires_grad_()
        return gradients(nccl, of, ls.TopK(), "int4", may_be_unused=True)

    assert not set().union(*waits(make))


@pytest.mark.parametrize("keeps_order", [True, False])
@pytest.mark.parametrize(("compressor", "wire_dtype"), IN_FORMATS[::3], ids=repr)
def test_nobody_waits_with_members_of_several_ranks(
    compressor: ls.Compressor, wire_dtype: str, keeps_order: bool
) -> None:
    found = waits(lambda nccl, of: members(nccl, of, compressor, wire_dtype, scaler=Scaler(), keeps_order=keeps_order))
    assert set().union(*found) <= may_wait(compressor)


@pytest.mark.parametrize("uses_all", [True, False])
def test_nobody_waits_with_members_for_what_this_rank_has_used(uses_all: bool) -> None:
    def make(nccl: FakeNccl, of: dict[str, Tensor]) -> Averager:
        for p in of.values():
            p.requires_grad_()
        averager = members(nccl, of, ls.TopK(), "int4", may_be_unused=True)
        assert averager._used is not None
        if uses_all:
            note = averager._used.end_step
            averager._used.end_step = lambda: (note(), averager._used.note(of.values()))  # type: ignore[method-assign]
            averager._used.note(of.values())
        return averager

    assert set().union(*waits(make)) == (set() if uses_all else {"engine/inside.py mean_of_slices"})


def test_nobody_waits_to_sum_in_ddp_s_buckets() -> None:
    def make(nccl: FakeNccl, of: dict[str, Tensor]) -> Averager:
        averager = gradients(nccl, of, ls.Dense(), may_sum_in_place=True)
        averager.nothing_unsent = True
        return averager

    assert not set().union(*waits(make))


def test_nobody_waits_to_watch_what_is_unsent_or_to_time_a_step() -> None:
    def look(averager: GradientAverager, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
        assert averager.sample is not None
        averager.sample.waiting()
        averager.sample.waits_and_arrives()
        delivered_by(averager)
        averager.unsent_norm()

    assert not set().union(*waits(watched, between=look))


@pytest.mark.parametrize("members", [{}, {"of_members": True}, {"of_members": True, "keeps_order": False}])
@pytest.mark.parametrize(("compressor", "overlap"), [(ls.Dense(), False), (ls.TopK(), True)], ids=repr)
def test_local_steps_wait_every_ten_steps(compressor: ls.Compressor, overlap: bool, members: dict[str, bool]) -> None:
    def make(nccl: FakeNccl, of: dict[str, Tensor]) -> Averager:
        return local_steps(nccl, of, compressor, "int4", overlap=overlap, outer_momentum=0.5, **members)

    found = [step - may_wait(compressor) for step in waits(make, EVERY + 3)]
    assert set().union(*found) == EVERY_TEN_STEPS
    assert sum(bool(step) for step in found) <= 2  # of 13: one to send, the next to read what arrived


ADAM = [
    *[({}, wire_dtype, torch.float32) for wire_dtype in FORMATS],
    *[
        (settings, wire_dtype, torch.bfloat16)
        for settings, wire_dtype in zip(LOCAL_SETTINGS, FORMATS[-4:], strict=True)
    ],
]


@pytest.mark.parametrize(("settings", "wire_dtype", "dtype"), ADAM, ids=repr)
def test_local_steps_in_every_format_and_setting_wait_no_more_with_adam(
    settings: dict[str, Any], wire_dtype: str, dtype: torch.dtype
) -> None:
    """Whose second moments are looked at before and compared after each of these steps."""

    def make(nccl: FakeNccl, of: dict[str, Tensor]) -> Averager:
        return local_steps(nccl, of, ls.Dense(), wire_dtype, **settings)

    def evaluate_and_save(averager: LocalAverager, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
        averager.state()
        evaluate(averager, nccl, of)

    steps = 7 if settings else 5
    found = waits(make, steps, evaluate_and_save, dtype=dtype, adam=True)
    after = found.pop(steps // 2 + 1)
    shown = [found.pop(steps // 2), found.pop(0)]  # a training begins with the average shown
    assert set().union(*shown) <= AFTER_THE_AVERAGE
    assert after <= {"local_steps/buffers.py _compared"}
    assert set().union(*found) == set()


def test_who_asks_between_steps_waits_as_the_documentation_says() -> None:
    with on_fake_cuda() as (cuda, nccl):
        of = parameters()
        averager = gradients(nccl, of, ls.TopK(), "int4", scaler=Scaler())
        averager.watch_unsent()
        training = Training(averager, of)
        cuda.waits.clear()
        training.step()
        assert cuda.waits == []
        assert averager.sample is not None
        averager.sample.waiting()
        delivered_by(averager)
        averager.unsent_norm()
        averager.timeline.group_times(averager.groups)
        comm = nccl.comm()
        for kept in ("per_rank", "mean"):
            residuals.gather(
                averager,
                kept,
                Whom(comm, None, comm),
                "TopK()",
                {},
                RankLocalState((), None, torch.nn.Module(), False),
                True,
            )
        assert set(cuda.waits) <= set(MAY_WAIT)
        cuda.waits.clear()
        training.step()
        assert cuda.waits == []


@pytest.mark.parametrize(
    ("settings", "dtype"),
    [
        ({"error_decay": 0.95}, torch.float64),
        ({"error_decay": 0.95}, torch.bfloat16),
        ({"outer_momentum": 0.9}, torch.float32),
    ],
    ids=repr,
)
def test_what_a_checkpoint_has_on_the_cpu_goes_on_on_a_device(settings: dict[str, Any], dtype: torch.dtype) -> None:
    """So does what is saved after a fit, when Lightning has moved the model to the CPU."""
    with on_fake_cuda() as (_, nccl):
        of = parameters(dtype=dtype)

        def trained(
            steps: int, state: dict[str, Any] | None = None, kept: Iterable[Group] = ()
        ) -> tuple[LocalAverager, dict[str, Any]]:
            averager = watching(local_steps(nccl, of, ls.TopK(), "int4", **settings))
            training = Training(averager, of, adam=True)
            if state is not None:
                for group, old in zip(averager.groups, kept, strict=False):  # other types than float32 are on the CPU
                    group.memory = {key: residuals._beside(x.cpu(), DEVICE) for key, x in old.memory.items()}
                averages = {name: x.to(DEVICE) for name, x in state["averages"].items()}
                averager.unpack(EVERY, of, averages, late=True)
                averager.resume(state, None if averager.sampled is None else torch.zeros(averager.sampled.shape))
            for _ in range(steps):
                training.step()
            return averager, tree_map_only(Tensor, lambda x: x.cpu(), averager.state())

        averager, state = trained(EVERY)
        state["seen"] = {"running mean": torch.zeros((), dtype=torch.int64)}  # which has not changed
        resumed, _ = trained(1, state, averager.kept())
        evaluate(resumed, nccl, of)
        averager.show_average()
        for group in averager.groups:
            group.parameters = tuple(p.cpu() for p in group.parameters)
        averager.state()
        assert len(list(averager.kept())) == len(averager.groups)


def test_the_documentation_lists_what_waits() -> None:
    text = " ".join((Path(__file__).parents[2] / "docs" / "internals.md").read_text().split())
    assert not [why for why in MAY_WAIT.values() if why not in text]


# - a step with a loss scale that is settled later, with values on a CPU


def scaled(later: bool) -> list[Tensor]:
    """What buckets and groups hold after steps of which two overflowed, on one rank."""
    from lightning_sparse.network.simulated import SimNetwork

    class Doubled:
        def scale(self, x: Tensor) -> Tensor:
            return 2 * x

    parameters = {"a": torch.zeros(40, 5), "b": torch.zeros(7)}
    compressor = ls.MomentumCorrection(0.5, ls.TopK(density=0.3))
    groups: list[tuple[Group, ls.Compressor]] = make_groups(
        parameters, compressor, [[piece] for piece in pieces_of(parameters, compressor)]
    )
    comm = SimNetwork(1).comms[0]
    averager = GradientAverager(groups, [comm], threaded=False, scaler=Doubled())  # type: ignore[arg-type]
    averager._knows_later = later
    averager.watch_unsent()
    averager.record_gradients(50)
    held = []
    for step in range(6):
        bucket = Bucket(list(parameters.values()))
        if step in (1, 4):
            bucket.buffer()[3] = torch.inf
        held.append(averager.hook(None, bucket).wait().clone())  # type: ignore[arg-type]
        if step in (3, 4):
            held += [group.unsent.clone() for group in averager.groups]
    assert averager.sample is not None
    record = averager.take_record()
    assert record is not None
    held += [torch.tensor([group.step for group in averager.groups]), record.gradients(), averager.sample._state]
    return held + [x for group in averager.groups for x in (group.unsent, *group.memory.values())]


def test_a_step_that_is_settled_later_is_undone_as_one_that_is_settled_at_once() -> None:
    at_once, later = scaled(False), scaled(True)
    assert len(at_once) == len(later)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(later, at_once, strict=True))
    assert at_once[1].isinf().all()
    assert not at_once[2].isinf().any()
