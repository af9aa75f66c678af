"""What a compressor is: settings, and one method that sums gradients over the ranks while sending less than all."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.simulated import SimNetwork, same_bits
from lightning_sparse.network.sums import sum_values
from lightning_sparse.selection.sparse import Sparse, dense
from lightning_sparse.selection.threshold import ThresholdController
from lightning_sparse.settings import as_text, check_known, unknown_setting
from lightning_sparse.wire import CAUSE, CorruptMessage, Selection

#: Options of the strategies, and a value of each: what is taken for a setting of a compressor, or for a name.
OPTIONS: dict[str, object] = {
    "fusion": "layer",
    "wire_dtype": "int4",
    "warmup_steps": 100,
    "residuals": "mean",
    "local_group": "node",
    "local_steps": 16,
    "elastic": True,
    "exact": ("*bias",),
}


class Compressor(ABC):
    """Sums one group of gradients over all ranks while sending less than all of it.

    Nothing is lost: each rank keeps what it has not sent, sends some of it, and takes out exactly what it sent.
    Each step, over all P ranks, with mean = total / P:

        ``P * mean + sum(unsent after) == sum(unsent before + gradient)``

    Every rank ends a step with a bit-identical total, and launches the same messages in the same order whatever its
    data.  A compressor is settings only: a frozen dataclass, the same on every rank, made before any process starts.
    Whatever changes from step to step lives in the group.  Ranks and checkpoints compare its fields by their values.
    """

    def __new__(cls, *_: object, **settings: object) -> "Compressor":
        """Refuse what is not a setting, by its name."""
        name = unknown_setting(cls, settings)
        if name in OPTIONS:
            given = ", ".join(f"{each}={value!r}" for each, value in settings.items() if each not in OPTIONS)
            raise TypeError(
                f"{name} must be given to the strategy, of which it is an option, not to {cls.__name__}; write "
                f"SparseDDPStrategy({cls.__name__}({given}), {name}={settings[name]!r})."
            )
        check_known(cls, settings)
        return super().__new__(cls)

    @abstractmethod
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Return the sum over all ranks of what each sends, [n] float32 or :class:`Sparse`, the same on every rank.

        On entry ``group.unsent`` [n] is this rank's gradient plus all it has not sent before.  Take out of it, in
        place, exactly what this rank contributes to the total.  Launch a message on ``comm`` and yield it to get its
        result: ``sums = yield comm.all_reduce(picked)``.  Several messages may be launched before the first is yielded.
        A compressor that updates fewer than all n elements says in ``group.target`` how many it meant to update, and
        returns a :class:`Sparse` or sets ``group.picked``.
        """

    def accumulate(self, group: Group, gradients: Sequence[Tensor | None], size: int, scale: float = 1.0) -> None:
        """Add a step's gradients to ``group.unsent``, before :meth:`reduce` sends a part of it.

        Args:
            group: to which they are added.
            gradients: of each parameter, of its shape; None where a parameter got none, whose part then stays as it is.
            size: the number of ranks, P.
            scale: what the gradients are to be multiplied by.
        """
        group.add(gradients, scale)

    @property
    def only_adds(self) -> bool:
        """Whether :meth:`accumulate` adds gradients to what is unsent, and does nothing else."""
        return type(self).accumulate is Compressor.accumulate

    @property
    def per_element(self) -> tuple[str, ...]:
        """The keys in a group's memory of tensors [n] float32 that go with their elements into other groups.

        Where the elements of a new group had none, theirs starts from zero.
        """
        return ()

    @property
    def unwrapped(self) -> "Compressor":
        """The compressor within all that goes around it, by which errors call it."""
        return self

    @property
    def default_wire_dtype(self) -> str:
        """The format of values on the wire where the user names none."""
        return "float32"

    def dense_variant(self) -> "Compressor":
        """What sums without compression in this one's place: for parameters sent whole, and for warm-up."""
        return Dense()

    def is_dense(self, name: str, elements: int) -> bool:
        """Whether the parameter called ``name`` is always averaged densely, in a group with its like."""
        return False

    def active(self, step: int) -> "Compressor":
        """The compressor at work in ``step``: where this changes, so does what a step costs."""
        return self

    def compresses(self, step: int) -> bool:
        """Whether ``step`` sums less than all as it was meant: not densely, and not in a phase of warm-up."""
        return True

    def carry(self, parts: Sequence[tuple[Group, int]]) -> dict[str, Tensor]:
        """Return what the memory of a new group starts from, the same on every rank where the memories are.

        Args:
            parts: each group that gives parameters to it, and how many elements.

        Raises:
            CorruptMessage: if a message of the last step arrived damaged at one of the groups.
        """
        for group, _ in parts:
            last_report(self, group)
        return {}


@dataclass(frozen=True)
class Dense(Compressor):
    """Every rank sends all of its gradient: plain data-parallel training, the baseline of every comparison.

    One all-reduce of n values.  With two ranks and float32 on the wire it equals plain DDP bit for bit.
    """

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum everything."""
        return sum_values(group.unsent, comm)

    def compresses(self, step: int) -> bool:
        """Never."""
        return False


@dataclass(frozen=True)
class Exact(Dense):
    """Everything is sent in float32, whatever the wire format: gradients that no optimizer takes, as under ``ddp``."""

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum everything."""
        total = group.unsent.clone()
        group.unsent.zero_()
        return (yield comm.all_reduce(total))


def check_settings(compressor: object) -> None:
    """Raise a TypeError unless all settings of ``compressor`` can be compared: between ranks, and with a checkpoint.

    They are the fields of a frozen dataclass, which its own class must be, and values that :func:`as_text` knows.
    """
    kind = type(compressor)
    parameters = vars(kind).get("__dataclass_params__")
    if parameters is None or not parameters.frozen:
        raise TypeError(
            f"{kind.__qualname__} must be a frozen dataclass, so that ranks can compare its settings; write "
            f"@dataclass(frozen=True) above class {kind.__name__}, also if a class it derives from has it, and every "
            "setting as a field."
        )
    names = [field.name for field in fields(compressor)]  # type: ignore[arg-type]  # it is a dataclass
    computed = {name for each in kind.__mro__ for name, x in vars(each).items() if isinstance(x, cached_property)}
    if hidden := sorted(vars(compressor).keys() - {*names, *computed}):
        raise TypeError(
            f"{kind.__qualname__} must have all its settings as fields of the dataclass, so that ranks can compare "
            f"them; got the attributes {', '.join(hidden)} beside the fields. Declare them as fields."
        )
    for name in names:
        value = getattr(compressor, name)
        try:
            as_text(value)
        except Exception as error:  # whatever its class raises where it is asked what it is
            raise TypeError(
                f"{kind.__qualname__}({name}=...) must be a value that ranks can compare, such as a number, a string, "
                f"a tensor, a dataclass or a function of a module; got {value!r}: {error}."
            ) from error


def take_step(compressor: Compressor, group: Group, comm: Comm) -> Rounds:
    """One step of one group, checked: the total over the ranks; the mean gradient is a P-th of it."""
    group.picked = group.target = group.n
    group.overflow = group.mask_bytes = 0
    total: object
    if group.n == 0:
        total = group.unsent.clone()
    else:
        rounds = compressor.reduce(group, comm)
        if not isinstance(rounds, Generator):
            raise TypeError(
                f"{type(compressor.unwrapped).__name__}.reduce returned {type(rounds).__name__}; it must be a "
                "generator: yield each message it launches (result = yield comm.all_reduce(x)) and return the total."
            )
        total = yield from rounds
        if isinstance(total, Sparse):
            group.picked = total.index.numel()
        elif not isinstance(total, Tensor) or total.shape != (group.n,) or total.dtype != torch.float32:
            got = f"{total.dtype} {list(total.shape)}" if isinstance(total, Tensor) else type(total).__name__
            raise TypeError(
                f"{type(compressor.unwrapped).__name__}.reduce must return a Sparse or torch.float32 [{group.n}]; got "
                f"{got}."
            )
    group.step += 1
    return total


# - what the messages of a step tell the next


def report(compressor: object, group: Group, *messages: Selection) -> None:
    """Send the headers of a step's messages, of several ranks in each, to the host, for :func:`last_report`.

    Raises:
        CorruptMessage: if a message of the step before arrived damaged, and nobody has asked since.
    """
    last_report(compressor, group)
    headers = [torch.stack([m.count, m.seen, m.near, m.load, m.intact], 1) for m in messages]
    group.send_to_host("report", torch.cat(headers) if len(headers) > 1 else headers[0])


def last_report(compressor: object, group: Group) -> list[list[int]] | None:
    """Return the headers of all messages of the last step, if any were reported; and forget them.

    Returns:
        For each message how many elements were selected, ``seen``, ``near``, ``load``, and 1, which says it was intact.

    Raises:
        CorruptMessage: if one was not.
    """
    reported = group.take_from_host("report")
    if reported is None:
        return None
    rows: list[list[int]] = reported.tolist()
    damaged = sum(not intact for *_, intact in rows)
    if damaged:
        raise CorruptMessage(
            f"{type(compressor).__name__}: the selected elements in {damaged} of {len(rows)} messages of the step "
            f"before arrived damaged: {CAUSE}"
        )
    return rows


def carry_thresholds(parts: Sequence[tuple[Group, int]], *keys: str) -> dict[str, Tensor]:
    """The thresholds kept under ``keys``, each the mean over the groups that have it; see :meth:`Compressor.carry`."""
    known = {key: [(group.memory[key], n) for group, n in parts if n and key in group.memory] for key in keys}
    return {key: ThresholdController.joined(states) for key, states in known.items() if states}


def take_steps(
    compressor: Compressor,
    groups: Sequence[Group],
    network: SimNetwork,
    around: Callable[[Rounds], Rounds] = lambda rounds: rounds,
) -> Tensor | Sparse:
    """Sum what the ranks send in one step of one group, [P], message by message; returns the total [n] of all ranks.

    Before it ``unsent`` of each rank's group holds what the rank has not sent; after it what it keeps.
    ``around`` wraps what a rank does, to time it.  Totals are compared where the network ``checks``.

    Raises:
        AssertionError: if the ranks launch different messages, or end with different totals.
    """
    totals = network.run([around(take_step(compressor, *each)) for each in zip(groups, network.comms, strict=True)])
    if network.checks:
        first, *rest = (dense(total, groups[0].n) for total in totals)
        for rank, other in enumerate(rest, start=1):
            assert same_bits(other, first), f"the totals differ: rank {rank}'s is not rank 0's, bit for bit"
    return totals[0]
