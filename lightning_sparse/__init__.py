"""PyTorch Lightning strategies that send a part of the gradient over slow networks, and the rest later.

Importing this package makes its strategies known: ``Trainer(strategy="sparse_auto")``.
"""

from lightning_sparse.__about__ import __version__ as __version__
from lightning_sparse.public import *  # noqa: F403
from lightning_sparse.public import __all__ as __all__
