"""Local steps on another number of ranks, under Fabric, in plain PyTorch, with a loss scale, and compiled."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
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
from lightning_sparse.checkpoint.optimizers import tensors_everywhere
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.fabric import SparseDDPStrategy as FabricStrategy
from lightning_sparse.network.torch_comm import world
from tests.support.local_steps import CHOSEN, Causal, all_of, auto, follow, local
from tests.support.models import Does, batch, data, flat, small, trainer
from tests.support.processes import Ranks

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
        exchange = run.strategy.exchange  # type: ignore[attr-defined]
        model = {name: x.detach().clone() for name, x in run.lightning_module.state_dict().items()}
        states = run.optimizers[0].state.values()
        moments = flat([torch.zeros(0), *(state["exp_avg"] for state in states)])
        if not isinstance(exchange, LocalExchange):
            return cls(model, model, {}, moments)
        own = {name: x.detach().clone() for name, x in exchange.own.items()}
        return cls(model, own, {name: x.clone() for name, x in exchange.averages.items()}, moments)


@dataclass
class Stage:
    """A training on so many ranks: its checkpoint, and of each rank how it began and ended, and what was said."""

    saved: Any
    begun: list[At]
    ended: list[At]
    said: list[str]


SIZES = (2, 3, 1)
WAYS: dict[str, Callable[[], Any]] = {"int4": local, "sparse_auto": auto}


@pytest.fixture(scope="module")
def stages(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Stage]]:
    """Trainings that go on on other numbers of ranks, each from the checkpoint of the one before."""
    path, found = tmp_path_factory.mktemp("stages"), {way: list[Stage]() for way in WAYS}
    for i, size in enumerate(SIZES):
        each = ranks.run(_go_on, size, path, SIZES[i - 1] if i else None, CHOSEN + 3 + 5 * i)
        for way in WAYS:
            begun, ended, said = zip(*(rank[way] for rank in each), strict=True)
            saved = torch.load(path / f"{way}{size}.ckpt", weights_only=True)
            found[way].append(Stage(saved, [*begun], [*ended], list(chain(*said))))
    return found


def _go_on(rank: int, size: int, path: Path, start: int | None, until: int) -> dict[str, tuple[At, At, list[str]]]:
    found = {}
    for way, strategy in WAYS.items():
        begins = Does("on_train_start", At.now)
        saver = ModelCheckpoint(path, filename=f"{way}{size}", every_n_train_steps=until)
        torch.manual_seed(0)
        model, run = Taught(), trainer(strategy(), size, max_steps=until, callbacks=[begins, saver])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run.fit(model, data(until, size), ckpt_path=path / f"{way}{start}.ckpt" if start else None)
        ours = [each for each in caught if Path(ls.__file__).parent in Path(each.filename).parents]
        found[way] = begins.found[0], At.now(run), [str(each.message) for each in ours]
    return found


RESUMED = [("int4", 1), ("int4", 2), ("sparse_auto", 1)]


@pytest.mark.parametrize(("way", "stage"), RESUMED)
def test_the_model_of_a_checkpoint_is_the_average_of_any_number_of_ranks(
    stages: dict[str, list[Stage]], way: str, stage: int
) -> None:
    file = stages[way][stage - 1].saved["state_dict"]
    for at in stages[way][stage].begun:
        assert all(torch.equal(at.model[name], x) for name, x in file.items())
        assert all(torch.equal(x, file[name]) for name, x in at.average.items())
    said = f"{SIZES[stage - 1]} ranks wrote it and {SIZES[stage]} read it, so each starts from the mean"
    assert [said in each for each in stages[way][stage].said] == [True]


@pytest.mark.parametrize(("way", "stage"), RESUMED)
def test_each_of_other_ranks_starts_from_the_mean_of_weights_and_moments(
    stages: dict[str, list[Stage]], way: str, stage: int
) -> None:
    ranks = stages[way][stage].begun
    before, after = residual(stages[way][stage - 1].ended), residual(ranks)
    assert before.keys() == after.keys()
    moments = torch.stack([at.moments for at in stages[way][stage - 1].ended]).mean(0)
    for at in ranks:
        assert all(torch.equal(x, ranks[0].own[name]) for name, x in at.own.items())
        assert torch.allclose(at.moments, moments)
    for name, x in after.items():
        assert torch.allclose(x, before[name], rtol=0, atol=1e-6), name
    assert sum(float(x.norm()) for x in after.values()) > 0.01


def residual(ranks: list[At]) -> Named:
    """The mean over the ranks of their own weights minus the average; nothing where neither is finite."""
    each = [{name: at.own[name].double() - x.double() for name, x in at.average.items()} for at in ranks]
    return {name: torch.stack([x[name] for x in each]).mean(0).nan_to_num(0.0) for name in each[0]}


def test_sparse_auto_on_one_rank_goes_on_from_the_mean_of_the_ranks_own_weights(stages: dict[str, list[Stage]]) -> None:
    """Alone it averages gradients, of which there is nobody to send any to."""
    _, before, stage = stages["sparse_auto"]
    for name in before.ended[0].average:
        mean = torch.stack([at.own[name].double() for at in before.ended]).mean(0)
        assert torch.allclose(stage.begun[0].own[name].double(), mean, rtol=0, atol=1e-6), name
    assert ["go on from the mean of their own weights" in each for each in stage.said] == [True]


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
        average = flat([*hook.exchange.averages.values(), *module.state_dict().values()])
        own = flat([*hook.exchange.own.values(), *states.values()])
        hook.close()
        return cls(average, own)


class Program:
    """A program that trains with Fabric, from its start."""

    def __init__(self, rank: int, size: int, strategy: Any) -> None:
        self.rank = rank
        self.fabric = L.Fabric(accelerator="cpu", devices=size, strategy=strategy, precision="bf16-true")
        self.fabric.launch()
        torch.manual_seed(0)
        module = Loss()
        wrapped: Any = self.fabric.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        self.model, self.optimizer = wrapped
        self.hook: ls.SparseHook = self.fabric.strategy.hooks[0]  # type: ignore[attr-defined]

    def train(self, first: int, last: int, before_step: Callable[["Program"], None] | None = None) -> "Program":
        """Take steps; do ``before_step`` between backward and step of the last."""
        for step in range(first, last):
            self.optimizer.zero_grad()
            self.fabric.backward(self.model(*batch(step, self.rank)))
            if before_step and step == last - 1:
                before_step(self)
            self.optimizer.step()
        return self

    def state(self, first: str = "model") -> dict[str, Any]:
        """What is saved and loaded, this key first."""
        state = {"model": self.model, "optimizer": self.optimizer, "unsent": self.hook}
        return {first: state[first]} | state

    def save(self, path: Path, first: str = "model") -> None:
        self.fabric.save(path, self.state(first))

    def end(self) -> End:
        return End.of(self.hook, self.model, self.optimizer.optimizer)


HALF = CHOSEN + 3
FABRIC: dict[str, Callable[[], FabricStrategy]] = {
    "sparse_auto": lambda: FabricStrategy(auto().options.compressor),
    "local steps": lambda: FabricStrategy("sparse_dense", local_steps=3, wire_dtype="int4"),
}
ORDERS = ("model", "unsent")  # which key is the first


@pytest.fixture(scope="module")
def fabric(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of each rank, what trainings under Fabric come to."""
    return ranks.run(_fabric, 2, tmp_path_factory.mktemp("fabric"))


def _fabric(rank: int, size: int, path: Path) -> dict[str, dict[str, tuple[Tensor, Tensor]]]:
    found = {}
    for name, strategy in FABRIC.items():

        def program(file: str = "", order: str = "model", strategy: Any = strategy) -> Program:
            program = Program(rank, size, strategy())
            if file:
                program.fabric.load(path / file, program.state(order))
            return program

        ends = {"through": program().train(0, 2 * HALF).end()}
        saving = program().train(0, HALF)
        for order in ORDERS:
            saving.save(path / order, order)
        ends["saved"] = saving.train(HALF, 2 * HALF).end()
        ends |= {f"{order} first": program(order, order).train(HALF, 2 * HALF).end() for order in ORDERS}
        saving = program().train(0, HALF, before_step=lambda saving: saving.save(path / "within"))
        ends["saved within"] = saving.train(HALF, 2 * HALF).end()
        ends["resumed from within"] = program("within").train(HALF, 2 * HALF).end()
        found[name] = ends
    return found


@pytest.mark.parametrize("name", FABRIC)
def test_fabric_goes_on_bit_for_bit_whatever_the_order_of_keys(fabric: Any, name: str) -> None:
    for ends in (each[name] for each in fabric):
        for other in ("saved", *(f"{order} first" for order in ORDERS)):
            assert torch.equal(ends["through"].average, ends[other].average), other
            assert torch.equal(ends["through"].own, ends[other].own), other
    assert not torch.equal(fabric[0][name]["through"].own, fabric[1][name]["through"].own)


@pytest.mark.parametrize("name", FABRIC)
def test_ranks_stay_together_after_a_save_between_backward_and_step(fabric: Any, name: str) -> None:
    for first, second in zip(fabric[0][name].values(), fabric[1][name].values(), strict=True):
        assert torch.equal(first.average, second.average)
        assert not first.average.isnan().any()
        assert first.average.isinf().sum() == 28


# - plain PyTorch

STEPS = 20


class Plain:
    """A program in plain PyTorch, from its start."""

    def __init__(self, rank: int, scaler: torch.amp.GradScaler | None = None) -> None:
        self.rank, self.scaler, self.net = rank, scaler, small().net
        self.ddp = DistributedDataParallel(self.net)
        self.hook = ls.SparseHook(self.ddp, "sparse_dense", local_steps=2, wire_dtype="int4", scaler=scaler)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01, weight_decay=0.0)

    def loss(self, step: int) -> Tensor:
        x, y = batch(step, self.rank)
        return nn.functional.cross_entropy(self.ddp(x), y)

    def evaluate(self) -> None:
        self.ddp.eval()
        with torch.no_grad():
            self.ddp(torch.ones(1, 8))
        self.ddp.train()

    def drift(self) -> float:
        """How far this rank's own weights are from the average."""
        exchange = self.hook.exchange
        return float((flat(exchange.own.values()) - flat(exchange.averages.values())).norm())

    def end(self) -> End:
        return End.of(self.hook, self.net, self.optimizer)

    def save(self, file: Path, optimizers: Sequence[torch.optim.Optimizer] = ()) -> None:
        """Save; first what is each rank's own."""
        state: dict[str, Any] = {"unsent": self.hook.state_dict(optimizers=optimizers), "model": self.net.state_dict()}
        state |= {"optimizer": self.optimizer.state_dict(), "scaler": self.scaler and self.scaler.state_dict()}
        if self.rank == 0:
            torch.save(state, file)
        dist.barrier()

    def load(self, file: Path) -> "Plain":
        state = torch.load(file, weights_only=True, mmap=True)
        self.net.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler:
            self.scaler.load_state_dict(state["scaler"])
        self.hook.load_state_dict(state["unsent"], [self.optimizer])
        return self


def ordinary(program: Plain, step: int) -> None:
    program.optimizer.zero_grad()
    program.loss(step).backward()
    program.optimizer.step()


def sharp(program: Plain, step: int, synchronised: bool) -> None:
    """A step of sharpness-aware minimisation by hand: half a unit uphill, and with the gradient there."""
    parameters = list(program.net.parameters())
    program.optimizer.zero_grad()
    with nullcontext() if synchronised else program.ddp.no_sync():
        program.loss(step).backward()
    gradients = [p.grad for p in parameters if p.grad is not None]
    length, before = float(flat(gradients).norm()), [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for p, gradient in zip(parameters, gradients, strict=True):
            p.add_(gradient, alpha=0.5 / length)
    program.optimizer.zero_grad()
    program.loss(step).backward()
    with torch.no_grad():
        for p, own in zip(parameters, before, strict=True):
            p.copy_(own)
    program.optimizer.step()


def evaluated_within(program: Plain, step: int) -> None:
    program.optimizer.zero_grad()
    program.loss(step).backward()
    program.evaluate()
    program.optimizer.step()


def evaluated_by_one(program: Plain, step: int) -> None:
    ordinary(program, step)
    if program.rank == 0:
        program.evaluate()


LOOPS: dict[str, Callable[[Plain, int], None]] = {
    "ordinary": ordinary,
    "sharp": partial(sharp, synchronised=True),
    "sharp, first backward alone": partial(sharp, synchronised=False),
    "evaluated within": evaluated_within,
    "evaluated by one": evaluated_by_one,
}
OVERFLOWS = (0, 5, 6, 12)  # on rank 1
STARTS = (1, 8)  # the first where rank 1 has not stepped yet


def scaled(program: Plain, step: int) -> None:
    loss, scaler = program.loss(step), program.scaler
    program.optimizer.zero_grad()
    overflows = program.rank == 1 and step in OVERFLOWS
    scaler.scale(loss * torch.inf if overflows else loss).backward()  # type: ignore[no-untyped-call]
    scaler.step(program.optimizer)
    scaler.update()


@dataclass
class Found:
    """What one rank found: how loops end, and how far own weights are from the average after each of their steps."""

    ends: dict[str, End]
    drifts: dict[str, list[float]]
    kept: list[str]  # of the optimizer in a state, though none was named
    said: str  # where none was named to go on with
    scales: dict[str, float]


@pytest.fixture(scope="module")
def plain(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """Of each rank, what trainings in plain PyTorch come to."""
    return ranks.run(_plain, 2, tmp_path_factory.mktemp("plain"), gloo=True)


def _plain(rank: int, size: int, path: Path) -> Found:
    found = Found({}, {}, [], "", {})
    for name, take_step in LOOPS.items():
        program, found.drifts[name] = Plain(rank), []
        for step in range(STEPS):
            take_step(program, step)
            found.drifts[name].append(program.drift())
        if name == "ordinary":
            program.save(path / "ordinary")
        found.ends[name] = program.end()
    _go_on_without_optimizers(found, rank, path / "ordinary")
    _scale(found, rank, path)
    return found


def _go_on_without_optimizers(found: Found, rank: int, file: Path) -> None:
    state, program = torch.load(file, weights_only=True)["unsent"], Plain(rank)
    found.kept = list(state["local"]["optimizers"][0])
    with pytest.raises(ValueError, match="optimizers must be") as caught:
        program.hook.load_state_dict(state)
    found.said = str(caught.value)
    program.hook.close()


def _scale(found: Found, rank: int, path: Path) -> None:
    """Trainings with a loss scale, through, saved, and resumed."""
    for name in ("through", "saved", *STARTS):
        program = Plain(rank, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3))
        first = name if isinstance(name, int) else 0
        if first:
            program.load(path / str(first))
        for step in range(first, STEPS):
            if name == "saved" and step in STARTS:
                program.save(path / str(step), [program.optimizer])
            scaled(program, step)
        found.scales[str(name)], found.ends[f"scaled {name}"] = program.scaler.get_scale(), program.end()


def test_ranks_have_the_same_average_whatever_a_loop_does(plain: list[Found]) -> None:
    for name, end in plain[0].ends.items():
        assert torch.equal(end.average, plain[1].ends[name].average), name
        assert bool(end.average.isfinite().all()), name


def test_sharpness_aware_minimisation_by_hand_leaves_no_trace_in_the_weights(plain: list[Found]) -> None:
    for found in plain:
        sharp, alone = found.ends["sharp"], found.ends["sharp, first backward alone"]
        assert torch.equal(sharp.average, alone.average)
        assert torch.equal(sharp.own, alone.own)
        assert max(found.drifts["sharp"]) < 1.2 * max(found.drifts["ordinary"])
        assert max(found.drifts["sharp"][-5:]) < 1.2 * max(found.drifts["ordinary"][-5:])


def test_evaluations_between_backward_and_step_or_on_one_rank_alone_change_nothing(plain: list[Found]) -> None:
    for found in plain:
        ordinary = found.ends["ordinary"]
        # Sums in another order: the last bit may take a value to another level of int4.
        difference = (found.ends["evaluated within"].average - ordinary.average).abs()
        assert float(difference.quantile(0.98)) < 1e-5
        assert torch.equal(found.ends["evaluated by one"].average, ordinary.average)
        assert torch.equal(found.ends["evaluated by one"].own, ordinary.own)


def test_a_state_has_the_optimizers_that_have_stepped_and_going_on_without_them_is_an_error(plain: list[Found]) -> None:
    for found in plain:
        assert {name.partition(".")[2] for name in found.kept} == {"exp_avg", "exp_avg_sq", "step"}
        assert found.said.endswith("got 0. Give them: load_state_dict(state, optimizers=[optimizer]).")


def test_each_rank_goes_on_with_its_own_loss_scale_bit_for_bit(plain: list[Found]) -> None:
    for found in plain:
        through = found.ends["scaled through"]
        for name in ("saved", *map(str, STARTS)):
            assert found.scales[name] == found.scales["through"]
            assert torch.equal(found.ends[f"scaled {name}"].average, through.average), name
            assert torch.equal(found.ends[f"scaled {name}"].own, through.own), name
    assert plain[0].scales["through"] > plain[1].scales["through"]


# - compiled


def test_a_compiled_model_trains_to_the_same_bits_and_its_file_loads_without(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_compiled, 2, tmp_path)
    for name, (average, own) in first.items():
        assert torch.equal(average, second[name][0]), name
        assert not torch.equal(own, second[name][1]), name
    for each in (first, second):
        for compiled, plain in (("compiled", "plain"), ("from compiled", "from plain")):
            assert all(map(torch.equal, each[compiled], each[plain])), compiled


def _compiled(rank: int, size: int, path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """The model and own weights of 6 steps, compiled or not, and of 4 more from either file, not compiled."""
    found = {}
    for name, backend in (("plain", None), ("compiled", "aot_eager")):
        model, run = small(optimizer="adam"), trainer(local(), size, max_steps=6)
        trained: Any = torch.compile(model, backend=backend) if backend else model
        run.fit(trained, data(10, size))
        run.save_checkpoint(path / name)
        found[name] = flat(model.state_dict().values()), all_of(run)
    for name in ("plain", "compiled"):
        model, run = small(seed=1, optimizer="adam"), trainer(local(), size, max_steps=10)
        run.fit(model, data(10, size), ckpt_path=path / name)
        found[f"from {name}"] = flat(model.state_dict().values()), all_of(run)
    return found
