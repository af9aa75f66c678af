"""The demo, over an emulated network and without one, and what it says of each outcome."""

from pathlib import Path

import pytest

from tests.conftest import emulated

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_S = 240  # processes import torch and Lightning, on a busy machine


@pytest.fixture(autouse=True)
def examples_path(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)


def trainings(ddp, ours, alone):
    """Three trainings of 10, 20 and 30 s, judged to have these losses then."""
    from demo import Training

    found = [Training(name, "red") for name in ("ddp", "sparse_auto", "no_communication")]
    for each, losses, sent_bytes in zip(found, (ddp, ours, alone), (8e6, 1e6, 0), strict=True):
        for i, loss in enumerate(losses, start=1):
            each.add(10.0 * i, 5 * i, sent_bytes * i, None)
            each.add(10.0 * i, 5 * i, sent_bytes * i, loss)
    return found


@pytest.mark.parametrize(
    ("ours", "alone", "words"),
    [
        pytest.param((2.9, 2.5, 2.3), (3.0, 2.9, 2.8), "in 20.0 s in place of 30.0: 1.5 times faster", id="a gain"),
        pytest.param((3.0, 2.9, 2.7), (3.0, 2.9, 2.8), "did not get to ddp's best loss, 2.60", id="never"),
        pytest.param((3.0, 2.9, 2.6), (3.0, 2.9, 2.8), "after 30.0 s, ddp in 30.0: no gain", id="no sooner"),
        pytest.param(
            (2.6, 2.5, 2.4), (3.0, 2.6, 2.5), "in 30.0 s, sparse_auto in 20.0: four are 1.5 times faster", id="ddp last"
        ),
        pytest.param((3.0, 2.6, 2.5), (2.6, 2.5, 2.4), "are not worth their network", id="one host sooner"),
    ],
)
def test_a_gain_and_what_is_none_are_told(ours, alone, words):
    from demo import closing_words

    assert words in closing_words(trainings((3.0, 2.8, 2.6), ours, alone), False, "")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the demo for a moment, on two hosts; returns what it printed."""
    import demo

    def run(*arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(demo, "HOSTS", 2)
        monkeypatch.setattr("sys.argv", ["demo.py", "--seconds", "1", *arguments])
        demo.main()
        assert [file.name for file in tmp_path.iterdir()] == ["demo.svg"]
        assert "</svg>" in (tmp_path / "demo.svg").read_text()
        shown = " ".join(capsys.readouterr().out.split())
        assert "picture: demo.svg" in shown
        assert " of 1 s, " in shown  # progress, without a terminal
        return shown

    return run


@pytest.mark.programs
@emulated(LIMIT_S)
def test_over_an_emulated_network(run):
    shown = run()
    assert "emulated on this machine" in shown
    assert "sparse_auto" in shown


@pytest.mark.programs
@pytest.mark.timeout(LIMIT_S)
def test_without_an_emulated_network(run):
    shown = run("--no-emulation")
    assert "No network is emulated: as --no-emulation asks." in shown
    assert "the bytes' time on the link was computed" in shown
