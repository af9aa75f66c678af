"""What a benchmark compares: this project's strategies and their peers, by name.

All of them run through the same Trainer.  Lightning registers DDP's communication hooks on CUDA only, so the peers
here register theirs themselves, on every device.
"""

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from lightning_sparse.comm import traffic
from lightning_sparse.compressors import COMPRESSORS, NAMES, Auto, MiCRO
from lightning_sparse.strategy import SparseDDPStrategy

NO_COMMUNICATION = "no_communication"
ADVISE = "advise"  # every compressor measured, none preferred: for `lightning-sparse advise`
SPEC_FORM = "'name' or 'name:option=value:option=value', such as 'skip_reduce:skip=0.5:wire_dtype=bfloat16'"

# Of every strategy: the ranks start from the same seed, so the model need not be sent around before each fit; and a
# rank that waits for one that is gone must give up while somebody is watching.
_COMMON: dict[str, Any] = {"init_sync": False, "timeout": timedelta(minutes=10)}
_ONE_BUCKET_MB = 2**20
_POWERSGD_START = 2  # the least PyTorch allows


# - peers


class Peer(DDPStrategy, ABC):
    """DDP with or without a hook of PyTorch's, which can say what it sent."""

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        self._elements = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        self.register(self.model)

    def register(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Register the hook, if there is one."""

    @abstractmethod
    def sent_bytes(self) -> int:
        """Payload this rank put on the wire in the last step, counted as for this project's own."""

    def _all_reduced(self, elements: int, bytes_each: int) -> int:
        return traffic("all_reduce", elements * bytes_each, self.world_size)


class PlainDDP(Peer):
    """DDP as it is."""

    def sent_bytes(self) -> int:
        """All of the gradient."""
        return self._all_reduced(self._elements, 4)


class HalfPrecision(Peer):
    """DDP with a hook that sends two bytes an element."""

    def __init__(self, hook: Callable[..., Any], **ddp_kwargs: Any) -> None:
        super().__init__(**ddp_kwargs)
        self._hook = hook

    def register(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Register the hook."""
        ddp.register_comm_hook(None, self._hook)

    def sent_bytes(self) -> int:
        """All of the gradient, in half precision."""
        return self._all_reduced(self._elements, 2)


class PowerSGD(Peer):
    """DDP with PyTorch's PowerSGD hook, in one bucket."""

    def __init__(self, rank: int, **ddp_kwargs: Any) -> None:
        super().__init__(bucket_cap_mb=_ONE_BUCKET_MB, **ddp_kwargs)
        self._matrix_rank = rank

    def register(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Register the hook."""
        self._state = PowerSGDState(
            None, matrix_approximation_rank=self._matrix_rank, start_powerSGD_iter=_POWERSGD_START
        )
        self._sent_before = 0
        ddp.register_comm_hook(self._state, powerSGD_hook)

    def sent_bytes(self) -> int:
        """The factors, and the parameters that are not worth factoring; all of the gradient in the first steps."""
        total: int = self._state.total_numel_after_compression
        elements, self._sent_before = total - self._sent_before, total
        return self._all_reduced(elements or self._elements, 4)


class NoCommunication(Peer):
    """DDP with a hook that sends nothing: the time of a step without a network.  The ranks train apart."""

    def register(self, ddp: nn.parallel.DistributedDataParallel) -> None:
        """Register the hook."""
        ddp.register_comm_hook(None, _keep)

    def sent_bytes(self) -> int:
        """Nothing."""
        return 0


def _keep(state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    del state
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def bf16_hook(state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """What PyTorch's ``bf16_compress_hook`` does, which refuses to be registered off CUDA."""
    del state
    buffer: Tensor = bucket.buffer()
    rounded = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(rounded, async_op=True)
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return future


# - by name


@dataclass(frozen=True)
class _Named:
    make: Callable[..., DDPStrategy]
    note: str = ""


_ONE_BUCKET = (
    "PyTorch's powerSGD_hook with all gradients in one bucket: with several it waits inside callbacks, which hangs or "
    f"aborts on Gloo; its first {_POWERSGD_START} steps are dense"
)
PEERS = {
    "ddp": _Named(PlainDDP, "Lightning's DDPStrategy"),
    "fp16_hook": _Named(lambda **kw: HalfPrecision(fp16_compress_hook, **kw), "PyTorch's fp16_compress_hook"),
    "bf16_hook": _Named(
        lambda **kw: HalfPrecision(bf16_hook, **kw),
        "the same as PyTorch's bf16_compress_hook, written again because PyTorch's refuses to run off CUDA",
    ),
    "powersgd_1": _Named(lambda **kw: PowerSGD(1, **kw), _ONE_BUCKET),
    "powersgd_4": _Named(lambda **kw: PowerSGD(4, **kw), _ONE_BUCKET),
    NO_COMMUNICATION: _Named(
        NoCommunication, "a hook that sends nothing: the time of a step without a network; no real training"
    ),
}


@dataclass(frozen=True)
class Contender:
    """One row of the table.

    Attributes:
        label: names the row; distinct from all others.
        spec: what to run, in the form of ``SPEC_FORM``.
    """

    label: str
    spec: str

    def build(self) -> DDPStrategy:
        """A fresh strategy.

        Raises:
            ValueError: for an unknown name or option, or a value out of range.
        """
        name, *options = self.spec.split(":")
        if name in PEERS:
            if options:
                raise ValueError(f"strategy {self.spec!r}: {name} takes no options.")
            return PEERS[name].make(**_COMMON)
        if name == ADVISE:  # dense steps would take long where the link is slow
            every = tuple(kind() for kind in COMPRESSORS.values())
            return SparseDDPStrategy(Auto(every, start=MiCRO()), **_COMMON)
        if name not in NAMES:
            known = ", ".join([*PEERS, *NAMES])
            raise ValueError(f"strategy {self.spec!r}: {name!r} is not one of {known}. Write {SPEC_FORM}.")
        return _build_sparse(self.spec, name, options)


def contenders(text: str) -> list[Contender]:
    """Read a comma-separated list of strategies.  One that is named twice runs twice: "ddp" and "ddp#2".

    Raises:
        ValueError: as :meth:`Contender.build`.
    """
    seen: Counter[str] = Counter()
    found = []
    for spec in (part.strip() for part in text.split(",")):
        seen[spec] += 1
        contender = Contender(spec if seen[spec] == 1 else f"{spec}#{seen[spec]}", spec)
        contender.build()
        found.append(contender)
    return found


def note_of(name: str) -> str:
    """What a reader must know about a strategy, or ""."""
    return PEERS[name].note if name in PEERS else ""


def all_names() -> str:
    """Every peer and every compressor, as :func:`contenders` reads them."""
    return ",".join([*(name for name in PEERS if name != NO_COMMUNICATION), *COMPRESSORS])


def _build_sparse(spec: str, name: str, options: list[str]) -> SparseDDPStrategy:
    kind = NAMES[name]
    of_compressor = {f.name: f.default for f in fields(kind) if f.default is not MISSING}  # type: ignore[arg-type]
    of_strategy = {
        p.name: p.default
        for p in inspect.signature(SparseDDPStrategy).parameters.values()
        if p.default is not p.empty and p.name != "compressor"
    } | {"gradient_as_bucket_view": True}
    settings: dict[str, Any] = {}
    for option in options:
        key, equals, value = option.partition("=")
        defaults = of_compressor | of_strategy
        if not equals or key not in defaults:
            raise ValueError(f"strategy {spec!r}: {option!r} is not option=value with one of {', '.join(defaults)}.")
        settings[key] = _value(spec, option, value, defaults[key])
    compressor = kind(**{k: v for k, v in settings.items() if k in of_compressor})
    return SparseDDPStrategy(compressor, **{k: v for k, v in settings.items() if k in of_strategy}, **_COMMON)


def _value(spec: str, option: str, text: str, default: object) -> object:
    """``text`` as a value of the type of ``default``."""
    if isinstance(default, bool):
        if text.lower() in ("true", "false"):
            return text.lower() == "true"
    elif isinstance(default, int | float):
        try:
            return type(default)(text)
        except ValueError:
            pass
    elif isinstance(default, str):
        return text
    elif isinstance(default, tuple):
        return tuple(text.split("+"))
    raise ValueError(f"strategy {spec!r}: {option!r} needs a value such as {default!r}.")
