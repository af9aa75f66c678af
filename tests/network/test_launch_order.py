"""The order in which messages are launched where NCCL carries them: what real ranks do over Gloo, by NCCL's rules."""

import ast
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse import fabric
from lightning_sparse.compressors.group import Group
from lightning_sparse.network import process_groups
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.network.torch_comm import TorchComm
from lightning_sparse.settings import as_text
from tests.support.models import batch, small
from tests.support.processes import Ranks
from tests.support.sharded import Net, Sharded, mesh

PACKAGE = Path(ls.__file__).parent
STEPS = 4
MESSAGES = ("_all_reduce", "_all_gather", "_broadcast", "_shift", "_all_to_all", "mean_in_place", "mean_of_bucket")


class Streams:
    """Takes the place of CUDA's streams: which one is current in a thread, and which waits for which."""

    class Stream:
        """A stream that runs nothing."""

        def __init__(self, name: str) -> None:
            self.name = name
            self.device = torch.device("cuda", 1)

        def wait_stream(self, other: "Streams.Stream") -> None:
            """Do nothing: on the CPU all is done at once."""

    def __init__(self) -> None:
        self._now = threading.local()
        self.unnamed = 0  # times that a current stream was asked for without a device
        self.default = self.Stream("default")

    @contextmanager
    def stream(self, stream: "Streams.Stream | None") -> Iterator[None]:
        """Make a stream current, or do nothing."""
        before = self.current_stream("any")
        self._now.stream = stream or before
        try:
            yield
        finally:
            self._now.stream = before

    def current_stream(self, device: Any = None) -> "Streams.Stream":
        """The current one of a device."""
        self.unnamed += device is None
        now: Streams.Stream = getattr(self._now, "stream", self.default)
        return now


class Launch(NamedTuple):
    """One message."""

    name: str
    group: str
    stream: str
    by_thread: bool


class Launches:
    """What a rank launches: what, on which communicator, which stream and by which thread, in order."""

    def __init__(self, streams: Streams) -> None:
        self.seen: list[Launch] = []
        self._streams = streams
        self._within = 0

    def note(self, name: str, comm: TorchComm) -> None:
        """Note one message."""
        stream, is_ours = (
            self._streams.current_stream("any").name,
            threading.current_thread().name == "lightning_sparse",
        )
        self.seen.append(Launch(name, comm.group.group_name, stream, is_ours))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record within."""
        with all_started([patch.object(TorchComm, name, self._noting(name)) for name in MESSAGES]):
            yield

    def _noting(self, name: str) -> Any:
        ordinary = getattr(TorchComm, name)

        def launch(comm: TorchComm, *args: Any, **kwargs: Any) -> Any:
            if comm.size > 1 and not self._within:  # a sum may be an all-gather
                self.note(name, comm)
            self._within += 1
            try:
                return ordinary(comm, *args, **kwargs)
            finally:
                self._within -= 1

        return launch


@contextmanager
def all_started(patches: list[Any]) -> Iterator[None]:
    """All of them."""
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


def train(
    rank: int,
    size: int,
    compressor: str,
    local_size: int,
    local_steps: int,
    scales: bool,
    keeps_order: bool | None = True,
) -> dict[str, Any]:
    """Four steps by NCCL's rules, or if ``keeps_order`` is None by Gloo's, with a user's log in each, over Gloo."""
    streams = Streams()
    launches = Launches(streams)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scales else None
    ddp = DistributedDataParallel(small().net, bucket_cap_mb=1e-4)
    groups = ProcessGroups(ddp, local_group=local_size)
    if keeps_order is not None:
        groups.nccl, groups._on_cpu, groups.keeps_order = True, False, keeps_order
    hook = ls.SparseHook(
        ddp, compressor, fusion="none", process_groups=groups, local_steps=local_steps, scaler=scaler
    )  # fmt: skip
    averager: Any = hook.averager
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    own = [streams.Stream(f"ours {lane.number}") for lane in averager.lanes]
    for lane in averager.lanes:
        lane.stream = None if keeps_order is None else own[lane.number if keeps_order else 0]
    with (
        launches.recorded(),
        patch.object(torch.cuda, "stream", streams.stream),
        patch.object(torch.cuda, "current_stream", streams.current_stream),
    ):
        for step in range(STEPS):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(ddp(x), y)
            TorchComm(ddp.process_group).all_reduce(loss.detach().clone()).wait()  # log(..., sync_dist=True)
            (scaler.scale(loss) if scaler else loss).backward()
            optimizer.step()
        hook.show_average()
    weights = {name: p.detach().clone() for name, p in ddp.module.named_parameters()}
    ours = [group for lane in averager.lanes for group in communicators(lane.comm)]
    inside = {lane.comm.inside.group.group_name for lane in averager.lanes if lane.comm.inside is not None}
    hook.close()
    return {
        "launches": launches.seen,
        "ddp": ddp.process_group.group_name,
        "ours": ours,
        "inside": inside,
        "weights": weights,
    }


def communicators(comm: Any) -> list[str]:
    """The names of the process groups under a lane's comm."""
    own = [each for each in (comm, comm.inside, comm._everyone) if each is not None]
    return [each.group.group_name for each in own]


def train_all(rank: int, size: int) -> list[dict[str, Any]]:
    """Each of the cases."""
    return [train(rank, size, *case) for case in (*CASES.values(), *OVER_GLOO.values())]


CASES = {
    "gradients": ("micro", 1, 0, False),
    "members, several messages at once": ("sketch_fusion", 2, 0, False),
    "members, loss scale": ("ok_topk", 2, 0, True),
    "members, loss scale, one after the other": ("ok_topk", 2, 0, True, False),
    "local steps": ("skip_reduce", 1, 2, False),
    "local steps, one after the other": ("skip_reduce", 1, 2, False, False),
    "local steps of members": ("sparse_dense", 2, 2, False),
    "local steps of members, one after the other": ("sparse_dense", 2, 2, False, False),
}


#: The same, by Gloo's rules.
OVER_GLOO = {case: (*of[:4], None) for case, of in CASES.items() if not case.endswith("one after the other")}

#: Of members: DDP's, those of two members and of two columns.
COMMUNICATORS = {"gradients": 1, "local steps": 2, "local steps, one after the other": 1}

pytestmark = pytest.mark.xdist_group("launch order")  # so that what ranks end with is found once


@pytest.fixture(scope="module")
def every(ranks: Ranks) -> list[list[dict[str, Any]]]:
    """What each of four ranks has launched in each case."""
    return ranks.run(train_all, 4, gloo=True)


@pytest.fixture(params=CASES)
def trained(request: pytest.FixtureRequest, every: list[list[dict[str, Any]]]) -> tuple[str, list[dict[str, Any]]]:
    """What each rank has launched in one case."""
    return request.param, [each[list(CASES).index(request.param)] for each in every]


def test_every_rank_launches_on_all_communicators_in_one_order(trained: tuple[str, list[dict[str, Any]]]) -> None:
    """There is an order of all messages, of all communicators, that each rank keeps to with those it takes part in."""
    before: dict[tuple[str, int], set[tuple[str, int]]] = {}
    members: dict[str, set[int]] = {}
    for each in trained[1]:
        counts: dict[str, int] = {}
        last: tuple[str, int] | None = None
        for _, group, *_ in each["launches"]:
            number = counts[group] = counts.get(group, 0) + 1
            before.setdefault((group, number), set()).update([last] if last else [])
            last = group, number
        for group, number in counts.items():
            members.setdefault(group, set()).add(number)
    assert list(TopologicalSorter(before).static_order())
    assert all(len(numbers) == 1 for numbers in members.values())  # each rank takes part in all of a group's
    assert len(members) == COMMUNICATORS.get(trained[0], 5)


def test_what_an_engine_launches_is_launched_on_streams_of_its_own(trained: tuple[str, list[dict[str, Any]]]) -> None:
    """Beside DDP's and the user's; on one where messages must be one after the other.  No thread of ours launches."""
    case, every = trained
    for each in every:
        ours = {launch.stream for launch in each["launches"] if launch.group in each["ours"]} - {"default"}
        assert ours == ({"ours 0"} if case.endswith("one after the other") else {"ours 0", "ours 1"})
        assert not any(launch.by_thread for launch in each["launches"])
        logs = [launch for launch in each["launches"] if launch[1:3] == (each["ddp"], "default")]
        assert len(logs) == STEPS


@pytest.mark.parametrize("case", ["members, several messages at once", "members, loss scale, one after the other"])
def test_a_member_sums_inside_before_it_shares_the_group_before(every: list[list[dict[str, Any]]], case: str) -> None:
    """Else it would wait inside for what a column sends; the last group of a step has none after it."""
    for each in every:
        launches = each[list(CASES).index(case)]
        inside = [launch.name for launch in launches["launches"] if launch.group in launches["inside"]]
        groups = len(inside) // 2 // STEPS
        assert groups > 2
        step = ["_all_to_all", *["_all_to_all", "_all_gather"] * (groups - 1), "_all_gather"]
        assert inside == STEPS * step


def test_ranks_train_as_over_gloo(trained: tuple[str, list[dict[str, Any]]], every: list[list[dict[str, Any]]]) -> None:
    place = len(CASES) + list(OVER_GLOO).index(trained[0].removesuffix(", one after the other"))
    for each, of_all in zip(trained[1], every, strict=True):
        for name, weights in each["weights"].items():
            assert torch.equal(weights, of_all[place]["weights"][name]), name


# - sharded models, of which a replica skips a layer


class Skipping(Net):
    """Layers of one size, so that a replica's gradient of one layer would be taken for that of another."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(9, 9) for _ in range(4)))
        self.skips = -1

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = x if i == self.skips else block(x).tanh()
        y: Tensor = self.head(x)
        return y


@dataclass(frozen=True)
class Noting(ls.Dense):
    """Notes what is launched."""

    launched: ClassVar[list[tuple[str, ...]]] = []

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        self.launched.append(group.names)
        return (yield from super().reduce(group, comm))


#: Compressors of sharded models, and options.
SHARDED: dict[ls.Compressor, dict[str, Any]] = {
    Noting(): {"wire_dtype": "int4"},
    ls.MiCRO(density=0.2): {"wire_dtype": "float32"},
    ls.TopK(density=0.5): {"wire_dtype": "int8", "local_steps": 2},
}


def train_sharded(rank: int, size: int) -> dict[str, Any]:
    """Steps in which replicas skip other layers, over Gloo: by its rules, and by those of NCCL."""
    mesh_of_all, weights = mesh(2, 2), {}
    for compressor, options in SHARDED.items():
        for by_nccl in (False, True):
            with patch.object(process_groups, "carries_by_nccl", lambda *_, by=by_nccl: by):
                training = Sharded(mesh_of_all, compressor, Skipping, **options)
            Noting.launched.clear()
            for step in range(2 * STEPS):
                training.module.skips = (rank // 2 + step) % 5 - 1  # type: ignore[assignment]
                training.step(step)
            weights[as_text(compressor), by_nccl] = training.weights
            training.close()
            if compressor == Noting() and by_nccl:
                launched = list(Noting.launched)
    return {"launched": launched, "weights": weights}


def train_unused(rank: int, size: int) -> list[tuple[str, ...]]:
    """Steps in which ranks skip other layers, of DDP's buckets; returns what is launched."""
    model = Skipping()
    ddp = DistributedDataParallel(model, bucket_cap_mb=1e-4, find_unused_parameters=True)
    with patch.object(process_groups, "carries_by_nccl", lambda *_: True):
        hook = ls.SparseHook(ddp, Noting(), fusion="none", wire_dtype="int4")
    Noting.launched.clear()
    for step in range(STEPS):
        model.skips = (rank + step) % 5 - 1
        ddp(torch.randn(4, 9)).square().mean().backward()
    hook.close()
    return list(Noting.launched)


def test_ranks_that_skip_a_layer_launch_in_the_order_of_the_plan(ranks: Ranks) -> None:
    first, *others = ranks.run(train_unused, 3, gloo=True)
    assert first == STEPS * first[: len(first) // STEPS]
    assert all(other == first for other in others)


@pytest.fixture(scope="module")
def sharded(ranks: Ranks) -> list[dict[str, Any]]:
    return ranks.run(train_sharded, 4, gloo=True)


def test_replicas_that_skip_a_layer_launch_in_the_order_of_the_plan(sharded: list[dict[str, Any]]) -> None:
    launched = sharded[0]["launched"]
    step = launched[: len(launched) // (2 * STEPS)]
    assert len(step) == len(set(step)) > 2
    for each in sharded:
        assert each["launched"] == 2 * STEPS * step


def test_replicas_that_skip_a_layer_train_as_over_gloo(sharded: list[dict[str, Any]]) -> None:
    for each in sharded:
        for (compressor, by_nccl), weights in each["weights"].items():
            assert torch.equal(weights, each["weights"][compressor, False]), (compressor, by_nccl)


@pytest.mark.parametrize("strategy", [ls.SparseDDPStrategy, fabric.SparseDDPStrategy])
@pytest.mark.parametrize(("given", "left"), [(None, "1"), ("0", "0")])
def test_strategies_have_nccl_keep_the_order_unless_the_user_has_chosen(
    strategy: Any, given: str | None, left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = next(
        each
        for each in strategy.__mro__
        if each.__module__.startswith("lightning.") and "setup_environment" in vars(each)
    )
    monkeypatch.setattr(base, "setup_environment", lambda self: None)
    monkeypatch.setenv(process_groups.ORDER, given or "")  # which is put back afterwards
    if given is None:
        monkeypatch.delenv(process_groups.ORDER)
    strategy("micro").setup_environment()
    assert os.environ[process_groups.ORDER] == left


@pytest.mark.parametrize(
    ("version", "variable", "keeps"), [((2, 25, 1), "1", False), ((2, 26, 2), "1", True), ((2, 27, 3), "0", False)]
)
def test_from_which_nccl_on_devices_keep_the_order(
    version: tuple[int, ...], variable: str, keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_groups.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    monkeypatch.setenv(process_groups.ORDER, variable)
    assert process_groups.devices_keep_order() == keeps


def test_no_line_asks_for_a_stream_or_waits_for_a_device_without_naming_it() -> None:
    unnamed = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not node.args:
                said = ast.unparse(node.func)
                if said in ("torch.cuda.current_stream", "torch.cuda.synchronize") or node.func.attr == "record":
                    unnamed.append(f"{path.name}:{node.lineno}: {said}")
    assert unnamed == []
