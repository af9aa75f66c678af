"""Buffers under local steps: rank 0's on every rank, as DistributedDataParallel has it, and batch norm's mean."""

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from lightning_sparse.checks import uncompiled
from lightning_sparse.engine.checksum import checksum, digest
from lightning_sparse.engine.lanes import Lane
from lightning_sparse.network.agreement import ranks_having

_KIND_BITS = 21  # of a buffer's word: of its shape and type, and whether somebody set it; the others are of its bits

OnLane = Callable[[Callable[[Lane], Tensor | None]], Tensor | None]  # does work on the first lane, and waits for it


@dataclass(frozen=True)
class Shown:
    """A buffer when all ranks had the same in it."""

    tensor: Tensor
    version: int | None  # None: of any
    bits: Tensor  # their digest []


class ModuleBuffers:
    """The buffers of a module, which follow DistributedDataParallel's rule while its own broadcast is off.

    Of a buffer that differs between ranks all take rank 0's; of the statistics of batch norm all take the mean.  Ranks
    compare buffers every few steps, by checksums, and send in the next step what differed; what all ranks have set
    alike is neither sent nor touched.  While the average is shown all ranks have the same; afterwards a rank gets its
    own back, where nobody has set the buffer meanwhile.

    Args:
        module: whose buffers are found anew each time, since they may come late, change shape or be replaced.
        ignored: names of those that each rank has for itself.
        shared: whether ranks share any, as with ``broadcast_buffers=True``.
        device: of messages.
    """

    def __init__(
        self,
        module: nn.Module | None,
        ignored: Collection[str] = (),
        shared: bool = True,
        device: torch.device = torch.device("cpu"),  # noqa: B008  # constant
    ) -> None:
        self.module, self._ignored, self._is_shared, self._device = module, set(ignored), shared, device
        self._own: dict[str, Tensor] = {}  # while the same is shown on all ranks, what differed on this one
        self._late: set[str] = set()  # of these, those that a checkpoint's model will be loaded over
        self._shown: dict[str, Shown] = {}  # empty where nothing is
        self._set: set[str] = set()  # that somebody has set on this rank while they were shown, and no rank knows of
        self._check_is_due = False  # since they were shown
        self.differing: list[str] = []  # that ranks know to differ, to be sent next
        self._asked: list[str] = []  # whose words are under way
        self._words: Tensor | None = None  # [k], whose memory must stay until it has been sent
        self._every: Tensor | None = None  # of all ranks [P, k]
        self._message: BufferMessage | None = None  # under way

    def named(self) -> dict[str, Tensor]:
        """All buffers by name, as the module holds them now."""
        found = () if self.module is None else self.module.named_buffers()
        return {uncompiled(name): x for name, x in found if x.layout == torch.strided}

    def _named(self) -> dict[str, Tensor]:
        """Those that ranks share."""
        return {n: x for n, x in self.named().items() if n not in self._ignored} if self._is_shared else {}

    # - beside training

    def send(self, launch: Callable[[Lane, Callable[[Lane], None]], None], lane: Lane, compares: bool) -> None:
        """Have those that differ sent, and compare all, or else those that somebody has set while they were shown."""
        asks = compares or self._check_is_due
        now = self._named() if asks or self.differing else {}
        if due := {name: now[name] for name in self.differing if name in now}:
            self._message = self._message_of(due)
        if asks := asks and bool(now) and lane.comm.everyone.size > 1:
            self._asked, self._words = list(now), self._words_of(now, None if compares else self._set)
        lane.wait_for_caller()
        if self._message is not None:
            launch(lane, self._message.send)
        if asks:
            launch(lane, self._gather)
        self.differing, self._check_is_due, self._set = [], False, set()

    def _gather(self, lane: Lane) -> None:
        assert self._words is not None
        self._every = lane.comm.everyone.all_gather(self._words).wait()

    def receive(self) -> None:
        """Take what has arrived, unless somebody has set it meanwhile; learn which differ, to be sent next."""
        message, self._message = self._message, None
        if message is not None:
            message.apply_late(self._named())
        if self._every is not None:
            differing, told = self._compared(self._asked, self._every)
            self.differing = [name for name in differing if name in told]
        self._words = self._every = None

    def drop(self) -> None:
        """Forget what is under way."""
        self._message = self._words = self._every = None

    # - whoever looks

    def show(self, on_lane: OnLane, ranks: int) -> None:
        """Have all ranks hold the same, at once; to be called on every rank."""
        now = self._named()
        if not now or ranks == 1:
            return
        self._note_what_was_set()
        words = self._words_of(now, self._set)
        every = on_lane(lambda lane: lane.comm.everyone.all_gather(words).wait())
        assert every is not None
        differing, told = self._compared(list(now), every)
        if differing:
            message = self._message_of({name: now[name] for name in differing})
            on_lane(lambda lane: message.send(lane))
            for name, value in message.values().items():
                self._own.setdefault(name, now[name].detach().clone())
                set_to(now[name], value)
        for name in told:  # all ranks go on with what they have now
            self._own.pop(name, None)
        self._shown, self._set, self._check_is_due = self._as_shown(now), set(), True

    def hide(self) -> None:
        """Give this rank its own back, where nobody has set the buffer meanwhile."""
        if not self._shown:
            return
        self._note_what_was_set()
        now = self.named()
        for name, own in self._own.items():
            if name in now and now[name].shape == own.shape:
                set_to(now[name], own)
        self._own, self._shown, self._late = {}, {}, set()

    def keep_shown(self) -> None:
        """Have each rank go on with what all have."""
        self._own, self._shown, self._late = {}, {}, set()

    def _note_what_was_set(self) -> None:
        """Leave alone what somebody has set since it was shown."""
        now = self.named()
        shown = {name: each for name, each in self._shown.items() if name in now}
        if not shown:
            return
        sums = torch.stack([digest(now[name]).to(self._device) for name in shown])
        moved = (sums != torch.stack([each.bits.to(self._device) for each in shown.values()])).tolist()
        for (name, each), differs in zip(shown.items(), moved, strict=True):
            x = now[name]
            if (differs or (x is each.tensor and each.version not in (None, _version(x)))) and name not in self._late:
                self._own.pop(name, None)
                self._set.add(name)
                if self._message is not None:
                    self._message.forget(name)

    def _as_shown(self, now: Mapping[str, Tensor]) -> dict[str, Shown]:
        return {name: Shown(x, _version(x), digest(x)) for name, x in now.items()}

    # - checkpoints, and other averagers

    def own(self) -> dict[str, Tensor]:
        """What this rank goes on with, by name."""
        self._note_what_was_set()
        return self.named() | self._own

    def saved(self) -> dict[str, Tensor]:
        """Those of them that a checkpoint keeps."""
        names = set() if self.module is None else saved_names(self.module)
        return {name: x for name, x in self.own().items() if name in names}

    def checksums(self) -> dict[str, Tensor]:
        """One of what the module holds, by name."""
        return {name: checksum(x).cpu() for name, x in self.named().items()}

    def hold(self, own: Mapping[str, Tensor], late: Collection[str] = ()) -> None:
        """Go on with this rank's ``own``, while the module holds what is shown, or will for those that are ``late``."""
        now = self.named()
        fitting = {name: x for name, x in own.items() if name in now and now[name].shape == x.shape}
        self._own |= {name: x.to(now[name].device, now[name].dtype, copy=True) for name, x in fitting.items()}
        self._late |= set(late)
        shown = self._as_shown(now)
        self._shown = {name: replace(each, version=None) for name, each in shown.items()}  # it may be loaded again
        self._check_is_due = True

    def restart(self) -> None:
        """Take what the module holds, which was loaded."""
        self.keep_shown()
        self.drop()
        self._shown, self.differing, self._check_is_due = self._as_shown(self.named()), [], True

    def take_over(self, before: "ModuleBuffers") -> None:
        """Go on with what each rank has in ``before``, which was of the same module; DDP has copied rank 0's since."""
        now = self.named()
        same = [name for name, x in before._shown.items() if name in now and torch.equal(digest(now[name]), x.bits)]
        self.hold({name: before._own[name] for name in same if name in before._own})
        self.differing = before.differing

    # - words

    def _words_of(self, now: Mapping[str, Tensor], told: Collection[str] | None = None) -> Tensor:
        """A number of each buffer [k] int64: its bits, its shape and type, and whether it is ``told`` (None: yes)."""
        bits = torch.stack([digest(x).to(self._device) for x in now.values()])
        kinds = [zlib.crc32(f"{name} {list(x.shape)} {x.dtype}".encode()) for name, x in now.items()]
        tells = [told is None or name in told for name in now]
        low = [(kind << 1) % 2**_KIND_BITS + tell for kind, tell in zip(kinds, tells, strict=True)]
        return (bits << _KIND_BITS) + torch.tensor(low, dtype=torch.int64, device="cpu").to(
            self._device, non_blocking=True
        )

    def _compared(self, names: Collection[str], words: Tensor) -> tuple[list[str], set[str]]:
        """The names of those that differ between ranks, and of those that a rank tells of; ``words`` are [P, k].

        Raises:
            RuntimeError: on every rank, if one is not of the same shape and type on all.
        """
        rows = words.cpu()
        kinds = (rows >> 1) % 2 ** (_KIND_BITS - 1)
        for name, of_ranks in zip(names, kinds.T.tolist(), strict=True):
            if len(having := ranks_having(of_ranks)) > 1:
                raise RuntimeError(
                    f"buffer {name} must be of the same shape and type on every rank, since all take rank 0's; got "
                    f"others on {' and on '.join(having.values())}. Give broadcast_buffers=False, with which each rank "
                    "has its own."
                )
        bits = rows >> _KIND_BITS
        differs, told = (bits != bits[0]).any(0).tolist(), (rows % 2).any(0).tolist()
        found = list(zip(names, differs, told, strict=True))
        return [name for name, each, _ in found if each], {name for name, _, each in found if each}

    def _message_of(self, buffers: Mapping[str, Tensor]) -> "BufferMessage":
        return BufferMessage(buffers, _norms_in(self.module), self._device)


def saved_names(module: nn.Module) -> set[str]:
    """The names of what a checkpoint keeps of ``module``."""
    return {uncompiled(name) for name in module.state_dict(keep_vars=True)}


def _norms_in(module: nn.Module | None) -> dict[str, _BatchNorm]:
    """The batch norm that a running mean or variance is of, by the name of that buffer."""
    norms = [] if module is None else [x for x in module.named_modules() if isinstance(x[1], _BatchNorm)]
    dotted = [(f"{prefix}." if prefix else "", norm) for prefix, norm in norms]
    return {uncompiled(f"{dot}{name}"): norm for dot, norm in dotted for name in ("running_mean", "running_var")}


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


@dataclass(frozen=True)
class Statistic:
    """A running mean or variance of a batch norm, and what it was when it was taken up."""

    norm: _BatchNorm
    is_variance: bool
    tensor: Tensor
    value: Tensor
    count: Tensor | None  # of batches that the norm had seen []

    @classmethod
    def of(cls, norm: _BatchNorm, is_variance: bool, tensor: Tensor) -> "Statistic":
        count = norm.num_batches_tracked
        return cls(norm, is_variance, tensor, tensor.detach().clone(), None if count is None else count.clone())

    def since(self, mean: Tensor) -> Tensor:
        """What the statistic is if it was ``mean`` when it was taken up: what the norm has seen since is kept.

        A batch replaces the part ``momentum`` of it; without a momentum it is the mean over all batches.  A count that
        was set back leaves it as it is.
        """
        count, now = self.count, self.norm.num_batches_tracked
        if count is None or now is None:
            return mean
        momentum, since = self.norm.momentum, (now - count).double()
        left = count.double() / now.double() if momentum is None else (1 - momentum) ** since
        left = torch.where(since == 0, 1.0, left)
        moved = self.tensor.double() + left * (mean.double() - self.value.double())
        moved = torch.where(moved.isfinite(), moved.clamp(min=0) if self.is_variance else moved, mean.double())
        return torch.where(since < 0, self.tensor.double(), moved).to(mean.dtype)


class BufferMessage:
    """What is sent of buffers that differ between ranks: their bytes on rank 0, and sums of statistics.

    A rank whose statistic is not finite has no part in the mean.  Taking up, sending and reading wait for nothing.

    Args:
        buffers: by name, the same names and shapes on every rank.
        norms: by name, the batch norm that a statistic is of, where a buffer is one.
        device: of messages.
    """

    def __init__(self, buffers: Mapping[str, Tensor], norms: Mapping[str, _BatchNorm], device: torch.device) -> None:
        self._statistics = {
            name: Statistic.of(norms[name], name.endswith("running_var"), x)
            for name, x in buffers.items()
            if name in norms and x.is_floating_point()
        }
        copied = {name: x for name, x in buffers.items() if name not in self._statistics and x.numel()}
        self._copied = {name: (x.shape, x.dtype) for name, x in copied.items()}  # as they are now
        wide = any(x.value.dtype == torch.float64 for x in self._statistics.values())
        dtype = torch.float64 if wide else torch.float32
        sums = [_summand(x.value.to(device, dtype)) for x in self._statistics.values()]
        self._sums = torch.cat(sums) if sums else None
        self._bytes = torch.cat([bytes_of(x).to(device) for x in copied.values()]) if copied else None
        self._is_first = False  # this rank is 0
        self._forgotten: set[str] = set()

    def send(self, lane: Lane) -> None:
        """Send it; to be called on every rank."""
        comm = lane.comm.everyone
        self._is_first = comm.rank == 0
        pending = [] if self._sums is None else [comm.all_reduce(self._sums)]
        pending += [] if self._bytes is None else [comm.broadcast(self._bytes, 0)]
        for each in pending:
            each.wait()

    def forget(self, name: str) -> None:
        """Leave a buffer as it is, which somebody has set."""
        self._forgotten.add(name)

    def values(self) -> dict[str, Tensor]:
        """What all ranks take, by name."""
        found = {}
        if self._sums is not None:
            sums = self._sums.split([x.value.numel() + 1 for x in self._statistics.values()])
            for (name, statistic), total in zip(self._statistics.items(), sums, strict=True):
                value = statistic.value
                mean = (total[:-1] / total[-1]).view(value.shape).to(value)
                found[name] = torch.where(total[-1].to(value.device) > 0, mean, value)
        if self._bytes is not None:
            parts = self._bytes.split([shape.numel() * dtype.itemsize for shape, dtype in self._copied.values()])
            for (name, kind), raw in zip(self._copied.items(), parts, strict=True):
                found[name] = from_bytes(raw, *kind)
        return found

    def apply_late(self, now: Mapping[str, Tensor]) -> None:
        """Set the buffers that the module has ``now``, where training has gone on since they were taken up."""
        for name, value in self.values().items():
            x, statistic = now.get(name), self._statistics.get(name)
            if x is None or (x.shape, x.dtype) != (value.shape, value.dtype) or name in self._forgotten:
                continue
            if statistic is None:
                if not self._is_first:
                    set_to(x, value)
            elif x is statistic.tensor:
                set_to(x, statistic.since(value))


def _summand(x: Tensor) -> Tensor:
    """``x`` [*s] as one row, and 1 after it; zeros if it is not finite."""
    row = torch.cat([x.reshape(-1), x.new_ones(1)])
    return torch.where(row.isfinite().all(), row, 0.0)


def bytes_of(x: Tensor) -> Tensor:
    """The bytes of ``x`` in its order [b] uint8; of any type."""
    return x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def from_bytes(raw: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The tensor of this shape and type whose bytes are ``raw``."""
    return raw.clone().view(dtype).view(shape)  # at an address that fits the type


def set_to(x: Tensor, value: Tensor) -> None:
    """Set ``x``, also one that was made in inference mode."""
    with torch.inference_mode(x.is_inference()), torch.no_grad():
        x.copy_(value)


def derive_anew(module: nn.Module | None) -> None:
    """Derive them from what the parameters hold now, for whoever reads them before the next forward.

    Not those of parameters that FSDP2 shards, which are whole in a forward alone.
    """
    for owner, hook in _hooks_in(module):
        if any(isinstance(p, DTensor) for p in owner.parameters(recurse=False)):
            continue
        if isinstance(hook, BasePruningMethod):
            setattr(owner, hook._tensor_name, hook.apply_mask(owner))
        elif isinstance(hook, WeightNorm):
            setattr(owner, hook.name, hook.compute_weight(owner))
        elif isinstance(hook, SpectralNorm):
            setattr(owner, hook.name, hook.compute_weight(owner, do_power_iteration=False))


def _hooks_in(module: nn.Module | None) -> Iterator[tuple[nn.Module, object]]:
    for owner in () if module is None else module.modules():
        for hook in getattr(owner, "_forward_pre_hooks", {}).values():
            yield owner, hook
