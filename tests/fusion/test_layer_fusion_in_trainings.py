"""LayerFusion inside a Trainer, on real processes: measured, planned, applied between two steps."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.auto import chooser
from lightning_sparse.auto.chooser import Chooser
from lightning_sparse.auto.forecast import Forecast
from lightning_sparse.auto.policy import CANDIDATES
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.timeline import Timeline
from lightning_sparse.fusion import layer_fusion, planner
from lightning_sparse.fusion.model import Plan, StepModel
from lightning_sparse.fusion.planner import Layout
from lightning_sparse.fusion.steps import STEPS_MEASURED, BetweenSteps
from tests.support.models import data, trainer, unsent, weights
from tests.support.processes import LIMIT_S, Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]

STEPS = STEPS_MEASURED + 4


class Deep(L.LightningModule):
    """Large enough to be worth a plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        hidden = [part for _ in range(6) for part in (nn.Tanh(), nn.Linear(256, 256))]
        self.net = nn.Sequential(nn.Linear(8, 256), *hidden, nn.Linear(256, 3))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


def groups(strategy: ls.SparseDDPStrategy) -> list[tuple[str, ...]]:
    assert strategy.averager is not None
    return [group.names for group in strategy.averager.groups]


def pairs(module: nn.Module) -> list[list[str]]:
    """Groups of two parameters each: none that a plan or a bucket would have."""
    names = [name for name, _ in module.named_parameters()][::-1]
    return [names[i : i + 2] for i in range(1, len(names), 2)] + [names[:1]]


class Regroup(L.Callback):
    """Changes the groups before a step; keeps what was unsent before and after."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.moved: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, ls.SparseDDPStrategy)
        if trainer.global_step == self.step and strategy.layer_fusion is not None:
            self.moved.append(unsent(strategy))
            strategy.layer_fusion.follow(Layout(pairs(pl_module), strategy.layer_fusion.compressor))
            self.moved.append(unsent(strategy))


# - groups that change in mid-run


def with_and_without(rank: int, size: int) -> list[tuple[Tensor, int]]:
    results = []
    for callbacks in ([], [Regroup(3)]):
        model, strategy = Deep(), ls.SparseDDPStrategy("sparse_dense")
        trainer(strategy, size, max_steps=6, callbacks=callbacks).fit(model, data(10, size))
        results.append((weights(model), len(groups(strategy))))
    return results


def test_dense_training_with_new_groups_in_mid_run_equals_training_without(ranks: Ranks) -> None:
    for (without, one), (regrouped, many) in ranks.run(with_and_without, 2, timeout_s=LIMIT_S):
        assert (one, many) == (1, 9)
        assert torch.equal(without, regrouped)


def regroup_each(rank: int, size: int, names: list[str]) -> list[Any]:
    results = []
    for name in names:
        model, strategy, regroup = Deep(), ls.SparseDDPStrategy(name), Regroup(4)
        trainer(strategy, size, max_steps=8, callbacks=[regroup]).fit(model, data(10, size))
        results.append((weights(model), regroup.moved))
    return results


@pytest.mark.programs
def test_new_groups_lose_nothing_with_any_compressor(ranks: Ranks) -> None:
    names = list(ls.COMPRESSORS)
    every = ranks.run(regroup_each, 3, names, timeout_s=LIMIT_S)
    for i, name in enumerate(names):
        for trained, (before, after) in (results[i] for results in every):
            assert before.keys() == after.keys()
            assert all(torch.equal(before[key], after[key]) for key in before), name
            assert torch.equal(trained, every[0][i][0]), name
            assert trained.isfinite().all(), name
        left = [sum(float(x.abs().sum()) for x in results[i][1][0].values()) for results in every]
        assert name == "sparse_dense" or min(left) > 0, name


# - the plan


def plan(rank: int, size: int, name: str, spoil: str, folder: str) -> tuple[list[tuple[str, ...]], Plan | None, Any]:
    """Train long enough for a plan.  ``spoil``: what the ranks cannot measure."""
    if (spoil == "rank 1" and rank == 1) or spoil == "all":
        garbage = iter([math.nan, -1.0, 0.0, math.inf] * 1000)
        Timeline.span_s = lambda self: next(garbage)  # type: ignore[method-assign]
        Timeline.arrival_s = lambda self, parameter: next(garbage)  # type: ignore[method-assign]
    if spoil == "slow rank 1" and rank == 1:
        measured = Timeline.arrival_s
        Timeline.arrival_s = lambda self, parameter: 10 * measured(self, parameter)  # type: ignore[method-assign]
    planner.LEAST_GAIN = -math.inf  # so that the plan is always followed
    strategy = ls.SparseDDPStrategy(name)
    run = trainer(strategy, size, max_steps=STEPS)
    run.fit(Deep(), data(STEPS, size))
    assert strategy.layer_fusion is not None
    measured_times = strategy.layer_fusion.measured()
    if rank == 0 and not spoil:
        strategy.draw_timeline(Path(folder) / "timeline.svg")
    run.save_checkpoint(Path(folder) / "planned.ckpt")
    return groups(strategy), strategy.plan, measured_times


@pytest.mark.parametrize(
    ("name", "spoil"), [("micro", ""), ("importance", ""), ("micro", "slow rank 1"), ("importance", "rank 1")]
)
def test_all_ranks_follow_rank_0s_plan_whatever_they_measured(
    ranks: Ranks, name: str, spoil: str, tmp_path: Path
) -> None:
    results = ranks.run(plan, 3, name, spoil, str(tmp_path), timeout_s=LIMIT_S)
    assert all(found == results[0][0] for found, _, _ in results)
    chosen, times = results[0][1:]
    assert chosen is not None
    assert sorted(chosen.names) == sorted(name for names in results[0][0] for name in names)
    assert chosen.spans["LayerFusion"] <= min(chosen.spans.values()) * (1 + 1e-9)
    assert 0 < chosen.span_s <= chosen.step_s
    assert len(times) == len(chosen.ends)
    assert all(time.ready_s <= time.start_s < time.end_s for time in times if not spoil)
    if not spoil:
        assert "expected" in (tmp_path / "timeline.svg").read_text() or (tmp_path / "timeline.svg").stat().st_size


def test_where_no_rank_can_tell_the_time_groups_stay(ranks: Ranks, tmp_path: Path) -> None:
    for found, chosen, times in ranks.run(plan, 2, "micro", "all", str(tmp_path), timeout_s=LIMIT_S):
        assert len(found) == 1
        assert chosen is None
        assert times == []


class Validated(Deep):
    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("loss", self.training_step(batch, index), sync_dist=True)


def plan_with_validation(rank: int, size: int) -> tuple[bool, bool]:
    """Whether there is a plan, and the last step's times can be."""
    strategy = ls.SparseDDPStrategy("micro")
    run = trainer(strategy, size, max_steps=STEPS, val_check_interval=2)
    run.fit(Validated(), data(STEPS, size), data(1, size))
    assert strategy.layer_fusion is not None
    assert strategy.averager is not None
    return bool(strategy.layer_fusion.state()), strategy.averager.timeline.span_s() > 0


def test_validation_changes_nothing(ranks: Ranks) -> None:
    """Lightning leaves DDP in eval mode where there is a validation loader, and validates through it."""
    assert ranks.run(plan_with_validation, 2, timeout_s=LIMIT_S) == [(True, True)] * 2


def resumed(rank: int, size: int, folder: str) -> tuple[list[tuple[str, ...]], bool]:
    strategy = ls.SparseDDPStrategy("micro")
    checkpoint = Path(folder) / "planned.ckpt"
    trainer(strategy, size, max_steps=STEPS + 2).fit(Deep(), data(STEPS + 2, size), ckpt_path=checkpoint)
    assert strategy.layer_fusion is not None
    return groups(strategy), bool(strategy.layer_fusion.state())


@pytest.mark.parametrize("size", [2, 3])
def test_a_resumed_run_follows_the_plan_it_was_saved_with(ranks: Ranks, size: int, tmp_path: Path) -> None:
    planned = ranks.run(plan, 2, "micro", "", str(tmp_path), timeout_s=LIMIT_S)[0][0]
    for found, follows in ranks.run(resumed, size, str(tmp_path), timeout_s=LIMIT_S):
        assert follows == (size == 2)  # on other ranks it is measured anew
        assert found == planned or size == 3


# - trials


def tried(rank: int, size: int) -> list[tuple[int, int]]:
    """How many groups there are in the end, in them and in the plan, where steps seem to take as long as is said."""
    planner.LEAST_GAIN = -math.inf  # so that all is tried
    StepModel.best = lambda self: [2, len(self.ready_s)]  # type: ignore[method-assign]
    found = []
    for seconds in (0.02, 0.05):
        strategy = ls.SparseDDPStrategy(ls.MiCRO(density=0.01))
        Timeline.span_s = (  # type: ignore[method-assign]
            lambda self, strategy=strategy, seconds=seconds: seconds if len(strategy.averager.groups) == 2 else 0.04
        )
        steps = STEPS_MEASURED + layer_fusion.TRIAL + 2
        run = trainer(strategy, size, max_steps=steps, callbacks=[Regroup(1)])
        run.fit(Deep(), data(steps, size))
        planned = strategy.plan
        found.append((len(groups(strategy)), len(planned.ends) if planned else 0))
    return found


def test_the_groups_that_were_fastest_stay(ranks: Ranks) -> None:
    first, second = ranks.run(tried, 2, timeout_s=LIMIT_S)
    before = first[1][0]
    assert before > 2
    assert first == [(2, 2), (before, before)]
    assert [found for found, _ in second] == [found for found, _ in first]


# - when times or compressors change


def measurements(rank: int, size: int, name: str) -> list[int]:
    """Steps at which measuring began."""
    layer_fusion.WINDOW = 4
    planner.LEAST_GAIN = math.inf  # so that the groups stay, whatever messages cost at the moment
    began: list[int] = []
    measure = layer_fusion.measure_steps

    def noting(averager: Averager, *others: Any) -> BetweenSteps[planner.Measured]:
        began.append(averager.steps)
        return (yield from measure(averager, *others))

    layer_fusion.measure_steps = noting
    if name == "drift":  # right after the groups were chosen
        chosen = STEPS_MEASURED + 1
        Averager.messages = lambda self: partial(float, 0.01 if self.steps < chosen else 1)  # type: ignore[method-assign]
    compressor = ls.Warmup(11, ls.TopK()) if name == "warmup" else ls.TopK()
    trainer(ls.SparseDDPStrategy(compressor), size, max_steps=24).fit(Deep(), data(24, size))
    return began


def test_it_measures_anew_when_steps_take_longer(ranks: Ranks) -> None:
    for began in ranks.run(measurements, 2, "drift", timeout_s=LIMIT_S):
        assert len(began) == 2
        assert began[0] == 0
        assert STEPS_MEASURED + 4 <= began[1] <= STEPS_MEASURED + 12


def test_it_measures_anew_when_another_compressor_sets_in(ranks: Ranks) -> None:
    for began in ranks.run(measurements, 2, "warmup", timeout_s=LIMIT_S):
        assert began[:2] == [0, 11]


# - the compressor chosen too

CHOSEN = STEPS_MEASURED + 2 * layer_fusion.TRIAL + 4  # steps after which float32 and another have been tried
SUMS = [candidate for candidate in CANDIDATES if not candidate.local_steps]
SELECTING = [ls.Candidate(each, "int4") for each in (ls.OkTopk(0.3), ls.MiCRO(0.3), ls.MiCRO(0.05))]
AUTO = ls.Auto([*SUMS, *SELECTING], at_most=None)


def automatic(
    rank: int, size: int, each: Sequence[str], folder: str
) -> list[tuple[str, list[tuple[str, ...]], Tensor, int]]:
    """Train with sparse_auto where one compressor seems by far the fastest, or all are as slow: each in turn."""
    honest = chooser.forecast_of, Chooser.note
    return [with_fastest(size, fastest, *honest, f"{folder}/{fastest}.ckpt") for fastest in each]


def with_fastest(
    size: int, fastest: str, forecast: Callable[..., Any], note: Callable[..., Any], checkpoint: str
) -> tuple[str, list[tuple[str, ...]], Tensor, int]:
    def given_s(candidate: ls.Candidate) -> float:
        return 0.0001 if type(candidate.compressor).__name__ == fastest else 0.5

    def given_times(candidate: ls.Candidate, **of_steps: Any) -> Forecast:
        return replace(forecast(candidate, **of_steps), step_s=given_s(candidate))

    def as_given(self: Chooser, candidate: ls.Candidate, step_s: float) -> None:
        note(self, candidate, given_s(candidate))

    chooser.forecast_of = given_times
    Chooser.note = as_given  # type: ignore[method-assign]
    Timeline.span_s = lambda self: 0.01  # type: ignore[method-assign]  # so that no trial finds it slower
    strategy = ls.SparseDDPStrategy(AUTO)
    run, model = trainer(strategy, size, max_steps=CHOSEN), Deep()
    run.fit(model, data(CHOSEN, size))
    assert strategy.averager is not None
    assert strategy.hook is not None
    run.save_checkpoint(checkpoint)
    assert strategy.hook.chooser is not None
    return kind_of(strategy.averager), groups(strategy), weights(model), len(strategy.hook.chooser.forecasts)


def kind_of(averager: Any) -> str:
    """The class of what averages the largest group, whatever its wire format; small ones may be summed densely."""
    _, compressor = max(zip(averager.groups, averager.compressors, strict=True), key=lambda pair: pair[0].n)
    return type(getattr(compressor, "compressor", compressor)).__name__


@pytest.mark.programs
def test_sparse_auto_chooses_the_fastest_and_dense_where_none_is(ranks: Ranks, tmp_path: Path) -> None:
    each = ["MiCRO", "OkTopk", "none"]
    for fastest, *results in zip(each, *ranks.run(automatic, 2, each, str(tmp_path), timeout_s=LIMIT_S), strict=True):
        chosen, laid_out, trained, _ = results[0]
        assert chosen == ("Dense" if fastest == "none" else fastest)
        for again, theirs, weights_there, forecasts in results:
            assert (again, theirs) == (chosen, laid_out)
            assert torch.equal(weights_there, trained)
            assert forecasts == len(AUTO.candidates)
    assert ranks.run(resume_automatic, 2, str(tmp_path / "OkTopk.ckpt"), timeout_s=LIMIT_S) == ["OkTopk", "OkTopk"]


def resume_automatic(rank: int, size: int, checkpoint: str) -> str:
    """The compressor that a resumed training goes on with."""
    strategy = ls.SparseDDPStrategy(AUTO)
    run = trainer(strategy, size, max_steps=CHOSEN + 2)
    run.fit(Deep(), data(CHOSEN + 2, size), ckpt_path=checkpoint)
    assert strategy.averager is not None
    return kind_of(strategy.averager)


def plan_and_fail(rank: int, size: int) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]], Plan | None]:
    def failing(*arguments: object) -> Plan:
        raise ZeroDivisionError("in the planner")

    layer_fusion.best_plan = failing
    strategy = ls.SparseDDPStrategy("micro")
    run = trainer(strategy, size, max_steps=STEPS)
    first: list[list[tuple[str, ...]]] = []

    class Look(L.Callback):
        def on_train_batch_start(
            self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int
        ) -> None:
            if not index:
                first.append(groups(strategy))

    run.callbacks.append(Look())  # type: ignore[attr-defined]
    run.fit(Deep(), data(STEPS, size))
    return first[0], groups(strategy), strategy.plan


def test_a_planner_that_fails_leaves_groups_as_they_are_and_nobody_waiting(ranks: Ranks) -> None:
    for before, after, planned in ranks.run(plan_and_fail, 2, timeout_s=LIMIT_S):
        assert before == after
        assert planned is None
