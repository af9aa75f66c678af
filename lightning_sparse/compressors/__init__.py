"""The compressors, and what goes around them."""

from lightning_sparse.compressors.base import Compressor, Dense
from lightning_sparse.compressors.importance import ImportancePruning
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.compressors.micro import MiCRO
from lightning_sparse.compressors.named import COMPRESSORS, by_name
from lightning_sparse.compressors.ok_topk import OkTopk
from lightning_sparse.compressors.random_k import RandomK
from lightning_sparse.compressors.sketch_fusion import SketchFusion
from lightning_sparse.compressors.skip_reduce import SkipReduce
from lightning_sparse.compressors.top_k import TopK
from lightning_sparse.compressors.wrappers import ExactFor, MomentumCorrection, Rounded, Warmup

# A name here is a name of a strategy, and its class is tested for every law.
COMPRESSORS |= {
    "skip_reduce": SkipReduce,
    "micro": MiCRO,
    "importance": ImportancePruning,
    "sketch_fusion": SketchFusion,
    "ok_topk": OkTopk,
    "low_rank": LowRank,
    "sparse_dense": Dense,
    "sparse_topk": TopK,
    "sparse_random_k": RandomK,
}

__all__ = [
    "COMPRESSORS",
    "Compressor",
    "Dense",
    "ExactFor",
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
