"""The doctor: what it finds right, what it finds wrong, and what it says to do."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.optim import SGD

from lightning_sparse.bench.compare.peers import contenders
from lightning_sparse.bench.compare.place import Place, run_here
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.doctor import doctor, screen
from lightning_sparse.bench.doctor.checked_model import CheckedModel
from lightning_sparse.bench.doctor.hosts import Host, Surroundings
from lightning_sparse.cli import main
from lightning_sparse.compressors.group import Group
from lightning_sparse.fusion.costs import Link
from tests import conftest
from tests.support.models import trainer
from tests.support.processes import Ranks

HOST = Host(
    name="one",
    system="Linux 6.18",
    versions={"torch": "2.13.0", "lightning": "2.6.1"},
    cores=2,
    load=0.5,
    devices=[],
    nccl="",
    triton=False,
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"},
    own_address="10.0.0.1",
    gloo="",
    nccl_interface="",
)


# --- findings


def test_two_good_hosts_have_nothing_wrong() -> None:
    assert screen.of_hosts([HOST, replace(HOST, name="two", gloo="eth0", nccl_interface="ib")], False) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"versions": {"torch": "2.6.0", "lightning": "2.6.1"}}, "torch must be of one version on every host; got one"),
        ({"devices": ["H100"]}, "two: PyTorch must have NCCL"),
        ({"devices": ["H100"], "nccl": True}, "as many CUDA devices; got one 0, two 1"),
        ({"gloo": "eth1"}, "GLOO_SOCKET_IFNAME must be one of lo, eth0, ib0; got 'eth1'"),
        ({"nccl_interface": "mlx"}, "NCCL_SOCKET_IFNAME must be how one of lo, eth0, ib0 begins; got 'mlx'"),
        ({"own_address": "127.0.1.1"}, "export GLOO_SOCKET_IFNAME=eth0 on it before training"),
    ],
)
def test_what_is_wrong_with_a_host_is_named_with_what_to_do(change: dict[str, Any], says: str) -> None:
    problems = screen.of_hosts([HOST, replace(HOST, name="two", **change)], False)
    assert any(says in problem for problem in problems)


def test_one_host_may_have_a_name_that_leads_to_itself() -> None:
    assert screen.of_hosts([replace(HOST, own_address="127.0.1.1")], False) == []


# --- the screen


def text_of(table: object) -> str:
    console = Console(width=80, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_screen_names_the_slowest_link() -> None:
    hosts = [replace(HOST, name=name) for name in ("a", "b", "c")]
    links = [Link(0.001, 8e-8), Link(0.002, 8e-7), Link(0.001, 8e-8)]
    place = Place(0, 0, 6, 2, "10.0.0.1", 29500, True, "eth0")
    text = text_of(screen.surroundings(Surroundings(hosts, links), place, "", None))
    assert "10 Mbit/s at least" in text
    assert "slowest from a (0) to b (1)" in " ".join(text.split())
    assert "6 on 3 hosts; rank 0 at 10.0.0.1:29500" in text


@pytest.mark.parametrize("gpus", [[], ["H100"] * 8])
def test_the_screen_says_what_will_be_used(gpus: list[str]) -> None:
    host = replace(HOST, devices=gpus, nccl="2.27.5" if gpus else "", triton=True)
    text = text_of(screen.surroundings(Surroundings([host], []), None, "", "no"))
    assert ("over Gloo" in text, "8 x H100: ranks train on CUDA, over NCCL" in text) == (not gpus, bool(gpus))


@pytest.mark.parametrize("devices", [0, 1, 8])
def test_what_is_examined_is_what_the_devices_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], devices: int
) -> None:
    """On ranks in fake: Gloo on the CPU, NCCL on each device, Gloo on one."""
    done: list[Any] = []

    def run_here(size: int, program: str, schedule: Schedule, on_one_device: bool = False) -> Any:
        host = replace(HOST, devices=["H100"] * devices, nccl="2.27.5", triton=True)
        yield asdict(Surroundings([host], [Link(0.1, 0.5, 0.2)]))
        done.append((schedule.accelerator, schedule.strategies, size, on_one_device))
        yield asdict(Round("", "micro", 0, size, 0, None, "it broke" if on_one_device else ""))

    monkeypatch.setattr(doctor, "run_here", run_here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    assert main(["doctor"]) == (devices > 0)
    assert ("wrong: micro failed: it broke" if devices else "Nothing is wrong.") in capsys.readouterr().out
    few, over_gloo, every = (",".join(each) for each in (doctor.FEW, doctor.OVER_GLOO, doctor.STRATEGIES))
    on_devices = [("cpu", few, 2, False), ("cuda", every, devices, False), ("cuda", over_gloo, 2, True)]
    assert done == (on_devices if devices else [("cpu", every, 2, False)])


# --- real ranks


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every compressor lose a part of what it kept."""
    add = Group.add

    def forgetful(group: Group, *arguments: Any) -> None:
        group.unsent.mul_(0.9)
        add(group, *arguments)

    monkeypatch.setattr(Group, "add", forgetful)


def drift(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have each rank's optimizer go its own way."""
    step = SGD.step

    def own(optimizer: SGD, *arguments: Any, **options: Any) -> Any:
        loss = step(optimizer, *arguments, **options)
        with torch.no_grad():
            optimizer.param_groups[0]["params"][0].add_(dist.get_rank())
        return loss

    monkeypatch.setattr(SGD, "step", own)


def errors(rank: int, size: int, spec: str, break_it: Callable[[pytest.MonkeyPatch], None] | None) -> str:
    """What the model that is checked says of a strategy in a few steps; "" if all is right."""
    with pytest.MonkeyPatch.context() as patch:
        if break_it:
            break_it(patch)
        fit = trainer(contenders(spec)[0].build(), size, check_every=0, max_steps=3)
        try:
            fit.fit(CheckedModel())
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("spec", "break_it", "says"),
    [
        *((spec, None, "") for spec in doctor.FEW),
        ("micro", forget, "gradient was lost or made up in step 2"),
        ("ddp", drift, "drifted apart"),
    ],
)
def test_each_step_is_checked(
    ranks: Ranks, spec: str, break_it: Callable[[pytest.MonkeyPatch], None] | None, says: str
) -> None:
    for error in ranks.run(errors, 2, spec, break_it):
        assert says in error if says else not error


@pytest.mark.processes
def test_ranks_on_one_device_find_each_other_over_gloo() -> None:
    found = list(run_here(2, doctor.PROGRAM, doctor.plan("cpu", doctor.OVER_GLOO[-1:]), on_one_device=True))
    assert len(Surroundings.from_json(found[0]).links) == 2
    assert [(each["strategy"], each["error"]) for each in found[1:]] == [
        ("no_communication", ""),
        (doctor.OVER_GLOO[-1], ""),
    ]


@pytest.mark.programs
@conftest.emulated(180)
def test_an_emulated_cluster_is_measured_and_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = doctor.plan("cpu", ("micro",))
    monkeypatch.setattr(doctor, "plan", lambda *_: short)
    found: list[Surroundings] = []
    show = screen.surroundings
    monkeypatch.setattr(screen, "surroundings", lambda each, *others: found.append(each) or show(each, *others))
    assert main(["doctor", "--emulate", "2x50mbit+10ms"]) == 0
    assert "micro" in capsys.readouterr().out
    for link in found[0].links:
        assert 30e6 < 8 / link.s_per_byte < 53e6
        assert 0.01 < link.latency_s < 0.08


def test_a_cluster_of_one_host_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--emulate", "1x1gbit"]) == 2
    assert "at least 2 hosts" in capsys.readouterr().err
