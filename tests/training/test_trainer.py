"""The strategy inside an ordinary Trainer, on real processes."""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from tests.support import training_loop as models
from tests.support.models import Small, data, small, trainer, weights
from tests.support.processes import Ranks
from tests.support.said import error_of, refusal, warned


def fit(rank: int, size: int, strategies: list[Any], steps: int) -> list[tuple[Tensor, dict[str, Any]]]:
    """Weights after training with each strategy, and what the exchange reported last."""
    results = []
    for strategy in strategies:
        model, monitor = small(), ls.CompressionMonitor(table=False, per_group=True)
        run = trainer(strategy, size, max_steps=steps, callbacks=[monitor])
        run.fit(model, data(steps, size))
        results.append((weights(model), {k: float(v) for k, v in run.callback_metrics.items()}))
    return results


def test_every_name_trains_and_replicas_stay_identical(ranks: Ranks) -> None:
    names: list[Any] = list(ls.COMPRESSORS)
    names += [
        ls.SparseDDPStrategy(ls.SkipReduce(0.5), wire_dtype="bfloat16", fusion="none"),
        ls.SparseDDPStrategy("sparse_topk", warmup_steps=3, fusion="bucket", bucket_cap_mb=0.001),
        "skip_reduce_find_unused_parameters_true",
    ]
    results = ranks.run(fit, 3, names, 5)
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


@dataclass(frozen=True)
class Fails(ls.Compressor):
    def reduce(self, group: Group, comm: Comm) -> Rounds:
        yield comm.all_reduce(group.unsent.clone())
        raise ZeroDivisionError("in the compressor")


def fail(rank: int, size: int) -> tuple[str, str]:
    return error_of(lambda: trainer(ls.SparseDDPStrategy(Fails()), size, max_steps=3).fit(small(), data(3, size)))


def test_an_error_in_a_compressor_is_raised_as_it_is(ranks: Ranks) -> None:
    """DDP would say "Unable to cast ... in future to Tensor"."""
    assert ranks.run(fail, 2) == [("ZeroDivisionError", "in the compressor")] * 2


REFUSED: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("leave out static_graph=True", {"static_graph": True}, Small, {"accumulate_grad_batches": 2}),
    ("table must be an embedding with sparse=False", {}, partial(models.Tokens, sparse=True), {}),
    ("net.0.weight must be .*; got torch.float64", {}, lambda: small().double(), {}),
    ("net.2.weight must be .*; got torch.float64", {}, partial(models.Dtypes, torch.float64), {}),
    ("there is nothing to train; got 6 parameters, all frozen", {}, lambda: small().requires_grad_(False), {}),
]


def refuse(rank: int, size: int) -> list[str]:
    return [
        refusal(trainer(ls.SparseDDPStrategy(**how), size, max_steps=2, **options).fit, model(), data(4, size))
        for _, how, model, options in REFUSED
    ]


def test_what_cannot_work_is_refused_at_setup(ranks: Ranks) -> None:
    for messages in ranks.run(refuse, 2):
        for message, (words, *_) in zip(messages, REFUSED, strict=True):
            assert re.search(words, message), message


def start(variants: list[str], folder: str) -> dict[str, tuple[bool, list[str]]]:
    """Whether processes that Lightning starts train, and what is warned of when one saves after them."""
    results = {}
    for variant in variants:
        model = small()
        before = weights(model).clone()
        run = trainer(f"skip_reduce{variant}", 2, max_steps=4)
        run.fit(model, data(4, 2))
        said = warned(run.save_checkpoint, f"{folder}/late.ckpt")
        results[variant] = bool((weights(model) != before).any()), said
    return results


@pytest.mark.programs
def test_every_start_method_trains(ranks: Ranks, tmp_path: Path) -> None:
    """A script that Lightning starts once more: test_it_runs_as_a_script."""
    variants = ["_fork", "_spawn"]
    results = ranks.apart(start, tmp_path / "output", variants, str(tmp_path))
    assert list(results) == variants
    for trained, said in results.values():
        assert trained
        assert "late.ckpt is written without residuals and optimizer states" in "".join(said)


def alone() -> float:
    run = trainer("skip_reduce", 1, max_steps=4, callbacks=[ls.CompressionMonitor()])
    run.fit(small(), data(4, 1))
    return float(run.callback_metrics["sparse/compression_ratio"])


def test_a_single_process_trains(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.apart(alone, tmp_path / "output") == 1.0
