"""Two levels: ranks of a node average densely, and nodes exchange compressed gradients, each as one rank."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.auto.chooser import Chooser
from lightning_sparse.engine.bucket import Report
from tests.support.models import Does, Small, data, small, trainer, weights
from tests.support.processes import Ranks
from tests.support.said import refusal

NAMES = ["sparse_dense", "skip_reduce", "micro", "low_rank"]
STEPS = 6


class Given(nn.Module):
    """Two parameters whose gradients are what it is fed."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.ones(37, 5))
        self.b = nn.Parameter(torch.ones(211))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a.flatten() * x[:185]).sum() + (self.b * x[185:]).sum()


def given(step: int, rank: int) -> Tensor:
    return torch.randn(396, generator=torch.Generator().manual_seed(1000 * step + rank))


def kept(hook: ls.SparseHook) -> Tensor:
    """What is unsent of this rank's slices, where they lie; zeros elsewhere."""
    whole = {"a": torch.zeros(37, 5), "b": torch.zeros(211)}
    for group in hook.averager.groups:
        for name, shape, slot in zip(group.names, group.shapes, group.slots(group.unsent), strict=True):
            group.cut.own(whole[name]).copy_(slot.view(shape))
    return torch.cat([whole["a"].flatten(), whole["b"]])


def delivered(ddp: DistributedDataParallel, gradients: list[Tensor]) -> Tensor:
    """The sum of the means."""
    total = torch.zeros(396, dtype=torch.float64)
    for gradient in gradients:
        ddp.zero_grad()
        ddp(gradient).backward()
        total += torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])
    return total


def run(rank: int, size: int, cases: list[tuple[str, str]]) -> list[Any]:
    """Of each case, a name and the machine of each rank: what was delivered, what is unsent, and so after a resume."""
    results: list[Any] = []
    own = [given(step, rank) for step in range(2 * STEPS)]
    for name, machines in cases:
        os.environ["NCCL_HOSTID"] = machines[rank]
        local_group: Any = "node" if len(set(machines)) > 1 else 2
        ddp = DistributedDataParallel(Given())
        hook = ls.SparseHook(ddp, name, fusion="none", local_group=local_group)
        total = delivered(ddp, own[:STEPS])
        unsent = kept(hook).clone()
        saved = [hook.state_dict()]
        dist.broadcast_object_list(saved)  # as if read from rank 0's file
        onward = delivered(ddp, own[STEPS:])
        sent = hook.averager.last.sent_bytes
        hook.close()

        again = DistributedDataParallel(Given())
        resumed = ls.SparseHook(again, name, fusion="none", local_group=local_group)
        resumed.load_state_dict(saved[0])
        results.append((total, unsent, onward, delivered(again, own[STEPS:]), sent))
        resumed.close()
        del ddp, again
    return results


MEMBERS: dict[str, list[tuple[int, ...]]] = {  # by the machine of each rank
    "AAAA": [(0, 1), (2, 3)],  # by their number
    "ABAB": [(0, 2), (1, 3)],  # as SLURM distributes cyclically
    "ABBA": [(0, 3), (1, 2)],  # so that the second column does not rise
    "AABBBB": [(0, 1), (2, 3), (4, 5)],
}
CASES = [*((name, "AAAA") for name in NAMES), ("micro", "ABAB"), ("micro", "ABBA")]


@pytest.mark.parametrize("cases", [CASES, [("micro", "AABBBB")]], ids=["four ranks", "unequal machines"])
def test_a_node_acts_as_one_rank_whose_gradient_is_the_mean_of_its_ranks(
    ranks: Ranks, cases: list[tuple[str, str]]
) -> None:
    per_rank = ranks.run(run, len(cases[0][1]), cases, gloo=True)
    for i, (name, machines) in enumerate(cases):
        members = MEMBERS[machines]
        gradients = [torch.stack([given(s, rank) for rank in of]).mean(0) for s in range(STEPS) for of in members]
        residual = torch.stack(gradients).double().sum(0)  # over members and steps
        totals, unsent, onward, resumed, sent = zip(*(results[i] for results in per_rank), strict=True)
        assert all(total.equal(totals[0]) for total in totals), (name, machines)
        law = len(members) * totals[0] + sum(each.double() for each in unsent)
        assert torch.allclose(law, residual, atol=1e-4), (name, machines)
        assert all(one.equal(other) for one, other in zip(onward, resumed, strict=True)), (name, machines)
        assert len(set(sent)) <= 2, name  # by column


def on_machines(rank: int, size: int, machines: str) -> tuple[bool, bool]:
    """Whether each rank's rows of a file are its own, and whether it goes on from them, on these machines by rank."""
    os.environ["NCCL_HOSTID"] = machines[rank]
    own = [given(step, rank) for step in range(2 * STEPS)]
    ddps = [DistributedDataParallel(Given()) for _ in range(2)]
    hooks = [ls.SparseHook(ddp, "micro", fusion="none", local_group="node") for ddp in ddps]
    delivered(ddps[0], own[:STEPS])
    saved = [hooks[0].state_dict()]
    dist.broadcast_object_list(saved)
    averager = hooks[0].averager
    are_own = all(
        averager.cut.own(saved[0]["unsent"][name][averager.rank]).flatten().equal(slot)
        for group in averager.groups
        for name, slot in zip(group.names, group.slots(group.unsent), strict=True)
    )
    hooks[1].load_state_dict(saved[0])
    goes_on = delivered(ddps[1], own[STEPS:]).equal(delivered(ddps[0], own[STEPS:]))
    for hook in hooks:
        hook.close()
    return are_own and kept(hooks[0]).any().item() and averager.size == len(set(machines)), goes_on


@pytest.mark.parametrize("machines", ["abbcca", "abab"])
def test_rows_of_a_file_are_of_the_member_whose_they_are_in_whatever_order_ranks_lie(
    ranks: Ranks, machines: str
) -> None:
    """Of the members 0 and 5, 1 and 2, 3 and 4 the second column is 5, 2, 4, whose group torch numbers otherwise."""
    assert ranks.run(on_machines, len(machines), machines, gloo=True) == [(True, True)] * len(machines)


def fit(rank: int, size: int, folder: str) -> Any:
    strategy = ls.SparseDDPStrategy(ls.MiCRO(density=0.1), local_group=2)
    run = trainer(strategy, size, max_steps=6, callbacks=[ls.CompressionMonitor(table=False, summary=False)])
    model = small()
    run.fit(model, data(8, size))
    run.save_checkpoint(f"{folder}/nodes.ckpt")
    wrong = [{"local_group": 3}, {"local_group": 0}, {"local_group": "nodes"}]
    messages = [refusal(fit_with, size, options) for options in wrong]
    fit_with(size, {"local_group": 2, "find_unused_parameters": True})
    return weights(model), float(run.callback_metrics["sparse/compression_ratio"]), messages


def fit_with(size: int, options: dict[str, Any]) -> None:
    trainer(ls.SparseDDPStrategy("micro", **options), size, max_steps=1).fit(small(), data(2, size))


def test_a_trainer_with_nodes_and_what_it_refuses(ranks: Ranks, tmp_path: Any) -> None:
    results = ranks.run(fit, 4, str(tmp_path))
    assert all(trained.equal(results[0][0]) for trained, _, _ in results)
    assert all(ratio > 1 for _, ratio, _ in results)
    saved = torch.load(tmp_path / "nodes.ckpt", weights_only=True)["lightning_sparse"]
    assert saved["size"] == 2
    assert all(len(rows) == 2 for rows in saved["unsent"].values())  # one a node
    for _, _, messages in results:
        assert "local_group must divide the number of ranks, 4; got 3." in messages[0]
        assert "got 0. Or give 'node'" in messages[1]
        assert "got 'nodes'. Or give 'node'" in messages[2]


def overflow(rank: int, size: int, wrong: int, local_size: int) -> list[Any]:
    """One step in which a gradient of rank ``wrong`` is infinite, between two good ones."""
    ddp = DistributedDataParallel(Given())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    hook = ls.SparseHook(ddp, "micro", scaler=scaler, local_group=local_size)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    trace: list[Any] = []
    for step in range(3):
        x = given(step, rank)
        if step == 1 and rank == wrong:
            x = x.clone()
            x[200] = torch.inf
        optimizer.zero_grad()
        scaler.scale(ddp(x)).backward()
        scaler.step(optimizer)
        scaler.update()
        trace.append((weights(ddp), kept(hook).clone(), scaler.get_scale()))
    hook.close()
    return trace


@pytest.mark.parametrize("local_size", [1, 2])
def test_an_overflow_on_any_rank_of_a_node_undoes_the_step_everywhere(ranks: Ranks, local_size: int) -> None:
    for trace in ranks.run(overflow, 4, 3, local_size, gloo=True):  # rank 3 leads no node of two
        assert [scale for _, _, scale in trace] == [8.0, 4.0, 4.0]
        assert trace[1][0].equal(trace[0][0])
        assert trace[1][1].equal(trace[0][1])
        assert not trace[2][0].equal(trace[1][0])
        assert trace[2][1].isfinite().all()


def gathered_text(rank: int, size: int) -> list[str]:
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    hook = ls.SparseHook(ddp, "sparse_dense", local_group=2)
    said = hook.averager.lanes.gather_text("0123456789"[: (7, 10, 3, 0)[rank]])
    hook.close()
    return said


def test_every_rank_of_every_member_is_asked(ranks: Ranks) -> None:
    assert ranks.run(gathered_text, 4, gloo=True) == [["0123456", "0123456789", "012", ""]] * 4


def watched(rank: int, size: int, local_steps: int) -> Any:
    """What the monitor says of the last step, and what is true of this rank's slices."""
    strategy = ls.SparseDDPStrategy("micro", wire_dtype="int4", local_steps=local_steps, local_group=2)

    def look(run: Any) -> tuple[float, Report | None]:
        averager = strategy.averager
        unsent = (averager.unsent_of(group).double().square().sum() for group in averager.groups)
        return float(sum(unsent)), averager.last

    last = Does("on_train_batch_end", look)
    monitor = ls.CompressionMonitor(table=False, summary=False)
    run = trainer(strategy, size, max_steps=6, log_every_n_steps=6, callbacks=[monitor, last])
    run.fit(small(), data(6, size))
    said = {name: float(x) for name, x in run.callback_metrics.items() if name.startswith("sparse/")}
    return said, *last.found[-1]


@pytest.mark.parametrize("local_steps", [0, 2])
def test_what_is_logged_is_of_all_slices_of_the_first_member(ranks: Ranks, local_steps: int) -> None:
    (said, *one), (other_said, *two), *_ = ranks.run(watched, 4, local_steps)
    assert said == other_said
    reports = one[1], two[1]
    assert said["sparse/unsent_norm"] == pytest.approx((one[0] + two[0]) ** 0.5, rel=1e-5)
    assert said["sparse/member_bytes"] == sum(report.sent_bytes for report in reports)
    assert said["sparse/sent_bytes"] == reports[0].sent_bytes
    picked, elements = (sum(float(getattr(report, name)) for report in reports) for name in ("picked", "elements"))
    assert said["sparse/density"] == pytest.approx(picked / elements)
    assert 0 < said["sparse/age"] < 20


class Wide(Small):
    """With as many elements as it takes to choose."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 2**15)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return super().training_step(batch, index) + self.wide(batch[0]).square().mean()


def choose(rank: int, size: int) -> Any:
    """Weights at the end, and what was chosen and expected, over and over."""
    said, choose_next = [], Chooser.next

    def noting(chooser: Chooser) -> ls.Candidate | None:
        found = choose_next(chooser)
        said.append((str(found), [(f.step_s, f.ranks, f.delivered, f.staleness) for f in chooser.forecasts]))
        return found

    Chooser.next = noting  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = Wide()
    trainer(ls.SparseDDPStrategy("sparse_auto", local_group=2), size, max_steps=120).fit(model, data(120, size))
    return weights(model), said


@pytest.mark.programs
def test_sparse_auto_chooses_the_same_on_all_ranks_of_all_members(ranks: Ranks) -> None:
    trained, said = zip(*ranks.run(choose, 4, gloo=True), strict=True)
    assert said[0]
    assert all(each == said[0] for each in said)
    assert {number for _, forecasts in said[0] for _, number, *_ in forecasts} == {2}  # of members
    assert all(each.equal(trained[0]) for each in trained)
