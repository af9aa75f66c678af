"""The gradient not yet sent, on its way into a checkpoint and back."""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sparse.checkpoint.rank_local import (
    RankLocalState,
    gather_local,
    is_set,
    restore_parts,
    set_tensors,
    start_from_mean,
    with_buffers_apart,
)
from lightning_sparse.checkpoint.state import KEY, NOT_FIRST, State, mean_used
from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.averager import Averager, LocalState
from lightning_sparse.engine.groups import OF_WEIGHTS, SET, UNSENT_GRADIENT, VELOCITY, carry_over, not_carried
from lightning_sparse.engine.inside import gather_tensors, whole_of
from lightning_sparse.network.agreement import agree, everywhere, ranks_having
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.process_groups import Between
from lightning_sparse.settings import counted

SLICE, SLICED = "{} of slice {}", re.compile(r" of slice \d+$")  # what is remembered of one
ANEW = "what compressors remember beside it, such as thresholds, starts anew"
OF_ALL = (UNSENT_GRADIENT, SET, VELOCITY)  # of each element, of which others may go on with the mean


def gather(
    averager: Averager,
    residuals: str,  # "per_rank" or "mean"
    between: Between,  # whom this rank may send to; of a member the first rank speaks for all
    compressor: str,  # what was given to average with, as text
    plan: Mapping[str, Any],  # of LayerFusion
    parts: RankLocalState,
    keep_means: bool,  # the step will be made again if it is saved before its optimizer has stepped
) -> State:
    """Return the state of all ranks, complete on rank 0.

    Called on every rank; one parameter at a time, so that rank 0 never holds a second copy.  Of a parameter of which no
    rank has anything unsent, nothing is sent, and one zero stands for all in the file.
    """
    cut, leaders = averager.cut, between.column if averager.cut.index == 0 else None

    def rows(x: Tensor) -> Tensor:  # [*s] -> [M, *s] on the first rank, [0, *s] elsewhere
        flat = x.reshape(-1).to(averager.device)
        every = leaders.gather(flat) if leaders else flat.new_empty((0, flat.numel()), device="cpu")
        return every.view(len(every), *x.shape)

    def mean(x: Tensor) -> Tensor:  # [*s] -> [*s], on the first rank of all members
        flat = x.reshape(-1).to(averager.device)
        return (leaders.mean(flat) if leaders else flat.cpu()).view(x.shape)

    keep = mean if residuals == "mean" else rows
    size_of_rows = [] if residuals == "mean" else [averager.size]
    nothing = torch.zeros((), dtype=torch.float32, device="cpu")
    unsent: dict[str, Tensor] = {}
    groups: list[dict[str, Any]] = []
    for group, averaging in zip(averager.kept(keep_means), averager.compressors, strict=True):
        slots = group.slots(group.unsent)
        are_zero = zero_everywhere(slots, averager, between.everyone)
        parts_of = zip(group.names, group.shapes, group.parameters, slots, are_zero, strict=True)
        for name, shape, parameter, slot, is_zero in parts_of:
            if is_zero:
                unsent[name] = nothing.expand(*size_of_rows, *(shape if between.inside is None else parameter.shape))
            else:
                (whole,) = whole_of([slot.view(shape)], [parameter], cut, between.inside)
                unsent[name] = keep(whole)
        if residuals == "per_rank":
            memory = _memory_of_member(group, averaging, between.inside, averager.device)
            memory = {key: rows(kept) for key, kept in sorted(memory.items())}
            groups.append({"names": list(group.names), "memory": memory, "step": group.step})
    kept: dict[str, Any] = {}
    if averager.local is not None:
        kept = gather_local(averager.local, between, averager.device, keep, residuals == "per_rank", parts)
    steps, means = steps_of(averager), averager.due_means if keep_means else {}
    slices = {"slices": cut.count} if cut.count > 1 else {}
    return State(residuals, averager.size, steps, unsent, groups, compressor, plan, kept, means, **slices)


def zero_everywhere(tensors: Sequence[Tensor], averager: Averager, comm: Comm) -> list[bool]:
    """Whether each of float32 ``tensors`` has no bit set on any rank of ``comm``; to be called on every rank.

    With local steps they are weights, and nobody asks.
    """
    if not tensors or averager.local is not None:
        return [False] * len(tensors)
    own = torch.stack([x.view(torch.int32).any() for x in tensors]).to(torch.uint8)
    every: list[bool] = (comm.all_gather(own).wait() == 0).all(0).tolist()
    return every


# - what is remembered of groups, where the ranks of a member have a slice each


def _memory_of_member(
    group: Group, compressor: Compressor, inside: Comm | None, device: torch.device
) -> dict[str, Tensor]:
    """What all ranks of this member remember of ``group``: of each element together, and of slices by their number."""
    if inside is None:
        return group.memory
    every = gather_tensors(group.memory, inside, device)
    sizes = list(zip(*([part.numel() for part in group.cut.slices(p)] for p in group.parameters), strict=True))
    found: dict[str, Tensor] = {}
    for key in sorted(set().union(*every)):
        if key in (*compressor.per_element, *OF_WEIGHTS):
            have = [memory[key] for memory in every if key in memory]
            empty = have[0].new_empty(0)
            slots = [memory.get(key, empty).split(of_rank) for memory, of_rank in zip(every, sizes, strict=True)]
            found[key] = torch.cat([slot for of_parameter in zip(*slots, strict=True) for slot in of_parameter])
        else:
            found |= {SLICE.format(key, i): memory[key] for i, memory in enumerate(every) if key in memory}
    return found


def _own_memory(memory: Mapping[str, Tensor], group: Group) -> dict[str, Tensor]:
    """What this rank remembers, of what :func:`_memory_of_member` returned."""
    if group.cut.count == 1:
        return dict(memory)
    shapes, own, ending = [p.shape for p in group.parameters], {}, SLICE.format("", group.cut.index)
    for key, x in memory.items():
        if key.endswith(ending):
            own[key.removesuffix(ending)] = x
        elif not SLICED.search(key):
            parts = zip(shapes, x.split([shape.numel() for shape in shapes]), strict=True)
            own[key] = torch.cat([group.cut.own(part.view(shape)).reshape(-1) for shape, part in parts])
    return own


# - a state of all ranks, and back


def steps_of(averager: Averager) -> int:
    """The optimizer steps that were taken, as far as compressors count them."""
    return averager.steps if averager.local is not None else averager.group_step


def read(saved: Mapping[str, Any] | None, averager: Averager, comm: Comm) -> State | None:
    """Return what was ``saved``, if it is whole and the same on every rank; to be called on every rank.

    Raises:
        ValueError: on every rank, if one of them finds it damaged; each reads what it goes on with, and no more.
        RuntimeError: on every rank, if they were not given the same.
    """
    state, found = None, ""
    try:
        state = None if saved is None else State.checked(saved, averager.rank, averager.size)
    except ValueError as error:
        found = str(error)
    having = ranks_having(everywhere(found, comm, averager.device))
    if NOT_FIRST in having:
        raise ValueError(
            "state must be what state_dict() returned on rank 0, which alone has what every rank has not sent; on "
            f"{having[NOT_FIRST]} {NOT_FIRST}. Save it on rank 0, and load that file on every rank."
        )
    if damaged := "; ".join(f"{what} ({ranks})" for what, ranks in having.items() if what):
        raise ValueError(
            f"The residuals (the gradient not yet sent) in the checkpoint are damaged: {damaged}. Resume from an older "
            f"checkpoint, or without them, so that they start from zero: load it with torch.load, pop({KEY!r}), and "
            "save it again."
        )
    agree(state.described() if state else {"checkpoint": "without residuals"}, comm, averager.device)
    return state


def restore(averager: Averager, state: State | None, compressor: str, parts: RankLocalState) -> None:
    """Set what this rank has not sent, from the state in a checkpoint, or to zero if there is none.

    Parameters are found by name, so groups may have changed.  On the number of ranks that saved "per_rank", each rank
    gets its own back, and compressors what they kept.  Otherwise every rank starts from the mean of the old ones, which
    conserves what is unsent of the mean gradient, and compressors start anew.  Ranks are members here: where these have
    as many ranks as each had before, or others, each gets its own back all the same, but for what compressors kept of
    slices.  One warning names all that could not be carried over.  ``parts``, which have what rank 0's had, get this
    rank's own or the mean, with local steps.

    Raises:
        ValueError: there are states of optimizers, and no optimizers that may have them.
    """
    local = averager.local
    if state is not None and state.local and local is None:
        start_from_mean(state, parts)
    state = _of_this_kind(state, local is not None)
    if state is not None and local is not None:
        state = with_buffers_apart(state, local.buffers)
        local.adopt([group["names"] for group in state.groups] or [list(state.unsent)])
    lost = [] if state is None else list(_differences(state, averager.size, averager.cut.count, compressor))
    saved = [] if state is None else _groups(state, averager, compressor)
    new = list(zip(averager.groups, averager.compressors, strict=True))
    shapes = {(name, shape) for group in saved for name, shape in zip(group.names, group.shapes, strict=True)}
    carry_over(saved, new)
    averager.hand_back({} if state is None else state.means)
    averager.note_resumed()
    if local is not None:
        _restore_local(averager, local, state, shapes, parts)
    if state is not None and (lost := [*lost, *not_carried(saved, averager.groups)]):
        rank_zero_warn(f"lightning_sparse: Resuming from a checkpoint of another configuration: {'; '.join(lost)}.")


def _restore_local(
    averager: Averager,
    local: LocalState,
    state: State | None,
    shapes: Collection[tuple[str, torch.Size]],
    parts: RankLocalState,
) -> None:
    """Go on with local steps, each group's ``unsent`` being this rank's own weights; from nothing if ``state`` is."""
    if state is None:
        local.unpack(None, (), {}, late=False)
        return
    if len(state.optimizers) > len(parts.optimizers):
        raise ValueError(
            f"optimizers must be all {len(state.optimizers)} whose states are in the checkpoint, since they differ "
            f"between ranks; got {len(parts.optimizers)}. Give them: load_state_dict(state, optimizers=[optimizer])."
        )
    own = {
        name
        for group in averager.groups
        for name, shape in zip(group.names, group.shapes, strict=True)
        if (name, shape) in shapes
    }
    own -= {name for name in own if parts.is_loaded and is_set(name, parts.tensors, state)}
    late = not parts.is_loaded and any(is_set(name, parts.tensors, state) for name in own)
    whole = {name: x for name, x in state.local.get("averages", {}).items() if name in own}
    averages = {name: averager.cut.own(x.to(averager.device)) for name, x in whole.items()}
    local.unpack(state.steps, own, averages, late)
    rows = state.rows_of(averager.rank, averager.size)
    for optimizer, tensors in zip(parts.optimizers, state.optimizers, strict=False):
        set_tensors(optimizer, {key: mean_used(x, rows) for key, x in tensors.items()})
    same_members = state.ranks == averager.size
    sampled = state.local.get("sampled") if same_members else None
    local.resume(state.local, None if sampled is None else sampled[averager.rank].clone())
    if same_members:
        restore_parts(state, averager.rank, averager.cut, local, parts)


def _of_this_kind(state: State | None, local: bool) -> State | None:
    """Return ``state`` if it says what is unsent of gradients, or of ``local`` steps, as is needed; else warn."""
    if state is None:
        rank_zero_warn(
            "lightning_sparse: The checkpoint holds no residuals (it was written by another strategy, or with "
            "residuals='none'): the gradient not yet sent starts from zero."
        )
    elif local and not state.local:
        rank_zero_warn(
            "lightning_sparse: The checkpoint was written without local_steps and is read with: what the ranks had "
            "not sent is of another kind, and is dropped."
        )
        return None
    elif state.local and not local:
        rank_zero_warn(
            "lightning_sparse: The checkpoint was written with local_steps and is read without: all ranks go on from "
            "the mean of their own weights and optimizer states."
        )
        return None
    return state


def _differences(state: State, size: int, slices: int, compressor: str) -> Iterator[str]:
    """Yield in words what is not as when ``state`` was saved, parameters apart."""
    if state.ranks not in (0, size):
        wrote, read = _parties(state.size, state.slices), _parties(size, slices)
        yield (
            f"{wrote} wrote it and {read if state.slices > 1 or slices > 1 else size} read it, so each starts from the "
            f"mean of what they had not sent, and {ANEW}"
        )
    elif state.ranks and state.slices != slices:
        had, has = counted(state.slices, "slice"), counted(slices, "slice")
        yield f"a member had {had} and has {has}, so {ANEW}"
    if state.compressor != compressor:
        yield written_with(state.compressor, compressor)
    elif state.checksum is None:  # nobody knows what would come of what compressors kept
        yield f"it has no checksum, so {ANEW}"


def written_with(before: str, now: str) -> str:
    """Say what goes on where the compressor is another one."""
    return f"it was written with {before} and is read with {now}: what was not sent goes on, and {ANEW}"


def _parties(number: int, ranks: int) -> str:
    """So many members of so many ``ranks`` in words."""
    return f"{number} ranks" if ranks == 1 else f"{number} member{'s' * (number > 1)} of {ranks} ranks"


def _carried(state: State, averager: Averager, compressor: str) -> Collection[str] | None:
    """The names of what goes on of that which was remembered of groups; None: all of it."""
    if state.checksum is None:
        return (UNSENT_GRADIENT,)
    if state.ranks != averager.size:
        return OF_ALL
    if state.compressor != compressor:
        return OF_WEIGHTS
    if state.slices != averager.cut.count:
        return {*OF_WEIGHTS, *(key for each in averager.compressors for key in each.per_element)}
    return None


def _groups(state: State, averager: Averager, compressor: str) -> list[Group]:
    """The groups that ``state`` was saved with, and one of all other parameters, with what this rank goes on with."""
    rows, carried = state.rows_of(averager.rank, averager.size), _carried(state, averager, compressor)
    grouped = {name for kept in state.groups for name in kept["names"]}
    rest = {"names": [name for name in state.unsent if name not in grouped], "memory": {}}
    groups = []
    for index, kept in enumerate([*state.groups, rest]):
        saved = [state.unsent[name] for name in kept["names"]]
        group = Group(index, tuple(kept["names"]), tuple(x[0] if rows else x for x in saved), averager.cut)
        group.step = kept.get("step", state.steps)
        for slot, x in zip(group.slots(group.unsent), saved, strict=True):
            slot.copy_(group.cut.own(mean_used(x, rows)).reshape(-1))
        memory = {key: mean_used(x, rows) for key, x in kept["memory"].items() if carried is None or key in carried}
        group.memory = {key: _beside(x, averager.device) for key, x in _own_memory(memory, group).items()}
        groups.append(group)
    return groups


def _beside(kept: Tensor, device: torch.device) -> Tensor:
    """A copy of what a compressor kept, beside the gradients if it has values in float32."""
    return kept.clone().to(device if kept.dtype == torch.float32 else None)
