"""Whether what a checkpoint keeps of the gradient not yet sent is what was saved."""

import itertools
import reprlib
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.checkpoint import KEY, RESIDUALS
from lightning_sparse.select import is_list, is_whole

SAVED = ("residuals", "size", "steps", "unsent", "groups", "compressor", "plan")  # and "checksum", of all these


def described(state: Mapping[str, Any] | None, damaged: str | None = None) -> dict[str, object]:
    """What of a state must be the same on every rank that goes on with it; also of one that is ``damaged``."""
    if state is None:
        return {"checkpoint": "without residuals"}
    if next(_misshapen(state), None):
        return {"checkpoint": damaged}
    groups = [(group["names"], sorted(group["memory"])) for group in state["groups"]]
    shapes = {name: list(x.shape) for name, x in state["unsent"].items()}
    kept = {key: state.get(key) for key in ("residuals", "size", "steps", "compressor", "plan")}
    kept |= {"groups": groups, "unsent": shapes, "damaged": damaged}
    return {f"checkpoint: {key}": value for key, value in kept.items()}


def found_in(state: Any) -> str | None:
    """What of ``state`` cannot have been saved, in words; None if it is whole, or None itself."""
    return None if state is None else next(itertools.chain(_misshapen(state), _altered(state)), None)


def _misshapen(state: Any) -> Iterator[str]:
    """What is not there, or of another kind; to be asked for the first only, on which the rest would stumble."""
    if not isinstance(state, Mapping):
        yield f"{_shown(state)} is no dictionary"
    for key in SAVED:
        if key not in state:
            yield f"{key!r} is missing"
    if state["residuals"] not in RESIDUALS[:2]:
        yield f"residuals={_shown(state['residuals'])} is neither 'per_rank' nor 'mean'"
    for key, least in (("size", 1), ("steps", 0)):
        if not is_whole(state[key], least):
            yield f"{key}={_shown(state[key])} is no whole number from {least} up"
    if not isinstance(state["compressor"], str):
        yield f"compressor={_shown(state['compressor'])} is no text"
    rows = state["size"] if state["residuals"] == "per_rank" else None
    yield from _wrong_tensors("unsent", state["unsent"], rows)
    for name, x in state["unsent"].items():
        if x.dtype != torch.float32:
            yield f"unsent[{name!r}] is {x.dtype}, not float32"
    yield from _wrong_groups(state["groups"], state["unsent"], state["size"])
    yield from _wrong_plan(state["plan"])


def _altered(state: Mapping[str, Any]) -> Iterator[str]:
    """What has values that cannot have been saved."""
    for name, x in state["unsent"].items():
        if not x.isfinite().all():
            yield f"unsent[{name!r}] holds values that are not finite"
    noted = state.get("checksum")
    if "checksum" in state and (not is_whole(noted, 0) or noted != checksum(state)):
        yield (
            f"its checksum is {checksum(state)}, and {_shown(noted)} was noted when it was saved (after a change "
            "that is meant, delete the entry 'checksum')"
        )


def _wrong_tensors(what: str, tensors: object, rows: int | None) -> Iterator[str]:
    if not isinstance(tensors, Mapping):
        yield f"{what}={_shown(tensors)} is no dictionary"
        return
    for name, x in tensors.items():
        if not isinstance(name, str) or not isinstance(x, Tensor) or x.layout != torch.strided or x.is_meta:
            yield f"{what}[{_shown(name)}]={_shown(x)} is no name with a tensor"
        elif rows is not None and x.shape[:1] != (rows,):
            yield f"{what}[{name!r}] has the shape {list(x.shape)}, without a row for each of {rows} ranks"


def _wrong_groups(groups: Any, unsent: Mapping[str, Tensor], size: int) -> Iterator[str]:
    if not is_list(groups):
        yield f"groups={_shown(groups)} is no list"
        return
    for number, group in enumerate(groups):
        if not isinstance(group, Mapping) or not {"names", "memory"} <= set(group):
            yield f"groups[{number}]={_shown(group)} is no dictionary with names and memory"
        elif not _is_names(group["names"]) or not set(group["names"]) <= set(unsent):
            yield f"groups[{number}]: names={_shown(group['names'])} are not all in 'unsent'"
        else:
            yield from _wrong_tensors(f"groups[{number}]: memory", group["memory"], size)


def _wrong_plan(plan: object) -> Iterator[str]:
    if not isinstance(plan, Mapping):
        yield f"plan={_shown(plan)} is no dictionary"
    else:
        groups = plan.get("groups", [])
        if not is_list(groups) or not all(_is_names(names) and names for names in groups):
            yield f"plan: groups={_shown(groups)} is no list of lists of names"


def _is_names(names: Any) -> bool:
    return is_list(names) and all(isinstance(name, str) for name in names)


def _shown(value: object) -> str:
    return reprlib.repr(value) if isinstance(value, str | int | float | list | None) else f"a {type(value).__name__}"


def refuse(damaged: str | None) -> None:
    """Raise a ValueError if anything is damaged."""
    if damaged is not None:
        raise ValueError(
            f"The residuals (the gradient not yet sent) in the checkpoint are damaged: {damaged}. Resume from an older "
            f"checkpoint, or without them, so that they start from zero: load it with torch.load, pop({KEY!r}), and "
            "save it again."
        )


def checksum(state: Mapping[str, Any]) -> int:
    """Of all that was saved, the checksum itself apart: tells whether a bit of it has changed."""
    return _crc([state[key] for key in SAVED], 0)


def _crc(value: object, crc: int) -> int:
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:  # what we save is
        crc = zlib.crc32(f"{value.dtype} {list(value.shape)}".encode(), crc)
        flat = value.detach().cpu().contiguous().as_strided((value.numel(),), (1,))  # whatever strides a file tells
        return zlib.crc32(flat.view(torch.uint8).numpy().data, crc)
    if isinstance(value, Mapping):
        value = [each for key in sorted(value, key=repr) for each in (key, value[key])]
    if isinstance(value, list | tuple):
        crc = zlib.crc32(f"{len(value)} items".encode(), crc)
        for each in value:
            crc = _crc(each, crc)
        return crc
    return zlib.crc32(repr(value).encode(), crc)
