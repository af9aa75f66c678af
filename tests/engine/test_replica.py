"""Local steps on simulated ranks: the law with updates in the place of gradients, turns, and what may be set."""

from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.engine.replica import Replica
from lightning_sparse.fusion.groups import lay_out_fragments
from lightning_sparse.network.simulated import SimNetwork, same_bits
from lightning_sparse.wire import wire_format
from tests.conftest import EVERY_COMPRESSOR

FORMATS = ("float32", "bfloat16", "float16", "int8", "int4", "sign")


class Trained:
    """P simulated ranks whose weights change by themselves."""

    def __init__(self, compressor: ls.Compressor, settings: ls.LocalSteps, size: int, wire: str, dtype: Any) -> None:
        torch.manual_seed(0)
        initial = {f"layer{i}.weight": torch.randn(24, 10 + i, dtype=torch.float32) for i in range(5)}
        self.ranks = [{name: x.to(dtype, copy=True) for name, x in initial.items()} for _ in range(size)]
        self.statistics = [{"layer0.running_mean": torch.ones(7)} for _ in range(size)]
        self.settings, self.size, self.network = settings, size, SimNetwork(size, wire_format(wire))
        self.replicas: list[list[Replica]] = []
        for parameters, buffers in zip(self.ranks, self.statistics, strict=True):
            groups, fragments = lay_out_fragments(parameters, buffers, compressor, "layer", settings.parts)
            pairs = zip(groups, fragments, strict=True)
            self.replicas.append([Replica(group, c, fragment, settings) for (group, c), fragment in pairs])

    def step(self, number: int) -> None:
        for rank in range(self.size):
            for x in [*self.ranks[rank].values(), *self.statistics[rank].values()]:
                x += torch.randn(x.shape).to(x.dtype) * 0.01
        for turn in zip(*self.replicas, strict=True):
            if self.settings.is_turn(turn[0].fragment, number):
                self.exchange(turn)

    def exchange(self, turn: tuple[Replica, ...]) -> None:
        before = turn[0].average.clone()
        for each in turn:
            each.take_up(self.size)
        owed = sum((each.group.unsent.double() for each in turn), torch.zeros(()))
        totals = self.network.run([each.exchange(c) for each, c in zip(turn, self.network.comms, strict=True)])
        for each, total in zip(turn, totals, strict=True):
            each.move(total, self.size)
            each.apply()
        left = sum((each.group.unsent.double() for each in turn), torch.zeros(()))
        moved = (turn[0].average.double() - before.double()) * self.size
        assert (owed - left - moved).abs().max() < 1e-5
        for each in turn:
            assert same_bits(each.average, turn[0].average)
            own = torch.cat([p.flatten().double() for p in each.group.parameters])
            held = own if each._rounding is None else own + each._rounding
            assert (held - each.average - each.group.unsent).abs().max() < 1e-6


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("compressor", EVERY_COMPRESSOR)
def test_nothing_of_an_update_is_lost(compressor: ls.Compressor, wire: str) -> None:
    if compressor.candidates:
        pytest.skip("which chooses by time")
    for size in (1, 3, 4) if wire == "int4" else (2,):
        trained = Trained(compressor, ls.LocalSteps(2), size, wire, torch.float32)
        for number in range(1, 7):
            trained.step(number)


def test_weights_in_half_precision_lose_nothing_either() -> None:
    trained = Trained(ls.TopK(density=0.1), ls.LocalSteps(2), 2, "float32", torch.bfloat16)
    for number in range(1, 9):
        trained.step(number)


@pytest.mark.parametrize("fusion", ["layer", "none", ["layer[01]*", "*"]])
@pytest.mark.parametrize("fragments", [1, 2, 4, 9])
def test_every_parameter_has_one_turn_in_h_steps(fusion: Any, fragments: int) -> None:
    parameters = {f"layer{i}.{name}": torch.zeros(3 + i, 5) for i in range(4) for name in ("a", "b")}
    groups, of_group = lay_out_fragments(parameters, {}, ls.Dense(), fusion, fragments)
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


def test_statistics_travel_with_their_module_and_are_not_rounded() -> None:
    parameters = {"a.weight": torch.zeros(9), "b.weight": torch.zeros(8)}
    buffers = {"b.running_var": torch.full((3,), 1e-3), "a.mask": torch.tensor([0.0, -torch.inf])}
    groups, fragments = lay_out_fragments(parameters, buffers, ls.TopK(density=0.1), "layer", 2)
    found = {
        name: (fragment, c) for (group, c), fragment in zip(groups, fragments, strict=True) for name in group.names
    }
    assert found["b.running_var"][0] == found["b.weight"][0]
    assert found["a.mask"][0] == found["a.weight"][0]
    network = SimNetwork(2, wire_format("sign"))
    replicas = [Replica(group, c, 0, ls.LocalSteps(2)) for group, c in groups if "a.mask" in group.names for _ in "12"]
    for replica in replicas:
        replica.take_up(2)
    totals = network.run([each.exchange(c) for each, c in zip(replicas, network.comms, strict=True)])
    assert torch.equal(torch.as_tensor(totals[0]), torch.zeros(2))  # -inf less -inf is not a number


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (-1, "local_steps must be an integer of at least 0; got -1"),
        (1.5, "local_steps must be an integer of at least 0; got 1.5"),
        ({"steps": 4, "fragments": 5}, "fragments must be at most steps, 4, since one travels at a time; got 5"),
        ({"steps": 4, "outer_momentum": 1.0}, "outer_momentum must be at least 0 and below 1; got 1.0"),
        ({"steps": 4, "outer_rate": 0}, "outer_rate must be above 0; got 0"),
        ({"steps": 4, "overlap": 1}, "overlap must be True, False or None; got 1"),
        ({"steps": 4, "lr_factor": "on"}, "lr_factor must be one of off, measured; got 'on'"),
    ],
)
def test_bad_settings(given: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ls.SparseDDPStrategy(local_steps=ls.LocalSteps(**given) if isinstance(given, dict) else given)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"compressor": ls.MomentumCorrection(0.9, ls.TopK())}, "cannot be combined with MomentumCorrection"),
        ({"compressor": "sparse_auto"}, "cannot be combined with sparse_auto"),
        ({"local_group": 2}, "local_steps cannot be combined with local_group=2"),
    ],
)
def test_what_cannot_be_combined(options: Any, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        ls.SparseDDPStrategy(local_steps=2, **options)


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
        turn = tuple(replicas[0] for replicas in trained.replicas)
        for each in turn:
            each.take_up(2)
        totals = trained.network.run([each.exchange(c) for each, c in zip(turn, trained.network.comms, strict=True)])
        for each, total in zip(turn, totals, strict=True):
            each.move(total, 2)
            each.apply()
        assert (trained.replicas[0][0].average - weight.detach()).abs().max() < 1e-6
