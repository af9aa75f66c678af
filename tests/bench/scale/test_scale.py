"""Many ranks: what is counted, modelled, fitted and drawn."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.progress import Progress

import lightning_sparse as ls
from lightning_sparse.bench.cluster import ClusterError
from lightning_sparse.bench.compare import run
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.scale import ranks, scale
from lightning_sparse.bench.scale.ranks import Measurement, StepTraffic, count_traffic, fit, measured_points, model_s
from lightning_sparse.cli import main
from lightning_sparse.cli.options import Scale
from lightning_sparse.fusion.costs import Link

# --- counting


@pytest.mark.parametrize("name", ls.COMPRESSORS)
def test_counted_bytes_are_those_of_simulate(name: str) -> None:
    n, size = 5000, 4
    scale = ranks.scales(n)
    given = torch.zeros(ranks.STEPS, size, n)
    for step, of_step in enumerate(given):
        for rank, own in enumerate(of_step):
            ranks.add_gradient(own, scale, step, rank)
    sent = ls.simulate(name, given).sent_bytes[-1]  # [P]
    found = count_traffic(name, size, n)
    assert sent.tolist() == [found.sent_bytes] * size
    assert (found.strategy, found.ranks, found.elements) == (name, size, n)


def test_bytes_and_hops_of_an_all_reduce() -> None:
    found = [count_traffic("sparse_dense", size, 1000) for size in (2, 4, 8)]
    assert [(f.ranks, f.sent_bytes, f.hops) for f in found] == [
        (2, 4000, 1),  # few bytes to everybody
        (4, 12000, 1),
        (8, 7000, 2),
    ]


def test_gradients_get_shorter_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "MOST_FLOATS", 4 * 20_000)
    few, many = (count_traffic("micro", size, 20_000) for size in (4, 8))
    assert (few.elements, many.elements) == (20_000, 10_000)
    assert scale._modelled(many, 20_000, Link(0, 1)).seconds == 2 * many.sent_bytes


# --- the model


def test_modelled_seconds_by_hand() -> None:
    link = Link(latency_s=0.001, s_per_byte=8e-9)  # 1 Gbit/s
    assert model_s(6, 1_500_000, link) == pytest.approx(0.006 + 0.012)


def points(link: Link) -> tuple[list[Measurement], list[StepTraffic]]:
    counts = [count_traffic(name, size, 100_000) for name in ("sparse_dense", "micro") for size in (2, 4, 8)]
    measured = [Measurement(c.strategy, c.ranks, c.sent_bytes, model_s(c.hops, c.sent_bytes, link)) for c in counts]
    return measured, counts


def test_a_fit_recovers_a_link() -> None:
    link = Link(latency_s=0.003, s_per_byte=8e-9)
    measured, counts = points(link)
    first = measured[0]
    measured[0] = replace(first, strategy="ddp", seconds=model_s(2, first.sent_bytes, link))  # round a ring of two
    found = fit(measured, counts)
    assert found is not None
    assert found.link.latency_s == pytest.approx(link.latency_s)
    assert found.link.s_per_byte == pytest.approx(link.s_per_byte)
    assert found.points == 6
    assert found.rms_s < 1e-9

    noisy = [replace(each, seconds=each.seconds + miss) for each, miss in zip(measured, [1e-4, -1e-4] * 3, strict=True)]
    found = fit(noisy, counts)
    assert found is not None
    assert found.link.latency_s == pytest.approx(link.latency_s, rel=0.1)
    assert 1e-5 < found.rms_s < 1e-4


def test_no_part_of_a_fitted_link_is_negative() -> None:
    measured, counts = points(Link(0.0, 8e-9))
    less = [replace(m, seconds=max(m.seconds - 1e-4 * c.hops, 0.0)) for m, c in zip(measured, counts, strict=True)]
    found = fit(less, counts)
    assert found is not None
    assert found.link.latency_s == 0
    assert found.link.s_per_byte > 0


def test_too_few_points_are_not_fitted() -> None:
    measured, counts = points(Link(0.0003, 8e-9))
    assert fit([], counts) is None
    assert fit(measured[:1] * 2, counts) is None


def test_what_the_bench_measured_of_communication() -> None:
    def row(**values: Any) -> Any:
        known = {"strategy": "micro:fusion=bucket", "ranks": 4, "counted_bytes": 100, "ms_compress": 10.0}
        return argparse.Namespace(**{**known, "s": argparse.Namespace(value=0.1), **values})

    found = measured_points(
        [
            row(s_without_communication=0.05),
            row(s_without_communication=0.05, strategy="ddp", ms_compress=None),
            row(s_without_communication=0.2),
            row(s_without_communication=None),
            row(s_without_communication=0.05, counted_bytes=0),
        ]
    )
    assert [(each.strategy, each.seconds) for each in found] == [
        ("micro", pytest.approx(0.04)),
        ("ddp", pytest.approx(0.05)),
        ("micro", 0),
    ]


# --- the command


def arguments(folder: Path, **values: Any) -> Scale:
    known: dict[str, Any] = {"emulate": "", "link": "1gbit", "most": 16, "output": folder, "command": "scale"}
    return Scale(**{**known, **values})


def test_a_picture_of_counted_and_measured_points(tmp_path: Path) -> None:
    modelled, _ = points(Link(0.0003, 8e-9))
    measured = [replace(modelled[0], strategy="ddp", seconds=0.0)]  # not to be had on an axis of logarithms
    for name in ("scale.svg", "again/scale.svg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        scale.draw(modelled, measured, 100_000, tmp_path / name, "made up")
    drawn = (tmp_path / "scale.svg").read_bytes()
    assert len(drawn) > 10_000
    assert (tmp_path / "again/scale.svg").read_bytes() == drawn


def test_the_command_writes_what_it_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "count_parameters", lambda workload: 4096)
    monkeypatch.setattr(ranks, "STEPS", 2)
    assert scale.scale(arguments(tmp_path)) == 0
    (path,) = tmp_path.glob("*-scale.json")
    written = json.loads(path.read_text())
    assert {each["strategy"] for each in written["counted"]} == ls.COMPRESSORS.keys()
    assert {each["ranks"] for each in written["counted"]} == {2, 4, 8, 16}
    assert all(each["modelled_s"] > 0 for each in written["counted"])
    assert path.with_suffix(".svg").exists()
    shown = capsys.readouterr().out
    assert "sparse_dense" in shown
    assert "link as given: 0.20 ms a hop, 1,000 Mbit/s" in shown


def test_measured_points_are_fitted_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [Measurement("ddp", 2, 80_000, 0.001), Measurement("micro", 4, 2_000, 0.002)]
    monkeypatch.setattr(scale, "count_parameters", lambda workload: 4096)
    monkeypatch.setattr(run, "unavailable_reason", lambda: None)
    broken = Round("4x1gbit", "micro", 0, 4, 1, None, "it broke")
    monkeypatch.setattr(scale, "measure_all", lambda *given: given[-1].append(broken))
    monkeypatch.setattr(scale, "measured_points", lambda rows: measured)
    assert scale.scale(arguments(tmp_path, emulate="1gbit", most=4)) == 1
    shown = capsys.readouterr().out
    assert "link fitted to 2 points measured at 1gbit: " in shown
    assert "(2.0)" in shown
    assert "it broke" in shown

    measured.clear()  # what was counted is not lost
    assert scale.scale(arguments(tmp_path, emulate="100mbit", most=4)) == 1
    assert "link as given: 0.20 ms a hop, 100 Mbit/s; too little was measured to fit one" in capsys.readouterr().out


def test_what_the_bench_measures(tmp_path: Path) -> None:
    schedules = scale.schedules(arguments(tmp_path, emulate="1gbit", most=1024))
    assert [schedule.cluster for schedule in schedules] == ["2x1gbit", "4x1gbit", "8x1gbit", "16x1gbit"]
    assert [row.label for _, row in schedules[0].turns()][1:3] == ["ddp", "skip_reduce:fusion=bucket"]
    assert scale.schedules(arguments(tmp_path)) == []
    found: list[Round] = []
    with Progress(disable=True) as progress:
        path = tmp_path / "rounds.jsonl"
        run.measure_all(
            schedules, lambda each: (Round(each.cluster, "ddp", 0, 4, 1, None) for _ in "a"), {}, path, progress, found
        )
    assert [each.cluster for each in found] == [schedule.cluster for schedule in schedules]
    assert len(path.read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"most": 2000}, "--most must be a number of ranks from 2 to 1024; got 2000"),
        ({"emulate": "4x1gbit"}, "--emulate: a rate must be .*; got '4x1gbit'"),
        ({"link": "fast"}, "--link: a rate must be .*; got 'fast'"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale.scale(arguments(tmp_path, **values))


def test_where_nothing_can_be_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "unavailable_reason", lambda: "no root")
    with pytest.raises(ClusterError, match="no root"):
        scale.scale(arguments(tmp_path, emulate="1gbit"))


def test_sizes_are_powers_of_two(tmp_path: Path) -> None:
    assert scale.sizes(arguments(tmp_path, most=64)) == [2, 4, 8, 16, 32, 64]
    assert scale.sizes(arguments(tmp_path, most=1000))[-1] == 512


def test_the_words_of_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scale", "--link", "100mbit", "--most", "1", "--output", str(tmp_path)]) == 2
    assert "--most must be a number of ranks from 2 to 1024; got 1" in capsys.readouterr().err
