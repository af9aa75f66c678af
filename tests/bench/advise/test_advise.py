"""What to expect of each strategy, and what to use."""

import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lightning_sparse.bench.advise.advice import Advice, recommend, table, words
from lightning_sparse.bench.advise.advise import advices
from lightning_sparse.bench.advise.cost import model_cost
from lightning_sparse.bench.cluster import parse
from lightning_sparse.bench.compare import own_model
from lightning_sparse.bench.compare.workloads import parameter_sizes, workload_named
from lightning_sparse.cli import main
from lightning_sparse.compressors import COMPRESSORS
from lightning_sparse.fusion import rehearsal
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.fusion.rehearsal import SIZES, Link
from tests.conftest import emulated

DENSE = Advice("sparse_dense", 1.0, 0.9, 1.1, "network", 1)


def made(**steps: float) -> list[Advice]:
    return [
        DENSE,
        *(replace(DENSE, strategy=name, step_s=s, low_s=0.9 * s, high_s=1.1 * s) for name, s in steps.items()),
    ]


def test_the_fastest_is_recommended_and_of_equals_the_one_that_sends_most() -> None:
    assert recommend(made(micro=0.5, ok_topk=0.8)).strategy == "micro"
    assert recommend(made(micro=0.50, skip_reduce=0.52)).strategy == "skip_reduce"
    assert recommend(made(micro=0.52, ok_topk=0.50)).strategy == "micro"  # which sends as much, and works less
    assert recommend(made(micro=0.54, ok_topk=0.50)).strategy == "ok_topk"
    assert recommend(made(micro=0.96)).strategy == "sparse_dense"  # not 5 %
    assert recommend(made(micro=0.9, sparse_random_k=0.1, sparse_topk=0.1)).strategy == "micro"  # baselines are shown


def test_words_say_when_not_to_compress_and_what_to_paste() -> None:
    assert words(made(micro=0.97))[0].startswith("Do not compress")
    assert "Trainer(strategy='ddp')" in "\n".join(words(made(micro=0.97)))
    shown = "\n".join(words(made(micro=0.5)))
    assert shown.startswith("Use micro")
    unsure = [DENSE, replace(DENSE, strategy="micro", step_s=0.5, low_s=0.3, high_s=0.7)]
    assert words(unsure)[0].endswith(
        "micro's may take 300 to 700 ms. Ask again when nothing else runs on these machines."
    )
    assert words(unsure)[2:] == words(made(micro=0.5))
    assert "Use micro: a step of about 500 ms instead of 1000 ms (2.0 times faster)" in shown
    assert "class_path: lightning_sparse.MiCRO" in shown
    assert [str(cell) for cell in table(made(micro=0.5), "title").columns[0].cells] == [
        "[bold]micro[/bold]",
        "sparse_dense",
    ]


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that goes on by a tenth of a millisecond whenever somebody looks at it, whatever else runs here."""
    looks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) * 1e-4)


@pytest.mark.parametrize("link", ["4x100mbit", "4xunlimited"])
def test_advice_for_a_link(ticking: None, monkeypatch: pytest.MonkeyPatch, link: str) -> None:
    monkeypatch.setattr(rehearsal, "SIZES", (2**8, 2**14))  # lines go on beyond
    layers = {"a": torch.empty(1024, 64), "b": torch.empty(1024, 1024)}
    measured = Measured([0.01, 0.02], span_s=0.02, rest_s=0.01, groups=[["b", "a"]])
    found = {a.strategy: a for a in advices(layers, measured, parse(link))}
    assert found.keys() == COMPRESSORS.keys()
    assert all(0 < a.low_s <= a.step_s <= a.high_s for a in found.values())
    dense = found["sparse_dense"].step_s
    assert found["micro"].sums.startswith("Sums of float32 go to all ranks in one hop up to ")
    if link == "4x100mbit":  # 4.5 MB, of which a rank sends one and a half times as much, take 0.53 s
        assert 0.53 < dense < 0.6
        assert found["skip_reduce"].step_s < 0.9 * dense
        assert found["micro"].step_s < 0.5 * dense
    else:
        assert dense < 0.05
        assert found["micro"].step_s > dense  # more work, and nothing is saved


def test_modelled_costs_follow_bytes_and_hops(ticking: None) -> None:
    slow, fast = (model_cost(COMPRESSORS["sparse_dense"](), SIZES[1], 4, Link(0.001, s)) for s in (8e-8, 6e-8))
    sent = 2 * 3 / 4 * 4 * SIZES[1]
    assert slow.latency_s[-1] - fast.latency_s[-1] == pytest.approx((8e-8 - 6e-8) * sent)
    assert slow.wire_rise == pytest.approx(8e-8 * sent / SIZES[1])
    assert slow.latency_s[0] >= 0.001  # of a few bytes: one hop


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "own_net.py").write_text(
        "import lightning as L, torch\n"
        "class Data(L.LightningDataModule):\n"
        "    def train_dataloader(self):\n"
        "        return torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4)\n"
        "class Net(L.LightningModule):\n"
        "    def __init__(self, width: int = 700):\n"
        "        super().__init__()\n"
        "        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.Linear(width, width))\n"
        "    def training_step(self, batch):\n"
        "        return self.net(batch).square().mean()\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.SGD(self.parameters(), 0.01)\n"
        "class Fed(Net):\n"
        "    def train_dataloader(self):\n"
        "        return Data().train_dataloader()\n"
        "def needs(x):\n"
        "    return x\n"
    )
    (tmp_path / "own.yaml").write_text(
        "model: {class_path: own_net.Net, init_args: {width: 600}}\ndata: {class_path: own_net.Data}\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("model", "width", "fed"),
    [("own_net:Fed", 700, False), ("own_net:Net,own_net:Data", 700, True), ("own.yaml", 600, True)],
)
def test_forms_of_a_users_own_model(own: Path, model: str, width: int, fed: bool) -> None:
    workload = workload_named(model)
    assert sum(parameter_sizes(workload)) == 9 * width + width * (width + 1)
    assert [type(data).__name__ for data in workload.fit_arguments().values()] == ["Data"] * fed


def test_a_users_own_model(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "own.yaml", "--link", "1x100mbit+1x1gbit+50ms"]) == 0
    shown = capsys.readouterr().out
    assert "Links differ by host: 100 Mbit/s on host 0; 1000 Mbit/s and 50 ms on host 1." in shown
    assert all(name in shown for name in COMPRESSORS)
    assert "predicted from one process" in shown
    assert "Trainer(strategy=" in shown


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_such_module:Net", "'no_such_module:Net' cannot be imported"),
        ("own_net:Missing", "cannot be imported"),
        ("own_net:needs", "cannot be made without arguments"),
        ("own_net:Data", "Data is not a LightningModule"),
        ("own_net:Net,own_net:Net", "Net is not a LightningDataModule"),
        ("missing.yaml", "config file 'missing.yaml' is not there"),
        ("no_such_workload", "got 'no_such_workload'"),
    ],
)
def test_what_is_no_model_is_named(own: Path, model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", model, "--link", "4x1gbit"]) == 2
    assert message in capsys.readouterr().err


def test_without_a_link_the_ways_to_have_one_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["advise", "mlp_1m"]) == 2
    assert "give --link 4x1gbit" in capsys.readouterr().err


def test_a_bad_link_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "mlp_1m", "--link", "4xfast"]) == 2
    assert "fast" in capsys.readouterr().err


@emulated(timeout_s=200)
def test_measured_between_emulated_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "mlp_1m", "--emulate", "2x1gbit"]) == 0
    shown = capsys.readouterr().out
    assert "measured between ranks" in shown
    assert "Trainer(strategy=" in shown
    assert all(name in shown for name in COMPRESSORS)


def test_forms_are_told_from_names() -> None:
    assert own_model.is_own("a.b:C")
    assert own_model.is_own("a.yaml")
    assert not any(own_model.is_own(name) for name in ("mlp_1m", "gpt_10m"))
