"""What differs between ranks with local steps, beside the weights: states of optimizers, loss scales, buffers."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _python_dispatch

from lightning_sparse.checkpoint.state import State, mean_used
from lightning_sparse.checks import uncompiled
from lightning_sparse.engine.averager import LocalState
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.local_steps.buffers import bytes_of, from_bytes, saved_names
from lightning_sparse.network.agreement import MOST_NAMED, differences, everywhere, ranks_having
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.cut import Cut, as_shard_of, shard_of
from lightning_sparse.network.process_groups import Between

# Tags tell of a tensor what it stands for; "" is before them all.
EXACT = ":exact"  # values of another dtype than the parameter's, which stay so
NUMBER = ":number"
LIST, TUPLE = ":list", ":tuple"  # the length of one: compared between ranks, and saved by versions up to 0.2.0
OTHER = ":other"  # what is nothing of these, whose ``dtype`` is its type
INSTEAD = (
    "Give residuals='none', so that every rank resumes from rank 0's state, or leave out local_steps; instead of "
    "sparse_auto name a compressor"
)


class _Kind(NamedTuple):
    """What a part of a state is, as ranks tell each other."""

    tag: str
    dtype: str
    shape: list[int]

    def zeros(self, device: torch.device) -> Tensor:
        """What stands for it where there is none."""
        return torch.zeros(self.shape, dtype=_dtype(self.dtype), device=device)

    def like(self, x: Tensor, device: torch.device) -> Tensor:
        """``x`` of this dtype; what is one value lies where messages do, the rest where it is."""
        return x.to(x.device if self.shape else device, _dtype(self.dtype))


class _Leaf(NamedTuple):
    """A part of a state, and the names on the way to it, such as "3.history.0"."""

    path: str
    kind: _Kind
    #: Empty for a list, whose parts follow, and for what is refused.
    value: Tensor = torch.empty(0, dtype=torch.float32, device="cpu")

    @classmethod
    def of(cls, path: str, value: Tensor, tag: str = "") -> "_Leaf":
        return cls(path, _Kind(tag, str(value.dtype), list(value.shape)), value)


def tensors_everywhere(optimizer: Optimizer, comm: Comm, device: torch.device) -> dict[str, Tensor]:
    """Return all of this rank's state as tensors, by parameter and name, such as "3.exp_avg", in order.

    An item of a list or a tuple is named by its index, as in "3.history.0".  A number, "3.count:number", is a tensor []
    of float64, int64 or bool on ``device``.  Where this rank has none and another has one, zeros stand for it: a
    parameter it has not used.  To be called on every rank.

    Raises:
        RuntimeError: on every rank, if a rank has anything else than tensors, numbers, and lists, tuples and
            dictionaries of them, or of another shape or length than another rank, with its name.
    """
    own = {leaf.path: leaf for leaf in _state(optimizer)}
    kinds = json.dumps({path: leaf.kind for path, leaf in own.items()})
    every = [
        {path: _Kind(*kind) for path, kind in json.loads(said).items()} for said in everywhere(kinds, comm, device)
    ]
    _check(optimizer, every)
    return {
        path + kind.tag: kind.like(own[path].value, device) if path in own else kind.zeros(device)
        for path, kind in sorted(_merged(every).items())
        if kind.tag != LIST
    }


def own_tensors(optimizer: Optimizer) -> dict[str, Tensor]:
    """What this rank has of what :func:`tensors_everywhere` returns, of sharded tensors its shards; it asks nobody.

    Raises:
        RuntimeError: it has anything else than tensors, numbers, and lists, tuples and dictionaries of them.
    """
    own = {leaf.path: leaf for leaf in _state(optimizer)}
    _check(optimizer, [{path: leaf.kind for path, leaf in own.items()}])
    return {path + leaf.kind.tag: shard_of(leaf.value) for path, leaf in own.items() if leaf.kind.tag != LIST}


def set_tensors(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Set copies of ``tensors``, named as :func:`tensors_everywhere` does, in ``optimizer``'s state; all else stays."""
    state: dict[Any, Any] = optimizer.state
    homes = _homes(optimizer)
    for name, x in tensors.items():
        path = name.partition(":")[0]
        tag, (first, *others) = name.removeprefix(path), path.split(".")
        home = homes.get(first)
        if tag in (LIST, TUPLE) or (home is None and first.isdecimal()):  # the parameter is gone
            continue
        key = home.parameter if home else _key(first)
        state[key] = _with(state.get(key), others, partial(_made, x, tag, home, others[-1] if others else ""))


def in_order(optimizers: Iterable[Optimizer], parameters: Sequence[Tensor]) -> list[Optimizer]:
    """Return the optimizers by the first of ``parameters`` that each has; those that have none are left out.

    On every rank they come in the same order, whichever took the first step there.
    """
    positions = {id(p): position for position, p in enumerate(parameters)}

    def found(optimizer: Optimizer) -> list[int]:
        own = (id(p) for group in optimizer.param_groups for p in group["params"])
        return [positions[each] for each in own if each in positions]

    return sorted(filter(found, optimizers), key=lambda optimizer: min(found(optimizer)))


# - a state as tensors


class _Home(NamedTuple):
    """A parameter, and the group it is in."""

    parameter: Tensor
    group: Mapping[str, Any]

    def dtype(self, x: Tensor, key: str) -> torch.dtype:
        """The dtype that torch gives to ``x`` when it loads it: the parameter's, but for steps and whole numbers."""
        cast = key != "step" and x.is_floating_point() and self.parameter.is_floating_point()
        return self.parameter.dtype if cast else x.dtype

    def device(self, key: str) -> torch.device:
        """Where optimizers of torch keep this: steps on the host, unless a kernel counts them."""
        on_host = key == "step" and not (self.group.get("capturable") or self.group.get("fused"))
        return torch.device("cpu") if on_host else self.parameter.device


def _homes(optimizer: Optimizer) -> dict[str, _Home]:
    """Every parameter, by the number that torch gives it."""
    homes = (_Home(p, group) for group in optimizer.param_groups for p in group["params"])
    return {str(number): home for number, home in enumerate(homes)}


def _state(optimizer: Optimizer) -> Iterator[_Leaf]:
    homes = {id(home.parameter): (number, home) for number, home in _homes(optimizer).items()}
    state: dict[object, object] = optimizer.state  # type: ignore[assignment]  # whatever a user keeps
    for key, value in state.items():
        if id(key) in homes:
            number, home = homes[id(key)]
            for leaf in _leaves(number, value):
                dtype = home.dtype(leaf.value, leaf.path.rpartition(".")[2])
                is_exact = not leaf.kind.tag and dtype != leaf.value.dtype
                yield leaf._replace(kind=leaf.kind._replace(tag=EXACT)) if is_exact else leaf
        elif not isinstance(key, Tensor):  # of a parameter that is gone
            yield from _leaves_of_item(key, value)


def _leaves(path: str, value: object) -> Iterator[_Leaf]:
    """Yield all tensors and numbers in ``value``, of lists also their lengths, and what is nothing of these."""
    if isinstance(value, Tensor) and value.layout == torch.strided:
        yield _Leaf.of(path, value.dequantize() if _is_quantized(value) else value.detach())
    elif isinstance(value, float):
        yield _Leaf.of(path, torch.tensor(value, dtype=torch.float64, device="cpu"), NUMBER)
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        dtype = torch.bool if isinstance(value, bool) else torch.int64
        yield _Leaf.of(path, torch.tensor(value, dtype=dtype, device="cpu"), NUMBER)
    elif type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        yield _Leaf(path, _Kind(LIST, "a list", [len(value)]))
        for index, each in enumerate(value):
            yield from _leaves(f"{path}.{index}", each)
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves_of_item(key, each, f"{path}.")
    elif value is not None:
        yield _Leaf(path, _Kind(OTHER, type(value).__name__, []))


def _leaves_of_item(key: object, value: object, path: str = "") -> Iterator[_Leaf]:
    if isinstance(key, str | int):
        yield from _leaves(path + _name(key), value)
    else:
        yield _Leaf(path + repr(key), _Kind(OTHER, f"a key of type {type(key).__name__}", []))


def _name(key: str | int) -> str:
    """``key`` of a dictionary in a path, where a number alone is an index."""
    if isinstance(key, int):
        return f"#{key:d}"
    name = quote(key, safe="").replace(".", "%2E")
    return f"%{ord(name[0]):02X}{name[1:]}" if name.isdecimal() else name


def _key(name: str) -> str | int:
    """The key that :func:`_name` has named so."""
    return int(name[1:]) if name.startswith("#") else unquote(name)


# - what ranks have together


def _check(optimizer: Optimizer, ranks: Sequence[Mapping[str, _Kind]]) -> None:
    """Raise a RuntimeError on every rank for what one of them has and none can save."""
    name = f"The state of {type(optimizer).__name__}"
    others = sorted({(path, kind.dtype) for kinds in ranks for path, kind in kinds.items() if kind.tag == OTHER})
    if others:
        got = ", ".join(f"{path}: {kind}" for path, kind in others[:MOST_NAMED])
        raise RuntimeError(
            f"{name} must be tensors, numbers, and lists, tuples and dictionaries of them, so that each rank's own can "
            f"be saved or averaged; got {got}. Keep it as tensors. {INSTEAD}."
        )
    shapes: dict[str, set[str]] = {}
    for kinds in ranks:
        for path, kind in kinds.items():
            shapes.setdefault(path, set()).add(str(kind.shape))
    odd = [path for path, found in shapes.items() if len(found) > 1]
    if odd:
        said = differences([{path: str(kinds[path].shape) for path in odd if path in kinds} for kinds in ranks])
        raise RuntimeError(
            f"{name} has tensors of other shapes, or lists of other lengths, on other ranks, which can be neither "
            f"averaged nor saved row by row. {INSTEAD}:\n  " + "\n  ".join(said[:MOST_NAMED])
        )


def _merged(ranks: Sequence[Mapping[str, _Kind]]) -> dict[str, _Kind]:
    """What each part is for all ranks: a tensor if it is one on any, of a dtype that holds what all of them have."""
    merged: dict[str, _Kind] = {}
    for kinds in ranks:
        for path, kind in kinds.items():
            if (known := merged.setdefault(path, kind)) != kind:
                wider = torch.promote_types(_dtype(known.dtype), _dtype(kind.dtype))
                merged[path] = _Kind(min(known.tag, kind.tag), str(wider), kind.shape)
    return merged


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


# - tensors as a state


def _with(there: object, path: Sequence[str], made: Callable[[object], object]) -> object:
    """What is ``there`` with something else at ``path``, ``made`` from what is at it; in place where that can be."""
    if not path:
        return made(there)
    first, *others = path
    if not first.isdecimal():
        owner: dict[str | int, object] = there if isinstance(there, dict) else {}
        owner[_key(first)] = _with(owner.get(_key(first)), others, made)
        return owner
    items = there if isinstance(there, list) else [*there] if isinstance(there, tuple) else []
    items += [None] * (int(first) + 1 - len(items))
    items[int(first)] = _with(items[int(first)], others, made)
    return tuple(items) if isinstance(there, tuple) else items


def _made(x: Tensor, tag: str, home: _Home | None, key: str, there: object) -> object:
    """Return what ``x`` stands for, beside what is ``there``."""
    if tag == NUMBER:
        return x.item()
    if isinstance(there, Tensor) and _is_quantized(there):
        return there.copy_(x)
    device = home.device(key) if home else x.device
    dtype = x.dtype if tag == EXACT or not home else home.dtype(x, key)
    made = x.detach().to(there.device if isinstance(there, Tensor) else device, dtype, copy=True)
    if home and not isinstance(there, Tensor) and key != "step" and x.shape == shard_of(home.parameter).shape:
        there = home.parameter  # whose shard this is, where it is sharded
    return as_shard_of(there, made) if isinstance(there, Tensor) else made


def _is_quantized(x: Any) -> bool:
    """Whether ``x`` is of a class of its own, as states in 8 bits are, that makes ordinary tensors of its values."""
    own = getattr(type(x), "dequantize", None) is not Tensor.dequantize
    return own and _python_dispatch.is_traceable_wrapper_subclass(x)


# - what else differs

SCALER = ("scale", "_growth_tracker")  # what of a GradScaler's state changes from step to step


@dataclass(frozen=True)
class RankLocalState:
    """What of a training, beside its model, differs between ranks with local steps."""

    optimizers: Sequence[Optimizer]
    scaler: "torch.amp.GradScaler | None"  # each rank scales its loss by itself
    module: nn.Module  # some of its buffers differ
    is_loaded: bool  # its weights are from the checkpoint already, where one is read

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = chain(self.module.named_parameters(), self.module.named_buffers())
        return {uncompiled(name): x for name, x in named}

    def others(self, local: LocalState) -> dict[str, Tensor]:
        """What a checkpoint keeps and ``local`` does not average, by name: buffers, and what has not changed."""
        kept = saved_names(self.module)
        return {name: x for name, x in local.buffers.items() if name in kept} | dict(local.not_averaged)


def gather_local(
    local: LocalState,
    between: Between,
    device: torch.device,
    keep: Callable[[Tensor], Tensor],
    per_rank: bool,
    parts: RankLocalState,
) -> dict[str, Any]:
    """What else differs between ranks with local steps; ``keep`` gathers it of each member, or if not, the mean."""
    ranks = between.everyone
    _check_same_number(len(parts.optimizers), ranks, device)
    kept: dict[str, Any] = {
        **local.state(between.inside),
        "optimizers": [
            {key: keep(x) for key, x in tensors_everywhere(optimizer, ranks, device).items()}
            for optimizer in parts.optimizers
        ],
    }
    if not per_rank:
        return kept
    if local.sampled is not None:
        kept["sampled"] = keep(local.sampled)
    if parts.scaler is not None and (state := parts.scaler.state_dict()):
        kept["scaler"] = keep(torch.tensor([state[key] for key in SCALER], dtype=torch.float64, device="cpu"))
    others = parts.others(local)
    if different := different_on(others, ranks, device):
        kept["buffers"] = {name: _rows_of(others[name], keep, between.inside, device) for name in different}
    return kept


def _rows_of(x: Tensor, rows: Callable[[Tensor], Tensor], inside: Comm | None, device: torch.device) -> Tensor:
    """What ``rows`` gathers of a tensor of any type, [M, *s] on the first rank and [0, *s] elsewhere.

    Where members have L ranks, each of which has its own, [M, L, *s].
    """
    raw, shape = bytes_of(x), list(x.shape)
    if inside is not None:
        raw, shape = inside.all_gather(raw.to(device)).wait(), [inside.size, *shape]
    every = rows(raw)
    return from_bytes(every, torch.Size([len(every), *shape]), x.dtype)


def _check_same_number(optimizers: int, ranks: Comm, device: torch.device) -> None:
    """Raise a RuntimeError on every rank unless all know as many optimizers."""
    every = ranks.all_gather(torch.tensor([optimizers], dtype=torch.int64, device=device)).wait().flatten().tolist()
    if len(having := ranks_having(every)) > 1:
        known = "; ".join(f"{number} on {which}" for number, which in having.items())
        raise RuntimeError(
            f"every rank must know the same optimizers, whose states are saved; got {known}: one that a rank has not "
            "stepped yet, after an overflow say, is not known there. Give them: state_dict(optimizers=[optimizer])."
        )


def different_on(buffers: Mapping[str, Tensor], ranks: Comm, device: torch.device) -> list[str]:
    """The names of those that are not the same on all ranks, and of the same size."""
    if not buffers:
        return []
    own = [
        torch.stack([checksum(x).cpu(), torch.tensor(x.nbytes, dtype=torch.int64, device="cpu")])
        for x in buffers.values()
    ]
    every = ranks.all_gather(torch.stack(own).to(device)).wait()  # [P, k, 2]
    differ = (every != every[0]).any(0).tolist()
    return [name for name, (bits, sizes) in zip(buffers, differ, strict=True) if bits and not sizes]


def with_buffers_apart(state: State, buffers: Collection[str]) -> State:
    """What versions up to 0.2.0 saved, which averaged some ``buffers``, as it is saved now."""
    if not (among := state.unsent.keys() & set(buffers)):
        return state
    rows = {name: state.unsent[name] for name in among} if state.ranks else {}
    return replace(
        state,
        unsent={name: x for name, x in state.unsent.items() if name not in among},
        groups=[group for group in state.groups if among.isdisjoint(group["names"])],
        local={**state.local, "buffers": {**state.local.get("buffers", {}), **rows}},
    )


@torch.no_grad()
def start_from_mean(state: State, parts: RankLocalState) -> None:
    """Have averaged gradients go on where local steps were: from the mean of all ranks' own."""
    rows = range(state.ranks)
    for name, tensor in parts.tensors.items():
        if name in state.unsent and state.unsent[name].shape[bool(rows) :] == tensor.shape:
            mean = mean_used(state.unsent[name], rows).to(tensor.device, tensor.dtype)
            tensor.copy_(torch.where(mean.isfinite(), mean, tensor))
    for optimizer, tensors in zip(parts.optimizers, state.optimizers, strict=False):
        set_tensors(optimizer, {key: mean_used(x, rows) for key, x in tensors.items()})


def is_set(name: str, tensors: Mapping[str, Tensor], state: State) -> bool:
    """Whether a tensor holds anything else than the average that was saved beside ``state``."""
    saved = state.local["checksums"].get(name)
    return saved is not None and name in tensors and bool(checksum(tensors[name]).cpu() != saved)


@torch.no_grad()
def restore_parts(state: State, rank: int, cut: Cut, local: LocalState, parts: RankLocalState) -> None:
    """Set the own loss scale of member ``rank``, and this rank's own of what is not averaged."""
    kept, others = state.local, parts.others(local)
    if parts.scaler is not None and "scaler" in kept and (now := parts.scaler.state_dict()):
        scale, growth = kept["scaler"][rank].tolist()
        parts.scaler.load_state_dict(now | dict(zip(SCALER, (scale, int(growth)), strict=True)))
    of_ranks = kept.get("buffers", {}) if state.slices == cut.count else {}  # each of a member has its own
    saved = {name: every[rank] for name, every in of_ranks.items() if name in others}
    if cut.count > 1:
        saved = {name: every[cut.index] for name, every in saved.items()}
    own = {name: x for name, x in saved.items() if others[name].shape == x.shape}
    for name in own.keys() - local.buffers.keys():
        others[name].copy_(own.pop(name))
    other = {name for name in own if is_set(name, parts.tensors, state)}  # than what the checkpoint's model has
    local.hold({name: x for name, x in own.items() if name not in other or not parts.is_loaded}, late=other)
