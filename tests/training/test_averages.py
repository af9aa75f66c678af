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
from lightning_sparse.auto import chooser
from lightning_sparse.local_steps.settings import LEAD
from tests.support.local_steps import CHOSEN, Causal, all_of, auto, exchange_of, follow, local
from tests.support.models import Does, Small, data, flat, small, trainer, weights
from tests.support.processes import Ranks
from tests.support.said import refusal
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


class Scripted(Small):
    """With a part that torch.jit.script has made, running statistics and all."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.net = torch.jit.script(nn.Sequential(nn.BatchNorm1d(8), self.net))


OUTER = {"outer_rate": 0.9, "outer_momentum": 0.5}
RESUMES: dict[str, tuple[Callable[[], Any], Callable[[], L.LightningModule], int, dict[str, Any]]] = {
    "causal, sparse_auto": (auto, Causal, CHOSEN + 3, {}),
    "teacher": (local, Distilled, 8, {}),
    "scripted": (local, Scripted, 8, {}),
    "bf16": (lambda: local(wire_dtype="float32"), lambda: small(optimizer="adam"), 7, {"precision": "bf16-true"}),
    **{
        f"{compressor}, {overlap=}, outer momentum": (
            partial(local, compressor, ls.LocalSteps(3, overlap=overlap, **OUTER)),
            lambda: small(optimizer="adam"), 10, {},
        )
        for compressor, overlap in (
            ("sparse_dense", True), (ls.MiCRO(density=0.1), False), (ls.SkipReduce(skip=0.5), True),
            (ls.LowRank(rank=1), False),
        )
    },
}  # fmt: skip


@pytest.mark.programs
def test_what_is_averaged_is_the_same_on_all_ranks_and_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_resume_each, 2, tmp_path)
    for name in RESUMES:
        (through, again, model), (theirs, their_own, their_model) = first[name], second[name]
        assert torch.equal(through, again), name
        assert torch.equal(theirs, their_own), name
        assert torch.equal(model, their_model), name
        assert not model.isnan().any(), name
        assert model.isinf().sum() == {"causal, sparse_auto": 28, "teacher": 4}.get(name, 0), name


def _resume_each(rank: int, size: int, path: Path) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """What each training comes to, what one that resumes from its half comes to, and the model."""
    found = {}
    for i, (name, (strategy, model, half, options)) in enumerate(RESUMES.items()):
        saver = ModelCheckpoint(path / str(i), filename="{step}", every_n_train_steps=half, save_top_k=-1)
        file, ends = path / str(i) / f"step={half}.ckpt", []
        for until, start, callbacks in ((2 * half, None, [saver]), (2 * half, file, [])):
            torch.manual_seed(0)
            run = trainer(strategy(), size, max_steps=until, callbacks=callbacks, **options)
            run.fit(trained := model(), data(half, size), ckpt_path=start)
            ends.append((all_of(run), flat(trained.state_dict().values())))
        found[name] = ends[0][0], ends[1][0], ends[1][1]
    return found


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


def test_a_save_within_a_step_keeps_the_average_and_changes_nothing(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_save_within, 2, tmp_path)
    for (where, through, again), (_, theirs, their_own) in zip(first, second, strict=True):
        assert torch.equal(through, again), where
        assert torch.equal(theirs, their_own), where


def _save_within(rank: int, size: int, path: Path) -> Any:
    """What a training comes to, and one that saves, or goes on from what was saved."""

    def fit(*callbacks: L.Callback, within: Path | None = None, start: Path | None = None) -> Tensor:
        torch.manual_seed(0)
        model = SavesWithin("adam")
        model.path = within
        run = trainer(local(ls.MiCRO(density=0.2)), size, max_steps=14, callbacks=list(callbacks))
        run.fit(model, data(8, size), ckpt_path=start)
        return all_of(run)

    plain, file = fit(), path / "training_step.ckpt"
    found = [("saved in training_step", plain, fit(within=file)), ("resumed from it", plain, fit(start=file))]
    for hook in ("on_before_zero_grad", "on_after_backward"):
        saves = Saves(hook, file := path / f"{hook}.ckpt", 8)
        found.append((f"saved {hook}", plain, fit(saves)))
        found.append((f"resumed {hook}", plain, fit(start=file)))
        state = torch.load(file, weights_only=True)["state_dict"]
        assert all(torch.equal(state[name], x) for name, x in saves.average.items()), hook
    return found


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
        "saved": flat(torch.load(path / "last.ckpt", map_location="cpu", weights_only=True)["state_dict"].values()),
        "set": weights(best),
        "by hand": weights(plain),
        "ema by hand": weights(ema),
    }


def test_weights_that_one_rank_sets_on_the_average_are_an_error_on_all(ranks: Ranks) -> None:
    for said in ranks.run(_set_on_one, 3):
        assert all("must be set on every rank, to the same" in each for each in said)
        assert all("got others on ranks 0, 2 and on rank 1" in each for each in said)
        assert "net.0.weight" in said[1]


def set_on_one(run: L.Trainer) -> None:
    """Set weights on one rank alone while the average is shown."""
    if run.global_rank == 1:
        next(run.lightning_module.parameters()).data.zero_()


def _set_on_one(rank: int, size: int) -> list[str]:
    said = []
    for hook in ("on_train_epoch_end", "on_train_end"):
        run = trainer(local(), size, check_every=0, max_epochs=4, callbacks=[Does(hook, set_on_one)])
        with pytest.raises(RuntimeError) as caught:
            run.fit(small(optimizer="adam"), data(8, size))
        said.append(str(caught.value))
    return said


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
        assert set(rates) == {0.01}  # nobody looks ahead with an optimizer that is made around another
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


def test_optimizers_that_a_rank_cannot_step_alone_are_refused_and_keep_sparse_auto_from_local_steps(
    ranks: Ranks,
) -> None:
    for said, kinds, dropped in ranks.run(_not_alone, 2):
        assert "local_steps cannot be combined with LBFGS, which evaluates the model as often as" in said[0]
        assert "local_steps cannot be combined with ZeroRedundancyOptimizer, which has each rank step a part" in said[1]
        assert "local_steps cannot be combined with WithModes, which has weights of its own on each rank" in said[2]
        assert "local_steps looks ahead by multiplying" in said[3]
        assert kinds == ["GradientAverager"] * 3
        assert dropped == ["ZeroRedundancyOptimizer", "WithModes"]


class WithModes(torch.optim.SGD):
    """As schedule-free optimizers do, it sets other weights for an evaluation, from what it keeps."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


def _not_alone(rank: int, size: int) -> Any:
    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=2)

    def sharded(parameters: Any) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=0.01)

    said, kinds, noted = [], [], list[str]()
    for make in (lbfgs, sharded, WithModes):
        said.append(refusal(trainer(local(), size, max_steps=2).fit, Optimized(make), data(2, size)))
    ahead = local(steps=ls.LocalSteps(2, lead=1.5))
    said.append(refusal(trainer(ahead, size, max_steps=2).fit, Optimized(torch.optim.Rprop), data(2, size)))
    chooser.rank_zero_info = noted.append  # type: ignore[assignment]
    for make in (lbfgs, sharded, WithModes):
        run = trainer(auto(), size, max_steps=CHOSEN + 4)
        run.fit(Optimized(make), data(CHOSEN + 4, size))
        kinds.append(type(run.strategy.averager).__name__)  # type: ignore[attr-defined]
    dropped = [text.removeprefix(NO_CANDIDATES).partition(",")[0] for text in noted if text.startswith(NO_CANDIDATES)]
    return said, kinds, dropped


NO_CANDIDATES = "lightning_sparse: local steps are no candidates of sparse_auto with "


class Constant(L.LightningModule):
    """A gradient that is always the same, on every rank too, so that every step of an optimizer is known."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight, self.make = nn.Parameter(torch.ones(8, 8)), make

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return -1e-2 * self.weight.sum()

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


AHEAD: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "adamw": (partial(torch.optim.AdamW, lr=1e-3), True),
    "rate in a tensor": (partial(torch.optim.AdamW, lr=torch.tensor(1e-3)), True),
    "muon": (partial(torch.optim.Muon, lr=1e-3), True),
    "around adamw": (lambda parameters: Sharp(torch.optim.AdamW(parameters, lr=1e-3)), False),
    "adafactor": (partial(torch.optim.Adafactor, lr=1e-3), False),
    "adafactor, relative": (partial(torch.optim.Adafactor, lr=0.2), False),
    "rprop": (partial(torch.optim.Rprop, lr=1e-3), False),
    "asgd": (partial(torch.optim.ASGD, lr=0.1), False),
}


def test_the_average_moves_by_an_optimizers_steps_also_where_a_longer_rate_makes_none_longer(ranks: Ranks) -> None:
    first, second = ranks.run(_ahead, 2)
    assert first == second
    for name, (part, lead) in first.items():
        assert lead == (LEAD if AHEAD[name][1] else 1.0), name
        assert part == pytest.approx(1, abs=5e-3), name


def _ahead(rank: int, size: int) -> dict[str, tuple[float, float]]:
    """What part of a process's own steps, but for the last, the average takes, and how far ranks look ahead."""
    found = {}
    for name, (make, _) in AHEAD.items():
        alone = Constant(make)
        optimizer = alone.configure_optimizers()

        def closure(module: Constant = alone, optimizer: torch.optim.Optimizer = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = module.training_step((torch.ones(1), torch.ones(1)), 0)
            loss.backward()
            return loss

        for _ in range(29):  # what the last one of ranks does is not sent
            optimizer.step(closure)  # type: ignore[arg-type]  # which returns a tensor
        model = Constant(make)
        run = trainer(local(steps=1, wire_dtype="float32"), size, max_steps=30)
        run.fit(model, data(30, size))
        moved = [float(each.weight.detach().mean().log()) for each in (model, alone)]
        found[name] = (moved[0] / moved[1], exchange_of(run).settings.lead or 0.0)
    return found
