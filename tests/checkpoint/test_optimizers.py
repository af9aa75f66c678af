"""Each rank's own optimizer state comes back as it was, whatever the optimizer keeps."""

import copy
from collections import deque, namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import lightning_sparse as ls
from lightning_sparse.checkpoint.rank_local import set_tensors, tensors_everywhere
from lightning_sparse.checkpoint.state import KEY, mean_used
from tests.support.in_process import ThreadComm, ThreadRanks
from tests.support.models import Small, data, trainer, weights
from tests.support.processes import Ranks
from tests.support.said import refusal
from tests.support.same import same


def everywhere(optimizers: Sequence[Optimizer]) -> list[dict[str, Tensor]]:
    """What :func:`tensors_everywhere` returns on each rank."""
    ranks = ThreadRanks(len(optimizers))
    comms = [ThreadComm(ranks.network.group(rank)) for rank in range(ranks.size)]
    try:
        return ranks.everywhere(lambda rank: tensors_everywhere(optimizers[rank], comms[rank], torch.device("cpu")))
    finally:
        ranks.close()


def resumed(optimizers: Sequence[Optimizer], made: Callable[[], Optimizer], size: int = 0) -> list[Optimizer]:
    """New optimizers that have loaded rank 0's state, as Lightning does, and then each rank's own."""
    every = everywhere(optimizers)
    assert all(list(each) == list(every[0]) for each in every)
    rows = {name: torch.stack([each[name] for each in every]) for name in every[0]}
    again = [made() for _ in range(size or len(optimizers))]
    for rank, optimizer in enumerate(again):
        own = range(len(optimizers)) if size else range(rank, rank + 1)
        optimizer.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
        set_tensors(optimizer, {name: mean_used(x, own) for name, x in rows.items()})
    return again


def two(dtype: torch.dtype = torch.float32) -> Optimizer:
    """An optimizer of two parameters, which keeps nothing by itself."""
    return SGD([nn.Parameter(torch.ones(2, 3, dtype=dtype)), nn.Parameter(torch.ones(4, dtype=dtype))], lr=0.1)


def keeping(*states: Any, dtype: torch.dtype = torch.float32) -> Optimizer:
    """One that keeps these of its first parameters."""
    optimizer: Any = two(dtype)
    for p, state in zip(optimizer.param_groups[0]["params"], states, strict=False):
        optimizer.state[p] = state
    return optimizer


def kept(optimizer: Optimizer) -> Any:
    return optimizer.state_dict()["state"]


def ramp(rank: int, *shape: int) -> Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape) / 3 + rank


STATES: dict[str, Callable[[int], Any]] = {
    "numbers": lambda rank: {"step": 3 + rank, "ratio": 0.1 + rank, "has_skipped": rank == 1, "exp_avg": ramp(rank, 2)},
    "whole numbers": lambda rank: {"step": torch.tensor(2**60 + rank), "mask": torch.tensor([rank == 0, True])},
    "lists": lambda rank: {"bases": [[ramp(rank, 2)], [], None, rank], "pair": (ramp(rank, 2), ramp(rank, 3))},
    "a dict": lambda rank: {"of": {0: {"left": ramp(rank, 2)}, "1": ramp(rank, 3), -2: rank, "a.b:list": 1.0 + rank}},
    "a tensor": lambda rank: ramp(rank, 2, 3),
    "a growing dict": lambda rank: {"empty": {}, "seen": {0: 1} | ({1: 2} if rank else {1: 0})},
}


@pytest.mark.parametrize("of", STATES)
def test_each_rank_has_its_own_again(of: str) -> None:
    before = [keeping(STATES[of](rank), {"step": rank}) for rank in range(2)]
    for rank, after in enumerate(resumed(before, two)):
        assert same(kept(after), {0: STATES[of](rank), 1: {"step": rank}})


def test_a_number_is_a_tensor_where_it_is_one_on_another_rank() -> None:
    """LBFGS starts with the number 1, and goes on with a tensor."""
    first, second = resumed([keeping({"scale": 1, "rate": 0}), keeping({"scale": torch.tensor(0.3), "rate": 0.5})], two)
    assert same(kept(first), {0: {"scale": torch.tensor(1.0), "rate": 0.0}})
    assert same(kept(second), {0: {"scale": torch.tensor(0.3), "rate": 0.5}})


def test_another_number_of_ranks_has_the_means_and_the_first_of_whole_numbers() -> None:
    before = [keeping({"step": 3 + rank, "rate": 0.5 + rank, "history": [ramp(rank, 2)]}) for rank in range(2)]
    for after in resumed(before, two, size=3):
        assert same(kept(after), {0: {"step": 3, "rate": 1.0, "history": [ramp(0, 2) + 0.5]}})


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ([{"basis": [ramp(0, 2)]}, {"basis": [ramp(0, 3)]}], "0.basis.0: [2] on rank 0; [3] on rank 1"),
        ([{"last": [ramp(0, 2)]}, {"last": [ramp(0, 2)] * 2}], "0.last: [1] on rank 0; [2] on rank 1"),
        ([{"last": deque([ramp(0, 2)])}, {}], "got 0.last: deque. Keep it as tensors"),
        ([{}, {"of": {"pair": namedtuple("Pair", "left right")(1, 2)}}], "got 0.of.pair: Pair."),
        ([{}, {"of": {("a", 1): 2}}], "got 0.of.('a', 1): a key of type tuple"),
        ([{}, {"sparse": torch.eye(2).to_sparse(), "kind": "x"}], "got 0.kind: str, 0.sparse: Tensor"),
    ],
)
def test_a_state_that_cannot_be_saved_is_an_error_on_every_rank_that_names_it(states: Any, said: str) -> None:
    ranks = ThreadRanks(2)
    comms = [ThreadComm(ranks.network.group(rank)) for rank in range(2)]
    optimizers = [keeping(state) for state in states]
    for refused in ranks.everywhere(
        lambda rank: refusal(tensors_everywhere, optimizers[rank], comms[rank], torch.device("cpu"))
    ):
        assert "state of SGD" in refused
        assert said in refused
        assert "residuals='none'" in refused
    ranks.close()


def test_lengths_of_lists_in_older_files_are_left_out() -> None:
    optimizer = keeping({"history": [ramp(0, 2)]})
    set_tensors(
        optimizer, {"0.history:list": torch.tensor(1), "0.history.0": ramp(1, 2), "0.pair:tuple": torch.tensor(2)}
    )
    assert same(kept(optimizer), {0: {"history": [ramp(1, 2)]}})


# - on real processes


class Odd(Optimizer):
    """Steps along the mean of its last gradients, where they are not small; counts in plain numbers."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure()
        of_all: Any = self.state
        of_all["steps"] = of_all.get("steps", 0) + 1
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                last = [torch.zeros_like(p) for _ in range(4)]
                state |= {"last": last, "used": 0, "large": 0.0, "seen": torch.zeros_like(p, dtype=torch.int64)}
            if p.grad.norm() > state["large"] / (1 + state["used"]):
                state["last"] = [*state["last"][1:], p.grad.clone()]
                state["used"] += 1
            state["large"] += float(p.grad.norm())
            state["seen"] += p.grad > 0
            with torch.no_grad():
                p.sub_(torch.stack(state["last"]).mean(0) / (5 + of_all["steps"]) * (1 + 0.1 * (state["seen"] % 2)))
        return loss


class Oddly(Small):
    """Trained by it."""

    def configure_optimizers(self) -> Any:
        return Odd(self.parameters())


def resume(rank: int, size: int, folder: Path) -> list[tuple[Tensor, Any]]:
    """The weights and states of 6 steps, then of the last 3 of them, each rank from its own and from the means."""

    def train(steps: int, residuals: str, save: bool = False, start: Path | None = None) -> Any:
        torch.manual_seed(0)
        strategy = ls.SparseDDPStrategy("micro", local_steps=2, residuals=residuals)
        saver = [ModelCheckpoint(folder, filename=residuals, every_n_train_steps=3)] if save else []
        run = trainer(strategy, size, max_steps=steps, callbacks=saver)
        run.fit(Oddly(), data(3, size), ckpt_path=start)
        return run

    ends = [train(6, "per_rank")]
    for residuals in ("per_rank", "mean"):
        train(3, residuals, save=True)
        ends.append(train(6, residuals, start=folder / f"{residuals}.ckpt"))
    return [(weights(run.lightning_module), kept(run.optimizers[0])) for run in ends]


def test_a_training_with_an_optimizer_of_one_s_own_is_resumed_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    for (trained, state), (after, again), (_, mean) in ranks.run(resume, 2, tmp_path):
        assert torch.equal(trained, after)
        assert same(state, again)
        assert state["steps"] == mean["steps"] == 6
    file = torch.load(tmp_path / "mean.ckpt", weights_only=True)[KEY]["local"]["optimizers"][0]
    assert file["steps:number"] == 3
    assert file["0.seen"].dtype == torch.int64
