"""The command line as a module, for torchrun."""

import sys

from lightning_sparse.cli import main

sys.exit(main())
