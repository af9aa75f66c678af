"""Local steps on simulated ranks: the law with updates in the place of gradients, turns, and what may be set."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.compressors.wrappers import Rounded, Wrapper
from lightning_sparse.engine.groups import lay_out_fragments
from lightning_sparse.local_steps.replica import Replica
from lightning_sparse.local_steps.set_by_others import SetByOthers
from lightning_sparse.local_steps.untrained import Untrained, untrained_of
from lightning_sparse.local_steps.weights import Weights
from lightning_sparse.network.simulated import SimNetwork, same_bits
from lightning_sparse.options import Options
from lightning_sparse.wire import SIGN, WIRE_DTYPES
from tests.support.compressors import EVERY_COMPRESSOR


class Frozen(nn.Module):
    """Parameters that no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Parameter(torch.ones(7, dtype=torch.float32), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([0.0, -torch.inf], dtype=torch.float32), requires_grad=False)
        self.count = nn.Parameter(torch.tensor(2.0**24, dtype=torch.float64), requires_grad=False)


def frozen_of(module: nn.Module, settings: ls.LocalSteps, index: int, *names: str) -> Replica:
    found = untrained_of(module, set())
    names = names or ("teacher",)
    group = Group(index, names, tuple(found[name]() for name in names))
    return Replica(group, ls.Dense(), 0, settings, [found[name] for name in names])


def exchanged(replicas: Sequence[Replica], network: SimNetwork | None = None) -> Tensor:
    """Exchange a group that every rank has; returns what was unsent on all ranks before."""
    size = len(replicas)
    network = network or SimNetwork(size, SIGN)
    for replica in replicas:
        replica.snapshot(size)
    residual = sum((each.group.unsent.double() for each in replicas), torch.zeros(()))
    totals = network.run([each.reduce(c) for each, c in zip(replicas, network.comms, strict=True)])
    for replica, total in zip(replicas, totals, strict=True):
        replica.set_move(total, size)
        replica.apply_move()
    return residual


class Trained:
    """P simulated ranks whose weights change by themselves."""

    def __init__(self, compressor: ls.Compressor, settings: ls.LocalSteps, size: int, wire: str, dtype: Any) -> None:
        torch.manual_seed(0)
        initial = {f"layer{i}.weight": torch.randn(24, 10 + i, dtype=torch.float32) for i in range(5)}
        self.ranks = [{name: x.to(dtype, copy=True) for name, x in initial.items()} for _ in range(size)]
        self.frozen = [Frozen() for _ in range(size)]
        self.settings, self.size, self.network = settings, size, SimNetwork(size, WIRE_DTYPES[wire])
        self.replicas: list[list[Replica]] = []
        for parameters, module in zip(self.ranks, self.frozen, strict=True):
            groups, fragments = lay_out_fragments(parameters, compressor, "layer", settings.parts)
            pairs = zip(groups, fragments, strict=True)
            replicas = [Replica(group, c, fragment, settings) for (group, c), fragment in pairs]
            self.replicas.append([*replicas, frozen_of(module, settings, len(replicas))])

    def step(self, number: int) -> None:
        for rank in range(self.size):
            for x in [*self.ranks[rank].values(), self.frozen[rank].teacher.data]:
                x += torch.randn(x.shape).to(x.dtype) * 0.01
        for turn in zip(*self.replicas, strict=True):
            if self.settings.is_turn(turn[0].fragment, number):
                self.exchange(turn)

    def exchange(self, turn: tuple[Replica, ...]) -> None:
        before = turn[0].average.clone()
        residual = exchanged(turn, self.network)
        left = sum((each.group.unsent.double() for each in turn), torch.zeros(()))
        moved = (turn[0].average.double() - before.double()) * self.size
        assert (residual - left - moved).abs().max() < 1e-5
        for each in turn:
            assert same_bits(each.average, turn[0].average)
            own = torch.cat([p.flatten().double() for p in each.group.parameters])
            held = own if each._aside is None else own + each._aside
            assert (held - each.average - each.group.unsent).abs().max() < 1e-6


COMPRESSORS = [each.values[0] for each in EVERY_COMPRESSOR]
CASES = [
    *zip(COMPRESSORS, cycle([2, 3, 1, 4]), cycle(WIRE_DTYPES), strict=False),
    *((ls.Dense(), 3, wire) for wire in WIRE_DTYPES),
]


@pytest.mark.parametrize(("compressor", "size", "wire"), CASES)
def test_nothing_of_an_update_is_lost(compressor: ls.Compressor, size: int, wire: str) -> None:
    """With every compressor, in every format and on 1 to 4 ranks, though not with every combination of them."""
    trained = Trained(compressor, ls.LocalSteps(2), size, wire, torch.float32)
    for number in range(1, 7):
        trained.step(number)


@pytest.mark.parametrize("fusion", ["layer", "none", ["layer[01]*", "*"]])
@pytest.mark.parametrize("fragments", [1, 4])
def test_every_parameter_has_one_turn_in_h_steps(fusion: Any, fragments: int) -> None:
    parameters = {f"layer{i}.{name}": torch.zeros(3 + i, 5) for i in range(4) for name in ("a", "b")}
    groups, of_group = lay_out_fragments(parameters, ls.Dense(), fusion, fragments)
    assert sorted(name for group, _ in groups for name in group.names) == sorted(parameters)
    settings = ls.LocalSteps(9, fragments=fragments)
    turns = [[i for i, f in enumerate(of_group) if settings.is_turn(f, step)] for step in range(1, 19)]
    assert sorted(i for turn in turns[:9] for i in turn) == list(range(len(groups)))
    assert turns[:9] == turns[9:]
    if fragments == 1:
        assert not any(turns[:8])
    if fusion == "layer":
        sizes = [sum(groups[i][0].n for i, f in enumerate(of_group) if f == fragment) for fragment in range(fragments)]
        assert max(sizes) - min(sizes) <= max(p.numel() for p in parameters.values())


def test_what_is_not_finite_on_a_rank_stays_its_own() -> None:
    modules = [Frozen(), Frozen()]
    replicas = [frozen_of(module, ls.LocalSteps(2), 0, "mask", "teacher") for module in modules]
    modules[0].mask.copy_(torch.tensor([4.0, -torch.inf]))
    modules[1].teacher[0] = torch.nan
    exchanged(replicas, SimNetwork(2))
    assert [module.mask.tolist() for module in modules] == [[2.0, -torch.inf]] * 2
    assert modules[0].teacher.tolist() == [1.0] * 7
    assert modules[1].teacher.isnan().tolist() == [True] + [False] * 6
    assert same_bits(replicas[0].average, replicas[1].average)


def test_counters_in_float64_count_on_beyond_what_float32_holds() -> None:
    modules = [Frozen(), Frozen()]
    replicas = [frozen_of(module, ls.LocalSteps(2), 0, "count") for module in modules]
    for step in range(1, 4):
        for module in modules:
            module.count += 1
        exchanged(replicas, SimNetwork(2))
        assert [module.count.item() for module in modules] == [2**24 + step] * 2


def test_frozen_parameters_are_watched() -> None:
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), Frozen())
    module[1].weight.requires_grad_(False)
    found = untrained_of(module, {"2.mask"})
    assert sorted(found) == ["1.weight", "2.count", "2.teacher"]
    watched = Untrained(found)
    watched.begin()
    assert not watched.changed().any()
    module[1].weight.data.mul_(2)  # leaves no trace but its values
    module[2].teacher = nn.Parameter(module[2].teacher + 1, requires_grad=False)
    changed = dict(zip(watched.watched, watched.changed().tolist(), strict=True))
    assert [name for name, has in changed.items() if has] == ["1.weight", "2.teacher"]


def test_what_is_set_arrives_in_full_and_what_an_optimizer_does_at_its_own_length() -> None:
    """Of a group of which something was set before, so that each rank has a copy; however far ranks look ahead."""
    lead = 1.5
    trained = Trained(ls.Dense(), ls.LocalSteps(1, lead=lead), 2, "float32", torch.float32)
    replicas = [of_rank[0] for of_rank in trained.replicas]
    both = [SetByOthers(Weights(of_rank)) for of_rank in trained.replicas]
    for each in both:
        each._weights.hide()
        each.accept()
    torch.manual_seed(1)
    for turn in range(4):
        before = replicas[0].average.double()
        stepped = was_set = torch.zeros(replicas[0].group.n, dtype=torch.float64)
        for replica, each in zip(replicas, both, strict=True):
            optimizer = torch.optim.SGD(replica.group.parameters, lr=1.0)
            own = flat_of(replica)
            each.begin(optimizer)
            for p in replica.group.parameters if turn else ():
                p -= 0.1 * torch.randn(p.shape, dtype=torch.float32)
            each.accept(optimizer)
            each.end(optimizer)
            stepped, own = stepped + (flat_of(replica) - own) / 2, flat_of(replica)
            replica.group.parameters[turn % 2].clamp_(-0.5, 0.5)
            was_set = was_set + (flat_of(replica) - own) / 2
            each.look()
        exchanged(replicas, trained.network)
        for each in both:
            each.accept()
        moved = replicas[0].average.double() - before
        assert (moved - (stepped / lead + was_set)).abs().max() < 1e-6
        assert was_set.any()


def flat_of(replica: Replica) -> Tensor:
    return torch.cat([p.flatten().double() for p in replica.group.parameters])


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"compressor": ls.MomentumCorrection(0.9, ls.TopK())}, "cannot be combined with MomentumCorrection"),
        ({}, "cannot be combined with sparse_auto"),
    ],
)
def test_what_cannot_be_combined(options: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ls.SparseDDPStrategy(local_steps=2, **options)


@pytest.mark.parametrize("compressor", [ls.Dense(), ls.TopK(), ls.MiCRO(), ls.LowRank()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_nothing_is_lost_of_what_waits_aside_and_weights_are_the_average(compressor: ls.Compressor, dtype: Any) -> None:
    trained = Trained(compressor, ls.LocalSteps(1, error_decay=1.0), 2, "int4", dtype)
    for number in range(1, 5):
        trained.step(number)
    for replica in trained.replicas[0][:-1]:
        assert torch.equal(torch.cat([x.flatten() for x in replica.tensors()]), replica.average.to(dtype))


def test_sparse_loco_is_the_papers() -> None:
    """Of x̄ and of errors, from arXiv 2508.15706: error e <- 0.95 e + change, the top k of it is sent and taken out."""
    settings = ls.LocalSteps(1, error_decay=0.95, lead=1)
    trained = Trained(ls.TopK(density=0.1), settings, 2, "float32", torch.float32)
    replicas = [of_rank[0] for of_rank in trained.replicas]
    average, n = replicas[0].average.clone(), replicas[0].group.n
    errors = torch.zeros(2, n)
    for _ in range(5):
        total = torch.zeros(n)
        for rank, replica in enumerate(replicas):
            for p in replica.group.parameters:
                p += torch.randn(p.shape) * 0.01
            change = torch.cat([p.flatten() for p in replica.group.parameters]) - average
            errors[rank] = 0.95 * errors[rank] + change
            top = errors[rank].abs().topk(round(0.1 * n)).indices
            total[top] += errors[rank][top]
            errors[rank][top] = 0
        average += total / 2
        exchanged(replicas, trained.network)
        for rank, replica in enumerate(replicas):
            assert torch.allclose(replica.average, average, atol=1e-6)
            assert torch.allclose(replica.unsent(replica.tensors()), 0.95 * errors[rank], atol=1e-6)


def test_the_outer_step_is_nesterovs() -> None:
    """As torch.optim.SGD takes it, where the gradient is minus the mean of what the ranks did."""
    settings = ls.LocalSteps(1, outer_rate=0.7, outer_momentum=0.9)
    trained = Trained(ls.Dense(), settings, 2, "float32", torch.float32)
    weight = torch.nn.Parameter(trained.replicas[0][0].average.clone())
    outer = torch.optim.SGD([weight], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        mean: Tensor = torch.zeros(())
        for rank in range(2):
            replica = trained.replicas[rank][0]
            for p in replica.group.parameters:
                p += torch.randn(p.shape) * 0.01
            mean = mean + torch.cat([p.flatten() for p in replica.group.parameters]) / 2
        weight.grad = weight.detach() - mean
        outer.step()
        exchanged([replicas[0] for replicas in trained.replicas], trained.network)
        assert (trained.replicas[0][0].average - weight.detach()).abs().max() < 1e-6


@dataclass(frozen=True)
class Twice(ls.Dense):
    """Adds all twice, as a user's own compressor may do something of its own with what is to be sent."""

    def accumulate(self, group: Group, gradients: Sequence[Tensor | None], size: int, scale: float = 1.0) -> None:
        super().accumulate(group, gradients, size, 2 * scale)


@dataclass(frozen=True)
class Doubled(Wrapper):
    """The same around another."""

    compressor: ls.Compressor | str

    def accumulate(self, group: Group, gradients: Sequence[Tensor | None], size: int, scale: float = 1.0) -> None:
        self.wrapped.accumulate(group, gradients, size, 2 * scale)


@pytest.mark.parametrize("compressor", [Twice(), Rounded(Twice(), "bfloat16"), Doubled(ls.Dense())], ids=repr)
def test_what_is_to_be_sent_passes_through_the_compressor(compressor: ls.Compressor) -> None:
    weights = nn.Parameter(torch.zeros(4))
    replica = Replica(Group(0, ("w",), (weights,)), compressor, 0, ls.LocalSteps(1))
    with torch.no_grad():
        weights += 1
    replica.snapshot(1)
    assert replica.group.unsent.tolist() == [2.0] * 4


@pytest.mark.parametrize(
    ("options", "lead"),
    [
        ({"wire_dtype": "int4"}, 1.43),
        ({"wire_dtype": "sign"}, 1.25),
        ({"wire_dtype": "int4", "warmup_steps": 3}, 1.43),
        ({"wire_dtype": "sign", "exact": ["*bias"]}, 1.25),
        ({"compressor": "micro"}, 1.0),
        ({"local_steps": 5}, 1.0),
        ({"local_steps": ls.LocalSteps(2, outer_momentum=0.5)}, 1.0),
    ],
    ids=str,
)
def test_how_far_a_rank_looks_ahead_depends_on_what_is_sent(options: dict[str, Any], lead: float) -> None:
    given = Options.of(fusion="layer", **{"compressor": "sparse_dense", "local_steps": 2} | options)
    assert given.local is not None
    assert given.local.with_lead(given.averaging).lead == pytest.approx(lead, abs=0.005)
