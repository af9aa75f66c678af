"""Importance-weighted pruning: whose mask, which elements, and momentum correction around it."""

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.selection.sparse import dense
from lightning_sparse.simulation import simulate
from tests.support.simulated import SimulatedRanks


def test_what_is_large_for_its_weight_goes() -> None:
    weight, gradient = torch.full((100,), 10.0), torch.ones(2, 100)
    weight[7], weight[50] = 0.1, -0.2
    gradient[:, 60] = 90.0  # 9 times its weight: less than the others
    run = SimulatedRanks(ls.ImportancePruning(density=0.02), 2, weight)
    assert run.step(gradient).index.tolist() == [7, 60] or run.step(gradient).index.tolist()
    first = SimulatedRanks(ls.ImportancePruning(density=0.03), 2, weight).step(gradient)
    assert first.index.tolist() == [7, 50, 60]
    assert first.values.tolist() == [2.0, 2.0, 180.0]


@pytest.mark.parametrize("factor", [1e-3])
def test_scaling_a_layer_changes_nothing(factor: float) -> None:
    """Weights and gradients of a layer by the same factor: the same masks, up to the guard against weights of zero."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(500, generator=generator) for _ in range(2)]
    gradient = torch.randn(3, 1000, generator=generator)
    scaled = gradient.clone()
    scaled[:, 500:] *= factor
    compressor = ls.ImportancePruning(density=0.05, eps=1e-12)
    plain = SimulatedRanks(compressor, 3, *weights).step(gradient)
    other = SimulatedRanks(compressor, 3, weights[0], factor * weights[1]).step(scaled)
    assert plain.index.tolist() == other.index.tolist()


@pytest.mark.parametrize("givers", [1, 2])
def test_the_mask_is_as_dense_whatever_the_number_of_ranks(givers: int) -> None:
    n, density = 50_000, 0.01
    picked = {}
    for size in (2, 4, 8):
        gradients = torch.randn(3, size, n, generator=torch.Generator().manual_seed(1))
        weights = torch.randn(n, generator=torch.Generator().manual_seed(2))
        picked[size] = simulate(ls.ImportancePruning(density=density, givers=givers), gradients, weights).picked
    assert picked[2].float().mean() > 0.7 * density * n  # givers agree on some elements: weights are near zero there
    for size, counts in picked.items():
        assert (counts / picked[2].float().mean() - 1).abs().max() < 0.1, (size, counts)


def test_the_fixed_and_the_adaptive_rule() -> None:
    generator = torch.Generator().manual_seed(0)
    gradients, weights = torch.randn(1, 2, 10_000, generator=generator), torch.ones(10_000)
    fixed = simulate(ls.ImportancePruning(density=0.5, rule="fixed", threshold=2.0), gradients, weights).picked
    assert fixed == pytest.approx(455, rel=0.1)  # of a normal distribution beyond 2 deviations
    adaptive = simulate(ls.ImportancePruning(density=0.5, rule="adaptive", threshold=2.0), gradients, weights).picked
    assert adaptive == pytest.approx(455, rel=0.2)  # |x|: mean 0.80, deviation 0.60, so beyond 2.0 deviations of x


def test_mask_bytes_are_counted_apart() -> None:
    n, size = 100_000, 4
    run = SimulatedRanks(ls.ImportancePruning(density=0.01), size, n)
    run.step(torch.randn(size, n))
    room = 1250
    mask = run.groups[0].mask_bytes
    assert mask == run.groups[1].mask_bytes
    assert mask < 0.75 * 1.3 * room + 100  # (P-1)/P of less than 10.4 bits an index
    assert run.network.comms[0].sent_bytes - mask == 3 * 4 * room  # so few go to everybody


def test_biases_and_norms_are_sent_whole() -> None:
    parameters = {name: torch.zeros(50) for name in ("0.weight", "0.bias", "norm1.weight", "bn.weight", "head.weight")}
    layout = lay_out(parameters, ls.ImportancePruning(), "layer")
    sent = {name: type(compressor).__name__ for group, compressor in layout for name in group.names}
    assert {name for name, kind in sent.items() if kind == "Dense"} == {"0.bias", "norm1.weight", "bn.weight"}


# - momentum correction


def sgd_with_momentum(gradients: torch.Tensor, momentum: float) -> torch.Tensor:
    """What torch's SGD subtracts from a weight, over all steps, at a learning rate of 1."""
    weight = torch.nn.Parameter(torch.zeros(gradients.shape[-1]))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    for gradient in gradients.mean(1):
        weight.grad = gradient.clone()
        optimizer.step()
    return -weight.detach()


@pytest.mark.parametrize("size", [1, 3])
def test_dense_sums_of_velocities_are_sgd_with_momentum(size: int) -> None:
    given = torch.randn(12, size, 40)
    result = simulate(ls.MomentumCorrection(0.9, ls.Dense()), given)
    assert torch.allclose(result.mean.sum(0), sgd_with_momentum(given, 0.9), atol=1e-4)


def test_what_waits_gathers_momentum_and_what_was_sent_does_not_go_on() -> None:
    given = torch.zeros(4, 1, 2)
    given[0] = torch.tensor([[1.0, 0.1]])
    result = simulate(ls.MomentumCorrection(0.5, ls.TopK(density=0.5)), given)
    assert result.mean[0].tolist() == [1.0, 0.0]
    assert result.mean[:, 0].sum() == 1.0  # its velocity was set to zero when it was sent
    assert result.mean[1].tolist() == pytest.approx([0.0, 0.1 + 0.05])


def test_velocities_obey_the_law() -> None:
    """Over all steps, every velocity ever added is in a mean or unsent."""
    run = SimulatedRanks(ls.MomentumCorrection(0.9, ls.MiCRO(density=0.05)), 3, 500)
    arrived, added = torch.zeros(500), torch.zeros(500)
    for gradients in torch.randn(20, 3, 500):
        for group, gradient in zip(run.groups, gradients, strict=True):
            before = group.unsent.clone()
            run.compressor.accumulate(group, [gradient], 3)
            added += group.unsent - before
        arrived += dense(take_steps(run.compressor, run.groups, run.network), 500)
    assert torch.allclose(arrived + run.unsent.sum(0), added, atol=1e-3)


def test_gradients_are_clipped_before_they_are_added() -> None:
    result = simulate(ls.MomentumCorrection(0.0, ls.Dense(), clip_norm=2.0), torch.full((3, 4, 100), 5.0))
    assert result.mean.norm(dim=1).tolist() == pytest.approx([1.0, 1.0, 1.0])  # 2 / sqrt(4) on each rank
