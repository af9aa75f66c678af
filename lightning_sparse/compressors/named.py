"""The compressors, by name."""

from lightning_sparse.compressors.auto import Auto
from lightning_sparse.compressors.base import Compressor, check_settings
from lightning_sparse.compressors.dense import Dense
from lightning_sparse.compressors.importance import ImportancePruning
from lightning_sparse.compressors.low_rank import LowRank
from lightning_sparse.compressors.micro import MiCRO
from lightning_sparse.compressors.ok_topk import OkTopk
from lightning_sparse.compressors.random_k import RandomK
from lightning_sparse.compressors.sketch_fusion import SketchFusion
from lightning_sparse.compressors.skip_reduce import SkipReduce
from lightning_sparse.compressors.top_k import TopK

#: Name -> class.  A name here is a name of a strategy, and is tested for every law.
COMPRESSORS: dict[str, type[Compressor]] = {
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

#: Every name of a strategy: the compressors', and the one that chooses among them.
NAMES: dict[str, type[Compressor]] = {**COMPRESSORS, "sparse_auto": Auto}


def by_name(compressor: object) -> Compressor:
    """Return a compressor with its defaults if a name is given, or the instance that is given.

    Raises:
        ValueError: for a name that is not in ``NAMES``.
        TypeError: for anything that is neither a name nor an instance, and for an instance whose settings cannot be
            compared between ranks.
    """
    if isinstance(compressor, Compressor):
        check_settings(compressor)
        return compressor
    if isinstance(compressor, str):
        if compressor in NAMES:
            return NAMES[compressor]()
        raise ValueError(
            f"compressor must be one of {', '.join(NAMES)}; got {compressor!r}. For settings of its own give an "
            "instance, such as SkipReduce(skip=0.5)."
        )
    raise TypeError(
        f"compressor must be a name ({', '.join(NAMES)}) or an instance of a Compressor; got {compressor!r}."
    )
