"""``python -m lightning_sparse_cli``."""

import sys

from lightning_sparse_cli import main

sys.exit(main())
