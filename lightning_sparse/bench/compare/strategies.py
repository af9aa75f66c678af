"""The strategies that a benchmark compares, by name: this project's and their peers.

All of them run through the same Trainer.  Lightning registers DDP's communication hooks on CUDA only, so the peers
here register theirs themselves, on every device.
"""

import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.auto.policy import NAMES, Auto
from lightning_sparse.checks import is_number
from lightning_sparse.compressors import COMPRESSORS, Dense, TopK
from lightning_sparse.compressors.named import did_you_mean
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.costs import traffic
from lightning_sparse.network.members import AUTO
from lightning_sparse.trainer.signals import leave_out_message_before_batches
from lightning_sparse.trainer.strategy import SparseDDPStrategy

NO_COMMUNICATION = "no_communication"
ADVISE = "advise"  # sparse_auto until it has chosen: for `lightning-sparse advise`
SPEC_FORM = "'name' or 'name:option=value:option=value', such as 'skip_reduce:skip=0.5:wire_dtype=bfloat16'"
RATE = "lr"  # the option of every strategy that says at which learning rate it trains

# Of every strategy: the ranks start from the same seed, so the model need not be sent around before each fit; and a
# rank that waits for one that is gone must give up while somebody is watching.
_COMMON: dict[str, Any] = {"timeout": timedelta(minutes=10)}
if "init_sync" in inspect.signature(DistributedDataParallel).parameters:  # since PyTorch 2.7
    _COMMON["init_sync"] = False
_ONE_BUCKET_MB = 2**20
_POWERSGD_START = 2  # steps that are dense; the least PyTorch allows


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


class Alone(Peer):
    """Each rank trains for itself, and waits for nobody."""

    def __init__(self, **ddp_kwargs: Any) -> None:
        super().__init__(send_nothing, bytes_each=0, **ddp_kwargs)

    def on_train_start(self) -> None:
        assert self.lightning_module is not None
        leave_out_message_before_batches(self.lightning_module.trainer)
        super().on_train_start()


class PowerSGD(Peer):
    """DDP with PyTorch's PowerSGD hook, in one bucket: with several it waits inside callbacks, which hangs on Gloo."""

    def __init__(self, rank: int, **ddp_kwargs: Any) -> None:
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=_POWERSGD_START)
        super().__init__(powerSGD_hook, state, bucket_cap_mb=_ONE_BUCKET_MB, **ddp_kwargs)
        self._sent_before = 0

    def sent_bytes(self) -> int:
        """The factors, and the parameters that are not worth factoring; all of the gradient in the first steps."""
        total: int = self._state.total_numel_after_compression
        elements, self._sent_before = total - self._sent_before, total
        return traffic("all_reduce", 4 * (elements or self._elements), self.world_size)


def diloco(
    *,
    steps: int = 16,
    outer_rate: float = 0.7,
    outer_momentum: float = 0.9,
    start: int = 0,
    local_group: int | str = AUTO,
    **ddp_kwargs: Any,
) -> SparseDDPStrategy:
    """DiLoCo (Douillard et al., 2023), which is a setting of this project's local steps; float32 on the wire."""
    settings = LocalSteps(steps, 1, False, outer_rate, outer_momentum, second_moments="own")
    return SparseDDPStrategy(Dense(), local_steps=settings, warmup_steps=start, local_group=local_group, **ddp_kwargs)


def sparse_loco(
    *, steps: int = 16, density: float = 0.03, error_decay: float = 0.95, **ddp_kwargs: Any
) -> SparseDDPStrategy:
    """SparseLoCo (Sarfi et al., arXiv 2508.15706), likewise: each rank's largest changes in two bits; errors decay."""
    settings = LocalSteps(steps, 1, False, lead=1, error_decay=error_decay, second_moments="own")
    return SparseDDPStrategy(TopK(density), wire_dtype="int2", local_steps=settings, **ddp_kwargs)


def send_nothing(state: object, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """A hook that leaves each rank its own gradient: the time of a step without a network."""
    del state
    future: Future[Tensor] = Future()
    future.set_result(bucket.buffer())
    return future


def bf16_hook(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:  # type: ignore[name-defined]
    """PyTorch's ``bf16_compress_hook`` under another name: by its own, DDP refuses it off CUDA."""
    return bf16_compress_hook(state, bucket)


# - by name


#: Name -> what makes the strategy; its keyword-only arguments are options.
PEERS: dict[str, Callable[..., DDPStrategy]] = {
    "ddp": Peer,
    "fp16_hook": partial(Peer, fp16_compress_hook, bytes_each=2),
    "bf16_hook": partial(Peer, bf16_hook, bytes_each=2),
    "powersgd_1": partial(PowerSGD, 1),
    "powersgd_4": partial(PowerSGD, 4),
    "powersgd_16": partial(PowerSGD, 16),
    "diloco": diloco,
    "sparse_loco": sparse_loco,
    NO_COMMUNICATION: Alone,
}


@dataclass(frozen=True)
class StrategySpec:
    """One row of the table."""

    label: str  # names the row; distinct from all others
    spec: str  # what to run, in the form of `SPEC_FORM`

    def build(self, **ddp_kwargs: Any) -> DDPStrategy:
        """Make a fresh strategy; raises a ValueError for an unknown name or option, or a value out of range.

        ``ddp_kwargs`` are of DDP's strategy; options that the spec names go before them.
        """
        ddp_kwargs = _COMMON | ddp_kwargs
        name, options = self.spec.partition(":")[0], self._options
        options.pop(RATE, None)
        if name in PEERS:
            make = PEERS[name]
            known = [key for key, each in inspect.signature(make).parameters.items() if each.kind is each.KEYWORD_ONLY]
            self._check(options, known)
            return make(**{key: _value(text) for key, text in options.items()}, **ddp_kwargs)
        if name == ADVISE:
            return SparseDDPStrategy(Auto(), **ddp_kwargs)
        if name not in NAMES:
            known = [*PEERS, *NAMES]
            raise ValueError(
                f"strategy {self.spec!r}: the name must be one of {', '.join(known)}; got {name!r}."
                f"{did_you_mean(name, known)} Write {SPEC_FORM}."
            )
        return self._build_sparse(NAMES[name], options, ddp_kwargs)

    @property
    def has_kernels(self) -> bool:
        """Whether it is one of this project's, which has kernels of its own on a device."""
        return isinstance(self.build(), SparseDDPStrategy)

    def _build_sparse(self, kind: type[Any], options: dict[str, str], ddp_kwargs: dict[str, Any]) -> SparseDDPStrategy:
        """Make one of ours: options are the compressor's, the strategy's and those of local steps."""
        of_compressor = {f.name: f.default for f in fields(kind)}
        of_strategy = {
            *inspect.signature(SparseDDPStrategy).parameters,
            "gradient_as_bucket_view",
            "process_group_backend",
        }
        of_local_steps = {f.name for f in fields(LocalSteps)} - {"steps"}
        self._check(options, [*of_compressor, *sorted((of_strategy | of_local_steps) - {"compressor", "ddp_kwargs"})])
        lists = {key for key, default in of_compressor.items() if isinstance(default, tuple)}
        lists |= {"exact"} - of_compressor.keys()
        values: dict[str, Any] = {k: tuple(v.split("+")) if k in lists else _value(v) for k, v in options.items()}
        compressor = kind(**{key: values.pop(key) for key in options if key in of_compressor})
        if local := {key: values.pop(key) for key in options if key in of_local_steps}:
            values["local_steps"] = LocalSteps(values.get("local_steps", 0), **local)
        return SparseDDPStrategy(compressor, **(ddp_kwargs | values))

    @property
    def _options(self) -> dict[str, str]:
        """Each option and its value; of what has no equals sign none."""
        return {key: text for key, _, text in (option.partition("=") for option in self.spec.split(":")[1:])}

    def _check(self, options: dict[str, str], known: list[str]) -> None:
        for key, text in options.items():
            if key not in known or not text:
                raise ValueError(
                    f"strategy {self.spec!r}: an option must be option=value with one of {', '.join([*known, RATE])}; "
                    f"got {f'{key}={text}'.rstrip('=')!r}"
                )

    @property
    def learning_rate(self) -> float | None:
        """At which it trains; None for the workload's own."""
        given = self._options.get(RATE)
        rate = None if given is None else _value(given)
        if rate is None or (is_number(rate) and 0 < rate < math.inf):
            return rate
        raise ValueError(f"strategy {self.spec!r}: {RATE}, the learning rate, must be above 0; got {given!r}")

    def at(self, rate: float) -> "StrategySpec":
        return replace(self, spec=f"{self.spec}:{RATE}={rate}")


def _value(text: str) -> Any:
    """A number, true or false, or the text itself; what is allowed is the business of whom it is given to."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def parse_strategies(text: str) -> list[StrategySpec]:
    """Read a comma-separated list of strategies.  One that is named twice runs twice: "ddp" and "ddp#2".

    Raises:
        ValueError: as :meth:`StrategySpec.build`.
    """
    specs = [part.strip() for part in text.split(",")]
    again = [specs[:i].count(spec) for i, spec in enumerate(specs)]
    found = [StrategySpec(f"{spec}#{n + 1}" if n else spec, spec) for spec, n in zip(specs, again, strict=True)]
    for strategy in found:
        strategy.build()
        strategy.learning_rate  # noqa: B018  raises too
    return found


def all_names() -> str:
    """Every peer and every compressor, as :func:`parse_strategies` reads them."""
    return ",".join([*(name for name in PEERS if name != NO_COMMUNICATION), *COMPRESSORS])
