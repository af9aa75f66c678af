"""The strategies that a benchmark compares, by name: this project's and their peers.

All of them run through the same Trainer.  Lightning registers DDP's communication hooks on CUDA only, so the peers
here register theirs themselves, on every device.
"""

import inspect
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future

from lightning_sparse.compressors import COMPRESSORS, NAMES, Auto, MiCRO
from lightning_sparse.engine.local_steps import LocalSteps
from lightning_sparse.network.comm import traffic
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


class Peer(DDPStrategy):
    """DDP with or without a hook, which can say what it sent: all of the gradient, ``bytes_each`` an element."""

    def __init__(
        self, hook: Callable[..., Any] | None = None, state: Any = None, bytes_each: int = 4, **ddp_kwargs: Any
    ) -> None:
        super().__init__(**ddp_kwargs)
        self._hook, self._state, self._bytes_each = hook, state, bytes_each

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, nn.parallel.DistributedDataParallel)
        self._elements = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        if self._hook is not None:
            self.model.register_comm_hook(self._state, self._hook)

    def sent_bytes(self) -> int:
        """Payload this rank put on the wire in the last step, counted as for this project's own strategies."""
        return traffic("all_reduce", self._elements * self._bytes_each, self.world_size)


class PowerSGD(Peer):
    """DDP with PyTorch's PowerSGD hook, in one bucket."""

    def __init__(self, rank: int, **ddp_kwargs: Any) -> None:
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=_POWERSGD_START)
        super().__init__(powerSGD_hook, state, bucket_cap_mb=_ONE_BUCKET_MB, **ddp_kwargs)
        self._sent_before = 0

    def sent_bytes(self) -> int:
        """The factors, and the parameters that are not worth factoring; all of the gradient in the first steps."""
        total: int = self._state.total_numel_after_compression
        elements, self._sent_before = total - self._sent_before, total
        return traffic("all_reduce", 4 * (elements or self._elements), self.world_size)


def send_nothing(state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A hook that leaves each rank its own gradient: the time of a step without a network."""
    del state
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def bf16_hook(state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A hook that does what PyTorch's ``bf16_compress_hook`` does, which refuses to be registered off CUDA."""
    del state
    buffer: Tensor = bucket.buffer()
    rounded = buffer.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(rounded, async_op=True)
    assert work is not None
    future: Future[Tensor] = work.get_future().then(lambda done: buffer.copy_(done.value()[0]))
    return future


# - by name


_ONE_BUCKET = (
    "PyTorch's powerSGD_hook with all gradients in one bucket: with several it waits inside callbacks, which hangs or "
    f"aborts on Gloo; its first {_POWERSGD_START} steps are dense"
)
#: Name -> what makes the strategy, and what a reader must know about it.
PEERS: dict[str, tuple[Callable[..., Peer], str]] = {
    "ddp": (Peer, "Lightning's DDPStrategy"),
    "fp16_hook": (partial(Peer, fp16_compress_hook, bytes_each=2), "PyTorch's fp16_compress_hook"),
    "bf16_hook": (
        partial(Peer, bf16_hook, bytes_each=2),
        "the same as PyTorch's bf16_compress_hook, written again because PyTorch's refuses to run off CUDA",
    ),
    "powersgd_1": (partial(PowerSGD, 1), _ONE_BUCKET),
    "powersgd_4": (partial(PowerSGD, 4), _ONE_BUCKET),
    NO_COMMUNICATION: (
        partial(Peer, send_nothing, bytes_each=0),
        "a hook that sends nothing: the time of a step without a network; no real training",
    ),
}


@dataclass(frozen=True)
class Contender:
    """One row of the table."""

    label: str  # names the row; distinct from all others
    spec: str  # what to run, in the form of `SPEC_FORM`

    def build(self) -> DDPStrategy:
        """Make a fresh strategy; raises a ValueError for an unknown name or option, or a value out of range."""
        name, *options = self.spec.split(":")
        if name in PEERS:
            if options:
                raise ValueError(f"strategy {self.spec!r}: {name} takes no options.")
            return PEERS[name][0](**_COMMON)
        if name == ADVISE:  # dense steps would take long where the link is slow
            every = tuple(kind() for kind in COMPRESSORS.values())
            return SparseDDPStrategy(Auto(every, start=MiCRO()), **_COMMON)
        if name not in NAMES:
            known = ", ".join([*PEERS, *NAMES])
            raise ValueError(
                f"strategy {self.spec!r}: the name must be one of {known}; got {name!r}. Write {SPEC_FORM}."
            )
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


def all_names() -> str:
    """Every peer and every compressor, as :func:`contenders` reads them."""
    return ",".join([*(name for name in PEERS if name != NO_COMMUNICATION), *COMPRESSORS])


def _build_sparse(spec: str, name: str, options: list[str]) -> SparseDDPStrategy:
    kind = NAMES[name]
    of_compressor = {f.name: f.default for f in fields(kind)}  # type: ignore[arg-type]
    of_strategy = {*inspect.signature(SparseDDPStrategy).parameters, "gradient_as_bucket_view"}
    of_local_steps = {f.name for f in fields(LocalSteps)} - {"steps"}
    known = [*of_compressor, *sorted((of_strategy | of_local_steps) - {"compressor", "ddp_kwargs"})]
    settings: tuple[dict[str, Any], dict[str, Any], dict[str, Any]] = {}, {}, {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or key not in known:
            raise ValueError(
                f"strategy {spec!r}: an option must be option=value with one of {', '.join(known)}; got {option!r}"
            )
        is_list = isinstance(of_compressor.get(key), tuple)
        place = 0 if key in of_compressor else 2 if key in of_local_steps else 1
        settings[place][key] = tuple(text.split("+")) if is_list else _value(text)
    if settings[2]:
        settings[1]["local_steps"] = LocalSteps(settings[1].get("local_steps", 0), **settings[2])
    return SparseDDPStrategy(kind(**settings[0]), **settings[1], **_COMMON)


def _value(text: str) -> Any:
    """A number, true or false, or the text itself; what is allowed is the business of whom it is given to."""
    try:
        return json.loads(text)
    except ValueError:
        return text
