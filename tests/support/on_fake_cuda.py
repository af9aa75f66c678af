"""Steps of one rank of three on a fake device: its exchange, NCCL in fake, and a backward that hands over buckets."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.compressors.wrappers import Rounded
from lightning_sparse.engine.averager import Averager, lanes_of
from lightning_sparse.engine.bucket import gradients_of
from lightning_sparse.engine.groups import lay_out, lay_out_fragments
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.local_steps.buffers import ModuleBuffers
from lightning_sparse.local_steps.optimizers import Optimizers
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.cut import WHOLE, Cut
from lightning_sparse.network.members import alone
from lightning_sparse.network.process_groups import LANES
from lightning_sparse.network.torch_comm import TorchComm
from lightning_sparse.sharded.model import ShardedModel, ShardGroup
from lightning_sparse.wire import wire_format
from tests.support.buckets import Bucket
from tests.support.fake_cuda import DEVICE, FakeCuda, Stream
from tests.support.fake_nccl import FakeNccl
from tests.support.happens_before import HappensBefore

SIZE = 3
SMALL = 2_000  # bytes of a group: a bucket of DDP has groups of both lanes
SHAPES = {"first": (300, 70), "bias": (11,), "norm": (64,), "last": (64, 80), "one": (1,)}

#: Every compressor, with the settings that take another way through it.
COMPRESSORS: list[ls.Compressor] = [
    ls.Dense(), ls.MiCRO(density=0.01), ls.MiCRO(balance=False), ls.SketchFusion(), ls.SketchFusion(momentum=0.5),
    ls.SketchFusion(exact=False), ls.SkipReduce(), ls.SkipReduce(rotation="random", skip=0.25), ls.TopK(),
    ls.RandomK(), ls.LowRank(), ls.ImportancePruning(givers=2), ls.ImportancePruning(rule="fixed", threshold=1.0),
    ls.ImportancePruning(rule="adaptive"), ls.OkTopk(evaluate_every=2, repartition_every=3),
    ls.MomentumCorrection(0.9, ls.TopK(density=0.5)), Rounded(ls.TopK(), "int8"),
]  # fmt: skip

#: Settings of local steps that take another way through them.
LOCAL_SETTINGS: list[dict[str, Any]] = [
    {"lead": 1.4}, {"error_decay": 0.95}, {"second_moments": "own"}, {"outer_momentum": 0.9, "overlap": False},
]  # fmt: skip


Make = Callable[[FakeNccl, dict[str, Tensor]], Averager]
Between = Callable[[Any, FakeNccl, dict[str, Tensor]], None]


class Scaler:
    """Takes the place of a ``GradScaler``, which is none where there is no CUDA."""

    def scale(self, x: Tensor) -> Tensor:
        return x * torch.full((), 8.0, device=DEVICE)


@contextmanager
def on_fake_cuda(cuda: FakeCuda | None = None, size: int = SIZE) -> Iterator[tuple[FakeCuda, FakeNccl]]:
    """A fake device and fake NCCL, while it is entered."""
    with (cuda or FakeCuda()).entered() as device:
        nccl = FakeNccl(size=size)
        with nccl.in_place():
            yield device, nccl


def parameters(shapes: Any = None, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Parameters by name, of shapes that kernels can and cannot take aligned."""
    return {n: torch.empty(s, device=DEVICE, dtype=dtype) for n, s in (shapes or SHAPES).items()}


def gradients(
    nccl: FakeNccl, of: dict[str, Tensor], compressor: ls.Compressor, wire_dtype: str = "float32", **options: Any
) -> GradientAverager:
    """An exchange of gradients, as it is on NCCL."""
    groups = lay_out(of, compressor, "bucket", options.pop("bucket_bytes", 50_000))
    return GradientAverager(groups, nccl.comms(LANES, wire_format(wire_dtype)), threaded=False, **options)


def local_steps(
    nccl: FakeNccl, of: dict[str, Tensor], compressor: ls.Compressor, wire_dtype: str = "float32", **options: Any
) -> LocalAverager:
    """An exchange with local steps, as it is on NCCL, of a model with buffers; of members too."""
    of_members, keeps_order = options.pop("of_members", False), options.pop("keeps_order", True)
    settings, norm = LocalSteps(2, **options), nn.BatchNorm1d(8).to(DEVICE)
    norm.register_buffer("seen", torch.zeros(3, dtype=torch.bool, device=DEVICE))
    buffers = ModuleBuffers(norm, device=torch.device(DEVICE))
    cut = Cut(nccl.rank, nccl.size) if of_members else WHOLE
    groups, fragments = lay_out_fragments(of, compressor, "bucket", settings.parts, SMALL, cut)
    comms = _of_members(nccl, wire_dtype, keeps_order) if of_members else nccl.comms(LANES, wire_format(wire_dtype))
    return LocalAverager(
        groups,
        fragments,
        lanes_of(groups, comms, threaded=False),
        settings=settings,
        compressor=compressor,
        buffers=buffers,
        inside=nccl.comm() if of_members else None,
    )


def _of_members(nccl: FakeNccl, wire_dtype: str, keeps_order: bool) -> list[TorchComm]:
    """The lanes of a rank of members, which have as many ranks as there are members."""
    comms = nccl.comms(LANES, wire_format(wire_dtype))
    for comm, inside in zip(comms, nccl.comms(LANES), strict=True):
        comm.within(inside, nccl.comm(), alone(SIZE), member=0)
        comm.keeps_order = keeps_order
    return comms


def watching(averager: LocalAverager) -> LocalAverager:
    """Have an exchange tell other ranks of a tensor that no optimizer trains."""
    running = torch.zeros(8, device=DEVICE)
    averager.untrained.watched["running mean"] = lambda: running
    averager.untrained.begin()
    return averager


def members(
    nccl: FakeNccl, of: dict[str, Tensor], compressor: ls.Compressor, wire_dtype: str = "float32", **options: Any
) -> GradientAverager:
    """An exchange of gradients among members of as many ranks as there are members, as it is on NCCL."""
    comms = _of_members(nccl, wire_dtype, options.pop("keeps_order", True))
    groups = lay_out(of, compressor, "bucket", SMALL, Cut(nccl.rank, nccl.size))
    return GradientAverager(groups, comms, threaded=False, **options)


def watched(nccl: FakeNccl, of: dict[str, Tensor]) -> GradientAverager:
    """An exchange of gradients that somebody watches, records and times."""
    averager = gradients(nccl, of, ls.TopK(), "int4", bucket_bytes=SMALL)
    averager.watch_unsent()
    averager.record_gradients(1000)
    averager.defer(True)
    return averager


class Shards(ShardGroup):
    """Parameters as FSDP has them, of which each rank has all."""

    def gradients(self) -> list[Tensor | None]:
        return [p.grad for p in self.parameters]

    def set_gradient(self, i: int, gradient: Tensor) -> None:
        self.parameters[i].grad = gradient


class ShardedTraining:
    """A rank's training of a model that is sharded: each parameter is a group, whose gradient comes on another stream.

    Args:
        exchange: of the rank.
        of: the parameters.
        dtype: in which gradients are reduced.
    """

    def __init__(self, averager: GradientAverager, of: dict[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
        self.averager, self._reducing, self._handing_over, self._dtype = averager, Stream(DEVICE), Stream(DEVICE), dtype
        fsdp = SimpleNamespace(reduce_grads=True, all_reduce_grads=True)
        model = self.model = ShardedModel.__new__(ShardedModel)
        model.parts, model.shards = [], of
        model.groups = [Shards([n], [p], [p], fsdp, [p.numel()]) for n, p in reversed(of.items())]  # type: ignore[list-item]
        model._handed_over, model._is_in_backward, model._is_closed = [], False, False
        model.average_with(averager.hand_over, lambda: averager)

    def step(self, skips: int = -1, batches: int = 1) -> None:
        """Forwards, backwards that reach all groups but one, and an optimizer's step."""
        cuda = FakeCuda.now()
        cuda.begin_step()
        self.averager.between_steps()
        for _ in range(batches):
            for p in self.model.parameters():
                p.sum()
            with self.model.backward(always=True):
                for i, group in enumerate(self.model.groups):
                    if i != skips:
                        self._reduce(group)
                cuda.stream.wait_stream(self._handing_over)  # as FSDP does at its end
        with torch.no_grad():
            for p in self.model.parameters():
                if p.grad is not None:
                    p.add_(p.grad, alpha=-0.1)
                p.grad = None
        self.averager.end_step()

    def _reduce(self, group: ShardGroup) -> None:
        """Do what FSDP does, which adds to a gradient that there is, or has it refer to what it has reduced."""
        cuda, (p,) = FakeCuda.now(), group.parameters
        self._reducing.wait_stream(cuda.stream)
        with cuda.on(self._reducing):
            reduced = torch.full((p.numel(),), 1.0, device=DEVICE, dtype=self._dtype)
        self._handing_over.wait_stream(self._reducing)
        with cuda.on(self._handing_over):
            self.model._take(group, reduced)
            reduced = reduced.to(p.dtype)
            if p.grad is None:
                p.grad = reduced.view(p.shape)
            else:
                p.grad += reduced.view(p.shape)


class Training:
    """A rank's training: DDP's buckets, and an optimizer that reads gradients and writes weights.

    Args:
        exchange: of the rank.
        of: the parameters.
        buckets: of DDP.
        adam: have PyTorch's Adam step, and not a plain product.
    """

    def __init__(self, averager: Averager, of: dict[str, Tensor], buckets: int = 2, adam: bool = False) -> None:
        self.averager, self._parameters = averager, list(of.values())
        self._adam = torch.optim.Adam(self._parameters, weight_decay=0.1) if adam else None
        self._optimizers = Optimizers(self._parameters, lambda: self.averager)
        backward = self._parameters[::-1]
        cut = -(-len(backward) // buckets)
        parts = [backward[i : i + cut] for i in range(0, len(backward), cut)]
        self._buckets = [
            Bucket(
                part, buffer=torch.empty(sum(p.numel() for p in part), dtype=part[0].dtype, device=DEVICE), last=last
            )
            for part, last in zip(parts, [*[False] * (len(parts) - 1), True], strict=True)
        ]

    def step(self) -> None:
        """A forward, a backward and an optimizer's step, all on the default stream."""
        FakeCuda.now().begin_step()
        self.averager.between_steps()
        for p in self._parameters:
            p.sum()  # forward reads all weights
        if self.averager.local is not None:
            self.averager.local.end_forward()
        self.averager.timeline.begin_backward()
        futures = []
        for bucket in self._buckets:
            bucket.buffer().fill_(1.0)  # as backward has just done
            futures.append(self.averager.hook(None, bucket))  # type: ignore[arg-type]
        averaged = [future.wait() for future in futures]
        with torch.no_grad():
            for bucket, mean in zip(self._buckets, averaged, strict=True):
                for p, gradient in gradients_of(mean, bucket.parameters()):
                    if self._adam is None:
                        p.add_(gradient, alpha=-0.1)
                    else:
                        p.grad = gradient
        if self._adam is not None:
            self._adam.step()
        self.averager.end_step()


def nothing(averager: Any, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
    """Between steps."""


def evaluate(averager: LocalAverager, nccl: FakeNccl, of: dict[str, Tensor]) -> None:
    """Show the average, compute with it, and compare what no optimizer trains."""
    averager.show_average()
    for p in of.values():
        p.sum()
    averager.compare()


def train(
    make: Make,
    steps: int = 5,
    between: Between = nothing,
    shapes: Any = None,
    dtype: torch.dtype = torch.float32,
    adam: bool = False,
    sees: float = 5.0,
) -> tuple[list[set[str]], list[str]]:
    """Where the host waits in each step of a training, and pairs of accesses that nothing orders.

    Args:
        make: the exchange.
        steps: of the training, after half of which, and after the last, there is ``between``.
        between: two steps.
        shapes: of the parameters.
        dtype: of the parameters.
        adam: have PyTorch's Adam step.
        sees: what the host is told where it looks at data.
    """
    with on_fake_cuda(HappensBefore()) as (cuda, nccl):
        assert isinstance(cuda, HappensBefore)
        cuda.sees = sees
        of = parameters(shapes, dtype)
        averager = make(nccl, of)
        training, waits = Training(averager, of, adam=adam), []
        for step in range(steps):
            if step == steps // 2:
                between(averager, nccl, of)
            cuda.waits.clear()
            training.step()
            waits.append(set(cuda.waits))
        between(averager, nccl, of)
        averager.close()
        assert cuda.accesses > 20 * steps
        return waits, cuda.unordered
