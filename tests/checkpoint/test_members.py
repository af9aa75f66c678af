"""What members of several ranks have not sent goes on with others: with more, with fewer, of more ranks or of fewer."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.auto.policy import Candidate
from lightning_sparse.hook import SparseHook
from lightning_sparse.options import Options
from tests.support.in_process import ThreadComm, ThreadDDP, ThreadGroup, ThreadGroups, ThreadRanks
from tests.support.models import flat
from tests.support.said import warned
from tests.support.same import same

STEPS, ALIKE = 5, 100
MESHES = {
    "4x1": [[0], [1], [2], [3]],
    "3x1": [[0], [1], [2]],
    "2x1": [[0], [1]],
    "2x2": [[0, 1], [2, 3]],
    "3x2": [[0, 1], [2, 3], [4, 5]],
    "1x4": [[0, 1, 2, 3]],
    "2x4": [[0, 1, 2, 3], [4, 5, 6, 7]],
    "cyclic": [[0, 2], [1, 3]],
    "crossed": [[0, 5], [1, 2], [3, 4]],  # in whose second column the members do not rise
}
COMPRESSORS: dict[str, tuple[Any, str | None]] = {
    "dense": ("sparse_dense", "float32"),
    "int4": ("sparse_dense", "int4"),
    "micro": (ls.MiCRO(density=0.05), None),
    "low_rank": (ls.LowRank(rank=1), None),
    "skip_reduce": ("skip_reduce", None),
    "sketch_fusion": (ls.SketchFusion(density=0.05), None),
    "ok_topk": (ls.OkTopk(density=0.05), None),
    "momentum": (ls.MomentumCorrection(0.5, ls.MiCRO(density=0.05)), None),
}

pytestmark = [  # of so small a model, and of one member
    pytest.mark.filterwarnings(f"ignore:.*{said}")
    for said in ("nothing is saved", "There is one rank, node or replica")
]


@pytest.fixture(autouse=True)
def _in_one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("lightning_sparse.hook.TorchComm", ThreadComm)
    monkeypatch.setattr("lightning_sparse.local_steps.settings.LEAD", 1.0)
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


class Given(nn.Module):
    """Parameters whose gradients are what it is fed: of many rows, of few, of none, and a number alone."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"wide": (37, 5), "long": (211,), "row": (1, 3), "number": (), "none": (0, 2)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.full(shape, 0.5)))

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.parameters(), x.split([p.numel() for p in self.parameters()]), strict=True)
        return torch.stack([(p * part.view(p.shape)).sum() for p, part in parts]).sum()


def given(step: int, rank: int) -> Tensor:
    """The gradient of a rank in a step; from step ``ALIKE`` on that of all ranks."""
    number = 1000 * step + (rank if step < ALIKE else 0)
    return torch.randn(400, generator=torch.Generator().manual_seed(number))


class Training:
    """One rank's."""

    def __init__(
        self, group: ThreadGroup, members: Sequence[Sequence[int]], options: Options, dtype: torch.dtype
    ) -> None:
        self.rank, self.model = group.rank, Given().to(dtype)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        ddp: Any = ThreadDDP(self.model, group)
        groups: Any = ThreadGroups(group, members)
        self.ddp, self.hook = ddp, SparseHook.__new__(SparseHook)
        self.hook._put_on(ddp, options, None, groups, may_be_local=True, evaluates=lambda module: not module.training)
        self.hook.note(self.optimizer)

    def run(self, first: int, last: int) -> list[Tensor]:
        """Take steps; returns what the model holds after each."""
        found = []
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.ddp(given(step, self.rank).to(next(self.model.parameters()).dtype)).backward()
            self.optimizer.step()
            found.append(flat(self.model.parameters()))
        return found

    def owned(self, of: Mapping[str, Tensor]) -> Tensor:
        """Of what this rank owns a slice each, where it lies among all [n]; zeros elsewhere."""
        whole = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.model.named_parameters()}
        for name, x in of.items():
            slot = self.hook.averager.cut.own(whole[name])
            slot.copy_(x.view(slot.shape))
        return flat(whole.values())

    def unsent(self) -> Tensor:
        averager = self.hook.averager
        groups = [(group, averager.unsent_of(group)) for group in averager.groups]
        return self.owned({n: x for group, kept in groups for n, x in zip(group.names, group.slots(kept), strict=True)})

    def sum_of(self, handed: Mapping[Tensor, Tensor]) -> Tensor:
        return flat(handed[p] for p in self.model.parameters())

    def average(self) -> Tensor:
        local = self.hook.averager.local
        return self.owned(local.averages if local else {})

    def choose(self, local: Candidate) -> None:
        """Take local steps from now on, as ``sparse_auto`` does when it has chosen them."""
        self.hook._tuning.active.to_local_steps(local)
        self.hook._tuning._start(planned=True)

    def file(self) -> dict[str, Any]:
        """A checkpoint, whole on the first rank."""
        unsent = self.hook.state_dict(optimizers=[self.optimizer])
        return deepcopy({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "unsent": unsent})

    def load(self, file: Mapping[str, Any]) -> None:
        """Go on from the first rank's checkpoint, with the model first as Lightning does."""
        file = deepcopy(dict(file))
        self.optimizer.load_state_dict(file["optimizer"])
        self.model.load_state_dict(file["model"])
        self.hook.load_state_dict(file["unsent"], [self.optimizer], is_loaded=True)

    def close(self) -> None:
        self.hook.close()
        self.ddp.close()


@dataclass(frozen=True)
class Trained:
    """What all ranks have done in some steps."""

    given: Tensor  # the mean over the ranks of their gradients, all steps together
    handed_out: list[Tensor]  # to each rank
    held: list[list[Tensor]]  # by each rank after each step
    unsent: tuple[Tensor, Tensor]  # by each member [M, n], before and after
    average: tuple[Tensor, Tensor]  # of the model [n], likewise, with local steps
    shown: list[Tensor]  # of each rank in the end
    file: dict[str, Any]
    said: str


def train(
    mesh: str,
    options: Options,
    first: int,
    last: int,
    file: Any = None,
    dtype: torch.dtype = torch.float32,
    then: Candidate | None = None,
) -> Trained:
    """Train on all ranks of a mesh from one step to another, from a checkpoint if there is one.

    ``then`` is of local steps, which ``sparse_auto`` takes just before it saves.
    """
    members = MESHES[mesh]
    ranks = ThreadRanks(sum(map(len, members)))
    try:
        groups = [ranks.network.group(rank) for rank in range(ranks.size)]
        every = ranks.everywhere(lambda rank: Training(groups[rank], members, options, dtype))
        on_each = lambda what: ranks.everywhere(lambda rank: what(every[rank]))  # noqa: E731

        def of_members(what: Callable[[Training], Tensor]) -> Tensor:
            found = on_each(what)
            return torch.stack([torch.stack([found[rank] for rank in member]).sum(0) for member in members])

        said = "" if file is None else "".join({*warned(on_each, lambda each: each.load(file))})  # each is rank 0
        before = of_members(Training.unsent), of_members(Training.average).mean(0)
        held = on_each(lambda each: each.run(first, last))
        if then is not None:
            on_each(lambda each: each.choose(then))
        files = on_each(Training.file)
        after = of_members(Training.unsent), of_members(Training.average).mean(0)
        trained = Trained(
            torch.stack([each.sum_of(each.ddp.handed_in) for each in every]).mean(0),
            [each.sum_of(each.ddp.handed_out) for each in every],
            held,
            (before[0], after[0]),
            (before[1], after[1]),
            [flat(each.model.parameters()) for each in every],
            files[0],
            said,
        )
        on_each(Training.close)
        return trained
    finally:
        ranks.close()


@cache
def saved(mesh: str, name: str) -> Trained:
    """A training of averaged gradients that has saved what it had not sent."""
    return train(mesh, gradients(name), 0, STEPS)


def gradients(name: str) -> Options:
    compressor, wire = COMPRESSORS[name]
    return Options.of(compressor, ["wide*", "*"], wire_dtype=wire)


OTHERS = [("2x2", after) for after in ("4x1", "1x4", "2x1", "3x1", "cyclic")]
OTHERS += [("4x1", "2x2"), ("3x1", "3x2"), ("2x4", "2x2"), ("crossed", "2x2"), ("crossed", "crossed")]
SAID = {
    ("2x2", "4x1"): "2 members of 2 ranks wrote it and 4 ranks read it, so each starts from the mean",
    ("2x2", "1x4"): "2 members of 2 ranks wrote it and 1 member of 4 ranks read it, so each starts from the mean",
    ("2x2", "2x1"): "a member had 2 slices and has 1 slice, so ",
    ("4x1", "2x2"): "4 ranks wrote it and 2 members of 2 ranks read it, so each starts from the mean",
    ("2x4", "2x2"): "a member had 4 slices and has 2 slices, so ",
    ("2x2", "cyclic"): "",
    ("crossed", "crossed"): "",
}
CASES = [(*pair, name) for pair in OTHERS[:1] for name in COMPRESSORS] + [(*pair, "micro") for pair in OTHERS[1:]]


def says(before: str, after: str, said: str) -> bool:
    """Whether the one warning says what could not be kept on these ranks, and that is all."""
    expected = SAID.get((before, after), "such as thresholds, starts anew")
    return expected in said and bool(said) == bool(expected) and said.count("of another configuration") <= 1


@pytest.mark.parametrize(("before", "after", "name"), CASES)
def test_what_the_mean_gradient_lacks_arrives_once_on_other_ranks(before: str, after: str, name: str) -> None:
    first = saved(before, name)
    then = train(after, gradients(name), STEPS, 2 * STEPS, first.file)
    assert says(before, after, then.said)
    assert goes_on(then, first)
    assert all(held[0].equal(then.held[0][0]) for held in then.held)
    if name != "momentum":  # whose velocities start from zero
        assert near(first.handed_out[0] + then.handed_out[0] + then.unsent[1].mean(0), first.given + then.given)


def goes_on(then: Trained, first: Trained) -> bool:
    """Whether as many members have each their own, and others the mean."""
    now, before = then.unsent[0], first.unsent[1]
    return near(now, before if len(now) == len(before) else before.mean(0, keepdim=True).expand_as(now))


def near(one: Tensor, other: Tensor, by: float = 1e-5) -> bool:
    return bool((one - other).abs().max() < by)


def test_a_file_of_single_ranks_is_as_versions_wrote_it_that_knew_no_members() -> None:
    """They wrote the same of nodes of several ranks, so that what is done with a file of 2x1 is done with theirs."""
    state = saved("2x1", "micro").file["unsent"]
    assert list(state) == ["residuals", "size", "steps", "unsent", "groups", "compressor", "plan", "checksum"]
    for group in state["groups"]:
        assert list(group) == ["names", "memory", "step"]
        assert list(group["memory"]) == ["edges", "held", "report"]
        assert group["memory"]["edges"].shape == (2, 2 + 1)


# - local steps


@dataclass(frozen=True)
class Local:
    """What takes local steps, and how near its float32 keeps to the law."""

    compressor: Any
    wire: str
    settings: ls.LocalSteps
    dtype: torch.dtype = torch.float32
    near: float = 1e-5

    @property
    def options(self) -> Options:
        return Options.of(self.compressor, ["wide*", "*"], wire_dtype=self.wire, local_steps=self.settings)


HALF = ls.LocalSteps(2)
LOCAL = {
    "int4": Local("sparse_dense", "int4", HALF),
    "micro, all at once": Local(ls.MiCRO(density=0.05), "int4", ls.LocalSteps(3, fragments=1)),
    "low_rank": Local(ls.LowRank(rank=1), "float32", HALF),
    "aside": Local("sparse_dense", "sign", ls.LocalSteps(2, error_decay=1.0)),
    "half precision": Local("sparse_dense", "int4", HALF, torch.bfloat16, 2e-2),
}
LOCAL_CASES = [("2x2", "4x1", name) for name in LOCAL]
LOCAL_CASES += [("2x2", "2x1", name) for name in ("half precision", "aside")]
LOCAL_CASES += [("2x2", after, "int4") for after in ("2x1", "3x1")]
LOCAL_CASES += [("4x1", "2x2", "int4"), ("2x4", "2x2", "int4"), ("crossed", "crossed", "int4")]


@cache
def saved_local(mesh: str, name: str) -> Trained:
    return train(mesh, LOCAL[name].options, 0, STEPS, dtype=LOCAL[name].dtype)


@pytest.mark.parametrize(("before", "after", "name"), LOCAL_CASES)
def test_members_of_local_steps_go_on_from_the_mean_weights_on_other_ranks(before: str, after: str, name: str) -> None:
    """The mean of their weights moves by the mean of their own steps, and by nothing else."""
    case, first = LOCAL[name], saved_local(before, name)
    then = train(after, case.options, STEPS, 2 * STEPS, first.file, case.dtype)
    assert says(before, after, then.said)
    assert near(then.average[0], first.average[1], 1e-6)
    assert goes_on(then, first)
    assert all(shown.equal(then.shown[0]) for shown in then.shown)
    for ranks in MESHES[after]:
        assert all(same(then.held[rank], then.held[ranks[0]]) for rank in ranks)
    moved = then.average[1] + then.unsent[1].mean(0) - 0.5
    assert near(moved, -0.1 * (first.given + then.given), case.near)


def test_a_member_alone_goes_on_from_the_mean_weights_and_takes_no_local_steps() -> None:
    first = saved_local("2x2", "int4")
    then = train("1x4", LOCAL["int4"].options, STEPS, 2 * STEPS, first.file)
    assert "is read without: all ranks go on from the mean of their own weights" in then.said
    assert all(shown.equal(then.shown[0]) for shown in then.shown)
    assert near(then.shown[0] - 0.5, -0.1 * (first.given + then.given), LOCAL["int4"].near)


@pytest.mark.parametrize("after", ["4x1", "2x1"])
def test_outer_steps_keep_their_momentum_on_other_ranks(after: str) -> None:
    """Where all ranks have the same gradients, the average goes the way it had gone without a change of ranks."""
    settings = ls.LocalSteps(2, fragments=1, outer_rate=0.7, outer_momentum=0.9)
    options = Options.of("sparse_dense", ["wide*", "*"], wire_dtype="float32", local_steps=settings)
    first = train("2x2", options, 0, STEPS)
    straight, then = (train(mesh, options, ALIKE, ALIKE + STEPS, first.file) for mesh in ("2x2", after))
    assert near(then.average[1], straight.average[1])
    regrouped = Options.of("sparse_dense", "none", wire_dtype="float32", local_steps=settings)
    assert near(train("2x2", regrouped, ALIKE, ALIKE + STEPS, first.file).average[1], straight.average[1])


def test_velocities_of_gradients_are_kept_where_members_have_fewer_ranks() -> None:
    options = Options.of(ls.MomentumCorrection(0.9, ls.Dense()), ["wide*", "*"], wire_dtype="float32")
    first = train("2x2", options, 0, STEPS)
    straight, then = (train(mesh, options, ALIKE, ALIKE + STEPS, first.file) for mesh in ("2x2", "2x1"))
    assert near(then.handed_out[0], straight.handed_out[0])


@pytest.mark.parametrize(("before", "after"), [("2x2", "4x1"), ("4x1", "2x2")])
def test_unsent_gradients_are_added_once_to_the_first_local_gradients_of_other_ranks(before: str, after: str) -> None:
    chosen = Candidate(ls.Dense(), "int4", 2)
    options = Options.of(ls.Auto((chosen,), start=ls.MiCRO(density=0.05)), "layer")
    first = train(before, options, 0, STEPS, then=chosen)
    then = train(after, options, STEPS, 2 * STEPS, first.file)
    moved = then.average[1] + then.unsent[1].mean(0) - 0.5
    assert near(moved, -0.1 * (first.given + then.given))
