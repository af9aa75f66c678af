"""Whether the ranks of the tests train on one CUDA device in place of the CPU: ``TESTS_ON=cuda pytest tests/training``.

NCCL takes no two ranks of a host on one device, so they send over Gloo.  Lightning gives each rank of a host a device
of its own; here all get the first.
"""

import os
from typing import Any

import pytest
import torch
from lightning.fabric.accelerators.cuda import CUDAAccelerator as OfFabric
from lightning.fabric.strategies import ddp as fabric_ddp
from lightning.fabric.strategies import model_parallel as fabric_model_parallel
from lightning.fabric.utilities.distributed import _init_dist_connection
from lightning.pytorch.accelerators.cuda import CUDAAccelerator
from lightning.pytorch.strategies import ddp, model_parallel

ACCELERATOR = os.environ.get("TESTS_ON", "cpu")
if ACCELERATOR not in ("cpu", "cuda"):
    raise ValueError(f"TESTS_ON must be cpu or cuda; got {ACCELERATOR!r}.")


def only_on_cpu(reason: str) -> pytest.MarkDecorator:
    """Mark a test of what a device does in another way: ``reason``."""
    return pytest.mark.skipif(ACCELERATOR != "cpu", reason=reason)


def _share_the_device() -> None:
    """Have Lightning give every rank the first device, and Gloo."""
    for accelerator in (OfFabric, CUDAAccelerator):
        accelerator.parse_devices = staticmethod(lambda devices: list(range(int(devices))))  # type: ignore[method-assign]
        accelerator.get_parallel_devices = staticmethod(  # type: ignore[method-assign]
            lambda devices: [torch.device("cuda", 0) for _ in devices]
        )
    for module in (ddp, fabric_ddp, model_parallel, fabric_model_parallel):
        module._get_default_process_group_backend_for_device = lambda device: "gloo"  # type: ignore[attr-defined]
        module._init_dist_connection = _connected  # type: ignore[attr-defined]


def _connected(*given: Any, device_id: torch.device | None = None, **options: Any) -> None:
    """As Lightning connects, but for the device, by which PyTorch 2.11 splits groups in a way that Gloo cannot."""
    _init_dist_connection(*given, **options)


if ACCELERATOR == "cuda":
    _share_the_device()
