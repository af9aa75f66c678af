"""Learning rates that are longer for an update, and that nobody sees but the optimizer."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import ExponentialLR

from lightning_sparse.local_steps.optimizers import Optimizers, Rates, step_grows

LEAD = 1.5


def of_two_groups(parameters: list[Tensor]) -> Optimizer:
    return torch.optim.AdamW([{"params": parameters[:1], "name": "a"}, {"params": parameters[1:], "weight_decay": 0.5}])


GROW: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "sgd": partial(SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": partial(torch.optim.AdamW, amsgrad=True),
    "fused": partial(torch.optim.AdamW, fused=True),
    "rate in a tensor": partial(torch.optim.AdamW, lr=torch.tensor(1e-3)),
    "nadam": partial(torch.optim.NAdam, weight_decay=0.1, decoupled_weight_decay=True),
    "rmsprop": partial(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1),
    "muon": torch.optim.Muon,  # of matrices alone
    "groups": of_two_groups,
}
DO_NOT: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "adafactor": partial(torch.optim.Adafactor, lr=1e-3),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "around adamw": lambda p: Wrapper(torch.optim.AdamW(p), True, float),
    "around adafactor": lambda p: Wrapper(torch.optim.Adafactor(p), True, float),
    "no rate": lambda p: without_rate(SGD(p, lr=0.1)),
    "who knows": lambda p: Unknown(p),
}


def without_rate(optimizer: Optimizer) -> Optimizer:
    optimizer.param_groups[0]["lr"] = None
    return optimizer


class Unknown(SGD):
    """Which nobody can make another of."""

    def __init__(self, parameters: list[Tensor], /) -> None:
        super().__init__(parameters, lr=0.1)
        if len(parameters) < 2:
            raise ValueError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("make", "grows"), [(m, True) for m in GROW.values()] + [(m, False) for m in DO_NOT.values()],
    ids=[*GROW, *DO_NOT])  # fmt: skip
def test_whether_steps_grow_with_the_rate_is_measured(
    make: Callable[[list[Tensor]], Optimizer], grows: bool, dtype: torch.dtype
) -> None:
    """Whatever the defaults of the process are, and leaving its random numbers alone."""
    optimizer = make([nn.Parameter(torch.ones(4, 4)) for _ in range(2)])
    random = torch.random.get_rng_state()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            assert step_grows(optimizer) == grows
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.random.get_rng_state(), random)


class Ahead:
    """Local steps of which only the rates are there."""

    def __init__(self) -> None:
        self._rates, self.local = Rates(LEAD), self

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Nothing."""

    after_optimizer_step = before_optimizer_step

    def before_update(self, optimizer: Optimizer) -> None:
        self._rates.scale(optimizer)

    def after_update(self, optimizer: Optimizer | None = None, stepped: bool = False) -> None:
        self._rates.give_back(optimizer, stepped)


class Wrapper(Optimizer):
    """Around another optimizer, with whose groups it sets rates; asks its closure twice, as SAM does."""

    def __init__(self, base: Optimizer, first: bool, sets: Callable[[float], float]) -> None:
        self.base, self.first, self.sets = base, first, sets
        super().__init__(base.param_groups, base.defaults)
        self.param_groups = base.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _ in range(2):
            closure()
        for first in (True, False):
            if first is not self.first:
                self.base.step()
            else:
                self.param_groups[0]["lr"] = self.sets(self.param_groups[0]["lr"])


@pytest.fixture
def parameter() -> Iterator[Tensor]:
    p = nn.Parameter(torch.zeros(()))
    around = Ahead()
    optimizers = Optimizers([p], lambda: around)
    yield p
    optimizers.close()


def step(optimizer: Optimizer, p: Tensor, with_closure: bool = False) -> float:
    """A step with a gradient of -1; returns how far it went."""

    def closure() -> None:
        seen.append(optimizer.param_groups[0]["lr"])
        p.grad = -torch.ones(())

    seen: list[float] = []
    before = float(p.detach())
    if with_closure:
        optimizer.step(closure)  # type: ignore[arg-type]
    else:
        closure()
        optimizer.step()
    assert set(seen) <= {1.0, 0.5, 0.25}
    return float(p.detach()) - before


@pytest.mark.parametrize(
    ("hook", "with_closure"), [("register_step_pre_hook", True), ("register_step_post_hook", False)]
)
def test_a_schedule_in_a_hook_of_the_optimizer_sees_rates_as_they_are(
    hook: str, with_closure: bool, parameter: Tensor
) -> None:
    optimizer = SGD([parameter], lr=1.0)
    schedule = ExponentialLR(optimizer, 0.5)
    getattr(optimizer, hook)(lambda *_: schedule.step())
    rates = [0.5, 0.25] if "pre" in hook else [1.0, 0.5]
    assert [step(optimizer, parameter, with_closure) for _ in range(2)] == [LEAD * rate for rate in rates]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_rate_that_an_optimizer_around_another_sets_is_the_next_ones(parameter: Tensor) -> None:
    after = Wrapper(SGD([parameter], lr=1.0), False, lambda rate: rate / 2)
    assert [step(after, parameter, True) for _ in range(3)] == [LEAD, LEAD / 2, LEAD / 4]
    before = Wrapper(SGD([parameter], lr=1.0), True, lambda _: 0.5)
    assert [step(before, parameter, True) for _ in range(2)] == [LEAD / 2, LEAD / 2]
    assert before.param_groups[0]["lr"] == 0.5
