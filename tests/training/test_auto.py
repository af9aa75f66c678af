"""sparse_auto on real processes: from gradients to local steps and back, and what a checkpoint keeps of it."""

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.auto import between_steps
from lightning_sparse.auto.between_steps import FIRST_CHOICE, GLIMPSE_OF_DEVICE
from lightning_sparse.auto.chooser import Chooser
from lightning_sparse.engine.averager import Averager
from lightning_sparse.fabric import SparseDDPStrategy as FabricStrategy
from lightning_sparse.fusion import layer_fusion
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.local_steps import settings as local_steps
from lightning_sparse.local_steps.second_moments import EARLY
from tests.support.models import Small, data, trainer, weights
from tests.support.on_one_device import ACCELERATOR
from tests.support.processes import LIMIT_S, Ranks

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]

FIRST = FIRST_CHOICE + (GLIMPSE_OF_DEVICE.settling if ACCELERATOR == "cuda" else 0)
LOCAL = ls.Candidate(ls.Dense(), "int4", local_steps=3)
CHANGES_BACK = FIRST + EARLY + 25


def nobody_looks_ahead() -> None:
    """Let the mean of the ranks' weights be what they agree upon, for tests that compare the two."""
    local_steps.LEAD = local_steps.LEAD_OF_SIGNS = 1.0


def auto(*candidates: ls.Candidate, **options: Any) -> ls.SparseDDPStrategy:
    layer_fusion.WORTH_PLANNING = 1  # small models too
    return ls.SparseDDPStrategy(ls.Auto(candidates), **options)


class Watch(L.Callback):
    """Notes after each step the engine, and before it what all ranks' weights and momenta sum up to."""

    def __init__(self) -> None:
        self.engines: list[str] = []
        self.own: list[Tensor] = []
        self.momenta: list[Tensor] = []

    def on_train_batch_end(self, run: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.engines.append(type(run.strategy.averager).__name__)  # type: ignore[attr-defined]
        self.own.append(weights(module))
        self.momenta.append(momenta(run, module))


def momenta(run: L.Trainer, module: L.LightningModule) -> Tensor:
    state = run.optimizers[0].state
    return torch.cat([state[p]["momentum_buffer"].flatten() for p in module.parameters()])


class WithEmpty(Small):
    """With a parameter of no elements, which not every backend can average."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.zeros(0))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        return super().training_step(batch, index) + self.empty.sum()


def test_it_changes_to_local_steps_and_back_and_loses_nothing(ranks: Ranks) -> None:
    first, second = ranks.run(_there_and_back, 2)
    assert first[0] == second[0]
    kinds = first[0]
    begin, end = kinds.index("LocalAverager"), len(kinds) - 1 - kinds[::-1].index("LocalAverager")
    assert begin == FIRST
    assert CHANGES_BACK <= end + 1 < len(kinds)
    assert set(kinds[end + 1 :]) == {"GradientAverager"}
    mean, (merged, of_both) = (first[1] + second[1]) / 2, first[2]
    assert not torch.equal(first[1], second[1])
    assert torch.equal(merged, second[2][0])  # every rank goes on with the same
    assert torch.allclose(merged, mean, atol=1e-6)
    assert torch.equal(of_both, second[2][1])
    assert torch.allclose(of_both, (first[3] + second[3]) / 2, atol=1e-6)


def _there_and_back(rank: int, size: int) -> Any:
    """The engines, this rank's weights before its local steps ended, what was merged, and its momenta before."""
    nobody_looks_ahead()
    merged: list[tuple[Tensor, Tensor]] = []
    between_steps.SETTLING, between_steps.TIMED, between_steps.WATCHED = 0, 3, 1
    Averager.messages = lambda self: partial(float, 1 if self.steps < CHANGES_BACK else 99)  # type: ignore[method-assign]
    between_steps.is_far = lambda latency_s: False  # also where a busy machine's first message takes long
    Chooser.start = lambda self, averager, costs, given: (given, 0.0)  # type: ignore[method-assign]  # one step tells too little

    class Merged(Watch):
        def on_before_backward(self, run: L.Trainer, module: L.LightningModule, loss: Tensor) -> None:
            before = self.engines and self.engines[-1] == "LocalAverager"
            if before and isinstance(run.strategy.averager, GradientAverager):  # type: ignore[attr-defined]
                merged.append((weights(module), momenta(run, module)))
                run.should_stop = True

    watch = Merged()
    run = trainer(auto(LOCAL), size, check_every=0, max_steps=CHANGES_BACK + 30, callbacks=[watch])
    torch.manual_seed(0)
    run.fit(WithEmpty(), data(CHANGES_BACK + 30, size))
    last = len(watch.engines) - 1 - watch.engines[::-1].index("LocalAverager")
    return watch.engines, watch.own[last], merged[0], watch.momenta[last]


def test_a_checkpoint_of_local_steps_that_are_no_candidate_any_more_goes_on_with_gradients(
    ranks: Ranks, tmp_path: Path
) -> None:
    first, second = ranks.run(_other_candidates, 2, tmp_path / "some.ckpt")
    assert first[:2] == second[:2] == ("LocalAverager", {"GradientAverager"})
    assert torch.equal(first[2], second[2])


def _other_candidates(rank: int, size: int, path: Path) -> Any:
    """The engine that wrote a checkpoint, those that went on from it, and the weights at the end."""
    between_steps.SETTLING, between_steps.TIMED = 0, 3
    steps = FIRST + 8
    run = trainer(auto(LOCAL), size, check_every=0, max_steps=steps)
    run.fit(Small(), data(steps, size))
    run.save_checkpoint(path)
    before = type(run.strategy.averager).__name__  # type: ignore[attr-defined]
    watch = Watch()
    run = trainer(auto(ls.Candidate(ls.Dense(), "int4")), size, max_steps=2 * steps, callbacks=[watch])
    model = Small()
    run.fit(model, data(2 * steps, size), ckpt_path=str(path))
    return before, set(watch.engines), weights(model)


def _forward_of_one_rank(rank: int, size: int) -> list[str]:
    """Under Fabric, engines of a training before whose first step one rank looks at an output, and the others wait."""
    layer_fusion.WORTH_PLANNING = 1
    strategy = FabricStrategy(ls.Auto((LOCAL,)))
    fabric = L.Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy)
    fabric.launch()
    module = nn.Linear(4, 1)
    wrapped: Any = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    model, optimizer = wrapped
    x = torch.ones(2, 4, device=fabric.device)
    if rank == 0:
        model(x)
    fabric.barrier()
    engines = []
    for _ in range(FIRST + 3):
        optimizer.zero_grad()
        fabric.backward(model(x).sum())
        optimizer.step()
        engines.append(type(strategy.hooks[0].averager).__name__)
    return engines


def test_one_rank_may_run_a_forward_before_the_first_step(ranks: Ranks) -> None:
    first, second = ranks.run(_forward_of_one_rank, 2, timeout_s=LIMIT_S)
    assert first == second
    assert (first[0], first[-1]) == ("GradientAverager", "LocalAverager")
