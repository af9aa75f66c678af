"""The command line as a module of the package, for torchrun: ``python -m lightning_sparse.cli``."""

import sys

from lightning_sparse_cli import command as command

if __name__ == "__main__":
    sys.exit(command())
