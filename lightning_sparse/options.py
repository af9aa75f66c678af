"""The options of a strategy, checked once for the Trainer's and for Fabric's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from inspect import signature
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.checks import check_warmup, is_number, is_whole
from lightning_sparse.compressors import NAMES, Compressor, by_name
from lightning_sparse.fusion.groups import BUCKET_BYTES, check_choice, check_fusion
from lightning_sparse.hook import SparseHook
from lightning_sparse.network.agreement import agree, described, versions
from lightning_sparse.network.comm import wire_dtype_named, world
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.settings import same

# Of DDP; with these it does not hand every gradient of every rank to its hook.
UNSUPPORTED = (
    "delay_all_reduce_named_params",
    "device_mesh",
    "mixed_precision",
    "param_to_hook_all_reduce",
    "process_group",
    "skip_all_reduce_unused_params",
)
GIVEN_BY_LIGHTNING = {"module", "device_ids", "args", "kwargs"}  # to DDP, or not by name
MOST_MB = 2**23  # of bucket_cap_mb: 8 TiB
HAND_OVER_MB = 1  # of gradient, between one call of our hook and the next


@dataclass(frozen=True)
class Options:
    """How to average; as :class:`~lightning_sparse.hook.SparseHook` takes it."""

    compressor: Compressor
    fusion: str | tuple[str, ...]
    wire_dtype: str
    warmup_steps: int
    bucket_bytes: int
    local_group: int | str

    @classmethod
    def checked(
        cls,
        compressor: str | Compressor,
        fusion: str | Sequence[str],
        wire_dtype: str,
        warmup_steps: int,
        local_group: int | str,
        ddp_kwargs: Mapping[str, Any],
        init: Callable[..., None],
    ) -> "Options":
        """The options, if they are possible beside the arguments of DDP.

        ``ddp_kwargs`` are for ``init``, of Lightning's or Fabric's DDPStrategy; what is not its own it hands on to DDP.

        Raises:
            ValueError: for an option out of range, with the value and what is allowed.
            TypeError: if ``compressor`` is neither a name nor an instance, or for a keyword that nobody takes.
        """
        check_warmup(warmup_steps)
        if local_group != "node" and not is_whole(local_group, least=1):
            raise ValueError(
                f"local_group={local_group!r} is neither 'node' nor a number of consecutive ranks that share a fast "
                "link; 1 is none."
            )
        if ddp_kwargs.get("ddp_comm_hook") is not None:
            raise ValueError(
                "ddp_comm_hook cannot be combined with a compressor: DDP takes one hook, and this strategy registers "
                "its own. For values in half precision on the wire give wire_dtype='bfloat16'."
            )
        for name in UNSUPPORTED:
            if ddp_kwargs.get(name):
                raise ValueError(
                    f"{name}={ddp_kwargs[name]!r} is not supported: with it DDP does not hand every gradient of every "
                    "rank to its hook. Leave it out."
                )
        wire_dtype_named(wire_dtype)  # which says if it is none
        fusion = check_fusion(fusion)
        compressor = by_name(compressor)
        check_choice(compressor, fusion)
        refuse_unknown(ddp_kwargs, init, compressor)
        bucket_mb = ddp_kwargs.get("bucket_cap_mb")
        if bucket_mb is not None and not (is_number(bucket_mb) and 0 < bucket_mb <= MOST_MB):
            raise ValueError(f"bucket_cap_mb={bucket_mb!r} is a number of MiB, above 0 and at most {MOST_MB:,}.")
        bucket_bytes = max(1, int(bucket_mb * 2**20)) if fusion == "bucket" and bucket_mb is not None else BUCKET_BYTES
        return cls(compressor, fusion, wire_dtype, warmup_steps, bucket_bytes, local_group)

    def for_ddp(self, ddp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of DDP, with a bucket size that suits these options unless one was given."""
        if self.fusion == "bucket" or ddp_kwargs.get("bucket_cap_mb") is not None:
            return dict(ddp_kwargs)
        # DDP's buckets decide when gradients reach us: soon, at some 50 us for each bucket.
        return {**ddp_kwargs, "bucket_cap_mb": 1e-6 if self.fusion == "none" else HAND_OVER_MB}

    def agree(self, module: nn.Module, device: torch.device) -> None:
        """Go on only if every rank has these options and such a ``module``; to be called on every rank.

        Raises:
            RuntimeError: on every rank, with the values that differ.
        """
        agree(versions() | vars(self) | described(module), world(), device)

    def process_groups(self, ddp: DistributedDataParallel, timeout: timedelta | None, devices: int) -> ProcessGroups:
        """Of ``ddp``, on a node with so many ``devices``."""
        return ProcessGroups(ddp, timeout, devices if isinstance(self.local_group, str) else self.local_group)

    def hook(
        self,
        ddp: DistributedDataParallel,
        scaler: torch.amp.GradScaler | None,
        process_groups: ProcessGroups,
    ) -> SparseHook:
        """Put it on ``ddp``."""
        return SparseHook(
            ddp,
            self.compressor,
            fusion=self.fusion,
            wire_dtype=self.wire_dtype,
            warmup_steps=self.warmup_steps,
            scaler=scaler,
            bucket_bytes=self.bucket_bytes,
            process_groups=process_groups,
        )


def refuse_unknown(keywords: Mapping[str, object], init: Callable[..., None], compressor: Compressor) -> None:
    """Raise a TypeError for ``keywords`` that neither ``init`` nor DDP takes from its user."""
    taken = {name for each in (init, DistributedDataParallel) for name in signature(each).parameters}
    unknown = {name: value for name, value in keywords.items() if name not in taken - GIVEN_BY_LIGHTNING}
    if not unknown:
        return
    known = fields(compressor)  # type: ignore[arg-type]  # by_name has seen to it
    if misplaced := [field.name for field in known if field.name in unknown]:
        given = {f.name: getattr(compressor, f.name) for f in known if not same(getattr(compressor, f.name), f.default)}
        name = type(compressor).__name__
        name = f"ls.{name}" if type(compressor).__module__.startswith("lightning_sparse.") else name
        raise TypeError(
            f"{misplaced[0]} must be given to the compressor, of which it is a setting, not to the strategy; write "
            f"SparseDDPStrategy({name}({_call(given | {each: unknown[each] for each in misplaced})}))."
        )
    raise TypeError(
        f"{next(iter(unknown))} must be an option of this strategy, of DDPStrategy or of DistributedDataParallel; got "
        f"{_call(unknown)}. Leave it out, or correct its name."
    )


def _call(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def register_names(registry: Any, strategy: type) -> None:
    """Register a name of ``strategy`` for each compressor, with the variants of DDP's names."""
    starts = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
    for name, compressor in NAMES.items():
        summary = (compressor.__doc__ or "").strip().partition("\n")[0]
        for suffix, start_method in starts.items():
            for unused_suffix, unused in {"": None, "_find_unused_parameters_true": True}.items():
                registry.register(
                    name + suffix + unused_suffix,
                    strategy,
                    description=f"{summary} Start method {start_method!r}.",
                    override=True,
                    compressor=name,
                    start_method=start_method,
                    **({"find_unused_parameters": True} if unused else {}),
                )
