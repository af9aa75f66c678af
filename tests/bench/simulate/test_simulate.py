"""Trainings on simulated ranks: what they learn, what is written down, and that they go on where they stopped."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_sparse.bench.compare.byte_lm import Task, byte_lm, learning_rate
from lightning_sparse.bench.compare.models import ByteGPT
from lightning_sparse.bench.simulate import simulate as command
from lightning_sparse.bench.simulate.replicas import Replicas, options_of
from lightning_sparse.bench.simulate.results import Result, Run, read, table
from lightning_sparse.bench.simulate.simulate import simulate, train
from lightning_sparse.bench.simulate.task import TASKS, WEIGHT_DECAY
from lightning_sparse.cli import main
from lightning_sparse.cli.options import Simulate

RUN = Run("ddp", 4, 3, 1e-3, 0)


def tiny(seed: int) -> Task:
    torch.manual_seed(seed)
    return Task(ByteGPT(16, 1, 2), (torch.randint(256, (100, 65)),), (torch.randint(256, (10, 65)),), 8)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "byte_lm", dataclasses.replace(TASKS["byte_lm"], make=tiny))


def arguments(folder: Path, **values: Any) -> Simulate:
    known: dict[str, Any] = {
        "task": "byte_lm",
        "strategies": "ddp,micro",
        "ranks": 2,
        "steps": 3,
        "learning_rates": "1e-3,1e-2",
    }
    return Simulate(**{**known, "seeds": "0,1", "optimizer": None, "output": folder, "command": "simulate", **values})


# --- training


def test_ddp_is_plain_averaging() -> None:
    tasks = tiny(0), tiny(0)
    replicas = Replicas(tasks[0].model, options_of("ddp"), 4)
    optimizer = torch.optim.AdamW(tasks[1].model.parameters(), weight_decay=WEIGHT_DECAY)
    for step in range(3):
        batches = [tasks[0].batch(0, step, rank) for rank in range(4)]
        replicas.step(batches, 1e-2)
        optimizer.param_groups[0]["lr"] = 1e-2
        optimizer.zero_grad()
        for batch in batches:
            (tasks[1].model.training_step(batch) / 4).backward()
        optimizer.step()
    pairs = zip(tasks[0].model.parameters(), tasks[1].model.parameters(), strict=True)
    # Adam's first steps are signs of gradients, and those that are zero but for rounding have none.
    assert sum(int((~torch.isclose(own, other, atol=1e-5)).sum()) for own, other in pairs) < 20


@pytest.mark.parametrize("strategy", ["micro:fusion=none", "skip_reduce:wire_dtype=int4:warmup_steps=2", "importance"])
def test_strategies_learn_and_send_less(strategy: str) -> None:
    dense, own = train(RUN), train(Run(strategy, 4, 3, 1e-3, 0))
    assert dense.sent_bytes == 6.0
    assert 0 < own.sent_bytes < 6
    assert own.loss == pytest.approx(dense.loss, rel=0.05)
    assert own.loss < tiny(0).validation_loss()


def test_a_training_is_the_same_again_and_another_with_another_seed() -> None:
    first, again, other = train(RUN), train(RUN), train(Run("ddp", 4, 3, 1e-3, 1))
    assert first.curve == again.curve != other.curve
    assert first.curve[-1] == (3, first.loss)
    assert [step for step, _ in first.curve] == [1, 2, 3]


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    rates = [learning_rate(1.0, step, 100) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * i for i in range(1, 11)])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[-1] < 0.001


def test_the_byte_lm_is_validated_on_other_text() -> None:
    task = byte_lm(0)
    assert sum(p.numel() for p in task.model.parameters()) == 279_168
    known = {bytes(window.tolist()) for window in task.training[0]}
    held_out = [bytes(window.tolist()) for window in task.validation[0]]
    assert len(held_out) == 640
    assert sum(window in known for window in held_out) < 10


# --- the command


def test_what_is_written_down_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--strategies", "ddp,micro", "--ranks", "2", "--steps", "3", "--learning-rates", "1e-3,1e-2"]
    assert main([*words, "--seeds", "0,1", "--output", str(tmp_path)]) == 0
    lines = (tmp_path / "simulate.jsonl").read_text().splitlines()
    assert [tuple(json.loads(line)["run"].values()) for line in lines[:3]] == [
        ("ddp", 2, 3, 0.001, 0, "adamw", "byte_lm"),
        ("ddp", 2, 3, 0.01, 0, "adamw", "byte_lm"),
        ("ddp", 2, 3, 0.01, 1, "adamw", "byte_lm"),  # the better one
    ]
    assert len(lines) == 6
    shown = " ".join(capsys.readouterr().out.split())
    assert "above ddp" in shown
    assert "after 3 steps, 2 simulated ranks" in shown
    row = (tmp_path / "simulate.md").read_text().splitlines()[4]
    assert [cell.strip() for cell in row.split("|")][1:4] == ["`ddp`", "4.000", "0.01*"]


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulate(arguments(tmp_path))
    path = tmp_path / "simulate.jsonl"
    lines, page = path.read_text().splitlines(), path.with_suffix(".md").read_text()
    path.write_text("\n".join(lines[:4]) + "\n")
    trained = []

    def count(run: Run, progress: Callable[[], None]) -> Result:
        trained.append(run)
        return train(run, progress)

    monkeypatch.setattr(command, "train", count)
    simulate(arguments(tmp_path))
    assert [run.strategy for run in trained] == ["micro", "micro"]
    again = [json.loads(line) | {"seconds": 0} for line in path.read_text().splitlines()]
    assert again == [json.loads(line) | {"seconds": 0} for line in lines]
    assert path.with_suffix(".md").read_text() == page


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    simulate(arguments(tmp_path, strategies="ddp"))
    path = tmp_path / "simulate.jsonl"
    path.write_text(path.read_text() + '{"run": {"strat')
    with pytest.raises(ValueError, match="line 4 has none"):
        read(path)


def test_spread_and_distance_are_over_seeds() -> None:
    def result(strategy: str, seed: int, loss: float) -> Result:
        return Result(Run(strategy, 4, 3, 1e-3, seed), loss, [(3, loss)], 6.0, 1.0)

    rows = [[result("ddp", 0, 2.0), result("ddp", 1, 4.0)], [result("micro", 0, 2.2), result("micro", 1, 4.8)]]
    found = table(rows, [5e-4, 1e-3, 2e-3])
    cells = [list(column.cells) for column in found.columns]
    assert cells[2] == ["0.001", "0.001"]
    assert cells[3] == ["3.000 ± 1.414", "3.500 ± 1.838"]
    assert cells[4] == ["-", "15.0 ± 7.1 %"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"ranks": 0}, "--ranks must be at least 1; got 0"),
        ({"steps": 0}, "--steps must be at least 1; got 0"),
        ({"learning_rates": "1e-3,0"}, "--learning-rates must be numbers above 0, .*; got '1e-3,0'"),
        ({"seeds": "0,-1"}, "--seeds must be numbers of at least 0, .*; got '0,-1'"),
        ({"strategies": "ddp,mikro"}, "the name must be one of .*; got 'mikro'"),
        ({"strategies": "powersgd_1"}, "must be ddp, diloco, sparse_loco or this project's, not .*; got 'powersgd_1'"),
        ({"strategies": "sparse_auto"}, "chooses by time; got 'sparse_auto'"),
        ({"strategies": "micro:local_group=2"}, "local_group must be 1, .*; got 'micro:local_group=2'"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(arguments(tmp_path, **values))


# --- tasks


@pytest.mark.parametrize(
    ("task", "strategy"),
    [
        ("digits", "micro:density=0.05:wire_dtype=int4"),
        ("modules", "sparse_dense:local_steps=2"),
    ],
)
def test_other_tasks_are_learned(task: str, strategy: str) -> None:
    kind = TASKS[task]
    before = kind.make(0).validation_loss()
    found = train(Run(strategy, 2, 100, float(kind.rates.split(",")[1]), 0, kind.optimizer, task))
    assert found.loss < 0.95 * before
    assert found.accuracy is not None
    assert 0.15 < found.accuracy <= 1


@pytest.mark.parametrize(("task", "parameters"), [("digits", 38_282), ("modules", 262_804)])
def test_tasks_are_as_they_say(task: str, parameters: int) -> None:
    found = TASKS[task].make(0)
    assert sum(p.numel() for p in found.model.parameters()) == parameters
    assert len(found.training[0]) > 2 * len(found.validation[0])
    assert len(found.batch(0, 0, 0)[0]) == found.batch_size
    found.model.training_step(found.batch(0, 0, 0)).backward()
    gradient = next(found.model.parameters()).grad
    assert gradient is not None
    assert (float((gradient != 0).float().mean()) < 0.15) == (task == "modules")  # nearly all of it is zero


def test_results_from_before_there_were_tasks_are_of_the_byte_lm() -> None:
    run = {"strategy": "ddp", "ranks": 4, "steps": 600, "learning_rate": 0.001, "seed": 0}
    line = json.dumps({"run": run, "loss": 2.0, "curve": [[600, 2.0]], "sent_bytes": 6.0, "seconds": 1.0})
    assert Result.from_json(line).run == Run("ddp", 4, 600, 0.001, 0, "adamw", "byte_lm")


# --- what is delivered


def test_what_a_strategy_delivers_is_written_down() -> None:
    strategies = ["ddp", "sparse_dense:wire_dtype=int4", "micro:density=0.3", "micro:density=0.05"]
    found = [train(Run(strategy, 3, 15, 1e-3, 0)) for strategy in strategies]
    assert (found[0].delivered, found[0].age) == (1.0, 0.0)
    delivered, age = [each.delivered or 0 for each in found], [each.age or 0 for each in found]
    assert delivered == sorted(delivered, reverse=True)
    assert age == sorted(age)


def test_all_weights_averaged_every_step_are_late_by_nothing() -> None:
    found = train(Run("sparse_dense:local_steps=1:overlap=false", 3, 5, 1e-3, 0))
    assert found.delivered == pytest.approx(1, abs=1e-6)
    assert found.age == pytest.approx(0, abs=1e-3)


def test_half_of_the_weights_a_step_late_wait_a_step_and_a_half() -> None:
    found = train(Run("sparse_dense:local_steps=2", 2, 40, 1e-3, 0))
    assert found.age == pytest.approx(1.5, abs=0.2)
