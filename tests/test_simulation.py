"""The simulated network tells mistakes that would hang real processes, or go unnoticed."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.simulation import simulate

GIVEN = torch.ones(1, 2, 8)


@dataclass(frozen=True)
class DifferentMessages(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        if comm.rank == 0:
            return (yield comm.all_reduce(group.unsent.clone()))
        return (yield comm.all_gather(group.unsent.clone())).sum(0)


@dataclass(frozen=True)
class OneMessageMore(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        total = yield comm.all_reduce(group.unsent.clone())
        if comm.rank == 1:
            total = yield comm.all_reduce(total)
        return total


@dataclass(frozen=True)
class ReadsTooEarly(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        total = group.unsent.clone()
        pending = comm.all_reduce(total)
        early = total.clone()
        yield pending
        return early


@dataclass(frozen=True)
class ChangesWhatTravels(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        sent = group.unsent.clone()
        pending = comm.all_gather(sent)
        sent += 1
        return (yield pending).sum(0)


@dataclass(frozen=True)
class AnswerDependsOnTheRank(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return (yield comm.all_reduce(group.unsent.clone())) + comm.rank


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (DifferentMessages(), r"rank 0: all_reduce of float32 \[8\]; rank 1: all_gather of float32 \[8\]"),
        (OneMessageMore(), r"rank 0: nothing; rank 1: all_reduce of float32 \[8\]"),
        (ChangesWhatTravels(), "rank 0 changed the tensor it handed to all_gather"),
        (AnswerDependsOnTheRank(), "rank 1's is not rank 0's"),
    ],
)
def test_a_mistake_is_an_assertion_not_a_hang(compressor: ls.Compressor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        simulate(compressor, GIVEN)


def test_a_result_read_too_early_is_nan() -> None:
    assert simulate(ReadsTooEarly(), GIVEN).mean.isnan().all()


@dataclass(frozen=True)
class NotAGenerator(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return group.unsent  # type: ignore[return-value]


@dataclass(frozen=True)
class YieldsATensor(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        yield group.unsent  # type: ignore[misc]
        return group.unsent


@dataclass(frozen=True)
class WrongShape(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return (yield comm.all_reduce(group.unsent[:3].clone()))


@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (NotAGenerator(), "NotAGenerator.reduce returned Tensor; it must be a generator"),
        (YieldsATensor(), "yielded Tensor; yield what a method of comm"),
        (WrongShape(), r"WrongShape.reduce must return a Sparse or torch.float32 \[8\]; got torch.float32 \[3\]"),
    ],
)
def test_a_compressor_that_is_not_one_is_told_so(compressor: ls.Compressor, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        simulate(compressor, GIVEN)


def test_what_each_rank_gets_of_a_message() -> None:
    def rounds(comm: Comm, got: list[Any]) -> Rounds:
        own = torch.tensor([float(comm.rank)])
        got.append((yield comm.shift(own, by=2)).item())
        got.append((yield comm.all_gather(own)).flatten().tolist())
        got.append((yield comm.broadcast(own.clone(), source=1)).item())
        total = yield comm.all_reduce(own)
        got.append(total.item())
        return total

    network = SimNetwork(3)
    results: list[list[Any]] = [[], [], []]
    network.run([rounds(comm, got) for comm, got in zip(network.comms, results, strict=True)])
    assert results == [[(rank - 2) % 3, [0, 1, 2], 1, 3] for rank in range(3)]
