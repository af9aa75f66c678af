"""PyTorch Lightning strategies that send a part of the gradient over slow networks, and the rest later.

Importing this package makes its strategies known: ``Trainer(strategy="sparse_auto")``.
"""

import sys

from lightning_sparse.__about__ import __version__
from lightning_sparse.auto.policy import Auto, Candidate
from lightning_sparse.compressors import (
    COMPRESSORS,
    Compressor,
    Dense,
    ImportancePruning,
    LowRank,
    MiCRO,
    MomentumCorrection,
    OkTopk,
    RandomK,
    SketchFusion,
    SkipReduce,
    TopK,
    Warmup,
)
from lightning_sparse.compressors.group import Group
from lightning_sparse.hook import SparseHook
from lightning_sparse.local_steps.settings import LocalSteps
from lightning_sparse.monitor.callbacks import CompressionMonitor, ReplicaCheck
from lightning_sparse.monitor.record import CompressionRatio, ThresholdError
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.elastic import Elastic
from lightning_sparse.registry import register
from lightning_sparse.selection.sparse import Sparse
from lightning_sparse.simulation import Simulated, simulate
from lightning_sparse.trainer.hsdp import SparseHSDPStrategy
from lightning_sparse.trainer.strategy import SparseDDPStrategy

register()

# A pickle names a class by its module.  These were such modules in 0.2.0, and hyperparameters in checkpoints name them.
for _old, _class in {
    "compressors.momentum": MomentumCorrection,
    "compressors.rounded": Warmup,  # beside Rounded
    "compressors.warmup": Warmup,
    "engine.local_steps": LocalSteps,
    "hsdp": SparseHSDPStrategy,
    "monitor.metrics": CompressionRatio,
    "monitor.replicas": ReplicaCheck,
    "strategy": SparseDDPStrategy,
}.items():
    sys.modules.setdefault(f"{__name__}.{_old}", sys.modules[_class.__module__])

__all__ = [
    "COMPRESSORS",
    "Auto",
    "Candidate",
    "Comm",
    "CompressionMonitor",
    "CompressionRatio",
    "Compressor",
    "Dense",
    "Elastic",
    "Group",
    "ImportancePruning",
    "LocalSteps",
    "LowRank",
    "MiCRO",
    "MomentumCorrection",
    "OkTopk",
    "RandomK",
    "ReplicaCheck",
    "Rounds",
    "Simulated",
    "SketchFusion",
    "SkipReduce",
    "Sparse",
    "SparseDDPStrategy",
    "SparseHSDPStrategy",
    "SparseHook",
    "ThresholdError",
    "TopK",
    "Warmup",
    "__version__",
    "register",
    "simulate",
]
