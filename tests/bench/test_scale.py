"""Many ranks: what is counted, modelled and written."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.bench import scale as scaling
from lightning_sparse.bench.scale import StepTraffic, count_traffic
from lightning_sparse.network.costs import Link
from lightning_sparse_cli import Scale, main


@pytest.mark.parametrize("name", ls.COMPRESSORS)
def test_counted_bytes_are_those_of_simulate(name: str) -> None:
    n, size = 5000, 4
    scale = scaling.scales(n)
    given = torch.zeros(scaling.STEPS, size, n)
    for step, of_step in enumerate(given):
        for rank, own in enumerate(of_step):
            scaling.add_gradient(own, scale, step, rank)
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


def test_modelled_seconds_by_hand() -> None:
    count = StepTraffic("micro", 4, 1000, sent_bytes=1_500_000, hops=6)
    assert scaling.modelled_s(count, Link(0.001, 8e-9)) == pytest.approx(0.006 + 0.012)  # 1 Gbit/s


def test_the_command_writes_what_it_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling, "count_parameters", lambda workload: 4096)
    monkeypatch.setattr(scaling, "STEPS", 2)
    assert main(["scale", "--most", "20", "--output", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*-scale.json")
    written = json.loads(path.read_text())
    assert {each["strategy"] for each in written["counted"]} == ls.COMPRESSORS.keys()
    assert {each["ranks"] for each in written["counted"]} == {2, 4, 8, 16}
    assert all(each["modelled_s"] > 0 for each in written["counted"])
    shown = capsys.readouterr().out
    assert "sparse_dense" in shown
    assert "1gbit and 0.20 ms a hop" in shown


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"most": 2000}, "--most must be a number of ranks from 2 to 256; got 2000"),
        ({"link": "fast"}, "a rate must be .*; got 'fast'"),
        ({"link": "2x1gbit"}, "a rate must be .*; got '2x1gbit'"),
    ],
)
def test_bad_input_is_named(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scaling.check(replace(Scale(), **changed))  # type: ignore[arg-type]
