"""Which parameters travel together, and what groups take over from those before them."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.group import Group
from lightning_sparse.select import matches

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
    return [Piece(name, p.numel(), compressor.sends_whole(name, p.numel())) for name, p in backward]


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
            compressor.densely() if group[0].whole else compressor,
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
    """Move what ``old`` groups have not sent into ``new`` ones of the same parameters, by name, and their memories.

    A group of the same parameters as before keeps all its memory.  Others keep velocities, and what their compressor
    can carry; ``memories=False``, for another compressor, keeps none.  The old groups are emptied on the way, so that
    there is never a second copy of all that is unsent.
    """
    source = {name: (group, slot) for group in old for slot, name in enumerate(group.names)}
    left = {id(group): len(group.names) for group in old}
    for group, compressor in new:
        parts = [source[name] for name in group.names]
        elements: Counter[int] = Counter()
        for (giver, _), size in zip(parts, group.sizes, strict=True):
            elements[id(giver)] += size
        givers = {id(giver): giver for giver, _ in parts}
        group.step = max((giver.step for giver in givers.values()), default=0)
        if memories:
            group.memory = _memory(group, compressor, parts, [(givers[key], n) for key, n in elements.items()])
        for mine, (giver, slot) in zip(group.slots(group.unsent), parts, strict=True):
            mine.copy_(giver.slots(giver.unsent)[slot])
            left[id(giver)] -= 1
        for giver in givers.values():
            if not left[id(giver)]:
                giver.unsent, giver.memory = giver.unsent.new_empty(0), {}


def _memory(
    group: Group, compressor: Compressor, parts: Sequence[tuple[Group, int]], givers: Sequence[tuple[Group, int]]
) -> dict[str, Tensor]:
    if len(givers) == 1 and givers[0][0].names == group.names:
        return givers[0][0].memory
    memory = compressor.carry(givers)
    if parts and all("velocity" in giver.memory for giver, _ in parts):
        memory |= {key: kept for key, kept in parts[0][0].memory.items() if key in ("momentum", "clip_norm")}
        memory["velocity"] = torch.cat([giver.slots(giver.memory["velocity"])[slot] for giver, slot in parts])
    return memory
