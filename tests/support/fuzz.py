"""Random input: more tries on demand, and what more than one file draws."""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.wire import WIRE_DTYPES

TRIES = int(os.environ.get("FUZZ_TRIES", "0"))  # of each property, with each compressor; 0: a few
WIRES = st.sampled_from(list(WIRE_DTYPES))
SEEDS = st.integers(0, 2**31)
LARGE = 2**33  # elements: beyond what 32 bits count


def fuzzed(quick: int, **values: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Hypothesis with ``quick`` tries, or as many as were asked for: ``FUZZ_TRIES=1000 pytest -m fuzzed``."""
    slow = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    tries = settings(max_examples=TRIES or quick, deadline=None, suppress_health_check=slow)
    limit = pytest.mark.timeout(3600 if TRIES else 60)
    return lambda test: pytest.mark.fuzzed(limit(tries(given(**values)(test))))


# - settings

EDGES: list[Any] = [
    0, 1, -1, 2, 3, 2**31, 2**63, -(2**63), 2**64 + 1, 10**400, True, False, None, "", "0.5", "auto", "micro",
    0.0, -0.0, 1.0, 0.5, 1.5, -0.5, 1 - 2**-53, 1 + 2**-52, 5e-324, 1e-300, 1e-40, 1e38, 1e39, 1e308,
    math.nan, math.inf, -math.inf, (), (1,), ("*",), ("*", None), [], {}, b"x", object, torch.tensor(0.5),
]  # fmt: skip
VALUES = st.one_of(
    st.sampled_from(EDGES), st.floats(), st.floats(0, 1), st.integers(), st.integers(0, 9), st.text(max_size=4)
)


def assert_named(error: Exception, name: str, value: object) -> None:
    """The error tells which option has which value; of a list, perhaps what in it is wrong."""
    assert name.removesuffix("ies").removesuffix("s") in str(error), error
    assert repr(value) in str(error) or isinstance(value, Sequence), error


# - memory order


@st.composite
def laid_out(draw: st.DrawFn) -> Tensor:
    """A tensor of zeros that lies in memory in any order, and with gaps perhaps: transposed, say, or channels last."""
    shape = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    order = draw(st.permutations(range(len(shape))))
    steps = [draw(st.integers(1, 2)) for _ in shape]
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    memory = torch.zeros([shape[d] * steps[d] for d in order], dtype=dtype)
    x = memory.permute([order.index(d) for d in range(len(shape))])
    return x[tuple(slice(None, None, step) for step in steps)]
