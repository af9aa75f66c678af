"""What to expect of each strategy, and what to use."""

import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from rich.console import Console
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

import lightning_sparse as ls
from lightning_sparse.auto.forecast import Forecast, steps_alone
from lightning_sparse.auto.policy import CANDIDATES
from lightning_sparse.bench.advise import advices, table, words
from lightning_sparse.bench.cluster import parse
from lightning_sparse.bench.compare.records import Advice, advise_on, to_paste
from lightning_sparse.bench.compare.workloads import count_parameters, workload_named
from lightning_sparse.fusion.costs import GroupCosts
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.network.costs import Link
from lightning_sparse_cli import main
from tests.conftest import emulated
from tests.support.ticking import ticking


def forecast(candidate: ls.Candidate, step_s: float, delivered: float) -> Forecast:
    return Forecast(candidate, step_s, step_s, 1e6, "network", 4, delivered, 1 - delivered)


DENSE, BFLOAT16, INT4 = (ls.Candidate(ls.Dense(), wire_dtype) for wire_dtype in ("float32", "bfloat16", "int4"))
MICRO, LOCAL = ls.Candidate(ls.MiCRO(density=0.05), "int4"), ls.Candidate(ls.Dense(), "int4", local_steps=2)


def advised(dense_s: float, int4_s: float, micro_s: float, local_s: float, alone_s: float = 0.3) -> list[Advice]:
    seconds = {DENSE: (dense_s, 1.0), INT4: (int4_s, 0.97), MICRO: (micro_s, 0.4), LOCAL: (local_s, 0.6)}
    return advise_on([forecast(candidate, *expected) for candidate, expected in seconds.items()], (alone_s, 1.5))


def test_what_is_soonest_at_a_loss_is_recommended() -> None:
    recommended = {
        (1.0, 0.5, 0.49, 0.65): INT4,
        (1.0, 0.6, 0.50, 0.49): LOCAL,
        (1.0, 0.6, 0.20, 0.60): LOCAL,  # MiCRO is expected to cost more than 5 % of the loss
    }
    for seconds, expected in recommended.items():
        assert [a.name for a in advised(*seconds) if a.chosen] == [str(expected)]


def test_words_say_when_not_to_compress_what_to_paste_and_why() -> None:
    shown = "\n".join(words(advised(0.5, 0.5, 0.5, 0.48)))
    assert "Do not compress: on 4 machines nothing is expected" in shown
    assert shown.endswith("    Trainer(strategy='ddp')")
    same = advised(0.5, 0.9, 0.9, 0.9)
    assert "Do not compress" in "\n".join(words([replace(same[0], step_s=0.6), *same[1:]]))  # noise
    found = advised(1.0, 0.6, 0.50, 0.49)
    shown = "\n".join(words(found))
    assert "Use sparse_auto, which chooses so by itself: 2 local steps, dense, int4." in shown
    assert "the loss that plain DDP has after 1,000 steps, 1,000 s, in 500 s (494 to 515): 50% sooner." in shown
    assert "ls.SparseDDPStrategy(ls.Dense(), wire_dtype='int4', local_steps=2)" in shown
    assert "PyTorch" not in shown
    assert words(found, "busy")[0] == "busy"
    assert "SparseHSDPStrategy" in words([replace(each, sent_bytes=9 * 10**9) for each in found])[0]


def test_what_bfloat16_needs_is_said() -> None:
    shown = "\n".join(words(advise_on([forecast(DENSE, 1.0, 1.0), forecast(BFLOAT16, 0.6, 1.0)], (0.3, 2.0))))
    pasted = shown.partition("PyTorch's own hook does the same without this package:")[2]
    found: dict[str, Any] = {"Trainer": lambda strategy: strategy}
    exec("\n".join(line.strip() for line in pasted.splitlines()), found)
    assert found["DDPStrategy"](ddp_comm_hook=found["bf16_compress_hook"])._ddp_comm_hook is bf16_compress_hook


def test_a_row_is_a_step_times_the_steps_that_it_needs_and_fits_a_terminal() -> None:
    shown = table(advised(12.0, 0.6, 0.3, 0.49), "gpt_10m on 24x50mbit, predicted from one process")
    columns = {str(column.header): [str(cell) for cell in column.cells] for column in shown.columns}
    names = ["one machine alone", f"[bold]{LOCAL}[/bold]", f"({MICRO})", str(INT4), "ddp", str(DENSE)]
    assert columns["strategy"] == names
    assert columns["steps"] == ["1,500", "1,020", "1,822", "1,030", "1,000", "1,000"]
    assert columns["to loss"] == ["450 s", "500 s", "547 s", "618 s", "12,000 s", "12,000 s"]
    for width in (80, 100):
        (console := Console(width=width, record=True, file=StringIO())).print(shown)
        text = console.export_text()
        assert "network" in text
        assert "left out by sparse_auto" in " ".join(text.split())  # since they lose more than it accepts
        assert "…" not in text


ALONE = (
    "Train on one machine alone: to the same loss 4 machines take 5.0 times as long for each of its steps, and are "
    "later even if it needs 4 times as many. They may pay where the batch of each is 1.4 times as large, or from 5 "
    "machines."
)
BOTH = (
    "One machine alone takes 300 ms a step; 4 machines are sooner where it needs more than 1.7 times as many steps. By "
    "the gradients in these steps it needs about 1.5 times as many; it may be 1 to 4, and grows as the loss falls. "
    "So one machine alone is expected to be sooner."
)


@pytest.mark.parametrize(("alone_s", "said"), [(0.1, ALONE), (0.3, BOTH)])
def test_whether_several_machines_pay_comes_first(alone_s: float, said: str) -> None:
    first, _, then, *_ = words(advised(1.0, 0.6, 0.5, 0.49, alone_s))
    assert first == said
    assert then.startswith("On 4 machines all the same: Use sparse_auto" if said is ALONE else "Use sparse_auto")


def test_what_is_sooner_and_left_out_says_why_and_how_to_have_it() -> None:
    shown = words(advised(1.0, 0.6, 0.2, 0.9))
    assert shown[-3] == (
        "MiCRO(density=0.05), int4 is expected to be 41% sooner still, but its loss after as many steps 20% above "
        "plain DDP's; sparse_auto takes what is expected to be at most 5% above. To have it:"
    )
    assert shown[-1].strip() == "Trainer(strategy=ls.SparseDDPStrategy(ls.MiCRO(density=0.05), wire_dtype='int4'))"
    assert "To have it:" not in "".join(words(advised(1.0, 0.6, 0.7, 0.9)))


@pytest.mark.parametrize(("noise", "expected"), [(0.0, 1.0), (1.0, 1.26), (30.0, 1.91)])
def test_one_machine_needs_more_steps_by_how_far_gradients_differ(noise: float, expected: float) -> None:
    """N = ``noise``, for batches of 1: the root of (1 + N) / (1 + N / 4)."""
    generator = torch.Generator().manual_seed(0)
    m = 4096
    gradients = 1 / m**0.5 + (noise / m) ** 0.5 * torch.randn(4, 20, m, generator=generator)
    assert steps_alone(gradients, 4) == pytest.approx(expected, rel=0.03)
    assert steps_alone(gradients[:1], 1) == 1


@pytest.mark.parametrize("candidate", [*CANDIDATES, MICRO], ids=str)
def test_python_and_yaml_to_paste_mean_the_same(candidate: ls.Candidate, tmp_path: Path) -> None:
    python, text = to_paste(candidate)
    built = eval(python, {"ls": ls, "Trainer": lambda strategy: strategy})
    (config := tmp_path / "config.yaml").write_text(text)
    parser = ArgumentParser()
    parser.add_argument("--trainer.strategy", type=ls.SparseDDPStrategy)
    parsed = parser.instantiate_classes(parser.parse_object(yaml.safe_load(config.read_text())))
    assert built.options == parsed.trainer.strategy.options
    assert built.options.compressor == candidate.compressor
    assert built.options.wire_dtype == candidate.wire_dtype


@pytest.mark.parametrize("link", ["4x100mbit", "4xunlimited"])
def test_advice_for_a_link(link: str) -> None:
    layers = {"a": torch.empty(1024, 64), "b": torch.empty(1024, 1024)}
    measured = Measured([0.01, 0.02], span_s=0.02, rest_s=0.01, groups=[["b", "a"]])
    gradients = torch.randn(4, 3, 512, generator=torch.Generator().manual_seed(0))
    ddp, alone, *others = advices(layers, measured, parse(link), gradients, torch.zeros(512), now=ticking())
    found = {a.name: a for a in others}
    assert list(found) == [str(candidate) for candidate in CANDIDATES]
    dense = found[str(DENSE)]
    assert dense.more_steps == 1
    assert alone.step_s == pytest.approx(0.03)
    assert 1.85 < alone.more_steps <= 2  # of gradients that have nothing in common
    assert all(a.step_s >= 0.03 for a in others)  # computing alone
    chosen = next(a for a in others if a.chosen)
    if link == "4x100mbit":  # 4.5 MB, of which a rank sends one and a half times as much, take 0.53 s
        assert 0.53 < dense.step_s < 0.6
        assert 0.53 < ddp.step_s < 0.6
        assert found[str(INT4)].step_s < 0.3 * dense.step_s
        assert chosen.step_s < 0.2 * dense.step_s
    else:
        assert dense.step_s < 0.05
        assert found[str(INT4)].step_s > 0.95 * dense.step_s  # next to nothing is saved


def test_modelled_costs_follow_bytes_and_hops() -> None:
    n, parameters = 2**16, {"layer": torch.empty(1)}
    slow, fast = (
        GroupCosts(parameters, Link(0.001, s), 4, now=ticking()).simulated(ls.Dense(), n) for s in (8e-8, 6e-8)
    )
    assert slow.sent_bytes == 2 * 3 / 4 * 4 * n
    assert slow.latency_s - fast.latency_s == pytest.approx((8e-8 - 6e-8) * slow.sent_bytes)
    few = GroupCosts(parameters, Link(0.001, 8e-8), 4, now=ticking()).simulated(ls.Dense(), 2**8)
    assert few.latency_s >= 0.001  # of a few bytes: one hop


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
        "class Searching(Fed):\n"
        "    def configure_optimizers(self):\n"
        "        return torch.optim.LBFGS(self.parameters(), 0.01, max_iter=2)\n"
        "class Empty(Fed):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        del self.net\n"
        "class NoStep(L.LightningModule):\n"
        "    pass\n"
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
    assert count_parameters(workload) == 9 * width + width * (width + 1)
    assert [type(data).__name__ for data in workload.fit_arguments().values()] == ["Data"] * fed


@pytest.mark.programs
def test_a_users_own_model(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "own.yaml", "--link", "1x100mbit+1x1gbit+50ms"]) == 0
    shown = capsys.readouterr().out
    assert "ddp" in shown
    assert "8 local steps" in shown
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
        ("own_net:Net", "'own_net:Net' must bring data, with a train_dataloader"),
        ("own_net:Empty", "'own_net:Empty' must have a parameter that requires a gradient, or there is nothing to"),
        ("own_net:NoStep", "'own_net:NoStep' must have a training_step"),
        ("own_net.py", "got the path 'own_net.py'. Give the class by its module, as in 'own_net:Model'"),
        ("./trained.ckpt", "got the path './trained.ckpt'. Give the class by its module, as in 'module:Model'"),
    ],
)
def test_what_is_no_model_is_named(own: Path, model: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", model, "--link", "4x1gbit"]) == 2
    assert message in capsys.readouterr().err


def test_ranks_that_share_a_link_act_as_one_and_must_be_as_many_on_each_host(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers = {"a": torch.empty(1024, 1024)}
    measured = Measured([0.01], span_s=0.02, rest_s=0.01, groups=[["a"]])
    gradients = torch.randn(2, 3, 512, generator=torch.Generator().manual_seed(0))
    of_one, of_four = (
        advices(layers, measured, parse(link), gradients, torch.zeros(512), now=ticking())
        for link in ("2x100mbit", "2x4x100mbit")
    )
    assert of_four[0].ranks == 2
    assert of_four[0].step_s == pytest.approx(of_one[0].step_s, rel=0.02)  # as many bytes pass a host's link
    assert of_four[0].sent_bytes == pytest.approx(of_one[0].sent_bytes / 4, rel=0.01)
    assert main(["advise", "mlp_1m", "--link", "2x4x1gbit+1x1gbit"]) == 2
    assert "of hosts with equally many ranks; got '2x4x1gbit+1x1gbit'" in capsys.readouterr().err


def test_one_host_is_none_to_send_to(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "mlp_1m", "--link", "1x4x1gbit"]) == 2
    assert "--link must be of two hosts or more; got '1x4x1gbit'" in capsys.readouterr().err


@pytest.mark.programs
def test_a_model_for_which_nothing_is_chosen_gets_no_advice(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "own_net:Searching", "--link", "4x1gbit"]) == 2
    assert "nothing to advise: LBFGS may end far above the loss of ddp" in capsys.readouterr().err
    (own / "own.yaml").write_text(
        "model: {class_path: own_net.Net, init_args: {width: 60}}\ndata: {class_path: own_net.Data}\n"
    )
    assert main(["advise", "own.yaml", "--link", "4x1gbit"]) == 2
    assert "the model is too small to gain by sending less. Use plain DDP." in capsys.readouterr().err


def test_without_a_link_the_ways_to_have_one_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["advise", "mlp_1m"]) == 2
    assert "give --link 4x1gbit" in capsys.readouterr().err


@pytest.mark.programs
@emulated(timeout_s=300)
@pytest.mark.parametrize(("cluster", "said"), [("2x1gbit", "2x1gbit"), ("2x2x1gbit", "2x2x1gbit, 4 ranks of 2 hosts")])
def test_measured_between_emulated_hosts(capsys: pytest.CaptureFixture[str], cluster: str, said: str) -> None:
    assert main(["advise", "mlp_1m", "--emulate", cluster]) == 0
    shown = capsys.readouterr().out
    assert f"mlp_1m on {said}, measured between ranks" in " ".join(shown.split())
    assert "Trainer(strategy=" in shown
    assert "ddp" in shown
    assert "8 local steps" in shown
