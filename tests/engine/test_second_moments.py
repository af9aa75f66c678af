"""What part of its squares the mean gradient has, and Adam that divides by them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import NAdam, Optimizer, RAdam

from lightning_sparse.compressors.group import Group
from lightning_sparse.local_steps.second_moments import LONGEST, STATE, Block, MeanMoments, SecondMoments, squares_of
from lightning_sparse.network.simulated import SimNetwork

RANKS = 4


def moments_of(*shapes: tuple[int, ...], ranks: int = RANKS) -> tuple[list[list[nn.Parameter]], list[SecondMoments]]:
    """Parameters of these shapes on each rank, and what knows of their squares."""
    parameters = [[nn.Parameter(torch.ones(shape)) for shape in shapes] for _ in range(ranks)]
    names = tuple(map(str, range(len(shapes))))
    return parameters, [SecondMoments([Group(0, names, tuple(own))]) for own in parameters]


def compare(moments: list[SecondMoments]) -> None:
    """Have all ranks compare what they have looked at."""
    network = SimNetwork(len(moments))
    for each in moments:
        each.snapshot()
    network.run([each.sum_up(comm) for each, comm in zip(moments, network.comms, strict=True)])
    for each in moments:
        each.receive()
        each.read(len(moments))


def share_of(moments: SecondMoments, parameter: Tensor) -> Tensor:
    assert moments.is_known
    return moments.share(parameter, moments.squares)


def learn(parameters: list[list[nn.Parameter]], moments: list[SecondMoments], signal: Tensor, noise: Tensor) -> None:
    """Have ranks compare 200 gradients of the first parameter: a ``signal`` that all have, and ``noise`` of each."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        common = torch.randn(signal.shape, generator=generator) * signal
        for own, each in zip(parameters, moments, strict=True):
            each.look(own[0], common + torch.randn(signal.shape, generator=generator) * noise)
        compare(moments)


@pytest.mark.parametrize("shape", [(40, 5, 3, 2), (64,), (), (50, 1), (LONGEST + 1,)], ids=str)
def test_the_share_of_signal_and_noise_is_found(shape: tuple[int, ...]) -> None:
    parameters, moments = moments_of(shape)
    learn(parameters, moments, torch.ones(shape), torch.full(shape, 2.0))
    share = share_of(moments[0], parameters[0][0])
    assert share.mean() == pytest.approx((1 + 4 / RANKS) / (1 + 4), rel=0.15)
    assert share.broadcast_to(moments[0]._places[parameters[0][0]].shape).numel() == parameters[0][0].numel()
    assert float(moments[0].lr_factor) == pytest.approx(2.5**0.5, rel=0.1)
    for other in moments[1:]:
        assert torch.equal(other.squares, moments[0].squares)


def test_what_is_known_goes_on_from_a_checkpoint_and_in_other_groups() -> None:
    parameters, moments = moments_of((4, 3), (5,))
    for step in range(3):
        for rank, (own, each) in enumerate(zip(parameters, moments, strict=True)):
            for p in own:
                each.look(p, torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + rank)))
        if step < 2:
            compare(moments)
    again = []
    for own, each in zip(parameters, moments, strict=True):
        resumed = SecondMoments([Group(0, ("1",), (own[1],)), Group(1, ("0",), (own[0],))])
        assert resumed.resume(each.state(), each.sampled, RANKS)
        again.append(resumed)
    for ranks in (moments, again):
        for own, each in zip(parameters, ranks, strict=True):
            each.look(own[0], torch.zeros(4, 3))  # has been looked at
        compare(ranks)
    for p in parameters[0]:
        assert torch.equal(share_of(moments[0], p), share_of(again[0], p))
    assert [each[0].looks for each in (moments, again)] == [3, 3]
    (_, (other, *_)) = moments_of((4, 3), (6,))
    assert not again[0].resume(other.state(), None, RANKS)
    assert not again[0].is_known  # nor goes by what it knew before


# - Adam


class Fixed(SecondMoments):
    """In which the mean gradient has this part of the squares."""

    is_known = True
    part = 0.25

    def __init__(self, groups: list[Group]) -> None:
        super().__init__(groups)
        self.parts: dict[int, float] = {}  # by the squares that are known

    def share(self, parameter: Tensor, squares: Tensor, block: Block = ...) -> Tensor:
        own = bool((squares == 1).all())  # not lowered yet
        part = self.parts.setdefault(id(squares), self.part)
        return torch.full(self._places[parameter].shape, 1.0 if own else part)[block]


ADAMS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adam with decay": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5),
    "adam, the most, with decay": lambda p: torch.optim.Adam(p, lr=0.1, weight_decay=0.5, maximize=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, betas=(0.9, 0.95)),
    "adamw, fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
    "nadam": lambda p: NAdam(p, lr=0.1, weight_decay=0.5, decoupled_weight_decay=True),
    "radam": lambda p: RAdam(p, lr=0.1, weight_decay=0.5),
}


@pytest.mark.parametrize("make", ADAMS.values(), ids=ADAMS)
def test_adam_sees_the_squares_of_the_mean_gradient(make: Callable[[list[Tensor]], Optimizer]) -> None:
    p = nn.Parameter(torch.randn(6, 5, 2, generator=torch.Generator().manual_seed(0)))
    optimizer, moments = make([p]), MeanMoments(Fixed([Group(0, ("p",), (p,))]))
    (group,), expected = optimizer.param_groups, torch.zeros(p.shape)
    beta, kind = group["betas"][1], squares_of(optimizer)
    for step in range(8):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        squared = -p.grad if group["maximize"] and kind == "with decay" else p.grad
        if kind == "with decay":
            squared = squared + group["weight_decay"] * p.detach()
        expected = beta * expected + (1 - beta) * squared.square()
        moments.before_update(optimizer)
        optimizer.step()
        moments.after_update(optimizer)
        part = Fixed.part if step else 1.0  # before its first step an optimizer has no state to change
        torch.testing.assert_close(optimizer.state[p][STATE], part * expected, rtol=1e-4, atol=1e-9)


OTHERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
}


class AnotherAdam(torch.optim.Adam):
    """Whose squares have a decay of their own, under the same name."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            state[STATE].mul_(0.5)
        return loss


@pytest.mark.parametrize("make", [*OTHERS.values(), AnotherAdam], ids=[*OTHERS, "another"])
def test_optimizers_that_keep_no_such_squares_are_left_alone(make: Callable[[list[Tensor]], Optimizer]) -> None:
    ends = []
    for watched in (False, True):
        p = nn.Parameter(torch.ones(6, 5))
        optimizer, moments = make([p]), MeanMoments(Fixed([Group(0, ("p",), (p,))]))
        for step in range(3):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
            if watched:
                moments.before_update(optimizer)
            optimizer.step()
            moments.after_update(optimizer)
        ends.append(p.detach())
    assert squares_of(optimizer) == ""
    assert torch.equal(*ends)


def test_an_outlier_a_skipped_step_and_an_optimizer_around_another_do_no_harm() -> None:
    p = nn.Parameter(torch.ones(3, 3))
    inner, moments = torch.optim.AdamW([p], lr=0.1), MeanMoments(Fixed([Group(0, ("p",), (p,))]))
    outer = Optimizer([p], {})
    outer.state = inner.state
    for gradient in (1e-3, 1e6, 1e-3, 1e-3):
        for first in (1e3, 1.0):
            p.grad = torch.full((3, 3), gradient * first)
            moments.before_update(outer)
            moments.before_update(inner)  # as a closure that is asked twice
        inner.step()
        moments.after_update(inner)
        moments.after_update(outer)
        assert p.isfinite().all()
    expected = inner.state[p][STATE].clone()
    p.grad = torch.tensor([[float("inf"), 1e9, 1.0]] * 3)
    inner.found_inf = torch.ones(())  # type: ignore[attr-defined]
    moments.before_update(inner)  # and then a gradient scaler has a fused step do nothing
    moments.after_update(inner)
    assert torch.equal(inner.state[p][STATE], expected)
