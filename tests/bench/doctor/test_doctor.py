"""The doctor: what it finds right, what it finds wrong, and what it says to do."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console
from torch.optim import SGD

from lightning_sparse.bench.compare.place import Place
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.doctor import doctor, screen
from lightning_sparse.bench.doctor.hosts import Host, Surroundings, reach
from lightning_sparse.cli import main
from lightning_sparse.compressors.group import Group
from lightning_sparse.fusion.costs import Link
from lightning_sparse.simulation import Simulated, simulate
from tests import conftest
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
FEW = doctor.FEW


# --- findings


def test_two_good_hosts_have_nothing_wrong() -> None:
    assert screen.of_hosts([HOST, replace(HOST, name="two", gloo="eth0", nccl_interface="ib")], False) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"versions": {"torch": "2.6.0", "lightning": "2.6.1"}}, "torch must be of one version on every host; got one"),
        ({"versions": {**HOST.versions, "lightning": "2.6.2"}}, "two: lightning 2.6.2 was withdrawn"),
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


def test_an_address_is_reached_or_not() -> None:
    assert reach("127.0.0.1", 9) == ""  # nobody listens, and yet the host is there
    assert reach("no-such-host.invalid", 29500)


def test_a_master_address_that_leads_nowhere_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    (problem,) = doctor._address(None)
    assert "MASTER_ADDR must be a host that answers; got 'no-such-host.invalid'" in problem


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


# --- one device


def test_compressors_conserve_on_a_device_among_simulated_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.conserves(torch.device("cpu")) == []
    forget(monkeypatch)
    assert "micro on cpu: gradient was lost or made up" in " ".join(doctor.conserves(torch.device("cpu")))


def test_each_format_codes_on_a_device_as_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ELEMENTS", 4_000)
    monkeypatch.setattr(doctor, "WIRE_DTYPES", ("float16", "int2"))
    assert doctor.codes_as_the_cpu(torch.device("cpu")) == []
    monkeypatch.setattr(doctor, "simulate", one_that_rounds_another_way())
    assert "int2 on cpu: 1.0% of the means differ from the CPU's" in " ".join(
        doctor.codes_as_the_cpu(torch.device("cpu"))
    )


def one_that_rounds_another_way() -> Callable[..., Simulated]:
    """Have one element in a hundred be rounded to another level in int2, the first time."""
    seen: set[str] = set()

    def simulated(name: str, gradients: torch.Tensor, *, wire_dtype: str) -> Simulated:
        result = simulate(name, gradients, wire_dtype=wire_dtype)
        if wire_dtype == "int2" and wire_dtype not in seen:
            result.mean[:, ::100] += 0.5
        seen.add(wire_dtype)
        return result

    return simulated


@pytest.mark.parametrize("devices", [0, 1, 8])
def test_what_is_examined_is_all_that_remains_for_the_devices_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], devices: int
) -> None:
    """On ranks in fake: Gloo on the CPU, NCCL on each device, Gloo on one; then compressors, formats and kernels.

    Nobody forks where a rank may have used a device.
    """
    done: list[Any] = []

    def here(schedule: Schedule, size: int, start: str = "fork", on_one_device: bool = False) -> Any:
        yield Surroundings([replace(HOST, devices=["H100"] * devices, nccl="2.27.5", triton=True)], [])
        done.append((schedule.accelerator, schedule.strategies, size, start, on_one_device))
        yield Round("", schedule.strategies, 0, size, 0, None, "")

    for name in ("conserves", "codes_as_the_cpu"):
        monkeypatch.setattr(doctor, name, lambda device, name=name: done.append((name, str(device))) or [])
    monkeypatch.setattr(doctor.kernels, "measure", lambda n: done.append("kernels"))
    monkeypatch.setattr(doctor, "HAS_TRITON", True)
    monkeypatch.setattr(doctor, "here", here)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "H100")
    assert main(["doctor"]) == 0
    assert "Nothing is wrong." in capsys.readouterr().out
    few, over_gloo, every = (",".join(each) for each in (FEW, doctor.OVER_GLOO, doctor.STRATEGIES))
    on_devices = [
        ("cpu", few, 2, "fork", False), ("cuda", every, devices, "spawn", False), ("cuda", over_gloo, 2, "spawn", True),
        ("conserves", "cuda"), ("codes_as_the_cpu", "cuda"), "kernels",
    ]  # fmt: skip
    assert done == (on_devices if devices else [("cpu", every, 2, "fork", False)])


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


def checked(strategies: tuple[str, ...], *how: Any) -> dict[str, str]:
    """The error of each strategy, "" where there was none."""
    first, *rounds = doctor.here(doctor.plan("cpu", strategies), 2, *how)
    assert isinstance(first, Surroundings)
    assert all(isinstance(each, Round) for each in rounds)
    return {each.strategy: each.error for each in rounds if isinstance(each, Round)}


@pytest.mark.processes
def test_strategies_that_are_right_pass_on_real_ranks() -> None:
    assert not any(checked(FEW).values())


def checked_after_threads_were_used() -> dict[str, str]:
    torch.set_num_threads(2)
    torch.ones(512, 512) @ torch.ones(512, 512)  # after which a forked process would wait for threads that it lacks
    return checked(doctor.OVER_GLOO[1:2], "spawn", True)


def test_ranks_on_one_device_find_each_other_over_gloo_where_threads_were_used(ranks: Ranks, tmp_path: Path) -> None:
    errors = ranks.apart(checked_after_threads_were_used, tmp_path / "output")
    assert errors == {"no_communication": "", doctor.OVER_GLOO[1]: ""}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("break_it", "broken"),
    [(forget, {"micro": "gradient was lost or made up in step 2"}), (drift, dict.fromkeys(FEW[:2], "drifted apart"))],
)
def test_what_is_broken_fails(
    monkeypatch: pytest.MonkeyPatch, break_it: Callable[[pytest.MonkeyPatch], None], broken: dict[str, str]
) -> None:
    break_it(monkeypatch)
    errors = checked(FEW)
    assert {name for name, error in errors.items() if error} >= set(broken)
    assert all(text in errors[name] for name, text in broken.items())


@pytest.mark.processes
def test_the_exit_status_says_whether_anything_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    short = doctor.plan("cpu", ("ddp", "micro"))
    monkeypatch.setattr(doctor, "plan", lambda *_: short)
    assert main(["doctor"]) == 0
    assert "Nothing is wrong." in capsys.readouterr().out
    forget(monkeypatch)
    assert main(["doctor"]) == 1
    assert "wrong: micro failed: RuntimeError: gradient was lost" in capsys.readouterr().out


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


def test_what_ranks_write_is_read_back() -> None:
    surroundings = Surroundings([HOST], [Link(0.1, 0.5, 0.2)])
    assert Surroundings.from_json(asdict(surroundings)) == surroundings
