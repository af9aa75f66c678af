"""Which parameters travel together, and what groups take over from those before them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse.checks import matches
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group

FUSIONS = ("layer", "bucket", "none")
BUCKET_BYTES = 25 * 2**20  # of float32 gradient in a group, as in DDP's default buckets


@dataclass(frozen=True)
class Piece:
    """A parameter as the planner sees it."""

    name: str
    elements: int
    whole: bool = False  # averaged densely, apart from the others


def check_fusion(fusion: object) -> str | tuple[str, ...]:
    """``fusion`` if it is one of ``FUSIONS``, or as a tuple if it is a list of patterns.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(fusion, Sequence) and not isinstance(fusion, str) and all(isinstance(p, str) for p in fusion):
        if fusion:
            return tuple(fusion)
    elif fusion in FUSIONS:
        return str(fusion)
    raise ValueError(
        f"fusion={fusion!r} is not one of {', '.join(FUSIONS)}, nor a list with a pattern of parameter names (as of a "
        "shell) for each group, such as ['head.*', '*']."
    )


def check_choice(compressor: Compressor, fusion: str | Sequence[str]) -> None:
    """Raise a ValueError if ``compressor`` is to be chosen, and with this ``fusion`` never would be."""
    if compressor.candidates and fusion != "layer":
        raise ValueError(f"fusion={fusion!r}: sparse_auto chooses from what LayerFusion measures; use 'layer'.")


def fuse(pieces: Sequence[Piece], fusion: str | Sequence[str], bucket_bytes: int = BUCKET_BYTES) -> list[list[Piece]]:
    """Cut ``pieces``, given in backward order, into groups in the order in which they can be sent.

    "bucket" and, until a plan has been measured, "layer": a group is closed once it holds ``bucket_bytes`` of float32
    gradient.  "none": one group a layer, that is for the parameters of one module.  A list of patterns: a group for
    each, of the parameters whose first match it is.  Pieces that travel whole share groups only with each other.

    Raises:
        ValueError: as :func:`check_fusion`, or if a parameter matches none of the patterns.
    """
    fusion = check_fusion(fusion)
    place = {piece.name: i for i, piece in enumerate(pieces)}
    if not isinstance(fusion, str):
        groups = _by_pattern(pieces, fusion)
    else:
        groups = []
        filling: dict[bool, list[Piece]] = {True: [], False: []}
        for piece in pieces:
            group = filling[piece.whole]
            full = sum(p.elements for p in group) * 4 >= bucket_bytes
            if group and (_layer(group[-1]) != _layer(piece) if fusion == "none" else full):
                groups.append(group)
                group = filling[piece.whole] = []
            group.append(piece)
        groups += [group for group in filling.values() if group]
    return sorted(groups, key=lambda group: place[group[-1].name])


def _by_pattern(pieces: Sequence[Piece], patterns: Sequence[str]) -> list[list[Piece]]:
    groups: dict[tuple[str, bool], list[Piece]] = {}
    for piece in pieces:
        pattern = next((p for p in patterns if matches(piece.name, [p])), None)
        if pattern is None:
            raise ValueError(
                f"fusion={list(patterns)!r}: parameter {piece.name!r} matches none of the patterns; end the list with "
                "'*' for all others."
            )
        groups.setdefault((pattern, piece.whole), []).append(piece)
    return list(groups.values())


def _layer(piece: Piece) -> str:
    return piece.name.rpartition(".")[0]


def pieces_of(parameters: Mapping[str, Tensor], compressor: Compressor) -> list[Piece]:
    """The pieces of ``parameters``, given in the order of definition, in that of backward."""
    backward = reversed(list(parameters.items()))
    return [Piece(name, p.numel(), compressor.is_dense(name, p.numel())) for name, p in backward]


def cut_apart(groups: Sequence[Sequence[Piece]], dense_up_to: int) -> list[list[Piece]]:
    """Each of ``groups`` cut in two: what is compressed, if that is more than so many elements, and what is whole."""
    found = []
    for group in groups:
        small = sum(piece.elements for piece in group if not piece.whole) <= dense_up_to
        pieces = [replace(piece, whole=piece.whole or small) for piece in group]
        found += [[piece for piece in pieces if piece.whole == whole] for whole in (False, True)]
    return [group for group in found if group]


def make_groups(
    parameters: Mapping[str, Tensor], compressor: Compressor, groups: Sequence[Sequence[Piece]]
) -> list[tuple[Group, Compressor]]:
    """Each of ``groups`` as a :class:`Group`, and what averages it."""
    return [
        (
            Group(index, tuple(p.name for p in group), tuple(parameters[p.name] for p in group)),
            compressor.dense_variant() if group[0].whole else compressor,
        )
        for index, group in enumerate(groups)
    ]


def lay_out(
    parameters: Mapping[str, Tensor],
    compressor: Compressor,
    fusion: str | Sequence[str],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[tuple[Group, Compressor]]:
    """Groups for ``parameters``, given in the order of definition, and what averages each."""
    return make_groups(parameters, compressor, fuse(pieces_of(parameters, compressor), fusion, bucket_bytes))


def carry_over(old: Sequence[Group], new: Sequence[tuple[Group, Compressor]], memories: bool = True) -> None:
    """Move what ``old`` groups have not sent into ``new`` ones, for parameters of the same name and shape.

    Other parameters start from zero; :func:`not_carried` names them.  A group of the same parameters as before keeps
    all its memory.  Others keep what compressors remember of each element, and what their compressor can carry;
    ``memories=False``, for another compressor, keeps none.  The old groups are emptied on the way, so that there is
    never a second copy of all that is unsent.
    """
    source = {
        (name, shape): (group, slot)
        for group in old
        for slot, (name, shape) in enumerate(zip(group.names, group.shapes, strict=True))
    }
    parts_of = [
        [source.get(parameter) for parameter in zip(group.names, group.shapes, strict=True)] for group, _ in new
    ]
    left = Counter(id(part[0]) for parts in parts_of for part in parts if part)
    step = max((group.step for group in old), default=0)
    for (group, compressor), parts in zip(new, parts_of, strict=True):
        group.step = step
        group.memory = _memory(group, compressor, parts) if memories else {}
        for mine, part in zip(group.slots(group.unsent), parts, strict=True):
            if part is None:
                mine.zero_()
                continue
            giver, slot = part
            mine.copy_(giver.slots(giver.unsent)[slot])
            left[id(giver)] -= 1
        for giver in {id(part[0]): part[0] for part in parts if part}.values():
            if not left[id(giver)]:
                giver.unsent, giver.memory = giver.unsent.new_empty(0), {}


def _memory(group: Group, compressor: Compressor, parts: Sequence[tuple[Group, int] | None]) -> dict[str, Tensor]:
    """What ``group`` remembers from the start; ``parts`` are each parameter's group before and its place in it."""
    givers = {id(part[0]): part[0] for part in parts if part}
    if None not in parts and [giver.names for giver in givers.values()] == [group.names]:
        return next(iter(givers.values())).memory
    elements: Counter[int] = Counter()
    for part, size in zip(parts, group.sizes, strict=True):
        if part:
            elements[id(part[0])] += size
    memory = compressor.carry([(givers[key], n) for key, n in elements.items()])
    for key in compressor.per_element:
        if any(key in giver.memory for giver in givers.values()):
            slots = zip(parts, group.slots(group.unsent), strict=True)
            memory[key] = torch.cat([_slot(key, part, own) for part, own in slots])
    return memory


def _slot(key: str, part: tuple[Group, int] | None, own: Tensor) -> Tensor:
    """What the group before kept under ``key`` of a parameter, zeros if nothing, on the device of its ``own`` slot."""
    if part is None or key not in part[0].memory:
        return torch.zeros_like(own)
    giver, slot = part
    return giver.slots(giver.memory[key])[slot].to(own.device)


def not_carried(old: Sequence[Group], new: Sequence[Group]) -> list[str]:
    """What :func:`carry_over` drops and what it starts from zero, in words: nothing if the parameters are the same."""
    before, now = ({n: s for g in groups for n, s in zip(g.names, g.shapes, strict=True)} for groups in (old, new))
    both = before.keys() & now.keys()
    kinds = (
        (before.keys() - now.keys(), "what was not sent of parameters that are gone or frozen is dropped"),
        ({name for name in both if before[name] != now[name]}, "parameters of another shape start from zero"),
        (now.keys() - before.keys(), "new parameters start from zero"),
    )
    return [f"{what} ({_some(sorted(names))})" for names, what in kinds if names]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
