"""What a rank's own milliseconds are spent on, without a network."""

import time

import pytest

import lightning_sparse as ls
from lightning_sparse.bench.account import PHASES, REST, STEP, Clock, account, main
from lightning_sparse.selection import host as select


@pytest.mark.parametrize("name", ls.COMPRESSORS)
def test_phases_add_up_to_the_step(name: str) -> None:
    ms = account(ls.COMPRESSORS[name](), elements=20_000, ranks=4)
    assert set(ms) == {*PHASES, REST, STEP}
    assert 0 < ms["add"] < ms[STEP]
    assert 0 < ms["hand back"] < ms[STEP]
    if name in {"micro", "ok_topk", "sparse_topk", "sketch_fusion"}:
        assert ms["select"] > 0
    if name == "sketch_fusion":
        assert ms["sketch"] > 0


def test_a_phase_is_charged_without_what_it_calls_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 3.0, 7.0, 15.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    clock = Clock()
    clock.switch("add")
    clock.switch("select")
    clock.switch()
    clock.switch()
    assert (clock.ms[REST], clock.ms["add"], clock.ms["select"]) == (1000, 2000 + 8000, 4000)


def test_a_call_that_raises_ends_its_phase() -> None:
    clock = Clock()
    with clock.watch(), pytest.raises(AttributeError):
        select.kth_largest(None, 1)  # type: ignore[arg-type]
    assert clock.ms["select"] > 0
    assert clock._running == [REST, REST]


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--elements", "5000", "--ranks", "2"])
    shown = capsys.readouterr().out
    assert all(name in shown for name in ls.COMPRESSORS)
