"""The strategy for the package ``pytorch_lightning``, whose classes are not those of ``lightning``."""

from typing import ClassVar

from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy

from lightning_sparse.trainer.hsdp import HSDPMixin
from lightning_sparse.trainer.strategy import SparseMixin


class SparseDDPStrategy(SparseMixin, DDPStrategy):  # type: ignore[misc]  # its DDPStrategy is a stranger to the mixin's
    """:class:`lightning_sparse.SparseDDPStrategy` for a ``pytorch_lightning`` Trainer."""

    torch_io: ClassVar[tuple[type, type]] = (TorchCheckpointIO, AsyncCheckpointIO)


class SparseHSDPStrategy(HSDPMixin, ModelParallelStrategy):  # type: ignore[misc]  # as above
    """:class:`lightning_sparse.SparseHSDPStrategy` for a ``pytorch_lightning`` Trainer."""
