"""The monitor, its tables and its picture, without processes: a Trainer made up of what the monitor looks at."""

import gc
import io
import math
import os
import pickle
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import lightning_sparse as ls
from lightning_sparse.auto.policy import NAMES
from lightning_sparse.engine.observers import Waiting
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.model import Cost, Plan, SizeCost, StepModel
from lightning_sparse.monitor.pictures import draw, draw_timeline
from lightning_sparse.monitor.record import MOST_POINTS, Notes, Point, Selected, Sums, advice
from lightning_sparse.monitor.tables import summary, verdict
from tests.support.monitored import Training, Unread, quiet

KEYS = {
    "compression_ratio", "density", "threshold_error", "sent_bytes", "residual_norm", "ms_compress", "ms_wait",
    "mask_bytes", "overflow", "oldest_steps", "residual_over_gradient", "delivered", "staleness",
    "unsent_norm", "unsent_over_gradient", "age",
}  # fmt: skip


# - log keys


def test_every_key_goes_to_every_logger_at_lightnings_own_steps() -> None:
    training = Training(quiet(), every=5).run(12)
    for logger in training.loggers:
        assert [step for step, _ in logger.rows] == [4, 9, 11]  # every fifth, and the last of the epoch
        assert all(set(row) == {f"sparse/{key}" for key in KEYS} for _, row in logger.rows)
    metrics = {key: float(value) for key, value in training.trainer.callback_metrics.items()}
    assert metrics == pytest.approx(training.loggers[0].rows[-1][1])
    row = training.loggers[0].rows[-1][1]
    assert (row["sparse/sent_bytes"], row["sparse/compression_ratio"]) == (100, 48)
    assert (row["sparse/density"], row["sparse/threshold_error"]) == (0.04, pytest.approx(0.2))
    for now, before in (("residual_norm", "unsent_norm"), ("staleness", "age")):  # which goes on for a release
        assert row[f"sparse/{now}"] == row[f"sparse/{before}"]


@pytest.mark.parametrize("every", [0, 5])
def test_nothing_of_the_device_is_asked_for_between_logging_steps(every: int) -> None:
    training = Training(quiet(per_group=True), every=every)
    training.start()
    before = Unread.asked
    for _ in range(4):
        training.batch()
    assert (Unread.asked, training.averager.norms_asked) == (before, 0)
    training.batch()
    assert training.averager.norms_asked == (1 if every else 0)
    assert (Unread.asked > before) == bool(every)


# - what is counted


def test_accumulated_batches_are_one_step_and_a_batch_may_be_two() -> None:
    training = Training(quiet(), every=1, accumulate_grad_batches=2)
    training.start()
    training.batch(steps=0)
    assert training.loggers[0].rows == []
    training.batch(loss=0.5)  # Lightning has divided it by two
    training.batch(steps=2)  # two optimizers
    run = training.monitor._notes
    assert (run.sums.steps, run.sums.sent_bytes) == (3, 300)
    assert [(point.step, point.sent_bytes, point.loss) for point in run.points] == [(0, 100, 1.0), (1, 300, 2.0)]


def test_the_time_of_a_step_leaves_out_validation_and_counts_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(time, "perf_counter", lambda: clock.now)
    training = Training(quiet(), every=1)
    training.start()
    clock.now += 100  # before the first batch
    for _ in range(2):
        clock.now += 1
        training.batch()  # which takes no time: all is loading
    training.monitor.on_validation_start(training.trainer, training.module)
    clock.now += 50
    training.batch()
    clock.now += 3
    training.batch()
    assert training.monitor._notes.sums.ms_step == 4000  # 1 s for the second batch, 3 s for the last


def test_the_monitor_says_when_there_is_nothing_to_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monitor = ls.CompressionMonitor()
    training = Training(monitor, strategy=SimpleNamespace(), log_dir=str(tmp_path), default_root_dir=str(tmp_path))
    monitor._save_picture = True
    with pytest.warns(UserWarning, match="CompressionMonitor has nothing to report"):
        training.run(5)
    assert training.trainer.callback_metrics == {}
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().out == ""
    with pytest.raises(ValueError, match="nothing to plot: no step was logged"):
        monitor.plot()


# - memory


def points(count: int) -> list[Point]:
    return [Point(i, float(i), 10 * i, 1 / (i + 1), 0.1, 1.0, 2.0) for i in range(count)]


@pytest.mark.parametrize("count", [1, MOST_POINTS, 5 * MOST_POINTS + 3])
def test_points_are_thinned_evenly_and_keep_both_ends(count: int) -> None:
    run = Notes()
    for point in points(count):
        run.note(point)
        assert len(run.points) <= MOST_POINTS
    series = [point.step for point in run.points]
    assert series[:1] == [0][:count]
    assert series[-1:] == [count - 1][:count]
    assert len(series) > min(count, MOST_POINTS) // 2 or count == 0
    gaps = {b - a for a, b in pairwise(series[:-1])}
    assert len(gaps) <= 1


def example(groups: int = 3, count: int = 40, losses: Sequence[float] | None = None, selects: bool = True) -> Notes:
    """A training of ``count`` logged steps."""
    run = Notes(Sums(400, 10**8, 10**10, 4000.0, 12000.0, 16000.0, 80000.0), expected_step_s=0.18, expected_span_s=0.1)
    for point in points(count):
        run.note(point._replace(loss=losses[point.step]) if losses else point)
    for _ in range(count):
        picked = (1.1, 1.0) if selects else (100, 100)
        run.note_groups([Selected(f"network.layers.{i}.attention", 100, *picked, 1) for i in range(groups)])
    run.times = [GroupTime(0.01 * i, 0.01 * i + 0.002, 0.01 * i + 0.03, 0.004) for i in range(groups)]
    run.note_planned(0.2)
    run.waiting = [
        Waiting(f"network.layers.{i}.attention.weight", 100, 10 * i, 0.5 * i, 6.0, 0.01 * i) for i in range(groups)
    ]
    return run


# - tables


def printed(what: Any) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_table_of_an_epoch_and_the_summary_are_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import rich

    monkeypatch.setattr(rich, "_console", Console(width=80))
    Training(ls.CompressionMonitor()).run(5)
    out = capsys.readouterr().out
    assert "epoch 0: means of 5 steps" in out
    assert "5 steps on rank 0" in out
    assert "…" not in out
    assert "2.1 %" in out
    Training(ls.CompressionMonitor(), is_global_zero=False).run(5)
    Training(quiet()).run(5)
    assert capsys.readouterr().out == ""


def test_short_epochs_have_a_table_together(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import rich

    monkeypatch.setattr(rich, "_console", Console(width=80))
    training = Training(ls.CompressionMonitor(summary=False))
    training.monitor.on_train_start(training.trainer, training.module)
    for epoch in range(12):
        training.trainer.current_epoch = epoch
        training.monitor.on_train_epoch_start(training.trainer, training.module)
        training.batch()
        training.monitor.on_train_epoch_end(training.trainer, training.module)
    assert re.findall(r"epoch.*rank 0", capsys.readouterr().out) == [
        "epochs 0 to 4: means of 5 steps on rank 0",
        "epochs 5 to 9: means of 5 steps on rank 0",
    ]


def test_the_summary_does_not_contradict_itself() -> None:
    """It never advises to send less and more at once, nor calls the network slow where nothing was sent."""
    notes = example()
    notes.advice = advice(ls.SparseDDPStrategy("micro").options)
    for starving in (0.0, 0.5):
        notes.waiting = [replace(notes.waiting[0], starving=starving)]
        notes.sums = Sums(steps=10, sent_bytes=1, dense_bytes=9, ms_step=1000, ms_wait=500, ms_network=400)
        said = " ".join(printed(summary(notes)).split())
        assert "Raise the density" not in said
        assert ("a lower density" in said) != bool(starving)
        assert ("Give layers a share of their own" in said) == bool(starving)
    notes.sums = replace(notes.sums, sent_bytes=0)
    said = printed(summary(notes))
    assert "Train for longer: nothing had been sent yet" in said
    assert "waiting" not in said.partition("gradients that wait longest")[0]


def test_where_nothing_was_chosen_or_compressed_compression_is_no_bottleneck() -> None:
    sums = Sums(steps=10, sent_bytes=8, dense_bytes=9, ms_step=1000, ms_wait=500, ms_compress=400)
    assert "compression was your bottleneck" in verdict(Notes(sums))
    assert "compression" not in verdict(Notes(replace(sums, sent_bytes=9)))
    undecided = verdict(Notes(sums, is_undecided=True))
    assert undecided.startswith("Use strategy='ddp' for a model so small, or train for longer: sparse_auto had chosen")


@pytest.mark.parametrize("more", ["ranks", "machines", "replicas"])
def test_where_there_is_nobody_to_send_to_it_says_more_of_what(more: str) -> None:
    notes = example()
    notes.sums, notes.members = Sums(steps=1, ms_step=10, ms_wait=3), more
    said = printed(summary(notes))
    assert f"or start more {more}: there was nobody to send to" in said
    assert "waiting for the network" not in said
    assert "1 step on rank 0" in said


OR_AUTO = ", or let 'sparse_auto' choose"
WAYS: list[tuple[Any, str]] = [
    (ls.SparseDDPStrategy("skip_reduce"), f"Send less (a higher skip, a shorter wire_dtype, local_steps){OR_AUTO}"),
    (ls.SparseDDPStrategy("low_rank"), f"Send less (a lower rank, a shorter wire_dtype, local_steps){OR_AUTO}"),
    (ls.SparseDDPStrategy("sparse_dense"), f"Send less (a shorter wire_dtype, local_steps){OR_AUTO}"),
    (ls.SparseDDPStrategy("sparse_auto"), "Use larger batches or accumulate_grad_batches, to exchange less often:"),
    *(
        (ls.SparseDDPStrategy(name), f"Send less (a lower density, local_steps){OR_AUTO}")
        for name in ("micro", "importance", "sketch_fusion", "ok_topk", "sparse_topk", "sparse_random_k")
    ),
    (ls.SparseDDPStrategy(ls.SkipReduce(skip=1), local_steps=4, wire_dtype="int4"), "Send less (more local_steps)"),
    (ls.SparseDDPStrategy(ls.MomentumCorrection(0.9, ls.LowRank(1))), f"Send less (a shorter wire_dtype){OR_AUTO}"),
    (ls.SparseDDPStrategy("micro", local_group=2), f"Send less (a lower density, local_steps){OR_AUTO}"),
    (ls.SparseDDPStrategy("micro", local_steps=2, elastic=True), "Send less (a lower density, more local_steps):"),
    (ls.SparseHSDPStrategy("micro"), f"Send less (a lower density, local_steps){OR_AUTO}"),
    (ls.SparseHSDPStrategy("sparse_dense", wire_dtype="sign"), f"Send less (local_steps){OR_AUTO}"),
    (ls.SparseHSDPStrategy("micro", local_steps=2), f"Send less (a lower density, more local_steps){OR_AUTO}"),
]


def test_every_name_of_a_strategy_is_advised() -> None:
    assert {type(strategy.options.compressor) for strategy, _ in WAYS} >= set(NAMES.values())


@pytest.mark.parametrize(("strategy", "less"), WAYS, ids=range(len(WAYS)))
def test_nothing_is_advised_that_the_strategy_does_not_have(strategy: Any, less: str) -> None:
    advised = advice(strategy.options)
    sums = Sums(steps=10, sent_bytes=1, dense_bytes=9, ms_step=1000, ms_wait=500, ms_network=400)
    assert re.match(less.replace("(", r"\(").replace(")", r"\)"), verdict(Notes(sums, advice=advised)))


@pytest.mark.parametrize(
    ("strategy", "more", "work"),
    [
        (
            ls.SparseDDPStrategy("micro"),
            "Keep these settings, or send more",
            "Compress with less work, as 'sparse_dense'",
        ),
        (ls.SparseDDPStrategy("sparse_dense"), "Keep these settings: ", "Use larger batches"),
        (
            ls.SparseDDPStrategy("sparse_dense", wire_dtype="int4"),
            "Keep these settings, or",
            "Compress .*='float32' does",
        ),
        (ls.SparseDDPStrategy("sparse_auto"), "Keep these settings: ", "Use larger batches"),
    ],
    ids=range(4),
)
def test_what_sends_all_or_compresses_least_is_not_told_to(strategy: Any, more: str, work: str) -> None:
    advised = advice(strategy.options)
    idle = Sums(steps=10, sent_bytes=1, dense_bytes=9, ms_step=1000, ms_wait=1, ms_network=1)
    busy = Sums(steps=10, sent_bytes=1, dense_bytes=9, ms_step=1000, ms_wait=500, ms_network=1, ms_compress=400)
    assert re.match(more, verdict(Notes(idle, advice=advised)))
    assert re.match(work, verdict(Notes(busy, advice=advised)))


def test_what_sends_all_is_called_by_its_name() -> None:
    notes = Notes(Sums(steps=1, sent_bytes=1, dense_bytes=9, ms_step=1), dense="dense HSDP")
    assert "dense HSDP" in printed(summary(notes))
    assert "dense DDP" not in printed(summary(notes))


def plan(groups: int = 3) -> Plan:
    cost = Cost(SizeCost(10, 0.001, 0.002, 0.003, 10), SizeCost(100, 0.002, 0.004, 0.006, 100))
    model = StepModel(tuple(0.01 * (i + 1) for i in range(groups)), ((100,),) * groups, (cost,))
    ends = tuple(range(1, groups + 1))
    names = tuple(f"l{i}.w" for i in range(groups))
    return Plan(model, names, ends, ends, rest_s=0.1, span_s=0.05, spans={"one": 0.05})


# - pictures


def drawn(figure: Any) -> dict[str, Any]:
    return {axis.get_title(loc="left"): axis for axis in figure.axes}


def test_a_picture_shows_what_was_noted() -> None:
    axes = drawn(draw(example()))
    assert [line.get_xdata()[-1] for line in axes["training loss"].lines] == [39] * 2  # s: single, mean
    dense, sent = axes["sent by rank 0"].lines
    assert dense.get_label() == "dense DDP"
    assert dense.get_ydata()[-1] == pytest.approx(1)  # GB
    assert sent.get_ydata()[-1] < 0.1
    assert axes["how far from the number of elements asked for"].lines[0].get_ydata()[0] == 10
    assert len(axes["residual, which later steps send"].lines[0].get_xdata()) == 40
    widths = [bar.get_width() for bar in axes["elements updated in a step"].patches]
    assert widths == pytest.approx([1.1] * 3)
    assert any(line.get_xdata()[0] == 100 for line in axes["one step"].lines)  # the expected end, in ms
    waits = axes["longest wait of a residual"]
    assert [bar.get_width() for bar in waits.patches] == [20, 10, 0]
    assert not waits.lines  # none has waited for 5 turns
    assert [bar.get_width() for bar in axes["residual of the same parameters"].patches] == [1, 0.5, 0]


@pytest.mark.parametrize("run", [example(groups=1, count=1), example(groups=20, losses=[math.nan] * 40)])
def test_odd_trainings_are_summed_up_drawn_and_told_to_a_parent_process(run: Notes) -> None:
    assert Notes.from_json(run.to_json()) == run or math.isnan(run.points[0].loss)
    assert "…" not in printed(summary(run))
    assert len(draw(run)._repr_png_()) > 10_000  # type: ignore[attr-defined]


def test_a_script_finds_the_picture_beside_its_logs_and_a_folder_that_cannot_be_written_ends_no_training(
    tmp_path: Path,
) -> None:
    options = {"log_dir": str(tmp_path / "logs"), "default_root_dir": str(tmp_path)}
    Training(quiet(plot=True), fast_dev_run=True, **options).run(5)
    assert not (tmp_path / "logs" / "compression.png").exists()
    Training(quiet(plot=True), **options).run(5)
    assert (tmp_path / "logs" / "compression.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="could not save what it noted"):
        Training(quiet(plot=True), log_dir=str(tmp_path / "file" / "logs")).run(5)


def test_without_matplotlib_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monitor = quiet()
    Training(monitor).run(5)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draws in (lambda: quiet(plot=True), monitor.plot, lambda: draw_timeline(plan(), [], tmp_path / "a.png")):
        with pytest.raises(ModuleNotFoundError, match=r"pip install matplotlib"):
            draws()


def test_what_a_child_process_noted_is_plotted_by_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor = quiet()
    child = pickle.loads(pickle.dumps(monitor))  # as _spawn does
    other_pid = monitor._pid + 1
    monkeypatch.setattr(os, "getpid", lambda: other_pid)
    Training(child).run(12)
    assert monitor._notes.points == []
    assert len(drawn(monitor.plot())) >= 5
    letter = monitor._letter
    assert letter.exists()
    del monitor, child
    gc.collect()
    assert not letter.exists()
