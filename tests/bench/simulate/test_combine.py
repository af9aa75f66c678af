from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lightning_sparse.bench.compare.peers import NO_COMMUNICATION
from lightning_sparse.bench.compare.records import MeasuredRun, MeasuredStep, Round
from lightning_sparse.bench.compare.until_loss import Reached, rows
from lightning_sparse.bench.output import json_line
from lightning_sparse.bench.simulate.combine import Pace, trainings
from lightning_sparse.bench.simulate.results import Result, Run
from lightning_sparse.cli import main

STEP = MeasuredStep(1.0, None, 10.0, None, None, None, None, 0.0, 0.0, 0.0)


def measured(strategy: str, number: int, seconds: Sequence[float], warmup: int = 2) -> Round:
    steps = [replace(STEP, s=s) for s in seconds]
    return Round("4x1gbit", strategy, number, 4, warmup, MeasuredRun("cpu", 1, 1000, 1, steps))


def simulated(strategy: str, losses: Sequence[float], ranks: int = 4, rate: float = 0.1, seed: int = 0) -> Result:
    curve = [(10 * (i + 1), loss) for i, loss in enumerate(losses)]
    return Result(Run(strategy, ranks, 10 * len(losses), rate, seed), losses[-1], curve, 1.0, 1.0)


ROUNDS = [
    measured(NO_COMMUNICATION, 0, [1, 1, 1, 1]),
    measured("ddp", 0, [5, 3, 2, 2]),
    measured("powersgd_4", 0, [1, 1, 1, 1]),
    replace(measured("micro", 0, []), run=None, error="no luck"),
]


def test_a_pace_is_the_mean_of_timed_steps_and_what_the_first_took_beyond() -> None:
    pace = Pace.of(
        [measured("ddp", 0, [5, 3, 1, 3]), measured("ddp", 1, [5, 4, 2, 2]), measured("ddp", 2, [9, 9, 4, 4])]
    )
    assert pace == Pace(first_s=5, step_s=2, step_bytes=10)  # medians of 4, 5, 10, and of 2, 2, 4
    assert pace.course([(100, 3.0)]).until(3.0) == Reached(205, 100, 1000)


def test_steps_to_a_loss_lie_on_lines_between_points() -> None:
    curve = [(10, 4.0), (20, 3.0), (30, 3.2), (40, 2.0)]
    course = Pace(0, 1, 1).course(curve)
    assert [course.until(x).steps for x in (4.5, 4.0, 3.25, 3.0, 2.6)] == pytest.approx([10, 10, 17.5, 20, 35])
    assert course.until(1.9).steps == math.inf


def test_seconds_to_a_loss_are_those_of_the_best_rate_over_its_seeds() -> None:
    results = [
        simulated("ddp", [4, 3]),
        simulated("ddp", [3.5, 2.5], rate=0.2),
        *(simulated("ddp", [4, last], rate=0.2, seed=seed) for seed, last in ((1, 2.0), (2, 3.2))),
        simulated("ddp", [4, 3.8], ranks=1),
        simulated("sparse_dense", [4, 3]),  # not measured
    ]
    found = rows(trainings(ROUNDS, results), [3.0, 1.0])
    assert {cluster: list(of) for cluster, of in found.items()} == {"4x1gbit": [NO_COMMUNICATION, "ddp"]}
    row = found["4x1gbit"]["ddp"]
    assert (row.rate, row.last) == ("0.2*", 2.5)
    assert row.to_each[0] == Reached(4 + 2 * 15, 15, 150)  # of 15, 15 and infinitely many steps
    assert row.to_each[1].seconds == math.inf
    assert row.in_all == Reached(44, 20, 200)
    assert found["4x1gbit"][NO_COMMUNICATION].last == 3.8


# --- the command line


def test_command_combines_two_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bench, simulate = tmp_path / "now.jsonl", tmp_path / "simulate.jsonl"
    lines = [json_line("environment", {"workload": "byte_lm"}), *(json_line("round", each) for each in ROUNDS)]
    bench.write_text("".join(lines))
    simulate.write_text(json.dumps(asdict(simulated("ddp", [4, 3]))) + "\n")
    words = ["bench", "--simulate", f"{bench},{simulate}", "--until-loss", "3.5", "--output", str(tmp_path)]
    assert main(words) == 0
    page = (tmp_path / "now-simulated.md").read_text()
    for text in (page, capsys.readouterr().out):
        assert "Seconds to a loss on 4x1gbit" in text
        assert "34.0" in text
    assert "- measured, not simulated: no_communication, powersgd_4, micro" in page


@pytest.mark.parametrize(
    ("environment", "until_loss", "message"),
    [
        ({"workload": "gpt_10m"}, "3", r"must be of --workload byte_lm, .*; it is of gpt_10m"),
        ({"workload": "byte_lm"}, "3", r"must have strategies that .* has, on as many ranks"),
        (None, "3", r"--simulate must be two files, BENCH.jsonl,SIMULATE.jsonl"),
        (None, "", r"--simulate needs --until-loss"),
    ],
)
def test_bad_files_are_named_with_what_they_must_be(
    environment: dict[str, str] | None,
    until_loss: str,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bench, simulate = tmp_path / "now.jsonl", tmp_path / "simulate.jsonl"
    if environment:
        bench.write_text(json_line("environment", environment) + json_line("round", ROUNDS[1]))
        simulate.write_text("")
    assert main(["bench", "--simulate", f"{bench},{simulate}", "--until-loss", until_loss]) == 2
    assert re.search(message, capsys.readouterr().err)
