"""Which parameters travel together, and what groups take over from those before them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from lightning_sparse.checks import is_names, matches
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.base import Exact
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.cut import WHOLE, Cut

FUSIONS = ("layer", "bucket", "none")
HAND_OVERS = 10  # calls of our hook in a backward; of smaller parts each takes longer than it gains
LEAST_HAND_OVER_BYTES = 2**20
MESSAGES = 5  # of sums where DDP has the gradient, after the first, at most: each takes a processor 1 or 2 ms
NOT_TRAINED = -1  # by any optimizer
BUCKET_BYTES = 25 * 2**20  # of float32 gradient in a group, as in DDP's default buckets


@dataclass(frozen=True)
class Piece:
    """A parameter as the planner sees it."""

    name: str
    elements: int
    dense: bool = False  # summed densely, in groups with its like
    optimizer: int = 0  # the number of the one that trains it, or NOT_TRAINED

    @property
    def layer(self) -> str:
        return self.name.rpartition(".")[0]


def check_fusion(fusion: object) -> str | tuple[str, ...]:
    """Return ``fusion`` if it is one of ``FUSIONS``, or as a tuple if it is a list of patterns.

    Raises:
        ValueError: if it is neither.
    """
    if isinstance(fusion, str) and fusion in FUSIONS:
        return fusion
    if is_names(fusion) and fusion:
        return tuple(fusion)
    raise ValueError(
        f"fusion must be one of {', '.join(FUSIONS)}, or a list of patterns; got {fusion!r}. A list has a shell-style "
        "pattern of parameter names for each group, such as ['head.*', '*']."
    )


def hand_over_bytes(gradient_bytes: int) -> float:
    """Return of how much gradient DDP hands over at once, where nobody says it: when decides what can be sent."""
    return min(max(LEAST_HAND_OVER_BYTES, gradient_bytes / HAND_OVERS), BUCKET_BYTES)


def later_message_bytes(payload_bytes: int, least_bytes: int) -> int:
    """Return how long a message after the first is, at least, of ``payload_bytes`` summed where DDP has them."""
    return max(least_bytes, payload_bytes // MESSAGES)


def message_lengths(gradient_bytes: int, least_bytes: int) -> tuple[int, int]:
    """Return of how much gradient the first message is, at least, and later ones, of sums where DDP has it."""
    first_bytes = round(hand_over_bytes(gradient_bytes))
    return first_bytes, max(first_bytes, later_message_bytes(gradient_bytes, least_bytes))


def fuse(pieces: Sequence[Piece], fusion: str | Sequence[str], bucket_bytes: int = BUCKET_BYTES) -> list[list[Piece]]:
    """Cut ``pieces``, given in backward order, into groups in the order in which they can be sent.

    "bucket" and, until a plan has been measured, "layer": a group is closed once it holds ``bucket_bytes`` of float32
    gradient.  "none": one group a layer, that is for the parameters of one module.  A list of patterns: a group for
    each, of the parameters whose first match it is.  Dense pieces share groups only with each other.

    Raises:
        ValueError: as :func:`check_fusion`, or if a parameter matches none of the patterns.
    """
    fusion = check_fusion(fusion)
    groups: list[list[Piece]] = []
    for dense in (False, True):
        of_kind = [piece for piece in pieces if piece.dense == dense]
        if not isinstance(fusion, str):
            groups += _by_pattern(of_kind, fusion)
        elif fusion == "none":
            groups += [list(layer) for _, layer in groupby(of_kind, lambda piece: piece.layer)]
        else:
            groups += _filled(of_kind, bucket_bytes)
    place = {piece.name: i for i, piece in enumerate(pieces)}
    return sorted(groups, key=lambda group: place[group[-1].name])


def _filled(pieces: Sequence[Piece], bucket_bytes: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = []
    for piece in pieces:
        if not groups or sum(p.elements for p in groups[-1]) * 4 >= bucket_bytes:
            groups.append([])
        groups[-1].append(piece)
    return groups


def _by_pattern(pieces: Sequence[Piece], patterns: Sequence[str]) -> list[list[Piece]]:
    groups: dict[str, list[Piece]] = {}
    for piece in pieces:
        pattern = next((p for p in patterns if matches(piece.name, [p])), None)
        if pattern is None:
            raise ValueError(
                f"fusion={list(patterns)!r}: parameter {piece.name!r} matches none of the patterns; end the list with "
                "'*' for all others."
            )
        groups.setdefault(pattern, []).append(piece)
    return list(groups.values())


def pieces_of(
    parameters: Mapping[str, Tensor], compressor: Compressor, optimizers: Mapping[str, int] | None = None
) -> list[Piece]:
    """Return the pieces of ``parameters``, given in the order of definition, in that of backward.

    ``optimizers`` are the numbers of those that train them; None: one trains all.
    """
    backward, number_of = reversed(list(parameters.items())), optimizers or {}
    return [
        Piece(name, p.numel(), compressor.is_dense(name, p.numel()), number_of.get(name, 0)) for name, p in backward
    ]


def apart(groups: Iterable[Sequence[str]], pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Return the pieces of each of ``groups`` of names, those that are dense apart, and those of each optimizer.

    So what one optimizer does not step with shares no group with what another does.
    """
    of = {piece.name: piece for piece in pieces}
    kinds = sorted({(piece.dense, piece.optimizer) for piece in pieces})
    found = ([of[n] for n in names if (of[n].dense, of[n].optimizer) == kind] for names in groups for kind in kinds)
    return [group for group in found if group]


def make_groups(
    parameters: Mapping[str, Tensor], compressor: Compressor, groups: Sequence[Sequence[Piece]], cut: Cut = WHOLE
) -> list[tuple[Group, Compressor]]:
    """Make a :class:`Group` of each of ``groups``, of the slices that ``cut`` says; returns it with what averages it.

    A parameter without an optimizer is summed exactly: nobody clears its ``.grad``, to which each backward adds.
    """

    def averages(piece: Piece) -> Compressor:
        if piece.optimizer == NOT_TRAINED:
            return Exact()
        return compressor.dense_variant() if piece.dense else compressor

    return [
        (Group(index, tuple(p.name for p in group), tuple(parameters[p.name] for p in group), cut), averages(group[0]))
        for index, group in enumerate(groups)
    ]


def lay_out(
    parameters: Mapping[str, Tensor],
    compressor: Compressor,
    fusion: str | Sequence[str],
    bucket_bytes: int = BUCKET_BYTES,
    cut: Cut = WHOLE,
) -> list[tuple[Group, Compressor]]:
    """Make groups of ``parameters``, given in the order of definition; returns each with what averages it."""
    return make_groups(parameters, compressor, fuse(pieces_of(parameters, compressor), fusion, bucket_bytes), cut)


# - of local steps


def lay_out_fragments(
    parameters: Mapping[str, Tensor],
    compressor: Compressor,
    fusion: str | Sequence[str],
    fragments: int,
    bucket_bytes: int = BUCKET_BYTES,
    cut: Cut = WHOLE,
) -> tuple[list[tuple[Group, Compressor]], list[int]]:
    """Cut parameters into ``fragments`` that take turns, as even as whole parameters allow, and those into groups.

    "none" keeps layers whole, and a list of patterns its groups; both are then the groups.

    Returns:
        The groups with what averages them, and the fragment of each.
    """
    pieces = pieces_of(parameters, compressor)
    whole = not isinstance(check_fusion(fusion), str) or fusion == "none"
    units = fuse(pieces, fusion) if whole else [[piece] for piece in pieces]
    fragment_of, _ = cut_into_fragments(units, fragments)
    groups: list[list[Piece]] = []
    for fragment in range(fragments):
        own = [piece for piece in pieces if fragment_of[piece.name] == fragment]
        groups += [unit for unit in units if unit[0] in own] if whole else fuse(own, "bucket", bucket_bytes)
    made = make_groups(parameters, compressor, groups, cut)
    return made, [fragment_of[group.names[0]] for group, _ in made]


def cut_into_fragments(units: Sequence[Sequence[Piece]], fragments: int) -> tuple[dict[str, int], list[int]]:
    """Return the fragment of each piece, by name, and the elements of each fragment, as even as ``units`` allow."""
    fragment_of: dict[str, int] = {}
    sizes = [0] * fragments
    for unit in sorted(units, key=lambda unit: -sum(piece.elements for piece in unit)):
        lightest = sizes.index(min(sizes))
        sizes[lightest] += sum(piece.elements for piece in unit)
        fragment_of.update((piece.name, lightest) for piece in unit)
    return fragment_of, sizes


# - from one set of groups to another

#: What replicas with weights of their own remember of each element, as a checkpoint names it.
ASIDE, EXACT, UNSENT_GRADIENT = "aside", "exact", "unsent gradient"
SET, VELOCITY = "set by others", "outer velocity"
OF_WEIGHTS = (ASIDE, EXACT, UNSENT_GRADIENT, SET, VELOCITY)
Part = tuple[Group, int]  # the group that has a parameter, and the parameter's place in it


def carry_over(old: Sequence[Group], new: Sequence[tuple[Group, Compressor]], memories: bool = True) -> None:
    """Move what ``old`` groups have not sent into ``new`` ones, for parameters of the same name and shape.

    Other parameters start from zero; :func:`not_carried` names them.  A group of the same parameters as before keeps
    all its memory.  Others keep what compressors remember of each element, and what their compressor can carry.
    ``memories=False`` is for a change of compressor: only what replicas remember of each element is kept.  The old
    groups are emptied on the way, so that there is never a second copy of all that is unsent.
    """
    source = {parameter: (group, slot) for group in old for slot, parameter in enumerate(_parameters(group))}
    parts_of = [[source.get(parameter) for parameter in _parameters(group)] for group, _ in new]
    last_use = {id(part[0]): number for number, parts in enumerate(parts_of) for part in parts if part}
    for number, ((group, compressor), parts) in enumerate(zip(new, parts_of, strict=True)):
        givers = [part[0] for part in parts if part]
        group.step = max((giver.step for giver in givers or old), default=0)
        group.memory = _memory(group, compressor, parts) if memories else _of_each_element(group, parts, OF_WEIGHTS)
        if whole := _whole(group, parts):
            group.unsent = whole.unsent.to(group.unsent.device)
        else:
            _take(group.slots(group.unsent), parts, lambda giver: giver.unsent)
        for giver in old:
            if last_use.get(id(giver)) == number:
                giver.empty()


def _parameters(group: Group) -> list[tuple[str, torch.Size]]:
    return list(zip(group.names, group.shapes, strict=True))


def _whole(group: Group, parts: Sequence[Part | None]) -> Group | None:
    """The group before of the same parameters, where there was one: what it keeps is handed over, not copied."""
    giver = parts[0][0] if parts and parts[0] else None
    return giver if giver is not None and giver.names == group.names and None not in parts else None


def _memory(group: Group, compressor: Compressor, parts: Sequence[Part | None]) -> dict[str, Tensor]:
    """Return the memory ``group`` starts with; ``parts`` are where its parameters were before."""
    if whole := _whole(group, parts):
        return whole.memory
    givers = {id(part[0]): part[0] for part in parts if part}
    elements: Counter[int] = Counter()
    for part, size in zip(parts, group.sizes, strict=True):
        if part:
            elements[id(part[0])] += size
    memory = compressor.carry([(givers[key], n) for key, n in elements.items()])
    return memory | _of_each_element(group, parts, (*compressor.per_element, *OF_WEIGHTS))


def _of_each_element(group: Group, parts: Sequence[Part | None], keys: Sequence[str]) -> dict[str, Tensor]:
    """What is remembered under ``keys`` of each element, wherever a part of it was before."""
    memory: dict[str, Tensor] = {}
    for key in keys:
        if kept := [part[0].memory[key].dtype for part in parts if part and key in part[0].memory]:
            memory[key] = torch.empty_like(group.unsent, dtype=max(kept, key=lambda dtype: dtype.itemsize))
            _take(group.slots(memory[key]), parts, lambda giver, key=key: _remembered(giver, key))  # type: ignore[misc]
    return memory


def _remembered(group: Group, key: str) -> Tensor | None:
    """What ``group`` has under ``key``; of exact weights, if it needs none of its own, what is in ``unsent``."""
    return group.memory.get(key, group.unsent if key == EXACT else None)


def _take(slots: Sequence[Tensor], parts: Sequence[Part | None], kept: Callable[[Group], Tensor | None]) -> None:
    """Copy what the groups before ``kept`` of each parameter into its slot; zeros where there is nothing."""
    for slot, part in zip(slots, parts, strict=True):
        before = kept(part[0]) if part else None
        if part is None or before is None:
            slot.zero_()
        else:
            slot.copy_(part[0].slots(before)[part[1]])


def not_carried(old: Sequence[Group], new: Sequence[Group]) -> list[str]:
    """Say in words what :func:`carry_over` drops and what it starts from zero; empty if the parameters are the same."""
    before, now = (dict(parameter for group in groups for parameter in _parameters(group)) for groups in (old, new))
    reshaped = {name for name in before.keys() & now.keys() if before[name] != now[name]}
    kinds = (
        (before.keys() - now.keys(), "what was not sent of parameters that are gone or frozen is dropped"),
        (reshaped, "parameters of another shape start from zero"),
        (now.keys() - before.keys(), "new parameters start from zero"),
    )
    return [f"{what} ({some(sorted(names))})" for names, what in kinds if names]


def some(names: Sequence[str]) -> str:
    """The first of ``names`` in words, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
