"""What trainings do with averaged gradients where members have several ranks: as one rank for each member would."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import lightning_sparse as ls
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.fabric import SparseDDPStrategy
from tests.support.models import data, small, weights
from tests.support.processes import Ranks

STEPS, MEMBERS = 6, 2
CLIPPED = ls.MomentumCorrection(0.9, "sparse_dense", clip_norm=0.02)


class Net(nn.Module):
    """A convolution and a layer, of fewer rows and of as many as a member has ranks, and two layers used by turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.convolution, self.layer = nn.Conv2d(2, 5, 3, padding=1), nn.Linear(5, 3)
        self.row, self.turns = nn.Parameter(torch.ones(1, 3)), nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor, turn: int | None) -> Tensor:
        y: Tensor = self.layer(self.convolution(x).tanh().mean((2, 3))) * self.row
        return y if turn is None else self.turns[turn](y)


def batch(step: int, who: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + who)
    return torch.randn(4, 2, 6, 6, generator=generator), torch.randint(0, 3, (4,), generator=generator)


class Training:
    """One rank's.  ``who`` says whose data it has."""

    def __init__(self, who: int, compressor: Compressor | str, **options: Any) -> None:
        self.who = who
        net = Net().to(options.pop("dtype", torch.float32))
        net = net.to(memory_format=torch.channels_last) if options.pop("channels_last", False) else net
        ours = {name: options.pop(name) for name in ("local_group", "wire_dtype") if name in options}
        if not options.get("find_unused_parameters"):
            net.turns.requires_grad_(False)
        self.ddp = DistributedDataParallel(net, **options)
        self.hook = ls.SparseHook(self.ddp, compressor, **ours) if ours else None
        self.optimizer = torch.optim.SGD(self.ddp.parameters(), 0.1)
        if self.hook is not None:
            self.hook.note(self.optimizer)

    def loss(self, number: int, turn: int | None = None) -> Tensor:
        x, y = batch(number, self.who)
        dtype = next(self.ddp.parameters()).dtype
        return nn.functional.cross_entropy(self.ddp(x.to(dtype), turn).float(), y)

    def backward(self, number: int, turn: int | None = None) -> None:
        self.loss(number, turn).backward()

    def step(self, number: int) -> None:
        self.backward(number)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def end(self) -> Tensor:
        if self.hook is not None:
            self.hook.close()
        return weights(self.ddp.module).float().clone()


# - habits


def steps(training: Training) -> None:
    for number in range(STEPS):
        training.step(number)


def accumulates(training: Training) -> None:
    for number in range(STEPS):
        with training.ddp.no_sync() if number % 3 < 2 else nullcontext():
            training.backward(number)
        if number % 3 == 2:
            training.optimizer.step()
            training.optimizer.zero_grad()


def discards(training: Training) -> None:
    for number in range(STEPS):
        if number in (0, 3):
            training.backward(number)
            training.optimizer.zero_grad(set_to_none=number > 0)
        else:
            training.step(number)


def never_was(training: Training) -> None:
    for number in range(STEPS):
        if number not in (0, 3):
            training.step(number)


def joins(training: Training, more: int) -> None:
    with training.ddp.join():
        for number in range(2 + 2 * more):
            training.step(number)


Habit = Callable[[Training], None]
DENSE, ROUNDED = ("sparse_dense", "float32"), ("sparse_dense", "bfloat16")
#: What is done, with what, and further options: for the Training.  All of it is deterministic, element by element.
CASES: dict[str, tuple[Habit, tuple[Compressor | str, str], dict[str, Any]]] = {
    "steps": (steps, ROUNDED, {}),
    "momentum": (steps, (CLIPPED, "float32"), {}),
    "accumulates": (accumulates, ROUNDED, {}),
    "discards": (discards, ROUNDED, {}),
    "static graph": (steps, ROUNDED, {"static_graph": True}),
    "views of buckets": (steps, ROUNDED, {"gradient_as_bucket_view": True}),
    "channels last": (steps, ROUNDED, {"channels_last": True}),
    "half precision": (steps, ROUNDED, {"dtype": torch.bfloat16}),
}


def train(rank: int, size: int, local: int) -> dict[str, Tensor]:
    """What becomes of the weights in each case, with data that are the same on all ranks of a member."""
    warnings.simplefilter("ignore")
    found, member = {}, rank // local
    for name, (habit, (compressor, wire_dtype), options) in CASES.items():
        training = Training(member, compressor, wire_dtype=wire_dtype, local_group=local, **options)
        habit(training)
        found[name] = training.end()
    training = Training(member, "sparse_dense", wire_dtype="bfloat16", local_group=local)
    joins(training, member)
    found["joins"] = training.end()
    for name, habit in (("discards", discards), ("never was", never_was)):
        training = Training(member, "micro", wire_dtype="int4", local_group=local)
        habit(training)
        found[f"{name}, micro"] = training.end()
    return found


def test_members_do_as_one_rank_each_does(ranks: Ranks) -> None:
    alone, together = ranks.run(train, MEMBERS, 1, gloo=True), ranks.run(train, 2 * MEMBERS, 2, gloo=True)
    for found in together:
        assert found["discards, micro"].equal(found["never was, micro"])
        assert found["discards, micro"].equal(together[0]["discards, micro"])
        for name in (*CASES, "joins"):
            if name == "momentum":  # whose norm is summed up in another order
                torch.testing.assert_close(found[name], alone[0][name], rtol=1e-6, atol=1e-6)
                assert found[name].equal(together[0][name])
            else:
                assert found[name].equal(alone[0][name]), name


# - data of each rank's own


def turn_of(number: int, rank: int) -> int | None:
    """The layer that a rank uses: one that its neighbour does not, one that the other member does not, or none."""
    return [rank % 2, rank // 2, 2, None, None, 0 if rank == 3 else None][number]


def own_data(rank: int, size: int) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    found: dict[str, Any] = {}
    for name, options in (("ddp", {}), ("members", {"wire_dtype": "float32", "local_group": 2})):
        training = Training(rank, "sparse_dense", **options)
        steps(training)
        found[name] = training.end()
    unused = {"find_unused_parameters": True}
    for name, options in (("unused ddp", {}), ("unused", {"wire_dtype": "float32", "local_group": 2})):
        found[name] = unused_steps(Training(rank, "sparse_dense", **unused, **options))[0]
    found["unused micro"] = unused_steps(Training(rank, "micro", wire_dtype="int4", local_group=2, **unused))
    training = Training(rank, "micro", wire_dtype="int4", local_group=2)
    joins(training, rank)  # so ranks of a member have other numbers of batches
    found["joins"] = training.end()
    found["in place"] = in_place(rank)
    return found


def unused_steps(training: Training) -> tuple[list[Tensor], Tensor, Tensor]:
    """What ``.grad`` holds after each step, NaN where it is None; all of the rank's gradients; what is unsent."""
    own = {name: torch.zeros_like(p) for name, p in training.ddp.module.named_parameters()}
    for name, p in training.ddp.module.named_parameters():
        p.register_hook(lambda gradient, total=own[name]: (total.add_(gradient), None)[1])
    means = []
    for number in range(STEPS):
        training.backward(number, turn_of(number, training.who))
        training.optimizer.step()
        gradients = (torch.full_like(p, torch.nan) if p.grad is None else p.grad for p in training.ddp.parameters())
        means.append(torch.cat([gradient.flatten() for gradient in gradients]))
        training.optimizer.zero_grad()
    kept = {name: torch.zeros_like(p) for name, p in training.ddp.module.named_parameters()}
    for group in training.hook.averager.groups if training.hook is not None else ():
        for name, shape, slot in zip(group.names, group.shapes, group.slots(group.unsent), strict=True):
            group.cut.own(kept[name].detach()).copy_(slot.view(shape))
    training.end()
    return means, *(torch.cat([x.detach().flatten() for x in each.values()]) for each in (own, kept))  # type: ignore[return-value]


class Rows(nn.Module):
    """Layers of one row each, of which ranks at the second place own nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = nn.ModuleList(nn.Linear(5000, 1) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([row(x) for row in self.rows]).sum()


def in_place(rank: int) -> Tensor:
    """The means of sums of DDP's buckets where they lie, and of plain DDP, [2, n]."""
    means = []
    for ours in (None, {"wire_dtype": "float32", "local_group": 2}):
        ddp = DistributedDataParallel(Rows(), bucket_cap_mb=1e-4)
        hook = ls.SparseHook(ddp, "sparse_dense", **ours) if ours else None  # type: ignore[arg-type]
        if hook is not None:
            hook.averager.in_place.may = True  # type: ignore[attr-defined]  # over NCCL, and where sparse_auto chooses
        for number in range(3):
            ddp.zero_grad()
            ddp(torch.randn(3, 5000, generator=torch.Generator().manual_seed(10 * number + rank))).backward()
        means.append(torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]))
        if hook is not None:
            hook.close()
    return torch.stack(means)


def test_ranks_with_data_of_their_own_do_as_plain_ddp(ranks: Ranks) -> None:
    """To the order of summation; what is not sent at once is kept, also where a rank or a member has no gradient."""
    every = ranks.run(own_data, 4, gloo=True)
    first = every[0]
    for found in every:
        for name in ("members", "joins"):
            assert found[name].equal(first[name]), name
        torch.testing.assert_close(found["members"], found["ddp"], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(found["in place"][1], found["in place"][0], rtol=1e-5, atol=1e-5)
        for mean, of_ddp in zip(found["unused"], found["unused ddp"], strict=True):
            torch.testing.assert_close(mean, of_ddp, rtol=1e-5, atol=1e-6, equal_nan=True)
        for mean, of_first in zip(found["unused micro"][0], first["unused micro"][0], strict=True):
            torch.testing.assert_close(mean, of_first, rtol=0, atol=0, equal_nan=True)
    means, _, _ = first["unused micro"]
    arrived = MEMBERS * torch.stack(means).nan_to_num().sum(0) + sum(found["unused micro"][2] for found in every)
    given = sum(found["unused micro"][1] for found in every) / 2  # of a member's ranks the mean
    torch.testing.assert_close(arrived, given, rtol=1e-5, atol=1e-5)


# - within Lightning


def within_lightning(rank: int, size: int) -> dict[str, Tensor]:
    """The weights of a training with a Trainer of either package, and with Fabric; and of one by ``ddp``."""
    warnings.simplefilter("ignore")
    import pytorch_lightning

    from lightning_sparse import pytorch_lightning as other

    class Theirs(pytorch_lightning.LightningModule):  # type: ignore[misc]  # mypy does not look into it
        def __init__(self) -> None:
            super().__init__()
            self.net = small().net

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)

    found: dict[str, Tensor] = {}
    how: dict[str, Any] = {"wire_dtype": "float32", "local_group": 2}
    dataset = data(STEPS, size).dataset
    loader = DataLoader(dataset, 4, sampler=DistributedSampler(dataset, size, rank, shuffle=False))
    quiet: dict[str, Any] = {
        "accelerator": "cpu", "devices": size, "max_steps": STEPS, "use_distributed_sampler": False, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    for name, package, model, strategy in (
        ("ddp", L, small(), "ddp"),
        ("lightning", L, small(), ls.SparseDDPStrategy("sparse_dense", **how)),
        ("pytorch_lightning", pytorch_lightning, Theirs(), other.SparseDDPStrategy("sparse_dense", **how)),
    ):
        package.Trainer(strategy=strategy, **quiet).fit(model, loader)
        found[name] = weights(model)
    fabric = Fabric(accelerator="cpu", strategy=SparseDDPStrategy("sparse_dense", **how), devices=size)
    fabric.launch()
    model = small()
    wrapped, optimizer = fabric.setup(model, model.configure_optimizers())
    for index, batch in enumerate(loader):
        fabric.backward(wrapped.training_step(batch, index))
        optimizer.step()
        optimizer.zero_grad()
    return found | {"fabric": weights(model)}


def test_lightnings_trainers_and_fabric_have_members(ranks: Ranks) -> None:
    every = ranks.run(within_lightning, 4)
    for found in every:
        for name in ("lightning", "pytorch_lightning", "fabric"):
            assert found[name].equal(every[0][name]), name
            assert torch.allclose(found[name], found["ddp"], rtol=1e-5, atol=1e-6), name


# - local steps


def local(rank: int, size: int) -> tuple[list[list[int]], dict[str, Tensor], Tensor, int]:
    """Whom SyncBatchNorm of each kind of averages goes over, buffers and weights after local steps, and one before."""
    warnings.simplefilter("ignore")
    over: list[list[int]] = []
    for steps in (2, 0):
        ddp = DistributedDataParallel(net := nn.Sequential(nn.Linear(4, 3)))
        net.append(norm := nn.SyncBatchNorm(3, affine=False, track_running_stats=False))  # DDP refuses it on a CPU
        hook = ls.SparseHook(ddp, "sparse_dense", local_steps=steps, local_group=2)
        over.append(dist.get_process_group_ranks(norm.process_group or dist.group.WORLD))
        hook.close()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.BatchNorm1d(7), nn.Linear(7, 3))
    for name in ("counted", "placed"):
        model.register_buffer(name, torch.zeros((), dtype=torch.int64))
    ddp = DistributedDataParallel(model.bfloat16())
    hook = ls.SparseHook(ddp, "micro", local_steps=2, local_group=2)
    optimizer = torch.optim.AdamW(ddp.parameters(), 0.01)
    for number in range(13):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(10 * number + rank)).bfloat16()
        optimizer.zero_grad()
        ddp(x).float().square().mean().backward()
        optimizer.step()
        model.counted += rank + 1  # differs within members, too
        model.placed += number == 3 and rank % 2  # differs within members alone
    own, placed = weights(model).clone(), int(model.placed)
    hook.show_average()
    shown = {name: x.clone() for name, x in model.state_dict().items()}
    hook.close()
    return over, shown, own, placed


def test_with_local_steps_a_member_trains_as_one_and_its_buffers_end_in_the_average(ranks: Ranks) -> None:
    """Of weights in half precision, which each owner rounds; with data of each rank's own."""
    every = ranks.run(local, 4, gloo=True)
    for rank, (over, shown, own, placed) in enumerate(every):
        assert placed == 0  # as rank 0 has it, since ranks compared after ten steps
        assert over == [[0, 1] if rank < 2 else [2, 3], [0, 1, 2, 3]]
        assert all(x.equal(every[0][1][name]) for name, x in shown.items())
        assert own.equal(every[rank // 2 * 2][2])
    assert not every[0][2].equal(every[2][2])
