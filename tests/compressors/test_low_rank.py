"""LowRank: the law on matrices, convergence of a constant gradient, and what is summed densely."""

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.wire import FLOAT32, WIRE_DTYPES, ValueFormat

SHAPES = {"conv": (16, 3, 3, 3), "bias": (16,), "linear": (20, 30), "scalar": (), "small": (2, 3), "none": (4, 0)}
every_format = pytest.mark.parametrize("form", list(WIRE_DTYPES.values()), ids=list(WIRE_DTYPES))


class Ranks:
    """One group of several parameters on each of P simulated ranks."""

    def __init__(self, compressor: ls.Compressor, size: int, form: ValueFormat = FLOAT32) -> None:
        self.compressor, self.network = compressor, SimNetwork(size, form)
        parameters = tuple(torch.zeros(shape) for shape in SHAPES.values())
        self.groups = [Group(0, tuple(SHAPES), parameters) for _ in range(size)]

    def step(self, gradients: torch.Tensor) -> torch.Tensor:
        """Average ``gradients`` [P, n]; returns the mean [n]."""
        for group, gradient in zip(self.groups, gradients, strict=True):
            group.unsent += gradient
        steps = [take_step(self.compressor, g, c) for g, c in zip(self.groups, self.network.comms, strict=True)]
        totals = [torch.as_tensor(total).clone() for total in self.network.run(steps)]
        assert all(torch.equal(total, totals[0]) for total in totals)
        return totals[0] / len(self.groups)

    def unsent(self) -> torch.Tensor:
        return torch.stack([group.unsent for group in self.groups])


def draw(size: int, n: int, seed: int) -> torch.Tensor:
    return torch.randn(size, n, generator=torch.Generator().manual_seed(seed))


@every_format
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_nothing_is_lost(form: ValueFormat, size: int) -> None:
    ranks = Ranks(ls.LowRank(rank=2), size, form)
    n = ranks.groups[0].n
    for step in range(6):
        gradients = draw(size, n, step)
        owed = (ranks.unsent() + gradients).double().sum(0)
        mean = ranks.step(gradients)
        error = size * mean.double() + ranks.unsent().double().sum(0) - owed
        assert error.abs().max() <= 1e-5 * owed.abs().max()


def test_a_matrix_of_low_rank_arrives_whole_in_two_steps() -> None:
    """One step of power iteration finds the column space of a matrix of rank 2 exactly."""
    ranks = Ranks(ls.LowRank(rank=2), 2)
    gradients = torch.zeros(2, ranks.groups[0].n)
    for rank, gradient in enumerate(gradients):
        slots = dict(zip(SHAPES, ranks.groups[0].slots(gradient), strict=True))
        slots["linear"].view(20, 30).copy_(torch.ones(20, 1) @ draw(1, 30, 7) + rank * draw(20, 1, 8) @ draw(1, 30, 9))
    mean = ranks.step(gradients)
    assert torch.allclose(mean, gradients.mean(0), atol=1e-4)


def test_vectors_and_small_matrices_are_summed_whole() -> None:
    ranks = Ranks(ls.LowRank(rank=2), 3)
    gradients = draw(3, ranks.groups[0].n, 1)
    mean = ranks.step(gradients)
    parts = zip(SHAPES, *(ranks.groups[0].slots(x) for x in (mean, gradients.mean(0), ranks.unsent()[0])), strict=True)
    for name, arrived, meant, unsent in parts:
        if name in ("conv", "linear"):
            assert float((arrived - meant).norm()) > 0.1 * float(meant.norm())
        else:
            assert torch.allclose(arrived, meant, atol=1e-6), name
            assert not unsent.any(), name


def test_two_factors_travel_in_place_of_a_matrix() -> None:
    ranks = Ranks(ls.LowRank(rank=2), 2)
    ranks.step(draw(2, ranks.groups[0].n, 0))
    factors = 2 * (16 + 27) + 2 * (20 + 30)
    assert ranks.network.comms[0].sent_bytes == 4 * (factors + 16 + 1 + 6)
    assert ranks.network.comms[0].messages == 2


def test_right_factors_go_into_other_groups() -> None:
    ranks = Ranks(ls.LowRank(rank=2), 2)
    ranks.step(draw(2, ranks.groups[0].n, 0))
    group = ranks.groups[0]
    carried = ls.LowRank(rank=2).carry([(group, group.n)])
    assert {name: factor.shape for name, factor in carried.items()} == {"conv": (27, 2), "linear": (30, 2)}


@pytest.mark.parametrize("rank", [0, -1, 1.5, True, "4"])
def test_a_rank_must_be_a_positive_integer(rank: object) -> None:
    with pytest.raises(ValueError, match=r"LowRank: rank must be an integer, at least 1; got"):
        ls.LowRank(rank=rank)  # type: ignore[arg-type]
