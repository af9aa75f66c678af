"""Trainings on simulated ranks are as real ones, as DiLoCo and as plain averaging, and go on where they stopped."""

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse import Dense, LocalSteps, SparseHook
from lightning_sparse.bench.compare.workloads import GPT, Task, byte_lm, learning_rate
from lightning_sparse.options import Options
from tests.support.processes import Ranks

sys.path.append(str(Path(__file__).parents[2] / "docs" / "benchmarks"))
simulate = importlib.import_module("simulate")
LocalReplicas, Replicas, Result, Run = simulate.LocalReplicas, simulate.Replicas, simulate.Result, simulate.Run
OPTIMIZERS, TASKS, WEIGHT_DECAY = simulate.OPTIMIZERS, simulate.TASKS, simulate.WEIGHT_DECAY
options_of, train = simulate.options_of, simulate.train

RANKS = 3
RUN = Run("ddp", 4, 3, 1e-3, 0)


def tiny(seed: int) -> Task:
    torch.manual_seed(seed)
    return Task(GPT(16, 1, 2), (torch.randint(256, (100, 65)),), (torch.randint(256, (10, 65)),), 8)


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "byte_lm", dataclasses.replace(TASKS["byte_lm"], make=tiny))


# --- ranks


def model(kind: type[GPT] = GPT) -> GPT:
    torch.manual_seed(0)
    return kind(16, 1, 2)


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(256, (4, 65), generator=torch.Generator().manual_seed(100 * step + rank))


def batches(step: int, ranks: int = RANKS) -> list[tuple[Tensor]]:
    return [(batch(step, rank),) for rank in range(ranks)]


def assert_same_weights(own: GPT, other: GPT, atol: float) -> None:
    for (name, p), q in zip(own.named_parameters(), other.parameters(), strict=True):
        if name.endswith("in_proj_bias"):  # that of keys has no gradient but for rounding, which Adam makes steps of
            p, q = (each.view(3, -1)[[0, 2]] for each in (p, q))
        torch.testing.assert_close(p, q, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def test_averaging_all_weights_each_step_is_averaging_gradients() -> None:
    """What SGD does, with or without momentum, is linear in the gradients, so the mean of the ranks' steps is the step
    of the mean gradient; and every step starts from x̄ on every rank."""
    dense, local = model(), model()
    options = Options.of(Dense(), "bucket", local_steps=LocalSteps(1, overlap=False))
    replicas = Replicas(dense, options_of("ddp"), RANKS, "sgd"), LocalReplicas(local, options, RANKS, "sgd")
    for step in range(20):
        for each in replicas:
            each.step(batches(step), 0.1)
    assert_same_weights(local, dense, atol=1e-5)
    assert not torch.equal(dense.position, model().position)


def test_an_outer_step_of_all_weights_every_h_steps_is_diloco() -> None:
    """Algorithm 1 of Douillard et al. (2023): inner AdamW, and Nesterov's SGD on the mean of what the ranks moved."""
    shared, own = model(), model()
    settings = LocalSteps(4, 1, False, outer_rate=0.7, outer_momentum=0.9, second_moments="own")
    replicas = LocalReplicas(own, Options.of(Dense(), "bucket", local_steps=settings), RANKS)
    ranks = [deepcopy(shared) for _ in range(RANKS)]
    inner = [torch.optim.AdamW(each.parameters(), 1e-3, weight_decay=WEIGHT_DECAY) for each in ranks]
    outer = torch.optim.SGD(shared.parameters(), 0.7, momentum=0.9, nesterov=True)
    for step in range(12):
        replicas.step(batches(step), 1e-3)
        for each, optimizer, windows in zip(ranks, inner, batches(step), strict=True):
            optimizer.zero_grad()
            each.training_step(windows).backward()
            optimizer.step()
        if (step + 1) % 4 == 0:
            for p, *of_ranks in zip(shared.parameters(), *(each.parameters() for each in ranks), strict=True):
                p.grad = torch.stack([p.detach() - q.detach() for q in of_ranks]).mean(0)
            outer.step()
            for each in ranks:
                each.load_state_dict(shared.state_dict())
    assert_same_weights(own, shared, atol=1e-5)


class _AsDDPWantsIt(GPT):
    def forward(self, windows: Tensor) -> Tensor:
        return self.training_step([windows])


def real(rank: int, size: int, strategies: Sequence[str], steps: int) -> list[Any]:
    dist.init_process_group("gloo")
    found = []
    for options in map(options_of, strategies):
        ddp = DistributedDataParallel(model(_AsDDPWantsIt))
        hook = SparseHook(
            ddp,
            options.compressor,
            fusion=options.fusion,
            wire_dtype=options.wire_dtype,
            warmup_steps=options.warmup_steps,
            local_steps=options.local,
        )
        optimizer = OPTIMIZERS["adamw"](ddp.module)
        optimizer.param_groups[0]["lr"] = 1e-3
        for step in range(steps):
            optimizer.zero_grad()
            ddp(batch(step, rank)).backward()
            optimizer.step()
        hook.averager.show_average()
        found.append({name: p.detach().clone() for name, p in ddp.module.named_parameters()})
        hook.close()
    return found


@pytest.mark.processes
def test_real_ranks_end_with_the_same_average(ranks: Ranks) -> None:
    strategies = [
        "sparse_dense:local_steps=2:wire_dtype=int4",
        "sparse_dense:local_steps=3:wire_dtype=sign",
        "micro:density=0.1:local_steps=2:warmup_steps=3",
        "sparse_dense:local_steps=2:second_moments=own",
    ]
    shared = ranks.run(real, 2, strategies, 14)[0]
    for strategy, of_real in zip(strategies, shared, strict=True):
        simulated = model()
        replicas = LocalReplicas(simulated, options_of(strategy), 2)
        for step in range(14):
            replicas.step(batches(step, 2), 1e-3)
        for name, p in simulated.named_parameters():
            assert torch.equal(p, of_real[name]), (strategy, name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", ["ddp", "sparse_dense:local_steps=2:wire_dtype=int4"])
def test_optimizers_learn(optimizer: str, strategy: str) -> None:
    options, trained = options_of(strategy), model()
    kind: Callable[..., Any] = LocalReplicas if options.local else Replicas
    replicas = kind(trained, options, RANKS, optimizer)
    for _ in range(12):
        replicas.step(batches(0), 0.1 if optimizer == "sgd" else 3e-3)
    windows = torch.cat([windows for (windows,) in batches(0)])
    assert float(trained.training_step([windows]).detach()) < float(model().training_step([windows]).detach()) - 0.05


def test_one_rank_alone_learns_from_the_batches_of_one() -> None:
    own, other = model(), model()
    replicas = Replicas(own, options_of("ddp"), 1)
    optimizer = OPTIMIZERS["adamw"](other)
    optimizer.param_groups[0]["lr"] = 1e-3
    for step in range(3):
        replicas.step(batches(step, 1), 1e-3)
        optimizer.zero_grad()
        other.training_step([batch(step, 0)]).backward()
        optimizer.step()
    assert_same_weights(own, other, atol=0)


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
    assert own.loss < simulate.validation_loss(tiny(0))


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


def arguments(folder: Path, **values: str) -> list[str]:
    known = {"strategies": "ddp,micro", "ranks": "2", "steps": "3", "learning-rates": "1e-3,1e-2", "seeds": "0,1"}
    every = {**known, "output": str(folder), **values}
    return [f"--{name}={value}" for name, value in every.items()]


def command(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["simulate.py", *words])
    simulate.main()


def test_what_is_written_down_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command(monkeypatch, arguments(tmp_path))
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
    assert "0.01*" in shown


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command(monkeypatch, arguments(tmp_path))
    path = tmp_path / "simulate.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:4]) + "\n")
    trained = []

    def count(run: Any, progress: Callable[[], None]) -> Any:
        trained.append(run.strategy)
        return train(run, progress)

    monkeypatch.setattr(simulate, "train", count)
    command(monkeypatch, arguments(tmp_path))
    assert trained == ["micro", "micro"]
    again = [json.loads(line) | {"seconds": 0} for line in path.read_text().splitlines()]
    assert again == [json.loads(line) | {"seconds": 0} for line in lines]
    path.write_text(path.read_text() + '{"run": {"strat')
    with pytest.raises(SystemExit, match="line 7 has none"):
        command(monkeypatch, arguments(tmp_path))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ranks", "0", "--ranks must be at least 1; got 0"),
        ("learning-rates", "1e-3,0", "--learning-rates must be numbers above 0, .*; got '1e-3,0'"),
        ("strategies", "powersgd_1", "must be ddp, diloco, sparse_loco or this project's, not .*; got 'powersgd_1'"),
        ("strategies", "sparse_auto", "chooses by time; got 'sparse_auto'"),
        ("strategies", "micro:local_group=2", "local_group must be 1, .*; got 'micro:local_group=2'"),
    ],
)
def test_bad_input_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    with pytest.raises(SystemExit, match=message):
        command(monkeypatch, arguments(tmp_path, **{name: value}))


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
    before = simulate.validation_loss(kind.make(0))
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
