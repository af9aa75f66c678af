"""What a compressor is: settings, and one method that averages gradients while sending less than all of them."""

from abc import ABC, abstractmethod
from collections.abc import Generator

import torch
from torch import Tensor

from lightning_sparse.comm import Comm, Rounds
from lightning_sparse.group import Group


class Compressor(ABC):
    """Averages one group of gradients over all ranks while sending less than all of it.

    Nothing is lost: each rank keeps what it has not sent, sends some of it, and takes out exactly what it sent.
    Each step, over all ranks, with P ranks:

        ``P * mean + sum(unsent after) == sum(unsent before + gradient)``

    Every rank ends a step with a bit-identical mean, and launches the same messages in the same order whatever its
    data.  A compressor is settings only: a frozen dataclass, the same on every rank, made before any process starts.
    Whatever changes from step to step lives in the group.
    """

    @abstractmethod
    def average(self, group: Group, comm: Comm) -> Rounds:
        """Return the mean gradient, [n] float32, the same on every rank.

        On entry ``group.unsent`` [n] is this rank's gradient plus all it has not sent before.  Take out of it, in
        place, exactly what this rank contributes to the mean.  Launch a message on ``comm`` and yield it to get its
        result: ``sums = yield comm.all_reduce(picked)``.  Several messages may be launched before the first is yielded.
        A compressor that updates fewer than all n elements says so in ``group.picked`` and ``group.target``.
        """

    def sends_whole(self, name: str, elements: int) -> bool:
        """Whether the parameter called ``name`` is always averaged densely, in a group with its like."""
        del name, elements
        return False


def take_step(compressor: Compressor, group: Group, comm: Comm) -> Rounds:
    """One step of one group, checked: the mean gradient, [n] float32."""
    group.picked = group.target = group.n
    if group.n == 0:
        mean = group.unsent.clone()
    else:
        rounds = compressor.average(group, comm)
        if not isinstance(rounds, Generator):
            raise TypeError(
                f"{type(compressor).__name__}.average returned {type(rounds).__name__}; it must be a generator: "
                "yield each message it launches (result = yield comm.all_reduce(x)) and return the mean."
            )
        mean = yield from rounds
        if not isinstance(mean, Tensor) or mean.shape != (group.n,) or mean.dtype != torch.float32:
            got = f"{mean.dtype} {list(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
            raise TypeError(f"{type(compressor).__name__}.average must return torch.float32 [{group.n}]; got {got}.")
    group.step += 1
    return mean
