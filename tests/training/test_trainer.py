"""The strategy inside an ordinary Trainer, on real processes."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from tests.conftest import Ranks
from tests.training.models import LIMIT_S, Small, data, small, trainer, weights

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]


def fit(rank: int, size: int, strategies: list[Any], steps: int, **kwargs: Any) -> list[tuple[Tensor, dict[str, Any]]]:
    """Weights after training with each strategy, and what the exchange reported last."""
    results = []
    for strategy in strategies:
        model = small(optimizer=kwargs.get("optimizer", "sgd"))
        options = {k: v for k, v in kwargs.items() if k != "optimizer"}
        run = trainer(
            strategy, size, max_steps=steps, callbacks=[ls.CompressionMonitor(table=False, per_group=True)], **options
        )
        run.fit(model, data(steps, size))
        results.append((weights(model), {k: float(v) for k, v in run.callback_metrics.items()}))
    return results


@pytest.mark.filterwarnings("ignore:CompressionMonitor has nothing to report")
def test_dense_on_two_ranks_is_plain_ddp_bit_for_bit(ranks: Ranks) -> None:
    strategies = ["ddp", "sparse_dense", ls.SparseDDPStrategy("sparse_dense", fusion="none")]
    for optimizer in ("sgd", "adam"):
        for results in ranks.run(_fit_kw, 2, strategies, 20, {"optimizer": optimizer}):
            plain, *ours = [trained for trained, _ in results]
            assert all(torch.equal(plain, trained) for trained in ours)


def _fit_kw(rank: int, size: int, strategies: list[Any], steps: int, options: dict[str, Any]) -> Any:
    return fit(rank, size, strategies, steps, **options)


@pytest.mark.filterwarnings("ignore:CompressionMonitor has nothing to report")
def test_accumulated_gradients_and_bucket_views_on_two_ranks_are_plain_ddps(ranks: Ranks) -> None:
    strategies = ["ddp", ls.SparseDDPStrategy("sparse_dense", gradient_as_bucket_view=True)]
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}
    for (plain, _), (ours, _) in ranks.run(_fit_kw, 2, strategies, 20, options):
        assert torch.equal(plain, ours)


def test_every_name_trains_and_replicas_stay_identical(ranks: Ranks) -> None:
    names: list[Any] = list(ls.COMPRESSORS)
    names += [
        ls.SparseDDPStrategy(ls.SkipReduce(0.5), wire_dtype="bfloat16", fusion="none"),
        ls.SparseDDPStrategy("sparse_topk", warmup_steps=3, fusion="bucket", bucket_cap_mb=0.001),
        "skip_reduce_find_unused_parameters_true",
    ]
    results = ranks.run(_fit_kw, 3, names, 8, {}, timeout_s=LIMIT_S)
    for number, name in enumerate(names):
        trained, report = zip(*[r[number] for r in results], strict=True)
        assert all(torch.equal(w, trained[0]) for w in trained), name
        assert not torch.equal(trained[0], weights(small())), name
        assert report[0]["sparse/sent_bytes"] > 0, name
    dense, skip = results[0][names.index("sparse_dense")][1], results[0][0][1]
    assert dense["sparse/compression_ratio"] == pytest.approx(2 / 3, rel=0.01)  # so short a sum goes to everybody
    assert skip["sparse/compression_ratio"] == pytest.approx(4 / (4 - 2), rel=0.02)  # P = 3, s = 2
    assert skip["sparse/unsent_norm"] > 0
    for report in (results[0][names.index(name)][1] for name in ("micro", "ok_topk")):
        assert report["sparse/overflow"] >= 0
        assert report["sparse/density"] == report["sparse/density/0"]  # one group: both are of the whole
        assert report["sparse/threshold_error"] == report["sparse/threshold_error/0"]


def test_replicas_are_identical_after_50_steps_of_skip_reduce_on_four_ranks(ranks: Ranks) -> None:
    results = ranks.run(_fit_kw, 4, ["skip_reduce"], 50, {}, timeout_s=LIMIT_S)
    trained = [r[0][0] for r in results]
    assert all(torch.equal(w, trained[0]) for w in trained)
    n = trained[0].numel()
    assert results[0][0][1]["sparse/sent_bytes"] == 4 * 4 * -(-n // 4)  # (2(P-1) - s) / P * n * 4 bytes


class Unused(Small):
    """Uses its second head only on rank 1 and only in some steps; some parameters nobody ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.never = nn.Linear(8, 3), nn.Linear(8, 3)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        out = self.net(x)
        if self.global_rank == 1 and index % 3 == 0:
            out = out + self.other(x)
        return nn.functional.cross_entropy(out, y)


class Mass(L.Callback):
    """Adds up what each rank's gradients were and what was applied, for the law over many steps."""

    def __init__(self) -> None:
        self.own: dict[str, Tensor] = {}
        self.applied: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, run: L.Trainer, module: Any, optimizer: Any) -> None:
        for name, p in module.named_parameters():
            if p.grad is not None:
                self.applied[name] = self.applied.get(name, 0) + p.grad.double()


def laws_with_unused(rank: int, size: int) -> list[Any]:
    return [law_with_unused(size, name) for name in ls.COMPRESSORS]


def law_with_unused(size: int, name: str) -> Any:
    torch.manual_seed(0)
    model, mass = Unused(), Mass()
    strategy = ls.SparseDDPStrategy(name, find_unused_parameters=True)
    run = trainer(strategy, size, max_steps=30, callbacks=[mass])
    # what this rank's own gradient is, before DDP touches it
    for pname, p in model.named_parameters():
        p.register_hook(lambda g, n=pname: mass.own.update({n: mass.own.get(n, 0) + g.double()}))
    run.fit(model, data(40, size))
    exchange = strategy.exchange
    assert exchange is not None
    unsent = {
        n: slot.double().view(p.shape)
        for g in exchange.groups
        for n, p, slot in zip(g.names, g.parameters, g.slots(g.unsent), strict=True)
    }
    return mass.own, mass.applied, unsent


def test_parameters_without_a_gradient_lose_nothing(ranks: Ranks) -> None:
    """DDP throws the mean of a parameter away that no rank used: what was sent of it then would be lost."""
    size = 2
    for name, *results in zip(ls.COMPRESSORS, *ranks.run(laws_with_unused, size, timeout_s=LIMIT_S), strict=True):
        applied = results[0][1]
        for pname in results[0][2]:
            given = sum(own.get(pname, torch.zeros((), dtype=torch.float64)) for own, _, _ in results)
            kept = sum(unsent[pname] for _, _, unsent in results)
            got = applied.get(pname, torch.zeros((), dtype=torch.float64)) * size
            assert torch.allclose(got + kept, given.expand_as(kept), atol=1e-4), (name, pname)
        assert "other.weight" in applied
        assert not any(n.startswith("never") for n in applied)


@dataclass(frozen=True)
class Fails(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        yield comm.all_reduce(group.unsent.clone())
        raise ZeroDivisionError("in the compressor")


def fail(rank: int, size: int) -> str:
    try:
        trainer(ls.SparseDDPStrategy(Fails()), size, max_steps=3).fit(small(), data(3, size))
    except ZeroDivisionError as error:
        return str(error)
    return "nothing was raised"


def test_an_error_in_a_compressor_is_raised_as_it_is(ranks: Ranks) -> None:
    """DDP would say "Unable to cast ... in future to Tensor"."""
    assert ranks.run(fail, 2) == ["in the compressor"] * 2


def refuse(rank: int, size: int) -> list[str]:
    class Sparse(Small):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(4, 4, sparse=True)

    cases: list[tuple[Any, Any, dict[str, Any]]] = [
        (ls.SparseDDPStrategy(static_graph=True), small(), {"accumulate_grad_batches": 2}),
        ("skip_reduce", Sparse(), {}),
        ("skip_reduce", small().double(), {}),
    ]
    messages = []
    for strategy, model, options in cases:
        try:
            trainer(strategy, size, max_steps=2, **options).fit(model, data(4, size))
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_what_cannot_work_is_refused_at_setup(ranks: Ranks) -> None:
    for messages in ranks.run(refuse, 2):
        assert "leave out static_graph=True" in messages[0]
        assert "table must be an embedding with sparse=False" in messages[1]
        assert "net.0.weight must be float32, bfloat16 or float16; got torch.float64" in messages[2]


def start(variants: list[str], folder: str) -> dict[str, tuple[bool, list[str]]]:
    """Whether processes that Lightning starts train, and what is warned of when one saves after them."""
    results = {}
    for variant in variants:
        model = small()
        before = weights(model).clone()
        run = trainer(f"skip_reduce{variant}", 2, max_steps=4)
        run.fit(model, data(4, 2))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            run.save_checkpoint(f"{folder}/late.ckpt")
        results[variant] = bool((weights(model) != before).any()), [str(each.message) for each in warned]
    return results


def test_every_start_method_trains(ranks: Ranks, tmp_path: Path) -> None:
    """A script that Lightning starts once more: test_it_runs_as_a_script."""
    variants = ["_fork", "_notebook", "_spawn"]
    results = ranks.apart(start, tmp_path / "output", variants, str(tmp_path), timeout_s=LIMIT_S)
    assert list(results) == variants
    for trained, warned in results.values():
        assert trained
        assert "late.ckpt is written without residuals and optimizer states" in "".join(warned)


def alone() -> float:
    run = trainer("skip_reduce", 1, max_steps=4, callbacks=[ls.CompressionMonitor()])
    run.fit(small(), data(4, 1))
    return float(run.callback_metrics["sparse/compression_ratio"])


def test_a_single_process_trains(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.apart(alone, tmp_path / "output", timeout_s=LIMIT_S) == 1.0


def test_the_strategy_is_a_ddp_strategy() -> None:
    assert issubclass(ls.SparseDDPStrategy, DDPStrategy)
