"""The stored figures and the pages of results are what their scripts make of the stored runs."""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from lightning_sparse.bench.compare import until_loss
from lightning_sparse.bench.compare.records import MeasuredRun, MeasuredStep, Round
from lightning_sparse.bench.compare.report import summarise, tables
from lightning_sparse.bench.output import environment, json_line, markdown

DOCS = Path(__file__).parents[1] / "docs"
DRAWINGS = ("way_of_a_gradient", "gradient_that_waits", "fusion_timeline", "choosing", "two_hops", "local_steps")


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """They import each other, and matplotlib may not be installed."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(DOCS / "figures"))


def assert_as_stored(folder: Path) -> None:
    """Every figure in ``folder`` shows the same words and numbers as the stored one; places depend on matplotlib."""
    drawn = sorted(folder.glob("*.svg"))
    assert drawn
    for figure in drawn:
        shown, stored = (
            [*re.findall(r">([^<>\n]+)</text>", f.read_text())] for f in (figure, DOCS / "figures" / figure.name)
        )
        assert shown == stored, f"{figure.name}: run its script, or make results"


@pytest.mark.parametrize("name", DRAWINGS)
def test_figures_are_what_their_scripts_draw(name: str, tmp_path: Path) -> None:
    importlib.import_module(name).draw(tmp_path)
    assert_as_stored(tmp_path)


def test_results_are_what_the_stored_summaries_say(tmp_path: Path) -> None:
    results, runs = importlib.import_module("results"), importlib.import_module("runs")
    for page, text in results.pages(runs.stored(), tmp_path).items():
        assert text == page.read_text(), "make results"
    assert_as_stored(tmp_path)


def test_stored_runs_are_summaries() -> None:
    assert sum(file.stat().st_size for file in (DOCS / "benchmarks").glob("*.jsonl")) < 2e6


def trained(strategy: str, number: int, seconds: float, rate: float, judged: bool) -> Round:
    """A training whose steps take longer and longer, and whose loss falls."""
    step = MeasuredStep(0, 2.0, 1e6 / 7, 1.1e6, 800, None, None, 3.0, 2.0, 1.0)
    steps = [
        replace(step, s=seconds * (1 + i / 7), held_out=5 - 100 * rate * i if judged and i % 2 else None)
        for i in range(8)
    ]
    return Round("4x1gbit", strategy, number, 4, 2, MeasuredRun("cpu", 1, 1000, 1, steps), learning_rate=rate)


def raw_run(file: Path, rounds: list[Round], losses: list[float]) -> Path:
    """What ``lightning-sparse bench`` writes."""
    facts = environment("lightning-sparse bench --output somewhere/else --steps 8")
    facts |= {"workload": "mlp_1m", "strategies": "ddp,micro", **({"until_loss": losses} if losses else {})}
    rows = summarise(until_loss.at_best_rates(rounds, losses), "ddp")
    lines = [json_line("environment", facts), *(json_line("round", each) for each in rounds)]
    file.write_text("".join([*lines, *(json_line("summary", row) for row in rows)]))
    return file


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The script, which stores runs in a folder of the test."""
    module = importlib.import_module("runs")
    monkeypatch.setattr(module, "BENCHMARKS", tmp_path / "stored")
    (tmp_path / "stored").mkdir()
    return module


@pytest.mark.parametrize("losses", [[], [4.5, 1.0]], ids=["steps", "until a loss"])
def test_a_summary_gives_the_tables_of_its_raw_run(losses: list[float], runs: ModuleType, tmp_path: Path) -> None:
    turns = [("ddp", 0, 0.31, 1e-3), ("ddp", 1, 0.4, 1e-3), ("micro", 0, 0.11, 1e-3), ("micro", 1, 0.13, 1e-3)]
    rounds = [trained(*turn, judged=bool(losses)) for turn in turns]
    if losses:
        rounds += [trained("micro", 0, 0.11, 2e-3, judged=True), trained("micro", 1, 0.12, 2e-3, judged=True)]
    rounds.append(Round("4x1gbit", "powersgd_1", 0, 4, 2, None, "RuntimeError: no luck"))
    run = runs.read(runs.store(raw_run(tmp_path / "raw.jsonl", rounds, losses)))
    rows = [row for own in run.summaries.values() for row in own.values()]
    shown = [*tables(rows, "mlp_1m"), *until_loss.tables(run.reached, losses)]
    raw = tables(summarise(until_loss.at_best_rates(rounds, losses), "ddp"), "mlp_1m")
    raw += until_loss.tables(until_loss.rows(rounds, losses), losses)
    assert [table.title for table in shown] == [table.title for table in raw]
    assert [*map(markdown, shown)] == [*map(markdown, raw)]
    assert len(shown) == (2 if losses else 1)


def test_a_newer_run_takes_the_place_of_an_older_one(runs: ModuleType, tmp_path: Path) -> None:
    rounds = [trained("ddp", 0, 0.3, 1e-3, judged=False)]
    for day in ("01", "02"):
        runs.store(raw_run(tmp_path / f"2026-12-{day}-000000-mlp_1m.jsonl", rounds, []))
    newest = runs.newest(runs.stored())["mlp_1m", "4x1gbit"]
    assert newest.name == "2026-12-02-000000-mlp_1m"
    assert newest.environment["command"] == "lightning-sparse bench --steps 8"


def test_a_run_that_was_interrupted_is_not_stored(runs: ModuleType, tmp_path: Path) -> None:
    raw = raw_run(tmp_path / "raw.jsonl", [trained("ddp", 0, 0.3, 1e-3, judged=False)], [])
    raw.write_text("".join(raw.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(SystemExit, match="interrupted"):
        runs.store(raw)
    assert not runs.stored()
