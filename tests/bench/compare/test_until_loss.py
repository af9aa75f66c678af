from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_sparse.bench.compare.callbacks import Judge, LearningRate, Probe
from lightning_sparse.bench.compare.records import MeasuredRun, MeasuredStep, Round
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.strategies import NO_COMMUNICATION, Peer, parse_strategies
from lightning_sparse.bench.compare.until_loss import (
    LossCurve,
    Reached,
    at_best_rates,
    best_rate,
    rows,
    section,
    tables,
)
from lightning_sparse.bench.compare.workloads import (
    CONTEXT,
    HELD_OUT_WINDOWS,
    TEXT_BYTES,
    other_source_code,
    source_windows,
)
from tests.support.models import trainer, weights
from tests.support.processes import LIMIT_S, Ranks

LOSSES = [4.4, 3.0]


STEP = MeasuredStep(1.0, None, 10.0, None, None, None, None, 0.0, 0.0, 0.0)


def judged(strategy: str, number: int, seconds: float, losses: Sequence[float | None]) -> Round:
    steps = [replace(STEP, s=seconds, held_out=loss) for loss in losses]
    return Round("4x1gbit", strategy, number, 4, 0, MeasuredRun("cpu", 1, 1000, 1, steps))


# --- tables


def test_a_loss_falls_evenly_to_the_first_evaluation_at_or_below_it() -> None:
    course = LossCurve.of(judged("ddp", 0, 2.0, [5.0, None, 4.0, 4.2, 3.0]))
    assert course.losses == [5.0, 4.0, 4.2, 3.0]
    assert course.until(6.0) == course.until(5.0) == Reached(2.0, 1, 10.0)
    assert course.until(4.5) == Reached(4.0, 2, 20.0)
    assert course.until(4.0) == Reached(6.0, 3, 30.0)
    assert course.until(3.9) == pytest.approx(Reached(8.5, 4.25, 42.5))
    assert course.until(2.9).seconds == math.inf


def test_no_loss_between_a_number_and_infinity_is_made_up() -> None:
    course = LossCurve.of(judged("ddp", 0, 2.0, [math.inf, 4.0]))
    assert course.until(5.0) == Reached(4.0, 2, 20.0)


def test_tables_show_medians_and_what_was_not_reached() -> None:
    rounds = [judged("ddp", i, seconds, [5.0, 4.0, 3.0]) for i, seconds in enumerate((1.0, 2.0, 9.0))]
    rounds += [judged("micro", i, 1.0, losses) for i, losses in enumerate(([5.0, 3.0], [4.5, 4.4], [6.0, 5.5]))]
    rounds.append(Round("4x1gbit", "powersgd_1", 0, 4, 0, None, "RuntimeError: no luck"))
    console = Console(width=150)
    with console.capture() as shown:
        for table in tables(rows(rounds, LOSSES), LOSSES):
            console.print(table)
    lines = [line.split() for line in shown.get().splitlines() if line.split()[:1] in (["ddp"], ["micro"])]
    assert lines[0] == ["ddp", "-", "3.2", "6.0", "3.000", "6.0", "3", "30", "B"]
    assert lines[1] == ["micro", "-", "2.0", "-", "4.400", "2.0", "2", "20", "B"]
    text = section(rows(rounds, LOSSES), LOSSES)
    assert "## Seconds to a loss on 4x1gbit" in text
    assert "| `ddp` |" in text


def test_what_is_no_sooner_than_a_rank_alone_stands_in_parentheses() -> None:
    rounds = [judged(NO_COMMUNICATION, 0, 1.0, [5.0, 4.4, 4.3])]
    rounds += [judged("ddp", 0, 2.0, [4.0, 3.0]), judged("micro", 0, 1.0, [4.4, 4.2]), judged("late", 0, 1.0, [5.0])]
    text = section(rows(rounds, LOSSES), LOSSES)
    seconds = {line.split("|")[1].strip(): line.split("|")[3:5] for line in text.splitlines() if line[:3] == "| `"}
    assert [[cell.strip() for cell in cells] for cells in seconds.values()] == [
        ["2.0", "-"],
        ["(2.0)", "4.0"],
        ["1.0", "-"],
        ["(-)", "-"],
    ]


# --- learning rates


def at(rate: float, number: int, seconds: float, losses: Sequence[float | None]) -> Round:
    return replace(judged("ddp", number, seconds, losses), learning_rate=rate)


def test_the_best_rate_is_soonest_at_the_lowest_loss_that_was_reached() -> None:
    soon, deep = at(1e-3, 0, 1.0, [4.0, 3.5]), at(2e-3, 0, 2.0, [4.5, 3.0])
    assert best_rate([soon, deep], [4.4, 3.0]) == 2e-3
    assert best_rate([soon, deep], [4.4, 3.5]) == 1e-3
    assert best_rate([soon, deep], [1.0]) == 2e-3  # neither: the lowest at its end
    diverged = at(4e-3, 0, 0.1, [math.nan])
    failed = replace(soon, run=None, error="no luck", learning_rate=8e-3)
    assert best_rate([diverged, failed, soon], [1.0]) == 1e-3
    assert best_rate([soon, deep, at(2e-3, 1, 2.0, [4.5, 4.4])], [3.0]) == 2e-3  # of the first round


def test_a_row_is_of_the_best_rate_and_says_so() -> None:
    rounds = [at(1e-3, 0, 1.0, [4.0, 3.5]), at(2e-3, 0, 2.0, [4.0, 3.0]), at(2e-3, 1, 4.0, [4.0, 3.0])]
    (row,) = rows(rounds, [3.0])["4x1gbit"].values()
    assert (row.rate, row.to_each, row.last) == ("0.002*", [Reached(6.0, 2, 20.0)], 3.0)
    assert at_best_rates(rounds, [3.0]) == rounds[1:]


def test_every_rate_is_tried_in_the_first_round_and_the_best_goes_on() -> None:
    schedule = Schedule("4x1gbit", "byte_lm", "ddp,diloco:lr=1", 2, 0, 2, "cpu", [3.0], None, [0.1, 0.2], [7, 8], True)
    turns = schedule.turns()
    assert [(number, row.label, row.learning_rate) for number, row in turns] == [
        (0, NO_COMMUNICATION, 0.1),
        (0, NO_COMMUNICATION, 0.2),
        (0, "ddp", 0.1),
        (0, "ddp", 0.2),
        (0, "diloco:lr=1", 1),
        (1, "diloco:lr=1", 1),
        (1, "ddp", None),
        (1, NO_COMMUNICATION, None),
    ]
    rounds = [at(0.1, 0, 1.0, [3.1]), at(0.2, 0, 1.0, [3.0])]
    assert [schedule.at_best_rate(row, rounds).learning_rate for _, row in turns[3:7]] == [0.2, 1, 1, 0.2]
    assert [schedule.seed(number) for number in range(3)] == [7, 8, 7]


def test_held_out_text_is_not_trained_on() -> None:
    held_out = other_source_code()
    assert held_out.shape == (HELD_OUT_WINDOWS, CONTEXT + 1)
    trained = {bytes(window.tolist()) for window in source_windows(TEXT_BYTES)}
    assert not trained & {bytes(window.tolist()) for window in held_out}


# --- on real ranks


class Net(L.LightningModule):
    """Its loss of a batch, beside which it keeps its weights after every step."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        self.after: list[Tensor] = []
        self.sent: list[int] = []

    def training_step(self, batch: Sequence[Tensor]) -> Tensor:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        self.after.append(weights(self))
        if hasattr(self.trainer.strategy, "sent_bytes"):
            self.sent.append(self.trainer.strategy.sent_bytes())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def train(rank: int, size: int, spec: str, steps: int) -> tuple[Net, list[MeasuredStep]]:
    """Train as a worker of the bench does, with ``steps`` as the limit; returns what was measured."""
    torch.manual_seed(0)
    net, (strategy,) = Net(), parse_strategies(spec)
    data = torch.randn(size * 4 * steps, 8)
    probe = Probe(None, learns=True)
    callbacks = [probe, LearningRate(strategy.learning_rate or 0.05), Judge(probe, data[:8], 0.0, None, 1)]
    fit = trainer(strategy.build(), size, check_every=0, max_steps=steps, callbacks=callbacks)
    fit.fit(net, DataLoader(torch.utils.data.TensorDataset(data), batch_size=4))
    assert fit.optimizers[0].param_groups[0]["lr"] == (strategy.learning_rate or 0.05)
    net.trainer = None
    return net, probe.steps


def test_a_schedule_sets_the_learning_rate_of_every_step() -> None:
    net = Net()
    optimizer = net.configure_optimizers()
    lightning = SimpleNamespace(optimizers=[optimizer], global_step=0, max_steps=4)
    for rate, largest in ((None, 0.05), (0.2, 0.2)):
        callback = LearningRate(rate, lambda step, steps: (step + 1) / steps)
        callback.on_train_start(cast(L.Trainer, lightning), net)
        for lightning.global_step in range(4):
            callback.on_train_batch_start(cast(L.Trainer, lightning))
            assert optimizer.param_groups[0]["lr"] == pytest.approx(largest * (lightning.global_step + 1) / 4)


@pytest.mark.timeout(LIMIT_S + 20)
def test_local_steps_are_judged_by_the_average_that_ranks_share(ranks: Ranks) -> None:
    results = ranks.run(train, 2, "diloco:steps=7", 14, timeout_s=LIMIT_S)
    (_, steps), (_, others) = results
    held_out = [step.held_out for step in steps]
    assert held_out == [step.held_out for step in others]
    assert [i for i, loss in enumerate(held_out, 1) if loss is not None] == [1, 6, 14]
    assert held_out[0] == held_out[5] != held_out[13]  # nothing has been exchanged before step 7
    weights, comparison = 4 * 161, 16  # bytes; the other is of what nobody trains
    assert {i: step.counted_bytes for i, step in enumerate(steps, 1) if step.counted_bytes} == {
        7: weights,
        10: comparison,
        14: weights,
    }


def test_a_training_waits_for_the_others_after_each_evaluation_but_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    probe, others = Probe(None, learns=True), iter(range(9))
    judge = Judge(probe, torch.zeros(0), lowest=1.0, seconds=None, least=1, others=others)
    losses = iter((3.0, 2.0, 0.5))
    monkeypatch.setattr(judge, "_evaluate", lambda *_: (next(losses), float(len(probe.steps))))
    lightning = cast(L.Trainer, SimpleNamespace(max_steps=-1, should_stop=False, strategy=None))
    while not lightning.should_stop:
        probe.steps.append(STEP)
        judge.on_train_batch_end(lightning, Net())
    assert len(probe.steps) == 11
    assert next(others) == 2


def test_a_step_takes_as_long_as_the_exchange_that_was_waited_for_before_an_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strategy = Peer()
    monkeypatch.setattr(strategy, "sent_bytes", lambda: 0)
    lightning, probe, net = cast(L.Trainer, SimpleNamespace(strategy=strategy)), Probe(None, learns=True), Net()
    probe.on_train_start(lightning, net)
    probe.skip(waited_s=1000.0)
    for _ in range(2):
        net.training_step([torch.ones(1, 8)]).backward()
        probe.on_after_backward(lightning, net)
        probe.on_train_batch_end(lightning, net, None)
    assert probe.steps[0].s == 1000
    assert probe.steps[1].s < 1000


@pytest.mark.timeout(LIMIT_S + 20)
def test_a_training_that_diverged_ends(ranks: Ranks) -> None:
    (_, steps), _ = ranks.run(train, 2, "ddp:lr=1e30", 30, timeout_s=LIMIT_S)
    assert len(steps) < 30
    assert not math.isfinite(steps[-1].held_out or 0)
