"""A strategy's name that is slightly wrong is answered with the right one, wherever it is given."""

import pickle

import pytest

import lightning_sparse as ls
from lightning_sparse.auto.policy import NAMES
from lightning_sparse.bench.compare.strategies import parse_strategies
from lightning_sparse.compressors.named import did_you_mean
from lightning_sparse.fabric import SparseDDPStrategy as FabricStrategy

MEANT = {
    "skipreduce": "skip_reduce",
    "top_k": "sparse_topk",
    "powersgd": "low_rank",
    "sparse-auto": "sparse_auto",
    "OkTopk": "ok_topk",
    "miccro": "micro",
    "skip_reduec": "skip_reduce",
    "micro_spawn": "micro",
    "ddp_sparse_auto_find_unused_parameters_true": "sparse_auto",
    "skip_reduce:skip=0.3": "skip_reduce",
}


@pytest.mark.parametrize(("given", "meant"), MEANT.items())
def test_a_misspelt_name_is_answered_with_the_right_one(given: str, meant: str) -> None:
    for make in (ls.SparseDDPStrategy, FabricStrategy):
        with pytest.raises(ValueError, match=f"Did you mean '{meant}'"):
            make(given)
    assert did_you_mean("nonsense", NAMES) == ""


def test_a_benchmark_knows_its_peers_too() -> None:
    with pytest.raises(ValueError, match=r"got 'powersgd'\. Did you mean 'powersgd_"):
        parse_strategies("ddp,powersgd")
    with pytest.raises(ValueError, match=r"got 'topk'\. Did you mean 'sparse_topk'"):
        parse_strategies("topk:density=0.1")


@pytest.mark.parametrize(
    ("given", "meant"),
    [("warmup_step", "warmup_steps"), ("warmup", "warmup_steps"), ("local", "local_group or local_steps")],
)
def test_a_misspelt_option_is_answered_with_the_right_one(given: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"Did you mean {meant}\?"):
        ls.SparseDDPStrategy("micro", **{given: 3})


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("engine.local_steps", "LocalSteps"),
        ("compressors.warmup", "Warmup"),
        ("compressors.momentum", "MomentumCorrection"),
        ("compressors.rounded", "Rounded"),
        ("monitor.metrics", "CompressionRatio"),
        ("monitor.replicas", "ReplicaCheck"),
        ("strategy", "SparseDDPStrategy"),
        ("hsdp", "SparseHSDPStrategy"),
    ],
)
def test_a_pickle_of_0_2_0_finds_the_class_that_it_names(module: str, name: str) -> None:
    found = pickle.loads(f"clightning_sparse.{module}\n{name}\n.".encode())
    assert found.__name__ == name
    assert getattr(ls, name, found) is found
