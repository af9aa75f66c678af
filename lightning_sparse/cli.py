"""``python -m lightning_sparse.cli``: the command line as a module, for torchrun."""

import sys

from lightning_sparse_cli import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
