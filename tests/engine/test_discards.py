"""Gradients that a user throws away never reach a weight, and what was unsent before them is still there."""

import random
import warnings
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.support.models import unsent
from tests.support.processes import Ranks

STEPS = 30
CASES: list[tuple[Any, str]] = [
    *((kind(), "float32") for kind in ls.COMPRESSORS.values()),
    (ls.Dense(), "int4"), (ls.Dense(), "sign"), (ls.Dense(), "bfloat16"), (ls.MiCRO(density=0.2), "int8"),
    (ls.SkipReduce(), "int4"), (ls.TopK(density=0.1), "int2"), (ls.RandomK(density=0.3), "float16"),
]  # fmt: skip


class Two(nn.Module):
    """Two parts, with an optimizer each; the loss is linear, so that gradients are what is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.ParameterList([torch.ones(40, 30), torch.ones(7)]) for _ in range(2))

    def forward(self, drawn: list[Tensor], reached: tuple[int, ...]) -> Tensor:
        """The inner product of all parameters of the parts that are ``reached`` with what is ``drawn`` for them."""
        every = [p for part in self.parts for p in part]
        used = [p for i in reached for p in self.parts[i]]
        return torch.stack(
            [(p * c).sum() for p, c in zip(every, drawn, strict=True) if any(p is u for u in used)]
        ).sum()


class Run:
    """A training whose backwards, steps, discards, clips and skips are drawn at random, the same on every rank.

    Attributes:
        means: of each parameter, the sum of the means that were stepped with.
        gradients: likewise of this rank's gradients.
        is_lasting: of each discard, whether what was unsent before the backward is unsent after it, in bits.
    """

    def __init__(self, rank: int, compressor: Any, wire_dtype: str, seed: int, is_scaled: bool) -> None:
        self.draw, self.own = random.Random(seed), torch.Generator().manual_seed(100 * seed + rank)
        self.model = Two()
        self.ddp = DistributedDataParallel(self.model, find_unused_parameters=True)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0) if is_scaled else None
        self.hook = ls.SparseHook(self.ddp, compressor, wire_dtype=wire_dtype, scaler=self.scaler)
        self.optimizers = [torch.optim.SGD(part.parameters(), lr=0.01) for part in self.model.parts]
        self.of_part = [[n for n, _ in self.model.named_parameters() if f".{i}." in n[:8]] for i in range(2)]
        for optimizer in self.optimizers:
            self.hook.note(optimizer)
        zeros = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in self.model.named_parameters()}
        self.means, self.gradients, self.waiting = ({n: x.clone() for n, x in zeros.items()} for _ in range(3))
        self.before: dict[str, Tensor] = {}  # unsent, before the first backward whose mean is in .grad
        self.to_empty: list[tuple[int, str]] = []
        self.is_lasting: list[bool] = []
        for step in range(STEPS):
            self.step(step)
        self.to_empty += [(0, "none"), (1, "none")]  # what was kept to the end too
        self.empty()
        self.unsent = {n: x.double().view(zeros[n].shape) for n, x in unsent(self.hook).items()}
        self.hook.close()

    def empty(self) -> None:
        """Set gradients to None or zero that were stepped with or are thrown away."""
        thrown = {}
        for part, how in self.to_empty:
            self.optimizers[part].zero_grad(set_to_none=how == "none")
            thrown |= {n: self.before.pop(n) for n in self.of_part[part] if n in self.before}
        self.to_empty.clear()
        now = unsent(self.hook)
        self.is_lasting += [torch.equal(now[name], was) for name, was in thrown.items()]

    def step(self, step: int) -> None:
        reached = self.draw.choice([(0,), (1,), (0, 1)]) if step else (0, 1)
        micro_batches = self.draw.choice([1, 1, 2])
        for i in range(micro_batches):
            drawn = {n: torch.randn(p.shape, generator=self.own) for n, p in self.model.named_parameters()}
            with self.ddp.no_sync() if i + 1 < micro_batches else nullcontext():
                loss = self.ddp(list(drawn.values()), reached)
                self.empty()  # as late as can be
                now = unsent(self.hook)
                (self.scaler.scale(loss) if self.scaler else loss).backward()
            for name in (n for part in reached for n in self.of_part[part]):
                self.before.setdefault(name, now[name])
                self.waiting[name] += drawn[name].double()
        for part in range(2):
            if any(name in self.before for name in self.of_part[part]):
                self.end(part, self.draw.choice(["step", "clip", "throw", "skip", "keep", "zero"]) if step else "throw")
        if self.scaler and self.scaler._per_optimizer_states:
            self.scaler.update()
        if self.draw.random() < 0.5:
            self.empty()

    def end(self, part: int, how: str) -> None:
        names, optimizer = self.of_part[part], self.optimizers[part]
        gradients = [self.model.get_parameter(name).grad for name in names]
        if how == "zero" and all(x is not None and bool(x.any()) for x in gradients):  # and step all the same
            for x in gradients:
                x.zero_()  # type: ignore[union-attr]
            optimizer.step()
        if how in ("clip", "skip"):
            nn.utils.clip_grad_norm_(self.model.parts[part].parameters(), 1e9)  # which writes to .grad all the same
        if how in ("step", "clip"):
            for name in names:
                gradient = self.model.get_parameter(name).grad
                assert gradient is not None
                self.means[name] += gradient.double() / (self.scaler.get_scale() if self.scaler else 1.0)
                self.gradients[name] += self.waiting[name]
                del self.before[name]
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
        if how != "keep":
            self.to_empty.append((part, self.draw.choice(["none", "zero"])))
            for name in names:
                self.waiting[name].zero_()


def every_case(rank: int, size: int, seed: int) -> list[tuple[Any, ...]]:
    runs = [Run(rank, *case, seed + i, is_scaled=i % 3 == 2) for i, case in enumerate(CASES)]
    return [(run.means, run.gradients, run.unsent, run.is_lasting) for run in runs]


def test_what_is_thrown_away_never_reaches_a_weight_and_nothing_else_is_lost(ranks: Ranks) -> None:
    """``P * mean + sum(unsent after) == sum(unsent before + gradients that were stepped with)``."""
    size = 3
    for case, of_ranks in zip(CASES, zip(*ranks.run(every_case, size, 7, gloo=True), strict=True), strict=True):
        assert all(all(is_lasting) and len(is_lasting) > 10 for *_, is_lasting in of_ranks), case
        for name, mean in of_ranks[0][0].items():
            gradients, left = (sum(each[i][name] for each in of_ranks) for i in (1, 2))
            assert all(torch.equal(each[0][name], mean) for each in of_ranks), (case, name)
            assert (size * mean + left - gradients).abs().max() < 1e-4, (case, name)


class BehindAutograd(torch.optim.SGD):
    """Writes where no version moves, as kernels of other packages do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data.add_(p.grad, alpha=-group["lr"])


def moved_unseen(rank: int, size: int) -> list[Tensor]:
    found = []
    for kind in (torch.optim.SGD, BehindAutograd, None):
        model, own = Two(), torch.Generator().manual_seed(rank)
        ddp = DistributedDataParallel(model)
        hook = ls.SparseHook(ddp, "micro")
        optimizer = kind(model.parameters(), lr=0.01) if kind else None
        for _ in range(6):
            ddp([torch.randn(p.shape, generator=own) for p in model.parameters()], (0, 1)).backward()
            if optimizer:
                optimizer.step()
            for p in model.parameters():
                if optimizer is None:
                    assert p.grad is not None
                    p.data.add_(p.grad, alpha=-0.01)
                p.grad = None
        found.append(torch.cat([*(p.detach().flatten() for p in model.parameters()), *unsent(hook).values()]))
        hook.close()
    return found


def test_a_step_counts_that_no_version_tells_of(ranks: Ranks) -> None:
    for expected, behind_autograd, by_hand in ranks.run(moved_unseen, 2, gloo=True):
        assert torch.equal(expected, behind_autograd)
        assert torch.equal(expected, by_hand)


def put_together(rank: int, size: int) -> list[Any]:
    """Step with the sum of the means of three backwards, between which gradients are zeroed."""
    found = []
    for compressor, wire_dtype in CASES[::2]:
        model, own = Two(), torch.Generator().manual_seed(rank)
        ddp = DistributedDataParallel(model)
        hook = ls.SparseHook(ddp, compressor, wire_dtype=wire_dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        hook.note(optimizer)
        parameters = list(model.parameters())
        total, given = torch.zeros(2, sum(p.numel() for p in parameters), dtype=torch.float64)
        for step in range(6):
            means = []
            for _ in range(3):
                drawn = [torch.randn(p.shape, generator=own) for p in parameters]
                ddp(drawn, (0, 1)).backward()
                means.append([p.grad for p in parameters])
                given += torch.cat([x.flatten() for x in drawn])
                if len(means) < 3:
                    optimizer.zero_grad()
            for p, first, second, third in zip(parameters, *means, strict=True):
                if step % 2:
                    p.grad = first + second + third
                else:
                    p.grad = third
                    p.grad.data.add_(first + second)
            total += torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:  # in which nobody knows yet what becomes of the first mean
                names = [name for name, _ in model.named_parameters()]
                left = unsent(hook)
                total.zero_()
                given = torch.cat([left[name] for name in names]).double()
        left = unsent(hook)
        found.append((total, given - torch.cat([left[name] for name in names]).double()))
        hook.close()
    return found


def test_gradients_that_are_put_together_by_hand_are_not_thrown_away(ranks: Ranks) -> None:
    for case, of_ranks in zip(CASES[::2], zip(*ranks.run(put_together, 2, gloo=True), strict=True), strict=True):
        (total, sent), (_, other) = of_ranks
        assert (2 * total - sent - other).abs().max() < 1e-4, case


def with_some_untrained(rank: int, size: int) -> list[Any]:
    """Train one part; the other's .grad is never emptied, until an optimizer has it."""
    found = []
    for compressor, wire_dtype in CASES:
        model, own = Two(), torch.Generator().manual_seed(rank)
        ddp = DistributedDataParallel(model)
        hook = ls.SparseHook(ddp, compressor, wire_dtype=wire_dtype)
        optimizer = torch.optim.SGD(model.parts[0].parameters(), lr=0.01)
        hook.note(optimizer)
        drawn: list[list[Tensor]] = []
        for step in range(8):
            if step == 5:
                optimizer.add_param_group({"params": list(model.parts[1].parameters())})
                optimizer.zero_grad()
            drawn.append([torch.randn(p.shape, generator=own) for p in model.parameters()])
            ddp(drawn[-1], (0, 1)).backward()
            if step == 4:
                of_untrained = [p.grad.clone() for p in model.parts[1]]
                is_unsent = any(unsent(hook)[f"parts.1.{i}"].any() for i in range(2))
                sums = [sum(x[2 + i] for x in drawn) for i in range(2)]
            optimizer.step()
            optimizer.zero_grad()
        found.append((of_untrained, sums, is_unsent, {n: bool(x.any()) for n, x in unsent(hook).items()}))
        hook.close()
    return found


def test_what_no_optimizer_has_is_averaged_exactly_until_one_has_it(ranks: Ranks) -> None:
    for case, of_ranks in zip(CASES, zip(*ranks.run(with_some_untrained, 2, gloo=True), strict=True), strict=True):
        for i, gradient in enumerate(of_ranks[0][0]):
            torch.testing.assert_close(gradient, sum(sums[i] for _, sums, *_ in of_ranks) / 2)
        assert not any(is_unsent for *_, is_unsent, _ in of_ranks), case
        if case[1] in ("int4", "sign"):
            assert all(now["parts.1.0"] for *_, now in of_ranks), case


def with_lbfgs(rank: int, size: int) -> list[list[str]]:
    said = []
    for wire_dtype in ("float32", "int4"):
        model = Two()
        ddp = DistributedDataParallel(model)
        hook = ls.SparseHook(ddp, "sparse_dense", wire_dtype=wire_dtype)
        optimizer = torch.optim.LBFGS(model.parameters())
        hook.note(optimizer)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                ddp([torch.ones(p.shape) for p in model.parameters()], (0, 1)).backward()
        said.append([str(each.message) for each in caught if "LBFGS" in str(each.message)])
        hook.close()
    return said


def test_lbfgs_is_warned_of_where_gradients_are_compressed(ranks: Ranks) -> None:
    in_float32, in_int4 = ranks.run(with_lbfgs, 2, gloo=True)[0]
    assert in_float32 == []
    assert len(in_int4) == 1


def under_lbfgs(rank: int, size: int) -> list[Tensor]:
    """Weights after some steps under plain DDP, and under sparse_auto, which nobody tells of the optimizer."""
    weights = []
    for is_sparse in (False, True):
        torch.manual_seed(0)
        model, own = nn.Linear(600, 500), torch.Generator().manual_seed(rank)
        ddp = DistributedDataParallel(model)
        hook = ls.SparseHook(ddp, "sparse_auto") if is_sparse else None
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)

        def closure(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()  # noqa: B023  # called at once
            loss = nn.functional.mse_loss(ddp(x), y)  # noqa: B023
            loss.backward()
            return loss

        for _ in range(12):
            optimizer.step(partial(closure, *(torch.randn(8, n, generator=own) for n in (600, 500))))
        weights.append(model.weight.detach().clone())
        if hook:
            hook.close()
    return weights


def test_with_lbfgs_sparse_auto_sums_as_ddp_does(ranks: Ranks) -> None:
    for plain, ours in ranks.run(under_lbfgs, 2, gloo=True):
        assert torch.equal(plain, ours)
