"""MiCRO: who selects what, and how well the threshold holds the density."""

import math

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.simulation import simulate
from tests.support.simulated import SimulatedRanks, layered


def densities(run: SimulatedRanks, gradients: object) -> torch.Tensor:
    """Picked elements over k, of each step."""
    picked = []
    for gradient in gradients:  # type: ignore[attr-defined]
        picked.append(run.step(gradient).index.numel() / run.groups[0].target)
        states = [group.memory.get("held") for group in run.groups]
        assert all(s is None if states[0] is None else torch.equal(s, states[0]) for s in states), "thresholds differ"
    return torch.tensor(picked)


def assert_held(density: torch.Tensor, within: float, error: float) -> None:
    settled = density[50:]
    means = settled.unfold(0, 100, 1).mean(1)  # over any 100 steps
    errors = (settled - 1).abs().unfold(0, 100, 1).mean(1)
    assert 1 - within < means.min(), (means.min(), means.max())
    assert means.max() < 1 + within, (means.min(), means.max())
    assert errors.max() < error, errors.max()


@pytest.mark.parametrize(
    ("size", "std", "balance", "jumps"), [(2, 1e-6, False, {}), (4, 1.0, True, {100: 10.0, 180: 0.1})]
)
def test_density_is_held_through_jumps_of_scale(size: int, std: float, balance: bool, jumps: dict[int, float]) -> None:
    run = SimulatedRanks(ls.MiCRO(density=0.01, balance=balance), size, 60_000)
    assert_held(densities(run, layered(60_000, size, 260 if jumps else 160, std=std, jumps=jumps)), 0.05, 0.10)


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_owns_each_partition_once_in_p_steps(size: int) -> None:
    """Only the owner's own large elements are picked: give each rank an element of its own in every partition."""
    n = 40 * size
    gradients = torch.zeros(size, n)
    for rank in range(size):
        gradients[rank, rank::40] = 1.0
    run = SimulatedRanks(ls.MiCRO(density=size / n, balance=False), size, n)
    picked = [set(run.step(gradients * (step == 0)).index.tolist()) for step in range(size)]
    for step, indices in enumerate(picked):
        assert indices == {40 * p + (p - step) % size for p in range(size)}


def test_balance_gives_each_partition_as_many_picks() -> None:
    loads = {}
    for balance in (False, True):
        run = SimulatedRanks(ls.MiCRO(density=0.01, balance=balance, slack=1.25), 4, 100_000)
        for gradient in layered(100_000, 4, 150):
            total = run.step(gradient)
        edges = run.groups[0].memory["edges"]
        counts = torch.histogram(total.index.double(), edges.double()).hist
        loads[balance] = float(counts.max() / counts.mean())
        overflow = sum(group.overflow for group in run.groups) / run.groups[0].target
    assert loads[True] < 1.15, loads
    assert overflow < 0.1
    assert loads[False] > 1.2, loads


def test_what_does_not_fit_stays_and_is_counted() -> None:
    run = SimulatedRanks(ls.MiCRO(density=0.01, balance=False), 2, 10_000)
    run.step(torch.randn(2, 10_000))
    run.step(1000 * torch.ones(2, 10_000))
    for group in run.groups:
        assert group.overflow == 5000 - math.ceil(1.1 * 100)
    assert run.groups[0].picked == 2 * math.ceil(1.1 * 100)


def test_bytes_are_those_of_indices_and_values() -> None:
    """P = 4, 1 %: an all-gather of k/P indices with room for a tenth more, and a sum of as many values."""
    n = 1_000_000
    sent = simulate(ls.MiCRO(density=0.01, indices="int32"), torch.randn(2, 4, n)).sent_bytes[1]
    room = math.ceil(1.1 * 10_000 / 4)
    message = 16 + 4 * room
    assert (sent - (3 * message + 2 * 3 * 4 * room)).abs().max() <= 3 * 8
