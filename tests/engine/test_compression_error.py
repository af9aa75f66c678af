"""CompressionError: what is delivered and how late, where it is known."""

import pytest
import torch

from lightning_sparse.engine.observers import CompressionError

RANKS, ELEMENTS = 3, 4000


def rotating(turns: int, steps: int = 120, skip: int = 40) -> CompressionError:
    """Of a strategy that sends every element in one step of ``turns``, whole."""
    generator = torch.Generator().manual_seed(0)
    found, left = CompressionError(skip), torch.zeros(RANKS, ELEMENTS)
    for step in range(steps):
        residual = left + torch.randn(RANKS, ELEMENTS, generator=generator)
        left = residual.clone()
        left[:, step % turns :: turns] = 0
        found.step(residual, left)
    return found


@pytest.mark.parametrize("turns", [1, 4])
def test_an_element_that_travels_in_turns_waits_half_of_them(turns: int) -> None:
    found = rotating(turns)
    assert found.staleness == pytest.approx((turns - 1) / 2, rel=0.03)  # so with one turn nothing waits
    assert found.delivered == pytest.approx(2 / (turns + 1), rel=0.03)  # turns of 1 + 2 + ... + turns gradients


def test_what_cancels_between_ranks_is_not_unsent() -> None:
    found, left = CompressionError(), torch.zeros(2, 10)
    for _ in range(10):
        gradient = torch.randn(10)
        apart = torch.randn(10)
        residual = left + gradient
        left = left + torch.stack([apart, -apart])
        found.step(residual, left)
    assert found.delivered == pytest.approx(1, abs=1e-9)
    assert found.staleness == pytest.approx(0, abs=1e-4)


def test_nothing_unsent_is_never_stale() -> None:
    found = CompressionError(1)
    assert (found.delivered, found.staleness) == (1.0, 0.0)
    for _ in range(3):
        found.step(torch.zeros(2, 5), torch.zeros(2, 5))
    assert (found.delivered, found.staleness) == (1.0, 0.0)
