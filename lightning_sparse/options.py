"""The options of a strategy: made once, and passed whole to whoever needs one."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from inspect import signature
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.auto.active_averager import AveragingConfig
from lightning_sparse.auto.policy import Auto, by_name
from lightning_sparse.checkpoint.state import RESIDUALS
from lightning_sparse.checks import check_one_of, check_whole, checked_patterns, is_number, matches, uncompiled
from lightning_sparse.compressors import COMPRESSORS, Compressor, MomentumCorrection, Warmup
from lightning_sparse.compressors.wrappers import Wrapper, exact_for, rounded
from lightning_sparse.engine.ddp_checks import check_trains
from lightning_sparse.engine.groups import BUCKET_BYTES, check_fusion, hand_over_bytes
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.network.agreement import agree, described, versions
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.network.members import AUTO, NODE
from lightning_sparse.settings import as_text, brief, changed, same
from lightning_sparse.wire import wire_format

# Arguments of DDP with which it does not hand every gradient of every rank to its hook.
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
EXAMPLE = ", such as 'sparse_dense'"  # how a compressor is named in place of sparse_auto


@dataclass(frozen=True)
class Options:
    """How gradients are averaged; see ``SparseDDPStrategy`` and ``SparseHook``.  Validated when made.

    To add an option: a field and its check here, and a parameter of those who take it from a user.
    """

    compressor: Compressor | Auto
    fusion: str | tuple[str, ...]
    wire_dtype: str | None = None  # a name, once validated
    warmup_steps: int = 0
    residuals: str = "per_rank"
    local_group: int | str = AUTO
    bucket_bytes: int = BUCKET_BYTES
    local_steps: int | LocalSteps | None = 0  # None, or whole, once validated
    elastic: bool | Elastic | None = None  # None, or whole, once validated
    exact: tuple[str, ...] = ()  # patterns of names; any sequence, until validated

    @classmethod
    def of(cls, compressor: Compressor | Auto | str, fusion: str | Sequence[str], **others: Any) -> "Options":
        """Return the options as a user gave them.

        Raises:
            ValueError: for an option out of range, with the value and what is allowed.
            TypeError: if ``compressor`` is neither a name nor an instance.
        """
        return cls(by_name(compressor), check_fusion(fusion), **others)

    def __post_init__(self) -> None:
        object.__setattr__(self, "exact", checked_patterns("exact", self.exact))
        if self.policy:
            self._check_auto()
        default = "float32" if isinstance(self.compressor, Auto) else self.compressor.default_wire_dtype
        wire_dtype = default if self.wire_dtype is None else self.wire_dtype
        object.__setattr__(self, "wire_dtype", wire_format(wire_dtype).name)  # whichever of its names was given
        check_whole("warmup_steps", self.warmup_steps, 0, "Give a number of steps, 0 for none.")
        check_one_of("residuals", self.residuals, RESIDUALS)
        if self.local_group not in (AUTO, NODE):
            check_whole("local_group", self.local_group, 1, "Or give 'node' for the ranks of a machine; 1 for none.")
        check_whole("bucket_bytes", self.bucket_bytes, 1)
        object.__setattr__(self, "local_steps", LocalSteps.of(self.local_steps or 0))
        object.__setattr__(self, "elastic", Elastic.of(self.elastic))
        if self.elastic and self.local_group not in (AUTO, NODE):
            raise ValueError(
                "with elastic the ranks of a host are one member, so local_group must be 'auto' or left out; got "
                f"{self.local_group!r}. Leave it out."
            )
        if self.local:
            self._check_local()
        elif self.elastic:
            raise ValueError(
                f"elastic must be combined with local_steps, of which alone hosts can miss some; got local_steps=0 and "
                f"elastic={self.elastic!r}. Name a compressor, and give local_steps=2, say: "
                "SparseDDPStrategy('sparse_dense', local_steps=2, elastic=True). Or leave out elastic."
            )

    @property
    def local(self) -> LocalSteps | None:
        """The settings of local steps; None where gradients are averaged."""
        return self.local_steps if isinstance(self.local_steps, LocalSteps) else None

    @property
    def hosts(self) -> Elastic | None:
        """Where the hosts of an elastic training meet; None where the ranks are always the same."""
        return self.elastic if isinstance(self.elastic, Elastic) else None

    @property
    def policy(self) -> Auto | None:
        """What chooses the compressor, if anything does."""
        if not isinstance(self.compressor, Auto):
            return None
        candidates = tuple(replace(each, exact=each.exact or self.exact) for each in self.compressor.choices)
        return replace(self.compressor, candidates=candidates) if self.exact else self.compressor

    @property
    def may_be_local(self) -> bool:
        """Whether local steps are taken, or may be chosen."""
        return self.local is not None or any(each.local_steps for each in (self.policy.choices if self.policy else ()))

    def _check_auto(self) -> None:
        """Raise a ValueError for what cannot be combined with a policy that chooses."""
        if self.fusion != "layer":
            raise ValueError(
                f"fusion={self.fusion!r} cannot be combined with sparse_auto, which chooses from what LayerFusion "
                f"measures. Give fusion='layer', or name a compressor{EXAMPLE}."
            )
        if self.wire_dtype is not None:
            raise ValueError(
                f"wire_dtype={self.wire_dtype!r} cannot be combined with sparse_auto, whose candidates have formats of "
                f"their own. Leave it out, or name a compressor{EXAMPLE}."
            )
        if self.local_steps:
            raise ValueError(
                "local_steps cannot be combined with sparse_auto, which chooses by itself. Leave "
                f"it out, or name a compressor{EXAMPLE}."
            )

    def _check_local(self) -> None:
        """Raise a ValueError for what cannot be combined with local steps."""
        inner: object = self.compressor
        while isinstance(inner, Wrapper):
            if isinstance(inner, MomentumCorrection):
                raise ValueError(
                    "local_steps cannot be combined with MomentumCorrection, which corrects gradients that arrive "
                    "late; each rank's own optimizer has its momentum already. Give the compressor in it."
                )
            inner = inner.compressor

    @property
    def averaging(self) -> Compressor:
        """The compressor, or where one is to be chosen the one to start with, after its dense steps, in its format."""
        assert self.wire_dtype is not None
        compressor = self.compressor.start if isinstance(self.compressor, Auto) else self.compressor
        assert compressor is not None
        warmed_up = Warmup(self.warmup_steps, compressor) if self.warmup_steps else compressor
        return exact_for(self.exact, rounded(warmed_up, self.wire_dtype))

    @property
    def averaging_config(self) -> AveragingConfig:
        """How gradients or weights are averaged at first."""
        return AveragingConfig(
            self.averaging,
            self.fusion,
            self.warmup_steps,
            self.bucket_bytes,
            self.local,
            self.hosts,
            may_sum_in_place=self.policy is not None,
        )

    @property
    def as_saved(self) -> str:
        """The compressor or policy as text, which a checkpoint keeps."""
        text = as_text(self.compressor)
        return f"Warmup(steps={self.warmup_steps}, compressor={text})" if self.warmup_steps else text

    def brief(self, *hidden: str) -> str:
        """Write the compressor, and the other options, but ``hidden`` ones, that are not the defaults."""
        usual = Options.of(self.compressor, "layer")
        names = [field.name for field in fields(self) if field.name not in ("compressor", "bucket_bytes", *hidden)]
        differ = [name for name in names if not same(getattr(self, name), getattr(usual, name))]
        compressor = repr(self.compressor) if self.policy else brief(self.compressor)
        return ", ".join([compressor, *(f"{name}={brief(getattr(self, name))}" for name in differ)])

    def agree(self, module: nn.Module, comm: Comm, unused: object, scaler: object) -> None:
        """Go on only if every rank has these options and such a ``module``; to be called on every rank.

        ``unused`` is DDP's ``find_unused_parameters``.

        Raises:
            ValueError: there is nothing to train.
            RuntimeError: on every rank, with the values that differ.
        """
        check_trains(module)
        names = [uncompiled(name) for name, parameter in module.named_parameters() if parameter.requires_grad]
        fusion = () if isinstance(self.fusion, str) else self.fusion
        for option, pattern in [*(("exact", each) for each in self.exact), *(("fusion", each) for each in fusion)]:
            if not any(matches(name, [pattern]) for name in names):
                rank_zero_warn(
                    f"lightning_sparse: no parameter that is trained has a name that matches {pattern!r} of {option}; "
                    f"one is called {names[0]!r}."
                )
        others = {"find_unused_parameters": bool(unused), "a scaler": scaler is not None}
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        agree(versions() | vars(self) | others | described(module), comm, device)

    @contextmanager
    def buckets_for(self, module: nn.Module, strategy: Any) -> Iterator[None]:
        """Have ``strategy`` give DDP the size of its buckets for ``module``, if a user has not said it.

        They decide when gradients reach us.  Of small ones that is soon, but each takes some 50 us.
        """
        given = strategy._ddp_kwargs
        nbytes = sum(p.nbytes for p in module.parameters() if p.requires_grad)
        if self.fusion != "bucket":
            each_bytes = 1 if self.fusion == "none" else hand_over_bytes(nbytes)
            strategy._ddp_kwargs = {"bucket_cap_mb": each_bytes / 2**20} | given
        try:
            yield
        finally:
            strategy._ddp_kwargs = given

    def beside_ddp(self, kwargs: Mapping[str, Any], init: Callable[..., None]) -> tuple["Options", dict[str, Any]]:
        """Return these options and DDP's arguments, with the bucket size that a user gave where it belongs.

        Those are for ``init`` of Lightning's or Fabric's DDPStrategy, which hands on to DDP what is not its own.

        Raises:
            ValueError: for an argument of DDP that is not supported, or out of range.
            TypeError: for a keyword that nobody takes.
        """
        _refuse_unsupported(kwargs)
        _refuse_unknown(kwargs, init, self.compressor)
        timeout = kwargs.get("timeout")
        if timeout is not None and not isinstance(timeout, timedelta):
            raise ValueError(
                f"timeout must be a datetime.timedelta; got {timeout!r}. Write timedelta(minutes=5), say, or '0:05:00' "
                "in a config file."
            )
        bucket_mb = kwargs.get("bucket_cap_mb")
        if bucket_mb is None:
            return self, {name: x for name, x in kwargs.items() if name != "bucket_cap_mb"}
        if not (is_number(bucket_mb) and 0 < bucket_mb <= MOST_MB):
            raise ValueError(
                f"bucket_cap_mb must be a number above 0 and at most {MOST_MB:,}, in MiB; got {bucket_mb!r}."
            )
        if self.fusion == "bucket":
            return replace(self, bucket_bytes=max(1, int(bucket_mb * 2**20))), dict(kwargs)
        return self, dict(kwargs)


def _refuse_unsupported(kwargs: Mapping[str, Any]) -> None:
    if kwargs.get("ddp_comm_hook") is not None:
        raise ValueError(
            "ddp_comm_hook cannot be combined with a compressor: DDP takes one hook, and this strategy registers "
            "its own. For values in half precision on the wire give wire_dtype='bfloat16'."
        )
    for name in UNSUPPORTED:
        if kwargs.get(name):
            raise ValueError(
                f"{name}={kwargs[name]!r} is not supported: with it DDP does not hand every gradient of every "
                "rank to its hook. Leave it out."
            )


def _refuse_unknown(kwargs: Mapping[str, object], init: Callable[..., None], compressor: Compressor | Auto) -> None:
    """Raise a TypeError for arguments that neither ``init`` nor DDP takes from its user."""
    taken = {name for each in (init, DistributedDataParallel) for name in signature(each).parameters}
    unknown = {name: value for name, value in kwargs.items() if name not in taken - GIVEN_BY_LIGHTNING}
    if not unknown:
        return
    for owner in (compressor, *(kind() for kind in COMPRESSORS.values())):
        known = fields(owner)  # type: ignore[arg-type]  # by_name has seen to it
        if misplaced := [field.name for field in known if field.name in unknown]:
            name = type(owner).__name__
            name = f"ls.{name}" if type(owner).__module__.startswith("lightning_sparse.") else name
            has_none = "" if owner is compressor else f" {type(compressor).__name__} has no such setting."
            settings = _call(changed(owner) | {each: unknown[each] for each in misplaced})
            raise TypeError(
                f"{misplaced[0]} must be given to the compressor, of which it is a setting, not to the strategy; write "
                f"SparseDDPStrategy({name}({settings})).{has_none}"
            )
    no_options = {*GIVEN_BY_LIGHTNING, *UNSUPPORTED, "self", "ddp_kwargs", *unknown}
    options = (taken | {f.name for f in fields(Options)}) - no_options
    name = next(iter(unknown))
    longer = sorted(option for option in options if option.startswith(name))
    close = " or ".join(longer or get_close_matches(name, options, n=1, cutoff=0.75))
    raise TypeError(
        f"{name} must be an option of this strategy, of DDPStrategy or of DistributedDataParallel; got "
        f"{_call(unknown)}. {f'Did you mean {close}?' if close else 'Leave it out, or correct its name.'}"
    )


def _call(arguments: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
