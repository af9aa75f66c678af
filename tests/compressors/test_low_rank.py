"""LowRank: the law on matrices, convergence of a constant gradient, and what is summed densely."""

import itertools
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.network.costs import HOP_BYTES
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.wire import BLOCK, FLOAT16, FLOAT32, INT4, INT8, SIGN, WIRE_DTYPES, ValueFormat
from tests.support.simulated import SimulatedRanks, normal

SHAPES = {"conv": (16, 3, 3, 3), "bias": (16,), "linear": (20, 30), "scalar": (), "small": (2, 3), "none": (4, 0)}


class Ranks(SimulatedRanks):
    """One group of several parameters on each of P simulated ranks."""

    def __init__(
        self,
        compressor: ls.Compressor,
        size: int,
        form: ValueFormat = FLOAT32,
        shapes: Mapping[str, tuple[int, ...]] = SHAPES,
        hop_bytes: int = HOP_BYTES,
    ) -> None:
        network = SimNetwork(size, form, hop_bytes)
        super().__init__(compressor, size, *shapes.values(), names=list(shapes), network=network)

    def parts(self, flat: Tensor) -> dict[str, Tensor]:
        """The part of ``flat`` [n] that is of each parameter."""
        return dict(zip(self.groups[0].names, self.groups[0].slots(flat), strict=True))

    def law(self, gradients: Tensor) -> tuple[Tensor, float]:
        """A step's mean, and how much it lost, by the largest value of a rank."""
        held = (self.unsent + gradients).double()
        mean = self.mean(gradients)
        left = len(held) * mean.double() + self.unsent.double().sum(0)
        return mean, float((left - held.sum(0)).abs().max() / held.abs().max())


@pytest.mark.parametrize(
    ("form", "scale"),
    [*zip(WIRE_DTYPES.values(), itertools.cycle([1.0, 1e-20, 1e30]), strict=False), (FLOAT16, 1e-20), (FLOAT16, 1.0)],
    ids=str,
)
def test_a_constant_gradient_arrives_whatever_its_size(form: ValueFormat, scale: float) -> None:
    """Of float16, which holds few such numbers, only the law is tested where it does not."""
    ranks = Ranks(ls.LowRank(rank=2), 3, form, hop_bytes=0)
    gradients = scale * torch.tensor([1.0, 1.5, 2.0])[:, None].expand(-1, ranks.n)
    due = gradients.mean(0)
    arrived = torch.zeros_like(due)
    for _ in range(24):
        mean, lost = ranks.law(gradients)
        arrived += mean / 24
        assert lost <= 4e-6
        assert float((mean / scale).norm()) <= 2.5 * float((due / scale).norm())
    if form.name != "float16" or scale == 1:
        for name, missing in ranks.parts((due - arrived) / due).items():
            assert not missing.numel() or float(missing.norm()) <= 0.1 * missing.numel() ** 0.5, name


@pytest.mark.parametrize("form", [FLOAT32, INT4], ids=str)
def test_noise_does_not_pile_up(form: ValueFormat) -> None:
    """If each rank took out the mean, what only one has would pile up: to an RMS of 5.6 after these steps, not 2.3."""
    ranks = Ranks(ls.LowRank(rank=2), 2, form, {"linear": (20, 30), "bias": (20,)})
    gradients = normal(60, 2 * ranks.n).view(60, 2, -1)
    for gradient in gradients:
        assert ranks.mean(gradient).abs().max() < 2.5 * gradient.abs().max()
    assert float(ranks.unsent.square().mean().sqrt()) < 4.5  # RMS


@pytest.mark.parametrize(
    ("form", "hop_bytes", "size", "rows"),
    [(INT8, 0, 2, 57), (INT4, HOP_BYTES, 2, 1400), (SIGN, 0, 5, 1400), (INT4, 0, 7, 57), (INT8, HOP_BYTES, 3, 57)],
)
def test_no_block_holds_factors_and_vectors(form: ValueFormat, hop_bytes: int, size: int, rows: int) -> None:
    """A bias of equal elements is then exact, however much larger the matrix beside it."""
    ranks = Ranks(ls.LowRank(rank=2), size, form, {"linear": (rows, 40), "bias": (rows,)}, hop_bytes)
    gradients = 1e6 * normal(size, ranks.n)
    gradients[:, -rows:] = 1e-3
    mean = ranks.mean(gradients)
    assert torch.allclose(mean[-rows:], gradients[0, -rows:], rtol=1e-4)
    if size == 2:
        assert ranks.network.comms[0].sent_bytes == form.nbytes(3 * rows + BLOCK - 1) + form.nbytes(2 * 40)


@pytest.mark.parametrize("form", [FLOAT32, FLOAT16, SIGN], ids=str)
def test_a_parameter_that_was_unused_arrives_again(form: ValueFormat) -> None:
    """The right factors of a gradient of zeros are zeros, which would find nothing in a matrix ever after."""
    ranks = Ranks(ls.LowRank(rank=2), 2, form)
    gradients = torch.zeros(2, ranks.n)
    for _ in range(2):
        assert not ranks.mean(gradients).any()
    for gradient in gradients:
        ranks.parts(gradient)["linear"].view(20, 30)[10:, 10:] = 1
    arrived = torch.stack([ranks.mean(gradients) for _ in range(24)]).mean(0)
    assert float((arrived - gradients[0]).norm()) <= 0.1 * float(gradients[0].norm())


def test_a_matrix_of_low_rank_arrives_whole_in_two_steps() -> None:
    """One step of power iteration finds the column space of a matrix of rank 2 exactly."""
    ranks = Ranks(ls.LowRank(rank=2), 2)
    gradients = torch.zeros(2, ranks.n)
    for rank, gradient in enumerate(gradients):
        linear = torch.ones(20, 1) @ normal(1, 30, seed=7) + rank * normal(20, 1, seed=8) @ normal(1, 30, seed=9)
        ranks.parts(gradient)["linear"].copy_(linear.flatten())
    mean = ranks.mean(gradients)
    assert torch.allclose(mean, gradients.mean(0), atol=1e-4)


def test_vectors_and_small_matrices_are_summed_whole() -> None:
    ranks = Ranks(ls.LowRank(rank=2), 3)
    gradients = normal(3, ranks.n, seed=1)
    mean = ranks.mean(gradients)
    means, unsent = ranks.parts(gradients.mean(0)), ranks.parts(ranks.unsent[0])
    for name, arrived in ranks.parts(mean).items():
        meant = means[name]
        if name in ("conv", "linear"):
            assert float((arrived - meant).norm()) > 0.1 * float(meant.norm())
        else:
            assert torch.allclose(arrived, meant, atol=1e-6), name
            assert not unsent[name].any(), name


def test_two_factors_travel_in_place_of_a_matrix() -> None:
    ranks = Ranks(ls.LowRank(rank=2), 2)
    ranks.mean(normal(2, ranks.n))
    factors = 2 * (16 + 27) + 2 * (20 + 30)
    assert ranks.network.comms[0].sent_bytes == 4 * (factors + 16 + 1 + 6)
    assert ranks.network.comms[0].messages == 2


def test_right_factors_go_into_other_groups() -> None:
    ranks = Ranks(ls.LowRank(rank=2), 2)
    ranks.mean(normal(2, ranks.n))
    group = ranks.groups[0]
    carried = ls.LowRank(rank=2).carry([(group, group.n)])
    assert {name: factor.shape for name, factor in carried.items()} == {"conv": (27, 2), "linear": (30, 2)}
