"""The stored figures and the pages of results are what their scripts make of the stored runs."""

import functools
import importlib
import json
import re
from pathlib import Path

import pytest

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


def test_results_are_what_the_stored_runs_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results, runs = importlib.import_module("results"), importlib.import_module("runs")
    monkeypatch.setattr(runs, "read", functools.cache(runs.read))  # and sum each up once
    for page, text in results.pages(runs.stored(), tmp_path).items():
        assert page.read_text() == text, "make results"
    assert_as_stored(tmp_path)


def test_a_newer_run_takes_the_place_of_an_older_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    runs = importlib.import_module("runs")
    older = DOCS / "benchmarks" / "2026-11-21-075200-mlp_25m.jsonl"
    lines = [json.loads(line) for line in older.read_text().splitlines()]
    lines[0]["command"] += " --output somewhere/else"
    new = tmp_path / "2026-12-01-000000-mlp_25m.jsonl"
    new.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(runs, "BENCHMARKS", tmp_path / "stored")
    (tmp_path / "stored").mkdir()
    (tmp_path / "stored" / older.name).write_text(older.read_text())
    runs.store(new)
    newest = runs.newest(runs.stored())["mlp_25m", "4x100mbit"]
    assert newest.name == new.stem
    assert "--output" not in newest.environment["command"]
    interrupted = [line for line in lines if line["kind"] != "summary"]  # newer still, but not complete
    (tmp_path / "stored" / "2026-12-02-000000-mlp_25m.jsonl").write_text(
        "".join(json.dumps(x) + "\n" for x in interrupted)
    )
    assert runs.newest(runs.stored())["mlp_25m", "4x100mbit"].name == new.stem
