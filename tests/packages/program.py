"""What the trainings with other packages share: the strategy by its name, and the line with the results."""

import json
import os
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import lightning as L
import torch
from lightning.pytorch.strategies import StrategyRegistry
from pytorch_lightning.strategies import StrategyRegistry as OtherRegistry

from lightning_sparse import SparseDDPStrategy
from lightning_sparse.pytorch_lightning import SparseDDPStrategy as OtherStrategy

UNUSED = "_find_unused_parameters_true"  # DDP is to look for them


class Losses(L.Callback):
    """Notes a logged loss after each validation; a Trainer of ``pytorch_lightning`` takes it as well."""

    def __init__(self, key: str) -> None:
        self.key = key
        self.noted: dict[str, Any] = {"losses": []}

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if self.key not in trainer.callback_metrics:  # PyTorch Forecasting logs none before training
            return
        self.noted["losses"].append(float(trainer.callback_metrics[self.key]))
        self.noted["steps"] = trainer.global_step
        self.noted["parameters"] = sum(p.numel() for p in trainer.lightning_module.parameters())

    def __deepcopy__(self, memo: object) -> "Losses":
        return self  # NeuralForecast trains a copy of the model that it is given


def main(train: Callable[[str, int, Losses], object], key: str, unused: bool = False) -> None:
    """Train as the command line says (``ddp,ddp_int4 0,1,2``), print the validation losses logged as ``key``.

    ``unused`` says that DDP is to look for unused parameters.
    """
    for registry, strategy in ((StrategyRegistry, SparseDDPStrategy), (OtherRegistry, OtherStrategy)):
        for end, options in (("", {}), (UNUSED, {"find_unused_parameters": True})):
            registry.register(f"ddp_int4{end}", strategy, compressor="sparse_dense", wire_dtype="int4", **options)
    torch.set_num_threads(1)  # the two ranks share the machine's cores
    for name, seed in product(sys.argv[1].split(","), map(int, sys.argv[2].split(","))):
        L.seed_everything(seed)
        train(name + UNUSED * unused, seed, losses := Losses(key))
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(json.dumps({"strategy": name, "seed": seed, **losses.noted}), flush=True)
