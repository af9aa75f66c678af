"""Local steps between replicas that FSDP2 shards: as members of DDP take them, the law, and all FSDP2 can do."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.nn.functional import all_reduce
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.checkpoint.sharded import save_tensors
from lightning_sparse.network.cut import shard_of
from tests.support.models import data as training_data
from tests.support.models import flat
from tests.support.models import weights as weights_of
from tests.support.processes import Ranks
from tests.support.sharded import Checkpointed, Compiled, Net, Policy, Sharded, Tied, keep, kept, mesh
from tests.training.test_sharded_trainer import ShardedSmall, fitted
from tests.training.test_sharded_trainer import weights as trained

STEPS = 9
SGD: Callable[..., torch.optim.Optimizer] = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OWN = {"second_moments": "own"}  # of shards other parts are known than of whole matrices


# - the mathematics


class Whole:
    """The same training under DDP, of whose ranks two are a member."""

    def __init__(self, make: Callable[[], nn.Module], optimizer: Any, wire_dtype: str, **settings: Any) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(make())
        self.optimizer = optimizer(self.ddp.parameters())
        local = ls.LocalSteps(**settings)
        self.hook = ls.SparseHook(self.ddp, "sparse_dense", wire_dtype=wire_dtype, local_group=2, local_steps=local)

    def step(self, step: int) -> None:
        loss(self.ddp(data(step, 10 * dist.get_rank())), data(step, 10 * dist.get_rank())).backward()
        torch.nn.utils.clip_grad_norm_(self.ddp.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def data(step: int, number: int) -> Tensor:
    """A batch, as ``Sharded`` draws them."""
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(1000 * step + number), dtype=torch.float32)


def loss(y: Tensor, x: Tensor) -> Tensor:
    found: Tensor = y.square().mean() + (y - x[:, :2]).square().mean()
    return found


class Frozen(Net):
    """Of whose blocks biases are trained alone."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0].weight.requires_grad_(False)


class Narrow(Net):
    """Whose head has one row, and its bias too: of two ranks the second has none."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(9, 1)


ADAM: Callable[..., torch.optim.Optimizer] = partial(torch.optim.AdamW, lr=0.01)
AS_DDP: list[tuple[Callable[[], nn.Module], Any, str, dict[str, Any]]] = [
    (Net, SGD, "float32", {"steps": 1, "lead": 1.0}),
    (Narrow, SGD, "float32", {"steps": 2}),
    (Net, ADAM, "float32", {"steps": 3, "fragments": 1, "overlap": False, **OWN}),
    (Tied, SGD, "float32", {"steps": 2, "fragments": 1, "outer_rate": 0.7, "outer_momentum": 0.9}),
    (Frozen, ADAM, "int4", {"steps": 2, **OWN}),
    (Net, SGD, "sign", {"steps": 2, "error_decay": 0.9}),
]


def _as_ddp(rank: int, size: int) -> None:
    for make, optimizer, wire_dtype, settings in AS_DDP:
        whole = Whole(make, optimizer, wire_dtype, **settings)
        ours = _ours(mesh(2, 2), wire_dtype, make, optimizer, **settings)
        for step in range(STEPS):
            whole.step(step)
            ours.step(step)
        torch.testing.assert_close(ours.weights, weights_of(whole.ddp.module), rtol=1e-4, atol=1e-6)
        whole.hook.show_average()
        torch.testing.assert_close(ours.average(), weights_of(whole.ddp.module), rtol=1e-4, atol=1e-6)
        ours.close()
        whole.hook.close()


def _ours(
    on: Any, wire_dtype: str, make: Callable[[], nn.Module] = Net, optimizer: Any = SGD, **settings: Any
) -> Sharded:
    local = ls.LocalSteps(**settings)
    return Sharded(on, "sparse_dense", make=make, wire_dtype=wire_dtype, local_steps=local, optimizer=optimizer)


def test_replicas_train_as_members_of_two_ranks_do_under_ddp(ranks: Ranks) -> None:
    """With clipping by the norm of all, uneven and empty shards, frozen and tied parameters."""
    ranks.run(_as_ddp, 4, gloo=True)


def _on_one(replicas: int, shards: int, make: Callable[[], nn.Module] = Net) -> list[nn.Module]:
    """Models that are trained by themselves, each on what ``shards`` ranks have, and averaged every other step."""
    torch.manual_seed(0)
    nets = [make() for _ in range(replicas)]
    for net in nets:
        net.load_state_dict(nets[0].state_dict())
    optimizers = [SGD(net.parameters()) for net in nets]
    for step in range(STEPS - 1):
        for number, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            x = torch.cat([data(step, 10 * (number * shards + shard)) for shard in range(shards)])
            loss(net(x), x).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 2:
            mean = torch.stack([weights_of(net) for net in nets]).mean(0)
            for net in nets:
                nn.utils.vector_to_parameters(mean.clone(), net.parameters())
    return nets


def _as_on_one(rank: int, size: int) -> None:
    for replicas, shards in ((2, 2), (4, 1), (1, 4)):
        settings = {"steps": 2, "fragments": 1, "overlap": False, "lead": 1.0}
        ours = _ours(mesh(replicas, shards), "float32", **settings)
        for step in range(STEPS - 1):
            ours.step(step)
        alone = weights_of(_on_one(replicas, shards)[0])
        torch.testing.assert_close(ours.average(), alone, rtol=1e-4, atol=1e-6)
        ours.close()


def test_every_other_step_the_weights_are_the_mean_of_those_trained_alone(ranks: Ranks) -> None:
    ranks.run(_as_on_one, 4, gloo=True)


COMPRESSORS: list[tuple[Any, str]] = [("sparse_dense", "int4"), (ls.MiCRO(density=0.2), "float32")]
COMPRESSORS += [(ls.LowRank(rank=1), "float32"), ("sparse_dense", "sign")]


def _law(rank: int, size: int) -> None:
    for compressor, wire_dtype in COMPRESSORS:
        local = ls.LocalSteps(2, lead=1.0)
        ours = Sharded(mesh(2, 2), compressor, make=Narrow, wire_dtype=wire_dtype, local_steps=local)
        for step in range(STEPS):
            ours.step(step)
            before = ours.column_sum(_shards(ours))
            ours.averager.settle()  # which moves the average, and each replica's weights with it
            torch.testing.assert_close(ours.column_sum(_shards(ours)), before, rtol=1e-4, atol=1e-5)
            assert ours.is_same_in_column(flat(ours.averager.local.averages.values()))
        assert ours.averager.unsent_norm() > 0
        assert not ours.is_same_in_column(_shards(ours)) or rank % 2
        moments = ours.averager.local.state()["moments"]  # of AdamW's gradients
        assert int(moments["looks"]) > 0
        assert ours.is_same_in_column(moments["squares"])
        ours.close()


def _shards(training: Sharded) -> Tensor:
    """All that this rank has of the weights."""
    return torch.cat([p.to_local().detach().flatten() for p in training.sharded.sharded.values()])


def test_an_exchange_moves_the_replicas_by_nothing_but_the_mean_of_their_steps(ranks: Ranks) -> None:
    """And each replica has the same bits of the average."""
    ranks.run(_law, 4, gloo=True)


# - what FSDP2 can do


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Net,
    "checkpointed": Checkpointed,
    "compiled": Compiled,
    "kept unsharded": partial(Policy, reshard_after_forward=False),
    "mixed": partial(Policy, mp_policy=BF16),
}


def _kinds(rank: int, size: int) -> None:
    """Each kind beside itself without evaluations, and those of float32 beside each other."""
    found = {}
    for kind, make in KINDS.items():
        ours, undisturbed = (_ours(mesh(2, 2), "int4", make, ADAM, steps=2) for _ in range(2))
        for step in range(4):
            undisturbed.step(step, batches=2)
            ours.step(step, batches=2)
            evaluated = _evaluated(ours, data(step, 0))
            net = Net()
            nn.utils.vector_to_parameters(ours.weights, net.parameters())
            assert ours.is_same_in_column(_shards(ours)), kind
            if kind != "mixed":
                torch.testing.assert_close(evaluated, net(data(step, 0)).detach())
        ours.averager.between_steps()
        undisturbed.averager.between_steps()
        assert not ours.is_same_in_column(_shards(ours)), kind
        assert torch.equal(_shards(ours), _shards(undisturbed)), kind
        found[kind] = ours.weights
        ours.close()
        undisturbed.close()
    assert all(torch.equal(found[kind], found["plain"]) for kind in KINDS if kind != "mixed")


def _evaluated(training: Sharded, x: Tensor) -> Tensor:
    """What the model makes of ``x`` in an evaluation."""
    training.module.eval()
    with torch.no_grad():
        training.hook.begin_forward()
        y: Tensor = training.module(x)
        training.hook.end_forward()
    training.module.train()
    return y


@pytest.mark.programs
def test_an_evaluation_sees_the_average_and_the_next_forward_its_own_weights(ranks: Ranks) -> None:
    """Though FSDP2 leaves a root whole after an evaluation; with accumulation, however blocks are sharded."""
    ranks.run(_kinds, 4, gloo=True)


class Normed(Net):
    """With a batch norm, and a teacher that follows a block, which no optimizer trains."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(9)
        self.teacher = nn.Linear(9, 9).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.blocks(x)) + self.teacher(x))
        return y


def _others(rank: int, size: int) -> None:
    ours = _ours(mesh(2, 2), "float32", Normed, ADAM, steps=2)
    for step in range(STEPS + 3):
        ours.step(step)
        frozen = ours.sharded.frozen["teacher.weight"]
        with torch.no_grad():
            shard_of(frozen).lerp_(shard_of(ours.sharded.sharded["blocks.0.0.weight"]), 0.1)
    shown = {}
    for key in ("own", "average"):
        shown[key] = [torch.empty_like(ours.module.norm.running_mean) for _ in range(size)]  # type: ignore[union-attr]
        dist.all_gather(shown[key], ours.module.norm.running_mean)  # type: ignore[union-attr]
        teachers = ours.is_same_in_column(shard_of(frozen)), "teacher.weight" in ours.averager.local.averages  # type: ignore[union-attr]
        assert teachers == (key == "average", True)
        ours.hook.show_average()
    assert not all(torch.equal(x, shown["own"][0]) for x in shown["own"])
    assert all(torch.equal(x, shown["average"][0]) for x in shown["average"])
    ours.close()


@pytest.mark.programs
def test_buffers_and_a_teacher_are_averaged_too(ranks: Ranks) -> None:
    ranks.run(_others, 4, gloo=True)


class SyncedOnCPU(nn.SyncBatchNorm):
    """Which PyTorch has for other devices alone: the same sums over the same group."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        group = self.process_group or dist.group.WORLD
        n = len(x) * dist.get_world_size(group)
        mean, squares = (all_reduce(each.sum(0), group=group) / n for each in (x, x.square()))
        variance = squares - mean.square()
        for statistic, now in ((self.running_mean, mean), (self.running_var, variance * n / (n - 1))):
            statistic.lerp_(now.detach(), 0.1)  # type: ignore[union-attr]
        y: Tensor = (x - mean) / (variance + self.eps).sqrt() * self.weight + self.bias
        return y


class WithNorm(Net):
    def __init__(self, norm: Callable[[int], nn.Module] = SyncedOnCPU) -> None:
        super().__init__()
        self.blocks[0].append(norm(9))


def _synced(rank: int, size: int) -> None:
    settings = {"steps": 2, "fragments": 1, "overlap": False, "lead": 1.0}
    ours = _ours(mesh(2, 2), "float32", WithNorm, **settings)
    for step in range(STEPS - 1):
        ours.step(step)
    alone = _on_one(2, 2, partial(WithNorm, nn.BatchNorm1d))
    norms = [net.blocks[0][2] for net in alone]  # type: ignore[index, union-attr]
    own = ours.module.blocks[0][2]  # type: ignore[index, union-attr]
    torch.testing.assert_close(own.running_var, norms[rank // 2].running_var, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.average(), weights_of(alone[0]), rtol=1e-4, atol=1e-6)
    means = torch.stack([norm.running_mean for norm in norms]).mean(0)
    torch.testing.assert_close(own.running_mean, means, rtol=1e-4, atol=1e-6)
    ours.close()


def test_synchronised_batch_norm_is_over_a_replica(ranks: Ranks) -> None:
    """As batch norm of a model that is trained alone on what the replica's ranks have; the average has the mean."""
    ranks.run(_synced, 4, gloo=True)


# - checkpoints

KEPT: list[tuple[Any, str, dict[str, Any], bool]] = [
    ("sparse_dense", "int4", {"steps": 3}, True),
    (ls.MiCRO(density=0.2), "float32", {"steps": 2, "fragments": 1, "outer_rate": 0.7, "outer_momentum": 0.9}, False),
    ("sparse_dense", "sign", {"steps": 2, "error_decay": 0.9}, True),
]


def _goes_on(rank: int, size: int, folder: Path) -> None:
    for number, (compressor, wire_dtype, settings, to_folder) in enumerate(KEPT):
        path = folder / str(number) if to_folder else None
        local = ls.LocalSteps(**settings)
        first, second = (
            Sharded(mesh(2, 2), compressor, make=Normed, wire_dtype=wire_dtype, local_steps=local) for _ in range(2)
        )
        for step in range(STEPS - 1):
            first.step(step)
        first.hook.show_average()
        said, tensors = first.hook.gather("per_rank", to_folder)
        if path is not None:
            save_tensors(tensors, path)
        only: list[Any] = [said]
        dist.broadcast_object_list(only)
        _zero_states(second)
        second.module.load_state_dict(first.module.state_dict())
        second.hook.restore(only[0], path, [second.optimizer])
        for step in range(STEPS - 1, 2 * STEPS):
            first.step(step)
            second.step(step)
        assert torch.equal(second.weights, first.weights), number
        assert torch.equal(second.average(), first.average()), number
        for each in (first, second):
            each.close()


def _zero_states(training: Sharded) -> None:
    """Have an optimizer as it is after its first step, of gradients that are zero."""
    for p in training.sharded.sharded.values():
        p.grad = torch.zeros_like(p)
    training.optimizer.step()
    training.optimizer.zero_grad()


def test_resumed_on_the_same_mesh_it_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_goes_on, 4, tmp_path, gloo=True)


def _elsewhere(rank: int, size: int, ways: list[tuple[Path | None, tuple[int, int], Path]]) -> None:
    """Go on with what is in a folder on another mesh, and save it in a second one."""
    for source, sizes, target in ways:
        for said, folder, more in kept(source) if source is not None else [(None, None, {})]:
            ours = _ours(mesh(*sizes), "int4", Narrow, ADAM, steps=2, lead=1.0)
            if said is not None:
                for name, p in ours.sharded.sharded.items():
                    if shard_of(p).numel():
                        shard_of(p).copy_(more["average"][name].chunk(sizes[1])[rank % sizes[1]])
                ours.hook.restore(said, folder, [ours.optimizer])
                ours.averager.between_steps()
                torch.testing.assert_close(_mean_of_replicas(ours), more["mean"], rtol=1e-5, atol=1e-6)
            for step in range(STEPS):
                ours.step(step)
            ours.averager.settle()
            mean = _mean_of_replicas(ours)
            ours.hook.show_average()
            average = {name: x.full_tensor() for name, x in ours.module.state_dict().items()}
            if folder is None:
                keep(ours, target, mean=mean, average=average)
            ours.close()


def _without_local_steps(rank: int, size: int, source: Path) -> None:
    averaged = Sharded(mesh(2, 2), "sparse_dense", make=Narrow)
    with pytest.raises(ValueError, match="must be read with local_steps"):
        averaged.hook.restore(kept(source)[0][0], None)
    averaged.close()


def _mean_of_replicas(training: Sharded) -> Tensor:
    """All of each weight, as it is on average."""
    mean = training.column_sum(_shards(training)) / training.averager.size
    found = []
    for part in mean.split([shard_of(p).numel() for p in training.sharded.sharded.values()]):
        every: list[Any] = [None] * training.sharded.shard_size
        dist.all_gather_object(every, part, group=training.sharded.inside)
        found.append(torch.cat(every))
    return torch.cat(found)


@pytest.mark.programs
def test_resumed_on_another_mesh_the_mean_of_the_replicas_goes_on(ranks: Ranks, tmp_path: Path) -> None:
    """Of 2 x 2 on meshes of as many ranks and of half as many, and back."""
    first, others = tmp_path / "22", [(4, 1), (1, 4), (2, 1), (1, 2)]
    folder = {sizes: tmp_path / "{}{}".format(*sizes) for sizes in others}
    ranks.run(_elsewhere, 4, [(None, (2, 2), first)], gloo=True)
    ranks.run(_elsewhere, 4, [(first, sizes, folder[sizes]) for sizes in others[:2]], gloo=True)
    ranks.run(_elsewhere, 2, [(first, sizes, folder[sizes]) for sizes in others[2:]], gloo=True)
    ranks.run(_elsewhere, 4, [(folder[sizes], (2, 2), tmp_path / "back") for sizes in others], gloo=True)
    ranks.run(_without_local_steps, 4, first, gloo=True)


# - under a Trainer


def _in_trainings(rank: int, size: int, folder: Path) -> None:
    class Saves(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, *_: object) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(folder / "within")

    def strategy() -> ls.SparseHSDPStrategy:
        options = {"wire_dtype": "int4", "replicate_size": 2, "local_steps": 2}
        return ls.SparseHSDPStrategy("sparse_dense", **options)

    found = []
    for callbacks in ([], [Saves()]):
        torch.manual_seed(0)
        module = ShardedSmall()
        run = fitted(5, strategy(), module, callbacks=callbacks, accumulate_grad_batches=2, gradient_clip_val=0.1)
        assert run.strategy.averager.steps == 5
        run.fit_loop.epoch_loop.max_steps = 8
        run.fit(module, training_data(5, 4))  # a second fit
        found.append(trained(module))
    assert torch.equal(*found)
    within = torch.load(folder / "within" / "meta.pt", weights_only=False)
    assert within["lightning_sparse_sharded"]["local"]


@pytest.mark.programs
def test_under_a_trainer_a_second_fit_goes_on_and_a_step_is_not_disturbed_by_a_save(
    ranks: Ranks, tmp_path: Path
) -> None:
    ranks.run(_in_trainings, 4, tmp_path)
