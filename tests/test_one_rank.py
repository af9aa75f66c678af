"""One rank alone has nobody to send to: every strategy is dense, says so once, and delivers all there is."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.auto.policy import NAMES
from lightning_sparse.checkpoint.state import State
from tests.support.said import warned

ALONE = "There is one rank, node or replica, and nobody to send to"


pytestmark = pytest.mark.usefixtures("one_rank")


class Alone:
    """A hook on a vector of 100 weights, whose gradient is what it is given."""

    def __init__(self, compressor: Any, **options: Any) -> None:
        self.ddp = DistributedDataParallel(nn.Linear(100, 1, bias=False))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.hook = ls.SparseHook(self.ddp, compressor, **options)
        self.said = [str(each.message) for each in caught]

    def mean(self, gradient: Tensor) -> Tensor:
        self.ddp.zero_grad()
        self.ddp(gradient.view(1, 100)).sum().backward()
        grad = self.ddp.module.weight.grad
        assert isinstance(grad, Tensor)
        return grad.flatten().clone()

    def unsent(self) -> Tensor:
        return torch.cat([group.unsent for group in self.hook.averager.groups])


@pytest.fixture
def alone() -> Iterator[Any]:
    made: list[Alone] = []

    def make(*args: Any, **options: Any) -> Alone:
        made.append(Alone(*args, **options))
        return made[-1]

    yield make
    while made:
        made.pop().hook.close()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "sparse_dense"])
def test_every_strategy_updates_all_elements_and_says_why(alone: Any, name: str) -> None:
    run = alone(name, fusion="layer", warmup_steps=1)
    assert len(run.said) == 1
    assert run.said[0].startswith(ALONE)
    for _ in range(3):
        gradient = torch.randn(100)
        assert torch.equal(run.mean(gradient), gradient)
    assert not run.unsent().any()
    assert run.hook.averager.last.picked == 100


@pytest.mark.parametrize("options", [{}, {"warmup_steps": 3}, {"wire_dtype": "sign"}], ids=str)
def test_local_steps_are_not_taken_and_end_where_ddp_does(alone: Any, options: dict[str, Any]) -> None:
    run = alone("sparse_dense", local_steps=2, **({"wire_dtype": "int4"} | options))
    model, plain = run.ddp.module, nn.Linear(100, 1, bias=False)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (run.ddp, plain)]
    for _ in range(9):
        x = torch.randn(4, 100)
        for module, optimizer in zip((run.ddp, plain), optimizers, strict=True):
            optimizer.zero_grad()
            (module(x) - x.sum(1, keepdim=True)).square().mean().backward()
            optimizer.step()
    assert [each[: len(ALONE)] for each in run.said] == [ALONE]
    assert torch.equal(model.weight, plain.weight)


@pytest.mark.parametrize("residuals", ["per_rank", "mean"])
def test_what_several_ranks_had_not_sent_is_delivered_at_once(alone: Any, residuals: str) -> None:
    run = alone(ls.TopK(density=0.01), fusion="layer")
    run.mean(torch.zeros(100))
    residual = torch.randn(3, 1, 100)
    several = {
        "per_rank": {"size": 3, "unsent": {"weight": residual}},
        "mean": {"unsent": {"weight": residual.mean(0)}},
    }
    state = run.hook.state_dict(residuals) | several[residuals] | {"groups": []}
    state["checksum"] = State(**state).checksums()
    warned(run.hook.load_state_dict, state)
    assert torch.allclose(run.mean(torch.zeros(100)), residual.mean(0).flatten())
    assert not run.unsent().any()
