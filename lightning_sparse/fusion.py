"""Which parameters travel together.  Pure functions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.group import Group

FUSIONS = ("layer", "bucket", "none")
BUCKET_BYTES = 25 * 2**20  # of float32 gradient in a group, as in DDP's default buckets


@dataclass(frozen=True)
class Piece:
    """A parameter as the planner sees it."""

    name: str
    elements: int
    whole: bool = False  # averaged densely, apart from the others


def fuse(pieces: Sequence[Piece], fusion: str, bucket_bytes: int = BUCKET_BYTES) -> list[list[Piece]]:
    """Cut ``pieces``, given in backward order, into groups in the order in which they can be sent.

    "bucket" and, until a plan has been measured, "layer": a group is closed once it holds ``bucket_bytes`` of float32
    gradient.  "none": one group a layer, that is for the parameters of one module.  Pieces that travel whole share
    groups only with each other.

    Raises:
        ValueError: if ``fusion`` is not one of ``FUSIONS``.
    """
    if fusion not in FUSIONS:
        raise ValueError(f"fusion={fusion!r} is not one of {', '.join(FUSIONS)}.")
    place = {piece.name: i for i, piece in enumerate(pieces)}
    groups: list[list[Piece]] = []
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


def lay_out(
    parameters: Mapping[str, Tensor], compressor: Compressor, fusion: str, bucket_bytes: int = BUCKET_BYTES
) -> list[tuple[Group, Compressor]]:
    """Groups for ``parameters``, given in the order of definition, and what averages each."""
    pieces = [Piece(n, p.numel(), compressor.sends_whole(n, p.numel())) for n, p in reversed(list(parameters.items()))]
    return [
        (
            Group(index, tuple(p.name for p in group), tuple(parameters[p.name] for p in group)),
            compressor.densely() if group[0].whole else compressor,
        )
        for index, group in enumerate(fuse(pieces, fusion, bucket_bytes))
    ]


def _layer(piece: Piece) -> str:
    return piece.name.rpartition(".")[0]
