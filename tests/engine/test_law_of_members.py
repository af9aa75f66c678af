"""Averaged gradients where members have several ranks: the law over members, and the same bits on all ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.hook import SparseHook
from lightning_sparse.network.members import Members
from lightning_sparse.network.simulated import same_bits
from lightning_sparse.options import Options
from lightning_sparse.wire import WIRE_DTYPES
from tests.support.compressors import EVERY_COMPRESSOR, OTHERS
from tests.support.in_process import ThreadComm, ThreadDDP, ThreadGroups, ThreadRanks
from tests.support.simulated import assert_nothing_lost, normal

pytestmark = pytest.mark.filterwarnings("ignore:There is one rank, node or replica", "ignore:.*nothing is saved")
STEPS = 3

MESHES = {
    "one member of four": [(0, 1, 2, 3)],
    "2x2": [(0, 1), (2, 3)],
    "4x1": [(0,), (1,), (2,), (3,)],
    "2x3": [(0, 1, 2), (3, 4, 5)],
    "three of two": [(0, 1), (2, 3), (4, 5)],
    "cyclic": [(0, 2), (1, 3)],
    "a second column that does not rise": [(0, 5), (1, 2), (3, 4)],
}
SHAPES: dict[str, tuple[int, ...]] = {
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

    def __init__(self) -> None:
        super().__init__()
        for name, shape in SHAPES.items():
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


def steps_of(ranks: ThreadRanks, members: Members, options: Options, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """Average ``gradients`` [T, P, n]: means [T, P, n], and after each step what members have not sent [T, M, n]."""
    groups = [ranks.network.group(rank) for rank in range(ranks.size)]

    def on(rank: int) -> list[tuple[Tensor, Tensor]]:
        ddp: Any = ThreadDDP(Given(), groups[rank], buckets=1)
        own: Any = ThreadGroups(groups[rank], members.ranks)
        hook = SparseHook.__new__(SparseHook)
        hook._put_on(ddp, options, None, own, may_be_local=False, evaluates=lambda module: not module.training)
        found = []
        for gradient in gradients[:, rank]:
            for p in ddp.parameters():
                p.grad = None
            ddp(gradient).backward()
            found.append((torch.cat([p.grad.flatten() for p in ddp.parameters()]), slices(hook)))
        hook.close()
        ddp.close()
        return found

    every = ranks.everywhere(on)
    means = torch.stack([torch.stack([mean for mean, _ in of_rank]) for of_rank in every], 1)
    unsent = [[sum(every[rank][step][1] for rank in member) for member in members.ranks] for step in range(len(means))]
    return means, torch.stack([torch.stack(of_step) for of_step in unsent])  # type: ignore[arg-type]  # no sum is empty


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


def assert_law(members: Members, gradients: Tensor, means: Tensor, unsent: Tensor) -> None:
    given = of_members(members, gradients)
    for step in range(len(gradients)):
        assert all(same_bits(mean, means[step, 0]) for mean in means[step])
        assert_nothing_lost(given[: step + 1], means[: step + 1, 0], unsent[step])


@pytest.mark.parametrize("number", range(len(KINDS)), ids=[type(kind).__name__ for kind in KINDS])
@pytest.mark.parametrize("mesh", MESHES)
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
    assert_law(members, gradients, *steps_of(ranks, members, options, gradients))
