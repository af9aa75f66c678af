"""Ranks with different settings say so, all of them and soon; so do replicas that are not the same any more."""

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

import lightning_sparse as ls
from lightning_sparse.checkpoint.state import State
from lightning_sparse.monitor import callbacks
from lightning_sparse.network.agreement import described
from tests.support.models import Does, Small, data, small, trainer
from tests.support.processes import Ranks
from tests.support.said import refusal


def fit(rank: int, size: int, others: Mapping[str, Any], odd: int) -> str:
    """Train, on one rank with the options ``others``; returns the error."""
    mine = dict(others) if rank == odd else {}
    model = small()
    if width := mine.pop("width", None):
        model.net[0], model.net[2] = nn.Linear(8, width), nn.Linear(width, 17)
    if dtype := mine.pop("dtype", None):
        model.net[4].to(dtype)
    if mine.pop("renamed", False):
        model.last = nn.Linear(3, 3)
    return refusal(
        trainer(ls.SparseDDPStrategy(**{"compressor": "skip_reduce"} | mine), size, max_steps=3).fit,
        model,
        data(3, size),
    )


CASES = {
    "compressor": ({"compressor": ls.MiCRO(density=0.5)}, "compressor: SkipReduce(", "MiCRO(density=0.5"),
    "wire_dtype": ({"wire_dtype": "bfloat16"}, "wire_dtype: 'float32' on ranks 0, 1; 'bfloat16' on rank 2"),
    "fusion": ({"fusion": "none"}, "fusion: 'layer' on ranks 0, 1; 'none' on rank 2"),
    "nodes": ({"local_group": 3}, "local_group: 'auto' on ranks 0, 1; 3 on rank 2"),
    "shape": ({"width": 40}, "parameter net.0.weight: 'float32 [33, 8]' on ranks 0, 1; 'float32 [40, 8]' on rank 2"),
    "dtype": ({"dtype": torch.bfloat16}, "parameter net.4.bias", "'bfloat16 [3]' on rank 2"),
    "names": ({"renamed": True}, "parameter last.weight: missing on ranks 0, 1; 'float32 [3, 3]' on rank 2"),
}


def fit_each(rank: int, size: int, odd: int) -> dict[str, str]:
    return {case: fit(rank, size, others, odd) for case, (others, *_) in CASES.items()}


def test_what_one_rank_was_given_otherwise_is_named_on_every_rank(ranks: Ranks) -> None:
    """And soon: the process group's own limit is half an hour."""
    for errors in ranks.run(fit_each, 3, 2):
        for case, (_, *said) in CASES.items():
            assert "Ranks were started with different settings" in errors[case], case
            assert all(each in errors[case] for each in said), errors[case]


def buffered(odd: bool, what: str) -> Small:
    """A model with a buffer, which is another one where ``odd``."""
    model = small()
    wide = odd and what == "shape"
    model.net[2].register_buffer("table", torch.zeros(5 if wide else 4), persistent=not (odd and what == "persistent"))
    if odd and what == "more":
        model.register_buffer("more", torch.zeros(2, dtype=torch.int64))
    return model


def fit_buffered(rank: int, size: int) -> list[str]:
    errors = []
    for what in ("shape", "persistent", "more"):
        run = trainer(ls.SparseDDPStrategy("micro", local_steps=2), size, max_steps=3)
        errors.append(refusal(run.fit, buffered(rank == 1, what), data(3, size)))
    return errors


def test_a_buffer_that_is_another_on_one_rank_is_named_on_every_rank(ranks: Ranks) -> None:
    """DDP and local steps send buffers: where they differ, the process was aborted, or waited for ever."""
    named = [
        "buffer net.2.table: 'float32 [4]' on rank 0; 'float32 [5]' on rank 1",
        "buffer net.2.table: 'float32 [4]' on rank 0; 'float32 [4] persistent=False' on rank 1",
        "buffer more: missing on rank 0; 'int64 [2]' on rank 1",
    ]
    for errors in ranks.run(fit_buffered, 2):
        for error, said in zip(errors, named, strict=True):
            assert said in error


class Keeps(nn.Module):
    """Says of its state what it likes; with a buffer that is not there, and one that DDP is told to ignore."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(2, 3, dtype=torch.bfloat16))
        self.register_buffer("passing", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("nothing", None)
        self.register_buffer("own", torch.zeros(7))
        self._ddp_params_and_buffers_to_ignore = ["own"]

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {}


def test_buffers_are_described_with_whether_a_checkpoint_keeps_them() -> None:
    assert described(Keeps()) == {"buffer kept": "bfloat16 [2, 3]", "buffer passing": "int64 [] persistent=False"}
    assert "buffer inner.own" in described(nn.ModuleDict({"inner": Keeps()}))  # DDP asks the outermost module
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PyTorch 2.15 says that it will go
        scripted = torch.jit.script(nn.BatchNorm1d(3))
    assert described(scripted)["buffer running_mean"] == "float32 [3]"


def load_others(rank: int, size: int) -> list[str]:
    """What is said of a checkpoint that is another on rank 1, and of one in which rank 1's part is damaged."""
    hook = ls.SparseHook(nn.parallel.DistributedDataParallel(nn.Linear(4, 4)), "sparse_topk")
    everywhere: list[Any] = [hook.state_dict()]
    torch.distributed.broadcast_object_list(everywhere)
    state = dict(everywhere[0])
    another = {key: x for key, x in (state | {"steps": 7 * rank}).items() if key != "checksum"}
    another["checksum"] = State(**another).checksums()
    damaged = state | {"unsent": {name: x.clone() for name, x in state["unsent"].items()}}
    damaged["unsent"]["weight"][1, 2, 3] += 1e-3
    said = [refusal(hook.load_state_dict, each) for each in (another, damaged)]
    hook.close()
    return said


def test_a_checkpoint_that_is_another_or_damaged_on_one_rank_is_refused_on_every_rank(ranks: Ranks) -> None:
    for another, damaged in ranks.run(load_others, 2, gloo=True):
        assert "checkpoint: steps: 0 on rank 0; 7 on rank 1" in another
        assert "in the checkpoint are damaged: the checksum of rank 1's part is " in damaged
        assert "Resume from an older checkpoint, or without them" in damaged


def drift(rank: int, size: int, odd: int, step: int) -> tuple[str, int]:
    """Change a parameter on one rank in one step, by the least that float32 can tell."""

    def change(run: L.Trainer) -> None:
        if run.global_step == step and run.global_rank == odd:
            weight = run.lightning_module.get_parameter("net.2.bias").data[:1]
            weight.copy_(torch.nextafter(weight, weight + 1))

    run = trainer("micro", size, check_every=2, max_steps=8, callbacks=[Does("on_train_batch_start", change)])
    return refusal(run.fit, small(), data(8, size)), run.global_step


def test_a_drift_names_the_first_parameter_that_differs_and_where(ranks: Ranks) -> None:
    for error, step in ranks.run(drift, 3, 1, 4):
        assert "drifted apart: net.2.bias, the first of" in error
        assert "not the same on ranks 0, 2 and rank 1" in error
        assert step == 6  # the next check


@pytest.mark.parametrize("steps", [0, True, 1.5])
def test_a_check_needs_a_number_of_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match=f"every_n_steps must be an integer of at least 1, .* got {steps!r}"):
        ls.ReplicaCheck(every_n_steps=steps)


@pytest.mark.parametrize(("first", "last"), [(1000, 1007)])
def test_each_training_is_checked_every_so_many_steps(monkeypatch: pytest.MonkeyPatch, first: int, last: int) -> None:
    """A second training with the same callback, from the start or resumed, as often as the first."""
    checked: list[int] = []
    run: Any = SimpleNamespace(world_size=2, global_step=0, strategy=None)
    monkeypatch.setattr(callbacks, "world", lambda: None)
    monkeypatch.setattr(callbacks, "check_replicas", lambda parameters, comm, shards: checked.append(run.global_step))
    check, module = ls.ReplicaCheck(every_n_steps=2), small()
    for start, end in ((0, 50), (first, last)):
        checked.clear()
        run.global_step = start
        check.on_train_start(run, module)
        while run.global_step < end:
            run.global_step += 1
            check.on_train_batch_end(run, module, None, None, 0)
        check.on_train_end(run, module)
    assert checked == [first + 2, first + 4, first + 6, last]
