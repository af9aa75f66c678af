"""Local steps on real processes: the law, equality with averaged gradients, resuming, and all that Lightning does."""

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.engine.replica import Replica
from tests.conftest import Ranks
from tests.training.models import LIMIT_S, Small, data, small, trainer, weights

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]


def local(compressor: Any = "sparse_dense", steps: Any = 2, **options: Any) -> ls.SparseDDPStrategy:
    return ls.SparseDDPStrategy(compressor, local_steps=steps, **options)


@pytest.mark.parametrize("size", [2, 4])
def test_one_local_step_of_sgd_is_an_averaged_gradient(ranks: Ranks, size: int) -> None:
    """x̄ - lr * mean(gradient at x̄) is the mean of x̄ - lr * gradient; only the order of rounding differs."""
    for plain, ours in ranks.run(_train_plainly, size):
        assert (plain - ours).abs().max() < 1e-5


def _train_plainly(rank: int, size: int) -> tuple[Tensor, Tensor]:
    torch.distributed.init_process_group("gloo")
    results = []
    for local_steps in (0, 1):
        model = small()
        ddp = DistributedDataParallel(model.net)
        hook = ls.SparseHook(ddp, "sparse_dense", local_steps=local_steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(100):
            x = torch.randn(4, 8, generator=generator)
            optimizer.zero_grad()
            (ddp(x) - x[:, :3].sin()).square().mean().backward()
            optimizer.step()
        hook.show_average()
        results.append(weights(model))
        hook.close()
    return results[0], results[1]


class Gan(L.LightningModule):
    """Two optimizers, stepped by hand, and a parameter that some ranks do not use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.sometimes = nn.Linear(8, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, _ = batch
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer, sign in ((first, 1.0), (second, -1.0)):
            made = self.norm(self.generator(x))
            if (index + self.global_rank) % 3 == 0:
                made = self.sometimes(made)
            optimizer.zero_grad()
            self.manual_backward(sign * self.critic(made).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        made = [*self.generator.parameters(), *self.norm.parameters(), *self.sometimes.parameters()]
        return [torch.optim.AdamW(made, lr=0.01), torch.optim.SGD(self.critic.parameters(), lr=0.01)]


def test_the_law_holds_over_real_processes(ranks: Ranks) -> None:
    for turns in zip(*ranks.run(_watched, 2), strict=True):
        before, after, moved, largest = (torch.stack(each) for each in zip(*turns, strict=True))
        assert torch.equal(moved[0], moved[1])
        owed, kept = before.double().sum(0), len(turns) * moved[0].double() + after.double().sum(0)
        assert (owed - kept).abs().max() <= 4e-6 * max(1.0, float(largest.max()))


def _watched(rank: int, size: int) -> list[Any]:
    """Of each group's turn what was owed before, after, how x̄ moved, and the largest weight."""
    turns: list[Any] = []
    take_up, apply = Replica.take_up, Replica.apply
    shared: dict[Replica, tuple[Tensor, Tensor]] = {}

    def before(self: Replica, size: int) -> None:
        take_up(self, size)
        shared[self] = self.group.unsent.clone(), self.average.clone()

    def after(self: Replica) -> None:
        apply(self)
        owed, average = shared.pop(self)
        turns.append((owed, self.group.unsent.clone(), self.average - average, average.abs().max()))

    Replica.take_up, Replica.apply = before, after  # type: ignore[method-assign]
    for model, compressor, wire in ((Small, "sparse_dense", "float32"), (Gan, ls.MiCRO(density=0.1), "int4")):
        torch.manual_seed(0)
        strategy = local(compressor, 3, wire_dtype=wire, find_unused_parameters=model is Gan)
        trainer(strategy, size, max_epochs=1).fit(model(), data(6, size))
    return turns


COMPRESSORS = ["sparse_dense", ls.MiCRO(density=0.1), ls.SkipReduce(skip=0.5)]


def held(strategy: ls.SparseDDPStrategy) -> dict[str, Tensor]:
    """This rank's own weights after a fit, by name."""
    exchange = strategy.exchange
    assert isinstance(exchange, LocalExchange)
    return {name: own.clone() for name, own in exchange.own.items()}


def test_a_resumed_training_goes_on_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(_resume, 2, tmp_path):
        for through, resumed, norm, after in found:
            assert torch.equal(through, resumed)
            assert norm == after


def _resume(rank: int, size: int, path: Path) -> list[Any]:
    found = []
    for i, compressor in enumerate(COMPRESSORS):
        for overlap in (True, False):
            steps = ls.LocalSteps(3, overlap=overlap, outer_rate=0.9, outer_momentum=0.5)
            saver = ModelCheckpoint(path / f"{i}{overlap}", filename="half", every_n_train_steps=10)
            half = path / f"{i}{overlap}" / "half.ckpt"
            trained = []
            for until, start, callbacks in ((20, None, []), (10, None, [saver]), (20, half, [])):
                model = small(optimizer="adam")
                strategy = local(compressor, steps, wire_dtype="int4")
                run = trainer(
                    strategy, size, max_steps=until, callbacks=callbacks, enable_checkpointing=bool(callbacks)
                )
                run.fit(model, data(10, size), ckpt_path=start)
                own = torch.cat([x.flatten() for x in held(strategy).values()])
                trained.append((torch.cat([weights(model), own]), own.norm()))
            del trained[1]
            found.append((trained[0][0], trained[1][0], trained[0][1], trained[1][1]))
    return found


@pytest.mark.parametrize(("first", "second"), [(4, 2), (2, 4)])
def test_another_number_of_ranks_starts_from_the_mean(ranks: Ranks, tmp_path: Path, first: int, second: int) -> None:
    file = tmp_path / "x.ckpt"
    own = torch.stack(ranks.run(_save, first, file))
    saved = torch.load(file, weights_only=True)
    state = saved["lightning_sparse"]
    assert torch.equal(state["unsent"]["net.0.weight"], own)
    moment = state["local"]["optimizers"][0]["0.exp_avg"].mean(0)
    for weight, exp_avg, average in ranks.run(_read, second, file):
        assert torch.equal(weight, own.mean(0))
        assert torch.allclose(exp_avg, moment)
        assert torch.equal(average, saved["state_dict"]["net.0.weight"])


def _save(rank: int, size: int, file: Path) -> Tensor:
    strategy = local("sparse_dense", 4)
    run = trainer(strategy, size, max_steps=6)
    run.fit(model := small(optimizer="adam"), data(6, size))
    run.save_checkpoint(file)
    own = held(strategy)["net.0.weight"]
    assert not torch.equal(own, model.net[0].weight)
    return own


class Seen(L.Callback):
    """Notes the first weights of a training: the average, this rank's own, and an optimizer's state."""

    def on_train_batch_start(self, run: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        if not hasattr(self, "average"):
            self.average = module.net[0].weight.detach().clone()  # type: ignore[index,union-attr]

    def on_before_zero_grad(self, run: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        if not hasattr(self, "own"):
            weight = module.net[0].weight  # type: ignore[index,union-attr]
            self.own = weight.detach().clone()
            self.moment = optimizer.state[weight].get("exp_avg", self.own).clone()


def _read(rank: int, size: int, file: Path) -> Any:
    seen = Seen()
    run = trainer(local("sparse_dense", 4), size, max_steps=8, callbacks=[seen])
    run.fit(small(optimizer="adam"), data(8, size), ckpt_path=file)
    return seen.own, seen.moment, seen.average


class Watched(Small):
    """With batch norm and validation; notes the weights that are validated."""

    def __init__(self) -> None:
        super().__init__("adam")
        self.net.insert(1, nn.BatchNorm1d(33))
        self.validated: list[Tensor] = []

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        if index == 0:
            buffers = [b.flatten().float() for b in self.buffers()]
            self.validated.append(torch.cat([weights(self), *buffers]))
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


def test_evaluations_checkpoints_and_averages_over_time_see_what_all_ranks_share(ranks: Ranks, tmp_path: Path) -> None:
    first, second = ranks.run(_evaluate, 2, tmp_path)
    assert len(first[0]) == 3
    for a, b in zip(first[0], second[0], strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first[1], second[1])  # the average over time
    assert torch.equal(first[2], second[2])  # the model after training
    assert (first[3], first[4]) == (True, True)


def _evaluate(rank: int, size: int, path: Path) -> Any:
    torch.manual_seed(0)
    model, ema = Watched(), EMAWeightAveraging(decay=0.9)
    saving = ModelCheckpoint(dirpath=path, save_last=True)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5, "num_sanity_val_steps": 0}
    run = trainer(
        local(ls.TopK(density=0.2), 2), size, max_epochs=3, callbacks=[saving], enable_checkpointing=True, **options
    )
    run.fit(model, data(6, size), data(2, size, seed=1))
    last = weights(model)
    file = torch.load(path / "last.ckpt", weights_only=True)
    kept = torch.cat([file["state_dict"][name].flatten() for name, _ in model.named_parameters()])
    anywhere = small_with_norm()
    trainer("ddp", size, max_epochs=4).fit(anywhere, data(6, size), ckpt_path=path / "last.ckpt")

    model2 = Watched()
    run = trainer(local("micro", 2), size, max_epochs=2, callbacks=[ema], check_every=0)
    run.fit(model2, data(6, size), data(2, size, seed=1))
    return model.validated, weights(model2), last, torch.equal(kept, last), run.global_step == 12


def small_with_norm() -> Watched:
    torch.manual_seed(1)
    return Watched()


def test_a_second_fit_goes_on_and_a_checkpoint_of_another_kind_is_refused_softly(ranks: Ranks, tmp_path: Path) -> None:
    for own, again, warned, rank in ranks.run(_fit_twice, 2, tmp_path):
        assert torch.equal(own, again)
        assert rank or any("written without local_steps and is read with" in each for each in warned)


def _fit_twice(rank: int, size: int, path: Path) -> Any:
    seen = Seen()
    model, strategy = small(optimizer="adam"), local("sparse_dense", 3)
    run = trainer(strategy, size, max_epochs=1)
    run.fit(model, data(5, size))
    own = held(strategy)["net.0.weight"]
    run.fit_loop.max_epochs = 2
    run.callbacks.append(seen)  # type: ignore[attr-defined]
    run.fit(model, data(5, size))

    plain = trainer("sparse_topk", size, max_steps=3)
    plain.fit(small(optimizer="adam"), data(5, size))
    plain.save_checkpoint(path / "gradients.ckpt")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(local("sparse_topk", 3), size, max_steps=5).fit(
            small(optimizer="adam"), data(5, size), ckpt_path=path / "gradients.ckpt"
        )
    return own, seen.own, [str(each.message) for each in caught], rank


def test_a_rank_whose_scaler_skips_a_step_takes_part_in_the_exchange(ranks: Ranks) -> None:
    first, second = ranks.run(_scaled, 2)
    assert first[0] == 1024.0
    assert second[0] == 512.0
    assert torch.equal(first[1], second[1])
    assert first[1].isfinite().all()


def _scaled(rank: int, size: int) -> tuple[float, Tensor]:
    torch.distributed.init_process_group("gloo")
    model = small()
    ddp, scaler = DistributedDataParallel(model.net), torch.amp.GradScaler("cpu", init_scale=1024.0)
    hook = ls.SparseHook(ddp, ls.TopK(density=0.2), local_steps=2, scaler=scaler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(rank)
    for step in range(8):
        loss = ddp(torch.randn(4, 8, generator=generator)).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss * torch.inf if (rank, step) == (1, 3) else loss).backward()
        scaler.step(optimizer)
        scaler.update()
    ddp.eval()
    with torch.no_grad():
        ddp(torch.zeros(1, 8))  # which shows the average
    scale, average = scaler.get_scale(), weights(model)
    hook.close()
    return scale, average


def test_the_factor_of_the_learning_rate_is_1_for_equal_gradients_and_the_root_of_p_for_noise(ranks: Ranks) -> None:
    for equal, noise, moved, rate in ranks.run(_noisy, 4):
        assert equal == 1.0
        assert 1.8 < noise <= 2.0
        assert moved == pytest.approx(noise * rate, rel=1e-3)


def _noisy(rank: int, size: int) -> tuple[float, float, float, float]:
    torch.distributed.init_process_group("gloo")
    factors = []
    for seed in (0, rank):
        weight = nn.Linear(100, 50, bias=False)
        ddp = DistributedDataParallel(weight)
        hook = ls.SparseHook(ddp, "sparse_dense", local_steps=ls.LocalSteps(1, lr_factor="measured"))
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(seed)
        for _ in range(61):
            optimizer.zero_grad()
            (ddp(torch.eye(100)) * torch.randn(100, 50, generator=generator)).sum().backward()
            before = weight.weight.detach().clone()
            optimizer.step()
        assert isinstance(hook.exchange, LocalExchange)
        assert weight.weight.grad is not None
        factors.append(hook.exchange.lr_factor.value)
        hook.close()
    moved = (weight.weight - before).norm() / weight.weight.grad.norm()
    return factors[0], factors[1], float(moved), optimizer.param_groups[0]["lr"]
