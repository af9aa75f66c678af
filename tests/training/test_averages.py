"""Local steps on real processes: whose weights are where, whatever a program does, and what a resume goes on with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as of_lightning
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer

import lightning_sparse as ls
from lightning_sparse.engine.local_steps import LEAD
from tests.support.local_steps import CHOSEN, Causal, all_of, auto, exchange_of, follow, local
from tests.support.models import Does, Small, data, flat, small, trainer, weights
from tests.support.processes import Ranks
from tests.support.training_loop import Manual


class Distilled(Small):
    """A student and a teacher that follows it, as BYOL and DINO move theirs."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.teacher = small(seed=1).net.requires_grad_(False)
        self.teacher[0].bias.data.fill_(0.5)
        self.table = nn.Parameter(torch.full((4,), -torch.inf), requires_grad=False)  # frozen, and never moves

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, _ = batch
        follow(self.teacher, self.net)
        return nn.functional.mse_loss(self.net(x), self.teacher(x + 0.1).softmax(-1))


def resumed(
    size: int,
    path: Path,
    strategy: Callable[[], Any],
    model: Callable[[], L.LightningModule],
    half: int,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """What a training comes to, what one that resumes from its half comes to, and its model."""
    saver = ModelCheckpoint(path, filename="half", every_n_train_steps=half)
    found = []
    for until, start, callbacks in ((2 * half, None, []), (half, None, [saver]), (2 * half, path / "half.ckpt", [])):
        torch.manual_seed(0)
        run = trainer(strategy(), size, max_steps=until, callbacks=callbacks, **options)
        run.fit(trained := model(), data(half, size), ckpt_path=start)
        found.append((all_of(run), flat(trained.state_dict().values())))
    assert torch.equal(found[0][1].isfinite(), found[2][1].isfinite())
    return found[0][0], found[2][0], found[0][1]


RESUMES: dict[str, tuple[Callable[[], Any], Callable[[], L.LightningModule], int, dict[str, Any]]] = {
    "causal": (local, Causal, 8, {}),
    "causal, sparse_auto": (auto, Causal, CHOSEN + 3, {}),
    "teacher": (local, Distilled, 8, {}),
    "teacher, sparse_auto": (auto, Distilled, CHOSEN + 3, {}),
    "bf16": (lambda: local(wire_dtype="float32"), lambda: small(optimizer="adam"), 7, {"precision": "bf16-true"}),
    "second moments": (lambda: local(steps=3), lambda: small(optimizer="adam"), 10, {}),
    "low rank, outer momentum": (
        lambda: local(ls.LowRank(rank=1), ls.LocalSteps(2, outer_momentum=0.5)), lambda: small(optimizer="adam"), 7, {},
    ),
    **{
        f"{compressor}, {overlap=}, outer momentum": (
            partial(local, compressor, ls.LocalSteps(3, overlap=overlap, outer_rate=0.9, outer_momentum=0.5)),
            lambda: small(optimizer="adam"), 10, {},
        )
        for compressor in ("sparse_dense", ls.MiCRO(density=0.1), ls.SkipReduce(skip=0.5)) for overlap in (True, False)
    },
    "importance": (lambda: local(ls.ImportancePruning(density=0.2), 2), lambda: small(optimizer="adam"), 8, {}),
}  # fmt: skip


@pytest.mark.parametrize("names", [list(RESUMES)[:4], list(RESUMES)[4:]], ids=["statistics", "memories"])
def test_what_is_averaged_is_the_same_on_all_ranks_and_resumes_bit_for_bit(
    ranks: Ranks, tmp_path: Path, names: list[str]
) -> None:
    first, second = ranks.run(_resume_each, 2, tmp_path, names)
    for name in names:
        (through, again, model), (theirs, their_own, their_model) = first[name], second[name]
        assert torch.equal(through, again), name
        assert torch.equal(theirs, their_own), name
        assert torch.equal(model, their_model), name
        assert not model.isnan().any(), name


def _resume_each(rank: int, size: int, path: Path, names: list[str]) -> Any:
    found = {}
    for i, name in enumerate(names):
        strategy, model, half, options = RESUMES[name]
        found[name] = resumed(size, path / str(i), strategy, model, half, **options)
        if "causal" in name:
            assert found[name][2].isinf().sum() == 28
        if "teacher" in name:
            assert found[name][2].isinf().sum() == 4
    return found


def test_a_teacher_is_the_average_of_the_teachers(ranks: Ranks) -> None:
    """With one step of SGD between exchanges of everything, it is what averaged gradients make of it."""
    for ours, plain in ranks.run(_distill, 2):
        assert torch.allclose(ours, plain, atol=1e-5)


def _distill(rank: int, size: int) -> tuple[Tensor, Tensor]:
    found = []
    waiting = ls.LocalSteps(1, overlap=False)
    for strategy in (local(steps=waiting, wire_dtype="float32"), "ddp"):
        torch.manual_seed(0)
        model = Distilled()
        model.optimizer = "sgd"
        model.configure_optimizers = lambda model=model: torch.optim.SGD(model.net.parameters(), lr=0.1)  # type: ignore[method-assign,misc]
        trainer(strategy, size, check_every=1, max_steps=25).fit(model, data(25, size))
        found.append(torch.cat([weights(model.net), weights(model.teacher)]))
    return found[0], found[1]


# - saves at odd moments


class Saves(L.Callback):
    """Saves from a hook that is called within a step."""

    def __init__(self, hook: str, path: Path, at: int) -> None:
        def save(run: L.Trainer, module: L.LightningModule, *args: Any) -> None:
            if run.global_step == at and not hasattr(self, "average"):
                self.average = {name: x.clone() for name, x in exchange_of(run).averages.items()}
                run.save_checkpoint(path)

        setattr(self, hook, save)


class SavesWithin(Small):
    """Saves in its own training step."""

    path: Path | None = None

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if self.path and self.global_step == 8:
            self.trainer.save_checkpoint(self.path)
        return super().training_step(batch, index)


HOOKS = ["on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"]


def test_a_save_within_a_step_keeps_the_average_and_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_save_within, 2, tmp_path)
    for (hook, through, again), (_, theirs, their_own) in zip(first, second, strict=True):
        assert torch.equal(through, again), hook
        assert torch.equal(theirs, their_own), hook


def _save_within(rank: int, size: int, path: Path) -> Any:
    """What a training comes to, and one that saves, or goes on from what was saved."""
    found = []
    for overlap in (True, False):
        strategy = partial(local, ls.MiCRO(density=0.2), ls.LocalSteps(3, overlap=overlap))
        plain = _fit(strategy(), size)
        for hook in HOOKS:
            saves = Saves(hook, file := path / f"{hook}{overlap}.ckpt", 8)
            found.append((f"saved {hook}", plain, _fit(strategy(), size, saves)))
            found.append((f"resumed {hook}", plain, _fit(strategy(), size, start=file)))
            state = torch.load(file, weights_only=True)["state_dict"]
            assert all(torch.equal(state[name], x) for name, x in saves.average.items()), hook
        saves = Saves("on_train_start", file := path / f"first{overlap}.ckpt", 0)
        found.append(("saved before the first step", plain, _fit(strategy(), size, saves)))
        found.append(("resumed from before the first step", plain, _fit(strategy(), size, start=file)))
        file = path / f"within{overlap}.ckpt"
        found.append(("saved in training_step", plain, _fit(strategy(), size, within=file)))
        found.append(("resumed from training_step", plain, _fit(strategy(), size, start=file)))
    return found


def _fit(
    strategy: Any, size: int, *callbacks: L.Callback, within: Path | None = None, start: Path | None = None
) -> Tensor:
    torch.manual_seed(0)
    model = SavesWithin("adam")
    model.path = within
    run = trainer(strategy, size, max_steps=14, callbacks=list(callbacks))
    run.fit(model, data(8, size), ckpt_path=start)
    return all_of(run)


# - evaluations, and weights that somebody sets


class Physics(Small):
    """Validates with gradients, through DistributedDataParallel; with running statistics."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.net.insert(1, nn.BatchNorm1d(33))
        self.validated: list[Tensor] = []

    def on_validation_epoch_start(self) -> None:
        torch.set_grad_enabled(True)

    def on_validation_epoch_end(self) -> None:
        torch.set_grad_enabled(False)

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        assert torch.is_grad_enabled()
        self.validated.append(flat(self.state_dict().values()))


def set_quarter(run: L.Trainer) -> None:
    """Set all weights, the same on every rank."""
    for p in run.lightning_module.parameters():
        p.data.fill_(0.25)


@pytest.mark.skipif(not hasattr(of_lightning, "EMAWeightAveraging"), reason="since Lightning 2.6")
def test_evaluations_checkpoints_and_callbacks_see_the_average_and_what_they_set_stays(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks.run(_look_and_set, 2, tmp_path)
    for name, own in first.items():
        assert torch.equal(own, second[name]), name
    assert torch.equal(first["saved"], first["trained"])
    assert (first["set"] == 0.25).all()
    assert not torch.equal(first["ema by hand"], first["by hand"])


def _look_and_set(rank: int, size: int, path: Path) -> dict[str, Tensor]:
    physics, best, plain, ema = Physics(), small(optimizer="adam"), Manual(every=1), Manual(every=1)
    options: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "check_every": 0}
    saver, seldom = ModelCheckpoint(path, save_last=True), {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    run = trainer(local(), size, inference_mode=False, callbacks=[saver], **seldom, **options)
    run.fit(physics, data(6, size), data(2, size, seed=1))
    trained = flat(physics.state_dict().values())
    trainer("ddp", size, max_epochs=3).fit(Physics(), data(6, size), ckpt_path=path / "last.ckpt")
    trainer(local(), size, callbacks=[Does("on_train_end", set_quarter)], **options).fit(best, data(5, size))
    trainer(local(), size, **options).fit(plain, data(5, size))
    trainer(local(), size, callbacks=[of_lightning.EMAWeightAveraging(decay=0.5)], **options).fit(ema, data(5, size))
    return {
        "validated": torch.cat(physics.validated),
        "trained": trained,
        "saved": flat(torch.load(path / "last.ckpt", weights_only=True)["state_dict"].values()),
        "set": weights(best),
        "by hand": weights(plain),
        "ema by hand": weights(ema),
    }


def test_weights_that_one_rank_sets_on_the_average_are_an_error_on_all(ranks: Ranks) -> None:
    for said in ranks.run(_set_on_one, 3):
        assert "must be set on every rank, to the same; got others on ranks 0, 2 and on rank 1" in said


def set_on_one(run: L.Trainer) -> None:
    """Set weights on one rank alone while the average is shown."""
    if run.global_rank == 1:
        next(run.lightning_module.parameters()).data.zero_()


def _set_on_one(rank: int, size: int) -> str:
    run = trainer(local(), size, check_every=0, max_epochs=4, callbacks=[Does("on_train_epoch_end", set_on_one)])
    with pytest.raises(RuntimeError) as caught:
        run.fit(small(optimizer="adam"), data(8, size))
    return str(caught.value)


# - optimizers


class Sharp(torch.optim.Optimizer):
    """Sharpness-aware minimisation around another optimizer, with which it shares the groups of parameters."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base, self.rates = base, list[float]()
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        moved = [(p, 0.01 * p.grad) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, by in moved:
            p.add_(by)
        torch.enable_grad()(closure)()
        for p, by in moved:
            p.sub_(by)
        self.rates.append(self.param_groups[0]["lr"])
        self.base.step()
        return loss


class Optimized(Small):
    """With an optimizer that is given, and a rate that it sets in a training step."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if self.global_step == 15 and self.optimizer == "sets":
            self.trainer.optimizers[0].param_groups[0]["lr"] = 0.02
        return super().training_step(batch, index)

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def test_optimizers_around_others_and_rates_set_in_a_step(ranks: Ranks) -> None:
    first, second = ranks.run(_optimize, 2)
    for rates, rate, least, after, settled in (first, second):
        assert set(rates) == {0.01 * LEAD}  # and 0.01 wherever somebody else looks
        assert rate == 0.01
        assert least >= 0
        assert (after, settled) == (0.02, 25)


def _optimize(rank: int, size: int) -> Any:
    sharp = Optimized(lambda parameters: Sharp(torch.optim.AdamW(parameters, lr=0.01)))
    run = trainer(local(steps=2), size, max_steps=25)
    run.fit(sharp, data(25, size))
    sets = Optimized(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    sets.optimizer = "sets"
    trainer(local(steps=2), size, max_steps=18).fit(sets, data(18, size))
    optimizer = run.optimizers[0]
    assert isinstance(optimizer, Sharp)
    after = sets.trainer.optimizers[0].param_groups[0]["lr"]
    least = min(float(state["exp_avg_sq"].min()) for state in optimizer.base.state.values())
    return optimizer.rates, optimizer.param_groups[0]["lr"], least, after, exchange_of(run).steps


class Raises(torch.optim.AdamW):
    """Raises in its third step."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        if self.state and self.state[self.param_groups[0]["params"][0]]["step"] == 2:
            raise ArithmeticError
        super().step()


class SeesRate(L.Callback):
    """Looks at the learning rate where a training raises, as a checkpoint does."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self.rate = trainer.optimizers[0].param_groups[0]["lr"]


def test_a_step_that_raises_leaves_the_rate_and_optimizers_that_cannot_lead_are_refused(ranks: Ranks) -> None:
    for rate, said in ranks.run(_raise, 2):
        assert rate == 0.01
        assert "goes by its learning rate in the first step alone. Give local_steps=LocalSteps(2, lead=1)." in said


def _raise(rank: int, size: int) -> Any:
    sees = SeesRate()
    run = trainer(local(steps=2), size, max_steps=5, callbacks=[sees])
    with pytest.raises(ArithmeticError):
        run.fit(Optimized(lambda parameters: Raises(parameters, lr=0.01)), data(5, size))
    with pytest.raises(ValueError, match="local_steps looks ahead by multiplying") as caught:
        trainer(local(steps=2), size, max_steps=2).fit(Optimized(torch.optim.Rprop), data(2, size))
    return sees.rate, str(caught.value)


def test_optimizers_that_a_rank_cannot_step_alone_are_refused_and_keep_sparse_auto_from_local_steps(
    ranks: Ranks,
) -> None:
    for said, kinds in ranks.run(_not_alone, 2):
        assert "local_steps cannot be combined with LBFGS, which evaluates the model as often as" in said[0]
        assert "local_steps cannot be combined with ZeroRedundancyOptimizer, which has each rank step a part" in said[1]
        assert kinds == ["GradientExchange", "GradientExchange"]


def _not_alone(rank: int, size: int) -> Any:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)

    def sharded(parameters: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=0.01)

    said, kinds = [], []
    for make in (lbfgs, sharded):
        with pytest.raises(ValueError, match="local_steps cannot be combined") as caught:
            trainer(local(), size, max_steps=2).fit(Optimized(make), data(2, size))
        said.append(str(caught.value))
        run = trainer(auto(), size, max_steps=CHOSEN + 4)
        run.fit(Optimized(make), data(CHOSEN + 4, size))
        kinds.append(type(run.strategy.exchange).__name__)  # type: ignore[attr-defined]
    return said, kinds


# - what is logged


def test_equal_trainings_log_the_same_and_saves_change_nothing_of_it(ranks: Ranks, tmp_path: Path) -> None:
    for plain, again, saving in ranks.run(_log, 2, tmp_path):
        assert plain == again == saving


class Logged(L.Callback):
    """Keeps what the monitor logs; saves, if it is told where."""

    def __init__(self, path: Path | None) -> None:
        self.path, self.found = path, list[tuple[float, ...]]()

    def on_train_batch_end(self, run: L.Trainer, *_: Any) -> None:
        names = ("sparse/unsent_norm", "sparse/delivered", "sparse/age", "sparse/lr_factor")
        self.found.append(tuple(float(run.callback_metrics.get(name, -1)) for name in names))
        if self.path:
            run.save_checkpoint(self.path)


def _log(rank: int, size: int, path: Path) -> Any:
    found = []
    for file in (None, None, path / "each.ckpt"):
        monitor, logged = ls.CompressionMonitor(table=False, summary=False), Logged(file)
        run = trainer(local("micro", 2), size, max_steps=24, callbacks=[monitor, logged], log_every_n_steps=1)
        run.fit(small(optimizer="adam"), data(24, size))
        found.append(logged.found)
    return found


# - what stands between a file and the first step


class Target(Small):
    """With a target network that is copied after 5 steps, 15, 25, ..."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.target = small(seed=1).net.requires_grad_(False)
        self.other = small(seed=2).net.requires_grad_(False)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        if self.global_step % 10 == 5:
            self.target.load_state_dict(self.net.state_dict())
        if self.global_step >= 12:
            self.other.load_state_dict(self.target.state_dict())
        drawn = self.target(batch[0]).softmax(-1) + self.other(batch[0]).softmax(-1)
        return super().training_step(batch, index) + (self.net(batch[0]) - drawn).square().mean()


def test_weights_set_before_the_first_step_stay_and_validations_start_with_the_average(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks.run(_start, 2, tmp_path)
    for (name, own), (_, theirs) in zip(first[0], second[0], strict=True):
        assert (own == 0.25).all(), name
        assert torch.equal(own, theirs), name
    assert torch.equal(first[1], second[1])


def _start(rank: int, size: int, path: Path) -> Any:
    torch.manual_seed(0)
    first = trainer(local(), size, max_steps=7)
    first.fit(model := small(), data(7, size))
    first.save_checkpoint(path / "file.ckpt")
    found = []
    for name, start in (("resumed", path / "file.ckpt"), ("a second fit", None)):
        run, trained = (trainer(local(), size, max_steps=8), small()) if start else (first, model)
        run.fit_loop.epoch_loop.max_steps = 8
        trained.configure_optimizers = lambda trained=trained: torch.optim.SGD(trained.parameters(), lr=0.0)  # type: ignore[method-assign,misc]
        run.callbacks.append(Does("on_train_start", set_quarter))  # type: ignore[attr-defined]
        run.fit(trained, data(7, size), ckpt_path=start)
        found.append((name, next(trained.parameters()).detach().clone()))
    looks = Does("on_validation_start", lambda run: weights(run.lightning_module))  # before the strategy hears of it
    run = trainer(local(), size, max_epochs=1, val_check_interval=2, callbacks=[looks], num_sanity_val_steps=0)
    run.fit(Physics(), data(6, size), data(1, size, seed=1))
    return found, torch.cat(looks.found)


def test_a_save_does_not_change_when_a_target_network_is_averaged(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(_aim, 2, tmp_path):
        for name, own in found.items():
            assert torch.equal(own, found["plain"]), name


def _aim(rank: int, size: int, path: Path) -> dict[str, Tensor]:
    found, each = {}, [ModelCheckpoint(path / str(at), filename="at", every_n_train_steps=at) for at in (7, 14)]
    for name, start, callbacks in (
        ("plain", None, []), ("saved at 7", None, [each[0]]), ("saved at 14", None, [each[1]]),
        ("resumed at 7", path / "7" / "at.ckpt", []), ("resumed at 14", path / "14" / "at.ckpt", []),
    ):  # fmt: skip
        torch.manual_seed(0)
        run = trainer(local(), size, max_steps=21, callbacks=callbacks, check_every=0)
        run.fit(Target(), data(7, size), ckpt_path=start)
        found[name] = all_of(run)
    return found
