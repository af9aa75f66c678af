"""What Lightning's own tests ask of its DDPStrategy, asked of both: the answers are the same.

Which of Lightning's tests each of these stands for: docs/lightnings-tests.md.
"""

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import callbacks
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchmetrics import MeanMetric

import lightning_sparse as ls
from lightning_sparse.checkpoint.state import KEY
from tests.support.models import Small, data, small, trainer, weights
from tests.support.on_one_device import only_on_cpu
from tests.support.processes import Ranks
from tests.support.said import error_of
from tests.support.same import same

Scenario = Callable[[Callable[..., DDPStrategy], int, Path], Any]


def ours(**options: Any) -> ls.SparseDDPStrategy:
    return ls.SparseDDPStrategy("sparse_dense", **options)


def with_each(rank: int, size: int, scenario: Scenario, folder: str) -> tuple[Any, Any]:
    """What is seen of plain DDP, and of ours."""
    seen = []
    for make in (DDPStrategy, ours):
        torch.manual_seed(0)
        seen.append(scenario(make, size, Path(folder) / make.__name__))
    return seen[0], seen[1]


def check_same(ranks: Ranks, scenario: Scenario, folder: Path) -> list[Any]:
    """Run the scenario with each strategy on two ranks; what was seen of plain DDP, by rank."""
    seen = []
    for plain, sparse in ranks.run(with_each, 2, scenario, str(folder)):
        for name in plain:
            assert same(plain[name], sparse[name]), f"{name}: {plain[name]} with plain DDP, {sparse[name]} with ours"
        assert plain.keys() == sparse.keys()
        seen.append(plain)
    return seen


# - a training


class Whole(Small):
    """Trains, validates, tests and predicts, and logs numbers that differ among ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = super().training_step(batch, index)
        for reduce in ("sum", "mean", "max", "min"):
            value = float(index + 10 * self.global_rank)
            self.log(reduce, value, on_step=True, on_epoch=True, sync_dist=True, reduce_fx=reduce)
        self.log("own", float(self.global_rank), on_epoch=True)
        self.log("apart", (2.0 * self.global_rank - 1) * self.current_epoch, on_step=False, on_epoch=True)
        self.mean(float(index + self.global_rank))
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", super().training_step(batch, index), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", super().training_step(batch, index), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> Tensor:
        scores: Tensor = self.net(batch[0])
        return scores


def loop(make: Callable[..., DDPStrategy], size: int, folder: Path) -> dict[str, Any]:
    files = CSVLogger(folder, version=0)
    stop = callbacks.EarlyStopping("apart", patience=1, check_on_train_epoch_end=True)  # rank 1's grows
    stop_never = callbacks.EarlyStopping("val_loss", patience=20)
    saver = callbacks.ModelCheckpoint(folder, monitor="val_loss", save_top_k=1, save_last=True)
    profiler = SimpleProfiler()
    run = trainer(
        make(), size, check_every=0, max_epochs=9, logger=files, log_every_n_steps=2,
        callbacks=[stop, stop_never, saver, callbacks.LearningRateMonitor()],
        profiler=profiler,
    )  # fmt: skip
    model, train, held_out = Whole(), data(6, size), data(2, size, seed=1)
    run.fit(model, train, held_out)
    seen = {
        "weights": weights(model),
        "stopped": (stop.stopped_epoch, run.current_epoch, run.global_step, run.state.finished),
        "metrics": dict(run.callback_metrics),
        "experiment": type(files.experiment).__name__,
        "log_dir": Path(run.log_dir or "").name,
        "saved": [Path(path).name for path in (saver.best_model_path, saver.last_model_path)],
        "profiled": sorted(action.replace("SparseDDP", "DDP") for action in profiler.recorded_durations),
        "gathered": run.strategy.all_gather(torch.tensor(float(run.global_rank))),
        # after the gathering, which rank 0 joins once it has written its file: rank 1 reads it too
        "logged": [path.read_text() for path in Path(files.log_dir).glob("metrics.csv")],
        "steps": run.estimated_stepping_batches,
    }
    saved = torch.load(saver.best_model_path, weights_only=False)
    seen["file"] = {key: saved[key] for key in ("epoch", "global_step", "state_dict", "optimizer_states")}
    seen["keys"] = sorted(saved.keys() - {KEY})
    loaded = Whole.load_from_checkpoint(saver.best_model_path)
    seen["tested"] = run.test(loaded, held_out, verbose=False)
    seen["validated"] = run.validate(model, held_out, ckpt_path="best", verbose=False)
    seen["predicted"] = run.predict(model, held_out)
    seen["unchanged"] = weights(model)
    return seen


def test_a_training_with_callbacks_loggers_and_evaluation(ranks: Ranks, tmp_path: Path) -> None:
    first, second = check_same(ranks, loop, tmp_path)
    assert first["stopped"] == (1, 2, 12, True)
    assert first["metrics"]["max_epoch"] == 5 + 10
    assert first["metrics"]["own"] == 0
    assert second["metrics"]["own"] == 1
    assert (first["experiment"] == "_DummyExperiment", second["experiment"] == "_DummyExperiment") == (False, True)
    assert same(first["tested"], second["tested"])
    assert not same(first["predicted"], second["predicted"])
    assert any("backward" in action for action in first["profiled"])


# - what a strategy wraps, and when


class Watch(L.Callback):
    """What a model is inside of, at each hook."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        for hook in ("setup", "on_fit_start", "on_validation_start", "on_test_start", "teardown"):
            setattr(self, hook, partial(self.note, hook))

    def note(self, hook: str, trainer: L.Trainer, pl_module: L.LightningModule, stage: str = "") -> None:
        layers = [type(layer).__name__ for layer in pl_module.modules() if isinstance(layer, _BatchNorm)]
        where = trainer.lightning_module is pl_module, pl_module.training, str(trainer.strategy.root_device)
        ready = dist.is_initialized(), dist.get_world_size(), dist.get_backend()
        self.seen.append(((hook + " " + stage).strip(), type(trainer.model).__name__, layers, where, ready))


class Normed(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def training_step(self, batch: Any, index: int) -> Tensor:
        return super().training_step((self.norm(batch[0]), batch[1]), index)


def wrap(make: Callable[..., DDPStrategy], size: int, folder: Path) -> dict[str, Any]:
    watch, seen = Watch(), {}
    options: dict[str, Any] = {"check_every": 0, "callbacks": [watch], "num_sanity_val_steps": 0, "max_steps": 2}
    normed = Normed()
    synced = trainer(make(), size, sync_batchnorm=True, **options)
    synced.validate(normed, data(1, size), verbose=False)
    synced.test(normed, data(1, size), verbose=False)
    seen["refused"] = error_of(lambda: synced.fit(normed, data(2, size)))
    watch.note("after", synced, normed)
    trainer(make(), size, **options).fit(Normed(), data(2, size), data(1, size))
    quick = trainer(make(), size, check_every=0, fast_dev_run=2)
    bare = L.Trainer(strategy=make(), accelerator="cpu", devices=size, barebones=True, max_epochs=1)
    for run in (quick, bare, bare):
        run.fit(run.lightning_module or Whole(), data(4, size), data(4, size))
        run.fit_loop.max_epochs = 2
    seen["steps"] = quick.global_step, bare.global_step
    seen["weights"] = [weights(run.lightning_module) for run in (quick, bare)]
    return seen | {"watched": watch.seen}


@only_on_cpu("layers of a device may be SyncBatchNorm")
def test_what_wraps_the_model_in_each_stage(ranks: Ranks, tmp_path: Path) -> None:
    for seen in check_same(ranks, wrap, tmp_path):
        kinds = {hook: (model, layers) for hook, model, layers, _, _ in seen["watched"]}
        assert kinds["on_fit_start"] == ("DistributedDataParallel", ["BatchNorm1d"])
        assert kinds["on_test_start"] == kinds["teardown test"] == ("Normed", ["BatchNorm1d"])
        assert seen["refused"] == ("ValueError", "SyncBatchNorm layers only work with GPU modules")
        assert seen["steps"] == (2, 8)


# - talking among ranks


class Gathers(Small):
    """Its loss is of what all ranks gather, and gradients flow back through it."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        scores: Any = self.all_gather(self.net(x), sync_grads=True)
        labels: Any = self.all_gather(y)
        loss: Tensor = nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())
        return loss


class OwnStart(Small):
    """Other weights on each rank, until the strategy makes them the first rank's."""

    def setup(self, stage: str) -> None:
        torch.manual_seed(self.global_rank)
        self.net = nn.Sequential(nn.Linear(8, 3))

    def test_step(self, batch: Any, index: int) -> None:
        self.tested = weights(self).clone()


def talk(make: Callable[..., DDPStrategy], size: int, folder: Path) -> dict[str, Any]:
    strategy, model = make(), Gathers()
    run = trainer(strategy, size, max_steps=4)
    run.fit(model, data(4, size))
    rank = run.global_rank
    own = torch.tensor([1.0 + rank], requires_grad=True)
    (strategy.all_gather(own, sync_grads=True) * (rank + 1)).sum().backward()
    some = torch.arange(3.0) + rank
    tree = {"float": some, "int": some.int(), "list": [some, some], "number": 1.5, "flag": True}
    mine = [[str(rank)], (rank,), {"rank": rank}]
    start = OwnStart()
    trainer(make(), size, check_every=0).test(start, data(1, size), verbose=False)
    strategy.barrier("here")
    return {
        "weights": weights(model),
        "gradient": own.grad,
        "gathered": model.all_gather(tree),
        "reduced": [strategy.reduce(some.clone(), reduce_op=op) for op in ("sum", "mean")] + [strategy.reduce(3)],
        "decided": [strategy.reduce_boolean_decision(rank == 0, all=every) for every in (True, False)],
        "report": (strategy.broadcast(mine), mine, strategy.broadcast(rank, src=1)),
        "started": start.tested,
    }


def test_ranks_gather_reduce_and_tell(ranks: Ranks, tmp_path: Path) -> None:
    first, second = check_same(ranks, talk, tmp_path)
    assert first["gradient"] == second["gradient"] == 1 + 2
    assert torch.equal(first["gathered"]["float"], second["gathered"]["float"])
    assert first["report"] == ([["0"], (0,), {"rank": 0}], [["0"], (0,), {"rank": 0}], 1)
    assert torch.equal(first["started"], second["started"])


# - which batches a rank sees


class Seen(Small):
    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def training_step(self, batch: Any, index: int) -> Tensor:
        rows, x, y = batch
        self.rows += rows.tolist()
        return super().training_step((x, y), index)


def samplers(make: Callable[..., DDPStrategy], size: int, folder: Path) -> dict[str, Any]:
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    rows = TensorDataset(torch.arange(32), x, (x.sum(1) > 0).long())
    seen: dict[str, Any] = {}
    own = DistributedSampler(rows, size, 0, seed=11)
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "all": ({"shuffle": True}, {}),
        "some": ({"shuffle": True}, {"limit_train_batches": 0.5}),
        "own sampler": ({"sampler": own}, {}),
    }
    for name, (loading, options) in cases.items():
        run, model = trainer(make(), size, max_epochs=2, **options), Seen()
        run.fit(model, DataLoader(rows, batch_size=4, **loading))
        sampler: Any = run.train_dataloader.sampler  # type: ignore[union-attr]
        kind = type(sampler).__name__, sampler.shuffle, sampler.seed, sampler.rank, sampler.num_replicas, sampler.epoch
        seen[name] = model.rows, kind, run.num_training_batches, run.estimated_stepping_batches
    return seen


def test_each_rank_sees_its_own_rows(ranks: Ranks, tmp_path: Path) -> None:
    first, second = check_same(ranks, samplers, tmp_path)
    assert sorted(first["all"][0][:16] + second["all"][0][:16]) == list(range(32))
    assert first["all"][2:] == (4, 8)
    assert first["some"][2] == 2
    assert first["own sampler"][0] == second["own sampler"][0]


# - optimizers


class Closures(Small):
    """Two optimizers that step at times of their own, each in a closure that goes twice through one graph."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:  # type: ignore[override]
        x, y = batch
        often, seldom = self.optimizers()  # type: ignore[misc, attr-defined]

        def closure() -> None:
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.manual_backward(loss, retain_graph=True)
            self.manual_backward(loss)
            for p in self.parameters():
                gathered: Any = self.all_gather(p.grad)
                assert torch.equal(gathered[0], gathered[1])

        if index % 2 == 1:
            often.step(closure=closure)
            often.zero_grad()
        if index % 4 == 0:
            seldom.step(closure=closure)
            seldom.zero_grad()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.Adam(self.parameters(), lr=0.001)]


class Sharded(Small):
    """Each rank keeps the optimizer's state of some parameters."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(self.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)


class Ignoring(Small):
    """DDP leaves one layer alone, so that each rank trains its own."""

    def __init__(self) -> None:
        super().__init__()
        self._ddp_params_and_buffers_to_ignore = ["net.2.weight", "net.2.bias"]


def optimize(make: Callable[..., DDPStrategy], size: int, folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for kind in (Closures, Sharded, Ignoring):
        torch.manual_seed(0)
        model = kind()
        run = trainer(make(), size, check_every=0, max_steps=6, max_epochs=1)
        run.fit(model, data(8, size))
        path = folder / f"{kind.__name__}.ckpt"
        run.save_checkpoint(path)
        saved = torch.load(path, weights_only=False)
        loaded = kind.load_from_checkpoint(path)
        seen[kind.__name__] = weights(model), saved["optimizer_states"], weights(loaded), run.global_step
    pruned = small()
    prune = callbacks.ModelPruning("l1_unstructured", amount=0.3, use_global_unstructured=True)
    run = trainer(make(), size, max_epochs=3, callbacks=[prune])
    run.fit(pruned, data(4, size))
    run.save_checkpoint(folder / "pruned.ckpt")
    seen["pruned"] = torch.load(folder / "pruned.ckpt", weights_only=False)["state_dict"]
    return seen


@pytest.mark.filterwarnings("ignore::FutureWarning")  # ZeroRedundancyOptimizer's torch.load
def test_optimizers_that_share_close_over_or_leave_out(ranks: Ranks, tmp_path: Path) -> None:
    first, second = check_same(ranks, optimize, tmp_path)
    assert torch.equal(first["Closures"][0], second["Closures"][0])
    assert first["Closures"][3] == 4 + 2
    assert torch.equal(first["Sharded"][0], first["Sharded"][2])
    assert not torch.equal(first["Ignoring"][0], second["Ignoring"][0])
    assert any(bool((tensor == 0).any()) for tensor in first["pruned"].values())


# - errors, and going on after them


class Forgets(Small):
    """Has a layer that no loss comes from."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten = nn.Linear(8, 8)


class Spikes(Small):
    """The loss of rank 1 is, in one step, far from all others."""

    def training_step(self, batch: Any, index: int) -> Tensor:
        far = self.global_rank == 1 and index == 4
        return super().training_step(batch, index) * (1e9 if far else 1.0)


class Breaks(Small):
    """Raises an error in its second epoch, on every rank."""

    broken = False

    def training_step(self, batch: Any, index: int) -> Tensor:
        if self.current_epoch == 1 and self.broken:
            raise ZeroDivisionError("in the second epoch")
        return super().training_step(batch, index)


def averaging() -> list[L.Callback]:
    kind = getattr(callbacks, "EMAWeightAveraging", None)  # since Lightning 2.6
    return [kind(decay=0.5)] if kind else []


def break_and_resume(make: Callable[..., DDPStrategy], size: int, folder: Path) -> Tensor:
    torch.manual_seed(0)
    model = Breaks()
    model.broken = True
    on_error = callbacks.OnExceptionCheckpoint(folder, "broken")
    saver = callbacks.ModelCheckpoint(folder, save_last=True)
    run = trainer(make(), size, max_epochs=3, callbacks=[saver, on_error, *averaging()])
    assert error_of(lambda: run.fit(model, data(4, size))) == ("ZeroDivisionError", "in the second epoch")
    run.strategy.barrier()
    assert (folder / "broken.ckpt").exists()
    again = trainer(make(), size, max_epochs=3, callbacks=averaging())
    resumed = Breaks()
    again.fit(resumed, data(4, size), ckpt_path=folder / "last.ckpt")
    return weights(resumed)


def go_wrong(make: Callable[..., DDPStrategy], size: int, folder: Path) -> dict[str, Any]:
    spike = SpikeDetection(warmup=1, exclude_batches_path=str(folder))
    cases: dict[str, tuple[L.LightningModule, list[L.Callback]]] = {
        "forgotten": (Forgets(), []),
        "spike": (Spikes(), [spike]),
        "batch size": (small(), [callbacks.BatchSizeFinder()]),
    }
    seen: dict[str, Any] = {}
    for name, (model, extra) in cases.items():
        run = trainer(make(), size, check_every=0, max_steps=8, callbacks=extra)
        kind, text = error_of(lambda run=run, model=model: run.fit(model, data(8, size)))  # type: ignore[misc]
        seen[name] = kind, text if name != "forgotten" else "not used in producing the loss" in text
    seen["resumed"] = break_and_resume(make, size, folder)
    run = trainer(make(), size, max_steps=2)
    run.fit(small(), data(4, size))
    seen["pickled"] = error_of(lambda: torch.save(run, io.BytesIO()))
    return seen


def test_errors_and_going_on_after_them(ranks: Ranks, tmp_path: Path) -> None:
    for seen in check_same(ranks, go_wrong, tmp_path):
        assert seen["forgotten"] == ("RuntimeError", True)
        assert seen["spike"][0] == "TrainingSpikeException"
        assert seen["batch size"][0] == "MisconfigurationException"


# - processes that Lightning forks


class Own(Whole):
    def on_fit_start(self) -> None:
        assert not any(p.is_shared() for p in self.parameters())


def fork(name: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model, held_out = Own(), data(2, 2, seed=1)
    run = trainer(name, 2, check_every=0, max_epochs=1)
    run.fit(model, data(4, 2), held_out)
    seen: dict[str, Any] = {
        "weights": weights(model),
        "metrics": dict(run.callback_metrics),
        "tested": run.test(model, held_out),
        "predicted": error_of(lambda: run.predict(model, held_out, return_predictions=True))[0],
        "pickled": error_of(lambda: torch.save(run, io.BytesIO())),
        "steps": (run.global_step, run.current_epoch),
    }
    run.fit_loop.max_epochs = 2
    seen["again"] = error_of(lambda: run.fit(model, data(4, 2)))
    seen["forgotten"] = error_of(lambda: trainer(name, 2, max_steps=2).fit(Forgets(), data(4, 2)))[0]
    return seen


@only_on_cpu("CUDA cannot be used in forked processes")
def test_what_forked_processes_hand_back(ranks: Ranks, tmp_path: Path) -> None:
    plain, sparse = (ranks.apart(fork, tmp_path / "output", name) for name in ("ddp_fork", "sparse_dense_fork"))
    for name in plain:
        assert same(plain[name], sparse[name]), f"{name}: {plain[name]} with plain DDP, {sparse[name]} with ours"
    assert plain["metrics"]["max_epoch"] == 3 + 10
    assert plain["again"][0] == "NotImplementedError"
    assert plain["predicted"] == plain["forgotten"] == "ProcessRaisedException"
    assert plain["pickled"] == ("", "no error")
