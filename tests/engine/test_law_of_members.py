"""Averaged gradients where members have several ranks: the law over members, and the same bits on all ranks."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeAlias, TypeVar

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.timeline import Timeline
from lightning_sparse.fusion import layer_fusion, planner
from lightning_sparse.fusion.layer_fusion import TRIAL
from lightning_sparse.fusion.link import measure_link
from lightning_sparse.fusion.model import StepModel
from lightning_sparse.fusion.steps import STEPS_MEASURED, typical_times
from lightning_sparse.hook import SparseHook
from lightning_sparse.network.members import Members
from lightning_sparse.network.simulated import same_bits
from lightning_sparse.options import Options
from lightning_sparse.simulation import simulate
from lightning_sparse.wire import WIRE_DTYPES
from tests.support.compressors import EVERY_COMPRESSOR, OTHERS
from tests.support.in_process import ThreadComm, ThreadDDP, ThreadGroup, ThreadGroups, ThreadRanks
from tests.support.simulated import assert_nothing_lost, normal

pytestmark = pytest.mark.filterwarnings("ignore:There is one rank, node or replica", "ignore:.*nothing is saved")
STEPS = 3
T = TypeVar("T")

MESHES = {
    "one member of four": [(0, 1, 2, 3)],
    "2x2": [(0, 1), (2, 3)],
    "4x1": [(0,), (1,), (2,), (3,)],
    "2x3": [(0, 1, 2), (3, 4, 5)],
    "three of two": [(0, 1), (2, 3), (4, 5)],
    "cyclic": [(0, 2), (1, 3)],
    "a second column that does not rise": [(0, 5), (1, 2), (3, 4)],
}
Shapes: TypeAlias = dict[str, tuple[int, ...]]
SHAPES: Shapes = {
    "matrix": (25, 24), "odd": (7, 3), "number": (), "row": (1, 5), "empty": (0, 2), "two": (2,), "cube": (5, 2, 3),
    "alone_number": (), "nothing_empty": (0,),
}  # fmt: skip
N = sum(torch.Size(shape).numel() for shape in SHAPES.values())
FUSION = ("alone*", "nothing*", "*")
KINDS: list[ls.Compressor] = [
    compressor
    for compressor in (each.values[0] for each in [*EVERY_COMPRESSOR, *OTHERS])
    if isinstance(compressor, ls.Compressor) and not isinstance(compressor, ls.MomentumCorrection)  # of velocities
]


class Given(nn.Module):
    """Parameters whose gradients are what it is fed, one after the other."""

    def __init__(self, shapes: Shapes) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.ones(shape)))

    def forward(self, x: Tensor) -> Tensor:
        parameters = list(self.parameters())
        parts = x.split([p.numel() for p in parameters])
        return torch.stack([(p.flatten() * part).sum() for p, part in zip(parameters, parts, strict=True)]).sum()


@pytest.fixture(scope="module")
def threads() -> Iterator[Callable[[int], ThreadRanks]]:
    """Ranks that are threads, so many of them, which the tests share."""
    made: dict[int, ThreadRanks] = {}

    def of(size: int) -> ThreadRanks:
        if size not in made or made[size].network.failed is not None:
            made[size] = ThreadRanks(size)
        return made[size]

    yield of
    for each in made.values():
        each.close()


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sparse.hook.TorchComm", ThreadComm)


class Training:
    """One rank's, of a model of parameters of these ``shapes``."""

    def __init__(self, group: ThreadGroup, members: Members, options: Options, shapes: Shapes, dtype: Any) -> None:
        ddp: Any = ThreadDDP(Given(shapes).to(dtype), group, buckets=1)
        groups: Any = ThreadGroups(group, members.ranks)
        self.ddp, self.hook = ddp, SparseHook.__new__(SparseHook)
        how = {"may_be_local": False, "evaluates": lambda module: not module.training}
        self.hook._put_on(ddp, options, None, groups, **how)

    def step(self, gradient: Tensor) -> Tensor:
        """The mean that all parameters get, [n]."""
        for p in self.ddp.parameters():
            p.grad = None
        self.ddp(gradient).backward()
        return torch.cat([p.grad.flatten() for p in self.ddp.parameters()])

    def groups(self) -> list[tuple[str, ...]]:
        """The names of the parameters in each group."""
        return [group.names for group in self.hook.averager.groups]


def on_all(
    ranks: ThreadRanks,
    members: Members,
    options: Options,
    act: Callable[[int, Training], T],
    shapes: Shapes = SHAPES,
    dtype: torch.dtype = torch.float32,
) -> list[T]:
    """What ``act`` returns of the training on each rank."""
    groups = [ranks.network.group(rank) for rank in range(ranks.size)]

    def on(rank: int) -> T:
        training = Training(groups[rank], members, options, shapes, dtype)
        found = act(rank, training)
        training.hook.close()
        training.ddp.close()  # type: ignore[operator]  # of threads
        return found

    return ranks.everywhere(on)


class Averaged(NamedTuple):
    """What came of T steps."""

    means: Tensor  # [T, P, n]
    unsent: Tensor  # by members after each step, [T, M, n]
    sent_bytes: Tensor  # [T, P]


def averaged(
    ranks: ThreadRanks, members: Members, options: Options, gradients: Tensor, shapes: Shapes = SHAPES
) -> Averaged:
    """Average ``gradients`` [T, P, n]."""

    def act(rank: int, training: Training) -> list[tuple[Tensor, Tensor, Tensor]]:
        of_steps = []
        for gradient in gradients[:, rank]:
            mean, report = training.step(gradient), training.hook.averager.last
            of_steps.append((mean, slices(training.hook), torch.tensor(report.sent_bytes if report else 0)))
        return of_steps

    every = on_all(ranks, members, options, act, shapes)
    means, kept, sent = (torch.stack([torch.stack([step[i] for step in each]) for each in every], 1) for i in range(3))
    return Averaged(means, torch.stack([kept[:, list(each)].sum(1) for each in members.ranks], 1), sent)


def slices(hook: SparseHook) -> Tensor:
    """What this rank has not sent, where its slices lie in all parameters, [n]; zeros elsewhere."""
    whole = {name: torch.zeros(p.shape) for name, p in hook._module.named_parameters()}
    for group in hook.averager.groups:
        for name, shape, slot in zip(group.names, group.shapes, group.slots(group.unsent), strict=True):
            group.cut.own(whole[name]).copy_(slot.view(shape))
    return torch.cat([x.flatten() for x in whole.values()])


def of_members(members: Members, gradients: Tensor) -> Tensor:
    """The mean over each member's ranks of ``gradients`` [T, P, n]: [T, M, n]."""
    return torch.stack([gradients[:, list(ranks)].mean(1) for ranks in members.ranks], 1)


def assert_law(members: Members, gradients: Tensor, found: Averaged) -> None:
    given = of_members(members, gradients)
    for step in range(len(gradients)):
        assert all(same_bits(mean, found.means[step, 0]) for mean in found.means[step])
        assert_nothing_lost(given[: step + 1], found.means[: step + 1, 0], found.unsent[step])


def _on_meshes() -> Iterator[Any]:
    """Each compressor on each mesh; of these two are enough for the short tests, one of them another each time."""
    for number, kind in enumerate(KINDS):
        for place, mesh in enumerate(MESHES):
            is_short = mesh == "2x2" or place == number % len(MESHES)
            marks = () if is_short else pytest.mark.programs
            yield pytest.param(mesh, number, marks=marks, id=f"{mesh}-{type(kind).__name__}")


@pytest.mark.parametrize(("mesh", "number"), _on_meshes())
def test_nothing_is_lost_over_members_and_all_ranks_have_the_same_bits(
    threads: Callable[[int], ThreadRanks], mesh: str, number: int
) -> None:
    """Each compressor with each format of values, on one mesh or another."""
    members = Members(tuple(MESHES[mesh]))
    ranks = threads(members.size * members.local_size)
    formats = list(WIRE_DTYPES)  # as many as meshes
    wire_dtype = formats[(list(MESHES).index(mesh) + number) % len(formats)]
    gradients = normal(STEPS, ranks.size, N)
    options = Options.of(KINDS[number], FUSION, wire_dtype=wire_dtype)
    assert_law(members, gradients, averaged(ranks, members, options, gradients))


@pytest.mark.parametrize("indices", ["int32", "block16", "bitmap", "elias_fano"])
def test_nothing_is_lost_however_indices_are_written(threads: Callable[[int], ThreadRanks], indices: str) -> None:
    members = Members(tuple(MESHES["three of two"]))
    gradients = normal(STEPS, 6, N)
    for kind in (ls.MiCRO, ls.TopK, ls.OkTopk, ls.ImportancePruning):
        options = Options.of(kind(density=0.2, indices=indices), FUSION)
        assert_law(members, gradients, averaged(threads(6), members, options, gradients))


@pytest.mark.parametrize("number", range(len(KINDS)), ids=[type(kind).__name__ for kind in KINDS])
def test_a_column_does_with_its_slice_what_as_many_ranks_do_with_a_gradient(
    threads: Callable[[int], ThreadRanks], number: int
) -> None:
    """The same bits, and as many bytes between members; and so a rank alone does what it did before there were any.

    What is simulated knows nothing of members.  The mean of two numbers is exact but for one rounding.
    """
    n, wire_dtype = 203, list(WIRE_DTYPES)[number % 7]
    for mesh in ("4x1", "2x2", "cyclic"):
        members = Members(tuple(MESHES[mesh]))
        gradients = normal(STEPS, 4, n)
        options = Options.of(KINDS[number], "none", wire_dtype=wire_dtype)
        found, given = averaged(threads(4), members, options, gradients, {"gradient": (n,)}), gradients
        if members.local_size > 1:
            given = torch.stack([gradients[:, a] / 2 + gradients[:, b] / 2 for a, b in members.ranks], 1)
        width = -(-n // members.local_size)
        for column, start in zip(members.columns, range(0, n, width), strict=True):
            of_column = slice(start, start + width)
            part = given[..., of_column].contiguous()
            expected = simulate(KINDS[number], part, torch.ones(part.shape[-1]), wire_dtype=wire_dtype)
            assert torch.equal(found.means[:, 0, of_column], expected.mean), mesh
            assert torch.equal(found.unsent[-1][:, of_column], expected.unsent), mesh
            assert torch.equal(found.sent_bytes[:, column], expected.sent_bytes), mesh


def test_what_a_rank_has_rounded_the_others_copy(
    threads: Callable[[int], ThreadRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks at the second place divide otherwise than those at the first, as other processors may."""
    hand_back = Group.hand_back

    def otherwise(group: Group, total: Any, gradients: Any, size: int) -> None:
        hand_back(group, total, gradients, size)
        for gradient in gradients if group.cut.index else ():
            gradient.add_(gradient.abs(), alpha=2**-7)

    gradients = normal(STEPS, 4, N).bfloat16()
    found = []
    for divides in (hand_back, otherwise):
        monkeypatch.setattr(Group, "hand_back", divides)
        means = on_all(
            threads(4), Members(tuple(MESHES["2x2"])), Options.of("micro", FUSION, wire_dtype="bfloat16"),
            lambda rank, training: torch.stack([training.step(gradient) for gradient in gradients[:, rank]]),
            dtype=torch.bfloat16,
        )  # fmt: skip
        assert all(same_bits(mean, means[0]) for mean in means)
        found.append(means[0])
    assert not found[0].equal(found[1])


def test_ranks_that_measure_other_times_and_send_other_bytes_know_the_same_of_both(
    threads: Callable[[int], ThreadRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks at the second place find everything ten times as long, and own next to nothing.

    Where what is decided by that differed, some would send what the others do not wait for.
    """
    is_second = threading.local()

    def measured_s(*_: Any) -> float:
        return 0.5 if is_second.now else 0.05

    def time_s(averager: Any, work: Any) -> float:
        averager.lanes.on_first(work)
        return measured_s()

    monkeypatch.setattr("lightning_sparse.fusion.steps.StepClock.__call__", measured_s)
    monkeypatch.setattr("lightning_sparse.fusion.link.time_s", time_s)
    shapes: Shapes = {"row": (1, 500), "rows": (3, 10)}

    def act(rank: int, training: Training) -> tuple[Any, ...]:
        is_second.now = bool(training.hook.averager.cut.index)
        averager: Any = training.hook.averager
        averager.messages = lambda: measured_s
        rows = typical_times(averager, 2)
        for gradient in normal(2, 4, 530)[:, rank]:
            next(rows)
            training.step(gradient)
        with pytest.raises(StopIteration) as end:
            next(rows)
        link = measure_link(averager)
        return end.value.value, link, averager.lanes.latencies

    members = Members(tuple(MESHES["2x2"]))
    first, *others = on_all(threads(4), members, Options.of("micro", "none"), act, shapes)
    assert all(other == first for other in others)
    assert first[0].step_s > 0.05


def test_layer_fusion_has_the_same_groups_on_all_ranks_in_every_step(
    threads: Callable[[int], ThreadRanks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two are planned, and given up since ranks at the second place find them slower, the others do not."""
    is_second = threading.local()

    def span_s(timeline: Timeline) -> float:
        return 0.04 if is_second.now and is_second.training.groups() != is_second.first else 0.01

    monkeypatch.setattr(layer_fusion, "WORTH_PLANNING", 1)
    monkeypatch.setattr(planner, "LEAST_GAIN", -float("inf"))
    monkeypatch.setattr(StepModel, "best", lambda model: [1, len(model.ready_s)])
    monkeypatch.setattr(Timeline, "span_s", span_s)
    shapes: Shapes = {f"weight_{i}": (3, 50) for i in range(6)}

    def act(rank: int, training: Training) -> list[list[tuple[str, ...]]]:
        is_second.now, is_second.training = bool(training.hook.averager.cut.index), training
        is_second.first = training.groups()
        found = []
        for gradient in normal(STEPS_MEASURED + TRIAL + 2, 4, 900)[:, rank]:
            training.step(gradient)
            found.append(training.groups())
        return found

    members = Members(tuple(MESHES["2x2"]))
    first, *others = on_all(threads(4), members, Options.of("micro", "layer"), act, shapes)
    assert all(other == first for other in others)
    assert len(first[STEPS_MEASURED]) == 2
    assert len(first[-1]) == 1
