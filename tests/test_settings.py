"""Settings are compared by their values: what a repr shortens or leaves out counts too."""

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.settings import as_text, same
from lightning_sparse.simulation import simulate
from tests.support.compressors import EVERY_COMPRESSOR


@dataclass(frozen=True)
class Own(ls.Compressor):
    """A user's own."""

    shown: float = 1.0
    hidden: Any = field(default=None, repr=False)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        total = yield comm.all_reduce(group.unsent.clone())
        group.unsent.zero_()
        return total


class Undecorated(Own):
    """Adds a setting of which no field tells."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        object.__setattr__(self, "scale", scale)


class Plain(ls.Compressor):
    def __init__(self, scale: float = 1.0) -> None:
        self.scale = scale

    reduce = Own.reduce


@dataclass
class Thawed(ls.Compressor):
    scale: float = 1.0

    reduce = Own.reduce


@dataclass(frozen=True)
class Attribute(ls.Compressor):
    scale: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "twice", 2 * self.scale)

    reduce = Own.reduce


class Kind(Enum):
    A = 1
    B = 2


class Anything:
    def __init__(self, value: object) -> None:
        self.value = value


def first(x: Tensor) -> Tensor:
    return x


def second(x: Tensor) -> Tensor:
    return x


def changed(x: Any, at: int) -> Any:
    x[at] = 7
    return x


DIFFERENT = [
    (1, 2),
    (True, 1),
    ("1", 1),
    (torch.zeros(5000), changed(torch.zeros(5000), 2500)),
    (np.zeros(5000), changed(np.zeros(5000), 2500)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)),
    (Own(hidden=1), Own(hidden=2)),
    (Kind.A, Kind.B),
    (first, second),
    ({"a": 1}, {"a": 2}),
    ((1, [2]), (1, [3])),
    ({1, 2}, frozenset({1, 2})),
    (torch.float32, torch.float16),
]


@pytest.mark.parametrize("place", range(len(DIFFERENT)))
def test_values_that_differ_have_different_texts(place: int) -> None:
    one, other = DIFFERENT[place]
    assert not same(Own(hidden=one), Own(hidden=other))
    assert as_text(Own(hidden=one)) == as_text(Own(hidden=one))
    assert " at 0x" not in as_text(one)


def test_values_that_are_equal_have_the_same_text() -> None:
    assert same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert same(np.float64(0.1), 0.1)
    assert same(torch.arange(6).view(2, 3).t(), torch.tensor([[0, 3], [1, 4], [2, 5]]))


@pytest.mark.parametrize("compressor", [*EVERY_COMPRESSOR, pytest.param(ls.Auto(), id="auto")])
def test_the_text_of_ours_is_their_repr_as_in_older_checkpoints(compressor: ls.Compressor) -> None:
    assert as_text(compressor) == repr(compressor)


GIVEN: list[Callable[[ls.Compressor], object]] = [
    lambda c: ls.SparseDDPStrategy(c),
    lambda c: ls.fabric.SparseDDPStrategy(c),  # type: ignore[attr-defined]
    lambda c: simulate(c, torch.ones(1, 2, 8)),
    lambda c: ls.Warmup(1, c),
    lambda c: ls.MomentumCorrection(0.9, c),
    lambda c: ls.Auto(candidates=(ls.Dense(), c)),
    lambda c: ls.Auto(start=c),
]


@pytest.mark.parametrize("give", GIVEN)
@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (Plain(), "Plain must be a frozen dataclass, so that ranks can compare its settings"),
        (Undecorated(2.0), r"write @dataclass\(frozen=True\) above class Undecorated, also if"),
        (Thawed(), "Thawed must be a frozen dataclass"),
        (Attribute(), "got the attributes twice beside the fields"),
        (Own(hidden=lambda x: x), r"Own\(hidden=...\) must be a value that ranks can compare.*<lambda>"),
        (Own(hidden=threading.Lock()), r"Own\(hidden=...\) must be a value .* got <unlocked _thread.lock"),
        (Own(hidden=Anything(1)), r"Own\(hidden=...\) must be a value .* what a Anything holds is not known"),
        (Own(hidden=nn.Linear(2, 2)), "what a Linear holds is not known"),
        (Own(hidden=functools.partial(first, 1)), "what a partial holds is not known"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_hidden_settings_are_refused_where_a_compressor_is_given(
    give: Callable[[ls.Compressor], object], compressor: ls.Compressor, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        give(compressor)


def test_what_can_be_compared_is_taken() -> None:
    for give in GIVEN:
        give(Own(hidden=(torch.ones(3), first, Kind.A)))


def test_a_policy_of_ones_own_must_have_settings_that_ranks_can_compare() -> None:
    class Own(ls.Auto):
        def __init__(self) -> None:
            super().__init__()
            object.__setattr__(self, "patience", 3)

    with pytest.raises(TypeError, match=r"write @dataclass\(frozen=True\) above class Own"):
        ls.SparseDDPStrategy(Own())
