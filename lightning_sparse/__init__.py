"""PyTorch Lightning strategies that send a fraction of the gradient over slow networks and lose none of it."""

from lightning_sparse.__about__ import __version__

__all__ = ["__version__"]
