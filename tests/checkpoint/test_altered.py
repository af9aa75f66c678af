"""Checkpoints that were altered, by chance or by hand: refused, or what is not carried over is named."""

import copy
import dataclasses
import functools
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.checkpoint.state import KEY, State
from tests.conftest import compress_alone
from tests.support.fuzz import TRIES, fuzzed
from tests.support.models import small, unsent
from tests.support.said import warned

SAVED = [each.name for each in dataclasses.fields(State) if each.metadata]


class Trained:
    """A training in this process, after a few steps, and what it saved."""

    def __init__(self, compressor: ls.Compressor) -> None:
        self.ddp = DistributedDataParallel(small().net)
        self.hook = ls.SparseHook(self.ddp, compressor, fusion="layer")
        for _ in range(3):
            self.step()
        names = [list(group.names) for group in self.hook.averager.groups]
        plan = {"groups": names, "compressor": repr(compressor), "size": 1}
        self.state = self.hook.state_dict() | {"plan": plan}
        self.state["checksum"] = State(**self.state).checksums()
        self.unsent = unsent(self.hook)

    def step(self) -> None:
        self.ddp(torch.randn(4, 8)).square().sum().backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in self.ddp.parameters())
        self.ddp.zero_grad()

    def load(self, state: Any) -> str:
        """What is said, as an error or a warning."""
        for group in self.hook.averager.groups:
            group.unsent.fill_(3)
        try:
            return "".join(warned(self.hook.load_state_dict, state))
        except ValueError as error:
            return str(error)

    def is_as_saved(self) -> bool:
        now = unsent(self.hook)
        return all(torch.equal(now[name], x) for name, x in self.unsent.items())


TRAININGS = {"micro": ls.MiCRO(density=0.05), "momentum": ls.MomentumCorrection(0.5, ls.OkTopk(density=0.05))}


@pytest.fixture(scope="module", params=list(TRAININGS))
def trained(request: pytest.FixtureRequest, one_rank: None) -> Iterator[Trained]:
    with pytest.MonkeyPatch.context() as patch:
        compress_alone(patch)  # so that it has memories to keep
        training = Trained(TRAININGS[request.param])
    yield training
    training.hook.close()


def places(state: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to everything in a state."""
    if path:
        yield path
    keys = state if isinstance(state, dict) else range(len(state)) if isinstance(state, list) else ()
    for key in keys:
        yield from places(state[key], (*path, key))


GARBAGE = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.binary(max_size=3),
    st.sampled_from([[], {}, [[]], {"a": 1}, [0], ["x"], -1, 0, 2, 10**30, torch.zeros(0), torch.ones(2, 2), "mean"]),
)  # fmt: skip


def changed(x: Any, how: str, garbage: Any) -> Any:
    """A tensor of another kind; of anything else ``garbage``."""
    if not isinstance(x, Tensor) or how == "garbage":
        return garbage
    return WAYS[how](x)


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "value": lambda x: torch.cat([x.reshape(-1)[:1] + 1, x.reshape(-1)[1:]]).view(x.shape),
    "nan": lambda x: torch.full_like(x, math.nan) if x.is_floating_point() else x - 1,
    "dtype": lambda x: x.to(torch.float64 if x.dtype != torch.float64 else torch.float32),
    "fewer rows": lambda x: x[:0],
    "flat": lambda x: x.reshape(-1)[:-1],
    "sparse": lambda x: x.to_sparse(),
    "more": lambda x: x[..., None].expand(*x.shape, 2),
}


@fuzzed(
    60,
    data=st.data(),
    what=st.sampled_from(["delete", "rename", "change"]),
    how=st.sampled_from(["garbage", *WAYS]),
    garbage=GARBAGE,
    vouched=st.booleans(),
    seen=st.integers(1, 2),
)
def test_an_altered_checkpoint_is_refused_or_what_is_not_carried_over_is_named(
    trained: Trained, data: st.DataObject, what: str, how: str, garbage: Any, vouched: bool, seen: int
) -> None:
    state = copy.deepcopy(trained.state)
    for _ in range(seen):
        path = data.draw(st.sampled_from(list(places(state))))
        place = functools.reduce(lambda inside, key: inside[key], path[:-1], state)
        if what == "delete":
            del place[path[-1]]
        elif what == "rename" and isinstance(place, dict):
            place[garbage if isinstance(garbage, str | int) else "other"] = place.pop(path[-1])
        else:
            place[path[-1]] = changed(place[path[-1]], how, copy.deepcopy(garbage))  # never a list within itself
        if not state:
            break
    if not vouched:
        state.pop("checksum", None)
    said = trained.load(state)
    if "are damaged: " in said:
        assert "Resume from an older checkpoint, or without them" in said
        return
    assert said or trained.is_as_saved()
    trained.step()


def test_a_genuine_checkpoint_is_loaded_without_a_word_and_each_way_to_alter_it_is_reported(trained: Trained) -> None:
    """One by one, what random changes may take long to find."""
    assert trained.load(trained.state) == ""
    assert trained.is_as_saved()
    assert set(SAVED) | {"checksum"} == set(trained.state)
    name = next(iter(trained.unsent))
    for change, expected in (
        ({"size": 0}, r"size must be .* got 0"),
        ({"steps": -1}, "steps must be .* got -1"),
        ({"steps": 7}, "checksum of what all ranks share is"),
        ({"checksum": torch.tensor([])}, "checksum must be .* got a Tensor"),
        ({"residuals": "none"}, "residuals must be .* got 'none'"),
        ({"unsent": {name: torch.full((1, 33, 8), math.nan)}, "groups": []}, "values that are not finite"),
        ({"groups": [{"names": ["nobody"], "memory": {}}]}, r"names must all be in 'unsent'; got \['nobody'\]"),
        ({"plan": {"groups": [[]]}}, "plan must be .* got a dict"),
        ({"compressor": None}, "compressor must be a string; got None"),
    ):
        assert re.search(expected, trained.load(trained.state | change)), expected
    for key in SAVED:
        assert f"{key!r} is missing" in trained.load({k: x for k, x in trained.state.items() if k != key})
    without = {key: trained.state[key] for key in SAVED}
    assert "it has no checksum, so " in trained.load(without)
    assert trained.is_as_saved()


def written(trained: Trained) -> bytes:
    file = io.BytesIO()
    torch.save({"state_dict": trained.ddp.module.state_dict(), KEY: trained.state}, file)
    return file.getvalue()


def test_a_file_that_ends_early_is_refused(trained: Trained) -> None:
    whole = written(trained)
    for end in range(0, len(whole), max(1, len(whole) // (TRIES or 20))):
        with pytest.raises((RuntimeError, EOFError, ValueError, OSError)):
            torch.load(io.BytesIO(whole[:end]), weights_only=True)


@fuzzed(60, bits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4))
def test_a_file_with_other_bits_is_refused_or_as_it_was(trained: Trained, bits: list[tuple[float, int]]) -> None:
    """PyTorch says that the file is broken, or we say that our part of it is, or it is as it was."""
    file = bytearray(written(trained))
    for place, bit in bits:
        file[int(place * len(file))] ^= 1 << bit
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            checkpoint = torch.load(io.BytesIO(file), weights_only=True)
        except Exception:  # of many kinds, from the unpickler
            return
    state = checkpoint.get(KEY) if isinstance(checkpoint, dict) else None
    assert trained.load(state) or trained.is_as_saved()


def test_a_value_altered_in_the_file_is_reported(trained: Trained) -> None:
    """PyTorch reads it without a word."""
    file = bytearray(written(trained))
    name, x = max(trained.state["unsent"].items(), key=lambda item: item[1].numel())
    at = file.index(x.numpy().tobytes())
    for byte in range(at, at + 4 * x.numel(), 41):
        altered = bytearray(file)
        altered[byte] ^= 4
        state = torch.load(io.BytesIO(altered), weights_only=True)[KEY]
        if not torch.equal(state["unsent"][name], x):
            assert "are damaged: " in trained.load(state)
