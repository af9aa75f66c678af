"""The compressors, and what goes around them."""

from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.dense import Dense
from lightning_sparse.compressors.importance import ImportancePruning
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.compressors.micro import MiCRO
from lightning_sparse.compressors.momentum import MomentumCorrection
from lightning_sparse.compressors.named import COMPRESSORS, by_name
from lightning_sparse.compressors.ok_topk import OkTopk
from lightning_sparse.compressors.random_k import RandomK
from lightning_sparse.compressors.rounded import Rounded
from lightning_sparse.compressors.sketch_fusion import SketchFusion
from lightning_sparse.compressors.skip_reduce import SkipReduce
from lightning_sparse.compressors.top_k import TopK
from lightning_sparse.compressors.warmup import DensityLadder, Warmup

__all__ = [
    "COMPRESSORS",
    "Compressor",
    "Dense",
    "DensityLadder",
    "ImportancePruning",
    "LowRank",
    "MiCRO",
    "MomentumCorrection",
    "OkTopk",
    "RandomK",
    "Rounded",
    "SketchFusion",
    "SkipReduce",
    "TopK",
    "Warmup",
    "by_name",
]
