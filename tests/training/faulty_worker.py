"""One rank of a training with a fault, for torchrun: ``-m tests.training.faulty_worker``.

Arguments: compressor, folder of the checkpoints, name of a fault in ``tests.training.test_faults`` rank 1 has in its
first attempt, time limit of messages in seconds.  Training goes on from the last checkpoint there is.
"""

import os
import sys
from pathlib import Path

import torch

from tests.training import test_faults as faults


def main() -> None:
    torch.set_num_threads(1)
    name, folder, fault, timeout_s = sys.argv[1:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    what = getattr(faults, fault) if first else None
    saved = sorted(Path(folder).glob("step=*.ckpt"), key=lambda path: path.stat().st_mtime)
    result = faults.fit(rank, size, name, folder, what, 1, str(saved[-1]) if saved else None, float(timeout_s))
    torch.save(result, Path(folder) / f"rank{rank}.pt")


if __name__ == "__main__":
    main()
