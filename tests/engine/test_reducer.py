"""Steps without a communication hook, where DDP alone does what it would; on real processes."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.auto.chooser import EXACT
from lightning_sparse.engine.gradients import GradientExchange
from lightning_sparse.fusion.planner import Layout
from tests.support.models import weights
from tests.support.processes import Ranks

SHAPE = (200, 50)  # large enough not to go to all ranks in one hop
WITH_HOOK = 3  # steps before there is none


class Hooked:
    """A DDP with a hook that may only sum in float32, and how many buckets it was handed."""

    def __init__(self, module: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(module or nn.Sequential(nn.Linear(*SHAPE), nn.Linear(50, 50)), **options)
        self.hook = ls.SparseHook(self.ddp, ls.Auto([EXACT]), fusion="layer")
        self.fusion = self.hook.layer_fusion
        assert self.fusion is not None
        self.fusion.follow(Layout(self.fusion.layout.groups, EXACT.averaging))  # as it does once that was chosen
        self.hook.exchange.set_latencies(0, 0)  # so that DDP's sums are the soonest
        self.handed_over = 0
        of_class = GradientExchange.hook

        def counted(exchange: GradientExchange, *arguments: Any) -> Any:
            self.handed_over += 1
            return of_class(exchange, *arguments)

        GradientExchange.hook = counted  # type: ignore[method-assign]

    def without_hook(self, backward: Any) -> bool:
        """Whether ``backward`` hands nothing over."""
        before = self.handed_over
        backward()
        return self.handed_over == before


def inputs(rank: int, number: int) -> Tensor:
    return torch.randn(4, SHAPE[0], generator=torch.Generator().manual_seed(100 * rank + number))


def step(ddp: nn.Module, rank: int, number: int) -> None:
    ddp.zero_grad()
    ddp(inputs(rank, number)).square().mean().backward()
    with torch.no_grad():
        for parameter in ddp.parameters():
            parameter -= 0.01 * parameter.grad


def settled(hooked: Hooked, rank: int) -> Hooked:
    """Train until ``hooked`` has no hook any more; what is so small has nothing to choose, and measures nothing."""
    for number in range(WITH_HOOK):
        step(hooked.ddp, rank, number)
    assert hooked.handed_over >= WITH_HOOK
    settle(hooked)
    assert hooked.without_hook(lambda: step(hooked.ddp, rank, WITH_HOOK))
    assert hooked.hook.exchange.steps == WITH_HOOK + 1
    return hooked


def settle(hooked: Hooked) -> None:
    hooked.fusion.phase = "watch"


def beside_plain_ddp(rank: int, size: int, views: bool) -> list[Tensor]:
    """Train on after the hook has gone, beside DDP, and with the hook again; returns the weights of both."""
    ours = settled(Hooked(gradient_as_bucket_view=views), rank)
    hook, exchange, fusion = ours.hook, ours.hook.exchange, ours.fusion
    plain = DistributedDataParallel(copy.deepcopy(ours.ddp.module), gradient_as_bucket_view=views)
    for number in range(5):
        assert ours.without_hook(lambda: step(ours.ddp, rank, number))  # noqa: B023
        step(plain, rank, number)
    assert torch.equal(weights(ours.ddp), weights(plain))
    assert exchange.last is not None
    assert exchange.last.sent_bytes == exchange.last.dense_bytes
    assert not exchange.unsent_norm()
    assert hook.exchange.timeline.span_s() > 0
    fusion.phase = "measure"  # as if its times had changed
    assert not ours.without_hook(lambda: step(ours.ddp, rank, 5))
    fusion.phase = "watch"
    assert ours.without_hook(lambda: step(ours.ddp, rank, 6))
    assert exchange.steps == WITH_HOOK + 8
    for number in (5, 6):
        step(plain, rank, number)
    hook.close()
    return [weights(ours.ddp), weights(plain)]


@pytest.mark.parametrize("views", [False, True])
def test_steps_are_plain_ddps_once_float32_sums_are_chosen(ranks: Ranks, views: bool) -> None:
    (ours, plain), *others = ranks.run(beside_plain_ddp, 2, views, gloo=True)
    torch.testing.assert_close(ours, plain)
    assert all(torch.equal(ours, other) for other, _ in others)


def counted(rank: int, size: int) -> None:
    """What a step is without a hook: as with one, each backward that DDP synchronises."""
    ours = settled(Hooked(), rank)
    ddp, exchange = ours.ddp, ours.hook.exchange
    before = exchange.steps
    ddp.zero_grad()
    with ddp.no_sync():
        ddp(inputs(rank, 0)).square().mean().backward()
    assert exchange.steps == before
    first = ddp(inputs(rank, 1))  # which is no part of the loss
    loss = ddp(inputs(rank, 2)).square().mean()
    with torch.no_grad():
        ddp(inputs(rank, 3))
    ddp.module(inputs(rank, 4)).square().mean()
    loss.backward(retain_graph=True)
    assert exchange.steps == before + 1
    first.square().mean().backward()  # again, without a forward of DDP: it sums nothing, nor did it with a hook
    ddp.module(inputs(rank, 5)).square().mean().backward()
    assert exchange.steps == before + 1
    outputs = ddp(inputs(rank, 6))
    outputs.register_hook(lambda gradient: (_ for _ in ()).throw(RuntimeError("on purpose")))
    with pytest.raises(RuntimeError, match="on purpose"):
        outputs.square().mean().backward()
    assert exchange.steps == before + 1
    step(ddp, rank, 7)
    assert exchange.steps == before + 2
    assert copy.deepcopy(ddp.module)(inputs(rank, 8)).square().mean().backward() is None  # as a teacher is made
    assert exchange.steps == before + 2
    ours.hook.close()


def test_a_step_is_a_backward_that_ddp_synchronises(ranks: Ranks) -> None:
    ranks.run(counted, 2, gloo=True)


def saved_and_made_again(rank: int, size: int) -> list[Tensor]:
    """Save between backward and an optimizer's step without a hook, and make that step again from what was saved."""
    ours = settled(Hooked(), rank)
    ours.ddp.zero_grad()
    ours.ddp(inputs(rank, 0)).square().mean().backward()
    means = [parameter.grad.clone() for parameter in ours.ddp.parameters()]
    state, model = ours.hook.saved("per_rank"), copy.deepcopy(ours.ddp.module)
    everywhere = [state]
    torch.distributed.broadcast_object_list(everywhere)
    again = Hooked(model)
    again.hook.load_state_dict(everywhere[0])
    again.ddp(inputs(rank, 1)).square().mean().backward()
    assert all(torch.equal(p.grad, mean) for p, mean in zip(model.parameters(), means, strict=True))
    again.fusion.follow(Layout(again.fusion.layout.groups, EXACT.averaging))
    settle(again)
    assert not again.without_hook(lambda: step(again.ddp, rank, 2))  # in which all there is unsent is sent
    assert again.without_hook(lambda: step(again.ddp, rank, 3))
    ours.hook.close()
    again.hook.close()
    return means


def test_a_step_saved_before_its_optimizer_is_made_again(ranks: Ranks) -> None:
    first, other = ranks.run(saved_and_made_again, 2, gloo=True)
    assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def frozen_meanwhile(rank: int, size: int) -> Tensor:
    """Lose the hook, and get it back, in forwards for which a rank has frozen parameters, beside plain DDP."""
    ours = Hooked()
    plain = DistributedDataParallel(copy.deepcopy(ours.ddp.module))
    for number in range(6):
        if number == 3:
            settle(ours)
        elif number == 5:
            ours.fusion.phase = "measure"
        for ddp in (plain, ours.ddp):
            if rank == 0:
                ddp.requires_grad_(False)
                x = inputs(rank, number).requires_grad_()
                torch.autograd.grad(ddp(x).square().mean(), x)
                ddp.requires_grad_(True)
            step(ddp, rank, number)
        assert ours.handed_over == (number + 1 if number < 3 else 3 if number < 5 else 4)
    torch.testing.assert_close(weights(ours.ddp), weights(plain))
    ours.hook.close()
    return weights(ours.ddp)


def test_what_is_frozen_while_the_hook_goes_or_comes_is_averaged_all_the_same(ranks: Ranks) -> None:
    first, other = ranks.run(frozen_meanwhile, 2, gloo=True)
    assert torch.equal(first, other)


class WithTeacher(nn.Module):
    """A layer with a teacher that is added later, after one that DDP is to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored, self.student = nn.Linear(1, 1), nn.Linear(*SHAPE)
        self.teacher: nn.Module | None = None

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.teacher(x) if self.teacher else 0.0
        return self.student(x) - target


def with_other_parameters(rank: int, size: int) -> None:
    """Lose the hook after parameters were added, of which DDP knows nothing, within accumulated gradients."""
    module = WithTeacher()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["ignored.weight", "ignored.bias"])
    ours = Hooked(module)
    ddp, exchange = ours.ddp, ours.hook.exchange
    for number in range(WITH_HOOK):
        ddp(inputs(rank, number)).square().mean().backward()
    module.teacher = copy.deepcopy(module.student)
    settle(ours)
    with ddp.no_sync():
        ddp(inputs(rank, 3)).square().mean().backward()
    assert (exchange.steps, bool(exchange.due_means)) == (WITH_HOOK, False)
    assert ours.without_hook(lambda: ddp(inputs(rank, 4)).square().mean().backward())
    assert (exchange.steps, bool(exchange.due_means)) == (WITH_HOOK + 1, True)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        ddp(torch.zeros(1, 1))
    module(inputs(rank, 5)).square().mean().backward()
    assert exchange.steps == WITH_HOOK + 1
    ours.hook.close()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


def test_ddp_without_a_hook_averages_what_it_did_with_one(ranks: Ranks) -> None:
    ranks.run(with_other_parameters, 2, gloo=True)


class BackwardWithin(nn.Module):
    """A layer whose forward makes its own backward, as a Trainer's step does unless optimization is automatic."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(*SHAPE)
        self.ddp: list[DistributedDataParallel] = []
        self.is_automatic = False

    def forward(self, x: Tensor) -> Tensor:
        loss = self.layer(x).square().mean()
        ddp = self.ddp[0]
        if not self.is_automatic:
            ddp.require_forward_param_sync = True
            ddp.reducer._rebuild_buckets()
            ddp.reducer.prepare_for_backward([])
            loss.backward()
            ddp.require_backward_grad_sync = False
        return loss


def with_hook_for_ever(rank: int, size: int) -> None:
    """Where others prepare DDP for a backward, or its first forward does, the hook stays."""
    module = BackwardWithin()
    within = Hooked(module)
    module.ddp = [within.ddp]
    settle(within)
    for number in range(WITH_HOOK):
        within.ddp.zero_grad()
        within.ddp(inputs(rank, number))
        within.ddp.require_backward_grad_sync = True
    assert within.hook.exchange.steps == WITH_HOOK == within.handed_over
    within.hook.close()
    static = Hooked(static_graph=True)
    settle(static)
    for number in range(WITH_HOOK):
        step(static.ddp, rank, number)
    assert static.hook.exchange.steps == WITH_HOOK <= static.handed_over
    static.hook.close()
    later = BackwardWithin()
    later.is_automatic = True
    switched = Hooked(later)
    later.ddp = [switched.ddp]
    settle(switched)
    for number in range(8):
        switched.ddp.zero_grad()
        loss = switched.ddp(inputs(rank, number))
        if later.is_automatic:
            loss.backward()
        switched.ddp.require_backward_grad_sync = True
        assert switched.hook.exchange.steps == number + 1
        assert len(switched.hook.exchange.due_means) == 2
        later.is_automatic = number < 4
    assert switched.handed_over == 3  # the first, and the last two
    switched.hook.close()


def test_the_hook_stays_where_ddp_does_not_prepare_its_backward_itself(ranks: Ranks) -> None:
    ranks.run(with_hook_for_ever, 2, gloo=True)
