"""The command line as a module, for torchrun."""

import signal
import sys

from lightning_sparse.cli import main

for number in (signal.SIGTERM, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # what was measured is written down first
sys.exit(main())
