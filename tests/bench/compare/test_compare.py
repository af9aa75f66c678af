from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from torch.distributed import HashStore

from lightning_sparse import COMPRESSORS, Dense, LocalSteps, SkipReduce, SparseDDPStrategy
from lightning_sparse.bench.cluster import Cluster, parse
from lightning_sparse.bench.compare import report, run, worker
from lightning_sparse.bench.compare.ranks import RankInfo, Turn, read_sent
from lightning_sparse.bench.compare.records import MeasuredRun, MeasuredStep, Round
from lightning_sparse.bench.compare.report import Summary, middle_half, page, summarise
from lightning_sparse.bench.compare.schedule import COMPILING, Schedule, schedules
from lightning_sparse.bench.compare.strategies import NO_COMMUNICATION, PEERS, all_names, parse_strategies
from lightning_sparse.bench.output import environment, json_line, new_file
from lightning_sparse.monitor import pictures
from lightning_sparse_cli import Bench, main
from tests import conftest

SCHEDULE = Schedule("4x1gbit", "mlp_1m", "ddp,skip_reduce", steps=2, warmup=1, rounds=3, accelerator="cpu", floor=True)


def emulated(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test that builds a cluster and trains on it."""
    return pytest.mark.processes(conftest.emulated(180)(test))


# --- strategies by name


def test_options_go_to_the_compressor_or_to_the_strategy() -> None:
    given = "skip_reduce:skip=0.25:wire_dtype=bfloat16:error_feedback=false:protect=*.bias+*.norm"
    strategy = parse_strategies(given)[0].build()
    assert isinstance(strategy, SparseDDPStrategy)
    assert strategy.compressor == SkipReduce(skip=0.25, error_feedback=False, protect=("*.bias", "*.norm"))
    assert strategy.options.wire_dtype == "bfloat16"


def test_local_steps_and_learning_rates() -> None:
    ours, diloco, ddp = parse_strategies("sparse_dense:local_steps=3:wire_dtype=sign:lr=2e-3,diloco:steps=100,ddp:lr=1")
    strategy = ours.build()
    assert isinstance(strategy, SparseDDPStrategy)
    assert (strategy.options.local, strategy.options.wire_dtype) == (LocalSteps(3), "sign")
    assert (ours.learning_rate, diloco.learning_rate, ddp.learning_rate) == (2e-3, None, 1)
    strategy = diloco.build()
    assert isinstance(strategy, SparseDDPStrategy)
    outer = LocalSteps(100, 1, False, outer_rate=0.7, outer_momentum=0.9, second_moments="own")
    assert (strategy.compressor, strategy.options.local) == (Dense(), outer)
    assert strategy.options.wire_dtype == "float32"


def test_a_strategy_named_twice_runs_twice() -> None:
    assert [c.label for c in parse_strategies("ddp, skip_reduce,ddp")] == ["ddp", "skip_reduce", "ddp#2"]


def test_all_names_are_every_peer_and_every_compressor() -> None:
    labels = [c.label for c in parse_strategies(all_names())]
    assert labels[0] == "ddp"
    assert set(labels) == {*PEERS, *COMPRESSORS} - {NO_COMMUNICATION}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("", r"the name must be one of ddp.*; got ''"),
        ("dpp", r"the name must be one of ddp.*skip_reduce.*; got 'dpp'. Write 'name' or"),
        ("ddp:skip=1", r"an option must be option=value with one of lr; got 'skip=1'"),
        ("ddp:lr=0", r"lr, the learning rate, must be above 0; got '0'"),
        ("diloco:period=3", r"an option must be option=value with one of steps, outer_rate, .*; got 'period=3'"),
        ("sparse_dense:local_steps=-1", r"local_steps.*-1"),
        ("skip_reduce:skipp=1", r"an option must be option=value with one of skip, .*wire_dtype.*; got 'skipp=1'"),
        ("skip_reduce:skip", r"an option must be option=value .*; got 'skip'"),
        ("skip_reduce:skip=half", r"skip.*half"),
        ("skip_reduce:error_feedback=0", r"error_feedback"),
        ("skip_reduce:warmup_steps=1.5", r"warmup_steps.*1.5"),
        ("skip_reduce:skip=2", r"skip.*2"),
        ("skip_reduce:wire_dtype=int3", r"wire_dtype.*int3"),
    ],
)
def test_bad_strategy_is_named_with_the_fix(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_strategies(f"ddp,{spec}")


def test_a_device_is_for_emulated_hosts_and_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for emulate, accelerator, message in (
        ("2x1gbit", "gpu", "--accelerator must be one of cpu, cuda; got 'gpu'"),
        ("", "cuda", "--accelerator cuda is for --emulate"),
        ("2x1gbit", "cuda", "must be cpu where PyTorch finds no CUDA device; got 'cuda'"),
    ):
        with pytest.raises(ValueError, match=message):
            schedules(Bench(emulate=emulate, accelerator=accelerator))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (shared,) = schedules(Bench(emulate="2x1gbit", accelerator="cuda"))
    assert shared.shares_a_device
    assert shared.compile_first
    assert not schedules(Bench(emulate="2x1gbit"))[0].compile_first
    assert not schedules(Bench(emulate="2x1gbit"))[0].shares_a_device
    assert not replace(schedules(Bench())[0], cluster="2 hosts").shares_a_device  # real ones


def test_every_other_round_runs_backwards() -> None:
    forth = [(0, NO_COMMUNICATION), (0, "ddp"), (0, "skip_reduce")]
    back = [(1, "skip_reduce"), (1, "ddp"), (1, NO_COMMUNICATION)]
    assert [(number, c.label) for number, c in SCHEDULE.turns()] == forth + back + [(2, label) for _, label in forth]


def test_on_a_device_what_has_kernels_trains_before_anything_is_timed() -> None:
    schedule = replace(SCHEDULE, strategies="ddp,micro,diloco", until_loss=[1.0], learning_rates=[0.1, 0.2], rounds=1)
    turns = replace(schedule, compile_first=True).turns()
    assert [(number, row.label, row.learning_rate) for number, row in turns[:2]] == [
        (COMPILING, "micro", 0.1),
        (COMPILING, "diloco", 0.1),
    ]
    assert turns[2:] == schedule.turns()
    assert schedule.seed(COMPILING) == 0
    assert replace(schedule, seeds=[7, 8]).seed(COMPILING) == 7


def test_triton_is_asked_for_how_long_it_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = SimpleNamespace(knobs=SimpleNamespace(compilation=SimpleNamespace(listener=None)))
    monkeypatch.setitem(sys.modules, "triton", triton)
    seconds = worker._times_of_compiling()
    for microseconds, cache_hit in ((2_000_000, False), (7, True), (500_000, False)):
        times = SimpleNamespace(total=microseconds)
        triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)
    assert seconds == [2.0, 0.5]
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())  # before it could be asked
    assert worker._times_of_compiling() is None


def test_what_compiling_took_is_said_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(number: int, compiled_s: float) -> Round:
        done = made_up("micro", 0, 1.0, 1e6)
        assert done.run is not None
        return replace(done, number=number, run=replace(done.run, compiled_s=compiled_s))

    def failed(number: int) -> Round:
        return Round("4x1gbit", "ok_topk", number, 4, 1, None, "RuntimeError: no luck")

    schedule = replace(SCHEDULE, strategies="micro,ok_topk", rounds=2, compile_first=True, floor=False)
    found = [measured(COMPILING, 8.25), failed(COMPILING), measured(0, 0.125), measured(1, 0.0)]
    options = Bench(workload="mlp_1m", strategies=schedule.strategies, output=tmp_path)
    assert run._report(options, [schedule], lambda _: (each for each in found)) == 1
    (file,) = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["environment", "compiled", "round", "round", "round", "summary"]
    assert lines[-1]["rounds"] == 2
    said = capsys.readouterr().out
    (page,) = tmp_path.glob("*.md")
    for sentence in (
        "micro compiled kernels on 4x1gbit for 8.2 s before it was timed, and for 0.1 s while it was.",
        "ok_topk failed on 4x1gbit in round 0: RuntimeError: no luck",
    ):
        assert sentence in said
        assert f"- {sentence}" in page.read_text()


# --- statistics


def test_the_middle_half_is_between_the_quartiles() -> None:
    assert asdict(middle_half([5, 1, 2, 3, 4])) == {"value": 3, "low": 2, "high": 4}


def made_up(strategy: str, number: int, seconds: float, counted: float) -> Round:
    step = MeasuredStep(
        s=seconds,
        loss=1 / seconds,
        counted_bytes=counted,
        wire_bytes=counted * 1.01 + 66 * 100,
        wire_packets=100,
        ms_compress=None,
        ms_network=None,
        ms_span=500 * seconds,
        ms_wait=100,
        ms_apply=5,
    )
    untimed = MeasuredStep(**{**asdict(step), "s": 100.0})
    return Round("4x1gbit", strategy, number, 4, 1, MeasuredRun("cpu", 1, 1000, 10**8 + number, [untimed, step, step]))


def made_up_rounds() -> list[Round]:
    rounds = [made_up(NO_COMMUNICATION, 0, 0.5, 0), made_up("ddp", 0, 2, 1e6), made_up("skip_reduce", 0, 1, 5e5)]
    rounds += [made_up("ddp", 1, 4, 1e6), made_up("skip_reduce", 1, 2, 5e5)]
    return [*rounds, Round("4x1gbit", "powersgd_1", 0, 4, 1, None, "RuntimeError: no luck")]


def test_summary() -> None:
    rows = {row.strategy: row for row in summarise(made_up_rounds(), "ddp")}
    assert list(rows) == [NO_COMMUNICATION, "ddp", "skip_reduce"]
    row = rows["skip_reduce"]
    assert (row.rounds, row.ranks) == (2, 4)
    assert row.s.value == 1.5
    assert row.ratio is not None
    assert row.ratio.value == 0.5  # within a round: the second is twice as slow, for both
    assert rows["ddp"].ratio is None
    assert row.unexplained == pytest.approx(0.01)
    assert rows[NO_COMMUNICATION].unexplained is None
    assert row.loss == pytest.approx((1 + 0.5) / 2)
    assert row.peak_memory_bytes == 10**8 + 1


def test_what_a_host_of_several_ranks_sent_is_not_compared_with_what_a_rank_did() -> None:
    rounds = [replace(each, hosts=2) for each in made_up_rounds()]
    rows = {row.strategy: row for row in summarise(rounds, "ddp")}
    assert rows["ddp"].unexplained is None
    assert rows["ddp"].wire_bytes == 1e6 * 1.01 + 66 * 100
    one_each = [replace(each, hosts=4) for each in made_up_rounds()]
    assert summarise(one_each, "ddp") == summarise(made_up_rounds(), "ddp")


def test_rounds_and_summaries_survive_json() -> None:
    for measured in made_up_rounds():
        assert Round.from_json(json.loads(json.dumps(asdict(measured)))) == measured
    for row in summarise(made_up_rounds(), "ddp"):
        assert Summary.from_json(json.loads(json_line("summary", row))) == row


def test_mean_over_ranks_leaves_out_what_a_rank_did_not_measure() -> None:
    one = made_up("ddp", 0, 2, 1e6).run
    other = made_up("ddp", 0, 4, 1e6).run
    assert one is not None
    assert other is not None
    silent = MeasuredRun(
        "cpu", 1, 1000, 5, [MeasuredStep(**{**asdict(step), "wire_bytes": None}) for step in other.steps]
    )
    mean = MeasuredRun.mean([one, silent])
    assert mean.steps[1].s == 3
    assert mean.steps[1].wire_bytes == one.steps[1].wire_bytes
    assert mean.steps[1].ms_compress is None
    assert mean.peak_memory_bytes == 10**8


def test_the_tables_on_a_console_fit_in_100_columns() -> None:
    label = "skip_reduce:skip=0.5:wire_dtype=bfloat16"
    rounds = [made_up("ddp", 0, 123.4, 123.45e6), made_up(label, 0, 123.4, 123.45e6)]
    (table,) = report.tables(summarise(rounds, "ddp"), "mlp_25m", report.ON_CONSOLE)
    console = Console(width=100)
    with console.capture() as capture:
        console.print(table)
    assert "\N{HORIZONTAL ELLIPSIS}" not in capture.get()  # nothing is cut off
    for shown in (*report.ON_CONSOLE, "123400 ms", "1.00..1.00", "123.45 MB", "100.00 MB"):
        assert shown in capture.get()


def test_the_page_shows_every_row_and_every_failure() -> None:
    rounds = made_up_rounds()
    facts = environment("lightning-sparse bench")
    text = page(summarise(rounds, "ddp"), report.failures(rounds), "mlp_1m", facts, ["a.jsonl", "b.svg"])
    for shown in ("mlp_1m on 4x1gbit: 4 ranks, 2 rounds", "0.500", "+1.0%"):
        assert shown in text
    assert "powersgd_1 failed on 4x1gbit in round 0: RuntimeError: no luck" in text
    assert re.search(r"^\| `skip_reduce` \| 1500 ms \|", text, re.MULTILINE)
    assert "- **unexplained**: wire without a header of 66 bytes a packet" in text
    assert "[a.jsonl](a.jsonl)" in text
    assert "![b.svg](b.svg)" in text


def test_environment_names_versions_and_no_host() -> None:
    facts = environment("lightning-sparse bench")
    assert {"command", "cpu", "cores", "memory_bytes", "system", "python", "torch", "lightning"} <= set(facts)
    assert os.uname().nodename not in json.dumps(facts).split()


def test_a_plot_of_the_loss(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rounds = made_up_rounds()
    assert report.draw(rounds, tmp_path, "today") == ["today-4x1gbit-loss.svg"]
    assert (tmp_path / "today-4x1gbit-loss.svg").read_text().startswith("<?xml")


def test_missing_matplotlib_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    assert main(["bench", "--plot", "--workload", "gpt_10m"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


# --- where a rank is


def test_place_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29400"}
    variables["GROUP_WORLD_SIZE"] = "4"  # one of two ranks, and others of others
    for name, value in {**variables, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    before, place = read_sent("lo"), RankInfo.find(None)
    assert read_sent("lo") >= before
    assert place == RankInfo(3, 1, 6, 2, 4, "127.0.0.1", 29400, store_is_there=False, interface="lo")
    with pytest.raises(ValueError, match=r"an interface must be one of this host's, .*lo.*; got 'eth99'"):
        RankInfo.find("eth99")


@pytest.mark.parametrize(
    ("cluster", "hosts", "local_size", "accelerator", "alike"),
    [
        ("2x2x1gbit", 2, 2, "cpu", True),
        ("1x2x1gbit+1x4x1gbit", 2, 2, "cpu", False),
        ("2x2x1gbit", 2, 2, "cuda", False),  # which all share
        ("2 hosts", 2, 2, "auto", True),
    ],
)
def test_lightning_sees_hosts_that_are_alike(
    cluster: str, hosts: int, local_size: int, accelerator: str, alike: bool
) -> None:
    size = 4 if cluster[0] == "2" else 6
    place = RankInfo(3, 1, size, local_size, hosts, "127.0.0.1", 29400, store_is_there=False, interface="lo")
    schedule = replace(SCHEDULE, cluster=cluster, accelerator=accelerator)
    seen = worker.as_nodes(Turn(schedule, place, 0, parse_strategies("ddp")[0], HashStore()))
    assert seen == (place if alike else replace(place, local_rank=0, local_size=1, hosts=size))


def test_the_cause_of_a_failure_is_told_and_not_its_consequences() -> None:
    store = HashStore()
    errors = ["stopped, since another rank failed", "RuntimeError: gloo: Connection closed", "ValueError: the cause"]
    for rank, error in enumerate(errors):
        store.set(f"rank {rank}", json.dumps({"error": error}))
    place = RankInfo(0, 0, 3, 1, 3, "127.0.0.1", 29400, store_is_there=False, interface="lo")
    measured = worker._gather(Turn(SCHEDULE, place, 1, parse_strategies("ddp")[0], store))
    assert (measured.strategy, measured.number, measured.error) == ("ddp", 1, "ValueError: the cause")
    assert measured.timed == []


# --- the command line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--workload", "gpt5"], "a workload must be one of mlp_1m"),
        (["--strategies", "dpp"], "got 'dpp'"),
        (["--steps", "0"], "--steps must be at least 1; got 0"),
        (["--seconds", "60"], "--seconds needs --until-loss"),
        (["--until-loss", "3,two", "--workload", "gpt_10m"], "--until-loss must be numbers, separated by commas"),
        (
            ["--until-loss", "3", "--workload", "mlp_1m"],
            "held-out data, one of gpt_3m, gpt_10m, gpt_50m, gpt_124m, byte_lm; got",
        ),
        (["--learning-rates", "1e-3"], "--learning-rates needs --until-loss"),
        (["--learning-rates", "0"], "--learning-rates must be numbers above 0, separated by commas; got '0'"),
        (["--seeds", "1.5"], "--seeds must be numbers of at least 0, separated by commas; got '1.5'"),
        (["--emulate", "4x1gb"], "cluster '4x1gb': a rate must be"),
        (["--emulate", "1x1gbit"], "an emulated cluster must have at least 2 hosts; got '1x1gbit'"),
        ([], "no ranks to measure between: give --emulate 4x1gbit, say"),
    ],
)
def test_bad_command_says_what_to_do(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    assert main(["bench", *words]) == 2
    assert message in capsys.readouterr().err


def test_without_root_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "unavailable_reason", lambda: "an emulated cluster needs root")
    assert main(["bench", "--emulate", "2x1gbit"]) == 2
    assert "needs root" in capsys.readouterr().err


# --- real runs


def leftovers() -> set[str]:
    """Workers, and the other processes that this one started, such as those that hold namespaces."""
    tasks = Path("/proc/self/task").iterdir()
    children = {pid for task in tasks for pid in (task / "children").read_text().split()}
    return children | {str(pid) for pid in workers()}


def workers() -> Iterator[int]:
    """Processes that this one started, directly or not, whose command is a worker's."""
    for path in Path("/proc").iterdir():
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            marked = f"BENCH_TEST={os.getpid()}".encode() in (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"lightning_sparse.bench.compare.worker" in words and marked:
            yield int(path.name)


def read_results(folder: Path) -> dict[str, list[dict[str, object]]]:
    (file,) = folder.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {kind: [line for line in lines if line["kind"] == kind] for kind in ("environment", "round", "summary")}


@pytest.mark.programs
@emulated
def test_emulated_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Two rounds, in the first of which two learning rates are tried."""
    monkeypatch.setenv("BENCH_TEST", str(os.getpid()))
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = leftovers()
    words = [
        "bench",
        "--emulate",
        "1x200mbit+1x1gbit",
        "--workload",
        "byte_lm",
        "--strategies",
        "ddp,skip_reduce:lr=0.001",
    ]
    words += ["--steps", "3", "--warmup", "1", "--until-loss", "1", "--learning-rates", "1e-6,4e-3", "--seeds", "3,4"]
    words += ["--output", str(tmp_path / "results")]
    assert main(words) == 0
    assert leftovers() == before
    assert list(temporary.iterdir()) == []

    assert "byte_lm on 1x200mbit+1x1gbit: 2 ranks, 2 rounds" in capsys.readouterr().out
    results = read_results(tmp_path / "results")
    assert results["environment"][0]["command"] == " ".join(["lightning-sparse", *words])
    assert [(r["strategy"], r["number"], r["learning_rate"], r["error"]) for r in results["round"]] == [
        *((strategy, 0, rate, "") for strategy in (NO_COMMUNICATION, "ddp") for rate in (1e-6, 4e-3)),
        ("skip_reduce:lr=0.001", 0, 0.001, ""),
        ("skip_reduce:lr=0.001", 1, 0.001, ""),
        *((strategy, 1, 4e-3, "") for strategy in ("ddp", NO_COMMUNICATION)),
    ]
    rounds = [Round.from_json(r) for r in results["round"]]
    assert all(r.run is not None and len(r.run.steps) == 4 and len(r.timed) == 3 for r in rounds)
    rows = {row.strategy: row for row in summarise(rounds, "ddp")}
    assert [row["strategy"] for row in results["summary"]] == list(rows)
    for name, counted in (("ddp", 4 * 279_168), ("skip_reduce:lr=0.001", 2 * 279_168)):
        row = rows[name]
        assert row.counted_bytes == pytest.approx(counted, rel=0.001)
        assert row.unexplained is not None
        assert abs(row.unexplained) < 0.1
        assert row.loss is not None
    assert rows["skip_reduce:lr=0.001"].ms_compress is not None
    (written,) = (tmp_path / "results").glob("*.md")
    assert re.search(r"^\| `ddp` \| 0.004\* \|", written.read_text(), re.MULTILINE)


@pytest.mark.programs
@emulated
@pytest.mark.parametrize("cluster", ["2x2x100mbit", "1x1x100mbit+1x2x100mbit"])
def test_hosts_of_several_ranks(tmp_path: Path, cluster: str) -> None:
    """What the kernel counts is a host's: of plain DDP's ring what one rank sends, and nothing of what stays inside."""
    words = ["bench", "--emulate", cluster, "--workload", "mlp_1m", "--strategies", "ddp,micro", "--rounds", "1"]
    assert main([*words, "--steps", "3", "--warmup", "1", "--output", str(tmp_path)]) == 0
    rounds = [Round.from_json(r) for r in read_results(tmp_path)["round"]]
    ranks = parse(cluster).ranks
    assert [(r.strategy, r.error, r.ranks, r.hosts) for r in rounds] == [
        (name, "", ranks, 2) for name in (NO_COMMUNICATION, "ddp", "micro")
    ]
    silent, ddp, micro = summarise(rounds, "ddp")
    assert ddp.unexplained is None
    assert ddp.wire_bytes is not None
    assert 1 < ddp.wire_bytes / ddp.counted_bytes < 1.5
    assert micro.wire_bytes is not None
    assert micro.wire_bytes < 0.3 * ddp.wire_bytes
    assert silent.wire_bytes is not None
    assert silent.wire_bytes < 20_000
    assert silent.counted_bytes == 0


@pytest.mark.programs
@emulated
@pytest.mark.parametrize("sizes", [(2, 2), (1, 2)])
def test_torchrun_on_two_hosts_of_several_ranks_trains(tmp_path: Path, sizes: tuple[int, int]) -> None:
    with Cluster("2x1gbit") as cluster:

        def command(host: int) -> list[str]:
            torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={sizes[host]}"]
            where = [f"--node-rank={host}", f"--master-addr={cluster.address(0)}", "--master-port=29400"]
            bench = ["-m", "lightning_sparse.cli", "bench", "--workload", "mlp_1m", "--output", str(tmp_path)]
            return [*torchrun, *where, *bench, "--strategies=skip_reduce", "--steps=2", "--warmup=1", "--rounds=1"]

        done = cluster.run([command(host) for host in range(2)], timeout_s=150, env={"TMPDIR": str(tmp_path)})
    assert f"mlp_1m on 2 hosts: {sum(sizes)} ranks, 1 round" in done[0].stdout
    results = read_results(tmp_path)
    assert {r["strategy"]: r["error"] for r in results["round"]} == {NO_COMMUNICATION: "", "skip_reduce": ""}


@pytest.mark.programs
@emulated
def test_interrupted_run_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BENCH_TEST", str(os.getpid()))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    before = leftovers()
    results = tmp_path / "results"
    ended = threading.Event()

    def interrupt_while_training() -> None:
        while not ended.wait(0.1):
            # Two workers, the server of their store, and two processes that train; the first turn is done.
            if len(list(workers())) == 5 and any(f.stat().st_size > 2000 for f in results.glob("*.jsonl")):
                os.kill(os.getpid(), signal.SIGINT)
                return

    interrupter = threading.Thread(target=interrupt_while_training)
    interrupter.start()
    words = ["bench", "--emulate", "2x10mbit", "--workload", "mlp_1m", "--strategies", "ddp"]
    try:
        status = main([*words, "--output", str(results)])
    finally:
        ended.set()
        interrupter.join()
    assert status == 130
    assert "interrupted; what was measured so far is in" in capsys.readouterr().err
    assert leftovers() == before
    assert list(temporary.iterdir()) == []
    done = read_results(results)["round"]
    assert done
    (written,) = results.glob("*.md")
    assert f"- turns: {len(done)} of 10" in written.read_text()


def test_runs_side_by_side_write_files_of_their_own(tmp_path: Path) -> None:
    assert [new_file(tmp_path, "now").name for _ in range(3)] == ["now.jsonl", "now-2.jsonl", "now-3.jsonl"]
