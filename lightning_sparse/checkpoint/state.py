"""Whether what a checkpoint keeps of the gradient not yet sent is what was saved."""

import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.checkpoint.residuals import KEY, RESIDUALS, rows_of, used
from lightning_sparse.checks import is_list, is_whole
from lightning_sparse.network.agreement import ranks_having

SAVED = ("residuals", "size", "steps", "unsent", "groups", "compressor", "plan")  # and "checksum", of all these


def described(state: Mapping[str, Any] | None) -> dict[str, object]:
    """What of a state must be the same on every rank that goes on with it."""
    if state is None:
        return {"checkpoint": "without residuals"}
    groups = [(group["names"], sorted(group["memory"])) for group in state["groups"]]
    shapes = {name: list(x.shape) for name, x in state["unsent"].items()}
    kept = {key: state.get(key) for key in ("residuals", "size", "steps", "compressor", "plan", "checksum")}
    kept |= {"groups": groups, "unsent": shapes}
    return {f"checkpoint: {key}": value for key, value in kept.items()}


def found_in(state: Any, rank: int, size: int) -> str | None:
    """What of ``state`` cannot have been saved, in words; None if it is whole, or None itself.

    Of the rows of all ranks, only those are looked at from which ``rank`` of ``size`` goes on.
    """
    if state is None:
        return None
    found = next(_misshapen(state), None)
    return found or next(_altered(state, rows_of(state, rank, size)), None)


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


def _altered(state: Mapping[str, Any], rows: range) -> Iterator[str]:
    """What has values that cannot have been saved: in ``rows``, or in what has none."""
    for name, x in state["unsent"].items():
        if not used(x, rows).isfinite().all():
            yield f"unsent[{name!r}] holds values that are not finite"
    if "checksum" not in state:
        return
    noted = state["checksum"]
    if is_whole(noted, 0):
        sums = {"its checksum": (_of_all(state), noted)}
    elif is_list(noted) and len(noted) == 1 + _rows(state) and all(is_whole(each, 0) for each in noted):
        sums = {"the checksum of what all ranks share": (_of_shared(state), noted[0])}
        sums |= {f"the checksum of rank {row}'s part": (_of_row(state, row), noted[1 + row]) for row in rows}
    else:
        yield f"checksum={_shown(noted)} must be a list of integers: one of what all ranks share, and one for each rank"
        return
    for what, (now, then) in sums.items():
        if now != then:
            yield (
                f"{what} is {now}, and {then} was noted when it was saved (after a change that is meant, delete the "
                "entry 'checksum')"
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


def refuse(found: Sequence[str]) -> None:
    """Raise a ValueError if a rank has found damage; ``found`` is what each says, the same list on every rank."""
    if any(found):
        damaged = "; ".join(f"{what} ({ranks})" for what, ranks in ranks_having(found).items() if what)
        raise ValueError(
            f"The residuals (the gradient not yet sent) in the checkpoint are damaged: {damaged}. Resume from an older "
            f"checkpoint, or without them, so that they start from zero: load it with torch.load, pop({KEY!r}), and "
            "save it again."
        )


def checksum(state: Mapping[str, Any]) -> list[int]:
    """Of what all ranks share, the checksum itself apart, then of each rank's rows: they tell if a bit has changed."""
    return [_of_shared(state), *(_of_row(state, row) for row in range(_rows(state)))]


def _rows(state: Mapping[str, Any]) -> int:
    return state["size"] if state["residuals"] == "per_rank" else 0


def _of_shared(state: Mapping[str, Any]) -> int:
    """Of all but the rows of ranks, of which there are only the kinds and shapes."""
    if _rows(state) == 0:
        return _of_all(state)
    return _crc([state[key] for key in SAVED], 0, lambda x: f"{x.dtype} {list(x.shape)}")


def _of_row(state: Mapping[str, Any], row: int) -> int:
    """Of what one rank has not sent, and what its compressor kept.  Reads nothing else."""
    memories = [group["memory"] for group in state["groups"]]
    return _crc([state["unsent"], memories], 0, lambda x: x[row : row + 1])


def _of_all(state: Mapping[str, Any]) -> int:
    """Of everything, as earlier versions noted."""
    return _crc([state[key] for key in SAVED], 0, lambda x: x)


def _crc(value: object, crc: int, part: Callable[[Tensor], Tensor | str]) -> int:
    """Of ``value`` and all in it; of a tensor, of that ``part``."""
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta:  # what we save is
        seen = part(value)
        return _crc_of_tensor(seen, crc) if isinstance(seen, Tensor) else zlib.crc32(seen.encode(), crc)
    if isinstance(value, Mapping):
        value = [each for key in sorted(value, key=repr) for each in (key, value[key])]
    if isinstance(value, list | tuple):
        crc = zlib.crc32(f"{len(value)} items".encode(), crc)
        for each in value:
            crc = _crc(each, crc, part)
        return crc
    return zlib.crc32(repr(value).encode(), crc)


def _crc_of_tensor(x: Tensor, crc: int) -> int:
    crc = zlib.crc32(f"{x.dtype} {list(x.shape)}".encode(), crc)
    flat = x.detach().cpu().contiguous().as_strided((x.numel(),), (1,))  # whatever strides a file tells
    return zlib.crc32(flat.view(torch.uint8).numpy().data, crc)
