"""The gradient not yet sent as a checkpoint keeps it: its schema, and whether it is what was saved."""

import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.checks import is_list, is_names, is_whole

KEY = "lightning_sparse"
RESIDUALS = ("per_rank", "mean", "none")
NOT_FIRST = "it is what state_dict() returned on another rank than 0"


def _is_tensors(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta
        for name, x in value.items()
    )


def _is_group(value: object) -> bool:
    return isinstance(value, Mapping) and is_names(value.get("names")) and _is_tensors(value.get("memory"))


def _is_plan(value: object) -> bool:
    groups = value.get("groups", []) if isinstance(value, Mapping) else None
    return is_list(groups) and all(is_names(names) and names for names in groups)


def _is_local(value: object) -> bool:
    if not isinstance(value, Mapping) or not value:
        return value == {}
    states = value.get("optimizers")
    single = {key: value[key] for key in ("sampled", "scaler") if key in value}
    named = [value.get(key) for key in ("checksums", "seen", "moments")]
    named += [value.get(key, {}) for key in ("averages", "buffers")]
    return is_list(states) and all(map(_is_tensors, [*states, *named])) and _is_tensors(single)


def _entry(must: str, fits: Callable[[Any], bool]) -> Any:
    return field(metadata={"must": must, "fits": fits})


@dataclass(frozen=True)
class State:
    """The part of the state of all ranks that a checkpoint keeps, complete on rank 0.  P = size.

    With local steps ``unsent`` has each rank's own weights x_r, of which x_r - x̄ is unsent; x̄ is the model in the same
    checkpoint.
    """

    residuals: str = _entry("'per_rank' or 'mean'", lambda x: x in RESIDUALS[:2])
    size: int = _entry("an integer of at least 1", lambda x: is_whole(x, 1))
    steps: int = _entry("an integer of at least 0", lambda x: is_whole(x, 0))
    #: Of each parameter [P, *shape] float32, or the mean [*shape].
    unsent: Mapping[str, Tensor] = _entry("a dictionary of tensors by name", _is_tensors)
    #: What compressors remember of each group of parameters, ``memory`` [P, ...] and their ``names``.
    groups: Sequence[Mapping[str, Any]] = _entry(
        "a list of dictionaries, each with a list of names and a memory of tensors",
        lambda x: is_list(x) and all(map(_is_group, x)),
    )
    compressor: str = _entry("a string", lambda x: isinstance(x, str))
    plan: Mapping[str, Any] = _entry("a dictionary whose groups are lists of names", _is_plan)
    #: With local steps, of each optimizer the tensors [P, *shape], or their means, by parameter and name, in
    #: "optimizers", and what is known of second moments, in "moments"; else empty.
    local: Mapping[str, Any] = field(default_factory=dict)
    #: Of a step whose optimizer had not stepped the mean of each gradient, [*shape] float32; else empty.
    means: Mapping[str, Tensor] = field(default_factory=dict)
    slices: int = 1  # L, ranks of a member, of which each remembers a slice of each group
    checksum: Any = None  # one of what all ranks share, then one of each rank's rows; None: taken out by hand

    @classmethod
    def checked(cls, saved: Any, rank: int, size: int) -> "State":
        """Return what was saved; of the rows of all ranks, only those are read from which ``rank`` of ``size`` goes on.

        Raises:
            ValueError: if it cannot have been saved, with the first thing that is wrong.
        """
        if not isinstance(saved, Mapping):
            raise ValueError(f"it must be a dictionary; got {_shown(saved)}")
        for name, rule in SCHEMA.items():
            if name not in saved:
                raise ValueError(f"{name!r} is missing")
            if not rule["fits"](saved[name]):
                raise ValueError(f"{name} must be {rule['must']}; got {_shown(saved[name])}")
        if not _is_local(local := saved.get("local", {})):
            raise ValueError(
                "local must have lists of tensors in 'optimizers', and tensors in 'checksums', 'seen' and 'moments'; "
                f"got {_shown(local)}. A version before 0.1.0 may have written it, whose files cannot be read"
            )
        if not _is_tensors(means := saved.get("means", {})):
            raise ValueError(f"means must be a dictionary of tensors by name; got {_shown(means)}")
        if not is_whole(slices := saved.get("slices", 1), 1):
            raise ValueError(f"slices must be an integer of at least 1; got {_shown(slices)}")
        further: dict[str, Any] = {"local": local, "means": means, "slices": slices, "checksum": saved.get("checksum")}
        state = cls(**{name: saved[name] for name in SCHEMA}, **further)
        rows = state.rows_of(rank, size)
        not_first = [NOT_FIRST] if state._is_of_another_rank() else []
        for wrong in chain(not_first, state._wrong(rows), state._altered(rows)):
            raise ValueError(wrong)
        return state

    def _is_of_another_rank(self) -> bool:
        """Whether something in it has no rows, as :meth:`to_dict` returns it on other ranks than the first."""
        tensors = [*self.unsent.values(), *(x for group in self.groups for x in group["memory"].values())]
        return bool(self.ranks) and any(x.shape[:1] == (0,) for x in tensors)

    def _wrong(self, rows: range) -> Iterator[str]:
        """Yield what of one entry does not fit another, or has values that cannot have been saved, in ``rows``."""
        for i, group in enumerate(self.groups):
            if not set(group["names"]) <= set(self.unsent):
                yield f"groups[{i}]: names must all be in 'unsent'; got {_shown(list(group['names']))}"
            for key, x in group["memory"].items():
                yield from _wrong_rows(f"groups[{i}]: memory[{key!r}]", x, self.size)
        for what, tensors in self._of_ranks() if self.ranks else ():
            for key, x in tensors.items():
                yield from _wrong_rows(f"{what}[{key!r}]", x, self.size)
        for name, x in self.unsent.items():
            if self.ranks:
                yield from _wrong_rows(f"unsent[{name!r}]", x, self.size)
            if x.dtype != torch.float32:
                yield f"unsent[{name!r}] must be float32; got {x.dtype}"
            if not self.local and not used(x, rows).isfinite().all():  # own weights may be a mask, or have overflowed
                yield f"unsent[{name!r}] holds values that are not finite"

    def _altered(self, rows: range) -> Iterator[str]:
        """Yield what has another checksum now than when it was saved: all, what ranks share, or one of ``rows``."""
        noted = self.checksum
        if noted is None:
            return
        if not (is_list(noted) and len(noted) == 1 + self.ranks and all(is_whole(each, 0) for each in noted)):
            got = _shown(noted)
            if is_whole(noted, 0):
                got += ", as a version before 0.1.0 wrote it, whose files cannot be read"
            yield f"checksum must be a list of integers, of what all share and of each rank; got {got}"
            return
        sums = [("the checksum of what all ranks share", self._sum("shared" if self.ranks else "all"), noted[0])]
        sums += [(f"the checksum of rank {row}'s part", self._sum(row), noted[1 + row]) for row in rows]
        for what, now, then in sums:
            if now != then:
                yield (
                    f"{what} is {now}, and {then} was noted when it was saved (after a change that is meant, delete "
                    "the entry 'checksum')"
                )

    def to_dict(self) -> dict[str, Any]:
        """Return what goes into a file, with the checksums of what is in it."""
        further: dict[str, Any] = {key: x for key, x in (("local", self.local), ("means", self.means)) if x}
        further |= {"slices": self.slices} if self.slices > 1 else {}
        return {name: getattr(self, name) for name in SCHEMA} | further | {"checksum": self.checksums()}

    @property
    def optimizers(self) -> Sequence[Mapping[str, Tensor]]:
        """Of each optimizer its tensors [P, *shape], or their means; none where gradients were averaged."""
        states: Sequence[Mapping[str, Tensor]] = self.local.get("optimizers", [])
        return states

    def described(self) -> dict[str, object]:
        """Return what must be the same on every rank that goes on with it."""
        kept = {name: getattr(self, name) for name in (*SCHEMA, "slices", "checksum")}
        kept["groups"] = [(group["names"], sorted(group["memory"])) for group in self.groups]
        kept["unsent"] = {name: list(x.shape) for name, x in self.unsent.items()}
        kept["means"] = sorted(self.means)
        kept["local"] = [sorted(tensors) for tensors in self.optimizers] + list(self.local)
        return {f"checkpoint: {name}": value for name, value in kept.items()}

    def _of_ranks(self) -> list[tuple[str, Mapping[str, Tensor]]]:
        """What local steps keep of each rank: by where it stands, tensors [P, *shape] by name."""
        single = {key: self.local[key] for key in ("sampled", "scaler") if key in self.local}
        states = [(f"optimizers[{i}]", tensors) for i, tensors in enumerate(self.optimizers)]
        return [*states, ("local", single), ("buffers", self.local.get("buffers", {}))]

    @property
    def ranks(self) -> int:
        """The number of rows, one of each rank; 0 of a mean, which has none."""
        return self.size if self.residuals == "per_rank" else 0

    def rows_of(self, rank: int, size: int) -> range:
        """The rows from which ``rank`` of ``size`` goes on."""
        return range(rank, rank + 1) if self.ranks == size else range(self.ranks)

    def checksums(self) -> list[int]:
        """Return the checksum of what all ranks share, then of each rank's rows: they tell if a bit has changed."""
        return [self._sum("shared" if self.ranks else "all"), *map(self._sum, range(self.ranks))]

    def _sum(self, of: int | str) -> int:
        """The checksum of "all", of what is "shared" (of rows only their kinds and shapes), or of one row alone."""
        everything = [*(getattr(self, name) for name in SCHEMA), *([self.local] if self.local else [])]
        if isinstance(of, int):
            rows: list[object] = [self.unsent, [group["memory"] for group in self.groups]]
            rows += [self.optimizers] if self.local else []
            rows += [tensors for _, tensors in self._of_ranks()[len(self.optimizers) :] if tensors]
            return _crc(rows, 0, lambda x: x[of : of + 1])
        every = [*([self.local["averages"]] if "averages" in self.local else []), *([self.means] if self.means else [])]
        shared = _crc(every, 0, lambda x: x) if every else 0
        return shared ^ _crc(everything, 0, (lambda x: x) if of == "all" else (lambda x: f"{x.dtype} {list(x.shape)}"))


SCHEMA: dict[str, Mapping[str, Any]] = {each.name: each.metadata for each in fields(State) if each.metadata}


def _wrong_rows(what: str, x: Tensor, rows: int) -> Iterator[str]:
    if x.shape[:1] != (rows,):
        yield f"{what} must have a row for each of {rows} ranks; got the shape {list(x.shape)}"


def used(x: Tensor, rows: range) -> Tensor:
    """The ``rows`` of what was saved, [P, *shape], or the mean [*shape]; no other part is read."""
    x = x.detach()  # a file may say that it requires a gradient
    return x[rows.start : rows.stop] if rows else x


def mean_used(x: Tensor, rows: range) -> Tensor:
    """The mean of the ``rows`` of what was saved, of whole numbers the first; or the mean that was saved, [*shape]."""
    own = used(x, rows)
    if not rows:
        return own
    return own.mean(0) if len(rows) > 1 and own.is_floating_point() else own[0]


def nbytes(saved: Mapping[str, Any]) -> int:
    """The bytes of all tensors in what :meth:`State.to_dict` returned on this rank, as a file keeps them."""
    kept = [saved["unsent"], saved.get("means", {}), *(group["memory"] for group in saved["groups"])]
    kept += saved.get("local", {}).get("optimizers", [])
    tensors = [x for each in kept for x in each.values()]
    return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in tensors)  # of zeros it keeps one


def _shown(value: object) -> str:
    return reprlib.repr(value) if isinstance(value, str | int | float | list | None) else f"a {type(value).__name__}"


def _crc(value: object, crc: int, part: Callable[[Tensor], Tensor | str]) -> int:
    """The checksum of ``value`` and all in it; of a tensor, of that ``part``."""
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
