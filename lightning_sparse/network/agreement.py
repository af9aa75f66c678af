"""Ranks compare their settings; a difference is an error on all of them that names it."""

import hashlib
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_sparse.__about__ import __version__
from lightning_sparse.network.comm import Comm
from lightning_sparse.settings import as_text

T = TypeVar("T", bound=Hashable)

MOST_NAMED = 8  # differences, or ranks, that an error names
SHORT = 1024  # bytes of a text that are sent with its length


def agree(settings: Mapping[str, object], comm: Comm, device: torch.device) -> None:
    """Go on only if every rank was given the same settings; to be called on every rank, at once.

    All ranks send the digest of the settings they were given, 32 bytes, and only where these differ the whole.  Names
    are those the user knows; values are compared by :func:`~lightning_sparse.settings.as_text`.

    Raises:
        RuntimeError: on every rank, with the values that differ and the ranks that have them.
    """
    text = json.dumps({name: as_text(value) for name, value in settings.items()})
    digests = _gather(hashlib.sha256(text.encode()).digest(), comm, device)
    if len(set(digests)) == 1:
        return
    found = differences([json.loads(each) for each in everywhere(text, comm, device)])
    more = f"\n  and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    raise RuntimeError(
        "Ranks were started with different settings; they would wait for each other or drift apart. Start all of them "
        "with the same program, settings and model:\n  " + "\n  ".join(found[:MOST_NAMED]) + more
    )


def everywhere(text: str, comm: Comm, device: torch.device) -> list[str]:
    """Return what each rank says, by rank; to be called on every rank, at once.  A short text takes one message."""
    said = text.encode()
    starts = _gather(len(said).to_bytes(8, "big") + said[:SHORT].ljust(SHORT), comm, device)
    lengths = [int.from_bytes(start[:8], "big") for start in starts]
    every = [start[8:] for start in starts]
    if (more := max(lengths) - SHORT) > 0:
        ends = _gather(said[SHORT:].ljust(more)[:more], comm, device)  # of nodes the first rank speaks, others say more
        every = [start + end for start, end in zip(every, ends, strict=True)]
    return [each[:length].decode() for each, length in zip(every, lengths, strict=True)]


def versions() -> dict[str, object]:
    """Versions that every rank must run: another may draw other random numbers, or send other messages."""
    return {"lightning_sparse": __version__, "torch": torch.__version__.partition("+")[0]}


def described(module: nn.Module) -> dict[str, object]:
    """Every parameter and buffer that DDP may send, in order: its dtype, its shape, and if it is trained or saved."""
    parameters: dict[str, object] = {
        f"parameter {name}": _kind(p) + ("" if p.requires_grad else " frozen") for name, p in module.named_parameters()
    }
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())  # by DDP
    return parameters | {f"buffer {name}": kind for name, kind in _buffers(module) if name not in ignored}


def _buffers(module: nn.Module) -> Iterator[tuple[str, str]]:
    """The name of every buffer that has a value, and its kind; a module's ``state_dict`` may be its own."""
    for prefix, owner in module.named_modules():
        for name, x in owner._buffers.items():
            if x is not None:
                passing = " persistent=False" if name in owner._non_persistent_buffers_set else ""
                yield f"{prefix}.{name}".removeprefix("."), _kind(x) + passing


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {'uninitialized' if is_lazy(x) else list(x.shape)}".removeprefix("torch.")


def differences(settings: Sequence[Mapping[str, str]], who: str = "rank") -> list[str]:
    """The differences between the ranks' settings, in words: which value each has, of those that are called ``who``."""
    names = dict.fromkeys(name for each in settings for name in each)
    found = []
    for name in names:
        having = ranks_having([each.get(name, "missing") for each in settings], who)
        if len(having) > 1:
            found.append(f"{name}: " + "; ".join(f"{value} on {ranks}" for value, ranks in having.items()))
    return found or ["the order of the parameters or buffers"]


def ranks_having(values: Sequence[T], who: str = "rank", among: Sequence[int] | None = None) -> dict[T, str]:
    """Each of the values that ranks have, ``among`` these or all, in order, and in words which ranks have it."""
    ranks_of: dict[T, list[int]] = {}
    for rank in range(len(values)) if among is None else among:
        ranks_of.setdefault(values[rank], []).append(rank)
    return {value: _in_words(ranks, who) for value, ranks in ranks_of.items()}


def differing(values: Sequence[Hashable], parts: Sequence[Sequence[int]]) -> str:
    """Say which ranks have others of the ``values`` [P] than the rest of their part; empty if each part has the same.

    ``parts`` are of ranks that must have the same, such as columns of members.
    """
    every = (ranks_having(values, among=part) for part in parts)
    return next((" and on ".join(having.values()) for having in every if len(having) > 1), "")


def _in_words(ranks: Sequence[int], who: str) -> str:
    shown = ", ".join(map(str, ranks[:MOST_NAMED])) + (", ..." if len(ranks) > MOST_NAMED else "")
    return f"{who} {shown}" if len(ranks) == 1 else f"{who}s {shown}"


def _gather(text: bytes, comm: Comm, device: torch.device) -> list[bytes]:
    own: Tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    return [bytes(row.tolist()) for row in comm.all_gather(own).wait()]
