"""Many ranks: what is counted, modelled, fitted and drawn."""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import lightning_sparse as ls
from lightning_sparse.bench import scale, scale_plot, scale_ranks
from lightning_sparse.bench.cluster import ClusterUnavailableError
from lightning_sparse.bench.report import Round
from lightning_sparse.bench.scale_model import Measured, fit, growth, measured_points, model_s, scaled_bytes
from lightning_sparse.bench.scale_ranks import CountingNetwork, Traffic, count
from lightning_sparse.comm import Comm, Rounds
from lightning_sparse.group import Group
from lightning_sparse.rehearsal import Link

COUNT = Traffic("sparse_dense", 4, 1000, 6000, 6000.0, 1, 6)


# --- counting


@pytest.mark.parametrize("name", ls.COMPRESSORS)
def test_counted_bytes_are_those_of_simulate(name: str) -> None:
    n, size = 5000, 4
    gradients = scale_ranks._Gradients(n)
    given = torch.zeros(scale_ranks.STEPS, size, n)
    for step, of_step in enumerate(given):
        for rank, own in enumerate(of_step):
            gradients.add_to(own, step, rank)
    sent = ls.simulate(name, given).sent_bytes[-1]  # [P]
    (found,) = count(name, [size], n)
    assert (found.most_bytes, found.mean_bytes) == (int(sent.max()), float(sent.double().mean()))
    assert (found.strategy, found.ranks, found.elements) == (name, size, n)


def test_messages_and_hops_of_an_all_reduce() -> None:
    found = list(count("sparse_dense", [2, 4, 8], 1000))
    assert [(f.ranks, f.most_bytes, f.messages, f.hops) for f in found] == [
        (2, 4000, 1, 2),
        (4, 6000, 1, 6),
        (8, 7000, 1, 14),
    ]


@pytest.mark.parametrize("name", ls.COMPRESSORS)
def test_ranks_that_take_up_where_fewer_ended_send_as_much(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, in_full = count(name, [4, 8], 20_000)
    monkeypatch.setattr(scale_ranks, "FEW_RANKS", 4)
    *_, taken_up = count(name, [4, 8], 20_000)
    assert taken_up.most_bytes == pytest.approx(in_full.most_bytes, rel=0.03)
    assert abs(taken_up.messages - in_full.messages) <= 1  # Ok-Topk evens out where it must


def test_gradients_get_shorter_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale_ranks, "FEW_RANKS", 4)
    monkeypatch.setattr(scale_ranks, "MOST_FLOATS", 4 * 20_000)
    few, many = count("micro", [4, 8], 20_000)
    assert (few.elements, many.elements) == (20_000, 10_000)
    assert scaled_bytes(many, 20_000) == 2 * many.most_bytes


@pytest.mark.parametrize(
    ("compressor", "sizes", "elements", "message"),
    [
        ("micro", [2, 4], 0, "elements=0"),
        ("micro", [1, 2], 10, r"sizes=\[1, 2\]"),
        ("micro", [2, 6], 10, r"sizes=\[2, 6\]"),
        ("micro", [], 10, r"sizes=\[\]"),
        ("macro", [2], 10, "compressor='macro' is not one of"),
    ],
)
def test_what_cannot_be_counted_is_named(compressor: str, sizes: list[int], elements: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(count(compressor, sizes, elements))


@dataclass(frozen=True)
class Disagreeing(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        return (yield comm.all_reduce(group.unsent[: 3 + comm.rank].clone()))


@dataclass(frozen=True)
class OneMore(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        if comm.rank == 1:
            yield comm.all_reduce(group.unsent.clone())
        return (yield comm.all_reduce(group.unsent.clone()))


@pytest.mark.parametrize(
    ("compressor", "message"), [(Disagreeing(), "rank 1 launched"), (OneMore(), "only 1 of 2 ranks launched")]
)
def test_ranks_that_disagree_are_found(compressor: ls.Compressor, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        list(count(compressor, [2], 10))


def test_results_of_messages() -> None:
    def each(comm: Comm, got: list[Any]) -> Rounds:
        own = torch.tensor([float(comm.rank)])
        got.append((yield comm.shift(own, by=2)).item())
        got.append((yield comm.all_gather(own)).flatten().tolist())
        got.append((yield comm.broadcast(own.clone(), source=1)).item())
        total = yield comm.all_reduce(own)
        got.append(total.item())
        return total

    network = CountingNetwork(3)
    results: list[list[Any]] = [[], [], []]
    network.run([each(comm, got) for comm, got in zip(network.comms, results, strict=True)])
    assert results == [[(rank - 2) % 3, [0, 1, 2], 1, 3] for rank in range(3)]


# --- the model


def test_modelled_seconds_by_hand() -> None:
    link = Link(latency_s=0.001, s_per_byte=8e-9)  # 1 Gbit/s
    assert model_s(6, 1_500_000, 4, link) == pytest.approx(0.006 + 0.012)
    assert model_s(100, 0, 4, link) == pytest.approx(0.012)  # 4 times round the ring
    with pytest.raises(ValueError, match="ranks=1"):
        model_s(0, 0, 1, link)


def points(link: Link) -> tuple[list[Measured], list[Traffic]]:
    counts = list(count("sparse_dense", [2, 4, 8], 100_000)) + list(count("micro", [2, 4, 8], 100_000))
    measured = [
        Measured(c.strategy, c.ranks, c.most_bytes, model_s(c.hops, c.most_bytes, c.ranks, link)) for c in counts
    ]
    return measured, counts


def test_a_fit_recovers_a_link() -> None:
    link = Link(latency_s=0.0003, s_per_byte=8e-9)
    measured, counts = points(link)
    measured[0] = replace(measured[0], strategy="ddp")  # whose hops are dense's
    found = fit(measured, counts)
    assert found.link.latency_s == pytest.approx(link.latency_s)
    assert found.link.s_per_byte == pytest.approx(link.s_per_byte)
    assert found.points == 6
    assert found.rms_s < 1e-9
    assert found.median_share < 1e-6

    noisy = [replace(each, seconds=each.seconds + miss) for each, miss in zip(measured, [1e-4, -1e-4] * 3, strict=True)]
    found = fit(noisy, counts)
    assert found.link.latency_s == pytest.approx(link.latency_s, rel=0.1)
    assert 1e-5 < found.rms_s < 1e-4


def test_no_part_of_a_fitted_link_is_negative() -> None:
    measured, counts = points(Link(0.0, 8e-9))
    found = fit([replace(each, seconds=max(each.seconds - 1e-4 * each.ranks, 0.0)) for each in measured], counts)
    assert found.link.latency_s == 0
    assert found.link.s_per_byte > 0


def test_what_cannot_be_fitted_is_named() -> None:
    measured, counts = points(Link(0.0003, 8e-9))
    with pytest.raises(ValueError, match="0 measured points do not tell"):
        fit([], counts)
    with pytest.raises(ValueError, match="2 measured points do not tell"):
        fit(measured[:1] * 2, counts)
    with pytest.raises(ValueError, match="measured 'micro' on 16 ranks"):
        fit([*measured, replace(measured[-1], ranks=16)], counts)


def test_growth_of_dense_is_a_quarter() -> None:
    counts = list(count("sparse_dense", [4, 8, 16], 1024))
    flat = [replace(each, strategy="flat", most_bytes=100) for each in counts]
    found = growth([*counts, *flat])
    assert found["sparse_dense"].plain == pytest.approx(0.25)
    assert found["sparse_dense"].of_dense == 0
    assert found["flat"].plain == 0
    assert found["flat"].of_dense == pytest.approx(-0.2)


def test_growth_without_its_counts_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'sparse_dense' was not counted among 16 ranks, only among \[4\]"):
        growth([COUNT])
    with pytest.raises(ValueError, match="1000 and 500 elements"):
        growth([COUNT, replace(COUNT, ranks=16, elements=500)])


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


def asked(folder: Path, **values: Any) -> scale.Asked:
    known: dict[str, Any] = {"emulate": "", "link": "1gbit", "most": 16, "output": folder, "command": "scale"}
    return scale.Asked(**{**known, **values})


def test_a_picture_of_counted_and_measured_points(tmp_path: Path) -> None:
    link = Link(0.0003, 8e-9)
    measured, counts = points(link)
    measured.append(replace(measured[0], strategy="ddp", seconds=0.0))  # not to be had on an axis of logarithms
    for name in ("scale.svg", "scale.png"):
        scale_plot.draw(counts, measured, link, 100_000, tmp_path / name, "made up")
        assert (tmp_path / name).stat().st_size > 10_000
    drawn = (tmp_path / "scale.svg").read_bytes()
    scale_plot.draw(counts, measured, link, 100_000, tmp_path / "scale.svg", "made up")
    assert (tmp_path / "scale.svg").read_bytes() == drawn


def test_the_command_writes_what_it_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scale, "parameter_sizes", lambda workload: [4096])
    monkeypatch.setattr(scale_ranks, "STEPS", 2)
    assert scale.scale(asked(tmp_path)) == 0
    (path,) = tmp_path.glob("*-scale.json")
    told = json.loads(path.read_text())
    assert {each["strategy"] for each in told["counted"]} == ls.COMPRESSORS.keys()
    assert {each["ranks"] for each in told["counted"]} == {2, 4, 8, 16}
    assert all(each["modelled_s"] > 0 for each in told["counted"])
    assert told["growth"]["sparse_dense"]["plain"] == pytest.approx(0.25)
    assert path.with_suffix(".svg").exists()
    shown = capsys.readouterr().out
    assert "+25.0%" in shown
    assert "link as given: 0.20 ms a hop, 1,000 Mbit/s" in shown


def test_measured_points_are_fitted_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = [Measured("ddp", 2, 80_000, 0.001), Measured("micro", 4, 2_000, 0.002)]
    monkeypatch.setattr(scale, "parameter_sizes", lambda workload: [4096])
    monkeypatch.setattr(scale, "unavailable_reason", lambda: None)
    monkeypatch.setattr(scale, "_measure", lambda *_: [Round("4x1gbit", "micro", 0, 4, 1, None, "it broke")])
    monkeypatch.setattr(scale, "measured_points", lambda rows: measured)
    assert scale.scale(asked(tmp_path, emulate="1gbit", most=4)) == 1
    shown = capsys.readouterr().out
    assert "link fitted to 2 points measured at 1gbit: " in shown
    assert "(2.0)" in shown
    assert "it broke" in shown

    measured.clear()  # what was counted is not lost
    assert scale.scale(asked(tmp_path, emulate="100mbit", most=4)) == 1
    assert "link as given: 0.20 ms a hop, 100 Mbit/s; too little was measured to fit one" in capsys.readouterr().out


def test_what_the_bench_is_told_to_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plans = []

    def emulate(plan: Any) -> Any:
        plans.append(plan)
        plan.contenders()
        yield Round(plan.cluster, "ddp", 0, 4, 1, None)

    monkeypatch.setattr("lightning_sparse.bench.run.emulate", emulate)
    with (tmp_path / "rounds.jsonl").open("w") as file, scale._progress(Console(quiet=True)) as progress:
        rounds = scale._measure(asked(tmp_path, emulate="1gbit", most=1024), file, progress)
    assert (
        [plan.cluster for plan in plans] == ["2x1gbit", "4x1gbit", "8x1gbit", "16x1gbit"] == [r.cluster for r in rounds]
    )
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 5


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"most": 1}, "--most 1 is not a number of ranks from 2 to 1,024"),
        ({"most": 2000}, "--most 2000 is not"),
        ({"emulate": "4x1gbit"}, "--emulate is the rate of a link: bad rate '4x1gbit'"),
        ({"link": "fast"}, "--link is the rate of a link: bad rate 'fast'"),
    ],
)
def test_bad_input_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale.scale(asked(tmp_path, **values))


def test_where_nothing_can_be_emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "unavailable_reason", lambda: "no root")
    with pytest.raises(ClusterUnavailableError, match="no root"):
        scale.scale(asked(tmp_path, emulate="1gbit"))


def test_the_words_of_the_command() -> None:
    parser = argparse.ArgumentParser()
    scale.add_scale_command(parser.add_subparsers(dest="command"))
    told = parser.parse_args(["scale", "--emulate", "100mbit", "--most", "64"])
    assert (told.command, told.emulate, told.link, told.most) == ("scale", "100mbit", "1gbit", 64)
    assert asked(told.output, most=told.most).sizes() == [2, 4, 8, 16, 32, 64]
    assert asked(told.output, most=1000).sizes()[-1] == 512
