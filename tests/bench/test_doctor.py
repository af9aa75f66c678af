"""The doctor: what it finds right, what it finds wrong, and what it says to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.optim import SGD

from lightning_sparse.bench import doctor
from lightning_sparse.bench.compare.ranks import RankInfo
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.strategies import parse_strategies
from lightning_sparse.bench.doctor import CheckedModel, Host
from lightning_sparse.compressors.group import Group
from lightning_sparse_cli import main
from tests import conftest
from tests.support.models import trainer
from tests.support.processes import Ranks

HOST = Host(
    system="Linux 6.18",
    versions={"torch": "2.13.0", "lightning": "2.6.1"},
    cores=2,
    load=0.5,
    devices=0,
    nccl="",
    triton=False,
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1", "ib0": "10.1.0.1"},
    own_address="10.0.0.1",
    gloo="",
    nccl_interface="",
)


# --- findings


def test_a_good_host_has_nothing_wrong() -> None:
    assert HOST.wrong(2) == replace(HOST, gloo="eth0", nccl_interface="ib").wrong(2) == []
    assert replace(HOST, own_address="127.0.1.1").wrong(1) == []  # alone it may have a name that leads to itself


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"devices": 1}, "PyTorch must have NCCL"),
        ({"gloo": "eth1"}, "GLOO_SOCKET_IFNAME must be one of lo, eth0, ib0; got 'eth1'"),
        ({"nccl_interface": "mlx"}, "NCCL_SOCKET_IFNAME must be how one of lo, eth0, ib0 begins; got 'mlx'"),
        ({"own_address": "127.0.1.1"}, "export GLOO_SOCKET_IFNAME=eth0 on it before training"),
    ],
)
def test_what_is_wrong_with_a_host_is_named_with_what_to_do(change: dict[str, Any], says: str) -> None:
    (problem,) = replace(HOST, **change).wrong(2)
    assert says in problem


# --- the screen


@pytest.mark.parametrize("devices", [0, 8])
def test_the_screen_says_what_will_be_used(devices: int) -> None:
    host, place = replace(HOST, devices=devices), RankInfo(0, 0, 6, 2, 3, "10.0.0.1", 29500, True, "eth0")
    console = Console(width=80)
    with console.capture() as shown:
        console.print(doctor.surroundings(host, place, "", None))
    text = shown.get()
    assert ("over Gloo" in text, "8 CUDA devices: ranks train on CUDA, over NCCL" in text) == (not devices, devices > 0)
    assert "6 on 3 hosts; rank 0 at 10.0.0.1:29500" in text
    with console.capture() as shown:
        console.print(doctor.surroundings(host, None, "1x2x1gbit+1x4x1gbit", None))
    assert "6 on 2 hosts: 1x2x1gbit+1x4x1gbit" in shown.get()


@pytest.mark.parametrize("devices", [0, 1, 2, 8])
def test_what_is_examined_is_what_the_devices_allow(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], devices: int
) -> None:
    """On ranks in fake: Gloo on the CPU, NCCL on each device, and on one that is alone among several, Gloo on one."""
    done: list[Any] = []

    def on_this_machine(schedule: Schedule, size: int, on_one_device: bool = False) -> Iterator[Round]:
        done.append((schedule.accelerator, schedule.strategies, size, on_one_device))
        yield Round("", "micro", 0, size, 0, None, "it broke" if on_one_device else "")

    monkeypatch.setattr(doctor, "on_this_machine", on_this_machine)
    monkeypatch.setattr(Host, "this", lambda: replace(HOST, devices=devices, nccl="2.27.5"))
    assert main(["doctor"]) == (devices > 0)
    assert ("wrong: micro failed: it broke" if devices else "Nothing is wrong.") in capsys.readouterr().out
    few, over_gloo, every = (",".join(each) for each in (doctor.FEW, doctor.OVER_GLOO, doctor.STRATEGIES))
    with_members = ",".join(doctor.STRATEGIES + doctor.MEMBERS)
    of_each = {
        0: [("cpu", every, 2, False)],
        1: [("cuda", every, 1, False), ("cuda", with_members, 4, True)],
        2: [("cuda", every, 2, False)],
        8: [("cuda", with_members, 8, False)],
    }[devices]
    assert done == ([("cpu", few, 2, False), *of_each, ("cuda", over_gloo, 3, True)] if devices else of_each)


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


Breaks = Callable[[pytest.MonkeyPatch], None] | None


def errors(rank: int, size: int, spec: str, break_it: Breaks) -> str:
    """What the model that is checked says of a strategy in a few steps; "" if all is right."""
    with pytest.MonkeyPatch.context() as patch:
        if break_it:
            break_it(patch)
        fit = trainer(parse_strategies(spec)[0].build(), size, check_every=0, max_steps=3)
        try:
            fit.fit(CheckedModel())
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("size", "spec", "break_it", "says"),
    [
        *((2, spec, None, "") for spec in doctor.FEW),
        (2, "micro", forget, "gradient was lost or made up in step 2"),
        (2, "ddp", drift, "drifted apart"),
        (4, "micro:local_group=2", None, ""),
        (4, "micro:local_group=2", forget, "gradient was lost or made up in step 2"),
    ],
)
def test_each_step_is_checked(ranks: Ranks, size: int, spec: str, break_it: Breaks, says: str) -> None:
    for error in ranks.run(errors, size, spec, break_it):
        assert says in error if says else not error


@pytest.mark.programs
@pytest.mark.processes
def test_this_machine_is_examined(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """By two ranks that are hosts of their own, over Gloo, as on one CUDA device."""
    here, plan = doctor.on_this_machine, doctor.plan
    monkeypatch.setattr(doctor, "plan", lambda *_: plan("cpu", doctor.OVER_GLOO[-1:]))
    monkeypatch.setattr(doctor, "on_this_machine", lambda *given: here(*given, on_one_device=True))
    monkeypatch.setattr(Host, "this", lambda: HOST)
    assert main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert doctor.LOCAL in shown.replace("\n", "")
    assert "Nothing is wrong." in shown


@pytest.mark.programs
@conftest.emulated(180)
@pytest.mark.parametrize(("cluster", "ranks"), [("2x50mbit+10ms", "2 on 2 hosts"), ("2x2x100mbit", "4 on 2 hosts")])
def test_an_emulated_cluster_is_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cluster: str, ranks: str
) -> None:
    plan = doctor.plan
    monkeypatch.setattr(doctor, "plan", lambda *_, cluster: plan("cpu", ("micro",), cluster))
    assert main(["doctor", "--emulate", cluster]) == 0
    shown = capsys.readouterr().out
    assert f"{ranks}: {cluster}" in shown
    assert "micro" in shown


@pytest.mark.parametrize("cluster", ["1x1gbit", "1x4x1gbit"])
def test_a_cluster_of_one_host_is_refused(capsys: pytest.CaptureFixture[str], cluster: str) -> None:
    assert main(["doctor", "--emulate", cluster]) == 2
    assert f"at least 2 hosts; got '{cluster}'" in capsys.readouterr().err
