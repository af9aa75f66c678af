"""Local steps on another number of ranks, under Fabric, and in plain PyTorch with a loss scale."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.checkpoint.rank_local import tensors_everywhere
from lightning_sparse.fabric import SparseDDPStrategy as FabricStrategy
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.network.torch_comm import world
from tests.support.local_steps import CHOSEN, Causal, auto, follow, local
from tests.support.models import Does, batch, data, flat, small, trainer
from tests.support.on_one_device import ACCELERATOR
from tests.support.processes import Ranks
from tests.support.said import refusal

# - another number of ranks


class Taught(Causal):
    """With a teacher that follows, a table that never moves, and best values so far, some of which never come to be."""

    best: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.teacher = small(seed=1).net.requires_grad_(False)
        self.table = nn.Parameter(torch.full((4,), -torch.inf), requires_grad=False)
        self.register_buffer("best", torch.full((3,), -torch.inf))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, _ = batch
        follow(self.teacher, self.net)
        loss = super().training_step(batch, index)
        with torch.no_grad():
            self.best[0] = torch.maximum(self.best[0], -loss)
        return loss + nn.functional.mse_loss(self.net(x), self.teacher(x + 0.1).softmax(-1))


Named = dict[str, Tensor]


@dataclass
class At:
    """What one rank has at some time: the model, its own weights, the average, and its optimizer's moments."""

    model: Named
    own: Named
    average: Named
    moments: Tensor

    @classmethod
    def now(cls, run: L.Trainer) -> "At":
        averager = run.strategy.averager  # type: ignore[attr-defined]
        model = {name: x.detach().clone() for name, x in run.lightning_module.state_dict().items()}
        states = run.optimizers[0].state.values()
        moments = flat([torch.zeros(0), *(state["exp_avg"] for state in states)])
        if not isinstance(averager, LocalAverager):
            return cls(model, model, {}, moments)
        own = {name: x.detach().clone() for name, x in averager.own.items()}
        return cls(model, own, {name: x.clone() for name, x in averager.averages.items()}, moments)


@dataclass
class Stage:
    """A training on so many ranks: its checkpoint, and of each rank how it began and ended, and what was said."""

    saved: Any
    begun: list[At]
    ended: list[At]
    said: list[str]


WAYS: dict[str, Callable[[], Any]] = {"int4": local, "sparse_auto": auto}
SIZES = {"int4": (2, 3, 1), "sparse_auto": (2, 1)}  # of ranks, one after the other


pytestmark = pytest.mark.xdist_group("averages elsewhere")  # so that what ranks end with is found once


@pytest.fixture(scope="module")
def stages(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Stage]]:
    """Trainings that go on on other numbers of ranks, each from the checkpoint of the one before."""
    path, found = tmp_path_factory.mktemp("stages"), {way: list[Stage]() for way in WAYS}
    for way, sizes in SIZES.items():
        for i, size in enumerate(sizes):
            file = str(path / f"{way}{sizes[i - 1]}.ckpt") if i else None
            until = (CHOSEN if way == "sparse_auto" else 5) + 3 + 5 * i
            each = ranks.run(_go_on, size, way, path, file, until)
            saved = torch.load(path / f"{way}{size}.ckpt", weights_only=True)
            begun, ended, said = zip(*each, strict=True)
            found[way].append(Stage(saved, [*begun], [*ended], list(chain(*said))))
    return found


def _go_on(rank: int, size: int, way: str, path: Path, start: str | None, until: int) -> tuple[At, At, list[str]]:
    begins = Does("on_train_start", At.now)
    saver = ModelCheckpoint(path, filename=f"{way}{size}", every_n_train_steps=until)
    torch.manual_seed(0)
    run = trainer(WAYS[way](), size, max_steps=until, callbacks=[begins, saver])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run.fit(Taught(), data(until, size), ckpt_path=start)
    ours = [each for each in caught if Path(ls.__file__).parent in Path(each.filename).parents]
    return begins.found[0], At.now(run), [str(each.message) for each in ours]


def test_each_of_other_ranks_starts_from_the_mean_of_weights_and_moments(stages: dict[str, list[Stage]]) -> None:
    """And the model of a checkpoint is the average of any number of ranks."""
    last, now, _ = stages["int4"]
    file = last.saved["state_dict"]
    for at in now.begun:
        assert all(torch.equal(at.model[name], x) for name, x in file.items())
        assert all(torch.equal(x, file[name]) for name, x in at.average.items())
    said = f"{SIZES['int4'][0]} ranks wrote it and {SIZES['int4'][1]} read it, so each starts from the mean"
    assert [said in each for each in now.said] == [True]

    before, after = residual(last.ended), residual(now.begun)
    assert before.keys() == after.keys()
    moments = torch.stack([at.moments for at in last.ended]).mean(0)
    for at in now.begun:
        assert all(torch.equal(x, now.begun[0].own[name]) for name, x in at.own.items())
        assert torch.allclose(at.moments, moments)
    for name, x in after.items():
        assert torch.allclose(x, before[name], rtol=0, atol=1e-6), name
    assert sum(float(x.norm()) for x in after.values()) > 0.01


def residual(ranks: list[At]) -> Named:
    """The mean over the ranks of their own weights minus the average; nothing where neither is finite."""
    each = [{name: at.own[name].double() - x.double() for name, x in at.average.items()} for at in ranks]
    return {name: torch.stack([x[name] for x in each]).mean(0).nan_to_num(0.0) for name in each[0]}


@pytest.mark.parametrize("way", ["int4", "sparse_auto"])
def test_one_rank_goes_on_from_the_mean_of_the_ranks_own_weights(stages: dict[str, list[Stage]], way: str) -> None:
    """Alone it averages gradients, of which there is nobody to send any to."""
    before, stage = stages[way][-2:]
    for name in before.ended[0].average:
        mean = torch.stack([at.own[name].double() for at in before.ended]).mean(0)
        assert torch.allclose(stage.begun[0].own[name].double(), mean, rtol=0, atol=1e-6), name
    assert sum("go on from the mean of their own weights" in each for each in stage.said) == 1


def test_what_is_minus_infinity_stays_so_on_any_number_of_ranks(stages: dict[str, list[Stage]]) -> None:
    for stage in (each for of_way in stages.values() for each in of_way):
        for at in (*stage.begun, *stage.ended):
            assert not any(x.isnan().any() for x in at.model.values())
            assert [int(at.model[name].isneginf().sum()) for name in ("table", "mask")] == [4, 28]
            assert all(bool(x.isneginf().all()) for x in (at.model["table"], at.model["best"][1:]))
        for at in stage.ended:
            assert bool(at.model["best"][0].isfinite())


# - Fabric


class Loss(nn.Module):
    """The loss of a model with a mask and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.causal = Causal()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.causal.training_step((x, y), 0)


@dataclass
class End:
    """What a training comes to: the average and all buffers; own weights and the optimizer's state."""

    average: Tensor
    own: Tensor

    @classmethod
    def of(cls, hook: ls.SparseHook, module: nn.Module, optimizer: torch.optim.Optimizer) -> "End":
        """Of a training that ends here."""
        hook.show_average()
        states = tensors_everywhere(optimizer, world(), torch.device("cpu"))
        average = flat([*hook.averager.averages.values(), *module.state_dict().values()])
        own = flat([*hook.averager.own.values(), *states.values()])
        hook.close()
        return cls(average, own)


HALF = 8
ORDERS = ("model", "unsent")  # which key is the first


def _fabric(rank: int, size: int, path: Path) -> dict[str, End]:
    """Trainings under Fabric: one that is saved in its half, and from each of its files one that goes on."""
    ends = {}
    for resumed in ("", *ORDERS):
        strategy = FabricStrategy("sparse_dense", local_steps=3, wire_dtype="int4")
        fabric = L.Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy, precision="bf16-true")
        fabric.launch()
        torch.manual_seed(0)
        module = Loss()
        wrapped: Any = fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        model, optimizer = wrapped
        state = {"model": model, "optimizer": optimizer, "unsent": strategy.hooks[0]}
        if resumed:
            fabric.load(path / resumed, {resumed: state[resumed]} | state)
        for step in range(HALF if resumed else 0, 2 * HALF):
            if step == HALF and not resumed:
                for first in ORDERS:
                    fabric.save(path / first, {first: state[first]} | state)
            optimizer.zero_grad()
            fabric.backward(model(*batch(step, rank)))
            optimizer.step()
        ends[resumed] = End.of(strategy.hooks[0], model, optimizer.optimizer)
    return ends


def test_fabric_goes_on_bit_for_bit_whatever_the_order_of_keys(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_fabric, 2, tmp_path)
    for ends in (first, second):
        for resumed in ORDERS:
            assert torch.equal(ends[""].average, ends[resumed].average), resumed
            assert torch.equal(ends[""].own, ends[resumed].own), resumed
    assert torch.equal(first[""].average, second[""].average)
    assert first[""].average.isinf().sum() == 28
    assert not torch.equal(first[""].own, second[""].own)


# - plain PyTorch

STEPS = 20
OVERFLOWS = (0, 5, 6, 12)  # on rank 1
START = 1  # where rank 1 has not stepped yet


class Plain:
    """A program in plain PyTorch, from its start."""

    def __init__(self, rank: int, scaler: torch.amp.GradScaler | None = None) -> None:
        self.rank, self.scaler, self.net = rank, scaler, small().net
        self.ddp = DistributedDataParallel(self.net)
        self.hook = ls.SparseHook(self.ddp, "sparse_dense", local_steps=2, wire_dtype="int4", scaler=scaler)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, weight_decay=0.0)

    def step(self, number: int) -> None:
        x, y = batch(number, self.rank)
        loss = nn.functional.cross_entropy(self.ddp(x), y)
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
            return
        overflows = self.rank == 1 and number in OVERFLOWS
        self.scaler.scale(loss * torch.inf if overflows else loss).backward()  # type: ignore[no-untyped-call]
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def evaluate(self) -> None:
        self.ddp.eval()
        with torch.no_grad():
            self.ddp(torch.ones(1, 8))
        self.ddp.train()

    def end(self) -> End:
        return End.of(self.hook, self.net, self.optimizer)

    def save(self, file: Path, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Save; first what is each rank's own."""
        state: dict[str, Any] = {"unsent": self.hook.state_dict(optimizers=optimizers), "model": self.net.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler and self.scaler.state_dict()}
        if self.rank == 0:
            torch.save(state, file)
        dist.barrier()

    def load(self, file: Path) -> None:
        state = torch.load(file, weights_only=True, mmap=True)
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
        self.hook.load_state_dict(state["unsent"], [self.optimizer])


def _scaled(rank: int, size: int, path: Path) -> dict[str, tuple[End, float]]:
    """Trainings with a loss scale: one that saves, and one that goes on from there."""
    found = {}
    for name, first in (("through", 0), ("resumed", START)):
        program = Plain(rank, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))
        if first:
            program.load(path / "file")
        for step in range(first, STEPS):
            if step == START and not first:
                program.save(path / "file", [program.optimizer])
            program.step(step)
        found[name] = program.end(), program.scaler.get_scale()  # type: ignore[union-attr]
    return found


def test_each_rank_goes_on_with_its_own_loss_scale_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_scaled, 2, tmp_path, gloo=True)
    for found in (first, second):
        (through, scale), (resumed, its_scale) = found["through"], found["resumed"]
        assert scale == its_scale
        assert torch.equal(through.average, resumed.average)
        assert torch.equal(through.own, resumed.own)
    assert torch.equal(first["through"][0].average, second["through"][0].average)
    assert first["through"][1] > second["through"][1]


def _alone(rank: int, size: int, path: Path) -> tuple[list[End], list[str], str]:
    """Of a training, and of one that rank 0 alone evaluates; what a state has of an optimizer that nobody named."""
    ends, kept, said = [], [], ""
    for evaluates in (False, True):
        program = Plain(rank)
        for step in range(STEPS):
            program.step(step)
            if evaluates and rank == 0:
                program.evaluate()
        if not evaluates:
            program.save(path / "file")
            state = torch.load(path / "file", weights_only=True)["unsent"]
            kept, said = list(state["local"]["optimizers"][0]), refusal(Plain(rank).hook.load_state_dict, state)
        ends.append(program.end())
    return ends, kept, said


def test_evaluations_on_one_rank_change_nothing_and_a_state_has_optimizers_that_have_stepped(
    ranks: Ranks, tmp_path: Path
) -> None:
    for (ordinary, evaluated), kept, said in ranks.run(_alone, 2, tmp_path, gloo=True):
        assert torch.equal(evaluated.average, ordinary.average)
        assert torch.equal(evaluated.own, ordinary.own)
        assert {name.partition(".")[2] for name in kept} == {"exp_avg", "exp_avg_sq", "step"}
        assert said.endswith("got 0. Give them: load_state_dict(state, optimizers=[optimizer]).")
