"""A strategy's name that is slightly wrong is answered with the right one, wherever it is given."""

from collections.abc import Callable

import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry

import lightning_sparse as ls
from lightning_sparse.auto.policy import NAMES
from lightning_sparse.bench.compare.peers import contenders
from lightning_sparse.compressors.named import did_you_mean
from lightning_sparse.fabric import SparseDDPStrategy as FabricStrategy

MEANT = {
    "skipreduce": "skip_reduce",
    "skip-reduce": "skip_reduce",
    "topk": "sparse_topk",
    "top_k": "sparse_topk",
    "powersgd": "low_rank",
    "sparse-auto": "sparse_auto",
    "oktopk": "ok_topk",
    "OkTopk": "ok_topk",
    "random_k": "sparse_random_k",
}


@pytest.mark.parametrize(("given", "meant"), MEANT.items())
@pytest.mark.parametrize(
    "make",
    [
        ls.SparseDDPStrategy,
        FabricStrategy,
    ],
    ids=["SparseDDPStrategy", "fabric.SparseDDPStrategy"],
)
def test_a_misspelt_name_is_answered_with_the_right_one(make: Callable[[str], object], given: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
        make(given)


@pytest.mark.parametrize(
    ("given", "meant"),
    [("miccro", "micro"), ("MiCRO", "micro"), ("skip_reduce:skip=0.3", "skip_reduce"), ("importance_", "importance")],
)
def test_names_nearly_right_are_found(given: str, meant: str) -> None:
    assert did_you_mean(given, NAMES) == f" Did you mean {meant!r}?"


@pytest.mark.parametrize("given", ["", "nonsense", "deepspeed_stage_2", "xla"])
def test_nothing_is_made_up(given: str) -> None:
    assert did_you_mean(given, NAMES) == ""


def test_a_benchmark_knows_its_peers_too() -> None:
    with pytest.raises(ValueError, match=r"got 'powersgd'\. Did you mean 'powersgd_"):
        contenders("ddp,powersgd")
    with pytest.raises(ValueError, match=r"got 'topk'\. Did you mean 'sparse_topk'"):
        contenders("topk:density=0.1")


def test_lightning_lists_our_names_beside_its_own_and_no_wrong_ones() -> None:
    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        ours = {name for name, each in registry.items() if each["strategy"] in (ls.SparseDDPStrategy, FabricStrategy)}
        assert NAMES.keys() <= ours
        assert all(name.startswith(tuple(NAMES)) for name in ours)
        assert "ddp" in registry


def test_a_misspelt_option_is_answered_with_the_right_one() -> None:
    with pytest.raises(TypeError, match="Did you mean warmup_steps"):
        ls.SparseDDPStrategy("micro", warmup_step=3)
