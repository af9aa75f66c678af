"""The command line as a module, for torchrun."""

import signal
import sys

from lightning_sparse.cli import main

signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that what was measured is written down
sys.exit(main())
