"""What goes wrong on one rank ends all of them, soon and with a word about it, and costs nothing that was saved."""

import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import lightning_sparse as ls
from lightning_sparse.bench.cluster import Cluster
from lightning_sparse.checkpoint.state import KEY
from tests import conftest
from tests.support.elastic import join_namespace
from tests.support.hosts import as_root
from tests.support.models import Does, data, small, trainer, unsent, weights
from tests.support.processes import End, Ranks, Running
from tests.support.said import warned
from tests.support.same import same

TIMEOUT_S = 5  # of messages, where one is waited for in vain
LONG_S = 60  # of messages, where none is
IN_TIME_S = 100  # to start, to notice and to end, beside other work on few cores
Whole = Callable[[int, str], list[Any]]
EPOCH, STEPS, FAULT_STEP = 4, 12, 5  # a checkpoint is written at every epoch's end

OF_MEMBERS: dict[str, dict[str, Any]] = {  # trainings of two ranks a member
    "micro of members": {"compressor": "micro", "local_group": 2},
    "local steps of members": {"compressor": "sparse_dense", "wire_dtype": "int4", "local_steps": 3, "local_group": 2},
}

emulated = conftest.emulated(3 * IN_TIME_S)

pytestmark = [pytest.mark.processes, pytest.mark.timeout(3 * IN_TIME_S)]


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stopped_for_a_while() -> None:
    own = os.getpid()
    if os.fork() == 0:
        time.sleep(1)
        os.kill(own, signal.SIGCONT)
        os._exit(0)
    stopped()


def cut_off() -> None:
    """Take this host's link away, for good."""
    subprocess.run(["ip", "link", "set", "dev", os.environ["GLOO_SOCKET_IFNAME"], "down"], check=True)


def cut_off_for_a_while() -> None:
    cut_off()
    if os.fork() == 0:
        time.sleep(5)
        subprocess.run(["ip", "link", "set", "dev", os.environ["GLOO_SOCKET_IFNAME"], "up"], check=True)
        os._exit(0)


def interrupted() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has background jobs ignore it
    os.kill(os.getpid(), signal.SIGINT)


def terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise ValueError("this batch cannot be read")


def no_room_on_disk() -> None:
    """Let no file of this process grow beyond what a checkpoint needs: the error of a full disk, for this process."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, resource.RLIM_INFINITY))


def fit(
    rank: int,
    size: int,
    name: str,
    folder: str,
    what: Callable[[], None] | None,
    on: int | None,
    resume: str | None,
    timeout_s: float = LONG_S,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    options = OF_MEMBERS.get(name, {"compressor": name})
    strategy = ls.SparseDDPStrategy(**options, timeout=timedelta(seconds=timeout_s))
    saver = ModelCheckpoint(dirpath=folder, every_n_train_steps=EPOCH, save_top_k=-1, filename="{step}")
    here = what and on in (None, rank)  # the fault, before a step
    fault = Does("on_train_batch_start", lambda run: what() if here and run.global_step == FAULT_STEP else None)
    run = trainer(strategy, size, max_steps=STEPS, callbacks=[saver, fault])
    model = small()
    run.fit(model, data(EPOCH, size), ckpt_path=resume)
    return weights(model), unsent(strategy)


def ends_of(ranks: Ranks, size: int, *args: Any) -> list[End]:
    with ranks.start(fit, size, *args, TIMEOUT_S) as running:
        return in_order(running)


def in_order(running: Running) -> list[End]:
    return sorted(running.ends(IN_TIME_S), key=lambda end: end.rank)


@pytest.fixture(scope="module")
def whole(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """The results of a training without a fault, by number of ranks and compressor."""

    @cache
    def train(size: int, name: str) -> list[Any]:
        return ranks.run(fit, size, name, str(tmp_path_factory.mktemp("whole")), None, None, None)

    return train


def goes_on_as_if_nothing_had_happened(ranks: Ranks, whole: Whole, size: int, name: str, folder: Path) -> None:
    """The last checkpoint before the fault resumes to the bits of a run without it."""
    saved = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime)
    assert [path.name for path in saved] == ["step=4.ckpt"], saved
    resumed = ranks.run(fit, size, name, str(folder / "on"), None, None, str(saved[-1]))
    assert same(resumed, whole(size, name))


def test_a_rank_that_is_killed_ends_the_others_and_training_resumes(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    ends = ends_of(ranks, 3, "micro", str(tmp_path), killed, 1, None)
    assert ends[1].error == "died with exit code -9"
    for end in (ends[0], ends[2]):
        assert "a message among the ranks failed" in str(end.error), end.error
    goes_on_as_if_nothing_had_happened(ranks, whole, 3, "micro", tmp_path)


def test_a_rank_that_stops_ends_the_others_within_the_time_limit(ranks: Ranks, tmp_path: Path) -> None:
    with ranks.start(fit, 3, "ok_topk", str(tmp_path), stopped, 1, None, TIMEOUT_S) as running:
        found = running.ends(IN_TIME_S)
        for end in (next(found), next(found)):
            assert "a message among the ranks failed" in str(end.error), end.error
            assert "imed out" in str(end.error) or "onnection closed" in str(end.error), end.error


def test_a_rank_that_stops_for_a_while_changes_nothing(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    assert same(ranks.run(fit, 2, "micro", str(tmp_path), stopped_for_a_while, 1, None), whole(2, "micro"))


@pytest.mark.parametrize(("size", "name"), [(3, "micro"), *((4, name) for name in OF_MEMBERS)])
def test_an_exception_on_one_rank_ends_the_others(
    ranks: Ranks, whole: Whole, tmp_path: Path, size: int, name: str
) -> None:
    ends = ends_of(ranks, size, name, str(tmp_path), fail, 2, None)
    assert "ValueError: this batch cannot be read" in str(ends[2].error)
    for end in (*ends[:2], *ends[3:]):
        assert "a message among the ranks failed" in str(end.error), end.error
    goes_on_as_if_nothing_had_happened(ranks, whole, size, name, tmp_path)


def fit_longer(rank: int, size: int) -> None:
    """Rank 1 has a batch more."""
    strategy = ls.SparseDDPStrategy("skip_reduce", timeout=timedelta(seconds=TIMEOUT_S))
    run = trainer(strategy, size, check_every=0, max_epochs=1, use_distributed_sampler=False)
    run.fit(small(), data(4 + rank, 1))


def test_a_rank_with_a_batch_more_fails_once_the_others_have_ended(ranks: Ranks) -> None:
    with ranks.start(fit_longer, 2) as running:
        first, second = sorted(running.ends(IN_TIME_S), key=lambda end: end.rank)
    assert first.error is None
    assert "a message among the ranks failed" in str(second.error), second.error


@pytest.mark.parametrize(
    ("what", "said"), [(interrupted, "SystemExit"), (terminated, "SIGTERMException")], ids=["ctrl_c", "sigterm"]
)
def test_a_signal_to_every_rank_ends_all(
    ranks: Ranks, whole: Whole, tmp_path: Path, what: Callable[[], None], said: str
) -> None:
    for end in ends_of(ranks, 2, "micro", str(tmp_path), what, None, None):
        assert said in str(end.error), end.error
    goes_on_as_if_nothing_had_happened(ranks, whole, 2, "micro", tmp_path)


def interrupt_members(rank: int, size: int, folder: Path) -> tuple[torch.Tensor, str]:
    """Interrupt all ranks in an interval of local steps; returns what they hold in the end, and what is said."""
    interrupts = Does("on_train_batch_start", lambda run: interrupted() if run.global_step == FAULT_STEP else None)
    callbacks = [OnExceptionCheckpoint(folder, "ended"), interrupts]
    run = trainer(ls.SparseDDPStrategy(**OF_MEMBERS["local steps of members"]), size, 0, callbacks=callbacks)
    model = small()

    def fit_until() -> None:
        with pytest.raises(SystemExit):
            run.fit(model, data(EPOCH, size))

    said = warned(fit_until)
    return weights(model), "\n".join(said)


def test_interrupted_members_keep_their_own_weights_and_say_so(ranks: Ranks, tmp_path: Path) -> None:
    """Of the average each rank has a slice, and one that is asked for its own may be gone."""
    ended = ranks.run(interrupt_members, 4, tmp_path)
    (first, said), (second, _), (third, _), (fourth, _) = ended
    assert first.equal(second)
    assert third.equal(fourth)
    assert not first.equal(third)
    assert said.count("The parameters hold what this machine has trained, not the average of all") == 1
    assert "ended.ckpt is written without residuals" in said
    assert KEY not in torch.load(tmp_path / "ended.ckpt", weights_only=True)


def test_a_full_disk_leaves_the_last_checkpoint_whole(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    ends = ends_of(ranks, 2, "micro", str(tmp_path), no_room_on_disk, 0, None)
    assert "File too large" in str(ends[0].error), ends[0].error
    assert ends[1].error is not None
    goes_on_as_if_nothing_had_happened(ranks, whole, 2, "micro", tmp_path)


def work(folder: Path) -> None:
    """One of torchrun's ranks: rank 1 is killed in its first attempt, and training goes on from the last checkpoint."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    what = killed if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else None
    saved = sorted(folder.glob("step=*.ckpt"), key=lambda path: path.stat().st_mtime)
    result = fit(rank, size, "micro", str(folder), what, 1, str(saved[-1]) if saved else None)
    torch.save(result, folder / f"rank{rank}.pt")


def torchrun(folder: Path) -> None:
    """What ``torchrun --standalone --nproc-per-node=2 --max-restarts=1`` does, with forked processes."""
    # Else the second attempt finds the first one's addresses in the store, where a rank is faster than its neighbour.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=2, max_restarts=1, start_method="fork", monitor_interval=0.1,
        run_id="tests", rdzv_backend="c10d", rdzv_endpoint="localhost:0",
    )  # fmt: skip
    elastic_launch(config, work)(folder)


def test_torchrun_starts_all_ranks_again_and_they_go_on_bit_for_bit(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    folder = tmp_path / "restarted"
    ranks.apart(torchrun, tmp_path / "output", folder, timeout_s=IN_TIME_S)
    assert "step=4.ckpt" in (tmp_path / "output").read_text()  # "Restoring states from ..."
    results = [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(2)]
    assert same(results, whole(2, "micro"))


def on_host(rank: int, size: int, namespaces: list[str], address: str, interface: str, *args: Any) -> Any:
    """``fit`` as the only rank of an emulated host, whose network namespace this process joins."""
    join_namespace(namespaces[rank])
    os.environ.update(
        GROUP_RANK=str(rank), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", MASTER_ADDR=address, GLOO_SOCKET_IFNAME=interface
    )
    return fit(rank, size, *args)


def on_emulated_hosts(ranks: Ranks, folder: Path, fault: Callable[[], None], timeout_s: float) -> list[End]:
    """Train on three hosts, of which number 1 is cut off."""
    with Cluster("3x1gbit") as cluster:
        where = [cluster.namespace(host) for host in range(3)], cluster.address(0), "eth0"
        with ranks.start(on_host, 3, *where, "micro", str(folder), fault, 1, None, timeout_s) as running:
            return in_order(running)


@pytest.mark.programs
@as_root
@emulated
def test_a_link_that_is_cut_for_five_seconds_changes_nothing(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    ends = on_emulated_hosts(ranks, tmp_path, cut_off_for_a_while, LONG_S)
    assert [end.error for end in ends] == [None] * 3
    assert same([end.value for end in ends], whole(3, "micro"))


@as_root
@emulated
def test_a_link_that_is_cut_for_good_ends_all_within_the_time_limit(ranks: Ranks, whole: Whole, tmp_path: Path) -> None:
    for end in on_emulated_hosts(ranks, tmp_path, cut_off, TIMEOUT_S):
        assert "a message among the ranks failed" in str(end.error), end.error
    goes_on_as_if_nothing_had_happened(ranks, whole, 3, "micro", tmp_path)
