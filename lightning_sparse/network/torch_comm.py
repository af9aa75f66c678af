"""Messages of torch.distributed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from lightning_sparse.network.comm import Comm, Pending

T = TypeVar("T")

PIECE_BYTES = 2**26  # of all ranks, that a rank that gathers has on its device at once


def carries_by_nccl(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` sends tensors on ``device`` over NCCL, and not over Gloo.

    The group itself is asked: "gloo", "nccl", "nccl2", "nccl-lazy", "cpu:gloo,cuda:nccl" and no name at all are names
    that users give, and one group may have several backends.

    Raises:
        ValueError: it has no backend for such tensors, or one that is neither.
    """
    try:
        name = str(group._get_backend(torch.device(device.type)).name())
    except RuntimeError:
        raise ValueError(
            f"the process group must have a backend for tensors on {device.type}; got {dist.get_backend_config(group)}."
            f" Start it with init_process_group({'nccl' if device.type == 'cuda' else 'gloo'!r})."
        ) from None
    if name != "gloo" and not name.startswith("nccl"):
        raise ValueError(
            f"the backend of the process group for tensors on {device.type} must be gloo or nccl; got {name}. Start it "
            f"with init_process_group({'nccl' if device.type == 'cuda' else 'gloo'!r})."
        )
    return name != "gloo"


def future_on(device: torch.device) -> Future[Any]:
    """Return a future that may be of tensors on ``device``."""
    return Future(devices=None if device.type == "cpu" else [device])


def finished(result: T, device: torch.device) -> Future[T]:
    """Return a future that already has its ``result``, of tensors on ``device``."""
    future: Future[T] = future_on(device)
    future.set_result(result)
    return future


class RankLost(RuntimeError):
    """A message has failed: another rank is gone, or did not come in time."""


@contextmanager
def explained() -> Iterator[None]:
    """Say what it means that a message fails: when it is waited for, or at once if the other rank has already gone.

    Raises:
        RankLost: another rank is gone, or did not come in time.
    """
    try:
        yield
    except RankLost:
        raise
    except RuntimeError as error:
        raise RankLost(
            f"a message among the ranks failed: {error}\nAnother rank has ended, hangs, or lost its link; its own "
            "output may say why. The last checkpoint is whole; to go on, start all ranks again from it, "
            "or where hosts come and go this host."
        ) from error


class _Added(Pending):
    """The sum of what was gathered, added in the order of the ranks into ``out``."""

    def __init__(self, gathered: Pending, out: Tensor) -> None:
        self._gathered, self._out = gathered, out

    def wait(self) -> Tensor:
        first, *others = self._gathered.wait()
        self._out.copy_(first)
        for other in others:
            self._out.add_(other)
        return self._out


class _Staged(Pending):
    """A message of copies in the host's memory, whose result is copied to where it belongs once it has arrived."""

    def __init__(self, pending: Pending, places: Sequence[tuple[Tensor, Tensor]], result: Tensor) -> None:
        self._pending, self._result = pending, result
        self._places = places  # each part of the result, and where it is in the host's memory

    def wait(self) -> Tensor:
        self._pending.wait()
        for place, host in self._places:
            place.copy_(host, non_blocking=True)
        return self._result


class Waitable(Protocol):
    """A message that can be waited for, such as a ``dist.Work``."""

    def wait(self) -> object: ...


class Works(Pending):
    """Messages of torch.distributed in flight, and every tensor they read or write."""

    def __init__(self, works: Sequence[Waitable], result: Tensor, *keep: Tensor) -> None:
        self._works, self._result, self._keep = works, result, keep

    @explained()
    def wait(self) -> Tensor:
        for work in self._works:
            work.wait()
        return self._result


class TorchComm(Comm):
    """The ranks of a torch.distributed process group, over Gloo or NCCL.

    On NCCL ``wait`` makes the current CUDA stream wait, not the host.  Over Gloo tensors on a device are sent through
    pinned memory of the host: whoever launches a message waits until it is copied there.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._groups = [group]  # none once it is released
        self._global = dist.get_process_group_ranks(group)
        self._by_nccl: dict[str, bool] = {}  # by type of device, as far as it is known

    @property
    def group(self) -> dist.ProcessGroup:
        """Of whose ranks this is."""
        return self._groups[0]

    def gather(self, x: Tensor) -> Tensor:
        """Return what every rank handed over, [n] -> [P, n] on the CPU of the first rank; [0, n] on the others."""
        x = self._to_host(x) if self._stages(x) else x
        self._to_first(x)
        every = x.new_empty((self.size if self.rank == 0 else 0, x.numel()), device="cpu")
        length = max(1, PIECE_BYTES // (self.size * x.itemsize))
        for piece, place in zip(x.split(length), every.split(length, 1), strict=True) if x.numel() else ():
            rows = place if x.device.type == "cpu" else piece.new_empty(place.shape)
            dist.gather(piece, list(rows) if self.rank == 0 else None, self._global[0], self.group)
            if rows is not place:
                place.copy_(rows)
        return every

    def mean(self, x: Tensor) -> Tensor:
        """Return the mean over all ranks, [n] -> [n] on the CPU; it means something on the first rank only.

        Of whole numbers and bools it is what the first rank has.
        """
        if not x.is_floating_point():
            return x.to("cpu", copy=True)
        total = self._to_host(x) if self._stages(x) else x.clone()
        self._to_first(x)
        dist.reduce(total, self._global[0], group=self.group)
        return total.div_(self.size).cpu()

    def mean_in_place(self, parts: Sequence[Tensor], dtype: torch.dtype) -> Future[list[Tensor]]:
        """Launch the mean of ``parts`` [n_i] float32 over all ranks, by the backend in one message; a tensor for each.

        As plain DDP does it, or in bfloat16 PyTorch's ``bf16_compress_hook``: each rank's is rounded to ``dtype`` and
        divided, then summed in it.  Several, or in another type than theirs, are copied into one buffer, and on a GPU
        back; on a CPU DDP itself copies from there, before the next step.
        """
        lengths = [part.numel() for part in parts]
        if not sum(lengths):  # of parameters without elements; not every backend can carry it
            return finished(list(parts), parts[0].device)
        alone = len(parts) == 1 and dtype == torch.float32
        x = parts[0] if alone else self.buffer("total", sum(lengths), dtype, parts[0].device)
        places = x.split(lengths)
        for part, place in zip(parts, places, strict=True):
            if dtype == torch.float32:
                torch.div(part, self.size, out=place)
            else:  # 6 times as fast as a division that rounds
                place.copy_(part).div_(self.size)
        self._count("all_reduce", x.nbytes)
        sums: Future[list[Tensor]] = dist.all_reduce(x, group=self.group, async_op=True).get_future()

        def of_each(done: Future[list[Tensor]]) -> list[Tensor]:
            done.value()
            if x.device.type == "cpu":  # as integers, since numpy has no bfloat16
                words = torch.int32 if dtype == torch.float32 else torch.int16
                # DDP reads a storage from its beginning.
                return [torch.from_numpy(place.view(words).numpy()).view(dtype) for place in places]
            for part, place in zip(parts, places, strict=True):
                part.copy_(place)
            return list(parts)

        return sums if alone else sums.then(of_each)

    def mean_of_bucket(self, x: Tensor, failed: Callable[[RankLost], object]) -> Future[Tensor]:
        """Launch the mean of ``x`` over all ranks, in place, as plain DDP does it with a bucket of gradients.

        ``failed`` is called with an error first, since backward gets one of another type.
        """
        self._count("all_reduce", x.nbytes)
        sums: Future[list[Tensor]] = dist.all_reduce(x.div_(self.size), group=self.group, async_op=True).get_future()

        def arrived(done: Future[list[Tensor]]) -> Tensor:
            try:
                with explained():
                    return done.value()[0]
            except RankLost as error:
                failed(error)
                raise

        return sums.then(arrived)

    def _to_first(self, x: Tensor) -> None:
        self._meter.count(0 if self.rank == 0 else x.nbytes)

    def release(self) -> None:
        """Forget the process group too: its sockets are open until nobody refers to it."""
        super().release()
        self._groups.clear()

    def _all_reduce(self, x: Tensor, direct: bool) -> Pending:
        if self.size == 1:
            return Works([], x)
        if self._stages(x):
            host = self._to_host(x)
            return _Staged(self._all_reduce(host, direct), [(x, host)], x)
        if direct:
            return _Added(self._all_gather(x, x.new_empty((self.size, *x.shape))), x)
        return Works([dist.all_reduce(x, group=self.group, async_op=True)], x)

    @explained()
    def _all_gather(self, x: Tensor, out: Tensor) -> Pending:
        if self._stages(x):
            host, arriving = self._to_host(x), self._on_host(out)
            return _Staged(self._all_gather(host, arriving), [(out, arriving)], out)
        if self.uses_nccl(x.device):
            into_one = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before 2.13
            return Works([into_one(out, x, group=self.group, async_op=True)], out, x)
        out[self.rank].copy_(x)
        return Works(self._to_others([(by, x, out[self._far(-by)]) for by in range(1, self.size)], tag=1), out, x)

    def _broadcast(self, x: Tensor, source: int) -> Pending:
        if self.size == 1:
            return Works([], x)
        if self._stages(x):
            host = self._to_host(x)
            return _Staged(self._broadcast(host, source), [(x, host)], x)
        return Works([dist.broadcast(x, self._global[source], group=self.group, async_op=True)], x)

    @explained()
    def _shift(self, x: Tensor, out: Tensor, by: int) -> Pending:
        if by % self.size == 0:
            return Works([], out.copy_(x))
        if self._stages(x):
            host, arriving = self._to_host(x), self._on_host(out)
            return _Staged(self._shift(host, arriving, by), [(out, arriving)], out)
        return Works(self._to_others([(by, x, out)], tag=0), out, x)

    @explained()
    def _all_to_all(self, x: Tensor, out: Tensor, by: Sequence[int]) -> Pending:
        if self._stages(x):
            host, arriving = self._to_host(x), self._on_host(out)
            from_others = [self._far(-each) for each in by]
            places = [(out[row], arriving[row]) for row in from_others]
            return _Staged(self._all_to_all(host, arriving, by), places, out)
        if 0 < len(by) == self.size - 1 and self.uses_nccl(x.device):  # 2 (P - 1) calls of Python take 1.8 ms at P = 64
            return Works([dist.all_to_all_single(out, x, group=self.group, async_op=True)], out, x)
        rows = [(each, x[self._far(each)], out[self._far(-each)]) for each in by]
        return Works(self._to_others(rows, tag=2), out, x)

    def _to_others(self, rows: Sequence[tuple[int, Tensor, Tensor]], tag: int) -> Sequence[Waitable]:
        """Of each (by, leaving, arriving) send the second to the rank ``by`` further on, receive from as far back.

        Directly, so that a message makes one hop: Gloo's own all-gather goes round a ring.  By ``tag`` ranks that
        launch different messages fail to meet, where otherwise one would take the other's for its own; NCCL has none.
        """
        # The receives are posted first: on Gloo nothing is buffered for a receiver that is not there yet.
        calls: list[tuple[Callable[..., dist.Work | None], Tensor, int]] = [
            (dist.irecv, arriving, self._global[self._far(-by)]) for by, _, arriving in rows
        ]
        calls += [(dist.isend, leaving, self._global[self._far(by)]) for by, leaving, _ in rows]
        if rows and self.uses_nccl(rows[0][1].device):
            each = [dist.P2POp(call, x, other, self.group) for call, x, other in calls]
            return list(dist.batch_isend_irecv(each))
        works = [call(x, other, self.group, tag) for call, x, other in calls]
        return [work for work in works if work is not None]  # None only on a rank outside the group

    def uses_nccl(self, device: torch.device) -> bool:
        if device.type not in self._by_nccl:
            self._by_nccl[device.type] = carries_by_nccl(self.group, device)
        return self._by_nccl[device.type]

    # - tensors on a device, over Gloo

    def stages(self, device: torch.device) -> bool:
        """Whether tensors on ``device`` are sent through the host's memory."""
        return device.type != "cpu" and not self.uses_nccl(device)

    def _stages(self, x: Tensor) -> bool:
        return self.stages(x.device)

    def _to_host(self, x: Tensor) -> Tensor:
        """A copy of ``x`` in the host's memory, which is there when this returns."""
        host = self._on_host(x).copy_(x, non_blocking=True)
        if x.device.type == "cuda":
            torch.cuda.current_stream(x.device).synchronize()
        return host

    def _on_host(self, x: Tensor) -> Tensor:
        """Memory of the host like ``x``, uninitialised; pinned, so that a copy to the device waits for nobody."""
        return torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.device.type == "cuda")

    def _far(self, by: int) -> int:
        """The rank ``by`` further on."""
        return (self.rank + by) % self.size


def world() -> TorchComm:
    """All ranks, for the main thread."""
    everyone = dist.group.WORLD
    assert everyone is not None
    return TorchComm(everyone)
