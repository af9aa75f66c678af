"""Settings are compared by their values: what a repr shortens or leaves out counts too."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.settings import as_text, same
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
    (torch.zeros(5000), changed(torch.zeros(5000), 2500)),
    (np.zeros(5000), changed(np.zeros(5000), 2500)),
    (torch.zeros(2, 3), torch.zeros(3, 2)),
    (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)),
    (Own(hidden=1), Own(hidden=2)),
    (first, second),
    ({"a": 1}, {"a": 2}),
]


@pytest.mark.parametrize("place", range(len(DIFFERENT)))
def test_values_that_differ_have_different_texts(place: int) -> None:
    one, other = DIFFERENT[place]
    assert not same(Own(hidden=one), Own(hidden=other))
    assert as_text(Own(hidden=one)) == as_text(Own(hidden=one))
    assert " at 0x" not in as_text(one)


@pytest.mark.parametrize("compressor", EVERY_COMPRESSOR)
def test_the_text_of_ours_is_their_repr_as_in_older_checkpoints(compressor: ls.Compressor) -> None:
    assert as_text(compressor) == repr(compressor)


def test_the_text_of_auto_names_its_candidates_and_its_repr_what_was_given() -> None:
    """As in older checkpoints, which a resume compares."""
    text = as_text(ls.Auto())
    assert text.startswith("Auto(candidates=(Candidate(compressor=Dense(), wire_dtype='float32', local_steps=0), ")
    assert text.endswith("start=Rounded(compressor=Dense(), wire_dtype='int4'), at_most=0.05)")
    assert repr(ls.Auto()) == "Auto()"
    assert repr(ls.Auto(at_most=0.02)) == "Auto(at_most=0.02)"


GIVEN: list[Callable[[ls.Compressor], object]] = [
    lambda c: ls.SparseDDPStrategy(c),
    lambda c: ls.fabric.SparseDDPStrategy(c),  # type: ignore[attr-defined]
    lambda c: ls.Warmup(1, c),
    lambda c: ls.Auto(candidates=(ls.Dense(), c)),
]


@pytest.mark.parametrize("give", GIVEN)
@pytest.mark.parametrize(
    ("compressor", "message"),
    [
        (Plain(), "Plain must be a frozen dataclass, so that ranks can compare its settings"),
        (Undecorated(2.0), r"write @dataclass\(frozen=True\) above class Undecorated, also if"),
        (Own(hidden=lambda x: x), r"Own\(hidden=...\) must be a value that ranks can compare.*<lambda>"),
        (Own(hidden=Anything(1)), r"Own\(hidden=...\) must be a value .* what a Anything holds is not known"),
    ],
    ids=lambda x: type(x).__name__,
)
def test_hidden_settings_are_refused_where_a_compressor_is_given(
    give: Callable[[ls.Compressor], object], compressor: ls.Compressor, message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        give(compressor)
