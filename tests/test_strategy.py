"""What the strategy says before any process starts."""

import pickle
import re
import subprocess
import sys
import weakref
from typing import Any

import lightning as L
import pytest
from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.pytorch.strategies import StrategyRegistry
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

import lightning_sparse as ls
from lightning_sparse import fabric
from lightning_sparse.auto.policy import NAMES
from lightning_sparse.trainer.elastic_host import ElasticHost
from lightning_sparse.trainer.shown_average import ShownAverage
from lightning_sparse.trainer.signals import Signals


@pytest.mark.parametrize("variant", ["", "_spawn", "_fork", "_notebook", "_find_unused_parameters_true"])
def test_every_name_gives_a_strategy(variant: str) -> None:
    for name, kind in NAMES.items():
        for prefix in ("", "ddp_"):  # other packages look for "ddp" in a name
            strategy = StrategyRegistry.get(prefix + name + variant)
            assert isinstance(strategy, ls.SparseDDPStrategy)
            assert isinstance(strategy.compressor, kind)
            assert isinstance(STRATEGY_REGISTRY.get(prefix + name + variant), fabric.SparseDDPStrategy)


def test_names_work_in_both_lightning_packages_and_do_not_mix() -> None:
    """In a process of its own: importing pytorch_lightning changes nothing for the other tests then."""
    script = """
import warnings; warnings.simplefilter("ignore")
import lightning, pytorch_lightning, lightning_sparse as ls
from lightning_sparse import pytorch_lightning as other
for name in ("skip_reduce", "ddp_sparse_auto_find_unused_parameters_true"):
    run = pytorch_lightning.Trainer(strategy=name, accelerator="cpu", devices=2, logger=False)
    assert type(run.strategy) is other.SparseDDPStrategy
mixed = (pytorch_lightning.Trainer, ls.SparseDDPStrategy()), (lightning.Trainer, other.SparseDDPStrategy())
for trainer, strategy in mixed:
    try:
        trainer(strategy=strategy, accelerator="cpu", devices=2, logger=False)
    except ValueError as error:
        assert "invalid strategy name" in str(error), error
    else:
        raise AssertionError("accepted")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "gzip"}, "compressor must be one of skip_reduce, "),
        ({"fusion": "all"}, "fusion must be one of layer, bucket, none, or a list of patterns; got 'all'"),
        ({"residuals": "per-rank"}, "none; got 'per-rank'. Did you mean 'per_rank'?"),
        ({"timeout": 300}, "timeout must be a datetime.timedelta; got 300. Write timedelta(minutes=5), say"),
        ({"residuals": "all"}, "residuals must be one of per_rank, mean, none; got 'all'."),
        ({"skip_all_reduce_unused_params": True}, "skip_all_reduce_unused_params=True is not supported"),
        ({"ddp_comm_hook": fp16_compress_hook}, "ddp_comm_hook cannot be combined with a compressor"),
    ],
)
def test_bad_options_name_the_value_and_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        ls.SparseDDPStrategy(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"compressor": "micro", "density": 0.05}, "write SparseDDPStrategy(ls.MiCRO(density=0.05))"),
        ({"compressor": ls.OkTopk(slack=2), "density": 0.1}, "SparseDDPStrategy(ls.OkTopk(slack=2, density=0.1))"),
        ({"skip": 0.25, "dim": 0}, "write SparseDDPStrategy(ls.SkipReduce(skip=0.25))"),
        ({"at_most": 0.02}, "write SparseDDPStrategy(ls.Auto(at_most=0.02))"),
        ({"densty": 0.05}, "densty must be an option of this strategy, of DDPStrategy or of DistributedDataParallel"),
        ({"device_ids": [0]}, "got device_ids=[0]. Leave it out"),
    ],
)
def test_a_keyword_that_nobody_takes_is_refused_at_once(options: dict[str, Any], message: str) -> None:
    for kind in (ls.SparseDDPStrategy, fabric.SparseDDPStrategy):
        with pytest.raises(TypeError, match=re.escape(message)):
            kind(**options)


@pytest.mark.parametrize("name", ["sparse_topk", "sparse_auto"])
def test_unused_parameters_are_answered_with_a_name_of_ours(name: str) -> None:
    error = RuntimeError("Expected to have finished reduction in the prior iteration before starting a new one.")
    ls.SparseDDPStrategy(name).on_exception(error)
    assert f"strategy='{name}_find_unused_parameters_true'" in str(error)


def test_what_a_strategy_holds_for_a_fit_is_not_pickled_and_does_not_keep_it_alive() -> None:
    strategy = ls.SparseDDPStrategy("sparse_dense", local_steps=2, elastic=True)
    run = L.Trainer(strategy=strategy, accelerator="cpu", devices=1, barebones=True)
    strategy.connect(L.LightningModule())
    assert strategy.options.hosts is not None
    strategy.shown_average, strategy.host = ShownAverage(strategy), ElasticHost(run, strategy.options.hosts)
    strategy.signals.begin_batch()
    again = pickle.loads(pickle.dumps(strategy))
    assert (again.options, again.shown_average, again.host) == (strategy.options, None, None)
    assert vars(again.signals) == vars(Signals())

    alone = ls.SparseDDPStrategy("sparse_dense", local_steps=2)
    alone.shown_average, known = ShownAverage(alone), weakref.ref(alone)
    del alone
    assert known() is None
