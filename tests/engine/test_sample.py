"""How long gradients wait, by a sample of each parameter's elements."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.groups import carry_over
from lightning_sparse.engine.observers import STARVING, CompressionError, Sample, Waiting
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.monitor.record import Notes, Sums
from lightning_sparse.monitor.tables import starvation
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.simulated import SimNetwork
from tests.support.buckets import Bucket

SIZES = {"norm.weight": 20, "embedding.weight": 60}


def groups_of(*layout: tuple[str, ...], parameters: dict[str, Tensor] | None = None) -> list[Group]:
    known = parameters or {name: torch.zeros(n) for name, n in SIZES.items()}
    return [Group(i, names, tuple(known[name] for name in names)) for i, names in enumerate(layout)]


def gradients(steps: int, ranks: int = 2, scale: float = 1.0) -> Tensor:
    """[T, P, n]; those of the embedding are ``scale`` times as large."""
    drawn = torch.randn(steps, ranks, sum(SIZES.values()), generator=torch.Generator().manual_seed(0))
    drawn[..., SIZES["norm.weight"] :] *= scale
    return drawn


class Ranks:
    """Ranks that take steps, each with a sample; ``waited`` [P, n] is what it must find, counted element by element."""

    def __init__(self, compressor: ls.Compressor, layout: tuple[tuple[str, ...], ...], size: int = 2) -> None:
        self.compressor = compressor
        self.networks = [SimNetwork(size) for _ in layout]
        self.groups = [groups_of(*layout) for _ in range(size)]
        self.samples = [Sample(groups) for groups in self.groups]
        self.waited = torch.zeros(size, sum(SIZES.values()))

    def step(self, given: Tensor) -> None:
        """``given`` [P, n], in the order of SIZES."""
        for rank, groups in enumerate(self.groups):
            for group, own in zip(groups, given[rank].split([group.n for group in groups]), strict=True):
                group.unsent += own
                self.samples[rank].before(group)
        before = self.unsent()
        for of_ranks, network in zip(zip(*self.groups, strict=True), self.networks, strict=True):
            take_steps(self.compressor, of_ranks, network)
        for sample in self.samples:
            sample.end_step()
        after = self.unsent()
        self.waited = torch.where((before == after) & (after != 0), self.waited + 1, 0)

    def unsent(self) -> Tensor:
        return torch.stack([torch.cat([group.unsent for group in groups]) for groups in self.groups])


@pytest.mark.parametrize("compressor", [ls.TopK(0.05), ls.OkTopk(0.05), ls.SkipReduce(0.5)], ids=repr)
def test_of_parameters_sampled_whole_the_oldest_is_exact(compressor: ls.Compressor) -> None:
    ranks = Ranks(compressor, tuple((name,) for name in SIZES))
    drawn = gradients(20, scale=0.3)
    for given in drawn:
        ranks.step(given)
        for rank, sample in enumerate(ranks.samples):
            parts = ranks.waited[rank].split(list(SIZES.values()))
            assert [each.oldest for each in sample.waiting()] == [int(part.max()) for part in parts]
    weights = 0.99 ** torch.arange(19, -1, -1.0)
    squares = (drawn[:, 0] ** 2 * weights[:, None] / weights.sum()).sum(0).split(list(SIZES.values()))
    unsent = ranks.unsent()[0].split(list(SIZES.values()))
    for each, square, kept in zip(ranks.samples[0].waiting(), squares, unsent, strict=True):
        assert each.unsent_over_gradient == pytest.approx(float(kept.norm() / square.sum().sqrt()), rel=1e-3)


@pytest.mark.parametrize("compressor", [ls.MiCRO(0.3), ls.SkipReduce(0.5)], ids=repr)
def test_of_parameters_sampled_whole_what_is_delivered_and_its_age_are_exact(compressor: ls.Compressor) -> None:
    ranks, own, left = Ranks(compressor, (tuple(SIZES),)), CompressionError(), torch.zeros(2, 80)
    ages = []
    for given in gradients(200, scale=0.3):
        residual = left + given
        ranks.step(given)
        left = ranks.unsent()
        every = CompressionError()
        every.step(residual, left)
        own.step(residual[:1], left[:1])
        sums = sum(sample.unsent_and_left(lambda group, places: group.unsent[places]) for sample in ranks.samples)
        of_unsent, of_left = sums.square().sum(1).tolist()  # type: ignore[union-attr]
        assert 1 - of_left / of_unsent == pytest.approx(every.delivered, abs=1e-5)
        waits, arrives = ranks.samples[0].waits_and_arrives()
        ages.append(waits / arrives)
    assert sum(ages[100:]) / 100 == pytest.approx(own.staleness, rel=0.2, abs=1e-6)  # the mean over all steps


def test_a_gradient_that_is_not_finite_is_not_counted() -> None:
    ranks = Ranks(ls.TopK(0.3), (tuple(SIZES),))
    for number, given in enumerate(gradients(30)):
        given[0, :40] *= torch.nan if number == 5 else 1.0
        ranks.step(given)
    waits, arrives = ranks.samples[0].waits_and_arrives()
    assert 0 < waits < 20 * arrives
    assert all(each.unsent_over_gradient < 20 for each in ranks.samples[0].waiting())


def test_a_layer_of_small_gradients_starves_beside_others_and_not_by_itself() -> None:
    together = Ranks(ls.TopK(0.1), (tuple(SIZES),), size=1)
    apart = Ranks(ls.TopK(0.1), tuple((name,) for name in SIZES), size=1)
    for given in gradients(60, ranks=1, scale=1e-3):
        together.step(given)
        apart.step(given)
    norm, embedding = together.samples[0].waiting()
    assert (embedding.oldest, embedding.starving, norm.starving) == (60, 1.0, 0.0)
    assert embedding.turn == pytest.approx(10, rel=0.1)  # density 0.1
    notes = Notes(selects=True, waiting=[norm, embedding])
    helps = "give layers a share of their own (fusion='none', or a list of groups): 100% of "
    which = (
        f"embedding.weight waited for more than {STARVING * embedding.turn:.0f} steps, though an element is sent every "
        f"{embedding.turn:.0f} steps on average."
    )
    assert starvation(notes) == f"Raise the density, or {helps}{which}"
    bound = Sums(steps=1, sent_bytes=1, dense_bytes=9, ms_step=10, ms_wait=5)  # to send more would take longer
    assert starvation(replace(notes, sums=bound)) == f"G{helps[1:]}{which}"
    assert starvation(replace(notes, selects=False)) == ""
    assert starvation(replace(notes, waiting=apart.samples[0].waiting())) == ""


# - beside an exchange


@dataclass(frozen=True)
class EveryFifth(ls.Compressor):
    """Sends every fifth element of each parameter, the next one in the next step, whatever the groups are."""

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        chosen = torch.cat([(torch.arange(n) + group.step) % 5 == 0 for n in group.sizes])
        total = yield comm.all_reduce(torch.where(chosen, group.unsent, 0))
        group.unsent[chosen] = 0
        return total


def watched(layout: Sequence[tuple[str, ...]], parameters: dict[str, Tensor], **options: Any) -> GradientAverager:
    """The only rank."""
    pairs = [(group, EveryFifth()) for group in groups_of(*layout, parameters=parameters)]
    averager = GradientAverager(pairs, [SimNetwork(1).comms[0]], threaded=False, **options)
    averager.sample = Sample(averager.groups)
    return averager


def oldest(averager: GradientAverager) -> dict[str, Waiting]:
    return {each.name: each for each in averager.sample.waiting()}


def test_other_groups_of_the_same_parameters_go_on_waiting() -> None:
    parameters = {name: torch.zeros(n) for name, n in {"a": 3, "b": 1000, "c": 0, "d": 200}.items()}
    exchanges = [watched([tuple(parameters)], parameters) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for step in range(12):
        if step in (3, 8):
            layout = [("b",), ("d", "c", "a")] if step == 3 else [("a", "d"), ("c", "b")]
            new = [(group, EveryFifth()) for group in groups_of(*layout, parameters=parameters)]
            carry_over(exchanges[0].groups, new)
            exchanges[0].lay_out(new)
        gradient = torch.randn(1203, generator=generator)
        for averager in exchanges:
            averager.hook(None, Bucket(list(parameters.values()), buffer=gradient.clone()))  # type: ignore[arg-type]
        assert oldest(exchanges[0]) == oldest(exchanges[1])
    assert {name: each.oldest for name, each in oldest(exchanges[0]).items()} == {"a": 3, "b": 4, "d": 4}
    assert oldest(exchanges[0])["b"].turn == pytest.approx(5, rel=0.3)  # the sample is not of all
